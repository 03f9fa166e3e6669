/** What a run prints. */

import { type Failure, INVARIANTS } from './finds.ts';

export const say = (text: string): void => void process.stdout.write(`${text}\n`);

export function sayFailure(word: string, { world, find: { invariant, what }, afterMs }: Failure): void {
  const after = afterMs === undefined ? '' : `, after ${Math.round(afterMs / 1000)} s`;
  say(`${word}: invariant ${invariant}, seed ${world.seed}${after}: ${what}\n    ${INVARIANTS[invariant]}`);
}
