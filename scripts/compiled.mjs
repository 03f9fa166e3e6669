/**
 * `node --import ./scripts/compiled.mjs` runs the .ts files of this repository as `npm run compile:tests` has compiled
 * them into dist/tests. URLs and lines stay those of the source. tsx would take a third of a second for each process.
 */
import { readFileSync } from 'node:fs';
import { register } from 'node:module';
import process from 'node:process';
import { isMainThread } from 'node:worker_threads';

const ROOT = new URL('..', import.meta.url).href;

const SOURCE = new RegExp(`^${ROOT.replace(/[.+]/g, '\\$&')}(?!node_modules/)(.*)\\.ts$`);

if (/ts$/.test(process.env.TEST_GATEWAY_FILE ?? '')) await import('tsx/esm'); // a source that is not compiled
else if (isMainThread) {
  process.setSourceMapsEnabled(true);
  register(import.meta.url);
}

/** The compiler has written .js where a source imports another .ts. */
export async function resolve(specifier, context, next) {
  const isOwn = specifier.startsWith('.') && SOURCE.test(context.parentURL ?? '');
  return await next(isOwn ? specifier.replace(/\.js$/, '.ts') : specifier, context);
}

export async function load(url, context, next) {
  const [, name] = SOURCE.exec(url) ?? [];
  if (name === undefined) return await next(url, context);
  const code = readFileSync(new URL(`dist/tests/${name}.js`, ROOT), 'utf8');
  const map = `${'../'.repeat(name.split('/').length - 1)}./dist/tests/${name}.js.map`;
  const source = code.replace(/^\/\/# sourceMappingURL=.*/m, `//# sourceMappingURL=${map}`);
  return { format: 'module', source, shortCircuit: true };
}
