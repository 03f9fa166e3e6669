import { once } from 'node:events';
import { suite } from 'node:test';
import { outcomeOf, statusOf } from './answers.ts';
import { assert, assertDenied, closed, logLines, requests, until } from './assertions.ts';
import { type Handler, startBackend } from './backend.ts';
import { ask, open, raw, statusesOf } from './client.ts';
import { tokens } from './configs.ts';
import { type Change, fixture, importChanged } from './files.ts';
import { parseTarget } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { LARGE } from './held.ts';
import { hook, MADE, MEANT, TO_ALL } from './hooks.ts';
import { parseRow, rowWith, sendRow, table } from './rows.ts';
import {
  ABOUT,
  ASKED,
  BEARER,
  DASHBOARD,
  DEFAULTS,
  FROM,
  GROUP,
  HELLO,
  MESSAGE,
  MIB,
  OTHER,
  post,
  SECRET,
  THIRD,
  TO,
} from './samples.ts';
import { SPELLINGS } from './spellings.ts';
import { startBoth, startGateway } from './start.ts';

suite('requests', SIDE_BY_SIDE, () => {
  test('an internal error is a 500 without details, and its stack is logged', async (t) => {
    const broken: Change = [
      'function identify({ core, rules, credential, client }: Exchange) {\n',
      (text) => `${text}  if (credential) throw new RangeError('planted in identify');\n`,
    ];
    const { createGateway } = await importChanged(t, broken);
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
    // Uptime Kuma can add a parameter that no cache has seen.
    const [busted, empty] = [`${path}?uptime_kuma_cachebuster=0.5`, `${path}?`];
    const asked = [{ path: busted }, { path: busted, method: 'HEAD' }, { path: empty }, { path: busted, body: '{}' }];
    assert.deepEqual(await statusesOf(gateway, ...asked, { path: `${path}x?` }), [200, 200, 200, 403, 403]);
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

  test('attack: fill the memory with targets; only the path of a route without parameters is kept', async (t) => {
    const changed = await importChanged(t, ['const PLAIN_TARGETS', (text) => `export ${text}`]);
    const { createGateway, PLAIN_TARGETS } = changed as typeof changed & { PLAIN_TARGETS: Map<string, unknown> };
    const gateway = await startGateway(t, await startBackend(t), {}, {}, createGateway);
    const targets = ['', '?a=1', '?', '/'].map((end) => `/v1/about${end}`);
    for (const path of [...targets, `/v1/receive/${FROM}`, '/none', '//v1/about', `/@auth=${SECRET}/v1/about`]) {
      await ask(gateway, { path, headers: BEARER });
    }
    assert.deepEqual([...PLAIN_TARGETS.keys()], ['GET /v1/about']);
  });

  table('the name of a header as the value of another is no header', { allow: ['info'] })`
    * bearer | GET /v1/about → 200
    X-Note: host ;; X-Note: authorization ;; X-Note: cookie`;

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
