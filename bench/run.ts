/**
 * What the gateway costs, compared with minimal servers: `npm run bench`, or shorter, `npm run bench -- --quick`.
 *
 *   gateway          with `backend.parallel` 0, because the other servers limit nothing
 *   parallel N       the gateway with another `backend.parallel`; 4 is the default
 *   small young      the gateway with `--max-semi-space-size=N`, as the pages recommend
 *   node:http relay  a bare node:http server that relays with node:http's client and a keep-alive agent; on Deno
 *                    without reused connections, like the gateway there
 *   bare 401         a bare node:http server that answers 401 and reads nothing
 *
 * `npm run bench` measures the compiled file on the Node that runs it. `npm run bench:deno` measures gateway.ts, and so
 * does `node bench/run.ts` (22.18 and newer). GATEWAY_FILE names another file. `--beside DIR` measures the gateway of another
 * checkout in the same rounds; `--beside FILE`, a compiled one. `--only PATTERN` measures only the rows that match a
 * regular expression; `start`, `counted`, `slots`, `2 tokens`, `50 tokens`, `alerts`, `hostile JSON` and `idle` are also rows.
 *
 * Only ratios are meaningful. Ratios of processor time are more reliable than ratios of throughput, because the load,
 * the backend and other work on the machine need the same cores. Processor time is user and system time of the server's
 * own process, as measured by `process.cpuUsage`. On Linux this is the kernel's count in nanoseconds, truncated to
 * microseconds; a sum over /proc/self/task agreed with it to 0.1 %, but lacks threads that have ended.
 *
 * One load process drives all servers of a row. Each server first gets a number of uncounted requests, because a
 * warm-up by time would leave its code cold on a loaded machine. Then the servers take turns with slices of 300
 * requests, over connections that stay open. The medians of the slices are printed, with the minimum and the maximum. A
 * ratio is the median of the slices' ratios, because anything that slows one slice also slows its neighbours. The load
 * average of the machine is printed before and after.
 *
 * A ratio compares a server with the gateway in the first line of the row: 0.55 means that the server takes 0.55 of the
 * gateway's processor time (or milliseconds, or memory), or that the gateway has 0.55 of the server's throughput. Below
 * 1 the gateway is the worse one. Some ratios have a goal for this runtime next to them. That of the queue is in µs.
 *
 * Apart from that the gateway has its defaults. It logs a line per request into a pipe, which is read and discarded, as
 * journald or Docker would read it; the other servers log nothing. Wrong credentials from one address are soon 429, and
 * then no longer logged.
 *
 * The rows "N tokens" show what the queue for a slot adds to the cost of a send, at `backend.parallel` 4: sends of
 * which 1 waits are compared with sends of which 1,000 wait, in slices of 5,000. A send among 1,000 connections costs
 * more even without a queue, by more than the queue adds and less evenly. So V8's profiler measures "the queue alone":
 * the time in the class `Slots` and in what it calls outside the gateway's file. Only Node has this profiler.
 *
 * The row "start" has the processor time until a gateway that runs as users start it listens, and until a second later,
 * when it has asked the backend. The row "counted" has what a send allocates on V8's heap, as its sampling profiler
 * sees it, and the promises that it makes, as async_hooks sees them; only on Node.
 *
 * The rows "idle" are of gateways that run as users start them, with variables alone or with a file, and of a bare
 * node:http server, side by side for half a minute in which nobody talks to them: how often their threads wake up
 * (voluntary context switches), the processor time, and the memory after it. Only on Linux.
 *
 * The row "alerts" is a body of Alertmanager, 945 KiB, whose texts have a `\n`: the gateway builds a message from it. It
 * is compared with the same body without an escape. The row "hostile JSON" is the median of the small sends of a token,
 * while another one posts 16 bodies of 1 MiB at a time, whose nested keys have escapes.
 *
 * Each server is a process (server.ts), and so is the load (load.ts), which has raw sockets. An unexpected response ends
 * the run, so that no server is fast because it fails. Everything listens on loopback, on ports that the system chooses.
 * Children exit when their standard input ends. Results are in RESULTS.md.
 */

import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { arch, availableParallelism, cpus, loadavg, platform, tmpdir } from 'node:os';
import { extname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as delay } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import {
  BLOCK_BYTES,
  CONFINED,
  HOOK,
  type Job,
  MESSAGE,
  otherSecret,
  PARALLELS,
  quantile,
  QUEUE_GOALS,
  RUNTIME,
  SECRET,
  SLOW_MS,
  type Told,
} from './common.ts';

// ── WHAT IS MEASURED ─────────────────────────────────────────────────────────────────────────────

const { values: options } = parseArgs({
  options: { quick: { type: 'boolean' }, beside: { type: 'string' }, only: { type: 'string' } },
});
const SCALE = options.quick
  ? { rounds: 5, slices: 25, uploads: 11, forMs: 300, sends: 12_000 }
  : { rounds: 9, slices: 75, uploads: 25, forMs: 1000, sends: 100_000 };
/** Enough for V8 to finish compiling in several steps. */
const WARM_UP = { requests: 3000, uploads: 5 };
const SLICE_REQUESTS = 300;
/** This file is compiled together with the gateway, or runs beside its source. */
const EXTENSION = extname(fileURLToPath(import.meta.url));
const GATEWAYS: Record<string, string> = {
  gateway: process.env.GATEWAY_FILE ?? fileURLToPath(new URL(`../gateway${EXTENSION}`, import.meta.url)),
  ...(options.beside && { beside: compiled(options.beside) }),
};
const RELAYS = [...Object.keys(GATEWAYS), 'node:http relay'];
const SENDERS = [...Object.keys(GATEWAYS), 'parallel 4', 'node:http relay'];
const REFUSERS = [...Object.keys(GATEWAYS), 'bare 401'];
/** The option that docs/install.md recommends, by the variable that passes it to this runtime. */
const YOUNG = '--max-semi-space-size=4';
const YOUNG_ENV: NodeJS.ProcessEnv = { NODE_OPTIONS: YOUNG, DENO_V8_FLAGS: YOUNG };
const IS_OLD_NODE = RUNTIME === 'Node' && parseInt(process.versions.node) < 24;
/** What the ratios of a row should be, by server. */
type Goals = Record<string, string | undefined>;
const SEND_GOALS: Goals = {
  'node:http relay': { Node: IS_OLD_NODE ? '≥ 0.5' : '≥ 0.55', Deno: '≥ 0.45' }[RUNTIME],
  'parallel 4': RUNTIME === 'Node' ? '≤ 1.2' : undefined,
};
const REFUSAL_GOALS: Goals = { 'bare 401': RUNTIME === 'Node' ? '≥ 0.5' : undefined };
const UPLOAD_GOALS: Goals = {
  'node:http relay': RUNTIME !== 'Node' ? undefined : IS_OLD_NODE ? '≥ 0.5' : '≥ 0.55',
};

/** The gateway of a checkout, compiled as this one was; a file as it is. */
function compiled(path: string): string {
  if (!statSync(path).isDirectory()) return path;
  const source = join(path, 'gateway.ts');
  if (EXTENSION === '.ts') return source;
  const to = fileURLToPath(new URL('../beside', import.meta.url));
  const flags = '--ignoreConfig --target es2023 --module nodenext --types node --skipLibCheck --outDir'.split(' ');
  execFileSync('tsc', [source, ...flags, to], { stdio: 'inherit' });
  return join(to, 'gateway.js');
}

// ── CHILDREN ─────────────────────────────────────────────────────────────────────────────────────

interface Child {
  port: number;
  ask(message?: object): Promise<Told>;
  stop(): void;
}

/** Starts a process; resolves when it is ready. If it exits unexpectedly, the run ends. */
async function start(role: string, ...args: string[]): Promise<Child> {
  const env = { ...process.env, ...(role === 'small young' && YOUNG_ENV) };
  const program = new URL(`${role === 'load' ? 'load' : 'server'}${EXTENSION}`, import.meta.url);
  const child = spawn(process.execPath, [...process.execArgv, fileURLToPath(program), role, ...args], { env });
  let answer: (told: Told) => void;
  const answered = (): Promise<Told> => new Promise((resolve) => (answer = resolve));
  child.stdout.resume();
  createInterface(child.stderr).on('line', (line) => {
    if (line.startsWith('{')) answer(JSON.parse(line));
    else console.error(`${role}: ${line}`);
  });
  child.on('close', (code) => code === 0 || process.exit(1));
  const { port } = await answered();
  return {
    port,
    ask: (message = {}) => {
      const told = answered();
      child.stdin.write(`${JSON.stringify(message)}\n`);
      return told;
    },
    stop: () => child.stdin.end(),
  };
}

// ── ROWS ─────────────────────────────────────────────────────────────────────────────────────────

function post(authorization: string, { auth, megabytes = 0 }: { auth?: string; megabytes?: number } = {}): string {
  const attachment = megabytes ? { base64_attachments: ['data:application/octet-stream;filename=a.bin;base64,#'] } : {};
  const body = JSON.stringify({ auth, ...MESSAGE, ...attachment });
  const bytes = body.length + (megabytes ? megabytes * BLOCK_BYTES - 1 : 0);
  return `POST /v2/send HTTP/1.1\r\nHost: gateway:8880\r\nUser-Agent: bench\r\nAccept: */*\r\n${authorization}` +
    `Content-Type: application/json\r\nContent-Length: ${bytes}\r\n\r\n${body}`;
}

function bearer(secret: string): string {
  return `Authorization: Bearer ${secret}\r\n`;
}

/** JSON of which the gateway builds a message. */
function postJson(body: string): string {
  return `POST /v2/send HTTP/1.1\r\nHost: gateway:8880\r\n${bearer(HOOK)}Content-Type: application/json\r\n` +
    `Content-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`;
}

/** A body as Alertmanager posts it. @param gap two bytes of JSON between the sentences of a text. */
function alerts(gap: string): string {
  const one = (i: number): string =>
    `{"status":"firing","labels":{"alertname":"DiskFull","instance":"host-${i}.example:9100","severity":"critical"},` +
    `"annotations":{"summary":"The disk is nearly full.${gap}Call the one on duty.","description":"Host ${i}:${gap}97 %"},` +
    `"startsAt":"2026-11-28T10:00:00.000Z","endsAt":"0001-01-01T00:00:00Z","generatorURL":"http://a.example/graph?g0",` +
    `"fingerprint":"${(i + 2 ** 40).toString(16)}"}`;
  let list = one(1000);
  for (let i = 1001; list.length < 945 * 1024; i++) list += `,${one(i)}`;
  return `{"receiver":"phone","status":"firing","alerts":[${list}],"commonLabels":{},"version":"4"}`;
}

const NESTED = `,${'{"\\u0061":'.repeat(40)}0${'}'.repeat(40)}`;
const HOSTILE = `{"status":"x","alerts":[0${NESTED.repeat(2 ** 20 / NESTED.length - 1)}]}`;

const BASIC = `Authorization: Basic ${Buffer.from(`api:${SECRET}`).toString('base64')}\r\n`;
const SEND = post(bearer(SECRET));

interface Row extends Partial<Job> {
  name: string;
  servers?: string[];
  goals?: Goals;
}

const ROWS: Row[] = [
  { name: 'send, 1 connection', servers: SENDERS, connections: 1 },
  { name: 'send, 32 connections', servers: SENDERS, goals: SEND_GOALS },
  { name: 'send, 256 connections', servers: SENDERS, connections: 256 },
  { name: 'send, basic', request: post(BASIC) },
  { name: 'send, body', request: post('', { auth: SECRET }) },
  { name: 'send, confined token', request: post(bearer(CONFINED)) },
  { name: 'refusal, no credential', servers: REFUSERS, goals: REFUSAL_GOALS, request: post(''), expect: [401] },
  {
    name: 'refusal, wrong credential',
    servers: REFUSERS,
    goals: REFUSAL_GOALS,
    request: post(bearer('not-the-secret-of-the-benchmark')),
    expect: [401, 429],
  },
  ...[1, 5, 100].map((megabytes) => ({
    name: `body of ${megabytes} MB`,
    request: post(bearer(SECRET), { megabytes }),
    megabytes,
    connections: 1,
    ...(megabytes === 100 && { goals: UPLOAD_GOALS }),
  })),
];

// ── REPORT ───────────────────────────────────────────────────────────────────────────────────────

/** The results of the slices by server, with one or two values per slice. */
type Found = Record<string, number[][]>;

function format(value: number): string {
  return value.toLocaleString('en', { maximumSignificantDigits: 3 });
}

function printRow(cells: string[]): void {
  const widths = [27, 15, 29, 5, 6, 30, 5];
  console.log(`| ${widths.map((width, i) => (cells[i] ?? '').padEnd(width)).join(' | ')} |`);
}

/** Prints a line for each server, with the medians of its slices. */
function report(row: string, units: string[], found: Found, goals: Goals = {}): void {
  const [first] = Object.values(found);
  for (const [server, slices] of Object.entries(found)) {
    const cells = units.flatMap((unit, i) => {
      const [own, values] = [first!, slices].map((each) => each.map((slice) => slice[i]!)) as [number[], number[]];
      const compare = (ours: number, theirs: number): number => unit.endsWith('/s') ? ours / theirs : theirs / ours;
      const ratio = quantile(own.map((ours, slice) => compare(ours, values[slice]!)), 0.5);
      const spread = values.length > 1 ? ` (${format(Math.min(...values))}–${format(Math.max(...values))})` : '';
      const isFirst = slices === first;
      return [
        `${format(quantile(values, 0.5))} ${unit}${spread}`,
        isFirst ? '' : ratio.toFixed(2),
        ...(i === 0 ? [isFirst ? '' : goals[server] ?? ''] : []),
      ];
    });
    printRow([row, server, ...cells]);
  }
}

// ── MEASUREMENTS ─────────────────────────────────────────────────────────────────────────────────

/** Servers take turns, and their order is reversed each time. */
async function inTurns(
  servers: string[],
  turns: number,
  measure: (server: string) => Promise<number[]>,
): Promise<Found> {
  const found: Found = Object.fromEntries(servers.map((server) => [server, []]));
  for (let turn = 0; turn < turns; turn++) {
    for (const server of turn % 2 ? servers : servers.toReversed()) found[server]!.push(await measure(server));
  }
  return found;
}

type Drive = (child: Child, job: Partial<Job>) => Promise<Told>;
type StartServer = (server: string, backend?: Child) => Promise<Child>;

async function measureAll(): Promise<void> {
  const loader = await start('load');
  const backend = await start('backend');
  const startServer: StartServer = (server, { port } = backend) =>
    start(server, String(port), GATEWAYS[server] ?? GATEWAYS.gateway!);
  const drive: Drive = ({ port }, job) =>
    loader.ask({
      row: '',
      port,
      request: SEND,
      connections: 32,
      megabytes: 0,
      tokens: 1,
      expect: [201],
      count: 1e9,
      forMs: 1e9,
      ...job,
    });

  if (isWanted('start') && platform() === 'linux') await measureStart(backend);
  if (isWanted('counted') && RUNTIME === 'Node') await measureCounts(startServer, drive);
  if (isWanted('memory after sends')) await measureMemory(startServer, drive);
  const children: Record<string, Child> = {};
  for (const server of new Set([...SENDERS, ...REFUSERS])) children[server] = await startServer(server);
  for (const row of ROWS) if (isWanted(row.name)) await measureRow(row, children, drive);
  await measureQueue(startServer, drive);
  if (isWanted('alerts')) await measureAlerts(startServer, drive);
  if (isWanted('hostile JSON')) await measureHostile(startServer, drive);
  if (isWanted('slots')) await measureSlots(startServer, drive);
  if (isWanted('idle') && platform() === 'linux') await measureIdle(backend);
}

/** Whether `--only` selects a row. */
function isWanted(row: string): boolean {
  return new RegExp(options.only ?? '').test(row);
}

async function memoryMiB({ ask }: Child): Promise<number> {
  return (await ask()).bytes / 2 ** 20;
}

/** Runs a server as its users start it; resolves when it listens. */
async function run(server: string, backend: Child, env: NodeJS.ProcessEnv, args: string[] = []): Promise<ChildProcess> {
  const relay = fileURLToPath(new URL(`server${EXTENSION}`, import.meta.url));
  const program = GATEWAYS[server]
    ? [GATEWAYS[server], '--listen', '127.0.0.1:0', '--backend', `http://127.0.0.1:${backend.port}`, ...args]
    : [relay, server, String(backend.port)];
  const child = spawn(process.execPath, [...process.execArgv, ...program], { env: { ...process.env, ...env } });
  // The first line of a gateway is on its standard output, that of another server on standard error.
  await Promise.race([once(child.stdout!.resume(), 'data'), once(child.stderr!.resume(), 'data')]);
  return child;
}

async function measureStart(backend: Child): Promise<void> {
  const found = await inTurns(RELAYS, SCALE.rounds + 1, async (server) => {
    const child = await run(server, backend, { GATEWAY_TOKENS: SECRET });
    const [, listeningMs] = activityOf(child);
    await delay(1000);
    const [, nextMs] = activityOf(child);
    child.kill();
    return [listeningMs, nextMs];
  });
  for (const server of RELAYS) found[server]!.shift(); // the files were not in memory yet
  report('start', ['ms', 'ms a second later'], found);
}

/** What a send allocates, and how many promises it makes. */
async function measureCounts(startServer: StartServer, drive: Drive): Promise<void> {
  const count = 3000;
  const found: Found = {};
  for (const server of RELAYS) {
    const child = await startServer(server);
    await drive(child, { row: `counted, ${server}`, count: WARM_UP.requests });
    const values: number[] = [];
    for (const counts of ['heap', 'promises']) {
      await child.ask({ counts });
      await drive(child, { row: `counted, ${server}`, count });
      const { heapBytes, promises } = await child.ask();
      values.push(counts === 'heap' ? heapBytes / 1024 / count : promises / count);
    }
    found[server] = [values];
    child.stop();
  }
  report('a send, counted', ['KiB of heap', 'promises'], found);
}

/** Uploads after sends, each time in a fresh process, because V8's young generation grows and does not shrink. */
async function measureMemory(startServer: StartServer, drive: Drive): Promise<void> {
  const [own = '', ...others] = RELAYS;
  const servers = [own, 'small young', ...others];
  const megabytes = 100;
  const found = await inTurns(servers, 3, async (server) => {
    const child = await startServer(server);
    await drive(child, { row: `${server}, sends`, count: SCALE.sends });
    const afterSends = await memoryMiB(child);
    const job = { row: `${server}, uploads`, request: post(bearer(SECRET), { megabytes }), megabytes, connections: 1 };
    const { cpuUs, perSecond } = await measureSlice(child, drive, { ...job, count: SCALE.uploads });
    const { highBytes } = await child.ask();
    child.stop();
    return [afterSends, highBytes / 2 ** 20, cpuUs / 1000, perSecond * megabytes];
  });
  const part = (from: number): Found =>
    Object.fromEntries(servers.map((server) => [server, found[server]!.map((slice) => slice.slice(from, from + 2))]));
  report('memory after sends', ['MiB', 'MiB high water'], part(0));
  report('100 MB after sends', ['ms', 'MB/s'], part(2));
}

async function measureRow(row: Row, children: Record<string, Child>, drive: Drive): Promise<void> {
  const { name, servers = RELAYS, megabytes = 0, goals, ...rest } = row;
  const job = { row: name, megabytes, ...rest };
  const requests = megabytes ? Math.ceil(100 / megabytes) : SLICE_REQUESTS;
  const warmUp = megabytes ? WARM_UP.uploads * requests : WARM_UP.requests;
  for (const server of servers) await drive(children[server]!, { ...job, count: warmUp });
  const found = await inTurns(servers, megabytes ? SCALE.uploads : SCALE.slices, async (server) => {
    const { cpuUs, perSecond } = await measureSlice(children[server]!, drive, { ...job, count: requests });
    return megabytes ? [cpuUs / 1000, perSecond * megabytes] : [cpuUs, perSecond];
  });
  report(name, megabytes ? ['ms', 'MB/s'] : ['µs', '/s'], found, goals);
}

/** Processor time for one request, and throughput. */
async function measureSlice(child: Child, drive: Drive, job: Partial<Job>) {
  const before = await child.ask();
  const { count, tookMs } = await drive(child, job);
  return { cpuUs: ((await child.ask()).cpuUs - before.cpuUs) / count, perSecond: count * 1000 / tookMs };
}

/** Sends of which 1 waits for a slot, sends of which 1,000 wait, and the share of the queue. */
async function measureQueue(startServer: StartServer, drive: Drive): Promise<void> {
  for (const [tokens, goal] of Object.entries(QUEUE_GOALS)) {
    const row = `${tokens} tokens`;
    if (!isWanted(row)) continue;
    const names = ['1 waits', '1000 wait'];
    const children: Record<string, Child> = {};
    for (const name of names) children[name] = await startServer(row);
    const job = { row, request: post(bearer(otherSecret('%'))), tokens: Number(tokens), count: 5000 };
    const jobOf = (name: string): Partial<Job> => ({ ...job, connections: name === '1 waits' ? 5 : 1004 });
    const measure = async (name: string): Promise<number[]> => [
      (await measureSlice(children[name]!, drive, jobOf(name))).cpuUs,
    ];
    await inTurns(names, 1, measure);
    report(row, ['µs'], await inTurns(names, SCALE.rounds, measure));
    if (RUNTIME === 'Node') {
      const found = await inTurns(names, SCALE.rounds, async (name) => {
        await children[name]!.ask({ profiles: true });
        const { count } = await drive(children[name]!, jobOf(name));
        return [(await children[name]!.ask()).slotsUs / count];
      });
      report(`${row}, the queue alone`, ['µs'], found, { '1000 wait': goal });
    }
    for (const child of Object.values(children)) child.stop();
  }
}

async function measureAlerts(startServer: StartServer, drive: Drive): Promise<void> {
  const [own = '', ...others] = Object.keys(GATEWAYS);
  const names = [own, 'no escape', ...others];
  const [escaped, plain] = ['\\n', '. '].map((gap) => postJson(alerts(gap)));
  const children: Record<string, Child> = { [own]: await startServer(own) };
  children['no escape'] = children[own]!;
  for (const name of others) children[name] = await startServer(name);
  const measure = async (name: string): Promise<number[]> => {
    const job = { row: 'alerts', request: name === 'no escape' ? plain! : escaped!, connections: 1, count: 10 };
    const { cpuUs, perSecond } = await measureSlice(children[name]!, drive, job);
    return [cpuUs / 1000, perSecond];
  };
  await inTurns(names, 10, measure);
  report('alerts of 945 KiB', ['ms', '/s'], await inTurns(names, SCALE.uploads, measure), {
    'no escape': '≥ 0.67',
    beside: undefined,
  });
  for (const child of new Set(Object.values(children))) child.stop();
}

async function measureHostile(startServer: StartServer, drive: Drive): Promise<void> {
  const other = await start('load');
  const children: Record<string, Child> = {};
  for (const name of Object.keys(GATEWAYS)) children[name] = await startServer(name);
  let turn = 0;
  const found = await inTurns(Object.keys(GATEWAYS), 3, async (name) => {
    const child = children[name]!;
    const row = `turn ${++turn}`; // with connections of its own, because idle ones are closed meanwhile
    const job = { port: child.port, row, request: postJson(HOSTILE), connections: 16, megabytes: 0, tokens: 1 };
    const hostile = other.ask({ ...job, expect: [201, 400], count: 1e9, forMs: 10_000 });
    await delay(1000);
    const { medianMs } = await drive(child, { row, connections: 1, forMs: 8000 });
    await hostile;
    return [medianMs];
  });
  report('hostile JSON', ['ms median'], found);
  for (const child of [other, ...Object.values(children)]) child.stop();
}

async function measureSlots(startServer: StartServer, drive: Drive): Promise<void> {
  const slow = await start('slow backend');
  const children: Record<string, Child> = {};
  const servers = [...PARALLELS, 'node:http relay'];
  for (const server of servers) children[server] = await startServer(server, slow);
  const job = { row: 'slots', connections: 64, forMs: SCALE.forMs };
  for (const server of servers) await drive(children[server]!, job);
  const found = await inTurns(servers, SCALE.rounds, async (server) => {
    const { count, tookMs, p99Ms } = await drive(children[server]!, job);
    return [p99Ms, count * 1000 / tookMs];
  });
  report(`64 clients, ${SLOW_MS} ms each`, ['ms p99', '/s'], found);
}

/** What the threads of a process have done so far: how often they woke up, and for how many milliseconds they ran. */
function activityOf({ pid }: ChildProcess): [wakeUps: number, ms: number] {
  const tasks = readdirSync(`/proc/${pid}/task`).map((task) => `/proc/${pid}/task/${task}`);
  const sum = (numbers: number[]): number => numbers.reduce((total, each) => total + each, 0);
  const switches = tasks.map((task) =>
    /^voluntary_ctxt_switches:\s*(\d+)/m.exec(readFileSync(`${task}/status`, 'utf8'))![1]
  );
  const runNs = tasks.map((task) => readFileSync(`${task}/schedstat`, 'utf8').split(' ')[0]);
  return [sum(switches.map(Number)), sum(runNs.map(Number)) / 1e6];
}

async function measureIdle(backend: Child): Promise<void> {
  const folder = mkdtempSync(join(tmpdir(), 'idle-'));
  const file = join(folder, 'gateway.json');
  writeFileSync(file, JSON.stringify({ tokens: { bench: { secret: SECRET } } }), { mode: 0o600 });
  const children: [row: string, server: string, child: ChildProcess][] = [];
  for (const server of RELAYS) {
    children.push(['idle, variables', server, await run(server, backend, { GATEWAY_TOKENS: SECRET })]);
    if (GATEWAYS[server]) children.push(['idle, a file', server, await run(server, backend, {}, ['--config', file])]);
  }
  await delay(20_000); // for work that is left from the start: V8 collects garbage some 8 s later
  const before = children.map(([, , child]) => activityOf(child));
  await delay(30_000);
  const found = new Map<string, Found>();
  const memory: Found = {};
  for (const [i, [row, server, child]] of children.entries()) {
    const slice = activityOf(child).map((value, j) => value - before[i]![j]!);
    found.set(row, { ...found.get(row), [server]: [slice] });
    const [, kib] = /^VmRSS:\s*(\d+)/m.exec(readFileSync(`/proc/${child.pid}/status`, 'utf8'))!;
    memory[server] ??= [[Number(kib) / 1024]];
    child.kill();
  }
  for (const [row, slices] of found) report(row, ['wake-ups', 'ms'], slices);
  report('memory, idle', ['MiB'], memory);
  rmSync(folder, { recursive: true });
}

function loadAverage(): string {
  return `load average ${loadavg()[0]!.toFixed(1)}`;
}

async function main(): Promise<never> {
  console.log(
    `${RUNTIME} ${process.versions[RUNTIME.toLowerCase()]}, ${platform()} ${arch()}, ` +
      `${availableParallelism()} × ${cpus()[0]?.model}, ${new Date().toISOString()}\n` +
      `${Object.entries(GATEWAYS).map((pair) => pair.join(': ')).join(', ')}\n${loadAverage()}\n`,
  );
  printRow(['', '', 'processor time, or as named', 'ratio', 'goal', 'throughput, or as named', 'ratio']);
  printRow(['---', '---', '---', '---', '---', '---', '---']);
  await measureAll();
  console.log(`\n${loadAverage()}`);
  process.exit(); // which also ends all children
}

await main();
