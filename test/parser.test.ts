import { once } from 'node:events';
import http from 'node:http';
import net from 'node:net';
import { suite } from 'node:test';
import { outcomeOf, parseAnswer, statusOf } from './answers.ts';
import { assert, closed, linesOf, pass, requests, until } from './assertions.ts';
import { certificate, CERTS } from './certificates.ts';
import { ask, open, openHalf, raw } from './client.ts';
import { AT_INFO, tokens } from './configs.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { answerAll, arrived, send, startHeld } from './held.ts';
import { bytesOf, literal } from './rows.ts';
import { isNode } from './runtime.ts';
import { ABOUT, AUTHED, FROM, GROUP, HELLO, OTHER, post, SECRET, SEND, TOO_MANY } from './samples.ts';
import { type Gateway, startBoth, startHolding } from './start.ts';

/** Sends requests, one per line. Each must be refused with this response, in JSON, and its connection closed. */
async function sendRefused(to: Gateway, outcome: string, rows: string): Promise<void> {
  const [status = '', code] = outcome.split(' ');
  for (const row of rows.trim().split(/\n\s*/)) {
    const response = await raw(to, bytesOf(row));
    const { json, headers } = parseAnswer(response);
    const got = [response.split('\r\n')[0], json?.code, headers.connection, Object.keys(json ?? {}).join()];
    const first = `HTTP/1.1 ${status} ${http.STATUS_CODES[status]}`;
    assert.deepEqual(got, [first, code, 'close', 'error,code,requestId'], row.slice(0, 60));
    if (code === 'bad_request') assert.match(json.error, /percent-encode URLs .* Content-Length or chunked/);
  }
}

suite('parser', SIDE_BY_SIDE, () => {
  // node:http answered a missing Host with an empty 400, and accepted other HTTP versions.
  test('anything but HTTP/1.0 and 1.1, a missing Host, wrong framing and CONNECT are refused in JSON and closed; parser errors are logged once a minute per kind', async (t) => {
    let now = Date.now();
    const { backend, gateway } = await startBoth(t, AT_INFO, { now: () => now, lingerMs: 1000 });
    const byParser = literal`
    rubbish
    \x00\x00\x00\x00
    GET /v1/about?a=b c HTTP/1.1 | Host: x | bearer
    GET /v1/about?a=ü HTTP/1.1 | Host: x | bearer
    GET /v1/about?a=\xfc HTTP/1.1 | Host: x | bearer
    GET /v1/about HTTP/1.1\nHost: x\nAuthorization: Bearer ${SECRET}\n\n
    about | Bad Header
    send | Content-Length: 5 | Transfer-Encoding: chunked || 0
    send | Content-Length: 5 | Content-Length: 6 || {}
    GET / HTTP/9.9 | Host: x
    PRI * HTTP/2.0 || SM`;
    const padding = 'x'.repeat(17_000);
    const large = `GET /v1/about?${padding} HTTP/1.1 | Host: x | bearer
    about | X: ${padding.repeat(20)}
    about | X: ${padding}`;
    await sendRefused(gateway, '400 bad_request', byParser);
    await sendRefused(gateway, TOO_MANY, large);
    now += 60_001;
    await sendRefused(gateway, TOO_MANY, large);
    const warnings = linesOf(gateway, /the HTTP parser/).map((line) => `${line.level} ${line.client} ${line.code}`);
    assert.deepEqual(
      warnings,
      ['bad_request', 'too_many_headers', 'too_many_headers'].map((code) => `warn 127.0.0.1 ${code}`),
    );
    const { socket } = open(t, gateway);
    socket.end();
    await closed(socket.resume());
    assert.equal(gateway.log.length, 4); // including the start-up line
    const byGateway = literal`
    GET /v1/about HTTP/1.1 | bearer
    GET /v1/about HTTP/1.1 | bearer | Connection: Upgrade | Upgrade: h2c
    GET /v1/about HTTP/2.0 | Host: x | bearer
    GET /v1/about HTTP/2.0 | Host: x | bearer | Connection: Upgrade | Upgrade: h2c
    GET /v1/about HTTP/0.9 | Host: x | bearer
    GET /v1/about | Host: x | bearer
    send | Transfer-Encoding: chunked || zz | {}
    send | Transfer-Encoding: chunked || 2 | {}xx
    send | Transfer-Encoding: gzip || {}
    send || ${HELLO}
    POST /v2/send HTTP/1.1 | Host: x || ${AUTHED(SECRET)}`;
    await sendRefused(gateway, '400 bad_request', byGateway);
    await sendRefused(gateway, '400 bad_target', 'CONNECT backend:80 HTTP/1.1 | Host: x | bearer');
    const lines = requests(gateway).map((line) => `${line.level} ${line.method} ${outcomeOf(line)}`);
    assert.equal(lines.pop(), 'warn CONNECT 400 bad_target');
    for (const line of lines) assert.match(line, /^warn (GET|POST) 400 bad_request$/);
    assert.equal(lines.length, byGateway.trim().split('\n').length);
    assert.equal(requests(gateway).filter(({ reason }) => reason === 'no_host').length, 2);
    assert.equal(backend.connections, 0);
    assert.equal(statusOf(await raw(gateway, bytesOf('GET /v1/about HTTP/1.0 | bearer'))), 200);
  });

  test('attack: a body in chunks of one byte is cut off after a thousand; chunks of a usual length are not', async (t) => {
    const { backend, gateway } = await startBoth(t);
    const chunked = (pieces: string[]): string =>
      `POST /v2/send HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n` +
      pieces.map((piece) => `${piece.length.toString(16)}\r\n${piece}\r\n`).join('') + '0\r\n\r\n';
    const few = HELLO + ' '.repeat(900 - HELLO.length);
    const piecesOf = (text: string, length: number): string[] => text.match(new RegExp(`.{1,${length}}`, 'gs'))!;
    assert.equal(statusOf(await raw(gateway, chunked(piecesOf(few, 1)))), 201);
    assert.equal(statusOf(await raw(gateway, chunked(piecesOf(HELLO + ' '.repeat(60_000), 20)))), 201);
    assert.equal(backend.seen.length, 2);
    const { socket, text } = open(t, gateway, chunked(piecesOf(HELLO + ' '.repeat(20_000), 1)));
    socket.on('error', () => {});
    await closed(socket);
    assert.equal(text(), '');
    assert.equal(backend.seen.length, 2);
  });

  // The 400 replaced the response that was due, or the rest of it.
  test('bytes that the HTTP parser refuses after a request in progress do not affect its response', async (t) => {
    const { backend, gateway, finish } = await startHolding(t, { allow: ['* /v1/about'] });
    for (const [method, begins] of [['GET', false], ['GET', true], ['POST', false], ['POST', true]] as const) {
      const request = ABOUT.replace('GET /v1/about', `${method} /v1/about?hang${begins ? 'begun' : ''}`);
      const { socket, text } = open(t, gateway, request);
      await until(() => backend.seen.length === 1 && (!begins || text().includes('first, ')));
      for (const piece of [`${method === 'GET' ? ABOUT : ''}GET /a b HTTP/1.1\r\n`, '\r\n', 'more rubbish']) {
        socket.write(piece);
        await ask(gateway, { path: '/healthz' });
      }
      finish();
      await closed(socket);
      assert.match(text(), begins ? /first, [^]*and last/ : /^HTTP\/1\.1 200 [^]*and last/);
      assert.equal(text().match(/HTTP\/1\.1/g)!.length, 1);
      assert.equal(backend.seen.splice(0).length, 1);
    }
    // A client that disconnects after that is noticed.
    const { socket } = open(t, gateway, ABOUT.replace('about', 'about?hang'));
    await until(() => backend.seen.length === 1);
    socket.write('rubbish\r\n\r\n', () => socket.destroy());
    await until(() => requests(gateway).some((line) => line.code === 'client_left'));
  });

  // Such a POST was sent without a wait, so nothing noticed the 400 that the same packet caused.
  test('a POST without a length that is answered 400 because of the bytes after it was not sent', async (t) => {
    const { backend, gateway } = await startBoth(t, { allow: ['messaging'] });
    const response = await raw(
      gateway,
      bytesOf(`POST /v1/groups/${FROM}/${GROUP}/join HTTP/1.1 | Host: x | bearer || {}`),
    );
    await until(() => requests(gateway).length === 1);
    assert.equal(outcomeOf(response), '400 bad_request');
    assert.equal(backend.seen.length, 0);
  });

  test('a complete POST that waits for its slot is sent although the parser refuses the bytes after it', async (t) => {
    const { backend, gateway } = await startHeld(t, 1);
    const first = send(gateway, 'first');
    await until(() => backend.acting === 1);
    const { socket, text } = open(t, gateway, `${SEND}rubbish\r\n\r\n`);
    await until(() => linesOf(gateway, /the HTTP parser/).length === 1);
    await answerAll(backend, [first]);
    await until(() => backend.acting === 1 || text() !== '', 'the POST to reach the backend');
    backend.answer();
    await closed(socket);
    assert.equal(outcomeOf(text()), '201');
    assert.deepEqual(arrived(backend), ['first', 'hello']);
  });

  test('a POST without a length that waits for its slot is sent if a request comes between it and the bytes that the parser refuses', async (t) => {
    const { backend, gateway } = await startHeld(t, 1, { allow: ['messaging', 'info'] });
    const first = send(gateway, 'first');
    await until(() => backend.acting === 1);
    const join = bytesOf(`POST /v1/groups/${FROM}/${GROUP}/join HTTP/1.1 | Host: x | bearer`);
    const { socket, text } = open(t, gateway, `${join}${ABOUT}rubbish\r\n\r\n`);
    await until(() => linesOf(gateway, /the HTTP parser/).length === 1);
    await answerAll(backend, [first]);
    await until(() => backend.acting === 1 || text() !== '', 'the POST to reach the backend');
    assert.equal(text(), '');
    backend.answer();
    await closed(socket);
    assert.equal(outcomeOf(text()), '201');
    assert.equal(backend.seen.length, 2);
  });

  test('a truncated body counts as a client that disconnected; a chunking error during the relay leaves no message at the backend', async (t) => {
    const { backend, gateway } = await startBoth(t, {}, { stallTimeoutMs: 1000 });
    const { socket } = open(t, gateway);
    socket.write(`${post(SECRET, 100)}{`, () => socket.destroy());
    await until(() => requests(gateway).at(-1)?.code === 'client_left');
    assert.equal(backend.connections, 0);
    const piece = `${HELLO.slice(0, -1)},"x":"${'A'.repeat(100_000)}`;
    const response = await raw(
      gateway,
      `${post(SECRET, 'chunked')}${piece.length.toString(16)}\r\n${piece}\r\nxyz\r\n`,
    );
    assert.ok(response === '' || statusOf(response) === 400, response);
    assert.deepEqual(backend.sent, []);
  });

  // Deno 2.9 passed these bytes to a parser that had failed, or whose client was too late, and reused that parser for
  // other clients' connections and for those to the backend.
  // A TLS connection gathered eleven listeners, and Node warned of a leak.
  for (const tls of [false, true]) {
    test(`garbage in pieces behind a request leaves no listeners behind: ${tls ? 'https' : 'http'}`, async (t) => {
      const { backend, gateway } = await startHolding(t, tls ? { tls: certificate(t) } : {});
      const to = { port: gateway.port, ...(tls && { ca: [CERTS[0].cert] }) };
      const spoken = once(gateway.server, tls ? 'secureConnection' : 'connection') as Promise<[net.Socket]>;
      const { socket } = open(t, to, SEND);
      const [own] = await spoken;
      await until(() => backend.seen.length === 1);
      const listeners = () => ['data', 'end', 'error'].map((event) => own.listenerCount(event));
      const before = listeners();
      for (let i = 0; i < 30; i++) {
        const { bytesRead } = own;
        socket.write(`more garbage ${i}\r\n\r\n`);
        await until(() => own.bytesRead > bytesRead);
      }
      for (const [i, count] of listeners().entries()) {
        assert.ok(count <= before[i]! + 2, `listeners for data, end and error: ${before} became ${listeners()}`);
      }
    });
  }

  test('garbage sent byte by byte after a refusal does not affect the requests of others', async (t) => {
    const { backend, gateway } = await startBoth(t, tokens({}, {}), {
      lingerMs: 150,
      stallTimeoutMs: 500,
      headersTimeoutMs: 250,
    });
    let sent = 0;
    const late = ABOUT.slice(0, -2);
    for (const begun of ['rubbish\r\n\r\n', `${ABOUT}rubbish\r\n\r\n`, `${post(SECRET, 'chunked')}zz\r\n`, late]) {
      let [isOver, refused] = [false, 0];
      t.after(() => isOver = true);
      const drip = async (): Promise<void> => {
        for (; !isOver; refused++) {
          const socket = openHalf(t, gateway, begun).resume();
          const timer = setInterval(() => socket.write('x'), 20);
          await closed(socket).finally(() => clearInterval(timer));
        }
      };
      const rubbish = Array.from({ length: 12 }, drip);
      for (let i = 0; i < 10 || refused < 12; i++) {
        await pass(20);
        const answers = Array.from({ length: 4 }, (_, n) => send(gateway, `${i} ${n}`, OTHER));
        assert.deepEqual((await Promise.all(answers)).map(outcomeOf), Array(4).fill('201'), begun);
        sent += 4;
      }
      isOver = true;
      await Promise.all(rubbish);
    }
    assert.equal(backend.sent.length, sent);
  });

  test('bytes after a parser error are read and discarded; if the client does not end the connection, it is closed after a period without bytes', async (t) => {
    for (const [lingerMs, ends] of [[1e6, true], [100, false]] as const) {
      const { gateway } = await startBoth(t, {}, { lingerMs, headersTimeoutMs: 1e6 });
      const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
      const socket = openHalf(t, gateway, 'rubbish\r\n\r\n');
      const [served] = await accepted;
      await once(socket.resume(), 'end');
      if (ends) {
        const before = served.bytesRead;
        socket.write('more');
        await until(() => served.bytesRead === before + 4, 'the gateway to read what follows');
        socket.end();
      }
      await closed(served);
    }
  });

  // Such a request was acted on, and its client, which had received a 408 or 400, got no response to it.
  test('on a connection that is closing no further request is acted on: after a parser error, after late headers', async (t) => {
    const { backend, gateway } = await startBoth(t, {}, { headersTimeoutMs: 300, lingerMs: 1000 });
    const late = open(t, gateway, SEND.slice(0, 40));
    await until(() => late.text().endsWith('}\n'));
    assert.match(late.text(), /^HTTP\/1\.1 408 /);
    late.socket.write(SEND.slice(40));
    await closed(late.socket);
    for (let i = 0; i < 40; i++) {
      const { socket, text } = open(t, gateway, `${SEND}${SEND}rubbish\r\n\r\n`);
      await closed(socket);
      // A request is logged before its connection closes, or shortly after.
      await until(() => requests(gateway).length >= backend.seen.length);
      const answers = text().match(/^HTTP\/1\.1 201/gm) ?? [];
      assert.equal(backend.seen.splice(0).length, answers.length, text());
    }
  });

  // With 600,000 of them an unauthenticated client blocked the gateway for 15 s.
  test('attack: packets that the parser refuses after a response has started add no listeners', async (t) => {
    const { gateway, finish } = await startHolding(t, { allow: ['* /v1/about'] });
    let begun: http.ServerResponse | undefined;
    gateway.server.prependListener('request', (_, res) => begun ??= res);
    let packets = 0;
    gateway.server.on('clientError', () => packets++);
    const { socket, text } = open(t, gateway, `${ABOUT.replace('/v1/about', '/v1/about?hang-begun')}rubbish\r\n\r\n`);
    socket.setNoDelay(true);
    await until(() => text().includes('first'));
    const listeners = (): number => begun!.listenerCount('close');
    await until(() => packets > 0);
    const first = listeners();
    for (let i = 0; i < 50; i++) {
      const before = packets;
      socket.write('x');
      if (isNode) await until(() => packets > before);
    }
    assert.equal(listeners(), first);
    finish();
    await closed(socket);
    assert.match(text(), /first/);
  });

  // The parser goes on with a packet after its socket was destroyed.
  test('bytes behind requests for which their connection was closed leave no warning of the parser', async (t) => {
    const { backend, gateway } = await startHeld(t, 1);
    const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
    const { socket } = open(t, gateway, `${SEND.repeat(9)}rubbish\r\n\r\n`);
    const [served] = await accepted;
    await Promise.all([closed(socket), closed(served)]);
    assert.equal(linesOf(gateway, /the HTTP parser|client error/).length, 0);
    assert.ok(backend.seen.length <= 1, `${backend.seen.length} requests were sent`);
  });
});
