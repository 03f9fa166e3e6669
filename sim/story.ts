/** What is known of a world of time while it is played: its requests, its rules and what was found. */

import type net from 'node:net';
import { loopMs } from './clock.ts';
import type { Find, Invariant, Played } from './finds.ts';
import type { Actor, Changes, Step, TokenName, World } from './parts.ts';
import { CHANGES } from './tokens.ts';

/** One request, and its outcome. */
export interface Asked {
  mark: string;
  actor: Actor | undefined;
  token: TokenName;
  step: Step;
  /** The bytes on the wire. */
  bytes: Buffer;
  /** The body that the backend must get, if it is known. */
  expected: Buffer | undefined;
  startedMs: number;
  startedLoopMs: number;
  /** The client is still connected, has not stopped, and reads. */
  stays: boolean;
  response?: Response;
  /** When the response was complete, or the connection was closed. */
  endedMs?: number;
  endedLoopMs?: number;
  /** How often the stand-in saw the head and acted, and what it answered. */
  arrivals: number;
  acts: number;
  answeredBody?: string;
}

export type Response = { status: number; headers: Map<string, string>; body: Buffer; isComplete: boolean };

/** Records when a request was over. */
export function end(asked: Asked): void {
  asked.endedMs ??= performance.now();
  asked.endedLoopMs ??= loopMs;
}

/** The rules from one reload to the next, with their start on both clocks; `base` is the path of `backend.url`. */
type Version = { ms: number; loopMs: number; changes: Changes; base: string };

/** What the stand-in and the clients of a world know of it. */
export class Story implements Played {
  readonly world: World;
  readonly finds: Find[] = [];
  readonly asked = new Map<string, Asked>();
  /** The port of the gateway. */
  port = 0;
  lateMs = 0;
  /** The open connections of clients. */
  readonly sockets = new Set<net.Socket>();
  readonly versions: Version[] = [{ ms: 0, loopMs: 0, changes: {}, base: '' }];

  constructor(world: World) {
    this.world = world;
  }

  find(invariant: Invariant, what: string, isTimed = invariant === 5 || invariant === 6): void {
    if (!this.finds.some((find) => find.what === what)) this.finds.push({ invariant, what, isTimed });
  }

  /** The rules that were in effect between two times. */
  inForce(clock: 'ms' | 'loopMs', from: number, to: number): Version[] {
    return this.versions.filter((version, i) => version[clock] <= to && !(this.versions[i + 1]?.[clock]! < from));
  }

  /** Whether the request is refused by each of the rules that its token had between two times. */
  verdicts(asked: Asked, clock: 'ms' | 'loopMs', from: number, to: number): boolean[] {
    return this.inForce(clock, from, to).map(({ changes }) =>
      asked.step.wrong || CHANGES[changes[asked.token] ?? 'usual'].refuses(asked.step)
    );
  }
}
