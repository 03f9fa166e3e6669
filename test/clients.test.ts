import { suite } from 'node:test';
import { assert, difference, requests } from './assertions.ts';
import { askAsCurl, raw } from './client.ts';
import { ALL_METHODS, METHOD_NAMES } from './configs.ts';
import { CONNECTING } from './files.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { table } from './rows.ts';
import { HELLO, SECRET } from './samples.ts';
import { startBoth } from './start.ts';

suite('clients', SIDE_BY_SIDE, () => {
  table(
    "Home Assistant's library requests GET /v1/about with userinfo, then sends, and needs exactly 201 and JSON",
    {},
  )`
    * basic | User-Agent: python-requests/2.32.5 | Accept-Encoding: gzip, deflate | Accept: */*
    GET /v1/about → 200 | Content-Type: application/json; charset=utf-8 | "{"versions":["v1","v2"],"
    Content-Type: application/json | ${
    HELLO.slice(0, -1)
  },"base64_attachments":["aW1hZ2U="]} → 201 | same | "[{"timestamp":"1700000000000"}]"`;

  table('shoutrrr sends a bearer token, frigate-notify no Content-Type, alertmanager-webhook-signal empty fields', {})`
    * bearer | User-Agent: Go-http-client/1.1 → 201
    ${HELLO} → same
    ${HELLO.slice(0, -1)},"base64_attachments":null} → same
    ${
    HELLO.slice(0, -1)
  },"base64_attachments":null,"mentions":null,"quote_mentions":null,"quote_author":"","quote_message":"","sticker":"","text_mode":""} → same
    ${HELLO.slice(0, -1)},"recipient":"","link_preview":null,"auth":null} → same
    ${HELLO.slice(0, -1)},"recipient":null,"members":null,"admins":null,"answers":null,"selected_answers":null} → same`;

  table('wget sends no credential until it is challenged; signalbot requests GET /v1/health', {})`
    ${HELLO} → 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer realm="signal"
    basic | ${HELLO} → 201 | same
    bearer | GET /v1/health → 204`;

  test('a client that starts with TLS, as signalbot does, gets 400', async (t) => {
    const { backend, gateway } = await startBoth(t);
    const hello = Buffer.from('160301010e0100010a0303000102030405060708090a0b0c0d0e0f', 'hex');
    const refusal = /^HTTP\/1\.1 400 Bad Request\r\nConnection: close\r\n[^]*"code":"bad_request"/;
    assert.match(await raw(gateway, hello), refusal);
    assert.equal(backend.connections, 0);
  });

  test('the curl lines of docs/clients.md are the authentication methods, each once', async (t) => {
    const lines = Array.from(
      CONNECTING.matchAll(/^(curl .*?) +# (\w+)$/gm),
      ([, line, method]) => [line!, method!] as const,
    );
    const table = Array.from(
      CONNECTING.matchAll(/^\| (\w+) \| .* \| (on|off) \|$/gm),
      ([, method, state]) => [method, state],
    );
    const methods = lines.map(([, method]) => method);
    assert.deepEqual(
      methods,
      table.map(([method]) => method),
      "the methods of docs/clients.md's curl lines, and of its table",
    );
    assert.deepEqual(difference("docs/clients.md's curl lines", methods, 'METHOD_NAMES', METHOD_NAMES), []);
    const [, send] = /^SEND='(.*)'$/m.exec(CONNECTING)!;
    for (const config of [ALL_METHODS, {}]) {
      const { backend, gateway } = await startBoth(t, config);
      for (const [i, [line, method]] of lines.entries()) {
        const mine = line.replace('TOKEN', SECRET).replace('8880', String(gateway.port))
          .replace(/"(\{.*)\$SEND\}"/, (_, start: string) => `'${start.replaceAll('\\', '')}${send}}'`);
        const isTaken = config === ALL_METHODS || table[i]![1] === 'on';
        assert.equal((await askAsCurl(mine)).status, isTaken ? 201 : 401, method);
        if (isTaken) assert.equal(requests(gateway).at(-1)!.auth, method);
      }
      const taken = table.filter(([, state]) => config === ALL_METHODS || state === 'on');
      assert.equal(backend.sent.length, taken.length);
    }
  });
});
