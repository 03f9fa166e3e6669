/** WebSockets: a backend that accepts them, and clients that ask for one. */

import http from 'node:http';
import type { Duplex } from 'node:stream';
import type { GatewayConfig, GatewayOptions } from '../gateway.ts';
import { type Answer, parseAnswer } from './answers.ts';
import { until } from './assertions.ts';
import { seenOf, startBackend } from './backend.ts';
import { type Address, type Connection, open } from './client.ts';
import { ALL_METHODS } from './configs.ts';
import type { TestContext } from './guard.ts';
import { parseRow } from './rows.ts';
import { RECEIVE, SECRET } from './samples.ts';
import { startGateway } from './start.ts';

export const ACCEPTED =
  'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n';

export const RECEIVING: GatewayConfig = { ...ALL_METHODS, allow: ['receive', 'info', 'send'] };

/** Accepts a WebSocket. */
export function accept(socket: Duplex): void {
  socket.on('end', () => socket.end()).write(ACCEPTED);
}

/** A backend in json-rpc mode; `open` is what it does with a WebSocket. */
export async function startUpgradeBackend(t: TestContext, open: (socket: Duplex, head: Buffer) => void = accept) {
  const backend = Object.assign(await startBackend(t), { sockets: [] as Duplex[] });
  backend.server.on('upgrade', (req: http.IncomingMessage, socket: Duplex, head: Buffer) => {
    backend.seen.push(seenOf(req, head, true));
    backend.sockets.push(socket);
    socket.on('error', () => {});
    open(socket, head);
  });
  return backend;
}

export type UpgradeHandler = Parameters<typeof startUpgradeBackend>[1];

/** A backend with WebSockets, and a gateway in front of it. */
export async function startReceiving(
  t: TestContext,
  open?: UpgradeHandler,
  config: GatewayConfig = {},
  options?: GatewayOptions,
) {
  const backend = await startUpgradeBackend(t, open);
  const own = { ...RECEIVING, ...config, backend: { url: backend.url, wait: '0', ...config.backend } };
  return { backend, gateway: await startGateway(t, backend, own, options) };
}

export function openWebSocket(
  t: TestContext,
  to: Address,
  { path = RECEIVE, headers = [`Authorization: Bearer ${SECRET}`], more = '' } = {},
): Connection {
  const own = ['Host: gateway', 'Connection: keep-alive, Upgrade', 'Upgrade: WebSocket', 'Sec-WebSocket-Version: 13'];
  const key = 'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==';
  return open(t, to, [`GET ${path} HTTP/1.1`, ...own, key, ...headers, '', more].join('\r\n'));
}

/** Asks for a WebSocket using a row of a table, with these bytes after the handshake. */
export function wish(t: TestContext, to: Address, row = 'bearer', more = ''): Connection {
  const { target: path = RECEIVE, headers } = parseRow(row);
  return openWebSocket(t, to, { path, headers: headers.map((field) => field.join(': ')), more });
}

/** Opens a WebSocket that the gateway accepts. */
export async function accepted(t: TestContext, to: Address, row?: string): Promise<Connection> {
  const connection = wish(t, to, row);
  await until(() => connection.text().startsWith('HTTP/1.1 101'));
  return connection;
}

/** Asks for a WebSocket, and returns the ordinary response it gets instead. */
export async function declined(t: TestContext, to: Address, row?: string, more?: string): Promise<Answer> {
  const { socket, text } = wish(t, to, row, more);
  await until(() => socket.closed || text().startsWith('HTTP/1.1 101'));
  return parseAnswer(text());
}
