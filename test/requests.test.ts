import { once } from 'node:events';
import { suite } from 'node:test';
import { outcomeOf, statusOf } from './answers.ts';
import { assert, assertDenied, closed, logLines, requests, until } from './assertions.ts';
import { startBackend } from './backend.ts';
import { ask, open, statusesOf } from './client.ts';
import { tokens } from './configs.ts';
import { fixture } from './files.ts';
import { parseTarget } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { LARGE } from './held.ts';
import { parseRow, sendRow, table } from './rows.ts';
import { ASKED, BEARER, DASHBOARD, HELLO, MESSAGE, MIB, post, SECRET } from './samples.ts';
import { startBoth, startGateway } from './start.ts';

suite('requests', SIDE_BY_SIDE, () => {
  test('an internal error is a 500 without details, and its stack is logged', async (t) => {
    let calls = -1000; // of the clock; a request calls it the first time while its token is checked
    const now = (): number => {
      if (++calls === 1) throw new RangeError('the clock is broken');
      return Date.now();
    };
    const both = await startBoth(t, {}, { now });
    // Refusals capture no stack. The stacks of later errors must not be affected.
    assert.equal(outcomeOf(await ask(both.gateway, {})), '401 unauthorized');
    calls = 0;
    const answer = await ask(both.gateway, { body: MESSAGE, headers: BEARER });
    assertDenied(answer, 500, 'internal_error', both);
    assert.doesNotMatch(answer.text, /clock/);
    const line = logLines(both.gateway.log).find(({ message }) => message === 'internal error');
    assert.match(String(line?.stack), /RangeError: the clock is broken\n +at /);
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
