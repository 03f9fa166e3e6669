import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  chmodSync,
  chownSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  realpathSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import http from 'node:http';
import { dirname, join } from 'node:path';
import { buffer as readBytes, text as readText } from 'node:stream/consumers';
import { suite } from 'node:test';
import type { GatewayConfig, TokenConfig } from '../gateway.ts';
import { assert, assertDenied, difference, groupsOf, linesOf, until } from './assertions.ts';
import { serve, sparePort, startBackend } from './backend.ts';
import { ask, statusesOf } from './client.ts';
import { blocks, CONNECTING, fileWith, folder, README } from './files.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { isDeno } from './runtime.ts';
import { FROM, GROUP, OTHER, SECRET, SECRETS, signed, STRANGER, THIRD, TO } from './samples.ts';
import { cli, isRoot, NOBODY, program, runAsNobody, start, startGateway, startProcess } from './start.ts';

/** The id of a group, as the backend makes it of 32 bytes. */
const groupId = (letter: string): string => `group.${btoa(Buffer.alloc(32, letter).toString('base64'))}`;

const UUID = '1b4e28ba-2fa1-11d2-883f-0016d3cca427';

const OTHER_UUID = '0f4c2a3e-7d51-4b8a-9c60-1e2f3a4b5c6d';

/** What a backend knows, as the body of each answer, with 200 unless a status is given. */
type Known = Record<string, unknown>;

const KNOWN: Known = {
  'GET /v1/accounts': [FROM],
  [`GET /v1/groups/${FROM}`]: [
    { id: GROUP, name: 'Family', internal_id: 'x', members: [FROM, TO] },
    { id: groupId('b'), name: 'Alerts' },
    { id: groupId('c'), name: 'Alerts' },
  ],
  [`GET /v1/contacts/${FROM}`]: [
    { number: TO, uuid: OTHER_UUID, name: 'Ann', profile_name: 'x' },
    { number: '', uuid: UUID, name: '', profile_name: 'Family' },
    { number: null, uuid: 'nobody', name: 'Unusable' },
    { number: 'ann.01', uuid: GROUP, name: 'Unusable' },
    { number: GROUP, uuid: 'ann.01', name: 'Unusable' },
  ],
  'POST /v2/send': { timestamp: '1700000000000' },
};

const NOT_LINKED = '; the backend does not have this account: correct the number, or link it\n';
const OFFLINE = '; the backend cannot reach Signal: check its internet connection\n';

const TOO_OLD = '; Signal no longer takes this version of signal-cli: update the backend\n';

const UNTRUSTED = '; a recipient has a new phone, or Signal installed again: trust the new key at the backend\n';

/** What signal-cli says, and what to do then. */
const SENTENCES: [error: string, advice: string][] = [
  ['User +4915100000001 is not registered.\n', NOT_LINKED],
  ['No local users found, you first need to register or link an account\n', NOT_LINKED],
  [
    'INFO AccountHelper - The Signal protocol expects that incoming messages are regularly received.\n' +
    'Error while checking account +4915100000001: Closed unexpectedly\n',
    OFFLINE,
  ],
  ['Link request error: Connection closed!', OFFLINE],
  ["Couldn't create QR code: no data to encode", OFFLINE],
  ['Failed to send message: chat.signal.org (UnknownHostException)', OFFLINE],
  ...[
    'Error while checking account +4915100000001: signal-cli version is too old for the Signal-Server, please update.\n',
    'Error while checking account +4915100000001: StatusCode: 499\n',
    '[499] StatusCode: 499 (DeprecatedVersionException)',
  ].map((error) => [error, TOO_OLD] as [string, string]),
  [
    'Failed to send (some) messages:\n+4915100000002: Unregistered user "+4915100000002"\n',
    '; a recipient has left Signal; in a group, all others have the message: remove that member\n',
  ],
  [
    'Failed to send messages: Unregistered user "+4915100000002"',
    '; a recipient has no Signal account with this number\n',
  ],
  ...[
    'Failed to send message due to untrusted identities',
    'Failed to send (some) messages:\nUntrusted Identity for "+4915100000002"',
  ].map((error) => [error, UNTRUSTED] as [string, string]),
  [
    'Error while checking account +4915100000001: Authorization failed!',
    '; Signal no longer knows this device: link the account again\n',
  ],
];

/** A backend that answers with what it knows, and records what it was asked. A function answers by itself. */
async function startKnowing(t: TestContext, own: Known = {}) {
  const asked: string[] = [];
  const known = { ...KNOWN, ...own };
  const server = http.createServer(async (req, res) => {
    const body = (await readBytes(req)).toString();
    const line = `${req.method} ${decodeURIComponent(req.url!)}`;
    asked.push(body ? `${line} ${body}` : line);
    const answer = known[line];
    if (typeof answer === 'function') return void answer(res);
    const [status, said] = Array.isArray(answer) && typeof answer[0] === 'number' ? answer : [
      answer === undefined ? 404 : req.method === 'POST' ? 201 : 200,
      answer,
    ];
    res.writeHead(status).end(typeof said === 'string' ? said : JSON.stringify(said ?? null));
  });
  return { url: await serve(t, server), asked };
}

/** Adds a token to a file by command, without the gateway's own environment. */
const add = (file: string, words: string[], env: NodeJS.ProcessEnv = {}) =>
  cli(['--config', file, 'add', ...words], { env });

const testOf = (file: string, words: string[], env: NodeJS.ProcessEnv = {}) =>
  cli(['--config', file, 'test', ...words], { env });

/** What `add` has told: its secret. */
function secretIn(stdout: string): string {
  const [secret = '', ...others] = stdout.match(/(?<![\w-])[\w-]{43}(?![\w-])/g) ?? [];
  assert.ok(secret && others.length === 0, `the output has one secret, once:\n${stdout}`);
  return secret;
}

/** What to enter in each client, as the block of a section has it: a name in 16 columns, and its lines beside and below. */
function linesByClient(page: string, heading: string): Map<string, string[]> {
  const [block = ''] = blocks('text', page.split(`\n## ${heading}\n`)[1]);
  const found = new Map<string, string[]>();
  for (const line of block.trimEnd().split('\n')) {
    const [name, entered] = [line.slice(0, 15).trim(), line.slice(16)];
    assert.ok(
      line[15] === ' ' && entered.trim(),
      `"${heading}" has names of at most 15 letters, lines after 16: ${line}`,
    );
    if (name) found.set(name, []);
    assert.ok(found.size > 0, `"${heading}" has no name at the first line: ${line}`);
    [...found.values()].at(-1)!.push(entered);
  }
  return found;
}

/** The rows of the tables in "Every client", each with the texts in backticks of its cells, and its first client. */
const CLIENT_ROWS = CONNECTING.split('\n## ')[1]!.split('\n').filter((line) => /^\| (?!.*`--for`)/.test(line)).map(
  (line) => {
    const cells = line.slice(2, -2).split(' | ');
    const [, name] = /^\[?([^\],]+)/.exec(cells[0]!)!;
    return { name: name!, isClient: cells.length === 3, codes: cells.map((cell) => groupsOf(cell, /`([^`]+)`/g)) };
  },
);

/** What a client's owner enters has the token, the gateway's address, the account or a recipient. */
const ENTERED = /TOKEN|gateway:8880|\+1555/;

/** The names of what lies beside a file: nothing else may be left. */
const beside = (file: string): string[] => readdirSync(dirname(file));

/** Runs the program in a folder. */
async function runIn(cwd: string, args: string[]) {
  const [file, ...first] = program();
  const child = spawn(file, [...first, ...args], { cwd, env: { PATH: process.env.PATH } });
  child.stdin.end();
  const ended = new Promise((resolve) => child.once('close', resolve));
  const [stdout, stderr] = await Promise.all([readText(child.stdout), readText(child.stderr)]);
  return { code: await ended, stdout, stderr };
}

suite('add', SIDE_BY_SIDE, () => {
  test('add makes a token that works, shows its secret once, and writes only its digest, with mode 600', async (t) => {
    const { url } = await startKnowing(t);
    const file = join(folder(t), 'gateway.json');
    const { code, stdout, stderr } = await add(file, ['backup', TO], { GATEWAY_BACKEND_URL: url });
    assert.deepEqual([code, stderr], [0, '']);
    const secret = secretIn(stdout);
    assert.match(stdout, new RegExp(`^"backup" is in ${file}: it may send from \\${FROM} to \\${TO}\\.$`, 'm'));
    assert.match(stdout, /^The command "test backup" sends a message as it would\.$/m);
    assert.ok(stdout.includes(`\n\ncurl -u api:${secret} -d Hello http://127.0.0.1:8880/v2/send\n\n`), stdout);
    const digest = createHash('sha256').update(secret).digest('hex');
    assert.deepEqual(JSON.parse(readFileSync(file, 'utf8')), {
      backend: { url },
      tokens: {
        backup: {
          secret: `sha256:${digest}`,
          allow: ['send'],
          methods: ['basic', 'bearer'],
          defaults: { number: FROM, recipients: [TO] },
        },
      },
    });
    assert.equal(statSync(file).mode & 0o777, 0o600);
    assert.deepEqual(beside(file), ['gateway.json']);
    const backend = await startBackend(t);
    const gateway = await startGateway(t, backend, { tokens: JSON.parse(readFileSync(file, 'utf8')).tokens });
    const sent = await ask(gateway, {
      method: 'POST',
      path: '/v2/send',
      body: 'Hello',
      ...signed(`Bearer ${secret}`),
    });
    assert.equal(sent.status, 201);
    assert.deepEqual(backend.sent, [{ number: FROM, recipients: [TO], message: 'Hello' }]);
  });

  test('a running gateway accepts a token that is added to its file; nothing else has the secret', async (t) => {
    const { url } = await startKnowing(t);
    const tokens = { old: { secret: SECRET, defaults: { number: FROM, recipients: [TO] } } };
    const file = fileWith(t, { backend: { url }, tokens });
    const env = { GATEWAY_LISTEN: '127.0.0.1:0', GATEWAY_LOG_FORMAT: 'json', GATEWAY_LOG_LEVEL: 'debug' };
    const gateway = await startProcess(t, { args: ['--config', file], env });
    const { stdout } = await add(file, ['new', TO]);
    const secret = secretIn(stdout);
    await until(() => /"message":"reloaded"/.test(gateway.output()), 'the reload');
    const body = { method: 'POST', path: '/v2/send', body: 'Hello', ...signed(`Bearer ${secret}`) };
    assert.equal((await ask(gateway, body)).status, 201);
    assert.equal((await ask(gateway, { ...body, ...signed(`Bearer ${SECRET}`) })).status, 201);
    const checked = await cli(['--config', file, '--check']);
    const again = await add(file, ['new', TO]);
    const told = [gateway.output(), readFileSync(file, 'utf8'), JSON.stringify(checked), JSON.stringify(again)];
    assert.deepEqual(told.filter((text) => text.includes(secret)), []);
    await gateway.close();
  });

  test('the row of each client makes a token that its own line can use, as the pages show it', async (t) => {
    const { url } = await startKnowing(t);
    const help = (await cli(['--help'])).stdout;
    const clients = /^CLIENT: ([^.]*)\./m.exec(help)![1]!.split(/,\s+/);
    assert.ok(clients.length >= 8, help);
    const [entries, rights] = [true, false].map((isClient) => CLIENT_ROWS.filter((row) => row.isClient === isClient));
    const withRights = rights!.flatMap(({ codes }) => codes[0]!);
    assert.deepEqual(difference('"allow" of docs/clients.md', withRights, '--help', clients), []);
    const withEntries = [...new Set(entries!.flatMap(({ codes }) => codes[1]!))];
    assert.deepEqual(difference('the clients of docs/clients.md', withEntries, '--help', clients), []);
    const common = linesByClient(README, 'Connect a client');
    assert.ok(common.size >= 5, [...common.keys()].join());
    for (const [name, lines] of common) {
      const codes = entries!.find((row) => row.name === name)?.codes[2] ?? assert.fail(`README.md: ${name}`);
      assert.deepEqual(lines.filter((line) => !codes.some((code) => line.endsWith(code))), [], `README.md: ${name}`);
    }
    const backend = await startBackend(t);
    for (const client of clients) {
      const file = fileWith(t, { backend: { url }, listen: ':8880' });
      const words = client === 'prometheus' ? [] : [TO];
      const { code, stdout, stderr } = await add(file, ['x', ...words, '--for', client]);
      assert.equal(code, 0, stderr);
      const secret = secretIn(stdout);
      const config = JSON.parse(readFileSync(file, 'utf8'));
      const { codes } = rights!.find((row) => row.codes[0]!.includes(client))!;
      assert.deepEqual(codes[1], config.tokens.x.allow, `"allow" of ${client} in docs/clients.md`);
      const gateway = await startGateway(t, backend, { tokens: config.tokens });
      // The address with its token in the line, or else in a header.
      const userinfo = /\bapi:[\w-]+@/.test(stdout) || /-u api:/.test(stdout);
      const path = stdout.includes('/@auth=') ? `/@auth=${secret}` : '';
      const authorization = userinfo ? `Basic ${btoa(`api:${secret}`)}` : `Bearer ${secret}`;
      const own = path ? {} : signed(authorization);
      const isSender = client !== 'prometheus';
      const send = isSender
        ? {
          method: 'POST',
          path: `${path}/v2/send`,
          body: JSON.stringify({ number: FROM, recipients: [TO], message: 'x' }),
        }
        : { path: '/metrics' };
      assert.equal((await ask(gateway, { ...own, ...send })).status, isSender ? 201 : 200, client);
      if (isSender) {
        const seen = backend.seen.length;
        const other = JSON.stringify({ number: FROM, recipients: [STRANGER], message: 'x' });
        assert.equal((await ask(gateway, { ...own, ...send, body: other })).status, 403, client);
        assert.equal(backend.seen.length, seen, 'the backend saw nothing');
      }
      // What is entered stands in the first row of the client, with the page's example.
      const shown = stdout.split(secret).join('TOKEN').replace(/\bHOST(?=:8880|", "daemonPort)/g, 'gateway');
      const printed = shown.split('\n\n')[1]!.split('\n').filter((line) => ENTERED.test(line));
      const first = entries!.find((row) => row.codes[1]!.includes(client))!;
      const entered = first.codes[2]!.filter((code) => ENTERED.test(code));
      const isIn = (line: string) => entered.some((code) => line.endsWith(code));
      const lines = client === 'home-assistant' ? printed.filter((line) => /TOKEN/.test(line)) : printed;
      assert.deepEqual(lines.filter((line) => !isIn(line)), [], `the row of ${client} in docs/clients.md lacks these`);
      const unprinted = entered.filter((code) => !lines.some((line) => line.endsWith(code)));
      assert.deepEqual(unprinted, [], `"add" does not print these of the row of ${client} in docs/clients.md`);
    }
  });

  test('a token for a program that receives fetches an attachment, but neither lists nor deletes any', async (t) => {
    const backend = await startBackend(t, (_, res) => void res.end('a picture'));
    for (const client of ['bot', 'signalbot', 'n8n', 'openclaw']) {
      const file = fileWith(t, { backend: { url: backend.url } });
      const { stdout } = await add(file, ['x', TO, '--from', FROM, '--for', client]);
      const { tokens } = JSON.parse(readFileSync(file, 'utf8'));
      const gateway = await startGateway(t, backend, { tokens, auth: { methods: ['path'] } });
      const secret = secretIn(stdout);
      const at = client === 'openclaw' ? `/@auth=${secret}` : '';
      const own = at ? {} : signed(`Bearer ${secret}`);
      assert.equal((await ask(gateway, { path: `${at}/v1/attachments/abc`, ...own })).status, 200, client);
      const before = { seen: backend.seen.length, connections: backend.connections };
      const denied = await ask(gateway, { path: `${at}/v1/attachments`, ...own });
      assertDenied(denied, 403, 'endpoint_not_allowed', { backend, gateway }, before);
      const kept = await ask(gateway, { method: 'DELETE', path: `${at}/v1/attachments/abc`, ...own });
      assertDenied(kept, 403, 'endpoint_not_allowed', { backend, gateway }, before);
      const checked = (await cli(['--config', file, '--check'])).stdout;
      assert.match(checked, /^ {4}attachments {2}of any account, by their random ids$/m);
    }
  });

  test('a client may have several lines in README.md, indented ones too; one that is in no column is named', () => {
    const page = (...lines: string[]) => `\n## All\n\n\`\`\`text\n${lines.join('\n')}\n\`\`\`\n`;
    const gatus = ['alerting:', '  signal:', '    api-url: "http://api:TOKEN@gateway:8880"'];
    const laid = gatus.map((line, i) => (i === 0 ? 'Gatus' : '').padEnd(16) + line);
    assert.deepEqual([...linesByClient(page(...laid, 'Diun            url'), 'All')], [['Gatus', gatus], ['Diun', [
      'url',
    ]]]);
    for (const line of ['Alertmanager-webhook url', 'Gatus url', 'Gatus', '  signal:']) {
      assert.throws(() => linesByClient(page(...laid, line), 'All'), ({ message }: Error) => message.includes(line));
    }
  });

  test('a program that names all recipients in one send gets as many entries as the backend needs sends', async (t) => {
    const lists: [client: string, found: RegExp][] = [
      ['home-assistant', /^ {4}recipients: (.*)$/gm],
      ['uptime-kuma', /^recipients {2}(.*)$/gm],
      ['shoutrrr', /^signal:\/\/[^/]*\/\+\d+\/(.*)\?/gm],
    ];
    const all = [TO, GROUP, 'ann.01', THIRD, groupId('b')];
    for (const [client, found] of lists) {
      const { stdout, stderr } = await add(fileWith(t, {}), ['x', ...all, '--from', FROM, '--for', client]);
      assert.equal(stderr, '');
      const sends = Array.from(stdout.matchAll(found), ([, list]) => list!.replace(/["[\]]/g, '').split(/[,/]/));
      assert.deepEqual(sends, [[TO, THIRD], ['ann.01'], [GROUP], [groupId('b')]], stdout);
      const names = Array.from(stdout.matchAll(/name: (\w+)$/gm), ([, name]) => name);
      assert.deepEqual(names, client === 'home-assistant' ? ['signal', 'signal_2', 'signal_3', 'signal_4'] : []);
    }
  });

  test('add names HOST where only its owner knows the address, and https with a certificate', async (t) => {
    const lineFor = async (listen: string) => {
      const { stdout } = await add(fileWith(t, { listen }), ['x', TO, '--from', FROM]);
      const advice = /HOST stands for|A client on another machine or in a container needs this machine's address/.exec(
        stdout,
      )?.[0];
      assert.match(stdout, /^A gateway that runs with this file accepts it in 5 s\.$/m);
      return [/http\S*\/\/(\S*)\/v2/.exec(stdout)?.[1], advice];
    };
    const stands = 'HOST stands for';
    assert.deepEqual(await lineFor(':8881'), ['HOST:8881', stands]);
    assert.deepEqual(await lineFor('0.0.0.0:8881'), ['HOST:8881', stands]);
    assert.deepEqual(await lineFor('[::]:8881'), ['HOST:8881', stands]);
    assert.deepEqual(await lineFor('192.0.2.1:8881'), ['192.0.2.1:8881', undefined]);
    const local = "A client on another machine or in a container needs this machine's address";
    assert.deepEqual(await lineFor('[::1]:8881'), ['[::1]:8881', local]);
    assert.deepEqual(await lineFor('127.0.0.1:8881'), ['127.0.0.1:8881', local]);
  });

  test('add without a recipient lists what the backend knows, without what steers a terminal, and exits with 2', async (t) => {
    const evil = '\x1b[31mRed\x1b]0;title\x07\r\n  account  +1\u202Etxt\u2028' + 'y'.repeat(90);
    const { url, asked } = await startKnowing(t, {
      [`GET /v1/groups/${FROM}`]: [{ id: GROUP, name: evil }, { id: 'group.abc', name: 'Unusable' }],
    });
    const file = fileWith(t, { backend: { url } });
    const before = readFileSync(file, 'utf8');
    const { code, stdout, stderr } = await add(file, ['backup']);
    assert.deepEqual([code, stdout], [2, '']);
    assert.deepEqual(stderr.split('\n'), [
      "gateway: say who may get its messages: add backup RECIPIENT…, by number, UUID, user name or a group's id.",
      `The backend ${url} knows`,
      `  account  ${FROM}`,
      `  group    ${GROUP}  Red  account  +1txt${'y'.repeat(21)}…`,
      `  contact  ${TO}  ${OTHER_UUID}  Ann`,
      `  contact  ${UUID}  Family`,
      '',
    ]);
    assert.equal(readFileSync(file, 'utf8'), before);
    assert.deepEqual(asked.length, 3);
    // With the tokens in the environment too, because a group's id is needed there as well.
    const inEnv = { GATEWAY_TOKENS: `home=${SECRET}`, GATEWAY_BACKEND_URL: url };
    assert.equal((await add(join(folder(t), 'none.json'), ['backup'], inEnv)).stderr, stderr);
  });

  test('neither a group nor a person is found by name, and the backend is not asked for one', async (t) => {
    const { url, asked } = await startKnowing(t);
    const file = fileWith(t, { backend: { url } });
    const before = readFileSync(file, 'utf8');
    for (const word of ['Family', 'Ann', 'Alerts', 'my', '“+15550100002”']) {
      const { code, stdout, stderr } = await add(file, ['x', word, '--from', FROM]);
      assert.deepEqual([code, stdout], [2, ''], word);
      const said = 'recipient 1: this is no phone number, user name, UUID or group\'s id; "add NAME" alone lists what';
      assert.ok(stderr.includes(said), stderr);
    }
    assert.deepEqual([readFileSync(file, 'utf8'), asked], [before, []]);
  });

  test('add says how a recipient or an account is written, before it asks the backend', async (t) => {
    const { url, asked } = await startKnowing(t);
    const file = fileWith(t, { backend: { url } });
    const asNumber = 'write a phone number as "+"';
    const oneSend = 'one send goes to ';
    const cases: [words: string[], said: string][] = [
      [['15550100002'], `recipient 1: ${asNumber}`],
      [[TO, '+1 555 010-0002'], `recipient 2: ${asNumber}`],
      [[`\u202a${TO}\u202c`], 'recipient 1: it has a character that is not seen: type it anew'],
      [[`${TO},`, THIRD], `recipient 1: ${asNumber}`],
      [[`${TO},${THIRD}`], `recipient 1: ${asNumber}`],
      [['*'], 'write "*" into the file'],
      [['group.*'], 'write "group.*" into the file'],
      [['group.abc'], 'this is not the "id" of a group'],
      [[TO, '--from', '15550100001'], '--from: an account is "+", the country code and digits alone'],
      [[TO, GROUP, '--from', FROM], oneSend],
      [[GROUP, groupId('b'), '--from', FROM], oneSend],
      [[TO, 'ann.01', '--from', FROM], oneSend],
      [[TO, '--for', 'toaster'], '--for: "toaster" is not one of script, '],
      [[TO, '--for', 'prometheus'], '"prometheus" sends to nobody'],
    ];
    for (const [words, said] of cases) {
      const { code, stdout, stderr } = await add(file, ['x', ...words]);
      assert.deepEqual([code, stdout], [2, ''], said);
      assert.ok(stderr.includes(said), stderr);
    }
    const usage: [args: string[], said: string][] = [
      [['add', TO], "the token's name comes before its recipients: add NAME RECIPIENT…"],
      [['add'], 'unknown command or arguments'],
      [['test'], 'unknown command or arguments'],
      [['add', 'x', TO, '--check'], '--check is a command of its own'],
      [['render', 'x', '--check'], '--check is a command of its own'],
      [['test', 'x', '--for', 'script'], '--for belongs to "add"'],
      [['render', 'x', '--from', FROM], '--from belongs to "add" and "test"'],
      [['add', 'x', TO, '--for'], '--for needs a value'],
    ];
    for (const [args, said] of usage) {
      const { code, stderr } = await cli(['--config', file, ...args]);
      assert.equal(code, 2, stderr);
      assert.ok(stderr.includes(said), stderr);
    }
    for (const name of ['', '-', 'a b', 'é', 'x'.repeat(65), '__proto__']) {
      assert.match(
        (await cli(['--config', file, 'add', '--', name, TO])).stderr,
        /a name may have letters|takes no/,
        name,
      );
    }
    assert.deepEqual(asked, []);
    assert.deepEqual(JSON.parse(readFileSync(file, 'utf8')), { backend: { url } });
  });

  test('the account is --from, or the one in the configuration, or the only one of the backend', async (t) => {
    const { url, asked } = await startKnowing(t);
    const backend = { url };
    const numberOf = async (config: object, words: string[] = [], env = {}) => {
      const file = fileWith(t, { backend, ...config });
      const { stderr } = await add(file, ['x', TO, ...words], env);
      return stderr || JSON.parse(readFileSync(file, 'utf8')).tokens.x.defaults.number;
    };
    assert.equal(await numberOf({}, ['--from', THIRD]), THIRD);
    assert.equal(await numberOf({ defaults: { number: THIRD } }), THIRD);
    assert.equal(await numberOf({}, [], { GATEWAY_DEFAULTS_NUMBER: THIRD }), THIRD);
    assert.equal(await numberOf({ senders: [THIRD] }), THIRD);
    assert.equal(await numberOf({ tokens: { a: { secret: SECRET, senders: [THIRD] } } }), THIRD);
    assert.equal(await numberOf({ tokens: { a: { secret: SECRET, defaults: { number: THIRD } } } }), THIRD);
    assert.deepEqual(asked, []);
    assert.equal(await numberOf({ tokens: { a: { secret: SECRET, senders: [THIRD, TO] } } }), FROM);
    assert.deepEqual(asked, ['GET /v1/accounts']);
  });

  test('what the backend may answer has a sentence that says what to do, and nothing is written', async (t) => {
    const slow = (_: http.ServerResponse) => {};
    const endless = (res: http.ServerResponse) => {
      const write = () => {
        while (!res.destroyed && res.write(Buffer.alloc(1024 * 1024, ' ')));
      };
      res.on('drain', write);
      write();
    };
    const other = 'but not as signal-cli-rest-api does: correct backend.url';
    const cases: [accounts: unknown, code: number, said: string][] = [
      [[200, []], 1, 'has no account: link it to your phone first'],
      [[200, null], 1, 'has no account: link it to your phone first'],
      [[200, [FROM, TO]], 2, `has several accounts: choose one with --from NUMBER, of ${FROM}, ${TO}`],
      [
        [500, { error: "Couldn't get list of accounts: x" }],
        1,
        `with 500: {"error":"Couldn't get list of accounts: x"}\n`,
      ],
      [[500, ''], 1, "with 500: an empty body; the backend's own log says why"],
      [[400, { error: 'Specified account does not exist' }], 1, '; the backend does not have this account: correct'],
      ...SENTENCES.map(([error, advice]) => [[400, { error }], 1, advice] as [unknown, number, string]),
      [
        [401, 'Authorization failed'],
        1,
        'with 401: Authorization failed; put the right USER:PASSWORD@ into backend.url',
      ],
      [[200, '<html>\x1b[31m'], 1, other],
      [[200, { accounts: [] }], 1, other],
      [[200, [1]], 1, other],
      [[200, ['--config']], 1, other],
      [
        [404, '404 page not found'],
        1,
        "with 404: 404 page not found; correct backend.url: something else listens there; signal-cli's daemon cannot be asked: give --from NUMBER",
      ],
      [[301, 'x'], 1, 'with 301: x; correct backend.url'],
      [[401, 'x'], 1, 'with 401: x; put the right USER:PASSWORD@ into backend.url'],
      [[401, { error: 'A valid API token', code: 'unauthorized' }], 1, "own address: give the backend's"],
      [slow, 1, 'did not answer (timeout): '],
      [endless, 1, 'did not answer (its answer does not end): '],
    ];
    for (const [accounts, code, said] of cases) {
      const { url } = await startKnowing(t, { 'GET /v1/accounts': accounts });
      const file = join(folder(t), 'gateway.json');
      const timeout = accounts === slow ? '300ms' : '60s';
      const outcome = await add(file, ['x', TO], { GATEWAY_BACKEND_URL: url, GATEWAY_BACKEND_TIMEOUT: timeout });
      assert.ok(outcome.stderr.includes(said), `${said}\n${outcome.stderr}`);
      // deno-lint-ignore no-control-regex
      assert.ok(!/\x1b/.test(outcome.stderr), 'no escape');
      assert.deepEqual([outcome.code, outcome.stdout, beside(file)], [code, '', []]);
    }
    const file = join(folder(t), 'gateway.json');
    const { code, stderr } = await add(file, ['x', TO], {
      GATEWAY_BACKEND_URL: `http://127.0.0.1:${await sparePort()}`,
    });
    assert.equal(code, 1);
    assert.match(stderr, /did not answer \(.+\): start the backend, or correct its port/);
  });

  test('what is missing has a sentence with the command that makes it', async (t) => {
    const none = await testOf(fileWith(t, {}), ['home']);
    assert.match(none.stderr, /there is no token with that name; there are none yet: add NAME RECIPIENT… makes one\n$/);
    const missing = join(folder(t), 'none.json');
    const { code, stderr } = await cli(['--config', missing, '--check']);
    assert.equal(code, 2);
    assert.match(stderr, /none\.json does not exist; correct the path, or make the file with "add NAME RECIPIENT…"\n$/);
    for (const client of ['homeassistant', 'kuma', 'doorbell', 'github']) {
      const { code, stderr } = await add(fileWith(t, {}), ['x', TO, '--for', client]);
      assert.equal(code, 2);
      assert.match(stderr, /^gateway: --for: "\w+" is not one of script, /);
    }
  });

  test('add says of an account that is not linked what test says, and of a number of the examples', async (t) => {
    const unlinked = [400, { error: 'Specified account does not exist' }];
    const own = '+4915100000001';
    const { url } = await startKnowing(t, {
      [`GET /v1/groups/${FROM}`]: unlinked,
      [`GET /v1/groups/${own}`]: unlinked,
    });
    const saidOf = async (from: string) => (await add(fileWith(t, { backend: { url } }), ['x', '--from', from])).stderr;
    assert.match(
      await saidOf(own),
      /exist"\}; the backend does not have this account: correct the number, or link it\n$/,
    );
    assert.match(await saidOf(FROM), /exist"\}; \+1555… is a number of the examples: write your own\n$/);
  });

  test('add and test say that the backend is asked if it does not answer for 3 s, once, on standard error', async (t) => {
    const remark = 'gateway: asking the backend, which takes long in normal mode\n';
    const words = [['add', 'x', TO], ['test', 'home']];
    const held: http.ServerResponse[] = [];
    const hold = (res: http.ServerResponse) => void held.push(res);
    const { url } = await startKnowing(t, { 'GET /v1/accounts': hold, 'POST /v2/send': hold });
    const home = { secret: SECRET, defaults: { number: FROM, recipients: [TO] } };
    for (const [i, args] of words.entries()) {
      const file = fileWith(t, { backend: { url }, ...args[0] === 'test' && { tokens: { home } } });
      const child = start(['--config', file, ...args]);
      t.after(() => child.kill('SIGKILL'));
      child.stdin.end();
      let remarks = '';
      child.stderr.on('data', (chunk) => void (remarks += chunk));
      const ended = new Promise((resolve) => child.once('close', resolve));
      await until(() => remarks.includes('\n') || child.exitCode !== null, 'the remark');
      assert.deepEqual([remarks, child.exitCode], [remark, null]);
      held[i]!.writeHead(i === 0 ? 200 : 201).end(JSON.stringify(i === 0 ? [FROM] : { timestamp: '1' }));
      assert.deepEqual([await ended, remarks], [0, remark]);
      assert.match(child.output(), i === 0 ? /it may send from/ : /Look at the phone/);
    }
  });

  test('without a question to the backend, it may be down', async (t) => {
    const file = fileWith(t, { backend: { url: `http://127.0.0.1:${await sparePort()}` }, defaults: { number: FROM } });
    assert.equal((await add(file, ['x', TO])).code, 0);
    assert.equal((await add(file, ['y', GROUP])).code, 0);
    assert.equal((await add(file, ['z', UUID, 'ann.01', TO, GROUP, '--for', 'bot'])).code, 0);
    const { tokens } = JSON.parse(readFileSync(file, 'utf8'));
    assert.deepEqual(tokens.z.recipients, [UUID, 'ann.01', TO, GROUP]);
    assert.deepEqual(tokens.z.senders, [FROM]);
  });

  test('everything else in the file keeps its value and its place', async (t) => {
    const rows: [before: string, rest: object, ...names: string[]][] = [
      ['{}', {}, 'new'],
      ['{ "rate": "30/1m" }\n\n', { rate: '30/1m' }, 'new'],
      ['{"tokens":{},"rate":"1/1s"}', { rate: '1/1s' }, 'new'],
      [
        `{\t"\\u0074okens" : { "z" : {"secret":"${SECRET}", "message": "}{ \\" tokens\\": {\\u00e9"} }\r\n, "rate":"9/1s"}`,
        { rate: '9/1s' },
        'z',
        'new',
      ],
      [
        `{ "defaults": { "recipients": ["${TO}"] }, "tokens": { "b": { "secret": "${SECRET}" }, "a": { "secret": "${SECRET}-2" } } }`,
        { defaults: { recipients: [TO] } },
        'b',
        'a',
        'new',
      ],
    ];
    for (const [before, rest, ...names] of rows) {
      const file = fileWith(t, before);
      const { code, stderr } = await add(file, ['new', TO, '--from', FROM]);
      assert.equal(code, 0, stderr);
      const written = readFileSync(file, 'utf8');
      const { tokens, ...others } = JSON.parse(written);
      assert.deepEqual([others, Object.keys(tokens)], [rest, names], before);
      const { tokens: old = {} } = JSON.parse(before);
      assert.deepEqual({ ...tokens, new: undefined }, { ...old, new: undefined }, before);
      assert.match(written, /^\{\n {2}"[^]*\n {4}"new": \{\n {6}"secret": "sha256:[^]*\n\}\n$/);
    }
  });

  test('the first token of a gateway for other machines can be added, although the file without it is a mistake', async (t) => {
    const file = fileWith(t, { listen: ':8880' });
    assert.equal((await cli(['--config', file, '--check'])).code, 2);
    assert.equal((await add(file, ['x', TO, '--from', FROM])).code, 0);
    assert.equal((await cli(['--config', file, '--check'])).code, 0);
  });

  test('a file that is no valid configuration stays as it is, and the mistake is shown', async (t) => {
    const half = `{ "tokens": { "old": { "secret": "${SECRET}", "allow": ["se`;
    const old = { secret: SECRET };
    const cases: [content: unknown, said: string | RegExp][] = [
      [half, /is not a JSON object: line 1, column \d+: /],
      ['', /is not a JSON object: line 1, column 1: /],
      ['tokens:\n  a: b\n', 'line 1, column 1: it must begin with "{"; there is t'],
      [`{ "tokens": { "old": { "secret": "${SECRET}" } }, "tokens": {} }`, 'is given twice in one object'],
      [
        `{ "tokens": { "old": { "secret": "${SECRET}" }, "\\u006fld": { "secret": "${SECRET}-2" } } }`,
        '"old" is given twice',
      ],
      [{ tokens: { old }, recipient: TO }, 'recipient: is not a setting'],
      [
        { tokens: { old, x: old } },
        'there is a token "x" already; choose another name, or first remove it ("remove x"), or rename it in ',
      ],
      [{ tokens: `old=${SECRET}` }, 'tokens: only an object can be changed here'],
      [{ tokens: [old] }, 'tokens: only an object can be changed here'],
    ];
    for (const [content, said] of cases) {
      const file = fileWith(t, content);
      const before = readFileSync(file, 'utf8');
      const { code, stdout, stderr } = await add(file, ['x', TO, '--from', FROM]);
      assert.deepEqual([code, stdout], [2, '']);
      assert.ok(typeof said === 'string' ? stderr.includes(said) : said.test(stderr), `${said}\n${stderr}`);
      assert.ok(!stderr.includes(SECRET), stderr);
      assert.equal(readFileSync(file, 'utf8'), before);
      assert.deepEqual(beside(file), ['gateway.json']);
    }
    for (const variable of ['GATEWAY_TOKENS', 'GATEWAY_TOKENS_FILE']) {
      const { code, stderr } = await add(fileWith(t, {}), ['x', TO, '--from', FROM], { [variable]: SECRET });
      assert.equal(code, 2);
      assert.ok(
        stderr.includes(`${variable} is set and replaces all tokens of a file: write NAME=SECRET there`),
        stderr,
      );
    }
  });

  test('mode and link of the file stay; a link to nothing is a mistake', async (t) => {
    const dir = folder(t);
    const [target, link, nowhere] = ['real.json', 'gateway.json', 'nowhere.json'].map((name) => join(dir, name));
    writeFileSync(target!, '{}');
    chmodSync(target!, 0o640);
    symlinkSync('real.json', link!);
    assert.equal((await add(link!, ['x', TO, '--from', FROM])).code, 0);
    assert.ok(lstatSync(link!).isSymbolicLink(), 'it is still a link');
    assert.deepEqual(Object.keys(JSON.parse(readFileSync(target!, 'utf8')).tokens), ['x']);
    assert.equal(statSync(target!).mode & 0o777, 0o640);
    symlinkSync('gone.json', nowhere!);
    const { code, stderr } = await add(nowhere!, ['x', TO, '--from', FROM]);
    assert.equal(code, 2);
    assert.match(stderr, /does not exist/);
    assert.deepEqual(readdirSync(dir).sort(), ['gateway.json', 'nowhere.json', 'real.json']);
  });

  test('a file that changes while add waits for the backend is not replaced', async (t) => {
    for (const isNew of [false, true]) {
      const changed = '{ "rate": "1/1s" }';
      const change = (res: http.ServerResponse) => {
        writeFileSync(file, changed);
        res.end(JSON.stringify([FROM]));
      };
      const { url } = await startKnowing(t, { 'GET /v1/accounts': change });
      const file = isNew ? join(folder(t), 'gateway.json') : fileWith(t, {});
      const { code, stdout, stderr } = await add(file, ['x', TO], { GATEWAY_BACKEND_URL: url });
      assert.deepEqual([code, stdout], [2, '']);
      assert.ok(stderr.includes('has changed meanwhile; nothing was written: run the command again'), stderr);
      assert.equal(readFileSync(file, 'utf8'), changed);
      assert.deepEqual(beside(file), ['gateway.json']);
    }
  });

  test('where the file cannot be written, add prints what to paste, with the secret, and exits with 1', async (t) => {
    // A new file, in a folder that is not there.
    const missing = join(folder(t), 'missing', 'gateway.json');
    const fresh = await add(missing, ['x', TO, '--from', FROM]);
    assert.equal(fresh.code, 1);
    assert.match(
      fresh.stderr,
      /cannot be written \(ENOENT.*\); nothing was changed: save the lines above as that file/,
    );
    const [json = '', line = ''] = fresh.stdout.split(/\n\n(?=curl)/);
    assert.equal((await cli(['--config', fileWith(t, json), '--check'])).code, 0);
    const digest = createHash('sha256').update(secretIn(line)).digest('hex');
    assert.equal(JSON.parse(json).tokens.x.secret, `sha256:${digest}`);
    assert.ok(!fresh.stderr.includes(secretIn(line)), fresh.stderr);
  });

  test('a file that is read-only is not replaced, although its folder can be written', async (t) => {
    const file = fileWith(t, {});
    chmodSync(file, 0o444);
    chmodSync(dirname(file), 0o777);
    const args = ['--config', file, 'add', 'x', TO, '--from', FROM];
    const { code, stdout, stderr } = await runAsNobody(t, args);
    assert.equal(code, 1, stdout + stderr);
    assert.match(
      stderr,
      /cannot be written \(EACCES\); nothing was changed: put the first lines into/,
    );
    const [block = ''] = stdout.split('\n\ncurl');
    assert.equal((await cli(['--config', fileWith(t, `{"tokens":{${block}}}`), '--check'])).code, 0, block);
    secretIn(stdout);
    assert.equal(readFileSync(file, 'utf8'), '{}');
    assert.deepEqual(beside(file), ['gateway.json']);
  });

  test("a file of root's that another user may not read has the advice for a container and for a machine", {
    skip: !isRoot && 'needs root',
  }, async (t) => {
    const file = fileWith(t, {});
    chmodSync(file, 0o600);
    chmodSync(dirname(file), 0o755);
    const { code, stderr } = await runAsNobody(t, ['--config', file, '--check']);
    assert.equal(code, 2);
    assert.match(stderr, /\(EACCES\); let this user read it: chown or chmod; outside of a container, try sudo\n$/);
    chownSync(file, 1234, 1234);
    const other = await runAsNobody(t, ['--config', file, '--check']);
    assert.match(other.stderr, /\(EACCES\); let this user read it: chown or chmod\n$/);
  });

  test('the user of a service is not told to try sudo, but that files under /home are hidden from it', {
    skip: (isDeno || !isRoot) && 'needs root, and Deno does not give the id of a user',
  }, async (t) => {
    const file = fileWith(t, {});
    chmodSync(file, 0o600);
    chmodSync(dirname(file), 0o755);
    const check = async (path: string) => (await runAsNobody(t, ['--config', path, '--check'], {}, 999)).stderr;
    assert.match(await check(file), /\(EACCES\); let this user read it: chown or chmod\n$/);
    assert.match(
      await check('/root/gateway.json'),
      /: chown or chmod; files under \/home are hidden from a service\n$/,
    );
    assert.match(await check('/tmp/../root/gateway.json'), /hidden from a service\n$/);
    assert.match(await check(dirname(file)), /\(EISDIR\); it is a folder: [^;]*\n$/);
    const asPerson = (path: string) => runAsNobody(t, ['--config', path, '--check'], {}, 1000);
    assert.match((await asPerson(file)).stderr, /; outside of a container, try sudo\n$/);
    assert.match((await asPerson(dirname(file))).stderr, /\(EISDIR\); it is a folder: [^;]*\n$/);
  });

  test("a bot's owner is told that it replies to UUIDs, and which command lists them", async (t) => {
    const { url, asked } = await startKnowing(t);
    const outputOf = async (client: string, ...ids: string[]) => {
      const words = ['x', ...ids, '--from', FROM, '--for', client];
      return (await add(fileWith(t, { backend: { url } }), words)).stdout;
    };
    const hint =
      '\nA bot replies to UUIDs: add those of its people to its "recipients"; "add NAME" alone lists them.\n';
    assert.ok((await outputOf('bot', TO, THIRD)).includes(hint), hint);
    for (const [client, ...ids] of [['bot', UUID], ['bot', GROUP], ['script', TO]] as const) {
      assert.ok(!(await outputOf(client, ...ids)).includes('UUIDs'), client);
    }
    assert.deepEqual(asked, []);
  });

  test('remove takes one token out of the file, says what ends and when, and leaves the rest as it was', async (t) => {
    const secretOf = (i: number): string => `${SECRET}-${i}`;
    const file = fileWith(t, {
      log: { level: 'warn' },
      tokens: { one: { secret: secretOf(1), rate: '1/1m' }, two: { secret: secretOf(2) } },
    });
    chmodSync(file, 0o640);
    const remove = (name: string, env = {}) => cli(['--config', file, 'remove', name], { env });
    const first = await remove('one');
    assert.deepEqual([first.code, first.stderr], [0, '']);
    assert.deepEqual(first.stdout.split('\n'), [
      `"one" is no longer in ${file}.`,
      'A gateway that runs with this file refuses the token in 5 s, and ends what it has open.',
      '',
    ]);
    const left = { log: { level: 'warn' }, tokens: { two: { secret: secretOf(2) } } };
    assert.deepEqual([JSON.parse(readFileSync(file, 'utf8')), statSync(file).mode & 0o777, beside(file)], [
      left,
      0o640,
      ['gateway.json'],
    ]);
    const again = await remove('one');
    assert.deepEqual([again.code, again.stderr.includes('has no token with that name; there are "two"')], [2, true]);
    const inEnv = await remove('two', { GATEWAY_TOKENS: SECRET });
    assert.match(
      inEnv.stdout,
      /^GATEWAY_TOKENS is set and replaces all tokens of the file: what it has still works\.$/m,
    );
    assert.doesNotMatch(inEnv.stdout, /last one/);
    assert.deepEqual(JSON.parse(readFileSync(file, 'utf8')).tokens, {});
    writeFileSync(file, JSON.stringify({ tokens: { two: { secret: secretOf(2) } } }));
    assert.match((await remove('two')).stdout, /^It was the last one: nobody is let in until there is another\.$/m);
  });

  test('a gateway that runs refuses a removed token, and ends what it has open', async (t) => {
    const backend = await startBackend(t);
    const tokens = { stays: { secret: SECRET }, goes: { secret: OTHER } };
    const file = fileWith(t, { tokens, backend: { url: backend.url } });
    const gateway = await startProcess(t, { args: ['--config', file] });
    const asked = () => statusesOf(gateway, ...[SECRET, OTHER].map((secret) => signed(`Bearer ${secret}`)));
    assert.deepEqual(await asked(), [200, 200]);
    assert.equal((await cli(['--config', file, 'remove', 'goes'])).code, 0);
    await until(() => linesOf(gateway, /^reloaded/).length > 0);
    assert.deepEqual(await asked(), [200, 401]);
    await gateway.close();
  });

  test('remove changes nothing in a file that a gateway would not load, or that cannot be written, and says so', async (t) => {
    const token = { secret: SECRET };
    const cases: [content: unknown, said: string][] = [
      [{ tokens: { x: token, y: { secret: OTHER, rat: 1 } } }, 'tokens.y.rat: is not a setting'],
      [`{"tokens":{"x":{"secret":"${SECRET}"},"x":{"secret":"${OTHER}"}}}`, 'is given twice in one object'],
      [{ tokens: `x=${SECRET}` }, 'tokens: only an object can be changed here'],
      [{}, 'has no token with that name; there are none'],
    ];
    for (const [content, said] of cases) {
      const file = fileWith(t, content);
      const before = readFileSync(file, 'utf8');
      const { code, stdout, stderr } = await cli(['--config', file, 'remove', 'x']);
      assert.deepEqual([code, stdout, stderr.includes(said)], [2, '', true], stderr);
      assert.doesNotMatch(stderr, SECRETS);
      assert.equal(readFileSync(file, 'utf8'), before);
    }
    const { stderr } = await cli(['--config', join(folder(t), 'none.json'), 'remove', 'x']);
    assert.match(stderr, /does not exist/);
  });

  test(
    'the owner of a file stays: root leaves it to them, and anyone else does not take it',
    { skip: !isRoot && 'needs root' },
    async (t) => {
      const file = fileWith(t, {});
      chownSync(file, NOBODY, NOBODY);
      assert.equal((await add(file, ['x', TO, '--from', FROM])).code, 0);
      assert.deepEqual([statSync(file).uid, statSync(file).gid], [NOBODY, NOBODY]);

      const ofRoot = fileWith(t, {});
      chmodSync(ofRoot, 0o666);
      chmodSync(dirname(ofRoot), 0o777);
      const args = ['--config', ofRoot, 'add', 'x', TO, '--from', FROM];
      const other = await runAsNobody(t, args);
      assert.equal(other.code, 1, other.stdout + other.stderr);
      assert.match(other.stderr, /cannot be written \(EPERM\); nothing was changed/);
      assert.equal(readFileSync(ofRoot, 'utf8'), '{}');
      assert.deepEqual(beside(ofRoot), ['gateway.json']);
    },
  );
});

suite('test', SIDE_BY_SIDE, () => {
  const MESSAGE = 'Test of the gateway';
  const tokens = {
    script: { secret: SECRET, defaults: { number: FROM, recipients: [TO], text_mode: 'styled' } },
    named: { secret: `${SECRET}-2`, senders: [FROM], recipients: ['group.*', TO, THIRD] },
    open: { secret: `${SECRET}-3` },
    metrics: { secret: `${SECRET}-4`, allow: ['metrics'] },
    reader: { secret: `${SECRET}-7`, allow: ['info', 'metrics'] },
    old: { secret: `${SECRET}-5`, expires: '2020-01-01' },
  };

  test('test sends a message as the token would, without its secret, and prints what the backend says', async (t) => {
    const { url, asked } = await startKnowing(t);
    const file = fileWith(t, { backend: { url }, tokens });
    const sends: [words: string[], send: object][] = [
      [['script'], { text_mode: 'styled', number: FROM, recipients: [TO] }],
      [['named'], { number: FROM, recipients: [TO] }],
      [['named', THIRD], { number: FROM, recipients: [THIRD] }],
      [['named', GROUP], { number: FROM, recipients: [GROUP] }],
      [['open', STRANGER], { number: FROM, recipients: [STRANGER] }],
      [['open', STRANGER, '--from', THIRD], { number: THIRD, recipients: [STRANGER] }],
    ];
    for (const [words, send] of sends) {
      asked.length = 0;
      const { code, stdout, stderr } = await testOf(file, words);
      assert.deepEqual([code, stderr], [0, '']);
      assert.match(
        stdout,
        /^from \+\d+ to .*: the backend answers 201 \{"timestamp":"1700000000000"\}\nLook at the phone: it shows "Test of the gateway"\.\n$/,
      );
      const posted = asked.filter((line) => line.startsWith('POST'));
      assert.equal(posted.length, 1);
      assert.deepEqual(JSON.parse(posted[0]!.slice('POST /v2/send '.length)), { message: MESSAGE, ...send });
    }
  });

  test('what the token may not do, test refuses in the words of the gateway, and the backend gets nothing', async (t) => {
    const { url, asked } = await startKnowing(t);
    const file = fileWith(t, {
      backend: { url },
      tokens: { ...tokens, two: { secret: `${SECRET}-6`, senders: [FROM] } },
    });
    const cases: [words: string[], code: number, said: string][] = [
      [
        ['script', STRANGER],
        1,
        'This token may not send to one of these recipients: a phone number that is not on its list',
      ],
      [
        ['named', 'ann.01'],
        1,
        'This token may not send to one of these recipients: a user name that is not on its list',
      ],
      [['script', '--from', THIRD], 1, 'This token may use only the accounts on its list'],
      [['metrics', TO], 2, 'the token "metrics" only reads metrics, so there is nothing to test'],
      [['reader', TO], 1, 'This token may not use this endpoint; the word "send" in its "allow" opens it.'],
      [['old', TO], 1, 'the token "old" has expired'],
      [['two'], 2, 'the token "two" has no list of recipients, so name one: test two RECIPIENT'],
      [['open'], 2, 'the token "open" has no list of recipients, so name one: test open RECIPIENT'],
      [['named', '15550100002'], 2, 'recipient 1: write a phone number as "+"'],
      [['nobody'], 2, 'there is no token with that name; there are "script", "named"'],
      [['script', TO, TO], 2, 'unknown command or arguments'],
    ];
    for (const [words, code, said] of cases) {
      const outcome = await testOf(file, words);
      assert.deepEqual([outcome.code, outcome.stdout], [code, ''], outcome.stderr);
      assert.ok(outcome.stderr.includes(said), outcome.stderr);
    }
    assert.deepEqual(asked.filter((line) => line.startsWith('POST')), []);
  });

  test('test fails with what the backend says, and with whether the message may have been sent', async (t) => {
    const hangs = (_: http.ServerResponse) => {};
    const partial = [{ timestamp: '1', errors: { recipients: [{ number: TO, reason: 'UNREGISTERED_FAILURE' }] } }];
    const cases: [answer: unknown, said: string][] = [
      [
        [400, { error: 'Specified account does not exist\x1b[2J' }],
        'answers 400 {"error":"Specified account does not exist',
      ],
      [
        [400, { error: 'Specified account does not exist' }],
        '; +1555… is a number of the examples: write your own',
      ],
      [[429, { error: 'x. Use the attached challenge tokens' }], '; Signal asks for a captcha'],
      [[201, partial], 'UNREGISTERED_FAILURE"}]}}]; +1555… is a number of the examples'],
      [[200, '<html>'], 'answers 200 <html>; correct backend.url'],
      [[500, ''], "answers 500 an empty body; the backend's own log says why"],
      // A message goes nowhere else, whatever the backend says.
      [
        (res: http.ServerResponse) => void res.writeHead(307, { location: '/elsewhere' }).end(),
        'answers 307 an empty body; correct backend.url',
      ],
      [hangs, 'did not answer (timeout): '],
      [hangs, '; the message may have been sent'],
      [(res: http.ServerResponse) => void res.destroy(), '; the message may have been sent'],
    ];
    for (const [answer, said] of cases) {
      const { url, asked } = await startKnowing(t, { 'POST /v2/send': answer });
      const file = fileWith(t, { backend: { url, timeout: answer === hangs ? '2s' : '60s' }, tokens });
      const { code, stdout, stderr } = await testOf(file, ['script']);
      assert.deepEqual([code, stdout], [1, ''], stderr);
      assert.ok(stderr.includes(said), `${said}\n${stderr}`);
      // deno-lint-ignore no-control-regex
      assert.ok(!/\x1b/.test(stderr), 'no escape');
      assert.equal(asked.length, 1, 'it is sent once');
    }
    for (
      const [answer, said] of [
        [[400, { error: 'Specified account does not exist' }], '; the backend does not have this account: correct'],
        [[201, partial], '; a recipient has no Signal account'],
        ...SENTENCES.map(([error, advice]) => [[400, { error }], advice]),
      ]
    ) {
      const { url } = await startKnowing(t, { 'POST /v2/send': answer });
      const own = await testOf(fileWith(t, { backend: { url }, tokens }), [
        'open',
        '+4915100000002',
        '--from',
        '+4915100000001',
      ]);
      assert.ok(own.stderr.includes(String(said)), own.stderr);
    }
    const array = await startKnowing(t, { 'POST /v2/send': [201, [{ timestamp: '1' }]] });
    assert.equal((await testOf(fileWith(t, { backend: { url: array.url }, tokens }), ['script'])).code, 0);
    const down = fileWith(t, { backend: { url: `http://127.0.0.1:${await sparePort()}` }, tokens });
    const { code, stderr } = await testOf(down, ['script']);
    assert.equal(code, 1);
    assert.match(
      stderr,
      /did not answer \(.*\): start the backend, or correct its port; in a container, localhost is the container itself\n$/,
    );
  });
});

suite('the file in the folder', SIDE_BY_SIDE, () => {
  test('gateway.json in the folder is read if no other file is named, but not by the demo', async (t) => {
    const dir = realpathSync(folder(t));
    writeFileSync(join(dir, 'gateway.json'), JSON.stringify({ tokens: { here: { secret: SECRET } } }));
    writeFileSync(join(dir, 'other.json'), JSON.stringify({ tokens: { there: { secret: SECRET } } }));
    const here = await runIn(dir, ['--check']);
    assert.match(here.stdout, /It was read from: the file .*\/gateway\.json\.\n[^]*\n {2}here\n/);
    const there = await runIn(dir, ['--check', '--config', 'other.json']);
    assert.match(there.stdout, /It was read from: the file .*\/other\.json\.\n[^]*\n {2}there\n/);
    const nothing = await runIn(folder(t), ['--check']);
    assert.match(nothing.stdout, /It was read from: nothing, only defaults apply\./);
    writeFileSync(join(dir, 'gateway.json'), '{');
    assert.equal((await runIn(dir, ['--check'])).code, 2);
    const [file, ...first] = program();
    const demo = spawn(file, [...first, '--demo', '--listen', '127.0.0.1:0'], {
      cwd: dir,
      env: { PATH: process.env.PATH },
    });
    t.after(() => demo.kill('SIGKILL'));
    let output = '';
    for (const stream of [demo.stdout, demo.stderr]) stream.on('data', (chunk) => void (output += chunk));
    await until(() => /^curl /m.test(output) || demo.exitCode !== null, 'the demo');
    assert.match(output, /^curl /m);
  });

  test('a gateway.json that cannot be read is a mistake, so nothing opens', async (t) => {
    const makers: ((path: string) => void)[] = [
      (path) => mkdirSync(path),
      (path) => symlinkSync('gone.json', path),
    ];
    for (const make of makers) {
      const dir = folder(t);
      make(join(dir, 'gateway.json'));
      const { code, stdout, stderr } = await runIn(dir, ['--listen', '127.0.0.1:0']);
      assert.deepEqual([code, stdout], [2, '']);
      assert.match(stderr, /^ {2}configuration: /m);
    }
  });
});

suite('the lists of the top level', SIDE_BY_SIDE, () => {
  const bearer = (secret: string) => signed(`Bearer ${secret}`);
  const send = (recipient: string, number = FROM) => ({
    method: 'POST',
    path: '/v2/send',
    body: JSON.stringify({ message: 'x', number, recipients: [recipient] }),
  });
  const SECOND = `${SECRET}-2`;

  /** What each token may do under each top level: its accounts and its recipients, of FROM, TO, THIRD and STRANGER. */
  const TOPS = {
    'defaults of both': { defaults: { number: FROM, recipients: [TO] } },
    'both lists': { senders: [FROM], recipients: [TO] },
    'a list and defaults': { senders: [FROM], defaults: { recipients: [TO] } },
    'lists beside wider defaults': {
      ...{ senders: [FROM], recipients: [TO] },
      defaults: { number: THIRD, recipients: [STRANGER] },
    },
  };
  const OWN = {
    none: [{}, [FROM], [TO]],
    senders: [{ senders: [THIRD] }, [THIRD], [TO]],
    recipients: [{ recipients: [STRANGER] }, [FROM], [STRANGER]],
    textMode: [{ defaults: { text_mode: 'styled' } }, [FROM], [TO]],
    number: [{ defaults: { number: THIRD } }, [THIRD], [TO]],
    meant: [{ defaults: { recipients: [STRANGER] } }, [FROM], [STRANGER]],
    anySender: [{ senders: ['*'] }, [FROM, THIRD], [TO]],
    anyone: [{ recipients: ['*'] }, [FROM], [TO, STRANGER]],
    free: [{ senders: ['*'], recipients: ['*'] }, [FROM, THIRD], [TO, STRANGER]],
  } as const satisfies Record<string, readonly [TokenConfig, string[], string[]]>;

  // A token with `senders` alone could write to everyone, although the top level had `recipients`.
  for (const [title, top] of Object.entries(TOPS)) {
    test(`what a token does not say about accounts and recipients, the top level says, and only "*" widens: ${title}`, async (t) => {
      const backend = await startBackend(t);
      const secretOf = (name: string) => `${SECRET}-${name}`;
      const tokens = Object.fromEntries(
        Object.entries(OWN).map(([name, [own]]) => [name, { secret: secretOf(name), ...own }]),
      );
      const gateway = await startGateway(t, backend, { ...top, tokens });
      for (const [name, [, numbers, recipients]] of Object.entries(OWN)) {
        for (const number of [FROM, THIRD]) {
          for (const recipient of [TO, STRANGER]) {
            const seen = backend.seen.length;
            const answer = await ask(gateway, { ...send(recipient, number), ...bearer(secretOf(name)) });
            const may = numbers.some((each) => each === number) && recipients.some((each) => each === recipient);
            assert.equal(answer.status, may ? 201 : 403, `${name} from ${number} to ${recipient}: ${answer.text}`);
            assert.equal(backend.seen.length - seen, may ? 1 : 0, `what the backend saw of ${name}`);
          }
        }
      }
    });
  }

  test("a token's own lists do not make the gateway build its messages of the top level's defaults", async (t) => {
    const backend = await startBackend(t);
    const own = { senders: [FROM] };
    const top = { defaults: { number: FROM, recipients: [TO] } };
    const gateway = await startGateway(t, backend, { ...top, tokens: { first: { secret: SECRET, ...own } } });
    const post = { method: 'POST', path: '/v2/send', ...bearer(SECRET) };
    assert.equal((await ask(gateway, { ...post, body: 'Hello' })).status, 400);
    assert.equal(backend.seen.length, 0, 'the backend saw nothing');
    const body = JSON.stringify({ message: 'x', number: FROM, recipients: [TO] });
    assert.equal((await ask(gateway, { ...post, body })).status, 201);
    assert.equal(String(backend.seen[0]!.body), body, 'relayed as it is');
  });

  test('a text is a send with the defaults of the top level, also for a token that has only a template', async (t) => {
    const backend = await startBackend(t);
    const gateway = await startGateway(t, backend, {
      defaults: { number: FROM, recipients: [TO] },
      tokens: { first: { secret: SECRET }, second: { secret: SECOND, message: 'It says {{text}}' } },
    });
    const post = { method: 'POST', path: '/v2/send' };
    assert.equal((await ask(gateway, { ...post, body: 'Hello', ...bearer(SECRET) })).status, 201);
    assert.equal((await ask(gateway, { ...post, body: '{"text":"hi"}', ...bearer(SECOND) })).status, 201);
    assert.deepEqual(backend.sent, [
      { number: FROM, recipients: [TO], message: 'Hello' },
      { number: FROM, recipients: [TO], message: 'It says hi' },
    ]);
  });

  test('a gateway without tokens is confined by the lists of the top level', async (t) => {
    const backend = await startBackend(t);
    const open = { tokens: undefined } as unknown as GatewayConfig;
    const gateway = await startGateway(t, backend, { ...open, senders: [FROM], recipients: [TO] });
    const headers = { host: '127.0.0.1' };
    assert.equal((await ask(gateway, { ...send(TO), headers })).status, 201);
    const seen = backend.seen.length;
    assert.equal((await ask(gateway, { ...send(STRANGER), headers })).status, 403);
    assert.equal((await ask(gateway, { ...send(TO, THIRD), headers })).status, 403);
    assert.equal(backend.seen.length, seen, 'the backend saw nothing');
  });

  test('four variables are a confined gateway; a file may have its tokens as text', async (t) => {
    const env = {
      GATEWAY_TOKENS: `home=${SECRET}`,
      GATEWAY_DEFAULTS_NUMBER: FROM,
      GATEWAY_DEFAULTS_RECIPIENTS: `${TO}, ${THIRD}`,
      GATEWAY_DEFAULTS_TEXT_MODE: 'styled',
    };
    const ofEnv = await cli(['--check'], { env });
    assert.equal(ofEnv.code, 0, ofEnv.stderr);
    assert.ok(ofEnv.stdout.includes('\n  home\n'), ofEnv.stdout);
    assert.ok(ofEnv.stdout.includes(`\n    sends from   ${FROM}\n`), ofEnv.stdout);
    assert.ok(ofEnv.stdout.includes(`\n    sends to     ${TO}, ${THIRD}\n`), ofEnv.stdout);
    const lists = { GATEWAY_TOKENS: `home=${SECRET}`, GATEWAY_SENDERS: FROM, GATEWAY_RECIPIENTS: 'group.*' };
    const ofLists = await cli(['--check'], { env: lists });
    assert.ok(ofLists.stdout.includes('\n    sends to     group.*\n'), ofLists.stdout);
    const file = fileWith(t, { tokens: `home=${SECRET},other=${SECOND}`, recipients: [TO] });
    const ofFile = await cli(['--config', file, '--check']);
    assert.equal(ofFile.stdout.match(new RegExp(`sends to     \\${TO}$`, 'gm'))?.length, 2, ofFile.stdout);
    const wrong = await cli(['--check'], { env: { ...env, GATEWAY_DEFAULTS_NUMBER: '15550100001' } });
    assert.equal(wrong.code, 2);
    assert.match(wrong.stderr, /GATEWAY_DEFAULTS_NUMBER: .* is not a phone number/);
    const spaced = await cli(['--check'], { env: { ...env, GATEWAY_DEFAULTS_RECIPIENTS: `${TO} ${THIRD}` } });
    assert.match(spaced.stderr, /GATEWAY_DEFAULTS_RECIPIENTS\[0\]: .*; between entries there is a comma/);
  });
});
