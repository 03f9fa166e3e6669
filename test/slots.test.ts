import { once } from 'node:events';
import http from 'node:http';
import net from 'node:net';
import { buffer as readBytes } from 'node:stream/consumers';
import { suite } from 'node:test';
import { type Answer, codeOf, outcomeOf, statusOf } from './answers.ts';
import { assert, closed, linesOf, logLines, pass, requests, until, within } from './assertions.ts';
import { barred, startBackend } from './backend.ts';
import { ask, beginSend, type Connection, open, raw, rawRequest } from './client.ts';
import { several, slots, tokens } from './configs.ts';
import { fileWith } from './files.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import {
  answerAll,
  arrived,
  beginLarge,
  LARGE,
  listened,
  queueUp,
  send,
  sendMany,
  settled,
  startHeld,
  statusFor,
} from './held.ts';
import {
  ABOUT,
  basic,
  BEARER,
  DEFAULTS,
  FROM,
  HELLO,
  LAST,
  MESSAGE,
  MIB,
  OTHER,
  post,
  RECEIVE,
  SECRET,
  SEND,
  sized,
} from './samples.ts';
import { startBoth, startGateway, startProcess } from './start.ts';
import { openWebSocket } from './websocket.ts';

suite('slots', SIDE_BY_SIDE, () => {
  test('the backend works on at most as many requests as there are slots, and 0 is no limit; no token of several holds all slots', async (t) => {
    for (
      const [names, parallel, most] of [['a', 1, 1], ['a', 2, 2], ['a', 0, 20], ['ab', 4, 3], ['ab', 1, 1]] as const
    ) {
      const { backend, gateway } = await startHeld(t, parallel, several(names));
      const flood = sendMany(gateway, 20);
      await until(() => backend.acting === most);
      for (let i = 0; i < 3; i++) await settled(gateway);
      assert.equal(backend.acting, most);
      if (most < parallel) { // so another token's send is served at once
        flood.push(send(gateway, 'other', OTHER));
        await until(() => arrived(backend).includes('other'));
      }
      await answerAll(backend, flood);
      assert.equal(backend.most, Math.max(most, parallel));
    }
  });

  // In a process of its own, because the time of this one ignores long turns of the event loop.
  test('attack: keep everybody waiting with large bodies; a send of another token goes between them', async (t) => {
    const backend = await startBackend(t);
    const tokens = { hostile: { secret: OTHER, defaults: DEFAULTS }, honest: { secret: SECRET } };
    const file = fileWith(t, { tokens, backend: { url: backend.url } });
    const gateway = await startProcess(t, { args: ['--config', file] });
    const keys = `${'{"\\u0061":'.repeat(40)}0${'}'.repeat(40)}`;
    const body = `{"message":"large","a":[${`${keys},`.repeat(600)}0]}`;
    const headers = { authorization: `Bearer ${OTHER}` };
    const large = Array.from({ length: 12 }, () => ask(gateway, { body, headers }));
    const { socket } = open(t, gateway);
    await until(() => backend.seen.length > 0);
    socket.write(SEND);
    for (const { status } of await Promise.all(large)) assert.equal(status, 201);
    await until(() => backend.seen.length === 13);
    const place = backend.seen.findIndex((seen) => !String(seen.body).includes('large'));
    assert.ok(place < 8, `it was number ${place + 1}`);
  });

  test('a large body whose client leaves while it waits for its turn is not sent, and those behind it are', async (t) => {
    const { backend, gateway } = await startBoth(t, { tokens: { hook: { secret: SECRET, defaults: DEFAULTS } } });
    const posts = Array.from({ length: 8 }, (_, i) => {
      const to = { port: gateway.port, agent: false, method: 'POST', path: '/v2/send', headers: BEARER };
      const body = JSON.stringify({ message: String(i), a: Array.from({ length: 40_000 }, () => ({})) });
      return http.request(to).on('error', () => {}).end(body);
    });
    while (backend.seen.length === 0) await new Promise(setImmediate);
    for (const req of posts.slice(3, 7)) req.destroy();
    await until(() => requests(gateway).length === 8);
    const sent = backend.seen.map(({ body }) => JSON.parse(String(body)).message);
    assert.ok(['0', '1', '2', '7'].every((message) => sent.includes(message)), String(sent));
    // Some of the four may have had their turn before.
    const reached = requests(gateway).filter(({ status, reason }) =>
      status === 201 || /^answered/.test(String(reason))
    );
    assert.equal(sent.length, reached.length);
  });

  test('slots are assigned in the order of requests, and a reload to more or fewer slots takes effect', async (t) => {
    const { backend, gateway } = await startHeld(t, 1);
    const answers = await queueUp(gateway, [...'abcde']);
    await answerAll(backend, answers.slice(0, 3));
    await until(() => backend.acting === 1);
    assert.deepEqual(arrived(backend), [...'abcd']);
    gateway.reload(slots(backend, 2));
    await until(() => backend.acting === 2);
    await answerAll(backend, answers.slice(3));
    // Fewer: running requests are not affected, and the next one waits for both.
    const both = sendMany(gateway, 2);
    await until(() => backend.acting === 2);
    gateway.reload(slots(backend, 1));
    const last = await queueUp(gateway, ['h']);
    backend.answer();
    await Promise.race(both);
    await settled(gateway);
    assert.equal(backend.acting, 1);
    backend.answer();
    await Promise.all(both);
    await until(() => backend.acting === 1);
    assert.equal(arrived(backend).at(-1), 'h');
    await answerAll(backend, last);
    assert.ok(backend.connections > 0 && backend.connections <= 9, 'a reload keeps the connections');
  });

  test('a reload to another path or userinfo at the same address takes effect', async (t) => {
    const { backend, gateway } = await startBoth(t);
    for (
      const [url, path, user] of [['http://', '/new/', undefined], ['http://us:er@', '/', basic('us:er')]] as const
    ) {
      gateway.reload({ backend: { url: `${backend.url.replace('http://', url)}${path}`, wait: '0' } });
      await ask(gateway, { path: '/v1/health', headers: BEARER });
      const { url: asked, headers } = backend.seen.at(-1)!;
      assert.deepEqual([asked, headers.authorization], [`${path}v1/health`, user]);
    }
  });

  test('a reload to another address with more slots serves the requests that wait at the old one at once', async (t) => {
    const { backend, gateway } = await startHeld(t, 1);
    const answers = await queueUp(gateway, ['a', 'b']);
    assert.deepEqual(arrived(backend), ['a']);
    gateway.reload({ backend: { url: (await startBackend(t)).url, parallel: 2 } });
    await until(() => backend.acting === 2, 'the send that waits for a slot at the old address');
    await answerAll(backend, answers);
  });

  test('a slot is released, however a request ends', async (t) => {
    const replies = `PUT /v1/typing-indicator/${FROM}: 204 No Content | |
    POST /v1/reactions/${FROM}: 200 OK
    POST /v1/receipts/${FROM}: 2000 OK | |
    DELETE /v1/remote-delete/${FROM}: 301 Moved Permanently | Location: /x | Content-Length: 0 | |
    POST /v1/polls/${FROM}: 200 OK | Content-Length: 9 | | half
    GET /v1/search: 500 Internal Server Error | Content-Length: 0 | |
    POST /v2/send: 201 Created | Content-Length: 2 | | []`.split(/\n\s*/).map((line) => line.split(/: (.*)/));
    const backend = await startBackend(t, (req) => {
      const [, reply] = replies.find(([asked]) => asked === `${req.method} ${req.url}`) ?? [];
      const response = reply && barred(`HTTP/1.1 ${reply.replace(' |', ' | Connection: close |')}`).join('\r\n');
      req.resume().on('end', () => response && req.socket.end(response));
    });
    const config = { ...slots(backend, 1), ...tokens({ allow: ['messaging', 'info'] }) };
    const gateway = await startGateway(t, backend, config, { slotTimeoutMs: 50 });
    const isFree = async (end: string): Promise<void> => assert.equal((await send(gateway, end)).status, 201, end);
    for (const [method, path] of replies.map(([asked]) => asked!.split(' '))) {
      for (const body of method === 'GET' ? [undefined] : [HELLO, LARGE, `${LARGE.slice(0, -1)},"number":"-x"}`]) {
        const request = { method: method!, path: path!, headers: BEARER, ...body && { body } };
        await ask(gateway, request).catch(() => {}); // a truncated response breaks the connection
        await isFree(`${method} ${path} ${body?.length}`);
      }
    }
    const upgrade = ['Connection: Upgrade', 'Upgrade: websocket', `Authorization: Bearer ${SECRET}`];
    await rawRequest(gateway, '/v1/search', { headers: upgrade });
    await isFree('a wish to be upgraded');
    for (const end of ['backend_timeout', 'client_left']) {
      if (end === 'backend_timeout') gateway.reload({ ...config, ...slots(backend, 1, '100ms') });
      const { socket } = open(t, gateway, ABOUT.replace('/v1/about', `/v1/groups/${FROM}`)); // gets no response
      await until(() => backend.seen.at(-1)!.url.startsWith('/v1/groups'));
      gateway.reload(config);
      if (end === 'client_left') socket.destroy();
      await until(() => requests(gateway).at(-1)!.code === end);
      await isFree(end);
    }
  });

  test('info, polls and WebSockets neither wait for a slot nor hold one; uploads before their last byte and responses after their head hold none', async (t) => {
    const { backend, gateway } = await startHeld(t, 1, { allow: ['messaging', 'info'] });
    const upload = await beginLarge(gateway, backend);
    const openGet = (path: string): Connection => open(t, gateway, ABOUT.replace('/v1/about', path));
    openGet('/v1/search');
    await until(() => backend.acting === 1);
    backend.answer('write');
    const first = send(gateway, 'first');
    await until(() => backend.acting === 1);
    const gets = ['/v1/about', '/v1/health', RECEIVE].map(openGet);
    await until(() => backend.acting === 4);
    const asked = once(backend.server, 'upgrade');
    openWebSocket(t, gateway);
    await asked; // and does not respond
    await answerAll(backend, [first]);
    const second = send(gateway, 'second');
    await until(() => backend.acting === 4);
    for (let i = 0; i < 3; i++) backend.answer();
    for (const { text } of gets) await until(() => statusOf(text()) === 201);
    await answerAll(backend, [second]);
    upload.end(LARGE.slice(-1));
    await until(() => backend.acting === 1);
    backend.answer();
    assert.equal(await statusFor(upload), 201);
  });

  test('the last byte of a large body waits for its slot without a time limit for its client, and needs no slot after the response', async (t) => {
    const { backend, gateway } = await startHeld(t, 1, {}, { stallTimeoutMs: 3000 });
    backend.server.keepAliveTimeout = 0; // only the gateway closes a connection
    const asked = once(backend.server, 'request') as Promise<[http.IncomingMessage, http.ServerResponse]>;
    const uploads = [await beginLarge(gateway, backend), await beginLarge(gateway, backend)] as const;
    const [{ socket: ofEarly }, early] = await asked;
    const sends = [send(gateway, 'first')];
    await until(() => backend.acting === 1);
    for (const upload of uploads) upload.end(LARGE.slice(-1));
    await settled(gateway);
    // Another client that makes no progress from now on is timed out.
    assert.match(await raw(gateway, `${post(SECRET, 100)}{`), / 408 /);
    assert.deepEqual(arrived(backend), ['first']);
    early.writeHead(400, { 'Content-Length': 2 }).end('{}');
    assert.equal(await statusFor(uploads[0]), 400);
    await closed(ofEarly, 'the connection of a request that is not written to its end to be closed');
    await settled(gateway);
    assert.deepEqual([backend.acting, backend.seen[1]!.complete], [1, false]);
    await answerAll(backend, sends);
    await until(() => backend.acting === 1);
    assert.equal(backend.seen[1]!.body.toString(), LARGE);
    backend.answer();
    assert.equal(await statusFor(uploads[1]), 201);
    assert.equal(backend.most, 1);
  });

  // The parser error ended the request that the backend was working on, with a 400, and released its slot, so one token
  // could have any number of sends in progress.
  test('attack: release the slot of a send by GET by garbage in its body', async (t) => {
    const own = { allow: ['send', 'GET /v2/send'], tokens: { a: { secret: SECRET, defaults: DEFAULTS } } };
    const { backend, gateway } = await startHeld(t, 1, own, { lingerMs: 20 });
    const begun = `GET /v2/send?message=first HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer ${SECRET}\r\n`;
    const { socket, text } = open(t, gateway, `${begun}Transfer-Encoding: chunked\r\n\r\n`);
    await until(() => backend.acting === 1);
    socket.write('zz\r\n');
    const next = send(gateway, 'next');
    for (let i = 0; i < 3; i++) await settled(gateway);
    assert.deepEqual([backend.seen.length, text()], [1, '']);
    backend.answer();
    await closed(socket);
    assert.equal(statusOf(text()), 201);
    await answerAll(backend, [next]);
    assert.deepEqual(requests(gateway).map(({ status }) => status).filter((status) => status !== 200), [201, 201]);
  });

  // The time counted from the arrival, so requests were sent in the last milliseconds, and then answered with 504.
  test('a request without a slot within backend.timeout is 503 busy, and was not sent; its last byte restarts the time, so none is sent with no time left', async (t) => {
    const allow = ['messaging'];
    const { backend, gateway } = await startHeld(t, 1, { allow });
    const large = await beginLarge(gateway, backend); // under the old time-out
    large.end(LARGE.slice(-1));
    await until(() => backend.acting === 1);
    gateway.reload({ ...slots(backend, 1, '5s'), allow });
    const [second] = await queueUp(gateway, ['second']);
    const late = [{ body: MESSAGE }, { body: LARGE }, { path: `/v1/groups/${FROM}` }]
      .map((request) => ask(gateway, { ...request, headers: BEARER }));
    await pass(2000);
    backend.answer();
    assert.equal(await statusFor(large), 201);
    for (const answer of await Promise.all(late)) {
      assert.deepEqual([outcomeOf(answer), answer.headers['retry-after']], ['503 busy', '10']);
      assert.match(answer.json.error, /nothing was sent/);
    }
    assert.equal(outcomeOf(await second!), '504 backend_timeout');
    const { ms } = requests(gateway).find(({ code }) => code === 'backend_timeout')!;
    assert.ok(ms > 6900, `it was refused after ${ms} ms, of which it had waited 2000 for its slot`);
    assert.deepEqual(arrived(backend), ['large', 'second']);
  });

  // 40 clients that disconnected after 40 ms had 40 requests in progress despite a limit of 1.
  test('a request whose client disconnects while waiting for a slot is not sent; later the slot is kept, and the final status is logged', async (t) => {
    for (const parallel of [1, 2]) {
      const { backend, gateway } = await startHeld(t, parallel);
      const clients = Array.from({ length: 40 }, () => open(t, gateway, SEND));
      await until(() => backend.acting === parallel);
      const large = await beginLarge(gateway, backend);
      large.end(LARGE.slice(-1));
      await settled(gateway);
      large.destroy();
      for (const { socket } of clients) socket.destroy();
      await until(() => requests(gateway).filter(({ code }) => code === 'client_left').length === 41 - parallel);
      const last = send(gateway, 'last');
      await settled(gateway);
      assert.equal(backend.acting, parallel);
      for (let i = 0; i < parallel; i++) backend.answer();
      await until(() => arrived(backend).includes('last'));
      await answerAll(backend, [last]);
      const counts = [backend.most, arrived(backend).length, backend.seen.length];
      assert.deepEqual(counts, [parallel, parallel + 1, parallel + 2]);
      const reasons = requests(gateway).filter(({ status }) => status === 499).map(({ reason }) => reason);
      assert.deepEqual(reasons, [...Array(41 - parallel).fill(undefined), ...Array(parallel).fill('answered_201')]);
    }
  });

  test('a request without a client is aborted when its slot is overdue, at once without slots, and when the gateway closes, which logs it', async (t) => {
    for (const [parallel, slotTimeoutMs, isEnd] of [[1, 100, false], [0, 1e6, false], [1, 1e6, true]] as const) {
      const { backend, gateway } = await startHeld(t, parallel, { shutdown: '1h' }, { slotTimeoutMs });
      const { socket } = open(t, gateway, SEND);
      const [req] = await once(backend.server, 'request') as [http.IncomingMessage];
      await until(() => backend.acting === 1);
      socket.destroy();
      if (isEnd) await gateway.close();
      await closed(req.socket);
      await until(() => requests(gateway).some(({ status, reason }) => status === 499 && reason === undefined));
      if (isEnd) return assert.equal(logLines(gateway.log).at(-1)!.message, 'stopped');
      void send(gateway, 'next').catch(() => {});
      await until(() => arrived(backend).includes('next'));
    }
  });

  test('a large send keeps its slot if its client disconnects after the last byte, and its bytes no longer count as unfinished', async (t) => {
    const { backend, gateway } = await startHeld(t, 1, { limits: { body: '1MiB' } });
    const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
    const large = await beginLarge(gateway, backend);
    const [served] = await accepted;
    large.end(LARGE.slice(-1));
    await until(() => backend.acting === 1);
    large.destroy();
    await closed(served);
    const [next] = await queueUp(gateway, ['next']);
    assert.deepEqual([backend.acting, arrived(backend)], [1, ['large']]);
    backend.answer();
    await until(() => arrived(backend).includes('next'));
    const reasons = requests(gateway).filter(({ status }) => status === 499).map(({ reason }) => reason);
    assert.deepEqual(reasons, ['answered_201']);
    await answerAll(backend, [next!]);
    // Three complete ones are more than twice limits.body, and the backend works on all of them.
    gateway.reload({ ...slots(backend, 3), limits: { body: '1MiB' } });
    const complete: Promise<Answer>[] = [];
    for (const acting of [1, 2, 3]) {
      complete.push(ask(gateway, { body: sized(MIB), headers: BEARER }));
      await until(() => backend.acting === acting, `upload ${acting} to reach the backend`);
    }
    await answerAll(backend, complete);
  });

  test('a large body that ends in white space waits for its slot like any other', async (t) => {
    const { backend, gateway } = await startHeld(t, 1);
    const first = send(gateway, 'first');
    await until(() => backend.acting === 1);
    const large = listened(beginSend(gateway, { ...BEARER, 'content-length': LARGE.length + 2 }));
    large.end(`${LARGE}\r\n`);
    await until(() => backend.seen.length === 2);
    for (let i = 0; i < 3; i++) await settled(gateway);
    assert.equal(backend.acting, 1);
    await answerAll(backend, [first]);
    await until(() => backend.acting === 1);
    backend.answer();
    assert.equal(await statusFor(large), 201);
    assert.equal(backend.most, 1);
  });

  test('a large send whose last byte is late goes before requests that arrived after its start', async (t) => {
    const { backend, gateway } = await startHeld(t, 1);
    const large = await beginLarge(gateway, backend);
    const sends = await queueUp(gateway, ['first', 'second', 'third']);
    large.end(LARGE.slice(-1));
    for (let i = 0; i < 3; i++) await settled(gateway);
    await answerAll(backend, [sends[0]!]);
    await until(() => backend.acting === 1);
    backend.answer();
    assert.equal(await statusFor(large), 201);
    await answerAll(backend, sends.slice(1));
  });

  test('a client that disconnects while its slot is overdue does not affect the others', async (t) => {
    const { backend, gateway } = await startHeld(t, 1, {}, { slotTimeoutMs: 50 });
    const first = send(gateway, 'first');
    await until(() => backend.acting === 1);
    const { socket } = open(t, gateway, SEND);
    await until(() => backend.acting === 2); // in addition to the first, whose slot is overdue
    await pass(500); // its slot is overdue too
    socket.destroy();
    await until(() => requests(gateway).some(({ status }) => status === 499));
    await answerAll(backend, [first]);
    backend.answer(); // to no client
    await answerAll(backend, [send(gateway, 'last')]);
    assert.deepEqual(linesOf(gateway, /internal error/), []);
  });

  test('a request whose slot is overdue ends when its client disconnects', async (t) => {
    const { backend, gateway } = await startHeld(t, 1, {}, { slotTimeoutMs: 50 });
    const asked = once(backend.server, 'request') as Promise<[http.IncomingMessage]>;
    const { socket } = open(t, gateway, SEND);
    const [req] = await asked;
    await until(() => backend.acting === 1);
    void send(gateway, 'next').catch(() => {});
    await until(() => arrived(backend).includes('next'));
    socket.destroy();
    await closed(req.socket);
    await until(() => requests(gateway).some(({ status }) => status === 499));
  });

  test('a request without a client is logged as 499, and not as the failure that ends it', async (t) => {
    for (const [timeout, isBroken] of [['1h', true], ['3s', false]] as const) {
      const { backend, gateway } = await startHeld(t, 1);
      gateway.reload(slots(backend, 1, timeout));
      const [accepted, asked] = [once(gateway.server, 'connection'), once(backend.server, 'request')];
      const { socket } = open(t, gateway, SEND);
      const [[served], [req]] = await Promise.all([accepted, asked]) as [[net.Socket], [http.IncomingMessage]];
      await until(() => backend.acting === 1);
      socket.destroy();
      await closed(served);
      assert.deepEqual(requests(gateway), []);
      if (isBroken) req.socket.destroy();
      await until(() => requests(gateway).length === 1);
      assert.equal(outcomeOf(requests(gateway)[0]), '499 client_left');
    }
  });

  // The daemon was killed with 4 sends in flight, and for 144 s no other client was served.
  test('a request that hangs for 30 s makes room for another, and still gets its late response', async (t) => {
    for (const parallel of [1, 4]) {
      const { backend, gateway } = await startHeld(t, parallel, {}, { slotTimeoutMs: 50 });
      const hanging = sendMany(gateway, parallel);
      await until(() => backend.acting === parallel);
      const next = send(gateway, 'next');
      await until(() => arrived(backend).at(-1) === 'next');
      await answerAll(backend, [...hanging, next]);
    }
  });

  test('a backend that hangs for good has at most twice backend.parallel requests', async (t) => {
    for (const [parallel, names] of [[1, 'a'], [4, 'a'], [1, 'ab'], [4, 'ab']] as const) {
      const { backend, gateway } = await startHeld(t, parallel, several(names), { slotTimeoutMs: 50 });
      const sends = sendMany(gateway, 4 * parallel);
      if (names === 'ab') { for (let i = 0; i < 2 * parallel; i++) sends.push(send(gateway, `other ${i}`, OTHER)); }
      await until(() => backend.acting === 2 * parallel);
      await pass(500); // ten times as long as a request may hang
      assert.equal(backend.most, 2 * parallel);
      await answerAll(backend, sends);
      assert.equal(backend.most, 2 * parallel);
    }
  });

  // One token that hung had all that there was room for, and 57 of 62 sends of another token were 503.
  test('a token whose requests hang leaves room for the others: it has at most one request at a single slot, and else one less than twice as many as there are slots', async (t) => {
    for (const parallel of [1, 2, 4]) {
      const { backend, gateway } = await startHeld(t, parallel, several('ab'), { slotTimeoutMs: 50 });
      const most = parallel === 1 ? 1 : 2 * parallel - 1;
      const hanging = sendMany(gateway, 3 * parallel);
      await until(() => backend.acting === most);
      await new Promise((resolve) => setTimeout(resolve, 500)); // all of its slots are overdue
      assert.equal(backend.acting, most);
      const other = send(gateway, 'other', OTHER);
      await until(() => arrived(backend).includes('other'));
      assert.equal(backend.acting, most + 1);
      await answerAll(backend, [...hanging, other]);
    }
  });

  // Forty uploads of 20 MiB by one token put 799 MiB into the backend at the same time.
  test('unfinished uploads of one token at the backend are at most twice limits.body; an upload beyond that is 503 busy, and the others continue', async (t) => {
    const { backend, gateway } = await startHeld(t, 1, { ...tokens({}, {}), limits: { body: '1MiB' } });
    const body = sized(MIB);
    let taken = 0; // by the backend, from the most recent upload
    backend.server.on('request', (req: http.IncomingMessage) => {
      taken = 0;
      req.on('data', (chunk: Buffer) => (taken += chunk.length));
    });
    const begin = async (secret: string): Promise<http.ClientRequest> => {
      const headers = { authorization: `Bearer ${secret}`, 'content-length': body.length };
      const upload = listened(beginSend(gateway, headers));
      taken = 0;
      upload.write(body.slice(0, -1));
      await until(() => taken === body.length - 1);
      return upload;
    };
    const uploads = [await begin(SECRET), await begin(SECRET)];
    const third = beginSend(gateway, { ...BEARER, 'content-length': body.length }).on('error', () => {});
    const refused = once(third, 'response') as Promise<[http.IncomingMessage]>;
    third.write(body.slice(0, 200_000));
    const [res] = await within(refused, 'the refusal of the third upload');
    assert.deepEqual([res.statusCode, codeOf(String(await readBytes(res)))], [503, 'busy']);
    assert.equal(requests(gateway).at(-1)!.reason, 'unfinished_uploads');
    uploads.push(await begin(OTHER));
    for (const upload of uploads) {
      const status = statusFor(upload);
      upload.end(body.slice(-1));
      await until(() => backend.acting === 1);
      backend.answer();
      assert.equal(await status, 201);
    }
    assert.equal(backend.seen.filter(({ complete }) => complete).length, 3);
  });

  // "The token that holds the fewest goes first" would let two busy tokens lock out a third.
  test('a free slot goes to the token that got one longest ago, and a reload keeps that order', async (t) => {
    const { backend, gateway } = await startHeld(t, 1, several('abc'));
    const answers = await queueUp(gateway, ['a0', 'a1', 'a2', 'a3']);
    answers.push(...await queueUp(gateway, ['b0', 'b1', 'b2', 'b3'], OTHER));
    gateway.reload({ ...slots(backend, 1), ...several('abc') });
    answers.push(...await queueUp(gateway, ['c0'], LAST));
    for (let i = 0; i < answers.length; i++) {
      await until(() => backend.acting === 1);
      // A late request of a token that was served long ago goes before those of tokens served since.
      if (i === 6) answers.push(...await queueUp(gateway, ['c1'], LAST));
      backend.answer();
    }
    for (const answer of answers) assert.equal((await answer).status, 201);
    assert.deepEqual(arrived(backend), ['a0', 'b0', 'c0', 'a1', 'b1', 'a2', 'b2', 'c1', 'a3', 'b3']);
  });
});
