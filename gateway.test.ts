/**
 * The whole suite, and types, format and lint:  npm test
 * This file alone:  node --import tsx --test gateway.test.ts    (Node 22.18 needs no --import tsx)
 *                   deno test -A --no-check gateway.test.ts             bun test --timeout 1200000 ./gateway.test.ts
 *                   npx --yes -p node@26 node --test …                  (any Node; npx -p deno@2 and bun@1 likewise)
 * One section:      SECTION=RATE node …                                 (grep "^section(" lists them)
 * The titles:       grep -nE "^ *(test|table|randomTest)\(" gateway.test.ts      (in sections named like the code's)
 * Some tests:       ONLY='keep-alive|trickles' node …                   (a regular expression for titles)
 * A random test:    SEED=310410416 ONLY='random document' node …        (a run shows its seed in the title)
 *                   SEEDS=500 ONLY='random document' node …             (once for each of 500 seeds)
 * A compiled file:  GATEWAY_FILE=dist/gateway.js node …
 * Failing tests:    SECTION=FAILURES node …                             (each in its own way, to see how that looks)
 *
 * Tests that must run alone are run by gateway.alone.test.ts. With SECTION or ONLY they run here, after the others.
 *
 * The tests use real sockets on loopback ports that the system chooses, and a stand-in backend that reads paths and
 * JSON as signal-cli-rest-api does. Titles are claims. A denial is proved only if the backend saw nothing, so
 * `assertDenied` always checks the backend. A test that needs no separate process calls the gateway's functions, `run`
 * for a command line; a process that a test starts runs compiled code.
 */

import strict from 'node:assert/strict';
import { AsyncLocalStorage } from 'node:async_hooks';
import { type ChildProcess, execFile, spawn, spawnSync } from 'node:child_process';
import { createHash, randomUUID } from 'node:crypto';
import dns from 'node:dns';
import { once } from 'node:events';
import {
  existsSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { chmod, cp, mkdir, symlink } from 'node:fs/promises';
import http from 'node:http';
import https from 'node:https';
import net, { type AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import type { Duplex } from 'node:stream';
import { buffer as readBytes, text as readText } from 'node:stream/consumers';
import { suite, test as registerTest } from 'node:test';
import { connect as tlsConnect, TLSSocket } from 'node:tls';
import { inspect, isDeepStrictEqual, promisify } from 'node:util';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { fileURLToPath, pathToFileURL } from 'node:url';
import type { GatewayConfig, GatewayOptions, TokenConfig } from './gateway.ts';

// ── CLOCK ────────────────────────────────────────────────────────────────────────────────────────

/**
 * In this process, time passes as the event loop turns: a turn counts at most 20 ms, however long it took. So on a slow
 * machine, or next to a test that blocks, no timeout of a gateway or a test fires before the loop has read what was
 * ready. On a fast machine it equals real time. `setTimeout` and `performance.now` are replaced before gateway.ts is
 * imported, so that there is one clock.
 */
const TURN_MS = 20;
const { setTimeout: beginTimer, clearTimeout: endTimer } = globalThis;
const realMs = performance.now.bind(performance);
let [turnedMs, loopMs] = [realMs(), 0];
/** The turns that took longer: when they ended in loop time, and how much of each is not counted. */
const lost: [endMs: number, ms: number][] = [];

performance.now = () => loopMs + Math.min(TURN_MS, realMs() - turnedMs);
setInterval(() => {
  const nowMs = realMs();
  const tookMs = nowMs - turnedMs;
  loopMs += Math.min(TURN_MS, tookMs);
  turnedMs = nowMs;
  if (tookMs > TURN_MS) lost.push([loopMs, tookMs - TURN_MS]);
  if (lost.length > 1000) lost.shift();
}, TURN_MS / 4).unref();

/** How much more real time than `withinMs` the last `withinMs` of loop time took. */
function lostMs(withinMs: number): number {
  const sinceMs = performance.now() - withinMs;
  const ofThisTurn = Math.max(0, realMs() - turnedMs - TURN_MS);
  return lost.reduce((sum, [endMs, ms]) => endMs > sinceMs ? sum + ms : sum, ofThisTurn);
}

/** A timer in loop time, with the methods that programs use. */
class LoopTimer {
  readonly #run: () => void;
  readonly #ms: number;
  #dueMs = 0;
  #timer: NodeJS.Timeout | undefined;
  #isRef = true;

  constructor(run: () => void, ms: number) {
    this.#run = run;
    this.#ms = ms;
    this.refresh();
  }

  refresh(): this {
    this.end();
    this.#dueMs = performance.now() + this.#ms;
    this.#wait(this.#ms);
    return this;
  }

  unref(): this {
    this.#isRef = false;
    this.#timer?.unref();
    return this;
  }

  end(): void {
    endTimer(this.#timer);
    this.#timer = undefined;
  }

  #wait(ms: number): void {
    this.#timer = beginTimer(() => {
      const leftMs = this.#dueMs - performance.now();
      this.#timer = undefined;
      if (leftMs > 0) this.#wait(leftMs);
      else this.#run();
    }, ms);
    if (!this.#isRef) this.#timer.unref();
  }
}

globalThis.setTimeout =
  ((run: (...args: unknown[]) => void, ms = 1, ...args: unknown[]) =>
    new LoopTimer(() => run(...args), ms)) as unknown as typeof setTimeout;
globalThis.clearTimeout = (timer) => timer instanceof LoopTimer ? timer.end() : endTimer(timer);

/**
 * node:net times a socket's idleness itself, so its timeout is delayed by the time that the loop has lost meanwhile.
 */
const { emit } = net.Socket.prototype;
net.Socket.prototype.emit = function (this: net.Socket, event: string | symbol, ...args: unknown[]): boolean {
  const graceMs = event === 'timeout' ? lostMs(this.timeout ?? 0) : 0;
  if (graceMs === 0) return emit.call(this, event, ...args);
  const moved = (): string => `${this.bytesRead} ${this.bytesWritten} ${this.writableLength}`;
  const before = moved();
  setTimeout(() => {
    if (!this.destroyed && this.timeout && moved() === before) emit.call(this, event, ...args);
  }, graceMs);
  return true;
};

/** The file under test. GATEWAY_FILE names another one than the source, such as dist/gateway.js. */
const FILE = new URL(process.env.GATEWAY_FILE ?? 'gateway.ts', import.meta.url);
const {
  BodyScan,
  ConfigError,
  createGateway,
  FORMS,
  loadSettings,
  Metrics,
  parseTarget,
  RateLimiter,
  ROUTES: KNOWN_ROUTES,
  run,
  Template,
} = await import(
  FILE.href
) as typeof import('./gateway.ts');

/** Node 20 spends a minute on the message of an `ok` that fails without one, so the type requires it. */
type Assert = Omit<typeof strict, 'ok'> & { ok(value: unknown, message: string): asserts value };

/** Like node:assert, but a message that a test passes is shown next to the two values instead of replacing them. */
const assert: Assert = {
  ...strict,
  equal: (actual: unknown, expected: unknown, what?: unknown) =>
    Object.is(actual, expected) || failWith(actual, expected, what, strict.equal),
  deepEqual: (actual: unknown, expected: unknown, what?: unknown) =>
    isDeepStrictEqual(actual, expected) || failWith(actual, expected, what, strict.deepEqual),
};

function failWith(actual: unknown, expected: unknown, what: unknown, plain: typeof strict.equal) {
  if (what === undefined) return plain(actual, expected); // Node 26 refuses one that is undefined
  if (typeof what !== 'string') return plain(actual, expected, what as Error);
  const message = `${what}\nexpected  ${shown(expected)}\nactual    ${shown(actual)}`;
  throw new strict.AssertionError({ message });
}

/** The message of an error, with its name unless it is a failed assertion. */
const messageOf = (error: unknown): string => error instanceof strict.AssertionError ? error.message : String(error);

/** A value in a message. */
function shown(value: unknown, limit = 2000): string {
  const text = typeof value === 'string' ? value : inspect(value, { breakLength: Infinity, depth: 4 });
  return text.length > limit ? `${text.slice(0, limit)}…` : text;
}

// ── HARNESS ──────────────────────────────────────────────────────────────────────────────────────

const SECRET = 'correct-horse-battery-staple';
const OTHER = 'another-secret-that-is-long';
/** For text that must contain neither of them. */
const SECRETS = new RegExp(`${SECRET}|${OTHER}`);
const FROM = '+15550100001';
const TO = '+15550100002';
/** A group as signal-cli knows it (32 bytes), and as the backend names it, base64 encoded twice. */
const INTERNAL_ID = Buffer.from('a group has an id of 32 bytes...').toString('base64');
const GROUP = `group.${Buffer.from(INTERNAL_ID).toString('base64')}`;
/** Base64 of the same bytes, with other values in its unused bits. */
const otherBits = (id: string): string => id.replace(/.=$/, (end) => `${String.fromCharCode(end.charCodeAt(0) + 1)}=`);
const MESSAGE = { message: 'hello', number: FROM, recipients: [TO] };
/** The same as JSON, and with a token in its body. */
const HELLO = JSON.stringify(MESSAGE);
const AUTHED = (token: string): string => `{"auth":"${token}",${HELLO.slice(1)}`;
/** A message of exactly this many bytes. */
const sized = (bytes: number): string => `{"x":"${'x'.repeat(bytes - HELLO.length - 7)}",${HELLO.slice(1)}`;
const BEARER = { authorization: `Bearer ${SECRET}` };
const CHROME = `User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/156.0.0.0`;
const HERE = fileURLToPath(new URL('.', import.meta.url));
const read = (name: string): string => readFileSync(join(HERE, name), 'utf8');
const SOURCE = read('gateway.ts');
/** A page in which the long words of tables are whole again: `<code>a<wbr>b</code>` breaks, and so fits a phone. */
const readPage = (name: string): string =>
  read(name).replaceAll('<wbr>', '').replace(
    /<code>(.*?)<\/code>/g,
    (_, code) => `\`${code.replaceAll('&amp;', '&')}\``,
  );
/** The pages, by path. Their content is tested: each configuration, command, variable, table, link and anchor. */
const PAGES = Object.fromEntries(
  [...readdirSync(HERE), ...readdirSync(join(HERE, 'docs')).map((name) => `docs/${name}`)]
    .filter((name) => name.endsWith('.md')).map((name) => [name, readPage(name)]),
);
const README = PAGES['README.md']!;
const MANUAL = PAGES['docs/settings.md']!;
const COOKBOOK = PAGES['docs/recipes.md']!;
const ALL_PAGES = Object.values(PAGES).join('\n');
/** What a token may have in the file in addition to its secret. */
const TOKEN_SETTINGS = 'methods allow senders recipients rate clients expires secretFile message defaults'.split(' ');
const PACKAGE = JSON.parse(read('package.json'));

/** A request, and whether it arrived completely. */
interface Seen extends Pick<http.IncomingMessage, 'headers' | 'rawHeaders' | 'complete'> {
  method: string;
  url: string;
  body: Buffer;
}

interface Backend {
  url: string;
  host: string;
  port: number;
  /** Every request that reached it, complete or not, except the query of a process that starts. */
  seen: Seen[];
  /** Every message that it would have sent. */
  sent: { number: string; recipients: string[]; message: string }[];
  connections: number;
  server: http.Server;
}

type Handler = (req: http.IncomingMessage, res: http.ServerResponse, seen: Seen) => void;

function seenOf({ method, url, headers, rawHeaders }: http.IncomingMessage, body: Buffer, complete: boolean): Seen {
  return { method: method!, url: url!, headers, rawHeaders, body, complete };
}

const showSeen = ({ method, url, body, complete }: Seen): string =>
  shown(`${method} ${url} ${body}${complete ? '' : ' (not complete)'}`, 300);

let hosts = 0;
/**
 * A loopback address that no other server of this process has. A gateway that still tries to connect to a stopped
 * backend cannot hit another test's backend that was given the same port. Linux has all of 127.0.0.0/8.
 */
function ownHost(): string {
  if (process.platform !== 'linux') return '127.0.0.1';
  hosts++;
  return `127.1.${hosts >> 8}.${hosts & 255}`;
}

/** A backend that records what reaches it. Without a handler it answers as signal-cli-rest-api does. */
async function startBackend(t: TestContext, handler?: Handler): Promise<Backend> {
  const [host, server] = [ownHost(), http.createServer()];
  const backend: Backend = { url: '', host, port: 0, seen: [], sent: [], connections: 0, server };
  backend.server.keepAliveTimeout = 0; // only the gateway closes a connection, however late it is
  backend.server.on('connection', () => void backend.connections++);
  backend.server.on('request', (req: http.IncomingMessage, res: http.ServerResponse) => {
    const seen = seenOf(req, Buffer.alloc(0), false);
    if (req.headers['user-agent']?.startsWith('signal-gateway/')) {
      backend.connections--;
      return answerAsBackend(backend, seen, res);
    }
    backend.seen.push(seen);
    req.on('error', () => {});
    if (handler) return handler(req, res, seen);
    const answer = (body: Buffer): void => answerAsBackend(backend, Object.assign(seen, { body, complete: true }), res);
    readBytes(req).then(answer, () => {});
  });
  backend.server.listen(0, host);
  await once(backend.server, 'listening');
  backend.port = (backend.server.address() as AddressInfo).port;
  backend.url = `http://${host}:${backend.port}`;
  addEvidence(t, () => ['the backend saw', backend.seen.map(showSeen)]);
  t.after(() => void backend.server.close().closeAllConnections());
  return backend;
}

/**
 * Routes and JSON as backend.md describes them: decoded paths, case-folded keys, and text for JSON that does not bind.
 */
function answerAsBackend(backend: Backend, seen: Seen, res: http.ServerResponse): void {
  const [rawPath = '', query = ''] = seen.url.split('?');
  if (rawPath.length > 1 && rawPath.endsWith('/')) {
    return void res.writeHead(seen.method === 'GET' ? 301 : 307, { Location: rawPath.slice(0, -1) }).end();
  }
  const [, version, name, number] = decodeURIComponent(rawPath).split('/');
  const account = number === undefined ? undefined : decodeURIComponent(number);
  const about = { versions: ['v1', 'v2'], build: 2, mode: 'json-rpc', version: '0.100' };
  const known: Record<string, [status: number, body?: unknown]> = {
    'GET /v1/about': [200, { ...about, capabilities: { 'v2/send': ['quotes'] } }],
    'GET /v1/health': [204],
    'GET /v1/receive': [200, JSON.stringify([{ envelope: {}, account, query }])],
    'POST /v1/register': [201],
    'GET /v1/groups': [200, [{ id: 'group.abc', account }]],
    'PUT /v1/typing-indicator': [204],
    'DELETE /v1/typing-indicator': [204],
  };
  const isSend = seen.method === 'POST' && name === 'send' && /^v[12]$/.test(version!);
  const route = isSend ? sendAsBackend(backend, version!, seen.body) : known[`${seen.method} /${version}/${name}`];
  const [status, body] = route ?? [404, '404 page not found'];
  const isText = typeof body === 'string';
  const headers = { 'Content-Type': isText ? 'text/plain' : 'application/json; charset=utf-8' };
  res.writeHead(status, body === undefined ? {} : headers).end(isText ? body : JSON.stringify(body));
}

/** A send as encoding/json reads it: keys match in any case, and the last of several wins. */
function sendAsBackend({ sent }: Backend, version: string, bytes: Buffer): [status: number, body: unknown] {
  const value = jsonIn(String(bytes));
  const bound: { number?: string; recipient?: string; recipients?: string[]; message?: string } = {};
  if (!(value instanceof Object) || Array.isArray(value)) return [400, "Couldn't process request - invalid request"];
  for (const [key, inner] of Object.entries(value)) {
    const fields = ['number', 'recipient', 'recipients', 'message'];
    const field = fields.find((name) => new RegExp(`^${name}$`, 'iu').test(key));
    if (field && inner !== null) Object.assign(bound, { [field]: inner });
  }
  const recipients = [...bound.recipients ?? [], ...bound.recipient === undefined ? [] : [bound.recipient]];
  const lack = recipients.length === 0 ? 'at least one recipient' : bound.number ? '' : 'a valid number';
  if (lack) return [400, { error: `Couldn't process request - please provide ${lack}` }];
  sent.push({ number: bound.number!, recipients, message: bound.message ?? '' });
  return [201, version === 'v1' ? { timestamp: '1700000000000' } : [{ timestamp: '1700000000000' }]];
}

/** Where something listens: a port on a host, by default 127.0.0.1. */
interface Address {
  port: number;
  host?: string;
  /** The certificates that a client trusts, if it speaks TLS. */
  ca?: string[];
}

function addressOf(url: string): Address {
  const { protocol, hostname, port } = new URL(url);
  const tls = protocol === 'https:' && { ca: CERTS.map((pair) => pair.cert) };
  return { port: Number(port), host: hostname.replace(/[[\]]/g, ''), ...tls };
}

/** What a test gets. It is the same on every runtime, because runtimes disagree about hooks that fail or never end. */
interface TestContext {
  /** Runs a hook after the test, whether it passes or not, in the order in which they were added. */
  after(hook: () => unknown): void;
  /** Shows a text with the results. */
  diagnostic(text: string): void;
}

type Run = (t: TestContext) => unknown;

const { SECTION, ONLY = '', SEED = Date.now() % 1e9, SEEDS = 1 } = process.env;
let inSection = '';
/** A test that SECTION and ONLY select. */
type Chosen = { title: string; options: Options; run: Run };
/** The tests that run side by side, and those that run after them, one by one. */
const together: Chosen[] = [];
const alone: Chosen[] = [];
const last: Chosen[] = [];
/** Those of them that have not ended, with their hooks. */
const unended = new Set<Chosen>();
/** What was thrown where no test could catch it. */
const strays: string[] = [];

/** Assigns the tests that follow to this section. */
function section(name: string): void {
  inSection = name;
}

/**
 * `isAlone`: the test measures memory or processor time, or blocks for half a second. gateway.alone.test.ts runs these
 * one by one, with no other test in its process. `isLast`: it examines what all other tests of this process did, or the
 * end.
 */
type Options = { skip?: string | boolean; isAlone?: boolean; isLast?: boolean };

/**
 * What a failed test shows in addition: the last lines that its gateways logged and the last requests that its backends
 * saw.
 */
type Evidence = () => [what: string, lines: string[]];
const EVIDENCE = new WeakMap<TestContext, Evidence[]>();

function addEvidence(t: TestContext, evidence: Evidence): void {
  EVIDENCE.set(t, [...EVIDENCE.get(t) ?? [], evidence]);
}

/** How far a test or a hook has got: what it last waited for, since when, and where. */
interface Course {
  title: string;
  what: string;
  sinceMs: number;
  at: Error;
  steps: number;
  isGivenUp: boolean;
}
const COURSE = new AsyncLocalStorage<Course>();

/** The tests of this section fail, each in its own way. They run only if SECTION names it. */
const isFailing = SECTION === 'FAILURES';

/** A test that takes no step for this long is abandoned. A slow machine only delays the steps of a test. */
const STEP_TIMEOUT_MS = isFailing ? 500 : 180_000;
/** The same for a hook. After a fault in what most hooks do, hundreds of tests wait for it. */
const HOOK_TIMEOUT_MS = isFailing ? 500 : 20_000;

/** Records what the running test waits for now. If the test was abandoned, it ends here. */
function step(what: string): void {
  const course = COURSE.getStore();
  if (course?.isGivenUp) throw new Error('the test was given up');
  if (course) Object.assign(course, { what, sinceMs: performance.now(), at: new Error(), steps: course.steps + 1 });
}

/** The lines of a test that led to an error, the innermost first, without those of the harness. */
function linesTo({ stack = '' }: Error): string {
  const frames = [...stack.matchAll(/(\S+) \(?[^() ]*?(gateway\.\w+\.ts:\d+)/g)];
  const harness = frames.findIndex(([, name]) => /^(?:follow|begin)$/.test(name!));
  const own = frames.slice(0, harness < 0 ? undefined : harness).filter(([, name]) => !/\b(?:step|after)$/.test(name!));
  return own.map(([, , line]) => line).join(', called at ');
}

/** Runs a test or a hook. Rejects when it has taken no step for too long, with how far it got and where it waits. */
function follow(title: string, timeoutMs: number, run: () => unknown): Promise<unknown> {
  const sinceMs = performance.now();
  const course: Course = { title, what: 'the beginning', sinceMs, at: new Error(), steps: 0, isGivenUp: false };
  async function begin(): Promise<unknown> {
    return await run();
  }
  return new Promise((resolve, reject) => {
    const watch = setInterval(() => {
      if (performance.now() - course.sinceMs < timeoutMs) return;
      course.isGivenUp = true;
      const where = [`step ${course.steps}`, course.what, linesTo(course.at)].filter(Boolean).join(', ');
      reject(new Error(`nothing more came for ${timeoutMs / 1000} s behind ${where}`));
      clearInterval(watch);
    }, timeoutMs / 100);
    void COURSE.run(course, begin).finally(() => clearInterval(watch)).then(resolve, reject);
  });
}

/** Runs a test and then its hooks. Its failure includes what its gateways logged and what its backends saw. */
async function runTest(chosen: Chosen, diagnostic: TestContext['diagnostic']): Promise<void> {
  const hooks: { hook: () => unknown; at: Error }[] = [];
  function after(hook: () => unknown): void {
    hooks.push({ hook, at: new Error() });
  }
  const t: TestContext = { after, diagnostic };
  const { title, run } = chosen;
  const failures: Error[] = [];
  try {
    await follow(title, STEP_TIMEOUT_MS, run.bind(undefined, t));
  } catch (error) {
    failures.push(withEvidence(t, error));
  }
  for (const { hook, at } of hooks) {
    try {
      await follow(title, HOOK_TIMEOUT_MS, hook);
    } catch (error) {
      failures.push(reworded(error, (message) => `the hook that was added at ${linesTo(at)}: ${message}`));
    }
  }
  unended.delete(chosen);
  const [first, ...others] = failures;
  if (first) throw reworded(first, (message) => [message, ...others.map((other) => other.message)].join('\nand then '));
}

/** The error, with another message also where its stack shows it. */
function reworded(error: unknown, change: (message: string) => string): Error {
  if (!(error instanceof Error)) return new Error(change(inspect(error)));
  const { message, stack = '' } = error;
  error.message = change(message);
  error.stack = stack.includes(message) ? stack.replace(message, () => error.message) : `${error.message}\n${stack}`;
  return error;
}

function withEvidence(t: TestContext, error: unknown): Error {
  const all = (EVIDENCE.get(t) ?? []).map((evidence) => evidence());
  const more = all.map(([what, lines]) => [`${what}${lines.length ? ', at last' : ' nothing'}`, ...lines.slice(-6)]);
  return reworded(error, (message) => [message, ...more.map((lines) => lines.join('\n  '))].join('\n'));
}

// Deno passes a run in which something throws outside a test.
process.on('uncaughtException', (error: unknown) => {
  const { title = 'an unknown test' } = COURSE.getStore() ?? {};
  strays.push(`${title}: ${error instanceof Error ? error.stack : inspect(error)}`);
});

// Every runtime passes a run that exits with 0 in the middle.
process.on('exit', (code) => {
  if (unended.size === 0) return;
  const { title = 'no test' } = COURSE.getStore() ?? {};
  const titles = Array.from(unended, (chosen) => `"${chosen.title}"`).join(', ');
  writeSync(2, `the process exited with ${code} in "${title}" before these tests had ended: ${titles}\n`);
  process.exitCode = 1;
});

/** Waits for a promise, and fails with this description if it is not fulfilled in time. */
async function within<T>(promise: Promise<T>, what: string, limitMs = WAIT_LIMIT_MS): Promise<T> {
  step(what);
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`waited ${limitMs / 1000} s in vain for ${what}`)), limitMs);
  });
  return await Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** Collects a test, unless SECTION or ONLY excludes it. A test that waits in vain fails. */
function test(title: string, ...rest: [Run] | [Options, Run]): void {
  if ((SECTION ?? inSection) !== inSection || !new RegExp(ONLY).test(title)) return;
  if (inSection === 'FAILURES' && !isFailing) return;
  const [options, run]: [Options, Run] = rest.length === 1 ? [{}, ...rest] : rest;
  (options.isAlone ? alone : options.isLast ? last : together).push({ title, options, run });
}

function register(chosen: Chosen): void {
  const { title, options: { skip = false } } = chosen;
  registerTest(title, { skip }, (t) => runTest(chosen, (text) => t.diagnostic(text)));
}

/** How many tests run side by side. Most of them spend most of their time waiting, for a time-out or a process. */
const SIDE_BY_SIDE = 16;

/** Deno and Bun run one test after the other, so the first one starts them all, and each awaits its own result. */
function registerTogether(tests: Chosen[]): void {
  if (isNode) return void suite('side by side', { concurrency: SIDE_BY_SIDE }, () => tests.forEach(register));
  let results: Promise<void>[] | undefined;
  let free = SIDE_BY_SIDE;
  const waiting: (() => void)[] = [];
  const inTurn = async (chosen: Chosen): Promise<void> => {
    if (chosen.options.skip) return;
    if (free === 0) await new Promise<void>((resolve) => waiting.push(resolve));
    else free--;
    await runTest(chosen, console.log).finally(() => waiting.length > 0 ? waiting.shift()!() : free++);
  };
  const startAll = (): Promise<void>[] =>
    tests.map((chosen) => {
      const result = inTurn(chosen);
      result.catch(() => {}); // the test that awaits it reports it
      return result;
    });
  for (const [i, { title, options: { skip = false } }] of tests.entries()) {
    registerTest(title, { skip }, () => (results ??= startAll())[i]);
  }
}

/** A test with a random generator, run once for each seed. */
function randomTest(title: string, run: (random: (below: number) => number, t: TestContext) => ReturnType<Run>): void {
  for (let seed = Number(SEED); seed < Number(SEED) + Number(SEEDS); seed++) {
    let state = Math.imul(seed, 0x9e3779b1);
    const random = (below: number): number => {
      state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0; // of Numerical Recipes
      return Math.floor((state / 2 ** 32) * below);
    };
    test(`${title} (SEED=${seed})`, (t) => run(random, t));
  }
}

const isNode = !('Bun' in globalThis) && !('Deno' in globalThis);

/** The codes of all refusals so far. At the end, every existing code must be among them. */
const PROVOKED = new Set<string>();

type Gateway = Awaited<ReturnType<typeof startGateway>>;

type Both = { backend: Backend; gateway: Gateway };

/** A timeout longer than any test: where a test waits for a close, this timeout is not the cause. */
const PATIENT_MS = 3_600_000;
const START_MS = Date.now() - performance.now();

/** A gateway with one token, on its own port. It does not wait for a backend that is down, unless a test sets that. */
async function startGateway(
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
  addEvidence(t, () => ['the gateway logged', log.map((line) => shown(line.replace(/^."time":".*?",/, '{'), 400))]);
  const close = (): Promise<void> => gateway.close();
  t.after(() => {
    for (const line of log) PROVOKED.add(codeOf(line) ?? '');
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

async function startBoth(t: TestContext, config?: GatewayConfig, options?: GatewayOptions): Promise<Both> {
  const backend = await startBackend(t);
  return { backend, gateway: await startGateway(t, backend, config, options) };
}

/** A JSON answer: the fields of a refusal, and those of the backend, which only the tests know. */
type AnswerJson = Record<'error' | 'code' | 'requestId', string> & Record<string, unknown>;
/** A log line as JSON, with the fields that tests use for more than equality. */
type LogLine =
  & Record<'time' | 'level' | 'message' | 'requestId' | 'listen' | 'warning' | 'problems', string>
  & Record<'ms' | 'bytesOut', number>
  & Record<string, unknown>;

interface Answer extends Pick<http.IncomingMessage, 'headers' | 'rawHeaders'> {
  status: number;
  text: string;
  json: AnswerJson;
  /** The fingerprint of the certificate of its connection. */
  fingerprint: string;
}

interface Ask {
  method?: string;
  path?: string;
  headers?: http.OutgoingHttpHeaders;
  body?: string | Buffer | object;
  agent?: http.Agent;
}

function jsonIn(text: string): AnswerJson {
  try {
    return JSON.parse(text);
  } catch {
    return undefined!; // no JSON
  }
}

/**
 * One request on its own connection, with the target as given. A body makes it a POST, and an object is sent as JSON.
 */
async function ask(to: Address, { body, headers = {}, ...rest }: Ask = {}): Promise<Answer> {
  const { port, host = '127.0.0.1', ca } = to;
  const bytes = body !== undefined && Buffer.from(body instanceof Object ? JSON.stringify(body) : body);
  const req = (ca ? https : http).request({
    host,
    port,
    ...(ca && { ca, servername: 'localhost' }),
    ...(bytes ? { method: 'POST', path: '/v2/send' } : { method: 'GET', path: '/v1/about' }),
    agent: false,
    ...rest,
    headers: { ...(bytes && !headers['transfer-encoding'] && { 'content-length': bytes.length }), ...headers },
  });
  // From the start: an error of a body that is still being sent can follow the response at once.
  req.on('error', () => {}).end(bytes || undefined);
  const [res] = await within(once(req, 'response'), `the response to ${req.method} ${req.path}`);
  const fingerprint = res.socket instanceof TLSSocket ? res.socket.getPeerCertificate().fingerprint256 : '';
  const text = String(await within(readBytes(res), `the end of the response to ${req.method} ${req.path}`));
  const { statusCode, headers: own, rawHeaders } = res;
  return { status: statusCode!, headers: own, rawHeaders, text, json: jsonIn(text), fingerprint };
}

/** A send whose body the test writes itself. */
const beginSend = ({ port }: Address, headers: http.OutgoingHttpHeaders, path = '/v2/send'): http.ClientRequest =>
  http.request({ host: '127.0.0.1', port, method: 'POST', path, agent: false, headers });

type Connection = ReturnType<typeof connect>;

/** A new connection that has sent exact bytes, and everything received on it so far. */
function connect({ port, host = '127.0.0.1', ca }: Address, bytes: string | Buffer = '') {
  step('a connection');
  const socket = ca ? tlsConnect({ port, host, ca, servername: 'localhost' }) : net.connect(port, host);
  let text = '';
  socket.on('error', () => {}).on('data', (chunk) => void (text += chunk.toString('latin1'))).write(bytes);
  return { socket, text: () => text };
}

/** A connection that a test may leave open. */
function open(t: TestContext, to: Address, bytes?: string | Buffer): Connection {
  const connection = connect(to, bytes);
  t.after(() => connection.socket.destroy());
  return connection;
}

/** Sends exact bytes and returns everything received until the other side closes. */
async function raw(to: Address, bytes: string | Buffer): Promise<string> {
  const { socket, text } = connect(to, bytes);
  await closed(socket, `the gateway to close the connection with ${shown(String(bytes), 200)}`);
  return text();
}

/**
 * Everything received on a connection that has sent exact bytes, and continues with single bytes until it is closed.
 */
async function trickle(t: TestContext, to: Address, bytes: string): Promise<string> {
  const { socket, text } = open(t, to, bytes);
  const timer = setInterval(() => socket.write('x'), 5);
  await closed(socket).finally(() => clearInterval(timer));
  return text();
}

/** Waits for a socket to be closed, gracefully or not. */
async function closed(socket: net.Socket, what = 'a connection to be closed'): Promise<void> {
  if (!socket.closed) await within(new Promise<unknown>((resolve) => socket.once('close', resolve)), what);
}

/** One request in exact bytes: each is a character of its target, headers and body. */
function rawRequest(to: Address, target: string, { method = 'GET', headers = [] as string[], body = '' } = {}) {
  const isChunked = headers.some((line) => /^transfer-encoding:/i.test(line));
  const length = !isChunked && (body !== '' || method !== 'GET') ? [`Content-Length: ${body.length}`] : [];
  const head = [`${method} ${target} HTTP/1.1`, 'Host: gateway', 'Connection: close', ...headers, ...length];
  return raw(to, Buffer.from([...head, '', body].join('\r\n'), 'latin1'));
}

const statusOf = (response: string): number => Number(/^HTTP\/1\.1 (\d{3})/.exec(response)?.[1]);
const codeOf = (response: string): string | undefined => /"code":"(\w+)"/.exec(response)?.[1];

const NOTHING = { seen: 0, connections: 0 };

/** The answer has the form of all refusals, it is logged, and the backend saw nothing. */
function assertDenied(answer: Answer, status: number, code: string, { backend, gateway }: Both, before = NOTHING) {
  assert.equal(outcomeOf(answer), `${status} ${code}`, `the outcome of the response ${answer.text}`);
  assert.match(answer.headers['content-type'] ?? '', /^application\/json/);
  assert.match(answer.text, /^\{.*\}\n$/); // a separate line on a terminal
  assert.deepEqual(Object.keys(answer.json), ['error', 'code', 'requestId']);
  const { 'x-request-id': id, 'x-content-type-options': sniffing, 'cache-control': caching } = answer.headers;
  assert.deepEqual([id, sniffing, caching], [answer.json.requestId, 'nosniff', 'no-store']);
  const line = requests(gateway).find((entry) => entry.requestId === id);
  assert.deepEqual([line?.status, line?.code], [status, code], 'status and code in the log line of the request');
  assert.deepEqual({ seen: backend.seen.length, connections: backend.connections }, before, 'what the backend saw');
}

/** The log lines of requests. A test that reads the first one knows that it exists. */
function requests(gateway: { log: string[] }): [LogLine, ...LogLine[]] {
  return logLines(gateway.log).filter((line) => line.message === 'request') as [LogLine, ...LogLine[]];
}

const logLines = (lines: string[]): LogLine[] => lines.map((line) => JSON.parse(line));

/** Anything that has not arrived by then will not arrive. */
const WAIT_LIMIT_MS = 60_000;

/** Waits for a condition by polling it. Without a description, its failure shows the condition's source. */
async function until(condition: () => boolean, what = String(condition).replace(/^\(\) => /, '')): Promise<void> {
  step(what);
  const giveUpMs = performance.now() + WAIT_LIMIT_MS;
  while (!condition()) {
    if (performance.now() > giveUpMs) throw new Error(`waited ${WAIT_LIMIT_MS / 1000} s in vain for ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 2));
  }
}

/** Lets time pass in which something must not happen. */
function pass(ms: number): Promise<void> {
  step(`${ms} ms to pass`);
  return new Promise((resolve) => setTimeout(resolve, ms));
}

const basic = (userinfo: string): string => `Basic ${Buffer.from(userinfo).toString('base64')}`;

const FORM_WORDS = Object.keys(FORMS) as (keyof typeof FORMS)[];
const ALL_FORMS: GatewayConfig = { auth: { methods: FORM_WORDS } };

/** Headers into which clients, browsers and proxies copy a URL with its token, in their spellings. */
function copiesOf(token: string): http.OutgoingHttpHeaders[] {
  const encoded = Array.from(Buffer.from(token), (byte) => `%${byte.toString(16)}`).join('');
  const rows = `
    referer: http://gateway/@auth=${token}/swagger/index.html | x-original-url: /@auth=${token}/v2/send | x-original-uri: /v2/send?@auth=${token} | x-original-method: ${token} | x-rewrite-url: /v2/send?%40auth=${encoded} | x-envoy-original-path: /@auth=${token}/v2/send | x-forwarded-uri: /@auth=${token}/v2/send | x-replaced-path: /@auth=${token}/v2/send | cookie: auth=${token}
    host: api:${token}@gateway
    host: api:${encoded}@gateway`;
  return rows.trim().split('\n').map((row) => Object.fromEntries(parseRow(row).headers));
}

const T = 'the-token';

function post(token: string, length: number | 'chunked', ...headers: string[]): string {
  const framing = length === 'chunked' ? 'Transfer-Encoding: chunked' : `Content-Length: ${length}`;
  const lines = ['POST /v2/send HTTP/1.1', 'Host: x', `Authorization: Bearer ${token}`, framing, ...headers, '', ''];
  return lines.join('\r\n');
}

const ABOUT = `GET /v1/about HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n\r\n`;
const SEND = `${post(SECRET, HELLO.length)}${HELLO}`;

function folder(t: TestContext): string {
  const path = mkdtempSync(join(tmpdir(), 'gateway-'));
  t.after(() => rmSync(path, { recursive: true }));
  return path;
}

/** A file in a new folder, with a text, or a configuration as JSON. */
function fileWith(t: TestContext, content: unknown, name = 'gateway.json'): string {
  const file = join(folder(t), name);
  writeFileSync(file, typeof content === 'string' ? content : JSON.stringify(content), { mode: 0o600 });
  return file;
}

/** A text that occurs once in gateway.ts, and its replacement. */
type Change = [text: string, become: (text: string) => string];

/** A copy of gateway.ts with changes that a contributor might make. */
function changedSource(t: TestContext, ...changes: Change[]): string {
  const changed = changes.reduce((source, [text, become]) => {
    assert.equal(source.split(text).length, 2, `gateway.ts has it once: ${text}`);
    return source.replace(text, become);
  }, SOURCE);
  return fileWith(t, changed, 'gateway.mts');
}

/** The functions in which the compiler finds a mistake in a copy of gateway.ts. Only on Node. */
async function mistakesIn(file: string): Promise<string[]> {
  const { compilerOptions } = JSON.parse(read('tsconfig.json'));
  compilerOptions.typeRoots = [join(HERE, 'node_modules/@types')];
  const project = join(dirname(file), 'tsconfig.json');
  writeFileSync(project, JSON.stringify({ compilerOptions, files: [file] }));
  const tsc = promisify(execFile)(join(HERE, 'node_modules/.bin/tsc'), ['-p', project, '--pretty', 'false']);
  const { stdout } = await tsc.catch((error) => error);
  const lines = readFileSync(file, 'utf8').split('\n');
  const owners = groupsOf(stdout, /gateway\.mts\((\d+),\d+\): error/g).map((at) => {
    const before = lines.slice(0, Number(at)).join('\n');
    return groupsOf(before, /^(?:async )?(?:function|class|const|type|interface) (\w+)/gm).at(-1)!;
  });
  return [...new Set(owners)];
}

/** What only one of two places has, for the message of a failure: the code and a page, or two lists of a test. */
function difference(place: string, found: readonly string[], other: string, wanted: readonly string[]): string[] {
  return [
    ...found.filter((each) => !wanted.includes(each)).map((each) => `${each} is in ${place}, but not in ${other}`),
    ...wanted.filter((each) => !found.includes(each)).map((each) => `${each} is in ${other}, but not in ${place}`),
  ];
}

/** The mistakes for which a configuration is refused. */
function problemsOf(load: () => unknown): readonly string[] {
  try {
    load();
  } catch (error) {
    assert.ok(error instanceof ConfigError, String(error));
    return error.problems;
  }
  return [];
}

/** How this runtime starts a TypeScript file: in the same way as this one. */
const LOADER = process.execArgv.filter((flag, i, all) => flag.startsWith('--import') || all[i - 1] === '--import');

type Program = [file: string, ...args: string[]];

/** The file under test as a user starts it. */
const AS_IT_IS: Program = [process.execPath, ...LOADER, fileURLToPath(FILE)];
let compiled: Program | undefined;

/**
 * The gateway as tests start it. On Node the first start compiles it, because each start by tsx takes half a second.
 */
function program(): Program {
  if (!isNode || FILE.pathname.endsWith('.js')) return AS_IT_IS;
  if (compiled) return compiled;
  const dir = mkdtempSync(join(tmpdir(), 'gateway-'));
  process.prependOnceListener('exit', () => rmSync(dir, { recursive: true }));
  const words: Record<string, string> = { 'dist': dir, 'gateway.ts': fileURLToPath(FILE) };
  const [tsc, ...args] = PACKAGE.scripts.build.split(' ').map((word: string) => words[word] ?? word);
  writeFileSync(join(dir, 'package.json'), '{ "type": "module" }');
  const { status, stdout, stderr } = spawnSync(join(HERE, 'node_modules/.bin', tsc), args, {
    cwd: HERE,
    encoding: 'utf8',
  });
  assert.equal(status, 0, `the file does not compile:\n${stdout}${stderr}`);
  return compiled = [process.execPath, join(dir, 'gateway.js')];
}

/** A program in a new file. */
const script = (t: TestContext, code: string): Program => [process.execPath, fileWith(t, code, 'script.mjs')];

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
function start(args: string[], env: NodeJS.ProcessEnv = {}, [file, ...first]: Program = program()) {
  step('a process');
  const child = spawn(file, [...first, ...args], { cwd: HERE, env: { PATH: process.env.PATH, ...env } });
  tellWarden('+', child.pid);
  child.once('exit', () => tellWarden('-', child.pid));
  let output = '';
  for (const stream of [child.stdout, child.stderr]) stream.on('data', (chunk) => void (output += chunk));
  return Object.assign(child, { output: () => output });
}

type Process = Awaited<ReturnType<typeof startProcess>>;

type How = { backend?: { url: string }; args?: string[]; env?: NodeJS.ProcessEnv; input?: string; program?: Program };

/** A gateway in a separate process, with one token if it is given a backend. Its log is the lines that it prints. */
async function startProcess(t: TestContext, { backend, args = [], env, program }: How) {
  const own = backend && { API_TOKENS: SECRET, BACKEND_URL: backend.url };
  const child = start(args, { LISTEN: '127.0.0.1:0', LOG_FORMAT: 'json', ...own, ...env }, program);
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
async function runProcess(args: string[], { env, input = '', program }: How = {}) {
  const child = start(args, env, program);
  const ended = once(child, 'close');
  child.stdin.end(input);
  const [stdout, stderr] = await Promise.all([readText(child.stdout), readText(child.stderr)]);
  return { code: (await ended)[0] as number, stdout, stderr };
}

/** Runs a command line that terminates, in this process. */
const cli = async (args: string[], { env = {}, input = '' }: How = {}) =>
  await run(args, env, () => Buffer.from(input));

const ACCEPTED =
  'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n';
const RECEIVE = `/v1/receive/${FROM}`;
const RECEIVING: GatewayConfig = { ...ALL_FORMS, allow: ['receive', 'info', 'send'] };

/** Accepts a WebSocket. */
function accept(socket: Duplex): void {
  socket.on('end', () => socket.end()).write(ACCEPTED);
}

/** A backend in json-rpc mode; `open` is what it does with a WebSocket. */
async function startUpgradeBackend(t: TestContext, open: (socket: Duplex, head: Buffer) => void = accept) {
  const backend = Object.assign(await startBackend(t), { sockets: [] as Duplex[] });
  backend.server.on('upgrade', (req: http.IncomingMessage, socket: Duplex, head: Buffer) => {
    backend.seen.push(seenOf(req, head, true));
    backend.sockets.push(socket);
    socket.on('error', () => {});
    t.after(() => socket.destroy());
    open(socket, head);
  });
  return backend;
}

function openWebSocket(
  t: TestContext,
  to: Address,
  { path = RECEIVE, headers = [`Authorization: Bearer ${SECRET}`], more = '' } = {},
): Connection {
  const own = ['Host: gateway', 'Connection: keep-alive, Upgrade', 'Upgrade: WebSocket', 'Sec-WebSocket-Version: 13'];
  const key = 'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==';
  return open(t, to, [`GET ${path} HTTP/1.1`, ...own, key, ...headers, '', more].join('\r\n'));
}

/** A token with these settings, and a second token. */
function tokens(settings: TokenConfig, other?: TokenConfig): GatewayConfig {
  return { tokens: { test: { secret: SECRET, ...settings }, ...(other && { other: { secret: OTHER, ...other } }) } };
}

const NO_TOKENS = { tokens: undefined } as unknown as GatewayConfig;
const CONFINED: GatewayConfig = {
  allow: ['messaging', 'info'],
  tokens: { confined: { secret: SECRET, senders: [FROM], recipients: [TO, 'group.*'] } },
};
const STRANGER = '+15559999999';

/** What the backend got, as JSON. */
const gotJson = (backend: Backend): Record<string, unknown> => JSON.parse(String(backend.seen.at(-1)!.body));

/** A form as browsers and libraries encode it. */
function multipart(fields: [name: string, value: string, more?: string][]): string {
  const parts = fields.map(([name, value, more = '']) =>
    `--limit\r\nContent-Disposition: form-data; name="${name}"${more}\r\n\r\n${value}\r\n`
  );
  return `${parts.join('')}--limit--\r\n`;
}
const AS_MULTIPART = 'multipart/form-data; boundary=limit';

const PEMS = [
  '-----BEGIN CERTIFICATE-----\nMIIBnDCCAUGgAwIBAgIUQWdv+xGmuEl9nX9ewMfxudPTZBEwCgYIKoZIzj0EAwIw\nFDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMTAzMTAyMVoYDzIxMjYxMDI4\nMDMxMDIxWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO\nPQMBBwNCAARRM76Gw5purxaOY8padP39ccCvAIWm8HlEYUY9oIqgSs/3DbbxcF6t\nTQRevBFDfo0QO57CcyIRAI5gQeUcFDKco28wbTAdBgNVHQ4EFgQU/v8b+g/8ndoA\nm8b1xzKP/tvKhN4wHwYDVR0jBBgwFoAU/v8b+g/8ndoAm8b1xzKP/tvKhN4wDwYD\nVR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI\nzj0EAwIDSQAwRgIhALTPRt0n7E8XbuttJEAOV16lUhf/l+7hpZ28c5l2N2PAAiEA\n6AbxCXeLEaPOWPoIi4KBjQZy22Z6dBRnOXdeAKeLnPQ=\n-----END CERTIFICATE-----',
  '-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgNEN9dKKi90ENz1Fx\nmQXmA+AH+lUDR5JbbvE7W00dSoOhRANCAARRM76Gw5purxaOY8padP39ccCvAIWm\n8HlEYUY9oIqgSs/3DbbxcF6tTQRevBFDfo0QO57CcyIRAI5gQeUcFDKc\n-----END PRIVATE KEY-----',
  '-----BEGIN CERTIFICATE-----\nMIIBmzCCAUGgAwIBAgIUAi0vbPmxDoq0UezE48LfTuco5QMwCgYIKoZIzj0EAwIw\nFDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMTAzMTAyMVoYDzIxMjYxMDI4\nMDMxMDIxWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO\nPQMBBwNCAASDY5doP+J4qegltj/JTle2PFbosk72SsF76L7qAU77bUkrOr7pAOJ5\nMJkYdGVZJhMLf43VFQfIWrI9RZhq55MJo28wbTAdBgNVHQ4EFgQUbL0Q5k3jAGLb\nIGZGEDCL1ToRfVkwHwYDVR0jBBgwFoAUbL0Q5k3jAGLbIGZGEDCL1ToRfVkwDwYD\nVR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI\nzj0EAwIDSAAwRQIgBHEQv7zraccRcKsH5zV+bjSOiPkNjSW1k4jLst25TdMCIQCK\nwJGLGCn1YZNcxONgKaZUnha2rz0arAQ5YTYdMDI3Lw==\n-----END CERTIFICATE-----',
  '-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgr8z/a2vOzJnvjM3H\nfJ//tl9FARPOVaxjnyMbvysUme2hRANCAASDY5doP+J4qegltj/JTle2PFbosk72\nSsF76L7qAU77bUkrOr7pAOJ5MJkYdGVZJhMLf43VFQfIWrI9RZhq55MJ\n-----END PRIVATE KEY-----',
] as const;
/** Two certificates for localhost and 127.0.0.1, with their keys. */
const CERTS = [{ cert: PEMS[0], key: PEMS[1] }, { cert: PEMS[2], key: PEMS[3] }] as const;

const certificate = (t: TestContext) => ({ cert: fileWith(t, CERTS[0].cert), key: fileWith(t, CERTS[0].key) });

const MIB = 1024 * 1024;

/** The fenced blocks of a language in a page. */
function blocks(language: string, page = ALL_PAGES): string[] {
  const fence = new RegExp('^```(?:' + language + ')\\n([^]*?)^```$', 'gm');
  return Array.from(page.matchAll(fence), (match) => match[1]!);
}

/**
 * A table is a test of many requests, one per row, each with its expected outcome:
 *
 *     POST /v2/send | bearer | {"number":"…"} → 403 sender_not_allowed | reason=… | "words of the response"
 *
 * The fields before the arrow are the request, in any order, each recognized by its form:
 *   POST /v2/send   a method and a target, or a target alone
 *   bearer          or `bearer TOKEN`, `basic`, `basic USER:PASSWORD`, `none`
 *   Name: value     a header
 *   {"a":1}         a JSON body, as it stands
 *   'text'          another body, with the escapes \r \n \t \uHHHH and \xHH, which is a byte
 *   -- a = b -- f; filename="x" = c   a multipart form
 *   @ {…}           settings of the token, for this row
 * The fields after it are the expected outcome:
 *   403 code        a status, and a code if the gateway refuses; `passes` is any status of the backend
 *   GET /x          what the backend got; {…} or 'text': the body that it got, as JSON or in bytes
 *   same            it got the request's body, or one with its text as the message
 *   > Name: value   a header that it got; without a value, that it did not get
 *   Name: value     a header of the response; `name=value`: a field of the log line
 *   "words"         what the response holds
 *
 * A line that starts with * is a row whose fields are the defaults of the rows after it (JSON that the backend got is
 * merged into its own). If there are several, every row is sent in each of these ways. A line that starts with # is a
 * comment. Short rows share a line, separated by two semicolons.
 *
 * For every status from 400 on the backend must have seen nothing; for any other, one request. No row may reveal a
 * token to the backend, to the client or in the log, or a phone number in the log.
 *
 *     table(title, config)`            table(title, config)([
 *       * bearer → 201                   '* bearer → 201',
 *       {"message":"…"}`;                ...messages.map((message) => `{"message":"${message}"}`),
 *                                      ]);
 */
function table(title: string, config: GatewayConfig, { handler, ...options }: TableOptions = {}) {
  return (rows: Rows, ...values: unknown[]): void =>
    void test(title, async (t) => {
      const backend = await startBackend(t, handler);
      const gateway = await startGateway(t, backend, config, options);
      const isTemplate = typeof rows === 'object' && 'raw' in rows;
      await checkRows({ backend, gateway }, isTemplate ? literal(rows as TemplateStringsArray, ...values) : rows);
    });
}

/** String.raw, in which a list becomes as many lines. */
function literal({ raw }: TemplateStringsArray, ...values: unknown[]): string {
  const lists = values.map((value) => Array.isArray(value) ? value.join('\n') : value);
  return String.raw({ raw: 'Bun' in globalThis ? raw.map(asWritten) : raw }, ...lists);
}

/** Bun 1.4 has upper-case escapes instead of letters beyond ASCII. */
function asWritten(raw: string): string {
  const escape = /\\u(?:(?!00[0-7]|D[89A-F])([0-9A-F]{4})|\{([0-9a-f]+)\})/g;
  return raw.replace(escape, (_, four, more) => String.fromCodePoint(parseInt(four ?? more, 16)));
}

type TableOptions = GatewayOptions & { handler?: Handler };
type Rows = string | readonly Rows[];

/** Sends the rows of a table, one after the other, to a running gateway. A failure shows every wrong row. */
async function checkRows(both: Both, rows: Rows): Promise<void> {
  const all = [rows as unknown[]].flat(Infinity).join('\n').split(/\n| ;; /).map((line) => line.trim());
  const lines = all.filter((line) => /^[^#]/.test(line));
  let ways = [''];
  let tried = 0;
  const wrong: string[] = [];
  for (const [i, line] of lines.entries()) {
    const isWay = line.startsWith('* ');
    if (isWay) ways = [...(lines[i - 1]?.startsWith('* ') ? ways : []), line.slice(2)];
    for (const way of isWay ? [] : ways) {
      tried++;
      try {
        await checkRow(both, parseRow(line, parseRow(way)));
      } catch (error) {
        const rows = [`row       ${shown(line, 600)}`, ...way ? [`with      * ${shown(way, 600)}`] : []];
        wrong.push([...rows, messageOf(error)].join('\n'));
      }
    }
  }
  const found = `${wrong.length} of ${tried} rows are wrong`;
  assert.ok(wrong.length === 0, [found, ...wrong].join('\n\n').replaceAll('\n', '\n  '));
}

type Pair = [name: string, value: string];

/** The request of a row, and its expected outcome. */
interface Row extends Partial<Record<'method' | 'target' | 'settings' | 'status' | 'code' | 'line', string>> {
  headers: Pair[];
  body?: Buffer;
  json?: object;
  bytes?: Buffer;
  isSame?: boolean;
  got: Pair[];
  log: Pair[];
  answered: Pair[];
  words: string[];
}

function parseRow(text: string, each: Row = { headers: [], got: [], log: [], answered: [], words: [] }): Row {
  const [request = '', wanted = ''] = text.split(/(?:^| )→ /);
  const row: Row = { ...each, headers: [], words: [...each.words] };
  const own = new Set<string>();
  const add = (name: string, value: string): void => {
    own.add(name.toLowerCase());
    row.headers.push([name, value]);
  };
  const pair = (field: string, separator: string): Pair => {
    const [name = '', ...rest] = field.split(separator);
    return [name, rest.join(separator).trim()];
  };
  for (const field of request.split(' | ').map((part) => part.trim()).filter(Boolean)) {
    const [word = '', rest = ''] = pair(field, ' ');
    if (field.startsWith("'")) row.body = unescaped(field.slice(1, -1));
    else if (/^["{[]/.test(field)) row.body = Buffer.from(field);
    else if (field.startsWith('-- ')) {
      const parts = field.slice(3).split(' -- ').map((part) => /^([^;=]*?)(;.*?)? = ?(.*)$/s.exec(part)!);
      row.body = unescaped(multipart(parts.map(([, name = '', more = '', value = '']) => [name, value, more])));
    } else if (word === '@') row.settings = rest;
    else if (word === 'none') own.add('authorization');
    else if (word === 'bearer') add('Authorization', `Bearer ${rest || SECRET}`);
    else if (word === 'basic') add('Authorization', basic(rest || `api:${SECRET}`));
    else if (/^[\w-]+:/.test(field)) add(...pair(field, ':'));
    else if (field.startsWith('/')) row.target = field;
    else [row.method, row.target] = [word, rest];
  }
  if (/(?:^| \| )-- /.test(request) && !own.has('content-type')) add('Content-Type', AS_MULTIPART);
  row.headers.unshift(...each.headers.filter(([name]) => !own.has(name.toLowerCase())));
  for (const field of wanted.split(' | ').filter(Boolean)) {
    const [word = '', rest = ''] = pair(field, ' ');
    if (/^(?:\d{3}|passes)\b/.test(field)) [row.status = '', row.code = ''] = field.split(' ');
    else if (field.startsWith('{')) row.json = { ...row.json, ...JSON.parse(field) };
    else if (field.startsWith("'")) row.bytes = unescaped(field.slice(1, -1));
    else if (field === 'same') row.isSame = true;
    else if (word === '>') row.got = put(row.got, pair(rest, ':'));
    else if (/^\w+=/.test(field)) row.log = put(row.log, pair(field, '='));
    else if (/^[\w-]+:/.test(field)) row.answered = put(row.answered, pair(field, ':'));
    else if (field.startsWith('"')) row.words.push(field.slice(1, -1));
    else row.line = field;
  }
  return row;
}

/** Fields with one added, or with another value for one. */
const put = (fields: Pair[], added: Pair): Pair[] => [...fields.filter(([name]) => name !== added[0]), added];

/** The bytes of a text in UTF-8; \xHH is a single byte. */
function unescaped(text: string): Buffer {
  const plain = (part: string): string => part.replace(/\\(?:u\w{4}|[rnt\\])/g, (escape) => JSON.parse(`"${escape}"`));
  const parts = text.split(/\\x([0-9a-f]{2})/i);
  return Buffer.concat(parts.map((part, i) => i % 2 === 1 ? Buffer.from(part, 'hex') : Buffer.from(plain(part))));
}

async function sendRow(to: Address, row: Row): Promise<Answer> {
  const { body, method = body ? 'POST' : 'GET', target = body ? '/v2/send' : '/v1/about' } = row;
  const [bytes = '', path = '', ...headers] = [body ?? '', target, ...row.headers.map((pair) => pair.join(': '))]
    .map((text) => Buffer.from(text).toString('latin1'));
  const isChunked = headers.some((line) => /^transfer-encoding:/i.test(line));
  const chunk = bytes && `${bytes.length.toString(16)}\r\n${bytes}\r\n`;
  return parseAnswer(await rawRequest(to, path, { method, headers, body: isChunked ? `${chunk}0\r\n\r\n` : bytes }));
}

/** The response in the bytes received on a connection, one character per byte. */
function parseAnswer(response: string): Answer {
  const [head = '', ...rest] = response.split('\r\n\r\n');
  const all = new Headers(head.split('\r\n').slice(1).map((line) => line.split(/: *(.*)/, 2) as Pair));
  const headers = Object.fromEntries(Array.from(all.keys(), (name) => [name, all.get(name)!]));
  const text = Buffer.from(rest.join('\r\n\r\n'), 'latin1').toString();
  return { status: statusOf(response), headers, rawHeaders: [], text, json: jsonIn(text), fingerprint: '' };
}

async function checkRow(both: Both, row: Row): Promise<void> {
  const { backend, gateway } = both;
  gateway.useSettings(row.settings);
  const { seen, connections } = backend;
  const before = { seen: seen.length, connections };
  const answer = await sendRow(gateway, row);
  try {
    await checkOutcome(both, row, answer, before);
  } catch (error) {
    const got = seen.slice(before.seen).map(showSeen).join('\n          ');
    const text = answer.text.replace(/^[0-9a-f]+\r\n|\r\n0\r\n\r\n$/g, ''); // the framing of a chunk
    const response = `response  ${answer.status} ${shown(text, 600).trim()}`;
    const lines = [messageOf(error), response, `backend   ${got || 'saw nothing'}`];
    throw new strict.AssertionError({ message: lines.join('\n') });
  }
}

/** Asserts that the response, the backend and the log match the row. */
async function checkOutcome(both: Both, row: Row, answer: Answer, before: typeof NOTHING): Promise<void> {
  const { backend, gateway } = both;
  const { seen } = backend;
  if (row.status !== 'passes') assert.equal(String(answer.status), row.status, 'the status');
  const isRefused = row.status !== 'passes' && answer.status >= 400;
  if (isRefused && row.code && row.method !== 'HEAD') assertDenied(answer, answer.status, row.code, both, before);
  assert.equal(seen.length - before.seen, isRefused ? 0 : 1, 'the requests that the backend saw');
  const got = seen.at(-1);
  if (!isRefused) {
    const text = String(row.body);
    const same = row.isSame && (text.startsWith('{') ? JSON.parse(text) : { message: text });
    if (row.line) assert.equal(`${got!.method} ${got!.url}`, row.line, 'what the backend got');
    if (row.json || same) assert.deepEqual(gotJson(backend), { ...row.json, ...same }, 'the body that the backend got');
    if (row.bytes) {
      assert.equal(got!.body.toString('latin1'), row.bytes.toString('latin1'), 'the bytes that the backend got');
    }
    for (const [name, value] of row.got) assert.equal(got!.headers[name.toLowerCase()] ?? '', value, `> ${name}`);
  }
  const shown = `${got?.url}${got?.rawHeaders}${got?.body}${gateway.log.join()}${answer.text}`;
  assert.ok(!shown.includes(SECRET) && !shown.includes(OTHER), 'the backend, the log or the client saw a token');
  const logged = gateway.log.filter((text) => text.includes('"message":"request"')).join();
  for (const value of [FROM, TO, STRANGER, GROUP]) assert.ok(!logged.includes(value), `the log has ${value}`);
  for (const words of row.words) {
    assert.ok(answer.text.includes(words) || answer.json?.error.includes(words), `${words} is not in ${answer.text}`);
  }
  for (const [name, value] of row.answered) assert.equal(answer.headers[name.toLowerCase()] ?? '', value, name);
  const id = answer.json?.requestId ?? got?.headers['x-request-id'];
  const own = (line: LogLine): boolean => id === undefined ? line.method === row.method : line.requestId === id;
  if (row.log.length > 0) await until(() => requests(gateway).some(own), 'the log line of the request');
  for (const [name, value] of row.log) assert.equal(String(requests(gateway).findLast(own)![name]), value, name);
}

section('PROBLEMS'); // ────────────────────────────────────────────────────────────────────────────

test('an internal error is a 500 without details, and its stack is logged', async (t) => {
  let calls = -1000; // of the clock; a request calls it the first time while its token is checked
  const now = (): number => {
    if (++calls === 1) throw new RangeError('the clock is broken');
    return Date.now();
  };
  const both = await startBoth(t, {}, { now });
  // Refusals capture no stack. The stacks of later errors must not be affected.
  assert.equal(outcomeOf(await ask(both.gateway, {})), '401 unauthorized');
  calls = 0;
  const answer = await ask(both.gateway, { body: MESSAGE, headers: BEARER });
  assertDenied(answer, 500, 'internal_error', both);
  assert.doesNotMatch(answer.text, /clock/);
  const line = logLines(both.gateway.log).find(({ message }) => message === 'internal error');
  assert.match(String(line?.stack), /RangeError: the clock is broken\n +at /);
  assert.equal(line?.requestId, answer.json.requestId);
});

section('ROUTES'); // ──────────────────────────────────────────────────────────────────────────────
/** Every route of backend.md, by its group in the gateway; N is a number, G a group. */
const ROUTES = Object.entries({
  info: 'GET /v1/about; GET /v1/health',
  send: 'POST /v2/send; POST /v1/send',
  receive: 'GET /v1/receive/N',
  messaging: `
    PUT,DELETE /v1/typing-indicator/N; POST,DELETE /v1/reactions/N; POST /v1/receipts/N; DELETE /v1/remote-delete/N;
    POST,DELETE /v1/polls/N; POST /v1/polls/N/vote; GET /v1/attachments; GET,DELETE /v1/attachments/abc;
    GET,POST /v1/sticker-packs/N; GET /v1/search; GET /v1/search/N; GET,POST /v1/groups/N;
    GET,PUT,DELETE /v1/groups/N/G; GET /v1/groups/N/G/avatar; POST /v1/groups/N/G/block; POST /v1/groups/N/G/join;
    POST /v1/groups/N/G/quit; POST,DELETE /v1/groups/N/G/members; POST,DELETE /v1/groups/N/G/admins;
    POST,DELETE /v1/groups/N/G/pin-message`,
  setup: `
    GET,POST /v1/configuration; GET,POST /v1/configuration/N/settings; POST /v1/register/N;
    POST /v1/register/N/verify/123456; POST /v1/unregister/N; GET /v1/qrcodelink; GET /v1/qrcodelink/raw;
    GET /v1/accounts; POST /v1/accounts/N/rate-limit-challenge; PUT /v1/accounts/N/settings;
    POST,DELETE /v1/accounts/N/username; POST,DELETE /v1/accounts/N/pin; GET,POST /v1/devices/N;
    DELETE /v1/devices/N/2; DELETE /v1/devices/N/local-data; PUT /v1/profiles/N; GET /v1/identities/N;
    PUT /v1/identities/N/trust/+15550100009; GET,PUT /v1/contacts/N; GET /v1/contacts/N/some-uuid;
    GET /v1/contacts/N/some-uuid/avatar; POST /v1/contacts/N/sync; GET,POST,PUT,PATCH,DELETE /v1/plugins/anything;
    GET /swagger/index.html; GET /swagger/doc.json`,
}).flatMap(([group, routes]) =>
  routes.replace(/N/g, FROM).replace(/\/G/g, `/${GROUP}`).split(';').flatMap((route) => {
    const [methods = '', path = ''] = route.trim().split(' ');
    return methods.split(',').map((method) => ({ group, method, path }));
  })
);

/** A backend that answers every request with 200, whether the route exists or not. */
const ANY_ROUTE: Handler = (req, res) => void req.resume().on('end', () => res.end('{}'));
const ANSWERING = { handler: ANY_ROUTE };
const ALL_GROUPS = { allow: ['messaging', 'setup'] };

/** Entries of allow, and the routes that each opens: group, method and path. */
const OPENED = {
  ...Object.fromEntries(
    KNOWN_ROUTES.filter(({ group }) => group !== 'metrics').map(({ group }) => [group, new RegExp(`^${group}`)]),
  ),
  'messaging': /^(send|receive|messaging)/,
  '* /*,* /v1/*,* /:a/*,GET /v1/:a/:b,* /v1/*/:number,* /:a/:b,* /v1/:a,* /:swagger/*,messaging,info': /^(?!setup)/,
  '* /v1/accounts/*': /^\w+ \w+ \/v1\/accounts\//,
  'GET /swagger/*': /GET \/swagger\//,
  'GET /swagger/:file': /GET \/swagger\//,
  'GET /v1/accounts,GET /swagger/doc.json': /GET \/(v1\/accounts|swagger\/doc.json)$/,
};
for (const [allow, opened] of Object.entries(OPENED)) {
  table(`allow opens only its routes, and no wildcard opens setup: ${allow}`, { allow: allow.split(',') }, ANSWERING)([
    '* bearer',
    ROUTES.map(({ group, method, path }) => {
      const refusal = group === 'setup' ? '403 setup_blocked' : '403 endpoint_not_allowed';
      const result = opened.test(`${group} ${method} ${path}`) ? `200 | ${method} ${path}` : refusal;
      return `${method} ${path}${method === 'GET' ? '' : ' | {}'} → ${result}`;
    }),
  ]);
}

test("the table of routes matches the backend's, each in its group, and its rows state only facts that the code uses", () => {
  const found = ROUTES.map(({ group, method, path }) => {
    const { route } = parseTarget(method, path);
    assert.equal(
      route?.group,
      group,
      `the group in ROUTES of gateway.ts, where the list of this section has ${method} ${path}`,
    );
    return route;
  });
  const others = KNOWN_ROUTES.filter((route) => !found.includes(route) && route.template !== '/metrics');
  const rows = others.map(({ method, template }) => `${method} ${template}`);
  assert.deepEqual(
    rows,
    [],
    'these rows of ROUTES in gateway.ts are not in the list of this section, and not in backend.md',
  );
  const said = KNOWN_ROUTES.flatMap(({ facts }) => facts);
  const asked = groupsOf(SOURCE, /\bsays\([^()]*, '([a-z-]+)'\)/g);
  assert.deepEqual(difference('a row of ROUTES', said, 'a call of says()', asked), []);
});

/** Starts a gateway from a copy of gateway.ts whose table has more routes, added as documented. */
async function startWithRoutes(t: TestContext, rows: string[], config: GatewayConfig, handler: Handler = ANY_ROUTE) {
  const added: Change = ['  messaging: [\n', (text) => text + rows.map((row) => `    '${row}',\n`).join('')];
  const { createGateway } = await import(pathToFileURL(changedSource(t, added)).href) as typeof import('./gateway.ts');
  const backend = await startBackend(t, handler);
  return { backend, gateway: await startGateway(t, backend, config, {}, createGateway) };
}

// POST …/:groupid/link, added as documented, gave a group's link to a token with `recipients`.
test('a route added to the table has every restriction until its row lifts it: it changes groups, is for persons, shows all accounts, takes no large body', async (t) => {
  const group = `/v1/groups/${FROM}/${GROUP}`;
  const large = `{"x":"${'x'.repeat(70_000)}"}`;
  const [strict, open] = ['', ' any-body same-members to-groups no-account'];
  const ofGroups = `@ ${JSON.stringify({ recipients: ['group.*'] })} | bearer`;
  const ofSender = `@ ${JSON.stringify({ senders: [FROM] })} | bearer`;
  for (const facts of [strict, open]) {
    const result = (refusal: string): string => facts === strict ? `403 ${refusal}` : '200';
    const rows = ['POST /v1/groups/:number/:groupid/link', 'GET,POST /v1/new-things'].map((row) => row + facts);
    const both = await startWithRoutes(t, rows, { allow: ['messaging'] });
    await checkRows(both, [
      `${ofGroups} | POST ${group}/link | {} → ${result('endpoint_not_allowed | reason=group_change_not_named')}`,
      `${ofSender} | GET /v1/new-things → ${result('endpoint_not_allowed | reason=route_without_account')}`,
      `bearer | POST /v1/new-things | {"recipient":"${GROUP}"} → ${facts === strict ? '400 bad_field' : '200'}`,
      `bearer | POST ${group}/link → 200 ;; bearer | POST /v1/new-things | {"a":1} → 200`,
      `bearer | POST /v1/new-things | ${large} → ${facts === strict ? '413 body_too_large' : '200'}`,
    ]);
  }
});

test('a path without a row needs a slot, like a row that does not state otherwise', async (t) => {
  for (const path of ['/v1/new', '/v1/attachments']) {
    const { backend, gateway } = await startHeld(t, 1, { allow: ['GET /v1/new', 'messaging'] });
    const both = [path, path].map((path) => ask(gateway, { path, headers: BEARER }));
    await until(() => backend.acting === 1);
    await settled(gateway);
    assert.equal(backend.seen.length, 1, `${path}: one of two has the only slot`);
    backend.answer();
    await until(() => backend.acting === 1);
    backend.answer();
    await Promise.all(both);
    assert.equal(backend.most, 1);
  }
});

test('the body of a path without a row streams, and may name groups', async (t) => {
  const { backend, gateway } = await startBoth(t, { allow: ['POST /v1/new'] });
  const body = JSON.stringify({ recipients: [GROUP], x: 'x'.repeat(100_000) });
  const request = beginSend(gateway, BEARER, '/v1/new');
  request.on('error', () => {}).write(body.slice(0, 90_000));
  await until(() => backend.seen.length === 1, 'the backend to get the request before its end');
  request.end(body.slice(90_000));
  await until(() => backend.seen[0]!.complete);
  assert.equal(String(backend.seen[0]!.body), body);
});

const NEW_ROUTES = ['/v1/register', '/v1/devices/x/y/z', '/v1/accounts/new/thing', '/swagger', '/v1/plugins'];
const ALL_BUT_SETUP = { allow: ['* /*', 'messaging', 'GET /v1/accounts'] };
table('a new upstream route below a setup prefix is setup, although it is in no table', ALL_BUT_SETUP)`
  * bearer → 403 setup_blocked
  ${NEW_ROUTES.map((path) => `GET ${path} ;; DELETE ${path} ;; OPTIONS ${path} ;; PROPFIND ${path}`)}
  POST /v1/accounts | {}`;

section('GATEWAY'); // ─────────────────────────────────────────────────────────────────────────────

/**
 * A request in exact bytes: " | " separates its lines, and " || " its head from its body. `about` and `send` start a
 * GET and a POST with a valid token; `bearer` is that token's header.
 */
function bytesOf(text: string): Buffer {
  const lines = text.trim().replace(/^about/, 'GET /v1/about HTTP/1.1 | Host: x | bearer')
    .replace(/^send/, 'POST /v2/send HTTP/1.1 | Host: x | bearer').replace('bearer', `Authorization: Bearer ${SECRET}`);
  return unescaped(`${lines.replaceAll(' || ', '\r\n\r\n').replaceAll(' | ', '\r\n')}\r\n\r\n`);
}
/** Sends requests, one per line. Each must be refused with this response, in JSON, and its connection closed. */
async function sendRefused(to: Gateway, outcome: string, rows: string): Promise<void> {
  const [status = '', code] = outcome.split(' ');
  for (const row of rows.trim().split(/\n\s*/)) {
    const response = await raw(to, bytesOf(row));
    const { json, headers } = parseAnswer(response);
    const got = [response.split('\r\n')[0], json?.code, headers.connection, Object.keys(json ?? {}).join()];
    const first = `HTTP/1.1 ${status} ${http.STATUS_CODES[status]}`;
    assert.deepEqual(got, [first, code, 'close', 'error,code,requestId'], row.slice(0, 60));
    if (code === 'bad_request') assert.match(json.error, /percent-encode URLs .* Content-Length or chunked/);
  }
}
/** The outcome of a request, from its response or its log line: the status, and the code if the gateway refused it. */
function outcomeOf(end: Answer | LogLine | string): string {
  const { status, code, json } = (typeof end === 'string' ? parseAnswer(end) : end) as Answer & LogLine;
  return `${status} ${code ?? json?.code ?? ''}`.trim();
}
const HEALTH = 'GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n';
/** A request for a WebSocket, without a credential. */
const HANDSHAKE = `GET ${RECEIVE} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n`;
const AT_INFO: GatewayConfig = { log: { format: 'json', level: 'info' } };
const AS_OTHER = { authorization: `Bearer ${OTHER}` };
/** The statuses of requests that are sent at the same time. */
async function statusesOf(to: Address, ...asked: Ask[]): Promise<number[]> {
  return (await Promise.all(asked.map((request) => ask(to, request)))).map(({ status }) => status);
}
/** Repeats the request until the response is 200. */
async function untilServed(to: Address, request: Ask): Promise<void> {
  for (let i = 0; i < 5000; i++) if ((await ask(to, { headers: BEARER, ...request })).status === 200) return;
  assert.fail('it was never served');
}
/**
 * A backend that answers a POST, or a query with "hang", only after `finish` is called, and a gateway in front of it.
 */
async function startHolding(t: TestContext, config: GatewayConfig = {}, options?: GatewayOptions) {
  const held: http.ServerResponse[] = [];
  const backend = await startBackend(t, (req, res) => {
    if (req.resume().url!.endsWith('begun')) res.write('first, ');
    if (req.method === 'POST' || /hang/.test(req.url!)) held.push(res);
    else res.end(req.url);
  });
  const finish = (): void => held.splice(0).forEach((res) => res.end('and last'));
  return { backend, finish, gateway: await startGateway(t, backend, config, options) };
}
/** The log lines with this message. */
function linesOf(gateway: { log: string[] }, pattern: RegExp): LogLine[] {
  return logLines(gateway.log).filter(({ message }) => pattern.test(message));
}

test('at debug level the log line of a request gives every reason why its connection is not kept', {
  skip: !isNode && 'Deno and Bun decide some of them themselves',
}, async (t) => {
  const { gateway } = await startBoth(t, {
    tokens: { test: { secret: SECRET, defaults: DEFAULTS, allow: ['GET /v2/send', 'info'] } },
  });
  const many = Array.from({ length: 201 }, (_, i) => `X-${i}: y`).join('\r\n');
  const about = (...lines: string[]): string => ABOUT.replace('Host: x', ['Host: x', ...lines].join('\r\n'));
  const rows = {
    client: about('Connection: close'),
    body_not_read: post(OTHER, 70_000),
    http_1_0: about('Connection: keep-alive').replace('HTTP/1.1', 'HTTP/1.0'),
    send_by_get: about().replace('/v1/about', '/v2/send?message=x'),
    upgrade: about('Connection: keep-alive, Upgrade', 'Upgrade: h2c'),
    too_many_headers: about(many),
    continue_awaited: about('Expect: 100-continue'),
    bad_request: ABOUT.replace('Host: x\r\n', ''),
  };
  for (const [reason, bytes] of Object.entries(rows)) {
    const before = requests(gateway).length;
    // The parser of Node 26 enforces the limit of header fields itself.
    const isParsers = (): boolean =>
      reason === 'too_many_headers' && gateway.log.some((line) => line.includes('HPE_HEADER_OVERFLOW'));
    const { socket } = open(t, gateway, bytes);
    await until(() => requests(gateway).length > before || isParsers(), `the log line for ${reason}`);
    if (!isParsers()) assert.equal(requests(gateway).at(-1)!.closing, reason);
    socket.destroy();
  }
  const before = requests(gateway).length;
  open(t, gateway, ABOUT);
  await until(() => requests(gateway).length > before);
  const { status, closing } = requests(gateway).at(-1)!;
  assert.deepEqual([status, closing], [200, undefined], 'one that is kept');
  // Every reason in the code is covered here, except a shutdown, and bytes that cannot be parsed and have no log line.
  const [, table] = /const reasons = \{\n([^]*?)\n {4}\};/.exec(SOURCE)!;
  const known = groupsOf(table!, /^ {6}(\w+): /gm).concat(groupsOf(SOURCE, /beginClosing\('(\w+)'\)/g), 'bad_request');
  const tested = [...Object.keys(rows), 'shutdown', 'not_parsed'];
  assert.deepEqual(known.filter((reason) => !tested.includes(reason)), [], 'reasons of gateway.ts without a row here');
  assert.deepEqual(tested.filter((reason) => !known.includes(reason)), [], 'rows here whose reason gateway.ts has not');
  const quiet = await startBoth(t, AT_INFO);
  await raw(quiet.gateway, about('Connection: close'));
  assert.equal('closing' in requests(quiet.gateway)[0], false, 'not at other levels');
});

test('every listener of the server is in the one table, behind the guard', () => {
  const [, events] = /function listenersOf[^]*?\n {2}return \{\n([^]*?)\n {2}\};/.exec(SOURCE)!;
  const names = groupsOf(events!, /^ {4}(\w+)[:,]/gm);
  const known = `checkContinue checkExpectation clientError connect connection error request secureConnection timeout
    tlsClientError upgrade`.split(/\s+/);
  assert.deepEqual(difference('listenersOf', names, 'this test', known), []);
  // The command line adds one for its query to the backend, and waits for lifecycle events.
  assert.deepEqual(
    groupsOf(SOURCE, /\bserver\.on\(([^,]*),/g),
    ['event', "'request'"],
    'listeners registered elsewhere',
  );
});

// node:http answered a missing Host with an empty 400, and accepted other HTTP versions.
test('anything but HTTP/1.0 and 1.1, a missing Host, wrong framing and CONNECT are refused in JSON and closed; parser errors are logged once a minute per kind', async (t) => {
  let now = Date.now();
  const { backend, gateway } = await startBoth(t, AT_INFO, { now: () => now, lingerMs: 1000 });
  const byParser = literal`
    rubbish
    \x00\x00\x00\x00
    GET /v1/about?a=b c HTTP/1.1 | Host: x | bearer
    GET /v1/about?a=ü HTTP/1.1 | Host: x | bearer
    GET /v1/about?a=\xfc HTTP/1.1 | Host: x | bearer
    GET /v1/about HTTP/1.1\nHost: x\nAuthorization: Bearer ${SECRET}\n\n
    about | Bad Header
    send | Content-Length: 5 | Transfer-Encoding: chunked || 0
    send | Content-Length: 5 | Content-Length: 6 || {}
    GET / HTTP/9.9 | Host: x
    PRI * HTTP/2.0 || SM`;
  const padding = 'x'.repeat(17_000);
  const large = `GET /v1/about?${padding} HTTP/1.1 | Host: x | bearer
    about | X: ${padding.repeat(20)}
    about | X: ${padding}`;
  await sendRefused(gateway, '400 bad_request', byParser);
  await sendRefused(gateway, TOO_MANY, large);
  now += 60_001;
  await sendRefused(gateway, TOO_MANY, large);
  const warnings = linesOf(gateway, /the HTTP parser/).map((line) => `${line.level} ${line.client} ${line.code}`);
  assert.deepEqual(
    warnings,
    ['bad_request', 'too_many_headers', 'too_many_headers'].map((code) => `warn 127.0.0.1 ${code}`),
  );
  const { socket } = open(t, gateway);
  socket.end();
  await closed(socket.resume());
  assert.equal(gateway.log.length, 4); // including the start-up line
  // Bun 1.4.5 first serves a request without a length, and then refuses its body.
  const byGateway = literal`
    GET /v1/about HTTP/1.1 | bearer
    GET /v1/about HTTP/1.1 | bearer | Connection: Upgrade | Upgrade: h2c
    GET /v1/about HTTP/2.0 | Host: x | bearer
    GET /v1/about HTTP/2.0 | Host: x | bearer | Connection: Upgrade | Upgrade: h2c
    GET /v1/about HTTP/0.9 | Host: x | bearer
    GET /v1/about | Host: x | bearer
    send | Transfer-Encoding: chunked || zz | {}
    send | Transfer-Encoding: chunked || 2 | {}xx
    send | Transfer-Encoding: gzip || {}
    ${'Bun' in globalThis ? [] : [`send || ${HELLO}`, `POST /v2/send HTTP/1.1 | Host: x || ${AUTHED(SECRET)}`]}`;
  await sendRefused(gateway, '400 bad_request', byGateway);
  await sendRefused(gateway, '400 bad_target', 'CONNECT backend:80 HTTP/1.1 | Host: x | bearer');
  const lines = requests(gateway).map((line) => `${line.level} ${line.method} ${outcomeOf(line)}`);
  assert.equal(lines.pop(), 'warn CONNECT 400 bad_target');
  for (const line of lines) assert.match(line, /^warn (GET|POST) 400 bad_request$/);
  // The parser of Bun 1.4.5 refuses some of them before the gateway sees them.
  if (!('Bun' in globalThis)) assert.equal(lines.length, byGateway.trim().split('\n').length);
  assert.equal(backend.connections, 0);
  assert.equal(statusOf(await raw(gateway, bytesOf('GET /v1/about HTTP/1.0 | bearer'))), 200);
});

// The 400 replaced the response that was due, or the rest of it.
test('bytes that the HTTP parser refuses after a request in progress do not affect its response', async (t) => {
  const { backend, gateway, finish } = await startHolding(t, { allow: ['* /v1/about'] });
  for (const [method, begins] of [['GET', false], ['GET', true], ['POST', false], ['POST', true]] as const) {
    const request = ABOUT.replace('GET /v1/about', `${method} /v1/about?hang${begins ? 'begun' : ''}`);
    const { socket, text } = open(t, gateway, request);
    await until(() => backend.seen.length === 1 && (!begins || text().includes('first, ')));
    for (const piece of [`${method === 'GET' ? ABOUT : ''}GET /a b HTTP/1.1\r\n`, '\r\n', 'more rubbish']) {
      socket.write(piece);
      await ask(gateway, { path: '/healthz' });
    }
    finish();
    await closed(socket);
    assert.match(text(), begins ? /first, [^]*and last/ : /^HTTP\/1\.1 200 [^]*and last/);
    assert.equal(text().match(/HTTP\/1\.1/g)!.length, 1);
    assert.equal(backend.seen.splice(0).length, 1);
  }
  // A client that disconnects after that is noticed.
  const { socket } = open(t, gateway, ABOUT.replace('about', 'about?hang'));
  await until(() => backend.seen.length === 1);
  socket.write('rubbish\r\n\r\n', () => socket.destroy());
  await until(() => requests(gateway).some((line) => line.code === 'client_left'));
});

// Such a POST was sent without a wait, so nothing noticed the 400 that the same packet caused.
test('a POST without a length that is answered 400 because of the bytes after it was not sent', async (t) => {
  const { backend, gateway } = await startBoth(t, { allow: ['messaging'] });
  const response = await raw(
    gateway,
    bytesOf(`POST /v1/groups/${FROM}/${GROUP}/join HTTP/1.1 | Host: x | bearer || {}`),
  );
  await until(() => requests(gateway).length === 1);
  assert.equal(outcomeOf(response), '400 bad_request');
  assert.equal(backend.seen.length, 0);
});

test('a complete POST that waits for its slot is sent although the parser refuses the bytes after it', async (t) => {
  const { backend, gateway } = await startHeld(t, 1);
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  const { socket, text } = open(t, gateway, `${SEND}rubbish\r\n\r\n`);
  await until(() => linesOf(gateway, /the HTTP parser/).length === 1);
  await answerAll(backend, [first]);
  await until(() => backend.acting === 1 || text() !== '', 'the POST to reach the backend');
  backend.answer();
  await closed(socket);
  assert.equal(outcomeOf(text()), '201');
  assert.deepEqual(arrived(backend), ['first', 'hello']);
});

test('a POST without a length that waits for its slot is sent if a request comes between it and the bytes that the parser refuses', async (t) => {
  const { backend, gateway } = await startHeld(t, 1, { allow: ['messaging', 'info'] });
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  const join = bytesOf(`POST /v1/groups/${FROM}/${GROUP}/join HTTP/1.1 | Host: x | bearer`);
  const { socket, text } = open(t, gateway, `${join}${ABOUT}rubbish\r\n\r\n`);
  await until(() => linesOf(gateway, /the HTTP parser/).length === 1);
  await answerAll(backend, [first]);
  await until(() => backend.acting === 1 || text() !== '', 'the POST to reach the backend');
  assert.equal(text(), '');
  backend.answer();
  await closed(socket);
  assert.equal(outcomeOf(text()), '201');
  assert.equal(backend.seen.length, 2);
});

test('a truncated body counts as a client that disconnected; a chunking error during the relay leaves no message at the backend', async (t) => {
  const { backend, gateway } = await startBoth(t, {}, { stallTimeoutMs: 1000 });
  const { socket } = open(t, gateway);
  socket.write(`${post(SECRET, 100)}{`, () => socket.destroy());
  await until(() => requests(gateway).at(-1)?.code === 'client_left');
  assert.equal(backend.connections, 0);
  const piece = `${HELLO.slice(0, -1)},"x":"${'A'.repeat(100_000)}`;
  const response = await raw(gateway, `${post(SECRET, 'chunked')}${piece.length.toString(16)}\r\n${piece}\r\nxyz\r\n`);
  assert.ok(response === '' || statusOf(response) === 400, response);
  assert.deepEqual(backend.sent, []);
});

/** Sends exact bytes, and keeps its own side open after the gateway has ended the connection. */
function openHalf(t: TestContext, { port }: Address, bytes: string): net.Socket {
  const socket = net.connect({ port, host: '127.0.0.1', allowHalfOpen: true });
  t.after(() => socket.destroy());
  socket.on('error', () => {}).write(bytes);
  return socket;
}

const REFUSED = 'GET /v1/about HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer x\r\n\r\n';
const TELLS_FULL_BUFFERS = {
  skip: !isNode && 'Deno fills its buffers slowly, and Bun does not report when they are full',
};
/** Makes a request, one that is refused by default, on a connection whose buffers have no room for the response. */
async function fillBuffers(t: TestContext, gateway: Gateway, request = REFUSED) {
  const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
  const client = net.connect(gateway.port, '127.0.0.1').pause().on('error', () => {});
  t.after(() => client.destroy());
  const [socket] = await accepted;
  // Ten thousand responses would have the same effect. Less is queued here than would make node:http stop reading. On a
  // loaded machine the kernel takes more a few turns later, and with it all that was queued, so the sum counts.
  for (let turn = 0; turn < 10; turn++) {
    while (socket.writableLength === 0 && !socket.destroyed) socket.write(Buffer.alloc(4096, ' '));
    await new Promise(setImmediate);
  }
  assert.ok(!socket.destroyed, 'the connection was closed before its buffers were full');
  const before = socket.bytesWritten; // with what is queued
  client.write(request);
  await until(() => socket.bytesWritten > before, 'a response that has no room');
  return { client, socket };
}

// Each byte restarted the idle time-out.
test(
  'attack: hold a connection without a token, by reading no response and sending single bytes',
  TELLS_FULL_BUFFERS,
  async (t) => {
    const limits = { stallTimeoutMs: 1000, headersTimeoutMs: 500, lingerMs: 100 };
    const backend = await startBackend(t);
    const gateway = await startGateway(t, backend, { ...tokens({}), log: { level: 'debug' } }, limits);
    for (const begun of [REFUSED.slice(0, -2), REFUSED.replace('\r\n\r\n', '\r\nContent-Length: 9999\r\n\r\n')]) {
      const { client, socket } = await fillBuffers(t, gateway);
      client.write(begun);
      const timer = setInterval(() => client.write('x'), 100);
      await closed(socket).finally(() => clearInterval(timer));
    }
    assert.equal(backend.seen.length, 0);
  },
);

// Nothing else ends it: the backend's pause may last as long as backend.timeout.
test(
  'a client that does not read the response that has begun is disconnected while the backend pauses',
  TELLS_FULL_BUFFERS,
  async (t) => {
    const { url } = await startBackend(t, (_, res) => void res.write('first, '));
    const gateway = await startGateway(t, { url }, { backend: { url, timeout: '1h' } }, { stallTimeoutMs: 1000 });
    const { socket } = await fillBuffers(t, gateway, ABOUT);
    await closed(socket, 'the connection to be closed');
  },
);

// node:http considered the connection idle.
test(
  'closing delivers a response that has ended and that its client has not read yet',
  TELLS_FULL_BUFFERS,
  async (t) => {
    const backend = await startBackend(t);
    const gateway = await startGateway(t, backend, { ...tokens({}), log: { level: 'debug' }, shutdown: '1h' });
    const { socket: idle, text: refusal } = open(t, gateway, REFUSED);
    await until(() => refusal().endsWith('}\n'));
    const { client } = await fillBuffers(t, gateway);
    const closing = gateway.close();
    let text = '';
    client.setEncoding('latin1').on('data', (chunk) => (text += chunk)).resume();
    await closed(client);
    assert.equal(text.match(/"requestId":"[^"]*"}\n/g)!.length, text.split('HTTP/1.1 ').length - 1);
    await closing;
    await closed(idle);
  },
);

// Deno 2.9 passed these bytes to a parser that had failed, or whose client was too late, and reused that parser for
// other clients' connections and for those to the backend.
test('garbage sent byte by byte after a refusal does not affect the requests of others', async (t) => {
  const { backend, gateway } = await startBoth(t, tokens({}, {}), {
    lingerMs: 300,
    stallTimeoutMs: 1000,
    headersTimeoutMs: 500,
  });
  let sent = 0;
  const late = ABOUT.slice(0, -2);
  for (const begun of ['rubbish\r\n\r\n', `${ABOUT}rubbish\r\n\r\n`, `${post(SECRET, 'chunked')}zz\r\n`, late]) {
    let [isOver, refused] = [false, 0];
    t.after(() => isOver = true);
    const drip = async (): Promise<void> => {
      for (; !isOver; refused++) {
        const socket = openHalf(t, gateway, begun).resume();
        const timer = setInterval(() => socket.write('x'), 5);
        await closed(socket).finally(() => clearInterval(timer));
      }
    };
    const rubbish = Array.from({ length: 12 }, drip);
    for (let i = 0; i < 20 || refused < 12; i++) {
      const answers = Array.from({ length: 4 }, (_, n) => send(gateway, `${i} ${n}`, OTHER));
      assert.deepEqual((await Promise.all(answers)).map(outcomeOf), Array(4).fill('201'), begun);
      sent += 4;
    }
    isOver = true;
    await Promise.all(rubbish);
  }
  assert.equal(backend.sent.length, sent);
});

// Deno 2.9 reported the end to a parser that was reading a backend response by then. Without a length, that response
// looked complete.
test('the end of a refused connection does not end a response of unknown length on another connection', async (t) => {
  const { backend, gateway } = await startRaw(
    t,
    (socket) => {
      socket.write('HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfirst half,');
    },
    {},
    { headersTimeoutMs: 200 },
  );
  for (const begun of ['rubbish\r\n\r\n', ABOUT.slice(0, -2)]) {
    for (let i = 0; i < 3; i++) {
      const refused = Array.from({ length: 5 }, () => openHalf(t, gateway, begun));
      await Promise.all(refused.map((socket) => once(socket.resume(), 'end')));
      const { socket, text } = open(t, gateway, ABOUT);
      await until(() => text().includes('first half'));
      await Promise.all(refused.map((one) => closed(one.end())));
      for (let turn = 0; turn < 3; turn++) await settled(gateway);
      backend.sockets.at(-1)!.end('second half');
      await until(() => text().endsWith('\r\n0\r\n\r\n'));
      assert.match(text(), /first half,\r\n[^]*second half/);
      socket.destroy();
    }
  }
});

test('bytes after a parser error are read and discarded; if the client does not end the connection, it is closed after a period without bytes', async (t) => {
  for (const [lingerMs, ends] of [[1e6, true], [100, false]] as const) {
    if (ends && 'Bun' in globalThis) continue; // Bun 1.4.5 does not count the bytes read after a refusal
    const { gateway } = await startBoth(t, {}, { lingerMs, headersTimeoutMs: 1e6 });
    const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
    const socket = openHalf(t, gateway, 'rubbish\r\n\r\n');
    const [served] = await accepted;
    await once(socket.resume(), 'end');
    if (ends) {
      const before = served.bytesRead;
      socket.write('more');
      await until(() => served.bytesRead === before + 4, 'the gateway to read what follows');
      socket.end();
    }
    await closed(served);
  }
});

// Such a request was acted on, and its client, which had received a 408 or 400, got no response to it.
test('on a connection that is closing no further request is acted on: after a parser error, after late headers', async (t) => {
  const { backend, gateway } = await startBoth(t, {}, { headersTimeoutMs: 300, lingerMs: 1000 });
  const late = open(t, gateway, SEND.slice(0, 40));
  await until(() => late.text().endsWith('}\n'));
  assert.match(late.text(), /^HTTP\/1\.1 408 /);
  late.socket.write(SEND.slice(40));
  await closed(late.socket);
  for (let i = 0; i < 40; i++) {
    const { socket, text } = open(t, gateway, `${SEND}${SEND}rubbish\r\n\r\n`);
    await closed(socket);
    // A request is logged before its connection closes, or shortly after.
    await until(() => requests(gateway).length >= backend.seen.length);
    const answers = text().match(/^HTTP\/1\.1 201/gm) ?? [];
    assert.equal(backend.seen.splice(0).length, answers.length, text());
  }
});

// node:http continues to parse a packet whose socket was destroyed, and what its listener threw then crashed the
// process.
test('attack: crash the process by a reset after a pipelined CONNECT or WebSocket, on http and on https', async (t) => {
  const backend = await startBackend(t);
  for (const tls of [undefined, certificate(t)]) {
    const env = tls && { TLS_CERT: tls.cert, TLS_KEY: tls.key };
    const gateway = await startProcess(t, { backend, ...env && { env } });
    const upgrades = ['CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n', HANDSHAKE];
    for (let round = 0; round < 200; round++) {
      const socket = net.connect(gateway.port, '127.0.0.1').on('error', () => {});
      await once(socket, 'connect');
      let speaker: net.Socket = socket;
      if (tls) {
        speaker = tlsConnect({ socket, ca: [CERTS[0].cert], servername: 'localhost' }).on('error', () => {});
        await once(speaker, 'secureConnect');
      }
      speaker.write(`${HEALTH}${upgrades[round % 2]}`, () => socket.resetAndDestroy());
      await closed(socket);
    }
    assert.equal((await ask(gateway, { path: '/healthz' })).status, 200);
    assert.doesNotMatch(gateway.output(), /internal error/);
    assert.deepEqual([gateway.child.exitCode, backend.seen.length], [null, 0]);
    await gateway.close();
  }
});

/** What reaches each listener of the server, on plain http and over TLS. */
const EVENTS: Record<string, (to: Address, gateway: Gateway) => unknown> = {
  connection: (to) => raw(to, HEALTH),
  secureConnection: (to) => raw(to, HEALTH),
  request: (to) => raw(to, HEALTH),
  checkContinue: (to) => raw(to, HEALTH.replace('\r\n', '\r\nExpect: 100-continue\r\n')),
  checkExpectation: (to) => raw(to, HEALTH.replace('\r\n', '\r\nExpect: a-miracle\r\n')),
  upgrade: (to) => raw(to, HANDSHAKE),
  connect: (to) => raw(to, 'CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n'),
  clientError: (to) => raw(to, 'rubbish\r\n\r\n'),
  tlsClientError: ({ port }) => raw({ port }, HEALTH),
  timeout: (to, { server }) => {
    server.once('connection', (socket) => setImmediate(() => server.emit('timeout', socket)));
    return raw(to, '');
  },
  error: (_, { server }) => server.emit('error', Object.assign(new Error(), { code: 'EMFILE' })),
};

test('an error thrown by a listener of the server ends its connection and is logged once; the process does not crash', async (t) => {
  const missing = new Set(Object.keys(EVENTS));
  for (const tls of [undefined, certificate(t)]) {
    const { gateway } = await startBoth(t, { ...tls && { tls } });
    const { server } = gateway;
    const isHere = (event: string): boolean =>
      // Bun 1.4.5 emits neither of them
      event in EVENTS && (tls && !('Bun' in globalThis) ? true : !/^(?:tls|secure)/.test(event));
    for (const event of server.eventNames().map(String).filter(isHere)) {
      const listeners = server.rawListeners(event) as ((...args: unknown[]) => void)[];
      for (const listener of listeners) {
        const fail = (): never => {
          throw new Error(`planted in ${event}`);
        };
        const others = listeners.map((each) => each === listener ? fail : each);
        server.removeAllListeners(event);
        for (const each of others) server.on(event, each);
        const failed = (): number => linesOf(gateway, /^internal error$/).length;
        const before = failed();
        await EVENTS[event]!(gateway, gateway);
        await until(() => failed() > before, `the line of a fault in "${event}"`);
        assert.match(String(linesOf(gateway, /^internal error$/).at(-1)!.stack), new RegExp(`planted in ${event}`));
        server.removeAllListeners(event);
        for (const each of listeners) server.on(event, each);
        missing.delete(event);
        assert.equal((await ask(gateway, { path: '/healthz' })).status, 200, `behind a fault in "${event}"`);
      }
    }
  }
  if (isNode) assert.deepEqual([...missing], []);
});

test('an error thrown while a response is ended closes its connection and is logged; the process does not crash', async (t) => {
  const { gateway } = await startBoth(t, {});
  gateway.server.prependOnceListener('request', (_req, res) => {
    res.end = () => {
      throw new Error('planted in end');
    };
  });
  assert.equal(await raw(gateway, HEALTH), '');
  assert.match(String(linesOf(gateway, /^internal error$/)[0]!.stack), /planted in end/);
  assert.equal(requests(gateway).length, 1);
  assert.equal((await ask(gateway, { path: '/healthz' })).status, 200);
});

test('internal errors beyond thirty a minute are logged at debug level', async (t) => {
  let now = Date.now();
  const { gateway } = await startBoth(t, {}, { now: () => now });
  const fail = (): boolean => gateway.server.emit('clientError'); // without its arguments
  for (let i = 0; i < 40; i++) fail();
  const levels = (): string[] => linesOf(gateway, /^internal error$/).map(({ level }) => String(level));
  assert.deepEqual(levels(), [...Array(30).fill('error'), ...Array(10).fill('debug')]);
  now += 60_001;
  fail();
  assert.equal(levels().at(-1), 'error');
});

test('last resort: a process that listens survives whatever a timer, stream or promise throws; a port in use still stops it', async (t) => {
  const backend = await startBackend(t);
  const code = `
    import { EventEmitter } from 'node:events';
    import { run } from ${JSON.stringify(FILE.href)};
    const { code, stderr } = await run([], process.env, () => Buffer.alloc(0));
    process.exitCode = code;
    process.stderr.write(stderr);
    setTimeout(() => { throw new Error('planted in a timer'); });
    setTimeout(() => new EventEmitter().emit('error', new Error('planted in a stream')));
    setTimeout(() => Promise.reject(new Error('planted in a promise')));`;
  const file = fileWith(t, code, 'script.mjs');
  const gateway = await startProcess(t, { backend, program: [...AS_IT_IS.slice(0, -1), file] as unknown as Program });
  await until(() => linesOf(gateway, /^internal error$/).length === 3);
  const stacks = linesOf(gateway, /^internal error$/).map(({ stack }) => String(stack)).join();
  for (const where of ['timer', 'stream', 'promise']) assert.match(stacks, new RegExp(`planted in a ${where}`));
  await ask(gateway, { headers: BEARER, body: HELLO });
  assert.equal(backend.sent.length, 1);
  const { code: ended } = await cli([], { env: { API_TOKENS: SECRET, LISTEN: `127.0.0.1:${gateway.port}` } });
  assert.equal(ended, 1);
  await gateway.close();
});

/** A program that embeds the gateway and survives errors. A function of it throws from the moment `fail` names it. */
async function startThrowing(t: TestContext, { url }: Backend) {
  const config = { ...RECEIVING, ...tokens({}), listen: '127.0.0.1:0', shutdown: '1h', backend: { url, wait: '0' } };
  const code = `
    import { createGateway } from ${JSON.stringify(FILE.href)};
    for (const event of ['uncaughtException', 'unhandledRejection']) process.on(event, () => {});
    let failing = '';
    const unless = (name, value) => {
      if (name === failing) throw new Error('planted');
      return value;
    };
    const config = ${JSON.stringify({ ...config, log: { format: 'json', level: 'debug' } })};
    const gateway = createGateway(config, {
      log: (line) => console.log(unless('log', line)),
      now: () => unless('now', Date.now()),
    });
    process.stdin.on('data', (bytes) => {
      if (String(bytes) !== 'close') return console.log((failing = String(bytes)) + ' fails');
      gateway.close().catch(() => {}).then(() => console.log('closing has ended'));
    });
    await gateway.listen();`;
  const program = [...AS_IT_IS.slice(0, -1), fileWith(t, code, 'script.mjs')] as unknown as Program;
  const gateway = await startProcess(t, { program });
  const fail = async (name: 'log' | 'now'): Promise<void> => {
    gateway.child.stdin.write(name);
    await until(() => gateway.output().includes(`${name} fails`), 'the program to read its standard input');
  };
  const close = async (): Promise<void> => {
    gateway.child.stdin.write('close');
    await until(() => gateway.output().includes('closing has ended'));
  };
  return { ...gateway, fail, close };
}

// The failure was logged before the connection was closed, so a log that threw again left it open.
test('a log or a clock of an embedding program that throws leaves no connection open, and closing ends', async (t) => {
  for (const name of ['log', 'now'] as const) {
    const held: http.ServerResponse[] = [];
    const backend = await startBackend(t, (_, res) => void held.push(res));
    backend.server.on('upgrade', (_, socket: Duplex) => accept(socket.on('error', () => {})));
    const gateway = await startThrowing(t, backend);
    const tunnel = await accepted(t, gateway);
    const { socket: begun } = open(t, gateway, SEND);
    await until(() => held.length === 1);
    await gateway.fail(name);
    held[0]!.end('{}');
    await closed(begun, `the connection to be closed whose response came when "${name}" threw`);
    for (const bytes of [HEALTH, SEND, ABOUT.replace(SECRET, OTHER), HANDSHAKE, 'rubbish\r\n\r\n']) {
      held.length = 0;
      const ended = raw(gateway, bytes);
      if (name === 'log' && bytes === SEND) await until(() => held.length === 1);
      for (const res of held) res.end('{}');
      await ended;
    }
    await gateway.close();
    await closed(tunnel.socket);
  }
});

test('a log of an embedding program that throws does not keep the gateway from connecting to a backend that is up again', async (t) => {
  const backend = await startBackend(t);
  const gateway = await startThrowing(t, backend);
  backend.server.close();
  await gateway.fail('log');
  await raw(gateway, SEND);
  assert.equal(backend.sent.length, 0);
  backend.server.listen(backend.port, backend.host);
  for (let i = 0; i < 500 && backend.sent.length === 0; i++) {
    await raw(gateway, SEND);
    await pass(10);
  }
  assert.equal(backend.sent.length, 1);
});

// With 600,000 of them an unauthenticated client blocked the gateway for 15 s.
test('attack: packets that the parser refuses after a response has started add no listeners', async (t) => {
  const { gateway, finish } = await startHolding(t, { allow: ['* /v1/about'] });
  let begun: http.ServerResponse | undefined;
  gateway.server.prependListener('request', (_, res) => begun ??= res);
  let packets = 0;
  gateway.server.on('clientError', () => packets++);
  const { socket, text } = open(t, gateway, `${ABOUT.replace('/v1/about', '/v1/about?hang-begun')}rubbish\r\n\r\n`);
  socket.setNoDelay(true);
  await until(() => text().includes('first'));
  const listeners = (): number => begun!.listenerCount('close');
  await until(() => packets > 0);
  const first = listeners();
  for (let i = 0; i < 50; i++) {
    const before = packets;
    socket.write('x');
    if (isNode) await until(() => packets > before);
  }
  assert.equal(listeners(), first);
  finish();
  await closed(socket);
  assert.match(text(), /first/);
});

// node:http closed the connection after these responses, and the send that followed was acted on without a response.
test('after a response that makes node:http close, to HTTP/1.0 or to a client that still expects 100, nothing is acted on', async (t) => {
  const backend = await startBackend(t);
  const gateway = await startGateway(t, backend, { backend: { url: backend.url, parallel: 1 } });
  const last = SEND.replace('\r\n', '\r\nConnection: close\r\n');
  const firsts = [
    SEND.replace('HTTP/1.1', 'HTTP/1.0').replace('\r\n', '\r\nConnection: keep-alive\r\n'),
    SEND.replace(SECRET, 'not-the-right-secret').replace('\r\n', '\r\nExpect: 100-continue\r\n'),
    HEALTH.replace('\r\n', '\r\nExpect: 100-continue\r\n'),
  ];
  for (const first of firsts) {
    const response = await raw(gateway, first + last);
    await ask(gateway, { headers: BEARER, body: HELLO }); // gets its slot after anything that was sent before
    assert.equal(backend.seen.splice(0).length - 1, response.match(/^HTTP\/1\.1 201/gm)?.length ?? 0, response);
  }
});

test('a connection is kept if its client asks for it, with the matching header in refusals, responses of the gateway and relayed ones', async (t) => {
  const { gateway } = await startBoth(t);
  const wrong = ABOUT.replace(SECRET, OTHER);
  for (const [request, status] of [[HEALTH, 200], [ABOUT, 200], [wrong, 401]] as const) {
    const { socket, text } = open(t, gateway, request);
    await until(() => text().includes('\r\n\r\n'));
    assert.match(text(), new RegExp(`^HTTP/1.1 ${status} [^]*^Connection: keep-alive\r$`, 'im'));
    socket.write(request.replace('\r\n', '\r\nConnection: close\r\n'));
    await closed(socket);
    assert.match(text(), new RegExp(`^HTTP/1.1 ${status} [^]*^HTTP/1.1 ${status} [^]*^Connection: close\r$`, 'im'));
  }
});

// Nothing else ended a TLS handshake, and a thousand of them locked out all other clients.
test('https to a plain http port, and plain http to an https port, is a warning once a minute; a TLS handshake that stalls is ended', async (t) => {
  for (const tls of 'Bun' in globalThis ? [undefined] : [undefined, certificate(t)]) { // Bun 1.4.5 shows nothing of it
    let now = Date.now();
    // A handshake that stalls is ended at once, without the wait for a client that has been refused.
    const options = { now: () => now, headersTimeoutMs: 200, ...tls && { lingerMs: PATIENT_MS } };
    const { gateway } = await startBoth(t, { ...AT_INFO, ...tls && { tls } }, options);
    const warnings = (): unknown[] =>
      linesOf(gateway, /^a client sent/).map((line) => `${line.level} ${line.client} ${line.message}`);
    const mistake = (): Promise<string> => raw({ ...gateway, ca: tls ? undefined : [] } as Address, tls ? HEALTH : '');
    for (const begun of tls ? ['', '\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03'] : []) {
      await raw({ port: gateway.port }, Buffer.from(begun, 'latin1'));
    }
    for (let i = 0; i < 3; i++) await mistake();
    const words = tls ? 'plain http (or something else) to this https port' : 'https to this plain http port';
    assert.deepEqual(warnings(), [`warn 127.0.0.1 a client sent ${words}`]);
    now += 60_001;
    await mistake();
    assert.equal(warnings().length, 2);
  }
});

// A thousand idle connections, which cost one client nothing, locked out all others.
test('connections that come in one turn of the event loop are no more than limits.connections', async (t) => {
  const { gateway } = await startBoth(t, { limits: { connections: 2 } });
  // Several in one turn, as a server under load may get them: here they are handed over, as node:http allows.
  const accepted: net.Socket[] = [];
  const other = net.createServer((socket) => void accepted.push(socket)).listen(0, '127.0.0.1');
  t.after(() => other.close());
  await once(other, 'listening');
  for (let i = 0; i < 6; i++) open(t, { port: (other.address() as AddressInfo).port });
  await until(() => accepted.length === 6);
  for (const socket of accepted) {
    t.after(() => socket.destroy());
    gateway.server.emit('connection', socket);
  }
  assert.deepEqual(accepted.map(({ destroyed }) => destroyed), [true, true, true, true, false, false]);
});

test('at limits.connections a new connection is accepted, and the one that has gone longest without a valid token is closed', async (t) => {
  const { backend, gateway, finish } = await startHolding(t, { limits: { connections: 4 } });
  // Nothing else closes a connection here.
  Object.assign(gateway.server, { keepAliveTimeout: 0 }).setTimeout(0);
  const peers = new Map<number, net.Socket>();
  gateway.server.on('connection', (socket: net.Socket) => peers.set(socket.remotePort!, socket));
  const named = new Map<string, Connection & { peer?: net.Socket | undefined }>();
  /**
   * Sends on the connection of this name, or on a new one. Afterwards these are open, in the order in which they were
   * opened.
   */
  const sends = async (name: string, bytes: string, opened: string): Promise<void> => {
    const on = named.get(name) ?? open(t, gateway);
    const before = on.text().length;
    on.socket.write(bytes);
    const [length, isHeld] = [backend.seen.length, bytes === SEND];
    await until(
      () => (isHeld ? backend.seen.length > length : on.text().length > before) || on.socket.destroyed,
      `the response on the connection "${name}"`,
    );
    named.set(name, { peer: peers.get(on.socket.localPort!), ...on });
    const left = [...named].filter(([, { peer }]) => peer?.destroyed === false).map(([each]) => each).join(' ');
    assert.equal(left, opened, `the open connections when "${name}" has its response`);
  };
  const wrong = ABOUT.replace(SECRET, OTHER);
  await sends('served', SEND, 'served'); // the oldest, with a request of its token in progress
  await sends('known', ABOUT, 'served known');
  await sends('wrong', wrong, 'served known wrong');
  await sends('none', HEALTH, 'served known wrong none');
  await sends('known', ABOUT, 'served known wrong none'); // after the last two were opened
  await sends('fifth', HEALTH, 'served known none fifth');
  await sends('sixth', HEALTH, 'served known fifth sixth');
  await sends('fifth', HEALTH, 'served known fifth sixth'); // does not count: it shows no token
  await sends('good', ABOUT, 'served fifth sixth good');
  await sends('eighth', HEALTH, 'served sixth good eighth');
  for (const [name, { socket, peer }] of named) if (peer?.destroyed) await closed(socket, `the close of "${name}"`);
  finish();
  await until(() => named.get('served')!.text().includes('and last'), 'the response of the connection that is served');
  assert.deepEqual(linesOf(gateway, /^limits.connections is reached/).map((line) => line.level), ['warn']);
});

// Over TLS it was read as the start of another handshake. The whole Connection header was dropped.
test('a wish for another protocol (Upgrade), or for a WebSocket with a body, is an ordinary request, over TLS too', async (t) => {
  const h2c = 'Connection: Upgrade, X-Hop, HTTP2-Settings | Upgrade: h2c | HTTP2-Settings: AAMAAABk | X-Hop: secret';
  const sends = [HELLO, sized(300_000)].map((body) => `201 send | ${h2c} | Content-Length: ${body.length} || ${body}`);
  const webSocket = sends[0]!.replace(h2c, 'Connection: Upgrade | Upgrade: websocket');
  for (const more of [{}, { tls: certificate(t) }]) {
    const { backend, gateway } = await startReceiving(t, undefined, more);
    const refused = `401 GET /v1/about HTTP/1.1 | Host: x | ${h2c}`;
    const withBody = '200 about | Connection: Upgrade | Upgrade: websocket | Content-Length: 2 || {}';
    for (const row of [`200 about | ${h2c}`, withBody, ...sends, webSocket, refused]) {
      const { socket, text } = open(t, gateway, bytesOf(row.slice(4)));
      await until(() => text().includes('\r\n\r\n'));
      assert.equal(statusOf(text()), Number(row.slice(0, 3)), row.slice(0, 60));
      socket.destroy();
      const { upgrade, 'x-hop': hop, 'http2-settings': settings } = backend.seen.at(-1)!.headers;
      assert.deepEqual([upgrade, hop, settings], [undefined, undefined, undefined]);
    }
    assert.deepEqual([backend.seen.length, backend.sent.length, backend.sockets.length], [5, 3, 0]);
  }
});

// Before Node 24.9 each left a listener behind, so an unauthenticated client could fill the memory with one connection.
test('a connection that repeatedly asks for another protocol costs no more than the first time', async (t) => {
  const { gateway } = await startBoth(t);
  const accepted = once(gateway.server, 'connection');
  const { socket, text } = open(t, gateway);
  const [served] = await accepted as [net.Socket];
  const listeners: number[] = [];
  for (let i = 1; i <= 20 && !socket.destroyed; i++) {
    socket.write(bytesOf('GET / HTTP/1.1 | Host: x | Connection: Upgrade | Upgrade: h2c'));
    await until(() => text().split('HTTP/1.1 401').length > i || socket.destroyed);
    listeners.push(served.listenerCount('close'));
  }
  assert.ok(listeners.at(-1)! <= listeners[0]!, `${listeners}`);
});

// node:http lost the bytes that came in one packet with such a request, and parsed the next packet as a new request.
test('attack: a request hidden in the body of one that follows a request with Upgrade', async (t) => {
  const { backend, gateway } = await startBoth(t);
  const inner = `${post(SECRET, HELLO.length, 'Connection: close')}${HELLO}`;
  const first = bytesOf('about | Connection: Upgrade | Upgrade: h2c');
  const { socket, text } = open(t, gateway, `${first}${post(SECRET, inner.length)}`);
  await until(() => backend.seen.length === 1 && statusOf(text()) === 200);
  socket.end(inner);
  await closed(socket);
  assert.deepEqual(backend.seen.map((seen) => seen.url), ['/v1/about']);
  assert.deepEqual(backend.sent, []);
});

// The first response ended up among the bytes of the WebSocket. Bun 1.4.5 reads nothing before it has responded, so the
// client waits forever.
test('an Upgrade after a request that has no response yet ends the connection', async (t) => {
  for (const protocol of 'Bun' in globalThis ? [] : ['websocket', 'h2c']) {
    const { backend, gateway } = await startHolding(t, RECEIVING);
    const { socket, text } = open(t, gateway, ABOUT.replace('about', 'about?hang'));
    await until(() => backend.seen.length === 1);
    socket.write(bytesOf(`GET ${RECEIVE} HTTP/1.1 | Host: x | bearer | Connection: Upgrade | Upgrade: ${protocol}`));
    if (protocol === 'h2c') socket.destroy(); // from Node 24.9 on, h2c waits like any other pipelined request
    await closed(socket);
    await until(() => requests(gateway).some((line) => line.status === 499));
    assert.equal(text(), '');
    assert.equal(backend.seen.length, 1);
  }
});

test('attack: fill the memory by a body that continues after a refusal: no more than about 64 KiB of it are read', async (t) => {
  const { backend, gateway } = await startBoth(t, tokens({}), { lingerMs: PATIENT_MS });
  for (const begun of [post(OTHER, 'chunked'), `${ABOUT.replace(SECRET, OTHER)}rubbish\r\n\r\n`]) {
    const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
    const { socket, text } = open(t, gateway, begun);
    const [far] = await accepted;
    await until(() => text().includes('\r\n\r\n'));
    const chunk = `${(60_000).toString(16)}\r\n${'x'.repeat(60_000)}\r\n`;
    for (let turn = 0; turn < 400; turn++) {
      if (socket.writableLength < 1_000_000) socket.write(chunk);
      await new Promise(setImmediate);
    }
    assert.ok(far.bytesRead < 1_000_000, `${far.bytesRead} bytes were read behind ${begun.slice(0, 20)}`);
  }
  assert.equal(backend.seen.length, 0);
});

/** A request that needs no slot, and that `startHolding` leaves unanswered. */
const HANGING = ABOUT.replace('about', 'about?hang');

test('a connection that breaks off while its token is served is removed from the list of connections', async (t) => {
  const { backend, gateway } = await startHolding(t, { limits: { connections: 4 } });
  for (let count = 1; count <= 6; count++) {
    const { socket } = open(t, gateway, HANGING);
    await until(() => backend.seen.length === count);
    socket.destroy();
    await until(() => requests(gateway).length === count);
  }
  const held = Array.from({ length: 4 }, () => open(t, gateway, HEALTH));
  for (const { text } of held) await until(() => text().includes('200 OK'));
  assert.deepEqual(linesOf(gateway, /limits\.connections/), []);
});

test(
  'a response that its client reads late, but completely, leaves no time-out on the connection',
  TELLS_FULL_BUFFERS,
  async (t) => {
    const { backend, gateway, finish } = await startHolding(t, tokens({}), { stallTimeoutMs: 1000 });
    const { client, socket } = await fillBuffers(t, gateway);
    let text = '';
    client.setEncoding('latin1').on('data', (chunk) => (text = (text + chunk).slice(-1000))).resume();
    await until(() => socket.writableLength === 0);
    client.write(SEND);
    await until(() => backend.seen.length === 1);
    await pass(1500);
    finish();
    await until(() => text.endsWith('and last\r\n0\r\n\r\n') || client.destroyed);
    assert.match(text, / 200 OK\r\n/);
  },
);

test('a token is served on exactly half of limits.connections, whichever clients hold the rest', async (t) => {
  const { backend, gateway } = await startHolding(t, { ...tokens({}, {}), limits: { connections: 8 } });
  const idle = open(t, gateway, HEALTH);
  await until(() => idle.text().includes('200 OK'));
  for (let count = 1; count <= 4; count++) {
    open(t, gateway, HANGING);
    await until(() => backend.seen.length === count);
  }
  assert.equal(outcomeOf(await ask(gateway, { headers: BEARER })), '503 busy');
  assert.equal(backend.seen.length, 4);
});

// One byte every nine seconds on a thousand connections kept all other clients from being served.
test('with several tokens, one token holds at most half of limits.connections, whatever its requests are', async (t) => {
  const webSocket = bytesOf(`GET ${RECEIVE} HTTP/1.1 | Host: x | bearer | Connection: Upgrade | Upgrade: websocket`);
  const hold: [name: string, arrived: number, bytes: string | Buffer][] = [
    ['a send that waits for its response', 4, SEND],
    ['a body that does not end', 0, `${post(SECRET, 1000)}{"message":"`],
    ['a refused request that goes on sending', 0, `${post(SECRET, 1_000_000_000)}{`],
    ['a WebSocket', 4, webSocket],
  ];
  for (const [[name, arrived, bytes], other] of hold.flatMap((way) => [[way, {}], [way, undefined]] as const)) {
    const backend = await startUpgradeBackend(t);
    backend.server.prependListener('request', (req: http.IncomingMessage, res: http.ServerResponse) => {
      if (req.url === '/v2/send') res.writeHead = res.end = () => res; // never a response
    });
    const config = { ...RECEIVING, limits: { connections: 8 }, backend: { url: backend.url, parallel: 0 } };
    const gateway = await startGateway(t, backend, { ...config, ...tokens({}, other) });
    let met = 0;
    for (const event of ['request', 'upgrade']) gateway.server.on(event, () => met++);
    const held = Array.from({ length: 4 }, () => open(t, gateway, bytes));
    await until(() => met === 4 && backend.seen.length === arrived);
    const next = await ask(gateway, { headers: BEARER });
    assert.equal(outcomeOf(next), other ? '503 busy' : '200', name);
    for (const { socket } of held) assert.ok(!socket.destroyed, name);
    if (!other) continue;
    assert.equal(next.headers['retry-after'], '10');
    assert.equal(requests(gateway).at(-1)!.reason, 'half_of_connections');
    assert.equal(backend.seen.length, arrived);
    assert.deepEqual(await statusesOf(gateway, { headers: AS_OTHER }), [200]);
    held[0]!.socket.destroy(); // its place is free again
    await untilServed(gateway, {});
  }
});

test('with limits.connections 1 and two tokens, each token is served', async (t) => {
  const { gateway } = await startBoth(t, { limits: { connections: 1 }, ...tokens({}, {}) });
  for (const headers of [BEARER, AS_OTHER, BEARER]) {
    assert.equal(outcomeOf(await ask(gateway, { headers })), '200');
  }
});

test('reload: tokens and rules apply from the next request on, not to running ones; losing all tokens does not leave the gateway open by mistake', async (t) => {
  const { backend, gateway, finish } = await startHolding(t);
  const other = { headers: AS_OTHER };
  const running = statusesOf(gateway, { body: MESSAGE, headers: BEARER });
  await until(() => backend.seen.length === 1);
  gateway.reload({ tokens: { new: { secret: OTHER, allow: ['info'] } } });
  assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, other, { ...other, body: MESSAGE }), [401, 200, 403]);
  finish();
  assert.deepEqual(await running, [200]);
  const before = gateway.log.length;
  assert.equal(problemsOf(() => gateway.reload({ tokens: { a: { secret: 'short' } } })).length, 1);
  const open = ['tokens: none is configured; AUTH_ANONYMOUS=true would accept all requests'];
  assert.deepEqual(problemsOf(() => gateway.reload(NO_TOKENS)), open);
  // The new `listen` takes effect at the next start: until then other machines could connect to this gateway.
  const anonymous = createGateway({ listen: '0.0.0.0:0', auth: { anonymous: true } }, { log: () => {} });
  assert.deepEqual(problemsOf(() => anonymous.reload({ listen: '127.0.0.1:0' })), open);
  assert.equal(gateway.log.length, before);
  assert.deepEqual(await statusesOf(gateway, other, {}), [200, 401]);
});

// On Deno each broken certificate took effect, and no connection worked from then on.
test('reload: by SIGHUP or a changed file; a configuration, secret or certificate that is half-written, broken or gone changes nothing', async (t) => {
  const backend = await startBackend(t);
  const [dir, tls] = [folder(t), certificate(t)];
  const [file, secretFile] = [join(dir, 'gateway.json'), join(dir, 'secret')];
  const [third, fresh] = ['third-secret-of-some-length', 'fresh-secret-of-good-length'];
  const configOf = (tokens: object): string => JSON.stringify({ backend: { url: backend.url }, tls, tokens });
  const replace = (tokens: object): void => {
    writeFileSync(`${file}.new`, configOf(tokens));
    renameSync(`${file}.new`, file);
  };
  writeFileSync(secretFile, SECRET);
  replace({ a: { secretFile } });
  const gateway = await startProcess(t, { args: ['--config', file] });
  const signal = (): boolean => process.kill(gateway.child.pid!, 'SIGHUP');
  const count = (message: RegExp): number => linesOf(gateway, message).length;
  const becomes = async (message: RegExp, change: () => unknown): Promise<void> => {
    const before = count(message);
    change();
    await until(() => count(message) > before);
  };
  const statuses = (...secrets: string[]): Promise<number[]> =>
    statusesOf(gateway, ...secrets.map((secret) => ({ headers: { authorization: `Bearer ${secret}` } })));
  const { fingerprint: first } = await ask(gateway);
  assert.deepEqual(await statuses(SECRET, OTHER), [200, 401]);

  await becomes(/^reloaded/, signal);

  // An editor replaces the file, without a signal.
  await becomes(/^reloaded/, () => replace({ a: { secretFile }, b: { secret: OTHER } }));

  // Each of these is reported without quoting a secret, and changes nothing. The last certificate belongs to another
  // key.
  const certificates = ['', 'hello', CERTS[1].cert.slice(0, 400), CERTS[1].cert];
  const half = configOf({ c: { secret: third } }).slice(0, -9);
  const bad = [
    ...certificates.map((text) => () => writeFileSync(tls.cert, text)),
    () => writeFileSync(tls.cert, CERTS[0].cert) ?? rmSync(secretFile),
    () => writeFileSync(secretFile, SECRET) ?? writeFileSync(file, half),
    ...['', '{}'].map((text) => () => writeFileSync(file, text)),
    () => rmSync(file),
  ];
  for (const damage of bad) {
    await becomes(/^reload failed/, () => damage() ?? signal());
    assert.deepEqual(await statuses(SECRET, OTHER, third), [200, 200, 401], String(damage));
    assert.equal((await ask(gateway)).fingerprint, first, String(damage));
  }
  const problems = linesOf(gateway, /^reload failed/).map((line) => line.problems);
  // On a slow machine the watcher may report a broken file as well, so a line is found by its words and not by its
  // position.
  assert.ok(problems.some((each) => /^tokens\.a\.secretFile: \S+ does not exist$/.test(each)), problems.join());

  // A signal and the change that it announces are one reload, so further reloads come from later changes.
  const reloaded = count(/^reloaded/);
  await becomes(/^reloaded/, () => replace({ a: { secretFile }, b: { secret: OTHER } }) ?? signal());
  await becomes(/^reloaded/, () => writeFileSync(secretFile, fresh));
  assert.deepEqual(await statuses(SECRET, fresh), [401, 200]);
  await becomes(/^reload failed/, () => writeFileSync(tls.cert, CERTS[1].cert) ?? signal());
  await becomes(/^reloaded/, () => writeFileSync(tls.key, CERTS[1].key));
  assert.equal(count(/^reloaded/), reloaded + 3);
  assert.equal((await ask(gateway)).fingerprint === first, 'Bun' in globalThis);
  assert.doesNotMatch(gateway.output(), new RegExp(`${SECRETS.source}|${third}|${fresh}`));
  await gateway.close();
});

// When node:http had a limit of 200 header fields and, after a reload, the check had 1,000, a second Host got through.
test(
  'code that reads a setting of the server does not compile unless it reads it once, where no reload can change it',
  {
    skip: !isNode && 'npm installs the compiler for Node',
  },
  async (t) => {
    const row = "  'limits.headers': ['MAX_HEADERS', countFrom(1), 'header fields', '200'],\n";
    const added: Change[] = [
      ["  'shutdown': ['SHUTDOWN_TIMEOUT'", (text) => row + text],
      ['server.maxHeadersCount = HEADERS_LIMIT + 1', () => "server.maxHeadersCount = settings['limits.headers'] + 1"],
    ];
    assert.deepEqual(await mistakesIn(changedSource(t, ...added)), ['createServer']);
    const listed: Change = ["const START_ONLY = ['listen',", (text) => `${text} 'limits.headers',`];
    assert.deepEqual(await mistakesIn(changedSource(t, ...added, listed)), []);
    // Where the state is made, a reload would be ignored just as silently.
    const kept: Change = [
      '    startedMs: now(),\n',
      (text) => `${text}    headersLimit: settings['limits.headers'],\n`,
    ];
    assert.deepEqual(await mistakesIn(changedSource(t, added[0]!, kept)), ['makeCore']);
    assert.deepEqual(await mistakesIn(changedSource(t, added[0]!, kept, listed)), []);
    const used: Change = [
      "    this.#limitBytes = exchange.rules['limits.body'];",
      (text) => text.replace('body', 'headers'),
    ];
    assert.deepEqual(await mistakesIn(changedSource(t, ...added, listed, used)), ['RequestBody']);
  },
);

// A setting that needs a restart was still adopted, and then mistaken for the one in effect.
test('a reload leaves settings that are read only at start, and its log line names them', async (t) => {
  const { gateway } = await startBoth(t);
  for (let i = 0; i < 2; i++) {
    gateway.reload({ listen: '127.0.0.2:0', limits: { connections: 9 }, log: { level: 'error', format: 'text' } });
    assert.equal(linesOf(gateway, /^reloaded/)[i]!.needsRestart, 'listen,limits.connections,log.level,log.format');
  }
});

test('the gateway listens on IPv6; a reload does not move it; listen() rejects an address in use', async (t) => {
  const { backend, gateway } = await startBoth(t);
  for (let i = 0; i < 2; i++) {
    gateway.reload({ listen: '127.0.0.2:0' });
    assert.equal(JSON.parse(gateway.log.at(-1)!).needsRestart, 'listen');
    assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
  }
  const six = await startGateway(t, backend, { listen: '[::1]:0', clients: ['::1'] });
  assert.match(six.url, /^http:\/\/\[::1\]:\d+$/);
  assert.equal((await ask(six, { headers: BEARER })).status, 200);
  assert.equal(requests(six)[0].client, '::1');
  const log: string[] = [];
  const taken = createGateway({ listen: `${backend.host}:${backend.port}`, ...tokens({}) }, {
    log: (line) => void log.push(line),
  });
  await assert.rejects(taken.listen(), { code: 'EADDRINUSE' });
  assert.deepEqual(log, [], 'the caller gets the error');
});

test('the gateway speaks TLS, and a reload brings a new certificate without dropping a connection', async (t) => {
  const tls = certificate(t);
  const { backend, gateway } = await startReceiving(t, undefined, { tls });
  assert.match(gateway.url, /^https:/);
  const agent = new https.Agent({ keepAlive: true });
  t.after(() => agent.destroy());
  const before = await ask(gateway, { body: MESSAGE, headers: BEARER, agent });
  assert.equal(before.status, 201);
  const { 'x-forwarded-proto': scheme, 'x-forwarded-for': client } = backend.seen[0]!.headers;
  assert.deepEqual([scheme, client], ['https', '127.0.0.1']);
  writeFileSync(tls.cert, CERTS[1].cert);
  writeFileSync(tls.key, CERTS[1].key);
  gateway.reload({ ...RECEIVING, tls });
  const { fingerprint } = await ask(gateway, { headers: BEARER, agent });
  assert.equal(fingerprint, before.fingerprint, 'the open connection lives on');
  const after = await ask(gateway, { headers: BEARER });
  assert.equal(after.status, 200);
  // Bun 1.4.5 keeps its first certificate, and this is logged. When this test fails, the exemption and the line in the
  // README can go.
  assert.equal(after.fingerprint === before.fingerprint, 'Bun' in globalThis);
  assert.equal(linesOf(gateway, /^reloaded/).at(-1)!.needsRestart, 'Bun' in globalThis ? 'tls' : undefined);
  const { text } = await accepted(t, gateway);
  backend.sockets[0]!.write('hello');
  await until(() => text().endsWith('hello'));
});

test('a reload that turns TLS on or off takes effect at the next start, which its log line reports', async (t) => {
  const backend = await startBackend(t);
  const tls = certificate(t);
  const changes = [[{}, { tls }], [{ tls }, {}]];
  if ('Bun' in globalThis) changes.pop(); // a server of Bun 1.4.5 does not show whether it speaks TLS
  for (const [before, after] of changes) {
    const gateway = await startGateway(t, backend, before);
    gateway.reload({ ...before, rate: '1000/1s' });
    assert.equal(linesOf(gateway, /^reloaded/).at(-1)!.needsRestart, undefined);
    gateway.reload(after!);
    assert.equal(linesOf(gateway, /^reloaded/).at(-1)!.needsRestart, 'tls');
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }), [200], `it speaks ${gateway.url} as before`);
  }
});

// Before Node 26, and on Deno, this took the whole deadline, and "docker stop" killed what was still running.
test('closing ends a connection on which no request has begun at once', async (t) => {
  for (const more of [{}, { tls: certificate(t) }]) {
    const patient = { headersTimeoutMs: 1e6, stallTimeoutMs: 1e6 }; // so that nothing else ends these connections
    const gateway = await startGateway(t, { url: 'http://127.0.0.1:1' }, { shutdown: '1h', ...more }, patient);
    const { socket: kept } = open(t, gateway, HEALTH);
    await once(kept, 'data');
    const sockets = [kept, open(t, { port: gateway.port }).socket];
    if ('tls' in more) {
      const { socket: silent } = open(t, gateway);
      await once(silent, 'secureConnect');
      sockets.push(silent);
    }
    await Promise.all(sockets.map((socket) => socket.connecting && once(socket, 'connect')));
    // Once the gateway knows a connection that was accepted after all of these, it knows these too.
    await raw(gateway, bytesOf('GET /healthz HTTP/1.1 | Host: x | Connection: close'));
    await gateway.close();
    // Bun 1.4.5 does not report a connection before its first byte.
    if ('Bun' in globalThis) sockets.splice(1, 1)[0]!.destroy();
    await Promise.all(sockets.map((socket) => closed(socket.resume())));
    assert.match(gateway.log.at(-1)!, /"message":"stopped"/);
  }
});

// Bun does not report such a connection, and ends it only after some ten seconds, for which closing waited.
test('closing keeps to its deadline although a client has not finished its TLS handshake', async (t) => {
  const gateway = await startGateway(t, { url: 'http://127.0.0.1:1' }, { shutdown: '300ms', tls: certificate(t) });
  for (const begun of ['', '\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03']) {
    const { socket } = open(t, { port: gateway.port }, Buffer.from(begun, 'latin1'));
    await once(socket, 'connect');
  }
  await ask(gateway, { path: '/healthz' }); // its connection was accepted after the others
  await within(gateway.close(), 'the end of the gateway', 5000);
  assert.match(gateway.log.at(-1)!, /"message":"stopped"/);
});

test('closing lets a request finish, also over TLS, and its response has Connection: close', async (t) => {
  for (const more of [{}, { tls: certificate(t) }]) {
    const { backend, gateway } = await startHeld(t, 1, { shutdown: '1h', ...more });
    const { socket, text } = open(t, gateway, SEND);
    await until(() => backend.acting === 1);
    const closing = gateway.close();
    backend.answer();
    await Promise.all([closing, closed(socket)]);
    assert.match(text(), /^HTTP\/1\.1 201 Created\r\n/);
    if (isNode) assert.match(text(), /\r\nConnection: close\r\n/);
  }
});

test('a client that ends or resets its connection in the middle of its head gets no response and leaves no line in the log', async (t) => {
  const { gateway } = await startBoth(t);
  for (const leave of ['end', 'resetAndDestroy'] as const) {
    const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
    const { socket, text } = open(t, gateway, ABOUT.slice(0, -6));
    const [served] = await accepted;
    if (!('Bun' in globalThis)) await until(() => served.bytesRead > 0); // there it stays 0 until the first request
    socket[leave]();
    await Promise.all([closed(socket), closed(served)]);
    assert.equal(text(), '');
    assert.equal(linesOf(gateway, /parser|client error/).length, 0, leave);
  }
});

// An error of the system other than a reset looked like one of the parser.
test('a connection that fails counts as a client that disconnected, whatever the error', async (t) => {
  const { backend, gateway } = await startBoth(t);
  for (const code of ['ECONNRESET', 'ETIMEDOUT', 'EPIPE']) {
    const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
    const begun = once(gateway.server, 'request');
    const { socket } = open(t, gateway, `${post(SECRET, 100)}{`);
    const [[served]] = await Promise.all([accepted, begun]);
    served.destroy(Object.assign(new Error('planted'), { code }));
    await closed(socket);
    await until(() => requests(gateway).length > 0);
    assert.equal(outcomeOf(requests(gateway)[0]), '499 client_left', code);
    gateway.log.length = 0;
  }
  assert.equal(backend.connections, 0);
});

// The parser goes on with a packet after its socket was destroyed.
test('bytes behind requests for which their connection was closed leave no warning of the parser', async (t) => {
  const { backend, gateway } = await startHeld(t, 1);
  const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
  const { socket } = open(t, gateway, `${SEND.repeat(9)}rubbish\r\n\r\n`);
  const [served] = await accepted;
  await Promise.all([closed(socket), closed(served)]);
  assert.equal(linesOf(gateway, /the HTTP parser|client error/).length, 0);
  assert.ok(backend.seen.length <= 1, `${backend.seen.length} requests were sent`);
});

test('bytes other than TLS end their connection on an https port, although the client keeps it open', {
  skip: 'Bun' in globalThis && 'Bun 1.4.5 does not report it',
}, async (t) => {
  const { gateway } = await startBoth(t, { tls: certificate(t) });
  const { socket } = open(t, { port: gateway.port }, ABOUT);
  await closed(socket.resume(), 'the gateway to close the connection');
});

// Linux delivers what a reset connection had sent, but not its address, so the client counted as loopback.
test('a client that resets its connection has no address, and matches no rule for addresses', async (t) => {
  const own = { clients: ['127.0.0.1', '10.9.9.9'], trustedProxies: ['127.0.0.1'] };
  const { backend, gateway } = await startBoth(t, own);
  for (let i = 0; i < 20; i++) {
    const socket = net.connect({ port: gateway.port, host: '127.0.0.1', localAddress: '127.0.0.2' });
    const send = `${post(SECRET, HELLO.length, 'X-Forwarded-For: 10.9.9.9')}${HELLO}`;
    socket.on('error', () => {}).write(send, () => socket.resetAndDestroy());
    await closed(socket);
  }
  assert.equal((await ask(gateway, { path: '/healthz' })).status, 200);
  assert.equal(backend.connections, 0);
  for (const line of requests(gateway)) if (line.route !== '/healthz') assert.equal(line.client, '127.0.0.2');
});

// Node pauses a socket whose responses are not read, and nothing ended that pause.
test('a client that never reads a response is disconnected; one that reads a large response slowly but steadily is not', async (t) => {
  const size = 12 * MIB;
  const backend = await startBackend(t, (_, res) => res.end(Buffer.alloc(size, 'x')));
  const gateway = await startGateway(t, backend, {}, { stallTimeoutMs: 3000 });
  const { socket } = open(t, gateway);
  socket.pause();
  const request = 'GET /x HTTP/1.1\r\nHost: g\r\n\r\n'.repeat(1000);
  const more = (): void => {
    while (!socket.destroyed && socket.write(request));
  };
  socket.on('drain', more);
  more();
  const req = http.get({ host: '127.0.0.1', port: gateway.port, path: '/v1/about', agent: false, headers: BEARER });
  const [res] = await once(req, 'response') as [http.IncomingMessage];
  let got = 0;
  for await (const chunk of res) {
    got += chunk.length;
    // The pauses add up to more than the stall time-out, and each is a tenth of it.
    if (got % MIB < chunk.length) await pass(300);
  }
  assert.equal(got, size);
  await closed(socket);
  assert.ok(socket.bytesRead < socket.bytesWritten, 'it read no response, and was closed');
});

test('a client that reads no response and sends one request at a time is disconnected, like an idle one', async (t) => {
  const backend = await startBackend(t, (_, res) => res.end(Buffer.alloc(16_000, 'x')));
  const gateway = await startGateway(t, backend, {}, { stallTimeoutMs: 1500 });
  Object.assign(gateway.server, { keepAliveTimeout: 0 });
  const { socket: idle } = open(t, gateway, HEALTH);
  await once(idle, 'data');
  const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
  const { socket } = open(t, gateway);
  socket.pause();
  const [served] = await accepted;
  // Each response is a single write including its end, so no request waits for room. Bun 1.4.5 emits no time-out for a
  // connection that waits for room.
  for (let sent = 1; !served.destroyed && !('Bun' in globalThis); sent++) {
    socket.write(ABOUT);
    await until(() => backend.seen.length === sent || served.destroyed, 'the connection to be closed');
  }
  await closed(idle);
});

// A queued response never emitted "close", so its request was neither aborted nor logged. With 16 waiting heads on each
// of 40 connections, one token filled 128 MB.
test('pipelined requests are served one at a time and in order; all are aborted when the client disconnects, or if more than seven wait', async (t) => {
  const { backend, gateway } = await startHolding(t);
  const names = ['a', 'b', 'c', 'hang', 'd'];
  const { socket, text } = open(t, gateway, names.map((name) => ABOUT.replace('about', `about?${name}`)).join(''));
  await until(() => backend.seen.length === 4 && text().includes('about?c'));
  assert.deepEqual(backend.seen.map(({ url }) => url), names.slice(0, 4).map((name) => `/v1/about?${name}`));
  const served = ['a', 'b', 'c'].flatMap((name) => ['HTTP/1.1 200', `about?${name}`]);
  assert.deepEqual(text().match(/HTTP\/1\.1 200|about\?./g)?.map(String), served);
  socket.destroy();
  await until(() => requests(gateway).length === 4);
  assert.equal(requests(gateway)[3]!.status, 499);
  const { socket: greedy } = open(t, gateway, SEND.repeat(8));
  await until(() => backend.seen.length === 5);
  greedy.write(SEND);
  await closed(greedy);
  assert.equal(backend.seen.length, 5);
});

section('PIPELINE'); // ────────────────────────────────────────────────────────────────────────────

test('canary: a secret, in any form, valid or not, accepted or refused, appears in nothing that is emitted', async (t) => {
  const canary = 'CANARY0secret0that0must0not0show';
  const own = { ...ALL_FORMS, tokens: { test: { secret: canary } } };
  const { backend, gateway } = await startBoth(t, own);
  const other = { other: { secret: OTHER, recipients: [STRANGER] } };
  const strict = await startGateway(t, backend, { auth: { methods: ['bearer'] }, tokens: other });
  const dead = await startGateway(t, { url: 'http://127.0.0.1:9' }, own);
  const emitted: string[] = [];
  for (const to of [gateway, strict, dead]) {
    const broken = to === gateway ? ['/../x', '%zz', '"', '\\'] : []; // read alike by all three
    for (const { ask: make } of SPELLINGS) {
      for (const token of ['', 'x', ...broken].map((end) => canary + end)) {
        const request = { body: MESSAGE as object | string, path: '/v2/send', headers: {}, ...make(token) };
        const { body, path, headers } = request;
        const json = typeof body === 'string' ? body : JSON.stringify(body);
        const echoed = ['x-forwarded-for', 'x-request-id', 'proxy-authorization', 'forwarded'];
        const copies = [Object.fromEntries(echoed.map((name) => [name, token])), ...copiesOf(token)];
        const variants = [
          request,
          { ...request, method: 'PUT' },
          { ...request, method: 'POST', path: path.replace('/v2/send', `/v1/register/${FROM}`) },
          { ...request, path: path.replace('/v2/send', `/v2/send/@auth=${token}`) },
          { ...request, body: json.slice(0, -1) },
          ...copies.map((copy) => ({ ...request, headers: { ...copy, ...headers } })),
          { ...request, headers: { authorization: `Bearer ${OTHER}` } },
        ];
        // node's client refuses to send the others; raw requests follow
        const sent = variants.filter((variant) => !/["\\]/.test(variant.path)).map((variant) => ask(to, variant));
        for (const { text, rawHeaders } of await Promise.all(sent)) emitted.push(text, rawHeaders.join('\n'));
      }
    }
    const targets = `/@auth=${canary}"/v2/send /@auth=${canary}\\/v2/send http://x/@auth=${canary}/v1/about
      /v1/about?@auth=${canary}" /v1/about#@auth=${canary}`.split(/\s+/);
    const heads = targets.map((target) => `GET ${target} HTTP/1.1 | Host: gateway | Connection: close`);
    heads.push(`${canary} rubbish`, `GET /@auth=${canary}/ HTTP/1.1 | ${canary}`);
    for (const head of heads) emitted.push(await raw(to, `${barred(head).join('\r\n')}\r\n\r\n`));
    emitted.push(...to.log);
  }
  for (const seen of backend.seen) emitted.push(JSON.stringify([seen.url, seen.rawHeaders]), seen.body.toString());
  assert.ok(backend.seen.length > 20, 'some of them must have been accepted');
  const digest = createHash('sha256').update(canary).digest('hex');
  // The part of its base64 that is the same after any number of bytes: without the characters that neighbouring bytes
  // affect.
  const base64 = ['', ' ', '  '].map((before) =>
    Buffer.from(before + canary).toString('base64').slice(before ? 4 : 0, -4)
  );
  const encoded = Array.from(Buffer.from(canary), (byte) => `%${byte.toString(16)}`).join('');
  for (const text of emitted) {
    const found = [canary, digest, encoded, ...base64].filter((form) => text.includes(form));
    assert.deepEqual(found, [], `found in: ${text.slice(0, 500)}`);
  }
});

test('/healthz is 200 without a credential or a backend, and reveals nothing else', async (t) => {
  const { backend, gateway } = await startBoth(t, { clients: ['192.0.2.1'], cors: [DASHBOARD] });
  const { status, text, headers } = await ask(gateway, { path: '/healthz', headers: { origin: DASHBOARD } });
  assert.deepEqual([status, text, headers['access-control-allow-origin']], [200, 'ok\n', DASHBOARD]);
  const path = '/healthz';
  const others = await statusesOf(gateway, { path, method: 'HEAD' }, { path: `${path}/` }, { path, body: '{}' });
  assert.deepEqual(others, [200, 403, 403]);
  assert.deepEqual(
    requests(gateway).slice(0, 2).map(({ bytesOut }) => bytesOut),
    [3, 0],
    'of the GET, and of the HEAD',
  );
  assert.equal(backend.connections, 0);
});

test("one log line per request, with the route's template and without numbers, tokens or forged lines", async (t) => {
  let nowMs = Date.now(); // `ms` was negative if the clock was set back during a request
  const { gateway } = await startBoth(t, { ...AT_INFO, allow: ['receive', 'send'] }, { now: () => nowMs -= 1000 });
  await ask(gateway, { path: `${RECEIVE}?timeout=1`, headers: BEARER });
  await ask(gateway, { path: `/v1/devices/${FROM}/%22%20status=200%20x`, headers: BEARER });
  const forged = { ...BEARER, 'x-forwarded-for': '1.2.3.4\u2028' };
  await ask(gateway, { body: MESSAGE, headers: forged }).catch(() => {});
  const [{ time, requestId, ms, bytesOut, ...first }, second] = requests(gateway);
  assert.match(time, /^\d{4}-\d\d-\d\dT/);
  assert.match(requestId, /^[0-9a-f-]{36}$/);
  assert.ok(ms >= 0 && bytesOut > 0, `${ms} ms, ${bytesOut} bytes`);
  const common = { message: 'request', client: '127.0.0.1', method: 'GET', token: 'test', form: 'bearer', bytesIn: 0 };
  assert.deepEqual(first, { ...common, level: 'info', route: '/v1/receive/:number', status: 200 });
  const { level, status, code, route } = second!;
  assert.deepEqual([level, status, code, route], ['warn', 403, 'setup_blocked', '/v1/devices/*/*']);
  assert.doesNotMatch(gateway.log.join(''), /15550100/); // no shorter: a port was 41555
});

test('closing lets running requests finish, refuses new and waiting ones at once, and keeps to its deadline', async (t) => {
  const { backend, gateway } = await startHeld(t, 1, { shutdown: '1h' });
  // Its connection is open and in the middle of its headers when closing starts.
  const { socket: late, text } = open(t, gateway, 'GET /v1/about HTTP/1.1\r\nHost: x\r\n');
  const uploads = [await beginLarge(gateway, backend), await beginLarge(gateway, backend)] as const;
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  uploads[0].end(LARGE.slice(-1));
  const statuses = uploads.map(statusFor);
  const [small] = await queueUp(gateway, ['small']);
  const closing = gateway.close();
  assert.equal(outcomeOf(await small!), '503 shutting_down');
  uploads[1].end(LARGE.slice(-1)); // asks for its slot only now
  assert.deepEqual(await Promise.all(statuses), [503, 503]);
  late.write('\r\n');
  await closed(late);
  assert.equal(outcomeOf(text()), '503 shutting_down');
  await assert.rejects(ask(gateway, {}), { code: 'ECONNREFUSED' });
  await answerAll(backend, [first]);
  await closing;
  await gateway.close(); // twice does no harm
  assert.deepEqual(arrived(backend), ['first']);
});

test('closing ends a connection that its client would keep open, once the response that had started before is complete', async (t) => {
  const { gateway, finish } = await startHolding(t, { shutdown: '1h' });
  Object.assign(gateway.server, { keepAliveTimeout: 0 });
  const { socket, text } = open(t, gateway, ABOUT.replace('about', 'about?hang&begun'));
  await until(() => text().includes('first, '));
  const closing = gateway.close();
  finish();
  await within(closing, 'the end of the gateway');
  await closed(socket);
  assert.match(text(), /^Connection: keep-alive\r$[^]*and last/im);
});

test('closing: at the deadline a request that the backend has is 504, any other 503, each with Connection: close, and the gateway stops waiting', async (t) => {
  const { backend, gateway } = await startHolding(t, { shutdown: '1s' });
  const clients = [
    [SEND, '504 backend_timeout'],
    [ABOUT.replace('about', 'about?hang'), '504 backend_timeout'],
    [post(SECRET, 200_000) + HELLO.slice(0, -1).padEnd(100_000), '503 shutting_down'],
    [`${post(SECRET, 100)}{`, '503 shutting_down'],
    ['POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{', '503 shutting_down'],
  ].map(([bytes, outcome]) => ({ ...open(t, gateway, bytes), outcome }));
  const refused = trickle(t, gateway, post(OTHER, 1_000_000));
  await until(() => backend.seen.length === 3 && requests(gateway).length === 1);
  await gateway.close();
  for (const { socket, text, outcome } of clients) {
    await closed(socket);
    assert.equal(outcomeOf(text()), outcome);
    assert.match(text(), /^connection: close\r$/im);
  }
  assert.equal(statusOf(await refused), 401);
  assert.deepEqual(requests(gateway).map((line) => line.status).sort(), [401, 503, 503, 503, 504, 504]);
});

test('closing: a response that has started is cut off at the deadline, and logged as shutting_down', async (t) => {
  const { gateway } = await startHolding(t, { shutdown: '500ms' });
  const { socket, text } = open(t, gateway, ABOUT.replace('about', 'about?hang&begun'));
  await until(() => text().includes('first, '));
  await gateway.close();
  await closed(socket);
  assert.deepEqual(requests(gateway).map(outcomeOf), ['200 shutting_down']); // with the status that the client saw
});

test('closing: running requests have at least half of a "shutdown" under a second', async (t) => {
  const { backend, gateway } = await startHolding(t, { shutdown: '600ms' });
  open(t, gateway, SEND);
  await until(() => backend.seen.length === 1);
  const startedMs = performance.now();
  const closing = gateway.close();
  await until(() => requests(gateway).length === 1);
  const ms = performance.now() - startedMs;
  assert.equal(outcomeOf(requests(gateway)[0]), '504 backend_timeout');
  assert.ok(ms > 290, `the request was ended after ${ms} ms`);
  await closing;
});

test('every response has a new X-Request-Id, which is in the log and in the request to the backend', async (t) => {
  const { backend, gateway } = await startBoth(t, { cors: [DASHBOARD] });
  const rows = `bearer ;; bearer | X-Request-Id: forged ;; bearer | ${HELLO} ;; /healthz ;; /.. ;; /v1/about ;;
    OPTIONS /v1/about | Origin: ${DASHBOARD} | ${ASKED}`.split(' ;;');
  const ids: unknown[] = [];
  for (const row of rows) ids.push((await sendRow(gateway, parseRow(row.trim()))).headers['x-request-id']);
  assert.deepEqual(ids, requests(gateway).map((line) => line.requestId));
  assert.equal(new Set(ids).size, 7);
  assert.deepEqual(backend.seen.map((seen) => seen.headers['x-request-id']), ids.slice(0, 3));
});

section('TARGET'); // ──────────────────────────────────────────────────────────────────────────────
const REFUSED_TARGETS = literal`
  http://evil.example/v1/about HTTP://evil.example/v1/about * v1/about /v1/about#fragment /v1\about \v1\about /\evil/x
  /v2/../v1/about /v2/./send /v1/about/.. /v2/%2e%2e/v1/about /v2/%2E%2e/v1/about /v2/.%2e/v1/about
  /v2/send/..\..\v1\about /v1%2fabout /v1%2Fabout /v1%5cabout /v1/%2561bout /v1/receive/%252B15550100001
  /v1/about%00 /v1/about%0a /v1/about%0D%0A /v1/about%7f /v1/about%1F /v1/about%C2%85
  /v1/about% /v1/about%z /v1/about%zz /v1/about%c3 /v1/about%ff
  /v1/about?x=% /v1/about?x=%zz /v1/about?x=%ff /v1/about?x=%00 /v1/about?%0ax=1
  /v1/receive/--help /v1/receive/-a /v1/receive/%2Dx /-v1/about /v1/-x/y /v1/groups/${FROM}/-x
  /v1/attachments/-rf/x /v1/attachments/%2d%2dhelp/x /v1/attachments/%2e%2e%2fetc /v1/attachments/a%2ejpg /v1/attachments/a%2Ejpg
  /v1/receive/15550100001 /v1/receive/+1555 /v1/receive/+1555010000112345 /v1/receive/+1555a
  /v1/receive/+15550100001%20 /v1/receive/%20+15550100001 /v1/receive/++15550100001 /v1/receive/+1%D9%A15550100001`;
table('a target that programs read differently is 400 even with a valid token, and the backend sees nothing', {
  allow: ['messaging', 'info', '* /v1/attachments/*', '* /*'],
})([
  '* bearer → 400 bad_target',
  // A target with the wrong first character is refused by node's parser, and on Deno without a body.
  REFUSED_TARGETS.trim().split(/\s+/).map((target) => `GET ${target}${/^[/h]/i.test(target) ? '' : ' → 400'}`),
  'PUT /v1/attachments/-x',
  // Bytes that no target may have. Node's parser refuses most of them.
  ['\t', ' ', '\x7f', '\x80', '\xff', '\0', '\x0b'].map((byte) => `GET /v1/ab${byte}out → 400`),
]);

/** Targets that pass, and what the backend receives for each. One in 64 attachment ids starts with "-". */
const PASSED_TARGETS = literal`
  /v1/about                                 /v1/about
  //v1/about                                /v1/about
  /v1/about/                                /v1/about
  /v1//about//                              /v1/about
  /%76%31/%61bout                           /v1/about
  /v1/about?                                /v1/about
  /v1/about?a=1&&b=%20+%2B&c                /v1/about?a=1&b=%20+%2B&c
  /v1/about?a="<'>"                         /v1/about?a=%22%3C%27%3E%22
  /v1/about?next=http://evil/../%2e%2e/%2525 /v1/about?next=http://evil/../%2e%2e/%2525
  /v1/about?@auth=x&%40auths=y              /v1/about?%40auths=y
  /v1/receive/+15550100001?timeout=1        /v1/receive/+15550100001?timeout=1
  /v1/receive/%2B15550100001                /v1/receive/+15550100001
  /v1/groups/${FROM}/${GROUP.replace('=', '%3D')} /v1/groups/${FROM}/${GROUP}
  /v1/attachments/-rf                       /v1/attachments/-rf
  /v1/attachments/--help                    /v1/attachments/--help
  /v1/attachments/a%3Fb%23c%20d;e           /v1/attachments/a%3Fb%23c%20d;e
  /v1/attachments/%C3%BCber                 /v1/attachments/%C3%BCber
  /v1/attachments/!$&'()*+,;=:@~-._         /v1/attachments/!$&'()*+,;=:@~-._
  /v1/attachments/[x]^${'`'}{|}              /v1/attachments/%5Bx%5D%5E%60%7B%7C%7D`
  .trim().split('\n').map((line) => line.trim().split(/\s+/) as [target: string, sent: string]);
table('the backend gets, byte for byte, what was checked', { allow: ['info', 'messaging'] })`
  * bearer → passes
  ${PASSED_TARGETS.map(([target, sent]) => `GET ${target} → GET ${sent}`)}
  # the first "?" and the first "=" divide
  GET /v1/search?numbers=a?b=c → GET /v1/search?numbers=a?b=c
  DELETE /v1/attachments/-Ab_9 → DELETE /v1/attachments/-Ab_9`;

test('a query starts at the first "?", a value at the first "=", and nothing after them is lost', () => {
  const { query, parameters, querySecret } = parseTarget('GET', '/v1/search?a=b=c?d&@auth=e=f?g');
  assert.deepEqual([query, parameters, querySecret], ['a=b=c?d', [['a', 'b=c?d']], 'e=f?g']);
});

test('parseTarget: a target that it returns passes again unchanged', () => {
  for (const [, sent] of PASSED_TARGETS) {
    const { segments } = parseTarget('GET', sent);
    const again = parseTarget('GET', `/${segments.map((segment) => encodeURIComponent(segment)).join('/')}`);
    assert.deepEqual(again.segments, segments, sent);
  }
});

section('CREDENTIALS'); // ─────────────────────────────────────────────────────────────────────────
const URLENCODED = 'application/x-www-form-urlencoded';
const AS_FORM = { 'content-type': URLENCODED };
/** Every place where a client can put a token, in every spelling that real clients send. */
const SPELLINGS = ([
  ['bearer', 'bearer', (token) => signed(`Bearer ${token}`)],
  ['bearer, scheme in another case', 'bearer', (token) => signed(`bEARER   ${token}`)],
  ['basic', 'basic', (token) => signed(basic(`api:${token}`))],
  ['basic, scheme in another case', 'basic', (token) => signed(basic(`api:${token}`).replace('Basic', 'BASIC'))],
  ['query', 'query', (token) => ({ path: `/v2/send?@auth=${token}` })],
  ['query as %40auth', 'query', (token) => ({ path: `/v2/send?x=1&%40auth=${token}&y=2` })],
  ['path', 'path', (token) => ({ path: `/@auth=${token}/v2/send` })],
  ['path as %40auth=', 'path', (token) => ({ path: `/%40auth=${token}/v2/send` })],
  ['path as %40auth%3D', 'path', (token) => ({ path: `/%40auth%3D${token}/v2/send` })],
  ['path behind a base URL that ends in a slash', 'path', (token) => ({ path: `//@auth=${token}//v2/send` })],
  ['body', 'body', (token) => ({ body: AUTHED(token) })],
  ['body, last and without a Content-Type', 'body', (token) => ({ body: { ...MESSAGE, auth: token } })],
  ['body as application/x-www-form-urlencoded', 'body', (token) => ({ body: AUTHED(token), headers: AS_FORM })],
  ['body, the key with escapes', 'body', (token) => ({ body: AUTHED(token).replace('auth', '\\u0061u\\u0074h') })],
] as [name: string, form: string, ask: (token: string) => Ask][]).map(([name, form, ask]) => ({ name, form, ask }));

const signed = (authorization: string): Ask => ({ headers: { authorization } });
/** A request as the fields of a row. */
const rowWith = ({ path = '/v2/send', headers = {}, body = '' }: Ask, method = 'POST'): string =>
  [
    `${method} ${path}`,
    ...Object.entries(headers).map(([name, value]) => `${name}: ${value}`),
    typeof body === 'string' ? body : JSON.stringify(body),
  ].filter(Boolean).join(' | ');

/** A row with its credential twice: a header, or the piece of the target or of the body that holds the token. */
function withTwo(row: string): string {
  const fields = row.split(' | ').map((field) => {
    if (/^(?!content-type)[\w-]+: /.test(field)) return `${field} | ${field}`;
    if (field.startsWith('{')) return field.replace(new RegExp(`"[^"]*":"${SECRET}"`), '$&,$&');
    return field.replace(new RegExp(`[^/?&]*${SECRET}`), field.includes('?') ? '$&&$&' : '$&/$&');
  });
  return fields.join(' | ');
}

for (const { name, form, ask: make } of SPELLINGS) {
  const [wrong, right] = [OTHER, SECRET].map((token) => rowWith({ body: HELLO, ...make(token) }));
  const others = FORM_WORDS.filter((other) => other !== form);
  const reason = form === 'body' ? 'no_credential' : 'form_not_accepted';
  const query = name.startsWith('query as') ? '?x=1&y=2' : '';
  const two = withTwo(right!);
  strict.notEqual(two, right, `the form ${name} has no row with two credentials`);
  const ambiguous = form === 'body' ? 'bad_field' : 'bad_credential';
  table(
    `form ${name}: a valid token sends and is removed; a wrong one, or a form not accepted for it, is 401; two are 400`,
    {
      ...ALL_FORMS,
    },
  )`
    ${two} → 400 ${ambiguous}
    ${wrong} → 401 unauthorized | reason=unknown_token
    @ ${JSON.stringify({ methods: others })} | ${right} → 401 unauthorized | reason=${reason}
    ${right} → 201 | "[{"timestamp":"1700000000000"}]" | form=${form} | token=test | POST /v2/send${query} | '${HELLO}' | > Authorization: | > Content-Length: ${HELLO.length}`;
}

// A sixth form, added as documented, sent its secret to the backend, and every test passed.
test('each form of the table is tested here; a form added to it is removed from requests, and does not compile unless it is searched for', async (t) => {
  assert.deepEqual(difference('FORMS', FORM_WORDS, 'SPELLINGS', SPELLINGS.map(({ form }) => form)), []);
  const added = "  key: 'header x-api-key',\n  token: 'parameter token',\n";
  const file = changedSource(t, ["  body: 'member auth',\n", (row) => row + added]);
  const changed = await import(pathToFileURL(file).href) as typeof import('./gateway.ts');
  const backend = await startBackend(t);
  const config = { ...ALL_FORMS, backend: { url: backend.url }, listen: '127.0.0.1:0', ...tokens({}) };
  const gateway = changed.createGateway(config, { log: () => {} });
  t.after(() => gateway.close());
  const headers = { ...BEARER, 'x-api-key': OTHER };
  const to = addressOf(await gateway.listen());
  assert.equal((await ask(to, { headers, path: `/v1/about?a=b&token=${OTHER}` })).status, 200);
  const { url, rawHeaders } = backend.seen[0]!;
  assert.equal(url, '/v1/about?a=b');
  assert.doesNotMatch(rawHeaders.join(), SECRETS);
  if (isNode) assert.deepEqual(await mistakesIn(file), ['findCredential']);
});

table('query and path are off unless named; a token may name its own forms', tokens({}, { methods: ['path'] }))`
  * POST /v2/send | ${HELLO} → 401 unauthorized
  POST /v2/send?@auth=${SECRET} ;; POST /@auth=${SECRET}/v2/send ;; POST /@auth=${OTHER}/v2/send → 201
  bearer ${OTHER} ;; bearer → 201`;
table('the first credential counts, in the order header, path, query, body: a wrong one is 401', ALL_FORMS)`
  * POST /v2/send → 401 unauthorized | ${HELLO}
  bearer ${OTHER} | POST /@auth=${SECRET}/v2/send | ${HELLO}
  bearer | POST /@auth=${OTHER}/v2/send?@auth=${OTHER} | ${AUTHED(OTHER)} → 201
  POST /@auth=${OTHER}/v2/send?@auth=${SECRET} | ${HELLO}
  POST /@auth=${SECRET}/v2/send?@auth=${OTHER} | ${HELLO} → 201 ;; POST /v2/send?@auth=${OTHER} | ${AUTHED(SECRET)}
  POST /v2/send?@auth=${SECRET} | ${AUTHED(OTHER)} → 201
  # An empty header counts as absent.
  Authorization: | ${AUTHED(SECRET)} → 201
  basic root:${SECRET} | ${AUTHED(SECRET)} ;; Authorization: Digest ${SECRET} | ${AUTHED(SECRET)}
  Authorization: Bearer | ${AUTHED(SECRET)} ;; Authorization: Basic !!! | ${AUTHED(SECRET)}
  POST /@auth=/v2/send | ${AUTHED(SECRET)}`;

test('a secret may hold colons and UTF-8, and end in a byte that looks like a space, in every form', async (t) => {
  // The last byte of à and Р is A0, that of … A6, and that of Ѕ 85: a space or a line break in Latin-1.
  const secrets = 'pass:wörd:with:colons sésame-ouvre-toi-à пароль-для-всех-Р three-dots-and-more… ЅЅЅЅЅЅЅЅЅЅЅЅЅЅЅЅ';
  for (const secret of secrets.split(' ')) {
    const both = await startBoth(t, { ...ALL_FORMS, tokens: { test: { secret } } });
    const encoded = encodeURIComponent(secret);
    await checkRows(both, [
      `* ${HELLO} → 201`,
      `basic api:${secret} ;; bearer ${secret} ;; {"auth":"${secret}",${HELLO.slice(1)}`,
      `POST /v2/send?@auth=${encoded} ;; POST /@auth=${encoded}/v2/send`,
    ]);
    const bearer = Buffer.from(`Authorization: \t Bearer \t ${secret}\t `).toString('latin1');
    assert.equal(statusOf(await rawRequest(both.gateway, '/v1/about', { headers: [bearer] })), 200);
  }
});

table('two credentials in one place are 400, and an empty header is not a credential', ALL_FORMS)`
  * → 400 bad_credential
  GET /v1/about?@auth=${SECRET}&%40auth=${SECRET} ;; GET /@auth=${SECRET}/@auth=${SECRET}/v1/about
  GET /v1/@auth=${SECRET}/about → 400 bad_target ;; {"auth":"${SECRET}","auth":"${SECRET}"} → 400 bad_field
  bearer | bearer ;; Authorization: | bearer → 200`;
const THE_401 =
  literal`→ 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer | "{"error":"A valid API token is required in an accepted form, such as \"Authorization: Bearer TOKEN\".","`;
const EXPIRED = tokens({ methods: ['bearer'] }, { methods: ['bearer'], expires: '2020-01-01' });
table('every 401 is the same, whatever was wrong, and has both challenges', EXPIRED)`
  * ${THE_401}
  bearer wrong → reason=unknown_token ;; bearer ${OTHER} → reason=expired_token
  basic api:${OTHER} → reason=expired_token ;; basic → reason=form_not_accepted
  GET /@auth=${SECRET}/v1/about → reason=form_not_accepted ;; basic root:${SECRET} → reason=wrong_user
  basic ${SECRET} → reason=wrong_user ;; Authorization: ${SECRET} → reason=unknown_scheme
  basic API:${SECRET} → reason=wrong_user ;; basic Api:${SECRET} → reason=wrong_user
  Authorization: Token ${SECRET} → reason=unknown_scheme
  * ${THE_401} | reason=no_credential
  GET /v1/about ;; GET /v1/accounts ;; GET /no/such/thing ;; PATCH /v1/about ;; OPTIONS /v1/about ;; ${HELLO}
  ${AUTHED(SECRET)}`;

test('without tokens, requests need no credential, and every other rule still applies', async (t) => {
  const both = await startBoth(t, NO_TOKENS);
  const warning = 'no tokens are configured: all requests are accepted without authentication';
  assert.equal(logLines(both.gateway.log)[0]!.warning, warning);
  await checkRows(both, `${AUTHED(SECRET)} → 201 | ${HELLO} ;; bearer | POST /v1/register/${FROM} → 403 setup_blocked`);
});

test('an unauthenticated client opens no connection to the backend, and only the head of its body is read', async (t) => {
  const both = await startBoth(t, {}, { stallTimeoutMs: 2000 });
  const head = `POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{"message":"`;
  const { socket, text } = open(t, both.gateway, head);
  const filler = Buffer.alloc(64 * 1024, 'x');
  while (!socket.destroyed) await new Promise((resolve) => socket.write(filler, resolve));
  assert.equal(statusOf(text()), 401, text());
  assert.equal(requests(both.gateway)[0].bytesIn, 64 * 1024, 'the bytes that were read');
  assert.ok(socket.bytesWritten < 20_000_000, `${socket.bytesWritten} bytes were taken`);
  assert.equal(both.backend.connections, 0, 'the backend saw a connection');
});

/** A send whose `auth` ends at this byte. */
const lateAuth = (end: number, tail = `","auth":"${SECRET}"`): string =>
  `${`${HELLO.slice(0, -1)},"x":"`.padEnd(end - tail.length, 'x')}${tail}}`;
table('auth is found within the first 64 KiB, but not one byte later', {}, { stallTimeoutMs: 2000 })`
  * → 201
  ${lateAuth(64 * 1024)} ;; ${lateAuth(64 * 1024 + 1)} → 401 unauthorized
  ${lateAuth(64 * 1024).slice(0, -1)},"base64_attachments":["${'A'.repeat(300_000)}"]}`;
table("attack: use another token's form", tokens({ methods: ['body'] }, { methods: ['bearer', 'query'] }))`
  * ${HELLO} → 401 unauthorized
  bearer ;; basic ;; POST /v2/send?@auth=${SECRET} ;; ${AUTHED(OTHER)}`;
table("attack: use another client's token in the body next to one that may not send", tokens({ allow: ['info'] }, {}))`
  * ${HELLO} | bearer → 403 endpoint_not_allowed
  ${AUTHED(OTHER)} ;; ${HELLO.slice(0, -1)},"auth":"${OTHER}"}
  POST /v2/send?@auth=${OTHER} ;; POST /@auth=${OTHER}/v2/send`;
test('attack: wrong credentials from any number of addresses do not fill the memory; the limiter forgets the key used longest ago', () => {
  const limiter = new RateLimiter();
  const isKnown = (i: number): boolean => limiter.take(`address ${i}`, { count: 1, perMs: 60_000 }, 0) > 0;
  for (let i = 0; i < 50_000; i++) isKnown(i);
  for (let i = 40_000; i < 50_000; i++) assert.equal(isKnown(i), true, String(i));
  // The most recently used one stays.
  assert.deepEqual([40_000, 50_000, 40_000, 39_999, 0].map(isKnown), [true, false, true, false, false]);
});

table(
  'per token: rate, clients and allow replace the top-level ones entirely, whatever headers claim about the client',
  {
    ...{ rate: '1/1h', clients: ['192.0.2.1'], allow: ['info'] },
    ...tokens({ rate: '2/1h', clients: ['::ffff:127.0.0.1'], allow: ['send'] }, {}),
  },
)`
  * POST /v2/send | ${HELLO} | bearer → 201
  bearer ;; GET /v1/about → 403 endpoint_not_allowed ;; bearer ;; bearer → 429 rate_limited
  * ${HELLO} | bearer ${OTHER} → 403 client_not_allowed
  POST /v2/send ;; X-Forwarded-For: 192.0.2.1 | X-Real-IP: 192.0.2.1 | Forwarded: for=192.0.2.1`;

test('a token is valid through the day on which it expires, and not a moment longer', async (t) => {
  let nowMs = Date.parse('2027-06-30T23:59:59.998Z');
  const day = { secret: SECRET, expires: '2027-06-30' };
  const time = { secret: OTHER, expires: '2027-07-01T01:00:00+01:00' };
  const both = await startBoth(t, { tokens: { day, time } }, { now: () => nowMs });
  await checkRows(both, ['* → 200', ['bearer', `bearer ${OTHER}`]]);
  nowMs += 2;
  await checkRows(both, ['* → 401 unauthorized', ['bearer', `bearer ${OTHER}`]]);
});

// Node 20 obeyed header fields after the thousandth without showing them.
table('a thousand header fields hide nothing from the gateway', {})`
  * → 431
  {} | ${'a: | '.repeat(1100)} Transfer-Encoding: chunked ;; bearer | ${'a: | '.repeat(1100)} bearer x`;

// A regular expression took time quadratic in the white space of an Authorization header.
table('a long Authorization header is parsed in one pass', {})(
  Array<string>(30).fill(`Authorization: Bearer a${' '.repeat(15_000)}a → 401 unauthorized`),
);

section('ORIGINS'); // ─────────────────────────────────────────────────────────────────────────────

const DASHBOARD = 'https://dash.example:8443';
const EVIL = 'Origin: http://evil.example:9000';
const CROSS_SITE = `${EVIL} | Sec-Fetch-Mode: no-cors | Sec-Fetch-Site: cross-site`;
const ASKED = 'Access-Control-Request-Method: POST';
const SWITCHED: GatewayConfig = { ...ALL_FORMS, allow: ['messaging', 'info', 'setup'], cors: [DASHBOARD] };
const OPEN: GatewayConfig = { ...SWITCHED, ...NO_TOKENS };
/**
 * What a browser adds to a request automatically: a password that it remembers, or nothing where no token is needed.
 */
const BY_ITSELF = [
  ['with the password that it remembers', SWITCHED, 'basic'],
  ['where no token is needed', OPEN, 'none'],
] as const;
/** The headers of a row, as node:http's client accepts them. */
const fieldsIn = (row: string): http.OutgoingHttpHeaders =>
  Object.fromEntries(parseRow(row).headers.map(([name, value]) => [name.toLowerCase(), value]));

/** The signs of a page: fetch without CORS, beacons, forms, frames, popups, typed addresses and prefetches. */
const PAGES_SEND =
  `${CROSS_SITE} | Content-Type: text/plain;charset=UTF-8 ;; ${EVIL} | Content-Type: text/plain;charset=UTF-8
  ${EVIL} | Sec-Fetch-Mode: no-cors | Sec-Fetch-Site: same-site ;; Origin: null | Content-Type: text/plain
  Sec-Fetch-Site: cross-site ;; Sec-Fetch-Site: same-origin, cross-site ;; Sec-Fetch-Site: ;; Origin:
  # a page of its own, which an attachment could be
  ${CHROME} | Sec-Fetch-Site: same-origin ;; ${EVIL} | Sec-Fetch-Site: same-origin ;; ${CHROME} | Origin: http://gateway
  Origin: http://gateway ;; Origin: https://gateway ;; Origin: https://gateway | Sec-Fetch-Site: cross-site
  # a typed address, one that another site redirects, and one that the speculation rules of any page prefetch
  Sec-Fetch-Site: none ;; ${CHROME} | Sec-Fetch-Site: none ;; Sec-Fetch-Site: none | Sec-Fetch-Mode: navigate
  ${CHROME} | Sec-Fetch-Site: none | Sec-Purpose: prefetch;anonymous-client-ip
  ${CHROME} | Origin: http://gateway | Sec-Fetch-Site: none ;; Upgrade-Insecure-Requests: 1
  # another port is another origin
  Origin: http://gateway:8880 ;; Origin: http://gateway0 ;; Origin: http://a.gateway
  Origin: http://evil.example/gateway ;; Origin: http://evil.example:9000, http://gateway
  # almost an origin on cors
  Origin: https://dash.example ;; Origin: https://dash.example:8443/ ;; ${CHROME} | ${EVIL}`;
/** What over plain http shows a browser only in a GET: an image, a frame, a download and a typed address. */
const BROWSERS_GET = `${CHROME} ;; User-Agent: Mozilla/5.0 ;; ${CHROME} | Sec-Fetch-Mode: navigate
  ${CHROME} | Upgrade-Insecure-Requests: 1 ;; ${CHROME} | Range: bytes=0- ;; ${CHROME} | Accept: */*
  # a WebSocket, of a page of its own too
  ${CHROME} | Connection: Upgrade | Upgrade: websocket | Origin: http://gateway`;
/** Programs, which PowerShell is in spite of its User-Agent: no browser sends a POST without Origin. */
const POWERSHELL = 'User-Agent: Mozilla/5.0 (Windows NT; Windows NT 10.0; de-AT) WindowsPowerShell/5.1.26100.1';
const PROGRAMS_SEND = `Accept: text/html ;; User-Agent: curl/8.14.1 ;; User-Agent: node | Sec-Fetch-Mode: cors
  User-Agent: like Mozilla/5.0 ;; ${CHROME} | Origin: ${DASHBOARD}
  ${CHROME} | Origin: ${DASHBOARD} | Sec-Fetch-Site: cross-site | Sec-Fetch-Mode: cors`;

for (const [how, config, credential] of BY_ITSELF) {
  // The Host of a row is "gateway".
  const targets = `${RECEIVE} /v2/send?message=x /v1/qrcodelink?device_name=x /v1/accounts /@auth=/v1/accounts
    /v1/about /v1/attachments /v1/attachments/x /swagger/index.html /metrics /no/such/thing`.split(/\s+/);
  const proxied: GatewayConfig = { ...config, trustedProxies: ['127.0.0.1'] };
  for (const each of [config, proxied]) {
    const where = each === proxied ? ', behind a trusted proxy' : '';
    table(`attack: have a browser send automatically, ${how}${where}`, each)`
      * ${credential} | ${HELLO} → 403 cross_site
      ${PAGES_SEND}
      ${EVIL} | X-Forwarded-Host: evil.example:9000 ;; Origin: null | X-Forwarded-Host: null
      * ${credential} | DELETE /v1/attachments/x → 403 cross_site
      ${CHROME} | ${EVIL} ;; Origin: null
      ${targets.map((target) => `* ${credential} | GET ${target} → 403 cross_site`)}
      ${PAGES_SEND}
      ${BROWSERS_GET}
      * ${credential} | HEAD /v1/attachments/x → 403
      ${CHROME} ;; ${CROSS_SITE}`;
  }

  table(`programs and pages of an origin on cors are served, ${how}`, { ...config, allow: ['messaging', 'info'] })`
    * ${credential} | ${HELLO} → 201
    ${PROGRAMS_SEND}
    ${POWERSHELL}
    * ${credential} | DELETE /v1/attachments/x → passes
    ${POWERSHELL}
    * ${credential} | GET ${RECEIVE} → 200
    * ${credential} | GET /v1/about → 200
    * ${credential} | GET /v1/attachments/x → passes
    ${PROGRAMS_SEND}`;

  test(`WebSocket: no page opens one ${how}; programs do, and an origin on cors until a reload removes it`, async (t) => {
    const own = { ...config, allow: ['receive'] };
    const both = await startReceiving(t, undefined, own);
    const wss = 'Sec-Fetch-Mode: websocket | Sec-Fetch-Site: cross-site';
    // As Python's websocket-client does. A page of http://gateway can open wss://gateway, whose Host is the same.
    const itself = 'Origin: http://gateway';
    const refused = [
      CHROME,
      `${CHROME} | ${EVIL}`,
      `${CHROME} | ${EVIL} | ${wss}`,
      `${CHROME} | Origin: null`,
      `${CHROME} | ${itself}`, // Chromium sends no Sec-Fetch-Site with a WebSocket
      `${itself} | Sec-Fetch-Mode: websocket | Sec-Fetch-Site: same-origin`, // Firefox
      `${itself} | ${wss}`,
      'Origin: http://gateway:8880',
      'Origin: http://a.gateway',
      'Origin: null',
      ...(credential === 'none' ? [itself] : []),
    ];
    for (const row of refused) {
      assertDenied(await declined(t, both.gateway, `${credential} | ${row}`), 403, 'cross_site', both);
    }
    const opened = [
      ...(credential === 'none' ? [] : [itself, 'User-Agent: Python/3.13 websockets/15.0 | Origin: https://gateway']),
      'Accept: */*',
      `${CHROME} | ${wss} | Origin: ${DASHBOARD}`,
    ].map((row) => wish(t, both.gateway, `${credential} | ${row}`));
    for (const { text } of opened) {
      await until(() => text().includes('\r\n\r\n'));
      assert.match(text(), /^HTTP\/1\.1 101 [^]*^x-request-id: [\w-]{36}\r$/im);
    }
    both.gateway.reload({ ...own, cors: ['https://other.example'] });
    await closed(opened.pop()!.socket);
    await until(() => linesOf(both.gateway, /^websocket closed$/)[0]?.reason === 'no_longer_allowed');
    for (const { socket } of opened) assert.equal(socket.destroyed, false);
  });

  // A page sees whether a frame, a popup or a download navigates, which events fire, and how large a response is.
  test(`attack: tell responses apart from a page; they are the same whatever the path, ${how}`, async (t) => {
    const both = await startBoth(t, { ...config, allow: ['send'] });
    const paths = ['/v1/attachments/x', '/v1/attachments/missing', '/v1/about', '/v1/accounts', '/no/such', RECEIVE];
    const signs = [CROSS_SITE, CHROME, `${CHROME} | Upgrade-Insecure-Requests: 1`, `${CHROME} | Range: bytes=0-`];
    const seen = new Set<string>();
    for (const path of paths) {
      for (const sign of signs) {
        const answer = await ask(both.gateway, { path, headers: fieldsIn(`${credential} | ${sign}`) });
        assertDenied(answer, 403, 'cross_site', both);
        const all = JSON.stringify([answer.status, { ...answer.headers, date: '' }, answer.text]);
        seen.add(all.replaceAll(answer.json.requestId, ''));
      }
    }
    assert.equal(seen.size, 1, [...seen].join('\n'));
  });
}

table('a credential that a page must know is accepted from any page', SWITCHED)`
  * ${CHROME} | ${CROSS_SITE} → 201
  bearer | ${HELLO} ;; /v2/send?@auth=${SECRET} | ${HELLO} ;; /@auth=${SECRET}/v2/send | ${HELLO} ;; ${AUTHED(SECRET)}
  GET ${RECEIVE} | bearer → 200`;

/** Responds with the header that the request's X-Say contains, and with HTML, or 404 for a missing resource. */
const SAYING: Handler = (req, res) => {
  const [, name, value = ''] = /(.*?): (.*)/.exec(String(req.headers['x-say'])) ?? [];
  const isMissing = req.url!.endsWith('missing') || (value.includes('html') && !/\/(?:x|avatar)$/.test(req.url!));
  req.resume().on('end', () => res.writeHead(isMissing ? 404 : 200, name ? [name, value] : []).end('hi'));
};

const FILES = ['/v1/attachments/x', `/v1/groups/${FROM}/${GROUP}/avatar`, `/v1/contacts/${FROM}/a-uuid/avatar`];
// Chromium played an attacker's playlist from /@auth=TOKEN/v1/attachments/ID, and fetched what it named, including
// sends.
const WHOLE = [RECEIVE, '/v2/send?message=x', '/v1/qrcodelink?device_name=x', '/v1/accounts', '/swagger/index.html']
  .concat(
    '/v1/about',
    '/v1/attachments',
    `/v1/groups/${FROM}/${GROUP}`,
    '/v3/x',
    '/v1/devices/x/y/z',
    // a path without a row, whatever its last segment
    '/v3/avatar',
    '/v1/devices/x/y/avatar',
    '/v1/attachments/a/b',
    '/no/such/thing',
  );
table('attack: have a media element fetch anything else than a file; with Range it is refused in every form', {
  ...SWITCHED,
  ...tokens({ defaults: { number: FROM, recipients: [TO] }, senders: ['*'], recipients: ['*'] }),
  allow: ['messaging', 'info', 'setup', 'metrics', 'GET /v2/send', 'GET /v3/*', 'GET /v1/devices/*'],
}, { handler: SAYING })([
  '* Range: bytes=0- → 403 cross_site | reason=range | "Only attachments and avatars"',
  '* range: x → 403 cross_site',
  `* Range: bytes=0- | Origin: ${DASHBOARD} → 403 cross_site | reason=range`,
  ...WHOLE.concat('/metrics').flatMap((target) => [
    `GET ${target} | bearer`,
    `GET ${target} | basic`,
    `GET /@auth=${SECRET}${target}`,
    `GET ${target}${target.includes('?') ? '&' : '?'}@auth=${SECRET}`,
  ]),
  `${HELLO} | bearer ;; ${AUTHED(SECRET)} ;; DELETE /v1/groups/${FROM}/${GROUP} | bearer ;; /metrics | basic`,
  ...['/v1/plugins/avatar', '/v1/plugins/x/avatar', '/swagger/avatar'].map((target) => `GET ${target} | bearer`),
  `* Range: bytes=0- → passes | > Range: bytes=0-`,
  ...FILES.flatMap((file) => [`GET /@auth=${SECRET}${file}`, `GET ${file} | bearer | ${CHROME} | ${CROSS_SITE}`]),
]);
table('attack: have a media element fetch anything else than a file, where no token is needed', OPEN)([
  '* Range: bytes=0- → 403 cross_site | reason=range',
  ...WHOLE.map((target) => `GET ${target}`),
]);

const FROM_ELSEWHERE = 'a page of another site learns nothing of the endpoint, and a wrong password from there is 401';
table(FROM_ELSEWHERE, { ...SWITCHED, allow: ['send'] })`
  * basic | ${CROSS_SITE} → 403 cross_site
  /v1/about ;; /v1/accounts ;; /no/such/thing ;; GET /v2/send ;; basic api:${OTHER} → 401 unauthorized`;

const PUBLIC_HOSTS = `evil.example evil.example:8880 EVIL.example. localhost.evil.example evil-localhost.example
  notlan.example:80 evil.xlan home.arpa x.notahome.arpa 127.0.0.1.nip.io 127.0.0.1.evil.example:8880 lan.
  dash.example.evil.example other.dash.example ash.example`.split(/\s+/);
const LOCAL_HOSTS = `127.0.0.1:8880 192.168.1.7 [::1]:8880 [fd00::7] localhost:8880 LOCALHOST pi pi.local:8880 PI.Local
  pi.lan pi.home pi.fritz.home pi.localdomain pi.intranet pi.internal host.docker.internal:8880 pi.home.arpa pi.test
  app.localhost:8880 dash.example DASH.example:8880`.split(/\s+/);
test('attack: point a public name at the gateway (DNS rebinding); without tokens only a local name, one on cors or none is served; with tokens, or behind a trusted proxy, any is', async (t) => {
  const both = await startBoth(t, OPEN);
  const { backend, gateway } = both;
  for (const host of PUBLIC_HOSTS) {
    const own = fieldsIn(`Host: ${host} | ${CHROME} | Origin: http://${host} | Sec-Fetch-Site: same-origin`);
    for (const request of [{ headers: { host } }, { body: MESSAGE, headers: own }]) {
      assertDenied(await ask(gateway, request), 403, 'cross_site', both);
    }
    const wish = `Host: ${host} | Origin: http://${host} | Connection: Upgrade | Upgrade: websocket`;
    const response = await raw(gateway, bytesOf(`GET ${RECEIVE} HTTP/1.1 | ${wish}`));
    assert.deepEqual([statusOf(response), codeOf(response)], [403, 'cross_site'], host);
  }
  assert.equal(backend.connections, 0);
  for (const host of LOCAL_HOSTS) assert.equal((await ask(gateway, { headers: { host } })).status, 200, host);
  assert.equal(statusOf(await raw(gateway, 'GET /v1/about HTTP/1.0\r\n\r\n')), 200);
  assert.equal(backend.seen.length, LOCAL_HOSTS.length + 1);
  const kept = await startGateway(t, backend);
  // A proxy answers for the name under which it is reached.
  const proxied = await startGateway(t, backend, { ...OPEN, trustedProxies: ['127.0.0.1'] });
  for (const host of PUBLIC_HOSTS) {
    assert.equal((await ask(kept, { headers: { ...fieldsIn('basic'), host } })).status, 200, host);
    assert.equal((await ask(proxied, { headers: { host } })).status, 200, host);
    const own = fieldsIn(`Host: ${host} | ${CHROME} | Origin: http://${host}`);
    assert.equal((await ask(proxied, { headers: own })).json.code, 'cross_site', host);
  }
});

const ONLY_BEARER =
  'a browser is challenged for a bearer token only, so it asks for no password, which it would remember';
table(ONLY_BEARER, {})`
  * GET /v1/about → 401 unauthorized | WWW-Authenticate: Bearer
  * GET /v1/accounts → 401 unauthorized | WWW-Authenticate: Bearer
  * ${HELLO} → 401 unauthorized | WWW-Authenticate: Bearer
  Sec-Fetch-Site: none ;; ${EVIL} ;; Upgrade-Insecure-Requests: 1
  * HEAD /v1/about → 401 | WWW-Authenticate: Bearer
  * GET /v1/about → 401 unauthorized | WWW-Authenticate: Bearer
  ${CHROME} ;; User-Agent: Mozilla/5.0 | Connection: Upgrade | Upgrade: websocket
  * GET /v1/about → 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer
  * ${HELLO} → 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer
  Accept: */* ;; User-Agent: Wget/1.25.0 ;; User-Agent: like Mozilla/5.0 ;; Sec-Fetch-Mode: cors
  * ${HELLO} → 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer
  ${POWERSHELL}`;

const CORS = [DASHBOARD, 'https://plain.example'];
/** No Origin, and the one on `cors` in a different spelling. */
const NOT_LISTED = `Accept: */* ;; ${EVIL} ;; Origin: null ;; Origin: ;; Origin: * ;;
  Origin: https://DASH.example:8443 ;; Origin: http://dash.example:8443 ;; Origin: https://dash.example ;;
  Origin: https://dash.example:8443/ ;;
  Origin: https://dash.example:8443.evil.example ;; Origin: https://plain.example:443 ;;
  Origin: ${DASHBOARD} | Origin: ${DASHBOARD} ;; Origin: ${DASHBOARD} | ${EVIL} ;;
  Origin: ${DASHBOARD}, http://evil.example:9000`.split(/ ;;\s+/);
const EXPOSED = `Access-Control-Allow-Origin: ${DASHBOARD} | Access-Control-Expose-Headers: Retry-After, X-Request-Id`;
const HIDDEN = 'Access-Control-Allow-Origin: | Access-Control-Expose-Headers: | Vary:';
const [GOOD, LISTED] = [`bearer ${OTHER}`, `* Origin: ${DASHBOARD} → ${EXPOSED} | Vary: Origin`];
const READERS = { ...tokens({ rate: '3/1h' }, {}), cors: CORS, allow: ['send', 'info'], limits: { body: '1KiB' } };
/** On Bun a refused request with an unread body never ends: its connection closes after this time. */
const SOON_CLOSED = 'Bun' in globalThis ? { stallTimeoutMs: 1000 } : {};
const READ_ALL = 'a page of an origin on cors may read every response, refusals included, and no other page any';
table(READ_ALL, READERS, SOON_CLOSED)([
  [LISTED, ...NOT_LISTED.map((origin) => `* ${origin} → ${HIDDEN}`)],
  `/v1/health | ${GOOD} → 204 ;; ${HELLO} | ${GOOD} → 201 ;; /v1/about | ${GOOD} → 200
  /.. → 400 bad_target ;; /v1/about | ${GOOD} | ${GOOD} → 400 bad_credential ;; {} | ${GOOD} → passes
  { | ${GOOD} → 400 bad_json ;; /v1/about → 401 unauthorized ;; /v1/about | bearer wrong → 401 unauthorized
  OPTIONS /v2/send → 401 unauthorized ;; /v1/accounts | ${GOOD} → 403 setup_blocked
  GET ${RECEIVE} | ${GOOD} | Connection: Upgrade | Upgrade: websocket → 403 endpoint_not_allowed
  /no/such/thing | ${GOOD} → 404 unknown_endpoint ;; GET /v2/send | ${GOOD} → 405 method_not_allowed
  OPTIONS /v2/send | ${GOOD} → 405 method_not_allowed`,
  LISTED,
  `${sized(1100)} | ${GOOD} → 413 body_too_large ;; {} | ${GOOD} | Content-Encoding: gzip → 415 unsupported_encoding
  bearer → 200 ;; bearer → 200 ;; bearer → 200 ;; bearer → 429 rate_limited`,
]);
const FAILING = { handler: (req: http.IncomingMessage) => void req.socket.destroy() };
table('a page of an origin on cors may read that the backend failed', { cors: CORS }, FAILING)([
  LISTED,
  'bearer → passes | code=bad_backend_answer',
]);

const OF_PAGES =
  'Allow-Origin Allow-Private-Network Allow-Methods Allow-Headers Allow-Credentials Expose-Headers Max-Age'
    .split(' ').map((name) => `Access-Control-${name}`);
const NO_PAGE = OF_PAGES.map((name) => `${name}:`).join(' | ');
table('headers of the backend for pages are dropped, its Vary is not', { cors: [DASHBOARD] }, { handler: SAYING })`
  * bearer | ${EVIL} → 200 | ${NO_PAGE}
  * bearer | Origin: ${DASHBOARD} → 200 | ${NO_PAGE} | ${EXPOSED}
  ${OF_PAGES.map((name) => `X-Say: ${name.replace('A', 'a')}: *`)}
  * bearer | X-Say: Vary: Accept → 200
  ${EVIL} → Vary: Accept ;; Origin: ${DASHBOARD} → Vary: Origin, Accept`;

/** The headers added to a relayed response to a GET, so that its content does nothing and is not stored. */
const CSP = "default-src 'none'; style-src 'unsafe-inline'; sandbox";
const ACTIVE =
  'text/html | image/svg+xml | audio/aac, text/html | audio/aac; a=b, text/html | text/html; audio/aac | video/x+xml'
    .split(' | ');
table('a relayed response to a GET runs no script, requests nothing and is not stored, except for swagger', {
  ...tokens({}, { defaults: { number: FROM, recipients: [TO] } }),
  allow: ['messaging', 'setup', 'GET /v3/*', 'GET /v2/send'],
}, { handler: SAYING })`
  * bearer → passes | Cache-Control: no-store | Content-Security-Policy: ${CSP} | X-Content-Type-Options: nosniff
  ${ACTIVE.map((type) => `GET /v1/attachments/x | X-Say: Content-Type: ${type} → Content-Type: ${type}`)}
  ${ACTIVE.map((type) => `GET /v3/x | X-Say: content-type: ${type} → Content-Type: ${type}`)}
  GET /v1/attachments/nothing ;; GET /v3/nothing ;; GET /v1/groups/${FROM}/${GROUP}/avatar ;; GET /v1/plugins/x
  bearer ${OTHER} | GET /v2/send?message=x | X-Say: Cache-Control: max-age=60 → Cache-Control: no-store
  GET /v1/attachments/kept | X-Say: Cache-Control: max-age=60 → Cache-Control: max-age=60
  GET /v1/attachments/sound | X-Say: Content-Type: audio/aac → Content-Security-Policy:
  GET /v1/attachments/film | X-Say: content-type: Video/mp4; codecs="avc1" → Content-Security-Policy:
  GET /v1/attachments/picture | X-Say: Content-Type: image/png → Content-Type: image/png
  # browsers obey all of several policies
  GET /v1/attachments/x | X-Say: X-Content-Type-Options: none → X-Content-Type-Options: nosniff
  GET /v1/attachments/x | X-Say: Content-Security-Policy: img-src * → Content-Security-Policy: ${CSP}, img-src *
  * bearer → passes | Cache-Control: | Content-Security-Policy: | X-Content-Type-Options:
  GET /swagger/index.html ;; DELETE /v1/attachments/x | X-Say: Content-Type: text/html ;; ${HELLO}`;

const PLAYLISTS = `audio/mpegurl audio/x-mpegurl application/x-mpegurl Application/vnd.apple.mpegURL
  application/vnd.apple.mpegurl;charset=utf-8 video/mpegurl`.split(/\s+/);
const SHOWN = 'audio/aac video/mp4 image/png image/jpeg Image/WebP image/gif;a=b'.split(' ');
const NOT_SHOWN =
  'text/html | image/svg+xml | Image/SVG+XML; charset=utf-8 | application/pdf | text/plain | x | audio/x+xml | image/xml'
    .split(' | ');
for (const file of FILES) {
  const typed = (types: string[], more = ''): string[] =>
    types.map((type) => `GET ${file} | X-Say: Content-Type: ${type} → Content-Type: ${more || type}`);
  table(`a file that is not audio, video or an image is a download, and a playlist is a text: ${file}`, {
    ...tokens({}),
    allow: ['messaging', 'GET /v1/contacts/*', 'GET /v3/*'],
  }, { handler: SAYING })([
    '* bearer → 200 | Content-Disposition: attachment',
    ...typed(NOT_SHOWN),
    ...typed(PLAYLISTS, 'text/plain'),
    `GET ${file} ;; GET ${file} | X-Say: content-disposition: inline; filename=a.svg`,
    `* bearer → passes | Content-Disposition: | Content-Security-Policy: ${CSP}`,
    ...PLAYLISTS.map((type) => `GET /v3/x | X-Say: Content-Type: ${type} → Content-Type: text/plain`),
    'GET /v1/attachments ;; GET /v3/x | X-Say: Content-Type: text/html',
    '* bearer → passes | Content-Disposition:',
    ...typed(SHOWN),
    'DELETE /v1/attachments/x | X-Say: Content-Type: text/html',
    // Firefox revealed to a page of another site whether a frame navigated, and so which attachments exist.
    'GET /v1/attachments/missing | X-Say: Content-Type: text/html',
  ]);
}

test('the last of two Content-Type headers of a response decides whether it is shown', async (t) => {
  const head = 'HTTP/1.1 200 OK | Content-Type: image/png | Content-Type: text/html | Content-Length: 2 | | hi';
  const { gateway } = await startRaw(t, (socket) => void socket.write(barred(head).join('\r\n')), {
    allow: ['messaging'],
  });
  const { headers } = await ask(gateway, { path: '/v1/attachments/x', headers: BEARER });
  assert.equal(headers['content-disposition'], 'attachment');
});

test('a preflight of an origin on cors is 204 without a credential, from any address, and neither reaches the backend nor counts toward the rate', async (t) => {
  const elsewhere = { ...SWITCHED, clients: ['10.0.0.0/8'] };
  const limited = { ...OPEN, ...tokens({ rate: '1/1h' }) };
  const names = 'Access-Control-Request-Headers';
  // The same holds for an unknown route and an invalid target, so a page can read the refusal that follows.
  const targets = `/v2/send /no/such/thing /v1/accounts ${RECEIVE} /@auth=${OTHER}/v2/send /@auth=${OTHER}/@auth=x/
    /../v2/send /v1/groups/--help /v1/receive/1 /%zz /v1%2Fabout http://x/v2/send`.split(/\s+/);
  const preflights: [row: string, allowed: string][] = [
    [`/v2/send | ${names}: authorization,content-type`, 'authorization, content-type'],
    [`/v2/send | ${names}: X-Request-Id, Authorization ,accept`, 'authorization, accept, x-request-id'],
    [`/v2/send | ${names}: accept-language | ${names}: content-language`, 'accept-language, content-language'],
    [`/v2/send | ${names}: authorization,x-forwarded-for,cookie,*`, 'authorization'],
    ...[`/v2/send | ${names}: x-other`, ...targets].map((row): [string, string] => [row, '']),
  ];
  const methods = 'Access-Control-Allow-Methods: GET, POST, PUT, PATCH, DELETE';
  const own = fieldsIn(`${EXPOSED} | Vary: Origin | Access-Control-Max-Age: 60 | ${methods}`);
  for (const [config, ofSend] of [[OPEN, 201], [limited, 201], [elsewhere, 403]] as const) {
    const { backend, gateway } = await startBoth(t, config);
    for (const [row, allowed] of preflights) {
      const { status, text, headers } = await sendRow(
        gateway,
        parseRow(`OPTIONS ${row} | Origin: ${DASHBOARD} | ${ASKED}`),
      );
      for (const name of ['date', 'connection', 'x-request-id']) delete headers[name];
      assert.deepEqual([status, text], [204, ''], row);
      assert.deepEqual(headers, { ...own, 'access-control-allow-headers': allowed }, row);
    }
    assert.equal(backend.connections, 0);
    assert.doesNotMatch(gateway.log.join(), SECRETS);
    const { method, token, status, level } = requests(gateway)[0];
    assert.deepEqual([method, token, status, level], ['OPTIONS', undefined, 204, 'debug']);
    const send = await ask(gateway, { body: MESSAGE, headers: { ...BEARER, origin: DASHBOARD } });
    assert.deepEqual([send.status, send.headers['access-control-allow-origin']], [ofSend, DASHBOARD]);
  }
});

const NAMED_ORIGIN =
  'an origin that is not on cors is named in the log where a credential is missing, and forges no line';
table(NAMED_ORIGIN, { cors: [DASHBOARD] })([
  `* OPTIONS /v1/about → 401 unauthorized\n* GET /v1/about → 401 unauthorized\n* ${HELLO} → 401 unauthorized`,
  ...[DASHBOARD, `http://api:${OTHER}@new.example`, 'https://a\x9b2J.example', 'a"b level=info \x9b2J\t\xe0', '']
    .map((origin) => `Origin: ${origin} → reason=no_credential | origin=undefined`),
  'Accept: */* → reason=no_credential | origin=undefined',
  ...['https://new.example:8443', 'null', 'https://a"b,level=info', `https://${'x'.repeat(200)}`].flatMap((origin) => [
    `Origin: ${origin} → reason=origin_not_listed | origin=${origin.slice(0, 100)}`,
    `OPTIONS /v1/about | ${ASKED} | Origin: ${origin} → reason=origin_not_listed | origin=${origin.slice(0, 100)}`,
    `GET /v1/about | bearer ${OTHER} | Origin: ${origin} → reason=unknown_token | origin=undefined`,
  ]),
]);

table('an OPTIONS that is not a preflight of an origin on cors is an ordinary request', { cors: CORS })([
  '* OPTIONS /v2/send → 401 unauthorized | Access-Control-Allow-Methods:',
  '* OPTIONS /v2/send | bearer → 405 method_not_allowed | Access-Control-Allow-Methods:',
  ...NOT_LISTED.map((origin) => `${origin} | ${ASKED}`),
  `Origin: ${DASHBOARD}`,
  `POST /v2/send | none | Origin: ${DASHBOARD} | ${ASKED} → 401 unauthorized`,
]);

section('ENDPOINTS'); // ───────────────────────────────────────────────────────────────────────────
const NO_ENDPOINTS = `
  * bearer → 404 unknown_endpoint | Allow:
  POST / → route=/ ;; POST /send → route=/send | "POST to /v2/send" ;; POST /api/v2/send → route=/*/v2/send
  POST /api/v1/rpc → route=/*/v1/* ;; GET /v1/receive/${FROM}/x → route=/v1/receive/*/*
  GET /${'v1/'.repeat(3000)} → route=/v1${'/v1'.repeat(7)}
  * bearer → 405 method_not_allowed
  GET /v2/send → Allow: POST | route=/v2/send | "This endpoint accepts POST, but not GET. To send by GET, a token needs \\"GET /v2/send\\" in its \\"allow\\", and \\"defaults\\" or \\"message\\".","
  @ {"defaults":{}} | GET /v2/send?message=x → Allow: POST | route=/v2/send | "a token needs \\"GET /v2/send\\" in its \\"allow\\""
  PUT /v2/send?message=x → Allow: POST | route=/v2/send | "accepts POST, but not PUT.","
  HEAD /v1/about → Allow: GET | route=/v1/about ;; OPTIONS /v2/send → Allow: POST | route=/v2/send
  PATCH /v1/groups/${FROM} → Allow: GET, POST | route=/v1/groups/* | "accepts GET, POST, but not PATCH.","`;
table(
  'with a token, an unknown endpoint is 404, and an unknown method 405 with the known ones; without a token, both are 401',
  {
    allow: ['messaging', 'setup', 'GET /v1/new/*'],
  },
)`${NO_ENDPOINTS}
  PATCH /v1/devices/${FROM}/local-data → Allow: DELETE | route=/v1/devices/*/local-data
  PUT /v1/contacts/${FROM}/sync → Allow: GET, POST | route=/v1/contacts/*/sync
  OPTIONS /v1/plugins/mine → Allow: GET, POST, PUT, PATCH, DELETE | route=/v1/plugins/*
  * bearer → 404 unknown_endpoint | Allow:
  GET /v1/new → route=/v1/* ;; POST /v1/new/x → route=/v1/*/* ;; GET /v1/accounts/${FROM} → route=/v1/accounts/*
  # To others it is all the same, but the log knows the route.
  * → 401 unauthorized | Allow:
  GET /v1/new → route=/v1/* ;; POST / → route=/ ;; GET /v1/accounts/${FROM} → route=/v1/accounts/*
  PATCH /v1/groups/${FROM} → route=/v1/groups/* ;; OPTIONS /v1/plugins/mine → route=/v1/plugins/*`;
table('a token for few endpoints gets the same 404 and 405', { allow: ['info'] })`${NO_ENDPOINTS}
  * bearer → 403 endpoint_not_allowed
  GET /v1/attachments → "not use this endpoint; the word \"messaging\" in its \"allow\" opens it.","
  GET /v1/receive/${FROM} → "the word \"receive\" in its" ;; ${HELLO} → "the word \"send\" in its"`;

/** A pattern in a token's allow, and requests. */
const PATTERNS = `
  * bearer → 200
  GET /v1/groups/:number ? GET /v1/groups/${FROM} ;; * /v1/groups/* ? DELETE /v1/groups/${FROM}/${GROUP}
  * /v1/groups/* ? PATCH /v1/groups/a/b/c ;; GET /v1/*/x ? GET /v1/new/x ;; GET /v1/new/:number ? GET /v1/new/${FROM}
  GET /v1/new/:any ? GET /v1/new/12 ;; GET /v1/new/:groupid ? GET /v1/new/${GROUP}
  GET /v1/new/constructor ? GET /v1/new/constructor
  DELETE /v1/devices/:number/:deviceId ? DELETE /v1/devices/${FROM}/2
  DELETE /v1/devices/:number/* ? DELETE /v1/devices/${FROM}/local-data
  DELETE /v1/devices/:number/local-data ? DELETE /v1/devices/${FROM}/local-data
  * /v1/plugins/:name ? GET /v1/plugins/mine ;; GET /v1/groups/${FROM} ? GET /v1/groups/%2B${FROM.slice(1)}
  * bearer → 403
  GET /v1/groups/:number ? POST /v1/groups/${FROM} & GET /v1/groups/${FROM}/${GROUP}
  # What a route spells is not a parameter: local-data deletes all of an account's data.
  DELETE /v1/devices/:number/:deviceId ? DELETE /v1/devices/${FROM}/local-data & DELETE /v1/devices/${FROM}/local%2Ddata
  POST /v1/polls/:number/:any ? POST /v1/polls/${FROM}/vote ;; GET /v1/:any ? GET /v1/about
  GET /v1/About ? GET /v1/about ;; GET /v1/groups/${FROM} ? GET /v1/groups/+15550100009
  * bearer → 404
  * /v1/groups/* ? GET /v1/groups ;; GET /v1/*/x ? GET /v1/new/more/x ;; GET /v1/new/:number ? GET /v1/new/12
  GET /v1/new/:groupid ? GET /v1/new/group.QUJD ;; GET /v1/about ? GET /v1/ABOUT
  * bearer → 405
  * /v1/groups/* ? HEAD /v1/groups/a & OPTIONS /v1/groups/a`;
table('patterns: literals, parameters, wildcards and methods', {}, ANSWERING)(
  PATTERNS.replace(
    /(\S+ \S+) \? (.*?)(?= ;; |$)/gm,
    (_, pattern, requests: string) =>
      requests.split(' & ').map((request) => `@ {"allow":["${pattern}"]} | ${request}`).join('\n'),
  ),
);
table('the default allows sending and info, and nothing more', {})`
  * bearer → 200
  GET /v1/about ;; GET /v1/health → 204 ;; ${HELLO} → 201 ;; POST /v1/send | ${HELLO} → 201
  GET /v1/receive/${FROM} → 403 ;; GET /v1/attachments → 403 ;; POST /api/v1/rpc | {} → 404 ;; GET / → 404`;

test('a lower-case method, TRACE and CONNECT never reach the backend', async (t) => {
  const { backend, gateway } = await startBoth(t, { allow: ['* /*', 'send', 'info'] });
  for (const method of ['get', 'post', 'TRACE', 'CONNECT', 'PROPFIND', 'HEAD']) {
    const response = await rawRequest(gateway, '/v1/about', { method, headers: [`Authorization: Bearer ${SECRET}`] });
    assert.ok([400, 405, NaN].includes(statusOf(response)), `${method}: ${response}`);
  }
  assert.equal(backend.seen.length, 0, 'the backend saw a request');
});

// A wildcard counted as naming the route explicitly.
table("attack: read all accounts' attachments by a route without an account; a pattern that names it opens it", {
  ...tokens({ senders: [FROM] }),
})`
  * bearer | @ {"allow":["messaging","info"]} → 403 endpoint_not_allowed
  * bearer | @ {"allow":["GET /v1/*","GET /*","GET /:a/:b/:c"]} → 403 endpoint_not_allowed
  GET /v1/attachments ;; GET /v1/attachments/abc ;; DELETE /v1/attachments/abc
  GET /v1/search?numbers=%2B15550100009
  * bearer | @ {"allow":["setup"]} → 403 endpoint_not_allowed
  GET /v1/accounts ;; GET /v1/qrcodelink?device_name=x ;; GET /v1/configuration ;; GET /swagger/index.html
  * bearer | @ {"allow":["info","GET /v1/attachments/:attachment","GET /v1/accounts"]} → passes
  GET /v1/about → 200 ;; GET /v1/attachments/abc ;; GET /v1/accounts ;; GET /v1/attachments → 403 endpoint_not_allowed`;
table('attack: use an unknown route that a pattern opens, with a token that has senders or recipients', {
  allow: ['* /*', 'POST /v1/plugins/*', 'POST /v3/send'],
})`
  * bearer | @ {"senders":["${FROM}"],"recipients":["${TO}"]} → 403 endpoint_not_allowed
  * bearer | @ {"senders":["${FROM}"]} → 403 endpoint_not_allowed
  * bearer | @ {"recipients":["${TO}"]} → 403 endpoint_not_allowed
  POST /v3/send | ${HELLO} ;; POST /v1/plugins/mine | ${HELLO} ;; GET /v1/new/${FROM} ;; PATCH /v1/groups/${FROM}`;
table('attack: use setup in another spelling, or through the default of a token with its own list', {
  ...{ allow: ['setup'], ...tokens({ allow: ['messaging', 'info', '* /*', '* /v1/*'] }) },
})`
  * bearer | POST / → 403 setup_blocked ;; * bearer | DELETE / → 403 setup_blocked
  * bearer | POST / | X-HTTP-Method-Override: GET → 403 setup_blocked
  /v1/register/${FROM} ;; //v1/register/${FROM} ;; /v1//register/${FROM}/ ;; /%76%31/%72egister/${FROM}
  /v1/register/%2B${FROM.slice(1)} ;; /v1/register/${FROM}?x=/v2/send ;; /v1/unregister/${FROM}
  /v1/devices/${FROM}/local%2Ddata ;; /v1/accounts ;; /v1/configuration ;; /v1/plugins/x
  # What is no route is none.
  * bearer | @ {"allow":["messaging","info"]} → 404 unknown_endpoint
  POST /V1/REGISTER/${FROM} ;; POST /v1/Register/${FROM} ;; POST /v1/register;x/${FROM} ;; POST /v1/about;/register`;

section('RATE'); // ────────────────────────────────────────────────────────────────────────────────
/** The lines of a text, also separated by two semicolons. */
const listed = (...text: Parameters<typeof literal>): string[] => literal(...text).trim().split(/\n *| ;; /);

/** A gateway on a clock that its test sets, and the outcomes of requests sent to it one after the other. */
async function startClocked(t: TestContext, config: GatewayConfig) {
  const clock = { nowMs: 1_700_000_000_000 };
  const both = await startBoth(t, config, { now: () => clock.nowMs });
  const asks = (way: string, ...wanted: string[]): Promise<void> =>
    checkRows(both, [`* ${way}`, wanted.map((row) => row.includes('→') ? row : `GET /v1/about → ${row}`)]);
  return { both, clock, asks };
}

test('rate: a token beyond its rate gets 429 with an accurate Retry-After, and other tokens are not affected', async (t) => {
  const { clock, asks } = await startClocked(t, { rate: '3/1m', ...tokens({}, {}) });
  await asks('bearer', '200', '200', '200');
  // Requests that are refused for another reason do not count, neither before nor after.
  await asks('bearer', 'GET /v1/accounts → 403 setup_blocked', '429 rate_limited | Retry-After: 20');
  await asks(`bearer ${OTHER}`, '200');
  clock.nowMs += 18_999;
  await asks('bearer', '429 rate_limited | Retry-After: 2'); // 1001 ms: after one second it would still be too early
  clock.nowMs += 1000;
  await asks('bearer', '429 rate_limited | Retry-After: 1');
  clock.nowMs += 1;
  await asks('bearer', '200', '429 rate_limited');
});

// 2718 lines a second: 64 GB a day.
test('rate-limited requests are 30 log lines a minute for each token, and beyond that logged at debug level', async (t) => {
  const { both: { gateway }, clock, asks } = await startClocked(t, { rate: '1/1d', ...tokens({}, {}) });
  const levels = (token: string) =>
    requests(gateway).filter((line) => line.code === 'rate_limited' && line.token === token).map(({ level }) => level);
  await asks('bearer', '200', ...Array(32).fill('429 rate_limited'));
  await asks(`bearer ${OTHER}`, '200', '429 rate_limited');
  assert.deepEqual(levels('test'), [...Array(30).fill('warn'), 'debug', 'debug']);
  assert.deepEqual(levels('other'), ['warn']);
  // Other refusals of the token do not count, and a minute later 30 more lines are allowed.
  await asks('bearer', 'GET /v1/accounts → 403 setup_blocked');
  assert.equal(requests(gateway).at(-1)!.level, 'warn');
  clock.nowMs += 60_000;
  await asks('bearer', '429 rate_limited');
  assert.deepEqual(levels('test').slice(30), ['debug', 'debug', 'warn']);
});

test('busy refusals are also 30 log lines a minute for each token; a token named like an address does not count as one', async (t) => {
  const config = {
    limits: { connections: 4 },
    tokens: { '127.0.0.1': { secret: SECRET }, 'other': { secret: OTHER } },
  };
  const { backend, gateway } = await startHolding(t, config, { now: () => START_MS });
  const levels = (code: string): unknown[] =>
    requests(gateway).filter((l) => l.code === code).map(({ level }) => level);
  for (let i = 0; i < 32; i++) await ask(gateway, {});
  assert.deepEqual(levels('unauthorized'), [...Array(30).fill('warn'), 'debug', 'debug']);
  for (let i = 0; i < 2; i++) open(t, gateway, SEND);
  await until(() => backend.seen.length === 2);
  for (let i = 0; i < 32; i++) await ask(gateway, { headers: BEARER });
  assert.deepEqual(levels('busy'), [...Array(30).fill('error'), 'debug', 'debug']);
});

test('wrong credentials beyond the budget are 429 with Retry-After; a valid one always works', async (t) => {
  const { clock, asks } = await startClocked(t, { trustedProxies: ['127.0.0.1'] });
  const from = (client: string, ...wanted: string[]): Promise<void> =>
    asks(`bearer ${OTHER} | X-Forwarded-For: ${client}`, ...wanted);
  // A flood must not fill the log of a small computer.
  for (let i = 0; i < 100; i++) {
    const wanted = i < 30 ? '401 unauthorized | level=warn' : '429 too_many_failures | level=debug | Retry-After: 2';
    await asks(`bearer guess-number-${i}-of-many | X-Forwarded-For: 203.0.113.7`, wanted);
  }
  await from('203.0.113.8', '401 unauthorized');
  // A missing credential is not a wrong one, and is challenged as before.
  await asks('X-Forwarded-For: 203.0.113.7', '401 unauthorized', 'bearer → 200');
  clock.nowMs += 2000;
  await from('203.0.113.7', '401 unauthorized', '429 too_many_failures');
  // One household is one IPv6 /64.
  const households = `2001:db8::# 2001:db8:0:0:ffff::1 2001:db8:0:1::1
    2001:db8::b:#:d:e:f 2001:db8:0:b:: 2001:db8:b::
    ::c:b:#:d:e:f 0:0:c:b:: c:b::`;
  for (const [members = '', last = '', other = ''] of households.split(/\n */).map((line) => line.split(' '))) {
    for (let i = 0; i < 30; i++) await from(members.replace('#', i.toString(16)), '401 unauthorized');
    await from(last, '429 too_many_failures');
    await from(other, '401 unauthorized');
  }
});

test('every refused credential counts as wrong: an expired token, a form that is not accepted, a wrong user or scheme', async (t) => {
  const config = { trustedProxies: ['127.0.0.1'], ...tokens({ methods: ['bearer'] }, { expires: '2020-01-01' }) };
  const { asks } = await startClocked(t, config);
  const ways = listed`
    bearer ${OTHER} | expired_token ;; basic | form_not_accepted ;; GET /@auth=${SECRET}/v1/about | form_not_accepted
    basic root:${SECRET} | wrong_user ;; Authorization: Digest x | unknown_scheme`;
  for (const [i, way] of ways.entries()) {
    const [request, reason] = way.split(' | ');
    const row = `${request} | X-Forwarded-For: 203.0.113.${i + 1}`;
    for (let count = 0; count < 30; count++) await asks(row, `→ 401 unauthorized | reason=${reason}`);
    await asks(row, `→ 429 too_many_failures | reason=${reason}`);
  }
});

// 500 requests without a credential were 500 log lines, on an SD card of a few gigabytes.
test('a flood without a valid token is 30 log lines a minute for each address, whatever the refusal; the rest is at debug level', async (t) => {
  const clients = ['127.0.0.1', '203.0.113.0/24', '2001:db8::/32'];
  const config = { trustedProxies: ['127.0.0.1'], clients, cors: ['https://a.example'] };
  const { both, clock, asks } = await startClocked(t, config);
  const rows = listed`
    GET /v1/about → 401 ;; POST /v1/accounts | {} → 401 ;; GET /v1/about/%2e%2e → 400
    'x' | Content-Encoding: gzip → 415
    OPTIONS /v2/send | Access-Control-Request-Method: POST | Origin: https://b.example → 401`;
  const flood = async (client: string, ...some: string[]): Promise<void> => {
    for (let i = 0; i < 40; i++) {
      const row = `${some[i % some.length]} | level=${i < 30 ? 'warn' : 'debug'}`;
      await asks(`X-Forwarded-For: ${client.replace('#', i.toString(16))}`, row);
    }
  };
  await Promise.all([
    ...rows.map((row, i) => flood(`203.0.113.${i + 1}`, row)),
    flood('198.51.100.1', 'GET /v1/about → 403 client_not_allowed'),
    flood('203.0.113.99', ...rows, 'Authorization: Digest x → 401', `bearer ${OTHER} → 401`),
    flood('2001:db8::#', rows[0]!), // one household is one IPv6 /64
  ]);
  for (let i = 0; i < 40; i++) {
    await ask(both.gateway, { path: '/healthz', headers: { 'x-forwarded-for': '203.0.113.50' } });
  }
  await asks('X-Forwarded-For: 203.0.113.50', '401 | level=warn'); // health checks do not count
  const headers = { 'origin': 'https://a.example', 'access-control-request-method': 'POST' };
  assert.equal((await ask(both.gateway, { path: '/v2/send', method: 'OPTIONS', headers })).status, 204);
  assert.equal(requests(both.gateway).at(-1)!.level, 'debug', 'for an allowed preflight');
  // Wrong credentials are counted separately, and a valid token's lines are logged as before.
  const first = 'X-Forwarded-For: 203.0.113.1';
  await asks(`${first} | bearer ${OTHER}`, ...Array<string>(30).fill('401'), '429');
  for (let i = 0; i < 40; i++) {
    const level = i < 30 ? 'warn' : 'debug';
    await asks(first, 'bearer → 200 | level=info', `bearer | GET /v1/accounts → 403 setup_blocked | level=${level}`);
  }
  clock.nowMs += 2000;
  await asks(first, '401 | level=warn', '401 | level=debug');
});

// With one limiter for rates and wrong credentials, unauthenticated clients could reset the rate of a token with 1/1h.
// With one for the lines of addresses and of internal errors, they could fill the log with the latter; with one for the
// lines of addresses and of tokens, with what a stolen token is refused.
test('10,100 addresses with wrong credentials reset neither the rate of a token, nor the limit on its log lines, nor that on internal errors', async (t) => {
  const { both: { gateway }, asks } = await startClocked(t, { trustedProxies: ['127.0.0.1'], rate: '1/1h' });
  await asks('bearer', '200', '429 rate_limited');
  const probe = (level: string): string => `GET /v1/accounts → 403 setup_blocked | level=${level}`;
  await asks('bearer', ...Array<string>(30).fill(probe('warn')), probe('debug'));
  const fail = (): boolean => gateway.server.emit('clientError'); // without its arguments
  for (let i = 0; i < 31; i++) fail();
  const lines = gateway.log.length;
  const clients = Array.from({ length: 20 }, () => open(t, gateway));
  for (let i = 0; i < 10_100; i += 100) {
    for (let j = i; j < i + 100; j++) {
      const from = `Host: x\r\nX-Forwarded-For: 2001:db8:${j.toString(16)}::1`;
      clients[j % 20]!.socket.write(ABOUT.replace(SECRET, 'wrong').replace('Host: x', from));
    }
    await until(() => gateway.log.length >= lines + i + 100);
  }
  await until(() => clients.every(({ text }) => text().split('HTTP/1.1 401 ').length === 1 + 10_100 / 20));
  assert.equal(new Set(requests(gateway).map(({ client }) => client)).size, 10_101);
  await asks('bearer', '429 rate_limited', probe('debug'));
  fail();
  assert.equal(linesOf(gateway, /^internal error$/).at(-1)!.level, 'debug');
});

// A token was locked out for as long as the clock had been set back.
test('RateLimiter: a bucket refills evenly up to its size; setting the clock back locks no client out, however often it tries', () => {
  const limiter = new RateLimiter();
  const rate = { count: 7, perMs: 1000 };
  for (let i = 0; i < 7; i++) assert.equal(limiter.take('a', rate, 0), 0);
  assert.equal(Math.round(limiter.take('a', rate, 0) * 1000), Math.round(1_000_000 / 7));
  assert.equal(limiter.take('b', rate, 0), 0);
  assert.equal(limiter.take('a', rate, 143), 0);
  assert.notEqual(limiter.take('a', rate, 143), 0);
  for (let i = 0; i < 7; i++) assert.equal(limiter.take('a', rate, 10_000), 0);
  assert.notEqual(limiter.take('a', rate, 10_000), 0);
  assert.ok(limiter.take('a', rate, -1e12) <= 1000, 'a clock set back locks no client out for longer than a bucket');
  assert.equal(limiter.take('a', rate, 143 - 1e12), 0, 'and the bucket refills from then on');
  limiter.take('b', rate, 20_000);
  for (let i = 0; i < 100; i++) assert.notEqual(limiter.take('b', { ...rate, count: 1 }, 19_000 + i), 0);
  assert.equal(limiter.take('b', { ...rate, count: 1 }, 20_000), 0, 'however often it is checked meanwhile');
});

section('METRICS'); // ─────────────────────────────────────────────────────────────────────────────
const SCRAPER: TokenConfig = { allow: ['metrics'] };
const METRICS = { path: '/metrics', headers: { authorization: `Bearer ${OTHER}` } };

/**
 * What the second token of a gateway scrapes: each series with its labels, without the common prefix, and its value.
 */
async function scrape(gateway: Address, request: Ask = METRICS): Promise<Record<string, number>> {
  const { status, text } = await ask(gateway, request);
  assert.equal(status, 200, text);
  const samples = text.split('\n').filter((line) => /^\w/.test(line)).map((line) => {
    const [, name, value] = /^(?:signal_gateway_)?(.*) (\S+)$/.exec(line)!;
    return [name!, Number(value)] as const;
  });
  assert.equal(new Set(samples.map(([name]) => name)).size, samples.length, 'each series occurs once');
  return Object.fromEntries(samples);
}

test('GET /metrics is valid Prometheus text without phone numbers, secrets or client paths, and is never relayed', async (t) => {
  const { backend, gateway } = await startBoth(t, { ...ALL_FORMS, ...tokens({}, SCRAPER) });
  await ask(gateway, { headers: BEARER, body: HELLO });
  for (const path of [`/v1/receive/${FROM}`, `/@auth=${SECRET}/v1/groups/${FROM}/${GROUP}`, '/no/such', '/metrics']) {
    await ask(gateway, { path });
  }
  const { text, headers } = await ask(gateway, METRICS);
  assert.equal(headers['content-type'], 'text/plain; version=0.0.4; charset=utf-8');
  assert.deepEqual([headers['cache-control'], headers['x-content-type-options']], ['no-store', 'nosniff']);
  // A help text with a number first would be taken for a value by a pattern without "^".
  const family = String
    .raw`# HELP (\w+) [A-Z].*\n# TYPE \1 (?:counter|gauge|histogram)\n(?:\1\w*(?:\{\w+="[^"\\\n]*"(?:,\w+="[^"\\\n]*")*\})? [\d.e+-]+\n|\n)+`;
  assert.match(text, new RegExp(`^(?:${family})+$`));
  for (const value of [SECRET, OTHER, FROM, TO, GROUP, 'no/such', '127.0.0.1']) assert.ok(!text.includes(value), value);
  assert.equal(backend.seen.length, 1);
  const { level, bytesOut, token, route } = requests(gateway).at(-1)!;
  const wanted = { level: 'debug', bytesOut: text.length, token: 'other', route: '/metrics' };
  assert.deepEqual({ level, bytesOut, token, route }, wanted);
});

test('the metrics count requests by token, route and status, and have the duration of sends and the time of the last one per token', async (t) => {
  const clock = { nowMs: 1_700_000_000_500 };
  const statuses = [201, 201, 400];
  const backend = await startBackend(t, (req, res) => {
    req.resume().on('end', () => res.writeHead(req.url === '/v1/about' ? 200 : statuses.shift()!).end());
  });
  const gateway = await startGateway(t, backend, tokens({}, SCRAPER), { now: () => clock.nowMs });
  await ask(gateway, { headers: BEARER, body: HELLO });
  clock.nowMs += 60_000;
  await ask(gateway, { headers: BEARER, body: HELLO });
  clock.nowMs += 60_000;
  await ask(gateway, { headers: BEARER, body: HELLO }); // 400
  await ask(gateway, { headers: BEARER });
  for (const path of ['/no/such', '/an/other', '/metrics', '/healthz', '/..']) await ask(gateway, { path });
  for (const path of ['/v1/accounts', `/v1/groups/${FROM}`]) await ask(gateway, { path, headers: BEARER });
  await ask(gateway, { headers: BEARER, path: '/v2/send', method: 'DELETE' });
  clock.nowMs += 60_000;
  const first = await scrape(gateway);
  const counted = Object.entries(first).filter(([name]) => name.startsWith('requests_total'));
  assert.deepEqual(Object.fromEntries(counted), {
    'requests_total{token="test",route="POST /v2/send",status="201"}': 2,
    'requests_total{token="test",route="POST /v2/send",status="400"}': 1,
    'requests_total{token="test",route="GET /v1/about",status="200"}': 1,
    'requests_total{token="",route="other",status="401"}': 2,
    'requests_total{token="",route="GET /metrics",status="401"}': 1,
    'requests_total{token="",route="GET /healthz",status="200"}': 1,
    'requests_total{token="",route="other",status="400"}': 1,
    'requests_total{token="test",route="GET /v1/accounts",status="403"}': 1,
    'requests_total{token="test",route="GET /v1/groups/:number",status="403"}': 1,
    'requests_total{token="test",route="other",status="405"}': 1,
  });
  assert.equal(first['last_sent_timestamp_seconds{token="test"}'], 1_700_000_060.5, 'by the clock, and of a 2xx');
  assert.equal(first.process_start_time_seconds, 1_700_000_000.5);
  assert.equal(first[`info{version="${PACKAGE.version}"}`], 1);
  // Each bucket includes those before it.
  const buckets = Object.entries(first).filter(([name]) => name.startsWith('send_seconds_bucket'));
  const limits = buckets.map(([name]) => /le="(.*)"/.exec(name)![1]);
  assert.deepEqual(limits, '0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 150 +Inf'.split(' '));
  for (const [i, [, value]] of buckets.entries()) assert.ok(value >= (buckets[i - 1]?.[1] ?? 0), `${buckets}`);
  assert.deepEqual([buckets.at(-1)![1], first.send_seconds_count], [3, 3]);
  assert.ok(first.send_seconds_sum! > 0, 'the sum of the times');
  // A reload keeps all counts, and the scrape itself has been counted.
  gateway.reload(tokens({}, SCRAPER));
  const second = await scrape(gateway);
  assert.equal(second['requests_total{token="other",route="GET /metrics",status="200"}'], 1);
  assert.equal(second['requests_total{token="test",route="POST /v2/send",status="201"}'], 2);
  assert.equal(second.send_seconds_count, 3);
});

table('only the word metrics and the pattern GET /metrics open GET /metrics, whatever else a token has', {})`
  * bearer | GET /metrics → 403 endpoint_not_allowed | "the word \"metrics\" in its \"allow\" opens it"
  @ {"allow":["send","info","receive","messaging","setup"]} | GET /metrics
  @ {"allow":["* /*","GET /*","GET /:a","* /metrics","* /:metrics","GET /metrics/*"]} | GET /metrics
  * bearer | @ {"allow":["metrics"]} → 403 endpoint_not_allowed
  GET /v1/about ;; {"message":"x"}
  * bearer | @ {"allow":["metrics","* /*"]} → 405 method_not_allowed | Allow: GET
  HEAD /metrics ;; OPTIONS /metrics`;

test('GET /metrics passes the checks of any request: forms, expiry, clients, rate; senders and recipients do not matter', async (t) => {
  const rows: [TokenConfig, Ask, number][] = [
    [{}, {}, 200],
    [{ allow: ['GET /metrics'] }, {}, 200],
    [{ senders: [FROM], recipients: [TO] }, {}, 200],
    [{ allow: ['GET /metrics'], senders: [FROM] }, {}, 200],
    [{}, { headers: { authorization: basic(`api:${OTHER}`) } }, 200],
    [{}, { headers: {}, path: `/@auth=${OTHER}/metrics` }, 200],
    [{}, { headers: {}, path: '/metrics' }, 401],
    [{ expires: '2020-01-01' }, {}, 401],
    [{ clients: ['192.0.2.0/24'] }, {}, 403],
    [{}, { headers: { 'authorization': basic(`api:${OTHER}`), 'sec-fetch-site': 'cross-site' } }, 403],
  ];
  for (const [settings, request, status] of rows) {
    const both = await startBoth(t, { ...ALL_FORMS, rate: '1/1h', ...tokens({}, { ...SCRAPER, ...settings }) });
    const { gateway, backend } = both;
    assert.equal((await ask(gateway, { ...METRICS, ...request })).status, status, JSON.stringify([settings, request]));
    if (status === 200) assertDenied(await ask(gateway, { ...METRICS, ...request }), 429, 'rate_limited', both);
    assert.deepEqual([backend.seen.length, backend.connections], [0, 0], 'what the backend saw');
  }
  // A top-level allow applies to each token without its own.
  const { gateway } = await startBoth(t, { allow: ['send', 'metrics'], ...tokens({}, { allow: ['send'] }) });
  assert.equal((await ask(gateway, { ...METRICS, headers: BEARER })).status, 200);
  assert.equal((await ask(gateway, METRICS)).status, 403);
});

test('without tokens, GET /metrics is open only if allow has the word, and never to a page of another site', async (t) => {
  const { gateway } = await startBoth(t, { ...NO_TOKENS, allow: ['metrics', 'info'] });
  await ask(gateway);
  const values = await scrape(gateway, { path: '/metrics' });
  assert.equal(values['requests_total{token="anonymous",route="GET /v1/about",status="200"}'], 1);
  const crossSite = { 'sec-fetch-site': 'cross-site' };
  assert.equal((await ask(gateway, { path: '/metrics', headers: crossSite })).json.code, 'cross_site');
  const { gateway: other } = await startBoth(t, NO_TOKENS);
  assert.equal((await ask(other, { path: '/metrics' })).status, 403);
});

test('the metrics have the requests that wait for a slot and for the backend, lent slots, and whether the backend is up', async (t) => {
  const own = { ...tokens({}, SCRAPER), limits: { connections: 50 } };
  const { backend, gateway } = await startHeld(t, 1, own, { slotTimeoutMs: 20 });
  gateway.reload({ ...own, backend: { url: backend.url, parallel: 1, wait: '30s' } });
  /** Scrapes until a series has a value. */
  const becomes = async (series: string, value: number): Promise<Record<string, number>> => {
    for (let values = await scrape(gateway);; values = await scrape(gateway)) {
      if (values[series] === value) return values;
    }
  };
  const [slot, atGate] = ['requests_waiting{for="slot"}', 'requests_waiting{for="backend"}'];
  const idle = { [slot]: 0, [atGate]: 0, slots_lent: 0, backend_up: 1, connections: 1 };
  const known = Object.keys(idle);
  const some = (values: Record<string, number>) => Object.fromEntries(known.map((name) => [name, values[name]]));
  assert.deepEqual(some(await scrape(gateway)), idle);
  const sends = sendMany(gateway, 2);
  await becomes(slot, 1);
  assert.deepEqual(some(await becomes('slots_lent', 1)), { ...idle, [slot]: 1, slots_lent: 1, connections: 3 });
  await answerAll(backend, sends);
  assert.deepEqual(some(await becomes('connections', 1)), idle);
  // After a reload to another backend, requests that wait for the old one are counted, and the new one is up.
  backend.server.close().closeAllConnections();
  const late = [send(gateway, 'late'), ask(gateway, { headers: BEARER })];
  await becomes(atGate, 2);
  assert.deepEqual(some(await scrape(gateway)), { ...idle, [atGate]: 2, backend_up: 0, connections: 3 });
  const next = await startBackend(t);
  gateway.reload({ ...own, backend: { url: next.url } });
  assert.deepEqual(some(await scrape(gateway)), { ...idle, [atGate]: 2, connections: 3 });
  backend.server.listen(backend.port, backend.host);
  await until(() => backend.acting === 2);
  backend.answer();
  backend.answer();
  for (const answer of late) assert.equal((await answer).status, 201);
});

test('a WebSocket that waits for its handshake needs no slot, so the metrics do not count it as waiting for one', async (t) => {
  const { backend, gateway } = await startReceiving(t, () => {}, tokens({ allow: ['receive'] }, SCRAPER));
  wish(t, gateway);
  await until(() => backend.seen.length === 1);
  assert.equal((await scrape(gateway))['requests_waiting{for="slot"}'], 0);
});

test('a send is counted by the response of the backend, whether its client is still connected or not', async (t) => {
  const { backend, gateway } = await startHeld(t, 4, tokens({}, SCRAPER));
  const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
  const { socket } = open(t, gateway, SEND);
  const [served] = await accepted;
  await until(() => backend.acting === 1);
  socket.destroy();
  await closed(served);
  backend.answer();
  await until(() => requests(gateway).some(({ reason }) => reason === 'answered_201'));
  const values = await scrape(gateway);
  assert.equal(values['requests_total{token="test",route="POST /v2/send",status="499"}'], 1);
  assert.equal(values.send_seconds_count, 1);
  assert.ok(values['last_sent_timestamp_seconds{token="test"}']! > 1e9, 'the backend took the message');
});

test('the metrics count each internal error, during a request and before it', async (t) => {
  const now = { read: Date.now };
  const { gateway } = await startBoth(t, tokens({}, SCRAPER), { now: () => now.read() });
  const fail = (): never => {
    now.read = Date.now;
    throw new RangeError('planted');
  };
  const faults = [() => (now.read = fail), () => gateway.server.prependOnceListener('request', fail)];
  for (const [count, plant] of faults.entries()) {
    plant();
    await ask(gateway, { headers: BEARER }).catch(() => {});
    assert.equal((await scrape(gateway)).internal_errors_total, count + 1);
    assert.equal(linesOf(gateway, /^internal error$/).length, count + 1);
  }
});

test('docs/operating.md has every series with its type and labels, and its alerts use no other names', async (t) => {
  const { gateway } = await startBoth(t, tokens({}, SCRAPER));
  await ask(gateway, { headers: BEARER, body: HELLO });
  const { text } = await ask(gateway, METRICS);
  const series = Array.from(
    text.matchAll(/^# TYPE (\w+) (\w+)\n.*?(?:\{(.*)\})? \S+$/gm),
    ([, name, type, labels = '']) => {
      return `${name}{${type === 'histogram' ? '' : groupsOf(labels, /(\w+)=/g)}} ${type}`;
    },
  );
  const page = PAGES['docs/operating.md']!;
  const cells = /^\| `(\w+)`<br>(counter|gauge|histogram)(?: by ([`\w, ]+))? \|/gm;
  const rows = Array.from(page.matchAll(cells), ([, name, type, labels = '']) => {
    const whole = name!.startsWith('process_') ? name! : `signal_gateway_${name}`;
    return { name: whole, as: `${whole}{${labels.replace(/[` ]/g, '')}} ${type}` };
  });
  assert.deepEqual(rows.map((row) => row.as), series);
  const [, alerts = ''] = /\n- name: signal-gateway\n([^]*?)\n```\n/.exec(page.replace(/^ {2}(?=- name)/gm, '')) ?? [];
  const used = groupsOf(alerts, /((?:signal_gateway|process)_\w+)/g);
  assert.equal(groupsOf(alerts, /- alert: (\w+)/g).length, 4);
  assert.deepEqual(used.filter((name) => !rows.some((row) => row.name === name)), []);
});

/** A query, to be compared with another: without the job, and without what it is compared with. */
const plainQuery = (query: string): string =>
  query.replace(/job="[^"]*",?/g, '').replace(/\{\}/g, '').replace(/ (?:==|>) \d+/g, '')
    .replace(/\s+/g, ' ').replaceAll('( ', '(').trim();

/** The series that a query selects, with their labels and times. */
const selectorsOf = (query: string): string[] =>
  groupsOf(
    plainQuery(query),
    /((?<!\w)(?:signal_gateway_\w+|process_\w+|up)(?:\{[^}]*\})?(?:\[\w+\])?(?: offset \w+)?)/g,
  );

test('docs/grafana.json has every series and no other, with advice at each panel, and queries the same as the alerts', async (t) => {
  interface Panel {
    type: string;
    title: string;
    description: string;
    targets?: { expr: string }[];
    fieldConfig: { defaults: { unit?: string; thresholds: { steps: { value: number | null }[] } } };
  }
  const source = read('docs/grafana.json');
  const { panels, templating }: { panels: Panel[]; templating: { list: { name: string; type: string }[] } } = JSON
    .parse(source);
  assert.deepEqual(templating.list.map(({ name, type }) => `${name} ${type}`), ['datasource datasource', 'job query']);
  const rows = panels.filter(({ type }) => type === 'row').map(({ title }) => title);
  assert.deepEqual(rows, ['Does it send?', 'The backend', 'Who is refused', 'The gateway']);
  const charts = panels.filter(({ type }) => type !== 'row');
  for (const { title, description, targets, fieldConfig } of charts) {
    assert.match(description, /^[^\n]{20,160}\.$/, title);
    assert.ok(targets?.length && fieldConfig.defaults.unit, title);
  }
  assert.doesNotMatch(source, /fixedColor|"fixed"/, 'no colour that carries a meaning by itself');

  const queries = charts.flatMap(({ targets }) => targets!.map(({ expr }) => expr));
  const used = groupsOf(queries.join('\n'), /((?<!\w)(?:signal_gateway_\w+|process_\w+|up(?=\{)))/g);
  const ofJob = groupsOf(queries.join('\n'), /(\w+)\{job="\$job"/g);
  assert.deepEqual(used, ofJob, 'each of the selected job');
  const { gateway } = await startBoth(t, tokens({}, SCRAPER));
  const { text } = await ask(gateway, METRICS);
  const series = groupsOf(text, /^# TYPE (\w+) /gm);
  assert.deepEqual([...new Set(used.map((name) => name.replace(/_bucket$/, '')))].sort(), [...series, 'up'].sort());

  const [rules = ''] = blocks('yaml', PAGES['docs/operating.md']).filter((block) => block.includes('- alert:'));
  const alerts = groupsOf(rules, /\n +expr: \|?([^]*?)\n +(?:for|annotations):/g);
  assert.equal(alerts.length, 4);
  const shown = queries.flatMap(selectorsOf);
  for (const alert of alerts) {
    assert.deepEqual(selectorsOf(alert).filter((selector) => !shown.includes(selector)), [], alert);
    const same = charts.filter(({ targets }) =>
      targets!.some(({ expr }) => plainQuery(alert).includes(plainQuery(expr)))
    );
    assert.ok(same.length > 0, alert);
    const limit = Number(/ > (\d+)\s*$/.exec(alert)?.[1] ?? 0);
    const limits = same.flatMap(({ fieldConfig }) => fieldConfig.defaults.thresholds.steps.map(({ value }) => value));
    assert.ok(limit === 0 || limits.includes(limit), alert);
  }
});

test('beyond 10,000 series, further ones are counted for all tokens together', () => {
  const metrics = new Metrics();
  type Counted = Parameters<typeof metrics.countRequest>[0];
  const count = (name: string, status = 200): void =>
    metrics.countRequest({ req: { method: 'GET' }, route: '/healthz', token: { name }, status } as unknown as Counted);
  for (let i = 0; i < 10_005; i++) count(`t${i}`);
  for (const name of ['t0', 't9999', 't10000', 'new']) count(name);
  count('new', 401);
  const core = { startedMs: 0, connections: new Map(), running: [], upstream: { gate: {} } };
  const lines = metrics.render(core as unknown as Parameters<typeof metrics.render>[0]).split('\n');
  const series = lines.filter((line) => line.startsWith('signal_gateway_requests_total{'));
  const valueOf = (token: string, status = 200): string | undefined => {
    const name = `signal_gateway_requests_total{token="${token}",route="GET /healthz",status="${status}"} `;
    return series.find((line) => line.startsWith(name))?.slice(name.length);
  };
  assert.equal(series.length, 10_002, 'and one for each route and status of the others');
  const values = ['t0', 't9999', 't10000', 'new', '_other'].map((token) => valueOf(token));
  assert.deepEqual([...values, valueOf('_other', 401)], ['2', '2', undefined, undefined, '7', '1']);
});

section('SILENCES'); // ────────────────────────────────────────────────────────────────────────────
/** The timers of a duration that only one test uses, or slightly less. They run when the test fires them. */
const HELD_TIMERS: (() => void)[][] = [];
const [HELD_FROM_MS, HELD_STEP_MS] = [20_000_000, 1_000_000];
function holdTimers(): { ms: number; due: (() => void)[] } {
  if (HELD_TIMERS.length === 0) {
    const { setTimeout } = globalThis;
    const holding = (run: (...args: unknown[]) => void, ms = 0, ...args: unknown[]): unknown => {
      HELD_TIMERS[Math.ceil((ms - HELD_FROM_MS) / HELD_STEP_MS)]?.push(() => run(...args));
      return setTimeout(run, ms, ...args);
    };
    // What node:util's promisify finds on it is kept.
    globalThis.setTimeout = Object.assign(holding, setTimeout) as unknown as typeof setTimeout;
  }
  const due: (() => void)[] = [];
  return { ms: HELD_FROM_MS + HELD_STEP_MS * (HELD_TIMERS.push(due) - 1), due };
}

const [SILENT, AGAIN] = ['the backend has not answered for 30 s', 'the backend answers again'];

/** A backend that answers `info` at once and the rest on demand; the log lines about its silence; and its clock. */
async function startSilent(t: TestContext, parallel: number, config: GatewayConfig = {}) {
  const { ms, due } = holdTimers();
  const held: http.ServerResponse[] = [];
  const backend = await startBackend(t, (req, res) => {
    req.resume().on(
      'end',
      () => req.url!.startsWith('/v1/about') && req.headers.accept !== 'hang' ? res.end('{}') : held.push(res),
    );
  });
  const own = { allow: ['send', 'info', 'receive', 'messaging'], ...slots(backend, parallel), ...config };
  const gateway = await startGateway(t, backend, own, { slotTimeoutMs: ms });
  const lines = () =>
    linesOf(gateway, /has not answered|answers again/).map(({ level, message, waiting }) =>
      `${level} ${message} ${waiting}`
    );
  const arrive = async (count: number, request: Ask): Promise<Promise<Answer>[]> => {
    const before = held.length;
    const answers = Array.from({ length: count }, () => ask(gateway, { headers: BEARER, ...request }));
    for (const answer of answers) answer.catch(() => {}); // its client may disconnect
    await until(() => held.length === before + count);
    return answers;
  };
  return { backend, gateway, held, due, lines, arrive };
}
const A_SEND: Ask = { body: HELLO };

test('a backend that hangs is logged once after 30 s, whatever clients do, and once when it answers again; health checks do not count', async (t) => {
  const { gateway, held, due, lines, arrive } = await startSilent(t, 4);
  const sends = await arrive(3, A_SEND);
  const info = async (): Promise<void> => assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
  await info();
  assert.deepEqual([due.length, lines()], [4, []], 'one timer for each slot, and that of the health check');
  due[0]!();
  assert.deepEqual(lines(), [`warn ${SILENT} 3`]);
  for (const run of due.slice(1, 3)) run();
  await info();
  for (const answer of await arrive(2, A_SEND)) sends.push(answer);
  for (const run of due.splice(0)) run();
  assert.equal(lines().length, 1, 'one line for the outage');
  held.shift()!.end();
  await until(() => lines().length === 2);
  assert.equal(lines()[1], `warn ${AGAIN} 4`);
  for (const res of held.splice(0)) res.end();
  for (const answer of sends) assert.equal((await answer).status, 200);
  assert.equal(lines().length, 2);
});

// Each slow request among fast ones used to log a pair of lines.
test('a slow request is not a silence while others are answered; it is checked again 30 s after the last answer', async (t) => {
  const { held, due, lines, arrive } = await startSilent(t, 4);
  const [slow, fast] = [await arrive(1, A_SEND), await arrive(1, A_SEND)].flat();
  held.pop()!.end();
  await fast;
  const [first] = due.splice(0);
  first!();
  assert.deepEqual([lines(), due.length], [[], 1], 'the backend has answered meanwhile');
  held.pop()!.end();
  assert.equal((await slow!).status, 200);
  due[0]!();
  assert.deepEqual([lines(), due.length], [[], 1], 'and the slow one too');
});

test('a backend that hangs is logged if clients disconnect early, without slots and for a health check; a poll may wait for the timeout that its client sets', async (t) => {
  // The client has disconnected, and its slot is never lent.
  const { backend, gateway, due, lines, held } = await startSilent(t, 1);
  const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
  const { socket } = open(t, gateway, SEND);
  const [served] = await accepted;
  await until(() => held.length === 1);
  socket.destroy();
  await closed(served);
  due[0]!();
  assert.deepEqual(lines(), [`warn ${SILENT} 1`]);
  await until(() => requests(gateway).some(({ status }) => status === 499));
  assert.equal(backend.seen.length, 1);

  // No slots; each of these ends the silence.
  const headers = { ...BEARER, accept: 'hang' };
  const rows: [parallel: number, request: Ask][] = [[0, A_SEND], [4, { headers }]];
  for (const [parallel, request] of rows) {
    const { due, lines, held, arrive } = await startSilent(t, parallel);
    const [answer] = await arrive(1, request);
    due.at(-1)!();
    assert.deepEqual(lines(), [`warn ${SILENT} 1`], JSON.stringify(request));
    held[0]!.end();
    assert.equal((await answer!).status, 200);
    assert.deepEqual(lines(), [`warn ${SILENT} 1`, `warn ${AGAIN} 0`]);
  }
  const polled = await startSilent(t, 4);
  const [poll] = await polled.arrive(1, { path: RECEIVE });
  assert.deepEqual(polled.due, []);
  polled.held[0]!.end();
  await poll;
});

test('a silence of health checks alone ends with any answer; one that includes sends ends only with the answer to a send', async (t) => {
  for (const isInfoFirst of [true, false]) {
    const { held, due, lines, arrive, gateway } = await startSilent(t, 4);
    const headers = { ...BEARER, accept: 'hang' };
    const answers = [...await arrive(1, { headers }), ...await arrive(1, A_SEND)];
    for (const run of isInfoFirst ? due : due.reverse()) run();
    assert.deepEqual(lines(), [`warn ${SILENT} 2`], 'one line for both');
    held.shift()!.end();
    await answers[0];
    await ask(gateway, { headers: BEARER });
    assert.equal(lines().length, 1, 'sends still hang');
    held.shift()!.end();
    await answers[1];
    assert.deepEqual(lines(), [`warn ${SILENT} 2`, `warn ${AGAIN} 0`]);
  }
});

/** A backend that starts after the gateway, as at each boot. */
test('the start-up warning is followed by an all-clear when the backend comes up; until then backend_up is 0', async (t) => {
  const asked: string[] = [];
  const late = http.createServer((req, res) => {
    asked.push(req.url!);
    if (asked.length < 3) return void req.socket.destroy();
    answerAsBackend({ sent: [] } as unknown as Backend, seenOf(req, Buffer.alloc(0), true), res);
  });
  const url = await serve(t, late);
  const gateway = await startProcess(t, { backend: { url }, env: { ALLOW: 'metrics,info' } });
  const up = async () => (await scrape(gateway, { path: '/metrics', headers: BEARER })).backend_up;
  await until(() => linesOf(gateway, /^the backend /).length === 1);
  assert.equal(await up(), 0);
  await until(() => linesOf(gateway, /^the backend /).length === 2);
  assert.deepEqual(linesOf(gateway, /^the backend /).map(({ level, message, version }) => [level, message, version]), [
    ['warn', 'the backend did not answer as expected', undefined],
    ['info', 'the backend answers', '0.100'],
  ]);
  assert.deepEqual([await up(), asked], [1, Array(3).fill('/v1/about')]);
  await gateway.close();
});

test('the start-up query ends when a request is answered, on a reload to another backend, and with the gateway', async (t) => {
  let asked = 0;
  let held: net.Socket | undefined;
  const { url } = await startBackend(t, (_, res) => void res.end('{}'));
  const front = http.createServer((req, res) => {
    if (!req.headers['user-agent']?.startsWith('signal-gateway/')) {
      return void req.resume().on('end', () => res.end('[]'));
    }
    asked++;
    if (asked === 2) held = req.socket;
    else req.socket.destroy();
  });
  const mute = await serve(t, front);
  const configOf = (to: string) => ({
    tokens: { a: { secret: SECRET, allow: ['send', 'metrics'] } },
    backend: { url: to },
  });
  const file = fileWith(t, configOf(mute));
  const gateway = await startProcess(t, { args: ['--config', file] });
  const said = () => linesOf(gateway, /^the backend /).map(({ message, backend }) => `${message} ${backend}`);
  const up = async () => (await scrape(gateway, { path: '/metrics', headers: BEARER })).backend_up;
  const reload = async (to: string): Promise<void> => {
    const count = linesOf(gateway, /^reloaded$/).length;
    writeFileSync(file, JSON.stringify(configOf(to)));
    process.kill(gateway.child.pid!, 'SIGHUP');
    await until(() => linesOf(gateway, /^reloaded$/).length > count);
  };
  await until(() => said().length === 1);
  await until(() => held !== undefined);
  assert.equal(await up(), 0);
  assert.equal((await ask(gateway, { body: HELLO, headers: BEARER })).status, 200);
  assert.equal(await up(), 1);
  held!.destroy(); // that this query is no longer answered is not logged
  await until(() => said().length === 2);
  assert.deepEqual(said(), [`the backend did not answer as expected ${mute}`, `the backend answers ${mute}`]);
  assert.equal(asked, 2);
  // A reload to another backend starts again.
  const other = await sparePort();
  await reload(`http://127.0.0.1:${other}`);
  await until(() => said().length === 3);
  assert.equal(await up(), 0);
  await reload(url);
  await until(() => said().length === 4);
  assert.deepEqual([await up(), said()[3]], [1, `the backend answers ${url}`]);
  // The old one is no longer queried, while the new one is queried again after 1 s and after 2 s.
  await reload(mute);
  await until(() => said().length === 5);
  const second = { asked: 0 };
  const refusing = http.createServer((req) => {
    second.asked++;
    req.socket.destroy();
  });
  const mute2 = await serve(t, refusing);
  await reload(mute2);
  const before = asked;
  await until(() => second.asked >= 3);
  assert.equal(asked, before);
  await gateway.close(); // with a query still due
  assert.equal(said().length, 6);
});

const DAY_MS = 86_400_000;
test('a certificate of the gateway that has expired, is not valid yet or expires within 14 days is a warning at start, on reload, in --check and once a day', async (t) => {
  const [beginMs, endMs] = [Date.parse('2026-11-21T03:10:21Z'), Date.parse('2126-10-28T03:10:21Z')];
  const tls = certificate(t);
  const backend = await startBackend(t);
  const days: (() => void)[] = [];
  const course = COURSE.getStore(); // other tests start gateways at the same time
  const { setInterval } = globalThis;
  const noting = (run: (...args: unknown[]) => void, everyMs: number, ...args: unknown[]): unknown => {
    if (everyMs === DAY_MS && COURSE.getStore() === course) days.push(() => run(...args));
    return setInterval(run, everyMs, ...args);
  };
  const clock = { nowMs: endMs - 14 * DAY_MS };
  globalThis.setInterval = noting as typeof setInterval;
  const gateway = await startGateway(t, backend, { tls }, { now: () => clock.nowMs })
    .finally(() => (globalThis.setInterval = setInterval));
  const nextDay = (): unknown => days.forEach((run) => run());
  const warnings = () => linesOf(gateway, /certificate/).map(({ level, message }) => `${level} ${message}`);
  nextDay();
  assert.deepEqual([linesOf(gateway, /^listening$/)[0]!.warning, warnings()], [undefined, []]);
  const rows: [nowMs: number, state: string][] = [
    [endMs - 14 * DAY_MS + 1, 'expires soon, or is not valid yet'],
    [endMs, 'expires soon, or is not valid yet'],
    [endMs + 1, 'has expired'],
    [beginMs - 1, 'expires soon, or is not valid yet'],
  ];
  const config = fileWith(t, { tokens: { a: { secret: SECRET } }, tls });
  for (const [nowMs, state] of rows) {
    const dates = 'Nov 21 03:10:21 2026 GMT to Oct 28 03:10:21 2126 GMT';
    const warning = `the certificate in tls.cert ${state}: ${dates}`;
    clock.nowMs = nowMs;
    const before = warnings().length;
    for (let i = 0; i < 2; i++) nextDay();
    assert.deepEqual(warnings().slice(before), [`warn ${warning}`, `warn ${warning}`]);
    gateway.reload({ tls });
    assert.equal(linesOf(gateway, /^reloaded$/).at(-1)!.warning, warning);
    // `--check` reads the machine's clock, in the turn in which it is called.
    const { now } = Date;
    Date.now = () => nowMs;
    const checking = cli(['--check', '--config', config]);
    Date.now = now;
    const { stdout } = await checking;
    assert.ok(stdout.replace(/\s+/g, ' ').includes(`warning: ${warning}`), stdout);
  }
  clock.nowMs = beginMs;
  const before = warnings().length;
  nextDay();
  assert.equal(warnings().length, before);
});

test('an error thrown while connecting is backend_unreachable with its own name and advice, and does not shut the gate', async (t) => {
  const server = https.createServer(
    CERTS[0],
    (req, res) => void req.resume().on('end', () => res.writeHead(201).end('[]')),
  );
  const url = (await serve(t, server)).replace('http', 'https');
  const { port } = addressOf(url);
  const gateway = await startGateway(t, { url }, { backend: { url, wait: '1h' } });
  class NotCapable extends Error {
    override name = 'NotCapable';
  }
  const { request } = https;
  const throwing = (options: https.RequestOptions, ...rest: []): http.ClientRequest => {
    if (Number(options.port) === port) throw new NotCapable('Requires sys access, run again with the --allow-sys flag');
    return request(options, ...rest);
  };
  https.request = throwing as typeof request;
  t.after(() => (https.request = request));
  for (let i = 0; i < 2; i++) {
    const answer = await send(gateway, 'hello');
    assert.equal(outcomeOf(answer), '502 backend_unreachable');
    assert.match(answer.json.error, /nothing was sent/);
    assert.doesNotMatch(answer.text, /sys access/);
  }
  const { reason, hint } = requests(gateway)[0];
  assert.deepEqual([reason, hint], ['NotCapable', 'Requires sys access, run again with the --allow-sys flag']);
  assert.deepEqual(linesOf(gateway, /is unreachable/), []);
  https.request = request;
});

test(
  'Deno without --allow-sys and with a custom CA: the response states that nothing was sent, and the log has the remedy',
  {
    skip: !('Deno' in globalThis) && 'only Deno has permissions',
  },
  async (t) => {
    const server = https.createServer(CERTS[0], (_, res) => void res.end('{}'));
    const url = (await serve(t, server)).replace('http', 'https');
    const ca = fileWith(t, CERTS[0].cert, 'ca.pem');
    const allowed = ['--allow-net', '--allow-env', '--allow-read', '--allow-write'];
    const program: Program = [process.execPath, 'run', '--no-prompt', '--no-check', ...allowed, fileURLToPath(FILE)];
    const gateway = await startProcess(t, { backend: { url }, env: { NODE_EXTRA_CA_CERTS: ca }, program });
    const answer = await ask(gateway, { body: HELLO, headers: BEARER });
    assert.equal(outcomeOf(answer), '502 backend_unreachable');
    await until(() => requests(gateway).length === 1);
    const { reason, hint } = requests(gateway)[0];
    assert.equal(reason, 'NotCapable');
    assert.match(String(hint), /--allow-sys/);
    await gateway.close();
  },
);

test('a silent connection to the backend is probed by TCP keep-alive after 30 s, and not every second', {
  skip: ('Deno' in globalThis || !existsSync('/proc/net/tcp')) &&
    'only Linux shows the timers of TCP; Deno keeps no connection',
}, async (t) => {
  const { backend, gateway, finish } = await startHolding(t);
  const answer = ask(gateway, { body: HELLO, headers: BEARER });
  await until(() => backend.seen.length === 1);
  const to = `:${backend.port.toString(16).toUpperCase().padStart(4, '0')}`;
  // The columns are number, local and remote address, state, queues, timer (02 is keep-alive) and its due time.
  const due = (): number[] =>
    readFileSync('/proc/net/tcp', 'utf8').split('\n').map((line) => line.trim().split(/\s+/))
      .filter(([, , remote = '', state]) => remote.endsWith(to) && state === '01')
      .flatMap(([, , , , , timer = '']) => timer.startsWith('02:') ? [parseInt(timer.slice(3), 16) / 100] : []);
  await until(() => due().length > 0, 'a keep-alive timer of the connection to the backend');
  const [seconds = 0] = due();
  assert.ok(seconds > 2 && seconds <= 30, `TCP probes in ${seconds} s`);
  finish();
  assert.equal((await answer).status, 200);
});

test("a token's refusals are 30 log lines a minute for each code, then at debug level, with one warning a minute about it", async (t) => {
  const { both: { gateway, backend }, clock, asks } = await startClocked(t, tokens({}, {}));
  const warned = () => linesOf(gateway, /^further refusals of a token are logged at debug level$/);
  const rows = ['GET /v1/accounts → 403 setup_blocked', 'GET /none → 404 unknown_endpoint', "'x=' → 400 bad_json"];
  for (const row of rows) {
    for (let i = 0; i < 33; i++) await asks(`bearer`, `${row} | level=${i < 30 ? 'warn' : 'debug'}`);
  }
  assert.deepEqual(warned().map(({ level, token, code }) => [level, token, code]), [['warn', 'test', 'setup_blocked']]);
  // Neither another token's refusals nor the backend's responses.
  await asks(`bearer ${OTHER}`, `${rows[0]} | level=warn`, 'GET /v1/about → 200 | level=info');
  clock.nowMs += 60_000;
  for (let i = 0; i < 31; i++) await asks('bearer', `${rows[0]} | level=${i < 30 ? 'warn' : 'debug'}`);
  assert.equal(warned().length, 2);
  assert.ok(backend.seen.length === 1, 'the health check of the other token');
});

test("the backend's own 400 and 429 are logged at their usual level, however many there are", async (t) => {
  const backend = await startBackend(t, (req, res) => void req.resume().on('end', () => res.writeHead(429).end()));
  const gateway = await startGateway(t, backend);
  for (let i = 0; i < 35; i++) await ask(gateway, { headers: BEARER });
  assert.deepEqual(new Set(requests(gateway).map(({ level }) => level)), new Set(['warn']));
  assert.equal(requests(gateway).length, 35);
});

section('REQUEST BODY'); // ────────────────────────────────────────────────────────────────────────
const NO_OBJECT = literal`
  '' ;; ' ' ;; [] ;; "text" ;; '1' ;; 'auth=x' ;; '\ufeff{}' ;; '\u000b{}'`;
table('a body that is not a JSON object is 400, and so is a broken object without a token', {})`
  * bearer → 400 bad_json
  * bearer | Content-Type: text/plain → 400 bad_json
  * bearer | Content-Type: application/x-www-form-urlencoded → 400 bad_json
  * bearer | Content-Type: multipart/form-data; boundary=x → 400 bad_json
  'x=1&recipients=${STRANGER}' ;; '\ufeff${HELLO}' ;; ${HELLO}${HELLO.replace(TO, STRANGER)} ;; '${HELLO}\n\u0000'
  * bearer → 400 bad_json
  # Without a body a send is broken too, but is told so in other words.
  ${NO_OBJECT.replace("''", '')}
  POST /v2/send → "The body must be a JSON object, with Content-Length or chunked."
  * bearer → 400 bad_json
  * none → 400 bad_json
  # One document for each kind of mistake: BODY SCAN has the others, cut at every byte.
  { ;; '\n\t {"a' ;; {"a":1,} ;; {"number":nul} ;; '{"a":"\n"}' ;; {} x ;; '{"a":"\xff"}'
  {"a":${'['.repeat(64)}${']'.repeat(64)}} ;; {"x":${'{"a":'.repeat(64)}1${'}'.repeat(64)}}`;
const inUtf16 = (text: string): string => Array.from(text, (char) => `${char}\\x00`).join('');
table('the error for UTF-16, a byte order mark or a number without quotes has the correct spelling', {})`
  * bearer → 400 bad_json | "object: save it as UTF-8, without a byte order mark, at byte 0."
  '\xef\xbb\xbf{}' ;; '\xff\xfe${inUtf16(HELLO)}' ;; '\xfe\xff\x00${inUtf16(HELLO).slice(0, -4)}' ;; '\x00${
  inUtf16(HELLO).slice(0, -4)
}'
  * bearer → 400 bad_json | "object: save it as UTF-8, without a byte order mark, at byte 1."
  '${inUtf16(HELLO)}'
  * bearer → 400 bad_json | "object: no value begins with \"+\"; a phone number needs double quotes, at byte 6."
  '{"a":+15550100002}'
  * bearer → 400 bad_field | "in double quotes."
  '{"number":+15550100001}' ;; {"number":15550100001} ;; {"recipients":[15550100002]} ;; {"recipients":15550100002}`;
table('a body that does not start like an object has no token: 401, whatever its size', {}, { stallTimeoutMs: 2000 })`
  * → 401 unauthorized | reason=no_credential
  ${NO_OBJECT}
  POST /v2/send ;; Transfer-Encoding: chunked | '' ;; {"auth":null,${HELLO.slice(1)} ;; -- message = hi
  Content-Type: application/x-www-form-urlencoded | 'message=hi&auth=${SECRET}'
  Content-Type: application/json | ' \n[{"auth":"x"}]' ;; Content-Type: text/plain | 'Backup done: 5 files'
  Content-Type: text/plain | '\xff\xfe not UTF-8' ;; Content-Type: text/plain | '${' '.repeat(70_000)}'
  Content-Type: text/plain | '${'long '.repeat(20_000)}'`;

/** A chunked body in single bytes, as Latin-1. */
const inBytes = (text: string): string =>
  `${Array.from(Buffer.from(text).toString('latin1'), (byte) => `1\r\n${byte}\r\n`).join('')}0\r\n\r\n`;

test('a body may arrive in single bytes: a text or a form without a credential is 401, and a webhook is sent', async (t) => {
  const { backend, gateway } = await startBoth(t, hook());
  for (const text of ['Backup done: 5 files', `data={"auth":"${SECRET}"}`, ' \n[{"auth":"x"}]', ' '.repeat(300)]) {
    const head = post('', 'chunked', 'Connection: close').replace(/Authorization.*\r\n/, '');
    assert.equal(codeOf(await raw(gateway, head + inBytes(text))), 'unauthorized', text);
  }
  assert.equal(backend.connections, 0, 'the backend saw a connection');
  const body = inBytes('{"message":"ü😀","number":2}');
  await raw(gateway, Buffer.from(post(SECRET, 'chunked', 'Connection: close') + body, 'latin1'));
  assert.equal(gotJson(backend).message, 'ü😀');
});

table('a body that the backend would read differently is 400; without a token only "Auth" is named', {})`
  * bearer → 400 bad_field
  * → 401 unauthorized
  {"number":1} ;; {"Number":"${FROM}"} ;; {"number":"${FROM}","number":"${FROM}"} ;; {"recipients":["${TO}",null]}
  {"recipients":"${TO}"} ;; {"recipient\u017f":["${TO}"]} ;; {"recipients":["${'1'.repeat(5000)}"]}
  {"base64_attachments":["data:x;base64,AAAA;filename=../x;base64,QUJD"]}
  * → 400 bad_field
  bearer | {"auth":1} ;; bearer | {"Auth":"x"} ;; {"auth":"${SECRET}","number":1} ;; {"Auth":"${SECRET}"}`;
/** Settings of a token that turns what it posts into sends. */
const OF_A_WEBHOOK = `@ {"defaults":{"number":"${FROM}","recipients":["${TO}"]}}`;
const SMALL = { limits: { body: '1KiB' } };
table('a body of exactly the limit passes, and one byte more is 413', SMALL, SOON_CLOSED)`
  * bearer → 413 body_too_large
  ${sized(1024)} → 201 ;; ${sized(1024)} | Transfer-Encoding: chunked → 201 ;; ${sized(1025)} → bytesIn=0
  ${sized(1025)} | Transfer-Encoding: chunked ;; ${OF_A_WEBHOOK} | ${sized(1025)} → bytesIn=0`;
table('a compressed body is 415; without a body, Content-Encoding is ignored', {})`
  * bearer → 415 unsupported_encoding
  ${['gzip', 'br', 'deflate, identity', 'x'].map((encoding) => `${HELLO} | Content-Encoding: ${encoding}`)}
  ${OF_A_WEBHOOK} | ${HELLO} | Content-Encoding: gzip ;; ${HELLO} | Content-Encoding: Identity → 201
  GET /v1/about | Content-Encoding: gzip → 200`;

table('an empty body is accepted if the route needs none', { allow: ['setup', 'messaging'] })`
  * bearer → 201
  POST /v1/register/${FROM} ;; POST /v1/register/${FROM} | '' | Transfer-Encoding: chunked
  DELETE /v1/typing-indicator/${FROM} → 400 bad_json
  DELETE /v1/typing-indicator/${FROM} | {"recipient":"${TO}"} → 204 | {"recipient":"${TO}"}`;
/** The routes without GET, by the backend's manual: those that need a JSON body, and those that do not. */
const WITH_BODY =
  `POST /v2/send,POST /v1/send,PUT /v1/typing-indicator/N,DELETE /v1/typing-indicator/N,POST /v1/reactions/N
  DELETE /v1/reactions/N,POST /v1/receipts/N,DELETE /v1/remote-delete/N,POST /v1/polls/N,DELETE /v1/polls/N
  POST /v1/polls/N/vote,POST /v1/sticker-packs/N,POST /v1/groups/N,PUT /v1/groups/N/G,POST /v1/groups/N/G/members
  DELETE /v1/groups/N/G/members,POST /v1/groups/N/G/admins,DELETE /v1/groups/N/G/admins
  POST /v1/groups/N/G/pin-message,DELETE /v1/groups/N/G/pin-message,POST /v1/configuration
  POST /v1/configuration/N/settings,POST /v1/accounts/N/rate-limit-challenge,PUT /v1/accounts/N/settings
  POST /v1/accounts/N/username,POST /v1/accounts/N/pin,POST /v1/devices/N,PUT /v1/profiles/N
  PUT /v1/identities/N/trust/${TO},PUT /v1/contacts/N`;
const WITHOUT_BODY = `DELETE /v1/attachments/a,DELETE /v1/groups/N/G,POST /v1/groups/N/G/block,POST /v1/groups/N/G/join
  POST /v1/groups/N/G/quit,POST /v1/register/N,POST /v1/register/N/verify/1,POST /v1/unregister/N
  DELETE /v1/accounts/N/username,DELETE /v1/accounts/N/pin,DELETE /v1/devices/N/local-data,DELETE /v1/devices/N/1
  POST /v1/contacts/N/sync,POST /v1/plugins/x,PUT /v1/plugins/x,PATCH /v1/plugins/x,DELETE /v1/plugins/x`;
const rowsOf = (routes: string): string[] =>
  routes.replaceAll('/N', `/${FROM}`).replaceAll('/G', `/${GROUP}`).split(/,|\n */);
table('a route that needs a body is 400 without one, and any other passes', ALL_GROUPS, ANSWERING)`
  * bearer → 400 bad_json
  ${rowsOf(WITH_BODY)}
  * bearer → passes
  ${rowsOf(WITHOUT_BODY)}`;
table('if two fields are refused, the first one is named', {})`
  * → 400 bad_field
  bearer | {"recipients":"x","number":1} → "The field "recipients" must"
  bearer | {"number":1,"recipients":"x"} → "The field "number" must"
  {"number":1,"recipients":"x","auth":"${SECRET}"} → "The field "number" must"
  {"auth":"${SECRET}","recipients":"x","number":1} → "The field "recipients" must"`;
table('an unknown expectation is ignored', {})`
  * bearer | Expect: x → 201 | same | > Expect:
  ${HELLO} ;; ${HELLO} | Transfer-Encoding: chunked
  * bearer | Expect: x → 200 | > Expect:
  GET /v1/about`;
table('the body of a GET authenticates it and is not relayed', {})`
  * GET /v1/about
  {"auth":"${SECRET}"} → 200 | '' ;; '{"auth":"${SECRET}"${' '.repeat(70_000)}}' → 413 body_too_large`;

test('a chunked body that exceeds the limit during the relay is cut off and never complete', async (t) => {
  const { backend, gateway } = await startBoth(t, { limits: { body: '1MiB' } });
  const headers = { ...BEARER, 'transfer-encoding': 'chunked' };
  assert.equal((await ask(gateway, { body: sized(2_000_000), headers })).status, 413);
  assert.deepEqual(backend.sent, [], 'what the backend sent');
  assert.ok(backend.seen.every((seen) => !seen.complete), 'a request was complete');
});

const BIG_SEND = `${HELLO.slice(0, -1)},"base64_attachments":["${'A'.repeat(1_000_000)}"]}`;
const LATE_AUTH = `${BIG_SEND.slice(0, -1)},"auth":"${SECRET}"}`;
const ODD_TEXT = literal`é😀\\u00e9\\n`.repeat(50_000);
const ODDLY_WRITTEN = `'  {"number":"${FROM}" ,"recipients":[ "${TO}"],"x":"${ODD_TEXT}"}'`;
table(
  'small bodies, also chunked, arrive with their actual length, large ones with the announced one, byte for byte',
  {},
)`
  * bearer → 201
  ${HELLO} | Transfer-Encoding: chunked → '${HELLO}' | > Content-Length: ${HELLO.length} | > Transfer-Encoding:
  ${BIG_SEND} → '${BIG_SEND}' | > Content-Length: ${BIG_SEND.length}
  ${BIG_SEND} | Transfer-Encoding: chunked → '${BIG_SEND}' | > Content-Length: | > Transfer-Encoding: chunked
  ${ODDLY_WRITTEN} → ${ODDLY_WRITTEN}
  none | {"auth":"${SECRET}",${BIG_SEND.slice(1)} → '${BIG_SEND}' | > Content-Length: ${BIG_SEND.length}
  # Announced before it was known: spaces take the place of auth.
  ${LATE_AUTH} → ${BIG_SEND} | > Content-Length: ${LATE_AUTH.length}`;

const LATE = HELLO.replace('}', `,"base64_attachments":["${'A'.repeat(300_000)}"]`);
const LATE_SENDER = LATE.replace(`"number":"${FROM}",`, '');
const FAIL_LATE = listed`
  bad_field ${LATE},"recipients":["${STRANGER}"]} ;; bad_field ${LATE},"recipient\u017f":["x"]}
  bad_field ${LATE},"members":["--help"]} ;; bad_field ${LATE.slice(0, -1)},"data:;filename=../x;base64,QQ=="]}
  bad_field ${LATE},"recipient":"group.436641234567x"} ;; bad_field ${LATE},"send_at":1}
  bad_field ${LATE_SENDER},"number":null} ;; bad_field ${LATE_SENDER}}
  bad_json ${LATE}}{} ;; bad_json ${LATE} ;; bad_json ${LATE.slice(0, -2)}␊"]} ;; bad_json ${LATE},"x":tru}
  recipient_not_allowed ${LATE},"recipient":"${STRANGER}"} ;; sender_not_allowed ${LATE_SENDER},"number":"${STRANGER}"}`;
test('a large body that is refused late never becomes a complete document, and its request is cut off', async (t) => {
  const broken: string[] = [];
  const server = net.createServer((socket) => {
    let text = '';
    socket.setEncoding('latin1').on('data', (chunk) => {
      text += chunk;
    }).on('error', () => {}).on('close', () => {
      if (text !== '') broken.push(text); // with fetch there is a further connection, for the next request
    });
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.after(() => server.close());
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  const gateway = await startGateway(t, { url }, CONFINED);
  for (const [code, body] of FAIL_LATE.map((row) => row.split(/ (?=\{)/))) {
    for (const framing of [{}, { 'transfer-encoding': 'chunked' }]) {
      const answer = await ask(gateway, { body: body!.replace('␊', '\n'), headers: { ...BEARER, ...framing } });
      assert.equal(answer.json.code, code, answer.text);
      await until(() => broken.length > 0);
      const text = broken.shift()!;
      const end = text.slice(-100);
      assert.match(text, /^POST \/v2\/send HTTP\/1\.1/, 'the request began');
      assert.ok(!text.endsWith('0\r\n\r\n'), `the last chunk was sent: ${end}`);
      const document = text.slice(text.indexOf('\r\n\r\n') + 4).replace(/(?:^|\r\n)[0-9a-f]+\r\n/gi, '').trimEnd();
      assert.throws(() => JSON.parse(document), SyntaxError, end);
      assert.ok(!document.endsWith('}'), `the closing brace was sent: ${end}`);
    }
  }
});

test('Expect: 100-continue of HTTP/1.1 is answered when the body is wanted; a refused client is not asked for its body', async (t) => {
  const { backend, gateway } = await startBoth(t, { auth: { methods: ['bearer', 'body'] } });
  const body = sized(2_000_000);
  const small = post(SECRET, HELLO.length, 'Expect: 100-continue');
  // A wrong token, and a form that is not accepted.
  for (const head of [small.replace(SECRET, OTHER), small.replace(/Bearer .*(?=\r)/, basic(`api:${SECRET}`))]) {
    const { text } = open(t, gateway, head);
    await until(() => text().endsWith('}\n'));
    assert.match(text(), /^HTTP\/1\.1 401 [^]*\r\nconnection: close\r\n/i);
  }
  assert.equal(backend.connections, 0, 'the backend saw a connection');
  const { socket, text } = open(t, gateway, post(SECRET, body.length, 'Expect: 100-continue'));
  await until(() => text() !== '');
  assert.match(text(), /^HTTP\/1\.1 100 Continue\r\n/);
  socket.write(body);
  await until(() => text().includes('HTTP/1.1 201 '));
  assert.deepEqual([backend.sent.length, backend.seen[0]!.headers.expect], [1, undefined], 'what the backend got');
  socket.write(ABOUT); // the whole body has been read, so the connection stays
  await until(() => text().includes('HTTP/1.1 200 '));
  assert.match(await raw(gateway, small.replace('HTTP/1.1', 'HTTP/1.0') + HELLO), /^HTTP\/1\.1 201 /);
});

// The response had keep-alive, and two seconds later the connection was reset, with any request on it.
test('a refusal without reading the rest of the body has Connection: close, and ends the connection', async (t) => {
  const config = { limits: { body: '100KiB' }, ...tokens({}, { rate: '1/1h' }) };
  const both = await startBoth(t, config, { stallTimeoutMs: 400 });
  await checkRows(both, [`bearer ${OTHER} → 200`]);
  const refusals = `wrong 401 65537; wrong 401 120000; wrong 401 2000000; wrong 401 200000 chunked
    ${OTHER} 429 70000; ${SECRET} 413 120000; ${SECRET} 413 2000000; ${SECRET} 400 200000 chunked`;
  for (const row of refusals.split(/\n *|; /)) {
    const [token = '', status, bytes, chunked] = row.split(' ');
    const body = '['.padEnd(Number(bytes));
    const request = chunked
      ? `${post(token, 'chunked')}${body.length.toString(16)}\r\n${body}\r\n0\r\n\r`
      : post(token, body.length) + body.slice(0, -1);
    const client = open(t, both.gateway, request);
    await until(() => client.text().endsWith('}\n'));
    // The valid send after it must not pass, because the response announced that the connection ends.
    client.socket.write(`${chunked ? '\n' : ' '}${SEND}`);
    await closed(client.socket);
    const text = client.text();
    assert.equal(String(statusOf(text)), status, `${row}: ${text}`);
    assert.match(text, /^connection: close\r$/im, row);
    assert.equal(text.split('HTTP/1.1 ').length, 2, `${row}: ${text}`);
  }
  assert.deepEqual(both.backend.sent, []);
});

// A connection that is kept must not contain a body whose end the gateway waits for.
test('a refusal keeps the connection if the body came with the headers; amid a body it has Connection: close, and nothing after it is acted on', async (t) => {
  const { backend, gateway } = await startBoth(t);
  for (const [begun, status] of [[post(OTHER, HELLO.length), 401], [post(SECRET, HELLO.length), 403]] as const) {
    gateway.reload(tokens({ recipients: [STRANGER] }));
    const { socket, text } = open(t, gateway, begun + HELLO);
    await until(() => text().endsWith('}\n'));
    assert.deepEqual([statusOf(text()), /^connection: keep-alive\r$/im.test(text())], [status, true], text());
    socket.write(ABOUT);
    await until(() => text().includes(' 200 OK'));
  }
  gateway.reload({});
  for (const request of [post(OTHER, HELLO.length), post(OTHER, 60_000), post(OTHER, 'chunked')]) {
    const { socket, text } = open(t, gateway, request);
    await until(() => text().endsWith('}\n'));
    assert.match(text(), /^HTTP\/1\.1 401 [^]*^connection: close\r$/im);
    socket.write(`${HELLO}${SEND}`);
    await closed(socket);
  }
  assert.deepEqual(backend.sent, []);
});

/** Collects garbage immediately. */
function collectGarbage(): void {
  const { Bun: bun } = globalThis as { Bun?: { gc(isFull: boolean): void } };
  if (bun) return bun.gc(true);
  setFlagsFromString('--expose-gc');
  runInNewContext('gc')();
}

// A small body whose client had disconnected stayed in memory for 28 s, at a cost of 77 bytes.
test('nothing of a request stays in memory once its connection is gone', { isAlone: true }, async (t) => {
  const text = '{"message":"';
  const health = 'GET /healthz HTTP/1.1\r\nHost: x\r\n';
  const upgrade = 'Connection: Upgrade\r\nUpgrade: websocket\r\nHost';
  const handshake = ABOUT.replace('/v1/about', RECEIVE).replace('Host', upgrade);
  const big = `${HELLO.slice(0, -1)},"x":"${'x'.repeat(100_000)}`;
  const begun = post(SECRET, 99) + text;
  /** What is sent, by how much of it arrives at the backend. */
  const sent = {
    nothing: [
      ...['POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{', post('wrong', 9) + text],
      ...[post('wrong', 1_000_000) + text, `${post('wrong', 'chunked')}4\r\n{"a"`],
      ...[begun, begun.replace('/v2/send', '/v1/register'), `${post(SECRET, 'chunked')}c\r\n${text}\r\n`],
      ...[post(SECRET, 99, 'Expect: 100-continue'), post(OTHER, 99) + text, post(OTHER, 500_000) + big],
      ...[`${health}Content-Length: 99\r\n\r\n{`, `${health}\r\n`.repeat(8)],
    ],
    all: [post(SECRET, 200_000) + big, SEND, SEND + begun, handshake],
    accepted: [handshake],
  };
  const begin = async (arrives: string, bytes: string): Promise<() => number> => {
    const held: http.ServerResponse[] = [];
    const backend = await startUpgradeBackend(t, (socket) => {
      if (arrives === 'accepted') socket.write(ACCEPTED);
      socket.on('end', () => socket.end()).resume();
    });
    backend.server.removeAllListeners('request').on('request', (req: http.IncomingMessage, res) => {
      req.on('error', () => {});
      held.push(res);
      backend.seen.push({} as Seen);
    });
    const config = { ...RECEIVING, ...tokens({}, { defaults: DEFAULTS }), backend: { url: backend.url, parallel: 0 } };
    const gateway = await startGateway(t, backend, config, { stallTimeoutMs: 90_000 }); // longer than a test waits
    const met: WeakRef<object>[] = [];
    for (const event of ['request', 'checkContinue', 'upgrade']) {
      gateway.server.on(event, (req: http.IncomingMessage) => met.push(new WeakRef(req)));
    }
    const clients = Array.from({ length: 20 }, () => connect(gateway, bytes).socket);
    await until(() => met.length >= 20 && backend.seen.length === (arrives === 'nothing' ? 0 : 20));
    clients.forEach((socket) => socket.destroy());
    await until(() => requests(gateway).length >= 20);
    held.forEach((res) => res.end());
    return () => met.filter((request) => request.deref() !== undefined).length;
  };
  for (const [arrives, all] of Object.entries(sent)) {
    const left = await Promise.all(all.map((bytes) => begin(arrives, bytes)));
    // The runtime may keep the most recent ones.
    await until(() => {
      collectGarbage();
      return left.every((count) => count() <= 2);
    }).catch(() =>
      assert.fail(`of ${arrives}: ${left.map((count, i) => `${count()} stay: ${all[i]!.slice(0, 200)}`)}`)
    );
  }
});

test('a closed gateway leaves nothing in memory, and no timer', { isAlone: true }, async () => {
  const listenAndClose = async () => {
    const log = (): void => {};
    const config = { listen: '127.0.0.1:0', tokens: { a: { secret: SECRET } }, backend: { url: 'http://127.0.0.1:1' } };
    const gateway = createGateway(config, { log, connectTimeoutMs: 1e6 });
    const url = await gateway.listen();
    assert.equal(
      outcomeOf(await ask(addressOf(url), { path: '/v1/health', headers: BEARER })),
      '502 backend_unreachable',
    );
    await gateway.close();
    return new WeakRef(log);
  };
  const log = await listenAndClose();
  await until(() => {
    collectGarbage();
    return log.deref() === undefined;
  });
});

// The objects parsed from one megabyte of "{},{},…" kept 20 MB while the send waited: 16 of them crashed a small
// computer.
test('while a send made from a body waits, nothing but the send is in memory', { isAlone: true }, async (t) => {
  const backend = await startBackend(t, () => {}); // and never responds
  const tokens = { test: { secret: SECRET, message: 'hi', defaults: DEFAULTS } };
  const gateway = await startGateway(t, backend, { tokens, backend: { url: backend.url, parallel: 1 } });
  const body = `{"a":[${'{},'.repeat(330_000)}0]}`;
  collectGarbage();
  const before = process.memoryUsage().heapUsed;
  for (let i = 0; i < 8; i++) open(t, gateway, post(SECRET, body.length) + body);
  const met: http.IncomingMessage[] = [];
  gateway.server.on('request', (req: http.IncomingMessage) => met.push(req));
  await until(() => met.length === 8 && met.every((req) => req.complete && req.readableLength === 0));
  await until(() => {
    collectGarbage();
    return process.memoryUsage().heapUsed - before < 40 * MIB;
  }).catch(() => assert.fail(`${Math.round((process.memoryUsage().heapUsed - before) / MIB)} MiB`));
});

// Each byte extended the deadline of the rest, so one byte every 1.4 s held a connection for 25 hours.
test('a client that stops or sends single bytes gets 408 at the deadline for its body; a refused one is disconnected by then', async (t) => {
  const headers = await startBoth(t, {}, { headersTimeoutMs: 500, lingerMs: 500 });
  const start = (): Promise<Both> => startBoth(t, tokens({}, { defaults: DEFAULTS }), { stallTimeoutMs: 2000 });
  const { backend, gateway } = await start();
  const { gateway: streaming } = await start();
  const [text, more] = ['{"message":"', 'x'.repeat(100_000)];
  const health = post('', 60_000).replace('POST /v2/send', 'GET /healthz');
  const unknown = post('', 60_000).replace(/Authorization.*\r\n/, '');
  const stops = async (to: Gateway, request: string): Promise<void> => {
    const response = await raw(to, request);
    assert.deepEqual([statusOf(response), codeOf(response)], [408, 'request_timeout'], `the response to ${request}`);
    assert.match(response, /^x-request-id: [\w-]{36}\r$/im);
  };
  const endIn = async (status: number, to: Gateway, ...requests: string[]): Promise<void> => {
    const responses = await Promise.all(requests.map((request) => trickle(t, to, request)));
    assert.deepEqual(responses.map(statusOf), requests.map(() => status), responses.join());
  };
  await Promise.all([
    stops(headers.gateway, 'GET /v1/about HTTP/1.1\r\nHost: x\r\n'),
    ...[post(SECRET, 100), unknown, post(OTHER, 100)].map((head) => stops(gateway, head + text)),
    endIn(401, gateway, post('wrong', 1_000_000), post('wrong', 60_000), `${post('wrong', 'chunked')}f4240\r\n`),
    endIn(413, gateway, post(SECRET, 1_000_000_000)),
    endIn(200, gateway, health, health.replace('60000', '1000000')),
    endIn(408, gateway, unknown + text, unknown.replace('60000', '1000000') + text, post(SECRET, 2_000_000) + text),
    endIn(408, gateway, post(OTHER, 1_000_000) + text, post(OTHER, 1_000_000) + text + more), // of a webhook
    // The head of these has arrived, and was relayed.
    endIn(408, streaming, post(SECRET, 2_000_000) + text + more, `${post(SECRET, 'chunked')}ffffff\r\n${text}${more}`),
  ]);
  assert.equal(backend.connections, 0, 'the connections that the backend saw');
});

test('a client without a token has one deadline for its whole body, at whatever pace it sends', async (t) => {
  const { gateway } = await startBoth(t, {}, { stallTimeoutMs: 3000 });
  const { socket, text } = open(t, gateway, post('', 60_000).replace(/Authorization.*\r\n/, '') + '{"message":"');
  await pass(2500);
  socket.write('x'.repeat(31 * 1024)); // with a token, these bytes restart the clock
  await closed(socket);
  assert.equal(outcomeOf(text()), '408 request_timeout');
  const { ms } = requests(gateway)[0];
  assert.ok(ms < 5000, `it was refused after ${ms} ms`);
});

test('the rest of the body of a refused client is read to its end, as long as the client keeps sending', async (t) => {
  const lingerMs = 1000;
  const [patient, silent] = await Promise.all(
    [{ lingerMs: 1e6 }, { lingerMs }].map((how) => startBoth(t, {}, how)),
  );
  // The refusal comes in the middle of the body, which the gateway has been waiting for.
  const waits = open(t, patient!.gateway, `${post(SECRET, 1_000_000)}{"message":"x"`);
  await settled(patient!.gateway);
  waits.socket.write('{'.repeat(1000));
  await until(() => waits.text().endsWith('}\n'));
  assert.equal(outcomeOf(waits.text()), '400 bad_json');
  waits.socket.write('x'.repeat(1_000_000 - 1014));
  await closed(waits.socket);
  // It sends for longer than it may pause.
  const steady = open(t, silent!.gateway, post(OTHER, 40));
  for (let sent = 0; sent < 40; sent++) {
    assert.ok(!steady.socket.destroyed, `it was closed behind ${sent} bytes`);
    steady.socket.write('x');
    await pass(lingerMs / 20);
  }
  await closed(steady.socket);
  assert.equal(outcomeOf(steady.text()), '401 unauthorized');
});

test('a body that arrives slowly but steadily may take longer in total, and so may one that the backend reads slowly', async (t) => {
  const [stallTimeoutMs, held] = [1000, [] as unknown[]];
  const backend = await startBackend(t, (req, res) => {
    req.on('error', () => {}).on('end', () => res.writeHead(201).end('[]'));
    const isSlow = req.url!.includes('slow');
    if (isSlow) held.push(req);
    setTimeout(() => req.resume(), isSlow ? 1.25 * stallTimeoutMs : 0);
  });
  const gateway = await startGateway(t, backend, {}, { stallTimeoutMs });
  const slow = ask(gateway, { path: '/v2/send?slow', body: sized(24 * MIB), headers: BEARER });
  const steady = beginSend(gateway, BEARER);
  const response = once(steady, 'response') as Promise<[http.IncomingMessage]>;
  steady.write(`${HELLO.slice(0, -1)},"more":"`);
  for (let i = 0; i < 12; i++) {
    steady.write('x'.repeat(31 * 1024));
    await new Promise((resolve) => setTimeout(resolve, stallTimeoutMs / 10));
  }
  steady.end('"}');
  assert.deepEqual([(await response)[0].statusCode, (await slow).status, held.length], [201, 201, 1]);
});

// Such a handler acts on its path alone, so the backend had acted before the gateway refused the rest of the body.
test('a route that needs no body refuses one beyond 64 KiB before the backend sees any of it; a plugin and an unknown route take any', async (t) => {
  const group = `/v1/groups/${FROM}/${GROUP}`;
  const rows = `POST ${group}/quit ;; POST ${group}/join ;; POST ${group}/block ;; DELETE ${group}
    DELETE /v1/attachments/a ;; POST /v1/unregister/${FROM} ;; DELETE /v1/devices/${FROM}/local-data`;
  const both = await startBoth(t, { allow: ['messaging', 'setup', '* /api/*'] });
  const { backend, gateway } = both;
  const send = (target: string, body: string, isChunked: boolean): Promise<Answer> => {
    const [method = '', path = ''] = target.trim().split(' ');
    const headers = { ...BEARER, ...isChunked && { 'transfer-encoding': 'chunked' } };
    return ask(gateway, { method, path, body, headers });
  };
  for (const isChunked of [false, true]) {
    for (const row of rows.split(/;;|\n/)) {
      // one that is valid, and two that are refused at their end
      for (const late of ['', ',"recipients":["-x"]', ',"a":']) {
        const body = `{"x":"${'x'.repeat(100_000)}"${late}}`;
        assertDenied(await send(row, body, isChunked), 413, 'body_too_large', both);
      }
    }
  }
  await send(`POST ${group}/quit`, '{"x":1}', true); // a small one is checked whole first
  const big = `{"x":"${'x'.repeat(200_000)}"}`;
  for (const row of ['POST /v1/plugins/mine', 'DELETE /v1/plugins/mine', 'POST /api/v9/new']) {
    await send(row, big, false);
  }
  assert.deepEqual(backend.seen.map(({ body, complete }) => [body.length, complete]), [
    [7, true],
    ...Array(3).fill([big.length, true]),
  ]);
});

section('SENDS'); // ───────────────────────────────────────────────────────────────────────────────
const DEFAULTS = { number: FROM, recipients: [TO] };
const MEANT = JSON.stringify(DEFAULTS);
const THIRD = '+15550100003';
/** A token with defaults that may use every account and write to everyone. */
const TO_ALL: TokenConfig = { defaults: DEFAULTS, senders: ['*'], recipients: ['*'] };

/** A token that turns what it posts into sends. */
function hook(token: TokenConfig = { defaults: DEFAULTS }): GatewayConfig {
  return { ...ALL_FORMS, tokens: { hook: { secret: SECRET, ...token } } };
}

const reading = (message: string): TokenConfig => ({ defaults: DEFAULTS, message });

const READS_TEXT = reading('{{text}}');
/** A request that is sent as JSON from and to the defaults, with the fields of its row. */
const MADE = `POST /v2/send | bearer → 201 | > Content-Type: application/json | ${MEANT}`;
/** Types that may be declared for a form or a text, because curl -d and wget declare the first one for everything. */
const UNDECLARED = [`Content-Type: ${URLENCODED}; charset=utf-8`, 'Content-Type:', ''].map((type) =>
  `* ${type} | ${MADE}`
);
table('webhook: a new send is made from its fields, and nothing else is relayed', hook(TO_ALL))`
  * ${MADE} | same
  {"message":"hi"} ;; {"message":"hi","number":"${THIRD}","recipients":["+15550100004","${GROUP}"]}
  # The other fields of a send, of whatever type: that is the backend's to judge.
  {"base64_attachments":["QUJD"]} ;; {"sticker":"a:1"} ;; {"message":"x","notify_self":false,"view_once":true}
  {"message":"see https://a.b","link_preview":{"url":"https://a.b","title":"A","base64_thumbnail":"QUJD"}}
  {"message":"x","quote_timestamp":1,"quote_author":"${TO}","quote_message":"x","quote_mentions":[{"start":0}]}
  {"message":"hi","mentions":[null],"quote_timestamp":"1","quote_author":7,"quote_message":{}}
  {"message":"x","quote_mentions":"x","edit_timestamp":1.5,"notify_self":"false","view_once":1,"sticker":["a:1"]}
  {"message":"x","text_mode":"html","link_preview":{"url":"https://a.b","title":1,"constructor":1}}
  @ {"defaults":{"number":"${FROM}","recipients":["${TO}"],"text_mode":"styled"}} | {"message":"hi","text_mode":"normal"}
  * ${MADE} | {"message":"hi"}
  {"message":"hi","number":2} ;; {"message":"hi","number":""} ;; {"message":"hi","number":["${THIRD}"]}
  {"message":"hi","number":null,"recipients":null,"recipient":null,"base64_attachments":null,"text_mode":null,"sticker":null,"Recipients":null}
  # Keys given twice that are not its own, and fields of others.
  {"message":"x","message":"hi","a":{"a":1},"b":"\"number\":1,","number":1,"c":[{"number":1},{"number":2}]}
  {"message":"hi","members":["${STRANGER}"],"admins":["${STRANGER}"],"Message":"x","":"x"}
  {"message":"hi","alerts":[],"__proto__":{"number":"${STRANGER}"},"version":"1","is_group":true,"toString":"x"}
  {"message":"hi","numbers":["x"],"recipes":["x"],"receipt":"x","Sticker":"a:1","TEXT_MODE":"x"}
  * ${MADE}
  {"message":"hi","recipients":"${THIRD}"} → {"message":"hi","recipients":["${THIRD}"]}
  {"message":"hi","recipients":["${THIRD}"],"recipient":""} → {"message":"hi","recipients":["${THIRD}"]}
  {"title":"t","base64_attachments":["QUJD"]} → {"base64_attachments":["QUJD"]} ;; {"title":"t","sticker":"a:1"} → {"sticker":"a:1"}
  {"message":"hi","base64_attachments":"aGk="} → {"message":"hi","base64_attachments":["aGk="]}
  @ {"defaults":{"number":"${FROM}","recipients":["${TO}"],"text_mode":"styled"}} | {"message":"hi"} → {"message":"hi","text_mode":"styled"}
  @ {"defaults":{},"message":"{{a.b}}!"} | {"a":{"b":"x"},"number":"${FROM}","recipients":["${TO}"]} → {"message":"x!"}
  @ {"message":"> {{message}}"} | {"message":"hi"} → {"message":"> hi"}
  @ {"message":"{{a}} {{b}} {{c}}{{d}}"} | {"a":[1,{"x":null}],"b":1.50,"c":true} → {"message":"[1,{\"x\":null}] 1.5 true"}`;

const READS_LINES = [
  '{{! one }}',
  '{{title}}',
  '{{#alerts}}',
  '{{name}}:',
  '  {{state}}',
  '{{/alerts}}',
  '{{^alerts}}',
  '',
  'none',
  '{{/alerts}}',
];
table("a template's lines are joined, and one line feed at the end of its text is dropped", hook())`
  * ${MADE}
  @ {"message":${
  JSON.stringify(READS_LINES)
}} | {"title":"t","alerts":[{"name":"a","state":1},{"name":"b","state":2}]} → {"message":"t\na:\n  1\nb:\n  2"}
  @ {"message":${JSON.stringify(READS_LINES)}} | {"title":"t"} → {"message":"t\n\nnone"}
  @ {"message":["{{text}}"]} | {"text":"a\nb"} → {"message":"a\nb"} ;; @ {"message":["{{text}}",""]} | {"text":"a"} → {"message":"a"}
  @ {"message":["a\n{{#text}}","{{.}}","{{/text}}"]} | {"text":"\nb\r\n"} → {"message":"a\n\nb\r\n"}
  @ {"message":"{{text}}"} | {"text":"a\nb\n\n"} → {"message":"a\nb\n"} ;; @ {"message":"{{text}}\n"} | {"text":"a"} → {"message":"a"}
  # A message that no template made stays as it was posted.
  {"message":"a\n"} → {"message":"a\n"}`;

// They were silently dropped, and the message went to the default recipient.
const LOST = listed`
  "recipients":[15550100003] ;; "recipients":15550100003 ;; "recipients":[] ;; "recipients":""
  "Recipients":["+15550100003"] ;; "Recipients":"" ;; "recipient\u017f":["+15550100003"] ;; "recipients":{"toString":1}
  "recipient":"+15550100003" ;; "recipient":"" ;; "recipient":["+15550100003"] ;; "Recipient":"+15550100003"
  "recipients":["${TO}"],"recipient":"+15550100003" ;; "recipients":["${TO}"],"RECIPIENTS":["+15550100003"]
  " recipients":["+15550100003"] ;; "recipients":"${INTERNAL_ID}" ;; "number":"15550100003" ;; "number":"+15550100003 "
  "number":" " ;; "number":"x" ;; "Number":"+15550100003" ;; "NUMBER":2 ;; "number ":"+15550100003"
  "base64_attachments":[1] ;; "Base64_Attachments":["QUJD"] ;; "ba\u017fe64_attachments":"QUJD"
  "link_preview":{"Base64_thumbnail":"QUJD"} ;; "link_preview":[] ;; "recipients.0":"a.01" ;; "recipients[a]":"a.01" ;; "recipients[0][1]":"a.01"
  "@recipients":["a.01"] ;; "amp;recipients":["a.01"] ;; "recipients\u200b":["a.01"] ;; "\u0000recipients":["a.01"]`;
// JSON.parse takes the last of two, and null counts as absent: the message would go to the default.
const LOST_TWICE = listed`
  "recipients":["+15550100003"],"recipients":null ;; "recipients":["+15550100003"],"\u0072ecipients":["+15550100004"]
  "Recipients":["a.01"],"Recipients":null ;; "number":"+15550100003","\u006eumber":null ;; "base64_attachments":["QUJD"],"base64_attachments":null`;
for (const [of, config] of [['that may write to everyone', hook(TO_ALL)], ['without lists', hook()]] as const) {
  table(`attack: lose a recipient, a sender or a picture on the way to the defaults of a token ${of}`, config)`
  * bearer → 400 bad_field
  ${[...LOST, ...LOST_TWICE].map((fields) => `{"message":"x",${fields}}`)}
  ${LOST.map((fields) => `{${fields},"message":"x"} | Content-Type: text/plain`)}
  ${LOST_TWICE.map((fields) => `'payload=${encodeURIComponent(`{${fields},"message":"x"}`)}'`)}`;
}

/** Urlencoded fields in each form: as a body, as a multipart form, and as the query of a GET. */
const inEachForm = (pairs: string): string[] => [
  `'${pairs}'`,
  Array.from(new URLSearchParams(pairs), ([name, value]) => `-- ${name} = ${value}`).join(' '),
  `GET /v2/send?${pairs}`,
];
/** Payloads with somebody who is not in the defaults, in each form. */
const NAMES_OTHERS = [
  ['number', STRANGER, '403 sender_not_allowed'],
  ['recipients', STRANGER, '403 recipient_not_allowed'],
  ['recipients', GROUP, '403 recipient_not_allowed'],
  ['recipients', 'ada.01', '403 recipient_not_allowed'],
].flatMap(([name, value, outcome]) =>
  [
    ...inEachForm(new URLSearchParams({ message: 'x', [name!]: value! }).toString()),
    `{"message":"x","${name}":"${value}"}`,
    `'payload=${encodeURIComponent(`{"message":"x","${name}":"${value}"}`)}'`,
  ].map((row) => `${row} → ${outcome}`)
);
const EVERY_ROUTE = { ...ALL_FORMS, allow: ['messaging', 'GET /v2/send', 'GET /v1/contacts/:number', '* /v1/new/*'] };
table('defaults confine: a token without lists uses the account and the recipients of its defaults alone', {
  ...{ ...EVERY_ROUTE, tokens: { hook: { secret: SECRET, defaults: DEFAULTS } } },
})`
  * bearer
  ${NAMES_OTHERS}
  {"message":"x","recipients":["${TO}","${STRANGER}"]} → 403 recipient_not_allowed | "on its list (\"recipients\", or else those in \"defaults\")."
  {"message":"x","number":"${STRANGER}"} → 403 sender_not_allowed | "on its list (\"senders\", or else the number in \"defaults\")."
  # What says the same as the defaults is what it was.
  {"message":"x","number":"${FROM}","recipients":["${TO}"]} → 201 | {"message":"x","number":"${FROM}","recipients":["${TO}"]}
  # Every other route holds the lists too.
  POST /v1/send | ${HELLO} → 201 ;; POST /v1/send | {"message":"x","number":"${FROM}","recipients":["${STRANGER}"]} → 403 recipient_not_allowed
  POST /v1/send | {"message":"x","number":"${STRANGER}","recipients":["${TO}"]} → 403 sender_not_allowed
  POST /v1/send | {"message":"x","recipients":["${TO}"]} → 400 bad_field
  GET /v1/receive/${FROM} → 200 ;; GET /v1/receive/${STRANGER} → 403 sender_not_allowed
  GET /v1/receive/${STRANGER} | Connection: Upgrade | Upgrade: websocket | Sec-WebSocket-Key: x → 403 sender_not_allowed
  GET /v1/contacts/${STRANGER} → 403 sender_not_allowed ;; GET /v1/attachments → 403 endpoint_not_allowed
  PUT /v1/typing-indicator/${FROM} | {"recipient":"${TO}"} → 204 ;; PUT /v1/typing-indicator/${FROM} | {"recipient":"${STRANGER}"} → 403 recipient_not_allowed
  POST /v1/groups/${FROM} | {"name":"x","members":["${TO}"]} → 403 endpoint_not_allowed ;; POST /v1/new/x | {} → 403 endpoint_not_allowed
  # One list says nothing of the other.
  @ {"defaults":{"number":"${FROM}"}} | {"message":"x","recipients":["${STRANGER}"]} → 201
  @ {"defaults":{"number":"${FROM}"}} | {"message":"x","recipients":["${TO}"],"number":"${STRANGER}"} → 403 sender_not_allowed
  @ {"defaults":{"recipients":["${TO}"]}} | {"message":"x","number":"${STRANGER}"} → 201
  @ {"defaults":{"recipients":["${TO}"]}} | {"message":"x","number":"${FROM}","recipients":["${STRANGER}"]} → 403 recipient_not_allowed
  @ {"defaults":{"text_mode":"styled"}} | {"message":"x","number":"${STRANGER}","recipients":["${STRANGER}"]} → 201
  # Its own list replaces the one of its defaults, and "*" is everyone.
  @ {"recipients":["${TO}","group.*"]} | {"message":"x","recipients":["${GROUP}"]} → 201 ;; @ {"recipients":["${TO}","group.*"]} | {"message":"x","recipients":["${STRANGER}"]} → 403 recipient_not_allowed
  @ {"recipients":["*"]} | {"message":"x","recipients":["${STRANGER}","${GROUP}","ada.01"]} → 201 ;; @ {"recipients":["*"]} | {"message":"x","number":"${STRANGER}"} → 403 sender_not_allowed
  @ {"senders":["*"]} | {"message":"x","number":"${STRANGER}"} → 201 ;; @ {"senders":["*"]} | {"message":"x","recipients":["${STRANGER}"]} → 403 recipient_not_allowed
  @ {"senders":["*"]} | GET /v1/receive/${STRANGER} → 200
  @ {"recipients":["*"],"senders":["*"]} | POST /v1/new/x | {} → passes`;

const READS_OTHERS = reading('{{number}} {{recipients}}{{#call}}{{text}}{{/call}}');
table("with a template, another program's number and recipients are data where the defaults have their own", {
  ...hook({ ...READS_OTHERS, allow: ['send', 'GET /v2/send'] }),
})`
  * ${MADE}
  {"number":"${THIRD}"} → {"message":"${THIRD} "} ;; {"number":"030 1234"} → {"message":"030 1234 "} ;; {"number":5} → {"message":"5 "}
  {"number":"anonymous","call":{"text":"rings"}} → {"message":"anonymous rings"}
  {"recipients":["ada@example.org"]} → {"message":" [\"ada@example.org\"]"} ;; {"recipients":[]} → {"message":" []"} ;; {"recipients":{"a":1}} → {"message":" {\"a\":1}"}
  {"recipients":"${STRANGER}","number":"${STRANGER}"} → {"message":"${STRANGER} ${STRANGER}"} ;; {"number":5,"recipients[]":["${STRANGER}"]} → {"message":"5 "}
  'number=030+1234' → {"message":"030 1234 "} ;; GET /v2/send?recipients=a → {"message":" a"} ;; -- recipients = a -- recipients = b → {"message":" [\"a\",\"b\"]"}
  -- payload = {"number":"${STRANGER}","recipients":[1]} -- x = y -- number = 5 → {"message":"5 "}
  # The other lists of the token do not matter to them.
  @ {"senders":["*"],"recipients":["*"]} | {"recipients":"${STRANGER}","number":"${STRANGER}"} → {"message":"${STRANGER} ${STRANGER}"}
  # Where the defaults have none, they count.
  @ {"defaults":{"number":"${FROM}"}} | {"number":"5","recipients":["${THIRD}"]} → {"message":"5 [\"${THIRD}\"]","recipients":["${THIRD}"]}
  @ {"defaults":{"recipients":["${TO}"]}} | {"number":"${THIRD}","recipients":[1]} → {"message":"${THIRD} [1]","number":"${THIRD}"}
  * bearer → 400 bad_field
  @ {"defaults":{"number":"${FROM}"}} | {"number":"5","recipients":[1]} ;; @ {"defaults":{"recipients":["${TO}"]}} | {"number":"030 1234"}
  {"number":5,"Recipients":["${THIRD}"]} ;; {"number":5,"recipient":"${THIRD}"} ;; {"number":5,"recipients.0":["${THIRD}"]} ;; {"number":5,"Number":5}
  'number=5&number=6' ;; {"number":5,"number":6} ;; {"number":5,"base64_attachments":[1]}`;

// V8 in Node 24 and 26 takes the second key of each pair for the first one.
test('a key that the runtime takes for another one changes neither the account nor the recipients', async (t) => {
  const { backend, gateway } = await startBoth(t, hook());
  for (const [i, key] of ['recipient', 'numbe'].entries()) {
    const last = ['\\u0073":["', '\\u0072":"'][i]!;
    for (const member of [`"${key}\\\\":0`, `"${key}${last}${STRANGER}"${i === 0 ? ']' : ''}`]) {
      const { status, json } = await ask(gateway, { body: `{"key${i}":1,"message":"x",${member}}`, headers: BEARER });
      assert.ok(status === 201 || /^(?:sender|recipient)_not_allowed$/.test(json.code), `${status} for ${member}`);
    }
  }
  for (const sent of backend.sent) assert.deepEqual(sent, { ...DEFAULTS, message: 'x' });
});

const ANY_TYPES = ['text/plain', 'application/json', 'application/octet-stream', 'multipart/form-data; boundary=x'];
table(
  "a webhook's JSON is read whatever its Content-Type, and the backend gets that of the new send",
  hook(READS_TEXT),
)`
  ${[...UNDECLARED, ...ANY_TYPES.map((type) => `* Content-Type: ${type} | ${MADE}`)]}
  ' \n{"text":"a=b&c=%41 ü 😀"}\n' | Content-Language: en | Content-MD5: x → {"message":"a=b&c=%41 ü 😀"} | > Content-MD5: | > Content-Language:
  {"text":"x"} | X-Hub-Signature-256: y → {"message":"x"} | > X-Hub-Signature-256: y`;

/**
 * Ends of a key, of which V8 can take each for another one: it compares the source of a key, cut at the length of the
 * key, with a key that it has seen.
 */
const ESCAPED_ENDS = ['\\\\\\/', '\\/x', '\\\\', '\\"', '\\n', '\\u00e9', '\\u0001', '\\u005c', '\\ud83d\\ude00'];
test('attack: post a key that is then read in place of a key of another token, which ends in another escape', async (t) => {
  const { backend, gateway } = await startBoth(t, {
    tokens: {
      hostile: { secret: OTHER, defaults: DEFAULTS },
      honest: { secret: SECRET, ...reading('{{titre}}: {{priorité}}') },
      plain: { secret: `${SECRET}2`, ...TO_ALL },
    },
  });
  const post = async (secret: string, body: string) => {
    const { status } = await ask(gateway, { headers: { authorization: `Bearer ${secret}` }, body });
    const sent = backend.seen.splice(0).map((seen) => JSON.parse(String(seen.body)));
    return status < 400 ? sent[0] : status;
  };
  // A hostile body is refused, or is a send of its own. Each pair has a first key of its own: V8 confuses two keys only
  // after the same keys.
  const honest: [secret: string, body: string, sent: object][] = [
    [SECRET, String.raw`"titre":"Alarme","priorit\u00e9":"haute"`, { message: 'Alarme: haute', ...DEFAULTS }],
    [`${SECRET}2`, String.raw`"message":"x","recipient\u0073":["${THIRD}"]`, {
      message: 'x',
      number: FROM,
      recipients: [THIRD],
    }],
  ];
  for (const [i, [secret, body, sent]] of honest.entries()) {
    const begin = body.slice(0, body.lastIndexOf('\\u'));
    for (const [j, end] of ESCAPED_ENDS.entries()) {
      for (const refused of ['', ',']) {
        const first = `"k${i}${j}${refused.length}":1`;
        await post(OTHER, `{${first},${begin}${end}":0${refused}}`);
        assert.deepEqual(await post(secret, `{${first},${body}}`), sent, `after ${end}`);
        // In the other order.
        const second = `"l${i}${j}${refused.length}":1`;
        assert.deepEqual(await post(secret, `{${second},${body}}`), sent, `before ${end}`);
        await post(OTHER, `{${second},${begin}${end}":0${refused}}`);
        assert.deepEqual(await post(secret, `{${second},${body}}`), sent, `again after ${end}`);
      }
    }
  }
  // A credential, below other keys too.
  for (const [i, depth] of [1, 2, 3].entries()) {
    const wrap = (member: string) =>
      `{"m${i}":${'{"n":'.repeat(depth)}{"x":1,${member}}${'}'.repeat(depth)},"titre":"x"}`;
    await post(OTHER, wrap(String.raw`"aut\\":0`));
    const body = wrap(`"aut\\u0068":"${T}"`);
    assert.deepEqual(await post(SECRET, body), { message: 'x: ', ...DEFAULTS });
  }
  assert.doesNotMatch(gateway.log.join(''), SECRETS);
});

test('attack: keys with an escape are read as they are written, at every depth, whatever was read before', async (t) => {
  const file = fileWith(t, { tokens: { hook: { secret: SECRET, ...reading('{{.}}') } } });
  const readAs = async (json: string) => {
    const { code, stdout, stderr } = await cli(['render', 'hook', '--config', file], { input: json });
    assert.equal(code, 0, stderr);
    return JSON.parse(stdout).message; // as text: JSON.parse of the test would confuse the keys, too
  };
  for (const [i, first] of ESCAPED_ENDS.entries()) {
    for (const [j, second] of ESCAPED_ENDS.entries()) {
      for (const depth of [0, 1, 3]) {
        // JSON.parse of a single string has no keys to confuse.
        const key = (end: string) => JSON.parse(`"key${end}"`) as string;
        const text = (end: string) => `${'{"a":['.repeat(depth)}{"p${i}-${j}":1,"key${end}":0}${']}'.repeat(depth)}`;
        const value = (end: string) => {
          let inner: unknown = { [`p${i}-${j}`]: 1, [key(end)]: 0 };
          for (let level = 0; level < depth; level++) inner = { a: [inner] };
          return inner;
        };
        for (const end of [first, second, first]) {
          assert.equal(
            await readAs(text(end)),
            JSON.stringify(value(end)),
            `${first} and ${second} ${depth} levels deep`,
          );
        }
      }
    }
  }
});

test('a configuration file is read as it is written, whatever was read before', (t) => {
  const own = `{"listen":"127.0.0.1:0","token\\u0073":{"phone":{"secret":"${SECRET}","recipient\\u0073":["${TO}"]}}}`;
  const other = own.replaceAll('\\u0073', '\\\\');
  const file = fileWith(t, other);
  const problems = problemsOf(() => loadSettings({ file }));
  assert.deepEqual(problems.map((problem) => problem.replace(/;.*/, '')), ['the configuration[1]: is not a setting']);
  const [token] = loadSettings({ file: fileWith(t, own) }).tokens;
  assert.deepEqual(token!.recipients, new Set([TO]));
});

const PLUS_JSON = JSON.stringify({ text: 'a=b&c=%41+ü 😀', number: 2 });
const PLUS_FORM = encodeURIComponent(PLUS_JSON).replaceAll('%20', '+');
table('a form with the single field "payload" or "data" that holds JSON is that JSON', hook(READS_TEXT))([
  `* ${MADE} | {"message":"a=b&c=%41+ü 😀"}`,
  ['payload', 'data'].map((name) =>
    `'${name}=${PLUS_FORM}' ;; '${name}=${PLUS_FORM}' | Content-Type: ${URLENCODED}
     '${name}=${PLUS_FORM}' | Content-Type: ${URLENCODED}; charset=UTF-8 | Transfer-Encoding: chunked
     -- ${name} = ${PLUS_JSON} ;; -- ${name} = ${PLUS_JSON} | Transfer-Encoding: chunked
     -- ${name} = ${PLUS_JSON} | Content-Type: Multipart/Form-Data; boundary="limit"`
  ),
]);

table('control characters in a number or a recipient of a form are not removed', hook(TO_ALL))`
  * Content-Type: ${URLENCODED} | bearer → 400 bad_field
  'message=x&number=%00&number=%2B490000002' ;; 'message=x&number=%2B490000002&number=%1B%5Bm' ;; 'message=x&number=%2B49000%000002'
  'message=x&recipients=%2B49222%002222' ;; 'message=x&recipients=%1B%5Bm%2B492222222' ;; 'message=x&recipients=%00' ;; 'message=x&recipients[]=%2B49222%0D2222'
  'payload={"message":"x","number":"%2B49000\\u00000002"}'
  * bearer → 400 bad_field
  -- message = x -- number = \x00 -- number = +490000002 ;; -- message = x -- recipients = +49222\x002222
  * bearer → 400 bad_json
  'payload={"message":"x","number":"%2B49000%000002"}' | Content-Type: ${URLENCODED}`;

/** What must not get into a text: a credential in the JSON of a field, whatever stands around it. */
table(
  'attack: hide a credential in the JSON of a field that the template shows',
  hook(reading('{{payload}}{{data}}{{a}}')),
)`
  * bearer → 400
  'payload=%1b[0m{"auth":"${SECRET}"}' ;; 'data=%00{"auth":"${SECRET}"}' ;; 'payload=[{"auth":"${SECRET}"}]' ;; 'data=[1,[{"auth":"${SECRET}"}]]'
  'payload=%27{"auth":"${SECRET}"}%27' ;; -- payload = [{"auth":"${SECRET}"}] ;; -- data = \x1b[0m{"auth":"${SECRET}"}
  * ${MADE}
  {"a":{"b":[{"auth":"${SECRET}"},{"c":1,"Auth":"${SECRET}"}]}} → {"message":"{\"b\":[{},{\"c\":1}]}"}
  'payload={"x":{"auth":"${SECRET}"}}&y=1' → {"message":"{\"x\":{}}"}
  'payload=[info] all {well}' → {"message":"[info] all {well}"} ;; 'data=[1' → {"message":"[1"}`;

table('the names of fields in a refusal are short enough to hold no secret', hook())`
  * bearer → 400
  GET /v2/send?message=x&@auth${SECRET} | @ {"defaults":{},"allow":["GET /v2/send"]}
  POST /v2/send?x${SECRET};recipients=x | {"message":"x"} ;; POST /v2/send?recipients[${SECRET}]=x | {"message":"x"}
  {"${SECRET}":1} ;; {"x":1,"recipients[${SECRET}]":1,"message":"x"} ;; {"${SECRET};number":1,"message":"x"}
  '${SECRET}=&payload=x' | Content-Type: ${URLENCODED} ;; 'message=x&${SECRET};number=1' | Content-Type: ${URLENCODED}
  -- ${SECRET};number; filename="x" = 1
  {"message":"x","recipients":[],"recipients[${SECRET}]":[],"recipients[${SECRET}]":[]}`;

/**
 * A token that makes sends, and reads the names `alert`, `name`, `status` and `when` in addition to those of a send.
 */
const READS_NAMES = reading(
  '{{#alert.title}}{{.}}{{/alert.title}}{{#alert}}{{name}}{{.status}}{{.}}{{/alert}}{{^when}}{{message}}{{/when}}',
);
table('a text is the message unchanged, even if it is declared as a form', hook(READS_NAMES))`
  ${UNDECLARED.map((way) => `${way} | same`)}
  'Backup done: 5 files' ;; 'temp=23' ;; 'temp=23 is fine'
  'temp=23&hum=40&e=%zz' ;; 'a & b' ;; 'message&' ;; 'message' ;; 'x message=hello' ;; 'x\nmessage=hello'
  # A field in another spelling.
  'Message=hello' ;; 'xmessage=hello&messages=1' ;; '=message&=x'
  # The template reads this name only below others.
  'title=x' ;; "text" ;; 'null' ;; 'a {"message":"x"}'
  # Names somebody only for a person, or by another name, or has an escape that is none.
  'number: 5' ;; 'to: Bob' ;; 'number =+15550100003' ;; 'x\nnumber=+15550100003' ;; 'x=a b&number=+15550100003' ;; 'Door 1&to=%2B15550100003'
  'to=+15550100003&x=a b' ;; 'Door 1&receipients=a' ;; '"message":"x","recipients":["+15550100003"]' ;; 'to:x,recipients:${GROUP}' ;; 'Recipients: 5 accepted' ;; 'Backup done\nRecipients: 5' ;; 'recipients: +15550100003' ;; 'From: +4930123456\nTo: +4930999999' ;; 'Call\nnumber: +4930123456'
  'Report\nnumber=5\nto=Bob' ;; 'the recipients=5' ;; 'recipients' ;; 'x\nrecipients\ny' ;; 'group.abc; recipients' ;; 'AT&T' ;; '100%'
  '98%zz' ;; 'C++' ;; 'user: auth=no' ;; 'a+b' ;; 'Backup%20done' ;; 'T%C3%BCr' ;; 'message%3Dhello' ;; 'x\nrecipients=a' ;; 'x=a b;recipients=a.01'
  '--limit\nContent-Disposition: form-data; name="message"\n\nx\n--limit--'
  '\n\n\tBackup done\n ' ;; 'Tür offen 🚪 \u202eabc'`;
table('a form is a text if it is declared as one, or as something else', hook(READS_NAMES))`
  * ${MADE} | same
  'recipients=%2B15550100003&message=x' | Content-Type: text/plain
  'payload=%7B%7D' | Content-Type: Text/Plain; charset=utf-8 ;; 'message=x' | Content-Type: application/octet-stream
  'message=x' | Content-Type: ${URLENCODED}2 ;; 'message=x' | Content-Type: application/x+jsonp`;

const WHEN = literal`@ {"message":"at {{when}}{{#when}}{{#level.x}}{{/level.x}}, {{level}}{{/when}}"}`;
table('a urlencoded form is read as the object of its fields', hook(TO_ALL))`
  ${UNDECLARED}
  * Content-Type: Application/X-WWW-Form-Urlencoded;charset=UTF-8 | ${MADE}
  # It is one if its first name is a field of a send, or if any name is one that no text has.
  'message=Backup done: 5 files' → {"message":"Backup done: 5 files"}
  'message=50% of "x"\n\u00e9&notify_self=no' → {"message":"50% of \"x\"\n\u00e9","notify_self":"no"}
  'temp=23&a-._~*+%41!'()=&message=x%0D%0A%1B%5By+z%26' → {"message":"x\n z&"}
  # The template's names are known too, within a section as well.
  ${WHEN} | 'when=now or so' → {"message":"at now or so, "} ;; ${WHEN} | 'x=1&when=now' → {"message":"at now, "}
  ${WHEN} | 'level=3 or so&when=now' → {"message":"at now, 3 or so"}
  # A phone number has lost its plus.
  'message=x&number=+15550100003&recipients=+15550100004' → {"message":"x","number":"${THIRD}","recipients":["+15550100004"]}
  'message=x&quote_author=+49123456' → {"message":"x","quote_author":" 49123456"}
  'recipients=%2B15550100003&message=x&recipients=+15550100004' → {"message":"x","recipients":["${THIRD}","+15550100004"]}
  'message=x&number=&text_mode=&sticker=&view_once=&recipient=' → {"message":"x"}
  'temp=23 °C&message=hello' → {"message":"hello"} ;; 'sensor=Door 1&message=open&recipients=+15550100003' → {"message":"open","recipients":["${THIRD}"]}
  # A list as PHP and jQuery write it.
  'message=x&recipients[]=+15550100003&recipients[]=+15550100004' → {"message":"x","recipients":["${THIRD}","+15550100004"]}
  'recipients%5B0%5D=%2B15550100003&recipients%5B1%5D=+15550100004&message=x' → {"message":"x","recipients":["${THIRD}","+15550100004"]}
  'message=x&recipients=+15550100003&recipients[]=+15550100004' → {"message":"x","recipients":["${THIRD}","+15550100004"]}
  'message=x&members=a&admins=b&__proto__=c&constructor=d&Message=e&auth=${SECRET}&Auth=${OTHER}&AUTH=' → {"message":"x"}
  @ {"message":"{{.}}{{auth}}{{payload}}{{message}}"} | 'auth=${SECRET}&payload={"message":"x","auth":1}' → {"message":"{\"message\":\"x\"}x"}
  @ {"message":"{{constructor}}{{__proto__}}"} | 'constructor=d&__proto__=c&message=x' → {"message":"dc"}
  @ {"message":"{{payload}}"} | 'payload=x=1&y=' → {"message":"x=1"}
  'base64_attachments=QUJD' → {"base64_attachments":["QUJD"]} ;; 'base64_attachments=QUJD&base64_attachments=QUJE&base64_attachments=QUJF' → {"base64_attachments":["QUJD","QUJE","QUJF"]}
  '\r\n title=1&recipients=%2B15550100003&message=x\r\n' → {"message":"x","recipients":["${THIRD}"]}
  '\ufeffrecipients=+15550100003&message=x y' → {"message":"x y","recipients":["${THIRD}"]}`;

const PNG = literal`Content-Type: image/png = \x89PNG\r\n\x1a\n\x00\xff`;
const PNG_DATA = 'base64,iVBORw0KGgoA/w==';
const SNAP = `data:image/png;filename=snap.png;${PNG_DATA}`;
const FILE_NAMES = ['/etc/a,b.png', 'C:/a,b.png', '../../a,b.png', literal`C:\\a,b.png`, 'a;b.png'];
// `curl -F recipients=@list.txt` sends a file. Its data URI went to the backend as a recipient.
table('a file as the number or the recipients of a multipart form is 400', hook())`
  * bearer → 400 bad_field | "must be text, not a file"
  -- message = x -- recipients; filename="a.txt" = +15550100003 ;; -- message = x -- Recipients[]; filename="a.txt" = +15550100003
  -- message = x -- recipient; filename="a.txt" = +15550100003 ;; -- message = x -- number; filename="a.txt" = +15550100003
  -- message = x -- recipients; filename="" =`;

table(
  'a multipart form is read as the object of its fields, and its files are attachments, named without a path',
  hook(TO_ALL),
)`
  * ${MADE}
  -- message = a=b&c\r\n{"ü":1} → {"message":"a=b&c\n{\"ü\":1}"}
  -- message = x -- file; filename="snap.png"\r\n${PNG} → {"message":"x","base64_attachments":["${SNAP}"]}
  -- file; filename="snap.png"\r\n${PNG} -- base64_attachments = QUJD → {"base64_attachments":["${SNAP}","QUJD"]}
  -- file; filename="b.txt"\r\nContent-Type: text/plain; charset=utf-8 = b → {"base64_attachments":["data:text/plain;filename=b.txt;base64,Yg=="]}
  # A browser sends this where no file was chosen.
  -- message = x -- file; filename=""\r\nContent-Type: application/octet-stream = → {"message":"x"}
  -- message = x -- number =  15550100003 -- recipients = +15550100004 -- recipients = ${GROUP} → {"message":"x","number":"${THIRD}","recipients":["+15550100004","${GROUP}"]}
  -- auth = ${SECRET} -- message = x -- Auth = ${OTHER} → {"message":"x"}
  -- file; filename=""\r\n${PNG} → {"base64_attachments":["data:image/png;${PNG_DATA}"]}
  -- data; filename="x.json"\r\nContent-Type: application/json = {"message":"x"} → {"base64_attachments":["data:application/json;filename=x.json;base64,eyJtZXNzYWdlIjoieCJ9"]}
  * ${MADE} | {"base64_attachments":["${SNAP.replace('snap', 'a_b')}"]}
  ${FILE_NAMES.map((name) => literal`-- f; filename="${name}"\r\n${PNG}`)}`;

// Next to a file it was dropped, and the picture went to the default recipient.
table("attack: lose the recipients in a form's JSON that is not its only field", hook(TO_ALL))`
  * bearer → 400 bad_field
  -- payload = {"message":"x","recipients":["${THIRD}"]} -- file; filename="snap.png"\r\n${PNG} -- x = y
  -- file; filename="snap.png"\r\n${PNG} -- data = {"message":"x","recipient\u0073":"${THIRD}"} -- payload = x
  -- payload = {"message":"x","base64_attachments":["QUJD"]} -- file; filename="snap.png"\r\n${PNG}
  -- payload = {"recipients":15550100003} -- message = x
  -- message = x -- payload = {"recipients":["${THIRD}"]} -- payload = y ;; -- message = x -- payload = y -- payload = {"recipients":["${THIRD}"]}
  -- message = x -- payload = y -- data = {"recipients":["${THIRD}"]} ;; -- payload = {"recipients":["${THIRD}"]} -- payload = y
  -- payload = {"Recipients":["${THIRD}"]} -- message = x ;; -- data = {"number":"${THIRD}"} -- message = x
  'message=x&payload=%7B%22recipient%22%3A%22%2B15550100003%22%7D' ;; 'data=%7B%22recipients%22%3A%5B%5D%7D&message=x'
  * bearer → 400 bad_json
  -- payload = {"recipients":["${THIRD}"] -- message = x
  * ${MADE}
  -- payload = {"event":"play","number":5,"recipients":null} -- message = x → {"message":"x"}
  -- payload = {"to":"${THIRD}","recipents":["${THIRD}"]} -- message = x → {"message":"x"}
  # Beside nothing but files it is the payload, as Plex's is, with its own recipients.
  -- payload = {"message":"x","recipients":["${THIRD}"]} -- file; filename="snap.png"\r\n${PNG} → {"message":"x","recipients":["${THIRD}"],"base64_attachments":["${SNAP}"]}
  -- file; filename="snap.png"\r\n${PNG} -- data = {"message":"x","recipient\u0073":"${THIRD}"} → {"message":"x","recipients":["${THIRD}"],"base64_attachments":["${SNAP}"]}
  @ {"message":"{{event}}: {{Metadata.title}}"} | -- payload = {"event":"play","Metadata":{"title":"A"}} -- thumb; filename="snap.png"\r\n${PNG} → {"message":"play: A","base64_attachments":["${SNAP}"]}`;

const COMMON_FORM_TYPES = [`Content-Type: ${URLENCODED}`, ''].map((type) => `* bearer | ${type} → 400`);
table('attack: have a form that no encoder wrote, or JSON within a quote or a bracket, sent as a text', hook())`
  ${COMMON_FORM_TYPES}
  # JSON within a quote or a bracket, as cmd.exe and careless programs leave it.
  ''{message:hi,recipients:[+15550100003]}'' ;; '"{\"message\":1}"' ;; [{"message":"x"}] ;; ' [ {' ;; '["{' ;; '“{"message":"x"}”'
  '“{"message":"x","recipients":["+15550100003"]}”' ;; [1] ;; [1,[{"auth":"${SECRET}"}]]
  # A credential.
  'auth=0123456789abcdef x' ;; 'auth=${SECRET}&message=hi & there' ;; '@auth=${SECRET} x' ;; 'Door 1&%40auth=${OTHER}' ;; 'Door 1&auth=${SECRET}'
  'auth=${T}' ;; 'auth[]=${SECRET}' ;; 'Door 1&amp;auth=${SECRET}' ;; 'Door 1&au%74h=${SECRET}' ;; 'auth = ${SECRET}'
  # Recipients in any spelling.
  'text=Door code is 4711&recipients=%2B15550100003' ;; 'Door open&recipients=a.01' ;; 'x;recipients=a.01' ;; 'x&message=hello'
  'Door 1&recipients[]=a.01' ;; 'Door 1&recipients[0]=a.01' ;; 'Door 1&recipients%5B%5D=a.01' ;; 'Door 1&recipients.0=a.01'
  'Door 1&@recipients=a.01' ;; 'Door 1&%40recipients=a.01' ;; 'Door 1&Recipients=a.01' ;; 'Door 1&recipient=a.01' ;; 'Door 1&amp;recipients=a'
  'Door 1&recipients=' ;; 'Door 1&#38;recipients=a' ;; 'Door 1& recipients =a' ;; 'recipients = a.01' ;; 'x=1&Recipients=a.01'
  # With a template too.
  @ {"message":"{{x}}"} | 'Door 1&recipients=a.01' ;; @ {"message":"{{x}}"} | 'Door 1&x=5'
  # It is text where it is declared text, or as something else.
  * Content-Type: text/plain | ${MADE} | same
  * Content-Type: application/octet-stream | ${MADE} | same
  'title=Back up&message=ok&recipients=%2B15550100003' ;; [{"message":"x"}] ;; 'Backup%20done' ;; 'recipients: +15550100003'`;

table(
  'attack: have a form or a query sent that is truncated, not UTF-8, or names a recipient in another spelling',
  hook({
    ...{ ...TO_ALL, allow: ['send', 'GET /v2/send'] },
  }),
)`
  * bearer → 400
  'message=Tom & Jerry' ;; 'message=AT&T' ;; 'message=AT&T: x=1' ;; 'message=a & b = c' ;; 'message=a &b;c=d' ;; 'message=x&y' ;; 'message=x&=y' ;; 'message=x&sticker'
  GET /v2/send?message=Tom%20&%20Jerry ;; GET /v2/send?message=AT&T
  'message=T%FCr' ;; 'message=%C3' ;; 'message=%C3%C3' ;; 'message=%ED%A0%80' ;; 'message=%C3ü' ;; 'x%FF=1&message=x'
  'message=x&amp;recipients=%2B15550100003' ;; 'amp;recipients=%2B15550100003&message=x' ;; 'message=x&b;recipients=a.01'
  GET /v2/send?message=x&amp;recipients=%2B15550100003 ;; GET /v2/send?message=x&amp%3Brecipients=a.01
  'message=x&amp;y' → "%26 (curl --data-urlencode)" ;; 'message=x&y' → "post it as text/plain"
  * ${MADE}
  'message=Tom %26 Jerry' → {"message":"Tom & Jerry"} ;; 'message=x&&' → {"message":"x"} ;; 'message=x&sticker=&view_once=' → {"message":"x"}
  'message=x%3Brecipients%3D%2B15550100003%0Arecipients%3Da' → {"message":"x;recipients=+15550100003\nrecipients=a"}
  'message=Who; when; recipients' → {"message":"Who; when; recipients"} ;; 'message=1;to=%2B15550100003' → {"message":"1;to=+15550100003"}
  'message={"recipients":["+15550100003"]}' → {"message":"{\"recipients\":[\" 15550100003\"]}"} ;; 'message=x;number=+15550100003' → {"message":"x;number= 15550100003"}
  # A value is a value.
  'message=x;recipients=%2B15550100003' → {"message":"x;recipients=+15550100003"} ;; 'message=Who; when; recipients: 5' → {"message":"Who; when; recipients: 5"}
  'message=x%0Arecipients=a' → {"message":"x\nrecipients=a"} ;; GET /v2/send?message=x;recipients=a → {"message":"x;recipients=a"}
  GET /v2/send?message=Tom%20%26%20Jerry → {"message":"Tom & Jerry"} ;; 'message=98%' → {"message":"98%"} ;; 'message=98% für %41&n=5' → {"message":"98% für A"}
  # A plus is a space in every form.
  'message=C++ build failed' → {"message":"C   build failed"} ;; 'message=C%2B%2B+failed' → {"message":"C++ failed"}
  'message=+5 °C&recipients=+15550100003' → {"message":" 5 °C","recipients":["${THIRD}"]}
  'message=a%0Ab&n=5' → {"message":"a\nb"} ;; GET /v2/send?message=a%0Arecipients%21&n=5 → {"message":"a\nrecipients!"}
  -- message = a & b; recipients=x → {"message":"a & b; recipients=x"}`;

const CONTACTS = listed`
  "to":"X" ;; "To":["X"] ;; "target":"X" ;; "targets":["x","X"] ;; "destination":"X" ;; "groups":["X"] ;; "group_id":"X" ;; "chat_id":"X" ;; "numbers":["X"]
  "receivers":["X"] ;; "to[]":"X" ;; "@to":"X" ;; "recipient_number":"X" ;; "recipientList":["X"] ;; "phone":"X" ;; "to":{"phone":"X"}
  "receipients":["X"] ;; "recipents":"X" ;; "Recepients":["X"] ;; "recepiant":"X" ;; "recipients_":["X"] ;; "recipients2":"X" ;; "receipient":["X"]`;
table('attack: name a recipient in another spelling or another field than a send has', hook(TO_ALL))`
  * bearer → 400 bad_field
  {"message":"x","recipients​":"a.01"} ;; 'message=x&base64_attachment=QUJD' ;; {"message":"x","base64_attachment":"QUJD"} ;; -- message = x -- base64_attachment = QUJD
  'message=x&recipients=+1+555+010+0003' ;; {"message":"x","recipients":[" 15550100003"]} ;; {"message":"x","recipients":["  1 555"]}
  * 'x' | bearer → 400 bad_field
  POST /v2/send?number=5 ;; POST /v2/send?x=1&amp;recipients=a ;; POST /v2/send?base64_attachments=QUJD ;; POST /v2/send?recipients[]=a
  POST /v2/send?@recipients=a ;; POST /v2/send?%40recipients=a ;; POST /v2/send?@number=5
  * @ {"allow":["GET /v2/send"]} | bearer → 400 bad_field
  GET /v2/send?message=x&recipients= ;; GET /v2/send?message=x&@recipients=a.01 ;; GET /v2/send?@message=y
  * ${MADE} | {"message":"x"}
  # By another name, whatever it holds, it is data.
  ${CONTACTS.map((pair) => `{"message":"x",${pair.replaceAll('X', THIRD)}}`)}
  'message=x&to=%2B15550100003' ;; 'receipients=%2B15550100003&message=x' ;; -- message = x -- to = +15550100003 -- reciepients = a.01
  * 'x' | ${MADE} | {"message":"x"}
  POST /v2/send?to=%2B15550100003&text=y ;; POST /v2/send?receipients=a
  @ {"allow":["GET /v2/send"]} | none | GET /v2/send?message=x&to=%2B15550100003&recipents=a | bearer
  * ${MADE}
  -- message = x -- base64_attachment; filename="snap.png"\r\n${PNG} → {"message":"x","base64_attachments":["${SNAP}"]}`;

table('a recipient that starts with a space has lost its plus, and is refused for every token', {
  allow: ['messaging'],
})`
  * bearer → 400 bad_field | "may not begin with a space"
  {"message":"x","number":"${FROM}","recipients":[" 15550100003"]} ;; {"message":"x","number":"${FROM}","recipients":["${TO}","  1 555"]}
  POST /v1/groups/${FROM} | {"name":"x","members":[" 15550100003"]} ;; POST /v1/reactions/${FROM} | {"recipient":" 15550100003","reaction":"x"}`;

table(
  'a template that finds nothing is 400 with a picture; no credential gets into a text',
  hook(),
)`
  * @ {"message":"{{a}}"} | bearer → 400 bad_field
  -- b = c -- f; filename="x" = x ;; {"b":"c","base64_attachments":["QUJD"]} ;; {"b":"c","sticker":"a:1"}
  -- f; filename="x" = x ;; {"message":"x","sticker":"a:1"} ;; {"a":"","base64_attachments":["QUJD"]}
  * @ {"message":"{{a}}"} | ${MADE}
  {"a":"x","send_at":1} → {"message":"x"} ;; {"a":"x","message":{"text":1}} → {"message":"x"}
  * @ {"message":"{{.}}{{payload}}"} | ${MADE} | {"message":"{\"b\":\"1\",\"payload\":\"{\\\"c\\\":1}\"}{\"c\":1}"}
  'payload={"c":1,"auth":"${SECRET}"}&b=1&@auth=${SECRET}&auth[]=${OTHER}' → {"message":"{\"payload\":\"{\\\"c\\\":1}\",\"b\":\"1\"}{\"c\":1}"}
  -- b = 1 -- payload = {"@auth":"${SECRET}","c":1} -- Auth = ${OTHER}`;

// With these templates a webhook that changed its shape was 201, and nobody noticed for weeks.
table('a template that has variables outside of sections and finds none of them is 400', hook())`
  * bearer → 400 bad_field | reason=no_message | "or in its \"message\" template if that found nothing in these keys."
  @ {"message":"Alerts for {{receiver}}"} | {"alerts":[]} ;; @ {"message":"Alerts for {{receiver}}"} | 'hello world' ;; @ {"message":"{{a}}: {{b}}"} | {"foo":"bar"}
  @ {"message":"{{a}}: {{#b}}{{c}}{{/b}}{{^d}}{{e}}{{/d}}"} | {"b":{"c":1},"e":1} ;; @ {"message":"{{a.b}}!"} | {"a":{"c":1}}
  @ {"message":"{{#who}}{{.}}{{/who}}"} | 'hello' ;; @ {"message":"{{a}}!"} | {"base64_attachments":["QUJD"]} ;; @ {"message":"{{a}}!"} | {"b":"c","base64_attachments":["QUJD"]}
  * @ {"message":"Alerts for {{receiver}}"} | bearer → 400 bad_field | reason=no_message
  {} ;; ''
  * ${MADE}
  @ {"message":"Backup done{{#size}} ({{size}}){{/size}}"} | {"foo":1} → {"message":"Backup done"} ;; @ {"message":"Backup done{{#size}} ({{size}}){{/size}}"} | {} → {"message":"Backup done"}
  @ {"message":"Rang"} | 'hello' → {"message":"Rang"} ;; @ {"message":"{{^alerts}}none{{/alerts}}"} | {"x":1} → {"message":"none"}
  @ {"message":"{{a}}: {{b}}"} | {"a":""} → {"message":": "} ;; @ {"message":"{{a}}: {{b}}"} | {"b":null} → {"message":": "} ;; @ {"message":"> {{.}}"} | {"x":1} → {"message":"> {\"x\":1}"}
  @ {"message":"{{#b}}{{c}}{{/b}}: {{^a}}{{message}}{{/a}}"} | {"b":{"c":1}} → {"message":"1: "} ;; @ {"message":"x{{^a}}{{message}}{{/a}}"} | 'hello' → {"message":"xhello"}
  # Text that needs no name is always sent.
  @ {"message":"Rang{{#who}} by {{who}}{{/who}}"} | 'hello' → {"message":"Rang"} ;; @ {"message":"{{^alerts}}none{{/alerts}}"} | {"message":"x"} → {"message":"none"}`;

// Deno 2.9 and Bun 1.4 skipped parts that they could not read, and the message went to the default recipient.
const FIELD = 'Content-Disposition: form-data;';
const MESSAGE_PART = literal`--limit\r\n${FIELD} name="message"\r\n\r\nx\r\n`;
const partOf = (head: string): string => literal`--limit\r\n${head}\r\n\r\n+15550100003\r\n`;
const SOMEBODY = `${FIELD} name="recipients"`;
const NOBODY = `${FIELD} name="x"`;
const TO_PART = partOf(SOMEBODY);
const headRow = (head: string): string => `'${MESSAGE_PART}${partOf(head)}--limit--\\r\\n'`;
const IN_MULTIPART = '* bearer | Content-Type: multipart/form-data; boundary=limit';
table('the recipients of a multipart form are found in any case and with any white space', hook(TO_ALL))`
  ${IN_MULTIPART} → 201 | {"number":"${FROM}","message":"x","recipients":["${THIRD}"]}
  ${
  ['content-disposition:form-data;name="recipients"', 'CONTENT-DISPOSITION: form-data ; NAME="recipients"'].map(headRow)
}`;
const NO_NAMES_OF_PARTS =
  literal`x\\" recipients,recipients\\,\\recipients,recip\\ients,recipients%00,%72ecipients,recipients\u0000,recipients\x1b,a"b,`;
const ENCODINGS = ['base64', 'quoted-printable', 'x', 'binary, base64', ''].flatMap((encoding) =>
  [literal`\u0020`, literal`\t`, ''].map((space) => `Content-Transfer-Encoding:${space}${encoding}`)
);
const TWO_READINGS = literal`
  ${FIELD} name*=UTF-8''recipients ¦ ${FIELD} name='recipients' ¦ ${FIELD} name = "recipients" ¦ ${FIELD}\r\n name="recipients"
  ${FIELD} name="recipients\n" ¦ Content-Disposition: form-data ¦ Content-Type: text/plain ¦  ¦ ${NOBODY}; name="recipients"
  ${NOBODY}; name*=utf-8''recipients ¦ ${NOBODY}; x=y ¦ ${NOBODY}; ¦ ${NOBODY}; x-y="; name=recipients"
  ${FIELD} x-y="; name=recipients"; name="x" ¦ ${NOBODY} name="recipients" ¦ ${NOBODY}, ${SOMEBODY}
  ${NOBODY}\r\n${SOMEBODY} ¦ ${SOMEBODY}\r\n${SOMEBODY} ¦ ${NOBODY}\n${SOMEBODY} ¦ ${NOBODY}\r${SOMEBODY}
  ${NOBODY}\r\n ; name="recipients" ¦ ${NOBODY}\r\n\t${SOMEBODY} ¦ X-A: b\r\n ${SOMEBODY}\r\n${NOBODY}
  ${NOBODY}\r\nContent-Disposition : form-data; name="recipients" ¦ Content-Disposition: attachment; name="recipients"
  Content-Disposition: name="recipients" ¦ Content-Disposition: form-data, form-data; name="recipients" ¦ \r\n${SOMEBODY}
  ${NO_NAMES_OF_PARTS.split(',').map((name) => SOMEBODY.replace('recipients', name))}
  ${FIELD} name=recipients x ¦ ${FIELD} name=recipients;x ¦ ${FIELD} name=reci\\pients ¦ ${FIELD} name=reci%70ients
  ${FIELD} name=recipients\u00a0 ¦ ${SOMEBODY}; filename*=utf-8''x ¦ ${NOBODY}; filename=x; name="recipients"
  ${NOBODY}; filename="x\\"; name="recipients" ¦ ${NOBODY}; filename="x"; filename="y"
  ${NOBODY}\r\nContent-Type: multipart/mixed; boundary=b ¦ ${SOMEBODY}\r\nContent-Type: text/plain\r\ncontent-type: text/plain
  ${ENCODINGS.map((encoding) => literal`${SOMEBODY}\r\n${encoding}`)}
  ${SOMEBODY}\r\nContent-Transfer-Encoding: 8bit\r\nContent-Transfer-Encoding: base64`;
const OTHER_TYPES = literal`
  ; boundary=limit; boundary=other ¦; boundary=other; boundary=limit ¦; boundary="limit"; Boundary=limit
  ; boundary*=utf-8''limit ¦; x="; boundary=limit" ¦; boundary=limit x ¦; boundary=limit;x ¦; boundary="limit
  ; boundary=limit, multipart/form-data; boundary=other ¦; boundary="li\mit" ¦; boundary= ¦; boundary=""
  , boundary=limit ¦ boundary=limit`;
table('attack: write a multipart form that two correct programs read differently', hook())`
  ${IN_MULTIPART} → 400 bad_json
  ${TWO_READINGS.trim().split(/\n *| ¦ /).map(headRow)}
  ${['', literal`--\r\n`, literal`\r\n`].map((end) => headRow(literal`${NOBODY}\r\n\r\n\n--limit${end}${SOMEBODY}`))}
  '${MESSAGE_PART}--limit--\r\n${TO_PART}--limit--\r\n' ;; '${MESSAGE_PART}--limit--\r\n${TO_PART}'
  '${MESSAGE_PART}--limit--\r\nx' ;; '${MESSAGE_PART}--limit--x\r\n' ;; '${MESSAGE_PART}--limit--\r\n\r\nrecipients=a.01\r\n'
  '${MESSAGE_PART}${TO_PART.replace('--limit', '--limits')}--limit--\r\n' ;; '${MESSAGE_PART}${TO_PART}'
  '${MESSAGE_PART}${TO_PART.replace('--limit', '--limit ')}--limit--\r\n'
  '${MESSAGE_PART}${TO_PART.replaceAll(literal`\r\n`, literal`\n`)}--limit--\r\n'
  '${TO_PART.replace('--limit', '--other')}${MESSAGE_PART}--limit--\r\n' ;; ' \n${MESSAGE_PART}--limit--\r\n'
  '${MESSAGE_PART.replace(/x(?=\\r\\n$)/, literal`caf\xe9`)}--limit--\r\n'
  '${MESSAGE_PART.replace('message', literal`recipients\xe9`)}--limit--\r\n'
  ${
  OTHER_TYPES.trim().split(/\n *| ¦/).map((type) =>
    `* bearer | Content-Type: multipart/form-data${type} → 400 bad_json`
  )
}
  '${MESSAGE_PART}--limit--\r\n'`;
table('a POST that names a recipient in its query, which is not read, is not sent to the default one', hook())`
  * 'hi' | bearer → 400 bad_field
  POST /v2/send?x=1&recipients=%2B15550100003 ;; POST /v2/send?x=1&recipients%5B%5D=%2B15550100003
  POST /v2/send?x=1&recipient=%2B15550100003 ;; POST /v2/send?x=1&number=%2B15550100003
  POST /v2/send?x=1&Recipients=%2B15550100003
  POST /v2/send?x=1&message=x → 201 | {"message":"hi","number":"${FROM}","recipients":["${TO}"]}`;

const TERMINAL = literal`
  one\r\ntwo\r\n\tthree ⇒ one\ntwo\n\tthree
  \u001b[1;31mFAILED\u001b[0m \u001b[38;5;9m[x]\u001b[m ok\u001b[K ⇒ FAILED [x] ok
  \u009b31mred\u009b0m ⇒ red
  \u001b(B\u001b[mplain ⇒ plain
  \u001b]0;a title\u0007a \u001b]8;;https://a.b\u001b\\link\u001b]8;;\u001b\\ ⇒ a link
  \u001b]0;without an end ⇒ ]0;without an end
  10%\r20%\u0008\u0000\u007f\u0085\u001b ⇒ 10%20%
  [31m[0m stays ⇒ [31m[0m stays`.trim().split('\n').map((line) => line.trim().split(' ⇒ ') as [string, string]);
table('a text and a form lose terminal control codes and control characters; JSON loses nothing', hook())([
  `* ${MADE}`,
  TERMINAL.flatMap(([text, message]) => [
    `'${text}' | Content-Type: text/plain → {"message":"${message}"}`,
    `'${text}' | Content-Type: ${URLENCODED} → {"message":"${message}"}`,
    `{"message":"${text}"} → same`,
    `'message=${encodeURIComponent(String(unescaped(text)))}' → {"message":"${message}"}`,
    `-- message = ${text} → {"message":"${message}"}`,
  ]),
]);

const LIMIT = 64 * 1024;
table('a text beyond 64 KiB is cut between characters, with an ellipsis; JSON and forms are not cut', hook())`
  * ${MADE}
  '${'x'.repeat(LIMIT)}' → same ;; '${'x'.repeat(LIMIT + 1)}' → {"message":"${'x'.repeat(LIMIT - 3)}…"}
  '${'x'.repeat(LIMIT - 5)}😀😀' → {"message":"${'x'.repeat(LIMIT - 5)}…"}
  '\u001b[m${'x'.repeat(LIMIT)}\r' → {"message":"${'x'.repeat(LIMIT)}"}
  '${'ü'.repeat(8 * LIMIT)}' → {"message":"${'ü'.repeat(LIMIT / 2 - 2)}…"}
  {"message":"${'x'.repeat(LIMIT + 9)}"} → same
  'message=${'x'.repeat(LIMIT + 9)}' → {"message":"${'x'.repeat(LIMIT + 9)}"}`;
const READS_FILE = reading('{{who}}: {{message}}{{^base64_attachments}}!{{/base64_attachments}}');
table("a template sees a text, a form, a query and a file's data as it sees JSON", hook(READS_FILE))`
  * @ {"allow":["send","GET /v2/send"]} | ${MADE}
  'hello' → {"message":": hello!"} ;; 'who=ada&message=hello' → {"message":"ada: hello!"}
  -- who = ada -- f; filename="x" = x → {"message":"ada: ","base64_attachments":["data:application/octet-stream;filename=x;base64,eA=="]}
  {"who":"ada","message":"hello"} → {"message":"ada: hello!"}
  GET /v2/send?who=9 → {"message":"9: !"} ;; GET /v2/send?payload=%7B%22who%22%3A9%7D → {"message":"9: !"}
  * @ {"allow":["send","GET /v2/send"]} | bearer → 400 bad_field
  '' ;; GET /v2/send ;; GET /v2/send/?`;

const JSON_TYPES = ['application/json', 'Application/JSON ; charset=utf-8', 'application/problem+json', 'text/x+json'];
table('attack: pass off invalid JSON as JSON, or an invalid form as a form', hook(reading('{{text}}{{message}}')))`
  * bearer → 400 bad_json
  'payload={"message":"x"' ;; ' \n\t{"message":"x"' ;; {message:x} ;; {"message":"x"} {} ;; '\ufeff{"message":"x"}'
  { | Content-Type: ${URLENCODED} ;; {{text}} | Content-Type: text/plain ;; 'payload={"a":${'['.repeat(100_000)}'
  '\u00a0{"message":"x"}' ;; '{"message":"\xff"}' ;; {"a":${'['.repeat(64)}${']'.repeat(64)}}
  'no parts' | Content-Type: multipart/form-data; boundary=limit ;; '' | Content-Type: multipart/form-data; boundary=limit
  'message=x' | Content-Type: multipart/form-data; boundary=limit
  -- data = {"message":"x"} | Content-Type: multipart/form-data ;; -- data = {"message":"x"
  'caf\xe9' ;; 'message=caf\xe9' ;; '\xff\xd8\xff\xe0' | Content-Type: image/jpeg
  ${JSON_TYPES.map((type) => `* bearer | Content-Type: ${type} → 400 bad_json`)}
  [{"message":"x"}] ;; "text" ;; 'null' ;; 'hello' ;; '' ;; 'message=hello' ;; '${MESSAGE_PART}--limit--\r\n'`;

// Written by hand or by a sloppy program, these went to the default recipient, or as a text.
const LOST_IN_FORMS = listed`
  recipients= ;; recipients=&recipients=%2B15550100003 ;; recipient=%2B15550100003 ;; recipient=+15550100003 and so on
  Recipients=%2B15550100003 ;; RECIPIENTS=+15550100003 or so ;; recipients[a]=%2B15550100003 ;; recipients[]=
  recipients%5B0%5D%5B%5D=%2B15550100003 ;; recipients.0=+15550100003 or so ;; number=15550100003 ;; number=5 files
  number=%2B1 ;; Number=%2B15550100003 ;; number[]=x ;; base64_attachments[0]=QUJD ;; Recipients= ;; recipients=-x
  %20recipients=%2B15550100003 ;; recipients+=%2B15550100003
  recipients=${INTERNAL_ID} ;; recipients=a%0Ab`;
table('attack: have a form or a text sent that is empty, or has no recipient', hook())`
  * bearer → 400 bad_field
  POST /v2/send ;; '' ;; ' \r\n' ;; '\u001b[0m' ;; 'payload=' ;; 'payload=%5B%5D' ;; 'data=null' ;; 'message=&x=1'
  'payload=%7B%22message%22%3A%22x%22%7D&payload=%7B%7D' ;; 'payload=%7B%22message%22%3A%22x%22%7D&x=1'
  -- payload = {"message":"x"} -- payload = {"message":"y"} ;; -- payload = {"message":"x"} -- data = {"message":"y"}
  -- x = {"message":"x"} ;; '--limit--\r\n' | Content-Type: multipart/form-data; boundary=limit ;; -- data = x
  -- message = \u0020 ;; -- message = x -- recipients = ;; -- message = x -- recipients.0 = +15550100003
  -- message = x -- f; filename=".." = x ;; -- message = x -- f; filename="${'x'.repeat(2000)}" = x
  -- message = x -- base64_attachments = data:a/b;filename=../x;base64,QUJD
  ${LOST_IN_FORMS.map((fields) => `'${fields}&message=x'`)}
  ${LOST_IN_FORMS.filter((fields) => !fields.includes(' ')).map((fields) => `'message=x&${fields}'`)}`;
table('a text, a form or a webhook without a credential, with a wrong one, or with one in a field is 401', hook())`
  * 'Backup done' → 401 unauthorized ;; * 'message=Backup done' → 401 unauthorized
  * -- message = Backup done → 401 unauthorized ;; * {"message":"x","number":2} → 401 unauthorized
  * {} → 401 unauthorized
  POST /v2/send ;; Authorization: ;; bearer ${OTHER}
  * → 401 unauthorized | reason=no_credential
  'Backup done&auth=${SECRET}' ;; 'message=Backup done&auth=${SECRET}' | Content-Type: ${URLENCODED}
  -- message = x -- auth = ${SECRET} ;; 'data=${AUTHED(SECRET)}' | Content-Type: ${URLENCODED}
  -- data = ${AUTHED(SECRET)} → WWW-Authenticate: Basic realm="signal", Bearer
  {"auth":"${OTHER}","number":2,"recipients":"x"} → reason=unknown_token
  -- message = x | Content-Encoding: gzip → 415 unsupported_encoding | reason=undefined`;

const SHOWS_ALL = hook(reading('{{auth}}{{.}}{{message}}'));
table(
  'a text or a webhook may have its token in each form, and neither the message nor the backend gets it',
  SHOWS_ALL,
)([
  `* → 201 | > Authorization: | ${MEANT}`,
  SPELLINGS.map(({ form, ask: make }) => {
    const message = form === 'body' ? `${HELLO}hello` : '{"message":"hi"}hi';
    return `${rowWith({ body: "'hi'", ...make(SECRET) })} → form=${form} | ${JSON.stringify({ message })}`;
  }),
]);

table(
  'for a token without defaults and message, the error for a text or a form at /v2/send names the settings that would accept it',
  {},
)`
  * bearer → 400 bad_json | ". To send text or a form, use a token with "defaults" or "message"."
  'Backup done' ;; 'message=x' ;; ' ' ;; -- message = x
  # Not where that would not help.
  * bearer → 400 bad_json
  '{"message"' → "it ends before the object is complete, at byte 10."," ;; 'x' | POST /v1/send → "it must begin with \"{\", at byte 0.","`;

/** A token that may send by GET, and the log fields of such a request. */
const BY_GET = hook({ allow: ['GET /v2/send'], defaults: DEFAULTS });

const GETS_IN_EACH_FORM = SPELLINGS.map(({ form, ask: make }) => {
  const row = rowWith(make(SECRET), 'GET').replace(/v2\/send\??/, 'v2/send?message=a%0Ab&');
  return `${row} → form=${form} | {"message":"a\\nb"}`;
});
const SENT_BY_GET =
  `→ 201 | Cache-Control: no-store | POST /v2/send | > Content-Type: application/json | method=GET | route=/v2/send | status=201 | ${MEANT}`;
table("GET /v2/send becomes a POST, if the token's allowlist spells it out, in each form of the token", {
  ...hook({ ...TO_ALL, allow: ['GET /v2/send'] }),
})`
  * bearer ${SENT_BY_GET}
  GET /v2/send?message=Front%20door → {"message":"Front door"} ;; GET /v2/send?message=Front+door → {"message":"Front door"}
  GET /v2/send?message=T%C3%BCr%0A%09offen%20%F0%9F%9A%AA → {"message":"Tür\n\toffen 🚪"}
  GET /v2/send?%6Dessage=x%0Ay → {"message":"x\ny"} ;; GET /v2/send?message=x&auth=${SECRET}&Auth=${OTHER} → {"message":"x"}
  GET /v2/send?message=x&number=%2B15550100003&recipients=+15550100003 → {"message":"x","number":"${THIRD}","recipients":["${THIRD}"]}
  GET /v2/send?recipients=+15550100003&message=x&&recipients=x.01&z=1&view_once= → {"message":"x","recipients":["${THIRD}","x.01"]}
  GET /v2/send?message='x'%26%3C%3E=&text_mode=styled → {"message":"'x'&<>=","text_mode":"styled"}
  # A GET has a body for its credential alone; what else it says is not looked at.
  * ${SENT_BY_GET}
  ${GETS_IN_EACH_FORM}`;

const KEPT: Handler = (req, res) => {
  const own = ['Cache-Control', 'public, max-age=60', 'Vary', 'Accept', 'Set-Cookie', 'a=1', 'Set-Cookie', 'b=2'];
  req.resume().on('end', () => res.writeHead(201, own).end('[]'));
};
table('the response to a sending GET may not be stored, whatever the backend responds, and loses none of its headers', {
  ...{ ...BY_GET, cors: ['https://dash.example'] },
}, { handler: KEPT })`
  * GET /v2/send?message=x | bearer | Origin: https://dash.example
  → 201 | Cache-Control: no-store | Vary: Origin, Accept | Set-Cookie: a=1, b=2`;

test('the response to a sending GET is the last one on its connection, also if it refuses the content', async (t) => {
  const { backend, gateway } = await startBoth(t, BY_GET);
  for (const [message, status] of [['x', 201], ['', 400]] as const) {
    const response = await raw(gateway, ABOUT.replace('/v1/about', `/v2/send?message=${message}`).repeat(2));
    assert.deepEqual([statusOf(response), response.match(/^HTTP\/1\.1/gm)!.length], [status, 1], response);
    for (const header of [/^connection: close\r$/im, /^cache-control: no-store\r$/im]) assert.match(response, header);
  }
  assert.equal(backend.seen.length, 1, 'the requests that the backend saw');
});

table('a sending GET that asks for an upgrade sends its message, and is not upgraded', BY_GET)`
  * ${MADE} | {"message":"x"} | > Upgrade:
  GET /v2/send?message=x | Connection: Upgrade | Upgrade: websocket | Sec-WebSocket-Key: x`;

table('attack: send by a GET that the allowlist does not spell out, or with a token that makes no sends', hook({}))`
  * bearer | @ {"defaults":${MEANT}} → 405 method_not_allowed
  * bearer | @ {"defaults":${MEANT},"allow":["send","info","messaging","setup"]} → 405 method_not_allowed
  * bearer | @ {"defaults":${MEANT},"allow":["POST /v2/send","GET /v2/*","GET /*","* /*"]} → 405 method_not_allowed
  * bearer | @ {"defaults":${MEANT},"allow":["GET /v2/:name","GET /*/send","* /v2/send"]} → 405 method_not_allowed
  * bearer | @ {"allow":["GET /v2/send","* /*"]} → 405 method_not_allowed
  * bearer | @ {"allow":["GET /v2/send","* /*"],"senders":["${FROM}"],"recipients":["${TO}"]} → 405 method_not_allowed
  GET /v2/send?message=x ;; GET /v2/send?message=x%0Ay ;; GET /v2/send ;; GET //v2/send/?message=x
  GET /@auth=${SECRET}/v2/send?message=x`;
table('attack: use a token for GET /v2/send beyond its rights, or send nothing, or without a recipient', BY_GET)`
  * bearer → 405 method_not_allowed
  PUT /v2/send ;; PATCH /v2/send ;; DELETE /v2/send ;; OPTIONS /v2/send ;; GET /v1/send?message=x
  * bearer → 403 endpoint_not_allowed
  ${HELLO} ;; 'hello' ;; POST /v1/send | ${HELLO} ;; GET /v1/about
  * bearer → 403 recipient_not_allowed
  GET /v2/send?message=x&recipients=%2B15559999999 ;; GET /v2/send?message=x&recipients=+15559999999
  GET /v2/send?message=x&recipients=%2B15550100002&recipients=${GROUP}
  GET /v2/send?payload=%7B%22message%22%3A%22x%22%2C%22recipients%22%3A%22%2B15559999999%22%7D
  GET /v2/send?message=x&number=%2B15559999999 → 403 sender_not_allowed
  * bearer → 400 bad_field
  GET /v2/send ;; GET /v2/send?message= ;; GET /v2/send?msg=x ;; GET /v2/send?message=x&recipients=
  GET /v2/send?message=x&Recipients=%2B15550100002 ;; GET /v2/send?message=x&recipient=%2B15550100002
  GET /v2/send?message=x&number=1 ;; none | GET /v2/send?message=x&auth=${SECRET} → 401 unauthorized
  * GET /v2/send?message=x | basic → 403 cross_site
  User-Agent: Mozilla/5.0 (X11; Linux x86_64) ;; Sec-Fetch-Site: cross-site | Sec-Fetch-Mode: no-cors
  Sec-Fetch-Site: none | Sec-Purpose: prefetch ;; Origin: http://gateway`;
table('attack: smuggle control characters through the query of a GET', BY_GET)`
  * bearer → 400 bad_target
  GET /v2/send?message=x%0D%0A ;; GET /v2/send?message=x%00 ;; GET /v2/send?message=x%1B%5B0m
  GET /v2/send?message=x%7F ;; GET /v2/send?message=x%C2%85 ;; GET /v2/send?message=x%FF
  GET /v2/send?message=x&number=%0A ;; GET /v2/send?message%0A=x ;; GET /v2/send?message=x&text=%09
  GET /v1/about?message=x%0Ay ;; GET /v1/send?message=x%0Ay ;; GET /v2%0A/send?message=x`;

/** Starts this many sends, each without the last byte of its MiB; one of them finds no room. */
async function holdAllBut(gateway: Gateway, count: number, fill: string, headers: http.OutgoingHttpHeaders) {
  const all = Array.from({ length: count }, () => beginSend(gateway, headers).on('error', () => {}));
  const answers = all.map((req) => once(req, 'response').then(([res]) => ({ req, res: res.resume() })));
  for (const req of all) req.write(fill.repeat(MIB - 1));
  const { req: refused, res } = await Promise.race(answers);
  assert.deepEqual([res.statusCode, res.headers['retry-after']], [503, '10']);
  assert.equal(requests(gateway).at(-1)!.code, 'busy');
  return { refused, held: all.filter((req) => req !== refused) };
}

test('at most 32 MiB of bodies are held for all connections together, and every path releases them', async (t) => {
  const { gateway } = await startBoth(t, hook());
  const countOf = (status: number): number => requests(gateway).filter((line) => line.status === status).length;
  for (const [fill, end, status] of [['x', 'x', 499], ['x', '\xff', 400], ['{', '{{', 413], ['x', 'x', 201]] as const) {
    // The others have room as soon as the refused one has released its share.
    const headers = { ...BEARER, ...(status !== 413 && { 'content-length': MIB }) };
    const { refused, held } = await holdAllBut(gateway, 33, fill, headers);
    // A body that is not held whole is not affected.
    const json = await ask(gateway, { path: '/v1/send', body: { ...MESSAGE, more: 'x'.repeat(MIB) }, headers: BEARER });
    assert.equal(json.status, 201);
    const before = countOf(status);
    for (const req of held) status === 499 ? req.destroy() : req.end(end, 'latin1');
    await until(() => countOf(status) === before + 32);
    refused.destroy();
  }
});

test('the body of a send in progress counts as held until its client disconnects, even if the send is shorter', async (t) => {
  const { backend, finish } = await startHolding(t);
  const gateway = await startGateway(t, backend, { ...hook(), backend: { url: backend.url, parallel: 64 } });
  const served: net.Socket[] = [];
  gateway.server.on('connection', (socket: net.Socket) => served.push(socket));
  const body = 'x'.repeat(MIB);
  const clients = Array.from({ length: 32 }, () => open(t, gateway, post(SECRET, MIB) + body));
  await until(() => backend.seen.length === 32);
  assert.equal(outcomeOf(await ask(gateway, { body, headers: BEARER })), '503 busy');
  for (const { socket } of clients) socket.destroy();
  for (const socket of served) await closed(socket);
  const answer = ask(gateway, { body, headers: BEARER });
  await until(() => backend.seen.length === 33 || requests(gateway).length > 1, 'the last send to reach the backend');
  finish();
  assert.equal(outcomeOf(await answer), '200');
});

// 1 MiB of JSON with such numbers is a send of 4.4 MiB. A form of control characters was one of 6 MiB.
test('a waiting send counts with its own length, even if the body was shorter', async (t) => {
  const { backend, finish } = await startHolding(t);
  const config = {
    ...tokens({ defaults: DEFAULTS }, { defaults: DEFAULTS }),
    backend: { url: backend.url, parallel: 1 },
  };
  const gateway = await startGateway(t, backend, config);
  const body = `{"message":"x","mentions":[${'1e20,'.repeat(MIB / 5 - 8)}1]}`;
  const headers = BEARER;
  const answers = [1, 2, 3, 4].map(() => ask(gateway, { body, headers }));
  const first = await Promise.race(answers); // three of them wait or are in progress, with 4.4 MiB each
  assert.deepEqual([first.status, first.json.code], [503, 'busy']);
  const other = ask(gateway, { body, headers: { ...headers, authorization: `Bearer ${OTHER}` } });
  await until(() => backend.seen.length === 1);
  finish();
  await until(() => backend.seen.length === 2);
  finish();
  await until(() => backend.seen.length === 3);
  finish();
  await until(() => backend.seen.length === 4);
  finish();
  await Promise.all([...answers, other]);
  assert.ok(backend.seen.every((seen) => seen.body.length < 5 * MIB), 'each is less than a third of a share');
  assert.equal((await other).status, 200);
});

// A single webhook's token repeatedly filled all of it with bodies that did not end.
test('with several tokens, one token gets at most half of the 32 MiB that are held', async (t) => {
  const { gateway } = await startBoth(t, tokens({ defaults: DEFAULTS }, { defaults: DEFAULTS }));
  const { held } = await holdAllBut(gateway, 17, 'x', { ...BEARER, 'content-length': MIB });
  assert.equal(requests(gateway).length, 1);
  const statusFor = async (headers: http.OutgoingHttpHeaders): Promise<number> =>
    (await ask(gateway, { body: 'x'.repeat(MIB), headers })).status;
  assert.equal(await statusFor({ authorization: `Bearer ${OTHER}` }), 201);
  for (const req of held) req.destroy();
  await until(() => requests(gateway).length === 18);
  assert.equal(await statusFor(BEARER), 201, 'it is released');
});

test('with three tokens, all of them together hold no more than 32 MiB', async (t) => {
  const settings = Object.entries(several('abc').tokens!).map((
    [name, token],
  ) => [name, { ...token, defaults: DEFAULTS }]);
  const { gateway } = await startBoth(t, { tokens: Object.fromEntries(settings) });
  for (const secret of [SECRET, OTHER, LAST]) {
    for (let i = 0; i < 11; i++) open(t, gateway, post(secret, MIB) + 'x'.repeat(MIB - 1));
  }
  await until(() => requests(gateway).length > 0, 'one of 33 bodies to be refused');
  assert.equal(outcomeOf(requests(gateway)[0]), '503 busy');
});

const MANY_KEYS = Array.from({ length: 90_000 }, (_, i) => `"${`k${i}`.padEnd(i < 20 ? 61 : 1, 'x')}":1`);
const SHOWN_KEYS = MANY_KEYS.slice(0, 20).map(() => '…').join(', ');
table('the response and the log name what a send lacks, with at most twenty short top-level keys', hook())`
  * bearer → 400 bad_field
  @ {"defaults":{}} | {"alerts":[],"status":"x"} → reason=no_message,no_number,no_recipients | "The send would lack message and number and recipients; the body's top-level keys are "alerts", "status". "
  @ {"defaults":{"number":"${FROM}"}} | {"message":"x","recipients":[]} → reason=no_recipients | "The send would lack recipients; the body's top-level keys are "message", "recipients". "
  @ {"defaults":{"recipients":["${TO}"]}} | {"message":"x","number":2} → reason=no_number | "lack number; the body's top-level keys are "message", "number". "
  {} ;; '' ;; ' \n' ;; 'message=' → reason=no_message | "The body is empty; post the message as text, as a form, or as JSON."
  {"message":" \n","text":"x"} → reason=no_message | "keys are "message", "text". "
  {"message":"","sticker":"","base64_attachments":[]} → reason=no_message | "keys are "message", "sticker", "base64_attachments". "
  @ {"message":" {{typo}}\n"} | {"message":"x","auth":"${SECRET}","\"\n":1} → reason=no_message | "keys are "message", "\"\n". "
  @ {"message":"{{title}}"} | 'Backup done' → reason=no_message | "keys are "message". Set what the webhook lacks in the token's "defaults", or in its "message" template if that found nothing in these keys."
  @ {"defaults":{},"message":"{{text}}"} | {"text":"x","number":"${FROM}"} → reason=no_recipients | "keys are "text", "number". "
  {${MANY_KEYS.slice(0, 20).join()}} → reason=no_message | "keys are ${SHOWN_KEYS}. "
  {${MANY_KEYS.join()}} → reason=no_message | "keys are ${SHOWN_KEYS}, and 89980 more. "`;

test('bytesOut of a refusal in the log is the length of its body, and 0 for a HEAD', async (t) => {
  const { gateway } = await startBoth(t);
  for (const method of ['GET', 'HEAD']) {
    const { text, status } = await ask(gateway, { method });
    assert.deepEqual([status, text === ''], [401, method === 'HEAD']);
    await until(() => requests(gateway).at(-1)?.method === method);
    assert.equal(requests(gateway).at(-1)!.bytesOut, text.length);
  }
});

test('what a client sends is not logged', async (t) => {
  const both = await startBoth(t, hook());
  await checkRows(both, ['* bearer', ['{"key1":"x"} → 400 bad_field', '{"message":"x1","key1":2} → 201']]);
  assert.ok(!/key1|x1/.test(both.gateway.log.join()), both.gateway.log.join());
});

const READS_AUTH = reading('{{author}}{{authority}}{{oauth}}{{.}}');
table('only "auth" is removed from a webhook, whatever its value and spelling', hook(READS_AUTH))`
  * ${MADE} | {"message":"{\"a\":1}"}
  {"auth":{"type":"oauth"},"a":1} ;; {"auth":1,"a":1} ;; {"Auth":"x","a":1}
  {"auth":"${OTHER}","AUTH":"${OTHER}","a":1,"\u0061uth":"${OTHER}"} ;; 'payload={"auth":"${OTHER}","a":1}'
  {"author":"a","authority":"b","oauth":"c","text":"payload=1"} → {"message":"abc{\"author\":\"a\",\"authority\":\"b\",\"oauth\":\"c\",\"text\":\"payload=1\"}"}`;

const HOOKED = hook({ senders: [FROM], recipients: [TO], allow: ['messaging'], defaults: DEFAULTS });
table('attack: use a webhook for what no body may do, or send from another account or to another recipient', HOOKED)`
  * bearer → 400 bad_field
  {"message":"x","recipients":["${TO}","group.*"]} ;; {"message":"x","recipients":["${TO}\n"]} ;; {"message":""}
  {"message":"x","link_preview":{"url":"https://a","base64_thumbnail":"data:a/b;filename=/x;base64,QUJD"}}
  * bearer → 403 sender_not_allowed
  {"message":"x","number":"${STRANGER}"} ;; -- data = {"message":"x","number":"${STRANGER}"}
  'payload={"message":"x","number":"${STRANGER.replace('+', '%2B')}"}'
  @ {"defaults":{"number":"${STRANGER}"}} | {"message":"x","recipients":["${TO}"]}
  * bearer → 403 recipient_not_allowed
  {"message":"x","recipients":["${TO}","${STRANGER}"]} ;; {"message":"x","recipients":["${GROUP}"]}
  {"message":"x","recipients":"${STRANGER}"}
  @ {"defaults":{"number":"${FROM}","recipients":["${TO}","${STRANGER}"]}} | {"message":"x"}
  # What a template reads as data reaches nobody.
  * @ {"message":"{{text}}"} | ${MADE} | {"message":"x"}
  {"text":"x","number":"${STRANGER}"} ;; {"text":"x","recipients":["${TO}","${STRANGER}"]}`;

const MIB_BODY = `{"text":"x","more":"${'y'.repeat(MIB - 22)}"}`;
table(
  'a message that is an object or a list is not a text, unless a template reads it',
  tokens({ defaults: DEFAULTS }),
)`
  * bearer → 400 bad_field
  {"message":{"text":"hi"}} → "The field \"message\" must be text, not an object or a list.","
  {"message":["a"]} → "must be text" ;; {"message":[]} → "must be text" ;; 'message=a&message=b' → "must be text"
  * bearer → 201
  {"message":5} ;; @ {"message":"{{message.text}}"} | {"message":{"text":"hi"}} → {"message":"hi","number":"${FROM}","recipients":["${TO}"]}`;
table(
  "a webhook's body is at most 1 MiB: 413 at once if Content-Length is larger, otherwise at the limit",
  hook(READS_TEXT),
)`
  * ${MADE} | {"message":"x"}
  ${MIB_BODY} ;; ${MIB_BODY} | Transfer-Encoding: chunked
  none | ${MIB_BODY.replace('{', `{"auth":"${SECRET}",`).replace('y'.repeat(50), '')}
  * POST /v2/send | bearer → 413 body_too_large | "larger than 1MiB, the most that this gateway accepts here."
  '${MIB_BODY} ' → bytesIn=0 ;; '${MIB_BODY} ' | Transfer-Encoding: chunked
  -- message = x -- f; filename="x" = ${'x'.repeat(MIB)}`;
const READS_NOTHING = tokens({ ...reading('never'), allow: ['messaging', 'info'] }, {});
table(
  'only a POST to /v2/send becomes a new send: other requests of the token, and other tokens, pass unchanged',
  READS_NOTHING,
)`
  * bearer
  GET /v1/about → 200 ;; POST /v1/send | ${HELLO} | Content-Type: text/plain → 201 | same | > Content-Type: text/plain
  PUT /v1/typing-indicator/${FROM} | {"recipient":"${TO}"} → 204 | same
  bearer ${OTHER} | {"more":1,${HELLO.slice(1)} → 201 | same`;

const WRITE_NUMBER = 'write "+", the country code and digits alone, in double quotes';
const IS_NO_RECIPIENT =
  'is not a phone number ("+" and 5 to 15 digits), a user name (name.01), a UUID or a group\'s id';
const ALONE = 'in "senders" and "recipients" it stands alone, for everyone';
const NO_TEMPLATE = 'message: must be a template: text with {{names}} in it, or a list of its lines';
/** Settings of a token, and their error messages. */
const BAD_SETTINGS = literal`
  {"defaults":[],"message":" \n"} ⇒ defaults: must be an object with number, recipients, text_mode ⇒ ${NO_TEMPLATE}
  {"defaults":"x","message":""} ⇒ defaults: must be an object with number, recipients, text_mode ⇒ ${NO_TEMPLATE}
  {"defaults":{"number":15550100001}} ⇒ defaults.number: 15550100001 is not "+" and 5 to 15 digits; ${WRITE_NUMBER}
  {"defaults":{"recipients":[]}} ⇒ defaults.recipients: must be a list with at least one entry
  {"defaults":{"text_mode":"bold"}} ⇒ defaults.text_mode: "bold" is not normal or styled
  {"defaults":{"recipient":"${TO}"}} ⇒ defaults.recipient: is not a setting; did you mean "recipients"?
  {"defaults":{"recipients":["${TO}","15550100002"]}} ⇒ defaults.recipients[1]: "15550100002" ${IS_NO_RECIPIENT}; ${WRITE_NUMBER}
  {"defaults":{"recipients":["group.*",1]}} ⇒ defaults.recipients[0]: "group.*" ${IS_NO_RECIPIENT} ⇒ defaults.recipients[1]: 1 ${IS_NO_RECIPIENT}; ${WRITE_NUMBER}
  {"defaults":{"recipients":["${`${TO}","`.repeat(70_000)}${TO}"]}} ⇒ defaults: is larger than 1MiB
  {"defaults":{"recipients":["*"]}} ⇒ defaults.recipients[0]: "*" ${IS_NO_RECIPIENT}; ${ALONE}
  {"senders":["*","${FROM}"]} ⇒ senders[0]: "*" is not "+" and 5 to 15 digits; ${ALONE}
  {"recipients":["group.*","*"]} ⇒ recipients[1]: "*" ${IS_NO_RECIPIENT.replace(' or ', ', ')} or group.*; ${ALONE}
  {"recipients":[["*"]]} ⇒ recipients[0]: ["*"] ${IS_NO_RECIPIENT.replace(' or ', ', ')} or group.*
  {"senders":[["*"]]} ⇒ senders[0]: ["*"] is not "+" and 5 to 15 digits
  {"senders":["group.*"]} ⇒ senders[0]: "group.*" is not "+" and 5 to 15 digits
  {"defaults":{"constructor":1},"message":[]} ⇒ defaults.constructor: is not a setting ⇒ ${NO_TEMPLATE}
  {"message":"a\n{{#x}}"} ⇒ message: line 2, column 1: "{{#x}}" has no "{{/x}}"
  {"message":["a","","b{{#x}}"]} ⇒ message: line 3, column 2: "{{#x}}" has no "{{/x}}"
${
  ['["{{x}}",1]', '["{{x}}",null]', '[["{{x}}"]]', '["","\\n"]', '{"0":"{{x}}"}'].map((message) =>
    `  {"message":${message}} ⇒ ${NO_TEMPLATE}`
  )
}
  {"default":{},"template":""} ⇒ default: is not a setting; did you mean "defaults"? ⇒ template: is not a setting`;
test("every mistake in a token's lists, defaults or message, an empty template too, is reported with its place", () => {
  for (const line of BAD_SETTINGS.trim().split('\n')) {
    const [token = '', ...problems] = line.trim().split(' ⇒ ');
    const found = problemsOf(() => createGateway(hook(JSON.parse(token))));
    assert.deepEqual(found, problems.map((problem) => `tokens.hook.${problem}`), token);
  }
});

const NESTED = hook(reading(`${'{{#a}}'.repeat(20)}{{b.c.d}}${'{{/a}}'.repeat(20)}`));
table('no webhook blocks the gateway for long, and the next send passes', NESTED)`
  * ${MADE} | {"message":"…"}
  {"a":[${'0,'.repeat(500_000)}0]} ;; {"a":[${'{},'.repeat(300_000)}{}]}
  * bearer → 400 bad_field
  {"a":"${'x'.repeat(1_000_000)}"} ;; {${Array.from({ length: 90_000 }, (_, i) => `"k${i}":1`).join()}}
  'payload=${'&payload='.repeat(100_000)}' ;; '${'a&'.repeat(500_000)}'
  ${'-- data = '.repeat(15_000)} ;; -- data = ${literal`\r\n--limi`.repeat(100_000)}
  * bearer → 400 bad_json
  'payload=${'%7B'.repeat(300_000)}' ;; -- data; x="${literal`\\"`.repeat(400_000)}" = {}
  * POST /v1/send | bearer → 201
  ${HELLO}`;

const SPELLED_ODDLY = 'recipients.0 recipients.0.number number.1 @recipients @number +recipient%E2%80%83'.split(' ');
const BY_FORM = hook({ allow: ['send', 'GET /v2/send'], defaults: DEFAULTS });
table(
  'attack: name two numbers and send from the default one, or misspell a recipient and send to the default one',
  BY_FORM,
)`
  * bearer → 400 bad_field
  ${inEachForm('message=hi&number=%2B15550100003&number=%2B15550100004')}
  ${inEachForm(`message=hi&number=%2B${FROM.slice(1)}&number=%2B${FROM.slice(1)}`)}
  ${SPELLED_ODDLY.flatMap((name) => inEachForm(`message=hi&${name}=%2B15550100003`))}
  'message=hi&recipients%00=%2B15550100003' ;; {"message":"hi","recipients.0":"+15550100003"}
  {"message":"hi","recipients\u0000":["+15550100003"]} ;; {"message":"hi","\u0001recipients":["+15550100003"]}
  {"message":"hi","\u0085\u0001number":"+15550100003"} ;; 'message=hi&%01recipients=%2B15550100003'
  'hi' | POST /v2/send?@recipients=%2B15550100003`;
const READS_NOTE = hook(reading('{{note}}|{{message}}'));
table('control characters go from every field of a form, the CR of line breaks too, but not from JSON', READS_NOTE)`
  * ${MADE} | {"message":"a\nbc|one\ntwo\n"}
  'message=one%0D%0Atwo%0D%0A%0D%0A&note=a%0D%0Ab%0Dc' ;; -- message = one\r\ntwo\r\n\r\n -- note = a\r\nb\rc
  * ${MADE} | {"message":"a\r\nb\rc|one\r\ntwo\r\n"}
  {"message":"one\r\ntwo\r\n\r\n","note":"a\r\nb\rc"}
  'payload={"message":"one\\r\\ntwo\\r\\n\\r\\n","note":"a\\r\\nb\\rc"}'`;

// A send scheduled for later would be sent at once. A large body that ends in send_at is tested in REQUEST BODY.
const LATER = 'bearer → 400 bad_field | "nothing is scheduled here"';
const BY_EITHER = hook({ allow: ['send', 'GET /v2/send'] });
table(
  'attack: have a relayed send sent at once although it is scheduled for later',
  BY_EITHER,
)`
  * ${LATER}
  ${['1', '"2030-01-01"', 'true', '{}', '[]', '[null]', '""'].map((at) => `{"send_at":${at},${HELLO.slice(1)}`)}
  ${['Send_At', 'ſend_at', 'SEND_AT', literal`send_a\u0074`].map((key) => `{"${key}":1,${HELLO.slice(1)}`)}
  POST /v1/send | {"send_at":1,${HELLO.slice(1)} ;; none | {"send_at":1,${AUTHED(SECRET).slice(1)}
`;
const LATER_AS_DATA = tokens({ allow: ['send', 'POST /v1/plugins/later'] }, reading('at {{send_at}}{{Send_At}}'));
table('send_at is data for a template, absent if it is null, and ignored on other routes', LATER_AS_DATA)`
  * bearer ${OTHER} → 201 | ${MEANT}
  {"send_at":5} → {"message":"at 5"} ;; {"Send_At":5} → {"message":"at 5"}
  'payload={"send_at":[5]}' → {"message":"at [5]"}
  * bearer → passes | same
  {"send_at":null,${HELLO.slice(1)} ;; {"resend_at":1,"more":{"send_at":1},${HELLO.slice(1)}
  POST /v1/plugins/later | {"send_at":1,"Send_At":2}`;

/**
 * The boundary, the heads of a field and of a file, what becomes of the file, and the program that writes this form.
 */
const HONEST = literal`
  ------------------------64c808f5fa53335a ¦ name="recipients" ¦ name="f"; filename="ü.png"\r\nContent-Type: image/png ¦ image/png;filename=ü ¦ curl
  x ¦ name="recipients"\r\nContent-Type: text/plain\r\nX-A: b ¦ name="f"; filename="a%22b.png" ¦ application/octet-stream;filename=a%22b ¦ curl, with a type and a header
  ----WebKitFormBoundary7MA4YWxkTrZu0gW ¦ name="recipients" ¦ name="f"; filename="C:\\ü.png"\r\nContent-Type: image/png ¦ image/png;filename=ü ¦ browsers
  ===1795320007953=== ¦ name="recipients"\r\nContent-Type: text/plain; charset=UTF-8 ¦ name="f"; filename="ü.png"\r\nContent-Type: image/png\r\nContent-Transfer-Encoding: binary ¦ image/png;filename=ü ¦ Node, and Java as in tutorials
  ***** ¦ name="recipients" ¦ name="größe"; filename="ü.png" ¦ application/octet-stream;filename=ü ¦ Android tutorials
  IjV-_.9; charset=UTF-8 ¦ name="recipients"\r\nContent-Type: text/plain; charset=ISO-8859-1\r\nContent-Transfer-Encoding: 8bit ¦ name="f"; filename="ü.png" ¦ application/octet-stream;filename=ü ¦ Apache's HttpClient
  b ¦ name="recipients"\r\nContent-Length: 12 ¦ name="f"; filename="ü.png"\r\nContent-Length: 1\r\nContent-Type: image/png ¦ image/png;filename=ü ¦ PHP's Guzzle, and OkHttp
  ${
  'b'.repeat(70)
} ¦ name="recipients" ¦ name="f"; filename="ü.png" ¦ application/octet-stream;filename=ü ¦ who uses all that RFC 2046 allows
  "7f0-a b" ¦ name=recipients\r\nContent-Type: text/plain; charset=utf-8 ¦ name=f; filename=ü.png; filename*=utf-8''%C3%BC.png ¦ application/octet-stream;filename=ü ¦ .NET`;
table(
  'a multipart form is read as common programs write it: fields, files, and their headers in any order',
  hook(TO_ALL),
)([
  `* ${MADE} | {"message":"a","recipients":["${THIRD}"]}`,
  HONEST.trim().split('\n').flatMap((line) => {
    const [boundary = '', field = '', file = '', made = ''] = line.trim().split(' ¦ ');
    const mark = `--${boundary.replace(/;.*|"/g, '')}`;
    return [false, true].map((isReversed) => {
      const parts = [['name="message"', 'a'], [field, THIRD], [file, '\\n-- ']].map(([head, value]) => {
        const lines = `${FIELD} ${head}`.split('\\r\\n');
        return `${mark}\\r\\n${(isReversed ? lines.reverse() : lines).join('\\r\\n')}\\r\\n\\r\\n${value}\\r\\n`;
      });
      const type = `Content-Type: multipart/form-data; boundary=${boundary}`;
      return `'${
        parts.join('')
      }${mark}--\\r\\n' | ${type} → {"base64_attachments":["data:${made}.png;base64,Ci0tIA=="]}`;
    });
  }),
]);

/** The processor time of a task in milliseconds: the minimum of several tries, or the first one if it is good. */
async function leastMs(goodMs: number, task: () => unknown): Promise<number> {
  let least = Infinity;
  for (let i = 0; i < 8 && least > goodMs && (i < 2 || least < 10 * goodMs); i++) {
    const before = process.cpuUsage();
    await task();
    const { user, system } = process.cpuUsage(before);
    least = Math.min(least, (user + system) / 1000);
  }
  return least;
}

/** A text of at most this many bytes: a beginning, a repeated piece, and an end. `######` is a piece's own number. */
function repeated(size: number, [first = '', piece = '', last = '']: readonly string[]): string {
  const room = size - Buffer.byteLength(first + last);
  let number = 100_000;
  const pieces = piece.repeat(Math.max(0, Math.floor(room / Buffer.byteLength(piece))));
  return first + pieces.replaceAll('######', () => `${number++}`) + last;
}

/**
 * Runs each row at a quarter of a size and at the full size, which may take at most twelve times as long. A quarter of
 * less than 15 ms counts as 15 ms. A nested loop would take sixteen times as long, and then minutes. The full size is
 * not run if even sixteen times the quarter would pass.
 */
async function assertLinear(
  rows: readonly (readonly string[])[],
  size: number,
  run: (text: string, row: readonly string[]) => unknown,
  limitMs = Infinity,
): Promise<void> {
  for (const row of rows) {
    const name = JSON.stringify(row.map((text) => text.slice(0, 60)));
    const goodMs = Math.min(limitMs, 40_000);
    const [quarter, whole] = [repeated(size / 4, row), repeated(size, row)];
    const quarterMs = await leastMs(30, () => run(quarter, row));
    assert.ok(quarterMs <= goodMs, `${name}: ${quarterMs} ms for a quarter`);
    const mostMs = Math.min(limitMs, 12 * Math.max(15, quarterMs));
    if (16 * quarterMs <= mostMs) continue;
    const wholeMs = await leastMs(mostMs, () => run(whole, row));
    assert.ok(wholeMs <= mostMs, `${name}: ${quarterMs} ms for a quarter, ${wholeMs} ms for the whole`);
  }
}

const PART = '--limit\r\ncontent-disposition:form-data;name=a';
/** Bodies that are held whole: the Content-Type, the beginning, the repeated piece, and the end. */
const LATE_BODIES = [
  // a multipart form: parts, their heads and values, boundaries
  ...[
    ['--limit', '\r\n', 'x\n--limit--\r\n'],
    ['--limit\r\nX: y', '\r\n\r\n', 'x\n--limit--\r\n'],
    ['', `${PART}\r\n\r\n\r\n`, '--limit--\r\n'],
    ['', `${PART};filename=a\r\n\r\n\r\n`, '--limit-'],
    ['', `${PART}######\r\n\r\n1\r\n`, '--limit--\r\n'],
    ['', '\n--limit', 'x'],
    ['', ' \r\n', 'x'],
    [PART, ' ', 'x\r\n\r\n\r\n--limit--\r\n'],
    [`${PART};`, ' ', 'x\r\n\r\n\r\n--limit--\r\n'],
    [`${PART};filename="`, '/', '\r\n\r\n\r\n--limit--\r\n'],
    [`${PART};filename=`, '/a', '\r\n\r\n\r\n--limit--\r\n'],
    [PART, '\r\nx:y', '\r\n\r\n\r\n--limit--\r\n'],
    ['--limit\r\ncontent-type:', ' ', '\r\n\r\n\r\n--limit--\r\n'],
    ['--limit\r\ncontent-transfer-encoding:', ' ', '\r\n\r\n\r\n--limit--\r\n'],
  ].map((row) => [AS_MULTIPART, ...row]),
  // a boundary that nearly matches everywhere
  [`multipart/form-data; boundary=${'a'.repeat(6000)}`, '', 'a', 'b'],
  [`multipart/form-data; boundary=${'a'.repeat(6000)}`, '', `\n--${'a'.repeat(5999)}`, 'b'],
  // an HTML form
  ...[
    ['message', '&a', '='],
    ['x=1', '&a=1', '%'],
    ['x=1', '&a=1', ' '],
    ['', '%', '='],
    ['x', '\n', 'y'],
    ['x', '\n ', 'y'],
    ['x', ';=', 'y'],
    ['x', '%0A', 'y'],
    ['message=x', ';=', ''],
    ['message=x', '\n"', ''],
    ['number[', ']', 'x=1'],
    ['number', ' ', 'x=1'],
    ['message=x', '&message=', ''],
    ['message=x', '&recipients=', ''],
    ['message=x', '&__proto__=1', '&'],
    ['message=x', '&', ''],
    ['message=x', '&a=1', ''],
    ['message=x', '&a######=1', ''],
    ['message=x', '&A######=1', ''],
    ['message=', '%0A', 'x'],
    ['x y', '\nz w', ''],
    [' ', '\t', 'number'],
    ['message=', '%01', '%'],
    ['message=', '\r\n', '\r'],
  ].map((row) => [URLENCODED, ...row]),
  // a text: colours, titles, links, character sets, control characters
  ...[
    ['', '\x1b[', '0'],
    ['\x1b[', '0', ''],
    ['\x1b[', '0 ', '\r'],
    ['', '\x9b0', ''],
    ['', '\x1b]', ''],
    ['\x1b]', 'a', ''],
    ['\x1b]', 'a\x1b', '\\'],
    ['', '\x1b ', ''],
    ['', 'a\x01', ''],
    ['', '\u20ac', '\x1b['],
    ['x', '\ny', ''],
  ].map((row) => ['text/plain', ...row]),
  // JSON
  ...[
    ['{"message":"', '\\n', '"'],
    ['{"message":"', '\\"', '"}'],
    ['{"message":"', '{', '"}'],
    ['{"message":"x"', ',"a":0', '}'],
    ['{"message":"x"', ',"a\\u0061":0', '}'],
    ['{"message":"x"', ',"a######":0', '}'],
    ['{"message":"x"', ',"\\u0061######":0', '}'],
    ['{"message":"x","a":[""', ',""', ']'],
    ['{"message":"x"', ' ', '}'],
    ['{"message":"x","a":["" ', '   ', ']}'],
    ['{"message":"x","recipients":["a"', ',"a"', ']}'],
    ['{"message":"x","recipients":["a"', ',"+15550100003"', ']'],
    ['{"message":"x","base64_attachments":["a"', ',"a"', ']}'],
    ['{"message":"x","base64_attachments":["a"', `,"${',;'.repeat(500)}"`, ']}'],
    ['{"message":"x","base64_attachments":["a"', `,"${';filename='.repeat(90)}"`, ']}'],
    ['{"message":"x","base64_attachments":["a"', ',"data:;base6,', ''],
    ['{"message":"x","a":[0', `,${'['.repeat(50)}${']'.repeat(50)}`, ']}'],
    ['{"', 'a', '":1}'],
    ['{"', '\\n', '":1}'],
    ['{"message":"x","a":', '1', '}'],
    ['{"a":[0', ',0', ']}'],
    ['{"a":[0', ',{"b":{"c":0}}', ']}'],
    ['{"a":[0],"b":[0', ',0', ']}'],
  ].map((row) => ['application/json', ...row]),
];

// A form with an empty line every two bytes blocked the process for 6 s (64 KiB) or minutes (1 MiB).
test(
  'attack: a body that fails late; one held whole takes at most 48 times as long as gathering its keys and parsing it; four times the length, twelve times as long',
  {
    isAlone: true,
  },
  async (t) => {
    const message = '{{#a}}{{#a}}{{#a}}{{b.c.d}}{{.}}{{/a}}{{/a}}{{/a}}{{b}}';
    const config = { ...tokens({ defaults: DEFAULTS }, { defaults: DEFAULTS, message }), limits: { body: '8MiB' } };
    const { gateway } = await startBoth(t, { ...config, log: { level: 'error' } });
    const agent = new http.Agent({ keepAlive: true });
    t.after(() => agent.destroy());
    const sample = repeated(MIB / 2, ['{"message":"x"', ',"a":0', '}']);
    const work = (): unknown =>
      new Set(Array.from(sample.matchAll(/"((?:[^"\\]|\\.)*)":/g), ([, key]) => key)).add(JSON.parse(sample));
    // For the second token a template reads the body: it sees JSON and forms.
    for (const token of [SECRET, OTHER]) {
      const bodies = LATE_BODIES.filter(([type]) => token === SECRET || type === URLENCODED || /json/.test(type!));
      const yardMs = Math.min(await leastMs(0, work), await leastMs(0, work), await leastMs(0, work));
      await assertLinear(bodies.map(([type = '', ...row]) => [...row, type]), MIB / 2, async (text, row) => {
        const headers = { 'authorization': `Bearer ${token}`, 'content-type': row[3] };
        const { status } = await ask(gateway, { body: text, headers, agent });
        assert.ok([201, 400, 403].includes(status), `${status}`);
      }, (isNode ? 48 : 96) * yardMs); // Deno takes twice as long for keys with escapes
    }
  },
);

test(
  'attack: a body that fails late while it streams, a target or a header; four times the length takes at most twelve times as long',
  {
    isAlone: true,
  },
  async (t) => {
    const json = LATE_BODIES.filter(([type]) => type === 'application/json').map(([, ...row]) => row);
    const config = {
      ...ALL_FORMS,
      trustedProxies: ['127.0.0.0/8'],
      cors: ['https://a.example'],
      log: { level: 'error' },
    };
    const { gateway } = await startBoth(t, { ...config, ...tokens({}) } as GatewayConfig);
    const agent = new http.Agent({ keepAlive: true });
    t.after(() => agent.destroy());
    await assertLinear(json, MIB, (text) => {
      const bytes = Buffer.from(text);
      const scan = new BodyScan('send');
      try {
        for (let at = 0; at < bytes.length; at += 65_536) {
          scan.write(bytes.subarray(at, at + 65_536));
          scan.takeFields();
          scan.takePassed();
        }
        scan.end();
      } catch { /* refused */ }
    });
    const targets = [
      ...['/a', '//', '/%41', '/@auth=', '/..', '/:'].flatMap((piece) => [['', piece, '/%'], ['/v1', piece, '']]),
      ...['&', '&a', '&a=', '=', '+', '?', '%41', '"', '&@auth', '&numbers='].flatMap((piece) => [
        ['/v1/search?a', piece, '%'],
        ['/v1/search?a', piece, ''],
      ]),
    ];
    await assertLinear(targets, 15_000, (target) => {
      for (let i = 0; i < 40; i++) {
        try {
          parseTarget('GET', target);
        } catch { /* refused */ }
      }
    });
    // Each header in turn, with tokens of its grammar; the last piece makes it fail.
    const headers: [name: string, ...pieces: string[]][] = [
      ['Authorization', ' ', '\t', 'Bearer ', 'a', 'a '],
      ['X-Forwarded-For', ',', ' ', '127.0.0.1,', '[', ']:1', '%F', '::ffff:', '1.', ':1', ', ::1%a'],
      ['Host', ':1', '[', ']', '.', '@', 'a.'],
      ['Origin', 'a', 'http://', ':', '-.'],
      ['Connection', ',', ' ', 'a,', ' ,'],
      ['Content-Encoding', ' ', 'identity', 'identity '],
      ['Access-Control-Request-Headers', ',', ' ,', 'accept,'],
      ['Content-Type', ' ', ';', 'multipart/form-data; ', 'charset=', '"', 'boundary=a;'],
      ['User-Agent', 'Mozilla/', ' '],
      ['Upgrade', 'websocket', ','],
      ['X-Other', '%25', '%', 'AAAA', '25', `${SECRET.slice(1)}`],
    ];
    const rows = headers.flatMap(([name, ...pieces]) => pieces.map((piece) => ['x', piece, 'x', name]));
    const cross = { origin: 'https://a.example', 'access-control-request-method': 'GET' };
    await assertLinear(rows, 15_000, async (text, [, , , name = '']) => {
      const more = /^Access/.test(name) ? cross : BEARER;
      const own = { ...more, ...(/^Content/.test(name) && { 'content-length': 2 }), [name.toLowerCase()]: text };
      for (let i = 0; i < 10; i++) {
        const isPost = /^Content/.test(name);
        const request: Ask = {
          method: /^Access/.test(name) ? 'OPTIONS' : 'GET',
          ...(isPost && { body: '{}', method: 'POST' }),
        };
        const answer = await ask(gateway, { ...request, headers: own, agent });
        assert.ok(answer.status < 500, `${name}: ${answer.status}`);
      }
    });
  },
);

section('TEMPLATES'); // ───────────────────────────────────────────────────────────────────────────
/**
 * Each case of the Mustache specification's modules for interpolation, sections, inverted sections and comments, in our
 * own words: what it shows, a template, the text, and the data. A * stands for each way to insert (nothing, "&", a
 * third brace), and ~ for each section that is shown (# with true, ^ with false). There is no HTML escaping here.
 */
const MUSTACHE = literal`
  no interpolation and basic interpolation ¦ The {disk} {{name}} is full}.\n ¦ The {disk} sda is full}.\n ¦ {"name":"sda"}
  HTML is not escaped ¦ {{*x}} ¦ & " < > ' \u0060 = ¦ {"x":"& \" < > ' \u0060 ="}
  integer, decimal, null and missing ¦ {{*n}}|{{*d}}|{{*z}}|{{*m}} ¦ 42|2.5|| ¦ {"n":42,"d":2.50,"z":null}
  standalone interpolation ¦   {{*n}}\n ¦   --\n ¦ {"n":"--"}
  surrounding white space and padding ¦ | {{*n}} |{{* n }}| ¦ | -- |--| ¦ {"n":"--"}
  dotted names ¦ {{*a.n}} = {{#a}}{{*n}}{{/a}} ¦ pi = pi ¦ {"a":{"n":"pi"}}
  implicit iterator, text ¦ <{{*.}}> ¦ <text> ¦ "text"
  implicit iterator, integer ¦ <{{*.}}> ¦ <85> ¦ 85
  dotted names: arbitrary depth ¦ {{a.b.c.d.e.f}} ¦ deep ¦ {"a":{"b":{"c":{"d":{"e":{"f":"deep"}}}}}}
  dotted names: broken chains ¦ [{{a.x.y}}][{{a.b.c}}][{{a.b.c.name}}] ¦ [][][] ¦ {"a":{"b":{}},"c":{"name":"other"}}
  dotted names: initial resolution ¦ {{#a}}{{b.c.n}}{{/a}} ¦ in ¦ {"a":{"b":{"c":{"n":"in"}}},"b":{"c":{"n":"out"}}}
  dotted names: context precedence ¦ [{{#a}}{{b.c}}{{/a}}] ¦ [] ¦ {"a":{"b":{}},"b":{"c":"outer"}}
  dotted names: leading dot ¦ [{{#a}}{{.n}}{{/a}}][{{#b}}{{.n}}{{/b}}] ¦ [][own] ¦ {"a":{"x":1},"b":{"n":"own"},"n":"up"}
  dotted names are never single keys, and mask none ¦ [{{a.b}}][{{c.d}}] ¦ [][d] ¦ {"a.b":"c","c.d":"c","c":{"d":"d"}}
  list indices ¦ {{a.0}}{{a.1.b}}[{{a.2}}] ¦ xy[] ¦ {"a":["x",{"b":"y"}]}
  section: truthy ¦ <{{#t}}1{{/t}}{{#s}}2{{/s}}{{#o.t}}3{{/o.t}}{{#o}}4{{/o}}> ¦ <1234> ¦ {"t":true,"s":"abc","o":{"t":true}}
  section: falsey ¦ <{{#f}}1{{/f}}{{#n}}2{{/n}}{{#o.f}}3{{/o.f}}{{#l}}4{{/l}}> ¦ <> ¦ {"f":false,"n":null,"o":{"f":false},"l":[]}
  section: zero, the empty text and what is missing ¦ <{{#a}}1{{/a}}{{#b}}2{{/b}}{{#c}}3{{/c}}{{#a.b.c}}4{{/a.b.c}}> ¦ <> ¦ {"a":0,"b":""}
  inverted: truthy ¦ <{{^t}}1{{/t}}{{^s}}2{{/s}}{{^o.t}}3{{/o.t}}{{^o}}4{{/o}}{{^l}}5{{/l}}> ¦ <> ¦ {"t":true,"s":"yes","o":{"t":true},"l":[{}]}
  inverted: falsey ¦ <{{^f}}1{{/f}}{{^n}}2{{/n}}{{^o.f}}3{{/o.f}}{{^l}}4{{/l}}> ¦ <1234> ¦ {"f":false,"n":null,"o":{"f":false},"l":[]}
  inverted: what is missing ¦ <{{^c}}1{{/c}}{{^a.b.c}}2{{/a.b.c}}> ¦ <12> ¦ {"a":{}}
  section: context and parent contexts ¦ {{#in}}{{a}} {{b}} {{c.d}}{{/in}} ¦ 1 2 3 ¦ {"a":1,"b":"no","in":{"b":2},"c":{"d":3}}
  section: variable test ¦ {{#x}}{{.}} is {{x}}{{/x}} ¦ this is this ¦ {"x":"this"}
  section: list contexts ¦ {{#as}}{{#bs}}{{n.low}}{{m}}.{{#cs}}{{n.up}}{{m}}{{l}}.{{/cs}}{{/bs}}{{/as}} ¦ k7.K7p.K7q. ¦ {"as":[{"n":{"up":"K","low":"k"},"bs":[{"m":"7","cs":[{"l":"p"},{"l":"q"}]}]}]}
  section: deeply nested contexts ¦ {{#a}}\n{{one}}\n{{#b}}\n{{one}}{{two}}\n{{#c}}\n{{three}}\n{{#d}}\n{{two}}{{four}}\n{{#five}}\n{{four}}{{.}}{{five}}{{one}}\n{{/five}}\n{{/d}}\n{{/c}}\n{{two}}\n{{/b}}\n{{/a}}\n ¦ 1\n12\n3\n24\n4551\n2\n ¦ {"a":{"one":1},"b":{"two":2},"c":{"three":3,"d":{"four":4,"five":5}}}
  section: list ¦ <{{#list}}{{n}}{{/list}}> ¦ <123> ¦ {"list":[{"n":1},{"n":2},{"n":3}]}
  section: doubled ¦ {{#on}}\na\n{{/on}}\n{{two}}\n{{#on}}\nc\n{{/on}}\n ¦ a\nb\nc\n ¦ {"on":true,"two":"b"}
  inverted: doubled ¦ {{^on}}\na\n{{/on}}\n{{two}}\n{{^on}}\nc\n{{/on}}\n ¦ a\nb\nc\n ¦ {"on":false,"two":"b"}
  section: nested, shown ¦ | A {{~on}}B {{~on}}C{{/on}} D{{/on}} E | ¦ | A B C D E | ¦ {"on":~}
  section: nested, not shown ¦ | A {{~on}}B {{~on}}C{{/on}} D{{/on}} E | ¦ | A  E | ¦ {"on":!~}
  implicit iterator: texts, integers and decimals ¦ {{#list}}({{.}}){{/list}} ¦ (a)(1)(2.2) ¦ {"list":["a",1,2.20]}
  implicit iterator: lists ¦ {{#list}}({{#.}}{{.}}{{/.}}){{/list}} ¦ (12)(x) ¦ {"list":[[1,2],["x"]]}
  implicit iterator: root level ¦ {{#.}}({{n}}){{/.}} ¦ (a)(b) ¦ [{"n":"a"},{"n":"b"}]
  surrounding white space ¦  | {{~on}}\t|\t{{/on}} | \n ¦  | \t|\t | \n ¦ {"on":~}
  internal white space ¦  | {{~on}} {{! a remark }}\n {{/on}} | \n ¦  |  \n  | \n ¦ {"on":~}
  indented inline sections ¦  {{~on}}A{{/on}}\n {{~on}}B{{/on}}\n ¦  A\n B\n ¦ {"on":~}
  standalone lines ¦ | One\n{{~on}}\n|\n{{/on}}\n| Two\n ¦ | One\n|\n| Two\n ¦ {"on":~}
  indented standalone lines ¦ | One\n  {{~on}}\n|\n\t{{/on}} \n2\n ¦ | One\n|\n2\n ¦ {"on":~}
  standalone line endings ¦ |\r\n{{~on}}\r\n{{/on}}\r\n| ¦ |\r\n| ¦ {"on":~}
  standalone without previous line ¦   {{~on}}\n#{{/on}}\n/ ¦ #\n/ ¦ {"on":~}
  standalone without newline ¦ #{{~on}}\n/\n  {{/on}} ¦ #\n/\n ¦ {"on":~}
  padding ¦ |{{~ on }}={{/\ton\n}}| ¦ |=| ¦ {"on":~}
  a tab after a standalone tag ¦ |\n{{~on}}\t\n|\n{{/on}}\t\n| ¦ |\n|\n| ¦ {"on":~}
  comment: inline, indented and multiline ¦ a{{! a remark! }}b\n  one {{! two }}\nthree{{!\n  a remark\n  of two lines\n}}c\n ¦ ab\n  one \nthreec\n ¦ {}
  comment: standalone ¦ One.\n{{! a remark }}\nTwo.\n  {{! a remark }}\nThree.\n ¦ One.\nTwo.\nThree.\n ¦ {}
  comment: standalone line endings ¦ |\r\n{{! a remark }}\r\n| ¦ |\r\n| ¦ {}
  comment: standalone without previous line ¦   {{! a remark }}\n! ¦ ! ¦ {}
  comment: standalone without newline ¦ !\n  {{! a remark }} ¦ !\n ¦ {}
  comment: multiline standalone ¦ One.\n{{!\nof several lines\n}}\nTwo.\n  {{!\n    of several lines\n  }}\nThree.\n ¦ One.\nTwo.\nThree.\n ¦ {}
  comment: variable name collision ¦ <{{! a }}|{{!a }}|{{!a}}> ¦ <||> ¦ {"! a":1,"!a":2,"a":3}
  an object inserts its JSON, true and false their names ¦ {{a}} {{#b}}{{.}} {{/b}}{{c}} ¦ {"x":[null,"ü"]} {"y":2} [] true false ¦ {"a":{"x":[null,"ü"]},"b":[{"y":2},[],true],"c":false}
  what is inserted is no template ¦ {{a}} {{#b}}{{.}}{{/b}} ¦ {{#b}}x{{/b}} {{a}} ¦ {"a":"{{#b}}x{{/b}}","b":"{{a}}"}
  what JavaScript adds to its values has no name ¦ [{{constructor}}{{__proto__}}{{a.length}}{{b.length}}{{b.0.1}}{{toString}}{{a.constructor.name}}{{#hasOwnProperty}}x{{/hasOwnProperty}}] ¦ [] ¦ {"a":[1,2],"b":["text"]}
  and data that has such names is data ¦ {{__proto__}}{{#constructor}}{{prototype}}{{/constructor}}{{length}}{{a.length}} ¦ ab65 ¦ {"__proto__":"a","constructor":{"prototype":"b"},"length":6,"a":{"length":5}}
  unusual names ¦ {{a-b}}{{@c}}{{:e}}{{ü.é}}{{a/b}} ¦ 12345 ¦ {"a-b":1,"@c":2,":e":3,"ü":{"é":4},"a/b":5}`;

test('a template inserts, repeats and omits as the Mustache specification requires', () => {
  for (const line of MUSTACHE.trim().split('\n')) {
    const variants = line.includes('{{*')
      ? ['', '&', '{'].map((way) => line.replace(/\{\{\*(.*?)\}\}/g, `{{${way}$1}}${way === '{' ? '}' : ''}`))
      : ['#', '^'].map((sigil) =>
        line.replaceAll('{{~', `{{${sigil}`).replace('!~', String(sigil === '^')).replace('~', String(sigil === '#'))
      );
    for (const variant of new Set(variants)) {
      const [, template = '', text = '', data = ''] = variant.split(' ¦ ');
      const rendered = render(String(unescaped(template)), JSON.parse(data));
      assert.equal(rendered, String(unescaped(text)), variant);
    }
  }
});

const NO_TEMPLATES = literal`
  Hello {{name ¦ 1, column 7: a "{{" has no "}}"
  {{ alerts[0].status }} ¦ 1, column 1: a tag has a bracket: write {{alerts.0.status}} for {{alerts[0].status}}
  {{#a[]}}{{/a[]}} ¦ 1, column 1: "{{#a[]}}" has a bracket: write {{alerts.0.status}} for {{alerts[0].status}}
  a\nb {{{name}} ¦ 2, column 3: "{{{name}}" has no name, or one with a space, a brace or an empty part in it
  a\r\n\r\n  {{#alerts}}\n{{x}} ¦ 3, column 3: "{{#alerts}}" has no "{{/alerts}}"
  {{#a}}{{^b}}x{{/b}} ¦ 1, column 1: "{{#a}}" has no "{{/a}}"
  x\n{{/a}} ¦ 2, column 1: "{{/a}}" closes a section that is not open
  {{#a}}\n {{#b}}\n  {{/a}}{{/b}} ¦ 3, column 3: "{{/a}}" stands where "{{/b}}" is expected
  ${
  '{{}} ¦{{ # }} ¦{{{}}} ¦{{a..b}} ¦{{a.}} ¦{{..}} ¦{{#if a}}'.split(' ¦').map((tag) =>
    `${tag}{{/if}} ¦ 1, column 1: "${tag}" has no name`
  )
}
  ü {{range .Alerts}} ¦ 1, column 3: "{{range .Alerts}}" has no name
  {{>part}} ¦ 1, column 1: "{{>part}}": partials, blocks and other delimiters are not supported
  ${['{{=<% %>=}}', '{{<a}}', '{{$a}}'].map((tag) => `${tag}{{/a}} ¦ 1, column 1: "${tag}": partials`)}
  a\n😀ü {{ ¦ 2, column 4: 
  ${'{{#a}}'.repeat(65)}${'{{/a}}'.repeat(65)} ¦ 1, column 385: sections are nested more than 64 levels deep
  {{{a}}\nb {{c}}\n{{{d}}} e ¦ 1, column 1: a tag has no name
  {{#a\u001b[31m\nb}} ¦ 1, column 1: "{{#a\u001b[31m\nb}}" has no name
  {{#${'a'.repeat(10_000)}}} ¦ 1, column 1: a tag has no a tag
  {{#a}}{{/\n}} ¦ 1, column 7: "{{/\n}}" has no name`;
test('an invalid template is refused with line and column, in a single line without control characters', () => {
  for (const line of NO_TEMPLATES.trim().split(/\n */)) {
    const [template = '', mistake] = line.split(' ¦ ');
    const isIt = ({ message }: Error): boolean =>
      message.startsWith(`line ${mistake}`) && /^\P{Cc}{9,250}$/u.test(message);
    assert.throws(() => new Template(String(unescaped(template))), isIt, line);
  }
});

test('a template cut at any position is valid or refused, and renders without an internal error', () => {
  const whole = 'a\n  {{#b}}\n{{{c.0}}}{{& d.e }} {{^.}}x{{/.}}\n  {{/b}}\r\n{{! f\n}}{{g}}';
  for (const part of Array.from(whole, (_, i) => [whole.slice(0, i), whole.slice(i)]).flat()) {
    try {
      new Template(part).render({ b: [{ c: ['y'] }, null, 1], g: {} });
    } catch (error) {
      assert.match(String(error), /^Error: line \d+, column \d+: /);
    }
  }
});

const render = (template: string, data: unknown): string => new Template(template).render(data).text;

test('a text is at most 64 KiB long, and a longer one is cut between characters, with an ellipsis', () => {
  const [whole, cut] = ['x'.repeat(LIMIT), `${'x'.repeat(LIMIT - 3)}…`];
  assert.equal(render('{{a}}', { a: whole }), whole);
  assert.equal(render('{{a}}', { a: `${whole}x` }), cut);
  assert.equal(render('{{a}}{{b}}', { a: whole, b: '' }), whole);
  assert.equal(render('{{a}}{{b}}', { a: whole, b: 'y' }), cut);
  assert.equal(render('{{#a}}line {{.}}\n{{/a}}', { a: Array.from({ length: 100_000 }, (_, i) => i) }).slice(-1), '…');
  for (const [i, char] of [...'ü€😀ü€😀ü€😀ü€😀'].entries()) {
    const [pad, text] = ['x'.repeat(i / 3), render('{{p}}{{a}}', { p: 'x'.repeat(i / 3), a: char.repeat(LIMIT) })];
    assert.ok(Buffer.byteLength(text) <= LIMIT && Buffer.byteLength(text) > LIMIT - 4, `${Buffer.byteLength(text)}`);
    assert.equal(text.replaceAll(char, ''), `${pad}…`);
  }
});

test('the work of rendering is bounded, and stops where the text is cut, however sections multiply', () => {
  // The whole text would be longer than a string can be.
  assert.equal(Buffer.byteLength(render('{{a}}'.repeat(1000), { a: 'x'.repeat(MIB) })), LIMIT);
  // A name costs more the deeper it is searched for.
  const nested = (depth: number, inner: string): string => `${'{{#a}}'.repeat(depth)}${inner}${'{{/a}}'.repeat(depth)}`;
  assert.equal(render(nested(60, '{{b}}'.repeat(1000)), { a: 1 }), '…');
  const a = Array<number>(100_000).fill(1);
  // Without a bound the first of these would take 10^15 steps, the second 10^50.
  assert.equal(render(nested(3, ''), { a }), '…');
  assert.equal(render(nested(10, '{{b}}'), { a }), '…');
  assert.equal(render(nested(1, `{{${Array<string>(10_000).fill('x').join('.')}}}`), { a }), '…');
  // Below the limit the work is the length of the data times that of the template.
  for (const n of [50, 100, 200]) {
    const data = { a: a.slice(0, n) };
    const text = render(nested(3, '.'), data);
    const isBounded = text.length < nested(3, '.').length * JSON.stringify(data).length;
    assert.ok(text.endsWith('…') && isBounded, `${text.length} of ${n ** 3}`);
  }
  // One pass through much data does not multiply.
  assert.equal(render('{{#a}}{{x}}{{#y}}{{z}}{{/y}}{{/a}}end', { a: a.map(() => ({ y: [{}] })) }), 'end');
});

section('POLICY'); // ──────────────────────────────────────────────────────────────────────────────
const TYPING = `PUT /v1/typing-indicator/${FROM}`;
const GROUPS = `/v1/groups/${FROM}`;
/** Fields of a send other than its recipients. */
const SAID = `"message":"hello","number":"${FROM}"`;
table('a confined token works for its intended requests', CONFINED)`
  * bearer → 201
  GET /v1/about → 200 ;; ${HELLO} ;; {${SAID},"recipients":["${TO}","${GROUP}"]} ;; {${SAID},"recipient":"${GROUP}"}
  GET /v1/receive/${FROM} → 200 ;; GET /v1/receive/%2B${FROM.slice(1)} → 200
  ${TYPING} | {"recipient":"${TO}"} → 204 ;; GET ${GROUPS}/${GROUP} → 200
  POST /v1/polls/${FROM}/vote | {"recipient":"${TO}","poll_timestamp":"1","selected_answers":[1]} → passes
  # What is not on "recipients" may not be written to, but read.
  @ {"recipients":["${TO}"]} | GET ${GROUPS}/${GROUP} → 200
  @ {"recipients":["${TO}"]} | GET ${GROUPS}/${GROUP}/avatar → 200`;
table('attack: send as another account, or read one', CONFINED)`
  * bearer → 403 sender_not_allowed
  {"number":"${STRANGER}","recipients":["${TO}"]} ;; POST /v1/send | {"number":"${STRANGER}","recipients":["${TO}"]}
  {"number":"${FROM} ","recipients":["${TO}"]} ;; {"number":"${FROM.slice(1)}","recipients":["${TO}"]}
  {"\u006eumber":"\u002b15559999999","recipients":["${TO}"]} ;; POST /v1/reactions/${STRANGER} | ${HELLO}
  GET /v1/receive/${STRANGER} ;; GET /v1/receive/%2B${STRANGER.slice(1)} ;; GET /%76%31/receive/${STRANGER}
  GET //v1//receive//${STRANGER}/ ;; GET /v1/groups/${STRANGER} ;; GET /v1/search/${STRANGER}?numbers=%2B1`;
table('attack: hide another sender or recipient behind an allowed one', CONFINED)`
  * bearer → 400 bad_field
  {"Number":"${STRANGER}",${HELLO.slice(1)} ;; {"number":"${STRANGER}",${HELLO.slice(1)}
  {"NUMBER":"${STRANGER}",${HELLO.slice(1)} ;; {"\u006eumber":"${STRANGER}",${HELLO.slice(1)}
  {"Recipients":["${STRANGER}"],${HELLO.slice(1)} ;; {"recipients":["${STRANGER}"],${HELLO.slice(1)}
  {"recipient":["${STRANGER}"],${HELLO.slice(1)} ;; {"recipient\u017f":["${STRANGER}"],${HELLO.slice(1)}
  {"recipientſ":["${STRANGER}"],${HELLO.slice(1)} ;; {"Recipient":"${STRANGER}",${HELLO.slice(1)}
  {"number":"${FROM}","recipients":"${STRANGER}"}`;
// The backend would choose one for /v1/send.
table('attack: send without naming an account', CONFINED)`
  * POST /v1/send | bearer → 400 bad_field ;; * POST /v2/send | bearer → 400 bad_field
  {"recipients":["${TO}"]} ;; {"recipients":["${TO}"],"number":null} ;; {"recipients":["${TO}"],"number":""}
  {"recipients":["${TO}"],"link_preview":{"number":"${FROM}"}}
  none | {"recipients":["${TO}"],"auth":"${SECRET}"} ;; {}`;
const AMONG_MANY = [...Array<string>(500).fill(TO), STRANGER, ...Array<string>(500).fill(TO)].join('","');
table(
  'attack: send to another recipient, in any place that the backend reads, or pass a person off as a group',
  CONFINED,
)`
  * bearer → 403 recipient_not_allowed
  {${SAID},"recipients":["${STRANGER}"]} ;; {${SAID},"recipients":["${TO}","${STRANGER}"]}
  {${SAID},"recipients":["${AMONG_MANY}"]} ;; {${SAID},"recipients":["${TO} "]}
  {${SAID},"recipients":["${TO.slice(0, 4)} ${TO.slice(4)}"]} ;; {${SAID},"recipients":["somebody.01"]}
  {${SAID},"recipients":["${randomUUID()}"]} ;; {${SAID},"recipients":["group"]} ;; {${SAID},"recipients":["Group.QUJD"]}
  {${SAID},"recipients":["${GROUP.toUpperCase()}"]} ;; {${SAID},"recipients":[" ${GROUP}"]}
  {"recipient":"${STRANGER}",${HELLO.slice(1)} ;; {${SAID},"recipient":"${STRANGER}"}
  POST /v1/send | {${SAID},"recipients":["${STRANGER}"]} ;; ${TYPING} | {"recipient":"${STRANGER}"}
  POST /v1/polls/${FROM} | {"recipient":"${STRANGER}","answers":["a"]}`;
const NAMING = ['messaging', 'info', '* /v1/groups/*'];
const NAMES_GROUPS = `@ ${JSON.stringify({ allow: NAMING })}`;
// With an invitation link anyone can join a group, and read what is sent there.
table('attack: let a stranger into a group, or add one using a token whose pattern names the route', CONFINED)`
  * bearer → 403 endpoint_not_allowed
  POST ${GROUPS} | {"name":"x","members":["${TO}"],"group_link":"enabled"}
  POST ${GROUPS} | {"name":"x","group_link":"enabled"} ;; PUT ${GROUPS}/${GROUP} | {"group_link":"enabled"}
  PUT //v1/groups/${FROM}/${GROUP}/ | {"permissions":{"add_members":"every-member"}}
  POST ${GROUPS}/${GROUP}/members | {"members":["${TO}"]} ;; DELETE ${GROUPS}/${GROUP}/members | {"members":["${TO}"]}
  POST ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]} ;; DELETE ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]}
  * bearer | ${NAMES_GROUPS} → 403 recipient_not_allowed
  POST ${GROUPS} | {"name":"x","members":["${TO}","${STRANGER}"]}
  POST ${GROUPS}/${GROUP}/members | {"members":["${STRANGER}"]} ;; POST ${GROUPS}/${GROUP}/admins | {"admins":["${STRANGER}"]}`;
table('a token without recipients may change a group, and so may one whose pattern names the route', {
  ...{ ...CONFINED, tokens: { ...CONFINED.tokens!, other: { secret: OTHER } } },
}, ANSWERING)`
  * bearer ${OTHER} → 200
  * bearer | ${NAMES_GROUPS} → 200
  POST ${GROUPS} | {"name":"x","members":["${TO}"],"group_link":"enabled"} ;; POST ${GROUPS} | {"name":"x","members":null}
  PUT ${GROUPS}/${GROUP} | {"group_link":"enabled"} ;; POST ${GROUPS}/${GROUP}/members | {"members":["${TO}"]}
  DELETE ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]}`;

const ONE_RECIPIENT = { ...CONFINED, ...tokens({ recipients: [TO] }) };
const sendTo = (name: string): string =>
  `{${SAID},"recipients":["${TO}","${name}"]} ;; ${TYPING} | {"recipient":"${name}"}`;
const ITS_LIST = literal`its list (\"recipients\", or else those in \"defaults\").`;
table(
  'recipient_not_allowed names the kind of the refused recipient, also in a path, but never the recipient',
  ONE_RECIPIENT,
)`
  * bearer → 403 recipient_not_allowed | "one of these recipients: a phone number that is not on ${ITS_LIST}","code""
  ${sendTo(STRANGER)}
  * bearer → 403 recipient_not_allowed | "${ITS_LIST} Write a phone number as \"+\" and digits only, such"
  ${[STRANGER.slice(1), '+1 555 999 9999', '+1 (555) 999-9999', '0555/9999'].map(sendTo)}
  * bearer → 403 recipient_not_allowed | "one of these recipients: a UUID that is not on ${ITS_LIST}","code""
  ${['0a1b2c3d-0405-4607-8809-0a0b0c0d0e0f', '0A1B2C3D-0405-4607-8809-0A0B0C0D0E0F'].map(sendTo)}
  * bearer → 403 recipient_not_allowed | "one of these recipients: a user name that is not on ${ITS_LIST}","code""
  ${sendTo('somebody.01')}
  * bearer → 403 recipient_not_allowed | "one of no known kind (phone number, user name such as name.01, UUID, group) "
  ${['Mum', 'Group.01', '0664x', 'somebody'].map(sendTo)}
  * bearer → 403 recipient_not_allowed | "one of these recipients: a group that is not on ${ITS_LIST}","code""
  ${sendTo(GROUP)} ;; DELETE ${GROUPS}/${GROUP} ;; POST ${GROUPS}/${GROUP}/join
  POST ${GROUPS}/${GROUP}/pin-message | {"target_author":"${TO}","timestamp":1}`;

table('sender_not_allowed explains how to write a number, if it was written differently', tokens({ senders: [FROM] }))`
  * bearer → 403 sender_not_allowed
  {"message":"x","number":"${STRANGER}","recipients":["${TO}"]} → "the number in \"defaults\").","
  {"message":"x","number":"${
  FROM.slice(1)
}","recipients":["${TO}"]} → "\"defaults\"). Write a phone number as \"+\" and digits"
  {"message":"x","number":"+1 555 0100001","recipients":["${TO}"]} → "\"defaults\"). Write a phone number as \"+\" and digits"`;

const groupOf = (id: string): string => `group.${Buffer.from(id).toString('base64')}`;
// Reactions decode leniently and pass the result to signal-cli as an argument (here "--username=evil.01"); receipts and
// remote-delete make a phone number from the digits.
const NO_GROUPS = [
  ...'LS11c2VybmFtZT1ldmlsLjAx,436641234567x,66412345a,01,123456789,,QUJD ,a b,ü,*,A-B'.split(',').map((id) =>
    `group.${id}`
  ),
  ...[`group.${INTERNAL_ID}`, `${GROUP}=`, `${GROUP} `, GROUP.replace('=', ''), GROUP.replace('=', '==')],
  // The same 32 bytes in other spellings, and other lengths.
  otherBits(GROUP),
  ...[Buffer.alloc(31).toString('base64'), Buffer.alloc(33).toString('base64')].map(groupOf),
  ...[INTERNAL_ID.replace('=', ''), otherBits(INTERNAL_ID)].map(groupOf),
];
const ROUTES_TO =
  'POST /v1/reactions,POST /v1/receipts,DELETE /v1/remote-delete,PUT /v1/typing-indicator,POST /v1/polls'.split(',');
table('attack: name an invalid group as a recipient, a member or an admin', { allow: ['messaging'] })`
  * bearer → 400 bad_field
  ${NO_GROUPS.map((name) => `POST ${GROUPS} | {"name":"x","members":["${TO}","${name}"]}`)}
  ${NO_GROUPS.map((name) => `POST ${GROUPS}/${GROUP}/admins | {"admins":["${name}"]}`)}
  * bearer → 400 bad_field
  * bearer | @ {"senders":["${FROM}"],"recipients":["${TO}","group.*"]} → 400 bad_field
  ${NO_GROUPS.map((name) => `{${SAID},"recipients":["${name}"]} ;; {${SAID},"recipient":"${name}"}`)}
  ${NO_GROUPS.map((name) => `POST /v1/send | {${SAID},"recipients":["${TO}","${name}"]}`)}
  ${ROUTES_TO.flatMap((route) => NO_GROUPS.slice(0, 3).map((name) => `${route}/${FROM} | {"recipient":"${name}"}`))}`;
const NO_IDS = [...NO_GROUPS, ...[INTERNAL_ID, GROUP.slice(6), 'LS11c2VybmFtZT1ldmlsLjAx', GROUP.replace('g', 'G')]]
  .map(encodeURIComponent).filter((id) => !/%(?:2f|2e|25)/i.test(id));
table("attack: turn a group's id in a path into an option of signal-cli", { allow: ['messaging', '* /*'] })`
  * bearer → 400 bad_target
  ${NO_IDS.map((id) => `POST ${GROUPS}/${id}/pin-message | {"target_author":"${TO}","timestamp":1}`)}
  ${NO_IDS.map((id) => `GET ${GROUPS}/${id}`)}`;
// With is_group, /v1/send decodes a recipient and passes the result to signal-cli as the argument of -g.
table('attack: smuggle an option through /v1/send', { allow: ['send'] })`
  * POST /v1/send | bearer → 400 bad_field
  ${['LS11c2VybmFtZT1ldmlsLjAx', 'LQ==', 'LWE='].map((id) => `{${SAID},"recipients":["${id}"],"is_group":true}`)}`;
table("a group's internal_id as a recipient is 400, and the error names the id to use", { allow: ['messaging'] })`
  * bearer → 400 bad_field | " holds a group's "internal_id"; its "id" is needed, which is "group.…"."
  {${SAID},"recipients":["${INTERNAL_ID}"]}
  POST /v1/send | {${SAID},"recipients":["${INTERNAL_ID}"],"is_group":true} ;; {${SAID},"recipient":"${INTERNAL_ID}"}
  POST ${GROUPS}/${GROUP}/members | {"members":["${INTERNAL_ID}"]}`;
const IN_A_COMMAND = `
  {"number":"VALUE","recipients":["${TO}"]} ;; {${SAID},"recipients":["${TO}","VALUE"]} ;; ${TYPING} | {"recipient":"VALUE"}
  POST /v1/receipts/${FROM} | {"recipient":"VALUE","recipients":["${TO}"]}
  POST ${GROUPS} | {"members":["VALUE"]} ;; POST ${GROUPS}/${GROUP}/admins | {"admins":["VALUE"]}
  POST /v1/polls/${FROM} | {"recipient":"${TO}","answers":["yes","VALUE"]}
  POST /v1/polls/${FROM}/vote | {"recipient":"${TO}","selected_answers":["VALUE"]}`;
table("attack: smuggle an option into signal-cli's command line", { allow: ['messaging'] })`
  * bearer → 400 bad_field
  ${
  literal`--help,-,,--config=/x,a\u0000b,a\nb,a\u007fb,\u0085`.split(',').map((value) =>
    IN_A_COMMAND.replaceAll('VALUE', value)
  )
}
  POST /v1/polls/${FROM}/vote | {"recipient":"${TO}","selected_answers":[-1]}
  GET /v1/search/${FROM}?numbers=%2B1555&numbers=--help ;; GET /v1/search?numbers= ;; GET /v1/search?numb%65rs=-x`;

const attachment = (data: string): string => `{"base64_attachments":["${data}"],${HELLO.slice(1)}`;
const preview = (value: string): string => `{"link_preview":${value},${HELLO.slice(1)}`;
const NO_NAMES = ['../../etc/cron.d/x', '/etc/passwd', 'a/b', 'a\\\\b', '..', '.', 'x\\u0000.png', '..\\\\x'];
table("attack: write a file outside the backend's folder", {})([
  '* bearer → 400 bad_field',
  ...NO_NAMES.flatMap((name) => [
    attachment(`QUJD","data:image/png;filename=${name};base64,QUJD`),
    `{"base64_attachment":"data:image/png;filename=${name};base64,QUJD",${HELLO.slice(1)}`,
    attachment(`filename=${name};data:;base64,QUJD`),
  ]),
  // The separators in the data are tested in BODY SCAN.
  listed`
    data:image/png;filename=good.png;filename=../bad;base64,QUJD ;; data:image/png;filename=..\u002fx;base64,QUJD
    data:x;base64,QUJD;filename=../x;base64,QUJD ;; data:x,y;filename=../x;base64,QUJD ;; data:x;filename=..,base64,QUJD
    data:x;filename=.,base64,base64,QUJD ;; data:x;filename=../../x, March.pdf;base64,QUJD
    data:x;filename=..xbase64,QUJD`.map(attachment),
  // The backend stores the thumbnail of a link preview in the same way. It drops one character before "base64,".
  listed`
    {"base64_thumbnail":"data:x;filename=../x;base64,QQ=="}
    {"title":"a, b; c","base64_thumbnail":"data:x;filename=../x;base64,QQ=="}
    {"base64_thumbnail":"QQ==","base64_thumbnail":"QQ=="} ;; {"Base64_thumbnail":"QQ=="}
    {"base64_thumbnail":["QQ=="]} ;; {"ba\u017fe64_thumbnail":"QQ=="}
    {"base64_thumbnail":"data:x;base64,QQ==;filename=../x;base64,QQ=="} ;; [] ;; "x"
    {},"Link_Preview":{"base64_thumbnail":"data:x;filename=../x;base64,QQ=="}`.map(preview),
]);
table('an attachment and a link preview with harmless names pass', {})([
  '* bearer → 201',
  listed`
    QUJD ;; data:image/png;base64,QUJD ;; data:image/png;filename=holiday..2026.png;base64,QUJD
    data:;filename=.hidden;base64,QUJD ;; data:text/plain;filename=grüße @home (1).txt;base64,QUJD
    data:application/pdf;filename=Invoice, March.pdf;base64,QUJD
    data:application/pdf;charset=x,y;filename=a;b/c, base64;base64,QUJD
    data:image\/png;base64,Q\u002B\/D`.map(attachment),
  listed`
    null ;; {} ;; {"base64_thumbnail":null,"x":{"base64_thumbnail":1}}
    {"title":"a, b; c","description":"number","base64_thumbnail":"data:image/png;filename=x.png;base64,QQ==","number":1}`
    .map(preview),
]);
// As a member, and on /v1/send, signal-cli reads "group.+4366…" as the phone number of its digits.
table("attack: address a person by a group's name where groups are not accepted", {
  ...{ allow: NAMING, ...tokens({ recipients: ['group.*', GROUP] }, {}) },
})`
  * bearer → 400 bad_field
  {${SAID},"recipients":["group.+4366412345678"]}
  POST /v1/receipts/${FROM} | {"recipient":"${GROUP}","receipt_type":"read","timestamp":1}
  POST /v1/receipts/${FROM} | {"recipient":"${GROUP}","receipt_type":"read","timestamp":1} | bearer ${OTHER}
  POST /v1/send | {${SAID},"recipients":["${GROUP}"]} ;; POST ${GROUPS} | {"name":"x","members":["${GROUP}"]}
  POST /v1/send | {${SAID},"recipients":["group.4366412345678a"],"is_group":false}
  POST ${GROUPS}/${GROUP}/members | {"members":["group.4366412345678="]}
  POST ${GROUPS}/${GROUP}/admins | {"admins":["group.4366412345678a"]}`;

section('BODY SCAN'); // ───────────────────────────────────────────────────────────────────────────
/** Pushes a chunk through a scanner, and returns what may be relayed after it. */
function write(scan: InstanceType<typeof BodyScan>, chunk: Buffer): Uint8Array[] {
  scan.write(chunk);
  return scan.takePassed();
}

/** Pushes a document through a scanner; `passed` is what may be relayed. */
function push(scan: InstanceType<typeof BodyScan>, chunks: Buffer[], passed: Uint8Array[] = []): Uint8Array[] {
  for (const chunk of chunks) passed.push(...write(scan, chunk));
  scan.end();
  passed.push(...scan.takePassed());
  return passed;
}

function scanAll(chunks: Buffer[], keepLength = false) {
  const scan = new BodyScan();
  scan.keepLength = keepLength;
  return { out: Buffer.concat(push(scan, chunks)).toString(), auth: scan.auth, fields: scan.takeFields() };
}

/** A document cut in two at every byte (a long one at every seventh), and cut into single bytes. */
function* everySplit(text: string | Buffer): Generator<Buffer[]> {
  const bytes = Buffer.from(text as string);
  const step = bytes.length > 2000 ? 7 : 1;
  for (let i = 0; i <= bytes.length; i += step) yield [bytes.subarray(0, i), bytes.subarray(i)];
  yield Array.from(bytes, (byte) => Buffer.from([byte]));
}

/** Bytes in pieces of one size. */
function cutInto(bytes: Buffer, size: () => number): Buffer[] {
  const chunks: Buffer[] = [];
  for (let at = 0; at < bytes.length; at += chunks.at(-1)!.length) chunks.push(bytes.subarray(at, at + size()));
  return chunks;
}

/** What a function returns or throws. */
function outcome(run: () => unknown): unknown {
  try {
    return run();
  } catch (error) {
    return error;
  }
}

/** Documents, by white space between them: ␊ is a line feed in one, ␠ a space, and so on. */
function documents(text: string): string[] {
  const control = (char: string): string => String.fromCharCode(char.charCodeAt(0) - 0x2400);
  return text.trim().split(/[ \n]+/).map((document) => document.replace(/[\u2400-\u2420]/g, control));
}

const LONG_TEXT = 'é'.repeat(300) + 'x'.repeat(300);
/** What it shows, a document, what is relayed if that differs, and the value of `auth`. */
const SCANNED = literal`
  white space stays, but what follows the end goes before the brace ¦ {␠␉}␠␍␊ ¦ {␠␉␠␍␊}
  no auth ¦ {"a":1,␠"b"␠:␠[true,false,null]␠,␠"c":{"d":{}}}
  an empty object ¦ {}
  auth alone ¦ {"auth":"${T}"} ¦ {} ¦ ${T}
  auth alone with white space ¦ {␠"auth"␠:␠"${T}"␠} ¦ {␠} ¦ ${T}
  auth first ¦ {"auth":"${T}","a":1} ¦ {"a":1} ¦ ${T}
  auth first with white space ¦ {␠"auth":"${T}"␠,␠"a":1␠} ¦ {␠␠"a":1␠} ¦ ${T}
  auth last ¦ {"a":1,"auth":"${T}"} ¦ {"a":1} ¦ ${T}
  auth last with white space ¦ {"a":1␠,␊␠"auth":"${T}"␊} ¦ {"a":1␠␊} ¦ ${T}
  auth in the middle ¦ {"a":1,"auth":"${T}","b":2} ¦ {"a":1,"b":2} ¦ ${T}
  auth with escapes ¦ {"\u0061uth":"a\"b\\c\u00e9\/\n","b":2} ¦ {"b":2} ¦ a"b\cé/␊
  auth in UTF-8 ¦ {"b":"ü","auth":"pässwörd€😀"} ¦ {"b":"ü"} ¦ pässwörd€😀
  an empty auth ¦ {"auth":""} ¦ {} ¦ 
  an auth that is null ¦ {"a":1,␠"auth"␠:␠null,"b":2} ¦ {"a":1,"b":2}
  a nested auth is not the gateway's ¦ {"a":{"auth":"x"},"b":[{"auth":"y"}]}
  auth as a value, and keys like it ¦ {"a":"auth","b":["auth"],"auths":"x","aut":"y","":"z","auth␠":"w"}
  a text that looks like auth ¦ {"a":"\",\"auth\":\"x\"","auth":"T"} ¦ {"a":"\",\"auth\":\"x\""} ¦ T
  all escapes ¦ {"a":"\"\\\/\b\f\n\r\t\u0000\uD83D\uDE00\ud800"}
  all numbers ¦ {"a":[0,-0,1,-1,10,1.5,-0.1,1e5,1E+5,1e-5,12.34e56]}
  a long key ¦ {"${'k'.repeat(600)}":1,"auth":"${T}"} ¦ {"${'k'.repeat(600)}":1} ¦ ${T}
  a long key that begins like one that matters ¦ {"auth${literal`\u0000`.repeat(60)}":1}
  a long text ¦ {"a":"${LONG_TEXT}","auth":"${T}"} ¦ {"a":"${LONG_TEXT}"} ¦ ${T}
  deep nesting ¦ {"a":${'['.repeat(63)}${']'.repeat(63)}}
  keys that matter only on top ¦ {"a":{"number":1,"recipients":"x","Recipients":2}}
  null under every key that matters ¦ {"base64_attachments":null,"base64_attachment":null,"number":null,"recipients":null,"recipient":null,"members":null,"admins":null,"answers":null,"selected_answers":null,"link_preview":null}`;

test('BodyScan: auth is removed and everything else is relayed, cut at every byte, whether the length is kept or not', () => {
  for (const line of SCANNED.trim().split('\n')) {
    const [name = '', ...texts] = line.trim().split(/ ¦ ?/);
    const [input, output = input, auth] = texts.map((text) => documents(text)[0]) as [string, string?, string?];
    for (const chunks of everySplit(input)) {
      const scanned = scanAll(chunks);
      assert.deepEqual([scanned.out, scanned.auth], [output, auth], name);
      const kept = scanAll(chunks, true).out;
      assert.equal(Buffer.byteLength(kept), Buffer.byteLength(input), `the length is kept: ${name}`);
      assert.deepEqual(JSON.parse(kept), JSON.parse(output), name);
      assert.ok(!kept.includes(T), name);
    }
  }
});

test('BodyScan: reports every field that matters, decoded, cut at every byte', () => {
  const document = literal`{"number":"\u002b4912","recipients":["+1","group.x","ü\n"],"recipient":"r","members":[],
    "admins":["a"],"answers":["y",1],"selected_answers":[0,2],
    "base64_attachment":"data:image/png;filename=a\u002fb.png;base64,QUJD\/\u002b","base64_attachments":["QUJD","data:;base64,QUJD","",
    "data:application/pdf;filename=Invoice, März; 1\u002e,base6,4.pdf;\u0062ase64,QUJD","no, data; here"],"x":"y"}`;
  // Of an attachment, only what precedes its data.
  const fields =
    literal`number=+4912|recipients=+1|recipients=group.x|recipients=ü␊|recipient=r|admins=a|answers=y|answers=1|
    selected_answers=0|selected_answers=2|base64_attachment=data:image/png;filename=a/b.png;base64|base64_attachments=QUJD|
    base64_attachments=data:;base64|base64_attachments=|base64_attachments=data:application/pdf;filename=Invoice, März; 1.,base6,4.pdf;base64|
    base64_attachments=no, data; here`.replace(/\n */g, '').replace('␊', '\n').split('|');
  for (const chunks of everySplit(document)) {
    const scanned = scanAll(chunks);
    assert.equal(scanned.out, document);
    assert.deepEqual(scanned.fields.map(({ key, value }) => `${key}=${value}`), fields);
  }
});

const DEEP = `{"a":${'{"a":'.repeat(70)}1${'}'.repeat(70)}}`;
const NOT_AN_OBJECT = [
  ...['', ' ', '{\u00a0}'],
  ...documents(literal`
  [] [{}] "text" 1 null true auth=x ${'\u{feff}'}{} { {" {"a {"a" {"a": {"a":1 {"a":1, {"a":1,} {,} {"a":1␠"b":2} {a:1}
  {'a':1} {"a"␠1} {"a"::1} {"a":} {"a":,} {"a":1}} {}{} {}␠x {}␀ {}] {"a":[} {"a":]} {"a":[1,]} {"a":[,1]} {"a":[1␠2]}
  {"a":{]} {"a":(1)} {"a":[1}] {"a":01} {"a":+1} {"a":.5} {"a":1.} {"a":1e} {"a":--1} {"a":1-1} {"a":0x1} {"a":NaN}
  {"a":Infinity} {"a":-} {"a":tru} {"a":True} {"a":nul} {"number":nul} {"recipients":nope} {"a":truefalse} {"a":1a}
  {"a":undefined} {"a":"␊"} {"a":"␉"} {"a":"␀"} {"a":"␟"} {"a␁":1} {"a":"\x"} {"a":"\u12"} {"a":"\u12g4"} {"a":"\U0041"}
  {"a":"\ {/**/} {"a":1}// ␋{} {␌} {"a":${'['.repeat(64)}${']'.repeat(64)}} ${DEEP}
  {"a":${'1'.repeat(300)}} {"auth":"x" {"auth":"x","a":1 {"auth":"x",}`),
];

/** Documents that are valid JSON, but that the backend would read differently than expected. */
const BAD_FIELDS = documents(literal`
  {"auth":1} {"auth":["x"]} {"auth":{}} {"auth":"x","auth":"x"} {"auth":"x","\u0061uth":"y"} {"Auth":"x"} {"AUTH":"x"}
  {"\u0041uth":"x"} {"auth":null,"auth":"x"} {"auth":"${literal`\u0041`.repeat(683)}"}
  {"number":1} {"number":["+1"]} {"number":true} {"number":"+1","number":"+2"} {"number":"+1","Number":"+2"}
  {"NUMBER":"+1"} {"recipients":"+1"} {"recipients":{}} {"recipients":[1]} {"recipients":[null]} {"recipients":[["+1"]]}
  {"recipients":[{"a":1}]} {"recipients":["+1",true]} {"recipients":1} {"recipients":["+1"],"recipients":["+2"]}
  {"recipients":["+1"],"Recipients":["+2"]} {"recipientſ":["+1"]} {"recipient\u017f":["+1"]} {"recipient\u017F":["+1"]}
  {"\u0052ecipients":["+1"]} {"recipients":false} {"recipients":["${'1'.repeat(4097)}"]} {"recipient":["+1"]}
  {"recipient":1} {"Recipient":"+1"} {"recipient":"+1","recipient":"+2"} {"memberſ":["x"]} {"admin\u017f":["x"]}
  {"ADMINS":[]} {"members":"x"} {"members":null,"members":["+1"]} {"base64_attachments":"x"} {"base64_attachments":[null]}
  {"base64_attachments":true} {"baſe64_attachments":[]} {"base64_attachment":["x"]}
  {"base64_attachments":[],"base64_attachments":[]} {"answers":[null]} {"answers":[true]} {"answers":["a"],"Answers":["-b"]}
  {"selected_answer\u017f":[1]} {"base64_attachments":["data:x;base64,AAAA;filename=../x;base64,QUJD"]}
  {"base64_attachments":["data:x;base64,AAAA\u003bfilename=x"]} {"base64_attachments":["data:x;base64\u002cQUJD"]}
  {"base64_attachments":["data:x;base64,AAAA\u003Bfilename=x"]} {"base64_attachments":["data:x;base64,AAAA\u002CQUJD"]}
  {"base64_attachments":["data:x;base64,QUJD,QUJD"]} {"base64_attachments":["base64,;"]} {"base64_attachments":[",base64,,"]}
  {"base64_attachments":["data:x;\u0062ase64,AA;filename=../x;base64,QUJD"]}
  {"base64_attachments":["${'A'.repeat(1024)};QUJD"]} {"base64_attachments":["data:${'a'.repeat(1024)};base64,QUJD"]}`);

for (const [code, all] of [['bad_json', NOT_AN_OBJECT], ['bad_field', BAD_FIELDS]] as const) {
  const late = code === 'bad_field' ? '; but for "auth", this waits while its sender is not known' : '';
  test(`BodyScan: a bad document is ${code} however it is cut, and nothing complete was relayed${late}`, () => {
    for (const document of all) {
      const waits = code === 'bad_field' && !/auth|u0061uth|u0041uth/i.test(document);
      for (const chunks of everySplit(document)) {
        const cut = `${document} cut into ${chunks.map(({ length }) => length)} bytes`;
        const passed: Uint8Array[] = [];
        assert.throws(() => push(new BodyScan(), chunks, passed), { code }, cut);
        assert.throws(() => JSON.parse(Buffer.concat(passed).toString()), SyntaxError, cut);
        const scan = new BodyScan();
        scan.defers = true;
        if (waits) push(scan, chunks);
        assert.throws(() => waits ? scan.takeFields() : push(scan, chunks), { code }, cut);
      }
    }
  });
}

test('BodyScan: invalid UTF-8 is bad_json at every split, valid UTF-8 passes at every split', () => {
  for (const hex of '80 c3 c080 e08080 eda080 f0808080 f4908080 f5 ff e282 f09f98'.split(' ')) {
    const document = Buffer.concat([Buffer.from('{"a":"'), Buffer.from(hex, 'hex'), Buffer.from('"}')]);
    for (const chunks of everySplit(document)) assert.throws(() => scanAll(chunks), { code: 'bad_json' }, hex);
  }
  const good = '{"a":"\u0080é߿ࠀ€\ud7ff\ue000￿𐀀😀\u{10ffff}"}';
  for (const chunks of everySplit(good)) assert.equal(scanAll(chunks).out, good);
});

randomTest('BodyScan: a random document is output as JSON.parse reads it, however it is cut', (random) => {
  const pick = <V>(values: V[]): V => values[random(values.length)]!;
  const space = (): string => pick(['', '', '', ' ', '\n', '\r\n\t ']);
  const spaced = (...tokens: string[]): string => tokens.map((token) => space() + token + space()).join('');
  const plain = ['a', 'é', '😀', '\\n', '\\u0041', '\\ud83d\\ude00', 'auth', ',', '{', '}', '['];
  const key = (letters = plain): string => `"${Array.from({ length: random(12) }, () => pick(letters)).join('')}"`;
  const value = (depth: number): string => {
    const kind = random(depth > 4 ? 3 : 5);
    // Not in keys: V8 in Node 24 and 26 mistakes the second of {"k\\\\":0} and {"k\\"":0} for the first.
    if (kind === 0) return key([...plain, '\\"', '\\\\']);
    if (kind === 1) return pick(['0', '-1', '1.5', '1e3', '-0.0E-2', '123456789012345678']);
    if (kind === 2) return pick(['true', 'false', 'null']);
    const inner = Array.from(
      { length: random(4) },
      () => kind === 3 ? spaced(value(depth + 1)) : spaced(key(), ':', value(depth + 1)),
    ).join(',');
    return kind === 3 ? `[${inner}]` : `{${inner || space()}}`;
  };
  for (let round = 0; round < 2000; round++) {
    const members = Array.from({ length: random(6) }, (_, i) => spaced(`"k${i}${key().slice(1)}`, ':', value(1)));
    const auth = random(2) ? `t${random(1000)}` : undefined;
    const own = spaced(pick(['"auth"', '"\\u0061uth"']), ':', `"${auth}"`);
    if (auth !== undefined) members.splice(random(members.length + 1), 0, own);
    const document = spaced(`{${members.join(',')}}`);
    const { auth: cut, ...expected } = JSON.parse(document) as Record<string, unknown>;
    const scanned = scanAll(cutInto(Buffer.from(document), () => 1 + random(20)), random(2) === 0);
    assert.deepEqual([JSON.parse(scanned.out), scanned.auth, cut], [expected, auth, auth], document);

    // One byte changed: the scanner accepts exactly what JSON.parse accepts as an object.
    const bytes = Buffer.from(document);
    bytes[random(bytes.length)] = pick([...Buffer.from('{}[],:"\\ 0e-+tfnu'), random(256)]);
    const verdict = outcome(() => scanAll([bytes]));
    const parsed = outcome(() => JSON.parse(new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes)));
    const isObject = Object.prototype.toString.call(parsed) === '[object Object]';
    const { code } = verdict as { code?: string };
    if (code !== 'bad_field') assert.equal(code, isObject ? undefined : 'bad_json', bytes.toString('latin1'));
  }
});

test('BodyScan: 64 MiB pass through without being kept', () => {
  const scan = new BodyScan();
  const chunk = Buffer.alloc(64 * 1024, 'QUJD');
  const lengthOf = (pieces: Uint8Array[]): number => pieces.reduce((sum, piece) => sum + piece.length, 0);
  let passed = lengthOf(write(scan, Buffer.from('{"base64_attachments":["data:image/png;filename=x.png;base64,')));
  const before = process.memoryUsage();
  for (let i = 0; i < 1024; i++) passed += lengthOf(write(scan, chunk));
  const after = process.memoryUsage();
  passed += lengthOf(push(scan, [Buffer.from('"]}')]));
  assert.equal(passed, 64 * MIB + 64, 'the bytes that passed');
  // Made for a native search and dropped at once; some may still wait for the collector.
  const kept = after.external + after.arrayBuffers - before.external - before.arrayBuffers;
  assert.ok(kept < 16 * MIB, `${kept} bytes are kept`);
});

// White space before a key is held until the key is known. If a client sent it byte by byte, an object was kept for
// each byte, and all were counted again with each byte.
test('a body that arrives in single bytes is held in few pieces', () => {
  for (const keys of ['all', 'none'] as const) {
    const scan = new BodyScan(keys);
    const out = ['{', ...' '.repeat(60_000)].flatMap((char) => write(scan, Buffer.from(char)));
    const released = push(scan, [Buffer.from('"a":1}')]);
    assert.ok(released.length < 100, `${released.length} pieces`);
    assert.equal(Buffer.concat([...out, ...released]).toString(), `{${' '.repeat(60_000)}"a":1}`);
    const blank = Array.from(`{${'\n'.repeat(70_000)}`, (char) => Buffer.from(char));
    assert.throws(() => push(new BodyScan(keys), blank), { message: /too much white space/ });
  }
});

// The limit was checked only once per chunk.
test('BodyScan: the limit of white space between members does not depend on the chunks', () => {
  for (
    const around of documents('{"a":1,#"b":2} {#"a":1} {"a":1,"auth"#:"x"} {"a":1,"auth":#"x"} {"a":[1,#2],#"b":#3}')
  ) {
    for (const size of [65_000, 65_520, 65_530, 65_533, 65_534, 65_535, 65_536, 65_537, 70_000, 200_000]) {
      const document = Buffer.from(around.replaceAll('#', ' '.repeat(size)));
      const verdicts = [document.length, 1000, 4096, 65_536, 65_537].map((step) => {
        const { message, out } = outcome(() => scanAll(cutInto(document, () => step))) as {
          message?: string;
          out?: string;
        };
        return String(message ?? out!.length);
      });
      assert.equal(new Set(verdicts).size, 1, `${around} ${size}: ${verdicts}`);
      if (size <= 65_520 || size > 65_536) assert.equal(verdicts[0]!.includes('white space'), size > 65_536, around);
    }
  }
});

test('the syntax of a document of any size is checked without its keys, and it passes unchanged', () => {
  const text = `{"auth":{"x":[]},"Auth":1,"auth":2,"number":3,"":4,"a":"${'x'.repeat(300_000)}"}`;
  const scan = new BodyScan('none');
  assert.equal(Buffer.concat(push(scan, [Buffer.from(text)])).toString(), text);
  assert.equal(scan.auth, undefined);
  const broken = Buffer.from(text.replace('"a":', '"a"'));
  assert.throws(() => new BodyScan('none').write(broken), { message: /expected a colon, at byte 54/ });
});

test('BodyScan: a special byte is found at every position of a long string, at even and odd addresses', () => {
  const ATTACHED = '{"base64_attachment":"base64,';
  const CONTROL = 'a string contains a control character, at byte ';
  const MARK = 'may have "," and ";" only before its data';
  for (
    const [before, special, after, refusal] of [
      ['{"a":"', '\x1f', '\n"}', CONTROL],
      ['{"a":"', '\\@', '\\"}', 'an unknown escape, at byte '],
      ['{"a":"', '"@', '"}', 'comma, or the closing bracket or brace, at byte '],
      [ATTACHED, '\0', '\n"}', CONTROL],
      ...[',', ';'].map((mark) => [ATTACHED, mark, '\n"}', MARK] as const),
    ] as const
  ) {
    for (let at = 0; at < 600; at++) {
      const text = `${before}${'A'.repeat(at >> 1)}${special}${'A'.repeat(299 - (at >> 1))}${after}`;
      const bytes = Buffer.alloc(text.length + 2).subarray(at & 1, (at & 1) + text.length);
      bytes.write(text);
      const where = refusal === MARK ? '' : `${before.length + (at >> 1) + special.length - 1}.`;
      assert.throws(() => scanAll([bytes]), ({ message }: Error) => message.includes(refusal + where), text);
    }
  }
});

section('RELAY'); // ───────────────────────────────────────────────────────────────────────────────
/** Starts a server, by default on a separate address and a free port, until the test ends. */
async function serve(t: TestContext, server: net.Server, port = 0, host = ownHost()): Promise<string> {
  const sockets: net.Socket[] = [];
  server.on('connection', (socket: net.Socket) => sockets.push(socket));
  server.listen(port, host);
  await once(server, 'listening');
  t.after(() => {
    server.close();
    for (const socket of sockets) socket.destroy();
  });
  return `http://${host.includes(':') ? `[${host}]` : host}:${(server.address() as AddressInfo).port}`;
}

type Respond = (socket: net.Socket, before: number) => void;

/**
 * A backend of raw bytes: `respond` is called for each complete request, with the number of requests before it on its
 * connection.
 */
async function startRawBackend(t: TestContext, respond: Respond) {
  const backend = { url: '', requests: [] as string[], sockets: [] as net.Socket[] };
  const server = net.createServer((socket) => {
    backend.sockets.push(socket);
    let [text, count] = ['', 0];
    socket.on('error', () => {}).on('data', (chunk) => {
      text += chunk.toString('latin1');
      const end = text.indexOf('\r\n\r\n') + 4;
      const length = end + Number(/content-length: (\d+)/i.exec(text)?.[1] ?? 0);
      if (end < 4 || text.length < length) return;
      backend.requests.push(text.slice(0, length));
      text = text.slice(length);
      respond(socket, count++);
    });
  });
  backend.url = await serve(t, server);
  return backend;
}

/** The same, with a gateway in front of it. */
async function startRaw(t: TestContext, respond: Respond, config: GatewayConfig = {}, options?: GatewayOptions) {
  const backend = await startRawBackend(t, respond);
  const own = { ...config, backend: { url: backend.url, wait: '0', ...config.backend } };
  return { backend, gateway: await startGateway(t, backend, own, options) };
}

const SENT = 'HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}';

/** The lines of a text, which bars separate. */
const barred = (text: string): string[] => text.trim().split(/\s*\|\s*/);

test('the IPv6 address and path prefix of a backend are kept, its userinfo becomes Basic, and no name in Connection removes them', async (t) => {
  const backend = await startBackend(t, ANY_ROUTE);
  const six = http.createServer((req, res) => void backend.server.emit('request', req, res));
  const { port } = new URL(await serve(t, six, 0, '::1'));
  const gateway = await startGateway(t, { url: `http://us%20er:p%40ss@[::1]:${port}/pre/fix/` });
  const got = `GET /pre/fix/v1/about?x=1 | > host: [::1]:${port} | > authorization: ${basic('us er:p@ss')}`;
  for (const names of ['x', 'authorization, x-forwarded-for, x-request-id, host, accept-encoding']) {
    await checkRows({ backend, gateway }, [
      `* bearer → 200 | ${got} | > x-forwarded-for: 127.0.0.1 | > accept-encoding: identity`,
      `/v1/about?x=1 | Connection: ${names}`,
    ]);
    assert.match(String(backend.seen.at(-1)!.headers['x-request-id']), /^[0-9a-f-]{36}$/);
  }
  assert.doesNotMatch(gateway.log.join(''), /p@ss|p%40ss/);
});

test('hop-by-hop headers are removed both ways, and so are headers that only the gateway may set', async (t) => {
  const back = `Connection: X-Hop-Back | X-Hop-Back: secret | Keep-Alive: timeout=1 | Proxy-Authenticate: Basic |
    Upgrade: h2c | X-End: to end | Set-Cookie: a=1 | Set-Cookie: b=2; Path=/ | X-Request-Id: its own | Content-Length: 2`;
  const backend = await startBackend(t, (_, res) => {
    res.writeHead(200, barred(back).flatMap((field) => field.split(': '))).end('{}');
  });
  const gateway = await startGateway(t, backend);
  const sent = `Authorization: Bearer ${SECRET} | Connection: X-Hop, x-forwarded-for, content-type | X-Hop: secret |
    Keep-Alive: 5 | TE: trailers | Trailer: X | Upgrade: h2c | Proxy-Authorization: Basic x | Proxy-Connection: close |
    Forwarded: for=1.2.3.4 | X-Forwarded-For: 1.2.3.4 | X-Forwarded-Host: evil | X-Forwarded-Proto: https |
    X-Forwarded-Prefix: /evil | X-Real-IP: 1.2.3.4 | X-Request-Id: forged | Accept-Encoding: gzip | X-End: to end |
    Cookie: c=3 | Referer: http://gateway/x | X-Original-URL: /x | X-Original-Anything: x | X-Rewrite-URL: /x |
    X-Envoy-Original-Path: /x | User-Agent: test/1`;
  const response = await rawRequest(gateway, '/v1/about', { headers: barred(sent) });
  const { 'x-request-id': id, ...headers } = backend.seen[0]!.headers;
  for (const name of ['connection', 'accept-language', 'sec-fetch-mode', 'accept']) delete headers[name]; // a runtime's
  const kept = { 'accept-encoding': 'identity', 'x-end': 'to end', 'user-agent': 'test/1' };
  const added = { 'x-forwarded-for': '127.0.0.1', 'x-forwarded-host': 'gateway', 'x-forwarded-proto': 'http' };
  assert.deepEqual(headers, { host: `${backend.host}:${backend.port}`, ...kept, ...added });
  assert.equal(id, requests(gateway)[0].requestId);
  assert.doesNotMatch(response, /x-hop-back|proxy-authenticate|upgrade|timeout=1|its own/i);
  assert.match(response, /\r\nset-cookie: a=1\r\nset-cookie: b=2; Path=\/\r\n/i);
  for (const field of [/\r\nx-end: to end\r\n/i, /\r\ncontent-length: 2\r\n/i]) assert.match(response, field);
});

// Added as documented, it was sent after the client's, and the backend read the forged one.
test("a header of the gateway's own that is added to the code replaces the client's", async (t) => {
  const added: Change = ["    ['x-request-id', requestId],\n", (text) => `${text}    ['x-token-name', 'its own'],\n`];
  const { createGateway } = await import(pathToFileURL(changedSource(t, added)).href) as typeof import('./gateway.ts');
  const backend = await startBackend(t);
  const gateway = await startGateway(t, backend, {}, {}, createGateway);
  const names = ['X-Token-Name', 'x-token-name', 'X-Request-ID', 'Accept-Encoding', 'X-Forwarded-Proto'];
  const forged = names.map((name) => `${name}: forged`);
  await rawRequest(gateway, '/v1/about', { headers: [`Authorization: Bearer ${SECRET}`, ...forged] });
  const seen = backend.seen[0]!.rawHeaders.map((text) => text.toLowerCase());
  assert.ok(!seen.includes('forged'), seen.join());
  for (const name of names) assert.equal(seen.filter((text) => text === name.toLowerCase()).length, 1, name);
  assert.equal(backend.seen[0]!.headers['x-token-name'], 'its own');
});

test('headers into which browsers and proxies copy a URL with its token are removed; a copy that a client puts elsewhere is not', async (t) => {
  const { backend, gateway } = await startBoth(t, ALL_FORMS);
  const kept = { 'x-other': OTHER, 'x-own': SECRET, 'user-agent': 'x', 'x-bad': '%zz%e4%' };
  for (const copy of copiesOf(SECRET)) {
    const answer = await ask(gateway, { path: `/v1/about?@auth=${SECRET}`, headers: { ...kept, ...copy } });
    assert.equal(answer.status, 200);
    const seen = backend.seen.at(-1)!.headers;
    for (const name of Object.keys(copy)) if (name !== 'host') assert.equal(seen[name], undefined, name);
    for (const [name, value] of Object.entries(kept)) assert.equal(seen[name], value);
    assert.equal(seen['x-forwarded-host'], 'host' in copy ? 'gateway' : `127.0.0.1:${gateway.port}`);
  }
});

const TOO_MANY = '431 too_many_headers';

// Each field of four bytes takes about seventy in memory. The hidden fields of a head can also define what follows it.
test('200 header fields pass, with any number of names in Connection; more are not kept, and are 431 and the end of all requests; two Host are 400', async (t) => {
  const { backend, gateway } = await startBoth(t);
  let most = 0;
  for (const event of ['request', 'upgrade']) {
    gateway.server.on(event, ({ rawHeaders }: http.IncomingMessage) => (most = Math.max(most, rawHeaders.length)));
  }
  const request = (fields: number, more: string): Promise<string> => {
    const names = Array.from({ length: 1000 }, (_, i) => `x-${i}`);
    const headers = [...names.slice(0, fields - 4).map((name, i) => `${name}: ${i}`), `Connection: close,${names}`];
    return raw(gateway, ABOUT.replace('\r\n\r\n', `\r\n${[more, ...headers].join('\r\n')}\r\n\r\n`));
  };
  const { socket, text } = openWebSocket(t, gateway, { headers: Array(201).fill('x: 1') });
  await closed(socket);
  assert.deepEqual([text(), await request(201, 'x-more: 1')].map(outcomeOf), Array(2).fill(TOO_MANY));
  const upgrade = 'Connection: Upgrade\r\nUpgrade: h2c\r\n';
  for (const fields of ['a:b\r\n'.repeat(2000), upgrade + 'a:b\r\n'.repeat(2000), upgrade.repeat(300)]) {
    const response = await raw(gateway, post(SECRET, SEND.length).replace('Content-Length', `${fields}$&`) + SEND);
    assert.deepEqual([outcomeOf(response), response.split('HTTP/1.1 ').length], [TOO_MANY, 2]);
    assert.match(response, /^connection: close\r$/im);
  }
  // Host was among the fields that node:http hides, and the missing Host was a 400.
  const hostless = await raw(gateway, `GET /v1/about HTTP/1.1\r\n${'a:b\r\n'.repeat(230)}Host: gateway\r\n\r\n`);
  assert.equal(outcomeOf(hostless), TOO_MANY);
  if (!('Deno' in globalThis)) assert.ok(most < 600, `${most}`); // Deno 2.9 keeps all
  for (const host of ['Host: other', 'HOST: gateway']) {
    assert.equal(outcomeOf(await request(10, host)), '400 bad_target');
  }
  for (const code of ['too_many_headers', 'bad_target']) {
    assert.ok(gateway.log.join().includes(`"code":"${code}"`), code);
  }
  assert.equal(backend.connections, 0);
  const passing = 'Bun' in globalThis ? 198 : 200; // Bun 1.4.5 refuses more before the gateway does
  assert.equal(statusOf(await request(passing, 'x-more: 1')), 200);
  const { headers } = backend.seen[0]!;
  assert.deepEqual([headers['x-more'], headers['x-0'], headers['x-193']], ['1', undefined, undefined]);
});

test('status, type and body are relayed as the backend sent them', async (t) => {
  let [status, type, body]: string[] = [];
  const backend = await startBackend(t, (req, res) => {
    req.resume();
    res.writeHead(Number(status), type === undefined ? {} : { 'Content-Type': type }).end(body);
  });
  const gateway = await startGateway(t, backend);
  const replies =
    `200 | text/plain; charset=utf-8 | [] ;; 201 | application/json | {"timestamp":"1"} ;; 201 ;; 204 ;; 304
    400 | text/plain | Couldn't process request - invalid request ;; 404 | text/plain | 404 page not found ;; 500
    429 | application/json | {"error":"rate limit","challenge_tokens":["a-b"],"account":"+1555"}
    418 | image/png | \x89PNG`;
  for (const reply of replies.split(/ ;; |\n/)) {
    [status, type, body] = barred(reply);
    const { text, headers, ...answer } = await ask(gateway, { body: MESSAGE, headers: BEARER });
    assert.deepEqual([answer.status, headers['content-type'], text], [Number(status), type, body ?? ''], reply);
    assert.equal(headers['retry-after'], undefined);
  }
});

/**
 * Responses that no correct backend sends. Clients used to get their garbage, a 500, or nothing at all. A row that the
 * gateway refuses, and not node:http, is named after the reason in the log.
 */
const LIES = String.raw`
  a length beside chunked: 201 Created | Content-Length: 2 | Transfer-Encoding: chunked | | 5 | hello | 0 | |
  chunked beside a length: 201 Created | Transfer-Encoding: chunked | Content-Length: 5 | | 5 | hello | 0 | |
  two lengths: 201 Created | Content-Length: 2 | Content-Length: 5 | | hello
  a length that is no number: 201 Created | Content-Length: 5x | | hello
  bad_length: 204 No Content | Content-Length: 5 | | hello
  bad_length: 205 Reset Content | Content-Length: 5 | | hello
  a header name with a space: 201 Created | Bad Name: x | Content-Length: 2 | | {}
  a header name that is none: 201 Created | B(ad): x | Content-Length: 2 | | {}
  a header value with a control character: 201 Created | X: a\x01b | Content-Length: 2 | | {}
  a reason with a control character: 201 Cre\x01ated | Content-Length: 2 | | {}
  a status of four digits, alone: 2000 OK | |
  a status of four digits: 2011 Created | Content-Length: 2 | | {}
  a status below 100: 099 Low | Content-Length: 2 | | {}
  compressed: 200 OK | Content-Encoding: gzip | Content-Length: 25 | | \x1f\x8b\x08\x00\x00\x00\x00\x00\x04\x03\x01\x02\x00\xfd\xff{}\x43\xbf\xa6\xa3\x02\x00\x00\x00
  compressed: 200 OK | Content-Encoding: gzip | Content-Length: 7 | | rubbish
  unasked_upgrade: 101 Switching Protocols | Connection: Upgrade | Upgrade: websocket | |
  redirect: 301 | Location: /v2/send | Content-Length: 0 | |
  redirect: 303 | Location: /v2/send | Content-Length: 0 | |
  redirect: 308 | Location: /v2/send | Content-Length: 0 | |
  no HTTP: rubbish | |`;

test('a redirect, a compressed body or a broken response of the backend is 502 with its reason in the log, without a retry, and the next response is unaffected', async (t) => {
  let lie: Buffer | undefined;
  const { backend, gateway } = await startRaw(t, (socket) => {
    socket.write(lie ?? SENT);
    lie = undefined;
  });
  for (const [name = '', response = ''] of LIES.trim().split(/\n\s*/).map((line) => line.split(/: (.*)/))) {
    lie = unescaped(`${/^\d/.test(response) ? 'HTTP/1.1 ' : ''}${barred(response).join('\r\n')}`);
    const before = backend.requests.length;
    const answer = await send(gateway, name);
    assert.deepEqual([outcomeOf(answer), answer.headers.location], ['502 bad_backend_answer', undefined], name);
    assert.match(answer.json.error, /may have been sent/);
    if (/_|redirect|compressed/.test(name)) assert.equal(requests(gateway).at(-1)!.reason, name, response);
    assert.equal(backend.requests.length, before + 1, name);
    const liar = backend.sockets.at(-1)!;
    const next = await send(gateway, name);
    assert.deepEqual([next.status, next.text], [201, '{}'], name);
    await closed(liar);
  }
  assert.deepEqual(gateway.log.filter((line) => line.includes('"stack"')), []);
});

// A response that declines a WebSocket was ended by the time-out for its headers.
test('a backend that is silent for backend.timeout is 504, or cut off in mid-response, and its request is aborted; a slow response is not cut off', async (t) => {
  const { backend, gateway } = await startRaw(t, (socket) => {
    const [request] = backend.requests.slice(-1) as [string];
    if (request.includes(RECEIVE)) socket.write('HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n');
    else if (request.startsWith('GET')) socket.write('HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf');
  }, { ...RECEIVING, backend: { timeout: '1s' } });
  const slow = wish(t, gateway);
  await until(() => backend.requests.length === 1);
  let isOver = false;
  const half = raw(gateway, ABOUT);
  const silent = Promise.all([HELLO, LARGE].map((body) => ask(gateway, { body, headers: BEARER })));
  void silent.then(() => (isOver = true));
  for (let dots = 1; !isOver; dots++) {
    backend.sockets[0]!.write('1\r\n.\r\n');
    await until(() => slow.text().split('1\r\n.\r\n').length > dots);
  }
  for (const answer of await silent) {
    assert.equal(outcomeOf(answer), '504 backend_timeout');
    assert.match(answer.json.error, /may have been sent/);
  }
  assert.match(await half, /half$/);
  backend.sockets[0]!.end('0\r\n\r\n');
  for (const socket of [...backend.sockets, slow.socket]) await closed(socket);
  assert.match(slow.text(), /\r\n0\r\n\r\n$/);
  await until(() => requests(gateway).length === 4);
  const outcomes = ['200 backend_timeout', '400', '504 backend_timeout', '504 backend_timeout'];
  assert.deepEqual(requests(gateway).map(outcomeOf).sort(), outcomes);
});

test("a truncated response closes the client's connection, also if it declines a WebSocket; without a length, a close completes the response", async (t) => {
  const { backend, gateway } = await startRaw(t, (socket) => void socket.write(`HTTP/1.1 ${head}`), RECEIVING);
  const chunked = 'Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n';
  const untilClose = '200 OK\r\nConnection: close\r\n\r\nhalf';
  let head = '';
  for (
    head of ['200 OK\r\nContent-Length: 100\r\n\r\nhalf', `200 OK\r\n${chunked}`, `400 No\r\n${chunked}`, untilClose]
  ) {
    for (const end of head === untilClose ? ['resetAndDestroy', 'end'] as const : ['end'] as const) {
      const [isWhole, before] = [head === untilClose && end === 'end', requests(gateway).length];
      const { socket, text } = head.startsWith('400') ? openWebSocket(t, gateway) : open(t, gateway, ABOUT);
      await until(() => text().includes('half'));
      backend.sockets.at(-1)![end]();
      await until(() => requests(gateway).length > before && (text().endsWith('\r\n0\r\n\r\n') || socket.closed));
      assert.match(text(), isWhole ? /half\r\n0\r\n\r\n$/ : /half(\r\n)?$/);
      const { code, status, level } = requests(gateway).at(-1)!;
      // The status is the one that the client saw, and the level that of the failure.
      const told = Number(head.slice(0, 3));
      assert.deepEqual(
        [code, level, status],
        isWhole ? [undefined, 'info', 200] : ['bad_backend_answer', 'error', told],
      );
    }
  }
});

test('without slots, a client that disconnects, also in mid-upload, ends its request to the backend, and is logged as 499', async (t) => {
  const backend = await startBackend(t, (req, _, seen) => void req.on('end', () => (seen.complete = true)).resume());
  const gateway = await startGateway(t, backend, { backend: { url: backend.url, parallel: 0 } });
  const cut = `${post(SECRET, LARGE.length)}${LARGE.slice(0, -1)}`;
  for (const bytes of [ABOUT, SEND, `${cut}}`, cut]) {
    const asked = once(backend.server, 'request') as Promise<[http.IncomingMessage]>;
    const { socket } = open(t, gateway, bytes);
    const [req] = await asked;
    await until(() => backend.seen.at(-1)!.complete || bytes === cut);
    socket.destroy();
    await closed(req.socket);
  }
  await until(() => requests(gateway).length === 4);
  for (const line of requests(gateway)) assert.deepEqual([line.status, line.code], [499, 'client_left']);
  assert.deepEqual(backend.seen.map(({ complete }) => complete), [true, true, true, false]);
});

// The backend's time-out continued while the client was the slow one, or restarted after its headers, and ended the
// response.
test("the backend's time-out is paused while the client is waited for, and a response that starts before the upload ends is delivered", async (t) => {
  let [begins, reads, finish] = [false, true, (): void => {}];
  const backend = await startBackend(t, (req, res, seen) => {
    if (req.url === '/v1/health') return; // no response: the client waits for backend.timeout
    if (!begins) return ANY_ROUTE(req, res, seen);
    if (reads) req.resume();
    res.writeHead(400).write('begin,');
    finish = () => res.end('end');
  });
  const gateway = await startGateway(t, backend, { backend: { url: backend.url, timeout: '1s' } });
  const upload = await beginLarge(gateway, backend);
  begins = true;
  for (reads of [false, true]) {
    const { socket, text } = open(t, gateway, `${post(SECRET, LARGE.length + 200_000)}${LARGE.slice(0, -3)}`);
    await until(() => text().includes('begin,'));
    socket.write('A'.repeat(200_000));
    finish();
    await until(() => text().includes('end'));
    socket.write('"]}'); // so nothing of the request is left to wait for
    if (reads) await until(() => text().endsWith('end\r\n0\r\n\r\n'));
    assert.equal(statusOf(text()), 400);
  }
  assert.equal(outcomeOf(await ask(gateway, { path: '/v1/health', headers: BEARER })), '504 backend_timeout');
  upload.end(LARGE.slice(-1));
  assert.equal(await statusFor(upload), 200);
});

// On Deno 2.9 it fails if connections are reused: of 300 requests 599 arrive.
test('nothing is sent twice if a reused connection ends by FIN or RST at any byte of the head', async (t) => {
  let [cut, way]: [number, 'end' | 'resetAndDestroy'] = [0, 'end'];
  const { backend, gateway } = await startRaw(t, (socket, before) => {
    if (before === 0) return void socket.write(SENT);
    socket.write(SENT.slice(0, cut), () => socket[way]());
  }, { allow: ['messaging', 'POST /v1/groups/:number/quit'] });
  const typing = `/v1/typing-indicator/${FROM} | {"recipient":"${TO}"}`;
  const rows = `GET ${RECEIVE} ;; ${HELLO} ;; POST /v1/groups/${FROM}/quit ;; PUT ${typing} ;; DELETE ${typing} ;;
    DELETE /v1/attachments/abc`.split(/ ;;\s+/).map((row) => parseRow(`bearer | ${row}`));
  for (way of ['end', 'resetAndDestroy'] as const) {
    for (const [i, row] of rows.entries()) {
      // Every sixth byte for each method, with another offset for the next.
      for (cut = i; cut < SENT.indexOf('\r\n\r\n') + 4; cut += rows.length) {
        for (let time = 0; time < 2; time++) await sendRow(gateway, row);
      }
    }
  }
  const ids = backend.requests.map((text) => /x-request-id: (\S+)/i.exec(text)![1]);
  assert.equal(new Set(ids).size, ids.length, 'a request came twice');
  assert.equal(requests(gateway).length, ids.length, 'a request never came');
});

// The connect timer continued while a large body was written, and its expiry was mistaken for a failed connection: the
// rest of the body was sent as a separate request, with whatever a crafted body had at its 64 KiB.
test('attack: a large send whose backend accepts the connection but reads nothing is not sent again', {
  skip: !isNode && 'the hook into the socket needs Node',
}, async (t) => {
  const backend = await startRawBackend(t, (socket) => void socket.write(SENT));
  const { port } = new URL(backend.url);
  const config = { ...CONFINED, backend: { url: backend.url, timeout: '2s', wait: '1m' } };
  const gateway = await startGateway(t, backend, config, { connectTimeoutMs: 200 });
  // The sockets to the backend accept no data, like those of a path that loses packets after the handshake.
  const proto = net.Socket.prototype as unknown as { _writeGeneric: (...args: unknown[]) => void };
  const write = proto._writeGeneric;
  const held: (() => void)[] = [];
  t.after(() => (proto._writeGeneric = write));
  proto._writeGeneric = function (this: net.Socket, ...args: unknown[]) {
    if (this.remotePort !== Number(port)) return write.apply(this, args);
    held.push(() => write.apply(this, args));
  };
  const inner = JSON.stringify({ message: 'torn', number: FROM, recipients: [STRANGER] });
  const begun = `{"message":"x","number":"${FROM}","recipients":["${TO}"],"mentions":`;
  const body = `${begun.padEnd(65_536)}${inner}${' '.repeat(200_000)}}`;
  const response = await raw(
    gateway,
    `${post(SECRET, 'chunked', 'Connection: close')}${body.length.toString(16)}\r\n${body}\r\n0\r\n\r\n`,
  );
  for (const release of held) release();
  await settled(gateway);
  assert.equal(outcomeOf(response), '504 backend_timeout');
  assert.equal(backend.sockets.length, 1);
  assert.deepEqual(backend.requests, []);
});

test('a client that reads nothing of its response is disconnected, and its request to the backend ends', async (t) => {
  const part = `10000\r\n${'x'.repeat(65_536)}\r\n`;
  const { backend, gateway } = await startRaw(
    t,
    (socket) => {
      const fill = (): void => {
        while (!socket.destroyed && socket.write(part));
      };
      socket.on('drain', fill).write('HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n');
      fill();
    },
    {},
    { stallTimeoutMs: 1000 },
  );
  open(t, gateway, ABOUT).socket.pause();
  await until(() => requests(gateway).length === 1);
  assert.equal(requests(gateway)[0].code, 'client_left');
  // At once, and not at the next garbage collection, which took half a minute on Deno 2.9.
  const late = new Promise((resolve) => setTimeout(resolve, 5000, 'late').unref());
  assert.notEqual(await Promise.race([closed(backend.sockets[0]!), late]), 'late');
});

// Node 26 would put such a connection back into its pool, and the bytes after a response that no correct backend sends
// could be read as the next response.
test('the connection of a refused backend response is not reused', async (t) => {
  const backend = await startBackend(t, (req, res) => {
    req.resume().on('end', () => res.writeHead(302, { 'Location': '/', 'Content-Length': 2 }).end('hi'));
  });
  const gateway = await startGateway(t, backend, tokens({}));
  for (let count = 1; count <= 3; count++) {
    assert.equal(outcomeOf(await ask(gateway, { headers: BEARER })), '502 bad_backend_answer');
    assert.equal(backend.connections, count);
  }
});

test('attack: smuggle a second request into the first', async (t) => {
  const { backend, gateway } = await startBoth(t, {}, { stallTimeoutMs: 1000 });
  const inner = `POST /v1/register/${FROM} HTTP/1.1 | Host: x | Content-Length: 0 | | `;
  const [size, last] = [HELLO.length, inner.replace('Host: x', 'Host: x | Connection: close')];
  const attempts = String.raw`
    Content-Length: ${size} | Transfer-Encoding: chunked | | 0 | | ${inner}
    Transfer-Encoding: chunked | Content-Length: 5 | | 0 | | ${inner}
    Content-Length: 0 | Content-Length: ${barred(inner).join('\r\n').length} | | ${inner}
    Content-Length: +5 | | 12345${inner}
    Transfer-Encoding: chunked, identity | | 0 | | ${inner}
    Transfer-Encoding : chunked | | 0 | | ${inner}
    Transfer-Encoding: xchunked | | 0 | | ${inner}
    X: a\r\n b | Content-Length: 0 | | ${inner}
    X: a\nContent-Length: 0 | | ${inner}
    Content-Length: ${size} | Connection: close | | ${HELLO}${inner}
    Content-Length: ${size} | | ${HELLO}${last}
    Transfer-Encoding: chunked | | ${size.toString(16)};x=" | ${HELLO} | 0 | | ${last}`;
  for (const attempt of attempts.trim().split('\n')) {
    const head = `POST /v2/send HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n`;
    assert.doesNotMatch(await raw(gateway, head + unescaped(barred(attempt).join('\r\n'))), / 201 [^]* 201 /);
  }
  for (const seen of backend.seen) assert.equal(seen.url, '/v2/send');
});

section('GATE AND SLOTS'); // ──────────────────────────────────────────────────────────────────────
/** This many slots, at a backend that requests do not wait for while it is down. */
function slots({ url }: { url: string }, parallel: number, timeout = '1h'): GatewayConfig {
  return { backend: { url, wait: '0', parallel, timeout } };
}

/** A backend that responds on demand and, like the real one, continues its work after the gateway has disconnected. */
async function startHeld(t: TestContext, parallel: number, config?: GatewayConfig, options?: GatewayOptions) {
  const waiting: http.ServerResponse[] = [];
  const base = await startBackend(t, (req, res, seen) => {
    const chunks: Buffer[] = [];
    req.on('data', (chunk: Buffer) => chunks.push(chunk)).on('end', () => {
      Object.assign(seen, { body: Buffer.concat(chunks), complete: true });
      if (res.headersSent) return;
      waiting.push(res);
      backend.most = Math.max(backend.most, ++backend.acting);
    });
  });
  /** Responds to the complete request that has been without a response for the longest time. */
  const answer = (how: 'end' | 'write' = 'end'): void => {
    backend.acting--;
    waiting.shift()!.writeHead(201, { 'Content-Type': 'application/json' })[how]('[]');
  };
  // How many requests are in progress, whether their clients are still connected or not, and the maximum so far.
  const backend = Object.assign(base, { answer, acting: 0, most: 0 });
  const all = { ...slots(backend, parallel), ...config };
  return { backend, gateway: await startGateway(t, backend, all, { slotTimeoutMs: 1e6, ...options }) };
}

type HeldBackend = Awaited<ReturnType<typeof startHeld>>['backend'];

/** Responds once for each send, so all of them are delivered. */
async function answerAll(backend: HeldBackend, sends: Promise<Answer>[]): Promise<void> {
  for (let i = 0; i < sends.length; i++) {
    await until(() => backend.acting > 0);
    backend.answer();
  }
  for (const answer of sends) assert.equal((await answer).status, 201);
}

function send(gateway: Gateway, message: string, secret = SECRET): Promise<Answer> {
  return ask(gateway, { body: { ...MESSAGE, message }, headers: { authorization: `Bearer ${secret}` } });
}

/** Many sends at the same time. */
function sendMany(gateway: Gateway, count: number): Promise<Answer>[] {
  return Array.from({ length: count }, (_, i) => send(gateway, `number ${i}`));
}

/** The messages that the backend has received completely. */
function arrived(backend: Backend): string[] {
  return backend.seen.filter(({ complete }) => complete).map(({ body }) => JSON.parse(body.toString()).message);
}

/** Resolves once the gateway has read everything that arrived before this. */
async function settled(gateway: Gateway): Promise<void> {
  await ask(gateway, { path: '/healthz' });
}

/** Sends one message after the other: each has reached the gateway before the next is sent. */
async function queueUp(gateway: Gateway, messages: string[], secret = SECRET): Promise<Promise<Answer>[]> {
  const answers: Promise<Answer>[] = [];
  for (const message of messages) {
    answers.push(send(gateway, message, secret));
    for (let i = 0; i < 3; i++) await settled(gateway);
  }
  return answers;
}

const LARGE = JSON.stringify({ ...MESSAGE, message: 'large', base64_attachments: ['A'.repeat(200_000)] });

/** A large send whose head has reached the backend, and whose last byte the client has not sent yet. */
async function beginLarge(gateway: Gateway, backend: Backend): Promise<http.ClientRequest> {
  const before = backend.seen.length;
  const req = listened(beginSend(gateway, { ...BEARER, 'content-length': LARGE.length }));
  req.write(LARGE.slice(0, -1));
  await until(() => backend.seen.length > before, 'the head of a large body to reach the backend');
  return req;
}

/** The status of each large send, listened for from the start because the response may arrive at any time. */
const STATUS = new WeakMap<http.ClientRequest, Promise<number>>();
function listened(req: http.ClientRequest): http.ClientRequest {
  const status = once(req.on('error', () => {}), 'response').then(([res]) => res.resume().statusCode as number);
  status.catch(() => {}); // the client may disconnect
  STATUS.set(req, status);
  return req;
}
const statusFor = (req: http.ClientRequest): Promise<number> =>
  within(STATUS.get(req)!, 'the response to a large body');

const LAST = 'a-third-secret-of-one';

/** Tokens by name, each with its own secret. */
function several(names: string): Pick<GatewayConfig, 'tokens'> {
  return { tokens: Object.fromEntries([...names].map((name, i) => [name, { secret: [SECRET, OTHER, LAST][i]! }])) };
}

test('the backend works on at most as many requests as there are slots, and 0 is no limit; no token of several holds all slots', async (t) => {
  for (const [names, parallel, most] of [['a', 1, 1], ['a', 2, 2], ['a', 0, 20], ['ab', 4, 3], ['ab', 1, 1]] as const) {
    const { backend, gateway } = await startHeld(t, parallel, several(names));
    const flood = sendMany(gateway, 20);
    await until(() => backend.acting === most);
    for (let i = 0; i < 3; i++) await settled(gateway);
    assert.equal(backend.acting, most);
    if (most < parallel) { // so another token's send is served at once
      flood.push(send(gateway, 'other', OTHER));
      await until(() => arrived(backend).includes('other'));
    }
    await answerAll(backend, flood);
    assert.equal(backend.most, Math.max(most, parallel));
  }
});

test('slots are assigned in the order of requests, and a reload to more or fewer slots takes effect', async (t) => {
  const { backend, gateway } = await startHeld(t, 1);
  const answers = await queueUp(gateway, [...'abcde']);
  await answerAll(backend, answers.slice(0, 3));
  await until(() => backend.acting === 1);
  assert.deepEqual(arrived(backend), [...'abcd']);
  gateway.reload(slots(backend, 2));
  await until(() => backend.acting === 2);
  await answerAll(backend, answers.slice(3));
  // Fewer: running requests are not affected, and the next one waits for both.
  const both = sendMany(gateway, 2);
  await until(() => backend.acting === 2);
  gateway.reload(slots(backend, 1));
  const last = await queueUp(gateway, ['h']);
  backend.answer();
  await Promise.race(both);
  await settled(gateway);
  assert.equal(backend.acting, 1);
  backend.answer();
  await Promise.all(both);
  await until(() => backend.acting === 1);
  assert.equal(arrived(backend).at(-1), 'h');
  await answerAll(backend, last);
  assert.ok(backend.connections > 0 && backend.connections <= 9, 'a reload keeps the connections');
});

test('a reload to another path or userinfo at the same address takes effect', async (t) => {
  const { backend, gateway } = await startBoth(t);
  for (const [url, path, user] of [['http://', '/new/', undefined], ['http://us:er@', '/', basic('us:er')]] as const) {
    gateway.reload({ backend: { url: `${backend.url.replace('http://', url)}${path}`, wait: '0' } });
    await ask(gateway, { path: '/v1/health', headers: BEARER });
    const { url: asked, headers } = backend.seen.at(-1)!;
    assert.deepEqual([asked, headers.authorization], [`${path}v1/health`, user]);
  }
});

test('a reload to another address with more slots serves the requests that wait at the old one at once', async (t) => {
  const { backend, gateway } = await startHeld(t, 1);
  const answers = await queueUp(gateway, ['a', 'b']);
  assert.deepEqual(arrived(backend), ['a']);
  gateway.reload({ backend: { url: (await startBackend(t)).url, parallel: 2 } });
  await until(() => backend.acting === 2, 'the send that waits for a slot at the old address');
  await answerAll(backend, answers);
});

test('a slot is released, however a request ends', async (t) => {
  const replies = `PUT /v1/typing-indicator/${FROM}: 204 No Content | |
    POST /v1/reactions/${FROM}: 200 OK
    POST /v1/receipts/${FROM}: 2000 OK | |
    DELETE /v1/remote-delete/${FROM}: 301 Moved Permanently | Location: /x | Content-Length: 0 | |
    POST /v1/polls/${FROM}: 200 OK | Content-Length: 9 | | half
    GET /v1/search: 500 Internal Server Error | Content-Length: 0 | |
    POST /v2/send: 201 Created | Content-Length: 2 | | []`.split(/\n\s*/).map((line) => line.split(/: (.*)/));
  const backend = await startBackend(t, (req) => {
    const [, reply] = replies.find(([asked]) => asked === `${req.method} ${req.url}`) ?? [];
    const response = reply && barred(`HTTP/1.1 ${reply.replace(' |', ' | Connection: close |')}`).join('\r\n');
    req.resume().on('end', () => response && req.socket.end(response));
  });
  const config = { ...slots(backend, 1), ...tokens({ allow: ['messaging', 'info'] }) };
  const gateway = await startGateway(t, backend, config, { slotTimeoutMs: 50 });
  const isFree = async (end: string): Promise<void> => assert.equal((await send(gateway, end)).status, 201, end);
  for (const [method, path] of replies.map(([asked]) => asked!.split(' '))) {
    for (const body of method === 'GET' ? [undefined] : [HELLO, LARGE, `${LARGE.slice(0, -1)},"number":"-x"}`]) {
      const request = { method: method!, path: path!, headers: BEARER, ...body && { body } };
      await ask(gateway, request).catch(() => {}); // a truncated response breaks the connection
      await isFree(`${method} ${path} ${body?.length}`);
    }
  }
  const upgrade = ['Connection: Upgrade', 'Upgrade: websocket', `Authorization: Bearer ${SECRET}`];
  await rawRequest(gateway, '/v1/search', { headers: upgrade });
  await isFree('a wish to be upgraded');
  for (const end of ['backend_timeout', 'client_left']) {
    if (end === 'backend_timeout') gateway.reload({ ...config, ...slots(backend, 1, '100ms') });
    const { socket } = open(t, gateway, ABOUT.replace('/v1/about', `/v1/groups/${FROM}`)); // gets no response
    await until(() => backend.seen.at(-1)!.url.startsWith('/v1/groups'));
    gateway.reload(config);
    if (end === 'client_left') socket.destroy();
    await until(() => requests(gateway).at(-1)!.code === end);
    await isFree(end);
  }
});

test('info, polls and WebSockets neither wait for a slot nor hold one; uploads before their last byte and responses after their head hold none', async (t) => {
  const { backend, gateway } = await startHeld(t, 1, { allow: ['messaging', 'info'] });
  const upload = await beginLarge(gateway, backend);
  const openGet = (path: string): Connection => open(t, gateway, ABOUT.replace('/v1/about', path));
  openGet('/v1/search');
  await until(() => backend.acting === 1);
  backend.answer('write');
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  const gets = ['/v1/about', '/v1/health', RECEIVE].map(openGet);
  await until(() => backend.acting === 4);
  const asked = once(backend.server, 'upgrade');
  openWebSocket(t, gateway);
  await asked; // and does not respond
  await answerAll(backend, [first]);
  const second = send(gateway, 'second');
  await until(() => backend.acting === 4);
  for (let i = 0; i < 3; i++) backend.answer();
  for (const { text } of gets) await until(() => statusOf(text()) === 201);
  await answerAll(backend, [second]);
  upload.end(LARGE.slice(-1));
  await until(() => backend.acting === 1);
  backend.answer();
  assert.equal(await statusFor(upload), 201);
});

test('the last byte of a large body waits for its slot without a time limit for its client, and needs no slot after the response', async (t) => {
  const { backend, gateway } = await startHeld(t, 1, {}, { stallTimeoutMs: 3000 });
  backend.server.keepAliveTimeout = 0; // only the gateway closes a connection
  const asked = once(backend.server, 'request') as Promise<[http.IncomingMessage, http.ServerResponse]>;
  const uploads = [await beginLarge(gateway, backend), await beginLarge(gateway, backend)] as const;
  const [{ socket: ofEarly }, early] = await asked;
  const sends = [send(gateway, 'first')];
  await until(() => backend.acting === 1);
  for (const upload of uploads) upload.end(LARGE.slice(-1));
  await settled(gateway);
  // Another client that makes no progress from now on is timed out.
  assert.match(await raw(gateway, `${post(SECRET, 100)}{`), / 408 /);
  assert.deepEqual(arrived(backend), ['first']);
  early.writeHead(400, { 'Content-Length': 2 }).end('{}');
  assert.equal(await statusFor(uploads[0]), 400);
  await closed(ofEarly, 'the connection of a request that is not written to its end to be closed');
  await settled(gateway);
  assert.deepEqual([backend.acting, backend.seen[1]!.complete], [1, false]);
  await answerAll(backend, sends);
  await until(() => backend.acting === 1);
  assert.equal(backend.seen[1]!.body.toString(), LARGE);
  backend.answer();
  assert.equal(await statusFor(uploads[1]), 201);
  assert.equal(backend.most, 1);
});

// The parser error ended the request that the backend was working on, with a 400, and released its slot, so one token
// could have any number of sends in progress.
test('attack: release the slot of a send by GET by garbage in its body', async (t) => {
  const own = { allow: ['send', 'GET /v2/send'], tokens: { a: { secret: SECRET, defaults: DEFAULTS } } };
  const { backend, gateway } = await startHeld(t, 1, own, { lingerMs: 20 });
  const begun = `GET /v2/send?message=first HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer ${SECRET}\r\n`;
  const { socket, text } = open(t, gateway, `${begun}Transfer-Encoding: chunked\r\n\r\n`);
  await until(() => backend.acting === 1);
  socket.write('zz\r\n');
  const next = send(gateway, 'next');
  for (let i = 0; i < 3; i++) await settled(gateway);
  assert.deepEqual([backend.seen.length, text()], [1, '']);
  backend.answer();
  await closed(socket);
  assert.equal(statusOf(text()), 201);
  await answerAll(backend, [next]);
  assert.deepEqual(requests(gateway).map(({ status }) => status).filter((status) => status !== 200), [201, 201]);
});

// The time counted from the arrival, so requests were sent in the last milliseconds, and then answered with 504.
test('a request without a slot within backend.timeout is 503 busy, and was not sent; its last byte restarts the time, so none is sent with no time left', async (t) => {
  const allow = ['messaging'];
  const { backend, gateway } = await startHeld(t, 1, { allow });
  const large = await beginLarge(gateway, backend); // under the old time-out
  large.end(LARGE.slice(-1));
  await until(() => backend.acting === 1);
  gateway.reload({ ...slots(backend, 1, '5s'), allow });
  const [second] = await queueUp(gateway, ['second']);
  const late = [{ body: MESSAGE }, { body: LARGE }, { path: `/v1/groups/${FROM}` }]
    .map((request) => ask(gateway, { ...request, headers: BEARER }));
  await pass(2000);
  backend.answer();
  assert.equal(await statusFor(large), 201);
  for (const answer of await Promise.all(late)) {
    assert.deepEqual([outcomeOf(answer), answer.headers['retry-after']], ['503 busy', '10']);
    assert.match(answer.json.error, /nothing was sent/);
  }
  assert.equal(outcomeOf(await second!), '504 backend_timeout');
  const { ms } = requests(gateway).find(({ code }) => code === 'backend_timeout')!;
  assert.ok(ms > 6900, `it was refused after ${ms} ms, of which it had waited 2000 for its slot`);
  assert.deepEqual(arrived(backend), ['large', 'second']);
});

// 40 clients that disconnected after 40 ms had 40 requests in progress despite a limit of 1.
test('a request whose client disconnects while waiting for a slot is not sent; later the slot is kept, and the final status is logged', async (t) => {
  for (const parallel of [1, 2]) {
    const { backend, gateway } = await startHeld(t, parallel);
    const clients = Array.from({ length: 40 }, () => open(t, gateway, SEND));
    await until(() => backend.acting === parallel);
    const large = await beginLarge(gateway, backend);
    large.end(LARGE.slice(-1));
    await settled(gateway);
    large.destroy();
    for (const { socket } of clients) socket.destroy();
    await until(() => requests(gateway).filter(({ code }) => code === 'client_left').length === 41 - parallel);
    const last = send(gateway, 'last');
    await settled(gateway);
    assert.equal(backend.acting, parallel);
    for (let i = 0; i < parallel; i++) backend.answer();
    await until(() => arrived(backend).includes('last'));
    await answerAll(backend, [last]);
    const counts = [backend.most, arrived(backend).length, backend.seen.length];
    assert.deepEqual(counts, [parallel, parallel + 1, parallel + 2]);
    const reasons = requests(gateway).filter(({ status }) => status === 499).map(({ reason }) => reason);
    assert.deepEqual(reasons, [...Array(41 - parallel).fill(undefined), ...Array(parallel).fill('answered_201')]);
  }
});

test('a request without a client is aborted when its slot is overdue, at once without slots, and when the gateway closes, which logs it', async (t) => {
  for (const [parallel, slotTimeoutMs, isEnd] of [[1, 100, false], [0, 1e6, false], [1, 1e6, true]] as const) {
    const { backend, gateway } = await startHeld(t, parallel, { shutdown: '1h' }, { slotTimeoutMs });
    const { socket } = open(t, gateway, SEND);
    const [req] = await once(backend.server, 'request') as [http.IncomingMessage];
    await until(() => backend.acting === 1);
    socket.destroy();
    if (isEnd) await gateway.close();
    await closed(req.socket);
    await until(() => requests(gateway).some(({ status, reason }) => status === 499 && reason === undefined));
    if (isEnd) return assert.equal(logLines(gateway.log).at(-1)!.message, 'stopped');
    void send(gateway, 'next').catch(() => {});
    await until(() => arrived(backend).includes('next'));
  }
});

test('a large send keeps its slot if its client disconnects after the last byte, and its bytes no longer count as unfinished', async (t) => {
  const { backend, gateway } = await startHeld(t, 1, { limits: { body: '1MiB' } });
  const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
  const large = await beginLarge(gateway, backend);
  const [served] = await accepted;
  large.end(LARGE.slice(-1));
  await until(() => backend.acting === 1);
  large.destroy();
  await closed(served);
  const [next] = await queueUp(gateway, ['next']);
  assert.deepEqual([backend.acting, arrived(backend)], [1, ['large']]);
  backend.answer();
  await until(() => arrived(backend).includes('next'));
  const reasons = requests(gateway).filter(({ status }) => status === 499).map(({ reason }) => reason);
  assert.deepEqual(reasons, ['answered_201']);
  await answerAll(backend, [next!]);
  // Three complete ones are more than twice limits.body, and the backend works on all of them.
  gateway.reload({ ...slots(backend, 3), limits: { body: '1MiB' } });
  const complete: Promise<Answer>[] = [];
  for (const acting of [1, 2, 3]) {
    complete.push(ask(gateway, { body: sized(MIB), headers: BEARER }));
    await until(() => backend.acting === acting, `upload ${acting} to reach the backend`);
  }
  await answerAll(backend, complete);
});

test('a large body that ends in white space waits for its slot like any other', async (t) => {
  const { backend, gateway } = await startHeld(t, 1);
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  const large = listened(beginSend(gateway, { ...BEARER, 'content-length': LARGE.length + 2 }));
  large.end(`${LARGE}\r\n`);
  await until(() => backend.seen.length === 2);
  for (let i = 0; i < 3; i++) await settled(gateway);
  assert.equal(backend.acting, 1);
  await answerAll(backend, [first]);
  await until(() => backend.acting === 1);
  backend.answer();
  assert.equal(await statusFor(large), 201);
  assert.equal(backend.most, 1);
});

test('a large send whose last byte is late goes before requests that arrived after its start', async (t) => {
  const { backend, gateway } = await startHeld(t, 1);
  const large = await beginLarge(gateway, backend);
  const sends = await queueUp(gateway, ['first', 'second', 'third']);
  large.end(LARGE.slice(-1));
  for (let i = 0; i < 3; i++) await settled(gateway);
  await answerAll(backend, [sends[0]!]);
  await until(() => backend.acting === 1);
  backend.answer();
  assert.equal(await statusFor(large), 201);
  await answerAll(backend, sends.slice(1));
});

test('a client that disconnects while its slot is overdue, and could not be lent, does not affect the others', async (t) => {
  const { backend, gateway } = await startHeld(t, 1, {}, { slotTimeoutMs: 50 });
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  const { socket } = open(t, gateway, SEND);
  await until(() => backend.acting === 2); // in addition to the first, whose slot is lent
  await pass(500); // its slot is overdue too
  socket.destroy();
  await until(() => requests(gateway).some(({ status }) => status === 499));
  await answerAll(backend, [first]);
  backend.answer(); // to no client
  await answerAll(backend, [send(gateway, 'last')]);
  assert.deepEqual(linesOf(gateway, /internal error/), []);
});

test('a request whose slot is lent ends when its client disconnects', async (t) => {
  const { backend, gateway } = await startHeld(t, 1, {}, { slotTimeoutMs: 50 });
  const asked = once(backend.server, 'request') as Promise<[http.IncomingMessage]>;
  const { socket } = open(t, gateway, SEND);
  const [req] = await asked;
  await until(() => backend.acting === 1);
  void send(gateway, 'next').catch(() => {});
  await until(() => arrived(backend).includes('next'));
  socket.destroy();
  await closed(req.socket);
  await until(() => requests(gateway).some(({ status }) => status === 499));
});

test('a request without a client is logged as 499, and not as the failure that ends it', async (t) => {
  for (const [timeout, isBroken] of [['1h', true], ['3s', false]] as const) {
    const { backend, gateway } = await startHeld(t, 1);
    gateway.reload(slots(backend, 1, timeout));
    const [accepted, asked] = [once(gateway.server, 'connection'), once(backend.server, 'request')];
    const { socket } = open(t, gateway, SEND);
    const [[served], [req]] = await Promise.all([accepted, asked]) as [[net.Socket], [http.IncomingMessage]];
    await until(() => backend.acting === 1);
    socket.destroy();
    await closed(served);
    assert.deepEqual(requests(gateway), []);
    if (isBroken) req.socket.destroy();
    await until(() => requests(gateway).length === 1);
    assert.equal(outcomeOf(requests(gateway)[0]), '499 client_left');
  }
});

// The daemon was killed with 4 sends in flight, and for 144 s no other client was served.
test('an overdue slot is lent to the next request, and its own request still gets a late response', async (t) => {
  for (const parallel of [1, 4]) {
    const { backend, gateway } = await startHeld(t, parallel, {}, { slotTimeoutMs: 50 });
    const hanging = sendMany(gateway, parallel);
    await until(() => backend.acting === parallel);
    const next = send(gateway, 'next');
    await until(() => arrived(backend).at(-1) === 'next');
    // A backend that hangs for good has at most twice as many requests as there are slots.
    const more = sendMany(gateway, 3 * parallel);
    await until(() => backend.acting === 2 * parallel);
    await pass(500); // ten times as long as a slot may be held
    assert.equal(backend.most, 2 * parallel);
    await answerAll(backend, [...hanging, next, ...more]);
    assert.equal(backend.most, 2 * parallel);
  }
});

// Lent slots did not count, so one token that hung had both of them, and 57 of 62 sends of another token were 503.
test('a token that hangs leaves a slot to the others, counting lent slots: it has at most one of one slot, and one less than twice as many of several', async (t) => {
  for (const parallel of [1, 2, 4]) {
    const { backend, gateway } = await startHeld(t, parallel, several('ab'), { slotTimeoutMs: 50 });
    const most = parallel === 1 ? 1 : 2 * parallel - 1;
    const hanging = sendMany(gateway, 3 * parallel);
    await until(() => backend.acting === most);
    await new Promise((resolve) => setTimeout(resolve, 500)); // all of its slots are overdue
    assert.equal(backend.acting, most);
    const other = send(gateway, 'other', OTHER);
    await until(() => arrived(backend).includes('other'));
    assert.equal(backend.acting, most + 1);
    await answerAll(backend, [...hanging, other]);
  }
});

// Forty uploads of 20 MiB by one token put 799 MiB into the backend at the same time.
test('unfinished uploads of one token at the backend are at most twice limits.body; an upload beyond that is 503 busy, and the others continue', async (t) => {
  const { backend, gateway } = await startHeld(t, 1, { ...tokens({}, {}), limits: { body: '1MiB' } });
  const body = sized(MIB);
  let taken = 0; // by the backend, from the most recent upload
  backend.server.on('request', (req: http.IncomingMessage) => {
    taken = 0;
    req.on('data', (chunk: Buffer) => (taken += chunk.length));
  });
  const begin = async (secret: string): Promise<http.ClientRequest> => {
    const headers = { authorization: `Bearer ${secret}`, 'content-length': body.length };
    const upload = listened(beginSend(gateway, headers));
    taken = 0;
    upload.write(body.slice(0, -1));
    await until(() => taken === body.length - 1);
    return upload;
  };
  const uploads = [await begin(SECRET), await begin(SECRET)];
  const third = beginSend(gateway, { ...BEARER, 'content-length': body.length }).on('error', () => {});
  const refused = once(third, 'response') as Promise<[http.IncomingMessage]>;
  third.write(body.slice(0, 200_000));
  const [res] = await refused;
  assert.deepEqual([res.statusCode, codeOf(String(await readBytes(res)))], [503, 'busy']);
  assert.equal(requests(gateway).at(-1)!.reason, 'unfinished_uploads');
  uploads.push(await begin(OTHER));
  for (const upload of uploads) {
    const status = statusFor(upload);
    upload.end(body.slice(-1));
    await until(() => backend.acting === 1);
    backend.answer();
    assert.equal(await status, 201);
  }
  assert.equal(backend.seen.filter(({ complete }) => complete).length, 3);
});

// "The token that holds the fewest goes first" would let two busy tokens lock out a third.
test('a free slot goes to the token that got one longest ago, and a reload keeps that order', async (t) => {
  const { backend, gateway } = await startHeld(t, 1, several('abc'));
  const answers = await queueUp(gateway, ['a0', 'a1', 'a2', 'a3']);
  answers.push(...await queueUp(gateway, ['b0', 'b1', 'b2', 'b3'], OTHER));
  gateway.reload({ ...slots(backend, 1), ...several('abc') });
  answers.push(...await queueUp(gateway, ['c0'], LAST));
  for (let i = 0; i < answers.length; i++) {
    await until(() => backend.acting === 1);
    // A late request of a token that was served long ago goes before those of tokens served since.
    if (i === 6) answers.push(...await queueUp(gateway, ['c1'], LAST));
    backend.answer();
  }
  for (const answer of answers) assert.equal((await answer).status, 201);
  assert.deepEqual(arrived(backend), ['a0', 'b0', 'c0', 'a1', 'b1', 'a2', 'b2', 'c1', 'a3', 'b3']);
});

/** A port without a listener, below those that the system assigns to other tests meanwhile. */
async function sparePort(host = '127.0.0.1'): Promise<number> {
  const spare = http.createServer().listen(20_000 + Math.floor(Math.random() * 10_000), host);
  await once(spare, 'listening');
  const { port } = spare.address() as AddressInfo;
  await new Promise((resolve) => spare.close(resolve));
  return port;
}

/** A backend like signal-cli-rest-api, which is down until `up`. `settings` are the gateway's settings for it. */
async function startDown(t: TestContext, wait: string, config: GatewayConfig = {}) {
  const [backend, host] = [await startBackend(t), ownHost()];
  const port = await sparePort(host);
  const up = async (): Promise<http.Server> => {
    const server = http.createServer((req, res) => {
      res.shouldKeepAlive = false; // a request on a connection that is just ending is lost, and may not be sent again
      backend.server.emit('request', req, res);
    });
    server.on('connection', () => void backend.connections++);
    await serve(t, server, port, host);
    return server;
  };
  const url = `http://${host}:${port}`;
  const settings = (time: string, timeout = '150s'): GatewayConfig => ({
    ...config,
    backend: { url, wait: time, parallel: 1, timeout },
  });
  return { backend, url, up, settings, gateway: await startGateway(t, { url }, settings(wait)) };
}

/** The gateway knows that the backend is down. */
async function isDown(gateway: Gateway): Promise<void> {
  await until(() => linesOf(gateway, /is unreachable/).length > 0);
}

test('if a backend goes down in the middle of twenty sends, none is lost and none is duplicated', async (t) => {
  const { backend, gateway, url, up } = await startDown(t, '1h');
  const server = await up();
  let most = 0; // connections in addition to the sends
  backend.server.prependListener('request', () => {
    most = Math.max(most, backend.connections - backend.sent.length);
    if (backend.seen.length === 7) server.close();
  });
  const names = Array.from({ length: 20 }, (_, i) => `number ${i}`);
  const answers = await queueUp(gateway, names);
  await isDown(gateway);
  assert.equal(backend.sent.length, 8);
  // Requests other than sends do not wait.
  const health = { path: '/v1/health', headers: BEARER };
  assert.equal(outcomeOf(await ask(gateway, health)), '502 backend_unreachable');
  await up();
  for (const answer of answers) assert.equal((await answer).status, 201);
  // In the order in which they were sent. Message 12 once arrived after message 27.
  assert.deepEqual(backend.sent.map(({ message }) => message), names);
  assert.equal(most, 2, 'some connected before they had a slot; one connection is that of the probe');
  const lines = linesOf(gateway, /backend is (?:un)?reachable/).map((
    line,
  ) => [line.level, line.backend, line.waiting]);
  assert.deepEqual(lines, [1, 12].map((waiting) => ['warn', url, waiting]));
});

test('a probe takes no longer to connect than a request may: backend.timeout bounds both', async (t) => {
  const { url, sockets: tries } = await startRawBackend(t, () => {}); // with TLS no connection is established
  const backend = { url: url.replace('http', 'https'), wait: '0', timeout: '200ms' };
  const gateway = await startGateway(t, backend, { backend }, { connectTimeoutMs: PATIENT_MS });
  assert.equal(outcomeOf(await send(gateway, 'hi')), '502 backend_unreachable');
  await until(() => tries.length >= 4);
});

test(
  'a request whose client disconnects while its connection is established is not sent, although it has its slot',
  { skip: !isNode && 'the hook into name lookups needs Node' },
  async (t) => {
    const backend = await startBackend(t);
    const url = `http://made-late.test:${backend.port}`;
    let connects: (() => void) | undefined;
    takeLookup(t, 'made-late.test', (_, find) => void (connects = () => find(new URL(backend.url).hostname)));
    const gateway = await startGateway(t, { url }, { backend: { url, parallel: 1 } }, {
      connectTimeoutMs: PATIENT_MS,
      slotTimeoutMs: PATIENT_MS,
    });
    const { socket } = open(t, gateway, SEND);
    await until(() => connects !== undefined);
    socket.destroy();
    await until(() => requests(gateway).some(({ code }) => code === 'client_left'));
    const late = connects!;
    connects = undefined;
    late();
    const second = send(gateway, 'second');
    await until(() => connects !== undefined);
    connects!();
    assert.equal(outcomeOf(await second), '201');
    assert.deepEqual(backend.sent.map(({ message }) => message), ['second']);
  },
);

test('while the backend is down, only one probe at a time connects, whatever clients do; a client that disconnects meanwhile is not an outage', async (t) => {
  // With TLS no connection is established, so each attempt is visible, and ends when the test ends it.
  const { url, sockets: tries } = await startRawBackend(t, () => {});
  const backend = { url: url.replace('http', 'https'), wait: '1h', parallel: 1 };
  const gateway = await startGateway(t, backend, { backend, ...RECEIVING }, { connectTimeoutMs: 1e6 });
  const first = open(t, gateway, SEND);
  await until(() => tries.length === 1);
  first.socket.destroy();
  await until(() => requests(gateway).some(({ code }) => code === 'client_left'));
  assert.deepEqual(linesOf(gateway, /is unreachable/), []);
  const second = open(t, gateway, SEND);
  await until(() => tries.length === 2);
  tries[1]!.destroy(); // from now on the backend is down
  await until(() => tries.length === 3);
  for (const answer of sendMany(gateway, 24)) answer.catch(() => {});
  for (let count = 3; count < 7; count++) {
    await until(() => tries.length === count);
    const poll = await ask(gateway, { path: RECEIVE, headers: BEARER });
    assert.equal(outcomeOf(poll), '502 backend_unreachable');
    if (count === 4) second.socket.destroy();
    await settled(gateway);
    assert.equal(tries.length, count);
    tries.at(-1)!.destroy();
  }
  assert.deepEqual(linesOf(gateway, /is unreachable/).map((line) => line.waiting), [1]);
  const ended = closed(tries.at(-1)!);
  await gateway.close();
  await ended;
});

/** A backend with TLS. `how` decides what happens to its connections, and `finish` ends the pending responses. */
async function startFlaky(t: TestContext, env: NodeJS.ProcessEnv) {
  const held: [message: string, res: http.ServerResponse][] = [];
  const server = https.createServer(CERTS[0], async (req, res) => {
    const body = await readBytes(req);
    if (req.method === 'POST') held.push([JSON.parse(String(body)).message, res]);
    else res.end('{}');
  });
  const backend = {
    how: 'serve' as 'serve' | 'refuse' | 'hang' | (() => 'serve' | 'refuse'),
    sockets: [] as net.Socket[],
    held,
    finish: () => held.splice(0).forEach(([, res]) => res.writeHead(201, { 'Content-Length': 2 }).end('[]')),
  };
  const front = net.createServer((socket) => {
    backend.sockets.push(socket.on('error', () => {}));
    const how = typeof backend.how === 'string' ? backend.how : backend.how();
    if (how === 'serve') server.emit('connection', socket);
    else if (how === 'refuse') socket.destroy();
  });
  const url = (await serve(t, front, 0, '127.0.0.1')).replace('http', 'https');
  t.after(() => server.closeAllConnections());
  const file = join(folder(t), 'ca.pem');
  writeFileSync(file, CERTS[0].cert);
  const own = { BACKEND_WAIT: '1h', NODE_EXTRA_CA_CERTS: file, ...env };
  const gateway = await startProcess(t, { backend: { url }, env: own });
  await until(() => linesOf(gateway, /^the backend answers/).length === 1); // on a separate connection
  backend.sockets.length = 0;
  const say = (message: string): Promise<Answer> => ask(gateway, { body: { ...MESSAGE, message }, headers: BEARER });
  return { backend, gateway, say };
}

const ON_NODE = { skip: !isNode && 'other runtimes have other options for what to trust' };

test('a failed connection that was started before the gate reopened is not a new outage', ON_NODE, async (t) => {
  const { backend, gateway, say } = await startFlaky(t, {});
  backend.how = 'hang';
  const early = say('early');
  await until(() => backend.sockets.length === 1);
  backend.how = 'refuse';
  const late = say('late');
  await until(() => linesOf(gateway, /is unreachable/).length === 1);
  backend.how = 'serve';
  await until(() => backend.held.length === 1);
  backend.sockets[0]!.destroy();
  await until(() => backend.held.length === 2);
  backend.finish();
  for (const answer of [early, late]) assert.equal(outcomeOf(await answer), '201');
  assert.equal(linesOf(gateway, /is unreachable/).length, 1);
});

test('a kept connection does not open the gate: the backend must accept a new one', ON_NODE, async (t) => {
  const { backend, gateway, say } = await startFlaky(t, {});
  const first = say('first');
  await until(() => backend.held.length === 1);
  backend.how = 'refuse';
  const second = say('second');
  await until(() => linesOf(gateway, /is unreachable/).length === 1);
  backend.finish();
  assert.equal(outcomeOf(await first), '201');
  const tries = backend.sockets.length;
  await until(() => backend.sockets.length >= tries + 2 || linesOf(gateway, /reachable again/).length > 0);
  assert.deepEqual(linesOf(gateway, /reachable again/), []);
  backend.how = 'serve';
  await until(() => backend.held.length === 1);
  backend.finish();
  assert.equal(outcomeOf(await second), '201');
});

test('outages that end and start again share backend.wait', ON_NODE, async (t) => {
  const { backend, gateway, say } = await startFlaky(t, { BACKEND_WAIT: '2s' });
  backend.how = () => backend.sockets.length % 2 === 1 ? 'refuse' : 'serve'; // each probe connects, each request fails
  assert.equal(outcomeOf(await say('hello')), '502 backend_unreachable');
  assert.ok(linesOf(gateway, /reachable again/).length > 1, 'there was one outage');
});

test(
  'after an outage the slots go to the first requests, although their connections failed last',
  ON_NODE,
  async (t) => {
    const { backend, gateway, say } = await startFlaky(t, { BACKEND_PARALLEL: '2' });
    backend.how = 'hang';
    const answers = [say('a')];
    await until(() => backend.sockets.length === 1);
    answers.push(say('b'));
    await until(() => backend.sockets.length === 2);
    answers.push(say('c'));
    for (let i = 0; i < 3; i++) await ask(gateway, { path: '/healthz' });
    backend.how = 'refuse';
    backend.sockets[1]!.destroy();
    await until(() => linesOf(gateway, /is unreachable/).length === 1);
    backend.sockets[0]!.destroy();
    const tries = backend.sockets.length;
    await until(() => backend.sockets.length >= tries + 2);
    backend.how = 'serve';
    await until(() => backend.held.length === 2);
    assert.deepEqual(backend.held.map(([message]) => message).sort(), ['a', 'b']);
    backend.finish();
    await until(() => backend.held.length === 1);
    backend.finish();
    for (const answer of answers) assert.equal(outcomeOf(await answer), '201');
  },
);

type Found = (error: Error) => void;

type Look = (done: Found, find: (host: string) => void) => void;
const LOOKUPS = new Map<string, Look>();
let takesLookups = false;

/** From now on, `answer` decides each lookup of this name; `find` looks up another name. */
function takeLookup(t: TestContext, name: string, answer: Look): void {
  if (!takesLookups) {
    takesLookups = true;
    const { lookup } = dns;
    dns.lookup = ((asked: string, options: object, done: Found) => {
      const find = (host: string): void => (lookup as (...args: unknown[]) => void)(host, options, done);
      const own = LOOKUPS.get(asked);
      if (own) own(done, find);
      else find(asked);
    }) as typeof lookup;
  }
  LOOKUPS.set(name, answer);
  t.after(() => void LOOKUPS.delete(name));
}

/** From now on, each lookup of this name fails with the next of these codes. */
function failLookup(t: TestContext, name: string, ...codes: string[]): void {
  takeLookup(t, name, (done) => {
    const code = codes.length > 1 ? codes.shift() : codes[0];
    process.nextTick(done, Object.assign(new Error(), { code }));
  });
}

test('a send that waited in vain is refused with the last failure as the reason', ON_NODE, async (t) => {
  failLookup(t, 'unknown.test', 'ENOTFOUND', 'ENOTFOUND', 'EAI_AGAIN');
  const url = 'http://unknown.test';
  const gateway = await startGateway(t, { url }, { backend: { url, wait: '3s' } });
  assert.equal(outcomeOf(await send(gateway, 'hello')), '502 backend_unreachable');
  assert.equal(requests(gateway)[0].reason, 'EAI_AGAIN');
  assert.deepEqual(linesOf(gateway, /is unreachable/).map(({ reason }) => reason), ['ENOTFOUND']);
});

test('the log counts as waiting only the requests that wait for this backend', async (t) => {
  const { backend, gateway, up, settings } = await startDown(t, '1h', { allow: ['messaging'] });
  gateway.reload(settings('1h'));
  const held: http.ServerResponse[] = [];
  let begun = 0;
  backend.server.removeAllListeners('request').on('request', (req: http.IncomingMessage, res: http.ServerResponse) => {
    begun++;
    req.on('error', () => {}).resume().on('end', () => held.push(res));
  });
  const server = await up();
  const upload = listened(beginSend(gateway, { ...BEARER, 'content-length': LARGE.length }));
  t.after(() => upload.destroy());
  upload.write(LARGE.slice(0, -1));
  await until(() => begun === 1);
  const first = send(gateway, 'first');
  await until(() => held.length === 1);
  const waits = await queueUp(gateway, ['second']);
  // This one waits for its slot, and not for a backend.
  const groups = ask(gateway, { path: `/v1/groups/${FROM}`, headers: BEARER });
  for (let i = 0; i < 3; i++) await settled(gateway);
  server.close();
  held.pop()!.writeHead(201, { Connection: 'close' }).end('[]'); // its connection cannot be used for the others
  assert.deepEqual([await first, await groups].map(outcomeOf), ['201', '502 backend_unreachable']);
  gateway.reload({ backend: { url: `http://127.0.0.1:${await sparePort()}`, wait: '1h' } });
  waits.push(send(gateway, 'third'));
  await until(() => linesOf(gateway, /is unreachable/).length === 2);
  assert.deepEqual(linesOf(gateway, /is unreachable/).map(({ waiting }) => waiting), [1, 1]);
  await gateway.close();
  for (const wait of waits) assert.equal(outcomeOf(await wait), '503 shutting_down');
});

test('a failure of this machine is 502 for that request only, and not an outage', ON_NODE, async (t) => {
  failLookup(t, 'no-port-is-free.test', 'EADDRNOTAVAIL');
  const url = 'http://no-port-is-free.test';
  const gateway = await startGateway(t, { url }, { backend: { url, wait: '1h' } });
  const answers = await Promise.all(sendMany(gateway, 3));
  assert.deepEqual(answers.map(outcomeOf), Array(3).fill('502 backend_unreachable'));
  assert.deepEqual(requests(gateway).map(({ reason }) => reason), Array(3).fill('EADDRNOTAVAIL'));
  assert.deepEqual(linesOf(gateway, /is unreachable/), []);
});

test('the pauses between attempts to connect to a backend that is down grow to one second at most', async (t) => {
  const tries: net.Socket[] = [];
  const server = net.createServer((socket) => tries.push(socket.on('error', () => {}).destroy()));
  const url = (await serve(t, server)).replace('http', 'https');
  const gateway = await startGateway(t, { url }, {});
  assert.equal(outcomeOf(await send(gateway, 'lost')), '502 backend_unreachable');
  await until(() => tries.length === 10); // after 50 s if the pauses continued to grow
});

test('a reload to another address ends the attempts at the old one, at once or with the last waiting request', async (t) => {
  for (const isWaiting of [false, true]) {
    const { url, sockets: tries } = await startRawBackend(t, () => {});
    const old = { url: url.replace('http', 'https'), wait: '1h' };
    const gateway = await startGateway(t, old, { backend: old }, { connectTimeoutMs: 1e6 });
    const request = isWaiting ? SEND : ABOUT.replace('/v1/about', '/v1/health');
    const { socket, text } = open(t, gateway, request);
    await until(() => tries.length === 1);
    tries[0]!.destroy();
    await until(() => tries.length === 2);
    if (!isWaiting) assert.equal(outcomeOf(text()), '502 backend_unreachable');
    gateway.reload({ backend: { url: 'http://127.0.0.1:1' } });
    await settled(gateway);
    if (isWaiting) assert.ok(!tries[1]!.destroyed, 'the request that waits still needs the attempt');
    socket.destroy();
    await closed(tries[1]!);
  }
});

test('closing ends the attempt of a probe that no request waits for', async (t) => {
  const { url, sockets: tries } = await startRawBackend(t, () => {});
  const to = { url: url.replace('http', 'https') };
  const gateway = await startGateway(t, to, {}, { connectTimeoutMs: 1e6 });
  const about = ask(gateway, { headers: BEARER });
  await until(() => tries.length === 1);
  tries[0]!.destroy();
  assert.equal(outcomeOf(await about), '502 backend_unreachable');
  await until(() => tries.length === 2);
  await gateway.close();
  await closed(tries[1]!);
});

// A probe by plain TCP opened the gate: in 20 s there were 761 connections, 305 log lines, and no response.
test('a backend with an untrusted certificate keeps the gate shut: its sends wait, and are 502 with the reason', async (t) => {
  const server = https.createServer(CERTS[0]);
  let connections = 0;
  server.on('connection', () => connections++);
  const url = (await serve(t, server)).replace('http', 'https');
  const gateway = await startGateway(t, { url }, { backend: { url, wait: '1500ms' } });
  const answers = await Promise.all(sendMany(gateway, 20));
  assert.deepEqual(answers.map(outcomeOf), Array(20).fill('502 backend_unreachable'));
  assert.match(String(requests(gateway)[0].reason), /CERT|SELF_SIGNED|failed/);
  // One by a send, and those by the probe, whose pauses grow to a second.
  assert.ok(connections < 10, `${connections} connections`);
  assert.equal(linesOf(gateway, /backend is (?:un)?reachable/).length, 1);
});

test('a port that drops packets shuts the gate, and sends pass once it answers', {
  skip: !isNode && 'one runtime is enough',
}, async (t) => {
  const code = `import net from 'node:net';
    const server = net.createServer((socket) => socket.on('error', () => {}).on('data', () => socket.end(${
    JSON.stringify(SENT)
  })));
    server.listen({ port: 0, host: '127.0.0.1', backlog: 1 }, () => console.log('port', server.address().port));`;
  const child = start([], {}, script(t, code));
  t.after(() => child.kill('SIGKILL'));
  await until(() => /port \d+/.test(child.output()));
  const port = Number(/\d+/.exec(child.output()));
  child.kill('SIGSTOP'); // its queue of connections fills, and the system drops further ones
  const fillers = Array.from({ length: 8 }, () => open(t, { port }).socket);
  const config = { backend: { url: `http://127.0.0.1:${port}`, wait: '1m' } };
  const gateway = await startGateway(t, { url: config.backend.url }, config, { connectTimeoutMs: 1500 });
  const sends = sendMany(gateway, 3);
  await isDown(gateway);
  assert.equal(linesOf(gateway, /is unreachable/)[0]!.reason, 'timeout');
  for (const socket of fillers) socket.destroy();
  child.kill('SIGCONT');
  for (const answer of sends) assert.equal((await answer).status, 201);
  // Another dropped packet may shut the gate again, so the lines alternate.
  const lines = linesOf(gateway, /backend is (?:un)?reachable/).map(({ message }) => message.includes('unreachable'));
  assert.deepEqual(lines, lines.map((_, i) => i % 2 === 0));
});

// The wait counted from before the queue, so the whole queue was lost at the first refused connection.
test('a request that waited for a slot still has all of backend.wait; consecutive outages share it; GET /v1/about waits like a send', async (t) => {
  const { backend, gateway, up, settings } = await startDown(t, '1500ms');
  const held: http.ServerResponse[] = [];
  backend.server.removeAllListeners('request');
  backend.server.on('request', (_, res: http.ServerResponse) => held.push(res));
  let server = await up();
  gateway.reload(settings('1500ms'));
  const first = send(gateway, 'hangs');
  await until(() => held.length === 1);
  const line = [send(gateway, 'waits'), ask(gateway, { headers: BEARER })];
  await until(() => held.length === 2); // GET /v1/about needs no slot
  await new Promise((resolve) => setTimeout(resolve, 2000));
  server.close();
  for (const res of held.splice(0)) res.socket!.destroy();
  assert.equal(outcomeOf(await first), '502 bad_backend_answer');
  assert.equal(outcomeOf(await line[1]!), '502 bad_backend_answer');
  await isDown(gateway);
  const about = ask(gateway, { headers: BEARER });
  assert.equal(outcomeOf(await ask(gateway, { path: '/v1/health', headers: BEARER })), '502 backend_unreachable');
  server = await up();
  await until(() => held.length === 2);
  for (const res of held.splice(0)) res.writeHead(201).end('[]');
  for (const answer of [line[0]!, about]) assert.equal((await answer).status, 201);
  server.close();
});

test('the time for a slot is a budget: a request that loses its slot to an outage waits for the next one only for the rest', async (t) => {
  const { backend, gateway, up, settings } = await startDown(t, '1h');
  let arrived = 0;
  let ended = 0;
  backend.server.removeAllListeners('request');
  backend.server.on('request', (req: http.IncomingMessage) => { // and never responds
    arrived++;
    req.resume().on('end', () => ended++);
  });
  const server = await up();
  gateway.reload(settings('1h', '4s'));
  const upload = listened(beginSend(gateway, { ...BEARER, 'content-length': LARGE.length }));
  upload.write(LARGE.slice(0, -1));
  await until(() => arrived === 1, 'the large body to begin');
  const hangs = send(gateway, 'hangs');
  await until(() => ended === 1, 'a send to take the slot');
  await pass(1000);
  const waits = send(gateway, 'waits'); // 3 s, until the send that hangs has its 504
  server.close();
  assert.equal(outcomeOf(await hangs), '504 backend_timeout');
  await isDown(gateway);
  upload.end(LARGE.slice(-1));
  await until(() => ended === 2, 'the large body to take the slot');
  const sinceMs = performance.now();
  await up();
  assert.equal(outcomeOf(await waits), '503 busy');
  const tookMs = performance.now() - sinceMs;
  assert.ok(tookMs < 3000, `${tookMs} ms`); // and not another 4 s
  upload.destroy();
});

test('a reload to another address starts without an outage; waiting requests, also with a large body, keep the old address', async (t) => {
  const { backend: old, gateway, up } = await startDown(t, '1h');
  const backend = await startBackend(t);
  const messages = ['old 1', 'old 2', 'x'.repeat(200_000)];
  const waits = await queueUp(gateway, messages);
  await isDown(gateway);
  gateway.reload({ backend: { url: backend.url, wait: '1h', parallel: 1 } });
  assert.equal((await send(gateway, 'new')).status, 201);
  assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
  await up();
  for (const answer of waits) assert.equal((await answer).status, 201);
  assert.deepEqual([old, backend].map(({ sent }) => sent.map(({ message }) => message)), [messages, ['new']]);
  assert.equal(linesOf(gateway, /is unreachable/).length, 1);
});

test('while the backend is down, requests that may not wait (backend.wait 0) are 502 at once; any request detects its return', async (t) => {
  const { gateway, up } = await startDown(t, '0', RECEIVING);
  const poll = { path: RECEIVE, headers: BEARER };
  for (const answer of [ask(gateway, poll), send(gateway, 'lost')]) {
    assert.equal(outcomeOf(await answer), '502 backend_unreachable');
  }
  await up();
  await untilServed(gateway, poll); // after a pause
  assert.equal(linesOf(gateway, /reachable again/).length, 1);
});

// Sends were 502 in waves, each after `backend.wait`, so 24 sends took 24 times as long.
test('a send waits for a backend that is down, at most backend.wait and backend.timeout; the wait ends for all at once, with the client and with the gateway', async (t) => {
  const { backend, gateway, up, settings } = await startDown(t, '500ms', { shutdown: '1h' });
  let met = 0;
  gateway.server.on('request', () => met++);
  const startMs = performance.now();
  const large = { body: LARGE, headers: BEARER };
  const late = [...sendMany(gateway, 24), ask(gateway, large)];
  await until(() => met === 25);
  gateway.reload(settings('1h', '200ms')); // backend.timeout applies as well
  const others = [send(gateway, 'late'), ask(gateway, large)];
  await Promise.race(late);
  assert.ok(performance.now() - startMs > 450, 'one did not wait');
  for (const answer of await Promise.all([...late, ...others])) {
    assert.equal(outcomeOf(answer), '502 backend_unreachable');
    assert.match(answer.json.error, /nothing was sent/);
  }
  assert.ok(performance.now() - startMs < 6000, 'they waited in sequence');
  gateway.reload(settings('1h'));
  const left = open(t, gateway, SEND);
  await settled(gateway);
  left.socket.destroy();
  await until(() => requests(gateway).some(({ code }) => code === 'client_left'));
  const server = await up();
  assert.equal((await send(gateway, 'last')).status, 201);
  await new Promise((resolve) => server.close(resolve));
  const waits = await queueUp(gateway, ['waits for the backend', 'waits too']);
  await gateway.close();
  for (const wait of waits) assert.equal(outcomeOf(await wait), '503 shutting_down');
  assert.deepEqual(backend.sent.map(({ message }) => message), ['last']);
});

test('a backend that takes a connection and closes it is 502 without a retry, because a byte may have been sent', async (t) => {
  // Not reset at once, because that is not a connection, even for the system.
  for (const way of ['connection end', 'connection destroy', 'data end', 'data resetAndDestroy']) {
    const [when, end] = way.split(' ') as [string, 'end' | 'destroy' | 'resetAndDestroy'];
    for (const body of [HELLO, LARGE]) {
      let count = 0;
      const server = net.createServer((socket) => {
        count++;
        socket.on('error', () => {}).on('end', () => socket.destroy()).resume();
        if (when === 'connection') socket[end]();
        else socket.once('data', () => socket[end]());
      });
      const url = await serve(t, server);
      const gateway = await startGateway(t, { url }, { backend: { url, wait: '1m', parallel: 1 } });
      const outcome = outcomeOf(await ask(gateway, { body, headers: BEARER }));
      assert.deepEqual([outcome, count], ['502 bad_backend_answer', 1], `${way} ${body.length}`);
    }
  }
});

section('CONNECT'); // ─────────────────────────────────────────────────────────────────────────────
test('connections to the backend are reused for the next request of any client, except those with an unsolicited response', async (t) => {
  // The gateway has noted the end of a large body when the response arrives; otherwise it would discard the connection.
  const { backend, gateway } = await startRaw(t, (socket) => void setTimeout(() => socket.write(SENT), 20));
  for (const request of [{ body: MESSAGE }, { body: HELLO.padEnd(100_000) }, { path: '/v1/health' }]) {
    for (let i = 0; i < 3; i++) assert.equal((await ask(gateway, { ...request, headers: BEARER })).status, 201);
  }
  const plain = await startBoth(t);
  for (let i = 0; i < 3; i++) {
    assert.equal((await ask(plain.gateway, { path: '/v1/health', headers: BEARER })).status, 204);
  }
  assert.equal(plain.backend.connections, 'Deno' in globalThis ? 3 : 1, 'the connections for responses without a body');
  const used = backend.sockets.length;
  assert.equal(used, 'Deno' in globalThis ? 9 : 1); // Deno would resend on a connection that breaks
  for (let i = 0; i < 5; i++) {
    assert.equal((await send(gateway, 'hello')).text, '{}');
    backend.sockets.at(-1)!.write(SENT.replace('{}', '[]'));
    await closed(backend.sockets.at(-1)!);
  }
  assert.equal(backend.sockets.length, used + ('Deno' in globalThis ? 5 : 4));
});

// node:http no longer listens for errors of a connection whose response is complete when a write to it fails.
test('a backend that responds before it has read a send, and then resets the connection, does not crash the process', async (t) => {
  const sockets: net.Socket[] = [];
  const server = net.createServer((socket) => {
    sockets.push(socket.on('error', () => {}));
    let toReadBytes = MIB + 200_000 * sockets.length;
    socket.on('data', ({ length }) => {
      if (toReadBytes > 0 && toReadBytes <= length) socket.write(SENT);
      toReadBytes -= length;
    });
  });
  const url = await serve(t, server);
  const gateway = await startGateway(t, { url }, { ...tokens({ defaults: DEFAULTS }), backend: { url } });
  // Before the gateway writes again to the backend, in the same turn of the loop.
  gateway.server.prependListener('request', (_req, res) => {
    const writeHead = res.writeHead.bind(res) as (...head: unknown[]) => typeof res;
    res.writeHead = (...head: unknown[]) => {
      sockets.at(-1)!.resetAndDestroy();
      return writeHead(...head);
    };
  });
  // A send of 4.4 MiB, which no buffer of a socket holds.
  const body = `{"message":"x","mentions":[${'1e20,'.repeat(MIB / 5 - 8)}1]}`;
  for (let i = 1; i <= 10; i++) {
    const { status } = await ask(gateway, { body, headers: BEARER });
    assert.deepEqual([status, sockets.length], [201, i]);
  }
  assert.deepEqual(linesOf(gateway, /internal error/), []);
});

test('a connection to the backend that is not established, TLS included, is 502: nothing was sent; the reason is logged', async (t) => {
  const silent = await startRawBackend(t, () => {});
  const ways = [
    [silent.url.replace('http', 'https'), '300ms', /^timeout$/],
    ['http://nowhere.invalid', '1m', /^(ENOTFOUND|EAI_AGAIN)$/],
    ['http://127.0.0.1:1', '1m', /^E[A-Z]+$/],
  ] as const;
  for (const [url, timeout, reason] of ways) {
    const gateway = await startGateway(t, { url }, { backend: { url, timeout, wait: '0' } });
    assert.equal(outcomeOf(await send(gateway, url)), '502 backend_unreachable', url);
    assert.match(String(requests(gateway)[0].reason), reason);
  }
  await closed(silent.sockets[0]!);
});

test('a backend with TLS is trusted only if its certificate is; otherwise nothing is sent to it', async (t) => {
  const seen: string[] = [];
  const server = https.createServer(CERTS[0], (req, res) => {
    if (req.method === 'POST') seen.push(req.url!);
    req.resume().on('end', () => res.writeHead(201, { 'Content-Length': 2 }).end('{}'));
  });
  const url = `${(await serve(t, server, 0, '127.0.0.1')).replace('http', 'https')}/prefix`;
  const refused = await send(await startGateway(t, { url }), 'not believed');
  assert.deepEqual([outcomeOf(refused), seen], ['502 backend_unreachable', []]);
  // A certificate from a private CA is trusted through the runtime's own options.
  if (!isNode) return;
  const file = join(folder(t), 'ca.pem');
  writeFileSync(file, CERTS[0].cert);
  const trusting = await startProcess(t, { backend: { url }, env: { NODE_EXTRA_CA_CERTS: file } });
  for (let i = 0; i < 2; i++) assert.equal((await ask(trusting, { body: MESSAGE, headers: BEARER })).status, 201);
  assert.deepEqual(seen, ['/prefix/v2/send', '/prefix/v2/send']);
});

section('WEBSOCKETS'); // ──────────────────────────────────────────────────────────────────────────
/** A backend with WebSockets, and a gateway in front of it. */
async function startReceiving(
  t: TestContext,
  open?: UpgradeHandler,
  config: GatewayConfig = {},
  options?: GatewayOptions,
) {
  const backend = await startUpgradeBackend(t, open);
  const own = { ...RECEIVING, ...config, backend: { url: backend.url, wait: '0', ...config.backend } };
  return { backend, gateway: await startGateway(t, backend, own, options) };
}
type UpgradeHandler = Parameters<typeof startUpgradeBackend>[1];

/** Asks for a WebSocket using a row of a table, with these bytes after the handshake. */
function wish(t: TestContext, to: Address, row = 'bearer', more = ''): Connection {
  const { target: path = RECEIVE, headers } = parseRow(row);
  return openWebSocket(t, to, { path, headers: headers.map((field) => field.join(': ')), more });
}

/** Opens a WebSocket that the gateway accepts. */
async function accepted(t: TestContext, to: Address, row?: string): Promise<Connection> {
  const connection = wish(t, to, row);
  await until(() => connection.text().startsWith('HTTP/1.1 101'));
  return connection;
}

/** Asks for a WebSocket, and returns the ordinary response it gets instead. */
async function declined(t: TestContext, to: Address, row?: string, more?: string): Promise<Answer> {
  const { socket, text } = wish(t, to, row, more);
  await until(() => socket.closed || text().startsWith('HTTP/1.1 101'));
  return parseAnswer(text());
}

test('WebSocket: bytes flow both ways until one side disconnects; the credential is not relayed, in any form', async (t) => {
  const { backend, gateway } = await startReceiving(t);
  const rows = `bearer ;; basic ;; /@auth=${SECRET}${RECEIVE} ;; ${RECEIVE}?@auth=${SECRET}&x=1`.split(' ;; ');
  for (const [i, row] of rows.entries()) {
    const client = await accepted(t, gateway, `${row} | Referer: http://x | X-End: to end`);
    const text = (): string => client.text().toLowerCase();
    for (const line of ACCEPTED.toLowerCase().split('\r\n')) await until(() => text().includes(line));
    const { headers, url, rawHeaders } = backend.seen[i]!;
    const { upgrade, connection, host, 'sec-websocket-key': key, 'x-forwarded-for': address } = headers;
    assert.equal(url, i === 3 ? `${RECEIVE}?x=1` : RECEIVE);
    assert.deepEqual([upgrade, connection, host], ['websocket', 'Upgrade', `${backend.host}:${backend.port}`]);
    assert.deepEqual([key, address, headers['x-end']], ['dGhlIHNhbXBsZSBub25jZQ==', '127.0.0.1', 'to end']);
    assert.doesNotMatch(JSON.stringify([url, rawHeaders]), /authorization|correct-horse|referer/i);
    let got = '';
    const far = (backend.sockets[i] as net.Socket).on('data', (chunk) => (got += chunk));
    client.socket.write('from the client');
    far.write('from the backend');
    await until(() => got === 'from the client' && text().endsWith('from the backend'));
    const { status, route, form, token } = requests(gateway)[i]!;
    const forms = ['bearer', 'basic', 'path', 'query'];
    assert.deepEqual([status, route, form, token], [101, '/v1/receive/:number', forms[i], 'test']);
    const [goes, follows] = i % 2 === 0 ? [client.socket, far] : [far, client.socket];
    goes.destroy();
    await closed(follows);
    await until(() => linesOf(gateway, /websocket closed/).length > i);
    const { bytesIn, bytesOut, token: name } = linesOf(gateway, /websocket closed/)[i]!;
    assert.deepEqual([bytesIn, bytesOut, name], [15, 16, 'test']);
  }
});

test('WebSocket: a refusal is a complete HTTP response, and the backend sees nothing; each request counts towards the rate', async (t) => {
  const [far, limited] = ['secret-for-far-away-clients', 'secret-for-one-websocket-an-hour'];
  const own = {
    a: { secret: SECRET, senders: [FROM] },
    narrow: { secret: OTHER, allow: ['send'] },
    far: { secret: far, clients: ['192.0.2.1'] },
    limited: { secret: limited, rate: '1/1h' },
  };
  const both = await startReceiving(t, undefined, { tokens: own }, { now: () => 0 });
  await accepted(t, both.gateway, `bearer ${limited}`);
  const rows = `none → 401 unauthorized ;; bearer wrong → 401 unauthorized ;; bearer | bearer → 400 bad_credential
    bearer ${OTHER} → 403 endpoint_not_allowed ;; bearer ${far} → 403 client_not_allowed
    /v1/receive/${STRANGER} | bearer → 403 sender_not_allowed ;; /v1/accounts | bearer → 403 setup_blocked
    /v1/receive/%252B15550100001 | bearer → 400 bad_target ;; /v1/receive/../about | bearer → 400 bad_target
    /v1/groups/${FROM}/group.QUJD | bearer → 400 bad_target ;; Host: other | bearer → 400 bad_target
    /api/v1/receive | bearer → 404 unknown_endpoint ;; /v2/send | bearer → 405 method_not_allowed
    bearer ${limited} → 429 rate_limited`;
  for (const row of rows.split(/ ;; |\n\s*/)) {
    const answer = await declined(t, both.gateway, row);
    const { status, code } = parseRow(row);
    assertDenied(answer, Number(status), code!, both, { seen: 1, connections: 1 });
    const { 'content-length': length, connection, allow, 'www-authenticate': challenge } = answer.headers;
    assert.deepEqual([length, connection], [String(Buffer.byteLength(answer.text)), 'close'], row);
    assert.equal(allow, status === '405' ? 'POST' : undefined);
    assert.equal(challenge, status === '401' ? 'Basic realm="signal", Bearer' : undefined);
    assert.equal(answer.headers['retry-after'], status === '429' ? '3600' : undefined);
  }
});

// node:http removes its own "drain" listener from such a socket, so anything beyond one write was cut off after 30 s.
test('WebSocket: an ordinary response of 2 MB instead arrives complete, at the pace of a client that reads late', async (t) => {
  const big = 'x'.repeat(2_000_000);
  for (const framing of [`Content-Length: ${big.length}\r\n\r\n${big}`, `Connection: close\r\n\r\n${big}`]) {
    const { gateway } = await startReceiving(t, (socket) => socket.end(`HTTP/1.1 200 OK\r\n${framing}`));
    const { socket, text } = wish(t, gateway);
    socket.pause();
    await pass(50);
    socket.resume();
    await closed(socket);
    assert.equal(
      parseAnswer(text()).text.replace(/^[0-9a-f]+\r\n|\r\n[0-9a-f]+\r\n/g, '').match(/x/g)?.length,
      big.length,
    );
    await until(() => requests(gateway).length === 1);
    assert.deepEqual([requests(gateway)[0].status, requests(gateway)[0].bytesOut], [200, big.length]);
  }
});

// On Node 26 the socket after a 101 was neither destroyed nor had listeners, and its error crashed the process.
test('WebSocket: a backend that accepts after its client has disconnected is disconnected too, and its reset crashes nothing', async (t) => {
  const { backend, gateway } = await startReceiving(t, () => {}, { allow: ['messaging'] });
  for (const way of ['resetAndDestroy', 'resume'] as const) { // a backend that resets, and one that stays connected
    const client = wish(t, gateway, '/v1/search/+15550100001?numbers=1 | bearer'); // a route that needs a slot
    const count = backend.sockets.length;
    await until(() => backend.sockets.length > count);
    client.socket.destroy();
    const far = backend.sockets.at(-1) as net.Socket;
    await pass(50); // the gateway notices that its client has disconnected
    far.on('end', () => far.end()).write(ACCEPTED, () => far[way]());
    await closed(far);
    await until(() => requests(gateway).some(({ reason }) => reason === 'answered_101'));
    gateway.log.splice(0);
  }
  assert.equal((await ask(gateway, { path: '/healthz' })).status, 200);
});

test('WebSocket: a half that stays open is closed soon after the other half has ended, on either side', async (t) => {
  for (const who of ['client', 'backend']) {
    const { backend, gateway } = await startReceiving(t, (socket) => void socket.write(ACCEPTED), {}, {
      lingerMs: 200,
    });
    const client = openHalf(t, gateway, HANDSHAKE.replace('\r\n', `\r\nAuthorization: Bearer ${SECRET}\r\n`));
    const [head] = await once(client, 'data');
    assert.match(String(head), / 101 /);
    const far = backend.sockets[0] as net.Socket;
    (who === 'client' ? client : far).end(); // the other one ends nothing on its own
    far.resume();
    await until(() => linesOf(gateway, /^websocket closed$/).length === 1);
    assert.equal(linesOf(gateway, /^websocket closed$/)[0]!.reason, 'ended');
  }
});

test('WebSocket: a decline by the backend is relayed with status and body; bytes after a refused or declined handshake never reach it', async (t) => {
  const more = `POST /v1/register/${FROM} HTTP/1.1\r\nHost: x\r\n\r\n`;
  const fields = 'Content-Type: text/plain\r\nContent-Length: 11\r\nX-Why: mode\r\n\r\nBad Request';
  const chunked = 'Transfer-Encoding: chunked\r\nX-Why: mode\r\n\r\nb\r\nBad Request\r\n0\r\n\r\n';
  for (const reply of [fields, chunked]) {
    const { backend, gateway } = await startReceiving(t, (socket, head) => {
      socket.on('data', (chunk) => assert.fail(`the backend got ${chunk}`));
      assert.equal(head.length, 0);
      socket.end(`HTTP/1.1 400 Bad Request\r\n${reply}`);
    });
    const { status, headers, text } = await declined(t, gateway, 'bearer', more);
    assert.deepEqual([status, headers['x-why'], requests(gateway)[0].status], [400, 'mode', 400]);
    assert.equal(text, reply.split(/\r\n\r\n(.*)/s)[1]);
    assert.equal(headers['transfer-encoding'], reply === chunked ? 'chunked' : undefined);
    await declined(t, gateway, 'none', more);
    assert.equal(backend.seen.length, 1);
  }
});

test('WebSocket: a backend that is down, slow, redirects, breaks off or switches to something else', async (t) => {
  const ways = [
    ...['504 backend_timeout | ', '502 bad_backend_answer | BREAKS OFF', '502 backend_unreachable | IS DOWN'],
    '502 bad_backend_answer | 301 Moved Permanently\r\nLocation: /v1/accounts\r\nContent-Length: 0',
    '502 bad_backend_answer | 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c',
  ];
  for (const [outcome, reply] of ways.map((way) => way.split(' | '))) {
    const { gateway } = await startReceiving(t, (socket) => {
      if (reply === 'BREAKS OFF') socket.destroy();
      else if (reply) socket.write(`HTTP/1.1 ${reply}\r\n\r\n`);
    }, { backend: { timeout: reply ? '1m' : '100ms', ...reply === 'IS DOWN' && { url: 'http://127.0.0.1:9' } } });
    assert.equal(outcomeOf(await declined(t, gateway)), outcome);
  }
});

test('WebSocket: bytes that arrive with the handshake, before its response, or after the other side has ended its half are not lost', async (t) => {
  let got = '';
  const { backend, gateway } = await startReceiving(t, (socket, head) => {
    got += head;
    socket.on('data', (chunk) => (got += chunk)).on('end', () => socket.end('last words'));
  });
  const { socket, text } = wish(t, gateway, 'bearer', 'early ');
  await until(() => backend.seen.length === 1);
  socket.write('from the client');
  await settled(gateway);
  backend.sockets[0]!.write(`${ACCEPTED}early from the backend, `);
  await until(() => got.endsWith('client') && text().endsWith('backend, '));
  socket.end(', bye');
  await closed(socket);
  assert.equal(got, 'early from the client, bye');
  assert.equal(text().split('\r\n\r\n')[1], 'early from the backend, last words');
});

// Skipped on Bun 1.4.5, where the stand-in backend's own sockets silently stall in most runs.
test('WebSocket: the backend is always drained; a client that never reads is dropped, and another continues', {
  skip: 'Bun' in globalThis,
}, async (t) => {
  const { backend, gateway } = await startReceiving(t);
  const stalled = await accepted(t, gateway);
  const healthy = await accepted(t, gateway);
  stalled.socket.pause();
  const chunk = Buffer.alloc(64 * 1024, 'x');
  const [toStalled, toHealthy] = backend.sockets as [net.Socket, net.Socket];
  let written = 0;
  for (; !toStalled.closed; written += chunk.length) {
    // The backend's own behaviour: it writes to all its readers in turn, and waits for each.
    for (const socket of [toStalled, toHealthy]) {
      const isFull = !socket.destroyed && !socket.write(chunk);
      if (isFull) await Promise.race([once(socket, 'drain'), closed(socket)]).catch(() => {});
    }
    assert.ok(written < 64 * MIB, 'it was never dropped');
  }
  toHealthy.write('still here');
  await until(() => healthy.text().endsWith('still here'));
  assert.equal(healthy.text().length - healthy.text().indexOf('\r\n\r\n') - 4, written + 'still here'.length);
  await until(() => gateway.log.some((line) => line.includes('too_far_behind')));
});

test('WebSocket: after its client has ended its half, the backend may send its last bytes, but not forever', async (t) => {
  const silent: UpgradeHandler = (socket) => void socket.write(ACCEPTED); // which never ends its half
  const { backend, gateway } = await startReceiving(t, silent, {}, { lingerMs: 500 });
  const { socket, text } = await accepted(t, gateway);
  const ended = once(backend.sockets[0]!.resume(), 'end');
  socket.end();
  await within(ended, 'the end of the half at the backend');
  backend.sockets[0]!.write('last bytes');
  await until(() => text().endsWith('last bytes'));
  await closed(socket);
  await until(() => linesOf(gateway, /websocket closed/).length === 1);
  assert.equal(linesOf(gateway, /websocket closed/)[0]!.reason, 'ended');
});

test('WebSocket: closing the gateway closes it, and a reload closes those whose token was removed or has lost the right', async (t) => {
  const secretOf = (name: string): string => `secret-of-the-token-that-${name}`;
  const named = (tokens: Record<string, TokenConfig>): GatewayConfig => ({
    ...RECEIVING,
    shutdown: '1h',
    tokens: Object.fromEntries(Object.entries(tokens).map(([name, own]) => [name, { secret: secretOf(name), ...own }])),
  });
  const all = named({ stays: {}, goes: {}, expires: {}, narrows: {}, path: {}, moves: {} });
  const { backend, gateway } = await startReceiving(t, undefined, all);
  const { socket, text } = await accepted(t, gateway, `bearer ${secretOf('stays')}`);
  const others = ['goes', 'expires', 'narrows', 'moves'].map((name) => `bearer ${secretOf(name)}`);
  const clients = [];
  for (const row of [...others, `/@auth=${secretOf('path')}${RECEIVE}`]) clients.push(await accepted(t, gateway, row));
  const bearer: TokenConfig = { methods: ['bearer'] };
  gateway.reload(
    named({
      ...{ stays: bearer, expires: { expires: '2020-01-01' }, narrows: { senders: [TO] }, path: bearer },
      moves: { clients: ['192.0.2.1'] },
    }),
  );
  for (const { socket } of clients) await closed(socket);
  await until(() => linesOf(gateway, /websocket closed/).length === 5);
  for (const { reason } of linesOf(gateway, /websocket closed/)) assert.equal(reason, 'no_longer_allowed');
  assert.equal(socket.destroyed, false);
  backend.sockets[0]!.write('still open');
  await until(() => text().endsWith('still open'));
  await gateway.close();
  await closed(socket);
});

// SIGTERM waited for it forever, because closing all connections does not include a socket that is being upgraded.
test('closing lets a response to a request for a WebSocket finish', async (t) => {
  const { backend, gateway } = await startReceiving(t, (socket) => {
    socket.write('HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf');
  }, { shutdown: '1h' });
  const { socket, text } = wish(t, gateway, '/v1/about | bearer');
  await until(() => text().endsWith('half'));
  const closing = gateway.close();
  backend.sockets[0]!.write('half');
  await closed(socket);
  assert.match(text(), /^HTTP\/1\.1 200 [^]*\r\n\r\nhalfhalf$/);
  await closing;
});

// A request for a WebSocket on a route other than receive released the slot although the backend was still working.
test('a WebSocket without a handshake response ends with its client and the gateway; except on receive, it keeps its slot when the client disconnects', async (t) => {
  const silent = (socket: Duplex): void => void socket.on('end', () => socket.end()).resume();
  const own = { shutdown: '1h', allow: ['messaging'], backend: { parallel: 1 } };
  const { backend, gateway } = await startReceiving(t, silent, own, { slotTimeoutMs: 3_600_000 });
  const { socket } = wish(t, gateway);
  await until(() => backend.seen.length === 1);
  socket.destroy();
  await closed(backend.sockets[0] as net.Socket);
  await until(() => requests(gateway).length === 1);
  assert.equal(outcomeOf(requests(gateway)[0]), '499 client_left');
  const { socket: acting } = wish(t, gateway, '/v1/search | bearer');
  await until(() => backend.seen.length === 2);
  acting.destroy();
  const next = send(gateway, 'next');
  for (let i = 0; i < 3; i++) await settled(gateway);
  assert.equal(backend.seen.length, 2);
  const refusal = declined(t, gateway);
  await until(() => backend.seen.length === 3);
  await gateway.close();
  for (const answer of [refusal, next]) assert.equal(outcomeOf(await answer), '503 shutting_down');
});

// Node reports a reset as an error of the socket, which crashes a process that does not listen for it.
test('WebSocket: a client that resets its connection while its handshake waits does not crash the process', async (t) => {
  const { backend, gateway } = await startReceiving(t, () => {});
  for (let i = 1; i <= 8; i++) {
    const { socket } = wish(t, gateway);
    await until(() => backend.seen.length === i);
    socket.resetAndDestroy();
    await until(() => requests(gateway).length === i);
    assert.equal(outcomeOf(requests(gateway).at(-1)!), '499 client_left');
  }
});

// It was opened after the loop that closes them, and held up the gateway until the deadline.
test('WebSocket: one that the backend accepts while the gateway closes is closed', async (t) => {
  const own = { shutdown: '1h', allow: ['messaging'] };
  const { backend, gateway } = await startReceiving(t, () => {}, own);
  const { socket } = wish(t, gateway, '/v1/search | bearer');
  await until(() => backend.seen.length === 1);
  const closing = gateway.close();
  backend.sockets[0]!.write(ACCEPTED);
  await closed(socket);
  await closing;
  assert.equal(linesOf(gateway, /websocket closed/)[0]!.reason, 'shutdown');
});

test('WebSocket: one that is still connecting to the backend while the gateway closes is 503', ON_NODE, async (t) => {
  const asked = new Promise<Parameters<Look>[1]>((resolve) => takeLookup(t, 'late.test', (_, find) => resolve(find)));
  const { backend, gateway } = await startReceiving(t, () => {}, { shutdown: '1h' });
  gateway.reload({ ...RECEIVING, shutdown: '1h', backend: { url: backend.url.replace(backend.host, 'late.test') } });
  const refusal = declined(t, gateway);
  const find = await asked;
  const closing = gateway.close();
  find(backend.host);
  assert.equal(outcomeOf(await refusal), '503 shutting_down');
  await closing;
});

test('WebSocket: a reload during a handshake closes a WebSocket that its token may no longer open', async (t) => {
  const { backend, gateway } = await startReceiving(t, () => {});
  const { socket, text } = wish(t, gateway);
  await until(() => backend.seen.length === 1);
  gateway.reload({ ...RECEIVING, allow: ['info'] });
  backend.sockets[0]!.write(`${ACCEPTED}a message`);
  await closed(socket, 'the WebSocket to be closed, as its token may no longer receive');
  assert.doesNotMatch(text(), /a message/);
  await until(() => linesOf(gateway, /websocket closed/).length === 1);
  assert.equal(linesOf(gateway, /websocket closed/)[0]!.reason, 'no_longer_allowed');
});

test('WebSocket: one whose token has expired is closed within a minute', { isAlone: true }, async (t) => {
  const expires = '2027-06-30T12:00:00Z';
  let nowMs = Date.parse(expires) - 1;
  // Intervals that start with the gateway are run by this test, instead of after half a minute.
  const sweeps: (() => void)[] = [];
  const { setInterval } = globalThis;
  const noting = (run: (...args: unknown[]) => void, everyMs: number, ...args: unknown[]): unknown => {
    if (everyMs <= 60_000) sweeps.push(() => run(...args));
    return setInterval(run, everyMs, ...args);
  };
  globalThis.setInterval = noting as typeof setInterval;
  const { gateway } = await startReceiving(t, undefined, tokens({ expires }, {}), { now: () => nowMs })
    .finally(() => (globalThis.setInterval = setInterval));
  const { socket } = await accepted(t, gateway);
  const other = await accepted(t, gateway, `bearer ${OTHER}`);
  for (const sweep of sweeps) sweep();
  assert.equal(linesOf(gateway, /websocket closed/).length, 0);
  nowMs++;
  for (const sweep of sweeps) sweep();
  await closed(socket, 'the WebSocket of the expired token to be closed');
  await until(() => linesOf(gateway, /websocket closed/).length === 1);
  const { token, reason } = linesOf(gateway, /websocket closed/)[0]!;
  assert.deepEqual([token, reason, other.socket.destroyed], ['test', 'no_longer_allowed', false]);
});

test('WebSocket: a client that keeps sending before its handshake has a response is disconnected', async (t) => {
  const { backend, gateway } = await startReceiving(t, () => {});
  const { socket } = wish(t, gateway);
  await until(() => backend.seen.length === 1);
  const isDropped = (): boolean => requests(gateway).some(({ status }) => status === 499);
  for (let i = 0; i < 200 && !isDropped(); i++) {
    socket.write('x'.repeat(4096));
    await settled(gateway);
  }
  assert.ok(isDropped(), 'it sent 200 chunks, and was not dropped');
  await closed(socket);
});

section('READING'); // ─────────────────────────────────────────────────────────────────────────────
test('no more of an upload is read than the backend accepts', async (t) => {
  let taken = 0;
  const total = 40 * MIB;
  const backend = await startBackend(t, async (req, res) => {
    // Reads a chunk, lets everything else run for a while, and reads the next.
    for await (const chunk of req) {
      taken += (chunk as Buffer).length;
      await new Promise((resolve) => setImmediate(resolve));
      // Most of the difference is in the system's socket buffers.
      assert.ok(socket.bytesWritten - taken < 24 * MIB, `${socket.bytesWritten - taken} bytes are on their way`);
    }
    res.writeHead(201).end('{"timestamp":"1"}');
  });
  const body = `${HELLO.slice(0, -1)},"message2":"`;
  const begun = `${post(SECRET, total, 'Connection: close')}${body}`;
  const { socket, text } = open(t, await startGateway(t, backend), begun);
  const filler = Buffer.alloc(256 * 1024, 'x');
  for (let left = total - body.length - 2; left > 0; left -= filler.length) {
    if (!socket.write(filler.subarray(0, left))) await once(socket, 'drain');
  }
  socket.write('"}');
  await closed(socket);
  assert.deepEqual([statusOf(text()), taken], [201, total]);
});

section('RESPONSES'); // ───────────────────────────────────────────────────────────────────────────
// The head waited for the end of the upload, for 2 s of silence, or for 30 s.
test('a response without a body is written at once, although its request is not complete', async (t) => {
  const backend = await startBackend(t, (_, res) => void res.writeHead(413, { 'Content-Length': 0 }).end());
  const own = { cors: [DASHBOARD], ...tokens({}) };
  const gateway = await startGateway(t, backend, own, { lingerMs: 3_600_000, stallTimeoutMs: 3_600_000 });
  const wanted = `Origin: ${DASHBOARD}\r\nAccess-Control-Request-Method: POST\r\nContent-Length: 9`;
  const rows = [
    [`${post(SECRET, LARGE.length + 200_000)}${LARGE.slice(0, -3)}`, 413],
    [`OPTIONS /v2/send HTTP/1.1\r\nHost: g\r\n${wanted}\r\n\r\n`, 204],
    ['HEAD /v1/about HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer x\r\nContent-Length: 9\r\n\r\n', 401],
  ] as const;
  for (const [bytes, status] of rows) {
    const { socket, text } = open(t, gateway, bytes);
    await until(() => text().endsWith('\r\n\r\n'), bytes.slice(0, 60));
    assert.equal(statusOf(text()), status);
    socket.destroy();
  }
});

section('ADDRESSES'); // ───────────────────────────────────────────────────────────────────────────
const ELSEWHERE = { clients: ['192.0.2.0/24', '2001:db8::/32'] };
table('clients: an address that is not on the list is 403 before its credential is checked', ELSEWHERE)`
  * → 403 client_not_allowed
  bearer ;; bearer | X-Forwarded-For: 192.0.2.1 ;; bearer ${OTHER}`;
table('clients: an address that is on the list passes', { clients: ['127.0.0.0/8'] })`
  * → 200
  bearer`;

const FORWARDED = literal`
  127.0.0.1 ⇐ X-Forwarded-For:
  203.0.113.7 ⇐ X-Forwarded-For: 203.0.113.7
  # What stands left is the client's own claim, and several headers are one list.
  203.0.113.7 ⇐ X-Forwarded-For: 6.6.6.6, 203.0.113.7
  203.0.113.7 ⇐ X-Forwarded-For: 6.6.6.6, 203.0.113.7, 10.0.0.2
  203.0.113.7 ⇐ X-Forwarded-For: 6.6.6.6 | X-Forwarded-For: 203.0.113.7 | X-Forwarded-For: 10.0.0.2
  203.0.113.7 ⇐ X-Forwarded-For: ::ffff:203.0.113.7
  203.0.113.7 ⇐ X-Forwarded-For: ::FFFF:203.0.113.7
  203.0.113.7 ⇐ X-Forwarded-For: 203.0.113.7:4711
  2001:db8::1 ⇐ X-Forwarded-For: [2001:db8::1]:443
  fe80::1 ⇐ X-Forwarded-For: fe80::1%eth0
  # All are trusted: the outermost. Beyond what is no address nobody can be known.
  10.0.0.3 ⇐ X-Forwarded-For: 10.0.0.3, 10.0.0.2
  10.0.0.2 ⇐ X-Forwarded-For: 203.0.113.7, unknown, 10.0.0.2
  127.0.0.1 ⇐ X-Forwarded-For: 203.0.113.7, ,`;
table("trustedProxies: the client is the right-most address that is not a trusted proxy's", {
  trustedProxies: ['127.0.0.1', '10.0.0.0/8'],
})`
  * bearer → 200
  GET /v1/about → client=127.0.0.1 | > X-Forwarded-For: 127.0.0.1
  ${FORWARDED.replace(/(\S+) ⇐ (.*)/g, '$2 → client=$1 | > X-Forwarded-For: $1')}`;

section('LOG'); // ─────────────────────────────────────────────────────────────────────────────────

test('a log line in text form is one line, whatever it contains; the first one lists what the tokens may do', async (t) => {
  const config = tokens({ allow: ['info', 'receive'] }, { allow: ['setup', 'receive', 'send'] });
  config.tokens!.old = { secret: `${SECRET}2`, allow: ['info'], expires: '2020-01-01' };
  const { backend, gateway } = await startBoth(t, { log: { format: 'text' }, allow: ['messaging'], ...config });
  await ask(gateway, { headers: BEARER });
  await ask(gateway, { body: '{"a":', headers: { authorization: `Bearer ${OTHER}` } });
  const lines = [
    /^\S+Z warn {2}listening listen=http:\/\/127\.0\.0\.1:\d+ backend=http:\/\/127\.[\d.]+:\d+ tokens=3 names=test,other,old allow=info,receive,setup,send warning="the token \\"old\\" has expired"$/,
    /^\S+Z info {2}status=200 method=GET route=\/v1\/about token=test client=127\.0\.0\.1 form=bearer ms=\d+ bytesOut=\d+ requestId=[\w-]{36}$/,
    /^\S+Z warn {2}status=400 code=bad_json method=POST route=\/v2\/send token=other client=127\.0\.0\.1 form=bearer ms=\d+ bytesIn=5 bytesOut=\d+ requestId=[\w-]{36}$/,
  ];
  for (const [i, line] of lines.entries()) assert.match(gateway.log[i]!, line);
  const { log } = await startGateway(t, backend, { ...NO_TOKENS, log: { format: 'text' } });
  assert.match(log[0]!, / warning="no tokens are configured: all requests are accepted without authentication"$/);
});

test('a log line names twenty tokens, and has the number of the others', async (t) => {
  for (const [count, end] of [[20, ''], [21, ',and 1 more']] as const) {
    const names = Array.from({ length: count }, (_, i) => `t${i}`);
    const all = Object.fromEntries(names.map((name) => [name, { secret: `the-secret-of-${name}` }]));
    const gateway = await startGateway(t, { url: 'http://127.0.0.1:1' }, { tokens: all });
    assert.equal(logLines(gateway.log)[0]!.names, `${names.slice(0, 20)}${end}`);
  }
});

/** The fields of a request's log line: those that the gateway makes, and those whose text a client has written. */
const LINE_FIELDS = {
  own: 'requestId client method route token form status code reason hint closing bytesIn bytesOut ms'.split(' '),
  written: ['origin'],
};

// With the User-Agent as a field, added without a limit, one address could write 15 KiB a line, and every test passed.
test("the fields of a request's log line are a known list; whatever a refused client sends, its lines are at most 1 KiB", async (t) => {
  const { own, written } = LINE_FIELDS;
  const fields = groupsOf(/'request', \{([^]*?)\n {2}\}\);/.exec(SOURCE)![1]!, /^ {4}(\w+)[:,]/gm);
  const hint = 'see "A field of the log" in CONTRIBUTING.md';
  assert.deepEqual(difference('logExchange', fields, 'LINE_FIELDS', [...own, ...written]), [], hint);
  const [, manual] = MANUAL.split('## The log\n');
  assert.deepEqual(fields.filter((name) => !new RegExp(`\\b${name}\\b`).test(manual!)), [], 'not in docs/settings.md');
  const [, last] = /^const LAST_FIELDS = '([^']*)'/m.exec(SOURCE)!;
  assert.deepEqual(last!.split(' ').slice(-written.length), written, 'a text from a client is the last field');

  const log = { level: 'debug', format: 'json' } as const;
  const { gateway } = await startBoth(t, { log, cors: [DASHBOARD], trustedProxies: ['127.0.0.1'] });
  const long = 'x'.repeat(15 * 1024);
  const framing = ['content-length', 'transfer-encoding', 'connection'];
  const words = groupsOf(SOURCE, /'([a-z]+(?:-[a-z0-9]+)+)'/g);
  const others = 'host origin referer cookie from via range expect upgrade user-agent x-request-id'.split(' ');
  const names = [...new Set([...words, ...others])].filter((name) => !framing.includes(name));
  const values = [long, `https://${long}`];
  const bearer = `Authorization: Bearer ${SECRET}`;
  const answers: string[] = [];
  for (const name of names) {
    const both = values.map((value) => `${name}: ${value}`).flatMap((header) => [
      rawRequest(gateway, '/v1/about', { headers: [header] }),
      rawRequest(gateway, '/v1/accounts', { headers: [bearer, header] }),
    ]);
    answers.push(...await Promise.all(both));
  }
  const path = '/rate-limit-challenge'.repeat(700);
  for (const target of [`/${long}`, path, `/v1/about?${long}`, `/@auth=${long}/v1/about`]) {
    answers.push(await rawRequest(gateway, target));
    answers.push(await rawRequest(gateway, target, { headers: [bearer], method: 'DELETE' }));
  }
  answers.push(await rawRequest(gateway, '/v2/send', { body: `{"${long}":"${long}"}`, method: 'POST' }));
  answers.push(await raw(gateway, `${long} / HTTP/1.1\r\n\r\n`));
  const refused = answers.filter((text) => statusOf(text) >= 400).length;
  assert.ok(refused > 100, `${refused} of ${answers.length} requests were refused`);
  const tooLong = gateway.log.filter((line) => Buffer.byteLength(line) > 1024);
  const lengthOf = (field: unknown): number => JSON.stringify(field).length;
  const culprits = logLines(tooLong).flatMap((line) => Object.keys(line).filter((name) => lengthOf(line[name]) > 500));
  assert.deepEqual([...new Set(culprits)], [], 'the fields that a client can make long');
  assert.deepEqual(tooLong, []);
});

test('log.level is the least severe level that is logged', async (t) => {
  const { gateway } = await startBoth(t, { log: { format: 'json', level: 'warn' } });
  await ask(gateway, { headers: BEARER });
  await ask(gateway, {});
  assert.deepEqual(requests(gateway).map((line) => line.status), [401]);
});

test('a gateway whose standard output is closed continues, and exits with 0', async (t) => {
  const gateway = await startProcess(t, { backend: await startBackend(t) });
  gateway.child.stdout!.destroy();
  for (let i = 1; i <= 20; i++) assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
  await gateway.close();
  assert.doesNotMatch(gateway.output(), /EPIPE/);
});

// Each line increased memory, and SIGTERM no longer stopped the process; on Deno it hung after 260 requests.
test('an unread log is discarded beyond 1 MiB and counted, and blocks neither the gateway nor its shutdown', async (t) => {
  const env = { LOG_LEVEL: 'debug', ALLOW: 'metrics' };
  const gateway = await startProcess(t, { backend: await startBackend(t), env });
  gateway.child.stdout!.pause();
  const agent = new http.Agent({ keepAlive: true });
  t.after(() => agent.destroy());
  const total = 3600;
  const path = '/rate-limit-challenge'.repeat(8); // as long as a log line can have it
  const askMany = (count: number) =>
    Promise.all(Array.from({ length: 8 }, async () => {
      for (let i = 0; i < count / 8; i++) assert.equal((await ask(gateway, { path, agent })).status, 401);
    }));
  await askMany(total);
  gateway.child.stdout!.resume();
  await until(() => /log lines were dropped.*\n$/.test(gateway.output()));
  gateway.child.stdout!.pause();
  const logged = requests(gateway).length;
  assert.ok(logged > 1000, `${logged} lines were kept`);
  assert.equal(linesOf(gateway, /dropped/).length, 1);
  assert.equal(logLines(gateway.log).at(-1)!.lines, total - logged);
  const { log_lines_dropped_total: dropped } = await scrape(gateway, { path: '/metrics', headers: BEARER });
  assert.equal(dropped, total - logged);
  await askMany(800); // several times the capacity of the pipe
  await gateway.close();
});

test('standard output and standard error on a full disk block neither the gateway nor its shutdown', {
  skip: process.platform !== 'linux' && 'only Linux has /dev/full',
}, async (t) => {
  // No log has the port of the gateway, so the test sets it, and repeats a request there until a response arrives.
  const to = { port: await sparePort() };
  const command = [process.execPath, ...'Deno' in globalThis ? ['run', '-A'] : [], ...LOADER, fileURLToPath(FILE)];
  const { url } = await startBackend(t);
  const env = { HOME: process.env.HOME, LISTEN: `127.0.0.1:${to.port}`, API_TOKENS: SECRET, BACKEND_URL: url };
  const child = start([], env, ['sh', '-c', 'exec "$0" "$@" >/dev/full 2>&1', ...command]);
  t.after(() => child.kill('SIGKILL'));
  while (!await ask(to, { path: '/healthz' }).catch(() => undefined)) assert.equal(child.exitCode, null);
  for (const signal of ['SIGHUP', 'SIGTERM'] as const) {
    for (let i = 0; i < 3; i++) assert.equal((await ask(to, { body: MESSAGE, headers: BEARER })).status, 201);
    process.kill(child.pid!, signal);
  }
  assert.deepEqual(await once(child, 'exit'), [0, null]);
});

/** What runs outside a request, and how a test breaks it. The process continues to serve, and exits with 0. */
const OUTSIDE: Record<string, (on: { gateway: Process; file: string; t: TestContext }) => Promise<unknown>> = {
  'the watcher: the file is a link to itself': async ({ gateway, file }) => {
    rmSync(file);
    await symlink(file, file);
    await until(() => gateway.output().includes('reload failed'));
  },
  'the reload: by a signal, while the file is a link to itself': async ({ gateway }) => {
    const count = () => gateway.output().split('reload failed').length;
    const before = count();
    process.kill(gateway.child.pid!, 'SIGHUP');
    await until(() => count() > before);
  },
  'the reload: the file is a folder': async ({ gateway, file }) => {
    const count = () => gateway.output().split('reload failed').length;
    const before = count();
    rmSync(file);
    await mkdir(file);
    process.kill(gateway.child.pid!, 'SIGHUP');
    await until(() => count() > before);
  },
  'the reload: the file is back': async ({ gateway, file }) => {
    rmSync(file, { recursive: true });
    writeFileSync(file, JSON.stringify({ tokens: { a: { secret: SECRET } }, backend: { url: 'http://127.0.0.1:1' } }));
    process.kill(gateway.child.pid!, 'SIGHUP');
    await until(() => gateway.output().includes('"reloaded"'));
  },
  'the question to the backend: it is not there': async ({ gateway }) => {
    await until(() => gateway.output().includes('did not answer as expected'));
  },
  'sockets of clients: they are reset, in each state': async ({ gateway, t }) => {
    const beginnings = [
      '',
      'GET ',
      `${post(SECRET, 9)}{`,
      ABOUT,
      ABOUT + ABOUT,
      'x\r\n\r\n',
      '\x16\x03\x01',
      `GET ${RECEIVE} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nx`,
      'CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\nx',
    ];
    for (const bytes of beginnings) {
      const early = open(t, gateway, bytes).socket;
      await once(early, 'connect');
      early.resetAndDestroy();
      const late = open(t, gateway, bytes).socket;
      await ask(gateway, { path: '/healthz' });
      late.resetAndDestroy();
    }
  },
  'the log: nobody reads it': async ({ gateway }) => {
    for (const stream of [gateway.child.stdout, gateway.child.stderr]) stream!.destroy();
    await ask(gateway, {});
  },
};

test('after a failure of anything that runs outside a request, the process continues to serve, and exits with 0', async (t) => {
  const file = join(folder(t), 'gateway.json');
  const { url } = await startBackend(t);
  writeFileSync(file, JSON.stringify({ tokens: { a: { secret: SECRET } }, backend: { url } }));
  const gateway = await startProcess(t, { args: ['--config', file] });
  for (const [place, fail] of Object.entries(OUTSIDE)) {
    await fail({ gateway, file, t });
    // Within one turn of its event loop the process would have exited.
    for (let i = 0; i < 3; i++) {
      const { status } = await ask(gateway, { path: '/healthz' }).catch((error) => ({ status: String(error) }));
      assert.equal(status, 200, `${place}: ${gateway.output()}`);
    }
  }
  await gateway.close();
});

test('an error of accept is one warning a minute, and the port stays open', async (t) => {
  const { gateway } = await startBoth(t);
  const error = Object.assign(new Error('accept ENOBUFS'), { code: 'ENOBUFS' });
  for (let i = 0; i < 3; i++) gateway.server.emit('error', error);
  const reasons = linesOf(gateway, /^a connection could not be accepted$/).map(({ reason }) => reason);
  assert.deepEqual(reasons, ['ENOBUFS']);
  assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
});

test('a process without a free file descriptor for connections serves again once there is one, and exits with 0', {
  skip: (!isNode || process.platform === 'win32') && 'other runtimes cannot start with so few file descriptors',
}, async (t) => {
  const limited: Program = ['sh', '-c', 'ulimit -n 40; exec "$0" "$@"', ...program()];
  const gateway = await startProcess(t, { backend: await startBackend(t), program: limited });
  const sockets = Array.from({ length: 60 }, () => open(t, gateway).socket);
  await Promise.all(sockets.map((socket) => socket.connecting ? once(socket, 'connect') : undefined));
  await ask(gateway, { path: '/healthz' }).catch(() => {}); // refused, or served instead of another
  for (const socket of sockets) socket.destroy();
  while (!await ask(gateway, { path: '/healthz' }).catch(() => undefined));
  assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
  await gateway.close();
});

section('LOADING'); // ─────────────────────────────────────────────────────────────────────────────

/** Part of a message. Deno 2.9 reveals the user's id only with a separate permission. */
const BY_USER = 'Deno' in globalThis ? '' : ` by user ${process.getuid?.()}`;
const MISSING = 'does not exist';
const NO_RECIPIENT =
  'is not a phone number ("+" and 5 to 15 digits), a user name (name.01), a UUID, a group\'s id or group.*';
const NO_DATE = 'is not a date such as 2027-06-30 (valid through that day, UTC) or a time such as 2027-06-30T12:00:00Z';
const NO_RULE =
  'is not one of send, info, receive, messaging, setup, metrics, or a pattern such as "GET /v1/groups/:number"';
const hashOf = (text: string): string => createHash('sha256').update(text).digest('hex');

/**
 * Loads the configuration of each row. After the arrow are all its problems, separated by " | ".
 *   {…}        what createGateway is given          @ {…}      settings of a token that has a secret
 *   env {…}    variables of the environment         load {…}   sources for loadSettings
 *   file TEXT  a configuration file, FILE in messages
 * DIR is the folder of these files. A row that ends in "| for: a, b" is several rows, each with one of them for X.
 */
function checkProblems(t: TestContext, dir = folder(t)) {
  const file = join(dir, 'gateway.json');
  const check = (row: string): void => {
    const [, kind = '', text = '', problems = ''] = /^(@ |env |load |file )?(.*?) →(?: (.*))?$/.exec(row)!;
    if (kind === 'file ') writeFileSync(file, unescaped(text));
    const value = kind === 'file ' ? { file } : JSON.parse(text.replaceAll('DIR', dir));
    const found = problemsOf(() => {
      if (kind === '' || kind === '@ ') createGateway(kind ? tokens(value) : value);
      else loadSettings(kind === 'env ' ? { env: value } : value);
    }).join(' | ');
    assert.equal(found.replaceAll(file, 'FILE').replaceAll(dir, 'DIR'), problems, row);
    assert.doesNotMatch(found, SECRETS);
  };
  return (rows: TemplateStringsArray, ...values: unknown[]): void => {
    for (const line of literal(rows, ...values).split('\n').map((text) => text.replace(/^ +/, ''))) {
      const [row = '', list] = line.split(' | for: ');
      if (row === '' || row.startsWith('#')) continue;
      for (const value of list?.split(', ') ?? ['X']) check(row.replaceAll(/\bX\b/g, value));
    }
  };
}

test('every mistake in a configuration is reported with its place, and no secret is shown', (t) => {
  const url = 'must begin with "http://" or "https://" and have no query, such as http://signal-api:8080';
  const isNull = 'null is not allowed; remove the line';
  const digest = `sha256:${hashOf(SECRET)}`;
  checkProblems(t)`
    {"lisen":":1","zzz":1,"tokens":{"a":{"secret":"${SECRET}"}}} → lisen: is not a setting; did you mean "listen"? | zzz: is not a setting
    # A key that is no plain word is not shown, however short: it could be part of a secret, or forge a line of the log.
    {"zz z":1,"z\n":1,"z\u001b":1,"a:b":1} → ${
    [0, 1, 2, 3].map((i) => `the configuration[${i}]: is not a setting`).join(' | ')
  }
    {"log":{"\u001b[2J":1},"tokens":{"a":{"secret":"${SECRET}","ü":1}}} → log[0]: is not a setting | tokens.a[0]: is not a setting
    {"backend":{"ulr":"x"}} → backend.ulr: is not a setting; did you mean "url"?
    {"backend":"http://x"} → backend: must be an object
    X → the configuration: must be an object | for: [], null
    {"tokens":{}} → tokens: contains no token; remove it to run without tokens
    {"tokens":[]} → tokens: must be an object, name to settings
    {"tokens":null,"clients":null,"tls":{"cert":null}} → tokens: ${isNull} | clients: ${isNull} | tls.cert: ${isNull}
    {"tokens":{"a":null,"b":{"secret":null}},"backend":null} → backend: ${isNull} | tokens[0]: ${isNull} | tokens.b.secret: ${isNull}
    @ {"rate":null,"defaults":{"number":null}} → tokens.test.rate: ${isNull} | tokens.test.defaults.number: ${isNull}
    {"tokens":{X}} → tokens[0]: must be an object with "secret" or "secretFile" | for: "a":"${SECRET}", "${SECRET}":"grafana"
    {"tokens":{"a":{}}} → tokens.a: needs exactly one of "secret" and "secretFile"
    @ {"secretFile":"/x"} → tokens.test: needs exactly one of "secret" and "secretFile"
    @ {"secret":"X"} → tokens.test.secret: the secret is shorter than 16 characters; "gateway.ts token" makes a good one | for: short, of-15-character
    @ {"secret":17} → tokens.test.secret: must be a string
    @ {"secret":"sha256:12"} → tokens.test.secret: after "sha256:" there must be 64 hexadecimal digits
    @ {"secret":"${SECRET}\n"} → tokens.test.secret: has several lines, or a control character; keep one line with only the secret
    # In JSON nobody quotes a secret by mistake.
    @ {"secret":"X"} → | for: \"${SECRET}\", {${SECRET}}, ${SECRET};${OTHER}, ${SECRET} ${OTHER}, of-16-characters
    @ {"secret":"X"} → tokens.test.secret: starts or ends with white space | for:  ${SECRET}, ${SECRET} , \u00a0${SECRET}
    {"tokens":{"a":{"secretFile":"/no/such/file"}}} → tokens.a.secretFile: /no/such/file ${MISSING}
    {"tokens":{"a":{"secret":"${SECRET}"},"b":{"secret":"${SECRET}"}}} → tokens: "a" and "b" have the same secret
    {"tokens":{"a b":{"secret":"${SECRET}"}}} → tokens[0]: a name may have letters, digits, "_", "-" and ".", 64 at most
    # Every line of the log would show the name.
    {"tokens":{"a":{"secret":"${OTHER}"},"${SECRET}":{"secret":"X"}}} → tokens[1]: has a secret as its name | for: ${SECRET}, ${digest}
    @ {"methods":["paht"],"expires":"2027-02-30"} → tokens.test.methods[0]: "paht" is not one of bearer, basic, query, path, body | tokens.test.expires: "2027-02-30" ${NO_DATE}
    @ {"expires":"2027-02-31T00:00:00Z"} → tokens.test.expires: the value ${NO_DATE}
    @ {"senders":["0664123"],"recipient":["+1"]} → tokens.test.senders[0]: "0664123" is not "+" and 5 to 15 digits; ${WRITE_NUMBER} | tokens.test.recipient: is not a setting; did you mean "recipients"?
    @ {"recipients":[]} → tokens.test.recipients: must be a list with at least one entry
    @ {"recipients":["${TO}","X"]} → tokens.test.recipients[1]: "X" ${NO_RECIPIENT} | for: --x, , Mum, 4915551234567x
    @ {"recipients":["${TO}","X"]} → tokens.test.recipients[1]: "X" ${NO_RECIPIENT}; ${WRITE_NUMBER} | for: 4915551234567, +49 1555, (0664) 123-45
    @ {"clients":["X"]} → tokens.test.clients[0]: "X" is not an address or a CIDR range | for: 10.0.0.0/33, ::1/129, 1.2.3.4/, 1.2.3.4/8/8
    # What is no text gets no advice for texts.
    @ {"clients":["1.2.3.4",X]} → tokens.test.clients[1]: X is not an address or a CIDR range | for: {}, null, ["caddy"]
    {"allow":["info","X"]} → allow[1]: "X" ${NO_RULE} | for: snd, get /v1/about, GET v1/about, HEAD /v1/about, GET /v1/a%62, GET /v1/x?y, constructor, toString, __proto__
    {"rate":"30","limits":{"body":"150"},"log":{"level":"trace"}} → rate: "30" is not a rate such as 30/1m | limits.body: "150" is not a size such as 150MiB | log.level: "trace" is not one of debug, info, warn, error
    {"rate":["30/1m"],"limits":{"connections":0},"shutdown":"10"} → rate: ["30/1m"] is not a rate such as 30/1m | limits.connections: 0 is not a whole number of at least 1 | shutdown: "10" is not a duration such as 10s
    {"shutdown":"X"} → shutdown: "X" is not a duration such as 10s | for: 2147483648ms, 2147484s, 25d, 0s ms
    {"shutdown":"X"} → | for: 999999999ms, 2147483s, 24d
    {"backend":{"url":"ftp://x","timeout":"1w"}} → backend.url: ${url} | backend.timeout: "1w" is not a duration such as 150s
    {"backend":{"url":"X"}} → backend.url: ${url} | for: http://user:${SECRET}@x/?q, http://api:${SECRET}/x@backend:1, api:${SECRET}@backend:1, signal-api:8080, signal-api, http://, http://x#y
    {"backend":{"url":"http://api:X@b:1"}} → backend.url: has a "%" in its userinfo that must be written "%25" | for: 100%${SECRET}, %ff${SECRET}
    {"listen":"8880","auth":{"anonymous":"yes"}} → listen: "8880" is not host:port, :port or [::]:port; put a colon before the port | auth.anonymous: "yes" is not true or false
    {"listen":"X"} → listen: unix sockets are not supported; write 127.0.0.1:PORT, which only this machine can reach | for: unix:/x.sock, unix:/run/${SECRET}.sock, unix:
    {"X":[]} → X: must be a list with at least one entry | for: allow, clients, trustedProxies, cors
    {"auth":{"methods":[]}} → auth.methods: must be a list with at least one entry`;
});

test('the messages for common mistakes have the correct spelling', (t) => {
  const dir = folder(t);
  writeFileSync(join(dir, 'two'), `${SECRET}\r\n${OTHER}\n`);
  for (const encoding of ['utf8', 'utf16le'] as const) {
    writeFileSync(join(dir, encoding), Buffer.from('\ufeff{}', encoding));
  }
  writeFileSync(join(dir, 'no-bom'), Buffer.from('{}', 'utf16le'));
  writeFileSync(join(dir, 'big-endian'), Buffer.from('\ufeff{}', 'utf16le').swap16());
  const url = 'must begin with "http://" or "https://" and have no query, such as http://signal-api:8080';
  const notUtf8 = 'save it as UTF-8, without a byte order mark';
  const name = 'names are not resolved: write the address (in compose "ipv4_address" fixes it)';
  const brackets = 'put an IPv6 address in brackets: [::1]:8080';
  const port = 'the highest port is 65535';
  const noListen = 'is not host:port, :port or [::]:port';
  const quotes = 'leave out the quotes';
  const groupId = 'this is not the "id" of a group; GET /v1/groups/+NUMBER lists them';
  const API = `"API_TOKENS":"${SECRET}"`;
  checkProblems(t, dir)`
    env {${API},"TRUSTED_PROXIES":"X"} → TRUSTED_PROXIES[0]: "X" is not an address or a CIDR range; ${name} | for: caddy, localhost, a.example
    load {"file":"DIR/X"} → DIR/X: is not a JSON object: line 1, column 1: ${notUtf8} | for: utf8, utf16le, big-endian
    load {"file":"DIR/no-bom"} → DIR/no-bom: is not a JSON object: line 1, column 2: ${notUtf8}
    env {${API},"BACKEND_URL":"X"} → BACKEND_URL: ${url}; ${quotes} | for: \"http://backend:8080\", 'http://backend:8080'
    env {${API},"RATE":"'1/1m'"} → RATE: "'1/1m'" is not a rate such as 30/1m; ${quotes}
    env {${API},"BACKEND_URL":"X"} → BACKEND_URL: ${url}; ${brackets} | for: http://::1:8080, https://fd00::5/, http://2001:db8::1:8080
    env {${API},"BACKEND_URL":"X"} → BACKEND_URL: ${url}; ${port} | for: http://backend:80800, http://10.0.0.1:65536/
    env {${API},"LISTEN":"X"} → LISTEN: "X" ${noListen}; ${brackets} | for: ::1:8880, :::8880, fd00::5:8880
    env {${API},"LISTEN":"X"} → LISTEN: "X" ${noListen}; ${port} | for: :65536, localhost:88800
    {"listen":8880} → listen: 8880 ${noListen}; put a colon before the port
    @ {"secretFile":"DIR/two"} → tokens.test: needs exactly one of "secret" and "secretFile"
    {"tokens":{"a":{"secretFile":"DIR/two"}}} → tokens.a.secretFile: has several lines, or a control character; keep one line with only the secret
    {"allow":["X"]} → allow[0]: "X" ${NO_RULE}; leave out the "/" at the end | for: GET /v1/about/, * /v1/x/
    {"allow":["X"]} → allow[0]: "X" ${NO_RULE}; put the method before the path, or "*" for all methods | for: /v1/about, /v1/groups/
    env {"API_TOKENS":"X=${SECRET}"} → API_TOKENS[0]: is too short for a secret; if it is part of the next name, write that without a space | for: my phone
    file {"tokens":{"a":{"secret":"${SECRET}","senders":[+15550100001]}}} → FILE: is not a JSON object: line 1, column 69: no value begins with "+"; a phone number needs double quotes
    @ {"senders":[15550100001],"defaults":{"number":15550100001}} → tokens.test.senders[0]: 15550100001 is not "+" and 5 to 15 digits; ${WRITE_NUMBER} | tokens.test.defaults.number: 15550100001 is not "+" and 5 to 15 digits; ${WRITE_NUMBER}
    @ {"recipients":["group.QUJD"]} → tokens.test.recipients[0]: "group.QUJD" ${NO_RECIPIENT}; ${groupId}
    @ {"recipients":["X"]} → tokens.test.recipients[0]: the value ${NO_RECIPIENT}; ${groupId} | for: ${INTERNAL_ID}, ${
    GROUP.slice(0, -1)
  }
    @ {"recipients":["https://signal.group/#CjQKIA"]} → tokens.test.recipients[0]: the value ${NO_RECIPIENT}; an invite link does not name a group; write the "id" that GET /v1/groups/+NUMBER lists
    @ {"recipients":["Mum"]} → tokens.test.recipients[0]: "Mum" ${NO_RECIPIENT}`;
});

test('every mistake in the environment is reported, none leaves the gateway open, and no secret is shown', (t) => {
  const dir = folder(t);
  for (const [name, text] of [['empty', '# nothing here\n\n'], ['half', '{'], ['typo', '{"token":{}}']] as const) {
    writeFileSync(join(dir, name), text);
  }
  const none = 'contains no token; remove it to run without tokens';
  const empty = 'is set but empty; unset it, or give it a value';
  const unclear = 'is a name without a secret, or a secret that ends in "=" or ":": write name=SECRET';
  const cwd = process.cwd();
  const open = '"LISTEN":"0.0.0.0:8880"';
  const API = `"API_TOKENS":"${SECRET}"`;
  checkProblems(t, dir)`
    env {"X":""} → X: ${empty} | for: API_TOKENS, API_TOKENS_FILE
    env {"API_TOKENS":" , "} → API_TOKENS: ${none}
    env {"API_TOKENS_FILE":"DIR/empty"} → API_TOKENS_FILE: ${none}
    env {${API},"API_TOKENS_FILE":""} → API_TOKENS_FILE: is set together with API_TOKENS; use one of them | API_TOKENS_FILE: ${empty}
    env {"API_TOKENS":"${SECRET} tooshort a=${OTHER} a=${OTHER}x"} → API_TOKENS[1]: is too short for a secret; if it is part of the next name, write that without a space | API_TOKENS[3]: has the name of an earlier one
    env {"API_TOKENS":"home-assistant-main: ${SECRET},home=${OTHER}:"} → API_TOKENS[0]: ${unclear}
    env {"API_TOKENS":"c2VjcmV0LW9mLXNvbWUtbGVuZ3Ro= home=="} → API_TOKENS[0]: ${unclear} | API_TOKENS[1]: ${unclear}
    env {"API_TOKENS":"${OTHER}=${SECRET} ${SECRET}=${OTHER}"} → API_TOKENS[0]: has a secret as its name | API_TOKENS[1]: has a secret as its name
    env {${API},"ALLOW_CLIENTS":"","ALLOW":","} → ALLOW: must be a list with at least one entry | ALLOW_CLIENTS: ${empty}
    env {${API},"AUTH_METHODS":"bearer, digest","RATE":"0/1m"} → AUTH_METHODS[1]: "digest" is not one of bearer, basic, query, path, body | RATE: "0/1m" is not a rate such as 30/1m
    env {${API},"AUTH_ANONYMOUS":"1","LOG_FORMAT":"xml"} → AUTH_ANONYMOUS: "1" is not true or false | LOG_FORMAT: "xml" is not text or json
    # What may be a secret is not shown as a path: its first folder is not there.
    env {"API_TOKENS_FILE":"DIR"} → API_TOKENS_FILE: DIR cannot be read${BY_USER} (EISDIR)
    env {"API_TOKENS_FILE":"X"} → API_TOKENS_FILE: X ${MISSING} | for: DIR/none, /no/such, DIR/no-folder/x
    env {"API_TOKENS_FILE":"X"} → API_TOKENS_FILE: ${cwd}/X ${MISSING} | for: is-not-here, docs/is-not-here-at-all
    env {"API_TOKENS_FILE":"X"} → API_TOKENS_FILE: the file ${MISSING} | for: /no-folder-anywhere/tokens, /${SECRET}
    env {"API_TOKENS_FILE":"X"} → API_TOKENS_FILE: the file ${MISSING} in ${cwd} | for: ${SECRET}, no-folder/anywhere/tokens
    # Where a source of tokens could not be read, nobody is told to let everybody in.
    env {${open},"API_TOKENS_FILE":"DIR/none"} → API_TOKENS_FILE: DIR/none ${MISSING}
    load {"env":{${open}},"file":"DIR/none"} → configuration: DIR/none ${MISSING}
    load {"env":{${open}},"file":"DIR/half"} → DIR/half: is not a JSON object: line 1, column 2: it ends before the object is complete
    load {"env":{${open}},"file":"DIR/typo"} → token: is not a setting; did you mean "tokens"?
    env {${open},"API_TOKEN":"${SECRET}"} → API_TOKEN: is not a setting; did you mean "API_TOKENS"?
    env {${open},"GATEWAY_CONF":"DIR/half"} → GATEWAY_CONF: is not a setting; did you mean "GATEWAY_CONFIG"?`;
});

test('a configuration file that is truncated, not an object, or has a key twice is refused with line and column, and is not quoted', (t) => {
  const dir = folder(t);
  const token = `{"secret":"${SECRET}","senders":["${FROM}"]}`;
  checkProblems(t, dir)`
    file {\n  "tokens": {\n    "a": {\n      "secret": "${SECRET}\n    }\n  } } → FILE: is not a JSON object: line 4, column 46: a string contains a control character
    file X → FILE: is not a JSON object: line 1, column 1: it must begin with "{" | for: [], null, 5
    file {"rate":"1/1s",\n} → FILE: is not a JSON object: line 2, column 1: there may be no comma before "}"
    file {"allow":["send",]} → FILE: is not a JSON object: line 1, column 18: there may be no comma before "]"
    file {\n  X the rate\n  "rate": "1/1s"} → FILE: is not a JSON object: line 2, column 3: expected a key in double quotes; JSON has no comments | for: //, /*, #
    file {"rate":"1/1s" X x\n} → FILE: is not a JSON object: line 1, column 16: expected a comma, or the closing bracket or brace; JSON has no comments | for: //, /*, #
    file {"rate":X "1/1s"} → FILE: is not a JSON object: line 1, column 10: expected a value; JSON has no comments | for: //, /*, #
    file X {} → FILE: is not a JSON object: line 1, column 1: it must begin with "{"; JSON has no comments | for: //, /*, # what
    file X → FILE: is not a JSON object: line 1, column 1: it must begin with "{"; YAML is not read, write JSON | for: listen: 8880, ---\nlisten: 8880, # mine\n\nbackend:\n  url: x, tls.key: ${SECRET}
    file X → FILE: is not a JSON object: line 1, column 1: it must begin with "{"; YAML is not read, write JSON | for: api:\n  port: 1, ---\nservice:\n  port: 1
    file {"api":{},"service":{"port":1},"settings":{}} → api: is not a setting | service: is not a setting | settings: is not a setting
    file {"tokens":{"a":${token},\n "a":{"secret":"${OTHER}"}}} → FILE: line 2, column 2: "a" is given twice in one object
    file {"tokens":{"a":{"secret":"${SECRET}","allow":["info"] , "\\u0061llow" :["send"]}}} → FILE: line 1, column 76: "allow" is given twice in one object
    file {"rate":"1/1s",\n\n  "rate":"2/1s","rate":"3/1s"} → FILE: line 3, column 3: "rate" is given twice in one object | FILE: line 3, column 17: "rate" is given twice in one object
    file {"log":{"level":"info"},"log":{}} → FILE: line 1, column 25: "log" is given twice in one object
    file {"log":{"level":"info"},"backend":{"url":"http://log","timeout":"1s"},"rate":"1/1s"} →
    file {"tokens":{"a":{"secret":"${SECRET}","message":"\"rate\":1 {\"a\":1,\"a\":{}} \\\\"},"rate":{"secret":"${OTHER}"}}} →`;
  const whole = `{\n  "tokens": {\n    "a": ${token}\n  },\n  "listen": "0.0.0.0:8880"\n}`;
  const file = join(dir, 'cut.json');
  for (let length = 0; length < whole.length; length++) {
    writeFileSync(file, whole.slice(0, length));
    const found = problemsOf(() => loadSettings({ file })).join('\n');
    assert.match(found, /^.*: is not a JSON object: line \d+, column \d+: it ends before the object is complete$/);
  }
});

test('without tokens the gateway starts only if no other machine can connect, or if told to; in a program, an undefined setting is absent', (t) => {
  const open = ':0, 0.0.0.0:0, [::]:0, 192.168.1.1:0, 127.example.com:0, [::ffff:127.0.0.1]:0';
  checkProblems(t)`
    {"listen":"X"} → | for: 127.0.0.1:0, 127.8.9.1:0, [::1]:0, localhost:0
    {"listen":"X"} → tokens: none is configured, but the gateway would listen for other machines: name a file (--config, GATEWAY_CONFIG), or set API_TOKENS (the command "token" makes one); AUTH_ANONYMOUS=true would accept all requests | for: ${open}
    {"listen":"X","auth":{"anonymous":true}} → | for: ${open}
    {"listen":"X","tokens":{"a":{"secret":"${SECRET}"}}} → | for: ${open}`;
  const absent = { ...NO_TOKENS, allow: undefined, backend: undefined, limits: { body: undefined } } as object;
  const problems = (listen: string): number => problemsOf(() => createGateway({ listen, ...absent })).length;
  assert.deepEqual([problems('127.0.0.1:0'), problems('0.0.0.0:0')], [0, 1]);
});

test('flags override the environment, which overrides the file; tokens are not merged; by default a shutdown takes at most 8 s, and cors is off', (t) => {
  const backend = { url: 'http://file:1', timeout: '1s' };
  const file = fileWith(t, { listen: '127.0.0.1:1', backend, rate: '1/1s', tokens: { file: { secret: SECRET } } });
  const env = { BACKEND_URL: 'http://env:2', LISTEN: '127.0.0.1:2', RATE: '2/1s' };
  const { listen, rate, tokens, ...more } = loadSettings({ file, env, flags: { listen: '127.0.0.1:3' } });
  const found = [listen.port, more['backend.url'].url.origin, more['backend.timeout'], rate?.count];
  assert.deepEqual(found, [3, 'http://env:2', 1000, 2]);
  assert.deepEqual(tokens.map((token) => token.name), ['file']);
  assert.deepEqual(loadSettings({ file, env: { API_TOKENS: OTHER } }).tokens.map((token) => token.name), ['token-1']);
  const [without, less] = [loadSettings({}), loadSettings({ env: { SHUTDOWN_TIMEOUT: '3s' } })];
  assert.deepEqual([without.shutdown, less.shutdown, without.cors], [8000, 3000, undefined]);
});

test('API_TOKENS accepts secrets and names, API_TOKENS_FILE one per line, and comments; secretFile names a file with the secret, whose outer white space is ignored', (t) => {
  const digest = hashOf(OTHER);
  const list = fileWith(t, `# for the house\nha=${SECRET}\n\n  # and for the alerts\n  sha256:${digest}  \n`);
  const lists = [`ha=${SECRET}, sha256:${digest}`, `\n ha=${SECRET}\tsha256:${digest.toUpperCase()}`];
  for (const env of [...lists.map((text) => ({ API_TOKENS: text })), { API_TOKENS_FILE: list }]) {
    const { tokens } = loadSettings({ env });
    assert.deepEqual(tokens.map((token) => [token.name, token.digest]), [['ha', hashOf(SECRET)], ['token-2', digest]]);
  }
  const secretFile = fileWith(t, ` ${SECRET}\n`);
  const file = fileWith(t, { tokens: { a: { secretFile, methods: ['path'], expires: '2027-06-30' } } });
  const { digest: own, expires, methods } = loadSettings({ file }).tokens[0]!;
  assert.deepEqual([own, expires, ...methods!], [hashOf(SECRET), Date.parse('2027-06-30T23:59:59.999Z'), 'path']);
});

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
  const declared = groupsOf(/interface GatewayOptions \{([^]*?)\n\}/.exec(SOURCE)![1]!, /^ {2}(\w+)\?:/gm);
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
  assert.deepEqual(problems, [
    'lisen: is not a setting; did you mean "listen"?',
    'options.stallTimeout: is not a setting; did you mean "stallTimeoutMs"?',
    'options.log: null is not allowed; remove the line',
    'options[2]: is not a setting',
  ]);
  assert.match(fail({ tokens: { a: undefined } }).message, /tokens: contains no token/);
  assert.match(fail({ tokens: { a: { secret: undefined } } }).message, /tokens\.a: needs /);
  for (const wrong of [undefined, null, [], 'x']) assert.doesNotMatch(fail(wrong).message, /the file/);
});

test('on Deno, a file hidden by the permissions is a mistake in the configuration, like any unreadable file', {
  skip: !('Deno' in globalThis) && 'only Deno has permissions',
}, async (t) => {
  const program = join(folder(t), 'embed.mjs');
  writeFileSync(
    program,
    `import { createGateway } from ${JSON.stringify(FILE)};
    for (const secretFile of ['/etc/hostname', '/${SECRET}/x', '${SECRET}']) {
      try { createGateway({ tokens: { a: { secretFile } } }); } catch (error) { console.log(error.problems.join()); }
    }`,
  );
  const { stdout } = await promisify(execFile)(process.execPath, ['run', '--allow-net', '--no-prompt', program]);
  const problem = (shown: string): string => `tokens.a.secretFile: ${shown} cannot be read (NotCapable)\n`;
  assert.equal(stdout, [problem('/etc/hostname'), problem('the file'), problem('the file')].join(''));
});

test('a variable one letter or underscore away from a restriction is refused, and no other name is checked', () => {
  const load = (name: string) => loadSettings({ env: { [name]: SECRET } });
  const refused = (name: string, cure: string): void =>
    assert.deepEqual(problemsOf(() => load(name)), [`${name}: is not a setting; ${cure}`]);
  const names = (text: string): string[] => text.trim().split(/\s+/);
  const restrictions = 'ALLOW_CLIENTS AUTH_METHODS AUTH_ANONYMOUS TRUSTED_PROXIES GATEWAY_CONFIG';
  for (const known of names(`API_TOKENS API_TOKENS_FILE ${restrictions}`)) {
    for (let i = 0; i <= known.length; i++) {
      const [before, after] = [known.slice(0, i), known.slice(i)];
      for (const name of ['', '_', 'S', 'x'].flatMap((c) => [before + c + after, before + c + after.slice(1)])) {
        if (name === known) continue;
        refused(name, `did you mean "${known}"?`);
      }
    }
  }
  refused('ALLOWED_CLIENTS', 'did you mean "ALLOW_CLIENTS"?');
  refused('TLS_CRT', 'did you mean "TLS_CERT"?');
  const others =
    `SETTINGS__MESSAGE__VARIABLES__NUMBER API__URL API__AUTH__METHODS HOSTNAMES API_ SERVICE_PORT service__port RATE_LIMITS SENDER API_TOEKNS
    API_TOKENS2 api_tokens API_TOKEN_FILES MY_API_TOKENS API_KEY TOKEN toString RATES ALLOWED LISTENS BACKENDURL LOGLEVEL
    TLS_CERTS CLIENTS CORS_ORIGIN HOSTNAME`;
  for (const name of ['', ...names(others)]) {
    const { warnings, notes } = load(name);
    assert.deepEqual([warnings, notes], [[], []], name);
  }
  // TOKENS may belong to another program if the gateway has tokens; without tokens it would be open.
  refused('TOKENS', 'did you mean "API_TOKENS"?');
});

test('a gateway starts with the variables HOSTNAME, TOKEN and PORT, which any container may have', async (t) => {
  const backend = await startBackend(t);
  const { log } = await startProcess(t, { backend, env: { HOSTNAME: 'a1b2c3', TOKEN: OTHER, PORT: '80' } });
  assert.equal(logLines(log)[0]!.warning, undefined);
});

test('a variable possibly meant for the gateway is a warning at start and a note in --check; environment tokens that replace those of the file are a warning in both', async (t) => {
  const [file, list] = [fileWith(t, tokens({})), fileWith(t, OTHER)];
  assert.deepEqual(loadSettings({ file }).warnings, []);
  const inFile = 'it belongs to a token in the file';
  const cures = {
    ...{ RATE_LIMIT: 'did you mean "RATE"?', SENDERS: inFile, RECIPIENTS: inFile },
    ...{
      BACKEND: 'did you mean "BACKEND_URL"?',
      API_URL: 'did you mean "BACKEND_URL"?',
      TOKENS: 'did you mean "API_TOKENS"?',
    },
    ...{ CONFIG: 'did you mean "GATEWAY_CONFIG"?', CONFIG_PATH: 'did you mean "GATEWAY_CONFIG"?' },
  };
  const named = Object.entries(cures).map(([name, cure]) => `${name} is not a setting, and does nothing; ${cure}`);
  const rows: [Record<string, string>, string[], ...string[]][] = [
    [{ ...cures, API_TOKENS: SECRET }, [], ...named],
    [{ API_TOKENS: OTHER }, ['--config', file], 'API_TOKENS replaces all tokens of the file'],
    [{ API_TOKENS_FILE: list }, ['--config', file], 'API_TOKENS_FILE replaces all tokens of the file'],
  ];
  for (const [env, args, ...warnings] of rows) {
    const isNote = args.length === 0;
    assert.deepEqual(loadSettings({ env }).notes, isNote ? named : []);
    const { code, stdout } = await cli(['--check', ...args], { env });
    assert.equal(code, 0);
    const [line] = logLines((await startProcess(t, { args, env: { ...env, LOG_LEVEL: 'warn' } })).log) as [LogLine];
    assert.equal(line.level, 'warn');
    assert.deepEqual(new Set(line.warning.split(/; (?=[A-Z_]+ (?:is|replaces) )/)), new Set(warnings));
    const said = warnings.map((warning) => `${isNote ? 'note' : 'warning'}: ${warning}`);
    assert.deepEqual(stdout.split('\n').filter((line) => /^(?:note|warning):/.test(line)), said);
  }
});

test('a configuration file with plain secrets that any user can read is a warning', async (t) => {
  const digest = `SHA256:${hashOf(SECRET)}`;
  const plain = { tokens: { a: { secret: digest }, b: { secret: OTHER } } };
  const rows: [isTold: boolean, mode: number, GatewayConfig][] = [
    [true, 0o644, plain],
    [true, 0o604, { backend: { url: `http://u:${SECRET}@backend:1` } }],
    [false, 0o600, plain],
    [false, 0o640, plain],
    [false, 0o644, { tokens: { a: { secret: digest, message: '"secret":"x" a://b@' } } }],
  ];
  for (const [isTold, mode, config] of rows) {
    const file = fileWith(t, config);
    await chmod(file, mode);
    const told = [`${file} contains plain secrets and is readable by all users (chmod o-r)`];
    assert.deepEqual(loadSettings({ file }).warnings, isTold ? told : []);
  }
});

test('a token that has expired is a warning when the gateway starts, and on reload', async (t) => {
  const old = { old: { secret: SECRET, expires: '2020-01-01' } };
  const fresh = { new: { secret: OTHER, expires: '2020-01-03' } };
  const { gateway } = await startBoth(t, { tokens: { ...old, ...fresh } }, { now: () => Date.parse('2020-01-02') });
  gateway.reload({ tokens: old });
  gateway.reload({ tokens: fresh });
  const warning = 'the token "old" has expired';
  const wanted = [['listening', 'warn', warning], ['reloaded', 'warn', warning], ['reloaded', 'info', undefined]];
  assert.deepEqual(logLines(gateway.log).map(({ message, level, warning }) => [message, level, warning]), wanted);
});

test(
  '10,000 tokens are read in less than twice the time of ten times 1,000, and a log line has twenty names and a count',
  {
    isAlone: true,
  },
  async (t) => {
    const many = (count: number) => Array.from({ length: count }, (_, i) => [`name-${i}`, `${SECRET}-${i}`] as const);
    const secrets = (count: number) => many(count).map((pair) => pair.join('=')).join(' ');
    const [less, more] = [secrets(1000), secrets(10_000)];
    const loading = (text: string): void =>
      assert.deepEqual(problemsOf(() => loadSettings({ env: { API_TOKENS: text } })), []);
    const lessMs = await leastMs(0, () => Array.from({ length: 10 }, () => loading(less)));
    const moreMs = await leastMs(2 * lessMs, () => loading(more));
    assert.ok(moreMs < 2 * lessMs, `${lessMs} ms, ${moreMs} ms`);
    console.log('RATIO', moreMs / lessMs, lessMs);
    const tokens = Object.fromEntries(many(10_000).map(([name, secret], i) => [name, { secret, rate: `${i + 1}/1m` }]));
    const { gateway } = await startBoth(t, { tokens });
    gateway.reload({ tokens });
    const first = Array.from({ length: 20 }, (_, i) => `name-${i}`).join(',');
    for (const line of logLines(gateway.log)) {
      assert.deepEqual([line.tokens, line.names], [10_000, `${first},and 9980 more`]);
      assert.ok(JSON.stringify(line).length < 1000, line.message);
    }
    assert.equal(gateway.log.length, 2);
  },
);

section('READERS'); // ─────────────────────────────────────────────────────────────────────────────
test('outside the JSON file a secret in quotes, brackets or separators of another format is refused, and not shown; an empty digest is refused everywhere', (t) => {
  const inFile = (text: string): string => fileWith(t, `${text}\n`);
  const places: ((text: string) => unknown)[] = [
    (text) => loadSettings({ env: { API_TOKENS: text } }),
    (text) => loadSettings({ env: { API_TOKENS_FILE: inFile(text) } }),
    (text) => createGateway({ tokens: { a: { secretFile: inFile(text) } } }),
    (text) => createGateway({ tokens: { a: { secret: text } } }),
  ];
  const bad =
    `"S" 'S' \`S\` “S” [S] <S> {S} S" S' S] S> S} "home=S" home="S" {home=S} home=S;phone=T ["S","T"] {"a":"S"}`;
  const fill = (text: string): string => text.replaceAll('S', SECRET).replaceAll('T', OTHER);
  for (const load of places.slice(0, 3)) {
    for (const text of [...bad.split(' ').map(fill), `"sha256:${'0'.repeat(64)}"`]) {
      const found = problemsOf(() => load(text)).join('\n');
      assert.match(
        found,
        /starts or ends with a quote, a bracket or a brace, or contains ";"|has two words on one/,
        text,
      );
      assert.doesNotMatch(found, SECRETS);
    }
    for (const text of ['S"T', 'S(T)', '/S+']) assert.deepEqual(problemsOf(() => load(fill(text))), [], text);
  }
  for (const load of places) {
    for (const nothing of ['', '\n', '\r\n']) {
      const found = problemsOf(() => load(`sha256:${hashOf(nothing).toUpperCase()}`)).join();
      assert.match(found, /^\S+: is the digest of nothing: there was no secret to hash$/);
    }
  }
});

// A comment after a secret, or a name before it, became a token with all rights.
test('attack: let a comment, a name or a digest pasted with its surroundings become a token', (t) => {
  const inFile = (text: string): NodeJS.ProcessEnv => ({ API_TOKENS_FILE: fileWith(t, text) });
  const digest = hashOf(SECRET);
  const remark = 'which needs its own line; if it is a secret, write name=SECRET';
  const twoWords = 'API_TOKENS_FILE: has two words on one line; write one token per line, SECRET or name=SECRET';
  const pasted = 'contains a digest and more; write "sha256:" and its 64 digits, and nothing else';
  const envs: [env: NodeJS.ProcessEnv, problem?: string][] = [
    ...['# the-phone-of-my-wife', '#the-phone-of-my-wife', '// the-phone-of-my-wife', '//the-phone-of-my-wife']
      .map((text): [NodeJS.ProcessEnv, string] => [{ API_TOKENS: `${SECRET} ${text}` }, remark]),
    ...[' # the-phone-of-my-wife', ' the-phone-of-my-wife', '\tthe-phone-of-my-wife', ',the-phone-of-my-wife', ', # x']
      .flatMap((text) => [[inFile(`${SECRET}${text}\n`), twoWords], [inFile(`${OTHER}\r\n${SECRET}${text}`), twoWords]])
      .map(([env, problem]): [NodeJS.ProcessEnv, string] => [env as NodeJS.ProcessEnv, problem as string]),
    [inFile(`the-phone-of-my-wife ${SECRET}\n`), twoWords],
    [inFile(`//the-phone-of-my-wife\n${SECRET}\n`), remark],
    ...[
      `${digest}  -`,
      `${digest} *-`,
      `SHA2-256(stdin)= ${digest}`,
      `digest  sha256:${digest}`,
      `a: sha256:${digest}`,
      `x ,${digest}, y`,
    ]
      .flatMap((text): [NodeJS.ProcessEnv, string][] => [
        [{ GATEWAY_CONFIG: fileWith(t, { tokens: { a: { secret: text } } }) }, pasted],
        [{ GATEWAY_CONFIG: fileWith(t, { tokens: { a: { secretFile: fileWith(t, `${text}\n`) } } }) }, pasted],
      ]),
    [{ API_TOKENS: `phone:sha256:${digest}` }, pasted],
    // These are not mistakes.
    [{ API_TOKENS: `a=//${SECRET} b=#${OTHER}` }],
    [inFile(`# the house\n\n  # SECRET # x y\n${SECRET},\r\n\n a=sha256:${hashOf(OTHER)} \n`)],
    [{ GATEWAY_CONFIG: fileWith(t, { tokens: { a: { secret: 'a correct horse of sixteen' } } }) }],
  ];
  for (const [env, problem] of envs) {
    const found = problemsOf(() => loadSettings({ env, file: env.GATEWAY_CONFIG })).join('\n');
    assert.ok(problem ? found.includes(problem) : found === '', `${JSON.stringify(env)}: ${found}`);
    assert.doesNotMatch(found, SECRETS);
    assert.ok(!found.includes(digest) && !found.includes('the-phone'), found);
  }
});

test('a secret that looks like a digest is a warning at start and in --check', async (t) => {
  const digest = hashOf(SECRET);
  const told = (name: string, what: string): string => `the token "${name}" ${what}`;
  const isHex = 'has a secret of 64 hexadecimal digits; if that is a digest, write "sha256:" before it';
  const rows: [TokenConfig | string, ...string[]][] = [
    [digest, told('token-1', isHex)],
    [`a=${digest.toUpperCase()} ${OTHER}`, told('a', isHex)],
    [{ secret: digest }, told('a', isHex)],
    [{ secretFile: fileWith(t, `${digest}\n`) }, told('a', isHex)],
    [{ secret: `sha256:${digest}` }],
  ];
  for (const [given, ...warnings] of rows) {
    const isEnv = typeof given === 'string';
    const args = isEnv ? [] : ['--config', fileWith(t, { tokens: { a: given } })];
    const { stdout, code } = await cli(['--check', ...args], { env: isEnv ? { API_TOKENS: given } : {} });
    assert.equal(code, 0);
    const lines = stdout.split('\n').filter((line) => line.startsWith('warning: the token'));
    assert.deepEqual(lines, warnings.map((warning) => `warning: ${warning}`));
  }
  const backend = await startBackend(t);
  const gateway = await startGateway(t, backend, { tokens: { a: { secret: digest } } });
  assert.equal(linesOf(gateway, /^listening$/)[0]!.warning, told('a', isHex));
});

test('the address of a network without its length is a warning, because it is a single address', async (t) => {
  const config = {
    clients: ['192.168.1.0', '10.0.0.0/8', 'fd00::', '192.168.1.20', '::1'],
    trustedProxies: ['172.18.0.0'],
    tokens: { a: { secret: SECRET }, b: { secret: OTHER, clients: ['10.1.0.0', '10.2.0.0/16'] } },
  };
  const { stdout } = await cli(['--check', '--config', fileWith(t, config)]);
  const warnings = [...stdout.matchAll(/^warning: "(\S+)" is a single address; a network has a length/gm)];
  assert.deepEqual(warnings.map(([, entry]) => entry), ['172.18.0.0', '192.168.1.0', 'fd00::', '10.1.0.0']);
});

test('attack: admit every IPv4 address through an IPv6 range', async (t) => {
  const problem = 'contains every IPv4 address (0.0.0.0/0); write an IPv4 range as such, like 192.168.0.0/16';
  checkProblems(t)`
    {"clients":["X"]} → clients[0]: ${problem} | for: ::1/8, ::/0, ::/80, ::ffff:192.168.0.0/16, ::ffff:0:0/95, 0:0:0:0:0:ffff:a00:1/95
    {"trustedProxies":["10.0.0.1","X"]} → trustedProxies[1]: ${problem} | for: ::1/8, ::ffff:10.0.0.0/8
    @ {"clients":["X"]} → tokens.test.clients[0]: ${problem} | for: ::1/8, ::ffff:10.0.0.0/8
    {"clients":["0.0.0.0/0","X"],"trustedProxies":["X"]} → | for: ::ffff:0:0/96, ::ffff:192.168.0.0/112, fd00::/8, 2000::/3, ::1, ::/96, ::1/128, ::fffc:0:0/95, fe80::/10`;
  const backend = await startBackend(t);
  const range = { clients: ['::ffff:127.0.0.0/104', '::1', 'fe80::/10'], tokens: { a: { secret: SECRET } } };
  const gateway = await startGateway(t, backend, { ...range, listen: '127.0.0.1:0' });
  assert.equal((await ask(gateway, { path: '/v1/about', headers: BEARER })).status, 200);
});

/** Secrets in many shapes. Each is tried in every place of a configuration. */
const CANARIES = `${SECRET} sixteen-chars-ok q83/vEiRq+yZtW0/Fq2pXk9LmN7oRs5TuVwXyZ01ab4= /9j-canary/of/some_length`
  .split(' ');
/** Paths and variables of all settings, as listed in docs/settings.md. */
const SETTING_ROWS = Array.from(
  MANUAL.matchAll(/^\| `([a-z][\w.]*)`<br>`([A-Z_]+)` \|/gm),
  ([, path, env]) => [path!, env!] as const,
);

const NO_MESSAGE = 'the canary: a secret in any wrong place of a configuration is in no message, at start or on reload';
test(NO_MESSAGE, { isAlone: true }, async (t) => {
  const file = join(folder(t), 'gateway.json');
  let messages = 0;
  const nest = (path: string, value: unknown): object =>
    path.split('.').reduceRight((inner, key) => ({ [key]: inner }), value) as object;
  assert.ok(SETTING_ROWS.length >= 18, `only ${SETTING_ROWS.length} settings`);
  for (const S of CANARIES) {
    const silent = (load: () => unknown): void => {
      const found = problemsOf(load).join('\n');
      assert.ok(!found.includes(S.slice(0, 12)) && !found.includes(S.slice(-12)), found);
      messages += Number(found !== '');
    };
    const silentFile = (text: string): void => {
      writeFileSync(file, text);
      silent(() => loadSettings({ file }));
    };
    const values = [S, [S], [[S]], { [S]: S }, { [S]: {} }, { [S]: [S] }, [{ [S]: 1 }], `a=${S}`, `a,${S}`, `"${S}"`];
    const templates = ['{{S', '{{#S}}', '{{/S}}', '{{>S}}', '{{S b}}', '{{{S b}}}', '{{#a}}{{/S}}', '{{#S}}{{/b}}'];
    const parents = 'backend tls auth limits log tokens'.split(' ');
    const inToken = [...TOKEN_SETTINGS, ...['number', 'recipients', 'text_mode', S].map((key) => `defaults.${key}`), S];
    const tokens = [
      ...inToken.flatMap((path) => values.map((value) => ({ a: { secret: OTHER, ...nest(path, value) } }))),
      ...templates.map((text) => ({ a: { secret: OTHER, message: text.replace('S', S) } })),
      ...[S, null, {}, { secret: 'short' }, { secret: S }, { secret: OTHER, allow: ['x'] }].map((it) => ({ [S]: it })),
      { [S]: { secret: OTHER }, a: { secret: OTHER } },
      ...[{ [`${S} `]: { secret: OTHER } }, { a: { secret: `${S} ` } }],
    ];
    const paths = [...SETTING_ROWS.map(([path]) => path), ...parents, S, ...parents.map((path) => `${path}.${S}`)];
    const wrong = paths.flatMap((path) => values.map((value) => nest(path, value)));
    for (const config of [...wrong, ...tokens.map((value) => nest('tokens', value))]) {
      // If a secret is a valid value, there is no mistake and no message.
      silent(() => createGateway(config));
      if (S !== CANARIES[0]) continue; // files are read in the same way
      for (const end of [undefined, -1]) silentFile(JSON.stringify(config).slice(0, end));
    }
    silentFile(`{"${S}":1,"${S}":2,"tokens":{"${S}":{"${S}":1,"${S}":2}}}`);
    const texts = values.filter((value) => typeof value === 'string');
    for (const name of [...SETTING_ROWS.map(([, env]) => env), 'API_TOKENS_FILE']) {
      for (const text of texts) silent(() => loadSettings({ env: { AUTH_ANONYMOUS: 'x', [name]: text } }));
    }
    for (const all of [{ file: S }, { flags: { listen: S, backend: S } }]) silent(() => loadSettings(all));
  }
  assert.ok(messages > 1500, String(messages));

  writeFileSync(file, JSON.stringify(tokens({})));
  // SIGHUP is handled as soon as the log line about listening is written.
  const { child, output } = await startProcess(t, { args: ['--config', file] });
  writeFileSync(file, JSON.stringify({ [OTHER]: 1, tokens: { [OTHER]: { methods: [OTHER] } } }));
  process.kill(child.pid!, 'SIGHUP');
  await until(() => output().includes('reload failed'));
  assert.match(output(), /the configuration\[0\]: is not a setting; tokens\[0\]: needs /);
  assert.doesNotMatch(output(), SECRETS);
});

test('cors accepts only origins as browsers write them', (t) => {
  const good = 'https://dash.example:8443, http://localhost, http://192.168.1.2:3000, https://[::1]:1';
  assert.deepEqual([...loadSettings({ env: { CORS_ORIGINS: good } }).cors!], good.split(', '));
  const NO_ORIGIN = 'is not an origin as browsers send it: https://dash.example:8443, no path, no default port';
  checkProblems(t)`
    {"cors":["X"]} → cors[0]: "X" ${NO_ORIGIN} | for: *, null, https://*, dash.example, //dash.example, https://d/x, https://d?x, https://Dash, HTTPS://d, https://d:443, http://d:80, http://d:080, https://u@d, ftp://d, file://, https://dé, https://1.2.3,  https://d
    {"cors":["X"]} → cors[0]: the value ${NO_ORIGIN} | for: https://dash.example/, chrome-extension://abc`;
});

test("a token's recipients and defaults are valid groups, numbers, UUIDs and user names; anything else is a mistake", () => {
  const mistakes = (settings: TokenConfig): number => problemsOf(() => createGateway(tokens(settings))).length;
  const inner = GROUP.slice('group.'.length);
  const bytes = (count: number): string => `group.${btoa(btoa('x'.repeat(count)))}`;
  const bad = [
    ...'group. group.01 group.123456789 group.4366412345678x group.name.01 group.LS11c2VybmFtZT1ldmlsLjAx'.split(' '),
    ...[`group.${atob(inner)}`, `${GROUP}=`, GROUP.replace('=', ''), `${GROUP} `, bytes(31), bytes(33), atob(inner)],
    ...[`group.${btoa(`${atob(inner)}\n`)}`, `group.${inner.slice(0, 9)}\n${inner.slice(9)}`],
    `group.${btoa('+/'.repeat(21).concat('8=')).replaceAll('+', '-')}.`,
    ...[SECRET, 'somebody', 'La.42', '4ara.42', 'Lara.4', '-x', '+49 1555'],
  ];
  for (const recipients of bad.map((text) => [text])) {
    assert.deepEqual([mistakes({ recipients }), mistakes({ defaults: { recipients } })], [1, 1], String(recipients));
  }
  const uuid = randomUUID();
  for (const good of [GROUP, TO, uuid, uuid.toUpperCase(), 'somebody.01', 'Lara.42', '_L4.007', 'group_1.1234']) {
    assert.equal(mistakes({ recipients: [good], defaults: { recipients: [good] } }), 0, good);
  }
  const recipients = ['group.*'];
  assert.deepEqual([mistakes({ recipients }), mistakes({ defaults: { recipients } })], [0, 1]);
});

const WEAK = {
  cert:
    '-----BEGIN CERTIFICATE-----\nMIIBgTCCASugAwIBAgIUEyQG9bsAx6uIorFhbDBUIr0dDJMwDQYJKoZIhvcNAQEL\nBQAwFDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMzA0NTcyMVoYDzIxMjYx\nMDMwMDQ1NzIxWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwXDANBgkqhkiG9w0BAQEF\nAANLADBIAkEAtA9f1ml/MzXKf+z+7HumRMsvcrvmk+FUe/OZb5g8Dm14Znrz0b0H\nHPAHF21HHKu16ykY0NLhTm/hARS0HCqGuQIDAQABo1MwUTAdBgNVHQ4EFgQUZNuS\nF4Q1GMIV9neFJaobBo7EdrAwHwYDVR0jBBgwFoAUZNuSF4Q1GMIV9neFJaobBo7E\ndrAwDwYDVR0TAQH/BAUwAwEB/zANBgkqhkiG9w0BAQsFAANBAHHIAh+6DPFNIQpe\nvQM7LVzIOBfloyxwUU80JKjXl/P9oGT84QnxkPmuoofqY3G+QJD3yLqWH0ay4uD9\nh5gyj9o=\n-----END CERTIFICATE-----',
  key:
    '-----BEGIN PRIVATE KEY-----\nMIIBVQIBADANBgkqhkiG9w0BAQEFAASCAT8wggE7AgEAAkEAtA9f1ml/MzXKf+z+\n7HumRMsvcrvmk+FUe/OZb5g8Dm14Znrz0b0HHPAHF21HHKu16ykY0NLhTm/hARS0\nHCqGuQIDAQABAkAwvhy2gTaC2WPo/3H++HYJF2vPxlfj3lKtf0Mg93gCe2Glsr7a\nOg4oQntyNwKMDq4sG/m7FNrLOm/UlxSjtpOVAiEA2VgJ2Tr8djiiM2czfZlXh4MA\nS74zzG/clRRy09ivvysCIQDUFcCIQZL5/ortWVn4GyRbgNFfdnewmF7uB2anEQ7/\nqwIhALXUPYkLHCMbhjdS43T0UJICOsEjQtqJyxS9osMwyPc5AiAypSce4pnYfQJr\n/2ROrRyXhUF6TG30i85PhRDsYFR2lQIhAMQbdS3/NrJFWodxkEruUlIsVNA6XZIF\nnzyo59OFY85N\n-----END PRIVATE KEY-----',
};
test('a certificate that is invalid, has no key, or has the key of another is a mistake in the configuration', (t) => {
  const [first, second] = CERTS;
  const check = (cert: string, key: string, ...problems: string[]): void => {
    const tls = { cert: fileWith(t, cert), key: fileWith(t, key) };
    assert.deepEqual(problemsOf(() => createGateway({ ...tokens({}), tls })), problems, `${cert} ${key}`);
  };
  const half = (text: string): string => text.slice(0, text.length / 2);
  const chain = `${first.cert}\n${second.cert}`;
  const cuts = [chain.slice(0, -40), chain.slice(0, first.cert.length + 9), chain.slice(0, -5)];
  for (const cert of ['hello', '', '\n', first.key, half(first.cert), ...cuts]) {
    check(cert, first.key, 'tls: its "cert" is empty, truncated or encrypted, or is not PEM');
  }
  for (const key of ['hello', '', chain, half(first.key)]) {
    check(first.cert, key, 'tls: its "key" is empty, truncated or encrypted, or is not PEM');
  }
  for (const cert of [chain, first.cert]) {
    check(cert, second.key, 'tls: its "key" is not the key of the first certificate in "cert"');
  }
  // A chain; a chain with the text that programs write around it; chain and key in one file.
  const both = `${first.key}\n${chain}`;
  check(chain, first.key);
  check(`subject=CN=my-host\n${chain}\n`, first.key);
  check(both, both);
  // OpenSSL refuses a key of 512 bits only when certificate and key are used.
  if (isNode) {
    check(WEAK.cert, WEAK.key, 'tls: its "cert" and "key" cannot be used together (ERR_SSL_EE_KEY_TOO_SMALL)');
  }
  checkProblems(t)`
    {"tls":{"cert":"${certificate(t).cert}"}} → tls: needs both "cert" and "key"
    {"tls":{"cert":"DIR/none","key":"${certificate(t).key}"}} → tls.cert: DIR/none ${MISSING}`;
});

section('DEMO'); // ────────────────────────────────────────────────────────────────────────────────
test('--demo: every printed curl line does what it claims, the token does not reach the backend, and a client may disconnect halfway', async (t) => {
  // Request lines, which the demo does not show by default, let this test know what has happened.
  const { output, close, first, secret, ...to } = await startDemo(t, { env: { LOG_LEVEL: 'debug' } });
  assert.ok(first.length <= 80, first);
  // Without a character that any shell would take for its own, cmd.exe and PowerShell included.
  assert.match(first, /^curl -u api:[\w-]+ -d Hi 127\.0\.0\.1:\d+\/v2\/send$/);
  await until(() => output().includes('/v1/register'));
  const printed = output();
  assert.match(printed, /\ncurl .* by bearer[^]*# Account setup is refused/);
  assert.equal((await askAsCurl(first)).status, 201);
  await until(() => /^\n>>> Hi\n\nbackend got {3}POST \/v2\/send .*"message":"Hi"/m.test(output()));
  const lines = printed.split('\n').filter((line) => line.startsWith('curl ') && line !== first);
  const codes: unknown[] = [];
  for (const line of lines) codes.push(await askAsCurl(line).then(({ status, json }) => json.code ?? status));
  assert.deepEqual(codes, [201, 201, 201, 201, 'setup_blocked']);
  await until(() => output().includes('setup_blocked'));
  const after = output().slice(printed.length);
  for (const form of ['bearer', 'query', 'path', 'body']) {
    assert.match(
      after,
      new RegExp(`^>>> Hello by ${form}\\n\\nbackend got {3}POST /v2/send .*"Hello by ${form}"`, 'm'),
    );
  }
  assert.ok(!after.includes(secret) && !after.includes('curl'), after);

  // The stand-in backend of the demo crashed the process.
  const { socket } = open(t, to);
  socket.write(`${post(secret, 1_000_000)}{"message":"${'x'.repeat(200_000)}`, () => socket.destroy());
  await until(() => output().includes('client_left'));
  assert.equal((await ask(to, { headers: { authorization: `Bearer ${secret}` } })).status, 200);

  // U+009B starts a terminal control sequence, and JSON need not escape it.
  const headers = { authorization: `Bearer ${secret}` };
  assert.equal((await ask(to, { headers, body: { ...MESSAGE, message: 'a\u009b2Jb\u007fc\u0085d' } })).status, 201);
  await until(() => output().includes('"a 2Jb c d"'), 'the stand-in backend to show the message');
  await close('SIGINT');
});

test('--demo shows what arrives, and no request log lines, whatever a client sends', async (t) => {
  const { output, close, secret, ...to } = await startDemo(t);
  const before = output();
  const headers = { authorization: `Bearer ${secret}` };
  assert.equal((await ask(to, { headers, body: MESSAGE })).status, 201);
  for (const body of ['{', 'null', '[]']) await ask(to, { headers, method: 'GET', path: '/v1/about', body });
  await ask(to, { headers, path: '/v1/unlink' });
  assert.equal((await ask(to, { headers: {} })).status, 401);
  assert.equal((await ask(to, { headers })).status, 200);
  await until(() => output().endsWith('GET /v1/about \n'));
  const shown = output().slice(before.length).replace(/^\nThere are four[^]*?-u 'api:.*\n\n/m, '');
  assert.match(
    shown,
    /^\n>>> hello\n\nbackend got {3}POST \/v2\/send .*"message":"hello"}\n(?:backend got {3}GET .*\n)+$/,
  );
  assert.doesNotMatch(output(), /status/);
  await close('SIGINT');
});

test('docs/demo.svg shows what --demo and its shortest line print, and README.md has it with the same line', async (t) => {
  const { COLUMNS, drawDemo, pictureOf, PICTURE_HEIGHT } = await import('./scripts/draw-demo.ts');
  const { output, first, close } = await startDemo(t);
  const { text } = await askAsCurl(first);
  await until(() => /^backend got .*\n/m.test(output()));
  await close();
  const recorded = pictureOf(output(), first, text);
  const drawn = drawDemo(recorded);
  const svg = read('docs/demo.svg');
  assert.equal(svg, drawn, 'npm run picture draws it again');
  const shown = groupsOf(svg, /<text [^>]*>(.*?)<\/text>/g).map((line) =>
    line.replaceAll('&quot;', '"').replaceAll('&lt;', '<').replaceAll('&gt;', '>').replaceAll('&amp;', '&')
  );
  assert.ok(shown.every((line) => line.length <= COLUMNS), shown.join('\n'));
  const words = (text: string): string => text.replace(/\s/g, '');
  assert.equal(words(shown.join('')), words(`another terminal${recorded.client}the demo${recorded.demo}`));
  assert.match(svg, /^<svg [^>]*>\n<title [^>]*>[^<]+<\/title>\n<desc [^>]*>[^<]+<\/desc>\n/);
  assert.doesNotMatch(svg, /<script|<image|<animate|<set|keyframes|@import|url\(|href="[^#]|\son\w+=/i);
  assert.ok(svg.length <= 12 * 1024, `${svg.length} bytes`);

  const command = recorded.client.split('\n', 1)[0]!.slice(2).replace('a-secret-of-22-letters', 'SECRET');
  const [, attributes = ''] = /<img src="docs\/demo\.svg" ([^>]*)>/.exec(README)!;
  for (const word of [`height="${PICTURE_HEIGHT}"`, command]) assert.ok(attributes.includes(word), attributes);
  assert.ok(README.replace(/<[^>]*>/g, '').replaceAll('\n', ' ').includes(`\`${command}\``), command);
});

test('the command line queries the backend once at start and after a reload to another, and reports the result; an embedded gateway does not', async (t) => {
  const asked: string[] = [];
  // The path of the backend's URL determines its response: a status, and a body.
  const backend = http.createServer((req, res) => {
    const { 'user-agent': agent = '', authorization } = req.headers;
    asked.push(`${req.method} ${req.url} ${/^signal-gateway\/[\d.]+$/.test(agent)} ${authorization}`);
    const [, status, body] = /^\/(\d+)(.*)\/v1\/about$/.exec(decodeURIComponent(req.url!))!;
    res.writeHead(Number(status), status === '301' ? { location: '/200{}/v1/about' } : {}).end(body);
  }).listen(0, '127.0.0.1');
  await once(backend, 'listening');
  t.after(() => void backend.close().closeAllConnections());
  const about = encodeURIComponent('{"version":"0.100","mode":"json-rpc","more":[1]}');
  const portOf = (server: net.Server): number => (server.address() as AddressInfo).port;
  const host = `127.0.0.1:${portOf(backend)}`;
  const resetting = net.createServer((socket) => void socket.resetAndDestroy()).listen(0, '127.0.0.1');
  const encrypted = https.createServer(CERTS[0]).listen(0, '127.0.0.1');
  const open = new Set<net.Socket>();
  const silent = net.createServer((socket) => void open.add(socket)).listen(0, '127.0.0.1');
  t.after(() => {
    for (const server of [resetting, silent, encrypted]) server.close();
    for (const socket of open) socket.destroy();
  });
  await Promise.all([resetting, silent, encrypted].map((server) => server.listening || once(server, 'listening')));
  const config = (url: string) => ({ tokens: { a: { secret: `sha256:${'1'.repeat(64)}` } }, backend: { url } });
  const file = fileWith(t, config(`http://api:password-of-backend@${host}/200${about}/`));
  const gateway = await startProcess(t, { args: ['--config', file] });
  const heard = async (count: number): Promise<LogLine> => {
    const lines = (): LogLine[] => linesOf(gateway, /^the backend /);
    await until(() => lines().length === count);
    return lines().at(-1)!;
  };
  const { time: _, ...first } = await heard(1);
  const heardOf = { backend: `http://${host}/200${about}`, version: '0.100', mode: 'json-rpc' };
  assert.deepEqual(first, { level: 'info', message: 'the backend answers', ...heardOf });
  process.kill(gateway.child.pid!, 'SIGHUP'); // to the same backend, which is not queried
  await until(() => gateway.output().includes('"reloaded"'));
  const rows: [url: string, said: RegExp][] = [
    [`http://api:password-of-backend@${host}/401`, /"status":401/],
    [`http://${host}/401`, /"reason":"status 401","hint":"put USER:PASSWORD@ into backend.url"/],
    [`http://${host}/500{}`, /"reason":"status 500","hint":"correct backend.url: something else listens there"/],
    [`http://${host}/200hello`, /"reason":"no JSON object"/],
    [`http://${host}/200[]`, /"reason":"no JSON object"/],
    [`http://${host}/301`, /"reason":"status 301"/],
    [`http://127.0.0.1:${await sparePort()}`, /refused.*"hint":"start the backend, or correct its port"/i],
    [`https://${host}`, /"hint":"correct http:\/\/ or https:\/\/ in backend.url"/],
    [`http://127.0.0.1:${portOf(resetting)}`, /"hint":"correct http:\/\/ or https:\/\/ in backend.url"/],
    [
      `http://127.0.0.1:${portOf(silent)}`,
      /"reason":"timeout","hint":"check the backend's log, or correct its address"/,
    ],
    [`https://127.0.0.1:${portOf(encrypted)}`, /"hint":"let this machine trust the backend's certificate"/],
    ['http://127.0.0.1:6000', /port|refused/i], // a port that fetch refuses, on Node and Bun
    ['http://nowhere.invalid', /"hint":"correct the backend's name, or put both on one network"/],
  ];
  for (const [i, [url, said]] of rows.entries()) {
    writeFileSync(file, JSON.stringify(config(url)));
    process.kill(gateway.child.pid!, 'SIGHUP');
    const line = await heard(i + 2);
    const wrong = ['warn', 'the backend did not answer as expected'];
    assert.deepEqual([line.level, line.message], i === 0 ? ['info', 'the backend answers'] : wrong, url);
    assert.match(JSON.stringify(line), said);
  }
  const paths = [`200${about}`, '401', '401', '500%7B%7D', '200hello', '200[]', '301'];
  assert.deepEqual(asked, paths.map((path) => `GET /${path}/v1/about true undefined`));
  assert.doesNotMatch(gateway.output(), /password-of-backend/);
  await gateway.close();

  const both = await startBoth(t);
  await settled(both.gateway);
  assert.equal(both.backend.server.listenerCount('connection') > 0 && both.backend.connections, 0);
});

test('a gateway whose backend.url is its own address logs that, with and without tokens', async (t) => {
  for (const env of [{ API_TOKENS: SECRET }, {}]) {
    const port = await sparePort();
    const url = `http://localhost:${port}`;
    const gateway = await startProcess(t, { env: { ...env, LISTEN: `127.0.0.1:${port}`, BACKEND_URL: url } });
    await until(() => linesOf(gateway, /^the backend /).length > 0);
    const [{ level, reason, hint }] = linesOf(gateway, /^the backend /) as [LogLine];
    const cure = "backend.url is this gateway's own address: give the backend's";
    assert.deepEqual([level, reason, hint], ['warn', 'own_address', cure]);
    await gateway.close();
  }
});

test('a port that cannot be opened is an error with advice', { isAlone: true }, async (t) => {
  const { host, port } = await startBackend(t);
  const rows: [listen: string, message: RegExp][] = [
    [`${host}:${port}`, /; use another port with --listen HOST:PORT\n$/],
    ['192.0.2.1:0', /; --listen needs an address of this machine; :PORT means all of them\n$/],
  ];
  if (isNode) rows.push(['nowhere.invalid:0', rows[1]![1]]); // Bun 1.4 has other codes for an unknown name
  const first = isNode && process.platform === 'linux' &&
    readFileSync('/proc/sys/net/ipv4/ip_unprivileged_port_start', 'utf8');
  // The test may run as root, which may open every port.
  const isRoot = process.geteuid?.() === 0;
  if (Number(first) > 1) {
    rows.push(['127.0.0.1:1', /; ports below 1024 need root; use --listen HOST:8880\n$/]);
  }
  for (const [listen, message] of rows) {
    if (isRoot && listen.endsWith(':1')) process.seteuid!(65_534);
    const env = { LISTEN: listen, API_TOKENS: SECRET };
    const { code, stderr } = await cli([], { env }).finally(() => isRoot && isNode && process.seteuid!(0));
    assert.deepEqual([code, /^gateway: cannot run: /.test(stderr)], [1, true], stderr);
    assert.match(stderr, message);
  }
});

test('--check prints "warning" for what is wrong, and the file, variables and flags that its settings come from', async (t) => {
  const expired = fileWith(t, { tokens: { old: { secret: SECRET, expires: '2020-01-01' } } });
  const open = 'warning: no tokens are configured: all requests are accepted without authentication';
  const path = 'has the path of an endpoint; give only the part before it, such as http://signal-api:8080';
  const named: [string[], NodeJS.ProcessEnv, sources: string, ...warnings: string[]][] = [
    [['--config', expired], {}, `the file ${expired}`, 'warning: the token "old" has expired'],
    [[], {}, 'nothing, only defaults apply', open],
    [['--listen', ':8880'], { AUTH_ANONYMOUS: 'true' }, 'AUTH_ANONYMOUS, --listen', `${open}, from other machines too`],
    [[], { API_TOKENS: SECRET, HOSTNAME: 'x' }, 'API_TOKENS'],
    [[], { API_TOKENS_FILE: fileWith(t, SECRET) }, 'API_TOKENS_FILE'],
  ];
  const paths = '/v2/send /v2/send/ /v1/about /proxy/v1/receive/+15550100001 /v1 /v2/'.split(' ');
  for (const each of paths) {
    const env = { API_TOKENS: SECRET, BACKEND_URL: `http://x${each}` };
    named.push([[], env, 'BACKEND_URL, API_TOKENS', `warning: BACKEND_URL ${path}`]);
  }
  named.push([
    ['--backend', 'http://x/v2/send'],
    { API_TOKENS: SECRET },
    'API_TOKENS, --backend',
    `warning: --backend ${path}`,
  ]);
  for (const each of ['', '/', '/signal', '/v1/signal', '/v12/send', '/v2x']) {
    named.push([[], { API_TOKENS: SECRET, BACKEND_URL: `http://x${each}` }, 'BACKEND_URL, API_TOKENS']);
  }
  for (const [args, env, sources, ...warnings] of named) {
    const { code, stdout } = await cli(['--check', ...args], { env });
    assert.equal(code, 0);
    const lines = stdout.split('\n');
    assert.equal(lines[0], `The configuration is valid. It was read from: ${sources}.`);
    assert.deepEqual(lines.filter((line) => line.includes('warning')), warnings, JSON.stringify(env));
  }
});

// A file's state at its last load was never compared, so a token that was removed at that moment kept working.
test('a file that changes between being read and first being checked is read again', async (t) => {
  const backend = await startBackend(t);
  const tls = certificate(t);
  const configOf = (secret: string): string =>
    JSON.stringify({ backend: { url: backend.url }, tls, tokens: { a: { secret } } });
  const file = fileWith(t, configOf(SECRET));
  const code = `
    import { writeFileSync } from 'node:fs';
    import { run } from ${JSON.stringify(FILE.href)};
    const running = run(['--config', ${JSON.stringify(file)}], process.env, () => Buffer.alloc(0));
    writeFileSync(${JSON.stringify(file)}, ${JSON.stringify(configOf(OTHER))});
    writeFileSync(${JSON.stringify(tls.cert)}, '');
    await running;`;
  const script = fileWith(t, code, 'script.mjs');
  const gateway = await startProcess(t, { program: [...AS_IT_IS.slice(0, -1), script] as unknown as Program });
  await until(() => linesOf(gateway, /^reload failed/).length === 1);
  assert.match(linesOf(gateway, /^reload failed/)[0]!.problems, /^tls: its "cert" is empty/);
  assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }), [200, 401]);
  writeFileSync(tls.cert, CERTS[0].cert);
  await until(() => linesOf(gateway, /^reloaded/).length === 1);
  assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }), [401, 200]);
});

test('a file is read once it no longer changes; a file that only a reloaded configuration names is also watched', async (t) => {
  const backend = await startBackend(t);
  const dir = folder(t);
  const [file, secretFile] = [join(dir, 'gateway.json'), join(dir, 'secret')];
  const configOf = (token: object): string => JSON.stringify({ backend: { url: backend.url }, tokens: { a: token } });
  writeFileSync(file, configOf({ secret: SECRET }));
  writeFileSync(secretFile, SECRET);
  const gateway = await startProcess(t, { args: ['--config', file] });
  const count = (message: RegExp): number => linesOf(gateway, message).length;
  const becomes = async (change: () => unknown): Promise<void> => {
    const before = count(/^reloaded/);
    change();
    await until(() => count(/^reloaded/) > before, 'the gateway to reload');
  };
  // A separate process, which waits for nothing, keeps changing a file for 2.5 s. A gateway that a busy machine
  // suspends for that long may read it too early, so it has four tries.
  const isReadTooEarly = async (): Promise<boolean> => {
    const before = count(/^reload failed/);
    const writer = start([file], {}, ['sh', '-c', 'while :; do echo "{" >"$0"; sleep 0.1; done']);
    const ended = once(writer, 'exit');
    await pass(2500);
    writer.kill('SIGKILL');
    await ended;
    await becomes(() => writeFileSync(file, configOf({ secretFile })));
    return count(/^reload failed/) > before;
  };
  let tries = 1;
  while (await isReadTooEarly()) assert.ok(tries++ < 4, 'the file was read while it changed, four times');
  await becomes(() => writeFileSync(secretFile, OTHER));
  assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }), [401, 200]);
});

section('COMMAND LINE'); // ────────────────────────────────────────────────────────────────────────

/** The words of a command line, some of which may be in single quotes. */
const wordsOf = (line: string): string[] =>
  Array.from(line.matchAll(/'([^']*)'|(\S+)/g), ([, quoted, word]) => quoted ?? word!);

/** The first group of each match. */
const groupsOf = (text: string, pattern: RegExp): string[] => Array.from(text.matchAll(pattern), ([, group]) => group!);

test("--help lists every setting, flag and group in 80 columns, with usage and commands at the end; --version is the package's", async () => {
  const { code, stdout } = await cli(['--help']);
  assert.equal(code, 0);
  const words = `--config --listen --backend --check --demo 'token [NAME]' hash 'render NAME' API_TOKENS_FILE
    GATEWAY_CONFIG SIGHUP 'the same signal again cuts them off'`;
  for (const word of [...wordsOf(words), ...TOKEN_SETTINGS]) assert.ok(stdout.includes(word), word);
  assert.deepEqual(stdout.split('\n').filter((line) => line.length > 80), []);
  const [, groups] = /\nThe groups of allow:\n\n([^]*?)\n\n/.exec(stdout)!;
  assert.deepEqual(groupsOf(groups!, /^ {2}([a-z]+) {2}/gm), [
    'send',
    'info',
    'receive',
    'messaging',
    'setup',
    'metrics',
  ]);
  // What a terminal finally shows.
  const [last = '', ...above] = stdout.split(/\n(?=Usage:)/).reverse();
  assert.ok(last.split('\n').length <= 24 && above.length === 1, last);
  for (const word of wordsOf(words).slice(0, 8)) assert.ok(last.includes(word), word);
  assert.match(last, /^ {2}gateway\.ts --backend http:\S+$/m, 'an example');
  assert.deepEqual(await cli(['--version']), { code: 0, stdout: `${PACKAGE.version}\n`, stderr: '' });
});

test('the process exits with 0, 1 or 2, and writes to standard output or to standard error', async (t) => {
  const { host, port } = await startBackend(t);
  const rows: [number, ...string[]][] = [[0, 'hash'], [1, '--listen', `${host}:${port}`], [2, 'hash', SECRET]];
  for (const [code, ...args] of rows) {
    const given = { env: { API_TOKENS: SECRET }, input: `${SECRET}\n` };
    // Once as users start it: through the loader, if the runtime needs one.
    const ended = await runProcess(args, { ...given, program: code === 0 ? AS_IT_IS : program() });
    assert.deepEqual(ended, await cli(args, given));
    assert.deepEqual([ended.code, ended.stdout !== '', ended.stderr !== ''], [code, code === 0, code !== 0]);
    if (code === 1) {
      assert.match(ended.stderr, /^gateway: cannot run: .*in use.*; use another port with --listen HOST:PORT\n$/);
    }
  }
  const demo = await cli(['--demo', '--listen', `${host}:${port}`]);
  assert.match(demo.stderr, /in use.*; use another port with --listen HOST:PORT\n$/);
});

test('bad usage and bad configuration exit with 2 and the reason on standard error, without a secret', async () => {
  // S is a secret.
  const rows = `
    --confg x → Unknown option '--confg'; see --help
    --port 8880 ;; -p 8880 ;; --port=8880 → '; write --listen HOST:PORT; see --help
    -c x.json → Unknown option '-c'; write --config FILE; see --help
    check ;; demo ;; help → unknown command or arguments; put "--" before it; see --help
    --config → --config
    --listen '' → --listen: is set but empty
    --config '' ;; GATEWAY_CONFIG= → --config, or GATEWAY_CONFIG, is set but empty
    gateway.json ;; ./my.json → unknown command or arguments; write --config FILE; see --help
    frobnicate ;; S → unknown command
    hash S ;; render ;; render hook S ;; token a b → unknown command or arguments
    token 'a b' → a name may have
    --config /no/such/file ;; GATEWAY_CONFIG=/no/such/file → /no/such/file ${MISSING}
    --listen x --backend y → --backend: must be | --listen: "x" is not
    --demo API_TOKENS=S ;; --demo API_TOKENS_FILE=/x ;; --demo BACKEND_URL=http://x ;; --demo --config /x ;; --demo --backend http://x ;; --demo render hook --listen 127.0.0.1:0 → --demo brings its own
    --S ;; --config x --S ;; --S=x ;; -S ;; --check=S ;; --config=S ;; --listen S --backend S ;; token 'S\u00a0' →
    --check API_TOKENS=short RATE=x → API_TOKENS[0]: the secret is shorter | RATE: "x" is not`;
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

test('token creates a secret that hash and the gateway agree on', async (t) => {
  const { stdout } = await cli(['token']);
  const [, secret, hashed] = /^secret {2}([A-Za-z0-9_-]{43})\ndigest {2}(sha256:[0-9a-f]{64})\n$/.exec(stdout)!;
  assert.deepEqual(await cli(['hash'], { input: `${secret}\n` }), { code: 0, stdout: `${hashed}\n`, stderr: '' });
  const { gateway } = await startBoth(t, { tokens: { a: { secret: hashed! } } });
  for (const [token, status] of [[secret, 200], [hashed, 401]] as const) {
    assert.equal((await ask(gateway, { headers: { authorization: `Bearer ${token}` } })).status, status);
  }
  const named = (await cli(['token', 'phone'])).stdout.trimEnd().split('\n');
  assert.notEqual(named[0], `secret  ${secret}`);
  assert.deepEqual(JSON.parse(`{${named[2]}}`), { phone: { secret: named[1]!.replace('digest  ', '') } });
  assert.equal((await cli(['hash'], { input: `${secret}\r\n` })).stdout, `${hashed}\n`);
  assert.equal((await cli(['hash'], { input: ` ${secret}\n` })).code, 2);
  const { code, stderr } = await cli(['hash'], { input: 'short\n' });
  assert.deepEqual([code, /^gateway: stdin: the secret is shorter/.test(stderr)], [2, true], stderr);
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
      "reader":{"secret":"${OTHER}5","allow":["info"],${defaults(TO)}}}}}`;
  const file = fileWith(t, config);
  const { code, stdout } = await cli(['--check', '--config', file]);
  assert.equal(code, 0);
  const [lines, open] = [stdout.split('\n'), 'rate no limit | from any address'];
  // A terminal of 80 columns breaks no number, and the id of a group has its own line.
  for (const line of lines.slice(4)) assert.match(line, /^(?:.{0,80}| {17}group\.\S+)$/);
  const joined = stdout.replace(/\n {17}/g, ' ');
  for (const line of joined.split('\n').filter((line) => line.startsWith('   '))) {
    assert.match(line, /^ {4}(?=.{12} \S)[a-z ]+ /);
  }
  assert.deepEqual(joined.replace(/\n {4}/g, ' | ').replace(/(?<=[a-z]) {2,}/g, ' ').split('\n'), [
    `The configuration is valid. It was read from: the file ${file}.`,
    ...['listen port 8880, for other machines too', 'backend http://backend:1/p', 'tokens 6'],
    'warning: the token "home" has expired',
    `  home | may call send, GET /v1/groups/:number | presented as path | sends from ${FROM} | sends to ${TO}, group.* | rate 30/1m | from 10.0.0.0/8 | expires 2020-01-01T23:59:59.999Z`,
    `  plain | may call send, info | presented as bearer, basic, body | sends from any account | sends to anyone | ${open} | expires never`,
    `  hook | may call send, info | presented as bearer, basic, body | sends from ${FROM} | sends to ${TO}, ${GROUP} | ${open} | webhooks become sends, with the message from a template; by default with number ${FROM}, recipients ${TO} and ${GROUP}, text_mode styled | expires never`,
    `  other | may call send, info | presented as bearer, basic, body | sends from ${FROM} | sends to anyone | ${open} | webhooks become sends, with the message from a template; by default with number ${FROM}, recipients ${TO} | expires never`,
    `  barred | may call send, info | presented as bearer, basic, body | sends from ${FROM} | sends to ${TO} | ${open} | webhooks become sends; by default with number ${FROM}, recipients ${TO} and ${STRANGER}; warning: they will be refused: This token may not send to one of these recipients: a phone number that is not on its list ("recipients", or else those in "defaults"). | expires never`,
    `  reader | may call info | presented as bearer, basic, body | sends from ${FROM} | sends to ${TO} | ${open} | webhooks become sends; by default with number ${FROM}, recipients ${TO}; warning: they will be refused: This token may not use this endpoint; the word "send" in its "allow" opens it. | expires never`,
    '',
  ]);
});

test('--check reports each pattern that can never match, and no other; GET /v2/send can match if a token makes sends', async (t) => {
  const good = `GET /v1/groups/:number, GET /v1/groups/:n/:g, * /v1/groups/*, * /*, * /*/*/*/*/members, GET /swagger/*,
    DELETE /v1/devices/:number/:deviceId, DELETE /v1/devices/:number/*, DELETE /v1/devices/*/local-data, GET /swagger/:file,
    POST /v1/plugins/a/b/c, GET /v1/groups/*/:groupid/avatar, GET /v1/attachments/-x, GET /v1/receive/:anything,
    GET /*/receive/:number, PUT /v1/groups/:number/*`.split(/,\s+/);
  const bad = `POST /v2/Send, GET /v2/send, POST /v3/send, POST /send, PATCH /v1/groups/*, GET /v1/new/*,
    GET /v1/:about, GET /v1/receive/15550100001, GET /v1/receive/--help, GET /v1/../v1/about, GET /v1/receive/:groupid, GET /*/accounts,
    GET /v1/groups/:number/avatar, POST /v1/polls/:number/:vote, GET /v1/receive/:number/*, GET /:swagger/*,
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
    assert.deepEqual([code, groupsOf(stdout, /^ {4}warning {6}(.*) matches no route of the backend$/gm)], [0, warned]);
    const [, own = ''] = /^ {2}a\n([^]*?)^ {2}b\n/m.exec(stdout)!;
    assert.equal(own.includes('matches no route'), warned.length > 0, 'the token that is warned of');
    assert.doesNotMatch(stdout, /will be refused/);
  }
});

test('render prints the send that would be made from a payload, sends nothing, and refuses what the gateway refuses', async (t) => {
  const backend = await startBackend(t);
  const styled = { ...DEFAULTS, text_mode: 'styled' };
  const hook = { message: '{{#alerts}}\n{{name}}\n{{/alerts}}', defaults: styled };
  const text = { secret: `${OTHER}3`, defaults: DEFAULTS };
  const reader = { secret: `${OTHER}2`, allow: ['info'], defaults: DEFAULTS };
  const tokens = { hook: { secret: SECRET, ...hook }, plain: { secret: OTHER }, reader, text };
  const file = fileWith(t, { backend: { url: backend.url }, tokens });
  const payload = JSON.stringify({ alerts: [{ name: 'ü' }, { name: 'b' }], number: 2, auth: OTHER });

  for (const args of [['render', 'hook', '--config', file], ['--config', file, 'render', 'hook']]) {
    for (const input of [payload, `payload=${encodeURIComponent(payload)}`]) {
      const { code, stdout, stderr } = await cli(args, { input });
      assert.deepEqual([code, stderr, JSON.parse(stdout)], [0, '', { ...styled, message: 'ü\nb' }]);
    }
  }
  const laid = (fields: object): string => JSON.stringify({ message: 'x', ...fields });
  const rows: [number, string, string, RegExp][] = [
    [1, 'hook', '{"a":1}', /^The send would lack message; the body's top-level keys are "a"\. .*\n$/],
    [1, 'text', laid({ recipients: [STRANGER] }), /^This token may not send to .*: a phone number .*\.\n$/],
    [
      1,
      'text',
      laid({ number: STRANGER }),
      /^This token may use only the accounts on its list \("senders", or else the number in "defaults"\)\.\n$/,
    ],
    [1, 'hook', '{"a":x}', /^The body is not a JSON object: expected a value, at byte 6\.\n$/],
    [1, 'reader', '{"message":"x"}', /^This token may not use this endpoint; the word "send" .*\n$/],
    [1, 'hook', sized(MIB + 1), /^The body is larger than 1MiB, the most that this gateway accepts here\.\n$/],
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
  const hook = { secret: SECRET, defaults: DEFAULTS, allow: ['GET /v2/send'], message: '{{who}}{{message}}' };
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
      assert.deepEqual([code, stderr, JSON.parse(stdout || '{}')], [0, '', { ...DEFAULTS, ...json }]);
    }
  }
  assert.deepEqual([(await render('{x')).code, (await render('{x')).stdout], [1, '']);
  assert.deepEqual([(await render(sized(MIB))).code, (await render(sized(1024), less)).code], [0, 0]);
  assert.match((await render(sized(1025), less)).stderr, /larger than 1KiB, the most that this gateway accepts/);
});

test('SIGTERM and SIGINT stop the process with 0 after the running request', async (t) => {
  for (const signal of ['SIGTERM', 'SIGINT'] as const) {
    const { backend, finish } = await startHolding(t);
    const gateway = await startProcess(t, { backend });
    const running = ask(gateway, { body: MESSAGE, headers: BEARER });
    await until(() => backend.seen.length === 1);
    const closing = gateway.close(signal);
    // The gateway refuses new connections as soon as it handles the signal.
    while (await ask(gateway, { path: '/healthz' }).then(() => true, () => false));
    finish();
    assert.equal((await running).status, 200);
    await closing;
    await until(() => gateway.output().includes('"stopped"'));
  }
});

test('the last log lines are written before the process exits, whatever the level', async (t) => {
  for (const LOG_LEVEL of ['info', 'warn']) {
    const { backend } = await startHolding(t);
    // A variable that is noted turns "listening" into a warning.
    const env = { LOG_LEVEL, RATE_LIMIT: '1', SHUTDOWN_TIMEOUT: '200ms' };
    const gateway = await startProcess(t, { backend, env });
    const running = ask(gateway, { body: MESSAGE, headers: BEARER });
    await until(() => backend.seen.length === 1);
    const whole = once(gateway.child, 'close');
    await gateway.close();
    assert.equal((await running).status, 504);
    await whole;
    assert.match(gateway.output(), /"message":"request".*"status":504/, LOG_LEVEL);
  }
});

// The signal handlers were set shortly after the log line "listening".
test('SIGTERM stops the process even if closing the gateway fails', async (t) => {
  const code = `
    import http from 'node:http';
    import { run } from ${JSON.stringify(FILE.href)};
    http.Server.prototype.close = function () { this.emit('error', new Error('planted in close')); };
    await run([], process.env, () => Buffer.alloc(0));`;
  const file = fileWith(t, code, 'script.mjs');
  const gateway = await startProcess(t, { program: [...AS_IT_IS.slice(0, -1), file] as unknown as Program });
  await gateway.close();
  assert.match(String(linesOf(gateway, /^internal error$/).at(-1)?.stack), /planted in close/);
});

test('a SIGTERM at the moment when the gateway starts to listen stops the process with 0, also with --demo', {
  skip: !isNode && 'only Node loads a module before the program',
}, async (t) => {
  const code = `const { stdout } = process, { write } = stdout;
    stdout.write = (text, ...more) => {
      if (String(text).includes('"listening"')) process.kill(process.pid, 'SIGTERM');
      return write.call(stdout, text, ...more);
    };`;
  for (const args of [[], ['--demo']]) {
    const program: Program = [process.execPath, ...LOADER, '--import', script(t, code).at(-1)!, fileURLToPath(FILE)];
    const child = start(args, { LISTEN: '127.0.0.1:0', LOG_FORMAT: 'json' }, program);
    assert.deepEqual(await once(child, 'close'), [0, null], child.output());
    assert.match(child.output(), /"listening"/);
  }
});

/** Does what curl does with a line, so the tests need no curl. Its one header is Authorization. */
function askAsCurl(line: string): Promise<Answer> {
  const options = Array.from(line.slice('curl '.length).matchAll(/(?:-(\w) )?(?:'([^']*)'|(\S+))/g));
  const given = Object.fromEntries(options.map(([, flag = 'url', quoted, word]) => [flag, quoted ?? word!]));
  const { url, X: method = 'POST', d: body, u: user, H: header = '' } = given;
  const authorization = user === undefined ? /^Authorization: (.*)/.exec(header)?.[1] : basic(user);
  const headers = { ...(authorization && { authorization }), ...(body && { 'content-type': URLENCODED }) };
  const { port, pathname, search } = new URL(url!.replace(/^(?!http:)/, 'http://'));
  return ask({ port: Number(port) }, { method, path: pathname + search, headers, ...(body && { body }) });
}

/** Starts a demo. Its first command shows port and token, and fits on one line. */
async function startDemo(t: TestContext, how: How = {}) {
  const gateway = await startProcess(t, { args: ['--demo'], ...how });
  await until(() => /^curl .*'$/m.test(gateway.output()));
  const [first, secret = ''] = /^curl -u api:([\w-]+) .*$/m.exec(gateway.output())!;
  return Object.assign(gateway, { first, secret });
}

section('CLIENTS'); // ─────────────────────────────────────────────────────────────────────────────

table("Home Assistant's library requests GET /v1/about with userinfo, then sends, and needs exactly 201 and JSON", {})`
  * basic | User-Agent: python-requests/2.32.5 | Accept-Encoding: gzip, deflate | Accept: */*
  GET /v1/about → 200 | Content-Type: application/json; charset=utf-8 | "{"versions":["v1","v2"],"
  Content-Type: application/json | ${
  HELLO.slice(0, -1)
},"base64_attachments":["aW1hZ2U="]} → 201 | same | "[{"timestamp":"1700000000000"}]"`;

table('shoutrrr sends a bearer token, frigate-notify no Content-Type, alertmanager-webhook-signal empty fields', {})`
  * bearer | User-Agent: Go-http-client/1.1 → 201
  ${HELLO} → same
  ${HELLO.slice(0, -1)},"base64_attachments":null} → same
  ${
  HELLO.slice(0, -1)
},"base64_attachments":null,"mentions":null,"quote_mentions":null,"quote_author":"","quote_message":"","sticker":"","text_mode":""} → same
  ${HELLO.slice(0, -1)},"recipient":"","link_preview":null,"auth":null} → ${
  HELLO.slice(0, -1)
},"recipient":"","link_preview":null}
  ${HELLO.slice(0, -1)},"recipient":null,"members":null,"admins":null,"answers":null,"selected_answers":null} → same`;

table('wget sends no credential until it is challenged; signalbot requests GET /v1/health', {})`
  ${HELLO} → 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer
  basic | ${HELLO} → 201 | same
  bearer | GET /v1/health → 204`;

test('a client that starts with TLS, as signalbot does, gets 400', async (t) => {
  const { backend, gateway } = await startBoth(t);
  const hello = Buffer.from('160301010e0100010a0303000102030405060708090a0b0c0d0e0f', 'hex');
  const refusal = /^HTTP\/1\.1 400 Bad Request\r\nConnection: close\r\n[^]*"code":"bad_request"/;
  assert.match(await raw(gateway, hello), refusal);
  assert.equal(backend.connections, 0);
});

section('RECIPES'); // ─────────────────────────────────────────────────────────────────────────────

/** The encodings in which senders post a payload. */
const PAYLOAD_AS: Record<string, (json: string) => [type: string, body: string]> = {
  json: (json) => ['application/json', json],
  form: (json) => [URLENCODED, `payload=${encodeURIComponent(json)}`],
  multipart: (json) => [AS_MULTIPART, multipart([['data', json]])],
};

/**
 * Recipes: the heading, the form and the encodings, then each payload with the text that must arrive at the backend.
 */
const RECIPES = literal`
  ### Grafana | bearer | json
  {"receiver":"phone","status":"firing","orgId":1,"title":"[FIRING:1, RESOLVED:1]","state":"alerting","message":"**Firing**\n\n - alertname = High memory\n","alerts":[{"status":"firing","labels":{"alertname":"High memory","instance":"pi-1"},"annotations":{"summary":"98 % in use"}},{"status":"resolved","labels":{"alertname":"HostDown"},"annotations":{"description":"pi-2 is back"}},{"status":"firing","labels":{"alertname":"Odd"},"annotations":{}}]} → [FIRING:1, RESOLVED:1]\n\nfiring: High memory on pi-1\n98 % in use\n\nresolved: HostDown\npi-2 is back\n\nfiring: Odd
  ### Grafana, with its own text | bearer | json
  {"status":"firing","orgId":1,"title":"[FIRING:1] High memory","state":"alerting","message":"**Firing**\n\n - alertname = High memory\n","alerts":[{"status":"firing","labels":{"alertname":"High memory"}}]} → **Firing**\n\n - alertname = High memory\n
  ### Alertmanager | bearer | json
  {"receiver":"sms","status":"firing","truncatedAlerts":0,"commonAnnotations":{"summary":"A probe failed"},"alerts":[{"status":"firing","labels":{"alertname":"ProbeFailure"},"annotations":{"description":"It did not answer","summary":"BlackBox Probe Failure"}}]} → Alerts for sms\nfiring: ProbeFailure\nBlackBox Probe Failure
  {"receiver":"sms","status":"firing","truncatedAlerts":4,"alerts":[{"status":"firing","labels":{"alertname":"DiskFull","instance":"pi-1"},"annotations":{"summary":"3% left on <sda> & \"sdb\""}},{"status":"resolved","labels":{"alertname":"HostDown"},"annotations":{"description":"pi-2 is back"}},{"status":"firing","labels":{"alertname":"Odd"},"annotations":{}}]} → Alerts for sms\nfiring: DiskFull on pi-1\n3% left on <sda> & "sdb"\nresolved: HostDown\npi-2 is back\nfiring: Odd\nand 4 more
  ### Uptime Kuma | bearer | json multipart
  {"heartbeat":{"monitorID":1,"status":0,"msg":"timeout"},"monitor":{"id":1,"name":"web"},"msg":"[web] [🔴 Down] timeout"} → [web] [🔴 Down] timeout
  ### Sonarr | basic | json
  {"eventType":"Test","instanceName":"Sonarr","series":{"id":1,"title":"Test Title"},"episodes":[{"episodeNumber":1,"seasonNumber":1,"title":"Test title"}]} → Sonarr: Test: Test Title\nS1E1 Test title
  {"eventType":"Grab","instanceName":"Sonarr","series":{"title":"A Series"},"episodes":[{"episodeNumber":14,"seasonNumber":2,"title":"First"},{"episodeNumber":15,"seasonNumber":2,"title":"Second"}],"release":{"quality":"WEBDL-1080p"}} → Sonarr: Grab: A Series\nS2E14 First\nS2E15 Second
  {"eventType":"Health","instanceName":"Sonarr","level":"warning","message":"No indexer is available"} → Sonarr: Health\nNo indexer is available
  ### Radarr | basic | json
  {"eventType":"Test","instanceName":"Radarr","movie":{"title":"Test Title","year":1970},"remoteMovie":{"title":"Test title","year":1970},"release":{"quality":"Test Quality","releaseTitle":"Test Title"}} → Radarr: Test: Test Title (1970)\nTest Title
  {"eventType":"Download","instanceName":"Radarr","movie":{"title":"A Film","year":2003},"movieFile":{"relativePath":"A Film (2003).mkv"}} → Radarr: Download: A Film (2003)
  ### GitHub | query | json form
  {"zen":"Keep it logically awesome.","hook":{},"repository":{},"sender":{"login":"octocat"}} → Keep it logically awesome.
  {"action":"opened","number":2,"pull_request":{"title":"Less is more","html_url":"https://github.com/o/r/pull/2"},"repository":{"full_name":"o/r"},"sender":{"login":"octocat"}} → o/r\npull request 2 opened by octocat: Less is more\nhttps://github.com/o/r/pull/2
  {"action":"closed","issue":{"number":7,"title":"It is broken","html_url":"https://github.com/o/r/issues/7"},"repository":{"full_name":"o/r"},"sender":{"login":"octocat"}} → o/r\nissue 7 closed by octocat: It is broken\nhttps://github.com/o/r/issues/7
  {"ref":"refs/heads/old","deleted":true,"pusher":{"name":"octocat"},"head_commit":null,"commits":[],"repository":{"full_name":"o/r"},"sender":{"login":"octocat"}} → o/r\noctocat deleted refs/heads/old
  {"ref":"refs/heads/main","deleted":false,"pusher":{"name":"octocat"},"head_commit":{"message":"Fix it","url":"https://github.com/o/r/commit/1"},"commits":[],"repository":{"full_name":"o/r"},"sender":{"login":"octocat"}} → o/r\noctocat pushed to refs/heads/main: Fix it\nhttps://github.com/o/r/commit/1
  ### Gitea, Forgejo | bearer | json form
  {"ref":"refs/heads/main","commits":[{"message":"Fix it"},{"message":"And that"}],"repository":{"full_name":"o/r"},"pusher":{"login":"ada"},"sender":{"login":"ada"}} → o/r\nada pushed to refs/heads/main\nFix it\nAnd that
  {"action":"published","release":{"tag_name":"v1","html_url":"https://git.example.org/o/r/releases/tag/v1"},"repository":{"full_name":"o/r"},"sender":{"login":"ada"}} → o/r\nrelease v1 published by ada\nhttps://git.example.org/o/r/releases/tag/v1
  {"action":"opened","number":2,"pull_request":{"number":2,"title":"Less is more","html_url":"https://git.example.org/o/r/pulls/2"},"repository":{"full_name":"o/r"},"sender":{"login":"ada"}} → o/r\npull request 2 opened by ada: Less is more\nhttps://git.example.org/o/r/pulls/2
  {"action":"opened","number":7,"issue":{"number":7,"title":"It is broken","html_url":"https://git.example.org/o/r/issues/7"},"repository":{"full_name":"o/r"},"sender":{"login":"ada"}} → o/r\nissue 7 opened by ada: It is broken\nhttps://git.example.org/o/r/issues/7
  ### Apprise, as JSON | basic | json
  {"version":"1.0","title":"","message":"hello","attachments":[],"type":"info"} → hello
  {"version":"1.0","title":"Backup","message":"It is done.","attachments":[],"type":"success"} → Backup\nIt is done.
  ### Seerr, Overseerr, Jellyseerr | bearer | json
  {"notification_type":"MEDIA_PENDING","event":"New Movie Request","subject":"A Film (2003)","message":"Fish get lost.","request":{"requestedBy_username":"ada"},"comment":null} → New Movie Request: A Film (2003)\nFish get lost.\nRequested by ada
  {"notification_type":"ISSUE_COMMENT","event":"New Comment on Video Issue","subject":"A Film (2003)","message":"It is dark.","request":null,"comment":{"comment_message":"Better now?","commentedBy_username":"bob"}} → New Comment on Video Issue: A Film (2003)\nbob: Better now?
  {"notification_type":"TEST_NOTIFICATION","event":"","subject":"Test Notification","message":"Are we coming in clear?","request":null,"comment":null} → TEST_NOTIFICATION: Test Notification\nAre we coming in clear?`
  .split('### ').slice(1).map((recipe) => {
    const [head = '', ...posts] = recipe.trim().split(/\n\s*/);
    const [heading = '', form = '', encodings = ''] = head.split(' | ');
    return { heading, form, encodings: encodings.split(' '), posts };
  });

/** A section of docs/recipes.md, up to the next heading of its level or above. */
function sectionOf(heading: string): string {
  const [, level, text] = new RegExp(`\\n(##+) ${heading}\\n([^]*)`).exec(COOKBOOK) ?? assert.fail(heading);
  return text!.split(new RegExp(`\\n#{2,${level!.length}} `))[0]!;
}

/** The configuration of docs/recipes.md, with its token changed as a recipe describes. */
function recipeConfig(heading: string): GatewayConfig {
  const [config, recipe] = ['The file', heading].map((name) => JSON.parse(blocks('json', sectionOf(name))[0]!));
  const [[name, token]] = Object.entries(config.tokens) as [[string, TokenConfig]];
  const without = groupsOf(sectionOf(heading), /delete the\s+line `(\w+)`/g);
  const changed = Object.entries({ ...token, ...recipe }).filter(([line]) => !without.includes(line));
  return { ...config, tokens: { [name]: Object.fromEntries(changed) } };
}

for (const { heading, form, encodings, posts } of RECIPES) {
  test(`recipe: ${heading}`, async (t) => {
    assert.ok(sectionOf(heading).includes(`(${form}`), 'the form is named');
    const token = Object.values(recipeConfig(heading).tokens!)[0]!;
    const { backend, gateway } = await startBoth(t, tokens({ ...token, secret: SECRET }));
    const { headers, path = '/v2/send' } = SPELLINGS.find((known) => known.name === form)!.ask(SECRET);
    for (const [json = '', text = ''] of posts.map((post) => post.split(' → '))) {
      if (!/own text/.test(heading)) assert.doesNotMatch(text, /[\s:]$/, 'something is still pending');
      for (const encoding of encodings) {
        const [type, body] = PAYLOAD_AS[encoding]!(json);
        const framing = encoding === 'multipart' && { 'transfer-encoding': 'chunked' };
        const answer = await ask(gateway, { body, path, headers: { 'content-type': type, ...framing, ...headers } });
        assert.equal(answer.status, 201, `${json}: ${answer.text}`);
        const styled = /own text/.test(heading) && { text_mode: 'styled' };
        assert.deepEqual(gotJson(backend), { ...DEFAULTS, ...styled, message: String(unescaped(text)) });
        assert.equal(backend.seen.at(-1)!.url, '/v2/send');
      }
    }
  });
}

test('a body that is not for a recipe is refused, or arrives as more than the fixed words of its template', async (t) => {
  const all = RECIPES.flatMap(({ posts }) => posts.map((post) => post.split(' → ')[0]!));
  const bodies = ['{}', '{"foo":"bar"}', 'Backup done', '{"message":"Backup done"}', ...all];
  const met = { sent: 0, refused: 0 };
  for (const { heading } of RECIPES) {
    const token = Object.values(recipeConfig(heading).tokens!)[0]!;
    const { methods: _, ...open } = token;
    const { backend, gateway } = await startBoth(t, tokens({ ...open, secret: SECRET }));
    const fixed = render([token.message ?? ''].flat().join('\n'), {}).trim();
    for (const [i, body] of bodies.entries()) {
      const { status } = await ask(gateway, { body, headers: BEARER });
      const sent = backend.sent.splice(0).map(({ message }) => message);
      status === 201 ? met.sent++ : met.refused++;
      assert.deepEqual([status, sent.length], status === 201 ? [201, 1] : [400, 0], `${heading}: ${body}`);
      assert.ok(sent.every((text) => text.trim() !== fixed), `${heading}: ${body} is ${sent}`);
      const isText = /^Backup|"message":"Backup/.test(body);
      assert.ok(!isText || sent.every((text) => text.includes('Backup done')), `${heading}: ${body} is ${sent}`);
      if (i < 2) assert.equal(status, 400, `${heading}: ${body}`);
    }
  }
  assert.ok(met.sent > RECIPES.length && met.refused > 3 * RECIPES.length, JSON.stringify(met));
});

/** Runs a script in a shell, and returns its exit code. */
function shell(script: string, cwd: string, env: NodeJS.ProcessEnv = {}, args: string[] = []): Promise<number> {
  const options = { cwd, env: { PATH: process.env.PATH, ...env }, stdio: 'ignore' } as const;
  return once(spawn('sh', ['-c', script, 'sh', ...args], options), 'close').then(([code]) => code);
}

/** The target that a recipe names, which a device requests from the gateway. */
function targetIn(block: string): string {
  return /:\d+\]? ?(\/[^\s'"]*(?: [\w ]+(?= ENDON))?)/.exec(block)![1]!.replaceAll(' ', '%20');
}

/** Headers of the HTTPClient of the ESP8266. */
const ESP = ['User-Agent: ESP8266HTTPClient', 'Accept-Encoding: identity;q=1,chunked;q=0.1,*;q=0'];

/** Posts to the address and with the headers that a recipe in YAML or a table sets. */
function postAs(block: string, to: Address, body: Required<Ask>['body']): Promise<Answer> {
  const type = /content_type: (.*)/.exec(block)?.[1] ?? 'application/json';
  const authorization = /Authorization:? +(Bearer \S+)/.exec(block)![1]!;
  return ask(to, { path: targetIn(block), headers: { authorization, 'content-type': type }, body });
}

const SCRIPTS: string[] = [];
const AT_DOOR = 'Somebody is at the door';
const AT_PORT = 'failed protocol test [HTTP] at [localhost]:443';

/**
 * A test of a recipe of "Scripts and devices": its heading and form, what must arrive at the backend, and what the
 * device does with the blocks of the recipe. `dir` is a folder for files; `needs` is a program that may be missing.
 */
function recipe(
  heading: string,
  form: string,
  texts: (string | RegExp)[],
  run: (blocks: string[], to: Gateway & { dir: string }) => Promise<unknown>,
  needs = 'sh',
): void {
  SCRIPTS.push(heading);
  const isThere = spawnSync('sh', ['-c', `command -v ${needs}`]).status === 0;
  test(`recipe: ${heading}`, { skip: !isThere && `${needs} is not installed` }, async (t) => {
    const secrets = [SECRET, OTHER];
    const blocksOf = (name: string): string[] => blocks('\\w+', sectionOf(name));
    const json = blocksOf('Scripts and devices')[0]!.replace(/sha256:PASTE[^"]*/g, () => secrets.shift()!);
    const { tokens, cors } = JSON.parse(json) as GatewayConfig;
    const { backend, gateway } = await startBoth(t, { tokens: tokens!, cors: cors! });
    const dir = folder(t);
    const file = join(dir, 'signal-send');
    const here = (block: string): string =>
      block.replaceAll('@auth=TOKEN', `@auth=${OTHER}`).replaceAll('TOKEN', SECRET)
        .replaceAll('gateway:8880', `127.0.0.1:${gateway.port}`).replaceAll('/etc/signal-send', file);
    writeFileSync(file, here(blocksOf('Shell and cron')[0]!));
    assert.ok(sectionOf(heading).includes(`(${form}`), 'the form is named');
    await run(blocksOf(heading).map(here), { ...gateway, dir });
    await until(() => requests(gateway).length === texts.length);
    assert.ok(requests(gateway).every(({ status }) => status === 201), gateway.log.join());
    assert.equal(backend.sent.length, texts.length);
    for (const [i, { message, ...target }] of backend.sent.entries()) {
      assert.deepEqual(target, DEFAULTS);
      if (texts[i] instanceof RegExp) assert.match(message, texts[i]);
      else assert.equal(message, texts[i]);
    }
    assert.doesNotMatch(`${gateway.log}`, SECRETS);
  });
}

recipe('Shell and cron', 'bearer', [
  ...['Backup done: 5 files\n', /^total (?:\P{Cc}|\n)*snap\.jpg\n/u, 'Backup done: 5 files', 'Front door'],
  ...['Backup done: 5 files', /^\S+: "sh -c printf [^]* exit 3" exited with 3\nout\nerr\n$/],
  /^\S+: "\S+\/restic backup \/home" exited with 3\nno space left\n$/,
], async ([, lines, report, crontab], { dir }) => {
  writeFileSync(join(dir, 'snap.jpg'), 'a picture');
  for (const line of lines!.trim().split('\n')) assert.equal(await shell(line, dir), 0, line);
  const failing = 'printf "\x1b[31mout\x1b[m\\n"; echo err >&2; exit 3';
  for (const [code, command] of [[0, 'echo all is well'], [3, failing]] as const) {
    assert.equal(await shell(report!, dir, {}, ['sh', '-c', command]), code);
  }
  // As Debian's cron runs the line, which would not find `report` without its path.
  writeFileSync(join(dir, 'report'), report!);
  writeFileSync(join(dir, 'restic'), '#!/bin/sh\necho no space left\nexit 3\n', { mode: 0o755 });
  const [install] = /install -m 755 report \/\S+\/report/.exec(sectionOf('Shell and cron'))!;
  const [, line] = /^15 3 \* \* \* +(\S.*)$/m.exec(crontab!)!;
  await mkdir(join(dir, 'bin'));
  const inDir = (command: string): string =>
    command.replace('/usr/local/bin', join(dir, 'bin')).replace('restic', join(dir, 'restic'));
  assert.equal(await shell(inDir(install), dir), 0);
  assert.equal(await shell('env -i PATH=/usr/bin:/bin sh -c "$1"', dir, {}, [inDir(line!)]), 3);
}, 'curl');
recipe('systemd, OnFailure=', 'bearer', ['backup.service: failed --no-pager --lines=20\n'], async ([unit], { dir }) => {
  const [, command] = /^ExecStart=\/bin\/sh -c '(.*)'$/m.exec(unit!)!;
  assert.match(unit!, /^LoadCredential=signal-send:/m);
  writeFileSync(join(dir, 'systemctl'), '#!/bin/sh\necho "$4: failed $2 $3"\nexit 3\n', { mode: 0o755 });
  const script = command!.replaceAll('%i', 'backup.service').replaceAll('%d', dir);
  assert.equal(await shell(script, dir, { PATH: `${dir}:${process.env.PATH}` }), 0);
}, 'curl');
recipe('monit', 'bearer', [`pi: nginx: ${AT_PORT}\n`], async ([script], { dir }) => {
  const env = { MONIT_HOST: 'pi', MONIT_SERVICE: 'nginx', MONIT_DESCRIPTION: AT_PORT };
  assert.equal(await shell(script!, dir, env), 0);
}, 'curl');
recipe("A router's or a camera's URL action", 'path', [AT_DOOR, AT_DOOR], async ([url], to) => {
  await raw(to, `GET ${targetIn(url!)} HTTP/1.0\r\n\r\n`);
  await rawRequest(to, targetIn(url!), { headers: ['User-Agent: Wget'] });
});
recipe('Shelly', 'path', ['The washing machine is done', 'The washing machine is done'], async ([url, script], to) => {
  await rawRequest(to, targetIn(url!), { headers: ['User-Agent: shelly'] });
  const calls: [string, Ask & { url: string }][] = [];
  new Function('Shelly', script!)({ call: (...call: (typeof calls)[0]) => calls.push(call) });
  const [name, { url: where, ...request }] = calls[0]!;
  assert.equal(name, 'HTTP.Request');
  await ask(to, { ...request, path: targetIn(where) });
});
recipe('Tasmota', 'path', [AT_DOOR], ([rule], to) => rawRequest(to, targetIn(rule!), { headers: ESP }));
recipe('ESP8266, ESP32', 'bearer', ['The cellar is wet'], ([lines], to) => {
  const own = Array.from(lines!.matchAll(/addHeader\("(.*)", "(.*)"\)/g), ([, ...pair]) => pair.join(': '));
  const [, body = ''] = /POST\("(.*)"\)/.exec(lines!)!;
  return rawRequest(to, targetIn(lines!), { method: 'POST', headers: [...ESP, ...own], body });
});
recipe('Home Assistant, rest_command', 'bearer', ['recipients=+15559999999&message=Tür offen'], ([yaml], to) => {
  assert.match(yaml!, /method: post\n[^]*payload: "\{\{ text \}\}"/);
  return postAs(yaml!, to, 'recipients=+15559999999&message=Tür offen');
});
recipe('Home Assistant, notify: rest', 'bearer', ['Door open', 'Door open'], async ([yaml], to) => {
  const [, target] = /method: POST_JSON\n[^]*target_param_name: (\w+)/.exec(yaml!)!;
  for (const more of [{}, { [target!]: TO }]) await postAs(yaml!, to, { message: 'Door open', ...more });
});
recipe('Synology', 'bearer', ['Volume 1 on nas has degraded.'], ([table], to) => {
  const [, name] = /^HTTP body +(\w+) +\(category: message content\)$/m.exec(table!)!;
  return postAs(table!, to, { [name!]: 'Volume 1 on nas has degraded.' });
});
recipe('A page', 'bearer', ['Dinner is ready'], async ([script], to) => {
  const browser = { 'user-agent': 'Mozilla/5.0', 'origin': DASHBOARD, 'sec-fetch-site': 'cross-site' };
  const fetch = (url: string, init: Ask): Promise<Answer> =>
    ask(to, { ...init, path: targetIn(url), headers: { ...init.headers, ...browser } });
  await new Function('fetch', `${script}; return send`)(fetch)('Dinner is ready');
});

test('every recipe of docs/recipes.md is tested here, and its render command prints a send', async (t) => {
  const headings = (section: string): string[] => groupsOf(sectionOf(section), /^### (.*)$/gm);
  assert.deepEqual(headings('Webhooks'), [...RECIPES.map(({ heading }) => heading), 'Another sender']);
  assert.deepEqual(headings('Scripts and devices'), SCRIPTS);
  const [, json, name] = /^echo '(.*)' \|\n.* --config gateway\.json render (.*)$/m.exec(COOKBOOK)!;
  const file = fileWith(t, JSON.stringify(recipeConfig('Alertmanager')).replace(/sha256:PASTE[^"]*/, SECRET));
  const { code, stdout } = await cli(['--config', file, 'render', name!], { input: json! });
  const message = 'Alerts for phone\nfiring: DiskFull\n3% left';
  assert.deepEqual([code, JSON.parse(stdout)], [0, { ...DEFAULTS, message }]);
});

test('the template of docs/migrating.md finds the text in each field that secured-signal-api maps', async (t) => {
  const page = PAGES['docs/migrating.md']!;
  const [section] = page.split('## The built-in fields\n').slice(1);
  const config: GatewayConfig = JSON.parse(blocks('json', page)[0]!.replace(/sha256:PASTE[^"]*/, SECRET));
  const names = 'message content description text summary details'.split(' ');
  const [plain, inData] = [['message', 'msg', ...names.slice(1), 'body'], names.map((name) => `data.${name}`)];
  for (const field of [...plain, ...inData, 'data']) {
    const isNamed = section!.includes(`\`${field}\``) || /^data\.[dst]/.test(field); // the others are "and so on"
    assert.ok(isNamed, field);
  }
  /** A body that has every field, with the field's name as the text. */
  const payload = (fields: string[]): object => {
    const data = Object.fromEntries(
      names.filter((name) => fields.includes(`data.${name}`)).map((n) => [n, `data.${n}`]),
    );
    const others = fields.filter((field) => !field.startsWith('data.')).map((field) => [field, field]);
    return { ...fields.some((field) => field.startsWith('data.')) && { data }, ...Object.fromEntries(others) };
  };
  const [, forData] = /replace the six lines of\s+`data\.…` with `(.*?)`/.exec(section!)!;
  const { message } = config.tokens!.webhook!;
  const ofData = /"\{\{#data\.[^]*\/data\.details\}\}"/;
  const withData = JSON.parse(JSON.stringify(message).replace(ofData, forData!));
  const all = [...plain.slice(0, -1), ...inData, 'body'];
  for (
    const [template, fields] of [[message, all], [withData, [...plain.slice(0, -1), 'data', 'body']]] as [
      string[],
      string[],
    ][]
  ) {
    const { backend, gateway } = await startBoth(t, {
      tokens: { webhook: { ...config.tokens!.webhook, message: template } },
    });
    for (const found of [...fields.map((field) => [field]), fields]) {
      assert.equal((await ask(gateway, { body: payload(found), headers: BEARER })).status, 201, found.join());
      assert.deepEqual(gotJson(backend), { ...DEFAULTS, message: found.join('\n') });
    }
    assert.equal((await ask(gateway, { body: { other: 'x' }, headers: BEARER })).status, 400);
    assert.equal(backend.sent.length, fields.length + 1);
  }
});

test('the page for Home Assistant keeps a text and its sender in one entity, and its automation checks that state', () => {
  const block = (first: string) =>
    blocks('yaml', PAGES['docs/home-assistant.md']).find((text) => text.startsWith(first));
  const [rest, automation] = [block('rest:'), block('automation:')];
  assert.deepEqual(groupsOf(rest!, /^ +- name: (.*)$/gm), ['Signal message']);
  assert.match(rest!, /\[:255\][^]*json_attributes_path: "\$\[-1:\]\.envelope"\n +json_attributes: \[source, /);
  assert.match(automation!, /trigger: state\n +entity_id: sensor\.signal_message\n +conditions:/);
  assert.match(automation!, /trigger\.to_state\.state == [^]* trigger\.to_state\.attributes\.source == /);
  assert.doesNotMatch(automation!, /states\(|state_attr\(/);
});

test('every configuration in the pages loads, and every token in it is confined', (t) => {
  const secretFile = fileWith(t, SECRET);
  const whole = blocks('json').filter((block) => block.includes('"tokens"'));
  const configs = [...whole, ...RECIPES.map(({ heading }) => JSON.stringify(recipeConfig(heading)))];
  assert.ok(configs.length >= 15, `only ${configs.length} configurations`);
  assert.equal(configs.length, blocks('json').length);
  for (const text of configs) {
    // The gateway refuses to start with the placeholders, because a published secret would let anyone in.
    for (const problem of problemsOf(() => loadSettings({ file: fileWith(t, text) }))) {
      assert.match(problem, /: after "sha256:" there must be 64|secretFile: \S+ does not exist/);
    }
    let made = 0;
    const good = text.replace(/sha256:PASTE[^"]*/g, () => `sha256:${String(++made).padStart(64, '0')}`)
      .replace(/\/run\/secrets\/\w+/g, () => secretFile);
    assert.deepEqual(problemsOf(() => loadSettings({ file: fileWith(t, good) })), []);
  }
  const confined = ['allow', 'senders', 'recipients', 'defaults', 'rate', 'clients', 'methods', 'expires'] as const;
  const all = configs.flatMap((text) => Object.entries((JSON.parse(text) as GatewayConfig).tokens!));
  assert.ok(all.length >= 15, `only ${all.length} tokens`);
  for (const [name, token] of all) {
    assert.ok(confined.filter((key) => token[key] !== undefined).length >= 2, name);
    if (!token.defaults) continue;
    const allow = { devices: ['GET /v2/send'], home: ['send', 'info'] }[name] ?? ['send'];
    const { text_mode: _, ...lists } = token.defaults;
    assert.deepEqual([token.allow, token.senders, token.recipients, lists], [allow, undefined, undefined, DEFAULTS]);
  }
});

section('MEMORY'); // ──────────────────────────────────────────────────────────────────────────────

const BIG_BYTES = 150 * MIB;
const PIECE = Buffer.alloc(256 * 1024, 'QUJD');
const noProc = process.platform === 'linux' && isNode ? false : 'measured with /proc, for Node';

function memoryOf({ child }: Process, name: 'VmRSS' | 'VmHWM'): number {
  const [, kib] = new RegExp(`${name}:\\s+(\\d+) kB`).exec(readFileSync(`/proc/${child.pid}/status`, 'utf8'))!;
  return Number(kib) * 1024;
}

/** Reads a stream to its end, at full speed or slowly, and returns the number of bytes. */
async function drain(stream: http.IncomingMessage, isSlow: boolean): Promise<number> {
  let got = 0;
  for await (const chunk of stream as AsyncIterable<Buffer>) {
    got += chunk.length;
    if (isSlow && got % (4 * MIB) < chunk.length) await new Promise((resolve) => setTimeout(resolve, 5));
  }
  return got;
}

/** Writes this many bytes, as fast as they are accepted. */
async function writeBig(to: NodeJS.WritableStream, bytes: number): Promise<void> {
  for (let left = bytes; left > 0; left -= PIECE.length) {
    if (!to.write(PIECE.subarray(0, Math.min(left, PIECE.length)))) await once(to, 'drain');
  }
}

/**
 * By how much `run` raises a gateway's peak memory after twenty sends. The peak also depends on the garbage collector,
 * so beyond the limit two more processes get a try.
 */
async function assertMemory(t: TestContext, backend: Backend, run: (gateway: Process) => Promise<void>): Promise<void> {
  const grown: number[] = [];
  while (grown.length < 3 && !(Math.min(...grown) <= 64)) {
    const gateway = await startProcess(t, { backend, env: { MAX_BODY: '1GiB' } });
    for (let i = 0; i < 20; i++) assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
    const idle = memoryOf(gateway, 'VmRSS');
    await run(gateway);
    grown.push(Math.round((memoryOf(gateway, 'VmHWM') - idle) / MIB));
  }
  t.diagnostic(`grown by ${grown.join(', ')} MiB`);
  assert.ok(Math.min(...grown) <= 64, `${grown} MiB`);
}

for (const [place, pace] of ['header fast', 'header slowly', 'body fast', 'body slowly'].map((way) => way.split(' '))) {
  const title = `150 MiB, the token in the ${place}, to a backend that reads ${pace}, cost no more than 64 MiB`;
  test(`memory: ${title}`, { skip: noProc, isAlone: true }, async (t) => {
    let got = 0;
    const backend = await startBackend(t, async (req, res) => {
      got = await drain(req, pace === 'slowly');
      res.writeHead(201).end('{}');
    });
    // The checked fields are at both ends of the document.
    const head = `${(place === 'body' ? AUTHED(SECRET) : HELLO).slice(0, -1)},"base64_attachments":["`;
    const tail = `"],"recipient":"${TO}"}`;
    const isChunked = (place === 'body') === (pace === 'fast');
    const framing = isChunked ? { 'transfer-encoding': 'chunked' } : { 'content-length': BIG_BYTES };
    await assertMemory(t, backend, async (gateway) => {
      const req = beginSend(gateway, { ...place === 'header' && BEARER, ...framing });
      const responded = once(req, 'response') as Promise<[http.IncomingMessage]>;
      req.write(head);
      await writeBig(req, BIG_BYTES - head.length - tail.length);
      req.end(tail);
      const [res] = await responded;
      assert.equal(res.resume().statusCode, 201);
      assert.ok(got > BIG_BYTES - 1000, `${got} bytes`);
    });
  });
}

test(
  'memory: a response of 150 MiB costs no more than 64 MiB, even if read slowly',
  { skip: noProc, isAlone: true },
  async (t) => {
    const backend = await startBackend(t, async (req, res) => {
      req.resume();
      res.writeHead(req.method === 'GET' ? 200 : 201);
      if (req.method === 'GET') await writeBig(res, BIG_BYTES);
      res.end();
    });
    await assertMemory(t, backend, async ({ port }) => {
      const req = http.get({ host: '127.0.0.1', port, path: '/v1/health', agent: false, headers: BEARER });
      const [res] = await once(req, 'response') as [http.IncomingMessage];
      assert.equal(await drain(res, true), BIG_BYTES);
    });
  },
);

test(
  'a gateway serves requests during and after a thousand idle connections and slow uploads',
  { skip: noProc, isAlone: true },
  async (t) => {
    const backend = await startBackend(t);
    const gateway = await startProcess(t, { backend, env: { MAX_CONNECTIONS: '2100', LOG_LEVEL: 'debug' } });
    const sockets: net.Socket[] = [];
    let answered = 0;
    for (let i = 0; i < 1000; i++) {
      const { socket: idle } = open(t, gateway, HEALTH);
      const { socket: slow } = open(t, gateway, `${post(SECRET, 1_000_000)}{"message":"${'x'.repeat(1000)}`);
      idle.once('data', () => answered++);
      sockets.push(idle, slow);
      if (i % 50 === 49) await until(() => answered === i + 1);
    }
    assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
    assert.equal(backend.seen.length, 1);
    t.diagnostic(`${Math.round(memoryOf(gateway, 'VmHWM') / MIB)} MiB in all`);
    for (const socket of sockets) socket.destroy();
    await until(() => gateway.output().split('"status":499').length === 1001);
    assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
  },
);

section('SIMULATION'); // ──────────────────────────────────────────────────────────────────────────

test(`worlds of each kind break no invariant (SEED=${SEED})`, { isAlone: true }, async (t) => {
  const { hasSmallBuffers } = await import('./sim/buffers.ts');
  const { simulate } = await import('./sim/simulate.ts');
  if (!hasSmallBuffers) t.diagnostic('this runtime has no _writeGeneric: torn requests are not looked for');
  const { worlds, failures, warnings } = await simulate({ seed: Number(SEED), seconds: 8 });
  const inWords = ({ find, world }: (typeof failures)[number]): string => `${find.what} in ${JSON.stringify(world)}`;
  for (const warning of warnings) t.diagnostic(`warning: ${inWords(warning)}`);
  assert.deepEqual(failures.map(inWords), []);
  assert.ok(worlds >= 5, `only ${worlds} worlds`);
});

test('each planted fault of sim/planted/ fits the code', async () => {
  const { applyPatch, readFaults } = await import('./sim/faults.ts');
  const faults = readFaults();
  assert.ok(faults.length > 0, 'no fault is planted');
  for (const { name, patch } of faults) {
    assert.notEqual(applyPatch(SOURCE, patch), SOURCE, name);
    assert.throws(() => applyPatch('', patch), /does not occur exactly once/, name);
  }
});

section('HARNESS'); // ─────────────────────────────────────────────────────────────────────────────
/** What a process of this runtime prints about tests of the section FAILURES. It must not succeed. */
async function runFailures(only: string): Promise<string> {
  const node = [...LOADER, '--test', '--test-reporter=tap'];
  const args = isNode ? node : 'Deno' in globalThis ? ['test', '--allow-all', '--no-check'] : ['test'];
  const env = { HOME: process.env.HOME, NO_COLOR: '1', SECTION: 'FAILURES', ONLY: only };
  const program: Program = [process.execPath, ...args];
  const { code, stdout, stderr } = await runProcess(['./gateway.test.ts'], { env, program });
  const output = stdout + stderr;
  assert.ok(code > 0, `it exited with ${code}:\n${output}`);
  return output;
}

// The process ended 5 s after the last test, with 0, although the runner waited for the hook of one that had failed.
test('the harness: a test fails if it or its hook throws or waits in vain', async () => {
  const output = await runFailures('^failure: ');
  const failed = /^ *(?:not ok \d+ - |\(fail\) )?(failure: [\w ,]*\w)(?: \.\.\. FAILED| \[|$)/gm;
  const lines = read('gateway.test.ts').split('\n');
  const titles = lines.flatMap((line) => groupsOf(line, /^test\('(failure: .*?)'/g));
  assert.ok(titles.length > 5, titles.join());
  assert.deepEqual([...new Set(groupsOf(output, failed))].sort(), titles.sort(), output);
  const hook = /the hook that was added at gateway\.test\.ts:(\d+)/g;
  const told = output.replace(hook, 'HOOK').replace(/\s+/g, ' ');
  for (
    const words of [
      'planted in a test',
      'planted in a promise',
      'planted before a hook and then HOOK: nothing more came for 0.5 s behind step 0, the beginning',
      'HOOK: nothing more came for 0.5 s behind step 1, a hook to end, gateway.test.ts:',
      'HOOK: planted in a hook',
      'nothing more came for 0.5 s behind step 1, what never comes, gateway.test.ts:',
    ]
  ) assert.ok(told.includes(words), `${words}:\n${output}`);
  const added = groupsOf(output, hook).map((line) => lines[Number(line) - 1]);
  assert.deepEqual(added.filter((line) => !line?.includes('t.after(')), [], output);
});

test('the harness: a run fails if something is thrown after the end of its test', async () => {
  const output = await runFailures('^late: ');
  assert.match(output, /planted in a test that had ended/);
  if (isNode) assert.match(output, /late: throws when it has ended: Error: planted/);
});

test('the harness: a run that exits with 0 before all tests have ended fails, and names the test', async () => {
  const titles = ['exit: with 0', 'exit: a test beside it'];
  const words = `the process exited with 0 in "${titles[0]}" before these tests had ended: "${titles.join('", "')}"`;
  const output = await runFailures('^exit: ');
  assert.ok(output.includes(words), output);
});

section('FAILURES'); // ────────────────────────────────────────────────────────────────────────────

/** A promise that is never kept, while the process has something to do. */
const forever = (): Promise<never> => new Promise(() => setInterval(() => {}, 1000));

test('failure: throws', () => {
  throw new Error('planted in a test');
});

test('failure: rejects', async () => {
  await pass(1);
  throw new Error('planted in a promise');
});

test('failure: throws, and its hook hangs', (t) => {
  t.after(forever);
  throw new Error('planted before a hook');
});

test('failure: passes, but its hook hangs', async (t) => {
  t.after(() => within(forever(), 'a hook to end'));
  await pass(1);
});

test('failure: passes, but its hook throws', async (t) => {
  t.after(() => assert.fail('planted in a hook'));
  await pass(1);
});

test('failure: waits in vain', () => within(forever(), 'what never comes'));

test('late: throws when it has ended', () => {
  setTimeout(() => {
    throw new Error('planted in a test that had ended');
  }, 50);
});

test('late: a test beside it', () => pass(500));

test('exit: with 0', async () => {
  await pass(1);
  process.exit(0);
});

test('exit: a test beside it', forever);

section('THE FILES THEMSELVES'); // ────────────────────────────────────────────────────────────────

const { stdout: HELP } = await cli(['--help']);
/** The problems in gateway.ts, and their statuses. */
const [TABLE] = /const PROBLEMS = \{([^]*?)\n\}/.exec(SOURCE)!;
const PROBLEMS = Array.from(TABLE.matchAll(/^ {2}(\w+): \[(\d+)/gm), ([, code, status]) => [code!, status!] as const);

test("the pages' tables of settings and the doc comments of the configuration's fields match the code", () => {
  const rows = Array.from(HELP.matchAll(/^ {2}([a-z][\w.]*) +([A-Z_]+)(?: +\[(.+)\])?\n {6}(.*)$/gm));
  const isRow = /^(\| `[a-z][\w.]*`<br>`[A-Z_]+` \|.*)$/gm;
  const [listed, common] = [groupsOf(MANUAL, isRow), groupsOf(README, isRow)];
  const pathsOf = (table: string[]): string[] => table.map((row) => row.split('`')[1]!);
  const paths = rows.map(([, path]) => path!);
  assert.ok(paths.length >= 20, `the settings in --help: ${paths}`);
  assert.ok(common.length === 12, `README.md says that it has twelve settings: ${pathsOf(common)}`);
  assert.deepEqual(difference('--help', paths, 'the table of docs/settings.md', pathsOf(listed)), []);
  assert.deepEqual(pathsOf(listed), paths, 'the order in docs/settings.md is that of --help');
  const [manual] = /^interface GatewayConfig \{[^]*?^\}/m.exec(SOURCE)!;
  const fields = groupsOf(manual, /^ +(\w+)\?: (?!\{)/gm);
  const names = paths.map((path) => path.split('.').at(-1)!);
  assert.deepEqual(difference('GatewayConfig', fields, '--help', names), []);
  for (const [i, [, path, env, fallback, help]] of rows.entries()) {
    listed[i] = listed[i]!.replaceAll('\\*', '*');
    const row = `| \`${path}\`<br>\`${env}\` | ${help}`;
    // It may continue.
    assert.ok(listed[i]!.startsWith(row), `docs/settings.md  ${listed[i]}\n--help            ${row}`);
    assert.equal(/Default: `(.*)` \|$/.exec(listed[i]!)?.[1], fallback, `the default of ${path} in docs/settings.md`);
    const field = new RegExp(`/\\*\\*((?:(?!\\*/)[^])*)\\*/\\s+${path!.split('.').at(-1)}\\?:`).exec(manual);
    assert.equal(/@default (\S+)/.exec(field?.[1] ?? '')?.[1], fallback, `@default of ${path} in GatewayConfig`);
  }
  for (const line of common) {
    const [head] = /^\|.*?\|/.exec(line)!;
    const [end = ''] = /(?: Default: `.*`)? \|$/.exec(line)!;
    const isThere = listed.some((other) => other.startsWith(head) && other.endsWith(end));
    assert.ok(isThere, `docs/settings.md has no row with the name and the default of this one of README.md: ${line}`);
  }
});

test('docs/settings.md lists every error code with its status, and every setting of a token', () => {
  for (const [code, status] of PROBLEMS) {
    const isListed = code === 'client_left' || new RegExp(`^\\| ${status} .*\`${code}\``, 'm').test(MANUAL);
    assert.ok(isListed, `docs/settings.md has no row "${status} … \`${code}\`" in "What it refuses"`);
  }
  for (const name of [...TOKEN_SETTINGS, 'secret']) {
    assert.ok(MANUAL.includes(`\`${name}\``), `docs/settings.md does not name \`${name}\`, a setting of a token`);
  }
});

test('docs/settings.md lists the groups of allow with the same routes as gateway.ts', () => {
  const groups = [...new Set(KNOWN_ROUTES.map(({ group }) => group))];
  const routes = groups.map((group) => {
    const own = KNOWN_ROUTES.filter((route) => route.group === group);
    return [group, own.map(({ method, template }) => `${method} ${template}`)] as const;
  });
  const rows = Array.from(MANUAL.matchAll(/^\| `(\w+)` \| (.*) \|$/gm), ([, group, cell]) => [group!, cell!] as const)
    .filter(([group]) => routes.some(([known]) => known === group));
  assert.deepEqual(difference('ROUTES', groups, 'the table of docs/settings.md', rows.map(([group]) => group)), []);
  for (const [group, listed] of routes) {
    assert.ok(listed.length > 0, group);
    const [, cell] = rows.find(([known]) => known === group)!;
    const named = groupsOf(cell, /`((?:[A-Z]+ )?\/[^`]*)`/g);
    // A single route, or the first segments of all routes below them.
    const [, base] = /^(\/swagger|\/\w+\/[\w-]+)/.exec(named[0]!) ?? [];
    const prefixes = listed.map((route) =>
      /(\/swagger|\/metrics|\/\w+\/[\w-]+)/.exec(route)?.[1] ??
        assert.fail(`${route} has a new shape: say here what the page calls it`)
    );
    const wanted = [...new Set(base ? prefixes : listed)];
    const row = `the row "${group}" of docs/settings.md`;
    assert.deepEqual(difference(row, named, `the group "${group}" of ROUTES`, wanted), []);
  }
  assert.match(rows.find(([group]) => group === 'messaging')![1], /^`send`, `receive`, and all below /);
});

test('every problem was provoked by an earlier test', { skip: SECTION || ONLY || false, isLast: true }, () => {
  assert.ok(PROBLEMS.length > 20, `only ${PROBLEMS}`);
  const unprovoked = PROBLEMS.flatMap(([code]) => PROVOKED.has(code) ? [] : code);
  assert.deepEqual(unprovoked, [], 'no test provokes these rows of PROBLEMS');
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
    const env = { LISTEN: 'nonsense', APP_TOKEN: SECRET };
    const { code, stdout, stderr } = await runProcess([], { program: embedding, env });
    assert.deepEqual([code, stderr], [0, ''], stdout);
    assert.match(stdout, printed);
  }
});

test('the web page in docs/recipes.md sends, or shows why it could not', async (t) => {
  const json = blocks('json').find((block) => block.includes('"dashboard": {') && block.includes('"cors"'))!;
  const config: GatewayConfig = JSON.parse(json.replace(/(?<="secret": ").*?(?=")/, SECRET));
  const { backend, gateway } = await startBoth(t, config);
  const origin = config.cors![0]!;
  /** Sends a preflight first, as a browser does. */
  const browse = async (url: string, init: { method: string; headers: Record<string, string> }): Promise<Response> => {
    const [path, names] = [new URL(url).pathname, Object.keys(init.headers).join().toLowerCase().split(',').sort()];
    const asked = { 'access-control-request-method': init.method, 'access-control-request-headers': names.join() };
    const { headers } = await ask(gateway, { method: 'OPTIONS', path, headers: { origin, ...asked } });
    assert.equal(headers['access-control-allow-origin'], origin);
    assert.equal(headers['access-control-allow-headers'], names.join(', '));
    return fetch(gateway.url + path, { ...init, headers: { ...init.headers, origin } });
  };
  const shown: string[] = [];
  const unreached = (): Promise<never> => Promise.reject(new TypeError('Failed to fetch'));
  for (const [secret, fetching] of [[SECRET, browse], ['wrong', browse], [SECRET, unreached]] as const) {
    const page = blocks('js').find((block) => block.includes('alert('))!.replace('TOKEN', secret);
    const show = (text: string): unknown => shown.push(text);
    await new Function('fetch', 'alert', `return (async () => {${page}})();`)(fetching, show);
  }
  assert.equal(backend.sent.length, 1);
  assert.match(shown.join(), /^Sent\.,Not sent: A valid API token.*,The gateway was not reached: Failed to fetch$/);
});

test("the README's curl lines are the five forms that the gateway accepts", async (t) => {
  const lines = Array.from(README.matchAll(/^(curl .*?) +# (\w+)$/gm), ([, line, form]) => [line!, form!] as const);
  const table = Array.from(README.matchAll(/^\| (\w+) \| .* \| (on|off) \|$/gm), ([, form, state]) => [form, state]);
  const forms = lines.map(([, form]) => form);
  assert.deepEqual(forms, table.map(([form]) => form), "the forms of README.md's curl lines, and of its table");
  const [, send] = /^SEND=('.*')$/m.exec(README)!;
  for (const config of [ALL_FORMS, {}]) {
    const { backend, gateway } = await startBoth(t, config);
    for (const [i, [line, form]] of lines.entries()) {
      const mine = line.replace('TOKEN', SECRET).replace('"$SEND"', send!).replace('8880', String(gateway.port));
      const isTaken = config === ALL_FORMS || table[i]![1] === 'on';
      assert.equal((await askAsCurl(mine)).status, isTaken ? 201 : 401, form);
      if (isTaken) assert.equal(requests(gateway).at(-1)!.form, form);
    }
    assert.equal(backend.sent.length, config === ALL_FORMS ? 5 : 3);
  }
});

test('the tables of contents match the headings, and every link has a target', () => {
  const headingsOf = (page: string) => groupsOf(page.replace(/^```[^]*?^```$/gm, ''), /^#{2,3} (.*)$/gm);
  /** The anchors of a page: those that it sets, and those that GitHub generates from its headings. */
  const anchorsOf = (page: string): string[] => [
    ...headingsOf(page).map((heading) => heading.toLowerCase().replace(/[^\w\- ]/g, '').replaceAll(' ', '-')),
    ...groupsOf(page, /<a id="([\w-]+)">/g),
  ];
  for (const [name, page] of Object.entries(PAGES)) {
    for (const [link, file, anchor] of page.matchAll(/\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)/g)) {
      // The releases, relative to the page's own address at GitHub (/OWNER/REPOSITORY/blob/BRANCH/…).
      if (/^[./]+\/releases(?:\/latest)?$/.test(file!)) {
        assert.equal(file!.split('../').length, 2 + name.split('/').length, `${name} ${link}`);
        continue;
      }
      if (file && !file.endsWith('.md')) {
        assert.ok(existsSync(join(HERE, dirname(name), file)), `${name} ${link}`);
        continue;
      }
      const target = PAGES[file ? join(dirname(name), file) : name] ?? assert.fail(`${name} ${link}`);
      if (anchor) assert.ok(anchorsOf(target).includes(anchor), `${name} ${link}`);
    }
    const [, contents = ''] = /([^]*?)\n## /.exec(page)!;
    if (/^[-|] .*\]\(#/m.test(contents) && name !== 'README.md') {
      const [linked, headings] = [groupsOf(contents, /\[(.*?)\]\(#/g), headingsOf(page)];
      assert.deepEqual(difference(`the contents of ${name}`, linked, 'its headings', headings), []);
      assert.deepEqual(linked, headings, `the order in the contents of ${name}`);
    }
  }
  // An external link to a section that README.md used to have leads to it, or to the page that has it now.
  const once = `five-forms the-way-of-a-request contents run-it in-a-container-beside-the-backend under-systemd plain
    which-node tls-unix-sockets-ipv6 you-already-run-the-backend which-mode when-the-backend-goes-down clients settings
    fixed-limits least-privilege how-it-holds changing-it-while-it-runs browsers what-it-refuses the-log
    what-it-does-not-protect troubleshooting coming-from-secured-signal-api behind-a-reverse-proxy caddy nginx traefik
    embed-it runtimes develop speed use`;
  const anchors = anchorsOf(README);
  assert.deepEqual(once.split(/\s+/).filter((anchor) => !anchors.includes(anchor)), []);
  assert.equal(new Set(anchors).size, anchors.length);
});

test('the pages have at most three code lines wider than 160 characters, and a diagram that fits a phone', () => {
  const wide = blocks('\\w*').flatMap((block) => block.split('\n').filter((line) => line.length > 160));
  assert.ok(wide.length <= 3, wide.join('\n'));
  const [diagram = ''] = blocks('text', README);
  assert.ok(diagram.includes('gateway') && diagram.split('\n').every((line) => line.length <= 42), diagram);
});

test('no table of the pages is wider than a phone because of its long words of code', () => {
  // In pixels, as GitHub renders a page on a phone: its width, the space around a cell and a word, and a letter.
  const [page, cell, word, letter] = [343, 27, 11, 8.16] as const;
  const widthOf = (text: string): number =>
    Math.max(
      0,
      ...groupsOf(text.replace(/<\/?code>/g, '`'), /`([^`]+)`/g)
        .flatMap((code) => code.replaceAll('&amp;', '&').split(/<wbr>|[ ?…]|(?<=-)(?=[a-z])/))
        .map((part) => word + letter * part.length),
    );
  const tables = Object.keys(PAGES).flatMap((name) =>
    groupsOf(read(name).replace(/^ *```[^]*?^ *```$/gm, ''), /^(\|.*\n(?:\|.*\n)+)/gm).map((table) =>
      [name, table] as const
    )
  );
  assert.ok(tables.length > 30, `only ${tables.length} tables`);
  for (const [name, table] of tables) {
    const rows = table.trim().split('\n').map((row) => row.replace(/^\| ?| ?\|$/g, '').split(' | '));
    const widths = rows[0]!.map((_, i) => cell + Math.max(...rows.map((row) => widthOf(row[i] ?? ''))));
    const width = Math.round(widths.reduce((sum, each) => sum + each, 0));
    assert.ok(
      width <= page,
      `${name}: ${width} pixels, in columns of ${widths.map(Math.round)}\n${table.slice(0, 300)}`,
    );
  }
});

test('the pages name only existing variables, options, commands and scripts', () => {
  // Those of the backend, the tests, the shell, another gateway, and a reader of the backend's WebSocket.
  const others = ['MODE', 'SEED', 'ONLY', 'SECTION', 'SEND', 'API__TOKENS', 'API__URL', 'AUTO_RECEIVE'];
  others.push('SIGNAL_API_URL', 'SIGNAL_ACCOUNT', 'NODE_OPTIONS');
  const known = new Set([...SETTING_ROWS.map(([, env]) => env), 'API_TOKENS_FILE', 'GATEWAY_CONFIG', ...others]);
  const used = [...blocks('sh|yaml|ini'), ...groupsOf(ALL_PAGES, /`([^`\n]+)`/g)]
    .flatMap((text) => groupsOf(text, /(?:^|[\s`-])([A-Z][A-Z_]{2,})(?:=|: )/gm));
  for (const name of ['TRUSTED_PROXIES', 'GATEWAY_CONFIG', 'TLS_KEY']) assert.ok(used.includes(name), name);
  assert.deepEqual(used.filter((name) => !known.has(name)), []);

  const command = /(--prefer-offline )?(?:tsx@(\d+)|node|bun)(?: --max-\S+)? \/?(?:\S*\/)?gateway\.m?[tj]s([^|`#\n]*)/g;
  const commands = Array.from(ALL_PAGES.matchAll(command));
  assert.ok(commands.length > 10, `only ${commands.length} commands`);
  for (const [command, offline, major, args] of commands) {
    // Without it npx queries the registry at every start, and waits for it if the network is down.
    if (major) assert.ok(offline && PACKAGE.devDependencies.tsx.startsWith(`^${major}.`), command);
    for (const [flag] of args!.matchAll(/--\w+/g)) assert.ok(HELP.includes(flag), command);
    const [word] = /^ [a-z]+/.exec(args!) ?? [];
    if (word) assert.ok(HELP.includes(`gateway.ts${word} `), command);
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
    const headers = [wrong, {}, ...[inText, inJson].flatMap((origin) => [{ origin }, { origin, ...wrong }])];
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

test('docker run, the compose file and the unit start the gateway in the same way', () => {
  const [backend = '', service = ''] = blocks('yaml', README)[0]!.split('  gateway:');
  const [run] = /^docker run [^]*?node \S+ \/gateway\.ts$/m.exec(README)!;
  const [, environment] = /^Environment=(.*)$/m.exec(blocks('ini', PAGES['docs/operating.md'])[0]!)!;
  const variables = Array.from(service.matchAll(/^ {6}([A-Z_]+): "?([^"\n]*)"?$/gm), ([, ...pair]) => pair.join('='));
  assert.deepEqual(groupsOf(run, /-e ([A-Z_]+=\S+)/g), variables);
  assert.deepEqual(groupsOf(environment!, /([A-Z_]+)=/g), groupsOf(variables.join('\n'), /^([A-Z_]+)=/gm));
  const [, image, command] = /image: (.*)[^]*command: (\[.*\])/.exec(service)!;
  const mounts = ['gateway.ts:/gateway.ts:ro', 'gateway.json:/gateway.json:ro'];
  for (const part of [`${image} ${JSON.parse(command!).join(' ')}`, ...mounts]) assert.ok(run.includes(part), part);
  const options = { 'user: node': '--user node', 'init: true': '--init', 'read_only: true': '--read-only' };
  for (const [key, option] of Object.entries(options)) assert.ok(service.includes(key) && run.includes(option), key);
  assert.doesNotMatch(backend, /^ +ports:/m, 'the backend has no port');
});

test('every example that starts Node for good limits its young generation, as the benchmark measures it', () => {
  const [, option] = /^const YOUNG = '(.*)';$/m.exec(read('bench/run.ts'))!;
  const dockerfile = read('Dockerfile');
  const starts = groupsOf(
    ALL_PAGES + dockerfile,
    /^ *((?:command: |ENTRYPOINT )\["node".*\]|ExecStart=\/usr\/bin\/node.*)/gm,
  );
  starts.push(...groupsOf(README, /^docker run -d ([^]*?)```/gm));
  assert.equal(starts.length, 6, starts.join('\n')); // compose twice, a pod, a unit, docker run, the image
  for (const start of starts) assert.ok(start.includes(option!), start);
});

test('the pages explain what each setting limits, and what each reason of a 401 means', () => {
  const [, section] = /\n## Least privilege\n([^]*?)\nThree /.exec(MANUAL)!;
  const named = groupsOf(section!, /^\| (`.*?) \|/gm).join();
  const [, rows] = /A token in the file[^]*?\n\n([^]*?)\n\n/.exec(HELP)!;
  const noRestriction = ['secret', 'secretFile', 'defaults', 'message'];
  const restrictions = groupsOf(rows!, /^ {2}(\w+)/gm).filter((name) => !noRestriction.includes(name));
  for (const name of ['senders', 'expires']) assert.ok(restrictions.includes(name), name);
  const others =
    'methods allow rate clients auth.methods auth.anonymous cors trustedProxies limits.body limits.connections';
  for (const name of [...restrictions, ...others.split(' ')]) {
    assert.ok(named.includes(`\`${name}\``), `"Least privilege" of docs/settings.md has no row for \`${name}\``);
  }

  const troubles = PAGES['docs/troubleshooting.md']!;
  const [, common = ''] = /\n## Troubleshooting\n([^]*?)\n## /.exec(README)!;
  assert.equal(groupsOf(common, /^(\| [^w-].*)/gm).length, 5);
  for (const reason of groupsOf(common + troubles, /reason=([a-z]\w+)/g)) {
    assert.ok(SOURCE.includes(reason), `the pages explain reason=${reason}, which gateway.ts does not have`);
  }
  const reasons = 'no_credential unknown_token expired_token form_not_accepted wrong_user unknown_scheme';
  for (const reason of reasons.split(' ')) {
    assert.ok(SOURCE.includes(`'${reason}'`), `gateway.ts has no reason '${reason}'`);
    assert.ok(troubles.includes(`\n| \`${reason}\`: `), `docs/troubleshooting.md has no row for \`${reason}\``);
  }
  const sentences = groupsOf(troubles, /^\|[^|]*?[`"]([a-z][\w, :]{16,})[`"]/gm);
  assert.ok(sentences.length >= 12, sentences.join());
  for (const said of sentences) assert.ok(SOURCE.includes(said), `docs/troubleshooting.md, not gateway.ts: ${said}`);
});

test('gateway.ts is one file of erasable TypeScript that imports only node: modules and exports little', () => {
  for (const from of groupsOf(SOURCE, /^import .* from '([^']+)';$/gm)) assert.match(from, /^node:/);
  assert.doesNotMatch(SOURCE, /^\s*(?:export )?(?:enum|namespace|declare|import \w+ =)\b|\brequire\(/m);
  const exported = groupsOf(SOURCE, /^(export [^;]*;)/gm).map((text) => text.replace(/\s+/g, ' ').replace(', }', ' }'));
  assert.deepEqual(exported, [
    'export { BodyScan, ConfigError, createGateway, FORMS, loadSettings, Metrics, parseTarget, RateLimiter, ROUTES, run, Template };',
    'export type { Gateway, GatewayConfig, GatewayOptions, TokenConfig };',
  ]);
});

/** Lines that are neither blank nor comments. */
const codeLines = (text: string): string[] => text.split('\n').filter((line) => !/^\s*(?:\/\/|\/?\*|$)/.test(line));

/** The sections of gateway.ts by their banners, in order. */
const SECTIONS = SOURCE.split(/^\/\/ #region /m).slice(1).map((text) => {
  const [name = ''] = text.split('\n', 1);
  return { name, text, code: codeLines(text.slice(name.length)) };
});

test('functions named refusalOf… return a problem, those named mistakeIn… a text, and all others throw', () => {
  const functions = Array.from(
    SOURCE.matchAll(/^(?:async )?function\*? (\w+)\([^]*?^\}/gm),
    ([text, name]) => [name!, text],
  );
  const named = functions.filter(([name]) => /^(?:refusalOf|mistakeIn)/.test(name!));
  assert.ok(named.length > 8, `only ${named.length}`);
  assert.deepEqual(named.filter(([, text]) => /\bthrow\b/.test(text!)).map(([name]) => name), []);
  const returning = functions.filter(([, text]) =>
    /\breturn [^;]*?\b(?:new Problem|withDetail|bad[A-Z]\w+|tooLarge)\(/.test(text!)
  );
  assert.deepEqual(returning.map(([name]) => name!).filter((name) => !name.startsWith('refusalOf')), []);
});

/** Sections of tests whose subject is not a section of gateway.ts. */
const OTHER_SECTIONS = [
  'SILENCES',
  'CLIENTS',
  'RECIPES',
  'MEMORY',
  'SIMULATION',
  'HARNESS',
  'FAILURES',
  'THE FILES THEMSELVES',
];

test('the sections of the tests have the names of those of gateway.ts', () => {
  const own = new Set(groupsOf(read('gateway.test.ts'), /^section\('(.*?)'\)/gm));
  const known = SECTIONS.map(({ name }) => name);
  // Types, numbers and exports are tested together with the pages.
  const tested = known.filter((name) => !['PUBLIC TYPES', 'SETTINGS', 'FIXED LIMITS', 'EXPORTS'].includes(name));
  const extra = [...own].filter((name) => !tested.includes(name) && !OTHER_SECTIONS.includes(name));
  assert.deepEqual(extra, [], 'sections of gateway.test.ts that gateway.ts does not have');
  assert.deepEqual(tested.filter((name) => !own.has(name)), [], 'sections of gateway.ts without one of tests');
});

test('the sections of gateway.ts match its table of contents, and use only what is below them', () => {
  const contents = /^ \* Contents[^]*?\n \*\n/m.exec(SOURCE)![0].replace(/\n \*\s+/g, ' ').trim();
  const names = SECTIONS.map(({ name }) => name);
  const listed = groupsOf(contents, /([A-Z]{2}[A-Z ]*)(?= ·|\s*$)/g);
  assert.deepEqual(difference('the regions of gateway.ts', names, 'the contents at its head', listed), []);
  assert.deepEqual(listed, names, 'the order in the contents at the head of gateway.ts');
  // The sections above GATEWAY hold tables and types, and functions to read them. The command line is last because it
  // is the outermost layer, which may call everything.
  const inner = SECTIONS.slice(names.indexOf('GATEWAY'), names.indexOf('DEMO'));
  const upward = inner.flatMap(({ name, code }, i) => {
    const above = inner.slice(0, i).map((other) => other.text).join('');
    const uses = [
      ...groupsOf(above, /^(?:async )?function\*? (\w+)/gm).map((called) => `(?<![.#\\w'])${called}\\(`),
      ...groupsOf(above, /^class (\w+)/gm).map((made) => `\\b(?:new|instanceof|extends) ${made}\\b`),
    ];
    return uses.flatMap((use) => new RegExp(use).exec(code.join('\n'))?.slice(0, 1) ?? []).map((used) => [name, used]);
  });
  assert.deepEqual(upward, []);
});

const UNITS = ['_MS 86400000 d', '_MS 1000 s', '_MS 1 ms', `_BYTES ${MIB} MiB`, '_BYTES 1024 KiB', ' 1 '].map((unit) =>
  unit.split(' ')
);
test('the numbers of gateway.ts that are not settings are in one section, and in docs/settings.md', () => {
  const isNumber = /^const ([A-Z_]+)(?:: Rate)? = ((?:[\d_ *]+|\{ count: .*\}));$/gm;
  const found = SECTIONS.flatMap(({ name, text }) =>
    Array.from(text.matchAll(isNumber), ([, limit, value]) => ({ name, limit: limit!, value: value! }))
  );
  assert.ok(found.length > 20, `only ${found.length} numbers`);
  assert.deepEqual(found.filter(({ name, limit }) => name !== 'FIXED LIMITS' && !limit.startsWith('0x')), []);
  const inWords = (value: string, limit: string): string => {
    const [, count, perMs] = /count: (\d+), perMs: ([\d_]+)/.exec(value) ?? [];
    if (count) return `${count} in ${inWords(perMs!, '_MS')}`;
    const number = value.replaceAll('_', '').split('*').reduce((product, factor) => product * Number(factor), 1);
    const [, size, unit] = UNITS.find(([end, size]) => limit.endsWith(end!) && number % Number(size) === 0)!;
    return unit ? `${number / Number(size)} ${unit}` : number.toLocaleString('en');
  };
  const rows = Array.from(MANUAL.matchAll(/^\| .+? \| (.+?)<br>`([A-Z_]+)` \|$/gm), ([, ...row]) => row);
  const [listed, wanted] = [rows, found.map(({ limit, value }) => [inWords(value, limit), limit])]
    .map((pairs) => pairs.map(([value, limit]) => `${limit} = ${value}`));
  assert.deepEqual(
    difference('FIXED LIMITS of gateway.ts', wanted!, '"Fixed limits" of docs/settings.md', listed!),
    [],
  );
  assert.equal(listed!.length, wanted!.length, 'each number has one row; those that a client can meet come first');
});

test('the top level holds only the expected files', () => {
  const expected = `CHANGELOG.md CONTRIBUTING.md Dockerfile LICENSE README.md SECURITY.md docs gateway.alone.test.ts
    bench gateway.test.ts gateway.ts package-lock.json package.json scripts sim test
    tsconfig.json`.split(/\s+/);
  // Following the pages creates the ignored files, so the tests must also pass with them.
  const made = read('.gitignore').split('\n').map((name) => name.replace('/', ''));
  const others = readdirSync(HERE).filter((name) => !/^\.|\.tgz$/.test(name) && ![...expected, ...made].includes(name));
  assert.deepEqual(others, []);
  const { files } = PACKAGE;
  // npm adds README.md, LICENSE and package.json automatically.
  const published = ['README.md', ...files.flatMap((file: string) => file === 'docs' ? Object.keys(PAGES) : [file])];
  assert.deepEqual(Object.keys(PAGES).filter((page) => !published.includes(page)), []);
});

// It is a test so that `npm test` does both at once. Other scripts, and commands without npm, leave it out.
if (process.env.npm_lifecycle_event === 'test') {
  test('types, format and lint rules: npm run check', { isAlone: true }, async (t) => {
    const isRunning = setInterval(() => step('npm run check'), 1000); // however long npx takes to fetch Deno
    t.after(() => clearInterval(isRunning));
    const { code, stdout, stderr } = await runProcess(['run', 'check'], { env: process.env, program: ['npm'] });
    assert.equal(code, 0, `${stdout}${stderr}`);
  });
}

// `npm run check` runs deno fmt, which wraps code, but neither comments nor strings.
test('comments are no wider than the code', () => {
  const lines = ['gateway.alone.test.ts', 'gateway.test.ts', 'gateway.ts']
    .flatMap((name) => read(name).split('\n'));
  assert.deepEqual(lines.filter((line) => line.length > 120 && /^\s*(?:\/\/|\/?\*)|[;{] \/\/ /.test(line)), []);
});

test('each workaround for a runtime has a comment, in one form, about when it can go', (t) => {
  const comments = Array.from(SOURCE.matchAll(/(?:^ *\/\/ .*\n)+|\/\*\*(?:(?!\*\/)[^])*\*\//gm), ([text]) => text);
  const told = comments.filter((text) => /\b(?:Node|Deno|Bun) \d/.test(text) && !text.includes('@module'));
  const good = told.filter((text) => /^ *\/\/ UNTIL [^]+:\s/m.test(text));
  t.diagnostic(good.map((text) => text.trim().split('\n')[0]).join('\n'));
  assert.deepEqual(told.filter((text) => !good.includes(text)), []);
  // Code that checks which runtime it is follows such a comment.
  const asks = Array.from(SOURCE.matchAll(/^(.*\n){4}.*'(?:Bun|Deno)' in globalThis/gm), ([text]) => text);
  assert.deepEqual(asks.filter((text) => !text.includes('// UNTIL ')), []);
  // The tests that such a comment names exist.
  const titles = groupsOf(read('gateway.test.ts'), /^(?:test|table)\(\s*(?:'|"|`)(.*)/gm);
  const named = comments.flatMap((text) =>
    groupsOf(text.replace(/\n *(?:\/\/|\*) /g, ' '), /\((tests? "[^)]*)\)/g).flatMap((list) =>
      groupsOf(list, /"([^"]+?)…?"/g)
    )
  );
  assert.ok(named.length > 10, named.join());
  assert.deepEqual(named.filter((name) => !titles.some((title) => title.includes(name))), []);
});

test('no field of an exchange is written in more than two sections; keep-alive, connecting and the timers of a request have one place each', () => {
  const writers = new Map<string, Set<string>>();
  for (const { name, code } of SECTIONS) {
    const all = code.join('\n');
    const own = name === 'PIPELINE' ? /^class Exchange \{\n[^]*?^\}/m.exec(all)![0] : '';
    const writes = [
      ...all.matchAll(/\b(?:exchange|other|next|this\.#exchange)\.(\w+)(?:!?\.\w+)* (?:[-+?|]|\?\?)?= /g),
      ...own.matchAll(/\bthis\.(\w+) = /g),
    ];
    for (const [, field] of writes) writers.set(field!, (writers.get(field!) ?? new Set()).add(name));
  }
  assert.ok(writers.size > 10, [...writers.keys()].join());
  assert.deepEqual([...writers].filter(([, names]) => names.size > 2), []);
  // What decides whether a request is sent twice, or a connection kept, is in one place.
  const places: [pattern: RegExp, count: number][] = [
    [/\.shouldKeepAlive = /g, 1],
    [/\.closing \?\?= /g, 1],
    [/'backend_unreachable',/g, 1],
    [/await connect\(exchange/g, 1],
    [/setTimeout\(onTimeout/g, 2], // that of connect, and that of all other waits
  ];
  for (const [pattern, count] of places) {
    assert.equal(SOURCE.match(pattern)?.length, count, `how often gateway.ts has ${pattern}`);
  }
});

test('npm pack makes a package that runs under its own name once installed', {
  skip: !isNode && 'npm is for Node',
  isLast: true,
}, async (t) => {
  const dir = folder(t);
  const [source, home] = [join(dir, 'source'), join(dir, 'home')];
  // Packed from a copy, because packing compiles first, and the dist/ here may be the file under test.
  const filter = (path: string): boolean => !/[\\/](?:\.git|node_modules|dist|signal-data)$/.test(path);
  await cp(HERE, source, { recursive: true, filter });
  await symlink(join(HERE, 'node_modules'), join(source, 'node_modules'));
  await mkdir(home);
  const silent = { npm_config_offline: 'true', npm_config_audit: 'false', npm_config_update_notifier: 'false' };
  const env = { PATH: `${dirname(process.execPath)}:${process.env.PATH}`, HOME: dir, ...silent };
  const npm = (cwd: string, ...args: string[]) => promisify(execFile)('npm', args, { cwd, env });
  await npm(source, 'pack', '--pack-destination', dir);
  await npm(home, 'install', join(dir, `${PACKAGE.name}-${PACKAGE.version}.tgz`));
  assert.deepEqual(readdirSync(join(home, 'node_modules')).sort(), ['.bin', '.package-lock.json', PACKAGE.name]);
  const installed: Program = [join(home, 'node_modules/.bin', PACKAGE.name)];
  assert.equal((await runProcess(['--version'], { env, program: installed })).stdout, `${PACKAGE.version}\n`);
  const { first, close } = await startDemo(t, { env, program: installed });
  assert.equal((await askAsCurl(first)).status, 201);
  await close();
  const code = `import('${PACKAGE.name}').then((m) => m.createGateway({}))`;
  await promisify(execFile)(process.execPath, ['-e', code], { cwd: home });
  // This test is the last, so its diagnostic is among the closing lines of .ci/run.
  const { RUNTIMES_PASSED } = process.env;
  if (RUNTIMES_PASSED) t.diagnostic(`the suite has passed before on: ${RUNTIMES_PASSED}`);
});

assert.ok(together.length + alone.length + last.length > 0, 'SECTION or ONLY leaves out every test');
/** Whether gateway.alone.test.ts has imported this file, and which tests this import has registered. */
export const isPart = 'isAlonePart' in globalThis;
const isWhole = !SECTION && !ONLY;
if (isWhole && !isPart) program(); // compiling blocks the process, and would delay other tests
const parts = isPart ? { together: [], last: [] } : { together, last };
const own = { ...parts, alone: isPart === isWhole ? alone : [] };
for (const chosen of Object.values(own).flat()) if (!chosen.options.skip) unended.add(chosen);
registerTogether(own.together);
own.alone.forEach(register);
own.last.forEach(register);
registerTest('all tests have run to the end, and nothing was thrown outside them', () => {
  // Every verdict is known now, so what a test left open cannot change one. Not --test-force-exit: on Node 20 it can
  // cut off what the runner still has to read of this process, and the runner then loops forever.
  if (isNode) beginTimer(() => process.exit(), 5000).unref();
  assert.deepEqual({ unended: Array.from(unended, ({ title }) => title), strays }, { unended: [], strays: [] });
});

// UNTIL Node exits reliably: Node 20.20 sometimes loops forever in its own clean-up of handles, after everything has
// ended. Registered last, so that the runner's own listener has set the exit code.
if (isNode) process.on('exit', (code) => process.exit(process.exitCode ?? code));
