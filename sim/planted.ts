/**
 * Shows that the simulation finds known faults, which no test catches:  npm run sim:planted
 *
 *   --seconds S  how long it may look for each fault (60)
 *   --seed N     the seed of the first world
 *   --only TEXT  only the faults whose file names contain the text
 *
 * Each file of planted/ is a patch of gateway.ts, with a sentence about the fault and the number of the invariant that
 * it breaks. It is applied to a copy, and a run against that copy must find that invariant broken. A new fault:
 * break gateway.ts, and write `git diff -U1 gateway.ts` below the two lines.
 */

import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';
import { applyPatch, type Fault, readFaults } from './faults.ts';

const { values: options } = parseArgs({
  options: {
    seconds: { type: 'string', default: '60' },
    seed: { type: 'string', default: String(Date.now() % 1e9) },
    only: { type: 'string', default: '' },
  },
});
const FILE = new URL('../gateway.ts', import.meta.url);

/** Plays against a copy of gateway.ts with a fault, in a separate process. @returns whether the fault was found. */
async function findFault({ name, title, invariant, patch }: Fault, folder: string): Promise<boolean> {
  const file = join(folder, 'gateway.mts');
  writeFileSync(file, applyPatch(readFileSync(FILE, 'utf8'), patch));
  const startMs = performance.now();
  const args = ['--seconds', options.seconds, '--seed', options.seed, '--stop', String(invariant)];
  const program = [...process.execArgv, ...'Deno' in globalThis ? ['run', '-A', '--no-check'] : []];
  const child = spawn(process.execPath, [...program, fileURLToPath(new URL('run.ts', import.meta.url)), ...args], {
    env: { ...process.env, GATEWAY_FILE: pathToFileURL(file).href },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let report = '';
  child.stdout.on('data', (chunk) => report += chunk);
  await once(child, 'close');
  const isFound = report.includes(`RED: invariant ${invariant},`);
  const took = `${((performance.now() - startMs) / 1000).toFixed(0)} s`;
  console.log(isFound ? `found: ${name}, ${took}` : `NOT FOUND: ${name} (${title}), ${took}\n${report}`);
  return isFound;
}

const folder = mkdtempSync(join(tmpdir(), 'gateway-sim-'));
let isEachFound = true;
for (const fault of readFaults()) {
  if (fault.name.includes(options.only) && !await findFault(fault, folder)) isEachFound = false;
}
rmSync(folder, { recursive: true });
process.exit(isEachFound ? 0 : 1);
