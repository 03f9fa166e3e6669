/**
 * A seeded simulation over real sockets, which searches for new bugs:  npm run fuzz -- --seconds 600 --seed N
 *
 *   --seconds S   how long new worlds are made and played (60)
 *   --seed N      the seed of the first world; the next one has N + 1
 *   --side N      how many timed worlds play side by side (8)
 *   --kind KIND   only worlds of this kind
 *   --stop N,N    ends at the first find of one of these invariants, and reduces no world
 *   --world FILE  plays the world of a JSON file, and prints the outcome of each request
 *   --planted     plays against copies of gateway.ts with known faults, and prints which were found
 *   --only TEXT   with --planted: only the faults whose names contain the text
 *
 * A world is data: one JSON object, generated from a seed. A world that fails is reduced: parts of its lists are
 * removed as long as the same invariant fails. Each find becomes a test, because a seed means another world as soon as
 * a generator changes. The table `WORLDS` lists the kinds.
 *
 * `INVARIANTS` below lists what must hold. Most finds do not depend on time, and a single one is red. A find that
 * depends on time must recur when the world is played alone, twice out of two; otherwise it is a warning. The worst
 * kinds are rare races, so a world that failed may pass when it is played again.
 *
 * A kernel accepts megabytes at once on loopback, so no request would ever stop in the middle of a head. Where
 * `net.Socket.prototype._writeGeneric` exists, the simulation lets through only `windowBytes` more than the stand-in
 * has read. Bun lacks this function, so torn requests are not tested there, and the run reports that.
 *
 * GATEWAY_FILE names another file. Worlds use no setting that version 3.0.0 lacks.
 */

import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import net, { type AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import tls from 'node:tls';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { isDeepStrictEqual, parseArgs } from 'node:util';
import type { Gateway, GatewayConfig } from './gateway.ts';

const FILE = new URL(process.env.GATEWAY_FILE ?? 'gateway.ts', import.meta.url);
const { createGateway, FORMS: formRows, ROUTES: ROWS } = await import(FILE.href) as typeof import('./gateway.ts');

/** What must hold in every world. A find names one of these by number. */
export const INVARIANTS = {
  1: 'The bytes of a request travel on one connection, are a prefix of what was sent, and are acted on at most once.',
  2: 'Responses are true: a 201 was acted on, and a refusal or "nothing was sent" was not.',
  3: 'No request exceeds the rules that its token had when it arrived; what these allow is not refused, and ' +
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
type Invariant = keyof typeof INVARIANTS;

/** A violation of an invariant. */
interface Find {
  invariant: Invariant;
  what: string;
  /** It depends on time, and counts only if it recurs alone, twice out of two. */
  isTimed: boolean;
  /** The event loop was also late. */
  isDoubtful?: boolean;
}

/** The words of a text, as a list with their literal types. */
type Word<T extends string> = T extends `${infer First} ${infer Rest}` ? First | Word<Rest> : T;
const words = <T extends string>(text: T): Word<T>[] => text.split(' ') as Word<T>[];

// ── CHANCE ───────────────────────────────────────────────────────────────────────────────────────

/** Spreads each bit of a number over all bits (the last steps of MurmurHash3). */
function finish(x: number): number {
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}

/** Draws numbers that depend only on these names. */
type Draw = ReturnType<typeof generator>;
function generator(...names: (string | number)[]) {
  let state = 0;
  for (const char of names.join('/')) state = finish(state + char.charCodeAt(0) + 0x9e3779b9);
  const next = (): number => {
    state = (state + 0x9e3779b9) >>> 0;
    return finish(state) / 2 ** 32;
  };
  const below = (limit: number): number => Math.floor(next() * limit);
  return {
    below,
    between: (least: number, most: number): number => least + below(most - least + 1),
    chance: (probability: number): boolean => next() < probability,
    pick: <T>(list: readonly T[]): T => list[below(list.length)]!,
  };
}

// ── WORLDS ───────────────────────────────────────────────────────────────────────────────────────

/**
 * How the stand-in answers: with 201 at once, later, in three pieces, chunked, after 103 and 100, or with "Connection:
 * close"; with 400 before the body is read, a truncated or too long body, two lengths, 307, no HTTP; with an ordinary
 * response to an upgrade, or 101 and a reset to any request; with a reset instead of reading the body, or with a reset
 * or the end after it has acted; or never.
 */
const ANSWERS = [
  ...words('prompt late pieces chunked hints closing early cut short twoLengths redirect garbage declined switching'),
  ...words('resetBefore resetAfter goneAfter never'),
];
type Answer = (typeof ANSWERS)[number];
/** Answers after which a client that stays connected need not get a response. */
const BROKEN: readonly Answer[] = ['cut', 'short'];

const PHASES = words('gone hung reset');
/** A period in which the stand-in is away (gone, reset), or neither reads nor answers (hung). */
type Phase = { kind: (typeof PHASES)[number]; atMs: number; forMs: number };

type Form = keyof typeof formRows;
const FORMS = Object.keys(formRows) as Form[];

/** The kinds of bodies. All from `twice` on try to bypass the lists of a token. */
const SHAPES = words('plain twice folded escaped late doubled');

/** One request of an actor. */
interface Step {
  route: keyof typeof ROUTES;
  form: Form;
  /** The credential belongs to no token. */
  wrong?: boolean;
  shape: (typeof SHAPES)[number] | 'broken';
  bodyBytes: number;
  chunked?: boolean;
  /** HTTP/1.0 with keep-alive. */
  isOld?: boolean;
  /** Where the client pauses while writing the request: after which byte, and for how long. */
  pauses?: [atByte: number, ms: number][];
  /** The client writes no further than this byte. */
  stopAt?: number;
  /** The client disconnects this long after its last byte, in this way. */
  leave?: [ms: number, how: 'close' | 'half' | 'reset'];
  /** The request is written together with the one before it, on the same connection. */
  joined?: boolean;
  /** The next request uses the same connection, this much later. A WebSocket stays open for this long. */
  keptMs?: number;
  /** The client does not read for this long. */
  deafMs?: number;
  answer: [kind: Answer, ms: number];
  /** A reload changes the rules of this token in this way. */
  change?: [token: TokenName, change: keyof typeof CHANGES];
  /** A reload sets these. */
  parallel?: number;
  base?: string;
}

/** The steps of each kind of actor. */
const WAYS = {
  // These do only what a real client would do, and must be served.
  honest: (draw) => ({ route: draw.pick(['send', 'send', 'send', 'about']) }),
  kept: (draw) => ({ keptMs: draw.between(0, 150) }),
  patient: (draw, _, bytes) => ({ answer: ['late', draw.between(50, 300)], pauses: [[draw.between(100, bytes), 60]] }),
  crowd: () => ({}),
  // The others are odd, unlucky or hostile.
  sender: (draw) => draw.chance(0.5) ? { keptMs: draw.between(0, 60) } : {},
  confined: (draw) => ({ keptMs: draw.between(0, 60) }),
  // Tries to bypass the lists of its token, or to be acted on twice.
  evil: (draw, _, bytes) => ({
    shape: draw.pick(SHAPES),
    ...(draw.chance(0.3) && { pauses: [[draw.between(100, bytes), draw.between(5, 400)]] }),
    ...(draw.chance(0.2) && { stopAt: draw.between(100, bytes) }),
    ...(draw.chance(0.2) && { leave: [draw.between(0, 200), draw.pick(['close', 'half', 'reset'])] }),
  }),
  hanger: (draw) => ({ answer: ['never', 0], bodyBytes: draw.pick([0, 300, 70_000]) }),
  pipelining: () => ({ joined: true }),
  lateHeaders: (draw, { headersMs, lingerMs }) => ({
    pauses: [[draw.between(5, 90), headersMs + draw.between(20, 60) + lingerMs / 4]],
  }),
  old: (draw) => ({
    ...{ isOld: true, joined: true, chunked: false, route: draw.pick(['send', 'about']) },
    answer: [draw.pick(['chunked', 'chunked', 'prompt', 'late']), draw.pick([0, 40])],
  }),
  slow: (draw, { stallMs }, bytes) => ({
    ...{ pauses: [[bytes >> 1, draw.pick([100, stallMs + 200])]], deafMs: draw.between(0, 300) },
  }),
  leaver: (draw, _, bytes) => ({
    ...(draw.chance(0.4) && { stopAt: draw.between(10, bytes) }),
    leave: [draw.between(0, 250), draw.pick(['close', 'reset', 'half'])],
  }),
  downloader: (draw) => ({
    ...{ route: 'download', bodyBytes: draw.pick([1000, 400_000]), deafMs: draw.pick([0, 0, 200, 1500]) },
  }),
  socket: (draw) => ({
    ...{ route: 'socket', form: draw.pick(['bearer', 'basic', 'query', 'path']), wrong: draw.chance(0.4) },
    ...{ keptMs: draw.pick([50, 50, 800]), ...(draw.chance(0.5) && { leave: [draw.below(4), 'reset'] }) },
  }),
  // Asks for a WebSocket, and gets an ordinary response.
  declined: (draw) => ({
    ...{ route: 'socket', form: draw.pick(['bearer', 'path']), bodyBytes: 300_000 },
    answer: ['declined', draw.pick([0, 40])],
  }),
  // Posts a body to a route that needs none.
  heedless: (draw) => ({
    ...{ route: draw.pick(['join', 'quit', 'remove']), shape: draw.pick(['plain', 'broken']) },
    answer: [draw.pick(['prompt', 'late']), draw.pick([5, 40])],
  }),
  guest: (draw) => ({
    ...{ route: draw.pick(['send', 'send', 'about', 'socket']), keptMs: draw.pick([0, 50, 150, 900]) },
    answer: [draw.pick(['prompt', 'late']), draw.pick([5, 150])],
    ...(draw.chance(0.4) && { pauses: [[draw.pick([40, 400, 5000]), draw.between(20, 200)]] }),
  }),
  // Not a client: it changes the configuration.
  reloader: (draw, { parallel }) => ({
    ...{ keptMs: draw.pick([100, 100, 500]), parallel: draw.pick([0, 1, 2, 4, parallel, parallel]) },
    base: draw.pick(['', '', '', '/moved']),
    ...(draw.chance(0.7) && { change: [draw.pick(['guest', 'guest', 'hanger']), draw.pick(Object.keys(CHANGES))] }),
  }),
  // In worlds of large bodies only.
  uploader: () => ({ answer: ['prompt', 0], keptMs: 0 }),
} satisfies Record<string, (draw: Draw, times: Times, wireBytes: number) => Partial<Step>>;
type Kind = keyof typeof WAYS;
const KINDS = Object.keys(WAYS) as Kind[];
const HONEST = KINDS.slice(0, 4);

/** The kinds that have their own token, take other than one to three steps, or take all of them at once. */
const SPECIAL: Partial<Record<Kind, { token?: TokenName; steps?: [least: number, most: number]; together?: true }>> = {
  crowd: { steps: [4, 6], together: true },
  confined: { token: 'confined' },
  evil: { token: 'confined' },
  hanger: { token: 'hanger', steps: [2, 5], together: true },
  pipelining: { steps: [2, 6] },
  old: { steps: [2, 4] },
  guest: { token: 'guest', steps: [3, 8] },
  reloader: { steps: [4, 8] },
  uploader: { token: 'guest', steps: [4, 6] },
};

/** A client, or the actor that reloads the configuration. */
interface Actor {
  kind: Kind;
  number: number;
  atMs: number;
  token: TokenName;
  together?: boolean;
  steps: Step[];
}

/** The settings that affect time and order. */
type Times = Record<'headersMs' | 'stallMs' | 'slotMs' | 'connectMs' | 'lingerMs' | 'timeoutMs' | 'waitMs', number> & {
  parallel: number;
};

interface World extends Times {
  kind: 'timed' | 'large';
  seed: number;
  /** How many bytes the gateway may be ahead of the stand-in; 0 for no limit. */
  windowBytes: number;
  phases: Phase[];
  /** How long each connection of the stand-in, in turn, waits before it reads. */
  deafMs: number[];
  actors: Actor[];
  /** When the gateway shuts down, in mid-operation. */
  closeMs?: number | undefined;
  /** `limits.body`, in MiB. */
  bodyMiB?: number;
}

/** What the worlds that are lists of actions consist of, by their kinds. */
type Parts = { wire: WireClient; log: Flood; meaning: Meaning; rules: Case; counts: Case };
/** Such a world; `tls` is that of the gateway in worlds of the wire. */
type Batch<K extends keyof Parts> = { kind: K; seed: number; tls: boolean; parts: Parts[K][] };

/** Makes the worlds of a kind from the generator of its parts. */
function batches<K extends keyof Parts>(kind: K, count: number, gen: (draw: Draw) => Parts[K]) {
  return (seed: number): Batch<K> => {
    const draw = generator(seed, kind);
    return { kind, seed, tls: draw.chance(0.4), parts: Array.from({ length: count }, () => gen(draw)) };
  };
}

const FROM = '+15550100001';
const TO = '+15550100002';
const ELSE = '+15550100666';
const GROUP = `group.${btoa(btoa('a group of thirty-two characters'))}`;
const LISTS = { senders: [FROM], recipients: [TO] };
/** The tokens of every world. `lists` of the configuration are those that invariant 3 checks. */
const TOKENS = {
  free: {},
  other: {},
  hanger: {},
  guest: {},
  confined: LISTS,
  watcher: { allow: ['metrics'] },
  maker: { defaults: { number: FROM, recipients: [TO] }, allow: ['send', 'GET /v2/send'] },
};
type TokenName = keyof typeof TOKENS;
/** How a reload may change a token, and which requests the token may then not make. */
const CHANGES: Record<string, { settings?: object; refuses: (asked: Asked) => boolean }> = {
  usual: { settings: {}, refuses: () => false },
  removed: { refuses: () => true },
  expired: { settings: { expires: '2020-01-01' }, refuses: () => true },
  onlyBearer: { settings: { methods: ['bearer'] }, refuses: ({ step }) => step.form !== 'bearer' },
  onlyInfo: { settings: { allow: ['info'] }, refuses: ({ step }) => step.route !== 'about' },
  elsewhere: { settings: { recipients: [ELSE] }, refuses: ({ step }) => step.route === 'send' },
};
type Changes = Partial<Record<TokenName, keyof typeof CHANGES>>;
/** The tokens of a configuration. */
const tokensWith = (changes: Changes): NonNullable<GatewayConfig['tokens']> =>
  Object.fromEntries(
    Object.entries(TOKENS).flatMap(([name, token]) => {
      const { settings } = CHANGES[changes[name as TokenName] ?? 'usual']!;
      return settings ? [[name, { secret: secretOf(name), ...token, ...settings }]] : [];
    }),
  );
/** All secrets start with a word that occurs nowhere else, and that only the five places may contain. */
const WORD = 'UNSPOKEN';
const secretOf = (token: string): string => `${WORD}-${token}-0123456789abcdef`;
/** The word itself, and as Basic encodes it after `api:`. */
const SECRET_PATTERN = new RegExp(`${WORD}|${btoa(`api:${WORD}`)}`);

/** Makes a world from a seed. */
export function genWorld(seed: number): World {
  const draw = generator(seed, 'world');
  const timeoutMs = draw.between(1200, 2400);
  const phase: Phase = {
    ...{ kind: draw.chance(0.25) ? 'gone' : draw.pick(PHASES), atMs: draw.between(0, 900) },
    forMs: draw.pick([60, 200, 500, 900, 1500, 2000]),
  };
  const world: World = {
    ...{ kind: 'timed', seed },
    ...{ headersMs: draw.between(250, 450), stallMs: draw.between(700, 1000), slotMs: draw.between(150, 350) },
    ...{ connectMs: draw.between(150, 400), lingerMs: draw.between(100, 300) },
    timeoutMs,
    waitMs: Math.min(timeoutMs, draw.pick([300, 300, 600, 900, 1200])),
    parallel: draw.pick([0, 1, 1, 2, 3, 4]),
    windowBytes: draw.pick([0, 4096, 4096, 40_960]),
    phases: draw.chance(0.6) ? [phase] : [],
    deafMs: Array.from({ length: draw.pick([1, 7]) }, () => draw.pick([0, 0, 0, 0, 0, 0, 0, 0, 20, 200, 600, 1000])),
    actors: [],
    ...(draw.chance(0.08) && { closeMs: draw.between(50, 1800) }),
  };
  const count = draw.between(4, 10);
  const numbers = new Map<Kind, number>();
  for (let i = 0; i < count; i++) {
    const usual = draw.chance(0.3) ? draw.pick(words('honest honest crowd')) : draw.pick(KINDS.slice(0, -1));
    const kind = i === 0 && draw.chance(0.4) ? 'hanger' : usual;
    const number = numbers.get(kind) ?? 0;
    numbers.set(kind, number + 1);
    // Only one token may hang, and one actor of each of these is enough.
    if (number > 0 && /hanger|reloader/.test(kind)) continue;
    world.actors.push(genActor(world, kind, number));
  }
  const more: Kind[] = draw.chance(0.3) ? ['guest', 'reloader'] : [];
  for (const kind of more) if (!numbers.has(kind)) world.actors.push(genActor(world, kind, 0));
  return world;
}

/** Makes a world of bodies of about a megabyte, which block the loop for others. It has no absence. */
export function genLarge(seed: number): World {
  const draw = generator(seed, 'large');
  const { closeMs: _, ...small } = genWorld(seed);
  const world: World = { ...small, kind: 'large', phases: [], deafMs: [0], bodyMiB: 1 };
  const kinds = ['sender', 'confined', 'evil', 'slow', 'uploader'] as const;
  world.actors = kinds.map((kind) => genActor(world, kind, 0));
  for (const step of world.actors.flatMap(({ steps }) => steps)) step.bodyBytes = draw.between(900_000, 1_100_000);
  for (const step of world.actors.at(-1)!.steps) step.bodyBytes = 900_000;
  return world;
}

function genActor(world: World, kind: Kind, number: number): Actor {
  const draw = generator(world.seed, kind, number);
  const { steps: [least, most] = [1, 3], token = draw.pick(words('free other')), together } = SPECIAL[kind] ?? {};
  const genStep = (): Step => {
    const isLarge = draw.chance(0.35);
    const usual: Step = {
      ...{ route: 'send', form: draw.pick(FORMS), shape: 'plain' },
      bodyBytes: isLarge ? draw.pick([66_000, 90_000, 200_000]) : draw.pick([0, 300, 5000, 60_000]),
      answer: HONEST.includes(kind) ? ['prompt', 0] : [draw.pick(ANSWERS.slice(0, -1)), draw.pick([0, 5, 40, 150])],
      ...(draw.chance(0.4) && { chunked: true }),
    };
    const step: Step = { ...usual, ...WAYS[kind](draw, world, usual.bodyBytes + 250) };
    if (step.form === 'body' && !hasBody(step)) step.form = 'bearer';
    return step;
  };
  const steps = Array.from({ length: draw.between(least, most) }, genStep);
  // A crowd arrives after an absence has started.
  const beginMs = (kind === 'crowd' && world.phases[0]?.atMs) || 0;
  const atMs = beginMs + draw.between(0, { hanger: 300, crowd: 150 }[kind as 'crowd'] ?? 1200);
  return { kind, number, atMs, token, ...(together && { together }), steps };
}

// ── THE SIMULATION ───────────────────────────────────────────────────────────────────────────────

/** One request, and its outcome. */
interface Asked {
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

type Response = { status: number; headers: Map<string, string>; body: Buffer; isComplete: boolean };

/** Records when a request was over. */
function end(asked: Asked): void {
  asked.endedMs ??= performance.now();
  asked.endedLoopMs ??= loopMs;
}

/** A line of the gateway's log. */
type Line = Record<string, unknown>;
const isOfGate = ({ waiting, message }: Line): boolean =>
  typeof waiting === 'number' && !/answer/.test(String(message));
const shuts = ({ message }: Line): boolean => !/again/.test(String(message));

/** What was drawn and what occurred, over all worlds: the end of a run lists what never occurred. */
const CAME = new Map<string, number>();
const came = (name: string): void => void CAME.set(name, (CAME.get(name) ?? 0) + 1);

/** The rules from one reload to the next, with their start on both clocks; `base` is the path of `backend.url`. */
type Version = { ms: number; loopMs: number; changes: Changes; base: string };

/** Everything that belongs to one world while it is played. */
class Play {
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

/** Reads a line of the log, in any world. */
function readLine(text: string, play: Pick<Play, 'find'>): Line {
  if (SECRET_PATTERN.test(text)) play.find(8, `the log contains a secret: ${text.slice(0, 300)}`);
  try {
    const line: Line = JSON.parse(text);
    if (line.message === 'internal error') play.find(7, `internal error: ${line.stack}`);
    return line;
  } catch {
    play.find(7, `a log line is not JSON: ${text.slice(0, 100)}`);
    return {};
  }
}

/** All worlds being played, for errors that belong to no world, and for the watch on the event loop. */
const PLAYS = new Set<Pick<Play, 'find' | 'lateMs'>>();

/** Records an uncaught error. Which world it belongs to is not known. */
function onUncaught(error: unknown): void {
  const stack = error instanceof Error ? error.stack : String(error);
  for (const play of PLAYS) play.find(7, `an uncaught error: ${stack}`);
}

let watcher: NodeJS.Timeout | undefined;

/**
 * A clock that counts turns of the event loop: a turn of 10 ms counts 20 ms at most. It measures how long a request has
 * waited while the gateway could run, so that a busy machine makes nothing red.
 */
let loopMs = 0;

/** Begins or ends to watch a world: uncaught errors, and the event loop. */
function watch(play: Pick<Play, 'find' | 'lateMs'>, isPlayed: boolean): void {
  if (isPlayed) PLAYS.add(play);
  else PLAYS.delete(play);
  const isOn = watcher !== undefined;
  if (isOn === PLAYS.size > 0) return;
  clearInterval(watcher);
  watcher = undefined;
  for (const event of ['uncaughtException', 'unhandledRejection']) {
    if (isOn) process.off(event, onUncaught);
    else process.on(event, onUncaught);
  }
  // How far a writer can get ahead of a stand-in.
  if (hasSmallBuffers) sockets._writeGeneric = isOn ? writeAll! : writeSome;
  if (isOn) return;
  let lastMs = performance.now();
  watcher = setInterval(() => {
    const nowMs = performance.now();
    loopMs += Math.min(20, nowMs - lastMs);
    for (const play of PLAYS) play.lateMs = Math.max(play.lateMs, nowMs - lastMs - 10);
    lastMs = nowMs;
  }, 10);
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

/** Whether a promise takes longer than this on the clock that counts turns. */
async function isLate(promise: Promise<unknown>, limitMs: number): Promise<boolean> {
  let isOver = false;
  void promise.finally(() => isOver = true);
  return !await until(() => isOver, limitMs);
}

/** Waits until a condition holds. @returns whether it holds in time. */
async function until(condition: () => boolean | Promise<boolean>, limitMs: number): Promise<boolean> {
  const clock = watcher ? () => loopMs : () => performance.now();
  const endMs = clock() + limitMs;
  while (!await condition()) {
    if (clock() > endMs) return false;
    await sleep(10);
  }
  return true;
}

// ── THE STAND-IN BACKEND ─────────────────────────────────────────────────────────────────────────

/** A connection of the stand-in, and the number of bytes it has read. */
type Peer = { socket: net.Socket; reset: () => void; readBytes: number; isDeaf: boolean; isBusy: boolean };

/** A period in which the stand-in was away for all requests, or slow for one. */
type Absence = { kind: 'away' | 'hung' | 'slow'; fromMs: number; untilMs: number };

/** A certificate and its key, those of gateway.test.ts. */
const PEMS = readFileSync(new URL('gateway.test.ts', import.meta.url), 'utf8').match(/-----BEGIN [^'.]+(?=')/g)!
  .map((pem) => pem.replaceAll('\\n', '\n'));

/**
 * A raw server instead of the backend, which checks every byte that it gets. It models when the real one acts (on a
 * send at the end of its first JSON value, on others with the head), how an answer breaks off, and how it is away. It
 * does not model what routes mean, which bodies they refuse, or the frames of a WebSocket, which is an echo here.
 */
class StandIn {
  readonly play: Play;
  readonly server = net.createServer({ pauseOnConnect: true, noDelay: true });
  readonly peers = new Map<number, Peer>();
  port = 0;
  /** Neither reading nor answering. */
  isHung = false;
  isResetting = false;
  readonly absences: Absence[] = [];
  /** The marks of the requests that arrived, in order. */
  readonly order: string[] = [];
  /** How often it acted, by X-Request-Id. */
  readonly acted = new Map<string, number>();
  /** Callbacks for the answers that are held back. */
  held: (() => void)[] = [];
  /**
   * On Linux every address in 127.0.0.0/8 is this machine, and each stand-in has its own: otherwise, while it is away,
   * the stand-in of another world could get its port, and its requests.
   */
  readonly host = process.platform === 'linux' ? `127.1.${(standIns >> 8) & 255}.${standIns++ & 255}` : '127.0.0.1';
  /** Writes of the gateway that wait until the stand-in has read more, by the port of the gateway's end. */
  readonly writers = new Map<number, () => void>();
  /** How many connections were established. */
  tries = 0;
  #isOver = false;
  #phases: Promise<unknown> = Promise.resolve();

  constructor(play: Play) {
    this.play = play;
    this.server.on('connection', (socket) => this.#accept(socket));
  }

  /** Listens, after an absence on the same port, which another program or a client may briefly have taken. */
  async listen(): Promise<void> {
    const listens = async (): Promise<boolean> => {
      this.server.listen(this.port, this.host, 511);
      return await once(this.server, 'listening').then(() => true, () => false);
    };
    if (!await until(listens, 10_000)) throw new Error(`port ${this.port} of a stand-in is taken`);
    this.port = (this.server.address() as AddressInfo).port;
    STAND_INS.set(`${this.host}:${this.port}`, this);
  }

  /** Starts the phases. */
  begin(): void {
    this.#phases = Promise.all(this.play.world.phases.map((phase) => this.#run(phase)));
  }

  /** Resolves when all phases are over. */
  async calm(): Promise<void> {
    this.#isOver = true;
    await this.#phases;
  }

  async close(): Promise<void> {
    await this.calm();
    STAND_INS.delete(`${this.host}:${this.port}`);
    for (const { socket } of this.peers.values()) socket.destroy();
    this.server.close();
  }

  async #run({ kind, atMs, forMs }: Phase): Promise<void> {
    await sleep(atMs);
    if (this.#isOver) return;
    came(`phase ${kind}`);
    if (kind === 'hung') await this.#during('hung', () => this.#hang(forMs));
    if (kind === 'reset') await this.#during('away', () => this.#resetNew(forMs));
    if (kind === 'gone') await this.#during('away', () => this.#leave(forMs));
  }

  async #during(kind: Absence['kind'], act: () => Promise<void>): Promise<void> {
    const absence = { kind, fromMs: performance.now(), untilMs: Infinity };
    this.absences.push(absence);
    await act();
    absence.untilMs = performance.now();
  }

  async #hang(forMs: number): Promise<void> {
    this.isHung = true;
    for (const peer of this.peers.values()) peer.socket.pause();
    await sleep(forMs);
    this.isHung = false;
    for (const peer of this.peers.values()) if (!peer.isDeaf) peer.socket.resume();
  }

  async #resetNew(forMs: number): Promise<void> {
    for (const peer of this.peers.values()) peer.reset();
    this.isResetting = true;
    await sleep(forMs);
    this.isResetting = false;
  }

  /** Closes the port and all connections for a time. */
  async #leave(forMs: number): Promise<void> {
    this.server.close();
    for (const peer of this.peers.values()) peer.reset();
    await sleep(forMs);
    await this.listen();
  }

  #accept(socket: net.Socket): void {
    socket.on('error', () => {});
    // Node leaves a socket open forever if it is reset while its end is being sent.
    const reset = (): void => void (socket.writableEnded ? socket.destroy() : socket.resetAndDestroy());
    if (this.isResetting) return reset();
    const list = this.play.world.deafMs;
    const deafMs = list[this.tries++ % list.length]!;
    const key = socket.remotePort!;
    const peer: Peer = { socket, reset, readBytes: 0, isDeaf: deafMs > 0, isBusy: false };
    this.peers.set(key, peer);
    socket.once('close', () => {
      this.peers.delete(key);
      wakeWriters(this, key);
    });
    const reader = new BackendReader(this, peer);
    socket.on('data', (chunk: Buffer) => {
      peer.readBytes += chunk.length;
      reader.read(chunk);
      wakeWriters(this, key);
    });
    const hear = (): void => {
      peer.isDeaf = false;
      if (!this.isHung) socket.resume();
    };
    this.slow(deafMs);
    if (deafMs > 0 && !this.#isOver) setTimeout(hear, deafMs).unref();
    else hear();
  }

  /** Records that a request waits for the stand-in from now on. */
  slow(ms: number): void {
    const fromMs = performance.now();
    if (ms > 0) this.absences.push({ kind: 'slow', fromMs, untilMs: fromMs + ms });
  }

  /**
   * How long the stand-in was away, hung or slow between two times. The gateway notices only at its next attempt that
   * the stand-in is back; between two attempts it pauses as long as the absence lasted, and a second at most. For the
   * gateway, an absence continues in the next one that starts within that second.
   */
  absentMs(kind: Absence['kind'], fromMs: number, untilMs: number): number {
    const parts = this.absences.filter((absence) => absence.kind === kind).map((absence) => {
      const before = this.absences.filter((other) => other.kind !== 'slow' && other.untilMs + 1000 > absence.fromMs);
      const begunMs = Math.min(...before.map((other) => other.fromMs), absence.fromMs);
      const lagMs = kind === 'away' ? Math.min(1000, absence.untilMs - begunMs + 100) : 0;
      return Math.min(untilMs, absence.untilMs + lagMs) - Math.max(fromMs, absence.fromMs);
    });
    return parts.reduce((sum, ms) => sum + Math.max(0, ms), 0);
  }
}

/**
 * Reads the messages of one connection strictly, byte by byte: a head, then a body of a length, in chunks, or until the
 * connection ends. It models no trailers, no extensions of chunks and no folded headers: the gateway sends none.
 */
abstract class MessageReader {
  /** The following bytes are ignored, or belong to a WebSocket. */
  isOver = false;
  #rest: Buffer = Buffer.alloc(0);
  /** How much of the body, or of its chunk, is still missing; undefined between two messages. */
  #leftBytes: number | undefined;
  /** The text before the size of the next chunk; undefined if the body has none. */
  #beforeSize: '' | '\r\n' | undefined;

  /** @returns the body's length, Infinity if it ends with the connection; undefined to skip the head. */
  protected abstract onHead(first: string, headers: Map<string, string>): number | 'chunked' | undefined;
  protected abstract onPart(part: Buffer): void;
  protected abstract onWhole(): void;
  protected abstract onTunnel(bytes: Buffer): void;
  protected abstract onMistake(what: string): void;

  read(chunk: Buffer): void {
    this.#rest = this.#rest.length > 0 ? Buffer.concat([this.#rest, chunk]) : chunk;
    while (this.#rest.length > 0 && !this.isOver && this.#step());
    if (this.isOver) this.onTunnel(this.#take(Infinity));
  }

  /** @returns whether there was enough to continue. */
  #step(): boolean {
    if (this.#leftBytes === undefined) return this.#readHead();
    if (this.#leftBytes === 0) return this.#readSize();
    const part = this.#take(this.#leftBytes);
    this.#leftBytes -= part.length;
    this.onPart(part);
    if (this.#leftBytes === 0 && this.#beforeSize === undefined) this.#end();
    return true;
  }

  #readHead(): boolean {
    const end = this.#rest.indexOf('\r\n\r\n');
    if (end < 0) return this.#rest.length > 65_536 ? this.fail('a head has no end') : false;
    const [first = '', ...lines] = this.#rest.toString('latin1', 0, end).split('\r\n');
    const headers = new Map<string, string>();
    for (const line of lines) {
      const [, name, value] = /^([!#$%&'*+.^_`|~\w-]+): ?([^\r\n\0]*)$/.exec(line) ?? [];
      if (name === undefined) return this.fail('this line is no header');
      headers.set(name.toLowerCase(), value!);
    }
    this.#take(end + 4);
    const length = this.onHead(first, headers);
    if (length === undefined) return !this.isOver;
    this.#beforeSize = length === 'chunked' ? '' : undefined;
    this.#leftBytes = length === 'chunked' ? 0 : length;
    if (length === 0) this.#end();
    return true;
  }

  #readSize(): boolean {
    const text = this.#rest.toString('latin1', 0, 24);
    const [line, before, size] = /^(\r\n)?([0-9a-f]{1,8})\r\n/i.exec(text) ?? [];
    const isWrong = line === undefined ? text.length > 20 || /\S\r\n/.test(text) : (before ?? '') !== this.#beforeSize;
    if (isWrong) return this.fail('this is not the length of a chunk');
    const bytes = parseInt(size ?? '1', 16);
    const last = line + '\r\n';
    if (line === undefined || (bytes === 0 && text.length < last.length)) return false;
    if (bytes === 0 && !text.startsWith(last)) return this.fail('the last chunk has more');
    this.#take(bytes === 0 ? last.length : line.length);
    this.#beforeSize = '\r\n';
    this.#leftBytes = bytes;
    if (bytes === 0) this.#end();
    return true;
  }

  #take(bytes: number): Buffer {
    const part = this.#rest.subarray(0, bytes);
    this.#rest = this.#rest.subarray(part.length);
    return part;
  }

  #end(): void {
    this.#leftBytes = undefined;
    this.onWhole();
  }

  protected fail(what: string): false {
    this.isOver = true;
    this.onMistake(`${what}: ${JSON.stringify(this.#rest.toString('latin1', 0, 60))}`);
    return false;
  }
}

/** A request as the stand-in reads it. */
interface Arrival {
  asked: Asked | undefined;
  method: string;
  path: string;
  requestId: string;
  body: Buffer;
  isAnswered: boolean;
  hasActed: boolean;
}

/** Reads the requests of one connection as the backend does, acts on them and answers. */
class BackendReader extends MessageReader {
  readonly #standIn: StandIn;
  readonly #peer: Peer;
  #tail = '';
  #arrival: Arrival | undefined;

  constructor(standIn: StandIn, peer: Peer) {
    super();
    this.#standIn = standIn;
    this.#peer = peer;
  }

  override read(chunk: Buffer): void {
    const text = this.#tail + chunk.toString('latin1');
    // What a client writes into its WebSocket is not read.
    if (!this.isOver && SECRET_PATTERN.test(text)) this.#find(8, `the backend got a secret: ${text.slice(0, 600)}`);
    this.#tail = text.slice(-20);
    super.read(chunk);
  }

  #find(invariant: Invariant, what: string): void {
    this.#standIn.play.find(invariant, `${what} (${this.#arrival?.asked?.mark ?? 'no mark'})`);
  }

  onMistake(what: string): void {
    this.#find(1, what);
    this.#peer.reset();
  }

  /** A WebSocket is an echo. */
  onTunnel(bytes: Buffer): void {
    if (bytes.length > 0 && !this.#peer.socket.destroyed) this.#peer.socket.write(bytes);
  }

  onHead(first: string, headers: Map<string, string>): number | 'chunked' | undefined {
    const [, method, target] = /^([A-Z]+) (\/[\x21-\x7e]*) HTTP\/1\.1$/.exec(first) ?? [];
    if (method === undefined || target === undefined) return void this.fail('this line is no request');
    const { play, order } = this.#standIn;
    const mark = headers.get('x-mark') ?? '';
    const asked = play.asked.get(mark);
    const [base = ''] = /^\/moved(?=\/)/.exec(target) ?? [];
    const path = target.slice(base.length);
    const bases = play.inForce('ms', asked?.startedMs ?? 0, performance.now()).map((version) => version.base);
    if (!bases.includes(base)) this.#find(1, `a request arrives at ${target}, a path in no rules of its time`);
    if (mark === '' && path === '/v1/about') { // the query of a gateway's process at start
      return void this.#peer.socket.write(
        'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}',
      );
    }
    order.push(mark);
    const requestId = headers.get('x-request-id') ?? '';
    const state = { body: Buffer.alloc(0), isAnswered: false, hasActed: false };
    const arrival: Arrival = this.#arrival = { asked, method, path, requestId, ...state };
    this.#peer.isBusy = true;
    const [length, coding] = [headers.get('content-length'), headers.get('transfer-encoding')];
    if (length !== undefined && coding !== undefined) this.#find(1, 'a request has two lengths');
    if (!asked) this.#find(1, `a request reaches the backend that no actor made: ${method} ${path} ${mark}`);
    else if (asked.arrivals++ > 0) this.#find(1, 'a request reaches the backend twice');
    const isRefused = asked && !play.verdicts(asked, 'ms', asked.startedMs, performance.now()).includes(false);
    if (isRefused) this.#find(3, 'a request reaches the backend that all rules of its time refuse');
    if (requestId === '') this.#find(1, 'a request reaches the backend that the gateway did not make');
    const kind = asked?.step.answer[0];
    if (kind === 'resetBefore') {
      came(`answer ${kind}`);
      this.isOver = true;
      return void this.#peer.reset();
    }
    // Anything but a send acts, and is answered, as soon as its head is here, because its handler reads no body.
    if (asked && kind !== 'early' && !isSend(arrival)) this.#count(arrival, asked);
    if (asked && (kind === 'early' || !isSend(arrival))) void this.#answer(arrival);
    return coding === 'chunked' ? coding : Number(length ?? 0);
  }

  /** Compares a part of a body with what was sent, and acts at the end of the first JSON value. */
  onPart(part: Buffer): void {
    const arrival = this.#arrival!;
    const { asked, body: { length: fromByte } } = arrival;
    arrival.body = Buffer.concat([arrival.body, part]);
    if (asked?.expected && !asked.expected.subarray(fromByte, fromByte + part.length).equals(part)) {
      this.#find(1, 'the body that the backend gets is not a prefix of what was sent');
    }
    if (!part.includes('}') || arrival.hasActed || !isSend(arrival)) return;
    const text = firstObject(arrival.body.toString());
    if (text !== undefined) this.#act(arrival, text);
  }

  onWhole(): void {
    const arrival = this.#arrival!;
    if (isSend(arrival) && !arrival.hasActed) this.#find(1, 'a complete send is not a JSON object');
    this.#arrival = undefined;
  }

  #count({ requestId }: Arrival, asked: Asked): void {
    asked.acts++;
    const { acted } = this.#standIn;
    acted.set(requestId, (acted.get(requestId) ?? 0) + 1);
  }

  /** Acts on a send, of whose shapes the first alone is read alike by everyone. */
  #act(arrival: Arrival, text: string): void {
    arrival.hasActed = true;
    const { asked } = arrival;
    if (!asked) return;
    this.#count(arrival, asked);
    if (asked.acts > 1) this.#find(1, 'a send is acted on twice');
    const { number, recipients, message } = JSON.parse(text);
    const { shape } = asked.step;
    if (/twice|folded|doubled/.test(shape)) this.#find(3, `a send that is ${shape} is acted on`);
    const { senders, recipients: others } = (TOKENS[asked.actor?.token ?? 'free'] ?? {}) as Partial<typeof LISTS>;
    const isAllowed = senders?.includes(number) !== false && others?.includes(String(recipients)) !== false;
    if (!isAllowed) this.#find(3, `a send from ${number} to ${recipients} is acted on`);
    if (!String(message).includes(asked.mark)) this.#find(1, 'a send has the message of another');
    if (asked.step.answer[0] !== 'early') void this.#answer(arrival);
  }

  async #answer(arrival: Arrival): Promise<void> {
    const { asked } = arrival;
    const { socket } = this.#peer;
    if (!asked || arrival.isAnswered) return;
    arrival.isAnswered = true;
    const [kind, ms] = asked.step.answer;
    came(`answer ${kind}`);
    if (kind === 'never') return;
    if (asked.mark.startsWith('slot')) await new Promise<void>((resolve) => void this.#standIn.held.push(resolve));
    this.#standIn.slow(ms);
    if (ms > 0) await sleep(ms);
    while (this.#standIn.isHung) await sleep(5);
    this.#peer.isBusy = false;
    if (socket.destroyed) return;
    if (kind === 'resetAfter') return this.#peer.reset();
    if (kind === 'goneAfter') return void socket.end();
    if (kind === 'garbage') return void socket.end('these bytes are no response\r\n\r\n');
    const isUpgrade = kind === 'switching' || (asked.step.route === 'socket' && kind !== 'declined');
    if (!isUpgrade) return await this.#write(asked, kind, ms);
    this.isOver = true;
    const lines = 'Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: x\r\nX-Answer: ';
    socket.write(`HTTP/1.1 101 Switching Protocols\r\n${lines}${asked.mark}\r\n\r\n\x81\x05hello`);
    if (kind === 'switching') this.#peer.reset();
  }

  async #write(asked: Asked, kind: Answer, ms: number): Promise<void> {
    const { socket } = this.#peer;
    const size = asked.step.route === 'download' || kind === 'declined' ? asked.step.bodyBytes : 0;
    const body = JSON.stringify([{ timestamp: '1700000000000', mark: asked.mark, filler: 'y'.repeat(size) }]);
    asked.answeredBody = kind === 'short' ? body.slice(0, 10) : body;
    const status = kind === 'early' ? 400 : kind === 'redirect' ? 307 : asked.step.route === 'send' ? 201 : 200;
    const lines = [`HTTP/1.1 ${status} Whatever`, `X-Answer: ${asked.mark}`, 'Content-Type: application/json'];
    if (kind !== 'chunked') lines.push(`Content-Length: ${kind === 'short' ? 10 : body.length}`);
    if (kind === 'twoLengths' || kind === 'chunked') lines.push('Transfer-Encoding: chunked');
    if (kind === 'redirect') lines.push('Location: /v2/send/');
    if (kind === 'closing') lines.push('Connection: close');
    const head = `${lines.join('\r\n')}\r\n\r\n`;
    if (kind === 'hints') socket.write('HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n');
    if (kind === 'cut') {
      socket.write(head + body.slice(0, body.length / 2));
      await sleep(5);
      return void (ms > 20 ? socket.end() : this.#peer.reset());
    }
    if (kind === 'chunked') return void socket.write(Buffer.concat([Buffer.from(head), chunked(Buffer.from(body))]));
    if (kind !== 'pieces') return void (kind === 'closing' ? socket.end(head + body) : socket.write(head + body));
    const whole = head + body;
    for (const at of [0, 1, 2]) {
      socket.write(whole.slice(whole.length * at / 3, whole.length * (at + 1) / 3));
      await sleep(ms / 3);
    }
  }
}

function isSend({ method, path }: Arrival): boolean {
  return method === 'POST' && /^\/v[12]\/send(?:$|\?)/.test(path);
}

/** The first JSON object of a text, if it is complete: a decoder reads no further. */
function firstObject(text: string): string | undefined {
  let depth = 0;
  for (const { 0: token, index } of text.matchAll(/"[^"\\]*(?:\\.[^"\\]*)*(?:"|$)|[{}[\]]/gs)) {
    if (token === '{' || token === '[') depth++;
    if ((token === '}' || token === ']') && --depth === 0) return text.slice(0, index + 1);
  }
  return undefined;
}

// ── SMALL BUFFERS ────────────────────────────────────────────────────────────────────────────────

/** The stand-ins of all worlds, by address and port. */
const STAND_INS = new Map<string, StandIn>();
let standIns = 0;

/** Continues the write that waits until the stand-in has read more. @param port that of the gateway's end. */
function wakeWriters({ writers }: StandIn, port: number): void {
  const wake = writers.get(port);
  writers.delete(port);
  wake?.();
}

type Write = (this: net.Socket, writev: boolean, data: unknown, encoding: string, done: Done) => void;
type Done = (error?: Error | null) => void;
const sockets = net.Socket.prototype as unknown as { _writeGeneric?: Write };
const writeAll = sockets._writeGeneric;
export const hasSmallBuffers = typeof writeAll === 'function' && !('Bun' in globalThis);

/** How many bytes a socket of the gateway has written to a stand-in. */
const written = new WeakMap<net.Socket, number>();

/** Writes to a stand-in no more than `windowBytes` beyond what it has read; to others everything. */
const writeSome: Write = function (writev, data, encoding, done) {
  const standIn = STAND_INS.get(`${this.remoteAddress}:${this.remotePort}`);
  const windowBytes = standIn?.play.world.windowBytes ?? 0;
  // A socket that is still connecting calls this function again when it is connected.
  if (!standIn || windowBytes === 0 || this.connecting) return writeAll!.call(this, writev, data, encoding, done);
  const port = this.localPort!;
  const bytes = bytesOf(writev, data, encoding);
  let at = 0;
  const step = (error?: Error | null): void => {
    if (error || this.destroyed || at >= bytes.length) return done(error);
    const sent = written.get(this) ?? 0;
    const roomBytes = windowBytes - (sent - (standIn.peers.get(port)?.readBytes ?? 0));
    if (roomBytes <= 0) return void standIn.writers.set(port, step);
    const part = bytes.subarray(at, at + roomBytes);
    at += part.length;
    written.set(this, sent + part.length);
    writeAll!.call(this, false, part, 'buffer', step);
  };
  step();
};

/** The bytes of one write, or of several that were gathered. */
function bytesOf(writev: boolean, data: unknown, encoding: string): Buffer {
  const all = writev ? data as unknown[] : [{ chunk: data, encoding }];
  return Buffer.concat(all.map((each) => {
    const { chunk = each, encoding = 'latin1' } = each as { chunk?: unknown; encoding?: string };
    return Buffer.from(chunk as string, encoding as BufferEncoding); // or bytes, which have no encoding
  }));
}

// ── THE CLIENTS ──────────────────────────────────────────────────────────────────────────────────

/**
 * A client's connection to the gateway, which assigns each response to its request, in order. It models a client that
 * pipelines, but neither TLS nor a client that gives up.
 */
class Wire extends MessageReader {
  readonly play: Play;
  readonly socket: net.Socket;
  readonly asked: Asked[] = [];
  isClosed = false;
  /** The gateway has announced, or shown, that this connection accepts no further request. */
  isLast = false;
  /** What came after a 101. */
  tunnel: Buffer = Buffer.alloc(0);
  #next = 0;
  #response: Response | undefined;

  constructor(play: Play) {
    super();
    this.play = play;
    this.socket = net.connect({ port: play.port, host: '127.0.0.1', allowHalfOpen: true, noDelay: true });
    play.wires.add(this);
    this.socket.on('error', () => {});
    this.socket.on('data', (chunk: Buffer) => this.read(chunk));
    this.socket.on('end', () => this.#end());
    this.socket.on('close', () => {
      this.#end();
      this.isClosed = true;
      play.wires.delete(this);
    });
  }

  /** Whether nothing more can come for these requests. */
  isDone(asked: Asked[]): boolean {
    return this.isLast && this.socket.readableEnded || this.isClosed ||
      asked.every(({ response }) => response?.isComplete);
  }

  onMistake(what: string): void {
    this.play.find(4, `a client got bytes that are not a response: ${what} (${this.asked[this.#next]?.mark})`);
    this.socket.destroy();
  }

  onTunnel(bytes: Buffer): void {
    this.tunnel = Buffer.concat([this.tunnel, bytes]);
  }

  onHead(first: string, headers: Map<string, string>): number | 'chunked' | undefined {
    const status = Number(/^HTTP\/1\.1 (\d{3}) /.exec(first)?.[1]);
    if (!status) return void this.fail(first);
    if (status < 200 && status !== 101) return undefined;
    const asked = this.asked[this.#next++];
    if (headers.get('connection') === 'close') this.isLast = true;
    const response = this.#response = { status, headers, body: Buffer.alloc(0), isComplete: false };
    if (asked) asked.response = response;
    else this.play.find(4, `a client got a response that it did not ask for: ${first}`);
    const answered = headers.get('x-answer');
    if (answered !== undefined && answered !== asked?.mark) {
      this.play.find(4, `a client got the answer to another request: ${answered} for ${asked?.mark}`);
    }
    if (status === 101) this.isOver = true;
    if (status === 101 || status === 204 || status === 304) return 0;
    if (headers.get('transfer-encoding') === 'chunked') return 'chunked';
    return Number(headers.get('content-length') ?? Infinity);
  }

  onPart(part: Buffer): void {
    this.#response!.body = Buffer.concat([this.#response!.body, part]);
  }

  onWhole(): void {
    this.#response!.isComplete = true;
    this.#response = undefined;
    const asked = this.asked[this.#next - 1];
    if (asked) end(asked);
  }

  #end(): void {
    const headers = this.#response?.headers;
    const isOpen = headers && !headers.has('content-length') && !headers.has('transfer-encoding');
    if (isOpen && this.socket.readableEnded) this.onWhole();
    this.isLast = true;
    for (const asked of this.asked) end(asked);
  }
}

/** A filler of this many bytes that names its request. */
const filler = (mark: string, bytes: number): string =>
  `${mark}.`.repeat(bytes / mark.length + 1).slice(0, Math.max(0, bytes));

const hasBody = ({ route }: Step): boolean => /send|join|quit|remove/.test(route);

/** The body of a step that has one, without `auth`. */
function bodyOf({ shape, bodyBytes }: Step, mark: string): string {
  const member = (key: string, value: unknown): string => `"${key}":${JSON.stringify(value)}`;
  const object = (...members: string[]): string => `{${members.join()}}`;
  const [number, recipients] = [member('number', FROM), member('recipients', [TO])];
  const message = member('message', `${mark} ${filler(mark, bodyBytes)}`);
  const others = member('recipients', [ELSE]);
  const shapes: Record<Step['shape'], () => string> = {
    plain: () => object(number, recipients, message),
    twice: () => object(number, recipients, message, others),
    folded: () => object(number, recipients, message, member('Recipients', [ELSE])),
    escaped: () => object(number, message, `"recipi\\u0065nts":["${ELSE}"]`),
    late: () => object(recipients, message, member('number', ELSE)),
    doubled: () => object(number, recipients, message) + object(member('number', ELSE), others),
    broken: () => object(number, recipients, message, ''),
  };
  return shapes[shape]();
}

const ROUTES = {
  send: 'POST /v2/send',
  join: `POST /v1/groups/${FROM}/${GROUP}/join`,
  quit: `POST /v1/groups/${FROM}/${GROUP}/quit`,
  remove: `DELETE /v1/groups/${FROM}/${GROUP}`,
  about: 'GET /v1/about',
  download: 'GET /v1/attachments/one.jpg',
  unknown: `GET /v1/${WORD}/nothing`,
  health: 'GET /healthz',
  socket: `GET /v1/receive/${FROM}`,
};

/** Makes the request of a step, and records what the backend must get. */
function makeRequest(play: Play, actor: Actor | undefined, token: TokenName, step: Step, mark: string): Asked {
  const { form } = step;
  const body = hasBody(step) ? bodyOf(step, mark) : '';
  const secret = step.route === 'health' ? '' : step.wrong ? `${WORD}-nobody-0123456789` : secretOf(token);
  let [method = '', path = ''] = ROUTES[step.route].split(' ');
  if (form === 'query') path += `?@auth=${secret}`;
  if (form === 'path') path = `/@auth=${secret}${path}`;
  const lines = [`${method} ${path} HTTP/1.${step.isOld ? 0 : 1}`, 'Host: gateway', `X-Mark: ${mark}`];
  if (step.isOld) lines.push('Connection: keep-alive');
  if (form === 'bearer') lines.push(`Authorization: Bearer ${secret}`);
  if (form === 'basic') lines.push(`Authorization: Basic ${btoa(`api:${secret}`)}`);
  if (step.route === 'socket') lines.push('Upgrade: websocket', 'Connection: Upgrade', 'Sec-WebSocket-Key: x');
  const content = Buffer.from(form === 'body' ? `{"auth":"${secret}",${body.slice(1)}` : body);
  if (content.length > 0) lines.push('Content-Type: application/json');
  if (step.chunked && content.length > 0) lines.push('Transfer-Encoding: chunked');
  else if (method === 'POST' || content.length > 0) lines.push(`Content-Length: ${content.length}`);
  const head = Buffer.from(`${lines.join('\r\n')}\r\n\r\n`);
  const bytes = Buffer.concat([head, step.chunked && content.length > 0 ? chunked(content) : content]);
  const expected = Buffer.from(body);
  const stays = step.stopAt === undefined && step.leave === undefined && !step.deafMs;
  return expect(play, { mark, actor, token, step, bytes, expected, stays });
}

/** Records that a request is about to be made. */
function expect(play: Play, about: Omit<Asked, 'startedMs' | 'startedLoopMs' | 'arrivals' | 'acts'>): Asked {
  const asked = { ...about, arrivals: 0, acts: 0, startedMs: performance.now(), startedLoopMs: loopMs };
  play.asked.set(asked.mark, asked);
  return asked;
}

/** A body in chunks of uneven length. */
function chunked(body: Buffer): Buffer {
  const parts: Buffer[] = [];
  for (let at = 0, bytes = 1000; at < body.length; at += bytes, bytes = bytes * 2 % 17_000 + 1) {
    const part = body.subarray(at, at + bytes);
    parts.push(Buffer.from(`${part.length.toString(16)}\r\n`), part, Buffer.from('\r\n'));
  }
  return Buffer.concat([...parts, Buffer.from('0\r\n\r\n')]);
}

/** Plays an actor's part. */
async function runActor(play: Play, actor: Actor): Promise<void> {
  await sleep(actor.atMs);
  came(`actor ${actor.kind}`);
  if (actor.kind === 'reloader') return reload(play, actor);
  if (!actor.together) return runSteps(play, actor, actor.steps, 0);
  await Promise.all(actor.steps.map((step, i) => runSteps(play, actor, [step], i)));
}

/** Takes steps one after the other; joined steps are written together. */
async function runSteps(play: Play, actor: Actor, steps: Step[], number: number): Promise<void> {
  let wire: Wire | undefined;
  for (let i = 0; i < steps.length;) {
    const batch = [steps[i++]!];
    while (steps[i]?.joined && batch[0]!.joined) batch.push(steps[i++]!);
    if (!wire || wire.isLast || wire.isClosed) wire = new Wire(play);
    const from = number + i - batch.length;
    const asked = batch.map((step, j) =>
      makeRequest(play, actor, actor.token, step, `${actor.kind}-${actor.number}-${from + j}`)
    );
    await exchange(play, wire, asked);
    const { keptMs, route } = batch.at(-1)!;
    if (keptMs === undefined || route === 'socket') {
      if (route === 'socket') await holdSocket(play, wire, asked.at(-1)!);
      wire.socket.destroy();
      wire = undefined;
    } else if (keptMs > 0) await sleep(keptMs);
  }
  wire?.socket.destroy();
}

/** Holds a WebSocket, which the gateway may close only if a reload refuses it. */
async function holdSocket(play: Play, wire: Wire, asked: Asked): Promise<void> {
  const fromLoopMs = loopMs;
  const isStale = (): boolean =>
    loopMs > fromLoopMs + 300 && !play.verdicts(asked, 'loopMs', loopMs - 300, loopMs).includes(false);
  const isOpen = asked.response?.status === 101;
  const words = ['\x81\x04data', '\x82', '\x03\0\xff\n'].map((word) => Buffer.from(word, 'latin1'));
  for (const word of isOpen ? words : []) if (!wire.isLast) wire.socket.write(word);
  await until(() => wire.isLast || isStale(), asked.step.keptMs ?? 50);
  const echo = Buffer.concat([Buffer.from('\x81\x05hello'), ...words]);
  const got = JSON.stringify(wire.tunnel.toString('latin1'));
  const isEcho = echo.subarray(0, wire.tunnel.length).equals(wire.tunnel);
  if (!isEcho) play.find(2, `a WebSocket carries other bytes, ${got} (${asked.mark})`);
  const absentMs = (kind: Absence['kind']): number => play.standIn.absentMs(kind, asked.startedMs, performance.now());
  const isSlow = absentMs('away') + absentMs('hung') + absentMs('slow') > 0;
  const isCut = wire.tunnel.length < echo.length && asked.step.keptMs! >= 800;
  if (isOpen && isCut && !wire.isLast && !isSlow) play.find(4, `a WebSocket withholds bytes (${asked.mark})`, true);
  if (!isOpen || asked.step.leave || asked.step.answer[0] === 'switching' || play.closing !== undefined) return;
  if (!wire.isLast && isStale()) play.find(3, `a refused WebSocket stays open (${asked.mark})`);
  const isRefused = play.verdicts(asked, 'loopMs', asked.startedLoopMs, loopMs).includes(true);
  if (wire.isLast && !isRefused && absentMs('away') === 0) play.find(4, `a WebSocket is closed (${asked.mark})`, true);
}

/** Writes requests, and waits until each has its response, or the connection is closed. */
async function exchange(play: Play, wire: Wire, asked: Asked[]): Promise<void> {
  const { socket } = wire;
  const { step } = asked.at(-1)!;
  wire.asked.push(...asked);
  const bytes = Buffer.concat(asked.map((each) => each.bytes.subarray(0, each.step.stopAt)));
  if (step.deafMs) socket.pause();
  let at = 0;
  for (const [atByte, ms] of asked[0]!.step.pauses ?? []) {
    if (atByte >= bytes.length || socket.destroyed) break;
    socket.write(bytes.subarray(at, atByte));
    at = atByte;
    await sleep(ms);
  }
  if (!socket.destroyed) socket.write(bytes.subarray(at));
  if (step.deafMs) {
    await sleep(step.deafMs);
    socket.resume();
  }
  if (step.leave) {
    const [ms, how] = step.leave;
    if (ms > 0) await sleep(ms);
    if (how === 'half') socket.end();
    else if (how === 'reset' && !socket.writableEnded) socket.resetAndDestroy(); // as in `#accept`
    else socket.destroy();
  }
  const { timeoutMs, waitMs, stallMs } = play.world;
  const limitMs = (2 * asked.length + 1) * timeoutMs + (asked.length + 1) * waitMs + stallMs + 2000;
  const isDone = await until(() => wire.isDone(asked), limitMs);
  for (const each of asked) {
    if (!isDone && each.stays && !each.response) play.find(4, `a client waits forever (${each.mark})`, true);
    end(each);
  }
}

/** Reloads the same configuration, one with other slots, another path or a changed token, and an invalid one. */
async function reload(play: Play, { steps }: Actor): Promise<void> {
  const change = (changes: Changes, base: string): number =>
    play.versions.push({ ms: performance.now(), loopMs, changes, base });
  for (const { bodyBytes, keptMs = 100, change: [token, to] = [], parallel, base = '' } of steps) {
    if (play.closing !== undefined) return;
    const isWrong = bodyBytes === 0;
    if (!isWrong) {
      came(`rules ${to}`);
      change({ ...play.versions.at(-1)!.changes, ...(token && { [token]: to }) }, base);
    }
    try {
      play.gateway.reload(isWrong ? { ...play.config(), tokens: {} } : play.config(parallel));
      if (isWrong) play.find(7, 'a reload without tokens is accepted');
    } catch (error) {
      if (!isWrong) throw error;
    }
    await sleep(keptMs);
  }
  change({}, '');
  if (play.closing === undefined) play.gateway.reload(play.config());
}

// ── WHAT IS CHECKED AT THE END ───────────────────────────────────────────────────────────────────

/** The codes of the gateway that leave open whether the backend has acted. */
const OPEN_CODES = ['bad_backend_answer', 'backend_timeout', 'internal_error'];

/** The gateway's own code, if a response is a refusal. */
function codeOf({ headers, body, isComplete }: Response): string | undefined {
  if (headers.has('x-answer') || !isComplete) return undefined;
  const [, code] = /"code":"([a-z_]+)"/.exec(body.toString()) ?? [];
  return code;
}

/** Invariants 2, 4 and 5, for each request. */
function checkRequests(play: Play): void {
  for (const asked of play.asked.values()) {
    const { mark, actor, response, acts, step: { answer: [kind], route }, stays } = asked;
    const find = (invariant: Invariant, what: string, isTimed?: boolean): void =>
      play.find(invariant, `${what} (${mark})`, isTimed);
    const isHonest = actor !== undefined && HONEST.includes(actor.kind) && play.closing === undefined;
    if (!response) {
      if (stays && acts > 0) find(4, 'a request was acted on, and its client got no response', true);
      if (stays && isHonest) find(4, 'an honest client got no response', true);
      continue;
    }
    const { status, headers, body, isComplete } = response;
    const code = codeOf(response);
    const isRelayed = headers.has('x-answer') && status !== 101;
    const isOwn = code !== undefined || route === 'health' || headers.has('x-answer');
    if (isComplete && !isOwn) {
      find(4, `a response is neither the backend's nor a refusal: ${status} ${body.subarray(0, 80)}`);
    }
    if (status === 201 && acts === 0) find(2, 'a client got 201, and nothing was done');
    // A handshake may be over when the shutdown starts.
    const isOpen = code === undefined || OPEN_CODES.includes(code) || (route === 'socket' && code === 'shutting_down');
    if (!isOpen && acts > 0) find(2, `a client got ${code}, and the backend has acted`);
    // No clock is needed to know that this answers another client's bytes. They may belong to another world played at
    // the same time, because on Deno all connections of a process share parsers.
    if (code === 'bad_request' && isHonest) find(4, 'an honest client got bad_request');
    const isRead = stays && play.closing === undefined && (isHonest || kind === 'declined');
    if (isRead && !isComplete && status !== 101) find(4, 'a response is truncated', true);
    if (code === 'internal_error') find(7, 'a client got internal_error');
    const isTrue = body.toString() === asked.answeredBody && kind !== 'cut';
    if (isComplete && isRelayed && !isTrue) find(2, 'a response looks complete and differs from that of the backend');
    if (route === 'send' || route === 'about') checkTime(play, asked, code);
    if (actor && ['guest', 'hanger'].includes(actor.kind)) checkRefusal(play, asked, code);
  }
}

/** Invariant 3: a request from before a reload is not refused by its rules. A head is read soon after it is written. */
function checkRefusal(play: Play, asked: Asked, code = ''): void {
  if (!/^(?:unauthorized|too_many_failures|(?:endpoint|sender|recipient)_not_allowed)$/.test(code)) return;
  const readMs = asked.step.pauses ? 350 : 150;
  const verdicts = play.verdicts(asked, 'loopMs', asked.startedLoopMs, asked.startedLoopMs + readMs);
  if (!verdicts.includes(true)) play.find(3, `a client got ${code} against all rules of its time (${asked.mark})`);
}

/** Invariant 5, for one request. */
function checkTime(play: Play, asked: Asked, code: string | undefined): void {
  const { mark, actor, startedMs, endedMs, startedLoopMs, endedLoopMs, response, stays, step } = asked;
  const { standIn, world } = play;
  const find = (what: string, ms: number, ofMs: number): void =>
    play.find(5, `${what} ${Math.round(ms)} of ${Math.round(ofMs)} ms (${mark})`);
  const { pauses, joined, deafMs } = step;
  const lifeMs = endedLoopMs! - startedLoopMs;
  const awayMs = standIn.absentMs('away', startedMs, endedMs!);
  const slowMs = standIn.absentMs('hung', startedMs, endedMs!) + standIn.absentMs('slow', startedMs, endedMs!);
  const isAway = code === 'backend_unreachable';
  if (isAway && awayMs + 50 < world.waitMs) find('backend_unreachable after an absence of', awayMs, world.waitMs);
  const has = (kind: Kind): boolean => world.actors.some((other) => other.kind === kind);
  // Slots are short only if a token hangs, which keeps its own and those that a reload has removed until the requests
  // end.
  const keepsMs = has('reloader') || actor?.kind === 'hanger' ? world.timeoutMs : 0;
  const slotsMs = has('hanger') ? 2 * world.slotMs + keepsMs : 0;
  const waitedMs = world.waitMs + slotsMs + slowMs + 300;
  const isLate = isAway && !pauses && !joined && !deafMs && lifeMs > waitedMs;
  if (isLate) find('backend_unreachable is returned after', lifeMs, waitedMs);
  if (!stays || actor === undefined || !HONEST.includes(actor.kind) || play.closing !== undefined) return;
  const boundMs = Math.max(slotsMs, 2 * world.slotMs) + awayMs + slowMs + 600;
  if (lifeMs > boundMs) find('an honest client waited', lifeMs, boundMs);
  const isServed = response!.status < 300;
  const mayFail = awayMs > 0 || isAway || boundMs >= world.timeoutMs;
  if (!isServed && !mayFail) play.find(5, `an honest client got ${response!.status} ${code} (${mark})`);
}

/** Invariants 7: the log lines. */
function checkLog(play: Play): void {
  const requests = new Map<unknown, Line>();
  let isShut = false;
  for (const line of play.lines) {
    if (line.reason === 'unfinished_uploads' && line.token === 'guest') {
      play.find(3, 'an upload after others is refused');
    }
    if (isOfGate(line)) {
      // Each address has its own gate.
      const isOne = play.versions.every(({ base }) => base === '');
      if (shuts(line) === isShut && isOne) play.find(7, `two lines of an outage do not alternate: ${line.message}`);
      isShut = shuts(line);
    }
    if (line.message !== 'request') continue;
    if (requests.has(line.requestId)) play.find(7, `two log lines for one request: ${JSON.stringify(line)}`);
    requests.set(line.requestId, line);
  }
  for (const { response, mark, step } of play.asked.values()) {
    const id = response?.headers.get('x-request-id');
    if (!response?.isComplete || id === undefined) continue;
    const line = requests.get(id);
    const isUnparsed = ['bad_request', 'request_timeout', 'too_many_headers'].includes(codeOf(response) ?? '');
    if (!line && !isUnparsed) play.find(7, `a request has no log line: ${response.status} (${mark})`);
    if (line && line.status !== response.status && !BROKEN.includes(step.answer[0]) && !step.deafMs) {
      play.find(7, `the log has ${line.status}, and the client got ${response.status} (${mark})`);
    }
  }
}

/** Invariants 3 and 6: as many sends as there are slots run at the same time, and one token's in their order. */
async function checkSlots(play: Play): Promise<void> {
  const { seed, parallel, slotMs, timeoutMs, waitMs } = play.world;
  await sleep(slotMs + 50); // a request whose client has disconnected keeps its slot this long
  const count = parallel || 6;
  const wires: Wire[] = [];
  const step: Step = { route: 'send', form: 'bearer', shape: 'plain', bodyBytes: 0, answer: ['prompt', 0] };
  // After an outage the gateway reconnects within a second.
  for (let i = 0; i < 40 && !await isServed(play, step, `warm-${i}`); i++) await sleep(50);
  const ask = (token: TokenName, mark: string): void => {
    const wire = new Wire(play);
    wires.push(wire);
    const asked = makeRequest(play, undefined, token, step, mark);
    wire.asked.push(asked);
    wire.socket.write(asked.bytes);
  };
  // One token does not get all slots, so several tokens send.
  const tokens = ['free', 'guest', 'other', 'hanger'] as const;
  for (let i = 0; i < count; i++) ask(tokens[(seed + i) % 4]!, `slot-${i}`);
  const all = await until(() => play.standIn.held.length === count, slotMs - 40);
  // One token's line, with each request in it before the next is made.
  const line = ['line-0', 'line-1', 'line-2'];
  for (const mark of parallel === 1 ? line : []) {
    const isHere = once(play.gateway.server, 'request');
    ask('other', mark);
    await Promise.race([isHere, sleep(1000)]);
    await sleep(20);
  }
  const reached = play.standIn.held.length;
  if (!all) play.find(6, `only ${reached} of ${count} sends run at the same time`);
  const isAnswered = await until(() => {
    for (const answer of play.standIn.held.splice(0)) answer();
    return wires.every((wire) => wire.isDone(wire.asked));
  }, timeoutMs + waitMs);
  if (!isAnswered) play.find(6, 'the sends at the end are not answered');
  for (const wire of wires) wire.socket.destroy();
  const served = play.standIn.order.filter((mark) => line.includes(mark));
  if (served.join() !== served.toSorted().join()) {
    play.find(3, `one token's requests are served in the order ${served}`);
  }
}

/** Whether a send on a new connection is served. */
async function isServed(play: Play, step: Step, mark: string): Promise<boolean> {
  const asked = makeRequest(play, undefined, 'free', step, mark);
  const wire = new Wire(play);
  await exchange(play, wire, [asked]);
  wire.socket.destroy();
  return asked.response?.status === 201;
}

/** Invariant 6: nothing is left over, and `close()` is quick. */
async function checkEnd(play: Play): Promise<void> {
  const { standIn, wires } = play;
  for (const wire of wires) wire.socket.destroy();
  if (!await until(() => play.held === 0, 1500)) play.find(6, `${play.held} connections of clients are left`);
  const busy = (): Peer[] => [...standIn.peers.values()].filter(({ isBusy }) => isBusy);
  if (!await until(() => busy().length === 0, 1500)) play.find(6, `${busy().length} requests at the backend are left`);
  const ms = await (play.closing ?? play.close());
  // In mid-operation, running requests may finish until the deadline.
  if (ms > (play.closing ? 2700 : 700)) play.find(6, `close() took ${Math.round(ms)} ms`);
}

// ── THE WIRE ─────────────────────────────────────────────────────────────────────────────────────
// Connections as no program writes them: requests of every method, with upgrades and bodies where none belong, several
// in one packet, cut at any byte, and reset at any moment. The gateway of such a world is a separate process, started
// by its command line. Its clients do not wait for responses, and read only whose response they got: what is checked is
// the process, its log, and by X-Request-Id the stand-in.

/** The first lines of requests; the stand-in answers unknown routes as `unknown`. */
const LINES = [
  ...[...Object.values(ROUTES), ROUTES.send],
  ...'CONNECT x:80|CONNECT x:80|OPTIONS *|OPTIONS /v2/send|HEAD /v1/about|GET http://x/v1/about'.split('|'),
  ...'GET /v2/send?message=…|GET /v2/send?message=…|BREW /v1/about|PATCH /v2/send|GET  /v1/about'.split('|'),
];
const routeOf = (line: number): keyof typeof ROUTES =>
  (Object.keys(ROUTES) as (keyof typeof ROUTES)[]).find((name) => ROUTES[name] === LINES[line]) ?? 'unknown';
const UPGRADES = ['websocket', 'websocket', 'h2c', 'TLS/1.0', 'websocket, h2c', ''];
const FRAMINGS = words('none length chunked extended tooLong tooShort expecting');
const BODIES = words('send large broken brokenLarge');

const HIDDEN = `{"number":"${ELSE}","recipients":["${ELSE}"],"message":"hidden"}`;
/** Bytes that are not a request, and a request without authentication. */
const RUBBISH = [
  '\0\0\0\0',
  'GET',
  'POST /v2/send HTTP/1.1\r\nX: ',
  'BREW / HTTP/9.9\r\n\r\n',
  'x'.repeat(9000),
  `POST /v2/send HTTP/1.1\r\nHost: x\r\nX-Mark: hidden\r\nContent-Length: ${HIDDEN.length}\r\n\r\n${HIDDEN}`,
  '\r\n\r\n\r\n',
  '}]}\r\n0\r\n\r\n',
  '{}',
];

/** One request of a wire client. */
interface WireRequest {
  line: number;
  /** The value of `Upgrade`. */
  upgrade?: string;
  form: 'bearer' | 'basic' | 'query' | 'path' | 'none';
  wrong?: boolean;
  framing: (typeof FRAMINGS)[number];
  body: (typeof BODIES)[number];
  closes?: boolean;
  answer: [kind: Answer, ms: number];
}

/** A connection: what it writes, where it pauses, and how it ends. */
interface WireClient {
  atMs: number;
  requests: WireRequest[];
  pauses: [atByte: number, ms: number][];
  /** What it writes after its requests. */
  rubbish?: number;
  /** Writes no further than this byte. */
  stopAt?: number;
  /** `answered` ends with a reset after the first bytes of a response. */
  end: 'reset' | 'answered' | 'close' | 'half' | 'wait';
  endMs: number;
  isDeaf?: boolean;
}

function genWireClient(draw: Draw): WireClient {
  const genRequest = (): WireRequest => ({
    line: draw.below(LINES.length),
    ...(draw.chance(0.3) && { upgrade: draw.pick(UPGRADES) }),
    form: draw.pick(['bearer', 'bearer', 'basic', 'query', 'path', 'none']),
    ...(draw.chance(0.2) && { wrong: true }),
    framing: draw.chance(0.5) ? draw.pick(['none', 'length']) : draw.pick(FRAMINGS),
    body: draw.chance(0.6) ? 'send' : draw.pick(BODIES),
    ...(draw.chance(0.1) && { closes: true }),
    answer: [draw.chance(0.5) ? 'prompt' : draw.pick(ANSWERS.slice(0, -1)), draw.pick([0, 0, 5, 40, 150])],
  });
  const requests = Array.from({ length: draw.pick([1, 1, 2, 2, 3, 9]) }, genRequest);
  const pauses = Array.from({ length: draw.pick([0, 0, 0, 1, 2, 4]) }, () => draw.pick([3, 80, 400, 70_000]));
  return {
    atMs: draw.below(300),
    requests,
    pauses: pauses.map((most) => [draw.below(most) + 1, draw.below(6)] as [number, number]).sort(([a], [b]) => a - b),
    ...(draw.chance(0.2) && { rubbish: draw.below(RUBBISH.length) }),
    ...(draw.chance(0.3) && { stopAt: draw.below(draw.pick([60, 400, 1200, 70_000])) }),
    end: draw.pick(['reset', 'reset', 'reset', 'answered', 'close', 'half', 'wait'] as const),
    endMs: draw.pick([0, 0, 0, 1, 3, 30]),
    ...(draw.chance(0.1) && { isDeaf: true }),
  };
}

/** The bytes of a request, whose mark determines how the stand-in answers. */
function writeWire({ line, upgrade, form, wrong, framing, body, closes }: WireRequest, mark: string): Buffer {
  const text = LINES[line]!.replace('…', mark);
  const secret = wrong ? `${WORD}-nobody-0123456789` : secretOf(text.startsWith('GET /v2') ? 'maker' : 'free');
  const [method, target = ''] = text.split(/ (?=\S)/);
  const before = form === 'path' ? `/@auth=${secret}` : '';
  const path = `${before}${target}${form === 'query' ? `${target.includes('?') ? '&' : '?'}@auth=${secret}` : ''}`;
  const filler = 'y'.repeat(/arge/.test(body) ? 70_000 : 9);
  const send = JSON.stringify({ number: FROM, recipients: [TO], message: `${mark} x`, filler });
  const content = Buffer.from(framing === 'none' ? '' : send.replace(/}$/, /broken/.test(body) ? ',}' : '}'));
  const extra = { tooLong: 30, tooShort: -20 }[framing as 'tooLong'] ?? 0;
  const isChunked = framing === 'chunked' || framing === 'extended';
  const lines = [
    `${method} ${path} HTTP/1.1`,
    'Host: gateway',
    `X-Mark: ${mark}`,
    ...(form === 'bearer' ? [`Authorization: Bearer ${secret}`] : []),
    ...(form === 'basic' ? [`Authorization: Basic ${btoa(`api:${secret}`)}`] : []),
    ...(upgrade === undefined ? [] : [`Upgrade: ${upgrade}`, 'Connection: Upgrade', 'Sec-WebSocket-Key: x']),
    ...(closes ? ['Connection: close'] : []),
    ...(framing === 'expecting' ? ['Expect: 100-continue'] : []),
    ...(isChunked ? ['Transfer-Encoding: chunked'] : []),
    ...(isChunked || framing === 'none' ? [] : [`Content-Length: ${Math.max(0, content.length + extra)}`]),
  ];
  const coded = isChunked ? chunked(content).toString('latin1') : content.toString('latin1');
  const extended = framing === 'extended'
    ? coded.replace(/^(\w+)\r\n/, '$1;a="b";c\r\n').replace(/\r\n$/, 'X-T: y\r\n\r\n')
    : coded;
  return Buffer.from(`${lines.join('\r\n')}\r\n\r\n${extended}`, 'latin1');
}

/** Starts the process of a gateway with this configuration. */
function spawnGateway(configFile: string): ChildProcess {
  const loader = process.execArgv.filter((arg) => !/^--test|^--eval/.test(arg));
  const run = 'Deno' in globalThis ? ['run', '-A', '--no-check'] : loader;
  return spawn(process.execPath, [...run, fileURLToPath(FILE), '--config', configFile], {
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { PATH: process.env.PATH, HOME: process.env.HOME, LOG_LEVEL: 'debug', LOG_FORMAT: 'json' },
  });
}

/** A gateway's process with its stand-in, for one world. */
class House {
  readonly play: Play;
  readonly #folder = mkdtempSync(join(tmpdir(), 'gateway-fuzz-'));
  #child!: ChildProcess;
  #exit!: Promise<unknown>;
  #errors = '';
  #rest = '';
  /** Lines of requests, by their ids. */
  readonly lines = new Map<string, Line>();
  /** How many lines are dropped, by the log. */
  dropped = 0;
  #hasAnswer = false;
  /** How much more of the log is read. */
  readBytes = Infinity;

  constructor(seed: number) {
    const calm = { phases: [], deafMs: [0], windowBytes: 0, parallel: 4, timeoutMs: 2000, waitMs: 300 };
    this.play = new Play({ ...genWorld(seed), ...calm });
  }

  get isOver(): boolean {
    return this.#child.exitCode !== null || this.#child.signalCode !== null;
  }

  async open(isTls: boolean): Promise<this> {
    watch(this.play, true);
    await this.play.standIn.listen();
    const [cert, key] = [join(this.#folder, 'cert.pem'), join(this.#folder, 'key.pem')];
    const config = join(this.#folder, 'gateway.json');
    writeFileSync(cert, PEMS[0]!);
    writeFileSync(key, PEMS[1]!);
    writeFileSync(config, JSON.stringify({ ...this.play.config(), ...(isTls && { tls: { cert, key } }) }));
    this.#child = spawnGateway(config);
    this.#exit = once(this.#child, 'exit');
    this.#child.stderr!.on('data', (chunk) => this.#errors += chunk);
    this.#child.stdout!.setEncoding('utf8').on('data', (chunk: string) => this.#read(chunk));
    await until(() => this.#hasAnswer || this.isOver, 30_000);
    if (this.play.port === 0) throw new Error(`the gateway's process does not listen: ${this.#errors}`);
    return this;
  }

  #read(chunk: string): void {
    this.readLog(this.readBytes - chunk.length);
    const texts = (this.#rest + chunk).split('\n');
    this.#rest = texts.pop()!;
    for (const text of texts) {
      const line = readLine(text, this.play);
      if (line.message === 'listening') this.play.port = Number(new URL(String(line.listen)).port);
      if (/^the backend /.test(String(line.message))) this.#hasAnswer = true;
      if (typeof line.lines === 'number') this.dropped += line.lines;
      if (line.message === 'request') this.lines.set(String(line.requestId), line);
    }
  }

  /** Reads so much more of the log, and no more than that. */
  readLog(bytes: number): void {
    this.readBytes = bytes;
    if (bytes > 0) this.#child.stdout!.resume();
    else this.#child.stdout!.pause();
  }

  /** Stops the process by SIGTERM, which must take no longer than its deadline, and checks what it has left. */
  async close(): Promise<Find[]> {
    const { play } = this;
    if (this.isOver) play.find(10, `a process exits with ${this.#child.exitCode} ${this.#child.signalCode}`);
    else {
      process.kill(this.#child.pid!, 'SIGTERM'); // after a child.kill, Deno 2.9 reports no exit code
      if (await isLate(this.#exit, 12_000)) play.find(10, 'a process does not exit on SIGTERM');
      else if (this.#child.exitCode !== 0) play.find(10, `a process exits ${this.#child.exitCode} on SIGTERM`);
    }
    this.#child.kill('SIGKILL');
    this.readLog(Infinity);
    await until(() => this.#child.stdout!.closed && play.standIn.peers.size === 0, 5000);
    if (this.#errors !== '') play.find(10, `a process writes to standard error: ${this.#errors.slice(0, 2000)}`);
    for (const [id, { code, status }] of this.lines) {
      const acts = play.standIn.acted.get(id) ?? 0;
      const isTold = typeof code === 'string' && Number(status) < 499 && !OPEN_CODES.includes(code);
      if (isTold && acts > 0) play.find(2, `a client got ${code}, and the backend has acted (${id})`);
      if (status === 201 && acts === 0) play.find(2, `a client got 201, and nothing was done (${id})`);
    }
    watch(play, false);
    await play.standIn.close();
    rmSync(this.#folder, { recursive: true, force: true });
    return play.finds;
  }
}

async function playWires({ seed, tls: isTls, parts }: Batch<'wire'>): Promise<Find[]> {
  const house = await new House(seed).open(isTls);
  const note = ({ line, wrong, form, answer, upgrade }: WireRequest, mark: string): string => {
    const route = upgrade?.startsWith('websocket') ? 'socket' : routeOf(line);
    const step: Step = { route, form: 'bearer', shape: 'plain', bodyBytes: 100_000, answer };
    if (wrong || form === 'none') step.wrong = true;
    const own = { mark, actor: undefined, token: 'free', step, bytes: Buffer.alloc(0) } as const;
    return expect(house.play, { ...own, expected: undefined, stays: false }).mark;
  };
  const marks = parts.map(({ requests }, i) => requests.map((request, j) => note(request, `w${i}-${j}`)));
  await Promise.all(parts.map((client, i) => runWireClient(house.play, isTls, client, marks[i]!)));
  await sleep(60); // a connection that was just reset is still being handled
  return await house.close();
}

/** Writes what a client writes, and ends its connection in the same way. */
async function runWireClient(play: Play, isTls: boolean, client: WireClient, marks: string[]): Promise<void> {
  const { requests, rubbish, pauses, stopAt, end, endMs, isDeaf } = client;
  await sleep(client.atMs);
  const raw = net.connect({ port: play.port, host: '127.0.0.1', allowHalfOpen: true, noDelay: true });
  const socket = isTls ? tls.connect({ socket: raw, rejectUnauthorized: false }) : raw;
  for (const each of new Set([raw, socket])) each.on('error', () => {});
  let [isReady, isClosed, got] = [false, false, ''];
  socket.once('close', () => isClosed = true);
  socket.on('data', (chunk: Buffer) => got = got.slice(-9000) + chunk.toString('latin1'));
  socket.once(isTls ? 'secureConnect' : 'connect', () => isReady = true);
  await until(() => isClosed || isReady, 2000);
  if (isDeaf) socket.pause();
  const written = requests.map((request, i) => writeWire(request, marks[i]!));
  const bytes = Buffer.concat([...written, Buffer.from(RUBBISH[rubbish!] ?? '')]).subarray(0, stopAt);
  let at = 0;
  for (const [atByte, ms] of [...pauses, [bytes.length, 0] as const]) {
    if (isClosed || at >= bytes.length) break;
    if (atByte > at) socket.write(bytes.subarray(at, atByte));
    at = Math.max(at, atByte);
    if (ms > 0) await sleep(ms);
  }
  if (end === 'answered') await until(() => got !== '' || isClosed, 400);
  if (endMs > 0) await sleep(endMs);
  if ((end === 'reset' || end === 'answered') && !raw.writableEnded) raw.resetAndDestroy(); // as in `#accept`
  if (end === 'half') socket.end();
  if (end === 'half' || end === 'wait') await until(() => isClosed, 400);
  socket.destroy();
  raw.destroy();
  for (const [, mark] of got.matchAll(/^X-Answer: (\S+)\r$/gim)) {
    if (!marks.includes(mark!)) play.find(4, `a client got the answer to another request: ${mark}`);
  }
}

// ── THE LOG ──────────────────────────────────────────────────────────────────────────────────────
// A gateway whose log is read slowly, or not at all, by the process that started it. Each request leaves one line, or
// is one of the lines that the log says to be dropped.

/** Requests to a gateway, how much of its log is read meanwhile, and whether everything is then. */
type Flood = { requests: number; path: string; readKiB: number; isRead: boolean };

/** A path and a header whose log line is as long as one can be, so that 1 MiB of them come soon. */
const LONG = '/rate-limit-challenge'.repeat(8);
const ORIGIN = { Origin: `https://${'x'.repeat(92)}` };

const genFlood = (draw: Draw): Flood => ({
  requests: draw.pick([300, 2500, 3000]),
  path: draw.pick(['/healthz', LONG, LONG, LONG, LONG]),
  readKiB: draw.pick([0, 0, 0, 100, 900]),
  isRead: draw.chance(0.7),
});

async function playLog({ seed, parts }: Batch<'log'>): Promise<Find[]> {
  const house = await new House(seed).open(false);
  const { play, lines } = house;
  const agent = new http.Agent({ keepAlive: true, maxSockets: 8 });
  const get = (path: string): Promise<Told> => ask(play.port, agent, { method: 'GET', path, headers: ORIGIN });
  let asked = 0;
  for (const { requests, path, readKiB, isRead } of parts) {
    house.readLog(readKiB * 1024);
    const answered = Promise.all(Array.from({ length: requests }, () => get(path)));
    asked += requests;
    const stops = await isLate(answered, 20_000);
    if (stops) play.find(4, 'a gateway whose log is not read stops');
    if (stops) break;
    if (!isRead) continue;
    house.readLog(Infinity);
    const isWhole = (): boolean => lines.size + house.dropped === asked;
    await until(isWhole, 10_000);
    const { text } = await get(`/@auth=${secretOf('watcher')}/metrics`);
    asked++;
    const [, counted] = /lines_dropped_total (\d+)/.exec(text) ?? [];
    const isTrue = await until(isWhole, 10_000) && Number(counted) === house.dropped;
    if (!isTrue) play.find(12, `${asked} requests: ${lines.size} lines, ${house.dropped} dropped, ${counted} counted`);
  }
  if (house.dropped > 0) came('log dropped');
  agent.destroy();
  return await house.close();
}

// ── A DESK: ONE REQUEST AT A TIME ────────────────────────────────────────────────────────────────
// The worlds above are about time and bytes. The kinds below are about decisions: hundreds of requests a second, one
// after the other, to a gateway in this process, or in one of its own. The desk's backend keeps what it got, and
// answers with 201 or with what `X-Answer` says (0: it breaks off). It models nothing else of the real backend.

/** A request as a program makes it; `headers` may hold a name twice. */
type Letter = { method: string; path: string; headers: Record<string, string | string[]>; body?: string | undefined };
/** What the backend got for a request. */
type Seen = { url: string; headers: string[]; body: string };
/** The response to the client; status 0 if the connection broke. */
type Told = { status: number; code?: string | undefined; retryAfter?: string | undefined; text: string };

/** Sends a request to a gateway. */
function ask(port: number, agent: http.Agent, { body, ...letter }: Letter): Promise<Told> {
  return new Promise((resolve) => {
    const req = http.request({ ...letter, host: '127.0.0.1', port, agent }, (res) => {
      let text = '';
      res.setEncoding('utf8').on('data', (part: string) => text += part).on('error', () => {}).on('close', () => {
        const [, code] = /"code":"([a-z_]+)"/.exec(text) ?? [];
        resolve({ status: res.statusCode!, code, retryAfter: res.headers['retry-after'], text });
      });
    });
    req.on('error', () => resolve({ status: 0, text: '' }));
    req.end(body);
  });
}

class Desk {
  lateMs = 0;
  readonly finds: Find[] = [];
  readonly seen = new Map<string, Seen[]>();
  readonly lines: Line[] = [];
  clockMs = Date.UTC(2026, 0, 1);
  #gateway: Gateway | undefined;
  #child: ChildProcess | undefined;
  #port = 0;
  readonly #agent = new http.Agent({ keepAlive: true });
  readonly #backend = http.createServer((req, res) => {
    const chunks: Buffer[] = [];
    req.on('error', () => {});
    req.on('data', (chunk: Buffer) => chunks.push(chunk)).on('end', () => {
      const [mark, body] = [String(req.headers['x-mark']), Buffer.concat(chunks).toString()];
      const { url = '', rawHeaders: headers } = req;
      this.seen.set(mark, [...this.seen.get(mark) ?? [], { url, headers, body }]);
      const status = Number(req.headers['x-answer'] ?? 201);
      if (status === 0) req.socket.destroy();
      else res.writeHead(status, { 'Content-Type': 'application/json' }).end('{}');
    });
  });

  /** Opens a gateway, whose backend has a path and userinfo. @param tokens their settings, without secrets. */
  async open(tokens: Record<string, object>, config: GatewayConfig, isApart = false): Promise<void> {
    watch(this, true);
    await once(this.#backend.listen(0, '127.0.0.1'), 'listening');
    const url = `http://user:word@127.0.0.1:${(this.#backend.address() as AddressInfo).port}/base`;
    const secrets = Object.entries(tokens).map(([name, token]) => [name, { secret: secretOf(name), ...token }]);
    const whole: GatewayConfig = {
      ...{ listen: '127.0.0.1:0', backend: { url, wait: '0' }, auth: { methods: FORMS }, shutdown: '1s' },
      ...{ log: { level: 'debug', format: 'json' }, tokens: Object.fromEntries(secrets), ...config },
    };
    if (isApart) return await this.#openApart(whole);
    this.#gateway = createGateway(whole, { now: () => this.clockMs, log: (text) => this.#keep(text) });
    this.#port = Number(new URL(await this.#gateway.listen()).port);
  }

  /** Opens a gateway in a process of its own. */
  async #openApart(config: GatewayConfig): Promise<void> {
    const folder = mkdtempSync(join(tmpdir(), 'gateway-fuzz-'));
    const file = join(folder, 'gateway.json');
    writeFileSync(file, JSON.stringify(config));
    const child = this.#child = spawnGateway(file);
    let [rest, errors] = ['', ''];
    child.stderr!.on('data', (chunk) => errors += chunk);
    child.stdout!.setEncoding('utf8').on('data', (chunk: string) => {
      const texts = (rest + chunk).split('\n');
      rest = texts.pop()!;
      for (const text of texts) this.#keep(text);
    });
    await until(() => this.#port > 0 || child.exitCode !== null, 30_000);
    rmSync(folder, { recursive: true });
    if (this.#port === 0) throw new Error(`the gateway's process does not listen: ${errors}`);
  }

  #keep(text: string): void {
    const line = readLine(text, this);
    this.lines.push(line);
    if (line.message === 'listening') this.#port = Number(new URL(String(line.listen)).port);
  }

  find(invariant: Invariant, what: string, about: unknown = {}): void {
    this.finds.push({ invariant, what: `${what}: ${JSON.stringify(about)}`, isTimed: false });
  }

  ask(mark: string, letter: Letter): Promise<Told> {
    return ask(this.#port, this.#agent, { ...letter, headers: { ...letter.headers, 'X-Mark': mark } });
  }

  async close(): Promise<void> {
    watch(this, false);
    this.#agent.destroy();
    await this.#gateway?.close();
    if (this.#child?.kill('SIGKILL')) await once(this.#child, 'close');
    this.#backend.close();
  }
}

// ── MEANING ──────────────────────────────────────────────────────────────────────────────────────
// Bodies as programs and people post them to a token that makes sends. The generator decides what is meant before it
// writes: a text, an intended recipient or none, and a client's encoding. It writes no raw text that is itself a
// well-encoded form, and no unencoded value that another client would have meant encoded.
//
// In some worlds another token posts bodies before these, which share their names, and try to change how they are read.
// There each body is also posted to a gateway in a process that reads no body of the other token.

const ENCODINGS = words('json shell form bare lines multipart text query get payload');
/** How a recipient is named: by a send's own field, with what programs write around it, and by names that are data. */
const OWN_NAMES = words('recipients recipients recipients recipient Recipients recipients[] recipients[0]');
const OTHER_NAMES = words('to group target receipients recipents group_id destination');

/** What a client means, and how it is written. */
interface Meaning {
  token: keyof typeof MEANING_TOKENS;
  way: (typeof ENCODINGS)[number];
  text: string;
  /** The intended recipients, and the name under which each is written. */
  wanted: string[];
  name: (typeof OWN_NAMES)[number] | (typeof OTHER_NAMES)[number];
  /** How often a form has the field of the text. */
  times: number;
  /** Content-Type; none if empty. */
  declared: string;
  /** Other fields. Those named `auth` hold a valid credential in addition to the one in the header. */
  others: [name: string, value: string][];
  /** There is a file in addition to the fields. */
  hasFile?: boolean;
  /** How the fields are ordered. */
  order: number;
  /** What is escaped in JSON: the last character of each name, or, as by Python and PHP, what is not ASCII. */
  escaped?: 'last' | 'foreign' | undefined;
  /** What another token posts before it. */
  before?: Intrusion[];
}

/**
 * How another token tries to change how a body is read: by a name that ends in a backslash where the body's has another
 * last character, by names that JavaScript gives a meaning, by very many names, or by other values of the same names.
 */
const INTRUSIONS = words('backslash proto constructor many values');

/** A body of another token: what it tries, how it is encoded, and which name of the next body it changes. */
interface Intrusion {
  token: 'intruder' | 'other';
  kind: (typeof INTRUSIONS)[number];
  way: 'json' | 'payload' | 'form';
  name: number;
}

const THIRD = '+15550100003';
const WANTED = [[], [], [THIRD], [THIRD], [GROUP], [THIRD, TO], [TO, THIRD, ELSE], [TO, THIRD, ELSE, FROM]];
const defaults = { number: FROM, recipients: [TO] };
const MEANING_TOKENS = {
  plain: { defaults },
  open: { defaults, recipients: [TO, THIRD, ELSE, FROM, 'group.*'] },
  templated: { defaults, message: '{{text}}{{message}}{{priorité}}' },
  whole: { defaults, message: '{{.}}{{payload}}{{data}}{{message}}' },
  unaddressed: { defaults: { number: FROM }, message: '{{text}}{{message}}{{priorité}}' },
};
/** The tokens of intrusions: the bodies of one are made into sends, and those of the other are scanned. */
const INTRUDERS = { intruder: { defaults: { number: FROM, recipients: [ELSE] }, message: '{{.}}' }, other: {} };

/** Pieces of texts, with everything that is difficult to encode. None starts a JSON object, and none names a field. */
const PIECES = ('Backup done|5 files|AT&T|Tom & Jerry|temp=23|x = 1|a=b&c|100%|50% off|"quoted"|it\'s|Tür|🚪|C:\\dir|' +
  'number: 5|to: Bob|<b>|;|#1|https://x.example/?a=1|a+b|\n|\t|-- |[x]|(y)|état|auth=failed|98 %|@home').split('|');

function genMeaning(draw: Draw): Meaning {
  const way = draw.pick(ENCODINGS);
  const token = draw.pick(Object.keys(MEANING_TOKENS) as Meaning['token'][]);
  const isLine = way === 'lines' || way === 'shell';
  const usable = way === 'bare' ? PIECES.filter(isBare) : PIECES;
  const pieces = isLine ? ['Backup', 'done', 'Tür', '5'] : usable;
  const words = Array.from({ length: draw.between(1, 4) }, () => draw.pick(pieces));
  const joined = words.join(draw.pick([' ', ' ', isLine ? ' ' : '']));
  const text = (way === 'bare' && !isBare(joined) ? words[0]! : joined).trim() || 'Backup done';
  // A text that is declared as one is sent unchanged, and lines are not a form.
  const hasSecret = !isLine && draw.chance(0.15);
  const others: Meaning['others'] = [
    ...(draw.chance(0.5) ? [['sensor', draw.pick(['Door 1', 'door', '5'])]] : []),
    ...(draw.chance(0.4) ? [['title', draw.pick(['Back up', 'Backup', 'x=y'])]] : []),
    ...(/json|payload/.test(way) && draw.chance(0.4) ? [['priorité', 'haute']] : []),
    ...(hasSecret ? [[draw.pick(['auth', 'auth', '@auth']), secretOf('plain')]] : []),
  ] as Meaning['others'];
  const isForm = /form|bare|lines|text|payload/.test(way);
  const types = ['application/json', 'text/plain', 'application/x-www-form-urlencoded', ''];
  const formTypes = way === 'text' ? [...types.slice(1), 'text/plain; charset=utf-8'] : types.slice(2);
  return {
    ...{ token, way, text, others, order: draw.below(1000) },
    wanted: way === 'text' ? [] : draw.pick(WANTED),
    times: draw.pick([1, 1, 1, 1, 1, 2, 3, 4]),
    name: draw.chance(0.7) ? draw.pick(OWN_NAMES) : draw.pick(OTHER_NAMES),
    declared: draw.pick(isForm ? formTypes : types),
    ...((way === 'multipart' || way === 'payload') && draw.chance(0.4) && { hasFile: true }),
    ...(/json|payload|query/.test(way) && { escaped: draw.pick(['last', 'foreign', undefined] as const) }),
  };
}

/** Makes a world of meanings. In every fourth, another token posts between them. */
function genMeanings(seed: number): Batch<'meaning'> {
  const world = batches('meaning', 60, genMeaning)(seed);
  const draw = generator(seed, 'intrusions');
  const genIntrusion = (): Intrusion => ({
    token: draw.chance(0.8) ? 'intruder' : 'other',
    kind: draw.pick(INTRUSIONS),
    way: draw.pick(['json', 'json', 'json', 'payload', 'form']),
    name: draw.below(8),
  });
  if (!draw.chance(0.25)) return world;
  for (const part of world.parts) if (draw.chance(0.5)) part.before = Array.from({ length: 2 }, genIntrusion);
  return world;
}

/** Whether a text means the same to a client that encodes nothing and to a form's reader. */
const isBare = (text: string): boolean => !/\+|%[0-9a-f]{2}|&[^&]*=|\n|;/i.test(text);

const FORM_SAFE = (text: string): string => encodeURIComponent(text).replaceAll('%20', '+');

/** A meaning as it is written. */
interface Written {
  letter: Letter;
  /** The names of its JSON, in order. */
  names: string[];
  /** Whether the default recipients would be wrong. */
  isNamed: boolean;
  /** The texts of which one is meant; undefined if a template shows more. */
  texts: string[] | undefined;
}

/** Writes a meaning in its way. @param unique a name that no body of an earlier world has. */
function writeMeaning(meaning: Meaning, unique: string): Written {
  const { token, way, text, times, wanted, name, declared, others, hasFile, order, escaped } = meaning;
  const draw = generator(order, 'order');
  const textName = /ed$/.test(token) ? draw.pick(['text', 'message']) : 'message';
  const shuffled = <T>(list: T[]): T[] =>
    list.map((each) => [draw.below(1e6), each] as const).sort(([a], [b]) => a - b).map(([, each]) => each);
  const inQuery = way === 'query' && wanted.length > 0;
  const pairs = shuffled([
    ...Array.from({ length: times }, () => [textName, text]),
    ...(inQuery ? [] : wanted.map((each) => [name, each])),
    ...(way === 'query' ? [] : others),
  ] as [string, string][]);
  const wantedAs = (key: string): unknown => wanted.length > 1 || /^recipients/i.test(key) ? wanted : wanted[0];
  const membersOf = (list: [string, string][]): Record<string, unknown> => ({
    ...(escaped && { [unique]: 1 }),
    ...Object.fromEntries(list.map(([key, value]) => [key, key === name ? wantedAs(key) : value])),
  });
  const object = (list: [string, string][]): string => escapeJson(JSON.stringify(membersOf(list)), escaped);
  const encoded = pairs.map((pair) => pair.map(draw.chance(0.5) ? FORM_SAFE : encodeURIComponent).join('=')).join('&');
  const bare = pairs.map(([key, value]) => `${key}=${key === name ? draw.pick([value, FORM_SAFE(value)]) : value}`);
  const isMultipart = way === 'multipart' || (way === 'payload' && hasFile);
  const inner = object(pairs);
  const key = draw.pick(['payload', 'data']);
  const bodies: Record<Meaning['way'], () => string> = {
    json: () => inner,
    shell: () => `'{${pairs.map(([key, value]) => `${key}:${value}`)}}'`,
    form: () => encoded,
    bare: () => bare.join('&'),
    lines: () => pairs.map(([key, value]) => `${key}: ${value}`).join('\n'),
    multipart: () => multipart(pairs, hasFile),
    text: () => text,
    query: () => object([[textName, text]]),
    get: () => '',
    payload: () => isMultipart ? multipart([[key, inner]], true) : `${key}=${encodeURIComponent(inner)}`,
  };
  const type = way === 'get' ? '' : isMultipart ? 'multipart/form-data; boundary=b' : declared;
  const inUrl = wanted.map((each) => `${FORM_SAFE(name)}=${encodeURIComponent(each)}`).join('&');
  const query = way === 'get' ? `?${encoded}` : inQuery ? `?${inUrl}` : '';
  const body = bodies[way]();
  const headers = { Authorization: `Bearer ${secretOf(token)}`, ...(type !== '' && { 'Content-Type': type }) };
  const letter = { method: way === 'get' ? 'GET' : 'POST', path: `/v2/send${query}`, headers, body: body || undefined };
  // A text names no recipient, whatever it contains, and a foreign name is data. So are a body's recipients to a
  // template whose token has default ones. Unencoded pairs may be a form or a text, unless the first name is a field.
  const isTextOnly = /^text\/plain/.test(type) && !body.startsWith('{');
  const isData = /templated|whole/.test(token) && name === 'recipients' && !inQuery;
  const isNamed = wanted.length > 0 && (OWN_NAMES as string[]).includes(name) && !isTextOnly && !isData;
  const isForm = way === 'bare' ? bare[0]!.startsWith('message=') : !/^(?:lines|shell)$/.test(way);
  const isShown = /plain|open/.test(token) || (token !== 'whole' && times === 1);
  const priority = /ed$/.test(token) ? others.find(([key]) => key === 'priorité')?.[1] ?? '' : '';
  const texts = isShown ? isForm ? [text + priority] : [text, body] : undefined;
  const names = Object.keys(membersOf(way === 'query' ? [[textName, text]] : pairs));
  return { letter, names, isNamed, texts };
}

/** Writes characters of JSON as escapes, which change nothing. */
function escapeJson(json: string, escaped: Meaning['escaped']): string {
  const escape = (char: string): string => `\\u${char.charCodeAt(0).toString(16).padStart(4, '0')}`;
  if (escaped === 'foreign') return json.replace(/[^ -~]/g, escape);
  if (escaped === undefined) return json;
  const strings = /"(?:[^"\\]|\\.)*"(:?)/g;
  return json.replace(strings, (text, colon) => colon ? text.replace(/[^"\\](?=":$)/, escape) : text);
}

/** Writes the body of another token. @param names those of the next body. */
function writeIntrusion({ token, kind, way, name }: Intrusion, names: string[]): Letter {
  const own: Record<string, unknown> = { number: FROM, recipients: [ELSE], message: 'not meant' };
  const at = name % names.length;
  const same = names.map((each) => [each, own[each] ?? 'not meant']);
  const members: Record<Intrusion['kind'], () => unknown[][]> = {
    backslash: () => [...same.slice(0, at), [`${names[at]!.slice(0, -1)}\\`, 0]],
    proto: () => [...same, ['__proto__', own]],
    constructor: () => [...same, ['constructor', { prototype: own }], ['toString', own]],
    many: () => [...same, ...Array.from({ length: 3000 }, (_, i) => [`${names[0]}-${i}`, i])],
    values: () => same,
  };
  const list = members[kind]() as [string, unknown][];
  const json = JSON.stringify(Object.fromEntries(list));
  const form = list.map((pair) => pair.map((each) => encodeURIComponent(String(each))).join('='));
  const body = { json, payload: `payload=${encodeURIComponent(json)}`, form: form.join('&') }[way];
  return { method: 'POST', path: '/v2/send', headers: { Authorization: `Bearer ${secretOf(token)}` }, body };
}

function multipart(pairs: [string, string][], hasFile = false): string {
  const parts = pairs.map(([key, value]) => `; name="${key}"\r\n\r\n${value}`);
  if (hasFile) parts.push('; name="file"; filename="a.png"\r\nContent-Type: image/png\r\n\r\nPNG');
  return `${parts.map((part) => `--b\r\nContent-Disposition: form-data${part}\r\n`).join('')}--b--\r\n`;
}

/**
 * How many worlds of meanings were played. V8 remembers the names of JSON as long as a process lives, so each world has
 * a name of its own before them: a world that was reduced fails because of its own bodies or not at all.
 */
let playedMeanings = 0;

/** Posts what is meant, and compares it with what arrives (invariants 8, 11 and 13). */
async function playMeanings({ parts }: Batch<'meaning'>): Promise<Find[]> {
  const unique = `unique${playedMeanings++}`;
  const [desk, fresh] = [new Desk(), new Desk()];
  const hasIntruder = parts.some(({ before }) => before);
  const config: GatewayConfig = { allow: ['send', 'GET /v2/send'] };
  await desk.open({ ...MEANING_TOKENS, ...INTRUDERS }, config);
  if (hasIntruder) await fresh.open(MEANING_TOKENS, config, true);
  for (const [i, meaning] of parts.entries()) {
    const written = writeMeaning(meaning, unique);
    for (const [j, intrusion] of (meaning.before ?? []).entries()) {
      const { status } = await desk.ask(`m${i}-${j}`, writeIntrusion(intrusion, written.names));
      if (status === 201) came(`intrusion ${intrusion.kind}`);
    }
    const told = await desk.ask(`m${i}`, written.letter);
    checkMeaning(desk, meaning, written, told, desk.seen.get(`m${i}`) ?? []);
    if (!hasIntruder) continue;
    const outcomeOf = ({ seen }: Desk, { status, code }: Told): string =>
      `${status} ${code}, ${seen.get(`m${i}`)?.map(({ url, body }) => `${url} ${body}`)}`;
    const [own, other] = [outcomeOf(desk, told), outcomeOf(fresh, await fresh.ask(`m${i}`, written.letter))];
    const about = { own, other, sent: written.letter.body, ...meaning };
    if (own !== other) desk.find(13, "another token's body changes what becomes of one", about);
  }
  await desk.close();
  if (hasIntruder) await fresh.close();
  return [...desk.finds, ...fresh.finds];
}

/** Compares what is meant with what arrives. */
function checkMeaning(desk: Desk, meaning: Meaning, written: Written, { status }: Told, seen: Seen[]): void {
  const { letter, isNamed, texts } = written;
  const about = { sent: letter.body ?? letter.path, ...meaning };
  if (status === 201) came(`meaning ${meaning.way}`);
  if (seen.length !== (status === 201 ? 1 : 0)) desk.find(2, `${status}, and ${seen.length} requests arrived`, about);
  if (status !== 201 && (status < 400 || status > 499)) desk.find(11, `a body is answered with ${status}`, about);
  if (seen.length === 0) return;
  const { recipients, message } = JSON.parse(seen[0]!.body);
  const [wanted, to] = [isNamed ? meaning.wanted : [TO], recipients ?? []].map((list) => String(list.toSorted()));
  if (to !== wanted) desk.find(11, `a message for ${wanted} goes to ${to}`, about);
  const isConfined = /plain|templated|whole/.test(meaning.token);
  if (isConfined && to !== TO) desk.find(3, `a token for ${TO} sends to ${to}`, about);
  const isMeant = texts === undefined || texts.includes(String(message));
  if (!isMeant) desk.find(11, `another text arrives, ${JSON.stringify(message)}`, about);
  if (String(message).includes(WORD)) desk.find(8, 'a credential is in a text', about);
}

// ── RULES ────────────────────────────────────────────────────────────────────────────────────────
// A model of the rules judges each request before it is sent, and the gateway must decide the same: which client it is,
// which credential counts, what its token may do, its rate by the gateway's own clock.

const RULE_TOKENS = {
  free: {},
  confined: LISTS,
  derived: { defaults },
  near: { clients: ['10.1.0.0/16'] },
  slow: { rate: '3/1m' },
  old: { expires: '2020-01-01' },
  onlyBearer: { methods: ['bearer' as const] },
};
type RuleToken = keyof typeof RULE_TOKENS;

/** A request to be judged. */
interface Case {
  route: string;
  /** One or two; the first in the order header, path, query, body counts. */
  credentials: { form: Form; token: RuleToken | 'nobody' }[];
  /** How `@auth` is spelled in a path or a query. */
  spelling: number;
  /** The client, behind a trusted proxy. */
  from: string;
  origin?: string;
  /** A header that only browsers send. */
  browser?: 'User-Agent' | 'Sec-Fetch-Site';
  hasRange?: boolean;
  account: string;
  recipient: string;
  /** The type that an attachment declares. */
  attachment?: string;
  /** The backend's status; 0 if it breaks off. */
  answer?: number;
  /** How far the clock advances before it. */
  waitMs: number;
}

/** The routes of `messaging`; `{}` stands for a body. */
const MESSAGING = ROWS.filter(({ group }) => group === 'messaging').map(({ method, template, facts }) =>
  `${method}${facts.includes('body') ? '{}' : ''} ${template}`
);

function genCase(draw: Draw): Case {
  const tokens = Object.keys(RULE_TOKENS) as RuleToken[];
  const credential = (): Case['credentials'][number] => ({
    form: draw.pick(FORMS),
    token: draw.chance(0.15) ? 'nobody' : draw.pick([...tokens, 'confined', 'confined', 'slow', 'free']),
  });
  return {
    route: draw.chance(0.5) ? 'POST{} /v2/send' : draw.pick([...MESSAGING, 'GET /v1/receive/:number', 'GET /v1/about']),
    credentials: draw.chance(0.7) ? [credential()] : [credential(), credential()],
    spelling: draw.below(4),
    from: draw.pick(['10.1.0.1', '10.1.9.9', '10.2.0.1', '192.0.2.1, 10.1.0.1', '10.1.0.1, 192.0.2.1', '2001:db8::1']),
    ...(draw.chance(0.3) && { origin: draw.pick(['https://dash.example', 'https://evil.example', 'null']) }),
    ...(draw.chance(0.2) && { browser: draw.pick(['User-Agent', 'Sec-Fetch-Site'] as const) }),
    ...(draw.chance(0.2) && { hasRange: true }),
    account: draw.pick([FROM, FROM, FROM, ELSE]),
    recipient: draw.pick([TO, TO, TO, ELSE]),
    ...(draw.chance(0.2) && { attachment: draw.pick(['', 'data:image/png;filename=a.png;base64,', EVIL_FILE]) }),
    waitMs: draw.pick([0, 0, 1000, 5000, 20_000, 61_000]),
  };
}

/** A case of any route, to a backend that also refuses and breaks off. */
const genCounted = (draw: Draw): Case => ({
  ...genCase(draw),
  ...(draw.chance(0.3) && { route: draw.pick(OTHER_ROUTES) }),
  answer: draw.pick([201, 201, 200, 400, 500, 0]),
});
const OTHER_ROUTES = 'HEAD /v1/about|GET /healthz|GET /v1/nothing|POST{} /v1/register/:number|POST{} /v1/send'.split(
  '|',
);

const EVIL_FILE = 'data:image/png;filename=../a.png;base64,';
const AUTH_NAMES = ['@auth', '%40auth', '@%61uth', '%40%61uth'];
const ORDER = ['bearer', 'basic', 'path', 'query', 'body'];

/** Writes a case as a request. */
function writeCase({ route, credentials, spelling, from, origin, browser, hasRange, answer, ...sent }: Case): Letter {
  const [methods = '', template = ''] = route.split(' ');
  const method = methods.replace('{}', '');
  const values: Record<string, string> = { ':number': sent.account, ':groupid': GROUP, ':attachment': 'one.jpg' };
  let path = template.replace(/:\w+/g, (name) => values[name]!);
  if (/^\/v1\/search/.test(path)) path += `?numbers=${encodeURIComponent(sent.recipient)}`;
  const document: Record<string, unknown> = {
    ...(template === '/v2/send' && { number: sent.account, recipients: [sent.recipient], message: 'x' }),
    ...(/members$|admins$/.test(template) && { [template.split('/').at(-1)!]: [sent.recipient] }),
    ...(methods.includes('{}') && !/send|groups/.test(template) && { recipient: sent.recipient, timestamp: 1 }),
    ...(template === '/v2/send' && sent.attachment !== undefined && { base64_attachments: [`${sent.attachment}QUJD`] }),
  };
  const authorizations: string[] = [];
  let segments = '';
  const name = AUTH_NAMES[spelling]!;
  for (const { form, token } of credentials) {
    const secret = secretOf(token);
    if (form === 'bearer') authorizations.push(`Bearer ${secret}`);
    if (form === 'basic') authorizations.push(`Basic ${btoa(`api:${secret}`)}`);
    if (form === 'path') segments += `/${name}${spelling % 2 ? '%3D' : '='}${secret}`;
    if (form === 'query') path += `${path.includes('?') ? '&' : '?'}${name}=${secret}`;
    if (form === 'body') document.auth = secret;
  }
  const body = methods.includes('{}') ? JSON.stringify(document) : undefined;
  const headers = {
    'X-Forwarded-For': from,
    ...(authorizations.length > 0 && { Authorization: authorizations }),
    ...(origin !== undefined && { Origin: origin }),
    ...(browser && { [browser]: 'Mozilla/5.0' }),
    ...(hasRange && { Range: 'bytes=0-' }),
    ...(answer !== undefined && { 'X-Answer': String(answer) }),
    ...(body !== undefined && { 'Content-Type': 'application/json', 'Content-Length': String(body.length) }),
  };
  return { method, path: segments + path, headers, body };
}

/** The model: codes, one of which the response must have; none if it must be served. `credit` is the slow token's. */
function judge(each: Case, credit: { ms: number }): { codes: string[]; retryAfter?: string } {
  const { route, credentials, from, origin, browser, hasRange, account, recipient, attachment } = each;
  const [methods = '', template = ''] = route.split(' ');
  const [isGet, hasBody] = [methods === 'GET', methods.includes('{}')];
  const places = credentials.map(({ form }) => form === 'basic' ? 'bearer' : form);
  const isTwice = places.length === 2 && places[0] === places[1] && places[0] !== 'body';
  const client = from.split(', ').at(-1)!;
  if (isTwice) {
    return { codes: ['bad_credential', 'bad_target', ...(client.startsWith('10.') ? [] : ['client_not_allowed'])] };
  }
  if (!client.startsWith('10.')) return { codes: ['client_not_allowed'] };
  const given = credentials.filter(({ form }) => form !== 'body' || hasBody);
  // The last of two credentials in one place is written; only the body has room for both.
  const [first] = given.toReversed().sort((a, b) => ORDER.indexOf(a.form) - ORDER.indexOf(b.form));
  if (first === undefined) return { codes: ['unauthorized', 'too_many_failures'] };
  const { form, token } = first;
  const isWrong = token === 'nobody' || token === 'old' || (token === 'onlyBearer' && form !== 'bearer');
  if (isWrong) return { codes: ['unauthorized', 'too_many_failures'] };
  const isBrowser = origin !== undefined || browser === 'Sec-Fetch-Site' || (browser !== undefined && isGet);
  const isForeign = form === 'basic' && isBrowser && origin !== 'https://dash.example';
  const isPlayer = hasRange && !/\/(?::attachment|avatar)$/.test(route);
  if (isForeign || isPlayer) return { codes: ['cross_site'] };
  if (token === 'near' && !client.startsWith('10.1.')) return { codes: ['client_not_allowed'] };
  if (token === 'confined' || token === 'derived') {
    const codes = confinedCodes(methods, template, account, recipient);
    if (codes.length > 0) return { codes };
  }
  if (token === 'slow') {
    if (credit.ms < 20_000) return { codes: ['rate_limited'], retryAfter: `${Math.ceil((20_000 - credit.ms) / 1000)}` };
    credit.ms -= 20_000;
  }
  return { codes: template === '/v2/send' && attachment === EVIL_FILE ? ['bad_field'] : [] };
}

/** Which refusals a token with lists may get, and must get one of. */
function confinedCodes(methods: string, template: string, account: string, recipient: string): string[] {
  const hasRecipient = methods.includes('{}') && (!template.includes('groups') || /members$|admins$/.test(template));
  const isForElse = hasRecipient && recipient === ELSE;
  const isGroupUse = template.includes(':groupid') && methods !== 'GET';
  const isGroupChange = /^(?:POST|PUT)\{\} \/v1\/groups\/:number(?:\/:groupid)?$|(?:members|admins)$/;
  const isOwner = template.includes(':number') || /send$|about/.test(template);
  return [
    ...(template !== '/v1/about' && isOwner && account === ELSE ? ['sender_not_allowed'] : []),
    ...(isOwner ? [] : ['endpoint_not_allowed']),
    ...(isForElse || isGroupUse ? ['recipient_not_allowed'] : []),
    ...(isGroupChange.test(`${methods} ${template}`) ? ['endpoint_not_allowed'] : []),
  ];
}

/** Sends cases one after the other, and compares what the gateway decides with the model (invariants 2, 8, 9, 12). */
async function playCases({ kind, parts }: Batch<'rules' | 'counts'>): Promise<Find[]> {
  const desk = new Desk();
  const addresses = { clients: ['10.0.0.0/8'], trustedProxies: ['127.0.0.1'] };
  const tokens = { ...RULE_TOKENS, watcher: TOKENS.watcher };
  await desk.open(tokens, { allow: ['messaging', 'info'], cors: ['https://dash.example'], ...addresses });
  const credit = { ms: 60_000 };
  const all: Told[] = [];
  for (const [i, each] of parts.entries()) {
    desk.clockMs += each.waitMs;
    credit.ms = Math.min(60_000, credit.ms + each.waitMs);
    const letter = writeCase(each);
    const told = await desk.ask(`r${i}`, letter);
    const seen = desk.seen.get(`r${i}`) ?? [];
    all.push(told);
    if (kind === 'counts') continue;
    const { codes, retryAfter } = judge(each, credit);
    const about = { told, codes, ...letter, ...each };
    if (codes.length === 0 && told.status !== 201) desk.find(9, 'what the rules allow is refused', about);
    if (codes.length > 0 && !codes.includes(told.code!)) desk.find(9, 'a refusal has another code', about);
    if (codes.length > 0 && seen.length > 0) desk.find(9, 'what the rules refuse reaches the backend', about);
    if (seen.length !== (told.status === 201 ? 1 : 0)) desk.find(2, `${seen.length} requests arrived`, about);
    if (retryAfter !== undefined && told.retryAfter !== retryAfter) desk.find(9, 'another Retry-After', about);
    for (const { url, headers, body } of seen) {
      if (SECRET_PATTERN.test(`${url} ${headers} ${body}`)) desk.find(8, 'the backend got a secret', about);
      if (!url.startsWith('/base/v')) desk.find(9, `the backend gets a request for ${url}`, about);
      const own = headers.filter((_, j) => headers[j - 1]?.toLowerCase() === 'authorization');
      if (own.join() !== `Basic ${btoa('user:word')}`) desk.find(9, `the backend got ${own} for its own Basic`, about);
    }
  }
  await checkMetrics(desk, parts, all);
  await desk.close();
  return desk.finds;
}

/** Invariant 12: all metrics that count requests, sends and failures. */
async function checkMetrics(desk: Desk, parts: Case[], all: Told[]): Promise<void> {
  const counts = new Map<string, number>();
  const sentBy = new Set<unknown>();
  let sends = 0;
  const lines = desk.lines.filter(({ message }) => message === 'request');
  for (const [i, { status }] of all.entries()) {
    const { method, route, token = '', status: logged } = lines[i] ?? {};
    if (logged !== status) desk.find(7, `the log has ${logged}, and the client got ${status}`);
    const isKnown = ROWS.some((row) => row.method === method && row.template === route) || route === '/healthz';
    const labels = `token="${token}",route="${isKnown ? `${method} ${route}` : 'other'}",status="${status}"`;
    counts.set(labels, (counts.get(labels) ?? 0) + 1);
    if (!/send$/.test(String(route)) || !desk.seen.has(`r${i}`) || parts[i]!.answer === 0) continue;
    sends++;
    if (status < 300) sentBy.add(token);
  }
  const happened = [
    ...Array.from(counts, ([labels, count]) => `requests_total{${labels}} ${count}`),
    ...Array.from(sentBy, (token) => `last_sent_timestamp_seconds{token="${token}"}`),
    ...[`send_seconds_count ${sends}`, 'log_lines_dropped_total 0', 'internal_errors_total 0'],
  ];
  const headers = { 'Authorization': `Bearer ${secretOf('watcher')}`, 'X-Forwarded-For': '10.1.0.1' };
  const { text } = await desk.ask('metrics', { method: 'GET', path: '/metrics', headers });
  const series = /^signal_gateway_(requests_total.*|last_sent.*\}|send_seconds_count.*|(?:log|internal)_.*)/gm;
  const counted = Array.from(text.matchAll(series), ([, each]) => each!);
  const differing = [...happened, ...counted].filter((each) => !happened.includes(each) || !counted.includes(each));
  if (differing.length > 0) desk.find(12, 'what happened and what was counted differ', differing);
}

// ── RUNS ─────────────────────────────────────────────────────────────────────────────────────────

/** The worlds by their kinds. */
type Worlds = { timed: World; large: World } & { [K in keyof Parts]: Batch<K> };
type WorldKind = keyof Worlds;
type AnyWorld = Worlds[WorldKind];

/** Everything about the worlds of one kind. */
interface WorldRow<W> {
  make: (seed: number) => W;
  /** Plays a world. @returns what was found. */
  play: (world: W, isLoud: boolean) => Promise<Find[]>;
  /** What is tried instead, beside smaller lists, when a world that fails is reduced. */
  smaller: Partial<W>[];
  /** The part of a round's time. */
  share: number;
  /** How many are played side by side; undefined if `--side` says so. */
  side: number | undefined;
}

const CALMER = [{ phases: [] }, { deafMs: [0] }];

/** The kinds of worlds, in the order of a round. */
const WORLDS: { [K in WorldKind]: WorldRow<Worlds[K]> } = {
  meaning: { make: genMeanings, play: playMeanings, smaller: [], share: 1, side: 1 },
  rules: { make: batches('rules', 60, genCase), play: playCases, smaller: [], share: 1, side: 1 },
  counts: { make: batches('counts', 60, genCounted), play: playCases, smaller: [], share: 1, side: 1 },
  log: { make: batches('log', 2, genFlood), play: playLog, smaller: [], share: 1, side: 1 },
  wire: { make: batches('wire', 80, genWireClient), play: playWires, smaller: [{ tls: false }], share: 2, side: 2 },
  large: { make: genLarge, play: playWorld, smaller: CALMER, share: 1, side: 1 },
  timed: { make: genWorld, play: playWorld, smaller: CALMER, share: 5, side: undefined },
};
const WORLD_KINDS = Object.keys(WORLDS) as WorldKind[];

/** Plays a world of any kind. */
function playAny<K extends WorldKind>(world: Worlds[K], isLoud = false): Promise<Find[]> {
  return WORLDS[world.kind as K].play(world, isLoud);
}

/** A world that failed, and the duration of the run so far. */
type Failure = { world: AnyWorld; find: Find; afterMs?: number };

/** Which worlds are played, for how long, and how many timed ones side by side. */
interface Run {
  seed: number;
  seconds: number;
  side?: number;
  /** Plays only worlds of these kinds. */
  kinds?: WorldKind[] | undefined;
  /** Ends the run at the first find of one of these invariants. */
  stopAt?: readonly number[] | undefined;
}

/** `warnings` are finds that depend on time and did not recur. */
type Result = { worlds: number; failures: Failure[]; warnings: Failure[] };

/** Plays new worlds in rounds for a time, then plays those again, alone, whose finds depend on time. */
export async function simulate({ seed, seconds, side = 8, kinds = WORLD_KINDS, stopAt }: Run): Promise<Result> {
  const result: Result = { worlds: 0, failures: [], warnings: [] };
  const maybe: Failure[] = [];
  const startMs = performance.now();
  const endMs = startMs + seconds * 1000;
  const isStop = ({ find }: Failure): boolean => stopAt?.includes(find.invariant) === true;
  const isOver = (): boolean =>
    performance.now() > endMs || result.failures.some(isStop) || maybe.filter(isStop).length > 3;
  const playOn = async (kind: WorldKind, untilMs: number): Promise<void> => {
    while (!isOver() && performance.now() < untilMs) {
      const world = WORLDS[kind].make(seed + result.worlds++);
      for (const find of await playAny(world)) {
        (find.isTimed ? maybe : result.failures).push({ world, find, afterMs: performance.now() - startMs });
      }
    }
  };
  const before = activeResources();
  const shares = kinds.reduce((sum, kind) => sum + WORLDS[kind].share, 0);
  while (!isOver()) {
    for (const kind of kinds) {
      const { share, side: length = side } = WORLDS[kind];
      const untilMs = performance.now() + Math.min(20, seconds) * 1000 * share / shares;
      await Promise.all(Array.from({ length }, () => playOn(kind, untilMs)));
    }
  }
  const isFlat = await until(() => activeResources().length <= before.length, 60_000);
  if (!isFlat) {
    const what = `what was there before the worlds: ${before}; what is left after them: ${activeResources()}`;
    result.failures.push({ world: genWorld(seed), find: { invariant: 6, what, isTimed: false } });
  }
  // A world in which the loop was late may have failed only because of that, so the others are tried first.
  for (const first of firstOfEach(maybe.sort((a, b) => Number(a.find.isDoubtful) - Number(b.find.isDoubtful)))) {
    const isRed = await failsAgain(first) && await failsAgain(first);
    (isRed ? result.failures : result.warnings).push(first);
  }
  return result;
}

/** The timers, sockets and the like that keep this process alive, if the runtime lists them. */
const activeResources = (): string[] => process.getActiveResourcesInfo?.() ?? [];

/** Whether the same invariant fails in a world that is played alone. */
async function failsAgain({ world, find }: Failure): Promise<boolean> {
  return (await playAny(world)).some(({ invariant, what, isDoubtful }) =>
    invariant === find.invariant && kindOf(what) === kindOf(find.what) && !isDoubtful
  );
}

/** The text of a find without its numbers and marks: two finds of one kind most likely have one cause. */
const kindOf = (what: string): string => what.replace(/: \{[^]*|\(.*\)|\d+|"[^]*?"/g, '').slice(0, 60);

/** The first failure of each kind. */
function firstOfEach(failures: Failure[]): Failure[] {
  const kinds = new Map(failures.toReversed().map((failure) => [kindOf(failure.find.what), failure]));
  return [...kinds.values()].toReversed();
}

/** All worlds that lack a part of this one: half of a list or one of its members, at any depth. */
function* smallerOf(whole: object): Generator<object> {
  if (Array.isArray(whole) && typeof whole[0] === 'object' && !Array.isArray(whole[0])) {
    const half = whole.length >> 1;
    if (half > 1) yield* [whole.slice(half), whole.slice(0, half)];
    if (whole.length > 1) { for (const i of whole.keys()) yield whole.toSpliced(i, 1); }
  }
  for (const [key, part] of Object.entries(whole)) {
    if (typeof part !== 'object' || part === null) continue;
    for (const smaller of smallerOf(part)) {
      yield Array.isArray(whole) ? whole.with(Number(key), smaller) : { ...whole, [key]: smaller };
    }
  }
}

/** Removes from a world what the find does not need. A race may not occur at once, so each try plays several times. */
async function shrink({ world, find }: Failure, tries = 3): Promise<AnyWorld> {
  const stillFails = async (smaller: AnyWorld): Promise<boolean> => {
    for (let i = 0; i < tries; i++) if (await failsAgain({ world: smaller, find })) return true;
    return false;
  };
  const endMs = performance.now() + 60_000;
  for (let i = 0; performance.now() < endMs;) {
    const others = WORLDS[world.kind].smaller.map((other) => ({ ...world, ...other }));
    const smaller = [...smallerOf(world), ...others][i] as AnyWorld | undefined;
    if (!smaller) break;
    if (!isDeepStrictEqual(smaller, world) && await stillFails(smaller)) world = smaller;
    else i++;
  }
  return world;
}

/** What could occur and did not. */
function neverCame(): string[] {
  const all = Object.entries({
    ...{ actor: KINDS, answer: ANSWERS, phase: PHASES, rules: Object.keys(CHANGES) },
    ...{ meaning: ENCODINGS, intrusion: INTRUSIONS, log: ['dropped'] },
  }).flatMap(([what, names]) => names.map((name) => `${what} ${name}`));
  return all.filter((name) => !CAME.has(name));
}

/** Prints the outcome of each request. */
function sayStory({ asked, standIn, lines, lateMs }: Play): void {
  for (const { mark, startedMs, endedMs = 0, response, arrivals, acts, step } of asked.values()) {
    const told = response && `${response.status} ${codeOf(response) ?? ''}${response.isComplete ? '' : ' cut'}`;
    const times = `${Math.round(startedMs)} to ${Math.round(endedMs)}`;
    say(`${mark.padEnd(16)} ${times}: arrived ${arrivals}, acted ${acts}, told ${told} | ${JSON.stringify(step)}`);
  }
  say(`absences ${JSON.stringify(standIn.absences)}, the loop was late by ${Math.round(lateMs)} ms`);
  for (const line of lines) if (line.message !== 'listening') say(JSON.stringify(line));
}

const say = (text: string): void => void process.stdout.write(`${text}\n`);

function sayFailure(word: string, { world, find: { invariant, what }, afterMs }: Failure): void {
  const after = afterMs === undefined ? '' : `, after ${Math.round(afterMs / 1000)} s`;
  say(`${word}: invariant ${invariant}, seed ${world.seed}${after}: ${what}\n    ${INVARIANTS[invariant]}`);
}

// ── PLANTED FAULTS ───────────────────────────────────────────────────────────────────────────────

/**
 * Faults that no test of the suite catches. Each replaces a text that occurs once in gateway.ts; a test names those
 * that do not fit.
 */
export const FAULTS: readonly { name: string; invariant: Invariant; text: string; becomes: string }[] = [
  {
    ...{ name: 'a credential left in ?%40auth=', invariant: 8 },
    text: '    if (CREDENTIAL_PARAMETERS.includes(name)) secrets.push(value);\n    else {',
    becomes: "    if (CREDENTIAL_PARAMETERS.includes(name)) secrets.push(value);\n    if (left !== '@auth') {",
  },
  {
    ...{ name: "a token's queue served last in, first out", invariant: 3 },
    ...{ text: 'queue.shift()!', becomes: 'queue.pop()!' },
  },
  {
    ...{ name: "an upload's count never given back", invariant: 3 },
    text: "    const ownBytes = sumOf(runningLike(exchange), 'uploadBytes');",
    becomes: `    const counts = exchange.core as never as Record<string, number>;
    const ownBytes = counts[exchange.token!.name] = (counts[exchange.token!.name] ?? 0) + chunk.length;`,
  },
];

/** The names of the faults whose text does not occur exactly once in a source. */
export const unfitFaults = (source: string): string[] =>
  FAULTS.filter(({ text }) => source.split(text).length !== 2).map(({ name }) => name);

/** Plays against a copy of gateway.ts with each fault, in separate processes. @returns how many were not found. */
async function playPlanted(seconds: number, seed: number, only: string): Promise<number> {
  const source = readFileSync(FILE, 'utf8');
  const folder = mkdtempSync(join(tmpdir(), 'gateway-fuzz-'));
  let missed = 0;
  for (const { name, invariant, text, becomes } of FAULTS.filter(({ name }) => name.includes(only))) {
    const file = join(folder, 'gateway.mts');
    writeFileSync(file, source.replace(text, () => becomes));
    const startMs = performance.now();
    const args = ['--seconds', seconds, '--seed', seed, '--stop', invariant].map(String);
    const child = spawn(process.execPath, [...process.execArgv, fileURLToPath(import.meta.url), ...args], {
      env: { ...process.env, GATEWAY_FILE: pathToFileURL(file).href },
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    let report = '';
    child.stdout.on('data', (chunk) => report += chunk);
    await once(child, 'close');
    const isFound = report.includes(`RED: invariant ${invariant},`);
    if (!isFound) missed++;
    const took = `${((performance.now() - startMs) / 1000).toFixed(0)} s`;
    say(isFound ? `found: ${name}, ${took}` : `NOT FOUND: ${name}, ${took}\n${report}`);
  }
  rmSync(folder, { recursive: true });
  return missed + unfitFaults(source).length;
}

// ── COMMAND LINE ─────────────────────────────────────────────────────────────────────────────────

/** Plays one world, and prints the outcome of each request. */
async function playLoud(world: AnyWorld): Promise<number> {
  say(JSON.stringify(world));
  const failures = (await playAny(world, true)).map((find): Failure => ({ world, find }));
  for (const failure of failures) sayFailure('RED', failure);
  return failures.length;
}

/** Plays new worlds, and prints what was found. @returns how many kinds of finds are red. */
async function playNew(run: Run): Promise<number> {
  say(`seed ${run.seed}, ${run.seconds} s, ${run.side} worlds side by side`);
  if (!hasSmallBuffers) say('this runtime has no _writeGeneric: torn requests are not looked for');
  const startMs = performance.now();
  const result = await simulate(run);
  const failures = firstOfEach(result.failures);
  for (const warning of result.warnings) sayFailure('WARNING', warning);
  for (const failure of failures) sayFailure('RED', failure);
  const never = run.stopAt || run.kinds ? [] : neverCame();
  if (never.length > 0) say(`never came: ${never.join(', ')}`);
  for (const failure of run.stopAt ? [] : failures) {
    const { find: { what }, world: { seed } } = failure;
    say(`the smallest world for "${what.slice(0, 200)}" of seed ${seed}:\n${JSON.stringify(await shrink(failure))}`);
  }
  const tookS = Math.round((performance.now() - startMs) / 1000);
  say(`${result.worlds} worlds in ${tookS} s, ${failures.length} kinds of finds`);
  return failures.length;
}

function main(): Promise<number> {
  const { values } = parseArgs({
    options: {
      seconds: { type: 'string', default: '60' },
      seed: { type: 'string', default: String(Date.now() % 1e9) },
      side: { type: 'string', default: '8' },
      world: { type: 'string' },
      kind: { type: 'string' },
      stop: { type: 'string' },
      planted: { type: 'boolean' },
      only: { type: 'string', default: '' },
    },
  });
  const [seed, seconds] = [Number(values.seed), Number(values.seconds)];
  if (values.world !== undefined) return playLoud(JSON.parse(readFileSync(values.world, 'utf8')));
  const kinds = values.kind === undefined ? undefined : WORLD_KINDS.filter((kind) => kind === values.kind);
  if (kinds?.length === 0) throw new Error(`${values.kind} is not one of ${WORLD_KINDS}`);
  if (values.planted) return playPlanted(seconds, seed, values.only);
  return playNew({ seed, seconds, side: Number(values.side), kinds, stopAt: values.stop?.split(',').map(Number) });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const count = await main().catch((error) => say(String(error.stack)) ?? 1);
  process.exit(count > 0 ? 1 : 0);
}
