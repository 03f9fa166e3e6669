import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { assert, groupsOf } from '../assertions.ts';
import { read } from '../files.ts';
import { test } from '../guard.ts';
import { HERE } from '../runtime.ts';

const SEED = Number(process.env.TEST_SEED ?? Date.now() % 1e9);

test(`worlds of each kind break no invariant (seed ${SEED})`, async (t) => {
  const { hasSmallBuffers } = await import('../../sim/buffers.ts');
  const { simulate } = await import('../../sim/simulate.ts');
  if (!hasSmallBuffers) t.diagnostic('this runtime has no _writeGeneric: torn requests are not looked for');
  const { worlds, failures, warnings } = await simulate({ seed: SEED, seconds: 1, side: 2 });
  const inWords = ({ find, world }: (typeof failures)[number]): string => `${find.what} in ${JSON.stringify(world)}`;
  for (const warning of warnings) t.diagnostic(`warning: ${inWords(warning)}`);
  assert.deepEqual(failures.map(inWords), []);
  assert.ok(worlds >= 5, `only ${worlds} worlds`);
});

test('each planted fault of sim/planted/ fits the code', async () => {
  const { applyPatch, readFaults } = await import('../../sim/faults.ts');
  const source = read('gateway.ts');
  const faults = readFaults();
  assert.ok(faults.length > 0, 'no fault is planted');
  for (const { name, patch } of faults) {
    assert.notEqual(applyPatch(source, patch), source, name);
    assert.throws(() => applyPatch('', patch), /does not occur exactly once/, name);
  }
});

test('no modules of sim/ import each other in a circle, not even for types; parts.ts imports none', () => {
  const names = readdirSync(join(HERE, 'sim')).filter((name) => name.endsWith('.ts'));
  const importsOf = (name: string): string[] =>
    groupsOf(read(`sim/${name}`), /(?:\bfrom|\bimport\(?)\s*'\.\/([^']+)'/g);
  const done = new Set<string>();
  const circleFrom = (name: string, path: string[]): string[] | undefined => {
    if (path.includes(name)) return [...path.slice(path.indexOf(name)), name];
    if (done.has(name)) return undefined;
    for (const imported of importsOf(name)) {
      const circle = circleFrom(imported, [...path, name]);
      if (circle) return circle;
    }
    done.add(name);
    return undefined;
  };
  for (const name of names) assert.equal(circleFrom(name, [])?.join(' imports '), undefined);
  assert.ok(importsOf('run.ts').length > 0, 'imports are read');
  assert.deepEqual(importsOf('parts.ts'), []);
});
