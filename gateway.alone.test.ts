/**
 * The tests of gateway.test.ts that measure memory or processor time, or block: one by one, in a separate process.
 * `npm test` runs both files at once. Bun needs a separate command for this one.
 *
 *     node --import tsx --test gateway.alone.test.ts gateway.test.ts      (deno test -A likewise)
 *     bun test --timeout 1200000 ./gateway.alone.test.ts
 */

Object.defineProperty(globalThis, 'isAlonePart', { value: true, configurable: true });
const { isPart } = await import('./gateway.test.ts');
// If both files share a process, as in one Bun command, this one would silently register no tests.
if (!isPart) throw new Error('gateway.test.ts was imported before: run gateway.alone.test.ts in a separate command');
