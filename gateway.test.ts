/**
 * What the gateway promises: a test for each point of "What is promised" in SECURITY.md, in that order, and then what
 * README.md promises. Everything else is tested in test/, a file for each topic.
 *
 *     node --import tsx --test gateway.test.ts        (Node 22.18 and newer need no --import tsx)
 *     deno test -A --no-check gateway.test.ts
 *
 * Each test starts the gateway as a process, before a stand-in backend that records every connection and request.
 * TEST_COMMAND names another delivery to test, such as the compiled file or an image: see test/process.ts.
 */

import { createHash } from 'node:crypto';
import { once } from 'node:events';
import { buffer as readBytes } from 'node:stream/consumers';
import { assert, closed, until } from './test/assertions.ts';
import type { Handler } from './test/backend.ts';
import { type Ask, ask, open, raw } from './test/client.ts';
import { test } from './test/guard.ts';
import { ACCOUNT, BROWSERS, FRIEND, HELLO, MESSAGE, PAGE, STRANGER } from './test/people.ts';
import { runUntilExit, type Settings, startBoth } from './test/process.ts';
import { ALL_PLACES, assertRefused, assertUntouched, CONFINED, MIB, TO_WEBSOCKET, tokens } from './test/promises.ts';
import { AS_FIRST, AS_SECOND, basic, bearer, GUESS, OTHER, SECRET, TRACES } from './test/secrets.ts';

// ── To the owner of the account, against anyone who can connect ──────────────────────────────────

test('without a valid token nothing reaches the backend: not a byte, not a connection', async (t) => {
  const both = await startBoth(t, tokens());
  const requests = [
    { body: MESSAGE },
    { body: MESSAGE, headers: bearer(GUESS) },
    { body: MESSAGE, headers: basic(`api:${GUESS}`) },
    { body: MESSAGE, headers: basic(`root:${SECRET}`) },
    { body: { auth: GUESS, ...MESSAGE } },
    { body: MESSAGE, path: `/@auth=${SECRET}/v2/send` }, // in the path, and in the query, only if they are turned on
    { body: MESSAGE, path: `/v2/send?@auth=${SECRET}` },
    { path: `/v1/receive/${ACCOUNT}`, headers: TO_WEBSOCKET },
    { method: 'OPTIONS', headers: { origin: 'https://evil.example', 'access-control-request-method': 'POST' } },
    ...['/v1/about', '/v1/qrcodelink?device_name=mine', '/metrics', '/no/such/path'],
  ];
  await assertRefused(both, /^401 unauthorized$/, requests, {});
  await assertUntouched(both);
});

test('every 401 is the same, whatever was wrong', async (t) => {
  const both = await startBoth(t, tokens({}, { expires: '2020-01-01' }));
  const digest = createHash('sha256').update(SECRET).digest('hex');
  const credentials = [`Bearer ${GUESS}`, `Bearer ${OTHER}`, `Bearer sha256:${digest}`, `Digest ${SECRET}`, SECRET, ''];
  const targets = ['/v2/send', '/v1/qrcodelink', '/no/such/path', `/v2/send?@auth=${SECRET}`];
  const requests = [...credentials.map((each) => ['/v2/send', each]), ...targets.map((each) => [each, ''])];
  const answers = await Promise.all(requests.map(async ([target, credential]) => {
    const lines = ['Host: x', 'Connection: close', 'Content-Length: 0', `Authorization: ${credential}`, '', ''];
    const answer = await raw(both.gateway, `POST ${target} HTTP/1.1\r\n${lines.join('\r\n')}`);
    return answer.replace(/^date: .*$/im, '').replace(/[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}/g, 'ID');
  }));
  assert.match(answers[0]!, /^HTTP\/1\.1 401 /);
  assert.deepEqual([...new Set(answers)], [answers[0]]);
  await assertUntouched(both);
});

test('one credential decides: two in one place are refused, and a wrong one is not made good by another', async (t) => {
  const both = await startBoth(t, { ...tokens(), ...ALL_PLACES });
  const twice: Ask[] = [
    { body: MESSAGE, path: `/@auth=${SECRET}/@auth=${SECRET}/v2/send` },
    { body: MESSAGE, path: `/v2/send?@auth=${SECRET}&@auth=${SECRET}` },
    { body: `{"auth":"${SECRET}","auth":"${SECRET}",${HELLO.slice(1)}`, headers: { authorization: '' } },
    { body: MESSAGE, headers: { Authorization: [`Bearer ${SECRET}`, `Bearer ${SECRET}`] } },
  ];
  await assertRefused(both, /^400 bad_/, twice, {});
  const mixed = [
    { body: MESSAGE, path: `/@auth=${SECRET}/v2/send` },
    { body: MESSAGE, path: `/v2/send?@auth=${SECRET}` },
    { body: { ...MESSAGE, auth: SECRET } },
  ];
  await assertRefused(both, /^401 unauthorized$/, mixed, bearer(GUESS));
  await assertUntouched(both);
});

test('account setup is off, and opened only by the word "setup", or by a pattern that spells it out', async (t) => {
  const wildcards = ['* /v1/*', 'GET /v1/*', 'POST /v1/*', '* /v1/:name', '* /v1/:name/:number'];
  const settings = tokens({ allow: ['messaging', 'info', ...wildcards] }, { allow: ['GET /v1/accounts'] });
  const both = await startBoth(t, settings);
  const paths = `/v1/qrcodelink /v1/devices/${ACCOUNT} /v1/identities/${ACCOUNT} /v1/configuration`;
  const posts = `/v1/register/${ACCOUNT} /v1/unregister/${ACCOUNT} /v1/devices/${ACCOUNT} /v1/plugins/any`.split(' ');
  const requests = [...paths.split(' '), ...posts.map((path) => ({ path, body: {} }))];
  await assertRefused(both, /^403 setup_blocked$/, [...requests, '/v1/accounts']);
  await assertRefused(both, /^403 setup_blocked$/, requests, AS_SECOND);
  await assertRefused(both, /^404 unknown_endpoint$/, ['/swagger/index.html'], AS_SECOND);
  await assertUntouched(both);
  await ask(both.gateway, { path: '/v1/accounts', headers: AS_SECOND });
  assert.equal(both.backend.seen.at(-1)!.url, '/v1/accounts');
});

test('the backend gets only the path that was checked: what could mean two paths is refused', async (t) => {
  const both = await startBoth(t, tokens({ allow: ['messaging', 'setup'] }));
  const targets = [
    ...['/v2/../v1/register/+15550100001', '/v2/%2e%2e/v1/register/+15550100001', '/v2/send/.', '/v2/send%00'],
    ...['/v1%2Fregister%2F+15550100001', '/v1%252Fregister', '/v1\\register\\+15550100001', '/v2/send%0d%0aX:%20y'],
    ...['http://x/v2/send', '/v2/send#x', '/v2/send%c0%af', '/v2/sen%', '/v1/groups/+15550100001/--config'],
    ...['/v1/register/15550100001', '/v1/register/+15550100001%20', '/v1/devices/me'],
  ];
  for (const target of targets) {
    const head = `POST ${target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer ${SECRET}\r\n`;
    const answer = await raw(both.gateway, `${head}Content-Length: ${HELLO.length}\r\n\r\n${HELLO}`);
    assert.match(answer, /^HTTP\/1\.1 400 [^]*"code":"bad_/, target);
  }
  await assertUntouched(both);
  await ask(both.gateway, { path: '/v2//%73end/', body: MESSAGE, headers: AS_FIRST });
  assert.equal(both.backend.seen.at(-1)!.url, '/v2/send');
});

test('a request cannot carry a second one past the check', async (t) => {
  const { backend, gateway } = await startBoth(t, tokens());
  const inner = `POST /v1/register/${ACCOUNT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n`;
  const firsts = [
    `Content-Length: ${HELLO.length}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n`,
    'Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n',
    `Content-Length: 0\r\nContent-Length: ${inner.length}\r\n\r\n`,
    'Content-Length: +5\r\n\r\n12345',
    'Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n',
    'Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n',
    'Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n',
    'X: a\nContent-Length: 0\r\n\r\n',
    `Content-Length: ${HELLO.length}\r\n\r\n${HELLO}`,
  ];
  await Promise.all(firsts.map(async (first) => {
    const head = `POST /v2/send HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n`;
    // At most the first of the two is accepted: the second has no token.
    assert.doesNotMatch(await raw(gateway, head + first + inner), / 20\d [^]* 20\d /, first);
  }));
  assert.deepEqual(backend.seen.filter(({ url }) => url !== '/v2/send'), []);
});

test('a stranger costs 64 KiB of a body, and locks nobody out by guessing, by connections or by the log', async (t) => {
  const both = await startBoth(t, { ...tokens(), limits: { connections: 20 }, log: { format: 'json', level: 'info' } });
  const sinceMs = Date.now();
  const head = 'POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n{"x":"';
  const { socket, text } = open(t, both.gateway, head);
  const end = closed(socket);
  const piece = Buffer.alloc(64 * 1024, 'x');
  for (let sent = 0; sent < 100 * MIB && !socket.destroyed; sent += piece.length) {
    if (!socket.write(piece)) await Promise.race([new Promise((resolve) => socket.once('drain', resolve)), end]);
  }
  await end;
  assert.match(text(), /^HTTP\/1\.1 401 /);
  await until(() => both.gateway.requests().length > 0, 'the line of the stranger');
  assert.ok(Number(both.gateway.requests()[0]!.bytesIn) <= 64 * 1024, both.gateway.output());

  for (let i = 0; i < 40; i++) open(t, both.gateway, head);
  const guesses = Array.from({ length: 200 }, (_, i) => ({ body: MESSAGE, headers: bearer(`${GUESS}-${i}`) }));
  await assertRefused(both, /^401 unauthorized$/, guesses.slice(0, 20));
  const rest = await assertRefused(both, /^(401 unauthorized|429 too_many_failures)$/, guesses.slice(20));
  // However slow the machine is: 30 at once, and 30 in each minute.
  const granted = () => 31 + (Date.now() - sinceMs) / 2000;
  const tried = 20 + rest.filter((outcome) => outcome === '401 unauthorized').length;
  assert.ok(tried <= granted(), `${tried} of ${guesses.length} guesses got 401`);
  await assertUntouched(both);
  await until(() => both.gateway.requests().some(({ status }) => status === 201), 'the line of the send');
  const lines = both.gateway.requests().length;
  assert.ok(lines <= 2 + granted(), `${lines} lines in the log`);
});

test('a wrong configuration opens nothing: all mistakes are told at once, and no secret', async (t) => {
  const mistakes = { listne: ':1', rate: 'often', ...tokens({ alow: ['send'], recipients: '' }, { expires: 'soon' }) };
  const whole = JSON.stringify(CONFINED);
  const repeated = whole.replace('"allow"', '"recipients":["*"],"allow"');
  const wrong = [mistakes, whole.slice(0, -9), '', repeated];
  const ends = await Promise.all(wrong.map((settings) => runUntilExit(t, settings)));
  for (const { code, output } of ends) {
    assert.equal(code, 2, output);
    assert.doesNotMatch(output, new RegExp(`${SECRET}|${OTHER}`));
  }
  for (const each of ['listne', 'rate', 'alow', 'recipients', 'expires']) {
    assert.match(ends[0]!.output, new RegExp(each));
  }
});

test('a reload with a mistake changes nothing, and one without takes effect', async (t) => {
  const { backend, gateway } = await startBoth(t, tokens());
  const statuses = async () => {
    const answers = [{ headers: AS_FIRST }, { headers: AS_SECOND }, {}].map((request) => ask(gateway, request));
    return (await Promise.all(answers)).map(({ status }) => status);
  };
  const next = { backend: { url: backend.url }, tokens: { second: { secret: OTHER } } };
  for (const [i, wrong] of ['', '{"tokens":{', { ...next, rate: 'often' }].entries()) {
    gateway.reload(wrong);
    await until(() => gateway.linesOf('reload failed').length > i, 'the reload to fail');
    assert.deepEqual(await statuses(), [200, 401, 401]);
  }
  gateway.reload(next);
  await until(() => gateway.linesOf('reloaded').length > 0, 'the reload');
  assert.deepEqual(await statuses(), [401, 200, 401]);
});

// ── To the same owner, against the holder of a confined token ────────────────────────────────────

test('a token uses no endpoint that is not on its list', async (t) => {
  const both = await startBoth(t, tokens({ allow: ['send'] }, { allow: ['GET /v1/groups/:number'] }));
  const paths = `/v1/about /v1/receive/${ACCOUNT} /v1/groups/${ACCOUNT} /metrics /v2/send /V1/about`.split(' ');
  const others = [{ path: `/v1/receive/${ACCOUNT}`, headers: TO_WEBSOCKET }, { path: '/v3/send', body: MESSAGE }];
  await assertRefused(both, /^40[345] /, [...paths, ...others]);
  const below = { path: `/v1/groups/${ACCOUNT}`, body: {} };
  await assertRefused(both, /^403 endpoint_not_allowed$/, [{ body: MESSAGE }, below], AS_SECOND);
  await assertUntouched(both);
});

test('a token uses no account that is not on its list: not in the body, not in the path', async (t) => {
  const both = await startBoth(t, CONFINED);
  const numbers = [STRANGER, STRANGER.slice(1), undefined, null, [ACCOUNT], ` ${ACCOUNT}`];
  const paths = [`/v1/receive/${STRANGER}`, `/v1/receive/%2B15559999999`, `/v1/groups/${STRANGER}`];
  const ofAll = ['/v1/attachments', '/v1/attachments/any', '/v1/search?query=hello'];
  await assertRefused(both, /^40[03] /, [
    ...numbers.map((number) => ({ body: { ...MESSAGE, number } })),
    { body: { ...MESSAGE, number: undefined, Number: ACCOUNT } },
    { body: `{"number":"${STRANGER}",${HELLO.slice(1)}` },
    { path: `/v1/typing-indicator/${STRANGER}`, method: 'PUT', body: { recipient: FRIEND } },
    ...paths,
    ...ofAll,
  ]);
  await assertUntouched(both);
});

test('a token sends to no one who is not on its list, however the body is written', async (t) => {
  const both = await startBoth(t, CONFINED);
  const rest = `"message":"hello","number":"${ACCOUNT}"`;
  const [good, bad] = [`["${FRIEND}"]`, `["${STRANGER}"]`];
  const group = Buffer.from(Buffer.from('a group has an id of 32 bytes...').toString('base64')).toString('base64');
  const bodies = [
    `{${rest},"recipients":${bad}}`,
    `{${rest},"recipients":["${FRIEND}","${STRANGER}"]}`,
    `{${rest},"recipients":["\\u002b15559999999"]}`,
    `{${rest},"recipients":["group.${group}"]}`,
    `{${rest},"recipients":["somebody.01"]}`,
    `{${rest},"recipients":"${STRANGER}"}`,
    `{${rest},"recipients":[${good},${bad}]}`,
    `{${rest},"recipients":${good},"recipient":"${STRANGER}"}`, // not documented, but the backend reads it
    `{${rest},"recipients":${good},"recipients":${bad}}`, // the backend takes the last
    `{${rest},"recipients":${bad},"recipients":${good}}`,
    `{${rest},"recipients":${good},"Recipients":${bad}}`, // and ignores the case
    `{${rest},"recipients":${good},"RECIPIENTS":${bad}}`,
    `{${rest},"recipients":${good},"recipient\\u0073":${bad}}`,
    `{${rest},"recipients":${good},"\\u0052ecipients":${bad}}`,
    `{${rest},"recipients":${good},"recipient\u017f":${bad}}`, // with a long s, which counts as an s
    `{${rest},"recipients":${good},"groupId":"${group}"}`, // another backend reads it
    `{${rest},"x":{"recipients":${good}},"recipients":${bad}}`,
    `{${rest},"recipients":${good}}{${rest},"recipients":${bad}}`,
    `[{${rest},"recipients":${bad}}]`,
    `\ufeff{${rest},"recipients":${bad}}`,
    Buffer.from(`{${rest},"recipients":${bad}}`, 'utf16le'),
  ];
  await assertRefused(both, /^40[03] (recipient_not_allowed|endpoint_not_allowed|bad_field|bad_json)$/, [
    ...bodies.map((body) => ({ body })),
    { path: `/v1/groups/${ACCOUNT}`, body: { name: 'new', members: [STRANGER] } },
    { path: `/v1/typing-indicator/${ACCOUNT}`, method: 'PUT', body: { recipient: STRANGER } },
  ]);
  await assertUntouched(both);
});

test('a token smuggles no option to signal-cli, and no file name to the backend', async (t) => {
  const both = await startBoth(t, tokens({ allow: ['messaging'] }));
  const recipients = ['--message-from-stdin', '-g', '', 'a\u0000b'].map((each) => ({ ...MESSAGE, recipients: [each] }));
  const files = ['../../x', '/etc/x', '..', 'a\\x'].map((name) => `data:image/png;filename=${name};base64,QUJD`);
  await assertRefused(both, /^400 bad_(field|target)$/, [
    ...[...recipients, { ...MESSAGE, number: '--config=/tmp' }].map((body) => ({ body })),
    ...files.map((file) => ({ body: { ...MESSAGE, base64_attachments: [file] } })),
    { body: { ...MESSAGE, 'base64_attachment\u017f': [files[0]] } },
    { body: { ...MESSAGE, 'lin\u212a_preview': { base64_thumbnail: files[0] } } }, // a Kelvin sign counts as a k
    { path: `/v1/search/${ACCOUNT}?numbers=--help` },
    { path: `/v1/groups/${ACCOUNT}/--help`, method: 'DELETE' },
  ]);
  await assertUntouched(both);
});

test('a token sends no faster than its rate, from no other address, and not after its date', async (t) => {
  const [elsewhere, expired] = ['a-secret-for-another-place', 'a-secret-of-another-time'];
  const settings = tokens({ rate: '1/1h' }, {});
  settings.tokens.elsewhere = { secret: elsewhere, clients: ['192.168.0.0/16'] };
  settings.tokens.expired = { secret: expired, expires: '2020-01-01' };
  const both = await startBoth(t, settings);
  const forged = { 'x-forwarded-for': '192.168.0.1', 'x-real-ip': '192.168.0.1', forwarded: 'for=192.168.0.1' };
  const away = { body: MESSAGE, headers: forged };
  await assertRefused(both, /^403 client_not_allowed$/, [away], bearer(elsewhere));
  await assertRefused(both, /^401 unauthorized$/, [{ body: MESSAGE }], bearer(expired));
  await assertUntouched(both);
  await assertRefused(both, /^429 rate_limited$/, [{ body: MESSAGE }, {}, { body: MESSAGE }]);
  const { 'retry-after': seconds } = (await ask(both.gateway, { headers: AS_FIRST })).headers;
  assert.ok(Number(seconds) > 0 && Number(seconds) <= 3600, `Retry-After: ${seconds}`);
  assert.equal(both.backend.seen.length, 1);
  assert.equal((await ask(both.gateway, { body: MESSAGE, headers: AS_SECOND })).status, 201);
});

test('a token cannot starve another one: not of connections, and not at a backend that hangs', async (t) => {
  const settings = { ...tokens({}, { allow: ['send', 'metrics'] }), limits: { connections: 20 } };
  const { backend, gateway } = await startBoth(t, { ...settings, backend: { parallel: 4 } }, async (req, res) => {
    if (!String(await readBytes(req)).includes('hang')) res.writeHead(201).end('{}');
  });
  const body = JSON.stringify({ ...MESSAGE, message: 'hang' });
  const head = `POST /v2/send HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\nContent-Length: ${body.length}`;
  const greedy = Array.from({ length: 20 }, () => open(t, gateway, `${head}\r\n\r\n${body}`));
  // Until all of its requests have come: they wait at the backend, or for a slot, or were refused.
  for (let arrived = 0; arrived < greedy.length;) {
    const metrics = await ask(gateway, { path: '/metrics', headers: AS_SECOND });
    const waiting = Number(/waiting\{for="slot"\} (\d+)/.exec(metrics.text)?.[1]);
    arrived = backend.seen.length + waiting +
      greedy.filter(({ socket, text }) => socket.destroyed || text() !== '').length;
  }
  assert.equal(backend.seen.length, 3, 'of four slots, one is left');
  assert.ok(greedy.some(({ text }) => text().includes('"code":"busy"')), 'of the connections, half are left');
  assert.equal((await ask(gateway, { body: MESSAGE, headers: AS_SECOND })).status, 201);
});

// ── To the same owner, against pages in a browser ────────────────────────────────────────────────

test('a browser with a stored password, or at a gateway without tokens, is refused unless its page is listed', async (t) => {
  const path = `/v1/receive/${ACCOUNT}`;
  const ways: [Settings, headers: object][] = [
    [tokens({ allow: ['send', 'receive'] }), basic(`api:${SECRET}`)],
    [{ allow: ['send', 'receive'] }, {}],
  ];
  for (const [settings, added] of ways) {
    const both = await startBoth(t, { ...settings, cors: [PAGE] });
    const gets = BROWSERS.map((headers) => ({ path, headers }));
    const handshakes = BROWSERS.map((headers) => ({ path, headers: { ...headers, ...TO_WEBSOCKET } }));
    const sends = BROWSERS.slice(1).map((headers) => ({ body: MESSAGE, headers }));
    await assertRefused(both, /^403 cross_site$/, [...gets, ...handshakes, ...sends], added);
    await assertUntouched(both, { ...added, origin: PAGE });
  }
});

test('without tokens, the gateway answers to no public name, and listens to no other machine', async (t) => {
  const both = await startBoth(t, {});
  await assertRefused(both, /^403 cross_site$/, [{ body: MESSAGE, headers: { host: 'rebound.example' } }], {});
  await assertUntouched(both, {});
  assert.equal((await runUntilExit(t, {}, '0.0.0.0:0')).code, 2);
});

test('what the backend serves cannot run anything in a browser', async (t) => {
  const { gateway } = await startBoth(t, tokens({ allow: ['messaging'] }), (req, res) => {
    const type = decodeURIComponent(req.url!.split('=')[1]!);
    res.writeHead(200, { 'content-type': type, 'content-security-policy': 'default-src *' }).end('<script>x</script>');
  });
  for (const type of ['text/html', 'image/svg+xml', 'application/pdf', '', 'image/png', 'application/x-mpegurl']) {
    const path = `/v1/attachments/any?type=${encodeURIComponent(type)}`;
    const { headers } = await ask(gateway, { path, headers: AS_FIRST });
    assert.equal(headers['x-content-type-options'], 'nosniff', type);
    assert.match(String(headers['content-security-policy']), /default-src 'none';.* sandbox/, type);
    assert.equal(headers['content-disposition'], type === 'image/png' ? undefined : 'attachment', type);
    assert.doesNotMatch(String(headers['content-type']), /mpegurl/); // it would be played, and fetch what it names
  }
});

// ── To the clients ───────────────────────────────────────────────────────────────────────────────

test('a token is accepted in five places, and reaches from none of them the backend, the log or the metrics', async (t) => {
  const { backend, gateway } = await startBoth(t, { ...tokens({ allow: ['send', 'metrics'] }), ...ALL_PLACES });
  const path = `/@auth=${SECRET}/v2/send`;
  const places: Record<string, Ask> = {
    bearer: { body: MESSAGE, headers: AS_FIRST },
    basic: { body: MESSAGE, headers: basic(`api:${SECRET}`) },
    body: { body: { auth: SECRET, ...MESSAGE } },
    path: { body: MESSAGE, path },
    query: { body: MESSAGE, path: `/v2/send?@auth=${SECRET}` },
    'all at once': { body: { ...MESSAGE, auth: SECRET }, path: `${path}?@auth=${SECRET}`, headers: AS_FIRST },
    'copies of the URL': { body: MESSAGE, path, headers: { referer: path, 'x-original-url': path, cookie: path } },
  };
  for (const [place, request] of Object.entries(places)) {
    assert.equal((await ask(gateway, request)).status, 201, place);
    const { url, rawHeaders, body } = backend.seen.at(-1)!;
    assert.doesNotMatch(`${url} ${rawHeaders.join(' ')} ${body}`, TRACES, place);
  }
  assert.deepEqual(backend.sent, Object.keys(places).map(() => MESSAGE));
  const metrics = await ask(gateway, { path: '/metrics', headers: AS_FIRST });
  assert.match(metrics.text, /status="201"/);
  await until(() => gateway.requests().length > backend.sent.length, 'all lines of the log');
  assert.doesNotMatch(metrics.text + gateway.output(), TRACES);
});

test('the log has no phone number, no message and no secret', async (t) => {
  const { gateway } = await startBoth(t, { ...CONFINED, ...ALL_PLACES });
  const strange = [{ ...MESSAGE, recipients: [STRANGER] }, { ...MESSAGE, [STRANGER]: STRANGER }, `hello ${STRANGER}`];
  const paths = [`/v1/receive/${ACCOUNT}`, `/v1/receive/${STRANGER}`, `/no/${STRANGER}/hello?x=hello`, '/../hello'];
  const requests: Ask[] = [
    ...[...[MESSAGE, ...strange].map((body) => ({ body })), ...paths.map((path) => ({ path }))],
    ...[{ headers: AS_SECOND }, { headers: basic(`${OTHER}:hello`) }, { path: `/@auth=${OTHER}/v1/about` }],
  ];
  for (const request of requests) {
    await ask(gateway, { ...request, headers: { ...AS_FIRST, ...request.headers } });
  }
  await until(() => gateway.requests().length === requests.length, 'all lines of the log');
  assert.doesNotMatch(gateway.output(), new RegExp(`5550100|5559999|hello|${OTHER}|${TRACES.source}`));
});

test('nothing is sent twice, wherever the backend breaks off', async (t) => {
  let act: Handler = () => {};
  const { backend, gateway } = await startBoth(t, tokens(), (...all) => act(...all));
  const ways: Record<string, Handler> = {
    'before the response → 502': (req) => void req.socket.destroy(),
    'in the response → cut off': (req, res) => void res.writeHead(201).write('half', () => req.socket.destroy()),
    'by a redirect → 502': (_, res) => void res.writeHead(307, { location: '/v2/send' }).end(),
    'with an error → 500': (_, res) => void res.writeHead(500).end('{}'),
    'with a limit of its own → 429': (_, res) => void res.writeHead(429).end('{}'),
    'not → 201': (_, res) => void res.writeHead(201).end('{}'),
  };
  for (const [way, handler] of Object.entries(ways)) {
    const before = backend.seen.length;
    act = (req, res, seen) => void readBytes(req).then(() => handler(req, res, seen));
    const answer = ask(gateway, { body: MESSAGE, headers: AS_FIRST });
    assert.equal(await answer.then(({ status }) => String(status), () => 'cut off'), way.split(' → ')[1], way);
    assert.equal(backend.seen.length, before + 1, way);
  }
});

test('what the gateway refuses with a 4xx was not sent, even if the mistake is at the end of a large body', async (t) => {
  const both = await startBoth(t, CONFINED);
  const large = `${HELLO.slice(0, -1)},"quote_message":"${'x'.repeat(MIB)}"`;
  const ends = [`,"recipient":"${STRANGER}"}`, ',"recipients":[]}', `,"Number":"${ACCOUNT}"}`, ',"y":}', '}{}', ''];
  await assertRefused(both, /^40[03] /, ends.map((end) => ({ body: large + end })));
  assert.deepEqual([both.backend.seen.filter(({ complete }) => complete), both.backend.sent], [[], []]);
  assert.equal((await ask(both.gateway, { body: `${large}}`, headers: AS_FIRST })).status, 201);
  assert.equal(both.backend.sent.length, 1);
});

test('a send waits for a backend that restarts, and is sent once', async (t) => {
  const { backend, gateway } = await startBoth(t, tokens());
  const stopped = once(backend.server, 'close');
  backend.server.close().closeAllConnections();
  await stopped;
  const answer = ask(gateway, { body: MESSAGE, headers: AS_FIRST });
  await until(() => gateway.linesOf('the backend is unreachable: sends are waiting').length > 0, 'the send to wait');
  backend.server.listen(backend.port, backend.host);
  assert.equal((await answer).status, 201);
  assert.equal(backend.sent.length, 1);
});

// ── What README.md promises besides ──────────────────────────────────────────────────────────────

test('the JSON of another program becomes a message by a template, and a line of text is enough', async (t) => {
  const defaults = { number: ACCOUNT, recipients: [FRIEND] };
  const message = ['{{title}}', '{{#alerts}}', '{{status}}: {{labels.name}}', '{{/alerts}}'];
  const { backend, gateway } = await startBoth(t, tokens({ defaults, message }, { defaults }));
  const alerts = [{ status: 'firing', labels: { name: 'Disk' } }, { status: 'resolved', labels: { name: 'Fan' } }];
  const webhook = { title: 'Two alerts', alerts, recipients: [STRANGER] };
  assert.equal((await ask(gateway, { body: webhook, headers: AS_FIRST })).status, 201);
  assert.equal((await ask(gateway, { body: 'Backup done: 100 %', headers: AS_SECOND })).status, 201);
  const messages = ['Two alerts\nfiring: Disk\nresolved: Fan', 'Backup done: 100 %'];
  assert.deepEqual(backend.sent, messages.map((message) => ({ ...defaults, message })));
});

test('an attachment of 100 MiB arrives byte for byte', async (t) => {
  const arrived = createHash('sha256');
  const { gateway } = await startBoth(t, CONFINED, async (req, res) => {
    for await (const chunk of req) arrived.update(chunk);
    res.writeHead(201).end('{}');
  });
  const body = `${HELLO.slice(0, -1)},"base64_attachments":["${'0123456789/+ABCD'.repeat(100 * MIB / 16)}"]}`;
  assert.equal((await ask(gateway, { body, headers: AS_FIRST })).status, 201);
  assert.equal(arrived.digest('hex'), createHash('sha256').update(body).digest('hex'));
});
