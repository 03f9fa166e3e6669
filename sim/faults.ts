/** The faults of planted/, and how one is planted in a source. */

import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { HERE } from '../test/runtime.ts';
import { INVARIANTS } from './finds.ts';

/** A fault: the name of its file, a sentence about it, the invariant that it breaks, and its patch. */
export type Fault = { name: string; title: string; invariant: number; patch: string };

export function readFaults(): Fault[] {
  const folder = join(HERE, 'sim/planted');
  return readdirSync(folder).sort().map((name) => {
    const patch = readFileSync(join(folder, name), 'utf8');
    const [, title = '', invariant = ''] = /^(.+)\nInvariant: (\d+)\n/.exec(patch) ?? [];
    if (!(invariant in INVARIANTS)) throw new Error(`${name} does not begin with a sentence and "Invariant: N"`);
    return { name: name.replace('.patch', ''), title, invariant: Number(invariant), patch };
  });
}

/**
 * Applies a unified diff to one text. The old lines of each hunk must occur there exactly once; the numbers of lines do
 * not matter, so a patch still applies after changes elsewhere.
 */
export function applyPatch(source: string, patch: string): string {
  const [, ...hunks] = patch.split(/^@@ .*\n/m);
  for (const hunk of hunks) {
    const lines = hunk.split('\n');
    const linesWith = (signs: string): string =>
      lines.filter((line) => line && signs.includes(line[0]!)).map((line) => `${line.slice(1)}\n`).join('');
    const [from, to] = [linesWith(' -'), linesWith(' +')];
    if (source.split(from).length !== 2) throw new Error(`this does not occur exactly once:\n${from}`);
    source = source.replace(from, () => to);
  }
  return source;
}
