/** The load of the benchmark in a process of its own, which drives all servers of a row. It obeys and reports in JSON. */

import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import net from 'node:net';
import { BLOCK_BYTES, type Job, onLines, quantile, say } from './common.ts';

/** A megabyte of base64. */
const BLOCK = Buffer.from(randomBytes(BLOCK_BYTES * 3 / 4).toString('base64'));

/** A raw connection with one request in flight at a time, which costs far less than any server here. */
class Caller {
  readonly #socket: net.Socket;
  #text = '';
  #resolve: ((response: string) => void) | undefined;

  constructor(port: number, fail: (why: string) => void) {
    this.#socket = net.connect({ port, host: '127.0.0.1', noDelay: true });
    this.#socket.on('data', (chunk: Buffer) => this.#read(chunk));
    this.#socket.setTimeout(60_000, () => this.#resolve && fail(`nothing for 60 s after: ${this.#text}`));
    this.#socket.on('error', ({ message }) => this.#resolve && fail(message));
    this.#socket.on('close', () => this.#resolve && fail(`connection closed after: ${this.#text}`));
  }

  /** Resolves to the response. */
  async call(request: string, megabytes: number): Promise<string> {
    const [before = '', after = ''] = request.split('#');
    const response = new Promise<string>((resolve) => (this.#resolve = resolve));
    this.#socket.write(before);
    for (let i = 0; i < megabytes; i++) if (!this.#socket.write(BLOCK)) await once(this.#socket, 'drain');
    if (after) this.#socket.write(after);
    return await response;
  }

  #read(chunk: Buffer): void {
    const text = this.#text += chunk.toString('latin1');
    const head = text.indexOf('\r\n\r\n') + 4;
    const length = /\r\ncontent-length: *(\d+)/i.exec(text)?.[1];
    const ends = length === undefined ? text.endsWith('\r\n0\r\n\r\n') : text.length >= head + Number(length);
    if (head < 4 || !ends) return;
    this.#text = '';
    this.#resolve?.(text);
    this.#resolve = undefined;
  }

  close(): void {
    this.#socket.destroy();
  }
}

function load(): void {
  const fail = (why: string): void => {
    console.error(`unexpected: ${why}`);
    process.exit(1);
  };
  let row = '';
  let callers: Record<number, Caller[]> = {};
  onLines(async (line) => {
    const job = JSON.parse(line) as Job;
    if (job.row !== row) {
      for (const caller of Object.values(callers).flat()) caller.close();
      [row, callers] = [job.row, {}];
    }
    const own = callers[job.port] ??= Array.from({ length: job.connections }, () => new Caller(job.port, fail));
    const startMs = performance.now();
    let count = 0;
    const tookMs: number[] = [];
    await Promise.all(own.map(async (caller, i) => {
      const request = job.request.replace('%', String(i % job.tokens));
      while (count < job.count && performance.now() < startMs + job.forMs) {
        count++;
        const sinceMs = performance.now();
        const response = await caller.call(request, job.megabytes);
        tookMs.push(performance.now() - sinceMs);
        if (!job.expect.includes(Number(response.slice(9, 12)))) fail(response);
      }
    }));
    const [medianMs, p99Ms] = [quantile(tookMs, 0.5), quantile(tookMs, 0.99)];
    say({ count, tookMs: performance.now() - startMs, medianMs, p99Ms });
  });
  say({});
}

load();
