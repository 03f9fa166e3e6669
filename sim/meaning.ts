/**
 * Bodies as programs and people post them to a token that makes sends. The generator decides what is meant before it
 * writes: a text, an intended recipient or none, and a client's encoding. It writes no raw text that is itself a
 * well-encoded form, and no unencoded value that another client would have meant encoded.
 *
 * In some worlds another token posts bodies before these, which share their names, and try to change how they are read.
 * There each body is also posted to a gateway in a process that reads no body of the other token.
 */

import type { GatewayConfig } from '../gateway.ts';
import { batches } from './batches.ts';
import { type Draw, generator } from './chance.ts';
import { Desk, type Letter, type Seen, type Told } from './desk.ts';
import { came, type Find } from './finds.ts';
import { type Batch, ENCODINGS, type Intrusion, INTRUSIONS, type Meaning, OTHER_NAMES, OWN_NAMES } from './parts.ts';
import { DEFAULTS, ELSE, FROM, GROUP, secretOf, SHARED, TO, WORD } from './tokens.ts';

const THIRD = '+15550100003';
const WANTED = [[], [], [THIRD], [THIRD], [GROUP], [THIRD, TO], [TO, THIRD, ELSE], [TO, THIRD, ELSE, FROM]];
const MEANING_TOKENS = {
  plain: { defaults: DEFAULTS },
  open: { defaults: DEFAULTS, recipients: [TO, THIRD, ELSE, FROM, 'group.*'] },
  templated: { defaults: DEFAULTS, message: '{{text}}{{message}}{{priorité}}' },
  whole: { defaults: DEFAULTS, message: '{{.}}{{payload}}{{data}}{{message}}' },
  unaddressed: { defaults: { number: FROM }, message: '{{text}}{{message}}{{priorité}}' },
} satisfies Record<Meaning['token'], object>;
/** The same tokens where the defaults stand at the top level, for those that have none of their own. */
const WITHOUT_DEFAULTS = {
  ...MEANING_TOKENS,
  plain: {},
  templated: { message: MEANING_TOKENS.templated.message },
  whole: { message: MEANING_TOKENS.whole.message },
};
/** The tokens of intrusions: the bodies of one are made into sends, and those of the other are scanned. */
const INTRUDERS = {
  intruder: { defaults: { number: FROM, recipients: [ELSE] }, message: '{{.}}' },
  other: { recipients: ['*'] },
};

/** Pieces of texts, with everything that is difficult to encode. None starts a JSON object, and none names a field. */
const PIECES = ('Backup done|5 files|AT&T|Tom & Jerry|temp=23|x = 1|a=b&c|100%|50% off|"quoted"|it\'s|Tür|🚪|C:\\dir|' +
  'number: 5|to: Bob|<b>|;|#1|https://x.example/?a=1|a+b|\n|\t|-- |[x]|(y)|état|auth=failed|98 %|@home').split('|');

function genMeaning(draw: Draw): Meaning {
  const way = draw.pick(ENCODINGS);
  const token = draw.pick(Object.keys(MEANING_TOKENS) as Meaning['token'][]);
  const isLine = way === 'lines' || way === 'shell';
  const usable = way === 'bare' ? PIECES.filter(isBare) : PIECES;
  const pieces = isLine ? ['Backup', 'done', 'Tür', '5'] : usable;
  const words = Array.from({ length: draw.between(1, 4) }, () => draw.pick(pieces));
  const joined = words.join(draw.pick([' ', ' ', isLine ? ' ' : '']));
  const text = (way === 'bare' && !isBare(joined) ? words[0]! : joined).trim() || 'Backup done';
  // A text that is declared as one is sent unchanged, and lines are not a form.
  const hasSecret = !isLine && draw.chance(0.15);
  const others: Meaning['others'] = [
    ...(draw.chance(0.5) ? [['sensor', draw.pick(['Door 1', 'door', '5'])]] : []),
    ...(draw.chance(0.4) ? [['title', draw.pick(['Back up', 'Backup', 'x=y'])]] : []),
    ...(/json|payload/.test(way) && draw.chance(0.4) ? [['priorité', 'haute']] : []),
    ...(hasSecret ? [[draw.pick(['auth', 'auth', '@auth']), secretOf('plain')]] : []),
  ] as Meaning['others'];
  const isForm = /form|bare|lines|text|payload/.test(way);
  const types = ['application/json', 'text/plain', 'application/x-www-form-urlencoded', ''];
  const formTypes = way === 'text' ? [...types.slice(1), 'text/plain; charset=utf-8'] : types.slice(2);
  return {
    ...{ token, way, text, others, order: draw.below(1000) },
    wanted: way === 'text' ? [] : draw.pick(WANTED),
    times: draw.pick([1, 1, 1, 1, 1, 2, 3, 4]),
    name: draw.chance(0.7) ? draw.pick(OWN_NAMES) : draw.pick(OTHER_NAMES),
    declared: draw.pick(isForm ? formTypes : types),
    ...((way === 'multipart' || way === 'payload') && draw.chance(0.4) && { hasFile: true }),
    ...(/json|payload|query/.test(way) && { escaped: draw.pick(['last', 'foreign', undefined] as const) }),
  };
}

/**
 * Makes a world of meanings. In every fourth, another token posts between them, and in every third the defaults stand at
 * the top level.
 */
export function genMeanings(seed: number): Batch<'meaning'> {
  const world = batches('meaning', 60, genMeaning)(seed);
  const draw = generator(seed, 'intrusions');
  const genIntrusion = (): Intrusion => ({
    token: draw.chance(0.8) ? 'intruder' : 'other',
    kind: draw.pick(INTRUSIONS),
    way: draw.pick(['json', 'json', 'json', 'payload', 'form']),
    name: draw.below(8),
  });
  if (draw.chance(0.33)) world.shared = 'defaults';
  if (!draw.chance(0.25)) return world;
  for (const part of world.parts) if (draw.chance(0.5)) part.before = Array.from({ length: 2 }, genIntrusion);
  return world;
}

/** Whether a text means the same to a client that encodes nothing and to a form's reader. */
const isBare = (text: string): boolean => !/\+|%[0-9a-f]{2}|&[^&]*=|\n|;/i.test(text);

const FORM_SAFE = (text: string): string => encodeURIComponent(text).replaceAll('%20', '+');

/** A meaning as it is written. */
interface Written {
  letter: Letter;
  /** The names of its JSON, in order. */
  names: string[];
  /** Whether the default recipients would be wrong. */
  isNamed: boolean;
  /** The texts of which one is meant; undefined if a template shows more. */
  texts: string[] | undefined;
}

/** Writes a meaning in its way. @param unique a name that no body of an earlier world has. */
function writeMeaning(meaning: Meaning, unique: string): Written {
  const { token, way, text, times, wanted, name, declared, others, hasFile, order, escaped } = meaning;
  const draw = generator(order, 'order');
  const textName = /ed$/.test(token) ? draw.pick(['text', 'message']) : 'message';
  const shuffled = <T>(list: T[]): T[] =>
    list.map((each) => [draw.below(1e6), each] as const).sort(([a], [b]) => a - b).map(([, each]) => each);
  const inQuery = way === 'query' && wanted.length > 0;
  const pairs = shuffled([
    ...Array.from({ length: times }, () => [textName, text]),
    ...(inQuery ? [] : wanted.map((each) => [name, each])),
    ...(way === 'query' ? [] : others),
  ] as [string, string][]);
  const wantedAs = (key: string): unknown => wanted.length > 1 || /^recipients/i.test(key) ? wanted : wanted[0];
  const membersOf = (list: [string, string][]): Record<string, unknown> => ({
    ...(escaped && { [unique]: 1 }),
    ...Object.fromEntries(list.map(([key, value]) => [key, key === name ? wantedAs(key) : value])),
  });
  const object = (list: [string, string][]): string => escapeJson(JSON.stringify(membersOf(list)), escaped);
  const encoded = pairs.map((pair) => pair.map(draw.chance(0.5) ? FORM_SAFE : encodeURIComponent).join('=')).join('&');
  const bare = pairs.map(([key, value]) => `${key}=${key === name ? draw.pick([value, FORM_SAFE(value)]) : value}`);
  const isMultipart = way === 'multipart' || (way === 'payload' && hasFile);
  const inner = object(pairs);
  const key = draw.pick(['payload', 'data']);
  const bodies: Record<Meaning['way'], () => string> = {
    json: () => inner,
    shell: () => `'{${pairs.map(([key, value]) => `${key}:${value}`)}}'`,
    form: () => encoded,
    bare: () => bare.join('&'),
    lines: () => pairs.map(([key, value]) => `${key}: ${value}`).join('\n'),
    multipart: () => multipart(pairs, hasFile),
    text: () => text,
    query: () => object([[textName, text]]),
    get: () => '',
    payload: () => isMultipart ? multipart([[key, inner]], true) : `${key}=${encodeURIComponent(inner)}`,
  };
  const type = way === 'get' ? '' : isMultipart ? 'multipart/form-data; boundary=b' : declared;
  const inUrl = wanted.map((each) => `${FORM_SAFE(name)}=${encodeURIComponent(each)}`).join('&');
  const query = way === 'get' ? `?${encoded}` : inQuery ? `?${inUrl}` : '';
  const body = bodies[way]();
  const headers = { Authorization: `Bearer ${secretOf(token)}`, ...(type !== '' && { 'Content-Type': type }) };
  const letter = { method: way === 'get' ? 'GET' : 'POST', path: `/v2/send${query}`, headers, body: body || undefined };
  // A text names no recipient, whatever it contains, and a foreign name is data. So are a body's recipients to a
  // template whose token has default ones.
  const isTextOnly = way === 'lines' || (/^text\/plain/.test(type) && !body.startsWith('{'));
  const isData = /templated|whole/.test(token) && /^recipients(?:\[\d*\])?$/.test(name) && !inQuery;
  const isNamed = wanted.length > 0 && (OWN_NAMES as string[]).includes(name) && !isTextOnly && !isData;
  const isForm = !/^(?:lines|shell)$/.test(way);
  const isShown = /plain|open/.test(token) || (token !== 'whole' && times === 1);
  const priority = /ed$/.test(token) ? others.find(([key]) => key === 'priorité')?.[1] ?? '' : '';
  const texts = isShown ? isForm ? [text + priority] : [text, body] : undefined;
  const names = Object.keys(membersOf(way === 'query' ? [[textName, text]] : pairs));
  return { letter, names, isNamed, texts };
}

/** Writes characters of JSON as escapes, which change nothing. */
function escapeJson(json: string, escaped: Meaning['escaped']): string {
  const escape = (char: string): string => `\\u${char.charCodeAt(0).toString(16).padStart(4, '0')}`;
  if (escaped === 'foreign') return json.replace(/[^ -~]/g, escape);
  if (escaped === undefined) return json;
  const strings = /"(?:[^"\\]|\\.)*"(:?)/g;
  return json.replace(strings, (text, colon) => colon ? text.replace(/[^"\\](?=":$)/, escape) : text);
}

/** Writes the body of another token. @param names those of the next body. */
function writeIntrusion({ token, kind, way, name }: Intrusion, names: string[]): Letter {
  const own: Record<string, unknown> = { number: FROM, recipients: [ELSE], message: 'not meant' };
  const at = name % names.length;
  const same = names.map((each) => [each, own[each] ?? 'not meant']);
  const members: Record<Intrusion['kind'], () => unknown[][]> = {
    backslash: () => [...same.slice(0, at), [`${names[at]!.slice(0, -1)}\\`, 0]],
    proto: () => [...same, ['__proto__', own]],
    constructor: () => [...same, ['constructor', { prototype: own }], ['toString', own]],
    many: () => [...same, ...Array.from({ length: 3000 }, (_, i) => [`${names[0]}-${i}`, i])],
    values: () => same,
  };
  const list = members[kind]() as [string, unknown][];
  const json = JSON.stringify(Object.fromEntries(list));
  const form = list.map((pair) => pair.map((each) => encodeURIComponent(String(each))).join('='));
  const body = { json, payload: `payload=${encodeURIComponent(json)}`, form: form.join('&') }[way];
  return { method: 'POST', path: '/v2/send', headers: { Authorization: `Bearer ${secretOf(token)}` }, body };
}

function multipart(pairs: [string, string][], hasFile = false): string {
  const parts = pairs.map(([key, value]) => `; name="${key}"\r\n\r\n${value}`);
  if (hasFile) parts.push('; name="file"; filename="a.png"\r\nContent-Type: image/png\r\n\r\nPNG');
  return `${parts.map((part) => `--b\r\nContent-Disposition: form-data${part}\r\n`).join('')}--b--\r\n`;
}

/**
 * How many worlds of meanings were played. V8 remembers the names of JSON as long as a process lives, so each world has
 * a name of its own before them: a world that was reduced fails because of its own bodies or not at all.
 */
let playedMeanings = 0;

/** Posts what is meant, and compares it with what arrives (invariants 8, 11 and 13). */
export async function playMeanings({ parts, shared = 'none' }: Batch<'meaning'>): Promise<Find[]> {
  const unique = `unique${playedMeanings++}`;
  const [desk, fresh] = [new Desk(), new Desk()];
  const hasIntruder = parts.some(({ before }) => before);
  const config: GatewayConfig = { allow: ['send', 'GET /v2/send'] };
  const tokens = shared === 'none' ? MEANING_TOKENS : WITHOUT_DEFAULTS;
  await desk.open({ ...tokens, ...INTRUDERS }, { ...config, ...SHARED[shared].config });
  // Its tokens have defaults and lists of their own, which must mean the same.
  const unaddressed = { ...MEANING_TOKENS.unaddressed, ...(shared !== 'none' && { recipients: [TO] }) };
  if (hasIntruder) await fresh.open({ ...MEANING_TOKENS, unaddressed }, config, true);
  for (const [i, meaning] of parts.entries()) {
    const written = writeMeaning(meaning, unique);
    for (const [j, intrusion] of (meaning.before ?? []).entries()) {
      const { status } = await desk.ask(`m${i}-${j}`, writeIntrusion(intrusion, written.names));
      if (status === 201) came(`intrusion ${intrusion.kind}`);
    }
    const told = await desk.ask(`m${i}`, written.letter);
    checkMeaning(desk, meaning, written, told, desk.seen.get(`m${i}`) ?? []);
    if (!hasIntruder) continue;
    const outcomeOf = ({ seen }: Desk, { status, code }: Told): string =>
      `${status} ${code}, ${seen.get(`m${i}`)?.map(({ url, body }) => `${url} ${body}`)}`;
    const [own, other] = [outcomeOf(desk, told), outcomeOf(fresh, await fresh.ask(`m${i}`, written.letter))];
    const about = { own, other, sent: written.letter.body, ...meaning };
    if (own !== other) desk.find(13, "another token's body changes what becomes of one", about);
  }
  await desk.close();
  if (hasIntruder) await fresh.close();
  return [...desk.finds, ...fresh.finds];
}

/** Compares what is meant with what arrives. */
function checkMeaning(desk: Desk, meaning: Meaning, written: Written, { status }: Told, seen: Seen[]): void {
  const { letter, isNamed, texts } = written;
  const about = { sent: letter.body ?? letter.path, ...meaning };
  if (status === 201) came(`meaning ${meaning.way}`);
  if (seen.length !== (status === 201 ? 1 : 0)) desk.find(2, `${status}, and ${seen.length} requests arrived`, about);
  if (status !== 201 && (status < 400 || status > 499)) desk.find(11, `a body is answered with ${status}`, about);
  if (seen.length === 0) return;
  const { recipients, message } = JSON.parse(seen[0]!.body);
  const [wanted, to] = [isNamed ? meaning.wanted : [TO], recipients ?? []].map((list) => String(list.toSorted()));
  if (to !== wanted) desk.find(11, `a message for ${wanted} goes to ${to}`, about);
  const isConfined = /plain|templated|whole/.test(meaning.token);
  if (isConfined && to !== TO) desk.find(3, `a token for ${TO} sends to ${to}`, about);
  const isMeant = texts === undefined || texts.includes(String(message));
  if (!isMeant) desk.find(11, `another text arrives, ${JSON.stringify(message)}`, about);
  if (String(message).includes(WORD)) desk.find(8, 'a credential is in a text', about);
}
