/** Tokens that turn what they post into sends, and the rows of a table that they need. */

import type { GatewayConfig, TokenConfig } from '../gateway.ts';
import { ALL_FORMS } from './configs.ts';
import { Template } from './gateway.ts';
import { literal } from './rows.ts';
import { DEFAULTS, SECRET, URLENCODED } from './samples.ts';

/** A token that turns what it posts into sends. */
export function hook(token: TokenConfig = { defaults: DEFAULTS }): GatewayConfig {
  return { ...ALL_FORMS, tokens: { hook: { secret: SECRET, ...token } } };
}

export const reading = (message: string): TokenConfig => ({ defaults: DEFAULTS, message });

/** A token with defaults that may use every account and write to everyone. */
export const TO_ALL: TokenConfig = { defaults: DEFAULTS, senders: ['*'], recipients: ['*'] };

export const READS_TEXT = reading('{{text}}');

export const MEANT = JSON.stringify(DEFAULTS);

/** A request that is sent as JSON from and to the defaults, with the fields of its row. */
export const MADE = `POST /v2/send | bearer → 201 | > Content-Type: application/json | ${MEANT}`;

/** Types that may be declared for a form or a text, because curl -d and wget declare the first one for everything. */
export const UNDECLARED = [`Content-Type: ${URLENCODED}; charset=utf-8`, 'Content-Type:', ''].map((type) =>
  `* ${type} | ${MADE}`
);

/** Urlencoded fields in each form: as a body, as a multipart form, and as the query of a GET. */
export const inEachForm = (pairs: string): string[] => [
  `'${pairs}'`,
  Array.from(new URLSearchParams(pairs), ([name, value]) => `-- ${name} = ${value}`).join(' '),
  `GET /v2/send?${pairs}`,
];

export const PNG = literal`Content-Type: image/png = \x89PNG\r\n\x1a\n\x00\xff`;

export const PNG_DATA = 'base64,iVBORw0KGgoA/w==';

export const SNAP = `data:image/png;filename=snap.png;${PNG_DATA}`;

export const LIMIT = 64 * 1024;

export const render = (template: string, data: unknown): string => new Template(template).render(data).text;
