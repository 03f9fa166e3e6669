/** The stand-in backend of the worlds of time and of the wire. */

import { once } from 'node:events';
import net, { type AddressInfo } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import { type SlowReader, STAND_INS, wakeWriters } from './buffers.ts';
import { until } from './clock.ts';
import { came, type Invariant } from './finds.ts';
import { chunked, MessageReader } from './messages.ts';
import type { Answer, Phase } from './parts.ts';
import type { Asked, Story } from './story.ts';
import { LISTS, SECRET_PATTERN, TOKENS } from './tokens.ts';

/** A connection of the stand-in, and the number of bytes it has read. */
export type Peer = { socket: net.Socket; reset: () => void; readBytes: number; isDeaf: boolean; isBusy: boolean };

/** A period in which the stand-in was away for all requests, or slow for one. */
export type Absence = { kind: 'away' | 'hung' | 'slow'; fromMs: number; untilMs: number };

let standIns = 0;

/**
 * A raw server instead of the backend, which checks every byte that it gets. It models when the real one acts (on a
 * send at the end of its first JSON value, on others with the head), how an answer breaks off, and how it is away. It
 * does not model what routes mean, which bodies they refuse, or the frames of a WebSocket, which is an echo here.
 */
export class StandIn implements SlowReader {
  readonly story: Story;
  readonly windowBytes: number;
  readonly server = net.createServer({ pauseOnConnect: true, noDelay: true });
  readonly peers = new Map<number, Peer>();
  port = 0;
  /** Neither reading nor answering. */
  isHung = false;
  isResetting = false;
  readonly absences: Absence[] = [];
  /** The marks of the requests that arrived, in order. */
  readonly order: string[] = [];
  /** How often it acted, by X-Request-Id. */
  readonly acted = new Map<string, number>();
  /** Callbacks for the answers that are held back. */
  held: (() => void)[] = [];
  /**
   * On Linux every address in 127.0.0.0/8 is this machine, and each stand-in has its own: otherwise, while it is away,
   * the stand-in of another world could get its port, and its requests.
   */
  readonly host = process.platform === 'linux' ? `127.1.${(standIns >> 8) & 255}.${standIns++ & 255}` : '127.0.0.1';
  readonly writers = new Map<number, () => void>();
  /** How many connections were established. */
  tries = 0;
  #isOver = false;
  #phases: Promise<unknown> = Promise.resolve();

  constructor(story: Story) {
    this.story = story;
    this.windowBytes = story.world.windowBytes;
    this.server.on('connection', (socket) => this.#accept(socket));
  }

  /** Listens, after an absence on the same port, which another program or a client may briefly have taken. */
  async listen(): Promise<void> {
    const listens = async (): Promise<boolean> => {
      this.server.listen(this.port, this.host, 511);
      return await once(this.server, 'listening').then(() => true, () => false);
    };
    if (!await until(listens, 10_000)) throw new Error(`port ${this.port} of a stand-in is taken`);
    this.port = (this.server.address() as AddressInfo).port;
    STAND_INS.set(`${this.host}:${this.port}`, this);
  }

  /** Starts the phases. */
  begin(): void {
    this.#phases = Promise.all(this.story.world.phases.map((phase) => this.#run(phase)));
  }

  /** Resolves when all phases are over. */
  async calm(): Promise<void> {
    this.#isOver = true;
    await this.#phases;
  }

  async close(): Promise<void> {
    await this.calm();
    STAND_INS.delete(`${this.host}:${this.port}`);
    for (const { socket } of this.peers.values()) socket.destroy();
    this.server.close();
  }

  async #run({ kind, atMs, forMs }: Phase): Promise<void> {
    await sleep(atMs);
    if (this.#isOver) return;
    came(`phase ${kind}`);
    if (kind === 'hung') await this.#during('hung', () => this.#hang(forMs));
    if (kind === 'reset') await this.#during('away', () => this.#resetNew(forMs));
    if (kind === 'gone') await this.#during('away', () => this.#leave(forMs));
  }

  async #during(kind: Absence['kind'], act: () => Promise<void>): Promise<void> {
    const absence = { kind, fromMs: performance.now(), untilMs: Infinity };
    this.absences.push(absence);
    await act();
    absence.untilMs = performance.now();
  }

  async #hang(forMs: number): Promise<void> {
    this.isHung = true;
    for (const peer of this.peers.values()) peer.socket.pause();
    await sleep(forMs);
    this.isHung = false;
    for (const peer of this.peers.values()) if (!peer.isDeaf) peer.socket.resume();
  }

  async #resetNew(forMs: number): Promise<void> {
    for (const peer of this.peers.values()) peer.reset();
    this.isResetting = true;
    await sleep(forMs);
    this.isResetting = false;
  }

  /** Closes the port and all connections for a time. */
  async #leave(forMs: number): Promise<void> {
    this.server.close();
    for (const peer of this.peers.values()) peer.reset();
    await sleep(forMs);
    await this.listen();
  }

  #accept(socket: net.Socket): void {
    socket.on('error', () => {});
    // Node leaves a socket open forever if it is reset while its end is being sent.
    const reset = (): void => void (socket.writableEnded ? socket.destroy() : socket.resetAndDestroy());
    if (this.isResetting) return reset();
    const list = this.story.world.deafMs;
    const deafMs = list[this.tries++ % list.length]!;
    const key = socket.remotePort!;
    const peer: Peer = { socket, reset, readBytes: 0, isDeaf: deafMs > 0, isBusy: false };
    this.peers.set(key, peer);
    socket.once('close', () => {
      this.peers.delete(key);
      wakeWriters(this, key);
    });
    const reader = new BackendReader(this, peer);
    socket.on('data', (chunk: Buffer) => {
      peer.readBytes += chunk.length;
      reader.read(chunk);
      wakeWriters(this, key);
    });
    const hear = (): void => {
      peer.isDeaf = false;
      if (!this.isHung) socket.resume();
    };
    this.slow(deafMs);
    if (deafMs > 0 && !this.#isOver) setTimeout(hear, deafMs).unref();
    else hear();
  }

  /** Records that a request waits for the stand-in from now on. */
  slow(ms: number): void {
    const fromMs = performance.now();
    if (ms > 0) this.absences.push({ kind: 'slow', fromMs, untilMs: fromMs + ms });
  }

  /**
   * How long the stand-in was away, hung or slow between two times. The gateway notices only at its next attempt that
   * the stand-in is back; between two attempts it pauses as long as the absence lasted, and a second at most. For the
   * gateway, an absence continues in the next one that starts within that second.
   */
  absentMs(kind: Absence['kind'], fromMs: number, untilMs: number): number {
    const parts = this.absences.filter((absence) => absence.kind === kind).map((absence) => {
      const before = this.absences.filter((other) => other.kind !== 'slow' && other.untilMs + 1000 > absence.fromMs);
      const begunMs = Math.min(...before.map((other) => other.fromMs), absence.fromMs);
      const lagMs = kind === 'away' ? Math.min(1000, absence.untilMs - begunMs + 100) : 0;
      return Math.min(untilMs, absence.untilMs + lagMs) - Math.max(fromMs, absence.fromMs);
    });
    return parts.reduce((sum, ms) => sum + Math.max(0, ms), 0);
  }
}

/** A request as the stand-in reads it. */
interface Arrival {
  asked: Asked | undefined;
  method: string;
  path: string;
  requestId: string;
  body: Buffer;
  isAnswered: boolean;
  hasActed: boolean;
}

/** Reads the requests of one connection as the backend does, acts on them and answers. */
class BackendReader extends MessageReader {
  readonly #standIn: StandIn;
  readonly #peer: Peer;
  #tail = '';
  #arrival: Arrival | undefined;

  constructor(standIn: StandIn, peer: Peer) {
    super();
    this.#standIn = standIn;
    this.#peer = peer;
  }

  override read(chunk: Buffer): void {
    const text = this.#tail + chunk.toString('latin1');
    // What a client writes into its WebSocket is not read.
    if (!this.isOver && SECRET_PATTERN.test(text)) this.#find(8, `the backend got a secret: ${text.slice(0, 600)}`);
    this.#tail = text.slice(-20);
    super.read(chunk);
  }

  #find(invariant: Invariant, what: string): void {
    this.#standIn.story.find(invariant, `${what} (${this.#arrival?.asked?.mark ?? 'no mark'})`);
  }

  onMistake(what: string): void {
    this.#find(1, what);
    this.#peer.reset();
  }

  /** A WebSocket is an echo. */
  onTunnel(bytes: Buffer): void {
    if (bytes.length > 0 && !this.#peer.socket.destroyed) this.#peer.socket.write(bytes);
  }

  onHead(first: string, headers: Map<string, string>): number | 'chunked' | undefined {
    const [, method, target] = /^([A-Z]+) (\/[\x21-\x7e]*) HTTP\/1\.1$/.exec(first) ?? [];
    if (method === undefined || target === undefined) return void this.fail('this line is no request');
    const { story, order } = this.#standIn;
    const mark = headers.get('x-mark') ?? '';
    const asked = story.asked.get(mark);
    const [base = ''] = /^\/moved(?=\/)/.exec(target) ?? [];
    const path = target.slice(base.length);
    const bases = story.inForce('ms', asked?.startedMs ?? 0, performance.now()).map((version) => version.base);
    if (!bases.includes(base)) this.#find(1, `a request arrives at ${target}, a path in no rules of its time`);
    if (mark === '' && path === '/v1/about') { // the query of a gateway's process at start
      return void this.#peer.socket.write(
        'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}',
      );
    }
    order.push(mark);
    const requestId = headers.get('x-request-id') ?? '';
    const state = { body: Buffer.alloc(0), isAnswered: false, hasActed: false };
    const arrival: Arrival = this.#arrival = { asked, method, path, requestId, ...state };
    this.#peer.isBusy = true;
    const [length, coding] = [headers.get('content-length'), headers.get('transfer-encoding')];
    if (length !== undefined && coding !== undefined) this.#find(1, 'a request has two lengths');
    if (!asked) this.#find(1, `a request reaches the backend that no actor made: ${method} ${path} ${mark}`);
    else if (asked.arrivals++ > 0) this.#find(1, 'a request reaches the backend twice');
    const isRefused = asked && !story.verdicts(asked, 'ms', asked.startedMs, performance.now()).includes(false);
    if (isRefused) this.#find(3, 'a request reaches the backend that all rules of its time refuse');
    if (requestId === '') this.#find(1, 'a request reaches the backend that the gateway did not make');
    const kind = asked?.step.answer[0];
    if (kind === 'resetBefore') {
      came(`answer ${kind}`);
      this.isOver = true;
      return void this.#peer.reset();
    }
    // Anything but a send acts, and is answered, as soon as its head is here, because its handler reads no body.
    if (asked && kind !== 'early' && !isSend(arrival)) this.#count(arrival, asked);
    if (asked && (kind === 'early' || !isSend(arrival))) void this.#answer(arrival);
    return coding === 'chunked' ? coding : Number(length ?? 0);
  }

  /** Compares a part of a body with what was sent, and acts at the end of the first JSON value. */
  onPart(part: Buffer): void {
    const arrival = this.#arrival!;
    const { asked, body: { length: fromByte } } = arrival;
    arrival.body = Buffer.concat([arrival.body, part]);
    if (asked?.expected && !asked.expected.subarray(fromByte, fromByte + part.length).equals(part)) {
      this.#find(1, 'the body that the backend gets is not a prefix of what was sent');
    }
    if (!part.includes('}') || arrival.hasActed || !isSend(arrival)) return;
    const text = firstObject(arrival.body.toString());
    if (text !== undefined) this.#act(arrival, text);
  }

  onWhole(): void {
    const arrival = this.#arrival!;
    if (isSend(arrival) && !arrival.hasActed) this.#find(1, 'a complete send is not a JSON object');
    this.#arrival = undefined;
  }

  #count({ requestId }: Arrival, asked: Asked): void {
    asked.acts++;
    const { acted } = this.#standIn;
    acted.set(requestId, (acted.get(requestId) ?? 0) + 1);
  }

  /** Acts on a send, of whose shapes the first alone is read alike by everyone. */
  #act(arrival: Arrival, text: string): void {
    arrival.hasActed = true;
    const { asked } = arrival;
    if (!asked) return;
    this.#count(arrival, asked);
    if (asked.acts > 1) this.#find(1, 'a send is acted on twice');
    const { number, recipients, message } = JSON.parse(text);
    const { shape } = asked.step;
    if (/twice|folded|doubled/.test(shape)) this.#find(3, `a send that is ${shape} is acted on`);
    const { senders, recipients: others } = (TOKENS[asked.actor?.token ?? 'free'] ?? {}) as Partial<typeof LISTS>;
    const isAllowed = senders?.includes(number) !== false && others?.includes(String(recipients)) !== false;
    if (!isAllowed) this.#find(3, `a send from ${number} to ${recipients} is acted on`);
    if (!String(message).includes(asked.mark)) this.#find(1, 'a send has the message of another');
    if (asked.step.answer[0] !== 'early') void this.#answer(arrival);
  }

  async #answer(arrival: Arrival): Promise<void> {
    const { asked } = arrival;
    const { socket } = this.#peer;
    if (!asked || arrival.isAnswered) return;
    arrival.isAnswered = true;
    const [kind, ms] = asked.step.answer;
    came(`answer ${kind}`);
    if (kind === 'never') return;
    if (asked.mark.startsWith('slot')) await new Promise<void>((resolve) => void this.#standIn.held.push(resolve));
    this.#standIn.slow(ms);
    if (ms > 0) await sleep(ms);
    while (this.#standIn.isHung) await sleep(5);
    this.#peer.isBusy = false;
    if (socket.destroyed) return;
    if (kind === 'resetAfter') return this.#peer.reset();
    if (kind === 'goneAfter') return void socket.end();
    if (kind === 'garbage') return void socket.end('these bytes are no response\r\n\r\n');
    const isUpgrade = kind === 'switching' || (asked.step.route === 'socket' && kind !== 'declined');
    if (!isUpgrade) return await this.#write(asked, kind, ms);
    this.isOver = true;
    const lines = 'Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: x\r\nX-Answer: ';
    socket.write(`HTTP/1.1 101 Switching Protocols\r\n${lines}${asked.mark}\r\n\r\n\x81\x05hello`);
    if (kind === 'switching') this.#peer.reset();
  }

  async #write(asked: Asked, kind: Answer, ms: number): Promise<void> {
    const { socket } = this.#peer;
    const size = asked.step.route === 'download' || kind === 'declined' ? asked.step.bodyBytes : 0;
    const body = JSON.stringify([{ timestamp: '1700000000000', mark: asked.mark, filler: 'y'.repeat(size) }]);
    asked.answeredBody = kind === 'short' ? body.slice(0, 10) : body;
    const status = kind === 'early' ? 400 : kind === 'redirect' ? 307 : asked.step.route === 'send' ? 201 : 200;
    const lines = [`HTTP/1.1 ${status} Whatever`, `X-Answer: ${asked.mark}`, 'Content-Type: application/json'];
    if (kind !== 'chunked') lines.push(`Content-Length: ${kind === 'short' ? 10 : body.length}`);
    if (kind === 'twoLengths' || kind === 'chunked') lines.push('Transfer-Encoding: chunked');
    if (kind === 'redirect') lines.push('Location: /v2/send/');
    if (kind === 'closing') lines.push('Connection: close');
    const head = `${lines.join('\r\n')}\r\n\r\n`;
    if (kind === 'hints') socket.write('HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n');
    if (kind === 'cut') {
      socket.write(head + body.slice(0, body.length / 2));
      await sleep(5);
      return void (ms > 20 ? socket.end() : this.#peer.reset());
    }
    if (kind === 'chunked') return void socket.write(Buffer.concat([Buffer.from(head), chunked(Buffer.from(body))]));
    if (kind !== 'pieces') return void (kind === 'closing' ? socket.end(head + body) : socket.write(head + body));
    const whole = head + body;
    for (const at of [0, 1, 2]) {
      socket.write(whole.slice(whole.length * at / 3, whole.length * (at + 1) / 3));
      await sleep(ms / 3);
    }
  }
}

function isSend({ method, path }: Arrival): boolean {
  return method === 'POST' && /^\/v[12]\/send(?:$|\?)/.test(path);
}

/** The first JSON object of a text, if it is complete: a decoder reads no further. */
function firstObject(text: string): string | undefined {
  let depth = 0;
  for (const { 0: token, index } of text.matchAll(/"[^"\\]*(?:\\.[^"\\]*)*(?:"|$)|[{}[\]]/gs)) {
    if (token === '{' || token === '[') depth++;
    if ((token === '}' || token === ']') && --depth === 0) return text.slice(0, index + 1);
  }
  return undefined;
}
