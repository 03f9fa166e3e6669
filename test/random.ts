/** Tests with random input. */

import { test, type TestContext } from './guard.ts';

/**
 * A test with a random generator. A failure shows the seed, and TEST_SEED repeats it.
 */
export function randomTest(title: string, run: (random: (below: number) => number, t: TestContext) => unknown): void {
  test(title, async (t) => {
    const seed = Number(process.env.TEST_SEED ?? Date.now() % 1e9);
    t.onFailure(() => `the seed: TEST_SEED=${seed}`);
    let state = Math.imul(seed, 0x9e3779b1);
    await run((below) => {
      state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0; // of Numerical Recipes
      return Math.floor((state / 2 ** 32) * below);
    }, t);
  });
}
