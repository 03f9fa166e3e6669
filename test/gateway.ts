/** What the tests use of the gateway: of gateway.ts, or of another file that TEST_GATEWAY_FILE names. */

import { extname } from 'node:path';
import { pathToFileURL } from 'node:url';
import { HERE } from './runtime.ts';
import './clock.ts';

const { TEST_GATEWAY_FILE } = process.env;

/** The file under test: the source, or what is compiled of it. TEST_GATEWAY_FILE names another one, such as gateway.mjs. */
export const FILE = TEST_GATEWAY_FILE
  ? new URL(TEST_GATEWAY_FILE, pathToFileURL(HERE))
  : new URL(`../gateway${extname(import.meta.url)}`, import.meta.url);

export const {
  BodyScan,
  ConfigError,
  createGateway,
  AUTH_METHODS,
  loadSettings,
  Metrics,
  parseTarget,
  RateLimiter,
  ROUTES: KNOWN_ROUTES,
  run,
  Template,
} = await import(
  FILE.href
) as typeof import('../gateway.ts');
