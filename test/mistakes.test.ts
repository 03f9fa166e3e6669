/**
 * Mistakes, and all that the gateway says of each, in test/fixtures/mistakes.txt: first 101 of new users, as they make
 * them, and then what else it may say. `npm run golden` writes there what it says now: read the difference as its user
 * would. All other tests compare only the place and the kind of a mistake.
 *
 *   ### what the mistake is
 *   | a line of gateway.json
 *   NAME=value of a variable
 *   backend: what it does (see `BACKENDS`)
 *   as: nobody, a user who is not root
 *   file: the mode of gateway.json
 *   $ the arguments
 *   what is written on standard output and standard error, or else the log up to the line about the backend
 */

import { chmodSync, readFileSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import { join } from 'node:path';
import process from 'node:process';
import { after, suite } from 'node:test';
import { assert, until } from './assertions.ts';
import { serve, sparePort } from './backend.ts';
import { fixture, folder } from './files.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { HERE, isNode } from './runtime.ts';
import { FROM, GROUP, SECRET, THIRD, TO } from './samples.ts';
import { cli, patientProgram, runAsNobody, start } from './start.ts';

const GOLDEN = 'mistakes.txt';

/** The lowest port that anyone may open, on Linux. */
const FIRST_PORT = '/proc/sys/net/ipv4/ip_unprivileged_port_start';

type Answer = [status: number, body: unknown];

/** What a backend answers that does as the mistake says, by method and path. */
const BACKENDS: Record<string, Record<string, Answer>> = {
  'answers': {},
  'has no account': {
    'GET /v1/accounts': [200, []],
    'POST /v2/send': [400, { error: 'Specified account does not exist' }],
  },
  'has several accounts': { 'GET /v1/accounts': [200, [FROM, THIRD]] },
  'has no internet': { 'POST /v2/send': [400, { error: 'Failed to send message: Connection closed unexpectedly' }] },
  'does not know the recipient': {
    'POST /v2/send': [400, { error: 'Failed to send message: Unregistered user "+4915100000002"' }],
  },
  'is another program': { 'GET /v1/about': [200, '<html><title>My NAS</title></html>'] },
};

const USUAL: Record<string, Answer> = {
  'GET /v1/about': [200, { versions: ['v1', 'v2'], build: 2, mode: 'native', version: '0.100' }],
  'GET /v1/accounts': [200, [FROM]],
  [`GET /v1/groups/${encodeURIComponent(FROM)}`]: [
    200,
    [
      { id: GROUP, name: 'Family' },
      ...['b', 'c'].map((letter) => ({ id: `group.${btoa(btoa(letter.repeat(32)))}`, name: 'Alerts' })),
    ],
  ],
  [`GET /v1/contacts/${encodeURIComponent(FROM)}`]: [200, [{ number: TO, name: 'Ann' }]],
  'POST /v2/send': [201, { timestamp: '1700000000000' }],
};

/** Starts the backend of a mistake. Returns its address and, where the program needs it, code that it runs first. */
async function startFor(t: TestContext, does: string | undefined): Promise<{ at: string; preload?: string }> {
  if (does === undefined || does === 'is down' || does === 'is the gateway') {
    return { at: `127.0.0.1:${await sparePort()}` };
  }
  if (does === 'has another name') {
    // What a resolver says of an unknown name depends on the network.
    const lookup = `import dns from 'node:dns';
      const { lookup } = dns;
      dns.lookup = (name, ...rest) => name !== 'signal-cli' ? lookup(name, ...rest) : process.nextTick(rest.at(-1),
        Object.assign(new Error('getaddrinfo ENOTFOUND ' + name), { code: 'ENOTFOUND', syscall: 'getaddrinfo' }));`;
    return { at: '', preload: lookup };
  }
  assert.ok(BACKENDS[does], `there is no backend that ${does}`);
  const answers = { ...USUAL, ...BACKENDS[does] };
  const server = http.createServer((req, res) => {
    const [status, body] = answers[`${req.method} ${req.url}`] ?? [404, '404 page not found'];
    req.resume().on('end', () => res.writeHead(status).end(typeof body === 'string' ? body : JSON.stringify(body)));
  });
  return { at: new URL(await serve(t, server)).host };
}

/** The lines of a mistake without what the gateway has said, and all that it says. */
async function play(t: TestContext, mistake: string): Promise<string> {
  const isPrivileged = !mistake.includes('127.0.0.1:80\n') || Number(readFileSync(FIRST_PORT, 'utf8')) > 80;
  if (!isPrivileged) return mistake; // here anyone may open it
  const given = mistake.slice(0, mistake.indexOf('\n', mistake.indexOf('\n$') + 1) + 1);
  const valueOf = (name: string) => new RegExp(`^${name}: (.*)$`, 'm').exec(given)?.[1];
  const { at, preload } = await startFor(t, valueOf('backend'));
  const dir = folder(t);
  const filled = (text: string) =>
    text.replaceAll('$SECRET', SECRET).replaceAll('$BACKEND', at).replaceAll('$FOLDER', dir);
  const file = Array.from(given.matchAll(/^\| (.*)$/gm), ([, line]) => `${filled(line!)}\n`).join('');
  const env = Object.fromEntries(
    Array.from(given.matchAll(/^([A-Z_]+)=(.*)$/gm), ([, name, value]) => [name!, filled(value!)]),
  );
  const [, line = ''] = /^\$(.*)$/m.exec(given)!;
  const words = Array.from(filled(line).matchAll(/'([^']*)'|(\S+)/g), ([, quoted, word]) => quoted ?? word!);
  const args = file ? ['--config', join(dir, 'gateway.json'), ...words] : words;
  if (file) writeFileSync(join(dir, 'gateway.json'), file, { mode: parseInt(valueOf('file') ?? '600', 8) });
  if (valueOf('as')) chmodSync(dir, 0o755);
  const mayStart = args.length === 0 || args.includes('--listen');
  const all = args.length === 0 ? { GATEWAY_LISTEN: '127.0.0.1:0', ...env } : env;
  const run = () => valueOf('as') ? runAsNobody(t, args, env) : cli(args, { env: all });
  const wait = () => startUntilTold(t, args, all, dir, preload);
  // Only what starts needs a process of its own.
  const starts = mayStart && !valueOf('as') && (await cli([...args, '--check'], { env: all })).code === 0;
  const said = starts ? await wait() : Object.values(await run()).slice(1).join('');
  return given + said.replaceAll(dir, 'FOLDER').replaceAll(at || dir, 'BACKEND')
    .replace(/^\S+Z (?=info|warn|error)/gm, '').replace(/ ms=\d+/g, '').replace(/ requestId=\S+/g, '')
    .replace(/(?<=\/\/)127\.\d+\.\d+\.\d+:(?!8880|8080)\d+/g, 'HERE').replace(/ by user \d+/, '')
    .replace(/\b[\da-f]{64}\b/g, 'DIGEST').replace(/(?<=api:)[\w-]{43}/g, 'TOKEN');
}

/** Runs the program until it ends, or has told what it found at the backend. */
async function startUntilTold(
  t: TestContext,
  args: string[],
  env: NodeJS.ProcessEnv,
  dir: string,
  preload: string | undefined,
): Promise<string> {
  const child = start(args, env, patientProgram(t, preload), dir);
  t.after(() => child.kill('SIGKILL'));
  const told = /^.*\bthe backend (?:answers|did not answer) .*\n/m;
  let isClosed = false;
  child.once('close', () => void (isClosed = true));
  child.stdin.end();
  await until(() => isClosed || told.test(child.output()), 'the program to end, or to tell of its backend');
  return child.output();
}

const ON_NODE_ALONE = { skip: !isNode && 'each runtime has its own words for the errors of the system' };

suite('mistakes', SIDE_BY_SIDE, () => {
  const mistakes = fixture(GOLDEN).split(/^(?=### )/m);
  const played = [...mistakes];
  const { TEST_GOLDEN } = process.env;
  for (const [i, mistake] of mistakes.entries()) {
    const [, title] = /^### (.*)\n/.exec(mistake)!;
    test(`a mistake is told as test/fixtures/mistakes.txt has it: ${title}`, ON_NODE_ALONE, async (t) => {
      played[i] = await play(t, mistake);
      assert.ok(!played[i].includes(SECRET.slice(0, 16)), `no secret is shown\n${played[i]}`);
      if (!TEST_GOLDEN) assert.equal(played[i], mistake, 'npm run golden writes what the gateway says now');
    });
  }
  after(() => TEST_GOLDEN && writeFileSync(join(HERE, TEST_GOLDEN), played.join('')));
});
