/**
 * How much the gateway costs: run it with `npm run bench`, or shorter with `npm run bench -- --quick`.
 *
 * Everything is measured in one run, and counts only as a ratio to something that does nothing else:
 *
 *   fetch relay  a bare node:http server that relays with fetch and streams bodies
 *   http relay   the same with node:http's own client and a keep-alive agent
 *   bare 401     a bare node:http server that answers 401 and reads nothing
 *
 * Rows: small sends per second; latency added to talking to the backend directly, at a fixed modest
 * rate; refusals per second (wrong tokens soon get 429 in the place of 401, which is the gateway's real
 * behaviour); megabytes per second of one large attachment; from the start of the process until it
 * listens; resident memory, after the first send and at its highest under sends and large bodies.
 *
 * The file starts itself once per role: the servers, a stand-in backend, and the load, which comes from
 * raw sockets in a process of its own. Servers take turns in short rounds, and the median of the rounds
 * counts: other work on the machine then hits them all alike. A row that misses its target is printed
 * as it is. An answer that is not the expected one ends the run: nothing may be fast by failing.
 *
 * Loopback only, on ports that the system chooses. Children end with their standard input.
 */

import { spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import http from 'node:http';
import net, { type AddressInfo } from 'node:net';
import { arch, availableParallelism, platform } from 'node:os';
import { createInterface } from 'node:readline';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { setTimeout as delay } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

// ── ROLES: THE SERVERS ───────────────────────────────────────────────────────────────────────────

const SECRET = 'a-plain-secret-for-the-benchmark';
/** A relay must not pass these on; it does nothing else about headers. */
const HOP_BY_HOP = new Set(['host', 'connection', 'keep-alive', 'transfer-encoding']);

function endToEnd(headers: Iterable<readonly [string, string | string[] | undefined]>): Record<string, string> {
  return Object.fromEntries([...headers].filter(([name]) => !HOP_BY_HOP.has(name))) as Record<string, string>;
}

/** The stand-in for the Signal backend: takes every message, and says so in as few bytes as the real one. */
function backend(): http.Server {
  return http.createServer((req, res) => {
    req.resume().on(
      'end',
      () => res.writeHead(201, { 'Content-Type': 'application/json', 'Content-Length': 17 }).end('{"timestamp":"1"}'),
    );
  });
}

function fetchRelay(backendPort: string): http.Server {
  return http.createServer(async (req, res) => {
    const headers = endToEnd(Object.entries(req.headers));
    const streamed = { body: Readable.toWeb(req) as ReadableStream<Uint8Array>, duplex: 'half' as const };
    const response = await fetch(`http://127.0.0.1:${backendPort}${req.url}`, {
      method: req.method!,
      headers,
      redirect: 'error',
      ...streamed,
    });
    res.writeHead(response.status, endToEnd(response.headers));
    await pipeline(response.body!, res);
  });
}

function httpRelay(backendPort: string): http.Server {
  const agent = new http.Agent({ keepAlive: true });
  return http.createServer((req, res) => {
    const options = {
      host: '127.0.0.1',
      port: backendPort,
      method: req.method!,
      path: req.url!,
      headers: endToEnd(Object.entries(req.headers)),
      agent,
    };
    req.pipe(http.request(options, (answer) => {
      res.writeHead(answer.statusCode!, endToEnd(Object.entries(answer.headers)));
      answer.pipe(res);
    }));
  });
}

function bare401(): http.Server {
  const body = JSON.stringify({ error: 'A valid API token is required.', code: 'unauthorized' });
  return http.createServer((_req, res) =>
    res.writeHead(401, { 'Content-Type': 'application/json', 'Content-Length': body.length }).end(body)
  );
}

/** Imported here and not above: the other roles must not pay for it. */
async function gateway(backendPort: string): Promise<http.Server> {
  const { createGateway } = await import('./gateway.ts');
  const { server, listen } = createGateway({
    backend: { url: `http://127.0.0.1:${backendPort}` },
    listen: '127.0.0.1:0',
    tokens: { bench: { secret: SECRET } },
    limits: { body: '150MiB', connections: 4096 },
    log: { level: 'error' },
  });
  await listen();
  return server;
}

const SERVERS = { backend, fetchRelay, httpRelay, bare401, gateway };
type Server = keyof typeof SERVERS;

/** Listens, says where, and then tells its memory whenever it is asked. */
async function serve(server: http.Server): Promise<void> {
  if (!server.listening) await once(server.listen(0, '127.0.0.1'), 'listening'); // the gateway already does
  say({ port: (server.address() as AddressInfo).port });
  let peakBytes = 0;
  setInterval(() => {
    peakBytes = Math.max(peakBytes, process.memoryUsage.rss());
  }, 50);
  onLines(() => say({ bytes: process.memoryUsage.rss(), peakBytes }));
}

function say(message: object): void {
  process.stdout.write(`${JSON.stringify(message)}\n`);
}

function onLines(act: (line: string) => void): void {
  createInterface(process.stdin).on('line', act).on('close', () => process.exit());
}

// ── ROLES: THE LOAD ──────────────────────────────────────────────────────────────────────────────

/** The status of an answer that is complete. */
function completeStatus(text: string): number | undefined {
  const head = text.indexOf('\r\n\r\n') + 4;
  if (head < 4) return undefined;
  const [, length] = /\r\ncontent-length: *(\d+)/i.exec(text) ?? [];
  const complete = length === undefined ? text.endsWith('\r\n0\r\n\r\n') : text.length >= head + Number(length);
  return complete ? Number(text.slice(9, 12)) : undefined;
}

/** A raw connection with one request on its way at a time: it costs far less than any server here. */
class Client {
  readonly #socket: net.Socket;
  #text = '';
  #answered: { resolve: (status: number) => void; reject: (error: Error) => void } | undefined;

  constructor(port: number) {
    this.#socket = net.connect({ port, host: '127.0.0.1', noDelay: true });
    this.#socket.on('data', (chunk: Buffer) => {
      this.#text += chunk.toString('latin1');
      const status = completeStatus(this.#text);
      if (status !== undefined) this.#answered?.resolve(status);
    });
    this.#socket.on('error', () => {}); // 'close' follows
    this.#socket.on(
      'close',
      () => this.#answered?.reject(new Error(`connection closed after: ${this.#text || 'nothing'}`)),
    );
  }

  /** Sends a request in pieces; resolves to the answer's status once the answer is complete. */
  async exchange(pieces: Iterable<string | Uint8Array>): Promise<number> {
    this.#text = '';
    const answer = new Promise<number>((resolve, reject) => {
      this.#answered = { resolve, reject };
    });
    answer.catch(() => {}); // it is also awaited below, but may fail while the request is still being sent
    for (const piece of pieces) {
      if (!this.#socket.write(piece)) await Promise.race([once(this.#socket, 'drain'), answer]);
    }
    return await answer;
  }

  close(): void {
    this.#answered = undefined;
    this.#socket.destroy();
  }
}

interface Job {
  kind: keyof typeof JOBS;
  ports: number[];
  request: string;
  /** The statuses that are right. */
  expect: number[];
  connections?: number;
  warmUpMs?: number;
  measureMs?: number;
  perSecond?: number;
  bodyBytes?: number;
}

function checkStatus({ expect }: Job, status: number): void {
  if (!expect.includes(status)) throw new Error(`status ${status} where ${expect.join(' or ')} is right`);
}

/** Requests per second, each connection sending its next one as soon as it has its answer. */
async function measureRate(job: Job): Promise<number> {
  const { ports: [port = 0], request, connections = 1, warmUpMs = 0, measureMs = 0 } = job;
  const clients = Array.from({ length: connections }, () => new Client(port));
  const startMs = performance.now() + warmUpMs;
  const endMs = startMs + measureMs;
  let count = 0;
  await Promise.all(clients.map(async (client) => {
    for (let nowMs = 0; nowMs < endMs;) {
      checkStatus(job, await client.exchange([request]));
      nowMs = performance.now();
      if (nowMs >= startMs && nowMs < endMs) count++;
    }
    client.close();
  }));
  return count * 1000 / measureMs;
}

/** Milliseconds per request to each port, while all ports get requests in turn at a fixed rate each. */
async function measureLatency(job: Job): Promise<number[][]> {
  const { ports, request, perSecond = 1, measureMs = 0 } = job;
  const idle = ports.map((port) => [new Client(port)]);
  const latenciesMs = ports.map((): number[] => []);
  const sendOne = async (i: number): Promise<void> => {
    const client = idle[i]!.pop() ?? new Client(ports[i]!); // never behind a slow answer
    const startMs = performance.now();
    checkStatus(job, await client.exchange([request]));
    latenciesMs[i]!.push(performance.now() - startMs);
    idle[i]!.push(client);
  };
  const sent: Promise<void>[] = [];
  const startMs = performance.now();
  for (let n = 0; n * 1000 < measureMs * perSecond * ports.length; n++) {
    await delay(Math.max(0, startMs + n * 1000 / perSecond / ports.length - performance.now()));
    sent.push(sendOne(n % ports.length));
  }
  await Promise.all(sent);
  idle.flat().forEach((client) => client.close());
  return latenciesMs;
}

/** Megabytes per second of one request whose attachment has so many bytes as it travels. */
async function measureBody(job: Job): Promise<number> {
  const { ports: [port = 0], bodyBytes = 0 } = job;
  const block = Buffer.from(randomBytes(750_000).toString('base64'));
  const [before = '', after = ''] = JSON.stringify({
    ...MESSAGE,
    base64_attachments: ['data:application/octet-stream;filename=a.bin;base64,#'],
  }).split('#');
  const blocks = Array<Uint8Array>(bodyBytes / block.length).fill(block);
  const client = new Client(port);
  const startMs = performance.now();
  checkStatus(
    job,
    await client.exchange([
      head('POST /v2/send', SECRET, before.length + bodyBytes + after.length) + before,
      ...blocks,
      after,
    ]),
  );
  client.close();
  return bodyBytes / 1e6 / (performance.now() - startMs) * 1000;
}

const JOBS = { rate: measureRate, latency: measureLatency, body: measureBody };

function load(): void {
  onLines((line) => {
    const job = JSON.parse(line) as Job;
    JOBS[job.kind](job).then(
      (result) => say({ result }),
      (error: Error) => say({ error: `${job.kind}: ${error.message}` }),
    );
  });
  say({ port: 0 });
}

// ── REQUESTS ─────────────────────────────────────────────────────────────────────────────────────

const MESSAGE = { message: 'The washing machine is done.', number: '+15550100001', recipients: ['+15550100002'] };

function head(line: string, secret: string | undefined, bodyBytes: number): string {
  const authorization = secret === undefined ? '' : `Authorization: Bearer ${secret}\r\n`;
  return `${line} HTTP/1.1\r\nHost: gateway:8880\r\nUser-Agent: bench\r\nAccept: */*\r\n${authorization}Content-Type: application/json\r\nContent-Length: ${bodyBytes}\r\n\r\n`;
}

function sendRequest(secret?: string): string {
  const body = JSON.stringify(MESSAGE);
  return head('POST /v2/send', secret, body.length) + body;
}

// ── CHILDREN ─────────────────────────────────────────────────────────────────────────────────────

interface Child {
  port: number;
  ask(message: object): Promise<Record<string, unknown>>;
  stop(): void;
}

/** All of them, to be stopped at the end, whatever it is. */
const running = new Set<Child>();

/** Starts a role of this file; resolves when it listens. */
async function start(role: string, ...args: string[]): Promise<Child> {
  const child = spawn(process.execPath, [...process.execArgv, fileURLToPath(import.meta.url), role, ...args], {
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  const lines = createInterface(child.stdout)[Symbol.asyncIterator]();
  const read = async (): Promise<Record<string, unknown>> => {
    const { value, done } = await lines.next();
    if (done) throw new Error(`the role "${role}" has ended`);
    const message = JSON.parse(value) as Record<string, unknown>;
    if ('error' in message) throw new Error(`${role}: ${message.error}`);
    return message;
  };
  child.stdin.on('error', () => {}); // `read` says that it has ended
  const self: Child = {
    port: 0,
    ask: (message) => {
      child.stdin.write(`${JSON.stringify(message)}\n`);
      return read();
    },
    stop: () => {
      running.delete(self);
      child.kill('SIGKILL');
    },
  };
  running.add(self);
  self.port = (await read()).port as number;
  return self;
}

// ── MEASUREMENTS ─────────────────────────────────────────────────────────────────────────────────

/** All that a measurement needs. */
interface Bench {
  servers: Record<Server, Child>;
  /** Has the load do a job; resolves to its result. */
  run(job: Job): Promise<unknown>;
  scale: Scale;
}

type Scale = { rounds: number; warmUpMs: number; measureMs: number; bodyBytes: number };
const FULL: Scale = { rounds: 5, warmUpMs: 150, measureMs: 600, bodyBytes: 99e6 };
const QUICK: Scale = { rounds: 2, warmUpMs: 100, measureMs: 200, bodyBytes: 30e6 };

/** What one round found: by row, then by server. */
type Found = Record<string, Partial<Record<Server, number>>>;

const RELAYS = ['gateway', 'fetchRelay', 'httpRelay'] as const;
const MIB = 1024 * 1024;

/** Each server in turn. */
async function inTurn(
  row: string,
  servers: readonly Server[],
  measure: (server: Server) => Promise<number>,
): Promise<Found> {
  const found: Partial<Record<Server, number>> = {};
  for (const server of servers) found[server] = await measure(server);
  return { [row]: found };
}

/** Fresh processes: from their start until they listen, and what they hold once they have done something. */
async function startAndMemory({ servers, run }: Bench): Promise<Found> {
  const memory: Partial<Record<Server, number>> = {};
  const started = await inTurn('start until listening, ms', RELAYS, async (server) => {
    const startMs = performance.now();
    const child = await start(server, String(servers.backend.port));
    const tookMs = performance.now() - startMs;
    await run({ kind: 'rate', ports: [child.port], request: sendRequest(SECRET), expect: [201], measureMs: 1 });
    await delay(200); // for what the start leaves behind
    memory[server] = (await child.ask({})).bytes as number / MIB;
    child.stop();
    return tookMs;
  });
  return { ...started, 'memory idle, MiB': memory };
}

/** Once, after sends and bodies, and before refusals, of which the relays get none. */
function peakMemory({ servers }: Bench): Promise<Found> {
  return inTurn(
    'memory under load, MiB',
    RELAYS,
    async (server) => (await servers[server].ask({})).peakBytes as number / MIB,
  );
}

/** All servers at once, in turn: what disturbs one disturbs them all. */
async function addedLatency({ servers, run, scale }: Bench): Promise<Found> {
  const ports = ['backend' as const, ...RELAYS].map((server) => servers[server].port);
  const [direct = [], ...relayed] = await run({
    kind: 'latency',
    ports,
    request: sendRequest(SECRET),
    expect: [201],
    perSecond: 100,
    measureMs: scale.measureMs * 2,
  }) as number[][];
  const added = (share: number): Found[string] =>
    Object.fromEntries(RELAYS.map((server, i) => [server, quantile(relayed[i]!, share) - quantile(direct, share)]));
  return { 'added latency, median, ms': added(0.5), 'added latency, 99 %, ms': added(0.99) };
}

function quantile(values: number[], share: number): number {
  return values.toSorted((a, b) => a - b)[Math.floor(values.length * share)] ?? NaN;
}

/** A measurement of requests per second. */
function rate(
  row: string,
  on: readonly Server[],
  request: string,
  connections: number,
  expect: number[],
): (bench: Bench) => Promise<Found> {
  return ({ servers, run, scale: { warmUpMs, measureMs } }) =>
    inTurn(
      row,
      on,
      async (server) =>
        await run({
          kind: 'rate',
          ports: [servers[server].port],
          request,
          expect,
          connections,
          warmUpMs,
          measureMs,
        }) as number,
    );
}

function refusals(row: string, request: string, expect: number[]): (bench: Bench) => Promise<Found> {
  return rate(row, ['gateway', 'bare401'], request, 32, [401, ...expect]);
}

function largeBody({ servers, run, scale }: Bench): Promise<Found> {
  return inTurn(
    'large body, MB/s',
    RELAYS,
    async (server) =>
      await run({
        kind: 'body',
        ports: [servers[server].port],
        request: '',
        expect: [201],
        bodyBytes: scale.bodyBytes,
      }) as number,
  );
}

/** In the order in which they run. */
const MEASUREMENTS: readonly { measure: (bench: Bench) => Promise<Found>; once?: boolean }[] = [
  { measure: startAndMemory },
  { measure: addedLatency },
  ...[1, 32, 256].map((connections) => ({
    measure: rate(
      `small sends/s, ${connections} connection${connections > 1 ? 's' : ''}`,
      RELAYS,
      sendRequest(SECRET),
      connections,
      [201],
    ),
  })),
  { measure: largeBody },
  { measure: peakMemory, once: true },
  { measure: refusals('refusals/s, wrong token', sendRequest('not-the-secret-of-the-benchmark'), [429]) },
  { measure: refusals('refusals/s, no token', sendRequest(), []) },
  { measure: refusals('refusals/s, blocked path', head('POST /v1/register/+15550100001', SECRET, 0), [403]) },
];

// ── REPORT ───────────────────────────────────────────────────────────────────────────────────────

/** What a row, known by how its name begins, is compared with, and the least ratio or the largest difference. */
const TARGETS: readonly { rows: string; reference: Server; ratio?: number; difference?: number }[] = [
  { rows: 'small sends', reference: 'fetchRelay', ratio: 0.9 },
  { rows: 'refusals', reference: 'bare401', ratio: 0.8 },
  { rows: 'large body', reference: 'fetchRelay', ratio: 0.8 },
  { rows: 'memory idle', reference: 'fetchRelay', difference: 10 },
  { rows: '', reference: 'fetchRelay' }, // the rest has no target
];

const HEADINGS = ['row', 'gateway', 'fetch relay', 'http relay', 'bare 401', 'to reference', 'target', 'verdict'];
const COLUMNS: readonly Server[] = [...RELAYS, 'bare401'];

function tableLine(row: string, values: Found[string]): string[] {
  const { reference, ratio, difference } = TARGETS.find(({ rows }) => row.startsWith(rows))!;
  const [own = NaN, other = NaN] = [values.gateway, values[reference]];
  const good = ratio !== undefined ? own / other >= ratio : own - other <= (difference ?? Infinity);
  return [
    row,
    ...COLUMNS.map((server) => format(values[server])),
    difference === undefined ? (own / other).toFixed(2) : `${own < other ? '' : '+'}${(own - other).toFixed(1)}`,
    ratio !== undefined ? `>= ${ratio}` : difference !== undefined ? `<= +${difference}` : '',
    ratio === undefined && difference === undefined ? '' : good ? 'meets' : 'misses',
  ];
}

function format(value: number | undefined): string {
  return value === undefined ? '' : value.toFixed(value >= 1000 ? 0 : value >= 20 ? 1 : 2);
}

function printTable(lines: string[][]): void {
  const widths = HEADINGS.map((_, column) => Math.max(...lines.map((line) => line[column]!.length)));
  for (const line of lines) {
    console.log(
      line.map((cell, i) => (i === 0 ? cell.padEnd(widths[i]!) : cell.padStart(widths[i]!))).join('  ').trimEnd(),
    );
  }
}

/** The median of the rounds, of each row and server. */
function summarise(rounds: Found[]): Found {
  return Object.fromEntries(
    Object.entries(rounds[0] ?? {}).map(([row, values]) => [
      row,
      Object.fromEntries(
        (Object.keys(values) as Server[]).map((
          server,
        ) => [server, quantile(rounds.map((found) => found[row]![server]!), 0.5)]),
      ),
    ]),
  );
}

async function startAll(scale: Scale): Promise<Bench> {
  const [generator, behind] = [await start('load'), await start('backend')];
  const servers: Partial<Record<Server, Child>> = { backend: behind };
  for (const server of COLUMNS) servers[server] = await start(server, String(behind.port));
  return { servers: servers as Record<Server, Child>, run: async (job) => (await generator.ask(job)).result, scale };
}

async function main(): Promise<void> {
  const scale = process.argv.includes('--quick') ? QUICK : FULL;
  const beganMs = performance.now();
  console.log('signal-gateway: what it costs, compared with servers that do nothing else, all in this one run.');
  console.log(
    `${runtime()}, ${platform()} ${arch()}, ${availableParallelism()} cores, medians of ${scale.rounds} rounds. Only the ratios mean anything.\n`,
  );
  const bench = await startAll(scale);
  // Code that has not run yet is slow everywhere; that is not what is asked.
  for (const server of COLUMNS) {
    await bench.run({
      kind: 'rate',
      ports: [bench.servers[server].port],
      request: sendRequest(SECRET),
      expect: [201, 401],
      connections: 32,
      measureMs: scale.measureMs * 2,
    });
  }
  const lines = [HEADINGS];
  for (const { measure, once: single } of MEASUREMENTS) {
    const rounds: Found[] = [];
    while (rounds.length < (single ? 1 : scale.rounds)) rounds.push(await measure(bench));
    for (const [row, values] of Object.entries(summarise(rounds))) lines.push(tableLine(row, values));
  }
  printTable(lines);
  console.log(
    `\nThe reference is the fetch relay, for refusals the bare 401. It took ${
      ((performance.now() - beganMs) / 1000).toFixed(0)
    } s.`,
  );
}

function runtime(): string {
  const { bun, deno, node } = process.versions;
  return bun ? `Bun ${bun}` : deno ? `Deno ${deno}` : `Node ${node}`;
}

/** Longer than any run takes: a server that hangs must not hang the benchmark. */
const PATIENCE_MS = 180_000;

function stopAll(exitCode: number): never {
  for (const child of running) child.stop();
  process.exit(exitCode);
}

async function runBench(): Promise<never> {
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) process.once(signal, () => stopAll(130));
  setTimeout(() => {
    console.error('bench: it takes too long; something hangs');
    stopAll(1);
  }, PATIENCE_MS);
  return main().then(() => stopAll(0), (error: Error) => {
    console.error(`bench: ${error.message}`);
    stopAll(1);
  });
}

const [role = '', backendPort = ''] = process.argv.slice(2);
if (role in SERVERS) await serve(await SERVERS[role as Server](backendPort));
else if (role === 'load') load();
else await runBench();
