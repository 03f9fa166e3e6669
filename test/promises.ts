/** What the tests of gateway.test.ts share: the tokens and messages that they use, and the two ways to assert a refusal. */

import { assert } from './assertions.ts';
import { type Ask, ask } from './client.ts';
import type { Both } from './process.ts';

export const SECRET = 'correct-horse-battery-staple';
export const OTHER = 'another-secret-that-is-long';
export const GUESS = 'what-a-stranger-guesses';
/** The account, whom its tokens may write to, and somebody else. */
export const [ACCOUNT, FRIEND, STRANGER] = ['+15550100001', '+15550100002', '+15559999999'];
export const MESSAGE = { message: 'hello', number: ACCOUNT, recipients: [FRIEND] };
export const HELLO = JSON.stringify(MESSAGE);
export const MIB = 1024 * 1024;

export const bearer = (secret: string) => ({ authorization: `Bearer ${secret}` });
export const basic = (userinfo: string) => ({ authorization: `Basic ${Buffer.from(userinfo).toString('base64')}` });
export const [AS_FIRST, AS_SECOND] = [bearer(SECRET), bearer(OTHER)];
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

/** The token as it is, and as Basic encodes it. */
export const TRACES = new RegExp(`${SECRET.slice(1)}|${Buffer.from(`api:${SECRET}`).toString('base64').slice(8, -8)}`);

export const PAGE = 'https://dash.example';
/** What browsers add to what another site's page, a link or a typed address makes them request. */
export const BROWSERS = [
  { 'user-agent': 'Mozilla/5.0 (X11; Linux x86_64)' }, // of a GET
  { origin: 'https://evil.example' },
  { origin: 'null' },
  { 'sec-fetch-site': 'cross-site' },
  { 'sec-fetch-site': 'none' },
  { 'upgrade-insecure-requests': '1' },
];

/** The gateway itself refuses each of these requests, of which a text is the path of a GET. */
export async function assertRefused(
  { gateway }: Both,
  outcome: RegExp,
  requests: (Ask | string)[],
  headers: object = AS_FIRST,
) {
  for (const each of requests) {
    const request = typeof each === 'string' ? { path: each } : each;
    const { status, json, text } = await ask(gateway, { ...request, headers: { ...headers, ...request.headers } });
    assert.match(`${status} ${json?.code}`, outcome, `${JSON.stringify(request)} got ${status} ${text}`);
  }
}

/** A good send is the first thing that the backend sees, on its first connection: nothing came before it. */
export async function assertUntouched({ backend, gateway }: Both, headers: object = AS_FIRST) {
  assert.equal((await ask(gateway, { body: MESSAGE, headers: { ...headers } })).status, 201);
  assert.deepEqual(backend.seen.map(({ method, url }) => `${method} ${url}`), ['POST /v2/send']);
  assert.equal(backend.connections, 1);
}
