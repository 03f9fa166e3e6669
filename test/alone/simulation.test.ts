import { assert } from '../assertions.ts';
import { read } from '../files.ts';
import { test } from '../guard.ts';

const SEED = Number(process.env.TEST_SEED ?? Date.now() % 1e9);

test(`worlds of gateway.fuzz.ts of each kind break no invariant (seed ${SEED})`, async (t) => {
  const { hasSmallBuffers, simulate } = await import('../../gateway.fuzz.ts');
  if (!hasSmallBuffers) t.diagnostic('this runtime has no _writeGeneric: torn requests are not looked for');
  const { worlds, failures, warnings } = await simulate({ seed: SEED, seconds: 8 });
  const inWords = ({ find, world }: (typeof failures)[number]): string => `${find.what} in ${JSON.stringify(world)}`;
  for (const warning of warnings) t.diagnostic(`warning: ${inWords(warning)}`);
  assert.deepEqual(failures.map(inWords), []);
  assert.ok(worlds >= 5, `only ${worlds} worlds`);
});

test('each planted fault of gateway.fuzz.ts fits the code', async () => {
  const { FAULTS, unfitFaults } = await import('../../gateway.fuzz.ts');
  assert.ok(FAULTS.length > 0, 'no fault is planted');
  assert.deepEqual(unfitFaults(read('gateway.ts')), [], 'renew the text of these faults');
  assert.deepEqual(unfitFaults(''), FAULTS.map(({ name }) => name));
});
