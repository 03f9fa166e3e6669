/** What differs between Node and Deno for the tests. */

export const isDeno = 'Deno' in globalThis;

export const isNode = !isDeno;

export const ON_NODE = { skip: !isNode && 'other runtimes have other options for what to trust' };

/** How this runtime starts a TypeScript file: in the same way as this one. */
export const LOADER = process.execArgv.filter((flag, i, all) =>
  flag.startsWith('--import') || all[i - 1] === '--import'
);
