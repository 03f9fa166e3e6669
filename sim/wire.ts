/**
 * Connections as no program writes them: requests of every method, with upgrades and bodies where none belong, several
 * in one packet, cut at any byte, and reset at any moment. The gateway of such a world is a separate process, started
 * by its command line. Its clients do not wait for responses, and read only whose response they got: what is checked is
 * the process, its log, and by X-Request-Id the stand-in.
 */

import net from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import tls from 'node:tls';
import type { Draw } from './chance.ts';
import { expect } from './client.ts';
import { until } from './clock.ts';
import type { Find } from './finds.ts';
import { chunked } from './messages.ts';
import {
  ANSWERS,
  type Batch,
  BODIES,
  FRAMINGS,
  type RouteName,
  type Step,
  type WireClient,
  type WireRequest,
} from './parts.ts';
import type { Play } from './play.ts';
import { House } from './process.ts';
import { ELSE, FROM, secretOf, TO, WORD } from './tokens.ts';
import { ROUTES } from './worlds.ts';

/** The first lines of requests; the stand-in answers unknown routes as `unknown`. */
const LINES = [
  ...[...Object.values(ROUTES), ROUTES.send],
  ...'CONNECT x:80|CONNECT x:80|OPTIONS *|OPTIONS /v2/send|HEAD /v1/about|GET http://x/v1/about'.split('|'),
  ...'GET /v2/send?message=…|GET /v2/send?message=…|BREW /v1/about|PATCH /v2/send|GET  /v1/about'.split('|'),
];
const routeOf = (line: number): RouteName =>
  (Object.keys(ROUTES) as RouteName[]).find((name) => ROUTES[name] === LINES[line]) ?? 'unknown';
const UPGRADES = ['websocket', 'websocket', 'h2c', 'TLS/1.0', 'websocket, h2c', ''];
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

export function genWireClient(draw: Draw): WireClient {
  const genRequest = (): WireRequest => ({
    line: draw.below(LINES.length),
    ...(draw.chance(0.3) && { upgrade: draw.pick(UPGRADES) }),
    auth: draw.pick(['bearer', 'bearer', 'basic', 'query', 'path', 'none']),
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
function writeWire({ line, upgrade, auth, wrong, framing, body, closes }: WireRequest, mark: string): Buffer {
  const text = LINES[line]!.replace('…', mark);
  const secret = wrong ? `${WORD}-nobody-0123456789` : secretOf(text.startsWith('GET /v2') ? 'maker' : 'free');
  const [method, target = ''] = text.split(/ (?=\S)/);
  const before = auth === 'path' ? `/@auth=${secret}` : '';
  const path = `${before}${target}${auth === 'query' ? `${target.includes('?') ? '&' : '?'}@auth=${secret}` : ''}`;
  const filler = 'y'.repeat(/arge/.test(body) ? 70_000 : 9);
  const send = JSON.stringify({ number: FROM, recipients: [TO], message: `${mark} x`, filler });
  const content = Buffer.from(framing === 'none' ? '' : send.replace(/}$/, /broken/.test(body) ? ',}' : '}'));
  const extra = { tooLong: 30, tooShort: -20 }[framing as 'tooLong'] ?? 0;
  const isChunked = framing === 'chunked' || framing === 'extended';
  const lines = [
    `${method} ${path} HTTP/1.1`,
    'Host: gateway',
    `X-Mark: ${mark}`,
    ...(auth === 'bearer' ? [`Authorization: Bearer ${secret}`] : []),
    ...(auth === 'basic' ? [`Authorization: Basic ${btoa(`api:${secret}`)}`] : []),
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

export async function playWires({ seed, tls: isTls, parts }: Batch<'wire'>): Promise<Find[]> {
  const house = await new House(seed).open(isTls);
  const note = ({ line, wrong, auth, answer, upgrade }: WireRequest, mark: string): string => {
    const route = upgrade?.startsWith('websocket') ? 'socket' : routeOf(line);
    const step: Step = { route, auth: 'bearer', shape: 'plain', bodyBytes: 100_000, answer };
    if (wrong || auth === 'none') step.wrong = true;
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
