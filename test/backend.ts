/** Stand-in backends: one that reads paths and JSON as signal-cli-rest-api does, and one of raw bytes. */

import { once } from 'node:events';
import http from 'node:http';
import net, { type AddressInfo } from 'node:net';
import { jsonIn } from './answers.ts';
import { lastOf, shown } from './assertions.ts';
import type { TestContext } from './guard.ts';

/** A request, and whether it arrived completely. */
export interface Seen extends Pick<http.IncomingMessage, 'headers' | 'rawHeaders' | 'complete'> {
  method: string;
  url: string;
  body: Buffer;
}

export function seenOf(
  { method, url, headers, rawHeaders }: http.IncomingMessage,
  body: Buffer,
  complete: boolean,
): Seen {
  return { method: method!, url: url!, headers, rawHeaders, body, complete };
}

export const showSeen = ({ method, url, body, complete }: Seen): string =>
  shown(`${method} ${url} ${body}${complete ? '' : ' (not complete)'}`, 300);

export interface Backend {
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

export type Handler = (req: http.IncomingMessage, res: http.ServerResponse, seen: Seen) => void;

/**
 * A loopback address that no other server of the tests has. A gateway that still tries to connect to a stopped
 * backend cannot hit another test's backend that was given the same port. Linux has all of 127.0.0.0/8.
 */
export function ownHost(): string {
  if (process.platform !== 'linux') return '127.0.0.1';
  hosts++;
  return `127.${1 + (process.pid >> 6) % 254}.${process.pid % 64 * 4 + (hosts >> 8)}.${hosts & 255}`;
}

let hosts = 0;

/** A backend that records what reaches it. Without a handler it answers as signal-cli-rest-api does. */
export async function startBackend(t: TestContext, handler?: Handler): Promise<Backend> {
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
    // node:stream/consumers would make a Blob, which takes longer than the rest of the request.
    req.toArray().then((chunks) => answer(Buffer.concat(chunks)), () => {});
  });
  backend.url = await serve(t, backend.server, 0, host);
  backend.port = (backend.server.address() as AddressInfo).port;
  t.onFailure(() => lastOf('the backend saw', backend.seen.map(showSeen)));
  return backend;
}

/** Routes and JSON as in the backend: decoded paths, case-folded keys, and text for JSON that does not bind. */
export function answerAsBackend(backend: Backend, seen: Seen, res: http.ServerResponse): void {
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

/** What the backend got, as JSON. */
export const gotJson = (backend: Backend): Record<string, unknown> => JSON.parse(String(backend.seen.at(-1)!.body));

/** A backend that answers every request with 200, whether the route exists or not. */
export const ANY_ROUTE: Handler = (req, res) => void req.resume().on('end', () => res.end('{}'));

export const ANSWERING = { handler: ANY_ROUTE };

/** Starts a server, by default on a separate address and a free port, until the test ends. */
export async function serve(t: TestContext, server: net.Server, port = 0, host = ownHost()): Promise<string> {
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

export type Respond = (socket: net.Socket, before: number) => void;

/**
 * A backend of raw bytes: `respond` is called for each complete request, with the number of requests before it on its
 * connection.
 */
export async function startRawBackend(t: TestContext, respond: Respond) {
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

/** A range of its own for each process, so that no two tests use the same at once. One with many files uses over 100. */
let nextPort = 20_000 + (process.pid * 256) % 12_000;

/** A port without a listener, below those that the system assigns to other tests meanwhile. */
export async function sparePort(host = '127.0.0.1'): Promise<number> {
  const port = nextPort++;
  const spare = http.createServer().listen(port, host);
  const isFree = await once(spare, 'listening').then(() => true, () => false);
  if (!isFree) return sparePort(host);
  await new Promise((resolve) => spare.close(resolve));
  return port;
}

/** The lines of a text, which bars separate. */
export const barred = (text: string): string[] => text.trim().split(/\s*\|\s*/);
