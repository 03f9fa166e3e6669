/** What is checked at the end of a world of time. */

import { once } from 'node:events';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Peer } from './backend.ts';
import { exchange, makeRequest, Wire } from './client.ts';
import { until } from './clock.ts';
import type { Invariant } from './finds.ts';
import { BROKEN, HONEST, type Kind, type Step, type TokenName } from './parts.ts';
import type { Play } from './play.ts';
import type { Asked, Response } from './story.ts';
import type { Line } from './under-test.ts';

const isOfGate = ({ waiting, message }: Line): boolean =>
  typeof waiting === 'number' && !/answer/.test(String(message));
const shuts = ({ message }: Line): boolean => !/again/.test(String(message));

/** The codes of the gateway that leave open whether the backend has acted. */
export const OPEN_CODES = ['bad_backend_answer', 'backend_timeout', 'internal_error'];

/** The gateway's own code, if a response is a refusal. */
export function codeOf({ headers, body, isComplete }: Response): string | undefined {
  if (headers.has('x-answer') || !isComplete) return undefined;
  const [, code] = /"code":"([a-z_]+)"/.exec(body.toString()) ?? [];
  return code;
}

/** Invariants 2, 4 and 5, for each request. */
export function checkRequests(play: Play): void {
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
    // A handshake may be over when a shutdown starts, or a reload refuses it.
    const isEnded = route === 'socket' && (code === 'shutting_down' || play.versions.length > 1);
    const isOpen = code === undefined || OPEN_CODES.includes(code) || isEnded;
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

/** Invariant 3: a request is refused only by rules that were in force while it ran. */
function checkRefusal(play: Play, asked: Asked, code = ''): void {
  if (!/^(?:unauthorized|too_many_failures|(?:endpoint|sender|recipient)_not_allowed)$/.test(code)) return;
  const verdicts = play.verdicts(asked, 'loopMs', asked.startedLoopMs, asked.endedLoopMs!);
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
export function checkLog(play: Play): void {
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
export async function checkSlots(play: Play): Promise<void> {
  const { seed, parallel, slotMs, timeoutMs, waitMs } = play.world;
  await sleep(slotMs + 50); // a request whose client has disconnected keeps its slot this long
  const count = parallel || 6;
  const wires: Wire[] = [];
  const step: Step = { route: 'send', auth: 'bearer', shape: 'plain', bodyBytes: 0, answer: ['prompt', 0] };
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
export async function checkEnd(play: Play): Promise<void> {
  const { standIn, sockets } = play;
  for (const socket of sockets) socket.destroy();
  if (!await until(() => play.held === 0, 1500)) play.find(6, `${play.held} connections of clients are left`);
  const busy = (): Peer[] => [...standIn.peers.values()].filter(({ isBusy }) => isBusy);
  if (!await until(() => busy().length === 0, 1500)) play.find(6, `${busy().length} requests at the backend are left`);
  const ms = await (play.closing ?? play.close());
  // In mid-operation, running requests may finish until the deadline.
  if (ms > (play.closing ? 2700 : 700)) play.find(6, `close() took ${Math.round(ms)} ms`);
}
