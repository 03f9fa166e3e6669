import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import net, { type AddressInfo } from 'node:net';
import { suite } from 'node:test';
import type { GatewayConfig } from '../gateway.ts';
import type { Answer } from './answers.ts';
import { assert, closed, linesOf, type LogLine, requests, until } from './assertions.ts';
import { answerAsBackend, type Backend, seenOf, serve, sparePort, startBackend } from './backend.ts';
import { CERTS } from './certificates.ts';
import { type Ask, ask, open, scrape } from './client.ts';
import { slots } from './configs.ts';
import { fileWith } from './files.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { settled } from './held.ts';
import { BEARER, HELLO, RECEIVE, SECRET, SEND } from './samples.ts';
import { startBoth, startGateway, startProcess } from './start.ts';

/** The timers of a duration that only one test uses, or slightly less. They run when the test fires them. */
const HELD_TIMERS: (() => void)[][] = [];

const [HELD_FROM_MS, HELD_STEP_MS] = [20_000_000, 1_000_000];

function holdTimers(): { ms: number; due: (() => void)[] } {
  if (HELD_TIMERS.length === 0) {
    const { setTimeout } = globalThis;
    const holding = (run: (...args: unknown[]) => void, ms = 0, ...args: unknown[]): unknown => {
      HELD_TIMERS[Math.ceil((ms - HELD_FROM_MS) / HELD_STEP_MS)]?.push(() => run(...args));
      return setTimeout(run, ms, ...args);
    };
    // What node:util's promisify finds on it is kept.
    globalThis.setTimeout = Object.assign(holding, setTimeout) as unknown as typeof setTimeout;
  }
  const due: (() => void)[] = [];
  return { ms: HELD_FROM_MS + HELD_STEP_MS * (HELD_TIMERS.push(due) - 1), due };
}

const [SILENT, AGAIN] = ['the backend has not answered for 30 s', 'the backend answers again'];

/** A backend that answers `info` at once and the rest on demand; the log lines about its silence; and its clock. */
async function startSilent(t: TestContext, parallel: number, config: GatewayConfig = {}) {
  const { ms, due } = holdTimers();
  const held: http.ServerResponse[] = [];
  const backend = await startBackend(t, (req, res) => {
    req.resume().on(
      'end',
      () => req.url!.startsWith('/v1/about') && req.headers.accept !== 'hang' ? res.end('{}') : held.push(res),
    );
  });
  const own = { allow: ['send', 'info', 'receive', 'messaging'], ...slots(backend, parallel), ...config };
  const gateway = await startGateway(t, backend, own, { slotTimeoutMs: ms });
  const lines = () =>
    linesOf(gateway, /has not answered|answers again/).map(({ level, message, waiting }) =>
      `${level} ${message} ${waiting}`
    );
  const arrive = async (count: number, request: Ask): Promise<Promise<Answer>[]> => {
    const before = held.length;
    const answers = Array.from({ length: count }, () => ask(gateway, { headers: BEARER, ...request }));
    for (const answer of answers) answer.catch(() => {}); // its client may disconnect
    await until(() => held.length === before + count);
    return answers;
  };
  return { backend, gateway, held, due, lines, arrive };
}

const A_SEND: Ask = { body: HELLO };

suite('silences', SIDE_BY_SIDE, () => {
  test('a backend that hangs is logged once after 30 s, whatever clients do, and once when it answers again; health checks do not count', async (t) => {
    const { gateway, held, due, lines, arrive } = await startSilent(t, 4);
    const sends = await arrive(3, A_SEND);
    const info = async (): Promise<void> => assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
    await info();
    assert.deepEqual([due.length, lines()], [4, []], 'one timer for each slot, and that of the health check');
    due[0]!();
    assert.deepEqual(lines(), [`warn ${SILENT} 3`]);
    for (const run of due.slice(1, 3)) run();
    await info();
    for (const answer of await arrive(2, A_SEND)) sends.push(answer);
    for (const run of due.splice(0)) run();
    assert.equal(lines().length, 1, 'one line for the outage');
    held.shift()!.end();
    await until(() => lines().length === 2);
    assert.equal(lines()[1], `warn ${AGAIN} 4`);
    for (const res of held.splice(0)) res.end();
    for (const answer of sends) assert.equal((await answer).status, 200);
    assert.equal(lines().length, 2);
  });

  // Each slow request among fast ones used to log a pair of lines.
  test('a slow request is not a silence while others are answered; it is checked again 30 s after the last answer', async (t) => {
    const { held, due, lines, arrive } = await startSilent(t, 4);
    const [slow, fast] = [await arrive(1, A_SEND), await arrive(1, A_SEND)].flat();
    held.pop()!.end();
    await fast;
    const [first] = due.splice(0);
    first!();
    assert.deepEqual([lines(), due.length], [[], 1], 'the backend has answered meanwhile');
    held.pop()!.end();
    assert.equal((await slow!).status, 200);
    due[0]!();
    assert.deepEqual([lines(), due.length], [[], 1], 'and the slow one too');
  });

  test('a backend that hangs is logged if clients disconnect early, without slots and for a health check; a poll may wait for the timeout that its client sets', async (t) => {
    // The client has disconnected, and its slot is never lent.
    const { backend, gateway, due, lines, held } = await startSilent(t, 1);
    const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
    const { socket } = open(t, gateway, SEND);
    const [served] = await accepted;
    await until(() => held.length === 1);
    socket.destroy();
    await closed(served);
    due[0]!();
    assert.deepEqual(lines(), [`warn ${SILENT} 1`]);
    await until(() => requests(gateway).some(({ status }) => status === 499));
    assert.equal(backend.seen.length, 1);

    // No slots; each of these ends the silence.
    const headers = { ...BEARER, accept: 'hang' };
    const rows: [parallel: number, request: Ask][] = [[0, A_SEND], [4, { headers }]];
    for (const [parallel, request] of rows) {
      const { due, lines, held, arrive } = await startSilent(t, parallel);
      const [answer] = await arrive(1, request);
      due.at(-1)!();
      assert.deepEqual(lines(), [`warn ${SILENT} 1`], JSON.stringify(request));
      held[0]!.end();
      assert.equal((await answer!).status, 200);
      assert.deepEqual(lines(), [`warn ${SILENT} 1`, `warn ${AGAIN} 0`]);
    }
    const polled = await startSilent(t, 4);
    const [poll] = await polled.arrive(1, { path: RECEIVE });
    assert.deepEqual(polled.due, []);
    polled.held[0]!.end();
    await poll;
  });

  test('a silence of health checks alone ends with any answer; one that includes sends ends only with the answer to a send', async (t) => {
    for (const isInfoFirst of [true, false]) {
      const { held, due, lines, arrive, gateway } = await startSilent(t, 4);
      const headers = { ...BEARER, accept: 'hang' };
      const answers = [...await arrive(1, { headers }), ...await arrive(1, A_SEND)];
      for (const run of isInfoFirst ? due : due.reverse()) run();
      assert.deepEqual(lines(), [`warn ${SILENT} 2`], 'one line for both');
      held.shift()!.end();
      await answers[0];
      await ask(gateway, { headers: BEARER });
      assert.equal(lines().length, 1, 'sends still hang');
      held.shift()!.end();
      await answers[1];
      assert.deepEqual(lines(), [`warn ${SILENT} 2`, `warn ${AGAIN} 0`]);
    }
  });

  /** A backend that starts after the gateway, as at each boot. */
  test('the start-up warning is followed by an all-clear when the backend comes up; until then backend_up is 0', async (t) => {
    const asked: string[] = [];
    const late = http.createServer((req, res) => {
      asked.push(req.url!);
      if (asked.length < 3) return void req.socket.destroy();
      answerAsBackend({ sent: [] } as unknown as Backend, seenOf(req, Buffer.alloc(0), true), res);
    });
    const url = await serve(t, late);
    const gateway = await startProcess(t, { backend: { url }, env: { ALLOW: 'metrics,info' } });
    const up = async () => (await scrape(gateway, { path: '/metrics', headers: BEARER })).backend_up;
    await until(() => linesOf(gateway, /^the backend /).length === 1);
    assert.equal(await up(), 0);
    await until(() => linesOf(gateway, /^the backend /).length === 2);
    assert.deepEqual(
      linesOf(gateway, /^the backend /).map(({ level, message, version }) => [level, message, version]),
      [
        ['warn', 'the backend did not answer as expected', undefined],
        ['info', 'the backend answers', '0.100'],
      ],
    );
    assert.deepEqual([await up(), asked], [1, Array(3).fill('/v1/about')]);
    await gateway.close();
  });

  test('the start-up query ends when a request is answered, on a reload to another backend, and with the gateway', async (t) => {
    let asked = 0;
    let held: net.Socket | undefined;
    const { url } = await startBackend(t, (_, res) => void res.end('{}'));
    const front = http.createServer((req, res) => {
      if (!req.headers['user-agent']?.startsWith('signal-gateway/')) {
        return void req.resume().on('end', () => res.end('[]'));
      }
      asked++;
      if (asked === 2) held = req.socket;
      else req.socket.destroy();
    });
    const mute = await serve(t, front);
    const configOf = (to: string) => ({
      tokens: { a: { secret: SECRET, allow: ['send', 'metrics'] } },
      backend: { url: to },
    });
    const file = fileWith(t, configOf(mute));
    const gateway = await startProcess(t, { args: ['--config', file] });
    const said = () => linesOf(gateway, /^the backend /).map(({ message, backend }) => `${message} ${backend}`);
    const up = async () => (await scrape(gateway, { path: '/metrics', headers: BEARER })).backend_up;
    const reload = async (to: string): Promise<void> => {
      const count = linesOf(gateway, /^reloaded$/).length;
      writeFileSync(file, JSON.stringify(configOf(to)));
      process.kill(gateway.child.pid!, 'SIGHUP');
      await until(() => linesOf(gateway, /^reloaded$/).length > count);
    };
    await until(() => said().length === 1);
    await until(() => held !== undefined);
    assert.equal(await up(), 0);
    assert.equal((await ask(gateway, { body: HELLO, headers: BEARER })).status, 200);
    assert.equal(await up(), 1);
    held!.destroy(); // that this query is no longer answered is not logged
    await until(() => said().length === 2);
    assert.deepEqual(said(), [`the backend did not answer as expected ${mute}`, `the backend answers ${mute}`]);
    assert.equal(asked, 2);
    // A reload to another backend starts again.
    const other = await sparePort();
    await reload(`http://127.0.0.1:${other}`);
    await until(() => said().length === 3);
    assert.equal(await up(), 0);
    await reload(url);
    await until(() => said().length === 4);
    assert.deepEqual([await up(), said()[3]], [1, `the backend answers ${url}`]);
    // The old one is no longer queried, while the new one is queried again after 1 s and after 2 s.
    await reload(mute);
    await until(() => said().length === 5);
    const second = { asked: 0 };
    const refusing = http.createServer((req) => {
      second.asked++;
      req.socket.destroy();
    });
    const mute2 = await serve(t, refusing);
    await reload(mute2);
    const before = asked;
    await until(() => second.asked >= 3);
    assert.equal(asked, before);
    await gateway.close(); // with a query still due
    assert.equal(said().length, 6);
  });

  test('the command line queries the backend once at start and after a reload to another, and reports the result; an embedded gateway does not', async (t) => {
    const asked: string[] = [];
    // The path of the backend's URL determines its response: a status, and a body.
    const backend = http.createServer((req, res) => {
      const { 'user-agent': agent = '', authorization } = req.headers;
      asked.push(`${req.method} ${req.url} ${/^signal-gateway\/[\d.]+$/.test(agent)} ${authorization}`);
      const [, status, body] = /^\/(\d+)(.*)\/v1\/about$/.exec(decodeURIComponent(req.url!))!;
      res.writeHead(Number(status), status === '301' ? { location: '/200{}/v1/about' } : {}).end(body);
    }).listen(0, '127.0.0.1');
    await once(backend, 'listening');
    t.after(() => void backend.close().closeAllConnections());
    const about = encodeURIComponent('{"version":"0.100","mode":"json-rpc","more":[1]}');
    const portOf = (server: net.Server): number => (server.address() as AddressInfo).port;
    const host = `127.0.0.1:${portOf(backend)}`;
    const resetting = net.createServer((socket) => void socket.resetAndDestroy()).listen(0, '127.0.0.1');
    const encrypted = https.createServer(CERTS[0]).listen(0, '127.0.0.1');
    const open = new Set<net.Socket>();
    const silent = net.createServer((socket) => void open.add(socket)).listen(0, '127.0.0.1');
    t.after(() => {
      for (const server of [resetting, silent, encrypted]) server.close();
      for (const socket of open) socket.destroy();
    });
    await Promise.all([resetting, silent, encrypted].map((server) => server.listening || once(server, 'listening')));
    const config = (url: string) => ({ tokens: { a: { secret: `sha256:${'1'.repeat(64)}` } }, backend: { url } });
    const file = fileWith(t, config(`http://api:password-of-backend@${host}/200${about}/`));
    const gateway = await startProcess(t, { args: ['--config', file] });
    const heard = async (count: number): Promise<LogLine> => {
      const lines = (): LogLine[] => linesOf(gateway, /^the backend /);
      await until(() => lines().length === count);
      return lines().at(-1)!;
    };
    const { time: _, ...first } = await heard(1);
    const heardOf = { backend: `http://${host}/200${about}`, version: '0.100', mode: 'json-rpc' };
    assert.deepEqual(first, { level: 'info', message: 'the backend answers', ...heardOf });
    process.kill(gateway.child.pid!, 'SIGHUP'); // to the same backend, which is not queried
    await until(() => gateway.output().includes('"reloaded"'));
    const rows: [url: string, said: RegExp][] = [
      [`http://api:password-of-backend@${host}/401`, /"status":401/],
      [`http://${host}/401`, /"reason":"status 401","hint":"put USER:PASSWORD@ into backend.url"/],
      [`http://${host}/500{}`, /"reason":"status 500","hint":"correct backend.url: something else listens there"/],
      [`http://${host}/200hello`, /"reason":"no JSON object"/],
      [`http://${host}/200[]`, /"reason":"no JSON object"/],
      [`http://${host}/301`, /"reason":"status 301"/],
      [`http://127.0.0.1:${await sparePort()}`, /refused.*"hint":"start the backend, or correct its port"/i],
      [`https://${host}`, /"hint":"correct http:\/\/ or https:\/\/ in backend.url"/],
      [`http://127.0.0.1:${portOf(resetting)}`, /"hint":"correct http:\/\/ or https:\/\/ in backend.url"/],
      [
        `http://127.0.0.1:${portOf(silent)}`,
        /"reason":"timeout","hint":"check the backend's log, or correct its address"/,
      ],
      [`https://127.0.0.1:${portOf(encrypted)}`, /"hint":"let this machine trust the backend's certificate"/],
      ['http://127.0.0.1:6000', /port|refused/i], // a port that fetch refuses, on Node and Bun
      ['http://nowhere.invalid', /"hint":"correct the backend's name, or put both on one network"/],
    ];
    for (const [i, [url, said]] of rows.entries()) {
      writeFileSync(file, JSON.stringify(config(url)));
      process.kill(gateway.child.pid!, 'SIGHUP');
      const line = await heard(i + 2);
      const wrong = ['warn', 'the backend did not answer as expected'];
      assert.deepEqual([line.level, line.message], i === 0 ? ['info', 'the backend answers'] : wrong, url);
      assert.match(JSON.stringify(line), said);
    }
    const paths = [`200${about}`, '401', '401', '500%7B%7D', '200hello', '200[]', '301'];
    assert.deepEqual(asked, paths.map((path) => `GET /${path}/v1/about true undefined`));
    assert.doesNotMatch(gateway.output(), /password-of-backend/);
    await gateway.close();

    const both = await startBoth(t);
    await settled(both.gateway);
    assert.equal(both.backend.server.listenerCount('connection') > 0 && both.backend.connections, 0);
  });

  test('a gateway whose backend.url is its own address logs that, with and without tokens', async (t) => {
    for (const env of [{ API_TOKENS: SECRET }, {}]) {
      const port = await sparePort();
      const url = `http://localhost:${port}`;
      const gateway = await startProcess(t, { env: { ...env, LISTEN: `127.0.0.1:${port}`, BACKEND_URL: url } });
      await until(() => linesOf(gateway, /^the backend /).length > 0);
      const [{ level, reason, hint }] = linesOf(gateway, /^the backend /) as [LogLine];
      const cure = "backend.url is this gateway's own address: give the backend's";
      assert.deepEqual([level, reason, hint], ['warn', 'own_address', cure]);
      await gateway.close();
    }
  });
});
