/** Where the tests run: on Node or Deno, and from which folder. */

import { extname } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';

export const isDeno = 'Deno' in globalThis;

export const isNode = !isDeno;

export const ON_NODE = { skip: !isNode && 'other runtimes have other options for what to trust' };

/** How this runtime starts a TypeScript file: in the same way as this one. */
export const LOADER = process.execArgv.filter((flag, i, all) =>
  flag.startsWith('--import') || all[i - 1] === '--import'
);

/** The repository, also where this module has been compiled into dist/tests. */
export const HERE = fileURLToPath(new URL('..', import.meta.url)).replace(/dist[\\/]tests[\\/]$/, '');

/** The gateway that is tested: the source, or what is compiled of it, unless the value of a variable names another file. */
export function gatewayFile(named: string | undefined): URL {
  if (named) return new URL(named, pathToFileURL(HERE));
  return new URL(`../gateway${extname(import.meta.url)}`, import.meta.url);
}
