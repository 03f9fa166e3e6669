/** Plays new worlds for a time. */

import { until } from './clock.ts';
import type { Failure } from './finds.ts';
import { playAny, WORLD_KINDS, WORLDS } from './kinds.ts';
import type { WorldKind } from './parts.ts';
import { failsAgain, firstOfEach } from './shrink.ts';
import { genWorld } from './worlds.ts';

/** Which worlds are played, for how long, and how many timed ones side by side. */
export interface Run {
  seed: number;
  seconds: number;
  side?: number;
  /** Plays only worlds of these kinds. */
  kinds?: WorldKind[] | undefined;
  /** Ends the run at the first find of one of these invariants. */
  stopAt?: readonly number[] | undefined;
}

/** `warnings` are finds that depend on time and did not recur. */
type Result = { worlds: number; failures: Failure[]; warnings: Failure[] };

/**
 * Plays new worlds in rounds for a time, then plays those again, alone, whose finds depend on time. The first round has
 * worlds of each kind, however long that takes.
 */
export async function simulate({ seed, seconds, side = 8, kinds = WORLD_KINDS, stopAt }: Run): Promise<Result> {
  const result: Result = { worlds: 0, failures: [], warnings: [] };
  const maybe: Failure[] = [];
  const startMs = performance.now();
  const endMs = startMs + seconds * 1000;
  const isStop = ({ find }: Failure): boolean => stopAt?.includes(find.invariant) === true;
  const isStopped = (): boolean => result.failures.some(isStop) || maybe.filter(isStop).length > 3;
  let isFirstRound = true;
  const isOver = (): boolean => isStopped() || (!isFirstRound && performance.now() > endMs);
  const playOn = async (kind: WorldKind, untilMs: number): Promise<void> => {
    do {
      const world = WORLDS[kind].make(seed + result.worlds++);
      for (const find of await playAny(world)) {
        (find.isTimed ? maybe : result.failures).push({ world, find, afterMs: performance.now() - startMs });
      }
    } while (!isOver() && performance.now() < Math.min(untilMs, endMs));
  };
  const before = activeResources();
  const shares = kinds.reduce((sum, kind) => sum + WORLDS[kind].share, 0);
  while (!isOver()) {
    for (const kind of kinds) {
      if (isOver()) break;
      const { share, side: length = side } = WORLDS[kind];
      const untilMs = performance.now() + Math.min(20, seconds) * 1000 * share / shares;
      await Promise.all(Array.from({ length }, () => playOn(kind, untilMs)));
    }
    isFirstRound = false;
  }
  const isFlat = await until(() => activeResources().length <= before.length, 60_000);
  if (!isFlat) {
    const what = `what was there before the worlds: ${before}; what is left after them: ${activeResources()}`;
    result.failures.push({ world: genWorld(seed), find: { invariant: 6, what, isTimed: false } });
  }
  // A world in which the loop was late may have failed only because of that, so the others are tried first.
  for (const first of firstOfEach(maybe.sort((a, b) => Number(a.find.isDoubtful) - Number(b.find.isDoubtful)))) {
    const isRed = await failsAgain(first) && await failsAgain(first);
    (isRed ? result.failures : result.warnings).push(first);
  }
  return result;
}

/** The timers, sockets and the like that keep this process alive, if the runtime lists them. */
const activeResources = (): string[] => process.getActiveResourcesInfo?.() ?? [];
