/**
 * A gateway whose log is read slowly, or not at all, by the process that started it. Each request leaves one line, or
 * is one of the lines that the log says to be dropped.
 */

import http from 'node:http';
import type { Draw } from './chance.ts';
import { isLate, until } from './clock.ts';
import { ask, type Told } from './desk.ts';
import { came, type Find } from './finds.ts';
import type { Batch, Flood } from './parts.ts';
import { House } from './process.ts';
import { secretOf } from './tokens.ts';

/** A path and a header whose log line is as long as one can be, so that 1 MiB of them come soon. */
const LONG = '/rate-limit-challenge'.repeat(8);
const ORIGIN = { Origin: `https://${'x'.repeat(92)}` };

export const genFlood = (draw: Draw): Flood => ({
  requests: draw.pick([300, 2500, 3000]),
  path: draw.pick(['/healthz', LONG, LONG, LONG, LONG]),
  readKiB: draw.pick([0, 0, 0, 100, 900]),
  isRead: draw.chance(0.7),
});

export async function playLog({ seed, parts }: Batch<'log'>): Promise<Find[]> {
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
