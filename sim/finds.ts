/** What must hold in every world, what a find and a failure are, and what occurred in a run. */

import type { AnyWorld } from './parts.ts';

/** What must hold in every world. A find names one of these by number. */
export const INVARIANTS = {
  1: 'The bytes of a request travel on one connection, are a prefix of what was sent, and are acted on at most once.',
  2: 'Responses are true: a 201 was acted on, and a refusal or "nothing was sent" was not.',
  3: 'No request exceeds the rules that its token had when it arrived; what all rules of its life allow is not refused, and ' +
    'one token is served in its order.',
  4: 'Each request gets at most one response, its own and in order; a client that stays gets one if honest or acted on.',
  5: 'An honest client is served in time; backend_unreachable needs an outage of backend.wait in the request.',
  6: 'At the end as many sends run at once as there are slots, nothing is left, and close() is quick.',
  7: 'No uncaught error, no internal error; one log line for each request, with the status that the client got.',
  8: 'No secret from one of the five places reaches the backend or the log.',
  9: 'The rules decide as their model does: client, credential, token, page, endpoint, rate, lists.',
  10: 'A process survives whatever is written to it, writes nothing to standard error, and exits with 0 on SIGTERM.',
  11: 'A message goes to the intended recipient, with the intended text, or is refused with a 4xx.',
  12: 'Counts are true: GET /metrics has what clients got and the backend took, and the log how many lines it lacks.',
  13: 'What one token posts changes nothing for another: its requests end as in a process that has read no others.',
} as const;
export type Invariant = keyof typeof INVARIANTS;

/** A violation of an invariant. */
export interface Find {
  invariant: Invariant;
  what: string;
  /** It depends on time, and counts only if it recurs alone, twice out of two. */
  isTimed: boolean;
  /** The event loop was also late. */
  isDoubtful?: boolean;
}

/** A world of any kind while it is played. */
export interface Played {
  find(invariant: Invariant, what: string): void;
  /** The longest delay of the event loop. A world with a long delay shows nothing about time. */
  lateMs: number;
}

/** A world that failed, and the duration of the run so far. */
export type Failure = { world: AnyWorld; find: Find; afterMs?: number };

/** What was drawn and what occurred, over all worlds: the end of a run lists what never occurred. */
export const CAME = new Map<string, number>();
export const came = (name: string): void => void CAME.set(name, (CAME.get(name) ?? 0) + 1);
