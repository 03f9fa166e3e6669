import { once } from 'node:events';
import { suite } from 'node:test';
import { assert, until } from './assertions.ts';
import { startBackend } from './backend.ts';
import { ask, beginSend } from './client.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { BEARER, FROM, HELLO, MESSAGE, MIB, OTHER, SECRET } from './samples.ts';
import { SPELLINGS } from './spellings.ts';
import { runProcess, startProcess } from './start.ts';
import { accepted, startUpgradeBackend } from './websocket.ts';

// What every runtime must be able to do, tried from outside: Bun runs these and gateway.test.ts alone.
suite('smoke', SIDE_BY_SIDE, () => {
  test('a token is accepted in each place and spelling, another one in none', async (t) => {
    const backend = await startBackend(t);
    const env = { AUTH_METHODS: 'bearer,basic,query,path,body' };
    const gateway = await startProcess(t, { backend, env });
    for (const { name, ask: make } of SPELLINGS) {
      const before = backend.seen.length;
      const request = { method: 'POST', path: '/v2/send', body: MESSAGE };
      assert.equal((await ask(gateway, { ...request, ...make(OTHER) })).status, 401, name);
      assert.equal(backend.seen.length, before, name);
      assert.equal((await ask(gateway, { ...request, ...make(SECRET) })).status, 201, name);
      assert.equal(backend.seen.length, before + 1, name);
      const { url, rawHeaders, body } = backend.seen.at(-1)!;
      assert.ok(![url, ...rawHeaders, String(body)].join('\n').includes(SECRET), `${name}: the backend saw the token`);
    }
  });

  test('what a token may not do is refused, and the backend sees nothing', async (t) => {
    const backend = await startBackend(t);
    const gateway = await startProcess(t, { backend });
    const setup = await ask(gateway, { method: 'POST', path: `/v1/register/${FROM}`, headers: BEARER });
    assert.deepEqual([setup.status, setup.json.code], [403, 'setup_blocked']);
    assert.equal((await ask(gateway, { path: '/v1/unknown', headers: BEARER })).status, 404);
    assert.equal((await ask(gateway, { path: '/v1/about/../about', headers: BEARER })).status, 400);
    assert.deepEqual(backend.seen, []);
  });

  test('a body of 20 MiB arrives as it was sent', async (t) => {
    const backend = await startBackend(t);
    const gateway = await startProcess(t, { backend });
    const body = `${HELLO.slice(0, -1)},"base64_attachments":["${'A'.repeat(20 * MIB)}"]}`;
    const req = beginSend(gateway, { ...BEARER, 'content-length': body.length });
    const responded = once(req, 'response');
    req.end(body);
    const [res] = await responded;
    assert.equal(res.resume().statusCode, 201);
    assert.ok(backend.seen[0]!.body.equals(Buffer.from(body)), 'the body is another one');
  });

  test('a WebSocket receives, and a SIGTERM ends it and the process', async (t) => {
    const backend = await startUpgradeBackend(t);
    const gateway = await startProcess(t, { backend, env: { ALLOW: 'receive' } });
    const { socket, text } = await accepted(t, gateway);
    backend.sockets[0]!.write('from the backend');
    await until(() => text().endsWith('from the backend'), 'what the backend sends');
    socket.write('from the client');
    const [received] = await once(backend.sockets[0]!, 'data');
    assert.equal(String(received), 'from the client');
    await gateway.close('SIGTERM');
  });

  test('a mistake in the configuration ends the process with 2 before the port opens', async () => {
    const { code, stderr } = await runProcess([], { env: { API_TOKENS: SECRET, ALLOW: 'sned' } });
    assert.equal(code, 2, stderr);
    assert.ok(!stderr.includes(SECRET), stderr);
  });
});
