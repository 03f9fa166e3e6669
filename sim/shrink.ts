/**
 * Makes a world that fails smaller: parts of its lists are removed as long as the same invariant fails. The worst kinds
 * are rare races, so a world that failed may pass when it is played again.
 */

import { isDeepStrictEqual } from 'node:util';
import type { Failure } from './finds.ts';
import { playAny, WORLDS } from './kinds.ts';
import type { AnyWorld } from './parts.ts';

/** Whether the same invariant fails in a world that is played alone. */
export async function failsAgain({ world, find }: Failure): Promise<boolean> {
  return (await playAny(world)).some(({ invariant, what, isDoubtful }) =>
    invariant === find.invariant && kindOf(what) === kindOf(find.what) && !isDoubtful
  );
}

/** The text of a find without its numbers and marks: two finds of one kind most likely have one cause. */
const kindOf = (what: string): string => what.replace(/: \{[^]*|\(.*\)|\d+|"[^]*?"/g, '').slice(0, 60);

/** The first failure of each kind. */
export function firstOfEach(failures: Failure[]): Failure[] {
  const kinds = new Map(failures.toReversed().map((failure) => [kindOf(failure.find.what), failure]));
  return [...kinds.values()].toReversed();
}

/** All worlds that lack a part of this one: half of a list or one of its members, at any depth. */
function* smallerOf(whole: object): Generator<object> {
  if (Array.isArray(whole) && typeof whole[0] === 'object' && !Array.isArray(whole[0])) {
    const half = whole.length >> 1;
    if (half > 1) yield* [whole.slice(half), whole.slice(0, half)];
    if (whole.length > 1) { for (const i of whole.keys()) yield whole.toSpliced(i, 1); }
  }
  for (const [key, part] of Object.entries(whole)) {
    if (typeof part !== 'object' || part === null) continue;
    for (const smaller of smallerOf(part)) {
      yield Array.isArray(whole) ? whole.with(Number(key), smaller) : { ...whole, [key]: smaller };
    }
  }
}

/** Removes from a world what the find does not need. A race may not occur at once, so each try plays several times. */
export async function shrink({ world, find }: Failure, tries = 3): Promise<AnyWorld> {
  const stillFails = async (smaller: AnyWorld): Promise<boolean> => {
    for (let i = 0; i < tries; i++) if (await failsAgain({ world: smaller, find })) return true;
    return false;
  };
  const endMs = performance.now() + 60_000;
  for (let i = 0; performance.now() < endMs;) {
    const others = WORLDS[world.kind].smaller.map((other) => ({ ...world, ...other }));
    const smaller = [...smallerOf(world), ...others][i] as AnyWorld | undefined;
    if (!smaller) break;
    if (!isDeepStrictEqual(smaller, world) && await stillFails(smaller)) world = smaller;
    else i++;
  }
  return world;
}
