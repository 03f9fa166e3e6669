/** How the worlds of each kind are made, played and made smaller. */

import { batches } from './batches.ts';
import type { Find } from './finds.ts';
import { genFlood, playLog } from './log.ts';
import { genMeanings, playMeanings } from './meaning.ts';
import type { WorldKind, Worlds } from './parts.ts';
import { genCases, genCounts, playCases } from './rules.ts';
import { playWorld } from './timed.ts';
import { genWireClient, playWires } from './wire.ts';
import { genLarge, genWorld } from './worlds.ts';

/** Everything about the worlds of one kind. */
interface WorldRow<W> {
  make: (seed: number) => W;
  /** Plays a world. @param say prints what it tells of itself. @returns what was found. */
  play: (world: W, say?: (text: string) => void) => Promise<Find[]>;
  /** What is tried instead, beside smaller lists, when a world that fails is reduced. */
  smaller: Partial<W>[];
  /** The part of a round's time. */
  share: number;
  /** How many are played side by side; undefined if `--side` says so. */
  side: number | undefined;
}

const CALMER = [{ phases: [] }, { deafMs: [0] }];
const WITHOUT_SHARED = [{ shared: 'none' as const }];

/** The kinds of worlds, in the order of a round. */
export const WORLDS: { [K in WorldKind]: WorldRow<Worlds[K]> } = {
  meaning: { make: genMeanings, play: playMeanings, smaller: WITHOUT_SHARED, share: 1, side: 1 },
  rules: { make: genCases, play: playCases, smaller: WITHOUT_SHARED, share: 1, side: 1 },
  counts: { make: genCounts, play: playCases, smaller: WITHOUT_SHARED, share: 1, side: 1 },
  log: { make: batches('log', 1, genFlood), play: playLog, smaller: [], share: 1, side: 1 },
  wire: { make: batches('wire', 80, genWireClient), play: playWires, smaller: [{ tls: false }], share: 2, side: 2 },
  large: { make: genLarge, play: playWorld, smaller: CALMER, share: 1, side: 1 },
  timed: { make: genWorld, play: playWorld, smaller: CALMER, share: 5, side: undefined },
};
export const WORLD_KINDS = Object.keys(WORLDS) as WorldKind[];

/** Plays a world of any kind. */
export function playAny<K extends WorldKind>(world: Worlds[K], say?: (text: string) => void): Promise<Find[]> {
  return WORLDS[world.kind as K].play(world, say);
}
