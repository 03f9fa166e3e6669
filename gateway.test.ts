/**
 * The whole suite, after types, format and lint:  npm test
 * The tests alone:  node --import tsx --test gateway.test.ts           (Node 20; from 22.18 on without --import tsx)
 *                   deno test -A --no-check gateway.test.ts            bun test --timeout 60000 ./gateway.test.ts
 *                   npx --yes -p node@26 node --test gateway.test.ts   (any Node; npx -p deno@2 and bun@1 likewise)
 * One section:      SECTION=RATE node --import tsx --test gateway.test.ts        (grep "^section(" lists them)
 * Some tests:       ONLY='keep-alive|trickles' node …                            (a regular expression for titles)
 * A random test:    SEED=310410416 ONLY='random targets' node …                  (a run shows its seed in the title)
 *                   SEEDS=500 ONLY='random targets' node …                       (once for each of 500 seeds)
 * A compiled file:  GATEWAY_FILE=dist/gateway.js node …
 *
 * The tests use real sockets on loopback ports that the system chooses, and a stand-in backend that reads
 * paths and JSON as signal-cli-rest-api does. Titles are claims. A denial is proved only by a backend that saw
 * nothing, so `assertDenied` always asks the backend. What needs no process of its own calls the gateway's functions,
 * `run` for a command line; a process that a test starts runs compiled code.
 */

import strict from 'node:assert/strict';
import { type ChildProcess, execFile, execFileSync, spawn, spawnSync } from 'node:child_process';
import { createHash, randomUUID } from 'node:crypto';
import { once } from 'node:events';
import {
  chmodSync,
  cpSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import net, { type AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import type { Duplex } from 'node:stream';
import { test as registerTest, type TestContext } from 'node:test';
import { connect as tlsConnect, TLSSocket } from 'node:tls';
import { promisify } from 'node:util';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { gzipSync } from 'node:zlib';
import { fileURLToPath } from 'node:url';
import type { GatewayConfig, GatewayOptions, TokenConfig } from './gateway.ts';

/** What is tested; GATEWAY_FILE names another than the source, such as dist/gateway.js. */
const FILE = new URL(process.env.GATEWAY_FILE ?? 'gateway.ts', import.meta.url);
const { BodyScan, ConfigError, createGateway, loadSettings, parseTarget, RateLimiter, run, Template } = await import(
  FILE.href
) as typeof import('./gateway.ts');

/** Node 20 looks a minute for the words of an `ok` that fails without a message: the type demands one. */
const assert: Omit<typeof strict, 'ok'> & { ok(value: unknown, message: string): asserts value } = strict;

// ── HARNESS ──────────────────────────────────────────────────────────────────────────────────────

const SECRET = 'correct-horse-battery-staple';
const OTHER = 'another-secret-that-is-long';
/** For what must hold neither of them. */
const SECRETS = new RegExp(`${SECRET}|${OTHER}`);
const FROM = '+15550100001';
const TO = '+15550100002';
/** A group as signal-cli knows it (32 bytes), and as the backend names it: in base64 twice. */
const INTERNAL_ID = Buffer.from('a group has an id of 32 bytes...').toString('base64');
const GROUP = `group.${Buffer.from(INTERNAL_ID).toString('base64')}`;
/** Base64 of the same bytes, with other bits where none count. */
const otherBits = (id: string): string => id.replace(/.=$/, (end) => `${String.fromCharCode(end.charCodeAt(0) + 1)}=`);
const MESSAGE = { message: 'hello', number: FROM, recipients: [TO] };
/** The same as JSON, and with a token in it. */
const HELLO = JSON.stringify(MESSAGE);
const AUTHED = (token: string): string => `{"auth":"${token}",${HELLO.slice(1)}`;
/** One of so many bytes. */
const sized = (bytes: number): string => `{"x":"${'x'.repeat(bytes - HELLO.length - 7)}",${HELLO.slice(1)}`;
const BEARER = { authorization: `Bearer ${SECRET}` };
const HERE = fileURLToPath(new URL('.', import.meta.url));
const SOURCE = readFileSync(join(HERE, 'gateway.ts'), 'utf8');
const README = readFileSync(join(HERE, 'README.md'), 'utf8');
const COOKBOOK = readFileSync(join(HERE, 'RECIPES.md'), 'utf8');
/** What a token may have in the file beside its secret. */
const TOKEN_SETTINGS = 'methods allow senders recipients rate clients expires secretFile message defaults'.split(' ');
const PACKAGE = JSON.parse(readFileSync(join(HERE, 'package.json'), 'utf8'));

interface Seen {
  method: string;
  url: string;
  headers: http.IncomingHttpHeaders;
  rawHeaders: string[];
  body: Buffer;
  /** The request arrived completely. */
  complete: boolean;
}

interface Backend {
  url: string;
  port: number;
  /** Every request that reached it, complete or not; but for the question of a process that starts. */
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

/** A backend that records what reaches it. Without a handler it answers as signal-cli-rest-api does. */
async function startBackend(t: TestContext, handler?: Handler): Promise<Backend> {
  const backend: Backend = { url: '', port: 0, seen: [], sent: [], connections: 0, server: http.createServer() };
  backend.server.on('connection', () => {
    backend.connections++;
  });
  backend.server.on('request', (req: http.IncomingMessage, res: http.ServerResponse) => {
    if (req.headers['user-agent']?.startsWith('signal-gateway/')) {
      backend.connections--;
      return answerAsBackend(backend, { method: req.method!, url: req.url! } as Seen, res);
    }
    const seen = seenOf(req, Buffer.alloc(0), false);
    backend.seen.push(seen);
    req.on('error', () => {});
    if (handler) return handler(req, res, seen);
    const chunks: Buffer[] = [];
    req.on('data', (chunk: Buffer) => chunks.push(chunk));
    req.on('end', () => {
      seen.body = Buffer.concat(chunks);
      seen.complete = true;
      answerAsBackend(backend, seen, res);
    });
  });
  backend.server.listen(0, '127.0.0.1');
  await once(backend.server, 'listening');
  backend.port = (backend.server.address() as AddressInfo).port;
  backend.url = `http://127.0.0.1:${backend.port}`;
  t.after(() => {
    backend.server.close();
    backend.server.closeAllConnections();
  });
  return backend;
}

/** Routes and JSON as backend.md describes them: decoded paths, folded keys, text for what does not bind. */
function answerAsBackend(backend: Backend, seen: Seen, res: http.ServerResponse): void {
  const text = (status: number, body: string): void =>
    void res.writeHead(status, { 'Content-Type': 'text/plain' }).end(body);
  const json = (status: number, body: unknown): void =>
    void res.writeHead(status, { 'Content-Type': 'application/json; charset=utf-8' }).end(JSON.stringify(body));
  const [rawPath = '', query = ''] = seen.url.split('?');
  if (rawPath.length > 1 && rawPath.endsWith('/')) {
    return void res.writeHead(seen.method === 'GET' ? 301 : 307, { Location: rawPath.slice(0, -1) }).end();
  }
  const [, version, name, number] = decodeURIComponent(rawPath).split('/');
  const account = number === undefined ? undefined : decodeURIComponent(number);
  switch (`${seen.method} /${version}/${name}`) {
    case 'GET /v1/about':
      return json(200, {
        versions: ['v1', 'v2'],
        build: 2,
        mode: 'json-rpc',
        version: '0.100',
        capabilities: { 'v2/send': ['quotes'] },
      });
    case 'GET /v1/health':
      return void res.writeHead(204).end();
    case 'GET /v1/receive':
      return text(200, JSON.stringify([{ envelope: {}, account, query }]));
    case 'POST /v1/register':
      return void res.writeHead(201).end();
    case 'GET /v1/groups':
      return json(200, [{ id: 'group.abc', account }]);
    case 'PUT /v1/typing-indicator':
    case 'DELETE /v1/typing-indicator':
      return void res.writeHead(204).end();
    case 'POST /v1/send':
    case 'POST /v2/send':
      break;
    default:
      return text(404, '404 page not found');
  }
  const body = bindLikeGo(seen.body);
  if (!body) return text(400, "Couldn't process request - invalid request");
  const recipients = [...body.recipients ?? [], ...body.recipient === undefined ? [] : [body.recipient]];
  if (recipients.length === 0) {
    return json(400, { error: "Couldn't process request - please provide at least one recipient" });
  }
  if (!body.number) return json(400, { error: "Couldn't process request - please provide a valid number" });
  backend.sent.push({ number: body.number, recipients, message: body.message ?? '' });
  return json(201, version === 'v1' ? { timestamp: '1700000000000' } : [{ timestamp: '1700000000000' }]);
}

interface SendBody {
  number?: string;
  recipient?: string;
  recipients?: string[];
  message?: string;
}

/** encoding/json: keys match whatever their case, the last of several wins, the rest of the input is not read. */
function bindLikeGo(bytes: Buffer): SendBody | undefined {
  let value: unknown;
  try {
    value = JSON.parse(bytes.toString());
  } catch {
    return undefined;
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value)) return undefined;
  const bound: Record<string, unknown> = {};
  for (const [key, inner] of Object.entries(value)) {
    const field = ['number', 'recipient', 'recipients', 'message'].find((name) =>
      new RegExp(`^${name}$`, 'iu').test(key)
    );
    if (field && inner !== null) bound[field] = inner;
  }
  return bound as SendBody;
}

/** Where something listens: a port of a host, 127.0.0.1 if none is told, or a unix socket. */
interface Address {
  port: number;
  host?: string;
  socketPath?: string;
  /** The certificates that a client trusts, where it speaks TLS. */
  ca?: string[];
}

function addressOf(url: string): Address {
  if (url.startsWith('unix:')) return { port: 0, socketPath: url.slice('unix:'.length) };
  const { protocol, hostname, port } = new URL(url);
  const tls = protocol === 'https:' && { ca: CERTS.map((pair) => pair.cert) };
  return { port: Number(port), host: hostname.replace(/[[\]]/g, ''), ...tls };
}

interface Running extends Address {
  url: string;
  log: string[];
  close(): Promise<void>;
}

interface Gateway extends Running {
  server: http.Server | https.Server;
  reload(config: GatewayConfig): void;
  /** Reloads with other settings of the first token, as JSON; without them, with its own. */
  useSettings(settings?: string): void;
}

type Run = (t: TestContext) => void | Promise<void>;

const { SECTION, ONLY = '', SEED = Date.now() % 1e9, SEEDS = 1 } = process.env;
let [inSection, registered] = ['', 0];

/** The tests from here on are those of this section. */
function section(name: string): void {
  inSection = name;
}

/** Registers a test, unless SECTION or ONLY leaves it out. A test that waits in vain fails. */
function test(title: string, ...rest: [Run] | [options: { skip?: string | boolean; timeout?: number }, Run]): void {
  if ((SECTION ?? inSection) !== inSection || !new RegExp(ONLY).test(title)) return;
  registered++;
  const [options, run] = rest.length === 1 ? [{}, ...rest] : rest;
  registerTest(title, { timeout: 120_000, ...options }, run);
}

/** A test with a random generator, once for each seed. */
function randomTest(title: string, run: (random: (below: number) => number, t: TestContext) => ReturnType<Run>): void {
  for (let i = 0; i < Number(SEEDS); i++) {
    const seed = Number(SEED) + i;
    test(`${title} (SEED=${seed})`, (t) => run(seeded(seed), t));
  }
}

const isNode = !('Bun' in globalThis) && !('Deno' in globalThis);

/** The codes of all refusals so far: in the end, each that there is must have been among them. */
const PROVOKED = new Set<string>();
let gatewaysStarted = 0;

/** A gateway with one token, on a port of its own. It waits for no backend that is down, unless a test says so. */
async function startGateway(
  t: TestContext,
  backend: { url: string },
  config: GatewayConfig = {},
  options: GatewayOptions = {},
): Promise<Gateway> {
  gatewaysStarted++;
  const log: string[] = [];
  const note = (line: string): void => {
    log.push(line);
    const code = codeOf(line);
    if (code) PROVOKED.add(code);
  };
  const base: GatewayConfig = {
    backend: { url: backend.url, wait: '0' },
    listen: '127.0.0.1:0',
    tokens: { test: { secret: SECRET } },
    shutdown: '1s',
    log: { format: 'json', level: 'debug' },
  };
  const gateway = createGateway({ ...base, ...config }, { log: note, ...options });
  t.after(() => {
    gateway.server.closeAllConnections();
    return gateway.close();
  });
  const url = await gateway.listen();
  const reload = (next: GatewayConfig): void => gateway.reload({ ...base, ...next });
  let used = '{}';
  const useSettings = (settings = '{}'): void => {
    if (settings === used) return;
    used = settings;
    const tokens = { ...base, ...config }.tokens!;
    const [name, token] = Object.entries(tokens)[0]!;
    reload({ ...config, tokens: { ...tokens, [name]: { ...token, ...JSON.parse(settings) } } });
  };
  return { ...addressOf(url), url, log, server: gateway.server, close: () => gateway.close(), reload, useSettings };
}

async function startBoth(
  t: TestContext,
  config: GatewayConfig = {},
  options: GatewayOptions = {},
): Promise<{ backend: Backend; gateway: Gateway }> {
  const backend = await startBackend(t);
  return { backend, gateway: await startGateway(t, backend, config, options) };
}

/** A JSON answer: a refusal's fields by name, and those of the backend, which only the tests know. */
interface AnswerJson extends Record<'error' | 'code' | 'requestId', string> {
  [field: string]: unknown;
}

/** A line of the log as JSON, by the fields of which tests ask more than whether they are equal. */
interface LogLine
  extends Record<'time' | 'level' | 'message' | 'requestId' | 'listen' | 'warning' | 'problems', string> {
  ms: number;
  bytesOut: number;
  [field: string]: unknown;
}

interface Answer {
  status: number;
  headers: http.IncomingHttpHeaders;
  rawHeaders: string[];
  text: string;
  json: AnswerJson;
  /** Of the certificate that it came with. */
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

/** One request on a connection of its own, its target as given. A body makes it a POST, an object is sent as JSON. */
async function ask(
  { port, host = '127.0.0.1', socketPath, ca }: Address,
  {
    body,
    method = body === undefined ? 'GET' : 'POST',
    path = body === undefined ? '/v1/about' : '/v2/send',
    headers = {},
    agent,
  }: Ask = {},
): Promise<Answer> {
  const bytes = body === undefined || body instanceof Buffer
    ? body
    : Buffer.from(typeof body === 'string' ? body : JSON.stringify(body));
  const req = (ca ? https : http).request({
    ...(socketPath === undefined ? { host, port } : { socketPath }),
    ...(ca && { ca, servername: 'localhost' }),
    method,
    path,
    agent: agent ?? false,
    headers: {
      ...(bytes !== undefined && headers['transfer-encoding'] === undefined && { 'content-length': bytes.length }),
      ...headers,
    },
  });
  req.end(bytes);
  const [res] = await once(req, 'response') as [http.IncomingMessage];
  req.on('error', () => {}); // of a body that is still being sent: the answer is there
  const fingerprint = res.socket instanceof TLSSocket ? res.socket.getPeerCertificate().fingerprint256 : '';
  const chunks: Buffer[] = [];
  for await (const chunk of res) chunks.push(chunk as Buffer);
  const text = Buffer.concat(chunks).toString();
  const { statusCode, headers: own, rawHeaders } = res;
  return { status: statusCode!, headers: own, rawHeaders, text, json: jsonIn(text), fingerprint };
}

/** A send of which the test writes the body itself. */
function beginSend(
  to: Address,
  headers: http.OutgoingHttpHeaders,
  agent: http.Agent | false = false,
): http.ClientRequest {
  return http.request({ host: '127.0.0.1', port: to.port, method: 'POST', path: '/v2/send', agent, headers });
}

/** A connection of its own that has sent exact bytes, and all that has come back on it. */
function connect({ port, host = '127.0.0.1', ca }: Address, bytes: string | Buffer = ''): Connection {
  const socket = ca ? tlsConnect({ port, host, ca, servername: 'localhost' }) : net.connect(port, host);
  let text = '';
  socket.on('error', () => {}).on('data', (chunk) => {
    text += chunk.toString('latin1');
  });
  socket.write(bytes);
  return { socket, text: () => text };
}

interface Connection {
  socket: net.Socket;
  text: () => string;
}

/** One that a test may leave open. */
function open(t: TestContext, to: Address, bytes?: string | Buffer): Connection {
  const connection = connect(to, bytes);
  t.after(() => connection.socket.destroy());
  return connection;
}

/** Sends exact bytes and returns all that comes back until the other side closes. */
async function raw(to: Address, bytes: string | Buffer): Promise<string> {
  const { socket, text } = connect(to, bytes);
  await closed(socket);
  return text();
}

/** All that comes back on a connection that has sent exact bytes, and goes on with single ones until it is closed. */
async function trickle(t: TestContext, to: Address, bytes: string): Promise<string> {
  const { socket, text } = open(t, to, bytes);
  const timer = setInterval(() => socket.write('x'), 5);
  t.after(() => clearInterval(timer));
  await closed(socket);
  clearInterval(timer);
  return text();
}

/** Waits for a socket to be closed, politely or not. */
function closed(socket: net.Socket): Promise<void> {
  return socket.closed ? Promise.resolve() : new Promise((resolve) => socket.once('close', () => resolve()));
}

/** A raw request with a raw target. */
function rawRequest(
  to: Address,
  target: string,
  { method = 'GET', headers = [] as string[], body = '' } = {},
): Promise<string> {
  const length = body || method !== 'GET' ? [`Content-Length: ${Buffer.byteLength(body)}`] : [];
  return raw(
    to,
    Buffer.from(
      [`${method} ${target} HTTP/1.1`, 'Host: gateway', 'Connection: close', ...headers, ...length, '', body].join(
        '\r\n',
      ),
      'latin1',
    ),
  );
}

const statusOf = (response: string): number => Number(/^HTTP\/1\.1 (\d{3})/.exec(response)?.[1]);
const codeOf = (response: string): string | undefined => /"code":"(\w+)"/.exec(response)?.[1];

/** The answer refuses in the form that all refusals have, the log knows it, and the backend saw nothing. */
function assertDenied(
  answer: Answer,
  status: number,
  code: string,
  { backend, gateway }: { backend: Backend; gateway: Gateway },
  before = { seen: 0, connections: 0 },
): void {
  assert.equal(answer.status, status, answer.text);
  assert.match(answer.headers['content-type'] ?? '', /^application\/json/);
  assert.match(answer.text, /^\{.*\}\n$/); // a line of its own on a terminal
  assert.deepEqual(Object.keys(answer.json), ['error', 'code', 'requestId']);
  assert.equal(answer.json.code, code);
  const { 'x-request-id': id, 'x-content-type-options': sniffing, 'cache-control': caching } = answer.headers;
  assert.deepEqual([id, sniffing, caching], [answer.json.requestId, 'nosniff', 'no-store']);
  const line = requests(gateway).find((entry) => entry.requestId === answer.json.requestId);
  assert.equal(line?.status, status);
  assert.equal(line?.code, code);
  assert.equal(backend.seen.length, before.seen, 'the backend saw a request');
  assert.equal(backend.connections, before.connections, 'the backend saw a connection');
}

/** The lines of requests in the log; a test that asks for the first one knows that it is there. */
function requests(gateway: Running): [LogLine, ...LogLine[]] {
  return logLines(gateway.log).filter((line) => line.message === 'request') as [LogLine, ...LogLine[]];
}

const logLines = (lines: string[]): LogLine[] => lines.map((line) => JSON.parse(line));

/** Waits for a condition by asking again and again; what has not come after a minute will not come. */
async function until(condition: () => boolean): Promise<void> {
  const giveUpMs = Date.now() + 60_000;
  while (!condition()) {
    assert.ok(Date.now() < giveUpMs, `waited in vain for ${condition}`);
    await new Promise((resolve) => setTimeout(resolve, 2));
  }
}

const basic = (userinfo: string): string => `Basic ${Buffer.from(userinfo).toString('base64')}`;

/** A small seeded generator (mulberry32), so that a failure can be replayed. */
function seeded(seed: number): (below: number) => number {
  let state = seed;
  return (below) => {
    state = (state + 0x6d2b79f5) | 0;
    let x = Math.imul(state ^ (state >>> 15), 1 | state);
    x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
    return ((x ^ (x >>> 14)) >>> 0) % below;
  };
}

const ALL_FORMS: GatewayConfig = { auth: { methods: ['bearer', 'basic', 'query', 'path', 'body'] } };

/** Headers that hold a token besides the place where it belongs, in the spellings that programs make of it. */
function copiesOf(token: string): http.OutgoingHttpHeaders[] {
  const encoded = Array.from(Buffer.from(token), (byte) => `%${byte.toString(16)}`).join('');
  return [
    {
      'referer': `http://gateway/@auth=${token}/swagger/index.html`,
      'x-original-url': `/@auth=${token}/v2/send`,
      'x-original-uri': `/v2/send?@auth=${token}`,
      'x-original-method': token,
      'x-rewrite-url': `/v2/send?%40auth=${encoded}`,
      'x-envoy-original-path': `/@auth=${token}/v2/send`,
      'x-forwarded-uri': `/@auth=${token}/v2/send`,
      'cookie': `auth=${token}`,
    },
    { 'origin': `http://api:${token}@gateway`, 'host': `api:${token}@gateway` },
    { 'origin': `http://api:${encoded}@gateway`, 'host': `api:${encoded}@gateway` },
    { host: token },
    {
      'x-token': token,
      'x-request-uri': `/@auth=${encoded}/v2/send`,
      'x-auth-request-redirect': `/login?to=${encodeURIComponent(`/@auth=${encoded}/v2/send`)}`,
      'x-amzn-remapped-authorization': basic(`api:${token}`),
      'x-authorization': encodeURIComponent(basic(token)),
      'x-base64url': Buffer.from(`?>${token}?>`).toString('base64url'),
      'x-list': `a, "${Buffer.from(`api:${token}`).toString('base64')}", b`,
    },
  ];
}

const T = 'the-token';

function post(token: string, length: number | 'chunked', ...headers: string[]): string {
  const framing = length === 'chunked' ? 'Transfer-Encoding: chunked' : `Content-Length: ${length}`;
  return ['POST /v2/send HTTP/1.1', 'Host: x', `Authorization: Bearer ${token}`, framing, ...headers, '', ''].join(
    '\r\n',
  );
}

const ABOUT = `GET /v1/about HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n\r\n`;
const SEND = `${post(SECRET, HELLO.length)}${HELLO}`;

function folder(t: TestContext): string {
  const path = mkdtempSync(join(tmpdir(), 'gateway-'));
  t.after(() => rmSync(path, { recursive: true }));
  return path;
}

/** The mistakes that a configuration is refused for. */
function problemsOf(load: () => unknown): readonly string[] {
  try {
    load();
  } catch (error) {
    assert.ok(error instanceof ConfigError, String(error));
    return error.problems;
  }
  return [];
}

/** How this runtime starts a TypeScript file: as it started this one. */
const LOADER = process.execArgv.flatMap((flag, i, all) =>
  flag === '--import' ? [flag, all[i + 1]!] : flag.startsWith('--import=') ? [flag] : []
);

type Program = [file: string, ...args: string[]];

/** The file under test as it is started by hand. */
const AS_IT_IS: Program = [process.execPath, ...LOADER, fileURLToPath(FILE)];
let compiled: Program | undefined;

/** The gateway as tests start it. On Node the first one compiles it: each start by tsx takes half a second. */
function program(): Program {
  if (!isNode || FILE.pathname.endsWith('.js')) return AS_IT_IS;
  if (compiled) return compiled;
  const dir = mkdtempSync(join(tmpdir(), 'gateway-'));
  process.once('exit', () => rmSync(dir, { recursive: true }));
  const [tsc, ...args] = PACKAGE.scripts.build.split(' ').map((word: string) => word === 'dist' ? dir : word);
  writeFileSync(join(dir, 'package.json'), '{ "type": "module" }');
  execFileSync(join(HERE, 'node_modules/.bin', tsc), args, { cwd: HERE });
  return compiled = [process.execPath, join(dir, 'gateway.js')];
}

/** A program in a file of its own. */
function script(t: TestContext, code: string): Program {
  const file = join(folder(t), 'script.mjs');
  writeFileSync(file, code);
  return [process.execPath, file];
}

function start(
  args: string[],
  env: NodeJS.ProcessEnv = {},
  [file, ...first]: Program = program(),
): ChildProcess & { output: () => string } {
  const child = spawn(file, [...first, ...args], { cwd: HERE, env: { PATH: process.env.PATH, ...env } });
  let output = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (chunk) => {
      output += chunk;
    });
  }
  return Object.assign(child, { output: () => output });
}

interface Process extends Running {
  child: ChildProcess;
  output(): string;
  /** Sends a signal, after which it must end by itself, and well. */
  close(signal?: NodeJS.Signals): Promise<void>;
}

/** A gateway in a process of its own, with one token where it is given a backend. Its log are the lines it prints. */
async function startProcess(
  t: TestContext,
  { backend, args = [], env = {}, program }: {
    backend?: { url: string };
    args?: string[];
    env?: NodeJS.ProcessEnv;
    program?: Program;
  },
): Promise<Process> {
  const own = backend && { API_TOKENS: SECRET, BACKEND_URL: backend.url };
  const child = start(args, { LISTEN: '127.0.0.1:0', LOG_FORMAT: 'json', ...own, ...env }, program);
  t.after(() => child.kill('SIGKILL'));
  const listening = (): RegExpExecArray | null => /"message":"listening","listen":"(.*?)".*\n/.exec(child.output());
  await until(() => listening() !== null);
  const [, url = ''] = listening()!;
  return {
    ...addressOf(url),
    url,
    child,
    output: child.output,
    get log() {
      return child.output().split('\n').slice(0, -1);
    },
    async close(signal = 'SIGTERM') {
      const ended = once(child, 'exit');
      process.kill(child.pid!, signal); // after a child.kill, Deno 2.9 tells no exit code
      assert.deepEqual(await ended, [0, null], child.output());
    },
  };
}

/** Runs a process to its end. */
async function runProcess(
  args: string[],
  { env = {}, input = '', program }: { env?: NodeJS.ProcessEnv; input?: string; program?: Program } = {},
): Promise<{ code: number; stdout: string; stderr: string }> {
  const child = start(args, env, program);
  let [stdout, stderr] = ['', ''];
  child.stdout!.on('data', (chunk) => {
    stdout += chunk;
  });
  child.stderr!.on('data', (chunk) => {
    stderr += chunk;
  });
  child.stdin!.end(input);
  const [code] = await once(child, 'close') as [number];
  return { code, stdout, stderr };
}

/** Runs a command line that ends, in this process. */
const cli = async (args: string[], { env = {}, input = '' }: { env?: NodeJS.ProcessEnv; input?: string } = {}) =>
  await run(args, env, () => Buffer.from(input));

const ACCEPTED =
  'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n';
const RECEIVE = `/v1/receive/${FROM}`;
const RECEIVING: GatewayConfig = { ...ALL_FORMS, allow: ['receive', 'info', 'send'] };

interface UpgradeBackend extends Backend {
  sockets: Duplex[];
}

/** A backend in json-rpc mode; `open` says what it does with a WebSocket, by default accept it. */
async function startUpgradeBackend(t: TestContext, open: (socket: Duplex, head: Buffer) => void = (socket) => {
  socket.write(ACCEPTED);
  socket.on('end', () => socket.end());
}): Promise<UpgradeBackend> {
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

/** A token with these settings, and another beside it. */
function tokens(settings: TokenConfig, other?: TokenConfig): GatewayConfig {
  return { tokens: { test: { secret: SECRET, ...settings }, ...(other && { other: { secret: OTHER, ...other } }) } };
}

const NO_TOKENS = { tokens: undefined } as unknown as GatewayConfig;
const CONFINED: GatewayConfig = {
  allow: ['messaging', 'info'],
  tokens: { confined: { secret: SECRET, senders: [FROM], recipients: [TO, 'group.*'] } },
};
const STRANGER = '+15559999999';

/** Sends each request, with the right token unless it brings another, and sees it denied. */
function attack(title: string, config: GatewayConfig, status: number, code: string, attempts: Ask[]): void {
  test(`attack: ${title}`, async (t) => {
    const both = await startBoth(t, config);
    for (const attempt of attempts) {
      await t.test(
        JSON.stringify(attempt).replaceAll(SECRET, '…').slice(0, 140),
        async () =>
          assertDenied(
            await ask(both.gateway, { ...attempt, headers: { ...BEARER, ...attempt.headers } }),
            status,
            code,
            both,
          ),
      );
    }
  });
}

/** What the backend got, as JSON. */
const gotJson = (backend: Backend): Record<string, unknown> => JSON.parse(String(backend.seen.at(-1)!.body));

/** A form as browsers and libraries write it. */
function multipart(
  fields: [name: string, value: string, more?: string][],
): { headers: http.OutgoingHttpHeaders; body: string } {
  const parts = fields.map(([name, value, more = '']) =>
    `--limit\r\nContent-Disposition: form-data; name="${name}"${more}\r\n\r\n${value}\r\n`
  );
  return {
    headers: { ...BEARER, 'content-type': 'multipart/form-data; boundary=limit' },
    body: `${parts.join('')}--limit--\r\n`,
  };
}

const CERTS = [
  {
    cert:
      '-----BEGIN CERTIFICATE-----\nMIIBnDCCAUGgAwIBAgIUQWdv+xGmuEl9nX9ewMfxudPTZBEwCgYIKoZIzj0EAwIw\nFDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMTAzMTAyMVoYDzIxMjYxMDI4\nMDMxMDIxWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO\nPQMBBwNCAARRM76Gw5purxaOY8padP39ccCvAIWm8HlEYUY9oIqgSs/3DbbxcF6t\nTQRevBFDfo0QO57CcyIRAI5gQeUcFDKco28wbTAdBgNVHQ4EFgQU/v8b+g/8ndoA\nm8b1xzKP/tvKhN4wHwYDVR0jBBgwFoAU/v8b+g/8ndoAm8b1xzKP/tvKhN4wDwYD\nVR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI\nzj0EAwIDSQAwRgIhALTPRt0n7E8XbuttJEAOV16lUhf/l+7hpZ28c5l2N2PAAiEA\n6AbxCXeLEaPOWPoIi4KBjQZy22Z6dBRnOXdeAKeLnPQ=\n-----END CERTIFICATE-----',
    key:
      '-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgNEN9dKKi90ENz1Fx\nmQXmA+AH+lUDR5JbbvE7W00dSoOhRANCAARRM76Gw5purxaOY8padP39ccCvAIWm\n8HlEYUY9oIqgSs/3DbbxcF6tTQRevBFDfo0QO57CcyIRAI5gQeUcFDKc\n-----END PRIVATE KEY-----',
  },
  {
    cert:
      '-----BEGIN CERTIFICATE-----\nMIIBmzCCAUGgAwIBAgIUAi0vbPmxDoq0UezE48LfTuco5QMwCgYIKoZIzj0EAwIw\nFDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMTAzMTAyMVoYDzIxMjYxMDI4\nMDMxMDIxWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO\nPQMBBwNCAASDY5doP+J4qegltj/JTle2PFbosk72SsF76L7qAU77bUkrOr7pAOJ5\nMJkYdGVZJhMLf43VFQfIWrI9RZhq55MJo28wbTAdBgNVHQ4EFgQUbL0Q5k3jAGLb\nIGZGEDCL1ToRfVkwHwYDVR0jBBgwFoAUbL0Q5k3jAGLbIGZGEDCL1ToRfVkwDwYD\nVR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI\nzj0EAwIDSAAwRQIgBHEQv7zraccRcKsH5zV+bjSOiPkNjSW1k4jLst25TdMCIQCK\nwJGLGCn1YZNcxONgKaZUnha2rz0arAQ5YTYdMDI3Lw==\n-----END CERTIFICATE-----',
    key:
      '-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgr8z/a2vOzJnvjM3H\nfJ//tl9FARPOVaxjnyMbvysUme2hRANCAASDY5doP+J4qegltj/JTle2PFbosk72\nSsF76L7qAU77bUkrOr7pAOJ5MJkYdGVZJhMLf43VFQfIWrI9RZhq55MJ\n-----END PRIVATE KEY-----',
  },
] as const;

function certificate(t: TestContext): { cert: string; key: string } {
  const dir = folder(t);
  const tls = { cert: join(dir, 'cert.pem'), key: join(dir, 'key.pem') };
  writeFileSync(tls.cert, CERTS[0].cert);
  writeFileSync(tls.key, CERTS[0].key);
  return tls;
}

const MIB = 1024 * 1024;

/** The fenced blocks of a language in README.md and RECIPES.md. */
function blocks(language: string): string[] {
  const fence = new RegExp('^```(?:' + language + ')\\n([^]*?)^```$', 'gm');
  return Array.from((README + COOKBOOK).matchAll(fence), (match) => match[1]!);
}

/**
 * A table is a test of many requests, one a row, and of what must come of each:
 *
 *     POST /v2/send | bearer | {"number":"…"} → 403 sender_not_allowed | reason=… | "words of the response"
 *
 * The fields before the arrow are the request, in any order, each known by its look:
 *   POST /v2/send   a method and a target, or a target alone
 *   bearer          or `bearer TOKEN`, `basic`, `basic USER:PASSWORD`, `none`
 *   Name: value     a header
 *   {"a":1}         a JSON body, as it stands
 *   'text'          another body, with the escapes \r \n \t \uHHHH and \xHH, which is a byte
 *   -- a = b -- f; filename="x" = c   a multipart form
 *   @ {…}           settings of the token, for this row
 * The fields behind it are what must come of it:
 *   403 code        a status, and a code if the gateway refuses; `passes` is any status of the backend
 *   GET /x          what the backend got; {…} or 'text': the body that it got, as JSON or in bytes
 *   same            it got the request's body, or one with its text as the message
 *   > Name: value   a header that it got; without a value, that it did not get
 *   Name: value     a header of the response; `name=value`: a field of the log line
 *   "words"         what the response holds
 *
 * A line that begins with * is a row too: the rows after it take from it what they do not say (JSON that the backend
 * got is laid over its). If there are several, every row is sent in each of these ways. A line that begins with # is a
 * comment. Short rows share a line, separated by two semicolons.
 *
 * For every status from 400 on the backend must have seen nothing; for every other, one request. No row may show a
 * token to the backend, to the client or in the log, or a phone number in the log.
 *
 *     table(title, config)`            table(title, config)([
 *       * bearer → 201                   '* bearer → 201',
 *       {"message":"…"}`;                ...messages.map((message) => `{"message":"${message}"}`),
 *                                      ]);
 */
function table(title: string, config: GatewayConfig, { handler, ...options }: TableOptions = {}) {
  return (rows: Rows | TemplateStringsArray, ...values: unknown[]): void =>
    void test(title, async (t) => {
      const backend = await startBackend(t, handler);
      const gateway = await startGateway(t, backend, config, options);
      await checkRows({ backend, gateway }, isTemplate(rows) ? literal(rows, ...values) : rows);
    });
}

/** String.raw, in which a list is as many lines. */
function literal({ raw }: TemplateStringsArray, ...values: unknown[]): string {
  const lists = values.map((value) => Array.isArray(value) ? value.join('\n') : value);
  return String.raw({ raw: 'Bun' in globalThis ? raw.map(asWritten) : raw }, ...lists);
}

/** Bun 1.4 has escapes, in capitals, in the place of letters beyond ASCII. */
function asWritten(raw: string): string {
  return raw.replace(
    /\\u(?:(?!00[0-7]|D[89A-F])([0-9A-F]{4})|\{([0-9a-f]+)\})/g,
    (_, four, more) => String.fromCodePoint(parseInt(four ?? more, 16)),
  );
}

type TableOptions = GatewayOptions & { handler?: Handler };
type Rows = string | Rows[];

const flatten = (rows: Rows): string[] => typeof rows === 'string' ? [rows] : rows.flatMap(flatten);
const isTemplate = (rows: Rows | TemplateStringsArray): rows is TemplateStringsArray =>
  typeof rows === 'object' && 'raw' in rows;

/** Sends the rows of a table, one after the other, to a gateway that runs. */
async function checkRows(both: Both, rows: Rows): Promise<void> {
  let ways: string[] = [''];
  let isFirst = false; // of the ways
  const lines = flatten(rows).join('\n').split(/\n| ;; /).map((line) => line.trim());
  for (const line of lines.filter((text) => text !== '' && !text.startsWith('#'))) {
    if (line.startsWith('* ')) {
      ways = [...(isFirst ? ways : []), line.slice(2)];
      isFirst = true;
      continue;
    }
    isFirst = false;
    for (const way of ways) {
      try {
        await checkRow(both, parseRow(line, parseRow(way)));
      } catch (error) {
        throw new Error(`${line.slice(0, 400)} (${way.slice(0, 400)}): ${(error as Error).message}`, { cause: error });
      }
    }
  }
}

interface Both {
  backend: Backend;
  gateway: Gateway;
}

interface Row {
  method?: string;
  target?: string;
  headers: [name: string, value: string][];
  body?: Buffer;
  settings?: string;
  /** What must come of it. */
  status?: string;
  code?: string;
  line?: string;
  json?: object;
  bytes?: Buffer;
  isSame?: boolean;
  got: [name: string, value: string][];
  log: [name: string, value: string][];
  answered: [name: string, value: string][];
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
  const pair = (field: string, separator: string): [string, string] => {
    const [name = '', ...rest] = field.split(separator);
    return [name, rest.join(separator).trim()];
  };
  for (const field of request.split(' | ').map((part) => part.trim()).filter(Boolean)) {
    const [word = '', rest = ''] = pair(field, ' ');
    if (field.startsWith("'")) row.body = unescaped(field.slice(1, -1));
    else if (/^["{[]/.test(field)) row.body = Buffer.from(field);
    else if (field.startsWith('-- ')) {
      const parts = field.slice(3).split(' -- ').map((part) => /^([^;=]*?)(;.*?)? = ?(.*)$/s.exec(part)!);
      row.body = unescaped(multipart(parts.map(([, name = '', more = '', value = '']) => [name, value, more])).body);
    } else if (word === '@') row.settings = rest;
    else if (word === 'none') own.add('authorization');
    else if (word === 'bearer') add('Authorization', `Bearer ${rest || SECRET}`);
    else if (word === 'basic') add('Authorization', basic(rest || `api:${SECRET}`));
    else if (/^[\w-]+:/.test(field)) add(...pair(field, ':'));
    else if (field.startsWith('/')) row.target = field;
    else [row.method, row.target] = [word, rest];
  }
  if (/(?:^| \| )-- /.test(request) && !own.has('content-type')) {
    add('Content-Type', 'multipart/form-data; boundary=limit');
  }
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

/** Fields with one more, or another value of one. */
const put = (fields: [string, string][], [name, value]: [string, string]): [string, string][] => [
  ...fields.filter(([known]) => known !== name),
  [name, value],
];

/** The bytes of a text in UTF-8; \xHH is a byte of its own. */
function unescaped(text: string): Buffer {
  const controls: Record<string, string> = { r: '\r', n: '\n', t: '\t' };
  return Buffer.concat(
    text.split(/\\x([0-9a-f]{2})/i).map((part, i) =>
      i % 2 === 1 ? Buffer.from(part, 'hex') : Buffer.from(
        part.replace(/\\u(\w{4})|\\([rnt\\])/g, (_, code: string, control: string) =>
          code ? String.fromCharCode(parseInt(code, 16)) : controls[control] ?? control),
      )
    ),
  );
}

/** One request in exact bytes. */
async function sendRow(to: Address, row: Row): Promise<Answer> {
  const { body, method = body ? 'POST' : 'GET', target = body ? '/v2/send' : '/v1/about', headers } = row;
  const isChunked = headers.some(([name]) => /^transfer-encoding$/i.test(name));
  const lines = [`${method} ${target} HTTP/1.1`, 'Host: gateway', 'Connection: close'];
  for (const [name, value] of headers) lines.push(`${name}: ${value}`);
  if (!isChunked && (body || method !== 'GET')) lines.push(`Content-Length: ${body?.length ?? 0}`);
  const size = Buffer.from(isChunked && body?.length ? `${body.length.toString(16)}\r\n` : '');
  const end = Buffer.from(isChunked ? `${body?.length ? '\r\n' : ''}0\r\n\r\n` : '');
  const head = Buffer.from([...lines, '', ''].join('\r\n'));
  return parseAnswer(await raw(to, Buffer.concat([head, size, body ?? Buffer.alloc(0), end])));
}

/** The response in what came back on a connection, one character per byte. */
function parseAnswer(response: string): Answer {
  const [head = '', ...rest] = response.split('\r\n\r\n');
  const headers: Record<string, string> = {};
  for (const line of head.split('\r\n').slice(1)) {
    const [, name = '', value = ''] = /^(.*?): *(.*)$/.exec(line) ?? [];
    headers[name.toLowerCase()] = name.toLowerCase() in headers ? `${headers[name.toLowerCase()]}, ${value}` : value;
  }
  const text = Buffer.from(rest.join('\r\n\r\n'), 'latin1').toString();
  return { status: statusOf(response), headers, rawHeaders: [], text, json: jsonIn(text), fingerprint: '' };
}

async function checkRow(both: Both, row: Row): Promise<void> {
  const { backend, gateway } = both;
  gateway.useSettings(row.settings);
  const { seen, connections } = backend;
  const before = { seen: seen.length, connections };
  const answer = await sendRow(gateway, row);
  if (row.status !== 'passes') assert.equal(String(answer.status), row.status, answer.text);
  const isRefused = row.status !== 'passes' && answer.status >= 400;
  if (isRefused && row.code && row.method !== 'HEAD') assertDenied(answer, answer.status, row.code, both, before);
  assert.equal(seen.length - before.seen, isRefused ? 0 : 1, 'the requests that the backend saw');
  const got = seen.at(-1);
  if (!isRefused) {
    const text = String(row.body);
    const same = row.isSame && (text.startsWith('{') ? JSON.parse(text) : { message: text });
    if (row.line) assert.equal(`${got!.method} ${got!.url}`, row.line, 'what the backend got');
    if (row.json || same) assert.deepEqual(gotJson(backend), { ...row.json, ...same }, 'the body that the backend got');
    if (row.bytes) assert.ok(got!.body.equals(row.bytes), `the bytes that the backend got: ${got!.body}`);
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
  if (row.log.length > 0) await until(() => requests(gateway).some(own));
  for (const [name, value] of row.log) assert.equal(String(requests(gateway).findLast(own)![name]), value, name);
}

section('PROBLEMS'); // ────────────────────────────────────────────────────────────────────────────

test('a mistake of the gateway itself is a 500 that tells nothing of it, and its stack is in the log', async (t) => {
  let calls = -1000; // of the clock; the second one of a request is made while the token is looked at
  const now = (): number => {
    if (++calls === 2) throw new RangeError('the clock is broken');
    return Date.now();
  };
  const both = await startBoth(t, {}, { now });
  calls = 0;
  const answer = await ask(both.gateway, { body: MESSAGE, headers: BEARER });
  assertDenied(answer, 500, 'internal_error', both);
  assert.doesNotMatch(answer.text, /clock/);
  const line = logLines(both.gateway.log).find(({ message }) => message === 'internal error');
  assert.match(String(line?.stack), /RangeError: the clock is broken\n +at /);
  assert.equal(line?.requestId, answer.json.requestId);
});

section('GATEWAY'); // ─────────────────────────────────────────────────────────────────────────────

const REFUSED = [400, 'bad_request'] as const;

test('what the HTTP parser refuses is told in JSON, and logged once a minute for each kind', async (t) => {
  let now = Date.now();
  const both = await startBoth(t, { log: { format: 'json', level: 'info' } }, { now: () => now });
  const [host, auth] = ['Host: x\r\n', `Authorization: Bearer ${SECRET}\r\n`];
  const about = `GET /v1/about HTTP/1.1\r\n${host}${auth}`;
  const lines = `POST /v2/send HTTP/1.1\r\n${host}${auth}`;
  const padding = 'x'.repeat(17_000);
  const rows: (readonly [string, number, string])[] = [
    ['rubbish\r\n\r\n', ...REFUSED],
    ['\0\0\0\0', ...REFUSED],
    [`GET /v1/about?a=b c HTTP/1.1\r\n${host}${auth}\r\n`, ...REFUSED],
    [`GET /v1/about?a=ü HTTP/1.1\r\n${host}${auth}\r\n`, ...REFUSED],
    [`GET /v1/about?a=\xfc HTTP/1.1\r\n${host}${auth}\r\n`, ...REFUSED],
    [`GET /v1/about HTTP/1.1\nHost: x\nAuthorization: Bearer ${SECRET}\n\n`, ...REFUSED],
    [`${about}Bad Header\r\n\r\n`, ...REFUSED],
    [`${lines}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n`, ...REFUSED],
    [`${lines}Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   `, ...REFUSED],
    [`GET / HTTP/9.9\r\n${host}\r\n`, ...REFUSED],
    ['PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', ...REFUSED],
    [`${about}X: ${padding}\r\n\r\n`, ...TOO_MANY],
    [`GET /v1/about?${padding} HTTP/1.1\r\n${host}${auth}\r\n`, ...TOO_MANY],
    [`${about}X: ${padding.repeat(20)}\r\n\r\n`, ...TOO_MANY],
  ];
  for (const [bytes, status, code] of rows) {
    const response = await raw(both.gateway, Buffer.from(bytes, bytes.includes('ü') ? 'utf8' : 'latin1'));
    assert.deepEqual([statusOf(response), codeOf(response)], [status, code], bytes.slice(0, 60));
    const [head = '', body = ''] = response.split('\r\n\r\n');
    assert.match(head, /\r\nConnection: close(\r\n|$)/i);
    assert.deepEqual(Object.keys(JSON.parse(body)), ['error', 'code', 'requestId']);
    if (status === 400) assert.match(body, /percent-encode URLs .* Content-Length or chunked/);
  }
  const warnings = (): unknown[] =>
    logLines(both.gateway.log).flatMap(({ level, code, client }) => level === 'warn' ? [[code, client]] : []);
  const once = [['bad_request', '127.0.0.1'], ['too_many_headers', '127.0.0.1']];
  assert.deepEqual(warnings(), once);
  now += 60_001;
  for (const [bytes] of rows.slice(-2)) await raw(both.gateway, bytes);
  assert.deepEqual(warnings(), [...once, once[1]]);
  const { socket } = open(t, both.gateway);
  socket.end();
  await closed(socket.resume());
  assert.equal(both.backend.connections, 0);
  assert.equal((await ask(both.gateway, { headers: BEARER })).status, 200);
  assert.equal(requests(both.gateway).length, 1);
});

// node:http itself answered the first with an empty 400, and let the versions pass.
test('a request without Host, or of another version than 1.0 and 1.1, is 400, and the connection closes', async (t) => {
  const both = await startBoth(t);
  const auth = `Authorization: Bearer ${SECRET}\r\n`;
  const upgrade = 'Connection: Upgrade\r\nUpgrade: h2c\r\n';
  for (
    const head of [
      `GET /v1/about HTTP/1.1\r\n${auth}`,
      `GET /v1/about HTTP/1.1\r\n${auth}${upgrade}`,
      `GET /v1/about HTTP/2.0\r\nHost: x\r\n${auth}`,
      `GET /v1/about HTTP/2.0\r\nHost: x\r\n${auth}${upgrade}`,
      `GET /v1/about HTTP/0.9\r\nHost: x\r\n${auth}`,
      `GET /v1/about\r\nHost: x\r\n${auth}`,
    ]
  ) {
    const response = await raw(both.gateway, `${head}\r\n`);
    assert.deepEqual([statusOf(response), codeOf(response)], REFUSED, head);
    assert.match(response, /\r\nConnection: close\r\n/i);
  }
  assert.equal(both.backend.connections, 0);
  assert.equal(statusOf(await raw(both.gateway, `GET /v1/about HTTP/1.0\r\n${auth}\r\n`)), 200);
});

// The 400 took the place of the response that was due, or of its rest.
test('what the HTTP parser refuses behind a request that is being served does not touch its response', async (t) => {
  let finish = (): void => {};
  const backend = await startBackend(t, (req, res) => {
    req.resume();
    if (req.url === '/v1/about?b') res.write('first, ');
    finish = () => void res.end('and last');
  });
  const gateway = await startGateway(t, backend);
  for (const begins of [false, true]) {
    const { socket, text } = open(t, gateway, ABOUT.replace('about', begins ? 'about?b' : 'about'));
    await until(() => backend.seen.length === 1 && (!begins || text().includes('first, ')));
    for (const piece of [`${ABOUT}GET /a b HTTP/1.1\r\n`, '\r\n', 'more rubbish']) {
      socket.write(piece);
      await ask(gateway, { path: '/healthz' });
    }
    finish();
    await closed(socket);
    assert.match(text(), begins ? /first, [^]*and last/ : /^HTTP\/1\.1 200 [^]*and last/);
    assert.equal(text().match(/HTTP\/1\.1/g)!.length, 1);
    assert.equal(backend.seen.splice(0).length, 1);
  }
  // A client that leaves after that is noticed.
  const { socket } = open(t, gateway, ABOUT);
  await until(() => backend.seen.length === 1);
  socket.write('rubbish\r\n\r\n', () => socket.destroy());
  await until(() => requests(gateway).some((line) => line.code === 'client_left'));
});

test('a body that is framed wrongly is 400, and so is one without a length; one that breaks off is the client that left', async (t) => {
  const both = await startBoth(t, {}, { stallTimeoutMs: 4000 });
  const chunked =
    `POST /v2/send HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\nTransfer-Encoding: chunked\r\n`;
  for (
    const request of [
      `${chunked}\r\nzz\r\n{}`,
      `${chunked}\r\n2\r\n{}xx\r\n`,
      `${chunked.replace('chunked', 'gzip')}\r\n{}`,
      // Bun 1.4.5 serves the request first, and refuses its body then.
      ...'Bun' in globalThis ? [] : [
        `${chunked.replace(/Transfer.*/, '')}${JSON.stringify(MESSAGE)}`,
        `POST /v2/send HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n${JSON.stringify({ ...MESSAGE, auth: SECRET })}`,
      ],
    ]
  ) {
    const response = await raw(both.gateway, request);
    assert.deepEqual([statusOf(response), codeOf(response)], REFUSED, request);
    assert.match(response, /\r\nConnection: close\r\n/i);
    assert.equal(requests(both.gateway).at(-1)!.code, 'bad_request');
  }
  const { socket } = open(t, both.gateway);
  socket.write(`${post(SECRET, 100)}{`, () => socket.destroy());
  await until(() => requests(both.gateway).at(-1)!.code === 'client_left');
  assert.equal(both.backend.connections, 0);
});

test('CONNECT is refused like every target that is no path, and its connection is closed', async (t) => {
  const both = await startBoth(t);
  const response = await raw(
    both.gateway,
    `CONNECT backend:80 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n\r\n`,
  );
  assert.match(response, /^HTTP\/1\.1 400 Bad Request\r\n[^]*Connection: close\r\n[^]*"code":"bad_target"/);
  const [line] = requests(both.gateway);
  assert.deepEqual([line.level, line.method, line.status, line.code], ['warn', 'CONNECT', 400, 'bad_target']);
  assert.equal(both.backend.connections, 0);
});

test('TLS on the plain port is a warning, once a minute', async (t) => {
  let now = Date.now();
  const { gateway } = await startBoth(t, { log: { format: 'json', level: 'info' } }, { now: () => now });
  const warnings = (): LogLine[] => logLines(gateway.log).filter((line) => line.level === 'warn');
  const hello = async (): Promise<void> => {
    await raw({ ...gateway, ca: [] }, '');
  };
  for (let i = 0; i < 3; i++) await hello();
  assert.deepEqual(warnings().map((line) => [line.message, line.client]), [
    ['a client speaks TLS, and this port speaks plain HTTP', '127.0.0.1'],
  ]);
  now += 60_001;
  await hello();
  assert.equal(warnings().length, 2);
});

test('a body that is not chunked as it says, while it is being relayed, leaves no document behind', async (t) => {
  const { backend, gateway } = await startBoth(t);
  const piece = `${JSON.stringify(MESSAGE).slice(0, -1)},"x":"${'A'.repeat(100_000)}`;
  const response = await raw(
    gateway,
    `POST /v2/send HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\nTransfer-Encoding: chunked\r\n\r\n${
      piece.length.toString(16)
    }\r\n${piece}\r\nxyz\r\n`,
  );
  assert.ok(response === '' || statusOf(response) === 400, response);
  assert.deepEqual(backend.sent, []);
});

test('listen() rejects when the port is taken', async (t) => {
  const backend = await startBackend(t);
  await assert.rejects(startGateway(t, backend, { listen: `127.0.0.1:${backend.port}` }), { code: 'EADDRINUSE' });
});

// A thousand idle connections of one client, which cost it nothing, locked everybody out.
test('at limits.connections a new connection is taken, and the one that has gone longest without a good token makes room', async (t) => {
  let finish = (): void => {};
  const backend = await startBackend(t, (req, res) => {
    req.resume();
    if (req.method === 'GET') res.end('{}');
    else finish = () => res.writeHead(201).end('[]');
  });
  const gateway = await startGateway(t, backend, { limits: { connections: 4 } });
  const health = 'GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n';
  const answered = async (bytes: string, known = open(t, gateway)): Promise<Connection> => {
    const before = known.text().length;
    known.socket.write(bytes);
    await until(() => known.text().length > before || known.socket.destroyed);
    return known;
  };
  const served = open(t, gateway, SEND); // the oldest, and being served for its token
  await until(() => backend.seen.length === 1);
  const known = await answered(ABOUT);
  const wrong = await answered(ABOUT.replace(SECRET, OTHER));
  const stranger = await answered(health);
  await answered(ABOUT, known); // longer ago than wrong and stranger were opened, but for this
  const next = await answered(health);
  await closed(wrong.socket);
  await answered(health);
  await closed(stranger.socket);
  await answered(health, next); // does not count: it shows no token
  const another = await answered(ABOUT);
  await closed(known.socket);
  await answered(health);
  await closed(next.socket);
  assert.deepEqual([served.socket.destroyed, another.socket.destroyed], [false, false]);
  finish();
  await until(() => served.text().includes('[]'));
  const warnings = gateway.log.filter((line) => line.includes('limits.connections is reached'));
  assert.deepEqual(logLines(warnings).map((line) => line.level), ['warn']);
});

test('a wish for another protocol, or for a WebSocket with a body, is an ordinary request', async (t) => {
  const backend = await startUpgradeBackend(t);
  const gateway = await startGateway(t, backend, RECEIVING);
  const h2c = ['Upgrade: h2c', 'HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA'];
  assert.equal(
    statusOf(await rawRequest(gateway, '/v1/about', { headers: [`Authorization: Bearer ${SECRET}`, ...h2c] })),
    200,
  );
  const body = JSON.stringify(MESSAGE);
  for (
    const [length, upgrade] of [[0, h2c], [300_000, h2c], [0, ['Upgrade: websocket']]] as const
  ) {
    const padded = body.padEnd(length);
    const { socket, text } = open(
      t,
      gateway,
      `POST /v2/send HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n${
        upgrade.join('\r\n')
      }\r\nAuthorization: Bearer ${SECRET}\r\nContent-Length: ${padded.length}\r\n\r\n${padded}`,
    );
    await until(() => statusOf(text()) === 201);
    socket.destroy();
  }
  assert.equal(backend.sent.length, 3);
  assert.equal(backend.sockets.length, 0);
  assert.equal(statusOf(await rawRequest(gateway, '/v1/about', { headers: h2c })), 401);
});

// One byte every nine seconds, on a thousand connections, and nobody else was served.
test('where there are several tokens, one is served on half of limits.connections at most, in whatever way it holds them', async (t) => {
  const tokens = { test: { secret: SECRET }, other: { secret: OTHER } };
  const hold: [name: string, arrived: number, bytes: string][] = [
    ['a send that waits for its answer', 4, SEND],
    ['a body that does not end', 0, `${post(SECRET, 1000)}{"message":"`],
    ['a refused request that goes on sending', 0, `${post(SECRET, 1_000_000_000)}{`],
    [
      'a WebSocket',
      4,
      `GET ${RECEIVE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n` +
      'Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n',
    ],
  ];
  for (const [name, arrived, bytes] of hold) {
    for (const several of [true, false]) {
      const backend = await startUpgradeBackend(t);
      backend.server.prependListener('request', (req: http.IncomingMessage, res: http.ServerResponse) => {
        if (req.url === '/v2/send') res.writeHead = res.end = () => res; // it never answers
      });
      const config = { ...RECEIVING, limits: { connections: 8 }, backend: { url: backend.url, parallel: 0 } };
      const gateway = await startGateway(t, backend, { ...config, tokens: several ? tokens : { test: tokens.test } });
      let met = 0;
      for (const event of ['request', 'upgrade']) gateway.server.on(event, () => met++);
      const held = Array.from({ length: 4 }, () => open(t, gateway, bytes));
      await until(() => met === 4 && backend.seen.length === arrived);
      const next = await ask(gateway, { headers: BEARER });
      if (several) {
        assert.deepEqual([next.status, next.json.code, next.headers['retry-after']], [503, 'busy', '10'], name);
        assert.equal(requests(gateway).at(-1)!.reason, 'half_of_connections');
        assert.equal(backend.seen.length, arrived);
        assert.equal((await ask(gateway, { headers: { authorization: `Bearer ${OTHER}` } })).status, 200);
        held[0]!.socket.destroy(); // and its place is free again
        for (let status = 503; status !== 200;) ({ status } = await ask(gateway, { headers: BEARER }));
      } else assert.equal(next.status, 200, name);
      for (const { socket } of held.slice(1)) assert.ok(!socket.destroyed, name);
    }
  }
});

test('reload: tokens and rules change for the next request; the running one ends under the old', async (t) => {
  let finish = (): void => {};
  const backend = await startBackend(t, (req, res) => {
    req.resume();
    if (req.url === '/v2/send') finish = () => res.end('{}');
    else res.end('{}');
  });
  const gateway = await startGateway(t, backend);
  const running = ask(gateway, { body: MESSAGE, headers: BEARER });
  await until(() => backend.seen.length === 1);
  gateway.reload({ tokens: { new: { secret: OTHER, allow: ['info'] } } });
  assert.equal((await ask(gateway, { headers: BEARER })).status, 401);
  assert.equal((await ask(gateway, { headers: { authorization: `Bearer ${OTHER}` } })).status, 200);
  assert.equal((await ask(gateway, { body: MESSAGE, headers: { authorization: `Bearer ${OTHER}` } })).status, 403);
  finish();
  assert.equal((await running).status, 200);
  const before = gateway.log.length;
  assert.deepEqual(problemsOf(() => gateway.reload({ tokens: { a: { secret: 'short' } } })).length, 1);
  assert.deepEqual(problemsOf(() => gateway.reload(NO_TOKENS)), [
    'tokens: there were some and now there is none; AUTH_ANONYMOUS=true would let everybody in',
  ]);
  assert.equal(gateway.log.length, before);
  assert.equal((await ask(gateway, { headers: { authorization: `Bearer ${OTHER}` } })).status, 200);
  assert.equal((await ask(gateway, {})).status, 401);
  gateway.reload({ listen: '127.0.0.1:1', tokens: { new: { secret: OTHER } } });
  assert.equal(JSON.parse(gateway.log.at(-1)!).needsRestart, 'listen');
});

test('reload: SIGHUP, a file that is replaced, half-written, broken or gone, and a secret file that disappears', async (t) => {
  const backend = await startBackend(t);
  const dir = folder(t);
  const [file, secretFile] = [join(dir, 'gateway.json'), join(dir, 'secret')];
  const write = (config: object): void => {
    writeFileSync(`${file}.new`, JSON.stringify(config));
    renameSync(`${file}.new`, file);
  };
  const base = { backend: { url: backend.url } };
  writeFileSync(secretFile, SECRET);
  write({ ...base, tokens: { a: { secretFile } } });
  const gateway = await startProcess(t, { args: ['--config', file] });
  const logged = (message: string): LogLine[] =>
    logLines(gateway.log).filter((line) => line.message.startsWith(message));
  const statusWith = async (secret: string): Promise<number> =>
    (await ask(gateway, { headers: { authorization: `Bearer ${secret}` } })).status;
  assert.equal(await statusWith(SECRET), 200);

  // The gateway compares a file with how it was at its first look, which comes soon after the start: a signal is later.
  process.kill(gateway.child.pid!, 'SIGHUP');
  await until(() => logged('reloaded').length === 1);

  // An editor replaces the file: nobody sends a signal.
  write({ ...base, tokens: { a: { secretFile }, b: { secret: OTHER } } });
  await until(() => logged('reloaded').length === 2);
  assert.deepEqual([await statusWith(SECRET), await statusWith(OTHER)], [200, 200]);

  // Each of these is reported, quotes no secret, and changes nothing.
  const bad: (() => void)[] = [
    () =>
      writeFileSync(
        file,
        JSON.stringify({ ...base, tokens: { c: { secret: 'third-secret-of-some-length' } } }).slice(0, -9),
      ),
    () => writeFileSync(file, ''),
    () => writeFileSync(file, '{}'),
    () => rmSync(file),
    () => {
      write({ ...base, tokens: { a: { secretFile }, b: { secret: OTHER } } });
      rmSync(secretFile);
    },
  ];
  for (const [i, damage] of bad.entries()) {
    damage();
    process.kill(gateway.child.pid!, 'SIGHUP');
    await until(() => logged('not reloaded').length > i);
    assert.deepEqual(
      [await statusWith(SECRET), await statusWith(OTHER), (await ask(gateway, {})).status],
      [200, 200, 401],
      String(damage),
    );
  }
  assert.match(logged('not reloaded').at(-1)!.problems, /tokens\.a\.secretFile: \S+ cannot be read.* \(ENOENT\)/);

  // The secret comes back changed, without a signal.
  const reloaded = logged('reloaded').length;
  writeFileSync(secretFile, 'fresh-secret-of-good-length');
  await until(() => logged('reloaded').length > reloaded);
  assert.deepEqual([await statusWith(SECRET), await statusWith('fresh-secret-of-good-length')], [401, 200]);

  // What comes at once is one reload: two signals, as a signal and the change of a file.
  for (const [i, signals] of [2, 1].entries()) {
    for (let n = 0; n < signals; n++) process.kill(gateway.child.pid!, 'SIGHUP');
    await until(() => logged('reloaded').length > reloaded + 1 + i);
  }
  assert.equal(logged('reloaded').length, reloaded + 3);
  assert.doesNotMatch(gateway.output(), new RegExp(`${SECRETS.source}|third-secret|fresh-secret`));
  await gateway.close();
});

test('it listens on a unix socket, replaces one that a killed gateway has left, and not one in use', async (t) => {
  const backend = await startBackend(t);
  const path = join(folder(t), 'gateway.sock');
  // A server that was killed leaves its file: this one is told to.
  const leave = `net.createServer().listen(${JSON.stringify(path)}, () => process.kill(process.pid, 'SIGKILL'))`;
  await runProcess([], { program: script(t, `import net from 'node:net'; ${leave};`) });
  assert.ok(statSync(path).isSocket(), path);
  const gateway = await startGateway(t, backend, { listen: `unix:${path}` });
  assert.equal(gateway.url, `unix:${path}`);
  assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
  assert.equal(backend.seen[0]!.headers['x-forwarded-for'], '127.0.0.1');
  await assert.rejects(startGateway(t, backend, { listen: `unix:${path}` }), { code: 'EADDRINUSE' });
  assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
  await gateway.close();
  assert.equal(statSync(path, { throwIfNoEntry: false }), undefined);
});

test('it listens on IPv6, and a client there has an IPv6 address', async (t) => {
  const { gateway } = await startBoth(t, { listen: '[::1]:0', clients: ['::1'] });
  assert.match(gateway.url, /^http:\/\/\[::1\]:\d+$/);
  assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
  assert.equal(requests(gateway)[0].client, '::1');
});

test('it speaks TLS, and a reload brings a new certificate without dropping a connection', async (t) => {
  const backend = await startUpgradeBackend(t);
  const dir = folder(t);
  const [cert, key] = [join(dir, 'cert.pem'), join(dir, 'key.pem')];
  const write = (i: 0 | 1): void => {
    writeFileSync(cert, CERTS[i].cert);
    writeFileSync(key, CERTS[i].key);
  };
  write(0);
  const config: GatewayConfig = { ...RECEIVING, tls: { cert, key } };
  const gateway = await startGateway(t, backend, config);
  assert.match(gateway.url, /^https:/);
  const agent = new https.Agent({ keepAlive: true });
  t.after(() => agent.destroy());
  const before = await ask(gateway, { body: MESSAGE, headers: BEARER, agent });
  assert.equal(before.status, 201);
  assert.deepEqual([backend.seen[0]!.headers['x-forwarded-proto'], backend.seen[0]!.headers['x-forwarded-for']], [
    'https',
    '127.0.0.1',
  ]);
  write(1);
  gateway.reload(config);
  assert.equal(
    (await ask(gateway, { headers: BEARER, agent })).fingerprint,
    before.fingerprint,
    'the open connection lives on',
  );
  const after = await ask(gateway, { headers: BEARER });
  assert.equal(after.status, 200);
  assert.equal(
    JSON.parse(gateway.log[0]!).note,
    'Bun' in globalThis ? 'on Bun, a renewed certificate is taken up only by a restart' : undefined,
  );
  // Bun 1.4.5 keeps the certificate that it began with. Where this fails, the exemption, its note at start and the
  // README's line can go.
  assert.equal(after.fingerprint === before.fingerprint, 'Bun' in globalThis);
  // Rubbish and plain HTTP end their connection, and nothing else.
  await raw({ port: gateway.port }, ABOUT);
  assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
  assert.equal(backend.seen.length, 4);
  // A WebSocket too.
  const { text } = openWebSocket(t, gateway);
  await until(() => text().startsWith('HTTP/1.1 101'));
  backend.sockets[0]!.write('hello');
  await until(() => text().endsWith('hello'));
});

// On Deno each of these was put in force, and no connection worked from then on.
test('a certificate and its key that are replaced one after the other lose no connection, nor does a broken one', async (t) => {
  const backend = await startBackend(t);
  const dir = folder(t);
  const [TLS_CERT, TLS_KEY] = [join(dir, 'cert.pem'), join(dir, 'key.pem')];
  writeFileSync(TLS_CERT, CERTS[0].cert);
  writeFileSync(TLS_KEY, CERTS[0].key);
  const gateway = await startProcess(t, { backend, env: { TLS_CERT, TLS_KEY } });
  const logged = (message: string): number => gateway.log.filter((line) => line.includes(`"${message}`)).length;
  const get = async (): Promise<string> => {
    const { status, fingerprint } = await ask(gateway, { headers: BEARER });
    assert.equal(status, 200);
    return fingerprint;
  };
  const before = await get();
  for (const text of ['', 'hello', CERTS[1].cert.slice(0, 400), CERTS[1].cert]) {
    const refused = logged('not reloaded');
    writeFileSync(TLS_CERT, text);
    process.kill(gateway.child.pid!, 'SIGHUP');
    await until(() => logged('not reloaded') > refused);
    assert.equal(await get(), before, text);
  }
  writeFileSync(TLS_KEY, CERTS[1].key); // its watcher sees it, without a signal
  await until(() => logged('reloaded') > 0);
  assert.equal(await get() === before, 'Bun' in globalThis);
  await gateway.close();
});

// Node before 26 and Deno took the whole deadline for it, and "docker stop" killed what was still running.
test('closing ends a connection on which no request has begun at once', async (t) => {
  for (const tls of [false, true]) {
    const gateway = await startGateway(t, { url: 'http://127.0.0.1:1' }, {
      shutdown: '1h',
      ...tls && { tls: certificate(t) },
    });
    const { socket: kept } = open(t, gateway, 'GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n');
    await once(kept, 'data');
    const sockets = [kept, open(t, { port: gateway.port }).socket];
    if (tls) {
      const { socket: silent } = open(t, gateway);
      await once(silent, 'secureConnect');
      sockets.push(silent);
    }
    await Promise.all(sockets.map((socket) => socket.connecting && once(socket, 'connect')));
    // One that was accepted after all of these is known to the gateway, and so are they.
    await raw(gateway, 'GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n');
    await gateway.close();
    // Bun 1.4.5 says nothing of a connection before its first byte.
    if ('Bun' in globalThis) sockets.splice(1, 1)[0]!.destroy();
    await Promise.all(sockets.map((socket) => closed(socket.resume())));
    assert.match(gateway.log.at(-1)!, /"message":"stopped"/);
  }
});

// It was read as the beginning of another TLS handshake.
test('a wish for another protocol over TLS is an ordinary request', async (t) => {
  const { backend, gateway } = await startBoth(t, { tls: certificate(t) });
  const wish =
    `GET /v1/about HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n`;
  const { text } = open(t, gateway, wish);
  await until(() => text().includes('\r\n\r\n'));
  assert.deepEqual([statusOf(text()), backend.seen[0]?.headers.upgrade], [200, undefined]);
});

// Nothing else ended it, and a thousand of them kept everybody else out.
test('a TLS handshake that is never finished ends, and plain HTTP on the TLS port is a warning', {
  skip: 'Bun' in globalThis && 'Bun 1.4.5 shows neither; it ends the first by itself, after 12 s',
}, async (t) => {
  const { gateway } = await startBoth(t, { tls: certificate(t) }, { headersTimeoutMs: 200 });
  const plain = { port: gateway.port };
  for (const begun of ['', '\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03']) {
    await raw(plain, Buffer.from(begun, 'latin1'));
  }
  for (let i = 0; i < 3; i++) await raw(plain, 'GET / HTTP/1.1\r\nHost: x\r\n\r\n');
  const warnings = logLines(gateway.log).filter((line) => line.level === 'warn');
  assert.deepEqual(warnings.map((line) => line.message), [
    'a client speaks plain HTTP or the like, and this port speaks TLS',
  ]);
});

// Linux delivers what a reset connection had sent, but not its address: the peer counted as loopback.
test('a client that resets its connection has no address, and so is nobody', async (t) => {
  const { backend, gateway } = await startBoth(t, {
    clients: ['127.0.0.1', '10.9.9.9'],
    trustedProxies: ['127.0.0.1'],
  });
  const body = JSON.stringify(MESSAGE);
  for (let i = 0; i < 20; i++) {
    const socket = net.connect({ port: gateway.port, host: '127.0.0.1', localAddress: '127.0.0.2' });
    socket.on('error', () => {});
    socket.write(
      `${post(SECRET, body.length, 'X-Forwarded-For: 10.9.9.9')}${body}`,
      () => socket.resetAndDestroy(),
    );
    await closed(socket);
  }
  assert.equal((await ask(gateway, { path: '/healthz' })).status, 200);
  assert.equal(backend.connections, 0);
  for (const line of requests(gateway)) if (line.route !== '/healthz') assert.equal(line.client, '127.0.0.2');
});

// node pauses a socket whose answers are not taken, and nothing ended that.
test('a client that sends requests and never takes its answers loses its connection', async (t) => {
  const { gateway } = await startBoth(t, {}, { stallTimeoutMs: 200 });
  const socket = net.connect(gateway.port, '127.0.0.1');
  socket.on('error', () => {});
  socket.pause();
  const request = 'GET /x HTTP/1.1\r\nHost: g\r\n\r\n'.repeat(1000);
  const more = (): void => {
    while (!socket.destroyed && socket.write(request));
  };
  socket.on('drain', more);
  more();
  await closed(socket);
  assert.equal(socket.bytesRead < socket.bytesWritten, true, 'it took no answer, and was closed');
});

test('a client that takes a large answer slowly but steadily keeps its connection', async (t) => {
  const size = 12 * 1024 * 1024;
  const backend = await startBackend(t, (_, res) => res.end(Buffer.alloc(size, 'x')));
  const gateway = await startGateway(t, backend, {}, { stallTimeoutMs: 1000 });
  const req = http.get({ host: '127.0.0.1', port: gateway.port, path: '/v1/about', agent: false, headers: BEARER });
  const [res] = await once(req, 'response') as [http.IncomingMessage];
  let got = 0;
  for await (const chunk of res) {
    got += (chunk as Buffer).length;
    // More in all than it may stall.
    if (got % (1 << 20) < (chunk as Buffer).length) await new Promise((resolve) => setTimeout(resolve, 100));
  }
  assert.equal(got, size);
});

// A queued answer never emitted "close", so its request was never aborted, nor logged.
test('pipelined requests are answered one at a time and in order, and all are aborted when the client leaves', async (t) => {
  const order: string[] = [];
  const backend = await startBackend(t, (req, res) => {
    order.push(req.url!);
    if (!req.url!.includes('hang')) setImmediate(() => res.end(req.url));
  });
  const gateway = await startGateway(t, backend);
  const request = (x: string): string =>
    `GET /v1/about?${x} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n\r\n`;
  const { socket, text } = open(t, gateway, ['a', 'b', 'c', 'hang', 'd'].map(request).join(''));
  await until(() => order.length === 4);
  assert.deepEqual(order, ['/v1/about?a', '/v1/about?b', '/v1/about?c', '/v1/about?hang']);
  assert.equal(text().match(/HTTP\/1\.1 200/g)?.length, 3);
  socket.destroy();
  await until(() => requests(gateway).length === 4);
  assert.equal(requests(gateway)[3]!.status, 499);
  assert.equal(order.length, 4);
});

// A setting that needs a restart was taken over all the same, and then mistaken for what is.
test('a reload that moves a gateway on a unix socket elsewhere leaves it where it is', async (t) => {
  const backend = await startBackend(t);
  const gateway = await startGateway(t, backend, { listen: `unix:${join(folder(t), 'gateway.sock')}` });
  for (let i = 0; i < 2; i++) {
    gateway.reload({ listen: '127.0.0.1:0' });
    assert.equal(JSON.parse(gateway.log.at(-1)!).needsRestart, 'listen');
    assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
  }
});

// The header went as a whole, and with it what it said of others.
test('a request whose wish to be upgraded is not heard keeps the rest of its Connection header', async (t) => {
  const backend = await startBackend(t, (_, res) => res.end('{}'));
  const gateway = await startGateway(t, backend);
  const response = await raw(
    gateway,
    `GET /v1/about HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, X-Hop, close\r\nUpgrade: h2c\r\nX-Hop: secret\r\nAuthorization: Bearer ${SECRET}\r\n\r\n`,
  );
  assert.equal(statusOf(response), 200);
  assert.equal(backend.seen[0]!.headers['x-hop'], undefined);
});

// node:http lost what came in one piece behind such a request, and took the next piece for a request of its own.
test('attack: a request hidden in the body of one that follows a wish to be upgraded', async (t) => {
  const { backend, gateway } = await startBoth(t);
  const message = JSON.stringify(MESSAGE);
  const inner = `${post(SECRET, message.length, 'Connection: close')}${message}`;
  const { socket, text } = open(
    t,
    gateway,
    `GET /v1/about HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n` +
      post(SECRET, inner.length),
  );
  await until(() => backend.seen.length === 1 && statusOf(text()) === 200);
  socket.end(inner);
  await closed(socket);
  assert.deepEqual(backend.seen.map((seen) => seen.url), ['/v1/about']);
  assert.deepEqual(backend.sent, []);
});

// The first answer landed among the bytes of the WebSocket. (Skipped on Bun 1.4.5, which reads no further before it has
// answered: there the client waits for ever.)
test('a wish to be upgraded behind a request that is not answered yet ends the connection', {
  skip: 'Bun' in globalThis,
}, async (t) => {
  for (const protocol of ['websocket', 'h2c']) {
    const backend = await startBackend(t, (req) => {
      req.resume();
    });
    const gateway = await startGateway(t, backend, RECEIVING);
    const { socket, text } = open(
      t,
      gateway,
      ABOUT,
    );
    await until(() => backend.seen.length === 1);
    socket.write(
      `GET ${RECEIVE} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: ${protocol}\r\nAuthorization: Bearer ${SECRET}\r\n\r\n`,
    );
    // Where node:http itself hears of h2c, it waits for its turn like any other request.
    if (protocol === 'h2c') socket.destroy();
    await closed(socket);
    await until(() => requests(gateway).some((line) => line.status === 499));
    assert.equal(text(), '');
    assert.equal(backend.seen.length, 1);
  }
});

section('PIPELINE'); // ────────────────────────────────────────────────────────────────────────────

test('the canary: a secret in any form, right or wrong, accepted or refused, is in nothing that is emitted', async (t) => {
  const canary = 'CANARY0secret0that0must0not0show';
  const { backend, gateway } = await startBoth(t, { ...ALL_FORMS, tokens: { test: { secret: canary } } });
  const strict = await startGateway(t, backend, {
    auth: { methods: ['bearer'] },
    tokens: { other: { secret: OTHER, recipients: ['+15559999999'] } },
  });
  const dead = await startGateway(t, { url: 'http://127.0.0.1:9' }, {
    ...ALL_FORMS,
    tokens: { test: { secret: canary } },
  });
  const emitted: string[] = [];
  for (const to of [gateway, strict, dead]) {
    for (const { ask: make } of FORMS) {
      const broken = to === gateway ? ['/../x', '%zz', '"', '\\'] : []; // read alike by all three
      for (const token of ['', 'x', ...broken].map((end) => canary + end)) {
        const request = { body: MESSAGE as object | string, path: '/v2/send', headers: {}, ...make(token) };
        const { body, path, headers } = request;
        const json = typeof body === 'string' ? body : JSON.stringify(body);
        const echoed = {
          'x-forwarded-for': token,
          'x-request-id': token,
          'proxy-authorization': token,
          forwarded: token,
        };
        for (
          const variant of [
            request,
            { ...request, method: 'PUT' },
            { ...request, method: 'POST', path: path.replace('/v2/send', `/v1/register/${FROM}`) },
            { ...request, path: path.replace('/v2/send', `/v2/send/@auth=${token}`) },
            { ...request, body: json.slice(0, -1) },
            { ...request, headers: { ...echoed, ...headers } },
            // What browsers, proxies and mistakes make copies of.
            ...copiesOf(token).map((copy) => ({ ...request, headers: { ...copy, ...headers } })),
            { ...request, headers: { ...BEARER, authorization: `Bearer ${OTHER}` } },
          ]
        ) {
          if (/["\\]/.test(variant.path)) continue; // node's own client refuses to send these; raw ones follow
          const answer = await ask(to, variant);
          emitted.push(answer.text, answer.rawHeaders.join('\n'));
        }
      }
    }
    for (
      const target of [
        `/@auth=${canary}"/v2/send`,
        `/@auth=${canary}\\/v2/send`,
        `http://x/@auth=${canary}/v1/about`,
        `/v1/about?@auth=${canary}"`,
        `/v1/about#@auth=${canary}`,
      ]
    ) {
      emitted.push(await rawRequest(to, target));
    }
    emitted.push(
      await raw(to, `${canary} rubbish\r\n\r\n`),
      await raw(to, `GET /@auth=${canary}/ HTTP/1.1\r\n${canary}\r\n\r\n`),
    );
    emitted.push(...to.log);
  }
  for (const seen of backend.seen) emitted.push(JSON.stringify([seen.url, seen.rawHeaders]), seen.body.toString());
  assert.ok(backend.seen.length > 20, 'some of them must have been accepted');
  const digest = createHash('sha256').update(canary).digest('hex');
  // Of base64 what is the same behind any number of bytes: without the characters that others have a part in.
  const base64 = [0, 1, 2].map((before) =>
    Buffer.from(' '.repeat(before) + canary).toString('base64').slice(before && 4, -4)
  );
  const encoded = Array.from(Buffer.from(canary), (byte) => `%${byte.toString(16)}`).join('');
  for (const text of emitted) {
    for (const form of [canary, digest, encoded, ...base64]) {
      assert.ok(!text.includes(form), `found in: ${text.slice(0, 500)}`);
    }
  }
});

test('/healthz is 200 without a credential, needs no backend, and tells nothing else', async (t) => {
  const { backend, gateway } = await startBoth(t, { clients: ['192.0.2.1'] });
  const answer = await ask(gateway, { path: '/healthz' });
  assert.deepEqual([answer.status, answer.text], [200, 'ok\n']);
  assert.equal((await ask(gateway, { path: '/healthz', method: 'HEAD' })).status, 200);
  assert.equal((await ask(gateway, { path: '/healthz/' })).status, 403);
  assert.equal((await ask(gateway, { path: '/healthz', body: '{}' })).status, 403);
  assert.equal(backend.connections, 0);
});

test("one line per request, with the route's template and without numbers, tokens or forged lines", async (t) => {
  const { gateway } = await startBoth(t, { allow: ['receive', 'send'] });
  await ask(gateway, { path: `/v1/receive/${FROM}?timeout=1`, headers: BEARER });
  await ask(gateway, { path: '/v1/devices/+15550100001/%22%20status=200%20x', headers: BEARER });
  await ask(gateway, {
    body: MESSAGE,
    headers: { ...BEARER, 'x-forwarded-for': '1.2.3.4\u2028' } as http.OutgoingHttpHeaders,
  }).catch(() => {});
  const lines = requests(gateway);
  const { time, requestId, ms, bytesOut, ...first } = lines[0];
  assert.match(time, /^\d{4}-\d\d-\d\dT/);
  assert.match(requestId, /^[0-9a-f-]{36}$/);
  assert.ok(ms >= 0 && bytesOut > 0, `${ms} ms, ${bytesOut} bytes`);
  assert.deepEqual(first, {
    level: 'info',
    message: 'request',
    client: '127.0.0.1',
    method: 'GET',
    route: '/v1/receive/:number',
    token: 'test',
    form: 'bearer',
    status: 200,
    bytesIn: 0,
  });
  assert.deepEqual([lines[1]!.level, lines[1]!.status, lines[1]!.code, lines[1]!.route], [
    'warn',
    403,
    'setup_blocked',
    '/v1/devices/*/*',
  ]);
  assert.doesNotMatch(gateway.log.join(''), /1555/);
});

test('closing lets running requests finish, refuses new ones, and takes no longer than it may', async (t) => {
  let finish = (): void => {};
  const backend = await startBackend(t, (req, res) => {
    req.resume();
    finish = () => res.end('{}');
  });
  const gateway = await startGateway(t, backend, { shutdown: '1h' });
  // The second connection is open and busy with its headers when closing begins.
  const { socket: late, text } = open(t, gateway, 'GET /v1/about HTTP/1.1\r\nHost: x\r\n');
  const running = ask(gateway, { body: MESSAGE, headers: BEARER });
  await until(() => backend.seen.length === 1);
  const closing = gateway.close();
  late.write('\r\n');
  await closed(late);
  assert.deepEqual([statusOf(text()), codeOf(text())], [503, 'shutting_down']);
  await assert.rejects(ask(gateway, {}), { code: 'ECONNREFUSED' });
  finish();
  assert.equal((await running).status, 200);
  await closing;
  await gateway.close(); // twice does no harm
  assert.equal(backend.seen.length, 1);
});

test('at the deadline a request that the backend has is 504, any other is 503, and nobody is waited for any longer', async (t) => {
  const backend = await startBackend(t, (req) => {
    req.resume();
  });
  const gateway = await startGateway(t, backend, { shutdown: '1s' });
  const cases = [
    [SEND, 504, 'backend_timeout'],
    [ABOUT, 504, 'backend_timeout'],
    [post(SECRET, 200_000) + JSON.stringify(MESSAGE).slice(0, -1).padEnd(100_000), 503, 'shutting_down'],
    [post(SECRET, 100) + '{', 503, 'shutting_down'],
    ['POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{', 503, 'shutting_down'],
  ] as const;
  const clients = cases.map(([bytes]) => open(t, gateway, bytes));
  const refused = open(t, gateway, post(OTHER, 1_000_000));
  const dribble = setInterval(() => refused.socket.write('x'), 10);
  t.after(() => clearInterval(dribble));
  await until(() => backend.seen.length === 3 && refused.text() !== '');
  await gateway.close();
  for (const [i, [, status, code]] of cases.entries()) {
    await closed(clients[i]!.socket);
    assert.deepEqual([statusOf(clients[i]!.text()), codeOf(clients[i]!.text())], [status, code]);
    assert.match(clients[i]!.text(), /^connection: close\r$/im);
  }
  await closed(refused.socket);
  const told = requests(gateway).map((line) => line.status).sort();
  assert.deepEqual(told, [401, 503, 503, 503, 504, 504]);
});

test('every response has a new X-Request-Id, which is in the log and in the request to the backend', async (t) => {
  const { backend, gateway } = await startBoth(t, { cors: ['https://dash.example'] });
  const preflight = { 'origin': 'https://dash.example', 'access-control-request-method': 'POST' };
  const ids: unknown[] = [];
  for (
    const request of [
      { headers: BEARER },
      { headers: { ...BEARER, 'x-request-id': 'forged' } },
      { headers: BEARER, body: MESSAGE },
      { path: '/healthz' },
      { path: '/..' },
      { method: 'OPTIONS', headers: preflight },
      {},
    ]
  ) ids.push((await ask(gateway, request)).headers['x-request-id']);
  assert.deepEqual(ids, requests(gateway).map((line) => line.requestId));
  assert.equal(new Set(ids).size, 7);
  assert.deepEqual(backend.seen.map((seen) => seen.headers['x-request-id']), ids.slice(0, 3));
});

randomTest('random targets and headers: only allowed routes ever arrive at the backend', async (random, t) => {
  const pick = <V>(values: V[]): V => values[random(values.length)]!;
  const { backend, gateway } = await startBoth(t, {
    auth: { methods: ['bearer', 'basic', 'path', 'query'] },
    allow: ['send', 'info', '* /v1/groups/*', 'GET /*'],
    tokens: { a: { secret: SECRET, senders: [FROM] } },
  });
  const parts = [
    'v1',
    'v2',
    'V1',
    'send',
    'about',
    'health',
    'register',
    'accounts',
    'groups',
    'devices',
    'receive',
    'configuration',
    'swagger',
    'plugins',
    'qrcodelink',
    FROM,
    STRANGER,
    '%2B15550100001',
    '%2B15559999999',
    '%252B15559999999',
    '..',
    '.',
    '%2e%2e',
    '..;',
    '%2f',
    '%5c',
    '\\',
    '',
    '',
    'local-data',
    '@auth=x',
    `@auth=${SECRET}`,
    `%40auth%3D${SECRET}`,
    '-x',
    '%00',
    '%',
    'x#y',
    'a;b',
    ' ',
    '*',
    'http:',
    'evil.example',
  ];
  const allowed = (method: string, url: string): boolean => {
    const [path] = url.split('?') as [string];
    return (method === 'POST' && /^\/v[12]\/send$/.test(path)) ||
      (method === 'GET' && /^\/v1\/(about|health)$/.test(path)) ||
      (['GET', 'POST'].includes(method) && path === `/v1/groups/${FROM}`) ||
      (method === 'GET' && [`/v1/receive/${FROM}`, `/v1/search/${FROM}`].includes(path)) ||
      (new RegExp(
        `^/v1/groups/${FROM.replace('+', '\\+')}/[^/]+(/(avatar|members|admins|block|join|quit|pin-message))?$`,
      ).test(path));
  };
  const drawAny = (): [method: string, target: string, headers: string[], body: string] => {
    const method = pick(['GET', 'POST', 'PUT', 'DELETE', 'PATCH', 'HEAD', 'OPTIONS']);
    const target = random(2) === 0
      ? pick(['/v1/about', '/v2/send', `/v1/receive/${FROM}`, `/v1/groups/${FROM}`]) +
        pick(['', '/', '?x=1', '?', '/..', '/%2e', `/${STRANGER}`])
      : pick(['/', '/', '/', '//', '', 'http://evil.example/']) + Array.from({ length: 1 + random(5) }, () =>
        pick(parts)).join('/') +
        pick(['', '', '?', '?x=/v2/send', `?@auth=${SECRET}`, '?a=%zz']);
    const header = pick([
      [`Authorization: Bearer ${SECRET}`],
      [`Authorization: Bearer ${SECRET}`],
      ['Authorization: Bearer nope'],
      [`Authorization: ${basic(`api:${SECRET}`)}`],
      [],
      [`Authorization: Bearer ${SECRET}`, 'Authorization: Bearer x'],
    ]);
    const more = pick([
      [],
      ['X-Original-URL: /v1/accounts'],
      ['X-Rewrite-URL: /v1/accounts'],
      ['X-HTTP-Method-Override: DELETE'],
      ['Connection: Authorization'],
      ['Host: backend'],
      ['Content-Type: text/plain'],
    ]);
    const body = method === 'GET' || method === 'HEAD' ? '' : pick([
      JSON.stringify(MESSAGE),
      JSON.stringify(MESSAGE),
      '',
      '{}',
      '{"number":"+15559999999"}',
      '{',
      '{"Number":"x"}',
    ]);
    return [method, target, [...header, ...more], body];
  };
  const drawGood = (): ReturnType<typeof drawAny> => {
    const authorization = pick([`Authorization: Bearer ${SECRET}`, `Authorization: ${basic(`api:${SECRET}`)}`]);
    if (random(2) === 0) return ['POST', '/v2/send', [authorization], JSON.stringify(MESSAGE)];
    return ['GET', pick(['/v1/about', `/v1/receive/${FROM}`, `/v1/groups/${FROM}`]), [authorization], ''];
  };
  for (let round = 0; round < 1000; round++) {
    const isGood = round % 10 === 0;
    const [method, target, headers, body] = isGood ? drawGood() : drawAny();
    const before = backend.seen.length;
    await rawRequest(gateway, target, { method, headers, body });
    if (isGood) assert.equal(backend.seen.length, before + 1, `${method} ${target} did not arrive`);
    for (const seen of backend.seen.slice(before)) {
      assert.ok(allowed(seen.method, seen.url), `${method} ${target} arrived as ${seen.method} ${seen.url}`);
      assert.doesNotMatch(JSON.stringify([seen.url, seen.rawHeaders]), SECRETS);
      if (/send$/.test(seen.url) && seen.body.length > 2) assert.equal(JSON.parse(seen.body.toString()).number, FROM);
    }
  }
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
/** As `:groupid` in a path: "--username=evil.01", an internal id, one base64 less, unused bits, spaces. */
const NO_GROUP_IDS = [
  ...['group.LS11c2VybmFtZT1ldmlsLjAx', 'LS11c2VybmFtZT1ldmlsLjAx/avatar', 'group.', 'group.*'],
  ...[encodeURIComponent(INTERNAL_ID.replaceAll('/', '_')), `group.${INTERNAL_ID}`, GROUP.slice('group.'.length)],
  ...[otherBits(GROUP), GROUP.replace('=', ''), `${GROUP}%20`, `${GROUP}=`, GROUP.replace('g', 'G')],
  `${GROUP.slice(0, -4)}%3D${GROUP.slice(-4)}`,
];

table('a target that programs read in different ways is 400, with a right token too, and the backend sees nothing', {
  allow: ['messaging', 'info', '* /v1/attachments/*', '* /*'],
})([
  '* bearer → 400 bad_target',
  [
    ...REFUSED_TARGETS.trim().split(/\s+/),
    ...NO_GROUP_IDS.map((id) => `/v1/groups/${FROM}/${id}`),
    'PUT /v1/attachments/-x',
    // What does not begin like a target is refused by node's own parser, on Deno without a body.
  ].map((row) => row.includes(' ') ? row : `GET ${row}${/^[/h]/i.test(row) ? '' : ' → 400'}`),
]);

test('a target with TAB, space, DEL or a byte above ASCII is 400, and the backend sees nothing', async (t) => {
  const { backend, gateway } = await startBoth(t);
  for (const byte of ['\t', ' ', '\x7f', '\x80', '\xff', '\0', '\x0b']) {
    const response = await rawRequest(gateway, `/v1/ab${byte}out`, { headers: [`Authorization: Bearer ${SECRET}`] });
    assert.equal(statusOf(response), 400, JSON.stringify(byte));
  }
  assert.equal(backend.connections, 0, 'the backend saw a connection');
});

/** Each target that passes, and what the backend gets for it. */
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
  /v1/attachments/a%3Fb%23c%20d;e           /v1/attachments/a%3Fb%23c%20d;e
  /v1/attachments/%C3%BCber                 /v1/attachments/%C3%BCber
  /v1/attachments/!$&'()*+,;=:@~-._         /v1/attachments/!$&'()*+,;=:@~-._
  /v1/attachments/[x]^${'`'}{|}              /v1/attachments/%5Bx%5D%5E%60%7B%7C%7D`
  .trim().split('\n').map((line) => line.trim().split(/\s+/) as [target: string, sent: string]);
table('what was checked is byte for byte what the backend gets', { allow: ['info', 'messaging'] })([
  '* bearer → passes',
  PASSED_TARGETS.map(([target, sent]) => `GET ${target} → GET ${sent}`),
]);
// An attachment's id is random letters of Signal's: one in 64 begins with "-".
table('an attachment is fetched and deleted, whatever its id begins with', { allow: ['messaging'] })([
  '* bearer → passes',
  ['-', '--help', '-Ab_9', '_x-'].flatMap((id) =>
    ['GET', 'DELETE'].map((method) => `${method} /v1/attachments/${id} → ${method} /v1/attachments/${id}`)
  ),
]);

test('parseTarget: a target that it makes passes again unchanged', () => {
  for (const [, sent] of PASSED_TARGETS) {
    const { segments } = parseTarget('GET', sent);
    const again = parseTarget('GET', `/${segments.map((segment) => encodeURIComponent(segment)).join('/')}`);
    assert.deepEqual(again.segments, segments, sent);
  }
});

section('CREDENTIALS'); // ─────────────────────────────────────────────────────────────────────────
const URLENCODED = 'application/x-www-form-urlencoded';
const AS_FORM = { 'content-type': URLENCODED };
/** Every place that a client can put a token, in each of the spellings seen on the wire. */
const FORMS = ([
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

for (const { name, form, ask: make } of FORMS) {
  const [wrong, right] = [OTHER, SECRET].map((token) => rowWith({ body: HELLO, ...make(token) }));
  const others = ['bearer', 'basic', 'query', 'path', 'body'].filter((other) => other !== form);
  const query = name.startsWith('query as') ? '?x=1&y=2' : '';
  table(`form ${name}: a right token sends and is cut out; a wrong one, or another form than the token's, is 401`, {
    ...ALL_FORMS,
  })`
    ${wrong} → 401 unauthorized | reason=unknown_token
    @ ${JSON.stringify({ methods: others })} | ${right} → 401 unauthorized | reason=${
    form === 'body' ? 'no_credential' : 'form_not_accepted'
  }
    ${right} → 201 | "[{"timestamp":"1700000000000"}]" | form=${form} | token=test | POST /v2/send${query} | '${HELLO}' | > Authorization: | > Content-Length: ${HELLO.length}`;
}

table('query and path are off unless they are named', {})`
  * POST /v2/send | ${HELLO} → 401 unauthorized
  POST /v2/send?@auth=${SECRET} ;; POST /@auth=${SECRET}/v2/send`;
table('a token that names a form accepts it, whatever the default is', tokens({ methods: ['path'] }, {}))`
  * → 401 unauthorized
  GET /@auth=${SECRET}/v1/about → 200 ;; bearer ;; GET /@auth=${OTHER}/v1/about`;
table('the first credential decides, in the order header, path, query, body: a wrong one is 401', ALL_FORMS)`
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
  // The last byte of à and of Р is A0, of … A6, and of Ѕ 85: a space or a line break in Latin-1.
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

table('two credentials in one place are 400, and an empty header is none', ALL_FORMS)`
  * → 400 bad_credential
  GET /v1/about?@auth=${SECRET}&%40auth=${SECRET} ;; GET /@auth=${SECRET}/@auth=${SECRET}/v1/about
  GET /v1/@auth=${SECRET}/about → 400 bad_target ;; {"auth":"${SECRET}","auth":"${SECRET}"} → 400 bad_field
  bearer | bearer ;; Authorization: | bearer → 200`;
const THE_401 =
  literal`→ 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer | "{"error":"A valid API token is required in an accepted form, such as \"Authorization: Bearer TOKEN\".","`;
const EXPIRED = tokens({ methods: ['bearer'] }, { methods: ['bearer'], expires: '2020-01-01' });
table('every 401 is the same, whatever was wrong, and carries both challenges', EXPIRED)`
  * ${THE_401}
  bearer wrong → reason=unknown_token ;; bearer ${OTHER} → reason=expired_token
  basic api:${OTHER} → reason=expired_token ;; basic → reason=form_not_accepted
  GET /@auth=${SECRET}/v1/about → reason=form_not_accepted ;; basic root:${SECRET} → reason=wrong_user
  basic ${SECRET} → reason=wrong_user ;; Authorization: ${SECRET} → reason=unknown_scheme
  Authorization: Token ${SECRET} → reason=unknown_scheme
  * ${THE_401} | reason=no_credential
  GET /v1/about ;; GET /v1/accounts ;; GET /no/such/thing ;; PATCH /v1/about ;; OPTIONS /v1/about ;; ${HELLO} ;; ${
  AUTHED(SECRET)
}`;

test('without tokens, requests need no credential, and all else still applies', async (t) => {
  const both = await startBoth(t, NO_TOKENS);
  const warning = 'no tokens are configured: every request is let in without a credential';
  assert.equal(JSON.parse(both.gateway.log[0]!).warning, warning);
  const rows = `${AUTHED(SECRET)} → 201 | ${HELLO} ;; POST /v1/register/${FROM} → 403 setup_blocked`;
  await checkRows(both, ['* bearer', rows]);
});

test('an unauthenticated client opens no connection to the backend, and no more of its body is read than the head', async (t) => {
  const both = await startBoth(t, {}, { stallTimeoutMs: 2000 });
  const head = `POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{"message":"`;
  const { socket, text } = open(t, both.gateway, head);
  const filler = Buffer.alloc(64 * 1024, 'x');
  const more = (): void => {
    while (!socket.destroyed && socket.write(filler));
  };
  socket.on('drain', more);
  more();
  await closed(socket);
  assert.equal(statusOf(text()), 401, text());
  assert.equal(requests(both.gateway)[0].bytesIn, 64 * 1024, 'the bytes that were read');
  assert.ok(socket.bytesWritten < 20_000_000, `${socket.bytesWritten} bytes were taken`);
  assert.equal(both.backend.connections, 0, 'the backend saw a connection');
});

/** A send whose `auth` ends at that byte. */
const lateAuth = (end: number, tail = `","auth":"${SECRET}"`): string =>
  `${`${HELLO.slice(0, -1)},"x":"`.padEnd(end - tail.length, 'x')}${tail}}`;
table('auth within the first 64 KiB is found, and one byte later it is not', {})`
  * → 201
  ${lateAuth(64 * 1024)} ;; ${lateAuth(64 * 1024 + 1)} → 401 unauthorized
  ${lateAuth(64 * 1024).slice(0, -1)},"base64_attachments":["${'A'.repeat(300_000)}"]}`;
table('attack: use a token from elsewhere', { clients: ['127.0.0.1'], ...tokens({ clients: ['192.0.2.0/24'] }) })`
  * ${HELLO} | bearer → 403 client_not_allowed
  POST /v2/send ;; X-Forwarded-For: 192.0.2.1 | X-Real-IP: 192.0.2.1 | Forwarded: for=192.0.2.1`;
table("attack: use another token's form", tokens({ methods: ['body'] }, { methods: ['bearer', 'query'] }))`
  * ${HELLO} → 401 unauthorized
  bearer ;; basic ;; POST /v2/send?@auth=${SECRET} ;; ${AUTHED(OTHER)}`;
table("attack: use somebody else's token in the body beside one that may not", tokens({ allow: ['info'] }, {}))`
  * ${HELLO} | bearer → 403 endpoint_not_allowed
  ${AUTHED(OTHER)} ;; ${HELLO.slice(0, -1)},"auth":"${OTHER}"}
  POST /v2/send?@auth=${OTHER} ;; POST /@auth=${OTHER}/v2/send`;
table('attack: hide behind a Content-Type, a byte-order mark, a second document or bytes that are no text', CONFINED)`
  * 'x=1&recipients=${STRANGER}' | bearer → 400 bad_json
  Content-Type: text/plain ;; Content-Type: application/x-www-form-urlencoded
  Content-Type: multipart/form-data; boundary=x ;; Content-Type: application/xml ;; '\ufeff${HELLO}'
  ${HELLO}${HELLO.replace(TO, STRANGER)} ;; '${HELLO}\n\u0000' ;; [${HELLO}]
  '{"message":"\xff","number":"${FROM}"}' ;; {"x":${'['.repeat(5000)}${']'.repeat(5000)}}
  {"x":${'{"a":'.repeat(64)}1${'}'.repeat(64)}}`;

test('attack: wrong credentials from any number of addresses do not fill the memory', () => {
  const limiter = new RateLimiter();
  const isKnown = (i: number): boolean => limiter.take(`address ${i}`, { count: 1, perMs: 60_000, written: '' }, 0) > 0;
  for (let i = 0; i < 50_000; i++) isKnown(i);
  for (let i = 40_000; i < 50_000; i++) assert.equal(isKnown(i), true, String(i));
  assert.deepEqual([isKnown(39_999), isKnown(0)], [false, false]);
});

test('attack: wrong credentials for ever, from one address, lock nobody out', async (t) => {
  const both = await startBoth(t, {}, { now: () => 1_700_000_000_000 });
  for (let i = 0; i < 200; i++) {
    const { status } = await ask(both.gateway, signed(`Bearer guess-number-${i}-of-many`));
    assert.equal(status, i < 30 ? 401 : 429, `guess ${i}`);
  }
  assert.equal(both.backend.connections, 0, 'the backend saw a connection');
  await checkRows(both, ['* bearer', 'GET /v1/about → 200']);
});

table('per token: rate, clients and allow replace the top-level ones whole', {
  ...{ rate: '1/1h', clients: ['192.0.2.1'], allow: ['info'] },
  ...tokens({ rate: '2/1h', clients: ['::ffff:127.0.0.1'], allow: ['send'] }, {}),
})`
  * POST /v2/send | ${HELLO} | bearer → 201
  bearer ;; GET /v1/about → 403 endpoint_not_allowed ;; bearer ;; bearer → 429 rate_limited
  bearer ${OTHER} → 403 client_not_allowed`;

test('per token: it is valid through the day that it expires, and not a moment longer', async (t) => {
  let nowMs = Date.parse('2027-06-30T23:59:59.998Z');
  const day = { secret: SECRET, expires: '2027-06-30' };
  const time = { secret: OTHER, expires: '2027-07-01T01:00:00+01:00' };
  const both = await startBoth(t, { tokens: { day, time } }, { now: () => nowMs });
  await checkRows(both, ['* → 200', ['bearer', `bearer ${OTHER}`]]);
  nowMs += 2;
  await checkRows(both, ['* → 401 unauthorized', ['bearer', `bearer ${OTHER}`]]);
});

// Node 20 obeyed header fields beyond the thousandth, and did not show them.
table('a thousand header fields hide nothing from the gateway', {})`
  * → 431
  {} | ${'a: | '.repeat(1100)} Transfer-Encoding: chunked ;; bearer | ${'a: | '.repeat(1100)} bearer x`;

// A regular expression was quadratic in the white space of an Authorization header.
test('a long Authorization header is looked at in one pass', async (t) => {
  const { gateway } = await startBoth(t);
  for (let i = 0; i < 40; i++) {
    const { status } = await ask(gateway, signed(`Bearer a${' '.repeat(15_000)}a`));
    assert.ok([401, 429].includes(status), String(status));
  }
});

section('PAGES'); // ───────────────────────────────────────────────────────────────────────────────

const OPEN: GatewayConfig = { ...NO_TOKENS, cors: ['https://dash.example:8443'] };

const CHROME = {
  'user-agent':
    'Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) HeadlessChrome/156.0.0.0 Safari/537.36',
};

/** The headers of a raw answer, sorted, less what is about the connection and the time, and the request's id. */
function fieldsOf(response: string): string[] {
  const lines = response.split('\r\n\r\n')[0]!.split('\r\n').slice(1);
  return lines.map((line) => line.replace(/^[^:]+/, (name) => name.toLowerCase()))
    .filter((line) => !/^(?:date|connection|keep-alive|transfer-encoding|x-request-id):/.test(line)).sort();
}

const SWITCHED: GatewayConfig = {
  allow: ['messaging', 'info', 'setup'],
  cors: ['https://dash.example:8443'],
  tokens: { test: { secret: SECRET, methods: ['bearer', 'basic', 'path', 'query', 'body'] } },
};
const REMEMBERED = { authorization: basic(`api:${SECRET}`) };

const TEXT = { 'content-type': 'text/plain;charset=UTF-8' };
const STRANGE_PAGE = { origin: 'http://evil.example:9000' };
const CROSS_SITE = { ...STRANGE_PAGE, 'sec-fetch-site': 'cross-site', 'sec-fetch-mode': 'no-cors' };

/** What a page of another site can have a browser send to a gateway on `gateway.lan:8880`. */
const FROM_ELSEWHERE: Ask[] = [
  { body: MESSAGE, headers: { ...CROSS_SITE, ...TEXT } }, // fetch with no-cors, sendBeacon
  { body: MESSAGE, headers: { ...CROSS_SITE, 'sec-fetch-site': 'same-site' } },
  { body: MESSAGE, headers: { 'sec-fetch-site': 'cross-site' } },
  { body: MESSAGE, headers: { 'sec-fetch-site': 'same-origin, cross-site' } },
  { body: MESSAGE, headers: { ...STRANGE_PAGE, ...TEXT } }, // the same over plain http
  { body: MESSAGE, headers: { origin: 'null', 'content-type': 'text/plain' } }, // a form in a frame with a data: URL
  { body: MESSAGE, headers: { origin: 'null', host: 'null' } },
  { body: MESSAGE, headers: { origin: 'http://gateway.lan' } }, // another port is another origin
  { body: MESSAGE, headers: { origin: 'http://gateway.lan:88800' } },
  { body: MESSAGE, headers: { origin: 'http://evil.example/gateway.lan:8880' } },
  { body: MESSAGE, headers: { origin: 'http://evil.example:9000, http://gateway.lan:8880' } },
  { body: MESSAGE, headers: { origin: 'https://dash.example' } }, // like one on `cors`, and is not
  { body: MESSAGE, headers: { ...STRANGE_PAGE, 'x-forwarded-host': 'evil.example:9000' } }, // no proxy said so
  { path: `/v1/receive/${FROM}`, headers: { 'sec-fetch-site': 'cross-site', 'sec-fetch-mode': 'no-cors' } }, // <img>
  { path: `/v1/receive/${FROM}`, headers: CHROME }, // <img>, or fetch with no-cors, over plain http
  { path: '/v2/send?message=x', headers: CHROME },
  { path: '/v1/qrcodelink?device_name=x', headers: CHROME },
  { path: '/v1/accounts', headers: CHROME },
  // Speculation rules of any page, and a typed address that another site redirects.
  ...[RECEIVE, '/v2/send?message=x', '/v1/qrcodelink?device_name=x', '/@auth=/v1/accounts'].flatMap((path): Ask[] => [
    { path, headers: { ...CHROME, 'sec-fetch-site': 'none', 'sec-purpose': 'prefetch;anonymous-client-ip' } },
    { path, headers: { 'sec-fetch-site': 'none', 'sec-fetch-mode': 'navigate' } },
    { path, headers: { ...CHROME, ...STRANGE_PAGE } },
    { path, headers: { ...CHROME, 'origin': 'http://gateway.lan:8880', 'sec-fetch-site': 'none' } },
  ]),
];
const withHost = (ask: Ask): Ask => ({ ...ask, headers: { host: 'gateway.lan:8880', ...ask.headers } });

attack(
  'have a browser send by itself, from a page of another site, with the password that it remembers',
  SWITCHED,
  403,
  'cross_site',
  FROM_ELSEWHERE.map(withHost).map((ask) => ({ ...ask, headers: { ...REMEMBERED, ...ask.headers } })),
);
attack(
  'have a browser send by itself, from a page of another site, where no token is needed',
  { ...OPEN, allow: ['messaging', 'info', 'setup'] },
  403,
  'cross_site',
  FROM_ELSEWHERE.map(withHost),
);

test('a page of the gateway itself, an origin on cors and a program are served, and the address bar what does nothing', async (t) => {
  const backend = await startBackend(t);
  for (const [config, credential] of [[SWITCHED, REMEMBERED], [OPEN, {}]] as [GatewayConfig, object][]) {
    const gateway = await startGateway(t, backend, { ...config, allow: ['messaging', 'info'] });
    for (
      const headers of [
        {},
        { 'user-agent': 'curl/8.14.1' },
        { 'user-agent': 'node', 'sec-fetch-mode': 'cors' }, // Node's fetch
        { ...CHROME, 'sec-fetch-site': 'same-origin' },
        { ...STRANGE_PAGE, 'sec-fetch-site': 'same-origin' }, // it decides where it is there
        { ...CHROME, 'origin': 'https://dash.example:8443', 'sec-fetch-site': 'cross-site' },
        { ...CHROME, 'origin': 'https://dash.example:8443' },
      ]
    ) {
      for (const [status, request] of [[201, { body: MESSAGE }], [200, { path: `/v1/receive/${FROM}` }]] as const) {
        const answer = await ask(gateway, withHost({ ...request, headers: { ...credential, ...headers } }));
        assert.equal(answer.status, status, `${JSON.stringify(headers)}: ${answer.text}`);
      }
    }
    // Without Sec-Fetch-Site an Origin must equal Host, whatever the scheme: TLS may end before the gateway.
    for (const origin of ['http://gateway.lan:8880', 'https://gateway.lan:8880']) {
      const answer = await ask(gateway, withHost({ body: MESSAGE, headers: { ...credential, ...CHROME, origin } }));
      assert.equal(answer.status, 201, answer.text);
    }
    for (const headers of [CHROME, { ...CHROME, 'sec-fetch-site': 'none' }]) {
      const request = { path: '/v1/about', headers: { ...credential, ...headers } };
      assert.equal((await ask(gateway, withHost(request))).status, 200);
    }
  }
});

test('a credential that a page has to know is taken from any page, whatever else it asks for', async (t) => {
  const { gateway } = await startBoth(t, SWITCHED);
  for (const { form, ask: make } of FORMS.filter(({ form }) => form !== 'basic')) {
    const request = { body: MESSAGE as object | string, ...make(SECRET) };
    const answer = await ask(gateway, { ...request, headers: { ...request.headers, ...CHROME, ...CROSS_SITE } });
    assert.equal(answer.status, 201, `${form} ${answer.text}`);
  }
  const headers = { ...BEARER, ...CHROME };
  assert.equal((await ask(gateway, { path: `/v1/receive/${FROM}`, headers })).status, 200);
});

test('a page of another site is told nothing of the endpoint, and a wrong password from there is a 401', async (t) => {
  const both = await startBoth(t, { ...SWITCHED, allow: ['send'] });
  const headers = { ...REMEMBERED, ...CROSS_SITE };
  for (const path of ['/v1/about', '/v1/accounts', '/no/such/thing', '/v2/send']) {
    assertDenied(await ask(both.gateway, { path, headers }), 403, 'cross_site', both);
  }
  const authorization = basic(`api:${OTHER}`);
  assertDenied(await ask(both.gateway, { headers: { ...headers, authorization } }), 401, 'unauthorized', both);
});

test('WebSocket: a page of another site opens none with what the browser adds', async (t) => {
  const backend = await startUpgradeBackend(t);
  const wss = { 'sec-fetch-mode': 'websocket', 'sec-fetch-site': 'cross-site' };
  for (const [config, credential] of [[SWITCHED, REMEMBERED], [OPEN, {}]] as [GatewayConfig, object][]) {
    const gateway = await startGateway(t, backend, { ...config, allow: ['receive'] });
    const open = (headers: object): Connection =>
      openWebSocket(t, gateway, {
        headers: Object.entries({ ...credential, ...CHROME, ...headers }).map(([name, value]) => `${name}: ${value}`),
      });
    const before = backend.connections;
    for (const headers of [STRANGE_PAGE, { ...STRANGE_PAGE, ...wss }, { origin: 'null' }, {}]) {
      const { socket, text } = open(headers);
      await until(() => socket.closed || text().startsWith('HTTP/1.1 101'));
      assert.deepEqual([statusOf(text()), codeOf(text())], [403, 'cross_site'], JSON.stringify(headers));
    }
    assert.equal(backend.connections, before);
    for (
      const headers of [
        { origin: 'http://gateway' }, // of the gateway's own page: Chromium sends no Sec-Fetch-Site with a WebSocket
        { ...wss, 'origin': 'http://gateway', 'sec-fetch-site': 'same-origin' }, // the same from Firefox
        { ...wss, origin: 'https://dash.example:8443' },
        { 'user-agent': 'Python/3.13 websockets/15.0', 'origin': 'http://gateway' },
      ]
    ) {
      const { text } = open(headers);
      await until(() => text().includes('\r\n\r\n'));
      assert.equal(statusOf(text()), 101, JSON.stringify(headers));
      assert.match(text(), /^x-request-id: [\w-]{36}\r$/im);
    }
  }
});

test('behind a trusted proxy, the host that it was asked for decides', async (t) => {
  const proxied = { 'host': '127.0.0.1:8880', 'x-forwarded-host': 'signal.example.org' };
  for (const [config, credential] of [[SWITCHED, REMEMBERED], [OPEN, {}]] as [GatewayConfig, object][]) {
    const both = await startBoth(t, { ...config, trustedProxies: ['127.0.0.1'] });
    const send = (headers: http.OutgoingHttpHeaders): Promise<Answer> =>
      ask(both.gateway, { body: MESSAGE, headers: { ...credential, ...headers } });
    for (
      const headers of [
        { ...proxied, ...STRANGE_PAGE },
        { ...proxied, origin: 'http://127.0.0.1:8880' },
        { host: 'signal.example.org', ...STRANGE_PAGE },
      ]
    ) assertDenied(await send(headers), 403, 'cross_site', both);
    for (
      const headers of [
        { ...proxied, origin: 'https://signal.example.org' },
        { host: 'signal.example.org', origin: 'https://signal.example.org' },
        { host: 'signal.example.org' }, // it answers for the name
      ]
    ) assert.equal((await send(headers)).status, 201, JSON.stringify(headers));
  }
});

const PUBLIC_HOSTS = [
  'evil.example',
  'evil.example:8880',
  'EVIL.example.',
  'localhost.evil.example',
  'evil-localhost.example',
  'notlan.example:80',
  'evil.xlan',
  'home.arpa',
  'x.notahome.arpa',
  '127.0.0.1.nip.io',
  '127.0.0.1.evil.example:8880',
  'lan.',
  'dash.example.evil.example',
  'other.dash.example',
];
attack(
  'give a page of its own this address (DNS rebinding), where no token is needed',
  OPEN,
  403,
  'cross_site',
  PUBLIC_HOSTS.flatMap((host): Ask[] => [
    { headers: { host } },
    { body: MESSAGE, headers: { host, ...CHROME, 'origin': `http://${host}`, 'sec-fetch-site': 'same-origin' } },
  ]),
);

test('without tokens a Host that public DNS cannot hold is served, or one on cors, or none; with tokens any is', async (t) => {
  const { gateway, backend } = await startBoth(t, OPEN);
  for (
    const host of [
      '127.0.0.1:8880',
      '192.168.1.7',
      '[::1]:8880',
      '[fd00::7]',
      'localhost:8880',
      'LOCALHOST',
      'pi',
      'pi.local:8880',
      'PI.Local',
      'pi.lan',
      'pi.home',
      'pi.fritz.home',
      'pi.localdomain',
      'pi.intranet',
      'pi.internal',
      'host.docker.internal:8880',
      'pi.home.arpa',
      'pi.test',
      'app.localhost:8880',
      'dash.example',
      'DASH.example:8880',
    ]
  ) assert.equal((await ask(gateway, { headers: { host } })).status, 200, host);
  assert.equal(statusOf(await raw(gateway, 'GET /v1/about HTTP/1.0\r\n\r\n')), 200);
  assert.equal(backend.seen.length, 22);
  const receiving = await startGateway(t, backend, { ...OPEN, allow: ['receive'] });
  for (const host of PUBLIC_HOSTS) {
    const response = await raw(
      receiving,
      `GET /v1/receive/${FROM} HTTP/1.1\r\nHost: ${host}\r\nOrigin: http://${host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n`,
    );
    assert.deepEqual([statusOf(response), codeOf(response)], [403, 'cross_site'], host);
  }
  assert.equal(backend.seen.length, 22);
  const kept = await startGateway(t, backend);
  for (const host of PUBLIC_HOSTS) {
    assert.equal((await ask(kept, { headers: { ...REMEMBERED, host } })).status, 200, host);
  }
});

test('a browser is challenged for a bearer token alone, so that it asks for no password that it would remember', async (t) => {
  const both = await startBoth(t);
  const challenges = (answer: Answer): string[] =>
    answer.rawHeaders.filter((_, i, all) => i % 2 === 1 && all[i - 1]!.toLowerCase() === 'www-authenticate');
  for (const headers of [CHROME, { 'sec-fetch-mode': 'cors' }, { 'upgrade-insecure-requests': '1' }]) {
    for (const request of [{}, { body: MESSAGE }, { path: '/v1/accounts' }]) {
      const answer = await ask(both.gateway, { ...request, headers });
      assertDenied(answer, 401, 'unauthorized', both);
      assert.deepEqual(challenges(answer), ['Bearer']);
    }
  }
  for (const headers of [{}, { 'user-agent': 'Wget/1.25.0' }, { 'user-agent': 'like Mozilla/5.0' }]) {
    assert.deepEqual(challenges(await ask(both.gateway, { headers })), ['Basic realm="signal"', 'Bearer']);
  }
  const { socket, text } = openWebSocket(t, both.gateway, { headers: ['User-Agent: Mozilla/5.0'] });
  await closed(socket);
  assert.match(text(), /^HTTP\/1\.1 401 [^]*\r\nWWW-Authenticate: Bearer\r\n/);
  assert.doesNotMatch(text(), /Basic/);
});

const DASHBOARD = 'https://dash.example:8443';
/** What is on `cors`, written as it is not, and what else says nothing of where it comes from. */
const NOT_LISTED = [
  [],
  ['Origin: http://evil.example:9000'],
  ['Origin: null'],
  ['Origin:'],
  ['Origin: *'],
  ['Origin: https://DASH.example:8443'],
  ['Origin: http://dash.example:8443'],
  ['Origin: https://dash.example'],
  ['Origin: https://dash.example:8443/'],
  ['Origin: https://dash.example:8443.evil.example'],
  ['Origin: https://plain.example:443'],
  [`Origin: ${DASHBOARD}`, `Origin: ${DASHBOARD}`],
  [`Origin: ${DASHBOARD}`, 'Origin: http://evil.example:9000'],
  [`Origin: ${DASHBOARD}, http://evil.example:9000`],
];
const FOR_PAGES = [
  `access-control-allow-origin: ${DASHBOARD}`,
  'access-control-expose-headers: Retry-After, X-Request-Id',
  'vary: Origin',
];

test('a page of an origin on cors may read every answer, refusals included, and no other page any', async (t) => {
  const backend = await startBackend(t);
  const config: GatewayConfig = {
    cors: [DASHBOARD, 'https://plain.example'],
    tokens: { test: { secret: SECRET, rate: '3/1h' }, other: { secret: OTHER } },
    allow: ['send', 'info'],
    limits: { body: '1KiB' },
  };
  const bearer = [`Authorization: Bearer ${OTHER}`];
  const post = { method: 'POST', headers: bearer };
  const cases: [status: number, target: string, request: { method?: string; headers?: string[]; body?: string }][] = [
    [200, '/healthz', {}],
    [400, '/..', {}],
    [400, '/v1/about', { headers: [...bearer, ...bearer] }],
    [401, '/v1/about', {}],
    [401, '/v1/about', { headers: ['Authorization: Bearer wrong'] }],
    [401, '/v2/send', { method: 'OPTIONS' }],
    [200, '/v1/about', { headers: bearer }],
    [204, '/v1/health', { headers: bearer }],
    [201, '/v2/send', { ...post, body: JSON.stringify(MESSAGE) }],
    [400, '/v2/send', { ...post, body: '{}' }], // the backend's
    [400, '/v2/send', { ...post, body: '{' }],
    [403, '/v1/accounts', { headers: bearer }],
    [404, '/no/such/thing', { headers: bearer }],
    [405, '/v2/send', { headers: bearer }],
    [405, '/v2/send', { method: 'OPTIONS', headers: bearer }],
    [413, '/v2/send', { ...post, body: JSON.stringify({ ...MESSAGE, message: 'x'.repeat(1024) }) }],
    [415, '/v2/send', { ...post, headers: [...bearer, 'Content-Encoding: gzip'], body: '{}' }],
  ];
  const [page, gateway] = [await startGateway(t, backend, config), await startGateway(t, backend, config)];
  for (const [status, target, { headers = [], ...request }] of cases) {
    const plain = await rawRequest(gateway, target, { ...request, headers });
    const answer = await rawRequest(page, target, { ...request, headers: [...headers, `Origin: ${DASHBOARD}`] });
    assert.deepEqual([statusOf(plain), statusOf(answer)], [status, status], target);
    assert.deepEqual(fieldsOf(answer), [...fieldsOf(plain), ...FOR_PAGES].sort(), target);
    assert.ok(!/access-control|vary/i.test(plain), plain);
  }
  for (const origin of NOT_LISTED) {
    for (const credential of [bearer, []]) {
      const answer = await rawRequest(gateway, '/v1/about', { headers: [...credential, ...origin] });
      assert.equal(statusOf(answer), credential.length > 0 ? 200 : 401);
      assert.ok(!/access-control|vary/i.test(answer), answer);
    }
  }
  const ofToken = (): Promise<string> =>
    rawRequest(page, '/v1/about', { headers: [`Authorization: Bearer ${SECRET}`, `Origin: ${DASHBOARD}`] });
  for (let i = 0; i < 3; i++) assert.equal(statusOf(await ofToken()), 200);
  const limited = await ofToken();
  assert.equal(statusOf(limited), 429);
  assert.match(limited, /\r\nRetry-After: \d+\r\n/i);
  assert.deepEqual(fieldsOf(limited).filter((line) => FOR_PAGES.includes(line)), FOR_PAGES);
  backend.server.close();
  backend.server.closeAllConnections();
  const down = await rawRequest(page, '/v1/about', { headers: [...bearer, `Origin: ${DASHBOARD}`] });
  assert.equal(statusOf(down), 502);
  assert.deepEqual(fieldsOf(down).filter((line) => FOR_PAGES.includes(line)), FOR_PAGES);
});

test('what the backend says of pages reaches nobody; the rest of its answer does, its Vary too', async (t) => {
  const backend = await startBackend(t, (req, res) => {
    req.resume();
    res.writeHead(200, [
      ...['Access-Control-Allow-Origin', '*', 'Access-Control-Allow-Credentials', 'true'],
      ...['access-control-expose-headers', '*', 'Access-Control-Allow-Private-Network', 'true'],
      ...['Access-Control-Allow-Methods', '*', 'Access-Control-Allow-Headers', '*', 'Access-Control-Max-Age', '9'],
      ...['Vary', 'Accept', 'X-Request-Id', 'of the backend', 'Set-Cookie', 'a=1', 'Set-Cookie', 'b=2'],
      ...['Content-Length', '2'],
    ]).end('[]');
  });
  const gateway = await startGateway(t, backend, { cors: [DASHBOARD] });
  const own = [
    'content-length: 2',
    'set-cookie: a=1',
    'set-cookie: b=2',
    'vary: Accept',
    ...INERT,
  ].sort();
  const bearer = `Authorization: Bearer ${SECRET}`;
  for (const origin of NOT_LISTED) {
    const answer = await rawRequest(gateway, '/v1/about', { headers: [bearer, ...origin] });
    assert.deepEqual(fieldsOf(answer), own, JSON.stringify(origin));
    assert.doesNotMatch(answer, /of the backend/);
  }
  const answer = await rawRequest(gateway, '/v1/about', { headers: [bearer, `Origin: ${DASHBOARD}`] });
  assert.deepEqual(fieldsOf(answer), [...own, ...FOR_PAGES].sort());
});

/** What a relayed response to a GET says besides, so that what it holds does nothing and is kept nowhere. */
const CSP = "content-security-policy: default-src 'none'; style-src 'unsafe-inline'; sandbox";
const INERT = ['cache-control: no-store', CSP, 'x-content-type-options: nosniff'];

test(
  'what the backend answers to a GET runs no script, asks for nothing and is kept nowhere, but for swagger',
  async (t) => {
    const own: Record<string, string[]> = {
      'html': ['Content-Type', 'text/html; charset=utf-8'],
      'svg': ['content-type', 'image/svg+xml'],
      'nothing': [],
      'sound': ['Content-Type', 'audio/aac'],
      'film': ['content-type', 'Video/mp4; codecs="avc1"'],
      'both': ['Content-Type', 'audio/aac, text/html'],
      'like': ['Content-Type', 'text/html; audio/aac'],
      'kept': ['Content-Type', 'image/png', 'Cache-Control', 'max-age=60'],
      'sniffed': ['X-Content-Type-Options', 'none', 'Content-Security-Policy', 'default-src *'],
    };
    const backend = await startBackend(t, (req, res) => {
      const name = req.url!.split('/').at(-1)!;
      req.resume().on(
        'end',
        () => res.writeHead(name === 'html' ? 404 : 200, [...own[name] ?? [], 'Content-Length', '2']).end('hi'),
      );
    });
    const gateway = await startGateway(t, backend, {
      ...ALL_FORMS,
      allow: ['messaging', 'setup', 'GET /v3/*', 'GET /v2/send'],
      tokens: { test: { secret: SECRET }, hook: { secret: OTHER, defaults: DEFAULTS } },
    });
    const [caching, csp, sniffing] = INERT as [string, string, string];
    const cases: [request: { method?: string; body?: string; secret?: string }, path: string, added: string[]][] = [
      ...['html', 'svg', 'nothing', 'both', 'like'].flatMap((name): typeof cases => [
        [{}, `/v1/attachments/${name}`, INERT],
        [{}, `/v3/${name}`, INERT],
      ]),
      [{}, `/v1/groups/${FROM}/${GROUP}/avatar`, INERT],
      [{}, `/v1/plugins/x`, INERT],
      [{ secret: OTHER }, '/v2/send?message=x', INERT],
      [{}, '/v1/attachments/sound', [caching, sniffing]],
      [{}, '/v1/attachments/film', [caching, sniffing]],
      [{}, '/v1/attachments/kept', [csp, sniffing]],
      [{}, '/swagger/index.html', []],
      [{ method: 'DELETE' }, '/v1/attachments/html', []],
      [{ method: 'POST', body: JSON.stringify(MESSAGE) }, '/v2/send', []],
    ];
    for (const [{ secret = SECRET, ...request }, path, added] of cases) {
      const answer = await rawRequest(gateway, `/@auth=${secret}${path}`, request);
      const pairs = own[path.split('/').at(-1)!] ?? [];
      const passed = pairs.flatMap((name, i) => i % 2 === 0 ? [`${name.toLowerCase()}: ${pairs[i + 1]}`] : []);
      assert.deepEqual(fieldsOf(answer), [...passed, ...added, 'content-length: 2'].sort(), path);
    }
    // Of several X-Content-Type-Options browsers obey the first, and of policies all.
    const sniffed = await rawRequest(gateway, `/@auth=${SECRET}/v1/attachments/sniffed`);
    assert.match(sniffed, /nosniff[^]*none\r\n/);
    assert.doesNotMatch(sniffed.split('nosniff')[0]!, /none\r\n/);
    assert.equal(fieldsOf(sniffed).includes(csp), true);
  },
);

test('a preflight of an origin on cors is answered without a credential, and reaches neither backend nor rate', async (t) => {
  for (
    const config of [OPEN, { ...OPEN, tokens: { test: { secret: SECRET, rate: '1/1h' } } }] as GatewayConfig[]
  ) {
    const { backend, gateway } = await startBoth(t, config);
    const preflight = (target: string, ...headers: string[]): Promise<string> =>
      rawRequest(gateway, target, {
        method: 'OPTIONS',
        headers: [`Origin: ${DASHBOARD}`, 'Access-Control-Request-Method: POST', ...headers],
      });
    const cases: [asked: string[], allowed: string][] = [
      [['authorization,content-type'], 'authorization, content-type'],
      [['X-Request-Id, Authorization ,accept'], 'authorization, accept, x-request-id'],
      [['accept-language', 'content-language'], 'accept-language, content-language'],
      [['authorization,x-forwarded-for,cookie,*'], 'authorization'],
      [['x-other'], ''],
      [[], ''],
    ];
    for (const [asked, allowed] of cases) {
      const names = asked.map((name) => `Access-Control-Request-Headers: ${name}`);
      const response = await preflight('/v2/send', ...names);
      assert.match(response, /^HTTP\/1\.1 204 No Content\r\n[^]*\r\n\r\n$/);
      assert.deepEqual(
        fieldsOf(response),
        [
          `access-control-allow-headers: ${allowed}`,
          'access-control-allow-methods: GET, POST, PUT, PATCH, DELETE',
          'access-control-max-age: 60',
          ...FOR_PAGES,
        ].sort(),
      );
    }
    // Of what is no route, or no target, it says the same: a page can read the refusal that follows.
    const first = await preflight('/v2/send');
    for (
      const target of [
        ...['/no/such/thing', '/v1/accounts', RECEIVE, `/@auth=${OTHER}/v2/send`, `/@auth=${OTHER}/@auth=x/`],
        ...['/../v2/send', '/v1/groups/--help', '/v1/receive/1', '/%zz', '/v1%2Fabout', 'http://x/v2/send'],
      ]
    ) assert.deepEqual(fieldsOf(await preflight(target)), fieldsOf(first), target);
    assert.equal(backend.connections, 0);
    assert.doesNotMatch(gateway.log.join(), SECRETS);
    const { method, token, status, level } = requests(gateway)[0];
    assert.deepEqual([method, token, status, level], ['OPTIONS', undefined, 204, 'debug']);
    const headers = { ...BEARER, origin: DASHBOARD };
    assert.equal((await ask(gateway, { body: MESSAGE, headers })).status, 201);
  }
});

test('a page of an origin on cors can read why its address is refused', async (t) => {
  const both = await startBoth(t, { cors: [DASHBOARD], clients: ['10.0.0.0/8'] });
  const headers = { 'origin': DASHBOARD, 'access-control-request-method': 'POST' };
  assert.equal((await ask(both.gateway, { method: 'OPTIONS', headers })).status, 204);
  const refused = await ask(both.gateway, { body: MESSAGE, headers: { ...BEARER, origin: DASHBOARD } });
  assertDenied(refused, 403, 'client_not_allowed', both);
  assert.equal(refused.headers['access-control-allow-origin'], DASHBOARD);
  assertDenied(
    await ask(both.gateway, { method: 'OPTIONS', headers: { ...headers, origin: 'https://x.example' } }),
    403,
    'client_not_allowed',
    both,
  );
});

test('an origin that is not on cors is named in the log where a credential is missing, and forges no line there', async (t) => {
  const both = await startBoth(t, { cors: [DASHBOARD] });
  const asked = { 'access-control-request-method': 'POST' };
  const cases: [origin: string | undefined, reason: string, logged?: string][] = [
    ['https://new.example:8443', 'origin_not_listed', 'https://new.example:8443'],
    ['null', 'origin_not_listed', 'null'],
    [`https://${'x'.repeat(200)}`, 'origin_not_listed', `https://${'x'.repeat(92)}`],
    [`http://api:${OTHER}@new.example`, 'no_credential'], // and no credential gets into the log
    ['https://a\x9b2J.example', 'no_credential'],
    ['https://a"b,level=info', 'origin_not_listed', 'https://a"b,level=info'],
    ['a"b level=info \x9b2J\t\xe0', 'no_credential'], // nothing that a browser sends
    [DASHBOARD, 'no_credential'],
    [undefined, 'no_credential'],
  ];
  for (const [origin, reason, logged] of cases) {
    const own = origin === undefined ? {} : { origin };
    for (const request of [{ method: 'OPTIONS', headers: own }, { headers: own }, { body: MESSAGE, headers: own }]) {
      const answer = await ask(both.gateway, request);
      assertDenied(answer, 401, 'unauthorized', both);
      const line = requests(both.gateway).at(-1)!;
      assert.deepEqual([line.reason, line.origin], [reason, logged]);
    }
    if (logged === undefined) continue;
    const preflight = await ask(both.gateway, { method: 'OPTIONS', headers: { ...own, ...asked } });
    assertDenied(preflight, 401, 'unauthorized', both);
    const answer = await ask(both.gateway, { headers: { ...own, authorization: `Bearer ${OTHER}` } });
    assertDenied(answer, 401, 'unauthorized', both);
    const [before, after] = requests(both.gateway).slice(-2);
    assert.deepEqual([before!.reason, after!.reason, after!.origin], ['origin_not_listed', 'unknown_token', undefined]);
  }
});

test('an OPTIONS that is no preflight of an origin on cors is a request like others', async (t) => {
  const both = await startBoth(t, { cors: [DASHBOARD, 'https://plain.example'] });
  const asked = 'Access-Control-Request-Method: POST';
  for (const headers of [...NOT_LISTED.map((origin) => [...origin, asked]), [`Origin: ${DASHBOARD}`]]) {
    for (const [status, credential] of [[401, []], [405, [`Authorization: Bearer ${SECRET}`]]] as const) {
      const response = await rawRequest(both.gateway, '/v2/send', {
        method: 'OPTIONS',
        headers: [...headers, ...credential],
      });
      assert.equal(statusOf(response), status, JSON.stringify(headers));
      assert.equal(response.includes('Access-Control-Allow-Methods'), false);
    }
  }
  const headers = { 'origin': DASHBOARD, 'access-control-request-method': 'POST' };
  assertDenied(await ask(both.gateway, { method: 'POST', headers }), 401, 'unauthorized', both);
});

test('WebSocket: one that a page of an origin on cors opened with what the browser adds is closed by a reload without it', async (t) => {
  const backend = await startUpgradeBackend(t);
  for (const [config, credential] of [[SWITCHED, REMEMBERED], [OPEN, {}]] as [GatewayConfig, object][]) {
    const gateway = await startGateway(t, backend, { ...config, allow: ['receive'] });
    const openFrom = (headers: object): Connection =>
      openWebSocket(t, gateway, {
        headers: Object.entries({ ...credential, ...headers }).map(([name, value]) => `${name}: ${value}`),
      });
    const [page, program] = [openFrom({ origin: 'https://dash.example:8443' }), openFrom({})];
    for (const { text } of [page, program]) await until(() => text().startsWith('HTTP/1.1 101'));
    gateway.reload({ ...config, allow: ['receive'], cors: ['https://other.example'] });
    await closed(page.socket);
    await until(() => linesOf(gateway, /^websocket closed$/)[0]?.reason === 'no_longer_allowed');
    assert.equal(program.socket.destroyed, false);
  }
});

test('WebSocket: a refusal says to a page of an origin on cors that it may read it', async (t) => {
  const { gateway } = await startBoth(t, { cors: [DASHBOARD] });
  const { socket, text } = openWebSocket(t, gateway, {
    headers: [`Authorization: Bearer ${SECRET}`, `Origin: ${DASHBOARD}`],
  });
  await closed(socket);
  assert.equal(statusOf(text()), 403);
  assert.deepEqual(fieldsOf(text()).filter((line) => FOR_PAGES.includes(line)), FOR_PAGES);
});

section('ENDPOINTS'); // ───────────────────────────────────────────────────────────────────────────
/** Every route of backend.md, by the groups that they belong to here; N is a number, G a group. */
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
    GET /v1/contacts/N/some-uuid/avatar; POST /v1/contacts/N/sync; GET,POST,PUT,DELETE /v1/plugins/anything;
    GET /swagger/index.html; GET /swagger/doc.json`,
}).flatMap(([group, routes]) =>
  routes.split(';').flatMap((route) => {
    const [methods = '', path = ''] = route.trim().split(' ');
    return methods.split(',').map((method) => ({
      group,
      method,
      path: path.replace('N', FROM).replace('/G', `/${GROUP}`),
    }));
  })
);

/** Where any request is 200, whatever the backend has for it. */
const ANY_ROUTE: Handler = (req, res) => void req.resume().on('end', () => res.end('{}'));
const ANSWERING = { handler: ANY_ROUTE };

/** The request of a route, as a row that a token may send or is refused. */
function rowOf({ group, method, path }: typeof ROUTES[number], isAllowed: boolean): string {
  const refusal = group === 'setup' ? '403 setup_blocked' : '403 endpoint_not_allowed';
  return `${method} ${path}${method === 'GET' ? '' : ' | {}'} → ${isAllowed ? `200 | ${method} ${path}` : refusal}`;
}

const IN_WORD = { send: 'send', info: 'info', receive: 'receive', messaging: 'send receive messaging', setup: 'setup' };
for (const [word, groups] of Object.entries(IN_WORD)) {
  table(`allow "${word}" lets through its routes of the backend and no other`, { allow: [word] }, ANSWERING)`
    * bearer
    ${ROUTES.map((route) => rowOf(route, groups.split(' ').includes(route.group)))}`;
}

const WILDCARDS = '* /*,* /v1/*,* /:a/*,GET /v1/:a/:b,* /v1/*/:number,* /:a/:b,* /v1/:a,* /:swagger/*'.split(',');
for (
  const [allow, reached] of [
    [[...WILDCARDS, 'messaging', 'send', 'info', 'receive'], /^$/],
    [['* /v1/accounts/*'], /^\w+ \/v1\/accounts\//],
    [['GET /swagger/*'], /^GET \/swagger\//],
    [['GET /swagger/:file'], /^GET \/swagger\//],
    [['GET /v1/accounts', 'GET /swagger/doc.json'], /^GET \/(v1\/accounts|swagger\/doc.json)$/],
  ] as [string[], RegExp][]
) {
  const setup = ROUTES.filter(({ group }) => group === 'setup');
  table(`no wildcard reaches setup; two segments do, and of swagger one: ${allow.at(-1)}`, { allow }, ANSWERING)`
    * bearer
    ${setup.map((route) => rowOf(route, reached.test(`${route.method} ${route.path}`)))}`;
}

const NEW_ROUTES = ['/v1/register', '/v1/devices/x/y/z', '/v1/accounts/new/thing', '/swagger', '/v1/plugins'];
const ALL_BUT_SETUP = { allow: ['* /*', 'messaging', 'GET /v1/accounts'] };
table('a new upstream route below a setup prefix is setup, although no table knows it', ALL_BUT_SETUP)`
  * bearer → 403 setup_blocked
  ${NEW_ROUTES.map((path) => `GET ${path} ;; DELETE ${path} ;; OPTIONS ${path} ;; PROPFIND ${path}`)}
  POST /v1/accounts | {}`;

/** Method, path, and the route in the log, if it is another than the path. */
const NO_ENDPOINTS = `
  POST / → route=/
  POST /send → route=/send | "POST to /v2/send"
  POST /api/v2/send → route=/*/v2/send
  POST /api/v1/rpc → route=/*/v1/*
  GET /v1/receive/${FROM}/x → route=/v1/receive/*/*
  GET /${'v1/'.repeat(3000)} → route=/v1${'/v1'.repeat(7)}`;
const NO_METHODS = `
  GET /v2/send → Allow: POST | route=/v2/send
  PUT /v2/send?message=x → Allow: POST | route=/v2/send
  HEAD /v1/about → Allow: GET | route=/v1/about
  OPTIONS /v2/send → Allow: POST | route=/v2/send
  PATCH /v1/groups/${FROM} → Allow: GET, POST | route=/v1/groups/*`;
/** To a token that may not use setup these are 403. */
const OF_SETUP = `
  PATCH /v1/devices/${FROM}/local-data → Allow: DELETE | route=/v1/devices/*/local-data
  PUT /v1/contacts/${FROM}/sync → Allow: GET, POST | route=/v1/contacts/*/sync
  OPTIONS /v1/plugins/mine → Allow: GET, POST, PUT, PATCH, DELETE | route=/v1/plugins/*`;

test('to who holds a token, what is no endpoint is 404, and a method that it lacks is 405 with those that it has', async (t) => {
  const wide = await startBoth(t, { allow: ['messaging', 'setup', 'GET /v1/new/*'] });
  const narrow = { backend: wide.backend, gateway: await startGateway(t, wide.backend, { allow: ['info'] }) };
  for (const both of [wide, narrow]) {
    await checkRows(both, ['* bearer → 404 unknown_endpoint | Allow:', NO_ENDPOINTS]);
    await checkRows(both, ['* bearer → 405 method_not_allowed', NO_METHODS]);
  }
  await checkRows(wide, [
    '* bearer → 404 unknown_endpoint | Allow:',
    'GET /v1/new → route=/v1/*',
    'POST /v1/new/x → route=/v1/*/*',
    `GET /v1/accounts/${FROM} → route=/v1/accounts/*`,
  ]);
  await checkRows(wide, ['* bearer → 405 method_not_allowed', OF_SETUP]);
  await checkRows(narrow, ['* bearer → 403 endpoint_not_allowed', 'GET /v1/attachments']);
  // To others it is all the same, but the log knows the route.
  const routes = [NO_ENDPOINTS, NO_METHODS, OF_SETUP].map((rows) => rows.replace(/→.*(?=route)/g, '→ '));
  await checkRows(wide, ['* → 401', routes.map((rows) => rows.replace(/ \| "POST.*$/m, ''))]);
});

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
table('the default allows sending and asking about, and nothing more', {})`
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

table('attack: use a route that carries no account', CONFINED)`
  * bearer → 403 endpoint_not_allowed
  GET /v1/attachments ;; GET /v1/attachments/abc ;; DELETE /v1/attachments/abc
  GET /v1/search?numbers=%2B15550100009`;
const ANY_PATTERN = { ...CONFINED, allow: ['* /*', 'POST /v1/plugins/*', 'POST /v3/send'] };
table('attack: use a route that a pattern opens and nobody knows', ANY_PATTERN)`
  * bearer → 403 endpoint_not_allowed
  POST /v3/send | ${HELLO} ;; POST /v1/plugins/mine | ${HELLO} ;; GET /v1/new/${FROM} ;; PATCH /v1/groups/${FROM}`;
for (const rule of [{ senders: [FROM] }, { recipients: [TO] }]) {
  const config = { allow: ['* /*', 'POST /v1/plugins/*'], ...tokens(rule) };
  table(`attack: use a route that nobody knows with a token that has only ${Object.keys(rule)}`, config)`
    * bearer → 403 endpoint_not_allowed
    POST /v3/send | ${HELLO} ;; POST /v1/plugins/mine | ${HELLO} ;; GET /v1/new/${FROM}`;
}
table('attack: reach setup by another spelling', { allow: ['messaging', 'info', '* /*', '* /v1/*'] })`
  * bearer | POST / → 403 setup_blocked ;; * bearer | DELETE / → 403 setup_blocked
  * bearer | POST / | X-HTTP-Method-Override: GET → 403 setup_blocked
  /v1/register/${FROM} ;; //v1/register/${FROM} ;; /v1//register/${FROM}/ ;; /%76%31/%72egister/${FROM}
  /v1/register/%2B${FROM.slice(1)} ;; /v1/register/${FROM}?x=/v2/send ;; /v1/unregister/${FROM}
  /v1/devices/${FROM}/local%2Ddata ;; /v1/accounts ;; /v1/configuration ;; /v1/plugins/x`;
table('attack: bring setup back by the default', { allow: ['setup'], ...tokens({ allow: ['messaging'] }) })`
  * bearer → 403 setup_blocked
  POST /v1/register/${FROM} ;; GET /v1/accounts`;
table('attack: use a spelling of a setup route that is no route', { allow: ['messaging', 'info'] })`
  * bearer → 404 unknown_endpoint
  POST /V1/REGISTER/${FROM} ;; POST /v1/Register/${FROM} ;; POST /v1/register;x/${FROM} ;; POST /v1/about;/register`;
const NAMES_ROUTES = ['info', 'GET /v1/attachments/:attachment', 'GET /v1/accounts'];
table('a pattern that names a route without an account opens it', tokens({ senders: [FROM], allow: NAMES_ROUTES }))`
  * bearer → passes
  GET /v1/about → 200 ;; GET /v1/attachments/abc ;; GET /v1/accounts ;; GET /v1/attachments → 403 endpoint_not_allowed`;
// A wildcard counted as naming the route.
table("attack: read all accounts' attachments by a pattern that names nothing", {
  ...tokens({ senders: [FROM], allow: ['GET /v1/*', 'GET /*', 'GET /:a/:b/:c'] }),
})`
  * bearer → 403 endpoint_not_allowed
  GET /v1/attachments ;; GET /v1/attachments/abc ;; GET /v1/search?numbers=%2B1555`;

section('RATE'); // ────────────────────────────────────────────────────────────────────────────────
/** A gateway on a clock that its test sets, and what comes of one request after the other to it. */
async function startClocked(t: TestContext, config: GatewayConfig) {
  const clock = { nowMs: 1_700_000_000_000 };
  const both = await startBoth(t, config, { now: () => clock.nowMs });
  const asks = (way: string, ...wanted: string[]): Promise<void> =>
    checkRows(both, [`* ${way}`, wanted.map((row) => row.includes('→') ? row : `GET /v1/about → ${row}`)]);
  return { both, clock, asks };
}

test('rate: a token beyond its rate is 429 with a Retry-After that is true, and other tokens go on', async (t) => {
  const { clock, asks } = await startClocked(t, { rate: '3/1m', ...tokens({}, {}) });
  await asks('bearer', '200', '200', '200');
  // What may not pass anyway does not count, neither before nor after.
  await asks('bearer', 'GET /v1/accounts → 403 setup_blocked', '429 rate_limited | Retry-After: 20');
  await asks(`bearer ${OTHER}`, '200');
  clock.nowMs += 19_999;
  await asks('bearer', '429 rate_limited');
  clock.nowMs += 1;
  await asks('bearer', '200', '429 rate_limited');
});

test('wrong credentials beyond the budget are 429 with Retry-After; a right one always works', async (t) => {
  const { clock, asks } = await startClocked(t, { trustedProxies: ['127.0.0.1'] });
  const from = (client: string, ...wanted: string[]): Promise<void> =>
    asks(`bearer ${OTHER} | X-Forwarded-For: ${client}`, ...wanted);
  // A flood must not fill the log of a small computer.
  await from('203.0.113.7', ...Array<string>(30).fill('401 unauthorized | level=warn'));
  await from('203.0.113.7', '429 too_many_failures | level=debug | Retry-After: 2');
  await from('203.0.113.8', '401 unauthorized');
  // No credential is not a wrong one, and is challenged as ever.
  await asks('X-Forwarded-For: 203.0.113.7', '401 unauthorized', 'bearer → 200');
  clock.nowMs += 2000;
  await from('203.0.113.7', '401 unauthorized', '429 too_many_failures');
  // One household is one IPv6 /64.
  for (
    const [members, last, other] of [
      ...[['2001:db8::#', '2001:db8:0:0:ffff::1', '2001:db8:0:1::1']],
      ...[['2001:db8::b:#:d:e:f', '2001:db8:0:b::', '2001:db8:b::'], ['::c:b:#:d:e:f', '0:0:c:b::', 'c:b::']],
    ] as [string, string, string][]
  ) {
    for (let i = 0; i < 30; i++) await from(members.replace('#', i.toString(16)), '401 unauthorized');
    await from(last, '429 too_many_failures');
    await from(other, '401 unauthorized');
  }
});

// 500 requests without a credential were 500 lines, on a card of a few gigabytes.
test('a flood without a good token is 30 log lines a minute of each address, whatever is refused; then it is at debug', async (t) => {
  const clients = ['127.0.0.1', '203.0.113.0/24', '2001:db8::/32'];
  const config = { trustedProxies: ['127.0.0.1'], clients, cors: ['https://a.example'] };
  const { both, clock, asks } = await startClocked(t, config);
  const rows = literal`
    GET /v1/about → 401
    POST /v1/accounts | {} → 401
    GET /v1/about/%2e%2e → 400
    'x' | Content-Encoding: gzip → 415
    OPTIONS /v2/send | Access-Control-Request-Method: POST | Origin: https://b.example → 401`.trim().split(/\n */);
  const flood = (client: string, some: string[]): Promise<void> =>
    asks(
      'none',
      ...Array.from({ length: 40 }, (_, i) =>
        `X-Forwarded-For: ${client.replace('#', i.toString(16))} | ${some[i % some.length]} | level=${
          i < 30 ? 'warn' : 'debug'
        }`),
    );
  for (const [i, row] of rows.entries()) await flood(`203.0.113.${i + 1}`, [row]);
  await flood('198.51.100.1', ['GET /v1/about → 403 client_not_allowed']);
  const wrong = ['Authorization: Digest x', `bearer ${OTHER}`];
  await flood('203.0.113.99', [...rows, ...wrong.map((row) => `${row} → 401`)]);
  for (const [i, row] of wrong.entries()) {
    const alone = [...Array<string>(30).fill('401 | level=warn'), '429 | level=debug'];
    await asks(`X-Forwarded-For: 203.0.113.10${i} | ${row}`, ...alone);
  }
  await flood('2001:db8::#', rows.slice(0, 1)); // one household is one IPv6 /64
  const headers = { 'origin': 'https://a.example', 'access-control-request-method': 'POST' };
  assert.equal((await ask(both.gateway, { path: '/v2/send', method: 'OPTIONS', headers })).status, 204);
  assert.equal(requests(both.gateway).at(-1)!.level, 'debug', 'of a preflight that is allowed');
  // The count of wrong credentials is another one, and a good token's lines are logged as ever.
  const first = 'X-Forwarded-For: 203.0.113.1';
  await asks(`${first} | bearer ${OTHER}`, ...Array<string>(30).fill('401'), '429');
  const logged = 'bearer → 200 | level=info ;; bearer | GET /v1/accounts → 403 setup_blocked | level=warn';
  await asks(first, ...Array<string>(40).fill(logged));
  clock.nowMs += 2000;
  await asks(first, '401 | level=warn', '401 | level=debug');
});

test('RateLimiter: a bucket of so many, refilled evenly, on a clock that may go back', () => {
  const limiter = new RateLimiter();
  const rate = { count: 7, perMs: 1000, written: '' };
  for (let i = 0; i < 7; i++) assert.equal(limiter.take('a', rate, 0), 0);
  assert.equal(Math.round(limiter.take('a', rate, 0) * 1000), Math.round(1_000_000 / 7));
  assert.equal(limiter.take('b', rate, 0), 0);
  assert.equal(limiter.take('a', rate, 143), 0);
  assert.notEqual(limiter.take('a', rate, 143), 0);
  for (let i = 0; i < 7; i++) assert.equal(limiter.take('a', rate, 10_000), 0);
  assert.notEqual(limiter.take('a', rate, 10_000), 0);
  assert.ok(limiter.take('a', rate, -1e12) <= 1000, 'a clock set back locks nobody out for longer than a bucket');
  assert.equal(limiter.take('a', rate, 143 - 1e12), 0, 'and the bucket fills from then on');
  limiter.take('b', rate, 20_000);
  for (let i = 0; i < 100; i++) assert.notEqual(limiter.take('b', { ...rate, count: 1 }, 19_000 + i), 0);
  assert.equal(limiter.take('b', { ...rate, count: 1 }, 20_000), 0, 'however often it is asked in between');
});

// A token was locked out for as long as the clock had been set back.
test('rate: a clock that is set back locks no token out, however often it asks', async (t) => {
  const { clock, asks } = await startClocked(t, { rate: '3/1m' });
  await asks('bearer', '200', '200', '200');
  clock.nowMs -= 3_600_000;
  for (const status of ['429', '429', '429', '429', '200']) {
    await asks('bearer', status);
    clock.nowMs += 5000;
  }
});

section('REQUEST BODY'); // ────────────────────────────────────────────────────────────────────────
// One document for each kind of mistake: BODY SCAN has the others, cut at every byte.
const BROKEN = literal`
  {
  '\n\t {"a'
  {"a":1,} ;; {"number":nul} ;; '{"a":"\n"}' ;; {} x ;; {"a":${'['.repeat(64)}${']'.repeat(64)}} ;; '{"a":"\xff"}'`;
const NO_OBJECT = literal`
  '' ;; ' ' ;; [] ;; "text" ;; '1' ;; 'auth=x' ;; '\ufeff{}' ;; '\u000b{}'`;
const MISREAD = literal`
  {"number":1} ;; {"Number":"${FROM}"} ;; {"number":"${FROM}","number":"${FROM}"} ;; {"recipients":["${TO}",null]}
  {"recipients":"${TO}"} ;; {"recipient\u017f":["${TO}"]}
  {"base64_attachments":["data:x;base64,AAAA;filename=../x;base64,QUJD"]}
  {"recipients":["${'1'.repeat(5000)}"]}`;
table('a body that is not a JSON object is 400, and the backend sees nothing', {})([
  '* bearer → 400 bad_json',
  BROKEN,
  NO_OBJECT.replace("''", ''), // without a body a send is broken too, but is told so in other words
  'POST /v2/send → "A JSON object is needed as the body, with Content-Length or chunked."',
]);
table('a broken object is 400 without a token too', {})`
  * → 400 bad_json
  ${BROKEN}`;
table('what does not begin like an object, a text or a form, lacks a token: 401, of any size', {})([
  '* → 401 unauthorized | reason=no_credential',
  NO_OBJECT,
  literal`
    POST /v2/send ;; Transfer-Encoding: chunked | '' ;; Content-Type: text/plain | 'Backup done: 5 files'
    Content-Type: application/x-www-form-urlencoded | 'message=hi&auth=${SECRET}'
    Content-Type: application/json | ' \n[{"auth":"x"}]' ;; -- message = hi
    Content-Type: text/plain | '\xff\xfe not UTF-8' ;; Content-Type: text/plain | '${' '.repeat(70_000)}'
    Content-Type: text/plain | '${'long '.repeat(20_000)}'
    {"auth":null,${HELLO.slice(1)}`,
]);

/** A chunked body in single bytes, as Latin-1. */
const inBytes = (text: string): string =>
  `${Array.from(Buffer.from(text).toString('latin1'), (byte) => `1\r\n${byte}\r\n`).join('')}0\r\n\r\n`;

test('a text or a form without a credential is 401 in single bytes too', async (t) => {
  const { backend, gateway } = await startBoth(t);
  const head = 'POST /v2/send HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n';
  for (const text of ['Backup done: 5 files', `data={"auth":"${SECRET}"}`, ' \n[{"auth":"x"}]', ' '.repeat(300)]) {
    assert.equal(codeOf(await raw(gateway, head + inBytes(text))), 'unauthorized', text);
  }
  assert.equal(backend.connections, 0, 'the backend saw a connection');
});

table('a body that the backend would read in another way is 400', {})`
  * bearer → 400 bad_field
  ${MISREAD} ;; {"auth":1} ;; {"Auth":"x"}`;
table('what is wrong with the fields of a body is said to nobody unknown, but for "Auth"', {})([
  '* → 401 unauthorized',
  MISREAD,
  `${AUTHED(SECRET).replace(`"${FROM}"`, '1')} → 400 bad_field`,
  `${AUTHED(SECRET).replace('auth', 'Auth')} → 400 bad_field`,
]);
table('a body of the size that is allowed passes, and one byte more is 413', { limits: { body: '1KiB' } })`
  * bearer → 413 body_too_large
  ${sized(1024)} → 201 ;; ${sized(1024)} | Transfer-Encoding: chunked → 201 ;; ${sized(1025)} → bytesIn=0
  ${sized(1025)} | Transfer-Encoding: chunked`;
table('a compressed body is 415; without a body its encoding says nothing', {})([
  '* bearer → 415 unsupported_encoding',
  ...['gzip', 'br', 'deflate, identity', 'x'].map((encoding) => `${HELLO} | Content-Encoding: ${encoding}`),
  `${HELLO} | Content-Encoding: Identity → 201`,
  'GET /v1/about | Content-Encoding: gzip → 200',
]);

table('an empty body is fine where the route needs none', { allow: ['setup', 'messaging'] })`
  * bearer → 201
  POST /v1/register/${FROM} ;; POST /v1/register/${FROM} | '' | Transfer-Encoding: chunked
  DELETE /v1/typing-indicator/${FROM} → 400 bad_json
  DELETE /v1/typing-indicator/${FROM} | {"recipient":"${TO}"} → 204 | {"recipient":"${TO}"}`;
table('the body of a GET authenticates it and goes no further', {})`
  * GET /v1/about
  {"auth":"${SECRET}"} → 200 | '' ;; '{"auth":"${SECRET}"${' '.repeat(70_000)}}' → 413 body_too_large`;

test('a chunked body beyond the limit that is already on its way is cut off and never complete', async (t) => {
  const { backend, gateway } = await startBoth(t, { limits: { body: '1MiB' } });
  const headers = { ...BEARER, 'transfer-encoding': 'chunked' };
  assert.equal((await ask(gateway, { body: sized(2_000_000), headers })).status, 413);
  assert.deepEqual(backend.sent, [], 'what the backend sent');
  assert.ok(backend.seen.every((seen) => !seen.complete), 'a request was complete');
});

const BIG_SEND = `${HELLO.slice(0, -1)},"base64_attachments":["${'A'.repeat(1_000_000)}"]}`;
const [EARLY_AUTH, LATE_AUTH] = [
  `{"auth":"${SECRET}",${BIG_SEND.slice(1)}`,
  `${BIG_SEND.slice(0, -1)},"auth":"${SECRET}"}`,
];
const ODDLY_WRITTEN = literal`'  {"number":"${FROM}" ,"recipients":[ "${TO}"],"x":"${
  literal`é😀\\u00e9\\n`.repeat(50_000)
}"}'`;
table('small bodies arrive with their true length, large ones with the length that was announced, byte for byte', {})`
  * bearer → 201
  ${HELLO} | Transfer-Encoding: chunked → '${HELLO}' | > Content-Length: ${HELLO.length} | > Transfer-Encoding:
  ${BIG_SEND} → '${BIG_SEND}' | > Content-Length: ${BIG_SEND.length}
  ${BIG_SEND} | Transfer-Encoding: chunked → '${BIG_SEND}' | > Content-Length: | > Transfer-Encoding: chunked
  ${ODDLY_WRITTEN} → ${ODDLY_WRITTEN}
  none | ${EARLY_AUTH} → '${BIG_SEND}' | > Content-Length: ${BIG_SEND.length}
  # Announced before it was known: spaces take the place of auth.
  ${LATE_AUTH} → ${BIG_SEND} | > Content-Length: ${LATE_AUTH.length}`;

const LATE = HELLO.replace('}', `,"base64_attachments":["${'A'.repeat(300_000)}"]`);
const LATE_SENDER = LATE.replace(`"number":"${FROM}",`, '');
const FAIL_LATE = literal`
  bad_field ${LATE},"recipients":["${STRANGER}"]}
  bad_field ${LATE},"recipient\u017f":["x"]}
  bad_field ${LATE},"members":["--help"]}
  bad_field ${LATE.slice(0, -1)},"data:;filename=../x;base64,QQ=="]}
  bad_field ${LATE},"recipient":"group.436641234567x"}
  bad_field ${LATE},"send_at":1}
  bad_field ${LATE_SENDER},"number":null}
  bad_field ${LATE_SENDER}}
  bad_json ${LATE}}{}
  bad_json ${LATE}
  bad_json ${LATE.slice(0, -2)}␊"]}
  bad_json ${LATE},"x":tru}
  recipient_not_allowed ${LATE},"recipient":"${STRANGER}"}
  sender_not_allowed ${LATE_SENDER},"number":"${STRANGER}"}`;
test('what fails late in a large body never becomes a document, and its request breaks off', async (t) => {
  const broken: string[] = [];
  const server = net.createServer((socket) => {
    let text = '';
    socket.setEncoding('latin1').on('data', (chunk) => {
      text += chunk;
    }).on('error', () => {}).on('close', () => {
      if (text !== '') broken.push(text); // by fetch there is a further connection, for the next request
    });
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.after(() => server.close());
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  const gateway = await startGateway(t, { url }, CONFINED);
  for (const [, code, body] of FAIL_LATE.matchAll(/(\w+) (\{.*)/g)) {
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

test('Expect: 100-continue is answered when the body is wanted, and a refused client is not asked for it', async (t) => {
  const { backend, gateway } = await startBoth(t, { auth: { methods: ['bearer', 'body'] } });
  const upload = async (authorization: string): Promise<[continued: boolean, status: number | undefined]> => {
    const body = sized(2_000_000);
    const req = beginSend(gateway, { authorization, 'expect': '100-continue', 'content-length': body.length });
    let continued = false;
    req.on('continue', () => {
      continued = true;
      req.end(body);
    }).flushHeaders();
    const [res] = await once(req, 'response') as [http.IncomingMessage];
    await once(res.resume(), 'end');
    req.destroy();
    return [continued, res.statusCode];
  };
  assert.deepEqual(await upload(`Bearer ${OTHER}`), [false, 401], 'a wrong token');
  assert.deepEqual(await upload(basic(`api:${SECRET}`)), [false, 401], 'a form that is not accepted');
  assert.equal(backend.connections, 0, 'the backend saw a connection');
  assert.deepEqual(await upload(`Bearer ${SECRET}`), [true, 201], 'a right token');
  assert.deepEqual([backend.sent.length, backend.seen[0]!.headers.expect], [1, undefined], 'what the backend got');
});

// It said keep-alive, and reset the connection two seconds later, with whatever request was on it by then.
test('a refusal that does not read the rest of the body says Connection: close, and ends the connection with it', async (t) => {
  const both = await startBoth(t, { limits: { body: '100KiB' }, ...tokens({}, { rate: '1/1h' }) }, {
    stallTimeoutMs: 400,
  });
  await checkRows(both, [`bearer ${OTHER} → 200`]);
  for (
    const [token, status, bytes, isChunked] of [
      ...[['wrong', 401, 65_537], ['wrong', 401, 120_000], ['wrong', 401, 2_000_000], ['wrong', 401, 200_000, true]],
      ...[[OTHER, 429, 70_000], [SECRET, 413, 120_000], [SECRET, 413, 2_000_000], [SECRET, 400, 200_000, true]],
    ] as [token: string, status: number, bytes: number, isChunked?: boolean][]
  ) {
    const [length, body] = isChunked
      ? ['chunked' as const, `${bytes.toString(16)}\r\n${'['.padEnd(bytes)}\r\n0\r\n\r\n`]
      : [bytes, '['.padEnd(bytes)];
    // The good send behind it must not get through: its client was told that the connection ends.
    const text = await raw(both.gateway, post(token, length) + body + SEND);
    assert.equal(statusOf(text), status, `${bytes} bytes: ${text}`);
    assert.match(text, /^connection: close\r$/im, `${bytes} bytes`);
    assert.equal(text.split('HTTP/1.1 ').length, 2, `${bytes} bytes: ${text}`);
  }
  assert.deepEqual(both.backend.sent, []);
});

test('a refusal that says keep-alive keeps the connection, however slowly the rest of the small body comes', async (t) => {
  const answers: (() => void)[] = [];
  const backend = await startBackend(t, (req, res) => {
    req.resume().on('end', () => answers.push(() => res.writeHead(201).end('[]')));
  });
  const gateway = await startGateway(t, backend, {}, { stallTimeoutMs: 2000 });
  const refused = `${post(OTHER, 60_000)}[`;
  const kept = ([[401, refused], [200, refused.replace('POST /v2/send', 'GET /healthz')]] as const)
    .map(([status, request]) => ({ status, ...open(t, gateway, request) }));
  // They tell the time: one says "close" and goes soon, one says "keep-alive" and goes when the rest does not come.
  const [soon, late] = [post(OTHER, 1_000_000), refused].map((begun) => open(t, gateway, begun).socket);
  for (const { status, text } of kept) {
    await until(() => /(?:\}|ok)\n$/.test(text()));
    assert.equal(statusOf(text()), status);
    assert.match(text(), /^connection: keep-alive\r$/im);
  }
  await closed(soon!);
  for (const { socket } of kept) socket.write(`${' '.repeat(59_999)}${SEND}`);
  await until(() => answers.length === 2);
  await closed(late!);
  for (const answer of answers) answer();
  for (const { socket, text } of kept) {
    await until(() => text().includes('[]'));
    assert.equal(socket.destroyed, false);
  }
});

// Each byte renewed the time of the rest, so that one in 1.4 s held a connection for 25 hours.
test('a client that is refused holds its connection no longer than a body may take, whatever it still sends', async (t) => {
  const { backend, gateway } = await startBoth(t, {}, { stallTimeoutMs: 400 });
  const health = post(OTHER, 60_000).replace('POST /v2/send', 'GET /healthz');
  const unknown = `${post('', 60_000).replace(/Authorization.*\r\n/, '')}{"message":"`;
  const clients = [
    `401 ${post(OTHER, 1_000_000)}`,
    `401 ${post(OTHER, 60_000)}`,
    `401 ${post(OTHER, 'chunked')}f4240\r\n`,
    `413 ${post(SECRET, 1_000_000_000)}`,
    `200 ${health}`,
    `200 ${health.replace('60000', '1000000')}`,
    `408 ${unknown}`,
    `408 ${unknown.replace('60000', '1000000')}`,
  ].map(async (row) => assert.equal(statusOf(await trickle(t, gateway, row.slice(4))), Number(row.slice(0, 3)), row));
  await Promise.all(clients);
  assert.equal(backend.connections, 0, 'the backend saw a connection');
});

/** Collects garbage at once. */
function collectGarbage(): void {
  const { Bun: bun } = globalThis as { Bun?: { gc(isFull: boolean): void } };
  if (bun) return bun.gc(true);
  setFlagsFromString('--expose-gc');
  runInNewContext('gc')();
}

// A small body whose client had left stayed in memory for 28 s, and its time could be bought with 77 bytes.
test('nothing of a request stays in memory once its connection is gone', async (t) => {
  const begun = (token: string, length: number | 'chunked', body = '{"message":"'): string =>
    post(token, length) + body;
  const health = 'GET /healthz HTTP/1.1\r\nHost: x\r\n';
  const upgrade = 'Connection: Upgrade\r\nUpgrade: websocket\r\nHost';
  const handshake = ABOUT.replace('/v1/about', RECEIVE).replace('Host', upgrade);
  const big = `${HELLO.slice(0, -1)},"x":"${'x'.repeat(100_000)}`;
  const unknown = 'POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{';
  for (
    const [bytes, arrives] of [
      ...[unknown, begun('wrong', 9), begun('wrong', 1_000_000), begun('wrong', 'chunked', '4\r\n{"a"')],
      ...[begun(SECRET, 99), begun(SECRET, 'chunked', 'c\r\n{"message":"\r\n')],
      ...[begun(SECRET, 99).replace('/v2/send', '/v1/register'), post(SECRET, 99, 'Expect: 100-continue')],
      ...[begun(OTHER, 99), begun(OTHER, 500_000, big)],
      ...[`${health}Content-Length: 99\r\n\r\n{`, `${health}\r\n`.repeat(16)],
      ...[begun(SECRET, 200_000, big), SEND, SEND + begun(SECRET, 99), handshake].map((bytes) => [bytes, 'whole']),
      [handshake, 'accepted'],
    ].map((row) => [row].flat() as [bytes: string, arrives?: string])
  ) {
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
    await until(() =>
      met.length >= clients.length && (arrives === undefined || backend.seen.length === clients.length)
    );
    clients.forEach((socket) => socket.destroy());
    await until(() => requests(gateway).length >= clients.length);
    held.forEach((res) => res.end());
    const left = (): number => met.filter((request) => request.deref() !== undefined).length;
    // The runtime may keep the last ones that it has worked on.
    await until(() => {
      collectGarbage();
      return left() <= 2;
    }).catch(() => assert.fail(`${left()} of ${met.length} stay: ${bytes.slice(0, 200)}`));
  }
});

test('headers that do not arrive end in 408, and a body that makes no progress, or is too slow, does too', async (t) => {
  const slow = await startBoth(t, {}, { headersTimeoutMs: 100 });
  const { backend, gateway } = await startBoth(t, {}, { stallTimeoutMs: 250 });
  const unknown = 'POST /v2/send HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n{"message":"';
  const responses = [
    raw(slow.gateway, 'GET /v1/about HTTP/1.1\r\nHost: x\r\n'),
    raw(gateway, `${post(SECRET, 100)}{"message":`),
    raw(gateway, unknown),
  ];
  for (const response of await Promise.all(responses)) {
    assert.deepEqual([statusOf(response), codeOf(response)], [408, 'request_timeout'], response);
    assert.match(response, /^x-request-id: [\w-]{36}\r$/im);
  }
  assert.equal(backend.seen.length, 0, 'the backend saw a request');
});

// Each byte renewed the time of the rest.
test('a body of which less than 30 KiB comes in the time for it is 408, and one that the backend reads slowly is not', async (t) => {
  const held: http.IncomingMessage[] = [];
  const backend = await startBackend(t, (req, res) => {
    req.on('error', () => {}).on('end', () => res.writeHead(201).end('[]'));
    if (!req.url!.includes('slow')) return void req.resume();
    held.push(req);
    setTimeout(() => req.resume(), 2000); // it does not read for twice as long as a client may take
  });
  const config = tokens({}, { defaults: DEFAULTS });
  const gateway = await startGateway(t, backend, config, { stallTimeoutMs: 300 });
  const [text, more] = ['{"message":"', 'x'.repeat(100_000)];
  for (
    const [name, bytes] of Object.entries({
      'within the head': `${post(SECRET, 2_000_000)}${text}`,
      'behind the head': `${post(SECRET, 2_000_000)}${text}${more}`,
      'chunked': `${post(SECRET, 'chunked')}ffffff\r\n${text}${more}`,
      'of a webhook': `${post(OTHER, 1_000_000)}${text}`,
      'of a webhook, behind its head': `${post(OTHER, 1_000_000)}${text}${more}`,
    })
  ) assert.equal(codeOf(await trickle(t, gateway, bytes)), 'request_timeout', name);
  const big = { ...MESSAGE, base64_attachments: ['A'.repeat(24 * MIB)] };
  const steady = await startGateway(t, backend, config, { stallTimeoutMs: 1000 });
  const slow = await ask(steady, { path: '/v2/send?slow', body: big, headers: BEARER });
  assert.deepEqual([slow.status, held.length], [201, 1]);
  // One that is slow but steady takes longer than that in all.
  const req = beginSend(steady, BEARER);
  req.write(`${HELLO.slice(0, -1)},"more":"`);
  for (let i = 0; i < 15; i++) {
    req.write('x'.repeat(31 * 1024));
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  req.end('"}');
  const [{ statusCode }] = await once(req, 'response') as [http.IncomingMessage];
  assert.equal(statusCode, 201);
});

test('100 Continue is not sent to HTTP/1.0, which does not know it', async (t) => {
  const { gateway } = await startBoth(t);
  const head = `Expect: 100-continue\r\nAuthorization: Bearer ${SECRET}\r\nContent-Length: ${HELLO.length}`;
  assert.match(await raw(gateway, `POST /v2/send HTTP/1.0\r\n${head}\r\n\r\n${HELLO}`), /^HTTP\/1\.1 201 /);
});

section('SENDS'); // ───────────────────────────────────────────────────────────────────────────────
const DEFAULTS = { number: FROM, recipients: [TO] };
const MEANT = JSON.stringify(DEFAULTS);
const THIRD = '+15550100003';

/** One token that makes sends of what it posts. */
function hook(token: TokenConfig = { defaults: DEFAULTS }): GatewayConfig {
  return { ...ALL_FORMS, tokens: { hook: { secret: SECRET, ...token } } };
}

const startWebhook = (t: TestContext, token?: TokenConfig): Promise<Both> => startBoth(t, hook(token));
const reading = (message: string): TokenConfig => ({ defaults: DEFAULTS, message });

const READS_TEXT = reading('{{text}}');
/** A request that is sent as JSON from and to the defaults, with what its row says. */
const MADE = `POST /v2/send | bearer → 201 | > Content-Type: application/json | ${MEANT}`;
/** What may declare a form or a text, for curl -d and wget declare the first of these for everything. */
const UNDECLARED = [`Content-Type: ${URLENCODED}; charset=utf-8`, 'Content-Type:', ''].map((type) =>
  `* ${type} | ${MADE}`
);
table('a webhook: a new send is made of its fields, and nothing else passes', hook())`
  * ${MADE}
  {"message":"hi"} → same ;; {"message":"hi","number":"${THIRD}","recipients":["+15550100004","${GROUP}"]} → same
  {"message":"hi","number":2} → {"message":"hi"} ;; {"message":"hi","number":""} → {"message":"hi"}
  {"message":"hi","number":["${THIRD}"]} → {"message":"hi"}
  {"message":"hi","number":null,"recipients":null,"recipient":null,"base64_attachments":null,"text_mode":null,"sticker":null,"Recipients":null} → {"message":"hi"}
  {"message":"hi","recipients":"${THIRD}"} → {"message":"hi","recipients":["${THIRD}"]}
  {"message":"hi","base64_attachments":"aGk="} → {"message":"hi","base64_attachments":["aGk="]}
  {"message":"hi","recipients":["${THIRD}"],"recipient":""} → {"message":"hi","recipients":["${THIRD}"]}
  # Keys given twice that are not its own.
  {"message":"x","message":"hi","a":{"a":1},"b":"\"number\":1,","number":1,"c":[{"number":1},{"number":2}]} → {"message":"hi"}
  # Fields of others.
  {"message":"hi","members":["${STRANGER}"],"admins":["${STRANGER}"],"Message":"x","base64_attachment":"QUJD"} → {"message":"hi"}
  {"message":"hi","alerts":[],"__proto__":{"number":"${STRANGER}"},"version":"1","is_group":true} → {"message":"hi"}
  {"message":"hi","numbers":["x"],"recipients_":["x"],"":"x","Sticker":"a:1","TEXT_MODE":"x","toString":"x"} → {"message":"hi"}
  # The other fields of a send, of whatever type: that is the backend's to judge.
  {"base64_attachments":["QUJD"]} → same ;; {"sticker":"a:1"} → same
  {"message":"see https://a.b","link_preview":{"url":"https://a.b","title":"A","base64_thumbnail":"QUJD"}} → same
  {"message":"x","quote_timestamp":1,"quote_author":"${TO}","quote_message":"x","quote_mentions":[{"start":0}]} → same
  {"message":"x","mentions":[{"author":"${TO}"}],"edit_timestamp":1,"notify_self":false,"view_once":true} → same
  {"message":{"text":"hi","toString":1},"mentions":[null],"quote_timestamp":"1","quote_author":7,"quote_message":{}} → same
  {"message":"x","quote_mentions":"x","edit_timestamp":1.5,"notify_self":"false","view_once":1,"sticker":["a:1"]} → same
  {"message":"x","text_mode":"html","link_preview":{"url":"https://a.b","title":1,"constructor":1}} → same
  @ {"defaults":{"number":"${FROM}","recipients":["${TO}"],"text_mode":"styled"}} | {"message":"hi"} → {"message":"hi","text_mode":"styled"}
  @ {"defaults":{"number":"${FROM}","recipients":["${TO}"],"text_mode":"styled"}} | {"message":"hi","text_mode":"normal"} → same
  @ {"defaults":{},"message":"{{a.b}}!"} | {"a":{"b":"x"},"number":"${FROM}","recipients":["${TO}"]} → {"message":"x!"}
  @ {"message":"> {{message}}"} | {"message":"hi"} → {"message":"> hi"}
  @ {"message":"{{a}} {{b}} {{c}}{{d}}"} | {"a":[1,{"x":null}],"b":1.50,"c":true} → {"message":"[1,{\"x\":null}] 1.5 true"}`;

// They were dropped without a word, and the message went to the default person.
const LOST = literal`
  "recipients":[15550100003]; "recipients":15550100003; "recipients":["+15550100003",null]; "recipients":["+15550100003",1]
  "recipients":[["+15550100003"]]; "recipients":[]; "recipients":[""]; "recipients":""; "recipients":{}; "recipients":true
  "recipients":{"toString":1}; "Recipients":["+15550100003"]; "Recipients":""; "recipient\u017f":["+15550100003"]
  "recipient":"+15550100003"; "recipient":""; "recipient":["+15550100003"]; "Recipient":"+15550100003"
  "recipients":["${TO}"],"recipient":"+15550100003"; "recipients":["${TO}"],"RECIPIENTS":["+15550100003"]
  " recipients":["+15550100003"]; "recipients":"${INTERNAL_ID}"; "number":"15550100003"; "number":"+15550100003 "
  "number":" "; "number":"x"; "Number":"+15550100003"; "NUMBER":2; "number ":"+15550100003"; "base64_attachments":[1]
  "base64_attachments":{"a":"QUJD"}; "Base64_Attachments":["QUJD"]; "ba\u017fe64_attachments":"QUJD"
  "link_preview":{"Base64_thumbnail":"QUJD"}; "link_preview":[]`.trim().split(/\n|; /);
// Of two JSON.parse takes the last, and null is none: the message would go to the default.
const LOST_TWICE = literal`
  "recipients":["+15550100003"],"recipients":null; "recipients":["+15550100003"],"\u0072ecipients":["+15550100004"]
  "number":"+15550100003","\u006eumber":null; "base64_attachments":["QUJD"],"base64_attachments":null`.split(/\n|; /)
  .slice(1);
table("attack: lose a recipient, a sender or a picture on the way to a webhook's defaults", hook(READS_TEXT))([
  '* bearer → 400 bad_field',
  ...[...LOST, ...LOST_TWICE].map((fields) => `{"text":"x",${fields}}`),
  ...LOST.map((fields) => `{${fields},"text":"x"} | Content-Type: text/plain`),
  ...LOST_TWICE.map((fields) => `'payload=${encodeURIComponent(`{${fields},"text":"x"}`)}'`),
]);

table("a webhook's JSON is read whatever its Content-Type, and the backend is told the new one's", hook(READS_TEXT))`
  ${UNDECLARED}
  * Content-Type: text/plain | ${MADE}
  * Content-Type: application/json | ${MADE}
  * Content-Type: application/octet-stream | ${MADE}
  * Content-Type: multipart/form-data; boundary=x | ${MADE}
  ' \n{"text":"a=b&c=%41 ü 😀"}\n' | Content-Language: en | Content-MD5: x → {"message":"a=b&c=%41 ü 😀"} | > Content-MD5: | > Content-Language:
  {"text":"x"} | X-Hub-Signature-256: y → {"message":"x"} | > X-Hub-Signature-256: y`;

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

/** A token that makes sends, and reads the names `alert`, `name`, `status` and `when` besides those of a send. */
const READS_NAMES = reading('{{alert.title}}{{#alert}}{{name}}{{.status}}{{.}}{{/alert}}{{^when}}{{message}}{{/when}}');
table('a text is the message as it stands, though it be declared a form', hook(READS_NAMES))`
  ${UNDECLARED.map((way) => `${way} | same`)}
  'Backup done: 5 files' ;; 'temp=23' ;; 'temp=23 is fine'
  'temp=23&hum=40&e=%zz' ;; 'a & b' ;; 'message&' ;; 'message' ;; 'x message=hello' ;; 'x\nmessage=hello'
  # A field among pairs that no encoder writes, among what are no pairs, and in another spelling.
  'temp=23 °C&message=hello' ;; 'x&message=hello' ;; 'Message=hello' ;; 'xmessage=hello&messages=1' ;; '=message&=x'
  # The template reads this name only below others.
  'title=x' ;; [{"message":"x"}] ;; "text" ;; 'null' ;; 'a {"message":"x"}'
  '--limit\nContent-Disposition: form-data; name="message"\n\nx\n--limit--\n'
  '\n\tBackup done\n\n' ;; 'Tür offen 🚪 \u202eabc'
  # What looks like a credential.
  'auth=${T}'`;
table('a form is a text where it is declared one, or as something else', hook(READS_NAMES))`
  * ${MADE} | same
  'recipients=%2B15550100003&message=x' | Content-Type: text/plain
  'payload=%7B%7D' | Content-Type: Text/Plain; charset=utf-8 ;; 'message=x' | Content-Type: application/octet-stream
  'message=x' | Content-Type: ${URLENCODED}2 ;; 'message=x' | Content-Type: application/x+jsonp`;

const WHEN = literal`@ {"message":"at {{when}}{{#when}}{{#level.x}}{{/level.x}}, {{level}}{{/when}}"}`;
table('a urlencoded form is the object of its fields', hook())`
  ${UNDECLARED}
  * Content-Type: Application/X-WWW-Form-Urlencoded;charset=UTF-8 | ${MADE}
  # It is one if its first name is a field of a send, or if all of it is encoded and one name is.
  'message=Backup done: 5 files' → {"message":"Backup done: 5 files"}
  'message=50% of "x"\n\u00e9&notify_self=no' → {"message":"50% of \"x\"\n\u00e9","notify_self":"no"}
  'temp=23&a-._~*+%41!'()=&message=x%0D%0A%1B%5By+z%26' → {"message":"x\n\u001b[y z&"}
  # The template's names are known too, within a section as well.
  ${WHEN} | 'when=now or so' → {"message":"at now or so, "} ;; ${WHEN} | 'x=1&when=now' → {"message":"at now, "}
  ${WHEN} | 'level=3 or so&when=now' → {"message":"at now, 3 or so"}
  # A phone number has lost its plus.
  'message=x&number=+15550100003&recipients=+15550100004' → {"message":"x","number":"${THIRD}","recipients":["+15550100004"]}
  'message=x&quote_author=+49123456' → {"message":"x","quote_author":" 49123456"}
  'recipients=%2B15550100003&message=x&recipients=+15550100004' → {"message":"x","recipients":["${THIRD}","+15550100004"]}
  'message=x&number=&text_mode=&sticker&view_once=&recipient=' → {"message":"x"}
  'message=x&members=a&admins=b&__proto__=c&constructor=d&Message=e' → {"message":"x"}
  'message=x&auth=${SECRET}&Auth=${OTHER}&AUTH=' → {"message":"x"}
  @ {"message":"{{.}}{{auth}}{{payload}}{{message}}"} | 'auth=${SECRET}&payload={"message":"x","auth":1}' → {"message":"{\"message\":\"x\"}x"}
  @ {"message":"{{payload}}"} | 'payload=x=1&y' → {"message":"x=1"}
  'base64_attachments=QUJD' → {"base64_attachments":["QUJD"]}
  'base64_attachments=QUJD&base64_attachments=QUJE' → {"base64_attachments":["QUJD","QUJE"]}
  '\r\n title=1&recipients=%2B15550100003&message=x\r\n' → {"message":"x","recipients":["${THIRD}"]}
  '\ufeffrecipients=+15550100003&message=x y' → {"message":"x y","recipients":["${THIRD}"]}`;

const PNG = literal`Content-Type: image/png = \x89PNG\r\n\x1a\n\x00\xff`;
const PNG_DATA = 'base64,iVBORw0KGgoA/w==';
const SNAP = `data:image/png;filename=snap.png;${PNG_DATA}`;
table('a multipart form is the object of its fields, and its files are attachments, named without a path', hook())([
  `* ${MADE}`,
  literal`
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
  -- message = x -- recipients; filename="a.txt" = +15550100003 → {"message":"x","recipients":["data:application/octet-stream;filename=a.txt;base64,KzE1NTUwMTAwMDAz"]}`,
  ...['/etc/a,b.png', 'C:/a,b.png', '../../a,b.png', literal`C:\\a,b.png`, 'a;b.png'].map((name) =>
    literal`-- f; filename="${name}"\r\n${PNG} → {"base64_attachments":["${SNAP.replace('snap', 'a_b')}"]}`
  ),
]);

// Deno 2.9 and Bun 1.4 passed over parts that they could not read: the message went to the default person.
const MESSAGE_PART = literal`--limit\r\nContent-Disposition: form-data; name="message"\r\n\r\nx\r\n`;
const partOf = (head: string): string => literal`--limit\r\n${head}\r\n\r\n+15550100003\r\n`;
const SOMEBODY = 'Content-Disposition: form-data; name="recipients"';
const NOBODY = 'Content-Disposition: form-data; name="x"';
const TO_PART = partOf(SOMEBODY);
const headRow = (head: string): string => `'${MESSAGE_PART}${partOf(head)}--limit--\\r\\n'`;
const IN_MULTIPART = '* bearer | Content-Type: multipart/form-data; boundary=limit';
table("a multipart form's recipients are found however their part is written", hook())([
  `${IN_MULTIPART} → 201 | {"number":"${FROM}","message":"x","recipients":["${THIRD}"]}`,
  ...literal`
  Content-Disposition: form-data; name=recipients ;; content-disposition:form-data;name="recipients"
  CONTENT-DISPOSITION: form-data ; NAME="recipients"
  Content-Type: text/plain; charset=utf-8\r\nContent-Transfer-Encoding: 8bit\r\n${SOMEBODY}`
    .trim().split(/\n *| ;; /).map(headRow),
]);
const NO_NAMES_OF_PARTS =
  literal`x\\" recipients,recipients\\,\\recipients,recip\\ients,recipients%00,%72ecipients,recipients\u0000,recipients\x1b,a"b,`;
const ENCODINGS = ['base64', 'quoted-printable', 'x', 'binary, base64', ''].flatMap((encoding) =>
  [literal`\u0020`, literal`\t`, ''].map((space) => `Content-Transfer-Encoding:${space}${encoding}`)
);
const TWO_READINGS = literal`
  Content-Disposition: form-data; name*=UTF-8''recipients ¦ Content-Disposition: form-data; name='recipients'
  Content-Disposition: form-data; name = "recipients" ¦ Content-Disposition: form-data;\r\n name="recipients"
  Content-Disposition: form-data; name="recipients\n" ¦ Content-Disposition: form-data ¦ Content-Type: text/plain ¦ 
  ${NOBODY}; name="recipients" ¦ ${NOBODY}; name*=utf-8''recipients ¦ ${NOBODY}; x=y ¦ ${NOBODY};
  ${NOBODY}; x-y="; name=recipients" ¦ Content-Disposition: form-data; x-y="; name=recipients"; name="x"
  ${NOBODY} name="recipients" ¦ ${NOBODY}, ${SOMEBODY} ¦ ${NOBODY}\r\n${SOMEBODY} ¦ ${SOMEBODY}\r\n${SOMEBODY}
  ${NOBODY}\n${SOMEBODY} ¦ ${NOBODY}\r${SOMEBODY} ¦ ${NOBODY}\r\n ; name="recipients" ¦ ${NOBODY}\r\n\t${SOMEBODY}
  X-A: b\r\n ${SOMEBODY}\r\n${NOBODY} ¦ ${NOBODY}\r\nContent-Disposition : form-data; name="recipients"
  Content-Disposition: attachment; name="recipients" ¦ Content-Disposition: name="recipients"
  Content-Disposition: form-data, form-data; name="recipients" ¦ \r\n${SOMEBODY}
  ${NO_NAMES_OF_PARTS.split(',').map((name) => SOMEBODY.replace('recipients', name))}
  Content-Disposition: form-data; name=recipients x ¦ Content-Disposition: form-data; name=recipients;x
  Content-Disposition: form-data; name=reci\\pients ¦ Content-Disposition: form-data; name=reci%70ients
  Content-Disposition: form-data; name=recipients\u00a0 ¦ ${SOMEBODY}; filename*=utf-8''x
  ${NOBODY}; filename=x; name="recipients" ¦ ${NOBODY}; filename="x\\"; name="recipients"
  ${NOBODY}; filename="x"; filename="y" ¦ ${NOBODY}\r\nContent-Type: multipart/mixed; boundary=b
  ${ENCODINGS.map((encoding) => literal`${SOMEBODY}\r\n${encoding}`)}
  ${SOMEBODY}\r\nContent-Transfer-Encoding: 8bit\r\nContent-Transfer-Encoding: base64
  ${SOMEBODY}\r\nContent-Type: text/plain\r\ncontent-type: text/plain`;
const OTHER_TYPES = literal`
  ; boundary=limit; boundary=other ¦; boundary=other; boundary=limit ¦; boundary="limit"; Boundary=limit
  ; boundary*=utf-8''limit ¦; x="; boundary=limit" ¦; boundary=limit x ¦; boundary=limit;x ¦; boundary="limit
  ; boundary=limit, multipart/form-data; boundary=other ¦; boundary="li\mit" ¦; boundary= ¦; boundary=""
  , boundary=limit ¦ boundary=limit`;
table('attack: write a multipart form that two honest programs read differently', hook())([
  `${IN_MULTIPART} → 400 bad_json`,
  TWO_READINGS.trim().split(/\n *| ¦ /).map(headRow),
  OTHER_TYPES.trim().split(/\n *| ¦/).map((type) =>
    `'${MESSAGE_PART}--limit--\\r\\n' | Content-Type: multipart/form-data${type}`
  ),
  ['', literal`--\r\n`, literal`\r\n`].map((end) =>
    literal`'${MESSAGE_PART}--limit\r\n${NOBODY}\r\n\r\n\n--limit${end}${SOMEBODY}\r\n\r\n+15550100003\r\n--limit--\r\n'`
  ),
  literal`
    '${MESSAGE_PART}--limit--\r\n${TO_PART}--limit--\r\n' ;; '${MESSAGE_PART}--limit--\r\n${TO_PART}'
    '${MESSAGE_PART}${TO_PART.replace('--limit', '--limits')}--limit--\r\n' ;; '${MESSAGE_PART}${TO_PART}'
    '${MESSAGE_PART}${TO_PART.replace('--limit', '--limit ')}--limit--\r\n'
    '${MESSAGE_PART}${TO_PART.replaceAll(literal`\r\n`, literal`\n`)}--limit--\r\n'
    '${TO_PART.replace('--limit', '--other')}${MESSAGE_PART}--limit--\r\n'
    '${MESSAGE_PART.replace(/x(?=\\r\\n$)/, literal`caf\xe9`)}--limit--\r\n'
    '${MESSAGE_PART.replace('message', literal`recipients\xe9`)}--limit--\r\n'`,
]);
table('a POST that names somebody in its query, which is not read, is not sent to the default person', hook())`
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
table('a text loses what only a terminal understands; JSON loses nothing, a form the CR of its line breaks', hook())([
  `* ${MADE}`,
  TERMINAL.flatMap(([text, message]) => [
    `'${text}' | Content-Type: text/plain → {"message":"${message}"}`,
    `'${text}' | Content-Type: ${URLENCODED} → {"message":"${message}"}`,
    `{"message":"${text}"} → same`,
    `'message=${encodeURIComponent(String(unescaped(text)))}' → {"message":"${text.replaceAll('\\r\\n', '\\n')}"}`,
  ]),
]);

const LIMIT = 64 * 1024;
table('a text beyond 64 KiB is cut with an ellipsis, within no character; JSON and forms are not cut', hook())`
  * ${MADE}
  '${'x'.repeat(LIMIT)}' → same ;; '${'x'.repeat(LIMIT + 1)}' → {"message":"${'x'.repeat(LIMIT - 3)}…"}
  '${'x'.repeat(LIMIT - 5)}😀😀' → {"message":"${'x'.repeat(LIMIT - 5)}…"}
  '\u001b[m${'x'.repeat(LIMIT)}\r' → {"message":"${'x'.repeat(LIMIT)}"}
  '${'ü'.repeat(8 * LIMIT)}' → {"message":"${'ü'.repeat(LIMIT / 2 - 2)}…"}
  {"message":"${'x'.repeat(LIMIT + 9)}"} → same
  'message=${'x'.repeat(LIMIT + 9)}' → {"message":"${'x'.repeat(LIMIT + 9)}"}`;
const READS_FILE = reading('{{who}}: {{message}}{{^base64_attachments}}!{{/base64_attachments}}');
table("a template sees a text, a form and a file's data as it sees JSON", hook(READS_FILE))`
  * ${MADE}
  'hello' → {"message":": hello!"} ;; 'who=ada&message=hello' → {"message":"ada: hello!"}
  -- who = ada -- f; filename="x" = x → {"message":"ada: ","base64_attachments":["data:application/octet-stream;filename=x;base64,eA=="]}
  '' → {"message":": !"} ;; {"who":"ada","message":"hello"} → {"message":"ada: hello!"}`;

const JSON_TYPES = ['application/json', 'Application/JSON ; charset=utf-8', 'application/problem+json', 'text/x+json'];
table('attack: pass off what is no JSON as JSON, or no form as one', hook(reading('{{text}}{{message}}')))([
  '* bearer → 400 bad_json',
  literal`
  'payload={"message":"x"' ;; ' \n\t{"message":"x"' ;; {message:x} ;; {"message":"x"} {} ;; '\ufeff{"message":"x"}'
  { | Content-Type: ${URLENCODED} ;; {{text}} | Content-Type: text/plain
  '\u00a0{"message":"x"}' ;; '{"message":"\xff"}' ;; {"a":${'['.repeat(64)}${']'.repeat(64)}}
  'payload=${encodeURIComponent(`{"a":${'['.repeat(100_000)}`)}'
  'no parts' | Content-Type: multipart/form-data; boundary=limit ;; '' | Content-Type: multipart/form-data; boundary=limit
  'message=x' | Content-Type: multipart/form-data; boundary=limit
  -- data = {"message":"x"} | Content-Type: multipart/form-data ;; -- data = {"message":"x"
  'caf\xe9' ;; 'message=caf\xe9' ;; '\xff\xd8\xff\xe0' | Content-Type: image/jpeg`,
  ...['[{"message":"x"}]', '"text"', "'null'", "'hello'", "''", "'message=hello'", '-- message = x'].flatMap((body) =>
    JSON_TYPES.map((type) => `${body} | Content-Type: ${type}`)
  ),
]);

// Written by hand or by a sloppy program, these went to the default person, or as a text.
const LOST_IN_FORMS = literal`
  recipients=; recipients=&recipients=%2B15550100003; recipient=%2B15550100003; recipient=+15550100003 and so on
  Recipients=%2B15550100003; RECIPIENTS=+15550100003 or so; recipients[]=%2B15550100003; recipients%5B0%5D=%2B15550100003
  recipients[]=+15550100003 or so; number=15550100003; number=5 files; number=%2B1; Number=%2B15550100003; number[]=x
  base64_attachments[0]=QUJD; recipients[]=; Recipients=; amp;recipients=%2B15550100003; %20recipients=%2B15550100003
  recipients+=%2B15550100003; recipients=${INTERNAL_ID}; recipients=-x; recipients=a%0Ab`.trim().split(/\n\s*|; /);
table('attack: have a form or a text sent that says nothing, or to nobody', hook())([
  '* bearer → 400 bad_field',
  literal`
  POST /v2/send ;; '' ;; ' \r\n' ;; '\u001b[0m' ;; 'payload=' ;; 'payload=%5B%5D' ;; 'data=null' ;; 'message=&x=1'
  'payload=%7B%22message%22%3A%22x%22%7D&payload=%7B%7D' ;; 'payload=%7B%22message%22%3A%22x%22%7D&x=1'
  'message=hi & recipients=+15550100003' ;; 'message=hi&\r\nrecipients=+15550100003'
  -- payload = {"message":"x"} -- payload = {"message":"y"} ;; -- payload = {"message":"x"} -- data = {"message":"y"}
  -- x = {"message":"x"} ;; '--limit--\r\n' | Content-Type: multipart/form-data; boundary=limit ;; -- data = x
  -- message = \u0020 ;; -- message = x -- recipients = ;; -- message = x -- recipients[] = +15550100003
  -- message = x -- f; filename=".." = x ;; -- message = x -- f; filename="${'x'.repeat(2000)}" = x
  -- message = x -- base64_attachments = data:a/b;filename=../x;base64,QUJD`,
  ...LOST_IN_FORMS.map((fields) => `'${fields}&message=x'`),
  ...LOST_IN_FORMS.filter((fields) => !fields.includes(' ')).map((fields) => `'message=x&${fields}'`),
]);
table('a text, a form or a webhook without a credential, with a wrong one, or with one in a field is 401', hook())`
  * 'Backup done' → 401 unauthorized ;; * 'message=Backup done' → 401 unauthorized
  * -- message = Backup done → 401 unauthorized ;; * {"message":"x","number":2} → 401 unauthorized
  * {} → 401 unauthorized
  POST /v2/send ;; Authorization: ;; bearer ${OTHER}
  * → 401 unauthorized | reason=no_credential
  'Backup done&auth=${SECRET}' ;; 'message=Backup done&auth=${SECRET}' | Content-Type: ${URLENCODED}
  -- message = x -- auth = ${SECRET} ;; 'payload=${encodeURIComponent(AUTHED(SECRET))}'
  'data=${AUTHED(SECRET)}' | Content-Type: ${URLENCODED}
  -- data = ${AUTHED(SECRET)} → WWW-Authenticate: Basic realm="signal", Bearer
  {"auth":"${OTHER}","number":2,"recipients":"x"} → reason=unknown_token
  -- message = x | Content-Encoding: gzip → 415 unsupported_encoding | reason=undefined`;

test('a text, a form and a webhook come with their token in each form, and it reaches neither the message nor the backend', async (t) => {
  const both = await startWebhook(t, reading('{{auth}}{{.}}{{message}}'));
  for (const { form, ask: make } of FORMS) {
    const ownsBody = make(SECRET).body !== undefined;
    const data = ownsBody ? { ...MESSAGE, number: 2 } : { message: 'hi' };
    const bodies = ["'hi'", "'message=hi'", '-- message = hi', `{"auth":"${OTHER}","message":"hi"}`];
    const message = `${JSON.stringify(data)}${data.message}`;
    await checkRows(both, [
      `* → 201 | form=${form} | > Authorization: | ${JSON.stringify({ ...DEFAULTS, message })}`,
      ownsBody
        ? rowWith(make(SECRET)).replace(`"${FROM}"`, '2')
        : bodies.map((body) => `${rowWith(make(SECRET))} | ${body}`),
    ]);
  }
  assert.ok(!/auth/.test(both.backend.seen.map((seen) => seen.url) + both.gateway.log.join()), 'auth is in an URL');
});

table('a token without defaults and message is told at /v2/send, for a text or a form, what would take it', {})`
  * bearer → 400 bad_json | ". A text or a form is taken with a token that has "defaults" or "message"."
  'Backup done' ;; 'message=x' ;; ' ' ;; -- message = x
  # Not where that would not help.
  * bearer → 400 bad_json
  '{"message"' → "it ends too early, at byte 10."," ;; 'x' | POST /v1/send → "it must begin with \"{\", at byte 0.","`;

/** A token that may send by a GET, and how that is told. */
const BY_GET = hook({ allow: ['GET /v2/send'], senders: [FROM], recipients: [TO], defaults: DEFAULTS });

const QUERIES = literal`
  message=Front%20door ⇒ {"message":"Front door"}
  message=Front+door ⇒ {"message":"Front door"}
  message=T%C3%BCr%0A%09offen%20%F0%9F%9A%AA ⇒ {"message":"Tür\n\toffen 🚪"}
  %6Dessage=x%0Ay ⇒ {"message":"x\ny"}
  message=x&number=%2B15550100003&recipients=+15550100003 ⇒ {"message":"x","number":"${THIRD}","recipients":["${THIRD}"]}
  recipients=+15550100003&message=x&&recipients=x.01&z=1&view_once= ⇒ {"message":"x","recipients":["${THIRD}","x.01"]}
  message=x&auth=${SECRET}&Auth=${OTHER} ⇒ {"message":"x"}
  message='x'%26%3C%3E=&text_mode=styled ⇒ {"message":"'x'&<>=","text_mode":"styled"}`;
// A GET has a body for its credential alone; what else it says is not looked at.
table("GET /v2/send is sent by POST, where the token's allowlist spells it, in each form of the token", {
  ...hook({ allow: ['GET /v2/send'], defaults: DEFAULTS }),
})([
  `* → 201 | Cache-Control: no-store | Connection: close | POST /v2/send | > Content-Type: application/json | method=GET | route=/v2/send | status=201 | ${MEANT}`,
  QUERIES.trim().split('\n').flatMap((line) => {
    const [query = '', send = ''] = line.trim().split(' ⇒ ');
    return FORMS.map(({ form, ask: make }) => {
      const row = rowWith(make(SECRET), 'GET').replace(
        /^\S+ [^ ?]*(\??)[^ ]*/,
        (target, asks) => `${target}${asks ? '&' : '?'}${query}`,
      );
      return `${row} → form=${form} | ${send}`;
    });
  }),
]);

const RANG = hook({ ...reading('Rang{{#at}} at {{.}}{{/at}}'), allow: ['GET /v2/send'] });
table('a template fills the message of a GET, and of one without a query too', RANG)`
  * ${MADE}
  GET /v2/send?at=9 → {"message":"Rang at 9"} ;; GET /v2/send → {"message":"Rang"}
  GET /v2/send/? → {"message":"Rang"} ;; GET /v2/send?payload=%7B%22at%22%3A9%7D → {"message":"Rang at 9"}`;

const KEPT: Handler = (req, res) => {
  const own = ['Cache-Control', 'public, max-age=60', 'Vary', 'Accept', 'Set-Cookie', 'a=1', 'Set-Cookie', 'b=2'];
  req.resume().on('end', () => res.writeHead(201, own).end('[]'));
};
table(
  'the response to a GET may be kept by nobody, whatever the backend says of that, and loses none of its headers',
  { ...BY_GET, cors: ['https://dash.example'] },
  { handler: KEPT },
)`
  * GET /v2/send?message=x | bearer | Origin: https://dash.example
  → 201 | Cache-Control: no-store, public, max-age=60 | Vary: Origin, Accept | Set-Cookie: a=1, b=2`;

test('the response to a GET is the last one on its connection, a refusal of what it says too', async (t) => {
  const { backend, gateway } = await startBoth(t, BY_GET);
  for (const [message, status] of [['x', 201], ['', 400]] as const) {
    const response = await raw(gateway, ABOUT.replace('/v1/about', `/v2/send?message=${message}`).repeat(2));
    assert.deepEqual([statusOf(response), response.match(/^HTTP\/1\.1/gm)!.length], [status, 1], response);
    for (const header of [/^connection: close\r$/im, /^cache-control: no-store\r$/im]) assert.match(response, header);
  }
  assert.equal(backend.seen.length, 1, 'the requests that the backend saw');
});

table('a GET that asks to upgrade sends its message, and is not upgraded', BY_GET)`
  * ${MADE} | {"message":"x"} | > Upgrade:
  GET /v2/send?message=x | Connection: Upgrade | Upgrade: websocket | Sec-WebSocket-Key: x`;

table('attack: send by a GET that the allowlist does not spell, or with a token that makes no sends', hook({}))`
  * bearer | @ {"defaults":${MEANT}} → 405 method_not_allowed
  * bearer | @ {"defaults":${MEANT},"allow":["send","info","messaging","setup"]} → 405 method_not_allowed
  * bearer | @ {"defaults":${MEANT},"allow":["POST /v2/send","GET /v2/*","GET /*","* /*"]} → 405 method_not_allowed
  * bearer | @ {"defaults":${MEANT},"allow":["GET /v2/:name","GET /*/send","* /v2/send"]} → 405 method_not_allowed
  * bearer | @ {"allow":["GET /v2/send","* /*"]} → 405 method_not_allowed
  * bearer | @ {"allow":["GET /v2/send","* /*"],"senders":["${FROM}"],"recipients":["${TO}"]} → 405 method_not_allowed
  GET /v2/send?message=x ;; GET /v2/send?message=x%0Ay ;; GET /v2/send ;; GET //v2/send/?message=x
  GET /@auth=${SECRET}/v2/send?message=x`;
table('attack: do by a token for GET /v2/send what it may not, or send nothing, or to nobody', BY_GET)`
  * bearer → 405 method_not_allowed
  PUT /v2/send?message=x ;; PATCH /v2/send?message=x ;; DELETE /v2/send?message=x ;; OPTIONS /v2/send?message=x
  GET /v1/send?message=x
  * bearer → 403 endpoint_not_allowed
  ${HELLO} ;; 'hello' ;; POST /v1/send | ${HELLO} ;; GET /v1/about
  * bearer → 403 sender_not_allowed
  GET /v2/send?message=x&number=%2B15559999999
  * bearer → 403 recipient_not_allowed
  GET /v2/send?message=x&recipients=%2B15559999999 ;; GET /v2/send?message=x&recipients=+15559999999
  GET /v2/send?message=x&recipients=%2B15550100002&recipients=${GROUP}
  GET /v2/send?payload=%7B%22message%22%3A%22x%22%2C%22recipients%22%3A%22%2B15559999999%22%7D
  * bearer → 400 bad_field
  GET /v2/send ;; GET /v2/send?message= ;; GET /v2/send?msg=x ;; GET /v2/send?message=x&recipients=
  GET /v2/send?message=x&Recipients=%2B15550100002 ;; GET /v2/send?message=x&recipient=%2B15550100002
  GET /v2/send?message=x&number=1
  * → 401 unauthorized
  GET /v2/send?message=x ;; GET /v2/send?message=x&auth=${SECRET}
  * GET /v2/send?message=x | basic → 403 cross_site
  User-Agent: Mozilla/5.0 (X11; Linux x86_64) ;; Sec-Fetch-Site: cross-site | Sec-Fetch-Mode: no-cors
  Sec-Fetch-Site: none | Sec-Purpose: prefetch`;
table('attack: smuggle control characters through the query of a GET', BY_GET)`
  * bearer → 400 bad_target
  GET /v2/send?message=x%0D%0A ;; GET /v2/send?message=x%00 ;; GET /v2/send?message=x%1B%5B0m
  GET /v2/send?message=x%7F ;; GET /v2/send?message=x%C2%85 ;; GET /v2/send?message=x%FF
  GET /v2/send?message=x&number=%0A ;; GET /v2/send?message%0A=x ;; GET /v2/send?message=x&text=%09
  GET /v1/about?message=x%0Ay ;; GET /v1/send?message=x%0Ay ;; GET /v2%0A/send?message=x`;

test('what is held of bodies is 32 MiB for all connections together, and is given back on every path', async (t) => {
  const { gateway } = await startWebhook(t);
  const countOf = (status: number): number => requests(gateway).filter((line) => line.status === status).length;
  for (const [fill, end, status] of [['x', 'x', 499], ['x', '\xff', 400], ['{', '{{', 413], ['x', 'x', 201]] as const) {
    const headers = { ...BEARER, ...(status !== 413 && { 'content-length': MIB }) };
    const all = Array.from({ length: 33 }, () => beginSend(gateway, headers).on('error', () => {}));
    const answers = all.map((req) =>
      once(req, 'response').then(([res]: http.IncomingMessage[]) => ({ req, res: res!.resume() }))
    );
    for (const req of all) req.write(fill.repeat(MIB - 1));
    // One of them finds no room; the others have it as soon as that one has given back its share.
    const { req: refused, res } = await Promise.race(answers);
    assert.deepEqual([res.statusCode, res.headers['retry-after']], [503, '10']);
    assert.equal(requests(gateway).at(-1)!.code, 'busy');
    // What is not held whole is not concerned.
    const json = await ask(gateway, { path: '/v1/send', body: { ...MESSAGE, more: 'x'.repeat(MIB) }, headers: BEARER });
    assert.equal(json.status, 201);

    const before = countOf(status);
    const held = all.filter((req) => req !== refused);
    for (const req of held) status === 499 ? req.destroy() : req.end(Buffer.from(end, 'latin1'));
    await until(() => countOf(status) === before + 32);
    refused.destroy();
    await Promise.allSettled(answers);
  }
});

// One webhook's token filled all of it, again and again, with bodies that did not end.
test('where there are several tokens, half of the 32 MiB that are held is for one of them', async (t) => {
  const { backend, gateway } = await startBoth(t, tokens({ defaults: DEFAULTS }, { defaults: DEFAULTS }));
  const begin = (token: string): http.ClientRequest => {
    const req = beginSend(gateway, { 'authorization': `Bearer ${token}`, 'content-length': MIB });
    req.on('error', () => {}).write('x'.repeat(MIB - 1));
    return req;
  };
  const all = Array.from({ length: 17 }, () => begin(SECRET));
  const answers = all.map((req) => once(req, 'response') as Promise<[http.IncomingMessage]>);
  const [refused] = await Promise.race(answers);
  assert.deepEqual([refused.statusCode, refused.headers['retry-after']], [503, '10']);
  assert.deepEqual([requests(gateway).length, requests(gateway)[0].code], [1, 'busy']);
  const other = begin(OTHER);
  other.end('x');
  const [{ statusCode }] = await once(other, 'response') as [http.IncomingMessage];
  assert.equal(statusCode, 201);
  assert.equal(backend.sent.length, 1);
  for (const req of all) req.destroy();
  await until(() => requests(gateway).length === 18);
  assert.equal((await ask(gateway, { body: 'x'.repeat(MIB), headers: BEARER })).status, 201, 'it is given back');
  await Promise.allSettled(answers);
});

const MANY_KEYS = Array.from({ length: 90_000 }, (_, i) => `"${`k${i}`.padEnd(i < 30 ? 61 : 1, 'x')}":1`);
const SHOWN_KEYS = MANY_KEYS.slice(0, 30).map((member) => `${member.slice(0, 61)}…"`).join(', ');
table('what a send lacks is named to the client and in the log, with at most thirty top-level keys, cut', hook())`
  * bearer → 400 bad_field
  @ {"defaults":{}} | {"alerts":[],"status":"x"} → reason=no_message,no_number,no_recipients | "The send would lack message and number and recipients; the body's top-level keys are "alerts", "status". "
  @ {"defaults":{"number":"${FROM}"}} | {"message":"x","recipients":[]} → reason=no_recipients | "The send would lack recipients; the body's top-level keys are "message", "recipients". "
  @ {"defaults":{"recipients":["${TO}"]}} | {"message":"x","number":2} → reason=no_number | "lack number; the body's top-level keys are "message", "number". "
  {} → reason=no_message | "lack message; the body's top-level keys are none. "
  {"message":" \n","text":"x"} → reason=no_message | "keys are "message", "text". "
  {"message":"","sticker":"","base64_attachments":[]} → reason=no_message | "keys are "message", "sticker", "base64_attachments". "
  @ {"message":" {{typo}}\n"} | {"message":"x","auth":"${SECRET}","\"\n":1} → reason=no_message | "keys are "message", "\"\n". "
  @ {"defaults":{},"message":"{{text}}"} | {"text":"x","number":"${FROM}"} → reason=no_recipients | "keys are "text", "number". "
  {${MANY_KEYS.slice(0, 30).join()}} → reason=no_message | "keys are ${SHOWN_KEYS}. "
  {${MANY_KEYS.join()}} → reason=no_message | "keys are ${SHOWN_KEYS}, …. "`;

test('what a client sends is not logged', async (t) => {
  const both = await startWebhook(t);
  await checkRows(both, ['* bearer', ['{"key1":"x"} → 400 bad_field', '{"message":"x1","key1":2} → 201']]);
  assert.ok(!/key1|x1/.test(both.gateway.log.join()), both.gateway.log.join());
});

const READS_AUTH = reading('{{author}}{{authority}}{{oauth}}{{.}}');
table('only "auth" is dropped of a webhook, whatever it holds and however it is spelled', hook(READS_AUTH))`
  * ${MADE} | {"message":"{\"a\":1}"}
  {"auth":{"type":"oauth"},"a":1} ;; {"auth":1,"a":1} ;; {"Auth":"x","a":1}
  {"auth":"${OTHER}","AUTH":"${OTHER}","a":1,"\u0061uth":"${OTHER}"} ;; 'payload={"auth":"${OTHER}","a":1}'
  {"author":"a","authority":"b","oauth":"c","text":"payload=1"} → {"message":"abc{\"author\":\"a\",\"authority\":\"b\",\"oauth\":\"c\",\"text\":\"payload=1\"}"}`;

const HOOKED: GatewayConfig = {
  ...hook({ senders: [FROM], recipients: [TO], ...reading('{{text}}') }),
  allow: ['messaging'],
};
table('attack: do by a webhook what no body may, or send from another account or to another recipient', HOOKED)`
  * bearer → 400 bad_field
  {"text":"x","recipients":["${TO}","group.*"]} ;; {"text":"x","recipients":["--help"]}
  {"text":"x","recipients":[""]} ;; {"text":"x","recipients":["${TO}\n"]} ;; {"text":""}
  {"text":"x","base64_attachments":["data:a/b;filename=../../x;base64,QUJD"]}
  {"text":"x","link_preview":{"url":"https://a","base64_thumbnail":"data:a/b;filename=/x;base64,QUJD"}}
  * bearer → 403 sender_not_allowed
  {"text":"x","number":"${STRANGER}"} ;; -- data = {"text":"x","number":"${STRANGER}"}
  'payload=${encodeURIComponent(`{"text":"x","number":"${STRANGER}"}`)}'
  @ {"defaults":{"number":"${STRANGER}"}} | {"text":"x","recipients":["${TO}"]}
  * bearer → 403 recipient_not_allowed
  {"text":"x","recipients":["${STRANGER}"]} ;; {"text":"x","recipients":["${TO}","${STRANGER}"]}
  {"text":"x","recipients":["${GROUP}"]} ;; {"text":"x","recipients":"${STRANGER}"}
  @ {"defaults":{"number":"${FROM}","recipients":["${TO}","${STRANGER}"]}} | {"text":"x"}`;
table("attack: use a webhook's token for more than it is meant for", hook({ allow: ['send'], defaults: DEFAULTS }))`
  * bearer → 403 endpoint_not_allowed
  GET /v1/about ;; GET /v1/receive/${FROM}`;

const MIB_BODY = `{"text":"x","more":"${'y'.repeat(MIB - 22)}"}`;
table("a webhook's body is at most 1 MiB: 413 at once if it says so, and then if not", hook(READS_TEXT))([
  `* ${MADE} | {"message":"x"}`,
  MIB_BODY,
  `${MIB_BODY} | Transfer-Encoding: chunked`,
  `none | ${MIB_BODY.replace('{', `{"auth":"${SECRET}",`).replace('y'.repeat(50), '')}`,
  `'${MIB_BODY} ' → 413 body_too_large | bytesIn=0`,
  `'${MIB_BODY} ' | Transfer-Encoding: chunked → 413 body_too_large`,
  `-- message = x -- f; filename="x" = ${'x'.repeat(MIB)} → 413 body_too_large`,
]);
table("a webhook's body is at most limits.body, if that is less", { ...hook(), limits: { body: '1KiB' } })`
  * bearer → 413 body_too_large
  ${sized(2000)} → bytesIn=0`;

test("a webhook's body may come in single bytes", async (t) => {
  const { backend, gateway } = await startWebhook(t, READS_TEXT);
  const body = inBytes('{"text":"ü😀","number":2}');
  await raw(gateway, Buffer.from(`${post(SECRET, 'chunked', 'Connection: close')}${body}`, 'latin1'));
  assert.equal(gotJson(backend).message, 'ü😀');
});

test('a webhook that is compressed is 415; one that stops, or trickles in for too long, is 408, in its head and after it', async (t) => {
  const both = await startBoth(t, hook(), { stallTimeoutMs: 300 });
  await checkRows(both, ['* bearer | Content-Encoding: gzip → 415 unsupported_encoding', '{"message":"x"}']);
  const responses = [
    raw(both.gateway, `${post(SECRET, 100)}{"message":`),
    trickle(t, both.gateway, `${post(SECRET, 1_000_000)}{"message":"`),
    trickle(t, both.gateway, `${post(SECRET, 1_000_000)}{"message":"${'x'.repeat(100_000)}`),
  ];
  for (const response of await Promise.all(responses)) assert.equal(codeOf(response), 'request_timeout', response);
  assert.equal(both.backend.connections, 0, 'the backend saw a connection');
});

const READS_NOTHING = hook({ ...reading('never'), allow: ['messaging', 'info'] });
table('only a POST to /v2/send is made a send: other requests of the token pass as they are', READS_NOTHING)`
  * bearer
  GET /v1/about → 200 ;; POST /v1/send | ${HELLO} | Content-Type: text/plain → 201 | same | > Content-Type: text/plain
  PUT /v1/typing-indicator/${FROM} | {"recipient":"${TO}"} → 204 | same`;
table('a token without defaults passes its body on, beside one that has them', tokens({ defaults: DEFAULTS }, {}))`
  * {"more":1,${HELLO.slice(1)} → 201 | ${HELLO}
  bearer ${OTHER} → {"more":1} ;; bearer`;

test('a reload puts another template in force, and a bad one changes nothing', async (t) => {
  const both = await startWebhook(t, reading('one {{x}}'));
  for (const [message, text] of [['two {{x}}', 'two 1'], ['three {{x', 'two 1'], ['four {{x}}', 'four 1']] as const) {
    const mistake = 'tokens.hook.message: line 1, column 7: a "{{" has no "}}"';
    const problems = problemsOf(() => both.gateway.reload(hook(reading(message))));
    assert.deepEqual(problems, message.endsWith('}}') ? [] : [mistake]);
    await checkRows(both, [`* ${MADE}`, `{"x":1} → {"message":"${text}"}`]);
  }
});

test("what is wrong with a webhook's settings is said with its place", () => {
  const noRecipient = 'is not a phone number ("+" and 5 to 15 digits), a user name, a UUID or group.…';
  const mistakes = literal`
    {"defaults":[]} ⇒ defaults: must be an object with number, recipients, text_mode
    {"defaults":"x"} ⇒ defaults: must be an object with number, recipients, text_mode
    {"defaults":{"number":15550100001}} ⇒ defaults.number: 15550100001 is not "+" and 5 to 15 digits
    {"defaults":{"recipients":[]}} ⇒ defaults.recipients: must be a list with at least one entry
    {"defaults":{"text_mode":"bold"}} ⇒ defaults.text_mode: "bold" is not normal or styled
    {"defaults":{"recipient":"${TO}"}} ⇒ defaults.recipient: is not a setting; did you mean "recipients"?
    {"defaults":{"recipients":["${TO}","15550100002","-x"]}} ⇒ defaults.recipients[1]: "15550100002" ${noRecipient} ⇒ defaults.recipients[2]: "-x" ${noRecipient}
    {"defaults":{"recipients":["group.*",1]}} ⇒ defaults.recipients[0]: "group.*" ${noRecipient} ⇒ defaults.recipients[1]: 1 ${noRecipient}
    {"defaults":{"constructor":1}} ⇒ defaults.constructor: is not a setting
    {"message":""} ⇒ message: must be a template: text with {{names}} in it
    {"message":" \n"} ⇒ message: must be a template: text with {{names}} in it
    {"message":["{{x}}"]} ⇒ message: must be a template: text with {{names}} in it
    {"message":"a\n{{#x}}"} ⇒ message: line 2, column 1: "{{#x}}" has no "{{/x}}"
    {"default":{},"template":""} ⇒ default: is not a setting; did you mean "defaults"? ⇒ template: is not a setting`;
  for (const line of mistakes.trim().split('\n')) {
    const [token = '', ...problems] = line.trim().split(' ⇒ ');
    const found = problemsOf(() => createGateway(hook(JSON.parse(token))));
    assert.deepEqual(found, problems.map((problem) => `tokens.hook.${problem}`), token);
  }
});

const NESTED = hook(reading(`${'{{#a}}'.repeat(20)}{{b.c.d}}${'{{/a}}'.repeat(20)}`));
table('no webhook keeps the gateway busy for long, and the next send gets through', NESTED)`
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

/** Urlencoded fields in each form: as a body, as a multipart form, and as the query of a GET. */
const inEachForm = (pairs: string): string[] => [
  `'${pairs}'`,
  Array.from(new URLSearchParams(pairs), ([name, value]) => `-- ${name} = ${value}`).join(' '),
  `GET /v2/send?${pairs}`,
];
const BY_FORM = hook({ allow: ['send', 'GET /v2/send'], defaults: DEFAULTS });
table(
  'attack: send from the default number what names two, or to the default person what another spelling names',
  BY_FORM,
)`
  * bearer → 400 bad_field
  ${inEachForm('message=hi&number=%2B15550100003&number=%2B15550100004')}
  ${inEachForm(`message=hi&number=%2B${FROM.slice(1)}&number=%2B${FROM.slice(1)}`)}
  ${
  'recipients.0 recipients.0.number number.1 @recipients @number +recipient%E2%80%83'.split(' ').flatMap((name) =>
    inEachForm(`message=hi&${name}=%2B15550100003`)
  )
}
  'message=hi&recipients%00=%2B15550100003' ;; {"message":"hi","recipients.0":"+15550100003"}
  {"message":"hi","recipients\u0000":["+15550100003"]}
  'hi' | POST /v2/send?@recipients=%2B15550100003 ;; 'hi' | POST /v2/send?send_at=5`;
const READS_NOTE = hook(reading('{{note}}|{{message}}'));
table('a line break of a textarea, CR LF, is a line feed in every field of a form, and in JSON it stays', READS_NOTE)`
  * ${MADE} | {"message":"a\nb\rc|one\ntwo\n\n"}
  'message=one%0D%0Atwo%0D%0A%0D%0A&note=a%0D%0Ab%0Dc' ;; -- message = one\r\ntwo\r\n\r\n -- note = a\r\nb\rc
  * ${MADE} | {"message":"a\r\nb\rc|one\r\ntwo\r\n\r\n"}
  {"message":"one\r\ntwo\r\n\r\n","note":"a\r\nb\rc"}
  'payload={"message":"one\\r\\ntwo\\r\\n\\r\\n","note":"a\\r\\nb\\rc"}'`;

// What asks for a later time would be sent at once. A large body that ends in send_at is in REQUEST BODY.
const LATER = 'bearer → 400 bad_field | "nothing is scheduled here"';
const READS_LATER = JSON.stringify(reading('{{text}}{{send_at}}'));
const BY_EITHER = hook({ allow: ['send', 'GET /v2/send'] });
table(
  'attack: have a send, a form, or a form that a template reads, sent at once, though it asks for later',
  BY_EITHER,
)`
  * ${LATER}
  ${['1', '"2030-01-01"', 'true', '{}', '[]', '[null]', '""'].map((at) => `{"send_at":${at},${HELLO.slice(1)}`)}
  ${['Send_At', 'ſend_at', 'SEND_AT', literal`send_a\u0074`].map((key) => `{"${key}":1,${HELLO.slice(1)}`)}
  POST /v1/send | {"send_at":1,${HELLO.slice(1)} ;; none | {"send_at":1,${AUTHED(SECRET).slice(1)}
  * @ {"defaults":${MEANT}} | ${LATER}
  ${[...inEachForm('message=hi&send_at=5'), ...inEachForm('Send_At[]=5&message=hi')]}
  'send_at=tomorrow at 5&message=hi' ;; {"message":"hi","send_at":5} ;; {"Send_At":"5","message":"hi"}
  'payload={"message":"hi","send_at":0}'
  * @ ${READS_LATER} | ${LATER}
  ${[...inEachForm('text=hi&send_at=5'), ...inEachForm('text=hi&%C5%BFEND_AT=5')]}`;
const LATER_AS_DATA = {
  allow: ['send', 'POST /v1/plugins/later'],
  ...tokens({}, reading('at {{send_at}}{{Send_At}}')),
};
table('send_at is data in the payload of a template, nothing where it is null, and no concern of other routes', {
  ...LATER_AS_DATA,
})`
  * bearer ${OTHER} → 201 | ${MEANT}
  {"send_at":5} → {"message":"at 5"} ;; {"Send_At":5} → {"message":"at 5"}
  'payload={"send_at":[5]}' → {"message":"at [5]"}
  * bearer → passes | same
  {"send_at":null,${HELLO.slice(1)} ;; {"resend_at":1,"more":{"send_at":1},${HELLO.slice(1)}
  POST /v1/plugins/later | {"send_at":1,"Send_At":2}`;

/** The boundary, and the heads of a field and of a file, as honest programs write them. */
const HONEST = literal`
  ------------------------64c808f5fa53335a ¦ name="recipients" ¦ name="f"; filename="ü.png"\r\nContent-Type: image/png ¦ curl
  x ¦ name="recipients"\r\nContent-Type: text/plain\r\nX-A: b ¦ name="f"; filename="a%22b.png" ¦ curl, with a type and a header
  ----WebKitFormBoundary7MA4YWxkTrZu0gW ¦ name="recipients" ¦ name="f"; filename="C:\\ü.png"\r\nContent-Type: image/png ¦ browsers
  ===1795320007953=== ¦ name="recipients"\r\nContent-Type: text/plain; charset=UTF-8 ¦ name="f"; filename="ü.png"\r\nContent-Type: image/png\r\nContent-Transfer-Encoding: binary ¦ Node, and Java as in tutorials
  ***** ¦ name="recipients" ¦ name="größe"; filename="ü.png" ¦ Android as in tutorials
  IjV-_.9; charset=UTF-8 ¦ name="recipients"\r\nContent-Type: text/plain; charset=ISO-8859-1\r\nContent-Transfer-Encoding: 8bit ¦ name="f"; filename="ü.png" ¦ Apache's HttpClient
  b ¦ name="recipients"\r\nContent-Length: 12 ¦ name="f"; filename="ü.png"\r\nContent-Length: 1\r\nContent-Type: image/png ¦ PHP's Guzzle, and OkHttp
  "7f0-a b" ¦ name=recipients\r\nContent-Type: text/plain; charset=utf-8 ¦ name=f; filename=ü.png; filename*=utf-8''%C3%BC.png ¦ .NET`;
table('a multipart form is read as honest programs write it: fields, files, and their headers in any order', hook())([
  `* ${MADE} | {"message":"a","recipients":["${THIRD}"]}`,
  ...HONEST.trim().split('\n').flatMap((line) => {
    const [boundary = '', field = '', file = ''] = line.trim().split(' ¦ ');
    const mark = `--${boundary.replace(/;.*|"/g, '')}`;
    const uri = `data:${file.includes('image') ? 'image/png' : 'application/octet-stream'};filename=${
      file.includes('%22') ? 'a%22b' : 'ü'
    }.png;base64,Ci0tIA==`;
    return [false, true].map((isReversed) => {
      const parts = [['name="message"', 'a'], [field, THIRD], [file, '\\n-- ']].map(([head, value]) => {
        const lines = `Content-Disposition: form-data; ${head}`.split('\\r\\n');
        return `${mark}\\r\\n${(isReversed ? lines.reverse() : lines).join('\\r\\n')}\\r\\n\\r\\n${value}\\r\\n`;
      });
      const type = `Content-Type: multipart/form-data; boundary=${boundary}`;
      return `'${parts.join('')}${mark}--\\r\\n' | ${type} → {"base64_attachments":["${uri}"]}`;
    });
  }),
]);

section('TEMPLATES'); // ───────────────────────────────────────────────────────────────────────────
/**
 * Each case of the Mustache specification's modules for interpolation, sections, inverted sections and comments, in
 * words of our own: what it shows, a template, the text, and the data. A * stands for each way to insert (nothing, "&",
 * a third brace), and ~ for each section that is shown (# with true, ^ with false). There is no escaping for HTML here.
 */
const MUSTACHE = literal`
  no interpolation ¦ The {disk} is full}.\n ¦ The {disk} is full}.\n ¦ {}
  basic interpolation ¦ Disk {{name}} is full.\n ¦ Disk sda is full.\n ¦ {"name":"sda"}
  HTML is not escaped ¦ {{*x}} ¦ & " < > ' \u0060 = ¦ {"x":"& \" < > ' \u0060 ="}
  integer, decimal, null and missing ¦ {{*n}}|{{*d}}|{{*z}}|{{*m}} ¦ 42|2.5|| ¦ {"n":42,"d":2.50,"z":null}
  surrounding white space ¦ | {{*n}} | ¦ | -- | ¦ {"n":"--"}
  standalone interpolation ¦   {{*n}}\n ¦   --\n ¦ {"n":"--"}
  padding ¦ |{{* n }}| ¦ |--| ¦ {"n":"--"}
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
  section: context ¦ {{#host}}on {{name}}{{/host}} ¦ on pi ¦ {"host":{"name":"pi"}}
  section: parent contexts ¦ {{#in}}{{a}} {{b}} {{c.d}}{{/in}} ¦ 1 2 3 ¦ {"a":1,"b":"no","in":{"b":2},"c":{"d":3}}
  section: variable test ¦ {{#x}}{{.}} is {{x}}{{/x}} ¦ this is this ¦ {"x":"this"}
  section: list contexts ¦ {{#as}}{{#bs}}{{n.low}}{{m}}.{{#cs}}{{n.up}}{{m}}{{l}}.{{/cs}}{{/bs}}{{/as}} ¦ k7.K7p.K7q. ¦ {"as":[{"n":{"up":"K","low":"k"},"bs":[{"m":"7","cs":[{"l":"p"},{"l":"q"}]}]}]}
  section: deeply nested contexts ¦ {{#a}}\n{{one}}\n{{#b}}\n{{one}}{{two}}\n{{#c}}\n{{three}}\n{{#d}}\n{{two}}{{four}}\n{{#five}}\n{{four}}{{.}}{{five}}{{one}}\n{{/five}}\n{{/d}}\n{{/c}}\n{{two}}\n{{/b}}\n{{/a}}\n ¦ 1\n12\n3\n24\n4551\n2\n ¦ {"a":{"one":1},"b":{"two":2},"c":{"three":3,"d":{"four":4,"five":5}}}
  section: list ¦ <{{#list}}{{n}}{{/list}}> ¦ <123> ¦ {"list":[{"n":1},{"n":2},{"n":3}]}
  section: doubled ¦ {{#on}}\na\n{{/on}}\n{{two}}\n{{#on}}\nc\n{{/on}}\n ¦ a\nb\nc\n ¦ {"on":true,"two":"b"}
  inverted: doubled ¦ {{^on}}\na\n{{/on}}\n{{two}}\n{{^on}}\nc\n{{/on}}\n ¦ a\nb\nc\n ¦ {"on":false,"two":"b"}
  section: nested, shown ¦ | A {{~on}}B {{~on}}C{{/on}} D{{/on}} E | ¦ | A B C D E | ¦ {"on":~}
  section: nested, not shown ¦ | A {{~on}}B {{~on}}C{{/on}} D{{/on}} E | ¦ | A  E | ¦ {"on":!~}
  implicit iterator: texts and integers ¦ {{#list}}({{.}}){{/list}} ¦ (a)(1) ¦ {"list":["a",1]}
  implicit iterator: decimals ¦ {{#list}}({{.}}){{/list}} ¦ (1.1)(2.2) ¦ {"list":[1.10,2.20]}
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
  comment: inline ¦ before{{! a remark! }}after, one {{! two }} three ¦ beforeafter, one  three ¦ {}
  comment: multiline ¦ before{{!\n  a remark\n  of two lines\n}}after\n ¦ beforeafter\n ¦ {}
  comment: standalone ¦ One.\n{{! a remark }}\nTwo.\n  {{! a remark }}\nThree.\n ¦ One.\nTwo.\nThree.\n ¦ {}
  comment: standalone line endings ¦ |\r\n{{! a remark }}\r\n| ¦ |\r\n| ¦ {}
  comment: standalone without previous line ¦   {{! a remark }}\n! ¦ ! ¦ {}
  comment: standalone without newline ¦ !\n  {{! a remark }} ¦ !\n ¦ {}
  comment: multiline standalone ¦ One.\n{{!\nof several lines\n}}\nTwo.\n  {{!\n    of several lines\n  }}\nThree.\n ¦ One.\nTwo.\nThree.\n ¦ {}
  comment: indented inline ¦   one {{! two }}\n ¦   one \n ¦ {}
  comment: variable name collision ¦ <{{! a }}|{{!a }}|{{!a}}> ¦ <||> ¦ {"! a":1,"!a":2,"a":3}
  an object inserts its JSON ¦ {{a}} {{#b}}{{.}} {{/b}} ¦ {"x":[null,"ü"]} {"y":2} []  ¦ {"a":{"x":[null,"ü"]},"b":[{"y":2},[]]}
  true and false insert their names ¦ {{a}} {{b}} ¦ true false ¦ {"a":true,"b":false}
  what is inserted is no template ¦ {{a}} {{#b}}{{.}}{{/b}} ¦ {{#b}}x{{/b}} {{a}} ¦ {"a":"{{#b}}x{{/b}}","b":"{{a}}"}
  what JavaScript adds to its values has no name ¦ [{{constructor}}{{__proto__}}{{a.length}}{{b.length}}{{b.0.1}}{{toString}}{{a.constructor.name}}{{#hasOwnProperty}}x{{/hasOwnProperty}}] ¦ [] ¦ {"a":[1,2],"b":["text"]}
  and data that has such names is data ¦ {{__proto__}}{{#constructor}}{{prototype}}{{/constructor}} ¦ ab ¦ {"__proto__":"a","constructor":{"prototype":"b"}}
  a length that is data ¦ {{length}}{{a.length}} ¦ 65 ¦ {"length":6,"a":{"length":5}}
  unusual names ¦ {{a-b}}{{@c}}{{:e}}{{ü.é}}{{a/b}} ¦ 12345 ¦ {"a-b":1,"@c":2,":e":3,"ü":{"é":4},"a/b":5}`;

test('a template inserts, repeats and leaves out as the Mustache specification has it', () => {
  for (const line of MUSTACHE.trim().split('\n')) {
    const variants = line.includes('{{*')
      ? ['', '&', '{'].map((way) => line.replace(/\{\{\*(.*?)\}\}/g, `{{${way}$1}}${way === '{' ? '}' : ''}`))
      : ['#', '^'].map((sigil) =>
        line.replaceAll('{{~', `{{${sigil}`).replace('!~', String(sigil === '^')).replace('~', String(sigil === '#'))
      );
    for (const variant of new Set(variants)) {
      const [, template = '', text = '', data = ''] = variant.split(' ¦ ');
      const rendered = new Template(String(unescaped(template))).render(JSON.parse(data));
      assert.equal(rendered, String(unescaped(text)), variant);
    }
  }
});

const NO_TEMPLATES = literal`
  Hello {{name ¦ 1, column 7: a "{{" has no "}}"
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
  ${'{{#a}}'.repeat(65)}${'{{/a}}'.repeat(65)} ¦ 1, column 385: sections are nested more than 64 levels deep`;
test('a template that is not one is refused, with line and column', () => {
  for (const line of NO_TEMPLATES.trim().split(/\n */)) {
    const [template = '', mistake] = line.split(' ¦ ');
    const isIt = (error: Error): boolean => error instanceof SyntaxError && error.message.startsWith(`line ${mistake}`);
    assert.throws(() => new Template(String(unescaped(template))), isIt, line);
  }
});

test('what is said of a template is one line without control characters, however the tag looks', () => {
  const isShort = ({ message }: Error): boolean => message.length < 250 && !/\p{Cc}/u.test(message);
  for (
    const tag of ['{{{a}}\nb {{c}}\n{{{d}}} e', '{{#a\x1b[31m\nb}}', `{{#${'a'.repeat(10_000)}}}`, '{{#a}}{{/\n}}']
  ) {
    assert.throws(() => new Template(tag), isShort);
  }
});

test('a template cut at any place is one or is refused, and renders without an accident', () => {
  const whole = 'a\n  {{#b}}\n{{{c.0}}}{{& d.e }} {{^.}}x{{/.}}\n  {{/b}}\r\n{{! f\n}}{{g}}';
  for (const part of Array.from(whole, (_, i) => [whole.slice(0, i), whole.slice(i)]).flat()) {
    try {
      new Template(part).render({ b: [{ c: ['y'] }, null, 1], g: {} });
    } catch (error) {
      assert.match(String(error), /^SyntaxError: line \d+, column \d+: /);
    }
  }
});

const render = (template: string, data: unknown): string => new Template(template).render(data);

test('a text is at most 64 KiB long, and one that is cut ends in an ellipsis and not within a character', () => {
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

test('the work of a rendering is bounded, and it stops where its text is cut, however sections multiply', () => {
  // All of it is longer than a string may be.
  assert.equal(Buffer.byteLength(render('{{a}}'.repeat(1000), { a: 'x'.repeat(MIB) })), LIMIT);
  // A name costs more the deeper it is looked for.
  const nested = (depth: number, inner: string): string => `${'{{#a}}'.repeat(depth)}${inner}${'{{/a}}'.repeat(depth)}`;
  assert.equal(render(nested(60, '{{b}}'.repeat(1000)), { a: 1 }), '…');
  const a = Array<number>(100_000).fill(1);
  // Without a bound the first of these would take 10^15 steps, the second 10^50.
  assert.equal(render(nested(3, ''), { a }), '…');
  assert.equal(render(nested(10, '{{b}}'), { a }), '…');
  assert.equal(render(nested(1, `{{${Array<string>(10_000).fill('x').join('.')}}}`), { a }), '…');
  // Below the limit it is the length of the data times that of the template.
  for (const n of [50, 100, 200]) {
    const data = { a: a.slice(0, n) };
    const text = render(nested(3, '.'), data);
    const isBounded = text.length < nested(3, '.').length * JSON.stringify(data).length;
    assert.ok(text.endsWith('…') && isBounded, `${text.length} of ${n ** 3}`);
  }
  // One way through much data is no multiplication.
  assert.equal(render('{{#a}}{{x}}{{#y}}{{z}}{{/y}}{{/a}}end', { a: a.map(() => ({ y: [{}] })) }), 'end');
});

section('POLICY'); // ──────────────────────────────────────────────────────────────────────────────
const TYPING = `PUT /v1/typing-indicator/${FROM}`;
const GROUPS = `/v1/groups/${FROM}`;
/** Fields of a send besides its recipients. */
const SAID = `"message":"hello","number":"${FROM}"`;
table('a confined token does what it is meant for', CONFINED)`
  * bearer → 201
  GET /v1/about → 200 ;; ${HELLO} ;; {${SAID},"recipients":["${TO}","${GROUP}"]} ;; {${SAID},"recipient":"${GROUP}"}
  GET /v1/receive/${FROM} → 200 ;; GET /v1/receive/%2B${FROM.slice(1)} → 200
  ${TYPING} | {"recipient":"${TO}"} → 204 ;; GET ${GROUPS}/${GROUP} → 200`;
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
table('attack: send without saying from which account', CONFINED)`
  * POST /v1/send | bearer → 400 bad_field ;; * POST /v2/send | bearer → 400 bad_field
  {"recipients":["${TO}"]} ;; {"recipients":["${TO}"],"number":null} ;; {"recipients":["${TO}"],"number":""}
  {"recipients":["${TO}"],"link_preview":{"number":"${FROM}"}}
  none | {"recipients":["${TO}"],"auth":"${SECRET}"} ;; {}`;
const AMONG_MANY = [...Array<string>(500).fill(TO), STRANGER, ...Array<string>(500).fill(TO)].join('","');
table('attack: send to somebody else, in any place that the backend reads, or pass a person off as a group', CONFINED)`
  * bearer → 403 recipient_not_allowed
  {${SAID},"recipients":["${STRANGER}"]} ;; {${SAID},"recipients":["${TO}","${STRANGER}"]}
  {${SAID},"recipients":["${AMONG_MANY}"]} ;; {${SAID},"recipients":["${TO} "]}
  {${SAID},"recipients":["${TO.slice(0, 4)} ${TO.slice(4)}"]} ;; {${SAID},"recipients":["somebody.01"]}
  {${SAID},"recipients":["${randomUUID()}"]} ;; {${SAID},"recipients":["group"]} ;; {${SAID},"recipients":["Group.QUJD"]}
  {${SAID},"recipients":["${GROUP.toUpperCase()}"]} ;; {${SAID},"recipients":[" ${GROUP}"]}
  {"recipient":"${STRANGER}",${HELLO.slice(1)} ;; {${SAID},"recipient":"${STRANGER}"}
  POST /v1/send | {${SAID},"recipients":["${STRANGER}"]} ;; ${TYPING} | {"recipient":"${STRANGER}"}
  POST /v1/polls/${FROM} | {"recipient":"${STRANGER}","answers":["a"]}`;
// With a link to join it, anybody gets into a group, and reads what is sent there.
table('attack: let a stranger into a group', CONFINED)`
  * bearer → 403 endpoint_not_allowed
  POST ${GROUPS} | {"name":"x","members":["${TO}"],"group_link":"enabled"}
  POST ${GROUPS} | {"name":"x","group_link":"enabled"} ;; PUT ${GROUPS}/${GROUP} | {"group_link":"enabled"}
  PUT //v1/groups/${FROM}/${GROUP}/ | {"permissions":{"add_members":"every-member"}}
  POST ${GROUPS}/${GROUP}/members | {"members":["${TO}"]} ;; DELETE ${GROUPS}/${GROUP}/members | {"members":["${TO}"]}
  POST ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]} ;; DELETE ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]}`;
const NAMED: GatewayConfig = { ...CONFINED, allow: ['messaging', 'info', '* /v1/groups/*'] };
table('attack: put a stranger into a group, by a token whose pattern names the route', NAMED)`
  * bearer → 403 recipient_not_allowed
  POST ${GROUPS} | {"name":"x","members":["${TO}","${STRANGER}"]}
  POST ${GROUPS}/${GROUP}/members | {"members":["${STRANGER}"]}
  POST ${GROUPS}/${GROUP}/admins | {"admins":["${STRANGER}"]}`;
for (const [who, config] of Object.entries({ 'whose pattern names the route': NAMED, 'without recipients': {} })) {
  table(`a token ${who} may change a group`, { allow: ['messaging'], ...config }, ANSWERING)`
    * bearer → 200
    POST ${GROUPS} | {"name":"x","members":["${TO}"],"group_link":"enabled"} ;; POST ${GROUPS} | {"name":"x","members":null}
    PUT ${GROUPS}/${GROUP} | {"group_link":"enabled"} ;; POST ${GROUPS}/${GROUP}/members | {"members":["${TO}"]}
    DELETE ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]}`;
}

const KINDS = {
  'phone number': [STRANGER, STRANGER.slice(1), '+1 555 999 9999'],
  'UUID': ['0a1b2c3d-0405-4607-8809-0a0b0c0d0e0f', '0A1B2C3D-0405-4607-8809-0A0B0C0D0E0F'],
  'user name': ['somebody.01', 'Group.01'],
  'group': [GROUP],
};
const ONE_RECIPIENT = { ...CONFINED, ...tokens({ recipients: [TO] }) };
for (const [kind, values] of Object.entries(KINDS)) {
  table(`recipient_not_allowed says that the refused one was a ${kind}, and never which`, ONE_RECIPIENT)`
    * bearer → 403 recipient_not_allowed | "one of these recipients: a ${kind} that is not on its list.","code""
    ${values.map((value) => `{${SAID},"recipients":["${TO}","${value}"]}\n${TYPING} | {"recipient":"${value}"}`)}
    ${kind === 'group' ? `DELETE ${GROUPS}/${GROUP}` : ''}`;
}

const groupOf = (id: string): string => `group.${Buffer.from(id).toString('base64')}`;
// Reactions decode leniently and hand the result to signal-cli as an argument (here "--username=evil.01"); receipts and
// remote-delete make a phone number of the digits.
const NO_GROUPS = [
  ...'LS11c2VybmFtZT1ldmlsLjAx,436641234567x,66412345a,01,123456789,,QUJD ,a b,ü,*,A-B'.split(',').map((id) =>
    `group.${id}`
  ),
  ...[`group.${INTERNAL_ID}`, `${GROUP}=`, `${GROUP} `, GROUP.replace('=', ''), GROUP.replace('=', '==')],
  // The same 32 bytes, written otherwise, and other lengths.
  otherBits(GROUP),
  ...[Buffer.alloc(31).toString('base64'), Buffer.alloc(33).toString('base64')].map(groupOf),
  ...[INTERNAL_ID.replace('=', ''), otherBits(INTERNAL_ID)].map(groupOf),
];
const ROUTES_TO =
  'POST /v1/reactions,POST /v1/receipts,DELETE /v1/remote-delete,PUT /v1/typing-indicator,POST /v1/polls';
for (const [who, config] of Object.entries({ 'a confined token': CONFINED, 'any token': { allow: ['messaging'] } })) {
  table(`attack: name a group that is none, by ${who}`, config)([
    '* bearer → 400 bad_field',
    ...NO_GROUPS.map((name) =>
      `{${SAID},"recipients":["${name}"]} ;; {${SAID},"recipient":"${name}"}
       POST /v1/send | {${SAID},"recipients":["${TO}","${name}"]}`
    ),
    ...NO_GROUPS.slice(0, 3).flatMap((name) =>
      ROUTES_TO.split(',').map((route) => `${route}/${FROM} | {"recipient":"${name}"}`)
    ),
  ]);
}
table('attack: name members that are no group and no person', { allow: ['messaging'] })([
  '* bearer → 400 bad_field',
  NO_GROUPS.flatMap((name) => [
    `POST ${GROUPS} | {"name":"x","members":["${TO}","${name}"]}`,
    `POST ${GROUPS}/${GROUP}/admins | {"admins":["${name}"]}`,
  ]),
]);
table("attack: turn a group's id in a path into an option of signal-cli", { allow: ['messaging', '* /*'] })([
  '* bearer → 400 bad_target',
  [...NO_GROUPS, INTERNAL_ID, GROUP.slice('group.'.length), 'LS11c2VybmFtZT1ldmlsLjAx'].map(encodeURIComponent)
    .filter((id) => !/%(?:2f|2e|25)/i.test(id))
    .map((id) => `POST ${GROUPS}/${id}/pin-message | {"target_author":"${TO}","timestamp":1}`),
]);
// With is_group, /v1/send decodes a recipient and hands the result to signal-cli as the argument of -g.
table('attack: smuggle an option through /v1/send', { allow: ['send'] })([
  '* POST /v1/send | bearer → 400 bad_field',
  ['LS11c2VybmFtZT1ldmlsLjAx', 'LQ==', 'LWE='].map((id) => `{${SAID},"recipients":["${id}"],"is_group":true}`),
]);
table("a group's internal_id as a recipient is 400, and the sentence says which one to use", { allow: ['messaging'] })`
  * bearer → 400 bad_field | " holds a group's "internal_id"; its "id" is needed, which is "group.…"."
  {${SAID},"recipients":["${INTERNAL_ID}"]}
  POST /v1/send | {${SAID},"recipients":["${INTERNAL_ID}"],"is_group":true} ;; {${SAID},"recipient":"${INTERNAL_ID}"}
  POST ${GROUPS}/${GROUP}/members | {"members":["${INTERNAL_ID}"]}`;
table('attack: write to a group by its path', ONE_RECIPIENT)`
  * bearer → 403 recipient_not_allowed
  POST ${GROUPS}/${GROUP}/join ;; DELETE ${GROUPS}/${GROUP}
  POST ${GROUPS}/${GROUP}/pin-message | {"target_author":"${TO}","timestamp":1}`;
table("attack: smuggle an option into signal-cli's command line", { allow: ['messaging'] })([
  '* bearer → 400 bad_field',
  ...['--help', '-', '', '--config=/x', 'a\\u0000b', 'a\\nb', 'a\\u007fb', '\\u0085'].flatMap((value) => [
    `{"number":"${value}","recipients":["${TO}"]}`,
    `{${SAID},"recipients":["${TO}","${value}"]}`,
    `${TYPING} | {"recipient":"${value}"}`,
    `POST /v1/receipts/${FROM} | {"recipient":"${value}","recipients":["${TO}"]}`,
    `POST ${GROUPS} | {"members":["${value}"]}`,
    `POST ${GROUPS}/${GROUP}/admins | {"admins":["${value}"]}`,
    `POST /v1/polls/${FROM} | {"recipient":"${TO}","answers":["yes","${value}"]}`,
    `POST /v1/polls/${FROM}/vote | {"recipient":"${TO}","selected_answers":["${value}"]}`,
  ]),
  `POST /v1/polls/${FROM}/vote | {"recipient":"${TO}","selected_answers":[-1]}`,
  `GET /v1/search/${FROM}?numbers=%2B1555&numbers=--help`,
  'GET /v1/search?numbers=',
  'GET /v1/search?numb%65rs=-x',
]);

const attachment = (data: string): string => `{"base64_attachments":["${data}"],${HELLO.slice(1)}`;
const NO_NAMES = ['../../etc/cron.d/x', '/etc/passwd', 'a/b', 'a\\\\b', '..', '.', 'x\\u0000.png', '..\\\\x'];
table("attack: write a file outside the backend's folder", {})([
  '* bearer → 400 bad_field',
  ...NO_NAMES.flatMap((name) => [
    attachment(`QUJD","data:image/png;filename=${name};base64,QUJD`),
    `{"base64_attachment":"data:image/png;filename=${name};base64,QUJD",${HELLO.slice(1)}`,
    attachment(`filename=${name};data:;base64,QUJD`),
  ]),
  ...literal`
    data:image/png;filename=good.png;filename=../bad;base64,QUJD ;; data:image/png;filename=..\u002fx;base64,QUJD
    data:x;base64,QUJD;filename=../x;base64,QUJD ;; data:x,y;filename=../x;base64,QUJD
    data:x;filename=.,base64,base64,QUJD ;; data:x;filename=../../x, March.pdf;base64,QUJD
    data:x;base64,AA;filename=../../x;base64,QUJD ;; data:x;base64,AA,filename=../../x,base64,QUJD
    data:x;filename=..,base64,QUJD
    data:x;filename=..xbase64,QUJD`.trim().split(/\n| ;; /).map((data) => attachment(data.trim())),
  // The backend stores the thumbnail of a link preview in the same way. Before "base64," it drops one character.
  ...literal`
    {"base64_thumbnail":"data:x;filename=../x;base64,QQ=="}
    {"title":"a, b; c","base64_thumbnail":"data:x;filename=../x;base64,QQ=="}
    {"base64_thumbnail":"QQ==","base64_thumbnail":"QQ=="} ;; {"Base64_thumbnail":"QQ=="}
    {"base64_thumbnail":["QQ=="]} ;; {"ba\u017fe64_thumbnail":"QQ=="}
    {"base64_thumbnail":"data:x;base64,QQ==;filename=../x;base64,QQ=="} ;; [] ;; "x"
    {},"Link_Preview":{"base64_thumbnail":"data:x;filename=../x;base64,QQ=="}`.trim().split(/\n| ;; /).map((preview) =>
    `${HELLO.slice(0, -1)},"link_preview":${preview.trim()}}`
  ),
]);
table('an attachment and a link preview with innocent names pass', {})([
  '* bearer → 201',
  ...literal`
    QUJD ;; data:image/png;base64,QUJD ;; data:image/png;filename=holiday..2026.png;base64,QUJD
    data:;filename=.hidden;base64,QUJD ;; data:text/plain;filename=grüße @home (1).txt;base64,QUJD
    data:application/pdf;filename=Invoice, March.pdf;base64,QUJD
    data:application/pdf;charset=x,y;filename=a;b/c, base64;base64,QUJD
    data:image\/png;base64,Q\u002B\/D`.trim().split(/\n| ;; /).map((data) => attachment(data.trim())),
  ...literal`
    null ;; {}
    {"title":"a, b; c","description":"number","base64_thumbnail":"data:image/png;filename=x.png;base64,QQ==","number":1}
    {"base64_thumbnail":null,"x":{"base64_thumbnail":1}}`.trim().split(/\n| ;; /).map((preview) =>
    `{"link_preview":${preview.trim()},${HELLO.slice(1)}`
  ),
]);
// As a member, and on /v1/send, signal-cli takes "group.+4366…" for the phone number of its digits.
table("attack: reach a person by a group's name where groups are not meant", {
  ...{ ...NAMED, ...tokens({ recipients: ['group.*', GROUP] }, {}) },
})`
  * bearer → 400 bad_field
  {${SAID},"recipients":["group.+4366412345678"]}
  POST /v1/receipts/${FROM} | {"recipient":"${GROUP}","receipt_type":"read","timestamp":1}
  POST /v1/receipts/${FROM} | {"recipient":"${GROUP}","receipt_type":"read","timestamp":1} | bearer ${OTHER}
  POST /v1/send | {${SAID},"recipients":["${GROUP}"]}
  POST /v1/send | {${SAID},"recipients":["group.4366412345678a"],"is_group":false}
  POST ${GROUPS} | {"name":"x","members":["${GROUP}"]}
  POST ${GROUPS}/${GROUP}/members | {"members":["group.4366412345678="]}
  POST ${GROUPS}/${GROUP}/admins | {"admins":["group.4366412345678a"]}`;

section('BODY SCAN'); // ───────────────────────────────────────────────────────────────────────────
interface Scanned {
  out: string;
  auth: string | undefined;
  fields: { key: string; value: string | undefined }[];
}

/** Pushes a document through a scanner; `passed` is what it lets through. */
function push(scan: InstanceType<typeof BodyScan>, chunks: Uint8Array[], passed: Uint8Array[] = []): Uint8Array[] {
  for (const chunk of chunks) passed.push(...scan.write(chunk));
  passed.push(...scan.end());
  return passed;
}

function scanAll(chunks: Uint8Array[], keepLength = false): Scanned {
  const scan = new BodyScan();
  scan.keepLength = keepLength;
  return { out: Buffer.concat(push(scan, chunks)).toString(), auth: scan.auth, fields: scan.takeFields() };
}

/** A document cut in two at every byte, and cut into single bytes. */
function* everySplit(text: string | Buffer): Generator<Uint8Array[]> {
  const bytes = Buffer.from(text as string);
  for (let i = 0; i <= bytes.length; i++) yield [bytes.subarray(0, i), bytes.subarray(i)];
  yield Array.from(bytes, (byte) => Buffer.from([byte]));
}

/** Bytes in pieces, each of a size. */
function cutInto(bytes: Buffer, size: () => number): Buffer[] {
  const chunks: Buffer[] = [];
  for (let at = 0; at < bytes.length; at += chunks.at(-1)!.length) chunks.push(bytes.subarray(at, at + size()));
  return chunks;
}

/** Documents, by white space between them: ␊ is a line feed in one, ␠ a space, and so on. */
function documents(text: string): string[] {
  const control = (char: string): string => String.fromCharCode(char.charCodeAt(0) - 0x2400);
  return text.trim().split(/[ \n]+/).map((document) => document.replace(/[\u2400-\u2420]/g, control));
}

const LONG_TEXT = 'é'.repeat(300) + 'x'.repeat(300);
/** What it shows, a document, what goes on if that is something else, and what `auth` was. */
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

test('BodyScan: auth is cut out and all else goes on, cut at every byte, whether the length is kept or not', () => {
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
  // Of an attachment only what stands before its data.
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

const NOT_AN_OBJECT = [
  '',
  ' ',
  ...documents(literal`
  [] [{}] "text" 1 null true auth=x ${'\u{feff}'}{} { {" {"a {"a" {"a": {"a":1 {"a":1, {"a":1,} {,} {"a":1␠"b":2} {a:1}
  {'a':1} {"a"␠1} {"a"::1} {"a":} {"a":,} {"a":1}} {}{} {}␠x {}␀ {}] {"a":[} {"a":]} {"a":[1,]} {"a":[,1]} {"a":[1␠2]}
  {"a":{]} {"a":(1)} {"a":[1}] {"a":01} {"a":+1} {"a":.5} {"a":1.} {"a":1e} {"a":--1} {"a":1-1} {"a":0x1} {"a":NaN}
  {"a":Infinity} {"a":-} {"a":tru} {"a":True} {"a":nul} {"number":nul} {"recipients":nope} {"a":truefalse} {"a":1a}
  {"a":undefined} {"a":"␊"} {"a":"␉"} {"a":"␀"} {"a":"␟"} {"a␁":1} {"a":"\x"} {"a":"\u12"} {"a":"\u12g4"} {"a":"\U0041"}
  {"a":"\ {/**/} {"a":1}// ␋{} {␌} {"a":${'['.repeat(64)}${']'.repeat(64)}} {"a":${'{"a":'.repeat(70)}1${
    '}'.repeat(70)
  }}
  {"a":${'1'.repeat(300)}} {"auth":"x" {"auth":"x","a":1 {"auth":"x",}`),
  '{\u00a0}',
];

/** Documents that are JSON, and that the backend would read in another way than it looks. */
const BAD_FIELDS = documents(literal`
  {"auth":1} {"auth":["x"]} {"auth":{}} {"auth":"x","auth":"x"} {"auth":"x","\u0061uth":"y"} {"Auth":"x"} {"AUTH":"x"}
  {"\u0041uth":"x"} {"auth":null,"auth":"x"} {"auth":"${literal`\u0041`.repeat(700)}"}
  {"number":1} {"number":["+1"]} {"number":true} {"number":"+1","number":"+2"} {"number":"+1","Number":"+2"}
  {"NUMBER":"+1"} {"recipients":"+1"} {"recipients":{}} {"recipients":[1]} {"recipients":[null]} {"recipients":[["+1"]]}
  {"recipients":[{"a":1}]} {"recipients":["+1",true]} {"recipients":1} {"recipients":["+1"],"recipients":["+2"]}
  {"recipients":["+1"],"Recipients":["+2"]} {"recipientſ":["+1"]} {"recipient\u017f":["+1"]} {"recipient\u017F":["+1"]}
  {"\u0052ecipients":["+1"]} {"recipients":false} {"recipients":["${'1'.repeat(5000)}"]} {"recipient":["+1"]}
  {"recipient":1} {"Recipient":"+1"} {"recipient":"+1","recipient":"+2"} {"memberſ":["x"]} {"admin\u017f":["x"]}
  {"ADMINS":[]} {"members":"x"} {"members":null,"members":["+1"]} {"base64_attachments":"x"} {"base64_attachments":[null]}
  {"base64_attachments":true} {"baſe64_attachments":[]} {"base64_attachment":["x"]}
  {"base64_attachments":[],"base64_attachments":[]} {"answers":[null]} {"answers":[true]} {"answers":["a"],"Answers":["-b"]}
  {"selected_answer\u017f":[1]} {"base64_attachments":["data:x;base64,AAAA;filename=../x;base64,QUJD"]}
  {"base64_attachments":["data:x;base64,AAAA\u003bfilename=x"]} {"base64_attachments":["data:x;base64\u002cQUJD"]}
  {"base64_attachments":["data:x;base64,QUJD,QUJD"]} {"base64_attachments":["base64,;"]} {"base64_attachments":[",base64,,"]}
  {"base64_attachments":["data:x;\u0062ase64,AA;filename=../x;base64,QUJD"]}
  {"base64_attachments":["${'A'.repeat(1024)};QUJD"]} {"base64_attachments":["data:${'a'.repeat(1024)};base64,QUJD"]}`);

for (const [code, all] of [['bad_json', NOT_AN_OBJECT], ['bad_field', BAD_FIELDS]] as const) {
  test(`BodyScan: a bad document is ${code} however it is cut, and nothing complete has passed`, () => {
    for (const document of all) {
      for (const chunks of everySplit(document)) {
        const cut = `${document} cut into ${chunks.map(({ length }) => length)} bytes`;
        const passed: Uint8Array[] = [];
        assert.throws(() => push(new BodyScan(), chunks, passed), { code }, cut);
        assert.throws(() => JSON.parse(Buffer.concat(passed).toString()), SyntaxError, cut);
      }
    }
  });
}

test('BodyScan: while its sender is not known, broken JSON is refused, and what is wrong with a field waits', () => {
  for (const document of [...NOT_AN_OBJECT, ...BAD_FIELDS]) {
    const code = BAD_FIELDS.includes(document) ? 'bad_field' : 'bad_json';
    const waits = code === 'bad_field' && !/auth|u0061uth|u0041uth/i.test(document);
    for (const chunks of everySplit(document)) {
      const scan = new BodyScan();
      scan.defers = true;
      if (waits) push(scan, chunks);
      assert.throws(() => waits ? scan.takeFields() : push(scan, chunks), { code }, document);
    }
  }
});

test('BodyScan: invalid UTF-8 is bad_json at every split, valid UTF-8 passes at every split', () => {
  for (const hex of '80 c3 c080 e08080 eda080 f0808080 f4908080 f5 ff e282 f09f98'.split(' ')) {
    const document = Buffer.concat([Buffer.from('{"a":"'), Buffer.from(hex, 'hex'), Buffer.from('"}')]);
    for (const chunks of everySplit(document)) assert.throws(() => scanAll(chunks), { code: 'bad_json' }, hex);
  }
  const good = '{"a":"\u0080é߿ࠀ€\ud7ff\ue000￿𐀀😀\u{10ffff}"}';
  for (const chunks of everySplit(good)) assert.equal(scanAll(chunks).out, good);
});

randomTest('BodyScan: a random document comes out as JSON.parse reads it, however it is cut', (random) => {
  const pick = <V>(values: V[]): V => values[random(values.length)]!;
  const space = (): string => pick(['', '', '', ' ', '\n', '\r\n\t ']);
  const key = (letters: string[] = []): string =>
    `"${
      Array.from({ length: random(12) }, () =>
        pick(['a', 'é', '😀', '\\n', '\\u0041', '\\ud83d\\ude00', 'auth', ',', '{', '}', '[', ...letters])).join('')
    }"`;
  // Not in keys: V8 in Node 24 and 26 mistakes the second of {"k\\\\":0} and {"k\\"":0} for the first.
  const text = (): string => key(['\\"', '\\\\']);
  const value = (depth: number): string => {
    const kind = random(depth > 4 ? 3 : 5);
    if (kind === 0) return text();
    if (kind === 1) return pick(['0', '-1', '1.5', '1e3', '-0.0E-2', '123456789012345678']);
    if (kind === 2) return pick(['true', 'false', 'null']);
    const inner = Array.from(
      { length: random(4) },
      () => `${space()}${kind === 3 ? '' : `${key()}${space()}:${space()}`}${value(depth + 1)}${space()}`,
    ).join(',');
    return kind === 3 ? `[${inner}]` : `{${inner || space()}}`;
  };
  for (let round = 0; round < 2000; round++) {
    const members = Array.from(
      { length: random(6) },
      (_, i) => `${space()}"k${i}${key().slice(1)}${space()}:${space()}${value(1)}${space()}`,
    );
    const auth = random(2) ? `t${random(1000)}` : undefined;
    const own = `${space()}${pick(['"auth"', '"\\u0061uth"'])}${space()}:${space()}"${auth}"${space()}`;
    if (auth !== undefined) members.splice(random(members.length + 1), 0, own);
    const document = `${space()}{${members.join(',')}}${space()}`;
    const { auth: cut, ...expected } = JSON.parse(document) as Record<string, unknown>;
    const scanned = scanAll(cutInto(Buffer.from(document), () => 1 + random(20)), random(2) === 0);
    assert.deepEqual([JSON.parse(scanned.out), scanned.auth, cut], [expected, auth, auth], document);

    // One byte changed: the scanner accepts exactly what JSON.parse accepts as an object.
    const bytes = Buffer.from(document);
    bytes[random(bytes.length)] = pick([...Buffer.from('{}[],:"\\ 0e-+tfnu'), random(256)]);
    const [verdict, parsed] = [
      () => scanAll([bytes]),
      (): unknown => JSON.parse(new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes)),
    ].map((read) => {
      try {
        return read();
      } catch (error) {
        return (error as { code?: string }).code ?? 'no code';
      }
    });
    const isObject = typeof parsed === 'object' && parsed !== null && !Array.isArray(parsed);
    if (verdict !== 'bad_field') assert.equal(typeof verdict === 'object', isObject, bytes.toString('latin1'));
  }
});

test('BodyScan: 64 MiB pass through without being kept', () => {
  const scan = new BodyScan();
  const chunk = Buffer.alloc(64 * 1024, 'QUJD');
  const lengthOf = (pieces: Uint8Array[]): number => pieces.reduce((sum, piece) => sum + piece.length, 0);
  let passed = lengthOf(scan.write(Buffer.from('{"base64_attachments":["data:image/png;filename=x.png;base64,')));
  const before = process.memoryUsage();
  for (let i = 0; i < 1024; i++) passed += lengthOf(scan.write(chunk));
  const after = process.memoryUsage();
  passed += lengthOf([...scan.write(Buffer.from('"]}')), ...scan.end()]);
  assert.equal(passed, 64 * MIB + 64, 'the bytes that passed');
  // Made for a native search and dropped at once; what is alive may wait for the collector.
  const kept = after.external + after.arrayBuffers - before.external - before.arrayBuffers;
  assert.ok(kept < 16 * MIB, `${kept} bytes are kept`);
});

// White space before a key is held until the key is known; a client that sent it byte by byte had an object kept for
// each, and all of them counted again with each byte.
test('what comes in single bytes is held in few pieces', () => {
  for (const keys of ['all', 'none'] as const) {
    const scan = new BodyScan(keys);
    const out = ['{', ...' '.repeat(60_000)].flatMap((char) => scan.write(Buffer.from(char)));
    const released = scan.write(Buffer.from('"a":1}'));
    assert.ok(released.length < 100, `${released.length} pieces`);
    assert.equal(Buffer.concat([...out, ...released, ...scan.end()]).toString(), `{${' '.repeat(60_000)}"a":1}`);
    const blank = Array.from(`{${'\n'.repeat(70_000)}`, (char) => Buffer.from(char));
    assert.throws(() => push(new BodyScan(keys), blank), /too much white space/);
  }
});

// The limit was looked at once for each chunk.
test('BodyScan: how much white space may stand between members does not depend on the chunks', () => {
  for (
    const around of documents('{"a":1,#"b":2} {#"a":1} {"a":1,"auth"#:"x"} {"a":1,"auth":#"x"} {"a":[1,#2],#"b":#3}')
  ) {
    for (const size of [65_000, 65_520, 65_530, 65_533, 65_534, 65_535, 65_536, 65_537, 70_000, 200_000]) {
      const document = Buffer.from(around.replaceAll('#', ' '.repeat(size)));
      const verdicts = [document.length, 1000, 4096, 65_536, 65_537].map((step) => {
        try {
          return scanAll(cutInto(document, () => step)).out.length;
        } catch (error) {
          return (error as Error).message;
        }
      });
      assert.equal(new Set(verdicts).size, 1, `${around} ${size}: ${verdicts}`);
      assert.equal(typeof verdicts[0], size <= 65_520 ? 'number' : size > 65_536 ? 'string' : typeof verdicts[0]);
    }
  }
});

test('the syntax of a document of any size is checked without its keys, and passes as it is', () => {
  const text = `{"auth":{"x":[]},"Auth":1,"auth":2,"number":3,"":4,"a":"${'x'.repeat(300_000)}"}`;
  const scan = new BodyScan('none');
  assert.equal(Buffer.concat(push(scan, [Buffer.from(text)])).toString(), text);
  assert.deepEqual([scan.auth, scan.takeFields()], [undefined, []]);
  const broken = Buffer.from(text.replace('"a":', '"a"'));
  assert.throws(() => new BodyScan('none').write(broken), /a colon is expected, at byte 54/);
});

test('BodyScan: a byte that is not plain is found at every place of a long string, at even and at odd addresses', () => {
  const ATTACHED = '{"base64_attachment":"base64,';
  const CONTROL = 'a string holds a control character, at byte ';
  const MARK = 'may have "," and ";" only before its data';
  for (
    const [before, special, after, refusal] of [
      ['{"a":"', '\x1f', '\n"}', CONTROL],
      ['{"a":"', '\\@', '\\"}', 'an unknown escape, at byte '],
      ['{"a":"', '"@', '"}', 'comma or the end of the object or array is expected, at byte '],
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

/** A backend of raw bytes: `answer` gets each whole request, and how many its connection has had before. */
async function startRawBackend(
  t: TestContext,
  answer: (socket: net.Socket, request: string, before: number) => void,
): Promise<{ url: string; requests: string[]; sockets: net.Socket[] }> {
  const backend = { url: '', requests: [] as string[], sockets: [] as net.Socket[] };
  const server = net.createServer((socket) => {
    backend.sockets.push(socket);
    let text = '';
    let count = 0;
    socket.on('error', () => {});
    socket.on('data', (chunk) => {
      text += chunk.toString('latin1');
      const end = text.indexOf('\r\n\r\n') + 4;
      const length = end + Number(/content-length: (\d+)/i.exec(text)?.[1] ?? 0);
      if (end < 4 || text.length < length) return;
      const request = text.slice(0, length);
      text = text.slice(length);
      backend.requests.push(request);
      answer(socket, request, count++);
    });
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.after(() => {
    server.close();
    backend.sockets.forEach((socket) => socket.destroy());
  });
  backend.url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  return backend;
}

const SENT = 'HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}';

test('a path prefix of the backend is kept, and its userinfo becomes Basic', async (t) => {
  const backend = await startBackend(t, (_, res) => res.end('{}'));
  const gateway = await startGateway(t, { url: `http://us%20er:p%40ss@127.0.0.1:${backend.port}/pre/fix/` });
  await ask(gateway, { headers: BEARER, path: '/v1/about?x=1' });
  assert.equal(backend.seen[0]!.url, '/pre/fix/v1/about?x=1');
  assert.equal(backend.seen[0]!.headers.authorization, basic('us er:p@ss'));
  assert.doesNotMatch(gateway.log.join(''), /p@ss|p%40ss/);
});

test('hop-by-hop headers end here, both ways, and so does what only the gateway may say', async (t) => {
  const backend = await startBackend(t, (req, res) => {
    req.resume();
    res.writeHead(200, [
      'Connection',
      'X-Hop-Back',
      'X-Hop-Back',
      'secret',
      'Keep-Alive',
      'timeout=1',
      'Proxy-Authenticate',
      'Basic',
      'Upgrade',
      'h2c',
      'X-End',
      'to end',
      'Set-Cookie',
      'a=1',
      'Set-Cookie',
      'b=2; Path=/',
      'Content-Type',
      'application/json',
      'Content-Length',
      '2',
    ]).end('{}');
  });
  const gateway = await startGateway(t, backend);
  const response = await rawRequest(gateway, '/v1/about', {
    headers: [
      `Authorization: Bearer ${SECRET}`,
      'Connection: X-Hop, x-forwarded-for, content-type',
      'X-Hop: secret',
      'Keep-Alive: 5',
      'TE: trailers',
      'Trailer: X',
      'Upgrade: h2c',
      'Proxy-Authorization: Basic x',
      'Proxy-Connection: close',
      'Forwarded: for=1.2.3.4',
      'X-Forwarded-For: 1.2.3.4',
      'X-Forwarded-Host: evil',
      'X-Forwarded-Proto: https',
      'X-Forwarded-Prefix: /evil',
      'X-Real-IP: 1.2.3.4',
      'X-Request-Id: forged',
      'Accept-Encoding: gzip',
      'X-End: to end',
      'Cookie: c=3',
      'Referer: http://gateway/x',
      'X-Original-URL: /x',
      'X-Original-Anything: x',
      'X-Rewrite-URL: /x',
      'X-Envoy-Original-Path: /x',
      'User-Agent: test/1',
    ],
  });
  const [seen] = backend.seen;
  const {
    'x-request-id': requestId,
    'connection': _0,
    'accept-language': _1,
    'sec-fetch-mode': _2,
    accept: _3,
    ...headers
  } = seen!.headers;
  assert.deepEqual(headers, {
    'host': `127.0.0.1:${backend.port}`,
    'accept-encoding': 'identity',
    'x-end': 'to end',
    'user-agent': 'test/1',
    'x-forwarded-for': '127.0.0.1',
    'x-forwarded-host': 'gateway',
    'x-forwarded-proto': 'http',
  });
  assert.equal(requestId, requests(gateway)[0].requestId);
  const lower = response.toLowerCase();
  for (const name of ['x-hop-back', 'proxy-authenticate', 'upgrade', 'timeout=1']) {
    assert.ok(!lower.includes(name), name);
  }
  assert.match(response, /\r\nset-cookie: a=1\r\nset-cookie: b=2; Path=\/\r\n/i);
  assert.match(response, /\r\nx-end: to end\r\n/i);
  assert.match(response, /\r\ncontent-length: 2\r\n/i);
});

test('a header that holds a copy of the credential ends here, and what only looks like one goes on', async (t) => {
  const backend = await startUpgradeBackend(t);
  const [short, utf8] = ['fifteen-letters', 'pässwört with spaces/+%41'];
  const digest = `sha256:${createHash('sha256').update(short).digest('hex')}`;
  const gateway = await startGateway(t, backend, {
    ...ALL_FORMS,
    allow: ['info', 'receive'],
    tokens: { a: { secret: SECRET }, b: { secret: digest }, c: { secret: utf8 } },
  });
  const innocent = {
    'origin': 'http://gateway:8880',
    'x-other': OTHER,
    'user-agent': 'x/1',
    'x-bad': '%zz%e4%',
    'x-b': 'A'.repeat(50),
  };
  const pass = async (request: Ask): Promise<http.IncomingHttpHeaders> => {
    assert.equal((await ask(gateway, { ...request, headers: { ...innocent, ...request.headers } })).status, 200);
    return backend.seen.at(-1)!.headers;
  };
  for (const secret of [SECRET, utf8]) {
    for (const copy of copiesOf(secret)) {
      // As bytes, as node:http writes and reads them.
      const headers = Object.fromEntries(
        Object.entries(copy).map(([name, value]) => [name, Buffer.from(String(value)).toString('latin1')]),
      );
      const seen = await pass({ path: `/v1/about?@auth=${encodeURIComponent(secret)}`, headers });
      for (const name of Object.keys(copy)) if (name !== 'host') assert.equal(seen[name], undefined, name);
      for (const [name, value] of Object.entries(innocent)) if (!(name in copy)) assert.equal(seen[name], value);
      const host = seen['x-forwarded-host'] as string;
      assert.ok([`127.0.0.1:${gateway.port}`, 'gateway', undefined].includes(host), host);
    }
  }
  // Every credential that was presented counts, not only the one that decided; one below 16 characters does not.
  const wrong = await pass({
    path: `/@auth=${OTHER}/v1/about`,
    headers: { ...BEARER, 'x-other': OTHER, 'x-a': SECRET },
  });
  assert.deepEqual([wrong['x-other'], wrong['x-a']], [undefined, undefined]);
  const kept = await pass({ path: `/v1/about?@auth=${short}`, headers: { 'x-short': short } });
  assert.equal(kept['x-short'], short);
  // A WebSocket takes the same way.
  const { text } = openWebSocket(t, gateway, {
    headers: [`Authorization: Bearer ${SECRET}`, `X-Copy: ${SECRET}`, `Referer: http://gateway/x`, 'X-End: to end'],
  });
  await until(() => text().includes('\r\n\r\n'));
  const { headers } = backend.seen.at(-1)!;
  assert.deepEqual([headers['x-copy'], headers.referer, headers['x-end']], [undefined, undefined, 'to end']);
});

/** Bun 1.4.5 refuses more than 198 header fields by itself. */
const HEADERS_MOST = 'Bun' in globalThis ? 198 : 200;
const TOO_MANY = [431, 'too_many_headers'] as const;

test('200 header fields pass, with any number of names in Connection; 201 are 431, and two Host are 400', async (t) => {
  const both = await startBoth(t);
  const request = (fields: number, more = ''): Promise<string> =>
    raw(
      both.gateway,
      `GET /v1/about HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer ${SECRET}\r\n${more}${
        Array.from({ length: fields - 4 }, (_, i) => `x-${i}: ${i}\r\n`).join('')
      }Connection: close${Array.from({ length: 1000 }, (_, i) => `,x-${i}`).join('')}\r\n\r\n`,
    );
  for (
    const [response, status, code] of [
      [await request(201, 'x-more: 1\r\n'), ...TOO_MANY],
      [await request(10, 'Host: other\r\n'), 400, 'bad_target'],
      [await request(10, 'HOST: gateway\r\n'), 400, 'bad_target'],
    ] as const
  ) {
    assert.deepEqual([statusOf(response), codeOf(response)], [status, code]);
    assert.ok(logLines(both.gateway.log).some((line) => line.code === code), response);
  }
  assert.equal(both.backend.connections, 0);
  const { socket, text } = openWebSocket(t, both.gateway, { headers: Array(201).fill('x: 1') });
  await closed(socket);
  assert.deepEqual([statusOf(text()), codeOf(text())], [...TOO_MANY]);
  assert.equal(statusOf(await request(HEADERS_MOST, 'x-more: 1\r\n')), 200);
  const { headers } = both.backend.seen[0]!;
  assert.deepEqual([headers['x-more'], headers['x-0'], headers['x-193']], ['1', undefined, undefined]);
});

test('status and body come back as the backend sent them', async (t) => {
  const challenge = '{"error":"rate limit","challenge_tokens":["a-b"],"account":"+1555"}';
  const cases: [status: number, type: string | undefined, body: string][] = [
    [200, 'text/plain; charset=utf-8', '[]'],
    [201, 'application/json', '{"timestamp":"1"}'],
    [201, undefined, ''],
    [204, undefined, ''],
    [304, undefined, ''],
    [400, 'text/plain', "Couldn't process request - invalid request"],
    [404, 'text/plain', '404 page not found'],
    [429, 'application/json', challenge],
    [500, undefined, ''],
    [418, 'image/png', '\x89PNG'],
  ];
  for (const [status, type, body] of cases) {
    const backend = await startBackend(t, (req, res) => {
      req.resume();
      res.writeHead(status, type === undefined ? {} : { 'Content-Type': type }).end(body);
    });
    const gateway = await startGateway(t, backend);
    const answer = await ask(gateway, { body: MESSAGE, headers: BEARER });
    assert.deepEqual([answer.status, answer.headers['content-type'], answer.text], [status, type, body]);
    assert.equal(answer.headers['retry-after'], undefined);
  }
});

test('a compressed answer of a backend that was asked for none is 502', async (t) => {
  const backend = await startBackend(
    t,
    (_, res) => res.writeHead(200, { 'Content-Encoding': 'gzip' }).end(gzipSync('{"versions":[]}')),
  );
  const answer = await ask(await startGateway(t, backend), { headers: BEARER });
  assert.deepEqual([answer.status, answer.json.code], [502, 'bad_backend_answer']);
});

test('a redirect of the backend is 502, and is not followed', async (t) => {
  const other = await startBackend(t);
  for (const status of [301, 302, 303, 307, 308]) {
    const backend = await startBackend(t, (req, res) => {
      req.resume();
      res.writeHead(status, { Location: `${other.url}/v1/about` }).end();
    });
    const answer = await ask(await startGateway(t, backend), { body: MESSAGE, headers: BEARER });
    assert.deepEqual([answer.status, answer.json.code, answer.headers.location], [
      502,
      'bad_backend_answer',
      undefined,
    ]);
    assert.equal(backend.seen.length, 1);
  }
  assert.equal(other.seen.length, 0);
});

test('a backend that is down is 502, and nothing was sent', async (t) => {
  const spare = http.createServer().listen(0, '127.0.0.1');
  await once(spare, 'listening');
  const { port } = spare.address() as AddressInfo;
  spare.close();
  const gateway = await startGateway(t, { url: `http://127.0.0.1:${port}` });
  const answer = await ask(gateway, { body: MESSAGE, headers: BEARER });
  assert.deepEqual([answer.status, answer.json.code], [502, 'backend_unreachable']);
});

test('a backend that closes without an answer, or answers rubbish, is 502, and is asked only once', async (t) => {
  for (const reply of ['', 'rubbish\r\n\r\n', 'HTTP/1.1 2000 OK\r\n\r\n']) {
    let asked = 0;
    const server = net.createServer((socket) => {
      socket.on('error', () => {});
      socket.once('data', () => {
        asked++;
        socket.end(reply);
      });
    });
    server.listen(0, '127.0.0.1');
    await once(server, 'listening');
    t.after(() => server.close());
    const gateway = await startGateway(t, { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}` });
    const answer = await ask(gateway, { body: MESSAGE, headers: BEARER });
    assert.deepEqual([answer.status, answer.json.code], [502, 'bad_backend_answer']);
    assert.match(answer.json.error, /may have been sent/);
    assert.equal(asked, 1);
  }
});

test(
  'a slow backend is 504, which says that the message may have been sent; its request is aborted',
  async (t) => {
    let aborted = 0;
    const backend = await startBackend(t, (req) => {
      req.resume();
      req.socket.on('close', () => {
        aborted++;
      });
    });
    const gateway = await startGateway(t, { url: backend.url }, { backend: { url: backend.url, timeout: '1s' } });
    await Promise.all(['short', 'x'.repeat(200_000)].map(async (message) => {
      const answer = await ask(gateway, { body: { ...MESSAGE, message }, headers: BEARER });
      assert.deepEqual([answer.status, answer.json.code], [504, 'backend_timeout']);
      assert.match(answer.json.error, /may have been sent/);
    }));
    // On a loaded machine one may be too slow to get there.
    await until(() => aborted > 0 && aborted === backend.seen.length);
  },
);

test("a backend that breaks off in the middle of an answer breaks the client's connection too", async (t) => {
  for (const headers of [{ 'Content-Length': 100 }, {}]) {
    const backend = await startBackend(t, (req, res) => {
      req.resume();
      res.writeHead(200, headers);
      res.write('half', () => setImmediate(() => res.destroy()));
    });
    const gateway = await startGateway(t, backend);
    const response = await raw(gateway, ABOUT);
    assert.match(response, /half(\r\n)?$/);
    await until(() => requests(gateway).length === 1);
    assert.equal(requests(gateway)[0].code, 'bad_backend_answer');
  }
});

test('without slots, a client that leaves takes its request to the backend with it, and is 499 in the log', async (t) => {
  let arrived = 0;
  let left = 0;
  const backend = await startBackend(t, (req) => {
    arrived++;
    req.resume();
    req.socket.on('close', () => {
      left++;
    });
  });
  const gateway = await startGateway(t, backend, { backend: { url: backend.url, parallel: 0 } });
  for (
    const body of [undefined, JSON.stringify(MESSAGE), JSON.stringify({ ...MESSAGE, message: 'x'.repeat(500_000) })]
  ) {
    const { socket } = open(
      t,
      gateway,
      `${
        body ? 'POST /v2/send' : 'GET /v1/about'
      } HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\nContent-Length: ${body?.length ?? 0}\r\n\r\n${
        body ?? ''
      }`,
    );
    const before = arrived;
    await until(() => arrived > before);
    socket.destroy();
    await until(() => left === arrived);
  }
  await until(() => requests(gateway).length === 3);
  for (const line of requests(gateway)) assert.deepEqual([line.status, line.code], [499, 'client_left']);
});

test('a client that leaves in the middle of its upload leaves no document behind', async (t) => {
  const backend = await startBackend(t);
  const gateway = await startGateway(t, backend);
  const { socket } = open(
    t,
    gateway,
    `${post(SECRET, 1_000_000)}${JSON.stringify(MESSAGE).slice(0, -1)},"base64_attachments":["${'A'.repeat(200_000)}`,
  );
  await until(() => backend.seen.length === 1);
  socket.destroy();
  await until(() => requests(gateway).length === 1);
  assert.equal(requests(gateway)[0].status, 499);
  assert.equal(backend.seen[0]!.complete, false);
  assert.deepEqual(backend.sent, []);
});

test('a large body reaches the backend while it is still being sent', async (t) => {
  const backend = await startBackend(t);
  const gateway = await startGateway(t, backend);
  const body = JSON.stringify({ ...MESSAGE, base64_attachments: ['A'.repeat(500_000)] });
  const req = beginSend(gateway, { ...BEARER, 'content-length': body.length });
  req.write(body.slice(0, 100_000));
  await until(() => backend.seen.length === 1);
  assert.equal(backend.seen[0]!.complete, false);
  req.end(body.slice(100_000));
  const [res] = await once(req, 'response') as [http.IncomingMessage];
  res.resume();
  assert.equal(res.statusCode, 201);
});

test('an answer reaches the client while it is still being sent', async (t) => {
  let finish = (): void => {};
  const backend = await startBackend(t, (_, res) => {
    res.write('first,');
    finish = () => res.end('second');
  });
  const gateway = await startGateway(t, backend);
  const req = http.get({ host: '127.0.0.1', port: gateway.port, path: '/v1/about', agent: false, headers: BEARER });
  const [res] = await once(req, 'response') as [http.IncomingMessage];
  const [first] = await once(res, 'data') as [Buffer];
  assert.equal(first.toString(), 'first,');
  finish();
  const [second] = await once(res, 'data') as [Buffer];
  assert.equal(second.toString(), 'second');
});

test('no more of an upload is read than the backend takes', async (t) => {
  let taken = 0;
  const total = 64 * MIB;
  const body = JSON.stringify(MESSAGE).slice(0, -1) + ',"message2":"';
  const backend = await startBackend(t, async (req, res) => {
    // Takes a chunk, lets everything else run for a while, and takes the next.
    for await (const chunk of req) {
      taken += (chunk as Buffer).length;
      for (let turn = 0; turn < 3; turn++) await new Promise((resolve) => setImmediate(resolve));
      // Most of it is in the system's socket buffers.
      assert.ok(socket.bytesWritten - taken < 24 * MIB, `${socket.bytesWritten - taken} bytes are on their way`);
    }
    res.writeHead(201).end('{"timestamp":"1"}');
  });
  const { socket, text } = open(t, await startGateway(t, backend));
  socket.write(`${post(SECRET, total, 'Connection: close')}${body}`);
  const filler = Buffer.alloc(256 * 1024, 'x');
  for (let left = total - body.length - 2; left > 0;) {
    const piece = filler.subarray(0, Math.min(left, filler.length));
    left -= piece.length;
    if (!socket.write(piece)) await once(socket, 'drain');
  }
  socket.write('"}');
  await closed(socket);
  assert.equal(statusOf(text()), 201);
  assert.equal(taken, total);
});

test('an answer that comes before the upload ends is delivered', async (t) => {
  const backend = await startBackend(t, (_, res) => {
    res.writeHead(400, { 'Content-Type': 'application/json' }).end('{"error":"early"}');
  });
  const gateway = await startGateway(t, backend, {}, { stallTimeoutMs: 1000 });
  const req = beginSend(gateway, { ...BEARER, 'content-length': 10_000_000 });
  req.on('error', () => {});
  req.write(JSON.stringify(MESSAGE).slice(0, -1) + `,"x":"${'A'.repeat(200_000)}`);
  const [res] = await once(req, 'response') as [http.IncomingMessage];
  let text = '';
  for await (const chunk of res) text += chunk;
  assert.equal(res.statusCode, 400);
  assert.equal(text, '{"error":"early"}');
  req.destroy();
});

test('a client that sends all of a refused upload before it reads still gets the answer', async (t) => {
  const { backend, gateway } = await startBoth(t, { limits: { body: '1MiB' } });
  const answer = await ask(gateway, {
    body: Buffer.alloc(5_000_000, 'x'),
    headers: { authorization: `Bearer ${OTHER}` },
  });
  assert.equal(answer.status, 401);
  assert.equal((await ask(gateway, { body: Buffer.alloc(900_000, '['), headers: BEARER })).json.code, 'bad_json');
  assert.equal(backend.seen.length, 0);
});

test('a connection is kept for the next request, after a refusal with a small body too', async (t) => {
  const { gateway } = await startBoth(t);
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
  t.after(() => agent.destroy());
  const sockets = new Set<unknown>();
  for (
    const authorization of [`Bearer ${SECRET}`, `Bearer ${OTHER}`, basic(`api:${SECRET}`), 'x', `Bearer ${SECRET}`]
  ) {
    const body = JSON.stringify(MESSAGE);
    const req = beginSend(gateway, { authorization, 'content-length': body.length }, agent);
    req.end(body);
    const [res] = await once(req, 'response') as [http.IncomingMessage];
    sockets.add(req.socket);
    res.resume();
    await once(res, 'end');
    assert.equal(res.statusCode, authorization.includes(OTHER) || authorization === 'x' ? 401 : 201);
    await new Promise((resolve) => setImmediate(resolve)); // the agent takes the socket back
  }
  assert.equal(sockets.size, 1);
});

/** A request of each method, with and without a body. */
const EACH_METHOD: Ask[] = [
  { path: '/v1/receive/+15550100001' },
  { body: MESSAGE },
  { method: 'POST', path: '/v1/groups/+15550100001/quit' },
  { method: 'PUT', path: '/v1/typing-indicator/+15550100001', body: { recipient: TO } },
  { method: 'DELETE', path: '/v1/typing-indicator/+15550100001', body: { recipient: TO } },
  { method: 'DELETE', path: '/v1/attachments/abc' },
];

for (const way of ['FIN', 'RST'] as const) {
  // On Deno 2.9 it fails where connections are used again: of 300 requests 599 arrive.
  test(
    `nothing is sent twice, where a connection that was used before ends by ${way} at any byte of the head`,
    async (t) => {
      let cut = 0;
      const backend = await startRawBackend(t, (socket, _, before) => {
        if (before === 0) return void socket.write(SENT);
        socket.write(SENT.slice(0, cut), () => way === 'FIN' ? socket.end() : socket.resetAndDestroy());
      });
      const gateway = await startGateway(t, backend, { allow: ['messaging', 'POST /v1/groups/:number/quit'] });
      for (const request of EACH_METHOD) {
        // Every third byte for each method, another third for the next.
        for (cut = EACH_METHOD.indexOf(request) % 3; cut < SENT.indexOf('\r\n\r\n') + 4; cut += 3) {
          for (let i = 0; i < 2; i++) await ask(gateway, { ...request, headers: BEARER });
        }
      }
      const ids = backend.requests.map((text) => /x-request-id: (\S+)/i.exec(text)![1]);
      assert.equal(new Set(ids).size, ids.length, 'a request came twice');
      assert.equal(requests(gateway).length, ids.length, 'a request never came');
    },
  );
}

test(
  'an answer that stalls after its head ends with the time of the backend, and is seen to be broken',
  async (t) => {
    const backend = await startRawBackend(
      t,
      (socket) => void socket.write('HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf'),
    );
    const gateway = await startGateway(t, backend, { backend: { url: backend.url, timeout: '300ms' } });
    const answer = await raw(gateway, ABOUT);
    assert.match(answer, /half$/);
    assert.equal(requests(gateway)[0].code, 'backend_timeout');
    await closed(backend.sockets[0]!);
  },
);

test('a client that takes nothing of its answer is dropped, and its request to the backend with it', async (t) => {
  const part = `${(65_536).toString(16)}\r\n${'x'.repeat(65_536)}\r\n`;
  const backend = await startRawBackend(t, (socket) => {
    socket.write('HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n');
    const fill = (): void => {
      while (!socket.destroyed && socket.write(part));
    };
    socket.on('drain', fill);
    fill();
  });
  const gateway = await startGateway(t, backend, {}, { stallTimeoutMs: 1000 });
  const { socket } = open(t, gateway);
  t.after(() => socket.destroy());
  socket.write(ABOUT);
  socket.pause();
  await until(() => requests(gateway).length === 1);
  assert.equal(requests(gateway)[0].code, 'client_left');
  // At once, and not when somebody collects garbage: on Deno 2.9 that took half a minute.
  const late = new Promise((resolve) => setTimeout(resolve, 5000, 'late').unref());
  assert.notEqual(await Promise.race([closed(backend.sockets[0]!), late]), 'late');
});

test('connections to the backend are used again, by whoever sends next', async (t) => {
  const { backend, gateway } = await startBoth(t);
  for (
    const request of [{ body: MESSAGE }, { body: `${JSON.stringify(MESSAGE).padEnd(100_000)}` }, { path: '/v1/health' }]
  ) {
    for (let i = 0; i < 3; i++) assert.match(`${(await ask(gateway, { ...request, headers: BEARER })).status}`, /^2/);
  }
  assert.equal(backend.connections, 'Deno' in globalThis ? 9 : 1); // Deno would send again on one that breaks
});

test('a backend on IPv6 is reached by its literal address', async (t) => {
  const backend = await startBackend(t);
  const six = http.createServer((req, res) => void backend.server.emit('request', req, res));
  six.listen(0, '::1');
  await once(six, 'listening');
  t.after(() => void six.close().closeAllConnections());
  const gateway = await startGateway(t, { url: `http://[::1]:${(six.address() as AddressInfo).port}` });
  assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
  assert.match(backend.seen[0]!.headers.host!, /^\[::1\]:\d+$/);
});

test(
  'a connection to the backend that does not come about, TLS included, is 502: nothing was sent',
  async (t) => {
    const silent = await startRawBackend(t, () => {});
    const url = silent.url.replace('http', 'https');
    const gateway = await startGateway(t, { url }, { backend: { url, timeout: '300ms' } });
    const answer = await ask(gateway, { body: MESSAGE, headers: BEARER });
    assert.deepEqual([answer.status, answer.json.code], [502, 'backend_unreachable']);
    assert.equal(requests(gateway)[0].reason, 'timeout');
    await closed(silent.sockets[0]!);
  },
);

/** Answers that no honest backend gives. Clients were given their garbage, a 500, or nothing at all. */
const LIES: [name: string, answer: string][] = [
  [
    'a length beside chunked',
    'HTTP/1.1 201 Created\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n',
  ],
  [
    'chunked beside a length',
    'HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n',
  ],
  ['two lengths', 'HTTP/1.1 201 Created\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\nhello'],
  ['a length that is no number', 'HTTP/1.1 201 Created\r\nContent-Length: 5x\r\n\r\nhello'],
  ['204 with a length', 'HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello'],
  ['205 with a length', 'HTTP/1.1 205 Reset Content\r\nContent-Length: 5\r\n\r\nhello'],
  ['a header name with a space', 'HTTP/1.1 201 Created\r\nBad Name: x\r\nContent-Length: 2\r\n\r\n{}'],
  ['a header name that is none', 'HTTP/1.1 201 Created\r\nB(ad): x\r\nContent-Length: 2\r\n\r\n{}'],
  ['a header value with a control character', 'HTTP/1.1 201 Created\r\nX: a\x01b\r\nContent-Length: 2\r\n\r\n{}'],
  ['a reason with a control character', 'HTTP/1.1 201 Cre\x01ated\r\nContent-Length: 2\r\n\r\n{}'],
  ['a status of four digits', 'HTTP/1.1 2011 Created\r\nContent-Length: 2\r\n\r\n{}'],
  ['a status below 100', 'HTTP/1.1 099 Low\r\nContent-Length: 2\r\n\r\n{}'],
  ['gzip that is none', 'HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 7\r\n\r\nrubbish'],
  [
    'a protocol that nobody asked for',
    'HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n',
  ],
  ['a redirect', 'HTTP/1.1 307 Temporary Redirect\r\nLocation: /v2/send\r\nContent-Length: 0\r\n\r\n'],
];

for (const [name, text] of LIES) {
  test(`a backend that answers with ${name} is 502, and the next answer is not mixed up with it`, async (t) => {
    let isFirst = true;
    const backend = await startRawBackend(t, (socket) => {
      socket.write(Buffer.from(isFirst ? text : SENT, 'latin1'));
      isFirst = false;
    });
    const gateway = await startGateway(t, backend);
    const answer = await ask(gateway, { body: MESSAGE, headers: BEARER });
    assert.equal(answer.status, 502, answer.text);
    assert.equal(answer.json.code, 'bad_backend_answer');
    assert.equal(backend.requests.length, 1);
    const next = await ask(gateway, { body: MESSAGE, headers: BEARER });
    assert.deepEqual([next.status, next.text], [201, '{}']);
    assert.equal(backend.sockets.length, 2);
    assert.deepEqual(gateway.log.filter((line) => line.includes('"stack"')), []);
  });
}

test("what the backend sends on an idle connection is nobody's response", async (t) => {
  const backend = await startRawBackend(t, (socket, _, before) => {
    socket.write(SENT);
    if (before === 0) setTimeout(() => socket.write(SENT.replace('{}', '[]')), 20);
  });
  const gateway = await startGateway(t, backend);
  for (let i = 0; i < 5; i++) {
    assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).text, '{}');
    await closed(backend.sockets.at(-1)!); // it is not used again
  }
  assert.equal(backend.sockets.length, 5);
});

test('a response without a length that ends by a reset is broken, and by a close complete', async (t) => {
  for (const end of ['resetAndDestroy', 'end'] as const) {
    const backend = await startRawBackend(t, (socket) => {
      socket.write('HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhalf');
    });
    const gateway = await startGateway(t, backend);
    const { socket, text } = open(t, gateway, ABOUT);
    await until(() => text().includes('half'));
    backend.sockets[0]![end]();
    await until(() => requests(gateway).length === 1);
    if (end === 'resetAndDestroy') await closed(socket);
    else await until(() => text().endsWith('\r\n0\r\n\r\n'));
    assert.equal(text().endsWith('\r\n0\r\n\r\n'), end === 'end');
    assert.equal(requests(gateway)[0].code, end === 'end' ? undefined : 'bad_backend_answer');
  }
});

test('attack: smuggling a second request into the first', async (t) => {
  const { backend, gateway } = await startBoth(t);
  const inner = `POST /v1/register/${FROM} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n`;
  const head = `POST /v2/send HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n`;
  const body = JSON.stringify(MESSAGE);
  for (
    const bytes of [
      `${head}Content-Length: ${body.length}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n${inner}`,
      `${head}Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n${inner}`,
      `${head}Content-Length: 0\r\nContent-Length: ${inner.length}\r\n\r\n${inner}`,
      `${head}Content-Length: +5\r\n\r\n12345${inner}`,
      `${head}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n${inner}`,
      `${head}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n${inner}`,
      `${head}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n${inner}`,
      `${head}X: a\r\n b\r\nContent-Length: 0\r\n\r\n${inner}`,
      `${head}X: a\nContent-Length: 0\r\n\r\n${inner}`,
      `${head}Content-Length: ${body.length}\r\nConnection: close\r\n\r\n${body}${inner}`,
      `${head}Content-Length: ${body.length}\r\n\r\n${body}${inner.replace('Host: x', 'Host: x\r\nConnection: close')}`,
      `${head}Transfer-Encoding: chunked\r\n\r\n${body.length.toString(16)};x="\r\n${body}\r\n0\r\n\r\n${
        inner.replace('Host: x', 'Host: x\r\nConnection: close')
      }`,
    ]
  ) {
    const response = await raw(gateway, bytes);
    assert.doesNotMatch(response, / 201 [^]* 201 /);
  }
  for (const seen of backend.seen) assert.equal(seen.url, '/v2/send');
});

test("attack: naming the gateway's own headers in Connection, so that they are dropped", async (t) => {
  const backend = await startBackend(t, (_, res) => res.end('{}'));
  const gateway = await startGateway(t, { url: `http://user:pass@127.0.0.1:${backend.port}` });
  await rawRequest(gateway, '/v1/about', {
    headers: [
      `Authorization: Bearer ${SECRET}`,
      'Connection: authorization, x-forwarded-for, x-request-id, host, accept-encoding',
    ],
  });
  const { headers } = backend.seen[0]!;
  assert.equal(headers.authorization, basic('user:pass'));
  assert.equal(headers['x-forwarded-for'], '127.0.0.1');
  assert.match(String(headers['x-request-id']), /^[0-9a-f-]{36}$/);
  assert.equal(headers['accept-encoding'], 'identity');
});

test('a backend behind TLS is believed if its certificate is, and else nothing is sent to it', async (t) => {
  const seen: string[] = [];
  const server = https.createServer(CERTS[0], (req, res) => {
    if (req.method === 'POST') seen.push(req.url!);
    req.resume().on('end', () => res.writeHead(201, { 'Content-Length': 2 }).end('{}'));
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.after(() => void server.close().closeAllConnections());
  const url = `https://127.0.0.1:${(server.address() as AddressInfo).port}/prefix`;
  const gateway = await startGateway(t, { url });
  const answer = await ask(gateway, { body: MESSAGE, headers: BEARER });
  assert.equal(answer.status, 502, answer.text);
  assert.equal(answer.json.code, 'backend_unreachable');
  assert.deepEqual(seen, []);
  // The certificate of an authority of one's own is believed by what the runtime has for that.
  if (!isNode) return;
  const file = join(folder(t), 'ca.pem');
  writeFileSync(file, CERTS[0].cert);
  const trusting = await startProcess(t, { backend: { url }, env: { NODE_EXTRA_CA_CERTS: file } });
  for (let i = 0; i < 2; i++) assert.equal((await ask(trusting, { body: MESSAGE, headers: BEARER })).status, 201);
  assert.deepEqual(seen, ['/prefix/v2/send', '/prefix/v2/send']);
});

// The backend's time ran on while the client was the slow one.
test("the backend's time stands still while the client is waited for", async (t) => {
  const backend = await startBackend(t);
  const gateway = await startGateway(t, backend, { backend: { url: backend.url, timeout: '1s' } });
  const body = JSON.stringify({ ...MESSAGE, message: 'x'.repeat(300_000) });
  const req = beginSend(gateway, { ...BEARER, 'content-length': body.length });
  req.write(body.slice(0, 200_000));
  await until(() => backend.seen.length === 1);
  await new Promise((resolve) => setTimeout(resolve, 1200)); // longer than the backend may take
  req.end(body.slice(200_000));
  const [res] = await once(req, 'response') as [http.IncomingMessage];
  assert.equal(res.resume().statusCode, 201);
});

// The backend's time began anew after its headers had come, and ended the answer.
test('an early answer that goes on for longer than the backend may take for its headers is delivered', async (t) => {
  let finish = (): void => {};
  const backend = await startBackend(t, (req, res) => {
    req.resume();
    res.writeHead(200);
    res.write('begin,');
    finish = () => res.end('end');
  });
  const gateway = await startGateway(t, backend, { backend: { url: backend.url, timeout: '1s' } }, {
    stallTimeoutMs: 2000,
  });
  const req = beginSend(gateway, { ...BEARER, 'content-length': 10_000_000 });
  req.on('error', () => {});
  req.write(JSON.stringify(MESSAGE).slice(0, -1) + `,"x":"${'A'.repeat(200_000)}`);
  const [res] = await once(req, 'response') as [http.IncomingMessage];
  let text = '';
  res.on('data', (chunk) => {
    text += chunk;
  });
  req.write('A'.repeat(200_000));
  await new Promise((resolve) => setTimeout(resolve, 1200)); // longer than the backend may take
  finish();
  await once(res, 'end');
  assert.equal(text, 'begin,end');
  req.destroy();
});

// Its end was polite, and so it looked whole; and it was ended for taking longer than its headers may.
test('WebSocket: a declining answer that breaks off is seen to, and one that is slow is not cut', async (t) => {
  let whole = false;
  let finish = (): void => {};
  let trickle = (): void => {};
  const backend = await startUpgradeBackend(t, (socket) => {
    socket.write('HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n');
    finish = () => whole ? socket.end('0\r\n\r\n') : socket.destroy();
    trickle = () => socket.write('1\r\n.\r\n');
  });
  const gateway = await startGateway(t, backend, { ...RECEIVING, backend: { url: backend.url, timeout: '1s' } });
  for (whole of [false, true]) {
    const { socket, text } = openWebSocket(t, gateway);
    await until(() => text().endsWith('hello\r\n'));
    for (let i = 0; whole && i < 13; i++) { // in all longer than the backend may make no progress
      trickle();
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    finish();
    await closed(socket);
    assert.equal(text().endsWith('\r\n0\r\n\r\n'), whole);
  }
});

section('SLOTS'); // ───────────────────────────────────────────────────────────────────────────────

interface HeldBackend extends Backend {
  /** Responds to the request that has come completely, and has no response, for the longest time. */
  answer(): void;
  /** How many requests it is at work on, whether their clients are still there or not; and how many at most. */
  acting: number;
  most: number;
}

/** A backend that responds when it is told to. Like the real one, it goes on when the gateway has hung up. */
async function startHeldBackend(t: TestContext): Promise<HeldBackend> {
  const waiting: http.ServerResponse[] = [];
  const backend = await startBackend(t, (req, res, seen) => {
    const chunks: Buffer[] = [];
    req.on('data', (chunk: Buffer) => chunks.push(chunk)).on('end', () => {
      seen.body = Buffer.concat(chunks);
      seen.complete = true;
      waiting.push(res);
      held.most = Math.max(held.most, ++held.acting);
    });
  });
  const answer = (): void => {
    held.acting--;
    waiting.shift()!.writeHead(201, { 'Content-Type': 'application/json' }).end('[]');
  };
  const held = Object.assign(backend, { answer, acting: 0, most: 0 });
  return held;
}

/** So many slots at a backend that is not waited for while it is down. */
function slots({ url }: { url: string }, parallel: number, timeout = '1h'): GatewayConfig {
  return { backend: { url, wait: '0', parallel, timeout } };
}

function send(gateway: Gateway, message: string, secret = SECRET): Promise<Answer> {
  return ask(gateway, { body: { ...MESSAGE, message }, headers: { authorization: `Bearer ${secret}` } });
}

function messageOf({ body }: Seen): string {
  return JSON.parse(body.toString()).message;
}

/** The messages that the backend has got completely. */
function arrived(backend: Backend): string[] {
  return backend.seen.filter(({ complete }) => complete).map(messageOf);
}

/** Everything that came to the gateway before this has been read. */
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

/** A large send, of which the backend has the head, and the client still the last byte. */
async function beginLarge(gateway: Gateway, backend: Backend): Promise<http.ClientRequest> {
  const before = backend.seen.length;
  const req = beginSend(gateway, { ...BEARER, 'content-length': LARGE.length });
  req.on('error', () => {});
  req.write(LARGE.slice(0, -1));
  await until(() => backend.seen.length > before);
  return req;
}

async function statusFor(req: http.ClientRequest): Promise<number> {
  const [res] = await once(req, 'response') as [http.IncomingMessage];
  return res.resume().statusCode!;
}

/** A send whose client leaves once the backend acts on it. */
async function sendAndLeave(t: TestContext, gateway: Gateway, backend: HeldBackend): Promise<void> {
  const before = backend.seen.length;
  const { socket } = open(t, gateway, SEND);
  await until(() => backend.seen.length > before && backend.seen.at(-1)!.complete);
  socket.destroy();
}

test('the backend acts on as many requests at a time as it has slots, and 0 is no limit', async (t) => {
  for (const parallel of [1, 2, 0]) {
    const backend = await startHeldBackend(t);
    const gateway = await startGateway(t, backend, slots(backend, parallel));
    const answers = Array.from({ length: 6 }, (_, i) => send(gateway, `number ${i}`));
    await until(() => backend.acting === (parallel || 6));
    for (let i = 0; i < 6; i++) {
      await until(() => backend.acting > 0);
      backend.answer();
    }
    for (const answer of answers) assert.equal((await answer).status, 201);
    assert.equal(backend.most, parallel || 6);
  }
});

test('who asks first gets the first slot, and a reload that gives more or fewer is obeyed', async (t) => {
  const backend = await startHeldBackend(t);
  const gateway = await startGateway(t, backend, slots(backend, 1));
  const names = ['a', 'b', 'c', 'd', 'e'];
  const answers = await queueUp(gateway, names);
  for (let i = 0; i < 3; i++) {
    await until(() => backend.acting === 1);
    backend.answer();
  }
  await until(() => backend.acting === 1);
  assert.deepEqual(arrived(backend), names.slice(0, 4));
  gateway.reload(slots(backend, 2));
  await until(() => backend.acting === 2);
  backend.answer();
  backend.answer();
  for (const answer of answers) assert.equal((await answer).status, 201);
  // Fewer: what runs is not disturbed, and the next waits for both.
  const both = [send(gateway, 'f'), send(gateway, 'g')];
  await until(() => backend.acting === 2);
  gateway.reload(slots(backend, 1));
  const [last] = await queueUp(gateway, ['h']);
  backend.answer();
  await Promise.race(both);
  await settled(gateway);
  assert.equal(backend.acting, 1);
  backend.answer();
  await Promise.all(both);
  await until(() => backend.acting === 1);
  assert.equal(messageOf(backend.seen.at(-1)!), 'h');
  backend.answer();
  assert.equal((await last!).status, 201);
  assert.equal(backend.connections > 0 && backend.connections <= 9, true, 'a reload keeps the connections');
});

test('a slot is released exactly once, however a request ends', async (t) => {
  const replies: Record<string, string | undefined> = {
    '/v2/send': '201 Created\r\nContent-Length: 2\r\n\r\n[]',
    '/v1/search': '500 Internal Server Error\r\nContent-Length: 0\r\n\r\n',
    '/v1/typing-indicator': '204 No Content\r\n\r\n',
    '/v1/reactions': '200 OK', // breaks off
    '/v1/receipts': '2000 OK\r\n\r\n',
    '/v1/remote-delete': '301 Moved Permanently\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n',
    '/v1/polls': '200 OK\r\nContent-Length: 9\r\n\r\nhalf',
  };
  let [acting, most] = [0, 0];
  const backend = await startBackend(t, (req) => {
    const reply = replies[req.url!.replace(`/${FROM}`, '')];
    req.resume().on('end', () => {
      if (!reply) return;
      most = Math.max(most, ++acting);
      // In the next turn of the loop, so that those who come too early are seen.
      setImmediate(() => acting-- && req.socket.end(`HTTP/1.1 ${reply.replace('\r', '\r\nConnection: close\r')}`));
    });
  });
  const tokens = { test: { secret: SECRET, allow: ['messaging', 'info'] } };
  const gateway = await startGateway(t, backend, { ...slots(backend, 1), tokens }, { slotTimeoutMs: 50 });
  const never = { path: `/v1/groups/${FROM}`, headers: BEARER };
  const large = `${LARGE.slice(0, -1)},"number":"-x"}`;
  const upgrade = ['Connection: Upgrade', 'Upgrade: websocket', `Authorization: Bearer ${SECRET}`];
  const ends: Record<string, () => Promise<unknown>> = {
    'a large body': () => ask(gateway, { body: LARGE, headers: BEARER }),
    'no body': () => ask(gateway, { path: '/v1/search', headers: BEARER }),
    'a wish to be upgraded': () => rawRequest(gateway, '/v1/search', { headers: upgrade }),
    'a late violation': () => ask(gateway, { body: large, headers: BEARER }),
    'a timeout': async () => {
      gateway.reload({ ...slots(backend, 1, '100ms'), tokens });
      const answer = ask(gateway, never);
      await until(() => backend.seen.at(-1)!.url.startsWith('/v1/groups'));
      gateway.reload({ ...slots(backend, 1), tokens });
      assert.equal((await answer).json.code, 'backend_timeout');
    },
    'a client that leaves': async () => {
      const before = backend.seen.length;
      const req = http.get({ host: '127.0.0.1', port: gateway.port, agent: false, ...never }).on('error', () => {});
      await until(() => backend.seen.length > before);
      req.destroy();
      await until(() => requests(gateway).at(-1)!.code === 'client_left');
    },
  };
  for (const name of ['typing-indicator', 'reactions', 'receipts', 'remote-delete', 'polls']) {
    const method = name === 'typing-indicator' ? 'PUT' : name === 'remote-delete' ? 'DELETE' : 'POST';
    for (const body of [JSON.stringify(MESSAGE), LARGE]) {
      // A response that breaks off breaks the client's connection.
      ends[`${name} ${body.length}`] = () =>
        ask(gateway, { method, path: `/v1/${name}/${FROM}`, body, headers: BEARER }).catch(() => {});
    }
  }
  for (const [name, run] of Object.entries(ends)) {
    await run();
    assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201, name);
  }
  [acting, most] = [0, 0];
  const fresh = await startGateway(t, backend, { ...slots(backend, 1), tokens });
  const sends = Array.from({ length: 10 }, () => ask(fresh, { body: MESSAGE, headers: BEARER }));
  for (const answer of sends) assert.equal((await answer).status, 201);
  assert.equal(most, 1);
});

test('uploads before their last byte, responses after their head, info, polls and WebSockets hold no slot', async (t) => {
  const backend = await startBackend(t, (req, res) => {
    if (req.url!.startsWith('/v1/receive')) return;
    if (req.method === 'GET') return void res.writeHead(200).write('half');
    req.resume().on('end', () => res.writeHead(201).end('[]'));
  });
  backend.server.on('upgrade', () => backend.connections++); // and says nothing
  const gateway = await startGateway(t, backend, { allow: ['messaging', 'info'], ...slots(backend, 1) });
  const upload = await beginLarge(gateway, backend);
  const head = (path: string): string => `GET ${path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n\r\n`;
  for (const path of ['/v1/search', '/v1/about', RECEIVE]) open(t, gateway, head(path));
  await until(() => backend.seen.length === 4);
  const before = backend.connections;
  openWebSocket(t, gateway);
  await until(() => backend.connections > before);
  assert.equal((await send(gateway, 'small')).status, 201);
  upload.end(LARGE.slice(-1));
  assert.equal(await statusFor(upload), 201);
});

test('a health check and a poll do not wait for a slot', async (t) => {
  const backend = await startBackend(t, (req, res) => req.method === 'GET' ? res.writeHead(200).end('{}') : undefined);
  const gateway = await startGateway(t, backend, { ...RECEIVING, ...slots(backend, 1) });
  void send(gateway, 'hangs').catch(() => {});
  await until(() => backend.seen.length === 1);
  for (const path of ['/v1/about', '/v1/health', RECEIVE]) {
    assert.equal((await ask(gateway, { path, headers: BEARER })).status, 200, path);
  }
});

test('the last byte of a large body waits for its slot, and its client is not timed out meanwhile', async (t) => {
  const backend = await startHeldBackend(t);
  const gateway = await startGateway(t, backend, slots(backend, 1), { stallTimeoutMs: 300 });
  const upload = await beginLarge(gateway, backend);
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  upload.end(LARGE.slice(-1));
  await settled(gateway);
  // Another client that makes no progress from now on is timed out.
  assert.match(await raw(gateway, `${post(SECRET, 100)}{`), / 408 /);
  assert.equal(backend.seen[0]!.complete, false);
  backend.answer();
  assert.equal((await first).status, 201);
  await until(() => backend.acting === 1);
  assert.equal(backend.seen[0]!.body.toString(), LARGE);
  backend.answer();
  assert.equal(await statusFor(upload), 201);
});

test('a large body whose response comes while it waits for a slot needs none', async (t) => {
  let early: http.ServerResponse | undefined;
  const finish: (() => void)[] = [];
  const backend = await startBackend(t, (req, res, seen) => {
    if (backend.seen.length === 1) early = res;
    else finish.push(() => res.end('[]'));
    req.resume().on('end', () => (seen.complete = true));
  });
  const gateway = await startGateway(t, backend, slots(backend, 1));
  const upload = await beginLarge(gateway, backend);
  const first = send(gateway, 'first');
  await until(() => finish.length === 1);
  upload.end(LARGE.slice(-1));
  await settled(gateway);
  early!.writeHead(400, { 'Content-Length': 2 }).end('{}');
  assert.equal(await statusFor(upload), 400);
  const second = send(gateway, 'second');
  await settled(gateway);
  assert.equal(finish.length, 1);
  finish[0]!();
  await until(() => finish.length === 2);
  finish[1]!();
  assert.deepEqual([(await first).status, (await second).status], [200, 200]);
});

test('who gets no slot within backend.timeout is 503 busy: nothing was sent', async (t) => {
  const backend = await startHeldBackend(t);
  const gateway = await startGateway(t, backend, { ...slots(backend, 1), allow: ['messaging'] });
  const large = await beginLarge(gateway, backend); // under the old time
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  gateway.reload({ ...slots(backend, 1, '200ms'), allow: ['messaging'] });
  for (const request of [{ body: MESSAGE }, { body: LARGE }, { path: `/v1/groups/${FROM}` }]) {
    const answer = await ask(gateway, { ...request, headers: BEARER });
    assert.deepEqual([answer.status, answer.json.code, answer.headers['retry-after']], [503, 'busy', '10']);
    assert.match(answer.json.error, /nothing was sent/);
  }
  backend.answer();
  assert.equal((await first).status, 201);
  large.end(LARGE.slice(-1));
  await until(() => backend.acting === 1);
  assert.deepEqual(arrived(backend).sort(), ['first', 'large']);
  backend.answer();
  assert.equal(await statusFor(large), 201);
});

// It counted from the request's arrival: requests were handed over in the last milliseconds, and then told 504.
test('backend.timeout begins anew with the last byte: nobody is handed over with no time left', async (t) => {
  const backend = await startHeldBackend(t);
  let handedOverMs = 0;
  backend.server.on('request', () => (handedOverMs = performance.now()));
  const gateway = await startGateway(t, backend, slots(backend, 1));
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  gateway.reload(slots(backend, 1, '2s'));
  const second = send(gateway, 'second');
  await new Promise((resolve) => setTimeout(resolve, 700));
  backend.answer();
  assert.equal((await first).status, 201);
  assert.equal((await second).json.code, 'backend_timeout');
  const leftMs = performance.now() - handedOverMs;
  assert.ok(leftMs > 1900, `it was given ${leftMs} ms`);
});

test('a client that leaves while it waits for its slot was not sent', async (t) => {
  const backend = await startHeldBackend(t);
  const gateway = await startGateway(t, backend, slots(backend, 1));
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  const large = await beginLarge(gateway, backend);
  large.end(LARGE.slice(-1));
  const small = open(t, gateway, SEND);
  await settled(gateway);
  large.destroy();
  small.socket.destroy();
  await until(() => requests(gateway).filter(({ code }) => code === 'client_left').length === 2);
  const last = send(gateway, 'last');
  backend.answer();
  await until(() => arrived(backend).length === 2);
  backend.answer();
  assert.deepEqual([(await first).status, (await last).status], [201, 201]);
  assert.deepEqual(arrived(backend), ['first', 'last']);
});

// 40 clients that left after 40 ms had 40 requests at work behind a limit of 1.
test('a client that leaves after its last byte releases no slot, and the log says how the backend answered', async (t) => {
  for (const parallel of [1, 2]) {
    const backend = await startHeldBackend(t);
    const gateway = await startGateway(t, backend, slots(backend, parallel));
    const clients = Array.from({ length: 40 }, () => open(t, gateway, SEND));
    await until(() => backend.acting === parallel);
    await settled(gateway);
    for (const { socket } of clients) socket.destroy();
    await until(() => requests(gateway).filter(({ code }) => code === 'client_left').length === 40 - parallel);
    const last = send(gateway, 'last');
    await settled(gateway);
    assert.equal(backend.acting, parallel);
    for (let i = 0; i < parallel; i++) backend.answer();
    await until(() => arrived(backend).includes('last'));
    backend.answer();
    assert.equal((await last).status, 201);
    assert.deepEqual([backend.most, backend.seen.length], [parallel, parallel + 1]);
    const reasons = requests(gateway).filter(({ status }) => status === 499).map(({ reason }) => reason);
    assert.deepEqual(reasons, [...Array(40 - parallel).fill(undefined), ...Array(parallel).fill('answered_201')]);
  }
});

test('a request without a client is aborted when its slot is overdue, and at once where there are no slots', async (t) => {
  for (const [parallel, slotTimeoutMs] of [[1, 100], [0, 1e6]] as const) {
    const backend = await startHeldBackend(t);
    const gateway = await startGateway(t, backend, slots(backend, parallel), { slotTimeoutMs });
    const hungUp = once(backend.server, 'request').then(([req]) => closed(req.socket));
    await sendAndLeave(t, gateway, backend);
    await hungUp;
    await until(() => requests(gateway).some(({ status }) => status === 499));
    assert.equal(requests(gateway)[0].reason, undefined);
    void send(gateway, 'next').catch(() => {});
    await until(() => arrived(backend).includes('next'));
  }
});

test('a request without a client does not delay the end of the gateway, which logs it', async (t) => {
  const backend = await startHeldBackend(t);
  const gateway = await startGateway(t, backend, { ...slots(backend, 1), shutdown: '1h' });
  await sendAndLeave(t, gateway, backend);
  await gateway.close();
  assert.deepEqual(logLines(gateway.log).slice(-2).map(({ message, status }) => [message, status]), [
    ['request', 499],
    ['stopped', undefined],
  ]);
});

// The daemon was killed with 4 sends in flight: for 144 s nobody else was served.
test('a slot that is overdue is lent to the next, and its request still gets a late response', async (t) => {
  for (const parallel of [1, 4]) {
    const backend = await startHeldBackend(t);
    const gateway = await startGateway(t, backend, slots(backend, parallel), {
      slotTimeoutMs: 100,
      stallTimeoutMs: 400,
    });
    const hanging = await queueUp(gateway, Array.from({ length: parallel }, (_, i) => `hangs ${i}`));
    await until(() => backend.acting === parallel);
    const next = send(gateway, 'next');
    await until(() => arrived(backend).at(-1) === 'next');
    // A backend that hangs for good has at most twice as many requests as there are slots.
    const more = Array.from({ length: 3 * parallel }, (_, i) => send(gateway, `more ${i}`));
    await until(() => backend.acting === 2 * parallel);
    assert.match(await raw(gateway, `${post(SECRET, 100)}{`), / 408 /); // later than another slot would be overdue
    assert.equal(backend.most, 2 * parallel);
    for (let i = 0; i < 4 * parallel + 1; i++) {
      await until(() => backend.acting > 0);
      backend.answer();
    }
    for (const answer of [...hanging, next, ...more]) assert.equal((await answer).status, 201);
    assert.equal(backend.most, 2 * parallel);
  }
});

const [TWO_TOKENS, THREE_TOKENS] = [['a', 'b'], ['a', 'b', 'c']];
const LAST = 'a-third-secret-of-one';

/** Tokens by name, each with a secret of its own. */
function several(names: string[]): Pick<GatewayConfig, 'tokens'> {
  const secrets = [SECRET, OTHER, LAST];
  return { tokens: Object.fromEntries(names.map((name, i) => [name, { secret: secrets[i]! }])) };
}

// "The token that holds the fewest goes first" would let two busy tokens keep a third out.
test('a free slot goes to the token that got one longest ago, and a reload forgets nothing of that', async (t) => {
  const backend = await startHeldBackend(t);
  const gateway = await startGateway(t, backend, { ...slots(backend, 1), ...several(THREE_TOKENS) });
  const numbered = (name: string, count: number): string[] => Array.from({ length: count }, (_, i) => `${name}${i}`);
  const answers = await queueUp(gateway, numbered('a', 4));
  answers.push(...await queueUp(gateway, numbered('b', 4), OTHER));
  gateway.reload({ ...slots(backend, 1), ...several(THREE_TOKENS) });
  answers.push(...await queueUp(gateway, numbered('c', 1), LAST));
  for (let i = 0; i < answers.length; i++) {
    await until(() => backend.acting === 1);
    // One that comes late, of a token that was served long ago, goes before those that were served since.
    if (i === 6) answers.push(...await queueUp(gateway, ['c1'], LAST));
    backend.answer();
  }
  for (const answer of answers) assert.equal((await answer).status, 201);
  assert.deepEqual(arrived(backend), ['a0', 'b0', 'c0', 'a1', 'b1', 'a2', 'b2', 'c1', 'a3', 'b3']);
});

test('where there are several tokens and several slots, no token holds all of them', async (t) => {
  for (const [names, parallel, most] of [[TWO_TOKENS, 4, 3], [TWO_TOKENS, 1, 1], [['a'], 4, 4]] as const) {
    const backend = await startHeldBackend(t);
    const gateway = await startGateway(t, backend, { ...slots(backend, parallel), ...several([...names]) });
    const flood = Array.from({ length: 120 }, (_, i) => send(gateway, `flood ${i}`));
    await until(() => backend.acting === most);
    for (let i = 0; i < 3; i++) await settled(gateway);
    assert.equal(backend.acting, most);
    if (most < parallel) { // and so another token's send is served at once
      const other = send(gateway, 'other', OTHER);
      await until(() => arrived(backend).includes('other'));
      assert.equal(backend.acting, parallel);
      for (let i = 0; i < parallel; i++) backend.answer();
      assert.equal((await other).status, 201);
    }
    const pump = setInterval(() => backend.acting > 0 && backend.answer(), 1);
    for (const answer of flood) assert.equal((await answer).status, 201);
    clearInterval(pump);
    assert.equal(backend.most, most < parallel ? parallel : most);
  }
});

test('closing refuses at once who waits for a slot, and lets who has one finish', async (t) => {
  const backend = await startHeldBackend(t);
  const gateway = await startGateway(t, backend, { ...slots(backend, 1), shutdown: '1h' });
  const late = await beginLarge(gateway, backend);
  const large = await beginLarge(gateway, backend);
  const first = send(gateway, 'first');
  await until(() => backend.acting === 1);
  large.end(LARGE.slice(-1));
  const uploads = [large, late].map(statusFor);
  const small = send(gateway, 'small');
  await settled(gateway);
  const closing = gateway.close();
  const answer = await small;
  assert.deepEqual([answer.status, answer.json.code], [503, 'shutting_down']);
  late.end(LARGE.slice(-1)); // asks for its slot only now
  assert.deepEqual(await Promise.all(uploads), [503, 503]);
  backend.answer();
  assert.equal((await first).status, 201);
  await closing;
  assert.deepEqual(arrived(backend), ['first']);
});

/** A port on which nobody listens. */
async function sparePort(): Promise<number> {
  const spare = http.createServer().listen(0, '127.0.0.1');
  await once(spare, 'listening');
  const { port } = spare.address() as AddressInfo;
  await new Promise((resolve) => spare.close(resolve));
  return port;
}

/** A backend as signal-cli-rest-api is, that can be started on a port, and be stopped. */
async function listenAgain(t: TestContext, backend: Backend, port: number): Promise<http.Server> {
  const server = http.createServer((req, res) => {
    res.shouldKeepAlive = false; // what is sent on a connection that just ends is lost, and may not be sent again
    backend.server.emit('request', req, res);
  });
  server.listen(port, '127.0.0.1');
  await once(server, 'listening');
  t.after(() => void server.close().closeAllConnections());
  return server;
}

function waiting(port: number, wait: string, more = {}): GatewayConfig {
  return { backend: { url: `http://127.0.0.1:${port}`, wait, parallel: 1, ...more } };
}

function linesOf(gateway: Gateway, pattern: RegExp): LogLine[] {
  return logLines(gateway.log).filter(({ message }) => pattern.test(message));
}

/** The gateway knows that the backend is down. */
async function isDown(gateway: Gateway): Promise<void> {
  await until(() => linesOf(gateway, /no connection/).length > 0);
}

/** A backend behind TLS of which no connection comes about. Each try is seen, and ends when the test wants it to. */
async function startMuteBackend(t: TestContext): Promise<{ url: string; sockets: net.Socket[]; most: number }> {
  const { url, sockets } = await startRawBackend(t, () => {});
  const mute = { url: url.replace('http', 'https'), sockets, most: 0 };
  const count = (): void => {
    mute.most = Math.max(mute.most, sockets.filter(({ destroyed }) => !destroyed).length);
  };
  const timer = setInterval(count, 1);
  t.after(() => clearInterval(timer));
  return mute;
}

test('a backend that goes down in the middle of twenty sends: none is lost, none doubled', async (t) => {
  const backend = await startBackend(t);
  const port = await sparePort();
  const server = await listenAgain(t, backend, port);
  backend.server.prependListener('request', () => {
    if (backend.seen.length === 7) server.close();
  });
  const gateway = await startGateway(t, { url: '' }, waiting(port, '1h'));
  const names = Array.from({ length: 20 }, (_, i) => `number ${i}`);
  const answers = await queueUp(gateway, names);
  await isDown(gateway);
  assert.equal(backend.sent.length, 8);
  const refused = await ask(gateway, { headers: BEARER }); // what is no send does not wait
  assert.deepEqual([refused.status, refused.json.code], [502, 'backend_unreachable']);
  await listenAgain(t, backend, port);
  for (const answer of answers) assert.equal((await answer).status, 201);
  // In the order in which they were sent: message 12 came behind message 27.
  assert.deepEqual(backend.sent.map(({ message }) => message), names);
  const url = `http://127.0.0.1:${port}`;
  assert.deepEqual(
    linesOf(gateway, /no connection|connected to again/).map((line) => [line.level, line.backend, line.waiting]),
    [['warn', url, 1], ['warn', url, 12]],
  );
});

test('a large body waits for a backend that restarts, before its first byte was asked for', async (t) => {
  const backend = await startBackend(t);
  const port = await sparePort();
  const gateway = await startGateway(t, { url: '' }, waiting(port, '1h'));
  const answer = ask(gateway, { body: LARGE, headers: BEARER });
  await isDown(gateway);
  await listenAgain(t, backend, port);
  assert.equal((await answer).status, 201);
  assert.deepEqual(backend.seen.map(({ body }) => body.toString()), [LARGE]);
});

test('while the backend is down, one request at a time tries to connect', async (t) => {
  const mute = await startMuteBackend(t);
  const gateway = await startGateway(t, mute, { backend: { url: mute.url, wait: '1h', parallel: 1 } });
  for (let i = 0; i < 24; i++) void send(gateway, `number ${i}`).catch(() => {});
  for (let tries = 1; tries < 6; tries++) {
    await until(() => mute.sockets.length === tries);
    await settled(gateway);
    assert.equal(mute.sockets.length, tries);
    mute.sockets.at(-1)!.destroy();
  }
  assert.equal(mute.most, 1);
  assert.deepEqual(linesOf(gateway, /no connection/).map((line) => line.waiting), [24]);
});

// They were 502 in waves, each after `backend.wait`: 24 sends took 24 times as long.
test('all sends that wait for the backend are 502 after backend.wait, and not one after the other', async (t) => {
  const gateway = await startGateway(t, { url: '' }, waiting(await sparePort(), '1s'));
  const startMs = performance.now();
  const answers = await Promise.all(Array.from({ length: 24 }, (_, i) => send(gateway, `number ${i}`)));
  for (const answer of answers) assert.equal(answer.json.code, 'backend_unreachable');
  assert.ok(performance.now() - startMs > 900, 'they did not wait');
  assert.ok(performance.now() - startMs < 12_000, 'they waited one after the other');
});

test('a reload to another address begins without an outage, and who waits keeps the old address', async (t) => {
  const [backend, old] = [await startBackend(t), await startBackend(t)];
  const port = await sparePort();
  const gateway = await startGateway(t, { url: '' }, waiting(port, '1h'));
  const waits = await queueUp(gateway, ['old 1', 'old 2']);
  await isDown(gateway);
  gateway.reload({ backend: { url: backend.url, wait: '1h', parallel: 1 } });
  assert.equal((await send(gateway, 'new')).status, 201);
  assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
  await listenAgain(t, old, port);
  for (const answer of waits) assert.equal((await answer).status, 201);
  assert.deepEqual(old.sent.map(({ message }) => message), ['old 1', 'old 2']);
  assert.deepEqual(backend.sent.map(({ message }) => message), ['new']);
  assert.equal(linesOf(gateway, /no connection/).length, 1);
});

test('a backend is found again by any request where nobody waits for it', async (t) => {
  const backend = await startBackend(t);
  const port = await sparePort();
  const gateway = await startGateway(t, { url: '' }, { ...waiting(port, '0'), ...RECEIVING });
  for (const request of [{ path: RECEIVE }, { body: MESSAGE }]) {
    assert.equal((await ask(gateway, { ...request, headers: BEARER })).status, 502);
  }
  await listenAgain(t, backend, port);
  let status = 0;
  for (let i = 0; i < 1000 && status !== 200; i++) { // until the pause is over
    ({ status } = await ask(gateway, { path: RECEIVE, headers: BEARER }));
  }
  assert.equal(status, 200);
  assert.equal(linesOf(gateway, /connected to again/).length, 1);
});

test('a client that leaves while it tries is no outage, and hands the try on', async (t) => {
  const mute = await startMuteBackend(t);
  const config = { backend: { url: mute.url, wait: '1h', parallel: 1 } };
  const gateway = await startGateway(t, mute, config);
  const first = open(t, gateway, SEND);
  await until(() => mute.sockets.length === 1);
  first.socket.destroy();
  await until(() => requests(gateway).length === 1);
  assert.deepEqual(linesOf(gateway, /no connection/), []);
  const second = open(t, gateway, SEND);
  await until(() => mute.sockets.length === 2);
  mute.sockets[1]!.destroy(); // now it is down
  await until(() => mute.sockets.length === 3);
  void send(gateway, 'third').catch(() => {});
  await settled(gateway);
  second.socket.destroy();
  await until(() => mute.sockets.length === 4);
});

test('a wait for the backend ends with its time, with its client and with the gateway', async (t) => {
  const backend = await startBackend(t);
  const port = await sparePort();
  const gateway = await startGateway(t, { url: '' }, { ...waiting(port, '300ms'), shutdown: '1h' });
  for (const body of [JSON.stringify(MESSAGE), LARGE]) {
    const startMs = performance.now();
    const timely = await ask(gateway, { body, headers: BEARER });
    assert.deepEqual([timely.status, timely.json.code], [502, 'backend_unreachable']);
    assert.match(timely.json.error, /nothing was sent/);
    assert.ok(performance.now() - startMs > 250, 'it did not wait');
  }
  // The time of the backend holds too.
  gateway.reload(waiting(port, '1h', { timeout: '200ms' }));
  for (const body of [MESSAGE, LARGE]) {
    assert.equal((await ask(gateway, { body, headers: BEARER })).json.code, 'backend_unreachable');
  }
  gateway.reload(waiting(port, '1h'));
  const left = open(t, gateway, SEND);
  await settled(gateway);
  left.socket.destroy();
  await until(() => requests(gateway).some(({ code }) => code === 'client_left'));
  const server = await listenAgain(t, backend, port);
  assert.equal((await send(gateway, 'last')).status, 201);
  await new Promise((resolve) => server.close(resolve));
  const waits = await queueUp(gateway, ['waits for the backend', 'waits too']);
  await gateway.close();
  for (const wait of waits) assert.equal((await wait).json.code, 'shutting_down');
  assert.deepEqual(backend.sent.map(({ message }) => message), ['last']);
});

test('a backend that takes a connection and closes it is asked once: a byte may have left', async (t) => {
  // Not reset at once: that is no connection, not even for the system.
  const cases = [['connection', 'end'], ['connection', 'destroy'], ['data', 'end'], [
    'data',
    'resetAndDestroy',
  ]] as const;
  for (const [when, end] of cases) {
    for (const body of [JSON.stringify(MESSAGE), LARGE]) {
      const sockets: net.Socket[] = [];
      const server = net.createServer((socket) => {
        sockets.push(socket.on('error', () => {}).on('end', () => socket.destroy()).resume());
        if (when === 'connection') socket[end]();
        else socket.once('data', () => socket[end]());
      });
      server.listen(0, '127.0.0.1');
      await once(server, 'listening');
      const gateway = await startGateway(t, { url: '' }, waiting((server.address() as AddressInfo).port, '1m'));
      const answer = await ask(gateway, { body, headers: BEARER });
      server.close();
      for (const socket of sockets) socket.destroy();
      const name = `${when} ${end} ${body.length}`;
      assert.deepEqual([answer.status, answer.json.code, sockets.length], [502, 'bad_backend_answer', 1], name);
    }
  }
});

section('WEBSOCKETS'); // ──────────────────────────────────────────────────────────────────────────

for (
  const [form, at] of [['bearer', {}], ['basic', { headers: [`Authorization: ${basic(`api:${SECRET}`)}`] }], ['path', {
    path: `/@auth=${SECRET}${RECEIVE}`,
    headers: [],
  }], ['query', { path: `${RECEIVE}?@auth=${SECRET}&x=1`, headers: [] }]] as const
) {
  test(`WebSocket with a token as ${form}: bytes flow both ways, and the credential stays here`, async (t) => {
    const backend = await startUpgradeBackend(t);
    const gateway = await startGateway(t, backend, RECEIVING);
    const { socket, text } = openWebSocket(t, gateway, at as object);
    await until(() => text().includes('\r\n\r\n'));
    assert.match(text(), /^HTTP\/1\.1 101 Switching Protocols\r\n/);
    assert.match(text(), /\r\nsec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK\+xOo=\r\n/i);
    assert.match(text(), /\r\nupgrade: websocket\r\n/i);
    const { headers, url, rawHeaders } = backend.seen[0]!;
    assert.equal(url, form === 'query' ? `${RECEIVE}?x=1` : RECEIVE);
    assert.deepEqual([
      headers.upgrade,
      headers.connection,
      headers['sec-websocket-key'],
      headers['x-forwarded-for'],
      headers.host,
    ], ['websocket', 'Upgrade', 'dGhlIHNhbXBsZSBub25jZQ==', '127.0.0.1', `127.0.0.1:${backend.port}`]);
    assert.doesNotMatch(JSON.stringify([url, rawHeaders, headers]), /authorization|correct-horse/i);
    let got = '';
    backend.sockets[0]!.on('data', (chunk) => {
      got += chunk;
    });
    socket.write('from the client');
    backend.sockets[0]!.write('from the backend');
    await until(() => got === 'from the client' && text().endsWith('from the backend'));
    const line = requests(gateway)[0];
    assert.deepEqual([line.status, line.route, line.form, line.token], [101, '/v1/receive/:number', form, 'test']);
    socket.destroy();
    await until(() => gateway.log.some((entry) => entry.includes('websocket closed')));
    const { bytesIn, bytesOut } = JSON.parse(gateway.log.find((entry) => entry.includes('websocket closed'))!);
    assert.deepEqual([bytesIn, bytesOut], [15, 16]);
  });
}

test('WebSocket: a refusal is a complete HTTP answer, and the backend sees nothing', async (t) => {
  const backend = await startUpgradeBackend(t);
  const gateway = await startGateway(t, backend, {
    ...RECEIVING,
    tokens: {
      a: { secret: SECRET, senders: [FROM] },
      narrow: { secret: OTHER, allow: ['send'] },
      far: { secret: 'secret-for-far-away-clients', clients: ['192.0.2.1'] },
    },
  });
  const cases: [at: object, status: number, code: string][] = [
    [{ headers: [] }, 401, 'unauthorized'],
    [{ headers: ['Authorization: Bearer wrong'] }, 401, 'unauthorized'],
    [{ headers: [`Authorization: Bearer ${SECRET}`, `Authorization: Bearer ${SECRET}`] }, 400, 'bad_credential'],
    [{ headers: [`Authorization: Bearer ${OTHER}`] }, 403, 'endpoint_not_allowed'],
    [{ headers: ['Authorization: Bearer secret-for-far-away-clients'] }, 403, 'client_not_allowed'],
    [{ path: `/v1/receive/${STRANGER}` }, 403, 'sender_not_allowed'],
    [{ path: '/v1/accounts' }, 403, 'setup_blocked'],
    [{ path: '/v1/receive/%252B15550100001' }, 400, 'bad_target'],
    [{ path: '/v1/receive/../about' }, 400, 'bad_target'],
    [{ path: `/v1/groups/${FROM}/group.QUJD` }, 400, 'bad_target'],
    [{ headers: ['Host: other', `Authorization: Bearer ${SECRET}`] }, 400, 'bad_target'],
    [{ path: '/api/v1/receive' }, 404, 'unknown_endpoint'],
    [{ path: '/v2/send' }, 405, 'method_not_allowed'],
  ];
  for (const [at, status, code] of cases) {
    const { socket, text } = openWebSocket(t, gateway, at);
    await closed(socket);
    const [head, body] = text().split('\r\n\r\n') as [string, string];
    assert.equal(statusOf(head), status, JSON.stringify(at));
    assert.equal(JSON.parse(body).code, code);
    assert.match(head, new RegExp(`\\r\\nContent-Length: ${body.length}\\r\\n`));
    assert.match(head, /\r\nConnection: close/);
    assert.equal(/\r\nAllow: POST\r\n/.test(head), status === 405);
    if (status === 401) {
      assert.match(head, /\r\nWWW-Authenticate: Basic realm="signal"\r\nWWW-Authenticate: Bearer\r\n/);
    }
    assert.equal(requests(gateway).find((line) => line.requestId === JSON.parse(body).requestId)?.code, code);
  }
  assert.equal(backend.connections, 0);
});

test("WebSocket: it counts towards the token's rate", async (t) => {
  const backend = await startUpgradeBackend(t);
  const gateway = await startGateway(t, backend, { ...RECEIVING, rate: '1/1h' });
  const first = openWebSocket(t, gateway);
  await until(() => first.text().startsWith('HTTP/1.1 101'));
  const second = openWebSocket(t, gateway);
  await closed(second.socket);
  assert.match(second.text(), /^HTTP\/1\.1 429 [^]*\r\nRetry-After: 3600\r\n/);
  assert.equal(backend.seen.length, 1);
});

test('WebSocket: a backend that declines is passed on with its status and body', async (t) => {
  for (
    const reply of [
      'HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 11\r\nX-Why: mode\r\n\r\nBad Request',
      'HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\nX-Why: mode\r\n\r\nb\r\nBad Request\r\n0\r\n\r\n',
    ]
  ) {
    const backend = await startUpgradeBackend(t, (socket) => socket.end(reply));
    const gateway = await startGateway(t, backend, RECEIVING);
    const { socket, text } = openWebSocket(t, gateway);
    await closed(socket);
    assert.match(
      text(),
      /^HTTP\/1\.1 400 Bad Request\r\n[^]*x-why: mode\r\n[^]*\r\n\r\n(?:Bad Request|b\r\nBad Request\r\n0\r\n\r\n)$/i,
    );
    assert.equal(/transfer-encoding: chunked/i.test(text()), !/content-length/i.test(text()));
    assert.equal(requests(gateway)[0].status, 400);
  }
});

test('WebSocket: a backend that is down, slow, redirects, breaks off or switches to something else', async (t) => {
  const cases: [name: string, open: (socket: Duplex) => void, status: number, code: string][] = [
    ['slow', () => {}, 504, 'backend_timeout'],
    [
      'redirects',
      (socket) => socket.end('HTTP/1.1 301 Moved Permanently\r\nLocation: /v1/accounts\r\nContent-Length: 0\r\n\r\n'),
      502,
      'bad_backend_answer',
    ],
    ['breaks off', (socket) => socket.destroy(), 502, 'bad_backend_answer'],
    [
      'switches to something else',
      (socket) => socket.write('HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n'),
      502,
      'bad_backend_answer',
    ],
  ];
  for (const [name, open, status, code] of cases) {
    const backend = await startUpgradeBackend(t, open);
    const gateway = await startGateway(t, backend, {
      ...RECEIVING,
      backend: { url: backend.url, timeout: name === 'slow' ? '100ms' : '1m' },
    });
    const { socket, text } = openWebSocket(t, gateway);
    await closed(socket);
    assert.deepEqual([statusOf(text()), codeOf(text())], [status, code], name);
  }
  const { socket, text } = openWebSocket(t, await startGateway(t, { url: 'http://127.0.0.1:9' }, RECEIVING));
  await closed(socket);
  assert.deepEqual([statusOf(text()), codeOf(text())], [502, 'backend_unreachable']);
});

test('WebSocket: bytes that come together with the handshake are not lost, on either side', async (t) => {
  let got = '';
  const backend = await startUpgradeBackend(t, (socket, head) => {
    got += head;
    socket.on('data', (chunk) => {
      got += chunk;
    });
    socket.write(`${ACCEPTED}early from the backend`);
  });
  const gateway = await startGateway(t, backend, RECEIVING);
  const { text } = openWebSocket(t, gateway, { more: 'early from the client' });
  await until(() => got.endsWith('client') && text().endsWith('backend'));
  assert.deepEqual([got, text().split('\r\n\r\n')[1]], ['early from the client', 'early from the backend']);
});

test('WebSocket: bytes behind a handshake that is refused or declined never reach the backend', async (t) => {
  const backend = await startUpgradeBackend(t, (socket, head) => {
    socket.on('data', (chunk) => assert.fail(`the backend got ${chunk}`));
    assert.equal(head.length, 0);
    socket.end('HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n');
  });
  const gateway = await startGateway(t, backend, RECEIVING);
  for (const headers of [[`Authorization: Bearer ${SECRET}`], []]) {
    const { socket } = openWebSocket(t, gateway, {
      headers,
      more: `POST /v1/register/${FROM} HTTP/1.1\r\nHost: x\r\n\r\n`,
    });
    await closed(socket);
  }
  assert.equal(backend.seen.length, 1);
});

test('WebSocket: a side that ends its half still gets what the other has left to say', async (t) => {
  const backend = await startUpgradeBackend(t, (socket) => {
    socket.write(ACCEPTED);
    socket.on('data', () => {}).on('end', () => socket.end('last words'));
  });
  const gateway = await startGateway(t, backend, RECEIVING);
  const { socket, text } = openWebSocket(t, gateway);
  await until(() => text().startsWith('HTTP/1.1 101'));
  socket.end('bye');
  await closed(socket);
  assert.match(text(), /last words$/);
});

test('WebSocket: when the backend goes the client goes, and the other way round', async (t) => {
  const backend = await startUpgradeBackend(t);
  const gateway = await startGateway(t, backend, RECEIVING);
  for (const side of ['backend', 'client'] as const) {
    const { socket, text } = openWebSocket(t, gateway);
    await until(() => text().startsWith('HTTP/1.1 101'));
    const other = backend.sockets.at(-1)! as net.Socket;
    other.resume();
    const gone = closed(side === 'backend' ? socket : other);
    (side === 'backend' ? other : socket).destroy();
    await gone;
  }
  const logged = (): LogLine[] => logLines(gateway.log).filter((line) => line.message === 'websocket closed');
  await until(() => logged().length === 2);
  assert.deepEqual(logged().map((line) => line.token), ['test', 'test']);
});

// Skipped on Bun 1.4.5, where the stand-in backend's own sockets stop without a word in most runs.
test('WebSocket: the backend is always drained; a client that does not read is dropped, and another one goes on', {
  skip: 'Bun' in globalThis,
}, async (t) => {
  const backend = await startUpgradeBackend(t);
  const gateway = await startGateway(t, backend, RECEIVING);
  const stalled = openWebSocket(t, gateway);
  await until(() => stalled.text().startsWith('HTTP/1.1 101'));
  const healthy = openWebSocket(t, gateway);
  await until(() => healthy.text().startsWith('HTTP/1.1 101'));
  stalled.socket.pause();
  const chunk = Buffer.alloc(64 * 1024, 'x');
  const [toStalled, toHealthy] = backend.sockets as [net.Socket, net.Socket];
  let dropped = false;
  toStalled.on('close', () => {
    dropped = true;
  });
  let written = 0;
  while (!dropped) {
    // The backend's own rule: it writes to all its readers in turn, and waits for each.
    for (const socket of [toStalled, toHealthy]) {
      if (!socket.destroyed && !socket.write(chunk)) {
        await Promise.race([once(socket, 'drain'), closed(socket)]).catch(() => {});
      }
    }
    written += chunk.length;
    assert.ok(written < 64 * 1024 * 1024, 'it was never dropped');
  }
  toHealthy.write('still here');
  await until(() => healthy.text().endsWith('still here'));
  assert.equal(healthy.text().length - healthy.text().indexOf('\r\n\r\n') - 4, written + 'still here'.length);
  await until(() => gateway.log.some((line) => line.includes('too_far_behind')));
});

test('WebSocket: closing the gateway closes it, and a reload closes those whose token is gone or may no longer do this', async (t) => {
  const backend = await startUpgradeBackend(t);
  const secrets = [
    'secret-number-one-of-four',
    'secret-number-two-of-four',
    'secret-number-three-of-four',
    'secret-number-four-of-four',
  ];
  const [stays, goes, expires, narrows] = secrets.map((secret) => ({ secret })) as [
    TokenConfig,
    TokenConfig,
    TokenConfig,
    TokenConfig,
  ];
  const gateway = await startGateway(t, backend, { ...RECEIVING, tokens: { stays, goes, expires, narrows } });
  const clients = secrets.map((secret) => openWebSocket(t, gateway, { headers: [`Authorization: Bearer ${secret}`] }));
  for (const { text } of clients) await until(() => text().startsWith('HTTP/1.1 101'));
  gateway.reload({
    ...RECEIVING,
    tokens: { stays, expires: { ...expires, expires: '2020-01-01' }, narrows: { ...narrows, senders: [TO] } },
  });
  for (const { socket } of clients.slice(1)) if (!socket.destroyed) await closed(socket);
  assert.equal(clients[0]!.socket.destroyed, false);
  backend.sockets[0]!.write('still open');
  await until(() => clients[0]!.text().endsWith('still open'));
  const gone = closed(clients[0]!.socket);
  await gateway.close();
  await gone;
});

test('WebSocket: one that came in a form that a reload takes away from its token is closed', async (t) => {
  const backend = await startUpgradeBackend(t);
  const token = (methods: ('bearer' | 'path')[]) => ({ tokens: { test: { secret: SECRET, methods } } });
  const gateway = await startGateway(t, backend, { ...RECEIVING, ...token(['bearer', 'path']) });
  const byPath = openWebSocket(t, gateway, { path: `/@auth=${SECRET}${RECEIVE}`, headers: [] });
  const byBearer = openWebSocket(t, gateway);
  for (const { text } of [byPath, byBearer]) await until(() => text().startsWith('HTTP/1.1 101'));
  gateway.reload({ ...RECEIVING, ...token(['bearer']) });
  await closed(byPath.socket);
  await until(() => gateway.log.some((line) => line.includes('no_longer_allowed')));
  assert.equal(byBearer.socket.destroyed, false);
});

test('WebSocket: a client that leaves during the handshake is not waited for', async (t) => {
  let left = false;
  const backend = await startUpgradeBackend(t, (socket) => {
    socket.on('close', () => {
      left = true;
    }).on('end', () => socket.end()).resume();
  });
  const gateway = await startGateway(t, backend, RECEIVING);
  const { socket } = openWebSocket(t, gateway);
  await until(() => backend.seen.length === 1);
  socket.destroy();
  await until(() => left && requests(gateway).length === 1);
  assert.deepEqual([requests(gateway)[0].status, requests(gateway)[0].code], [499, 'client_left']);
});

// SIGTERM waited for it for ever: closing all connections does not reach a socket that is being upgraded.
test('closing lets an answer finish whose request wished for a WebSocket', async (t) => {
  let answer: http.ServerResponse | undefined;
  const backend = await startBackend(t);
  backend.server.on('upgrade', (req: http.IncomingMessage, socket: Duplex) => {
    answer = new http.ServerResponse(req);
    answer.assignSocket(socket as net.Socket);
    answer.writeHead(200, { 'Content-Length': 8 }).write('half');
  });
  const gateway = await startGateway(t, backend, { ...RECEIVING, shutdown: '1h' });
  const { socket, text } = openWebSocket(t, gateway, { path: '/v1/about' });
  await until(() => text().endsWith('half'));
  const closing = gateway.close();
  answer!.end('half');
  await closed(socket);
  assert.match(text(), /^HTTP\/1\.1 200 [^]*\r\n\r\nhalfhalf$/);
  await closing;
});

test('closing the gateway ends a WebSocket whose handshake is not answered yet', async (t) => {
  const backend = await startUpgradeBackend(t, (socket) => {
    socket.on('end', () => socket.end()).resume();
  });
  const gateway = await startGateway(t, backend, { ...RECEIVING, shutdown: '1h' });
  const { socket, text } = openWebSocket(t, gateway);
  await until(() => backend.seen.length === 1);
  await gateway.close();
  if (!socket.destroyed) await closed(socket);
  assert.deepEqual([statusOf(text()), codeOf(text())], [503, 'shutting_down']);
});

section('ADDRESSES'); // ───────────────────────────────────────────────────────────────────────────
const ELSEWHERE = { clients: ['192.0.2.0/24', '2001:db8::/32'] };
table('clients: an address that is not on the list is 403 before its credential is looked at', ELSEWHERE)`
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
  203.0.113.7 ⇐ X-Forwarded-For: 203.0.113.7:4711
  2001:db8::1 ⇐ X-Forwarded-For: [2001:db8::1]:443
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

test('a log line in text form is one line, whatever is in it', async (t) => {
  const { gateway } = await startBoth(t, { log: { format: 'text' } });
  await ask(gateway, { headers: BEARER });
  await ask(gateway, { body: '{"a":', headers: BEARER });
  assert.match(
    gateway.log[0]!,
    /^\S+Z info {2}listening listen=http:\/\/127\.0\.0\.1:\d+ backend=http:\/\/127\.0\.0\.1:\d+ tokens=1 names=test allow=send,info$/,
  );
  assert.match(
    gateway.log[1]!,
    /^\S+Z info {2}request requestId=\S+ client=127\.0\.0\.1 method=GET route=\/v1\/about token=test form=bearer status=200 bytesIn=0 bytesOut=\d+ ms=\d+$/,
  );
  assert.match(gateway.log[2]!, /^\S+Z warn {2}request .* status=400 code=bad_json /);
});

test('log.level is the least that is logged', async (t) => {
  const { gateway } = await startBoth(t, { log: { format: 'json', level: 'warn' } });
  await ask(gateway, { headers: BEARER });
  await ask(gateway, {});
  assert.deepEqual(requests(gateway).map((line) => line.status), [401]);
});

test('a gateway whose log nobody reads any more goes on, and ends with 0', async (t) => {
  const gateway = await startProcess(t, { backend: await startBackend(t) });
  gateway.child.stdout!.destroy();
  for (let i = 1; i <= 20; i++) assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
  await gateway.close();
  assert.doesNotMatch(gateway.output(), /EPIPE/);
});

// Memory grew by each line, and SIGTERM did not end it any more; on Deno it stood still after 260 requests.
test('a log that nobody reads is dropped beyond 1 MiB and counted, and stops neither the gateway nor its end', async (t) => {
  const gateway = await startProcess(t, { backend: await startBackend(t), env: { LOG_LEVEL: 'debug' } });
  gateway.child.stdout!.pause();
  const agent = new http.Agent({ keepAlive: true });
  t.after(() => agent.destroy());
  const total = 3500;
  const path = '/rate-limit-challenge'.repeat(8); // as long as a line of the log can make it
  let asked = 0;
  const askMany = async (): Promise<void> => {
    while (asked < total) {
      asked++;
      assert.equal((await ask(gateway, { path, agent })).status, 401);
    }
  };
  await Promise.all(Array.from({ length: 8 }, askMany));
  gateway.child.stdout!.resume();
  await until(() => /log lines were dropped.*\n$/.test(gateway.output()));
  gateway.child.stdout!.pause();
  const logged = requests(gateway).length;
  assert.ok(logged > 1000, `${logged} lines were kept`);
  assert.equal(logLines(gateway.log).at(-1)!.lines, total - logged);
  asked = 0;
  await Promise.all(Array.from({ length: 8 }, askMany));
  await gateway.close();
});

test('a standard output that goes to a full disk stops neither the gateway nor its end', {
  skip: process.platform !== 'linux' && 'told for Linux',
}, async (t) => {
  // No log says where it listens: it is told a place, and asked until it answers there.
  const to = { port: 0, socketPath: join(folder(t), 'gateway.sock') };
  const command = [process.execPath, ...'Deno' in globalThis ? ['run', '-A'] : [], ...LOADER, fileURLToPath(FILE)];
  const { url } = await startBackend(t);
  const env = { HOME: process.env.HOME, LISTEN: `unix:${to.socketPath}`, API_TOKENS: SECRET, BACKEND_URL: url };
  const child = start([], env, ['sh', '-c', 'exec "$0" "$@" >/dev/full', ...command]);
  t.after(() => child.kill('SIGKILL'));
  while (!await ask(to, { path: '/healthz' }).catch(() => undefined));
  for (let i = 0; i < 3; i++) assert.equal((await ask(to, { body: MESSAGE, headers: BEARER })).status, 201);
  process.kill(child.pid!, 'SIGHUP');
  for (let i = 0; i < 3; i++) assert.equal((await ask(to, { body: MESSAGE, headers: BEARER })).status, 201);
  process.kill(child.pid!, 'SIGTERM');
  assert.deepEqual(await once(child, 'exit'), [0, null]);
});

test('the start-up line tells what the tokens may do, not what they might have', async (t) => {
  const { gateway } = await startBoth(t, {
    tokens: { a: { secret: SECRET, allow: ['receive'] }, b: { secret: OTHER, allow: ['setup', 'receive'] } },
  });
  assert.equal(JSON.parse(gateway.log[0]!).allow, 'receive,setup');
});

section('LOADING AND READERS'); // ─────────────────────────────────────────────────────────────────

/** Who could not read a file; Deno 2.9 tells that only with a permission of its own. */
const BY_USER = 'Deno' in globalThis ? '' : ` by user ${process.getuid?.()}`;

function nest(path: readonly string[], value: unknown): object {
  return path.reduceRight((inner, key) => ({ [key]: inner }), value) as object;
}

const NO_PERSON = 'is not a phone number ("+" and 5 to 15 digits), a user name, a UUID, group.… or group.*';
const NO_DATE = 'is not a date such as 2027-06-30 (valid through that day, UTC) or a time such as 2027-06-30T12:00:00Z';
const NO_RULE = 'is not one of send, info, receive, messaging, setup, or a pattern such as "GET /v1/groups/:number"';
const NO_RULES = ['snd', 'get /v1/about', 'GET v1/about', 'HEAD /v1/about', 'GET /v1/a%62', 'GET /v1/x?y'];
const NO_RANGES = ['10.0.0.0/33', 'localhost', '::1/129', '1.2.3.4/', '1.2.3.4/8/8'];
const NO_PERSONS = ['--x', '', '4915551234567', '+49 1555'];

function tokenA(settings: object): object {
  return { tokens: { a: settings } };
}

const BAD_CONFIGS: [config: unknown, ...problems: string[]][] = [
  [{ lisen: ':1', ...tokenA({ secret: SECRET }) }, 'lisen: is not a setting; did you mean "listen"?'],
  [{ zzz: 1 }, 'zzz: is not a setting'],
  // A key is shown as one word, so that none forges a second line or setting.
  [{ 'zz z': 1, 'z\n': 1, 'z\x1b': 1, 'a:b': 1 }, ...[0, 1, 2, 3].map((i) => `the file[${i}]: is not a setting`)],
  [{ backend: { ulr: 'x' } }, 'backend.ulr: is not a setting; did you mean "url"?'],
  [{ backend: 'http://x' }, 'backend: must be an object'],
  [[], 'the file: must be an object'],
  [null, 'the file: must be an object'],
  [
    { tokens: { grafana: { secret: SECRET, methods: ['paht'] } } },
    'tokens.grafana.methods[0]: "paht" is not one of bearer, basic, query, path, body',
  ],
  [{ tokens: {} }, 'tokens: holds no token; leave it out to run without tokens'],
  [{ tokens: [] }, 'tokens: must be an object, name to settings'],
  [
    { tokens: null, clients: null, backend: null, tls: { cert: null } },
    ...['tokens', 'clients', 'backend', 'tls.cert'].map((at) => `${at}: null is no value; leave the line out`),
  ],
  [
    { tokens: { a: null, b: { secret: null }, c: { secret: SECRET, rate: null, defaults: { number: null } } } },
    ...['[0]', '.b.secret', '.c.rate', '.c.defaults.number'].map((at) =>
      `tokens${at}: null is no value; leave the line out`
    ),
  ],
  // A key that is no plain word is not shown, however short: it could be part of a secret, or forge a line of the log.
  [
    { 'a b': 1, 'a\n': 1, log: { '\u001b[2J': 1 }, ...tokenA({ secret: SECRET, 'ü': 1 }) },
    ...['the file[0]', 'the file[1]', 'log[0]', 'tokens.a[0]'].map((at) => `${at}: is not a setting`),
  ],
  [{ tokens: { a: SECRET } }, 'tokens[0]: must be an object with "secret" or "secretFile"'],
  [tokenA({}), 'tokens.a: needs either "secret" or "secretFile"'],
  [tokenA({ secret: SECRET, secretFile: '/x' }), 'tokens.a: needs either "secret" or "secretFile"'],
  [
    tokenA({ secret: 'short' }),
    'tokens.a.secret: the secret is shorter than 16 characters; "gateway.ts token" makes a good one',
  ],
  [tokenA({ secret: 17 }), 'tokens.a.secret: must be a string'],
  [tokenA({ secret: 'sha256:12' }), 'tokens.a.secret: after "sha256:" there must be 64 hexadecimal digits'],
  [tokenA({ secret: `${SECRET}\n` }), 'tokens.a.secret: holds a control character'],
  [tokenA({ secretFile: '/no/such/file' }), `tokens.a.secretFile: /no/such/file cannot be read${BY_USER} (ENOENT)`],
  [{ tokens: { a: { secret: SECRET }, b: { secret: SECRET } } }, 'tokens: "a" and "b" have the same secret'],
  [
    { tokens: { 'a b': { secret: SECRET } } },
    'tokens[0]: a name may have letters, digits, "_", "-" and ".", 64 at most',
  ],
  [tokenA({ secret: SECRET, expires: '2027-02-30' }), `tokens.a.expires: "2027-02-30" ${NO_DATE}`],
  [
    tokenA({ secret: SECRET, senders: ['0664123'], recipients: NO_PERSONS }),
    'tokens.a.senders[0]: "0664123" is not "+" and 5 to 15 digits',
    ...NO_PERSONS.map((text, i) => `tokens.a.recipients[${i}]: "${text}" ${NO_PERSON}`),
  ],
  [tokenA({ secret: SECRET, recipients: [] }), 'tokens.a.recipients: must be a list with at least one entry'],
  [
    tokenA({ secret: SECRET, clients: NO_RANGES }),
    ...NO_RANGES.map((text, i) => `tokens.a.clients[${i}]: "${text}" is not an address or a CIDR range`),
  ],
  [
    tokenA({ secret: SECRET, allow: NO_RULES }),
    ...NO_RULES.map((text, i) => `tokens.a.allow[${i}]: "${text}" ${NO_RULE}`),
  ],
  [
    tokenA({ secret: SECRET, recipient: ['+1'] }),
    'tokens.a.recipient: is not a setting; did you mean "recipients"?',
  ],
  [
    { rate: '30', 'shutdown': '10', limits: { body: '150', connections: 0 }, log: { level: 'trace' } },
    'rate: "30" is not a rate such as 30/1m',
    'limits.body: "150" is not a size such as 150MiB',
    'limits.connections: 0 is not a whole number of at least 1',
    'shutdown: "10" is not a duration such as 10s',
    'log.level: "trace" is not one of debug, info, warn, error',
  ],
  [
    { backend: { url: 'ftp://x', timeout: '1w' } },
    'backend.url: must be an http or https URL without a query',
    'backend.timeout: "1w" is not a duration such as 150s',
  ],
  [{ backend: { url: `http://user:${SECRET}@x/?q` } }, 'backend.url: must be an http or https URL without a query'],
  [{ listen: '8880' }, 'listen: "8880" is not host:port, :port, [::]:port or unix:/path.sock'],
  [
    { listen: '0.0.0.0:8880' },
    'tokens: there is none, and other machines can reach the address to listen on: ' +
    'set API_TOKENS, or AUTH_ANONYMOUS=true to let everybody in',
  ],
  [
    { auth: { methods: [], anonymous: 'yes' } },
    'auth.methods: must be a list with at least one entry',
    'auth.anonymous: "yes" is not true or false',
  ],
];

for (const [config, ...problems] of BAD_CONFIGS) {
  test(`configuration ${JSON.stringify(config).replaceAll(SECRET, '…').slice(0, 90)}: every mistake is reported, and no secret`, () => {
    const found = problemsOf(() => createGateway(config as GatewayConfig));
    assert.deepEqual(found, problems);
    assert.doesNotMatch(found.join(''), SECRETS);
  });
}

test('without tokens the gateway starts only where nobody else can reach it, or when asked to', () => {
  for (const listen of ['127.0.0.1:0', '127.8.9.1:0', '[::1]:0', 'localhost:0', 'unix:/tmp/x.sock']) {
    assert.deepEqual(problemsOf(() => createGateway({ listen })), [], listen);
  }
  for (const listen of [':0', '0.0.0.0:0', '[::]:0', '192.168.1.1:0', '127.example.com:0', '[::ffff:127.0.0.1]:0']) {
    assert.equal(problemsOf(() => createGateway({ listen })).length, 1, listen);
    assert.deepEqual(problemsOf(() => createGateway({ listen, auth: { anonymous: true } })), [], listen);
    assert.deepEqual(problemsOf(() => createGateway({ listen, tokens: { a: { secret: SECRET } } })), [], listen);
  }
});

test('file, environment, flags: of two, the later wins', (t) => {
  const file = join(folder(t), 'gateway.json');
  writeFileSync(
    file,
    JSON.stringify({
      listen: '127.0.0.1:1',
      backend: { url: 'http://file:1', timeout: '1s' },
      rate: '1/1s',
      tokens: { file: { secret: SECRET } },
    }),
  );
  const settings = loadSettings({
    file,
    env: { BACKEND_URL: 'http://env:2', LISTEN: '127.0.0.1:2', RATE: '2/1s' },
    flags: { listen: '127.0.0.1:3' },
  });
  assert.equal(settings.listen.port, 3);
  assert.equal(settings['backend.url'].origin, 'http://env:2');
  assert.equal(settings['backend.timeout'], 1000);
  assert.equal(settings.rate?.count, 2);
  assert.deepEqual(settings.tokens.map((token) => token.name), ['file']);
  assert.deepEqual(loadSettings({ file, env: { API_TOKENS: OTHER } }).tokens.map((token) => token.name), ['token-1']);
});

test('API_TOKENS takes secrets and names, API_TOKENS_FILE one per line with comments', (t) => {
  const digest = createHash('sha256').update(OTHER).digest('hex');
  const path = join(folder(t), 'tokens');
  writeFileSync(path, `# for the house\nha=${SECRET}\n\n  # and for the alerts\n  sha256:${digest}  \n`);
  for (
    const env of [{ API_TOKENS: `ha=${SECRET}, sha256:${digest}` }, {
      API_TOKENS: `\n ha=${SECRET}\tsha256:${digest.toUpperCase()}`,
    }, { API_TOKENS_FILE: path }]
  ) {
    const { tokens } = loadSettings({ env });
    assert.deepEqual(tokens.map(({ name }) => name), ['ha', 'token-2']);
    assert.deepEqual(tokens.map((token) => token.digest), [createHash('sha256').update(SECRET).digest('hex'), digest]);
  }
});

test('the environment never leaves the gateway open by mistake, and no message holds a secret', (t) => {
  const dir = folder(t);
  const empty = join(dir, 'empty');
  writeFileSync(empty, '# nothing here\n\n');
  const cases: [env: Record<string, string>, ...problems: string[]][] = [
    [{ API_TOKENS: '' }, 'API_TOKENS: is set but empty; unset it, or give it a value'],
    [{ API_TOKENS: ' , ' }, 'API_TOKENS: holds no token; leave it out to run without tokens'],
    [{ API_TOKENS_FILE: '' }, 'API_TOKENS_FILE: is set but empty; unset it, or give it a value'],
    [{ API_TOKENS_FILE: empty }, 'API_TOKENS_FILE: holds no token; leave it out to run without tokens'],
    [
      { API_TOKENS_FILE: join(dir, 'none') },
      `API_TOKENS_FILE: ${join(dir, 'none')} cannot be read${BY_USER} (ENOENT)`,
    ],
    [{ API_TOKENS_FILE: dir }, `API_TOKENS_FILE: ${dir} cannot be read${BY_USER} (EISDIR)`],
    [
      { API_TOKENS: SECRET, API_TOKENS_FILE: empty },
      'API_TOKENS_FILE: is set, and API_TOKENS too; use one of them',
      'API_TOKENS_FILE: holds no token; leave it out to run without tokens',
    ],
    [{ API_TOKEN: SECRET }, 'API_TOKEN: is not a setting; did you mean "API_TOKENS"?'],
    [
      { API_TOKENS: `${SECRET} tooshort a=${OTHER} a=${OTHER}x` },
      'API_TOKENS[1]: the secret is shorter than 16 characters; "gateway.ts token" makes a good one',
      'API_TOKENS[3]: has the name of an earlier one',
    ],
    [
      { API_TOKENS: 'c2VjcmV0LW9mLXNvbWUtbGVuZ3Ro= home=' },
      ...[0, 1].map((i) =>
        `API_TOKENS[${i}]: is either a name without a secret, or a secret that ends in "=": write name=SECRET`
      ),
    ],
    [
      { API_TOKENS: SECRET, ALLOW_CLIENTS: '', ALLOW: ',' },
      'ALLOW_CLIENTS: is set but empty; unset it, or give it a value',
      'ALLOW: must be a list with at least one entry',
    ],
    [
      { API_TOKENS: SECRET, AUTH_METHODS: 'bearer, digest', AUTH_ANONYMOUS: '1', RATE: '0/1m', LOG_FORMAT: 'xml' },
      'AUTH_METHODS[1]: "digest" is not one of bearer, basic, query, path, body',
      'AUTH_ANONYMOUS: "1" is not true or false',
      'RATE: "0/1m" is not a rate such as 30/1m',
      'LOG_FORMAT: "xml" is not text or json',
    ],
  ];
  for (const [env, ...problems] of cases) {
    const found = problemsOf(() => loadSettings({ env }));
    assert.deepEqual(found, problems);
    assert.doesNotMatch(found.join(''), new RegExp(`${SECRETS.source}|tooshort`));
  }
});

test('a configuration file that is missing, empty, half-written or not an object is refused, and is not quoted', (t) => {
  const file = join(folder(t), 'gateway.json');
  assert.deepEqual(problemsOf(() => loadSettings({ file })), [
    `configuration: ${file} cannot be read${BY_USER} (ENOENT)`,
  ]);
  const whole = JSON.stringify(
    { tokens: { a: { secret: SECRET } }, listen: '0.0.0.0:8880', auth: { anonymous: true } },
    null,
    2,
  );
  for (let length = 0; length < whole.length; length++) {
    writeFileSync(file, whole.slice(0, length));
    const [problem, ...more] = problemsOf(() => loadSettings({ file }));
    assert.match(problem!, /: is not a JSON object: line \d+, column \d+: it ends too early$/);
    assert.deepEqual(more, []);
  }
  writeFileSync(file, whole.replace(`"${SECRET}"`, `"${SECRET}`));
  assert.deepEqual(problemsOf(() => loadSettings({ file })), [
    `${file}: is not a JSON object: line 4, column 46: a string holds a control character`,
  ]);
  for (const text of ['[]', 'null', '5']) {
    writeFileSync(file, text);
    assert.deepEqual(problemsOf(() => loadSettings({ file })), [`${file}: is not a JSON object`]);
  }
});

test('a token in a file takes its secret from another, and settings of its own', (t) => {
  const dir = folder(t);
  writeFileSync(join(dir, 'secret'), `${SECRET}\n`);
  const file = join(dir, 'gateway.json');
  writeFileSync(
    file,
    JSON.stringify({
      tokens: {
        grafana: {
          secretFile: join(dir, 'secret'),
          methods: ['path'],
          clients: ['172.18.0.0/16'],
          expires: '2027-06-30',
        },
      },
    }),
  );
  const [token] = loadSettings({ file }).tokens;
  assert.equal(token!.digest, createHash('sha256').update(SECRET).digest('hex'));
  assert.equal(token!.expiresMs, Date.parse('2027-06-30T23:59:59.999Z'));
  assert.deepEqual([...token!.methods!], ['path']);
});

for (
  const [place, load] of [
    ['API_TOKENS', (_, text) => loadSettings({ env: { API_TOKENS: text } })],
    ['API_TOKENS_FILE', (path, text) => {
      writeFileSync(path, `${text}\n`);
      return loadSettings({ env: { API_TOKENS_FILE: path } });
    }],
    ['a secretFile', (path, text) => {
      writeFileSync(path, `${text}\n`);
      return createGateway({ tokens: { a: { secretFile: path } } });
    }],
  ] as [string, (path: string, text: string) => unknown][]
) {
  test(`a secret in ${place} with the quotes, brackets or separators of another format is refused, and not shown`, (t) => {
    const path = join(folder(t), 'secret');
    const [S, T] = [SECRET, OTHER];
    for (
      const text of [
        ...['""', "''", '``', '“”', '[]', '<>', '{}', ' "', " '", ' ]', ' >', ' }'].map(([open = '', close = '']) =>
          `${open.trim()}${S}${close}`
        ),
        `"home=${S}"`,
        `home="${S}"`,
        `{home=${S}}`,
        `home=${S};phone=${T}`,
        `["${S}","${T}"]`,
        `{"home":"${S}"}`,
        `"sha256:${'0'.repeat(64)}"`,
      ]
    ) {
      const found = problemsOf(() => load(path, text)).join('\n');
      assert.match(found, /begins or ends with a quote, a bracket or a brace, or holds ";"/, text);
      assert.ok(!found.includes(S) && !found.includes(T), found);
    }
    for (const text of [`${S}"${T}`, `${S}(${T})`, `/${S}+`]) {
      assert.deepEqual(problemsOf(() => load(path, text)), [], text);
    }
  });
}

test('in the JSON file a secret may begin or end with anything but white space', () => {
  const load = (secret: string) => problemsOf(() => createGateway({ tokens: { a: { secret } } }));
  for (const secret of [`"${SECRET}"`, `{${SECRET}}`, `${SECRET};${OTHER}`, `${SECRET} ${OTHER}`]) {
    assert.deepEqual(load(secret), []);
  }
  for (const secret of [` ${SECRET}`, `${SECRET} `, `\u00a0${SECRET}`]) {
    assert.deepEqual(load(secret), ['tokens.a.secret: begins or ends with white space']);
  }
});

test('the digest of nothing is refused wherever a digest may stand', (t) => {
  const path = join(folder(t), 'secret');
  for (const nothing of ['', '\n', '\r\n']) {
    const digest = `sha256:${createHash('sha256').update(nothing).digest('hex').toUpperCase()}`;
    writeFileSync(path, digest);
    for (
      const load of [
        () => createGateway({ tokens: { a: { secret: digest } } }),
        () => createGateway({ tokens: { a: { secretFile: path } } }),
        () => loadSettings({ env: { API_TOKENS: `a=${digest}` } }),
        () => loadSettings({ env: { API_TOKENS_FILE: path } }),
      ]
    ) assert.match(problemsOf(load).join(), /^\S+: is the digest of nothing: there was no secret to hash$/);
  }
});

/** A secret in many shapes, each of them in every place that a configuration has. */
const CANARIES = [
  SECRET,
  'sixteen-chars-ok',
  'q83/vEiRq+yZtW0/Fq2pXk9LmN7oRs5TuVwXyZ01ab4=',
  '/9j-canary/of/some_length',
];
/** Paths and variables of all settings, as the README has them. */
const SETTING_ROWS = Array.from(
  README.matchAll(/^\| `([a-z][\w.]*)` \| `([A-Z_]+)` \|/gm),
  ([, path, env]) => [path!.split('.'), env!] as const,
);

test('the canary: a secret in any wrong place of a configuration is in no message, at start or on reload', async (t) => {
  const dir = folder(t);
  const file = join(dir, 'gateway.json');
  let texts = 0;
  const assertSilent = (canary: string, load: () => unknown): void => {
    const found = problemsOf(load).join('\n');
    assert.ok(!found.includes(canary.slice(0, 12)) && !found.includes(canary.slice(-12)), found);
    texts += Number(found !== '');
  };
  const loadFile = (text: string): unknown => {
    writeFileSync(file, text);
    return loadSettings({ file });
  };
  assert.ok(SETTING_ROWS.length >= 18, `only ${SETTING_ROWS.length} settings`);
  for (const S of CANARIES) {
    const values = [S, [S], [[S]], { [S]: S }, { [S]: {} }, { [S]: [S] }, [{ [S]: 1 }], `a=${S}`, `a,${S}`, `"${S}"`];
    const templates = ['{{S', '{{#S}}', '{{/S}}', '{{>S}}', '{{S b}}', '{{{S b}}}', '{{#a}}{{/S}}', '{{#S}}{{/b}}'];
    const parents = ['backend', 'tls', 'auth', 'limits', 'log', 'tokens'].map((key) => [key]);
    const tokens: unknown[] = [
      ...TOKEN_SETTINGS,
      ...['defaults.number', 'defaults.recipients', 'defaults.text_mode', `defaults.${S}`, S],
    ].flatMap((path) => values.map((value) => ({ a: { secret: OTHER, ...nest(path.split('.'), value) } })));
    const configs = [
      ...[...SETTING_ROWS.map(([path]) => path), ...parents, [S], ...parents.map((path) => [...path, S])].flatMap((
        path,
      ) => values.map((value) => nest(path, value))),
      ...[
        ...tokens,
        ...templates.map((text) => ({ a: { secret: OTHER, message: text.replace('S', S) } })),
        ...[S, null, {}, { secret: 'short' }, { secret: S }, { secret: OTHER, allow: ['x'] }].map((token) => ({
          [S]: token,
        })),
        { [S]: { secret: OTHER }, a: { secret: OTHER } },
        { [`${S} `]: { secret: OTHER } },
        { a: { secret: `${S} ` } },
      ].map((value) => ({ tokens: value })),
    ];
    for (const config of configs) {
      // Where a secret passes for what it is not, nothing is wrong and nothing is said.
      assertSilent(S, () => createGateway(config));
      if (S !== CANARIES[0]) continue; // what is read of a file is read like that
      assertSilent(S, () => loadFile(JSON.stringify(config)));
      assertSilent(S, () => loadFile(JSON.stringify(config).slice(0, -1)));
    }
    assertSilent(S, () => loadFile(`{"${S}":1,"${S}":2,"tokens":{"${S}":{"${S}":1,"${S}":2}}}`));
    for (const name of [...SETTING_ROWS.map(([, env]) => env), 'API_TOKENS_FILE']) {
      for (const value of values.filter((value) => typeof value === 'string')) {
        assertSilent(S, () => loadSettings({ env: { AUTH_ANONYMOUS: 'x', [name]: value } }));
      }
    }
    assertSilent(S, () => loadSettings({ file: S }));
    assertSilent(S, () => loadSettings({ flags: { 'listen': S, 'backend.url': S } }));
  }
  assert.ok(texts > 1500, String(texts));

  const [S] = CANARIES as [string];
  const lines = [
    `--${S}`,
    `--config x --${S}`,
    `--${S}=x`,
    `-${S}`,
    `--check=${S}`,
    `--config=${S}`,
    `--listen ${S} --backend ${S}`,
  ];
  for (const args of [...lines.map((line) => line.split(' ')), ['token', `${S} `]]) {
    const { code, stdout, stderr } = await cli(args);
    assert.deepEqual([code, stdout], [2, ''], stderr);
    assert.ok(!stderr.includes(S.slice(0, 12)), stderr);
  }
  const config: GatewayConfig = { listen: '127.0.0.1:0', tokens: { a: { secret: SECRET } } };
  writeFileSync(file, JSON.stringify(config));
  const { child, output, ...to } = await startProcess(t, { args: ['--config', file] });
  assert.equal((await ask(to)).status, 401); // it is up, and so are its handlers of signals
  writeFileSync(file, JSON.stringify({ ...config, [OTHER]: 1, tokens: { [OTHER]: { methods: [OTHER] } } }));
  process.kill(child.pid!, 'SIGHUP');
  await until(() => output().includes('not reloaded'));
  assert.match(output(), /the file\[2\]: is not a setting; tokens\[0\]: needs either/);
  assert.doesNotMatch(output(), SECRETS);
});

test('a token that has a secret as its name is refused: every log line would show it', () => {
  for (const secret of [SECRET, `sha256:${createHash('sha256').update(SECRET).digest('hex')}`]) {
    assert.deepEqual(problemsOf(() => createGateway({ tokens: { a: { secret: OTHER }, [SECRET]: { secret } } })), [
      'tokens[1]: has a secret as its name',
    ]);
  }
  assert.deepEqual(problemsOf(() => loadSettings({ env: { API_TOKENS: `${OTHER}=${SECRET} ${SECRET}=${OTHER}` } })), [
    'API_TOKENS[0]: has a secret as its name',
    'API_TOKENS[1]: has a secret as its name',
  ]);
});

test('what names a file is shown as a path only if it can be one', (t) => {
  const dir = folder(t);
  for (
    const [path, shown] of [
      ['/no/such', '/no/such'],
      [join(dir, 'no-such-folder', 'tokens'), join(dir, 'no-such-folder', 'tokens')],
      [dir, dir],
      ['./some-file-that-is-not-here', './some-file-that-is-not-here'],
      ['/no-such-folder-anywhere/tokens', 'the file'],
      [SECRET, 'the file'],
    ] as const
  ) {
    const code = path === dir ? 'EISDIR' : 'ENOENT';
    assert.deepEqual(problemsOf(() => loadSettings({ env: { API_TOKENS_FILE: path } })), [
      `API_TOKENS_FILE: ${shown} cannot be read${BY_USER} (${code})`,
    ]);
  }
});

test('when a source of tokens could not be read, nobody is told to let everybody in', (t) => {
  const dir = folder(t);
  const file = join(dir, 'gateway.json');
  const open = { LISTEN: '0.0.0.0:8880' };
  const none = join(dir, 'none');
  for (
    const [sources, problem] of [
      [{ env: { ...open, API_TOKENS_FILE: none } }, /^API_TOKENS_FILE: .*none cannot be read/],
      [{ env: open, file: none }, /^configuration: .*none cannot be read/],
      [{ env: open, file }, /gateway\.json: is not a JSON object: line 1, column 2: it ends too early$/],
      [{ env: { ...open, API_TOKEN: SECRET } }, /^API_TOKEN: is not a setting; did you mean "API_TOKENS"\?$/],
      [{ env: { ...open, GATEWAY_CONF: file } }, /^GATEWAY_CONF: is not a setting; did you mean "GATEWAY_CONFIG"\?$/],
    ] as [Parameters<typeof loadSettings>[0], RegExp][]
  ) {
    writeFileSync(file, '{');
    const [first, ...more] = problemsOf(() => loadSettings(sources));
    assert.match(first!, problem);
    assert.deepEqual(more, []);
  }
  writeFileSync(file, `{"token":{"a":{"secret":"${SECRET}"}}}`);
  assert.deepEqual(problemsOf(() => loadSettings({ env: open, file })), [
    'token: is not a setting; did you mean "tokens"?',
  ]);
});

const MIGRATING = 'README.md, "Coming from secured-signal-api", says what it is here';
const RESTRICTIONS = [
  'API_TOKENS',
  'API_TOKENS_FILE',
  'ALLOW_CLIENTS',
  'AUTH_METHODS',
  'AUTH_ANONYMOUS',
  'TRUSTED_PROXIES',
  'GATEWAY_CONFIG',
];

test('a variable that differs by one letter or underscore from a restriction is refused, and no other name is looked at', () => {
  const problems = (name: string, value = SECRET): readonly string[] =>
    problemsOf(() => loadSettings({ env: { [name]: value } }));
  for (const known of RESTRICTIONS) {
    for (let i = 0; i <= known.length; i++) {
      const [before, after] = [known.slice(0, i), known.slice(i)];
      for (
        const name of [
          before + after.slice(1),
          ...['_', 'S', 'x'].flatMap((c) => [before + c + after, before + c + after.slice(1)]),
        ]
      ) {
        if (name === known) continue;
        const cure = name.startsWith('API__TOKEN') ? MIGRATING : `did you mean "${known}"?`;
        assert.deepEqual(problems(name), [`${name}: is not a setting; ${cure}`]);
      }
    }
  }
  for (
    const [name, known] of [
      ['ALLOWED_CLIENTS', 'ALLOW_CLIENTS'],
      ['GATEWAY_CONF', 'GATEWAY_CONFIG'],
      ['TLS_CRT', 'TLS_CERT'],
    ] as const
  ) assert.deepEqual(problems(name), [`${name}: is not a setting; did you mean "${known}"?`]);
  for (
    const name of [
      ...['API__TOKENS', 'API__TOKEN', 'API__TOKENS__0', 'API__AUTH__METHODS', 'SERVICE__HOSTNAMES', 'SETTINGS__'],
      ...['SETTINGS__ACCESS__IPFILTER__ALLOWED', 'SETTINGS__MESSAGE__VARIABLES__NUMBER'],
    ]
  ) assert.deepEqual(problems(name), [`${name}: is not a setting; ${MIGRATING}`]);
  const others = [
    ...['SETTINGS_', 'SETTINGS', 'MY_SETTINGS__A', 'API_', 'SERVICE_PORT', 'service__port', 'RATE_LIMITS', 'SENDER'],
    ...['API_TOEKNS', 'API_TOKENS2', 'api_tokens', 'API_TOKEN_FILES', 'MY_API_TOKENS', 'API_KEY', 'TOKEN', 'toString'],
    ...['RATES', 'ALLOWED', 'LISTENS', 'BACKENDURL', 'LOGLEVEL', 'TLS_CERTS', 'CLIENTS', 'CORS_ORIGIN', 'HOSTNAME', ''],
  ];
  for (const name of others) {
    assert.deepEqual(loadSettings({ env: { [name]: SECRET } }).warnings, [], name);
  }
});

test("a variable that may be meant as a restriction, or be another program's, is a warning at start and in --check", async (t) => {
  const cures = {
    RATE_LIMIT: 'did you mean "RATE"?',
    SENDERS: 'it belongs to a token in the file',
    RECIPIENTS: 'it belongs to a token in the file',
    ...Object.fromEntries(['API__URL', 'SERVICE__PORT', 'SERVICE__LOG_LEVEL'].map((name) => [name, MIGRATING])),
  };
  const env = { ...Object.fromEntries(Object.keys(cures).map((name) => [name, 'x'])), API_TOKENS: SECRET };
  const { code, stdout } = await cli(['--check'], { env });
  assert.equal(code, 0);
  const warnings = Object.entries(cures).map(([name, cure]) => `${name} is not a setting, and does nothing; ${cure}`);

  const [line] = logLines((await startProcess(t, { env: { ...env, LOG_LEVEL: 'warn' } })).log) as [LogLine];
  assert.equal(line.level, 'warn');
  for (const warning of warnings) {
    assert.ok(stdout.includes(`\nwarning: ${warning}\n`), stdout);
    assert.ok(line.warning.includes(warning), line.warning);
  }
});

test('a key given twice in the file is a mistake, at any depth, with its place', (t) => {
  const file = join(folder(t), 'gateway.json');
  for (
    const [text, ...places] of [
      [
        `{"tokens":{"a":{"secret":"${SECRET}","senders":["${FROM}"]},\n "a":{"secret":"${OTHER}"}}}`,
        'line 2, column 2: "a"',
      ],
      [
        `{"tokens":{"a":{"secret":"${SECRET}","allow":["info"] , "\\u0061llow" :["send"]}}}`,
        'line 1, column 76: "allow"',
      ],
      ['{"rate":"1/1s",\n\n  "rate":"2/1s","rate":"3/1s"}', 'line 3, column 3: "rate"', 'line 3, column 17: "rate"'],
      [`{"log":{"level":"info"},"log":{}}`, 'line 1, column 25: "log"'],
      [`{"log":{"level":"info"},"backend":{"url":"http://log","timeout":"1s"},"rate":"1/1s"}`],
      [`{"tokens":{"a":{"secret":"${SECRET}","message":"\\"rate\\":1 {\\"a\\":1,\\"a\\":{}} \\\\"},"rate":{"secret":"${OTHER}"}}}`],
    ] as [string, ...string[]][]
  ) {
    writeFileSync(file, text);
    assert.deepEqual(
      problemsOf(() => loadSettings({ file })),
      places.map((place) => `${file}: ${place} is given twice in one object`),
    );
  }
});

test('tokens of the environment that replace those of the file are told at start and by --check', async (t) => {
  const dir = folder(t);
  const [file, tokens] = [join(dir, 'gateway.json'), join(dir, 'tokens')];
  writeFileSync(file, JSON.stringify({ tokens: { a: { secret: SECRET } } }), { mode: 0o600 });
  writeFileSync(tokens, OTHER);
  for (const env of [{ API_TOKENS: OTHER }, { API_TOKENS_FILE: tokens }]) {
    const warning = `${Object.keys(env)[0]} replaces all tokens of the file`;
    assert.match((await cli(['--check', '--config', file], { env })).stdout, new RegExp(`\nwarning: ${warning}\n`));
    const { log } = await startProcess(t, { args: ['--config', file], env });
    assert.equal(logLines(log)[0]!.warning, warning);
    assert.deepEqual(loadSettings({ env }).warnings, []);
  }
  assert.deepEqual(loadSettings({ file }).warnings, []);
});

test('a configuration file with plain secrets that everybody can read is a warning', (t) => {
  const dir = folder(t);
  let made = 0;
  const warningsOf = (config: GatewayConfig, mode: number): readonly string[] => {
    const file = join(dir, String(++made));
    writeFileSync(file, JSON.stringify(config));
    chmodSync(file, mode);
    return loadSettings({ file }).warnings.map((warning) => warning.replace(file, 'FILE'));
  };
  const digest = `SHA256:${createHash('sha256').update(SECRET).digest('hex')}`;
  const plain: GatewayConfig = { tokens: { a: { secret: digest }, b: { secret: OTHER } } };
  const warning = ['FILE holds plain secrets and can be read by everybody (chmod o-r)'];
  assert.deepEqual(warningsOf(plain, 0o644), warning);
  assert.deepEqual(warningsOf({ backend: { url: `http://u:${SECRET}@backend:1` } }, 0o604), warning);
  for (const mode of [0o600, 0o640]) assert.deepEqual(warningsOf(plain, mode), []);
  assert.deepEqual(warningsOf({ tokens: { a: { secret: digest, message: '"secret":"x" a://b@' } } }, 0o644), []);
});

test('a token that has expired is told when the gateway starts, and on reload', async (t) => {
  const tokens = {
    old: { secret: SECRET, expires: '2020-01-01' },
    new: { secret: OTHER, expires: '2020-01-03' },
  };
  const config: GatewayConfig = { tokens, log: { format: 'json' } };
  const { gateway } = await startBoth(t, config, { now: () => Date.parse('2020-01-02') });
  gateway.reload({ tokens: { old: tokens.old } });
  gateway.reload({ tokens: { new: tokens.new } });
  assert.deepEqual(
    logLines(gateway.log).map(({ message, level, warning }) => [message, level, warning]),
    [
      ['listening', 'warn', 'the token "old" has expired'],
      ['reloaded', 'warn', 'the token "old" has expired'],
      ['reloaded', 'info', undefined],
    ],
  );
});

test('cors takes origins as browsers write them, and nothing else', () => {
  const good = ['https://dash.example:8443', 'http://localhost', 'http://192.168.1.2:3000', 'https://[::1]:1'];
  assert.deepEqual([...loadSettings({ env: { CORS_ORIGINS: good.join(', ') } }).cors!], good);
  assert.equal(loadSettings({}).cors, undefined);
  for (
    const origin of [
      '*',
      'null',
      'https://*',
      'dash.example',
      '//dash.example',
      'https://dash.example/',
      'https://d/x',
      'https://d?x',
      'https://Dash',
      'HTTPS://d',
      'https://d:443',
      'http://d:80',
      'http://d:080',
      'https://u@d',
      'ftp://d',
      'file://',
      'https://dé',
      'https://1.2.3',
      ' https://d',
      'chrome-extension://abc',
    ]
  ) {
    const [problem, ...more] = problemsOf(() => createGateway({ cors: [origin] }));
    assert.match(problem!, /^cors\[0\]: .* is not an origin as browsers send it: /, origin);
    assert.deepEqual(more, []);
  }
  assert.deepEqual(problemsOf(() => createGateway({ cors: [] })), ['cors: must be a list with at least one entry']);
});

test("a group in a token's recipients or defaults that can be none, and what can be no person, is a mistake", () => {
  const load = (token: TokenConfig): readonly string[] =>
    problemsOf(() => createGateway({ tokens: { a: { secret: SECRET, ...token } } }));
  const inner = GROUP.slice('group.'.length);
  const bad = [
    'group.',
    'group.01',
    'group.123456789',
    'group.4366412345678x',
    'group.name.01',
    'group.LS11c2VybmFtZT1ldmlsLjAx',
    `group.${atob(inner)}`,
    `${GROUP}=`,
    GROUP.replace('=', ''),
    `${GROUP} `,
    `group.${btoa(btoa('x'.repeat(31)))}`,
    `group.${btoa(btoa('x'.repeat(33)))}`,
    `group.${btoa(`${atob(inner)}\n`)}`,
    `group.${inner.slice(0, 9)}\n${inner.slice(9)}`,
    `group.${btoa('+/'.repeat(21).concat('8=')).replaceAll('+', '-')}.`,
    atob(inner),
    SECRET,
    'somebody',
    'La.42',
    '4ara.42',
    'Lara.4',
    '-x',
    '+49 1555',
  ];
  for (const recipient of bad) {
    assert.equal(load({ recipients: [recipient] }).length, 1, recipient);
    assert.equal(load({ defaults: { recipients: [recipient] } }).length, 1, recipient);
  }
  for (
    const recipient of [
      GROUP,
      TO,
      randomUUID(),
      randomUUID().toUpperCase(),
      'somebody.01',
      'Lara.42',
      '_L4.007',
      'group_1.1234',
    ]
  ) {
    assert.deepEqual(load({ recipients: [recipient], defaults: { recipients: [recipient] } }), []);
  }
  assert.deepEqual(load({ recipients: ['group.*'] }), []);
  assert.equal(load({ defaults: { recipients: ['group.*'] } }).length, 1);
});

test('running requests have 8 seconds after SIGTERM, unless something else is set', () => {
  assert.equal(loadSettings({}).shutdown, 8000);
  assert.equal(loadSettings({ env: { SHUTDOWN_TIMEOUT: '3s' } }).shutdown, 3000);
});

test("a certificate without its key, with another's, or that is none, is a mistake in the configuration", (t) => {
  const dir = folder(t);
  const file = (name: string, text: string): string => {
    writeFileSync(join(dir, name), text);
    return join(dir, name);
  };
  const [cert, key] = [file('c', CERTS[0].cert), file('k', CERTS[0].key)];
  const config: GatewayConfig = { tokens: { a: { secret: SECRET } } };
  assert.deepEqual(problemsOf(() => createGateway({ ...config, tls: { cert } })), ['tls: needs both "cert" and "key"']);
  const half = (text: string): string => text.slice(0, text.length / 2);
  const chain = `${CERTS[0].cert}\n${CERTS[1].cert}`;
  const others = { rubbish: 'hello', empty: '', space: '\n', key: CERTS[0].key, half: half(CERTS[0].cert) };
  const cuts = {
    inSecond: chain.slice(0, -40),
    inBegin: chain.slice(0, CERTS[0].cert.length + 9),
    noEnd: chain.slice(0, -5),
  };
  for (const [name, text] of Object.entries({ ...others, ...cuts })) {
    const tls = { cert: file(name, text), key };
    assert.deepEqual(problemsOf(() => createGateway({ ...config, tls })), [
      'tls: its "cert" is empty, cut, encrypted, or not in PEM',
    ], name);
  }
  for (const [name, text] of Object.entries({ rubbish: 'hello', empty: '', cert: chain, half: half(CERTS[0].key) })) {
    const tls = { cert, key: file(`${name}.key`, text) };
    assert.deepEqual(problemsOf(() => createGateway({ ...config, tls })), [
      'tls: its "key" is empty, cut, encrypted, or not in PEM',
    ], name);
  }
  for (const [name, text] of Object.entries({ second: chain, another: CERTS[0].cert })) {
    const tls = { cert: file(name, text), key: file('another.key', CERTS[1].key) };
    assert.deepEqual(problemsOf(() => createGateway({ ...config, tls })), [
      'tls: its "key" is not the key of the first certificate in "cert"',
    ], name);
  }
  // A chain, one with the words that programs write around it, and all in one file.
  for (
    const [name, text] of Object.entries({
      chain,
      said: `subject=CN=my-host\n${chain}\n`,
      both: `${CERTS[0].key}\n${chain}`,
    })
  ) {
    const tls = { cert: file(name, text), key: name === 'both' ? join(dir, name) : key };
    createGateway({ ...config, tls });
  }
  assert.deepEqual(problemsOf(() => createGateway({ ...config, tls: { cert: join(dir, 'none'), key } })), [
    `tls.cert: ${join(dir, 'none')} cannot be read${BY_USER} (ENOENT)`,
  ]);
});

// A member that is undefined counted as given: the check for a gateway without tokens was skipped.
test('in a program, a setting that is undefined is a setting that is absent', () => {
  const tokens = undefined as unknown as Record<string, TokenConfig>;
  assert.equal(problemsOf(() => createGateway({ listen: '0.0.0.0:0', tokens })).length, 1);
  assert.deepEqual(
    problemsOf(() =>
      createGateway(
        { listen: '127.0.0.1:0', tokens, allow: undefined, limits: { body: undefined } } as unknown as GatewayConfig,
      )
    ),
    [],
  );
});

test("a backend's password, or a secret in the place of a name, is not in any message", () => {
  for (
    const url of [
      `http://api:${SECRET}/x@backend:1`,
      `api:${SECRET}@backend:1`,
      `http://api:100%${SECRET}@b:1`,
      `http://api:${SECRET}@b:1/?q`,
    ]
  ) {
    const found = problemsOf(() => createGateway({ backend: { url } }));
    assert.equal(found.length, 1, url);
    assert.ok(!found[0]!.includes(SECRET), found[0]!);
  }
  const named = problemsOf(() => createGateway({ tokens: { [SECRET]: 'grafana' } } as unknown as GatewayConfig));
  assert.doesNotMatch(named.join(''), SECRETS);
});

test('words that every object knows are no groups, and the 31st of February is no time', () => {
  for (const word of ['constructor', 'toString', '__proto__']) {
    assert.equal(problemsOf(() => createGateway({ allow: [word] })).length, 1);
  }
  assert.equal(
    problemsOf(() => createGateway({ tokens: { a: { secret: SECRET, expires: '2027-02-31T00:00:00Z' } } })).length,
    1,
  );
});

section('DEMO AND COMMAND LINE'); // ───────────────────────────────────────────────────────────────

test('importing does no work and says nothing', async (t) => {
  const importing = script(t, `await import(${JSON.stringify(program().at(-1))});`);
  const ended = await runProcess([], { program: importing, env: { LISTEN: 'nonsense' } });
  assert.deepEqual(ended, { code: 0, stdout: '', stderr: '' });
});

test("--help lists every setting, flag and group in 80 columns, --version is the package's", async () => {
  const help = await cli(['--help']);
  assert.equal(help.code, 0);
  for (
    const word of [
      '--config',
      '--listen',
      '--backend',
      '--check',
      '--demo',
      'token [NAME]',
      'hash',
      'render NAME',
      'API_TOKENS_FILE',
      'GATEWAY_CONFIG',
      'SIGHUP',
      'the same signal again cuts it off',
      'senders',
      'defaults',
      'message',
    ]
  ) assert.ok(help.stdout.includes(word), word);
  assert.deepEqual(help.stdout.split('\n').filter((line) => line.length > 80), []);
  const [, groups] = /\nThe groups of allow:\n\n([^]*?)\n\n/.exec(help.stdout)!;
  assert.deepEqual(Array.from(groups!.matchAll(/^ {2}([a-z]+) {2}/gm), ([, group]) => group), [
    ...['send', 'info', 'receive', 'messaging', 'setup'],
  ]);
  const manual = 'The manual: README.md, and the comments of GatewayConfig in this file.\n';
  assert.ok(help.stdout.endsWith(`\n\n${manual}`), help.stdout);
  assert.deepEqual(await cli(['--version']), { code: 0, stdout: `${PACKAGE.version}\n`, stderr: '' });
});

test('the process ends with 0, 1 or 2, and writes to standard output or to standard error', async (t) => {
  const { port } = await startBackend(t);
  const rows: [number, ...string[]][] = [[0, 'hash'], [1, '--listen', `127.0.0.1:${port}`], [2, 'hash', SECRET]];
  for (const [code, ...args] of rows) {
    const given = { env: { API_TOKENS: SECRET }, input: `${SECRET}\n` };
    // Once as it is started by hand: through the loader, where the runtime needs one.
    const ended = await runProcess(args, { ...given, program: code === 0 ? AS_IT_IS : program() });
    assert.deepEqual(ended, await cli(args, given));
    assert.deepEqual([ended.code, ended.stdout !== '', ended.stderr !== ''], [code, code === 0, code !== 0]);
    if (code === 1) {
      assert.match(ended.stderr, /^gateway: cannot run: .*in use.*; --listen HOST:PORT takes another port\n$/);
    }
  }
  const demo = await cli(['--demo', '--listen', `127.0.0.1:${port}`]);
  assert.match(demo.stderr, /in use.*; --listen HOST:PORT takes another port\n$/);
});

test('bad usage and bad configuration exit with 2, and say why on standard error', async () => {
  for (
    const [args, env, message] of [
      [['--confg', 'x'], {}, /Unknown option '--confg'/],
      [['--config'], {}, /--config/],
      [['--listen', ''], {}, /--listen: is set but empty/],
      [['frobnicate'], {}, /that is not a command/],
      [[SECRET], {}, /that is not a command/],
      [['hash', SECRET], {}, /not with these arguments/],
      [['render'], {}, /not with these arguments/],
      [['render', 'hook', SECRET], {}, /not with these arguments/],
      [['token', 'a', 'b'], {}, /not with these arguments/],
      [['token', 'a b'], {}, /a name may have/],
      [['--config', '/no/such/file'], {}, /\/no\/such\/file cannot be read.* \(ENOENT\)/],
      [[], { GATEWAY_CONFIG: '/no/such/file' }, /\/no\/such\/file cannot be read.* \(ENOENT\)/],
      [['--listen', 'x', '--backend', 'y'], {}, /--backend: must be[^]*--listen: "x" is not/],
      [['--demo'], { API_TOKENS: SECRET }, /--demo brings its own/],
      [['--demo', '--backend', 'http://x'], {}, /--demo brings its own/],
      [['--check'], { API_TOKENS: 'short', RATE: 'x' }, /API_TOKENS\[0\]: the secret is shorter[^]*RATE: "x" is not/],
    ] as [string[], NodeJS.ProcessEnv, RegExp][]
  ) {
    const result = await cli(args, { env });
    assert.equal(result.code, 2, JSON.stringify(args));
    assert.equal(result.stdout, '');
    assert.match(result.stderr, message);
    assert.ok(!result.stderr.includes(SECRET) && !/^\s+at /m.test(result.stderr), result.stderr);
  }
});

test('token makes a secret that hash and the gateway agree on', async (t) => {
  const { stdout } = await cli(['token']);
  const [, secret, hashed] = /^secret {2}([A-Za-z0-9_-]{43})\ndigest {2}(sha256:[0-9a-f]{64})\n$/.exec(stdout)!;
  assert.deepEqual(await cli(['hash'], { input: `${secret}\n` }), { code: 0, stdout: `${hashed}\n`, stderr: '' });
  const { gateway } = await startBoth(t, { tokens: { a: { secret: hashed! } } });
  assert.equal((await ask(gateway, { headers: { authorization: `Bearer ${secret}` } })).status, 200);
  assert.equal((await ask(gateway, { headers: { authorization: `Bearer ${hashed}` } })).status, 401);
  const named = (await cli(['token', 'phone'])).stdout.trimEnd().split('\n');
  assert.notEqual(named[0], `secret  ${secret}`);
  assert.deepEqual(JSON.parse(`{${named[2]}}`), { phone: { secret: named[1]!.replace('digest  ', '') } });
  assert.equal((await cli(['hash'], { input: 'short\n' })).code, 2);
});

test('--check says in words what each token may do, and nothing of its secret', async (t) => {
  const file = join(folder(t), 'gateway.json');
  writeFileSync(
    file,
    JSON.stringify({
      listen: ':8880',
      backend: { url: `http://u:${OTHER}@backend:1/p/` },
      tokens: {
        home: {
          secret: SECRET,
          allow: ['send', 'GET /v1/groups/:number'],
          senders: [FROM],
          recipients: [TO, 'group.*'],
          rate: '30/1m',
          clients: ['10.0.0.0/8'],
          expires: '2020-01-01',
          methods: ['path'],
        },
        plain: { secret: OTHER },
        hook: {
          secret: `${OTHER}2`,
          defaults: { number: FROM, recipients: [TO, GROUP], text_mode: 'styled' },
          message: '{{x}}',
        },
        other: { secret: `${OTHER}3`, senders: [FROM], message: '{{x}}' },
        barred: {
          secret: `${OTHER}4`,
          senders: [FROM],
          recipients: [TO],
          defaults: { number: FROM, recipients: [TO, STRANGER] },
        },
      },
    }),
    { mode: 0o600 },
  );
  const { code, stdout } = await cli(['--check', '--config', file]);
  assert.equal(code, 0);
  assert.equal(
    stdout,
    `The configuration is good.
backend http://backend:1/p
tokens 5
  home
    may call     send, GET /v1/groups/:number
    presented    as path
    sends from   ${FROM}
    sends to     ${TO}, group.*
    rate         30/1m
    from         10.0.0.0/8
    expires      2020-01-01T23:59:59.999Z (it has)
  plain
    may call     send, info
    presented    as bearer, basic, body
    sends from   any account
    sends to     anybody
    rate         no limit
    from         any address
    expires      never
  hook
    may call     send, info
    presented    as bearer, basic, body
    sends from   any account
    sends to     anybody
    rate         no limit
    from         any address
    webhooks     become sends, the message by a template; unless they say otherwise, with number ${FROM}, recipients ${TO},${GROUP}, text_mode styled
    expires      never
  other
    may call     send, info
    presented    as bearer, basic, body
    sends from   ${FROM}
    sends to     anybody
    rate         no limit
    from         any address
    webhooks     become sends, the message by a template
    expires      never
  barred
    may call     send, info
    presented    as bearer, basic, body
    sends from   ${FROM}
    sends to     ${TO}
    rate         no limit
    from         any address
    webhooks     become sends; unless they say otherwise, with number ${FROM}, recipients ${TO},${STRANGER}; which will be refused: This token may not send to one of these recipients: a phone number that is not on its list.
    expires      never
`,
  );
});

test('render prints the send that would be made of a payload, and sends nothing', async (t) => {
  const backend = await startBackend(t);
  const file = join(folder(t), 'gateway.json');
  writeFileSync(
    file,
    JSON.stringify({
      backend: { url: backend.url },
      tokens: {
        hook: {
          secret: SECRET,
          senders: [FROM],
          recipients: [TO],
          defaults: { ...DEFAULTS, text_mode: 'styled' },
          message: '{{#alerts}}\n{{name}}\n{{/alerts}}',
        },
        plain: { secret: OTHER },
        reader: { secret: `${OTHER}2`, allow: ['info'], defaults: DEFAULTS },
      },
    }),
  );
  const render = (input: string, ...args: string[]): ReturnType<typeof cli> =>
    cli(['render', ...args, '--config', file], { input });
  const payload = { alerts: [{ name: 'ü' }, { name: 'b' }], number: 2, auth: OTHER };
  const made = { ...DEFAULTS, text_mode: 'styled', message: 'ü\nb\n' };
  for (const input of [JSON.stringify(payload), `payload=${encodeURIComponent(JSON.stringify(payload))}`]) {
    const { code, stdout, stderr } = await render(input, 'hook');
    assert.deepEqual([code, stderr, JSON.parse(stdout)], [0, '', made]);
  }
  assert.deepEqual(
    JSON.parse((await cli(['--config', file, 'render', 'hook'], { input: JSON.stringify(payload) })).stdout),
    made,
  );
  const tooLarge = `{"a":"${'x'.repeat(1024 * 1024)}"}`;
  const toStranger = JSON.stringify({ ...payload, recipients: [STRANGER] });
  const fromStranger = JSON.stringify({ ...payload, number: STRANGER });
  const refused: [number, string, string, RegExp][] = [
    [1, 'hook', '{"a":1}', /^The send would lack message; the body's top-level keys are "a"\. .*\n$/],
    [1, 'hook', toStranger, /^This token may not send to one of these recipients: a phone number .*\.\n$/],
    [1, 'hook', fromStranger, /^This token may not send from, or read, that account\.\n$/],
    [1, 'hook', '{"a":x}', /^The body is not a JSON object: a value is expected, at byte 6\.\n$/],
    [1, 'reader', '{"message":"x"}', /^This token may not use this endpoint\.\n$/],
    [1, 'hook', tooLarge, /^The body is larger than this gateway accepts\.\n$/],
    [2, 'hock', '{}', /^there is no token of that name; there are "hook", "plain", "reader"\n$/],
    [2, SECRET, '{}', /^there is no token of that name/],
    [2, 'plain', '{}', /^the token "plain" has neither "defaults" nor "message", and passes on what is posted\n$/],
  ];
  for (const [code, name, input, message] of refused) {
    const result = await render(input, name);
    assert.deepEqual([result.code, result.stdout], [code, ''], result.stderr);
    assert.ok(result.stderr.startsWith('gateway: '), result.stderr);
    assert.match(result.stderr.slice('gateway: '.length), message);
    assert.ok(!result.stderr.includes(SECRET) && !result.stderr.includes(OTHER), result.stderr);
  }
  assert.equal(backend.connections, 0);
});

test('render tells JSON, forms and texts apart as the gateway does, where no Content-Type is known', async (t) => {
  const file = join(folder(t), 'gateway.json');
  const tokens = {
    hook: { secret: SECRET, defaults: DEFAULTS, allow: ['GET /v2/send'], message: '{{who}}{{message}}' },
  };
  writeFileSync(file, JSON.stringify({ tokens }));
  const picture = multipart([['message', 'x'], ['f', 'y', '; filename="a/b.txt"\r\nContent-Type: text/plain']]).body;
  for (
    const [input, made] of [
      ['{"message":"x"}', { message: 'x' }],
      ['Backup done: \x1b[32m5\x1b[m files\r\n', { message: 'Backup done: 5 files\n' }],
      ['temp=23', { message: 'temp=23' }],
      ['message=a+b&view_once=true', { message: 'a b', view_once: 'true' }],
      ['who=me and you', { message: 'me and you' }],
      ['data={"who":1}', { message: '1' }],
      [picture, { message: 'x', base64_attachments: ['data:text/plain;filename=b.txt;base64,eQ=='] }],
      [picture.replaceAll('--limit', '----a b:c'), {
        message: 'x',
        base64_attachments: ['data:text/plain;filename=b.txt;base64,eQ=='],
      }],
      ['---\nfront: matter\n', { message: '---\nfront: matter\n' }],
    ] as [string, object][]
  ) {
    const { code, stdout, stderr } = await cli(['render', 'hook', '--config', file], { input });
    assert.deepEqual([code, stderr, JSON.parse(stdout || '{}')], [0, '', { ...DEFAULTS, ...made }]);
  }
  const broken = await cli(['render', 'hook', '--config', file], { input: '{x' });
  assert.deepEqual([broken.code, broken.stdout], [1, '']);
});

test("--check names an endpoint that a webhook's token lacks; render has the gateway's limits, and no demo", async (t) => {
  const file = join(folder(t), 'gateway.json');
  const write = (token: TokenConfig, more: GatewayConfig = {}): void =>
    writeFileSync(
      file,
      JSON.stringify({ tokens: { hook: { secret: SECRET, defaults: DEFAULTS, ...token } }, ...more }),
    );
  write({ allow: ['info'] });
  assert.match(
    (await cli(['--check', '--config', file])).stdout,
    /which will be refused: This token may not use this endpoint\./,
  );
  const fill = (bytes: number): string => `{"message":"x","more":"${'y'.repeat(bytes - 25)}"}`;
  write({});
  assert.equal((await cli(['render', 'hook', '--config', file], { input: fill(1024 * 1024) })).code, 0);
  write({}, { limits: { body: '1KiB' } });
  assert.match(
    (await cli(['render', 'hook', '--config', file], { input: fill(1025) })).stderr,
    /larger than this gateway accepts/,
  );
  const demo = await cli(['render', 'hook', '--demo', '--listen', '127.0.0.1:0'], { input: '{}' });
  assert.equal(demo.code, 2);
  assert.match(demo.stderr, /--demo brings its own/);
});

test('SIGTERM ends it with 0 after the running request, and SIGINT does too', async (t) => {
  for (const signal of ['SIGTERM', 'SIGINT'] as const) {
    let finish = (): void => {};
    const backend = await startBackend(t, (req, res) => {
      req.resume();
      finish = () => res.end('{}');
    });
    const gateway = await startProcess(t, { backend });
    const running = ask(gateway, { body: MESSAGE, headers: BEARER });
    await until(() => backend.seen.length === 1);
    const closing = gateway.close(signal);
    // It refuses new connections as soon as it has heard of the signal.
    for (;;) {
      const refused = await ask(gateway, { path: '/healthz' }).then(() => false, () => true);
      if (refused) break;
    }
    finish();
    assert.equal((await running).status, 200);
    await closing;
    await until(() => gateway.output().includes('"stopped"'));
  }
});

// The handlers of signals came a moment after the line that says "listening".
test('a SIGTERM in the moment in which it listens ends it with 0, and so does a demonstration', {
  skip: !isNode && 'only Node loads a module before the program',
}, async (t) => {
  const kill = `if (String(text).includes('"listening"')) process.kill(process.pid, 'SIGTERM');`;
  const preload = script(
    t,
    `const { stdout } = process, { write } = stdout;
     stdout.write = (text, ...more) => { ${kill} return write.call(stdout, text, ...more); };`,
  ).at(-1)!;
  for (const args of [[], ['--demo']]) {
    const program: Program = [process.execPath, ...LOADER, '--import', preload, fileURLToPath(FILE)];
    const child = start(args, { LISTEN: '127.0.0.1:0', LOG_FORMAT: 'json' }, program);
    assert.deepEqual(await once(child, 'exit'), [0, null], child.output());
    assert.match(child.output(), /"listening"/);
  }
});

/** What curl does with the arguments in a line, so that the tests need no curl. */
function askAsCurl(line: string): Promise<Answer> {
  const words = Array.from(line.matchAll(/'([^']*)'|(\S+)/g), (match) => match[1] ?? match[2]!).slice(1);
  const headers: Record<string, string> = {};
  let [url, method, body]: (string | undefined)[] = [];
  for (let at = 0; at < words.length; at++) {
    const word = words[at]!;
    if (word === '-H') headers[words[++at]!.split(': ')[0]!] = words[at]!.split(': ')[1]!;
    else if (word === '-u') headers.authorization = basic(words[++at]!);
    else if (word === '-d') body = words[++at];
    else if (word === '-X') method = words[++at];
    else url = word;
  }
  if (body !== undefined) headers['content-type'] = 'application/x-www-form-urlencoded';
  const { port, pathname, search } = new URL(url!.replace(/^(?!http:)/, 'http://'));
  const path = pathname + search;
  return ask({ port: Number(port) }, { method: method ?? 'POST', path, headers, ...(body !== undefined && { body }) });
}

/** Starts a demonstration. Its first command shows port and token, and is no longer than a line. */
async function startDemo(
  t: TestContext,
  how: { env?: NodeJS.ProcessEnv; program?: Program } = {},
): Promise<Process & { first: string; secret: string }> {
  const gateway = await startProcess(t, { args: ['--demo'], ...how });
  await until(() => /^curl .*'\n$/m.test(gateway.output()));
  const [first, secret = ''] = /^curl -u api:([\w-]+) 127\.0\.0\.1:\d+.*$/m.exec(gateway.output())!;
  return Object.assign(gateway, { first, secret });
}

test('--demo: every curl line that it prints does what it says, and the token does not reach its backend', async (t) => {
  const { output, close, first, secret } = await startDemo(t);
  assert.equal(output().match(/curl/g)!.length, 1);
  assert.ok(first.length <= 80, first);
  assert.equal((await askAsCurl(first)).status, 201);
  await until(() => output().includes('# and what it refuses'));
  await until(() => output().includes('/v1/register'));
  assert.match(output(), /^backend got {3}POST \/v2\/send .*"message":"Hi"[^]*# bearer\ncurl /m);
  const printed = output();
  const lines = printed.split('\n').filter((line) => line.startsWith('curl ') && line !== first);
  assert.equal(lines.length, 5);
  for (const line of lines) {
    const answer = await askAsCurl(line);
    if (line !== lines[4]) assert.equal(answer.status, 201, line);
    else assert.equal(answer.json.code, 'setup_blocked');
  }
  await until(() => output().includes('setup_blocked'));
  const after = output().slice(printed.length);
  for (const form of ['bearer', 'query', 'path', 'body']) {
    assert.match(after, new RegExp(`backend got {3}POST /v2/send .*"Hello by ${form}"`));
  }
  assert.ok(!after.includes(secret), after);
  assert.equal(after.match(/curl/g), null);
  await close('SIGINT');
});

// The stand-in backend of the demonstration ended the process.
test('--demo survives a client that leaves in the middle', async (t) => {
  const { secret, output, ...to } = await startDemo(t);
  const { socket } = open(t, to);
  socket.write(
    `${post(secret, 1_000_000)}{"message":"${'x'.repeat(200_000)}`,
    () => socket.destroy(),
  );
  await until(() => output().includes('client_left'));
  assert.equal((await ask(to, { headers: { authorization: `Bearer ${secret}` } })).status, 200);
});

test('the command line asks the backend once at start, and after a reload to another, and says what it heard', async (t) => {
  const asked: string[] = [];
  const replies: Record<string, [status: number, body: string, headers?: http.OutgoingHttpHeaders]> = {
    '/401': [401, 'who are you?'],
    '/500': [500, '{}'],
    '/text': [200, 'hello'],
    '/list': [200, '[]'],
    '/moved': [301, '', { location: '/ok/v1/about' }],
    '/ok': [200, '{"version":"0.100","mode":"json-rpc","more":[1]}'],
  };
  const backend = http.createServer((req, res) => {
    const { 'user-agent': agent = '', authorization } = req.headers;
    asked.push(`${req.method} ${req.url} ${/^signal-gateway\/[\d.]+$/.test(agent)} ${authorization}`);
    const [status, body, headers] = replies[req.url!.replace('/v1/about', '')]!;
    res.writeHead(status, headers).end(body);
  }).listen(0, '127.0.0.1');
  await once(backend, 'listening');
  t.after(() => void backend.close().closeAllConnections());
  const host = `127.0.0.1:${(backend.address() as AddressInfo).port}`;
  const file = join(folder(t), 'gateway.json');
  const write = (url: string): void =>
    writeFileSync(file, JSON.stringify({ tokens: { a: { secret: `sha256:${'1'.repeat(64)}` } }, backend: { url } }));
  write(`http://api:password-of-backend@${host}/ok/`);
  const gateway = await startProcess(t, { args: ['--config', file] });
  const lines = (): LogLine[] => logLines(gateway.log).filter(({ message }) => message.startsWith('the backend '));
  await until(() => lines().length === 1);
  const heard = async (url: string): Promise<LogLine> => {
    const before = lines().length;
    write(url);
    process.kill(gateway.child.pid!, 'SIGHUP');
    await until(() => lines().length > before);
    return lines().at(-1)!;
  };
  const { time: _, ...first } = lines()[0]!;
  assert.deepEqual(first, {
    ...{ level: 'info', message: 'the backend answers' },
    ...{ backend: `http://${host}/ok`, version: '0.100', mode: 'json-rpc' },
  });
  const wrong = 'the backend does not answer as it should';
  const spare = await sparePort();
  const rows: [url: string, level: string, message: string, said: RegExp][] = [
    [`http://${host}/401`, 'info', 'the backend answers', /"status":401/],
    [`http://${host}/500`, 'warn', wrong, /"reason":"status 500"/],
    [`http://${host}/text`, 'warn', wrong, /"reason":"no JSON object"/],
    [`http://${host}/list`, 'warn', wrong, /"reason":"no JSON object"/],
    [`http://${host}/moved`, 'warn', wrong, /"reason":"status 301"/],
    [`http://127.0.0.1:${spare}`, 'warn', wrong, /refused/i],
    ['http://127.0.0.1:6000', 'warn', wrong, /port|refused/i], // a port that fetch refuses, on Node and Bun
    ['http://nowhere.invalid', 'warn', wrong, /ENOTFOUND|EAI_AGAIN|lookup|dns|connect/i],
  ];
  for (const [url, level, message, said] of rows) {
    const line = await heard(url);
    assert.deepEqual([line.level, line.message], [level, message], url);
    assert.match(JSON.stringify(line), said);
  }
  assert.deepEqual(
    asked,
    ['ok', '401', '500', 'text', 'list', 'moved'].map((path) => `GET /${path}/v1/about true undefined`),
  );
  assert.doesNotMatch(gateway.output(), /password-of-backend/);
  await gateway.close();
});

test('an embedded gateway asks the backend nothing at start', async (t) => {
  const { backend, gateway } = await startBoth(t);
  await settled(gateway);
  assert.equal(backend.server.listenerCount('connection') > 0 && backend.connections, 0);
});

section('CLIENTS'); // ─────────────────────────────────────────────────────────────────────────────

test("Home Assistant's library: GET /v1/about with userinfo, then a send that must be exactly 201", async (t) => {
  const { gateway } = await startBoth(t);
  const headers = {
    'authorization': basic(`api:${SECRET}`),
    'user-agent': 'python-requests/2.32.5',
    'accept-encoding': 'gzip, deflate',
    'accept': '*/*',
    'connection': 'keep-alive',
  };
  const about = await ask(gateway, { path: '/v1/about', headers });
  assert.equal(about.status, 200);
  assert.match(about.headers['content-type']!, /^application\/json/);
  assert.deepEqual(about.json.versions, ['v1', 'v2']);
  const sent = await ask(gateway, {
    body: { ...MESSAGE, base64_attachments: [Buffer.from('image').toString('base64')] },
    headers: { ...headers, 'content-type': 'application/json' },
  });
  assert.equal(sent.status, 201);
  assert.deepEqual(sent.json, [{ timestamp: '1700000000000' }]);
});

test('shoutrrr sends a bearer token, frigate-notify no Content-Type, alertmanager-webhook-signal empty fields', async (t) => {
  const { backend, gateway } = await startBoth(t);
  for (
    const body of [
      MESSAGE,
      { ...MESSAGE, base64_attachments: null },
      {
        ...MESSAGE,
        base64_attachments: null,
        mentions: null,
        quote_mentions: null,
        quote_author: '',
        quote_message: '',
        sticker: '',
        text_mode: '',
      },
      { ...MESSAGE, recipient: '', link_preview: null, auth: null },
      { ...MESSAGE, recipient: null, members: null, admins: null, answers: null, selected_answers: null },
    ]
  ) {
    assert.equal(
      (await ask(gateway, { body, headers: { ...BEARER, 'user-agent': 'Go-http-client/1.1' } })).status,
      201,
    );
    assert.equal(gotJson(backend).auth, undefined);
  }
  assert.equal(backend.sent.length, 5);
});

test('wget sends nothing until it is challenged, and signalbot tries TLS first', async (t) => {
  const { gateway } = await startBoth(t);
  const challenged = await ask(gateway, { body: MESSAGE });
  assert.equal(challenged.status, 401);
  assert.match(String(challenged.headers['www-authenticate']), /Basic realm="signal"/);
  assert.equal((await ask(gateway, { body: MESSAGE, headers: { authorization: basic(`api:${SECRET}`) } })).status, 201);
  const hello = Buffer.from('160301010e0100010a0303000102030405060708090a0b0c0d0e0f', 'hex');
  assert.match(
    await raw(gateway, hello),
    /^HTTP\/1\.1 400 Bad Request\r\nConnection: close\r\n[^]*"code":"bad_request"/,
  );
  assert.equal((await ask(gateway, { path: '/v1/health', headers: BEARER })).status, 204);
});

section('RECIPES'); // ─────────────────────────────────────────────────────────────────────────────

interface Recipe {
  heading: string;
  form: 'bearer' | 'basic' | 'query';
  /** What is posted, and the text that must reach the backend. */
  posts: [name: string, payload: object, text: string][];
  /** How the sender encodes it; JSON if absent. */
  encode?: ((json: string) => Ask)[];
}

const asForm = (json: string): Ask => ({
  body: `payload=${encodeURIComponent(json)}`,
  headers: { 'content-type': 'application/x-www-form-urlencoded' },
});
const asMultipart = (json: string): Ask => ({
  ...multipart([['data', json]]),
  headers: { 'content-type': 'multipart/form-data; boundary=limit', 'transfer-encoding': 'chunked' },
});
const asJson = (json: string): Ask => ({ body: json, headers: { 'content-type': 'application/json' } });

const RECIPES: Recipe[] = [
  {
    heading: 'Grafana',
    form: 'bearer',
    posts: [['an alert', {
      receiver: 'Phone',
      status: 'firing',
      orgId: 1,
      version: '1',
      groupKey: '{}:{}',
      truncatedAlerts: 0,
      externalURL: 'https://grafana.example.org/',
      groupLabels: {},
      commonLabels: {},
      commonAnnotations: {},
      alerts: [{
        status: 'firing',
        labels: { alertname: 'High memory' },
        annotations: { summary: 'Zone us-1 is short of memory' },
        startsAt: '2026-01-01T00:00:00Z',
        endsAt: '0001-01-01T00:00:00Z',
        generatorURL: 'https://grafana.example.org/a',
        fingerprint: 'c6eadffa',
      }],
      title: '[FIRING:1] High memory',
      state: 'alerting',
      message: '**Firing**\n\nValue: A=1\nLabels:\n - alertname = High memory\n',
    }, '**Firing**\n\nValue: A=1\nLabels:\n - alertname = High memory\n']],
  },
  {
    heading: 'Alertmanager',
    form: 'bearer',
    posts: [
      ['one alert', {
        receiver: 'sms',
        status: 'firing',
        version: '4',
        groupKey: '{}/{severity="critical"}:{alertname="ProbeFailure"}',
        truncatedAlerts: 0,
        externalURL: 'http://alertmanager:9093',
        groupLabels: { alertname: 'ProbeFailure' },
        commonLabels: {},
        commonAnnotations: { summary: 'A probe failed', description: 'of two' },
        alerts: [{
          status: 'firing',
          labels: { alertname: 'ProbeFailure' },
          annotations: { description: 'It did not answer', summary: 'BlackBox Probe Failure' },
          startsAt: '2023-02-06T13:08:45.828Z',
          endsAt: '0001-01-01T00:00:00Z',
          generatorURL: 'http://prometheus/graph',
          fingerprint: '1a30ba71',
        }],
      }, 'Alerts for sms\nfiring: ProbeFailure: BlackBox Probe Failure'],
      [
        'several alerts, one without a summary',
        {
          receiver: 'sms',
          status: 'firing',
          version: '4',
          truncatedAlerts: 4,
          groupLabels: {},
          commonLabels: {},
          commonAnnotations: {},
          alerts: [
            {
              status: 'firing',
              labels: { alertname: 'DiskFull', instance: 'pi-1' },
              annotations: { summary: '3% left on <sda> & "sdb"' },
            },
            { status: 'resolved', labels: { alertname: 'HostDown' }, annotations: { description: 'pi-2 is back' } },
            { status: 'firing', labels: { alertname: 'Odd' }, annotations: {} },
          ],
        },
        'Alerts for sms\nfiring: DiskFull on pi-1: 3% left on <sda> & "sdb"\nresolved: HostDown: pi-2 is back\nfiring: Odd\nand 4 more',
      ],
    ],
  },
  {
    heading: 'Uptime Kuma',
    form: 'bearer',
    encode: [asJson, asMultipart],
    posts: [['a monitor that is down', {
      heartbeat: {
        monitorID: 1,
        status: 0,
        time: '2026-01-01 00:00:00',
        msg: 'timeout',
        ping: null,
        important: true,
        duration: 60,
      },
      monitor: { id: 1, name: 'web', url: 'https://x', type: 'http' },
      msg: '[web] [🔴 Down] timeout',
    }, '[web] [🔴 Down] timeout']],
  },
  {
    heading: 'Sonarr',
    form: 'basic',
    posts: [
      ['its test', {
        eventType: 'Test',
        instanceName: 'Sonarr',
        applicationUrl: '',
        series: { id: 1, title: 'Test Title', path: 'C:\\testpath', tvdbId: 1234, tags: ['test-tag'] },
        episodes: [{ id: 123, episodeNumber: 1, seasonNumber: 1, title: 'Test title' }],
      }, 'Sonarr: Test: Test Title\nS1E1 Test title'],
      ['two episodes', {
        eventType: 'Grab',
        instanceName: 'Sonarr',
        series: { id: 2, title: 'A Series' },
        episodes: [{ episodeNumber: 14, seasonNumber: 2, title: 'First' }, {
          episodeNumber: 15,
          seasonNumber: 2,
          title: 'Second',
        }],
        release: { quality: 'WEBDL-1080p' },
      }, 'Sonarr: Grab: A Series\nS2E14 First\nS2E15 Second'],
      ['its health', {
        eventType: 'Health',
        instanceName: 'Sonarr',
        level: 'warning',
        message: 'No indexer is available',
        type: 'IndexerStatusCheck',
        wikiUrl: 'https://wiki.servarr.com/',
      }, 'Sonarr: Health\nNo indexer is available'],
    ],
  },
  {
    heading: 'Radarr',
    form: 'basic',
    posts: [
      ['its test', {
        eventType: 'Test',
        instanceName: 'Radarr',
        applicationUrl: '',
        movie: {
          id: 1,
          title: 'Test Title',
          year: 1970,
          releaseDate: '1970-01-01',
          folderPath: 'C:\\testpath',
          tmdbId: 0,
        },
        remoteMovie: { tmdbId: 1234, imdbId: '5678', title: 'Test title', year: 1970 },
        release: {
          quality: 'Test Quality',
          qualityVersion: 1,
          releaseGroup: 'Test Group',
          releaseTitle: 'Test Title',
          indexer: 'Test Indexer',
          size: 9999999,
        },
      }, 'Radarr: Test: Test Title (1970)\nTest Title'],
      ['a download', {
        eventType: 'Download',
        instanceName: 'Radarr',
        movie: { id: 2, title: 'A Film', year: 2003 },
        movieFile: { relativePath: 'A Film (2003).mkv' },
        isUpgrade: false,
      }, 'Radarr: Download: A Film (2003)'],
    ],
  },
  {
    heading: 'GitHub',
    form: 'query',
    encode: [asJson, asForm],
    posts: [
      ['a ping', {
        zen: 'Keep it logically awesome.',
        hook_id: 1,
        hook: {},
        repository: {},
        sender: { login: 'octocat' },
      }, 'Keep it logically awesome.'],
      ['a pull request', {
        action: 'opened',
        number: 2,
        pull_request: { title: 'Less is more', html_url: 'https://github.com/o/r/pull/2' },
        repository: { full_name: 'o/r' },
        sender: { login: 'octocat' },
      }, 'o/r: pull request 2 opened by octocat: Less is more\nhttps://github.com/o/r/pull/2'],
      ['an issue', {
        action: 'closed',
        issue: { number: 7, title: 'It is broken', html_url: 'https://github.com/o/r/issues/7' },
        repository: { full_name: 'o/r' },
        sender: { login: 'octocat' },
      }, 'o/r: issue 7 closed by octocat: It is broken\nhttps://github.com/o/r/issues/7'],
      ['a branch that is deleted', {
        ref: 'refs/heads/old',
        deleted: true,
        pusher: { name: 'octocat' },
        head_commit: null,
        commits: [],
        repository: { full_name: 'o/r' },
        sender: { login: 'octocat' },
      }, 'o/r: octocat deleted refs/heads/old'],
      ['a push', {
        ref: 'refs/heads/main',
        deleted: false,
        pusher: { name: 'octocat' },
        head_commit: { message: 'Fix it', url: 'https://github.com/o/r/commit/1' },
        commits: [],
        repository: { full_name: 'o/r' },
        sender: { login: 'octocat' },
      }, 'o/r: octocat pushed to refs/heads/main: Fix it\nhttps://github.com/o/r/commit/1'],
    ],
  },
  {
    heading: 'Gitea, Forgejo',
    form: 'bearer',
    encode: [asJson, asForm],
    posts: [
      ['a push', {
        ref: 'refs/heads/main',
        before: '0',
        after: '1',
        compare_url: 'https://git.example.org/o/r/compare/0...1',
        commits: [{ id: '1', message: 'Fix it' }, { id: '2', message: 'And that' }],
        repository: { full_name: 'o/r' },
        pusher: { login: 'ada' },
        sender: { login: 'ada' },
      }, 'o/r: ada pushed to refs/heads/main\nFix it\nAnd that'],
      ['a release', {
        action: 'published',
        release: { tag_name: 'v1', html_url: 'https://git.example.org/o/r/releases/tag/v1' },
        repository: { full_name: 'o/r' },
        sender: { login: 'ada' },
      }, 'o/r: release v1 published by ada\nhttps://git.example.org/o/r/releases/tag/v1'],
      ['a pull request', {
        action: 'opened',
        number: 2,
        pull_request: { number: 2, title: 'Less is more', html_url: 'https://git.example.org/o/r/pulls/2' },
        repository: { full_name: 'o/r' },
        sender: { login: 'ada' },
      }, 'o/r: pull request 2 opened by ada: Less is more\nhttps://git.example.org/o/r/pulls/2'],
      ['an issue', {
        action: 'opened',
        number: 7,
        issue: { number: 7, title: 'It is broken', html_url: 'https://git.example.org/o/r/issues/7' },
        repository: { full_name: 'o/r' },
        sender: { login: 'ada' },
      }, 'o/r: issue 7 opened by ada: It is broken\nhttps://git.example.org/o/r/issues/7'],
    ],
  },
  {
    heading: 'Apprise, as JSON',
    form: 'basic',
    posts: [
      ['without a title', { version: '1.0', title: '', message: 'hello', attachments: [], type: 'info' }, 'hello'],
      [
        'with a title',
        { version: '1.0', title: 'Backup', message: 'It is done.', attachments: [], type: 'success' },
        'Backup\nIt is done.',
      ],
    ],
  },
  {
    heading: 'Seerr, Overseerr, Jellyseerr',
    form: 'bearer',
    posts: [
      ['a request', {
        notification_type: 'MEDIA_PENDING',
        event: 'New Movie Request',
        subject: 'A Film (2003)',
        message: 'Fish get lost.',
        image: 'https://image.example.org/a.jpg',
        media: { media_type: 'movie', tmdbId: '12', tvdbId: '', status: 'PENDING', status4k: 'UNKNOWN' },
        request: { request_id: '1', requestedBy_username: 'ada' },
        issue: null,
        comment: null,
        extra: [],
      }, 'New Movie Request: A Film (2003)\nFish get lost.\nRequested by ada'],
      ['a comment', {
        notification_type: 'ISSUE_COMMENT',
        event: 'New Comment on Video Issue',
        subject: 'A Film (2003)',
        message: 'It is dark.',
        media: {},
        request: null,
        issue: { issue_id: '1' },
        comment: { comment_message: 'Better now?', commentedBy_username: 'bob' },
        extra: [],
      }, 'New Comment on Video Issue: A Film (2003)\nbob: Better now?'],
      ['its test', {
        notification_type: 'TEST_NOTIFICATION',
        event: '',
        subject: 'Test Notification',
        message: 'Check check, 1, 2, 3. Are we coming in clear?',
        image: '',
        media: null,
        request: null,
        issue: null,
        comment: null,
        extra: [],
      }, 'TEST_NOTIFICATION: Test Notification\nCheck check, 1, 2, 3. Are we coming in clear?'],
    ],
  },
];

/** A section of RECIPES.md, to the next heading of its level or above. */
function sectionOf(heading: string): string {
  const [, level, text] = new RegExp(`\\n(##+) ${heading}\\n([^]*)`).exec(COOKBOOK) ?? assert.fail(heading);
  return text!.split(new RegExp(`\\n#{2,${level!.length}} `))[0]!;
}

/** The file of RECIPES.md, its token changed as a recipe says it: `null` takes a line out. */
function recipeConfig(recipe: string): GatewayConfig {
  const config = JSON.parse(/```json\n([^]*?)```/.exec(sectionOf('The file'))![1]!) as GatewayConfig;
  const [[name, token]] = Object.entries(config.tokens!) as [[string, TokenConfig]];
  const changed = Object.entries({ ...token, ...JSON.parse(recipe) }).filter(([, value]) => value !== null);
  return { ...config, tokens: { [name]: Object.fromEntries(changed) } };
}

/** A gateway that runs a configuration of RECIPES.md, with a secret in the place of the placeholder. */
function startRecipe(t: TestContext, { tokens }: GatewayConfig): Promise<{ backend: Backend; gateway: Gateway }> {
  const [name, token] = Object.entries(tokens!)[0]!;
  return startBoth(t, { tokens: { [name]: { ...token, secret: SECRET } } });
}

for (const { heading, form, posts, encode = [asJson] } of RECIPES) {
  test(`recipe: ${heading}`, async (t) => {
    const section = sectionOf(heading);
    assert.ok(section.includes(`(${form}`), 'the form is named');
    const { backend, gateway } = await startRecipe(t, recipeConfig(/```json\n([^]*?)```/.exec(section)![1]!));
    const { headers, path = '/v2/send' } = FORMS.find((known) => known.name === form)!.ask(SECRET);
    for (const [name, payload, text] of posts) {
      if (heading !== 'Grafana') assert.doesNotMatch(text, /[\s:]$/, `${name}: something is left hanging`);
      for (const encoding of encode) {
        const post = encoding(JSON.stringify(payload));
        const answer = await ask(gateway, { ...post, path, headers: { ...post.headers, ...headers } });
        assert.equal(answer.status, 201, `${name}: ${answer.text}`);
        assert.deepEqual(gotJson(backend), {
          ...DEFAULTS,
          ...(heading === 'Grafana' && { text_mode: 'styled' }),
          message: text,
        }, name);
        assert.doesNotMatch(backend.seen.at(-1)!.url, /@auth/);
      }
    }
  });
}

/** What a recipe of "Scripts and devices" needs: where the gateway is, and a folder for its files. */
interface Place extends Gateway {
  dir: string;
}

interface DeviceRecipe {
  heading: string;
  form: string;
  /** What must reach the backend. */
  texts: (string | RegExp)[];
  /** Does what the device would do with the blocks of its recipe. */
  run: (blocks: string[], to: Place) => Promise<unknown> | unknown;
  /** It is a program that may not be here. */
  needs?: string;
}

/** Runs a script as a shell would; returns its exit code. */
async function shell(script: string, dir: string, env: NodeJS.ProcessEnv = {}, args: string[] = []): Promise<number> {
  const options = { cwd: dir, env: { PATH: process.env.PATH, ...env }, stdio: 'ignore' } as const;
  const [code] = await once(spawn('sh', ['-c', script, 'sh', ...args], options), 'close') as [number];
  return code;
}

/** The target that a recipe names, which a device asks the gateway for. */
function targetIn(block: string): string {
  return /:\d+\]? ?(\/[^\s'"]*(?: [\w ]+(?= ENDON))?)/.exec(block)![1]!.replaceAll(' ', '%20');
}

/** As the HTTPClient of the ESP8266 writes a request. */
function askAsEsp(to: Place, start: string, headers: string[] = [], body = ''): Promise<string> {
  const length = body && [`Content-Length: ${Buffer.byteLength(body)}`];
  const own = [
    'Host: gateway:8880',
    'User-Agent: ESP8266HTTPClient',
    'Accept-Encoding: identity;q=1,chunked;q=0.1,*;q=0',
  ];
  return raw(to, [`${start} HTTP/1.1`, ...own, 'Connection: close', ...headers, ...length, '', body].join('\r\n'));
}

/** The headers that a recipe in YAML or a table sets, and the address that it posts to. */
function postIn(block: string): { path: string; headers: http.OutgoingHttpHeaders } {
  const type = /content_type: (.*)/.exec(block)?.[1] ?? 'application/json';
  const authorization = /Authorization:? +(Bearer \S+)/.exec(block)![1]!;
  return { path: targetIn(block), headers: { authorization, 'content-type': type } };
}

const DEVICES: DeviceRecipe[] = [
  {
    heading: 'Shell and cron',
    form: 'bearer',
    needs: 'curl',
    texts: [
      'Backup done: 5 files\n',
      /^total (?:\P{Cc}|\n)*snap\.jpg\n/u,
      'Backup done: 5 files',
      'Front door',
      'Backup done: 5 files',
      /^\S+: "sh -c printf [^]* exit 3" ended with 3\nout\nerr\n$/,
    ],
    run: async ([, lines, report], { dir }) => {
      writeFileSync(join(dir, 'snap.jpg'), 'a picture');
      for (const line of lines!.trim().split('\n')) assert.equal(await shell(line, dir), 0, line);
      assert.equal(await shell(report!, dir, {}, ['sh', '-c', 'echo all is well']), 0);
      assert.equal(
        await shell(report!, dir, {}, ['sh', '-c', 'printf "\x1b[31mout\x1b[m\\n"; echo err >&2; exit 3']),
        3,
      );
    },
  },
  {
    heading: 'systemd, OnFailure=',
    form: 'bearer',
    needs: 'curl',
    texts: ['backup.service: failed --no-pager --lines=20\n'],
    run: async ([unit], { dir }) => {
      const [, command] = /^ExecStart=\/bin\/sh -c '(.*)'$/m.exec(unit!)!;
      assert.match(unit!, /^LoadCredential=signal-send:/m);
      writeFileSync(join(dir, 'systemctl'), '#!/bin/sh\necho "$4: failed $2 $3"\nexit 3\n', { mode: 0o755 });
      const script = command!.replaceAll('%i', 'backup.service').replaceAll('%d', dir);
      assert.equal(await shell(script, dir, { PATH: `${dir}:${process.env.PATH}` }), 0);
    },
  },
  {
    heading: 'monit',
    form: 'bearer',
    needs: 'curl',
    texts: ['pi: nginx: failed protocol test [HTTP] at [localhost]:443\n'],
    run: async ([script], { dir }) => {
      const env = {
        MONIT_HOST: 'pi',
        MONIT_SERVICE: 'nginx',
        MONIT_DESCRIPTION: 'failed protocol test [HTTP] at [localhost]:443',
      };
      assert.equal(await shell(script!, dir, env), 0);
    },
  },
  {
    heading: "A router's or a camera's URL action",
    form: 'path',
    texts: ['Somebody is at the door', 'Somebody is at the door'],
    run: async ([url], to) => {
      assert.equal(statusOf(await raw(to, `GET ${targetIn(url!)} HTTP/1.0\r\n\r\n`)), 201);
      assert.equal(statusOf(await rawRequest(to, targetIn(url!), { headers: ['User-Agent: Wget'] })), 201);
    },
  },
  {
    heading: 'Shelly',
    form: 'path',
    texts: ['The washing machine is done', 'The washing machine is done'],
    run: async ([url, script], to) => {
      assert.equal(statusOf(await rawRequest(to, targetIn(url!), { headers: ['User-Agent: shelly'] })), 201);
      type Params = { method: string; url: string; headers: http.OutgoingHttpHeaders; body: string };
      const calls: [string, Params][] = [];
      new Function('Shelly', script!)({ call: (...call: [string, Params]) => calls.push(call) });
      const [[name, { method, url: where, headers, body }]] = calls as [[string, Params]];
      assert.equal(name, 'HTTP.Request');
      assert.equal((await ask(to, { method, path: targetIn(where), headers, body })).status, 201);
    },
  },
  {
    heading: 'Tasmota',
    form: 'path',
    texts: ['Somebody is at the door'],
    run: async ([rule], to) => assert.equal(statusOf(await askAsEsp(to, `GET ${targetIn(rule!)}`)), 201),
  },
  {
    heading: 'ESP8266, ESP32',
    form: 'bearer',
    texts: ['The cellar is wet'],
    run: async ([lines], to) => {
      const headers = Array.from(
        lines!.matchAll(/addHeader\("(.*)", "(.*)"\)/g),
        ([, name, value]) => `${name}: ${value}`,
      );
      const body = /POST\("(.*)"\)/.exec(lines!)![1]!;
      assert.equal(statusOf(await askAsEsp(to, `POST ${targetIn(lines!)}`, headers, body)), 201);
    },
  },
  {
    heading: 'Home Assistant, rest_command',
    form: 'bearer',
    texts: ['recipients=+15559999999&message=Tür offen'],
    run: async ([yaml], to) => {
      assert.match(yaml!, /method: post\n[^]*payload: "\{\{ text \}\}"/);
      const answer = await ask(to, { ...postIn(yaml!), body: 'recipients=+15559999999&message=Tür offen' });
      assert.equal(answer.status, 201);
    },
  },
  {
    heading: 'Home Assistant, notify: rest',
    form: 'bearer',
    texts: ['Door open', 'Door open'],
    run: async ([yaml], to) => {
      const [, target] = /method: POST_JSON\n[^]*target_param_name: (\w+)/.exec(yaml!)!;
      for (const body of [{ message: 'Door open' }, { message: 'Door open', [target!]: TO }]) {
        assert.equal((await ask(to, { ...postIn(yaml!), body })).status, 201);
      }
    },
  },
  {
    heading: 'Synology',
    form: 'bearer',
    texts: ['Volume 1 on nas has degraded.'],
    run: async ([table], to) => {
      const [, name] = /^HTTP body +(\w+) +\(category: message content\)$/m.exec(table!)!;
      const answer = await ask(to, { ...postIn(table!), body: { [name!]: 'Volume 1 on nas has degraded.' } });
      assert.equal(answer.status, 201);
    },
  },
  {
    heading: 'A page',
    form: 'bearer',
    texts: ['Dinner is ready'],
    run: async ([script], to) => {
      const browser = {
        origin: 'https://dash.example:8443',
        'sec-fetch-site': 'cross-site',
        'user-agent': 'Mozilla/5.0',
      };
      const fetch = (url: string, { method, headers, body }: Required<Ask> & { body: string }): Promise<Answer> =>
        ask(to, { method, path: targetIn(url), headers: { ...headers, ...browser }, body });
      const send = new Function('fetch', `${script}; return send`)(fetch) as (text: string) => Promise<Answer>;
      assert.equal((await send('Dinner is ready')).status, 201);
    },
  },
];

const blocksIn = (text: string): string[] =>
  Array.from(text.matchAll(/^```\w+\n([^]*?)^```$/gm), ([, block]) => block!);

for (const { heading, form, texts, needs = 'sh', run } of DEVICES) {
  test(`recipe: ${heading}`, {
    skip: spawnSync('sh', ['-c', `command -v ${needs}`]).status !== 0 && `there is no ${needs}`,
  }, async (t) => {
    const secrets = [SECRET, OTHER];
    const json = blocksIn(sectionOf('Scripts and devices'))[0]!;
    const { tokens, cors } = JSON.parse(json.replace(/sha256:PASTE[^"]*/g, () => secrets.shift()!)) as GatewayConfig;
    const { backend, gateway } = await startBoth(t, { tokens: tokens!, cors: cors! });
    const dir = folder(t);
    const file = join(dir, 'signal-send');
    const here = (block: string): string =>
      block.replaceAll('@auth=TOKEN', `@auth=${OTHER}`).replaceAll('TOKEN', SECRET)
        .replaceAll('gateway:8880', `127.0.0.1:${gateway.port}`).replaceAll('/etc/signal-send', file);
    writeFileSync(file, here(blocksIn(sectionOf('Shell and cron'))[0]!));
    const recipe = sectionOf(heading);
    assert.ok(recipe.includes(`(${form}`), 'the form is named');
    await run(blocksIn(recipe).map(here), { ...gateway, dir });
    assert.equal(backend.sent.length, texts.length);
    for (const [i, { message, number, recipients }] of backend.sent.entries()) {
      assert.deepEqual([number, recipients], [FROM, [TO]]);
      if (texts[i] instanceof RegExp) assert.match(message, texts[i]);
      else assert.equal(message, texts[i]);
    }
    assert.doesNotMatch(`${gateway.log}`, SECRETS);
  });
}

test('the render command of RECIPES.md prints a send', async (t) => {
  const [, json, name] = /^echo '(.*)' \|\n.* --config gateway\.json render (.*)$/m.exec(COOKBOOK)!;
  const file = join(folder(t), 'gateway.json');
  const config = recipeConfig(/```json\n([^]*?)```/.exec(sectionOf('Alertmanager'))![1]!);
  writeFileSync(file, JSON.stringify(config).replace(/sha256:PASTE[^"]*/, SECRET));
  const { code, stdout } = await cli(['--config', file, 'render', name!], { input: json! });
  assert.deepEqual([code, JSON.parse(stdout)], [0, {
    ...DEFAULTS,
    message: 'Alerts for phone\nfiring: DiskFull: 3% left',
  }]);
});

test('every recipe of RECIPES.md is run here', () => {
  assert.deepEqual(
    Array.from(sectionOf('Webhooks').matchAll(/^### (.*)$/gm), ([, heading]) => heading),
    [...RECIPES.map(({ heading }) => heading), 'Another sender'],
  );
  assert.deepEqual(
    Array.from(sectionOf('Scripts and devices').matchAll(/^### (.*)$/gm), ([, heading]) => heading),
    DEVICES.map(({ heading }) => heading),
  );
});

test('every token of README.md and RECIPES.md is confined', () => {
  const confined = ['allow', 'senders', 'recipients', 'rate', 'clients', 'methods', 'expires'] as const;
  const configs = blocks('json').flatMap((block) => block.includes('"tokens"') ? [JSON.parse(block)] : []);
  const tokens = [
    ...configs,
    ...RECIPES.map(({ heading }) => recipeConfig(/```json\n([^]*?)```/.exec(sectionOf(heading))![1]!)),
  ].flatMap(({ tokens }: GatewayConfig) => Object.entries(tokens!));
  assert.ok(tokens.length >= 15, `only ${tokens.length} tokens`);
  for (const [name, token] of tokens) {
    assert.ok(confined.filter((key) => token[key] !== undefined).length >= 2, name);
    if (!token.defaults) continue;
    const allow = name === 'devices' ? ['GET /v2/send'] : ['send'];
    assert.deepEqual([token.allow, token.senders, token.recipients], [allow, [FROM], [TO]]);
  }
});

section('MEMORY'); // ──────────────────────────────────────────────────────────────────────────────

const BIG_BYTES = 150 * MIB;

const noProc = process.platform === 'linux' && !('Bun' in globalThis) && !('Deno' in globalThis)
  ? false
  : 'told for Node on Linux';

function memoryOf({ child }: Process, name: 'VmRSS' | 'VmHWM'): number {
  const status = readFileSync(`/proc/${child.pid}/status`, 'utf8');
  return Number(new RegExp(`${name}:\\s+(\\d+) kB`).exec(status)![1]) * 1024;
}

/** Sends a document of 150 MiB with all that is judged at both its ends, and returns the status. */
async function sendBig(
  to: Address,
  { auth, chunked }: { readonly auth: boolean; readonly chunked: boolean; readonly slow: boolean },
): Promise<number> {
  const head = JSON.stringify({ ...auth && { auth: SECRET }, ...MESSAGE }).slice(0, -1) + ',"base64_attachments":["';
  const tail = `"],"recipient":"${TO}"}`;
  const framing = chunked ? { 'transfer-encoding': 'chunked' } : { 'content-length': BIG_BYTES };
  const req = beginSend(to, { ...!auth && BEARER, ...framing });
  const answered = once(req, 'response') as Promise<[http.IncomingMessage]>;
  const piece = Buffer.alloc(256 * 1024, 'QUJD');
  req.write(head);
  for (let left = BIG_BYTES - head.length - tail.length; left > 0; left -= piece.length) {
    if (!req.write(piece.subarray(0, Math.min(left, piece.length)))) await once(req, 'drain');
  }
  req.end(tail);
  const [res] = await answered;
  return res.resume().statusCode!;
}

/** How far the peak rose is up to the collector too: where it is beyond the limit, two more processes may do better. */
async function assertMemory(t: TestContext, measure: () => Promise<number>): Promise<void> {
  const grown: number[] = [];
  while (grown.length < 3 && !(Math.min(...grown) <= 64)) grown.push(Math.round(await measure() / MIB));
  t.diagnostic(`grown by ${grown.join(', ')} MiB`);
  assert.ok(Math.min(...grown) <= 64, `${grown} MiB`);
}

for (
  const [name, how] of [
    ['with a header, to a backend that reads fast', { auth: false, chunked: false, slow: false }],
    ['with its body, to a backend that reads fast', { auth: true, chunked: true, slow: false }],
    ['with a header, to a backend that reads slowly', { auth: false, chunked: true, slow: true }],
    ['with its body, to a backend that reads slowly', { auth: true, chunked: false, slow: true }],
  ] as const
) {
  test(
    `memory: a send of 150 MiB that authenticates ${name} costs no more than 64 MiB`,
    { skip: noProc },
    (t) =>
      assertMemory(t, async () => {
        let got = 0;
        const backend = await startBackend(t, (req, res) => {
          req.on('data', (chunk: Buffer) => {
            got += chunk.length;
            if (how.slow && got % (4 * MIB) < chunk.length) {
              req.pause();
              setTimeout(() => req.resume(), 5);
            }
          });
          req.on('end', () => res.writeHead(201).end('{}'));
        });
        const gateway = await startProcess(t, { backend, env: { MAX_BODY: '1GiB' } });
        for (let i = 0; i < 20; i++) assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
        const idle = memoryOf(gateway, 'VmRSS');
        got = 0;
        assert.equal(await sendBig(gateway, how), 201);
        assert.ok(got > BIG_BYTES - 1000, `${got} bytes`);
        return memoryOf(gateway, 'VmHWM') - idle;
      }),
  );
}

test(
  'memory: an answer of 150 MiB costs no more than 64 MiB, read slowly too',
  { skip: noProc },
  (t) =>
    assertMemory(t, async () => {
      const piece = Buffer.alloc(256 * 1024, 'x');
      const backend = await startBackend(t, async (req, res) => {
        req.resume();
        if (req.url !== '/v1/health') return void res.end('{}');
        for (let left = BIG_BYTES; left > 0; left -= piece.length) if (!res.write(piece)) await once(res, 'drain');
        res.end();
      });
      const gateway = await startProcess(t, { backend, env: { MAX_BODY: '1GiB' } });
      for (let i = 0; i < 20; i++) await ask(gateway, { headers: BEARER });
      const idle = memoryOf(gateway, 'VmRSS');
      const req = http.get({
        host: '127.0.0.1',
        port: gateway.port,
        path: '/v1/health',
        agent: false,
        headers: BEARER,
      });
      const [res] = await once(req, 'response') as [http.IncomingMessage];
      let got = 0;
      for await (const chunk of res) {
        got += (chunk as Buffer).length;
        if (got % (4 * MIB) < (chunk as Buffer).length) await new Promise((resolve) => setTimeout(resolve, 5));
      }
      assert.equal(got, BIG_BYTES);
      return memoryOf(gateway, 'VmHWM') - idle;
    }),
);

test('a thousand idle connections and a thousand slow uploads are survived, and a send gets through after them', {
  skip: noProc,
}, async (t) => {
  const backend = await startBackend(t);
  const gateway = await startProcess(t, { backend, env: { MAX_CONNECTIONS: '2100' } });
  const sockets: net.Socket[] = [];
  t.after(() => sockets.forEach((socket) => socket.destroy()));
  let answered = 0;
  for (let i = 0; i < 1000; i++) {
    const { socket: idle } = connect(gateway, 'GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n');
    idle.once('data', () => {
      answered++;
    });
    const { socket: slow } = connect(gateway, `${post(SECRET, 1_000_000)}{"message":"${'x'.repeat(1000)}`);
    sockets.push(idle, slow);
    if (i % 50 === 49) await until(() => answered === i + 1);
  }
  assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
  assert.equal(backend.seen.length, 1);
  t.diagnostic(`${Math.round(memoryOf(gateway, 'VmHWM') / MIB)} MiB in all`);
  for (const socket of sockets) socket.destroy();
  await until(() => gateway.output().split('"client_left"').length === 1001);
  assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
});

section('THE FILES THEMSELVES'); // ────────────────────────────────────────────────────────────────

test("the README's table of settings, and the manual at the fields of the configuration, are the code's", async () => {
  const { stdout } = await cli(['--help']);
  const rows = Array.from(stdout.matchAll(/^ {2}([a-z][\w.]*) +([A-Z_]+)(?: +\[(.+)\])?\n {6}(.*)$/gm));
  const readme = README.split('\n').filter((line) => /^\| `[a-z][\w.]*` \| `[A-Z_]+` \|/.test(line));
  assert.deepEqual([rows.length, readme.length], [20, 20]);
  const [manual] = /^interface GatewayConfig \{[^]*?^\}/m.exec(SOURCE)!;
  for (const [i, [, path, env, fallback, help]] of rows.entries()) {
    const row = `| \`${path}\` | \`${env}\` | ${fallback ? `\`${fallback}\`` : 'none'} | ${help}`;
    assert.ok(readme[i]!.startsWith(row), `${readme[i]}\n${row}`); // and may say more
    const field = new RegExp(`/\\*\\*((?:(?!\\*/)[^])*)\\*/\\s+${path!.split('.').at(-1)}\\?:`).exec(manual);
    assert.equal(/@default (\S+)/.exec(field?.[1] ?? assert.fail(path!))?.[1], fallback, path!);
  }
});

test('the README names every code of an error, with its status, and the settings of a token', () => {
  const table = /const PROBLEMS = \{([^]*?)\n\}/.exec(SOURCE)![1]!;
  for (const [, code, status] of table.matchAll(/^ {2}(\w+): \[(\d+)/gm)) {
    if (code !== 'client_left') assert.match(README, new RegExp(`^\\| ${status} \\| .*\`${code}\``, 'm'), code!);
  }
  for (const name of [...TOKEN_SETTINGS, 'secret']) assert.ok(README.includes(`\`${name}\``), name);
});

test('every problem that there is has been provoked by a test before this one', (t) => {
  const table = /const PROBLEMS = \{([^]*?)\n\}/.exec(SOURCE)![1]!;
  const codes = Array.from(table.matchAll(/^ {2}(\w+): \[\d+/gm), ([, code]) => code!);
  assert.ok(codes.length > 20, `only ${codes}`);
  if (gatewaysStarted < 500) return t.skip('only some of the tests were run');
  assert.deepEqual(codes.filter((code) => !PROVOKED.has(code)), []);
});

test('every configuration in README.md and RECIPES.md loads', (t) => {
  const dir = folder(t);
  const [file, secretFile] = [join(dir, 'gateway.json'), join(dir, 'secret')];
  writeFileSync(secretFile, SECRET);
  const configs = blocks('json').map((block) =>
    block.includes('"tokens"') ? block : JSON.stringify(recipeConfig(block))
  );
  assert.ok(configs.length >= 15, `only ${configs.length} configurations`);
  for (const config of configs) {
    // The placeholders refuse to start, so that nobody runs with a secret that everybody can read.
    writeFileSync(file, config!);
    for (const problem of problemsOf(() => loadSettings({ file }))) {
      assert.match(problem, /: after "sha256:" there must be 64|secretFile: \S+ cannot be read/);
    }
    let made = 0;
    writeFileSync(
      file,
      config!.replace(/sha256:PASTE[^"]*/g, () => `sha256:${String(++made).padStart(64, '0')}`).replace(
        /\/run\/secrets\/\w+/g,
        () => secretFile,
      ),
    );
    assert.deepEqual(problemsOf(() => loadSettings({ file })), []);
  }
});

test("the README's example of embedding runs", async (t) => {
  const [example] = blocks('ts');
  const embedding = script(t, example!.replace("'./gateway.ts'", JSON.stringify(program().at(-1))));
  const { code, stdout, stderr } = await runProcess([], { program: embedding, env: { APP_TOKEN: SECRET } });
  assert.equal(code, 0, stderr);
  assert.match(stdout, /^http:\/\/127\.0\.0\.1:\d+$/m);
});

test("the README's page sends, and shows why it could not", async (t) => {
  const config: GatewayConfig = JSON.parse(
    blocks('json').find((block) => block.includes('"dashboard": {') && block.includes('"cors"'))!,
  );
  config.tokens!.dashboard!.secret = SECRET;
  const { backend, gateway } = await startBoth(t, config);
  const origin = config.cors![0]!;
  /** Asks first, as a browser does. */
  const browse = async (url: string, init: { method: string; headers: Record<string, string> }): Promise<Response> => {
    const [path, names] = [new URL(url).pathname, Object.keys(init.headers).join().toLowerCase().split(',').sort()];
    const headers = {
      origin,
      'access-control-request-method': init.method,
      'access-control-request-headers': names.join(),
    };
    const preflight = await ask(gateway, { method: 'OPTIONS', path, headers });
    assert.equal(preflight.headers['access-control-allow-origin'], origin);
    assert.equal(preflight.headers['access-control-allow-headers'], names.join(', '));
    return fetch(gateway.url + path, { ...init, headers: { ...init.headers, origin } });
  };
  const shown: string[] = [];
  for (const secret of [SECRET, 'wrong']) {
    const page = blocks('js').find((block) => block.includes('alert('))!.replace('TOKEN', secret);
    const show = (text: string): unknown => shown.push(text);
    await new Function('fetch', 'alert', `return (async () => {${page}})();`)(browse, show);
  }
  assert.equal(backend.sent.length, 1);
  assert.deepEqual(shown.map((text) => JSON.parse(text).code), ['unauthorized']);
});

test("the README's curl lines are the five forms as the gateway takes them", async (t) => {
  const lines = Array.from(README.matchAll(/^(curl .*?) +# (\w+)$/gm), ([, line, form]) => [line!, form!] as const);
  const table = Array.from(README.matchAll(/^\| (\w+) \| .* \| (on|off) \|$/gm), ([, form, state]) => [form, state]);
  assert.deepEqual(lines.map(([, form]) => form), table.map(([form]) => form));
  const [, send] = /^SEND='(.*)'$/m.exec(README)!;
  const isOn = Object.fromEntries(table.map(([form, state]) => [form, state === 'on']));
  for (const config of [ALL_FORMS, {}]) {
    const { backend, gateway } = await startBoth(t, config);
    for (const [line, form] of lines) {
      const url = new URL(/http:[^' ]*/.exec(line)![0].replace('TOKEN', SECRET));
      const user = /-u '([^']*)'/.exec(line)?.[1];
      const header = /-H 'Authorization: ([^']*)'/.exec(line)?.[1];
      const authorization = user ? basic(user.replace('TOKEN', SECRET)) : header?.replace('TOKEN', SECRET);
      const body = /-d ['"](.*)['"]$/.exec(line)![1]!.replace('$SEND', send!).replace('TOKEN', SECRET);
      const answer = await ask(gateway, {
        path: url.pathname + url.search,
        body,
        headers: { 'content-type': 'application/x-www-form-urlencoded', ...(authorization && { authorization }) },
      });
      assert.equal(answer.status, config === ALL_FORMS || isOn[form] ? 201 : 401, form);
      if (answer.status === 201) assert.equal(requests(gateway).at(-1)!.form, form);
    }
    assert.equal(backend.sent.length, config === ALL_FORMS ? 5 : 3);
  }
});

/** The headings of a page, and how GitHub names them in a link. */
function headingsOf(page: string): [heading: string, anchor: string][] {
  const prose = page.replace(/^```[^]*?^```$/gm, '');
  return Array.from(prose.matchAll(/^#{2,3} (.*)$/gm), ([, heading]) => [
    heading!,
    heading!.toLowerCase().replace(/[^\w\- ]/g, '').replaceAll(' ', '-'),
  ]);
}

test('the contents of README.md and RECIPES.md are their headings, and every link leads somewhere', () => {
  const pages = new Map(
    ['README.md', 'RECIPES.md', 'SECURITY.md', 'CHANGELOG.md', 'LICENSE'].map((name) =>
      [name, readFileSync(join(HERE, name), 'utf8')] as const
    ),
  );
  for (const [name, page] of pages) {
    for (const [link, file, anchor] of page.matchAll(/\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)/g)) {
      const target = pages.get(file || name) ?? assert.fail(`${name} ${link}`);
      if (anchor) assert.ok(headingsOf(target).some(([, known]) => known === anchor), `${name} ${link}`);
    }
  }
  const listed = (contents: string): string[] =>
    Array.from(contents.matchAll(/\[(.*?)\]\(#/g), ([, heading]) => heading!);
  const [, contents] = /\n## Contents\n([^]*?)\n## /.exec(README)!;
  const headings = headingsOf(README).map(([heading]) => heading).filter((heading) => heading !== 'Contents');
  assert.deepEqual(listed(contents!), headings);
  assert.deepEqual(
    listed(COOKBOOK.split('\n## ')[0]!),
    headingsOf(COOKBOOK).map(([heading]) => heading),
  );
});

test('README.md and RECIPES.md name only variables, options, commands and scripts that there are', async () => {
  const { stdout: help } = await cli(['--help']);
  const others = ['MODE', 'SEND', 'PWD', 'API__TOKENS', 'API__URL']; // the backend's, the shell's, another gateway's
  const known = new Set([...SETTING_ROWS.map(([, env]) => env), 'API_TOKENS_FILE', 'GATEWAY_CONFIG', ...others]);
  const used = [...blocks('sh|yaml|ini'), ...Array.from(README.matchAll(/`([^`\n]+)`/g), ([, code]) => code!)].flatMap(
    (text) => Array.from(text.matchAll(/(?:^|[\s`-])([A-Z][A-Z_]{2,})(?:=|: )/gm), ([, name]) => name!),
  );
  for (const name of ['TRUSTED_PROXIES', 'GATEWAY_CONFIG', 'TLS_KEY']) assert.ok(used.includes(name), name);
  assert.deepEqual(used.filter((name) => !known.has(name)), []);

  const commands = Array.from(
    (README + COOKBOOK).matchAll(/(?:tsx@(\d+)|node|bun) \/?(?:\S*\/)?gateway\.ts([^|`#\n]*)/g),
  );
  assert.ok(commands.length > 10, `only ${commands.length} commands`);
  for (const [command, major, args] of commands) {
    if (major) assert.ok(PACKAGE.devDependencies.tsx.startsWith(`^${major}.`), command);
    for (const [flag] of args!.matchAll(/--\w+/g)) assert.ok(help.includes(flag), command);
    const [word] = /^ [a-z]+/.exec(args!) ?? [];
    if (word) assert.ok(help.includes(`gateway.ts${word} `), command);
  }
  for (const [, script] of (README + COOKBOOK).matchAll(/npm run ([\w:]+)/g)) {
    assert.ok(PACKAGE.scripts[script!], script!);
  }
  assert.match(README, new RegExp(`\\./${PACKAGE.name}-${PACKAGE.version}\\.tgz`));
});

test("the README's docker run, its compose file and its unit start the gateway alike", () => {
  const [compose] = blocks('yaml') as [string];
  const [, run] = /^(docker run [^]*?node \/gateway\.ts)$/m.exec(README)!;
  const [unit] = blocks('ini') as [string];
  const gateway = compose.slice(compose.indexOf('  gateway:'));
  const variables = Array.from(
    gateway.matchAll(/^ {6}([A-Z_]+): "?([^"\n]*)"?$/gm),
    ([, name, value]) => [name, value],
  );
  assert.deepEqual(Array.from(run!.matchAll(/-e ([A-Z_]+)=(\S+)/g), ([, name, value]) => [name, value]), variables);
  assert.deepEqual(
    Array.from(/^Environment=(.*)$/m.exec(unit)![1]!.matchAll(/([A-Z_]+)=/g), ([, name]) => name),
    variables.map(([name]) => name),
  );
  const [, image] = /image: (.*)/.exec(gateway)!;
  const [, command] = /command: (.*)/.exec(gateway)!;
  assert.ok(run!.includes(`${image} ${JSON.parse(command!).join(' ')}`), command!);
  for (const mount of ['gateway.ts:/gateway.ts:ro', 'gateway.json:/gateway.json:ro']) {
    assert.ok(run!.includes(mount), mount);
  }
  const options = { 'user: node': '--user node', 'init: true': '--init', 'read_only: true': '--read-only' };
  for (const [key, option] of Object.entries(options)) assert.ok(gateway.includes(key) && run!.includes(option), key);
  assert.doesNotMatch(compose.slice(0, compose.indexOf('  gateway:')), /^ +ports:/m, 'the backend has no port');
});

test('the README says what each setting stops, and what each reason of a 401 means', async () => {
  const { stdout: help } = await cli(['--help']);
  const [, section] = /\n## Least privilege\n([^]*?)\*\*A script/.exec(README)!;
  const named = Array.from(section!.matchAll(/^\| (`.*?) \|/gm), ([, cell]) => cell!).join();
  const [, rows] = /A token in the file[^]*?\n\n([^]*?)\n\n/.exec(help)!;
  const tokenRows = Array.from(rows!.matchAll(/^ {2}(\w+)/gm), ([, name]) => name!);
  const noRestriction = ['secret', 'secretFile', 'defaults', 'message'];
  const restrictions = [
    ...tokenRows.filter((name) => !noRestriction.includes(name)),
    ...['methods', 'allow', 'rate', 'clients', 'auth.methods', 'auth.anonymous', 'cors', 'trustedProxies'],
    ...['limits.body', 'limits.connections'],
  ];
  for (const name of ['senders', 'expires']) assert.ok(restrictions.includes(name), name);
  for (const name of restrictions) assert.ok(named.includes(`\`${name}\``), name);

  const [, troubles] = /\n## Troubleshooting\n([^]*?)\n## /.exec(README)!;
  const reasons = [
    'no_credential',
    'unknown_token',
    'expired_token',
    'form_not_accepted',
    'wrong_user',
    'unknown_scheme',
  ];
  for (const [, reason] of troubles!.matchAll(/reason=(\w+)/g)) assert.ok(SOURCE.includes(reason!), reason!);
  for (const reason of reasons) {
    assert.ok(SOURCE.includes(`'${reason}'`) && troubles!.includes(`reason=${reason}\``), reason);
  }
  const sentences = Array.from(
    troubles!.matchAll(/^\| (?:at start|40\d)[^|]*?[`"]([a-z][\w, :]{15,})[`"]/gm),
    ([, said]) => said!,
  );
  assert.ok(sentences.length >= 4, sentences.join());
  for (const said of sentences) assert.ok(SOURCE.includes(said), said);
});

test('gateway.ts is one file of erasable TypeScript: only node: is imported, and little exported', () => {
  for (const [, from] of SOURCE.matchAll(/^import .* from '([^']+)';$/gm)) assert.match(from!, /^node:/);
  assert.doesNotMatch(SOURCE, /^\s*(?:export )?(?:enum|namespace|declare|import \w+ =)\b|\brequire\(/m);
  assert.deepEqual(Array.from(SOURCE.matchAll(/^export .*$/gm), ([line]) => line), [
    'export { BodyScan, ConfigError, createGateway, loadSettings, parseTarget, RateLimiter, run, Template };',
    'export type { Gateway, GatewayConfig, GatewayOptions, TokenConfig };',
  ]);
});

/** Neither blank nor comment. */
function codeLines(text: string): string[] {
  return text.split('\n').filter((line) => !/^\s*(?:\/\/|\/?\*|$)/.test(line));
}

/** The sections of gateway.ts by their banners, in their order. */
function sections(): { name: string; text: string }[] {
  const [, ...parts] = SOURCE.split(/^\/\/ ── ([A-Z ]+) ─+$/m);
  return parts.flatMap((name, i) => i % 2 === 0 ? [{ name, text: parts[i + 1]! }] : []);
}

/** Functions, methods and classes, from the line with the name to the closing brace in its column. */
function bodiesOf(kind: RegExp): { name: string; lines: number }[] {
  const lines = SOURCE.split('\n');
  return lines.flatMap((line, i) => {
    const [, indent, name] = kind.exec(line) ?? [];
    if (name === undefined || lines[i]!.endsWith(';')) return [];
    const end = lines.findIndex((other, j) => j > i && other === `${indent}}`);
    return [{ name, lines: codeLines(lines.slice(i, end + 1).join('\n')).length }];
  });
}

test('gateway.ts keeps the budget that its header states', () => {
  const [, whole, forFunction, forClass] = /^ \* Budget: ([\d,]+) lines of code, (\d+) a function, (\d+) a class\./m
    .exec(SOURCE)!;
  const [most, mostOfFunction, mostOfClass] = [whole!.replace(',', ''), forFunction, forClass].map(Number);
  assert.ok(most! <= 3100 && mostOfFunction! <= 45 && mostOfClass! <= 250, `${whole}, ${forFunction}, ${forClass}`);
  assert.ok(codeLines(SOURCE).length <= most!, `${codeLines(SOURCE).length} lines of code`);
  const functions = [
    ...bodiesOf(/^()(?:async )?function\*? (\w+)/),
    ...bodiesOf(/^( {2})(?!(?:if|for|while|switch|super)\b)(?:async |get |static |\*)*(#?\w+)\(.*[({]$/),
  ];
  const classes = bodiesOf(/^()class (\w+)/);
  assert.ok(functions.length > 200 && classes.length > 5, `only ${functions.length}, ${classes.length}`);
  assert.deepEqual(functions.filter(({ lines }) => lines > mostOfFunction!), []);
  assert.deepEqual(classes.filter(({ lines }) => lines > mostOfClass!), []);
  const [handle] = /^async function handle\([^]*?^\}/m.exec(SOURCE)!;
  assert.ok(handle.split('\n').length <= 60, handle);
  assert.deepEqual([handle.match(/\bcatch\b/g)?.length, handle.match(/\bfinally\b/g)?.length], [1, 1]);
});

test('the sections of gateway.ts stand as its contents say, within their budgets, and use only what stands below', () => {
  const contents = /^ \* Contents[^]*?\n \*\n/m.exec(SOURCE)![0].replace(/\n \*\s+/g, ' ');
  const budgets = Array.from(contents.matchAll(/([A-Z]{2}[A-Z ]*) (\d+)/g), ([, name, lines]) => [name, Number(lines)]);
  const all = sections();
  assert.deepEqual(all.map(({ name }) => name), budgets.map(([name]) => name));
  const tooLong = all.filter(({ text }, i) => codeLines(text).length > Number(budgets[i]![1]));
  assert.deepEqual(tooLong.map(({ name, text }) => [name, codeLines(text).length]), []);
  // What stands above GATEWAY are tables and types, and the words to read them. The command line stands last, for it is
  // the outermost: it may call everything.
  const names = all.map(({ name }) => name);
  const inner = all.slice(names.indexOf('GATEWAY'), names.indexOf('DEMO'));
  const upward = inner.flatMap(({ name, text }, i) => {
    const code = codeLines(text).join('\n');
    const above = inner.slice(0, i).map((other) => other.text).join('');
    const uses = [
      ...Array.from(above.matchAll(/^(?:async )?function\*? (\w+)/gm), ([, called]) => `(?<![.#\\w'])${called}\\(`),
      ...Array.from(above.matchAll(/^class (\w+)/gm), ([, made]) => `\\b(?:new|instanceof|extends) ${made}\\b`),
    ];
    return uses.flatMap((use) => new RegExp(use).exec(code)?.slice(0, 1) ?? []).map((used) => [name, used]);
  });
  assert.deepEqual(upward, []);
});

test('the numbers of gateway.ts that are no settings stand in one section, and the README has them', () => {
  const isNumber = /^const ([A-Z_]+)(?:: Rate)? = ((?:[\d_ *]+|\{ count: .*\}));$/gm;
  const found = sections().flatMap(({ name, text }) =>
    Array.from(text.matchAll(isNumber), ([, limit, value]) => ({ name, limit, value: value! }))
  );
  assert.ok(found.length > 20, `only ${found.length} numbers`);
  assert.deepEqual(found.filter(({ name, limit }) => name !== 'FIXED LIMITS' && !/^0x/.test(limit!)), []);
  const rows = Array.from(README.matchAll(/^\| (.+?) \| (.+?) \| `([A-Z_]+)` \|$/gm), ([, , value, limit]) => ({
    limit,
    value,
  }));
  const inWords = (value: string, limit: string): string => {
    const [, count, perMs] = /count: (\d+), perMs: ([\d_]+)/.exec(value) ?? [];
    if (count) return `${count} in ${inWords(perMs!, '_MS')}`;
    const number = value.replaceAll('_', '').split('*').reduce((product, factor) => product * Number(factor), 1);
    if (/_MS$/.test(limit)) return number % 1000 === 0 ? `${number / 1000} s` : `${number} ms`;
    if (/_BYTES$/.test(limit) && number % 1024 === 0) {
      return number % 1024 ** 2 === 0 ? `${number / 1024 ** 2} MiB` : `${number / 1024} KiB`;
    }
    return number.toLocaleString('en');
  };
  assert.deepEqual(rows, found.map(({ limit, value }) => ({ limit, value: inWords(value, limit!) })));
});

test('the top level holds what is expected, and the changelog tells of this version', () => {
  const expected = `CHANGELOG.md LICENSE README.md RECIPES.md SECURITY.md gateway.bench.ts gateway.test.ts gateway.ts
    package-lock.json package.json tsconfig.json dist node_modules`.split(/\s+/);
  assert.deepEqual(readdirSync(HERE).filter((name) => !name.startsWith('.') && !expected.includes(name)), []);
  assert.match(readFileSync(join(HERE, 'CHANGELOG.md'), 'utf8'), new RegExp(`^## ${PACKAGE.version}$`, 'm'));
});

// deno fmt breaks the lines of code, and `npm run check` asks it; what it leaves are comments and texts.
test('comments are no wider than the code', () => {
  const lines = ['gateway.bench.ts', 'gateway.test.ts', 'gateway.ts'].flatMap((file) =>
    readFileSync(join(HERE, file), 'utf8').split('\n')
  );
  assert.deepEqual(lines.filter((line) => line.length > 120 && /^\s*(?:\/\/|\/?\*)|[;{] \/\/ /.test(line)), []);
});

test('npm pack makes a package that runs by its own name where it is installed', {
  skip: !isNode && 'npm is for Node',
}, async (t) => {
  const dir = folder(t);
  const [source, home] = [join(dir, 'source'), join(dir, 'home')];
  // Packed from a copy: it is compiled first, and the dist/ here may be what is tested.
  cpSync(HERE, source, { recursive: true, filter: (path) => !/[\\/](?:\.git|node_modules|dist)$/.test(path) });
  symlinkSync(join(HERE, 'node_modules'), join(source, 'node_modules'));
  mkdirSync(home);
  const env = {
    PATH: `${dirname(process.execPath)}:${process.env.PATH}`,
    HOME: dir,
    npm_config_offline: 'true',
    npm_config_audit: 'false',
    npm_config_update_notifier: 'false',
  };
  const npm = async (cwd: string, ...args: string[]): Promise<string> =>
    (await promisify(execFile)('npm', args, { cwd, env })).stdout;
  await npm(source, 'pack', '--pack-destination', dir);
  await npm(home, 'install', join(dir, `${PACKAGE.name}-${PACKAGE.version}.tgz`));
  assert.deepEqual(readdirSync(join(home, 'node_modules')).sort(), ['.bin', '.package-lock.json', PACKAGE.name]);
  const installed: Program = [join(home, 'node_modules/.bin', PACKAGE.name)];
  assert.equal((await runProcess(['--version'], { env, program: installed })).stdout, `${PACKAGE.version}\n`);
  const { first, close } = await startDemo(t, { env, program: installed });
  assert.equal((await askAsCurl(first)).status, 201);
  await close();
  await promisify(execFile)(process.execPath, ['-e', `import('${PACKAGE.name}').then((m) => m.createGateway({}))`], {
    cwd: home,
  });
  // The last test, so that this stands in the closing lines of .ci/run.
  const { RUNTIMES_PASSED } = process.env;
  if (RUNTIMES_PASSED) t.diagnostic(`the suite has passed before on: ${RUNTIMES_PASSED}`);
});

assert.ok(registered > 0, 'SECTION or ONLY leaves out every test');
