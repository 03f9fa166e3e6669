import { existsSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { suite } from 'node:test';
import { assert, difference, groupsOf } from './assertions.ts';
import { startBackend } from './backend.ts';
import { ask, statusesOf } from './client.ts';
import { TOKEN_SETTINGS } from './configs.ts';
import {
  ALL_PAGES,
  blocks,
  INSTALLING,
  MANUAL,
  PACKAGE,
  PAGES,
  read,
  README,
  SETTING_ROWS,
  settingsIn,
  SOURCE,
  TESTS,
} from './files.ts';
import { KNOWN_ROUTES } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { HERE } from './runtime.ts';
import { basic, BEARER, MESSAGE, MIB, SECRET } from './samples.ts';
import { cli, startGateway } from './start.ts';

const { stdout: HELP } = await cli(['--help']);

/** A section of a page, without its heading. */
const partOf = (page: string, heading: string): string => page.split(`\n## ${heading}\n`)[1]!.split('\n## ')[0]!;

/** The problems in gateway.ts, and their statuses. */
const [TABLE] = /const PROBLEMS = \{([^]*?)\n\}/.exec(SOURCE)!;

const PROBLEMS = Array.from(
  TABLE.matchAll(/^ {2}(\w+): \[\s*(\d+)/gm),
  ([, code, status]) => [code!, status!] as const,
);

suite('pages', SIDE_BY_SIDE, () => {
  test("the pages' tables of settings match the code", () => {
    const rows = Array.from(HELP.matchAll(/^ {2}([a-z][\w.]*)(?: +\[(.+)\])?\n {6}(.*)$/gm));
    const listed = settingsIn(MANUAL, 'Every setting');
    const pathsOf = (table: string[]): string[] => table.map((row) => row.split('`')[1]!);
    const paths = rows.map(([, path]) => path!);
    assert.ok(paths.length >= 20, `the settings in --help: ${paths}`);
    assert.deepEqual(difference('--help', paths, 'the table of docs/reference.md', pathsOf(listed)), []);
    assert.deepEqual(pathsOf(listed), paths, 'the order in docs/reference.md is that of --help');
    for (const [i, [, path, fallback, help]] of rows.entries()) {
      listed[i] = listed[i]!.replaceAll('\\*', '*');
      const row = `| \`${path}\` | ${help}`;
      // It may continue.
      assert.ok(listed[i]!.startsWith(row), `docs/reference.md  ${listed[i]}\n--help            ${row}`);
      assert.equal(
        /Default: `(.*)` \|$/.exec(listed[i]!)?.[1],
        fallback,
        `the default of ${path} in docs/reference.md`,
      );
    }
    const [, once] = /^const START_ONLY = \[([^\]]*)\]/m.exec(SOURCE)!;
    const [, needRestart] = /\nThese need a restart:\n\n- (.*) and turning TLS/.exec(PAGES['docs/operating.md']!)!;
    const covered = groupsOf(needRestart!, /`([\w.]+)`/g);
    const isCovered = (path: string) => covered.includes(path) || covered.includes(path.split('.')[0]!);
    const unsaid = groupsOf(once!, /'([\w.]+)'/g).filter((path) => !isCovered(path));
    assert.deepEqual(unsaid, [], '"These need a restart" of docs/operating.md lacks these of START_ONLY');
    const common = settingsIn(README, 'What a token may do');
    const ofTokens = TOKEN_SETTINGS.filter((name) => name !== 'secretFile');
    assert.deepEqual(difference('"What a token may do" of README.md', pathsOf(common), 'the code', ofTokens), []);
    for (const [name, path] of [['allow', 'allow'], ['methods', 'auth.methods']] as const) {
      const [, , fallback] = rows.find((row) => row[1] === path)!;
      const row = common.find((line) => line.startsWith(`| \`${name}\` |`))!;
      assert.ok(row.endsWith(`Default: \`${fallback}\` |`), `README.md: ${row}`);
    }
  });

  test('docs/reference.md lists every error code with its status, and every setting of a token', () => {
    for (const [code, status] of PROBLEMS) {
      const isListed = code === 'client_left' || new RegExp(`^\\| ${status} .*\`${code}\``, 'm').test(MANUAL);
      assert.ok(isListed, `docs/reference.md has no row "${status} … \`${code}\`" in "What it refuses"`);
    }
    const rows = groupsOf(partOf(MANUAL, 'What it refuses'), /^\| (\d+ `\w+`)/gm);
    const codes = PROBLEMS.filter(([code]) => code !== 'client_left').map(([code, status]) => `${status} \`${code}\``);
    assert.deepEqual(difference('"What it refuses" of docs/reference.md', [...new Set(rows)], 'PROBLEMS', codes), []);
    const ofTokens = settingsIn(MANUAL, 'Settings of a token').map((row) => row.split('`')[1]!);
    assert.deepEqual(
      difference('"Settings of a token" of docs/reference.md', ofTokens, 'the code', [...TOKEN_SETTINGS, 'secret']),
      [],
    );
  });

  test('docs/reference.md lists the commands and clients of --help, and SECURITY.md a promise for each test', () => {
    const section = partOf(MANUAL, 'Commands');
    const [, usage] = /\nUsage:\n([^]*?)\nFlags: /.exec(HELP)!;
    const listed = groupsOf(section, /^\| (`.*?) \|/gm).flatMap((cell) => groupsOf(cell, /`(--\w+|[a-z]+)/g));
    const known = [...groupsOf(usage!, /^ {2}gateway\.mjs (--\w+|[a-z]+)/gm), '--help', '--version'];
    assert.deepEqual(difference('"Commands" of docs/reference.md', listed, '--help', known), []);
    const [clients] = groupsOf(HELP, /^CLIENT: ([^]*?)\.$/gm);
    const [, choice] = /\n- `--for CLIENT`([^]*?)\n- /.exec(section)!;
    const named = groupsOf(choice!, /`([a-z0-9-]+)`/g).filter((name) => !['allow', 'methods'].includes(name));
    assert.deepEqual(difference('"--for CLIENT" of docs/reference.md', named, '--help', clients!.split(/,\s+/)), []);

    const promises = groupsOf(partOf(PAGES['SECURITY.md']!, 'What is promised'), /^- (.*)/gm);
    const [tests] = read('gateway.test.ts').split('What README.md promises besides');
    assert.equal(promises.length, groupsOf(tests!, /^test\((.*)/gm).length);
  });

  test('docs/reference.md lists the groups of allow with the same routes as gateway.ts', () => {
    const groups = [...new Set(KNOWN_ROUTES.map(({ group }) => group))];
    const routes = groups.map((group) => {
      const own = KNOWN_ROUTES.filter((route) => route.group === group);
      return [group, own.map(({ method, template }) => `${method} ${template}`)] as const;
    });
    const table = partOf(MANUAL, 'Groups and patterns');
    const rows = Array.from(table.matchAll(/^\| `(\w+)` \| (.*) \|$/gm), ([, group, cell]) => [group!, cell!] as const);
    assert.deepEqual(difference('ROUTES', groups, 'the table of docs/reference.md', rows.map(([group]) => group)), []);
    for (const [group, listed] of routes) {
      assert.ok(listed.length > 0, group);
      const [, cell] = rows.find(([known]) => known === group)!;
      const named = groupsOf(cell, /`((?:[A-Z]+ )?\/[^`]*)`/g);
      // A single route, or the first segments of all routes below them.
      const [, base] = /^(\/\w+\/[\w-]+)/.exec(named[0]!) ?? [];
      const prefixes = listed.map((route) =>
        /(\/api\/v1\/\w+|\/metrics|\/\w+\/[\w-]+)/.exec(route)?.[1] ??
          assert.fail(`${route} has a new shape: say here what the page calls it`)
      );
      const wanted = [...new Set(base ? prefixes : listed)];
      const row = `the row "${group}" of docs/reference.md`;
      assert.deepEqual(difference(row, named, `the group "${group}" of ROUTES`, wanted), []);
    }
    assert.match(rows.find(([group]) => group === 'messaging')![1], /^`send`, `receive`, and all below /);
  });

  test('every problem is the expected outcome of a test', () => {
    assert.ok(PROBLEMS.length > 20, `only ${PROBLEMS}`);
    const unprovoked = PROBLEMS.filter(([code, status]) =>
      !TESTS.includes(`${status} ${code}`) && !TESTS.includes(`'${code}'`)
    );
    assert.deepEqual(unprovoked, [], 'no test provokes these rows of PROBLEMS');
  });

  test('every link has a target', () => {
    const headingsOf = (page: string) => groupsOf(page.replace(/^```[^]*?^```$/gm, ''), /^#{2,3} (.*)$/gm);
    /** The anchors of a page, which GitHub generates from its headings. */
    const anchorsOf = (page: string): string[] =>
      headingsOf(page).map((heading) => heading.toLowerCase().replace(/[^\w\- ]/g, '').replaceAll(' ', '-'));
    for (const [name, page] of Object.entries(PAGES)) {
      for (const [link, file, anchor] of page.matchAll(/\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)/g)) {
        // The releases and issues, relative to the page's own address at GitHub (/OWNER/REPOSITORY/blob/BRANCH/…).
        if (/^[./]+\/(?:releases(?:\/latest)?|issues)$/.test(file!)) {
          assert.equal(file!.split('../').length, 2 + name.split('/').length, `${name} ${link}`);
          continue;
        }
        const path = file ? join(dirname(name), file) : name;
        const target = PAGES[path];
        if (target === undefined) { // a picture, a folder, or the page of the measurements
          assert.ok(existsSync(join(HERE, path)) && !anchor, `${name} ${link}`);
          continue;
        }
        if (anchor) assert.ok(anchorsOf(target).includes(anchor), `${name} ${link}`);
      }
    }
    const anchors = anchorsOf(README);
    assert.equal(new Set(anchors).size, anchors.length);
  });

  test('the pages name only existing variables, options, commands and scripts', () => {
    // Those of the backend, the tests, the shell, netdata, and clients.
    const others = ['MODE', 'TEST_SEED', 'TEST_GATEWAY_FILE', 'SEND', 'DEFAULT_RECIPIENT_CUSTOM'];
    others.push('SIGNAL_API_URL', 'SIGNAL_ACCOUNT', 'API_RETRIES');
    others.push('SIGNAL_HTTP_URL', 'SIGNAL_API_TOKEN', 'SIGNAL_SERVICE_URL');
    const known = new Set([...SETTING_ROWS.map(([, env]) => env), 'GATEWAY_TOKENS_FILE', 'GATEWAY_CONFIG', ...others]);
    const unit = read('packaging/signal-gateway.service');
    const used = [unit, ...blocks('sh|yaml|ini'), ...groupsOf(ALL_PAGES, /`([^`\n]+)`/g)]
      .flatMap((text) => groupsOf(text, /(?:^|[\s`=-])([A-Z][A-Z_]{2,})(?:=|: )/gm));
    for (const name of ['GATEWAY_TRUSTED_PROXIES', 'GATEWAY_TOKENS', 'GATEWAY_TLS_KEY']) {
      assert.ok(used.includes(name), name);
    }
    assert.deepEqual(used.filter((name) => !known.has(name)), []);

    const command = /node(?: --max-\S+)? \/?(?:\S*\/)?gateway\.m?[tj]s([^|`#\n]*)/g;
    const commands = Array.from(ALL_PAGES.matchAll(command));
    assert.ok(commands.length > 10, `only ${commands.length} commands`);
    for (const [command, args] of commands) {
      for (const [flag] of args!.matchAll(/--\w+/g)) assert.ok(HELP.includes(flag), command);
      const [word] = /^ [a-z]+/.exec(args!) ?? [];
      if (word) assert.ok(HELP.includes(`gateway.mjs${word} `), command);
    }
    for (const script of groupsOf(ALL_PAGES, /npm run ([\w:]+)/g)) assert.ok(PACKAGE.scripts[script], script);
  });

  test('the regular expressions for fail2ban match refusals in both log formats, and no client can get another address banned', async (t) => {
    const [, lines] = /^failregex = ([^]*?)^datepattern/m.exec(PAGES['docs/operating.md']!)!;
    const rules = lines!.trim().split(/\n\s+/).map((rule) => new RegExp(rule.replace('<ADDR>', '([\\d.:]+)')));
    for (const rule of rules) {
      assert.match(rule.source, /^\^(?!.*\.\*.*\(\[)/, 'anchored, and without .* before the address');
    }
    // What a client can write into the log line.
    const inText = 'https://client=192.0.2.9';
    const inJson = 'https://","client":"192.0.2.9","status":401,"code":"unauthorized"';
    for (const format of ['text', 'json'] as const) {
      // The backend's own 401 for a valid token is not a wrong token.
      const backend = await startBackend(t, (_, res) => void res.writeHead(401).end());
      const gateway = await startGateway(t, backend, { log: { format } });
      assert.equal((await ask(gateway, { headers: BEARER })).status, 401);
      const wrong = { authorization: 'Bearer wrong' };
      const named = { authorization: basic(`root:${SECRET}`) }; // the line has the token's name
      const headers = [wrong, {}, named, ...[inText, inJson].flatMap((origin) => [{ origin }, { origin, ...wrong }])];
      for (const each of headers) assert.equal((await ask(gateway, { headers: each })).status, 401);
      const found = gateway.log.flatMap((line) => rules.flatMap((rule) => rule.exec(line)?.[1] ?? []));
      assert.deepEqual(found, headers.map(() => '127.0.0.1'), `${gateway.log}`);
      const isShown = gateway.log.some((line) => line.includes('192.0.2.9'));
      assert.ok(isShown, 'the origin is in the log, so that the filter has met it');
    }
  });

  test('the log contains what the page on operating searches for, in the same words', async (t) => {
    const [, table = ''] = /\n\| look for \| it means \|\n([^]*?)\n\n/.exec(PAGES['docs/operating.md']!)!;
    const words = table.split('\n').flatMap((row) => groupsOf(row.split(' | ')[0]!, /`([^`]+)`/g));
    assert.ok(words.length >= 8, words.join());
    const answers = [400, 429, 500];
    const backend = await startBackend(t, (_, res) => void res.writeHead(answers.shift()!).end());
    const gateway = await startGateway(t, backend, { log: { format: 'text' } });
    const send = { body: MESSAGE, headers: BEARER };
    assert.deepEqual(await statusesOf(gateway, send, send, send), [400, 429, 500]);
    for (const word of words) {
      // A line for each status. The other lines are messages and codes of problems.
      const isThere = word.startsWith('status=') ? gateway.log.join('\n') : SOURCE;
      assert.ok(isThere.includes(word.replace('code=', '')), `${word}: ${gateway.log}`);
    }
  });

  test('the compose file is a whole configuration: one token, confined, once it has a secret', async () => {
    const [backend = '', service = ''] = blocks('yaml', README)[0]!.split('  gateway:');
    assert.doesNotMatch(backend, /^ +ports:/m, 'the backend has no port');
    assert.doesNotMatch(service, /volumes:|command:/);
    const pairs = Array.from(
      service.matchAll(/^ {6}([A-Z_]+): (?:"([^"]*)"|(\S+))/gm),
      ([, name, quoted, plain]) => [name!, quoted ?? plain!] as const,
    );
    const env = Object.fromEntries(pairs);
    const names = ['GATEWAY_TOKENS', 'GATEWAY_DEFAULTS_NUMBER', 'GATEWAY_DEFAULTS_RECIPIENTS', 'GATEWAY_BACKEND_URL'];
    assert.deepEqual(Object.keys(env), names);
    const check = (env: NodeJS.ProcessEnv) => cli(['--check'], { env: { ...env, GATEWAY_LISTEN: ':8880' } });
    const asItIs = await check(env);
    assert.equal(asItIs.code, 2, 'nothing starts before there is a secret');
    assert.match(asItIs.stderr, /the secret is shorter than 16 characters/);
    const { code, stdout } = await check({ ...env, GATEWAY_TOKENS: env.GATEWAY_TOKENS!.replace(/=.*/, `=${SECRET}`) });
    assert.equal(code, 0, stdout);
    assert.match(stdout, /sends from +\+15550100001\n +sends to +\+15550100002\n/);
  });

  test('docker run and the compose file start the gateway in the same way', () => {
    const service = blocks('yaml', README)[0]!.split('  gateway:')[1]!;
    const mount = /^ +- \.\/(gateway:\S+)$/m.exec(INSTALLING)![1]!;
    const [run] = /^docker run -d [^]*?\n(?=```)/m.exec(INSTALLING)!;
    const [, image] = /image: (.*)/.exec(service)!;
    for (const part of [image!, `"$PWD/${mount}"`, /GATEWAY_BACKEND_URL: (.*)/.exec(service)![1]!]) {
      assert.ok(run.includes(part), part);
    }
    const options = {
      'init: true': '--init',
      'read_only: true': '--read-only',
      'cap_drop: [ALL]': '--cap-drop ALL',
      'no-new-privileges': '--security-opt no-new-privileges',
    };
    for (const [key, option] of Object.entries(options)) assert.ok(service.includes(key) && run.includes(option), key);
    const [, folder] = /^WORKDIR (.*)$/m.exec(read('Dockerfile'))!;
    assert.equal(folder, mount.split(':')[1], 'the image reads what is mounted');
  });

  test('every example that starts Node for good limits its young generation, as the benchmark measures it', () => {
    const [, option] = /^const YOUNG = '(.*)';$/m.exec(read('bench/run.ts'))!;
    const dockerfile = read('Dockerfile');
    const starts = groupsOf(
      ALL_PAGES + dockerfile + read('packaging/signal-gateway.service'),
      /^ *((?:command: |ENTRYPOINT )\["node".*\]|ExecStart=.*\/usr\/bin\/node.*)/gm,
    );
    assert.equal(starts.length, 2, starts.join('\n')); // the unit, and the image
    for (const start of starts) assert.ok(start.includes(option!), start);
  });

  test('the pages explain what each reason of a 401 means', () => {
    const troubles = PAGES['docs/troubleshooting.md']!;
    for (const reason of groupsOf(troubles + PAGES['docs/operating.md'], /reason=([a-z]\w+)/g)) {
      assert.ok(SOURCE.includes(reason), `the pages explain reason=${reason}, which gateway.ts does not have`);
    }
    const reasons = 'no_credential unknown_token expired_token method_not_accepted wrong_user unknown_scheme';
    for (const reason of reasons.split(' ')) {
      assert.ok(SOURCE.includes(`'${reason}'`), `gateway.ts has no reason '${reason}'`);
      assert.ok(troubles.includes(`\n| \`${reason}\`: `), `docs/troubleshooting.md has no row for \`${reason}\``);
    }
    // "When it stops working" has the backend's words.
    const own = troubles.replace(partOf(troubles, 'When it stops working'), '');
    const sentences = groupsOf(own, /^\|[^|]*?[`"]([a-z][\w, :]{16,})[`"]/gm);
    assert.ok(sentences.length >= 12, sentences.join());
    for (const said of sentences) assert.ok(SOURCE.includes(said), `docs/troubleshooting.md, not gateway.ts: ${said}`);
  });

  test('README.md says how long gateway.ts and its function handle are', () => {
    const [, lines, steps] = /about ([\d,]+) lines, and the way of a\s+request is one function of (\d+), `handle`/.exec(
      README,
    )!;
    const [handle] = /^async function handle\([^]*?^}$/m.exec(SOURCE)!;
    for (const [said, text] of [[lines!, SOURCE], [steps!, handle]] as const) {
      const counted = text.split('\n').length;
      const isRound = Math.abs(counted / Number(said.replace(',', '')) - 1) < 0.1;
      assert.ok(isRound, `${counted} lines, not about ${said}`);
    }
  });

  const UNITS = ['_MS 86400000 d', '_MS 1000 s', '_MS 1 ms', `_BYTES ${MIB} MiB`, '_BYTES 1024 KiB', ' 1 '].map((
    unit,
  ) => unit.split(' '));

  /** The constants that a client can meet, each with words of its row in docs/reference.md. */
  const MET = {
    headersTimeoutMs: "time for a request's headers",
    HEADERS_LIMIT: 'header fields of a request',
    PACE_BYTES: 'what must arrive of a body',
    KEEP_ALIVE_TIMEOUT_MS: 'time between two requests of a connection',
    stallTimeoutMs: 'time for the whole body of an unauthenticated client',
    HEAD_LIMIT_BYTES: 'checked before the backend is contacted',
    PAYLOAD_LIMIT_BYTES: 'a body for a token with `defaults`',
    CALL_LIMIT_BYTES: 'size of a call',
    HELD_LIMIT_BYTES: 'memory for all bodies',
    RENDER_LIMIT_BYTES: 'longest message',
    FAILURE_RATE: 'wrong credentials of one address',
    PIPELINE_LIMIT: 'ahead of their responses',
    BACKLOG_LIMIT_BYTES: 'a WebSocket client is dropped',
    BUSY_RETRY_MS: '`Retry-After` of 503 `busy`',
    TEXT_LIMIT_BYTES: 'length of an account',
    NESTING_LIMIT: 'levels of objects and lists',
  };

  test('the numbers of gateway.ts that a client can meet are in docs/reference.md', () => {
    const isNumber = /^(?:const | {2})([A-Z_]+|\w+Ms)(?: =|:) ((?:[\d_ *]+|\{ count: .*\}))[;,]$/gm;
    const found = Array.from(SOURCE.matchAll(isNumber), ([, limit, value]) => ({ limit: limit!, value: value! }));
    assert.ok(found.length > 20, `only ${found.length} numbers`);
    const inWords = (value: string, limit: string): string => {
      const [, count, perMs] = /count: (\d+), perMs: ([\d_]+)/.exec(value) ?? [];
      if (count) return `${count} in ${inWords(perMs!, '_MS')}`;
      const number = value.replaceAll('_', '').split('*').reduce((product, factor) => product * Number(factor), 1);
      const [, size, unit] = UNITS.find(([end, size]) =>
        limit.replace(/Ms$/, '_MS').endsWith(end!) && number % Number(size) === 0
      )!;
      return unit ? `${number / Number(size)} ${unit}` : number.toLocaleString('en');
    };
    const rows = Array.from(partOf(MANUAL, 'Limits').matchAll(/^\| (.+) \| (.*\d.*) \|$/gm), ([, ...row]) => row);
    assert.equal(rows.length, Object.keys(MET).length, 'each row of "Limits" has its number in MET');
    for (const [limit, words] of Object.entries(MET)) {
      const { value } = found.find((each) => each.limit === limit) ?? assert.fail(`gateway.ts has no ${limit}`);
      const listed = rows.filter(([what]) => what!.includes(words)).map(([, value]) => value);
      assert.deepEqual(listed, [inWords(value, limit)], `"Limits" of docs/reference.md: ${words}, ${limit}`);
    }
  });
});
