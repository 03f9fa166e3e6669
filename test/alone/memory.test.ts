import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { outcomeOf } from '../answers.ts';
import { assert, requests, until } from '../assertions.ts';
import { type Backend, type Seen, startBackend } from '../backend.ts';
import { addressOf, ask, beginSend, connect, open } from '../client.ts';
import { tokens } from '../configs.ts';
import { createGateway } from '../gateway.ts';
import { test, type TestContext } from '../guard.ts';
import { isNode } from '../runtime.ts';
import {
  ABOUT,
  AUTHED,
  BEARER,
  DEFAULTS,
  HEALTH,
  HELLO,
  MESSAGE,
  MIB,
  OTHER,
  post,
  RECEIVE,
  SECRET,
  SEND,
  TO,
} from '../samples.ts';
import { type Process, startGateway, startProcess } from '../start.ts';
import { ACCEPTED, RECEIVING, startUpgradeBackend } from '../websocket.ts';

setFlagsFromString('--expose-gc');

/** Collects garbage immediately. */
const collectGarbage: () => void = runInNewContext('gc');

/** Waits for what garbage collections bring about. They take long, so there are a few of them in a second. */
async function untilCollected(condition: () => boolean): Promise<void> {
  let nextMs = 0;
  await until(() => {
    if (performance.now() < nextMs) return false;
    collectGarbage();
    nextMs = performance.now() + 100;
    return condition();
  }, 'garbage to be collected');
}

// A small body whose client had disconnected stayed in memory for 28 s, at a cost of 77 bytes.
test('nothing of a request stays in memory once its connection is gone', async (t) => {
  const text = '{"message":"';
  const health = 'GET /healthz HTTP/1.1\r\nHost: x\r\n';
  const upgrade = 'Connection: Upgrade\r\nUpgrade: websocket\r\nHost';
  const handshake = ABOUT.replace('/v1/about', RECEIVE).replace('Host', upgrade);
  const big = `${HELLO.slice(0, -1)},"x":"${'x'.repeat(100_000)}`;
  const begun = post(SECRET, 99) + text;
  /** What is sent, by how much of it arrives at the backend. */
  const sent = {
    nothing: [
      ...['POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{', post('wrong', 9) + text],
      ...[post('wrong', 1_000_000) + text, `${post('wrong', 'chunked')}4\r\n{"a"`],
      ...[begun, begun.replace('/v2/send', '/v1/register'), `${post(SECRET, 'chunked')}c\r\n${text}\r\n`],
      ...[post(SECRET, 99, 'Expect: 100-continue'), post(OTHER, 99) + text, post(OTHER, 500_000) + big],
      ...[`${health}Content-Length: 99\r\n\r\n{`, `${health}\r\n`.repeat(8)],
    ],
    all: [post(SECRET, 200_000) + big, SEND, SEND + begun, handshake],
    accepted: [handshake],
  };
  const begin = async (arrives: string, bytes: string): Promise<() => number> => {
    const held: http.ServerResponse[] = [];
    const backend = await startUpgradeBackend(t, (socket) => {
      if (arrives === 'accepted') socket.write(ACCEPTED);
      socket.on('end', () => socket.end()).resume();
    });
    backend.server.removeAllListeners('request').on('request', (req: http.IncomingMessage, res) => {
      req.on('error', () => {});
      held.push(res);
      backend.seen.push({} as Seen);
    });
    const config = { ...RECEIVING, ...tokens({}, { defaults: DEFAULTS }), backend: { url: backend.url, parallel: 0 } };
    const gateway = await startGateway(t, backend, config, { stallTimeoutMs: 90_000 }); // longer than a test waits
    const met: WeakRef<object>[] = [];
    for (const event of ['request', 'checkContinue', 'upgrade']) {
      gateway.server.on(event, (req: http.IncomingMessage) => met.push(new WeakRef(req)));
    }
    const clients = Array.from({ length: 20 }, () => connect(gateway, bytes).socket);
    await until(() => met.length >= 20 && backend.seen.length === (arrives === 'nothing' ? 0 : 20));
    clients.forEach((socket) => socket.destroy());
    await until(() => requests(gateway).length >= 20);
    held.forEach((res) => res.end());
    return () => met.filter((request) => request.deref() !== undefined).length;
  };
  for (const [arrives, all] of Object.entries(sent)) {
    const left = await Promise.all(all.map((bytes) => begin(arrives, bytes)));
    // The runtime may keep the most recent ones.
    await untilCollected(() => left.every((count) => count() <= 2)).catch(() =>
      assert.fail(`of ${arrives}: ${left.map((count, i) => `${count()} stay: ${all[i]!.slice(0, 200)}`)}`)
    );
  }
});

test('a closed gateway leaves nothing in memory, and no timer', async () => {
  const listenAndClose = async () => {
    const log = (): void => {};
    const config = { listen: '127.0.0.1:0', tokens: { a: { secret: SECRET } }, backend: { url: 'http://127.0.0.1:1' } };
    const gateway = createGateway(config, { log, connectTimeoutMs: 1e6 });
    const url = await gateway.listen();
    assert.equal(
      outcomeOf(await ask(addressOf(url), { path: '/v1/health', headers: BEARER })),
      '502 backend_unreachable',
    );
    await gateway.close();
    return new WeakRef(log);
  };
  const log = await listenAndClose();
  await untilCollected(() => log.deref() === undefined);
});

// The objects parsed from one megabyte of "{},{},…" kept 20 MB while the send waited: 16 of them crashed a small
// computer.
test('while a send made from a body waits, nothing but the send is in memory', async (t) => {
  const backend = await startBackend(t, () => {}); // and never responds
  const tokens = { test: { secret: SECRET, message: 'hi', defaults: DEFAULTS } };
  const gateway = await startGateway(t, backend, { tokens, backend: { url: backend.url, parallel: 1 } });
  const body = `{"a":[${'{},'.repeat(330_000)}0]}`;
  collectGarbage();
  const before = process.memoryUsage().heapUsed;
  for (let i = 0; i < 8; i++) open(t, gateway, post(SECRET, body.length) + body);
  const met: http.IncomingMessage[] = [];
  gateway.server.on('request', (req: http.IncomingMessage) => met.push(req));
  await until(() => met.length === 8 && met.every((req) => req.complete && req.readableLength === 0));
  await untilCollected(() => process.memoryUsage().heapUsed - before < 40 * MIB).catch(() =>
    assert.fail(`${Math.round((process.memoryUsage().heapUsed - before) / MIB)} MiB`)
  );
});

const BIG_BYTES = 64 * MIB;

const GROWTH_MIB = 48;

const PIECE = Buffer.alloc(256 * 1024, 'QUJD');

const noProc = process.platform === 'linux' && isNode ? false : 'measured with /proc, for Node';

function memoryOf({ child }: Process, name: 'VmRSS' | 'VmHWM'): number {
  const [, kib] = new RegExp(`${name}:\\s+(\\d+) kB`).exec(readFileSync(`/proc/${child.pid}/status`, 'utf8'))!;
  return Number(kib) * 1024;
}

/** Reads a stream to its end, at full speed or slowly, and returns the number of bytes. */
async function drain(stream: http.IncomingMessage, isSlow: boolean): Promise<number> {
  let got = 0;
  for await (const chunk of stream as AsyncIterable<Buffer>) {
    got += chunk.length;
    if (isSlow && got % (4 * MIB) < chunk.length) await new Promise((resolve) => setTimeout(resolve, 5));
  }
  return got;
}

/** Writes this many bytes, as fast as they are accepted. */
async function writeBig(to: NodeJS.WritableStream, bytes: number): Promise<void> {
  for (let left = bytes; left > 0; left -= PIECE.length) {
    if (!to.write(PIECE.subarray(0, Math.min(left, PIECE.length)))) await once(to, 'drain');
  }
}

/**
 * By how much `run` raises a gateway's peak memory after twenty sends. The peak also depends on the garbage collector,
 * so beyond the limit two more processes get a try.
 */
async function assertMemory(t: TestContext, backend: Backend, run: (gateway: Process) => Promise<void>): Promise<void> {
  const grown: number[] = [];
  while (grown.length < 3 && !(Math.min(...grown) <= GROWTH_MIB)) {
    const gateway = await startProcess(t, { backend, env: { GATEWAY_LIMITS_BODY: '1GiB' } });
    for (let i = 0; i < 20; i++) assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
    const idle = memoryOf(gateway, 'VmRSS');
    await run(gateway);
    grown.push(Math.round((memoryOf(gateway, 'VmHWM') - idle) / MIB));
  }
  t.diagnostic(`grown by ${grown.join(', ')} MiB`);
  assert.ok(Math.min(...grown) <= GROWTH_MIB, `${grown} MiB`);
}

for (const [place, pace] of ['header fast', 'header slowly', 'body fast', 'body slowly'].map((way) => way.split(' '))) {
  const title =
    `64 MiB, the token in the ${place}, to a backend that reads ${pace}, cost no more than ${GROWTH_MIB} MiB`;
  test(`memory: ${title}`, { skip: noProc }, async (t) => {
    let got = 0;
    const backend = await startBackend(t, async (req, res) => {
      got = await drain(req, pace === 'slowly');
      res.writeHead(201).end('{}');
    });
    // The checked fields are at both ends of the document.
    const head = `${(place === 'body' ? AUTHED(SECRET) : HELLO).slice(0, -1)},"base64_attachments":["`;
    const tail = `"],"recipient":"${TO}"}`;
    const isChunked = (place === 'body') === (pace === 'fast');
    const framing = isChunked ? { 'transfer-encoding': 'chunked' } : { 'content-length': BIG_BYTES };
    await assertMemory(t, backend, async (gateway) => {
      const req = beginSend(gateway, { ...place === 'header' && BEARER, ...framing });
      const responded = once(req, 'response') as Promise<[http.IncomingMessage]>;
      req.write(head);
      await writeBig(req, BIG_BYTES - head.length - tail.length);
      req.end(tail);
      const [res] = await responded;
      assert.equal(res.resume().statusCode, 201);
      assert.ok(got > BIG_BYTES - 1000, `${got} bytes`);
    });
  });
}

test(
  `memory: a response of 64 MiB costs no more than ${GROWTH_MIB} MiB, even if read slowly`,
  { skip: noProc },
  async (t) => {
    const backend = await startBackend(t, async (req, res) => {
      req.resume();
      res.writeHead(req.method === 'GET' ? 200 : 201);
      if (req.method === 'GET') await writeBig(res, BIG_BYTES);
      res.end();
    });
    await assertMemory(t, backend, async ({ port }) => {
      const req = http.get({ host: '127.0.0.1', port, path: '/v1/health', agent: false, headers: BEARER });
      const [res] = await once(req, 'response') as [http.IncomingMessage];
      assert.equal(await drain(res, true), BIG_BYTES);
    });
  },
);

test(
  'a thousand idle connections take about 10 MiB, and no more than 30; with as many slow uploads beside them, requests are served during and after',
  { skip: noProc },
  async (t) => {
    const backend = await startBackend(t);
    const gateway = await startProcess(t, {
      backend,
      env: { GATEWAY_LIMITS_CONNECTIONS: '2100', GATEWAY_LOG_LEVEL: 'debug' },
    });
    const agent = new http.Agent({ keepAlive: true });
    t.after(() => agent.destroy());
    // So that the process has grown before.
    for (let i = 0; i < 500; i++) await ask(gateway, { path: '/healthz', agent });
    const before = memoryOf(gateway, 'VmRSS');
    const sockets: net.Socket[] = [];
    for (let i = 0; i < 1000; i++) {
      const { socket } = open(t, gateway, HEALTH);
      await once(socket, 'data');
      sockets.push(socket);
    }
    const grown = Math.round((memoryOf(gateway, 'VmRSS') - before) / MIB);
    t.diagnostic(`grown by ${grown} MiB`);
    assert.ok(grown <= 30, `${grown} MiB`);

    for (let i = 0; i < 1000; i++) {
      const { socket } = open(t, gateway, `${post(SECRET, 1_000_000)}{"message":"${'x'.repeat(1000)}`);
      sockets.push(socket);
      if (i % 50 === 49) await once(socket, 'connect');
    }
    assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
    assert.equal(backend.seen.length, 1);
    t.diagnostic(`${Math.round(memoryOf(gateway, 'VmHWM') / MIB)} MiB in all`);
    for (const socket of sockets) socket.destroy();
    await until(() => gateway.output().split('"status":499').length === 1001);
    assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
  },
);
