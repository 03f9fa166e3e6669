import { execFile, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, readdirSync } from 'node:fs';
import { cp, mkdir, mkdtemp, readFile, stat, symlink, writeFile } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { suite } from 'node:test';
import { inspect, promisify } from 'node:util';
import type { GatewayConfig, TokenConfig } from '../gateway.ts';
import { assert, difference, groupsOf, problemsOf } from './assertions.ts';
import { askAsCurl } from './client.ts';
import { ALL_PAGES, blocks, folder, PACKAGE, PAGES, read, SOURCE, TESTS } from './files.ts';
import { ConfigError, createGateway } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { HERE, isNode } from './runtime.ts';
import { FROM, OTHER, SECRET } from './samples.ts';
import { type Program, program, runProcess, script, startDemo } from './start.ts';

test('npm pack makes a package that runs under its own name once installed, and declares its types', {
  skip: !isNode && 'npm is for Node',
}, async (t) => {
  const dir = folder(t);
  const [source, home] = [join(dir, 'source'), join(dir, 'home')];
  // Packed from a copy, because packing compiles first, and the gateway.mjs here may be the file under test.
  const filter = (path: string): boolean => !/[\\/](?:\.git|node_modules|dist|gateway\.mjs|signal-data)$/.test(path);
  await cp(HERE, source, { recursive: true, filter });
  await symlink(join(HERE, 'node_modules'), join(source, 'node_modules'));
  await mkdir(home);
  const silent = { npm_config_offline: 'true', npm_config_audit: 'false', npm_config_update_notifier: 'false' };
  const env = { PATH: `${dirname(process.execPath)}:${process.env.PATH}`, HOME: dir, ...silent };
  const npm = (cwd: string, ...args: string[]) => promisify(execFile)('npm', args, { cwd, env });
  await npm(source, 'pack', '--pack-destination', dir);
  await npm(home, 'install', join(dir, `${PACKAGE.name}-${PACKAGE.version}.tgz`));
  assert.deepEqual(readdirSync(join(home, 'node_modules')).sort(), ['.bin', '.package-lock.json', PACKAGE.name]);
  const pages = Object.keys(PAGES).filter((page) => !existsSync(join(home, 'node_modules', PACKAGE.name, page)));
  assert.deepEqual(pages, [], 'the package has every page, because they link to each other');
  const [packed = '', tested = ''] = await Promise.all(
    [join(home, 'node_modules', PACKAGE.name, 'gateway.mjs'), program().at(-1)!].map((file) => readFile(file, 'utf8')),
  );
  assert.equal(packed, tested.replace(/^\/\/# sourceMappingURL=.*\n?/m, ''), 'the file that is tested');
  const installed: Program = [join(home, 'node_modules/.bin', PACKAGE.name)];
  assert.equal((await runProcess(['--version'], { env, program: installed })).stdout, `${PACKAGE.version}\n`);
  const { first, close } = await startDemo(t, { env, program: installed });
  assert.equal((await askAsCurl(first)).status, 201);
  await close();
  const code = `import('${PACKAGE.name}').then((m) => m.createGateway({}))`;
  await promisify(execFile)(process.execPath, ['-e', code], { cwd: home });
  // Its types are declared.
  const typed = join(home, 'typed.mts');
  await writeFile(
    typed,
    `import { createGateway, type GatewayConfig } from '${PACKAGE.name}';
const config: GatewayConfig = { listen: '127.0.0.1:0' };
createGateway(config) satisfies { close(): Promise<void> };
// @ts-expect-error
createGateway({ listen: 1 });
`,
  );
  const types = ['--typeRoots', join(HERE, 'node_modules/@types'), '--types', 'node', '--skipLibCheck'];
  const options = ['--ignoreConfig', '--noEmit', '--strict', '--module', 'nodenext', ...types];
  await promisify(execFile)(join(HERE, 'node_modules/.bin/tsc'), [typed, ...options], { cwd: home });
});

suite('the package for Debian', SIDE_BY_SIDE, () => {
  test('keeps its configuration from other users, and has the same bytes wherever it is built', {
    skip: spawnSync('dpkg-deb', ['--version']).status !== 0 && 'dpkg-deb is not here',
  }, async (t) => {
    const dir = folder(t);
    const name = `${PACKAGE.name}_${PACKAGE.version}_all.deb`;
    const build = async (umask: string) => {
      const copy = await mkdtemp(join(dir, 'copy-'));
      for (const file of ['packaging', 'LICENSE']) await cp(join(HERE, file), join(copy, file), { recursive: true });
      const mjs = join(copy, 'gateway.mjs');
      await writeFile(mjs, '#!/usr/bin/env node\n');
      const args = ['-c', `umask ${umask} && packaging/build gateway.mjs ${PACKAGE.version} .`];
      const env = { PATH: process.env.PATH, SOURCE_DATE_EPOCH: '1700000000' };
      assert.equal((await promisify(execFile)('sh', args, { cwd: copy, env })).stdout, `${name}\n`);
      return join(copy, name);
    };
    const deb = await build('022');
    const again = await build('077');
    assert.ok((await readFile(deb)).equals(await readFile(again)), 'in another folder, with another umask');

    const dpkg = async (...args: string[]) => (await promisify(execFile)('dpkg-deb', args)).stdout;
    const rows = (await dpkg('--contents', deb)).matchAll(/^(\S+ \S+) .* \.(\/\S*)$/gm);
    const modes = Object.fromEntries(Array.from(rows, ([, mode, path]) => [path!, mode]));
    assert.equal(modes['/etc/signal-gateway/'], 'drwxr-x--- root/root');
    assert.deepEqual(Object.fromEntries(Object.entries(modes).filter(([path]) => !path.endsWith('/'))), {
      '/etc/signal-gateway/environment': '-rw------- root/root',
      '/usr/bin/signal-gateway': '-rwxr-xr-x root/root',
      '/usr/lib/systemd/system/signal-gateway.service': '-rw-r--r-- root/root',
      '/usr/share/doc/signal-gateway/changelog.gz': '-rw-r--r-- root/root',
      '/usr/share/doc/signal-gateway/copyright': '-rw-r--r-- root/root',
      '/usr/share/signal-gateway/gateway.mjs': '-rwxr-xr-x root/root',
    });
    assert.match(await dpkg('--field', deb), new RegExp(`^Version: ${PACKAGE.version}$`, 'm'));
    assert.match(await dpkg('--field', deb, 'Depends'), /\bnodejs \(>= 20\)/);
    assert.equal(await dpkg('--info', deb, 'conffiles'), '/etc/signal-gateway/environment\n');
    assert.deepEqual([...new Set(groupsOf(ALL_PAGES, /(signal-gateway_[^`\s]*\.deb)/g))], [name]);
  });

  /**
   * Runs the command with the paths of a folder, and programs there that note how they are called. What systemd-run is
   * told to run does run, as systemd starts it: "$$" is a "$", and there are no other variables than those of the unit.
   */
  async function runCommand(
    dir: string,
    args: string[],
    { uid = 0, env = '', input = '', code = 0, state = '', systemd = dir } = {},
  ) {
    const bin = join(dir, 'bin');
    await mkdir(bin, { recursive: true });
    const calls = join(dir, 'calls');
    await writeFile(calls, '');
    const program = (name: string, body = '') =>
      writeFile(join(bin, name), `#!/bin/bash\nprintf '%s\\n' "${name} $*" >> ${calls}\n${body}\n`, { mode: 0o755 });
    await program('chgrp');
    await program(
      'systemd-run', // a "$" alone would be expanded
      `while [[ $1 == --* ]]; do shift; done
      words=()
      for word in "$@"; do
        [[ "\${word//\\$\\$/}" != *\\$* ]] || exit 99
        words+=("\${word//\\$\\$/$}")
      done
      exec env -i ${env} "\${words[@]}"`,
    );
    await program(
      'node',
      `printf '%s\\n' "$@"; env | grep ^GATEWAY_ | sort\ncat\n${
        state === 'interrupted' ? 'kill -TERM $PPID' : ''
      }\nexit ${code}`,
    );
    await program('sleep');
    await program(
      'ss',
      `[ "${state}" != slow ] || [ $(grep -c ^ss ${calls}) = 3 ] && echo 'LISTEN 0 511 *:8880 *:* users:(("node",pid=123,fd=18))'`,
    );
    await program(
      'systemctl',
      `case "$*" in
        cat*) cat ${join(HERE, 'packaging/signal-gateway.service')} ;;
        show*) echo ${state === 'starting' ? 12 : 123} ;;
        *is-enabled*) [ "${state}" != disabled ] ;;
        *is-active*) [ "${state}" = active ] || { [ "${state}" = slow ] && grep -q ' start ' ${calls}; } ;;
      esac`,
    );
    await writeFile(join(bin, 'id'), `#!/bin/sh\necho ${uid}\n`, { mode: 0o755 });
    const text = read('packaging/signal-gateway').replaceAll('/etc/signal-gateway', dir)
      .replaceAll('/usr/bin/node', join(bin, 'node')).replaceAll('/usr/share/signal-gateway/', '')
      .replace('/run/systemd/system', systemd);
    await writeFile(join(dir, 'command'), text, { mode: 0o755 });
    const { status, stdout, stderr } = spawnSync(join(dir, 'command'), args, {
      cwd: dir,
      env: { PATH: `${bin}:${process.env.PATH}`, GATEWAY_LISTEN: 'of the caller', LC_ALL: 'C.UTF-8' },
      encoding: 'utf8',
      input,
    });
    const noted = (await readFile(calls, 'utf8')).split('\n').slice(0, -1);
    const [run = ''] = noted.filter((line) => line.startsWith('systemd-run'));
    return { status, stderr, lines: stdout.split('\n').slice(0, -1), run, calls: noted };
  }

  test('systemd reads the variables for its command as for the service, which sees the same files', async (t) => {
    const dir = folder(t);
    const odd = ['--config', 'a  $HOME ${HOME} $$ "b".json', 'render', 'home', ''];
    const { status, lines, run } = await runCommand(dir, odd, { input: 'the body\n', code: 7 });
    assert.deepEqual([status, ...lines], [7, 'gateway.mjs', ...odd, 'the body']);
    const [, properties = ''] = /^systemd-run --quiet --pipe --wait --collect --unit=\S+ (.*?) \/bin\/sh /.exec(run)!;
    assert.deepEqual(
      properties.split(' --property=').sort(),
      [
        '--property=User=signal-gateway',
        'Environment=GATEWAY_CONFIG=/etc/signal-gateway/gateway.json',
        'EnvironmentFile=-/etc/signal-gateway/environment',
        'PrivateTmp=yes',
        'ProtectHome=yes',
        `WorkingDirectory=-${dir}`,
      ].sort(),
    );
  });

  test('tokens of the variables need no file, for its command and for its service', async (t) => {
    const dir = folder(t);
    const [, started = ''] = /^ExecStart=\/bin\/sh -c '(.*); exec .*'$/m.exec(
      read('packaging/signal-gateway.service'),
    )!;
    assert.ok(read('packaging/signal-gateway').includes(started.replaceAll('$$', '$')), started);
    const config = `GATEWAY_CONFIG=${dir}/gateway.json`;
    const gets = async (env: string) => (await runCommand(dir, ['--check'], { env })).lines.slice(2);
    assert.deepEqual(await gets(config), [config]);
    assert.deepEqual(await gets(`${config} GATEWAY_TOKENS=home=x`), ['GATEWAY_TOKENS=home=x']);
    assert.deepEqual(await gets(`${config} GATEWAY_TOKENS_FILE=x`), ['GATEWAY_TOKENS_FILE=x']);
    await writeFile(join(dir, 'gateway.json'), '{}');
    assert.deepEqual(await gets(`${config} GATEWAY_TOKENS=home=x`), [config, 'GATEWAY_TOKENS=home=x']);
  });

  test('its command names the lines of the variables that systemd ignores', async (t) => {
    const dir = folder(t);
    const rows: [text: string, ...lines: string[]][] = [
      [read('packaging/environment')],
      ['# a "b\n;c\n  # d\n\t\n\r\nGATEWAY_LISTEN=:8880\n \tGATEWAY_CORS\t= x \\\n y \\\n# z\r\nX=1\\\\\nexport'],
      ['GATEWAY_TOKENS="home=a,\nphone: b"\nGATEWAY_CORS=\'it"s\''],
      ['A="x\n# "\nB', '3 is not NAME=VALUE'],
      ['A="x\ny\nz"\nB', '4 is not NAME=VALUE'],
      ['A=x \\\n# z\nB', '3 is not NAME=VALUE'],
      ['export GATEWAY_LISTEN=:1', '1 is not NAME=VALUE'],
      ['- A=1\nB: 2\nC\nD-E=3\n1F=4', ...[1, 2, 3, 4, 5].map((line) => `${line} is not NAME=VALUE`)],
      ['\uFEFFGATEWAY_LISTEN=:1\nX', '1 begins with an invisible byte order mark', '2 is not NAME=VALUE'],
    ];
    for (const [text, ...lines] of rows) {
      await writeFile(join(dir, 'environment'), text);
      const { status, stderr } = await runCommand(dir, ['--check']);
      assert.deepEqual([status, ...stderr.split('\n')], [
        0,
        ...lines.map((line) => `warning: ${dir}/environment:${line}, so it is ignored`),
        '',
      ], text);
    }
    for (const [text, isIgnored] of [['A=k\xFCche', true], ['# k\xFCche\nA=b', false]] as const) {
      await writeFile(join(dir, 'environment'), text, 'latin1');
      const { stderr } = await runCommand(dir, ['--check']);
      assert.equal(stderr, isIgnored ? `warning: ${dir}/environment is not UTF-8, so all of it is ignored\n` : '');
    }
  });

  test('add and remove write as root, and add starts the service, and waits until it listens', async (t) => {
    const dir = folder(t);
    const file = join(dir, 'gateway.json');
    const env = `PATH=${dir}/bin:${process.env.PATH} GATEWAY_CONFIG=${file}`;
    await writeFile(file, '{}', { mode: 0o600 });
    const failed = await runCommand(dir, ['add', 'home'], { env, code: 2 });
    assert.deepEqual([failed.status, failed.calls.length], [2, 3], 'nothing follows a failure');
    assert.doesNotMatch(failed.run, /User=/);
    assert.equal((await stat(file)).mode & 0o777, 0o600);

    const added = ['--backend', 'http://nas:8080', 'add', 'home'];
    const done = await runCommand(dir, added, { env });
    assert.deepEqual([done.status, done.stderr, ...done.lines], [
      0,
      `The service has started, and listens. Its variables are in ${dir}/environment.\n`,
      'gateway.mjs',
      ...added,
      `GATEWAY_CONFIG=${file}`,
    ]);
    assert.deepEqual(done.calls.slice(2), [
      'node gateway.mjs --backend http://nas:8080 add home',
      `chgrp signal-gateway ${file}`,
      'systemctl --quiet is-enabled signal-gateway',
      'systemctl --quiet is-active signal-gateway',
      'systemctl start signal-gateway',
      'systemctl show --property=MainPID --value signal-gateway',
      'ss -Hltnp',
    ]);
    assert.equal((await stat(file)).mode & 0o777, 0o640);

    const stuck = await runCommand(dir, ['add', 'home'], { env, state: 'starting' });
    assert.equal(stuck.status, 1);
    assert.match(stuck.stderr, /^signal-gateway: the service does not listen: .* shows why\n$/);
    assert.equal(stuck.calls.filter((line) => line.startsWith('ss ')).length, 1, 'it is not waited for');
    const slow = await runCommand(dir, ['add', 'home'], { env, state: 'slow' });
    const look = ['systemctl show --property=MainPID --value signal-gateway', 'ss -Hltnp'];
    const pause = ['systemctl --quiet is-active signal-gateway', 'sleep 0.3'];
    assert.deepEqual([slow.status, slow.calls.slice(-10)], [0, [...look, ...pause, ...look, ...pause, ...look]]);
    for (
      const [args, state] of [[['add', 'x'], 'disabled'], [['add', 'x'], 'active'], [['remove', 'x'], '']] as const
    ) {
      const { status, stderr, calls, run } = await runCommand(dir, [...args], { env, state });
      assert.doesNotMatch(run, /User=/);
      assert.deepEqual([status, stderr, calls.filter((line) => line.includes(' start '))], [0, '', []], state);
    }
  });

  test('its command needs root, but for the overview, the version and the demo', async (t) => {
    const dir = folder(t);
    const { status, stderr, calls } = await runCommand(dir, ['--check'], { uid: 1000 });
    assert.deepEqual([status, calls], [2, []]);
    assert.match(stderr, /write sudo before it\n$/);
    for (const args of [['--help'], ['-v'], ['--listen', ':1', '--demo']]) {
      const { status, calls } = await runCommand(dir, args, { uid: 1000 });
      assert.deepEqual([status, calls], [0, [`node gateway.mjs ${args.join(' ')}`]]);
    }
  });

  test('its command needs systemd, and a signal that ends it ends what systemd runs', async (t) => {
    const dir = folder(t);
    const none = await runCommand(dir, ['--check'], { systemd: '/no/such/folder' });
    assert.deepEqual([none.status, none.calls], [1, []]);
    assert.match(none.stderr, /systemd, which reads its variables, does not run here\n$/);
    const { run, calls } = await runCommand(dir, ['--check'], { state: 'interrupted' });
    const [, unit] = /--unit=(\S+)/.exec(run)!;
    assert.equal(calls.at(-1), `systemctl stop ${unit}`);
  });

  test('its service is started if there is a file or a variable with tokens, and otherwise says what makes one', async (t) => {
    const file = join(folder(t), 'gateway.json');
    const unit = read('packaging/signal-gateway.service');
    const [, condition = ''] = /^ExecCondition=\/bin\/sh -c '(.*)'$/m.exec(unit)!;
    const starts = (env: NodeJS.ProcessEnv = {}): [number | null, string] => {
      const all = { PATH: process.env.PATH, GATEWAY_CONFIG: file, ...env };
      const { status, stdout } = spawnSync('sh', ['-c', condition.replaceAll('$$', '$')], {
        env: all,
        encoding: 'utf8',
      });
      return [status, stdout];
    };
    const advice = `There is no token yet: sudo signal-gateway add NAME RECIPIENT makes one, in ${file}\n`;
    assert.deepEqual(starts(), [1, advice]);
    assert.deepEqual(starts({ GATEWAY_TOKENS: 'x' }), [0, '']);
    assert.deepEqual(starts({ GATEWAY_TOKENS_FILE: 'x' }), [0, '']);
    await writeFile(file, '{}');
    assert.deepEqual(starts(), [0, '']);
    assert.match(unit, /^Wants=(network-online\.target time-sync\.target)\nAfter=\1$/m);
    assert.match(unit, /^SyslogIdentifier=signal-gateway$/m);
    assert.match(unit, /^RestartPreventExitStatus=2$/m);
  });

  test('its variables keep the bytes of 1.0.0, because otherwise an upgrade asks whoever has changed them', () => {
    const digest = createHash('sha256').update(read('packaging/environment')).digest('hex');
    assert.equal(digest, 'a867ed649d26bda70da4a3849f1bdf42df26e7b8f616006b77f185af2ae47ae4');
  });

  test('its unit can be reloaded at any time, and a system call that it does not allow is an error, not the end', () => {
    const unit = read('packaging/signal-gateway.service');
    // Node 20 of Debian 13 asks for memory protection keys, where the processor has some.
    assert.match(unit, /^SystemCallFilter=@system-service\n(?:#.*\n)*SystemCallErrorNumber=EPERM$/m);
    // SIGHUP ends a process that does not listen yet, and systemd would take that for a success.
    assert.match(unit, /^ExecReload=\/bin\/sh -c 'kill -HUP \$\$MAINPID'$[^]*^RestartForceExitStatus=SIGHUP$/m);
  });
});

suite('module', SIDE_BY_SIDE, () => {
  test('only the text "*" is everyone: a value of an embedding program that is printed as "*" is a mistake', () => {
    const star = { toString: () => '*' };
    const digits = Object.assign(() => {}, { toString: () => FROM });
    for (const [value, place] of [[[['*']], '[0]'], [star, ''], [[star], '[0]'], [[digits], '[0]']] as const) {
      for (const key of ['senders', 'recipients']) {
        const token = { secret: SECRET, [key]: value } as unknown as TokenConfig;
        const [problem = ''] = problemsOf(() => createGateway({ tokens: { test: token } }));
        assert.ok(problem.startsWith(`tokens.test.${key}${place}: `), `${key}: ${problem}`);
      }
    }
    const backend = { url: 'http://127.0.0.1:1', parallel: digits } as unknown as GatewayConfig['backend'];
    assert.equal(problemsOf(() => createGateway({ backend: backend! })).length, 1);
  });

  test('an embedding program gets a ConfigError for an unknown option, and a key that is undefined counts as absent', () => {
    const [, times = ''] = /const TIMES = \{([^]*?)\n\}/.exec(SOURCE) ?? [];
    const declared = ['now', 'log', ...groupsOf(times, /^ {2}(\w+):/gm)];
    assert.ok(declared.includes('log') && declared.length > 5, String(declared));
    const all = Object.fromEntries(declared.map((name) => [name, undefined]));
    // As called from JavaScript: the types do not allow undefined.
    const make = createGateway as (...given: unknown[]) => unknown;
    const config = { listen: '127.0.0.1:0', backend: undefined, rate: undefined, typo: undefined };
    make({ ...config, tokens: { a: { secret: SECRET, rate: undefined }, b: undefined } }, all);
    const fail = (...given: unknown[]): InstanceType<typeof ConfigError> => {
      try {
        make(...given);
      } catch (error) {
        assert.ok(error instanceof ConfigError, String(error));
        return error;
      }
      throw new Error('there was no error');
    };
    const { name, problems } = fail({ lisen: 1 }, { stallTimeout: 1, log: null, [SECRET]: 1, lingerMs: 1 });
    assert.equal(name, 'ConfigError');
    assert.deepEqual(problems.map((problem) => problem.split('; ')[0]), [
      'lisen: is not a setting',
      'options.stallTimeout: is not a setting',
      'options.log: null is not allowed',
      'options[2]: is not a setting',
    ]);
    assert.ok(problems[1]!.includes('stallTimeoutMs'), problems[1]!);
    assert.match(fail({ tokens: { a: undefined } }).message, /tokens: contains no token/);
    assert.match(fail({ tokens: { a: { secret: undefined } } }).message, /tokens\.a: needs /);
    for (const wrong of [undefined, null, [], 'x']) assert.doesNotMatch(fail(wrong).message, /the file/);
  });

  test('createGateway returns exactly what its type declares, which shows no secret when a program prints it', () => {
    const backend = { url: `http://api:${OTHER}@127.0.0.1:1` };
    const gateway = createGateway({ backend, tokens: { test: { secret: SECRET } } });
    assert.deepEqual(Object.keys(gateway), ['server', 'listen', 'close', 'reload']);
    const shown = inspect(gateway, { depth: 20, showHidden: true });
    for (const secret of [SECRET, OTHER, createHash('sha256').update(SECRET).digest('hex')]) {
      assert.ok(!shown.includes(secret), secret);
    }
  });

  test('importing gateway.ts does nothing and prints nothing; the example of embedding runs', async (t) => {
    const rows = [["await import('./gateway.ts');", /^$/], [blocks('ts')[0]!, /^http:\/\/127\.0\.0\.1:\d+$/m]] as const;
    for (const [example, printed] of rows) {
      const embedding = script(t, example.replace("'./gateway.ts'", JSON.stringify(program().at(-1))));
      const env = { GATEWAY_LISTEN: 'nonsense', APP_TOKEN: SECRET };
      const { code, stdout, stderr } = await runProcess([], { program: embedding, env });
      assert.deepEqual([code, stderr], [0, ''], stdout);
      assert.match(stdout, printed);
    }
  });

  test('gateway.ts is one file of erasable TypeScript that imports only node: modules and exports little', () => {
    for (const from of groupsOf(SOURCE, /^import .* from '([^']+)';$/gm)) assert.match(from, /^node:/);
    assert.doesNotMatch(SOURCE, /^\s*(?:export )?(?:enum|namespace|declare|import \w+ =)\b|\brequire\(/m);
    const exported = groupsOf(SOURCE, /^(export [^;]*;)/gm).map((text) =>
      text.replace(/\s+/g, ' ').replace(', }', ' }')
    );
    assert.deepEqual(exported, [
      'export { BodyScan, CALLS, ConfigError, createGateway, loadSettings, METHOD_NAMES, Metrics, parseTarget, RateLimiter, ROUTES, run, Template };',
      'export type { Gateway, GatewayConfig, GatewayOptions, TokenConfig };',
    ]);
  });
});

test('each workaround names what shows that it is needed: scripts of findings/, which its README lists, and tests', () => {
  const comments = Array.from(SOURCE.matchAll(/(?:^ *\/\/ .*\n)+/gm), ([text]) => text.replace(/\n *\/\/ /g, ' '));
  const workarounds = comments.filter((text) => /UNTIL [^…]/.test(text));
  assert.ok(workarounds.length > 10, `${workarounds.length} workarounds`);
  assert.deepEqual(workarounds.filter((text) => !text.includes('findings/')), [], 'what names none');
  const scripts = readdirSync(join(HERE, 'findings')).filter((name) => name.endsWith('.sh'));
  const named = groupsOf(workarounds.join('\n'), /findings\/([\w.-]+\.sh)/g);
  assert.deepEqual(named.filter((name) => !scripts.includes(name)), [], 'scripts that are not there');
  const listed = groupsOf(read('findings/README.md'), /^\| `([\w.-]+)` \|/gm).map((name) => `${name}.sh`);
  assert.deepEqual(difference('findings/', scripts, 'findings/README.md', listed), []);
  const titles = groupsOf(TESTS, /^ *(?:test|table)\(\s*(?:'|"|`)(.*)/gm);
  const quoted = groupsOf(workarounds.join('\n'), /tests? ("[^)]*)\)/g).flatMap((list) =>
    groupsOf(list, /"([^"]+?)…?"/g)
  );
  assert.ok(quoted.length > 0, 'no test is quoted');
  assert.deepEqual(
    quoted.filter((name) => !titles.some((title) => title.includes(name))),
    [],
    'tests that are not there',
  );
});
