/**
 * A seeded simulation over real sockets, which looks for the next hole:  npm run fuzz -- --seconds 600 --seed N
 *
 *   --seconds S   how long new worlds are made and played (60)
 *   --seed N      the seed of the first world; the next one has N + 1
 *   --side N      how many worlds play side by side (8)
 *   --stop N,N    ends at the first find of one of these invariants, and makes no world smaller
 *   --show        plays one world, that of the seed, and tells what became of each request
 *   --world FILE  the same for the world in a JSON file
 *   --large       plays worlds of large bodies only
 *   --planted     plays against copies of gateway.ts with known faults, and says which faults were found
 *   --only TEXT   with --planted: only the faults whose names contain the text
 *
 * A world is data: one JSON object with the time-outs, the phases of the stand-in backend, the manner of each of its
 * connections, and the actors with every step that they take. `genWorld(seed)` makes a world. Each actor draws from a
 * generator of its own (seed, kind, number), so that leaving one out changes no other. So a world that fails can be
 * made smaller: actors, steps and phases are left out as long as the same invariant fails. A world that found a hole is
 * kept at the end of this file, because a seed means another world as soon as a generator changes.
 *
 * A world is played against one gateway, which runs in this process, and one stand-in backend, which reads bytes
 * strictly and acts as the real one does: as soon as the first JSON value of a body is complete. Each request has a
 * mark in the header X-Mark, by which the stand-in knows what was sent and how it shall answer.
 *
 * `INVARIANTS` below says what must hold. Most of them need no clock: one find is red. Those that depend on time must
 * fail again when the world is played alone, two times of two; otherwise the find is a warning. The worst kinds are
 * rare races, so a world that failed may hold when it is played again.
 *
 * A kernel takes megabytes at once on loopback, so nobody would ever wait in the middle of a head. Where
 * `net.Socket.prototype._writeGeneric` exists, the simulation lets through only `windowBytes` more than the stand-in
 * has read. Bun has no such function: there torn requests are not looked for, and the run says so.
 *
 * GATEWAY_FILE names another file than gateway.ts.
 */

import { spawn, type StdioOptions } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, mkdirSync, mkdtempSync, openSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import https from 'node:https';
import net, { type AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { TLSSocket } from 'node:tls';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import type { Gateway, GatewayConfig } from './gateway.ts';

const FILE = new URL(process.env.GATEWAY_FILE ?? 'gateway.ts', import.meta.url);
const { createGateway } = await import(FILE.href) as typeof import('./gateway.ts');

/** What must hold in every world. A find names one of these by its number. */
export const INVARIANTS = {
  1: 'The bytes of a request travel on one connection, are a prefix of what was sent, and are acted on once at most; ' +
    'a backend whose certificate is refused gets none.',
  2: 'What is told is true: 201 was acted on, and a refusal or "nothing was sent" was not.',
  3: 'No request goes beyond the rules that its token had when the request came, nor a token beyond its uploads and ' +
    'connections; what these rules allow is not refused.',
  4: 'Each request gets one response at most, in order and its own; who stays and was acted on, or is honest, gets one.',
  5: 'An honest client is served in time; backend_unreachable needs an outage of backend.wait in the request.',
  6: 'At the end as many sends as there are slots run at once, nothing is left over, and close() is quick.',
  7: 'No uncaught error, no internal error; one log line for each request, with the status that the client got.',
  8: 'No secret from one of the five places reaches the backend or the log.',
  9: 'Processor time grows with the length of a body, and not with its square.',
  10: 'A process stays alive whatever happens to its files and streams, and ends with 0 on SIGTERM.',
} as const;
type Invariant = keyof typeof INVARIANTS;

/** These depend on time: a find counts only if it comes again alone, two times of two. */
const TIMED: readonly number[] = [5, 6, 9];

/** A violation of an invariant. */
interface Find {
  invariant: Invariant;
  what: string;
}

// ── CHANCE ───────────────────────────────────────────────────────────────────────────────────────

/** Spreads each bit of a number over all bits (the last steps of MurmurHash3). */
function finish(x: number): number {
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}

/** Draws numbers that depend only on the names given to `generator`. */
interface Draw {
  below(limit: number): number;
  between(least: number, most: number): number;
  chance(probability: number): boolean;
  pick<T>(list: readonly T[]): T;
}

function generator(...names: (string | number)[]): Draw {
  let state = 0;
  for (const char of names.join('/')) state = finish(state + char.charCodeAt(0) + 0x9e3779b9);
  const next = (): number => {
    state = (state + 0x9e3779b9) >>> 0;
    return finish(state) / 2 ** 32;
  };
  const below = (limit: number): number => Math.floor(next() * limit);
  return {
    below,
    between: (least, most) => least + below(most - least + 1),
    chance: (probability) => next() < probability,
    pick: (list) => list[below(list.length)]!,
  };
}

// ── WORLDS ───────────────────────────────────────────────────────────────────────────────────────

/** How the stand-in answers: the kind, and the milliseconds that it takes. */
const ANSWERS = [
  'prompt', // 201 as soon as it has acted
  'late', // the same, later
  'pieces', // the same, in three pieces
  'chunked', // without Content-Length
  'hints', // 103 and 100 before it
  'closing', // with "Connection: close"
  'early', // 400 before the body is read
  'cut', // a body that breaks off
  'short', // more bytes than Content-Length says
  'twoLengths', // Content-Length and chunked
  'redirect', // 307
  'garbage', // no HTTP
  'resetBefore', // a reset instead of reading the body
  'resetAfter', // a reset after it has acted
  'goneAfter', // the end of the connection after it has acted
  'never', // no answer
] as const;
type Answer = (typeof ANSWERS)[number];
/** Answers after which a client that stays need not get a response of its own. */
const BROKEN: readonly Answer[] = ['cut', 'short'];

const PHASES = ['gone', 'hung', 'reset', 'flapping', 'hungThenGone', 'distrusted'] as const;
/**
 * A time in which the stand-in is away (gone, reset, flapping), reads and answers nothing (hung), or has a certificate
 * that the gateway does not trust (distrusted, only with TLS).
 */
interface Phase {
  kind: (typeof PHASES)[number];
  atMs: number;
  forMs: number;
}

const FORMS = ['bearer', 'basic', 'query', 'path', 'body'] as const;

/** What a body is. All of those from `twice` on try to get past the lists of a token. */
const SHAPES = ['plain', 'twice', 'folded', 'escaped', 'late', 'doubled', 'spliced', 'splicedLate'] as const;
const PAYLOADS = ['json', 'form', 'multipart', 'text'] as const;

/** One request of an actor. */
interface Step {
  route: keyof typeof ROUTES;
  form: (typeof FORMS)[number];
  /** The credential is nobody's. */
  wrong?: boolean;
  shape: (typeof SHAPES)[number] | (typeof PAYLOADS)[number];
  bodyBytes: number;
  chunked?: boolean;
  /** HTTP/1.0 with keep-alive, "Expect: 100-continue", or a POST without a length. */
  head?: 'old' | 'expecting' | 'unmeasured';
  /** Where the client pauses while it writes the request: after which byte, and for how long. */
  pauses?: [atByte: number, ms: number][];
  /** The client writes no further than this byte. */
  stopAt?: number;
  /** The client leaves so long after its last byte, in this way. */
  leave?: [ms: number, how: 'close' | 'half' | 'reset'];
  /** The request is written together with the one before it, on the same connection. */
  joined?: boolean;
  /** The next request goes on the same connection, so much later. A WebSocket stays open for so long. */
  keptMs?: number;
  /** Bytes behind the request that are no request. */
  rubbish?: number;
  /** The client does not read for so long. */
  deafMs?: number;
  answer: [kind: Answer, ms: number];
  /** A reload changes the rules of this token in this way. */
  change?: [token: TokenName, change: keyof typeof CHANGES];
}

const KINDS = [
  'honest',
  'kept',
  'patient',
  'crowd',
  'sender',
  'confined',
  'evil',
  'webhook',
  'hanger',
  'dripping',
  'rubbish',
  'pipelining',
  'lateHeaders',
  'old',
  'expecting',
  'unmeasured',
  'slow',
  'halfClosed',
  'leaver',
  'downloader',
  'stranger',
  'idler',
  'socket',
  'guest',
  'reloader',
  'clock',
  'hoarder', // only in worlds of large bodies
] as const;
type Kind = (typeof KINDS)[number];
/** Their requests must be served: they do nothing that a real client would not do. */
const HONEST: readonly Kind[] = ['honest', 'kept', 'patient', 'crowd'];

/** A client, or somebody who changes the gateway (`reloader`, `clock`). */
interface Actor {
  kind: Kind;
  number: number;
  atMs: number;
  token: TokenName;
  /** The steps run at the same time, each on a connection of its own. */
  together?: boolean;
  steps: Step[];
}

export interface World {
  seed: number;
  headersMs: number;
  stallMs: number;
  slotMs: number;
  connectMs: number;
  lingerMs: number;
  timeoutMs: number;
  waitMs: number;
  parallel: number;
  /** How many bytes the gateway may be ahead of the stand-in; 0 for no limit. */
  windowBytes: number;
  phases: Phase[];
  /** The manner of the stand-in's connections, in turn: how long each does not read at first. */
  connections: { deafMs: number }[];
  actors: Actor[];
  /** The stand-in should speak TLS. It does, or refuses each handshake, or says nothing. */
  tls?: 'speaks' | 'refuses' | 'silent' | undefined;
  /** `limits.connections`. */
  mostConnections?: number | undefined;
  /** `limits.body`, in MiB. */
  bodyMiB?: number;
}

const FROM = '+15550100001';
const TO = '+15550100002';
const ELSE = '+15550100666';
const GROUP = `group.${btoa(btoa('a group of thirty-two characters'))}`;
const LISTS = { senders: [FROM], recipients: [TO] };
/** The tokens of every world. `lists` of the configuration are those that invariant 3 asks for. */
const TOKENS = {
  free: {},
  other: {},
  hanger: {},
  guest: {},
  confined: LISTS,
  hook: { ...LISTS, defaults: { number: FROM, recipients: [TO] }, message: '{{text}}{{message}}' },
};
type TokenName = keyof typeof TOKENS;
/** How a reload may change a token, and which requests the token cannot make then. */
const CHANGES: Record<string, { settings?: object; refuses: (asked: Asked) => boolean }> = {
  usual: { settings: {}, refuses: () => false },
  removed: { refuses: () => true },
  expired: { settings: { expires: '2020-01-01' }, refuses: () => true },
  onlyBearer: { settings: { methods: ['bearer'] }, refuses: ({ form }) => form !== 'bearer' },
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
/** All secrets begin with a word that nothing else holds, and that no place but the five may have. */
const WORD = 'UNSPOKEN';
const secretOf = (token: string): string => `${WORD}-${token}-0123456789abcdef`;
/** The word as it is, and as Basic writes it behind `api:`. */
const SECRET_PATTERN = new RegExp(`${WORD}|${btoa(`api:${WORD}`)}`);

/** Makes a world from a seed. */
export function genWorld(seed: number): World {
  const draw = generator(seed, 'world');
  const timeoutMs = draw.between(1200, 2400);
  const world: World = {
    seed,
    headersMs: draw.between(250, 450),
    stallMs: draw.between(700, 1000),
    slotMs: draw.between(150, 350),
    connectMs: draw.between(150, 400),
    lingerMs: draw.between(100, 300),
    timeoutMs,
    waitMs: Math.min(timeoutMs, draw.pick([300, 300, 600, 900, 1200])),
    parallel: draw.pick([0, 1, 1, 2, 3, 4]),
    windowBytes: draw.pick([0, 4096, 4096, 40_960]),
    phases: draw.chance(0.6) ? [genPhase(draw)] : [],
    connections: genConnections(draw),
    actors: [],
    ...(draw.chance(0.06) && { tls: draw.pick(['refuses', 'silent'] as const), phases: [] }),
    ...(draw.chance(0.25) && { mostConnections: draw.between(6, 12) }),
  };
  if (!world.tls && draw.chance(0.12)) {
    world.tls = 'speaks';
    world.phases.unshift({ ...genPhase(draw), kind: 'distrusted' });
  }
  const count = draw.between(4, 10);
  const numbers = new Map<Kind, number>();
  for (let i = 0; i < count; i++) {
    const kind = i === 0 && draw.chance(0.4)
      ? 'hanger'
      : draw.chance(0.3)
      ? draw.pick(['honest', 'honest', 'crowd'] as const)
      : draw.pick(KINDS.slice(0, -1));
    const number = numbers.get(kind) ?? 0;
    numbers.set(kind, number + 1);
    // Exactly one token may hang, and one actor of each of these is enough.
    if (number > 0 && ['hanger', 'reloader', 'clock'].includes(kind)) continue;
    world.actors.push(genActor(world, kind, number));
  }
  const more: Kind[] = [...(draw.chance(0.3) ? ['guest', 'reloader'] as const : [])];
  if (world.mostConnections !== undefined) more.push('idler', 'socket');
  for (const kind of more) if (!numbers.has(kind)) world.actors.push(genActor(world, kind, 0));
  return world;
}

/** Makes a world of bodies of about a megabyte, which stop the loop for others. It has no clock and no absence. */
export function genLarge(seed: number): World {
  const draw = generator(seed, 'large');
  const { tls: _tls, mostConnections: _most, ...small } = genWorld(seed);
  const world: World = { ...small, phases: [], connections: [{ deafMs: 0 }], bodyMiB: 1 };
  const kinds = ['sender', 'confined', 'evil', 'slow', 'hoarder'] as const;
  world.actors = kinds.map((kind) => genActor(world, kind, 0));
  for (const step of world.actors.flatMap(({ steps }) => steps)) step.bodyBytes = draw.between(900_000, 1_100_000);
  return world;
}

function genPhase(draw: Draw): Phase {
  return {
    kind: draw.chance(0.25) ? 'gone' : draw.pick(PHASES.slice(0, -1)),
    atMs: draw.between(0, 900),
    forMs: draw.pick([60, 200, 500, 900, 1500, 2000]),
  };
}

function genConnections(draw: Draw): { deafMs: number }[] {
  if (draw.chance(0.5)) return [{ deafMs: 0 }];
  return Array.from({ length: 7 }, () => ({ deafMs: draw.chance(0.6) ? 0 : draw.pick([20, 200, 600, 1000, 3000]) }));
}

function genActor(world: World, kind: Kind, number: number): Actor {
  const draw = generator(world.seed, kind, number);
  const tokens = {
    confined: 'confined',
    evil: 'confined',
    webhook: 'hook',
    hanger: 'hanger',
    hoarder: 'hanger',
    guest: 'guest',
  } as const;
  const token = tokens[kind as keyof typeof tokens] ?? draw.pick(['free', 'other'] as const);
  const counts: Partial<Record<Kind, [number, number]>> = {
    ...{
      hanger: [2, 5],
      crowd: [4, 6],
      pipelining: [2, 6],
      old: [2, 4],
      reloader: [4, 8],
      guest: [3, 8],
      idler: [4, 14],
      clock: [5, 5],
      hoarder: [6, 6],
    },
  };
  const length = draw.between(...counts[kind] ?? [1, 3]);
  const steps = Array.from({ length }, () => genStep(world, draw, kind));
  // A crowd comes when an absence has begun.
  const beginMs = (kind === 'crowd' && world.phases[0]?.atMs) || 0;
  const atMs = beginMs + draw.between(0, { hanger: 300, crowd: 150 }[kind as 'crowd'] ?? 1200);
  return { kind, number, atMs, token, ...(/hanger|hoarder|crowd|idler/.test(kind) && { together: true }), steps };
}

function genStep(world: World, draw: Draw, kind: Kind): Step {
  const isHonest = HONEST.includes(kind);
  const isLarge = draw.chance(0.35);
  const step: Step = {
    route: 'send',
    form: draw.pick(FORMS),
    shape: 'plain',
    bodyBytes: isLarge ? draw.pick([66_000, 90_000, 200_000]) : draw.pick([0, 300, 5000, 60_000]),
    answer: isHonest ? ['prompt', 0] : [draw.pick(ANSWERS.slice(0, -1)), draw.pick([0, 5, 40, 150])],
  };
  if (draw.chance(0.4)) step.chunked = true;
  const wireBytes = step.bodyBytes + 250;
  const names = Object.keys(CHANGES);
  const ways: Partial<Record<Kind, () => object>> = {
    honest: () => ({ route: draw.pick(['send', 'send', 'send', 'about'] as const) }),
    kept: () => ({ keptMs: draw.between(0, 150) }),
    patient: () => ({ answer: ['late', draw.between(50, 300)], pauses: [[draw.between(100, wireBytes), 60]] }),
    sender: () => draw.chance(0.5) ? { keptMs: draw.between(0, 60) } : {},
    confined: () => ({ keptMs: draw.between(0, 60) }),
    evil: () => genEvil(draw),
    webhook: () => ({ shape: draw.pick(PAYLOADS), bodyBytes: draw.pick([0, 3000, 70_000]) }),
    hanger: () => ({ answer: ['never', 0], bodyBytes: draw.pick([0, 300, 70_000]) }),
    dripping: () => ({ pauses: Array.from({ length: 12 }, (_, i) => [20 + i * 21, draw.between(5, 80)]) }),
    rubbish: () => ({ rubbish: draw.below(RUBBISH.length), route: draw.pick(['send', 'unknown', 'about'] as const) }),
    pipelining: () => ({ joined: true, rubbish: draw.chance(0.3) ? draw.below(RUBBISH.length) : undefined }),
    lateHeaders: () => ({
      pauses: [[draw.between(5, 90), world.headersMs + draw.between(20, 60) + world.lingerMs / 4]],
    }),
    old: () => ({
      ...{ head: 'old', joined: true, chunked: false, route: draw.pick(['send', 'about'] as const) },
      answer: [draw.pick(['chunked', 'chunked', 'prompt', 'late'] as const), draw.pick([0, 40])],
    }),
    expecting: () => ({ head: 'expecting', keptMs: draw.between(0, 60) }),
    unmeasured: () => ({
      ...{ head: 'unmeasured', route: 'join', bodyBytes: 0, answer: [draw.pick(['prompt', 'late'] as const), 40] },
      rubbish: draw.chance(0.8) ? draw.below(RUBBISH.length) : undefined,
    }),
    hoarder: () => ({ stopAt: 850_000 }),
    slow: () => ({ pauses: [[wireBytes >> 1, draw.pick([100, world.stallMs + 200])]], deafMs: draw.between(0, 300) }),
    halfClosed: () => ({ leave: [draw.between(0, 20), 'half'] }),
    leaver: () => ({
      stopAt: draw.chance(0.4) ? draw.between(10, wireBytes) : undefined,
      leave: [draw.between(0, 250), draw.pick(['close', 'reset'] as const)],
    }),
    downloader: () => ({
      route: 'download',
      bodyBytes: draw.pick([1000, 400_000]),
      deafMs: draw.pick([0, 0, 200, 1500]),
    }),
    idler: () => ({ wrong: true, stopAt: draw.pick([0, 30, 260]), leave: [draw.between(100, 1500), 'close'] }),
    guest: () => ({
      ...{ route: draw.pick(['send', 'send', 'about', 'socket'] as const), keptMs: draw.pick([0, 50, 150, 900]) },
      answer: [draw.pick(['prompt', 'late'] as const), draw.pick([5, 150])],
      ...(draw.chance(0.4) && { pauses: [[draw.pick([40, 400, 5000]), draw.between(20, 200)]] }),
    }),
    reloader: () => ({
      keptMs: draw.pick([100, 100, 500]),
      ...(draw.chance(0.7) && { change: [draw.pick(['guest', 'guest', 'hanger'] as const), draw.pick(names)] }),
    }),
    stranger: () => ({ wrong: draw.chance(0.6), route: draw.pick(['send', 'unknown', 'health'] as const), keptMs: 10 }),
    socket: () => ({
      route: 'socket',
      form: draw.pick(['bearer', 'basic', 'query', 'path'] as const),
      wrong: draw.chance(0.4),
      keptMs: draw.pick([50, 50, 800]),
      ...(draw.chance(0.5) && { leave: [draw.below(4), 'reset'] }),
    }),
  };
  return Object.assign(step, ways[kind]?.());
}

/** A send that tries to get past the lists of its token, or to be acted on twice. */
function genEvil(draw: Draw): Partial<Step> {
  const bodyBytes = draw.pick([300, 66_000, 140_000, 200_000]);
  const evil: Partial<Step> = { shape: draw.pick(SHAPES), bodyBytes };
  if (/spliced/.test(evil.shape!)) Object.assign(evil, { chunked: true, bodyBytes: draw.pick([140_000, 200_000]) });
  if (draw.chance(0.3)) evil.pauses = [[draw.between(100, bodyBytes), draw.between(5, 400)]];
  if (draw.chance(0.2)) evil.stopAt = draw.between(100, bodyBytes);
  if (draw.chance(0.2)) evil.leave = [draw.between(0, 200), draw.pick(['close', 'half', 'reset'] as const)];
  if (draw.chance(0.2)) evil.rubbish = draw.below(RUBBISH.length);
  return evil;
}

const HIDDEN = `{"number":"${ELSE}","recipients":["${ELSE}"],"message":"hidden"}`;
/** Bytes that are no request, and one that nobody has let in. */
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

// ── THE SIMULATION ───────────────────────────────────────────────────────────────────────────────

/** One request, and what became of it. */
interface Asked {
  mark: string;
  actor: Actor | undefined;
  token: TokenName;
  step: Step;
  /** Where the credential is. */
  form: Step['form'];
  /** The bytes on the wire, without rubbish. */
  bytes: Buffer;
  /** The body that the backend must get; undefined if the gateway makes the body. */
  expected: Buffer | undefined;
  startedMs: number;
  startedLoopMs: number;
  /** The client has neither left nor stopped, and reads. */
  stays: boolean;
  /** How many connections there were at most beside that of the request. */
  rivals: number;
  response?: Response;
  /** When the response was complete, or the connection was closed. */
  endedMs?: number;
  endedLoopMs?: number;
  /** How often the stand-in saw the head, acted, and what it answered. */
  arrivals: number;
  acts: number;
  answeredBody?: string;
}

interface Response {
  status: number;
  headers: Map<string, string>;
  body: Buffer;
  isComplete: boolean;
}

/** Notes when a request was over. */
function end(asked: Asked): void {
  asked.endedMs ??= performance.now();
  asked.endedLoopMs ??= loopMs;
}

/** A line of the gateway's log. */
type Line = Record<string, unknown>;
const isOfGate = ({ waiting }: Line): boolean => typeof waiting === 'number';
const shuts = ({ message }: Line): boolean => !/again/.test(String(message));

/** What was drawn and came about, over all worlds: the end of a run says what never came. */
const CAME = new Map<string, number>();
const came = (name: string): void => void CAME.set(name, (CAME.get(name) ?? 0) + 1);

/** All that belongs to one world while it is played. */
class Play {
  readonly world: World;
  readonly finds: Find[] = [];
  readonly asked = new Map<string, Asked>();
  readonly lines: Line[] = [];
  readonly standIn: StandIn;
  gateway!: Gateway;
  port = 0;
  /** The longest time that the event loop was late. A world in which it was late says nothing about time. */
  lateMs = 0;
  /** How far the gateway's clock is off. */
  clockMs = 0;
  readonly wires = new Set<Wire>();
  /** How many connections clients have opened. */
  opened = 0;
  /** How many connections the gateway has: it may not have seen that a client has left whose body waits unread. */
  held = 0;
  /** How the tokens were changed, and since when by both clocks. */
  readonly versions: { ms: number; loopMs: number; changes: Changes }[] = [{ ms: 0, loopMs: 0, changes: {} }];

  constructor(world: World) {
    this.world = world;
    this.standIn = new StandIn(this);
  }

  find(invariant: Invariant, what: string): void {
    if (!this.finds.some((find) => find.what === what)) this.finds.push({ invariant, what });
  }

  config(parallel = this.world.parallel): GatewayConfig {
    const { timeoutMs, waitMs, tls, bodyMiB, mostConnections } = this.world;
    return {
      listen: '127.0.0.1:0',
      backend: {
        url: `${tls ? 'https' : 'http'}://${this.standIn.host}:${this.standIn.port}`,
        timeout: `${timeoutMs}ms`,
        wait: `${waitMs}ms`,
        parallel,
      },
      tokens: tokensWith(this.versions.at(-1)!.changes),
      allow: ['messaging', 'info'],
      auth: { methods: [...FORMS] },
      limits: { ...(bodyMiB && { body: `${bodyMiB}MiB` }), ...(mostConnections && { connections: mostConnections }) },
      shutdown: '2s',
      log: { level: 'debug', format: 'json' },
    };
  }

  /** Whether the request is refused by each of the rules that its token had between two times. */
  verdicts(asked: Asked, clock: 'ms' | 'loopMs', from: number, to: number): boolean[] {
    const { versions } = this;
    const inForce = versions.filter((version, i) => version[clock] <= to && !(versions[i + 1]?.[clock]! < from));
    return inForce.map(({ changes }) => asked.step.wrong || CHANGES[changes[asked.token] ?? 'usual']!.refuses(asked));
  }

  async open(): Promise<void> {
    await this.standIn.listen();
    const { headersMs, stallMs, slotMs, connectMs, lingerMs } = this.world;
    this.gateway = createGateway(this.config(), {
      now: () => Date.now() + this.clockMs,
      log: (line) => this.#readLine(line),
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

  #readLine(text: string): void {
    if (SECRET_PATTERN.test(text)) this.find(8, `the log holds a secret: ${text.slice(0, 200)}`);
    try {
      const line: Line = JSON.parse(text);
      this.lines.push(line);
      if (isOfGate(line)) this.standIn.onGate(shuts(line));
    } catch {
      this.find(7, `a log line is no JSON: ${text.slice(0, 100)}`);
    }
  }
}

/** All worlds that are being played, for errors that belong to no world, and for the watch on the event loop. */
const PLAYS = new Set<Play>();

/** Writes down an error that nobody caught. Which world it belongs to is not known. */
function onUncaught(error: unknown): void {
  const stack = error instanceof Error ? error.stack : String(error);
  for (const play of PLAYS) play.find(7, `an uncaught error: ${stack}`);
}

let watcher: NodeJS.Timeout | undefined;

/**
 * A clock that counts turns of the event loop: a turn of 10 ms counts 20 ms at most. It says how long somebody has
 * waited of the time in which the gateway could do something, so that a busy machine makes nothing red.
 */
let loopMs = 0;

/** Begins or ends the watch on the event loop and on uncaught errors. */
function watch(): void {
  const isOn = watcher !== undefined;
  if (isOn === PLAYS.size > 0) return;
  clearInterval(watcher);
  watcher = undefined;
  for (const event of ['uncaughtException', 'unhandledRejection']) {
    if (isOn) process.off(event, onUncaught);
    else process.on(event, onUncaught);
  }
  changeRuntime(!isOn);
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
  PLAYS.add(play);
  watch();
  try {
    await play.open();
    play.standIn.begin();
    const actors = world.actors.map((actor) => runActor(play, actor));
    const limitMs = 6 * world.timeoutMs + 4 * world.waitMs + 8000;
    if (await isLate(Promise.all(actors), limitMs)) play.find(4, 'an actor never came to its end');
    await play.standIn.calm();
    if (!play.standIn.isDead) await checkSlots(play);
    await checkEnd(play);
    checkRequests(play);
    checkLog(play);
    if (isLoud) sayStory(play);
  } finally {
    PLAYS.delete(play);
    watch();
    for (const wire of play.wires) wire.socket.destroy();
    await play.standIn.close();
  }
  return play.finds.filter(({ invariant }) => !TIMED.includes(invariant) || play.lateMs < 150);
}

/** Whether a promise takes longer than this. */
async function isLate(promise: Promise<unknown>, limitMs: number): Promise<boolean> {
  const timer = new AbortController();
  const late = sleep(limitMs, true, { signal: timer.signal }).catch(() => false);
  const first = await Promise.race([promise.then(() => false), late]);
  timer.abort();
  return first;
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

/** A connection of the stand-in. */
interface Peer {
  socket: net.Socket;
  reset: () => void;
  /** How many bytes were read. */
  readBytes: number;
  isDeaf: boolean;
  isBusy: boolean;
}

/** A time in which the stand-in was not there for everybody, or was slow for one. */
interface Absence {
  kind: 'away' | 'hung' | 'slow';
  fromMs: number;
  untilMs: number;
}

/** Two certificates with their keys, those of gateway.test.ts. The gateway trusts the first one. */
const PEMS = readFileSync(new URL('gateway.test.ts', import.meta.url), 'utf8').match(/-----BEGIN [^'.]+(?=')/g)!
  .map((pem) => pem.replaceAll('\\n', '\n'));
const CERTS = [{ cert: PEMS[0]!, key: PEMS[1]! }, { cert: PEMS[2]!, key: PEMS[3]! }] as const;

/** The fatal alert "handshake_failure" (RFC 8446 6). */
const TLS_ALERT = Buffer.from('15030300020228', 'hex');

/** A raw server that acts as the backend does, and checks every byte that it gets. */
class StandIn {
  readonly play: Play;
  readonly server = net.createServer({ pauseOnConnect: true, noDelay: true });
  readonly peers = new Map<number, Peer>();
  port = 0;
  /** Not reading, not answering. */
  isHung = false;
  isResetting = false;
  readonly absences: Absence[] = [];
  /** Answers that are held back until `release` is called. */
  held: (() => void)[] = [];
  /** Requests whose last byte has not come. */
  readonly unfinished = new Set<Arrival>();
  /**
   * On Linux every address in 127.0.0.0/8 is this machine, and each stand-in has one of its own: while it is away, the
   * stand-in of another world could get its port, and its requests.
   */
  readonly host = process.platform === 'linux' ? `127.1.${(standIns >> 8) & 255}.${standIns++ & 255}` : '127.0.0.1';
  /** Writes of the gateway that wait until the stand-in has read more, by the port of the gateway's end. */
  readonly writers = new Map<number, () => void>();
  /** How many connections were made. */
  tries = 0;
  /** Whether each handshake fails, so that it is as good as away. */
  readonly isDead: boolean;
  isDistrusted = false;
  /** Since when the gate is shut; the connections since then; whether one of them had TLS and a good certificate. */
  #shut: { atMs: number; atLoopMs: number; tries: number; isGood: boolean } | undefined;
  #isOver = false;
  #phases: Promise<unknown> = Promise.resolve();

  constructor(play: Play) {
    this.play = play;
    this.isDead = /refuses|silent/.test(play.world.tls ?? '');
    this.server.on('connection', (socket) => this.#accept(socket));
  }

  /** Listens, after an absence on the same port: another program may have it for a moment, as a client does. */
  async listen(): Promise<void> {
    const listens = async (): Promise<boolean> => {
      this.server.listen(this.port, this.host, 511);
      return await once(this.server, 'listening').then(() => true, () => false);
    };
    if (!await until(listens, 10_000)) throw new Error(`port ${this.port} of a stand-in is taken`);
    this.port = (this.server.address() as AddressInfo).port;
    STAND_INS.set(`${this.host}:${this.port}`, this);
  }

  /** Begins the phases. */
  begin(): void {
    if (this.isDead) this.absences.push({ kind: 'away', fromMs: 0, untilMs: Infinity });
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
    if (kind === 'hung' || kind === 'hungThenGone') await this.#during('hung', () => this.#hang(forMs));
    if (kind === 'reset') this.#resetAll();
    if (kind === 'reset') await this.#during('away', () => this.#set('isResetting', forMs));
    if (kind === 'gone' || kind === 'hungThenGone') {
      await this.#during('away', () => this.#leave(kind === 'gone' ? forMs : 100));
    }
    if (kind === 'flapping') await this.#during('away', () => this.#flap(forMs));
    if (kind === 'distrusted') await this.#during('away', () => this.#set('isDistrusted', forMs));
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

  async #set(key: 'isResetting' | 'isDistrusted', forMs: number): Promise<void> {
    this[key] = true;
    await sleep(forMs);
    this[key] = false;
  }

  #resetAll(): void {
    for (const peer of this.peers.values()) peer.reset();
  }

  /** Closes the port and all connections for a time. */
  async #leave(forMs: number): Promise<void> {
    this.server.close();
    this.#resetAll();
    await sleep(forMs);
    await this.listen();
  }

  async #flap(forMs: number): Promise<void> {
    for (let leftMs = forMs; leftMs > 0; leftMs -= 120) {
      await this.#leave(60);
      await sleep(60);
    }
  }

  /** Notes that the gate is shut, or open again. */
  onGate(isShut: boolean): void {
    const { play } = this;
    if (!isShut && this.#shut?.isGood === false) play.find(7, 'the gate opens, and no connection with TLS was made');
    const isGood = play.world.tls === undefined;
    this.#shut = isShut ? { atMs: performance.now(), atLoopMs: loopMs, tries: 0, isGood } : undefined;
  }

  /** Notes a connection. While the gate is shut only the probe tries, with pauses; earlier tries arrive for a while. */
  #onTry(isGood: boolean): void {
    if (!this.#shut || !this.play.world.tls) return;
    this.#shut.isGood ||= isGood;
    if (loopMs - this.#shut.atLoopMs < 200) return;
    const most = 5 + (performance.now() - this.#shut.atMs) / 1000;
    if (++this.#shut.tries > most) this.play.find(7, 'more than a probe tries to connect while the gate is shut');
  }

  #accept(raw: net.Socket): void {
    raw.on('error', () => {});
    // Node leaves a socket open for ever that is reset while its end is on its way.
    const reset = (): void => void (raw.writableEnded ? raw.destroy() : raw.resetAndDestroy());
    if (this.isResetting) return reset();
    const { connections, tls } = this.play.world;
    const { deafMs } = connections[this.tries++ % connections.length]!;
    const isGood = !this.isDistrusted || tls !== 'speaks';
    this.#onTry(tls === 'speaks' && isGood);
    const key = raw.remotePort!;
    const socket = tls === 'speaks' ? new TLSSocket(raw, { isServer: true, ...CERTS[isGood ? 0 : 1]! }) : raw;
    socket.on('error', () => {});
    const peer: Peer = { socket, reset, readBytes: 0, isDeaf: deafMs > 0, isBusy: false };
    this.peers.set(key, peer);
    socket.once('close', () => {
      this.peers.delete(key);
      wakeWriters(this, key);
    });
    const reader = new BackendReader(this, peer);
    socket.on('close', () => reader.end());
    socket.on('data', (chunk: Buffer) => {
      peer.readBytes += chunk.length;
      if (!isGood) this.play.find(1, 'bytes reach a backend whose certificate is refused');
      if (tls === 'refuses') socket.end(TLS_ALERT);
      if (!this.isDead) reader.read(chunk);
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

  /** Notes that somebody waits for the stand-in from now on. */
  slow(ms: number): void {
    const fromMs = performance.now();
    if (ms > 0) this.absences.push({ kind: 'slow', fromMs, untilMs: fromMs + ms });
  }

  /** Resolves when the stand-in is not hung. */
  async awake(): Promise<void> {
    while (this.isHung) await sleep(5);
  }

  release(): void {
    for (const answer of this.held.splice(0)) answer();
  }

  /**
   * How long the stand-in was away, hung or slow between two times. The gateway finds out only with its next try that
   * the stand-in is back; between two tries it pauses as long as the absence lasted, and a second at most. For the
   * gateway, an absence goes on in the next one that begins within that second.
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

/** A request as the stand-in reads it. */
interface Arrival {
  asked: Asked | undefined;
  method: string;
  path: string;
  requestId: string | undefined;
  body: Buffer;
  /** How many bytes of the body are still to come; Infinity if it is chunked. */
  leftBytes: number;
  isChunked: boolean;
  isAnswered: boolean;
  hasActed: boolean;
  json: JsonEnd;
}

/** Reads the requests of one connection, byte by byte, and refuses what is no HTTP. */
class BackendReader {
  readonly #standIn: StandIn;
  readonly #peer: Peer;
  #rest: Buffer = Buffer.alloc(0);
  #tail = '';
  #arrival: Arrival | undefined;
  #isDead = false;
  /** The next bytes are those of a WebSocket. */
  #isTunnel = false;

  constructor(standIn: StandIn, peer: Peer) {
    this.#standIn = standIn;
    this.#peer = peer;
  }

  read(chunk: Buffer): void {
    const text = this.#tail + chunk.toString('latin1');
    if (SECRET_PATTERN.test(text)) this.#find(8, 'the backend got a secret');
    this.#tail = text.slice(-20);
    this.#rest = this.#rest.length > 0 ? Buffer.concat([this.#rest, chunk]) : chunk;
    while (this.#rest.length > 0 && !this.#isDead && !this.#isTunnel) {
      if (!(this.#arrival ? this.#readBody(this.#arrival) : this.#readHead())) return;
    }
  }

  /** No more bytes come. */
  end(): void {
    if (this.#arrival) this.#standIn.unfinished.delete(this.#arrival);
  }

  #find(invariant: Invariant, what: string): void {
    this.#standIn.play.find(invariant, `${what} (${this.#arrival?.asked?.mark ?? 'no mark'})`);
  }

  #fail(what: string): false {
    this.#find(1, `${what}: ${JSON.stringify(this.#rest.toString('latin1', 0, 60))}`);
    this.#isDead = true;
    this.#peer.reset();
    return false;
  }

  /** @returns whether a head was complete. */
  #readHead(): boolean {
    const end = this.#rest.indexOf('\r\n\r\n');
    if (end < 0) return this.#rest.length > 65_536 ? this.#fail('a head has no end') : false;
    const [first = '', ...lines] = this.#rest.toString('latin1', 0, end).split('\r\n');
    const [, method, path] = /^([A-Z]+) (\/[\x21-\x7e]*) HTTP\/1\.1$/.exec(first) ?? [];
    if (method === undefined || path === undefined) return this.#fail('these bytes are no request');
    const headers = new Map<string, string>();
    for (const line of lines) {
      const [, name, value] = /^([!#$%&'*+.^_`|~\w-]+): ?([^\r\n\0]*)$/.exec(line) ?? [];
      if (name === undefined) return this.#fail('this line is no header');
      headers.set(name.toLowerCase(), value!);
    }
    this.#rest = this.#rest.subarray(end + 4);
    this.#begin(method, path, headers);
    return true;
  }

  #begin(method: string, path: string, headers: Map<string, string>): void {
    const mark = headers.get('x-mark') ?? '';
    const asked = this.#standIn.play.asked.get(mark);
    const length = headers.get('content-length');
    const coding = headers.get('transfer-encoding');
    const isChunked = coding === 'chunked';
    const leftBytes = isChunked ? Infinity : Number(length ?? 0);
    this.#arrival = {
      ...{ asked, method, path, requestId: headers.get('x-request-id'), isChunked, leftBytes },
      ...{ isAnswered: false, hasActed: false },
      ...{ body: Buffer.alloc(0), json: new JsonEnd() },
    };
    this.#peer.isBusy = true;
    this.#standIn.unfinished.add(this.#arrival);
    if (length !== undefined && coding !== undefined) this.#find(1, 'a request has two lengths');
    if (!asked) this.#find(1, `a request reaches the backend that no actor made: ${method} ${path} ${mark}`);
    else if (asked.arrivals++ > 0) this.#find(1, 'a request reaches the backend twice');
    if (asked) this.#checkRules(asked);
    if (!headers.has('x-request-id')) this.#find(1, 'a request reaches the backend that the gateway did not make');
    const kind = asked?.step.answer[0];
    if (kind === 'resetBefore') return this.#peer.reset();
    if (kind === 'early') void this.#answer(this.#arrival);
    if (leftBytes === 0) this.#whole(this.#arrival);
  }

  /** The rules allow the request, and its token is served on at most half of the connections. */
  #checkRules(asked: Asked): void {
    const { play } = this.#standIn;
    const isRefused = !play.verdicts(asked, 'ms', asked.startedMs, performance.now()).includes(false);
    if (isRefused) this.#find(3, 'a request reaches the backend that all rules of its time refuse');
    const isServed = ({ token, arrivals, endedMs, answeredBody, step }: Asked): boolean =>
      token === asked.token && arrivals > 0 && endedMs === undefined && answeredBody === undefined && !step.deafMs;
    const served = [...play.asked.values()].filter(isServed).length;
    if (served > play.world.mostConnections! / 2) this.#find(3, `one token is served on ${served} connections`);
  }

  /** @returns whether there was enough to go on. */
  #readBody(arrival: Arrival): boolean {
    if (arrival.isChunked && arrival.leftBytes === Infinity) {
      const end = this.#rest.indexOf('\r\n');
      if (end < 0) return this.#rest.length > 20 ? this.#fail('a chunk has no length') : false;
      const [size] = /^[0-9a-f]{1,8}$/i.exec(this.#rest.toString('latin1', 0, end)) ?? [];
      if (size === undefined) return this.#fail('this is no length of a chunk');
      const bytes = parseInt(size, 16);
      if (bytes === 0 && this.#rest.length < end + 4) return false;
      if (bytes === 0 && this.#rest.toString('latin1', end, end + 4) !== '\r\n\r\n') {
        return this.#fail('the last chunk has more');
      }
      this.#rest = this.#rest.subarray(bytes === 0 ? end + 4 : end + 2);
      arrival.leftBytes = bytes;
      if (bytes === 0) this.#whole(arrival);
      return true;
    }
    const part = this.#rest.subarray(0, arrival.leftBytes);
    if (part.length === arrival.leftBytes && arrival.isChunked) {
      if (this.#rest.length < part.length + 2) return false;
      if (this.#rest.toString('latin1', part.length, part.length + 2) !== '\r\n') {
        return this.#fail('a chunk is longer than it says');
      }
    }
    arrival.leftBytes -= part.length;
    this.#rest = this.#rest.subarray(part.length + (arrival.isChunked && arrival.leftBytes === 0 ? 2 : 0));
    this.#take(arrival, part);
    if (arrival.leftBytes > 0) return true;
    if (arrival.isChunked) arrival.leftBytes = Infinity;
    else this.#whole(arrival);
    return true;
  }

  /** Compares a part of a body with what was sent, and acts at the end of the first JSON value. */
  #take(arrival: Arrival, part: Buffer): void {
    const fromByte = arrival.body.length;
    arrival.body = Buffer.concat([arrival.body, part]);
    const { asked } = arrival;
    if (asked?.expected && !asked.expected.subarray(fromByte, fromByte + part.length).equals(part)) {
      this.#find(1, 'the body that the backend gets is no prefix of what was sent');
    }
    this.#countUploads(asked?.actor);
    const end = arrival.json.find(part);
    if (end >= 0 && isSend(arrival)) this.#act(arrival, arrival.body.subarray(0, fromByte + end).toString());
  }

  /**
   * Adds up what is here of the hoarder's bodies. An upload that was refused has ended for the gateway once it has its
   * log line, though its bytes may still arrive, and its client may not be told yet. Before that it is one body more
   * than the bound.
   */
  #countUploads(actor: Actor | undefined): void {
    const { unfinished, play: { world, lines } } = this.#standIn;
    if (actor?.kind !== 'hoarder') return;
    const over = new Set(lines.map(({ requestId }) => requestId));
    const own = [...unfinished].filter(({ asked, requestId }) => asked?.actor === actor && !over.has(requestId));
    const bytes = own.reduce((sum, { body }) => sum + body.length, 0);
    const limitBytes = 3 * world.bodyMiB! * 2 ** 20 + own.length * 65_536;
    if (bytes > limitBytes) this.#find(3, `the backend has over ${limitBytes} bytes of one token's unfinished uploads`);
  }

  /** The request is complete. */
  #whole(arrival: Arrival): void {
    this.#standIn.unfinished.delete(arrival);
    if (isSend(arrival)) {
      if (!arrival.hasActed) this.#find(1, 'a whole send is no JSON object');
    } else if (arrival.asked && arrival.asked.step.answer[0] !== 'early') {
      arrival.asked.acts++;
      void this.#answer(arrival);
    }
    this.#arrival = undefined;
  }

  /** Acts as encoding/json reads a send: keys match whatever their case. Here every one of several must be allowed. */
  #act(arrival: Arrival, text: string): void {
    arrival.hasActed = true;
    const { asked } = arrival;
    if (!asked) return;
    if (++asked.acts > 1) this.#find(1, 'a send is acted on twice');
    let document: Record<string, unknown>;
    try {
      document = JSON.parse(text);
    } catch {
      return this.#find(1, 'a send is no JSON');
    }
    const { senders, recipients } = (TOKENS[asked.actor?.token ?? 'free'] ?? {}) as Partial<typeof LISTS>;
    const keys = topKeys(text);
    for (const key of ['number', 'recipients', 'recipient']) {
      if (keys.filter((other) => new RegExp(`^${key}$`, 'iu').test(other)).length > 1) {
        this.#find(3, `${key} is given twice`);
      }
    }
    for (const [key, value] of Object.entries(document)) {
      if (senders && /^number$/iu.test(key) && !senders.includes(String(value))) this.#find(3, `a send from ${value}`);
      const others = /^recipients?$/iu.test(key)
        ? [value].flat().filter((one) => !recipients?.includes(String(one)))
        : [];
      if (recipients && others.length > 0) this.#find(3, `a send to ${others}`);
    }
    if (!asked.expected && !String(document.message).includes(asked.mark)) {
      this.#find(1, 'a made send has another message');
    }
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
    await this.#standIn.awake();
    this.#peer.isBusy = false;
    if (socket.destroyed) return;
    if (kind === 'resetAfter') return this.#peer.reset();
    if (kind === 'goneAfter') return void socket.end();
    if (kind === 'garbage') return void socket.end('these bytes are no response\r\n\r\n');
    if (asked.step.route === 'socket') return this.#upgrade(asked);
    await this.#write(asked, kind, ms);
  }

  #upgrade(asked: Asked): void {
    this.#isTunnel = true;
    const key = 'Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: x';
    this.#peer.socket.write(
      `HTTP/1.1 101 Switching Protocols\r\n${key}\r\nX-Answer: ${asked.mark}\r\n\r\n\x81\x05hello`,
    );
  }

  async #write(asked: Asked, kind: Answer, ms: number): Promise<void> {
    const { socket } = this.#peer;
    const size = asked.step.route === 'download' ? asked.step.bodyBytes : 0;
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

/** The keys of the outermost object, each as often as it is there. */
function topKeys(text: string): string[] {
  const tokens = text.match(/"(?:[^"\\]|\\.)*"|[{}[\]:]/g) ?? [];
  let depth = 0;
  return tokens.filter((token, i) => {
    if (token === '{' || token === '[') depth++;
    if (token === '}' || token === ']') depth--;
    return depth === 1 && tokens[i + 1] === ':';
  }).map((token) => String(JSON.parse(token)));
}

function isSend({ method, path }: Arrival): boolean {
  return method === 'POST' && /^\/v[12]\/send(?:$|\?)/.test(path);
}

/** Finds the end of the first JSON value, as a decoder does that reads no further. */
class JsonEnd {
  #depth = 0;
  #inString = false;
  #isEscaped = false;
  #isOver = false;

  /** @returns how many bytes of this part belong to the value, if it ends here; otherwise -1. */
  find(part: Buffer): number {
    for (let i = 0; i < part.length && !this.#isOver; i++) {
      const char = part[i]!;
      if (this.#inString) {
        if (this.#isEscaped) this.#isEscaped = false;
        else if (char === 0x5c) this.#isEscaped = true;
        else if (char === 0x22) this.#inString = false;
      } else if (char === 0x22) this.#inString = true;
      else if (char === 0x7b || char === 0x5b) this.#depth++;
      else if ((char === 0x7d || char === 0x5d) && --this.#depth <= 0) {
        this.#isOver = true;
        return i + 1;
      }
    }
    return -1;
  }
}

// ── SMALL BUFFERS ────────────────────────────────────────────────────────────────────────────────

/** The stand-ins of all worlds, by address and port. */
const STAND_INS = new Map<string, StandIn>();
let standIns = 0;

/** Goes on with the write that waits until the stand-in has read more. @param port that of the gateway's end. */
function wakeWriters({ writers }: StandIn, port: number): void {
  const wake = writers.get(port);
  writers.delete(port);
  wake?.();
}

type Write = (
  this: net.Socket,
  writev: boolean,
  data: unknown,
  encoding: string,
  done: (e?: Error | null) => void,
) => void;
const sockets = net.Socket.prototype as unknown as { _writeGeneric?: Write };
const writeAll = sockets._writeGeneric;
export const hasSmallBuffers = typeof writeAll === 'function' && !('Bun' in globalThis);

/** How many bytes a socket of the gateway has written to a stand-in. */
const written = new WeakMap<net.Socket, number>();

/** Begins or ends how the runtime is changed: how far a writer can be ahead of a stand-in, and whom TLS trusts. */
function changeRuntime(isOn: boolean): void {
  if (hasSmallBuffers) sockets._writeGeneric = isOn ? writeSome : writeAll!;
  agents.createConnection = isOn ? connectTrusting : connectAny;
}

type Connect = (this: unknown, options: object, ...more: unknown[]) => unknown;
const agents = https.Agent.prototype as unknown as { createConnection: Connect };
const connectAny = agents.createConnection;
/** Trusts the first certificate of the stand-ins, whatever their addresses. */
const connectTrusting: Connect = function (options, ...more) {
  const trust = { ca: CERTS[0].cert, checkServerIdentity: () => undefined };
  return connectAny.call(this, { ...options, ...trust }, ...more);
};

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
  const one = (chunk: unknown, coding: string): Buffer =>
    typeof chunk === 'string' ? Buffer.from(chunk, coding as BufferEncoding) : Buffer.from(chunk as Uint8Array);
  if (!writev) return one(data, encoding);
  const chunks = data as unknown[];
  return Buffer.concat(chunks.map((chunk) => {
    const entry = chunk as { chunk?: unknown; encoding?: string };
    return entry.chunk === undefined ? one(chunk, 'latin1') : one(entry.chunk, entry.encoding ?? 'latin1');
  }));
}

// ── THE CLIENTS ──────────────────────────────────────────────────────────────────────────────────

/** A response that is being read. */
type Incoming = Response & { leftBytes: number; isChunked: boolean };

/** A client's connection to the gateway. It reads responses strictly and gives each to its request. */
class Wire {
  readonly play: Play;
  readonly socket: net.Socket;
  readonly asked: Asked[] = [];
  isClosed = false;
  /** The gateway has said, or shown, that this connection takes no further request. */
  isLast = false;
  /** Rubbish was written: the gateway may answer more than was asked. */
  hasRubbish = false;
  /** How many connections there were before it, those that are closed too. */
  readonly #before: number;
  readonly #beside: number;
  #next = 0;
  #rest: Buffer = Buffer.alloc(0);
  #response: Incoming | undefined;
  #isTunnel = false;

  constructor(play: Play) {
    this.play = play;
    this.socket = net.connect({ port: play.port, host: '127.0.0.1', allowHalfOpen: true, noDelay: true });
    this.#before = ++play.opened;
    this.#beside = Math.max(play.wires.size, play.held);
    play.wires.add(this);
    this.socket.on('error', () => {});
    this.socket.on('data', (chunk: Buffer) => this.#read(chunk));
    this.socket.on('end', () => this.#end());
    this.socket.on('close', () => {
      this.#end();
      this.isClosed = true;
      setTimeout(() => play.wires.delete(this), 50).unref(); // until the gateway has surely seen it
    });
  }

  /** How many connections there were beside this one in its life. */
  get rivals(): number {
    return this.#beside + this.play.opened - this.#before;
  }

  /** Whether nothing more can come for these requests. */
  isDone(asked: Asked[]): boolean {
    return this.isLast && this.socket.readableEnded || this.isClosed ||
      asked.every(({ response }) => response?.isComplete);
  }

  #read(chunk: Buffer): void {
    this.#rest = this.#rest.length > 0 ? Buffer.concat([this.#rest, chunk]) : chunk;
    while (this.#rest.length > 0 && !this.#isTunnel) {
      if (!(this.#response ? this.#readBody(this.#response) : this.#readHead())) return;
    }
  }

  #readHead(): boolean {
    const end = this.#rest.indexOf('\r\n\r\n');
    if (end < 0) return false;
    const [first = '', ...lines] = this.#rest.toString('latin1', 0, end).split('\r\n');
    this.#rest = this.#rest.subarray(end + 4);
    const status = Number(/^HTTP\/1\.1 (\d{3}) /.exec(first)?.[1]);
    const asked = this.asked[this.#next];
    if (!status) {
      const bytes = JSON.stringify(first.slice(0, 60));
      this.play.find(4, `a client got bytes that are no response: ${bytes} ${asked?.mark}`);
      this.socket.destroy();
      return false;
    }
    if (status < 200 && status !== 101) return true;
    const headers = new Map(lines.map((line) => {
      const colon = line.indexOf(':');
      return [line.slice(0, colon).toLowerCase(), line.slice(colon + 1).trim()] as const;
    }));
    const isChunked = headers.get('transfer-encoding') === 'chunked';
    const length = headers.get('content-length');
    const isBodiless = status === 204 || status === 304 || status === 101;
    const leftBytes = isBodiless ? 0 : isChunked || length === undefined ? Infinity : Number(length);
    const response = { status, headers, body: Buffer.alloc(0), isComplete: false, leftBytes, isChunked };
    if (headers.get('connection') === 'close') this.isLast = true;
    this.#next++;
    if (asked) asked.response = response;
    else if (!this.hasRubbish) this.play.find(4, `a client got a response that it did not ask for: ${first}`);
    const answered = headers.get('x-answer');
    if (answered !== undefined && answered !== asked?.mark) {
      this.play.find(4, `a client got the answer to another request: ${answered} for ${asked?.mark}`);
    }
    this.#response = response;
    if (leftBytes === 0) this.#complete();
    if (status === 101) this.#isTunnel = true;
    return true;
  }

  #readBody(response: Incoming): boolean {
    if (response.isChunked && response.leftBytes === Infinity) {
      const end = this.#rest.indexOf('\r\n');
      if (end < 0) return false;
      const bytes = parseInt(this.#rest.toString('latin1', 0, end), 16);
      if (bytes === 0 && this.#rest.length < end + 4) return false;
      this.#rest = this.#rest.subarray(end + (bytes === 0 ? 4 : 2));
      response.leftBytes = bytes + 2;
      if (bytes === 0) this.#complete();
      return true;
    }
    const part = this.#rest.subarray(0, response.leftBytes);
    this.#rest = this.#rest.subarray(part.length);
    response.leftBytes -= part.length;
    response.body = Buffer.concat([response.body, part]);
    if (response.leftBytes > 0) return true;
    if (!response.isChunked) this.#complete();
    else {
      response.body = response.body.subarray(0, -2);
      response.leftBytes = Infinity;
    }
    return true;
  }

  #complete(): void {
    this.#response!.isComplete = true;
    this.#response = undefined;
    const asked = this.asked[this.#next - 1];
    if (asked) end(asked);
  }

  #end(): void {
    if (this.#response?.leftBytes === Infinity && !this.#response.isChunked && this.socket.readableEnded) {
      this.#complete();
    }
    this.isLast = true;
    for (const asked of this.asked) end(asked);
  }
}

/** A filler of so many bytes that says whose it is. */
const filler = (mark: string, bytes: number): string =>
  `${mark}.`.repeat(bytes / mark.length + 1).slice(0, Math.max(0, bytes));

/** The body of a step, without `auth`. */
function bodyOf({ shape, bodyBytes, route }: Step, mark: string): string {
  const text = (bytes: number): string => `${mark} ${filler(mark, bytes)}`;
  if (route !== 'send') return '';
  const member = (key: string, value: unknown): string => `"${key}":${JSON.stringify(value)}`;
  const object = (...members: string[]): string => `{${members.join()}}`;
  const [number, recipients, message] = [
    member('number', FROM),
    member('recipients', [TO]),
    member('message', text(bodyBytes)),
  ];
  const others = member('recipients', [ELSE]);
  /** An object in the object, at the byte where the gateway's second piece of a body begins. */
  const spliced = (members: string[]): string => {
    const before = `{${members.join()},"message":"${mark}`;
    const gap = filler(mark, 65_536 - before.length - 6);
    return `${before}${gap}","x":${object(member('number', ELSE), others, message)}`;
  };
  const shapes: Record<Step['shape'], () => string> = {
    plain: () => object(number, recipients, message),
    twice: () => object(number, recipients, message, others),
    folded: () => object(number, recipients, message, member('Recipients', [ELSE])),
    escaped: () => object(number, message, `"recipi\\u0065nts":["${ELSE}"]`),
    late: () => object(recipients, message, member('number', ELSE)),
    doubled: () => object(number, recipients, message) + object(member('number', ELSE), others),
    spliced: () => `${spliced([number, recipients])}}`,
    splicedLate: () => `${spliced([number])},${recipients}}`,
    json: () => object(member('text', text(bodyBytes))),
    form: () => `text=${encodeURIComponent(text(bodyBytes))}&host=x`,
    multipart: () => `--b\r\nContent-Disposition: form-data; name="text"\r\n\r\n${text(bodyBytes)}\r\n--b--\r\n`,
    text: () => text(bodyBytes),
  };
  return shapes[shape]();
}

const CONTENT_TYPES: Partial<Record<Step['shape'], string>> = {
  form: 'application/x-www-form-urlencoded',
  multipart: 'multipart/form-data; boundary=b',
  text: 'text/plain',
};

const ROUTES = {
  send: 'POST /v2/send',
  join: `POST /v1/groups/${FROM}/${GROUP}/join`,
  about: 'GET /v1/about',
  download: 'GET /v1/attachments/one.jpg',
  unknown: `GET /v1/${WORD}/nothing`,
  health: 'GET /healthz',
  socket: `GET /v1/receive/${FROM}`,
};

/** Makes the request of a step, and writes down what the backend must get. */
function makeRequest(play: Play, actor: Actor | undefined, token: TokenName, step: Step, mark: string): Asked {
  const body = bodyOf(step, mark);
  const isJson = body.startsWith('{');
  const form = step.form === 'body' && !isJson ? 'bearer' : step.form;
  const secret = step.route === 'health' ? '' : step.wrong ? `${WORD}-nobody-0123456789` : secretOf(token);
  let [method = '', path = ''] = ROUTES[step.route].split(' ');
  if (form === 'query') path += `?@auth=${secret}`;
  if (form === 'path') path = `/@auth=${secret}${path}`;
  const lines = [`${method} ${path} HTTP/1.${step.head === 'old' ? 0 : 1}`, 'Host: gateway', `X-Mark: ${mark}`];
  if (step.head === 'old') lines.push('Connection: keep-alive');
  if (step.head === 'expecting') lines.push('Expect: 100-continue');
  if (form === 'bearer') lines.push(`Authorization: Bearer ${secret}`);
  if (form === 'basic') lines.push(`Authorization: Basic ${btoa(`api:${secret}`)}`);
  if (step.route === 'socket') lines.push('Upgrade: websocket', 'Connection: Upgrade', 'Sec-WebSocket-Key: x');
  const content = Buffer.from(form === 'body' ? `{"auth":"${secret}",${body.slice(1)}` : body);
  if (content.length > 0) lines.push(`Content-Type: ${CONTENT_TYPES[step.shape] ?? 'application/json'}`);
  if (step.chunked && content.length > 0) lines.push('Transfer-Encoding: chunked');
  else if (method === 'POST' && step.head !== 'unmeasured') lines.push(`Content-Length: ${content.length}`);
  const head = Buffer.from(`${lines.join('\r\n')}\r\n\r\n`);
  const bytes = Buffer.concat([head, step.chunked && content.length > 0 ? chunked(content) : content]);
  const expected = token === 'hook' && step.route === 'send' ? undefined : Buffer.from(body);
  const stays = step.stopAt === undefined && step.leave === undefined && !step.deafMs;
  const asked: Asked = {
    ...{ mark, actor, token, step, form, bytes, expected, stays, rivals: 0, arrivals: 0, acts: 0 },
    ...{ startedMs: performance.now(), startedLoopMs: loopMs },
  };
  play.asked.set(mark, asked);
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
  if (actor.kind === 'clock') return turnClock(play, actor);
  if (!actor.together) return runSteps(play, actor, actor.steps, 0);
  await Promise.all(actor.steps.map((step, i) => runSteps(play, actor, [step], i)));
}

/** Takes steps one after the other; those that are joined are written together. */
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

/** Holds a WebSocket. It is closed if a reload refuses it, and for no other reason of the gateway's own. */
async function holdSocket(play: Play, wire: Wire, asked: Asked): Promise<void> {
  const fromLoopMs = loopMs;
  const isStale = (): boolean =>
    loopMs > fromLoopMs + 300 && !play.verdicts(asked, 'loopMs', loopMs - 300, loopMs).includes(false);
  await until(() => wire.isLast || isStale(), asked.step.keptMs ?? 50);
  if (asked.response?.status !== 101 || asked.step.leave) return;
  if (!wire.isLast && isStale()) play.find(3, `a WebSocket stays open that is refused (${asked.mark})`);
  const isRefused = play.verdicts(asked, 'loopMs', asked.startedLoopMs, loopMs).includes(true);
  const isAway = play.standIn.absentMs('away', asked.startedMs, performance.now()) > 0;
  if (wire.isLast && !isRefused && !isAway) play.find(4, `a WebSocket is closed (${asked.mark})`);
}

/** Writes requests, and waits until each has its response, or the connection is closed. */
async function exchange(play: Play, wire: Wire, asked: Asked[]): Promise<void> {
  const { socket } = wire;
  const { step } = asked.at(-1)!;
  wire.asked.push(...asked);
  // Only the last of several requests has rubbish behind it, so that each response is known by its order.
  const { rubbish, stopAt } = step;
  const isRubbish = rubbish !== undefined && stopAt === undefined;
  if (isRubbish) wire.hasRubbish = wire.isLast = true;
  const last = Buffer.from(isRubbish ? RUBBISH[rubbish]! : '');
  const bytes = Buffer.concat([...asked.map((each) => each.bytes.subarray(0, each.step.stopAt)), last]);
  if (step.deafMs) socket.pause();
  let at = 0;
  const first = asked[0]!.step;
  const pauses = first.head === 'expecting' ? [[bytes.indexOf('\r\n\r\n') + 4, 30] as const] : first.pauses ?? [];
  for (const [atByte, ms] of pauses) {
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
    else if (how === 'reset') socket.resetAndDestroy();
    else socket.destroy();
  }
  const { timeoutMs, waitMs, stallMs } = play.world;
  const limitMs = 3 * timeoutMs + 2 * waitMs + stallMs + 2000;
  const isDone = await until(() => wire.isDone(asked), limitMs);
  for (const each of asked) {
    if (!isDone && each.stays && !each.response) play.find(4, `a client waits for ever (${each.mark})`);
    each.rivals = wire.rivals;
    end(each);
  }
}

/** Reloads the same configuration, one with other slots or with a token changed, and one that is wrong. */
async function reload(play: Play, { steps }: Actor): Promise<void> {
  const { parallel } = play.world;
  const change = (changes: Changes): number => play.versions.push({ ms: performance.now(), loopMs, changes });
  for (const { bodyBytes, keptMs = 100, change: [token, to] = [] } of steps) {
    const isWrong = bodyBytes === 0;
    if (token && to && !isWrong) {
      came(`rules ${to}`);
      change({ ...play.versions.at(-1)!.changes, [token]: to });
    }
    try {
      play.gateway.reload(
        isWrong ? { ...play.config(), tokens: {} } : play.config(parallel && parallel + bodyBytes % 3),
      );
      if (isWrong) play.find(7, 'a reload without tokens is taken');
    } catch (error) {
      if (!isWrong) throw error;
    }
    await sleep(keptMs);
  }
  change({});
  play.gateway.reload(play.config());
}

/** Sets the clock back and forth by up to a day. */
async function turnClock(play: Play, { steps }: Actor): Promise<void> {
  for (const { bodyBytes } of steps) {
    play.clockMs = (bodyBytes % 7 - 3) * 28_000_000;
    await sleep(120);
  }
  play.clockMs = 0;
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
    const isHonest = actor !== undefined && HONEST.includes(actor.kind);
    if (!response) {
      if (stays && acts > 0) play.find(4, `a request was acted on, and its client got no response (${mark})`);
      // Until its token is seen, a connection may be closed for a new one.
      const isSeen = asked.endedLoopMs! - asked.startedLoopMs > 300 && !asked.step.pauses;
      const isSafe = isSeen || asked.rivals < (play.world.mostConnections ?? Infinity);
      if (stays && isHonest && isSafe) play.find(4, `an honest client got no response (${mark})`);
      continue;
    }
    const { status, headers, body, isComplete } = response;
    const code = codeOf(response);
    if (code !== undefined) came(`code ${code}`);
    if (code === undefined && route !== 'health' && isComplete && !headers.has('x-answer')) {
      const start = `${status} ${body.toString().slice(0, 80)}`;
      play.find(4, `a response is neither the backend's nor a refusal: ${start} (${mark})`);
    }
    if (status === 201 && acts === 0) play.find(2, `a client was told 201, and nothing was done (${mark})`);
    if (code !== undefined && !OPEN_CODES.includes(code) && acts > 0) {
      play.find(2, `a client was told ${code}, and the backend has acted (${mark})`);
    }
    // No clock is needed to know that this is the answer to somebody else's bytes. The world of those bytes may be
    // another, played beside this one: on Deno all connections of a process share parsers.
    if (code === 'bad_request' && isHonest) {
      play.find(4, `an honest client was told bad_request (${mark})`);
    }
    if (code === 'internal_error') play.find(7, `a client was told internal_error (${mark})`);
    if (isComplete && headers.has('x-answer') && status !== 101 && body.toString() !== asked.answeredBody) {
      play.find(2, `an answer looks whole and is not what the backend said (${mark})`);
    }
    if (kind === 'cut' && isComplete && headers.has('x-answer') && status !== 101) {
      play.find(2, `a cut answer looks whole (${mark})`);
    }
    if (route === 'send' || route === 'about') checkTime(play, asked, code);
    if (actor && ['guest', 'hanger'].includes(actor.kind)) checkRefusal(play, asked, code);
  }
}

/** Invariant 3: what began before a reload is not refused by its rules. A head is read soon after it is written. */
function checkRefusal(play: Play, asked: Asked, code = ''): void {
  if (!/^(?:unauthorized|too_many_failures|(?:endpoint|sender|recipient)_not_allowed)$/.test(code)) return;
  const readMs = asked.step.pauses ? 350 : 150;
  const verdicts = play.verdicts(asked, 'loopMs', asked.startedLoopMs, asked.startedLoopMs + readMs);
  if (!verdicts.includes(true)) play.find(3, `a client was told ${code} against all rules of its time (${asked.mark})`);
}

/** Whether a token may have been served on half of the connections while a request ran. A WebSocket stays open. */
function hasHalf({ asked, world }: Play, { token, startedMs, endedMs }: Asked): boolean {
  const others = [...asked.values()].filter((other) =>
    other.token === token && other.startedMs <= endedMs! &&
    (other.response?.status === 101 || !(other.endedMs! < startedMs - 50))
  );
  return others.length > world.mostConnections! / 2;
}

/** Invariant 5, for one request. */
function checkTime(play: Play, asked: Asked, code: string | undefined): void {
  const { mark, actor, startedMs, endedMs, startedLoopMs, endedLoopMs, response, stays, step } = asked;
  const { standIn, world } = play;
  const { pauses, joined, deafMs } = step;
  const lifeMs = endedLoopMs! - startedLoopMs;
  const awayMs = standIn.absentMs('away', startedMs, endedMs!);
  const slowMs = standIn.absentMs('hung', startedMs, endedMs!) + standIn.absentMs('slow', startedMs, endedMs!);
  if (code === 'backend_unreachable' && awayMs + 50 < world.waitMs) {
    play.find(5, `backend_unreachable after ${Math.round(awayMs)} of ${world.waitMs} ms away (${mark})`);
  }
  const has = (kind: Kind): boolean => world.actors.some((other) => other.kind === kind);
  // Slots are short only where somebody hangs, who keeps its own, and those that a reload has taken away, until the
  // requests end.
  const keepsMs = has('reloader') || actor?.kind === 'hanger' ? world.timeoutMs : 0;
  const slotsMs = has('hanger') ? 2 * world.slotMs + keepsMs : 0;
  // The slot of a request that still connects may be lent, for here a slot is overdue earlier than a connect: the next
  // request begins to connect then.
  const connectMs = world.tls ? world.connectMs + Math.min(world.slotMs, world.connectMs) : 0;
  const waitedMs = world.waitMs + slotsMs + slowMs + connectMs + 300;
  if (code === 'backend_unreachable' && !pauses && !joined && !deafMs && lifeMs > waitedMs) {
    play.find(5, `backend_unreachable is told after ${Math.round(lifeMs)} of ${Math.round(waitedMs)} ms (${mark})`);
  }
  if (!stays || actor === undefined || !HONEST.includes(actor.kind)) return;
  const boundMs = Math.max(slotsMs, 2 * world.slotMs) + awayMs + slowMs + 600;
  if (lifeMs > boundMs) {
    play.find(5, `an honest client waited ${Math.round(lifeMs)} of ${Math.round(boundMs)} ms (${mark})`);
  }
  const isServed = response!.status < 300;
  const isCut = world.phases.some(({ kind }) => kind !== 'distrusted');
  const mayFail = (awayMs > 0 && isCut) || code === 'backend_unreachable' || boundMs >= world.timeoutMs ||
    (code === 'busy' && hasHalf(play, asked));
  if (!isServed && !mayFail) play.find(5, `an honest client was told ${response!.status} ${code} (${mark})`);
}

/** Invariants 7: the log lines. */
function checkLog(play: Play): void {
  const requests = new Map<unknown, Line>();
  let isShut = false;
  for (const line of play.lines) {
    if (line.message === 'internal error') play.find(7, `internal error: ${line.stack}`);
    if (isOfGate(line)) {
      if (shuts(line) === isShut) play.find(7, `two lines of an outage do not alternate: ${line.message}`);
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
      play.find(7, `the log says ${line.status}, and the client got ${response.status} (${mark})`);
    }
  }
}

/** Invariant 6: as many sends as there are slots run at the same time, also beside strangers on all connections. */
async function checkSlots(play: Play): Promise<void> {
  const { seed, parallel, slotMs, timeoutMs, waitMs, mostConnections = 0 } = play.world;
  await sleep(slotMs + 50); // a request whose client has left keeps its slot so long
  const count = parallel || 6;
  const wires: Wire[] = [];
  for (let i = 0; i < mostConnections; i++) {
    const idle = new Wire(play);
    idle.hasRubbish = true;
    idle.socket.write(i % 2 ? POST : '');
  }
  const step: Step = { route: 'send', form: 'bearer', shape: 'plain', bodyBytes: 0, answer: ['prompt', 0] };
  // After an outage the gateway tries again within a second.
  for (let i = 0; i < 40 && !await isServed(play, step, `warm-${i}`); i++) await sleep(50);
  for (let i = 0; i < count; i++) {
    const wire = new Wire(play);
    wires.push(wire);
    // One token has not all slots, so several tokens ask.
    const token = (['free', 'guest', 'other', 'hanger'] as const)[(seed + i) % 4]!;
    const asked = makeRequest(play, undefined, token, step, `slot-${i}`);
    wire.asked.push(asked);
    wire.socket.write(asked.bytes);
  }
  const all = await until(() => play.standIn.held.length === count, slotMs - 40);
  const reached = play.standIn.held.length;
  if (!all) play.find(6, `only ${reached} of ${count} sends run at the same time`);
  const isAnswered = await until(() => {
    play.standIn.release();
    return wires.every((wire) => wire.isDone(wire.asked));
  }, timeoutMs + waitMs);
  if (!isAnswered) play.find(6, 'the sends at the end are not answered');
  for (const wire of wires) wire.socket.destroy();
}

/** Whether a send on a connection of its own is served. */
async function isServed(play: Play, step: Step, mark: string): Promise<boolean> {
  const asked = makeRequest(play, undefined, 'free', step, mark);
  const wire = new Wire(play);
  await exchange(play, wire, [asked]);
  wire.socket.destroy();
  return asked.response?.status === 201;
}

/** Invariant 6: nothing is left over, and `close()` is quick. */
async function checkEnd(play: Play): Promise<void> {
  const { gateway, standIn, wires } = play;
  for (const wire of wires) wire.socket.destroy();
  const { server } = gateway;
  const connections = (): Promise<number> => new Promise((resolve) => void server.getConnections((_, n) => resolve(n)));
  const isEmpty = await until(async () => await connections() === 0, 1500);
  if (!isEmpty) play.find(6, `${await connections()} connections of clients are left`);
  const busy = (): Peer[] => [...standIn.peers.values()].filter(({ isBusy }) => isBusy);
  if (!await until(() => busy().length === 0, 1500)) play.find(6, `${busy().length} requests at the backend are left`);
  const sinceMs = performance.now();
  await gateway.close();
  const ms = performance.now() - sinceMs;
  if (ms > 700) play.find(6, `close() took ${Math.round(ms)} ms`);
}

// ── INVARIANT 9: PROCESSOR TIME ──────────────────────────────────────────────────────────────────

/** What a text of one kind is made of. Its end is sent with a byte left out: near misses make matchers look again. */
interface Grammar {
  /** The request without its body; `…` in it stands for the text, which is the body otherwise. */
  head: string;
  token: TokenName;
  begins: string[];
  words: string[];
  ends: string[];
  bytes: number;
}

const POST = 'POST /v2/send HTTP/1.1';
const GRAMMARS: Grammar[] = [
  {
    head: `${POST}\r\nContent-Type: multipart/form-data; boundary=b`,
    token: 'hook',
    begins: [
      '--b\r\n',
      '--b\r\nContent-Disposition: form-data; name="text"\r\n\r\n',
      '--b\r\nContent-Disposition: form-data',
    ],
    words: ['\r\n', '\n', '\r', '--b\r\n', '--b', '-', ';', '; a="', '"', '\\', ' ', 'a', ':', '=', ',', 'x:y\r\n'],
    ends: ['\r\n--b--\r\n', 'x\r\n--b--\r\n', '"\r\n\r\n\r\n--b--\r\n'],
    bytes: 65_536,
  },
  {
    head: `${POST}\r\nContent-Type: application/x-www-form-urlencoded`,
    token: 'hook',
    begins: ['text=', 'payload=', '', 'payload={"a":"'],
    words: ['&', 'a=b&', '%', '%4', '%41', '=', '+', 'a', '[', '"', '\\', '%0A', '=&'],
    ends: ['&text=x', '"}', '='],
    bytes: 262_144,
  },
  ...(['hook', 'confined'] as const).map((token): Grammar => ({
    head: `${POST}\r\nContent-Type: application/json`,
    token,
    begins: ['{"text":"', '{"text":', '{"recipients":["', '{"base64_attachments":["data:', '{', ' '],
    words: '\\u0061|\\|\\"|a|[|{"a":|"a",|1|-| |base64,|;base64|;|+1"," |\u00e9'.split('|'),
    ends: ['"]}', '}', 'base64,"]}'],
    bytes: token === 'hook' ? 262_144 : 65_000,
  })),
  {
    head: `${POST}\r\nContent-Type: text/plain`,
    token: 'hook',
    begins: ['', 'text='],
    words: ['\x1b', '\x1b[', '\x1b[1', '\x1b]', '1;', '\r', '\r\n', '\n', '\x00', ' ', 'a=b', '\u00e9', '\x07', '\x9b'],
    ends: ['\x1b[0m', '\x1b\\', '\r\n'],
    bytes: 262_144,
  },
  ...['GET /…', 'GET /v1/about?…', 'GET /@auth=…', 'GET /v1/groups/…'].map((target): Grammar => ({
    head: `${target} HTTP/1.1`,
    token: 'free',
    begins: ['', '%'],
    words: ['%', '%2', '%25', '%2f', '/', '.', '&', '=', '@auth=x&', '@auth', ';', '+', 'a', '//', '%40'],
    ends: ['%20', '/x', '&a=b'],
    bytes: 14_000,
  })),
  ...'Authorization Connection X-Forwarded-For Content-Type Accept Origin Host X-Other Expect'.split(' ').map((
    name,
  ): Grammar => ({
    head: `GET /v1/about HTTP/1.1\r\n${name}: …`,
    token: 'free',
    begins: ['', 'Basic ', 'multipart/form-data; boundary='],
    words: [' ', ',', ' ,', '\t', ';', '"', '\\"', '=', '%25', 'a', '1.', ':', '[', 'YWFh', '%', '@'],
    ends: ['x"', ', x', '=='],
    bytes: 14_000,
  })),
];

/** One text: which grammar, begin, word and end, and which byte of the end is left out. */
export interface Text {
  grammar: number;
  begin: string;
  word: string;
  end: string;
}

/** All texts, in an order that the seed decides. */
export function textsOf(seed: number): Text[] {
  const draw = generator(seed, 'texts');
  const texts = GRAMMARS.flatMap(({ begins, words, ends }, grammar) =>
    begins.flatMap((begin) =>
      words.flatMap((word) =>
        ends.flatMap((whole) => {
          const at = draw.below(whole.length);
          const cuts = [whole.slice(0, at) + whole.slice(at + 1), whole.slice(1)];
          return cuts.map((end) => ({ grammar, begin, word, end }));
        })
      )
    )
  );
  return texts.map((text) => [draw.below(1e9), text] as const).sort(([a], [b]) => a - b).map(([, text]) => text);
}

/** The bytes of a request with a text of a length. */
function requestOf({ grammar, begin, word, end }: Text, bytes: number): Buffer {
  const { head, token } = GRAMMARS[grammar]!;
  const count = Math.max(0, Math.floor((bytes - begin.length - end.length) / Buffer.byteLength(word)));
  const text = begin + word.repeat(count) + end;
  const isBody = !head.includes('…');
  const lines = [isBody ? head : head.replace('…', () => text.replace(/[\r\n\0]/g, ''))];
  if (!/\nHost:/.test(head)) lines.push('Host: gateway');
  if (!/Authorization|auth/.test(head)) lines.push(`Authorization: Bearer ${secretOf(token)}`);
  if (isBody) lines.push(`Content-Length: ${Buffer.byteLength(text)}`);
  return Buffer.from(`${lines.join('\r\n')}\r\n\r\n${isBody ? text : ''}`);
}

/** Sends requests that are long and nearly right, one after the other, and measures what each costs. */
export async function checkTexts(texts: Text[], seconds: number): Promise<{ tried: number; finds: Find[] }> {
  const gateway = createGateway({
    listen: '127.0.0.1:0',
    backend: { url: 'http://127.0.0.1:9', wait: '0' },
    tokens: tokensWith({}),
    auth: { methods: [...FORMS] },
    shutdown: '1s',
    log: { level: 'error' },
  }, { log: () => {} });
  const port = Number(new URL(await gateway.listen()).port);
  const finds: Find[] = [];
  const endMs = performance.now() + seconds * 1000;
  let tried = 0;
  for (const text of texts) {
    if (performance.now() > endMs) break;
    tried++;
    const { bytes, head } = GRAMMARS[text.grammar]!;
    if (await costOf(port, requestOf(text, bytes)) < 100) continue;
    const ratios: number[] = [];
    for (let i = 0; i < 2; i++) {
      const half = await costOf(port, requestOf(text, bytes / 2));
      ratios.push(await costOf(port, requestOf(text, bytes)) / Math.max(1, half));
    }
    const what = `twice the length costs ${ratios.map((ratio) => ratio.toFixed(1)).join(' and ')} times as much`;
    if (Math.min(...ratios) > 3) finds.push({ invariant: 9, what: `${what}: ${JSON.stringify({ head, ...text })}` });
  }
  await gateway.close();
  return { tried, finds };
}

/** The milliseconds of processor time until a request has its response. */
async function costOf(port: number, bytes: Buffer): Promise<number> {
  const socket = net.connect(port, '127.0.0.1');
  socket.on('error', () => {});
  await once(socket, 'connect');
  const before = process.cpuUsage();
  socket.write(bytes);
  await new Promise((resolve) => socket.once('data', resolve).once('close', resolve));
  const { user, system } = process.cpuUsage(before);
  socket.destroy();
  return (user + system) / 1000;
}

// ── INVARIANT 10: PROCESSES ──────────────────────────────────────────────────────────────────────

const EVENTS = [
  'a loop of links',
  'a folder in its place',
  'rewritten',
  'broken',
  'gone',
  'emptied',
  'unreadable',
  'reader gone',
  'SIGHUP',
] as const;

/** A world of a process: its standard streams, and what happens to its files. */
interface ProcessWorld {
  seed: number;
  /** What standard output and standard error are. */
  streams: ('pipe' | 'full')[];
  events: { kind: (typeof EVENTS)[number]; file: 'config' | 'secret'; waitMs: number }[];
}

export function genProcess(seed: number): ProcessWorld {
  const draw = generator(seed, 'process');
  const stream = (): 'pipe' | 'full' => draw.chance(0.7) ? 'pipe' : 'full';
  const event = (): ProcessWorld['events'][number] => ({
    kind: draw.pick(EVENTS),
    file: draw.pick(['config', 'secret'] as const),
    waitMs: draw.pick([50, 700, 700, 2000]),
  });
  return { seed, streams: [stream(), stream()], events: Array.from({ length: draw.between(2, 4) }, event) };
}

/** Starts a gateway as a process, does to its files and streams what the world says, and asks whether it serves. */
export async function playProcess({ streams, events }: ProcessWorld): Promise<Find[]> {
  const finds: Find[] = [];
  const find = (what: string): void => void finds.push({ invariant: 10, what });
  const folder = mkdtempSync(join(tmpdir(), 'gateway-fuzz-'));
  const files = { config: join(folder, 'gateway.json'), secret: join(folder, 'secret') };
  const port = await freePort();
  const contents = {
    config: JSON.stringify({
      listen: `127.0.0.1:${port}`,
      backend: { url: 'http://127.0.0.1:9', wait: '0' },
      tokens: { one: { secretFile: files.secret }, two: { secret: secretOf('two') } },
    }),
    secret: secretOf('one'),
  };
  for (const name of ['config', 'secret'] as const) writeFileSync(files[name], contents[name]);
  const full = openSync('/dev/full', 'w');
  const run = 'Deno' in globalThis ? ['run', '-A', '--no-check'] : process.execArgv;
  const child = spawn(process.execPath, [...run, fileURLToPath(FILE), '--config', files.config], {
    stdio: ['ignore', ...streams.map((stream) => stream === 'full' ? full : 'pipe')] as StdioOptions,
    env: { PATH: process.env.PATH, HOME: folder },
  });
  closeSync(full);
  const ended = once(child, 'close');
  child.stdout?.resume();
  let said = '';
  child.stderr?.on('data', (chunk) => said += chunk);
  const serves = (): Promise<boolean> => isHealthy(port);
  try {
    await until(async () => child.exitCode !== null || await serves(), 20_000);
    if (child.exitCode !== null || !await serves()) {
      find(`a process does not start, exit code ${child.exitCode}, streams ${streams}: ${said}`);
      return finds;
    }
    for (const { kind, file, waitMs } of events) {
      came(`event ${kind}`);
      if (kind === 'reader gone') child.stdout?.destroy();
      else if (kind === 'SIGHUP') process.kill(child.pid!, 'SIGHUP');
      else breakFile(files[file], kind, contents[file]);
      await sleep(waitMs);
      if (!await serves()) {
        find(`a process serves no longer: ${kind}, ${file}; it ended with ${child.exitCode}: ${said}`);
      }
    }
    process.kill(child.pid!, 'SIGTERM'); // after a child.kill, Deno 2.9 tells no exit code
    if (await isLate(ended, 12_000)) find('a process does not end on SIGTERM');
    else if (child.exitCode !== 0) find(`a process ends with ${child.exitCode} ${child.signalCode}: ${said}`);
  } finally {
    child.kill('SIGKILL');
    await ended;
    rmSync(folder, { recursive: true, force: true });
  }
  return finds;
}

/** Does to a file what can happen to a file. */
function breakFile(path: string, kind: (typeof EVENTS)[number], content: string): void {
  rmSync(path, { recursive: true, force: true });
  if (kind === 'a loop of links') symlinkSync(path, path);
  else if (kind === 'a folder in its place') mkdirSync(path);
  else if (kind === 'broken') writeFileSync(path, content.slice(0, 9));
  else if (kind === 'emptied') writeFileSync(path, '');
  else if (kind !== 'gone') writeFileSync(path, content, { mode: kind === 'unreadable' ? 0 : 0o600 });
}

async function freePort(): Promise<number> {
  const server = net.createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, 'close');
  return port;
}

/** Whether GET /healthz is answered with 200. */
function isHealthy(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = net.connect(port, '127.0.0.1');
    socket.on('error', () => resolve(false)).on('close', () => resolve(false));
    socket.setTimeout(5000, () => socket.destroy());
    socket.once('data', (chunk) => {
      resolve(/^HTTP\/1\.1 200 /.test(String(chunk)));
      socket.destroy();
    });
    socket.write('GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n');
  });
}

// ── RUNS ─────────────────────────────────────────────────────────────────────────────────────────

/** A world that failed. */
interface Failure {
  world: World;
  find: Find;
  /** How long the run had lasted. */
  afterMs?: number;
}

/** Which worlds are played, how long, and how many side by side. */
interface Run {
  seed: number;
  seconds: number;
  side?: number;
  make?: (seed: number) => World;
}

interface Result {
  worlds: number;
  failures: Failure[];
  /** Finds of the timed invariants that did not come again. */
  warnings: Failure[];
}

/** Plays new worlds side by side for a time, then plays those again, alone, whose finds depend on time. */
export async function simulate({ seed, seconds, side = 8, make = genWorld, stopAt }: Run & {
  /** Ends the run at the first find of one of these invariants. */
  stopAt?: readonly number[];
}): Promise<Result> {
  const result: Result = { worlds: 0, failures: [], warnings: [] };
  const maybe: Failure[] = [];
  const startMs = performance.now();
  const endMs = startMs + seconds * 1000;
  const isStop = ({ find }: Failure): boolean => stopAt?.includes(find.invariant) === true;
  const isOver = (): boolean =>
    performance.now() > endMs || result.failures.some(isStop) || maybe.filter(isStop).length > 3;
  const playOn = async (): Promise<void> => {
    while (!isOver()) {
      const world = make(seed + result.worlds++);
      for (const find of await playWorld(world)) {
        (TIMED.includes(find.invariant) ? maybe : result.failures)
          .push({ world, find, afterMs: performance.now() - startMs });
      }
    }
  };
  const before = activeResources();
  await Promise.all(Array.from({ length: side }, playOn));
  const isFlat = await until(() => activeResources().length <= before.length, 3000);
  if (!isFlat) {
    const left = [...activeResources(), ...openSockets()];
    const what = `what was there before the worlds: ${before}; what is left after them: ${left}`;
    result.failures.push({ world: make(seed), find: { invariant: 6, what } });
  }
  for (const failure of firstOfEach(maybe)) {
    (await failsTwice(failure) ? result.failures : result.warnings).push(failure);
  }
  return result;
}

/** The timers, sockets and the like that keep this process alive, where the runtime can tell. */
function activeResources(): string[] {
  return process.getActiveResourcesInfo?.() ?? [];
}

/** The ends of each open socket, and how much has passed it, where the runtime can tell. A stand-in is at 127.1.x.y. */
function openSockets(): string[] {
  const { _getActiveHandles: handles } = process as { _getActiveHandles?: () => unknown[] };
  return (handles?.call(process) ?? []).filter((each) => each instanceof net.Socket).map((socket) => {
    const { localAddress, localPort, remoteAddress, remotePort, bytesRead, bytesWritten, readyState } = socket;
    const ends = `${localAddress}:${localPort} to ${remoteAddress}:${remotePort}`;
    return `${ends}, ${readyState}, ${bytesRead} bytes in, ${bytesWritten} out`;
  });
}

/** Whether the same invariant fails in a world that is played alone. */
async function failsAgain({ world, find }: Failure): Promise<boolean> {
  return (await playWorld(world)).some(({ invariant, what }) =>
    invariant === find.invariant && kindOf(what) === kindOf(find.what)
  );
}

const failsTwice = async (failure: Failure): Promise<boolean> => await failsAgain(failure) && await failsAgain(failure);

/** What a find says, without its numbers and marks: two finds of one kind have most likely one cause. */
const kindOf = (what: string): string => what.replace(/\(.*\)|\d+/g, '').slice(0, 60);

/** The first failure of each kind. */
function firstOfEach(failures: Failure[]): Failure[] {
  const kinds = new Map(failures.toReversed().map((failure) => [kindOf(failure.find.what), failure]));
  return [...kinds.values()].toReversed();
}

/** Leaves out of a world what the find does not need. A race may not come at once, so each try has several. */
async function shrink(failure: Failure, tries = 3): Promise<World> {
  let { world } = failure;
  const stillFails = async (smaller: World): Promise<boolean> => {
    for (let i = 0; i < tries; i++) if (await failsAgain({ world: smaller, find: failure.find })) return true;
    return false;
  };
  const leaveOut = async (make: () => (World | undefined)[]): Promise<void> => {
    for (let i = 0; i < make().length;) {
      const smaller = make()[i];
      if (smaller && await stillFails(smaller)) world = smaller;
      else i++;
    }
  };
  await leaveOut(() =>
    (['tls', 'mostConnections'] as const).filter((key) => world[key]).map((key) => ({ ...world, [key]: undefined }))
  );
  const without = <T>(list: T[], i: number): T[] => list.filter((_, j) => j !== i);
  await leaveOut(() => world.actors.map((_, i) => ({ ...world, actors: without(world.actors, i) })));
  await leaveOut(() => world.phases.map((_, i) => ({ ...world, phases: without(world.phases, i) })));
  await leaveOut(() =>
    world.actors.flatMap((actor, i) =>
      actor.steps.length < 2 ? [undefined] : actor.steps.map((_, j) => ({
        ...world,
        actors: world.actors.with(i, { ...actor, steps: without(actor.steps, j) }),
      }))
    )
  );
  return world;
}

/** What could come and did not. */
function neverCame(): string[] {
  const all = [
    ...KINDS.map((kind) => `actor ${kind}`),
    ...ANSWERS.map((kind) => `answer ${kind}`),
    ...PHASES.map((kind) => `phase ${kind}`),
    ...EVENTS.map((kind) => `event ${kind}`),
    ...Object.keys(CHANGES).map((kind) => `rules ${kind}`),
  ];
  return all.filter((name) => !CAME.has(name));
}

/** Prints what became of each request. */
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

/** Invariant 6: a world that is played again and again leaves no memory behind, where a collection can be asked for. */
async function checkMemory(seed: number): Promise<Find[]> {
  if ('Bun' in globalThis || 'Deno' in globalThis) return [];
  setFlagsFromString('--expose_gc');
  const collect: () => void = runInNewContext('gc');
  const heapAfter = async (times: number): Promise<number> => {
    for (let i = 0; i < times; i++) await Promise.all([0, 1, 2, 3].map((i) => playWorld(genWorld(seed + i))));
    collect();
    await sleep(10);
    collect();
    return process.memoryUsage().heapUsed / 2 ** 20;
  };
  const first = await heapAfter(2);
  const last = await heapAfter(4);
  if (last < first + 2) return [];
  return [{ invariant: 6, what: `memory grew from ${first.toFixed(1)} to ${last.toFixed(1)} MiB in 16 worlds` }];
}

// ── PLANTED FAULTS ───────────────────────────────────────────────────────────────────────────────

/** A fault that the simulation must find: the invariant that it breaks, and how gateway.ts is changed. */
interface Fault {
  name: string;
  invariants: Invariant[];
  /** A text that gateway.ts holds exactly once. */
  text: string;
  becomes: string;
  /** Needs worlds of large bodies. */
  isLarge?: boolean;
}

/**
 * Known kinds of faults. Each is a patch of text: after the code was written anew, the run says which to renew.
 */
const FAULTS: Fault[] = [
  {
    name: 'retry after any error',
    invariants: [1],
    text: 'incoming = await transmit(exchange, outgoing, content, upgrade !== undefined);',
    becomes: `incoming = await transmit(exchange, outgoing, content, upgrade !== undefined).catch(async (error) => {
      if (exchange.endedBy?.code !== 'bad_backend_answer') throw error;
      exchange.endedBy = undefined;
      const again = await connectInTurn(exchange, request, isLarge(content));
      return transmit(exchange, again, content, upgrade !== undefined);
    });`,
  },
  {
    name: 'a slot kept by a client that left',
    invariants: [6, 5],
    text: '    if (slot === undefined) return;\n',
    becomes: "    if (slot === undefined || exchange.endedBy?.code === 'client_left') return;\n",
  },
  {
    name: "a cut answer's socket kept",
    invariants: [6],
    text: `    if (incoming?.readableEnded === false) incoming.socket.destroy();
    // Ends the request to the backend too: the backend never gets the last byte of an upload that is refused.
    exchange.end(error instanceof Problem ? error : new Problem('bad_backend_answer', reasonOf(error)));
`,
    becomes: '',
  },
  {
    name: 'fields behind the head unchecked',
    invariants: [3],
    text: 'scan.takeFields().forEach(check);\n      if (this.#isComplete) await beforeEnd();',
    becomes: 'scan.takeFields();\n      if (this.#isComplete) await beforeEnd();',
  },
  {
    name: 'no error listener on a refused upgrade',
    invariants: [7],
    text: "  socket.on('error', () => socket.destroy()); // first",
    becomes: '  // first',
  },
  {
    name: '504 told as busy',
    invariants: [2],
    text: "waitUntil(isHere, timeoutMs, 'backend_timeout')",
    becomes: "waitUntil(isHere, timeoutMs, 'busy')",
  },
  {
    name: 'pipelined requests in parallel',
    invariants: [4, 5],
    text: "    if (previous !== undefined) await once(previous, 'close');\n",
    becomes: '',
  },
  {
    name: 'the raw path in the log',
    invariants: [8],
    text: 'maskPath(target.segments)',
    becomes: "target.segments.join('/')",
  },
  {
    name: 'the connect timer that outlives the connection',
    invariants: [1, 5],
    text: '    const onConnect = () => {\n      clearTimeout(timer);\n',
    becomes: '    const onConnect = () => {\n',
  },
  {
    name: 'a request behind a closing connection is acted on',
    invariants: [2, 4],
    text: '!socket.destroyed && !connection.isClosing',
    becomes: '!socket.destroyed',
  },
  {
    name: 'a POST whose body is refused in the same turn is acted on',
    invariants: [2],
    text: '    exchange.throwIfEnded(); // respondUnparsed may have refused a POST in the turn in which it came\n',
    becomes: '',
  },
  {
    name: 'HTTP/1.0 believed to be kept',
    invariants: [4],
    text: 'hasArrived && !isOld && !isSendByGet',
    becomes: 'hasArrived && !isSendByGet',
  },
  {
    name: 'a probe by bare TCP opens the gate',
    invariants: [7],
    text: 'await connect(this, request, core.connectTimeoutMs)',
    becomes: "await connect(this, { ...request, protocol: 'http:' }, core.connectTimeoutMs)",
  },
  {
    name: 'a probe that trusts every certificate',
    invariants: [7],
    text: 'await connect(this, request, core.connectTimeoutMs)',
    becomes: 'await connect(this, { ...request, rejectUnauthorized: false } as never, core.connectTimeoutMs)',
  },
  {
    name: 'a reload keeps the old tokens',
    invariants: [3],
    text: "core.rules = makeRules({ ...settings, ...kept, ...(isSameBackend && { 'backend.url': backend }) });",
    becomes: `core.rules = {
    ...makeRules({ ...settings, ...kept, ...(isSameBackend && { 'backend.url': backend }) }),
    tokens: core.rules.tokens,
  };`,
  },
  {
    name: 'a new connection closes one that is served',
    invariants: [4],
    text: 'find(([, { token }]) => token === undefined)',
    becomes: 'find(() => true)',
  },
  {
    name: 'unfinished uploads without a bound',
    invariants: [3],
    isLarge: true,
    text: "  if (ownBytes > 2 * exchange.rules['limits.body']) throw new Problem('busy', 'unfinished_uploads');\n",
    becomes: '',
  },
  {
    name: 'the limit on unlent slots only',
    invariants: [5],
    text: ' ||\n        this.#slots.filter(isOwn).length >= 2 * parallel - 1;',
    becomes: ';',
  },
  {
    name: 'no give-back at the gate',
    invariants: [5, 6],
    text: '      slots.release(exchange);\n      await gate.wait(exchange);\n',
    becomes: '      await gate.wait(exchange);\n',
  },
];

/** Plays against a copy of gateway.ts with each fault, in a process of its own. @returns how many were not found. */
async function playPlanted(seconds: number, seed: number, only: string): Promise<number> {
  const source = readFileSync(FILE, 'utf8');
  const folder = mkdtempSync(join(tmpdir(), 'gateway-fuzz-'));
  let missed = 0;
  for (const fault of FAULTS.filter(({ name }) => name.includes(only))) {
    if (source.split(fault.text).length !== 2) {
      say(`RENEW THIS FAULT: ${fault.name}: its text is not in gateway.ts exactly once`);
      missed++;
      continue;
    }
    const file = join(folder, 'gateway.mts');
    writeFileSync(file, source.replace(fault.text, () => fault.becomes));
    const startMs = performance.now();
    const report = await playFault(file, seconds, seed, fault);
    const found = fault.invariants.find((invariant) => report.includes(`RED: invariant ${invariant},`));
    const took = `${((performance.now() - startMs) / 1000).toFixed(0)} s`;
    if (found === undefined) missed++;
    say(
      found === undefined
        ? `NOT FOUND: ${fault.name}, ${took}\n${report}`
        : `found: ${fault.name}, invariant ${found}, ${took}`,
    );
  }
  rmSync(folder, { recursive: true });
  return missed;
}

/** @returns what a run says that ends at the first find of one of these invariants. */
async function playFault(file: string, seconds: number, seed: number, { invariants, isLarge }: Fault): Promise<string> {
  const args = ['--seconds', seconds, '--seed', seed, '--stop', invariants.join()].map(String);
  if (isLarge) args.push('--large');
  const child = spawn(process.execPath, [...process.execArgv, fileURLToPath(import.meta.url), ...args], {
    env: { ...process.env, GATEWAY_FILE: pathToFileURL(file).href },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let text = '';
  child.stdout.on('data', (chunk) => text += chunk);
  await once(child, 'close');
  return text;
}

// ── KEPT WORLDS ──────────────────────────────────────────────────────────────────────────────────

/** Worlds in which a hole was found, made as small as possible; the comment says which hole. */
export const KEPT_WORLDS: readonly World[] = [
  // A large send was sent twice: the time-out for connecting fired after the connection was made.
  `{"seed":28,"headersMs":338,"stallMs":732,"slotMs":319,"connectMs":151,"lingerMs":191,"timeoutMs":2195,"waitMs":1200,
    "parallel":4,"windowBytes":4096,"phases":[],"connections":[{"deafMs":200},{"deafMs":0}],"actors":[{"kind":"sender",
    "number":0,"atMs":67,"token":"other","steps":[{"route":"send","form":"bearer","shape":"plain","bodyBytes":66000,
    "answer":["goneAfter",5],"chunked":true}]}]}`,
  // GET /v1/about, which libraries ask before each send, did not wait for a backend that restarts.
  `{"seed":6,"headersMs":320,"stallMs":914,"slotMs":256,"connectMs":241,"lingerMs":224,"timeoutMs":2159,"waitMs":900,
    "parallel":0,"windowBytes":4096,"phases":[{"kind":"gone","atMs":50,"forMs":200}],"connections":[{"deafMs":0}],
    "actors":[{"kind":"honest","number":0,"atMs":100,"token":"free","steps":[{"route":"about","form":"query",
    "shape":"plain","bodyBytes":0,"answer":["prompt",0]}]}]}`,
  // Who was told 408 for late headers and completed them had the send acted on.
  `{"seed":0,"headersMs":400,"stallMs":900,"slotMs":200,"connectMs":300,"lingerMs":250,"timeoutMs":2000,"waitMs":600,
    "parallel":1,"windowBytes":0,"phases":[],"connections":[{"deafMs":0}],"actors":[${
    [430, 490, 550, 610, 670, 730, 790, 850].map((ms, number) =>
      `{"kind":"lateHeaders","number":${number},"atMs":0,"token":"free","steps":[{"route":"send","form":"bearer",
        "shape":"plain","bodyBytes":300,"answer":["prompt",0],"pauses":[[30,${ms}]]}]}`
    )
  }]}`,
  // At one slot a token that hangs stopped the others.
  `{"seed":0,"headersMs":400,"stallMs":900,"slotMs":200,"connectMs":300,"lingerMs":250,"timeoutMs":2000,
    "waitMs":600,"parallel":1,"windowBytes":0,"phases":[],"connections":[{"deafMs":0}],
    "actors":[{"kind":"hanger","number":0,"atMs":0,"token":"hanger","together":true,"steps":[{"route":"send",
    "form":"bearer","shape":"plain","bodyBytes":300,"answer":["never",0]},{"route":"send","form":"bearer",
    "shape":"plain","bodyBytes":300,"answer":["never",0]}]},{"kind":"honest","number":0,"atMs":500,
    "token":"free","steps":[{"route":"send","form":"bearer","shape":"plain","bodyBytes":300,"answer":["prompt",
    0]}]},{"kind":"honest","number":1,"atMs":520,"token":"other","steps":[{"route":"send","form":"bearer",
    "shape":"plain","bodyBytes":300,"answer":["prompt",0]}]}]}`,
  // Who had waited for a slot was refused at the first refused connection.
  `{"seed":0,"headersMs":400,"stallMs":900,"slotMs":1900,"connectMs":300,"lingerMs":250,"timeoutMs":2000,
    "waitMs":600,"parallel":1,"windowBytes":0,"phases":[{"kind":"hungThenGone","atMs":100,"forMs":1000}],
    "connections":[{"deafMs":0}],"actors":[{"kind":"honest","number":0,"atMs":150,"token":"other",
    "steps":[{"route":"send","form":"bearer","shape":"plain","bodyBytes":300,"answer":["prompt",0]}]},
    {"kind":"honest","number":1,"atMs":200,"token":"free","steps":[{"route":"send","form":"bearer",
    "shape":"plain","bodyBytes":300,"answer":["prompt",0]}]}]}`,
].map((text) => JSON.parse(text));

/** Plays the kept worlds, some side by side. A find that depends on time must come again when the world is alone. */
export async function playKept(): Promise<Failure[]> {
  const found: Failure[] = [];
  await Promise.all(KEPT_WORLDS.map(async (world) => {
    for (const find of await playWorld(world)) found.push({ world, find });
  }));
  const failures: Failure[] = [];
  for (const failure of found) {
    if (!TIMED.includes(failure.find.invariant) || await failsTwice(failure)) failures.push(failure);
  }
  return failures;
}

// ── COMMAND LINE ─────────────────────────────────────────────────────────────────────────────────

/** Plays one world, and prints what became of each request. */
async function playLoud(world: World): Promise<number> {
  say(JSON.stringify(world));
  const finds = await playWorld(world, true);
  for (const find of finds) sayFailure('RED', { world, find });
  return finds.length;
}

/** Plays new worlds, and prints what was found. @returns how many kinds of finds are red. */
async function playNew({ seed, seconds, side, make }: Required<Run>, stop: string | undefined): Promise<number> {
  say(`seed ${seed}, ${seconds} s, ${side} worlds side by side`);
  if (!hasSmallBuffers) say('this runtime has no _writeGeneric: torn requests are not looked for');
  const startMs = performance.now();
  const stopAt = stop?.split(',').map(Number);
  const result = await simulate({ seed, seconds, side, make, ...(stopAt && { stopAt }) });
  if (!stopAt && make !== genLarge) {
    const large = await simulate({ seed, seconds: seconds / 10, side: 1, make: genLarge });
    for (const key of ['failures', 'warnings'] as const) result[key].push(...large[key]);
    result.worlds += large.worlds;
  }
  const failures = firstOfEach(result.failures);
  for (const warning of result.warnings) sayFailure('WARNING', warning);
  for (const failure of failures) sayFailure('RED', failure);
  const tookS = Math.round((performance.now() - startMs) / 1000);
  say(`${result.worlds} worlds in ${tookS} s, ${failures.length} kinds of finds`);
  const isPart = stopAt !== undefined || make === genLarge;
  const others = isPart ? 0 : await playAlone(seed, seconds);
  const never = isPart ? [] : neverCame();
  if (never.length > 0) say(`never came: ${never.join(', ')}`);
  for (const failure of stopAt ? [] : failures) {
    const { find: { what }, world: { seed } } = failure;
    say(`the smallest world for "${what}" of seed ${seed}:\n${JSON.stringify(await shrink(failure))}`);
  }
  return failures.length + others;
}

/** Plays what must be alone: long texts and processes, a tenth of the time each. @returns how many finds are red. */
async function playAlone(seed: number, seconds: number): Promise<number> {
  const startMs = performance.now();
  const isOver = (): boolean => performance.now() - startMs > seconds * 200;
  const { tried, finds } = await checkTexts(textsOf(seed), Math.max(3, seconds / 10));
  let count = 0;
  if (seconds >= 60) finds.push(...await checkMemory(seed));
  do finds.push(...await playProcess(genProcess(seed + count++))); while (!isOver());
  for (const { invariant, what } of finds) say(`RED: invariant ${invariant}: ${what}\n    ${INVARIANTS[invariant]}`);
  say(`${tried} long texts, ${count} processes, ${finds.length} finds`);
  return finds.length;
}

function main(): Promise<number> {
  const { values } = parseArgs({
    options: {
      seconds: { type: 'string', default: '60' },
      seed: { type: 'string', default: String(Date.now() % 1e9) },
      side: { type: 'string', default: '8' },
      world: { type: 'string' },
      show: { type: 'boolean' },
      large: { type: 'boolean' },
      stop: { type: 'string' },
      planted: { type: 'boolean' },
      only: { type: 'string', default: '' },
    },
  });
  const [seed, seconds] = [Number(values.seed), Number(values.seconds)];
  if (values.world !== undefined) return playLoud(JSON.parse(readFileSync(values.world, 'utf8')));
  const make = values.large ? genLarge : genWorld;
  if (values.show) return playLoud(make(seed));
  if (values.planted) return playPlanted(seconds, seed, values.only);
  return playNew({ seed, seconds, side: values.large ? 1 : Number(values.side), make }, values.stop);
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const count = await main().catch((error) => say(String(error.stack)) ?? 1);
  process.exit(count > 0 ? 1 : 0);
}
