/** The kinds of worlds, and those that are lists of actions. */

import { type Draw, generator } from './chance.ts';
import type { Flood } from './log.ts';
import type { Meaning } from './meaning.ts';
import type { Case } from './rules.ts';
import type { SharedName } from './tokens.ts';
import type { WireClient } from './wire.ts';
import type { World } from './worlds.ts';

/** What the worlds that are lists of actions consist of, by their kinds. */
type Parts = { wire: WireClient; log: Flood; meaning: Meaning; rules: Case; counts: Case };
/**
 * Such a world. `tls` is that of the gateway in worlds of the wire; `shared` are the lists and defaults at the top level in
 * those of decisions.
 */
export type Batch<K extends keyof Parts> = {
  kind: K;
  seed: number;
  tls: boolean;
  parts: Parts[K][];
  shared?: SharedName;
};

/** The worlds by their kinds. */
export type Worlds = { timed: World; large: World } & { [K in keyof Parts]: Batch<K> };
export type WorldKind = keyof Worlds;
export type AnyWorld = Worlds[WorldKind];

/** Makes the worlds of a kind from the generator of its parts. */
export function batches<K extends keyof Parts>(kind: K, count: number, gen: (draw: Draw) => Parts[K]) {
  return (seed: number): Batch<K> => {
    const draw = generator(seed, kind);
    return { kind, seed, tls: draw.chance(0.4), parts: Array.from({ length: count }, () => gen(draw)) };
  };
}
