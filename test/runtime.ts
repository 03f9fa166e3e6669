/** Where the tests run: on Node or Deno, and from which folder. */

import { fileURLToPath } from 'node:url';

export const isDeno = 'Deno' in globalThis;

export const isNode = !isDeno;

export const ON_NODE = { skip: !isNode && 'other runtimes have other options for what to trust' };

/** How this runtime starts a TypeScript file: in the same way as this one. */
export const LOADER = process.execArgv.filter((flag, i, all) =>
  flag.startsWith('--import') || all[i - 1] === '--import'
);

/** The repository, also where this module has been compiled into dist/tests. */
export const HERE = fileURLToPath(new URL('..', import.meta.url)).replace(/dist[\\/]tests[\\/]$/, '');
