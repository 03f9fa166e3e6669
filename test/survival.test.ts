import { once } from 'node:events';
import { rmSync, writeFileSync } from 'node:fs';
import { mkdir, symlink } from 'node:fs/promises';
import http from 'node:http';
import net from 'node:net';
import { join } from 'node:path';
import type { Duplex } from 'node:stream';
import { suite } from 'node:test';
import { connect as tlsConnect } from 'node:tls';
import { statusOf } from './answers.ts';
import { assert, closed, difference, groupsOf, linesOf, requests, until } from './assertions.ts';
import { type Backend, startBackend } from './backend.ts';
import { certificate, CERTS } from './certificates.ts';
import { type Address, ask, open, raw, untilAnswering } from './client.ts';
import { tokens } from './configs.ts';
import { fileWith, folder, SOURCE } from './files.ts';
import { FILE } from './gateway.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { isNode } from './runtime.ts';
import { ABOUT, BEARER, HANDSHAKE, HEALTH, HELLO, MESSAGE, OTHER, post, RECEIVE, SECRET, SEND } from './samples.ts';
import { AS_IT_IS, cli, type Gateway, type Process, type Program, program, startBoth, startProcess } from './start.ts';
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
      for (let round = 0; round < 60; round++) {
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
        event in EVENTS && (tls !== undefined || !/^(?:tls|secure)/.test(event));
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
    assert.deepEqual([...missing], []);
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
        let status: number | string = '';
        await until(async () => {
          ({ status } = await ask(gateway, { path: '/healthz' }).catch((error) => ({ status: String(error) })));
          return status !== 408; // which says that other tests kept this process from sending the head for 8 s
        }, 'an answer to a head in time');
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
    await untilAnswering(gateway);
    assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
    await gateway.close();
  });
});
