import { writeFileSync } from 'node:fs';
import http from 'node:http';
import { join } from 'node:path';
import type { GatewayConfig } from '../../gateway.ts';
import { assert, groupsOf, logLines, problemsOf, until } from '../assertions.ts';
import { startBackend } from '../backend.ts';
import { type Ask, ask, open } from '../client.ts';
import { ALL_METHODS, TOKEN_SETTINGS, tokens } from '../configs.ts';
import { fileWith, folder, SETTING_ROWS } from '../files.ts';
import { BodyScan, createGateway, loadSettings, parseTarget } from '../gateway.ts';
import { test } from '../guard.ts';
import { AS_MULTIPART, BEARER, DEFAULTS, MESSAGE, MIB, OTHER, SECRET, SECRETS, URLENCODED } from '../samples.ts';
import { startBoth, startProcess } from '../start.ts';

/** The processor time of a task in milliseconds: the minimum of several tries, or the first one if it is good. */
async function leastMs(goodMs: number, task: () => unknown, tries = 8): Promise<number> {
  let least = Infinity;
  for (let i = 0; i < tries && least > goodMs && (i < 2 || least < 10 * goodMs); i++) {
    const before = process.cpuUsage();
    await task();
    const { user, system } = process.cpuUsage(before);
    least = Math.min(least, (user + system) / 1000);
  }
  return least;
}

/** A text of at most this many bytes: a beginning, a repeated piece, and an end. `######` is a piece's own number. */
function repeated(size: number, [first = '', piece = '', last = '']: readonly string[]): string {
  const room = size - Buffer.byteLength(first + last);
  let number = 100_000;
  const pieces = piece.repeat(Math.max(0, Math.floor(room / Buffer.byteLength(piece))));
  return first + pieces.replaceAll('######', () => `${number++}`) + last;
}

/**
 * Runs each row at a quarter of a size and at the full size, which may take at most twelve times as long. A quarter of
 * less than 10 ms counts as 10 ms. A nested loop would take sixteen times as long, and then minutes. The full size is
 * not run if even sixteen times the quarter would pass.
 */
async function assertLinear(
  rows: readonly (readonly string[])[],
  size: number,
  run: (text: string, row: readonly string[]) => unknown,
  limitMs = Infinity,
): Promise<void> {
  for (const row of rows) {
    const name = JSON.stringify(row.map((text) => text.slice(0, 60)));
    const goodMs = Math.min(limitMs, 40_000);
    const [quarter, whole] = [repeated(size / 4, row), repeated(size, row)];
    const quarterMs = await leastMs(30, () => run(quarter, row), 3);
    assert.ok(quarterMs <= goodMs, `${name}: ${quarterMs} ms for a quarter`);
    const mostMs = Math.min(limitMs, 12 * Math.max(10, quarterMs));
    if (16 * quarterMs <= mostMs) continue;
    const wholeMs = await leastMs(mostMs, () => run(whole, row));
    assert.ok(wholeMs <= mostMs, `${name}: ${quarterMs} ms for a quarter, ${wholeMs} ms for the whole`);
  }
}

/** The size of a body that is held whole: an eighth of the largest. */
const SIZE_BYTES = MIB / 8;

const PART = '--limit\r\ncontent-disposition:form-data;name=a';

/** Bodies that are held whole: the Content-Type, the beginning, the repeated piece, and the end. */
const LATE_BODIES = [
  // a multipart form: parts, their heads and values, boundaries
  ...[
    ['--limit', '\r\n', 'x\n--limit--\r\n'],
    ['--limit\r\nX: y', '\r\n\r\n', 'x\n--limit--\r\n'],
    ['', `${PART}\r\n\r\n\r\n`, '--limit--\r\n'],
    ['', `${PART};filename=a\r\n\r\n\r\n`, '--limit-'],
    ['', `${PART}######\r\n\r\n1\r\n`, '--limit--\r\n'],
    ['', '\n--limit', 'x'],
    ['', ' \r\n', 'x'],
    [PART, ' ', 'x\r\n\r\n\r\n--limit--\r\n'],
    [`${PART};`, ' ', 'x\r\n\r\n\r\n--limit--\r\n'],
    [`${PART};filename="`, '/', '\r\n\r\n\r\n--limit--\r\n'],
    [`${PART};filename=`, '/a', '\r\n\r\n\r\n--limit--\r\n'],
    [`${PART};filename="`, '" ', '\r\n\r\n\r\n--limit--\r\n'],
    [`${PART};filename="`, '\\"', '"\r\n\r\n\r\n--limit--\r\n'],
    [`${PART};filename="a"`, ';b######=c', '\r\n\r\n\r\n--limit--\r\n'],
    [`${PART};filename*="utf-8''`, '%41', '"\r\n\r\n\r\n--limit--\r\n'],
    [PART, '\r\nx:y', '\r\n\r\n\r\n--limit--\r\n'],
    ['--limit\r\ncontent-type:', ' ', '\r\n\r\n\r\n--limit--\r\n'],
    ['--limit\r\ncontent-transfer-encoding:', ' ', '\r\n\r\n\r\n--limit--\r\n'],
  ].map((row) => [AS_MULTIPART, ...row]),
  // a boundary that nearly matches everywhere
  [`multipart/form-data; boundary=${'a'.repeat(6000)}`, '', 'a', 'b'],
  [`multipart/form-data; boundary=${'a'.repeat(6000)}`, '', `\n--${'a'.repeat(5999)}`, 'b'],
  ['application/json', '{"message":"x"', ',"recipients[######]":1', '}'],
  // an HTML form
  ...[
    ['message', '&a', '='],
    ['x=1', '&a=1', '%'],
    ['x=1', '&a=1', ' '],
    ['', '%', '='],
    ['x', '\n', 'y'],
    ['x', '\n ', 'y'],
    ['x', ';=', 'y'],
    ['x', '%0A', 'y'],
    ['message=x', ';=', ''],
    ['message=x', '\n"', ''],
    ['number[', ']', 'x=1'],
    ['number', ' ', 'x=1'],
    ['message=x', '&message=', ''],
    ['message=x', '&recipients=', ''],
    ['message=x', '&__proto__=1', '&'],
    ['message=x', '&', ''],
    ['message=x', '&a=1', ''],
    ['message=x', '&a######=1', ''],
    ['message=x', '&A######=1', ''],
    ['message=', '%0A', 'x'],
    ['x y', '\nz w', ''],
    [' ', '\t', 'number'],
    ['message=', '%01', '%'],
    ['message=', '\r\n', '\r'],
    ['', '/', '='],
    ['', 'a:/', '&message=x'],
  ].map((row) => [URLENCODED, ...row]),
  // a text: colours, titles, links, character sets, control characters
  ...[
    ['', '\x1b[', '0'],
    ['\x1b[', '0', ''],
    ['\x1b[', '0 ', '\r'],
    ['', '\x9b0', ''],
    ['', '\x1b]', ''],
    ['\x1b]', 'a', ''],
    ['\x1b]', 'a\x1b', '\\'],
    ['', '\x1b ', ''],
    ['', 'a\x01', ''],
    ['', '\u20ac', '\x1b['],
    ['x', '\ny', ''],
    ['--x', '\na:b', ''],
    ['--x\n', 'a:', '\n'],
    ['', '\n--x\n', 'a:b'],
  ].map((row) => ['text/plain', ...row]),
  // JSON
  ...[
    ['{"message":"', '\\n', '"'],
    ['{"message":"', '\\"', '"}'],
    ['{"message":"', '{', '"}'],
    ['{"message":"x"', ',"a":0', '}'],
    ['{"message":"x"', ',"a\\u0061":0', '}'],
    ['{"message":"x"', ',"a######":0', '}'],
    ['{"message":"x"', ',"\\u0061######":0', '}'],
    ['{"message":"x","a":[""', ',""', ']'],
    ['{"message":"x"', ' ', '}'],
    ['{"message":"x","a":["" ', '   ', ']}'],
    ['{"message":"x","recipients":["a"', ',"a"', ']}'],
    ['{"message":"x","recipients":["a"', ',"+15550100003"', ']'],
    ['{"message":"x","base64_attachments":["a"', ',"a"', ']}'],
    ['{"message":"x","base64_attachments":["a"', `,"${',;'.repeat(500)}"`, ']}'],
    ['{"message":"x","base64_attachments":["a"', `,"${';filename='.repeat(90)}"`, ']}'],
    ['{"message":"x","base64_attachments":["a"', ',"data:;base6,', ''],
    ['{"message":"x","a":[0', `,${'['.repeat(50)}${']'.repeat(50)}`, ']}'],
    ['{"', 'a', '":1}'],
    ['{"', '\\n', '":1}'],
    ['{"message":"x","a":', '1', '}'],
    ['{"a":[0', ',0', ']}'],
    ['{"a":[0', ',{"b":{"c":0}}', ']}'],
    ['{"a":[0],"b":[0', ',0', ']}'],
  ].map((row) => ['application/json', ...row]),
];

// A form with an empty line every two bytes blocked the process for 6 s (64 KiB) or minutes (1 MiB).
test(
  'attack: a body that fails late; one held whole takes at most 48 times as long as gathering its keys and parsing it; four times the length, twelve times as long',
  {},
  async (t) => {
    const message = '{{#a}}{{#a}}{{#a}}{{b.c.d}}{{.}}{{/a}}{{/a}}{{/a}}{{b}}';
    const config = { ...tokens({ defaults: DEFAULTS }, { defaults: DEFAULTS, message }), limits: { body: '8MiB' } };
    const { gateway } = await startBoth(t, { ...config, log: { level: 'error' } });
    const agent = new http.Agent({ keepAlive: true });
    t.after(() => agent.destroy());
    const sample = repeated(SIZE_BYTES, ['{"message":"x"', ',"a":0', '}']);
    const work = (): unknown =>
      new Set(Array.from(sample.matchAll(/"((?:[^"\\]|\\.)*)":/g), ([, key]) => key)).add(JSON.parse(sample));
    // For the second token a template reads the body: it sees JSON and forms.
    for (const token of [SECRET, OTHER]) {
      const bodies = LATE_BODIES.filter(([type]) => token === SECRET || type === URLENCODED || /json/.test(type!));
      const yardMs = Math.min(await leastMs(0, work), await leastMs(0, work), await leastMs(0, work));
      await assertLinear(bodies.map(([type = '', ...row]) => [...row, type]), SIZE_BYTES, async (text, row) => {
        const headers = { 'authorization': `Bearer ${token}`, 'content-type': row[3] };
        const { status } = await ask(gateway, { body: text, headers, agent });
        assert.ok([201, 400, 403].includes(status), `${status}`);
      }, 48 * yardMs);
    }
  },
);

// An alert with a line feed in each of its texts cost four times as much, and a long key a hundred times.
test('JSON with escapes in its texts costs at most twice what it costs without, and a long key four times what a long text costs', async (t) => {
  const { gateway } = await startBoth(
    t,
    tokens({ defaults: DEFAULTS, message: '{{#alerts}}{{status}}{{/alerts}}{{message}}' }),
  );
  const agent = new http.Agent({ keepAlive: true });
  t.after(() => agent.destroy());
  const post = (...row: string[]): () => Promise<void> => {
    const text = repeated(MIB / 2, row);
    return async () => {
      const { status } = await ask(gateway, { body: text, headers: BEARER, agent });
      assert.ok([201, 400].includes(status), `${status}`);
    };
  };
  const alerts = (gap: string): string[] => [
    '{"alerts":[0',
    `,{"status":"firing","labels":{"alertname":"DiskFull","instance":"host-######"},"annotations":{"summary":"Full.${gap}Call."}}`,
    ']}',
  ];
  for (
    const [most, cheap, dear] of [
      [2, post(...alerts('. ')), post(...alerts('\\n'))],
      [4, post('{"message":"x","a":"', '\ufdfa', '"}'), post('{"message":"x","', '\ufdfa', '":1}')],
    ] as const
  ) {
    await leastMs(0, cheap, 3);
    const cheapMs = await leastMs(0, cheap);
    const dearMs = await leastMs(most * cheapMs, dear);
    assert.ok(dearMs <= most * cheapMs, `${cheapMs} ms and ${dearMs} ms`);
  }
});

test(
  'attack: a body that fails late while it streams, a target or a header; four times the length takes at most twelve times as long',
  {},
  async (t) => {
    const json = LATE_BODIES.filter(([type]) => type === 'application/json').map(([, ...row]) => row);
    const config = {
      ...ALL_METHODS,
      trustedProxies: ['127.0.0.0/8'],
      cors: ['https://a.example'],
      log: { level: 'error' },
    };
    const { gateway } = await startBoth(t, { ...config, ...tokens({}) } as GatewayConfig);
    const agent = new http.Agent({ keepAlive: true });
    t.after(() => agent.destroy());
    await assertLinear(json, MIB / 4, (text) => {
      const bytes = Buffer.from(text);
      const scan = new BodyScan();
      try {
        for (let at = 0; at < bytes.length; at += 65_536) {
          scan.write(bytes.subarray(at, at + 65_536));
          scan.takeFields();
        }
        scan.end();
      } catch { /* refused */ }
    });
    const targets = [
      ...['/a', '//', '/%41', '/@auth=', '/..', '/:'].flatMap((piece) => [['', piece, '/%'], ['/v1', piece, '']]),
      ...['&', '&a', '&a=', '=', '+', '?', '%41', '"', '&@auth', '&numbers='].flatMap((piece) => [
        ['/v1/search?a', piece, '%'],
        ['/v1/search?a', piece, ''],
      ]),
    ];
    await assertLinear(targets, 15_000, (target) => {
      for (let i = 0; i < 10; i++) {
        try {
          parseTarget('GET', target);
        } catch { /* refused */ }
      }
    });
    // Each header in turn, with tokens of its grammar; the last piece makes it fail.
    const headers: [name: string, ...pieces: string[]][] = [
      ['Authorization', ' ', '\t', 'Bearer ', 'a', 'a '],
      ['X-Forwarded-For', ',', ' ', '127.0.0.1,', '[', ']:1', '%F', '::ffff:', '1.', ':1', ', ::1%a'],
      ['Host', ':1', '[', ']', '.', '@', 'a.'],
      ['Origin', 'a', 'http://', ':', '-.'],
      ['Connection', ',', ' ', 'a,', ' ,'],
      ['Content-Encoding', ' ', 'identity', 'identity '],
      ['Access-Control-Request-Headers', ',', ' ,', 'accept,'],
      ['Content-Type', ' ', ';', 'multipart/form-data; ', 'charset=', '"', 'boundary=a;'],
      ['User-Agent', 'Mozilla/', ' '],
      ['Upgrade', 'websocket', ','],
      ['X-Other', '%25', '%', 'AAAA', '25', `${SECRET.slice(1)}`],
    ];
    const rows = headers.flatMap(([name, ...pieces]) => pieces.map((piece) => ['x', piece, 'x', name]));
    const cross = { origin: 'https://a.example', 'access-control-request-method': 'GET' };
    await assertLinear(rows, 15_000, async (text, [, , , name = '']) => {
      const more = /^Access/.test(name) ? cross : BEARER;
      const own = { ...more, ...(/^Content/.test(name) && { 'content-length': 2 }), [name.toLowerCase()]: text };
      for (let i = 0; i < 4; i++) {
        const isPost = /^Content/.test(name);
        const request: Ask = {
          method: /^Access/.test(name) ? 'OPTIONS' : 'GET',
          ...(isPost && { body: '{}', method: 'POST' }),
        };
        const answer = await ask(gateway, { ...request, headers: own, agent });
        assert.ok(answer.status < 500, `${name}: ${answer.status}`);
      }
    });
  },
);

test(
  '10,000 tokens are read in less than twice the time of ten times 1,000, and a log line has twenty names and a count',
  {},
  async (t) => {
    const many = (count: number) => Array.from({ length: count }, (_, i) => [`name-${i}`, `${SECRET}-${i}`] as const);
    const secrets = (count: number) => many(count).map((pair) => pair.join('=')).join(',');
    const [less, more] = [secrets(1000), secrets(10_000)];
    const loading = (text: string): void =>
      assert.deepEqual(problemsOf(() => loadSettings({ env: { GATEWAY_TOKENS: text } })), []);
    const lessMs = await leastMs(0, () => Array.from({ length: 10 }, () => loading(less)), 4);
    const moreMs = await leastMs(2 * lessMs, () => loading(more));
    assert.ok(moreMs < 2 * lessMs, `${lessMs} ms, ${moreMs} ms`);
    const tokens = Object.fromEntries(many(10_000).map(([name, secret], i) => [name, { secret, rate: `${i + 1}/1m` }]));
    const { gateway } = await startBoth(t, { tokens });
    gateway.reload({ tokens });
    const first = Array.from({ length: 20 }, (_, i) => `name-${i}`).join(',');
    for (const line of logLines(gateway.log)) {
      assert.deepEqual([line.tokens, line.names], [10_000, `${first},and 9980 more`]);
      assert.ok(JSON.stringify(line).length < 1000, line.message);
    }
    assert.equal(gateway.log.length, 2);
  },
);

// In a process of its own, whose clock is the real one: this file's also reads bodies and answers for the backend.
test('attack: keep everybody waiting with large bodies at once; after each one others have as much time as it took', async (t) => {
  const backend = await startBackend(t);
  const gateway = await startProcess(t, {
    backend,
    env: {
      GATEWAY_TOKENS: `a=${SECRET},b=${OTHER}`,
      GATEWAY_DEFAULTS_NUMBER: DEFAULTS.number,
      GATEWAY_DEFAULTS_RECIPIENTS: DEFAULTS.recipients.join(),
    },
  });
  const body = `{"a":[${'{"\\u0061":1},'.repeat(25_000)}{}],"message":"x"}`;
  const large = Array.from({ length: 8 }, () => ask(gateway, { body, headers: BEARER }));
  const sends = (): number => backend.seen.filter(({ method }) => method === 'POST').length;
  await until(() => sends() > 0);
  let answered = 0;
  while (sends() < large.length) {
    const { status } = await ask(gateway, { path: '/v1/about', headers: { authorization: `Bearer ${OTHER}` } });
    answered += Number(status === 200);
  }
  assert.deepEqual((await Promise.all(large)).map(({ status }) => status), large.map(() => 201));
  assert.ok(answered >= 3 * large.length, `${answered} requests were answered between ${large.length} bodies`);
});

test('attack: keep everybody waiting with bodies that are dear to scan, with a token or without: others are answered meanwhile', async (t) => {
  let bytes = 0;
  const backend = await startBackend(t, (req, res) => {
    if (req.headers['content-length'] !== String(MIB)) {
      return void req.resume().on('end', () => res.writeHead(201).end('[]'));
    }
    req.on('error', () => {}).on('data', (chunk: Buffer) => void (bytes += chunk.length));
  });
  const gateway = await startProcess(t, { backend, env: { GATEWAY_TOKENS: `a=${SECRET},b=${OTHER}` } });
  const keysOf = (size: number): string => {
    const [first, last] = [
      `{"message":"x","number":"${DEFAULTS.number}","recipients":["${DEFAULTS.recipients}"]`,
      ',"x":""}',
    ];
    const keys = ',"\\\\":0'.repeat((size - first.length - last.length) / 7);
    return first + keys + last.replace('""', `"${'x'.repeat(size - first.length - last.length - keys.length)}"`);
  };
  const requestOf = (size: number, ...headers: string[]): string =>
    ['POST /v2/send HTTP/1.1', 'Host: x', `Content-Length: ${size}`, ...headers, '', keysOf(size)].join('\r\n');
  let [refused, isOver] = [0, false];
  const attack = (request: string): void => {
    const { socket, text } = open(t, gateway, request);
    socket.on('close', () => {
      if (/^HTTP\/1\.1 401/.test(text())) refused++;
      if (!isOver) attack(request);
    });
  };
  const answered = async (count: number): Promise<void> => {
    for (let i = 0; i < count; i++) {
      const { status } = await ask(gateway, { body: MESSAGE, headers: { authorization: `Bearer ${OTHER}` } });
      assert.equal(status, 201);
    }
  };
  for (let i = 0; i < 32; i++) attack(requestOf(65_000, 'Connection: close'));
  await until(() => refused > 0);
  refused = 0;
  await answered(20);
  assert.ok(refused < 60, `${refused} bodies of strangers were scanned between 20 sends`);
  isOver = true;
  for (let i = 0; i < 32; i++) open(t, gateway, requestOf(MIB, `Authorization: Bearer ${SECRET}`));
  await until(() => bytes > 0);
  bytes = 0;
  await answered(20);
  assert.ok(bytes < 10 * MIB, `${bytes} bytes of uploads were scanned between 20 sends`);
});

test('attack: keep everybody waiting with sends by GET whose template repeats its sections: others are answered meanwhile', async (t) => {
  const backend = await startBackend(t);
  const message = '{{#a}}{{x}}{{#b}}{{x}}{{#c}}{{x}}{{/c}}{{/b}}{{/a}}';
  const hook = { secret: SECRET, allow: ['GET /v2/send'], message, defaults: DEFAULTS };
  const tokens = { hook, other: { secret: OTHER } };
  const file = fileWith(t, { backend: { url: backend.url }, tokens });
  const gateway = await startProcess(t, { args: ['--config', file] });
  const list = (length: number): string => `[${Array(length).fill(1).join()}]`;
  const payload = `{"a":${list(2000)},"b":${list(2000)},"c":${list(2000)}}`;
  let [built, isOver] = [0, false];
  const attack = (): void => {
    const request = `GET /v2/send?payload=${payload} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n\r\n`;
    const { socket } = open(t, gateway, request.replaceAll('"', '%22'));
    socket.on('close', () => {
      built++;
      if (!isOver) attack();
    });
  };
  for (let i = 0; i < 32; i++) attack();
  await until(() => built > 0);
  built = 0;
  for (let i = 0; i < 20; i++) {
    const { status } = await ask(gateway, { body: MESSAGE, headers: { authorization: `Bearer ${OTHER}` } });
    assert.equal(status, 201);
  }
  isOver = true;
  assert.ok(built < 100, `${built} messages were built between 20 sends`);
});

/** Secrets in many shapes. Each is tried in every place of a configuration. */
const CANARIES = `${SECRET} sixteen-chars-ok q83/vEiRq+yZtW0/Fq2pXk9LmN7oRs5TuVwXyZ01ab4= /9j-canary/of/some_length`
  .split(' ');

const NO_MESSAGE = 'the canary: a secret in any wrong place of a configuration is in no message, at start or on reload';

test(NO_MESSAGE, async (t) => {
  const file = join(folder(t), 'gateway.json');
  let messages = 0;
  const nest = (path: string, value: unknown): object =>
    path.split('.').reduceRight((inner, key) => ({ [key]: inner }), value) as object;
  assert.ok(SETTING_ROWS.length >= 18, `only ${SETTING_ROWS.length} settings`);
  for (const S of CANARIES) {
    const silent = (load: () => unknown): void => {
      const found = problemsOf(load).join('\n');
      assert.ok(!found.includes(S.slice(0, 12)) && !found.includes(S.slice(-12)), found);
      messages += Number(found !== '');
    };
    const silentFile = (text: string): void => {
      writeFileSync(file, text);
      silent(() => loadSettings({ file }));
    };
    const values = [S, [S], [[S]], { [S]: S }, { [S]: {} }, { [S]: [S] }, [{ [S]: 1 }], `a=${S}`, `a,${S}`, `"${S}"`];
    const templates = ['{{S', '{{#S}}', '{{/S}}', '{{>S}}', '{{S b}}', '{{{S b}}}', '{{#a}}{{/S}}', '{{#S}}{{/b}}'];
    const known = SETTING_ROWS.map(([path]) => path);
    const parents = [...new Set(groupsOf(known.join('\n'), /^(\w+)\./gm)), 'tokens'];
    const inToken = [...TOKEN_SETTINGS, ...['number', 'recipients', 'text_mode', S].map((key) => `defaults.${key}`), S];
    const tokens = [
      ...inToken.flatMap((path) => values.map((value) => ({ a: { secret: OTHER, ...nest(path, value) } }))),
      ...templates.map((text) => ({ a: { secret: OTHER, message: text.replace('S', S) } })),
      ...[S, null, {}, { secret: 'short' }, { secret: S }, { secret: OTHER, allow: ['x'] }].map((it) => ({ [S]: it })),
      { [S]: { secret: OTHER }, a: { secret: OTHER } },
      ...[{ [`${S} `]: { secret: OTHER } }, { a: { secret: `${S} ` } }],
    ];
    const paths = [...known, ...parents, S, ...parents.map((path) => `${path}.${S}`)];
    const wrong = paths.flatMap((path) => values.map((value) => nest(path, value)));
    for (const config of [...wrong, ...tokens.map((value) => nest('tokens', value))]) {
      // If a secret is a valid value, there is no mistake and no message.
      silent(() => createGateway(config));
      if (S !== CANARIES[0]) continue; // files are read in the same way
      for (const end of [undefined, -1]) silentFile(JSON.stringify(config).slice(0, end));
    }
    silentFile(`{"${S}":1,"${S}":2,"tokens":{"${S}":{"${S}":1,"${S}":2}}}`);
    const texts = values.filter((value) => typeof value === 'string');
    for (const name of [...SETTING_ROWS.map(([, env]) => env), 'GATEWAY_TOKENS_FILE']) {
      for (const text of texts) silent(() => loadSettings({ env: { GATEWAY_AUTH_ANONYMOUS: 'x', [name]: text } }));
    }
    for (const all of [{ file: S }, { flags: { listen: S, backend: S } }]) silent(() => loadSettings(all));
  }
  assert.ok(messages > 1500, String(messages));

  writeFileSync(file, JSON.stringify(tokens({})));
  // SIGHUP is handled as soon as the log line about listening is written.
  const { child, output } = await startProcess(t, { args: ['--config', file] });
  writeFileSync(file, JSON.stringify({ [OTHER]: 1, tokens: { [OTHER]: { methods: [OTHER] } } }));
  process.kill(child.pid!, 'SIGHUP');
  await until(() => output().includes('reload failed'));
  assert.match(output(), /the configuration\[0\]: is not a setting; there are .*; tokens\[0\]: needs /);
  assert.doesNotMatch(output(), SECRETS);
});
