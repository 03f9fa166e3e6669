/** Configurations that several tests use. */

import type { GatewayConfig, TokenConfig } from '../gateway.ts';
import { problemsOf } from './assertions.ts';
import { createGateway, METHOD_NAMES } from './gateway.ts';
import { FROM, LAST, OTHER, SECRET, TO } from './samples.ts';

export { METHOD_NAMES };

export const ALL_METHODS: GatewayConfig = { auth: { methods: [...METHOD_NAMES] } };

export const ALL_GROUPS = { allow: ['messaging', 'setup'] };

export const AT_INFO: GatewayConfig = { log: { format: 'json', level: 'info' } };

/** A token with these settings, and a second token. */
export function tokens(settings: TokenConfig, other?: TokenConfig): GatewayConfig {
  return { tokens: { test: { secret: SECRET, ...settings }, ...(other && { other: { secret: OTHER, ...other } }) } };
}

/** Tokens by name, each with its own secret. */
export function several(names: string): Pick<GatewayConfig, 'tokens'> {
  return { tokens: Object.fromEntries([...names].map((name, i) => [name, { secret: [SECRET, OTHER, LAST][i]! }])) };
}

export const NO_TOKENS = { tokens: undefined } as unknown as GatewayConfig;

export const CONFINED: GatewayConfig = {
  allow: ['messaging', 'info'],
  tokens: { confined: { secret: SECRET, senders: [FROM], recipients: [TO, 'group.*'] } },
};

/** This many slots, at a backend that requests do not wait for while it is down. */
export function slots({ url }: { url: string }, parallel: number, timeout = '1h'): GatewayConfig {
  return { backend: { url, wait: '0', parallel, timeout } };
}

/** What a token may have in the file in addition to its secret: the gateway lists it for one that has anything else. */
export const TOKEN_SETTINGS = problemsOf(() =>
  createGateway({ tokens: { test: { secret: SECRET, none: 1 } } } as object)
)
  .flatMap((problem) => problem.split('; there are ')[1]!.split(', ')).filter((name) => name !== 'secret');

export const MISSING = 'does not exist';
