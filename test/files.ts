/** The repository's own files, and files and folders that last as long as a test. */

import { execFile } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, relative } from 'node:path';
import { pathToFileURL } from 'node:url';
import { promisify } from 'node:util';
import { assert, groupsOf } from './assertions.ts';
import type { TestContext } from './guard.ts';
import { HERE, isNode } from './runtime.ts';

export const read = (name: string): string => readFileSync(join(HERE, name), 'utf8');

/** A file of test/fixtures. */
export const fixture = (name: string): string => read(`test/fixtures/${name}`);

export const SOURCE = read('gateway.ts');

export const PACKAGE = JSON.parse(read('package.json'));

/** The pages, by path. Their content is tested: each configuration, command, variable, table, link and anchor. */
export const PAGES = Object.fromEntries(
  [...readdirSync(HERE), ...readdirSync(join(HERE, 'docs')).map((name) => `docs/${name}`)]
    .filter((name) => name.endsWith('.md')).map((name) => [name, read(name)]),
);

export const README = PAGES['README.md']!;

export const MANUAL = PAGES['docs/reference.md']!;

export const INSTALLING = PAGES['docs/install.md']!;

export const CONNECTING = PAGES['docs/clients.md']!;

export const COOKBOOK = PAGES['docs/webhooks.md']!;

export const ALL_PAGES = Object.values(PAGES).join('\n');

/** The fenced blocks of a language in a page. */
export function blocks(language: string, page = ALL_PAGES): string[] {
  const fence = new RegExp('^```(?:' + language + ')\\n([^]*?)^```$', 'gm');
  return Array.from(page.matchAll(fence), (match) => match[1]!);
}

/** The rows of a section's table, as they are written, if they begin with the path of a setting. */
export const settingsIn = (page: string, heading: string): string[] =>
  groupsOf(page.split(`\n## ${heading}\n`)[1]!.split('\n## ')[0]!, /^(\| `[a-z][\w.]*` \|.*)$/gm);

/** Paths of all settings, as listed in docs/reference.md, and the variables that the page's rule gives them. */
export const SETTING_ROWS = settingsIn(MANUAL, 'Every setting').map((row) => {
  const path = row.split('`')[1]!;
  return [path, `GATEWAY_${path.replace('.', '_').replace(/[A-Z]/g, '_$&').toUpperCase()}`] as const;
});

export function folder(t: TestContext): string {
  const path = mkdtempSync(join(tmpdir(), 'gateway-'));
  t.after(() => rmSync(path, { recursive: true }));
  return path;
}

/** A file in a new folder, with a text, or a configuration as JSON. */
export function fileWith(t: TestContext, content: unknown, name = 'gateway.json'): string {
  const file = join(folder(t), name);
  writeFileSync(file, typeof content === 'string' ? content : JSON.stringify(content), { mode: 0o600 });
  return file;
}

/** A text that occurs once in gateway.ts, and its replacement. */
export type Change = [text: string, become: (text: string) => string];

/** A copy of gateway.ts with changes that a contributor might make. */
export function changedSource(t: TestContext, ...changes: Change[]): string {
  const changed = changes.reduce((source, [text, become]) => {
    assert.equal(source.split(text).length, 2, `gateway.ts has it once: ${text}`);
    return source.replace(text, become);
  }, SOURCE);
  return fileWith(t, changed, 'gateway.mts');
}

/** The module of such a copy. Nothing has compiled it, so a Node that reads no types needs tsx. */
export async function importChanged(t: TestContext, ...changes: Change[]): Promise<typeof import('../gateway.ts')> {
  const { href } = pathToFileURL(changedSource(t, ...changes));
  if (!isNode || 'typescript' in process.features) return await import(href);
  const { tsImport } = await import('tsx/esm/api');
  return await tsImport(href, import.meta.url);
}

/** The functions in which the compiler finds a mistake, for each of some copies of gateway.ts. Only on Node. */
export async function mistakesIn(files: string[]): Promise<string[][]> {
  const { compilerOptions } = JSON.parse(read('tsconfig.json'));
  compilerOptions.typeRoots = [join(HERE, 'node_modules/@types')];
  const cwd = dirname(files[0]!);
  writeFileSync(join(cwd, 'tsconfig.json'), JSON.stringify({ compilerOptions, files }));
  const tsc = promisify(execFile)(join(HERE, 'node_modules/.bin/tsc'), ['--pretty', 'false'], { cwd });
  const { stdout } = await tsc.catch((error) => error);
  return files.map((file) => {
    const lines = readFileSync(file, 'utf8').split('\n');
    const places = groupsOf(stdout, new RegExp(`^${relative(cwd, file)}\\((\\d+),\\d+\\): error`, 'gm'));
    const owners = places.map((at) => {
      const before = lines.slice(0, Number(at)).join('\n');
      return groupsOf(before, /^(?:async )?(?:function|class|const|type|interface) (\w+)/gm).at(-1)!;
    });
    return [...new Set(owners)];
  });
}

/** The text of all test files. */
export const TESTS = readdirSync(join(HERE, 'test'), { recursive: true }).map((name) => join('test', String(name)))
  .filter((name) => name.endsWith('.test.ts')).map(read).join('\n');
