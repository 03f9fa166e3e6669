/** The language of tables: a request and its expected outcome in one row. See `table`. */

import strict from 'node:assert/strict';
import type { GatewayConfig, GatewayOptions } from '../gateway.ts';
import { type Answer, parseAnswer } from './answers.ts';
import { assert, assertDenied, type LogLine, messageOf, NOTHING, requests, shown, until } from './assertions.ts';
import { gotJson, type Handler, showSeen, startBackend } from './backend.ts';
import { type Address, type Ask, keepConnection, type RawAsk, rawRequest } from './client.ts';
import { test, type TestContext } from './guard.ts';
import { AS_MULTIPART, basic, FROM, GROUP, multipart, OTHER, SECRET, STRANGER, TO } from './samples.ts';
import { type Both, startBoth, startGateway } from './start.ts';

/**
 * A table is a test of many requests, one per row, each with its expected outcome:
 *
 *     POST /v2/send | bearer | {"number":"…"} → 403 sender_not_allowed | reason=… | "words of the response"
 *
 * The fields before the arrow are the request, in any order, each recognized by its form:
 *   POST /v2/send   a method and a target, or a target alone
 *   bearer          or `bearer TOKEN`, `basic`, `basic USER:PASSWORD`, `none`
 *   Name: value     a header
 *   {"a":1}         a JSON body, as it stands
 *   'text'          another body, with the escapes \r \n \t \uHHHH and \xHH, which is a byte
 *   -- a = b -- f; filename="x" = c   a multipart form
 *   @ {…}           settings of the token, for this row
 * The fields after it are the expected outcome:
 *   403 code        a status, and a code if the gateway refuses; `passes` is any status of the backend
 *   GET /x          what the backend got; {…} or 'text': the body that it got, as JSON or in bytes
 *   same            it got the request's body, or one with its text as the message
 *   > Name: value   a header that it got; without a value, that it did not get
 *   Name: value     a header of the response; `name=value`: a field of the log line
 *   "words"         what the response holds
 *
 * A line that starts with * is a row whose fields are the defaults of the rows after it (JSON that the backend got is
 * merged into its own). If there are several, every row is sent in each of these ways. A line that starts with # is a
 * comment. Short rows share a line, separated by two semicolons.
 *
 * For every status from 400 on the backend must have seen nothing; for any other, one request. No row may reveal a
 * token to the backend, to the client or in the log, or a phone number in the log.
 *
 *     table(title, config)`            table(title, config)([
 *       * bearer → 201                   '* bearer → 201',
 *       {"message":"…"}`;                ...messages.map((message) => `{"message":"${message}"}`),
 *                                      ]);
 */
export function table(title: string, config: GatewayConfig, { handler, ...options }: TableOptions = {}) {
  return (rows: Rows, ...values: unknown[]): void =>
    void test(title, async (t) => {
      const backend = await startBackend(t, handler);
      const gateway = await startGateway(t, backend, config, options);
      const isTemplate = typeof rows === 'object' && 'raw' in rows;
      await checkRows({ backend, gateway }, isTemplate ? literal(rows as TemplateStringsArray, ...values) : rows);
    });
}

/** String.raw, in which a list becomes as many lines. */
export function literal({ raw }: TemplateStringsArray, ...values: unknown[]): string {
  const lists = values.map((value) => Array.isArray(value) ? value.join('\n') : value);
  return String.raw({ raw }, ...lists);
}

type TableOptions = GatewayOptions & { handler?: Handler };

type Rows = string | readonly Rows[];

/** Sends the rows of a table, one after the other, to a running gateway. A failure shows every wrong row. */
export async function checkRows(both: Both, rows: Rows): Promise<void> {
  const all = [rows as unknown[]].flat(Infinity).join('\n').split(/\n| ;; /).map((line) => line.trim());
  const lines = all.filter((line) => /^[^#]/.test(line));
  let ways = [''];
  let tried = 0;
  const connection = keepConnection(both.gateway);
  const wrong: string[] = [];
  for (const [i, line] of lines.entries()) {
    const isWay = line.startsWith('* ');
    if (isWay) ways = [...(lines[i - 1]?.startsWith('* ') ? ways : []), line.slice(2)];
    for (const way of isWay ? [] : ways) {
      tried++;
      try {
        await checkRow(both, parseRow(line, parseRow(way)), connection.ask);
      } catch (error) {
        const rows = [`row       ${shown(line, 600)}`, ...way ? [`with      * ${shown(way, 600)}`] : []];
        wrong.push([...rows, messageOf(error)].join('\n'));
      }
    }
  }
  connection.end();
  const found = `${wrong.length} of ${tried} rows are wrong`;
  assert.ok(wrong.length === 0, [found, ...wrong].join('\n\n').replaceAll('\n', '\n  '));
}

export type Pair = [name: string, value: string];

/** The request of a row, and its expected outcome. */
interface Row extends Partial<Record<'method' | 'target' | 'settings' | 'status' | 'code' | 'line', string>> {
  headers: Pair[];
  body?: Buffer;
  json?: object;
  bytes?: Buffer;
  isSame?: boolean;
  got: Pair[];
  log: Pair[];
  answered: Pair[];
  words: string[];
}

export function parseRow(text: string, each: Row = { headers: [], got: [], log: [], answered: [], words: [] }): Row {
  const [request = '', wanted = ''] = text.split(/(?:^| )→ /);
  const row: Row = { ...each, headers: [], words: [...each.words] };
  const own = new Set<string>();
  const add = (name: string, value: string): void => {
    own.add(name.toLowerCase());
    row.headers.push([name, value]);
  };
  const pair = (field: string, separator: string): Pair => {
    const [name = '', ...rest] = field.split(separator);
    return [name, rest.join(separator).trim()];
  };
  for (const field of request.split(' | ').map((part) => part.trim()).filter(Boolean)) {
    const [word = '', rest = ''] = pair(field, ' ');
    if (field.startsWith("'")) row.body = unescaped(field.slice(1, -1));
    else if (/^["{[]/.test(field)) row.body = Buffer.from(field);
    else if (field.startsWith('-- ')) {
      const parts = field.slice(3).split(' -- ').map((part) => /^([^;=]*?)(;.*?)? = ?(.*)$/s.exec(part)!);
      row.body = unescaped(multipart(parts.map(([, name = '', more = '', value = '']) => [name, value, more])));
    } else if (word === '@') row.settings = rest;
    else if (word === 'none') own.add('authorization');
    else if (word === 'bearer') add('Authorization', `Bearer ${rest || SECRET}`);
    else if (word === 'basic') add('Authorization', basic(rest || `api:${SECRET}`));
    else if (/^[\w-]+:/.test(field)) add(...pair(field, ':'));
    else if (field.startsWith('/')) row.target = field;
    else [row.method, row.target] = [word, rest];
  }
  if (/(?:^| \| )-- /.test(request) && !own.has('content-type')) add('Content-Type', AS_MULTIPART);
  row.headers.unshift(...each.headers.filter(([name]) => !own.has(name.toLowerCase())));
  for (const field of wanted.split(' | ').filter(Boolean)) {
    const [word = '', rest = ''] = pair(field, ' ');
    if (/^(?:\d{3}|passes)\b/.test(field)) [row.status = '', row.code = ''] = field.split(' ');
    else if (field.startsWith('{')) row.json = { ...row.json, ...JSON.parse(field) };
    else if (field.startsWith("'")) row.bytes = unescaped(field.slice(1, -1));
    else if (field === 'same') row.isSame = true;
    else if (word === '>') row.got = put(row.got, pair(rest, ':'));
    else if (/^\w+=/.test(field)) row.log = put(row.log, pair(field, '='));
    else if (/^[\w-]+:/.test(field)) row.answered = put(row.answered, pair(field, ':'));
    else if (field.startsWith('"')) row.words.push(field.slice(1, -1));
    else row.line = field;
  }
  return row;
}

/** Fields with one added, or with another value for one. */
const put = (fields: Pair[], added: Pair): Pair[] => [...fields.filter(([name]) => name !== added[0]), added];

/** The bytes of a text in UTF-8; \xHH is a single byte. */
export function unescaped(text: string): Buffer {
  const plain = (part: string): string => part.replace(/\\(?:u\w{4}|[rnt\\])/g, (escape) => JSON.parse(`"${escape}"`));
  const parts = text.split(/\\x([0-9a-f]{2})/i);
  return Buffer.concat(parts.map((part, i) => i % 2 === 1 ? Buffer.from(part, 'hex') : Buffer.from(plain(part))));
}

/**
 * A request in exact bytes: " | " separates its lines, and " || " its head from its body. `about` and `send` start a
 * GET and a POST with a valid token; `bearer` is that token's header.
 */
export function bytesOf(text: string): Buffer {
  const lines = text.trim().replace(/^about/, 'GET /v1/about HTTP/1.1 | Host: x | bearer')
    .replace(/^send/, 'POST /v2/send HTTP/1.1 | Host: x | bearer').replace('bearer', `Authorization: Bearer ${SECRET}`);
  return unescaped(`${lines.replaceAll(' || ', '\r\n\r\n').replaceAll(' | ', '\r\n')}\r\n\r\n`);
}

export async function sendRow(to: Address, row: Row, ask?: RawAsk): Promise<Answer> {
  const { body, method = body ? 'POST' : 'GET', target = body ? '/v2/send' : '/v1/about' } = row;
  const [bytes = '', path = '', ...headers] = [body ?? '', target, ...row.headers.map((pair) => pair.join(': '))]
    .map((text) => Buffer.from(text).toString('latin1'));
  const isChunked = headers.some((line) => /^transfer-encoding:/i.test(line));
  const chunk = bytes && `${bytes.length.toString(16)}\r\n${bytes}\r\n`;
  const request = { method, headers, body: isChunked ? `${chunk}0\r\n\r\n` : bytes };
  return parseAnswer(await (ask ? ask(path, request) : rawRequest(to, path, request)));
}

async function checkRow(both: Both, row: Row, ask: RawAsk): Promise<void> {
  const { backend, gateway } = both;
  gateway.useSettings(row.settings);
  const { seen, connections } = backend;
  const before = { seen: seen.length, connections };
  const answer = await sendRow(gateway, row, ask);
  try {
    await checkOutcome(both, row, answer, before);
  } catch (error) {
    const got = seen.slice(before.seen).map(showSeen).join('\n          ');
    const text = answer.text.replace(/^[0-9a-f]+\r\n|\r\n0\r\n\r\n$/g, ''); // the framing of a chunk
    const response = `response  ${answer.status} ${shown(text, 600).trim()}`;
    const lines = [messageOf(error), response, `backend   ${got || 'saw nothing'}`];
    throw new strict.AssertionError({ message: lines.join('\n') });
  }
}

/** How many lines of a log were searched before, so that a table of many rows searches each line once. */
const searchedLines = new WeakMap<string[], number>();

/** Asserts that the response, the backend and the log match the row. */
async function checkOutcome(both: Both, row: Row, answer: Answer, before: typeof NOTHING): Promise<void> {
  const { backend, gateway } = both;
  const { seen } = backend;
  if (row.status !== 'passes') assert.equal(String(answer.status), row.status, 'the status');
  const isRefused = row.status !== 'passes' && answer.status >= 400;
  if (isRefused && row.code && row.method !== 'HEAD') assertDenied(answer, answer.status, row.code, both, before);
  assert.equal(seen.length - before.seen, isRefused ? 0 : 1, 'the requests that the backend saw');
  const got = seen.at(-1);
  if (!isRefused) {
    const text = String(row.body);
    const same = row.isSame && (text.startsWith('{') ? JSON.parse(text) : { message: text });
    if (row.line) assert.equal(`${got!.method} ${got!.url}`, row.line, 'what the backend got');
    if (row.json || same) assert.deepEqual(gotJson(backend), { ...row.json, ...same }, 'the body that the backend got');
    if (row.bytes) {
      assert.equal(got!.body.toString('latin1'), row.bytes.toString('latin1'), 'the bytes that the backend got');
    }
    for (const [name, value] of row.got) assert.equal(got!.headers[name.toLowerCase()] ?? '', value, `> ${name}`);
  }
  const log = gateway.log.slice(searchedLines.get(gateway.log) ?? 0);
  searchedLines.set(gateway.log, gateway.log.length);
  const shown = `${got?.url}${got?.rawHeaders}${got?.body}${log.join()}${answer.text}`;
  assert.ok(!shown.includes(SECRET) && !shown.includes(OTHER), 'the backend, the log or the client saw a token');
  const logged = log.filter((text) => text.includes('"message":"request"')).join();
  for (const value of [FROM, TO, STRANGER, GROUP]) assert.ok(!logged.includes(value), `the log has ${value}`);
  for (const words of row.words) {
    assert.ok(answer.text.includes(words) || answer.json?.error.includes(words), `${words} is not in ${answer.text}`);
  }
  for (const [name, value] of row.answered) assert.equal(answer.headers[name.toLowerCase()] ?? '', value, name);
  const id = answer.json?.requestId ?? got?.headers['x-request-id'];
  const own = (line: LogLine): boolean => id === undefined ? line.method === row.method : line.requestId === id;
  if (row.log.length > 0) await until(() => requests(gateway).some(own), 'the log line of the request');
  for (const [name, value] of row.log) assert.equal(String(requests(gateway).findLast(own)![name]), value, name);
}

/** The lines of a text, also separated by two semicolons. */
export const listed = (...text: Parameters<typeof literal>): string[] => literal(...text).trim().split(/\n *| ;; /);

/** A request as the fields of a row. */
export const rowWith = ({ path = '/v2/send', headers = {}, body = '' }: Ask, method = 'POST'): string =>
  [
    `${method} ${path}`,
    ...Object.entries(headers).map(([name, value]) => `${name}: ${value}`),
    typeof body === 'string' ? body : JSON.stringify(body),
  ].filter(Boolean).join(' | ');

/** A gateway on a clock that its test sets, and the outcomes of requests sent to it one after the other. */
export async function startClocked(t: TestContext, config: GatewayConfig) {
  const clock = { nowMs: 1_700_000_000_000 };
  const both = await startBoth(t, config, { now: () => clock.nowMs });
  const asks = (way: string, ...wanted: string[]): Promise<void> =>
    checkRows(both, [`* ${way}`, wanted.map((row) => row.includes('→') ? row : `GET /v1/about → ${row}`)]);
  return { both, clock, asks };
}
