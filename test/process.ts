/**
 * Starts the gateway as a process, as its users do. The environment variable TEST_COMMAND names another command:
 *
 *     TEST_COMMAND='node gateway.mjs'
 *     TEST_COMMAND='deno run -A gateway.ts'
 *     TEST_COMMAND='docker run --rm --network host -v {dir}:{dir}:ro IMAGE'
 *
 * The gateway's arguments follow it. `{dir}` is the folder of the configuration file, which a container must mount.
 * Without TEST_COMMAND, the runtime of the tests runs the source; Node runs what it compiles to, which starts faster.
 */

import { spawn } from 'node:child_process';
import { chmodSync, mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { until } from './assertions.ts';
import { type Backend, type Handler, startBackend } from './backend.ts';
import { addressOf } from './client.ts';
import type { TestContext } from './guard.ts';
import { HERE } from './runtime.ts';
import { program } from './start.ts';

/** What the command may need to start at all. Any other variable could be a setting of the gateway. */
const INHERITED = ['PATH', 'HOME', 'DOCKER_HOST', 'XDG_RUNTIME_DIR'];

function commandIn(dir: string): string[] {
  const { TEST_COMMAND } = process.env;
  return TEST_COMMAND ? TEST_COMMAND.trim().split(/\s+/).map((word) => word.replaceAll('{dir}', dir)) : program();
}

/** A folder that the user of a container can read. */
function folder(t: TestContext): string {
  const dir = mkdtempSync(join(tmpdir(), 'gateway-'));
  chmodSync(dir, 0o755);
  t.after(() => rmSync(dir, { recursive: true }));
  return dir;
}

/** Writes settings as JSON, or a text as it is. By renaming, so that no reader sees half of the file. */
function writeSettings(file: string, settings: object | string): void {
  const text = typeof settings === 'string' ? settings : JSON.stringify(settings);
  writeFileSync(`${file}.new`, text, { mode: 0o644 });
  renameSync(`${file}.new`, file);
}

type Child = ReturnType<typeof launch>;
const running = new Set<Child['child']>();
process.on('exit', () => running.forEach((child) => child.kill('SIGKILL')));

function launch(t: TestContext, settings: object | string, listen = '127.0.0.1:0') {
  const dir = folder(t);
  const file = join(dir, 'gateway.json');
  writeSettings(file, settings);
  const [program = '', ...words] = commandIn(dir);
  const env = Object.fromEntries(INHERITED.map((name) => [name, process.env[name]]));
  const child = spawn(program, [...words, '--config', file, '--listen', listen], { cwd: HERE, env });
  running.add(child);
  let output = '';
  for (const stream of [child.stdout, child.stderr]) stream.on('data', (chunk) => void (output += chunk));
  let code: number | null | undefined;
  child.on('error', (error) => void (output += error)).on('close', (exitCode) => {
    running.delete(child);
    code = exitCode;
  });
  return {
    child,
    file,
    /** All that it has printed so far. */
    output: () => output,
    /** Its exit code; undefined while it runs. */
    exitCode: () => code,
  };
}

/** Runs the gateway with settings with which it should not start. */
export async function runUntilExit(t: TestContext, settings: object | string, listen?: string) {
  const { child, output, exitCode } = launch(t, settings, listen);
  t.after(() => child.kill('SIGKILL'));
  await until(() => exitCode() !== undefined || /"listening"/.test(output()), 'the process to end');
  return { code: exitCode(), output: output() };
}

export type LogLine = Record<string, unknown> & { message: string };

type GatewayProcess = Awaited<ReturnType<typeof startProcess>>;

/** Starts the gateway with these settings, and waits until it listens and has asked the backend for its version. */
export async function startProcess(t: TestContext, settings: object) {
  const plain = { log: { format: 'json', level: 'debug' }, shutdown: '1s' };
  const { child, file, output, exitCode } = launch(t, { ...plain, ...settings });
  const log = (): LogLine[] =>
    output().split('\n').slice(0, -1).filter((line) => line.startsWith('{')).map((line) => JSON.parse(line));
  const linesOf = (message: string) => log().filter((line) => line.message.startsWith(message));
  const signal = (name: NodeJS.Signals): void => void process.kill(child.pid!, name);
  t.onFailure(() => `the gateway printed, at last\n${output().slice(-2000)}`);
  const exited = () => exitCode() !== undefined;
  t.after(async () => {
    if (exited()) return;
    signal('SIGTERM');
    // What still runs is cut off after a second.
    await until(exited, 'the process to end').finally(() => child.kill('SIGKILL'));
  });
  const hasAsked = () => linesOf('the backend answers').length + linesOf('the backend did not answer').length > 0;
  await until(() => exited() || (linesOf('listening').length > 0 && hasAsked()), 'the gateway to listen');
  if (exited()) throw new Error(`the gateway did not start:\n${output()}`);
  return {
    ...addressOf(String(linesOf('listening')[0]!.listen)),
    log,
    /** The lines of its log with a message that begins with this text. */
    linesOf,
    /** The lines of its log about requests. */
    requests: () => linesOf('request'),
    output,
    reload: (next: object | string) => {
      writeSettings(file, typeof next === 'string' ? next : { ...plain, ...next });
      signal('SIGHUP');
    },
  };
}

/** A configuration as in the file. Without `backend.url`, which `startBoth` adds. */
export type Settings = Record<string, unknown> & { backend?: object };

export interface Both {
  backend: Backend;
  gateway: GatewayProcess;
}

/** A stand-in backend, and a gateway in front of it. */
export async function startBoth(t: TestContext, settings: Settings, handler?: Handler): Promise<Both> {
  const backend = await startBackend(t, handler);
  const gateway = await startProcess(t, { ...settings, backend: { url: backend.url, ...settings.backend } });
  return { backend, gateway };
}
