/** What the tests use of the gateway: of gateway.ts, or of another file that TEST_GATEWAY_FILE names. */

import './clock.ts';
import { gatewayFile } from './runtime.ts';

/** The file under test. TEST_GATEWAY_FILE names another one than the source, such as gateway.mjs. */
export const FILE = gatewayFile(process.env.TEST_GATEWAY_FILE);

export const {
  BodyScan,
  CALLS,
  ConfigError,
  createGateway,
  loadSettings,
  METHOD_NAMES,
  Metrics,
  parseTarget,
  RateLimiter,
  ROUTES: KNOWN_ROUTES,
  run,
  Template,
} = await import(
  FILE.href
) as typeof import('../gateway.ts');
