/** Decides what the names of hosts resolve to. */

import dns from 'node:dns';
import type { TestContext } from './guard.ts';

type Found = (error: Error) => void;

export type Look = (done: Found, find: (host: string) => void) => void;

const LOOKUPS = new Map<string, Look>();

let takesLookups = false;

/** From now on, `answer` decides each lookup of this name; `find` looks up another name. */
export function takeLookup(t: TestContext, name: string, answer: Look): void {
  if (!takesLookups) {
    takesLookups = true;
    const { lookup } = dns;
    dns.lookup = ((asked: string, options: object, done: Found) => {
      const find = (host: string): void => (lookup as (...args: unknown[]) => void)(host, options, done);
      const own = LOOKUPS.get(asked);
      if (own) own(done, find);
      else find(asked);
    }) as typeof lookup;
  }
  LOOKUPS.set(name, answer);
  t.after(() => void LOOKUPS.delete(name));
}
