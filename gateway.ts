#!/usr/bin/env node
/**
 * An authenticating gateway for signal-cli-rest-api, in one file.
 *
 * The backend has no authentication: whoever reaches it can send as you, read your messages and link
 * a phone of their own. This gateway stands in front of it, lets a request with a good API token send
 * a message, and refuses everything else. It never sends one twice, never follows a redirect, never
 * forwards a credential, and never lets account setup through unless its owner spells it out.
 *
 *   A request:  target made canonical, or 400      →  client's address, a preflight answered
 *            →  credential found and taken out     →  token, its expiry, the form it came in
 *            →  no page of another site            →  endpoint on the token's allowlist, the token's rate
 *            →  body scanned while it streams,     →  when it is its turn: relayed once, answered, logged
 *               or made into a send (webhook, form, text)
 *
 * Run    node gateway.ts --demo                            (Node 22.18 or newer; before: npx tsx@4 gateway.ts --demo)
 *        API_TOKENS=… BACKEND_URL=http://signal-api:8080 node gateway.ts
 * Check  node gateway.ts --check --config gateway.json         (all that is wrong, or what each token may do)
 *        node gateway.ts render NAME --config gateway.json     (the send that a token would make of a payload)
 * Embed  import { createGateway } from './gateway.ts'          (importing does no work)
 *
 * Exit codes: 0 done, 1 a failure while running (the port is taken, a payload would be refused), 2 bad usage or
 * configuration.
 *
 * Budget: 3,100 lines of code, 45 a function, 250 a class. A feature pays for its lines by what it makes superfluous.
 *
 * Contents, each with the lines of code that it may have. First the words: tables and types, which all may use. Then
 * the way of a request, downward: a section calls only what stands below it. At last the command line, around it all.
 *   PUBLIC TYPES 65 · SETTINGS 55 · FIXED LIMITS 40 · PROBLEMS 90 · ROUTES 120 · GATEWAY 265 · PIPELINE 185 ·
 *   TARGET 85 · CREDENTIALS 65 · PAGES 50 · ENDPOINTS 55 · RATE 30 · REQUEST BODY 235 · SENDS 136 · TEMPLATES 114 ·
 *   POLICY 75 · BODY SCAN 282 · RELAY 235 · SLOTS 140 · WEBSOCKETS 57 · ANSWERS 40 · ADDRESSES 25 · LOG 53 ·
 *   LOADING 150 · READERS 280 · DEMO 50 · COMMAND LINE 230 · EXPORTS 12
 *
 * @module
 */

import { isUtf8 } from 'node:buffer';
import crypto, { createPrivateKey, randomBytes, randomUUID, X509Certificate } from 'node:crypto';
import { type EventEmitter, once } from 'node:events';
import { existsSync, readFileSync, statSync, unlinkSync, unwatchFile, watchFile } from 'node:fs';
import http from 'node:http';
import { createRequire } from 'node:module';
import https from 'node:https';
import { type AddressInfo, BlockList, connect, isIP, Socket } from 'node:net';
import type { Duplex } from 'node:stream';
import { text as readAll } from 'node:stream/consumers';
import { createSecureContext, type TLSSocket } from 'node:tls';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const VERSION = '1.0.0';

// ── PUBLIC TYPES ─────────────────────────────────────────────────────────────────────────────────

/** The places where a client can put its token. */
const FORMS = ['bearer', 'basic', 'query', 'path', 'body'] as const;
type Form = (typeof FORMS)[number];

/** How the backend reads a message: as it is, or with `**bold**` and the like made into styles. */
const TEXT_MODES = ['normal', 'styled'] as const;
type TextMode = (typeof TEXT_MODES)[number];

/** Of log lines, from the least on: their order decides what is logged. */
const LEVELS = ['debug', 'info', 'warn', 'error'] as const;
type Level = (typeof LEVELS)[number];

/**
 * The configuration, in the shape of the JSON file, and its manual. Every field is optional. Durations are strings
 * with a unit (`250ms 30s 5m 1h 7d`), sizes too (`64KiB 150MiB`). Each has a row in `SETTINGS` below.
 */
interface GatewayConfig {
  backend?: {
    /**
     * The http or https URL of the backend. It may carry a path prefix, and userinfo, which is sent to the backend as
     * Basic. Whoever reaches this address without the gateway is not asked for a token.
     * @default http://127.0.0.1:8080
     */
    url?: string;
    /**
     * Until the backend's response headers, counted from the last byte of the request, its turn included; also how long
     * its answer may make no progress. `0` is no limit. A message whose answer comes too late may have been sent all
     * the same.
     * @default 150s
     */
    timeout?: string;
    /**
     * Requests at the backend at one time; further ones take their turn. In json-rpc mode it goes down under parallel
     * requests: few make that rare, 1 excludes it, and then a send waits for all before it. WebSockets and polls of
     * `GET /v1/receive` do not count. `0` is no limit.
     * @default 4
     */
    parallel?: number;
    /**
     * How long a send waits for a backend that cannot be connected to, because it restarts. `0` is not at all. Nothing
     * was sent until then.
     * @default 30s
     */
    wait?: string;
  };
  /**
   * Where to listen: `host:port`, `:port` (every interface), `[::]:port` or `unix:/path.sock`. Beyond this machine,
   * tokens are readable on the way unless there is `tls`, here or in a proxy.
   * @default 127.0.0.1:8880
   */
  listen?: string;
  tls?: {
    /**
     * A file with a certificate and its chain in PEM. With `key`, the gateway speaks https. It is read again when it
     * changes.
     */
    cert?: string;
    /** A file with the key of `cert` in PEM. */
    key?: string;
  };
  auth?: {
    /**
     * The forms in which a token is accepted, of bearer, basic, query, path, body. `query` and `path` put it into URLs,
     * which proxies and browsers log.
     * @default bearer,basic,body
     */
    methods?: Form[];
    /**
     * Lets everybody in. Without any token the gateway is open, so it starts only on a loopback address or a unix
     * socket, or if this is true. It has no effect once there is a token.
     * @default false
     */
    anonymous?: boolean;
  };
  /**
   * The tokens, by name. Names are logged, secrets are not. If absent, nobody is asked for one; an empty object is a
   * mistake.
   */
  tokens?: Record<string, TokenConfig>;
  /**
   * What may be called: the groups send, info, receive, messaging, setup, and patterns such as `GET /v1/groups/:number`
   * or `* /v1/groups/*`. Whoever may call `setup` can take over the account. `GET /v2/send` sends the `message` of the
   * query, for a token that has `defaults` or `message`.
   * @default send,info
   */
  allow?: string[];
  /** Requests per time for each token, such as `30/1m`. If absent, there is no limit. */
  rate?: string;
  /** Addresses and CIDR ranges that may connect. If absent, any. */
  clients?: string[];
  /**
   * Origins such as `https://dash.example:8443`, whose pages may use the gateway and read its answers. If absent, none.
   * A script of such a page has what the tokens have that it gets hold of.
   */
  cors?: string[];
  /**
   * Addresses and CIDR ranges whose X-Forwarded-For is believed. If absent, nobody's. Whoever has one of them can claim
   * any address, also one on `clients`.
   */
  trustedProxies?: string[];
  limits?: {
    /** The largest request body; 413 beyond it. @default 150MiB */
    body?: string;
    /**
     * Connections at the same time. Beyond it, the one that has gone longest without a good token is closed for a new
     * one.
     * @default 1024
     */
    connections?: number;
  };
  /** How long running requests may finish after SIGTERM, and in `close()`. @default 8s */
  shutdown?: string;
  log?: {
    /** The least that is logged: debug, info, warn, error. @default info */
    level?: Level;
    /** `text` or `json`. If absent, text on a terminal and json otherwise. */
    format?: 'text' | 'json';
  };
}

/** One token. A field that the top level has too replaces that one whole; if absent, it falls back to it. */
interface TokenConfig {
  /** At least 16 characters, or `sha256:` and the 64 hexadecimal digits of their digest, which is no use to a thief. */
  secret?: string;
  /** A file with the secret, in the place of `secret`. It is read again when it changes. */
  secretFile?: string;
  /** As `auth.methods`. */
  methods?: Form[];
  /** As the top-level one. */
  allow?: string[];
  /** The accounts that the token may send from and read, each `+` and digits. If absent, all that the backend has. */
  senders?: string[];
  /** Whom it may write to: numbers, user names, UUIDs, `group.…` ids; `group.*` is any group. If absent, anybody. */
  recipients?: string[];
  /** As the top-level one. */
  rate?: string;
  /** As the top-level one. */
  clients?: string[];
  /** Valid through that day, UTC (`2027-06-30`), or until that time (`2027-06-30T12:00:00Z`). If absent, for ever. */
  expires?: string;
  /**
   * With `defaults` or `message`, a POST to /v2/send is not passed on: a new send is made of its body, be it JSON, a
   * form or a text. These fill what the body lacks. What the body has goes first: confine the token with `senders` and
   * `recipients`.
   */
  defaults?: { number?: string; recipients?: string[]; text_mode?: TextMode };
  /** A Mustache template of the message, filled from the body. It goes before a `message` in the body. */
  message?: string;
}

/** What a test, or a program that embeds the gateway, may put in the place of the real thing. */
interface GatewayOptions {
  /** Milliseconds since the epoch. @default Date.now */
  now?: () => number;
  /** Receives each finished log line, without its line feed. @default standard output */
  log?: (line: string) => void;
  /** How long a client may take over a request's headers, and over a TLS handshake. @default 10_000 */
  headersTimeoutMs?: number;
  /**
   * How long a client may make no progress with its answer, or send less than 30 KiB of its body while it is read; also
   * how long a body may take in all before its sender is known, with what is still sent after a refusal.
   * @default 30_000
   */
  stallTimeoutMs?: number;
  /** How long a request may hold a slot before it is lent; and how long it outlives its client. @default 30_000 */
  slotTimeoutMs?: number;
}

/** What `createGateway` returns. Nothing happens before `listen`. */
interface Gateway {
  /** The underlying server, for its events and its address; with `tls` one of node:https. */
  readonly server: http.Server | https.Server;
  /** Opens the port. Resolves to where it listens (`http://127.0.0.1:8880`); rejects if it cannot. */
  listen(): Promise<string>;
  /** Stops accepting, lets running requests finish within the `shutdown` setting, then cuts them off. */
  close(): Promise<void>;
  /**
   * Puts a new configuration in force for the next request; running ones end under the old one.
   * @throws {ConfigError} with every mistake; then the old configuration stays in force.
   */
  reload(config: GatewayConfig): void;
}

// ── SETTINGS ─────────────────────────────────────────────────────────────────────────────────────
// A setting is one field above, one row here, and one use. The compiler refuses a field without a row, and a test
// compares rows, fields and README.

/** The fields of the configuration, by their path; these types and the rows of `SETTINGS` cannot part. */
type PathOf<C> = {
  [K in keyof C & string]-?: NonNullable<C[K]> extends Record<string, TokenConfig> | readonly string[] | string ? K
    : `${K}.${keyof NonNullable<C[K]> & string}`;
}[keyof C & string];
type GatewayPath = PathOf<GatewayConfig>;
type SettingPath = GatewayPath | Exclude<keyof TokenConfig, 'methods'>;

/**
 * Reads a value from JSON or from an environment variable.
 * @throws {UsageError} that says what is wrong, and no secret.
 */
type Reader<T> = (value: unknown) => T;

/** `where` it stands: at the top of the file, in a token, or in both. No default, and no variable, is ''. */
type Setting = readonly [env: string, where: 'top' | 'token' | 'both', Reader<unknown>, fallback: string, help: string];

/**
 * Every setting, once. What is read, `--help` and the README's table come from here or are checked against it; the
 * manual is at the fields of GatewayConfig and TokenConfig. To add one, add its field there, and its row.
 */
const SETTINGS = {
  'backend.url': ['BACKEND_URL', 'top', readBackend, 'http://127.0.0.1:8080', 'may carry a path prefix, and userinfo'],
  'backend.timeout': ['BACKEND_TIMEOUT', 'top', duration('150s'), '150s', 'until its response headers; 0 = none'],
  'backend.parallel': ['BACKEND_PARALLEL', 'top', countFrom(0), '4', 'requests at it at one time; 0 = no limit'],
  'backend.wait': ['BACKEND_WAIT', 'top', duration('30s'), '30s', 'how long a send waits while it restarts; 0 = none'],
  'listen': ['LISTEN', 'top', readListen, '127.0.0.1:8880', 'host:port, :port (every interface) or unix:/path.sock'],
  'tls.cert': ['TLS_CERT', 'top', readFile, '', 'a file with a certificate and its chain in PEM, for https'],
  'tls.key': ['TLS_KEY', 'top', readFile, '', 'a file with the key of tls.cert in PEM'],
  'auth.methods': [
    'AUTH_METHODS',
    'both',
    listOf(wordOf(FORMS)),
    'bearer,basic,body',
    'of bearer, basic, query, path, body',
  ],
  'auth.anonymous': ['AUTH_ANONYMOUS', 'top', readBoolean, 'false', 'true lets everybody in if there is no token'],
  'tokens': ['API_TOKENS', 'top', readTokens, '', 'SECRET or name=SECRET, …; in the file an object, name to settings'],
  'allow': ['ALLOW', 'both', readAllow, 'send,info', 'of send, info, receive, messaging, setup, "GET /v1/groups/*"'],
  'rate': ['RATE', 'both', readRate, '', 'requests per time for each token, such as 30/1m'],
  'clients': ['ALLOW_CLIENTS', 'both', readAddresses, '', 'addresses and CIDR ranges that may connect; any if absent'],
  'cors': ['CORS_ORIGINS', 'top', readOrigins, '', 'origins whose pages may use the gateway and read its answers'],
  'trustedProxies': ['TRUSTED_PROXIES', 'top', readAddresses, '', 'addresses whose X-Forwarded-For is believed'],
  'limits.body': ['MAX_BODY', 'top', readSize, '150MiB', 'the largest request body; 413 beyond it'],
  'limits.connections': ['MAX_CONNECTIONS', 'top', countFrom(1), '1024', 'connections at the same time'],
  'shutdown': ['SHUTDOWN_TIMEOUT', 'top', duration('10s'), '8s', 'how long running requests may finish'],
  'log.level': ['LOG_LEVEL', 'top', wordOf(LEVELS), 'info', 'debug, info, warn or error'],
  'log.format': ['LOG_FORMAT', 'top', wordOf(['text', 'json']), '', 'text or json; if absent, text on a terminal'],
  'secret': ['', 'token', readSecret, '', 'plain, or sha256:<64 hex>'],
  'secretFile': ['', 'token', readSecretFile, '', 'a file with it'],
  'senders': ['', 'token', listOf(readNumber), '', 'accounts that it may use; any if absent'],
  'recipients': ['', 'token', listOf(readRecipient), '', 'whom it may write to, group.* any group; anybody if absent'],
  'expires': ['', 'token', readExpiry, '', 'valid through 2027-06-30, UTC, or until 2027-06-30T12:00:00Z'],
  'defaults': ['', 'token', readDefaults, '', 'number, recipients, text_mode of the sends made of webhooks'],
  'message': ['', 'token', readTemplate, '', 'a Mustache template of their message'],
} as const satisfies Record<SettingPath, Setting>;

/** In the order of the table, which is that of `--help`: those of a token alone stand last. */
const SETTING_ROWS = Object.entries<Setting>(SETTINGS);
const GATEWAY_ROWS = SETTING_ROWS.filter(([, [, where]]) => where !== 'token');

/** The readers of what may stand in a token, by its name there. */
const TOKEN_READERS = Object.fromEntries(
  SETTING_ROWS.flatMap(([path, [, where, read]]) => where === 'top' ? [] : [[path.split('.').at(-1)!, read]]),
);

/** All settings, read and checked, by the path that they have in the file. */
type Settings = { [P in GatewayPath]: SettingValue<(typeof SETTINGS)[P]> } & {
  'tokens': readonly TokenSettings[];
  /** What is no mistake, but may not be meant. */
  'warnings': readonly string[];
};

/** What a row's reader returns; undefined too, if the row has no default. */
type SettingValue<S extends Setting> = ReturnType<S[2]> | (S[3] extends '' ? undefined : never);

/** A token as it stands in the configuration: what it does not say, the top level does. */
type TokenSettings = Partial<Token> & Pick<Token, 'name' | 'digest'> & { readonly secretFile?: string };

// ── FIXED LIMITS ─────────────────────────────────────────────────────────────────────────────────
// The numbers that are no settings, with their reasons. The README's table of them is checked against this section.

/** For a request's headers, and for a TLS handshake: an option of `createGateway`, for tests. */
const HEADERS_TIMEOUT_MS = 10_000;

/** Without progress of an answer; and in all, for the body of somebody unknown. An option too. */
const STALL_TIMEOUT_MS = 30_000;
/** So much of a body must come in every STALL_TIMEOUT_MS of reading: single bytes would hold a connection for days. */
const PACE_BYTES = 30 * 1024;

/** Fields beyond it are nobody's: each costs something at every step, and no client sends a tenth of them. */
const HEADERS_LIMIT = 200;

/**
 * Requests that a connection may have sent ahead of their answers: each waits in memory, and no client needs a tenth.
 */
const PIPELINE_LIMIT = 16;

/**
 * Wrong credentials that one client address may send before it gets 429: a person's mistakes, not a poller's. Also how
 * many of its requests without a good token are logged at their level.
 */
const FAILURE_RATE: Rate = { count: 30, perMs: 60_000, written: '30/1m' };

/** For a warning of what a stranger can bring about as often as he likes: it must not fill the disk. */
const WARNING_RATE: Rate = { count: 1, perMs: 60_000, written: '1/1m' };

/** Keys whose rate is kept. The least recently used go first: an attacker with a million addresses forgets his own. */
const RATE_KEYS_LIMIT = 10_000;

/** A body up to here is judged whole before the backend hears of it; `auth` must be complete within it. */
const HEAD_LIMIT_BYTES = 64 * 1024;

/**
 * How long a refused client may take to read its answer and stop sending, and the second half of a WebSocket to end.
 */
const LINGER_MS = 2000;

/** Deeper than any request of this backend, and than any template; it bounds what is kept of them. */
const NESTING_LIMIT = 64;
/** The longest key that matters has 18 letters, each of which may be written `\u0000`. */
const KEY_LIMIT_BYTES = 256;
/** No credential, no account, no group's id and no answer of a poll comes near it. */
const VALUE_LIMIT_BYTES = 4096;
/** How much of an attachment may come before its data: its type and the name of its file. */
const META_LIMIT_BYTES = 1024;
/** Far longer than any number of this API; the decimals of a double that tell it from its neighbours are 17. */
const BARE_LIMIT_BYTES = 256;

/** The largest body that a send is made of: it is held in memory. */
const PAYLOAD_LIMIT_BYTES = 1024 * 1024;

/** What may be held at one time of all bodies that sends are made of: thirty-two of the largest. Beyond it, 503. */
const HELD_LIMIT_BYTES = 32 * 1024 * 1024;

/** What a rendering may make at most, and a text may be, as UTF-8; beyond it they are cut. */
const RENDER_LIMIT_BYTES = 64 * 1024;

/**
 * What a rendering may take at most, in values that names are looked up in; a fraction of a second. Below that it may
 * take the length of the data times that of the template. One way through the data needs less, but sections within
 * sections that go through the same list would take its length to the power of their depth.
 */
const RENDER_LIMIT_STEPS = 3_000_000;

/** How long a connection to the backend may take to come about, TLS included. */
const CONNECT_TIMEOUT_MS = 10_000;

/** How long a request may hold a slot before it is lent to another; and how long it outlives its client. An option too. */
const SLOT_TIMEOUT_MS = 30_000;

/** How long the question to the backend at start may take. */
const ASK_TIMEOUT_MS = 5000;

/** The first pause of a send that waits for a backend to connect to; each is twice the one before, up to the second. */
const RETRY_PAUSE_MS = 100;
const RETRY_PAUSE_LIMIT_MS = 1000;

/**
 * Idle connections go before the backend, or a proxy in front of it, drops them: a send that crosses with that is lost.
 */
const IDLE_TIMEOUT_MS = 4000;

/** Chunks from this size on are worth a `collectSoon`. */
const COLLECT_FROM_BYTES = 4096;

/** Copies of a credential are looked for from this length on: what holds a shorter one may do so by chance. */
const COPY_FROM_LENGTH = 16;

/** For the `Retry-After` of 503 `busy`, a guess: a backend that restarts takes 10 to 20 seconds. */
const BUSY_RETRY_MS = 10_000;

/**
 * What a client may be behind. The backend writes to all its readers in turn: one that is not drained starves the
 * others.
 */
const BACKLOG_LIMIT_BYTES = 1024 * 1024;
/** Chunks that a client may send before its handshake is answered; it should send none (RFC 6455 4.1). */
const EARLY_LIMIT = 16;
/** How often open WebSockets are looked at for a token that has expired meanwhile. */
const TUNNEL_SWEEP_MS = 30_000;
/** How long a WebSocket may be silent before TCP asks whether its peer is still there. */
const SILENCE_MS = 30_000;

/** How long a browser may remember what a preflight has said; what it sends then is judged all the same. */
const PREFLIGHT_MS = 60_000;

/**
 * A secret has at least so many characters. No message shows anything as long: it may be one, put in the wrong place.
 */
const SECRET_MIN_LENGTH = 16;

/** Log lines that may wait for somebody to read them. Beyond it they are dropped, for memory is worth more. */
const LOG_LIMIT_BYTES = 1024 * 1024;

/** How long before the deadline running requests are answered, so that their answers leave in time. */
const LAST_WORDS_MS = 500;

/** How long the end waits for somebody to read the last lines of the log. */
const FLUSH_MS = 500;

/** How often files are looked at, and for how long one must have stayed the same: it may be half written. */
const WATCH_MS = 500;
const SETTLE_MS = 1200;

// ── PROBLEMS ─────────────────────────────────────────────────────────────────────────────────────

// Inside, a refusal says exactly why (`reason`, in the log); outside it says no more than a stranger may know: every
// 401 has the same words, whether the token was wrong, expired or absent.

/**
 * Everything that can go wrong with a request. Codes are contract; sentences are for a person. Of the last five, 502
 * `backend_unreachable` and 503 say that nothing was sent; 502 `bad_backend_answer` and 504 that it may have been.
 */
const PROBLEMS = {
  bad_request: [400, 'Invalid HTTP: percent-encode URLs (spaces, non-ASCII); a body needs Content-Length or chunked.'],
  bad_target: [400, 'The request target is not one that this gateway passes on.'],
  bad_credential: [400, 'The request carries more than one credential in the same place; send one.'],
  bad_json: [400, 'The body is not a JSON object.'],
  bad_field: [400, 'A field of the body is not acceptable.'],
  unauthorized: [401, 'A valid API token is required in an accepted form, such as "Authorization: Bearer TOKEN".'],
  endpoint_not_allowed: [403, 'This token may not use this endpoint.'],
  setup_blocked: [403, 'Account setup is blocked here; do it directly on the backend.'],
  sender_not_allowed: [403, 'This token may not send from, or read, that account.'],
  recipient_not_allowed: [403, 'This token may not send to one of these recipients.'],
  client_not_allowed: [403, 'Requests from this address are not accepted.'],
  cross_site: [403, 'Any page could send this: use curl, a bearer token or the path form, or add it to CORS_ORIGINS.'],
  unknown_endpoint: [404, 'There is no such endpoint; a message is sent by POST to /v2/send.'],
  method_not_allowed: [405, 'This endpoint is not called by this method, but by those that the header Allow names.'],
  request_timeout: [408, 'The request took too long to arrive.'],
  body_too_large: [413, 'The body is larger than this gateway accepts.'],
  unsupported_encoding: [415, 'Compressed request bodies are not accepted; send the JSON as it is.'],
  too_many_headers: [431, 'The request has more than 200 header fields, or they are too long.'],
  rate_limited: [429, 'This token has used up its rate; try again after the time in Retry-After.'],
  too_many_failures: [429, 'Too many wrong credentials from this address; try again after the time in Retry-After.'],
  client_left: [499, 'The client left.'], // in the log only: nobody is there to read it
  internal_error: [500, 'The gateway itself failed; its log says more under this request id.'],
  backend_unreachable: [502, 'The Signal backend cannot be reached; nothing was sent.'],
  bad_backend_answer: [502, 'The Signal backend gave no usable answer; the message may have been sent.'],
  shutting_down: [503, 'The gateway is shutting down; try again in a moment.'],
  busy: [503, 'There are too many requests at once; nothing was sent. Try again after the time in Retry-After.'],
  backend_timeout: [504, 'The Signal backend took too long; the message may have been sent.'],
} as const satisfies Record<string, readonly [status: number, sentence: string]>;

type ProblemCode = keyof typeof PROBLEMS;

/** `detail` replaces the sentence on the wire; `reason` is for the log; `allow` are the methods that would be right. */
type ProblemDetails = { detail?: string; reason?: string; retryAfterMs?: number; allow?: string[]; cause?: unknown };

/** A request that ends here. */
class Problem extends Error {
  readonly code: ProblemCode;
  readonly status: number;
  readonly details: ProblemDetails;

  constructor(code: ProblemCode, details: ProblemDetails = {}) {
    const [status, sentence] = PROBLEMS[code];
    const { stackTraceLimit } = Error;
    // A refusal is no accident: nobody reads its stack, which costs more than all the rest of it.
    Error.stackTraceLimit = 0;
    super(details.detail ?? sentence, { cause: details.cause });
    Error.stackTraceLimit = stackTraceLimit;
    this.code = code;
    this.status = status;
    this.details = code === 'busy' ? { retryAfterMs: BUSY_RETRY_MS, ...details } : details;
  }
}

/** @param why completes "The request target is not acceptable: …". */
function badTarget(why: string): Problem {
  return new Problem('bad_target', { detail: `The request target is not acceptable: ${why}.` });
}

/** @param why completes "The field … …", and never quotes the field's value, which may be a secret or a number. */
function badField(key: string, why: string): Problem {
  return new Problem('bad_field', { detail: `The field "${key}" ${why}.` });
}

/** Bad usage or configuration: on the command line, the message goes to standard error and the exit code is 2. */
class UsageError extends Error {}

/** @param otherwise follows the setting's path: "tokens: must be …". @throws {UsageError} unless it is right. */
function ensure(isRight: boolean, otherwise: string): asserts isRight {
  if (!isRight) throw new UsageError(otherwise);
}

/** What is wrong with a configuration, one message per mistake, each with its path. None holds a secret. */
class ConfigError extends UsageError {
  readonly problems: readonly string[];

  constructor(problems: readonly string[]) {
    super(`the configuration is not usable:\n  ${problems.join('\n  ')}`);
    this.problems = problems;
  }
}

/** Collects what the readers of a list's or an object's parts throw, so that all of it is reported at once. */
class Mistakes {
  readonly found: string[] = [];

  add(at: string, sentence: string): void {
    this.found.push(`${at}: ${sentence}`);
  }

  /** What `read` returns, or undefined if it threw: what is wrong here (`: …`) or below (`.key: …`, `[2].key: …`). */
  collect<T>(at: string, read: () => T): T | undefined {
    try {
      return read();
    } catch (error) {
      if (!(error instanceof UsageError)) throw error;
      const problems = error instanceof ConfigError ? error.problems : [`: ${error.message}`];
      // What is at the top of a file needs no place but its name.
      this.found.push(...problems.map((problem) => (at + problem).replace(/^the file\./, '')));
      return undefined;
    }
  }

  /** Passes on what was read. @throws {ConfigError} if anything was wrong. */
  end<T>(value: T): T {
    if (this.found.length > 0) throw new ConfigError(this.found);
    return value;
  }
}

// ── ROUTES ───────────────────────────────────────────────────────────────────────────────────────
// The backend's router as of August 2026 (its 0.100 and the head then). What a newer one adds is on no group, and so is
// closed until a pattern names it.

/** The words of `allow`, each for the routes that one kind of client needs. */
type Group = 'send' | 'info' | 'receive' | 'messaging' | 'setup';

/** A route for one method; `template` as the backend writes it, `parts` its segments. */
type Route = (typeof ROUTES)[number];

/** Those that the backend knows. HEAD and OPTIONS are 404 there, and are on no route here. */
const METHODS = ['GET', 'POST', 'PUT', 'PATCH', 'DELETE'];

/**
 * Every route of the backend: methods, template, and "body" where it needs one. The first match wins,
 * so that a static segment stands before a parameter, as in the backend's own router.
 */
const ROUTES = Object.entries({
  info: ['GET /v1/about', 'GET /v1/health'], // both answer without asking signal-cli
  send: ['POST /v2/send body', 'POST /v1/send body'],
  receive: ['GET /v1/receive/:number'], // takes the messages away with it; in json-rpc mode a WebSocket
  messaging: [
    'PUT,DELETE /v1/typing-indicator/:number body',
    'POST,DELETE /v1/reactions/:number body',
    'POST /v1/receipts/:number body',
    // A DELETE may have a body here: whom it is about stands in it.
    'DELETE /v1/remote-delete/:number body',
    'POST,DELETE /v1/polls/:number body',
    'POST /v1/polls/:number/vote body',
    // All accounts' attachments: `refusalOfEndpoint` closes them to a token with `senders`, and a search without one.
    'GET /v1/attachments',
    'GET,DELETE /v1/attachments/:attachment',
    'GET /v1/sticker-packs/:number',
    'POST /v1/sticker-packs/:number body',
    'GET /v1/search',
    'GET /v1/search/:number',
    'GET /v1/groups/:number',
    'POST /v1/groups/:number body',
    'GET,DELETE /v1/groups/:number/:groupid',
    'PUT /v1/groups/:number/:groupid body',
    'GET /v1/groups/:number/:groupid/avatar',
    'POST /v1/groups/:number/:groupid/block',
    'POST /v1/groups/:number/:groupid/join',
    'POST /v1/groups/:number/:groupid/quit',
    'POST,DELETE /v1/groups/:number/:groupid/members body',
    'POST,DELETE /v1/groups/:number/:groupid/admins body',
    'POST,DELETE /v1/groups/:number/:groupid/pin-message body',
  ],
  // Whoever may call one of these can take the account over, or read whom it knows: link a phone, trust a stranger's
  // key (identities), rename the sender (profiles, contacts), or call what the owner has installed (plugins).
  setup: [
    'GET /v1/configuration',
    'POST /v1/configuration body',
    'GET /v1/configuration/:number/settings',
    'POST /v1/configuration/:number/settings body',
    'POST /v1/register/:number',
    'POST /v1/register/:number/verify/:token',
    'POST /v1/unregister/:number',
    'GET /v1/qrcodelink',
    'GET /v1/qrcodelink/raw',
    'GET /v1/accounts',
    'POST /v1/accounts/:number/rate-limit-challenge body',
    'PUT /v1/accounts/:number/settings body',
    'POST /v1/accounts/:number/username body',
    'DELETE /v1/accounts/:number/username',
    'POST /v1/accounts/:number/pin body',
    'DELETE /v1/accounts/:number/pin',
    'GET /v1/devices/:number',
    'POST /v1/devices/:number body',
    'DELETE /v1/devices/:number/local-data', // no device: it deletes what the backend has of the account
    'DELETE /v1/devices/:number/:deviceId',
    'PUT /v1/profiles/:number body',
    'GET /v1/identities/:number',
    'PUT /v1/identities/:number/trust/:numbertotrust body',
    'GET /v1/contacts/:number',
    'PUT /v1/contacts/:number body',
    'GET /v1/contacts/:number/:uuid',
    'GET /v1/contacts/:number/:uuid/avatar',
    'POST /v1/contacts/:number/sync',
    '* /v1/plugins/*',
    'GET /swagger/*',
  ],
}).flatMap(([group, lines]) =>
  lines.flatMap((line) => {
    const [methods = '', template = '', body] = line.split(' ');
    return (methods === '*' ? METHODS : methods.split(',')).map((method) => ({
      group: group as Group,
      method,
      template,
      parts: template.slice(1).split('/'),
      /** The backend refuses the request without a body. */
      needsBody: body === 'body',
    }));
  })
);

/** What a group's word lets through: itself, and for `messaging` all that a bot needs. */
const GROUPS: Record<Group, readonly Group[]> = {
  send: ['send'],
  info: ['info'],
  receive: ['receive'],
  messaging: ['send', 'receive', 'messaging'],
  setup: ['setup'],
};

/** The route of a send. A token that makes sends may also GET it: that goes on as the POST that it stands for. */
const SEND_ROUTE = ROUTES.find(({ template }) => template === '/v2/send')!;

/**
 * Whether it is a send by GET. No group and no wildcard lets that through, or a link that somebody opens would send.
 */
function isSendByGet({ method, route }: Pick<Target, 'method' | 'route'>): boolean {
  return method === 'GET' && route === SEND_ROUTE;
}

/**
 * The first two segments of every setup route (of swagger the first): a new upstream route below one of them is setup
 * too.
 */
const SETUP_PREFIXES = new Set(ROUTES.filter((route) => route.group === 'setup').map((route) => prefixOf(route.parts)));

/** The segments by which a path is setup or not. */
function prefixOf(segments: readonly string[]): string {
  return segments.slice(0, segments[0] === 'swagger' ? 1 : 2).join('/');
}

/** E.164 with its plus, as loosely as numbers are handed out. Lists compare it as it is written. */
const NUMBER = /^\+[0-9]{5,15}$/;

/**
 * What may stand for a parameter, also in words. The backend decodes `:number` once more (`%252B` is a plus to it) and
 * makes arguments of signal-cli of both, where `--username=…` would be an option: so each is known by what it must be.
 */
const PARAMETERS = new Map<string, readonly [check: (value: string) => boolean, expected: string]>([
  [':number', [(value) => NUMBER.test(value), 'the account in the path must be "+" and 5 to 15 digits']],
  [':groupid', [isGroupId, 'the group in the path must be an "id" as GET /v1/groups/:number lists them, "group.…"']],
]);

/** A group's id as the backend makes it: the base64 of the base64 of 32 bytes. Some routes decode anything instead. */
function isGroupId(value: string): boolean {
  const internalId = Buffer.from(value.slice('group.'.length), 'base64').toString('latin1');
  return isInternalId(internalId) && value === `group.${Buffer.from(internalId).toString('base64')}`;
}

/** A group's id as signal-cli makes it. It is encoded again and compared, for Buffer.from decodes anything. */
function isInternalId(value: string): boolean {
  const bytes = Buffer.from(value, 'base64');
  return bytes.length === 32 && value === bytes.toString('base64');
}

/** A pattern of `allow`: its method may be `*`, and so may its parts. */
type Pattern = Pick<Route, 'method' | 'parts'>;

/** Whether a pattern opens GET /v2/send. No wildcard does: who allows all that reads means nothing that acts. */
function spellsSendByGet({ method, parts }: Pattern): boolean {
  return method === 'GET' && parts.join('/') === 'v2/send';
}

/** What the owner allowed: `groups` by name, single `patterns`, and both as they were written. */
type Allow = ReturnType<typeof readAllow>;

/** `:name` and `*` each stand for one segment, a `*` at the end for one or more. */
function partsMatch(parts: readonly string[], segments: readonly string[]): boolean {
  const open = parts.at(-1) === '*';
  if (open ? segments.length < parts.length : segments.length !== parts.length) return false;
  return parts.every((part, i) => !isLiteral(part) || part === segments[i]);
}

/** Whether a part stands for itself alone. */
function isLiteral(part: string): boolean {
  return part !== '*' && !part.startsWith(':');
}

// ── GATEWAY ──────────────────────────────────────────────────────────────────────────────────────
// Connections: who may have one, for how long, and what becomes a request on it. node:http parses HTTP; whatever it
// leaves open (upgrades, pipelining, what never becomes a request) is decided here, once for http and https.

type Core = ReturnType<typeof makeCore>;

/**
 * Makes a gateway from a configuration.
 * @throws {ConfigError} with every mistake in the configuration, before anything is opened.
 */
function createGateway(config: GatewayConfig, options: GatewayOptions = {}): Gateway {
  return startGateway(embeddedSettings(config), options);
}

/** A gateway as the command line has it: its settings come from more than one place, so that it applies read ones. */
type RunningGateway = ReturnType<typeof startGateway>;

function startGateway(settings: Settings, options: GatewayOptions) {
  const core = makeCore(settings, options);
  const server = makeServer(core, options.headersTimeoutMs ?? HEADERS_TIMEOUT_MS);
  return {
    server,
    log: core.log,
    listen: () => openPort(server, core),
    close: () => closeGateway(server, core),
    apply: (next: Settings) => applySettings(core, server, next),
    reload: (next: GatewayConfig) => void applySettings(core, server, embeddedSettings(next)),
  };
}

/** The queue of the backend that requests are sent to now. */
function queueOf(core: Core): BackendQueue {
  const { queues, rules: { backend } } = core;
  const known = queues.get(backend) ?? new BackendQueue(core);
  queues.set(backend, known);
  return known;
}

/** What lives as long as the gateway does; `rules` is replaced whole, so that a request sees one version of it. */
function makeCore(settings: Settings, options: GatewayOptions) {
  return {
    settings,
    rules: makeRules(settings),
    now: options.now ?? Date.now,
    log: makeLog(settings, options),
    stallTimeoutMs: options.stallTimeoutMs ?? STALL_TIMEOUT_MS,
    slotTimeoutMs: options.slotTimeoutMs ?? SLOT_TIMEOUT_MS,
    rateLimiter: new RateLimiter(),
    failureLimiter: new RateLimiter(),
    /** Counts the log lines of requests without a good token, by address. */
    lineLimiter: new RateLimiter(),
    /**
     * All connections, as they were accepted: the socket that speaks HTTP on each (there is none before TLS is agreed
     * on), and the name of the token whose request it serves. Of those that serve none, the one that has gone longest
     * without showing a good token stands first.
     */
    connections: new Map<Socket, { speaker: Socket | undefined; token?: string | undefined }>(),
    /**
     * The requests, and WebSockets before they are open, that are being handled. A Set would do, but V8 chains the
     * tables that a Set outgrows, and one that has become old keeps all later requests alive until a full collection.
     */
    running: [] as Exchange[],
    /** Who waits for which backend: after a reload, running requests keep their own. */
    queues: new WeakMap<Backend, BackendQueue>(),
    /** The WebSockets that are open. */
    tunnels: new Set<Tunnel>(),
    draining: false,
  };
}

/** @param headersTimeout in milliseconds; named as node:http names it. */
function makeServer(core: Core, headersTimeout: number): http.Server | https.Server {
  const tls = tlsFiles(core.settings);
  const limits = {
    headersTimeout,
    handshakeTimeout: headersTimeout, // TLS
    connectionsCheckingInterval: Math.min(1000, headersTimeout), // Node's default of 30 s would make 10 s mean 40
    requestTimeout: 0, // a slow but steady upload is welcome; one that makes no progress ends in RequestBody
    requireHostHeader: false, // checkHead refuses it, in JSON
    shouldUpgradeCallback: isWebSocket, // Node 24.9 and newer; until it is the oldest, see withoutUpgrade
  };
  const server = tls ? https.createServer({ ...limits, ...tls }) : http.createServer(limits);
  // Their size is limited, and checkHead counts them. Node 20 obeys fields beyond this number, and does not show them
  // (test "a thousand header fields").
  server.maxHeadersCount = 0;
  // By connection, the answers that are due on it, in the order of their requests.
  const queues = new WeakMap<Socket, http.ServerResponse[]>();
  const onRequest = (req: http.IncomingMessage, res: http.ServerResponse, upgrade?: Side): void => {
    // Attack: where shouldUpgradeCallback said no, Node 24 loses what came in one piece behind this request, and takes
    // the next piece, of its body, for a request of its own. So it is the last one (test "a request hidden in the
    // body").
    if (req.headers.upgrade !== undefined) res.shouldKeepAlive = false;
    const queue = queues.get(req.socket) ?? [];
    queues.set(req.socket, queue);
    res.once('close', () => {
      // A client that keeps its connection, now idle, would hold the end up until the deadline.
      if (core.draining) server.closeIdleConnections();
    });
    void handleInTurn(core, req, res, queue, upgrade);
  };
  server.on('request', (req, res) => onRequest(req, res));
  server.on('checkContinue', onRequest); // the pipeline sends "100 Continue" itself, once it wants the body
  server.on('checkExpectation', onRequest); // RFC 9110 10.1.1: an expectation that is not known may be ignored
  const onUpgrade = (req: http.IncomingMessage, socket: Duplex, head: Buffer): void => {
    // Behind a request that is not answered yet, its answer would get between that one's bytes; no client does that.
    if (hasNoPeer(core, req.socket) || queues.get(req.socket)?.length) socket.destroy();
    else if (req.method === 'CONNECT') onRequest(req, answerOn(socket, req)); // its target is none that is passed on
    else if (isWebSocket(req)) onRequest(req, answerOn(socket, req), [socket, head]);
    else server.emit(tls ? 'secureConnection' : 'connection', withoutUpgrade(req, socket, head));
  };
  server.on('upgrade', onUpgrade);
  server.on('connect', onUpgrade);
  // A client that does not take its answer, or does nothing between two requests; not one that waits for us.
  server.setTimeout(core.stallTimeoutMs, (socket: Socket) => {
    if (socket.writableLength > 0 || !queues.get(socket)?.length) socket.destroy();
  });
  server.on('clientError', (error, socket: Socket) => answerUnparsed(core, error, socket, queues.get(socket) ?? []));
  // After clientError, whose answer cannot leave a socket on which TLS is not agreed on, and so would hold it for ever.
  server.on('tlsClientError', (_: Error, socket: Socket) => socket.destroy());
  watchConnections(core, server);
  return server;
}

/**
 * RFC 6455 4.1: a GET without a body. What else wants to be upgraded (Java's HTTP client offers h2c) is an ordinary
 * request, as RFC 9110 7.8 allows: the offer may be ignored.
 */
function isWebSocket(req: http.IncomingMessage): boolean {
  return req.method === 'GET' && req.headers.upgrade?.toLowerCase() === 'websocket' && !hasBody(req);
}

/**
 * Puts a request back into its socket without its wish to be upgraded, for node:http to read it anew. Before 24.9, Node
 * hands every such request over as an upgrade; this can go when that is the oldest (test "a wish for another
 * protocol"). Its bytes are those that were judged by node:http once: a name or value of a header cannot break out of
 * its line.
 */
function withoutUpgrade(req: http.IncomingMessage, socket: Duplex, head: Buffer): Duplex {
  const lines = [`${req.method} ${req.url} HTTP/${req.httpVersion}`];
  for (let i = 0; i < req.rawHeaders.length; i += 2) {
    if (!/^(?:upgrade|connection|http2-settings)$/i.test(req.rawHeaders[i]!)) {
      lines.push(`${req.rawHeaders[i]}: ${req.rawHeaders[i + 1]}`);
    }
  }
  const others = [...connectionNames(req.headers.connection)].filter((name) =>
    name !== 'upgrade' && name !== 'http2-settings'
  );
  if (others.length > 0) lines.push(`Connection: ${others.join(', ')}`);
  socket.unshift(Buffer.concat([Buffer.from(`${lines.join('\r\n')}\r\n\r\n`, 'latin1'), head]));
  return socket;
}

/** Answers a request that node:http has let go of because of its wish to be upgraded, with a refusal as with any. */
function answerOn(socket: Duplex, req: http.IncomingMessage): http.ServerResponse {
  socket.on('error', () => socket.destroy()); // first of all: an error without a listener would end the process
  const res = new http.ServerResponse(req);
  res.assignSocket(socket as Socket);
  res.shouldKeepAlive = false;
  res.once('finish', () => socket.end(() => socket.destroy()));
  return res;
}

/**
 * Keeps account of the connections. At the limit a new one is taken, and a stranger makes room for it: else somebody
 * who holds idle connections, which costs nothing, locks everybody out. A new one is itself a stranger, so that there
 * is always one to close. Bun 1.4 shows a connection only after its first byte, and so counts it only then.
 */
function watchConnections(core: Core, server: http.Server | https.Server): void {
  const { connections } = core;
  server.on('connection', (socket: Socket) => {
    // Of https, the socket that speaks HTTP is another one, and comes once the handshake is done.
    connections.set(socket, { speaker: 'setSecureContext' in server ? undefined : socket });
    socket.once('close', () => connections.delete(socket));
    if (connections.size <= core.settings['limits.connections']) return;
    const [longest] = [...connections].find(([, { token }]) => token === undefined)!;
    connections.delete(longest);
    longest.destroy();
    warnRarely(core, 'limits.connections is reached: connections without a good token are closed for new ones', {});
  });
  server.on('secureConnection', (speaker: Socket) => connections.set(accepted(speaker), { speaker }));
}

/**
 * Handles one request of a connection at a time, though it may have sent more (RFC 9112 9.3.2), and not too many. At
 * the same time they could overtake each other at the backend, and one connection would count for many.
 * @param queue the answers that are due on the connection.
 */
async function handleInTurn(
  core: Core,
  req: http.IncomingMessage,
  res: http.ServerResponse,
  queue: http.ServerResponse[],
  upgrade: Side | undefined,
): Promise<void> {
  const { socket } = req;
  // A connection that was reset has no address any more, but may still deliver what it had sent.
  if (hasNoPeer(core, socket)) return void socket.destroy();
  const before = queue.at(-1);
  // Cut off without a word: an answer could only come behind those that are due.
  if (queue.push(res) > PIPELINE_LIMIT) return void socket.destroy();
  res.once('close', () => queue.splice(queue.indexOf(res), 1));
  try {
    if (before !== undefined) await once(before, 'close');
    // What comes behind an answer that said "Connection: close" gets none: it must not be acted on (RFC 9112 9.6).
    if (!socket.destroyed && before?.shouldKeepAlive !== false) await handle(core, req, res, upgrade);
  } catch (error) { // a mistake of ours, for `handle` answers all others: it must not end the process
    core.log('error', 'internal error', { stack: (error as Error).stack });
    socket.destroy();
  }
}

/** Whether the peer is gone: only those of a unix socket have no address by nature. Without it, no `clients` holds. */
function hasNoPeer(core: Core, socket: Socket): boolean {
  return socket.remoteAddress === undefined && core.settings.listen.path === undefined;
}

/**
 * Answers what the HTTP parser refuses, and heads that do not arrive. What a wrong setting or a common mistake of a
 * client causes is a warning, once a minute; the rest is logged at debug level. Called again for what follows on the
 * connection, it does nothing.
 * @param queue the responses that are due on the connection.
 */
function answerUnparsed(
  core: Core,
  { code: reason = '', rawPacket }: NodeJS.ErrnoException & { rawPacket?: Buffer },
  socket: Socket,
  [current, next]: http.ServerResponse[],
): void {
  const isGone = /^(?:ECONNRESET|HPE_INVALID_EOF)/.test(reason) || (current && socket.readableEnded);
  if (isGone) return void socket.destroy();
  if (!socket.writable && reason.startsWith('HPE_')) return; // it is refused already
  const code = /TIMEOUT/.test(reason)
    ? 'request_timeout'
    : /OVERFLOW/.test(reason)
    ? 'too_many_headers'
    : 'bad_request';
  const fields = { client: normalizeAddress(accepted(socket).remoteAddress), code, reason };
  if (rawPacket?.[0] === 0x16) { // RFC 8446 5.1: a handshake
    warnRarely(core, 'a client speaks TLS, and this port speaks plain HTTP', fields);
  } else if (/^ERR_SSL_(?:HTTP_REQUEST|WRONG_VERSION_NUMBER)$/.test(reason)) {
    warnRarely(core, 'a client speaks plain HTTP or the like, and this port speaks TLS', fields);
  } else if (reason.startsWith('HPE_')) warnRarely(core, `the HTTP parser refuses a request: ${code}`, fields);
  else core.log('debug', 'client error', fields);

  if (!socket.writable) return; // TLS is not agreed on
  // What the client still sends is read and dropped: unread bytes would reset the connection, and lose the response.
  const close = (last = '') => socket.end(last, () => setTimeout(() => socket.destroy(), LINGER_MS).unref());
  const problem = new Problem(code);
  if (current === undefined) {
    const { headers, body } = describeProblem(problem, randomUUID());
    socket.write(headBytes(problem.status, Object.entries({ 'Connection': 'close', ...headers }).flat().map(String)));
    return void close(body);
  }
  // The requests behind the first one get no response, and nothing acts on them.
  const x = core.running.find(({ res }) => res === current);
  const isWithoutLength = x?.req.method === 'POST' && !hasBody(x.req) && x.stage !== 'sent' && next === undefined;
  if (x && !current.headersSent && (!x.req.complete || isWithoutLength)) x.end(problem);
  else if (current.shouldKeepAlive) current.once('close', () => close());
  current.shouldKeepAlive = false;
}

/** Settings that are used once, when the gateway starts: a reload leaves them as they are, and says so. */
const START_ONLY = ['listen', 'limits.connections', 'log.level', 'log.format'] as const;

/**
 * Replaces the rules. A file that is emptied by mistake, or a variable that is lost, must not let everybody in.
 * @returns whether requests go to another backend from now on.
 * @throws {ConfigError} if that would open a gateway that had tokens.
 */
function applySettings(core: Core, server: http.Server | https.Server, settings: Settings): boolean {
  if (core.rules.anonymous === undefined && settings.tokens.length === 0 && !settings['auth.anonymous']) {
    throw new ConfigError([
      'tokens: there were some and now there is none; AUTH_ANONYMOUS=true would let everybody in',
    ]);
  }
  // The same address keeps its connections, its slots and its outage.
  const [backend, next] = [core.settings['backend.url'], settings['backend.url']];
  const isSame = next.href === backend.href;
  if (isSame) settings = { ...settings, 'backend.url': backend };
  const started = Object.fromEntries(START_ONLY.map((path) => [path, core.settings[path]]));
  const needsRestart: string[] = START_ONLY.filter((path) =>
    JSON.stringify(settings[path]) !== JSON.stringify(started[path])
  );
  core.settings = { ...settings, ...started };
  core.rules = makeRules(settings);
  queueOf(core).serve(); // there may be more slots now
  const tls = tlsFiles(settings);
  if (!tls !== !('setSecureContext' in server)) needsRestart.push('tls');
  else if (tls) (server as https.Server).setSecureContext(tls); // for new connections
  closeStaleTunnels(core);
  logRules(core, 'reloaded', { needsRestart: needsRestart.join(',') || undefined });
  return !isSame;
}

/** At every start, on every reload and by `--check`: nobody runs an open gateway without being told. */
const OPEN_WARNING = 'no tokens are configured: every request is let in without a credential';

/** Says what is in force from now on, as a warning if there is something to warn of. */
function logRules(core: Core, message: string, more: object): void {
  const { rules, now } = core;
  const expired = rules.all.filter((token) => isExpired(token, now()));
  const warnings = [
    ...(rules.anonymous ? [OPEN_WARNING] : []),
    ...rules.warnings,
    ...expired.map((token) => `the token "${token.name}" has expired`),
  ];
  core.log(warnings.length > 0 ? 'warn' : 'info', message, {
    ...more,
    backend: rules.backend.origin + rules.backend.prefix,
    tokens: rules.tokens.size,
    names: Array.from(rules.tokens.values(), (token) => token.name).join(',') || undefined,
    allow: [...new Set(rules.all.flatMap((token) => token.allow.written))].join(','),
    warning: warnings.join('; ') || undefined,
  });
}

/** Listens. @returns where, as a URL. Rejects if the port is taken, or the address is not of this machine. */
async function openPort(server: http.Server | https.Server, core: Core): Promise<string> {
  const { path, host, port } = core.settings.listen;
  if (path !== undefined) await removeStaleSocket(path);
  server.listen(path === undefined ? { port, ...(host && { host }) } : { path });
  await once(server, 'listening'); // rejects on 'error'
  const address = server.address() as AddressInfo | string;
  const scheme = tlsFiles(core.settings) ? 'https' : 'http';
  const url = typeof address === 'string'
    ? `unix:${address}`
    : `${scheme}://${isIP(address.address) === 6 ? `[${address.address}]` : address.address}:${address.port}`;
  const sweep = setInterval(closeStaleTunnels, TUNNEL_SWEEP_MS, core).unref();
  server.once('close', () => clearInterval(sweep));
  // Bun 1.4.5 ignores setSecureContext. A test fails where that is mended: then this goes.
  const isFixed = scheme === 'https' && 'Bun' in globalThis;
  const note = isFixed ? 'on Bun, a renewed certificate is taken up only by a restart' : undefined;
  logRules(core, 'listening', { listen: url, note });
  return url;
}

/**
 * Removes the file of a unix socket that nobody listens on any more, for its owner was killed. No other file is
 * touched.
 */
async function removeStaleSocket(path: string): Promise<void> {
  if (!statSync(path, { throwIfNoEntry: false })?.isSocket()) return;
  const probe = connect({ path });
  const isStale = await once(probe, 'connect').then(
    () => false,
    (error: NodeJS.ErrnoException) => error.code === 'ECONNREFUSED',
  );
  probe.destroy();
  if (isStale) unlinkSync(path);
}

/** Ends first what waits, then what is idle, shortly before the deadline what still runs, and then all that is left. */
async function closeGateway(server: http.Server | https.Server, core: Core): Promise<void> {
  core.draining = true;
  for (const tunnel of core.tunnels) tunnel.close('shutdown');
  for (const x of core.running) if (x.stage === 'waiting') x.end(new Problem('shutting_down'));
  if (!server.listening) return;
  const closed = once(server, 'close');
  server.close();
  server.closeIdleConnections();
  // closeIdleConnections of Node 24, Deno 2.9 and those before them leaves one open that has sent nothing yet; Bun 1.4
  // counts no bytes, and closes it (test "a connection on which no request has begun").
  for (const [socket, { speaker }] of core.connections) {
    if (!speaker || (speaker.bytesRead === 0 && !('Bun' in globalThis))) socket.destroy();
  }
  const { shutdown } = core.settings;
  const deadlines = [
    setTimeout(() => endRunning(core), shutdown - Math.min(shutdown / 2, LAST_WORDS_MS)),
    setTimeout(() => core.connections.forEach((_, socket) => socket.destroy()), shutdown),
  ];
  await closed;
  deadlines.forEach(clearTimeout);
  // What is left has no client any more, and is logged.
  for (const x of core.running) x.end(new Problem('client_left'));
  for (let turn = 0; core.running.length > 0 && turn < 100; turn++) await new Promise(setImmediate);
  core.log('info', 'stopped', {});
}

/** Answers what is still running, with what its client must know: whether the backend has the request, or not. */
function endRunning(core: Core): void {
  for (const x of core.running) x.end(new Problem(x.stage === 'sent' ? 'backend_timeout' : 'shutting_down'));
}

// ── PIPELINE ─────────────────────────────────────────────────────────────────────────────────────

/**
 * How far a request has come:
 *
 *   received ──► sending ──► sent ──► answered ──► tunnel
 *                 │   ▲
 *                 ▼   │      `sending`: a connection is made, or a large body goes out without its last byte
 *                waiting     `waiting`: for a slot, for a backend that is down, for a WebSocket's handshake
 *
 * Before `sent` the backend cannot act on it: the gateway's end refuses at once what waits.
 */
type Stage = 'received' | 'waiting' | 'sending' | 'sent' | 'answered' | 'tunnel';

/**
 * A request on its way, in all functions called `x`: what is known of it so far, of which its one log line is made, and
 * what ends it before its time. It has one timer, for client and backend are never waited for at the same time. It has
 * listeners of its own, for those of an AbortSignal cost 5 µs on Node 20.
 */
class Exchange {
  readonly core: Core;
  /** One snapshot: a reload in the middle of a request changes nothing for it. */
  readonly rules: Rules;
  readonly req: http.IncomingMessage;
  readonly res: http.ServerResponse;
  readonly requestId = randomUUID();
  readonly startedMs: number;
  readonly client: string;
  /** Headers of every response: its request id, and what lets a page of an origin on `cors` read it. */
  readonly ownHeaders: Record<string, string>;
  target: Target | undefined;
  route: string | undefined;
  credential: Credential | undefined;
  token: Token | undefined;
  status = 0;
  problem: Problem | undefined;
  bytesIn = 0;
  bytesOut = 0;
  /** How many bytes of its body are held. */
  heldBytes = 0;
  /** Its body, or its query, is not passed on: a send is made of it, and goes in its stead. */
  isMadeSend = false;
  stage: Stage = 'received';
  /** Who waits for the same backend. */
  readonly queue: BackendQueue;
  /** Where it stands in that queue. */
  place: Place | undefined;
  /** The client has left, and the gateway stays until the backend has responded: see `leave`. */
  hasLeft = false;
  /** What is left of the answer: with its end, and in most cases with its head, it is one write. */
  answerRest: Uint8Array | string | undefined;
  /** Why it ends before its time: the first reason that there was. */
  endedBy: Problem | undefined;
  /**
   * What it has under way at the backend, which ends with it. No closure: its context would hold the whole of a request
   * at node:http, and on Node 24 V8 took twice the memory for what then survived.
   */
  underway: { destroy(): unknown } | undefined;
  /** Ends its `standBy`. */
  wake: (() => void) | undefined;
  readonly #listeners: (() => void)[] = [];
  #timer: NodeJS.Timeout | undefined;

  constructor(core: Core, req: http.IncomingMessage, res: http.ServerResponse) {
    this.core = core;
    this.rules = core.rules;
    this.req = req;
    this.res = res;
    this.queue = queueOf(core);
    this.startedMs = core.now();
    this.client = clientAddress(req, core.rules.trustedProxies);
    this.ownHeaders = { 'X-Request-Id': this.requestId, ...corsHeaders(req, core.rules.cors) };
  }

  /**
   * Returns what waits until one of these events comes, or the exchange ends. `once` would wait for ever for the
   * "drain" of a client that has left.
   */
  changesOf(stream: EventEmitter, events: string[]): () => Promise<void> {
    let wake = (): void => {};
    const onChange = (): void => wake();
    for (const event of events) stream.on(event, onChange);
    this.#listeners.push(onChange);
    return () =>
      new Promise((resolve) => {
        wake = resolve;
      });
  }

  /**
   * The client has left. Once the backend has the last byte, it acts, whether anybody listens or not: then the request
   * goes on without its client until the head of the response, for as long as a slot may be held.
   */
  leave(): void {
    const isActing = this.stage === 'sent' && this.place?.timer && !this.place.isOverdue;
    if (!isActing) return this.end(new Problem('client_left'));
    this.hasLeft = true;
    this.heldBytes = 0;
  }

  /** Ends it before its time, wherever it is, for this reason, unless there was one before. */
  end(reason: Problem): void {
    if (this.endedBy !== undefined) return;
    this.endedBy = this.hasLeft && reason.code !== 'client_left' ? new Problem('client_left') : reason;
    this.underway?.destroy();
    this.wake?.();
    for (const listener of this.#listeners) listener();
  }

  /**
   * Ends it, or does something else, with this problem if nothing else is waited for before the time is over; Infinity
   * for no limit.
   */
  waitFor(timeoutMs: number, code: ProblemCode, act = (problem: Problem): void => this.end(problem)): void {
    clearTimeout(this.#timer);
    const onTimeout = (): void => act(new Problem(code, { reason: 'timeout' }));
    this.#timer = timeoutMs < Infinity ? setTimeout(onTimeout, timeoutMs) : undefined;
  }

  /** The backend's time begins. */
  waitForBackend(): void {
    this.waitFor(this.rules.backendTimeoutMs, 'backend_timeout');
  }

  /**
   * Waits to be woken, while nothing of it is at the backend.
   * @throws {Problem} what ended it instead; the gateway's end does at once.
   */
  async standBy(): Promise<void> {
    if (this.core.draining) this.end(new Problem('shutting_down'));
    this.stage = 'waiting';
    if (!this.endedBy) await new Promise<void>((resolve) => (this.wake = resolve));
    if (this.stage === 'waiting') this.stage = 'sending';
    if (this.endedBy) throw this.endedBy;
  }

  /** Nothing is awaited any more. */
  stopTimer(): void {
    clearTimeout(this.#timer);
  }
}

/**
 * The way of a request, and of a WebSocket, which is one without a body. The order is a security claim; each step says
 * why it stands where it does.
 * @param upgrade the client's side, where it wants to speak WebSocket from here on.
 */
async function handle(core: Core, req: http.IncomingMessage, res: http.ServerResponse, upgrade?: Side): Promise<void> {
  const x = new Exchange(core, req, res);
  const body = new RequestBody(x);
  begin(x);
  try {
    // Before everything: a health check must not depend on what is being checked.
    if ((req.method === 'GET' || req.method === 'HEAD') && req.url === '/healthz') return answerHealth(x);
    if (core.draining) throw new Problem('shutting_down');

    // Before every refusal, or the page could not read it. Of another origin it is a request like others.
    if (answerPreflight(x)) return;

    // Before any decision: all later steps judge this one canonical form, and it is what is sent.
    checkHead(req);
    const target = x.target = parseTarget(req.method ?? '', req.url ?? '');
    x.route = target.route?.template ?? maskPath(target.segments);

    // Before the credential: an address that no token accepts costs neither a hash nor a byte of body.
    if (!x.rules.all.some((token) => addressAllowed(token.clients, x.client))) throw new Problem('client_not_allowed');

    // Header, path, query; the body only if none was there and some token accepts that form, and then its head alone.
    x.credential = findCredential(req, target) ?? await body.readCredential();

    // Before the endpoint: what exists here is nobody's business who holds no token.
    const token = identify(x);
    if (token instanceof Problem) return refuse(x, token);
    x.token = token;
    claimConnection(x, token);

    // After the token: whether a browser added it by itself depends on the form of the right credential. Before the
    // endpoint: a page of another site learns nothing of it.
    const refusal = refusalOfPage(x.rules, x) ?? refusalOf(token, target, x.client);
    if (refusal) return refuse(x, refusal);

    // After the endpoint: a request that could never pass must not use up the rate of those that can.
    takeRate(core, token);

    // The head of the body, or all of a small one, is judged before the backend is contacted; what is made of a body is
    // judged in its stead. Then it is relayed, when it is its turn: once, and never again.
    const judge = (field: Field): void => judgeField(token, target, field);
    x.isMadeSend = makesSends(token) && target.route === SEND_ROUTE;
    if (x.isMadeSend) {
      const payload = takeQuery(x, target) ??
        readPayload(token, await body.readWhole(PAYLOAD_LIMIT_BYTES), req.headers['content-type']);
      await relay(x, { ...target, method: SEND_ROUTE.method, query: '' }, judgeSend(makeSend(token, payload), judge));
    } else {
      await relay(x, target, await body.open(target, judge), upgrade);
      if (x.stage === 'tunnel') closeStaleTunnels(core); // the rules may have changed while the backend was asked
    }
  } catch (error) {
    refuse(x, error);
  } finally {
    core.running.splice(core.running.indexOf(x), 1);
    void body.endAnswer();
    logExchange(x);
  }
}

/**
 * From here on it runs. A client that leaves takes its request with it; one that stays is a stranger again until it
 * shows a good token.
 */
function begin(x: Exchange): void {
  const { connections, running } = x.core;
  running.push(x);
  const socket = accepted(x.req.socket);
  x.res.once('close', () => {
    if (!x.res.writableFinished) x.leave();
    const connection = connections.get(socket);
    if (connection?.token === undefined) return;
    connections.delete(socket); // set anew, behind those that showed their token earlier
    connections.set(socket, { speaker: connection.speaker });
  });
}

/**
 * Marks the connection as one that serves this token, so that it is not closed for a new one. Where there are several
 * tokens, one token holds half of all connections at most: a stolen one must not lock the others out.
 * @throws {Problem} busy.
 */
function claimConnection({ core: { connections, settings }, rules, req }: Exchange, { name }: Token): void {
  const limit = Math.max(1, settings['limits.connections'] / 2);
  // While there are fewer connections than that, nothing has to be counted.
  if (rules.tokens.size > 1 && connections.size > limit) {
    const others = [...connections.values()].filter(({ token }) => token === name);
    if (others.length + 1 > limit) throw new Problem('busy', { reason: 'half_of_connections' });
  }
  const connection = connections.get(accepted(req.socket));
  if (connection) connection.token = name;
}

/** A connection as it was accepted, which on Node and Deno is below the socket that speaks TLS. */
function accepted(socket: Socket & { _parent?: Socket | null }): Socket {
  return socket._parent ?? socket;
}

/** Says that the gateway runs, and nothing of backend, version or tokens: anybody may ask. */
function answerHealth(x: Exchange): void {
  x.route = '/healthz';
  x.status = 200;
  x.res.writeHead(200, { 'Content-Type': 'text/plain', 'Content-Length': 3, ...x.ownHeaders });
  x.answerRest = 'ok\n';
}

/**
 * Answers with what went wrong. After the first byte there is no honest way to say so, but to break off: a body that is
 * cut must look cut. A mistake of ours is told to the log with its stack, and to the client without.
 * @param thrown or returned by a step.
 */
function refuse(x: Exchange, thrown: unknown): void {
  const error = x.endedBy ?? thrown; // who left meanwhile is told nothing, and noted as such
  const problem = x.problem = error instanceof Problem ? error : new Problem('internal_error', { cause: error });
  x.status = problem.status;
  if (problem !== error) {
    const stack = error instanceof Error ? error.stack : String(error);
    x.core.log('error', 'internal error', { requestId: x.requestId, stack });
  }
  if (x.core.draining || problem.code === 'bad_request') x.res.shouldKeepAlive = false;
  if (x.res.headersSent) return void x.req.socket.destroy();
  const { headers, body } = describeProblem(problem, x.requestId, x.req);
  x.res.writeHead(problem.status, http.STATUS_CODES[problem.status] ?? '', { ...headers, ...x.ownHeaders });
  x.answerRest = body;
}

/**
 * The one line of a request: the route's template and never the path, which holds phone numbers; the token's name, and
 * nothing that a client wrote but the method, which node:http knows, and an origin that is not on `cors`.
 */
function logExchange(x: Exchange): void {
  const { core, requestId, client, route, status, bytesIn, bytesOut } = x;
  const { code, details = {} } = x.problem ?? {};
  const origin = details.reason === 'no_credential' ? unlistedOrigin(x) : undefined;
  const reason = origin ? 'origin_not_listed' : details.reason;
  const [method, token, form] = [x.req.method, x.token?.name, x.credential?.form];
  const ms = Math.round(core.now() - x.startedMs);
  // A flood must not fill a small computer's card. Without a good token, health checks and preflights are logged at
  // debug, and so are the refusals of an address beyond its 30 a minute.
  const isQuiet = x.token === undefined &&
    (status < 400 || core.lineLimiter.take(failureKey(client), FAILURE_RATE, core.now()) > 0);
  const level = isQuiet ? 'debug' : status >= 500 ? 'error' : status >= 400 ? 'warn' : 'info';
  const fields = { requestId, client, method, route, token, form, status, code, reason, origin, bytesIn, bytesOut, ms };
  core.log(level, 'request', fields);
}

/**
 * Closes the WebSockets whose token is gone, has expired, or may no longer do this, or whose page may not. One is
 * judged when it opens; without this it would outlive its token by weeks.
 */
function closeStaleTunnels(core: Core): void {
  const { anonymous, tokens } = core.rules;
  for (const { x, close } of core.tunnels) {
    const token = anonymous ?? tokens.get(x.token?.digest ?? '');
    const takesForm = anonymous !== undefined || token?.methods.has(x.credential!.form);
    const isGood = token !== undefined && takesForm && !isExpired(token, core.now());
    if (!isGood || refusalOfPage(core.rules, x) || refusalOf(token, x.target!, x.client)) close('no_longer_allowed');
  }
}

// ── TARGET ───────────────────────────────────────────────────────────────────────────────────────
// fetch normalises what a check did not see (`..`, `%2e%2e`, `\`, TAB), and the backend decodes once
// more (`:number` twice). So a target is taken apart once, judged, and built anew from its parts.

/** A request target that passed the rules, in parts. What is sent to the backend is built from these alone. */
interface Target {
  readonly method: string;
  /** Decoded, none empty; the `@auth` segment is taken out. */
  readonly segments: readonly string[];
  /** The raw query without the `@auth` parameter, and the same decoded. */
  readonly query: string;
  readonly parameters: readonly (readonly [name: string, value: string])[];
  readonly route: Route | undefined;
  readonly pathSecret: string | undefined;
  readonly querySecret: string | undefined;
}

/**
 * @throws {Problem} bad_request, too_many_headers, or bad_target for two Host headers, of which each program takes
 * another. Node and Deno let other versions of HTTP through as far as here.
 */
function checkHead(req: http.IncomingMessage): void {
  const isKnown = req.httpVersion === '1.0' || (req.httpVersion === '1.1' && req.headers.host !== undefined);
  if (!isKnown) throw new Problem('bad_request', { reason: `http_${req.httpVersion}` });
  if (req.rawHeaders.length > 2 * HEADERS_LIMIT) throw new Problem('too_many_headers');
  if (headerValues(req, 'host').length > 1) throw badTarget('it comes with more than one Host header');
}

/**
 * Makes a raw request target canonical.
 * @throws {Problem} bad_target, or bad_credential for two `@auth` in one place.
 */
function parseTarget(method: string, raw: string): Target {
  // Origin-form only (RFC 9112 3.2.1): absolute-form names a host, and the backend would honour it.
  if (!/^\/[!"$-[\]-~]*$/.test(raw)) throw badTarget('it must be a path of printable ASCII without "\\" and "#"');
  if (/%(?![0-9a-f]{2})/i.test(raw)) throw badTarget('a percent sign must be followed by two hexadecimal digits');
  const cut = raw.indexOf('?');
  const path = cut < 0 ? raw : raw.slice(0, cut);

  // The backend runs a handler for /v1%2Fregister and takes %252B for a plus; proxies before it see other paths there.
  if (/%(?:2f|5c|2e|25)/i.test(path)) {
    throw badTarget(
      'an encoded slash, backslash, dot or percent sign in a path means different things to different programs',
    );
  }
  // Empty segments are dropped, because a base URL that ends in "/" gives "//v1/about".
  const segments = path.split('/').filter((segment) => segment !== '').map((segment) => decodePart(segment));
  const credentials = segments.filter((segment) => segment.startsWith('@auth='));
  const pathSecret = takeSecret(credentials)?.slice('@auth='.length);
  // Anywhere else, what stands before it would be a path that nobody has judged.
  if (pathSecret !== undefined && !segments.shift()?.startsWith('@auth=')) {
    throw badTarget('the "@auth=" segment must come first');
  }
  const route = findRoute(method, segments);
  for (const [i, segment] of segments.entries()) {
    // fetch, URL and many proxies would resolve them: /v2/../v1/register is account setup to some.
    if (segment === '.' || segment === '..') throw badTarget('dot segments are not resolved');
    // Attack: /v1/groups/--username=…. An attachment's id is a file name, and random: one in 64 begins so.
    if (segment.startsWith('-') && route?.parts[i] !== ':attachment') {
      throw badTarget('a path segment may not begin with "-": it would become an option of signal-cli');
    }
  }
  const query = cut < 0 ? [] : raw.slice(cut + 1).split('&').filter((pair) => pair !== '');
  const pairs = query.map((pair) => parsePair(pair, isSendByGet({ method, route })));
  const others = pairs.filter((pair) => pair.name !== '@auth');
  return {
    method,
    segments,
    query: others.map((pair) => pair.raw).join('&'),
    parameters: others.map((pair) => [pair.name, pair.value] as const),
    route,
    pathSecret,
    querySecret: takeSecret(pairs.filter((pair) => pair.name === '@auth').map((pair) => pair.value)),
  };
}

/**
 * The route of a request, if the backend has one.
 * @throws {Problem} bad_target for what cannot stand for a parameter.
 */
function findRoute(method: string, segments: readonly string[]): Route | undefined {
  const route = ROUTES.find((candidate) =>
    (candidate.method === method || isSendByGet({ method, route: candidate })) && partsMatch(candidate.parts, segments)
  );
  route?.parts.forEach((part, i) => {
    const [check, expected] = PARAMETERS.get(part) ?? [];
    if (check?.(segments[i]!) === false) throw badTarget(expected!);
  });
  return route;
}

/**
 * Decodes a segment, or a name or a value of the query, once; what is still encoded then stays so.
 * @param isText whether line feeds and tabs may be in it.
 * @throws {Problem} bad_target: NUL ends an argument, and a line feed a line of somebody's log.
 */
function decodePart(text: string, isText = false): string {
  let decoded: string;
  try {
    decoded = decodeURIComponent(text);
  } catch {
    throw badTarget('its percent-encoded bytes are not UTF-8');
  }
  if (/\p{Cc}/u.test(isText ? decoded.replace(/[\n\t]/g, '') : decoded)) {
    throw badTarget('it holds an encoded control character');
  }
  return decoded;
}

/**
 * One `name=value` of a query, decoded as the backend's language does it (`+` is a space).
 * @param isOfSend whether its `message` is a text of several lines.
 */
function parsePair(pair: string, isOfSend: boolean): { raw: string; name: string; value: string } {
  const [, encoded = '', value = ''] = /^([^=]*)=?(.*)$/.exec(pair.replaceAll('+', ' '))!;
  const name = decodePart(encoded);
  return {
    // These four are all that fetch would rewrite; done here, so that what is built is what is sent.
    raw: pair.replace(/["'<>]/g, (char) => `%${char.charCodeAt(0).toString(16).toUpperCase()}`),
    name,
    value: decodePart(value, isOfSend && name === 'message'),
  };
}

/** The segments that routes spell: words that a log may show of any path. */
const SPELLED = new Set(ROUTES.flatMap(({ parts }) => parts.filter((part) => !/^[:*]/.test(part))));

/** A path for the log, without what may be a phone number or a token; no route has as many segments as are kept. */
function maskPath(segments: readonly string[]): string {
  return `/${segments.slice(0, 8).map((segment) => SPELLED.has(segment) ? segment : '*').join('/')}`;
}

// ── CREDENTIALS ──────────────────────────────────────────────────────────────────────────────────

/** What a request shows for itself, right or wrong. */
interface Credential {
  readonly form: Form;
  /** Undefined where the form was right and the content could not be read: it is wrong, not absent. */
  readonly secret: string | undefined;
  /** Why it could not, for the log: a good token under another user or scheme is a mistake that is made. */
  readonly fault?: string | undefined;
}

/** A token with all its settings resolved. Its secret is known by digest alone. */
interface Token {
  readonly name: string;
  readonly digest: string;
  readonly methods: ReadonlySet<Form>;
  readonly allow: Allow;
  readonly senders: ReadonlySet<string> | undefined;
  readonly recipients: ReadonlySet<string> | undefined;
  readonly rate: Rate | undefined;
  readonly clients: AddressList | undefined;
  readonly expiresMs: number | undefined;
  readonly defaults: SendDefaults | undefined;
  readonly message: Template | undefined;
}

/**
 * The first credential outside the body, in the order header, path, query. One decides: if it is
 * wrong, nothing falls through to the next, or a guess could hide behind a form that is not logged.
 * @throws {Problem} bad_credential for two Authorization headers.
 */
function findCredential(req: http.IncomingMessage, target: Target): Credential | undefined {
  // n8n's test of its credentials sends an empty one if it has no token.
  const header = takeSecret(headerValues(req, 'authorization').filter((value) => /[^ \t]/.test(value)));
  if (header !== undefined) return parseAuthorization(header);
  if (target.pathSecret !== undefined) return { form: 'path', secret: target.pathSecret };
  if (target.querySecret !== undefined) return { form: 'query', secret: target.querySecret };
  return undefined;
}

/** The one secret in a place, if any; two are nobody's choice to make. */
function takeSecret(found: string[]): string | undefined {
  if (found.length > 1) throw new Problem('bad_credential');
  return found[0];
}

/** All values of a header, from the raw list: the parsed one keeps only the first Authorization. */
function headerValues({ rawHeaders }: http.IncomingMessage, name: string): string[] {
  const isNamed = (field: string): boolean => field.length === name.length && field.toLowerCase() === name;
  return rawHeaders.filter((_, i) => i % 2 === 1 && isNamed(rawHeaders[i - 1]!));
}

/**
 * RFC 6750 2.1 and RFC 7617 2; the scheme is case-insensitive (RFC 9110 11.1). Base64 is read as leniently as Node
 * does: what comes out is compared by its digest, so that a wrong one is only wrong. White space is SP and HTAB alone
 * (RFC 9110 5.6.3): the last byte of "à" is A0, which JavaScript takes for a space.
 */
function parseAuthorization(value: string): Credential {
  const [, scheme = '', rest = ''] = /^[ \t]*([^ \t]+)[ \t]*(.*[^ \t])?/s.exec(value) ?? [];
  if (scheme.toLowerCase() === 'basic') {
    // The user is fixed, so that nobody takes it for a name of the token's, which it is not.
    const [, password] = /^api:(.*)$/s.exec(Buffer.from(rest, 'base64').toString()) ?? [];
    return { form: 'basic', secret: password, fault: password === undefined ? 'wrong_user' : undefined };
  }
  // node:http hands header bytes over as Latin-1; a secret is UTF-8.
  if (scheme.toLowerCase() === 'bearer') return { form: 'bearer', secret: Buffer.from(rest, 'latin1').toString() };
  return { form: 'bearer', secret: undefined, fault: 'unknown_scheme' };
}

/**
 * Whose request this is. Every refusal looks the same from outside; the log has the reason.
 *
 * The digest is looked up in a map. How long that takes depends on the SHA-256 of what was sent, which
 * tells nothing about how much of a secret was right. A right credential is never refused for wrong
 * ones from the same address, so that nobody can lock anybody out.
 * @returns the token, or the problem: unauthorized, too_many_failures. To throw one costs 5 µs, of 55 for all of it.
 */
function identify({ core, rules, credential, client }: Exchange): Token | Problem {
  if (rules.anonymous) return rules.anonymous;
  if (credential === undefined) return new Problem('unauthorized', { reason: 'no_credential' });
  const token = credential.secret === undefined ? undefined : rules.tokens.get(digestOf(credential.secret));
  const expired = token !== undefined && isExpired(token, core.now());
  if (token && !expired && token.methods.has(credential.form)) return token;
  const reason = !token ? credential.fault ?? 'unknown_token' : expired ? 'expired_token' : 'form_not_accepted';
  const retryAfterMs = core.failureLimiter.take(failureKey(client), FAILURE_RATE, core.now());
  return retryAfterMs > 0
    ? new Problem('too_many_failures', { reason, retryAfterMs })
    : new Problem('unauthorized', { reason });
}

/** Asked at every request: a token that expires needs no reload. */
function isExpired({ expiresMs }: Token, nowMs: number): boolean {
  return expiresMs !== undefined && expiresMs <= nowMs;
}

/** Failures are counted per IPv4 address and per IPv6 /64, which is what one household or host is given. */
function failureKey(address: string): string {
  if (isIP(address) !== 6) return address;
  const [left = [], right = []] = address.split('::').map((part) => part.split(':').filter(Boolean));
  return [...left, ...Array<string>(8 - left.length - right.length).fill('0'), ...right].slice(0, 4).join(':');
}

// ── PAGES ────────────────────────────────────────────────────────────────────────────────────────

/**
 * What lets a page read an answer, if its origin is on `cors`. Two Origin headers are one here that no origin equals.
 * There is no Access-Control-Allow-Credentials: what the browser remembers is not the page's, which must hold a token.
 */
function corsHeaders(req: http.IncomingMessage, cors: ReadonlySet<string>): Record<string, string> | false {
  const { origin = '' } = req.headers;
  return cors.has(origin) && {
    'Access-Control-Allow-Origin': origin,
    'Access-Control-Expose-Headers': 'Retry-After, X-Request-Id',
    'Vary': 'Origin',
  };
}

/**
 * The origin of a page that is not on `cors`, for the log: a person whose page does not work finds there what to add.
 * Undefined for what no browser sends: it may hold a secret.
 */
function unlistedOrigin({ req, rules }: Exchange): string | undefined {
  const { origin = '' } = req.headers;
  return rules.cors.has(origin) ? undefined : /^(?:null|[\w+.-]+:\/\/[!-.0->A-~]+)$/.exec(origin)?.[0].slice(0, 100);
}

/**
 * The headers that a listed page may send. Browsers ask for `accept` and the languages too, if a value is unusual
 * (Fetch 2.2.2).
 */
const PAGE_HEADERS = ['authorization', 'content-type', 'accept', 'accept-language', 'content-language', 'x-request-id'];

/**
 * Answers a browser that asks whether a page of a listed origin may send what it wants to. It says the same of every
 * target, a malformed one too: what exists here is nobody's business who holds no token.
 * @returns whether it was such a question.
 */
function answerPreflight(x: Exchange): boolean {
  const { 'access-control-request-method': method, 'access-control-request-headers': names = '' } = x.req.headers;
  if (x.req.method !== 'OPTIONS' || method === undefined || !x.rules.cors.has(x.req.headers.origin ?? '')) return false;
  const asked = names.toLowerCase().split(/[ \t,]+/);
  x.status = 204;
  x.res.writeHead(204, {
    ...x.ownHeaders,
    'Access-Control-Allow-Methods': METHODS.join(', '),
    'Access-Control-Allow-Headers': PAGE_HEADERS.filter((name) => asked.includes(name)).join(', '),
    'Access-Control-Max-Age': PREFLIGHT_MS / 1000, // in seconds
  });
  return true;
}

/** Where a GET does something: it sends, takes messages away, or is setup (a code that links a phone). */
const ACTING_PREFIXES = new Set([...SETUP_PREFIXES, 'v2/send', 'v1/receive']);

/**
 * Keeps out the pages of other sites, to whose requests a browser adds what it remembers by itself: a Basic password,
 * or, where there are no tokens, the mere fact of being on this machine. The other forms a page has to know.
 */
function refusalOfPage(rules: Rules, { req, target, credential }: Exchange): Problem | undefined {
  if (!rules.anonymous && credential?.form !== 'basic') return undefined;
  const { origin = '', 'sec-fetch-site': site, 'user-agent': agent } = req.headers;
  const isProxied = isTrustedProxy(req, rules.trustedProxies);
  const host = String((isProxied && req.headers['x-forwarded-host']) || (req.headers.host ?? ''));
  if (rules.anonymous && !isProxied && !isLocalName(host, rules.cors)) {
    const detail = 'Without tokens the gateway is called by an IP address or a local name, not by one of public DNS.';
    return new Problem('cross_site', { reason: 'public_host', detail });
  }
  if (rules.cors.has(origin)) return undefined;
  // Over plain http Chromium sends no Sec-Fetch-Site (with a WebSocket nowhere), and with a GET no Origin. The
  // User-Agent remains, which a page cannot take away.
  const from = site ?? (origin === '' ? 'none' : origin.split('://')[1] === host ? 'same-origin' : 'cross-site');
  // Attack: "none" is also what Chromium says of a prefetch by the speculation rules of any page, and every browser of
  // a typed address that another site redirects.
  const isActing = req.method === 'GET' && ACTING_PREFIXES.has(prefixOf(target!.segments));
  const isTaken = from === 'none' && !(isActing && (site !== undefined || agent?.startsWith('Mozilla/')));
  return isTaken || from === 'same-origin' ? undefined : new Problem('cross_site');
}

/** Not under a name of somebody else's, who could point it here and have the browser take us for their page. */
function isLocalName(host: string, cors: ReadonlySet<string>): boolean {
  const name = host.toLowerCase().replace(/:\d+$/, '').replace(/^\[(.*)\]$/, '$1');
  return isIP(name) !== 0 ||
    /^[^.]*$|\.(?:localhost|local|lan|home|localdomain|intranet|internal|home\.arpa|test)$/.test(name) ||
    [...cors].some((origin) => new URL(origin).hostname === name);
}

// ── ENDPOINTS ────────────────────────────────────────────────────────────────────────────────────

/**
 * Why a token may not do this, if so: its addresses, its endpoints, its accounts. Asked again of an open WebSocket when
 * the rules change.
 */
function refusalOf(token: Token, target: Target, client: string): Problem | undefined {
  return addressAllowed(token.clients, client) ? refusalOfEndpoint(token, target) : new Problem('client_not_allowed');
}

/** The same without the addresses: `--check` has no client. */
function refusalOfEndpoint(token: Token, target: Target): Problem | undefined {
  const { method, route, segments, parameters } = target;
  const grant = findGrant(token.allow, target);
  if (grant === undefined || (isSendByGet(target) && !makesSends(token))) return refusalOfRoute(token.allow, target);
  // On a route that is not known, nobody can tell whose account it uses or whom it writes to: a newer backend, a
  // plugin.
  const isOpaque = route === undefined || route.parts.at(-1) === '*';
  if (isOpaque && (token.senders || token.recipients)) {
    return new Problem('endpoint_not_allowed', { reason: 'unknown_route_for_confined_token' });
  }
  if (token.senders && !isOpaque) {
    const at = route.parts.indexOf(':number');
    if (at >= 0 && !token.senders.has(segments[at] ?? '')) return new Problem('sender_not_allowed');
    // All attachments, all accounts: routes without an account show every account's.
    if (at < 0 && route.group !== 'send' && route.group !== 'info' && grant !== 'named') {
      return new Problem('endpoint_not_allowed', { reason: 'route_without_account' });
    }
  }
  // A link to join a group lets anybody in, whom the token may not write to.
  if (token.recipients && grant !== 'named' && GROUP_CHANGE.test(`${method} ${route?.template}`)) {
    return new Problem('endpoint_not_allowed', { reason: 'group_change_not_named' });
  }
  // The numbers of a search become arguments of signal-cli, like those in a body.
  const [mistake] = parameters.flatMap(([name, value]) => name === 'numbers' && mistakeInArgument(value) || []);
  if (mistake) return badField('numbers', mistake);
  // Who may not write to a group may not change it either.
  const group = segments[route?.parts.indexOf(':groupid') ?? -1];
  return group === undefined || method === 'GET' ? undefined : refusalOfRecipient(token, group);
}

/** Makes a group, or changes who is in one or how one gets in. */
const GROUP_CHANGE = /^(?:POST|PUT) \/v1\/groups\/:number(?:\/:groupid)?$|\/(?:members|admins)$/;

/** Whether an allowlist lets a target through, and whether it names it: by a pattern that spells its first segments. */
function findGrant(allow: Allow, target: Target): 'named' | 'covered' | undefined {
  const { segments, route } = target;
  if (isSendByGet(target)) return allow.patterns.some(spellsSendByGet) ? 'named' : undefined;
  const matches = allow.patterns.filter(({ method, parts }) =>
    (method === '*' ? METHODS.includes(target.method) : method === target.method) &&
    partsMatch(parts, segments) &&
    parts.every((part, i) =>
      // What a route spells is no parameter: DELETE /v1/devices/:number/local-data deletes more than a device.
      !part.startsWith(':') ||
      (!isLiteral(route?.parts[i] ?? part) && PARAMETERS.get(part)?.[0](segments[i]!) !== false)
    )
  );
  if (matches.some(({ parts }) => !/[*:]/.test(prefixOf(parts)))) return 'named';
  if (route && allow.groups.has(route.group)) return 'covered';
  // No wildcard reaches setup.
  return matches.length > 0 && !SETUP_PREFIXES.has(prefixOf(segments)) ? 'covered' : undefined;
}

/** Why a target is not on an allowlist: setup first, so that nothing is learned about what is there. */
function refusalOfRoute(allow: Allow, target: Target): Problem {
  const { route, segments } = target;
  if (SETUP_PREFIXES.has(prefixOf(segments)) && !allow.groups.has('setup')) return new Problem('setup_blocked');
  if (route && !isSendByGet(target)) return new Problem('endpoint_not_allowed');
  const others = ROUTES.filter(({ parts }) => partsMatch(parts, segments));
  return others.length > 0
    ? new Problem('method_not_allowed', { allow: [...new Set(others.map(({ method }) => method))] })
    : new Problem('unknown_endpoint');
}

// ── RATE ─────────────────────────────────────────────────────────────────────────────────────────

/** So many requests in so much time; `written` as the configuration has it. */
interface Rate {
  readonly count: number;
  readonly perMs: number;
  readonly written: string;
}

/**
 * A token bucket per key, kept as one number each: the time at which the bucket would be full again
 * (the generic cell rate algorithm). It holds `count` at first and regains one every `perMs / count`.
 */
class RateLimiter {
  readonly #fullAtMs = new Map<string, number>();

  /** Takes one from the key's bucket. Returns 0, or the milliseconds after which there will be one. */
  take(key: string, rate: Rate, nowMs: number): number {
    const known = this.#fullAtMs.get(key) ?? nowMs;
    // No further ahead than a bucket takes to fill: a clock that was set back locks nobody out. A refusal must store
    // that too, or every further request would find the bucket as empty.
    const fullAtMs = Math.min(Math.max(known, nowMs), nowMs + rate.perMs);
    const waitMs = fullAtMs + rate.perMs / rate.count - nowMs - rate.perMs;
    const isTaken = waitMs <= 0.001; // the sum of fractions may be a hair too large
    this.#fullAtMs.delete(key); // set anew, so that the map's order is that of use
    this.#fullAtMs.set(key, isTaken ? fullAtMs + rate.perMs / rate.count : fullAtMs);
    if (this.#fullAtMs.size > RATE_KEYS_LIMIT) this.#fullAtMs.delete(this.#fullAtMs.keys().next().value!);
    return isTaken ? 0 : waitMs;
  }
}

/** Counts a request against its token, whatever becomes of it at the backend. @throws {Problem} rate_limited. */
function takeRate(core: Core, token: Token): void {
  const retryAfterMs = token.rate ? core.rateLimiter.take(token.name, token.rate, core.now()) : 0;
  if (retryAfterMs > 0) throw new Problem('rate_limited', { retryAfterMs });
}

// ── REQUEST BODY ─────────────────────────────────────────────────────────────────────────────────
// A body is read in two steps. Its head (64 KiB) is read first, for the credential, and is judged whole before the
// backend hears of it; what comes after is judged as it streams. Nobody unknown has more than the head read, and
// nothing is read at all before it is wanted, which `Expect: 100-continue` asks for.

/** What is relayed: nothing, a body in one piece (a small one, or a send that was made), or a large one as a stream. */
type Content = Uint8Array | {
  chunks: () => AsyncGenerator<Uint8Array>;
  length: number | undefined;
} | undefined;

/** RFC 9112 6.3: a request has a body if one of these two headers says so. */
function hasBody({ headers }: http.IncomingMessage): boolean {
  return headers['transfer-encoding'] !== undefined || (headers['content-length'] ?? '0') !== '0';
}

/**
 * Reads a message of node:http, from either side, chunk by chunk. Cheaper than its async iterator: most messages are
 * there when they are asked for, and nothing is listened to then.
 */
class MessageReader {
  readonly #x: Exchange;
  readonly #message: http.IncomingMessage;
  readonly #broken: ProblemCode;
  #changed: (() => Promise<void>) | undefined;
  /** The message has broken off, whatever it says of itself. */
  isBroken = false;

  /** @param broken what it means if the message breaks off. */
  constructor(x: Exchange, message: http.IncomingMessage, broken: ProblemCode) {
    this.#x = x;
    this.#message = message;
    this.#broken = broken;
  }

  /**
   * The next chunk, or undefined at the end.
   * @param timeoutMs how long it may take; after it the exchange ends with `code`.
   * @throws {Problem} what ended the exchange, or that the message broke off.
   */
  async next(timeoutMs: number, code: ProblemCode): Promise<Uint8Array | undefined> {
    const message = this.#message;
    for (let isFirst = this.#changed === undefined;; isFirst = false) {
      if (this.#x.endedBy) throw this.#x.endedBy;
      const chunk = message.read() as Buffer | null;
      if (chunk !== null) return chunk;
      const isEnded = message.readableEnded || (message.complete && message.readableLength === 0);
      if (isEnded && !this.isBroken) return undefined;
      if (message.destroyed || this.isBroken) throw new Problem(this.#broken, { reason: 'aborted' });
      // What came in one packet with the head is handed over by the parser when this function returns.
      if (isFirst) await undefined;
      else {
        this.#x.waitFor(timeoutMs, code);
        await (this.#changed ??= this.#x.changesOf(message, ['readable', 'end', 'close', 'error']))();
      }
    }
  }
}

/** A request's body: first its head, where the credential may be, then, once it is admitted, all or the rest of it. */
class RequestBody {
  readonly #x: Exchange;
  readonly #reader: MessageReader;
  readonly #declaredBytes: number | undefined;
  readonly #lingerMs: number;
  readonly #startedMs = performance.now();
  readonly #keepAlive: boolean;
  #owedBytes = PACE_BYTES; // so much must come within #leftMs of reading
  #leftMs: number;
  #head: Uint8Array[] = []; // as it came
  #passed: Uint8Array[] = []; // what of it may go on
  #scan: BodyScan | undefined;
  #rest: Uint8Array | undefined; // read from the socket together with the head's last byte
  #isComplete: boolean;

  constructor(x: Exchange) {
    const { req, res, core } = x;
    this.#x = x;
    this.#reader = new MessageReader(x, req, 'client_left');
    this.#lingerMs = Math.min(LINGER_MS, core.stallTimeoutMs / 4);
    this.#leftMs = core.stallTimeoutMs;
    this.#isComplete = !hasBody(req);
    this.#keepAlive = res.shouldKeepAlive;
    const { 'content-length': length, expect } = req.headers;
    this.#declaredBytes = length === undefined ? undefined : Number(length);
    // Until its end has come: an answer before that says that the connection ends with it, if there is more to come
    // than is read of anybody's, or if it may never come. A client that is told so sends no further request on it to be
    // lost.
    const isLong = (this.#declaredBytes ?? Infinity) > HEAD_LIMIT_BYTES;
    if (!this.#isComplete && (isLong || expect !== undefined)) res.shouldKeepAlive = false;
  }

  /**
   * Looks for `auth` in the head of the body, if some token accepts that form. What else is wrong with its fields is
   * not said to somebody unknown, and what does not begin like an object (a text, a form) has none.
   * @throws {Problem} bad_json, bad_field (of `auth`), unsupported_encoding, request_timeout, client_left.
   */
  async readCredential(): Promise<Credential | undefined> {
    if (this.#isComplete || !this.#x.rules.forms.has('body')) return undefined;
    try {
      const { auth } = await this.#scanHead();
      return auth === undefined ? undefined : { form: 'body', secret: auth };
    } catch (error) {
      if (!this.#isNoObject(error)) throw error;
      return undefined;
    }
  }

  /** Whether a scan failed because the body is a text, a form or the like: no attack, but another kind of client. */
  #isNoObject(error: unknown): error is Problem {
    const isBadJson = error instanceof Problem && error.code === 'bad_json';
    return isBadJson && !/^[ \t\r\n]*\{/.test(Buffer.concat(this.#head).toString('latin1'));
  }

  /**
   * Judges the head and returns what is to be relayed.
   * @param judge throws a Problem for a field that may not pass.
   * @throws {Problem} as readCredential, and body_too_large, and what judge throws.
   */
  async open(target: Target, judge: (field: Field) => void): Promise<Content> {
    this.#checkLength(this.#x.rules.bodyLimitBytes);
    const scan = await this.#scanHead().catch((error: unknown) => {
      if (target.route !== SEND_ROUTE || !this.#isNoObject(error)) throw error;
      throw new Problem('bad_json', {
        detail: `${error.message} A text or a form is taken with a token that has "defaults" or "message".`,
      });
    });
    scan.defers = false;
    scan.takeFields().forEach(judge);
    const isEmpty = this.#x.bytesIn === 0;
    if (isEmpty && target.route?.needsBody) {
      throw new Problem('bad_json', { detail: 'A JSON object is needed as the body, with Content-Length or chunked.' });
    }
    // A GET has no body to relay (fetch refuses one); what came with it was read for the credential alone. A longer one
    // would have to be relayed or thrown away unread, and neither is right.
    const isBodiless = target.method === 'GET';
    if (isBodiless && !this.#isComplete) throw new Problem('body_too_large');
    if (isEmpty || isBodiless) return undefined;
    // Small and whole, it is sent in one piece, and can wait for a turn or for a backend that restarts.
    if (this.#isComplete) return joinChunks(scan.cutBytes === 0 ? this.#head : this.#passed);
    // The length is announced to the backend now. From here on, what the scanner takes out it replaces with spaces.
    scan.keepLength = this.#declaredBytes !== undefined;
    const length = this.#declaredBytes === undefined ? undefined : this.#declaredBytes - scan.cutBytes;
    this.#head = [];
    return { chunks: () => this.#chunks(scan, judge), length };
  }

  /**
   * Reads the whole body, as it came.
   * @param limitBytes of the whole; `limits.body` holds too.
   * @throws {Problem} body_too_large, busy, unsupported_encoding, request_timeout, client_left.
   */
  async readWhole(limitBytes: number): Promise<Buffer> {
    const smallerBytes = Math.min(limitBytes, this.#x.rules.bodyLimitBytes);
    this.#checkLength(smallerBytes);
    await this.#readHead((chunk) => this.#countHeld(chunk), Infinity, smallerBytes);
    return joinChunks(this.#head.splice(0));
  }

  /**
   * Counts what is held, until the request is over. Where there are several tokens, one token has half of the room.
   * @throws {Problem} busy.
   */
  #countHeld({ length }: Uint8Array): void {
    const { core: { running }, rules, token } = this.#x;
    this.#x.heldBytes += length;
    const sum = (all: Exchange[]): number => all.reduce((bytes, { heldBytes }) => bytes + heldBytes, 0);
    const limitBytes = rules.tokens.size > 1 ? HELD_LIMIT_BYTES / 2 : HELD_LIMIT_BYTES;
    const own = running.filter((x) => x.token?.name === token?.name);
    if (sum(running) <= HELD_LIMIT_BYTES && sum(own) <= limitBytes) return;
    // Who is refused makes room at once, or those that are read in the same moment would be refused too.
    this.#x.heldBytes = 0;
    throw new Problem('busy');
  }

  /**
   * Ends the answer, which is all written, but not before what the client still sends was read and dropped: a
   * connection that is closed with unread bytes is reset, and the reset can overtake the answer. Somebody unknown is
   * not worth more than the head; then nothing is read any more, and the connection goes soon after.
   */
  async endAnswer(): Promise<void> {
    const { req, res } = this.#x;
    this.#head = []; // it is counted no longer
    this.#x.stopTimer();
    if (this.#x.stage === 'tunnel') return;
    // A small body came in one packet with its head, and is here by now: nothing has to be waited for.
    if (!this.#isComplete) await undefined;
    if (!this.#isComplete && req.readableLength === this.#declaredBytes) this.#isComplete = req.read() !== null;
    if (!this.#isComplete) {
      if (this.#x.answerRest !== undefined) res.write(this.#x.answerRest);
      this.#x.answerRest = undefined;
      await this.#discardRest();
    }
    if (res.shouldKeepAlive && !this.#isComplete) req.socket.destroy();
    else res.end(this.#x.answerRest);
  }

  /** Reads and drops what the client still sends; resolves when that has ended, or is enough. */
  async #discardRest(): Promise<void> {
    const { req, res, token, rules, core } = this.#x;
    this.#x.end(new Problem('client_left')); // the relay is over, and so is its stream
    if (req.destroyed) return; // its "close" has been, and comes no more
    // One deadline for all of it, or single bytes would hold the connection for hours.
    const deadlineMs = (token ? performance.now() : this.#startedMs) + core.stallTimeoutMs - this.#lingerMs;
    // Who was told that the connection ends may just wait for that; who was not has the rest still to send.
    const patienceMs = res.shouldKeepAlive ? Infinity : this.#lingerMs;
    let leftBytes = (token ? rules.bodyLimitBytes : HEAD_LIMIT_BYTES) - this.#x.bytesIn;
    await new Promise<void>((resolve) => {
      const wait = (): void => {
        const leftMs = Math.max(0, Math.min(patienceMs, deadlineMs - performance.now()));
        this.#x.waitFor(leftMs, 'request_timeout', () => resolve());
      };
      wait();
      req.removeAllListeners('readable').once('end', resolve).once('close', resolve);
      req.on('data', (chunk: Buffer) => {
        leftBytes -= chunk.length;
        if (leftBytes < 0) req.pause();
        wait();
      }).resume();
    });
    this.#isComplete = req.readableEnded;
    this.#x.stopTimer();
  }

  /** A length that is too large is refused before a byte is read. @throws {Problem} body_too_large. */
  #checkLength(limitBytes: number): void {
    if ((this.#declaredBytes ?? 0) > limitBytes) throw new Problem('body_too_large');
  }

  /** Reads and scans the head, once: for the credential, and then for all that is judged. */
  async #scanHead(): Promise<BodyScan> {
    if (this.#scan) return this.#scan;
    const scan = this.#scan = new BodyScan(this.#x.target?.route?.group === 'send' ? 'send' : 'all');
    // Whose body it is, is in it: a stranger must not learn by its fields' faults what the gateway looks for.
    scan.defers = this.#x.token === undefined;
    await this.#readHead((chunk) => scan.write(chunk).forEach((piece) => gatherChunk(this.#passed, piece)));
    if (this.#isComplete && this.#x.bytesIn > 0) this.#passed.push(...scan.end());
    return scan;
  }

  /**
   * Reads the head, or what is left of it.
   * @param take gets all of it, in chunks.
   * @param upToBytes where the head ends; Infinity for the whole body.
   */
  async #readHead(take: (chunk: Uint8Array) => void, upToBytes = HEAD_LIMIT_BYTES, limitBytes?: number): Promise<void> {
    if (!this.#isComplete && this.#head.length === 0) this.#begin();
    this.#head.forEach(take);
    while (!this.#isComplete && this.#x.bytesIn < upToBytes) {
      const chunk = await this.#next(limitBytes, upToBytes - this.#x.bytesIn);
      if (chunk === undefined) return;
      gatherChunk(this.#head, chunk);
      take(chunk);
    }
  }

  /**
   * Before the first byte: a compressed body cannot be judged, and who waits to be asked for the body is asked now.
   * @throws {Problem} unsupported_encoding.
   */
  #begin(): void {
    const { req, res } = this.#x;
    const encoding = req.headers['content-encoding'] ?? 'identity';
    if (!/^[ \t]*identity[ \t]*$/i.test(encoding)) throw new Problem('unsupported_encoding');
    if (/^100-continue$/i.test(req.headers.expect ?? '') && req.httpVersion === '1.1') res.writeContinue();
  }

  /**
   * The next chunk, or undefined at the end, which is known with the last byte if the length was declared.
   * @param roomBytes what is more than that is left for the next time.
   * @throws {Problem} request_timeout, client_left, body_too_large, and what ended the exchange.
   */
  async #next(limitBytes = this.#x.rules.bodyLimitBytes, roomBytes = Infinity): Promise<Uint8Array | undefined> {
    let chunk = this.#rest;
    this.#rest = undefined;
    chunk ??= await this.#read();
    if (chunk !== undefined && chunk.length > roomBytes) {
      this.#rest = chunk.subarray(roomBytes);
      chunk = chunk.subarray(0, roomBytes);
    }
    this.#x.bytesIn += chunk?.length ?? 0;
    if (this.#x.bytesIn > limitBytes) throw new Problem('body_too_large');
    if (chunk === undefined || this.#x.bytesIn === this.#declaredBytes) {
      this.#isComplete = true;
      this.#x.res.shouldKeepAlive = this.#keepAlive;
    }
    return chunk;
  }

  /**
   * Reads from the socket. In every 30 s of reading, at least 30 KiB must come, or the end. The time in which the
   * gateway does not read, because the backend is slow or the request waits, does not count. Until the sender is known,
   * the whole body has 30 s, less the time that the refusal may take.
   */
  async #read(): Promise<Uint8Array | undefined> {
    const { core: { stallTimeoutMs }, token } = this.#x;
    const sinceMs = performance.now();
    const totalMs = token ? Infinity : this.#startedMs + stallTimeoutMs - 2 * this.#lingerMs - sinceMs;
    const chunk = await this.#reader.next(Math.max(1, Math.min(this.#leftMs, totalMs)), 'request_timeout');
    this.#leftMs -= performance.now() - sinceMs;
    this.#owedBytes -= chunk?.length ?? 0;
    if (this.#owedBytes <= 0) [this.#leftMs, this.#owedBytes] = [stallTimeoutMs, PACE_BYTES];
    return chunk;
  }

  /** The head and then the rest, read at the backend's pace. Its time stands still while the client is waited for. */
  async *#chunks(scan: BodyScan, judge: (field: Field) => void): AsyncGenerator<Uint8Array> {
    for (const piece of this.#passed) yield piece;
    this.#passed = [];
    while (!this.#isComplete) {
      let pieces: Uint8Array[];
      try {
        const chunk = await this.#next();
        collectSoon(chunk);
        pieces = chunk === undefined ? [] : scan.write(chunk);
        if (this.#isComplete) pieces.push(...scan.end());
        scan.takeFields().forEach(judge);
        if (this.#isComplete) await this.#x.queue.enter(this.#x, true); // without its last byte the backend cannot act
        this.#x.waitForBackend();
      } catch (error) { // the one way by which a late verdict leaves the stream: it ends the exchange
        this.#x.end(error as Problem);
        throw error;
      }
      // Its last byte goes out now: the backend may act on it.
      if (this.#isComplete && this.#x.stage === 'sending') this.#x.stage = 'sent';
      for (const piece of pieces) yield piece;
    }
  }
}

/** Most bodies are one chunk, which needs no copy. */
function joinChunks(chunks: Uint8Array[]): Buffer {
  return chunks.length === 1 ? chunks[0] as Buffer : Buffer.concat(chunks);
}

// ── SENDS ────────────────────────────────────────────────────────────────────────────────────────
// Grafana, GitHub and others post JSON of their own form; scripts and devices post a line of text, or an HTML form. If
// the token has `defaults` or `message`, the gateway makes a new send of what was posted. The send contains only the
// fields of a send, and the text that the template made. Here, "payload" is the posted body as an object, "send" is the
// body that goes to the backend, and "form" is an HTML form.

/** Values for the fields of a send that the payload does not give. */
type SendDefaults = NonNullable<TokenConfig['defaults']>;

/** The fields of a send that are taken from a payload. The hidden `recipient` is not one: no documentation names it. */
const SEND_FIELDS = new Set(
  ('message number recipients text_mode base64_attachments sticker mentions quote_timestamp quote_author quote_message ' +
    'quote_mentions edit_timestamp notify_self view_once link_preview').split(' '),
);

/**
 * Other spellings of these fields are refused. Without the field, the message would go to the wrong recipients, too
 * early or without its picture. jQuery, PHP and axios write a list as "recipients[]" or "recipients.0" into a form.
 * "amp;" remains of an "&" that was escaped for HTML, and secured-signal-api reads "@recipients" in a query.
 */
const ODD = '(?:amp;|@)?(?:number|recipients?|base64_attachments|send_at)(?:\\[.*\\]|\\.\\d[^]*)?';
const NEVER_DROPPED = new RegExp(`^[\\s\\p{Cc}]*${ODD}[\\s\\p{Cc}]*$`, 'iu');

/** The field by which secured-signal-api schedules a message. In the payload of a template it is data. */
const SEND_AT = /send_at/iu;
const NEVER_LATER = 'asks for a later time, and nothing is scheduled here; without it, a message is sent at once';
const NOT_IN_A_SEND = 'is none of a send, which has "number", "recipients" and "base64_attachments"';

/** The field of the body form. A credential, valid or not, must not get into the text. */
const CREDENTIAL_NAME = /^auth$/iu;

/** A body that begins like this is read as JSON, and refused if it is not JSON: it is not meant as text. */
const BEGINS_OBJECT = /^\s*\{/;

/** A pair as form encoders write it: by WHATWG URL 5.2, by RFC 3986, or by a rule between the two. */
const ENCODED_PAIR = /^[\w\-.~*+%!'()]+=[\w\-.~*+%!'()]*$/;

/** ECMA-48: colours (CSI), a title or a link (OSC), or another character set (as `tput sgr0` writes it). */
// deno-lint-ignore no-control-regex
const TERMINAL_SEQUENCE = /(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]+[0-~]/g;

/** Whether the gateway makes a send of each body that this token posts to /v2/send. The body has no say in it. */
function makesSends({ defaults, message }: Token): boolean {
  return defaults !== undefined || message !== undefined;
}

/**
 * The payload of a send by GET is its query. The connection is not kept, because HTTP libraries repeat a GET on a kept
 * connection that broke.
 * @returns undefined for a POST, whose query is not read.
 * @throws {Problem} bad_field if the query of a POST names a field that must not be lost.
 */
function takeQuery(x: Exchange, target: Target): Record<string, unknown> | undefined {
  if (isSendByGet(target)) {
    x.res.shouldKeepAlive = false;
    return readFields(target.parameters);
  }
  const [lost] = target.parameters.find(([name]) => NEVER_DROPPED.test(name)) ?? [];
  if (lost !== undefined) throw badField(lost, 'is in the query, of which nothing is read with a POST');
  return undefined;
}

/**
 * The payload of a body: JSON, a multipart form, an HTML form or a text, in this order. The Content-Type alone does not
 * decide: curl -d and wget declare everything a form, and many clients declare JSON as something else.
 * @throws {Problem} bad_json, bad_field.
 */
function readPayload(token: Token, body: Buffer, contentType = ''): Record<string, unknown> {
  const [type] = /^[^ \t;,]*/.exec(contentType.toLowerCase())!;
  const text = body.toString();
  if (BEGINS_OBJECT.test(text) || /^application\/json$|\+json$/.test(type)) return readJson(body);
  if (type === 'multipart/form-data') return readFields(readMultipart(body, contentType));
  if (!isUtf8(body)) throw new Problem('bad_json', { detail: 'The body is no JSON, no form and no text in UTF-8.' });
  const form = text.trim(); // files have a byte order mark or a line feed
  const isForm = /^(?:application\/x-www-form-urlencoded)?$/.test(type) && isHtmlForm(token, form);
  return readFields(isForm ? new URLSearchParams(form) : [['message', cleanText(text)]]);
}

/**
 * The payload of a JSON body. JSON.parse would drop the first of two equal keys, so a duplicate of a field that must
 * not be lost is refused.
 * @throws {Problem} bad_json, bad_field.
 */
function readJson(json: Buffer): Record<string, unknown> {
  BodyScan.fieldsOf(json, 'none'); // stricter than JSON.parse: encoding, depth, an object
  const text = json.toString();
  for (const { key } of repeatedKeys(text)) if (NEVER_DROPPED.test(key)) throw badField(key, 'may be given only once');
  const payload = JSON.parse(text) as Record<string, unknown>;
  for (const key of Object.keys(payload)) if (CREDENTIAL_NAME.test(key)) delete payload[key];
  return payload;
}

// The headers of a multipart form (RFC 7578), as encoders write them: curl, browsers, Python, Node, PHP, Go, Java, and
// .NET, which omits quotes and adds "filename*". Programs disagree about other forms: a second "name" or boundary,
// "name*", a backslash or a "%" in a name. Those are refused. Otherwise the gateway could miss recipients that another
// program sees, and the message would go to the default ones.
const VALUE = '=("[^"\\\\%\\p{Cc}\\ufffd]+"|[^\\s"\\x27(),;\\\\%\\p{Cc}\\ufffd]+)';
const FILENAME = 'filename=("[^"\\p{Cc}]*"|[^\\s"(),;]+)(?: *; *filename\\*=[^\\s";]+)?';
const CHARSET = '(?: *; *charset=[\\w"-]+)?';
const MULTIPART = new RegExp(`^multipart/form-data${CHARSET} *; *boundary${VALUE}${CHARSET}$`, 'iu');
const DISPOSITION = new RegExp(`^content-disposition: *form-data *; *name${VALUE}(?: *; *${FILENAME})?[ \\t]*$`, 'imu');

/** Any header of a part, except one that declares the content encoded or a multipart form itself. */
const PART_LINE = /^(?!content-transfer-encoding:(?! *(?:7bit|8bit|binary)$)|content-type:\s*multipart\/)([\w-]+):.*$/i;

/**
 * The fields of a multipart form. `Response` would not do: Deno 2.9 and Bun 1.4 skip a part that they cannot read.
 * @throws {Problem} bad_json.
 */
function readMultipart(body: Buffer, contentType: string): [name: string, value: string][] {
  const boundary = (MULTIPART.exec(contentType) ?? failMultipart())[1]!.replaceAll('"', '');
  const [before = '', ...parts] = `\r\n${body.toString('latin1')}`.split(`\r\n--${boundary}`);
  const isWhole = before.trim() === '' && /^--\s*$/.test(parts.pop() ?? '');
  // Some programs see a boundary after a lone line feed too.
  if (!isWhole || parts.some((part) => part.includes(`\n--${boundary}`))) failMultipart();
  return parts.map(readPart);
}

/**
 * The field of a part. A file becomes an attachment, as a data URI; the backend ends its file name at a semicolon. A
 * file in a field such as `number` or `recipients` stays in that field, where it is refused later.
 */
function readPart(part: string): [name: string, value: string] {
  const [, latin1 = '', content = ''] = /^\r\n([^]*?)\r\n\r\n([^]*)$/.exec(part) ?? [];
  const [head, bytes] = [Buffer.from(latin1, 'latin1').toString(), Buffer.from(content, 'latin1')];
  const headers = head.split('\r\n').map((line) => (PART_LINE.exec(line) ?? failMultipart())[1]!.toLowerCase());
  const [, name = '', file] = (DISPOSITION.exec(head) ?? failMultipart()).map((text) => text?.replaceAll('"', ''));
  if (new Set(headers).size < headers.length || (file === undefined && !isUtf8(bytes))) failMultipart();
  if (file === undefined) return [name, bytes.toString()];
  const [, type = 'application/octet-stream'] = /^content-type:[ \t]*([\w.+/-]+)/im.exec(head) ?? [];
  const fileName = file.split(/[/\\]/).at(-1)!.replace(/[;,\p{Cc}]/gu, '_');
  const uri = `data:${type};${fileName && `filename=${fileName};`}base64,${bytes.toString('base64')}`;
  return [NEVER_DROPPED.test(name) ? name : 'base64_attachments', bytes.length === 0 ? '' : uri];
}

function failMultipart(): never {
  throw new Problem('bad_json', { detail: 'The body is not a multipart form as browsers and "curl -F" write one.' });
}

/** Whether a text is a form: its first name is known, or an encoder wrote all of it and any of its names is known. */
function isHtmlForm({ message: template }: Token, text: string): boolean {
  const names = new Set([...SEND_FIELDS, 'payload', 'data', ...template?.names ?? []]);
  const isKnown = (name: string): boolean => names.has(name) || NEVER_DROPPED.test(name);
  return isKnown(/^([^=\s]*)=/.exec(text)?.[1] ?? '') ||
    (text.split('&').every((pair) => ENCODED_PAIR.test(pair)) && [...new URLSearchParams(text).keys()].some(isKnown));
}

/** A text without terminal sequences and control characters. CR LF becomes a line feed, because every CR is removed. */
function cleanText(text: string): string {
  const clean = text.replace(TERMINAL_SEQUENCE, '').replace(/(?![\n\t])\p{Cc}/gu, '');
  return Buffer.byteLength(clean) > RENDER_LIMIT_BYTES ? cutText(clean) : clean;
}

/**
 * The payload of a form: its fields, or the JSON that its only field holds.
 * @throws {Problem} as readJson, and bad_field for `send_at` or a second `number`.
 */
function readFields(pairs: Iterable<readonly [name: string, value: string]>): Record<string, unknown> {
  const fields = new Map<string, string[]>();
  for (const [name, value] of pairs) {
    // An empty field was not filled in. But empty `recipients` must not become the default ones.
    if (CREDENTIAL_NAME.test(name) || (value === '' && !/^recipients/i.test(name))) continue;
    // A textarea's lines end with CR LF. A "+" that was not encoded is read as a space.
    const text = value.replaceAll('\r\n', '\n');
    const restored = name === 'number' || name === 'recipients' ? text.replace(/^ (?=\d{5,15}$)/, '+') : text;
    const values = fields.get(name);
    if (name === 'number' && values) throw badField(name, 'may be given only once');
    if (SEND_AT.test(name) && NEVER_DROPPED.test(name)) throw badField(name, NEVER_LATER);
    if (values) values.push(restored);
    else fields.set(name, [restored]);
  }
  const members = Object.fromEntries(Array.from(fields, ([name, all]) => [name, all.length > 1 ? all : all[0]!]));
  // The form of GitHub has only the field "payload", that of Uptime Kuma only "data", with JSON in it.
  const json = fields.size === 1 ? members.payload ?? members.data : undefined;
  return typeof json === 'string' && BEGINS_OBJECT.test(json) ? readJson(Buffer.from(json)) : members;
}

/**
 * The send of a payload: the defaults, the payload's fields over them, and the template's message over both.
 * @throws {Problem} bad_field if the message, the number or the recipients are missing.
 */
function makeSend({ defaults, message: template }: Token, payload: Record<string, unknown>): Record<string, unknown> {
  const send: Record<string, unknown> = { ...defaults, ...sendFields(payload, template !== undefined) };
  if (template) send.message = template.render(payload);
  // A picture or a sticker needs no message.
  const isWordless = !isBlank(send.base64_attachments) || !isBlank(send.sticker);
  const needed = isWordless ? ['number', 'recipients'] : ['message', 'number', 'recipients'];
  const missing = needed.filter((name) => isBlank(send[name]));
  if (missing.length === 0) return send;
  const show = (key: string): string => JSON.stringify(key.replace(/(?<=^.{60}).+/s, '…'));
  const keys = Object.keys(payload).slice(0, 31).map((key, i) => i < 30 ? show(key) : '…').join(', ') || 'none';
  const lack = `The send would lack ${missing.join(' and ')}; the body's top-level keys are ${keys}.`;
  const detail = `${lack} What a webhook does not say, the token's "defaults" and "message" template can.`;
  throw new Problem('bad_field', { detail, reason: missing.map((name) => `no_${name}`).join(',') });
}

/**
 * The fields of a send that a payload has.
 * @param isData whether the token has a template: then `send_at` is data for it.
 * @throws {Problem} bad_field.
 */
function sendFields(payload: Record<string, unknown>, isData: boolean): Record<string, unknown> {
  const fields: Record<string, unknown> = {};
  for (const [key, value] of Object.entries(payload)) {
    const isEmpty = value === null || (key === 'recipient' && value === '' && !isBlank(payload.recipients));
    if (isEmpty || (isData && SEND_AT.test(key))) continue;
    const isOne = typeof value === 'string' && /^(?:recipients|base64_attachments)$/.test(key);
    if (SEND_FIELDS.has(key)) fields[key] = isOne ? [value] : value;
    else if (NEVER_DROPPED.test(key)) throw badField(key, SEND_AT.test(key) ? NEVER_LATER : NOT_IN_A_SEND);
  }
  // A number that is not a string means something else, such as the number of a pull request.
  if (typeof fields.number !== 'string' || fields.number === '') delete fields.number;
  else if (!NUMBER.test(fields.number)) throw badField('number', 'must be "+" and 5 to 15 digits');
  return fields;
}

/** Whether a value is missing, a text of white space or an empty list. */
function isBlank(value: unknown = ''): boolean {
  return typeof value === 'string' ? value.trim() === '' : Array.isArray(value) && value.length === 0;
}

/**
 * Checks a send as if a client had sent it.
 * @returns the body for the backend.
 * @throws {Problem} bad_field, and what `check` throws.
 */
function judgeSend(send: object, check: (field: Field) => void): Uint8Array {
  const bytes = Buffer.from(JSON.stringify(send));
  BodyScan.fieldsOf(bytes, 'all').forEach(check);
  return bytes;
}

// ── TEMPLATES ────────────────────────────────────────────────────────────────────────────────────
// The part of Mustache (https://github.com/mustache/spec) that plain text needs: variables, sections, inverted sections
// and comments. Nothing is escaped for HTML. Only the configuration contains templates; the values that a client sends
// are inserted and never parsed as a template.

/**
 * A tag: `{{{name}}}`, or `{{`, a sigil, a name and `}}`. In `{{# alerts }}` the sigil is `#` and the name ` alerts `.
 * A `{{` without an end matches alone, to be reported.
 */
const TAG = /\{\{(?:\{([^]*?)\}\}\}|\s*([#^/!&>=<$]?)([^]*?)\}\})?/g;

/** `.`, or parts joined by dots, without white space and braces. A leading dot looks in the innermost context only. */
const TAG_NAME = /^(?:\.|\.?[^\s.{}]+(?:\.[^\s.{}]+)*)$/;

/** A variable, or a section (its sigil is `#`, or `^` if it is inverted). The whole template is the outermost one. */
interface Tag {
  /** As the template has it, with its braces. */
  readonly text: string;
  /** Where in the template it stands. */
  readonly at: number;
  readonly sigil: string;
  readonly name: string;
  /** The parts of the name. The first is empty if the name begins with a dot: the innermost context itself. */
  readonly path: readonly string[];
  /** The content of a section: texts and tags. */
  readonly nodes: (string | Tag)[];
}

/** A compiled Mustache template. */
class Template {
  /** The names that the template looks up at the top level: the first part of each name. */
  readonly names = new Set<string>();
  readonly #whole: Tag;

  /** @throws {SyntaxError} whose message begins with the line and the column in the template. */
  constructor(text: string) {
    this.#whole = parseTemplate(text, this.names);
  }

  /**
   * The text for some data, cut with an ellipsis if the text becomes too long or takes too many steps.
   * @param data as JSON.parse returns it.
   */
  render(data: unknown): string {
    let text = '';
    let leftBytes = RENDER_LIMIT_BYTES;
    let leftSteps = Math.min(RENDER_LIMIT_STEPS, JSON.stringify(data).length * this.#whole.text.length);
    const isSpent = (): boolean => leftBytes < 0 || leftSteps < 0;
    const write = (piece: string): void => {
      text += piece;
      leftBytes -= Buffer.byteLength(piece);
    };
    const renderNodes = ({ nodes }: Tag, contexts: readonly unknown[]): void => {
      for (const node of nodes) {
        if (isSpent()) return;
        if (typeof node === 'string') write(node);
        else renderTag(node, contexts);
      }
    };
    const renderTag = (tag: Tag, contexts: readonly unknown[]): void => {
      leftSteps -= contexts.length + tag.path.length; // the most that `lookUp` can take
      const value = lookUp(contexts, tag.path);
      // A section is rendered for each element of a list, once for another value, and not for an empty, false or 0 one.
      const items = Array.isArray(value) ? value : value ? [value] : [];
      if (tag.sigil === '^') return items.length > 0 ? undefined : renderNodes(tag, contexts);
      if (tag.sigil !== '#') return write(toText(value));
      for (const item of items) {
        leftSteps--;
        if (isSpent()) return;
        renderNodes(tag, [...contexts, item]);
      }
    };
    renderNodes(this.#whole, [data]);
    return isSpent() ? cutText(text) : text;
  }
}

/** Looks up the first part of a name from the innermost context outwards, and each other part in the one before it. */
function lookUp(contexts: readonly unknown[], path: readonly string[]): unknown {
  const owner = contexts.findLast((context) => path[0] === '' || memberOf(context, path[0]!) !== undefined);
  return path.reduce((value, name) => name === '' ? value : memberOf(value, name), owner);
}

/** An own member. Members that JavaScript adds have no name: neither `constructor`, nor the length of a list. */
function memberOf(value: unknown, name: string): unknown {
  if (typeof value !== 'object' || value === null || !Object.hasOwn(value, name)) return undefined;
  return Array.isArray(value) && name === 'length' ? undefined : (value as Record<string, unknown>)[name];
}

/** The text of a variable's value: an object as JSON, null and a missing value as nothing. */
function toText(value: unknown): string {
  if (value === undefined || value === null) return '';
  return typeof value === 'object' ? JSON.stringify(value) : String(value);
}

/** Cuts a text between characters, so that it fits the limit with an ellipsis. */
function cutText(text: string): string {
  const ellipsis = '…';
  return wholeCharacters(Buffer.from(text).subarray(0, RENDER_LIMIT_BYTES - Buffer.byteLength(ellipsis))) + ellipsis;
}

/**
 * Parses a template in one pass over its tags. `open` holds the sections that are not closed yet, the template first.
 * @param names gets the first part of each name.
 * @throws {SyntaxError} with line and column.
 */
function parseTemplate(text: string, names: Set<string>): Tag {
  const open: Tag[] = [{ text, at: 0, sigil: '', name: '', path: [], nodes: [] }];
  let from = 0;
  for (const { 0: whole, 1: triple, 2: sigil = '', 3: inner = '', index: at } of text.matchAll(TAG)) {
    if (whole === '{{') failTemplate(text, at, 'a "{{" has no "}}"');
    // By the specification, a section's tag or a comment that is alone on its line takes the whole line with it.
    const indent = text.slice(text.lastIndexOf('\n', at - 1) + 1, at);
    const [lineEnd] = /^[ \t]*(?:\r?\n|$)/.exec(text.slice(at + whole.length)) ?? [];
    const isAlone = /[#^/!]/.test(sigil) && /^[ \t]*$/.test(indent) && lineEnd !== undefined;
    const { nodes } = open.at(-1)!;
    nodes.push(text.slice(from, isAlone ? at - indent.length : at));
    from = at + whole.length + (isAlone ? lineEnd.length : 0);
    if (sigil === '!') continue;
    const name = (triple ?? inner).trim();
    const tag: Tag = { text: whole, at, sigil, name, path: name === '.' ? [''] : name.split('.'), nodes: [] };
    const mistake = mistakeInTag(tag, open);
    if (mistake !== undefined) failTemplate(text, at, mistake);
    if (sigil === '/') open.pop();
    else nodes.push(tag);
    if (/[#^]/.test(sigil)) open.push(tag);
    const first = tag.path[0] || tag.path[1];
    if (first) names.add(first);
  }
  const last = open.at(-1)!;
  last.nodes.push(text.slice(from));
  if (open.length > 1) failTemplate(text, last.at, `${showTag(last.text)} has no ${showTag(`{{/${last.name}}}`)}`);
  return last;
}

/** Why a tag cannot stand where it does, if so. */
function mistakeInTag({ text, sigil, name }: Tag, open: readonly Tag[]): string | undefined {
  const shown = showTag(text);
  if (/[>=<$]/.test(sigil)) return `${shown}: partials, blocks and other delimiters are not supported`;
  if (!TAG_NAME.test(name)) {
    return `${shown} has no name, or one with a space, a brace or an empty part in it; there are no helpers such as "#if"`;
  }
  const isTooDeep = /[#^]/.test(sigil) && open.length > NESTING_LIMIT;
  if (isTooDeep) return `sections are nested more than ${NESTING_LIMIT} levels deep`;
  const section = open.at(-1)!;
  if (sigil !== '/' || name === section.name) return undefined;
  if (open.length === 1) return `${shown} closes a section that is not open`;
  return `${shown} stands where ${showTag(`{{/${section.name}}}`)} is expected`;
}

/**
 * A tag for a message. As with `showValue`, a long tag is not shown, because it may be a misplaced secret. The braces
 * do not count.
 */
function showTag(tag: string): string {
  return tag.length < SECRET_MIN_LENGTH + 4 ? JSON.stringify(tag) : 'a tag';
}

/** @param at where in the template the mistake is. */
function failTemplate(text: string, at: number, why: string): never {
  throw new SyntaxError(`${placeAfter(text.slice(0, at))}: ${why}`);
}

// ── POLICY ───────────────────────────────────────────────────────────────────────────────────────

/**
 * The keys of a body that matter, as the backend acts on them: at the top level, or `within` the object
 * of another. `list` is an array of strings; an `argument` may also be a number (the votes of a poll).
 */
const BODY_KEYS = {
  auth: { list: false, role: 'credential' },
  number: { list: false, role: 'sender' },
  recipient: { list: false, role: 'recipient' }, // hidden in /v2/send: appended to recipients
  recipients: { list: true, role: 'recipient' },
  members: { list: true, role: 'member' }, // whoever is in a group can be written to, and reads it
  admins: { list: true, role: 'member' },
  answers: { list: true, role: 'argument' }, // of a poll, as are the votes
  selected_answers: { list: true, role: 'argument' },
  base64_attachment: { list: false, role: 'attachment' },
  base64_attachments: { list: true, role: 'attachment' },
  link_preview: { list: false, role: 'object' },
  base64_thumbnail: { list: false, role: 'attachment', within: 'link_preview' }, // stored like an attachment
  send_at: { list: false, role: 'schedule' }, // of a send: secured-signal-api keeps it until then, the backend does not
} as const satisfies Record<string, { list: boolean; role: string; within?: string }>;

type BodyKey = keyof typeof BODY_KEYS;

/** One string under a key that matters, decoded; of an attachment only what stands before its data. */
interface Field {
  readonly key: BodyKey;
  /** Undefined for a `number` that the whole body does not have. */
  readonly value: string | undefined;
}

/**
 * Where a group's id means no group, as it does not for a member: signal-cli would make a phone number of its digits.
 */
const PERSONS_ONLY = ['/v1/send', '/v1/receipts/:number'];

/**
 * Judges one field by the rules for all tokens and by this token's own.
 * @throws {Problem} bad_field, sender_not_allowed, recipient_not_allowed.
 */
function judgeField(token: Token, { route }: Target, { key, value }: Field): void {
  const { role } = BODY_KEYS[key];
  if (value === undefined) {
    if (!token.senders || route?.group !== 'send') return;
    throw badField(key, 'must say from which account to send, for this token may not use all');
  }
  if (role === 'attachment') return checkAttachment(key, value);
  if (key === 'recipient' && value === '' && route?.group === 'send') return; // for the backend it is not there
  const mistake = mistakeInArgument(value);
  if (mistake) throw badField(key, mistake);
  if (role === 'sender' && token.senders && !token.senders.has(value)) throw new Problem('sender_not_allowed');
  if (role !== 'recipient' && role !== 'member') return;
  const isPerson = role === 'member' || PERSONS_ONLY.includes(route?.template ?? '');
  checkWhom(key, value, isPerson);
  const refusal = refusalOfRecipient(token, value);
  if (refusal) throw refusal;
}

/** What is wrong with what becomes an argument of a command line (signal-cli's), where "-" begins an option. */
function mistakeInArgument(value: string): string | undefined {
  if (value === '') return 'may not be empty';
  if (value.startsWith('-')) return 'may not begin with "-"';
  return /\p{Cc}/u.test(value) ? 'may not hold control characters' : undefined;
}

/** Refuses what the backend and signal-cli would make somebody else of. @throws {Problem} bad_field. */
function checkWhom(key: BodyKey, value: string, isPerson: boolean): void {
  if (isInternalId(value)) throw badField(key, `holds a group's "internal_id"; its "id" is needed, which is "group.…"`);
  // With "is_group", /v1/send decodes it, whatever it is, and makes an argument of signal-cli of that: here one with
  // "-".
  if (isPerson && /^L[Q-Za-f][A-Za-z0-9+/=]*$/.test(value)) {
    throw badField(key, 'may not begin with "-" when it is decoded');
  }
  if (!value.startsWith('group.')) return;
  if (isPerson) throw badField(key, 'must be a person here, not a group');
  if (!isGroupId(value)) throw badField(key, `begins with "group.", but is not the "id" of a group`);
}

/** Why a token may not write to somebody, if so; it says no more of him than his kind. */
function refusalOfRecipient({ recipients }: Token, value: string): Problem | undefined {
  const kind = kindOf(value);
  if (!recipients || recipients.has(value) || (kind === 'group' && recipients.has('group.*'))) return undefined;
  return new Problem('recipient_not_allowed', {
    detail: `This token may not send to one of these recipients: a ${kind} that is not on its list.`,
  });
}

/** What the backend takes a recipient for. */
function kindOf(value: string): string {
  if (value.startsWith('group.')) return 'group';
  if (/^[+0-9 ]+$/.test(value)) return 'phone number';
  return /^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i.test(value) ? 'UUID' : 'user name';
}

/** `data:<type>;filename=<name>;base64,…`: the backend writes to that name without looking at it. */
function checkAttachment(key: string, meta: string): void {
  for (const part of meta.split(';')) {
    // The backend drops the character before "base64,", whatever it is.
    if (part.startsWith('filename=') && /[/\\\0]|^\.{1,2}(?:.?base64)?$/s.test(part.slice('filename='.length))) {
      throw badField(key, 'may not name a file with "/", "\\" or NUL, or one called "." or ".."');
    }
  }
}

// ── BODY SCAN ────────────────────────────────────────────────────────────────────────────────────

/**
 * The end of an attachment's metadata, before the comma: "base64", with any letter escaped. After an escaped backslash
 * the pattern can match where the backend finds no "base64"; that only ends the metadata early, which is the safe side.
 */
const BASE64_END = /(?:b|\\u0062)(?:a|\\u0061)(?:s|\\u0073)(?:e|\\u0065)(?:6|\\u0036)(?:4|\\u0034)$/;

/** What may follow a backslash, or the beginning of it. */
const ESCAPE = /^(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})$/;

/** A number, `true`, `false` or `null` (RFC 8259 3 and 6). */
const BARE = /^(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)$/;

/** For each byte, whether a number, `true`, `false` or `null` may contain it. */
const IN_BARE = Uint8Array.from({ length: 256 }, (_, byte) => Number(/[0-9a-z.E+-]/.test(String.fromCharCode(byte))));

/**
 * Two tables of the bytes that are special in a string: for each byte, whether it is special, and for each pair of
 * bytes, whether one of them is. They are many times faster than a regular expression.
 */
function specialTable(special: RegExp): readonly [bytes: Uint8Array, pairs: Uint8Array] {
  const bytes = Uint8Array.from({ length: 256 }, (_, byte) => Number(special.test(String.fromCharCode(byte))));
  return [bytes, Uint8Array.from({ length: 65_536 }, (_, pair) => bytes[pair >> 8]! | bytes[pair & 0xff]!)];
}

// A quote ends a string, a backslash begins an escape, and JSON allows no control character in a string. Commas and
// semicolons separate the metadata of an attachment.
const SPECIAL = specialTable(/["\\]|[^ -\xff]/);
const SPECIAL_IN_ATTACHMENT = specialTable(/["\\,;]|[^ -\xff]/);

/** The keys that matter: in the body of a send, in the body of any request, and where only the syntax is checked. */
const SEND_KEYS = new Map<string, { role: string; within?: BodyKey }>(Object.entries(BODY_KEYS));
const KEYS = { send: SEND_KEYS, all: new Map([...SEND_KEYS].filter(([key]) => key !== 'send_at')), none: new Map() };

/** An open object or array. The outermost scope is the document itself. */
interface Scope {
  readonly outer: Scope | undefined;
  readonly depth: number;
  readonly close: string; // the bracket that closes the scope
  key: BodyKey | undefined; // the key that matters and whose value is being read; in an array, the key of the array
}

/**
 * An incremental scanner of one JSON object (RFC 8259). It cuts the top-level `auth` out and reports the fields that
 * matter. It does no I/O and knows no policy. Its output and its refusals do not depend on how the document is cut into
 * chunks.
 *
 * The bytes that `write` returns may be passed on at once. Only `end` returns the closing brace, so that the backend
 * never gets a complete document that was refused.
 *
 * The scanner is as strict as RFC 8259. It expects the backend's decoder to be lenient: Go matches keys without regard
 * to case (Unicode simple folding), and takes the last of duplicate keys. So the scanner refuses, for a key that
 * matters, a duplicate, another spelling that folds to the key, and a value of the wrong type.
 *
 * Three fields say how far the scan is. `#state` is the method that reads the next byte. `#scope` is the innermost open
 * object or array, with the key that matters there. `#text` is the part read so far of a string, number or word whose
 * text is needed, and undefined for all others. A chunk may end at any byte; each state continues with the next chunk:
 *
 *   #readStructure  one byte between values: white space, or a byte for `#expected`
 *   #readString     a run of plain bytes, and the special byte after them
 *   #readEscape     one byte after a backslash, until the escape is complete
 *   #readBare       a number or a word, up to the byte after it, which #readStructure reads
 */
class BodyScan {
  /** The top-level `auth`, once it was read completely. */
  auth: string | undefined;
  /** How many bytes were cut out. */
  cutBytes = 0;
  /** From when on this is true, cut bytes are replaced by as many spaces. */
  keepLength = false;
  /** While this is true, only `takeFields` throws bad_field, except for `auth`: no unauthenticated client sees it. */
  defers = false;

  readonly #keys: typeof SEND_KEYS;
  readonly #seen = new Set<BodyKey>();
  #hasNumber = false; // not true of `"number": null`
  #fields: Field[] = [];
  #problem: Problem | undefined; // of the first field that was refused

  #state: (i: number) => number = this.#readStructure; // returns where the next state begins
  #expected: (i: number, char: string) => void = this.#readValue; // reads the next byte that is not white space
  #scope: Scope = { outer: undefined, depth: 0, close: '', key: undefined };
  #text: string | undefined; // with its escapes, one character per byte
  #limitBytes = 0; // the length at which `#text` ends
  #escape = ''; // the open escape, without its backslash
  #anyMember = false; // a member was passed on: the next one needs its comma

  #chunk!: Buffer;
  #offset = 0; // where in the document the chunk begins
  #from = 0; // where in the chunk the bytes begin that were not yet passed on, held or cut
  #out: Uint8Array[] = [];
  #held: Uint8Array[] | undefined; // a member's comma, white space and key, until the key is known
  #heldFrom = 0; // where in the document they begin
  #utf8Tail: Buffer | undefined; // the beginning of a character that the next chunk completes

  /** The fields of a whole document. @throws {Problem} bad_json, bad_field. */
  static fieldsOf(document: Uint8Array, keys: keyof typeof KEYS): Field[] {
    const scan = new BodyScan(keys);
    scan.write(document);
    scan.end();
    return scan.takeFields();
  }

  /** @param keys which keys matter; with `none`, only the syntax is checked. */
  constructor(keys: keyof typeof KEYS = 'all') {
    this.#keys = KEYS[keys];
  }

  /** The fields found since the last call. @throws {Problem} bad_field, for the first field that was refused. */
  takeFields(): Field[] {
    if (this.#problem) throw this.#problem;
    return this.#fields.splice(0);
  }

  /**
   * Reads a chunk.
   * @returns the bytes that may be passed on: parts of this chunk and of earlier ones.
   * @throws {Problem} bad_json, bad_field; the scanner must not be used afterwards.
   */
  write(chunk: Uint8Array): Uint8Array[] {
    this.#chunk = Buffer.from(chunk.buffer, chunk.byteOffset, chunk.byteLength);
    const bytes = this.#utf8Tail ? Buffer.concat([this.#utf8Tail, this.#chunk]) : this.#chunk;
    const whole = wholeCharacters(bytes);
    // The whole chunk in one native call. A character may span two or more chunks.
    if (!isUtf8(whole)) this.#fail(0, 'it is not valid UTF-8');
    this.#utf8Tail = whole === bytes ? undefined : bytes.subarray(whole.length);
    this.#from = 0;
    this.#out = [];
    for (let i = 0; i < chunk.length;) i = this.#state(i);
    this.#pass(chunk.length);
    this.#offset += chunk.length;
    return this.#out;
  }

  /**
   * Ends the document.
   * @returns the closing brace, to be passed on after the last fields were checked.
   * @throws {Problem} bad_json if the document is not complete.
   */
  end(): Uint8Array[] {
    if (this.#scope.depth > 0 || this.#expected !== this.#readAfter) this.#fail(0, 'it ends too early');
    if (this.#keys !== KEYS.none && !this.#hasNumber) this.#fields.push({ key: 'number', value: undefined });
    return [Buffer.from('}')];
  }

  /** @param i where in the chunk the mistake is; the message counts from the beginning of the document. */
  #fail(i: number, why: string): never {
    throw new Problem('bad_json', { detail: `The body is not a JSON object: ${why}, at byte ${this.#offset + i}.` });
  }

  /** Refuses the field that is being read. If `defers`, notes the problem and reads on as if the key did not matter. */
  #refuse(why: string): void {
    const problem = badField(this.#scope.key!, why);
    if (!this.defers || this.#scope.key === 'auth') throw problem; // without `auth` no token will be found
    this.#problem ??= problem;
    this.#scope.key = undefined;
    this.#text = undefined;
  }

  // Which bytes are passed on. Whether a member may pass depends on its key. So its bytes are held from its comma on.
  // At the end of the key, `#release` passes them on. If the key is `auth`, they are held until the end of the value,
  // where `#cut` drops them. So no byte of a credential is passed on, and no comma of a member that was cut. An example
  // is {"a":1,"auth":"x","b":2}: `,"auth":"x"` is held and cut, `,"b"` is held and released. If `auth` comes first, the
  // comma after it is cut too. The output consists of parts of the chunks; nothing is copied.

  /** Passes on the bytes up to `end`, or adds them to the held ones. */
  #pass(end: number): void {
    if (end > this.#from) gatherChunk(this.#held ?? this.#out, this.#chunk.subarray(this.#from, end));
    this.#from = end;
  }

  #hold(start: number): void {
    this.#pass(start);
    this.#held = [];
    this.#heldFrom = this.#offset + start;
  }

  #release(): void {
    this.#out.push(...this.#held ?? []);
    this.#held = undefined;
  }

  #cut(end: number): void {
    const length = this.#offset + end - this.#heldFrom;
    // A length that was announced must stay true. White space is allowed wherever a member may stand.
    if (this.keepLength) this.#out.push(Buffer.alloc(length, ' '));
    else this.cutBytes += length;
    this.#held = undefined;
    this.#from = end;
  }

  // The grammar (RFC 8259 2). Each method that can be `#expected` reads one byte, which begins or ends something.

  /** Skips white space; gives any other byte to `#expected`. */
  #readStructure(i: number): number {
    const byte = this.#chunk[i]!;
    if (byte !== 0x20 && byte !== 0x0a && byte !== 0x0d && byte !== 0x09) this.#expected(i, String.fromCharCode(byte));
    // Held bytes stay in memory. An unauthenticated client may occupy no more of it than the head of its body does.
    else if (this.#held && this.#offset + i - this.#heldFrom >= HEAD_LIMIT_BYTES) this.#fail(i, 'too much white space');
    return i + 1;
  }

  /** The first byte of a value says its type. The document's value must be an object. */
  #readValue(i: number, char: string): void {
    const { depth, key, close } = this.#scope;
    if (depth === 0 && char !== '{') this.#fail(i, 'it must begin with "{"');
    const why = key && wrongType(key, close === ']', char);
    if (why) this.#refuse(why);
    if (char === '"') return this.#openString(false);
    if (char === '{' || char === '[') return this.#open(i, char);
    this.#state = this.#readBare;
    this.#text = char;
  }

  /** Each open object or array has a scope in memory, so their number is limited. */
  #open(i: number, char: string): void {
    const outer = this.#scope;
    const depth = outer.depth + 1;
    if (depth > NESTING_LIMIT) this.#fail(i, `it is nested more than ${NESTING_LIMIT} levels deep`);
    // An array's elements belong to the array's key. The literal has no spread, so that all scopes have one shape in
    // V8: with a spread, a document of brackets took twice the time.
    const isArray = char === '[';
    this.#scope = { outer, depth, close: isArray ? ']' : '}', key: isArray ? outer.key : undefined };
    this.#expected = this.#readFirst;
    // Only a member of the outermost object may be cut.
    if (depth === 1) this.#hold(i + 1);
  }

  /** The first member or element, or the end of an empty object or array. */
  #readFirst(i: number, char: string): void {
    if (char === this.#scope.close) this.#readAfter(i, char);
    else this.#readMember(i, char);
  }

  /** An array's element, or an object's member, which begins with its key. */
  #readMember(i: number, char: string): void {
    if (this.#scope.close === ']') return this.#readValue(i, char);
    if (char !== '"') this.#fail(i, 'a key in double quotes is expected');
    this.#openString(true);
  }

  #readColon(i: number, char: string): void {
    if (char !== ':') this.#fail(i, 'a colon is expected');
    this.#expected = this.#readValue;
  }

  /** After a value: a comma, or the bracket that closes the scope. After the document: only white space. */
  #readAfter(i: number, char: string): void {
    const { depth, close, outer } = this.#scope;
    if (depth === 0) this.#fail(i, 'something follows its end');
    if (char === ',') {
      this.#expected = this.#readMember;
      if (depth === 1) this.#hold(i);
      if (depth > 1 || this.#anyMember) return;
      this.#cut(i + 1); // all members so far were cut, so this comma has none before it
      return this.#hold(i + 1);
    }
    if (char !== close) this.#fail(i, 'a comma or the end of the object or array is expected');
    this.#scope = outer!;
    this.#endValue(i + 1);
    if (depth > 1) return;
    this.#release();
    this.#pass(i);
    this.#from = i + 1; // only `end` returns the closing brace
  }

  /** Returns to the structure after a value. The value of a top-level `auth` is cut with the held bytes before it. */
  #endValue(end: number): void {
    this.#state = this.#readStructure;
    this.#expected = this.#readAfter;
    if (this.#scope.close === ']') return; // the next element has the same key
    if (this.#scope.key === 'auth') this.#cut(end);
    this.#scope.key = undefined;
  }

  // Strings, numbers and words. `#text` is collected only of a key that can matter and of the value of a key that does.
  // Everything else streams through, however long it is. `#text` is read up to a limit:
  //
  //   a key          one byte more than KEY_LIMIT_BYTES, so that a longer key matches none that matters
  //   an attachment  its metadata, which is what stands before the data: META_LIMIT_BYTES at most
  //   another value  one byte more than VALUE_LIMIT_BYTES, so that a longer value is refused

  /** A method, because V8 calls a private getter more slowly. */
  #isInAttachment(): boolean {
    return this.#scope.key !== undefined && BODY_KEYS[this.#scope.key].role === 'attachment';
  }

  #openString(isKey: boolean): void {
    this.#state = this.#readString;
    this.#expected = isKey ? this.#readColon : this.#readAfter; // reads the byte after the string
    const { depth, outer, key } = this.#scope;
    // A key can matter at the top level, and in an object whose own key matters.
    this.#text = (isKey ? depth === 1 || outer!.key : key) ? '' : undefined;
    this.#limitBytes = isKey ? KEY_LIMIT_BYTES + 1 : this.#isInAttachment() ? META_LIMIT_BYTES : VALUE_LIMIT_BYTES + 1;
  }

  /** Reads a run of plain bytes and the special byte after it; returns where it stopped. */
  #readString(i: number): number {
    const chunk = this.#chunk;
    const text = this.#text;
    const end = findSpecial(chunk, i, this.#isInAttachment() ? SPECIAL_IN_ATTACHMENT : SPECIAL);
    // Exactly up to the limit, so that the result does not depend on the chunks.
    if (text !== undefined) this.#keep(chunk.toString('latin1', i, Math.min(end, i + this.#limitBytes - text.length)));
    if (end === chunk.length) return end;
    const char = String.fromCharCode(chunk[end]!);
    if (char === '"') {
      this.#state = this.#readStructure;
      if (this.#text !== undefined) this.#endText();
      if (this.#expected === this.#readAfter) this.#endValue(end + 1); // the string was a value, not a key
    } else if (char === '\\') this.#state = this.#readEscape;
    else if (char < ' ') this.#fail(end, 'a string holds a control character');
    // The rest are the separators of an attachment, such as "data:image/png;filename=a.png;base64,iVBOR". The metadata
    // ends at the first "base64,". The backend looks for the last one, so the data may contain no separator.
    else if (this.#text === undefined) this.#refuse('may have "," and ";" only before its data');
    else if (char === ',' && BASE64_END.test(this.#text.slice(-36))) this.#endText();
    else this.#keep(char);
    return end + 1;
  }

  /** Reads one byte after a backslash. `#text` gets only complete escapes, because a part cannot be decoded. */
  #readEscape(i: number): number {
    const escape = this.#escape += String.fromCharCode(this.#chunk[i]!);
    if (!ESCAPE.test(escape)) this.#fail(i, escape[1] ? 'four hexadecimal digits are expected' : 'an unknown escape');
    if (escape[0] === 'u' && escape.length < 5) return i + 1;
    // The backend splits an attachment after decoding it. An escaped separator is one that the scan would not see.
    if (this.#isInAttachment() && /^u00(?:2c|3b)$/i.test(escape)) this.#refuse('may not have "," or ";" as an escape');
    this.#keep(`\\${escape}`);
    this.#escape = '';
    this.#state = this.#readString;
    return i + 1;
  }

  /** Adds to the text, if it is collected, and ends it at its limit. */
  #keep(text: string): void {
    if (this.#text === undefined) return;
    this.#text += text;
    if (this.#text.length >= this.#limitBytes) this.#endText();
  }

  /** Decodes the collected text, and handles it: a key, or the value of a key that matters. */
  #endText(): void {
    const { key } = this.#scope;
    const text = this.#text!;
    if (text.length > VALUE_LIMIT_BYTES) return this.#refuse(`may not be longer than ${VALUE_LIMIT_BYTES} bytes`);
    // Most texts are ASCII without an escape. JSON.parse gets only single strings, never an object: V8 in Node 24.21
    // and 26.10 reads the key of {"k\"":0} as that of {"k\\":0}, if it has read that before.
    const isPlain = /^[ -[\]-~]*$/.test(text);
    const value = isPlain ? text : JSON.parse(`"${Buffer.from(text, 'latin1').toString()}"`) as string;
    this.#text = undefined;
    if (key === undefined) return this.#endKey(value);
    if (key === 'auth') this.auth = value;
    else this.#fields.push({ key, value });
    if (key === 'number') this.#hasNumber = true;
  }

  /** Notes a key that matters. From here on a top-level member may be passed on, unless the key is `auth`. */
  #endKey(name: string): void {
    // As Go's encoding/json folds case: besides capitals, only the long s and the Kelvin sign fold to ASCII letters.
    const key = name.replaceAll('\u017f', 's').toLowerCase() as BodyKey;
    const rule = this.#keys.get(key);
    // At the top level, the outer scope has no key, and the rule no `within`.
    if (rule && rule.within === this.#scope.outer!.key) {
      this.#scope.key = key;
      if (name !== key && key !== 'send_at') this.#refuse('must be spelled exactly so');
      else if (this.#seen.has(key)) this.#refuse('may be given only once');
      this.#seen.add(key);
    }
    if (this.#scope.depth > 1 || this.#scope.key === 'auth') return;
    this.#release();
    this.#anyMember = true;
  }

  /** Reads the rest of a number or a word; returns where it stopped. `#readValue` put the first byte into `#text`. */
  #readBare(i: number): number {
    let end = i;
    while (end < this.#chunk.length && IN_BARE[this.#chunk[end]!]) end++;
    this.#text += this.#chunk.toString('latin1', i, Math.min(end, i + BARE_LIMIT_BYTES));
    if (this.#text!.length > BARE_LIMIT_BYTES) this.#fail(i, 'a number is too long');
    if (end === this.#chunk.length) return end;
    if (!BARE.test(this.#text!)) this.#fail(i, 'a value is expected');
    if (this.#scope.key !== undefined && this.#text !== 'null') this.#endText();
    this.#endValue(end);
    return end;
  }
}

/**
 * Adds a chunk to a list. A client that sends single bytes must not cost an object for each. So of more than 32 chunks
 * the last two are merged while the last is not smaller than the one before; each byte is copied only a few times.
 */
function gatherChunk(chunks: Uint8Array[], chunk: Uint8Array): void {
  chunks.push(chunk);
  while (chunks.length > 32 && chunks.at(-2)!.length <= chunks.at(-1)!.length) {
    chunks.push(Buffer.concat(chunks.splice(-2)));
  }
}

/** The bytes without an incomplete UTF-8 character at their end (RFC 3629 3). */
function wholeCharacters(bytes: Buffer): Buffer {
  const end = bytes.at(-1)! < 0x80 ? '' : bytes.subarray(-3).toString('latin1');
  const at = end.search(/(?:[\xc0-\xff]|[\xe0-\xff][\x80-\xbf]|[\xf0-\xff][\x80-\xbf]{2})$/);
  return at < 0 ? bytes : bytes.subarray(0, at - end.length);
}

/**
 * Whether the value of a key that matters begins as its type must; returns what is wrong. A value of the wrong type is
 * refused at its first byte, so that only `link_preview` can hold an object.
 */
function wrongType(key: BodyKey, inList: boolean, char: string): string | undefined {
  const { list, role } = BODY_KEYS[key];
  if (role === 'schedule') return char === 'n' ? undefined : NEVER_LATER;
  const [open, type] = role === 'object' ? ['{', 'an object'] : list ? ['[', 'a list of strings'] : ['"', 'a string'];
  // The votes of a poll are numbers, which begin with a digit or "-". Other bytes before ":" begin no value, and
  // #readBare refuses them. Clients send `"base64_attachments": null` for none.
  const isRight = inList ? char === '"' || (role === 'argument' && char < ':') : char === open || char === 'n';
  return isRight ? undefined : `must be ${type}`;
}

/** Where the next special byte is, from `i` on, or else the length of the chunk. */
function findSpecial(chunk: Buffer, i: number, [bytes, pairs]: typeof SPECIAL): number {
  // A plain loop first: most strings are short, and a view for each escape would cost more than the loop. The loop ends
  // at an even address, because a view of pairs has to begin there.
  const near = Math.min(chunk.length, i + 64 + (chunk.byteOffset + i) % 2);
  while (i < near && !bytes[chunk[i]!]) i++;
  if (i < near || near === chunk.length) return i;
  // Sixteen bytes per test, in eight pairs: a large attachment spends its time in this loop. The table is symmetric, so
  // that the byte order of the processor does not matter.
  const two = new Uint16Array(chunk.buffer, chunk.byteOffset + i, (chunk.length - i) >> 1);
  let at = 0;
  while (
    at + 8 <= two.length &&
    (pairs[two[at]!]! | pairs[two[at + 1]!]! | pairs[two[at + 2]!]! | pairs[two[at + 3]!]! |
        pairs[two[at + 4]!]! | pairs[two[at + 5]!]! | pairs[two[at + 6]!]! | pairs[two[at + 7]!]!) === 0
  ) at += 8;
  i += 2 * at;
  while (i < chunk.length && !bytes[chunk[i]!]) i++;
  return i;
}

// ── RELAY ────────────────────────────────────────────────────────────────────────────────────────

/** For one connection only, not for the next: RFC 9110 7.6.1; the others by the definitions of proxies and HTTP/2. */
const HOP_BY_HOP = [
  ...['connection', 'transfer-encoding', 'te', 'trailer', 'upgrade', 'proxy-authenticate', 'proxy-authorization'],
  ...['keep-alive', 'proxy-connection', 'proxy-authentication-info', 'http2-settings'],
];

/**
 * Not the client's to say to the backend. `expect` was answered here; with an `accept-encoding` of the client's, fetch
 * would decode the answer and still call it compressed.
 */
const NOT_FORWARDED = [
  // Who it is, how it got here, and what is set for the message that is sent.
  ...['host', 'expect', 'authorization', 'forwarded', 'x-real-ip', 'x-request-id', 'content-length', 'accept-encoding'],
  // Copies of the URL, with its token, that browsers and proxies make; and what is another site's.
  ...['referer', 'x-rewrite-url', 'x-envoy-original-path', 'cookie'],
];

/** What is not taken over from an answer, and from a request. */
const NOT_INBOUND = new Set([...HOP_BY_HOP, 'x-request-id']);
const NOT_OUTBOUND = new Set([...HOP_BY_HOP, ...NOT_FORWARDED]);

/** A request as the backend gets it. */
interface BackendRequest {
  readonly x: Exchange;
  readonly method: string;
  readonly path: string;
  /** Name and value in turn, without a length, which the content says. */
  readonly headers: readonly string[];
  readonly content: Content;
  /** The client asks for a WebSocket. */
  readonly isUpgrade: boolean;
}

/** The head of the backend's response, and the way to read the rest. */
interface BackendResponse {
  readonly incoming: http.IncomingMessage;
  readonly reader: MessageReader;
  /** Set where the backend speaks another protocol from here on. */
  readonly upgraded: Side | undefined;
}

/**
 * Sends the request to the backend, once, and its response to the client.
 * @param upgrade the client's side of a WebSocket that is to be.
 * @throws {Problem} busy, backend_unreachable, backend_timeout, bad_backend_answer, and what ended the exchange.
 */
async function relay(x: Exchange, target: Target, content: Content, upgrade?: Side): Promise<void> {
  const { core, rules, res } = x;
  const headers = outboundHeaders(x);
  if (upgrade) headers.push('connection', 'Upgrade', 'upgrade', 'websocket');
  const early = upgrade && listenEarly(x, upgrade);
  const group = target.route?.group;
  let response: BackendResponse | undefined;
  try {
    // A health check must not queue behind sends, and a poll or a WebSocket would hold a slot for long.
    x.queue.join(x, group !== 'info' && group !== 'receive', group === 'send' ? rules.backendWaitMs : 0);
    const path = backendPath(rules.backend, target);
    response = await sendWhenUp({ x, method: target.method, path, headers, content, isUpgrade: upgrade !== undefined });
    if (x.endedBy) throw x.endedBy;
    const { incoming, upgraded } = response;
    const head = readAnswerHead(incoming, upgrade && 'websocket');
    x.status = incoming.statusCode!;
    // Not by setHeader before: of several Set-Cookie behind that, Node 20.20 sends one; until Node 22 is the oldest.
    head.headers.unshift(...addedHeaders(x, head.headers));
    if (upgrade && early && upgraded) return openTunnel(x, head.headers, [upgrade[0], early()], upgraded);
    if (core.draining) res.shouldKeepAlive = false;
    res.writeHead(x.status, incoming.statusMessage ?? '', head.headers);
    await relayAnswer(x, response.reader, head.length);
    // Its end has to be read, or its connection is not used again.
    incoming.removeAllListeners('readable').resume();
  } catch (error) {
    if (response) breakOff(response);
    throw backendProblem(error);
  }
}

/** The path at the backend for a target: built from what was judged, never resolved from what was sent. */
function backendPath(backend: Backend, target: Target): string {
  // encodeURIComponent, but for the characters that RFC 3986 3.3 allows in a segment: "+49…" stays as clients write it.
  const encode = (segment: string): string =>
    encodeURIComponent(segment).replace(/%(?:24|26|2B|2C|3A|3B|3D|40)/g, decodeURIComponent);
  return `${backend.prefix}/${target.segments.map(encode).join('/')}${target.query && '?'}${target.query}`;
}

/**
 * Headers for the backend, built afresh; what came in is left as it is. A body's length is not among them.
 * @returns name and value in turn.
 */
function outboundHeaders({ req, rules, client, requestId, target, credential, isMadeSend }: Exchange): string[] {
  const named = connectionNames(req.headers.connection);
  // What was presented as a credential, right or not, in the bytes of a header.
  const secrets = [credential?.secret, target?.pathSecret, target?.querySecret].flatMap((secret = '') =>
    secret.length < COPY_FROM_LENGTH ? [] : [Buffer.from(secret).toString('latin1')]
  );
  const headers: string[] = [];
  for (let i = 0; i < req.rawHeaders.length; i += 2) {
    const name = req.rawHeaders[i]!.toLowerCase();
    const value = req.rawHeaders[i + 1]!;
    const isOurs = NOT_OUTBOUND.has(name) || name.startsWith('x-forwarded-') || name.startsWith('x-original-') ||
      (isMadeSend && name.startsWith('content-')); // they tell of the client's body
    if (!isOurs && !named.has(name) && !holdsSecret(value, secrets)) headers.push(name, value);
  }
  if (isMadeSend) headers.push('content-type', 'application/json');
  // After the client's own are gone, so that it can neither set these nor strip them by naming them in Connection.
  headers.push('accept-encoding', 'identity'); // what comes back is what was sent
  const proto = (req.socket as Partial<TLSSocket>).encrypted === true ? 'https' : 'http';
  headers.push('x-forwarded-for', client, 'x-forwarded-proto', proto, 'x-request-id', requestId);
  const host = req.headers.host?.replace(/^.*@/, ''); // some clients leave the userinfo of a URL in it
  if (host && !holdsSecret(host, secrets)) headers.push('x-forwarded-host', host);
  if (rules.backend.authorization) headers.push('authorization', rules.backend.authorization);
  return headers;
}

/** The names that a Connection header declares to be for this hop only. */
function connectionNames(value: string | undefined): ReadonlySet<string> {
  if (value === undefined || value === 'keep-alive' || value === 'close') return NO_NAMES;
  return new Set(value.toLowerCase().split(/[ \t,]+/));
}

const NO_NAMES: ReadonlySet<string> = new Set();

/**
 * Whether a header's value holds a secret: as it is, percent-encoded, however often, or in base64, as in a copy of
 * Basic.
 */
function holdsSecret(value: string, secrets: readonly string[]): boolean {
  if (secrets.length === 0 || value.length < COPY_FROM_LENGTH) return false;
  const plain = !value.includes('%')
    ? value
    : value.replace(/%(?:25)*([0-9a-f]{2})/gi, (_, hex: string) => String.fromCharCode(parseInt(hex, 16)));
  const decoded = (plain.match(/[\w+/-]{22,}/g) ?? []).map((run) => Buffer.from(run, 'base64').toString('latin1'));
  return [value, plain, ...decoded].some((text) => secrets.some((secret) => text.includes(secret)));
}

/**
 * Sends the request once the backend is up and has a slot for it. Where no connection came about, nothing can have been
 * sent, and so a send waits and connects again; this repeats nothing, for a large body has not been read yet.
 * @throws {Problem} busy, backend_unreachable, and what else ended the exchange.
 */
async function sendWhenUp(request: BackendRequest): Promise<BackendResponse> {
  const { x, content } = request;
  const { queue } = x;
  try {
    for (;;) {
      await queue.enter(x, !isLarge(content)); // a large body acquires its slot before its last byte
      try {
        return await connectAndSend(request);
      } catch (error) {
        // A client that leaves while the connection is made looks like a refused one.
        if (x.endedBy || !(error instanceof Problem) || error.code !== 'backend_unreachable') throw error;
        queue.refused(x, error);
      }
    }
  } finally {
    queue.release(x);
  }
}

/** Whether a body is larger than what is read before the backend hears of it. */
function isLarge(content: Content): content is Exclude<Content, Uint8Array | undefined> {
  return content !== undefined && 'chunks' in content;
}

/**
 * Sends the request by node:http's client, which never sends it again and never follows a redirect.
 * @returns the response, when its head has come.
 * @throws {Problem} backend_unreachable if no connection came about.
 */
function connectAndSend(request: BackendRequest): Promise<BackendResponse> {
  const { x, method, path, headers, content } = request;
  const { backend, backendTimeoutMs } = x.rules;
  const isTls = backend.options.protocol === 'https:';
  return new Promise((resolve, reject) => {
    if (x.endedBy) return reject(x.endedBy);
    x.stage = 'sending';
    const all = ['host', backend.host, ...headers, ...lengthHeaders(method, content)];
    const outgoing = (isTls ? https : http).request({ ...backend.options, method, path, headers: all });
    x.underway = outgoing;
    let isConnected = false;
    let response: BackendResponse | undefined;
    const onHead = (incoming: http.IncomingMessage, upgraded?: Side): void => {
      response = { incoming, reader: new MessageReader(x, incoming, 'bad_backend_answer'), upgraded };
      // The client has left, and nobody needs the body: the log says what became of the request.
      if (x.hasLeft) x.end(new Problem('client_left', { reason: `answered_${incoming.statusCode}` }));
      x.stage = 'answered';
      resolve(response);
    };
    outgoing.on('response', (incoming) => {
      // A response may come before the request is through, and end before it: nobody reads the rest then.
      incoming.once('end', () => outgoing.writableEnded || outgoing.destroy());
      onHead(incoming);
    });
    outgoing.on('upgrade', (incoming, ...side) => onHead(incoming, side));
    const fail = (error: Error): void => reject(isConnected ? error : backendProblem(error, 'backend_unreachable'));
    outgoing.on('error', (error) => {
      // Without a length, a body that ends by a reset would look complete.
      if (response && !response.incoming.complete) response.reader.isBroken = true;
      fail(error);
    });
    outgoing.on('close', () => response || fail(new Error('closed')));
    const onConnect = (): void => {
      isConnected = true;
      x.queue.connected(x);
      writeRequest(request, outgoing).catch((error) => outgoing.destroy(error));
    };
    outgoing.on('socket', (socket) => {
      socket.off('data', destroyThis); // see readBackend
      if (!socket.connecting) return onConnect(); // one that was kept
      x.waitFor(Math.min(CONNECT_TIMEOUT_MS, backendTimeoutMs), 'backend_unreachable', (problem) => {
        reject(problem);
        outgoing.destroy();
      });
      socket.once(isTls ? 'secureConnect' : 'connect', onConnect);
    });
  });
}

/** Writes the request on its connection. The backend may act on it from the last byte on, and so needs a slot then. */
async function writeRequest(request: BackendRequest, outgoing: http.ClientRequest): Promise<void> {
  const { x, content, isUpgrade } = request;
  if (isLarge(content)) return await upload(x, outgoing, content.chunks());
  await x.queue.enter(x, true); // a try has no slot yet
  x.waitForBackend();
  x.stage = isUpgrade ? 'waiting' : 'sent'; // a WebSocket that is not open yet loses nothing
  outgoing.end(content);
}

/** Breaks a response off. Its connection is not used again. */
function breakOff({ incoming, upgraded }: BackendResponse): void {
  // Not by its request: where the response is all there, Node 26.10 gives the socket back to the pool then.
  if (!incoming.readableEnded) (upgraded?.[0] ?? incoming.socket).destroy();
}

/** RFC 9112 6.3: how long a body is; node:http says it by itself only where the headers are an object. */
function lengthHeaders(method: string, content: Content): string[] {
  if (content === undefined) return method === 'GET' || method === 'DELETE' ? [] : ['content-length', '0'];
  return content.length === undefined ? ['transfer-encoding', 'chunked'] : ['content-length', String(content.length)];
}

/** Writes a large body at the backend's pace. It just returns where the backend has ended: its response says why. */
async function upload(x: Exchange, outgoing: http.ClientRequest, chunks: AsyncGenerator<Uint8Array>): Promise<void> {
  const room = x.changesOf(outgoing, ['drain', 'close']);
  for await (const chunk of chunks) {
    if (!outgoing.write(chunk)) await room();
    if (outgoing.destroyed) return;
  }
  outgoing.end();
}

/**
 * Reads the head of an answer, and refuses what no honest backend says: a client would hang, take the bytes of one
 * answer for those of another, or lose its credential on another way.
 * @param protocol that the client has asked to change to.
 * @returns what the client gets of it, less what was for this hop only and what is not the backend's to say; and the
 *   length of the body, if it was said, or if there is none.
 * @throws {Problem} bad_backend_answer.
 */
function readAnswerHead({ statusCode: status = 0, rawHeaders: headers }: http.IncomingMessage, protocol?: string) {
  const passed: string[] = [];
  const own: Record<string, string> = {}; // what is for this hop, and what it says about the body
  for (let i = 0; i < headers.length; i += 2) {
    const name = headers[i]!.toLowerCase();
    if (NOT_INBOUND.has(name) || name.startsWith('content-')) own[name] = headers[i + 1]!;
    // Which pages may read an answer is not the backend's to say, nor a proxy's before it: some say "*".
    const isOurs = NOT_INBOUND.has(name) || name.startsWith('access-control-');
    if (!isOurs) passed.push(headers[i]!, headers[i + 1]!);
  }
  const { 'content-length': length, 'content-encoding': encoding = 'identity', upgrade } = own;
  const isBodiless = status === 204 || status === 205;
  const hasBadLength = length !== undefined &&
    (own['transfer-encoding'] !== undefined || !/^[0-9]+$/.test(length) || (isBodiless && length !== '0'));
  const lies = {
    unasked_upgrade: status < 200 && (protocol === undefined || upgrade?.toLowerCase() !== protocol),
    redirect: status >= 300 && status < 400 && status !== 304,
    compressed: encoding.toLowerCase() !== 'identity', // it was asked for none
    bad_length: hasBadLength,
  };
  for (const [reason, isTrue] of Object.entries(lies)) if (isTrue) throw new Problem('bad_backend_answer', { reason });
  const named = connectionNames(own.connection);
  return {
    headers: named.size === 0 ? passed : passed.filter((_, i) => !named.has(passed[i - i % 2]!.toLowerCase())),
    length: isBodiless || status === 304 ? 0 : length === undefined ? undefined : Number(length),
  };
}

/** The answer's body, at the client's pace; a body that breaks off breaks the client's connection too. */
async function relayAnswer(x: Exchange, reader: MessageReader, length: number | undefined): Promise<void> {
  const { res, core, rules } = x;
  let room: (() => Promise<void>) | undefined;
  while (x.bytesOut !== length) {
    const chunk = await reader.next(rules.backendTimeoutMs, 'backend_timeout');
    if (chunk === undefined && length === undefined) return;
    x.bytesOut += chunk?.length ?? 0;
    if (chunk === undefined || x.bytesOut > (length ?? Infinity)) {
      throw new Problem('bad_backend_answer', { reason: 'bad_length' });
    }
    collectSoon(chunk);
    // The last one is written with the end of the answer: one system call less, and no answer looks whole too early.
    if (x.bytesOut === length) x.answerRest = chunk;
    if (x.answerRest !== undefined || res.write(chunk)) continue;
    x.waitFor(core.stallTimeoutMs, 'client_left');
    await (room ??= x.changesOf(res, ['drain', 'close']))();
    if (x.endedBy) throw x.endedBy;
  }
}

/**
 * Gives V8 a reason to collect garbage at the pace of a body: its chunks lie outside the heap, and more than 64 MiB of
 * them would gather before it looks. A string of a quarter of their size, dropped at once, fills the young generation.
 */
function collectSoon(chunk: Uint8Array | undefined): void {
  if (chunk === undefined || chunk.length < COLLECT_FROM_BYTES) return;
  Buffer.from(chunk.buffer, chunk.byteOffset, chunk.length).toString('latin1', 0, chunk.length / 4);
}

/**
 * What a failure at the backend means to the client.
 * @param code backend_unreachable if no connection came about: only then it is certain that nothing was sent.
 */
function backendProblem(error: unknown, code: ProblemCode = 'bad_backend_answer'): Problem {
  const { code: reason = 'failed' } = error as NodeJS.ErrnoException; // one word, without an address or a path
  return error instanceof Problem ? error : new Problem(code, { reason, cause: error });
}

// ── SLOTS ────────────────────────────────────────────────────────────────────────────────────────

/** Where a request stands in the queue of its backend. Only `BackendQueue` writes it. */
interface Place {
  readonly needsSlot: boolean;
  /** When the request was ready to be sent, by performance.now(). The queue has this order. */
  readonly readyMs: number;
  /** Until when it waits for a backend that is down; `readyMs` if it does not. */
  readonly untilMs: number;
  isConnected: boolean;
  isAdmitted: boolean;
  /** Set while the request waits for a slot. */
  wantsSlot: boolean;
  /** Set while it holds one. */
  timer: NodeJS.Timeout | undefined;
  /** It has held its slot for `slotTimeoutMs`. */
  isOverdue: boolean;
}

/** From a refused connection until one comes about. */
interface Outage {
  reason: string;
  /** The one request that tries to connect. */
  trier: Exchange | undefined;
  /** How long nobody tries after a try has failed. */
  pauseMs: number;
  pause: NodeJS.Timeout | undefined;
}

/**
 * Who may make the backend of one `backend.url` act, and who waits for that. In normal mode each request is a process of
 * its own; in json-rpc mode parallel requests can end the backend's process. So a request acquires one of
 * `backend.parallel` slots before its last byte is written, and holds it until the head of the response.
 *
 *   enter: wait for ──► connect ──► write ──► head, or end of the connection ──► release
 *     ▲    a slot          │
 *     └─────── refused ────┘      a large body, and a try: enter ──► connect ──► enter: wait for a slot ──► last byte
 *
 * Who has no connection waits in the same queue while the backend is down, and acquires nothing. One of them tries.
 * A slot that is held for `slotTimeoutMs` is overdue. It is lent to the next in the queue while its request waits on, so
 * that a backend that hangs stops nobody for longer. As many slots may be lent as there are.
 */
class BackendQueue {
  readonly #core: Core;
  readonly #origin: string;
  /** Who holds a slot, first the one that acquired it first. */
  #holders: Exchange[] = [];
  #waiting: Exchange[] = [];
  /** By the name of the token, the number of its last slot: the smallest is next. */
  readonly #lastSlots = new Map<string, number>();
  #slotCount = 0;
  #outage: Outage | undefined;

  constructor(core: Core) {
    this.#core = core;
    this.#origin = core.rules.backend.origin;
  }

  /** Whoever joins must release. @param waitMs how long the request waits for a backend that is down, if at all. */
  join(x: Exchange, needsSlot: boolean, waitMs: number): void {
    const readyMs = performance.now();
    const untilMs = readyMs + Math.min(waitMs, x.rules.backendTimeoutMs);
    const state = { isConnected: false, isAdmitted: false, wantsSlot: false, timer: undefined, isOverdue: false };
    x.place = { needsSlot, readyMs, untilMs, ...state };
  }

  /**
   * Waits until the request may go on: to connect, and, if it `wantsSlot`, with a slot. One that tries whether the
   * backend is up goes on without.
   * @throws {Problem} busy, backend_unreachable, and what else ended the exchange.
   */
  async enter(x: Exchange, wantsSlot: boolean): Promise<void> {
    const place = x.place!;
    const isLimited = this.#core.rules.backendParallel < Infinity;
    place.wantsSlot = wantsSlot && place.needsSlot && isLimited && !place.timer;
    if (x.stage === 'answered' || (place.isConnected && !place.wantsSlot)) return;
    place.isAdmitted = false;
    this.#waiting.splice(this.#waiting.findLastIndex((y) => y.place!.readyMs <= place.readyMs) + 1, 0, x);
    this.serve();
    if (place.isAdmitted) return;
    // While the backend is down the end of a try decides who has waited for too long.
    if (this.#isInLine(x)) x.stopTimer();
    else x.waitFor(x.rules.backendTimeoutMs, 'busy');
    await x.standBy();
  }

  /** A connection came about: the backend is up. */
  connected(x: Exchange): void {
    x.place!.isConnected = true;
    if (!this.#outage) return;
    const line = this.#waiting.filter((y) => this.#isInLine(y));
    clearTimeout(this.#outage.pause);
    this.#outage = undefined;
    const waiting = [x, ...line].filter(waits).length;
    this.#core.log('warn', 'the backend can be connected to again', { backend: this.#origin, waiting });
    for (const y of line) y.waitFor(y.rules.backendTimeoutMs, 'busy');
    queueMicrotask(() => this.serve()); // when x, which was ready before them, has entered again
  }

  /** No connection came about: the backend is down. @throws {Problem} the same, if the request waits no longer. */
  refused(x: Exchange, problem: Problem): void {
    const { reason = '' } = problem.details;
    const isNews = this.#outage === undefined;
    const outage = this.#outage ??= { reason, trier: x, pauseMs: RETRY_PAUSE_MS / 2, pause: undefined };
    outage.reason = reason;
    if (outage.trier === x) {
      outage.pauseMs = Math.min(2 * outage.pauseMs, RETRY_PAUSE_LIMIT_MS);
      outage.pause = setTimeout(() => {
        outage.pause = undefined;
        this.serve();
      }, outage.pauseMs).unref();
    }
    const isLate = (y: Exchange): boolean => y.place!.untilMs <= performance.now();
    const line = this.#waiting.filter((y) => this.#isInLine(y));
    for (const y of line) isLate(y) ? y.end(problem) : y.stopTimer();
    this.release(x);
    if (isNews) {
      const waiting = [x, ...line].filter((y) => !isLate(y)).length;
      const fields = { backend: this.#origin, reason, waiting };
      this.#core.log('warn', 'no connection to the backend: sends wait for it', fields);
    }
    if (isLate(x)) throw problem;
  }

  /** Lets go of slot, place in the queue, and try. Idempotent. */
  release(x: Exchange): void {
    const place = x.place!;
    clearTimeout(place.timer);
    place.timer = undefined;
    place.isOverdue = false;
    for (const list of [this.#holders, this.#waiting]) if (list.includes(x)) list.splice(list.indexOf(x), 1);
    if (this.#outage?.trier === x) this.#outage.trier = undefined;
    x.wake?.(); // an upload may wait for a slot that it needs no longer
    this.serve();
  }

  /**
   * Admits who may go on. A free slot goes to the token that got one longest ago, and within a token to the request that
   * was ready first; where there are several tokens and several slots, no token holds all of them.
   */
  serve(): void {
    if (this.#waiting.length === 0) return;
    const outage = this.#outage;
    if (outage) this.#serveLine(outage);
    else for (const x of this.#waiting.filter(({ place }) => !place!.wantsSlot)) this.#admit(x);
    const { rules: { backendParallel: parallel, tokens }, slotTimeoutMs } = this.#core;
    const most = tokens.size > 1 && parallel > 1 ? parallel - 1 : parallel;
    for (;;) {
      const lent = this.#holders.filter(({ place }) => place!.isOverdue).slice(0, parallel);
      const held = this.#holders.filter((x) => !lent.includes(x));
      const isFull = ({ token }: Exchange): boolean => held.filter((y) => y.token!.name === token!.name).length >= most;
      const lastSlot = ({ token }: Exchange): number => this.#lastSlots.get(token!.name) ?? 0;
      const able = this.#waiting.filter((x) => x.place!.wantsSlot && !this.#isInLine(x) && !isFull(x));
      if (held.length >= parallel || able.length === 0) return;
      const next = able.reduce((first, x) => lastSlot(x) < lastSlot(first) ? x : first);
      this.#lastSlots.set(next.token!.name, ++this.#slotCount);
      this.#holders.push(next);
      next.place!.timer = setTimeout(() => this.#passTime(next), slotTimeoutMs);
      this.#admit(next);
    }
  }

  /**
   * When a try is due, the first send in line makes it; if none waits, any request does, so that somebody always finds
   * out that the backend is back. What does not wait is refused.
   */
  #serveLine(outage: Outage): void {
    const line = this.#waiting.filter((x) => this.#isInLine(x));
    if (!outage.trier && !outage.pause) {
      outage.trier = line.find(waits) ?? line[0];
      if (outage.trier) this.#admit(outage.trier);
    }
    for (const x of line) {
      if (!waits(x) && x !== outage.trier) x.end(new Problem('backend_unreachable', { reason: outage.reason }));
    }
  }

  /** Whether the request waits for a backend that is down. */
  #isInLine({ place }: Exchange): boolean {
    return this.#outage !== undefined && !place!.isConnected;
  }

  #admit(x: Exchange): void {
    this.#waiting.splice(this.#waiting.indexOf(x), 1);
    x.place!.isAdmitted = true;
    x.wake?.();
  }

  /** A slot has been held for its time: it can be lent. A request whose client has left ends. */
  #passTime(x: Exchange): void {
    x.place!.isOverdue = true;
    if (x.hasLeft) x.end(new Problem('client_left'));
    else this.serve();
  }
}

/** Whether the request is one that waits for a backend that is down. */
function waits({ place }: Exchange): boolean {
  return place!.untilMs > place!.readyMs;
}

// ── WEBSOCKETS ───────────────────────────────────────────────────────────────────────────────────
// A WebSocket is an HTTP request until the backend accepts the upgrade. From then on its bytes are relayed unread. They
// need no checks: the backend's only WebSocket, GET /v1/receive, reports received messages and takes no commands.

/** One side of a WebSocket, and the bytes that were already read from it. */
type Side = readonly [socket: Duplex, head: Buffer];

/** An open WebSocket. */
interface Tunnel {
  /** The request that opened it. Its token, form, target and client are checked again when the rules change. */
  readonly x: Exchange;
  close(reason: string): void;
}

/**
 * Reads from a client that waits for its handshake. A socket that is not read does not report that its peer has left.
 * @returns a function that stops the reading and returns what the client has sent; RFC 6455 4.1 lets it send nothing.
 */
function listenEarly(x: Exchange, [socket, head]: Side): () => Buffer {
  const early = [head];
  const onData = (chunk: Buffer): void => {
    if (early.push(chunk) > EARLY_LIMIT) socket.destroy();
  };
  const onLeave = (): void => x.end(new Problem('client_left'));
  socket.on('data', onData).on('end', onLeave).on('close', onLeave);
  return () => {
    socket.off('data', onData).off('end', onLeave).off('close', onLeave);
    return Buffer.concat(early);
  };
}

/**
 * Sends the backend's 101 to the client and relays bytes both ways. Closes both sides when one closes, fails or falls
 * too far behind. One log line at the end has the reason and the number of bytes.
 */
function openTunnel(x: Exchange, headers: readonly string[], [socket, head]: Side, [backend, backendHead]: Side): void {
  const { core, requestId, client, token } = x;
  let [bytesIn, bytesOut, reason] = [head.length, 0, 'ended'];
  const close = (why: string): void => {
    reason = why;
    socket.destroy();
    backend.destroy();
  };
  const toClient = (chunk: Buffer): void => {
    bytesOut += chunk.length;
    socket.write(chunk);
    if (socket.writableLength > BACKLOG_LIMIT_BYTES) close('too_far_behind');
  };
  x.stage = 'tunnel';
  x.res.detachSocket(socket as Socket);
  socket.write(headBytes(101, [...headers, 'Connection', 'Upgrade', 'Upgrade', 'websocket']));
  const tunnel: Tunnel = { x, close };
  core.tunnels.add(tunnel);
  for (const side of [socket, backend]) {
    // A quiet WebSocket is not a stalled one. TCP keep-alive detects a peer that is gone.
    if (side instanceof Socket) side.setTimeout(0).setNoDelay(true).setKeepAlive(true, SILENCE_MS);
    side.on('error', () => close('broken'));
    // After one side has ended its half, the other may send its last bytes, but not for ever.
    side.once('end', () => setTimeout(close, LINGER_MS, 'ended').unref());
  }
  // Not by `pipe`, which would pause the backend for a slow client. The backend writes to all its readers in turn.
  backend.on('data', toClient);
  for (const event of ['end', 'close']) backend.once(event, () => socket.end());
  socket.on('data', ({ length }: Buffer) => (bytesIn += length));
  if (backendHead.length > 0) toClient(backendHead);
  if (head.length > 0) backend.write(head);
  socket.pipe(backend); // a client may be paused: it waits only for itself
  socket.once('close', () => {
    backend.destroy();
    core.tunnels.delete(tunnel);
    const ms = Math.round(core.now() - x.startedMs);
    core.log('info', 'websocket closed', { requestId, client, token: token?.name, reason, bytesIn, bytesOut, ms });
  });
}

// ── ANSWERS ──────────────────────────────────────────────────────────────────────────────────────

/** A problem as an answer: its headers and its body, which has the same form for every refusal. */
function describeProblem(problem: Problem, requestId: string, req?: http.IncomingMessage) {
  const { message, code, status, details: { allow, retryAfterMs } } = problem;
  const body = `${JSON.stringify({ error: message, code, requestId })}\n`;
  return {
    body,
    headers: {
      'Content-Type': 'application/json',
      'Content-Length': Buffer.byteLength(body),
      'X-Content-Type-Options': 'nosniff',
      'Cache-Control': 'no-store',
      'X-Request-Id': requestId,
      // Some clients (wget, Jetty) send no credential until they are challenged for one. A browser would ask for a
      // password, remember it, and add it to the requests of any page.
      ...(status === 401 &&
        { 'WWW-Authenticate': req && isBrowser(req) ? ['Bearer'] : ['Basic realm="signal"', 'Bearer'] }),
      ...(allow && { 'Allow': allow.join(', ') }),
      ...(retryAfterMs !== undefined && { 'Retry-After': Math.max(1, Math.ceil(retryAfterMs / 1000)) }),
    },
  };
}

/**
 * The headers that a relayed response gets besides the backend's, name and value in turn. They stand before those: of
 * several X-Content-Type-Options browsers obey the first.
 *
 * Attack: the backend serves an attachment as the HTML or SVG that it is, and who has sent it knows its URL. Its script
 * would run as a page of the gateway's own, and even its <img> would ask the gateway with the token of the path. So no
 * response to a GET may do anything, but for the pages of swagger. With a policy Chromium plays neither sound nor
 * video, and neither of them can run a script.
 */
function addedHeaders({ req, target, ownHeaders, isMadeSend }: Exchange, passed: readonly string[]): string[] {
  const added = Object.entries(ownHeaders).flat();
  if (req.method !== 'GET' || target!.segments[0] === 'swagger') return added;
  const own = new Map<string, string>();
  for (let i = 0; i < passed.length; i += 2) own.set(passed[i]!.toLowerCase(), passed[i + 1]!);
  added.push('X-Content-Type-Options', 'nosniff');
  // Browsers keep received messages on disk; and a send by GET is never answered by a cache.
  if (isMadeSend || !own.has('cache-control')) added.push('Cache-Control', 'no-store');
  const isMedia = /^(?:audio|video)\/[\w.+-]+ *(?:;[^,]*)?$/i.test(own.get('content-type') ?? '');
  if (!isMedia) added.push('Content-Security-Policy', "default-src 'none'; style-src 'unsafe-inline'; sandbox");
  return added;
}

/** Over https and on localhost browsers send the first; elsewhere only the last two, and with a fetch only the last. */
function isBrowser({ headers }: http.IncomingMessage): boolean {
  return headers['sec-fetch-mode'] !== undefined || headers['upgrade-insecure-requests'] !== undefined ||
    headers['user-agent']?.startsWith('Mozilla/') === true;
}

/**
 * An answer's head as bytes, for a socket on which node:http does not answer.
 * @param fields name and value in turn, none with a line feed in it: they are ours, or node:http has parsed them.
 */
function headBytes(status: number, fields: readonly string[]): Buffer {
  const lines = fields.map((text, i) => text + (i % 2 === 0 ? ': ' : '\r\n'));
  return Buffer.from(`HTTP/1.1 ${status} ${http.STATUS_CODES[status] ?? ''}\r\n${lines.join('')}\r\n`, 'latin1');
}

// ── ADDRESSES ────────────────────────────────────────────────────────────────────────────────────

/** A list of addresses and ranges, and how it was written. */
type AddressList = ReturnType<typeof readAddresses>;

/**
 * The client's address: the peer's, or behind trusted proxies the right-most address in
 * X-Forwarded-For that is not a trusted proxy's. What stands left of it is the client's own claim.
 */
function clientAddress(req: http.IncomingMessage, trusted: AddressList | undefined): string {
  let address = normalizeAddress(req.socket.remoteAddress);
  if (trusted === undefined) return address;
  const hops = [req.headers['x-forwarded-for'] ?? []].flat().join(',').split(',');
  while (hops.length > 0 && addressAllowed(trusted, address)) {
    const hop = normalizeAddress(hops.pop()?.trim().replace(/^\[(.*)\](?::\d+)?$|^([\d.]+):\d+$/, '$1$2'));
    if (!isIP(hop)) break; // not an address: the last trusted proxy answers for it
    address = hop;
  }
  return address;
}

/** Whether what the peer says of the client in X-Forwarded-… counts. */
function isTrustedProxy(req: http.IncomingMessage, trusted: AddressList | undefined): boolean {
  return trusted !== undefined && addressAllowed(trusted, normalizeAddress(req.socket.remoteAddress));
}

/** An absent list allows every address. */
function addressAllowed(allowed: AddressList | undefined, address: string): boolean {
  return allowed === undefined || allowed.list.check(address, isIP(address) === 6 ? 'ipv6' : 'ipv4');
}

/** An IPv4-mapped IPv6 address is the IPv4 address. A unix socket's peer has none; it is on this machine. */
function normalizeAddress(address: string | undefined): string {
  return (address ?? '127.0.0.1').replace(/^::ffff:(?=\d+\.)/i, '').replace(/%.*$/, '');
}

// ── LOG ──────────────────────────────────────────────────────────────────────────────────────────

/** Logs one event. A field that is undefined is left out; none is named time, level or message. */
type Log = (level: Level, message: string, fields: object) => void;

/** One line per event. Every value is made by the gateway or quoted as JSON, so that no value can forge a line. */
function makeLog(settings: Settings, options: GatewayOptions): Log {
  const now = options.now ?? Date.now;
  const format = settings['log.format'] ?? (process.stdout.isTTY ? 'text' : 'json');
  const least = LEVELS.indexOf(settings['log.level']);
  let [pending, unreadBytes, dropped] = ['', 0, 0];
  const flush = (): void => {
    if (pending === '') return;
    const [text, bytes] = [pending, Buffer.byteLength(pending)];
    pending = '';
    unreadBytes += bytes;
    // A log that nobody reads must neither stop the gateway nor fill its memory. So lines are dropped; when the log is
    // read again, one line says how many.
    writeOut(text, () => {
      unreadBytes -= bytes;
      if (dropped === 0 || unreadBytes > 0) return;
      log('warn', 'log lines were dropped, because nobody read them', { lines: dropped });
      dropped = 0;
    });
  };
  const write = options.log ?? ((line: string): void => {
    if (unreadBytes > LOG_LIMIT_BYTES) return void dropped++;
    // Lines of requests are written once per turn of the event loop: a system call for each costs as much as a refusal.
    if (pending === '') setImmediate(flush);
    pending += `${line}\n`;
  });
  const log: Log = (level, message, fields) => {
    if (LEVELS.indexOf(level) < least) return;
    const entry = { time: new Date(now()).toISOString(), level, message, ...fields };
    write(format === 'json' ? JSON.stringify(entry) : textLine(entry));
    if (message !== 'request') flush(); // the process may end right after this line
  };
  return log;
}

/** `time level message name=value …`, for a person. A value that is not plain is quoted as JSON, on the same line. */
function textLine({ time, level, message, ...fields }: { time: string; level: string; message: string }): string {
  const given = Object.entries(fields).filter(([, value]) => value !== undefined && value !== '');
  const quote = (text: string): string => /^[\w.:,/@*+-]+$/.test(text) ? text : JSON.stringify(text);
  const pairs = given.map(([name, value]) => `${name}=${quote(String(value))}`);
  return [time, level.padEnd(5), message, ...pairs].join(' ');
}

/** Logs a warning that an unauthenticated client, or a backend that is down, can cause at any rate: once a minute. */
function warnRarely(core: Core, message: string, fields: object): void {
  // Shares the limiter of the tokens' rates. No token has a name with a space, so that the keys cannot collide.
  if (core.rateLimiter.take(`warning: ${message}`, WARNING_RATE, core.now()) === 0) core.log('warn', message, fields);
}

// UNTIL Deno's process.stdout neither stalls where nobody reads it nor throws on a full disk, as in Deno 2.9:
// Deno.stdout (tests "a log that nobody reads …" and "a standard output that goes to a full disk …").
const { Deno: deno } = globalThis as { Deno?: { stdout: { write(bytes: Uint8Array): Promise<number> } } };
let written = Promise.resolve();

/** Writes to standard output without waiting. `done` is called when the text was written, or cannot be. */
function writeOut(text: string, done: () => void = () => {}): void {
  if (deno === undefined) return void process.stdout.write(text, done);
  const bytes = Buffer.from(text);
  written = written.then(async () => {
    for (let at = 0; at < bytes.length;) at += await deno.stdout.write(bytes.subarray(at));
  }).then(done, done);
}

// ── LOADING ──────────────────────────────────────────────────────────────────────────────────────
// The sources of a configuration are noted first, each value with the place where it was given, and read afterwards.
// All mistakes are reported at once, and nothing runs with any: a wrong limit that fell back to its default would be a
// wider one than its owner believes.

/** What the sources of a configuration say, what is wrong with it, and what may not be meant. */
class Sources extends Mistakes {
  /** A setting's value as it was given, and where: a message names it as its owner wrote it. */
  readonly given = new Map<string, { value: unknown; at: string }>();
  readonly warnings: string[] = [];

  /** Of two, the later wins. */
  note(path: string, value: unknown, at: string): void {
    if (value !== undefined) this.given.set(path, { value, at });
  }
}

/** Where a configuration comes from; the flags by the path of their setting. */
type ConfigSources = { file?: string | undefined; env?: NodeJS.ProcessEnv; flags?: Record<string, string | undefined> };

/**
 * Reads file, environment and flags; of two that say something on the same setting, the later wins.
 * @throws {ConfigError} with everything that is wrong.
 */
function loadSettings({ file, env = {}, flags = {} }: ConfigSources): Settings {
  const sources = new Sources();
  if (file !== undefined) noteFileAt(sources, file);
  // Not merged: a token that was taken out of one source would live on in the other.
  const fromFile = sources.given.get('tokens');
  noteEnv(sources, env);
  const tokens = sources.given.get('tokens');
  if (fromFile && tokens !== fromFile) sources.warnings.push(`${tokens!.at} replaces all tokens of the file`);
  for (const [path, value] of Object.entries(flags)) sources.note(path, value, `--${path.split('.')[0]}`);
  return readSettings(sources);
}

/** The settings of a program that embeds the gateway. */
function embeddedSettings(config: GatewayConfig): Settings {
  const sources = new Sources();
  sources.collect('the file', () => noteFile(sources, config));
  return readSettings(sources);
}

/** A secret, or a password of the backend, that is no digest, in a configuration as JSON.stringify writes it. */
const PLAIN_SECRET = /"secret":"(?!sha256:)|"url":"[^"/]*\/\/[^"/]*@/i;

/** A file that cannot be read or parsed is a mistake: without it, the gateway might have no tokens, and be open. */
function noteFileAt(sources: Sources, file: string): void {
  const text = sources.collect('configuration', () => readText(file));
  const at = showPath(file);
  // Collected apart, so that a file of which one part cannot be read is told of all the others too.
  sources.collect(at, () => {
    if (text === undefined) return;
    const config = parseFile(text);
    ensure(isObject(config), 'is not a JSON object');
    sources.collect('the file', () => noteFile(sources, config));
    if (PLAIN_SECRET.test(JSON.stringify(config)) && statSync(file).mode & 0o004) {
      sources.warnings.push(`${at} holds plain secrets and can be read by everybody (chmod o-r)`);
    }
    for (const { key, index } of repeatedKeys(text)) {
      sources.add(at, `${placeAfter(text.slice(0, index))}: ${showValue(key, 'a key')} is given twice in one object`);
    }
  });
}

/**
 * Notes the settings in a parsed file, or in the object below `before` in it.
 * @throws {UsageError} for all that is none.
 */
function noteFile(sources: Sources, config: unknown, before = ''): void {
  if (config === undefined && before !== '') return; // of a program: a file has no undefined
  ensure(isObject(config), 'must be an object');
  const readers = GATEWAY_ROWS.filter(([path]) => path.startsWith(before)).map(([path]) => {
    const at = before + path.slice(before.length).split('.')[0];
    const note = (value: unknown) => at === path ? sources.note(at, value, at) : noteFile(sources, value, `${at}.`);
    return [at.slice(before.length), note];
  });
  readMembers<Record<string, unknown>>(Object.fromEntries(readers), config);
}

/** Parses a configuration file. JSON.parse's own message may quote the file, and so a secret: say only where. */
function parseFile(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    const bytes = Buffer.from(text);
    return attempt(() => BodyScan.fieldsOf(bytes, 'none'), ({ message }) => { // it throws: it is no less strict
      const [, said, offset] = /: (.*), at byte (\d+)/s.exec(message) ?? [];
      return `is not a JSON object: ${placeAfter(bytes.toString('utf8', 0, Number(offset)))}: ${said}`;
    });
  }
}

/** In a valid document: braces, and strings, which may be keys. Others are matched so that no brace in them counts. */
const KEYS_AND_BRACES = /[{}]|("[^"\\]*(?:\\.[^"\\]*)*")(\s*:)?/g;

/** The keys that an object of a valid document has already: of two tokens of one name JSON.parse keeps the last. */
function* repeatedKeys(text: string): Generator<{ key: string; index: number }> {
  const open: Set<string>[] = [];
  for (const { 0: token, 1: quoted = '', 2: colon, index } of text.matchAll(KEYS_AND_BRACES)) {
    if (token === '{') open.push(new Set());
    else if (token === '}') open.pop();
    else if (colon !== undefined) {
      const [keys, key] = [open.at(-1)!, JSON.parse(quoted) as string];
      if (keys.has(key)) yield { key, index };
      keys.add(key);
    }
  }
}

/** Where what follows a text begins, as an editor counts: from 1, and by characters. */
function placeAfter(text: string): string {
  const lines = text.split('\n');
  return `line ${lines.length}, column ${[...lines.at(-1)!].length + 1}`;
}

/** The variables without which somebody gets in, or further than was meant: one that is misspelt must not be lost. */
const RESTRICTIONS =
  'API_TOKENS API_TOKENS_FILE ALLOW_CLIENTS AUTH_METHODS AUTH_ANONYMOUS TRUSTED_PROXIES GATEWAY_CONFIG'.split(' ');
const MIGRATING = 'README.md, "Coming from secured-signal-api", says what it is here';
/**
 * Other names for a setting, those of secured-signal-api among them; the first row that fits decides. What would be a
 * restriction is refused, for without it the gateway is more open. The others may be another program's: a warning.
 */
const MISTAKEN: readonly (readonly [names: RegExp, isRefused: boolean, cure: string])[] = [
  [/^ALLOWED_CLIENTS$/, true, 'did you mean "ALLOW_CLIENTS"?'],
  [/^GATEWAY_CONF$/, true, 'did you mean "GATEWAY_CONFIG"?'],
  [/^TLS_CRT$/, true, 'did you mean "TLS_CERT"?'],
  [/^(?:SETTINGS__|API__TOKEN|API__AUTH__|SERVICE__HOSTNAMES$)/, true, MIGRATING],
  [/^(?:API|SERVICE)__/, false, MIGRATING],
  [/^RATE_LIMIT$/, false, 'did you mean "RATE"?'],
  [/^(?:SENDERS|RECIPIENTS)$/, false, 'it belongs to a token in the file'],
];

/** Notes the settings in the environment; what is nearly the name of one is a mistake, or a warning. */
function noteEnv(sources: Sources, env: NodeJS.ProcessEnv): void {
  for (const [path, [name]] of GATEWAY_ROWS) sources.note(path, env[name], name);
  const file = env.API_TOKENS_FILE;
  if (file !== undefined) {
    const at = 'API_TOKENS_FILE';
    if (env.API_TOKENS !== undefined) sources.add(at, 'is set, and API_TOKENS too; use one of them');
    const text = file && sources.collect(at, () => readText(file));
    // A file that cannot be read counts as given: without it there would seem to be no tokens.
    sources.given.set('tokens', { value: text?.replace(/^\s*#.*$/gm, ''), at });
  }
  for (const name of Object.keys(env)) {
    // Two letters off would meet other programs' names too.
    const near = RESTRICTIONS.find((known) => /^[A-Za-z_]+$/.test(name) && editDistance(name, known) === 1);
    const row = MISTAKEN.find(([names, isRefused]) => names.test(name) && (isRefused || !near));
    const [, isRefused, cure] = row ?? [name, true, near && `did you mean "${near}"?`];
    if (cure && isRefused) sources.add(name, `is not a setting; ${cure}`);
    else if (cure) sources.warnings.push(`${name} is not a setting, and does nothing; ${cure}`);
  }
}

/**
 * Reads every setting from its source or its default. Nothing that is wrong falls back to the default, which may be
 * wider than what was meant.
 * @throws {ConfigError} with everything that is wrong.
 */
function readSettings(sources: Sources): Settings {
  const { given, found, warnings } = sources;
  // A variable or a flag that is set but empty may have been meant to hold a secret.
  for (const [path, { value, at }] of given) {
    if (value !== '' || at === path) continue;
    sources.add(at, 'is set but empty; unset it, or give it a value');
    given.delete(path);
  }
  const isAllRead = found.length === 0; // else nobody can say that there are no tokens
  const read = GATEWAY_ROWS.map(([path, [, , read, fallback]]) => {
    const { value, at } = given.get(path) ?? { value: fallback || undefined, at: path };
    return [path, value === undefined ? undefined : sources.collect(at, () => read(value))];
  });
  const { tokens = [], ...others } = Object.fromEntries(read);
  const settings: Settings = { ...others, tokens, warnings };
  if (isAllRead && !given.has('tokens') && settings.listen?.isLocal === false && !settings['auth.anonymous']) {
    const cure = 'set API_TOKENS, or AUTH_ANONYMOUS=true to let everybody in';
    sources.add('tokens', `there is none, and other machines can reach the address to listen on: ${cure}`);
  }
  // Both files are there by now, or that was told already.
  if (found.length === 0) sources.collect('tls', () => checkTls(settings));
  return sources.end(settings);
}

/** What requests are judged by: the tokens with their fallbacks resolved. */
type Rules = ReturnType<typeof makeRules>;

/** Made whole for each configuration, and never changed: a request keeps the one that it began with. */
function makeRules(settings: Settings) {
  const { 'auth.methods': methods, allow, rate, clients } = settings;
  // A token's own value replaces the top-level one; merged, a list could only ever become wider.
  const resolve = (token: TokenSettings) => ({ methods, allow, rate, clients, ...token }) as Token;
  const tokens = settings.tokens.map(resolve);
  /** The token that everybody has, if none is configured. */
  const anonymous = tokens.length === 0 ? resolve({ name: 'anonymous', digest: '' }) : undefined;
  return {
    /** By digest. */
    tokens: new Map(tokens.map((token) => [token.digest, token])),
    anonymous,
    /** The forms that any token accepts. */
    forms: new Set(tokens.flatMap((token) => [...token.methods])),
    all: anonymous ? [anonymous] : tokens,
    /** Origins that are no strangers, and whose pages may read every answer. */
    cors: settings.cors ?? new Set<string>(),
    trustedProxies: settings.trustedProxies,
    backend: settings['backend.url'],
    // 0 is no limit for these two, and no wait for `backend.wait`.
    backendTimeoutMs: settings['backend.timeout'] || Infinity,
    backendWaitMs: settings['backend.wait'],
    backendParallel: settings['backend.parallel'] || Infinity,
    bodyLimitBytes: settings['limits.body'],
    warnings: settings.warnings,
  } as const;
}

// ── READERS ──────────────────────────────────────────────────────────────────────────────────────
// One function for each kind of value. It throws what is wrong, without the place, which the caller knows; and never
// shows 16 characters of a value, for any may be a secret that was put into the wrong place.

/** What `run` returns. What it throws instead is told in the gateway's words: the error's own may quote a secret. */
function attempt<T>(run: () => T, explain: (error: NodeJS.ErrnoException) => string): T {
  try {
    return run();
  } catch (error) {
    throw new UsageError(explain(error as NodeJS.ErrnoException));
  }
}

/** A value for a message, or, if it may be a secret, words in its stead. */
function showValue(value: unknown, instead: string): string {
  const text = JSON.stringify(value) ?? '';
  return (typeof value === 'string' ? value : text).length < SECRET_MIN_LENGTH ? text : instead;
}

/** Where a member of an object is: by its key, or by its position if the key may be a secret. */
function placeOf(key: string, index: number): string {
  return key.length < SECRET_MIN_LENGTH && /^[\w.-]+$/.test(key) ? `.${key}` : `[${index}]`;
}

/**
 * Reads a text, number or boolean: the environment has texts alone, and a file may have 5 or "5".
 * @param expected completes the sentence "… is not …".
 * @param parse returns undefined for what is wrong.
 */
function readScalar<T>(value: unknown, expected: string, parse: (text: string) => T | undefined): T {
  const parsed = typeof value === 'object' ? undefined : parse(String(value));
  ensure(parsed !== undefined, `${showValue(value, 'the value')} is not ${expected}`);
  return parsed;
}

/**
 * A reader of sets: an array in JSON, a text separated by commas in the environment. None is empty: whoever writes an
 * empty list may mean nobody, and whoever reads one may take it for no limit.
 */
function listOf<T>(read: Reader<T>): Reader<ReadonlySet<T>> {
  return (value) => {
    const items = typeof value === 'string' ? value.split(',').map((item) => item.trim()).filter(Boolean) : value;
    ensure(Array.isArray(items) && items.length > 0, 'must be a list with at least one entry');
    const mistakes = new Mistakes();
    return mistakes.end(new Set(items.map((item, i) => mistakes.collect(`[${i}]`, () => read(item))!)));
  };
}

/**
 * Reads each member of an object by its own reader. One that has none is a mistake, with what may be meant: a
 * `recipient` that is passed over would be a token that may write to anybody.
 */
function readMembers<T>(readers: { readonly [K in keyof T]-?: Reader<T[K]> }, value: object): Partial<T> {
  const known = new Map<string, Reader<unknown>>(Object.entries(readers));
  const mistakes = new Mistakes();
  const members = Object.entries(value).map(([key, inner], i) => {
    const read = known.get(key) ?? (() => refuseSetting(key, [...known.keys()]));
    return [key, mistakes.collect(placeOf(key, i), () => read(refuseNull(inner)))];
  });
  return mistakes.end(Object.fromEntries(members));
}

/** Is `null` no limit, or nothing allowed? Nobody has to guess. */
function refuseNull(value: unknown): unknown {
  ensure(value !== null, 'null is no value; leave the line out');
  return value;
}

/** @throws {UsageError} with the setting that may be meant: the nearest, if at most 3 letters are wrong and not all. */
function refuseSetting(key: string, known: string[]): never {
  const measured = known.map((name) => ({ name, far: editDistance(key.toLowerCase(), name.toLowerCase()) }));
  const [nearest] = measured.filter(({ far }) => far < Math.min(4, key.length)).sort((a, b) => a.far - b.far);
  throw new UsageError(`is not a setting${nearest ? `; did you mean "${nearest.name}"?` : ''}`);
}

/** Levenshtein's: how many letters must be put in, taken out or changed. */
function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 0; i < a.length; i++) {
    const next = [i + 1];
    for (let j = 0; j < b.length; j++) next.push(Math.min(row[j + 1]! + 1, next[j]! + 1, row[j]! + +(a[i] !== b[j])));
    row = next;
  }
  return row[b.length]!;
}

/** A reader of a word that must be one of these. */
function wordOf<T extends string>(words: readonly T[]): Reader<T> {
  const expected = words.length > 2 ? `one of ${words.join(', ')}` : words.join(' or ');
  return (value) => readScalar(value, expected, (text) => words.find((word) => word === text));
}

/** A reader of texts that are taken as they are. */
function textThat(isRight: (text: string) => boolean, expected: string): Reader<string> {
  return (value) => readScalar(value, expected, (text) => isRight(text) ? text : undefined);
}

/** What JSON calls an object. */
function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function readBoolean(value: unknown): boolean {
  return wordOf(['true', 'false'])(value) === 'true';
}

/** A reader of whole numbers, of up to nine digits and written without signs or zeros before them. */
function countFrom(least: number): Reader<number> {
  const isRight = (text: string): boolean => /^(?:0|[1-9][0-9]{0,8})$/.test(text) && Number(text) >= least;
  return (value) => Number(textThat(isRight, `a whole number of at least ${least}`)(value));
}

const UNIT_MS: Record<string, number> = { ms: 1, s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000 };

/**
 * Milliseconds. The unit is needed, except for 0; setTimeout takes no more than 24 days, and fires at once beyond it.
 */
function parseDuration(text: string): number | undefined {
  const [, count = '', unit = ''] = /^([0-9]{1,9})(ms|s|m|h|d)$/.exec(text) ?? [];
  const ms = text === '0' ? 0 : Number(count) * UNIT_MS[unit]!;
  return ms <= 2 ** 31 - 1 ? ms : undefined;
}

/** A reader of durations, in milliseconds; the example goes into its message. */
function duration(example: string): Reader<number> {
  return (value) => readScalar(value, `a duration such as ${example}`, parseDuration);
}

/** Bytes. One without a unit is a mistake, for "150" may mean anything. */
function readSize(value: unknown): number {
  return readScalar(value, 'a size such as 150MiB', (text) => {
    const [, count, unit = ''] = /^([1-9][0-9]{0,8})(B|KiB|MiB|GiB)$/.exec(text) ?? [];
    return count && Number(count) * 1024 ** ['B', 'KiB', 'MiB', 'GiB'].indexOf(unit) || undefined;
  });
}

/** `COUNT/TIME`, neither of them 0: a token that may do nothing is taken out instead. */
function readRate(value: unknown): Rate {
  return readScalar(value, 'a rate such as 30/1m', (text) => {
    const [, count = '', time = ''] = /^([1-9][0-9]{0,5})\/(.+)$/.exec(text) ?? [];
    const perMs = parseDuration(time);
    return perMs ? { count: Number(count), perMs, written: text } : undefined;
  });
}

/** What `readExpiry` expects, in words. */
const EXPIRY = 'a date such as 2027-06-30 (valid through that day, UTC) or a time such as 2027-06-30T12:00:00Z';

/** Milliseconds since the epoch. A date alone means the end of that day. */
function readExpiry(value: unknown): number {
  return readScalar(value, EXPIRY, (text) => {
    const [, day, time] = /^(\d{4}-\d\d-\d\d)(T\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d))?$/.exec(text) ?? [];
    const [dayMs, ms] = [Date.parse(`${day}`), Date.parse(`${day}${time ?? 'T23:59:59.999Z'}`)];
    // Date.parse takes the 31st of February for the 3rd of March.
    return Number.isNaN(dayMs + ms) || !new Date(dayMs).toISOString().startsWith(day!) ? undefined : ms;
  });
}

/** An account, or a person by number, as the backend wants it. */
function readNumber(value: unknown): string {
  return textThat((text) => NUMBER.test(text), '"+" and 5 to 15 digits')(value);
}

/** A UUID, or a user name: what begins with `group.` is a group for the backend. */
const PERSON = /^(?:[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}|(?!group\.)[a-z_]\w{2,31}\.\d{2,})$/i;

/** Numbers are compared as they are written: one without its plus, or with spaces, would never match. */
function readRecipient(value: unknown): string {
  return value === 'group.*' ? value : recipientOr(', group.… or group.*')(value);
}

/** A reader of single recipients. @param group completes the list of what is expected. */
function recipientOr(group: string): Reader<string> {
  const isRecipient = (text: string): boolean => NUMBER.test(text) || PERSON.test(text) || isGroupId(text);
  return textThat(isRecipient, `a phone number ("+" and 5 to 15 digits), a user name, a UUID${group}`);
}

/** Checked as strictly as a token's own lists: a default that nobody can be reached by would be found out too late. */
function readDefaults(value: unknown): SendDefaults {
  ensure(isObject(value), 'must be an object with number, recipients, text_mode');
  const recipients = (list: unknown): string[] => [...listOf(recipientOr(' or group.…'))(list)];
  return readMembers<SendDefaults>({ number: readNumber, recipients, text_mode: wordOf(TEXT_MODES) }, value);
}

/** A mistake in a template is told at start, with its line and column, and not when the first alert comes. */
function readTemplate(value: unknown): Template {
  ensure(typeof value === 'string' && value.trim() !== '', 'must be a template: text with {{names}} in it');
  return attempt(() => new Template(value), (error) => error.message);
}

function destroyThis(this: Socket): void {
  this.destroy();
}

/** The backend, as requests need it. */
type Backend = ReturnType<typeof readBackend>;

/** The backend's address in the parts that a request needs. No message shows it: there may be a password in it. */
function readBackend(value: unknown) {
  const url = typeof value === 'string' && URL.canParse(value) ? new URL(value) : undefined;
  const isUsable = url !== undefined && /^https?:$/.test(url.protocol) && !url.search && !url.hash;
  ensure(isUsable, 'must be an http or https URL without a query');
  const userinfo = url.username || url.password ? `${url.username}:${url.password}` : '';
  // Else decodeURIComponent would throw below, and not say which setting it was.
  ensure(!/%(?![0-9a-f]{2})/i.test(userinfo), 'has a "%" in its userinfo that must be written "%25"');
  // Its own, so that its idle time is ours, and nothing else in the process uses its connections.
  // UNTIL Deno sends a request only once: on a kept connection that ends before the head of the response, Deno 2.9 sends
  // it again, POST too (test "nothing is sent twice").
  const keepAlive = !('Deno' in globalThis);
  const agent = new (url.protocol === 'https:' ? https : http).Agent({ keepAlive, timeout: IDLE_TIMEOUT_MS });
  // What comes on an idle connection answers no request: the next request would be given it as its own response.
  agent.on('free', (socket: Socket) => socket.once('data', destroyThis));
  return {
    /** By which a reload knows whether it is the same. With userinfo: not for a log. */
    href: url.href,
    /** Without userinfo. */
    origin: url.origin,
    /** Of the path, without a slash at the end. */
    prefix: url.pathname.replace(/\/+$/, ''),
    host: url.host,
    /** For node:http's client. */
    options: { protocol: url.protocol, hostname: url.hostname.replace(/^\[|\]$/g, ''), port: url.port, agent },
    authorization: userinfo ? `Basic ${Buffer.from(decodeURIComponent(userinfo)).toString('base64')}` : undefined,
  } as const;
}

/** An origin is compared as it is written: whatever a browser would write otherwise would never match. */
function readOrigins(value: unknown): ReadonlySet<string> {
  const isOrigin = (text: string) => /^https?:[^*]+$/.test(text) && URL.canParse(text) && new URL(text).origin === text;
  const expected = 'an origin as browsers send it: https://dash.example:8443, no path, no default port';
  return listOf(textThat(isOrigin, expected))(value);
}

/**
 * Where to listen: `path` of a unix socket, or `host`, undefined for every interface, and `port`. `isLocal` says that
 * only programs on this machine can connect; a name other than localhost may mean any address.
 */
function readListen(value: unknown) {
  return readScalar(value, 'host:port, :port, [::]:port or unix:/path.sock', (text) => {
    const [, path, v6, name, digits] =
      /^(?:unix:(\/.+)|(?:\[([0-9a-fA-F:.]+)\]|([^:[\]\s/]*)):([0-9]{1,5}))$/.exec(text) ?? [];
    const port = digits === undefined ? undefined : Number(digits);
    const host = v6 ?? (name || undefined);
    if ((path ?? port) === undefined || port! > 65535 || (v6 !== undefined && isIP(v6) !== 6)) return undefined;
    const isLoopback = host === 'localhost' || host === '::1' || (isIP(host ?? '') === 4 && host!.startsWith('127.'));
    return { path, host, port, isLocal: path !== undefined || isLoopback };
  });
}

/** A file that a setting names, and what is in it. */
function readFile(value: unknown): { path: string; text: string } {
  ensure(typeof value === 'string', 'must be the path of a file');
  return { path: value, text: readText(value) };
}

/** The text of a file. A message names the user who may not read it: in a container that is mostly the mistake. */
function readText(path: string): string {
  const uid = 'Deno' in globalThis ? undefined : process.getuid?.(); // Deno 2 asks for a permission of its own
  const user = uid === undefined ? '' : ` by user ${uid}`;
  return attempt(() => readFileSync(path, 'utf8'), ({ code }) => `${showPath(path)} cannot be read${user} (${code})`);
}

/**
 * A file's path. What is none may be a secret, and a secret may hold a "/": the first folder at least must be there.
 */
function showPath(path: string): string {
  const [top = ''] = /^\/*[^/]*/.exec(path) ?? [];
  return path.length < SECRET_MIN_LENGTH || existsSync(top) ? path : 'the file';
}

/** Certificate and key for node:https, if both are there. */
function tlsFiles({ 'tls.cert': cert, 'tls.key': key }: Settings): { cert: string; key: string } | undefined {
  return cert && key && { cert: cert.text, key: key.text };
}

/**
 * Says what node:https would only say on the first connection, or on start. Deno 2.9 does not say it even then, and
 * Node takes an empty file for no certificate.
 */
function checkTls(settings: Settings): void {
  ensure(!settings['tls.cert'] === !settings['tls.key'], 'needs both "cert" and "key"');
  const files = tlsFiles(settings);
  if (files === undefined) return;
  const parts = (text: string, kind: string): string[] =>
    text.split(/^(?=-----BEGIN )/m).filter((part) => part.includes(`${kind}-----`));
  const broken = (name: string) => () => `its "${name}" is empty, cut, encrypted, or not in PEM`;
  // One by one: of a chain, X509Certificate reads the first alone.
  const chain = attempt(() => parts(files.cert, 'CERTIFICATE').map((pem) => new X509Certificate(pem)), broken('cert'));
  const key = attempt(() => createPrivateKey(parts(files.key, 'PRIVATE KEY')[0] ?? ''), broken('key'));
  ensure(chain.length > 0 && /-----END [A-Z0-9 ]+-----\s*$/.test(files.cert), broken('cert')());
  ensure(chain[0]!.checkPrivateKey(key), 'its "key" is not the key of the first certificate in "cert"');
  attempt(() => createSecureContext(files), ({ code }) => `its "cert" and "key" cannot be used together (${code})`);
}

/**
 * Addresses and ranges, as they were `written` and as a `list` to ask. BlockList takes a wrong number of bits for an
 * error of ours; a name would have to be asked for on each request, and its owner could change who is let in.
 */
function readAddresses(value: unknown) {
  const list = new BlockList();
  const readOne = (item: unknown) =>
    readScalar(item, 'an address or a CIDR range', (text) => {
      const [, address = '', bits] = /^([^/]*)(?:\/([0-9]{1,3}))?$/.exec(text) ?? [];
      const [type, size] = isIP(address) === 6 ? ['ipv6', 128] as const : ['ipv4', 32] as const;
      if (!isIP(address) || Number(bits ?? 0) > size) return undefined;
      list.addSubnet(address, Number(bits ?? size), type);
      return text;
    });
  return { written: [...listOf(readOne)(value)], list };
}

/**
 * An allowlist: its `groups`, with those that they stand for, its `patterns`, and both as they were `written`. A word
 * that is neither is refused: it may be misspelt, and what it should open would be missed.
 */
function readAllow(value: unknown) {
  const expected = `one of ${Object.keys(GROUPS).join(', ')}, or a pattern such as "GET /v1/groups/:number"`;
  const isKnown = (text: string): boolean => Object.hasOwn(GROUPS, text) || readPattern(text) !== undefined;
  const written = [...listOf(textThat(isKnown, expected))(value)];
  const groups = new Set(written.flatMap((word) => GROUPS[word as Group] ?? []));
  return { written, groups, patterns: written.flatMap((word) => readPattern(word) ?? []) };
}

/**
 * `METHOD /path`, where METHOD may be `*`, and a segment a literal, `:name` or `*`. A literal is compared with what a
 * client wrote after decoding, so an escape in it would never match, and a part of a segment is no wildcard.
 */
function readPattern(text: string): Pattern | undefined {
  const [, method = '', path = ''] = /^([A-Z]+|\*) \/(\S+)$/.exec(text) ?? [];
  const parts = path.split('/');
  const good = (method === '*' || METHODS.includes(method)) &&
    parts.every((part) => /^(?:\*|:[A-Za-z]+|[^*:%?#\\]+)$/.test(part));
  return good ? { method, parts } : undefined;
}

/**
 * `tokens`: an object in JSON; in the environment a text of `SECRET` and `name=SECRET`. None at all is a mistake, for
 * without tokens everybody is let in. Of two with one secret, one would be used with the other's rights.
 */
function readTokens(value: unknown): TokenSettings[] {
  const mistakes = new Mistakes();
  const tokens = typeof value === 'string' ? readTokenWords(value, mistakes) : readTokenObject(value, mistakes);
  ensure(tokens.length > 0, 'holds no token; leave it out to run without tokens');
  const owners = new Map<string, string>();
  tokens.forEach(({ name, digest }, i) => {
    const [owner, here] = [owners.get(digest), showValue(name, `[${i}]`)];
    if (owner !== undefined) mistakes.add('', `${owner} and ${here} have the same secret`);
    if (digest !== '') owners.set(digest, here); // else it could not be read
  });
  tokens.forEach(({ name }, i) => { // which every log line would show
    if (owners.has(digestOf(name))) mistakes.add(`[${i}]`, 'has a secret as its name');
  });
  return mistakes.end(tokens);
}

/** A name stands in every log line, and in the answers to `--check`: it is one word, and forges nothing. */
function checkTokenName(name: string): void {
  ensure(/^[A-Za-z0-9][\w.-]{0,63}$/.test(name), 'a name may have letters, digits, "_", "-" and ".", 64 at most');
}

/** Messages give an entry's position and not its text: what looks like a name may be half of a secret. */
function readTokenWords(text: string, mistakes: Mistakes): TokenSettings[] {
  const names = new Set<string>();
  return text.split(/[\s,]+/).filter(Boolean).map((word, i) => {
    const [, name = `token-${i + 1}`, secret = ''] = /^(?:([A-Za-z0-9][\w.-]{0,63})=)?(.*)$/s.exec(word) ?? [];
    const digest = mistakes.collect(`[${i}]`, () => {
      const isPair = !/^=*$/.test(secret);
      ensure(isPair, 'is either a name without a secret, or a secret that ends in "=": write name=SECRET');
      ensure(!names.has(name), 'has the name of an earlier one');
      names.add(name);
      return readSecret(secret, true);
    });
    return { name, digest: digest ?? '' };
  });
}

/** The tokens of a file, each an object with a secret, or a file with one, and settings of its own. */
function readTokenObject(value: unknown, mistakes: Mistakes): TokenSettings[] {
  ensure(isObject(value), 'must be an object, name to settings');
  return Object.entries(value).map(([name, config], i) => {
    mistakes.collect(`[${i}]`, () => checkTokenName(name));
    const at = isObject(config) ? placeOf(name, i) : `[${i}]`; // else the name may be meant as the secret
    const { secret, secretFile, ...others } = isObject(config) ? config : {};
    const digest = mistakes.collect(at, () => {
      ensure(isObject(refuseNull(config)), 'must be an object with "secret" or "secretFile"');
      ensure((secret === undefined) !== (secretFile === undefined), 'needs either "secret" or "secretFile"');
      const read = readMembers(TOKEN_READERS, secret === undefined ? { secretFile } : { secret });
      return read.secret ?? read.secretFile;
    });
    const { expires: expiresMs, ...read } = mistakes.collect(at, () => readMembers(TOKEN_READERS, others)) ?? {};
    return { ...read, name, digest: digest ?? '', secretFile, expiresMs } as TokenSettings;
  });
}

/** Of a file, the white space around the secret goes: editors end it with a line feed. */
function readSecretFile(value: unknown): string {
  return readSecret(readFile(value).text.trim(), true);
}

/** What other formats have around a secret, and between two: by a mistake in quoting it would become part of one. */
const QUOTING = /^["'`\p{Pi}\p{Pf}[\]<>{}]|["'`\p{Pi}\p{Pf}[\]<>{}]$|;/u;

/** The digest of nothing, or of an empty line: of a program that was given no secret. */
const NO_DIGESTS = ['', '\n', '\r\n'].map(digestOf);

/**
 * A secret's digest. A message never shows any of it. `isBare` says that it comes from an environment or a file of its
 * own, where a quote is taken as it stands; in JSON nobody writes one by mistake.
 */
function readSecret(secret: unknown, isBare = false): string {
  ensure(typeof secret === 'string', 'must be a string');
  if (/^sha256:/i.test(secret)) {
    const digest = secret.slice('sha256:'.length).toLowerCase();
    ensure(!NO_DIGESTS.includes(digest), 'is the digest of nothing: there was no secret to hash');
    ensure(/^[0-9a-f]{64}$/.test(digest), 'after "sha256:" there must be 64 hexadecimal digits');
    return digest;
  }
  ensure(!/\p{Cc}/u.test(secret), 'holds a control character');
  ensure(!/^\s|\s$/.test(secret), 'begins or ends with white space');
  const isQuoted = isBare && QUOTING.test(secret);
  ensure(!isQuoted, 'begins or ends with a quote, a bracket or a brace, or holds ";": it would be part of the secret');
  const isLong = secret.length >= SECRET_MIN_LENGTH;
  ensure(isLong, 'the secret is shorter than 16 characters; "gateway.ts token" makes a good one');
  return digestOf(secret);
}

/**
 * SHA-256, in hexadecimal. A slow hash protects guessable passwords; a secret of `gateway.ts token` has 256 random
 * bits, and a slow one at every request would stop a small computer.
 */
function digestOf(secret: string): string {
  // The shorter way is 2 µs faster. Node 20.11 and those before it do not have it: until 20.12 is the oldest.
  return crypto.hash?.('sha256', secret) ?? crypto.createHash('sha256').update(secret).digest('hex');
}

// ── DEMO ─────────────────────────────────────────────────────────────────────────────────────────
// Built on the public interface alone, and so an example of embedding.

/** A stand-in backend that knows the three routes of a first try and shows what reaches it. */
function startDemoBackend(show: (line: string) => void): http.Server {
  return http.createServer(async (req, res) => {
    const answers: Record<string, [status: number, body?: object]> = {
      'GET /v1/about': [200, { versions: ['v1', 'v2'], build: 2, mode: 'json-rpc', version: 'unset' }],
      'GET /v1/health': [204],
      'POST /v2/send': [201, { timestamp: String(Date.now()) }],
    };
    const body = await readAll(req).catch(() => undefined);
    if (body === undefined) return; // the client left in the middle
    const route = `${req.method} ${req.url}`;
    const [status, answer] = answers[route] ?? [404, { error: 'this stand-in backend has no such route' }];
    show(`backend got   ${route} ${body.replace(/\p{Cc}/gu, ' ').slice(0, 500)}`);
    res.writeHead(status, answer && { 'Content-Type': 'application/json' }).end(answer && JSON.stringify(answer));
  }).listen(0, '127.0.0.1').unref();
}

/** Starts gateway and stand-in backend with a new token. A first command is short; the others are told after it. */
async function runDemo(listen: string | undefined, print: (text: string) => void): Promise<void> {
  const backend = startDemoBackend(print);
  await once(backend, 'listening');
  const [number, recipients] = ['+15550100001', ['+15550100002']];
  const secret = newSecret().slice(0, 22); // 132 bits; the first command fits into 80 columns
  const gateway = createGateway({
    backend: { url: `http://127.0.0.1:${(backend.address() as AddressInfo).port}` },
    ...(listen !== undefined && { listen }),
    auth: { methods: [...FORMS] },
    tokens: { demo: { secret, defaults: { number, recipients } } },
  });
  stopOnSignal(gateway);
  const url = await gateway.listen();
  gateway.server.once('close', () => backend.close());
  const send = (form: string, where: string, auth = {}): string =>
    `# ${form}\ncurl ${where} -d '${JSON.stringify({ ...auth, message: `Hello by ${form}`, number, recipients })}'\n`;
  print(`
A demonstration: the backend is a stand-in, and nothing here reaches Signal.
Paste this into another terminal; the message appears below. Ctrl-C ends it.

curl -u api:${secret} ${url.replace('http://', '')}/v2/send -d '{"message":"Hi"}'
`);
  const others = [
    '\nThe token can stand in four more places, and a message can say from whom and to whom it goes.\n',
    send('bearer', `'${url}/v2/send' -H 'Authorization: Bearer ${secret}'`),
    send('query', `'${url}/v2/send?@auth=${secret}'`),
    send('path', `'${url}/@auth=${secret}/v2/send'`),
    send('body', `'${url}/v2/send'`, { auth: secret }),
    `# and what it refuses: account setup\ncurl -X POST '${url}/v1/register/${number}' -u 'api:${secret}'\n`,
  ].join('\n');
  gateway.server.once('request', (_req, res) => res.once('close', () => print(others)));
}

// ── COMMAND LINE ─────────────────────────────────────────────────────────────────────────────────

/** All that need no place in a file. Each setting has a variable; only the two of a first try have flags too. */
const FLAGS = {
  config: { type: 'string' },
  listen: { type: 'string' },
  backend: { type: 'string' },
  check: { type: 'boolean' },
  demo: { type: 'boolean' },
  help: { type: 'boolean', short: 'h' },
  version: { type: 'boolean', short: 'v' },
} as const;

/** The whole command line. Only here is `process` asked for anything but its standard output and its user. */
async function main(): Promise<void> {
  // Whoever read this may have gone (`--help | head`, a log's pipe): no reason to end with a stack trace, or to stop
  // serving.
  process.stdout.on('error', () => {});
  const print = (text: string): void => writeOut(`${text}\n`);
  const { values, positionals: [command, ...rest] } = parseCommandLine(process.argv.slice(2));
  // These need no configuration, and so work with a broken one.
  if (values.help) return print(usage());
  if (values.version) return print(VERSION);
  if (command === 'token' && rest.length <= 1) return print(makeToken(rest[0]));
  if (command === 'hash' && rest.length === 0) return print(`sha256:${hashStdin()}`);
  const isRender = command === 'render' && rest.length === 1;
  // Not echoed: an argument may be meant as a secret.
  const isKnown = command === undefined || isRender;
  ensure(isKnown, 'that is not a command, or not with these arguments; --help lists what there is');

  const file = values.config ?? process.env.GATEWAY_CONFIG;
  ensure(file !== '', '--config, or GATEWAY_CONFIG, is set but empty');
  const flags = { 'listen': values.listen, 'backend.url': values.backend };
  if (values.demo) {
    const { BACKEND_URL, API_TOKENS, API_TOKENS_FILE, LISTEN } = process.env;
    const configured = file ?? values.backend ?? BACKEND_URL ?? API_TOKENS ?? API_TOKENS_FILE;
    const isAlone = !values.check && !isRender && configured === undefined;
    ensure(isAlone, '--demo brings its own backend and token; it does not run together with configured ones');
    return runDemo(values.listen ?? LISTEN, print);
  }
  // One way to load for `--check`, `render`, a start and a reload: what is checked is what will run.
  const load = (): Settings => loadSettings({ file, env: process.env, flags });
  const settings = load();
  if (values.check) return print(printCheck(settings));
  if (isRender) return print(renderSend(settings, rest[0]!, readFileSync(0)));
  const gateway = startGateway(settings, {});
  stopOnSignal(gateway);
  await gateway.listen();
  void askBackend(gateway, settings);
  reloadOnChange(gateway, load, [file, process.env.API_TOKENS_FILE, ...settingsFiles(settings)]);
}

/** @throws {UsageError} for an unknown flag or a missing value, in parseArgs' first sentence; the others advise. */
function parseCommandLine(args: string[]) {
  return attempt(() => parseArgs({ args, options: FLAGS, allowPositionals: true }), ({ message }) => {
    const [said = ''] = message.split('. ');
    const isLong = /^Unknown option '.{16}/s.test(said); // it may be meant as a secret
    return `${isLong ? 'that is no option' : said}; --help lists what there is`;
  });
}

/** The text of `--help`, in 80 columns. The settings come from their table. */
function usage(): string {
  const rows = GATEWAY_ROWS.map(([path, [env, , , fallback, help]]) =>
    `  ${path.padEnd(20)}${env.padEnd(18)}${fallback && `[${fallback}]`}`.trimEnd() + `\n      ${help}`
  );
  return `signal-gateway ${VERSION}: an authenticating gateway for signal-cli-rest-api

  gateway.ts [FLAGS]        run
  gateway.ts --check        say all that is wrong, or what each token may do
  gateway.ts --demo         run with a stand-in backend and a new token
  gateway.ts render NAME    print the send that the token of that name makes
                            of what a webhook posts, here on standard input
  gateway.ts token [NAME]   make a secret, and its digest
  gateway.ts hash           print the digest of a secret on standard input

Flags: --config FILE, --listen HOST:PORT, --backend URL, --help, --version.

Settings, by their path in the JSON file (--config, or GATEWAY_CONFIG), with
their variable and [default]; of file, environment and flags, the later wins.
Durations: 250ms 30s 5m 1h 7d; sizes: 64KiB 10MiB.
API_TOKENS_FILE names a file with one token per line.
SIGHUP, or a change of the file, reloads. SIGTERM and SIGINT (Ctrl-C) let what
runs finish; the same signal again cuts it off.

${rows.join('\n')}

A token in the file has these, and may have methods, allow, rate and clients of
its own, which replace the top-level ones:

${SETTING_ROWS.slice(GATEWAY_ROWS.length).map(([name, [, , , , help]]) => `  ${name.padEnd(12)}${help}`).join('\n')}

The groups of allow:

  send        POST /v2/send and /v1/send
  info        GET /v1/about and /v1/health
  receive     GET /v1/receive: what others write to the account
  messaging   send, receive, and what else a bot needs: reactions, groups, polls
  setup       accounts, linking, devices, profiles: can take the account over

The manual: README.md, and the comments of GatewayConfig in this file.`;
}

/** A new secret for the client, its digest for the configuration, and, with a name, the line of a token in the file. */
function makeToken(name: string | undefined): string {
  if (name !== undefined) checkTokenName(name);
  const secret = newSecret();
  const digest = `sha256:${digestOf(secret)}`;
  const row = name === undefined ? '' : `\n"${name}": { "secret": "${digest}" }`;
  return `secret  ${secret}\ndigest  ${digest}${row}`;
}

/** 256 random bits in the alphabet that no client's encoding breaks: letters, digits, `-` and `_`. */
function newSecret(): string {
  return randomBytes(32).toString('base64url');
}

/** From standard input alone: as an argument, a secret would be in the shell's history and in the list of processes. */
function hashStdin(): string {
  const secret = readFileSync(0, 'utf8').replace(/\r?\n$/, '');
  return attempt(() => readSecret(secret), ({ message }) => `standard input: ${message}`);
}

/** What `--check` says of a configuration that is good. */
function printCheck(settings: Settings): string {
  const rules = makeRules(settings);
  const count = rules.tokens.size;
  return [
    'The configuration is good.',
    `backend ${settings['backend.url'].origin}${settings['backend.url'].prefix}`,
    rules.anonymous ? OPEN_WARNING : `${count} token${count === 1 ? '' : 's'}`,
    ...rules.warnings.map((warning) => `warning: ${warning}`),
    ...rules.all.map((token) => describeToken(token, Date.now())),
  ].join('\n');
}

/** What a token may do, in words, with what is missing too: "any account" is what an owner has to see. */
function describeToken(token: Token, nowMs: number): string {
  const words = (list: Iterable<string> = []): string => [...list].join(', ');
  const expiry = token.expiresMs === undefined ? 'never' : new Date(token.expiresMs).toISOString();
  const rows = [
    ['may call', words(token.allow.written)],
    ['presented', token.digest && `as ${words(token.methods)}`],
    ['sends from', words(token.senders) || 'any account'],
    ['sends to', words(token.recipients) || 'anybody'],
    ['rate', token.rate?.written ?? 'no limit'],
    ['from', words(token.clients?.written) || 'any address'],
    ['webhooks', makesSends(token) ? describeSends(token) : ''],
    ['expires', `${expiry}${isExpired(token, nowMs) ? ' (it has)' : ''}`],
  ];
  const lines = rows.flatMap(([name = '', said]) => said ? `    ${name.padEnd(12)} ${said}` : []);
  return [`  ${token.name}`, ...lines].join('\n');
}

/** What is made of a webhook. A send of the token's own defaults is judged as one that a client posts. */
function describeSends(token: Token): string {
  const { number, recipients, text_mode: mode } = token.defaults ?? {};
  const said = (words: string, value: string | undefined): string => value ? ` ${words} ${value}` : '';
  const defaults = said('from', number) + said('to', recipients?.join(', ')) + said('with text_mode', mode);
  const parts = [`become sends${token.message ? ', the message by a template' : ''}`];
  if (defaults) parts.push(`unless they say otherwise${defaults}`);
  try {
    const target = sendTarget(token);
    judgeSend(token.defaults ?? {}, (field) => field.value !== undefined && judgeField(token, target, field));
  } catch (error) {
    parts.push(`which will be refused: ${(error as Problem).message}`);
  }
  return parts.join('; ');
}

/** The target by which a token gets its sends made. @throws {Problem} if its allowlist lets none of the two through. */
function sendTarget(token: Token): Target {
  const isByGet = token.allow.patterns.some(spellsSendByGet);
  const target = parseTarget(isByGet ? 'GET' : SEND_ROUTE.method, SEND_ROUTE.template);
  const refusal = refusalOfEndpoint(token, target);
  if (refusal) throw refusal;
  return target;
}

/**
 * What a gateway with these settings would send if this were posted with a token.
 * @throws {UsageError} if there is no such token, or if it makes no sends.
 * @throws {Problem} as the gateway would answer.
 */
function renderSend(settings: Settings, name: string, body: Buffer): string {
  const tokens = [...makeRules(settings).tokens.values()];
  const token = tokens.find((candidate) => candidate.name === name);
  const names = tokens.map((known) => `"${known.name}"`).join(', ') || 'none';
  ensure(token !== undefined, `there is no token of that name; there are ${names}`);
  const why = `the token "${name}" has neither "defaults" nor "message": what is posted with it is passed on as it is`;
  ensure(makesSends(token), why);
  const target = sendTarget(token);
  if (body.length > Math.min(PAYLOAD_LIMIT_BYTES, settings['limits.body'])) throw new Problem('body_too_large');
  // No Content-Type is known here, but a multipart form shows its boundary.
  const [, boundary] = /^--([^\r\n]+)\r\n[\w-]+:/.exec(body.toString('latin1', 0, 1000)) ?? [];
  const payload = readPayload(token, body, boundary && `multipart/form-data; boundary="${boundary}"`);
  const send = judgeSend(makeSend(token, payload), (field) => judgeField(token, target, field));
  return JSON.stringify(JSON.parse(send.toString()), null, 2);
}

/**
 * Asks the backend once for its version, so that a wrong address is seen when the gateway starts and not when the first
 * alert is lost. The answer decides nothing. The question carries no userinfo: a 401 is an answer too.
 */
async function askBackend({ log }: RunningGateway, { 'backend.url': { origin, prefix } }: Settings): Promise<void> {
  const backend = origin + prefix;
  try {
    const response = await fetch(`${backend}/v1/about`, {
      headers: { 'User-Agent': `signal-gateway/${VERSION}` },
      redirect: 'manual',
      signal: AbortSignal.timeout(ASK_TIMEOUT_MS),
    });
    const { status } = response;
    if (status === 401) return log('info', 'the backend answers', { backend, status });
    ensure(response.ok, `status ${status}`);
    const about = await response.json().catch(() => undefined);
    ensure(isObject(about), 'no JSON object');
    const [version, mode] = [about.version, about.mode].map((value) => String(value ?? 'unknown').slice(0, 40));
    log('info', 'the backend answers', { backend, version, mode });
  } catch (error) {
    const { message, cause } = error as Error & { cause?: NodeJS.ErrnoException };
    log('warn', 'the backend does not answer as it should', {
      backend,
      reason: cause?.code ?? cause?.message ?? message,
    });
  }
}

/**
 * Ends the process with 0 on SIGTERM or SIGINT. It is called before `listen`, and handles them before the log says that
 * the gateway listens. Not earlier: where the port is taken, Deno would wait for a signal.
 */
function stopOnSignal(gateway: Gateway): void {
  gateway.server.once('listening', async () => {
    await Promise.race([once(process, 'SIGTERM'), once(process, 'SIGINT')]);
    await gateway.close();
    // Not left to the runtime: lines that nobody reads, and on Bun 1.4 a connection without a byte, would keep it
    // running.
    setTimeout(() => process.exit(), FLUSH_MS);
    writeOut('', () => process.exit());
  });
}

/**
 * Reloads on SIGHUP and when a file that the settings came from has changed, once for both. Files are watched by name
 * (editors and secret mounts replace them), and those named in a new configuration with it.
 */
function reloadOnChange(gateway: RunningGateway, load: () => Settings, files: (string | undefined)[]): void {
  let settled: NodeJS.Timeout | undefined;
  const reloadSoon = (): void => {
    clearTimeout(settled);
    settled = setTimeout(reload, SETTLE_MS).unref();
  };
  const watched = new Set<string>();
  const watch = (file: string | undefined): void => {
    if (file === undefined || watched.has(file)) return;
    watched.add(file);
    watchFile(file, { interval: WATCH_MS, persistent: false }, reloadSoon);
  };
  const reload = (): void => {
    // Whatever is wrong with the new configuration, the old one goes on: a lock that falls open or shut is none.
    try {
      const settings = load();
      if (gateway.apply(settings)) void askBackend(gateway, settings);
      settingsFiles(settings).forEach(watch);
    } catch (error) {
      const problems = error instanceof ConfigError ? error.problems.join('; ') : String(error);
      gateway.log('error', 'not reloaded, the old configuration stays in force', { problems });
    }
  };
  files.forEach(watch);
  process.on('SIGHUP', reloadSoon);
  gateway.server.once('close', () => { // or Deno 2.9 would not end
    process.off('SIGHUP', reloadSoon);
    watched.forEach((file) => unwatchFile(file));
  });
}

/** The files that settings name. */
function settingsFiles(settings: Settings): (string | undefined)[] {
  return [settings['tls.cert']?.path, settings['tls.key']?.path, ...settings.tokens.map((token) => token.secretFile)];
}

/**
 * Whether this file was started, and not imported. Node 20 has no import.meta.main: there argv[1] is compared, which
 * may lack the suffix, or be a link, as that of an installed package is. Until Node 22 is the oldest.
 */
function isEntryPoint(): boolean {
  const { main: isMain } = import.meta as { main?: boolean };
  if (isMain !== undefined) return isMain;
  try {
    return createRequire(import.meta.url).resolve(process.argv[1] ?? '') === fileURLToPath(import.meta.url);
  } catch { // an argument of another program, not a script
    return false;
  }
}

// ── EXPORTS ──────────────────────────────────────────────────────────────────────────────────────

// To embed: createGateway and ConfigError, with the types below. The others are for the tests and the benchmark.
export { BodyScan, ConfigError, createGateway, loadSettings, parseTarget, RateLimiter, Template };
export type { Gateway, GatewayConfig, GatewayOptions, TokenConfig };

if (isEntryPoint()) {
  main().catch((error: Error) => {
    // Of `render`: what the webhook would be told.
    const isAnswer = error instanceof UsageError || error instanceof Problem;
    const cure = (error as NodeJS.ErrnoException).code === 'EADDRINUSE'
      ? '; --listen HOST:PORT takes another port'
      : '';
    process.stderr.write(`gateway: ${isAnswer ? error.message : `cannot run: ${error.message}${cure}`}\n`);
    process.exitCode = error instanceof UsageError ? 2 : 1;
  });
}
