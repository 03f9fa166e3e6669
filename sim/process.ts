/** A gateway's process for the worlds of the wire and of the log. */

import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { HERE } from '../test/runtime.ts';
import { OPEN_CODES } from './checks.ts';
import { isLate, until, watch } from './clock.ts';
import type { Find } from './finds.ts';
import { Play } from './play.ts';
import { type Line, readLine, spawnGateway } from './under-test.ts';
import { genWorld } from './worlds.ts';

/** The path of a certificate or a key, which the tests use too. */
const pem = (name: string): string => join(HERE, `test/fixtures/${name}.pem`);
const CERTIFICATE = { cert: pem('localhost.crt'), key: pem('localhost.key') };

/** A gateway's process with its stand-in, for one world. */
export class House {
  readonly play: Play;
  readonly #folder = mkdtempSync(join(tmpdir(), 'gateway-sim-'));
  #child!: ChildProcess;
  #exit!: Promise<unknown>;
  #errors = '';
  #rest = '';
  /** Lines of requests, by their ids. */
  readonly lines = new Map<string, Line>();
  /** How many lines are dropped, by the log. */
  dropped = 0;
  #hasAnswer = false;
  /** How much more of the log is read. */
  readBytes = Infinity;

  constructor(seed: number) {
    const calm = { phases: [], deafMs: [0], windowBytes: 0, parallel: 4, timeoutMs: 2000, waitMs: 300 };
    this.play = new Play({ ...genWorld(seed), ...calm });
  }

  get isOver(): boolean {
    return this.#child.exitCode !== null || this.#child.signalCode !== null;
  }

  async open(isTls: boolean): Promise<this> {
    watch(this.play, true);
    await this.play.standIn.listen();
    const config = join(this.#folder, 'gateway.json');
    writeFileSync(config, JSON.stringify({ ...this.play.config(), ...(isTls && { tls: CERTIFICATE }) }));
    this.#child = spawnGateway(config);
    this.#exit = once(this.#child, 'exit');
    this.#child.stderr!.on('data', (chunk) => this.#errors += chunk);
    this.#child.stdout!.setEncoding('utf8').on('data', (chunk: string) => this.#read(chunk));
    await until(() => this.#hasAnswer || this.isOver, 30_000);
    if (this.play.port === 0) throw new Error(`the gateway's process does not listen: ${this.#errors}`);
    return this;
  }

  #read(chunk: string): void {
    this.readLog(this.readBytes - chunk.length);
    const texts = (this.#rest + chunk).split('\n');
    this.#rest = texts.pop()!;
    for (const text of texts) {
      const line = readLine(text, this.play);
      if (line.message === 'listening') this.play.port = Number(new URL(String(line.listen)).port);
      if (/^the backend /.test(String(line.message))) this.#hasAnswer = true;
      if (typeof line.lines === 'number') this.dropped += line.lines;
      if (line.message === 'request') this.lines.set(String(line.requestId), line);
    }
  }

  /** Reads so much more of the log, and no more than that. */
  readLog(bytes: number): void {
    this.readBytes = bytes;
    if (bytes > 0) this.#child.stdout!.resume();
    else this.#child.stdout!.pause();
  }

  /** Stops the process by SIGTERM, which must take no longer than its deadline, and checks what it has left. */
  async close(): Promise<Find[]> {
    const { play } = this;
    if (this.isOver) play.find(10, `a process exits with ${this.#child.exitCode} ${this.#child.signalCode}`);
    else {
      process.kill(this.#child.pid!, 'SIGTERM'); // after a child.kill, Deno 2.9 reports no exit code
      if (await isLate(this.#exit, 12_000)) play.find(10, 'a process does not exit on SIGTERM');
      else if (this.#child.exitCode !== 0) play.find(10, `a process exits ${this.#child.exitCode} on SIGTERM`);
    }
    this.#child.kill('SIGKILL');
    this.readLog(Infinity);
    await until(() => this.#child.stdout!.closed && play.standIn.peers.size === 0, 5000);
    if (this.#errors !== '') play.find(10, `a process writes to standard error: ${this.#errors.slice(0, 2000)}`);
    for (const [id, { code, status }] of this.lines) {
      const acts = play.standIn.acted.get(id) ?? 0;
      const isTold = typeof code === 'string' && Number(status) < 499 && !OPEN_CODES.includes(code);
      if (isTold && acts > 0) play.find(2, `a client got ${code}, and the backend has acted (${id})`);
      if (status === 201 && acts === 0) play.find(2, `a client got 201, and nothing was done (${id})`);
    }
    watch(play, false);
    await play.standIn.close();
    rmSync(this.#folder, { recursive: true, force: true });
    return play.finds;
  }
}
