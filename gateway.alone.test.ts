/**
 * The tests of gateway.test.ts that look at memory or processor time, or block: one by one, with no other test beside
 * them. `npm test` runs both files, one after the other. Bun takes this one by a command of its own.
 *
 *     node --import tsx --test --test-concurrency=1 gateway.alone.test.ts gateway.test.ts      (deno test -A likewise)
 *     bun test --timeout 1200000 ./gateway.alone.test.ts
 */

Object.defineProperty(globalThis, 'isAlonePart', { value: true, configurable: true });
const { isPart } = await import('./gateway.test.ts');
// Where both files share a process, as in one command of Bun's, nothing would be registered, and nothing said.
if (!isPart) throw new Error('gateway.test.ts was imported before: run gateway.alone.test.ts by a command of its own');
