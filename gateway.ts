#!/usr/bin/env node
/**
 * An authenticating gateway for signal-cli-rest-api, and for signal-cli's own daemon, in one file.
 *
 * The backend has no authentication: anyone who can connect to it can send messages as you, read yours, and link their
 * own phone to your account. This gateway stands in front of it. By default a request with a valid API token may send a
 * message and read the backend's version and health; everything else is refused. Two requests need no token: `/healthz`
 * by GET or HEAD, and the preflight of an origin on `cors`. The gateway never sends a message twice, never follows a
 * redirect and never forwards a client's credential. Account setup stays off unless the owner enables it explicitly.
 *
 * If no token is configured, all requests are accepted without authentication (`allow` and the cross-site check still
 * apply). Such a gateway starts only on a loopback address, unless `auth.anonymous` is true.
 *
 *   A request:  preflight answered → target made canonical, or 400 → client address checked
 *            →  credential found and removed → token, its expiry and its method checked → cross-site check
 *            →  endpoint on the token's allowlist → the token's rate
 *            →  body scanned while it streams, or made into a message (webhook, form, text), or a call written anew
 *            →  slot acquired, and the backend waited for → relayed once → response relayed → logged
 *
 * Run    node gateway.mjs --demo                           (gateway.mjs is this file, compiled; Node 20 or newer)
 *        GATEWAY_TOKENS=… GATEWAY_BACKEND_URL=http://signal-api:8080 node gateway.mjs
 * Tokens node gateway.mjs add NAME RECIPIENT…                  (makes a token in gateway.json, and prints its secret)
 *        node gateway.mjs test NAME                            (sends a message as that token would)
 * Check  node gateway.mjs --check                              (lists every mistake, or what each token may do)
 *        node gateway.mjs render NAME                          (prints the message that is built from a payload)
 * Embed  import { createGateway } from './gateway.ts'          (importing does no work)
 *
 * Exit codes: 0 success; 1 a failure while running (the port is in use, the backend is down, `render` refuses the
 * payload); 2 invalid usage or configuration.
 *
 * Contents, in five parts. From GATEWAY on, a section calls mostly what is below it; a request's way through them is the
 * function `handle`. The commands use everything, and nothing above uses them.
 *   types and tables  PUBLIC TYPES · SETTINGS · FIXED LIMITS · PROBLEMS · ROUTES
 *   the proxy         GATEWAY · PIPELINE · TARGET · CREDENTIALS · ORIGINS · ENDPOINTS · RATE · METRICS · REQUEST BODY
 *   messages          MESSAGES · TEMPLATES · POLICY · DAEMON · BODY SCAN
 *   the proxy again   RELAY · GATE AND SLOTS · CONNECT · WEBSOCKETS · READING · RESPONSES · ADDRESSES · LOG
 *   configuration     LOADING · READERS
 *   commands          DEMO · ADD AND TEST · COMMAND LINE · EXPORTS
 *
 * Words in comments: a "send" is a request that sends a message, by /v2/send or /v1/send. The body that the gateway
 * builds for a send is a "message". "Attack:" begins what a check prevents. "UNTIL …:" begins a workaround for a
 * runtime, and says when it can go. It names the script of findings/ that shows the behaviour, and fails once it is gone.
 *
 * @module
 */

import { isUtf8 } from 'node:buffer';
import crypto, { createPrivateKey, randomBytes, randomUUID, X509Certificate } from 'node:crypto';
import { once } from 'node:events';
import {
  closeSync,
  fchmodSync,
  fchownSync,
  fstatSync,
  fsyncSync,
  lstatSync,
  openSync,
  readFileSync,
  realpathSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import http, { IncomingMessage, type OutgoingHttpHeaders, ServerResponse } from 'node:http';
import { createRequire } from 'node:module';
import https from 'node:https';
import { type AddressInfo, BlockList, type IPVersion, isIP, Socket } from 'node:net';
import { isAbsolute, resolve } from 'node:path';
import { text as readAll } from 'node:stream/consumers';
import { createSecureContext } from 'node:tls';
import { isatty } from 'node:tty';
import { fileURLToPath, urlToHttpOptions } from 'node:url';
import { isDeepStrictEqual, parseArgs } from 'node:util';

const VERSION = '1.0.0';

// #region PUBLIC TYPES

/** The authentication methods, by their names in settings and in the log. */
const METHOD_NAMES = ['bearer', 'basic', 'query', 'path', 'body'] as const;
type AuthMethod = (typeof METHOD_NAMES)[number];

/** Log levels, least severe first. A line is written if its level is at or above the configured one. */
const LEVELS = ['debug', 'info', 'warn', 'error'] as const;
type Level = (typeof LEVELS)[number];

/** The times that tests, and programs that embed the gateway, may set. */
const TIMES = {
  /** How long a client may take for a request's headers, and for a TLS handshake. */
  headersTimeoutMs: 8000,
  /**
   * How long a response to a client may make no progress, and how long the whole body of an unauthenticated client may
   * take.
   */
  stallTimeoutMs: 30_000,
  /**
   * How long the backend may take to answer before a warning is logged and another request gets a slot in addition. A
   * request whose client has disconnected is then ended.
   */
  slotTimeoutMs: 30_000,
  /** How long connecting to the backend may take, TLS included. */
  connectTimeoutMs: 10_000,
  /**
   * How long a refused client may be silent before its connection is closed; also how long one half of a WebSocket
   * outlives the other, and after which time a connection counts as idle where connections are scarce. Its default is at
   * most a quarter of `stallTimeoutMs`.
   */
  lingerMs: 2000,
};

/** Options for tests and for programs that embed the gateway. */
interface GatewayOptions extends Partial<typeof TIMES> {
  /**
   * The clock, in milliseconds since the epoch. Where it throws, the machine's counts. Without it, rates are timed by
   * performance.now(), which is never set.
   * @default Date.now
   */
  now?: () => number;
  /** Receives each log line, without its line feed. A line for which it throws is lost. @default standard output */
  log?: (line: string) => void;
}

/** The result of `createGateway`. It does nothing before `listen`. */
interface Gateway {
  /** The underlying server, for its events and its address. With `tls` it is a server of node:https. */
  readonly server: http.Server | https.Server;
  /** Opens the port. Resolves to the URL (`http://127.0.0.1:8880`); rejects if the port cannot be opened. */
  listen(): Promise<string>;
  /** Stops accepting, lets running requests finish within the `shutdown` setting, then closes all connections. */
  close(): Promise<void>;
  /**
   * Replaces the configuration for later requests. Running requests finish under the old one; those that their token
   * may no longer make are ended. `listen`, `limits.connections`, `log.*` and whether there is TLS stay as they were.
   * @throws {ConfigError} with every mistake. The old configuration then stays in force.
   */
  reload(config: GatewayConfig): void;
}

// #endregion

// #region SETTINGS

/**
 * Reads a value from JSON or from an environment variable. `Written` is how JSON and `createGateway` write it.
 * @throws {UsageError} that describes the mistake and never contains a secret.
 */
type Reader<T, Written = unknown> = ((value: unknown) => T) & { readonly written?: Written };

/** Gives a reader the type of what it reads. */
function reads<Written>() {
  return function <T>(read: (value: unknown) => T): Reader<T, Written> {
    return read;
  };
}

/** A setting's reader, its line in `--help`, and its default, if there is one. */
type Setting = readonly [Reader<unknown>, help: string, fallback?: string];

/** In messages: a number of an account or a person, as the backend writes it. */
const A_NUMBER = 'a phone number (such as "+4915112345678" in double quotes)';

/** For messages: the backend's URL in a usual compose file. */
const EXAMPLE_URL = 'http://signal-api:8080';

/** What neither the value nor what is expected shows. */
const RECIPIENT_HINTS: Hints = [
  // Copied from a contact, a number often stands between marks for the direction of writing.
  [/[\p{Cf}\u00a0]/u, 'it has a character that is not seen: type it anew'],
  [/^(?:group\.[^*]|[\w+/]{43}=$)/, 'this is not the "id" of a group'],
];

// Readers of text. The others, and the functions used here, are in the section READERS.
const readMethods = listOf(wordOf(METHOD_NAMES));
const readRate = scalarOf('a rate such as 30/1m', parseRate);
/** The phone number of an account or a person, in the backend's format. */
const readNumber = textThat((text) => NUMBER.test(text), A_NUMBER, RECIPIENT_HINTS);
const readSenders = listOrEveryone(
  textThat((text) => NUMBER.test(text), `${A_NUMBER}; "*" alone is every account`, RECIPIENT_HINTS),
);
const readRecipients = listOrEveryone(readerOfRecipients(true));
const readTextMode = wordOf(['normal', 'styled']);
const readPem = reads<string>()((path) => readFile(path));
const readAllowed = reads<string[]>()(readAllow);
const readNetworks = reads<string[]>()(readAddresses);

/**
 * The settings of the top level. The loader and `--help` use these rows. A test compares them with the table in
 * docs/reference.md.
 */
const SETTINGS = {
  'backend.url': [
    reads<string>()(readBackend),
    "the backend's address; may have a path prefix and USER:PASSWORD@",
    'http://127.0.0.1:8080',
  ],
  'backend.timeout': [
    zeroAsNoLimit(duration('150s')),
    'how long the backend may take to answer a whole request; 0 is no limit',
    '150s',
  ],
  'backend.parallel': [
    zeroAsNoLimit(countFrom(0)),
    'how many requests may run at the backend at once; 0 is no limit',
    '4',
  ],
  'backend.wait': [duration('30s'), 'how long a send waits for a backend that restarts; 0 is not at all', '30s'],
  'listen': [
    scalarOf('host:port, :port or [::]:port, such as :8880; the highest port is 65535', parseListen),
    'host:port, or :port for every interface',
    '127.0.0.1:8880',
  ],
  'tls.cert': [readPem, 'a PEM file with a certificate and its chain, for https'],
  'tls.key': [readPem, 'a PEM file with the private key of tls.cert'],
  'auth.methods': [readMethods, `the accepted ones of ${METHOD_NAMES.join(', ')}`, 'bearer,basic,body'],
  'auth.anonymous': [
    reads<boolean>()((value) => wordOf(['true', 'false'])(value) === 'true'),
    'true to run without tokens where other machines can connect',
    'false',
  ],
  'tokens': [readTokens, 'SECRET or name=SECRET, …; in the file an object, name to settings'],
  'defaults.number': [readNumber, 'the account of a send that names none, for tokens without own lists'],
  'defaults.recipients': [
    reads<string[]>()(readDefaultRecipients),
    'the recipients of a send that names none, for the same tokens',
  ],
  'defaults.text_mode': [readTextMode, 'normal or styled, for the same tokens'],
  'senders': [readSenders, 'accounts that a token may use if it names none; any if absent'],
  'recipients': [readRecipients, 'where a token may send if it names nobody; anyone if absent'],
  'allow': [readAllowed, 'any of send, info, receive, messaging, setup, metrics, "GET /v1/groups/*"', 'send,info'],
  'rate': [readRate, 'requests per time for each token, such as 30/1m'],
  'clients': [readNetworks, 'addresses and CIDR ranges that may connect; any if absent'],
  'cors': [
    // Origins are compared as written, so one that no browser would send is refused.
    listOf(textThat(
      (text) => /^https?:[^*]+$/.test(text) && URL.canParse(text) && new URL(text).origin === text,
      'an origin as browsers send it: https://dash.example:8443, no "/" at its end, no path, no default port',
    )),
    'origins whose pages may use the gateway and read its responses',
  ],
  'trustedProxies': [readNetworks, 'proxies whose X-Forwarded-For is trusted'],
  'limits.body': [
    scalarOf('a size such as 150MiB', parseSize),
    'the largest request body; a larger one gets 413',
    '150MiB',
  ],
  'limits.connections': [countFrom(1), 'the maximum number of connections', '1024'],
  'shutdown': [duration('10s'), 'how long running requests have to finish after SIGTERM', '8s'],
  'log.level': [wordOf(LEVELS), 'the least that is logged: debug, info, warn or error', 'info'],
  'log.format': [wordOf(['text', 'json']), 'text or json', 'text'],
} satisfies Record<string, Setting>;

/** The readers of a token's fields, by the field's name. `--help` describes the fields. */
const TOKEN_READERS = {
  methods: readMethods,
  allow: readAllowed,
  rate: readRate,
  clients: readNetworks,
  secret: reads<string>()(readSecret),
  secretFile: reads<string>()((path) => readSecret(readFile(path).trim())), // editors end a file with a line feed
  senders: readSenders,
  recipients: readRecipients,
  expires: scalarOf(
    'a date such as 2027-06-30 (valid through that day, UTC) or a time such as 2027-06-30T12:00:00Z',
    parseExpiry,
  ),
  defaults: reads<MessageDefaults>()(readDefaults),
  message: reads<string | string[]>()(readTemplate),
} satisfies Record<string, Reader<unknown>>;

/** A reader's type of what is written. */
type WrittenFor<R> = R extends { readonly written?: infer Written } ? Exclude<Written, undefined> : never;

/** What a path such as `backend.url` has before its dot. */
type GroupOf<Path> = Path extends `${infer Group}.${string}` ? Group : never;

/** The configuration, in the shape of the JSON file: `backend.url` is `{ backend: { url } }`. Every field is optional. */
type GatewayConfig =
  & { [P in Exclude<keyof typeof SETTINGS, `${string}.${string}` | 'tokens'>]?: WrittenFor<(typeof SETTINGS)[P][0]> }
  & { tokens?: Record<string, TokenConfig> }
  & {
    [G in GroupOf<keyof typeof SETTINGS>]?: {
      [P in keyof typeof SETTINGS as P extends `${G}.${infer Key}` ? Key : never]?: WrittenFor<
        (typeof SETTINGS)[P][0]
      >;
    };
  };

/** The fields of a message that a token or the top level can have by default. */
type MessageDefaults = { number?: string; recipients?: string[]; text_mode?: 'normal' | 'styled' };

/**
 * One token in the configuration. A field that also exists at the top level replaces the value there; if the field is
 * absent, the token inherits that value. Only a token with none of `senders`, `recipients` and `defaults` inherits
 * `defaults`, and one whose own `defaults` name an account or recipients is confined to these.
 */
type TokenConfig = { [F in keyof typeof TOKEN_READERS]?: WrittenFor<(typeof TOKEN_READERS)[F]> };

/** The rows, in the order of `--help`. */
const SETTING_ROWS = Object.entries<Setting>(SETTINGS);

/**
 * The environment variable of a setting: `limits.body` is GATEWAY_LIMITS_BODY, `trustedProxies`
 * GATEWAY_TRUSTED_PROXIES.
 */
function variableOf(path: string) {
  return `GATEWAY_${path.replace('.', '_').replace(/[A-Z]/g, '_$&').toUpperCase()}`;
}

/** The variables that are not derived from a setting. */
const TOKENS_FILE = 'GATEWAY_TOKENS_FILE';

/** Each replaces all tokens of the file. */
const TOKEN_VARIABLES = [variableOf('tokens'), TOKENS_FILE];
const CONFIG_FILE = 'GATEWAY_CONFIG';

/** All settings, read and checked, by path, with the gateway's own certificate, and the warnings of their sources. */
type Settings =
  & { [P in keyof typeof SETTINGS]: SettingValue<(typeof SETTINGS)[P]> }
  & { tokens: readonly TokenSettings[]; certificate?: X509Certificate | undefined }
  /** Whether `tokens` is {}, as after its last token was deleted: nobody is let in. */
  & { isClosed: boolean }
  & Pick<Sources, 'warnings' | 'readFrom'>;

/** Settings that are read once. A reload does not change them, and its log line lists those that differ. */
const START_ONLY = ['listen', 'limits.connections', 'log.level', 'log.format'] as const;

/**
 * The settings that the server, the port and the log use, as they were at the start. `Rules` lacks them, so a check
 * cannot read a value that a reload has changed but the server has not. Code that creates the server from any other
 * setting does not compile.
 */
type AtStart = Pick<Settings, (typeof START_ONLY)[number] | 'tls.cert' | 'tls.key'>;

/** The result of a row's reader, or undefined if the row has no default. */
type SettingValue<S extends Setting> = ReturnType<S[0]> | (S[2] extends string ? never : undefined);

/** A token's fields as their readers return them. */
type TokenFields = { readonly [F in keyof typeof TOKEN_READERS]: ReturnType<(typeof TOKEN_READERS)[F]> };

/** A token as configured. Absent fields are inherited from the top level later. */
type TokenSettings =
  & Partial<Omit<TokenFields, 'secret' | 'secretFile'>>
  & TokenFields['secret']
  & {
    readonly name: string;
  };

// #endregion

// #region FIXED LIMITS
// Numbers that are not settings, and that several sections use. The others stand where they are used.

/** The maximum number of header fields. Each costs time at every step; real clients send fewer than twenty. */
const HEADERS_LIMIT = 200;

/**
 * How many wrong credentials an address may send before it gets 429. A person makes fewer mistakes; a misconfigured
 * poller makes more.
 */
const FAILURE_RATE = { count: 30, perMs: 60_000 };

/**
 * How many lines are logged above debug level: of unauthenticated requests per address, of refusals per token and code, and
 * of internal errors.
 */
const LINE_RATE = { count: 30, perMs: 60_000 };

/**
 * The size of the head of a body. A body of at most this size is checked whole before the backend is contacted. In a
 * larger body, `auth` must be complete within the head. It is also the most white space that may follow a JSON body.
 */
const HEAD_LIMIT_BYTES = 64 * 1024;

/** The deepest nesting of a JSON body or a template. It bounds the memory of both; real ones come nowhere near it. */
const NESTING_LIMIT = 64;

/** The largest body from which the gateway builds a message. Such a body is read into memory as a whole. */
const PAYLOAD_LIMIT_BYTES = 1024 * 1024;

/** The largest call of the daemon that the gateway reads. Without the data of attachments, it may be a payload. */
const CALL_LIMIT_BYTES = 10 * 1024 * 1024;

/** How often what runs is checked for tokens that have expired. A reload checks it at once. */
const RECHECK_MS = 30_000;

/** How long the answer to a request that the backend has acted on may still take after its token has ended. */
const LAST_ANSWER_MS = 30_000;

/** How long a WebSocket, or a connection to the backend, may be silent before TCP probes its peer. */
const SILENCE_MS = 30_000;

/** The shortest secret. No message shows a value this long or longer, because it may be a misplaced secret. */
const SECRET_MIN_LENGTH = 16;

/** How often watched files are looked at: a change is in force 5 s later at most, and an idle machine is woken rarely. */
const WATCH_MS = 3800;

/** How long a changed file must stay unchanged before it is read, because it may be half written. */
const SETTLE_MS = 1000;

// #endregion

// #region PROBLEMS

// The log has the exact reason of a refusal (`reason`). The response has only what an unauthenticated client may know:
// every 401 has the same sentence, whether the token was wrong, expired or absent.

/**
 * Everything that can go wrong with a request. Codes are contract; sentences are for people. After 502
 * `backend_unreachable` or 503 nothing was sent; after 502 `bad_backend_answer` or 504 the message may have been.
 */
const PROBLEMS = {
  bad_request: [400, 'Invalid HTTP: percent-encode URLs (spaces, non-ASCII); a body needs Content-Length or chunked.'],
  bad_target: [400, 'The URL is not accepted.'],
  bad_credential: [400, 'The request carries more than one credential in the same place; send one.'],
  bad_json: [400, 'The body is not a JSON object.'],
  bad_field: [400, 'A field of the body is not accepted.'],
  unauthorized: [
    401,
    'A valid API token is required: "Authorization: Bearer TOKEN", or Basic with the user "api" and the token as the ' +
    "password. The gateway's log has the reason.",
  ],
  endpoint_not_allowed: [403, 'This token may not use this endpoint.'],
  setup_blocked: [403, 'Account setup is blocked here; do it directly on the backend.'],
  sender_not_allowed: [
    403,
    'This token may use only the accounts on its list ("senders", or else the number in "defaults").',
  ],
  recipient_not_allowed: [403, 'This token may not send to one of these recipients.'],
  client_not_allowed: [403, 'Requests from this address are not accepted.'],
  cross_site: [403, "From a browser, use a bearer token or the path method, or add the page's origin to cors."],
  unknown_endpoint: [404, 'There is no such endpoint; to send a message, POST to /v2/send.'],
  method_not_allowed: [405, 'This endpoint does not accept this method.'],
  request_timeout: [408, 'The request took too long to arrive.'],
  body_too_large: [413, 'The body is larger than this gateway accepts.'],
  unsupported_encoding: [415, 'Compressed request bodies are not accepted; send the body uncompressed.'],
  too_many_headers: [431, 'The request has more than 200 header fields, or they are too long.'],
  rate_limited: [429, 'This token has reached its rate limit; try again after the time in Retry-After.'],
  too_many_failures: [429, 'Too many wrong credentials from this address; try again after the time in Retry-After.'],
  client_left: [499, 'The client disconnected.'], // only in the log: there is no client to respond to
  internal_error: [500, "Internal error; the gateway's log has details under this request id."],
  backend_unreachable: [502, 'The Signal backend cannot be reached; nothing was sent.'],
  bad_backend_answer: [502, 'The Signal backend sent no valid response; the message may have been sent.'],
  shutting_down: [503, 'The gateway is shutting down; try again in a moment.'],
  busy: [503, 'Too many concurrent requests; nothing was sent. Try again after the time in Retry-After.'],
  backend_timeout: [504, 'The Signal backend took too long; the message may have been sent.'],
} satisfies Record<string, [status: number, sentence: string]>;

type ProblemCode = keyof typeof PROBLEMS;

/**
 * `detail` replaces the sentence in the response. The log's `detail` is `logged`, or else `detail`. `allow` lists the
 * methods for a 405. `syntax` is a mistake in JSON, with its position.
 */
type ProblemDetails = {
  detail?: string;
  /** For the log only: without what a client wrote, or with what only the owner of this machine may know. */
  logged?: string | undefined;
  /** For the log only: the name of a token that was refused, although its secret is right. */
  token?: string | undefined;
  retryAfterMs?: number;
  allow?: string[];
  syntax?: { why: string; atByte: number };
};

/** The `Retry-After` of 503 `busy`. A guess: a backend takes 10 to 20 seconds to restart. */
const BUSY_RETRY_MS = 10_000;

/**
 * Ends a request with an error response. Not an Error, because capturing its stack would cost more than the rest of a
 * refusal.
 *
 * A function named `refusalOf…` returns a Problem or undefined, because `--check` or the check of what runs uses it too. One
 * named `mistakeIn…` returns part of a sentence. Any other function that refuses throws.
 */
class Problem {
  readonly code;
  readonly status;
  /** For the client. */
  readonly message;
  readonly reason;
  readonly details;

  /** @param reason for the log only. */
  constructor(code: ProblemCode, reason?: string, details: ProblemDetails = {}) {
    const [status, sentence] = PROBLEMS[code];
    this.code = code;
    this.status = status;
    this.message = details.detail ?? sentence;
    this.reason = reason;
    this.details = code === 'busy' ? { retryAfterMs: BUSY_RETRY_MS } : details;
  }
}

/** @param detail the whole sentence. */
const withDetail = (code: ProblemCode, detail: string, reason?: string) => new Problem(code, reason, { detail });

/** @param why completes "The URL is not accepted: …". */
const badTarget = (why: string) => withDetail('bad_target', `The URL is not accepted: ${why}.`);

/** @param isForMessage whether a message is built from the body. Then all of it is in memory, so the limit is lower. */
function tooLarge(limitBytes: number, isForMessage = false) {
  const most = `The body is larger than ${showSize(limitBytes)}, the most that this gateway accepts`;
  const detail = isForMessage && limitBytes === PAYLOAD_LIMIT_BYTES
    ? `${most} from a token with "defaults" or "message"; for large attachments, use one with "senders" and "recipients" instead.`
    : `${most} here.`;
  return withDetail('body_too_large', detail);
}

/** @param owner whose `clients` lack the address, for the log. */
const clientNotAllowed = (owner: string) =>
  new Problem('client_not_allowed', undefined, {
    logged:
      `The address that "client" says is not in the "clients" of ${owner}. If it is a proxy's, set "trustedProxies".`,
  });

/** @param detail the whole sentence. */
const badJson = (detail: string) => withDetail('bad_json', detail);

/** @param why completes "The field … …". Never the field's value, which may be a secret or a phone number. */
const badField = (key: string, why: string) =>
  new Problem('bad_field', undefined, {
    detail: `The field "${key}" ${why}.`,
    logged: `The field "${plainName(key)}" ${why}.`, // a client may have spelled it otherwise
  });

/** Invalid usage or configuration. The command line writes its message to standard error and exits with 2. */
class UsageError extends Error {}

/** @param mistake what is wrong, without the setting's path ("must be …"). @throws {UsageError} unless `isRight`. */
function ensure(isRight: boolean, mistake: string): asserts isRight {
  if (!isRight) throw new UsageError(mistake);
}

/** Hints for people, by words of the mistake. The first row that matches counts. */
type Hints = readonly (readonly [words: RegExp, hint: string])[];

function hintFor(hints: Hints, wrong: string) {
  return hints.find(([words]) => words.test(wrong))?.[1];
}

/** The mistakes in a configuration, one message each, with the setting's path. No message contains a secret. */
class ConfigError extends UsageError {
  override readonly name = 'ConfigError';
  readonly problems;

  constructor(problems: readonly string[]) {
    super(`the configuration is invalid:\n  ${problems.join('\n  ')}`);
    this.problems = problems;
  }
}

/** Collects the errors of several readers, so that all mistakes are reported at once. */
class Mistakes {
  readonly sentences: string[] = [];

  add(at: string, sentence: string) {
    this.sentences.push(`${at}: ${sentence}`);
  }

  /**
   * Calls a reader and collects its error, or the errors of its parts (`.key: …`, `[2].key: …`).
   * @returns the result of `read`, or undefined if it threw.
   */
  collect<T>(at: string, read: () => T) {
    try {
      return read();
    } catch (error) {
      if (!(error instanceof UsageError)) throw error;
      const problems = error instanceof ConfigError ? error.problems : [`: ${error.message}`];
      // A setting at the top level has no place but its name.
      this.sentences.push(...problems.map((problem) => (at + problem).replace(/^the configuration\./, '')));
      return undefined;
    }
  }

  /** Returns the value, or throws. @throws {ConfigError} if any mistake was collected. */
  valueOrThrow<T>(value: T) {
    if (this.sentences.length > 0) throw new ConfigError(this.sentences);
    return value;
  }
}

// #endregion

// #region ROUTES
// The backend's router as of August 2026 (release 0.100 and the main branch). A route that a newer backend adds belongs
// to no group, so only a pattern can open it. The pattern may be a wildcard such as `* /v1/*`, unless the route lies
// below a setup prefix. Tokens with `senders` or `recipients` cannot use such a route.

/** The groups of `allow`, each with the routes of one kind of client. `messaging` also opens send and receive. */
const GROUPS = ['send', 'info', 'receive', 'messaging', 'setup', 'metrics'];

/** A route for one method. `template` is written as in the backend; `parts` are its segments. */
type Route = (typeof ROUTES)[number];

/** The methods of the backend's routes. HEAD and OPTIONS are 404 there, and no route here has them. */
const HTTP_METHODS = ['GET', 'POST', 'PUT', 'PATCH', 'DELETE'] as const;

/**
 * What the row of a route can declare. The default is the stricter assumption: without a word, a route may change
 * who is in a group, has persons as recipients, by number or UUID, accepts no body beyond its head, needs a slot, and
 * shows the data of all accounts unless its path names one. The same holds for a path without a row, except where a
 * comment says so.
 *
 *   body          the backend refuses the request without a JSON body, and a large one streams
 *   any-body      there may be a body of any kind, and a large one streams
 *   same-members  adds no one to a group, so a token with `recipients` may use it
 *   to-groups     its recipients may be groups
 *   to-names      its persons may be user names, because the backend hands them to signal-cli as such. On any other
 *                 route signal-cli makes a phone number of a name's digits: max170123456.78 is +4917012345678
 *   no-account    shows nothing of an account, or has it in the body, so a token with `senders` may use it
 *   query-account its query may name the account
 *   no-slot       does not queue: a health check must not wait, and a poll would hold a slot for a long time
 *   waits         waits for a backend that is down; Home Assistant's library asks /v1/about before each send
 */
type Fact =
  | 'body'
  | 'any-body'
  | 'same-members'
  | 'to-groups'
  | 'to-names'
  | 'no-account'
  | 'query-account'
  | 'no-slot'
  | 'waits';

type RouteRow = [method: (typeof HTTP_METHODS)[number], template: string, ...facts: Fact[]];

/**
 * Every route of the backend, by group: its method, its template and its facts. The first match wins, so a literal
 * segment comes before a parameter, as in the backend's own router.
 */
const ROUTES = Object.entries<RouteRow[]>({
  // The backend answers both without signal-cli.
  info: [
    ['GET', '/v1/about', 'no-slot', 'no-account', 'waits'],
    ['GET', '/v1/health', 'no-slot', 'no-account'],
    ['GET', '/api/v1/check', 'no-slot', 'no-account'], // these three are signal-cli's daemon
  ],
  // With /v1/send, signal-cli would read the digits in a group's id as a number.
  send: [
    ['POST', '/v2/send', 'body', 'to-groups', 'to-names', 'same-members', 'no-account', 'waits'],
    ['POST', '/v1/send', 'body', 'same-members', 'no-account', 'waits'],
  ],
  // Removes the messages that it returns. A WebSocket in json-rpc mode.
  receive: [
    ['GET', '/v1/receive/:number', 'no-slot'],
    ['GET', '/api/v1/events', 'no-slot', 'query-account'],
  ],
  messaging: [
    ['PUT', '/v1/typing-indicator/:number', 'body', 'to-groups', 'same-members'],
    ['DELETE', '/v1/typing-indicator/:number', 'body', 'to-groups', 'same-members'],
    ['POST', '/v1/reactions/:number', 'body', 'to-groups', 'same-members'],
    ['DELETE', '/v1/reactions/:number', 'body', 'to-groups', 'same-members'],
    ['POST', '/v1/receipts/:number', 'body', 'same-members'],
    ['DELETE', '/v1/remote-delete/:number', 'body', 'to-groups', 'same-members'],
    ['POST', '/v1/polls/:number', 'body', 'to-groups', 'to-names', 'same-members'],
    ['DELETE', '/v1/polls/:number', 'body', 'to-groups', 'to-names', 'same-members'],
    ['POST', '/v1/polls/:number/vote', 'body', 'to-groups', 'to-names', 'same-members'],
    ['GET', '/v1/attachments'], // those of all accounts, as the next two
    ['GET', '/v1/attachments/:attachment'],
    ['DELETE', '/v1/attachments/:attachment', 'same-members'],
    ['GET', '/v1/sticker-packs/:number'],
    ['POST', '/v1/sticker-packs/:number', 'body', 'same-members'],
    ['GET', '/v1/search'],
    ['GET', '/v1/search/:number'],
    ['GET', '/v1/groups/:number'],
    ['POST', '/v1/groups/:number', 'body', 'to-names'], // its members, not those that it gets later
    ['GET', '/v1/groups/:number/:groupid'],
    ['DELETE', '/v1/groups/:number/:groupid', 'same-members'], // quits the group
    ['PUT', '/v1/groups/:number/:groupid', 'body'], // can create a link by which anyone can join
    ['GET', '/v1/groups/:number/:groupid/avatar'],
    ['POST', '/v1/groups/:number/:groupid/block', 'same-members'],
    ['POST', '/v1/groups/:number/:groupid/join', 'same-members'],
    ['POST', '/v1/groups/:number/:groupid/quit', 'same-members'],
    ['POST', '/v1/groups/:number/:groupid/members', 'body'],
    ['DELETE', '/v1/groups/:number/:groupid/members', 'body'],
    ['POST', '/v1/groups/:number/:groupid/admins', 'body'],
    ['DELETE', '/v1/groups/:number/:groupid/admins', 'body'],
    ['POST', '/v1/groups/:number/:groupid/pin-message', 'body', 'same-members'],
    ['DELETE', '/v1/groups/:number/:groupid/pin-message', 'body', 'same-members'],
  ],
  // These can take over the account or read its contacts. Some link a phone, trust another key (identities), rename the
  // sender (profiles, contacts), or run what the owner has installed (plugins).
  setup: [
    ['GET', '/v1/configuration'],
    ['POST', '/v1/configuration', 'body', 'same-members'],
    ['GET', '/v1/configuration/:number/settings'],
    ['POST', '/v1/configuration/:number/settings', 'body', 'same-members'],
    ['POST', '/v1/register/:number', 'same-members'],
    ['POST', '/v1/register/:number/verify/:token', 'same-members'],
    ['POST', '/v1/unregister/:number', 'same-members'],
    ['GET', '/v1/qrcodelink'],
    ['GET', '/v1/qrcodelink/raw'],
    ['GET', '/v1/accounts'],
    ['POST', '/v1/accounts/:number/rate-limit-challenge', 'body', 'same-members'],
    ['PUT', '/v1/accounts/:number/settings', 'body', 'same-members'],
    ['POST', '/v1/accounts/:number/username', 'body', 'same-members'],
    ['DELETE', '/v1/accounts/:number/username', 'same-members'],
    ['POST', '/v1/accounts/:number/pin', 'body', 'same-members'],
    ['DELETE', '/v1/accounts/:number/pin', 'same-members'],
    ['GET', '/v1/devices/:number'],
    ['POST', '/v1/devices/:number', 'body', 'same-members'],
    ['DELETE', '/v1/devices/:number/local-data', 'same-members'], // deletes all data of the account
    ['DELETE', '/v1/devices/:number/:deviceId', 'same-members'],
    ['PUT', '/v1/profiles/:number', 'body', 'same-members'],
    ['GET', '/v1/identities/:number'],
    ['PUT', '/v1/identities/:number/trust/:numbertotrust', 'body', 'same-members'],
    ['GET', '/v1/contacts/:number'],
    ['PUT', '/v1/contacts/:number', 'body', 'same-members'],
    ['GET', '/v1/contacts/:number/:uuid'],
    ['GET', '/v1/contacts/:number/:uuid/avatar'],
    ['POST', '/v1/contacts/:number/sync', 'same-members'],
    ['POST', '/api/v1/rpc', 'any-body', 'to-groups', 'to-names', 'same-members', 'no-account', 'waits'], // see CALLS
    ...HTTP_METHODS.map((method): RouteRow => [method, '/v1/plugins/*', 'any-body', 'to-groups', 'to-names']),
  ],
  metrics: [
    ['GET', '/metrics', 'no-slot'], // the gateway's own, never relayed
  ],
}).flatMap(([group, rows]) =>
  rows.map(([method, template, ...facts]) => ({ group, method, template, parts: template.slice(1).split('/'), facts }))
);

/** Whether the row of a route declares a fact. A path without a row declares none. */
function declares(route: Route | undefined, fact: Fact) {
  return route !== undefined && route.facts.includes(fact);
}

/** The route of a send. A token that builds messages may be allowed to GET it; the backend then gets a POST. */
const SEND_ROUTE = ROUTES.find(({ template }) => template === '/v2/send')!;

/** All commands of signal-cli's daemon. Its row counts as setup, and each method has a group of its own. */
const RPC_ROUTE = ROUTES.find(({ template }) => template === '/api/v1/rpc')!;

/** The gateway's own metrics. Only the word `metrics` or the pattern `GET /metrics` opens them. */
const METRICS_ROUTE = ROUTES.find(({ group }) => group === 'metrics')!;

/** The first two segments of every setup route. A route that a newer backend adds below them also counts as setup. */
const SETUP_PREFIXES = new Set(ROUTES.filter((route) => route.group === 'setup').map((route) => prefixOf(route.parts)));

/** The first two segments of a path, in lower case, because a proxy behind the gateway may fold the case of a path. */
function prefixOf(segments: readonly string[]) {
  return segments.slice(0, 2).join('/').toLowerCase();
}

/**
 * A phone number in E.164 with its plus. The pattern is slightly wider than the standard. Numbers are compared as text.
 */
const NUMBER = /^\+[0-9]{5,15}$/;

/**
 * The mistake in a value for a path parameter. The backend decodes `:number` a second time, so `%252B` becomes a plus.
 * It passes `:number` and `:groupid` to signal-cli as arguments, where `--username=…` would be an option.
 */
function mistakeInParameter(name: string, value: string) {
  if (name === ':number' && !NUMBER.test(value)) return 'the account in the path must be "+" and 5 to 15 digits';
  if (name !== ':groupid' || isGroupId(value)) return undefined;
  return 'the group in the path must be an "id" as GET /v1/groups/:number lists them, "group.…"';
}

/** Whether a text is a group id as the backend lists them: `group.` and the base64 of the base64 of 32 bytes. */
function isGroupId(value: string) {
  const internalId = Buffer.from(value.slice('group.'.length), 'base64').toString('latin1');
  return isInternalId(internalId) && value === `group.${btoa(internalId)}`;
}

/** Whether a text is a group id of signal-cli. Buffer.from accepts anything, so the bytes are encoded again. */
function isInternalId(value: string) {
  if (value.length !== 44) return false; // 32 bytes in base64; a body may have 100,000 recipients to check
  const bytes = Buffer.from(value, 'base64');
  return bytes.length === 32 && value === bytes.toString('base64');
}

/**
 * Whether parts match segments: `:name` and `*` match one segment each; a `*` at the end matches one or more. So
 * `/v1/groups/*` matches /v1/groups/+4915 and all paths below it, but not /v1/groups.
 */
function partsMatch(parts: readonly string[], segments: readonly string[]) {
  const hasLength = parts.at(-1) === '*' ? segments.length >= parts.length : segments.length === parts.length;
  return hasLength && parts.every((part, i) => !isLiteral(part) || part === segments[i]);
}

/** Whether a part matches only itself. */
function isLiteral(part: string) {
  return part !== '*' && !part.startsWith(':');
}

// #endregion

// #region GATEWAY
// Connections: how many there may be, how long they last, and how their requests get to the pipeline. node:http parses
// HTTP. The rest is handled here, for http and https alike: upgrades, pipelining, and requests that cannot be parsed.

type Core = ReturnType<typeof makeCore>;

/**
 * Creates a gateway from a configuration.
 * @throws {ConfigError} with every mistake in the configuration, before anything is opened.
 */
function createGateway(config: GatewayConfig, options: GatewayOptions = {}): Gateway {
  const settings = embeddedSettings(config, options);
  const core = makeCore(settings, makeRules(settings), options);
  // Closures instead of a field `core`: console.log(gateway) must not print secrets.
  return {
    server: core.server,
    listen: () => startListening(core),
    close: () => closeGateway(core),
    reload: (next) => void applySettings(core, embeddedSettings(next)),
  };
}

/** How often node:http looks for connections whose headers are late, so these may be late by as much. */
const CHECK_MS = 7000;

/**
 * The server of a gateway, with its listeners, and all of its state. A reload replaces `rules` as a whole, so each
 * request sees one version of them; only `refusalOfStale` looks at the newest.
 */
function makeCore(settings: AtStart, rules: Rules, options: GatewayOptions) {
  const times = { ...TIMES, ...Object.fromEntries(membersOf(options)) as Partial<typeof TIMES> };
  times.lingerMs = options.lingerMs ?? Math.min(times.lingerMs, times.stallTimeoutMs / 4);
  const metrics = new Metrics();
  const now = makeClock(options.now);
  const elapsedMs = options.now ? makeTicker(now) : () => performance.now();
  const core = {
    ...times,
    server: createServer(settings, times.headersTimeoutMs),
    atStart: settings,
    rules,
    now,
    /** A time that is never set back. */
    elapsedMs,
    startedMs: elapsedMs(),
    /** What such a time is by the clock. */
    dateOf: makeDating(now, elapsedMs),
    metrics,
    log: makeLog(settings, now, metrics, options.log),
    // A limiter drops its least recently used keys. So what strangers can fill, with addresses, never shares one with
    // what they must not reset, such as a token's rate.
    /** Counts requests per token name, and the few kinds of warnings. No token's name contains a space. */
    rateLimiter: new RateLimiter(),
    /** Counts wrong credentials per address. */
    failureLimiter: new RateLimiter(),
    /** Counts log lines of unauthenticated requests per address. */
    addressLines: new RateLimiter(),
    /** Counts log lines of refusals per token name and code. */
    tokenLines: new RateLimiter(),
    /**
     * All connections, by transport socket. Of those without `token`, the first in the map's order has gone longest
     * without a valid token.
     */
    connections: new Map<Socket, Connection>(),
    /**
     * All requests that are being handled, and WebSockets until they are open. Not a Set, because V8 chains the tables
     * that a Set outgrows, and an old table keeps all later requests alive until a full garbage collection.
     */
    running: [] as Exchange[],
    turns: new Turns(),
    /** The gate and the slots of the current backend. A request that began before a reload keeps its own. */
    upstream: new Upstream(),
    /** The open WebSockets: the request that opened each, which is rechecked, and a function that closes it. */
    tunnels: new Map<Exchange, (reason: string) => void>(),
    draining: false,
  };
  attachListeners(core);
  return core;
}

/**
 * How long a connection is kept between two requests. A request that meets the close is lost, so it is longer than
 * proxies and clients keep theirs: aiohttp 15 s, nginx 60 s, Go 90 s, Caddy 120 s. node:http adds a second.
 */
const KEEP_ALIVE_TIMEOUT_MS = 125_000;

/** @param headersTimeout in milliseconds; the name is that of node:http. */
function createServer(settings: AtStart, headersTimeout: number): Gateway['server'] {
  const tls = tlsFiles(settings);
  const options = {
    ...tls,
    headersTimeout,
    handshakeTimeout: headersTimeout, // TLS
    // The default of 30 s would make 8 s mean 38. More often, the checks would wake an idle machine.
    connectionsCheckingInterval: Math.min(CHECK_MS, headersTimeout),
    keepAliveTimeout: KEEP_ALIVE_TIMEOUT_MS,
    requestTimeout: 0, // RequestBody has a limit for slow uploads
    requireHostHeader: false, // checkHead refuses a request without Host, with a JSON body
    shouldUpgradeCallback: isWebSocket,
    IncomingMessage: UpgradableMessage,
  };
  const server = tls ? https.createServer(options) : http.createServer(options);
  // One field more than checkHead accepts, so that checkHead notices the excess. Without a limit, the fields of a head
  // of 16 KiB would take 240 KB of memory. node:http hides further fields but obeys them, so a request with too many
  // fields is refused and is the last one on its connection.
  server.maxHeadersCount = HEADERS_LIMIT + 1;
  return server;
}

function attachListeners(core: Core) {
  const { server } = core;
  server.setTimeout(core.stallTimeoutMs);
  for (const [event, listener] of Object.entries(listenersOf(core))) server.on(event, listener);
  guardListeners(core);
  // node:http, whose `close` also calls this, considers a connection idle once its response has ended, even if bytes
  // are still queued. So no idle connection is closed while an ended response is unsent.
  const closeIdle = server.closeIdleConnections.bind(server);
  server.closeIdleConnections = () => {
    const isUnsent = [...core.connections.values()].some(({ due }) => due.some((res) => res.writableEnded));
    if (!isUnsent) closeIdle();
  };
}

/** The listeners of the server's events. Because of `guardListeners`, none can crash the process. */
function listenersOf(core: Core) {
  const request = (req: IncomingMessage, res: ServerResponse, isUpgrade = false) => {
    handlePipelined(core, res, isUpgrade).catch((error) => failEvent(core, error, [req]));
  };
  const upgrade = (req: IncomingMessage, socket: Socket, head: Buffer) => {
    // node:http continues to parse a packet after its socket was destroyed, and such a socket accepts no response. This
    // response bypasses node:http's order of responses, so it must not get into an unfinished earlier one. No real
    // client sends an upgrade at that point.
    if (socket.destroyed || connectionOf(core, req.socket).due.length > 0) return void socket.destroy();
    socket.unshift(head); // listenEarly reads it
    request(req, responseOn(socket, req), isWebSocket(req));
  };
  return {
    request,
    checkContinue: request, // RequestBody sends "100 Continue" before it reads
    checkExpectation: request, // RFC 9110 10.1.1: an unknown expectation may be ignored
    upgrade,
    connect: upgrade,
    connection: (socket: Socket) => watchConnection(core, socket),
    /** With https, the socket that speaks HTTP is available after the handshake. */
    secureConnection: (speaker: Socket) => void (connectionOf(core, speaker).speaker = speaker),
    /** Disconnects a client that does not read its response or is idle between requests, but not one that waits. */
    timeout: (socket: Socket) => {
      if (socket.writableLength > 0 || connectionOf(core, socket).due.length === 0) socket.destroy();
    },
    clientError: (error: Error, socket: Socket) => respondUnparsed(core, error, socket),
    /** Runs after `clientError`, which cannot write to a socket whose handshake failed and would leave it open. */
    tlsClientError: (_: Error, socket: Socket) => void socket.destroy(),
    /** An error without a listener would crash the process. Before `listening`, startListening reports it. */
    error: ({ code }: NodeJS.ErrnoException) => {
      if (core.server.listening) warnRarely(core, 'a connection could not be accepted', { reason: code });
    },
  };
}

/** Catches what a listener of the server throws, which would crash the process. */
function guardListeners(core: Core) {
  const { server } = core;
  const emit = server.emit.bind(server) as (...event: unknown[]) => boolean;
  server.emit = (...event: unknown[]) => {
    try {
      return emit(...event);
    } catch (error) {
      failEvent(core, error, event);
      return true;
    }
  };
}

/** Closes the connection of an event whose listener failed. @param event the arguments of its listeners. */
function failEvent(core: Core, error: unknown, event: unknown[]) {
  for (const each of event) {
    const socket = each instanceof IncomingMessage ? each.socket : each;
    if (socket instanceof Socket) socket.destroy();
  }
  logInternalError(core, error);
}

/**
 * Whether a request opens a WebSocket: a GET without a body (RFC 6455 4.1). Any other offer to upgrade may be ignored
 * (RFC 9110 7.8); Java's HTTP client offers h2c with ordinary requests.
 */
function isWebSocket(req: IncomingMessage) {
  return req.method === 'GET' && req.headers.upgrade?.toLowerCase() === 'websocket' && !hasBody(req);
}

/** How many chunks a body may have that are on average shorter than PIECE_BYTES. */
const PIECES_LIMIT = 1000;

const PIECE_BYTES = 16;

/** A request whose `upgrade`, which node:http writes and reads, is true only for a WebSocket and for CONNECT. */
class UpgradableMessage extends IncomingMessage {
  #pieces = 0;
  #bytes = 0;

  // Attack: chunks of one byte, each of which costs node:http much more than its byte costs here.
  override push(piece: Buffer | null, encoding?: BufferEncoding) {
    this.#bytes += piece?.length ?? 0;
    if (++this.#pieces <= PIECES_LIMIT || this.#bytes >= PIECE_BYTES * this.#pieces) return super.push(piece, encoding);
    this.socket.destroy();
    return false;
  }

  // UNTIL Node 22.22 is the oldest: older ones, and 24 before 24.9, ignore `shouldUpgradeCallback`, and treat every offer
  // of another protocol as an upgrade (findings/node-takes-an-offer-of-h2c-for-an-upgrade.sh).
  isUpgrade = false;

  get upgrade() {
    return this.isUpgrade && (this.method === 'CONNECT' || isWebSocket(this));
  }

  set upgrade(isUpgrade) {
    this.isUpgrade = isUpgrade;
  }
}

/**
 * Creates a ServerResponse for a request that node:http passed on as an upgrade, so that it can be refused like any
 * other.
 */
function responseOn(socket: Socket, req: IncomingMessage) {
  socket.on('error', () => socket.destroy()); // first: an error without a listener would crash the process
  const res = new ServerResponse(req);
  res.assignSocket(socket);
  socket.on('drain', () => res.emit('drain')); // node:http has removed its own listener
  res.once('finish', () => socket.end(() => socket.destroy()));
  return res;
}

/**
 * A client's connection, with all state that outlives one of its requests.
 *
 * Only `isLastResponse` decides whether a connection is kept, when the head of a response is written. A connection that
 * `isClosing` remains so, and none of its further requests is acted on (RFC 9112 9.6).
 */
class Connection {
  /** The socket that speaks HTTP; with TLS it is undefined until the handshake is done. */
  speaker: Socket | undefined;
  /** The name of the token whose request is being served. */
  token: string | undefined;
  /** The unfinished responses, in the order of their requests. */
  readonly due: ServerResponse[] = [];
  /** When its last response ended, by performance.now(). A connection is not idle before its first. */
  respondedMs = Infinity;
  /** Only ever set to true. */
  isClosing = false;
}

/** The connection of a socket that speaks HTTP. */
function connectionOf({ connections }: Core, speaker: Socket) {
  const socket = transportSocket(speaker);
  const known = connections.get(socket);
  if (known) return known;
  const connection = new Connection();
  connection.speaker = speaker;
  if (socket.destroyed) return connection;
  connections.set(socket, connection);
  socket.once('close', () => connections.delete(socket));
  return connection;
}

/**
 * Registers a new connection. At the limit the new one is accepted, and another one is closed. Otherwise idle
 * connections, which cost an attacker nothing, would lock all clients out.
 */
function watchConnection(core: Core, socket: Socket) {
  const { connections, server } = core;
  connectionOf(core, socket).speaker = 'setSecureContext' in server ? undefined : socket; // see `secureConnection`
  if (connections.size <= core.atStart['limits.connections']) return;
  const evicted = mostDispensable(core);
  connections.delete(evicted);
  evicted.destroy();
  warnRarely(core, 'limits.connections is reached: unauthenticated connections are closed for new ones');
}

/**
 * The connection that is closed for a new one: of those that are idle, or else of all that serve no token, the one that
 * has gone longest without a valid token. There is always one, because the new connection has no token yet.
 *
 * Attack: a stranger who holds many connections by slow requests could close an idle one by each new connection, and
 * the message that its client is just writing would be lost. So a connection is not idle as soon as it has responded.
 */
function mostDispensable({ connections, lingerMs }: Core) {
  const idleSinceMs = performance.now() - lingerMs;
  let first: Socket | undefined;
  for (const [socket, { token, due, respondedMs }] of connections) {
    if (token) continue;
    if (due.length === 0 && respondedMs < idleSinceMs) return socket;
    first ??= socket;
  }
  return first!;
}

/** The maximum number of pipelined requests on a connection. Each is held in memory; real clients send one or two. */
const PIPELINE_LIMIT = 8;

/**
 * Handles the requests of a connection one after the other, even if a client pipelines several (RFC 9112 9.3.2). In
 * parallel they could overtake each other at the backend, and one connection would count as many.
 */
async function handlePipelined(core: Core, res: ServerResponse, isUpgrade: boolean) {
  const { socket } = res.req;
  // A connection that was reset may still deliver requests, but has no address to check against `clients`.
  if (!socket.remoteAddress) return void socket.destroy();
  const connection = connectionOf(core, socket);
  const { due } = connection;
  const previous = due.at(-1);
  // Closed without a response, which could only be sent after those still due.
  if (due.push(res) > PIPELINE_LIMIT) return void socket.destroy();
  res.on('close', () => {
    due.splice(due.indexOf(res), 1);
    connection.respondedMs = performance.now();
    // During a shutdown, an idle connection that its client keeps open would delay the exit until the deadline.
    if (core.draining) core.server.closeIdleConnections();
  });
  if (previous) await once(previous, 'close');
  if (socket.destroyed || connection.isClosing) return;
  const exchange = new Exchange(core, connection, res);
  await handle(exchange, isUpgrade);
  await endResponse(exchange);
}

/**
 * What went wrong on a connection: a pattern for the error's code, the problem's code, and the warning in the log, if
 * not empty. The first row that matches decides.
 */
const UNPARSED = [
  [/^ECONNRESET|^HPE_INVALID_EOF/, 'client_left', ''],
  [/TIMEOUT/, 'request_timeout', ''],
  [/OVERFLOW/, 'too_many_headers', 'the HTTP parser refused a request: too_many_headers'],
  [/^HPE_/, 'bad_request', 'the HTTP parser refused a request: bad_request'],
  [
    /^ERR_SSL_(?:HTTP_REQUEST|WRONG_VERSION_NUMBER)$/,
    'bad_request',
    'a client sent plain http (or something else) to this https port',
  ],
  [/^/, 'bad_request', ''], // such as another error in a TLS handshake
] as const;

/**
 * Responds to requests that the HTTP parser refuses, and to requests whose headers do not arrive in time. Further bytes
 * on the connection are discarded.
 */
function respondUnparsed(core: Core, error: UnparsedError, socket: Socket) {
  const { code: reason = '' } = error;
  const [, code, warning] = UNPARSED.find(([pattern]) => pattern.test(reason))!;
  if (code === 'client_left') return void socket.destroy();
  discardInput(socket);
  if (!socket.writable && reason.startsWith('HPE_')) return; // closed, or an earlier error has its response
  logUnparsed(core, error, socket, code, warning);

  const connection = connectionOf(core, socket);
  const wasClosing = connection.isClosing;
  connection.isClosing = true;
  if (!socket.writable) return; // nothing can be written: the connection has failed, or its TLS handshake
  const problem = new Problem(code);
  const [due] = connection.due; // the response that is due
  if (!due) return respondWithoutRequest(core, socket, problem);
  if (!due.headersSent) return refuseUnlessRelayed(core, connection, due, problem);
  // A response that has begun is relayed to its end. If its head has promised to keep the connection, node:http does
  // not close it.
  if (!wasClosing) due.once('close', () => endSocket(core, socket));
}

type UnparsedError = NodeJS.ErrnoException & { rawPacket?: Buffer };

/** Reads and discards what else arrives, and closes the connection when its client does. */
function discardInput(socket: Socket) {
  // On every runtime this runs again for each piece of what follows, so the listeners of an earlier run are removed.
  // UNTIL Deno does not share the parser of a refused connection: its listeners are removed too, because Deno 2.9
  // reuses the parser for another connection, also after a timeout, and feeds it the bytes and the end of this one
  // (findings/README.md; tests "garbage sent byte by byte" and "the end of a refused connection").
  socket.removeAllListeners('data').removeAllListeners('end').once('end', destroyThis).resume();
}

/** @param warning of UNPARSED; without one, the line is at debug level. */
function logUnparsed(core: Core, error: UnparsedError, socket: Socket, code: ProblemCode, warning: string) {
  const client = normalizeAddress(transportSocket(socket).remoteAddress);
  const fields = { client, code, reason: error.code ?? '' };
  // A TLS handshake begins with 16 hexadecimal (RFC 8446 5.1).
  const isTls = error.rawPacket?.[0] === 0x16;
  const message = isTls ? 'a client sent https to this plain http port' : warning;
  if (message) warnRarely(core, message, fields);
  else core.log('debug', 'client error', fields);
}

/** Responds where no response is due, so that node:http has no request to which the response could belong. */
function respondWithoutRequest(core: Core, socket: Socket, problem: Problem) {
  const { headers, body } = problemResponse(problem, randomUUID());
  socket.write(responseHead(problem.status, Object.entries({ 'Connection': 'close', ...headers }).flat()));
  endSocket(core, socket, body);
}

/**
 * Decides what happens to a response that is due and has not begun, when the bytes after the head of its request cannot
 * be parsed. Whatever is decided, the response will have "Connection: close", and later requests are not acted on.
 */
function refuseUnlessRelayed(core: Core, { due }: Connection, res: ServerResponse, problem: Problem) {
  const { req } = res;
  const exchange = core.running.find((other) => other.res === res);
  // The backend has the request and may act on it, so the backend's response is relayed. This comes first, because a
  // send by GET is sent before its body has arrived: the gateway does not read that body.
  if (exchange?.stage === 'sent') return;
  // The parser failed in the body.
  if (!req.complete) return exchange?.end(problem);
  // The parser took a body for a second request, because it has neither Content-Length nor chunked.
  if (req.method === 'POST' && !hasBody(req) && due.length === 1) return exchange?.end(problem);
  // Otherwise it failed in the bytes after the request, which is complete.
}

/**
 * Replaces the rules. Rules that have no token are refused, because a file may have been emptied by mistake, unless they
 * let nobody in (`isClosed`), the owner wants an open gateway (`auth.anonymous`), or it was open before, on a local
 * address. The address in force counts, because a new `listen` takes effect only after a restart.
 * @returns whether requests now go to another backend.
 * @throws {ConfigError} if the rules are refused.
 */
function applySettings(core: Core, settings: Settings) {
  const { server, atStart } = core;
  const mayBeOpen = settings['auth.anonymous'] || (core.rules.anonymous && atStart.listen.isLocal);
  if (settings.tokens.length === 0 && !settings.isClosed && !mayBeOpen) {
    throw new ConfigError(['tokens: none is configured; GATEWAY_AUTH_ANONYMOUS=true would accept all requests']);
  }
  const needsRestart: string[] = START_ONLY.filter((path) => !isDeepStrictEqual(settings[path], atStart[path]));
  const backend = core.rules['backend.url'];
  const isSameBackend = settings['backend.url'].url.href === backend.url.href;
  // If `backend.url` is unchanged, its connections, its slots and a known outage are kept.
  core.rules = makeRules(isSameBackend ? { ...settings, 'backend.url': backend } : settings);
  const { gate, slots } = core.upstream;
  if (!isSameBackend) core.upstream = new Upstream();
  gate.stopIfIdle(core);
  slots.serve(core); // there may be more slots now
  const tls = tlsFiles(settings);
  if (tls && 'setSecureContext' in server) server.setSecureContext(tls); // for new connections
  else if (tls || 'setSecureContext' in server) needsRestart.push('tls');
  endStale(core);
  logRules(core, 'reloaded', { needsRestart: needsRestart.join(',') || undefined });
  return !isSameBackend;
}

/** How long before a token or its own certificate expires the gateway warns, at start and on reload. */
const RENEWAL_MS = 14 * 86_400_000;

/** Mistakes and settings that may be unintended. Logged at start and reload, and printed by `--check`. */
function warningsOf(rules: Rules, { listen }: AtStart, nowMs: number) {
  const { all } = rules;
  const others = listen.isLocal ? '' : ', from other machines too';
  const advice = rules['auth.anonymous'] ? '' : '; the command "add" makes one, and --config names the file';
  const openWarning = `no tokens are configured: all requests are accepted without authentication${others}${advice}`;
  const lists = new Set([rules.trustedProxies, ...all.map(({ clients }) => clients)]);
  const networks = [...lists].flatMap((list) => list?.written.filter((entry) => /(?:\.0|::)$/.test(entry)) ?? []);
  const ofTokens = (what: string, has: (token: Token) => boolean | undefined) =>
    all.filter(has).map(({ name }) => `the token "${name}" ${what}`);
  return [
    ...(rules.anonymous ? [openWarning] : []),
    ...(rules.isClosed ? ['"tokens" is empty: every request is refused; the command "add" makes one'] : []),
    ...rules.warnings,
    ...ofTokens('has expired', ({ expires }) => expires <= nowMs),
    ...all.filter(({ expires }) => expires > nowMs && expires <= nowMs + RENEWAL_MS)
      .map(({ name, expires }) => `the token "${name}" expires soon: ${new Date(expires).toISOString()}`),
    ...ofTokens(
      'has a secret of 64 hexadecimal digits; if that is a digest, write "sha256:" before it',
      ({ isHex }) => isHex,
    ),
    ...ofTokens(
      'has a secret with other characters than letters, digits and "-._~+/" ("=" at its end): a quote, a name or a second ' +
        'token may have got into it; tokens in text are NAME=SECRET, with commas between them',
      ({ isOdd }) => isOdd,
    ),
    ...ofTokens(
      `has "defaults" that no send can take: ${ONE_SEND}`,
      ({ defaults }) => sendsTo(defaults?.recipients ?? []).length > 1,
    ),
    ...networks.map((entry) => `"${entry}" is a single address; a network has a length, such as 192.168.1.0/24`),
    ...certificateWarnings(rules, nowMs),
  ];
}

/** Warns if the gateway's own certificate is not valid or expires soon. */
function certificateWarnings({ certificate }: Rules, nowMs: number) {
  if (!certificate) return [];
  const endMs = Date.parse(certificate.validTo);
  if (nowMs >= Date.parse(certificate.validFrom) && nowMs <= endMs - RENEWAL_MS) return [];
  const state = nowMs > endMs ? 'has expired' : 'expires soon, or is not valid yet';
  return [`the certificate in tls.cert ${state}: ${certificate.validFrom} to ${certificate.validTo}`];
}

/** Logs the rules that are now in force, as a warning if there is anything to warn about. */
function logRules(
  { rules, atStart, now, log }: Core,
  message: string,
  more: { listen?: string; needsRestart?: string | undefined },
) {
  const warnings = warningsOf(rules, atStart, now());
  log(warnings.length > 0 || more.needsRestart ? 'warn' : 'info', message, {
    ...more,
    backend: rules['backend.url'].name,
    tokens: rules.tokens.size,
    names: joinFirst(Array.from(rules.tokens.values(), (token) => token.name), ',') || undefined,
    allow: joinFirst([...new Set(rules.all.flatMap((token) => token.allow.written))], ','),
    warning: joinFirst(warnings, '; ') || undefined,
  });
}

/**
 * Opens the port, and starts the periodic check of what runs.
 * @returns the URL. Rejects if the port is in use or the address is not one of this machine.
 */
async function startListening(core: Core) {
  const { server, atStart } = core;
  server.listen(atStart.listen);
  await once(server, 'listening'); // rejects on 'error'
  const { address, port } = server.address() as AddressInfo;
  const scheme = tlsFiles(atStart) ? 'https' : 'http';
  const url = `${scheme}://${isIP(address) === 6 ? `[${address}]` : address}:${port}`;
  const recheck = setInterval(endStale, RECHECK_MS, core).unref();
  server.once('close', () => clearInterval(recheck));
  logRules(core, 'listening', { listen: url });
  return url;
}

/** How long before the deadline of a shutdown running requests get a response, so that it is still delivered. */
const LAST_WORDS_MS = 500;

/**
 * Shuts down in this order: WebSockets and waiting requests at once, then idle connections, the running requests
 * shortly before the deadline, and all other connections at the deadline.
 */
async function closeGateway(core: Core) {
  const { server, running, connections } = core;
  core.draining = true;
  core.upstream.gate.stopIfIdle(core);
  for (const close of core.tunnels.values()) close('shutdown');
  for (const exchange of running) if (exchange.stage === 'waiting') exchange.end(new Problem('shutting_down'));
  if (!server.listening) return;
  const closed = once(server, 'close');
  server.close(); // and its idle connections
  // UNTIL Node 26 is the oldest: before, and on Deno 2.9, closeIdleConnections leaves connections without a first byte
  // (findings/node-close-keeps-silent-connection.sh).
  for (const [socket, { speaker }] of connections) if (!speaker?.bytesRead) socket.destroy();
  const { shutdown } = core.rules;
  // The status tells the client whether the backend may have the request.
  const endRunning = () =>
    running.forEach((each) => each.end(new Problem(each.stage === 'sent' ? 'backend_timeout' : 'shutting_down')));
  const timers = [setTimeout(endRunning, shutdown - Math.min(shutdown / 2, LAST_WORDS_MS))];
  await Promise.race([closed, new Promise((resolve) => timers.push(setTimeout(resolve, shutdown)))]);
  timers.forEach(clearTimeout);
  connections.forEach((_, socket) => socket.destroy());
  // The requests that still run have lost their client: see Exchange.leave. Each of them still gets its log line.
  for (const exchange of running) exchange.end(new Problem('client_left'));
  for (let turn = 0; running.length > 0 && turn < 100; turn++) await new Promise(setImmediate);
  core.log('info', 'stopped');
}

// #endregion

// #region PIPELINE

/**
 * The life of a request: each stage, and those that may follow it. `Exchange.stage` allows no other change.
 *
 *   received   the gateway checks the request; the backend has nothing
 *   waiting    for a slot, a backend that is down, or the handshake of a WebSocket: a refusal loses nothing
 *   sending    connecting, or sending a large body; the backend does not have the last byte
 *   sent       the backend has the last byte, and may have acted on it
 *   answered   the head of the response has arrived; a large body may still be in transit
 *   tunnel     an open WebSocket, kept in `core.tunnels`: no HTTP is written any more
 */
const NEXT_STAGES = {
  received: ['waiting', 'sending'],
  // To `sent`: an upload whose last byte has got its slot. To `answered`: a handshake, or a backend that answers early.
  waiting: ['sending', 'sent', 'answered'],
  // Back: no connection was made, so nothing was written; or the last byte of an upload, which the backend does not
  // have, waits for its slot.
  sending: ['waiting', 'sent', 'answered'],
  // Back: the handshake of a WebSocket whose route does not act, so a refusal loses nothing.
  sent: ['waiting', 'answered'],
  answered: ['tunnel'],
  tunnel: [],
} as const satisfies Record<string, readonly string[]>;
type Stage = keyof typeof NEXT_STAGES;

/**
 * One request with its response, passed to the functions of all stages as `exchange`.
 *
 * How it ends, in any stage but `tunnel`:
 *
 *   a step responds  `respond` writes the head; `endResponse` writes the rest after `handle`
 *   a step throws    `refuse` responds with the problem; if a response has begun, `refuse` destroys the connection
 *   end(problem)     something else ends it, in any stage: a timeout, a shutdown, a connection that fails, a token
 *                    that has ended. Destroys `underway`, the request to the backend, and wakes the current wait.
 *                    `throwIfEnded`, before and after each wait, throws the problem, so that the step stops and
 *                    `refuse` responds
 *   leave()          its client has disconnected: `end`, unless the backend may act on it. Then `hasLeft` is true, and
 *                    it continues without a client and keeps its slot, until the response's head or a timeout
 *   earlyResponse    the backend responded before it had the whole body: ends the upload, and nothing else
 *
 * `endedBy` is its first problem, which the log line gives. Where no response can be written, as on a connection that
 * was reset or has too many pipelined requests, the socket is destroyed. `respondUnparsed` answers what the HTTP parser
 * refuses.
 */
class Exchange {
  readonly core;
  /** The client's connection. */
  readonly connection;
  /** The rules when the request began. Of a reload, only what `endStale` ends affects it. */
  readonly rules;
  /** The gate and the slots of the backend in these rules. */
  readonly upstream;
  readonly req;
  readonly res;
  readonly requestId = randomUUID();
  /** When it began, by performance.now(), which never goes back. */
  readonly beganMs = performance.now();
  readonly client;

  // Set by the steps of the pipeline.
  /** What the client requests from the backend. */
  target: Target | undefined;
  credential: Credential | undefined;
  token: Token | undefined;
  /** Whether the gateway builds a message from the body, or from the query of a GET, and relays that instead. */
  isBuiltMessage = false;
  /** The call that it makes at signal-cli's daemon, once it was read. */
  call: Call | undefined;
  /** The id of that call. */
  callId: unknown;
  /** Whether a call of the daemon is relayed as it comes. */
  isUnreadCall = false;

  // Further fields of the log line.
  route: string | undefined;
  status = 0;
  bytesIn = 0;
  bytesOut = 0;

  // The progress of the exchange, and what ended it.
  #stage: Stage = 'received';
  hasLeft = false;
  endedBy: Problem | undefined;
  /** Set only by `transmit`. */
  earlyResponse: EarlyResponse | undefined;

  // What the exchange holds.
  /** Its place among the requests that want the backend. */
  readonly place: Place = { slot: undefined, slotWaitMs: 0, gateWaitMs: 0, readyMs: 0 };
  /** How many bytes of its body are in memory, to build a message from them. */
  heldBytes = 0;
  /** How many bytes of an incomplete large body the backend has. */
  uploadBytes = 0;
  /** Set once a field of its body was checked. */
  allowedBy: AllowedBy | undefined;
  /** When the head of the response arrived, by performance.now(). */
  answeredMs = 0;
  /**
   * The request to the backend, which ends with the exchange. Not a closure, whose context would keep a whole request
   * of node:http alive and take twice the memory.
   */
  underway: { destroy(): unknown } | undefined;
  /** The last part of the response's body. `endResponse` writes it, so that a short response takes one write. */
  lastPart: Uint8Array | string | undefined;
  #resume: (() => void) | undefined;

  constructor(core: Core, connection: Connection, res: ServerResponse) {
    this.core = core;
    this.connection = connection;
    this.rules = core.rules;
    this.upstream = core.upstream;
    this.req = res.req;
    this.res = res;
    this.client = clientAddress(res.req, core.rules.trustedProxies);
  }

  get stage(): Stage {
    return this.#stage;
  }

  /** @throws {Error} for a change that NEXT_STAGES does not have. The request has then ended as an internal error. */
  set stage(next: Stage) {
    const allowed: readonly Stage[] = NEXT_STAGES[this.#stage];
    if (next !== this.#stage && !allowed.includes(next)) {
      const error = new Error(`a request that is ${this.#stage} cannot be ${next}`);
      logInternalError(this.core, error, this.requestId);
      this.end(new Problem('internal_error'));
      throw error;
    }
    this.#stage = next;
  }

  /** Writes the head of the response. @param body if it is short. */
  respond(status: number, headers: OutgoingHttpHeaders | string[], body?: string, statusText?: string) {
    this.res.shouldKeepAlive = !isLastResponse(this);
    this.status = status;
    this.lastPart = body;
    if (body && this.req.method !== 'HEAD') this.bytesOut = Buffer.byteLength(body);
    // Never undefined: after a text that writeHead refused, the text of the next call would be the same.
    this.res.writeHead(status, statusText ?? http.STATUS_CODES[status], headers);
    // Read again, because writeHead sets it to false if the client still expects "100 Continue".
    if (!this.res.shouldKeepAlive) this.connection.isClosing = true;
  }

  /**
   * Called when the client has disconnected. The exchange ends at once, unless it is in stage `sent` with a slot: then
   * the backend may act on it, so the request keeps its slot until the head of the response, or until the slot is
   * overdue.
   */
  leave() {
    const { slot } = this.place;
    if (this.stage !== 'sent' || !slot || slot.isOverdue) return this.end(new Problem('client_left'));
    this.hasLeft = true;
    this.heldBytes = 0;
  }

  /** Ends the exchange early, in any stage. The first reason counts, but `client_left` if the client is gone. */
  end(reason: Problem) {
    if (this.endedBy) return;
    this.endedBy = this.hasLeft && reason.code !== 'client_left' ? new Problem('client_left') : reason;
    this.underway?.destroy();
    this.wake();
  }

  // An exchange waits for one thing at a time: a part of the client's body, a slot, the backend, or room to write. All
  // of its waits go through `waitUntil`, except that of `connect`, which has a time-out of its own.

  /**
   * Waits until `isOver` returns true, which `wake` rechecks.
   * @param timeoutMs Infinity for no timeout.
   * @param late the problem on a timeout, or its code.
   * @returns the time it took, in milliseconds.
   */
  async waitUntil(isOver: () => boolean, timeoutMs: number, late: ProblemCode | (() => Problem)) {
    if (this.#resume) throw new Error('an exchange waits for two things at once');
    const sinceMs = performance.now();
    let timer: NodeJS.Timeout | undefined;
    try {
      this.throwIfEnded();
      while (!isOver()) {
        const onTimeout = () => this.end(typeof late === 'string' ? new Problem(late, 'timeout') : late());
        if (timeoutMs < Infinity) timer ??= setTimeout(onTimeout, timeoutMs);
        await new Promise<void>((resolve) => (this.#resume = resolve));
        this.throwIfEnded();
      }
      return performance.now() - sinceMs;
    } finally {
      this.#resume = undefined;
      clearTimeout(timer);
    }
  }

  /** @throws {Problem | EarlyResponse} what ended the exchange, or its upload. */
  throwIfEnded() {
    const reason = this.endedBy ?? this.earlyResponse;
    if (reason) throw reason;
  }

  /** Rechecks the condition of the current wait. Used as a listener of streams. */
  readonly wake = () => this.#resume?.();

  /**
   * Waits before the request's last byte has reached the backend. A shutdown ends this wait at once. The caller sets
   * the next stage. The parameters and the result are those of `waitUntil`.
   */
  waitInterruptibly(...wait: Parameters<Exchange['waitUntil']>) {
    if (this.core.draining) this.end(new Problem('shutting_down'));
    this.stage = 'waiting';
    return this.waitUntil(...wait);
  }
}

/** Whether the connection closes after a response whose head is about to be written. */
function isLastResponse({ core, connection, req, res, isBuiltMessage, endedBy }: Exchange) {
  if (connection.isClosing || core.draining) return true;
  // Where the request ends is uncertain.
  if (endedBy?.code === 'bad_request') return true;
  // The client's `Connection` header, as node:http reads it.
  if (!res.shouldKeepAlive) return true;
  // The rest of the body is not read.
  if (hasBody(req) && !req.complete) return true;
  // node:http closes the connection after an HTTP/1.0 response of unknown length.
  if (req.httpVersion === '1.0') return true;
  // HTTP libraries retry a GET on a kept connection that broke, and this GET sends.
  if (isBuiltMessage && req.method === 'GET') return true;
  // UNTIL Node keeps the bytes after a declined upgrade: it loses them, and parses the next piece of the body as a
  // separate request (findings/README.md; test "a request hidden in the body").
  if (req.headers.upgrade !== undefined || req.method === 'CONNECT') return true;
  // node:http hides the fields beyond the limit but obeys them, so it is uncertain where the request ends.
  return isTooLong(req);
}

/**
 * Handles a request; a WebSocket is one without a body. The order of the steps is a security claim, so a comment at
 * each step gives the reason for its position.
 * @param isUpgrade whether the request opens a WebSocket.
 */
async function handle(exchange: Exchange, isUpgrade: boolean) {
  const { core, req, rules, client } = exchange;
  const body = new RequestBody(exchange);
  register(exchange);
  try {
    // First: a health check is answered even during a shutdown. It needs no token, so the response reveals nothing
    // about the backend, the version or the tokens.
    if ((req.method === 'GET' || req.method === 'HEAD') && /^\/healthz(?:\?|$)/.test(req.url ?? '')) {
      exchange.route = '/healthz';
      return respondText(exchange, 'ok\n', 'text/plain');
    }
    if (core.draining) throw new Problem('shutting_down');

    // Before the refusals below, because if a preflight fails, the browser sends no request and the page gets no
    // reason. A preflight of an origin that is not on `cors` is handled like any other request.
    if (respondToPreflight(exchange)) return;

    // Before all further steps, which check this one canonical form; the backend gets the same form.
    checkHead(req);
    const target = exchange.target = targetOf(req);
    exchange.route = target.route?.template ?? maskPath(target.segments);

    // Before the credential, so that an address which no token accepts costs neither a hash nor a byte of the body.
    const isAllowed = rules.isClosed || rules.all.some(({ clients }) => addressAllowed(clients, client));
    if (!isAllowed) throw clientNotAllowed('any token');

    // In the order header, path, query; if these have no credential and a token accepts `auth`, the head of the body.
    exchange.credential = findCredential(req, target) ?? await body.readCredential();

    // Before the endpoint, so that an unauthenticated client cannot learn which endpoints an allowlist opens.
    const token = exchange.token = identify(exchange);

    // The cross-site check comes after the token, because Basic is the only method that a browser adds automatically.
    // It comes before the endpoint, so that another site cannot learn which endpoints are allowed. The rate comes after
    // the endpoint, because a request that can never pass must not use up the rate of those that can.
    claimConnection(exchange);
    // Attack: begin a body with `auth` before the token is removed, and end it after that. Such a request had no token
    // yet when the reload looked for what must end, so it is looked at here.
    const refusal = refusalOfBrowser(rules, exchange) ?? refusalOfPlayer(exchange) ??
      refusalOfEndpoint(token, target, client) ?? (rules === core.rules ? undefined : refusalOfStale(exchange));
    if (refusal) throw refusal;
    takeRate(core, token);
    if (target.route === METRICS_ROUTE) return respondText(exchange, core.metrics.render(core), METRICS_TYPE);

    // The first 64 KiB of the body are checked before the backend is contacted; a larger body is checked further while
    // it streams. If the gateway builds a message from the body, that message is checked.
    exchange.isUnreadCall = allowsAllCalls(token, target);
    const isCall = target.route === RPC_ROUTE && !exchange.isUnreadCall;
    exchange.isBuiltMessage = isCall || (buildsMessages(token) && target.route === SEND_ROUTE);
    const content = isCall
      ? await makeCall(exchange, body)
      : exchange.isBuiltMessage
      ? await makeMessage(exchange, body)
      : await body.readChecked();

    // Only once: see `relay`. A message that was built opens no WebSocket.
    await relay(exchange, content, isUpgrade && !exchange.isBuiltMessage);
    // A handshake that the backend may act on is not refused while it waits, so the check and a shutdown come after it.
    if (exchange.stage === 'tunnel') endStale(core);
    if (core.draining) core.tunnels.get(exchange)?.('shutdown');
  } catch (error) {
    await refuse(exchange, error);
  } finally {
    core.running.splice(core.running.indexOf(exchange), 1);
    logExchange(exchange);
  }
}

/**
 * Adds the exchange to `running`. If the client disconnects, the exchange ends or continues without it (see `leave`).
 * After the response, the connection counts as unauthenticated again until its next valid token.
 */
function register(exchange: Exchange) {
  const { core: { connections, running }, connection, req, res } = exchange;
  running.push(exchange);
  const socket = transportSocket(req.socket);
  res.on('close', () => {
    if (!res.writableFinished) exchange.leave();
    if (!connection.token) return;
    connection.token = undefined;
    // Moved to the end: it authenticated most recently. Closed connections are not listed.
    if (connections.delete(socket)) connections.set(socket, connection);
  });
}

/**
 * Marks the connection as serving this token, so that it is not closed for a new one. If there are several tokens, each
 * is served on at most half of `limits.connections`, so that a stolen one cannot lock the others out.
 */
function claimConnection({ core: { connections, atStart }, rules, connection, token }: Exchange) {
  const limit = Math.max(1, atStart['limits.connections'] / 2);
  // With fewer connections than the limit, no token can exceed it.
  if (rules.tokens.size > 1 && connections.size > limit) {
    let count = 1;
    for (const other of connections.values()) {
      if (other.token === token!.name && ++count > limit) throw new Problem('busy', 'half_of_connections');
    }
  }
  connection.token = token!.name;
}

/** The transport socket of a connection. On Node and Deno the TLS socket wraps it. */
function transportSocket(socket: Socket & { _parent?: Socket | null }) {
  return socket._parent ?? socket;
}

function respondText(exchange: Exchange, text: string, type: string) {
  exchange.respond(200, {
    'Content-Type': type,
    'Content-Length': Buffer.byteLength(text),
    'X-Content-Type-Options': 'nosniff',
    'Cache-Control': 'no-store',
    ...ownHeaders(exchange),
  }, text);
}

/**
 * Responds with the problem. If a response has begun, the connection is destroyed instead, because a truncated body
 * must look truncated. An internal error is logged with its stack, which the client does not see.
 * @param thrown what a step threw.
 */
async function refuse(exchange: Exchange, thrown: unknown) {
  const { core, req, res, requestId } = exchange;
  // A small body usually arrives in one packet with the headers, and node:http has parsed it one turn later. Then the
  // connection can be kept. Waiting for a promise would be too early.
  if (!req.complete && hasBody(req)) await new Promise(setImmediate);
  const error = exchange.endedBy ?? thrown; // a client that disconnected meanwhile is logged as client_left
  const problem = error instanceof Problem ? error : new Problem('internal_error');
  exchange.end(problem);
  // Only in the log. For other problems of a response that has begun, the log keeps the status that the client got.
  if (problem.code === 'client_left') exchange.status = problem.status;
  if (problem !== error) logInternalError(core, error, requestId);
  if (res.headersSent) return void req.socket.destroy();
  // Not before the token is known, because every 401 is the same.
  const isCall = exchange.token !== undefined && exchange.target?.route === RPC_ROUTE;
  const { headers, body } = problemResponse(
    problem,
    requestId,
    req,
    isCall ? { id: exchange.callId ?? null } : undefined,
  );
  exchange.respond(problem.status, Object.assign(headers, ownHeaders(exchange)), body);
}

/** The longest `detail` of a log line, in UTF-16 units. */
const DETAIL_LIMIT = 300;

/**
 * Writes the log line of a request, and counts the request. The line has the route's template, never the path, which
 * contains phone numbers. `detail` never has a value of the body. Only two texts come from the client: the method,
 * which node:http restricts to known ones, and an origin that is not on `cors`.
 */
function logExchange(exchange: Exchange) {
  const { core, req, requestId, client, token, credential, route, status, endedBy, bytesIn, bytesOut } = exchange;
  const origin = endedBy?.reason === 'no_credential' ? unlistedOrigin(exchange) : undefined;
  // A health check, a preflight, or metrics, which Prometheus asks for all day.
  const isRoutine = status < 400 && (!token || exchange.target?.route === METRICS_ROUTE);
  const flood = isRoutine ? undefined : floodKeyOf(exchange);
  const reason = origin ? 'origin_not_listed' : endedBy?.reason;
  const { logged, detail, token: refused } = endedBy?.details ?? {};
  const isFlood = flood !== undefined && flood.lines.take(flood.key, LINE_RATE, core.elapsedMs()) > 0;
  const code = endedBy?.code;
  if (isFlood && token) {
    warnRarely(core, 'further refusals of a token are logged at debug level', { token: token.name, code });
  } else if (isFlood) {
    // For each code, so that a flood of requests without a token does not hide that somebody guesses tokens.
    warnRarely(core, 'further refusals of an address are logged at debug level', { client, code }, code);
  }
  core.log(isRoutine || isFlood ? 'debug' : levelFor(exchange), 'request', {
    requestId,
    client,
    method: req.method,
    route,
    call: exchange.call?.method,
    token: token?.name ?? refused,
    auth: credential?.method,
    status,
    code,
    reason,
    detail: (logged ?? CREDENTIAL_ADVICE[reason ?? ''] ?? detail ?? detailOfAnswer(exchange))?.slice(0, DETAIL_LIMIT),
    origin,
    bytesIn,
    bytesOut,
    ms: Math.round(performance.now() - exchange.beganMs),
  });
  core.metrics.countRequest(exchange);
}

/**
 * The log's sentence about an answer of the backend that its client may not have shown, or taken for the gateway's. The
 * backend's own words have phone numbers, so they are not logged.
 */
function detailOfAnswer({ endedBy, req, rules, status, target, token, bytesOut }: Exchange) {
  if (endedBy || !token) return undefined;
  if (status === 200 && target?.route?.group === 'receive' && isWebSocket(req)) {
    return "The backend's mode has no WebSocket: it answered with a poll, and the messages in it are gone.";
  }
  if (status < 400) return undefined;
  const who = `The backend ${status < 500 ? 'refused this' : 'failed'}, not the gateway`;
  const words = bytesOut > 0 ? 'the response has its words' : 'its own log says why';
  if (target?.route !== SEND_ROUTE) return `${who}: ${words}.`;
  if (status === 404) return `${who}: it has no such endpoint; signal-cli's daemon takes calls at /api/v1/rpc.`;
  const trial = token === rules.anonymous ? '' : `; "test ${token.name}" shows whether account and network are well`;
  return `${who}: ${words}${trial}.`;
}

/**
 * What a refusal is counted by, so that no more than 30 lines a minute are written of a token with the same code, or of
 * an address without one. A flood must not fill a small computer's disk, and harmless refusals must not hide what a
 * stolen token tries. Undefined for what always has its line.
 */
function floodKeyOf({ core, client, token, endedBy, status }: Exchange) {
  if (!token) return { lines: core.addressLines, key: failureKey(client) };
  const { code, status: worst = status } = endedBy ?? {}; // a response that had begun has its own status
  // Other problems from 500 on are failures, of the backend or of the gateway.
  const isRefusal = code === 'busy' || (endedBy !== undefined && worst < 500);
  return isRefusal ? { lines: core.tokenLines, key: `${token.name} ${code}` } : undefined;
}

/** The level of a request's line. */
function levelFor({ endedBy, status }: Exchange): Level {
  const worst = endedBy?.status ?? status;
  if (worst >= 500) return 'error';
  return worst >= 400 ? 'warn' : 'info';
}

/**
 * Ends what its token may no longer do: because it was removed or has expired, or would now be refused. Otherwise an open
 * WebSocket or a response that streams, which was checked when it began, could outlive its token by weeks.
 */
function endStale(core: Core) {
  for (const [exchange, close] of core.tunnels) if (refusalOfStale(exchange)) close(NO_LONGER_ALLOWED);
  for (const exchange of [...core.running]) {
    const refusal = isLeftToEnd(exchange) ? undefined : refusalOfStale(exchange);
    if (refusal) exchange.end(refusal);
  }
}

/** The reason in the log. */
const NO_LONGER_ALLOWED = 'no_longer_allowed';

/** The problem if the rules that are now in force refuse a request which earlier ones let in. */
function refusalOfStale(exchange: Exchange) {
  const { core, token: former, credential, target, client, allowedBy } = exchange;
  const { rules } = core;
  if (!former) return undefined; // not let in yet
  const token = tokenInForce(exchange);
  if (!token || (token !== rules.anonymous && faultOfToken(token, credential!, core.now()))) {
    return new Problem('unauthorized', NO_LONGER_ALLOWED);
  }
  const refusal = refusalOfBrowser(rules, exchange) ?? refusalOfEndpoint(token, target!, client) ??
    refusalOfStaleCall(token, exchange) ?? refusalOfNarrowed(token, allowedBy);
  return refusal && new Problem(refusal.code, NO_LONGER_ALLOWED, refusal.details);
}

/** The problem if an entry by which a body was allowed is no longer on the token's list. */
function refusalOfNarrowed({ senders, recipients }: Token, allowedBy: AllowedBy | undefined) {
  const isGone = (list: ReadonlySet<string>) => (entry: string) =>
    !list.has(entry) && !(entry.startsWith('group.') && list.has('group.*'));
  if (senders && [...allowedBy?.senders ?? []].some(isGone(senders))) return new Problem('sender_not_allowed');
  if (recipients && [...allowedBy?.recipients ?? []].some(isGone(recipients))) {
    return new Problem('recipient_not_allowed');
  }
  return undefined;
}

/**
 * Whether the backend may act on a request, or has done so and its answer has begun less than 30 s ago. The client of a
 * send must learn what became of it. A poll would wait for messages, and hand them over.
 */
function isLeftToEnd({ stage, target, answeredMs }: Exchange) {
  if (stage === 'sent') return target!.route?.group !== 'receive';
  return stage === 'answered' && target!.method !== 'GET' && performance.now() - answeredMs < LAST_ANSWER_MS;
}

// #endregion

// #region TARGET
// A proxy may normalise a path after the gateway has checked it (`..`, `%2e%2e`, `\`, TAB), and the backend decodes a
// path again (`:number` twice). So the gateway parses a target once, checks it, and builds a new one from checked
// parts.

/** A parsed and checked request target. The target for the backend is built only from its parts. */
type Target = ReturnType<typeof parseTarget>;

/** Whether a head has more fields than are accepted. `rawHeaders` alternates names and values. */
const isTooLong = ({ rawHeaders }: IncomingMessage) => rawHeaders.length > 2 * HEADERS_LIMIT;

/**
 * Checks what node:http does not: the HTTP version (Node and Deno accept others than 1.0 and 1.1), the Host header and
 * the number of header fields.
 * Two Host headers are refused: some programs use the first, others the last.
 */
function checkHead(req: IncomingMessage) {
  // First, because node:http hides the fields beyond the limit, and Host may be one of them.
  if (isTooLong(req)) throw new Problem('too_many_headers');
  if (!/^1\.[01]$/.test(req.httpVersion)) throw new Problem('bad_request', `http_${req.httpVersion}`);
  if (req.httpVersion === '1.1' && req.headers.host === undefined) throw new Problem('bad_request', 'no_host');
  if (headerValues(req.rawHeaders, 'host').length > 1) throw badTarget('the request has more than one Host header');
}

/** The targets that are the path of a route without parameters, as most requests have. No target is ever changed. */
const PLAIN_TARGETS = new Map<string, Target>();

/** The target of a request. A plain one is parsed only once. */
function targetOf({ method = '', url = '' }: IncomingMessage) {
  const key = `${method} ${url}`;
  const known = PLAIN_TARGETS.get(key);
  if (known) return known;
  const target = parseTarget(method, url);
  if (url === target.route?.template) PLAIN_TARGETS.set(key, target);
  return target;
}

/** Parses a raw request target. */
function parseTarget(method: string, raw: string) {
  // Origin-form only (RFC 9112 3.2.1), because the backend would honour the host of an absolute-form. "!" to
  // "~" are the printable characters of ASCII.
  if (!/^\/[!-~]*$/.test(raw) || /[#\\]/.test(raw)) {
    throw badTarget('it must be a path of printable ASCII without "\\" and "#"');
  }
  if (/%(?![0-9a-f]{2})/i.test(raw)) throw badTarget('a percent sign must be followed by two hexadecimal digits');
  const { written = '', query = '' } = /^(?<written>[^?]*)\??(?<query>.*)$/.exec(raw)!.groups!;

  // Attack: the backend treats /v1%2Fregister as /v1/register, and %252B as a plus. A proxy may decode differently.
  if (/%(?:2f|5c|2e|25)/i.test(written)) throw badTarget('its path contains an encoded slash, backslash, dot or "%"');
  // Empty segments are dropped, because a base URL that ends in "/" gives "//v1/about".
  const segments = written.split('/').filter(Boolean).map((segment) => decodePart(segment));
  const authSegment = onlyOne(segments.filter((segment) => segment.startsWith('@auth=')));
  if (authSegment !== undefined) {
    if (segments[0] !== authSegment) throw badTarget('the "@auth=" segment must come first');
    segments.shift();
  }
  const isSendByGet = method === 'GET' && partsMatch(SEND_ROUTE.parts, segments);
  // A send by GET has the row of POST /v2/send.
  const route = ROUTES.find((candidate) =>
    (candidate.method === method || isSendByGet) && partsMatch(candidate.parts, segments)
  );
  for (const [i, segment] of segments.entries()) checkSegment(segment, route?.parts[i]);
  const { parameters, ...others } = parseQuery(query, isSendByGet);
  if (declares(route, 'query-account')) {
    for (const parameter of parameters) parameter[1] = parameter[1].replace(/^ (?=\d)/, '+'); // a plus of a phone number
    // Written anew, because signal-cli does not read a query as the backend does.
    others.query = new URLSearchParams(parameters).toString();
  }
  return {
    method,
    /** The segments of the path, decoded, without empty ones and without the `@auth` segment. */
    segments,
    /** For the backend, built from the checked segments; the path as the client wrote it is not used. */
    path: segments.map((segment) => `/${encodeSegment(segment)}`).join('') || '/',
    /** Undefined if the backend has no such route. */
    route,
    /** No group and no wildcard allows a send by GET, because following a link would send a message. */
    isSendByGet,
    /** The secret in its `@auth` segment. */
    pathSecret: authSegment?.slice('@auth='.length),
    parameters,
    ...others,
  } as const;
}

/**
 * Encodes a segment. encodeURI does not encode the characters that RFC 3986 3.3 allows in one: "+49…" stays as clients
 * write it. Nor does it encode `/`, `?` and `#`, which would end the segment.
 */
function encodeSegment(segment: string) {
  return encodeURI(segment).replace(/[/?#]/g, encodeURIComponent);
}

/**
 * Parses a query like the backend, which decodes `+` as a space.
 * @param isOfSend whether a parameter `message` may contain several lines.
 */
function parseQuery(query: string, isOfSend: boolean) {
  const kept: string[] = [];
  const parameters: [string, string][] = [];
  const secrets: string[] = [];
  // A URL parser in a proxy would encode quotes and angle brackets (WHATWG URL 1.3), and old programs take ";" for "&".
  // All are encoded here, so that the backend gets exactly the query that was checked. encodeURIComponent leaves the
  // apostrophe.
  const encoded = query.replace(/["<>;]/g, encodeURIComponent).replaceAll("'", '%27');
  for (const pair of encoded.split('&').filter(Boolean)) {
    const { left = '', right = '' } = /^(?<left>[^=]*)=?(?<right>.*)$/.exec(pair.replaceAll('+', ' '))!.groups!;
    const name = decodePart(left);
    const value = decodePart(right, isOfSend && name === 'message');
    if (name === '@auth') secrets.push(value); // removed, whichever methods are accepted
    else {
      kept.push(pair);
      parameters.push([name, value]);
    }
  }
  return {
    /** Without its `@auth` parameter, still encoded. */
    query: kept.join('&'),
    /** The parameters of that query, decoded. */
    parameters,
    /** The secret in its `@auth` parameter. */
    querySecret: onlyOne(secrets),
  };
}

/**
 * Checks a decoded segment of a path.
 * @param part the route's part that the segment matches, if there is a route.
 */
function checkSegment(segment: string, part = '') {
  const mistake = mistakeInParameter(part, segment);
  if (mistake) throw badTarget(mistake);
  // Attack: /v2/../v1/register. Many proxies resolve dot segments, which would make this path account setup.
  if (segment === '.' || segment === '..') throw badTarget('dot segments are not resolved');
  // Attack: /v1/groups/--username=…. Attachments are exempt: their ids are random, and one in 64 begins with "-".
  if (segment.startsWith('-') && part !== ':attachment') {
    throw badTarget('a path segment may not begin with "-": it would become an option of signal-cli');
  }
}

/**
 * Decodes a segment, or a name or value of the query, once. A control character is refused: NUL ends an argument, and a
 * line feed ends a line of a log.
 * @param isText whether line feeds and tabs are allowed.
 */
function decodePart(text: string, isText = false) {
  let decoded: string;
  try {
    decoded = decodeURIComponent(text);
  } catch {
    throw badTarget('its percent-encoded bytes are not UTF-8');
  }
  const forbidden = isText ? /(?![\n\t])\p{Cc}/u : /\p{Cc}/u;
  if (forbidden.test(decoded)) throw badTarget('it contains an encoded control character');
  return decoded;
}

/** The literal segments of all routes. The log may show them in any path. */
const LITERALS = new Set(ROUTES.flatMap(({ parts }) => parts.filter(isLiteral)));

/** A path for the log, with `*` for segments that may be a phone number or a token. No route has over 8 segments. */
function maskPath(segments: readonly string[]) {
  return `/${segments.slice(0, 8).map((segment) => LITERALS.has(segment) ? segment : '*').join('/')}`;
}

// #endregion

// #region CREDENTIALS

/** The credential of a request, valid or not. */
interface Credential {
  readonly method: AuthMethod;
  /**
   * Undefined if the user name is not `api`, or the scheme is neither Basic nor Bearer. Such a credential is wrong, not
   * absent.
   */
  readonly secret: string | undefined;
  /** The password of another user, which is never accepted. It tells the log whose token it is. */
  readonly password?: string | undefined;
}

/**
 * A token with all its settings, including inherited ones. Only the digest of its secret is kept. `expires` is Infinity
 * for never, and is checked at every request, so no reload is needed. Here the defaults and the top level have been
 * applied: a list that is undefined means no limit. An empty one cannot occur.
 */
type Token =
  & Omit<TokenSettings, 'senders' | 'recipients'>
  & Pick<TokenFields, 'methods' | 'allow' | 'expires'>
  & { readonly [List in 'senders' | 'recipients']: ReadonlySet<string> | undefined };

/**
 * Finds the first credential outside the body, in the order header, path, query. Only this credential is checked. If it
 * is wrong, the next method is not tried, because the log line names one method and a guess by another would go
 * unnoticed.
 */
function findCredential(
  { rawHeaders }: IncomingMessage,
  { pathSecret, querySecret }: Target,
): Credential | undefined {
  const header = onlyOne(headerValues(rawHeaders, 'authorization').flatMap((value) => parseAuthorization(value) ?? []));
  if (header) return header;
  if (pathSecret !== undefined) return { method: 'path', secret: pathSecret };
  if (querySecret !== undefined) return { method: 'query', secret: querySecret };
  return undefined; // `auth` in the body is looked for later, by RequestBody
}

/** The only secret in one place, if any. Two are refused, because they are ambiguous. */
function onlyOne<T>(secrets: T[]) {
  if (secrets.length > 1) throw new Problem('bad_credential');
  return secrets[0];
}

/**
 * Parses an Authorization header (RFC 6750 2.1, RFC 7617 2). The scheme is case-insensitive (RFC 9110 11.1). Node's
 * lenient decoding of Base64 is harmless, because the result is only compared by its digest. White space is only SP and
 * HTAB (RFC 9110 5.6.3): `\s` would also match A0, the last byte of "à" in UTF-8, and truncate a secret.
 * @returns undefined for a header without a credential: an empty one, as n8n's credential test sends it if it has no
 * token, or Basic with an empty user and an empty password, as wget2 sends it.
 */
function parseAuthorization(value: string): Credential | undefined {
  const { scheme = '', credentials = '' } = /^[ \t]*(?<scheme>[^ \t]*)[ \t]*(?<credentials>.*[^ \t])?/s.exec(value)!
    .groups!;
  if (scheme === '') return undefined;
  if (scheme.toLowerCase() === 'basic') {
    // The user name is fixed, so that it is not mistaken for the token's name.
    const { user, password } =
      /^(?<user>[^:]*):(?<password>.*)$/s.exec(Buffer.from(credentials, 'base64').toString())?.groups ??
        {};
    if (user === '' && password === '') return undefined;
    return user === 'api' ? { method: 'basic', secret: password } : { method: 'basic', secret: undefined, password };
  }
  // node:http decodes headers as Latin-1; a secret is UTF-8.
  const isBearer = scheme.toLowerCase() === 'bearer';
  return { method: 'bearer', secret: isBearer ? Buffer.from(credentials, 'latin1').toString() : undefined };
}

/**
 * Finds the token of a request. Every 401 looks the same from outside; the log has the reason.
 *
 * The secret's digest is looked up in a map. The time of the lookup depends on the SHA-256 of the secret, which does
 * not reveal how much of the secret was right. Wrong credentials from an address never block a valid one, so no client
 * can lock others out.
 */
function identify({ core, rules, credential, client }: Exchange) {
  if (rules.anonymous) return rules.anonymous;
  if (!credential) throw new Problem('unauthorized', 'no_credential');
  const token = rules.tokens.get(digestOf(credential.secret ?? '')); // no token has the digest of ''
  const reason = token || !isDigest(rules, credential) ? faultOfToken(token, credential, core.now()) : 'digest';
  if (token && !reason) return token;
  const retryAfterMs = core.failureLimiter.take(failureKey(client), FAILURE_RATE, core.elapsedMs());
  const { password } = credential;
  const owner = password === undefined ? token : rules.tokens.get(digestOf(password));
  throw new Problem(retryAfterMs > 0 ? 'too_many_failures' : 'unauthorized', reason, {
    retryAfterMs,
    token: owner?.name,
    logged: token && (reason === 'expired_token' ? tellExpiry(token) : tellMethods(token, credential)),
  });
}

/** Why a token is refused that has expired. */
function tellExpiry({ expires }: Token) {
  const [day] = new Date(expires).toISOString().split('T');
  return `The token expired on ${day}: give it a later date in "expires", or make a new one.`;
}

/** Why a token is refused that stands in a place where it is not accepted. */
function tellMethods({ methods }: Token, { method }: Credential) {
  const accepted = [...methods].join(', ');
  return `The token accepts ${accepted}; the client used ${method}: add that to "methods", or put the token elsewhere.`;
}

/** What to do about a credential, by the reason of the 401. For the log only: to the client every 401 looks the same. */
const CREDENTIAL_ADVICE: NodeJS.Dict<string> = {
  no_credential:
    'The request has no token where one is looked for: in the header Authorization, or, if "methods" has body, path or ' +
    'query, in the field "auth" of a JSON body, or as /@auth=TOKEN/ or ?@auth=TOKEN in the URL. A program that drops ' +
    '"api:TOKEN@" from its URL needs one of these.',
  origin_not_listed: 'A page of this origin may use the gateway once "cors" has the origin.',
  unknown_token:
    'No token has this secret. Often it is empty, or something was copied with it: a quote, a space, "api:", "NAME=", ' +
    'or, after ?@auth=, a path.',
  digest: 'This is the digest of a token, which is for the gateway; give the client the secret.',
  wrong_user: 'With Basic, the user is always "api", whatever the token is called; the token is the password. ' +
    'Or a proxy passes its own login on.',
  unknown_scheme: 'Write "Bearer" and a space before the token.',
};

/**
 * Whether a credential is the digest of a token, as the file has it, instead of the token's secret. People who have
 * both often copy the wrong one.
 */
function isDigest({ tokens }: Rules, { secret = '' }: Credential) {
  return tokens.has(secret.replace(/^sha256:/i, '').toLowerCase());
}

/** The reason to refuse the token of a credential, if any. The same rule for a request and for what runs. */
function faultOfToken(token: Token | undefined, { method, secret }: Credential, nowMs: number) {
  if (token && token.expires <= nowMs) return 'expired_token';
  if (token) return token.methods.has(method) ? undefined : 'method_not_accepted';
  if (secret !== undefined) return 'unknown_token';
  return method === 'basic' ? 'wrong_user' : 'unknown_scheme';
}

/** The key for counting failures: the IPv4 address, or the /64 of an IPv6 address, which one host may own. */
function failureKey(address: string) {
  if (isIP(address) !== 6) return address;
  const parts = address.split(':').filter(Boolean).length;
  return address.replace('::', `:${'0:'.repeat(8 - parts)}`).split(':').filter(Boolean).slice(0, 4).join(':');
}

// #endregion

// #region ORIGINS
// Requests that a browser sends for a page. Pages of the origins on `cors` may use the gateway. For a page of any other
// origin, whatever the browser adds automatically must not count as a credential.

/**
 * The origin of a request, if it is not on `cors`. The log shows it, so that the owner of a failing page can copy it to
 * `cors`. Undefined for a value that no browser sends, because that may be a secret. After "://", the pattern matches
 * the printable characters of ASCII except "/", "?" and "@".
 */
function unlistedOrigin({ req, rules }: Exchange) {
  const { origin = '' } = req.headers;
  return rules.cors.has(origin) ? undefined : /^(?:null|[\w+.-]+:\/\/[!-.0->A-~]+)$/.exec(origin)?.[0].slice(0, 100);
}

/**
 * The request headers that an origin on `cors` may send. A browser asks for `accept` and the languages only if their
 * values are unusual (Fetch 2.2.2).
 */
const CORS_HEADERS = ['authorization', 'content-type', 'accept', 'accept-language', 'content-language', 'x-request-id'];

/** How long a browser may remember a preflight. The requests that follow are still checked. */
const PREFLIGHT_MS = 60_000;

/**
 * Answers the preflight of an origin on `cors`. The response is the same for every target, even a malformed one, so
 * that an unauthenticated client cannot learn which endpoints an allowlist opens.
 * @returns whether the request was such a preflight.
 */
function respondToPreflight(exchange: Exchange) {
  const { req: { method, headers }, rules } = exchange;
  const { 'access-control-request-method': wanted, 'access-control-request-headers': names = '', origin = '' } =
    headers;
  if (method !== 'OPTIONS' || wanted === undefined || !rules.cors.has(origin)) return false;
  const asked = names.toLowerCase().split(/[ \t,]+/);
  exchange.respond(204, {
    ...ownHeaders(exchange),
    'Access-Control-Allow-Methods': HTTP_METHODS.join(', '),
    'Access-Control-Allow-Headers': CORS_HEADERS.filter((name) => asked.includes(name)).join(', '),
    'Access-Control-Max-Age': PREFLIGHT_MS / 1000, // in seconds
  });
  return true;
}

/**
 * Refuses a browser if it adds automatically all that a request needs: a Basic password or, without tokens, nothing but
 * running on this machine. A page can use the other methods only if it knows the token.
 *
 * The browser's own pages are no exception: any page can have an address prefetched, or redirect a typed one, which
 * looks like a person. A page of the gateway's own could be an attachment.
 */
function refusalOfBrowser(rules: Rules, { req, credential }: Exchange) {
  const { anonymous, cors } = rules;
  const { headers, socket } = req;
  if (!anonymous && credential?.method !== 'basic') return undefined;
  // A trusted proxy answers for the name by which it is reached.
  const isProxied = isTrustedProxy(rules, socket);
  // Attack: in Firefox and Safari, a script of a rebound name can choose its User-Agent.
  if (anonymous && !isProxied && !isLocalName(headers.host ?? '', cors)) {
    return withDetail(
      'cross_site',
      'Without tokens, connect to the gateway by an IP address or a local name, not a public DNS name.',
      'public_host',
    );
  }
  if (cors.has(headers.origin ?? '')) return undefined;
  return isFromBrowser(req) ? new Problem('cross_site') : undefined;
}

/**
 * Refuses a media player, with every method, unless it plays an attachment or an avatar. It comes after
 * `refusalOfBrowser`: without the token, a page must get the same response whatever the path.
 *
 * Attack: a playlist that a stranger sent as an attachment contains the URL of a GET that acts. If a page plays the
 * playlist using the path method, Chromium fetches that URL with the token. Media elements always send Range, and only
 * the files that they play need it.
 */
function refusalOfPlayer({ req, target }: Exchange) {
  if (req.headers.range === undefined) return undefined;
  // An unknown path may act, whatever its last segment: a plugin may be called "avatar".
  if (isKnown(target!.route) && isStrangersFile(target!)) return undefined;
  return withDetail(
    'cross_site',
    'Only attachments and avatars can be requested with a Range header, as media players send.',
    'range',
  );
}

/**
 * Whether a host name cannot be in public DNS, or is that of an origin on `cors`. Attack (DNS rebinding): the owner of
 * a public name points it to this machine, so a browser treats the gateway as part of that owner's site.
 */
function isLocalName(host: string, cors: ReadonlySet<string>) {
  const name = host.toLowerCase().replace(/:\d+$/, '').replace(/^\[(.*)\]$/, '$1');
  return isIP(name) !== 0 ||
    /^[^.]*$|\.(?:localhost|local|lan|home|localdomain|intranet|internal|home\.arpa|test)$/.test(name) ||
    [...cors].some((origin) => new URL(origin).hostname === name);
}

// #endregion

// #region ENDPOINTS

/**
 * The problem if a token may not make a request. The client's address is checked first, then the allowlist. Then some
 * endpoints on the allowlist are closed to a token with `senders` or `recipients`. No later rule reopens what an
 * earlier one refuses. What runs is checked again by `endStale`.
 * @param client the client's address, which `--check` does not have.
 */
function refusalOfEndpoint(token: Token, target: Target, client?: string) {
  const { senders, recipients } = token;
  const { method, route, segments } = target;
  if (client !== undefined && !addressAllowed(token.clients, client)) return clientNotAllowed('this token');
  const grant = findGrant(token, target);
  if (!grant) return refusalOfRoute(token, target);

  if (!isKnown(route) && (senders || recipients)) {
    return withDetail(
      'endpoint_not_allowed',
      'The gateway does not know this endpoint, so only a token without "senders", "recipients" and "defaults" may use it.',
      'unknown_route_for_confined_token',
    );
  }
  const parameter = (name: string) => segments[route?.parts.indexOf(name) ?? -1];
  const named = declares(route, 'query-account') ? target.parameters.filter(([name]) => name === 'account') : [];
  if (named.length > 1) return badField('account', 'may be given only once');
  const account = parameter(':number') ?? named[0]?.[1];
  if (senders && account !== undefined && !senders.has(account)) return new Problem('sender_not_allowed');
  // A route without an account shows the data of all accounts, such as all attachments, so a pattern must name it.
  const showsAll = account === undefined && !declares(route, 'no-account');
  if (senders && showsAll && declares(route, 'query-account')) {
    return badField('account', 'must be in the query, because this token may not use all accounts');
  }
  if (senders && showsAll && grant !== 'explicit') {
    const why = 'shows the data of all accounts, and this token may not use all of them';
    return mustBeNamed(route!, why, 'route_without_account');
  }
  // A new member, or a link to join, opens the group to persons who are not among the recipients, so a pattern must
  // name the route.
  const isGroupChange = method !== 'GET' && !declares(route, 'same-members');
  if (recipients && isGroupChange && grant !== 'explicit') {
    const why = 'can let others into a group, and this token may not send to everyone';
    return mustBeNamed(route!, why, 'group_change_not_named');
  }

  for (const [name, value] of target.parameters) {
    if (route === SEND_ROUTE && buildsMessages(token)) break; // its query goes into the message, or is dropped
    // The `numbers` of a search become arguments of signal-cli, like numbers in a body.
    const mistake = name === 'numbers' && mistakeInArgument(value);
    const refusal = mistake ? badField(name, mistake) : refusalOfUnknown(token, route, name);
    if (refusal) return refusal;
  }
  // A token that may not send to a group may not change it.
  const group = parameter(':groupid');
  return group === undefined || method === 'GET' ? undefined : refusalOfRecipient(token, group);
}

/** Whether the gateway knows which account and recipients a route uses. It does not for those of plugins. */
function isKnown(route: Route | undefined): route is Route {
  return route !== undefined && route.parts.at(-1) !== '*';
}

function mustBeNamed(route: Route, why: string, reason: string) {
  const sentence = `This endpoint ${why}: only "${patternOf(route)}" in its "allow" opens it.`;
  return withDetail('endpoint_not_allowed', sentence, reason);
}

/**
 * Whether a token's allowlist opens a target: `explicit` if a pattern spells out its first two segments (three of the daemon), and `implied`
 * if only a group or a wildcard opens it. For /v1/search/+4915, `GET /v1/search/*` is explicit, and `GET /v1/*` is not.
 */
function findGrant(token: Token, target: Target) {
  const { written, groups, patterns } = token.allow;
  const { segments, route } = target;
  // Only its own pattern opens a send by GET, because `GET *` is meant to allow reads. The same holds for the metrics.
  if (target.isSendByGet) return buildsMessages(token) && written.includes('GET /v2/send') ? 'explicit' : undefined;
  if (route === METRICS_ROUTE) {
    return written.some(opensMetrics) ? 'explicit' : undefined;
  }
  const matches = patterns.filter((pattern) => patternMatches(pattern, target));
  const spelled = prefixOf(segments) === prefixOf(RPC_ROUTE.parts) ? 3 : 2; // the daemon has all in one folder
  if (matches.some(({ parts }) => parts.slice(0, spelled).every(isLiteral))) return 'explicit';
  if (route && groups.has(route.group)) return 'implied';
  if (route === RPC_ROUTE && CALLS.some(({ group }) => groups.has(group))) return 'implied';
  if (SETUP_PREFIXES.has(prefixOf(segments))) return undefined; // no wildcard opens setup
  return matches.length > 0 ? 'implied' : undefined;
}

/** Whether a word of an allowlist is for the metrics, which no other word opens. */
function opensMetrics(word: string) {
  return word === 'metrics' || word === patternOf(METRICS_ROUTE);
}

/**
 * Whether a pattern of an allowlist matches a target. Its parameter matches only a parameter of the route:
 * `DELETE /v1/devices/:number/:deviceId` must not open …/local-data.
 */
function patternMatches({ method, parts }: Pattern, { method: wanted, segments, route }: Target) {
  const isMethod = method === '*' ? (HTTP_METHODS as readonly string[]).includes(wanted) : method === wanted;
  if (!isMethod || !partsMatch(parts, segments)) return false;
  return parts.every((part, i) => {
    if (!part.startsWith(':')) return true;
    const ofRoute = route?.parts[i];
    if (ofRoute !== undefined && isLiteral(ofRoute)) return false;
    return !mistakeInParameter(part, segments[i]!);
  });
}

/** The pattern that names a route in an allowlist. */
function patternOf({ method, template }: Route) {
  return `${method} ${template}`;
}

/** A further sentence of a 405 for GET /v2/send. */
const SEND_BY_GET = ' To send by GET, a token needs "GET /v2/send" in its "allow", and "defaults" or "message".';

/** The sentence of a 404 if a client's address has a wrong path. */
const PATH_HINTS: Hints = [
  [/^\/$/, 'The address has no path; to send a message, POST to /v2/send.'],
  [/\/v2\/send\/.*v2\/send$/, 'The address has /v2/send twice; remove one of them.'],
  [/\/v2\/send\/v[12]\/./, 'This client appends the path itself: give it the address without /v2/send.'],
  [/.\/v2\/send$/, 'The address has a path before /v2/send; remove it.'],
  [/^\/v1\/(?:receive|groups|contacts|identities)$/, 'The account follows, as in /v1/receive/NUMBER.'],
];

/** The problem for a target that is not on an allowlist. Setup comes first, so that it does not reveal its routes. */
function refusalOfRoute({ allow }: Token, { method, route, segments, isSendByGet }: Target) {
  if (route === RPC_ROUTE) {
    return withDetail(
      'endpoint_not_allowed',
      `This token may not call signal-cli's daemon; a word such as "send" in its "allow" opens the methods of its group.`,
    );
  }
  const prefix = prefixOf(segments);
  // Whoever writes /api before each path should read that, although the daemon's calls lie there.
  const isBelowSetup = SETUP_PREFIXES.has(prefix) && prefix !== prefixOf(RPC_ROUTE.parts);
  const isSetup = route ? route.group === 'setup' : isBelowSetup;
  if (isSetup && !allow.groups.has('setup')) {
    // Never the word "setup": it opens far more than this client needs.
    const advice = `, or name it in "allow": "${route && patternOf(route)}".`;
    return new Problem('setup_blocked', undefined, {
      logged: route && PROBLEMS.setup_blocked[1].replace(/\.$/, advice),
    });
  }
  if (route && !isSendByGet) {
    return withDetail(
      'endpoint_not_allowed',
      `This token may not use this endpoint; the word "${route.group}" in its "allow" opens it.`,
    );
  }
  const routes = ROUTES.filter(({ parts }) => partsMatch(parts, segments));
  if (routes.length === 0) {
    const sentence = hintFor(PATH_HINTS, `/${segments.join('/')}`);
    return sentence ? withDetail('unknown_endpoint', sentence) : new Problem('unknown_endpoint');
  }
  const methods = [...new Set(routes.map(({ method }) => method))];
  const asked = isSendByGet ? `GET.${SEND_BY_GET}` : `${method}.`;
  const detail = `This endpoint accepts ${methods.join(', ')}, but not ${asked}`;
  return new Problem('method_not_allowed', undefined, { detail, allow: methods });
}

// #endregion

// #region RATE

/**
 * How many keys a rate limiter keeps. The least recently used is dropped first, so an attacker with a million addresses
 * mostly displaces their own keys.
 */
const RATE_KEYS_LIMIT = 10_000;

/**
 * A token bucket per key, by the generic cell rate algorithm. A bucket starts with `count` and regains one every
 * `perMs / count`. It is stored as one number: the time at which it will be full again.
 */
class RateLimiter {
  readonly #fullAtMs = new Map<string, number>();

  /**
   * Takes one from the key's bucket. Returns 0, or the milliseconds until the bucket has one again.
   * @param nowMs a time that is never set back.
   */
  take(key: string, { count, perMs }: { count: number; perMs: number }, nowMs: number) {
    // A bucket is full in `perMs` at the latest. After a reload with a shorter `perMs` the stored time may be further in
    // the future, and would lock the key out until then, so it is corrected here.
    const times = this.#fullAtMs;
    const fullAtMs = Math.min(Math.max(nowMs, times.get(key) ?? 0), nowMs + perMs);
    const nextMs = fullAtMs + perMs / count;
    const waitMs = nextMs - nowMs - perMs;
    const isTaken = waitMs <= 0.001; // the sum of fractions may be slightly too large
    times.delete(key); // reinserted below, so that the map is in the order of use
    times.set(key, isTaken ? nextMs : fullAtMs);
    if (times.size > RATE_KEYS_LIMIT) times.delete(times.keys().next().value!);
    return isTaken ? 0 : waitMs;
  }
}

/** Counts a request against its token's rate, even if it fails later. */
function takeRate(core: Core, token: Token) {
  const retryAfterMs = token.rate ? core.rateLimiter.take(token.name, token.rate, core.elapsedMs()) : 0;
  if (retryAfterMs <= 0) return;
  const logged = `The rate ${token.rate!.written} is used up; again in ${Math.ceil(retryAfterMs / 1000)} s.`;
  throw new Problem('rate_limited', undefined, { retryAfterMs, logged });
}

// #endregion

// #region METRICS
// The gateway's own metrics, in Prometheus' text format 0.0.4, with all state that only they need. Clients cannot add
// series without limit: a route is one of the table or `other`, a token one of the configuration. So no label contains
// a phone number, a secret, or a character that needs escaping.

/** The Content-Type of Prometheus' text format. */
const METRICS_TYPE = 'text/plain; version=0.0.4; charset=utf-8';

/** The upper bounds, in seconds, of the histogram of sends. */
const SEND_BUCKETS = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 150];

/** What is counted for `GET /metrics`. A reload keeps it. */
class Metrics {
  internalErrors = 0;
  droppedLines = 0;
  /** Values by series, which is written as a name with labels, as in the output. */
  readonly #requests = new Map<string, number>();
  /** The same, as times of `core.elapsedMs`. */
  readonly #lastSent = new Map<string, number>();
  /** How many sends took at most each time of SEND_BUCKETS, and how many there were. */
  readonly #sends = SEND_BUCKETS.map(() => 0);
  #sendCount = 0;
  #sendSeconds = 0;

  /** Counts a request by the status that its client got. */
  countRequest({ req, target, token, route, status }: Exchange) {
    const template = target ? target.route?.template : route;
    const labels = `,route="${template ? `${req.method} ${template}` : 'other'}",status="${status}"`;
    const series = seriesIn(this.#requests, 'requests_total', token, labels);
    this.#requests.set(series, (this.#requests.get(series) ?? 0) + 1);
  }

  /** Counts a send that the backend answered with this status, even if its client has disconnected. */
  countSend({ core, beganMs, token }: Exchange, status: number) {
    const seconds = (performance.now() - beganMs) / 1000;
    SEND_BUCKETS.forEach((limit, i) => seconds <= limit && this.#sends[i]!++);
    this.#sendCount++;
    this.#sendSeconds += seconds;
    if (status < 200 || status > 299) return;
    this.#lastSent.set(seriesIn(this.#lastSent, 'last_sent_timestamp_seconds', token), core.elapsedMs());
  }

  /** Writes all series. A test compares their names with docs/operating.md. */
  render({ startedMs, dateOf, connections, running, upstream: { gate, isAwaited } }: Core) {
    const linesOf = (values: Map<string, number>, read = (value: number) => value) =>
      Array.from(values, ([series, value]) => `${series} ${read(value)}`).join('\n');
    const count = (test: (exchange: Exchange) => boolean) => running.filter(test).length;
    const isAtGate = (exchange: Exchange) => exchange.upstream.gate.isAwaitedBy(exchange);
    const buckets = SEND_BUCKETS.map((limit, i) =>
      `signal_gateway_send_seconds_bucket{le="${limit}"} ${this.#sends[i]}`
    );
    return `# HELP signal_gateway_requests_total Requests by status, without those that have no request line (408, 400).
# TYPE signal_gateway_requests_total counter
${linesOf(this.#requests)}
# HELP signal_gateway_send_seconds Duration of the sends that the backend answered, including the client's upload.
# TYPE signal_gateway_send_seconds histogram
${buckets.join('\n')}
signal_gateway_send_seconds_bucket{le="+Inf"} ${this.#sendCount}
signal_gateway_send_seconds_sum ${this.#sendSeconds}
signal_gateway_send_seconds_count ${this.#sendCount}
# HELP signal_gateway_requests_waiting Requests that wait for a slot, or for a backend that is down.
# TYPE signal_gateway_requests_waiting gauge
signal_gateway_requests_waiting{for="slot"} ${
      count((each) => each.stage === 'waiting' && needsSlot(each) && !isAtGate(each))
    }
signal_gateway_requests_waiting{for="backend"} ${count(isAtGate)}
# HELP signal_gateway_slots_overdue Slots whose request has had no answer from the backend for 30 s.
# TYPE signal_gateway_slots_overdue gauge
signal_gateway_slots_overdue ${count(({ place }) => place.slot?.isOverdue === true)}
# HELP signal_gateway_backend_up Whether the backend can be connected to; at start 0 until it has answered.
# TYPE signal_gateway_backend_up gauge
signal_gateway_backend_up ${Number(!gate.isDown && !isAwaited)}
# HELP signal_gateway_connections Open client connections.
# TYPE signal_gateway_connections gauge
signal_gateway_connections ${connections.size}
# HELP signal_gateway_last_sent_timestamp_seconds When the backend last accepted a message of the token.
# TYPE signal_gateway_last_sent_timestamp_seconds gauge
${linesOf(this.#lastSent, (atMs) => dateOf(atMs) / 1000)}
# HELP signal_gateway_log_lines_dropped_total Log lines that were dropped because nothing took them.
# TYPE signal_gateway_log_lines_dropped_total counter
signal_gateway_log_lines_dropped_total ${this.droppedLines}
# HELP signal_gateway_internal_errors_total Bugs of the gateway itself, logged as "internal error".
# TYPE signal_gateway_internal_errors_total counter
signal_gateway_internal_errors_total ${this.internalErrors}
# HELP signal_gateway_info The gateway's version.
# TYPE signal_gateway_info gauge
signal_gateway_info{version="${VERSION}"} 1
# HELP process_start_time_seconds When the gateway started.
# TYPE process_start_time_seconds gauge
process_start_time_seconds ${dateOf(startedMs) / 1000}
`;
  }
}

/** The maximum number of request series in the metrics; beyond it, tokens are counted together. */
const SERIES_LIMIT = 10_000;

/** The series of a token. Beyond the limit, new series combine all tokens. */
function seriesIn(map: Map<string, number>, name: string, token: Token | undefined, labels = '') {
  const seriesOf = (owner: string) => `signal_gateway_${name}{token="${owner}"${labels}}`;
  const series = seriesOf(token?.name ?? '');
  return map.size < SERIES_LIMIT || map.has(series) ? series : seriesOf('_other');
}

// #endregion

// #region REQUEST BODY
// A body is read in two steps. The first is its head, the first 64 KiB, which may contain the credential and is checked
// as a whole before the backend is contacted. The rest is checked while it streams. Of an unauthenticated client's
// body, only the head is read. No byte is read before it is needed, as `Expect: 100-continue` requires. In this section
// "head" means the head of a body, not the headers.

/** The body for the backend: none, one piece (a small body or a built message), or a large body, which streams. */
type Content = Uint8Array | RequestBody | undefined;

/** Whether the body for the backend streams, because it is larger than the head. */
function isStream(content: Content): content is RequestBody {
  return content instanceof RequestBody;
}

/** How much of its body a client must send in each `stallTimeoutMs`, so that it cannot send single bytes for days. */
const PACE_BYTES = 30 * 1024;

/**
 * The memory for all bodies from which messages or calls are built, and for these: 32 of the largest payloads, or three
 * of the largest calls. If there are several tokens, each may use half. Further requests get 503.
 */
const HELD_LIMIT_BYTES = 32 * 1024 * 1024;

/** Reads a request's body: first the head, then, only after the credential was accepted, the rest. */
class RequestBody {
  /** Undefined for a chunked body. */
  readonly length;
  readonly #exchange;
  #limitBytes; // the largest body that is accepted
  #owedBytes = 0; // how many bytes the client must send within #leftMs of reading
  #leftMs = 0;
  readonly #chunksRead: Uint8Array[] = []; // not passed on yet
  #scan: BodyScan | undefined;
  #notAnObject: Problem | undefined; // if the head does not begin like an object: a text or a form
  #isComplete;

  constructor(exchange: Exchange) {
    this.#exchange = exchange;
    this.#limitBytes = exchange.rules['limits.body'];
    this.#isComplete = !hasBody(exchange.req);
    this.length = Number(exchange.req.headers['content-length']) || undefined;
  }

  /**
   * Finds `auth` in the head of the body, if a token accepts that method. An unauthenticated client learns nothing
   * about other fields of the body. A body that does not begin like an object (a text, a form) has no `auth`.
   */
  async readCredential() {
    if (this.#isComplete || !this.#exchange.rules.methods.has('body')) return undefined;
    const { auth } = await this.#scanHead();
    return auth === undefined ? undefined : { method: 'body' as const, secret: auth };
  }

  /** Checks the head, and returns the body for the backend. */
  async readChecked() {
    const { method, route } = this.#exchange.target!;
    this.#checkLength(this.length);
    const scan = await this.#scanHead();
    if (this.#notAnObject) {
      const advice = route === SEND_ROUTE ? ' To send text or a form, use a token with "defaults" or "message".' : '';
      throw badJson(this.#notAnObject.message + advice);
    }
    scan.defers = false;
    const fields = scan.takeFields();
    const check = () => checkFieldsOf(this.#exchange, fields);
    if (fields.length <= FREE_FIELDS) check();
    else await this.#exchange.core.turns.take(this.#exchange, check);
    const isEmpty = this.#exchange.bytesIn === 0;
    if (isEmpty && declares(route, 'body')) {
      throw badJson(`The body is empty. ${EMPTY_ADVICE}`);
    }
    // A route that needs no body acts on its path alone, before the gateway could refuse the rest. Only a plugin may
    // read any body, and a path without a row may be a plugin's. The body of a GET is read only to find a credential,
    // and is not relayed.
    const streams = !route || declares(route, 'body') || declares(route, 'any-body');
    if (!this.#isComplete && (method === 'GET' || !streams)) throw tooLarge(HEAD_LIMIT_BYTES);
    if (isEmpty || method === 'GET') return undefined;
    // A small body is sent in one piece and can wait for a slot.
    return this.#isComplete ? Buffer.concat(this.#chunksRead) : this;
  }

  /**
   * Yields a large body as fast as it is consumed, but not its end: the chunk with the closing brace, and what follows.
   * A refused body is so never a complete document for the backend.
   */
  async *beginning() {
    const scan = this.#scan!;
    while (!this.#isComplete) {
      if (!scan.isEnded) yield* this.#chunksRead.splice(0);
      const chunk = await this.#next();
      scan.begin(chunk);
      if (!scan.proceed(FREE_STEPS)) {
        await this.#inTurns(() => {
          checkFieldsOf(this.#exchange, scan.takeFields());
          return scan.proceed(TURN_STEPS);
        });
      }
      if (this.#isComplete) scan.end();
      checkFieldsOf(this.#exchange, scan.takeFields());
      // The empty chunk at the end of a chunked body is left out: writing it could end the request to the backend.
      if (chunk.length > 0) gatherChunk(this.#chunksRead, chunk);
    }
  }

  /** The end of a large body, once all of it was accepted. */
  get end(): readonly Uint8Array[] {
    return this.#chunksRead;
  }

  /** Reads the whole body into memory, to build from it what is relayed. */
  async readWhole(limitBytes: number) {
    this.#limitBytes = Math.min(limitBytes, this.#limitBytes);
    this.#checkLength(this.length);
    for (;;) {
      this.countHeld(this.#exchange.bytesIn);
      if (this.#isComplete) return Buffer.concat(this.#chunksRead.splice(0));
      gatherChunk(this.#chunksRead, await this.#next());
    }
  }

  /**
   * Counts the bytes that the request holds in memory until it is over: those of the body, or those of the message
   * built from the body if they are more. If there are several tokens, each may use half of HELD_LIMIT_BYTES.
   */
  countHeld(bytes: number) {
    const exchange = this.#exchange;
    exchange.heldBytes = Math.max(exchange.heldBytes, bytes);
    const ownLimitBytes = exchange.rules.tokens.size > 1 ? HELD_LIMIT_BYTES / 2 : HELD_LIMIT_BYTES;
    const allBytes = sumOf(exchange.core.running, 'heldBytes');
    if (allBytes <= HELD_LIMIT_BYTES && sumOf(runningLike(exchange), 'heldBytes') <= ownLimitBytes) return;
    // Freed at once; otherwise other requests at this moment would also be refused.
    exchange.heldBytes = 0;
    throw new Problem('busy');
  }

  /** Checks the declared length, or the number of bytes read so far. */
  #checkLength(bytes = 0) {
    if (bytes > this.#limitBytes) throw tooLarge(this.#limitBytes, this.#exchange.target?.route === SEND_ROUTE);
  }

  /**
   * Reads and scans the head, once, for the credential and for all fields that are checked. Sets `#notAnObject` for a
   * body that does not begin like an object.
   */
  async #scanHead() {
    if (this.#scan) return this.#scan;
    const exchange = this.#exchange;
    const scan = this.#scan = new BodyScan();
    // An unauthenticated client must not learn from a refusal which fields the gateway checks.
    scan.defers = !exchange.token;
    try {
      while (!this.#isComplete && exchange.bytesIn < HEAD_LIMIT_BYTES) {
        const chunk = await this.#next(HEAD_LIMIT_BYTES - exchange.bytesIn);
        // Scanned first, because `gatherChunk` may copy the chunk, and the copy must not contain the credential.
        try {
          scan.begin(chunk);
          if (!scan.proceed(FREE_STEPS)) await this.#inTurns(() => scan.proceed(TURN_STEPS));
        } finally {
          gatherChunk(this.#chunksRead, chunk);
        }
      }
      if (this.#isComplete && exchange.bytesIn > 0) scan.end();
    } catch (error) {
      if (!(error instanceof Problem) || error.code !== 'bad_json') throw error;
      if (/^[ \t\r\n]*\{/.test(Buffer.concat(this.#chunksRead).toString())) throw error;
      this.#notAnObject = error;
    }
    return scan;
  }

  /** Repeats a piece of work, each time in a turn of its own, until it returns true. */
  async #inTurns(piece: () => boolean) {
    while (!await this.#exchange.core.turns.take(this.#exchange, piece));
  }

  /**
   * Reads the next chunk. If the length was declared, the body is complete with its last byte. An authenticated client
   * must send at least 30 KiB, or the rest of the body, in every 30 s; time in which the gateway does not read does not
   * count. An unauthenticated client must send its whole body within 30 s. Before the first byte, a compressed body is
   * refused, and a client that expects it gets "100 Continue".
   * @param roomBytes the largest chunk to return.
   * @returns an empty chunk at the end of a body whose length was not declared.
   */
  async #next(roomBytes?: number) {
    const exchange = this.#exchange;
    const { core: { stallTimeoutMs }, req, res, token } = exchange;
    if (exchange.bytesIn === 0) {
      const encoding = req.headers['content-encoding'] ?? 'identity';
      if (!/^[ \t]*identity[ \t]*$/i.test(encoding)) {
        throw withDetail('unsupported_encoding', PROBLEMS.unsupported_encoding[1]); // for the log, too
      }
      if (req.headers.expect?.toLowerCase() === '100-continue' && req.httpVersion === '1.1') res.writeContinue();
    }
    if (this.#owedBytes <= 0) {
      this.#leftMs = stallTimeoutMs;
      this.#owedBytes = PACE_BYTES;
    }
    const sinceMs = performance.now();
    const totalMs = token ? Infinity : exchange.beganMs + stallTimeoutMs - sinceMs;
    const timeoutMs = Math.max(1, Math.min(this.#leftMs, totalMs));
    const chunk = await readChunk(exchange, req, timeoutMs, 'request_timeout', 'client_left', roomBytes) ??
      Buffer.alloc(0);
    this.#leftMs -= performance.now() - sinceMs;
    this.#owedBytes -= chunk.length;
    exchange.bytesIn += chunk.length;
    this.#checkLength(exchange.bytesIn);
    this.#isComplete = chunk.length === 0 || exchange.bytesIn === this.length;
    return chunk;
  }
}

/** A body of at most this size is made into a message at once. */
const SHORT_BYTES = 1024;

/** How many steps of a chunk are scanned at once: a small send takes a tenth of them. */
const FREE_STEPS = 1024;

/** How many fields are checked at once. */
const FREE_FIELDS = 100;

/** How many further steps are one turn. They take about a millisecond. */
const TURN_STEPS = 4096;

/** How long a turn is that others need no pause after, but one turn of the event loop. */
const SHORT_TURN_MS = 1;

/**
 * The processor, as a resource that requests take in turns. Attack: keep everybody waiting with many bodies that are dear
 * to scan or to make into messages. So such work is done one piece at a time, and after each piece all other requests have
 * as much time as it took. The next turn is that of the party whose latest one is the longest ago. A token is a party,
 * and all requests that have no token yet are one.
 */
class Turns {
  #isTaken = false; // also during the pause after a turn
  #waiting: Turn[] = [];
  /** By party, the number of its latest turn. */
  readonly #latest = new Map<string, number>();
  #count = 0;

  /** Runs a task when it is the request's turn. */
  async take<T>(exchange: Exchange, task: () => T) {
    const turn: Turn = { exchange, party: exchange.token?.name ?? '', hasCome: !this.#isTaken };
    this.#isTaken = true;
    if (!turn.hasCome) {
      this.#waiting.push(turn);
      try {
        await exchange.waitUntil(() => turn.hasCome, Infinity, 'busy');
      } catch (error) {
        if (turn.hasCome) this.#pass();
        else this.#waiting.splice(this.#waiting.indexOf(turn), 1);
        throw error;
      }
    }
    this.#latest.set(turn.party, ++this.#count);
    const sinceMs = performance.now();
    try {
      return task();
    } finally {
      const tookMs = performance.now() - sinceMs;
      if (tookMs < SHORT_TURN_MS) setImmediate(() => this.#pass());
      else setTimeout(() => this.#pass(), tookMs);
    }
  }

  /** Gives the turn to the next request. */
  #pass() {
    const next = longestAgo(this.#waiting, ({ party }) => this.#latest.get(party));
    this.#isTaken = next !== undefined;
    if (!next) return;
    this.#waiting.splice(this.#waiting.indexOf(next), 1);
    next.hasCome = true;
    next.exchange.wake();
  }
}

/** Of those that wait, the first whose latest turn is the longest ago. @param latestOf its number, undefined for none. */
function longestAgo<T>(waiting: readonly T[], latestOf: (each: T) => number | undefined) {
  let next: T | undefined;
  let oldest = Infinity;
  for (const each of waiting) {
    const latest = latestOf(each) ?? 0;
    if (latest >= oldest) continue;
    next = each;
    oldest = latest;
  }
  return next;
}

/** A request that wants the processor. */
interface Turn {
  readonly exchange: Exchange;
  readonly party: string;
  hasCome: boolean;
}

// #endregion

// #region MESSAGES
// Grafana, GitHub and others post JSON of their own shape; scripts and devices post a line of text, or an HTML form. If
// the token has `defaults` or `message`, the gateway builds a message from the posted body. It contains only the
// fields of a message, and the text that the template rendered. Here, "payload" is the posted body as an object,
// "message" is the body that goes to the backend, and "form" is an HTML form.

/** A JSON object, such as a payload or a message. */
type JsonObject = Record<string, unknown>;

/** A field of a form, or a parameter of a query. */
type Pair = readonly [name: string, value: string];

/** The fields of a message that are taken from a payload. `recipient` is not one: the backend does not document it. */
const MESSAGE_FIELDS =
  ('message number recipients text_mode base64_attachments sticker mentions quote_timestamp quote_author quote_message ' +
    'quote_mentions edit_timestamp notify_self view_once link_preview').split(' ');

/**
 * What a posted name means, in JSON, a form and a query:
 *
 *   field       a field of a message: taken, unless the token's template takes it for data
 *   element     one recipient, as jQuery, PHP and axios write a list: `recipients[]`, `recipients[0]`. Appended to them
 *   lost        another spelling of a vital field, which the gateway cannot use: 400
 *   credential  `auth` in any spelling: dropped, in JSON at every depth
 *   data        anything else: for the template alone
 */
type Meaning = 'field' | 'element' | 'lost' | 'credential' | 'data';

/** The fields without which a message would go to the default recipients, or without its picture. */
const VITAL = /^(?:number|recipients?|base64_attachments?)$/;

/**
 * Decides what a posted name means.
 * @returns also the `field` of a message that it stands for, or else the name itself; and whether that is vital.
 */
function readName(name: string): { meaning: Meaning; field: string; isVital: boolean } {
  if (MESSAGE_FIELDS.includes(name)) return { meaning: 'field', field: name, isVital: VITAL.test(name) };
  if (/^recipients\[\d*\]$/.test(name)) return { meaning: 'element', field: 'recipients', isVital: true };
  const plain = plainName(name);
  if (VITAL.test(plain)) return { meaning: 'lost', field: plain, isVital: true };
  return { meaning: plain === 'auth' ? 'credential' : 'data', field: name, isVital: false };
}

/**
 * A name without what programs and people write around it, as in "recipients.0", "@recipients" and "Recipients". "amp;"
 * remains of an "&" that was escaped for HTML.
 */
function plainName(name: string) {
  if (/^\w*$/.test(name)) return name.toLowerCase(); // at once, because a body of 1 MiB may have 200,000 names
  // Attack: a name of 1 MiB, which takes a second, because NFKC makes it 18 times as long. A field's name is short
  // without what is not seen, and what makes it another one than it should be stands at its ends.
  const seen = name.length > 200 ? name.replace(UNSEEN, '') : name;
  const ends = seen.length > 200 ? seen.slice(0, 100) + seen.slice(-100) : seen;
  // Two letters, of which NFKC makes 18 others, in 200,000 names take half a second.
  const plain = ends.replace(/[\ufdfa\ufdfb]/g, '').normalize('NFKC').toLowerCase();
  const withoutEntity = plain.slice(plain.lastIndexOf(';') + 1);
  const withoutIndex = withoutEntity.replace(/(?:\[|\.\d).*/s, '');
  return withoutIndex.replace(UNSEEN, '');
}

/** What programs write around a name: white space, what is not seen, and curl's "@". */
const UNSEEN = /[\s\p{C}@]/gu;

/** A name as a message shows it. A long one may contain a secret, so only the field that it stands for is shown. */
function nameToShow(name: string) {
  if (name.length < SECRET_MIN_LENGTH) return name;
  const { field, isVital } = readName(name);
  return isVital ? field : '…';
}

/** A body that begins like this is meant as JSON, so if it is invalid, it is refused instead of sent as text. */
const BEGINS_OBJECT = /^\s*\{/;

/** Matches what is meant as a JSON object, but stands within a quote or a bracket: `'{"a":1}'`, as cmd.exe sends it. */
const WRAPPED_OBJECT = /^['"`[\s\p{Pi}\p{Pf}]+\{/u;

/**
 * A pair of a form. Encoders leave no white space and no ";" in a name, so ` b = c` and `amp;b=c` are the rest of a
 * value that was not encoded.
 */
const FORM_PAIR = /^[^\s&;=]+=/;

/**
 * Matches what is removed from a text: the sequences of ECMA-48 for colours (CSI), for a title or a link (OSC) and for
 * another character set (as `tput sgr0` writes it), and all control characters but line feed and tab. So `ESC[31mred`
 * becomes `red`. CR LF becomes a line feed, because every CR is removed.
 */
const NOT_TEXT =
  // deno-lint-ignore no-control-regex
  /(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]+[0-~]|(?![\n\t])\p{Cc}/gu;

/** A text without what NOT_TEXT matches. */
function cleanText(value: string) {
  // A form of 1 MiB may have 200,000 values. Most are printable ASCII, and this test is faster than the replacement.
  return /[^\n -~]/.test(value) ? value.replace(NOT_TEXT, '') : value;
}

/** Whether the gateway builds a message from each body that this token posts to /v2/send, whatever the body is. */
function buildsMessages({ defaults, message }: Token) {
  return defaults !== undefined || message !== undefined;
}

/**
 * Reads the body, or the query of a GET, and makes a message of it. A payload may take twenty times the memory of its
 * text, so none of it outlives its function, however long the request waits.
 */
async function makeMessage(exchange: Exchange, body: RequestBody) {
  const target = exchange.target!;
  if (!target.isSendByGet) refuseIgnoredFields(target);
  exchange.target = { ...target, method: SEND_ROUTE.method, query: '', parameters: [] };
  const content = target.isSendByGet ? undefined : await body.readWhole(PAYLOAD_LIMIT_BYTES);
  const lengthBytes = (content ?? target.query).length;
  // A section may be rendered for each element of a list, and others in it for each of theirs.
  const isShort = lengthBytes <= SHORT_BYTES && !exchange.token!.message?.hasSections;
  return buildInTurn(exchange, body, isShort, () => {
    const payload = content
      ? readPayload(exchange.token!, content, exchange.req.headers['content-type'])
      : readForm(target.query, exchange.token!);
    return buildChecked(exchange, payload);
  });
}

/** Builds what is relayed in place of the body. @param isShort whether that takes no time that others would notice. */
async function buildInTurn(exchange: Exchange, body: RequestBody, isShort: boolean, build: () => Uint8Array) {
  const bytes = isShort ? build() : await exchange.core.turns.take(exchange, build);
  // The longest are made of JSON with numbers such as 1e20, which JSON.stringify writes out: 1 MiB becomes 4.4 MiB.
  body.countHeld(bytes.length);
  return bytes;
}

/** The query of a POST is ignored, so it may not name a field that must not be lost. */
function refuseIgnoredFields({ parameters }: Target) {
  for (const [name] of parameters) {
    if (readName(name).isVital) throw badField(nameToShow(name), 'is in the query, which is ignored for a POST');
  }
}

/** The bytes of the message, checked as what a client posts itself. */
function buildChecked(exchange: Exchange, payload: JsonObject) {
  const message = buildMessage(exchange.token!, payload);
  // A client that repeats its token in the text, as in "Door 1\n@auth=TOKEN", would show it to everyone who reads it.
  const secret = exchange.credential?.secret;
  if (secret && String(message.message ?? '').includes(secret)) throw badField('message', 'contains the API token');
  const { bytes, fields } = scanMessage(message);
  checkFieldsOf(exchange, fields);
  return bytes;
}

/** libsoup repeats a POST without its body after a 401. */
const EMPTY_ADVICE =
  'It needs Content-Length or chunked, and a client that repeats a request without its body after a 401 needs a ' +
  'bearer header.';

/** A posted body, with what tells what it is. */
interface Posted {
  readonly token: Token;
  readonly bytes: Buffer;
  readonly contentType: string;
  /** The media type, in lower case. */
  readonly type: string;
  /** Decoded by the charset that the Content-Type declares, if it is neither JSON nor a multipart form. */
  readonly utf8: Buffer;
  readonly text: string;
}

const isDeclaredJson = (type: string) => /^application\/json$|\+json$/.test(type);

/** curl -d and wget declare everything as a form. */
const isFormOrUndeclared = (type: string) => /^(?:application\/x-www-form-urlencoded)?$/.test(type);

/**
 * What a posted body is, and its payload. The first row that fits decides. The Content-Type alone cannot, because many
 * clients declare something else than they send.
 */
const BODIES: readonly (readonly [fits: (body: Posted) => boolean, read: (body: Posted) => JsonObject])[] = [
  [({ type, text }) => isDeclaredJson(type) || BEGINS_OBJECT.test(text), readJsonBody],
  [
    ({ type }) => type === 'multipart/form-data',
    ({ bytes, contentType, token }) => readFields(readMultipart(bytes, contentType), token),
  ],
  [
    // As curl -F, fetch and OkHttp send it, if a program declares it as something else: its fields would be lost.
    ({ type, text }) => type.startsWith('multipart/') || BEGINS_MULTIPART.test(text),
    () =>
      failJson('The body is a multipart form, but its Content-Type is not multipart/form-data: let the client set it.'),
  ],
  [({ utf8 }) => !isUtf8(utf8), () => failJson('The body is not JSON, a form or UTF-8 text.')],
  // A form from a file may begin with a byte order mark or end with a line feed.
  [
    ({ type, token, text }) => isFormOrUndeclared(type) && looksLikeForm(token, text.trim()),
    ({ text, token }) => readForm(text.trim(), token),
  ],
  [({ type, text }) => isFormOrUndeclared(type) && isWrappedJson(text.trim()), refuseWrappedJson],
  [() => true, ({ text, token }) => readFields([['message', cutText(cleanText(text))]], token)],
];

function readPayload(token: Token, bytes: Buffer, contentType = '') {
  const [type] = /^[^ \t;,]*/.exec(contentType.toLowerCase())!;
  // JSON is UTF-8 whatever is declared (RFC 8259 8.1), and each field of a multipart form declares its own charset.
  const hasOwnCharset = isDeclaredJson(type) || type === 'multipart/form-data';
  // An empty text is left to the template, which may need nothing.
  if (bytes.length === 0 && hasOwnCharset) failJson(`The body is empty. ${EMPTY_ADVICE}`);
  const utf8 = hasOwnCharset ? bytes : toUtf8(bytes, contentType);
  const body: Posted = { token, bytes, contentType, type, utf8, text: utf8.toString() };
  const [, read] = BODIES.find(([fits]) => fits(body))!;
  return read(body);
}

/** @param detail the whole sentence. */
function failJson(detail: string): never {
  throw badJson(detail);
}

const NO_LIST = 'The body is a list; a webhook must be one JSON object, because a template cannot read a list.';

const isList = (text: string) => /^\s*\[/.test(text);

function readJsonBody({ text, utf8 }: Posted) {
  if (isList(text)) failJson(NO_LIST);
  return readJson(utf8);
}

function refuseWrappedJson({ token, text }: Posted): never {
  const advice =
    'The body is JSON within a quote or a bracket: leave that out (in cmd.exe, write "{\\"message\\": …}"). ' +
    'With "Content-Type: text/plain" it is sent unchanged.';
  failJson(isList(text) && token.message ? NO_LIST : advice);
}

/** Matches the charset that a Content-Type declares. */
const DECLARED_CHARSET = /;[ \t]*charset=["']?([^\s"',;]+)/i;

/**
 * Decodes bytes by the charset that their Content-Type declares, and returns them in UTF-8. Spring declares a String as
 * ISO-8859-1, and Apache's HttpClient a form. All checks see only the result, because some charsets hide ASCII: in
 * ISO-2022-JP, an escape sequence may stand within a field's name.
 */
function toUtf8(bytes: Buffer, contentType: string) {
  const [, charset = 'utf-8'] = DECLARED_CHARSET.exec(contentType) ?? [];
  // The bytes that a form's encoder has escaped are in the same charset.
  const isForm = /^application\/x-www-form-urlencoded[ \t;]/i.test(contentType);
  const isEscaped = isForm && !IS_UTF8.test(charset);
  return recode(isEscaped ? unescapeBytes(bytes.toString('latin1'), /%[89a-f][\da-f]/gi) : bytes, charset);
}

const IS_UTF8 = /^utf-?8$/i;

/** Decodes bytes in a charset, and returns them in UTF-8. */
function recode(bytes: Buffer, charset: string) {
  if (IS_UTF8.test(charset)) return bytes;
  // Java writes UTF-16 with a mark and big-endian; TextDecoder would read it as little-endian.
  const isBigEndian = bytes[0] === 0xfe && bytes[1] === 0xff;
  try {
    const decoder = new TextDecoder(isBigEndian ? 'utf-16be' : charset, { fatal: true });
    // UNTIL Node 24 is the oldest: without `stream`, older ones read 80 to 9F of windows-1252 (€ is 80) as control
    // characters (findings/node-textdecoder-takes-windows-1252-for-latin-1.sh).
    return Buffer.from(decoder.decode(bytes, { stream: true }) + decoder.decode());
  } catch {
    throw badJson('The declared charset is unknown here, or the body is not in it; send UTF-8.');
  }
}

/** The bytes of a text in Latin-1, with each escape that the pattern matches as the byte that it stands for. */
function unescapeBytes(text: string, escape: RegExp) {
  return Buffer.from(text.replace(escape, (found) => String.fromCharCode(parseInt(found.slice(1), 16))), 'latin1');
}

/**
 * The payload of a JSON body. JSON.parse would drop the first of two equal keys, so a duplicate of a field that must
 * not be lost is refused.
 */
function readJson(json: Buffer) {
  const { value: payload, repeated } = parseJson(json);
  const lost = repeated.find(({ key }) => readName(key).isVital);
  if (lost) throw badField(nameToShow(lost.key), 'may be given only once');
  removeCredentials(payload);
  return payload;
}

/** Removes each member `auth`, at every depth: a credential, valid or not, must not get into the text of a message. */
function removeCredentials(value: unknown) {
  if (Array.isArray(value)) return value.forEach(removeCredentials);
  if (!isObject(value)) return;
  for (const key of Object.keys(value)) {
    if (readName(key).meaning === 'credential') delete value[key];
    else removeCredentials(value[key]);
  }
}

// The headers of a multipart form (RFC 7578), as encoders write them: curl, browsers, Python, Node, PHP, Go, Ruby, Java, and
// .NET, which omits quotes and writes a legible name beyond ASCII only in "filename*". About the name of a field, programs
// disagree: a second "name" or boundary, "name*", a backslash or a "%" in it. Those are refused. Otherwise the gateway could
// miss recipients that another program sees, and the message would go to the default ones. MULTIPART matches
// `multipart/form-data; boundary=x`.
const VALUE = '"[^"\\\\%\\p{Cc}\\ufffd]+"|[^\\s"\\x27(),;\\\\%\\p{Cc}\\ufffd]+';
const CHARSET = '(?: *; *charset=[\\w"-]+)?';
const MULTIPART = new RegExp(`^multipart/form-data${CHARSET} *; *boundary=(?<boundary>${VALUE})${CHARSET}$`, 'iu');

/** Matches the value of a field's `name`, in quotes or without. */
const FIELD_NAME = new RegExp(`^(?:${VALUE})$`, 'u');

/**
 * One parameter of a Content-Disposition. A quote ends the value if the next parameter or nothing follows it. Any other one
 * is part of the value, because half of the encoders write `a "b" c.txt` as it is, and the others `a \"b\" c.txt`.
 * Without quotes, libsoup writes parentheses and commas as they are.
 */
const PARAMETER = / *; *(?<key>[\w-]+\*?)=(?<value>"(?:[^"\p{Cc}]|"(?! *(?:;|$)))*"|[^\s";]+)/guy;

/** The value of "filename*" (RFC 8187): a charset, a language, and the name, as in `utf-8'en'a%20b.png`. */
const EXTENDED = /^(?<charset>[\w-]+)'[\w-]*'(?<name>(?:[!-$&-~]|%[\da-f]{2})*)$/i;

/** A part: its headers, and its content up to the CR LF whose line feed begins the next boundary. */
const PART = /^\r\n(?<lines>[^\r\n]+(?:\r\n[^\r\n]+)*)\r\n\r\n(?<content>.*)\r$/s;

/** Headers of a part that make its content another one than the bytes that stand there. */
const ENCODED_PART = /^content-transfer-encoding:(?! *(?:7bit|8bit|binary)$)|^content-type:\s*multipart\//im;

/** Matches a body that begins like a multipart form. */
const BEGINS_MULTIPART = /^\s*--.*\r?\n(?:[\w-]+:.*\r?\n)*?content-disposition:/i;

function readMultipart(body: Buffer, contentType: string) {
  // UNTIL `Response.formData` refuses a part that it cannot read: Deno 2.9 skips it
  // (findings/deno-formdata-skips-a-part.sh).
  const quoted = MULTIPART.exec(contentType)?.groups?.boundary ??
    failMultipart('its Content-Type has no plain boundary');
  const boundary = quoted.replaceAll('"', '');
  // RFC 2046 5.1.1. A search for a boundary of 6000 bytes, in a body that nearly has it everywhere, took a second.
  if (boundary.length > 70) failMultipart('its boundary is longer than 70 bytes');
  // A boundary stands after CR LF. Some programs find one after a lone line feed too. So the text is split at the line
  // feed, and each piece must end with CR.
  const [before = '', ...parts] = `\r\n${body.toString('latin1')}`.split(`\n--${boundary}`);
  if (!/^\s*\r$/.test(before)) failMultipart('it does not begin with its boundary');
  if (!/^--\s*$/.test(parts.pop() ?? '')) failMultipart('it does not end with its boundary');
  return parts.map((part, i) => readPart(part, (why) => failMultipart(`part ${i + 1} ${why}`)));
}

/** @param why what is wrong with the form, or with a part of it. */
function failMultipart(why: string): never {
  throw badJson(`The body is not a multipart form as browsers and "curl -F" send it: ${why}.`);
}

/** Refuses a part. The argument completes "part 1 …". */
type FailPart = (why: string) => never;

/**
 * The field of a part. A file becomes an attachment, as a data URI; the backend ends its file name at a semicolon.
 * A file as `number` or `recipients` is refused: the message would go to nobody.
 */
function readPart(part: string, fail: FailPart): Pair {
  const { lines = '', content = '' } = PART.exec(part)?.groups ?? fail('has no headers, or no empty line after them');
  const headBytes = Buffer.from(lines, 'latin1');
  // Apache's HttpClient writes a file's name in Latin-1.
  const head = isUtf8(headBytes) ? headBytes.toString() : lines;
  const bytes = Buffer.from(content, 'latin1');
  const headers = head.split('\r\n').map((line) => {
    return /^([\w-]+):/.exec(line)?.[1]?.toLowerCase() ?? fail('has a line that is no header');
  });
  if (new Set(headers).size < headers.length) fail('has a header twice');
  if (ENCODED_PART.test(head)) fail('is encoded (base64, for example) or a form itself; send its bytes as they are');
  const { name, file } = readDisposition(head, fail);
  const [, partType = ''] = /^content-type:[ \t]*(.*)$/im.exec(head) ?? [];
  const { meaning, field, isVital } = readName(name);
  if (meaning === 'credential') return [name, '']; // a file, too, must not become an attachment
  if (head === lines && /[^ -~]/.test(name)) fail('has a name that is not UTF-8');
  if (file === undefined) return [name, textOf(toUtf8(bytes, partType), fail)];
  if (isVital && !field.startsWith('base64')) throw badField(nameToShow(name), 'must be text, not a file');
  const [type = 'application/octet-stream'] = /^[\w.+/-]+/.exec(partType) ?? [];
  const fileName = file.replace(/^.*[/\\]/s, '').replace(/[;\p{Cc}]/gu, '_');
  const meta = `data:${type};${fileName && `filename=${fileName};`}base64,`;
  return ['base64_attachments', bytes.length > 0 ? meta + bytes.toString('base64') : ''];
}

/**
 * The name of a field, and of its file, if it has one, from its Content-Disposition. Of a file, all other parameters are
 * ignored. They come in any order: Jersey writes the name last, after the date of the file.
 */
function readDisposition(head: string, fail: FailPart) {
  const { parameters = '' } = /^content-disposition: *form-data(?<parameters> *;.*)$/im.exec(head)?.groups ??
    fail('has no "Content-Disposition: form-data" with a name');
  const values = new Map<string, string>();
  let end = 0;
  for (const { 0: whole, groups } of parameters.matchAll(PARAMETER)) {
    end += whole.length;
    const { key = '', value = '' } = groups!;
    const name = key.toLowerCase();
    if (values.has(name) || name === 'name*') fail('has a parameter twice, or "name*"');
    values.set(name, value);
  }
  if (!/^[ \t]*$/.test(parameters.slice(end))) fail('has a Content-Disposition that cannot be read');
  const quoted = FIELD_NAME.exec(values.get('name') ?? '')?.[0] ??
    fail('has no name, or one with a quote, "\\" or "%"');
  const [plain, extended] = [values.get('filename'), values.get('filename*')];
  const isFile = (plain ?? extended) !== undefined;
  if (!isFile && values.size > 1) fail('has more than a name, but is no file'); // programs could see another name
  const file = extended === undefined ? plain && unquote(plain) : decodeExtended(unquote(extended), fail);
  return { name: quoted.replaceAll('"', ''), file };
}

/** A value without its quotes, and without the backslash before a quote in it. */
function unquote(value: string) {
  return value.replace(/^"|"$/g, '').replaceAll('\\"', '"');
}

/** The name of a file in the value of "filename*". */
function decodeExtended(value: string, fail: FailPart) {
  const { charset = '', name = '' } = EXTENDED.exec(value)?.groups ?? fail('has a "filename*" that cannot be decoded');
  return textOf(recode(unescapeBytes(name, /%../g), charset), fail);
}

/** The text of bytes in UTF-8. */
function textOf(bytes: Buffer, fail: FailPart) {
  return isUtf8(bytes) ? bytes.toString() : fail('is not UTF-8; declare its charset');
}

/** The payload of an HTML form or of a query. */
function readForm(form: string, token: Token) {
  const pairs = form.split('&').filter((pair) => pair !== '');
  if (!pairs.every((pair) => FORM_PAIR.test(pair))) {
    throw badJson(
      'A pair of the form was not encoded: write "&" as %26 (curl --data-urlencode). If it is text, post it as text/plain.',
    );
  }
  const escaped = escapePercent(form);
  try {
    if (escaped.includes('%')) decodeURIComponent(escaped);
  } catch {
    throw badJson('The percent-encoded bytes of the form are not UTF-8.');
  }
  return readFields(new URLSearchParams(escaped), token);
}

/** Escapes each "%" that does not begin an escape: next to one, URLSearchParams of Node garbles non-ASCII letters. */
function escapePercent(form: string) {
  return form.replace(/%(?![0-9a-f]{2})/gi, '%25');
}

/**
 * Whether a text is an HTML form by its look: its first name, or one behind an "&", is a field of a message, or another
 * name that a text has only by accident. Any of its names will do, because form encoders write them in any order.
 */
function looksLikeForm({ message: template }: Token, text: string) {
  const isOfData = (name: string) => name === 'payload' || name === 'data' || template?.names.has(name);
  const showsForm = (name: string) => readName(name).meaning !== 'data' || isOfData(name);
  // A link begins a text: no encoder leaves such a character in a name.
  const [first = ''] = /^[^\s=&]*(?==)/.exec(text) ?? [];
  if (/[:/?]/.test(first)) return false;
  // "number = 5" begins a text: no encoder writes white space.
  const pairs = text.replace(/^number\s+=/i, '').split('&').filter((pair) => pair.includes('='));
  return [...new URLSearchParams(escapePercent(pairs.join('&'))).keys()].some(showsForm);
}

/**
 * The payload of a form: its fields, or the JSON that its only field holds. GitHub's form has one field with JSON in
 * it, "payload". Uptime Kuma's has one, "data". Plex's adds a picture, which becomes an attachment.
 */
function readFields(pairs: Iterable<Pair>, token: Token) {
  const fields: Record<string, string | string[]> = Object.create(null); // `__proto__` is an ordinary name here
  const payloads: JsonObject[] = [];
  for (const [posted, value] of pairs) {
    const { meaning, field } = readName(posted);
    if (meaning === 'credential') continue; // it must not get into the text of a message
    // An empty field was not filled in. But empty `recipients` must not become the default ones.
    if (value === '' && field !== 'recipients') continue;
    const name = meaning === 'lost' ? posted : field;
    const earlier = fields[name];
    if (name === 'number' && earlier !== undefined) throw badField(name, 'may be given only once');
    let text: string;
    if (name === 'number' || name === 'recipients') {
      // Not cleaned, because an address with a control character could become another one. A "+" that was not encoded
      // is read as a space.
      text = value.replace(/^ (?=\d{5,15}$)/, '+');
    } else {
      text = cleanText(value); // without the CR of a textarea's lines, for example
    }
    if (name === 'payload' || name === 'data') {
      if (BEGINS_OBJECT.test(text)) {
        const payload = readJson(Buffer.from(value)); // as it was posted: cleaned, an address could become another one
        payloads.push(payload);
        text = JSON.stringify(payload); // without its credential
      } else if (isWrappedJson(text)) {
        throw badField(name, 'is JSON, but not a JSON object');
      }
    }
    if (earlier === undefined) fields[name] = text;
    else if (Array.isArray(earlier)) earlier.push(text);
    else fields[name] = [earlier, text];
  }
  const [payload] = payloads;
  if (!payload) return fields; // at once, because the next line copies all fields
  const { base64_attachments, ...others } = fields;
  if (Object.values(others).flat().length === 1) {
    if (!base64_attachments) return payload;
    if (payload.base64_attachments == null) return { ...payload, base64_attachments };
  }
  // Next to other fields, this JSON is not a field of a message, so its recipients would be lost with it.
  const taken = payloads.flatMap((json) => Object.keys(messageFields(token, json)));
  const lost = taken.find((name) => readName(name).isVital);
  if (lost) throw badField(nameToShow(lost), 'is in a JSON field next to other fields, and would be lost');
  return fields;
}

/** The message of a payload: the defaults, the payload's fields over them, and the template's message over both. */
function buildMessage(token: Token, payload: JsonObject) {
  const { defaults, message: template } = token;
  const message: JsonObject = { ...defaults, ...messageFields(token, payload) };
  if (template) {
    const { text, hasFound } = template.render(payload);
    const findsNothing = template.hasVariables && !hasFound; // then the words around the variables say nothing
    // A template's last line may be a section, whose text ends with a line feed.
    message.message = findsNothing ? '' : text.replace(/\r?\n$/, '');
  }
  // A picture or a sticker needs no text. But a template that finds nothing must not go unnoticed because there is a
  // picture.
  const isWordless = !template && (!isBlank(message.base64_attachments) || !isBlank(message.sticker));
  const needed = isWordless ? ['number', 'recipients'] : ['message', 'number', 'recipients'];
  const missing = needed.filter((name) => isBlank(message[name]));
  if (missing.length > 0) throw incomplete(template, payload, missing);
  return message;
}

/** The problem with a payload of which no whole message can be made. @param missing the fields that it lacks. */
function incomplete(template: Template | undefined, payload: JsonObject, missing: readonly string[]) {
  const keys = Object.keys(payload).map((key) => MESSAGE_FIELDS.includes(key) ? `"${key}"` : showValue(key, '…'));
  const shown = `${joinFirst(keys, ', ')}${keys.includes('…') ? ' (… is a name of 16 characters or more)' : ''}`;
  const reason = `no_${missing.join(',no_')}`;
  if (keys.length === 0) {
    const detail =
      `The body is empty, or has no field but "auth"; post the message as text, as a form, or as JSON. ${EMPTY_ADVICE}`;
    return withDetail('bad_field', detail, reason);
  }
  const others = missing.filter((name) => name !== 'message').join(' and ');
  const ofText = template
    ? "The token's template finds nothing in this body; correct its names. "
    : 'This body has no text in "message"; give the token a template, such as "message": "{{eventType}}". ';
  const ofOthers = `The send lacks ${others}; set this in the token's "defaults". `;
  const sentences = (missing.includes('message') ? ofText : '') + (others && ofOthers);
  return new Problem('bad_field', reason, {
    detail: `${sentences}The body's top-level keys are ${shown}.`,
    logged: `${sentences}The response lists the body's top-level keys.`,
  });
}

/** The fields of a message that a payload has. */
function messageFields(token: Token, payload: JsonObject) {
  const fields: JsonObject = {};
  const recipients: unknown[] = [];
  for (const [key, value] of Object.entries(payload)) {
    const { meaning, field } = readName(key);
    if (value === null || meaning === 'data' || meaning === 'credential') continue;
    if (meaning === 'lost') {
      if (key === 'recipient' && value === '' && !isBlank(payload.recipients)) continue; // the backend ignores it too
      throw badField(
        nameToShow(key),
        field !== key && MESSAGE_FIELDS.includes(field)
          ? `must be spelled "${field}"`
          : 'is not a field of a send; a send has "number", "recipients" and "base64_attachments"',
      );
    }
    if (isForTemplate(token, field)) continue;
    if (field === 'recipients') {
      // `recipients[0]`, `recipients[1]`: a copy of the list for each of 45,000 would block the process for 20 s.
      for (const recipient of [value].flat()) recipients.push(recipient);
      fields[field] = recipients; // an empty list, too, stands in place of the default one
    } else fields[field] = field in LIST_KEYS ? [value].flat() : value;
  }
  if (!token.message && typeof fields.message === 'object') {
    throw badField('message', 'must be text, not an object or a list');
  }
  // A number that is not a string means something else, such as the number of a pull request.
  if (typeof fields.number !== 'string' || fields.number === '') delete fields.number;
  else if (!NUMBER.test(fields.number)) throw badField('number', 'must be "+" and 5 to 15 digits');
  return fields;
}

/**
 * Whether a field is data for the template: `number` and `recipients` where the defaults have them, because another
 * program means something else by these.
 */
function isForTemplate({ defaults = {}, message: template }: Token, field: string) {
  return template !== undefined && (field === 'number' || field === 'recipients') && defaults[field] !== undefined;
}

/** Whether a text is meant as JSON, but not as an object: an object within a quote or a bracket, or a list. */
function isWrappedJson(text: string) {
  if (WRAPPED_OBJECT.test(text)) return true;
  try {
    return isList(text) && Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}

/** Whether a value is missing, null, empty, only white space or an empty list. */
function isBlank(value: unknown) {
  if (value === undefined || value === null) return true;
  return typeof value === 'string' ? value.trim() === '' : Array.isArray(value) && value.length === 0;
}

/** A message as the body for the backend, and its fields, to be checked as if a client had sent it. */
function scanMessage(message: object) {
  const bytes = Buffer.from(JSON.stringify(message));
  return { bytes, fields: BodyScan.fieldsOf(bytes) };
}

/** Checks a message as if a client had sent it. @returns the body for the backend. */
function checkMessage(token: Token, message: object) {
  const { bytes, fields } = scanMessage(message);
  checkFields(token, SEND_ROUTE, fields);
  return bytes;
}

// #endregion

// #region TEMPLATES
// The part of Mustache (https://github.com/mustache/spec) that plain text needs: variables, sections, inverted sections
// and comments. Nothing is escaped for HTML. Only the configuration contains templates; the values that a client sends
// are inserted and never parsed as a template.

/**
 * Matches a tag: `{{{name}}}`, or `{{`, a sigil, a name and `}}`. In `{{# alerts }}` the sigil is `#` and the name
 * ` alerts `. An unclosed `{{` matches alone, so that it is reported.
 */
const TAG = /\{\{(?:\{(?<triple>[^]*?)\}\}\}|(?:\s*(?<sigil>[#^/!&>=<$]))?(?<inner>[^]*?)\}\})?/g;

/** Matches the rest of a line, with its end, if it is blank. */
const BLANK_REST = /^[ \t]*(?:\r?\n|$)/;

/**
 * `.`, or parts joined by dots, without white space and braces. A leading dot limits the lookup to the innermost
 * context.
 */
const TAG_NAME = /^(?:\.|\.?[^\s.{}]+(?:\.[^\s.{}]+)*)$/;

/** A variable, or a section (its sigil is `#`, or `^` if it is inverted). The whole template is the outermost one. */
interface Tag {
  /** The tag as written, with its braces. */
  readonly text: string;
  /** Its position in the template. */
  readonly at: number;
  readonly sigil: string;
  readonly name: string;
  /** The parts of the name. An empty part, before or after a leading dot, is the innermost context itself. */
  readonly path: readonly string[];
  /** The content of a section: texts and tags. */
  readonly nodes: (string | Tag)[];
}

/** The longest message, in UTF-8, from a template or a text body. The rest is cut off. */
const RENDER_LIMIT_BYTES = 64 * 1024;

/**
 * The maximum number of steps of one rendering, which take a fraction of a second; a step is about one lookup. A
 * rendering also may not take more steps than the length of the data times the length of the template. Ordinary
 * templates need far fewer. Without a limit, sections nested d deep over one list of n elements would take n^d steps.
 */
const RENDER_LIMIT_STEPS = 3_000_000;

/** A compiled Mustache template. */
class Template {
  /** The names that the template looks up at the top level: the first part of each name. */
  readonly names = new Set<string>();
  /** Whether it has variables outside of sections. "Backup done{{#size}} ({{size}}){{/size}}" needs no size. */
  hasVariables = false;
  hasSections = false;
  /** Whether it has a tag of Jinja, a shell or Python, which Mustache takes for text. */
  readonly hasForeignTags: boolean;
  readonly #root: Tag;

  /**
   * Parses a template in one pass over its tags. `open` holds the sections that are not closed yet, the template first.
   * @throws {UsageError} whose message begins with the line and the column in the template.
   */
  constructor(text: string) {
    this.hasForeignTags = /\{%|\$\{|(?<!\{)\{[\w.]+\}(?!\})/.test(text);
    this.#root = { text, at: 0, sigil: '', name: '', path: [], nodes: [] };
    const open = [this.#root];
    let from = 0;
    for (const { 0: whole, groups, index: at } of text.matchAll(TAG)) {
      const { triple, sigil = '', inner = '' } = groups!;
      // By the specification, a section's tag or a comment that is alone on its line removes the whole line.
      const end = at + whole.length;
      const indent = text.slice(text.lastIndexOf('\n', at - 1) + 1, at);
      const lineEnd = text.indexOf('\n', end) + 1 || text.length;
      const isAlone = /[#^/!]/.test(sigil) && /^[ \t]*$/.test(indent) && BLANK_REST.test(text.slice(end, lineEnd));
      const { nodes } = open.at(-1)!;
      nodes.push(text.slice(from, isAlone ? at - indent.length : at));
      from = isAlone ? lineEnd : end;
      if (sigil === '!') continue;
      const name = (triple ?? inner).trim();
      const tag: Tag = { text: whole, at, sigil, name, path: name.split('.'), nodes: [] };
      const mistake = mistakeInTag(tag, open);
      if (mistake) failTemplate(text, at, mistake);
      this.hasVariables ||= open.length === 1 && !/[#^]/.test(sigil);
      if (sigil === '/') open.pop();
      else nodes.push(tag);
      if (/[#^]/.test(sigil)) open.push(tag);
      this.hasSections ||= sigil === '#';
      const first = tag.path.find(Boolean);
      if (first) this.names.add(first);
    }
    const last = open.at(-1)!;
    last.nodes.push(text.slice(from));
    if (open.length > 1) failTemplate(text, last.at, `${showTag(last.text)} has no ${showTag(`{{/${last.name}}}`)}`);
  }

  /** The names, as written, of variables and sections that are nowhere in the data. */
  missingIn(data: unknown) {
    const tags = new Set<Tag>();
    this.render(data, tags);
    const tagsIn = ({ nodes }: Tag): Tag[] =>
      nodes.flatMap((node) => typeof node === 'string' ? [] : [node, ...tagsIn(node)]);
    const missing = tagsIn(this.#root).filter((tag) => tag.sigil !== '^' && !tags.has(tag));
    return [...new Set(missing.map(({ name }) => name))];
  }

  /**
   * The text for some data, and whether any variable was found in the data. A text that becomes too long or takes too
   * many steps is cut, and ends with an ellipsis.
   * @param data as JSON.parse returns it.
   * @param found gets the tags whose values are found.
   */
  render(data: unknown, found?: Set<Tag>) {
    let text = '';
    let hasFound = false;
    let leftBytes = RENDER_LIMIT_BYTES;
    let leftSteps = Math.min(RENDER_LIMIT_STEPS, JSON.stringify(data).length * this.#root.text.length);
    const isSpent = () => leftBytes < 0 || leftSteps < 0;
    const write = (piece: string) => {
      text += piece;
      leftBytes -= Buffer.byteLength(piece);
    };
    const renderNodes = ({ nodes }: Tag, contexts: readonly unknown[]) => {
      for (const node of nodes) {
        if (isSpent()) return;
        if (typeof node === 'string') write(node);
        else renderTag(node, contexts);
      }
    };
    const renderTag = (tag: Tag, contexts: readonly unknown[]) => {
      leftSteps -= contexts.length + tag.path.length; // at most as many lookups follow
      // The first part of a name is looked up from the innermost context outwards. Each further part is looked up in
      // the value of the part before it.
      const owner = contexts.findLast((context) => memberOf(context, tag.path[0]!) !== undefined);
      const value = tag.path.reduce(memberOf, owner);
      hasFound ||= !/[#^]/.test(tag.sigil) && value !== undefined;
      if (value !== undefined) found?.add(tag);
      // A section is rendered for each element of a list. For any other value it is rendered once, but not for null,
      // '', false and 0.
      const items = Array.isArray(value) ? value : [value].filter(Boolean);
      if (tag.sigil === '^') return items.length > 0 ? undefined : renderNodes(tag, contexts);
      if (tag.sigil !== '#') return write(toText(value));
      for (const item of items) {
        leftSteps--;
        if (isSpent()) return;
        renderNodes(tag, [...contexts, item]);
      }
    };
    renderNodes(this.#root, [data]);
    return { text: cutText(text, isSpent()), hasFound };
  }
}

/**
 * A member of the data itself. Members that JavaScript adds, such as `constructor` or the length of a list, are not
 * enumerable and so not found. The empty name stands for the value itself.
 */
function memberOf(value: unknown, name: string) {
  if (name === '') return value;
  const isOwn = typeof value === 'object' && value !== null && Object.prototype.propertyIsEnumerable.call(value, name);
  return isOwn ? (value as JsonObject)[name] : undefined;
}

/** The text of a variable's value: an object as JSON, null and a missing value as nothing. */
function toText(value: unknown) {
  return typeof value === 'object' && value !== null ? JSON.stringify(value) : String(value ?? '');
}

/** Truncates a text that is too long, but never inside a character. The ellipsis that it adds has three bytes. */
function cutText(text: string, isCut = Buffer.byteLength(text) > RENDER_LIMIT_BYTES) {
  return isCut ? `${wholeCharacters(Buffer.from(text).subarray(0, RENDER_LIMIT_BYTES - 3))}…` : text;
}

/** The mistake in a tag, if there is one. @param open the sections that are open where the tag stands. */
function mistakeInTag({ text, sigil, name }: Tag, open: readonly Tag[]) {
  if (text === '{{') return 'a "{{" has no "}}"';
  const tag = showTag(text);
  if (/[>=<$]/.test(sigil)) return `${tag}: partials, blocks and other delimiters are not supported`;
  if (name === 'else') return `${tag}: there is no else; write {{^name}} … {{/name}}`;
  if (/\[\d*\]/.test(name)) return `${tag} has a bracket: write {{alerts.0.status}} for {{alerts[0].status}}`;
  if (!TAG_NAME.test(name)) {
    return `${tag} has no name, or one with a space, a brace or an empty part in it; there are no helpers such as "#if"`;
  }
  if (/[#^]/.test(sigil) && open.length > NESTING_LIMIT) {
    return `sections are nested more than ${NESTING_LIMIT} levels deep`;
  }
  const section = open.at(-1)!;
  if (sigil !== '/' || name === section.name) return undefined;
  if (open.length === 1) return `${tag} closes a section that is not open`;
  return `${tag} stands where ${showTag(`{{/${section.name}}}`)} is expected`;
}

/**
 * Shows a tag in a message. As with `showValue`, a long tag is not shown, because it may be a misplaced secret. The
 * four braces do not count towards the length.
 */
function showTag(tag: string) {
  return tag.length < SECRET_MIN_LENGTH + 4 ? JSON.stringify(tag) : 'a tag';
}

/** @param at where in the template the mistake is. */
function failTemplate(text: string, at: number, why: string): never {
  throw new UsageError(`${placeAfter(text.slice(0, at))}: ${why}`);
}

/**
 * Reads a template, or a list of its lines. A mistake in it is reported when the gateway starts, not when the first
 * alert arrives.
 */
function readTemplate(value: unknown) {
  const lines = [value].flat();
  ensure(
    lines.every((line) => typeof line === 'string') && lines.join('').trim() !== '',
    'must be a template: text with {{names}} in it, or a list of its lines',
  );
  return new Template(lines.join('\n'));
}

// #endregion

// #region POLICY

/** The keys of a body whose value is a list of strings. An `argument` in a list may also be a number. */
const LIST_KEYS = {
  recipients: 'recipient',
  members: 'member', // a member of a group can be written to, and reads the group
  admins: 'member',
  answers: 'argument', // of a poll
  selected_answers: 'argument', // the votes
  base64_attachments: 'attachment',
} as const;

/**
 * The keys of a body that the gateway checks, because the backend acts on them, with the role of each. Except for the
 * lists, their values are strings.
 */
const KEY_ROLES = {
  ...LIST_KEYS,
  auth: 'credential',
  number: 'sender',
  recipient: 'recipient', // undocumented in /v2/send: the backend adds it to recipients
  base64_attachment: 'attachment',
  base64_thumbnail: 'attachment', // stored like an attachment; counts only within `link_preview`
  link_preview: 'object', // the only value that is an object
} as const;

type BodyKey = keyof typeof KEY_ROLES;

/**
 * The other fields of a body, and the parameters of a query, that the backend reads, by route. What stands in neither
 * table is closed to a token with `senders` or `recipients`, because another backend, or a newer one, may read a
 * recipient or an account in it.
 */
const ROUTE_FIELDS = setsOfWords({
  '/v2/send': MESSAGE_FIELDS.filter((name) => !(name in KEY_ROLES)).join(' '), // those are checked, and in no query
  '/v1/send': 'message is_group',
  '/v1/receive/:number':
    'timeout max_messages ignore_attachments ignore_stories ignore_avatars ignore_stickers send_read_receipts',
  '/v1/reactions/:number': 'reaction target_author timestamp',
  '/v1/receipts/:number': 'receipt_type timestamp',
  '/v1/remote-delete/:number': 'timestamp',
  '/v1/polls/:number': 'question allow_multiple_selections poll_timestamp',
  '/v1/polls/:number/vote': 'poll_author poll_timestamp',
  '/v1/sticker-packs/:number': 'pack_id pack_key',
  '/api/v1/events': 'account',
  '/v1/search': 'numbers',
  '/v1/search/:number': 'numbers',
  '/v1/groups/:number': 'expand name description permissions group_link expiration_time',
  '/v1/groups/:number/:groupid': 'expand name description permissions group_link expiration_time base64_avatar',
  '/v1/groups/:number/:groupid/pin-message': 'target_author timestamp duration',
  '/v1/configuration': 'logging',
  '/v1/configuration/:number/settings': 'trust_mode',
  '/v1/register/:number': 'use_voice captcha',
  '/v1/register/:number/verify/:token': 'pin',
  '/v1/unregister/:number': 'delete_account delete_local_data',
  '/v1/qrcodelink': 'device_name qrcode_version',
  '/v1/qrcodelink/raw': 'device_name',
  '/v1/accounts/:number/rate-limit-challenge': 'challenge_token captcha',
  '/v1/accounts/:number/settings': 'discoverable_by_number share_number',
  '/v1/accounts/:number/username': 'username',
  '/v1/accounts/:number/pin': 'pin',
  '/v1/devices/:number': 'uri',
  '/v1/devices/:number/local-data': 'ignore_registered',
  '/v1/profiles/:number': 'name base64_avatar about',
  '/v1/identities/:number/trust/:numbertotrust': 'verified_safety_number trust_all_known_keys',
  '/v1/contacts/:number': 'all_recipients name expiration_in_seconds',
  '/v1/contacts/:number/:uuid': 'all_recipients',
});

/** The fields of the objects within a body. An object in any other field is not looked into. */
const OBJECT_FIELDS = setsOfWords({
  mentions: 'start length author',
  quote_mentions: 'start length author',
  link_preview: 'url title description',
  permissions: 'add_members edit_group send_messages',
  logging: 'level',
});

/** Each row of words as a set. */
function setsOfWords(rows: Record<string, string>) {
  return new Map(Object.entries(rows).map(([name, words]) => [name, new Set(words.split(' '))]));
}

/**
 * A key of a body that is checked, with its decoded value. Of an attachment, the value is only the beginning,
 * with its metadata.
 */
interface Field {
  readonly key: BodyKey;
  /** Undefined if the whole body has no `number`. */
  readonly value: string | undefined;
}

/** Any other key of a body, and the field in whose object it stands, '' for the body itself. */
interface OtherField {
  readonly key: 'other';
  readonly name: string;
  readonly within: string;
}

/** The account and the recipients that a list allowed in a body; `*` where there was no list. A reload may take one away. */
type AllowedBy = Record<'senders' | 'recipients', Set<string>>;

/** How many groups are noted that only `group.*` allows. */
const NOTED_LIMIT = 100;

/** Checks fields of a request's body, by the rules that are in force: it may have begun under others. */
function checkFieldsOf(exchange: Exchange, fields: readonly (Field | OtherField)[]) {
  if (fields.length === 0) return;
  const allowedBy = exchange.allowedBy ??= { senders: new Set(), recipients: new Set() };
  const token = tokenInForce(exchange) ?? exchange.token!;
  checkFields(token, exchange.target!.route, fields, allowedBy);
}

/** The token of a request as the rules that are in force have it, if they do. */
function tokenInForce({ core: { rules }, token }: Exchange) {
  return rules.anonymous ?? rules.tokens.get(token!.digest);
}

/**
 * Checks the fields that were found since the last call: each first for what no token may send, then by the token's
 * senders and recipients. A large body comes in several calls, so a rule about a whole body cannot be here.
 * @param allowedBy gets the entries of the token's lists that allow them.
 */
function checkFields(
  token: Token,
  route: Route | undefined,
  fields: readonly (Field | OtherField)[],
  allowedBy?: AllowedBy,
) {
  const isSend = route?.group === 'send';
  // If the token gets lists while the request waits, nothing of the body was held to them.
  if (!token.senders) allowedBy?.senders.add('*');
  if (!token.recipients) allowedBy?.recipients.add('*');
  for (const field of fields) {
    if (field.key === 'other') {
      const refusal = refusalOfUnknown(token, route, field.name, field.within);
      if (refusal) throw refusal;
      continue;
    }
    const { key, value } = field;
    const role = KEY_ROLES[key];
    if (value === undefined && isSend && token.senders) {
      throw badField(key, 'must name the sending account, because this token may not use all of them');
    }
    if (role === 'sender' && value && token.senders) allowedBy?.senders.add(value);
    // The backend ignores an empty `recipient`.
    if (value === undefined || (isSend && key === 'recipient' && value === '')) continue;
    const isRecipient = role === 'recipient' || role === 'member';
    // A path without a row may have groups and names: a token with a list cannot use it.
    const takesGroup = role !== 'member' && (route === undefined || declares(route, 'to-groups'));
    const takesName = route === undefined || declares(route, 'to-names');
    const unsafe = role === 'attachment' ? mistakeInAttachment(value) : mistakeInArgument(value);
    const mistake = unsafe ?? (isRecipient && mistakeInRecipient(value, takesGroup, takesName));
    if (mistake) throw badField(key, mistake);
    if (role === 'sender' && token.senders?.has(value) === false) {
      throw withDetail('sender_not_allowed', `${PROBLEMS.sender_not_allowed[1]}${hintForNumber(value)}`);
    }
    if (!isRecipient) continue;
    const refusal = refusalOfRecipient(token, value);
    if (refusal) throw refusal;
    if (!allowedBy || !token.recipients) continue;
    // A body of 100 MB may have a million groups.
    const isNoted = token.recipients.has(value) || allowedBy.recipients.size < NOTED_LIMIT;
    allowedBy.recipients.add(isNoted ? value : 'group.*');
  }
}

/**
 * The problem if a confined token uses a field, or a parameter of the query, that the gateway does not know.
 * @param within the field in whose object it stands.
 */
function refusalOfUnknown({ senders, recipients }: Token, route: Route | undefined, name: string, within = '') {
  if (!senders && !recipients) return undefined;
  const known = within ? OBJECT_FIELDS.get(within) : ROUTE_FIELDS.get(route?.template ?? '');
  if (known?.has(foldKey(name))) return undefined;
  // A name may be a phone number or a secret by mistake.
  const shown = /^[a-z][\w-]*$/i.test(name) ? nameToShow(name) : '…';
  return badField(
    shown,
    'is unknown to the gateway, so only a token without "senders", "recipients" and "defaults" may use it',
  );
}

/** A key as Go's encoding/json folds it: apart from capitals, only the long s and the Kelvin sign become ASCII letters. */
function foldKey(name: string) {
  return name.replaceAll('\u017f', 's').toLowerCase();
}

/** The mistake in a value that becomes an argument of signal-cli, where "-" begins an option. */
function mistakeInArgument(value: string) {
  if (value === '') return 'may not be empty';
  if (value.startsWith('-')) return 'may not begin with "-"';
  return /\p{Cc}/u.test(value) ? 'may not contain control characters' : undefined;
}

/**
 * The mistake in a recipient that the backend or signal-cli would turn into another one.
 * @param takesGroup whether it may be a group.
 * @param takesName whether it may be a user name.
 */
function mistakeInRecipient(value: string, takesGroup: boolean, takesName: boolean) {
  if (/^ +\d/.test(value)) return 'may not begin with a space; in a form the "+" of a number is written %2B';
  if (isInternalId(value)) return `holds a group's "internal_id"; its "id" is needed, which is "group.…"`;
  // Attack: with "is_group", /v1/send decodes any base64 and makes it an argument of signal-cli. The pattern matches
  // the base64 of a text that begins with "-": that byte is all of "L" and the first two bits of the next letter.
  if (!takesGroup && /^L[Q-Za-f][A-Za-z0-9+/=]*$/.test(value)) return 'may not begin with "-" when it is decoded';
  // Whether or not the name is on a list, so that the answer tells nothing about the list.
  if (!takesName && kindOf(value) === 'a user name') {
    return 'may not be a user name here: signal-cli would dial its digits';
  }
  if (!value.startsWith('group.')) return undefined;
  if (!takesGroup) return 'must be a person here, not a group';
  return isGroupId(value) ? undefined : 'begins with "group.", but is not the "id" of a group';
}

/**
 * The mistake in the beginning of an attachment, `data:<type>;filename=<name>;base64,`. The backend writes to that name
 * unchecked.
 */
function mistakeInAttachment(text: string) {
  // The backend drops the character before "base64,", whatever it is, so "filename=..xbase64," names "..".
  const isUnsafe = /(?:^|;)filename=(?:[^;]*[/\\\0]|\.{1,2}(?:[^;]?base64,|;|$))/.test(text);
  return isUnsafe ? 'may not name a file with "/", "\\" or NUL, or one called "." or ".."' : undefined;
}

/** The problem if a token may not send to a recipient. It names only the recipient's kind. */
function refusalOfRecipient({ recipients }: Token, value: string) {
  const kind = kindOf(value);
  if (!recipients || recipients.has(value) || (kind === 'a group' && recipients.has('group.*'))) return undefined;
  const detail = `This token may not send to one of these recipients: ${kind} that is not on its list ` +
    '("recipients", or else those in "defaults").';
  const ofGroup = kind === UNKNOWN_KIND ? ' A group is written as its id, "group.…", not as its name.' : '';
  const hint = kind === 'a phone number' ? hintForNumber(value) : ofGroup;
  return withDetail('recipient_not_allowed', detail + hint);
}

/** A further sentence for a phone number that is not in the form of the token's lists. */
function hintForNumber(value: string) {
  return NUMBER.test(value) ? '' : ' Write a phone number as "+" and digits only, such as +4915112345678.';
}

const UNKNOWN_KIND = 'one of no known kind (phone number, user name such as name.01, UUID, group)';

/** The kind of a recipient, for messages. The backend takes anything else for a user name. */
function kindOf(value: string) {
  if (value.startsWith('group.')) return 'a group';
  if (/^\+?[\d ()./-]+$/.test(value)) return 'a phone number';
  if (!PERSON.test(value)) return UNKNOWN_KIND;
  return value.includes('.') ? 'a user name' : 'a UUID';
}

/** Recipients, in as many lists as sends are needed: the backend takes only these together. */
function sendsTo(ids: readonly string[]) {
  const isName = (id: string) => kindOf(id) === 'a user name';
  const persons = ids.filter((id) => !isName(id) && !isGroupId(id));
  return [persons, ids.filter(isName), ...ids.filter(isGroupId).map((id) => [id])].filter((list) => list.length > 0);
}

/** What the defaults of one send can name. */
const ONE_SEND = 'one send goes to phone numbers and UUIDs, or to user names, or to one group: make a token for each';

// #endregion

// #region DAEMON
// signal-cli's own daemon takes every command as a JSON-RPC call on one path. A word of `allow` opens the methods of its
// group, each with the parameters that are known here, and all else is closed. signal-cli reads a list under several
// names, takes a string for a list of one, prefers the singular without a word, and ignores what it does not know.
// So the gateway reads the call, checks it, and writes it anew.

/** Those to whom a message goes. */
const RECIPIENTS = 'account recipient[] groupId[] username[] noteToSelf';

/**
 * The methods of signal-cli 0.14.6 by group, with their parameters in camel case and in the singular; `[]` is a list.
 * A method with `*` is closed to a token with `senders` or `recipients`, and with `*` alone it takes any parameters.
 * Of the others, what names a file of the daemon's machine is left out, but `attachment` and `id`, and so are the
 * methods that change groups.
 */
const CALLS = Object.entries<NodeJS.Dict<string>>({
  info: { version: '' },
  send: {
    send:
      `${RECIPIENTS} notifySelf message attachment[] mention[] textStyle[] quoteTimestamp quoteAuthor quoteMessage ` +
      'quoteMention[] quoteTextStyle[] previewUrl previewTitle previewDescription sticker viewOnce editTimestamp noUrgent ' +
      'voiceNote',
  },
  messaging: {
    sendReaction: `${RECIPIENTS} emoji targetAuthor targetTimestamp remove`,
    sendTyping: 'account recipient[] groupId[] stop',
    sendReceipt: 'account recipient targetTimestamp[] type',
    remoteDelete: `${RECIPIENTS} targetTimestamp`,
    sendPollCreate: `${RECIPIENTS} notifySelf question option[] noMulti`,
    sendPollVote: `${RECIPIENTS} notifySelf pollAuthor pollTimestamp option[] voteCount`,
    sendPollTerminate: `${RECIPIENTS} notifySelf pollTimestamp`,
    sendPinMessage: `${RECIPIENTS} notifySelf targetAuthor targetTimestamp pinDuration`,
    sendUnpinMessage: `${RECIPIENTS} notifySelf targetAuthor targetTimestamp`,
    listGroups: 'account groupId[] detailed',
    getAttachment: '* account id', // those of all accounts
    getUserStatus: '*',
    listStickerPacks: '*',
  },
  setup: Object.fromEntries(
    ('addDevice deleteLocalAccountData finishChangeNumber finishLink listAccounts listContacts listDevices ' +
      'listIdentities register removeContact removeDevice removePin sendContacts sendSyncRequest setPin ' +
      'startChangeNumber startLink submitRateLimitChallenge trust unregister updateAccount updateConfiguration ' +
      'updateContact updateDevice updateProfile verify').split(' ').map((method) => [method, '*']),
  ),
}).flatMap(([group, methods]) =>
  Object.entries(methods).map(([method, row = '']) => {
    const words = row.split(' ').filter((word) => word !== '' && word !== '*');
    /** Whether each is a list; undefined if there may be any. */
    const parameters = row === '*'
      ? undefined
      : new Map(words.map((word) => [word.replace('[]', ''), word.endsWith('[]')]));
    return { group, method, isForAll: !row.startsWith('*'), parameters };
  })
);

type Call = (typeof CALLS)[number];

/** Whether a token may make every call, known or not: its pattern opens the path, and it has no lists. */
function allowsAllCalls(token: Token, target: Target) {
  return target.route === RPC_ROUTE && !token.senders && !token.recipients && findGrant(token, target) === 'explicit';
}

/** Reads a call, checks it, and writes it anew, so that the daemon reads what was checked. */
async function makeCall(exchange: Exchange, body: RequestBody) {
  const content = await body.readWhole(CALL_LIMIT_BYTES);
  return buildInTurn(exchange, body, content.length <= SHORT_BYTES, () => {
    const { rest, restore } = takeData(content);
    if (rest.length > PAYLOAD_LIMIT_BYTES) {
      const most = showSize(PAYLOAD_LIMIT_BYTES);
      throw withDetail(
        'body_too_large',
        `The call is larger than ${most} without the unescaped data of its attachments.`,
      );
    }
    if (/^\s*\[/.test(rest.toString('latin1', 0, 100))) {
      throw badJson('A batch of calls is not accepted; send one at a time.');
    }
    const { jsonrpc, method, params = {}, id } = parseJson(rest).value;
    if (typeof id === 'number' && Math.abs(id) > Number.MAX_SAFE_INTEGER) throw badField('id', 'is too large a number');
    if (id !== undefined) exchange.callId = JSON.parse(restore(JSON.stringify(id)));
    if (!isObject(params)) throw badField('params', 'must be an object with the parameters of the method');
    checkCall(exchange, method, params);
    return Buffer.from(restore(JSON.stringify({ jsonrpc, method, params, id })));
  });
}

/**
 * Matches an attachment's data in base64 (RFC 4648 4), if it is long: many short ones would be many matches. A group of
 * four letters that repeats would exhaust the stack (findings/base64-checks-overflow-on-an-attachment.sh).
 */
const LONG_DATA = /;base64,([A-Za-z\d+/]{1024}[A-Za-z\d+/]*)/g;

/**
 * Takes the long data of attachments out of a call, so that parsing it costs no more than a payload does. Such data has
 * no quote and no escape, so it ends no string, and what is left is read as before. In its place stands a marker that
 * no client can guess. It is base64, too, and leaves the length modulo 4 as it was.
 */
function takeData(content: Buffer) {
  const marker = randomBytes(12).toString('hex');
  const taken: string[] = [];
  const rest = content.toString('latin1').replace(LONG_DATA, (_, data: string) => {
    const takenLength = data.length - data.length % 4;
    const index = taken.push(data.slice(0, takenLength)) - 1;
    return `;base64,${marker}${String(index).padStart(8, '0')}${data.slice(takenLength)}`;
  });
  if (taken.length === 0) return { rest: content, restore: (text: string) => text }; // as most calls
  const markers = new RegExp(`${marker}(\\d{8})`, 'g');
  const restore = (text: string) => text.replace(markers, (_, index) => taken[Number(index)]!);
  return { rest: Buffer.from(rest, 'latin1'), restore };
}

function checkCall(exchange: Exchange, method: unknown, params: JsonObject) {
  const token = tokenInForce(exchange) ?? exchange.token!;
  const call = CALLS.find((each) => each.method === method);
  if (!call) {
    throw withDetail(
      'endpoint_not_allowed',
      'The gateway does not know this method of signal-cli: only the pattern "POST /api/v1/rpc" opens it, for a token ' +
        'without "senders", "recipients" and "defaults".',
      'unknown_method',
    );
  }
  exchange.call = call;
  const refusal = refusalOfMethod(token, call);
  if (refusal) throw refusal;
  const { parameters } = call;
  if (!parameters) return;

  const values = new Map<string, unknown>();
  for (const [name, value] of Object.entries(params)) {
    const parameter = parameterOf(parameters, name);
    if (values.has(parameter)) throw badField(parameter, 'may be given only once, under one of its names');
    if (value !== null) values.set(parameter, value);
  }
  const account = values.get('account');
  if (account !== undefined && typeof account !== 'string') throw badField('account', 'must be text');
  if (parameters.has('account')) {
    if (token.senders && account === undefined) {
      throw badField('account', 'must name the sending account, because this token may not use all of them');
    }
    checkFieldsOf(exchange, [{ key: 'number', value: account }]);
  }
  for (const [parameter, value] of values) {
    const isList = parameters.get(parameter)!;
    for (const each of isList ? [value].flat() : [value]) checkParameter(exchange, parameter, each, account);
  }
}

/** The problem if a token may no longer make a call that was let in. */
function refusalOfStaleCall(token: Token, { call, isUnreadCall, target }: Exchange) {
  if (isUnreadCall && !allowsAllCalls(token, target!)) return new Problem('endpoint_not_allowed');
  return call && refusalOfMethod(token, call);
}

/** The problem if a token may not use a method. */
function refusalOfMethod({ allow, senders, recipients }: Token, { group, method, isForAll }: Call) {
  if (!allow.groups.has(group)) {
    return group === 'setup' ? new Problem('setup_blocked') : withDetail(
      'endpoint_not_allowed',
      `This token may not call ${method}; the word "${group}" in its "allow" opens it.`,
    );
  }
  if (isForAll || (!senders && !recipients)) return undefined;
  const sentence = `Only a token without "senders", "recipients" and "defaults" may call ${method}.`;
  return withDetail('endpoint_not_allowed', sentence, 'method_without_account');
}

/** The parameter for which a name stands: signal-cli reads a list also as `group-id`, `groupIds` or `group-ids`. */
function parameterOf(parameters: ReadonlyMap<string, boolean>, name: string) {
  const camel = name.slice(0, 100).replace(/-([a-z])/g, (_, letter: string) => letter.toUpperCase());
  if (parameters.has(camel)) return camel;
  const singular = camel.replace(/s$/, '');
  if (parameters.get(singular)) return singular;
  const shown = /^[a-z][\w-]*$/i.test(name) ? nameToShow(name) : '…'; // it may be a phone number by mistake
  const right = [...parameters.keys()].find((known) => known.toLowerCase() === camel.toLowerCase());
  throw badField(shown, right ? `must be spelled "${right}"` : 'is unknown to the gateway for this method');
}

/** Matches a data URI (RFC 2397) that signal-cli can read. Attack: it takes any other for a file of its own machine. */
const DATA_URI =
  /^data:[\w.+-]+\/[\w.+-]+(?:;filename=(?:[^\s\p{C}%;,=/\\"]|%[\dA-Fa-f]{2})+)?;base64,[A-Za-z\d+/]+={0,2}$/u;

/** Checks a value of a parameter, as of a field of the backend that means the same. */
function checkParameter(exchange: Exchange, parameter: string, value: unknown, account: string | undefined) {
  const checkRecipient = (recipient: string) => checkFieldsOf(exchange, [{ key: 'recipient', value: recipient }]);
  if (typeof value === 'object') throw badField(parameter, 'may not be an object, or a list in a list');
  if (parameter === 'noteToSelf') {
    if (typeof value !== 'boolean') throw badField(parameter, 'must be true or false');
    const isListed = (tokenInForce(exchange) ?? exchange.token!).recipients !== undefined;
    if (value && isListed && account === undefined) throw badField('account', 'must be named with "noteToSelf"');
    if (value && account !== undefined) checkRecipient(account);
  }
  if (!['recipient', 'groupId', 'username', 'attachment', 'id'].includes(parameter)) return;
  if (typeof value !== 'string') throw badField(parameter, 'must be text');
  if (parameter === 'id') {
    if (!/^[\w-]+(?:\.[\w-]+)*$/.test(value)) throw badField(parameter, 'must be the "id" of an attachment');
  } else if (parameter === 'attachment') {
    if (!DATA_URI.test(value) || value.slice(value.indexOf(',') + 1).length % 4 !== 0) {
      throw badField(parameter, 'must be a data URI, as in data:image/png;filename=a.png;base64,iVBORw0KGgo=');
    }
  } else if (parameter === 'groupId') {
    if (!isInternalId(value)) throw badField(parameter, 'must be the "id" of a group as listGroups has it');
    checkRecipient(`group.${btoa(value)}`); // as the lists have it
  } else {
    const kind = kindOf(value);
    // signal-cli would make a phone number of the digits in a group or a user name.
    if (parameter === 'username' && kind !== 'a user name') throw badField(parameter, 'must be a user name');
    if (parameter === 'recipient' && (kind === 'a group' || kind === 'a user name')) {
      throw badField(parameter, `is ${kind}, which belongs into "groupId" or "username"`);
    }
    checkRecipient(value);
  }
}

// #endregion

// #region BODY SCAN

/** An escape without its backslash, complete or not complete yet. */
const ESCAPE = /^(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})$/;

/** An escape that would separate the metadata of an attachment: "data:image/png;filename=a.png;base64,". */
const SEPARATOR = /^u00(?:2c|3b)$/i;

/** A number, `true`, `false` or `null` (RFC 8259 3 and 6). */
const BARE = /^(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)$/;

/** A table for `findByte`: for each byte, whether the pattern matches it. Many times faster than the pattern. */
function tableOf(pattern: RegExp) {
  return new Uint8Array(256).map((_, byte) => Number(pattern.test(String.fromCharCode(byte))));
}

// The bytes at which a run of plain bytes in a string ends. A quote ends the string, a backslash begins an escape, and
// JSON allows no control character in a string.
const SPECIAL = tableOf(/["\\]|[^ -\xff]/);

/** The bytes that cannot stand in a number, `true`, `false` or `null`. */
const AFTER_BARE = tableOf(/[^0-9a-z.E+-]/);

/**
 * The bytes at which a run of an attachment's data ends: such data may contain no separator. A control character in it
 * passes, for the backend's decoder refuses the document: looking for 36 bytes would take ten times as long as for these.
 */
const DATA_ENDS = Buffer.from('"\\,;');
const ENDS_DATA = tableOf(/["\\,;]/);

/** How many bytes of data are searched one by one, so that many escapes do not make as many searches of a whole chunk. */
const NEAR_BYTES = 1024;

/** The keys that matter. */
const KEYS = new Set<string>(Object.keys(KEY_ROLES));

/** A key that its object has already, and where its second string begins. */
interface RepeatedKey {
  readonly key: string;
  readonly atByte: number;
}

/** An open object or array. The outermost scope is the document itself. */
interface Scope {
  readonly outer: Scope | undefined;
  readonly depth: number;
  readonly close: string; // the bracket that closes the scope
  key: BodyKey | undefined; // the latest key, if it is checked; in an array, the key of the array
  object: string; // the latest key of the body, if OBJECT_FIELDS has it, or else ''; in an array, that of the array
  keys: Set<string> | undefined; // all keys of an object, for `repeatedKeys`
}

/**
 * The longest text that is checked in a JSON body: a key, the value of a key that matters, the beginning of an
 * attachment with its type and file name, a number. Real ones come nowhere near it.
 */
const TEXT_LIMIT_BYTES = 4096;

/**
 * An incremental scanner of one JSON object (RFC 8259). It overwrites the top-level `auth` and reports the fields that
 * matter. It does no I/O and knows no policy. Its results do not depend on how the document is cut into chunks.
 *
 * The caller passes a chunk on only after `proceed` has read it and the fields of `takeFields` were checked. The chunk
 * with the closing brace, and all later ones, waits for `end`. So the backend gets neither a byte of the credential nor
 * a complete document that was refused.
 *
 * The scanner is as strict as RFC 8259, but for control characters in an attachment's data. It expects the backend's
 * decoder to be lenient: Go matches keys without regard to case (Unicode simple folding), and takes the last of
 * duplicate keys. So the scanner refuses, for a key that matters, a duplicate, another spelling that folds to the key,
 * and a value of the wrong type.
 *
 * These fields hold the state of the scan. `#scope` is the innermost open object or array, with the key that matters
 * there. `#text` is the part read so far of a number, of a word, or of a string whose text is needed. In any other
 * string `#text` is undefined. `#state` is the method that reads the next byte. A chunk may end at any byte; each state
 * continues with the next chunk:
 *
 *   #readStructure  one byte between values: white space, or a byte for `#expected`
 *   #readCollected  a run of plain bytes in a string whose text is needed, and the special byte after them
 *   #readStreamed   the same in any other string, and in the data of an attachment
 *   #readEscape     one byte after a backslash, until the escape is complete
 *   #readBare       a number or a word, up to the byte after it, which #readStructure reads
 *
 * `#expected` is the method that reads the next byte between values:
 *
 *   #readValue      at the beginning of the document, and after a colon
 *   #readFirst      after an opening bracket or brace
 *   #readMember     after a comma
 *   #readColon      after a key
 *   #readAfter      after a value, and after the document
 */
class BodyScan {
  /** The top-level `auth`, once it was read completely. */
  auth: string | undefined;
  /** Whether the closing brace of the document was read. */
  isEnded = false;
  /**
   * While this is true, `write` throws bad_field only for `auth`. For all other keys `takeFields` throws it. So an
   * unauthenticated client does not learn which fields are checked.
   */
  defers = false;

  readonly #seen = new Set<string>();
  #hasNumber = false; // not true of `"number": null`
  #fields: (Field | OtherField)[] = [];
  #problem: Problem | undefined; // of the first field that was refused

  #state = this.#readStructure; // returns where the next state begins
  #expected = this.#readValue; // reads the next byte that is not white space
  #scope: Scope = { outer: undefined, depth: 0, close: '', key: undefined, object: '', keys: undefined };
  #text: string | undefined; // with its escapes, one character per byte
  #escape = ''; // the incomplete escape, without its backslash
  #restBytes = 0; // how much white space follows the end

  #chunk!: Buffer;
  #at = 0; // where in the chunk the next step begins
  #offset = 0; // where in the document the chunk begins
  #utf8Tail: Buffer | undefined; // the beginning of a character that the next chunk completes

  #keysDepth = 0; // for `repeatedKeys`: down to which depth keys are compared; a document that streams may be too long
  readonly #repeated: RepeatedKey[] = [];
  #keyBegin = 0; // where in the document the latest key begins

  /** The fields of a whole document. */
  static fieldsOf(document: Buffer) {
    const scan = new BodyScan();
    scan.write(document);
    scan.end();
    return scan.takeFields();
  }

  /**
   * Checks the syntax of a whole document before JSON.parse reads it. No key matters in it, and it is not changed.
   * @param depth down to which keys are compared.
   * @returns the keys that are repeated in their object, of which JSON.parse would drop the first. Of a key that is
   *   longer than TEXT_LIMIT_BYTES, only the beginning is compared.
   */
  static repeatedKeys(document: Buffer, depth: number) {
    const scan = new BodyScan();
    scan.#keysDepth = depth;
    scan.write(document);
    scan.end();
    return scan.#repeated;
  }

  /** The fields found since the last call. */
  takeFields() {
    if (this.#problem) throw this.#problem;
    return this.#fields.splice(0);
  }

  /**
   * Reads a chunk, and overwrites in it the bytes of the value of `auth` with spaces. The document keeps its length,
   * and the backend, which ignores unknown members, gets `"auth":"   "`. The chunk must not have been copied before.
   * After a refusal the scanner must not be used any more.
   */
  write(chunk: Buffer) {
    this.begin(chunk);
    this.proceed(Infinity);
  }

  /** Begins to read a chunk, like `write`, without reading on. */
  begin(chunk: Buffer) {
    this.#chunk = chunk;
    this.#at = 0;
    const bytes = this.#utf8Tail ? Buffer.concat([this.#utf8Tail, chunk]) : chunk;
    const whole = wholeCharacters(bytes);
    // One native call checks the whole chunk. A character may span two or more chunks.
    if (!isUtf8(whole)) {
      if (this.#offset === 0 && chunk[0]! >= 0xfe) this.#fail(0, ''); // UTF-16
      throw badJson('The body is not a JSON object: it is not valid UTF-8.');
    }
    // A copy, because the character may be part of `auth`, and then it is overwritten in the chunk.
    this.#utf8Tail = whole === bytes ? undefined : Buffer.from(bytes.subarray(whole.length));
  }

  /**
   * Reads on in the chunk. What a chunk costs depends on its steps: an attachment's data is one, and a short key five.
   * @param steps how many it takes at most.
   * @returns whether the whole chunk was read.
   */
  proceed(steps: number) {
    let i = this.#at;
    for (; i < this.#chunk.length && steps > 0; steps--) i = this.#state(i);
    this.#at = i;
    if (i < this.#chunk.length) return false;
    this.#offset += i;
    return true;
  }

  end() {
    if (!this.isEnded) this.#fail(0, 'it ends before the object is complete');
    if (!this.#hasNumber) this.#fields.push({ key: 'number', value: undefined });
  }

  /** @param i where in the chunk the mistake is; the message counts from the beginning of the document. */
  #fail(i: number, mistake: string): never {
    const atByte = this.#offset + i;
    // A byte order mark, in UTF-8 or UTF-16, or the NUL next to an ASCII character in UTF-16. None can begin an object.
    const isEncoded = atByte < 2 && [0, 0xef, 0xfe, 0xff].includes(this.#chunk?.[i] ?? 1);
    const why = isEncoded ? 'save it as UTF-8, without a byte order mark' : mistake;
    throw new Problem('bad_json', undefined, {
      detail: `The body is not a JSON object: ${why}, at byte ${atByte}.`,
      syntax: { why, atByte },
    });
  }

  /**
   * Refuses the field that is being read. While `defers` is true, this only notes the problem, and ignores the field.
   */
  #refuse(why: string) {
    const problem = badField(this.#scope.key!, why);
    if (!this.defers || this.#scope.key === 'auth') throw problem; // without `auth` no token will be found
    this.#problem ??= problem;
    this.#scope.key = undefined;
    this.#text = undefined;
  }

  // The grammar (RFC 8259 2). Each method that can be `#expected` reads one byte, which begins or ends something.

  /** Skips white space; gives any other byte to `#expected`. */
  #readStructure(i: number) {
    const byte = this.#chunk[i]!;
    if (byte !== 0x20 && byte !== 0x0a && byte !== 0x0d && byte !== 0x09) this.#expected(i, String.fromCharCode(byte));
    // The caller keeps what follows the end in memory until the body is complete.
    else if (this.isEnded && ++this.#restBytes > HEAD_LIMIT_BYTES) this.#fail(i, 'too much white space');
    return i + 1;
  }

  /** The first byte of a value shows its type. The document's value must be an object. */
  #readValue(i: number, char: string) {
    const { depth, key, close } = this.#scope;
    if (depth === 0 && char !== '{') this.#fail(i, 'it must begin with "{"');
    const why = key && mistakeInType(key, close === ']', char);
    if (why) this.#refuse(why);
    this.#expected = this.#readAfter;
    if (char === '"') return this.#beginString(this.#scope.key !== undefined);
    if (char === '{' || char === '[') return this.#beginScope(i, char);
    this.#state = this.#readBare;
    this.#text = char;
  }

  /** Each open object or array has a scope in memory, so their number is limited. */
  #beginScope(i: number, char: string) {
    const outer = this.#scope;
    const depth = outer.depth + 1;
    if (depth > NESTING_LIMIT) this.#fail(i, `it is nested more than ${NESTING_LIMIT} levels deep`);
    // An array's elements belong to the array's key. The literal has no spread, so that all scopes have one shape in
    // V8: with a spread, a document of brackets took twice the time.
    const isArray = char === '[';
    const keys = !isArray && depth <= this.#keysDepth ? new Set<string>() : undefined;
    const close = isArray ? ']' : '}';
    this.#scope = {
      outer,
      depth,
      close,
      key: isArray ? outer.key : undefined,
      object: isArray ? outer.object : '',
      keys,
    };
    this.#expected = this.#readFirst;
  }

  /** The first member or element, or the end of an empty object or array. */
  #readFirst(i: number, char: string) {
    if (char === this.#scope.close) this.#readAfter(i, char);
    else this.#readMember(i, char);
  }

  /** An array's element, or an object's member, which begins with its key. */
  #readMember(i: number, char: string) {
    if (char === this.#scope.close) this.#fail(i, `delete the comma before "${char}"`);
    if (this.#scope.close === ']') return this.#readValue(i, char);
    if (char !== '"') this.#fail(i, 'expected a key in double quotes');
    const { depth, outer, keys } = this.#scope;
    this.#scope.key = undefined;
    this.#scope.object = '';
    this.#keyBegin = this.#offset + i;
    this.#expected = this.#readColon;
    this.#beginString(keys !== undefined || depth === 1 || outer!.object !== '');
  }

  #readColon(i: number, char: string) {
    if (char !== ':') this.#fail(i, 'expected a colon');
    this.#expected = this.#readValue;
  }

  /** After a value: a comma, or the bracket that closes the scope. After the document: only white space. */
  #readAfter(i: number, char: string) {
    const { depth, close, outer } = this.#scope;
    if (depth === 0) this.#fail(i, 'something follows its end');
    if (char === ',') {
      this.#expected = this.#readMember;
      return;
    }
    if (char !== close) this.#fail(i, 'expected a comma, or the closing bracket or brace');
    this.#scope = outer!;
    this.isEnded = depth === 1;
    this.#expected = this.#readAfter;
  }

  // Strings, numbers and words. `#text` collects each key that can matter, the value of each key that does, and each
  // number and word. All other strings stream through, however long they are. A text is collected up to its first byte
  // beyond TEXT_LIMIT_BYTES. Such a key matches none that matters, and such a value is refused. Only an attachment may
  // be longer: its metadata is in the beginning, which was collected, and the rest is data, which streams through.

  #beginString(isCollected: boolean) {
    this.#state = isCollected ? this.#readCollected : this.#readStreamed;
    this.#text = isCollected ? '' : undefined;
  }

  /** Collects a run of plain bytes, and reads the special byte after it; returns where it stopped. */
  #readCollected(i: number) {
    // Exactly up to the limit, so that the result does not depend on the chunks.
    const limit = i + TEXT_LIMIT_BYTES + 1 - this.#text!.length;
    const end = Math.min(findByte(this.#chunk, i, SPECIAL), limit);
    this.#collect(this.#chunk.toString('latin1', i, end));
    this.#mask(i, end);
    return this.#text === undefined ? end : this.#readSpecial(end);
  }

  /** Passes over a run of plain bytes, and reads the special byte after it; returns where it stopped. */
  #readStreamed(i: number) {
    const isData = isAttachment(this.#scope.key);
    return this.#readSpecial(isData ? findDataEnd(this.#chunk, i) : findByte(this.#chunk, i, SPECIAL));
  }

  /** Reads the byte at which a run has ended, unless that is the end of the chunk; returns where it stopped. */
  #readSpecial(i: number) {
    if (i === this.#chunk.length) return i;
    const char = String.fromCharCode(this.#chunk[i]!);
    if (char === '"') {
      this.#state = this.#readStructure;
      if (this.#text !== undefined) this.#endText();
    } else if (char === '\\') {
      this.#mask(i, i + 1);
      this.#state = this.#readEscape;
    } else if (char < ' ') this.#fail(i, 'a string contains a control character');
    else this.#refuseSeparator();
    return i + 1;
  }

  /**
   * Refuses a separator in the data of an attachment. The backend takes everything before the last "base64," for
   * metadata, so the last comma must be in the beginning, which `checkFields` sees.
   */
  #refuseSeparator() {
    this.#refuse(`may have "," and ";" only in its first ${TEXT_LIMIT_BYTES} bytes`);
  }

  /** Overwrites bytes that were read, if they belong to the value of `auth`. */
  #mask(from: number, end: number) {
    if (this.#scope.key === 'auth') this.#chunk.fill(' ', from, end);
  }

  /** Reads one byte after a backslash. `#text` gets only complete escapes, because a part cannot be decoded. */
  #readEscape(i: number) {
    this.#escape += String.fromCharCode(this.#chunk[i]!);
    this.#mask(i, i + 1);
    const escape = this.#escape;
    if (!ESCAPE.test(escape)) this.#fail(i, escape[1] ? 'expected four hexadecimal digits' : 'an unknown escape');
    if (escape[0] === 'u' && escape.length < 5) return i + 1;
    this.#escape = '';
    // UNTIL V8 tells keys apart: once Node 24.21, 26.10 or Deno 2.9 has parsed a key that contains a backslash
    // (`"priorit\\"`), it reads a key with an escape (`"priorit\u00e9"`) as that key, until the process ends. So no
    // document that JSON.parse reads has such a key (findings/v8-json-key-read-as-earlier-key.sh).
    const isKey = this.#keysDepth > 0 && this.#expected === this.#readColon;
    if (isKey && /^(?:\\|u005c)$/i.test(escape)) this.#fail(i, 'a key may not contain a backslash');
    if (this.#text !== undefined) {
      this.#state = this.#readCollected;
      this.#collect(`\\${escape}`);
    } else {
      this.#state = this.#readStreamed;
      if (isAttachment(this.#scope.key) && SEPARATOR.test(escape)) this.#refuseSeparator();
    }
    return i + 1;
  }

  /** Adds to the text. Beyond its limit the text ends, and the rest of the string streams through. */
  #collect(text: string) {
    this.#text += text;
    if (this.#text!.length <= TEXT_LIMIT_BYTES) return;
    this.#state = this.#readStreamed;
    this.#endText();
  }

  /** Decodes the collected text, and handles it: a key, or the value of a key that matters. */
  #endText() {
    const { key } = this.#scope;
    const text = this.#text!;
    if (key && text.length > TEXT_LIMIT_BYTES && !isAttachment(key)) {
      return this.#refuse(`may not be longer than ${TEXT_LIMIT_BYTES} bytes`);
    }
    // Most texts are ASCII without an escape: from the space to "~", without the backslash.
    const isPlain = /^[ -[\]-~]*$/.test(text);
    const value = isPlain ? text : JSON.parse(`"${Buffer.from(text, 'latin1').toString()}"`) as string;
    this.#text = undefined;
    if (!key) return this.#endKey(value);
    if (key === 'auth') this.auth = value;
    else this.#fields.push({ key, value });
    if (key === 'number') this.#hasNumber = true;
  }

  /** Notes a key of the body, or of an object that OBJECT_FIELDS has, or one that is repeated. */
  #endKey(name: string) {
    const { keys } = this.#scope;
    if (keys) {
      if (keys.has(name)) this.#repeated.push({ key: name, atByte: this.#keyBegin });
      return void keys.add(name);
    }
    const key = foldKey(name) as BodyKey;
    const within = this.#scope.outer!.object; // '' for the body itself
    if (within === '' && OBJECT_FIELDS.has(key)) this.#scope.object = key;
    if (!KEYS.has(key) || within !== (key === 'base64_thumbnail' ? 'link_preview' : '')) {
      this.#fields.push({ key: 'other', name, within });
      return;
    }
    this.#scope.key = key;
    if (name !== key) this.#refuse('must be spelled exactly like this');
    else if (this.#seen.has(key)) this.#refuse('may be given only once');
    this.#seen.add(key);
  }

  /** Reads the rest of a number or a word; returns where it stopped. `#readValue` put the first byte into `#text`. */
  #readBare(i: number) {
    const end = findByte(this.#chunk, i, AFTER_BARE);
    const first = i - this.#text!.length;
    this.#text += this.#chunk.toString('latin1', i, Math.min(end, i + TEXT_LIMIT_BYTES));
    const text = this.#text!;
    if (text.length > TEXT_LIMIT_BYTES) this.#fail(i, 'a number is too long');
    if (end === this.#chunk.length) return end;
    if (text.startsWith('+')) this.#fail(first, 'no value begins with "+"; a phone number needs double quotes');
    if (!BARE.test(text)) this.#fail(first, 'expected a value');
    if (this.#scope.key && text !== 'null') this.#endText();
    this.#state = this.#readStructure;
    return end;
  }
}

/**
 * Adds a chunk to a list. A client that sends single bytes must not cost one object per byte, so once the list has more
 * than 32 chunks, small ones are joined, up to 1 KiB.
 */
function gatherChunk(chunks: Uint8Array[], chunk: Uint8Array) {
  const isSmall = chunks.length > 32 && chunks.at(-1)!.length + chunk.length <= 1024;
  chunks.push(isSmall ? Buffer.concat([chunks.pop()!, chunk]) : chunk);
}

/** The bytes without an incomplete UTF-8 character at their end (RFC 3629 3): of `a`, E2, 82 only `a` remains. */
function wholeCharacters(bytes: Buffer) {
  const length = incompleteTailLength(bytes);
  return length === 0 ? bytes : bytes.subarray(0, bytes.length - length);
}

/** How many bytes at the end begin a character that is not complete. */
function incompleteTailLength(bytes: Buffer) {
  for (let length = 1; length <= Math.min(3, bytes.length); length++) {
    const byte = bytes[bytes.length - length]!;
    if (byte < 0x80) return 0;
    if (byte < 0xc0) continue; // not the first of its character
    const neededLength = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
    return length < neededLength ? length : 0;
  }
  return 0;
}

function isAttachment(key: BodyKey | undefined) {
  return key !== undefined && KEY_ROLES[key] === 'attachment';
}

/** What is wrong with the type of a value, by its first byte. Of the keys that matter, only `link_preview` holds objects. */
function mistakeInType(key: BodyKey, inList: boolean, char: string) {
  const role = KEY_ROLES[key];
  let first = '"';
  let type = 'a string in double quotes';
  if (role === 'object') {
    first = '{';
    type = 'an object';
  } else if (key in LIST_KEYS) {
    first = '[';
    type = 'a list of strings in double quotes';
  }
  // The votes of a poll are numbers. A number begins with a digit or "-", which come before ":" in ASCII. The other
  // bytes before ":" begin no value, and #readBare refuses them.
  const mayBeNumber = char < ':';
  const mayBeNull = char === 'n'; // clients send `"base64_attachments": null` for none
  const isRight = inList ? char === '"' || (role === 'argument' && mayBeNumber) : char === first || mayBeNull;
  return isRight ? undefined : `must be ${type}`;
}

/** Finds the first byte from `i` on that is in the table, or the end. */
function findByte(chunk: Buffer, i: number, table: Uint8Array, end = chunk.length) {
  while (i < end && !table[chunk[i]!]) i++;
  return i;
}

/** Finds the first byte from `i` on at which an attachment's data ends, or the end of the chunk. */
function findDataEnd(chunk: Buffer, i: number) {
  // On Deno `indexOf` is JavaScript, and slower than the table.
  const nearEnd = 'Deno' in globalThis ? chunk.length : Math.min(chunk.length, i + NEAR_BYTES);
  const near = findByte(chunk, i, ENDS_DATA, nearEnd);
  if (near < nearEnd) return near;
  let end = chunk.length;
  for (const byte of DATA_ENDS) {
    const at = chunk.indexOf(byte, near);
    if (at >= 0) end = Math.min(end, at);
  }
  return end;
}

// #endregion

// #region RELAY

/** End-to-end fields of the client that the backend does not get. */
const NOT_TO_BACKEND = new Set([
  'authorization',
  // The gateway has obeyed `expect`, sets the length itself, and gives the next two in its X-Forwarded-For. Browsers
  // and proxies copy the URL, which may contain a token, into the next four. Cookies belong to other programs.
  ...('expect content-length forwarded x-real-ip ' +
    'referer x-rewrite-url x-envoy-original-path x-replaced-path cookie').split(' '),
]);

/**
 * Sends the request to the backend once, and its response to the client. There are two phases, and no way back from the
 * second. `connectWithSlot` repeats only `connect`, which writes nothing. `transmit` writes the request.
 * @param isUpgrade whether the request opens a WebSocket.
 */
async function relay(exchange: Exchange, content: Content, isUpgrade: boolean) {
  const takeSocket = isUpgrade && listenEarly(exchange.req.socket);
  let incoming: IncomingMessage | undefined;
  try {
    const outgoing = await connectWithSlot(exchange, requestFor(exchange, content, isUpgrade), isStream(content));
    incoming = await transmit(exchange, outgoing, content, isUpgrade);
    exchange.upstream.slots.release(exchange);
    const length = checkResponseHead(incoming, isUpgrade);
    // UNTIL Node 22 is the oldest: all headers go to writeHead, and none to res.setHeader before that, because Node 20.20
    // would then send only one of several Set-Cookie (findings/node20-writehead-drops-set-cookie.sh).
    const headers = headersForClient(exchange, incoming);
    if (takeSocket && incoming.statusCode === 101) {
      exchange.stage = 'tunnel';
      return openTunnel(exchange, headers, takeSocket(), incoming.socket);
    }
    exchange.respond(incoming.statusCode!, headers, undefined, incoming.statusMessage);
    // A stream may have its first byte long after its head. A body that came with the head is written with it, at once.
    if (length > 0 && incoming.readableLength === 0 && !incoming.complete) exchange.res.flushHeaders();
    await relayBody(exchange, incoming, length);
    // The end must be read, or the connection is not reused.
    incoming.removeAllListeners('readable').resume();
  } catch (error) {
    // A connection whose response was cut off is not reused.
    // UNTIL Node lets `outgoing.destroy()` destroy it: Node 26.10 pools the socket of a complete response
    // (findings/node26-pools-the-socket-of-a-destroyed-request.sh).
    if (incoming?.readableEnded === false) incoming.socket.destroy();
    // Ends the request to the backend too: the backend never gets the last byte of an upload that is refused.
    exchange.end(error instanceof Problem ? error : new Problem('bad_backend_answer', reasonOf(error)));
    throw error;
  } finally {
    exchange.upstream.slots.release(exchange);
  }
}

/** Ends the wait of an upload, because the backend has responded, perhaps before it had the whole body. */
class EarlyResponse extends Error {}

/** The options of node:http for the request to the backend. Each attempt to connect uses the same ones. */
function requestFor(exchange: Exchange, content: Content, isUpgrade: boolean) {
  const { options, prefix } = exchange.rules['backend.url'];
  const { method, path, query } = exchange.target!;
  const headers = outboundHeaders(exchange);
  headers.push(...lengthHeaders(method, content));
  if (isUpgrade) headers.push('connection', 'Upgrade', 'upgrade', 'websocket');
  // UNTIL Node 22 is the oldest: the spread is last, because Node 20 takes ten times as long for one before other fields
  // (findings/node20-spread-before-fields-is-slow.sh).
  return { method, path: `${prefix}${path}${query && '?'}${query}`, headers, ...options };
}

/**
 * Builds the headers for the backend from those of the client, without the body's length. Does not change the request.
 * @returns name and value in turn.
 */
function outboundHeaders({ req, rules, client, requestId, isBuiltMessage }: Exchange) {
  const { url, authorization } = rules['backend.url'];
  const headers = new Map([
    ['host', url.host],
    ['accept-encoding', 'identity'], // so that the response needs no decoding
    ['x-forwarded-for', client],
    ['x-forwarded-proto', 'encrypted' in req.socket && req.socket.encrypted ? 'https' : 'http'],
    ['x-request-id', requestId],
  ]);
  const host = req.headers.host?.replace(/^.*@/, ''); // some clients leave the userinfo of a URL in it
  if (host) headers.set('x-forwarded-host', host);
  if (authorization) headers.set('authorization', authorization);
  if (isBuiltMessage) headers.set('content-type', 'application/json');
  // No field of the client has a name of the gateway's own, so a client can neither set these nor strip them by naming
  // them in Connection.
  const isDropped = (name: string) =>
    headers.has(name) || NOT_TO_BACKEND.has(name) || /^x-(?:forwarded|original)-/.test(name) ||
    (isBuiltMessage && name.startsWith('content-')); // these describe the client's body
  const fields = endToEndFields(req, isDropped);
  for (const [name, value] of headers) fields.push(name, value);
  return fields;
}

/**
 * Connects to the backend when the request has its slot and the gate is open. Only `connect` is repeated.
 * @param isUpload whether the body is large. An upload acquires its slot before its last byte, and not here.
 */
async function connectWithSlot(exchange: Exchange, request: http.RequestOptions, isUpload: boolean) {
  const { core, rules, upstream: { gate, slots } } = exchange;
  const timeoutMs = rules['backend.timeout'];
  const { place } = exchange;
  place.readyMs = performance.now();
  place.slotWaitMs = timeoutMs;
  place.gateWaitMs = declares(exchange.target!.route, 'waits') ? Math.min(rules['backend.wait'], timeoutMs) : 0;
  for (;;) {
    if (!isUpload && slots.enqueue(exchange)) await slots.wait(exchange);
    exchange.throwIfEnded(); // respondUnparsed may have refused a POST in the turn in which it came
    if (gate.isDown) {
      // The slot is released first. The next request in the queue gets it and releases it too, so all wait at the gate
      // in order.
      slots.release(exchange);
      await gate.wait(exchange);
      continue;
    }
    const { outagesEnded } = gate;
    exchange.stage = 'sending';
    try {
      return await connect(exchange, request, Math.min(core.connectTimeoutMs, timeoutMs));
    } catch (error) {
      // If the client leaves while the connection is made, the error looks like a refused connection.
      exchange.throwIfEnded();
      if (!(error instanceof Problem)) {
        const { code, name, message } = error as NodeJS.ErrnoException;
        throw unreachable(code ?? name, message);
      }
      if (LOCAL_FAILURES.includes(error.reason!)) throw error;
      gate.noteFailure(exchange, error, outagesEnded);
    }
  }
}

/**
 * Writes the request on its connection, once. node:http's client neither repeats a request nor follows a redirect.
 * @returns the response, when its head is here.
 */
async function transmit(exchange: Exchange, outgoing: http.ClientRequest, content: Content, isUpgrade: boolean) {
  const { core, rules, target, upstream } = exchange;
  let incoming = undefined as IncomingMessage | undefined;
  let watch: NodeJS.Timeout | undefined;
  const onSent = () => {
    exchange.stage = 'sent';
    watch = setTimeout(() => {
      if (target!.route?.group !== 'receive') warnOfSilence(exchange); // a poll lasts as long as its client asks
      upstream.slots.markOverdue(exchange);
    }, core.slotTimeoutMs);
  };
  const onHead = (message: IncomingMessage) => {
    incoming = message;
    upstream.isAwaited = false;
    // Here, because a request without a client counts too.
    if (target!.route?.group === 'send') core.metrics.countSend(exchange, message.statusCode!);
    if (isStream(content)) exchange.earlyResponse = new EarlyResponse();
    // The body is no longer needed, but the log has the outcome of the request.
    if (exchange.hasLeft) exchange.end(new Problem('client_left', `answered_${message.statusCode}`));
    exchange.stage = 'answered';
    exchange.answeredMs = performance.now();
    exchange.wake();
  };
  outgoing.on('response', (message) => {
    // A response may end before the request does. The backend then does not read the rest of the request.
    message.once('end', () => outgoing.writableEnded || outgoing.destroy());
    onHead(message);
  });
  outgoing.on('upgrade', (message, socket, head) => {
    // node:http no longer owns the socket, so it may neither destroy it with `outgoing` nor listen for its errors.
    exchange.underway = socket.on('error', destroyThis);
    socket.unshift(head); // openTunnel reads it
    onHead(message);
  });
  const onFailure = (error?: Error) => {
    if (!incoming) exchange.end(new Problem('bad_backend_answer', reasonOf(error)));
    // A body without a length that ends by a reset would look complete.
    else if (error && !incoming.complete) exchange.end(new Problem('bad_backend_answer', 'aborted'));
  };
  outgoing.on('error', onFailure);
  const timeoutMs = rules['backend.timeout'];
  try {
    if (isStream(content)) await writeUpload(exchange, outgoing, content, onSent);
    else {
      onSent();
      outgoing.end(content);
    }
    const isHere = () => incoming !== undefined;
    // The handshake of a WebSocket may be ended while it waits, if its route needs no slot: such a route does not act.
    // Any other request may act once it is sent, even if it asks for a WebSocket.
    if (isUpgrade && !needsSlot(exchange)) await exchange.waitInterruptibly(isHere, timeoutMs, 'backend_timeout');
    else await exchange.waitUntil(isHere, timeoutMs, 'backend_timeout');
  } catch (error) {
    if (!(error instanceof EarlyResponse)) throw error;
    exchange.earlyResponse = undefined;
  } finally {
    clearTimeout(watch);
  }
  return incoming!;
}

/** Warns that the backend hangs, which would leave no other line in the log before `backend.timeout`. */
function warnOfSilence({ core, rules }: Exchange) {
  const waiting = core.running.filter(({ stage }) => stage === 'sent').length;
  const backend = rules['backend.url'].url.origin;
  // In words that can be searched for, so with the time of the default.
  warnRarely(core, 'a request has had no answer from the backend for 30 s', { backend, waiting });
}

/**
 * Writes a large body at the backend's pace. Its last byte waits for a slot. Time spent waiting for the client does not
 * count towards `backend.timeout`.
 * @param onSent called just before the last byte is written.
 */
async function writeUpload(
  exchange: Exchange,
  outgoing: http.ClientRequest,
  upload: RequestBody,
  onSent: () => void,
) {
  // UNTIL node:http reads a response that came before a failed write: a backend that responds early and closes with
  // unread bytes loses some of its responses on every runtime (findings/node-http-loses-early-response.sh).
  const { rules, upstream: { slots } } = exchange;
  const write = async (chunk: Uint8Array) => {
    exchange.uploadBytes += chunk.length;
    // Without a limit, one token could fill the backend's memory, because an upload needs no slot before its last byte.
    const ownBytes = sumOf(runningLike(exchange), 'uploadBytes');
    if (ownBytes > 2 * rules['limits.body']) throw new Problem('busy', 'unfinished_uploads');
    await writeChunk(exchange, outgoing, chunk, rules['backend.timeout'], 'backend_timeout');
  };
  for await (const chunk of upload.beginning()) await write(chunk);
  if (slots.enqueue(exchange)) await slots.wait(exchange);
  onSent();
  for (const chunk of upload.end) await write(chunk);
  exchange.uploadBytes = 0;
  outgoing.end();
}

/** The headers for the body's length (RFC 9112 6.3). node:http adds them only to headers that are an object. */
function lengthHeaders(method: string, content: Content) {
  if (!content) return method === 'GET' || method === 'DELETE' ? [] : ['content-length', '0'];
  return content.length === undefined ? ['transfer-encoding', 'chunked'] : ['content-length', String(content.length)];
}

/**
 * Refuses the head of a response that no honest backend sends: with it, a client could hang, take the bytes of one
 * response for those of another, or lose its credential on a redirect.
 * @param isUpgrade whether the client has asked for a WebSocket.
 * @returns the length of the body, Infinity if it is not known.
 */
function checkResponseHead({ statusCode: status = 0, headers }: IncomingMessage, isUpgrade: boolean) {
  const { 'content-length': length, 'content-encoding': encoding = 'identity', upgrade } = headers;
  const isBodiless = status === 204 || status === 205;
  const fault = (reason: string) => new Problem('bad_backend_answer', reason);
  const isAskedUpgrade = isUpgrade && upgrade?.toLowerCase() === 'websocket';
  if (status < 200 && !isAskedUpgrade) throw fault('unasked_upgrade');
  if (status >= 300 && status < 400 && status !== 304) throw fault('redirect');
  if (encoding.toLowerCase() !== 'identity') throw fault('compressed'); // none was asked for
  if (length !== undefined) {
    const isNumber = /^[0-9]+$/.test(length);
    const isContradicted = headers['transfer-encoding'] !== undefined || (isBodiless && length !== '0');
    if (!isNumber || isContradicted) throw fault('bad_length');
  }
  return isBodiless || status === 304 ? 0 : Number(length ?? Infinity);
}

/**
 * Writes the response's body at the client's pace. If the body is cut off, so is the client's connection.
 * @param length Infinity if it is not known.
 */
async function relayBody(exchange: Exchange, incoming: IncomingMessage, length: number) {
  while (exchange.bytesOut < length) {
    const chunk = await readChunk(
      exchange,
      incoming,
      exchange.rules['backend.timeout'],
      'backend_timeout',
      'bad_backend_answer',
    );
    if (!chunk) return;
    exchange.bytesOut += chunk.length;
    nudgeGarbageCollector(chunk);
    // The last chunk is written with the end, so that no response looks complete too early.
    if (exchange.bytesOut === length) exchange.lastPart = chunk;
    else await writeChunk(exchange, exchange.res, chunk, exchange.core.stallTimeoutMs, 'client_left');
  }
}

/** Writes a chunk, and waits until the stream has room for the next. */
async function writeChunk(
  exchange: Exchange,
  stream: http.OutgoingMessage,
  chunk: Uint8Array,
  timeoutMs: number,
  late: ProblemCode,
) {
  let hasRoom = stream.write(chunk);
  if (!hasRoom) {
    stream.once('drain', () => {
      hasRoom = true;
      exchange.wake();
    });
  }
  await exchange.waitUntil(() => hasRoom, timeoutMs, late);
}

/** The smallest chunk for which `nudgeGarbageCollector` runs. */
const COLLECT_FROM_BYTES = 4096;

/**
 * Gives V8 a reason to collect garbage while a body streams. Its chunks lie outside the heap, and V8 would let more
 * than 64 MiB of them gather. A string of a quarter of their size, dropped at once, fills the young generation. With
 * `--max-semi-space-size=4`, which limits it, this still saves 16 to 21 MiB of high water while 100 MB are downloaded.
 */
function nudgeGarbageCollector(chunk: Buffer) {
  if (chunk.length >= COLLECT_FROM_BYTES) chunk.toString('latin1', 0, chunk.length / 4);
}

// #endregion

// #region GATE AND SLOTS
// What stands between the requests and the backend. The gate is shut while the backend is unreachable. The slots limit
// how many requests act at the backend concurrently, because it starts a process for each in normal mode, and parallel
// requests can crash it in json-rpc mode.
//
//   slots.enqueue ──► gate open? ──► connect ──► transmit ──► head, or end of the connection ──► slots.release
//        ▲                │ no          │ refused
//        └── gate.wait ◄──┴─────────────┘   (the slot is given back first)
//
// A large body acquires its slot within `transmit`, before its last byte.

/** The gate and the slots of one `backend.url`. */
class Upstream {
  readonly gate = new Gate();
  readonly slots = new Slots();
  /** Set by `reportBackend`, until anything has answered. `backend_up` is 0 meanwhile. */
  isAwaited = false;
}

function needsSlot({ target }: Exchange) {
  return !declares(target?.route, 'no-slot');
}

/** Failures of this machine, such as running out of files or ports. They show nothing about the backend. */
const LOCAL_FAILURES = 'EMFILE ENFILE EADDRNOTAVAIL ENOBUFS ENOMEM'.split(' ');

/** The first pause between attempts to connect to a backend that is down. Each further one is twice as long. */
const RETRY_PAUSE_MS = 100;

/** The longest pause between such attempts. */
const RETRY_PAUSE_LIMIT_MS = 1000;

/**
 * The gate is shut by a failed `connect`, and opened by a probe that has connected. While the gate is shut, only the
 * probe tries to connect. Requests that may wait do so, for `backend.wait` in total; any other is refused at once.
 *
 * A loop in each request would be shorter. It would connect as often as requests wait, hold a GET back behind waiting
 * sends, and notice the backend's return only with the next request.
 */
class Gate {
  /** How many outages have ended. */
  outagesEnded = 0;
  /** The connection of the probe, while it tries to connect. `connect` sets it. */
  underway: Exchange['underway'];
  #failure: Problem | undefined; // the last one, while the gate is shut
  #waiting: Exchange[] = [];
  #isProbing = false;

  get isDown() {
    return this.#failure !== undefined;
  }

  /** Whether a request waits until the gate opens. */
  isAwaitedBy(exchange: Exchange) {
    return this.#waiting.includes(exchange);
  }

  /**
   * Shuts the gate, because `connect` has failed. The request may then `wait` or try again.
   * @param outagesEnded how many outages had ended when that `connect` began: a failure of an earlier outage is ignored.
   */
  noteFailure({ core, rules }: Exchange, failure: Problem, outagesEnded: number) {
    if (outagesEnded < this.outagesEnded) return;
    const isNew = !this.isDown;
    this.#failure = failure;
    void this.#probe(core, rules);
    const consequence = rules['backend.wait'] > 0 ? ': sends are waiting for it' : '';
    if (isNew) this.#log(core, rules, `the backend is unreachable${consequence}`);
  }

  /** Waits until the gate opens. */
  async wait(exchange: Exchange) {
    const { place } = exchange;
    if (place.gateWaitMs <= 0) throw this.#failure;
    const { outagesEnded } = this;
    this.#waiting.push(exchange);
    void this.#probe(exchange.core, exchange.rules);
    try {
      place.gateWaitMs -= await exchange.waitInterruptibly(
        () => this.outagesEnded > outagesEnded,
        place.gateWaitMs,
        () => this.#failure!,
      );
    } finally {
      this.#waiting = this.#waiting.filter((other) => other !== exchange);
      this.stopIfIdle(exchange.core);
    }
  }

  /** Ends the attempt of a probe that is no longer needed. */
  stopIfIdle(core: Core) {
    if (!this.#isNeeded(core)) this.underway?.destroy();
  }

  /** Whether the probe goes on: not in a shutdown, and for the backend before a reload only while requests wait. */
  #isNeeded(core: Core) {
    return this.isDown && !core.draining && (core.upstream.gate === this || this.#waiting.length > 0);
  }

  /** Tries to connect, as a request does, until that succeeds, and opens the gate then. Writes nothing. */
  async #probe(core: Core, rules: Rules) {
    if (this.#isProbing) return;
    this.#isProbing = true;
    // A new connection, because a kept one would not show whether the backend accepts connections.
    const request = { ...rules['backend.url'].options, agent: false };
    for (let pauseMs = RETRY_PAUSE_MS; this.#isNeeded(core); pauseMs = Math.min(2 * pauseMs, RETRY_PAUSE_LIMIT_MS)) {
      await new Promise((resolve) => setTimeout(resolve, pauseMs).unref());
      if (!this.#isNeeded(core)) break;
      try {
        (await connect(this, request, Math.min(core.connectTimeoutMs, rules['backend.timeout']))).destroy();
        const failure = this.#failure;
        this.#failure = undefined;
        this.outagesEnded++;
        for (const exchange of this.#waiting.sort((a, b) => a.place.readyMs - b.place.readyMs)) exchange.wake();
        this.#log(core, rules, 'the backend is reachable again', { after: failure?.reason });
      } catch (error) {
        if (error instanceof Problem) this.#failure = error;
      }
    }
    this.#isProbing = false;
  }

  #log(core: Core, rules: Rules, message: string, why: object = { reason: this.#failure?.reason }) {
    const isWaiting = ({ upstream, place, uploadBytes, stage }: Exchange) =>
      upstream.gate === this && place.gateWaitMs > 0 && uploadBytes === 0 &&
      (stage === 'waiting' || stage === 'sending');
    const waiting = core.running.filter(isWaiting).length;
    core.log('warn', message, { backend: rules['backend.url'].url.origin, ...why, waiting });
  }
}

/** The place of a request among those that want the backend. Only `connectWithSlot`, Gate and Slots write it. */
interface Place {
  slot: Slot | undefined;
  /** How long the request may still wait for a slot. */
  slotWaitMs: number;
  /** How long it may still wait for a backend that is down. */
  gateWaitMs: number;
  /** When it was ready to be sent, by performance.now(). Requests queue in this order. */
  readyMs: number;
}

/** A slot that a request has acquired. */
interface Slot {
  /** The name of the request's token. */
  readonly token: string;
  /** Whether the request has had no answer for `slotTimeoutMs`. */
  isOverdue: boolean;
}

/**
 * The slots of a backend. With N as `backend.parallel`, at most N requests act at once, and 2N are there with those that
 * hang: a request that hangs is overdue, and no longer counts as acting. One of several tokens gets at most N - 1 and
 * 2N - 1, so its requests leave room for the others, even if all of them hang. With N = 1 it gets one, and the others
 * wait until that is overdue.
 *
 * There is a queue for each token, because in a single one the look for the next request costs as much as there are
 * requests in it.
 */
class Slots {
  /** The requests that wait for a slot, by their token's name, in the order in which they were ready. */
  readonly #queues = new Map<string, Exchange[]>();
  /** By a token's name, the number of its latest slot, counting the slots of all tokens. */
  readonly #latest = new Map<string, number>();
  readonly #slots: Slot[] = []; // that requests have acquired: all counts are made from this list
  #givenCount = 0;

  /** Puts the request in its queue, if it needs a slot. Returns whether it has to `wait`, because none is free. */
  enqueue(exchange: Exchange) {
    const { place } = exchange;
    if (place.slot || !needsSlot(exchange) || exchange.core.rules['backend.parallel'] === Infinity) return false;
    const { name } = exchange.token!;
    const queue = this.#queues.get(name) ?? [];
    queue.splice(queue.findLastIndex((other) => other.place.readyMs <= place.readyMs) + 1, 0, exchange);
    this.#setQueue(name, queue);
    this.serve(exchange.core);
    return place.slot === undefined;
  }

  /** Waits until a request that is in its queue has a slot. */
  async wait(exchange: Exchange) {
    const { place } = exchange;
    try {
      place.slotWaitMs -= await exchange.waitInterruptibly(() => place.slot !== undefined, place.slotWaitMs, 'busy');
    } finally {
      // `serve` has taken it off its queue if it has its slot.
      const { name } = exchange.token!;
      if (!place.slot) this.#setQueue(name, this.#queues.get(name)!.filter((other) => other !== exchange));
    }
  }

  /** Only queues in which a request waits are kept, because `#next` looks at each of them. */
  #setQueue(token: string, queue: Exchange[]) {
    if (queue.length > 0) this.#queues.set(token, queue);
    else this.#queues.delete(token);
  }

  /** Releases the slot, if the request has one. A free slot goes to the next request at once. */
  release({ core, place }: Exchange) {
    const { slot } = place;
    if (!slot) return;
    place.slot = undefined;
    this.#slots.splice(this.#slots.indexOf(slot), 1);
    this.serve(core);
  }

  /**
   * Makes room for another request, because this one hangs: its slot is overdue. A request without a client ends
   * instead.
   */
  markOverdue(exchange: Exchange) {
    const { slot } = exchange.place;
    if (!slot) return;
    if (exchange.hasLeft) return exchange.end(new Problem('client_left'));
    slot.isOverdue = true;
    this.serve(exchange.core);
  }

  /** Gives free slots to waiting requests. */
  serve(core: Core) {
    for (;;) {
      const token = this.#next(core.rules);
      if (!token) return;
      const queue = this.#queues.get(token)!;
      const exchange = queue.shift()!;
      this.#setQueue(token, queue);
      exchange.place.slot = { token, isOverdue: false };
      this.#slots.push(exchange.place.slot);
      this.#latest.set(token, ++this.#givenCount);
      exchange.wake();
    }
  }

  /** The token that gets a free slot: of those that wait, the one whose latest slot is the longest ago. */
  #next({ tokens, 'backend.parallel': parallel }: Rules) {
    if (!hasRoom(this.#slots, parallel, 2 * parallel)) return undefined;
    const ownActingLimit = Math.max(1, parallel - 1);
    const ownLimit = 2 * parallel - 1;
    const hasShare = (token: string) =>
      tokens.size <= 1 || hasRoom(this.#slots.filter((slot) => slot.token === token), ownActingLimit, ownLimit);
    return longestAgo([...this.#queues.keys()].filter(hasShare), (token) => this.#latest.get(token));
  }
}

/** Whether one more slot keeps to both limits: for the requests that act, and for all, those that hang included. */
function hasRoom(slots: Slot[], actingLimit: number, limit: number) {
  const acting = slots.filter(({ isOverdue }) => !isOverdue);
  return acting.length < actingLimit && slots.length < limit;
}

/** The running requests with the same token as one of them. */
function runningLike({ core, token }: Exchange) {
  return core.running.filter((other) => other.token?.name === token?.name);
}

function sumOf(exchanges: Exchange[], kind: 'heldBytes' | 'uploadBytes') {
  return exchanges.reduce((sum, exchange) => sum + exchange[kind], 0);
}

// #endregion

// #region CONNECT

/**
 * Makes a connection to the backend, or takes a kept one. With TLS, the handshake is complete. Writes nothing.
 * @param owner can end the connection by `underway`, which is set before this function returns.
 * @returns the request, to be written by `transmit`.
 * @throws {Error} of the runtime, if a connection cannot even be attempted. Such an error says nothing about the
 *   backend.
 */
function connect(owner: Pick<Exchange, 'underway'>, request: http.RequestOptions, timeoutMs: number) {
  const isTls = request.protocol === 'https:';
  return new Promise<http.ClientRequest>((resolve, reject) => {
    const outgoing = (isTls ? https : http).request(request);
    owner.underway = outgoing;
    // A plain error: only here, and only until the connection is there, it means that nothing was sent.
    const onTimeout = () => outgoing.destroy(Object.assign(new Error(), { code: 'timeout' }));
    let timer: NodeJS.Timeout | undefined; // not for a kept connection
    const onFailure = (error?: Error) => {
      clearTimeout(timer);
      reject(unreachable(reasonOf(error)));
    };
    const onConnect = () => {
      clearTimeout(timer);
      outgoing.off('close', onFailure);
      resolve(outgoing);
    };
    outgoing.on('error', onFailure).on('close', onFailure); // an error may come later, and must have a listener
    outgoing.on('socket', (socket) => {
      socket.off('data', destroyThis); // readBackend added it
      if (!socket.connecting) return onConnect(); // a kept connection
      if (timeoutMs < Infinity) timer = setTimeout(onTimeout, timeoutMs);
      // UNTIL node:http listens for errors while it frees a connection: a write may fail then
      // (findings/node-http-freed-socket-has-no-error-listener.sh).
      socket.on('error', destroyThis).once(isTls ? 'secureConnect' : 'connect', onConnect);
    });
  });
}

/** Why a connection or a request to the backend failed, for the log, without an address or a path. */
function reasonOf(error: unknown) {
  return (error as NodeJS.ErrnoException | undefined)?.code ?? 'failed';
}

function destroyThis(this: Socket) {
  this.destroy();
}

/** @param logged what to do, if a connection cannot even be attempted. */
const unreachable = (reason: string, logged?: string) => new Problem('backend_unreachable', reason, { logged });

// #endregion

// #region WEBSOCKETS
// A WebSocket is an HTTP request until the backend accepts the upgrade. From then on its bytes are relayed unread. They
// need no checks: the backend's only WebSocket, GET /v1/receive, reports received messages and takes no commands. If an
// allowlist opens an unknown route, such as a plugin's, a WebSocket there is not checked either. A token with `senders`
// or `recipients` cannot open such a route.

/** How many chunks a client may send before its WebSocket is open. It should send none (RFC 6455 4.1). */
const EARLY_LIMIT = 16;

/**
 * Reads from a client during its handshake. A socket that is not read does not report that its peer has left.
 * @returns a function that stops the reading. It returns the socket, with the bytes that the client has sent put back.
 *   A client must not send anything before the handshake is complete (RFC 6455 4.1).
 */
function listenEarly(socket: Socket) {
  const early: Buffer[] = [];
  const onData = (chunk: Buffer) => {
    if (early.push(chunk) > EARLY_LIMIT) socket.destroy();
  };
  // A connection that its client has half closed would delay the gateway's shutdown.
  socket.on('data', onData).on('end', destroyThis);
  return () => {
    socket.off('data', onData).off('end', destroyThis);
    socket.unshift(Buffer.concat(early));
    return socket;
  };
}

/**
 * How many unread bytes a WebSocket client may accumulate before it is disconnected. The backend writes to its readers
 * one after the other, so a slow reader would delay all others.
 */
const BACKLOG_LIMIT_BYTES = 1024 * 1024;

/**
 * Sends the backend's 101 to the client and relays bytes both ways. Closes both sides when one closes, fails or falls
 * too far behind, and then logs one line with the reason and the number of bytes.
 */
function openTunnel(exchange: Exchange, headers: readonly string[], socket: Socket, backend: Socket) {
  const { core, requestId, client, token } = exchange;
  let bytesIn = 0;
  let bytesOut = 0;
  let reason = 'ended';
  const close = (why: string) => {
    reason = why;
    socket.destroy();
    backend.destroy();
  };
  exchange.status = 101;
  exchange.res.detachSocket(socket);
  socket.write(responseHead(101, [...headers, 'Connection', 'Upgrade', 'Upgrade', 'websocket']));
  core.tunnels.set(exchange, close);
  for (const side of [socket, backend]) {
    // A quiet WebSocket is not a stalled one. TCP keep-alive detects a peer that is gone.
    side.setTimeout(0).setNoDelay(true).setKeepAlive(true, SILENCE_MS);
    side.on('error', () => close('broken'));
    // After one side has ended its half, the other has limited time to send its last bytes.
    side.once('end', () => setTimeout(close, core.lingerMs, 'ended').unref());
  }
  // `pipe` would pause the backend for a slow client, and the backend writes to all its readers in turn.
  backend.on('data', (chunk) => {
    bytesOut += chunk.length;
    socket.write(chunk);
    if (socket.writableLength > BACKLOG_LIMIT_BYTES) close('too_far_behind');
  });
  for (const event of ['end', 'close']) backend.once(event, () => socket.end());
  socket.on('data', (chunk) => (bytesIn += chunk.length));
  socket.pipe(backend); // a client may be paused: it waits only for itself
  socket.once('close', () => {
    backend.destroy();
    core.tunnels.delete(exchange);
    const ms = Math.round(performance.now() - exchange.beganMs);
    core.log('info', 'websocket closed', { requestId, client, token: token?.name, reason, bytesIn, bytesOut, ms });
  });
}

// #endregion

// #region READING

/**
 * Reads the next chunk of a request's or a response's body. It is cheaper than the async iterator of node:http, because
 * it adds no listener for a message that has already arrived, as most have.
 * @param timeoutMs how long that may take; then the exchange ends with `late`.
 * @param broken the code of the problem if the message is cut off.
 * @param limitBytes the largest chunk to return; the rest stays for the next call.
 * @returns undefined at the end of the message.
 */
async function readChunk(
  exchange: Exchange,
  message: IncomingMessage,
  timeoutMs: number,
  late: ProblemCode,
  broken: ProblemCode,
  limitBytes = Infinity,
): Promise<Buffer | undefined> {
  exchange.throwIfEnded();
  const isNew = message.listenerCount('readable') === 0;
  // A small body often comes in one packet with the headers; node:http parses it after this call.
  if (isNew && !canRead(message)) await undefined;
  if (isNew && !canRead(message)) {
    for (const event of ['readable', 'end', 'close', 'error']) message.on(event, exchange.wake);
  }
  if (!canRead(message)) await exchange.waitUntil(() => canRead(message), timeoutMs, late);
  const chunk = message.read(message.readableLength > limitBytes ? limitBytes : undefined) as Buffer | null;
  if (chunk === null && !isRead(message)) throw new Problem(broken, 'aborted');
  return chunk ?? undefined;
}

/** Whether nothing of a message is left to read, and none is missing. */
function isRead({ readableEnded, complete, readableLength }: IncomingMessage) {
  return readableEnded || (complete && readableLength === 0);
}

/** Whether `read` gives a chunk, or there will be none. */
function canRead(message: IncomingMessage) {
  return message.readableLength > 0 || isRead(message) || message.destroyed;
}

// #endregion

// #region RESPONSES

/**
 * The headers and the body of an error response. The body has the same shape for every problem.
 * @param call whose answer it is: a client of JSON-RPC looks for the sentence in an object.
 */
function problemResponse(problem: Problem, requestId: string, req?: IncomingMessage, call?: { id: unknown }) {
  const { message, code, status, details: { allow, retryAfterMs } } = problem;
  const answer = call
    ? { jsonrpc: '2.0', id: call.id, error: { code: -32000, message }, code, requestId }
    : { error: message, code, requestId };
  const body = `${JSON.stringify(answer)}\n`;
  const headers: OutgoingHttpHeaders = {
    'Content-Type': 'application/json',
    'Content-Length': Buffer.byteLength(body),
    'X-Content-Type-Options': 'nosniff',
    'Cache-Control': 'no-store',
    'X-Request-Id': requestId,
  };
  // Some clients (wget, Jetty) send a credential only after a challenge. A browser is not offered Basic: it would ask
  // for a password, remember it, and add it to the requests of any page. RFC 6750 3 requires a parameter after Bearer;
  // Guile cannot read a 401 without one.
  if (status === 401) {
    const bearer = 'Bearer realm="signal"';
    headers['WWW-Authenticate'] = req && isFromBrowser(req) ? [bearer] : ['Basic realm="signal"', bearer];
  }
  if (allow) headers['Allow'] = allow.join(', ');
  if (retryAfterMs) headers['Retry-After'] = Math.ceil(retryAfterMs / 1000);
  return { headers, body };
}

/**
 * The gateway's own headers of a response. With them, a page of an origin on `cors` can read the response. There is no
 * Access-Control-Allow-Credentials, because a page must hold its own token: a password that the browser remembers is
 * not the page's. Two Origin headers arrive as one value that equals no origin.
 */
function ownHeaders({ req, rules, requestId }: Exchange) {
  const headers: Record<string, string> = { 'X-Request-Id': requestId };
  const { origin = '' } = req.headers;
  if (rules.cors.has(origin)) {
    headers['Access-Control-Allow-Origin'] = origin;
    headers['Access-Control-Expose-Headers'] = 'Retry-After, X-Request-Id';
    headers['Vary'] = 'Origin';
  }
  return headers;
}

/** Media types that a page shows without running or loading anything. SVG is not one, nor is any other XML. */
const MEDIA_TYPE = /^(audio|video|image)\/(?!svg|[\w.+-]*xml)[\w.+-]+ *(?:;[^,]*)?$/;

/**
 * The headers of a relayed response: the gateway's own, and the backend's that these do not replace.
 *
 * Attack: the backend serves an attachment as the HTML or SVG that it is, and its sender knows the URL. A script in it
 * would run in the gateway's origin. Even an <img> in it could call the gateway with the token of the path method. So
 * no response to a GET may run or load anything. Audio and video get no policy, because
 * Chromium would not play them; they cannot run a script. A playlist is sent as text, because Chromium would play it
 * automatically and fetch the URLs in it. An attachment or avatar that is not audio, video or an image is a download,
 * because a click on a link in it would use the token of the path method.
 * @param incoming the backend's response.
 * @returns name and value in turn.
 */
function headersForClient(exchange: Exchange, incoming: IncomingMessage) {
  const { req: { method }, target, isBuiltMessage } = exchange;
  const { statusCode: status = 0, rawHeaders } = incoming;
  const own = ownHeaders(exchange);
  if (method === 'GET') {
    own['X-Content-Type-Options'] = 'nosniff';
    // Otherwise browsers keep received messages on disk, and a cache could answer a send by GET.
    if (isBuiltMessage || headerValues(rawHeaders, 'cache-control').length === 0) own['Cache-Control'] = 'no-store';
    let type = headerValues(rawHeaders, 'content-type').at(-1) ?? ''; // the last of several counts
    if (/mpegurl/i.test(type)) own['Content-Type'] = type = 'text/plain';
    const [, kind = ''] = MEDIA_TYPE.exec(type.toLowerCase()) ?? [];
    if (kind !== 'audio' && kind !== 'video') {
      own['Content-Security-Policy'] = "default-src 'none'; style-src 'unsafe-inline'; sandbox";
    }
    // Only a file that is there: on a 404 this header would reveal to another site which attachments exist.
    const isFile = status >= 200 && status < 300 && isStrangersFile(target!);
    if (kind === '' && isFile) own['Content-Disposition'] = 'attachment';
  }
  const replaced = Object.keys(own).map((name) => name.toLowerCase()).filter((name) => !ADDED_UP.includes(name));
  // Only `cors` decides which origins may read a response. Some proxies in front of a backend send "*".
  const isDropped = (name: string) => name.startsWith('access-control-') || replaced.includes(name);
  const fields: string[] = [];
  for (const name in own) fields.push(name, own[name]!);
  fields.push(...endToEndFields(incoming, isDropped));
  return fields;
}

/** The backend's fields of these names are kept next to the gateway's. */
const ADDED_UP = ['vary', 'content-security-policy'];

/** Hop-by-hop fields: RFC 9110 7.6.1, and those that proxies and HTTP/2 define. */
const HOP_BY_HOP = new Set(
  ('connection transfer-encoding te trailer upgrade proxy-authenticate proxy-authorization ' +
    'keep-alive proxy-connection proxy-authentication-info http2-settings').split(' '),
);

/**
 * The fields of a message that are not only for this hop: not hop-by-hop, nor named in its Connection header.
 * @param isDropped whether a field goes too, by its name in lower case.
 * @returns name and value in turn.
 */
function endToEndFields({ headers, rawHeaders }: IncomingMessage, isDropped: (name: string) => boolean) {
  const named = new Set(headers.connection?.toLowerCase().split(/[ \t,]+/));
  const fields: string[] = [];
  for (let i = 0; i < rawHeaders.length; i += 2) {
    const name = rawHeaders[i]!.toLowerCase();
    if (!HOP_BY_HOP.has(name) && !named.has(name) && !isDropped(name)) fields.push(rawHeaders[i]!, rawHeaders[i + 1]!);
  }
  return fields;
}

/**
 * All values of a header: `req.headers` keeps only the first Authorization.
 * @param fields name and value in turn.
 */
function headerValues(fields: readonly string[], name: string) {
  const values: string[] = [];
  for (let i = 0; i < fields.length; i += 2) {
    const field = fields[i]!;
    if (field.length === name.length && field.toLowerCase() === name) values.push(fields[i + 1]!);
  }
  return values;
}

/**
 * Whether a browser sent a request. No page can remove these headers. Over plain http a browser's GET has neither
 * Sec-Fetch-Site nor Origin, so its User-Agent decides; PowerShell's begins with "Mozilla/" too, but in a POST a
 * browser sends Origin.
 */
function isFromBrowser({ method, headers }: IncomingMessage) {
  if ('sec-fetch-site' in headers || 'origin' in headers || 'upgrade-insecure-requests' in headers) return true;
  return (method === 'GET' || method === 'HEAD') && headers['user-agent']?.startsWith('Mozilla/');
}

/**
 * The head of a response as bytes, for a socket that node:http no longer serves.
 * @param fields name and value in turn. None contains a line feed, because they are the gateway's own, or node:http
 *   parsed them.
 */
function responseHead(status: number, fields: readonly unknown[]) {
  let head = `HTTP/1.1 ${status} ${http.STATUS_CODES[status]}\r\n`;
  for (let i = 0; i < fields.length; i += 2) head += `${fields[i]}: ${fields[i + 1]}\r\n`;
  return Buffer.from(`${head}\r\n`, 'latin1');
}

/**
 * Whether a path leads to a file that a stranger may have sent: an attachment, or the avatar of a contact or a group.
 */
function isStrangersFile({ segments }: Target) {
  return segments.at(-1) === 'avatar' || (segments.length > 2 && prefixOf(segments) === 'v1/attachments');
}

/** Whether a request has a body (RFC 9112 6.3). */
function hasBody({ headers }: IncomingMessage) {
  return headers['transfer-encoding'] !== undefined || (headers['content-length'] ?? '0') !== '0';
}

/**
 * Ends the response. If the request has not arrived completely, its rest is read and discarded first, because a
 * connection that is closed with unread bytes is reset, and the reset can overtake the response. node:http alone would
 * destroy the connection. A trusted proxy gets its response only then: Caddy, Traefik and Envoy close their client's
 * connection after an early one, and some clients see a reset in its place. After the end, the client has `stallTimeoutMs` to read what is still unread of the response.
 */
async function endResponse({ core, req, res, lastPart, stage, token, rules, bytesIn }: Exchange) {
  if (stage === 'tunnel') return;
  req.removeAllListeners('readable');
  if (hasBody(req) && !req.complete && !res.destroyed) {
    const isLate = isTrustedProxy(rules, req.socket) && req.headers.expect === undefined;
    if (!isLate) {
      res.flushHeaders(); // of a response without a body too
      if (lastPart) res.write(lastPart);
    }
    await dropRest(core, req, restLimitBytes(rules, req.socket, token) - bytesIn);
    res.end(isLate ? lastPart : undefined);
  } else {
    res.end(lastPart);
  }
  // The time-out of an idle connection restarts with each byte that the client sends.
  if (req.socket.writableLength === 0) return;
  const timer = setTimeout(() => req.socket.destroy(), core.stallTimeoutMs).unref();
  res.once('close', () => clearTimeout(timer));
}

/** Ends a socket that node:http no longer serves. What its client still sends is read and discarded. */
function endSocket(core: Core, socket: Socket, last = '') {
  socket.end(last);
  void dropRest(core, socket, restLimitBytes(core.rules, socket)).then(() => socket.destroy());
}

/**
 * How much is read of a refused body. Of a stranger's it is little, but some proxies (Apache, Varnish, tinyproxy) write
 * the whole body before they read the response. If they cannot, their client gets a 502 or 503 of theirs, or none.
 */
function restLimitBytes(rules: Rules, peer: Socket, token?: Token) {
  return token || isTrustedProxy(rules, peer) ? rules['limits.body'] : HEAD_LIMIT_BYTES;
}

/**
 * Reads and discards what a refused client still sends. Resolves at its end, after `lingerMs` of silence, or after
 * `stallTimeoutMs` in total.
 * @param limitBytes where the reading stops; the silence begins then.
 */
function dropRest({ lingerMs, stallTimeoutMs }: Core, source: IncomingMessage | Socket, limitBytes: number) {
  return new Promise<void>((resolve) => {
    const stop = () => {
      clearTimeout(silence);
      clearTimeout(deadline);
      resolve();
    };
    const silence = setTimeout(stop, lingerMs);
    const deadline = setTimeout(stop, stallTimeoutMs);
    let leftBytes = limitBytes;
    source.once('end', stop).once('close', stop).on('data', ({ length }: Buffer) => {
      leftBytes -= length;
      if (leftBytes < 0) source.pause();
      silence.refresh();
    }).resume();
  });
}

// #endregion

// #region ADDRESSES

/** A parsed list of addresses and ranges, and its entries as written. */
type AddressList = ReturnType<typeof readAddresses>;

/**
 * The client's address. It is the peer's, or, behind trusted proxies, the right-most address in X-Forwarded-For that is
 * not a trusted proxy. The addresses to its left are only the client's claim.
 */
function clientAddress(req: IncomingMessage, trusted?: AddressList) {
  let address = normalizeAddress(req.socket.remoteAddress);
  if (!trusted) return address;
  for (const hop of String(req.headers['x-forwarded-for'] ?? '').split(',').reverse()) {
    const claimed = normalizeAddress(hop.trim().replace(/^\[(.*)\](?::\d+)?$|^([\d.]+):\d+$/, '$1$2'));
    // If a trusted proxy names no address, its own address counts.
    if (!addressAllowed(trusted, address) || !isIP(claimed)) break;
    address = claimed;
  }
  return address;
}

/** Whether the peer of a connection is on `trustedProxies`, whatever its requests say. */
function isTrustedProxy({ trustedProxies }: Rules, peer: Socket) {
  return trustedProxies !== undefined && addressAllowed(trustedProxies, normalizeAddress(peer.remoteAddress));
}

/** Whether a list contains an address. An absent list contains every address. */
function addressAllowed(allowed: AddressList | undefined, address: string) {
  return !allowed || allowed.list.check(address, isIP(address) === 6 ? 'ipv6' : 'ipv4');
}

/**
 * An address in one spelling, without a zone. IPv4-mapped IPv6 is IPv4. A peer that is gone has no address: 0.0.0.0
 * stands for it, which no client has.
 */
function normalizeAddress(address = '0.0.0.0') {
  return address.replace(/^::ffff:(?=\d+\.)|%.*/gis, '');
}

// #endregion

// #region LOG

/** The clock of an embedding program. Where it throws, and without one, the machine's. */
function makeClock(own = Date.now) {
  return () => {
    try {
      return own();
    } catch {
      return Date.now();
    }
  };
}

/**
 * A time in milliseconds that a clock makes pass, and that never goes back: a clock that is set back takes nothing from
 * a rate, and gives nothing.
 */
function makeTicker(now: () => number) {
  let elapsedMs = 0;
  let lastMs = now();
  return () => {
    const nowMs = now();
    elapsedMs += Math.max(0, nowMs - lastMs);
    lastMs = nowMs;
    return elapsedMs;
  };
}

/**
 * Dates a time by the clock as it is set now: a computer without a battery starts with a wrong one, and corrects it later.
 * @param elapsedMs a time that is never set back.
 */
function makeDating(now: () => number, elapsedMs: () => number) {
  let zeroMs = now() - elapsedMs();
  return (atMs: number) => {
    const latestMs = now() - elapsedMs();
    if (Math.abs(latestMs - zeroMs) >= 1000) zeroMs = latestMs; // less is no correction: two clocks are read one by one
    return zeroMs + atMs;
  };
}

/** How many bytes of log lines may be unread. Further lines are dropped, so that the log cannot fill memory. */
const LOG_LIMIT_BYTES = 1024 * 1024;

/**
 * How long request lines are buffered before they are written. A write to a pipe costs as much as a refusal: with one
 * write per line, sequential sends take a fifth more processor time.
 */
const LOG_PAUSE_MS = 10;

/** One line per event. Every value is made by the gateway or quoted as JSON, so that no value can forge a line. */
function makeLog(settings: AtStart, now: () => number, metrics: Metrics, sink: GatewayOptions['log']) {
  const format = settings['log.format'];
  const least = LEVELS.indexOf(settings['log.level']);
  let pending = '';
  let unreadBytes = 0;
  let reported = 0; // of the lines that were dropped
  const flush = () => {
    if (pending === '') return;
    const text = pending;
    const bytes = Buffer.byteLength(text);
    pending = '';
    unreadBytes += bytes;
    // An unread log must neither stop the gateway nor fill its memory, so lines are dropped. When the log is read
    // again, one line has their number.
    writeOut(text, () => {
      unreadBytes -= bytes;
      const lines = metrics.droppedLines - reported;
      if (lines === 0 || unreadBytes > 0) return;
      reported += lines;
      log('warn', 'log lines were dropped: nothing was reading standard output', { lines });
    });
  };
  const writeSoon = (line: string) => {
    if (unreadBytes > LOG_LIMIT_BYTES) return void metrics.droppedLines++;
    if (pending === '') setTimeout(flush, LOG_PAUSE_MS);
    pending += `${line}\n`;
  };
  const write = (line: string) => {
    try {
      (sink ?? writeSoon)(line);
    } catch {
      metrics.droppedLines++; // an embedding program's log has thrown
    }
  };
  /** Logs one event. A field that is undefined is left out; none is named time, level or message. */
  const log = (level: Level, message: string, fields: Record<string, unknown> = {}) => {
    if (LEVELS.indexOf(level) >= least) {
      const time = new Date(now()).toISOString();
      write(
        format === 'json'
          ? JSON.stringify({ time, level, message, ...fields })
          : textLine(time, level, message, fields),
      );
    }
    if (message !== 'request') flush(); // the process may end right after this line, whether it is logged or not
  };
  return log;
}

/** The fields with which a line in text begins and ends, in this order. */
const FIRST_FIELDS = 'status code reason method route token client'.split(' ');
const LAST_FIELDS = 'bytesIn bytesOut requestId origin'.split(' ');
const PLACED_FIELDS = new Set([...FIRST_FIELDS, ...LAST_FIELDS]);

/**
 * `time level message name=value …`, for a person. A request's line has no message, and begins with what a person looks
 * for. Attack: `origin` is text from a client, so it comes last, after everything that a filter such as fail2ban's
 * reads. A value that is not plain is quoted as JSON, on the same line.
 */
function textLine(time: string, level: Level, message: string, fields: Record<string, unknown>) {
  let line = `${time} ${level.padEnd(5)}${message === 'request' ? '' : ` ${message}`}`;
  const add = (name: string) => {
    const text = String(fields[name] ?? '');
    if (text === '' || (text === '0' && name.startsWith('bytes'))) return;
    line += ` ${name}=${/^[\w.:,/@*+-]+$/.test(text) ? text : JSON.stringify(text)}`;
  };
  for (const name of FIRST_FIELDS) add(name);
  for (const name in fields) if (!PLACED_FIELDS.has(name)) add(name);
  for (const name of LAST_FIELDS) add(name);
  return line;
}

/**
 * Logs and counts a failure of the gateway itself, with its stack. Beyond thirty a minute, they are logged at debug
 * level, because a client that has found such a failure can repeat it.
 */
function logInternalError(core: Core, error: unknown, requestId?: string) {
  core.metrics.internalErrors++;
  const isFlood = core.rateLimiter.take('internal error', LINE_RATE, core.elapsedMs()) > 0;
  const stack = error instanceof Error ? error.stack : String(error);
  core.log(isFlood ? 'debug' : 'error', 'internal error', { requestId, stack });
}

/** The maximum length of a list in a log line or a response. */
const LOG_LIST_LIMIT = 20;

/** Joins words for a log line or a response. Beyond the first twenty, gives only their number. */
function joinFirst(words: readonly string[], separator: string) {
  const others = words.length - LOG_LIST_LIMIT;
  const first = words.slice(0, LOG_LIST_LIMIT).join(separator);
  return others > 0 ? `${first}${separator}and ${others} more` : first;
}

/** How often a warning that an unauthenticated client can trigger is logged, so that it cannot fill the disk. */
const WARNING_RATE = { count: 1, perMs: 60_000 };

/**
 * Logs a warning, at most once a minute. For warnings that an unauthenticated client can trigger.
 * @param kind a word of a short list: each has its own minute.
 */
function warnRarely(core: Core, message: string, fields?: Record<string, unknown>, kind = '') {
  if (core.rateLimiter.take(`warning: ${message} ${kind}`, WARNING_RATE, core.elapsedMs()) > 0) return;
  core.log('warn', message, fields);
}

// UNTIL Deno's process.stdout neither stalls where nobody reads it nor throws on a full disk, as in Deno 2.9: the
// gateway uses Deno.stdout (findings/deno-stdout-stalls.sh, findings/deno-stdout-throws-on-full-disk.sh).
const { Deno: deno } = globalThis as { Deno?: { stdout: { write(bytes: Uint8Array): Promise<number> } } };
let lastWrite = Promise.resolve();

/** Writes to standard output without waiting. `done` is called when the text was written, or cannot be. */
function writeOut(text: string, done: () => void = () => {}) {
  if (!deno) return void process.stdout.write(text, done);
  let rest = Buffer.from(text);
  lastWrite = lastWrite.then(async () => {
    while (rest.length > 0) rest = rest.subarray(await deno.stdout.write(rest));
  }).then(done, done);
}

// #endregion

// #region LOADING
// Two steps. First, each source (file, environment, flags) notes its values, with the place where each was given. Then
// every setting is read and checked. All mistakes are reported at once. The gateway does not run with a mistake: a
// wrong limit that fell back to its default could be looser than its owner believes.

/** The values that the sources give, with the mistakes and the warnings found so far. */
class Sources extends Mistakes {
  /** For each setting's path: its value, and the place where its owner wrote it, for messages. */
  readonly noted = new Map<string, { value: unknown; at: string }>();
  /** Settings that are valid, but perhaps not intended. */
  readonly warnings: string[] = [];
  /** The file, the variables and the flags that gave a value. */
  readonly readFrom: string[] = [];

  /** Notes a value. A later source replaces the value of an earlier one: tokens of two sources are not merged. */
  note(path: string, value: unknown, at: string) {
    if (value === undefined) return;
    if (at !== path) this.readFrom.push(at); // in the file, a setting's place is its path
    if (path === 'tokens' && this.noted.has(path)) this.warnings.push(`${at} replaces all tokens of the file`);
    this.noted.set(path, { value, at });
  }
}

/**
 * Reads file, environment and flags. For each setting the last of these that gives a value wins. `text` is what the
 * file will contain, if that is to be checked before it is written.
 * @throws {ConfigError} with every mistake.
 */
function loadSettings(
  { file, text, env = {}, flags = {} }: {
    file?: string | undefined;
    text?: string | undefined;
    env?: NodeJS.ProcessEnv;
    flags?: JsonObject;
  },
) {
  const sources = new Sources();
  FILES_READ.clear();
  if (file) noteFile(sources, file, text);
  noteEnv(sources, env);
  sources.note('listen', flags.listen, '--listen');
  sources.note('backend.url', flags.backend, '--backend');
  return readSettings(sources);
}

/** Reads the configuration of a program that embeds the gateway. @throws {ConfigError} with every mistake. */
function embeddedSettings(config: GatewayConfig, options: GatewayOptions = {}) {
  const sources = new Sources();
  const readers = Object.fromEntries(['now', 'log', ...Object.keys(TIMES)].map((name) => [name, refuseNull]));
  sources.collect('the configuration', () => noteObject(sources, config));
  sources.collect('options', () => readMembers(readers, options));
  return readSettings(sources);
}

/** Matches, as JSON.stringify writes them, a plain secret, tokens in text, or a password in the backend's URL. */
const PLAIN_SECRET = /"secret":"(?!sha256:)|"tokens":"|"url":"[^"/]*\/\/[^"/]*@/i;

/**
 * Notes the settings of a file. An unreadable file is a mistake, because without its tokens the gateway might be open.
 */
function noteFile(sources: Sources, path: string, content?: string) {
  const missing = '; correct the path, or make the file with "add NAME RECIPIENT…"';
  const text = content ?? sources.collect('configuration', () => readFile(path, missing));
  if (text === undefined) return;
  sources.readFrom.push(`the file ${resolve(path)}`);
  const at = showPath(path);
  const file = sources.collect(at, () => parseFile(text));
  if (file === undefined) return;
  const { config, mistakes } = file;
  sources.collect('the configuration', () => noteObject(sources, config));
  for (const mistake of mistakes) sources.add(at, mistake);
  const mode = statSync(path, { throwIfNoEntry: false })?.mode ?? 0;
  if (PLAIN_SECRET.test(JSON.stringify(config)) && mode & 0o004) {
    sources.warnings.push(`${at} contains plain secrets and is readable by all users (chmod o-r)`);
  }
}

/**
 * Notes the settings of a parsed file, or of one of its objects: with the prefix `backend.`, the member `url` is the
 * setting `backend.url`.
 * @throws {UsageError} for every member that is not a setting.
 */
function noteObject(sources: Sources, config: unknown, prefix = '') {
  const [example = ''] = SETTING_ROWS.flatMap(([path]) => path.startsWith(prefix) ? [path.slice(prefix.length)] : []);
  ensure(isObject(config), prefix ? `must be an object, such as {"${example}": …}` : 'must be an object');
  const readers: Record<string, Reader<void>> = {};
  for (const [path] of SETTING_ROWS) {
    if (!path.startsWith(prefix)) continue;
    const [key = '', inner] = path.slice(prefix.length).split('.');
    readers[key] = (value) => inner ? noteObject(sources, value, `${key}.`) : sources.note(path, value, path);
  }
  readMembers(readers, config);
}

/**
 * Parses a configuration file.
 * @returns its object, and a sentence about each key that is repeated in its object: JSON.parse takes the last value.
 * @throws {UsageError} with the place of the mistake. JSON.parse's message could quote a secret, so BodyScan, which is
 *   as strict, finds the mistake first.
 */
function parseFile(text: string) {
  const bytes = Buffer.from(text);
  const { value, repeated } = attempt(() => parseJson(bytes, NESTING_LIMIT), (error) => {
    const { why, atByte } = (error as unknown as Problem).details.syntax!;
    // One character shows a quote of a word processor, a comment and YAML.
    const [found] = /^[\p{L}\p{N}\p{P}\p{S}]/u.exec(bytes.toString('utf8', atByte)) ?? [];
    const instead = found && /^(?:expected|it must)/.test(why) ? `; there is ${found}` : '';
    return `is not a JSON object: ${placeAfter(bytes.toString('utf8', 0, atByte))}: ${why}${instead}`;
  });
  ensure(!text.includes('\ufffd'), 'is not UTF-8: save it as UTF-8, without a byte order mark'); // Latin-1
  const mistakes = repeated.map(({ key, atByte }) => {
    const place = placeAfter(bytes.toString('utf8', 0, atByte));
    return `${place}: ${showValue(key, 'a key')} is given twice in one object; keep one`;
  });
  return { config: value, mistakes };
}

/**
 * Parses a JSON object, and tells the keys that are repeated in their object, down to a depth.
 * @throws {Problem} bad_json. BodyScan is stricter than JSON.parse: encoding, depth, an object.
 */
function parseJson(json: Buffer, depth = 1) {
  const repeated = BodyScan.repeatedKeys(json, depth);
  return { value: JSON.parse(json.toString()) as JsonObject, repeated };
}

/** The place where a text ends, as editors count: from 1, and in characters. */
function placeAfter(text: string) {
  const lines = text.split('\n');
  return `line ${lines.length}, column ${[...lines.at(-1)!].length + 1}`;
}

/**
 * Matches the variables that Kubernetes and Docker make for a service called "gateway", such as
 * GATEWAY_SERVICE_HOST and GATEWAY_PORT_8880_TCP.
 */
const OF_A_SERVICE = /^GATEWAY_(?:SERVICE_|PORT_|PORT=\w+:\/\/)/;

const IS_EMPTY = 'is set but empty; unset it, or give it a value';

/** Notes the settings in the environment. A variable that begins with GATEWAY_ and is none of them is a mistake. */
function noteEnv(sources: Sources, env: NodeJS.ProcessEnv) {
  const variables = SETTING_ROWS.map(([path]) => variableOf(path));
  for (const [path] of SETTING_ROWS) sources.note(path, env[variableOf(path)], variableOf(path));
  if (TOKENS_FILE in env) {
    const other = variableOf('tokens');
    if (other in env) sources.add(TOKENS_FILE, `is set together with ${other}; use one of them`);
    const lines = sources.collect(TOKENS_FILE, () => {
      ensure(env[TOKENS_FILE] !== '', IS_EMPTY);
      return readFile(env[TOKENS_FILE]).replace(/^[ \t]*#.*$/gm, '');
    });
    sources.note('tokens', lines, TOKENS_FILE);
  }
  const known = [CONFIG_FILE, TOKENS_FILE, ...variables];
  for (const name in env) {
    if (!name.startsWith('GATEWAY_') || known.includes(name) || OF_A_SERVICE.test(`${name}=${env[name]}`)) continue;
    sources.collect(name, () => refuseSetting(known));
  }
}

/**
 * Reads every setting from its source, or from its default if no source gives it.
 * @throws {ConfigError} with every mistake.
 */
function readSettings(sources: Sources) {
  const { noted, sentences, warnings, readFrom } = sources;
  const isAllRead = sentences.length === 0; // otherwise the tokens may be in a source that could not be read
  const isClosed = isDeepStrictEqual(noted.get('tokens')?.value, {});
  const settings = { tokens: [], isClosed, warnings, readFrom } as JsonObject as Settings & JsonObject;
  for (const [path, [read, , fallback]] of SETTING_ROWS) {
    const { value, at } = noted.get(path) ?? { value: fallback, at: path };
    if (value === undefined || (path === 'tokens' && isClosed)) continue;
    settings[path] = sources.collect(at, () => {
      ensure(value !== '', IS_EMPTY); // it may have been meant to hold a secret
      return read(value);
    });
  }
  if (settings['backend.url']?.isEndpoint) {
    const where = noted.get('backend.url')!.at;
    warnings.push(`${where} has the path of an endpoint; give only the part before it, such as ${EXAMPLE_URL}`);
  }
  if (isAllRead && !noted.has('tokens') && settings.listen?.isLocal === false && !settings['auth.anonymous']) {
    const advice =
      'name a file (--config, GATEWAY_CONFIG), or set GATEWAY_TOKENS ("openssl rand -hex 24" makes a secret); ' +
      'GATEWAY_AUTH_ANONYMOUS=true would accept all requests';
    sources.add('tokens', `none is configured, but the gateway would listen for other machines: ${advice}`);
  }
  if (sentences.length === 0) settings.certificate = sources.collect('tls', () => checkTls(settings));
  return sources.valueOrThrow(settings);
}

/** What requests are checked against: the result of `makeRules`, without what is read only at start. */
type Rules = Omit<ReturnType<typeof makeRules>, keyof AtStart>;

type Lists = { [Field in 'senders' | 'recipients' | 'defaults']?: TokenSettings[Field] | undefined };

/**
 * The lists that a token, or the top level, states: its own, or else those that its defaults confine to, so that a body
 * that was misread reaches nobody else.
 */
function statedLists({ senders, recipients, defaults }: Lists): Lists {
  return {
    senders: senders ?? (defaults?.number === undefined ? undefined : new Set([defaults.number])),
    recipients: recipients ?? (defaults?.recipients && new Set(defaults.recipients)),
  };
}

/** The lists and defaults of the top level. */
function sharedLists({ senders, recipients, ...settings }: Settings): Lists {
  const fields = {
    number: settings['defaults.number'],
    recipients: settings['defaults.recipients'],
    text_mode: settings['defaults.text_mode'],
  };
  const members = membersOf(fields);
  const defaults = members.length > 0 ? Object.fromEntries(members) as TokenSettings['defaults'] : undefined;
  return { senders, recipients, defaults };
}

/** Makes the rules of a configuration. They never change: a request keeps those that it began with. */
function makeRules(settings: Settings) {
  const { 'auth.methods': methods, allow, rate, clients } = settings;
  const shared = sharedLists(settings);
  const ofTopLevel = statedLists(shared);
  const unlessEveryone = (list: Lists['senders']) => list === EVERYONE ? undefined : list;
  // A token's own value replaces an inherited one whole: merged, a list could only become wider. What it does not
  // state, the top level states, so that a restriction of one kind never lifts one of another.
  const resolveToken = (own: TokenSettings) => {
    const hasOwn = (own.senders ?? own.recipients ?? own.defaults) !== undefined;
    const ofToken = statedLists(own);
    return {
      ...{ methods, allow, rate, clients, expires: Infinity, ...own },
      // A token's own lists do not make the gateway build its messages.
      defaults: hasOwn ? own.defaults : shared.defaults,
      senders: unlessEveryone(ofToken.senders ?? ofTopLevel.senders),
      recipients: unlessEveryone(ofToken.recipients ?? ofTopLevel.recipients),
    } as Token;
  };
  const tokens = settings.tokens.map(resolveToken);
  /** The token of every request, if none is configured. */
  const anonymous = tokens.length === 0 && !settings.isClosed
    ? resolveToken({ name: 'anonymous', digest: '' })
    : undefined;
  return {
    ...settings,
    /** By digest. */
    tokens: new Map(tokens.map((token) => [token.digest, token])),
    anonymous,
    /** The methods that at least one token accepts. */
    methods: new Set(tokens.flatMap((token) => [...token.methods])),
    all: anonymous ? [anonymous] : tokens,
    cors: settings.cors ?? new Set<string>(),
  } as const;
}

// #endregion

// #region READERS
// One function for each kind of value. It throws a UsageError with the mistake, and the caller adds the place. No
// message shows 16 characters or more of a value: it may be a secret in the wrong place.

/** Returns what `run` returns. If `run` throws, `explain` gives the message: the error's own may quote a secret. */
function attempt<T>(run: () => T, explain: (error: NodeJS.ErrnoException) => string) {
  try {
    return run();
  } catch (error) {
    throw new UsageError(explain(error as NodeJS.ErrnoException));
  }
}

/** Shows a value in a message, or `instead` if the value is long enough to be a secret. */
function showValue(value: unknown, instead: string) {
  const text = JSON.stringify(value) ?? '';
  return (typeof value === 'string' ? value : text).length < SECRET_MIN_LENGTH ? text : instead;
}

/** The place of an object's member: its key, or its position if the key may be a secret. */
function placeOf(key: string, index: number) {
  return key.length < SECRET_MIN_LENGTH && /^[\w.-]+$/.test(key) ? `.${key}` : `[${index}]`;
}

/**
 * Makes a reader of strings, numbers or booleans from their text: the environment has only strings, and a file may have
 * 5 or "5".
 * @param expected completes the sentence "… is not …".
 * @param parse returns undefined for a text that is wrong, such as an empty one.
 * @param hints by the text: what its owner cannot see.
 */
function scalarOf<T>(
  expected: string,
  parse: (text: string) => T | undefined,
  hints: Hints = [],
): Reader<T, string> {
  return (value) => {
    // A program that embeds the gateway can give any value, with a text of its own.
    const text = /^(?:string|number|boolean)$/.test(typeof value) ? String(value) : '';
    const parsed = parse(text);
    if (parsed !== undefined) return parsed;
    const shown = showValue(value, 'the value');
    refuseQuotes(text, shown);
    throw new UsageError(`${shown} is not ${expected}${adviceFor(hints, text)}`);
  };
}

/** Refuses a text in quotes. In a list of compose they belong to the value: `- GATEWAY_RATE="30/1m"`. */
function refuseQuotes(text: string, shown: string) {
  ensure(!/^["'`\u2018-\u201f\u00ab\u00bb]/.test(text), `${shown} has quotes of its own; leave out the quotes`);
}

/** What to write or do instead, as the end of a sentence; '' if there is no advice. */
function adviceFor(hints: Hints, wrong: string) {
  const advice = hintFor(hints, wrong);
  return advice ? `; ${advice}` : '';
}

/**
 * Makes a reader of sets: an array in JSON, a text separated by commas in the environment. An empty list is refused,
 * because it could mean "nobody" as well as "no limit".
 */
function listOf<T, Written>(read: Reader<T, Written>): Reader<ReadonlySet<T>, Written[]> {
  return (value) => {
    const items = typeof value === 'string' ? value.trim().split(/\s*,\s*/).filter(Boolean) : value;
    ensure(Array.isArray(items) && items.length > 0, 'must be a list with at least one entry');
    const mistakes = new Mistakes();
    const list = new Set(items.map((item, i) => mistakes.collect(`[${i}]`, () => read(item))!));
    if (typeof value === 'string' && mistakes.sentences.length > 0) {
      const advice = 'between entries there is a comma, and no quote or bracket';
      throw new ConfigError(mistakes.sentences.map((mistake) => `${mistake}; ${advice}`));
    }
    return mistakes.valueOrThrow(list);
  };
}

/** What a token's list says that confines it to nothing: every account, or every recipient. */
const EVERYONE = 'everyone';

/** Makes a reader of a token's list, in which "*" stands alone and means everyone. */
function listOrEveryone(read: Reader<string, string>): Reader<typeof EVERYONE | ReadonlySet<string>, string[]> {
  return (value) => value === '*' || isDeepStrictEqual(value, ['*']) ? EVERYONE : listOf(read)(value);
}

/**
 * Reads each member of an object with its own reader. A member without one is a mistake: a token whose `recipient` was
 * ignored could write to anyone.
 */
function readMembers<T>(readers: { [K in keyof T]-?: Reader<T[K]> }, value: object): Partial<T> {
  const known = new Map<string, Reader<unknown>>(Object.entries(readers));
  const mistakes = new Mistakes();
  const members = membersOf(value).map(([key, inner], i) => {
    const read = known.get(key) ?? (() => refuseSetting(Object.keys(readers)));
    return [key, mistakes.collect(placeOf(key, i), () => read(refuseNull(inner)))];
  });
  return mistakes.valueOrThrow(Object.fromEntries(members));
}

/** The members of an object. One that is undefined counts as absent: only a program can give it. */
function membersOf(value: object): [string, unknown][] {
  return Object.entries(value).filter(([, inner]) => inner !== undefined);
}

/** Refuses null, which could mean "no limit" as well as "nothing is allowed". */
function refuseNull(value: unknown) {
  ensure(value !== null, 'null is not allowed; remove the line');
  return value;
}

/** @throws {UsageError} with the settings that there are in its place. */
function refuseSetting(known: readonly string[]): never {
  throw new UsageError(`is not a setting; there are ${known.join(', ')}`);
}

/** Makes a reader of one of these words. */
function wordOf<const T extends string>(words: readonly T[]) {
  const expected = words.length > 2 ? `one of ${words.join(', ')}` : words.join(' or ');
  return reads<T>()(scalarOf(expected, (text) => words.find((word) => word === text)));
}

/** Makes a reader of texts. A text that `isRight` is kept as it is. */
function textThat(isRight: (text: string) => boolean, expected: string, hints?: Hints) {
  return scalarOf(expected, (text) => isRight(text) ? text : undefined, hints);
}

function isObject(value: unknown): value is JsonObject {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** Makes a reader of whole numbers of at most nine digits, without sign or leading zeros. */
function countFrom(least: number) {
  return reads<number>()(scalarOf(`a whole number of at least ${least}`, (text) => {
    const count = /^(?:0|[1-9][0-9]{0,8})$/.test(text) ? Number(text) : NaN;
    return count >= least ? count : undefined;
  }));
}

const UNIT_MS: Record<string, number> = { ms: 1, s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000 };

/** Parses a duration, in milliseconds. Only 0 needs no unit. Beyond 24 days setTimeout would fire at once. */
function parseDuration(text: string) {
  const { count, unit = '' } = /^(?<count>[0-9]{1,9})(?<unit>ms|s|m|h|d)$/.exec(text)?.groups ?? {};
  const ms = text === '0' ? 0 : Number(count) * UNIT_MS[unit]!;
  return ms <= 2 ** 31 - 1 ? ms : undefined;
}

/** Makes a reader of durations, in milliseconds. @param example for the message. */
function duration(example: string) {
  return scalarOf(`a duration such as ${example}`, parseDuration);
}

/** Makes a reader return Infinity for 0, which means no limit. For `backend.wait`, it means no wait. */
function zeroAsNoLimit<Written>(read: Reader<number, Written>): Reader<number, Written> {
  return (value) => read(value) || Infinity;
}

/** The units of sizes. Each is 1024 times the one before it. */
const SIZE_UNITS = ['B', 'KiB', 'MiB', 'GiB'];

/** Parses a size in bytes. The unit is required: "150" could mean anything. */
function parseSize(text: string) {
  const { count, unit = '' } = /^(?<count>[1-9][0-9]{0,8})(?<unit>B|KiB|MiB|GiB)$/.exec(text)?.groups ?? {};
  return Number(count) * 1024 ** SIZE_UNITS.indexOf(unit) || undefined; // NaN if nothing matched
}

/** A size in bytes as it is written in the configuration, with the largest unit that divides it. */
function showSize(bytes: number) {
  const power = [3, 2, 1].find((each) => bytes % 1024 ** each === 0) ?? 0;
  return `${bytes / 1024 ** power}${SIZE_UNITS[power]}`;
}

/** Parses `COUNT/TIME`. Neither may be 0, because a token that may do nothing should be removed instead. */
function parseRate(text: string) {
  const { count, time = '' } = /^(?<count>[1-9][0-9]{0,5})\/(?<time>.+)$/.exec(text)?.groups ?? {};
  const perMs = parseDuration(time);
  return perMs ? { count: Number(count), perMs, written: text } : undefined;
}

/** Parses a time, in milliseconds since the epoch. A date without a time means the end of that day. */
function parseExpiry(text: string) {
  const { date = '', day, time = 'T23:59:59.999Z' } =
    /^(?<date>\d{4}-\d\d-(?<day>\d\d))(?<time>T\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d))?$/.exec(text)
      ?.groups ??
      {};
  const ms = Date.parse(date + time);
  // Date takes February 31 for March 3.
  return new Date(date).getUTCDate() === Number(day) && !Number.isNaN(ms) ? ms : undefined;
}

/** A UUID or a user name. A name that begins with `group.` is a group for the backend. */
const PERSON = /^(?:[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}|(?!group\.)[a-z_]\w{2,31}\.\d{2,})$/i;

/** Whether a send can be addressed to this: a phone number, a UUID, a user name, or a group's id. */
function isRecipient(text: string) {
  return NUMBER.test(text) || PERSON.test(text) || isGroupId(text);
}

/**
 * Makes a reader of single recipients. They are compared as written, so a number without its plus would never match.
 * @param takesAnyGroup whether `group.*` stands for any group. No send can be addressed to that.
 */
function readerOfRecipients(takesAnyGroup: boolean) {
  const ofGroup = 'a group\'s id ("add NAME" lists them)';
  const groups = takesAnyGroup ? `, ${ofGroup} or group.*; "*" alone is everyone` : ` or ${ofGroup}`;
  return textThat(
    (text) => (takesAnyGroup && text === 'group.*') || isRecipient(text),
    `${A_NUMBER}, a user name (name.01), a UUID${groups}`,
    RECIPIENT_HINTS,
  );
}

/** Reads `defaults`, as strictly as a token's lists: a bad recipient should be found now, not with the first alert. */
function readDefaults(value: unknown) {
  ensure(isObject(value), 'must be an object with number, recipients, text_mode');
  return readMembers({ number: readNumber, recipients: readDefaultRecipients, text_mode: readTextMode }, value);
}

function readDefaultRecipients(list: unknown) {
  // So that no message is larger than what may be held.
  ensure(JSON.stringify(list).length <= PAYLOAD_LIMIT_BYTES, `is larger than ${showSize(PAYLOAD_LIMIT_BYTES)}`);
  return [...listOf(readerOfRecipients(false))(list)];
}

/**
 * How long an idle connection to the backend is kept. The backend, or a proxy before it, must not close it first,
 * because a send that is in transit when the connection closes is lost.
 */
const IDLE_TIMEOUT_MS = 4000;

/**
 * How long each of several addresses of the backend's name may take to connect. By default node:net gives up all but the last
 * after 250 or 500 ms, so over a slower link only that one could ever be reached.
 */
const ATTEMPT_TIMEOUT_MS = 3000;

/** Reads the backend's URL into the parts that a request needs. No message shows it: it may contain a password. */
function readBackend(value: unknown) {
  const url = typeof value === 'string' && URL.canParse(value) ? new URL(value) : undefined;
  const isUsable = url !== undefined && /^https?:$/.test(url.protocol) && !url.search && !url.hash;
  if (!isUsable) refuseQuotes(String(value), 'the value');
  ensure(isUsable, `must be a URL such as ${EXAMPLE_URL} or http://[fd00::5]:8080, with http or https and no query`);
  const { protocol, hostname, port, auth } = attempt(
    () => urlToHttpOptions(url),
    () => 'has a "%" in its userinfo that must be written "%25"',
  );
  // Each backend has its own agent. It closes idle connections after IDLE_TIMEOUT_MS, and no other code uses them.
  const agent = new (protocol === 'https:' ? https : http).Agent({
    // UNTIL Deno sends a request only once: on a kept connection that ends before the head of the response, Deno 2.9
    // sends it again, POST too (findings/deno-http-repeats-post.sh).
    keepAlive: !('Deno' in globalThis),
    keepAliveMsecs: SILENCE_MS,
    timeout: IDLE_TIMEOUT_MS,
    autoSelectFamilyAttemptTimeout: ATTEMPT_TIMEOUT_MS,
  });
  // Attack: bytes on an idle connection belong to no request; the next request would take them for its response.
  agent.on('free', (socket: Socket) => socket.once('data', destroyThis));
  const prefix = url.pathname.replace(/\/+$/, '');
  // With "/send" after it, a path that ends in /v1 or /v2 is found too: it is the beginning of /v2/send.
  const [, endpoint = ''] = /\/v[12]\/([^/]+)/.exec(`${prefix}/send`) ?? [];
  return {
    /** With userinfo: not for the log. */
    url,
    /** For the log. */
    name: url.origin + prefix,
    /** The path, without a slash at the end. */
    prefix,
    /** Whether the path is that of an endpoint, such as /v2/send. The gateway adds that itself. */
    isEndpoint: ROUTES.some(({ parts }) => parts[1] === endpoint),
    /** For node:http's client. */
    options: { protocol, hostname, port, agent },
    authorization: auth && `Basic ${Buffer.from(auth).toString('base64')}`,
  } as const;
}

/**
 * Parses where to listen: a `port` and a `host`, where '' means every interface. `isLocal` says that only programs on
 * this machine can connect. The only local name is localhost, because any other name may resolve to any address.
 */
function parseListen(text: string) {
  const { v6, name, digits } =
    /^(?:\[(?<v6>[0-9a-fA-F:.]+)\]|(?<name>[^:[\]\s/]*)):(?<digits>[0-9]{1,5})$/.exec(text)?.groups ?? {};
  const host = v6 ?? name ?? '';
  const port = Number(digits);
  if ((v6 !== undefined && isIP(v6) !== 6) || !(port <= 65535)) return undefined;
  const isLocal = host === 'localhost' || (isIP(host) !== 0 && /^(?:127\.|::1$)/.test(host));
  return { host, port, isLocal };
}

/**
 * Reads a file. The message names the process's user, because in containers this user often lacks read permission.
 * @param missing what to do if there is none, as the end of the sentence.
 */
function readFile(path: unknown, missing = '') {
  ensure(typeof path === 'string', 'must be the path of a file');
  ensure(!/\p{Cc}/u.test(path), "the path has a control character, perhaps of a Windows line's end");
  // UNTIL Deno gives the user's id without a permission: Deno 2 asks for --allow-sys
  // (findings/deno-getuid-needs-a-permission.sh).
  const uid = 'Deno' in globalThis ? undefined : process.getuid?.();
  const user = uid === undefined ? '' : ` by user ${uid}`;
  const explain = ({ code, name }: NodeJS.ErrnoException) => {
    const shown = showPath(path);
    const advice = adviceFor(READ_HINTS, code ?? '') + (code === 'EACCES' ? adviceOnAccess(path, uid) : '');
    if (code !== 'ENOENT') return `${shown} cannot be read${user} (${code ?? name})${advice}`; // Deno's NotCapable has no code
    if (shown === path) return `${resolve(path)} does not exist${missing}`;
    return `the file does not exist${isAbsolute(path) ? '' : ` in ${process.cwd()}`}${missing}`;
  };
  FILES_READ.set(path, stampOf(path)); // first: a change from here on is noticed
  return attempt(() => readFileSync(path, 'utf8'), explain);
}

/** Users of services have ids below 1000: for them sudo changes nothing, and systemd hides the folders of people. */
function adviceOnAccess(path: string, uid = 1000) {
  if (uid >= 1000) return ownerOf(path) === 0 ? '; outside of a container, try sudo' : '';
  return /^\/(?:home|root)\//.test(resolve(path)) ? '; files under /home are hidden from a service' : '';
}

/** The user to whom a file belongs, if that can be looked up. */
function ownerOf(path: string) {
  try {
    return statSync(path).uid;
  } catch {
    return undefined;
  }
}

/** By the code of the error with which a file could not be read. */
const READ_HINTS: Hints = [
  [/^EISDIR$/, 'it is a folder: Docker makes one where a mounted file is missing'],
  [/^(?:EACCES|EPERM)$/, 'let this user read it: chown or chmod'],
  [/^ENAMETOOLONG$/, 'this looks like what the file holds: name the file'],
];

/** The files from which the command line's settings were last read, and the stamp of each at that time. */
const FILES_READ = new Map<string, string>();

/** Whether there is something at a path, as far as this process may see. On Deno `existsSync` needs a permission. */
function canBeSeen(path: string) {
  return /^\d/.test(stampOf(path)); // an inode, not the reason of a failure
}

/** A text that changes when a file changes, is replaced, or can no longer be read. */
function stampOf(path: string) {
  try {
    const { ino, ctimeMs, size } = statSync(path);
    return `${ino} ${ctimeMs} ${size}`;
  } catch (error) {
    return reasonOf(error);
  }
}

/**
 * Refuses a reload from a file that has no name any more: a container has mounted it alone, and somebody has replaced it
 * outside. What the container has is the old file, whatever the new one says.
 */
function refuseReplaced() {
  const isReplaced = (path: string) => statSync(path, { throwIfNoEntry: false })?.nlink === 0;
  const why = 'was replaced outside of this container, which still has the old file: restart the container';
  const problems = [...FILES_READ.keys()].filter(isReplaced).map((path) => `${showPath(path)} ${why}`);
  if (problems.length > 0) throw new ConfigError(problems);
}

/** Shows a path. A long one is shown only if its first folder exists, because it may be a secret that contains "/". */
function showPath(path: string) {
  return path.length < SECRET_MIN_LENGTH || canBeSeen(path.replace(/(?<=[^/])\/.*/s, '')) ? path : 'the file';
}

/** Certificate and key for node:https, if the settings have both. */
function tlsFiles({ 'tls.cert': cert, 'tls.key': key }: AtStart) {
  return cert && key && { cert, key };
}

/** The parts of a text in PEM that are of a kind. */
function pemParts(text: string, kind: string) {
  return text.split(/^(?=-----BEGIN )/m).filter((part) => part.includes(`${kind}-----`));
}

/**
 * Checks certificate and key before the port opens. node:https would refuse them only at start or on the first
 * connection, and takes an empty file for no certificate.
 * @returns the gateway's own certificate, the first of its chain.
 */
function checkTls({ 'tls.cert': cert, 'tls.key': key }: AtStart) {
  // UNTIL node:https refuses all of this on every runtime: on Deno 2.9 it refuses nothing
  // (findings/deno-https-listens-with-any-certificate.sh).
  if (cert === undefined && key === undefined) return undefined;
  ensure(cert !== undefined && key !== undefined, 'needs both "cert" and "key"');
  const broken = (name: string) => () => `its "${name}" is empty, truncated or encrypted, or is not PEM`;
  // One by one, because X509Certificate reads only the first of a chain.
  const [first] = attempt(() => pemParts(cert, 'CERTIFICATE').map((pem) => new X509Certificate(pem)), broken('cert'));
  const [keyPem = ''] = pemParts(key, 'PRIVATE KEY');
  ensure(
    keyPem !== '' || !/BEGIN CERTIFICATE/.test(key),
    'its "key" is a certificate: exchange the two, or name the file of the key',
  );
  const privateKey = attempt(() => createPrivateKey(keyPem), broken('key'));
  ensure(first !== undefined && /-----END [A-Z0-9 ]+-----\s*$/.test(cert), broken('cert')());
  ensure(first.checkPrivateKey(privateKey), 'its "key" is not the key of the first certificate in "cert"');
  attempt(
    () => createSecureContext({ cert, key }),
    ({ code }) => `its "cert" and "key" cannot be used together (${code})`,
  );
  return first;
}

/**
 * Reads addresses and CIDR ranges: as `written`, and as a `list` to look an address up in. Names are refused, because
 * each request would have to resolve them, and their owner could change who has access.
 */
function readAddresses(value: unknown) {
  const ranges = [...listOf(scalarOf('an IP address, or a network such as 192.168.1.0/24', parseRange))(value)];
  const list = new BlockList();
  for (const { address, prefix, family } of ranges) list.addSubnet(address, prefix, family);
  return { written: ranges.map(({ written }) => written), list };
}

/** Parses an address, or a CIDR range as `192.168.0.0/16`. */
function parseRange(written: string) {
  const { address = '', bits } = /^(?<address>[^/]*)(?:\/(?<bits>[0-9]{1,3}))?$/.exec(written)?.groups ?? {};
  const family: IPVersion = isIP(address) === 6 ? 'ipv6' : 'ipv4';
  const addressBits = family === 'ipv6' ? 128 : 32;
  const prefix = Number(bits ?? addressBits);
  if (isIP(address) === 0 || prefix > addressBits) return undefined;
  if (family === 'ipv4') {
    const number = address.split('.').reduce((sum, byte) => sum * 256 + Number(byte), 0);
    const first = number - number % 2 ** (32 - prefix);
    const network = [24, 16, 8, 0].map((shift) => Math.floor(first / 2 ** shift) % 256).join('.');
    ensure(first === number, `${written} is the network ${network}/${prefix}: write that, or ${address} alone`);
  } else if (prefix < 96) {
    // BlockList takes an IPv4 address for ::ffff:a.b.c.d, as the machine does.
    const range = new BlockList();
    range.addSubnet(address, prefix, family);
    const holdsIPv4 = range.check('::ffff:0:0', 'ipv6');
    ensure(!holdsIPv4, 'contains every IPv4 address (0.0.0.0/0); write an IPv4 range as such, like 192.168.0.0/16');
  }
  return { written, address, prefix, family };
}

/** Reads an allowlist: the `groups` that it opens, its `patterns`, and both as `written`. */
function readAllow(value: unknown) {
  const readWord = textThat(
    (text) => GROUPS.includes(text) || readPattern(text) !== undefined,
    `one of ${GROUPS.join(', ')}, or a pattern such as "GET /v1/groups/:number"`,
  );
  const written = [...listOf(readWord)(value)];
  const groups = new Set(written.filter((word) => GROUPS.includes(word)));
  if (groups.has('messaging')) groups.add('send').add('receive');
  return { written, groups, patterns: written.flatMap((word) => readPattern(word) ?? []) };
}

/** A pattern of an allowlist. */
interface Pattern {
  readonly method: string;
  readonly parts: readonly string[];
}

/**
 * Parses `METHOD /path`: METHOD may be `*`, and a segment is a literal, `:name` or `*`. A literal is compared with the
 * decoded segment of a request, so one with an escape could never match. `*` does not stand for a part of a segment.
 */
function readPattern(text: string): Pattern | undefined {
  const { method = '', path = '' } =
    /^(?<method>[A-Z]+|\*) (?<path>(?:\/(?:\*|:[A-Za-z]+|[^\s/*:%?#\\]+))+)$/.exec(text)?.groups ?? {};
  return ['*', ...HTTP_METHODS].includes(method) ? { method, parts: path.slice(1).split('/') } : undefined;
}

/**
 * Reads `tokens`: an object in JSON; or a text of `SECRET` and `name=SECRET`. Three things are
 * mistakes: no token, because all requests would be accepted; two tokens with one secret, because it is unclear whose
 * rights count; a secret as a name, because each log line would show it.
 */
function readTokens(value: unknown) {
  const mistakes = new Mistakes();
  const read = typeof value === 'string' ? readTokenText : readTokenObject;
  const tokens = read(value as string, mistakes) as TokenSettings[]; // with a mistake, the digest may be undefined
  ensure(tokens.length > 0, 'contains no token');
  const digests = new Set(tokens.map(({ digest }) => digest));
  /** The first token with a digest, as messages show it. */
  const owners = new Map<string, string>();
  const names = new Set<string>();
  tokens.forEach(({ name, digest }, i) => {
    const shown = showValue(name, `[${i}]`);
    const owner = owners.get(digest);
    if (owner) mistakes.add('', `${owner} and ${shown} have the same secret; give each its own`);
    else if (digest) owners.set(digest, shown);
    if (names.has(name)) mistakes.add(`[${i}]`, 'has the name of an earlier one; choose another');
    names.add(name);
    if (digests.has(digestOf(name))) mistakes.add(`[${i}]`, 'has a secret as its name');
  });
  return mistakes.valueOrThrow(tokens);
}

/** Checks a token's name. It appears in log lines, where one word can forge neither a line nor a field. */
function checkTokenName(name: string) {
  ensure(/^[A-Za-z0-9][\w.-]{0,63}$/.test(name), 'a name may have letters, digits, "_", "-" and ".", 64 at most');
}

/**
 * Reads tokens from text: entries separated by commas or line feeds, each SECRET or name=SECRET. A token whose secret
 * is wrong has no digest. Messages give an entry's position, not its text, which may be a secret.
 */
function readTokenText(text: string, mistakes: Mistakes) {
  // A list in the form of other products, of which each entry would be a secret with a bracket or a quote in it.
  ensure(!isBracketed(text), IN_BRACKETS);
  const entries = text.split(/[,\n]/).map((entry) => entry.trim()).filter(Boolean);
  return entries.map((entry, i) => {
    const { name = `token-${i + 1}`, secret = '' } = TOKEN_ENTRY.exec(entry)!.groups!;
    const read = mistakes.collect(`[${i}]`, () => {
      ensure(
        !/\s/.test(entry),
        'has white space in it: write SECRET or name=SECRET, one a line, or with commas between them',
      );
      ensure(
        /[^=]/.test(secret),
        'is a name without a secret, or a secret that ends in "=", which needs a name: write name=SECRET',
      );
      ensure(!isBracketed(secret), IN_BRACKETS);
      return readSecret(secret);
    });
    return { ...read, name };
  });
}

const IN_BRACKETS = 'is in brackets: leave them out, and write SECRET or name=SECRET, with commas between them';

/** Whether a text is in brackets. A password may begin or end with one, but hardly does both. */
function isBracketed(text: string) {
  return /^\s*["']?\[.*\]["']?\s*$/s.test(text);
}

/** Matches an entry of tokens in text. `home-assistant=` is a name: as a secret it could be guessed. */
const TOKEN_ENTRY = /^(?:(?<name>[A-Za-z0-9][\w.-]{0,63})=)?(?<secret>.*)$/s;

/** Reads the tokens of a file. A token whose secret is wrong has no digest. */
function readTokenObject(value: unknown, mistakes: Mistakes) {
  ensure(isObject(value), 'must be an object from name to settings, such as {"home": {"secret": …}}');
  return membersOf(value).map(([name, config], i) => {
    const hasSecret = isObject(config) && ('secret' in config || 'secretFile' in config);
    if (Object.hasOwn(TOKEN_READERS, name) && !hasSecret) {
      mistakes.add(`[${i}]`, `"${name}" stands beside the tokens; move it into the braces of its token`);
      return { name };
    }
    mistakes.collect(`[${i}]`, () => checkTokenName(name));
    // In { "SECRET": "phone" } the secret stands as the name, so the message gives the position.
    const at = isObject(config) ? placeOf(name, i) : `[${i}]`;
    const { secret, secretFile, ...others } = isObject(config) ? config : {};
    // The secret and the other settings are read separately, so that mistakes in both are reported at once.
    const read = mistakes.collect(at, () => {
      ensure(isObject(refuseNull(config)), 'must be an object with "secret" or "secretFile"');
      ensure((secret === undefined) !== (secretFile === undefined), 'needs exactly one of "secret" and "secretFile"');
      const secrets = readMembers(TOKEN_READERS, { secret, secretFile });
      return secrets.secret ?? secrets.secretFile;
    });
    const settings = mistakes.collect(at, () => readMembers(TOKEN_READERS, others));
    return { ...settings, ...read, name };
  });
}

/** The digests of an empty text and an empty line: `sha256sum` was given no secret. Any request has an empty one. */
const NO_DIGESTS = ['', '\n', '\r\n'].map(digestOf);

/** Reads a secret, and returns its digest, and what the secret looks like. No message shows any of it. */
function readSecret(secret: unknown) {
  ensure(typeof secret === 'string', 'must be a string');
  if (/^sha256:/i.test(secret)) {
    const digest = secret.slice('sha256:'.length).toLowerCase();
    ensure(!NO_DIGESTS.includes(digest), 'is the digest of nothing: there was no secret to hash');
    ensure(
      /^[0-9a-f]{64}$/.test(digest),
      'after "sha256:" there must be 64 hexadecimal digits and nothing else: as sha256sum prints them',
    );
    return { digest };
  }
  ensure(!/\p{Cc}/u.test(secret), 'has several lines, or a control character; keep one line with only the secret');
  ensure(!/^\s|\s$/.test(secret), 'starts or ends with white space');
  // Of the secrets that openssl makes in base64, one in 64 begins with a slash.
  ensure(
    !/^[./]/.test(secret) || !canBeSeen(secret),
    'is the path of a file: name it as "secretFile", or in GATEWAY_TOKENS_FILE',
  );
  ensure(
    !/sha256:|^(?=.*\s).*\b[0-9a-f]{64}\b/i.test(secret),
    'contains a digest and more; write "sha256:" and its 64 digits, and nothing else',
  );
  ensure(
    secret.length >= SECRET_MIN_LENGTH,
    'the secret is shorter than 16 characters; "openssl rand -hex 24" makes a good one',
  );
  return {
    digest: digestOf(secret),
    isHex: /^[0-9a-f]{64}$/i.test(secret),
    isOdd: !/^[\w.~+/-]+=*$/.test(secret),
    needsEscapes: /[^\w.~-]/.test(secret), // in a URL (RFC 3986 2.3)
  };
}

/**
 * SHA-256, in hexadecimal. A slow hash would protect guessable passwords. But a secret of `add` has 256
 * random bits, and a slow hash at every request would overload a small computer.
 */
function digestOf(secret: string) {
  // UNTIL Node 20.12 is the oldest: earlier ones lack crypto.hash, which is 2 µs faster
  // (findings/node-without-crypto-hash.sh).
  return crypto.hash?.('sha256', secret) ?? crypto.createHash('sha256').update(secret).digest('hex');
}

// #endregion

// #region DEMO
// Uses only the public interface, and so is an example of embedding.

/**
 * Starts a stand-in backend. It answers each POST as a send and each GET as a query, and prints the request, a message
 * on its own line.
 */
function startDemoBackend() {
  return http.createServer(async (req, res) => {
    const body = await readAll(req).catch(() => undefined);
    if (body === undefined) return; // the client left
    const send = await new Response(body).json().catch(() => undefined);
    const lines = isObject(send) && send.message ? ['', `>>> ${send.message}`, ''] : [];
    lines.push(`backend got   ${req.method} ${req.url} ${body}`);
    for (const line of lines) writeOut(`${line.replace(/\p{Cc}/gu, ' ').slice(0, 500)}\n`);
    const [status, json] = req.method === 'POST'
      ? [201, `{"timestamp":"${Date.now()}"}`]
      : [200, '{"versions":["v1","v2"],"build":2,"mode":"json-rpc","version":"unset"}'];
    res.writeHead(status, { 'Content-Type': 'application/json' }).end(json);
  }).listen(0, '127.0.0.1').unref();
}

/**
 * Starts a stand-in backend, and a gateway with a new token. Returns commands to try. The first has no quotes, which
 * cmd.exe, PowerShell and sh read differently. The log lines of requests that succeed would hide the messages, so only
 * the level debug shows them.
 */
async function runDemo(listen: string, level?: string, format = 'text') {
  const backend = startDemoBackend();
  await once(backend, 'listening');
  const number = '+15550100001';
  const recipient = '+15550100002';
  const secret = randomBytes(16).toString('base64url'); // short: the first command fits into 80 columns
  const gateway = createGateway({
    backend: { url: `http://127.0.0.1:${(backend.address() as AddressInfo).port}` },
    listen,
    log: { format: format as 'text' | 'json' },
    tokens: { demo: { secret, defaults: { number, recipients: [recipient] } } },
  }, {
    log: (line) => {
      const isOfSuccess = /\bstatus(?:=|":)[123]/.test(line);
      if (level === 'debug' || !isOfSuccess) writeOut(`${line}\n`);
    },
  });
  void stopOnSignal(gateway.close);
  const url = await gateway.listen().catch(failPort);
  return `
A demo: the backend is a stand-in, and nothing reaches Signal.
Paste this into another terminal; the message appears below. Ctrl-C stops it.

curl -u api:${secret} -d Hi ${url.replace('http://', '')}/v2/send

# Account setup is refused:
curl -X POST '${url}/v1/register/${number}' -u 'api:${secret}'
`;
}

// #endregion

// #region ADD AND TEST
// `add` makes a token and puts it into the file. `test` sends a message as a token would. Neither asks a question, so
// both work over ssh, in `docker compose exec` and in scripts. What the backend answers is not trusted: strangers
// choose their own names and those of groups, and something else than a backend may listen there.

/** Where the configuration of a command comes from. */
interface CommandInput {
  file: string;
  env: NodeJS.ProcessEnv;
  flags: Flags;
}

/** A failure while running, told in full. `output` is for standard output, because it must not be lost. */
class Failure extends Error {
  readonly output: string;

  constructor(message: string, output = '') {
    super(message);
    this.output = output;
  }
}

/** One kind of client, for `--for`. */
interface Client {
  allow: string[];
  /** Those that its line uses, so that it works whatever the top level says. */
  methods: AuthMethod[];
  /** Whether its sends name account and recipients, or these alone, or get both from `defaults`. Absent if it never sends. */
  names?: 'itself' | 'recipients' | 'by defaults';
  /** Whether it answers the people who write to it, by their UUIDs. */
  repliesToUuids?: true;
  /** What its owner copies into the client: a template (see TEMPLATES) of what `linesFor` gives. */
  line: string;
}

/**
 * What programs that receive may call. Attachments are named, because a token with `senders` is refused them otherwise,
 * and signalbot then loses the message with the picture, and those after it.
 */
const OF_BOTS = ['messaging', 'info', 'GET /v1/attachments/:attachment'];

/** What agents need that speak to signal-cli's daemon. */
const OF_AGENTS = ['messaging', 'info'];

const BOT: Client = {
  allow: OF_BOTS,
  methods: ['bearer', 'basic'],
  names: 'itself',
  repliesToUuids: true,
  line: `signal_service: "{{host}}"
auth: {type: bearer, token: {{secret}}}`,
};

/** The clients of `--for`. A test compares this table with the pages. To support another client, add a row. */
const CLIENTS: Record<string, Client> = {
  'script': {
    allow: ['send'],
    methods: ['basic', 'bearer'],
    names: 'by defaults',
    line: 'curl -u api:{{secret}} -d Hello {{url}}/v2/send',
  },
  'webhook': {
    allow: ['send'],
    methods: ['bearer', 'basic'],
    names: 'by defaults',
    line: `URL     {{url}}/v2/send
header  Authorization: Bearer {{secret}}`,
  },
  'grafana': {
    allow: ['send'],
    methods: ['bearer'],
    names: 'by defaults',
    line: `URL     {{url}}/v2/send
Authorization Header: scheme Bearer, credentials {{secret}}`,
  },
  'home-assistant': {
    allow: ['send', 'info'],
    methods: ['basic'],
    names: 'itself',
    line: `notify:
{{#sends}}
  - platform: signal_messenger
    name: signal{{suffix}}
    url: "{{scheme}}://api:{{secret}}@{{host}}"
    number: "{{number}}"
    recipients: {{recipients}}
{{/sends}}`,
  },
  'uptime-kuma': {
    allow: ['send'],
    methods: ['basic'],
    names: 'itself',
    line: `{{#sends}}
notification type "Signal"
post URL    {{scheme}}://api:{{secret}}@{{host}}/v2/send
number      {{number}}
recipients  {{byComma}}

{{/sends}}`,
  },
  'apprise': {
    allow: ['send'],
    methods: ['basic'],
    names: 'itself',
    // It gives up after 4 s, unless told otherwise, although the message may still arrive.
    line: 'signal{{#tls}}s{{/tls}}://api:{{secret}}@{{host}}/{{number}}{{#recipients}}/{{.}}{{/recipients}}?rto=60',
  },
  'shoutrrr': {
    allow: ['send'],
    methods: ['bearer'],
    names: 'itself',
    line: `{{#sends}}
signal://{{host}}/{{number}}{{#recipients}}/{{.}}{{/recipients}}?token={{secret}}{{^tls}}&disabletls=yes{{/tls}}
{{/sends}}`,
  },
  'n8n': {
    allow: OF_BOTS,
    methods: ['bearer'],
    names: 'itself',
    line: `API URL    {{url}}
API token  {{secret}}`,
  },
  'openclaw': {
    allow: OF_BOTS,
    methods: ['path'], // it refuses a user in its URL, and has no setting for a header
    names: 'itself',
    line: 'url: {{url}}/@auth={{secret}}',
  },
  'openclaw-daemon': {
    allow: OF_AGENTS,
    methods: ['path'],
    names: 'itself',
    repliesToUuids: true,
    line: 'url: {{url}}/@auth={{secret}}',
  },
  'hermes': {
    allow: OF_AGENTS,
    methods: ['basic'],
    names: 'itself',
    repliesToUuids: true,
    line: `SIGNAL_HTTP_URL={{scheme}}://api:{{secret}}@{{host}}
SIGNAL_ACCOUNT={{number}}`,
  },
  'nanobot': {
    allow: OF_AGENTS,
    methods: ['basic'],
    names: 'recipients',
    repliesToUuids: true,
    line: '"daemonHost": "api:{{secret}}@{{name}}", "daemonPort": {{port}}',
  },
  'bot': BOT,
  'signalbot': BOT,
  'prometheus': {
    allow: ['metrics'],
    methods: ['bearer'],
    line: `scrape_configs:
  - job_name: signal-gateway
    scheme: {{scheme}}
    authorization: { credentials: {{secret}} }
    static_configs: [{ targets: ["{{host}}"] }]`,
  },
};

/**
 * Makes a token, and puts it into the file.
 * @returns what its owner needs to know, with the secret, which is shown this once.
 * @throws {Failure} with the token to paste, if the file cannot be written.
 */
async function addToken({ file, env, flags }: CommandInput, name: string, words: readonly string[]) {
  ensure(!/^(?:\+|group\.)/.test(name), "the token's name comes before its recipients: add NAME RECIPIENT…");
  checkTokenName(name);
  const readKind = wordOf(Object.keys(CLIENTS));
  const kind = attempt(
    () => readKind(flags.for ?? 'script'),
    ({ message }) => `--for: ${message}; a device, or another program that sends by itself, is a webhook`,
  );
  const client = CLIENTS[kind]!;
  const isSender = client.names !== undefined;
  const isListing = isSender && words.length === 0;
  for (const variable of TOKEN_VARIABLES) {
    ensure(
      isListing || !(variable in env),
      `${variable} is set and replaces all tokens of a file: write NAME=SECRET there ("openssl rand -hex 24" makes a secret), or unset it`,
    );
  }
  const before = isThere(file) ? readFile(file) : undefined;
  const text = before ?? newFile(env, flags);
  const secret = randomBytes(32).toString('base64url');
  const rights = { secret: `sha256:${digestOf(secret)}`, allow: client.allow, methods: client.methods };
  // With the token, because a file without any may be a mistake that this token mends.
  const settings = loadSettings({ file, text: insertToken(file, text, name, rights), env, flags });

  ensure(isSender || (words.length === 0 && !flags.from), `"${kind}" sends to nobody: give no recipient and no --from`);
  words.forEach(checkWord);
  const number = isSender ? await findAccount(settings, flags.from) : '';
  if (isListing) throw new UsageError(await listKnown(settings, name, number));
  const ids = [...new Set(words)];
  ensure(client.names !== 'by defaults' || sendsTo(ids).length <= 1, ONE_SEND);
  const lists = client.names === 'itself'
    ? { senders: [number], recipients: ids }
    : client.names === 'recipients'
    ? { senders: ['*'], recipients: ids }
    : { defaults: { number, recipients: ids } };
  const token = isSender ? { ...rights, ...lists } : rights;

  const after = insertToken(file, text, name, token);
  loadSettings({ file, text: after, env, flags }); // what is written is what the gateway accepts
  const address = addressFor(settings);
  const line = linesFor(client, { ...address, secret, number }, ids);
  const advice = address.host.startsWith('HOST')
    ? '\n\nHOST stands for the name or address by which the client reaches this gateway.'
    : settings.listen.isLocal
    ? '\n\nA client on another machine or in a container needs this machine\'s address there, and ":PORT" as "listen" or GATEWAY_LISTEN.'
    : '';
  const block = before === undefined ? after : `"${name}": ${JSON.stringify(token, null, 2)}\n`;
  const where = before === undefined ? 'save the lines above as that file' : 'put the first lines into its "tokens"';
  writeConfiguration(file, before, after, where, `${block}\n${line}${advice}`);
  const path = resolve(file);
  const may = isSender
    ? `may send from ${lists.senders?.[0] === '*' ? 'any account' : number} to ${ids.join(', ')}`
    : 'may read the metrics';
  const force = before === undefined
    ? 'The file is new: a gateway that starts or runs with this path has this token alone.'
    : `A gateway that runs with this file accepts it in ${IN_FORCE_SECONDS} s.`;
  const trial = isSender ? `\nThe command "test ${name}" sends a message as it would.` : '';
  const reply = client.repliesToUuids && ids.some((id) => NUMBER.test(id))
    ? '\nA bot replies to UUIDs: add those of its people to its "recipients"; "add NAME" alone lists them.'
    : '';
  return `"${name}" is in ${path}: it ${may}.\n${force}${trial}${reply}\n\n${line}${advice}`;
}

/** How soon a gateway that runs has read a changed file. */
const IN_FORCE_SECONDS = Math.ceil((WATCH_MS + SETTLE_MS) / 1000);

/**
 * Takes a token out of the file, whatever its backend does.
 * @returns what its owner needs to know: what ends, and when.
 */
function removeToken({ file, env, flags }: CommandInput, name: string) {
  const text = readFile(file);
  const { config, tokens } = parseTokens(file, text);
  const names = Object.keys(tokens).map((known) => showValue(known, '…')).join(', ') || 'none';
  ensure(Object.hasOwn(tokens, name), `${showPath(file)} has no token with that name; there are ${names}`);
  const { [name]: _, ...others } = tokens;
  const after = `${JSON.stringify({ ...config, tokens: others }, null, 2)}\n`;
  loadSettings({ file, text: after, env, flags }); // otherwise a gateway that runs would keep the token
  writeConfiguration(file, text, after, `delete "${name}" from its "tokens"`);
  const variable = TOKEN_VARIABLES.find((each) => each in env);
  return [
    `"${name}" is no longer in ${resolve(file)}.`,
    variable
      ? `${variable} is set and replaces all tokens of the file: what it has still works.`
      : `A gateway that runs with this file refuses the token in ${IN_FORCE_SECONDS} s, and ends what it has open.`,
    ...(Object.keys(others).length === 0 && !variable
      ? ['It was the last one: nobody is let in until there is another.']
      : []),
  ].join('\n');
}

/** What the owner of a token copies into its client, with as many entries as the backend needs sends. */
function linesFor(
  client: Client,
  common: { scheme: string; host: string; secret: string; number: string },
  ids: readonly string[],
) {
  const url = `${common.scheme}://${common.host}`;
  const formsOf = (recipients: readonly string[]) => ({ recipients, byComma: recipients.join(',') });
  const sends = sendsTo(ids).map((list, i) => ({ ...formsOf(list), suffix: i === 0 ? '' : `_${i + 1}` }));
  const [, name, port] = /^(.*):(\d+)$/.exec(common.host)!;
  const data = { ...common, ...formsOf(ids), name, port, url, tls: common.scheme === 'https', sends };
  return new Template(client.line).render(data).text.trimEnd();
}

/** What a new file contains before its first token: the backend, if its address was given. */
function newFile(env: NodeJS.ProcessEnv, flags: Flags) {
  const url = flags.backend ?? env[variableOf('backend.url')];
  return `${JSON.stringify(url === undefined ? {} : { backend: { url } }, null, 2)}\n`;
}

/** A configuration, and its tokens. @throws {UsageError} if the text is none. */
function parseTokens(file: string, text: string) {
  const { config, mistakes } = attempt(() => parseFile(text), ({ message }) => `${showPath(file)}: ${message}`);
  // Of "tokens" given twice, only the second would be left.
  ensure(mistakes.length === 0, `${showPath(file)}: ${mistakes[0]}`);
  const { tokens = {} } = config;
  const advice = 'write it as an object: { "NAME": { "secret": "SECRET" } }';
  ensure(isObject(tokens), `tokens: only an object can be changed here; ${advice}`);
  return { config, tokens };
}

/** The text of a file with one more token. @throws {UsageError} if it has one of that name. */
function insertToken(file: string, text: string, name: string, token: TokenConfig) {
  const { config, tokens } = parseTokens(file, text);
  ensure(
    !Object.hasOwn(tokens, name),
    `there is a token "${name}" already; choose another name, or first remove it ("remove ${name}"), ` +
      `or rename it in ${showPath(file)}, so that its client can go on until you remove it`,
  );
  return `${JSON.stringify({ ...config, tokens: { ...tokens, [name]: token } }, null, 2)}\n`;
}

/** Whether there is something at a path, even a link to nothing, or what cannot be looked at. */
function isThere(path: string) {
  try {
    lstatSync(path);
    return true;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code !== 'ENOENT';
  }
}

/**
 * Writes a configuration file.
 * @param instead what to do by hand where it cannot be written, and the text for that.
 * @throws {Failure} with that.
 */
function writeConfiguration(file: string, before: string | undefined, after: string, instead: string, text = '') {
  try {
    replaceFile(file, before, after);
  } catch (error) {
    if (error instanceof UsageError) throw error;
    const { code, name } = error as NodeJS.ErrnoException;
    throw new Failure(`${resolve(file)} cannot be written (${code ?? name}); nothing was changed: ${instead}`, text);
  }
}

/**
 * Replaces a file, or creates it with mode 600, in one step: a gateway that reads it meanwhile never finds half of it.
 * A link stays, and what it leads to is replaced. Mode and owner stay as they were.
 * @param before what the file contained when it was read; undefined if there was none.
 * @throws {UsageError} if the file has changed since; and the error of the file system. Nothing was changed then.
 */
function replaceFile(file: string, before: string | undefined, after: string) {
  const path = before === undefined ? resolve(file) : realpathSync(file);
  const old = before === undefined ? undefined : statSync(path);
  if (old) closeSync(openSync(path, 'r+')); // fails if the file itself is read-only, in a folder that is not
  const next = `${path}.${randomBytes(6).toString('hex')}.new`;
  const descriptor = openSync(next, 'wx', 0o600);
  try {
    const { uid, gid } = fstatSync(descriptor);
    const isForeign = old !== undefined && (old.uid !== uid || old.gid !== gid);
    try {
      writeFileSync(descriptor, after);
      if (isForeign) fchownSync(descriptor, old.uid, old.gid); // root can; otherwise the owner could lose the file
      if (old) fchmodSync(descriptor, old.mode & 0o777);
      fsyncSync(descriptor);
    } finally {
      closeSync(descriptor);
    }
    const now = isThere(path) ? readFileSync(path, 'utf8') : undefined;
    ensure(now === before, `${resolve(file)} has changed meanwhile; nothing was written: run the command again`);
    renameSync(next, path);
  } catch (error) {
    rmSync(next, { force: true });
    throw error;
  }
}

/** How a client on this machine reaches the gateway, or HOST where only its owner knows that. */
function addressFor({ listen: { host, port, isLocal }, 'tls.cert': cert }: Settings) {
  const isNamed = cert === undefined && (isLocal || isIP(host) !== 0) && !/^(?:0\.0\.0\.0|::)$/.test(host);
  const named = isIP(host) === 6 ? `[${host}]` : host;
  return { scheme: cert === undefined ? 'http' : 'https', host: `${isNamed ? named : 'HOST'}:${port}` };
}

/**
 * The account that a token sends from: the one that was asked for, that of the configuration, or the backend's only
 * one.
 * @throws {UsageError} if there are several.
 */
async function findAccount(settings: Settings, wanted?: string) {
  if (wanted !== undefined) {
    ensure(NUMBER.test(wanted), '--from: an account is "+", the country code and digits alone, such as +4915112345678');
    return wanted;
  }
  if (settings['defaults.number']) return settings['defaults.number'];
  const ofTokens = new Set(
    makeRules(settings).all.flatMap((
      { senders, defaults },
    ) => [...(senders ?? []), ...(defaults?.number ? [defaults.number] : [])]),
  );
  if (ofTokens.size === 1) return [...ofTokens][0]!;
  const accounts = await askForList(
    settings,
    '/v1/accounts',
    (entry): entry is string => typeof entry === 'string' && NUMBER.test(entry),
  );
  const { name } = settings['backend.url'];
  if (accounts.length === 0) {
    const advice = "link it to your phone first, with the backend's /v1/qrcodelink, as the README says";
    throw new Failure(`the backend ${name} has no account: ${advice}`);
  }
  const all = joinFirst(accounts, ', ');
  ensure(accounts.length === 1, `the backend ${name} has several accounts: choose one with --from NUMBER, of ${all}`);
  return accounts[0]!;
}

/** A group of the backend. Its name is what anyone in it has chosen. */
type Group = { id: string; name: string };

function listGroups(settings: Settings, number: string) {
  return askForList(settings, `/v1/groups/${encodeURIComponent(number)}`, (entry): entry is Group => {
    return isObject(entry) && typeof entry.id === 'string' && typeof entry.name === 'string';
  });
}

/** A person whom the backend knows. */
type Contact = { number?: unknown; uuid?: unknown; name?: unknown; profile_name?: unknown };

function listContacts(settings: Settings, number: string) {
  return askForList(
    settings,
    `/v1/contacts/${encodeURIComponent(number)}`,
    (entry): entry is Contact => isObject(entry),
  );
}

/** The UUID of a contact, or ''. The backend may call anything so, and the owner copies it. */
function uuidOf({ uuid }: Contact) {
  return typeof uuid === 'string' && kindOf(uuid) === 'a UUID' ? uuid : '';
}

/** How many groups, and how many contacts, `add` lists. */
const KNOWN_LIMIT = 100;

/** What the backend knows, for somebody who has named no recipient. Ids come first, so that no name looks like one. */
async function listKnown(settings: Settings, name: string, number: string) {
  const groups = (await listGroups(settings, number)).map((group) => ['group', group.id, group.name] as const);
  const contacts = (await listContacts(settings, number)).map((contact) => {
    const phone = NUMBER.test(String(contact.number)) ? String(contact.number) : '';
    const ids = [phone, uuidOf(contact)].filter(Boolean);
    return ['contact', ids.join('  '), contact.name || contact.profile_name] as const;
  });
  const rowsOf = (known: readonly (readonly [kind: string, id: string, name: unknown])[]) => {
    const rows = known.filter(([kind, id]) => kind === 'contact' ? id !== '' : isRecipient(id));
    const more = rows.length > KNOWN_LIMIT ? [`  and ${rows.length - KNOWN_LIMIT} more`] : [];
    const first = rows.slice(0, KNOWN_LIMIT);
    return [...first.map(([kind, id, name]) => `  ${kind.padEnd(8)} ${id}  ${showName(name)}`.trimEnd()), ...more];
  };
  return [
    `say who may get its messages: add ${name} RECIPIENT…, by number, UUID, user name or a group's id.`,
    `The backend ${settings['backend.url'].name} knows`,
    `  account  ${number}`,
    ...rowsOf(groups),
    ...rowsOf(contacts),
  ].join('\n');
}

/** Refuses a word that is meant as a recipient, but is not written as one. */
function checkWord(word: string, i: number) {
  if (isRecipient(word)) return;
  const at = `recipient ${i + 1}`;
  const isNumber = /^\+\d/.test(word) || kindOf(word) === 'a phone number';
  ensure(!isNumber, `${at}: write a phone number as "+", the country code and digits alone, such as +4915112345678`);
  ensure(!/^(?:group\.)?\*$/.test(word), `${at}: add the token with one recipient, and write "${word}" into the file`);
  const hint = hintFor(RECIPIENT_HINTS, word) ?? "this is no phone number, user name, UUID or group's id";
  throw new UsageError(`${at}: ${hint}; "add NAME" alone lists what the backend knows`);
}

/** A name that a stranger may have chosen, so that it can neither steer a terminal nor fill it. */
function showName(name: unknown) {
  const [...letters] = cleanText(typeof name === 'string' ? name : '').replace(
    /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu,
    '',
  );
  return letters.length > 40 ? `${letters.slice(0, 40).join('')}…` : letters.join('');
}

/** What the backend has said, for a person: without what steers a terminal, and not without end. */
function showAnswer(text: string) {
  return cleanText(text).replace(/[\p{Cf}\s]+/gu, ' ').trim().slice(0, 500) || 'an empty body';
}

/** How long the backend may take to list what it knows. In some of its modes it starts a Java program for that. */
const LIST_TIMEOUT_MS = 60_000;

/** The longest answer of the backend that `add` and `test` read. A large account's contacts have a few MiB. */
const ANSWER_LIMIT_BYTES = 16 * 1024 * 1024;

/** The headers of a request of the gateway's own to the backend. */
function commandHeaders(authorization: string | null | undefined) {
  return { 'User-Agent': `signal-gateway/${VERSION}`, ...(authorization && { Authorization: authorization }) };
}

/** The text of an answer. @throws {Error} if it is too long. */
async function readAnswer(response: AsyncIterable<Uint8Array> | Iterable<Uint8Array>) {
  const chunks: Uint8Array[] = [];
  let bytes = 0;
  for await (const chunk of response) {
    chunks.push(chunk);
    bytes += chunk.length;
    if (bytes > ANSWER_LIMIT_BYTES) throw new Error('its answer does not end');
  }
  return Buffer.concat(chunks).toString();
}

/**
 * Asks the backend as a command does, at most within `backend.timeout`.
 * @throws {Failure} if there is no answer.
 */
async function callBackend(settings: Settings, path: string, init: RequestInit = {}, limitMs = LIST_TIMEOUT_MS) {
  const { name, authorization } = settings['backend.url'];
  const headers = {
    ...commandHeaders(authorization),
    ...(init.body && { 'Content-Type': 'application/json' }),
  };
  const signal = AbortSignal.timeout(Math.min(settings['backend.timeout'], limitMs));
  try {
    const response = await fetch(`${name}${path}`, { ...init, headers, signal, redirect: 'manual' });
    return { status: response.status, text: await readAnswer(response.body ?? []) };
  } catch (error) {
    // Each runtime has its own words, in another place.
    const { name: kind, message, cause } = error as Error & { cause?: NodeJS.ErrnoException };
    const why = kind === 'TimeoutError' ? 'timeout' : cause?.code ?? cause?.message ?? message;
    const { reason, hint } = explainReason(why, name, message);
    const other = name === SETTINGS['backend.url'][2] ? '; --backend URL names another address' : '';
    const isSure = init.method !== 'POST' || /refused|ENOTFOUND|EAI_AGAIN/i.test(reason);
    const outcome = isSure ? '' : '; the message may have been sent';
    throw new Failure(`the backend ${name} did not answer (${reason}): ${hint}${other}${outcome}`);
  }
}

/** Why the backend did not answer, and what to do. @param message further words of the runtime. */
function explainReason(reason: string, backend: string, message = '') {
  const hint = hintFor(ASK_HINTS, `${reason} ${message}`);
  const isHere = /refused/i.test(reason) && /\/\/(?:localhost|127\.|\[::1\])/.test(backend);
  return { reason, hint: isHere ? `${hint}; in a container, localhost is the container itself` : hint };
}

/**
 * Asks the backend for a list.
 * @throws {Failure} if it does not answer with a list of such entries.
 */
async function askForList<T>(settings: Settings, path: string, isEntry: (entry: unknown) => entry is T) {
  const { name } = settings['backend.url'];
  const { status, text } = await callBackend(settings, path);
  const sentence = `the backend ${name} answers GET ${path} with ${status}`;
  if (status !== 200) {
    const whole = `${sentence}: ${showAnswer(text)}`;
    const daemon = "; signal-cli's daemon cannot be asked: give --from NUMBER and recipients";
    throw new Failure(`${whole}${hintForAnswer(status, text, whole)}${status === 404 ? daemon : ''}`);
  }
  const list = parseAnswer(text) ?? [];
  if (Array.isArray(list) && list.every(isEntry)) return list;
  throw new Failure(`${sentence}, but not as signal-cli-rest-api does: correct backend.url`);
}

/**
 * What to do about an answer that is no success, as the end of a sentence. What the backend says needs no guess.
 * @param said the sentence, with the answer.
 */
function hintForAnswer(status: number, text: string, sentence: string) {
  if (/"code":"unauthorized"/.test(text)) return adviceFor(ASK_HINTS, 'own_address');
  if (status === 401) return adviceFor(ASK_HINTS, 'status 401'); // a proxy: the backend has no such answer
  const hint = adviceFor(SIGNAL_HINTS, sentence);
  if (hint || /^\s*\{"error":/.test(text)) return hint;
  return status >= 500 ? "; the backend's own log says why" : adviceFor(ASK_HINTS, `status ${status}`);
}

/** JSON, or a text that is none as it stands. Go writes an empty list as null where it was never made. */
function parseAnswer(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** What to do if the backend did not answer as expected. Each runtime has its own words for the reasons. */
const ASK_HINTS: Hints = [
  [/own_address/, "backend.url is this gateway's own address: give the backend's"],
  [/refused|bad port/i, 'start the backend, or correct its port'],
  [
    /EAI_AGAIN|ENOTFOUND|dns|lookup|FailedToOpenSocket/i,
    'start the backend, correct its name, or put both on one network',
  ],
  [/cert|signature/i, "let this machine trust the backend's certificate"],
  [/reset|closed|socket|SSL|TLS|corrupt|EPROTO|HPE/i, 'correct http:// or https:// in backend.url'],
  [/unreach|ETIMEDOUT|no route/i, "start the backend's machine, check the network, or correct its address"],
  [/timeout|timed out/i, "check the backend's log, or correct its address"],
  [/status 50[234]/, 'start the backend: a proxy in front of it answers'],
  [/status 401/, 'put the right USER:PASSWORD@ into backend.url'],
  [/./, 'correct backend.url: something else listens there'],
];

/** What to do about what signal-cli says, by its words in an answer of the backend. */
const SIGNAL_HINTS: Hints = [
  [
    /^[^{]*(?:\+|%2B)1555.*(?:account does not exist|registered)/i,
    '+1555… is a number of the examples: write your own',
  ],
  [
    /account does not exist|not registered|no local users/i,
    'the backend does not have this account: correct the number, or link it',
  ],
  [/challenge|rate.?limit/i, 'Signal asks for a captcha: see the rate-limit challenge of the backend'],
  [
    /\(some\) messages.*unregistered user/is,
    'a recipient has left Signal; in a group, all others have the message: remove that member',
  ],
  [/untrusted/i, 'a recipient has a new phone, or Signal installed again: trust the new key at the backend'],
  [/UNREGISTERED/i, 'a recipient has no Signal account with this number'],
  [/authorization failed/i, 'Signal no longer knows this device: link the account again'],
  [
    /too old|StatusCode: 499|DeprecatedVersion/i,
    'Signal no longer takes this version of signal-cli: update the backend',
  ],
  [
    /checking account|closed unexpectedly|connection closed|no data to encode|UnknownHost/i,
    'the backend cannot reach Signal: check its internet connection',
  ],
];

/** A send as signal-cli's daemon takes it. */
function callFor(account: string, recipients: readonly string[], message: string) {
  const others = recipients.filter((id) => !isGroupId(id));
  const isName = (id: string) => kindOf(id) === 'a user name';
  const params = {
    account,
    message,
    recipient: others.filter((id) => !isName(id)),
    username: others.filter(isName),
    groupId: recipients.filter(isGroupId).map((id) => atob(id.slice('group.'.length))),
  };
  return JSON.stringify({ jsonrpc: '2.0', method: 'send', params, id: 1 });
}

/** The longest time that a timer can have: `test` waits as long as `backend.timeout` says. */
const TIMER_LIMIT_MS = 2 ** 31 - 1;

/**
 * Sends a message as a token would, but straight to the backend, so that no secret is needed. A failure is then one of
 * the backend or of Signal; if it succeeds, what is wrong is between the client and the gateway.
 * @throws {Problem} the refusal that the gateway would give.
 * @throws {Failure} with what the backend says.
 */
async function testToken(settings: Settings, name: string, word: string | undefined, from: string | undefined) {
  const token = findToken(settings, name);
  if (token.expires <= Date.now()) throw new Failure(`the token "${name}" has expired`);
  ensure(
    !token.allow.written.every(opensMetrics),
    `the token "${name}" only reads metrics, so there is nothing to test`,
  );
  checkSendRoute(token);
  const [ofList] = token.senders ?? [];
  const number = from ?? token.defaults?.number ?? ofList;
  const own = token.defaults?.recipients ?? [...(token.recipients ?? [])].filter(isRecipient).slice(0, 1);
  ensure(
    word !== undefined || own.length > 0,
    `the token "${name}" has no list of recipients, so name one: test ${name} RECIPIENT`,
  );
  if (word !== undefined) checkWord(word, 0);
  const account = await findAccount(settings, number);
  const recipients = word === undefined ? own : [word];
  const message = 'Test of the gateway';
  const body = checkMessage(token, { message, ...token.defaults, number: account, recipients });
  const post = (path: string, json: string | Buffer<ArrayBuffer>) =>
    callBackend(settings, path, { method: 'POST', body: json }, TIMER_LIMIT_MS);
  const answer = await post('/v2/send', body);
  const isDaemon = answer.status === 404;
  const { status, text } = isDaemon ? await post('/api/v1/rpc', callFor(account, recipients, message)) : answer;
  const sentence = `from ${account} to ${joinFirst(recipients, ', ')}: the backend answers ${status} ${
    showAnswer(text)
  }`;
  // Newer backends answer 201 although some recipients got nothing, and name them in "errors". The daemon answers 200.
  const [first] = [parseAnswer(text)].flat();
  const isSent = isObject(first) &&
    (isDaemon ? status === 200 && isObject(first.result) : status === 201 && first.errors === undefined);
  if (!isSent) throw new Failure(`${sentence}${hintForAnswer(status, text, sentence)}`);
  return `${sentence}\nLook at the phone: it shows "${message}".`;
}

// #endregion

// #region COMMAND LINE

/** The command line as a process: its arguments, environment, standard streams, exit code and signals. */
async function main() {
  // The reader of the output may be gone (`--help | head`, a log's pipe), and the gateway must go on serving.
  process.stdout.on('error', () => {});
  process.stderr.on('error', () => {});
  const { code, stdout, stderr } = await run(process.argv.slice(2), process.env, readStdin);
  writeOut(stdout);
  if (stderr !== '') process.stderr.write(stderr); // on a full disk even an empty text is an error
  process.exitCode = code;
}

/** Reads standard input. At a terminal, a command that waits without a word would seem to hang. */
function readStdin() {
  if (isatty(0)) process.stderr.write('gateway: reading standard input, to the end (Ctrl-D)\n');
  return readFileSync(0);
}

/** Runs a command line. Returns the exit code and the output, once the command is done or the gateway listens. */
async function run(args: string[], env: NodeJS.ProcessEnv, stdin: () => Buffer) {
  try {
    const { output, remark = '' } = await runCommand(args, env, stdin);
    return { code: 0, stdout: output && `${output}\n`, stderr: remark };
  } catch (error) {
    const { message } = error as Error;
    // `render` and `test` throw a Problem, the refusal that the client would get.
    const isExpected = error instanceof UsageError || error instanceof Problem || error instanceof Failure;
    const help = /is not a setting;/.test(message) ? '\n  --help describes all settings' : '';
    const stderr = `gateway: ${isExpected ? message + help : `cannot run: ${message}`}\n`;
    const stdout = error instanceof Failure && error.output ? `${error.output}\n` : '';
    return { code: error instanceof UsageError ? 2 : 1, stdout, stderr };
  }
}

/** The output of a command, '' if a gateway listens from now on; and what is for a person alone, on standard error. */
type Output = { output: string; remark?: string };

async function runCommand(args: string[], env: NodeJS.ProcessEnv, stdin: () => Buffer): Promise<Output> {
  const { values, positionals: [command, ...rest] } = parseCommandLine(args);
  // These need no configuration, and so work with a broken one.
  if (values.help) return { output: usage() };
  if (values.version) return { output: VERSION };
  const isRemove = command === 'remove' && rest.length === 1;
  const isRender = command === 'render' && rest.length === 1;
  const isAdd = command === 'add' && rest.length >= 1;
  const isTest = command === 'test' && (rest.length === 1 || rest.length === 2);
  // The argument is not shown: it may be a secret.
  ensure(
    command === undefined || isRender || isAdd || isRemove || isTest,
    `unknown command or arguments; ${WHAT_THERE_IS}`,
  );
  ensure(!values.check || command === undefined, '--check is a command of its own; see --help');
  ensure(isAdd || values.for === undefined, '--for belongs to "add"; see --help');
  ensure(isAdd || isTest || values.from === undefined, '--from belongs to "add" and "test"; see --help');

  const named = values.config ?? env[CONFIG_FILE];
  ensure(named !== '', '--config, or GATEWAY_CONFIG, is set but empty');
  if (values.demo) {
    const configured = named ?? values.backend ?? env[variableOf('backend.url')] ?? env[variableOf('tokens')] ??
      env[TOKENS_FILE];
    const isAlone = (command ?? values.check ?? configured) === undefined;
    ensure(isAlone, '--demo brings its own backend and token, so it cannot be combined with configured ones');
    const listen = values.listen ?? env[variableOf('listen')] ?? SETTINGS.listen[2];
    return { output: await runDemo(listen, env[variableOf('log.level')], env[variableOf('log.format')]) };
  }
  if (isAdd) {
    const adding = addToken({ file: named ?? DEFAULT_FILE, env, flags: values }, rest[0]!, rest.slice(1));
    return { output: await patiently(adding) };
  }
  if (isRemove) return { output: removeToken({ file: named ?? DEFAULT_FILE, env, flags: values }, rest[0]!) };
  // Looked for once: a file that appears later is read after a restart, and cannot change what runs.
  const file = named ?? (isThere(DEFAULT_FILE) ? DEFAULT_FILE : undefined);
  // For `--check`, `render`, a start and a reload, so the configuration that was checked is the one that runs.
  const load = () => loadSettings({ file, env, flags: values });
  const settings = load();
  if (values.check) return { output: printCheck(settings) };
  if (isRender) return renderMessage(settings, rest[0]!, stdin());
  if (isTest) return { output: await patiently(testToken(settings, rest[0]!, rest[1], values.from)) };
  const core = makeCore(settings, makeRules(settings), {});
  void stopOnSignal(() => closeGateway(core));
  reloadOnChange(core, load);
  await startListening(core).catch(failPort);
  // The last resort: no client may crash the process, whatever throws. Only from here on, because a taken port should
  // end it.
  process.on('uncaughtException', (error) => logInternalError(core, error));
  void reportBackend(core);
  return { output: '' };
}

/** How long `add` and `test` wait before they say that the backend is asked. */
const ASK_REMARK_MS = 3000;

/** Says so if a command waits long for the backend: without a word, it would seem to hang. */
async function patiently<T>(command: Promise<T>) {
  const remark = 'gateway: asking the backend, which takes long in normal mode\n';
  const timer = setTimeout(() => process.stderr.write(remark), ASK_REMARK_MS);
  return await command.finally(() => clearTimeout(timer));
}

/** @throws {Failure} with what to do about a port that cannot be opened. */
function failPort({ message }: Error): never {
  throw new Failure(`cannot run: ${message}; --listen HOST:PORT chooses another address`);
}

/** The commands, and what each does. */
const COMMANDS = {
  '--check': 'list every mistake, or what each token may do',
  '--demo': 'run with a stand-in backend and a new token',
  'add NAME RECIPIENT… [--from NUMBER] [--for CLIENT]': 'make a token for a client, in the file',
  'test NAME [RECIPIENT]': 'send a message as that token would',
  'render NAME': 'print the message that is built from stdin',
  'remove NAME': 'take that token out of the file',
};

const FLAGS = '--config FILE, --listen HOST:PORT, --backend URL, --help, --version';

/** The end of a message about a command line. */
const WHAT_THERE_IS = `there are ${Object.keys(COMMANDS).join(', ')}, and the flags ${FLAGS}; ` +
  'without a command, the gateway starts';

/** The file that is read if no other is named. A gateway beside its file would otherwise run without its tokens. */
const DEFAULT_FILE = 'gateway.json';

const OPTIONS = {
  config: { type: 'string' },
  listen: { type: 'string' },
  backend: { type: 'string' },
  from: { type: 'string' },
  for: { type: 'string' },
  check: { type: 'boolean' },
  demo: { type: 'boolean' },
  help: { type: 'boolean', short: 'h' },
  version: { type: 'boolean', short: 'v' },
} as const;

/**
 * Parses the flags. Every setting has a variable; only two, for a first try, also have a flag.
 * @throws {UsageError} with advice. parseArgs is not strict, because its own messages would quote a secret.
 */
function parseCommandLine(args: string[]) {
  const { values, positionals, tokens } = parseArgs({ args, options: OPTIONS, strict: false, tokens: true });
  for (const token of tokens) {
    if (token.kind !== 'option') continue;
    const option = Object.hasOwn(OPTIONS, token.name) ? OPTIONS[token.name as keyof typeof OPTIONS] : undefined;
    // A long name may be a secret.
    const shown = token.rawName.length < SECRET_MIN_LENGTH ? token.rawName : 'with a long name';
    ensure(option !== undefined, `unknown option ${shown}; ${WHAT_THERE_IS}`);
    const hasValue = token.value !== undefined && (token.inlineValue || !token.value.startsWith('-'));
    ensure(option.type === 'boolean' || hasValue, `${shown} needs a value; see --help`);
    ensure(option.type === 'string' || token.value === undefined, `${shown} takes no value; see --help`);
  }
  // Editors and chats make a dash of two hyphens.
  ensure(
    !positionals.some((word) => /^[\u2010-\u2015\u2212]/.test(word)),
    'a dash is no hyphen: write "--"; see --help',
  );
  return { values: values as Flags, positionals };
}

/** The value of each flag that was given. */
type Flags = { [Name in keyof typeof OPTIONS]?: (typeof OPTIONS)[Name]['type'] extends 'string' ? string : boolean };

/** The text of `--help`, in 80 columns. The settings of the top level come from `SETTINGS`. */
function usage() {
  const rows = SETTING_ROWS.map(([path, [, help, fallback]]) =>
    `  ${path.padEnd(20)}${fallback ? `[${fallback}]` : ''}`.trimEnd() + `\n      ${help}`
  );
  const commands = Object.entries({ '[FLAGS]': 'run', ...COMMANDS }).map(([line, does]) =>
    `  gateway.mjs ${line.padEnd(14)}${line.length < 14 ? '' : `\n${' '.repeat(28)}`} ${does}`
  );
  const clients = `CLIENT: ${Object.keys(CLIENTS).join(', ')}.`.replace(/(?=.{78})(.{1,78}) /g, '$1\n');
  return `signal-gateway ${VERSION}: an authenticating gateway for signal-cli-rest-api

Settings, by path in the JSON file (--config, or GATEWAY_CONFIG, or else
gateway.json in this folder), each with its [default]. The variable of a setting
is GATEWAY_ and its path: limits.body is GATEWAY_LIMITS_BODY, trustedProxies
GATEWAY_TRUSTED_PROXIES. Flags override variables, variables override the file.
Durations: 250ms 30s 5m 1h 7d; sizes: 64KiB 10MiB. GATEWAY_TOKENS_FILE names a
file with tokens, a line each.

${rows.join('\n')}

docs/reference.md is the manual: a token's own settings, the groups of allow,
and what a refusal means.

Usage:

${commands.join('\n')}

Flags: ${FLAGS}.
${clients}
SIGHUP, or a change of the file, reloads. SIGTERM and SIGINT (Ctrl-C) let
running requests finish; the same signal again cuts them off.

Run it for this machine alone, in front of the backend at this address:

  gateway.mjs --backend http://192.168.1.5:8080`;
}

/** The output of `--check` for a good configuration. */
function printCheck(settings: Settings) {
  const { listen } = settings;
  const rules = makeRules(settings);
  return [
    `The configuration is valid. It was read from: ${settings.readFrom.join(', ') || 'nothing, only defaults apply'}.`,
    `listen port ${listen.port}, ${listen.isLocal ? 'for this machine only' : 'for other machines too'}`,
    `backend ${settings['backend.url'].name}`,
    `tokens ${rules.tokens.size}`,
    ...warningsOf(rules, settings, Date.now()).map((warning) => `warning: ${warning}`),
    ...rules.all.map(describeToken),
  ].join('\n');
}

/** Describes what a token may do. Missing limits are named too, so that an owner sees "any account". */
function describeToken(token: Token) {
  const words = (list: Iterable<string> = []) => [...list].join(', ');
  const accounts = words(token.senders) || 'any account';
  const { written, groups, patterns } = token.allow;
  const acts = groups.has('send') || groups.has('setup') || written.includes('GET /v2/send') ||
    patterns.some(({ method }) => method !== 'GET');
  const reads = !written.every(opensMetrics);
  const isOpen = (method: string, path: string) => !refusalOfEndpoint(token, parseTarget(method, path));
  const rows = {
    'may call': words(written),
    'presented': token.digest && `as ${words(token.methods)}`,
    'sends from': acts && accounts,
    'sends to': acts && (words(token.recipients) || 'anyone'),
    'reads': !acts && reads && accounts,
    'attachments': token.senders && isOpen('GET', '/v1/attachments/x') && 'of any account, by their random ids',
    'rate': token.rate?.written ?? 'no limit',
    'from': words(token.clients?.written) || 'any address',
    'webhooks': buildsMessages(token) && describeMessages(token),
    'expires': token.expires === Infinity ? 'never' : new Date(token.expires).toISOString(),
  };
  // In lines of 80 columns, because a terminal would break longer ones inside a number.
  const wrapped = (text: string) => text.replace(/(?=.{64})(.{1,63}) /g, `$1\n${' '.repeat(17)}`);
  const lines = Object.entries(rows).flatMap(([name, said]) => said ? `    ${name.padEnd(12)} ${wrapped(said)}` : []);
  const idle = written.filter((word) => !GROUPS.includes(word) && !canMatch(token, word))
    .map((pattern) =>
      pattern === 'GET /v2/send'
        ? `${pattern} needs "defaults" or "message"`
        : `${pattern} matches no route of the backend`
    );
  // A pattern for one route of setup is what its owner reads. One with a wildcard opens more than that.
  const wide = patterns.filter(({ parts }) => parts.includes('*') && SETUP_PREFIXES.has(prefixOf(parts)));
  const warnings = [
    ...idle,
    wide.length > 0 && 'a pattern with "*" opens account setup: name the one route that is needed',
    token.needsEscapes && 'percent-encode its secret in URLs: it has characters other than letters, digits, . _ ~ -',
    token.message?.hasForeignTags &&
    'its message has "{%", "${" or single braces, which are sent as they stand; write {{name}}, or {{#name}} … {{/name}}',
    token.message && !token.defaults?.number && !token.defaults?.recipients &&
    'its "message" makes sends of webhooks, which name no account and no recipients: set "defaults"',
    // Only here: such a token may be meant, and a warning at each start would teach its owner to read over warnings.
    token.digest && acts && !token.senders && !token.recipients &&
    'nothing confines it: it may send from any account to anyone',
  ].flatMap((warning) => warning ? `    warning      ${warning}` : []);
  return [`  ${token.name}`, ...lines, ...warnings].join('\n');
}

/** For each kind of parameter that is checked: a value that passes. */
const SAMPLES: NodeJS.Dict<string> = {
  ':number': '+15550100001',
  ':groupid': `group.${btoa(Buffer.alloc(32).toString('base64'))}`,
};

/** Whether a pattern alone would open a route of the backend. For each route, it tries a target that fits both. */
function canMatch(token: Token, pattern: string) {
  const alone = { ...token, allow: readAllow([pattern]) };
  const { method, parts } = alone.allow.patterns[0]!;
  return ROUTES.some((route) => {
    const segments = [...parts, ...route.parts.slice(parts.length)].map((part, i) => {
      const ofRoute = route.parts[i] ?? '*';
      return encodeURIComponent([part, ofRoute].find(isLiteral) ?? SAMPLES[part] ?? SAMPLES[ofRoute] ?? 'x');
    });
    try {
      const target = parseTarget(method === '*' ? route.method : method, `/${segments.join('/')}`);
      return Boolean(target.route && findGrant(alone, target));
    } catch { // the pattern spells what no target may have
      return false;
    }
  });
}

/** Describes the messages that are built from webhooks, and whether the token may send to its own defaults. */
function describeMessages(token: Token) {
  const fields = Object.entries(token.defaults ?? {}).map(([name, value]) => `${name} ${[value].flat().join(' and ')}`)
    .join(', ');
  const parts = [`become messages${token.message ? ', with the text from a template' : ''}`];
  if (fields) parts.push(`by default with ${fields}`);
  try {
    checkSendRoute(token);
    const [number] = token.senders ?? []; // stands for the webhook's own, if the defaults have none
    checkMessage(token, { number, ...token.defaults });
  } catch (error) {
    parts.push(`warning: they will be refused: ${(error as Problem).message}`);
  }
  return parts.join('; ');
}

/** @throws {Problem} if a token's allowlist lets its sends through neither by POST nor by GET. */
function checkSendRoute(token: Token) {
  const refusal = refusalOfEndpoint(token, parseTarget('POST', '/v2/send'));
  if (refusal && refusalOfEndpoint(token, parseTarget('GET', '/v2/send'))) throw refusal;
}

/** @throws {UsageError} if there is no token with that name. */
function findToken(settings: Settings, name: string) {
  const tokens = [...makeRules(settings).tokens.values()];
  const token = tokens.find((known) => known.name === name);
  const names = tokens.map((known) => `"${known.name}"`).join(', ') || 'none yet: add NAME RECIPIENT… makes one';
  ensure(token !== undefined, `there is no token with that name; there are ${names}`);
  return token;
}

/**
 * The message that a gateway with these settings would build from a body posted with a token.
 * @throws {UsageError} if there is no such token, or if it builds no messages.
 */
function renderMessage(settings: Settings, name: string, body: Buffer) {
  const token = findToken(settings, name);
  ensure(
    buildsMessages(token),
    `the token "${name}" has neither "defaults" nor "message", and relays bodies unchanged`,
  );
  checkSendRoute(token);
  const limitBytes = Math.min(PAYLOAD_LIMIT_BYTES, settings['limits.body']);
  if (body.length > limitBytes) throw tooLarge(limitBytes, true);
  // The Content-Type is not known here, but a multipart form begins with its boundary.
  const [, boundary] = /^--([^\r\n]+)\r\n[\w-]+:/.exec(body.toString('latin1', 0, 1000)) ?? [];
  const payload = readPayload(token, body, boundary && `multipart/form-data; boundary="${boundary}"`);
  const message = buildMessage(token, payload);
  checkMessage(token, message);
  // In JSON, a text of several lines is hard to read.
  const text = String(message.message ?? '');
  const isLegible = JSON.stringify(text) === `"${text}"`;
  const shown = text.replace(/[^\P{Cc}\n\t]/gu, '');
  const missing = token.message?.missingIn(payload) ?? [];
  const remarks = [
    ...(isLegible ? [] : [`gateway: the phone shows\n\n${shown}\n`]),
    ...(missing.length > 0 ? [`gateway: this payload has no ${joinFirst(missing, ', ')}\n`] : []),
  ];
  return { output: JSON.stringify(message, null, 2), remark: remarks.join('\n') };
}

/** The first pause before it is asked again. Each further pause is twice as long, up to ASK_PAUSE_LIMIT_MS. */
const ASK_PAUSE_MS = 1000;

const ASK_PAUSE_LIMIT_MS = 60_000;

/**
 * Asks the backend for its version and logs it: a wrong address or password should be noticed when the gateway starts, not
 * when the first alert is lost. Nothing else depends on the version. If the request arrives at this gateway itself, its id
 * shows that.
 *
 * After a boot the backend often starts later, so it is asked again while nothing answers. The asking ends when this or
 * a client's request is answered, and when a reload names another backend. Only the first failure and the end are
 * logged.
 */
async function reportBackend(core: Core) {
  const { log, rules, upstream } = core;
  const backend = rules['backend.url'].name;
  upstream.isAwaited = true;
  let isFirst = true;
  let pauseMs = ASK_PAUSE_MS;
  while (core.upstream === upstream && !core.draining) {
    const { kind, fields }: Asked = upstream.isAwaited ? await askOnce(core) : { kind: 'answers', fields: {} };
    if (kind === 'answers') log('info', 'the backend answers', { backend, ...fields });
    else if (kind === 'wrong' || isFirst) log('warn', 'the backend did not answer as expected', { backend, ...fields });
    if (kind !== 'silent') return;
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    isFirst = false;
    pauseMs = Math.min(2 * pauseMs, ASK_PAUSE_LIMIT_MS);
  }
}

/**
 * What came of one question: the backend answers; or what answers is no backend, so `backend.url` is wrong; or nothing
 * answers, perhaps only not yet. `fields` are those of the log line.
 */
type Asked = { kind: 'answers' | 'wrong' | 'silent'; fields: object };

/** How long the backend may take to report its version when the gateway starts. */
const ASK_TIMEOUT_MS = 5000;

/**
 * Asks the backend for its version, once, as a send would: a question on a way of its own could be answered where no send
 * arrives.
 */
async function askOnce(core: Core): Promise<Asked> {
  const { rules, server, upstream, connectTimeoutMs } = core;
  const { name, url, options, prefix, authorization } = rules['backend.url'];
  const asking: Pick<Exchange, 'underway'> = { underway: undefined };
  const requestId = randomUUID();
  let failure: string | undefined;
  const stop = (reason: string) => {
    failure = reason;
    asking.underway?.destroy();
  };
  const stopIfOwn = ({ headers }: IncomingMessage) => {
    if (headers['x-request-id'] === requestId) stop('own_address');
  };
  const failed = (kind: 'wrong' | 'silent', reason: string): Asked => ({ kind, fields: explainReason(reason, name) });
  server.on('request', stopIfOwn);
  const timer = setTimeout(stop, ASK_TIMEOUT_MS, 'timeout'); // ends an unread body, too
  try {
    // Not kept: a backend that has just started may restart, and a send on that connection would be lost.
    const headers = {
      'Host': url.host,
      'X-Request-Id': requestId,
      'Connection': 'close',
      ...commandHeaders(authorization),
    };
    const ask = async (path: string) => {
      const request = { ...options, path: `${prefix}${path}`, headers };
      const outgoing = await connect(asking, request, Math.min(connectTimeoutMs, ASK_TIMEOUT_MS));
      const [response] = await once(outgoing.end(), 'response') as [IncomingMessage];
      return response;
    };
    const response = await ask('/v1/about');
    const status = response.statusCode!;
    // A proxy in front of a backend that is still starting.
    if (status === 502 || status === 503 || status === 504) return failed('silent', `status ${status}`);
    if (status === 404) {
      asking.underway?.destroy();
      const isDaemon = (await ask('/api/v1/check')).statusCode === 200;
      upstream.isAwaited = false;
      if (isDaemon) return { kind: 'answers', fields: { mode: 'signal-cli daemon' } };
    }
    upstream.isAwaited = false;
    if (status < 200 || status > 299) return failed('wrong', `status ${status}`);
    const about = await readAnswer(response).then(parseAnswer, () => undefined);
    if (!isObject(about)) return failed('wrong', failure ?? 'no JSON object');
    const [version, mode] = [about.version, about.mode].map((value) => String(value ?? 'unknown').slice(0, 40));
    return { kind: 'answers', fields: { version, mode } };
  } catch (error) {
    const reason = failure ?? (error instanceof Problem ? error.reason! : reasonOf(error));
    return failed(failure === 'own_address' ? 'wrong' : 'silent', reason);
  } finally {
    clearTimeout(timer);
    server.off('request', stopIfOwn);
    asking.underway?.destroy(); // what is unread
  }
}

/** How long the process waits on exit for its last log lines to be read. */
const FLUSH_MS = 500;

/**
 * Ends the process with 0 on SIGTERM or SIGINT. It is called before `listen`, so that the signals are handled before
 * the log says that the gateway listens.
 */
async function stopOnSignal(close: () => Promise<void>) {
  await Promise.race([once(process, 'SIGTERM'), once(process, 'SIGINT')]);
  // The process ends even if closing fails. Unread log output, and the timers of reloads and of the query at start,
  // would otherwise keep the process running.
  await close().finally(() => {
    setTimeout(() => process.exit(), FLUSH_MS);
    setImmediate(writeOut, '', () => process.exit()); // one turn later, when the failure was logged
  });
}

/**
 * Reloads on SIGHUP, and when a file that the settings were read from has changed and stayed the same for a while.
 * Files are watched by name, because editors and secret mounts replace them. Each is compared with its stamp from when
 * it was read, so that no change is missed, however soon after the start it is made.
 */
function reloadOnChange(core: Core, load: () => Settings) {
  let settleTimer: NodeJS.Timeout | undefined;
  let lastLook = '';
  const stampsNow = () => [...FILES_READ.keys()].map(stampOf).join();
  const look = () => {
    const stamps = stampsNow();
    if (stamps === lastLook) return;
    lastLook = stamps;
    clearTimeout(settleTimer);
    if (stamps !== [...FILES_READ.values()].join()) settleTimer = setTimeout(settle, SETTLE_MS);
  };
  const settle = () => {
    if (stampsNow() === lastLook) reload();
    else look(); // it has changed again
  };
  const reload = () => {
    clearTimeout(settleTimer);
    // If the new configuration has any mistake, the old one stays in force, so the gateway neither opens up nor stops.
    try {
      refuseReplaced();
      if (applySettings(core, load())) void reportBackend(core);
    } catch (error) {
      const problems = error instanceof ConfigError ? error.problems.join('; ') : String(error);
      core.log('error', 'reload failed; keeping the old configuration', { problems });
    }
  };
  // This comes before the log line that says that the gateway listens, because a SIGHUP without a listener would end
  // the process.
  core.server.once('listening', () => {
    if (FILES_READ.size > 0) setInterval(look, WATCH_MS);
    process.on('SIGHUP', reload);
  });
}

/** Whether this file is run, not imported. */
function isEntryPoint() {
  if (import.meta.main !== undefined) return import.meta.main;
  // UNTIL Node 22.18 is the oldest: earlier ones have no import.meta.main (findings/node-import-meta-main-undefined.sh),
  // so argv[1] is compared. It may lack the suffix, and is a link where the package is installed.
  try {
    return createRequire(import.meta.url).resolve(process.argv[1] ?? '') === fileURLToPath(import.meta.url);
  } catch { // argv[1] is not a script
    return false;
  }
}

// #endregion

// #region EXPORTS

// Public API: createGateway, ConfigError and the types. The rest is exported for tests only.
export {
  BodyScan,
  CALLS,
  ConfigError,
  createGateway,
  loadSettings,
  METHOD_NAMES,
  Metrics,
  parseTarget,
  RateLimiter,
  ROUTES,
  run,
  Template,
};
export type { Gateway, GatewayConfig, GatewayOptions, TokenConfig };

if (isEntryPoint()) main();

// #endregion
