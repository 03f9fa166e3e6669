/**
 * What the worlds of each kind consist of: data, which a seed makes and JSON holds. This module imports none of the
 * others, so that they know the parts without knowing each other.
 */

/** The words of a text, as a list with their literal types. */
type Word<T extends string> = T extends `${infer First} ${infer Rest}` ? First | Word<Rest> : T;
export const words = <T extends string>(text: T): Word<T>[] => text.split(' ') as Word<T>[];

export type AuthMethod = (typeof import('../gateway.ts').METHOD_NAMES)[number];

/** The names of `TOKENS`, of `CHANGES` and of `SHARED`. */
export type TokenName = 'free' | 'other' | 'hanger' | 'guest' | 'confined' | 'watcher' | 'maker';
export const CHANGE_NAMES = words('usual removed expired onlyBearer onlyInfo elsewhere');
export type Change = (typeof CHANGE_NAMES)[number];
export type Changes = Partial<Record<TokenName, Change>>;
export type SharedName = Word<'none lists otherLists defaults wider senders recipients everyone'>;

// #region WORLDS OF TIME

/**
 * How the stand-in answers: with 201 at once, later, in three pieces, chunked, after 103 and 100, or with "Connection:
 * close"; with 400 before the body is read, a truncated or too long body, two lengths, 307, no HTTP; with an ordinary
 * response to an upgrade, or 101 and a reset to any request; with a reset instead of reading the body, or with a reset
 * or the end after it has acted; or never.
 */
export const ANSWERS = [
  ...words('prompt late pieces chunked hints closing early cut short twoLengths redirect garbage declined switching'),
  ...words('resetBefore resetAfter goneAfter never'),
];
export type Answer = (typeof ANSWERS)[number];
/** Answers after which a client that stays connected need not get a response. */
export const BROKEN: readonly Answer[] = ['cut', 'short'];

export const PHASES = words('gone hung reset');
/** A period in which the stand-in is away (gone, reset), or neither reads nor answers (hung). */
export type Phase = { kind: (typeof PHASES)[number]; atMs: number; forMs: number };

/** The kinds of bodies. All from `twice` on try to bypass the lists of a token. */
export const SHAPES = words('plain twice folded escaped late doubled');

/** The names of `ROUTES`. */
export type RouteName = Word<'send join quit remove about download unknown health socket'>;

/** One request of an actor. */
export interface Step {
  route: RouteName;
  auth: AuthMethod;
  /** The credential belongs to no token. */
  wrong?: boolean;
  shape: (typeof SHAPES)[number] | 'broken';
  bodyBytes: number;
  chunked?: boolean;
  /** HTTP/1.0 with keep-alive. */
  isOld?: boolean;
  /** Where the client pauses while writing the request: after which byte, and for how long. */
  pauses?: [atByte: number, ms: number][];
  /** The client writes no further than this byte. */
  stopAt?: number;
  /** The client disconnects this long after its last byte, in this way. */
  leave?: [ms: number, how: 'close' | 'half' | 'reset'];
  /** The request is written together with the one before it, on the same connection. */
  joined?: boolean;
  /** The next request uses the same connection, this much later. A WebSocket stays open for this long. */
  keptMs?: number;
  /** The client does not read for this long. */
  deafMs?: number;
  answer: [kind: Answer, ms: number];
  /** A reload changes the rules of this token in this way. */
  change?: [token: TokenName, change: Change];
  /** A reload sets these. */
  parallel?: number;
  base?: string;
}

/** The kinds of actors, which `WAYS` explains. */
export const KINDS = [
  ...words('honest kept patient crowd sender confined evil hanger pipelining lateHeaders old slow leaver'),
  ...words('downloader socket declined heedless guest reloader uploader'),
];
export type Kind = (typeof KINDS)[number];
export const HONEST: readonly Kind[] = KINDS.slice(0, 4);

/** A client, or the actor that reloads the configuration. */
export interface Actor {
  kind: Kind;
  number: number;
  atMs: number;
  token: TokenName;
  together?: boolean;
  steps: Step[];
}

/** The settings that affect time and order. */
type TimeName = 'headersMs' | 'stallMs' | 'slotMs' | 'connectMs' | 'lingerMs' | 'timeoutMs' | 'waitMs';
export type Times = Record<TimeName, number> & { parallel: number };

export interface World extends Times {
  kind: 'timed' | 'large';
  seed: number;
  /** How many bytes the gateway may be ahead of the stand-in; 0 for no limit. */
  windowBytes: number;
  phases: Phase[];
  /** How long each connection of the stand-in, in turn, waits before it reads. */
  deafMs: number[];
  actors: Actor[];
  /** When the gateway shuts down, in mid-operation. */
  closeMs?: number | undefined;
  /** `limits.body`, in MiB. */
  bodyMiB?: number;
}

// #region BYTES AND PROCESSES

export const FRAMINGS = words('none length chunked extended tooLong tooShort expecting');
export const BODIES = words('send large broken brokenLarge');

/** One request of a wire client. */
export interface WireRequest {
  line: number;
  /** The value of `Upgrade`. */
  upgrade?: string;
  auth: 'bearer' | 'basic' | 'query' | 'path' | 'none';
  wrong?: boolean;
  framing: (typeof FRAMINGS)[number];
  body: (typeof BODIES)[number];
  closes?: boolean;
  answer: [kind: Answer, ms: number];
}

/** A connection: what it writes, where it pauses, and how it ends. */
export interface WireClient {
  atMs: number;
  requests: WireRequest[];
  pauses: [atByte: number, ms: number][];
  /** What it writes after its requests. */
  rubbish?: number;
  /** Writes no further than this byte. */
  stopAt?: number;
  /** `answered` ends with a reset after the first bytes of a response. */
  end: 'reset' | 'answered' | 'close' | 'half' | 'wait';
  endMs: number;
  isDeaf?: boolean;
}

/** Requests to a gateway, how much of its log is read meanwhile, and whether everything is then. */
export type Flood = { requests: number; path: string; readKiB: number; isRead: boolean };

// #region DECISIONS

export const ENCODINGS = words('json shell form bare lines multipart text query get payload');
/** How a recipient is named: by a send's own field, with what programs write around it, and by names that are data. */
export const OWN_NAMES = words('recipients recipients recipients recipient Recipients recipients[] recipients[0]');
export const OTHER_NAMES = words('to group target receipients recipents group_id destination');

/** What a client means, and how it is written. */
export interface Meaning {
  token: 'plain' | 'open' | 'templated' | 'whole' | 'unaddressed';
  way: (typeof ENCODINGS)[number];
  text: string;
  /** The intended recipients, and the name under which each is written. */
  wanted: string[];
  name: (typeof OWN_NAMES)[number] | (typeof OTHER_NAMES)[number];
  /** How often a form has the field of the text. */
  times: number;
  /** Content-Type; none if empty. */
  declared: string;
  /** Other fields. Those named `auth` hold a valid credential in addition to the one in the header. */
  others: [name: string, value: string][];
  /** There is a file in addition to the fields. */
  hasFile?: boolean;
  /** How the fields are ordered. */
  order: number;
  /** What is escaped in JSON: the last character of each name, or, as by Python and PHP, what is not ASCII. */
  escaped?: 'last' | 'foreign' | undefined;
  /** What another token posts before it. */
  before?: Intrusion[];
}

/**
 * How another token tries to change how a body is read: by a name that ends in a backslash where the body's has another
 * last character, by names that JavaScript gives a meaning, by very many names, or by other values of the same names.
 */
export const INTRUSIONS = words('backslash proto constructor many values');

/** A body of another token: what it tries, how it is encoded, and which name of the next body it changes. */
export interface Intrusion {
  token: 'intruder' | 'other';
  kind: (typeof INTRUSIONS)[number];
  way: 'json' | 'payload' | 'form';
  name: number;
}

export type RuleToken = Word<'free confined derived near slow old onlyBearer half everyone'>;

/** A request to be judged. */
export interface Case {
  route: string;
  /** One or two; the first in the order header, path, query, body counts. */
  credentials: { auth: AuthMethod; token: RuleToken | 'nobody' }[];
  /** How `@auth` is spelled in a path or a query. */
  spelling: number;
  /** The client, behind a trusted proxy. */
  from: string;
  origin?: string;
  /** A header that only browsers send. */
  browser?: 'User-Agent' | 'Sec-Fetch-Site';
  hasRange?: boolean;
  /** Whether its body has a field that is none of the backend's. */
  hasUnknown?: boolean;
  account: string;
  recipient: string;
  /** The type that an attachment declares. */
  attachment?: string;
  /** The backend's status; 0 if it breaks off. */
  answer?: number;
  /** How far the clock advances before it. */
  waitMs: number;
}

// #region KINDS

/** What the worlds that are lists of actions consist of, by their kinds. */
export type Parts = { wire: WireClient; log: Flood; meaning: Meaning; rules: Case; counts: Case };
/**
 * Such a world. `tls` is that of the gateway in worlds of the wire; `shared` are the lists and defaults at the top level in
 * those of decisions.
 */
export type Batch<K extends keyof Parts> = {
  kind: K;
  seed: number;
  tls: boolean;
  parts: Parts[K][];
  shared?: SharedName;
};

/** The worlds by their kinds. */
export type Worlds = { timed: World; large: World } & { [K in keyof Parts]: Batch<K> };
export type WorldKind = keyof Worlds;
export type AnyWorld = Worlds[WorldKind];
