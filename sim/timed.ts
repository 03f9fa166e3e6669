/** Plays a world of time: its actors, then the checks. */

import { runActor } from './actors.ts';
import { checkEnd, checkLog, checkRequests, checkSlots, codeOf } from './checks.ts';
import { isLate, watch } from './clock.ts';
import type { Find } from './finds.ts';
import type { World } from './parts.ts';
import { Play } from './play.ts';

/** Plays a world, and returns what was found. @param say prints the outcome of each request. */
export async function playWorld(world: World, say?: (text: string) => void): Promise<Find[]> {
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
    if (say) tell(play, say);
  } finally {
    watch(play, false);
    for (const socket of play.sockets) socket.destroy();
    await play.standIn.close();
  }
  return play.finds.map((find) => ({ ...find, isDoubtful: find.isTimed && play.lateMs >= 150 }));
}

/** Says what became of each request. */
function tell({ asked, standIn, lines, lateMs }: Play, say: (text: string) => void): void {
  for (const { mark, startedMs, endedMs = 0, response, arrivals, acts, step } of asked.values()) {
    const told = response && `${response.status} ${codeOf(response) ?? ''}${response.isComplete ? '' : ' cut'}`;
    const times = `${Math.round(startedMs)} to ${Math.round(endedMs)}`;
    say(`${mark.padEnd(16)} ${times}: arrived ${arrivals}, acted ${acts}, told ${told} | ${JSON.stringify(step)}`);
  }
  say(`absences ${JSON.stringify(standIn.absences)}, the loop was late by ${Math.round(lateMs)} ms`);
  for (const line of lines) if (line.message !== 'listening') say(JSON.stringify(line));
}
