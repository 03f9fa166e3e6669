/** What a client gets: the parts of a response, and its outcome in a word or two. */

import http from 'node:http';
import type { LogLine } from './assertions.ts';
import type { Pair } from './rows.ts';

/** A JSON answer: the fields of a refusal, and those of the backend, which only the tests know. */
type AnswerJson = Record<'error' | 'code' | 'requestId', string> & Record<string, unknown>;

export interface Answer extends Pick<http.IncomingMessage, 'headers' | 'rawHeaders'> {
  status: number;
  text: string;
  json: AnswerJson;
  /** The fingerprint of the certificate of its connection. */
  fingerprint: string;
}

export function jsonIn(text: string): AnswerJson {
  try {
    return JSON.parse(text);
  } catch {
    return undefined!; // no JSON
  }
}

export const statusOf = (response: string): number => Number(/^HTTP\/1\.1 (\d{3})/.exec(response)?.[1]);

export const codeOf = (response: string): string | undefined => /"code":"(\w+)"/.exec(response)?.[1];

/** The response in the bytes received on a connection, one character per byte. */
export function parseAnswer(response: string): Answer {
  const [head = '', ...rest] = response.split('\r\n\r\n');
  const all = new Headers(head.split('\r\n').slice(1).map((line) => line.split(/: *(.*)/, 2) as Pair));
  const headers = Object.fromEntries(Array.from(all.keys(), (name) => [name, all.get(name)!]));
  const text = Buffer.from(rest.join('\r\n\r\n'), 'latin1').toString();
  return { status: statusOf(response), headers, rawHeaders: [], text, json: jsonIn(text), fingerprint: '' };
}

/** The outcome of a request, from its response or its log line: the status, and the code if the gateway refused it. */
export function outcomeOf(end: Answer | LogLine | string): string {
  const { status, code, json } = (typeof end === 'string' ? parseAnswer(end) : end) as Answer & LogLine;
  return `${status} ${code ?? json?.code ?? ''}`.trim();
}
