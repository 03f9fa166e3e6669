/**
 * The clock of the tests, which makes their verdicts independent of the machine's speed. In a process that imports this
 * module, time passes as the event loop turns: a turn counts at most 20 ms, however long it took. So on a slow machine,
 * or next to a test that blocks, no timeout of a gateway or a test fires before the loop has read what was ready. On a
 * fast machine this clock equals real time. `setTimeout` and `performance.now` are replaced before gateway.ts is
 * imported, and the timeouts of node:net and node:http, which time themselves, are delayed by what the loop has lost.
 */

import net from 'node:net';

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
export function lostMs(withinMs: number): number {
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
  const before = moved(); // what moves meanwhile starts the socket's own timeout again
  setTimeout(() => {
    if (!this.destroyed && this.timeout && moved() === before) emit.call(this, event, ...args);
  }, graceMs);
  return true;
};
