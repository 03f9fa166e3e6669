/** A world of time while it is played: its gateway, its stand-in, its requests and what was found. */

import net from 'node:net';
import type { Gateway, GatewayConfig } from '../gateway.ts';
import { runActor } from './actors.ts';
import { StandIn } from './backend.ts';
import { checkEnd, checkLog, checkRequests, checkSlots } from './checks.ts';
import type { Wire } from './client.ts';
import { isLate, loopMs, watch } from './clock.ts';
import type { Find, Invariant } from './finds.ts';
import { sayStory } from './print.ts';
import { CHANGES, type Changes, type TokenName, tokensWith } from './tokens.ts';
import { createGateway, FORMS, type Line, readLine } from './under-test.ts';
import type { Actor, Step, World } from './worlds.ts';

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

/** Everything that belongs to one world while it is played. */
export class Play {
  readonly world: World;
  readonly finds: Find[] = [];
  readonly asked = new Map<string, Asked>();
  readonly lines: Line[] = [];
  readonly standIn: StandIn;
  gateway!: Gateway;
  port = 0;
  /** The longest delay of the event loop. A world with a long delay shows nothing about time. */
  lateMs = 0;
  readonly wires = new Set<Wire>();
  /** The gateway's connections. It may not have noticed that a client with an unread body has disconnected. */
  held = 0;
  readonly versions: Version[] = [{ ms: 0, loopMs: 0, changes: {}, base: '' }];
  /** The shutdown in mid-operation, once it has started: how many milliseconds it takes. */
  closing: Promise<number> | undefined;

  constructor(world: World) {
    this.world = world;
    this.standIn = new StandIn(this);
  }

  find(invariant: Invariant, what: string, isTimed = invariant === 5 || invariant === 6): void {
    if (!this.finds.some((find) => find.what === what)) this.finds.push({ invariant, what, isTimed });
  }

  config(parallel = this.world.parallel): GatewayConfig {
    const { timeoutMs, waitMs, bodyMiB } = this.world;
    return {
      listen: '127.0.0.1:0',
      backend: {
        url: `http://${this.standIn.host}:${this.standIn.port}${this.versions.at(-1)!.base}`,
        timeout: `${timeoutMs}ms`,
        wait: `${waitMs}ms`,
        parallel,
      },
      tokens: tokensWith(this.versions.at(-1)!.changes),
      allow: ['messaging', 'info'],
      auth: { methods: FORMS },
      limits: bodyMiB ? { body: `${bodyMiB}MiB` } : {},
      shutdown: '2s',
      log: { level: 'debug', format: 'json' },
    };
  }

  /** The rules that were in effect between two times. */
  inForce(clock: 'ms' | 'loopMs', from: number, to: number): Version[] {
    return this.versions.filter((version, i) => version[clock] <= to && !(this.versions[i + 1]?.[clock]! < from));
  }

  /** Whether the request is refused by each of the rules that its token had between two times. */
  verdicts(asked: Asked, clock: 'ms' | 'loopMs', from: number, to: number): boolean[] {
    return this.inForce(clock, from, to).map(({ changes }) =>
      asked.step.wrong || CHANGES[changes[asked.token] ?? 'usual']!.refuses(asked)
    );
  }

  async open(): Promise<void> {
    await this.standIn.listen();
    const { headersMs, stallMs, slotMs, connectMs, lingerMs } = this.world;
    this.gateway = createGateway(this.config(), {
      log: (text) => this.lines.push(readLine(text, this)),
      headersTimeoutMs: headersMs,
      stallTimeoutMs: stallMs,
      slotTimeoutMs: slotMs,
      connectTimeoutMs: connectMs,
      lingerMs,
    });
    this.gateway.server.on('connection', (socket: net.Socket) => {
      this.held++;
      socket.once('close', () => this.held--);
    });
    this.port = Number(new URL(await this.gateway.listen()).port);
  }

  /** Shuts the gateway down. @returns how many milliseconds that took. */
  async close(): Promise<number> {
    const sinceMs = performance.now();
    await this.gateway.close();
    return performance.now() - sinceMs;
  }
}

/** Plays a world, and returns what was found. */
export async function playWorld(world: World, isLoud = false): Promise<Find[]> {
  const play = new Play(world);
  watch(play, true);
  try {
    await play.open();
    play.standIn.begin();
    const actors = world.actors.map((actor) => runActor(play, actor));
    const closing = setTimeout(() => play.closing = play.close(), world.closeMs ?? 1e9);
    const limitMs = 6 * world.timeoutMs + 4 * world.waitMs + 8000;
    if (await isLate(Promise.all(actors), limitMs)) play.find(4, 'an actor never finished', true);
    clearTimeout(closing);
    await play.standIn.calm();
    if (play.closing === undefined) await checkSlots(play);
    await checkEnd(play);
    checkRequests(play);
    checkLog(play);
    if (isLoud) sayStory(play);
  } finally {
    watch(play, false);
    for (const wire of play.wires) wire.socket.destroy();
    await play.standIn.close();
  }
  return play.finds.map((find) => ({ ...find, isDoubtful: find.isTimed && play.lateMs >= 150 }));
}
