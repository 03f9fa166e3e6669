/** Chance that depends on a seed alone: the same names draw the same numbers, on every runtime. */

/** Spreads each bit of a number over all bits (the last steps of MurmurHash3). */
function finish(x: number): number {
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}

/** Draws numbers that depend only on these names. */
export type Draw = ReturnType<typeof generator>;
export function generator(...names: (string | number)[]) {
  let state = 0;
  for (const char of names.join('/')) state = finish(state + char.charCodeAt(0) + 0x9e3779b9);
  const next = (): number => {
    state = (state + 0x9e3779b9) >>> 0;
    return finish(state) / 2 ** 32;
  };
  const below = (limit: number): number => Math.floor(next() * limit);
  return {
    below,
    between: (least: number, most: number): number => least + below(most - least + 1),
    chance: (probability: number): boolean => next() < probability,
    pick: <T>(list: readonly T[]): T => list[below(list.length)]!,
  };
}
