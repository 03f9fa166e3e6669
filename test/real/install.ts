/** Installs pinned public packages into temporary folders, for tests of real programs. They are removed at the end. */

import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import net from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { text as readText } from 'node:stream/consumers';
import type { TestContext } from 'node:test';

/** Installing takes minutes on a slow line. */
const INSTALL_LIMIT_MS = 600_000;
/** A program that runs longer hangs. */
const RUN_LIMIT_MS = 120_000;

/** A folder in which a program was installed, or undefined if it cannot be had: the test is then skipped. */
function install(t: TestContext, what: string, put: (folder: string) => void): string | undefined {
  const folder = mkdtempSync(join(tmpdir(), 'real-'));
  t.after(() => rmSync(folder, { recursive: true, force: true }));
  try {
    put(folder);
    return folder;
  } catch (error) {
    t.skip(`${what} cannot be had: ${String(error).split('\n')[0]}`);
    return undefined;
  }
}

const call = (cwd: string, command: string, ...args: string[]): string =>
  execFileSync(command, args, { cwd, encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'], timeout: INSTALL_LIMIT_MS });

/** Packages of PyPI, for PYTHONPATH. */
export const fromPyPI = (t: TestContext, ...packages: string[]): string | undefined =>
  install(t, packages.join(), (folder) => {
    call(folder, 'python3', '-m', 'pip', 'install', '--quiet', '--target', folder, ...packages);
  });

/** Packages of npm. */
export const fromNpm = (t: TestContext, ...packages: string[]): string | undefined =>
  install(t, packages.join(), (folder) => {
    call(folder, 'npm', 'install', '--silent', '--no-audit', '--no-fund', '--prefix', folder, ...packages);
  });

/** The files of Debian's packages. Their versions are those of the Debian that runs this. */
export const fromDebian = (t: TestContext, ...packages: string[]): string | undefined =>
  install(t, packages.join(), (folder) => {
    call(folder, 'apt-get', 'download', '-qq', ...packages);
    for (const file of readdirSync(folder).filter((name) => name.endsWith('.deb'))) {
      call(folder, 'dpkg', '-x', file, '.');
    }
  });

export interface Run {
  code: number | null;
  /** What it wrote to standard output and standard error. */
  text: string;
}

/** Runs a program to its end. */
export async function runTo(command: string, args: string[], env: NodeJS.ProcessEnv = {}): Promise<Run> {
  const child = spawn(command, args, {
    env: { ...process.env, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
    timeout: RUN_LIMIT_MS,
  });
  const [out, err, [code]] = await Promise.all([readText(child.stdout), readText(child.stderr), once(child, 'close')]);
  return { code, text: out + err };
}

/** A port of 127.0.0.1 on which nothing listens, for a program that cannot choose one. */
export async function freePort(): Promise<number> {
  const server = net.createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as net.AddressInfo;
  await once(server.close(), 'close');
  return port;
}

/** Starts a program that goes on until the test ends, and waits until it listens. */
export async function startListening(
  t: TestContext,
  port: number,
  command: string,
  args: string[],
  options: { cwd?: string; env?: NodeJS.ProcessEnv } = {},
): Promise<void> {
  const { cwd, env } = options;
  const child = spawn(command, args, { ...(cwd && { cwd }), env: { ...process.env, ...env }, stdio: 'ignore' });
  t.after(() => void child.kill('SIGKILL'));
  const giveUpMs = Date.now() + RUN_LIMIT_MS;
  for (;;) {
    const socket = net.connect(port, '127.0.0.1');
    const isOpen = await Promise.race([once(socket, 'connect'), once(socket, 'error')]).then(() => true, () => false);
    const isConnected = isOpen && !socket.errored && socket.remotePort === port;
    socket.destroy();
    if (isConnected) return;
    if (child.exitCode !== null || Date.now() > giveUpMs) throw new Error(`${command} does not listen`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}
