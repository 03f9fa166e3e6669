/** What the processes of the benchmark share: runtime, tokens, requests, and how they speak to each other. */

import { createInterface } from 'node:readline';

export const RUNTIME = process.versions.deno ? 'Deno' : 'Node';

export const PARALLELS = ['parallel 0', 'parallel 1', 'parallel 4', 'parallel 16'];

/** About the duration of a send in json-rpc mode. */
export const SLOW_MS = 50;

/** How many µs of a send the queue may take when 1,000 wait, by the number of tokens. */
export const QUEUE_GOALS: Record<number, string> = { 2: '≤ 12', 50: '≤ 40' };

/** The tokens of the gateway, and what they send. */
export const SECRET = 'a-plain-secret-for-the-benchmark';
export const CONFINED = 'another-secret-that-opens-much-less';
/** This one posts JSON, of which the gateway builds a message. */
export const HOOK = 'a-third-secret-that-posts-any-json';
export const TEMPLATE = '{{#alerts}}\n{{status}}: {{labels.alertname}}\n{{annotations.summary}}\n{{/alerts}}';
export const otherSecret = (i: number | string): string => `a-secret-of-one-of-many-tokens-${i}`;
export const MESSAGE = {
  message: 'The washing machine is done.',
  number: '+15550100001',
  recipients: ['+15550100002'],
};

/** An attachment's data is sent in blocks of this length. */
export const BLOCK_BYTES = 1_000_000;

/** What the load does at once. */
export interface Job {
  /** Connections stay open within a row. */
  row: string;
  port: number;
  /** With a # in place of an attachment's megabytes, and a % for the number of a token. */
  request: string;
  megabytes: number;
  tokens: number;
  expect: number[];
  connections: number;
  /** It ends after this many requests, or after this time. */
  count: number;
  forMs: number;
}

/** What a process reports. */
export type Told = Record<
  | 'port'
  | 'cpuUs'
  | 'bytes'
  | 'highBytes'
  | 'heapBytes'
  | 'promises'
  | 'slotsUs'
  | 'count'
  | 'tookMs'
  | 'medianMs'
  | 'p99Ms',
  number
>;

export function say(message: object): void {
  process.stderr.write(`${JSON.stringify(message)}\n`);
}

/** Calls a function for each line of standard input, and exits at its end. */
export function onLines(act: (line: string) => void): void {
  createInterface(process.stdin).on('line', act).on('close', () => process.exit());
}

export function quantile(values: number[], part: number): number {
  return values.toSorted((a, b) => a - b)[Math.floor(values.length * part)]!;
}
