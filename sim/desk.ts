/**
 * A desk, which serves one request after the other: the worlds of decisions ask it hundreds in a second. Its gateway is
 * in this process, or in one of its own. Its backend keeps what it got, and answers with 201 or with what `X-Answer`
 * says (0: it breaks off). It models nothing else of the real backend.
 */

import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Gateway, GatewayConfig } from '../gateway.ts';
import { until, watch } from './clock.ts';
import type { Find, Invariant } from './finds.ts';
import { secretOf } from './tokens.ts';
import { createGateway, FORMS, type Line, readLine, spawnGateway } from './under-test.ts';

/** A request as a program makes it; `headers` may hold a name twice. */
export type Letter = {
  method: string;
  path: string;
  headers: Record<string, string | string[]>;
  body?: string | undefined;
};
/** What the backend got for a request. */
export type Seen = { url: string; headers: string[]; body: string };
/** The response to the client; status 0 if the connection broke. */
export type Told = { status: number; code?: string | undefined; retryAfter?: string | undefined; text: string };

/** Sends a request to a gateway. */
export function ask(port: number, agent: http.Agent, { body, ...letter }: Letter): Promise<Told> {
  return new Promise((resolve) => {
    const req = http.request({ ...letter, host: '127.0.0.1', port, agent }, (res) => {
      let text = '';
      res.setEncoding('utf8').on('data', (part: string) => text += part).on('error', () => {}).on('close', () => {
        const [, code] = /"code":"([a-z_]+)"/.exec(text) ?? [];
        resolve({ status: res.statusCode!, code, retryAfter: res.headers['retry-after'], text });
      });
    });
    req.on('error', () => resolve({ status: 0, text: '' }));
    req.end(body);
  });
}

export class Desk {
  lateMs = 0;
  readonly finds: Find[] = [];
  readonly seen = new Map<string, Seen[]>();
  readonly lines: Line[] = [];
  clockMs = Date.UTC(2026, 0, 1);
  #gateway: Gateway | undefined;
  #child: ChildProcess | undefined;
  #port = 0;
  readonly #agent = new http.Agent({ keepAlive: true });
  readonly #backend = http.createServer((req, res) => {
    const chunks: Buffer[] = [];
    req.on('error', () => {});
    req.on('data', (chunk: Buffer) => chunks.push(chunk)).on('end', () => {
      const [mark, body] = [String(req.headers['x-mark']), Buffer.concat(chunks).toString()];
      const { url = '', rawHeaders: headers } = req;
      this.seen.set(mark, [...this.seen.get(mark) ?? [], { url, headers, body }]);
      const status = Number(req.headers['x-answer'] ?? 201);
      if (status === 0) req.socket.destroy();
      else res.writeHead(status, { 'Content-Type': 'application/json' }).end('{}');
    });
  });

  /** Opens a gateway, whose backend has a path and userinfo. @param tokens their settings, without secrets. */
  async open(tokens: Record<string, object>, config: GatewayConfig, isApart = false): Promise<void> {
    watch(this, true);
    await once(this.#backend.listen(0, '127.0.0.1'), 'listening');
    const url = `http://user:word@127.0.0.1:${(this.#backend.address() as AddressInfo).port}/base`;
    const secrets = Object.entries(tokens).map(([name, token]) => [name, { secret: secretOf(name), ...token }]);
    const whole: GatewayConfig = {
      ...{ listen: '127.0.0.1:0', backend: { url, wait: '0' }, auth: { methods: FORMS }, shutdown: '1s' },
      ...{ log: { level: 'debug', format: 'json' }, tokens: Object.fromEntries(secrets), ...config },
    };
    if (isApart) return await this.#openApart(whole);
    this.#gateway = createGateway(whole, { now: () => this.clockMs, log: (text) => this.#keep(text) });
    this.#port = Number(new URL(await this.#gateway.listen()).port);
  }

  /** Opens a gateway in a process of its own. */
  async #openApart(config: GatewayConfig): Promise<void> {
    const folder = mkdtempSync(join(tmpdir(), 'gateway-sim-'));
    const file = join(folder, 'gateway.json');
    writeFileSync(file, JSON.stringify(config));
    const child = this.#child = spawnGateway(file);
    let [rest, errors] = ['', ''];
    child.stderr!.on('data', (chunk) => errors += chunk);
    child.stdout!.setEncoding('utf8').on('data', (chunk: string) => {
      const texts = (rest + chunk).split('\n');
      rest = texts.pop()!;
      for (const text of texts) this.#keep(text);
    });
    await until(() => this.#port > 0 || child.exitCode !== null, 30_000);
    rmSync(folder, { recursive: true });
    if (this.#port === 0) throw new Error(`the gateway's process does not listen: ${errors}`);
  }

  #keep(text: string): void {
    const line = readLine(text, this);
    this.lines.push(line);
    if (line.message === 'listening') this.#port = Number(new URL(String(line.listen)).port);
  }

  find(invariant: Invariant, what: string, about: unknown = {}): void {
    this.finds.push({ invariant, what: `${what}: ${JSON.stringify(about)}`, isTimed: false });
  }

  ask(mark: string, letter: Letter): Promise<Told> {
    return ask(this.#port, this.#agent, { ...letter, headers: { ...letter.headers, 'X-Mark': mark } });
  }

  async close(): Promise<void> {
    watch(this, false);
    this.#agent.destroy();
    await this.#gateway?.close();
    if (this.#child?.kill('SIGKILL')) await once(this.#child, 'close');
    this.#backend.close();
  }
}
