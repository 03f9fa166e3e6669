/**
 * A seeded simulation over real sockets, which searches for new bugs:  npm run sim -- --seconds 600 --seed N
 *
 *   --seconds S   how long new worlds are made and played (60)
 *   --seed N      the seed of the first world; the next one has N + 1
 *   --side N      how many timed worlds play side by side (8)
 *   --kind KIND   only worlds of this kind
 *   --stop N,N    ends at the first find of one of these invariants, and reduces no world
 *   --world FILE  plays the world of a JSON file, and prints the outcome of each request
 *
 * A world is data: one JSON object, generated from a seed. What it consists of is in parts.ts, what must hold in it in
 * `INVARIANTS` of finds.ts, and its kinds are in `WORLDS` of kinds.ts. A world that fails is reduced. Each find becomes a test, because a seed means
 * another world as soon as a generator changes.
 *
 * Most finds do not depend on time, and a single one is red. A find that depends on time must recur when the world is
 * played alone, twice out of two; otherwise it is a warning.
 *
 *   worlds of time       worlds.ts makes them, timed.ts plays them: actors.ts and client.ts in front of backend.ts
 *   bytes and processes  wire.ts and log.ts, with process.ts
 *   decisions            meaning.ts and rules.ts, each with its model, at desk.ts
 *
 * Modules import only what is before them in this order: worlds and their parts (parts.ts, tokens.ts, worlds.ts), the
 * stand-in and the clients (backend.ts, client.ts, desk.ts), the play (play.ts, actors.ts), the checks (checks.ts), and
 * the run (the kinds of worlds, kinds.ts, this file).
 *
 * GATEWAY_FILE names another file than gateway.ts. `npm run sim:planted` shows that known faults are found (planted.ts).
 */

import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { hasSmallBuffers } from './buffers.ts';
import { CAME, type Failure } from './finds.ts';
import { playAny, WORLD_KINDS } from './kinds.ts';
import { ANSWERS, type AnyWorld, CHANGE_NAMES, ENCODINGS, INTRUSIONS, KINDS, PHASES } from './parts.ts';
import { say, sayFailure } from './print.ts';
import { firstOfEach, shrink } from './shrink.ts';
import { type Run, simulate } from './simulate.ts';
import { SHARED } from './tokens.ts';

/** What could occur and did not. */
function neverCame(): string[] {
  const all = Object.entries({
    ...{ actor: KINDS, answer: ANSWERS, phase: PHASES, rules: CHANGE_NAMES },
    shared: Object.keys(SHARED),
    ...{ meaning: ENCODINGS, intrusion: INTRUSIONS, log: ['dropped'] },
  }).flatMap(([what, names]) => names.map((name) => `${what} ${name}`));
  return all.filter((name) => !CAME.has(name));
}

/** Plays one world, and prints the outcome of each request. */
async function playLoud(world: AnyWorld): Promise<number> {
  say(JSON.stringify(world));
  const failures = (await playAny(world, say)).map((find): Failure => ({ world, find }));
  for (const failure of failures) sayFailure('RED', failure);
  return failures.length;
}

/** Plays new worlds, and prints what was found. @returns how many kinds of finds are red. */
async function playNew(run: Run): Promise<number> {
  say(`seed ${run.seed}, ${run.seconds} s, ${run.side} worlds side by side`);
  if (!hasSmallBuffers) say('this runtime has no _writeGeneric: torn requests are not looked for');
  const startMs = performance.now();
  const result = await simulate(run);
  const failures = firstOfEach(result.failures);
  for (const warning of result.warnings) sayFailure('WARNING', warning);
  for (const failure of failures) sayFailure('RED', failure);
  const never = run.stopAt || run.kinds ? [] : neverCame();
  if (never.length > 0) say(`never came: ${never.join(', ')}`);
  for (const failure of run.stopAt ? [] : failures) {
    const { find: { what }, world: { seed } } = failure;
    say(`the smallest world for "${what.slice(0, 200)}" of seed ${seed}:\n${JSON.stringify(await shrink(failure))}`);
  }
  const tookS = Math.round((performance.now() - startMs) / 1000);
  say(`${result.worlds} worlds in ${tookS} s, ${failures.length} kinds of finds`);
  return failures.length;
}

function main(): Promise<number> {
  const { values } = parseArgs({
    options: {
      seconds: { type: 'string', default: '60' },
      seed: { type: 'string', default: String(Date.now() % 1e9) },
      side: { type: 'string', default: '8' },
      world: { type: 'string' },
      kind: { type: 'string' },
      stop: { type: 'string' },
    },
  });
  const [seed, seconds] = [Number(values.seed), Number(values.seconds)];
  if (values.world !== undefined) return playLoud(JSON.parse(readFileSync(values.world, 'utf8')));
  const kinds = values.kind === undefined ? undefined : WORLD_KINDS.filter((kind) => kind === values.kind);
  if (kinds?.length === 0) throw new Error(`${values.kind} is not one of ${WORLD_KINDS}`);
  return playNew({ seed, seconds, side: Number(values.side), kinds, stopAt: values.stop?.split(',').map(Number) });
}

const count = await main().catch((error) => say(String(error.stack)) ?? 1);
process.exit(count > 0 ? 1 : 0);
