import strict from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { suite } from 'node:test';
import { statusOf } from './answers.ts';
import { assert, assertDenied, difference, logLines, requests } from './assertions.ts';
import { ask, open, rawRequest } from './client.ts';
import { ALL_METHODS, METHOD_NAMES, NO_TOKENS, tokens } from './configs.ts';
import { RateLimiter } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { checkRows, literal, rowWith, table } from './rows.ts';
import { AUTHED, FROM, HELLO, masked, OTHER, SECRET } from './samples.ts';
import { SPELLINGS } from './spellings.ts';
import { startBoth } from './start.ts';

/** A row with its credential twice: a header, or the piece of the target or of the body that holds the token. */
function withTwo(row: string): string {
  const fields = row.split(' | ').map((field) => {
    if (/^(?!content-type)[\w-]+: /.test(field)) return `${field} | ${field}`;
    if (field.startsWith('{')) return field.replace(new RegExp(`"[^"]*":"${SECRET}"`), '$&,$&');
    return field.replace(new RegExp(`[^/?&]*${SECRET}`), field.includes('?') ? '$&&$&' : '$&/$&');
  });
  return fields.join(' | ');
}

suite('credentials', SIDE_BY_SIDE, () => {
  for (const { name, method, ask: make } of SPELLINGS) {
    const [wrong, right] = [OTHER, SECRET].map((token) => rowWith({ body: HELLO, ...make(token) }));
    const others = METHOD_NAMES.filter((other) => other !== method);
    const reason = method === 'body' ? 'no_credential' : 'method_not_accepted';
    const query = name.startsWith('query as') ? '?x=1&y=2' : '';
    const two = withTwo(right!);
    strict.notEqual(two, right, `the method ${name} has no row with two credentials`);
    const { body } = { body: HELLO, ...make(SECRET) };
    const relayed = masked(typeof body === 'string' ? body : JSON.stringify(body));
    const ambiguous = method === 'body' ? 'bad_field' : 'bad_credential';
    table(
      `${name}: a valid token sends and is removed; a wrong one, or a method not accepted for it, is 401; two are 400`,
      {
        ...ALL_METHODS,
      },
    )`
      ${two} → 400 ${ambiguous}
      ${wrong} → 401 unauthorized | reason=unknown_token
      @ ${JSON.stringify({ methods: others })} | ${right} → 401 unauthorized | reason=${reason}
      ${right} → 201 | "[{"timestamp":"1700000000000"}]" | auth=${method} | token=test | POST /v2/send${query} | '${
      relayed.replaceAll('\\', '\\\\')
    }' | > Authorization: | > Content-Length: ${relayed.length}`;
  }

  test('each method is tested here', () => {
    assert.deepEqual(difference('METHOD_NAMES', METHOD_NAMES, 'SPELLINGS', SPELLINGS.map(({ method }) => method)), []);
  });

  table('query and path are off unless named; a token may name its own methods', tokens({}, { methods: ['path'] }))`
    * POST /v2/send | ${HELLO} → 401 unauthorized
    POST /v2/send?@auth=${SECRET} ;; POST /@auth=${SECRET}/v2/send ;; POST /@auth=${OTHER}/v2/send → 201
    bearer ${OTHER} ;; bearer → 201`;

  table('the first credential counts, in the order header, path, query, body: a wrong one is 401', ALL_METHODS)`
    * POST /v2/send → 401 unauthorized | ${HELLO}
    bearer ${OTHER} | POST /@auth=${SECRET}/v2/send | ${HELLO}
    bearer | POST /@auth=${OTHER}/v2/send?@auth=${OTHER} | ${AUTHED(OTHER)} → 201 | ${masked(AUTHED(OTHER), OTHER)}
    POST /@auth=${OTHER}/v2/send?@auth=${SECRET} | ${HELLO}
    POST /@auth=${SECRET}/v2/send?@auth=${OTHER} | ${HELLO} → 201 ;; POST /v2/send?@auth=${OTHER} | ${AUTHED(SECRET)}
    POST /v2/send?@auth=${SECRET} | ${AUTHED(OTHER)} → 201 | ${masked(AUTHED(OTHER), OTHER)}
    # An empty header counts as absent.
    Authorization: | ${AUTHED(SECRET)} → 201 | ${masked(AUTHED(SECRET))}
    # So does an empty user with an empty password, as wget2 sends it.
    basic : | ${AUTHED(SECRET)} → 201 | ${
    masked(AUTHED(SECRET))
  } ;; Authorization: bAsIc   Og | POST /@auth=${SECRET}/v2/send | ${HELLO} → 201
    basic : | POST /v2/send?@auth=${SECRET} | ${HELLO} → 201 | auth=query | > Authorization: ;; basic : | POST /@auth=${OTHER}/v2/send | ${
    AUTHED(SECRET)
  }
    basic x: | ${AUTHED(SECRET)} ;; basic :x | ${AUTHED(SECRET)} ;; basic api: | ${AUTHED(SECRET)} ;; basic :: | ${
    AUTHED(SECRET)
  } ;; Authorization: Basic | ${AUTHED(SECRET)}
    basic root:${SECRET} | ${AUTHED(SECRET)} ;; Authorization: Digest ${SECRET} | ${AUTHED(SECRET)}
    Authorization: Bearer | ${AUTHED(SECRET)} ;; Authorization: Basic !!! | ${AUTHED(SECRET)}
    POST /@auth=/v2/send | ${AUTHED(SECRET)}`;

  test('a secret may hold colons and UTF-8, and end in a byte that looks like a space, by every method', async (t) => {
    // The last byte of à and Р is A0, that of … A6, and that of Ѕ 85: a space or a line break in Latin-1.
    const secrets = 'pass:wörd:with:colons sésame-ouvre-toi-à пароль-для-всех-Р three-dots-and-more… ЅЅЅЅЅЅЅЅЅЅЅЅЅЅЅЅ';
    for (const secret of secrets.split(' ')) {
      const both = await startBoth(t, { ...ALL_METHODS, tokens: { test: { secret } } });
      const encoded = encodeURIComponent(secret);
      await checkRows(both, [
        `* ${HELLO} → 201`,
        `basic api:${secret} ;; bearer ${secret} ;; {"auth":"${secret}",${HELLO.slice(1)}`,
        `POST /v2/send?@auth=${encoded} ;; POST /@auth=${encoded}/v2/send`,
      ]);
      const bearer = Buffer.from(`Authorization: \t Bearer \t ${secret}\t `).toString('latin1');
      assert.equal(statusOf(await rawRequest(both.gateway, '/v1/about', { headers: [bearer] })), 200);
    }
  });

  table('two credentials in one place are 400, and an empty header is not a credential', ALL_METHODS)`
    * → 400 bad_credential
    GET /v1/about?@auth=${SECRET}&%40auth=${SECRET} ;; GET /@auth=${SECRET}/@auth=${SECRET}/v1/about
    basic : | bearer → 200 ;; bearer | basic : → 200 ;; basic : | bearer | bearer ;; GET /v1/@auth=${SECRET}/about → 400 bad_target ;; {"auth":"${SECRET}","auth":"${SECRET}"} → 400 bad_field
    bearer | bearer ;; Authorization: | bearer → 200`;

  const THE_401 =
    literal`→ 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer realm="signal" | "{"error":"A valid API token is required: \"Authorization: Bearer TOKEN\", or Basic with the user \"api\" and the token as the password. The gateway's log has the reason.","code":"unauthorized","requestId":"`;

  const DIGEST = createHash('sha256').update(SECRET).digest('hex');
  const DIGEST_OF_SECRET = `sha256:${DIGEST}`;

  const EXPIRED = tokens({ methods: ['bearer'] }, { methods: ['bearer'], expires: '2020-01-01' });

  table('every 401 is the same, whatever was wrong, and has both challenges', EXPIRED)`
    * ${THE_401}
    bearer wrong → reason=unknown_token | token=undefined ;; bearer ${OTHER} → reason=expired_token | token=other
    basic api:${OTHER} → reason=expired_token | token=other ;; basic → reason=method_not_accepted | token=test
    GET /@auth=${SECRET}/v1/about → reason=method_not_accepted | token=test
    basic root:${SECRET} → reason=wrong_user | token=test ;; basic root:wrong → reason=wrong_user | token=undefined
    basic ${SECRET} → reason=wrong_user ;; Authorization: ${SECRET} → reason=unknown_scheme
    basic API:${SECRET} → reason=wrong_user ;; basic Api:${SECRET} → reason=wrong_user
    Authorization: Token ${SECRET} → reason=unknown_scheme
    bearer ${DIGEST} → reason=digest ;; basic api:${DIGEST} → reason=digest ;; bearer ${DIGEST_OF_SECRET} → reason=digest
    bearer ${DIGEST_OF_SECRET.toUpperCase()} → reason=digest ;; basic root:${DIGEST} → reason=wrong_user
    bearer ${DIGEST.slice(1)} → reason=unknown_token ;; bearer ${DIGEST}x → reason=unknown_token
    * ${THE_401} | reason=no_credential
    basic : ;; Authorization: Basic Og== ;; GET /v1/about ;; GET /v1/accounts ;; GET /no/such/thing ;; PATCH /v1/about ;; OPTIONS /v1/about ;; ${HELLO}
    ${AUTHED(SECRET)}`;

  test('the digest of a token is no credential, by any method, whatever the form of the secret in the configuration; it is not logged', async (t) => {
    for (const secret of [SECRET, DIGEST_OF_SECRET]) {
      const both = await startBoth(t, { ...ALL_METHODS, tokens: { test: { secret } } });
      for (const { ask: make } of SPELLINGS) {
        for (const given of [DIGEST, DIGEST_OF_SECRET]) {
          assertDenied(
            await ask(both.gateway, { path: '/v2/send', body: HELLO, ...make(given) }),
            401,
            'unauthorized',
            both,
          );
          assert.equal(requests(both.gateway).at(-1)!.reason, 'digest');
        }
      }
      assert.ok(!both.gateway.log.join('\n').toLowerCase().includes(DIGEST.slice(0, 16)), 'the log has the digest');
    }
  });

  test('without tokens, requests need no credential, and every other rule still applies', async (t) => {
    const both = await startBoth(t, NO_TOKENS);
    const warning =
      'no tokens are configured: all requests are accepted without authentication; the command "add" makes one, and --config names the file';
    assert.equal(logLines(both.gateway.log)[0]!.warning, warning);
    await checkRows(
      both,
      `${AUTHED(SECRET)} → 201 | '${masked(AUTHED(SECRET))}' ;; bearer | POST /v1/register/${FROM} → 403 setup_blocked`,
    );
  });

  test('an unauthenticated client opens no connection to the backend, and only the head of its body is read', async (t) => {
    const both = await startBoth(t, {}, { stallTimeoutMs: 2000 });
    const head = `POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{"message":"`;
    const { socket, text } = open(t, both.gateway, head);
    const filler = Buffer.alloc(64 * 1024, 'x');
    while (!socket.destroyed) await new Promise((resolve) => socket.write(filler, resolve));
    assert.equal(statusOf(text()), 401, text());
    assert.equal(requests(both.gateway)[0].bytesIn, 64 * 1024, 'the bytes that were read');
    assert.ok(socket.bytesWritten < 20_000_000, `${socket.bytesWritten} bytes were taken`);
    assert.equal(both.backend.connections, 0, 'the backend saw a connection');
  });

  /** A send whose `auth` ends at this byte. */
  const lateAuth = (end: number, tail = `","auth":"${SECRET}"`): string =>
    `${`${HELLO.slice(0, -1)},"x":"`.padEnd(end - tail.length, 'x')}${tail}}`;

  table('auth is found within the first 64 KiB, but not one byte later', {}, { stallTimeoutMs: 2000 })`
    * → 201
    ${lateAuth(64 * 1024)} ;; ${lateAuth(64 * 1024 + 1)} → 401 unauthorized
    ${lateAuth(64 * 1024).slice(0, -1)},"base64_attachments":["${'A'.repeat(300_000)}"]}`;

  table("attack: use another token's method", tokens({ methods: ['body'] }, { methods: ['bearer', 'query'] }))`
    * ${HELLO} → 401 unauthorized
    bearer ;; basic ;; POST /v2/send?@auth=${SECRET} ;; ${AUTHED(OTHER)}`;

  table(
    "attack: use another client's token in the body next to one that may not send",
    tokens({ allow: ['info'] }, {}),
  )`
    * ${HELLO} | bearer → 403 endpoint_not_allowed
    ${AUTHED(OTHER)} ;; ${HELLO.slice(0, -1)},"auth":"${OTHER}"}
    POST /v2/send?@auth=${OTHER} ;; POST /@auth=${OTHER}/v2/send`;

  test('attack: wrong credentials from any number of addresses do not fill the memory; the limiter forgets the key used longest ago', () => {
    const limiter = new RateLimiter();
    const isKnown = (i: number): boolean => limiter.take(`address ${i}`, { count: 1, perMs: 60_000 }, 0) > 0;
    for (let i = 0; i < 50_000; i++) isKnown(i);
    for (let i = 40_000; i < 50_000; i++) assert.equal(isKnown(i), true, String(i));
    // The most recently used one stays.
    assert.deepEqual([40_000, 50_000, 40_000, 39_999, 0].map(isKnown), [true, false, true, false, false]);
  });

  table(
    'per token: rate, clients and allow replace the top-level ones entirely, whatever headers claim about the client',
    {
      ...{ rate: '1/1h', clients: ['192.0.2.1'], allow: ['info'] },
      ...tokens({ rate: '2/1h', clients: ['::ffff:127.0.0.1'], allow: ['send'] }, {}),
    },
  )`
    * POST /v2/send | ${HELLO} | bearer → 201
    bearer ;; GET /v1/about → 403 endpoint_not_allowed ;; bearer ;; bearer → 429 rate_limited
    * ${HELLO} | bearer ${OTHER} → 403 client_not_allowed
    POST /v2/send ;; X-Forwarded-For: 192.0.2.1 | X-Real-IP: 192.0.2.1 | Forwarded: for=192.0.2.1`;

  test('a token is valid through the day on which it expires, and not a moment longer', async (t) => {
    let nowMs = Date.parse('2027-06-30T23:59:59.998Z');
    const day = { secret: SECRET, expires: '2027-06-30' };
    const time = { secret: OTHER, expires: '2027-07-01T01:00:00+01:00' };
    const both = await startBoth(t, { tokens: { day, time } }, { now: () => nowMs });
    await checkRows(both, ['* → 200', ['bearer', `bearer ${OTHER}`]]);
    nowMs += 2;
    await checkRows(both, ['* → 401 unauthorized', ['bearer', `bearer ${OTHER}`]]);
  });

  // Node 20 obeyed header fields after the thousandth without showing them.
  table('a thousand header fields hide nothing from the gateway', {})`
    * → 431
    {} | ${'a: | '.repeat(1100)} Transfer-Encoding: chunked ;; bearer | ${'a: | '.repeat(1100)} bearer x`;

  // A regular expression took time quadratic in the white space of an Authorization header.
  table('a long Authorization header is parsed in one pass', {})(
    Array<string>(30).fill(`Authorization: Bearer a${' '.repeat(15_000)}a → 401 unauthorized`),
  );
});
