/** What a test asserts and waits for, and what a failed one shows in addition. */

import strict from 'node:assert/strict';
import net from 'node:net';
import { inspect, isDeepStrictEqual } from 'node:util';
import { type Answer, outcomeOf } from './answers.ts';
import { ConfigError } from './gateway.ts';
import type { Both } from './start.ts';

/** Node 20 spends a minute on the message of an `ok` that fails without one, so the type requires it. */
type Assert = Omit<typeof strict, 'ok'> & { ok(value: unknown, message: string): asserts value };

/** Like node:assert, but a message that a test passes is shown next to the two values instead of replacing them. */
export const assert: Assert = {
  ...strict,
  equal: (actual: unknown, expected: unknown, what?: unknown) =>
    Object.is(actual, expected) || failWith(actual, expected, what, strict.equal),
  deepEqual: (actual: unknown, expected: unknown, what?: unknown) =>
    isDeepStrictEqual(actual, expected) || failWith(actual, expected, what, strict.deepEqual),
};

function failWith(actual: unknown, expected: unknown, what: unknown, plain: typeof strict.equal) {
  if (what === undefined) return plain(actual, expected); // Node 26 refuses one that is undefined
  if (typeof what !== 'string') return plain(actual, expected, what as Error);
  const message = `${what}\nexpected  ${shown(expected)}\nactual    ${shown(actual)}`;
  throw new strict.AssertionError({ message });
}

/** The message of an error, with its name unless it is a failed assertion. */
export const messageOf = (error: unknown): string =>
  error instanceof strict.AssertionError ? error.message : String(error);

/** A value in a message. */
export function shown(value: unknown, limit = 2000): string {
  const text = typeof value === 'string' ? value : inspect(value, { breakLength: Infinity, depth: 4 });
  return text.length > limit ? `${text.slice(0, limit)}…` : text;
}

/** Anything that has not arrived by then will not arrive. */
const WAIT_LIMIT_MS = 60_000;

/**
 * Waits for a condition by polling it, less and less often. Without a description, its failure shows the condition's
 * source.
 */
export async function until(
  condition: () => boolean | Promise<boolean>,
  what = String(condition).replace(/^\(\) => /, ''),
): Promise<void> {
  const giveUpMs = performance.now() + WAIT_LIMIT_MS;
  for (let pauseMs = 2; !(await condition()); pauseMs = Math.min(20, pauseMs + 1)) {
    if (performance.now() > giveUpMs) throw new Error(`waited ${WAIT_LIMIT_MS / 1000} s in vain for ${what}`);
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
  }
}

/** Waits for a promise, and fails with this description if it is not fulfilled in time. */
export async function within<T>(promise: Promise<T>, what: string, limitMs = WAIT_LIMIT_MS): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`waited ${limitMs / 1000} s in vain for ${what}`)), limitMs);
  });
  return await Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** Lets time pass in which something must not happen. */
export function pass(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Waits for a socket to be closed, gracefully or not. */
export async function closed(socket: net.Socket, what = 'a connection to be closed'): Promise<void> {
  if (!socket.closed) await within(new Promise<unknown>((resolve) => socket.once('close', resolve)), what);
}

/** What a failed test shows in addition: the last lines that its gateways logged, or that its backends saw. */
export function lastOf(what: string, lines: string[]): string {
  return [`${what}${lines.length ? ', at last' : ' nothing'}`, ...lines.slice(-6)].join('\n  ');
}

/** A log line as JSON, with the fields that tests use for more than equality. */
export type LogLine =
  & Record<'time' | 'level' | 'message' | 'requestId' | 'listen' | 'warning' | 'problems', string>
  & Record<'ms' | 'bytesOut', number>
  & Record<string, unknown>;

/** What was parsed of each log before. A log grows at its end, and each assertion asks for all of its lines. */
const parsedLogs = new WeakMap<string[], { first: string | undefined; parsed: LogLine[] }>();

export function logLines(lines: string[]): LogLine[] {
  let known = parsedLogs.get(lines);
  if (known === undefined || known.first !== lines[0] || known.parsed.length > lines.length) { // a test may empty its log
    known = { first: lines[0], parsed: [] };
    parsedLogs.set(lines, known);
  }
  const { parsed } = known;
  for (const line of lines.slice(parsed.length)) parsed.push(JSON.parse(line));
  return [...parsed];
}

/** The log lines of requests. A test that reads the first one knows that it exists. */
export function requests(gateway: { log: string[] }): [LogLine, ...LogLine[]] {
  return logLines(gateway.log).filter((line) => line.message === 'request') as [LogLine, ...LogLine[]];
}

/** The log lines with this message. */
export function linesOf(gateway: { log: string[] }, pattern: RegExp): LogLine[] {
  return logLines(gateway.log).filter(({ message }) => pattern.test(message));
}

export const NOTHING = { seen: 0, connections: 0 };

/** The answer has the form of all refusals, it is logged, and the backend saw nothing. */
export function assertDenied(
  answer: Answer,
  status: number,
  code: string,
  { backend, gateway }: Both,
  before = NOTHING,
) {
  assert.equal(outcomeOf(answer), `${status} ${code}`, `the outcome of the response ${answer.text}`);
  assert.match(answer.headers['content-type'] ?? '', /^application\/json/);
  assert.match(answer.text, /^\{.*\}\n$/); // a separate line on a terminal
  assert.deepEqual(Object.keys(answer.json), ['error', 'code', 'requestId']);
  const { 'x-request-id': id, 'x-content-type-options': sniffing, 'cache-control': caching } = answer.headers;
  assert.deepEqual([id, sniffing, caching], [answer.json.requestId, 'nosniff', 'no-store']);
  const line = requests(gateway).find((entry) => entry.requestId === id);
  assert.deepEqual([line?.status, line?.code], [status, code], 'status and code in the log line of the request');
  assert.deepEqual({ seen: backend.seen.length, connections: backend.connections }, before, 'what the backend saw');
}

/** The mistakes for which a configuration is refused. */
export function problemsOf(load: () => unknown): readonly string[] {
  try {
    load();
  } catch (error) {
    assert.ok(error instanceof ConfigError, String(error));
    return error.problems;
  }
  return [];
}

/** The first group of each match. */
export const groupsOf = (text: string, pattern: RegExp): string[] =>
  Array.from(text.matchAll(pattern), ([, group]) => group!);

/** What only one of two places has, for the message of a failure: the code and a page, or two lists of a test. */
export function difference(
  place: string,
  found: readonly string[],
  other: string,
  wanted: readonly string[],
): string[] {
  return [
    ...found.filter((each) => !wanted.includes(each)).map((each) => `${each} is in ${place}, but not in ${other}`),
    ...wanted.filter((each) => !found.includes(each)).map((each) => `${each} is in ${other}, but not in ${place}`),
  ];
}
