/** The clients of the worlds of time: the requests that they make, and the connections that these travel on. */

import net from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import { loopMs, until } from './clock.ts';
import { chunked, MessageReader } from './messages.ts';
import type { Actor, Step, TokenName } from './parts.ts';
import { type Asked, end, type Response, type Story } from './story.ts';
import { ELSE, FROM, secretOf, TO, WORD } from './tokens.ts';
import { hasBody, ROUTES } from './worlds.ts';

/**
 * A client's connection to the gateway, which assigns each response to its request, in order. It models a client that
 * pipelines, but neither TLS nor a client that gives up.
 */
export class Wire extends MessageReader {
  readonly story: Story;
  readonly socket: net.Socket;
  readonly asked: Asked[] = [];
  isClosed = false;
  /** The gateway has announced, or shown, that this connection accepts no further request. */
  isLast = false;
  /** What came after a 101. */
  tunnel: Buffer = Buffer.alloc(0);
  #next = 0;
  #response: Response | undefined;

  constructor(story: Story) {
    super();
    this.story = story;
    this.socket = net.connect({ port: story.port, host: '127.0.0.1', allowHalfOpen: true, noDelay: true });
    story.sockets.add(this.socket);
    this.socket.on('error', () => {});
    this.socket.on('data', (chunk: Buffer) => this.read(chunk));
    this.socket.on('end', () => this.#end());
    this.socket.on('close', () => {
      this.#end();
      this.isClosed = true;
      story.sockets.delete(this.socket);
    });
  }

  /** Whether nothing more can come for these requests. */
  isDone(asked: Asked[]): boolean {
    return this.isLast && this.socket.readableEnded || this.isClosed ||
      asked.every(({ response }) => response?.isComplete);
  }

  onMistake(what: string): void {
    this.story.find(4, `a client got bytes that are not a response: ${what} (${this.asked[this.#next]?.mark})`);
    this.socket.destroy();
  }

  onTunnel(bytes: Buffer): void {
    this.tunnel = Buffer.concat([this.tunnel, bytes]);
  }

  onHead(first: string, headers: Map<string, string>): number | 'chunked' | undefined {
    const status = Number(/^HTTP\/1\.1 (\d{3}) /.exec(first)?.[1]);
    if (!status) return void this.fail(first);
    if (status < 200 && status !== 101) return undefined;
    const asked = this.asked[this.#next++];
    if (headers.get('connection') === 'close') this.isLast = true;
    const response = this.#response = { status, headers, body: Buffer.alloc(0), isComplete: false };
    if (asked) asked.response = response;
    else this.story.find(4, `a client got a response that it did not ask for: ${first}`);
    const answered = headers.get('x-answer');
    if (answered !== undefined && answered !== asked?.mark) {
      this.story.find(4, `a client got the answer to another request: ${answered} for ${asked?.mark}`);
    }
    if (status === 101) this.isOver = true;
    if (status === 101 || status === 204 || status === 304) return 0;
    if (headers.get('transfer-encoding') === 'chunked') return 'chunked';
    return Number(headers.get('content-length') ?? Infinity);
  }

  onPart(part: Buffer): void {
    this.#response!.body = Buffer.concat([this.#response!.body, part]);
  }

  onWhole(): void {
    this.#response!.isComplete = true;
    this.#response = undefined;
    const asked = this.asked[this.#next - 1];
    if (asked) end(asked);
  }

  #end(): void {
    const headers = this.#response?.headers;
    const isOpen = headers && !headers.has('content-length') && !headers.has('transfer-encoding');
    if (isOpen && this.socket.readableEnded) this.onWhole();
    this.isLast = true;
    for (const asked of this.asked) end(asked);
  }
}

/** A filler of this many bytes that names its request. */
export const filler = (mark: string, bytes: number): string =>
  `${mark}.`.repeat(bytes / mark.length + 1).slice(0, Math.max(0, bytes));

/** The body of a step that has one, without `auth`. */
function bodyOf({ shape, bodyBytes }: Step, mark: string): string {
  const member = (key: string, value: unknown): string => `"${key}":${JSON.stringify(value)}`;
  const object = (...members: string[]): string => `{${members.join()}}`;
  const [number, recipients] = [member('number', FROM), member('recipients', [TO])];
  const message = member('message', `${mark} ${filler(mark, bodyBytes)}`);
  const others = member('recipients', [ELSE]);
  const shapes: Record<Step['shape'], () => string> = {
    plain: () => object(number, recipients, message),
    twice: () => object(number, recipients, message, others),
    folded: () => object(number, recipients, message, member('Recipients', [ELSE])),
    escaped: () => object(number, message, `"recipi\\u0065nts":["${ELSE}"]`),
    late: () => object(recipients, message, member('number', ELSE)),
    doubled: () => object(number, recipients, message) + object(member('number', ELSE), others),
    broken: () => object(number, recipients, message, ''),
  };
  return shapes[shape]();
}

/** Makes the request of a step, and records what the backend must get. */
export function makeRequest(story: Story, actor: Actor | undefined, token: TokenName, step: Step, mark: string): Asked {
  const { auth } = step;
  const body = hasBody(step) ? bodyOf(step, mark) : '';
  const secret = step.route === 'health' ? '' : step.wrong ? `${WORD}-nobody-0123456789` : secretOf(token);
  let [method = '', path = ''] = ROUTES[step.route].split(' ');
  if (auth === 'query') path += `?@auth=${secret}`;
  if (auth === 'path') path = `/@auth=${secret}${path}`;
  const lines = [`${method} ${path} HTTP/1.${step.isOld ? 0 : 1}`, 'Host: gateway', `X-Mark: ${mark}`];
  if (step.isOld) lines.push('Connection: keep-alive');
  if (auth === 'bearer') lines.push(`Authorization: Bearer ${secret}`);
  if (auth === 'basic') lines.push(`Authorization: Basic ${btoa(`api:${secret}`)}`);
  if (step.route === 'socket') lines.push('Upgrade: websocket', 'Connection: Upgrade', 'Sec-WebSocket-Key: x');
  const withAuth = (value: string): Buffer =>
    Buffer.from(auth === 'body' ? `{"auth":"${value}",${body.slice(1)}` : body);
  const content = withAuth(secret);
  if (content.length > 0) lines.push('Content-Type: application/json');
  if (step.chunked && content.length > 0) lines.push('Transfer-Encoding: chunked');
  else if (method === 'POST' || content.length > 0) lines.push(`Content-Length: ${content.length}`);
  const head = Buffer.from(`${lines.join('\r\n')}\r\n\r\n`);
  const bytes = Buffer.concat([head, step.chunked && content.length > 0 ? chunked(content) : content]);
  const expected = withAuth(' '.repeat(secret.length));
  const stays = step.stopAt === undefined && step.leave === undefined && !step.deafMs;
  return expect(story, { mark, actor, token, step, bytes, expected, stays });
}

/** Records that a request is about to be made. */
export function expect(story: Story, about: Omit<Asked, 'startedMs' | 'startedLoopMs' | 'arrivals' | 'acts'>): Asked {
  const asked = { ...about, arrivals: 0, acts: 0, startedMs: performance.now(), startedLoopMs: loopMs };
  story.asked.set(asked.mark, asked);
  return asked;
}

/** Writes requests, and waits until each has its response, or the connection is closed. */
export async function exchange(story: Story, wire: Wire, asked: Asked[]): Promise<void> {
  const { socket } = wire;
  const { step } = asked.at(-1)!;
  wire.asked.push(...asked);
  const bytes = Buffer.concat(asked.map((each) => each.bytes.subarray(0, each.step.stopAt)));
  if (step.deafMs) socket.pause();
  let at = 0;
  for (const [atByte, ms] of asked[0]!.step.pauses ?? []) {
    if (atByte >= bytes.length || socket.destroyed) break;
    socket.write(bytes.subarray(at, atByte));
    at = atByte;
    await sleep(ms);
  }
  if (!socket.destroyed) socket.write(bytes.subarray(at));
  if (step.deafMs) {
    await sleep(step.deafMs);
    socket.resume();
  }
  if (step.leave) {
    const [ms, how] = step.leave;
    if (ms > 0) await sleep(ms);
    if (how === 'half') socket.end();
    else if (how === 'reset' && !socket.writableEnded) socket.resetAndDestroy(); // as in `#accept`
    else socket.destroy();
  }
  const { timeoutMs, waitMs, stallMs } = story.world;
  const limitMs = (2 * asked.length + 1) * timeoutMs + (asked.length + 1) * waitMs + stallMs + 2000;
  const isDone = await until(() => wire.isDone(asked), limitMs);
  for (const each of asked) {
    if (!isDone && each.stays && !each.response) story.find(4, `a client waits forever (${each.mark})`, true);
    end(each);
  }
}
