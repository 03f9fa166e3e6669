/** Every place where a client can put a token, and every place where programs copy it. */

import http from 'node:http';
import { groupsOf } from './assertions.ts';
import type { Ask } from './client.ts';
import { SOURCE } from './files.ts';
import { parseRow } from './rows.ts';
import { AS_FORM, AUTHED, basic, MESSAGE, signed } from './samples.ts';

/** Every place where a client can put a token, in every spelling that real clients send. */
export const SPELLINGS = ([
  ['bearer', 'bearer', (token) => signed(`Bearer ${token}`)],
  ['bearer, scheme in another case', 'bearer', (token) => signed(`bEARER   ${token}`)],
  ['basic', 'basic', (token) => signed(basic(`api:${token}`))],
  ['basic, scheme in another case', 'basic', (token) => signed(basic(`api:${token}`).replace('Basic', 'BASIC'))],
  ['query', 'query', (token) => ({ path: `/v2/send?@auth=${token}` })],
  ['query as %40auth', 'query', (token) => ({ path: `/v2/send?x=1&%40auth=${token}&y=2` })],
  ['path', 'path', (token) => ({ path: `/@auth=${token}/v2/send` })],
  ['path as %40auth=', 'path', (token) => ({ path: `/%40auth=${token}/v2/send` })],
  ['path as %40auth%3D', 'path', (token) => ({ path: `/%40auth%3D${token}/v2/send` })],
  ['path behind a base URL that ends in a slash', 'path', (token) => ({ path: `//@auth=${token}//v2/send` })],
  ['body', 'body', (token) => ({ body: AUTHED(token) })],
  ['body, last and without a Content-Type', 'body', (token) => ({ body: { ...MESSAGE, auth: token } })],
  ['body as application/x-www-form-urlencoded', 'body', (token) => ({ body: AUTHED(token), headers: AS_FORM })],
  ['body, the key with escapes', 'body', (token) => ({ body: AUTHED(token).replace('auth', '\\u0061u\\u0074h') })],
] as [name: string, method: string, ask: (token: string) => Ask][]).map(([name, method, ask]) => ({
  name,
  method,
  ask,
}));

/** Headers into which clients, browsers and proxies copy a URL with its token, in their spellings. */
export function copiesOf(token: string): http.OutgoingHttpHeaders[] {
  const encoded = Array.from(Buffer.from(token), (byte) => `%${byte.toString(16)}`).join('');
  const rows = `
    referer: http://gateway/@auth=${token}/swagger/index.html | x-original-url: /@auth=${token}/v2/send | x-original-uri: /v2/send?@auth=${token} | x-original-method: ${token} | x-rewrite-url: /v2/send?%40auth=${encoded} | x-envoy-original-path: /@auth=${token}/v2/send | x-forwarded-uri: /@auth=${token}/v2/send | x-replaced-path: /@auth=${token}/v2/send | cookie: auth=${token}
    host: api:${token}@gateway
    host: api:${encoded}@gateway`;
  return rows.trim().split('\n').map((row) => Object.fromEntries(parseRow(row).headers));
}

/**
 * The headers in which a client can write anything: all that gateway.ts has a word for, and common ones. So a header that
 * gateway.ts begins to read is one of them.
 */
export const HEADER_NAMES = [
  ...new Set([
    ...groupsOf(SOURCE, /['\s]([A-Za-z]\w*(?:-\w+)+)(?=['\s])/g).map((name) => name.toLowerCase()),
    ...groupsOf(SOURCE, /\b[hH]eaders\.([a-z]+)\b/g),
    ...'host origin referer cookie from via range expect upgrade user-agent x-request-id'.split(' '),
  ]),
].filter((name) => !['content-length', 'transfer-encoding', 'connection'].includes(name));
