/** A world of time while it is played, with its gateway and its stand-in. */

import type net from 'node:net';
import type { Gateway, GatewayConfig } from '../gateway.ts';
import { StandIn } from './backend.ts';
import type { World } from './parts.ts';
import { Story } from './story.ts';
import { tokensWith } from './tokens.ts';
import { AUTH_METHODS, createGateway, type Line, readLine } from './under-test.ts';

/** Everything that belongs to one world while it is played. */
export class Play extends Story {
  readonly lines: Line[] = [];
  readonly standIn: StandIn;
  gateway!: Gateway;
  /** The gateway's connections. It may not have noticed that a client with an unread body has disconnected. */
  held = 0;
  /** The shutdown in mid-operation, once it has started: how many milliseconds it takes. */
  closing: Promise<number> | undefined;

  constructor(world: World) {
    super(world);
    this.standIn = new StandIn(this);
  }

  config(parallel = this.world.parallel): GatewayConfig {
    const { timeoutMs, waitMs, bodyMiB } = this.world;
    return {
      listen: '127.0.0.1:0',
      backend: {
        url: `http://${this.standIn.host}:${this.standIn.port}${this.versions.at(-1)!.base}`,
        timeout: `${timeoutMs}ms`,
        wait: `${waitMs}ms`,
        parallel,
      },
      tokens: tokensWith(this.versions.at(-1)!.changes),
      allow: ['messaging', 'info'],
      auth: { methods: AUTH_METHODS },
      limits: bodyMiB ? { body: `${bodyMiB}MiB` } : {},
      shutdown: '2s',
      log: { level: 'debug', format: 'json' },
    };
  }

  async open(): Promise<void> {
    await this.standIn.listen();
    const { headersMs, stallMs, slotMs, connectMs, lingerMs } = this.world;
    this.gateway = createGateway(this.config(), {
      log: (text) => this.lines.push(readLine(text, this)),
      headersTimeoutMs: headersMs,
      stallTimeoutMs: stallMs,
      slotTimeoutMs: slotMs,
      connectTimeoutMs: connectMs,
      lingerMs,
    });
    this.gateway.server.on('connection', (socket: net.Socket) => {
      this.held++;
      socket.once('close', () => this.held--);
    });
    this.port = Number(new URL(await this.gateway.listen()).port);
  }

  /** Shuts the gateway down. @returns how many milliseconds that took. */
  async close(): Promise<number> {
    const sinceMs = performance.now();
    await this.gateway.close();
    return performance.now() - sinceMs;
  }
}
