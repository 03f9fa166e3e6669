import { once } from 'node:events';
import http from 'node:http';
import net from 'node:net';
import { suite } from 'node:test';
import type { GatewayConfig } from '../gateway.ts';
import { outcomeOf, statusOf } from './answers.ts';
import { assert, closed, difference, groupsOf, linesOf, requests, until } from './assertions.ts';
import { ANY_ROUTE, barred, serve, sparePort, startBackend, startRawBackend } from './backend.ts';
import { ask, beginSend, open, raw, rawRequest } from './client.ts';
import { ALL_METHODS, CONFINED, tokens } from './configs.ts';
import { type Change, fixture, importChanged, SOURCE } from './files.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { beginLarge, LARGE, listened, send, settled, statusFor } from './held.ts';
import { checkRows, parseRow, sendRow, unescaped } from './rows.ts';
import { isDeno, isNode } from './runtime.ts';
import {
  ABOUT,
  basic,
  BEARER,
  FROM,
  HELLO,
  MESSAGE,
  OTHER,
  post,
  RECEIVE,
  SECRET,
  SEND,
  SENT,
  STRANGER,
  TO,
  TOO_MANY,
} from './samples.ts';
import { copiesOf } from './spellings.ts';
import { startBoth, startGateway, startRaw } from './start.ts';
import { accepted, openWebSocket, RECEIVING, startUpgradeBackend, wish } from './websocket.ts';

suite('relay', SIDE_BY_SIDE, () => {
  test('the IPv6 address and path prefix of a backend are kept, its userinfo becomes Basic, and no name in Connection removes them', async (t) => {
    const backend = await startBackend(t, ANY_ROUTE);
    const six = http.createServer((req, res) => void backend.server.emit('request', req, res));
    const { port } = new URL(await serve(t, six, 0, '::1'));
    const gateway = await startGateway(t, { url: `http://us%20er:p%40ss@[::1]:${port}/pre/fix/` });
    const got = `GET /pre/fix/v1/about?x=1 | > host: [::1]:${port} | > authorization: ${basic('us er:p@ss')}`;
    for (const names of ['x', 'authorization, x-forwarded-for, x-request-id, host, accept-encoding']) {
      await checkRows({ backend, gateway }, [
        `* bearer → 200 | ${got} | > x-forwarded-for: 127.0.0.1 | > accept-encoding: identity`,
        `/v1/about?x=1 | Connection: ${names}`,
      ]);
      assert.match(String(backend.seen.at(-1)!.headers['x-request-id']), /^[0-9a-f-]{36}$/);
    }
    assert.doesNotMatch(gateway.log.join(''), /p@ss|p%40ss/);
  });

  test('hop-by-hop headers are removed both ways, and so are headers that only the gateway may set', async (t) => {
    const back = `Connection: X-Hop-Back | X-Hop-Back: secret | Keep-Alive: timeout=1 | Proxy-Authenticate: Basic |
    Proxy-Authentication-Info: x | Proxy-Connection: close |
    Upgrade: h2c | X-End: to end | Set-Cookie: a=1 | Set-Cookie: b=2; Path=/ | X-Request-Id: its own | Content-Length: 2`;
    const backend = await startBackend(t, (_, res) => {
      res.writeHead(200, barred(back).flatMap((field) => field.split(': '))).end('{}');
    });
    const gateway = await startGateway(t, backend);
    const sent = `Authorization: Bearer ${SECRET} | Connection: X-Hop, x-forwarded-for, content-type | X-Hop: secret |
    Keep-Alive: 5 | TE: trailers | Trailer: X | Upgrade: h2c | Proxy-Authorization: Basic x | Proxy-Connection: close |
    Forwarded: for=1.2.3.4 | X-Forwarded-For: 1.2.3.4 | X-Forwarded-Host: evil | X-Forwarded-Proto: https |
    X-Forwarded-Prefix: /evil | X-Real-IP: 1.2.3.4 | X-Request-Id: forged | Accept-Encoding: gzip | X-End: to end |
    Cookie: c=3 | Referer: http://gateway/x | X-Original-URL: /x | X-Original-Anything: x | X-Rewrite-URL: /x |
    X-Envoy-Original-Path: /x | User-Agent: test/1 | HTTP2-Settings: AAMAAABk`;
    const response = await rawRequest(gateway, '/v1/about', { headers: barred(sent) });
    const { 'x-request-id': id, ...headers } = backend.seen[0]!.headers;
    for (const name of ['connection', 'accept-language', 'sec-fetch-mode', 'accept']) delete headers[name]; // a runtime's
    const kept = { 'accept-encoding': 'identity', 'x-end': 'to end', 'user-agent': 'test/1' };
    const added = { 'x-forwarded-for': '127.0.0.1', 'x-forwarded-host': 'gateway', 'x-forwarded-proto': 'http' };
    assert.deepEqual(headers, { host: `${backend.host}:${backend.port}`, ...kept, ...added });
    assert.equal(id, requests(gateway)[0].requestId);
    assert.doesNotMatch(response, /x-hop-back|proxy-|upgrade|timeout=1|its own/i);
    assert.match(response, /\r\nset-cookie: a=1\r\nset-cookie: b=2; Path=\/\r\n/i);
    for (const field of [/\r\nx-end: to end\r\n/i, /\r\ncontent-length: 2\r\n/i]) assert.match(response, field);
  });

  // Added as documented, it was sent after the client's, and the backend read the forged one.
  test("a header of the gateway's own that is added to the code replaces the client's", async (t) => {
    const added: Change = ["    ['x-request-id', requestId],\n", (text) => `${text}    ['x-token-name', 'its own'],\n`];
    const { createGateway } = await importChanged(t, added);
    const backend = await startBackend(t);
    const gateway = await startGateway(t, backend, {}, {}, createGateway);
    const names = ['X-Token-Name', 'x-token-name', 'X-Request-ID', 'Accept-Encoding', 'X-Forwarded-Proto'];
    const forged = names.map((name) => `${name}: forged`);
    await rawRequest(gateway, '/v1/about', { headers: [`Authorization: Bearer ${SECRET}`, ...forged] });
    const seen = backend.seen[0]!.rawHeaders.map((text) => text.toLowerCase());
    assert.ok(!seen.includes('forged'), seen.join());
    for (const name of names) assert.equal(seen.filter((text) => text === name.toLowerCase()).length, 1, name);
    assert.equal(backend.seen[0]!.headers['x-token-name'], 'its own');
  });

  test('headers into which browsers and proxies copy a URL with its token are removed; a copy that a client puts elsewhere is not', async (t) => {
    const { backend, gateway } = await startBoth(t, ALL_METHODS);
    const kept = { 'x-other': OTHER, 'x-own': SECRET, 'user-agent': 'x', 'x-bad': '%zz%e4%' };
    for (const copy of copiesOf(SECRET)) {
      const answer = await ask(gateway, { path: `/v1/about?@auth=${SECRET}`, headers: { ...kept, ...copy } });
      assert.equal(answer.status, 200);
      const seen = backend.seen.at(-1)!.headers;
      for (const name of Object.keys(copy)) if (name !== 'host') assert.equal(seen[name], undefined, name);
      for (const [name, value] of Object.entries(kept)) assert.equal(seen[name], value);
      assert.equal(seen['x-forwarded-host'], 'host' in copy ? 'gateway' : `127.0.0.1:${gateway.port}`);
    }
  });

  // Each field of four bytes takes about seventy in memory. The hidden fields of a head can also define what follows
  // it.
  test('200 header fields pass, with any number of names in Connection; more are not kept, and are 431 and the end of all requests; two Host are 400', async (t) => {
    const { backend, gateway } = await startBoth(t);
    let most = 0;
    for (const event of ['request', 'upgrade']) {
      gateway.server.on(event, ({ rawHeaders }: http.IncomingMessage) => (most = Math.max(most, rawHeaders.length)));
    }
    const request = (fields: number, more: string): Promise<string> => {
      const names = Array.from({ length: 1000 }, (_, i) => `x-${i}`);
      const headers = [...names.slice(0, fields - 4).map((name, i) => `${name}: ${i}`), `Connection: close,${names}`];
      return raw(gateway, ABOUT.replace('\r\n\r\n', `\r\n${[more, ...headers].join('\r\n')}\r\n\r\n`));
    };
    const { socket, text } = openWebSocket(t, gateway, { headers: Array(201).fill('x: 1') });
    await closed(socket);
    assert.deepEqual([text(), await request(201, 'x-more: 1')].map(outcomeOf), Array(2).fill(TOO_MANY));
    const upgrade = 'Connection: Upgrade\r\nUpgrade: h2c\r\n';
    for (const fields of ['a:b\r\n'.repeat(2000), upgrade + 'a:b\r\n'.repeat(2000), upgrade.repeat(300)]) {
      const response = await raw(gateway, post(SECRET, SEND.length).replace('Content-Length', `${fields}$&`) + SEND);
      assert.deepEqual([outcomeOf(response), response.split('HTTP/1.1 ').length], [TOO_MANY, 2]);
      assert.match(response, /^connection: close\r$/im);
    }
    // Host was among the fields that node:http hides, and the missing Host was a 400.
    const hostless = await raw(gateway, `GET /v1/about HTTP/1.1\r\n${'a:b\r\n'.repeat(230)}Host: gateway\r\n\r\n`);
    assert.equal(outcomeOf(hostless), TOO_MANY);
    if (!isDeno) assert.ok(most < 600, `${most}`); // Deno 2.9 keeps all
    for (const host of ['Host: other', 'HOST: gateway']) {
      assert.equal(outcomeOf(await request(10, host)), '400 bad_target');
    }
    for (const code of ['too_many_headers', 'bad_target']) {
      assert.ok(gateway.log.join().includes(`"code":"${code}"`), code);
    }
    assert.equal(backend.connections, 0);
    assert.equal(statusOf(await request(200, 'x-more: 1')), 200);
    const { headers } = backend.seen[0]!;
    assert.deepEqual([headers['x-more'], headers['x-0'], headers['x-193']], ['1', undefined, undefined]);
  });

  test('status, type and body are relayed as the backend sent them', async (t) => {
    let [status, type, body]: string[] = [];
    const backend = await startBackend(t, (req, res) => {
      req.resume();
      res.writeHead(Number(status), type === undefined ? {} : { 'Content-Type': type }).end(body);
    });
    const gateway = await startGateway(t, backend);
    const replies =
      `200 | text/plain; charset=utf-8 | [] ;; 201 | application/json | {"timestamp":"1"} ;; 201 ;; 204 ;; 304
    400 | text/plain | Couldn't process request - invalid request ;; 404 | text/plain | 404 page not found ;; 500
    429 | application/json | {"error":"rate limit","challenge_tokens":["a-b"],"account":"+1555"}
    418 | image/png | \x89PNG`;
    for (const reply of replies.split(/ ;; |\n/)) {
      [status, type, body] = barred(reply);
      const { text, headers, ...answer } = await ask(gateway, { body: MESSAGE, headers: BEARER });
      assert.deepEqual([answer.status, headers['content-type'], text], [Number(status), type, body ?? ''], reply);
      assert.equal(headers['retry-after'], undefined);
    }
  });

  /**
   * Responses that no correct backend sends. Passed on, they are garbage, a 500 or nothing at all to a client. A row that
   * the gateway refuses, and not node:http, is named after the reason in the log.
   */
  const LIES = fixture('broken-responses.txt');

  test('a redirect, a compressed body or a broken response of the backend is 502 with its reason in the log, without a retry, and the next response is unaffected', async (t) => {
    let lie: Buffer | undefined;
    const { backend, gateway } = await startRaw(t, (socket) => {
      socket.write(lie ?? SENT);
      lie = undefined;
    });
    for (const [name = '', response = ''] of LIES.trim().split(/\n\s*/).map((line) => line.split(/: (.*)/))) {
      lie = unescaped(`${/^\d/.test(response) ? 'HTTP/1.1 ' : ''}${barred(response).join('\r\n')}`);
      const before = backend.requests.length;
      const answer = await send(gateway, name);
      assert.deepEqual([outcomeOf(answer), answer.headers.location], ['502 bad_backend_answer', undefined], name);
      assert.match(answer.json.error, /may have been sent/);
      if (/_|redirect|compressed/.test(name)) assert.equal(requests(gateway).at(-1)!.reason, name, response);
      assert.equal(backend.requests.length, before + 1, name);
      const liar = backend.sockets.at(-1)!;
      const next = await send(gateway, name);
      assert.deepEqual([next.status, next.text], [201, '{}'], name);
      await closed(liar);
    }
    assert.deepEqual(gateway.log.filter((line) => line.includes('"stack"')), []);
  });

  // A response that declines a WebSocket was ended by the time-out for its headers.
  test('a backend that is silent for backend.timeout is 504, or cut off in mid-response, and its request is aborted; a slow response is not cut off', async (t) => {
    const { backend, gateway } = await startRaw(t, (socket) => {
      const [request] = backend.requests.slice(-1) as [string];
      if (request.includes(RECEIVE)) socket.write('HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n');
      else if (request.startsWith('GET')) socket.write('HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf');
    }, { ...RECEIVING, backend: { timeout: '1s' } });
    const slow = wish(t, gateway);
    await until(() => backend.requests.length === 1);
    let isOver = false;
    const half = raw(gateway, ABOUT);
    const silent = Promise.all([HELLO, LARGE].map((body) => ask(gateway, { body, headers: BEARER })));
    void silent.then(() => (isOver = true));
    for (let dots = 1; !isOver; dots++) {
      backend.sockets[0]!.write('1\r\n.\r\n');
      await until(() => slow.text().split('1\r\n.\r\n').length > dots);
    }
    for (const answer of await silent) {
      assert.equal(outcomeOf(answer), '504 backend_timeout');
      assert.match(answer.json.error, /may have been sent/);
    }
    assert.match(await half, /half$/);
    backend.sockets[0]!.end('0\r\n\r\n');
    for (const socket of [...backend.sockets, slow.socket]) await closed(socket);
    assert.match(slow.text(), /\r\n0\r\n\r\n$/);
    await until(() => requests(gateway).length === 4);
    const outcomes = ['200 backend_timeout', '400', '504 backend_timeout', '504 backend_timeout'];
    assert.deepEqual(requests(gateway).map(outcomeOf).sort(), outcomes);
  });

  test("a truncated response closes the client's connection, also if it declines a WebSocket; without a length, a close completes the response", async (t) => {
    const { backend, gateway } = await startRaw(t, (socket) => void socket.write(`HTTP/1.1 ${head}`), RECEIVING);
    const chunked = 'Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n';
    const untilClose = '200 OK\r\nConnection: close\r\n\r\nhalf';
    let head = '';
    for (
      head of ['200 OK\r\nContent-Length: 100\r\n\r\nhalf', `200 OK\r\n${chunked}`, `400 No\r\n${chunked}`, untilClose]
    ) {
      for (const end of head === untilClose ? ['resetAndDestroy', 'end'] as const : ['end'] as const) {
        const [isWhole, before] = [head === untilClose && end === 'end', requests(gateway).length];
        const { socket, text } = head.startsWith('400') ? openWebSocket(t, gateway) : open(t, gateway, ABOUT);
        await until(() => text().includes('half'));
        backend.sockets.at(-1)![end]();
        await until(() => requests(gateway).length > before && (text().endsWith('\r\n0\r\n\r\n') || socket.closed));
        assert.match(text(), isWhole ? /half\r\n0\r\n\r\n$/ : /half(\r\n)?$/);
        const { code, status, level } = requests(gateway).at(-1)!;
        // The status is the one that the client saw, and the level that of the failure.
        const told = Number(head.slice(0, 3));
        assert.deepEqual(
          [code, level, status],
          isWhole ? [undefined, 'info', 200] : ['bad_backend_answer', 'error', told],
        );
      }
    }
  });

  test('without slots, a client that disconnects, also in mid-upload, ends its request to the backend, and is logged as 499', async (t) => {
    const backend = await startBackend(t, (req, _, seen) => void req.on('end', () => (seen.complete = true)).resume());
    const gateway = await startGateway(t, backend, { backend: { url: backend.url, parallel: 0 } });
    const cut = `${post(SECRET, LARGE.length)}${LARGE.slice(0, -1)}`;
    for (const bytes of [ABOUT, SEND, `${cut}}`, cut]) {
      const asked = once(backend.server, 'request') as Promise<[http.IncomingMessage]>;
      const { socket } = open(t, gateway, bytes);
      const [req] = await asked;
      await until(() => backend.seen.at(-1)!.complete || bytes === cut);
      socket.destroy();
      await closed(req.socket);
    }
    await until(() => requests(gateway).length === 4);
    for (const line of requests(gateway)) assert.deepEqual([line.status, line.code], [499, 'client_left']);
    assert.deepEqual(backend.seen.map(({ complete }) => complete), [true, true, true, false]);
  });

  // The backend's time-out continued while the client was the slow one, or restarted after its headers, and ended the
  // response.
  test("the backend's time-out is paused while the client is waited for, and a response that starts before the upload ends is delivered", async (t) => {
    let [begins, reads, finish] = [false, true, (): void => {}];
    const backend = await startBackend(t, (req, res, seen) => {
      if (req.url === '/v1/health') return; // no response: the client waits for backend.timeout
      if (!begins) return ANY_ROUTE(req, res, seen);
      if (reads) req.resume();
      res.writeHead(400).write('begin,');
      finish = () => res.end('end');
    });
    const gateway = await startGateway(t, backend, { backend: { url: backend.url, timeout: '1s' } });
    const upload = await beginLarge(gateway, backend);
    begins = true;
    for (reads of [false, true]) {
      const { socket, text } = open(t, gateway, `${post(SECRET, LARGE.length + 200_000)}${LARGE.slice(0, -3)}`);
      await until(() => text().includes('begin,'));
      socket.write('A'.repeat(200_000));
      finish();
      await until(() => text().includes('end'));
      socket.write('"]}'); // so nothing of the request is left to wait for
      if (reads) await until(() => text().endsWith('end\r\n0\r\n\r\n'));
      assert.equal(statusOf(text()), 400);
    }
    assert.equal(outcomeOf(await ask(gateway, { path: '/v1/health', headers: BEARER })), '504 backend_timeout');
    upload.end(LARGE.slice(-1));
    assert.equal(await statusFor(upload), 200);
  });

  // An event stream has its first byte with its first event. signal-cli sends one after 15 s, and clients wait for 10 s.
  test('the head of a response goes out when the backend has sent it, before the first byte of the body', async (t) => {
    const framings = [
      ['Content-Length: 6', 'a\n', 'b\n\n\n'],
      ['Transfer-Encoding: chunked', '2\r\na\n\r\n', '4\r\nb\n\n\n\r\n0\r\n\r\n'],
      ['Connection: close', 'a\n', 'b\n\n\n'],
    ] as const;
    for (const [framing, first, rest] of framings) {
      const { backend, gateway } = await startRaw(t, (socket) => {
        socket.write(`HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n${framing}\r\n\r\n`);
      });
      for (const version of ['1.1', '1.0']) {
        const { socket, text } = open(t, gateway, ABOUT.replace('HTTP/1.1', `HTTP/${version}`));
        const bodyOf = (): string => text().replace(/^[^]*?\r\n\r\n/, '').replace(/\r\n|\b\d\b/g, '');
        await until(() => text().endsWith('\r\n\r\n'), `the head, with ${framing}`);
        assert.match(text(), /^HTTP\/1\.1 200 OK\r\n[^]*^Content-Type: text\/event-stream\r$/m);
        const served = backend.sockets.at(-1)!;
        served.write(first);
        await until(() => bodyOf() === 'a\n');
        if (framing.startsWith('Connection')) served.end(rest);
        else served.write(rest);
        await until(() => bodyOf() === 'a\nb\n\n\n');
        socket.destroy();
      }
    }
  });

  test('a response is one write if its head and body come together, or if it has no body', async (t) => {
    const chunked = 'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n';
    const responses = {
      'of a send': SENT,
      'in chunks': `${chunked}2\r\n{}\r\n0\r\n\r\n`,
      'with no chunk': `${chunked}0\r\n\r\n`,
      'of length 0': SENT.replace('2\r\n\r\n{}', '0\r\n\r\n'),
      '204': 'HTTP/1.1 204 No Content\r\n\r\n',
      '304 with the length of another': SENT.replace('201 Created', '304 Not Modified').replace('{}', ''),
      'refused': SENT.replace('201 Created\r\n', '302 Found\r\nLocation: /\r\n'),
    };
    let response = '';
    const { gateway } = await startRaw(t, (socket) => void socket.write(response));
    for (const [what, bytes] of Object.entries(responses)) {
      response = bytes;
      for (const version of ['1.1', '1.0']) {
        const request = what === 'of a send' ? SEND : ABOUT;
        const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
        const { socket, text } = open(t, gateway);
        const [served] = await accepted;
        let writes = 0;
        for (const method of ['_write', '_writev'] as const) {
          const write = served[method]!.bind(served) as (...args: unknown[]) => void;
          served[method] = (...args: unknown[]) => {
            writes++;
            write(...args);
          };
        }
        socket.write(request.replace('HTTP/1.1\r\n', `HTTP/${version}\r\nConnection: close\r\n`));
        await closed(socket);
        // Deno 2.9 writes a response without a body by itself.
        assert.ok(writes === 1 || (isDeno && writes === 0), `${writes} writes ${what} to HTTP/${version}: ${text()}`);
        assert.equal(statusOf(text()), what === 'refused' ? 502 : Number(bytes.slice(9, 12)), what);
      }
    }
  });

  test('the backend is not left with half a request if it responds before it has the whole upload', async (t) => {
    const backend = await startBackend(t, (_, res) => void res.writeHead(400, { 'Content-Length': 2 }).end('no'));
    backend.server.keepAliveTimeout = 0; // it does not close the connection itself
    const gateway = await startGateway(t, backend);
    const asked = once(backend.server, 'request') as Promise<[http.IncomingMessage]>;
    const { text } = open(t, gateway, `${post(SECRET, LARGE.length)}${LARGE.slice(0, -1)}`);
    const [req] = await asked;
    await until(() => text().endsWith('no'));
    await closed(req.socket, 'the connection with the unfinished request to be closed');
  });

  // A proxy before the backend closes an idle connection sooner or later, and a send in transit then would be lost.
  test('a connection to the backend that nobody uses is closed after a few seconds', async (t) => {
    const { backend, gateway } = await startRaw(t, (socket) => void socket.write(SENT));
    assert.equal((await send(gateway, 'hi')).status, 201);
    await closed(backend.sockets[0]!, 'the idle connection to be closed');
  });

  test('attack: put a response on an idle connection, for the next request to take as its own', async (t) => {
    const { backend, gateway } = await startRaw(t, (socket) => void socket.write(SENT));
    for (let i = 0; i < 3; i++) {
      assert.deepEqual([(await send(gateway, 'hi')).text, backend.sockets.length], ['{}', i + 1]);
      backend.sockets[i]!.write(SENT.replace('{}', '[]'));
      for (let turn = 0; turn < 3; turn++) await settled(gateway);
    }
  });

  // On Deno 2.9 it fails if connections are reused: of 300 requests 599 arrive.
  test('nothing is sent twice if a reused connection ends by FIN or RST at any byte of the head', async (t) => {
    let [cut, way]: [number, 'end' | 'resetAndDestroy'] = [0, 'end'];
    const { backend, gateway } = await startRaw(t, (socket, before) => {
      if (before === 0) return void socket.write(SENT);
      socket.write(SENT.slice(0, cut), () => socket[way]());
    }, { allow: ['messaging', 'POST /v1/groups/:number/quit'] });
    const typing = `/v1/typing-indicator/${FROM} | {"recipient":"${TO}"}`;
    const rows = `GET ${RECEIVE} ;; ${HELLO} ;; POST /v1/groups/${FROM}/quit ;; PUT ${typing} ;; DELETE ${typing} ;;
    DELETE /v1/attachments/abc`.split(/ ;;\s+/).map((row) => parseRow(`bearer | ${row}`));
    for (way of ['end', 'resetAndDestroy'] as const) {
      for (const [i, row] of rows.entries()) {
        // Every sixth byte for each method, with another offset for the next.
        for (cut = i; cut < SENT.indexOf('\r\n\r\n') + 4; cut += rows.length) {
          for (let time = 0; time < 2; time++) await sendRow(gateway, row);
        }
      }
    }
    const ids = backend.requests.map((text) => /x-request-id: (\S+)/i.exec(text)![1]);
    assert.equal(new Set(ids).size, ids.length, 'a request came twice');
    assert.equal(requests(gateway).length, ids.length, 'a request never came');
  });

  // The connect timer continued while a large body was written, and its expiry was mistaken for a failed connection:
  // the rest of the body was sent as a separate request, with whatever a crafted body had at its 64 KiB.
  test('attack: a large send whose backend accepts the connection but reads nothing is not sent again', {
    skip: !isNode && 'the hook into the socket needs Node',
  }, async (t) => {
    const backend = await startRawBackend(t, (socket) => void socket.write(SENT));
    const { port } = new URL(backend.url);
    const config = { ...CONFINED, backend: { url: backend.url, timeout: '2s', wait: '1m' } };
    const gateway = await startGateway(t, backend, config, { connectTimeoutMs: 200 });
    // The sockets to the backend accept no data, like those of a path that loses packets after the handshake.
    const proto = net.Socket.prototype as unknown as { _writeGeneric: (...args: unknown[]) => void };
    const write = proto._writeGeneric;
    const held: (() => void)[] = [];
    t.after(() => (proto._writeGeneric = write));
    proto._writeGeneric = function (this: net.Socket, ...args: unknown[]) {
      if (this.remotePort !== Number(port)) return write.apply(this, args);
      held.push(() => write.apply(this, args));
    };
    const inner = JSON.stringify({ message: 'torn', number: FROM, recipients: [STRANGER] });
    const begun = `{"message":"x","number":"${FROM}","recipients":["${TO}"],"mentions":`;
    const body = `${begun.padEnd(65_536)}${inner}${' '.repeat(200_000)}}`;
    const response = await raw(
      gateway,
      `${post(SECRET, 'chunked', 'Connection: close')}${body.length.toString(16)}\r\n${body}\r\n0\r\n\r\n`,
    );
    for (const release of held) release();
    await settled(gateway);
    assert.equal(outcomeOf(response), '504 backend_timeout');
    assert.equal(backend.sockets.length, 1);
    assert.deepEqual(backend.requests, []);
  });

  test('a client that reads nothing of its response is disconnected, and its request to the backend ends', async (t) => {
    const part = `10000\r\n${'x'.repeat(65_536)}\r\n`;
    const { backend, gateway } = await startRaw(
      t,
      (socket) => {
        const fill = (): void => {
          while (!socket.destroyed && socket.write(part));
        };
        socket.on('drain', fill).write('HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n');
        fill();
      },
      {},
      { stallTimeoutMs: 1000 },
    );
    open(t, gateway, ABOUT).socket.pause();
    await until(() => requests(gateway).length === 1);
    assert.equal(requests(gateway)[0].code, 'client_left');
    // At once, and not at the next garbage collection, which took half a minute on Deno 2.9.
    const late = new Promise((resolve) => setTimeout(resolve, 5000, 'late').unref());
    assert.notEqual(await Promise.race([closed(backend.sockets[0]!), late]), 'late');
  });

  // Node 26 would put such a connection back into its pool, and the bytes after a response that no correct backend
  // sends could be read as the next response.
  test('the connection of a refused backend response is not reused', async (t) => {
    const backend = await startBackend(t, (req, res) => {
      req.resume().on('end', () => res.writeHead(302, { 'Location': '/', 'Content-Length': 2 }).end('hi'));
    });
    const gateway = await startGateway(t, backend, tokens({}));
    for (let count = 1; count <= 3; count++) {
      assert.equal(outcomeOf(await ask(gateway, { headers: BEARER })), '502 bad_backend_answer');
      assert.equal(backend.connections, count);
    }
  });

  test('attack: smuggle a second request into the first', async (t) => {
    const { backend, gateway } = await startBoth(t, {}, { stallTimeoutMs: 1000 });
    const inner = `POST /v1/register/${FROM} HTTP/1.1 | Host: x | Content-Length: 0 | | `;
    const [size, last] = [HELLO.length, inner.replace('Host: x', 'Host: x | Connection: close')];
    const attempts = String.raw`
    Content-Length: ${size} | Transfer-Encoding: chunked | | 0 | | ${inner}
    Transfer-Encoding: chunked | Content-Length: 5 | | 0 | | ${inner}
    Content-Length: 0 | Content-Length: ${barred(inner).join('\r\n').length} | | ${inner}
    Content-Length: +5 | | 12345${inner}
    Transfer-Encoding: chunked, identity | | 0 | | ${inner}
    Transfer-Encoding : chunked | | 0 | | ${inner}
    Transfer-Encoding: xchunked | | 0 | | ${inner}
    X: a\r\n b | Content-Length: 0 | | ${inner}
    X: a\nContent-Length: 0 | | ${inner}
    Content-Length: ${size} | Connection: close | | ${HELLO}${inner}
    Content-Length: ${size} | | ${HELLO}${last}
    Transfer-Encoding: chunked | | ${size.toString(16)};x=" | ${HELLO} | 0 | | ${last}`;
    for (const attempt of attempts.trim().split('\n')) {
      const head = `POST /v2/send HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n`;
      assert.doesNotMatch(await raw(gateway, head + unescaped(barred(attempt).join('\r\n'))), / 201 [^]* 201 /);
    }
    for (const seen of backend.seen) assert.equal(seen.url, '/v2/send');
  });

  /** Starts a gateway from a copy of gateway.ts with these changes. */
  async function startChanged(t: TestContext, backend: { url: string }, config: GatewayConfig, ...changes: Change[]) {
    const { createGateway } = await importChanged(t, ...changes);
    return await startGateway(t, backend, config, {}, createGateway);
  }

  test('the life of a request: each change of stage in the table happens, and no other', async (t) => {
    const held: http.ServerResponse[] = [];
    const backend = await startUpgradeBackend(t);
    backend.server.removeAllListeners('request').on('request', (req, res) => {
      if (req.url === '/v1/send') res.writeHead(400, { Connection: 'close' }).end(); // before it has the body
      else req.resume().on('end', () => held.push(res)).on('error', () => {});
    });
    const config: GatewayConfig = { ...RECEIVING, backend: { url: backend.url, parallel: 1, wait: '1h' } };
    const heard = '    this.#stage = next;\n';
    const gateway = await startChanged(t, backend, config, [
      heard,
      (text) => `    (globalThis as any).stages?.add(\`\${this.#stage} \${next}\`);\n${text}`,
    ]);
    const seen = new Set<string>();
    Object.assign(globalThis, { stages: seen });
    t.after(() => Object.assign(globalThis, { stages: undefined }));
    const answer = async () => {
      await until(() => held.length > 0, 'a send at the backend');
      held.shift()!.writeHead(201).end('{}');
    };
    // One at the backend, one that waits for its slot, and a large one whose last byte does.
    const first = send(gateway, 'first');
    await until(() => held.length === 1);
    const second = send(gateway, 'second');
    for (let i = 0; i < 3; i++) await settled(gateway);
    const third = beginSend(gateway, { ...BEARER, 'content-length': LARGE.length });
    const thirdAnswer = statusFor(listened(third));
    third.end(LARGE);
    for (let i = 0; i < 3; i++) await answer();
    assert.deepEqual([(await first).status, (await second).status, await thirdAnswer], [201, 201, 201]);
    // A large one that has its slot at once, and one that the backend refuses before its end.
    const fourth = listened(beginSend(gateway, { ...BEARER, 'content-length': LARGE.length }));
    fourth.end(LARGE);
    await answer();
    assert.equal(await statusFor(fourth), 201);
    const early = listened(beginSend(gateway, { ...BEARER, 'content-length': LARGE.length }, '/v1/send'));
    early.write(LARGE.slice(0, -1));
    assert.equal(await statusFor(early), 400);
    await accepted(t, gateway);
    // A backend that is down, and comes back.
    gateway.reload({
      ...config,
      backend: { ...config.backend, url: `http://${backend.host}:${await sparePort(backend.host)}` },
    });
    const late = send(gateway, 'late');
    await until(() => gateway.log.some((line) => line.includes('the backend is unreachable')));
    gateway.reload(config);
    await gateway.close();
    assert.equal((await late).status, 503);
    const table = /const NEXT_STAGES = \{([^]*?)\n\} as const/.exec(SOURCE)![1]!;
    const rows = Array.from(table.matchAll(/^ +(\w+): \[(.*)\],$/gm));
    const allowed = rows.flatMap(([, from, list]) => groupsOf(list!, /'(\w+)'/g).map((to) => `${from} ${to}`));
    const changes = [...seen].filter((change) => !/^(\w+) \1$/.test(change));
    assert.deepEqual(difference('the table', allowed, 'what happens', changes), []);
  });

  test('a change of stage that the table does not have ends the request as an internal error, and nothing is sent', async (t) => {
    const backend = await startBackend(t);
    const gateway = await startChanged(t, backend, {}, [
      "  received: ['waiting', 'sending'],\n",
      () => "  received: ['waiting'],\n",
    ]);
    assert.equal(outcomeOf(await send(gateway, 'x')), '500 internal_error');
    assert.match(
      String(linesOf(gateway, /^internal error$/)[0]!.stack),
      /a request that is received cannot be sending/,
    );
    assert.equal(backend.seen.length, 0, 'the backend saw nothing');
  });
});
