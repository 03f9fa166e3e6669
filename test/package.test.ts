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
import { ALL_PAGES, blocks, folder, INSTALLING, PACKAGE, PAGES, read, SOURCE, TESTS } from './files.ts';
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

  /** Runs the command with the paths of a folder, and programs there that note how they are called. */
  async function runCommand(dir: string, uid: number, args: string[], code = 0) {
    const bin = join(dir, 'bin');
    await mkdir(bin, { recursive: true });
    const note = (name: string) => `#!/bin/sh\necho "${name} $*"\n`;
    for (const name of ['setpriv', 'chgrp', 'systemctl']) {
      await writeFile(join(bin, name), note(name), { mode: 0o755 });
    }
    await writeFile(join(bin, 'id'), `#!/bin/sh\necho ${uid}\n`, { mode: 0o755 });
    await writeFile(join(bin, 'node'), `${note('node')}env | grep ^GATEWAY_ | sort\nexit ${code}\n`, { mode: 0o755 });
    const text = read('packaging/signal-gateway').replaceAll('/etc/signal-gateway', dir)
      .replace('/usr/bin/node', join(bin, 'node')).replace('/usr/share/signal-gateway/', '');
    await writeFile(join(dir, 'command'), text, { mode: 0o755 });
    const env = { PATH: `${bin}:${process.env.PATH}` };
    const { status, stdout, stderr } = spawnSync(join(dir, 'command'), args, { env, encoding: 'utf8' });
    return { status, stderr, lines: stdout.split('\n').slice(0, -1) };
  }

  test('its command reads variables as systemd does, and nothing in them is run', async (t) => {
    const dir = folder(t);
    await writeFile(
      join(dir, 'environment'),
      ` # GATEWAY_A=comment
;GATEWAY_B=comment
GATEWAY_LISTEN=:8880  
  GATEWAY_CORS="https://a.example, https://b.example"
GATEWAY_RECIPIENTS='+15550100002'
GATEWAY_TOKENS=home=a b$HOME\`id\`;echo "no" #no
GATEWAY_LIMITS_BODY=1MiB`,
    );
    const { status, lines } = await runCommand(dir, 1000, ['render', 'a b']);
    assert.deepEqual([status, ...lines], [
      0,
      'node gateway.mjs render a b',
      `GATEWAY_CONFIG=${dir}/gateway.json`,
      'GATEWAY_CORS=https://a.example, https://b.example',
      'GATEWAY_LIMITS_BODY=1MiB',
      'GATEWAY_LISTEN=:8880',
      'GATEWAY_RECIPIENTS=+15550100002',
      'GATEWAY_TOKENS=home=a b$HOME`id`;echo "no" #no',
    ]);
  });

  test('as root, add lets the service read the file and starts it; everything else runs as its user', async (t) => {
    const dir = folder(t);
    const file = join(dir, 'gateway.json');
    const asUser = '--reuid=signal-gateway --regid=signal-gateway --init-groups';
    const test = await runCommand(dir, 0, ['test', 'home']);
    assert.deepEqual(test.lines, [`setpriv ${asUser} ${dir}/bin/node gateway.mjs test home`]);

    await writeFile(file, '{}', { mode: 0o600 });
    const failed = await runCommand(dir, 0, ['add', 'home'], 2);
    assert.deepEqual([failed.status, failed.lines], [2, ['node gateway.mjs add home', `GATEWAY_CONFIG=${file}`]]);
    assert.equal((await stat(file)).mode & 0o777, 0o600, 'nothing follows a failure');

    const { status, lines } = await runCommand(dir, 0, ['--backend', 'http://nas:8080', 'add', 'home']);
    assert.deepEqual([status, ...lines], [
      0,
      'node gateway.mjs --backend http://nas:8080 add home',
      `GATEWAY_CONFIG=${file}`,
      `chgrp signal-gateway ${file}`,
      'systemctl --quiet is-enabled signal-gateway',
      'systemctl start signal-gateway',
    ]);
    assert.equal((await stat(file)).mode & 0o777, 0o640);
  });

  test('its unit is the one of the page, and a system call that it does not allow is an error, not the end', () => {
    const unit = read('packaging/signal-gateway.service');
    assert.deepEqual(blocks('ini', INSTALLING).filter((block) => block.includes('ExecStart=')), [unit]);
    // Node 20 of Debian 13 asks for memory protection keys, where the processor has some.
    assert.match(unit, /^SystemCallFilter=@system-service\n(?:#.*\n)*SystemCallErrorNumber=EPERM$/m);
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
