import { once } from 'node:events';
import { suite } from 'node:test';
import { assert, groupsOf, until } from './assertions.ts';
import { startBackend } from './backend.ts';
import { ask } from './client.ts';
import { MISSING } from './configs.ts';
import { fileWith, PACKAGE } from './files.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { ROUTES } from './routes.ts';
import { literal, parseRow } from './rows.ts';
import { BEARER, DEFAULTS, FROM, GROUP, MESSAGE, MIB, OTHER, SECRET, SECRETS, sized, STRANGER, TO } from './samples.ts';
import { AS_IT_IS, cli, program, runProcess, startHolding, startProcess } from './start.ts';

suite('command-line', SIDE_BY_SIDE, () => {
  test('--check prints "warning" for what is wrong, and the file, variables and flags that its settings come from', async (t) => {
    const expired = fileWith(t, { tokens: { old: { secret: SECRET, expires: '2020-01-01' } } });
    const open = 'warning: no tokens are configured: all requests are accepted without authentication';
    const path = 'has the path of an endpoint; give only the part before it, such as http://signal-api:8080';
    const named: [string[], NodeJS.ProcessEnv, sources: string, ...warnings: string[]][] = [
      [['--config', expired], {}, `the file ${expired}`, 'warning: the token "old" has expired'],
      [[], {}, 'nothing, only defaults apply', `${open}; the command "add" makes one, and --config names the file`],
      [
        ['--listen', ':8880'],
        { GATEWAY_AUTH_ANONYMOUS: 'true' },
        'GATEWAY_AUTH_ANONYMOUS, --listen',
        `${open}, from other machines too`,
      ],
      [[], { GATEWAY_TOKENS: SECRET, HOSTNAME: 'x' }, 'GATEWAY_TOKENS'],
      [[], { GATEWAY_TOKENS_FILE: fileWith(t, SECRET) }, 'GATEWAY_TOKENS_FILE'],
    ];
    const paths = '/v2/send /v2/send/ /v1/about /proxy/v1/receive/+15550100001 /v1 /v2/'.split(' ');
    for (const each of paths) {
      const env = { GATEWAY_TOKENS: SECRET, GATEWAY_BACKEND_URL: `http://x${each}` };
      named.push([[], env, 'GATEWAY_BACKEND_URL, GATEWAY_TOKENS', `warning: GATEWAY_BACKEND_URL ${path}`]);
    }
    named.push([
      ['--backend', 'http://x/v2/send'],
      { GATEWAY_TOKENS: SECRET },
      'GATEWAY_TOKENS, --backend',
      `warning: --backend ${path}`,
    ]);
    for (const each of ['', '/', '/signal', '/v1/signal', '/v12/send', '/v2x']) {
      named.push([
        [],
        { GATEWAY_TOKENS: SECRET, GATEWAY_BACKEND_URL: `http://x${each}` },
        'GATEWAY_BACKEND_URL, GATEWAY_TOKENS',
      ]);
    }
    for (const [args, env, sources, ...warnings] of named) {
      const { code, stdout } = await cli(['--check', ...args], { env });
      assert.equal(code, 0);
      const lines = stdout.split('\n');
      assert.equal(lines[0], `The configuration is valid. It was read from: ${sources}.`);
      assert.deepEqual(
        lines.filter((line) => /warning(?! +nothing confines it)/.test(line)),
        warnings,
        JSON.stringify(env),
      );
    }
  });

  const UNCONFINED = 'nothing confines it: it may send from any account to anyone';

  test('--check warns about a secret that a URL cannot hold as it stands, about tags of another template language', async (t) => {
    const all = {
      odd: { secret: `${SECRET}@:/%20#&` },
      jinja: { secret: OTHER, message: ['{% if title %}', '{{title}}'] },
      shell: { secret: `${OTHER}1`, message: 'Alert ${title}' },
      python: { secret: `${OTHER}2`, message: '{title} is down' },
      plain: {
        secret: `${SECRET}_~.`,
        message: '{{title}} {{{body}}} {{#a.b}}{ x }{{/a.b}}',
        recipients: ['+4915550000'],
      },
    };
    const { code, stdout } = await cli(['--check', '--config', fileWith(t, { tokens: all })]);
    assert.deepEqual([code, groupsOf(stdout, /^ {4}warning {6}(.*)$/gm)], [0, [
      'percent-encode its secret in URLs: it has characters other than letters, digits, . _ ~ -',
      UNCONFINED,
      ...['{%', 1, 2].flatMap(() => [
        'its message has "{%", "${" or single braces, which are sent as they stand; write {{name}}, or {{#name}} … {{/name}}',
        'its "message" makes sends of webhooks, which name no account and no recipients: set "defaults"',
        UNCONFINED,
      ]),
      'its "message" makes sends of webhooks, which name no account and no recipients: set "defaults"',
    ]]);
    assert.ok(!stdout.includes('%20'), stdout);
  });

  /** The words of a command line, some of which may be in single quotes. */
  const wordsOf = (line: string): string[] =>
    Array.from(line.matchAll(/'([^']*)'|(\S+)/g), ([, quoted, word]) => quoted ?? word!);

  test("--help lists every setting, flag and group in 80 columns, with usage and commands at the end; --version is the package's", async () => {
    const { code, stdout } = await cli(['--help']);
    assert.equal(code, 0);
    const words = `--config --listen --backend --check --demo 'remove NAME' 'render NAME' GATEWAY_TOKENS_FILE
    GATEWAY_CONFIG SIGHUP 'the same signal again cuts them off'`;
    for (const word of [...wordsOf(words), 'docs/reference.md']) assert.ok(stdout.includes(word), word);
    assert.deepEqual(stdout.split('\n').filter((line) => line.length > 80), []);
    // What a terminal finally shows.
    const [last = '', ...above] = stdout.split(/\n(?=Usage:)/).reverse();
    assert.ok(last.split('\n').length <= 24 && above.length === 1, last);
    for (const word of wordsOf(words).slice(0, 7)) assert.ok(last.includes(word), word);
    assert.match(last, /^ {2}gateway\.mjs --backend http:\S+$/m, 'an example');
    assert.deepEqual(await cli(['--version']), { code: 0, stdout: `${PACKAGE.version}\n`, stderr: '' });
  });

  test('the process exits with 0, 1 or 2, and writes to standard output or to standard error', async (t) => {
    const { host, port } = await startBackend(t);
    const rows: [number, ...string[]][] = [[0, '--check'], [1, '--listen', `${host}:${port}`], [2, SECRET]];
    for (const [code, ...args] of rows) {
      const given = { env: { GATEWAY_TOKENS: SECRET }, input: `${SECRET}\n` };
      // Once as users start it: through the loader, if the runtime needs one.
      const ended = await runProcess(args, { ...given, program: code === 0 ? AS_IT_IS : program() });
      assert.deepEqual(ended, await cli(args, given));
      assert.deepEqual([ended.code, ended.stdout !== '', ended.stderr !== ''], [code, code === 0, code !== 0]);
      if (code === 1) {
        assert.match(ended.stderr, /^gateway: cannot run: .*in use.*--listen HOST:PORT/);
      }
    }
    const demo = await cli(['--demo', '--listen', `${host}:${port}`]);
    assert.match(demo.stderr, /^gateway: cannot run: .*in use.*--listen HOST:PORT/);
  });

  test('bad usage and bad configuration exit with 2 and the reason on standard error, without a secret', async () => {
    // S is a secret.
    const rows = `
    --confg x ;; --port 8880 ;; --port=8880 ;; -p 8880 ;; -c x.json ;; -check ;; --token x ;; --toString x → unknown option -
    --S ;; --S=x → unknown option with a long name
    --check=yes → --check takes no value
    --config ;; --config --check → --config needs a value
    --listen '' → --listen: is set but empty
    --config '' ;; GATEWAY_CONFIG= → --config, or GATEWAY_CONFIG, is set but empty
    check ;; start ;; token ;; remove ;; remove a b ;; hash ;; gateway.json ;; ./my.json ;; add ;; test → unknown command or arguments
    —check ;; –-config x ;; add home +15550100002 —for script → a dash is no hyphen: write "--"
    GATEWAY_XYZ=1 → GATEWAY_XYZ: is not a setting; there are GATEWAY_CONFIG, | --help describes all settings
    frobnicate ;; S → unknown command
    render ;; render hook S → unknown command or arguments
    --config /no/such/file ;; GATEWAY_CONFIG=/no/such/file → /no/such/file ${MISSING}
    --listen x --backend y → --backend: must be | --listen: "x" is not
    --demo GATEWAY_TOKENS=S ;; --demo GATEWAY_TOKENS_FILE=/x ;; --demo GATEWAY_BACKEND_URL=http://x ;; --demo --config /x ;; --demo --backend http://x ;; --demo render hook --listen 127.0.0.1:0 → --demo brings its own
    --S ;; --config x --S ;; --S=x ;; -S ;; --check=S ;; --config=S ;; --listen S --backend S ;; remove S →
    --check GATEWAY_TOKENS=short GATEWAY_RATE=x → GATEWAY_TOKENS[0]: the secret is shorter | GATEWAY_RATE: "x" is not`;
    for (const [lines = '', messages = ''] of rows.trim().split('\n').map((row) => row.split(/ → ?/))) {
      for (const line of lines.replace(/\bS\b/g, SECRET).split(' ;; ')) {
        const isVariable = (word: string): boolean => /^[A-Z_]+=/.test(word);
        const env = Object.fromEntries(wordsOf(line).filter(isVariable).map((word) => word.split('=')));
        const { code, stdout, stderr } = await cli(wordsOf(line).filter((word) => !isVariable(word)), { env });
        assert.deepEqual([code, stdout], [2, ''], line);
        for (const message of messages.split(' | ')) assert.ok(stderr.includes(message), `${line}: ${stderr}`);
        assert.ok(!stderr.includes(SECRET.slice(0, 12)) && !/^\s+at /m.test(stderr), stderr);
      }
    }
  });

  test('a command or flag that is none is told with all that there are', async () => {
    const words = `'add NAME RECIPIENT…' 'test NAME [RECIPIENT]' 'render NAME' 'remove NAME' --from --for --check --demo
    --help --version --config --listen --backend`;
    const help = (await cli(['--help'])).stdout;
    for (const args of [['frobnicate'], ['--frobnicate'], ['add']]) {
      const { stderr } = await cli(args);
      for (const word of wordsOf(words)) assert.ok(stderr.includes(word) && help.includes(word), `${word}: ${stderr}`);
    }
  });

  test('--check describes what each token may do, and reveals nothing of its secret', async (t) => {
    const defaults = (...recipients: string[]): string =>
      `"defaults":{"number":"${FROM}","recipients":["${recipients.join('","')}"]`;
    const config = `{"listen":":8880", "backend":{"url":"http://u:${OTHER}@backend:1/p/"}, "tokens":{
      "home":{"secret":"${SECRET}","allow":["send","GET /v1/groups/:number"],"senders":["${FROM}"],"recipients":["${TO}","group.*"],
        "rate":"30/1m","clients":["10.0.0.0/8"],"expires":"2020-01-01","methods":["path"]},
      "plain":{"secret":"${OTHER}"},
      "hook":{"secret":"${OTHER}2","message":"{{x}}",${defaults(TO, GROUP)},"text_mode":"styled"}},
      "other":{"secret":"${OTHER}3","senders":["${FROM}"],"recipients":["*"],"message":"{{x}}",${defaults(TO)}}},
      "barred":{"secret":"${OTHER}4","senders":["${FROM}"],"recipients":["${TO}"],${defaults(TO, STRANGER)}}},
      "reader":{"secret":"${OTHER}5","allow":["info"],${
      defaults(TO)
    }}},"stats":{"secret":"${OTHER}6","allow":["metrics"]}}}`;
    const file = fileWith(t, config);
    const { code, stdout } = await cli(['--check', '--config', file]);
    assert.equal(code, 0);
    const [lines, open] = [stdout.split('\n'), 'rate no limit | from any address'];
    // A terminal of 80 columns breaks no number, and the id of a group has its own line.
    const ofTokens = lines.slice(4).filter((line) => !line.startsWith('warning: '));
    for (const line of ofTokens) assert.match(line, /^(?:.{0,80}| {17}group\.\S+)$/);
    const joined = stdout.replace(/\n {17}/g, ' ');
    for (const line of joined.split('\n').filter((line) => line.startsWith('   '))) {
      assert.match(line, /^ {4}(?=.{12} \S)[a-z ]+ /);
    }
    assert.deepEqual(joined.replace(/\n {4}/g, ' | ').replace(/(?<=[a-z]) {2,}/g, ' ').split('\n'), [
      `The configuration is valid. It was read from: the file ${file}.`,
      ...['listen port 8880, for other machines too', 'backend http://backend:1/p', 'tokens 7'],
      'warning: the token "home" has expired',
      'warning: the token "hook" has "defaults" that no send can take: one send goes to phone numbers and UUIDs, or to user names, or to one group: make a token for each',
      `  home | may call send, GET /v1/groups/:number | presented as path | sends from ${FROM} | sends to ${TO}, group.* | rate 30/1m | from 10.0.0.0/8 | expires 2020-01-01T23:59:59.999Z`,
      `  plain | may call send, info | presented as bearer, basic, body | sends from any account | sends to anyone | ${open} | expires never | warning nothing confines it: it may send from any account to anyone`,
      `  hook | may call send, info | presented as bearer, basic, body | sends from ${FROM} | sends to ${TO}, ${GROUP} | ${open} | webhooks become messages, with the text from a template; by default with number ${FROM}, recipients ${TO} and ${GROUP}, text_mode styled | expires never`,
      `  other | may call send, info | presented as bearer, basic, body | sends from ${FROM} | sends to anyone | ${open} | webhooks become messages, with the text from a template; by default with number ${FROM}, recipients ${TO} | expires never`,
      `  barred | may call send, info | presented as bearer, basic, body | sends from ${FROM} | sends to ${TO} | ${open} | webhooks become messages; by default with number ${FROM}, recipients ${TO} and ${STRANGER}; warning: they will be refused: This token may not send to one of these recipients: a phone number that is not on its list ("recipients", or else those in "defaults"). | expires never`,
      `  reader | may call info | presented as bearer, basic, body | reads ${FROM} | ${open} | webhooks become messages; by default with number ${FROM}, recipients ${TO}; warning: they will be refused: This token may not use this endpoint; the word "send" in its "allow" opens it. | expires never`,
      `  stats | may call metrics | presented as bearer, basic, body | ${open} | expires never`,
      '',
    ]);
  });

  test('--check warns of a pattern that opens more than one route of setup, and not of one that names a route', async (t) => {
    const patterns = [
      '* /v1/devices/*',
      'GET /v1/accounts/*/username',
      '* /v1/*',
      'GET /v1/accounts',
    ];
    const warned = await Promise.all(patterns.map(async (pattern) => {
      const file = fileWith(t, { tokens: { a: { secret: SECRET, allow: [pattern] } } });
      return (await cli(['--config', file, '--check'])).stdout.includes('opens account setup');
    }));
    assert.deepEqual(warned, [true, true, false, false]);
  });

  test('--check warns that nothing confines a token that may act, by whatever word or pattern, and not of one that reads', async (t) => {
    const words = [
      'send',
      'messaging',
      'setup',
      'GET /v2/send',
      'PUT /v1/profiles/:number',
      '* /*',
      'receive',
      'info',
      'GET /*',
    ];
    const warned = await Promise.all(words.map(async (word) => {
      const file = fileWith(t, { tokens: { a: { secret: SECRET, allow: [word] } } });
      return (await cli(['--config', file, '--check'])).stdout.includes('nothing confines it');
    }));
    assert.deepEqual(words.filter((_, i) => !warned[i]), ['receive', 'info', 'GET /*']);
  });

  test('--check reports each pattern that can never match, and no other; GET /v2/send can match if a token makes sends', async (t) => {
    const good = `GET /v1/groups/:number, GET /v1/groups/:n/:g, * /v1/groups/*, * /*, * /*/*/*/*/members,
    DELETE /v1/devices/:number/:deviceId, DELETE /v1/devices/:number/*, DELETE /v1/devices/*/local-data,
    POST /v1/plugins/a/b/c, GET /v1/groups/*/:groupid/avatar, GET /v1/attachments/-x, GET /v1/receive/:anything,
    GET /*/receive/:number, PUT /v1/groups/:number/*`.split(/,\s+/);
    const bad = `POST /v2/Send, GET /v2/send, POST /v3/send, POST /send, PATCH /v1/groups/*, GET /v1/new/*,
    GET /v1/:about, GET /v1/receive/15550100001, GET /v1/receive/--help, GET /v1/../v1/about, GET /v1/receive/:groupid, GET /*/accounts,
    GET /v1/groups/:number/avatar, POST /v1/polls/:number/:vote, GET /v1/receive/:number/*, GET /swagger/*,
    POST /v1/*/:number/pin, GET /swagger, GET /v1/attachments/.., GET /v1/groups/${FROM}/group.QUJD, * /*/*/*/*/*/*/*,
    GET /v1/groups/:groupid`.split(/,\s+/);
    const routes = ROUTES.flatMap(({ method, path }) => [`${method} ${path}`, `* ${path}`]);
    const sending = {
      hook: { secret: `${SECRET}2`, defaults: DEFAULTS },
      rung: { secret: `${SECRET}3`, message: 'Rang' },
    };
    const rows: [allow: string[], tokens: object, warned: string[]][] = [
      [[...good, ...routes], {}, []],
      [bad, {}, bad],
      [['send', bad[0]!, '* /*'], {}, [bad[0]!]],
      [['GET /v2/send'], sending, ['GET /v2/send']],
    ];
    for (const [allow, tokens, warned] of rows) {
      const all = { a: { secret: SECRET }, b: { secret: OTHER, allow: ['send'] }, ...tokens };
      const { code, stdout } = await cli(['--check', '--config', fileWith(t, { allow, tokens: all })]);
      assert.deepEqual([
        code,
        groupsOf(stdout, /^ {4}warning {6}(.*?) (?:matches no route of the backend|needs "defaults" or "message")$/gm),
      ], [
        0,
        warned,
      ]);
      const [, own = ''] = /^ {2}a\n([^]*?)^ {2}b\n/m.exec(stdout)!;
      assert.equal(/matches no route|needs "defaults"/.test(own), warned.length > 0, 'the token that is warned of');
      assert.doesNotMatch(stdout, /will be refused/);
    }
  });

  test('render prints the message that is built from a payload, sends nothing, and refuses what the gateway refuses', async (t) => {
    const backend = await startBackend(t);
    const styled = { ...DEFAULTS, text_mode: 'styled' };
    const hook = { message: '{{#alerts}}\n{{name}}\n{{/alerts}}', defaults: styled };
    const text = { secret: `${OTHER}3`, defaults: DEFAULTS };
    const reader = { secret: `${OTHER}2`, allow: ['info'], defaults: DEFAULTS };
    const tokens = { hook: { secret: SECRET, ...hook }, plain: { secret: OTHER }, reader, text };
    const file = fileWith(t, { backend: { url: backend.url }, tokens });
    const payload = JSON.stringify({ alerts: [{ name: 'ü' }, { name: 'b\u001b\u009b' }], number: 2, auth: OTHER });

    for (const args of [['render', 'hook', '--config', file], ['--config', file, 'render', 'hook']]) {
      for (const input of [payload, `payload=${encodeURIComponent(payload)}`]) {
        const { code, stdout, stderr } = await cli(args, { input });
        // In JSON, the text is hard to read; standard output stays JSON alone. A terminal gets no control characters.
        const shown = 'gateway: the phone shows\n\nü\nb\n';
        assert.deepEqual([code, stderr, JSON.parse(stdout)], [0, shown, { ...styled, message: 'ü\nb\u001b\u009b' }]);
      }
    }
    const laid = (fields: object): string => JSON.stringify({ message: 'x', ...fields });
    const rows: [number, string, string, RegExp][] = [
      [
        1,
        'hook',
        '{"a":1}',
        /^The token's template finds nothing in this body; correct its names\. The body's top-level keys are "a"\.\n$/,
      ],
      [1, 'text', laid({ recipients: [STRANGER] }), /^This token may not send to .*: a phone number .*\.\n$/],
      [
        1,
        'text',
        laid({ number: STRANGER }),
        /^This token may use only the accounts on its list \("senders", or else the number in "defaults"\)\.\n$/,
      ],
      [1, 'hook', '{"a":x}', /^The body is not a JSON object: expected a value, at byte 5\.\n$/],
      [1, 'reader', '{"message":"x"}', /^This token may not use this endpoint; the word "send" .*\n$/],
      [
        1,
        'hook',
        sized(MIB + 1),
        /^The body is larger than 1MiB, the most that this gateway accepts from a token with "defaults" .*\n$/,
      ],
      [2, 'hock', '{}', /^there is no token with that name; there are "hook", "plain", "reader", "text"\n$/],
      [2, SECRET, '{}', /^there is no token with that name/],
      [2, 'plain', '{}', /^the token "plain" has neither "defaults" nor "message", and relays bodies unchanged\n$/],
    ];
    for (const [code, name, input, message] of rows) {
      const { stderr, ...ended } = await cli(['render', name, '--config', file], { input });
      assert.deepEqual(ended, { code, stdout: '' }, stderr);
      assert.match(stderr.replace(/^gateway: /, ''), message);
      assert.doesNotMatch(stderr, SECRETS);
    }
    assert.equal(backend.connections, 0);
  });

  test('render distinguishes JSON, forms and texts as the gateway does without a Content-Type, and has the same limits', async (t) => {
    const hook = {
      secret: SECRET,
      defaults: DEFAULTS,
      allow: ['GET /v2/send'],
      message: '{{who}}{{message}}{{^x}}{{/x}}',
    };
    const file = fileWith(t, { tokens: { hook } });
    const less = fileWith(t, { tokens: { hook }, limits: { body: '1KiB' } });
    const render = (input: string, config = file) => cli(['render', 'hook', '--config', config], { input });
    const rows = literal`
    {"message":"x"} → {"message":"x"}
    'Backup done: \x1b[32m5\x1b[m files\r\n' → {"message":"Backup done: 5 files"}
    'temp=23' → {"message":"temp=23"}
    'message=a+b&view_once=true' → {"message":"a b","view_once":"true"}
    'who=me and you' → {"message":"me and you"}
    'data={"who":1}' → {"message":"1"}
    '---\nfront: matter\n' → {"message":"---\nfront: matter"}
    -- message = x -- f; filename="a/b.txt" = y → {"message":"x","base64_attachments":["data:text/plain;filename=b.txt;base64,eQ=="]}`;
    for (const row of rows.trim().split('\n')) {
      const { body, json } = parseRow(row.trim());
      for (const boundary of ['--limit', '----a b:c']) {
        const form = String(body).replaceAll('--limit', boundary);
        const input = form.replace(/(?<=filename=.*\r\n)/, 'Content-Type: text/plain\r\n');
        const { code, stdout, stderr } = await render(input);
        assert.deepEqual([code, JSON.parse(stdout || '{}')], [0, { ...DEFAULTS, ...json }]);
        const { message = '' } = JSON.parse(stdout);
        const missing = row.includes('who') ? 'message' : 'who';
        const shown = message.includes('\n') ? `gateway: the phone shows\n\n${message}\n\n` : '';
        assert.equal(stderr, `${shown}gateway: this payload has no ${missing}\n`);
      }
    }
    assert.deepEqual([(await render('{x')).code, (await render('{x')).stdout], [1, '']);
    assert.deepEqual([(await render(sized(MIB))).code, (await render(sized(1024), less)).code], [0, 0]);
    assert.match((await render(sized(1025), less)).stderr, /larger than 1KiB, the most that this gateway accepts/);
  });

  test('the last log lines are written before the process exits, whatever the level', async (t) => {
    for (const GATEWAY_LOG_LEVEL of ['info', 'warn']) {
      const { backend } = await startHolding(t);
      // The address of a network without its length turns "listening" into a warning.
      const env = { GATEWAY_LOG_LEVEL, GATEWAY_TRUSTED_PROXIES: '192.168.1.0', GATEWAY_SHUTDOWN: '200ms' };
      const gateway = await startProcess(t, { backend, env });
      const running = ask(gateway, { body: MESSAGE, headers: BEARER });
      await until(() => backend.seen.length === 1);
      const whole = once(gateway.child, 'close');
      await gateway.close();
      assert.equal((await running).status, 504);
      await whole;
      assert.match(gateway.output(), /"message":"request".*"status":504/, GATEWAY_LOG_LEVEL);
    }
  });
});
