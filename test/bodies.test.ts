import { once } from 'node:events';
import http from 'node:http';
import net, { type AddressInfo } from 'node:net';
import { suite } from 'node:test';
import { type Answer, codeOf, outcomeOf, statusOf } from './answers.ts';
import { assert, assertDenied, closed, pass, requests, until } from './assertions.ts';
import { ANSWERING, gotJson, startBackend } from './backend.ts';
import { ask, beginSend, open, raw, trickle } from './client.ts';
import { ALL_GROUPS, CONFINED, several, tokens } from './configs.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { listened, settled, statusFor } from './held.ts';
import { hook } from './hooks.ts';
import { ROUTES } from './routes.ts';
import { checkRows, listed, literal, table } from './rows.ts';
import {
  ABOUT,
  AS_OTHER,
  basic,
  BEARER,
  DEFAULTS,
  FROM,
  GROUP,
  HELLO,
  LAST,
  masked,
  MESSAGE,
  MIB,
  OTHER,
  post,
  SECRET,
  SEND,
  sized,
  STRANGER,
  TO,
} from './samples.ts';
import { type Both, type Gateway, startBoth, startGateway, startHolding } from './start.ts';

const NO_OBJECT = literal`
  '' ;; ' ' ;; [] ;; "text" ;; '1' ;; 'auth=x' ;; '\ufeff{}' ;; '\u000b{}'`;

suite('bodies', SIDE_BY_SIDE, () => {
  test('a body that comes in many pieces has one listener for them', async (t) => {
    const { gateway } = await startBoth(t);
    let met: http.IncomingMessage | undefined;
    gateway.server.on('request', (req: http.IncomingMessage) => void (met = req));
    const { socket, text } = open(t, gateway, post(SECRET, HELLO.length));
    let most = 0;
    for (const char of HELLO) {
      await pass(2);
      most = Math.max(most, met?.listenerCount('readable') ?? 0);
      socket.write(char);
    }
    await until(() => text() !== '');
    assert.deepEqual([statusOf(text()), most], [201, 1]);
  });

  table('a body that is not a JSON object is 400, and so is a broken object without a token', {})`
    * bearer → 400 bad_json
    * bearer | Content-Type: text/plain → 400 bad_json
    * bearer | Content-Type: application/x-www-form-urlencoded → 400 bad_json
    * bearer | Content-Type: multipart/form-data; boundary=x → 400 bad_json
    'x=1&recipients=${STRANGER}' ;; '\ufeff${HELLO}' ;; ${HELLO}${HELLO.replace(TO, STRANGER)} ;; '${HELLO}\n\u0000'
    * bearer → 400 bad_json
    # Without a body a send is broken too, but is told so in other words.
    ${NO_OBJECT.replace("''", '')}
    POST /v2/send → "The body is empty. It needs Content-Length or chunked, and a client that repeats a request without its body after a 401 needs a bearer header."
    Transfer-Encoding: chunked | '' → "The body is empty. " ;; POST /v1/send → "The body is empty. "
    * bearer → 400 bad_json
    * none → 400 bad_json
    # One document for each kind of mistake: BODY SCAN has the others, cut at every byte.
    { ;; '\n\t {"a' ;; {"a":1,} ;; {"number":nul} ;; '{"a":"\n"}' ;; {} x ;; '{"a":"\xff"}'
    {"a":${'['.repeat(64)}${']'.repeat(64)}} ;; {"x":${'{"a":'.repeat(64)}1${'}'.repeat(64)}}`;

  const inUtf16 = (text: string): string => Array.from(text, (char) => `${char}\\x00`).join('');

  table('the error for UTF-16, a byte order mark or a number without quotes has the correct spelling', {})`
    * bearer → 400 bad_json | "object: save it as UTF-8, without a byte order mark, at byte 0."
    '\xef\xbb\xbf{}' ;; '\xff\xfe${inUtf16(HELLO)}' ;; '\xfe\xff\x00${inUtf16(HELLO).slice(0, -4)}' ;; '\x00${
    inUtf16(HELLO).slice(0, -4)
  }'
    * bearer → 400 bad_json | "object: save it as UTF-8, without a byte order mark, at byte 1."
    '${inUtf16(HELLO)}'
    * bearer → 400 bad_json | "object: no value begins with \"+\"; a phone number needs double quotes, at byte 5."
    '{"a":+15550100002}'
    * bearer → 400 bad_field | "in double quotes."
    '{"number":+15550100001}' ;; {"number":15550100001} ;; {"recipients":[15550100002]} ;; {"recipients":15550100002}`;

  table('a body that does not start like an object has no token: 401, whatever its size', {}, { stallTimeoutMs: 2000 })`
    * → 401 unauthorized | reason=no_credential
    ${NO_OBJECT}
    POST /v2/send ;; Transfer-Encoding: chunked | '' ;; {"auth":null,${HELLO.slice(1)} ;; -- message = hi
    Content-Type: application/x-www-form-urlencoded | 'message=hi&auth=${SECRET}'
    Content-Type: application/json | ' \n[{"auth":"x"}]' ;; Content-Type: text/plain | 'Backup done: 5 files'
    Content-Type: text/plain | '\xff\xfe not UTF-8' ;; Content-Type: text/plain | '${' '.repeat(70_000)}'
    Content-Type: text/plain | '${'long '.repeat(20_000)}'`;

  /** A chunked body in single bytes, as Latin-1. */
  const inBytes = (text: string): string =>
    `${Array.from(Buffer.from(text).toString('latin1'), (byte) => `1\r\n${byte}\r\n`).join('')}0\r\n\r\n`;

  test('a body may arrive in single bytes: a text or a form without a credential is 401, and a webhook is sent', async (t) => {
    const { backend, gateway } = await startBoth(t, hook());
    for (const text of ['Backup done: 5 files', `data={"auth":"${SECRET}"}`, ' \n[{"auth":"x"}]', ' '.repeat(300)]) {
      const head = post('', 'chunked', 'Connection: close').replace(/Authorization.*\r\n/, '');
      assert.equal(codeOf(await raw(gateway, head + inBytes(text))), 'unauthorized', text);
    }
    assert.equal(backend.connections, 0, 'the backend saw a connection');
    const body = inBytes('{"message":"ü😀","number":2}');
    await raw(gateway, Buffer.from(post(SECRET, 'chunked', 'Connection: close') + body, 'latin1'));
    assert.equal(gotJson(backend).message, 'ü😀');
  });

  // Small chunks are joined in memory, and the joined ones must be those that the scan has overwritten.
  test('attack: have a credential relayed from a body whose auth arrives in single bytes, early or late, or in escapes', async (t) => {
    const { backend, gateway } = await startBoth(t);
    const escaped = SECRET.replace(/./g, (char) => `\\u00${char.charCodeAt(0).toString(16)}`);
    for (const value of [SECRET, escaped]) {
      for (const filler of ['', 'x'.repeat(100), 'x'.repeat(65_500), 'x'.repeat(200_000)]) {
        const begin = `{"message":"${filler}`;
        const end = `","auth":"${value}","number":"${FROM}","recipients":["${TO}"]}`;
        const head = post(SECRET, 'chunked', 'Connection: close');
        const authed = filler.length > 100 ? head : head.replace(/Authorization.*\r\n/, '');
        const request = `${authed}${begin.length.toString(16)}\r\n${begin}\r\n${inBytes(end)}`;
        assert.equal(statusOf(await raw(gateway, request)), 201);
        const body = String(backend.seen.at(-1)!.body);
        assert.equal(body, begin + masked(end, value));
      }
    }
  });

  table('a body that the backend would read differently is 400; without a token only "Auth" is named', {})`
    * bearer → 400 bad_field
    * → 401 unauthorized
    {"number":1} ;; {"Number":"${FROM}"} ;; {"number":"${FROM}","number":"${FROM}"} ;; {"recipients":["${TO}",null]}
    {"recipients":"${TO}"} ;; {"recipient\u017f":["${TO}"]} ;; {"recipients":["${'1'.repeat(5000)}"]}
    {"base64_attachments":["data:x;base64,AAAA;filename=../x;base64,QUJD"]}
    * → 400 bad_field
    bearer | {"auth":1} ;; bearer | {"Auth":"x"} ;; {"auth":"${SECRET}","number":1} ;; {"Auth":"${SECRET}"}`;

  /** Settings of a token that turns what it posts into sends. */
  const OF_A_WEBHOOK = `@ {"defaults":{"number":"${FROM}","recipients":["${TO}"]}}`;

  const SMALL = { limits: { body: '1KiB' } };

  table('a body of exactly the limit passes, and one byte more is 413', SMALL)`
    * bearer → 413 body_too_large
    ${sized(1024)} → 201 ;; ${sized(1024)} | Transfer-Encoding: chunked → 201 ;; ${sized(1025)} → bytesIn=0
    ${sized(1025)} | Transfer-Encoding: chunked ;; ${OF_A_WEBHOOK} | ${sized(1025)} → bytesIn=0`;

  table('a compressed body is 415; without a body, Content-Encoding is ignored', {})`
    * bearer → 415 unsupported_encoding
    ${['gzip', 'br', 'deflate, identity', 'x'].map((encoding) => `${HELLO} | Content-Encoding: ${encoding}`)}
    ${OF_A_WEBHOOK} | ${HELLO} | Content-Encoding: gzip ;; ${HELLO} | Content-Encoding: Identity → 201
    GET /v1/about | Content-Encoding: gzip → 200`;

  table('an empty body is accepted if the route needs none', { allow: ['setup', 'messaging'] })`
    * bearer → 201
    POST /v1/register/${FROM} ;; POST /v1/register/${FROM} | '' | Transfer-Encoding: chunked
    DELETE /v1/typing-indicator/${FROM} → 400 bad_json
    DELETE /v1/typing-indicator/${FROM} | {"recipient":"${TO}"} → 204 | {"recipient":"${TO}"}`;

  /** The routes that need a JSON body, or those that do not. Without GET, whose body is not relayed. */
  const routesThat = (needBody: boolean): string[] =>
    ROUTES.filter(({ method, facts }) => method !== 'GET' && facts.includes('body') === needBody)
      .map(({ method, path }) => `${method} ${path}`);

  table('a route that needs a body is 400 without one, and any other passes', ALL_GROUPS, ANSWERING)`
    * bearer → 400 bad_json
    ${routesThat(true)}
    * bearer → passes
    ${routesThat(false)}`;

  table('if two fields are refused, the first one is named', {})`
    * → 400 bad_field
    bearer | {"recipients":"x","number":1} → "The field "recipients" must"
    bearer | {"number":1,"recipients":"x"} → "The field "number" must"
    {"number":1,"recipients":"x","auth":"${SECRET}"} → "The field "number" must"
    {"auth":"${SECRET}","recipients":"x","number":1} → "The field "recipients" must"`;

  table('an unknown expectation is ignored', {})`
    * bearer | Expect: x → 201 | same | > Expect:
    ${HELLO} ;; ${HELLO} | Transfer-Encoding: chunked
    * bearer | Expect: x → 200 | > Expect:
    GET /v1/about`;

  table('the body of a GET authenticates it and is not relayed', {})`
    * GET /v1/about
    {"auth":"${SECRET}"} → 200 | '' ;; '{"auth":"${SECRET}"${' '.repeat(70_000)}}' → 413 body_too_large`;

  test('a chunked body that exceeds the limit during the relay is cut off and never complete', async (t) => {
    const { backend, gateway } = await startBoth(t, { limits: { body: '1MiB' } });
    const headers = { ...BEARER, 'transfer-encoding': 'chunked' };
    assert.equal((await ask(gateway, { body: sized(2_000_000), headers })).status, 413);
    assert.deepEqual(backend.sent, [], 'what the backend sent');
    assert.ok(backend.seen.every((seen) => !seen.complete), 'a request was complete');
  });

  const BIG_SEND = `${HELLO.slice(0, -1)},"base64_attachments":["${'A'.repeat(1_000_000)}"]}`;

  const EARLY_AUTH = `{"auth":"${SECRET}",${BIG_SEND.slice(1)}`;
  const LATE_AUTH = `${BIG_SEND.slice(0, -1)},"auth":"${SECRET}"}`;

  const ODD_TEXT = literal`é😀\\u00e9\\n`.repeat(50_000);

  const ODDLY_WRITTEN = `'  {"number":"${FROM}" ,"recipients":[ "${TO}"],"x":"${ODD_TEXT}"}'`;

  table(
    'small bodies, also chunked, arrive with their actual length, large ones with the announced one, byte for byte',
    {},
  )`
    * bearer → 201
    ${HELLO} | Transfer-Encoding: chunked → '${HELLO}' | > Content-Length: ${HELLO.length} | > Transfer-Encoding:
    ${BIG_SEND} → '${BIG_SEND}' | > Content-Length: ${BIG_SEND.length}
    ${BIG_SEND} | Transfer-Encoding: chunked → '${BIG_SEND}' | > Content-Length: | > Transfer-Encoding: chunked
    ${ODDLY_WRITTEN} → ${ODDLY_WRITTEN}
    none | ${EARLY_AUTH} → '${masked(EARLY_AUTH)}' | > Content-Length: ${EARLY_AUTH.length}
    ${LATE_AUTH} → '${masked(LATE_AUTH)}' | > Content-Length: ${LATE_AUTH.length}`;

  const LATE = HELLO.replace('}', `,"base64_attachments":["${'A'.repeat(300_000)}"]`);

  const LATE_SENDER = LATE.replace(`"number":"${FROM}",`, '');

  const FAIL_LATE = listed`
    bad_field ${LATE},"recipients":["${STRANGER}"]} ;; bad_field ${LATE},"recipient\u017f":["x"]}
    bad_field ${LATE},"members":["--help"]} ;; bad_field ${LATE.slice(0, -1)},"data:;filename=../x;base64,QQ=="]}
    bad_field ${LATE},"recipient":"group.436641234567x"}
    bad_field ${LATE_SENDER},"number":null} ;; bad_field ${LATE_SENDER}}
    bad_json ${LATE}}{} ;; bad_json ${LATE}}${' '.repeat(60_000)}x ;; bad_json ${LATE}}${
    ' '.repeat(100_000)
  } ;; bad_json ${LATE} ;; bad_json ${LATE},"x":"␊"} ;; bad_json ${LATE},"x":tru}
    recipient_not_allowed ${LATE},"recipient":"${STRANGER}"} ;; sender_not_allowed ${LATE_SENDER},"number":"${STRANGER}"}`;

  test('a large body that is refused late never becomes a complete document, and its request is cut off', async (t) => {
    const broken: string[] = [];
    const server = net.createServer((socket) => {
      let text = '';
      socket.setEncoding('latin1').on('data', (chunk) => {
        text += chunk;
      }).on('error', () => {}).on('close', () => {
        if (text !== '') broken.push(text); // with fetch there is a further connection, for the next request
      });
    }).listen(0, '127.0.0.1');
    await once(server, 'listening');
    t.after(() => server.close());
    const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
    const gateway = await startGateway(t, { url }, CONFINED);
    for (const [code, body] of FAIL_LATE.map((row) => row.split(/ (?=\{)/))) {
      for (const framing of [{}, { 'transfer-encoding': 'chunked' }]) {
        const answer = await ask(gateway, { body: body!.replace('␊', '\n'), headers: { ...BEARER, ...framing } });
        assert.equal(answer.json.code, code, answer.text);
        await until(() => broken.length > 0);
        const text = broken.shift()!;
        const end = text.slice(-100);
        assert.match(text, /^POST \/v2\/send HTTP\/1\.1/, 'the request began');
        assert.ok(!text.endsWith('0\r\n\r\n'), `the last chunk was sent: ${end}`);
        const document = text.slice(text.indexOf('\r\n\r\n') + 4).replace(/(?:^|\r\n)[0-9a-f]+\r\n/gi, '').trimEnd();
        assert.throws(() => JSON.parse(document), SyntaxError, end);
        assert.ok(!document.endsWith('}'), `the closing brace was sent: ${end}`);
      }
    }
  });

  test('Expect: 100-continue of HTTP/1.1 is answered when the body is wanted; a refused client is not asked for its body', async (t) => {
    const { backend, gateway } = await startBoth(t, { auth: { methods: ['bearer', 'body'] } });
    const body = sized(2_000_000);
    const small = post(SECRET, HELLO.length, 'Expect: 100-continue');
    // A wrong token, and a form that is not accepted.
    for (const head of [small.replace(SECRET, OTHER), small.replace(/Bearer .*(?=\r)/, basic(`api:${SECRET}`))]) {
      const { text } = open(t, gateway, head);
      await until(() => text().endsWith('}\n'));
      assert.match(text(), /^HTTP\/1\.1 401 [^]*\r\nconnection: close\r\n/i);
    }
    assert.equal(backend.connections, 0, 'the backend saw a connection');
    const { socket, text } = open(t, gateway, post(SECRET, body.length, 'Expect: 100-continue'));
    await until(() => text() !== '');
    assert.match(text(), /^HTTP\/1\.1 100 Continue\r\n/);
    socket.write(body);
    await until(() => text().includes('HTTP/1.1 201 '));
    assert.deepEqual([backend.sent.length, backend.seen[0]!.headers.expect], [1, undefined], 'what the backend got');
    socket.write(ABOUT); // the whole body has been read, so the connection stays
    await until(() => text().includes('HTTP/1.1 200 '));
    assert.match(await raw(gateway, small.replace('HTTP/1.1', 'HTTP/1.0') + HELLO), /^HTTP\/1\.1 201 /);
  });

  // The response had keep-alive, and two seconds later the connection was reset, with any request on it.
  test('a refusal without reading the rest of the body has Connection: close, and ends the connection', async (t) => {
    const config = { limits: { body: '100KiB' }, ...tokens({}, { rate: '1/1h' }) };
    const both = await startBoth(t, config, { stallTimeoutMs: 400 });
    await checkRows(both, [`bearer ${OTHER} → 200`]);
    const refusals = `wrong 401 65537; wrong 401 120000; wrong 401 2000000; wrong 401 200000 chunked
    ${OTHER} 429 70000; ${SECRET} 413 120000; ${SECRET} 413 2000000; ${SECRET} 400 200000 chunked`;
    for (const row of refusals.split(/\n *|; /)) {
      const [token = '', status, bytes, chunked] = row.split(' ');
      const body = '['.padEnd(Number(bytes));
      const request = chunked
        ? `${post(token, 'chunked')}${body.length.toString(16)}\r\n${body}\r\n0\r\n\r`
        : post(token, body.length) + body.slice(0, -1);
      const client = open(t, both.gateway, request);
      await until(() => client.text().endsWith('}\n'));
      // The valid send after it must not pass, because the response announced that the connection ends.
      client.socket.write(`${chunked ? '\n' : ' '}${SEND}`);
      await closed(client.socket);
      const text = client.text();
      assert.equal(String(statusOf(text)), status, `${row}: ${text}`);
      assert.match(text, /^connection: close\r$/im, row);
      assert.equal(text.split('HTTP/1.1 ').length, 2, `${row}: ${text}`);
    }
    assert.deepEqual(both.backend.sent, []);
  });

  test('attack: post many large bodies that cost much: a large one of another token does not wait for all of them', async (t) => {
    const own = { defaults: DEFAULTS };
    const { backend, gateway } = await startBoth(t, tokens(own, own));
    const keys = Array.from({ length: 3000 }, (_, i) => `"\\u00e9${i}":{"\\u00e9":1}`).join();
    const costly = `{"message":"costly",${keys}}`;
    const other = JSON.stringify({ message: 'of another', pad: 'x'.repeat(100_000) });
    const begin = (body: string, headers: { authorization: string }) => {
      const req = listened(beginSend(gateway, { ...headers, 'content-length': Buffer.byteLength(body) }));
      req.write(body.slice(0, -1));
      return req;
    };
    const all = [...Array.from({ length: 16 }, () => begin(costly, BEARER)), begin(other, AS_OTHER)];
    await until(() => all.every(({ socket }) => socket?.writableLength === 0 && !socket.connecting));
    for (let i = 0; i < 20; i++) await settled(gateway);
    for (const req of all) req.end('}'); // in one turn of the loop, so that the gateway finds them all
    for (const req of all) assert.equal(await statusFor(req), 201);
    const before = backend.sent.findIndex(({ message }) => message === 'of another');
    assert.ok(before < 14, `it was sent after ${before}`);
    assert.equal(backend.sent.length, 17, 'none is lost');
  });

  // A connection that is kept must not contain a body whose end the gateway waits for.
  test('a refusal keeps the connection if the body came with the headers; amid a body it has Connection: close, and nothing after it is acted on', async (t) => {
    const { backend, gateway } = await startBoth(t);
    for (const [begun, status] of [[post(OTHER, HELLO.length), 401], [post(SECRET, HELLO.length), 403]] as const) {
      gateway.reload(tokens({ recipients: [STRANGER] }));
      const { socket, text } = open(t, gateway, begun + HELLO);
      await until(() => text().endsWith('}\n'));
      assert.deepEqual([statusOf(text()), /^connection: keep-alive\r$/im.test(text())], [status, true], text());
      socket.write(ABOUT);
      await until(() => text().includes(' 200 OK'));
    }
    gateway.reload({});
    for (const request of [post(OTHER, HELLO.length), post(OTHER, 60_000), post(OTHER, 'chunked')]) {
      const { socket, text } = open(t, gateway, request);
      await until(() => text().endsWith('}\n'));
      assert.match(text(), /^HTTP\/1\.1 401 [^]*^connection: close\r$/im);
      socket.write(`${HELLO}${SEND}`);
      await closed(socket);
    }
    assert.deepEqual(backend.sent, []);
  });

  // Each byte extended the deadline of the rest, so one byte every 1.4 s held a connection for 25 hours.
  test('a client that stops or sends single bytes gets 408 at the deadline for its body; a refused one is disconnected by then', async (t) => {
    const headers = await startBoth(t, {}, { headersTimeoutMs: 500, lingerMs: 500 });
    const start = (): Promise<Both> => startBoth(t, tokens({}, { defaults: DEFAULTS }), { stallTimeoutMs: 2000 });
    const { backend, gateway } = await start();
    const { gateway: streaming } = await start();
    const [text, more] = ['{"message":"', 'x'.repeat(100_000)];
    const health = post('', 60_000).replace('POST /v2/send', 'GET /healthz');
    const unknown = post('', 60_000).replace(/Authorization.*\r\n/, '');
    const stops = async (to: Gateway, request: string): Promise<void> => {
      const response = await raw(to, request);
      assert.deepEqual([statusOf(response), codeOf(response)], [408, 'request_timeout'], `the response to ${request}`);
      assert.match(response, /^x-request-id: [\w-]{36}\r$/im);
    };
    const endIn = async (status: number, to: Gateway, ...requests: string[]): Promise<void> => {
      const responses = await Promise.all(requests.map((request) => trickle(t, to, request)));
      assert.deepEqual(responses.map(statusOf), requests.map(() => status), responses.join());
    };
    await Promise.all([
      stops(headers.gateway, 'GET /v1/about HTTP/1.1\r\nHost: x\r\n'),
      ...[post(SECRET, 100), unknown, post(OTHER, 100)].map((head) => stops(gateway, head + text)),
      endIn(401, gateway, post('wrong', 1_000_000), post('wrong', 60_000), `${post('wrong', 'chunked')}f4240\r\n`),
      endIn(413, gateway, post(SECRET, 1_000_000_000)),
      endIn(200, gateway, health, health.replace('60000', '1000000')),
      endIn(408, gateway, unknown + text, unknown.replace('60000', '1000000') + text, post(SECRET, 2_000_000) + text),
      endIn(408, gateway, post(OTHER, 1_000_000) + text, post(OTHER, 1_000_000) + text + more), // of a webhook
      // The head of these has arrived, and was relayed.
      endIn(
        408,
        streaming,
        post(SECRET, 2_000_000) + text + more,
        `${post(SECRET, 'chunked')}ffffff\r\n${text}${more}`,
      ),
    ]);
    assert.equal(backend.connections, 0, 'the connections that the backend saw');
  });

  test('a client without a token has one deadline for its whole body, at whatever pace it sends', async (t) => {
    const { gateway } = await startBoth(t, {}, { stallTimeoutMs: 3000 });
    const { socket, text } = open(t, gateway, post('', 60_000).replace(/Authorization.*\r\n/, '') + '{"message":"');
    await pass(2500);
    socket.write('x'.repeat(31 * 1024)); // with a token, these bytes restart the clock
    await closed(socket);
    assert.equal(outcomeOf(text()), '408 request_timeout');
    const { ms } = requests(gateway)[0];
    assert.ok(ms < 5000, `it was refused after ${ms} ms`);
  });

  test('the rest of the body of a refused client is read to its end, as long as the client keeps sending', async (t) => {
    const lingerMs = 1000;
    const [patient, silent] = await Promise.all(
      [{ lingerMs: 1e6 }, { lingerMs }].map((how) => startBoth(t, {}, how)),
    );
    // The refusal comes in the middle of the body, which the gateway has been waiting for.
    const waits = open(t, patient!.gateway, `${post(SECRET, 1_000_000)}{"message":"x"`);
    await settled(patient!.gateway);
    waits.socket.write('{'.repeat(1000));
    await until(() => waits.text().endsWith('}\n'));
    assert.equal(outcomeOf(waits.text()), '400 bad_json');
    waits.socket.write('x'.repeat(1_000_000 - 1014));
    await closed(waits.socket);
    // It sends for longer than it may pause.
    const steady = open(t, silent!.gateway, post(OTHER, 40));
    for (let sent = 0; sent < 40; sent++) {
      assert.ok(!steady.socket.destroyed, `it was closed behind ${sent} bytes`);
      steady.socket.write('x');
      await pass(lingerMs / 20);
    }
    await closed(steady.socket);
    assert.equal(outcomeOf(steady.text()), '401 unauthorized');
  });

  test('a body that arrives slowly but steadily may take longer in total, and so may one that the backend reads slowly', async (t) => {
    const [stallTimeoutMs, held] = [1000, [] as unknown[]];
    const backend = await startBackend(t, (req, res) => {
      req.on('error', () => {}).on('end', () => res.writeHead(201).end('[]'));
      const isSlow = req.url!.includes('slow');
      if (isSlow) held.push(req);
      setTimeout(() => req.resume(), isSlow ? 1.25 * stallTimeoutMs : 0);
    });
    const gateway = await startGateway(t, backend, {}, { stallTimeoutMs });
    const slow = ask(gateway, { path: '/v2/send?slow', body: sized(24 * MIB), headers: BEARER });
    const steady = beginSend(gateway, BEARER);
    const response = once(steady, 'response') as Promise<[http.IncomingMessage]>;
    steady.write(`${HELLO.slice(0, -1)},"more":"`);
    for (let i = 0; i < 12; i++) {
      steady.write('x'.repeat(31 * 1024));
      await new Promise((resolve) => setTimeout(resolve, stallTimeoutMs / 10));
    }
    steady.end('"}');
    assert.deepEqual([(await response)[0].statusCode, (await slow).status, held.length], [201, 201, 1]);
  });

  // Such a handler acts on its path alone, so the backend had acted before the gateway refused the rest of the body.
  test('a route that needs no body refuses one beyond 64 KiB before the backend sees any of it; a plugin and an unknown route take any', async (t) => {
    const group = `/v1/groups/${FROM}/${GROUP}`;
    const rows = `POST ${group}/quit ;; POST ${group}/join ;; POST ${group}/block ;; DELETE ${group}
    DELETE /v1/attachments/a ;; POST /v1/unregister/${FROM} ;; DELETE /v1/devices/${FROM}/local-data`;
    const both = await startBoth(t, { allow: ['messaging', 'setup', '* /api/*'] });
    const { backend, gateway } = both;
    const send = (target: string, body: string, isChunked: boolean): Promise<Answer> => {
      const [method = '', path = ''] = target.trim().split(' ');
      const headers = { ...BEARER, ...isChunked && { 'transfer-encoding': 'chunked' } };
      return ask(gateway, { method, path, body, headers });
    };
    for (const isChunked of [false, true]) {
      for (const row of rows.split(/;;|\n/)) {
        // one that is valid, and two that are refused at their end
        for (const late of ['', ',"recipients":["-x"]', ',"a":']) {
          const body = `{"x":"${'x'.repeat(100_000)}"${late}}`;
          assertDenied(await send(row, body, isChunked), 413, 'body_too_large', both);
        }
      }
    }
    await send(`POST ${group}/quit`, '{"x":1}', true); // a small one is checked whole first
    const big = `{"x":"${'x'.repeat(200_000)}"}`;
    for (const row of ['POST /v1/plugins/mine', 'DELETE /v1/plugins/mine', 'POST /api/v9/new']) {
      await send(row, big, false);
    }
    assert.deepEqual(backend.seen.map(({ body, complete }) => [body.length, complete]), [
      [7, true],
      ...Array(3).fill([big.length, true]),
    ]);
  });

  /** Starts this many sends, each without the last byte of its MiB; one of them finds no room. */
  async function holdAllBut(gateway: Gateway, count: number, fill: string, headers: http.OutgoingHttpHeaders) {
    const all = Array.from({ length: count }, () => beginSend(gateway, headers).on('error', () => {}));
    const answers = all.map((req) => once(req, 'response').then(([res]) => ({ req, res: res.resume() })));
    for (const req of all) req.write(fill.repeat(MIB - 1));
    const { req: refused, res } = await Promise.race(answers);
    assert.deepEqual([res.statusCode, res.headers['retry-after']], [503, '10']);
    assert.equal(requests(gateway).at(-1)!.code, 'busy');
    return { refused, held: all.filter((req) => req !== refused) };
  }

  test('at most 32 MiB of bodies are held for all connections together, and every path releases them', async (t) => {
    const { gateway } = await startBoth(t, hook());
    const countOf = (status: number): number => requests(gateway).filter((line) => line.status === status).length;
    for (
      const [fill, end, status] of [['x', 'x', 499], ['x', '\xff', 400], ['{', '{{', 413], ['x', 'x', 201]] as const
    ) {
      // The others have room as soon as the refused one has released its share.
      const headers = { ...BEARER, ...(status !== 413 && { 'content-length': MIB }) };
      const { refused, held } = await holdAllBut(gateway, 33, fill, headers);
      // A body that is not held whole is not affected.
      const json = await ask(gateway, {
        path: '/v1/send',
        body: { ...MESSAGE, base64_attachment: 'x'.repeat(MIB) },
        headers: BEARER,
      });
      assert.equal(json.status, 201);
      const before = countOf(status);
      for (const req of held) status === 499 ? req.destroy() : req.end(end, 'latin1');
      await until(() => countOf(status) === before + 32);
      refused.destroy();
    }
  });

  test('the body of a send in progress counts as held until its client disconnects, even if the send is shorter', async (t) => {
    const { backend, finish } = await startHolding(t);
    const gateway = await startGateway(t, backend, { ...hook(), backend: { url: backend.url, parallel: 64 } });
    const served: net.Socket[] = [];
    gateway.server.on('connection', (socket: net.Socket) => served.push(socket));
    const body = 'x'.repeat(MIB);
    const clients = Array.from({ length: 32 }, () => open(t, gateway, post(SECRET, MIB) + body));
    await until(() => backend.seen.length === 32);
    assert.equal(outcomeOf(await ask(gateway, { body, headers: BEARER })), '503 busy');
    for (const { socket } of clients) socket.destroy();
    for (const socket of served) await closed(socket);
    const answer = ask(gateway, { body, headers: BEARER });
    await until(() => backend.seen.length === 33 || requests(gateway).length > 1, 'the last send to reach the backend');
    finish();
    assert.equal(outcomeOf(await answer), '200');
  });

  // 1 MiB of JSON with such numbers is a send of 4.4 MiB. A form of control characters was one of 6 MiB.
  test('a waiting send counts with its own length, even if the body was shorter', async (t) => {
    const { backend, finish } = await startHolding(t);
    const config = {
      ...tokens({ defaults: DEFAULTS }, { defaults: DEFAULTS }),
      backend: { url: backend.url, parallel: 1 },
    };
    const gateway = await startGateway(t, backend, config);
    const body = `{"message":"x","mentions":[${'1e20,'.repeat(MIB / 5 - 8)}1]}`;
    const headers = BEARER;
    const answers = [1, 2, 3, 4].map(() => ask(gateway, { body, headers }));
    const first = await Promise.race(answers); // three of them wait or are in progress, with 4.4 MiB each
    assert.deepEqual([first.status, first.json.code], [503, 'busy']);
    const other = ask(gateway, { body, headers: { ...headers, authorization: `Bearer ${OTHER}` } });
    await until(() => backend.seen.length === 1);
    finish();
    await until(() => backend.seen.length === 2);
    finish();
    await until(() => backend.seen.length === 3);
    finish();
    await until(() => backend.seen.length === 4);
    finish();
    await Promise.all([...answers, other]);
    assert.ok(backend.seen.every((seen) => seen.body.length < 5 * MIB), 'each is less than a third of a share');
    assert.equal((await other).status, 200);
  });

  // A single webhook's token repeatedly filled all of it with bodies that did not end.
  test('with several tokens, one token gets at most half of the 32 MiB that are held', async (t) => {
    const { gateway } = await startBoth(t, tokens({ defaults: DEFAULTS }, { defaults: DEFAULTS }));
    const { held } = await holdAllBut(gateway, 17, 'x', { ...BEARER, 'content-length': MIB });
    assert.equal(requests(gateway).length, 1);
    const statusFor = async (headers: http.OutgoingHttpHeaders): Promise<number> =>
      (await ask(gateway, { body: 'x'.repeat(MIB), headers })).status;
    assert.equal(await statusFor({ authorization: `Bearer ${OTHER}` }), 201);
    for (const req of held) req.destroy();
    await until(() => requests(gateway).length === 18);
    assert.equal(await statusFor(BEARER), 201, 'it is released');
  });

  test('with three tokens, all of them together hold no more than 32 MiB', async (t) => {
    const settings = Object.entries(several('abc').tokens!).map((
      [name, token],
    ) => [name, { ...token, defaults: DEFAULTS }]);
    const { gateway } = await startBoth(t, { tokens: Object.fromEntries(settings) });
    for (const secret of [SECRET, OTHER, LAST]) {
      for (let i = 0; i < 11; i++) open(t, gateway, post(secret, MIB) + 'x'.repeat(MIB - 1));
    }
    await until(() => requests(gateway).length > 0, 'one of 33 bodies to be refused');
    assert.equal(outcomeOf(requests(gateway)[0]), '503 busy');
  });
});
