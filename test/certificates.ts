/** Two certificates for localhost and 127.0.0.1, with their keys. */

import { fileWith, fixture } from './files.ts';
import type { TestContext } from './guard.ts';

const pair = (name: string) => ({
  cert: fixture(`${name}.crt.pem`).trimEnd(),
  key: fixture(`${name}.key.pem`).trimEnd(),
});

export const CERTS = [pair('localhost'), pair('localhost-2')] as const;

/** Copies of the first one, which a test may change. */
export const certificate = (t: TestContext) => ({ cert: fileWith(t, CERTS[0].cert), key: fileWith(t, CERTS[0].key) });
