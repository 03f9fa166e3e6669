/** The parts that actors play: clients, and the one that reloads the configuration. */

import { setTimeout as sleep } from 'node:timers/promises';
import type { Absence } from './backend.ts';
import { exchange, makeRequest, Wire } from './client.ts';
import { loopMs, until } from './clock.ts';
import { came } from './finds.ts';
import type { Actor, Changes, Step } from './parts.ts';
import type { Play } from './play.ts';
import type { Asked } from './story.ts';

/** Plays an actor's part. */
export async function runActor(play: Play, actor: Actor): Promise<void> {
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
      const { tokens, ...others } = play.config(parallel);
      play.gateway.reload(isWrong ? others : { tokens: tokens!, ...others });
      if (isWrong) play.find(7, 'a reload without tokens is accepted');
    } catch (error) {
      if (!isWrong) throw error;
    }
    await sleep(keptMs);
  }
  change({}, '');
  if (play.closing === undefined) play.gateway.reload(play.config());
}
