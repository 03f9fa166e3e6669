import { once } from 'node:events';
import { suite } from 'node:test';
import { fileURLToPath } from 'node:url';
import { outcomeOf, statusOf } from './answers.ts';
import { assert, closed, linesOf, requests, until, within } from './assertions.ts';
import { startBackend } from './backend.ts';
import { certificate } from './certificates.ts';
import { ask, fillBuffers, open, raw, TELLS_FULL_BUFFERS, trickle, untilAnswering } from './client.ts';
import { tokens } from './configs.ts';
import { fileWith } from './files.ts';
import { FILE } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { answerAll, arrived, beginLarge, LARGE, queueUp, send, startHeld, statusFor } from './held.ts';
import { bytesOf } from './rows.ts';
import { isNode, LOADER } from './runtime.ts';
import { ABOUT, BEARER, HEALTH, HELLO, MESSAGE, OTHER, post, REFUSED, SECRET, SEND } from './samples.ts';
import { AS_IT_IS, type Program, script, start, startBoth, startGateway, startHolding, startProcess } from './start.ts';

suite('shutdown', SIDE_BY_SIDE, () => { // node:http considered the connection idle.
  test(
    'closing delivers a response that has ended and that its client has not read yet',
    TELLS_FULL_BUFFERS,
    async (t) => {
      const backend = await startBackend(t);
      const gateway = await startGateway(t, backend, { ...tokens({}), log: { level: 'debug' }, shutdown: '1h' });
      const { socket: idle, text: refusal } = open(t, gateway, REFUSED);
      await until(() => refusal().endsWith('}\n'));
      const { client } = await fillBuffers(t, gateway);
      const closing = gateway.close();
      let text = '';
      client.setEncoding('latin1').on('data', (chunk) => (text += chunk)).resume();
      await closed(client);
      assert.equal(text.match(/"requestId":"[^"]*"}\n/g)!.length, text.split('HTTP/1.1 ').length - 1);
      await closing;
      await closed(idle);
    },
  );

  // Before Node 26, and on Deno, this took the whole deadline, and "docker stop" killed what was still running.
  test('closing ends a connection on which no request has begun at once', async (t) => {
    for (const more of [{}, { tls: certificate(t) }]) {
      const patient = { headersTimeoutMs: 1e6, stallTimeoutMs: 1e6 }; // so that nothing else ends these connections
      const gateway = await startGateway(t, { url: 'http://127.0.0.1:1' }, { shutdown: '1h', ...more }, patient);
      const { socket: kept } = open(t, gateway, HEALTH);
      await once(kept, 'data');
      const sockets = [kept, open(t, { port: gateway.port }).socket];
      if ('tls' in more) {
        const { socket: silent } = open(t, gateway);
        await once(silent, 'secureConnect');
        sockets.push(silent);
      }
      await Promise.all(sockets.map((socket) => socket.connecting && once(socket, 'connect')));
      // Once the gateway knows a connection that was accepted after all of these, it knows these too.
      await raw(gateway, bytesOf('GET /healthz HTTP/1.1 | Host: x | Connection: close'));
      await gateway.close();
      await Promise.all(sockets.map((socket) => closed(socket.resume())));
      assert.match(gateway.log.at(-1)!, /"message":"stopped"/);
    }
  });

  test('closing keeps to its deadline although a client has not finished its TLS handshake', async (t) => {
    const gateway = await startGateway(t, { url: 'http://127.0.0.1:1' }, { shutdown: '300ms', tls: certificate(t) });
    for (const begun of ['', '\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03']) {
      const { socket } = open(t, { port: gateway.port }, Buffer.from(begun, 'latin1'));
      await once(socket, 'connect');
    }
    await ask(gateway, { path: '/healthz' }); // its connection was accepted after the others
    await within(gateway.close(), 'the end of the gateway', 5000);
    assert.match(gateway.log.at(-1)!, /"message":"stopped"/);
  });

  test('closing lets a request finish, also over TLS, and its response has Connection: close', async (t) => {
    for (const more of [{}, { tls: certificate(t) }]) {
      const { backend, gateway } = await startHeld(t, 1, { shutdown: '1h', ...more });
      const { socket, text } = open(t, gateway, SEND);
      await until(() => backend.acting === 1);
      const closing = gateway.close();
      backend.answer();
      await Promise.all([closing, closed(socket)]);
      assert.match(text(), /^HTTP\/1\.1 201 Created\r\n/);
      assert.match(text(), /\r\nConnection: close\r\n/);
    }
  });

  test('closing lets running requests finish, refuses new and waiting ones at once, and keeps to its deadline', async (t) => {
    const { backend, gateway } = await startHeld(t, 1, { shutdown: '1h' });
    // Its connection is open and in the middle of its headers when closing starts.
    const { socket: late, text } = open(t, gateway, 'GET /v1/about HTTP/1.1\r\nHost: x\r\n');
    const uploads = [await beginLarge(gateway, backend), await beginLarge(gateway, backend)] as const;
    const first = send(gateway, 'first');
    await until(() => backend.acting === 1);
    uploads[0].end(LARGE.slice(-1));
    const statuses = uploads.map(statusFor);
    const [small] = await queueUp(gateway, ['small']);
    const closing = gateway.close();
    assert.equal(outcomeOf(await small!), '503 shutting_down');
    uploads[1].end(LARGE.slice(-1)); // asks for its slot only now
    assert.deepEqual(await Promise.all(statuses), [503, 503]);
    late.write('\r\n');
    await closed(late);
    assert.equal(outcomeOf(text()), '503 shutting_down');
    await assert.rejects(ask(gateway, {}), { code: 'ECONNREFUSED' });
    await answerAll(backend, [first]);
    await closing;
    await gateway.close(); // twice does no harm
    assert.deepEqual(arrived(backend), ['first']);
  });

  test('closing lets an upload finish of which the backend has a part', async (t) => {
    const { backend, gateway } = await startBoth(t, { shutdown: '1h' });
    const upload = await beginLarge(gateway, backend);
    const closing = gateway.close();
    upload.end(LARGE.slice(-1));
    assert.equal(await statusFor(upload), 201);
    await closing;
  });

  test('closing ends a connection that its client would keep open, once the response that had started before is complete', async (t) => {
    const { gateway, finish } = await startHolding(t, { shutdown: '1h' });
    Object.assign(gateway.server, { keepAliveTimeout: 0 });
    const { socket, text } = open(t, gateway, ABOUT.replace('about', 'about?hang&begun'));
    await until(() => text().includes('first, '));
    const closing = gateway.close();
    finish();
    await within(closing, 'the end of the gateway');
    await closed(socket);
    assert.match(text(), /^Connection: keep-alive\r$[^]*and last/im);
  });

  test('closing: at the deadline a request that the backend has is 504, any other 503, each with Connection: close, and the gateway stops waiting', async (t) => {
    const { backend, gateway } = await startHolding(t, { shutdown: '1s' });
    const clients = [
      [SEND, '504 backend_timeout'],
      [ABOUT.replace('about', 'about?hang'), '504 backend_timeout'],
      [post(SECRET, 200_000) + HELLO.slice(0, -1).padEnd(100_000), '503 shutting_down'],
      [`${post(SECRET, 100)}{`, '503 shutting_down'],
      ['POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{', '503 shutting_down'],
    ].map(([bytes, outcome]) => ({ ...open(t, gateway, bytes), outcome }));
    const refused = trickle(t, gateway, post(OTHER, 1_000_000));
    await until(() => backend.seen.length === 3 && requests(gateway).length === 1);
    await gateway.close();
    for (const { socket, text, outcome } of clients) {
      await closed(socket);
      assert.equal(outcomeOf(text()), outcome);
      assert.match(text(), /^connection: close\r$/im);
    }
    assert.equal(statusOf(await refused), 401);
    assert.deepEqual(requests(gateway).map((line) => line.status).sort(), [401, 503, 503, 503, 504, 504]);
  });

  test('closing: a response that has started is cut off at the deadline, and logged as shutting_down', async (t) => {
    const { gateway } = await startHolding(t, { shutdown: '500ms' });
    const { socket, text } = open(t, gateway, ABOUT.replace('about', 'about?hang&begun'));
    await until(() => text().includes('first, '));
    await gateway.close();
    await closed(socket);
    assert.deepEqual(requests(gateway).map(outcomeOf), ['200 shutting_down']); // with the status that the client saw
  });

  test('closing: running requests have at least half of a "shutdown" under a second', async (t) => {
    const { backend, gateway } = await startHolding(t, { shutdown: '600ms' });
    open(t, gateway, SEND);
    await until(() => backend.seen.length === 1);
    const startedMs = performance.now();
    const closing = gateway.close();
    await until(() => requests(gateway).length === 1);
    const ms = performance.now() - startedMs;
    assert.equal(outcomeOf(requests(gateway)[0]), '504 backend_timeout');
    assert.ok(ms > 290, `the request was ended after ${ms} ms`);
    await closing;
  });

  test('SIGTERM and SIGINT stop the process with 0 after the running request', async (t) => {
    for (const signal of ['SIGTERM', 'SIGINT'] as const) {
      const { backend, finish } = await startHolding(t);
      const gateway = await startProcess(t, { backend });
      const running = ask(gateway, { body: MESSAGE, headers: BEARER });
      await until(() => backend.seen.length === 1);
      const closing = gateway.close(signal);
      // The gateway refuses new connections as soon as it handles the signal.
      await untilAnswering(gateway, false);
      finish();
      assert.equal((await running).status, 200);
      await closing;
      await until(() => gateway.output().includes('"stopped"'));
    }
  });

  test('the same signal again ends the process at once, although a request is still running', async (t) => {
    const { backend } = await startHolding(t);
    const { child, ...gateway } = await startProcess(t, { backend, env: { GATEWAY_SHUTDOWN: '1h' } });
    open(t, gateway, SEND);
    await until(() => backend.seen.length === 1);
    const ended = once(child, 'exit');
    process.kill(child.pid!, 'SIGTERM');
    await untilAnswering(gateway, false);
    process.kill(child.pid!, 'SIGTERM');
    assert.deepEqual(await within(ended, 'the end of the process'), [null, 'SIGTERM']);
  });

  // The signal handlers were set shortly after the log line "listening".
  test('SIGTERM stops the process even if closing the gateway fails', async (t) => {
    const code = `
    import http from 'node:http';
    import { run } from ${JSON.stringify(FILE.href)};
    http.Server.prototype.close = function () { this.emit('error', new Error('planted in close')); };
    await run([], process.env, () => Buffer.alloc(0));`;
    const file = fileWith(t, code, 'script.mjs');
    const gateway = await startProcess(t, { program: [...AS_IT_IS.slice(0, -1), file] as unknown as Program });
    await gateway.close();
    assert.match(String(linesOf(gateway, /^internal error$/).at(-1)?.stack), /planted in close/);
  });

  test('a SIGTERM at the moment when the gateway starts to listen stops the process with 0, also with --demo', {
    skip: !isNode && 'only Node loads a module before the program',
  }, async (t) => {
    const code = `const { stdout } = process, { write } = stdout;
    stdout.write = (text, ...more) => {
      if (String(text).includes('"listening"')) process.kill(process.pid, 'SIGTERM');
      return write.call(stdout, text, ...more);
    };`;
    for (const args of [[], ['--demo']]) {
      const program: Program = [process.execPath, ...LOADER, '--import', script(t, code).at(-1)!, fileURLToPath(FILE)];
      const child = start(args, { GATEWAY_LISTEN: '127.0.0.1:0', GATEWAY_LOG_FORMAT: 'json' }, program);
      assert.deepEqual(await once(child, 'close'), [0, null], child.output());
      assert.match(child.output(), /"listening"/);
    }
  });
});
