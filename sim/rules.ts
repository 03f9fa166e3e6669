/**
 * A model of the rules judges each request before it is sent, and the gateway must decide the same: which client it is,
 * which credential counts, what its token may do, its rate by the gateway's own clock.
 */

import { batches } from './batches.ts';
import { type Draw, generator } from './chance.ts';
import { Desk, type Letter, type Told } from './desk.ts';
import { came, type Find } from './finds.ts';
import type { Batch, Case, RuleToken, SharedName } from './parts.ts';
import { DEFAULTS, ELSE, FROM, GROUP, LISTS, SECRET_PATTERN, secretOf, SHARED, TO, TOKENS } from './tokens.ts';
import { AUTH_METHODS, ROWS } from './under-test.ts';

const RULE_TOKENS = {
  free: {},
  confined: LISTS,
  derived: { defaults: DEFAULTS },
  near: { clients: ['10.1.0.0/16'] },
  slow: { rate: '3/1m' },
  old: { expires: '2020-01-01' },
  onlyBearer: { methods: ['bearer' as const] },
  half: { senders: [FROM] },
  everyone: { recipients: ['*'] },
} satisfies Record<RuleToken, object>;

/** The routes of `messaging`; `{}` stands for a body. */
const MESSAGING = ROWS.filter(({ group }) => group === 'messaging').map(({ method, template, facts }) =>
  `${method}${facts.includes('body') ? '{}' : ''} ${template}`
);

/** Calls of signal-cli's daemon, with the word of `allow` that opens each. */
const CALLED: Record<string, string> = {
  send: 'send',
  sendTyping: 'messaging',
  listGroups: 'messaging',
  version: 'info',
  startLink: 'setup',
  listContacts: 'setup',
  updateGroup: 'none',
};

function genCase(draw: Draw): Case {
  const tokens = Object.keys(RULE_TOKENS) as RuleToken[];
  const credential = (): Case['credentials'][number] => ({
    auth: draw.pick(AUTH_METHODS),
    token: draw.chance(0.15) ? 'nobody' : draw.pick([...tokens, 'confined', 'confined', 'slow', 'free']),
  });
  return {
    route: draw.chance(0.5) ? 'POST{} /v2/send' : draw.pick([
      ...MESSAGING,
      'GET /v1/receive/:number',
      'GET /v1/about',
      ...Object.keys(CALLED).map((call) => `POST{} /api/v1/rpc ${call}`),
    ]),
    credentials: draw.chance(0.7) ? [credential()] : [credential(), credential()],
    spelling: draw.below(4),
    from: draw.pick(['10.1.0.1', '10.1.9.9', '10.2.0.1', '192.0.2.1, 10.1.0.1', '10.1.0.1, 192.0.2.1', '2001:db8::1']),
    ...(draw.chance(0.3) && { origin: draw.pick(['https://dash.example', 'https://evil.example', 'null']) }),
    ...(draw.chance(0.2) && { browser: draw.pick(['User-Agent', 'Sec-Fetch-Site'] as const) }),
    ...(draw.chance(0.2) && { hasRange: true }),
    ...(draw.chance(0.1) && { hasUnknown: true }),
    account: draw.pick([FROM, FROM, FROM, ELSE]),
    recipient: draw.pick([TO, TO, TO, ELSE]),
    ...(draw.chance(0.2) && { attachment: draw.pick(['', 'data:image/png;filename=a.png;base64,', EVIL_FILE]) }),
    waitMs: draw.pick([0, 0, 1000, 5000, 20_000, 61_000]),
  };
}

/** A case of any route, to a backend that also refuses and breaks off. */
const genCounted = (draw: Draw): Case => ({
  ...genCase(draw),
  ...(draw.chance(0.3) && { route: draw.pick(OTHER_ROUTES) }),
  answer: draw.pick([201, 201, 200, 400, 500, 0]),
});
const OTHER_ROUTES = 'HEAD /v1/about|GET /healthz|GET /v1/nothing|POST{} /v1/register/:number|POST{} /v1/send'.split(
  '|',
);

/** Makes worlds in which, in two of three, lists and defaults stand at the top level. */
const withShared = <K extends 'rules' | 'counts'>(make: (seed: number) => Batch<K>) => (seed: number): Batch<K> => {
  const draw = generator(seed, 'shared');
  return { ...make(seed), shared: draw.chance(0.3) ? 'none' : draw.pick(Object.keys(SHARED) as SharedName[]) };
};
export const genCases = withShared(batches('rules', 60, genCase));
export const genCounts = withShared(batches('counts', 60, genCounted));

const EVIL_FILE = 'data:image/png;filename=../a.png;base64,';
const AUTH_NAMES = ['@auth', '%40auth', '@%61uth', '%40%61uth'];
const ORDER = ['bearer', 'basic', 'path', 'query', 'body'];

/** Writes a case as a request. */
function writeCase({ route, credentials, spelling, from, origin, browser, hasRange, answer, ...sent }: Case): Letter {
  const [methods = '', template = '', call] = route.split(' ');
  const method = methods.replace('{}', '');
  const values: Record<string, string> = { ':number': sent.account, ':groupid': GROUP, ':attachment': 'one.jpg' };
  let path = template.replace(/:\w+/g, (name) => values[name]!);
  if (/^\/v1\/search/.test(path)) path += `?numbers=${encodeURIComponent(sent.recipient)}`;
  const params = {
    ...(call !== 'version' && { account: sent.account }),
    ...(/^send/.test(call ?? '') && { recipient: [sent.recipient] }),
    ...(sent.hasUnknown && { invented: 1 }),
  };
  const document: Record<string, unknown> = call ? { jsonrpc: '2.0', method: call, params, id: 1 } : {
    ...(template === '/v2/send' && { number: sent.account, recipients: [sent.recipient], message: 'x' }),
    ...(/members$|admins$/.test(template) && { [template.split('/').at(-1)!]: [sent.recipient] }),
    ...(methods.includes('{}') && !/send|groups/.test(template) && { recipient: sent.recipient, timestamp: 1 }),
    ...(sent.hasUnknown && { groupId: 'x' }), // signal-cli reads it, and the backend does not
    ...(template === '/v2/send' && sent.attachment !== undefined && { base64_attachments: [`${sent.attachment}QUJD`] }),
  };
  const authorizations: string[] = [];
  let segments = '';
  const name = AUTH_NAMES[spelling]!;
  for (const { auth, token } of credentials) {
    const secret = secretOf(token);
    if (auth === 'bearer') authorizations.push(`Bearer ${secret}`);
    if (auth === 'basic') authorizations.push(`Basic ${btoa(`api:${secret}`)}`);
    if (auth === 'path') segments += `/${name}${spelling % 2 ? '%3D' : '='}${secret}`;
    if (auth === 'query') path += `${path.includes('?') ? '&' : '?'}${name}=${secret}`;
    if (auth === 'body') document.auth = secret;
  }
  const body = methods.includes('{}') ? JSON.stringify(document) : undefined;
  const headers = {
    'X-Forwarded-For': from,
    ...(authorizations.length > 0 && { Authorization: authorizations }),
    ...(origin !== undefined && { Origin: origin }),
    ...(browser && { [browser]: 'Mozilla/5.0' }),
    ...(hasRange && { Range: 'bytes=0-' }),
    ...(answer !== undefined && { 'X-Answer': String(answer) }),
    ...(body !== undefined && { 'Content-Type': 'application/json', 'Content-Length': String(body.length) }),
  };
  return { method, path: segments + path, headers, body };
}

/** The model: codes, one of which the response must have; none if it must be served. `credit` is the slow token's. */
function judge(each: Case, credit: { ms: number }, shared: SharedName): { codes: string[]; retryAfter?: string } {
  const { route, credentials, from, origin, browser, hasRange, hasUnknown, account, recipient, attachment } = each;
  const [methods = '', template = '', call] = route.split(' ');
  const [isGet, hasBody] = [methods === 'GET', methods.includes('{}')];
  const places = credentials.map(({ auth }) => auth === 'basic' ? 'bearer' : auth);
  const isTwice = places.length === 2 && places[0] === places[1] && places[0] !== 'body';
  const client = from.split(', ').at(-1)!;
  if (isTwice) {
    return { codes: ['bad_credential', 'bad_target', ...(client.startsWith('10.') ? [] : ['client_not_allowed'])] };
  }
  if (!client.startsWith('10.')) return { codes: ['client_not_allowed'] };
  const given = credentials.filter(({ auth }) => auth !== 'body' || hasBody);
  // The last of two credentials in one place is written; only the body has room for both.
  const [first] = given.toReversed().sort((a, b) => ORDER.indexOf(a.auth) - ORDER.indexOf(b.auth));
  if (first === undefined) return { codes: ['unauthorized', 'too_many_failures'] };
  const { auth, token } = first;
  const isWrong = token === 'nobody' || token === 'old' || (token === 'onlyBearer' && auth !== 'bearer');
  if (isWrong) return { codes: ['unauthorized', 'too_many_failures'] };
  const isBrowser = origin !== undefined || browser === 'Sec-Fetch-Site' || (browser !== undefined && isGet);
  const isForeign = auth === 'basic' && isBrowser && origin !== 'https://dash.example';
  const isPlayer = hasRange && !/\/(?::attachment|avatar)$/.test(route);
  if (isForeign || isPlayer) return { codes: ['cross_site'] };
  if (token === 'near' && !client.startsWith('10.1.')) return { codes: ['client_not_allowed'] };
  const lists = listsOf(token, shared);
  const codes = codesOfPath(methods, template, account, lists);
  if (codes.length > 0) return { codes };
  if (token === 'slow') {
    if (credit.ms < 20_000) return { codes: ['rate_limited'], retryAfter: `${Math.ceil((20_000 - credit.ms) / 1000)}` };
    credit.ms -= 20_000;
  }
  if (call) return { codes: codesOfCall(call, each, lists) };
  const more = codesOfBody(methods, template, { account, recipient }, lists);
  const isConfined = (lists.accounts ?? lists.recipients) !== undefined;
  const hasForeign = hasUnknown || /^\/v1\/(?:typing-indicator|polls|sticker-packs)\b/.test(template); // the timestamp
  // From what a token with defaults posts, a send is made that has its fields alone.
  const ownLists = ['confined', 'half', 'everyone'].includes(token);
  const hasDefaults = token === 'derived' || (!ownLists && /^(?:defaults|wider)$/.test(shared));
  const isBuilt = template === '/v2/send' && hasDefaults;
  if (isConfined && hasBody && hasForeign && !isBuilt) return { codes: ['bad_field', ...more] };
  if (more.length > 0) return { codes: [...more, ...(attachment === EVIL_FILE ? ['bad_field'] : [])] };
  return { codes: template === '/v2/send' && attachment === EVIL_FILE ? ['bad_field'] : [] };
}

/** Which accounts and recipients a token may use; undefined for all. */
type Lists = { accounts: readonly string[] | undefined; recipients: readonly string[] | undefined };

function listsOf(token: RuleToken, shared: SharedName): Lists {
  if (token === 'confined' || token === 'derived') return { accounts: [FROM], recipients: [TO] };
  const { accounts, recipients } = SHARED[shared]; // what a token does not say, the top level says
  if (token === 'half') return { accounts: [FROM], recipients };
  if (token === 'everyone') return { accounts, recipients: undefined };
  return { accounts, recipients };
}

/** Which refusals a request may get for its route and its path, and must get one of. They cost no rate. */
function codesOfPath(methods: string, template: string, account: string, { accounts, recipients }: Lists): string[] {
  const isGroupUse = template.includes(':groupid') && methods !== 'GET';
  const isGroupChange = /^(?:POST|PUT)\{\} \/v1\/groups\/:number(?:\/:groupid)?$|(?:members|admins)$/;
  const hasAccount = template.includes(':number');
  const isOwner = hasAccount || /send$|about|rpc$/.test(template);
  return [
    ...(accounts && hasAccount && !accounts.includes(account) ? ['sender_not_allowed'] : []),
    ...(accounts && !isOwner ? ['endpoint_not_allowed'] : []),
    ...(recipients && isGroupUse ? ['recipient_not_allowed'] : []),
    ...(recipients && isGroupChange.test(`${methods} ${template}`) ? ['endpoint_not_allowed'] : []),
  ];
}

/** Which refusals a call may get. */
function codesOfCall(
  call: string,
  { account, recipient, hasUnknown }: Case,
  { accounts, recipients }: Lists,
): string[] {
  const word = CALLED[call];
  if (word === 'setup') return ['setup_blocked'];
  if (word === 'none') return ['endpoint_not_allowed'];
  return [
    ...(hasUnknown ? ['bad_field'] : []),
    ...(accounts && call !== 'version' && !accounts.includes(account) ? ['sender_not_allowed'] : []),
    ...(recipients && /^send/.test(call) && !recipients.includes(recipient) ? ['recipient_not_allowed'] : []),
  ];
}

/** Which refusals it may get for its body. */
function codesOfBody(
  methods: string,
  template: string,
  { account, recipient }: Pick<Case, 'account' | 'recipient'>,
  { accounts, recipients }: Lists,
): string[] {
  const hasRecipient = methods.includes('{}') && (!template.includes('groups') || /members$|admins$/.test(template));
  return [
    ...(accounts && /send$/.test(template) && !accounts.includes(account) ? ['sender_not_allowed'] : []),
    ...(recipients && hasRecipient && !recipients.includes(recipient) ? ['recipient_not_allowed'] : []),
  ];
}

/** Sends cases one after the other, and compares what the gateway decides with the model (invariants 2, 8, 9, 12). */
export async function playCases({ kind, parts, shared = 'none' }: Batch<'rules' | 'counts'>): Promise<Find[]> {
  came(`shared ${shared}`);
  const desk = new Desk();
  const addresses = { clients: ['10.0.0.0/8'], trustedProxies: ['127.0.0.1'] };
  const tokens = { ...RULE_TOKENS, watcher: TOKENS.watcher };
  const { config } = SHARED[shared];
  await desk.open(tokens, { allow: ['messaging', 'info'], cors: ['https://dash.example'], ...addresses, ...config });
  const credit = { ms: 60_000 };
  const all: Told[] = [];
  for (const [i, each] of parts.entries()) {
    desk.clockMs += each.waitMs;
    credit.ms = Math.min(60_000, credit.ms + each.waitMs);
    const letter = writeCase(each);
    const told = await desk.ask(`r${i}`, letter);
    const seen = desk.seen.get(`r${i}`) ?? [];
    all.push(told);
    if (kind === 'counts') continue;
    const { codes, retryAfter } = judge(each, credit, shared);
    const about = { told, codes, shared, ...letter, ...each };
    if (codes.length === 0 && told.status !== 201) desk.find(9, 'what the rules allow is refused', about);
    if (codes.length > 0 && !codes.includes(told.code!)) desk.find(9, 'a refusal has another code', about);
    if (codes.length > 0 && seen.length > 0) desk.find(9, 'what the rules refuse reaches the backend', about);
    if (seen.length !== (told.status === 201 ? 1 : 0)) desk.find(2, `${seen.length} requests arrived`, about);
    if (retryAfter !== undefined && told.retryAfter !== retryAfter) desk.find(9, 'another Retry-After', about);
    for (const { url, headers, body } of seen) {
      if (SECRET_PATTERN.test(`${url} ${headers} ${body}`)) desk.find(8, 'the backend got a secret', about);
      if (!/^\/base\/(?:api\/)?v/.test(url)) desk.find(9, `the backend gets a request for ${url}`, about);
      const own = headers.filter((_, j) => headers[j - 1]?.toLowerCase() === 'authorization');
      if (own.join() !== `Basic ${btoa('user:word')}`) desk.find(9, `the backend got ${own} for its own Basic`, about);
    }
  }
  await checkMetrics(desk, parts, all);
  await desk.close();
  return desk.finds;
}

/** Invariant 12: all metrics that count requests, sends and failures. */
async function checkMetrics(desk: Desk, parts: Case[], all: Told[]): Promise<void> {
  const counts = new Map<string, number>();
  const sentBy = new Set<unknown>();
  let sends = 0;
  const lines = desk.lines.filter(({ message }) => message === 'request');
  for (const [i, { status }] of all.entries()) {
    const { method, route, code, token: named = '', status: logged } = lines[i] ?? {};
    // The log names the token of a refused credential whose secret is right; the metrics do not.
    const token = code === 'unauthorized' || code === 'too_many_failures' ? '' : named;
    if (logged !== status) desk.find(7, `the log has ${logged}, and the client got ${status}`);
    const isKnown = ROWS.some((row) => row.method === method && row.template === route) || route === '/healthz';
    const labels = `token="${token}",route="${isKnown ? `${method} ${route}` : 'other'}",status="${status}"`;
    counts.set(labels, (counts.get(labels) ?? 0) + 1);
    if (!/send$/.test(String(route)) || !desk.seen.has(`r${i}`) || parts[i]!.answer === 0) continue;
    sends++;
    if (status < 300) sentBy.add(token);
  }
  const happened = [
    ...Array.from(counts, ([labels, count]) => `requests_total{${labels}} ${count}`),
    ...Array.from(sentBy, (token) => `last_sent_timestamp_seconds{token="${token}"}`),
    ...[`send_seconds_count ${sends}`, 'log_lines_dropped_total 0', 'internal_errors_total 0'],
  ];
  const headers = { 'Authorization': `Bearer ${secretOf('watcher')}`, 'X-Forwarded-For': '10.1.0.1' };
  const { text } = await desk.ask('metrics', { method: 'GET', path: '/metrics', headers });
  const series = /^signal_gateway_(requests_total.*|last_sent.*\}|send_seconds_count.*|(?:log|internal)_.*)/gm;
  const counted = Array.from(text.matchAll(series), ([, each]) => each!);
  const differing = [...happened, ...counted].filter((each) => !happened.includes(each) || !counted.includes(each));
  if (differing.length > 0) desk.find(12, 'what happened and what was counted differ', differing);
}
