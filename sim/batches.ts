/** Makes the worlds that are lists of actions. */

import { type Draw, generator } from './chance.ts';
import type { Batch, Parts } from './parts.ts';

/** Makes the worlds of a kind from the generator of its parts. */
export function batches<K extends keyof Parts>(kind: K, count: number, gen: (draw: Draw) => Parts[K]) {
  return (seed: number): Batch<K> => {
    const draw = generator(seed, kind);
    return { kind, seed, tls: draw.chance(0.4), parts: Array.from({ length: count }, () => gen(draw)) };
  };
}
