/** What differs between Node, Deno and Bun for the tests. */

export const isDeno = 'Deno' in globalThis;

export const isNode = !('Bun' in globalThis) && !isDeno;

export const ON_NODE = { skip: !isNode && 'other runtimes have other options for what to trust' };

/** How this runtime starts a TypeScript file: in the same way as this one. */
export const LOADER = process.execArgv.filter((flag, i, all) =>
  flag.startsWith('--import') || all[i - 1] === '--import'
);
