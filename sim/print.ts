/** What a run prints. */

import { codeOf } from './checks.ts';
import { INVARIANTS } from './finds.ts';
import type { Play } from './play.ts';
import type { Failure } from './shrink.ts';

/** Prints the outcome of each request. */
export function sayStory({ asked, standIn, lines, lateMs }: Play): void {
  for (const { mark, startedMs, endedMs = 0, response, arrivals, acts, step } of asked.values()) {
    const told = response && `${response.status} ${codeOf(response) ?? ''}${response.isComplete ? '' : ' cut'}`;
    const times = `${Math.round(startedMs)} to ${Math.round(endedMs)}`;
    say(`${mark.padEnd(16)} ${times}: arrived ${arrivals}, acted ${acts}, told ${told} | ${JSON.stringify(step)}`);
  }
  say(`absences ${JSON.stringify(standIn.absences)}, the loop was late by ${Math.round(lateMs)} ms`);
  for (const line of lines) if (line.message !== 'listening') say(JSON.stringify(line));
}

export const say = (text: string): void => void process.stdout.write(`${text}\n`);

export function sayFailure(word: string, { world, find: { invariant, what }, afterMs }: Failure): void {
  const after = afterMs === undefined ? '' : `, after ${Math.round(afterMs / 1000)} s`;
  say(`${word}: invariant ${invariant}, seed ${world.seed}${after}: ${what}\n    ${INVARIANTS[invariant]}`);
}
