/** Accounts, tokens and secrets of all worlds, and how a reload changes a token. */

import type { GatewayConfig } from '../gateway.ts';
import type { Change, Changes, SharedName, Step, TokenName } from './parts.ts';

export const FROM = '+15550100001';
export const TO = '+15550100002';
export const ELSE = '+15550100666';
export const GROUP = `group.${btoa(btoa('a group of thirty-two characters'))}`;
export const LISTS = { senders: [FROM], recipients: [TO] };
export const DEFAULTS = { number: FROM, recipients: [TO] };

/**
 * Lists and defaults at the top level, and what they mean for a token that says nothing of its own: which accounts it may
 * use, and to whom it may send.
 */
export const SHARED = {
  none: { config: {}, accounts: undefined, recipients: undefined },
  lists: { config: LISTS, accounts: [FROM], recipients: [TO] },
  otherLists: { config: { senders: [ELSE], recipients: [ELSE] }, accounts: [ELSE], recipients: [ELSE] },
  defaults: { config: { defaults: DEFAULTS }, accounts: [FROM], recipients: [TO] },
  wider: { config: { defaults: DEFAULTS, recipients: [TO, ELSE] }, accounts: [FROM], recipients: [TO, ELSE] },
  senders: { config: { senders: [FROM] }, accounts: [FROM], recipients: undefined },
  recipients: { config: { recipients: [TO] }, accounts: undefined, recipients: [TO] },
  everyone: { config: { senders: [FROM], recipients: ['*'] }, accounts: [FROM], recipients: undefined },
} satisfies Record<SharedName, object>;

/** All secrets start with a word that occurs nowhere else, and that only the five places may contain. */
export const WORD = 'UNSPOKEN';
export const secretOf = (token: string): string => `${WORD}-${token}-0123456789abcdef`;
/** The word itself, and as Basic encodes it after `api:`. */
export const SECRET_PATTERN = new RegExp(`${WORD}|${btoa(`api:${WORD}`)}`);

/** The tokens of every world. `lists` of the configuration are those that invariant 3 checks. */
export const TOKENS = {
  free: {},
  other: {},
  hanger: {},
  guest: {},
  confined: LISTS,
  watcher: { allow: ['metrics'] },
  maker: { defaults: DEFAULTS, allow: ['send', 'GET /v2/send'] },
} satisfies Record<TokenName, object>;
/** How a reload may change a token, and which requests the token may then not make. */
export const CHANGES: Record<Change, { settings?: object; refuses: (step: Step) => boolean }> = {
  usual: { settings: {}, refuses: () => false },
  removed: { refuses: () => true },
  expired: { settings: { expires: '2020-01-01' }, refuses: () => true },
  onlyBearer: { settings: { methods: ['bearer'] }, refuses: ({ auth }) => auth !== 'bearer' },
  onlyInfo: { settings: { allow: ['info'] }, refuses: ({ route }) => route !== 'about' },
  elsewhere: { settings: { recipients: [ELSE] }, refuses: ({ route }) => route === 'send' },
};
/** The tokens of a configuration. */
export const tokensWith = (changes: Changes): NonNullable<GatewayConfig['tokens']> =>
  Object.fromEntries(
    Object.entries(TOKENS).flatMap(([name, token]) => {
      const { settings } = CHANGES[changes[name as TokenName] ?? 'usual'];
      return settings ? [[name, { secret: secretOf(name), ...token, ...settings }]] : [];
    }),
  );
