/** The clock of the worlds, which follows the event loop, and the watch for what belongs to no world. */

import { setTimeout as sleep } from 'node:timers/promises';
import { limitWrites } from './buffers.ts';
import type { Played } from './finds.ts';

/** All worlds being played, for errors that belong to no world, and for the watch on the event loop. */
const PLAYS = new Set<Played>();

/** Records an uncaught error. Which world it belongs to is not known. */
function onUncaught(error: unknown): void {
  const stack = error instanceof Error ? error.stack : String(error);
  for (const play of PLAYS) play.find(7, `an uncaught error: ${stack}`);
}

let watcher: NodeJS.Timeout | undefined;

/**
 * A clock that counts turns of the event loop: a turn of 10 ms counts 20 ms at most. It measures how long a request has
 * waited while the gateway could run, so that a busy machine makes nothing red.
 */
export let loopMs = 0;

/** Begins or ends to watch a world: uncaught errors, and the event loop. */
export function watch(play: Played, isPlayed: boolean): void {
  if (isPlayed) PLAYS.add(play);
  else PLAYS.delete(play);
  const isOn = watcher !== undefined;
  if (isOn === PLAYS.size > 0) return;
  clearInterval(watcher);
  watcher = undefined;
  for (const event of ['uncaughtException', 'unhandledRejection']) {
    if (isOn) process.off(event, onUncaught);
    else process.on(event, onUncaught);
  }
  limitWrites(!isOn);
  if (isOn) return;
  let lastMs = performance.now();
  watcher = setInterval(() => {
    const nowMs = performance.now();
    loopMs += Math.min(20, nowMs - lastMs);
    for (const play of PLAYS) play.lateMs = Math.max(play.lateMs, nowMs - lastMs - 10);
    lastMs = nowMs;
  }, 10);
}

/** Whether a promise takes longer than this on the clock that counts turns. */
export async function isLate(promise: Promise<unknown>, limitMs: number): Promise<boolean> {
  let isOver = false;
  void promise.finally(() => isOver = true);
  return !await until(() => isOver, limitMs);
}

/** Waits until a condition holds. @returns whether it holds in time. */
export async function until(condition: () => boolean | Promise<boolean>, limitMs: number): Promise<boolean> {
  const clock = watcher ? () => loopMs : () => performance.now();
  const endMs = clock() + limitMs;
  while (!await condition()) {
    if (clock() > endMs) return false;
    await sleep(10);
  }
  return true;
}
