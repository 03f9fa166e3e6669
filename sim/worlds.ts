/**
 * Worlds of time: honest, odd and hostile clients at the same time, in front of a backend that hangs, breaks off and
 * lies. This module makes them from a seed, and so the worlds of large bodies.
 */

import { type Draw, generator } from './chance.ts';
import {
  type Actor,
  ANSWERS,
  CHANGE_NAMES,
  HONEST,
  type Kind,
  KINDS,
  type Phase,
  PHASES,
  type RouteName,
  SHAPES,
  type Step,
  type Times,
  type TokenName,
  words,
  type World,
} from './parts.ts';
import { FROM, GROUP, WORD } from './tokens.ts';
import { AUTH_METHODS } from './under-test.ts';

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
    ...{ route: 'socket', auth: draw.pick(['bearer', 'basic', 'query', 'path']), wrong: draw.chance(0.4) },
    ...{ keptMs: draw.pick([50, 50, 800]), ...(draw.chance(0.5) && { leave: [draw.below(4), 'reset'] }) },
  }),
  // Asks for a WebSocket, and gets an ordinary response.
  declined: (draw) => ({
    ...{ route: 'socket', auth: draw.pick(['bearer', 'path']), bodyBytes: 300_000 },
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
    ...(draw.chance(0.7) && { change: [draw.pick(['guest', 'guest', 'hanger']), draw.pick(CHANGE_NAMES)] }),
  }),
  // In worlds of large bodies only.
  uploader: () => ({ answer: ['prompt', 0], keptMs: 0 }),
} satisfies Record<Kind, (draw: Draw, times: Times, wireBytes: number) => Partial<Step>>;
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

/** The requests of a step. */
export const ROUTES: Record<RouteName, string> = {
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

export const hasBody = ({ route }: Step): boolean => /send|join|quit|remove/.test(route);

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
      ...{ route: 'send', auth: draw.pick(AUTH_METHODS), shape: 'plain' },
      bodyBytes: isLarge ? draw.pick([66_000, 90_000, 200_000]) : draw.pick([0, 300, 5000, 60_000]),
      answer: HONEST.includes(kind) ? ['prompt', 0] : [draw.pick(ANSWERS.slice(0, -1)), draw.pick([0, 5, 40, 150])],
      ...(draw.chance(0.4) && { chunked: true }),
    };
    const step: Step = { ...usual, ...WAYS[kind](draw, world, usual.bodyBytes + 250) };
    if (step.auth === 'body' && !hasBody(step)) step.auth = 'bearer';
    return step;
  };
  const steps = Array.from({ length: draw.between(least, most) }, genStep);
  // A crowd arrives after an absence has started.
  const beginMs = (kind === 'crowd' && world.phases[0]?.atMs) || 0;
  const atMs = beginMs + draw.between(0, { hanger: 300, crowd: 150 }[kind as 'crowd'] ?? 1200);
  return { kind, number, atMs, token, ...(together && { together }), steps };
}
