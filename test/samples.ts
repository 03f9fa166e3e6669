/** The tokens, accounts, messages and requests that tests use as examples. */

import type { Ask } from './client.ts';

export const SECRET = 'correct-horse-battery-staple';

export const OTHER = 'another-secret-that-is-long';

export const LAST = 'a-third-secret-of-one';

/** For text that must contain neither of them. */
export const SECRETS = new RegExp(`${SECRET}|${OTHER}`);

export const BEARER = { authorization: `Bearer ${SECRET}` };

export const AS_OTHER = { authorization: `Bearer ${OTHER}` };

export const basic = (userinfo: string): string => `Basic ${Buffer.from(userinfo).toString('base64')}`;

export const signed = (authorization: string): Ask => ({ headers: { authorization } });

export const FROM = '+15550100001';

export const TO = '+15550100002';

export const THIRD = '+15550100003';

export const STRANGER = '+15559999999';

/** A group as signal-cli knows it (32 bytes), and as the backend names it, base64 encoded twice. */
export const INTERNAL_ID = Buffer.from('a group has an id of 32 bytes...').toString('base64');

export const GROUP = `group.${Buffer.from(INTERNAL_ID).toString('base64')}`;

/** Base64 of the same bytes, with other values in its unused bits. */
export const otherBits = (id: string): string =>
  id.replace(/.=$/, (end) => `${String.fromCharCode(end.charCodeAt(0) + 1)}=`);

export const MESSAGE = { message: 'hello', number: FROM, recipients: [TO] };

/** The same as JSON, and with a token in its body. */
export const HELLO = JSON.stringify(MESSAGE);

export const AUTHED = (token: string): string => `{"auth":"${token}",${HELLO.slice(1)}`;

/** A message of exactly this many bytes. */
export const sized = (bytes: number): string => `{"x":"${'x'.repeat(bytes - HELLO.length - 7)}",${HELLO.slice(1)}`;

export const DEFAULTS = { number: FROM, recipients: [TO] };

export const MIB = 1024 * 1024;

export const CHROME =
  `User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/156.0.0.0`;

export const DASHBOARD = 'https://dash.example:8443';

export const ASKED = 'Access-Control-Request-Method: POST';

export const URLENCODED = 'application/x-www-form-urlencoded';

export const AS_FORM = { 'content-type': URLENCODED };

/** A form as browsers and libraries encode it. */
export function multipart(fields: [name: string, value: string, more?: string][]): string {
  const parts = fields.map(([name, value, more = '']) =>
    `--limit\r\nContent-Disposition: form-data; name="${name}"${more}\r\n\r\n${value}\r\n`
  );
  return `${parts.join('')}--limit--\r\n`;
}

export const AS_MULTIPART = 'multipart/form-data; boundary=limit';

export const RECEIVE = `/v1/receive/${FROM}`;

export function post(token: string, length: number | 'chunked', ...headers: string[]): string {
  const framing = length === 'chunked' ? 'Transfer-Encoding: chunked' : `Content-Length: ${length}`;
  const lines = ['POST /v2/send HTTP/1.1', 'Host: x', `Authorization: Bearer ${token}`, framing, ...headers, '', ''];
  return lines.join('\r\n');
}

export const ABOUT = `GET /v1/about HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${SECRET}\r\n\r\n`;

export const SEND = `${post(SECRET, HELLO.length)}${HELLO}`;

export const HEALTH = 'GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n';

export const REFUSED = 'GET /v1/about HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer x\r\n\r\n';

/** A request for a WebSocket, without a credential. */
export const HANDSHAKE = `GET ${RECEIVE} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n`;

export const SENT = 'HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}';

export const TOO_MANY = '431 too_many_headers';
