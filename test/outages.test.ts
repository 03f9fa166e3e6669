import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import net from 'node:net';
import { join } from 'node:path';
import { buffer as readBytes } from 'node:stream/consumers';
import { suite } from 'node:test';
import type { GatewayConfig } from '../gateway.ts';
import { type Answer, outcomeOf } from './answers.ts';
import { assert, closed, linesOf, type LogLine, pass, requests, until } from './assertions.ts';
import { ownHost, serve, sparePort, startBackend, startRawBackend } from './backend.ts';
import { CERTS } from './certificates.ts';
import { ask, beginSend, open, untilServed } from './client.ts';
import { folder } from './files.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { LARGE, listened, queueUp, send, sendMany, settled } from './held.ts';
import { takeLookup } from './lookups.ts';
import { isNode, ON_NODE } from './runtime.ts';
import { ABOUT, BEARER, FROM, HELLO, MESSAGE, RECEIVE, SEND, SENT } from './samples.ts';
import { type Gateway, PATIENT_MS, script, start, startBoth, startGateway, startProcess } from './start.ts';
import { RECEIVING } from './websocket.ts';

/** A backend like signal-cli-rest-api, which is down until `up`. `settings` are the gateway's settings for it. */
async function startDown(t: TestContext, wait: string, config: GatewayConfig = {}) {
  const [backend, host] = [await startBackend(t), ownHost()];
  const port = await sparePort(host);
  const up = async (): Promise<http.Server> => {
    const server = http.createServer((req, res) => {
      res.shouldKeepAlive = false; // a request on a connection that is just ending is lost, and may not be sent again
      backend.server.emit('request', req, res);
    });
    server.on('connection', () => void backend.connections++);
    await serve(t, server, port, host);
    return server;
  };
  const url = `http://${host}:${port}`;
  const settings = (time: string, timeout = '150s'): GatewayConfig => ({
    ...config,
    backend: { url, wait: time, parallel: 1, timeout },
  });
  return { backend, url, up, settings, gateway: await startGateway(t, { url }, settings(wait)) };
}

/** The gateway knows that the backend is down. */
async function isDown(gateway: Gateway): Promise<void> {
  await until(() => linesOf(gateway, /is unreachable/).length > 0);
}

suite('outages', SIDE_BY_SIDE, () => {
  test('if a backend goes down in the middle of twenty sends, none is lost and none is duplicated', async (t) => {
    const { backend, gateway, url, up } = await startDown(t, '1h');
    const server = await up();
    let most = 0; // connections in addition to the sends
    backend.server.prependListener('request', () => {
      most = Math.max(most, backend.connections - backend.sent.length);
      if (backend.seen.length === 7) server.close();
    });
    const names = Array.from({ length: 20 }, (_, i) => `number ${i}`);
    const answers = await queueUp(gateway, names);
    await isDown(gateway);
    assert.equal(backend.sent.length, 8);
    // Requests other than sends do not wait.
    const health = { path: '/v1/health', headers: BEARER };
    assert.equal(outcomeOf(await ask(gateway, health)), '502 backend_unreachable');
    await up();
    for (const answer of answers) assert.equal((await answer).status, 201);
    // In the order in which they were sent. Message 12 once arrived after message 27.
    assert.deepEqual(backend.sent.map(({ message }) => message), names);
    assert.equal(most, 2, 'some connected before they had a slot; one connection is that of the probe');
    const lines = linesOf(gateway, /backend is (?:un)?reachable/).map((
      line,
    ) => [line.level, line.backend, line.waiting]);
    assert.deepEqual(lines, [1, 12].map((waiting) => ['warn', url, waiting]));
  });

  test('a probe takes no longer to connect than a request may: backend.timeout bounds both', async (t) => {
    const { url, sockets: tries } = await startRawBackend(t, () => {}); // with TLS no connection is established
    const backend = { url: url.replace('http', 'https'), wait: '0', timeout: '200ms' };
    const gateway = await startGateway(t, backend, { backend }, { connectTimeoutMs: PATIENT_MS });
    assert.equal(outcomeOf(await send(gateway, 'hi')), '502 backend_unreachable');
    await until(() => tries.length >= 4);
  });

  test(
    'a request whose client disconnects while its connection is established is not sent, although it has its slot',
    { skip: !isNode && 'the hook into name lookups needs Node' },
    async (t) => {
      const backend = await startBackend(t);
      const url = `http://made-late.test:${backend.port}`;
      let connects: (() => void) | undefined;
      takeLookup(t, 'made-late.test', (_, find) => void (connects = () => find(new URL(backend.url).hostname)));
      const gateway = await startGateway(t, { url }, { backend: { url, parallel: 1 } }, {
        connectTimeoutMs: PATIENT_MS,
        slotTimeoutMs: PATIENT_MS,
      });
      const { socket } = open(t, gateway, SEND);
      await until(() => connects !== undefined);
      socket.destroy();
      await until(() => requests(gateway).some(({ code }) => code === 'client_left'));
      const late = connects!;
      connects = undefined;
      late();
      const second = send(gateway, 'second');
      await until(() => connects !== undefined);
      connects!();
      assert.equal(outcomeOf(await second), '201');
      assert.deepEqual(backend.sent.map(({ message }) => message), ['second']);
    },
  );

  test('while the backend is down, only one probe at a time connects, whatever clients do; a client that disconnects meanwhile is not an outage', async (t) => {
    // With TLS no connection is established, so each attempt is visible, and ends when the test ends it.
    const { url, sockets: tries } = await startRawBackend(t, () => {});
    const backend = { url: url.replace('http', 'https'), wait: '1h', parallel: 1 };
    const gateway = await startGateway(t, backend, { backend, ...RECEIVING }, { connectTimeoutMs: 1e6 });
    const first = open(t, gateway, SEND);
    await until(() => tries.length === 1);
    first.socket.destroy();
    await until(() => requests(gateway).some(({ code }) => code === 'client_left'));
    assert.deepEqual(linesOf(gateway, /is unreachable/), []);
    const second = open(t, gateway, SEND);
    await until(() => tries.length === 2);
    tries[1]!.destroy(); // from now on the backend is down
    await until(() => tries.length === 3);
    for (const answer of sendMany(gateway, 24)) answer.catch(() => {});
    for (let count = 3; count < 7; count++) {
      await until(() => tries.length === count);
      const poll = await ask(gateway, { path: RECEIVE, headers: BEARER });
      assert.equal(outcomeOf(poll), '502 backend_unreachable');
      if (count === 4) second.socket.destroy();
      await settled(gateway);
      assert.equal(tries.length, count);
      tries.at(-1)!.destroy();
    }
    assert.deepEqual(linesOf(gateway, /is unreachable/).map((line) => line.waiting), [1]);
    const ended = closed(tries.at(-1)!);
    await gateway.close();
    await ended;
  });

  /** A backend with TLS. `how` decides what happens to its connections, and `finish` ends the pending responses. */
  async function startFlaky(t: TestContext, env: NodeJS.ProcessEnv) {
    const held: [message: string, res: http.ServerResponse][] = [];
    const server = https.createServer(CERTS[0], async (req, res) => {
      const body = await readBytes(req);
      if (req.method === 'POST') held.push([JSON.parse(String(body)).message, res]);
      else res.end('{}');
    });
    const backend = {
      how: 'serve' as 'serve' | 'refuse' | 'hang' | (() => 'serve' | 'refuse'),
      sockets: [] as net.Socket[],
      held,
      finish: () => held.splice(0).forEach(([, res]) => res.writeHead(201, { 'Content-Length': 2 }).end('[]')),
    };
    const front = net.createServer((socket) => {
      backend.sockets.push(socket.on('error', () => {}));
      const how = typeof backend.how === 'string' ? backend.how : backend.how();
      if (how === 'serve') server.emit('connection', socket);
      else if (how === 'refuse') socket.destroy();
    });
    const url = (await serve(t, front, 0, '127.0.0.1')).replace('http', 'https');
    t.after(() => server.closeAllConnections());
    const file = join(folder(t), 'ca.pem');
    writeFileSync(file, CERTS[0].cert);
    const own = { GATEWAY_BACKEND_WAIT: '1h', NODE_EXTRA_CA_CERTS: file, ...env };
    const gateway = await startProcess(t, { backend: { url }, env: own });
    await until(() => linesOf(gateway, /^the backend answers/).length === 1); // on a separate connection
    backend.sockets.length = 0;
    const say = (message: string): Promise<Answer> => ask(gateway, { body: { ...MESSAGE, message }, headers: BEARER });
    return { backend, gateway, say };
  }

  test('a failed connection that was started before the gate reopened is not a new outage', ON_NODE, async (t) => {
    const { backend, gateway, say } = await startFlaky(t, {});
    backend.how = 'hang';
    const early = say('early');
    await until(() => backend.sockets.length === 1);
    backend.how = 'refuse';
    const late = say('late');
    await until(() => linesOf(gateway, /is unreachable/).length === 1);
    backend.how = 'serve';
    await until(() => backend.held.length === 1);
    backend.sockets[0]!.destroy();
    await until(() => backend.held.length === 2);
    backend.finish();
    for (const answer of [early, late]) assert.equal(outcomeOf(await answer), '201');
    assert.equal(linesOf(gateway, /is unreachable/).length, 1);
  });

  test('a kept connection does not open the gate: the backend must accept a new one', ON_NODE, async (t) => {
    const { backend, gateway, say } = await startFlaky(t, {});
    const first = say('first');
    await until(() => backend.held.length === 1);
    backend.how = 'refuse';
    const second = say('second');
    await until(() => linesOf(gateway, /is unreachable/).length === 1);
    backend.finish();
    assert.equal(outcomeOf(await first), '201');
    const tries = backend.sockets.length;
    await until(() => backend.sockets.length >= tries + 2 || linesOf(gateway, /reachable again/).length > 0);
    assert.deepEqual(linesOf(gateway, /reachable again/), []);
    backend.how = 'serve';
    await until(() => backend.held.length === 1);
    backend.finish();
    assert.equal(outcomeOf(await second), '201');
  });

  test('outages that end and start again share backend.wait', ON_NODE, async (t) => {
    const { backend, gateway, say } = await startFlaky(t, { GATEWAY_BACKEND_WAIT: '8s' });
    backend.how = () => backend.sockets.length % 2 === 1 ? 'refuse' : 'serve'; // each probe connects, each request fails
    assert.equal(outcomeOf(await say('hello')), '502 backend_unreachable');
    assert.ok(linesOf(gateway, /reachable again/).length > 1, 'there was one outage');
  });

  test(
    'after an outage the slots go to the first requests, although their connections failed last',
    ON_NODE,
    async (t) => {
      const { backend, gateway, say } = await startFlaky(t, { GATEWAY_BACKEND_PARALLEL: '2' });
      backend.how = 'hang';
      const answers = [say('a')];
      await until(() => backend.sockets.length === 1);
      answers.push(say('b'));
      await until(() => backend.sockets.length === 2);
      answers.push(say('c'));
      for (let i = 0; i < 3; i++) await ask(gateway, { path: '/healthz' });
      backend.how = 'refuse';
      backend.sockets[1]!.destroy();
      await until(() => linesOf(gateway, /is unreachable/).length === 1);
      backend.sockets[0]!.destroy();
      const tries = backend.sockets.length;
      await until(() => backend.sockets.length >= tries + 2);
      backend.how = 'serve';
      await until(() => backend.held.length === 2);
      assert.deepEqual(backend.held.map(([message]) => message).sort(), ['a', 'b']);
      backend.finish();
      await until(() => backend.held.length === 1);
      backend.finish();
      for (const answer of answers) assert.equal(outcomeOf(await answer), '201');
    },
  );

  /** From now on, each lookup of this name fails with the next of these codes. */
  function failLookup(t: TestContext, name: string, ...codes: string[]): void {
    takeLookup(t, name, (done) => {
      const code = codes.length > 1 ? codes.shift() : codes[0];
      process.nextTick(done, Object.assign(new Error(), { code }));
    });
  }

  test('a send that waited in vain is refused with the last failure as the reason', ON_NODE, async (t) => {
    failLookup(t, 'unknown.test', 'ENOTFOUND', 'ENOTFOUND', 'EAI_AGAIN');
    const url = 'http://unknown.test';
    const gateway = await startGateway(t, { url }, { backend: { url, wait: '3s' } });
    assert.equal(outcomeOf(await send(gateway, 'hello')), '502 backend_unreachable');
    assert.equal(requests(gateway)[0].reason, 'EAI_AGAIN');
    assert.deepEqual(linesOf(gateway, /is unreachable/).map(({ reason }) => reason), ['ENOTFOUND']);
  });

  test('the log counts as waiting only the requests that wait for this backend', async (t) => {
    const { backend, gateway, up, settings } = await startDown(t, '1h', { allow: ['messaging'] });
    gateway.reload(settings('1h'));
    const held: http.ServerResponse[] = [];
    let begun = 0;
    backend.server.removeAllListeners('request').on(
      'request',
      (req: http.IncomingMessage, res: http.ServerResponse) => {
        begun++;
        req.on('error', () => {}).resume().on('end', () => held.push(res));
      },
    );
    const server = await up();
    const upload = listened(beginSend(gateway, { ...BEARER, 'content-length': LARGE.length }));
    t.after(() => upload.destroy());
    upload.write(LARGE.slice(0, -1));
    await until(() => begun === 1);
    const first = send(gateway, 'first');
    await until(() => held.length === 1);
    const waits = await queueUp(gateway, ['second']);
    // This one waits for its slot, and not for a backend.
    const groups = ask(gateway, { path: `/v1/groups/${FROM}`, headers: BEARER });
    for (let i = 0; i < 3; i++) await settled(gateway);
    server.close();
    held.pop()!.writeHead(201, { Connection: 'close' }).end('[]'); // its connection cannot be used for the others
    assert.deepEqual([await first, await groups].map(outcomeOf), ['201', '502 backend_unreachable']);
    gateway.reload({ backend: { url: `http://127.0.0.1:${await sparePort()}`, wait: '1h' } });
    waits.push(send(gateway, 'third'));
    await until(() => linesOf(gateway, /is unreachable/).length === 2);
    assert.deepEqual(linesOf(gateway, /is unreachable/).map(({ waiting }) => waiting), [1, 1]);
    await gateway.close();
    for (const wait of waits) assert.equal(outcomeOf(await wait), '503 shutting_down');
  });

  test('a failure of this machine is 502 for that request only, and not an outage', ON_NODE, async (t) => {
    failLookup(t, 'no-port-is-free.test', 'EADDRNOTAVAIL');
    const url = 'http://no-port-is-free.test';
    const gateway = await startGateway(t, { url }, { backend: { url, wait: '1h' } });
    const answers = await Promise.all(sendMany(gateway, 3));
    assert.deepEqual(answers.map(outcomeOf), Array(3).fill('502 backend_unreachable'));
    assert.deepEqual(requests(gateway).map(({ reason }) => reason), Array(3).fill('EADDRNOTAVAIL'));
    assert.deepEqual(linesOf(gateway, /is unreachable/), []);
  });

  test('the pauses between attempts to connect to a backend that is down grow to one second at most', async (t) => {
    const tries: net.Socket[] = [];
    const server = net.createServer((socket) => tries.push(socket.on('error', () => {}).destroy()));
    const url = (await serve(t, server)).replace('http', 'https');
    const gateway = await startGateway(t, { url }, {});
    assert.equal(outcomeOf(await send(gateway, 'lost')), '502 backend_unreachable');
    await until(() => tries.length === 10); // after 50 s if the pauses continued to grow
  });

  test('a reload to another address ends the attempts at the old one, at once or with the last waiting request', async (t) => {
    for (const isWaiting of [false, true]) {
      const { url, sockets: tries } = await startRawBackend(t, () => {});
      const old = { url: url.replace('http', 'https'), wait: '1h' };
      const gateway = await startGateway(t, old, { backend: old }, { connectTimeoutMs: 1e6 });
      const request = isWaiting ? SEND : ABOUT.replace('/v1/about', '/v1/health');
      const { socket, text } = open(t, gateway, request);
      await until(() => tries.length === 1);
      tries[0]!.destroy();
      await until(() => tries.length === 2);
      if (!isWaiting) assert.equal(outcomeOf(text()), '502 backend_unreachable');
      gateway.reload({ backend: { url: 'http://127.0.0.1:1' } });
      await settled(gateway);
      if (isWaiting) assert.ok(!tries[1]!.destroyed, 'the request that waits still needs the attempt');
      socket.destroy();
      await closed(tries[1]!);
    }
  });

  test('closing ends the attempt of a probe that no request waits for', async (t) => {
    const { url, sockets: tries } = await startRawBackend(t, () => {});
    const to = { url: url.replace('http', 'https') };
    const gateway = await startGateway(t, to, {}, { connectTimeoutMs: 1e6 });
    const about = ask(gateway, { headers: BEARER });
    await until(() => tries.length === 1);
    tries[0]!.destroy();
    assert.equal(outcomeOf(await about), '502 backend_unreachable');
    await until(() => tries.length === 2);
    await gateway.close();
    await closed(tries[1]!);
  });

  // A probe by plain TCP opened the gate: in 20 s there were 761 connections, 305 log lines, and no response.
  test('a backend with an untrusted certificate keeps the gate shut: its sends wait, and are 502 with the reason', async (t) => {
    const server = https.createServer(CERTS[0]);
    let connections = 0;
    server.on('connection', () => connections++);
    const url = (await serve(t, server)).replace('http', 'https');
    const gateway = await startGateway(t, { url }, { backend: { url, wait: '1500ms' } });
    const answers = await Promise.all(sendMany(gateway, 20));
    assert.deepEqual(answers.map(outcomeOf), Array(20).fill('502 backend_unreachable'));
    assert.match(String(requests(gateway)[0].reason), /CERT|SELF_SIGNED|failed/);
    // One by a send, and those by the probe, whose pauses grow to a second.
    assert.ok(connections < 10, `${connections} connections`);
    assert.equal(linesOf(gateway, /backend is (?:un)?reachable/).length, 1);
  });

  // Over a slow link, no attempt but the last had time to connect: the sends never arrived, and curl did.
  test('each of several addresses of a backend has seconds to connect', ON_NODE, async (t) => {
    const { createConnection } = http.Agent.prototype;
    const seen: unknown[] = [];
    http.Agent.prototype.createConnection = function (options, ...rest) {
      seen.push((options as { autoSelectFamilyAttemptTimeout?: number }).autoSelectFamilyAttemptTimeout);
      return createConnection.call(this, options, ...rest);
    };
    t.after(() => void (http.Agent.prototype.createConnection = createConnection));
    const { gateway } = await startBoth(t);
    assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
    assert.ok(seen.includes(3000), `${seen}`);
  });

  test('a port that drops packets shuts the gate, and sends pass once it answers', {
    skip: !isNode && 'one runtime is enough',
  }, async (t) => {
    const code = `import net from 'node:net';
    const server = net.createServer((socket) => socket.on('error', () => {}).on('data', () => socket.end(${
      JSON.stringify(SENT)
    })));
    server.listen({ port: 0, host: '127.0.0.1', backlog: 1 }, () => console.log('port', server.address().port));`;
    const child = start([], {}, script(t, code));
    t.after(() => child.kill('SIGKILL'));
    await until(() => /port \d+/.test(child.output()));
    const port = Number(/\d+/.exec(child.output()));
    // Its queue of connections fills, and the system drops further ones. Where packets wait for the processor, Linux
    // accepts more than the queue has room for, so the first that is dropped shows that it is full.
    child.kill('SIGSTOP');
    const fillers: net.Socket[] = [];
    for (let isTaken = true; isTaken;) {
      const { socket } = open(t, { port });
      fillers.push(socket);
      isTaken = await Promise.race([once(socket, 'connect').then(() => true), pass(500).then(() => false)]);
    }
    const config = { backend: { url: `http://127.0.0.1:${port}`, wait: '1h' } };
    const gateway = await startGateway(t, { url: config.backend.url }, config, { connectTimeoutMs: 1500 });
    const sends = sendMany(gateway, 3);
    await isDown(gateway);
    assert.equal(linesOf(gateway, /is unreachable/)[0]!.reason, 'timeout');
    for (const socket of fillers) socket.destroy();
    child.kill('SIGCONT');
    for (const answer of sends) assert.equal((await answer).status, 201);
    // Another dropped packet may shut the gate again, so the lines alternate.
    const lines = linesOf(gateway, /backend is (?:un)?reachable/).map(({ message }) => message.includes('unreachable'));
    assert.deepEqual(lines, lines.map((_, i) => i % 2 === 0));
  });

  // The wait counted from before the queue, so the whole queue was lost at the first refused connection.
  test('a request that waited for a slot still has all of backend.wait; consecutive outages share it; GET /v1/about waits like a send', async (t) => {
    const { backend, gateway, up, settings } = await startDown(t, '1500ms');
    const held: http.ServerResponse[] = [];
    backend.server.removeAllListeners('request');
    backend.server.on('request', (_, res: http.ServerResponse) => held.push(res));
    let server = await up();
    gateway.reload(settings('1500ms'));
    const first = send(gateway, 'hangs');
    await until(() => held.length === 1);
    const line = [send(gateway, 'waits'), ask(gateway, { headers: BEARER })];
    await until(() => held.length === 2); // GET /v1/about needs no slot
    await new Promise((resolve) => setTimeout(resolve, 2000));
    server.close();
    for (const res of held.splice(0)) res.socket!.destroy();
    assert.equal(outcomeOf(await first), '502 bad_backend_answer');
    assert.equal(outcomeOf(await line[1]!), '502 bad_backend_answer');
    await isDown(gateway);
    const about = ask(gateway, { headers: BEARER });
    assert.equal(outcomeOf(await ask(gateway, { path: '/v1/health', headers: BEARER })), '502 backend_unreachable');
    server = await up();
    await until(() => held.length === 2);
    for (const res of held.splice(0)) res.writeHead(201).end('[]');
    for (const answer of [line[0]!, about]) assert.equal((await answer).status, 201);
    server.close();
  });

  test('the time for a slot is a budget: a request that loses its slot to an outage waits for the next one only for the rest', async (t) => {
    const { backend, gateway, up, settings } = await startDown(t, '1h');
    let arrived = 0;
    let ended = 0;
    backend.server.removeAllListeners('request');
    backend.server.on('request', (req: http.IncomingMessage) => { // and never responds
      arrived++;
      req.resume().on('end', () => ended++);
    });
    const server = await up();
    gateway.reload(settings('1h', '4s'));
    const upload = listened(beginSend(gateway, { ...BEARER, 'content-length': LARGE.length }));
    upload.write(LARGE.slice(0, -1));
    await until(() => arrived === 1, 'the large body to begin');
    const hangs = send(gateway, 'hangs');
    await until(() => ended === 1, 'a send to take the slot');
    await pass(1000);
    const waits = send(gateway, 'waits'); // 3 s, until the send that hangs has its 504
    server.close();
    assert.equal(outcomeOf(await hangs), '504 backend_timeout');
    await isDown(gateway);
    upload.end(LARGE.slice(-1));
    await until(() => ended === 2, 'the large body to take the slot');
    const sinceMs = performance.now();
    await up();
    assert.equal(outcomeOf(await waits), '503 busy');
    const tookMs = performance.now() - sinceMs;
    assert.ok(tookMs < 3000, `${tookMs} ms`); // and not another 4 s
    upload.destroy();
  });

  test('a reload to another address starts without an outage; waiting requests, also with a large body, keep the old address', async (t) => {
    const { backend: old, gateway, up } = await startDown(t, '1h');
    const backend = await startBackend(t);
    const messages = ['old 1', 'old 2', 'x'.repeat(200_000)];
    const waits = await queueUp(gateway, messages);
    await isDown(gateway);
    gateway.reload({ backend: { url: backend.url, wait: '1h', parallel: 1 } });
    assert.equal((await send(gateway, 'new')).status, 201);
    assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
    await up();
    for (const answer of waits) assert.equal((await answer).status, 201);
    assert.deepEqual([old, backend].map(({ sent }) => sent.map(({ message }) => message)), [messages, ['new']]);
    assert.equal(linesOf(gateway, /is unreachable/).length, 1);
  });

  test('while the backend is down, requests that may not wait (backend.wait 0) are 502 at once; any request detects its return', async (t) => {
    const { gateway, up } = await startDown(t, '0', RECEIVING);
    const poll = { path: RECEIVE, headers: BEARER };
    for (const answer of [ask(gateway, poll), send(gateway, 'lost')]) {
      assert.equal(outcomeOf(await answer), '502 backend_unreachable');
    }
    await up();
    await untilServed(gateway, poll); // after a pause
    assert.equal(linesOf(gateway, /^the backend is unreachable$/).length, 1); // and not that sends wait
    const [{ reason: cause }] = linesOf(gateway, /is unreachable/) as [LogLine];
    const again = linesOf(gateway, /reachable again/).map(({ reason, after }) => [reason, after]);
    assert.deepEqual(again, [[undefined, cause]], 'what is over is no reason');
  });

  // Sends were 502 in waves, each after `backend.wait`, so 24 sends took 24 times as long.
  test('a send waits for a backend that is down, at most backend.wait and backend.timeout; the wait ends for all at once, with the client and with the gateway', async (t) => {
    const { backend, gateway, up, settings } = await startDown(t, '500ms', { shutdown: '1h' });
    let met = 0;
    gateway.server.on('request', () => met++);
    const startMs = performance.now();
    const large = { body: LARGE, headers: BEARER };
    const late = [...sendMany(gateway, 24), ask(gateway, large)];
    await until(() => met === 25);
    gateway.reload(settings('1h', '200ms')); // backend.timeout applies as well
    const others = [send(gateway, 'late'), ask(gateway, large)];
    await Promise.race(late);
    assert.ok(performance.now() - startMs > 450, 'one did not wait');
    for (const answer of await Promise.all([...late, ...others])) {
      assert.equal(outcomeOf(answer), '502 backend_unreachable');
      assert.match(answer.json.error, /nothing was sent/);
    }
    assert.ok(performance.now() - startMs < 6000, 'they waited in sequence');
    gateway.reload(settings('1h'));
    const left = open(t, gateway, SEND);
    await settled(gateway);
    left.socket.destroy();
    await until(() => requests(gateway).some(({ code }) => code === 'client_left'));
    const server = await up();
    assert.equal((await send(gateway, 'last')).status, 201);
    await new Promise((resolve) => server.close(resolve));
    const waits = await queueUp(gateway, ['waits for the backend', 'waits too']);
    await gateway.close();
    for (const wait of waits) assert.equal(outcomeOf(await wait), '503 shutting_down');
    assert.deepEqual(backend.sent.map(({ message }) => message), ['last']);
  });

  test('a backend that takes a connection and closes it is 502 without a retry, because a byte may have been sent', async (t) => {
    // Not reset at once, because that is not a connection, even for the system.
    for (const way of ['connection end', 'connection destroy', 'data end', 'data resetAndDestroy']) {
      const [when, end] = way.split(' ') as [string, 'end' | 'destroy' | 'resetAndDestroy'];
      for (const body of [HELLO, LARGE]) {
        let count = 0;
        const server = net.createServer((socket) => {
          count++;
          socket.on('error', () => {}).on('end', () => socket.destroy()).resume();
          if (when === 'connection') socket[end]();
          else socket.once('data', () => socket[end]());
        });
        const url = await serve(t, server);
        const gateway = await startGateway(t, { url }, { backend: { url, wait: '1m', parallel: 1 } });
        const outcome = outcomeOf(await ask(gateway, { body, headers: BEARER }));
        assert.deepEqual([outcome, count], ['502 bad_backend_answer', 1], `${way} ${body.length}`);
      }
    }
  });
});
