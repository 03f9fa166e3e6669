import { writeFileSync } from 'node:fs';
import https from 'node:https';
import { suite } from 'node:test';
import { statusOf } from './answers.ts';
import { assert, closed, linesOf, until } from './assertions.ts';
import { startBackend } from './backend.ts';
import { certificate, CERTS } from './certificates.ts';
import { type Address, ask, open, raw, statusesOf } from './client.ts';
import { AT_INFO } from './configs.ts';
import { fileWith } from './files.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { bytesOf } from './rows.ts';
import { ABOUT, BEARER, HEALTH, HELLO, MESSAGE, SECRET, sized } from './samples.ts';
import { cli, PATIENT_MS, startBoth, startGateway } from './start.ts';
import { accepted, RECEIVING, startReceiving } from './websocket.ts';

suite('tls', SIDE_BY_SIDE, () => { // Nothing else ended a TLS handshake, and a thousand of them locked out all other clients.
  test('https to a plain http port, and plain http to an https port, is a warning once a minute; a TLS handshake that stalls is ended', async (t) => {
    for (const tls of [undefined, certificate(t)]) {
      let now = Date.now();
      // A handshake that stalls is ended at once, without the wait for a client that has been refused.
      const options = { now: () => now, headersTimeoutMs: 200, ...tls && { lingerMs: PATIENT_MS } };
      const { gateway } = await startBoth(t, { ...AT_INFO, ...tls && { tls } }, options);
      const warnings = (): unknown[] =>
        linesOf(gateway, /^a client sent/).map((line) => `${line.level} ${line.client} ${line.message}`);
      const mistake = (): Promise<string> =>
        raw({ ...gateway, ca: tls ? undefined : [] } as Address, tls ? HEALTH : '');
      for (const begun of tls ? ['', '\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03'] : []) {
        await raw({ port: gateway.port }, Buffer.from(begun, 'latin1'));
      }
      for (let i = 0; i < 3; i++) await mistake();
      const words = tls ? 'plain http (or something else) to this https port' : 'https to this plain http port';
      assert.deepEqual(warnings(), [`warn 127.0.0.1 a client sent ${words}`]);
      now += 60_001;
      await mistake();
      assert.equal(warnings().length, 2);
    }
  });

  // Over TLS it was read as the start of another handshake. The whole Connection header was dropped.
  test('a wish for another protocol (Upgrade), or for a WebSocket with a body, is an ordinary request, over TLS too', async (t) => {
    const h2c = 'Connection: Upgrade, X-Hop, HTTP2-Settings | Upgrade: h2c | HTTP2-Settings: AAMAAABk | X-Hop: secret';
    const sends = [HELLO, sized(300_000)].map((body) =>
      `201 send | ${h2c} | Content-Length: ${body.length} || ${body}`
    );
    const webSocket = sends[0]!.replace(h2c, 'Connection: Upgrade | Upgrade: websocket');
    for (const more of [{}, { tls: certificate(t) }]) {
      const { backend, gateway } = await startReceiving(t, undefined, more);
      const refused = `401 GET /v1/about HTTP/1.1 | Host: x | ${h2c}`;
      const withBody = '200 about | Connection: Upgrade | Upgrade: websocket | Content-Length: 2 || {}';
      for (const row of [`200 about | ${h2c}`, withBody, ...sends, webSocket, refused]) {
        const { socket, text } = open(t, gateway, bytesOf(row.slice(4)));
        await until(() => text().includes('\r\n\r\n'));
        assert.equal(statusOf(text()), Number(row.slice(0, 3)), row.slice(0, 60));
        socket.destroy();
        const { upgrade, 'x-hop': hop, 'http2-settings': settings } = backend.seen.at(-1)!.headers;
        assert.deepEqual([upgrade, hop, settings], [undefined, undefined, undefined]);
      }
      assert.deepEqual([backend.seen.length, backend.sent.length, backend.sockets.length], [5, 3, 0]);
    }
  });

  test('the gateway speaks TLS, and a reload brings a new certificate without dropping a connection', async (t) => {
    const tls = certificate(t);
    const { backend, gateway } = await startReceiving(t, undefined, { tls });
    assert.match(gateway.url, /^https:/);
    const agent = new https.Agent({ keepAlive: true });
    t.after(() => agent.destroy());
    const before = await ask(gateway, { body: MESSAGE, headers: BEARER, agent });
    assert.equal(before.status, 201);
    const { 'x-forwarded-proto': scheme, 'x-forwarded-for': client } = backend.seen[0]!.headers;
    assert.deepEqual([scheme, client], ['https', '127.0.0.1']);
    writeFileSync(tls.cert, CERTS[1].cert);
    writeFileSync(tls.key, CERTS[1].key);
    gateway.reload({ ...RECEIVING, tls });
    const { fingerprint } = await ask(gateway, { headers: BEARER, agent });
    assert.equal(fingerprint, before.fingerprint, 'the open connection lives on');
    const after = await ask(gateway, { headers: BEARER });
    assert.equal(after.status, 200);
    assert.notEqual(after.fingerprint, before.fingerprint);
    assert.equal(linesOf(gateway, /^reloaded/).at(-1)!.needsRestart, undefined);
    const { text } = await accepted(t, gateway);
    backend.sockets[0]!.write('hello');
    await until(() => text().endsWith('hello'));
  });

  test('a reload that turns TLS on or off takes effect at the next start, which its log line reports', async (t) => {
    const backend = await startBackend(t);
    const tls = certificate(t);
    for (const [before, after] of [[{}, { tls }], [{ tls }, {}]]) {
      const gateway = await startGateway(t, backend, before);
      gateway.reload({ ...before, rate: '1000/1s' });
      assert.equal(linesOf(gateway, /^reloaded/).at(-1)!.needsRestart, undefined);
      gateway.reload(after!);
      assert.equal(linesOf(gateway, /^reloaded/).at(-1)!.needsRestart, 'tls');
      assert.deepEqual(await statusesOf(gateway, { headers: BEARER }), [200], `it speaks ${gateway.url} as before`);
    }
  });

  test('bytes other than TLS end their connection on an https port, although the client keeps it open', async (t) => {
    const { gateway } = await startBoth(t, { tls: certificate(t) });
    const { socket } = open(t, { port: gateway.port }, ABOUT);
    await closed(socket.resume(), 'the gateway to close the connection');
  });

  test('a certificate of the gateway that has expired, is not valid yet or expires within 14 days is a warning at start, on reload and in --check', async (t) => {
    const dayMs = 86_400_000;
    const [beginMs, endMs] = [Date.parse('2026-11-21T03:10:21Z'), Date.parse('2126-10-28T03:10:21Z')];
    const tls = certificate(t);
    const backend = await startBackend(t);
    const clock = { nowMs: endMs - 14 * dayMs };
    const rows: [nowMs: number, state: string][] = [
      [endMs - 14 * dayMs + 1, 'expires soon, or is not valid yet'],
      [endMs, 'expires soon, or is not valid yet'],
      [endMs + 1, 'has expired'],
      [beginMs - 1, 'expires soon, or is not valid yet'],
    ];
    const config = fileWith(t, { tokens: { a: { secret: SECRET } }, tls });
    const startThen = () => startGateway(t, backend, { tls }, { now: () => clock.nowMs });
    const gateway = await startThen();
    assert.equal(linesOf(gateway, /^listening$/)[0]!.warning, undefined);
    for (const [nowMs, state] of rows) {
      const dates = 'Nov 21 03:10:21 2026 GMT to Oct 28 03:10:21 2126 GMT';
      const warning = `the certificate in tls.cert ${state}: ${dates}`;
      clock.nowMs = nowMs;
      assert.equal(linesOf(await startThen(), /^listening$/)[0]!.warning, warning);
      gateway.reload({ tls });
      assert.equal(linesOf(gateway, /^reloaded$/).at(-1)!.warning, warning);
      // `--check` reads the machine's clock, in the turn in which it is called.
      const { now } = Date;
      Date.now = () => nowMs;
      const checking = cli(['--check', '--config', config]);
      Date.now = now;
      const { stdout } = await checking;
      assert.ok(stdout.replace(/\s+/g, ' ').includes(`warning: ${warning}`), stdout);
    }
    clock.nowMs = beginMs;
    gateway.reload({ tls });
    assert.equal(linesOf(gateway, /^reloaded$/).at(-1)!.warning, undefined);
  });
});
