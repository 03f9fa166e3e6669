import { execFile } from 'node:child_process';
import { existsSync, readdirSync } from 'node:fs';
import { cp, mkdir, symlink, writeFile } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { promisify } from 'node:util';
import { assert } from './assertions.ts';
import { askAsCurl } from './client.ts';
import { folder, HERE, PACKAGE, PAGES } from './files.ts';
import { test } from './guard.ts';
import { isNode } from './runtime.ts';
import { type Program, runProcess, startDemo } from './start.ts';

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
