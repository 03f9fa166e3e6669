import { once } from 'node:events';
import { renameSync, rmSync, writeFileSync } from 'node:fs';
import { mkdir, symlink } from 'node:fs/promises';
import http from 'node:http';
import net from 'node:net';
import { join } from 'node:path';
import type { Duplex } from 'node:stream';
import { suite } from 'node:test';
import { connect as tlsConnect } from 'node:tls';
import { fileURLToPath } from 'node:url';
import { outcomeOf, statusOf } from './answers.ts';
import {
  assert,
  closed,
  difference,
  groupsOf,
  linesOf,
  pass,
  problemsOf,
  requests,
  until,
  within,
} from './assertions.ts';
import { type Backend, startBackend } from './backend.ts';
import { certificate, CERTS } from './certificates.ts';
import { type Address, ask, fillBuffers, open, raw, statusesOf, TELLS_FULL_BUFFERS, trickle } from './client.ts';
import { NO_TOKENS, tokens } from './configs.ts';
import { type Change, changedSource, fileWith, folder, mistakesIn, SOURCE } from './files.ts';
import { createGateway, FILE } from './gateway.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { answerAll, arrived, beginLarge, LARGE, queueUp, send, startHeld, statusFor } from './held.ts';
import { bytesOf } from './rows.ts';
import { isNode, LOADER } from './runtime.ts';
import {
  ABOUT,
  AS_OTHER,
  BEARER,
  HANDSHAKE,
  HEALTH,
  HELLO,
  MESSAGE,
  OTHER,
  post,
  RECEIVE,
  REFUSED,
  SECRET,
  SECRETS,
  SEND,
} from './samples.ts';
import {
  AS_IT_IS,
  cli,
  type Gateway,
  type Process,
  type Program,
  program,
  script,
  start,
  startBoth,
  startGateway,
  startHolding,
  startProcess,
} from './start.ts';
import { accept, accepted, RECEIVING } from './websocket.ts';

suite('survival', SIDE_BY_SIDE, () => {
  test('every listener of the server is in the one table, behind the guard', () => {
    const [, events] = /function listenersOf[^]*?\n {2}return \{\n([^]*?)\n {2}\};/.exec(SOURCE)!;
    const names = groupsOf(events!, /^ {4}(\w+)[:,]/gm);
    const known = `checkContinue checkExpectation clientError connect connection error request secureConnection timeout
    tlsClientError upgrade`.split(/\s+/);
    assert.deepEqual(difference('listenersOf', names, 'this test', known), []);
    // The command line adds one for its query to the backend, and waits for lifecycle events.
    assert.deepEqual(
      groupsOf(SOURCE, /\bserver\.on\(([^,]*),/g),
      ['event', "'request'"],
      'listeners registered elsewhere',
    );
  });

  // node:http continues to parse a packet whose socket was destroyed, and what its listener threw then crashed the
  // process.
  test('attack: crash the process by a reset after a pipelined CONNECT or WebSocket, on http and on https', async (t) => {
    const backend = await startBackend(t);
    for (const tls of [undefined, certificate(t)]) {
      const env = tls && { GATEWAY_TLS_CERT: tls.cert, GATEWAY_TLS_KEY: tls.key };
      const gateway = await startProcess(t, { backend, ...env && { env } });
      const upgrades = ['CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n', HANDSHAKE];
      for (let round = 0; round < 200; round++) {
        const socket = net.connect(gateway.port, '127.0.0.1').on('error', () => {});
        await once(socket, 'connect');
        let speaker: net.Socket = socket;
        if (tls) {
          speaker = tlsConnect({ socket, ca: [CERTS[0].cert], servername: 'localhost' }).on('error', () => {});
          await once(speaker, 'secureConnect');
        }
        speaker.write(`${HEALTH}${upgrades[round % 2]}`, () => socket.resetAndDestroy());
        await closed(socket);
      }
      assert.equal((await ask(gateway, { path: '/healthz' })).status, 200);
      assert.doesNotMatch(gateway.output(), /internal error/);
      assert.deepEqual([gateway.child.exitCode, backend.seen.length], [null, 0]);
      await gateway.close();
    }
  });

  /** What reaches each listener of the server, on plain http and over TLS. */
  const EVENTS: Record<string, (to: Address, gateway: Gateway) => unknown> = {
    connection: (to) => raw(to, HEALTH),
    secureConnection: (to) => raw(to, HEALTH),
    request: (to) => raw(to, HEALTH),
    checkContinue: (to) => raw(to, HEALTH.replace('\r\n', '\r\nExpect: 100-continue\r\n')),
    checkExpectation: (to) => raw(to, HEALTH.replace('\r\n', '\r\nExpect: a-miracle\r\n')),
    upgrade: (to) => raw(to, HANDSHAKE),
    connect: (to) => raw(to, 'CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n'),
    clientError: (to) => raw(to, 'rubbish\r\n\r\n'),
    tlsClientError: ({ port }) => raw({ port }, HEALTH),
    timeout: (to, { server }) => {
      server.once('connection', (socket) => setImmediate(() => server.emit('timeout', socket)));
      return raw(to, '');
    },
    error: (_, { server }) => server.emit('error', Object.assign(new Error(), { code: 'EMFILE' })),
  };

  test('an error thrown by a listener of the server ends its connection and is logged once; the process does not crash', async (t) => {
    const missing = new Set(Object.keys(EVENTS));
    for (const tls of [undefined, certificate(t)]) {
      const { gateway } = await startBoth(t, { ...tls && { tls } });
      const { server } = gateway;
      const isHere = (event: string): boolean =>
        // Bun 1.4.5 emits neither of them
        event in EVENTS && (tls && !('Bun' in globalThis) ? true : !/^(?:tls|secure)/.test(event));
      for (const event of server.eventNames().map(String).filter(isHere)) {
        const listeners = server.rawListeners(event) as ((...args: unknown[]) => void)[];
        for (const listener of listeners) {
          const fail = (): never => {
            throw new Error(`planted in ${event}`);
          };
          const others = listeners.map((each) => each === listener ? fail : each);
          server.removeAllListeners(event);
          for (const each of others) server.on(event, each);
          const failed = (): number => linesOf(gateway, /^internal error$/).length;
          const before = failed();
          await EVENTS[event]!(gateway, gateway);
          await until(() => failed() > before, `the line of a fault in "${event}"`);
          assert.match(String(linesOf(gateway, /^internal error$/).at(-1)!.stack), new RegExp(`planted in ${event}`));
          server.removeAllListeners(event);
          for (const each of listeners) server.on(event, each);
          missing.delete(event);
          assert.equal((await ask(gateway, { path: '/healthz' })).status, 200, `behind a fault in "${event}"`);
        }
      }
    }
    if (isNode) assert.deepEqual([...missing], []);
  });

  test('an error thrown while a response is ended closes its connection and is logged; the process does not crash', async (t) => {
    const { gateway } = await startBoth(t, {});
    gateway.server.prependOnceListener('request', (_req, res) => {
      res.end = () => {
        throw new Error('planted in end');
      };
    });
    assert.equal(await raw(gateway, HEALTH), '');
    assert.match(String(linesOf(gateway, /^internal error$/)[0]!.stack), /planted in end/);
    assert.equal(requests(gateway).length, 1);
    assert.equal((await ask(gateway, { path: '/healthz' })).status, 200);
  });

  test('internal errors beyond thirty a minute are logged at debug level', async (t) => {
    let now = Date.now();
    const { gateway } = await startBoth(t, {}, { now: () => now });
    const fail = (): boolean => gateway.server.emit('clientError'); // without its arguments
    for (let i = 0; i < 40; i++) fail();
    const levels = (): string[] => linesOf(gateway, /^internal error$/).map(({ level }) => String(level));
    assert.deepEqual(levels(), [...Array(30).fill('error'), ...Array(10).fill('debug')]);
    now += 60_001;
    fail();
    assert.equal(levels().at(-1), 'error');
  });

  test('last resort: a process that listens survives whatever a timer, stream or promise throws; a port in use still stops it', async (t) => {
    const backend = await startBackend(t);
    const code = `
    import { EventEmitter } from 'node:events';
    import { run } from ${JSON.stringify(FILE.href)};
    const { code, stderr } = await run([], process.env, () => Buffer.alloc(0));
    process.exitCode = code;
    process.stderr.write(stderr);
    setTimeout(() => { throw new Error('planted in a timer'); });
    setTimeout(() => new EventEmitter().emit('error', new Error('planted in a stream')));
    setTimeout(() => Promise.reject(new Error('planted in a promise')));`;
    const file = fileWith(t, code, 'script.mjs');
    const gateway = await startProcess(t, { backend, program: [...AS_IT_IS.slice(0, -1), file] as unknown as Program });
    await until(() => linesOf(gateway, /^internal error$/).length === 3);
    const stacks = linesOf(gateway, /^internal error$/).map(({ stack }) => String(stack)).join();
    for (const where of ['timer', 'stream', 'promise']) assert.match(stacks, new RegExp(`planted in a ${where}`));
    await ask(gateway, { headers: BEARER, body: HELLO });
    assert.equal(backend.sent.length, 1);
    const { code: ended } = await cli([], {
      env: { GATEWAY_TOKENS: SECRET, GATEWAY_LISTEN: `127.0.0.1:${gateway.port}` },
    });
    assert.equal(ended, 1);
    await gateway.close();
  });

  /** A program that embeds the gateway and survives errors. A function of it throws from the moment `fail` names it. */
  async function startThrowing(t: TestContext, { url }: Backend) {
    const config = { ...RECEIVING, ...tokens({}), listen: '127.0.0.1:0', shutdown: '1h', backend: { url, wait: '0' } };
    const code = `
    import { createGateway } from ${JSON.stringify(FILE.href)};
    for (const event of ['uncaughtException', 'unhandledRejection']) process.on(event, () => console.log('escaped'));
    let failing = '';
    const unless = (name, value) => {
      if (name === failing) throw new Error('planted');
      return value;
    };
    const config = ${JSON.stringify({ ...config, log: { format: 'json', level: 'debug' } })};
    const gateway = createGateway(config, {
      log: (line) => console.log(unless('log', line)),
      now: () => unless('now', Date.now()),
    });
    process.stdin.on('data', (bytes) => {
      if (String(bytes) !== 'close') return console.log((failing = String(bytes)) + ' fails');
      gateway.close().catch(() => {}).then(() => console.log('closing has ended'));
    });
    await gateway.listen();`;
    const program = [...AS_IT_IS.slice(0, -1), fileWith(t, code, 'script.mjs')] as unknown as Program;
    const gateway = await startProcess(t, { program });
    const fail = async (name: 'log' | 'now'): Promise<void> => {
      gateway.child.stdin.write(name);
      await until(() => gateway.output().includes(`${name} fails`), 'the program to read its standard input');
    };
    const close = async (): Promise<void> => {
      gateway.child.stdin.write('close');
      await until(() => gateway.output().includes('closing has ended'));
    };
    return { ...gateway, fail, close };
  }

  test('a log or a clock of an embedding program that throws does no harm', async (t) => {
    for (const name of ['log', 'now'] as const) {
      const held: http.ServerResponse[] = [];
      const backend = await startBackend(t, (_, res) => void held.push(res));
      backend.server.on('upgrade', (_, socket: Duplex) => accept(socket.on('error', () => {})));
      const gateway = await startThrowing(t, backend);
      const tunnel = await accepted(t, gateway);
      const begun = open(t, gateway, SEND);
      await until(() => held.length === 1);
      await gateway.fail(name);
      held[0]!.end('{}');
      await until(() => statusOf(begun.text()) === 200);
      for (
        const [bytes, status] of [[HEALTH, 200], [SEND, 200], [ABOUT.replace(SECRET, OTHER), 401], [
          'rubbish\r\n\r\n',
          400,
        ]] as const
      ) {
        held.length = 0;
        const { text } = open(t, gateway, bytes);
        if (bytes === SEND) await until(() => held.length === 1);
        for (const res of held) res.end('{}');
        await until(() => statusOf(text()) === status, `${status} for ${bytes}`);
      }
      const backendUp = raw(gateway, HANDSHAKE);
      await gateway.close();
      await backendUp;
      await closed(tunnel.socket);
      assert.doesNotMatch(gateway.output(), /escaped/);
    }
  });

  /** What runs outside a request, and how a test breaks it. The process continues to serve, and exits with 0. */
  const OUTSIDE: Record<string, (on: { gateway: Process; file: string; t: TestContext }) => Promise<unknown>> = {
    'the watcher: the file is a link to itself': async ({ gateway, file }) => {
      rmSync(file);
      await symlink(file, file);
      await until(() => gateway.output().includes('reload failed'));
    },
    'the reload: by a signal, while the file is a link to itself': async ({ gateway }) => {
      const count = () => gateway.output().split('reload failed').length;
      const before = count();
      process.kill(gateway.child.pid!, 'SIGHUP');
      await until(() => count() > before);
    },
    'the reload: the file is a folder': async ({ gateway, file }) => {
      const count = () => gateway.output().split('reload failed').length;
      const before = count();
      rmSync(file);
      await mkdir(file);
      process.kill(gateway.child.pid!, 'SIGHUP');
      await until(() => count() > before);
    },
    'the reload: the file is back': async ({ gateway, file }) => {
      rmSync(file, { recursive: true });
      writeFileSync(
        file,
        JSON.stringify({ tokens: { a: { secret: SECRET } }, backend: { url: 'http://127.0.0.1:1' } }),
      );
      process.kill(gateway.child.pid!, 'SIGHUP');
      await until(() => gateway.output().includes('"reloaded"'));
    },
    'the question to the backend: it is not there': async ({ gateway }) => {
      await until(() => gateway.output().includes('did not answer as expected'));
    },
    'sockets of clients: they are reset, in each state': async ({ gateway, t }) => {
      const beginnings = [
        '',
        'GET ',
        `${post(SECRET, 9)}{`,
        ABOUT,
        ABOUT + ABOUT,
        'x\r\n\r\n',
        '\x16\x03\x01',
        `GET ${RECEIVE} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nx`,
        'CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\nx',
      ];
      for (const bytes of beginnings) {
        const early = open(t, gateway, bytes).socket;
        await once(early, 'connect');
        early.resetAndDestroy();
        const late = open(t, gateway, bytes).socket;
        await ask(gateway, { path: '/healthz' });
        late.resetAndDestroy();
      }
    },
    'the log: nobody reads it': async ({ gateway }) => {
      for (const stream of [gateway.child.stdout, gateway.child.stderr]) stream!.destroy();
      await ask(gateway, {});
    },
  };

  test('after a failure of anything that runs outside a request, the process continues to serve, and exits with 0', async (t) => {
    const file = join(folder(t), 'gateway.json');
    const { url } = await startBackend(t);
    writeFileSync(file, JSON.stringify({ tokens: { a: { secret: SECRET } }, backend: { url } }));
    const gateway = await startProcess(t, { args: ['--config', file] });
    for (const [place, fail] of Object.entries(OUTSIDE)) {
      await fail({ gateway, file, t });
      // Within one turn of its event loop the process would have exited.
      for (let i = 0; i < 3; i++) {
        const { status } = await ask(gateway, { path: '/healthz' }).catch((error) => ({ status: String(error) }));
        assert.equal(status, 200, `${place}: ${gateway.output()}`);
      }
    }
    await gateway.close();
  });

  test('an error of accept is one warning a minute, and the port stays open', async (t) => {
    const { gateway } = await startBoth(t);
    const error = Object.assign(new Error('accept ENOBUFS'), { code: 'ENOBUFS' });
    for (let i = 0; i < 3; i++) gateway.server.emit('error', error);
    const reasons = linesOf(gateway, /^a connection could not be accepted$/).map(({ reason }) => reason);
    assert.deepEqual(reasons, ['ENOBUFS']);
    assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
  });

  test('a process without a free file descriptor for connections serves again once there is one, and exits with 0', {
    skip: (!isNode || process.platform === 'win32') && 'other runtimes cannot start with so few file descriptors',
  }, async (t) => {
    const limited: Program = ['sh', '-c', 'ulimit -n 40; exec "$0" "$@"', ...program()];
    const gateway = await startProcess(t, { backend: await startBackend(t), program: limited });
    const sockets = Array.from({ length: 60 }, () => open(t, gateway).socket);
    await Promise.all(sockets.map((socket) => socket.connecting ? once(socket, 'connect') : undefined));
    await ask(gateway, { path: '/healthz' }).catch(() => {}); // refused, or served instead of another
    for (const socket of sockets) socket.destroy();
    while (!await ask(gateway, { path: '/healthz' }).catch(() => undefined));
    assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
    await gateway.close();
  });
});

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
      // Bun 1.4.5 does not report a connection before its first byte.
      if ('Bun' in globalThis) sockets.splice(1, 1)[0]!.destroy();
      await Promise.all(sockets.map((socket) => closed(socket.resume())));
      assert.match(gateway.log.at(-1)!, /"message":"stopped"/);
    }
  });

  // Bun does not report such a connection, and ends it only after some ten seconds, for which closing waited.
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
      if (isNode) assert.match(text(), /\r\nConnection: close\r\n/);
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
      while (await ask(gateway, { path: '/healthz' }).then(() => true, () => false));
      finish();
      assert.equal((await running).status, 200);
      await closing;
      await until(() => gateway.output().includes('"stopped"'));
    }
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

suite('reload', SIDE_BY_SIDE, () => {
  test('reload: tokens and rules apply from the next request on, not to running ones; losing all tokens does not leave the gateway open by mistake', async (t) => {
    const { backend, gateway, finish } = await startHolding(t);
    const other = { headers: AS_OTHER };
    const running = statusesOf(gateway, { body: MESSAGE, headers: BEARER });
    await until(() => backend.seen.length === 1);
    gateway.reload({ tokens: { new: { secret: OTHER, allow: ['info'] } } });
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, other, { ...other, body: MESSAGE }), [
      401,
      200,
      403,
    ]);
    finish();
    assert.deepEqual(await running, [200]);
    const before = gateway.log.length;
    assert.equal(problemsOf(() => gateway.reload({ tokens: { a: { secret: 'short' } } })).length, 1);
    const open = ['tokens: none is configured; GATEWAY_AUTH_ANONYMOUS=true would accept all requests'];
    assert.deepEqual(problemsOf(() => gateway.reload(NO_TOKENS)), open);
    // The new `listen` takes effect at the next start: until then other machines could connect to this gateway.
    const anonymous = createGateway({ listen: '0.0.0.0:0', auth: { anonymous: true } }, { log: () => {} });
    assert.deepEqual(problemsOf(() => anonymous.reload({ listen: '127.0.0.1:0' })), open);
    assert.equal(gateway.log.length, before);
    assert.deepEqual(await statusesOf(gateway, other, {}), [200, 401]);
  });

  // On Deno each broken certificate took effect, and no connection worked from then on.
  test('reload: by SIGHUP or a changed file; a configuration, secret or certificate that is half-written, broken or gone changes nothing', async (t) => {
    const backend = await startBackend(t);
    const [dir, tls] = [folder(t), certificate(t)];
    const [file, secretFile] = [join(dir, 'gateway.json'), join(dir, 'secret')];
    const [third, fresh] = ['third-secret-of-some-length', 'fresh-secret-of-good-length'];
    const configOf = (tokens: object): string => JSON.stringify({ backend: { url: backend.url }, tls, tokens });
    const replace = (tokens: object): void => {
      writeFileSync(`${file}.new`, configOf(tokens));
      renameSync(`${file}.new`, file);
    };
    writeFileSync(secretFile, SECRET);
    replace({ a: { secretFile } });
    const gateway = await startProcess(t, { args: ['--config', file] });
    const signal = (): boolean => process.kill(gateway.child.pid!, 'SIGHUP');
    const count = (message: RegExp): number => linesOf(gateway, message).length;
    const becomes = async (message: RegExp, change: () => unknown): Promise<void> => {
      const before = count(message);
      change();
      await until(() => count(message) > before);
    };
    const statuses = (...secrets: string[]): Promise<number[]> =>
      statusesOf(gateway, ...secrets.map((secret) => ({ headers: { authorization: `Bearer ${secret}` } })));
    const { fingerprint: first } = await ask(gateway);
    assert.deepEqual(await statuses(SECRET, OTHER), [200, 401]);

    await becomes(/^reloaded/, signal);

    // An editor replaces the file, without a signal.
    await becomes(/^reloaded/, () => replace({ a: { secretFile }, b: { secret: OTHER } }));

    // Each of these is reported without quoting a secret, and changes nothing. The last certificate belongs to another
    // key.
    const certificates = ['', 'hello', CERTS[1].cert.slice(0, 400), CERTS[1].cert];
    const half = configOf({ c: { secret: third } }).slice(0, -9);
    const bad = [
      ...certificates.map((text) => () => writeFileSync(tls.cert, text)),
      () => writeFileSync(tls.cert, CERTS[0].cert) ?? rmSync(secretFile),
      () => writeFileSync(secretFile, SECRET) ?? writeFileSync(file, half),
      ...['', '{}'].map((text) => () => writeFileSync(file, text)),
      () => rmSync(file),
    ];
    for (const damage of bad) {
      await becomes(/^reload failed/, () => damage() ?? signal());
      assert.deepEqual(await statuses(SECRET, OTHER, third), [200, 200, 401], String(damage));
      assert.equal((await ask(gateway)).fingerprint, first, String(damage));
    }
    const problems = linesOf(gateway, /^reload failed/).map((line) => line.problems);
    // On a slow machine the watcher may report a broken file as well, so a line is found by its words and not by its
    // position.
    assert.ok(problems.some((each) => /^tokens\.a\.secretFile: \S+ does not exist$/.test(each)), problems.join());

    // A signal and the change that it announces are one reload, so further reloads come from later changes.
    const reloaded = count(/^reloaded/);
    await becomes(/^reloaded/, () => replace({ a: { secretFile }, b: { secret: OTHER } }) ?? signal());
    await becomes(/^reloaded/, () => writeFileSync(secretFile, fresh));
    assert.deepEqual(await statuses(SECRET, fresh), [401, 200]);
    await becomes(/^reload failed/, () => writeFileSync(tls.cert, CERTS[1].cert) ?? signal());
    await becomes(/^reloaded/, () => writeFileSync(tls.key, CERTS[1].key));
    assert.equal(count(/^reloaded/), reloaded + 3);
    assert.equal((await ask(gateway)).fingerprint === first, 'Bun' in globalThis);
    assert.doesNotMatch(gateway.output(), new RegExp(`${SECRETS.source}|${third}|${fresh}`));
    await gateway.close();
  });

  // When node:http had a limit of 200 header fields and, after a reload, the check had 1,000, a second Host got
  // through.
  test(
    'code that reads a setting of the server does not compile unless it reads it once, where no reload can change it',
    {
      skip: !isNode && 'npm installs the compiler for Node',
    },
    async (t) => {
      const row = "  'limits.headers': [countFrom(1), 'header fields', '200'],\n";
      const added: Change[] = [
        ["  'shutdown': [duration('10s')", (text) => row + text],
        ['server.maxHeadersCount = HEADERS_LIMIT + 1', () => "server.maxHeadersCount = settings['limits.headers'] + 1"],
      ];
      assert.deepEqual(await mistakesIn(changedSource(t, ...added)), ['createServer']);
      const listed: Change = ["const START_ONLY = ['listen',", (text) => `${text} 'limits.headers',`];
      assert.deepEqual(await mistakesIn(changedSource(t, ...added, listed)), []);
      // Where the state is made, a reload would be ignored just as silently.
      const kept: Change = [
        '    startedMs: now(),\n',
        (text) => `${text}    headersLimit: settings['limits.headers'],\n`,
      ];
      assert.deepEqual(await mistakesIn(changedSource(t, added[0]!, kept)), ['makeCore']);
      assert.deepEqual(await mistakesIn(changedSource(t, added[0]!, kept, listed)), []);
      const used: Change = [
        "    this.#limitBytes = exchange.rules['limits.body'];",
        (text) => text.replace('body', 'headers'),
      ];
      assert.deepEqual(await mistakesIn(changedSource(t, ...added, listed, used)), ['RequestBody']);
    },
  );

  // A setting that needs a restart was still adopted, and then mistaken for the one in effect.
  test('a reload leaves settings that are read only at start, and its log line names them', async (t) => {
    const { gateway } = await startBoth(t);
    for (let i = 0; i < 2; i++) {
      gateway.reload({ listen: '127.0.0.2:0', limits: { connections: 9 }, log: { level: 'error', format: 'text' } });
      assert.equal(linesOf(gateway, /^reloaded/)[i]!.needsRestart, 'listen,limits.connections,log.level,log.format');
    }
  });

  test('the gateway listens on IPv6; a reload does not move it; listen() rejects an address in use', async (t) => {
    const { backend, gateway } = await startBoth(t);
    for (let i = 0; i < 2; i++) {
      gateway.reload({ listen: '127.0.0.2:0' });
      assert.equal(JSON.parse(gateway.log.at(-1)!).needsRestart, 'listen');
      assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
    }
    const six = await startGateway(t, backend, { listen: '[::1]:0', clients: ['::1'] });
    assert.match(six.url, /^http:\/\/\[::1\]:\d+$/);
    assert.equal((await ask(six, { headers: BEARER })).status, 200);
    assert.equal(requests(six)[0].client, '::1');
    const log: string[] = [];
    const taken = createGateway({ listen: `${backend.host}:${backend.port}`, ...tokens({}) }, {
      log: (line) => void log.push(line),
    });
    await assert.rejects(taken.listen(), { code: 'EADDRINUSE' });
    assert.deepEqual(log, [], 'the caller gets the error');
  });

  // A file's state at its last load was never compared, so a token that was removed at that moment kept working.
  test('a file that changes between being read and first being checked is read again', async (t) => {
    const backend = await startBackend(t);
    const tls = certificate(t);
    const configOf = (secret: string): string =>
      JSON.stringify({ backend: { url: backend.url }, tls, tokens: { a: { secret } } });
    const file = fileWith(t, configOf(SECRET));
    const code = `
    import { writeFileSync } from 'node:fs';
    import { run } from ${JSON.stringify(FILE.href)};
    const running = run(['--config', ${JSON.stringify(file)}], process.env, () => Buffer.alloc(0));
    writeFileSync(${JSON.stringify(file)}, ${JSON.stringify(configOf(OTHER))});
    writeFileSync(${JSON.stringify(tls.cert)}, '');
    await running;`;
    const script = fileWith(t, code, 'script.mjs');
    const gateway = await startProcess(t, { program: [...AS_IT_IS.slice(0, -1), script] as unknown as Program });
    await until(() => linesOf(gateway, /^reload failed/).length === 1);
    assert.match(linesOf(gateway, /^reload failed/)[0]!.problems, /^tls: its "cert" is empty/);
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }), [200, 401]);
    writeFileSync(tls.cert, CERTS[0].cert);
    await until(() => linesOf(gateway, /^reloaded/).length === 1);
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }), [401, 200]);
  });

  test('a file is read once it no longer changes; a file that only a reloaded configuration names is also watched', async (t) => {
    const backend = await startBackend(t);
    const dir = folder(t);
    const [file, secretFile] = [join(dir, 'gateway.json'), join(dir, 'secret')];
    const configOf = (token: object): string => JSON.stringify({ backend: { url: backend.url }, tokens: { a: token } });
    writeFileSync(file, configOf({ secret: SECRET }));
    writeFileSync(secretFile, SECRET);
    const gateway = await startProcess(t, { args: ['--config', file] });
    const count = (message: RegExp): number => linesOf(gateway, message).length;
    const becomes = async (change: () => unknown): Promise<void> => {
      const before = count(/^reloaded/);
      change();
      await until(() => count(/^reloaded/) > before, 'the gateway to reload');
    };
    // A separate process, which waits for nothing, keeps changing a file for 2.5 s. A gateway that a busy machine
    // suspends for that long may read it too early, so it has four tries.
    const isReadTooEarly = async (): Promise<boolean> => {
      const before = count(/^reload failed/);
      const writer = start([file], {}, ['sh', '-c', 'while :; do echo "{" >"$0"; sleep 0.1; done']);
      const ended = once(writer, 'exit');
      await pass(2500);
      writer.kill('SIGKILL');
      await ended;
      await becomes(() => writeFileSync(file, configOf({ secretFile })));
      return count(/^reload failed/) > before;
    };
    let tries = 1;
    while (await isReadTooEarly()) assert.ok(tries++ < 4, 'the file was read while it changed, four times');
    await becomes(() => writeFileSync(secretFile, OTHER));
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }), [401, 200]);
  });
});
