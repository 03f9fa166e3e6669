/** Starts a gateway, in this process or as a process of its own. */

import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import { existsSync, mkdirSync, mkdtempSync, readFileSync, renameSync, rmSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
import { join } from 'node:path';
import { text as readText } from 'node:stream/consumers';
import { fileURLToPath, pathToFileURL } from 'node:url';
import type { GatewayConfig, GatewayOptions, TokenConfig } from '../gateway.ts';
import { assert, lastOf, shown, until } from './assertions.ts';
import { type Backend, type Respond, startBackend, startRawBackend } from './backend.ts';
import { addressOf } from './client.ts';
import { lostMs } from './clock.ts';
import { fileWith, PACKAGE } from './files.ts';
import { createGateway, FILE, run } from './gateway.ts';
import type { TestContext } from './guard.ts';
import { HERE, isNode, LOADER } from './runtime.ts';
import { SECRET } from './samples.ts';

/** A timeout longer than any test: where a test waits for a close, this timeout is not the cause. */
export const PATIENT_MS = 3_600_000;

export const START_MS = Date.now() - performance.now();

/** A gateway with one token, on its own port. It does not wait for a backend that is down, unless a test sets that. */
export async function startGateway(
  t: TestContext,
  to: { url: string },
  config: GatewayConfig = {},
  options?: GatewayOptions,
  make = createGateway,
) {
  const log: string[] = [];

  const tokens = { test: { secret: SECRET } };
  const plain: GatewayConfig = {
    tokens,
    listen: '127.0.0.1:0',
    shutdown: '1s',
    log: { format: 'json', level: 'debug' },
  };
  const base: GatewayConfig = { ...plain, backend: { url: to.url, wait: '0' } };
  const now = (): number => START_MS + performance.now();
  const patient = { stallTimeoutMs: PATIENT_MS, headersTimeoutMs: PATIENT_MS, lingerMs: 2000 };
  const own: GatewayOptions = { log: (line) => void log.push(line), now, ...patient, ...options };
  const gateway = make({ ...base, ...config }, own);
  const { server } = gateway;
  // node:http enforces this timeout, and reads it whenever it checks its connections.
  const { headersTimeout } = server;
  if (isNode) {
    const get = (): number => headersTimeout && headersTimeout + lostMs(headersTimeout);
    Object.defineProperty(server, 'headersTimeout', { get });
  }
  t.onFailure(() => lastOf('the gateway logged', log.map((line) => shown(line.replace(/^."time":".*?",/, '{'), 400))));
  const close = (): Promise<void> => gateway.close();
  t.after(() => {
    server.closeAllConnections();
    return close();
  });
  const url = await gateway.listen();
  const reload = (next: GatewayConfig): void => gateway.reload({ ...base, ...next });
  let used = '{}';
  /** Reloads with other settings of the first token, as JSON, or with its current ones if there are none. */
  const useSettings = (settings = '{}'): void => {
    if (settings === used) return;
    used = settings;
    const [[name, token], ...others] = Object.entries(config.tokens ?? tokens) as [[string, TokenConfig]];
    const changed = { ...token, ...JSON.parse(settings) };
    reload({ ...config, tokens: { [name]: changed, ...Object.fromEntries(others) } });
  };
  return { ...addressOf(url), url, log, server, close, reload, useSettings };
}

export type Gateway = Awaited<ReturnType<typeof startGateway>>;

export type Both = { backend: Backend; gateway: Gateway };

export async function startBoth(t: TestContext, config?: GatewayConfig, options?: GatewayOptions): Promise<Both> {
  const backend = await startBackend(t);
  return { backend, gateway: await startGateway(t, backend, config, options) };
}

/**
 * A backend that answers a POST, or a query with "hang", only after `finish` is called, and a gateway in front of it.
 */
export async function startHolding(t: TestContext, config: GatewayConfig = {}, options?: GatewayOptions) {
  const held: http.ServerResponse[] = [];
  const backend = await startBackend(t, (req, res) => {
    if (req.resume().url!.endsWith('begun')) res.write('first, ');
    if (req.method === 'POST' || /hang/.test(req.url!)) held.push(res);
    else res.end(req.url);
  });
  const finish = (): void => held.splice(0).forEach((res) => res.end('and last'));
  return { backend, finish, gateway: await startGateway(t, backend, config, options) };
}

/** The same, with a gateway in front of it. */
export async function startRaw(t: TestContext, respond: Respond, config: GatewayConfig = {}, options?: GatewayOptions) {
  const backend = await startRawBackend(t, respond);
  const own = { ...config, backend: { url: backend.url, wait: '0', ...config.backend } };
  return { backend, gateway: await startGateway(t, backend, own, options) };
}

export type Program = [file: string, ...args: string[]];

/** The file under test as a user starts it. */
export const AS_IT_IS: Program = [process.execPath, ...(/js$/.test(FILE.pathname) ? [] : LOADER), fileURLToPath(FILE)];

/**
 * The gateway as tests start it. On Node it is compiled, because tsx takes long to start: by `npm test`, or else here.
 * That file stays in node_modules/.cache for the tests of other processes, under a name that changes with the source.
 */
export function program(): Program {
  if (!isNode || /\.m?js$/.test(FILE.pathname)) return AS_IT_IS;
  const source = readFileSync(FILE);
  const cache = join(HERE, 'node_modules/.cache/signal-gateway');
  const compiled = join(cache, `${createHash('sha256').update(source).digest('hex').slice(0, 16)}.mjs`);
  if (!existsSync(compiled)) {
    mkdirSync(cache, { recursive: true });
    const dir = mkdtempSync(join(cache, 'new-'));
    const words: Record<string, string> = { 'dist': dir, 'gateway.ts': fileURLToPath(FILE) };
    const [tsc, ...args] = PACKAGE.scripts.compile.split(' ').map((word: string) => words[word] ?? word);
    const { status, stdout, stderr } = spawnSync(join(HERE, 'node_modules/.bin', tsc), args, {
      cwd: HERE,
      encoding: 'utf8',
    });
    assert.equal(status, 0, `the file does not compile:\n${stdout}${stderr}`);
    renameSync(join(dir, 'gateway.js'), compiled);
    rmSync(dir, { recursive: true });
  }
  return [process.execPath, compiled];
}

/**
 * The gateway, which first runs some code, and waits 100 times as long for its backend where it would wait 5 s or more:
 * the backend is in this process, which other tests may keep busy for longer than that. Deno has no patience.
 */
export function patientProgram(t: TestContext, code = ''): Program {
  const patience = `const { setTimeout } = globalThis;
    globalThis.setTimeout = (run, ms, ...rest) => setTimeout(run, ms < 5000 ? ms : 100 * ms, ...rest);`;
  const [file, ...args] = program();
  return isNode ? [file, '--import', fileWith(t, `${code}\n${patience}`, 'first.mjs'), ...args] : [file, ...args];
}

/** A program in a new file. */
export const script = (t: TestContext, code: string): Program => [process.execPath, fileWith(t, code, 'script.mjs')];

/** Kills the processes that are left when this one is gone, however it ended. It reads "+ PID" and "- PID". */
const WARDEN = `all=' '; while read -r sign pid; do case $sign in
  +) all="$all$pid ";; -) all="\${all%% $pid *} \${all#* $pid }";; esac; done; kill -9 $all`;

let warden: ChildProcess | undefined;

function tellWarden(sign: '+' | '-', pid: number | undefined): void {
  if (!warden) {
    warden = spawn('sh', ['-c', WARDEN], { stdio: ['pipe', 'ignore', 'ignore'], detached: true });
    warden.unref();
    warden.stdin!.on('error', () => {});
    if (warden.stdin instanceof net.Socket) warden.stdin.unref();
  }
  warden.stdin!.write(`${sign} ${pid}\n`);
}

/** Starts a process, which does not outlive this one; `output` is what it has printed so far. */
export function start(args: string[], env: NodeJS.ProcessEnv = {}, [file, ...first]: Program = program(), cwd = HERE) {
  const child = spawn(file, [...first, ...args], { cwd, env: { PATH: process.env.PATH, ...env } });
  tellWarden('+', child.pid);
  child.once('exit', () => tellWarden('-', child.pid));
  let output = '';
  for (const stream of [child.stdout, child.stderr]) stream.on('data', (chunk) => void (output += chunk));
  return Object.assign(child, { output: () => output });
}

export type Process = Awaited<ReturnType<typeof startProcess>>;

type How = { backend?: { url: string }; args?: string[]; env?: NodeJS.ProcessEnv; input?: string; program?: Program };

/** A gateway in a separate process, with one token if it is given a backend. Its log is the lines that it prints. */
export async function startProcess(t: TestContext, { backend, args = [], env, program }: How) {
  const own = backend && { GATEWAY_TOKENS: SECRET, GATEWAY_BACKEND_URL: backend.url };
  const child = start(args, { GATEWAY_LISTEN: '127.0.0.1:0', GATEWAY_LOG_FORMAT: 'json', ...own, ...env }, program);
  t.after(() => child.kill('SIGKILL'));
  const { output } = child;
  const listening = /"message":"listening","listen":"(.*?)".*\n/;
  await until(() => listening.test(output()) || child.exitCode !== null, 'the process to listen');
  assert.match(output(), listening, 'the process ended');
  const [, url = ''] = listening.exec(output())!;
  return {
    ...{ ...addressOf(url), url, child, output },
    get log() {
      return output().split('\n').slice(0, -1);
    },
    /** Sends a signal, after which the process must exit without further help, and successfully. */
    async close(signal: NodeJS.Signals = 'SIGTERM') {
      const ended = once(child, 'close'); // not at its exit: the last of its output may arrive after that
      process.kill(child.pid!, signal); // after a child.kill, Deno 2.9 reports no exit code
      assert.deepEqual(await ended, [0, null], output());
    },
  };
}

/** Runs a process until it exits. */
export async function runProcess(args: string[], { env, input = '', program }: How = {}) {
  const child = start(args, env, program);
  const ended = once(child, 'close');
  child.stdin.end(input);
  const [stdout, stderr] = await Promise.all([readText(child.stdout), readText(child.stderr)]);
  return { code: (await ended)[0] as number, stdout, stderr };
}

export const isRoot = process.getuid?.() === 0;

export const NOBODY = 65_534;

/** Runs a command line as a user who is not root, once the program is loaded: they may not have access to the runtime. */
export async function runAsNobody(t: TestContext, args: string[], env: NodeJS.ProcessEnv = {}, uid = NOBODY) {
  const runner = script(
    t,
    `import process from 'node:process';
    import { run } from ${JSON.stringify(String(pathToFileURL(program().at(-1)!)))};
    const { PATH, ...env } = process.env;
    if (${isRoot}) { process.setgroups?.([]); process.setgid(${uid}); process.setuid(${uid}); }
    process.chdir('/'); // they may not have access to this folder either
    const { code, stdout, stderr } = await run(process.argv.slice(2), env, () => Buffer.alloc(0));
    process.stdout.write(stdout);
    process.stderr.write(stderr);
    process.exitCode = code;`,
  );
  return await runProcess(args, { env, program: runner });
}

/** Runs a command line that terminates, in this process. */
export const cli = async (args: string[], { env = {}, input = '' }: How = {}) =>
  await run(args, env, () => Buffer.from(input));

/** Starts a demo. Its first command shows port and token, and fits on one line. */
export async function startDemo(t: TestContext, how: How = {}) {
  const gateway = await startProcess(t, { args: ['--demo'], ...how });
  await until(() => /^curl .*'$/m.test(gateway.output()));
  const [first, secret = ''] = /^curl -u api:([\w-]+) .*$/m.exec(gateway.output())!;
  return Object.assign(gateway, { first, secret });
}
