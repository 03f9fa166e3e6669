/**
 * A server of the benchmark in a process of its own:  server.ts ROLE [PORT OF THE BACKEND] [FILE OF THE GATEWAY]
 * It exits when its standard input ends, reports on standard error, and leaves standard output to the gateway's log.
 */

import { createHook } from 'node:async_hooks';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import http from 'node:http';
import type { Session } from 'node:inspector/promises';
import type { AddressInfo } from 'node:net';
import { resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import {
  CONFINED,
  HOOK,
  MESSAGE,
  onLines,
  otherSecret,
  PARALLELS,
  QUEUE_GOALS,
  RUNTIME,
  say,
  SECRET,
  SLOW_MS,
  TEMPLATE,
} from './common.ts';

const [role = '', port = '', file = ''] = process.argv.slice(2);

/** A relay must not forward these; it does nothing else about headers. */
const HOP_BY_HOP = new Set(['host', 'connection', 'keep-alive', 'transfer-encoding']);

function endToEnd(headers: Iterable<readonly [string, string | string[] | undefined]>): Record<string, string> {
  return Object.fromEntries([...headers].filter(([name]) => !HOP_BY_HOP.has(name))) as Record<string, string>;
}

function httpRelay(port: string): http.Server {
  // On Deno a request is resent if a reused connection fails, so the gateway reuses none there.
  const agent = new http.Agent({ keepAlive: RUNTIME !== 'Deno' });
  return http.createServer((req, res) => {
    const headers = endToEnd(Object.entries(req.headers));
    const options = { host: '127.0.0.1', port, method: req.method!, path: req.url!, headers, agent };
    req.pipe(http.request(options, (answer) => {
      res.writeHead(answer.statusCode!, endToEnd(Object.entries(answer.headers)));
      answer.pipe(res);
    }));
  });
}

/** A server that always gives the same response, some time after it has read the request, or at once. */
function always(status: number, answer: object, reads: boolean, afterMs = 0): http.Server {
  const body = JSON.stringify(answer);
  // The server drops no connection while others have their turn, because that would break a bare relay.
  return http.createServer({ keepAliveTimeout: 0 }, (req, res) => {
    const say = (): unknown =>
      res.writeHead(status, { 'Content-Type': 'application/json', 'Content-Length': body.length }).end(body);
    if (reads) req.resume().on('end', () => afterMs > 0 ? setTimeout(say, afterMs) : say());
    else say();
  });
}

/** Imported here and not above, so that the other roles do not pay for it. */
async function gateway(port: string, file: string, parallel = 0, others = 0): Promise<http.Server> {
  const { createGateway } = await import(pathToFileURL(resolve(file)).href);
  const { server, listen } = createGateway({
    backend: { url: `http://127.0.0.1:${port}`, parallel },
    listen: '127.0.0.1:0',
    tokens: {
      bench: { secret: SECRET },
      confined: {
        secret: CONFINED,
        allow: ['send'],
        senders: [MESSAGE.number],
        recipients: MESSAGE.recipients,
        rate: '100000/1s',
      },
      hook: { secret: HOOK, defaults: { number: MESSAGE.number, recipients: MESSAGE.recipients }, message: TEMPLATE },
      ...Object.fromEntries(Array.from({ length: others }, (_, i) => [`other-${i}`, { secret: otherSecret(i) }])),
    },
  });
  await listen();
  return server;
}

const SERVERS: Record<string, (port: string, file: string) => http.Server | Promise<http.Server>> = {
  gateway: (port, file) => gateway(port, file),
  beside: (port, file) => gateway(port, file),
  'small young': (port, file) => gateway(port, file),
  'node:http relay': httpRelay,
  'bare 401': () => always(401, { error: 'A valid API token is required.', code: 'unauthorized' }, false),
  backend: () => always(201, { timestamp: '1' }, true),
  'slow backend': () => always(201, { timestamp: '1' }, true, SLOW_MS),
  ...Object.fromEntries(PARALLELS.map((name) => [
    name,
    (port: string, file: string) => gateway(port, file, Number(name.split(' ')[1])),
  ])),
  ...Object.fromEntries(
    Object.keys(QUEUE_GOALS).map((tokens) => [
      `${tokens} tokens`,
      (port: string, file: string) => gateway(port, file, 4, Number(tokens)),
    ]),
  ),
};

/** Listens, reports its port, and reports its usage on request. */
async function serve(server: http.Server): Promise<void> {
  if (!server.listening) await once(server.listen(0, '127.0.0.1'), 'listening'); // the gateway already does
  server.keepAliveTimeout = 0; // no connection is dropped while others have their turn
  say({ port: (server.address() as AddressInfo).port });
  let profile: Session | undefined;
  let endCount = (): Promise<object> | object => ({});
  onLines(async (line) => {
    const { profiles, counts } = JSON.parse(line) as { profiles?: boolean; counts?: 'heap' | 'promises' };
    const { user, system } = process.cpuUsage();
    const slotsUs = profile ? await endProfile(profile) : 0;
    profile = profiles ? await startProfile() : undefined;
    const highBytes = process.resourceUsage().maxRSS * 1024;
    const counted = await endCount();
    endCount = counts ? await startCount(counts) : () => ({});
    say({ cpuUs: user + system, bytes: process.memoryUsage.rss(), highBytes, slotsUs, ...counted });
  });
}

/** Counts what is allocated on the heap, or the promises that are made, until the returned function is called. */
async function startCount(what: 'heap' | 'promises'): Promise<() => Promise<object> | object> {
  if (what === 'promises') {
    let promises = 0;
    const hook = createHook({ init: (_, type) => void (type === 'PROMISE' && promises++) }).enable();
    return () => {
      hook.disable();
      return { promises };
    };
  }
  const { Session } = await import('node:inspector/promises');
  const session = new Session();
  session.connect();
  await session.post('HeapProfiler.startSampling', {
    samplingInterval: 1024, // in bytes
    includeObjectsCollectedByMajorGC: true,
    includeObjectsCollectedByMinorGC: true,
  });
  return async () => {
    const { profile: { head } } = await session.post('HeapProfiler.stopSampling');
    session.disconnect();
    const bytesOf = ({ selfSize, children }: typeof head): number =>
      children.reduce((sum, child) => sum + bytesOf(child), selfSize);
    return { heapBytes: bytesOf(head) };
  };
}

async function startProfile(): Promise<Session> {
  const { Session } = await import('node:inspector/promises');
  const session = new Session();
  session.connect();
  await session.post('Profiler.enable');
  await session.post('Profiler.setSamplingInterval', { interval: 100 }); // in microseconds
  await session.post('Profiler.start');
  return session;
}

/** @returns the microseconds spent since the start in the class `Slots` and in what it called outside the file. */
async function endProfile(session: Session): Promise<number> {
  const { profile: { nodes, samples = [], timeDeltas = [] } } = await session.post('Profiler.stop');
  session.disconnect();
  const lines = readFileSync(file, 'utf8').split('\n');
  const from = lines.indexOf('class Slots {');
  const to = lines.indexOf('}', from);
  const { href } = pathToFileURL(resolve(file));
  const parents = new Map(nodes.flatMap(({ id, children = [] }) => children.map((child) => [child, id])));
  const frames = new Map(nodes.map(({ id, callFrame }) => [id, callFrame]));
  const isInSlots = (id: number | undefined): boolean => {
    while (id !== undefined && frames.get(id)!.url !== href) id = parents.get(id);
    const line = id === undefined ? -1 : frames.get(id)!.lineNumber;
    return line >= from && line <= to;
  };
  return samples.reduce((sum, id, i) => isInSlots(id) ? sum + timeDeltas[i]! : sum, 0);
}

await serve(await SERVERS[role]!(port, file));
