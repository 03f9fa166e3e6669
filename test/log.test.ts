import { createHash } from 'node:crypto';
import { once } from 'node:events';
import http from 'node:http';
import { suite } from 'node:test';
import { fileURLToPath } from 'node:url';
import { statusOf } from './answers.ts';
import { assert, difference, groupsOf, linesOf, logLines, requests, until } from './assertions.ts';
import { barred, sparePort, startBackend } from './backend.ts';
import { type Ask, ask, open, raw, rawRequest, scrape, untilAnswering } from './client.ts';
import { ALL_METHODS, AT_INFO, NO_TOKENS, tokens } from './configs.ts';
import { MANUAL, SOURCE } from './files.ts';
import { FILE } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { bytesOf, table } from './rows.ts';
import { isDeno, LOADER } from './runtime.ts';
import { BEARER, DASHBOARD, DEFAULTS, FROM, LAST, MESSAGE, OTHER, RECEIVE, SECRET, STRANGER, TO } from './samples.ts';
import { copiesOf, HEADER_NAMES, SPELLINGS } from './spellings.ts';
import { program, start, startBoth, startGateway, startProcess } from './start.ts';

suite('log', SIDE_BY_SIDE, () => {
  test('canary: a secret, by any method, valid or not, accepted or refused, appears in nothing that is emitted', async (t) => {
    const canary = 'CANARY0secret0that0must0not0show';
    const own = { ...ALL_METHODS, tokens: { test: { secret: canary } } };
    const { backend, gateway } = await startBoth(t, own);
    const other = { other: { secret: OTHER, recipients: [STRANGER] } };
    const strict = await startGateway(t, backend, { auth: { methods: ['bearer'] }, tokens: other });
    const dead = await startGateway(t, { url: 'http://127.0.0.1:9' }, own);
    const agent = new http.Agent({ keepAlive: true });
    t.after(() => agent.destroy());
    const emitted: string[] = [];
    for (const to of [gateway, strict, dead]) {
      const ends = to === gateway ? ['', 'x', '/../x', '%zz', '"', '\\'] : ['']; // read alike by all three
      for (const { ask: make } of SPELLINGS) {
        for (const token of ends.map((end) => canary + end)) {
          const request = { body: MESSAGE as object | string, path: '/v2/send', headers: {}, ...make(token) };
          const { body, path, headers } = request;
          const json = typeof body === 'string' ? body : JSON.stringify(body);
          const echoed = ['x-forwarded-for', 'x-request-id', 'proxy-authorization', 'forwarded'];
          const copies = [Object.fromEntries(echoed.map((name) => [name, token])), ...copiesOf(token)];
          const variants = [
            request,
            { ...request, method: 'PUT' },
            { ...request, method: 'POST', path: path.replace('/v2/send', `/v1/register/${FROM}`) },
            { ...request, path: path.replace('/v2/send', `/v2/send/@auth=${token}`) },
            { ...request, body: json.slice(0, -1) },
            ...copies.map((copy) => ({ ...request, headers: { ...copy, ...headers } })),
            { ...request, headers: { authorization: `Bearer ${OTHER}` } },
          ];
          // node's client refuses to send the others; raw requests follow
          const sent = variants.filter((variant) => !/["\\]/.test(variant.path)).map((variant) =>
            ask(to, { ...variant, agent })
          );
          for (const { text, rawHeaders } of await Promise.all(sent)) emitted.push(text, rawHeaders.join('\n'));
        }
      }
      const targets = `/@auth=${canary}"/v2/send /@auth=${canary}\\/v2/send http://x/@auth=${canary}/v1/about
      /v1/about?@auth=${canary}" /v1/about#@auth=${canary}`.split(/\s+/);
      const heads = targets.map((target) => `GET ${target} HTTP/1.1 | Host: gateway | Connection: close`);
      heads.push(`${canary} rubbish`, `GET /@auth=${canary}/ HTTP/1.1 | ${canary}`);
      for (const head of heads) emitted.push(await raw(to, `${barred(head).join('\r\n')}\r\n\r\n`));
      emitted.push(...to.log);
    }
    for (const seen of backend.seen) emitted.push(JSON.stringify([seen.url, seen.rawHeaders]), seen.body.toString());
    assert.ok(backend.seen.length > 20, 'some of them must have been accepted');
    // A header into which only a mistake puts a token, as in `curl -A TOKEN`, is relayed, but nothing else has it.
    for (const to of [gateway, strict, dead]) {
      const logged = to.log.length;
      const sent = HEADER_NAMES.flatMap((name) =>
        [{}, { authorization: `Bearer ${canary}` }].map((own) =>
          ask(to, { body: MESSAGE, headers: { [name]: canary, ...own }, agent })
        )
      );
      for (const { text, rawHeaders } of await Promise.all(sent)) emitted.push(text, rawHeaders.join('\n'));
      emitted.push(...to.log.slice(logged));
    }
    const digest = createHash('sha256').update(canary).digest('hex');
    // The part of its base64 that is the same after any number of bytes: without the characters that neighbouring bytes
    // affect.
    const base64 = ['', ' ', '  '].map((before) =>
      Buffer.from(before + canary).toString('base64').slice(before ? 4 : 0, -4)
    );
    const encoded = Array.from(Buffer.from(canary), (byte) => `%${byte.toString(16)}`).join('');
    for (const text of emitted) {
      const found = [canary, digest, encoded, ...base64].filter((form) => text.includes(form));
      assert.deepEqual(found, [], `found in: ${text.slice(0, 500)}`);
    }
  });

  test("one log line per request, with the route's template and without numbers, tokens or forged lines", async (t) => {
    let nowMs = Date.now(); // `ms` was negative if the clock was set back during a request
    const { gateway } = await startBoth(t, { ...AT_INFO, allow: ['receive', 'send'] }, { now: () => nowMs -= 1000 });
    await ask(gateway, { path: `${RECEIVE}?timeout=1`, headers: BEARER });
    await ask(gateway, { path: `/v1/devices/${FROM}/%22%20status=200%20x`, headers: BEARER });
    const forged = { ...BEARER, 'x-forwarded-for': '1.2.3.4\u2028' };
    await ask(gateway, { body: MESSAGE, headers: forged }).catch(() => {});
    const [{ time, requestId, ms, bytesOut, ...first }, second] = requests(gateway);
    assert.match(time, /^\d{4}-\d\d-\d\dT/);
    assert.match(requestId, /^[0-9a-f-]{36}$/);
    assert.ok(ms >= 0 && bytesOut > 0, `${ms} ms, ${bytesOut} bytes`);
    const common = {
      message: 'request',
      client: '127.0.0.1',
      method: 'GET',
      token: 'test',
      auth: 'bearer',
      bytesIn: 0,
    };
    assert.deepEqual(first, { ...common, level: 'info', route: '/v1/receive/:number', status: 200 });
    const { level, status, code, route } = second!;
    assert.deepEqual([level, status, code, route], ['warn', 403, 'setup_blocked', '/v1/devices/*/*']);
    assert.doesNotMatch(gateway.log.join(''), /15550100/); // no shorter: a port was 41555
  });

  test('a log line in text form is one line, whatever it contains; the first one lists what the tokens may do', async (t) => {
    const config = tokens({ allow: ['info', 'receive'] }, { allow: ['setup', 'receive', 'send'] });
    config.tokens!.old = { secret: `${SECRET}2`, allow: ['info'], expires: '2020-01-01' };
    const { backend, gateway } = await startBoth(t, { log: { format: 'text' }, allow: ['messaging'], ...config });
    await ask(gateway, { headers: BEARER });
    await ask(gateway, { body: '{"a":', headers: { authorization: `Bearer ${OTHER}` } });
    const lines = [
      /^\S+Z warn {2}listening listen=http:\/\/127\.0\.0\.1:\d+ backend=http:\/\/127\.[\d.]+:\d+ tokens=3 names=test,other,old allow=info,receive,setup,send warning="the token \\"old\\" has expired"$/,
      /^\S+Z info {2}status=200 method=GET route=\/v1\/about token=test client=127\.0\.0\.1 auth=bearer ms=\d+ bytesOut=\d+ requestId=[\w-]{36}$/,
      /^\S+Z warn {2}status=400 code=bad_json method=POST route=\/v2\/send token=other client=127\.0\.0\.1 auth=bearer detail="The body is not a JSON object: it ends before the object is complete, at byte 5\." ms=\d+ bytesIn=5 bytesOut=\d+ requestId=[\w-]{36}$/,
    ];
    for (const [i, line] of lines.entries()) assert.match(gateway.log[i]!, line);
    await ask(gateway, { path: '/v1/about', method: 'HEAD', headers: BEARER });
    assert.match(gateway.log[3]!, / method=HEAD .* ms=\d+ requestId=/);
    const { log } = await startGateway(t, backend, { ...NO_TOKENS, log: { format: 'text' } });
    assert.match(
      log[0]!,
      / warning="no tokens are configured: all requests are accepted without authentication; the command \\"add\\" makes one, and --config names the file"$/,
    );
  });

  test('the log is text unless JSON is asked for, and without a terminal too', async (t) => {
    const child = start([], { GATEWAY_TOKENS: SECRET, GATEWAY_LISTEN: '127.0.0.1:0' }, program());
    t.after(() => child.kill('SIGKILL'));
    await until(() => child.output().includes('\n') || child.exitCode !== null, 'the first line');
    assert.match(child.output(), /^\S+Z \w+ +listening listen=http/);
  });

  const DIGEST = createHash('sha256').update(SECRET).digest('hex');
  const HOOK = { defaults: DEFAULTS, message: '{{text}}' };
  const NO_LIST = 'The body is a list; a webhook must be one JSON object, because a template cannot read a list.';
  const MAIN = tokens({ recipients: [TO], senders: [FROM], allow: ['send'] }, HOOK);
  const NO_TOKEN =
    'The request has no token where one is looked for: in the header Authorization, or, if "methods" has body, path or query, in the field "auth" of a JSON body, or as /@auth=TOKEN/ or ?@auth=TOKEN in the URL. A program that drops "api:TOKEN@" from its URL needs one of these.';

  table(
    'the sentence of a refusal is in the log as detail, unless it says no more than the code',
    { ...AT_INFO, tokens: { ...MAIN.tokens, old: { secret: LAST, expires: '2020-01-01' } } },
  )`
    * bearer
    {"number":"${FROM}","recipients":["${STRANGER}"],"message":"x"} → 403 recipient_not_allowed | detail=This token may not send to one of these recipients: a phone number that is not on its list ("recipients", or else those in "defaults").
    {"number":"${STRANGER}","recipients":["${TO}"],"message":"x"} → 403 sender_not_allowed | detail=This token may use only the accounts on its list ("senders", or else the number in "defaults").
    {"recipients":["${TO}"],"message":"x"} → 400 bad_field | detail=The field "number" must name the sending account, because this token may not use all of them.
    GET /v1/receive/${FROM} → 403 endpoint_not_allowed | detail=This token may not use this endpoint; the word "receive" in its "allow" opens it.
    GET /v2/send/x?a=%0a → 400 bad_target | detail=The URL is not accepted: it contains an encoded control character.
    POST /v2/send/v2/send | {} → 404 unknown_endpoint | detail=The address has /v2/send twice; remove one of them.
    GET /v2/send/v1/about → 404 unknown_endpoint | detail=This client appends the path itself: give it the address without /v2/send.
    POST / | {} → 404 unknown_endpoint | detail=The address has no path; to send a message, POST to /v2/send.
    POST /signal/v2/send | {} → 404 unknown_endpoint | detail=The address has a path before /v2/send; remove it.
    POST /none | {} → 404 unknown_endpoint | detail=undefined
    ${
    ['receive', 'groups', 'contacts', 'identities'].map((name) =>
      `GET /v1/${name} | @ {"allow":["setup"]} → 404 unknown_endpoint | detail=The account follows, as in /v1/receive/NUMBER.`
    )
  }
    GET /x/v1/receive → 404 unknown_endpoint | detail=undefined ;; GET /v1/receives → 404 unknown_endpoint | detail=undefined
    # To the client, what a setup route is called is not told.
    POST /v1/register/${FROM} → 403 setup_blocked | "do it directly on the backend."," | detail=Account setup is blocked here; do it directly on the backend, or name it in "allow": "POST /v1/register/:number".
    POST /v1/register/${FROM}/new → 403 setup_blocked | detail=undefined
    GET /v1/attachments | @ {"allow":["messaging"]} → 403 endpoint_not_allowed | reason=route_without_account | detail=This endpoint shows the data of all accounts, and this token may not use all of them: only "GET /v1/attachments" in its "allow" opens it.
    POST /v1/groups/${FROM} | {} | @ {"allow":["messaging"]} → 403 endpoint_not_allowed | reason=group_change_not_named | detail=This endpoint can let others into a group, and this token may not send to everyone: only "POST /v1/groups/:number" in its "allow" opens it.
    GET /v1/new | @ {"allow":["GET /v1/*"]} → 403 endpoint_not_allowed | reason=unknown_route_for_confined_token | detail=The gateway does not know this endpoint, so only a token without "senders", "recipients" and "defaults" may use it.
    {} | @ {"rate":"1/1h"} → 400 bad_field
    {} | @ {"rate":"1/1h"} → 429 rate_limited | detail=The rate 1/1h is used up; again in 3600 s.
    {} | @ {"clients":["192.0.2.1"]} → 403 client_not_allowed | detail=The address that "client" says is not in the "clients" of this token. If it is a proxy's, set "trustedProxies".
    {} | Content-Encoding: gzip → 415 unsupported_encoding | detail=Compressed request bodies are not accepted; send the body uncompressed.
    {"number":"${FROM}","recipients":["Family"],"message":"x"} → 403 recipient_not_allowed | detail=This token may not send to one of these recipients: one of no known kind (phone number, user name such as name.01, UUID, group) that is not on its list ("recipients", or else those in "defaults"). A group is written as its id, "group.…", not as its name.
    bearer wrong → 401 unauthorized | reason=unknown_token | detail=No token has this secret. Often it is empty, or something was copied with it: a quote, a space, "api:", "NAME=", or, after ?@auth=, a path.
    basic home:${SECRET} → 401 unauthorized | reason=wrong_user | detail=With Basic, the user is always "api", whatever the token is called; the token is the password. Or a proxy passes its own login on.
    Authorization: ${SECRET} → 401 unauthorized | detail=Write "Bearer" and a space before the token.
    Authorization: Bearer ${DIGEST} → 401 unauthorized | reason=digest | detail=This is the digest of a token, which is for the gateway; give the client the secret.
    none | GET /v1/about?@auth=${SECRET} → 401 unauthorized | reason=method_not_accepted | token=test | detail=The token accepts bearer, basic, body; the client used query: add that to "methods", or put the token elsewhere.
    bearer ${LAST} → 401 unauthorized | reason=expired_token | token=old | detail=The token expired on 2020-01-01: give it a later date in "expires", or make a new one.
    # Where other gateways take a token, this one has none to look up. The client gets what every 401 has.
${
    [
      ...['X-API-Key', 'X-Auth-Token'].map((name) => `GET /v1/about | ${name}: ${SECRET}`),
      `{"token":"${SECRET}","message":"x"}`,
    ].map((request) => `    none | ${request} → 401 unauthorized | reason=no_credential | detail=${NO_TOKEN}`)
  }
    none | GET /v1/about?auth1=${SECRET} → 401 unauthorized | detail=${NO_TOKEN}
    none | Origin: https://x.example → 401 unauthorized | reason=origin_not_listed | detail=A page of this origin may use the gateway once "cors" has the origin.
    * bearer ${OTHER}
    '\x27{message:x}\x27' → 400 bad_json | detail=The body is JSON within a quote or a bracket: leave that out (in cmd.exe, write "{\"message\": …}"). With "Content-Type: text/plain" it is sent unchanged.
    {"private":"x"} → 400 bad_field | "top-level keys are \"private\"" | detail=The token's template finds nothing in this body; correct its names. The response lists the body's top-level keys.
    [{"text":"x"}] | Content-Type: application/json → 400 bad_json | detail=${NO_LIST}
    [{"text":"x"}] → 400 bad_json | detail=${NO_LIST}
    {"text":"x","Recipients ":"x"} → 400 bad_field | "The field \"Recipients \" must be spelled \"recipients\"." | detail=The field "recipients" must be spelled "recipients".
    {"text":"x","recipient":"${TO}"} → 400 bad_field | detail=The field "recipient" is not a field of a send; a send has "number", "recipients" and "base64_attachments".`;

  test("the backend's own refusals and failures have a sentence in the log, at once under a flood, without its words", async (t) => {
    const answers: [status: number, text: string][] = [];
    const backend = await startBackend(t, (req, res) => {
      req.resume().on('end', () => {
        const [status, text] = answers.shift()!;
        res.writeHead(status).end(text);
      });
    });
    const own = { allow: ['messaging', 'info', 'GET /v2/send'], message: '{{message}}' };
    const gateway = await startGateway(t, backend, { ...AT_INFO, ...tokens(own) });
    const [refused, failed] = ['refused this', 'failed'].map((verb) => `The backend ${verb}, not the gateway`);
    const trial = '"test test" shows whether account and network are well.';
    const send = { body: MESSAGE, headers: BEARER };
    const byGet = { path: `/v2/send?message=x&number=${FROM}&recipients=${TO}`, headers: BEARER };
    const words = JSON.stringify({ error: `User ${FROM} is not registered.` });
    const challenge = JSON.stringify({ error: 'x', challenge_tokens: ['y'] });
    const cases: [request: Ask, status: number, text: string, detail: string | undefined][] = [
      [send, 400, words, `${refused}: the response has its words; ${trial}`],
      [send, 429, challenge, `${refused}: the response has its words; ${trial}`],
      [send, 500, '', `${failed}: its own log says why; ${trial}`],
      [send, 404, '', `${refused}: it has no such endpoint; signal-cli's daemon takes calls at /api/v1/rpc.`],
      [byGet, 400, words, `${refused}: the response has its words; ${trial}`],
      [{ ...send, path: '/v1/send' }, 400, words, `${refused}: the response has its words.`],
      [{ path: `/v1/groups/${FROM}`, headers: BEARER }, 400, words, `${refused}: the response has its words.`],
      [{ headers: BEARER }, 404, '', `${refused}: its own log says why.`],
      [{ headers: BEARER }, 503, 'x', `${failed}: the response has its words.`],
      [send, 201, '{}', undefined],
      [{ headers: BEARER }, 200, words, undefined],
    ];
    for (let i = 0; i < 40; i++) await ask(gateway, { path: '/v1/accounts', headers: BEARER });
    for (const [request, status, text, detail] of cases) {
      answers.push([status, text]);
      assert.equal((await ask(gateway, request)).status, status);
      const line = requests(gateway).at(-1)!;
      assert.deepEqual([line.status, line.code, line.detail], [status, undefined, detail]);
    }
    assert.doesNotMatch(gateway.log.join(''), /15550100|challenge/);
    // Without tokens there is none that "test" could name.
    const open = await startGateway(t, backend, NO_TOKENS);
    answers.push([400, words]);
    await ask(open, { body: MESSAGE, headers: { host: '127.0.0.1' } });
    assert.equal(requests(open)[0].detail, `${refused}: the response has its words.`);
  });

  test('a log line names twenty tokens, and has the number of the others', async (t) => {
    for (const [count, end] of [[20, ''], [21, ',and 1 more']] as const) {
      const names = Array.from({ length: count }, (_, i) => `t${i}`);
      const all = Object.fromEntries(names.map((name) => [name, { secret: `the-secret-of-${name}` }]));
      const gateway = await startGateway(t, { url: 'http://127.0.0.1:1' }, { tokens: all });
      assert.equal(logLines(gateway.log)[0]!.names, `${names.slice(0, 20)}${end}`);
    }
  });

  /** The fields of a request's log line: those that the gateway makes, and those whose text a client has written. */
  const LINE_FIELDS = {
    own: 'requestId client method route call token auth status code reason detail bytesIn bytesOut ms'.split(' '),
    written: ['origin'],
  };

  // With the User-Agent as a field, added without a limit, one address could write 15 KiB a line, and every test
  // passed.
  test("the fields of a request's log line are a known list; whatever a refused client sends, its lines are at most 1 KiB", async (t) => {
    const { own, written } = LINE_FIELDS;
    const fields = groupsOf(/'request', \{([^]*?)\n {2}\}\);/.exec(SOURCE)![1]!, /^ {4}(\w+)[:,]/gm);
    const hint = 'see "A field of the log" in CONTRIBUTING.md';
    assert.deepEqual(difference('logExchange', fields, 'LINE_FIELDS', [...own, ...written]), [], hint);
    const [manual] = MANUAL.split('\n## The log\n')[1]!.split('\n\nWith `log.format`');
    const listed = groupsOf(manual!, /^\| `(\w+)` \|/gm);
    assert.deepEqual(difference('logExchange', fields, '"The log" of docs/reference.md', listed), []);
    const [, last] = /^const LAST_FIELDS = '([^']*)'/m.exec(SOURCE)!;
    assert.deepEqual(last!.split(' ').slice(-written.length), written, 'a text from a client is the last field');

    const log = { level: 'debug', format: 'json' } as const;
    const { gateway } = await startBoth(t, { log, cors: [DASHBOARD], trustedProxies: ['127.0.0.1'] });
    const long = 'x'.repeat(15 * 1024);
    const values = [long, `https://${long}`];
    const bearer = `Authorization: Bearer ${SECRET}`;
    const answers: string[] = [];
    for (const name of HEADER_NAMES) {
      const both = values.map((value) => `${name}: ${value}`).flatMap((header) => [
        rawRequest(gateway, '/v1/about', { headers: [header] }),
        rawRequest(gateway, '/v1/accounts', { headers: [bearer, header] }),
      ]);
      answers.push(...await Promise.all(both));
    }
    const path = '/rate-limit-challenge'.repeat(700);
    for (const target of [`/${long}`, path, `/v1/about?${long}`, `/@auth=${long}/v1/about`]) {
      answers.push(await rawRequest(gateway, target));
      answers.push(await rawRequest(gateway, target, { headers: [bearer], method: 'DELETE' }));
    }
    answers.push(await rawRequest(gateway, '/v2/send', { body: `{"${long}":"${long}"}`, method: 'POST' }));
    answers.push(await raw(gateway, `${long} / HTTP/1.1\r\n\r\n`));
    const refused = answers.filter((text) => statusOf(text) >= 400).length;
    assert.ok(refused > 100, `${refused} of ${answers.length} requests were refused`);
    const tooLong = gateway.log.filter((line) => Buffer.byteLength(line) > 1024);
    const lengthOf = (field: unknown): number => JSON.stringify(field).length;
    const culprits = logLines(tooLong).flatMap((line) =>
      Object.keys(line).filter((name) => lengthOf(line[name]) > 500)
    );
    assert.deepEqual([...new Set(culprits)], [], 'the fields that a client can make long');
    assert.deepEqual(tooLong, []);
  });

  test('a field of a log line has text from a client only if LINE_FIELDS lists it as written, and then stands last', async (t) => {
    const log = { level: 'debug', format: 'text' } as const;
    const { gateway } = await startBoth(t, { log, cors: [DASHBOARD], trustedProxies: ['127.0.0.1'] });
    const path = '/v1/about?written=written';
    const asked = HEADER_NAMES.flatMap((name) =>
      ['written.example', 'https://written.example'].flatMap((value) =>
        [{}, BEARER].map((own) => ask(gateway, { path, headers: { [name]: value, ...own } }))
      )
    );
    const statuses = new Set((await Promise.all(asked)).map(({ status }) => status));
    assert.ok(statuses.has(200) && statuses.has(401), `answered with ${[...statuses]}`);
    const found = new Set<string>();
    for (const line of gateway.log) {
      const fields = groupsOf(line, / (\w+=(?:"(?:[^"\\]|\\.)*"|\S+))/g);
      const written = fields.filter((field) => field.includes('written'));
      assert.deepEqual(fields.slice(fields.length - written.length), written, 'the last fields of a line');
      for (const field of written) found.add(field.split('=')[0]!);
    }
    assert.deepEqual(difference('a log line', [...found], 'LINE_FIELDS.written', LINE_FIELDS.written), []);
  });

  test('attack: write a field of a log line in an origin, which is the last field, and in quotes', async (t) => {
    const { gateway } = await startBoth(t, { log: { format: 'text' } });
    await rawRequest(gateway, '/v1/about', { headers: ['Origin: http://x=client=192.0.2.1'] });
    assert.match(gateway.log.at(-1)!, / client=127\.0\.0\.1 .* origin="http:\/\/x=client=192\.0\.2\.1"$/);
  });

  test('log.level is the least severe level that is logged', async (t) => {
    const { gateway } = await startBoth(t, { log: { format: 'json', level: 'warn' } });
    await ask(gateway, { headers: BEARER });
    await ask(gateway, {});
    assert.deepEqual(requests(gateway).map((line) => line.status), [401]);
  });

  test('a gateway whose standard output is closed continues, and exits with 0', async (t) => {
    const gateway = await startProcess(t, { backend: await startBackend(t) });
    gateway.child.stdout!.destroy();
    for (let i = 1; i <= 20; i++) assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
    await gateway.close();
    assert.doesNotMatch(gateway.output(), /EPIPE/);
  });

  // An unread pipe may neither fill the memory, nor keep SIGTERM from stopping the process, nor hang it (Deno).
  test('an unread log is discarded beyond 1 MiB and counted, and blocks neither the gateway nor its shutdown', async (t) => {
    const env = { GATEWAY_LOG_LEVEL: 'debug', GATEWAY_ALLOW: 'metrics' };
    const gateway = await startProcess(t, { backend: await startBackend(t), env });
    gateway.child.stdout!.pause();
    const total = 2500;
    // As long as a log line can have them.
    const refused = bytesOf(
      `GET ${'/rate-limit-challenge'.repeat(8)} HTTP/1.1 | Host: x | Origin: https://${'x'.repeat(92)}`,
    );
    const clients = Array.from({ length: 5 }, () => open(t, gateway));
    let asked = 0;
    const askMany = async (count: number) => {
      for (const last = asked + count; asked < last;) {
        for (const { socket } of clients) socket.write(Buffer.concat(Array(5).fill(refused)));
        asked += 25;
        await until(() => clients.every(({ text }) => text().split('HTTP/1.1 401 ').length > asked / 5));
      }
    };
    await askMany(total);
    gateway.child.stdout!.resume();
    await until(() => /log lines were dropped.*\n$/.test(gateway.output()));
    gateway.child.stdout!.pause();
    const logged = requests(gateway).length;
    assert.ok(logged > 1000, `${logged} lines were kept`);
    assert.equal(linesOf(gateway, /dropped/).length, 1);
    assert.equal(logLines(gateway.log).at(-1)!.lines, total - logged);
    const { log_lines_dropped_total: dropped } = await scrape(gateway, { path: '/metrics', headers: BEARER });
    assert.equal(dropped, total - logged);
    await askMany(325); // several times the capacity of the pipe
    await gateway.close();
  });

  test('standard output and standard error on a full disk block neither the gateway nor its shutdown', {
    skip: process.platform !== 'linux' && 'only Linux has /dev/full',
  }, async (t) => {
    // No log has the port of the gateway, so the test sets it, and repeats a request there until a response arrives.
    const to = { port: await sparePort() };
    const command = [process.execPath, ...isDeno ? ['run', '-A'] : [], ...LOADER, fileURLToPath(FILE)];
    const { url } = await startBackend(t);
    const env = {
      HOME: process.env.HOME,
      GATEWAY_LISTEN: `127.0.0.1:${to.port}`,
      GATEWAY_TOKENS: SECRET,
      GATEWAY_BACKEND_URL: url,
    };
    const child = start([], env, ['sh', '-c', 'exec "$0" "$@" >/dev/full 2>&1', ...command]);
    t.after(() => child.kill('SIGKILL'));
    await untilAnswering(to);
    for (const signal of ['SIGHUP', 'SIGTERM'] as const) {
      for (let i = 0; i < 3; i++) assert.equal((await ask(to, { body: MESSAGE, headers: BEARER })).status, 201);
      process.kill(child.pid!, signal);
    }
    assert.deepEqual(await once(child, 'exit'), [0, null]);
  });
});
