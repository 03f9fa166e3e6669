/** A backend that responds on demand, and the sends that fill its slots and wait for them. */

import { once } from 'node:events';
import http from 'node:http';
import type { GatewayConfig, GatewayOptions } from '../gateway.ts';
import type { Answer } from './answers.ts';
import { assert, until, within } from './assertions.ts';
import { type Backend, startBackend } from './backend.ts';
import { ask, beginSend } from './client.ts';
import { slots } from './configs.ts';
import type { TestContext } from './guard.ts';
import { BEARER, MESSAGE, SECRET } from './samples.ts';
import { type Gateway, startGateway } from './start.ts';

type HeldBackend = Awaited<ReturnType<typeof startHeld>>['backend'];

/** A backend that responds on demand and, like the real one, continues its work after the gateway has disconnected. */
export async function startHeld(t: TestContext, parallel: number, config?: GatewayConfig, options?: GatewayOptions) {
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

/** Responds once for each send, so all of them are delivered. */
export async function answerAll(backend: HeldBackend, sends: Promise<Answer>[]): Promise<void> {
  for (let i = 0; i < sends.length; i++) {
    await until(() => backend.acting > 0);
    backend.answer();
  }
  for (const answer of sends) assert.equal((await answer).status, 201);
}

export function send(gateway: Gateway, message: string, secret = SECRET): Promise<Answer> {
  return ask(gateway, { body: { ...MESSAGE, message }, headers: { authorization: `Bearer ${secret}` } });
}

/** Many sends at the same time. */
export function sendMany(gateway: Gateway, count: number): Promise<Answer>[] {
  return Array.from({ length: count }, (_, i) => send(gateway, `number ${i}`));
}

/** The messages that the backend has received completely. */
export function arrived(backend: Backend): string[] {
  return backend.seen.filter(({ complete }) => complete).map(({ body }) => JSON.parse(body.toString()).message);
}

/** Resolves once the gateway has read everything that arrived before this. */
export async function settled(gateway: Gateway): Promise<void> {
  await ask(gateway, { path: '/healthz' });
}

/** Sends one message after the other: each has reached the gateway before the next is sent. */
export async function queueUp(gateway: Gateway, messages: string[], secret = SECRET): Promise<Promise<Answer>[]> {
  const answers: Promise<Answer>[] = [];
  for (const message of messages) {
    answers.push(send(gateway, message, secret));
    for (let i = 0; i < 3; i++) await settled(gateway);
  }
  return answers;
}

export const LARGE = JSON.stringify({ ...MESSAGE, message: 'large', base64_attachments: ['A'.repeat(200_000)] });

/** A large send whose head has reached the backend, and whose last byte the client has not sent yet. */
export async function beginLarge(gateway: Gateway, backend: Backend): Promise<http.ClientRequest> {
  const before = backend.seen.length;
  const req = listened(beginSend(gateway, { ...BEARER, 'content-length': LARGE.length }));
  req.write(LARGE.slice(0, -1));
  await until(() => backend.seen.length > before, 'the head of a large body to reach the backend');
  return req;
}

/** The status of each large send, listened for from the start because the response may arrive at any time. */
const STATUS = new WeakMap<http.ClientRequest, Promise<number>>();

export function listened(req: http.ClientRequest): http.ClientRequest {
  const status = once(req.on('error', () => {}), 'response').then(([res]) => res.resume().statusCode as number);
  status.catch(() => {}); // the client may disconnect
  STATUS.set(req, status);
  return req;
}

export const statusFor = (req: http.ClientRequest): Promise<number> =>
  within(STATUS.get(req)!, 'the response to a large body');
