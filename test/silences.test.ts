import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import net, { type AddressInfo } from 'node:net';
import { suite } from 'node:test';
import { pathToFileURL } from 'node:url';
import { outcomeOf } from './answers.ts';
import { assert, linesOf, type LogLine, requests, until } from './assertions.ts';
import { answerAsBackend, type Backend, seenOf, serve, sparePort, startBackend } from './backend.ts';
import { CERTS } from './certificates.ts';
import { ask, open, scrape, untilScraped } from './client.ts';
import { slots } from './configs.ts';
import { fileWith } from './files.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { isNode } from './runtime.ts';
import { answerAll, send, settled, startHeld } from './held.ts';
import { ABOUT, basic, BEARER, HELLO, RECEIVE, SECRET, SEND } from './samples.ts';
import { patientProgram, startBoth, startGateway, startProcess } from './start.ts';

const SILENT = /^a request has had no answer from the backend for 30 s$/;

/** A backend that never answers, and a gateway that soon has had no answer for as long as is worth a warning. */
async function startSilent(t: TestContext, parallel: number, now: () => number) {
  const held: http.ServerResponse[] = [];
  const backend = await startBackend(t, (req, res) => void req.resume().on('end', () => held.push(res)));
  const config = { allow: ['send', 'info', 'receive', 'metrics'], ...slots(backend, parallel) };
  const gateway = await startGateway(t, backend, config, { slotTimeoutMs: 100, now });
  /** Sends a request, which reaches the backend. */
  const hang = async (bytes: string): Promise<net.Socket> => {
    const { length } = held;
    const { socket } = open(t, gateway, bytes);
    await until(() => held.length > length);
    return socket;
  };
  return { backend, gateway, hang, warnings: () => linesOf(gateway, SILENT) };
}

suite('silences', SIDE_BY_SIDE, () => {
  test('a proxy that answers 502, 503 or 504 while the backend starts is asked again', async (t) => {
    const statuses = [502, 503, 504];
    const front = http.createServer((req, res) => {
      const status = statuses.shift();
      if (status) return void res.writeHead(status).end('starting');
      res.setHeader('Content-Type', 'application/json').end('{"version":"0.100","mode":"native"}');
      req.resume();
    });
    const gateway = await startProcess(t, { backend: { url: await serve(t, front) }, program: patientProgram(t) });
    await until(() => linesOf(gateway, /^the backend answers/).length === 1);
    const said = linesOf(gateway, /^the backend /).map(({ message, reason, version }) => [message, reason ?? version]);
    assert.deepEqual(said, [['the backend did not answer as expected', 'status 502'], [
      'the backend answers',
      '0.100',
    ]]);
  });

  test('a wrong answer after a silence is logged too, and ends the query at start', async (t) => {
    const statuses = [503, 500];
    const front = http.createServer((_, res) => void res.writeHead(statuses.shift() ?? 200).end('{}'));
    const gateway = await startProcess(t, { backend: { url: await serve(t, front) }, program: patientProgram(t) });
    const said = () => linesOf(gateway, /^the backend /).map(({ level, reason }) => `${level} ${reason}`);
    await until(() => said().length === 2);
    await gateway.close();
    assert.deepEqual([said(), statuses], [['warn status 503', 'warn status 500'], []]);
  });

  test('a request that has had no answer for 30 s is a warning, with a slot and without, even if its client has disconnected; a poll is not', async (t) => {
    for (const [parallel, bytes, leaves] of [[4, SEND, false], [4, SEND, true], [0, SEND, false], [4, ABOUT, false]]) {
      let nowMs = Date.now();
      const everyMinute = () => nowMs += 60_000; // so that no warning is left out
      const { backend, gateway, hang, warnings } = await startSilent(t, Number(parallel), everyMinute);
      await hang(ABOUT.replace('/v1/about', RECEIVE)); // its timer runs before that of the other request
      const socket = await hang(String(bytes));
      if (leaves) socket.destroy();
      await until(() => warnings().length > 0, 'the warning');
      const told = warnings().map(({ level, backend, waiting }) => [level, backend, waiting]);
      assert.deepEqual(told, [['warn', backend.url, 2]], `${parallel} ${bytes}`);
      assert.deepEqual(requests(gateway).map(outcomeOf), leaves ? ['499 client_left'] : []);
    }
  });

  test('a request that was answered in time is no warning later', async (t) => {
    let nowMs = Date.now();
    const now = () => nowMs += 60_000; // so that no warning is left out
    const allow = ['send', 'metrics'];
    const { backend, gateway } = await startHeld(t, 1, { allow }, { slotTimeoutMs: 1000, now });
    await answerAll(backend, [send(gateway, 'answered')]);
    open(t, gateway, SEND);
    await untilScraped(gateway, 'slots_overdue', 1, { path: '/metrics', headers: BEARER });
    assert.equal(linesOf(gateway, SILENT).length, 1);
  });

  test('requests without an answer are one warning a minute', async (t) => {
    const clock = { nowMs: Date.now() };
    const { gateway, hang, warnings } = await startSilent(t, 1, () => clock.nowMs);
    await hang(SEND);
    await hang(SEND); // when the first one has had no answer
    await untilScraped(gateway, 'slots_overdue', 2, { path: '/metrics', headers: BEARER });
    assert.equal(warnings().length, 1);
    clock.nowMs += 60_000;
    await hang(ABOUT);
    await until(() => warnings().length === 2);
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
    const gateway = await startProcess(t, {
      backend: { url },
      env: { GATEWAY_ALLOW: 'metrics,info' },
      program: patientProgram(t),
    });
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
    const gateway = await startProcess(t, { args: ['--config', file], program: patientProgram(t) });
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
    // A host called CODE.test fails with this code, as one whose machine or network is down.
    const hook = `import dns from 'node:dns'; const { lookup } = dns; dns.lookup = (host, options, done) =>
      host.endsWith('.test')
        ? setImmediate(done, Object.assign(new Error(host), { code: host.slice(0, -5).toUpperCase() }))
        : lookup(host, options, done);`;
    const env = { NODE_OPTIONS: `--import=${pathToFileURL(fileWith(t, hook, 'hook.mjs'))}` };
    const gateway = await startProcess(t, { args: ['--config', file], env });
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
      [
        `http://api:password-of-backend@${host}/401`,
        /"reason":"status 401","hint":"put the right USER:PASSWORD@ into backend.url"/,
      ],
      [`http://${host}/401`, /"reason":"status 401","hint":"put the right USER:PASSWORD@ into backend.url"/],
      [`http://${host}/500{}`, /"reason":"status 500","hint":"correct backend.url: something else listens there"/],
      [`http://${host}/200hello`, /"reason":"no JSON object"/],
      [`http://${host}/200[]`, /"reason":"no JSON object"/],
      [`http://${host}/301`, /"reason":"status 301"/],
      [
        `http://127.0.0.1:${await sparePort()}`,
        /refused.*"hint":"start the backend, or correct its port; in a container, localhost is the container itself"/i,
      ],
      [`https://${host}`, /"hint":"correct http:\/\/ or https:\/\/ in backend.url"/],
      [`http://127.0.0.1:${portOf(resetting)}`, /"hint":"correct http:\/\/ or https:\/\/ in backend.url"/],
      [
        `http://127.0.0.1:${portOf(silent)}`,
        /"reason":"timeout","hint":"check the backend's log, or correct its address"/,
      ],
      [`https://127.0.0.1:${portOf(encrypted)}`, /"hint":"let this machine trust the backend's certificate"/],
      ...(isNode ? ['ehostunreach', 'enetunreach', 'etimedout'] : []).map((code): [string, RegExp] => [
        `http://${code}.test`,
        new RegExp(`"reason":"${code.toUpperCase()}","hint":"start the backend's machine, check the network, or`),
      ]),
      ['http://nowhere.invalid', /"hint":"start the backend, correct its name, or put both on one network"/],
    ];
    for (const [i, [url, said]] of rows.entries()) {
      writeFileSync(file, JSON.stringify(config(url)));
      process.kill(gateway.child.pid!, 'SIGHUP');
      const line = await heard(i + 2);
      assert.deepEqual([line.level, line.message], ['warn', 'the backend did not answer as expected'], url);
      assert.match(JSON.stringify(line), said);
    }
    const paths = [`200${about}`, '401', '401', '500%7B%7D', '200hello', '200[]', '301'];
    // With the userinfo of the URL, as a send has it.
    const credentials = [basic('api:password-of-backend'), basic('api:password-of-backend')];
    assert.deepEqual(asked, paths.map((path, i) => `GET /${path}/v1/about true ${credentials[i]}`));
    assert.doesNotMatch(gateway.output(), /password-of-backend/);
    await gateway.close();

    const both = await startBoth(t);
    await settled(both.gateway);
    assert.equal(both.backend.server.listenerCount('connection') > 0 && both.backend.connections, 0);
  });

  test('a gateway whose backend.url is its own address logs that, with and without tokens', async (t) => {
    for (const env of [{ GATEWAY_TOKENS: SECRET }, {}]) {
      const port = await sparePort();
      const url = `http://localhost:${port}`;
      const gateway = await startProcess(t, {
        env: { ...env, GATEWAY_LISTEN: `127.0.0.1:${port}`, GATEWAY_BACKEND_URL: url },
      });
      await until(() => linesOf(gateway, /^the backend /).length > 0);
      const [{ level, reason, hint }] = linesOf(gateway, /^the backend /) as [LogLine];
      const cure = "backend.url is this gateway's own address: give the backend's";
      assert.deepEqual([level, reason, hint], ['warn', 'own_address', cure]);
      await gateway.close();
    }
  });
});
