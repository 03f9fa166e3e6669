import { assert } from './assertions.ts';
import { read } from './files.ts';
import { test } from './guard.ts';

const SEED = Number(process.env.TEST_SEED ?? Date.now() % 1e9);

test(`worlds of each kind break no invariant (seed ${SEED})`, async (t) => {
  const { hasSmallBuffers } = await import('../sim/buffers.ts');
  const { simulate } = await import('../sim/simulate.ts');
  if (!hasSmallBuffers) t.diagnostic('this runtime has no _writeGeneric: torn requests are not looked for');
  const { worlds, failures, warnings } = await simulate({ seed: SEED, seconds: 2, side: 4 });
  const inWords = ({ find, world }: (typeof failures)[number]): string => `${find.what} in ${JSON.stringify(world)}`;
  for (const warning of warnings) t.diagnostic(`warning: ${inWords(warning)}`);
  assert.deepEqual(failures.map(inWords), []);
  assert.ok(worlds >= 5, `only ${worlds} worlds`);
});

test('each planted fault of sim/planted/ fits the code', async () => {
  const { applyPatch, readFaults } = await import('../sim/faults.ts');
  const source = read('gateway.ts');
  const faults = readFaults();
  assert.ok(faults.length > 0, 'no fault is planted');
  for (const { name, patch } of faults) {
    assert.notEqual(applyPatch(source, patch), source, name);
    assert.throws(() => applyPatch('', patch), /does not occur exactly once/, name);
  }
});
