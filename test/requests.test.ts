import { once } from 'node:events';
import http from 'node:http';
import net, { type AddressInfo } from 'node:net';
import { suite } from 'node:test';
import { pathToFileURL } from 'node:url';
import { outcomeOf, parseAnswer, statusOf } from './answers.ts';
import { assert, assertDenied, closed, linesOf, logLines, requests, until } from './assertions.ts';
import { type Handler, startBackend } from './backend.ts';
import { ask, type Connection, open, openHalf, raw, statusesOf, untilServed } from './client.ts';
import { AT_INFO, tokens } from './configs.ts';
import { type Change, changedSource, fixture } from './files.ts';
import { parseTarget } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { answerAll, arrived, LARGE, send, startHeld } from './held.ts';
import { hook, MADE, MEANT, TO_ALL } from './hooks.ts';
import { bytesOf, literal, parseRow, rowWith, sendRow, table } from './rows.ts';
import { isNode } from './runtime.ts';
import {
  ABOUT,
  AS_OTHER,
  ASKED,
  AUTHED,
  BEARER,
  DASHBOARD,
  DEFAULTS,
  FROM,
  GROUP,
  HEALTH,
  HELLO,
  MESSAGE,
  MIB,
  OTHER,
  post,
  RECEIVE,
  SECRET,
  SEND,
  THIRD,
  TO,
  TOO_MANY,
} from './samples.ts';
import { SPELLINGS } from './spellings.ts';
import { type Gateway, startBoth, startGateway, startHolding } from './start.ts';
import { RECEIVING, startUpgradeBackend } from './websocket.ts';

suite('requests', SIDE_BY_SIDE, () => {
  test('an internal error is a 500 without details, and its stack is logged', async (t) => {
    const broken: Change = [
      'function identify({ core, rules, credential, client }: Exchange) {\n',
      (text) => `${text}  if (credential) throw new RangeError('planted in identify');\n`,
    ];
    const { createGateway } = await import(
      pathToFileURL(changedSource(t, broken)).href
    ) as typeof import('./gateway.ts');
    const backend = await startBackend(t);
    const both = { backend, gateway: await startGateway(t, backend, {}, {}, createGateway) };
    // Refusals capture no stack. The stacks of later errors must not be affected.
    assert.equal(outcomeOf(await ask(both.gateway, {})), '401 unauthorized');
    const answer = await ask(both.gateway, { body: MESSAGE, headers: BEARER });
    assertDenied(answer, 500, 'internal_error', both);
    assert.doesNotMatch(answer.text, /planted/);
    const line = logLines(both.gateway.log).find(({ message }) => message === 'internal error');
    assert.match(String(line?.stack), /RangeError: planted in identify\n +at /);
    assert.equal(line?.requestId, answer.json.requestId);
  });

  test('/healthz is 200 without a credential or a backend, and reveals nothing else', async (t) => {
    const { backend, gateway } = await startBoth(t, { clients: ['192.0.2.1'], cors: [DASHBOARD] });
    const { status, text, headers } = await ask(gateway, { path: '/healthz', headers: { origin: DASHBOARD } });
    assert.deepEqual([status, text, headers['access-control-allow-origin']], [200, 'ok\n', DASHBOARD]);
    const path = '/healthz';
    const others = await statusesOf(gateway, { path, method: 'HEAD' }, { path: `${path}/` }, { path, body: '{}' });
    assert.deepEqual(others, [200, 403, 403]);
    assert.deepEqual(
      requests(gateway).slice(0, 2).map(({ bytesOut }) => bytesOut),
      [3, 0],
      'of the GET, and of the HEAD',
    );
    assert.equal(backend.connections, 0);
  });

  test('every response has a new X-Request-Id, which is in the log and in the request to the backend', async (t) => {
    const { backend, gateway } = await startBoth(t, { cors: [DASHBOARD] });
    const rows = `bearer ;; bearer | X-Request-Id: forged ;; bearer | ${HELLO} ;; /healthz ;; /.. ;; /v1/about ;;
    OPTIONS /v1/about | Origin: ${DASHBOARD} | ${ASKED}`.split(' ;;');
    const ids: unknown[] = [];
    for (const row of rows) ids.push((await sendRow(gateway, parseRow(row.trim()))).headers['x-request-id']);
    assert.deepEqual(ids, requests(gateway).map((line) => line.requestId));
    assert.equal(new Set(ids).size, 7);
    assert.deepEqual(backend.seen.map((seen) => seen.headers['x-request-id']), ids.slice(0, 3));
  });

  const REFUSED_TARGETS = fixture('targets-refused.txt');

  table('a target that programs read differently is 400 even with a valid token, and the backend sees nothing', {
    allow: ['messaging', 'info', '* /v1/attachments/*', '* /*'],
  })([
    '* bearer → 400 bad_target',
    // A target with the wrong first character is refused by node's parser, and on Deno without a body.
    REFUSED_TARGETS.trim().split(/\s+/).map((target) => `GET ${target}${/^[/h]/i.test(target) ? '' : ' → 400'}`),
    'PUT /v1/attachments/-x',
    // Bytes that no target may have. Node's parser refuses most of them.
    ['\t', ' ', '\x7f', '\x80', '\xff', '\0', '\x0b'].map((byte) => `GET /v1/ab${byte}out → 400`),
  ]);

  /** Targets that pass, and what the backend receives for each. One in 64 attachment ids starts with "-". */
  const PASSED_TARGETS = fixture('targets-passed.txt')
    .trim().split('\n').map((line) => line.trim().split(/\s+/) as [target: string, sent: string]);

  table('the backend gets, byte for byte, what was checked', { allow: ['info', 'messaging'] })`
    * bearer → passes
    ${PASSED_TARGETS.map(([target, sent]) => `GET ${target} → GET ${sent}`)}
    # the first "?" and the first "=" divide
    GET /v1/search?numbers=a?b=c → GET /v1/search?numbers=a?b=c
    DELETE /v1/attachments/-Ab_9 → DELETE /v1/attachments/-Ab_9`;

  test('a query starts at the first "?", a value at the first "=", and nothing after them is lost', () => {
    const { query, parameters, querySecret } = parseTarget('GET', '/v1/search?a=b=c?d&@auth=e=f?g');
    assert.deepEqual([query, parameters, querySecret], ['a=b=c?d', [['a', 'b=c?d']], 'e=f?g']);
  });

  test('parseTarget: a target that it returns passes again unchanged', () => {
    for (const [, sent] of PASSED_TARGETS) {
      const { segments } = parseTarget('GET', sent);
      const again = parseTarget('GET', `/${segments.map((segment) => encodeURIComponent(segment)).join('/')}`);
      assert.deepEqual(again.segments, segments, sent);
    }
  });

  test('no more of an upload is read than the backend accepts', async (t) => {
    let taken = 0;
    const total = 40 * MIB;
    const backend = await startBackend(t, async (req, res) => {
      // Reads a chunk, lets everything else run for a while, and reads the next.
      for await (const chunk of req) {
        taken += (chunk as Buffer).length;
        await new Promise((resolve) => setImmediate(resolve));
        // Most of the difference is in the system's socket buffers.
        assert.ok(socket.bytesWritten - taken < 24 * MIB, `${socket.bytesWritten - taken} bytes are on their way`);
      }
      res.writeHead(201).end('{"timestamp":"1"}');
    });
    const body = `${HELLO.slice(0, -1)},"message2":"`;
    const begun = `${post(SECRET, total, 'Connection: close')}${body}`;
    const { socket, text } = open(t, await startGateway(t, backend), begun);
    const filler = Buffer.alloc(256 * 1024, 'x');
    for (let left = total - body.length - 2; left > 0; left -= filler.length) {
      if (!socket.write(filler.subarray(0, left))) await once(socket, 'drain');
    }
    socket.write('"}');
    await closed(socket);
    assert.deepEqual([statusOf(text()), taken], [201, total]);
  });

  // The head waited for the end of the upload, for 2 s of silence, or for 30 s.
  test('a response without a body is written at once, although its request is not complete', async (t) => {
    const backend = await startBackend(t, (_, res) => void res.writeHead(413, { 'Content-Length': 0 }).end());
    const own = { cors: [DASHBOARD], ...tokens({}) };
    const gateway = await startGateway(t, backend, own, { lingerMs: 3_600_000, stallTimeoutMs: 3_600_000 });
    const wanted = `Origin: ${DASHBOARD}\r\nAccess-Control-Request-Method: POST\r\nContent-Length: 9`;
    const rows = [
      [`${post(SECRET, LARGE.length + 200_000)}${LARGE.slice(0, -3)}`, 413],
      [`OPTIONS /v2/send HTTP/1.1\r\nHost: g\r\n${wanted}\r\n\r\n`, 204],
      ['HEAD /v1/about HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer x\r\nContent-Length: 9\r\n\r\n', 401],
    ] as const;
    for (const [bytes, status] of rows) {
      const { socket, text } = open(t, gateway, bytes);
      await until(() => text().endsWith('\r\n\r\n'), bytes.slice(0, 60));
      assert.equal(statusOf(text()), status);
      socket.destroy();
    }
  });
});

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
    // Bun 1.4.5 first serves a request without a length, and then refuses its body.
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
    ${'Bun' in globalThis ? [] : [`send || ${HELLO}`, `POST /v2/send HTTP/1.1 | Host: x || ${AUTHED(SECRET)}`]}`;
    await sendRefused(gateway, '400 bad_request', byGateway);
    await sendRefused(gateway, '400 bad_target', 'CONNECT backend:80 HTTP/1.1 | Host: x | bearer');
    const lines = requests(gateway).map((line) => `${line.level} ${line.method} ${outcomeOf(line)}`);
    assert.equal(lines.pop(), 'warn CONNECT 400 bad_target');
    for (const line of lines) assert.match(line, /^warn (GET|POST) 400 bad_request$/);
    // The parser of Bun 1.4.5 refuses some of them before the gateway sees them.
    if (!('Bun' in globalThis)) assert.equal(lines.length, byGateway.trim().split('\n').length);
    assert.equal(backend.connections, 0);
    assert.equal(statusOf(await raw(gateway, bytesOf('GET /v1/about HTTP/1.0 | bearer'))), 200);
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
  test('garbage sent byte by byte after a refusal does not affect the requests of others', async (t) => {
    const { backend, gateway } = await startBoth(t, tokens({}, {}), {
      lingerMs: 300,
      stallTimeoutMs: 1000,
      headersTimeoutMs: 500,
    });
    let sent = 0;
    const late = ABOUT.slice(0, -2);
    for (const begun of ['rubbish\r\n\r\n', `${ABOUT}rubbish\r\n\r\n`, `${post(SECRET, 'chunked')}zz\r\n`, late]) {
      let [isOver, refused] = [false, 0];
      t.after(() => isOver = true);
      const drip = async (): Promise<void> => {
        for (; !isOver; refused++) {
          const socket = openHalf(t, gateway, begun).resume();
          const timer = setInterval(() => socket.write('x'), 5);
          await closed(socket).finally(() => clearInterval(timer));
        }
      };
      const rubbish = Array.from({ length: 12 }, drip);
      for (let i = 0; i < 20 || refused < 12; i++) {
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
      if (ends && 'Bun' in globalThis) continue; // Bun 1.4.5 does not count the bytes read after a refusal
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

suite('limits', SIDE_BY_SIDE, () => { // A thousand idle connections, which cost one client nothing, locked out all others.
  test('connections that come in one turn of the event loop are no more than limits.connections', async (t) => {
    const { gateway } = await startBoth(t, { limits: { connections: 2 } });
    // Several in one turn, as a server under load may get them: here they are handed over, as node:http allows.
    const accepted: net.Socket[] = [];
    const other = net.createServer((socket) => void accepted.push(socket)).listen(0, '127.0.0.1');
    t.after(() => other.close());
    await once(other, 'listening');
    for (let i = 0; i < 6; i++) open(t, { port: (other.address() as AddressInfo).port });
    await until(() => accepted.length === 6);
    for (const socket of accepted) {
      t.after(() => socket.destroy());
      gateway.server.emit('connection', socket);
    }
    assert.deepEqual(accepted.map(({ destroyed }) => destroyed), [true, true, true, true, false, false]);
  });

  test('at limits.connections a new connection is accepted, and the one that has gone longest without a valid token is closed', async (t) => {
    const { backend, gateway, finish } = await startHolding(t, { limits: { connections: 4 } });
    // Nothing else closes a connection here.
    Object.assign(gateway.server, { keepAliveTimeout: 0 }).setTimeout(0);
    const peers = new Map<number, net.Socket>();
    gateway.server.on('connection', (socket: net.Socket) => peers.set(socket.remotePort!, socket));
    const named = new Map<string, Connection & { peer?: net.Socket | undefined }>();
    /**
     * Sends on the connection of this name, or on a new one. Afterwards these are open, in the order in which they were
     * opened.
     */
    const sends = async (name: string, bytes: string, opened: string): Promise<void> => {
      const on = named.get(name) ?? open(t, gateway);
      const before = on.text().length;
      on.socket.write(bytes);
      const [length, isHeld] = [backend.seen.length, bytes === SEND];
      await until(
        () => (isHeld ? backend.seen.length > length : on.text().length > before) || on.socket.destroyed,
        `the response on the connection "${name}"`,
      );
      named.set(name, { peer: peers.get(on.socket.localPort!), ...on });
      const left = [...named].filter(([, { peer }]) => peer?.destroyed === false).map(([each]) => each).join(' ');
      assert.equal(left, opened, `the open connections when "${name}" has its response`);
    };
    const wrong = ABOUT.replace(SECRET, OTHER);
    await sends('served', SEND, 'served'); // the oldest, with a request of its token in progress
    await sends('known', ABOUT, 'served known');
    await sends('wrong', wrong, 'served known wrong');
    await sends('none', HEALTH, 'served known wrong none');
    await sends('known', ABOUT, 'served known wrong none'); // after the last two were opened
    await sends('fifth', HEALTH, 'served known none fifth');
    await sends('sixth', HEALTH, 'served known fifth sixth');
    await sends('fifth', HEALTH, 'served known fifth sixth'); // does not count: it shows no token
    await sends('good', ABOUT, 'served fifth sixth good');
    await sends('eighth', HEALTH, 'served sixth good eighth');
    for (const [name, { socket, peer }] of named) if (peer?.destroyed) await closed(socket, `the close of "${name}"`);
    finish();
    await until(
      () => named.get('served')!.text().includes('and last'),
      'the response of the connection that is served',
    );
    assert.deepEqual(linesOf(gateway, /^limits.connections is reached/).map((line) => line.level), ['warn']);
  });

  // Before Node 24.9 each left a listener behind, so an unauthenticated client could fill the memory with one
  // connection.
  test('a connection that repeatedly asks for another protocol costs no more than the first time', async (t) => {
    const { gateway } = await startBoth(t);
    const accepted = once(gateway.server, 'connection');
    const { socket, text } = open(t, gateway);
    const [served] = await accepted as [net.Socket];
    const listeners: number[] = [];
    for (let i = 1; i <= 20 && !socket.destroyed; i++) {
      socket.write(bytesOf('GET / HTTP/1.1 | Host: x | Connection: Upgrade | Upgrade: h2c'));
      await until(() => text().split('HTTP/1.1 401').length > i || socket.destroyed);
      listeners.push(served.listenerCount('close'));
    }
    assert.ok(listeners.at(-1)! <= listeners[0]!, `${listeners}`);
  });

  // node:http lost the bytes that came in one packet with such a request, and parsed the next packet as a new request.
  test('attack: a request hidden in the body of one that follows a request with Upgrade', async (t) => {
    const { backend, gateway } = await startBoth(t);
    const inner = `${post(SECRET, HELLO.length, 'Connection: close')}${HELLO}`;
    const first = bytesOf('about | Connection: Upgrade | Upgrade: h2c');
    const { socket, text } = open(t, gateway, `${first}${post(SECRET, inner.length)}`);
    await until(() => backend.seen.length === 1 && statusOf(text()) === 200);
    socket.end(inner);
    await closed(socket);
    assert.deepEqual(backend.seen.map((seen) => seen.url), ['/v1/about']);
    assert.deepEqual(backend.sent, []);
  });

  // The first response ended up among the bytes of the WebSocket. Bun 1.4.5 reads nothing before it has responded, so
  // the client waits forever.
  test('an Upgrade after a request that has no response yet ends the connection', async (t) => {
    for (const protocol of 'Bun' in globalThis ? [] : ['websocket', 'h2c']) {
      const { backend, gateway } = await startHolding(t, RECEIVING);
      const { socket, text } = open(t, gateway, ABOUT.replace('about', 'about?hang'));
      await until(() => backend.seen.length === 1);
      socket.write(bytesOf(`GET ${RECEIVE} HTTP/1.1 | Host: x | bearer | Connection: Upgrade | Upgrade: ${protocol}`));
      if (protocol === 'h2c') socket.destroy(); // from Node 24.9 on, h2c waits like any other pipelined request
      await closed(socket);
      await until(() => requests(gateway).some((line) => line.status === 499));
      assert.equal(text(), '');
      assert.equal(backend.seen.length, 1);
    }
  });

  /** A request that needs no slot, and that `startHolding` leaves unanswered. */
  const HANGING = ABOUT.replace('about', 'about?hang');

  test('a connection that breaks off while its token is served is removed from the list of connections', async (t) => {
    const { backend, gateway } = await startHolding(t, { limits: { connections: 4 } });
    for (let count = 1; count <= 6; count++) {
      const { socket } = open(t, gateway, HANGING);
      await until(() => backend.seen.length === count);
      socket.destroy();
      await until(() => requests(gateway).length === count);
    }
    const held = Array.from({ length: 4 }, () => open(t, gateway, HEALTH));
    for (const { text } of held) await until(() => text().includes('200 OK'));
    assert.deepEqual(linesOf(gateway, /limits\.connections/), []);
  });

  test('a token is served on exactly half of limits.connections, whichever clients hold the rest', async (t) => {
    const { backend, gateway } = await startHolding(t, { ...tokens({}, {}), limits: { connections: 8 } });
    const idle = open(t, gateway, HEALTH);
    await until(() => idle.text().includes('200 OK'));
    for (let count = 1; count <= 4; count++) {
      open(t, gateway, HANGING);
      await until(() => backend.seen.length === count);
    }
    assert.equal(outcomeOf(await ask(gateway, { headers: BEARER })), '503 busy');
    assert.equal(backend.seen.length, 4);
  });

  // One byte every nine seconds on a thousand connections kept all other clients from being served.
  test('with several tokens, one token holds at most half of limits.connections, whatever its requests are', async (t) => {
    const webSocket = bytesOf(`GET ${RECEIVE} HTTP/1.1 | Host: x | bearer | Connection: Upgrade | Upgrade: websocket`);
    const hold: [name: string, arrived: number, bytes: string | Buffer][] = [
      ['a send that waits for its response', 4, SEND],
      ['a body that does not end', 0, `${post(SECRET, 1000)}{"message":"`],
      ['a refused request that goes on sending', 0, `${post(SECRET, 1_000_000_000)}{`],
      ['a WebSocket', 4, webSocket],
    ];
    for (const [[name, arrived, bytes], other] of hold.flatMap((way) => [[way, {}], [way, undefined]] as const)) {
      const backend = await startUpgradeBackend(t);
      backend.server.prependListener('request', (req: http.IncomingMessage, res: http.ServerResponse) => {
        if (req.url === '/v2/send') res.writeHead = res.end = () => res; // never a response
      });
      const config = { ...RECEIVING, limits: { connections: 8 }, backend: { url: backend.url, parallel: 0 } };
      const gateway = await startGateway(t, backend, { ...config, ...tokens({}, other) });
      let met = 0;
      for (const event of ['request', 'upgrade']) gateway.server.on(event, () => met++);
      const held = Array.from({ length: 4 }, () => open(t, gateway, bytes));
      await until(() => met === 4 && backend.seen.length === arrived);
      const next = await ask(gateway, { headers: BEARER });
      assert.equal(outcomeOf(next), other ? '503 busy' : '200', name);
      for (const { socket } of held) assert.ok(!socket.destroyed, name);
      if (!other) continue;
      assert.equal(next.headers['retry-after'], '10');
      assert.equal(requests(gateway).at(-1)!.reason, 'half_of_connections');
      assert.equal(backend.seen.length, arrived);
      assert.deepEqual(await statusesOf(gateway, { headers: AS_OTHER }), [200]);
      held[0]!.socket.destroy(); // its place is free again
      await untilServed(gateway, {});
    }
  });

  test('with limits.connections 1 and two tokens, each token is served', async (t) => {
    const { gateway } = await startBoth(t, { limits: { connections: 1 }, ...tokens({}, {}) });
    for (const headers of [BEARER, AS_OTHER, BEARER]) {
      assert.equal(outcomeOf(await ask(gateway, { headers })), '200');
    }
  });
});

/** A token that may send by GET, and the log fields of such a request. */
const BY_GET = hook({ allow: ['GET /v2/send'], defaults: DEFAULTS });

const GETS_BY_EACH_METHOD = SPELLINGS.map(({ method, ask: make }) => {
  const row = rowWith(make(SECRET), 'GET').replace(/v2\/send\??/, 'v2/send?message=a%0Ab&');
  return `${row} → auth=${method} | {"message":"a\\nb"}`;
});

const SENT_BY_GET =
  `→ 201 | Cache-Control: no-store | POST /v2/send | > Content-Type: application/json | method=GET | route=/v2/send | status=201 | ${MEANT}`;

suite('sends-by-get', SIDE_BY_SIDE, () => {
  table("GET /v2/send becomes a POST, if the token's allowlist spells it out, by each method of the token", {
    ...hook({ ...TO_ALL, allow: ['GET /v2/send'] }),
  })`
    * bearer ${SENT_BY_GET}
    GET /v2/send?message=Front%20door → {"message":"Front door"} ;; GET /v2/send?message=Front+door → {"message":"Front door"}
    GET /v2/send?message=T%C3%BCr%0A%09offen%20%F0%9F%9A%AA → {"message":"Tür\n\toffen 🚪"}
    GET /v2/send?%6Dessage=x%0Ay → {"message":"x\ny"} ;; GET /v2/send?message=x&auth=${SECRET}&Auth=${OTHER} → {"message":"x"}
    GET /v2/send?message=x&number=%2B15550100003&recipients=+15550100003 → {"message":"x","number":"${THIRD}","recipients":["${THIRD}"]}
    GET /v2/send?recipients=+15550100003&message=x&&recipients=x.01&z=1&view_once= → {"message":"x","recipients":["${THIRD}","x.01"]}
    GET /v2/send?message='x'%26%3C%3E=&text_mode=styled → {"message":"'x'&<>=","text_mode":"styled"}
    # A GET has a body for its credential alone; what else it says is not looked at.
    * ${SENT_BY_GET}
    ${GETS_BY_EACH_METHOD}`;

  const KEPT: Handler = (req, res) => {
    const own = ['Cache-Control', 'public, max-age=60', 'Vary', 'Accept', 'Set-Cookie', 'a=1', 'Set-Cookie', 'b=2'];
    req.resume().on('end', () => res.writeHead(201, own).end('[]'));
  };

  table(
    'the response to a sending GET may not be stored, whatever the backend responds, and loses none of its headers',
    {
      ...{ ...BY_GET, cors: ['https://dash.example'] },
    },
    { handler: KEPT },
  )`
    * GET /v2/send?message=x | bearer | Origin: https://dash.example
    → 201 | Cache-Control: no-store | Vary: Origin, Accept | Set-Cookie: a=1, b=2`;

  test('the response to a sending GET is the last one on its connection, also if it refuses the content', async (t) => {
    const { backend, gateway } = await startBoth(t, BY_GET);
    for (const [message, status] of [['x', 201], ['', 400]] as const) {
      const response = await raw(gateway, ABOUT.replace('/v1/about', `/v2/send?message=${message}`).repeat(2));
      assert.deepEqual([statusOf(response), response.match(/^HTTP\/1\.1/gm)!.length], [status, 1], response);
      for (const header of [/^connection: close\r$/im, /^cache-control: no-store\r$/im]) assert.match(response, header);
    }
    assert.equal(backend.seen.length, 1, 'the requests that the backend saw');
  });

  table('a sending GET that asks for an upgrade sends its message, and is not upgraded', BY_GET)`
    * ${MADE} | {"message":"x"} | > Upgrade:
    GET /v2/send?message=x | Connection: Upgrade | Upgrade: websocket | Sec-WebSocket-Key: x`;

  table('attack: send by a GET that the allowlist does not spell out, or with a token that makes no sends', hook({}))`
    * bearer | @ {"defaults":${MEANT}} → 405 method_not_allowed
    * bearer | @ {"defaults":${MEANT},"allow":["send","info","messaging","setup"]} → 405 method_not_allowed
    * bearer | @ {"defaults":${MEANT},"allow":["POST /v2/send","GET /v2/*","GET /*","* /*"]} → 405 method_not_allowed
    * bearer | @ {"defaults":${MEANT},"allow":["GET /v2/:name","GET /*/send","* /v2/send"]} → 405 method_not_allowed
    * bearer | @ {"allow":["GET /v2/send","* /*"]} → 405 method_not_allowed
    * bearer | @ {"allow":["GET /v2/send","* /*"],"senders":["${FROM}"],"recipients":["${TO}"]} → 405 method_not_allowed
    GET /v2/send?message=x ;; GET /v2/send?message=x%0Ay ;; GET /v2/send ;; GET //v2/send/?message=x
    GET /@auth=${SECRET}/v2/send?message=x`;

  table('attack: use a token for GET /v2/send beyond its rights, or send nothing, or without a recipient', BY_GET)`
    * bearer → 405 method_not_allowed
    PUT /v2/send ;; PATCH /v2/send ;; DELETE /v2/send ;; OPTIONS /v2/send ;; GET /v1/send?message=x
    * bearer → 403 endpoint_not_allowed
    ${HELLO} ;; 'hello' ;; POST /v1/send | ${HELLO} ;; GET /v1/about
    * bearer → 403 recipient_not_allowed
    GET /v2/send?message=x&recipients=%2B15559999999 ;; GET /v2/send?message=x&recipients=+15559999999
    GET /v2/send?message=x&recipients=%2B15550100002&recipients=${GROUP}
    GET /v2/send?payload=%7B%22message%22%3A%22x%22%2C%22recipients%22%3A%22%2B15559999999%22%7D
    GET /v2/send?message=x&number=%2B15559999999 → 403 sender_not_allowed
    * bearer → 400 bad_field
    GET /v2/send ;; GET /v2/send?message= ;; GET /v2/send?msg=x ;; GET /v2/send?message=x&recipients=
    GET /v2/send?message=x&Recipients=%2B15550100002 ;; GET /v2/send?message=x&recipient=%2B15550100002
    GET /v2/send?message=x&number=1 ;; none | GET /v2/send?message=x&auth=${SECRET} → 401 unauthorized
    * GET /v2/send?message=x | basic → 403 cross_site
    User-Agent: Mozilla/5.0 (X11; Linux x86_64) ;; Sec-Fetch-Site: cross-site | Sec-Fetch-Mode: no-cors
    Sec-Fetch-Site: none | Sec-Purpose: prefetch ;; Origin: http://gateway`;

  table('attack: smuggle control characters through the query of a GET', BY_GET)`
    * bearer → 400 bad_target
    GET /v2/send?message=x%0D%0A ;; GET /v2/send?message=x%00 ;; GET /v2/send?message=x%1B%5B0m
    GET /v2/send?message=x%7F ;; GET /v2/send?message=x%C2%85 ;; GET /v2/send?message=x%FF
    GET /v2/send?message=x&number=%0A ;; GET /v2/send?message%0A=x ;; GET /v2/send?message=x&text=%09
    GET /v1/about?message=x%0Ay ;; GET /v1/send?message=x%0Ay ;; GET /v2%0A/send?message=x`;
});
