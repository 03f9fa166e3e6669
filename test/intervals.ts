/** Intervals of a gateway that a test runs itself, instead of waiting for them. */

import { AsyncLocalStorage } from 'node:async_hooks';

/** Starts something, and returns a function that runs the intervals which it has set and which are wanted. */
export async function holdIntervals<T>(
  isWanted: (everyMs: number) => boolean,
  start: () => Promise<T>,
): Promise<[started: T, runIntervals: () => void]> {
  const own = new AsyncLocalStorage<true>(); // other tests of the process start gateways at the same time
  const due: (() => void)[] = [];
  const { setInterval } = globalThis;
  const noting = (run: (...args: unknown[]) => void, everyMs: number, ...args: unknown[]): unknown => {
    if (!own.getStore() || !isWanted(everyMs)) return setInterval(run, everyMs, ...args);
    due.push(() => run(...args));
    return setInterval(() => {}, everyMs); // there is something to clear, and nothing else runs it
  };
  globalThis.setInterval = noting as typeof setInterval;
  const started = await own.run(true, start).finally(() => (globalThis.setInterval = setInterval));
  return [started, () => due.forEach((run) => run())];
}
