/** The gateway that is tested: as a module, as a process, and what it logs. */

import { type ChildProcess, spawn } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { gatewayFile } from '../test/runtime.ts';
import type { Played } from './finds.ts';
import type { AuthMethod } from './parts.ts';
import { SECRET_PATTERN } from './tokens.ts';

/** GATEWAY_FILE names another file than gateway.ts. */
export const FILE = gatewayFile(process.env.GATEWAY_FILE);
export const { createGateway, METHOD_NAMES, ROUTES: ROWS } = await import(
  FILE.href
) as typeof import('../gateway.ts');

export const AUTH_METHODS: AuthMethod[] = [...METHOD_NAMES];

/** A line of the gateway's log. */
export type Line = Record<string, unknown>;

/** Reads a line of the log, in any world. */
export function readLine(text: string, play: Played): Line {
  if (SECRET_PATTERN.test(text)) play.find(8, `the log contains a secret: ${text.slice(0, 300)}`);
  try {
    const line: Line = JSON.parse(text);
    if (line.message === 'internal error') play.find(7, `internal error: ${line.stack}`);
    return line;
  } catch {
    play.find(7, `a log line is not JSON: ${text.slice(0, 100)}`);
    return {};
  }
}

/** Starts the process of a gateway with this configuration. */
export function spawnGateway(configFile: string): ChildProcess {
  const loader = process.execArgv.filter((arg) => !/^--test|^--eval/.test(arg));
  const run = 'Deno' in globalThis ? ['run', '-A', '--no-check'] : loader;
  return spawn(process.execPath, [...run, fileURLToPath(FILE), '--config', configFile], {
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { PATH: process.env.PATH, HOME: process.env.HOME, GATEWAY_LOG_LEVEL: 'debug', GATEWAY_LOG_FORMAT: 'json' },
  });
}
