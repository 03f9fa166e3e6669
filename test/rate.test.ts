import { suite } from 'node:test';
import { assert, linesOf, requests, until } from './assertions.ts';
import { startBackend } from './backend.ts';
import { ask, open } from './client.ts';
import { tokens } from './configs.ts';
import { RateLimiter } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { listed, startClocked } from './rows.ts';
import { ABOUT, BEARER, OTHER, SECRET, SEND } from './samples.ts';
import { START_MS, startGateway, startHolding } from './start.ts';

suite('rate', SIDE_BY_SIDE, () => {
  test('rate: a token beyond its rate gets 429 with an accurate Retry-After, and other tokens are not affected', async (t) => {
    const { clock, asks } = await startClocked(t, { rate: '3/1m', ...tokens({}, {}) });
    await asks('bearer', '200', '200', '200');
    // Requests that are refused for another reason do not count, neither before nor after.
    await asks('bearer', 'GET /v1/accounts → 403 setup_blocked', '429 rate_limited | Retry-After: 20');
    await asks(`bearer ${OTHER}`, '200');
    clock.nowMs += 18_999;
    await asks('bearer', '429 rate_limited | Retry-After: 2'); // 1001 ms: after one second it would still be too early
    clock.nowMs += 1000;
    await asks('bearer', '429 rate_limited | Retry-After: 1');
    clock.nowMs += 1;
    await asks('bearer', '200', '429 rate_limited');
  });

  // 2718 lines a second: 64 GB a day.
  test('rate-limited requests are 30 log lines a minute for each token, and beyond that logged at debug level', async (t) => {
    const { both: { gateway }, clock, asks } = await startClocked(t, { rate: '1/1d', ...tokens({}, {}) });
    const levels = (token: string) =>
      requests(gateway).filter((line) => line.code === 'rate_limited' && line.token === token).map(({ level }) =>
        level
      );
    await asks('bearer', '200', ...Array(32).fill('429 rate_limited'));
    await asks(`bearer ${OTHER}`, '200', '429 rate_limited');
    assert.deepEqual(levels('test'), [...Array(30).fill('warn'), 'debug', 'debug']);
    assert.deepEqual(levels('other'), ['warn']);
    // Other refusals of the token do not count, and a minute later 30 more lines are allowed.
    await asks('bearer', 'GET /v1/accounts → 403 setup_blocked');
    assert.equal(requests(gateway).at(-1)!.level, 'warn');
    clock.nowMs += 60_000;
    await asks('bearer', '429 rate_limited');
    assert.deepEqual(levels('test').slice(30), ['debug', 'debug', 'warn']);
  });

  test('busy refusals are also 30 log lines a minute for each token; a token named like an address does not count as one', async (t) => {
    const config = {
      limits: { connections: 4 },
      tokens: { '127.0.0.1': { secret: SECRET }, 'other': { secret: OTHER } },
    };
    const { backend, gateway } = await startHolding(t, config, { now: () => START_MS });
    const levels = (code: string): unknown[] =>
      requests(gateway).filter((l) => l.code === code).map(({ level }) => level);
    for (let i = 0; i < 32; i++) await ask(gateway, {});
    assert.deepEqual(levels('unauthorized'), [...Array(30).fill('warn'), 'debug', 'debug']);
    for (let i = 0; i < 2; i++) open(t, gateway, SEND);
    await until(() => backend.seen.length === 2);
    for (let i = 0; i < 32; i++) await ask(gateway, { headers: BEARER });
    assert.deepEqual(levels('busy'), [...Array(30).fill('error'), 'debug', 'debug']);
  });

  test('wrong credentials beyond the budget are 429 with Retry-After; a valid one always works', async (t) => {
    const { clock, asks } = await startClocked(t, { trustedProxies: ['127.0.0.1'] });
    const from = (client: string, ...wanted: string[]): Promise<void> =>
      asks(`bearer ${OTHER} | X-Forwarded-For: ${client}`, ...wanted);
    // A flood must not fill the log of a small computer.
    for (let i = 0; i < 100; i++) {
      const wanted = i < 30 ? '401 unauthorized | level=warn' : '429 too_many_failures | level=debug | Retry-After: 2';
      await asks(`bearer guess-number-${i}-of-many | X-Forwarded-For: 203.0.113.7`, wanted);
    }
    await from('203.0.113.8', '401 unauthorized');
    // A missing credential is not a wrong one, and is challenged as before.
    await asks('X-Forwarded-For: 203.0.113.7', '401 unauthorized', 'bearer → 200');
    clock.nowMs += 2000;
    await from('203.0.113.7', '401 unauthorized', '429 too_many_failures');
    // One household is one IPv6 /64.
    const households = `2001:db8::# 2001:db8:0:0:ffff::1 2001:db8:0:1::1
    2001:db8::b:#:d:e:f 2001:db8:0:b:: 2001:db8:b::
    ::c:b:#:d:e:f 0:0:c:b:: c:b::`;
    for (const [members = '', last = '', other = ''] of households.split(/\n */).map((line) => line.split(' '))) {
      for (let i = 0; i < 30; i++) await from(members.replace('#', i.toString(16)), '401 unauthorized');
      await from(last, '429 too_many_failures');
      await from(other, '401 unauthorized');
    }
  });

  test('every refused credential counts as wrong: an expired token, a form that is not accepted, a wrong user or scheme', async (t) => {
    const config = { trustedProxies: ['127.0.0.1'], ...tokens({ methods: ['bearer'] }, { expires: '2020-01-01' }) };
    const { asks } = await startClocked(t, config);
    const ways = listed`
      bearer ${OTHER} | expired_token ;; basic | form_not_accepted ;; GET /@auth=${SECRET}/v1/about | form_not_accepted
      basic root:${SECRET} | wrong_user ;; Authorization: Digest x | unknown_scheme`;
    for (const [i, way] of ways.entries()) {
      const [request, reason] = way.split(' | ');
      const row = `${request} | X-Forwarded-For: 203.0.113.${i + 1}`;
      for (let count = 0; count < 30; count++) await asks(row, `→ 401 unauthorized | reason=${reason}`);
      await asks(row, `→ 429 too_many_failures | reason=${reason}`);
    }
  });

  // 500 requests without a credential were 500 log lines, on an SD card of a few gigabytes.
  test('a flood without a valid token is 30 log lines a minute for each address, whatever the refusal; the rest is at debug level', async (t) => {
    const clients = ['127.0.0.1', '203.0.113.0/24', '2001:db8::/32'];
    const config = { trustedProxies: ['127.0.0.1'], clients, cors: ['https://a.example'] };
    const { both, clock, asks } = await startClocked(t, config);
    const rows = listed`
      GET /v1/about → 401 ;; POST /v1/accounts | {} → 401 ;; GET /v1/about/%2e%2e → 400
      'x' | Content-Encoding: gzip → 415
      OPTIONS /v2/send | Access-Control-Request-Method: POST | Origin: https://b.example → 401`;
    const flood = async (client: string, ...some: string[]): Promise<void> => {
      for (let i = 0; i < 40; i++) {
        const row = `${some[i % some.length]} | level=${i < 30 ? 'warn' : 'debug'}`;
        await asks(`X-Forwarded-For: ${client.replace('#', i.toString(16))}`, row);
      }
    };
    await Promise.all([
      ...rows.map((row, i) => flood(`203.0.113.${i + 1}`, row)),
      flood('198.51.100.1', 'GET /v1/about → 403 client_not_allowed'),
      flood('203.0.113.99', ...rows, 'Authorization: Digest x → 401', `bearer ${OTHER} → 401`),
      flood('2001:db8::#', rows[0]!), // one household is one IPv6 /64
    ]);
    for (let i = 0; i < 40; i++) {
      await ask(both.gateway, { path: '/healthz', headers: { 'x-forwarded-for': '203.0.113.50' } });
    }
    await asks('X-Forwarded-For: 203.0.113.50', '401 | level=warn'); // health checks do not count
    const headers = { 'origin': 'https://a.example', 'access-control-request-method': 'POST' };
    assert.equal((await ask(both.gateway, { path: '/v2/send', method: 'OPTIONS', headers })).status, 204);
    assert.equal(requests(both.gateway).at(-1)!.level, 'debug', 'for an allowed preflight');
    // Wrong credentials are counted separately, and a valid token's lines are logged as before.
    const first = 'X-Forwarded-For: 203.0.113.1';
    await asks(`${first} | bearer ${OTHER}`, ...Array<string>(30).fill('401'), '429');
    for (let i = 0; i < 40; i++) {
      const level = i < 30 ? 'warn' : 'debug';
      await asks(first, 'bearer → 200 | level=info', `bearer | GET /v1/accounts → 403 setup_blocked | level=${level}`);
    }
    clock.nowMs += 2000;
    await asks(first, '401 | level=warn', '401 | level=debug');
  });

  // With one limiter for rates and wrong credentials, unauthenticated clients could reset the rate of a token with
  // 1/1h. With one for the lines of addresses and of internal errors, they could fill the log with the latter; with one
  // for the lines of addresses and of tokens, with what a stolen token is refused.
  test('10,100 addresses with wrong credentials reset neither the rate of a token, nor the limit on its log lines, nor that on internal errors', async (t) => {
    const { both: { gateway }, asks } = await startClocked(t, { trustedProxies: ['127.0.0.1'], rate: '1/1h' });
    await asks('bearer', '200', '429 rate_limited');
    const probe = (level: string): string => `GET /v1/accounts → 403 setup_blocked | level=${level}`;
    await asks('bearer', ...Array<string>(30).fill(probe('warn')), probe('debug'));
    const fail = (): boolean => gateway.server.emit('clientError'); // without its arguments
    for (let i = 0; i < 31; i++) fail();
    const lines = gateway.log.length;
    const clients = Array.from({ length: 20 }, () => open(t, gateway));
    for (let i = 0; i < 10_100; i += 100) {
      for (let j = i; j < i + 100; j++) {
        const from = `Host: x\r\nX-Forwarded-For: 2001:db8:${j.toString(16)}::1`;
        clients[j % 20]!.socket.write(ABOUT.replace(SECRET, 'wrong').replace('Host: x', from));
      }
      await until(() => gateway.log.length >= lines + i + 100);
    }
    await until(() => clients.every(({ text }) => text().split('HTTP/1.1 401 ').length === 1 + 10_100 / 20));
    assert.equal(new Set(requests(gateway).map(({ client }) => client)).size, 10_101);
    await asks('bearer', '429 rate_limited', probe('debug'));
    fail();
    assert.equal(linesOf(gateway, /^internal error$/).at(-1)!.level, 'debug');
  });

  // A token was locked out for as long as the clock had been set back.
  test('RateLimiter: a bucket refills evenly up to its size; setting the clock back locks no client out, however often it tries', () => {
    const limiter = new RateLimiter();
    const rate = { count: 7, perMs: 1000 };
    for (let i = 0; i < 7; i++) assert.equal(limiter.take('a', rate, 0), 0);
    assert.equal(Math.round(limiter.take('a', rate, 0) * 1000), Math.round(1_000_000 / 7));
    assert.equal(limiter.take('b', rate, 0), 0);
    assert.equal(limiter.take('a', rate, 143), 0);
    assert.notEqual(limiter.take('a', rate, 143), 0);
    for (let i = 0; i < 7; i++) assert.equal(limiter.take('a', rate, 10_000), 0);
    assert.notEqual(limiter.take('a', rate, 10_000), 0);
    assert.ok(limiter.take('a', rate, -1e12) <= 1000, 'a clock set back locks no client out for longer than a bucket');
    assert.equal(limiter.take('a', rate, 143 - 1e12), 0, 'and the bucket refills from then on');
    limiter.take('b', rate, 20_000);
    for (let i = 0; i < 100; i++) assert.notEqual(limiter.take('b', { ...rate, count: 1 }, 19_000 + i), 0);
    assert.equal(limiter.take('b', { ...rate, count: 1 }, 20_000), 0, 'however often it is checked meanwhile');
  });

  test("a token's refusals are 30 log lines a minute for each code, then at debug level, with one warning a minute about it", async (t) => {
    const { both: { gateway, backend }, clock, asks } = await startClocked(t, tokens({}, {}));
    const warned = () => linesOf(gateway, /^further refusals of a token are logged at debug level$/);
    const rows = ['GET /v1/accounts → 403 setup_blocked', 'GET /none → 404 unknown_endpoint', "'x=' → 400 bad_json"];
    for (const row of rows) {
      for (let i = 0; i < 33; i++) await asks(`bearer`, `${row} | level=${i < 30 ? 'warn' : 'debug'}`);
    }
    assert.deepEqual(warned().map(({ level, token, code }) => [level, token, code]), [[
      'warn',
      'test',
      'setup_blocked',
    ]]);
    // Neither another token's refusals nor the backend's responses.
    await asks(`bearer ${OTHER}`, `${rows[0]} | level=warn`, 'GET /v1/about → 200 | level=info');
    clock.nowMs += 60_000;
    for (let i = 0; i < 31; i++) await asks('bearer', `${rows[0]} | level=${i < 30 ? 'warn' : 'debug'}`);
    assert.equal(warned().length, 2);
    assert.ok(backend.seen.length === 1, 'the health check of the other token');
  });

  test("the backend's own 400 and 429 are logged at their usual level, however many there are", async (t) => {
    const backend = await startBackend(t, (req, res) => void req.resume().on('end', () => res.writeHead(429).end()));
    const gateway = await startGateway(t, backend);
    for (let i = 0; i < 35; i++) await ask(gateway, { headers: BEARER });
    assert.deepEqual(new Set(requests(gateway).map(({ level }) => level)), new Set(['warn']));
    assert.equal(requests(gateway).length, 35);
  });
});
