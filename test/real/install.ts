/**
 * Real programs, with pinned versions, in a temporary folder. A test whose programs cannot be had is skipped, and says
 * why. They need the network, and some need pip, Go, Maven or the `apt-get` of Debian 12.
 */

import { execFile, spawn } from 'node:child_process';
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import net from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { test } from 'node:test';
import { until } from '../assertions.ts';
import type { TestContext } from '../guard.ts';

/** Packages of each registry, as `NAME@VERSION` (npm), `NAME==VERSION` (PyPI), `NAME=VERSION` (Debian), `GROUP:NAME:VERSION`. */
export interface Packages {
  npm?: string[];
  pypi?: string[];
  debian?: string[];
  maven?: string[];
  /** The arguments of `go install`. */
  go?: string[];
}

export interface Result {
  code: number;
  /** Standard output and standard error. */
  output: string;
}

export interface How {
  env?: NodeJS.ProcessEnv;
  input?: string;
}

/** A program that goes on until it is stopped or the test ends. */
export interface Started {
  output(): string;
  isOver(): boolean;
  stop(): Promise<void>;
}

/** The folder with the programs. What it starts ends with the test. */
export interface Programs {
  dir: string;
  /** Runs a program to its end, and kills it after two minutes. */
  run(file: string, args: string[], how?: How): Promise<Result>;
  start(file: string, args: string[], how?: How): Started;
  /** Starts a program, and waits until it listens. */
  serve(file: string, args: string[], port: number, how?: How): Promise<Started>;
  /** Writes a file that only its owner can read, as some programs demand, and execute. */
  write(name: string, text: string): string;
}

/** Installing may take long on a slow network, and starting on a slow machine. */
const INSTALL_LIMIT_MS = 900_000;
const RUN_LIMIT_MS = 120_000;

/** Skips the test, with this reason. */
export class CannotBeHad extends Error {}

/** Registers a test with real programs. */
export function real(title: string, packages: Packages, run: (t: TestContext, programs: Programs) => Promise<void>) {
  test(title, async (context) => {
    const dir = mkdtempSync(join(tmpdir(), 'gateway-real-'));
    const cleanups: (() => unknown)[] = [];
    const evidence: (() => string)[] = [];
    const t: TestContext = {
      after: (cleanup) => void cleanups.push(cleanup),
      onFailure: (each) => void evidence.push(each),
      diagnostic: (text) => context.diagnostic(text),
    };
    try {
      await install(dir, packages);
      await run(t, programsIn(t, dir));
    } catch (error) {
      if (error instanceof CannotBeHad) return context.skip(error.message);
      for (const each of evidence) context.diagnostic(each());
      throw error;
    } finally {
      for (const cleanup of cleanups) await cleanup();
      rmSync(dir, { recursive: true, force: true, maxRetries: 5 });
    }
  });
}

async function install(
  dir: string,
  { npm = [], pypi = [], debian = [], maven = [], go = [] }: Packages,
): Promise<void> {
  const have = async (file: string, args: string[], what: string[]): Promise<void> => {
    const { code, output } = await runIn(dir, file, args, {}, INSTALL_LIMIT_MS);
    if (code !== 0) throw new CannotBeHad(`cannot be had: ${what.join(' ')}: ${output.trim().split('\n').at(-1)}`);
  };
  if (npm.length > 0) {
    // n8n has native modules that do not compile everywhere, and runs without them.
    await have(
      'npm',
      ['install', '--silent', '--ignore-scripts', '--no-audit', '--no-fund', '--prefix', dir, ...npm],
      npm,
    );
  }
  if (pypi.length > 0) {
    await have('python3', ['-m', 'venv', join(dir, 'venv')], ['venv']);
    await have(join(dir, 'venv/bin/pip'), ['install', '-q', '--disable-pip-version-check', ...pypi], pypi);
  }
  if (debian.length > 0) await have('apt-get', ['download', '-qq', ...debian], debian);
  for (const name of readdirSync(dir).filter((name) => name.endsWith('.deb'))) {
    await have('dpkg', ['-x', join(dir, name), dir], [name]);
  }
  if (go.length > 0) await have('env', [`GOBIN=${join(dir, 'usr/bin')}`, 'go', 'install', ...go], go);
  if (maven.length > 0) {
    const dependencies = maven.map((each) => {
      const [group, name, version] = each.split(':');
      return `<dependency><groupId>${group}</groupId><artifactId>${name}</artifactId><version>${version}</version></dependency>`;
    });
    const head = '<modelVersion>4.0.0</modelVersion><groupId>x</groupId><artifactId>x</artifactId><version>1</version>';
    writeFileSync(
      join(dir, 'pom.xml'),
      `<project xmlns="http://maven.apache.org/POM/4.0.0">${head}<dependencies>${
        dependencies.join('')
      }</dependencies></project>`,
    );
    await have('mvn', ['-q', '-B', 'dependency:copy-dependencies', '-DoutputDirectory=lib'], maven);
  }
}

function environmentOf(dir: string, { env = {} }: How): NodeJS.ProcessEnv {
  const { PATH, JAVA_HOME } = process.env;
  const libraries = ['usr/lib', 'usr/lib/x86_64-linux-gnu', 'usr/lib/aarch64-linux-gnu', 'lib/x86_64-linux-gnu'];
  return {
    PATH: `${dir}/venv/bin:${dir}/node_modules/.bin:${dir}/usr/bin:${dir}/usr/sbin:${PATH}`,
    ...(JAVA_HOME ? { JAVA_HOME } : {}),
    LD_LIBRARY_PATH: libraries.map((each) => join(dir, each)).join(':'),
    HOME: dir,
    LANG: 'C.UTF-8',
    ...env,
  };
}

function runIn(dir: string, file: string, args: string[], how: How, limitMs = RUN_LIMIT_MS): Promise<Result> {
  // An installer runs with the user's own settings and caches; the programs do not.
  const env = limitMs === INSTALL_LIMIT_MS ? process.env : environmentOf(dir, how);
  return new Promise((resolve) => {
    const child = execFile(
      file,
      args,
      { cwd: dir, env, timeout: limitMs, killSignal: 'SIGKILL' },
      (error, out, err) => {
        const { code = 0 } = error ?? {};
        resolve({
          code: typeof code === 'number' ? code : -1,
          output: `${out}${err}${code === 'ENOENT' ? error : ''}`,
        });
      },
    );
    child.stdin?.on('error', () => {});
    child.stdin?.end(how.input ?? '');
  });
}

function programsIn(t: TestContext, dir: string): Programs {
  const start = (file: string, args: string[], how: How = {}): Started => {
    const child = spawn(file, args, { cwd: dir, env: environmentOf(dir, how), detached: true });
    let output = '';
    let isOver = false;
    for (const stream of [child.stdout, child.stderr]) stream.on('data', (chunk) => void (output += chunk));
    child.on('error', (error) => void (output += error)).on('close', () => void (isOver = true));
    const stop = async (): Promise<void> => {
      if (!isOver) process.kill(-child.pid!, 'SIGKILL');
      await until(() => isOver, `${file} to end`);
    };
    t.onFailure(() => `${file} printed, at last\n${output.slice(-3000)}`);
    t.after(stop);
    return { output: () => output, isOver: () => isOver, stop };
  };
  return {
    dir,
    run: (file, args, how = {}) => runIn(dir, file, args, how),
    start,
    serve: async (file, args, port, how) => {
      const started = start(file, args, how);
      for (const since = Date.now(); !(await listens(port));) {
        if (started.isOver() || Date.now() - since > RUN_LIMIT_MS) throw new Error(`${file} does not listen`);
      }
      return started;
    },
    write: (name, text) => {
      const file = join(dir, name);
      writeFileSync(file, text, { mode: 0o700 });
      return file;
    },
  };
}

function listens(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = net.connect(port, '127.0.0.1');
    socket.on('connect', () => socket.destroy()).on('error', () => {});
    socket.on('close', (hadError) => setTimeout(() => resolve(!hadError), 100));
  });
}

/** The folder of a file somewhere in a package, such as `bin` of the Java in a wheel. */
export function folderOf(dir: string, ending: string): string {
  const name = readdirSync(dir, { recursive: true }).map(String).find((name) => name.endsWith(ending));
  if (!name) throw new Error(`there is no ${ending}`);
  return dirname(join(dir, name));
}
