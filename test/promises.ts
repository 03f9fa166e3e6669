/** Configurations and requests of gateway.test.ts, and its two ways to assert a refusal. */

import { assert } from './assertions.ts';
import { type Ask, ask } from './client.ts';
import { ACCOUNT, FRIEND, MESSAGE } from './people.ts';
import type { Both } from './process.ts';
import { AS_FIRST, OTHER, SECRET } from './secrets.ts';

export const MIB = 1024 * 1024;

export const TO_WEBSOCKET = {
  connection: 'Upgrade',
  upgrade: 'websocket',
  'sec-websocket-key': 'dGhlIHNhbXBsZSBub25jZQ==',
};

/** A configuration with this token, and perhaps a second one. */
export function tokens(first: object = {}, second?: object): { tokens: Record<string, object> } {
  return { tokens: { first: { secret: SECRET, ...first }, ...second && { second: { secret: OTHER, ...second } } } };
}

export const CONFINED = tokens({ allow: ['messaging', 'info'], senders: [ACCOUNT], recipients: [FRIEND] });
export const ALL_PLACES = { auth: { methods: ['bearer', 'basic', 'body', 'path', 'query'] } };

/** The gateway itself refuses each of these requests, of which a text is the path of a GET. Returns the outcomes. */
export async function assertRefused(
  { gateway }: Both,
  outcome: RegExp,
  requests: (Ask | string)[],
  headers: object = AS_FIRST,
): Promise<string[]> {
  const outcomes: string[] = [];
  for (const each of requests) {
    const request = typeof each === 'string' ? { path: each } : each;
    const { status, json, text } = await ask(gateway, { ...request, headers: { ...headers, ...request.headers } });
    outcomes.push(`${status} ${json?.code}`);
    assert.match(outcomes.at(-1)!, outcome, `${JSON.stringify(request)} got ${status} ${text}`);
  }
  return outcomes;
}

/** A good send is the first thing that the backend sees, on its first connection: nothing came before it. */
export async function assertUntouched({ backend, gateway }: Both, headers: object = AS_FIRST) {
  assert.equal((await ask(gateway, { body: MESSAGE, headers: { ...headers } })).status, 201);
  assert.deepEqual(backend.seen.map(({ method, url }) => `${method} ${url}`), ['POST /v2/send']);
  assert.equal(backend.connections, 1);
}
