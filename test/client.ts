/** The clients of the tests: requests by node:http, and connections that send exact bytes. */

import { once } from 'node:events';
import http from 'node:http';
import https from 'node:https';
import net from 'node:net';
import { connect as tlsConnect, TLSSocket } from 'node:tls';
import { type Answer, jsonIn } from './answers.ts';
import { assert, closed, shown, until, within } from './assertions.ts';
import { CERTS } from './certificates.ts';
import type { TestContext } from './guard.ts';
import { isNode } from './runtime.ts';
import { basic, BEARER, OTHER, REFUSED, URLENCODED } from './samples.ts';
import type { Gateway } from './start.ts';

/** Where something listens: a port on a host, by default 127.0.0.1. */
export interface Address {
  port: number;
  host?: string;
  /** The certificates that a client trusts, if it speaks TLS. */
  ca?: string[];
}

export function addressOf(url: string): Address {
  const { protocol, hostname, port } = new URL(url);
  const tls = protocol === 'https:' && { ca: CERTS.map((pair) => pair.cert) };
  return { port: Number(port), host: hostname.replace(/[[\]]/g, ''), ...tls };
}

export interface Ask {
  method?: string;
  path?: string;
  headers?: http.OutgoingHttpHeaders;
  body?: string | Buffer | object;
  agent?: http.Agent;
}

/**
 * One request on its own connection, with the target as given. A body makes it a POST, and an object is sent as JSON.
 * A test may fail before it awaits the answer: it fails for its own reason then, and not also for lack of the answer.
 */
export function ask(to: Address, request?: Ask): Promise<Answer> {
  const answer = answerTo(to, request);
  answer.catch(() => {});
  return answer;
}

async function answerTo(to: Address, { body, headers = {}, ...rest }: Ask = {}): Promise<Answer> {
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
  const [res] = await within(
    once(req, 'response') as Promise<[http.IncomingMessage]>,
    `the response to ${req.method} ${req.path}`,
  );
  const fingerprint = res.socket instanceof TLSSocket ? res.socket.getPeerCertificate().fingerprint256 : '';
  const chunks = await within(res.toArray(), `the end of the response to ${req.method} ${req.path}`);
  const text = String(Buffer.concat(chunks));
  const { statusCode, headers: own, rawHeaders } = res;
  return { status: statusCode!, headers: own, rawHeaders, text, json: jsonIn(text), fingerprint };
}

/** The statuses of requests that are sent at the same time. */
export async function statusesOf(to: Address, ...asked: Ask[]): Promise<number[]> {
  return (await Promise.all(asked.map((request) => ask(to, request)))).map(({ status }) => status);
}

/** Repeats the request until the response is 200. */
export async function untilServed(to: Address, request: Ask): Promise<void> {
  await until(async () => (await ask(to, { headers: BEARER, ...request })).status === 200, 'a response with 200');
}

/** A send whose body the test writes itself. */
export const beginSend = (
  { port }: Address,
  headers: http.OutgoingHttpHeaders,
  path = '/v2/send',
): http.ClientRequest => http.request({ host: '127.0.0.1', port, method: 'POST', path, agent: false, headers });

export type Connection = ReturnType<typeof connect>;

/** A new connection that has sent exact bytes, and everything received on it so far. */
export function connect({ port, host = '127.0.0.1', ca }: Address, bytes: string | Buffer = '') {
  const socket = ca ? tlsConnect({ port, host, ca, servername: 'localhost' }) : net.connect(port, host);
  let text = '';
  socket.on('error', () => {}).on('data', (chunk) => void (text += chunk.toString('latin1'))).write(bytes);
  return { socket, text: () => text };
}

/** A connection that a test may leave open. */
export function open(t: TestContext, to: Address, bytes?: string | Buffer): Connection {
  const connection = connect(to, bytes);
  t.after(() => connection.socket.destroy());
  return connection;
}

/** Sends exact bytes, and keeps its own side open after the gateway has ended the connection. */
export function openHalf(t: TestContext, { port }: Address, bytes: string): net.Socket {
  const socket = net.connect({ port, host: '127.0.0.1', allowHalfOpen: true });
  t.after(() => socket.destroy());
  socket.on('error', () => {}).write(bytes);
  return socket;
}

/** Sends exact bytes and returns everything received until the other side closes. */
export async function raw(to: Address, bytes: string | Buffer): Promise<string> {
  const { socket, text } = connect(to, bytes);
  await closed(socket, `the gateway to close the connection with ${shown(String(bytes), 200)}`);
  return text();
}

/**
 * Everything received on a connection that has sent exact bytes, and continues with single bytes until it is closed.
 */
export async function trickle(t: TestContext, to: Address, bytes: string): Promise<string> {
  const { socket, text } = open(t, to, bytes);
  const timer = setInterval(() => socket.write('x'), 20);
  await closed(socket).finally(() => clearInterval(timer));
  return text();
}

interface RawRequest {
  method?: string;
  headers?: string[];
  body?: string;
}

/** Sends a request in exact bytes, and returns everything received. */
export type RawAsk = (target: string, request?: RawRequest) => Promise<string>;

/** The bytes of a request: each is a character of its target, headers and body. */
function rawBytes(target: string, { method = 'GET', headers = [], body = '' }: RawRequest): Buffer {
  const isChunked = headers.some((line) => /^transfer-encoding:/i.test(line));
  const length = !isChunked && (body !== '' || method !== 'GET') ? [`Content-Length: ${body.length}`] : [];
  const head = [`${method} ${target} HTTP/1.1`, 'Host: gateway', ...headers, ...length];
  return Buffer.from([...head, '', body].join('\r\n'), 'latin1');
}

/** One request in exact bytes, on its own connection. */
export function rawRequest(to: Address, target: string, { headers = [], ...rest }: RawRequest = {}): Promise<string> {
  return raw(to, rawBytes(target, { headers: ['Connection: close', ...headers], ...rest }));
}

/** What `rawRequest` does, one request after the other, on one connection for as long as the gateway keeps it. */
export function keepConnection(to: Address) {
  let kept: Connection | undefined;
  const ask: RawAsk = async (target, request = {}) => {
    const { method = 'GET', headers = [] } = request;
    const needsItsOwn = method === 'HEAD' || headers.some((line) => OF_CONNECTION.test(line));
    if (needsItsOwn) return await rawRequest(to, target, request);
    kept = kept?.socket.writable ? kept : connect(to);
    const { socket, text } = kept;
    const from = text().length;
    const ended = new Promise<void>((resolve) => {
      const look = (): void => {
        if (!socket.closed && !isWhole(text().slice(from))) return;
        socket.off('data', look).off('close', look);
        resolve();
      };
      socket.on('data', look).on('close', look);
    });
    socket.write(rawBytes(target, request));
    await within(ended, `the response to ${method} ${target}`);
    if (/^connection: close\r$/im.test(text().slice(from))) await closed(socket);
    return text().slice(from);
  };
  return { ask, end: () => void kept?.socket.destroy() };
}

/** The headers with which a response is not the only one on its connection, or the connection not kept. */
const OF_CONNECTION = /^(?:connection|content-length|expect|transfer-encoding|upgrade):/i;

/** Whether a response has arrived to its end. One that only its connection ends has not. */
function isWhole(response: string): boolean {
  const end = response.indexOf('\r\n\r\n') + 4;
  if (end < 4) return false;
  const head = response.slice(0, end);
  if (/^HTTP\/1\.1 [23]04 /.test(head)) return true;
  const [, length] = /^content-length: (\d+)/im.exec(head) ?? [];
  return length === undefined ? response.endsWith('\r\n0\r\n\r\n') : response.length >= end + Number(length);
}

export const TELLS_FULL_BUFFERS = {
  skip: !isNode && 'Deno fills its buffers slowly',
};

/** The kernel takes no more from a connection that has been full for this long: it asks the other side after 200 ms. */
const QUIET_MS = 400;

/** Makes a request, one that is refused by default, on a connection whose buffers have no room for the response. */
export async function fillBuffers(t: TestContext, gateway: Gateway, request = REFUSED) {
  const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
  const client = net.connect(gateway.port, '127.0.0.1').pause().on('error', () => {});
  t.after(() => client.destroy());
  const [socket] = await accepted;
  // Ten thousand responses would have the same effect. Less is queued here than would make node:http stop reading. On a
  // loaded machine the kernel takes more a while later, and with it all that was queued: until it takes nothing more.
  for (let sinceMs = performance.now(); performance.now() - sinceMs < QUIET_MS && !socket.destroyed;) {
    if (socket.writableLength === 0) sinceMs = performance.now();
    while (socket.writableLength === 0 && !socket.destroyed) socket.write(Buffer.alloc(4096, ' '));
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
  assert.ok(!socket.destroyed, 'the connection was closed before its buffers were full');
  const before = socket.bytesWritten; // with what is queued
  client.write(request);
  await until(() => socket.bytesWritten > before, 'a response that has no room');
  return { client, socket };
}

/** Waits until something answers there, or nothing does any more. */
export async function untilAnswering(to: Address, isAnswering = true): Promise<void> {
  const answers = (): Promise<boolean> => ask(to, { path: '/healthz' }).then(() => true, () => false);
  await until(async () => await answers() === isAnswering, 'a change of who answers');
}

/** Does what curl does with a line, so the tests need no curl. There is one header at most. */
export function askAsCurl(line: string): Promise<Answer> {
  const options = Array.from(line.slice('curl '.length).matchAll(/(?:-(\w) )?(?:'([^']*)'|(\S+))/g));
  const given = Object.fromEntries(options.map(([, flag = 'url', quoted, word]) => [flag, quoted ?? word!]));
  const { url, X: method = 'POST', d: body, u: user, H: header = '' } = given;
  const [, name, value] = /^([\w-]+): (.*)/.exec(user === undefined ? header : `Authorization: ${basic(user)}`) ?? [];
  const headers = { ...(body && { 'content-type': URLENCODED }), ...(name && { [name.toLowerCase()]: value }) };
  const { port, pathname, search } = new URL(url!.replace(/^(?!http:)/, 'http://'));
  return ask({ port: Number(port) }, { method, path: pathname + search, headers, ...(body && { body }) });
}

export const METRICS = { path: '/metrics', headers: { authorization: `Bearer ${OTHER}` } };

/** Scrapes until a series has a value. */
export async function untilScraped(to: Address, name: string, value: number, request: Ask = METRICS) {
  let values: Record<string, number> = {};
  await until(async () => (values = await scrape(to, request))[name] === value, `${name} to be ${value}`);
  return values;
}

/**
 * What the second token of a gateway scrapes: each series with its labels, without the common prefix, and its value.
 */
export async function scrape(gateway: Address, request: Ask = METRICS): Promise<Record<string, number>> {
  const { status, text } = await ask(gateway, request);
  assert.equal(status, 200, text);
  const samples = text.split('\n').filter((line) => /^\w/.test(line)).map((line) => {
    const [, name, value] = /^(?:signal_gateway_)?(.*) (\S+)$/.exec(line)!;
    return [name!, Number(value)] as const;
  });
  assert.equal(new Set(samples.map(([name]) => name)).size, samples.length, 'each series occurs once');
  return Object.fromEntries(samples);
}
