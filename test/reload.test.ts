import { once } from 'node:events';
import { closeSync, mkdirSync, openSync, renameSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import { join } from 'node:path';
import { buffer as readBytes } from 'node:stream/consumers';
import { suite } from 'node:test';
import type { GatewayConfig, GatewayOptions, TokenConfig } from '../gateway.ts';
import { outcomeOf, parseAnswer } from './answers.ts';
import {
  assert,
  assertDenied,
  closed,
  linesOf,
  type LogLine,
  pass,
  problemsOf,
  requests,
  until,
} from './assertions.ts';
import { startBackend } from './backend.ts';
import { certificate, CERTS } from './certificates.ts';
import { ask, beginSend, open, statusesOf } from './client.ts';
import { NO_TOKENS, tokens } from './configs.ts';
import { type Change, changedSource, fileWith, folder, mistakesIn } from './files.ts';
import { createGateway, FILE } from './gateway.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { answerAll, arrived, beginLarge, LARGE, listened, send, settled, startHeld, statusFor } from './held.ts';
import { holdIntervals } from './intervals.ts';
import { isNode } from './runtime.ts';
import {
  AS_OTHER,
  BEARER,
  DEFAULTS,
  FROM,
  GROUP,
  MESSAGE,
  OTHER,
  post,
  SECRET,
  SECRETS,
  THIRD,
  TO,
} from './samples.ts';
import { AS_IT_IS, cli, type Program, start, startBoth, startGateway, startHolding, startProcess } from './start.ts';

suite('reload', SIDE_BY_SIDE, () => {
  test('reload: tokens and rules apply from the next request on, and a send that the backend has goes on; losing all tokens does not leave the gateway open by mistake', async (t) => {
    const { backend, gateway, finish } = await startHolding(t);
    const other = { headers: AS_OTHER };
    const running = statusesOf(gateway, { body: MESSAGE, headers: BEARER });
    await until(() => backend.seen.length === 1);
    gateway.reload({ tokens: { new: { secret: OTHER, allow: ['info'] } } });
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, other, { ...other, body: MESSAGE }), [
      401,
      200,
      403,
    ]);
    finish();
    assert.deepEqual(await running, [200]);
    const before = gateway.log.length;
    assert.equal(problemsOf(() => gateway.reload({ tokens: { a: { secret: 'short' } } })).length, 1);
    const open = ['tokens: none is configured; GATEWAY_AUTH_ANONYMOUS=true would accept all requests'];
    assert.deepEqual(problemsOf(() => gateway.reload(NO_TOKENS)), open);
    // The new `listen` takes effect at the next start: until then other machines could connect to this gateway.
    const anonymous = createGateway({ listen: '0.0.0.0:0', auth: { anonymous: true } }, { log: () => {} });
    assert.deepEqual(problemsOf(() => anonymous.reload({ listen: '127.0.0.1:0' })), open);
    assert.equal(gateway.log.length, before);
    assert.deepEqual(await statusesOf(gateway, other, {}), [200, 401]);
  });

  // On Deno each broken certificate took effect, and no connection worked from then on.
  test('reload: by SIGHUP or a changed file; a configuration, secret or certificate that is half-written, broken or gone changes nothing', async (t) => {
    const backend = await startBackend(t);
    const [dir, tls] = [folder(t), certificate(t)];
    const [file, secretFile] = [join(dir, 'gateway.json'), join(dir, 'secret')];
    const [third, fresh] = ['third-secret-of-some-length', 'fresh-secret-of-good-length'];
    const configOf = (tokens: object): string => JSON.stringify({ backend: { url: backend.url }, tls, tokens });
    const replace = (tokens: object): void => {
      writeFileSync(`${file}.new`, configOf(tokens));
      renameSync(`${file}.new`, file);
    };
    writeFileSync(secretFile, SECRET);
    replace({ a: { secretFile } });
    const gateway = await startProcess(t, { args: ['--config', file] });
    const signal = (): boolean => process.kill(gateway.child.pid!, 'SIGHUP');
    const count = (message: RegExp): number => linesOf(gateway, message).length;
    const becomes = async (message: RegExp, change: () => unknown): Promise<void> => {
      const before = count(message);
      change();
      await until(() => count(message) > before);
    };
    const statuses = (...secrets: string[]): Promise<number[]> =>
      statusesOf(gateway, ...secrets.map((secret) => ({ headers: { authorization: `Bearer ${secret}` } })));
    const { fingerprint: first } = await ask(gateway);
    assert.deepEqual(await statuses(SECRET, OTHER), [200, 401]);

    await becomes(/^reloaded/, signal);

    // An editor replaces the file, without a signal.
    await becomes(/^reloaded/, () => replace({ a: { secretFile }, b: { secret: OTHER } }));

    // Each of these is reported without quoting a secret, and changes nothing. The last certificate belongs to another
    // key.
    const certificates = ['', 'hello', CERTS[1].cert.slice(0, 400), CERTS[1].cert];
    const half = configOf({ c: { secret: third } }).slice(0, -9);
    const bad = [
      ...certificates.map((text) => () => writeFileSync(tls.cert, text)),
      () => writeFileSync(tls.cert, CERTS[0].cert) ?? rmSync(secretFile),
      () => writeFileSync(secretFile, SECRET) ?? writeFileSync(file, half),
      ...['', '{}'].map((text) => () => writeFileSync(file, text)),
      () => rmSync(file),
    ];
    for (const damage of bad) {
      await becomes(/^reload failed/, () => damage() ?? signal());
      assert.deepEqual(await statuses(SECRET, OTHER, third), [200, 200, 401], String(damage));
      assert.equal((await ask(gateway)).fingerprint, first, String(damage));
    }
    const problems = linesOf(gateway, /^reload failed/).map((line) => line.problems);
    // On a slow machine the watcher may report a broken file as well, so a line is found by its words and not by its
    // position.
    assert.ok(problems.some((each) => /^tokens\.a\.secretFile: \S+ does not exist$/.test(each)), problems.join());

    // A signal and the change that it announces are one reload, so further reloads come from later changes.
    const reloaded = count(/^reloaded/);
    await becomes(/^reloaded/, () => replace({ a: { secretFile }, b: { secret: OTHER } }) ?? signal());
    await becomes(/^reloaded/, () => writeFileSync(secretFile, fresh));
    assert.deepEqual(await statuses(SECRET, fresh), [401, 200]);
    await becomes(/^reload failed/, () => writeFileSync(tls.cert, CERTS[1].cert) ?? signal());
    await becomes(/^reloaded/, () => writeFileSync(tls.key, CERTS[1].key));
    assert.equal(count(/^reloaded/), reloaded + 3);
    assert.notEqual((await ask(gateway)).fingerprint, first);
    assert.doesNotMatch(gateway.output(), new RegExp(`${SECRETS.source}|${third}|${fresh}`));
    await gateway.close();
  });

  // A stolen token went on working, because a reload without tokens was refused.
  test('reload: where the last token is deleted nobody is let in, and what runs ends; a new token opens the gateway again', async (t) => {
    const backend = await startBackend(t);
    const file = fileWith(t, { tokens: { only: { secret: SECRET } } });
    const args = ['--config', file, '--backend', backend.url];
    const gateway = await startProcess(t, { args });
    const becomes = async (config: object): Promise<LogLine> => {
      const before = linesOf(gateway, /^reload/).length;
      writeFileSync(file, JSON.stringify(config));
      process.kill(gateway.child.pid!, 'SIGHUP');
      await until(() => linesOf(gateway, /^reload/).length > before);
      return linesOf(gateway, /^reload/)[before]!;
    };
    const asked = (): Promise<number[]> => statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }, {});
    assert.deepEqual(await asked(), [200, 401, 401]);
    const closed = await becomes({ tokens: {} });
    assert.deepEqual([closed.message, closed.tokens], ['reloaded', 0]);
    assert.equal(closed.warning, '"tokens" is empty: every request is refused; the command "add" makes one');
    const seen = backend.seen.length;
    assert.deepEqual(await asked(), [401, 401, 401]);
    assert.equal((await becomes({})).message, 'reload failed; keeping the old configuration');
    assert.deepEqual(await asked(), [401, 401, 401]);
    assert.equal(backend.seen.length, seen, 'the backend saw nothing');
    await becomes({ tokens: { other: { secret: OTHER } } });
    assert.deepEqual(await asked(), [401, 200, 401]);
    await becomes({ tokens: {} });
    await gateway.close();
    // Nor does a start let anybody in, as after a reboot, and its mistakes do not advise to open it.
    const { code, stdout } = await cli([...args, '--check']);
    assert.deepEqual([code, /every request is refused/.test(stdout)], [0, true], stdout);
    const again = await startProcess(t, { args: [...args, '--listen', ':0'] });
    const before = backend.seen.length;
    assert.deepEqual(await statusesOf(again, { headers: BEARER }, {}), [401, 401]);
    assert.deepEqual(backend.seen.slice(before).filter(({ url }) => url !== '/v1/about'), []);
  });

  // When node:http had a limit of 200 header fields and, after a reload, the check had 1,000, a second Host got
  // through.
  test(
    'code that reads a setting of the server does not compile unless it reads it once, where no reload can change it',
    {
      skip: !isNode && 'npm installs the compiler for Node',
    },
    async (t) => {
      const row = "  'limits.headers': [countFrom(1), 'header fields', '200'],\n";
      const added: Change[] = [
        ["  'shutdown': [duration('10s')", (text) => row + text],
        ['server.maxHeadersCount = HEADERS_LIMIT + 1', () => "server.maxHeadersCount = settings['limits.headers'] + 1"],
      ];
      const listed: Change = ["const START_ONLY = ['listen',", (text) => `${text} 'limits.headers',`];
      const kept: Change = [
        '    startedMs: elapsedMs(),\n',
        (text) => `${text}    headersLimit: settings['limits.headers'],\n`,
      ];
      const used: Change = [
        "    this.#limitBytes = exchange.rules['limits.body'];",
        (text) => text.replace('body', 'headers'),
      ];
      const changed: [mistakes: string[], ...Change[]][] = [
        // Where the state is made, a reload would be ignored just as silently.
        [['makeCore', 'createServer'], ...added, kept],
        [[], ...added, kept, listed],
        [['RequestBody'], ...added, listed, used],
      ];
      const files = changed.map(([, ...changes]) => changedSource(t, ...changes));
      assert.deepEqual(await mistakesIn(files), changed.map(([mistakes]) => mistakes));
    },
  );

  // A setting that needs a restart was still adopted, and then mistaken for the one in effect.
  test('a reload leaves settings that are read only at start, and its log line names them', async (t) => {
    const { gateway } = await startBoth(t);
    for (let i = 0; i < 2; i++) {
      gateway.reload({ listen: '127.0.0.2:0', limits: { connections: 9 }, log: { level: 'error', format: 'text' } });
      const { level, needsRestart } = linesOf(gateway, /^reloaded/)[i]!;
      assert.deepEqual([level, needsRestart], ['warn', 'listen,limits.connections,log.level,log.format']);
    }
  });

  test('the gateway listens on IPv6; a reload does not move it; listen() rejects an address in use', async (t) => {
    const { backend, gateway } = await startBoth(t);
    for (let i = 0; i < 2; i++) {
      gateway.reload({ listen: '127.0.0.2:0' });
      assert.equal(JSON.parse(gateway.log.at(-1)!).needsRestart, 'listen');
      assert.equal((await ask(gateway, { headers: BEARER })).status, 200);
    }
    const six = await startGateway(t, backend, { listen: '[::1]:0', clients: ['::1'] });
    assert.match(six.url, /^http:\/\/\[::1\]:\d+$/);
    assert.equal((await ask(six, { headers: BEARER })).status, 200);
    assert.equal(requests(six)[0].client, '::1');
    const log: string[] = [];
    const taken = createGateway({ listen: `${backend.host}:${backend.port}`, ...tokens({}) }, {
      log: (line) => void log.push(line),
    });
    await assert.rejects(taken.listen(), { code: 'EADDRINUSE' });
    assert.deepEqual(log, [], 'the caller gets the error');
  });

  // A file's state at its last load was never compared, so a token that was removed at that moment kept working.
  test('a file that changes between being read and first being checked is read again', async (t) => {
    const backend = await startBackend(t);
    const tls = certificate(t);
    const configOf = (secret: string): string =>
      JSON.stringify({ backend: { url: backend.url }, tls, tokens: { a: { secret } } });
    const file = fileWith(t, configOf(SECRET));
    const code = `
    import { writeFileSync } from 'node:fs';
    import { run } from ${JSON.stringify(FILE.href)};
    const running = run(['--config', ${JSON.stringify(file)}], process.env, () => Buffer.alloc(0));
    writeFileSync(${JSON.stringify(file)}, ${JSON.stringify(configOf(OTHER))});
    writeFileSync(${JSON.stringify(tls.cert)}, '');
    await running;`;
    const script = fileWith(t, code, 'script.mjs');
    const gateway = await startProcess(t, { program: [...AS_IT_IS.slice(0, -1), script] as unknown as Program });
    await until(() => linesOf(gateway, /^reload failed/).length === 1);
    assert.match(linesOf(gateway, /^reload failed/)[0]!.problems, /^tls: its "cert" is empty/);
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }), [200, 401]);
    writeFileSync(tls.cert, CERTS[0].cert);
    await until(() => linesOf(gateway, /^reloaded/).length === 1);
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }), [401, 200]);
  });

  test('a file is read once it no longer changes; a file that only a reloaded configuration names is also watched', async (t) => {
    const backend = await startBackend(t);
    const dir = folder(t);
    const [file, secretFile] = [join(dir, 'gateway.json'), join(dir, 'secret')];
    const configOf = (token: object): string => JSON.stringify({ backend: { url: backend.url }, tokens: { a: token } });
    writeFileSync(file, configOf({ secret: SECRET }));
    writeFileSync(secretFile, SECRET);
    const gateway = await startProcess(t, { args: ['--config', file] });
    const count = (message: RegExp): number => linesOf(gateway, message).length;
    const becomes = async (change: () => unknown): Promise<void> => {
      const before = count(/^reloaded/);
      change();
      await until(() => count(/^reloaded/) > before, 'the gateway to reload');
    };
    // A separate process, which waits for nothing, keeps changing a file for 6 s, in which the gateway looks at it. A
    // gateway that a busy machine suspends for that long may read it too early, so it has four tries.
    const isReadTooEarly = async (): Promise<boolean> => {
      const before = count(/^reload failed/);
      const writer = start([file], {}, ['sh', '-c', 'while :; do echo "{" >"$0"; sleep 0.1; done']);
      const ended = once(writer, 'exit');
      await pass(6000);
      writer.kill('SIGKILL');
      await ended;
      await becomes(() => writeFileSync(file, configOf({ secretFile })));
      return count(/^reload failed/) > before;
    };
    let tries = 1;
    while (await isReadTooEarly()) assert.ok(tries++ < 4, 'the file was read while it changed, four times');
    await becomes(() => writeFileSync(secretFile, OTHER));
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }), [401, 200]);
  });

  // Compose, secrets and certificates mount single files, which keep the old one when an editor renames the new one to it.
  test('a file that was replaced outside of its mount is a failed reload, which says so, and not a success', {
    skip: process.platform !== 'linux' && '/proc has files without a name',
  }, async (t) => {
    const backend = await startBackend(t);
    const named = fileWith(t, { tokens: { one: { secret: SECRET } }, backend: { url: backend.url } });
    const descriptor = openSync(named, 'r');
    t.after(() => closeSync(descriptor));
    const mounted = `/proc/${process.pid}/fd/${descriptor}`;
    const gateway = await startProcess(t, { args: ['--config', mounted] });
    process.kill(gateway.child.pid!, 'SIGHUP');
    await until(() => linesOf(gateway, /^reloaded/).length === 1);
    rmSync(named);
    process.kill(gateway.child.pid!, 'SIGHUP');
    await until(() => linesOf(gateway, /^reload failed/).length > 0);
    const why = 'was replaced outside of this container, which still has the old file: restart the container';
    assert.equal(linesOf(gateway, /^reload failed/)[0]!.problems, `${mounted} ${why}`);
    assert.equal(linesOf(gateway, /^reloaded/).length, 1);
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }), [200]);
    await gateway.close();
    assert.equal((await cli(['--config', mounted, '--check'])).code, 0, 'a start reads it');
  });

  test('a file that changes behind a link is read again, as Kubernetes swaps the folder of a ConfigMap', async (t) => {
    const backend = await startBackend(t);
    const dir = folder(t);
    const put = (version: string, secret: string): void => {
      mkdirSync(join(dir, version));
      const config = JSON.stringify({ backend: { url: backend.url }, tokens: { a: { secret } } });
      writeFileSync(join(dir, version, 'gateway.json'), config);
      symlinkSync(version, join(dir, '..next'));
      renameSync(join(dir, '..next'), join(dir, '..data'));
    };
    put('..1', SECRET);
    symlinkSync('..data/gateway.json', join(dir, 'gateway.json'));
    const gateway = await startProcess(t, { args: ['--config', join(dir, 'gateway.json')] });
    put('..2', OTHER);
    await until(() => linesOf(gateway, /^reloaded/).length > 0, 'the gateway to reload');
    assert.deepEqual(await statusesOf(gateway, { headers: BEARER }, { headers: AS_OTHER }), [401, 200]);
  });
});

suite('what runs ends with its token', SIDE_BY_SIDE, () => {
  const secretOf = (name: string) => `secret-of-the-token-that-${name}`;
  const headersOf = (name: string) => ({ authorization: `Bearer ${secretOf(name)}` });
  const named = (own: Record<string, TokenConfig>): GatewayConfig => ({
    allow: ['messaging', 'info', 'GET /api/v1/events'],
    tokens: Object.fromEntries(
      Object.entries(own).map(([name, settings]) => [name, { secret: secretOf(name), ...settings }]),
    ),
  });
  /** Tokens that lose their right, each in its way. */
  const LOSERS = ['goes', 'expires', 'narrows', 'moves', 'path'];
  const LOST: Record<string, TokenConfig> = {
    stays: {},
    expires: { expires: '2020-01-01' },
    narrows: { allow: ['send'] },
    moves: { clients: ['192.0.2.1'] },
    path: { methods: ['path'] },
  };
  const all = named(Object.fromEntries(['stays', ...LOSERS].map((name) => [name, {}])));
  const isLost = (line: LogLine) => line.reason === 'no_longer_allowed';

  /** A backend that answers with a head and a first part, and goes on when it is told to. */
  async function startStreaming(t: TestContext, config = all, options?: GatewayOptions) {
    const streams: http.ServerResponse[] = [];
    const backend = await startBackend(t, (req, res) => {
      req.resume();
      streams.push(res);
      res.writeHead(req.method === 'POST' ? 201 : 200, { 'content-type': 'text/event-stream' }).write('first, ');
    });
    const [gateway, sweep] = await holdIntervals(
      (everyMs) => everyMs === 30_000,
      async () => await startGateway(t, backend, config, options),
    );
    return { gateway, sweep, streams };
  }

  const withBearer = (row: string, name: string) =>
    `${row} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${secretOf(name)}\r\n\r\n`;

  for (
    const [path, code] of [['/api/v1/events', 'endpoint_not_allowed'], ['/v1/attachments/abc', 'endpoint_not_allowed']]
  ) {
    test(`a response that streams is cut off when its token is removed, or loses the endpoint, the address or the method: ${path}`, async (t) => {
      const { gateway, streams } = await startStreaming(t);
      const clients = ['stays', ...LOSERS].map((name) => open(t, gateway, withBearer(`GET ${path}`, name)));
      for (const { text } of clients) await until(() => text().includes('first, '), 'the first part of each');
      const [stays, ...others] = clients;
      gateway.reload(named(LOST));
      for (const { socket } of others) await closed(socket, 'a stream whose token has lost its right');
      for (const { text } of others) assert.ok(!text().endsWith('0\r\n\r\n'), 'a truncated body looks truncated');
      await until(() => requests(gateway).filter(isLost).length === LOSERS.length);
      const outcomes = requests(gateway).filter(isLost).map(({ status, code, token }) => [token, status, code]);
      assert.deepEqual(outcomes.sort(), [
        ['expires', 200, 'unauthorized'],
        ['goes', 200, 'unauthorized'],
        ['moves', 200, 'client_not_allowed'],
        ['narrows', 200, code],
        ['path', 200, 'unauthorized'],
      ]);
      for (const stream of streams) stream.end('and last');
      await until(() => stays!.text().includes('and last'), 'the stream of the token that stays');
    });
  }

  test('a response that streams is cut off within a minute of the day on which its token expires', async (t) => {
    const expires = '2027-06-30T12:00:00Z';
    let nowMs = Date.parse(expires) - 1;
    const config = named({ stays: {}, expires: { expires } });
    const { gateway, sweep } = await startStreaming(t, config, { now: () => nowMs });
    const [stays, ends] = ['stays', 'expires'].map((name) => open(t, gateway, withBearer('GET /api/v1/events', name)));
    for (const { text } of [stays!, ends!]) await until(() => text().includes('first, '));
    sweep();
    assert.equal(requests(gateway).length, 0, 'both go on');
    nowMs++;
    sweep();
    await closed(ends!.socket);
    await until(() => requests(gateway).some(isLost));
    assert.equal(stays!.socket.destroyed, false);
  });

  test('a poll that waits for messages is refused when its token is removed', async (t) => {
    const { backend, gateway } = await startHolding(t, named({ stays: {}, goes: {} }));
    const poll = ask(gateway, { path: `/v1/receive/${FROM}?hang`, headers: headersOf('goes') });
    await until(() => backend.seen.length === 1);
    gateway.reload(named({ stays: {} }));
    assert.equal(outcomeOf(await poll), '401 unauthorized');
    assert.ok(requests(gateway).some(isLost), 'the reason is in the log');
  });

  test('a send that waits for a slot, or is not complete, is refused and never sent; one that the backend has, and its answer, go on', async (t) => {
    const held: http.ServerResponse[] = [];
    const backend = await startBackend(t, (req, res, seen) => {
      readBytes(req).then((body) => held.push(res) && Object.assign(seen, { body, complete: true }), () => {});
    });
    const own = (...names: string[]): GatewayConfig => ({
      ...named(Object.fromEntries(names.map((name) => [name, {}]))),
      backend: { url: backend.url, parallel: 1, wait: '0' },
    });
    const gateway = await startGateway(t, backend, own('goes'));
    const text = JSON.stringify({ ...MESSAGE, message: 'at the backend' });
    const sent = open(t, gateway, `${post(secretOf('goes'), text.length)}${text}`);
    await until(() => held.length === 1);
    const waiting = ask(gateway, { body: MESSAGE, headers: headersOf('goes') });
    const upload = listened(beginSend(gateway, { ...headersOf('goes'), 'content-length': LARGE.length }));
    upload.write(LARGE.slice(0, -1));
    await until(() => backend.seen.length === 2, 'the head of the large one');
    for (let i = 0; i < 3; i++) await settled(gateway);
    gateway.reload(own('other'));
    assert.equal(outcomeOf(await waiting), '401 unauthorized');
    assert.equal(await statusFor(upload), 401);
    held[0]!.writeHead(201, { 'content-type': 'application/json' }).write('[');
    await until(() => sent.text().includes('['), 'the beginning of the answer');
    gateway.reload(own('other', 'third')); // its answer is on its way, and short
    held[0]!.end(']');
    await until(() => sent.text().endsWith('0\r\n\r\n'), 'the end of the answer');
    await until(() => requests(gateway).filter(({ route }) => route === '/v2/send').length === 3);
    const lines = requests(gateway).filter(({ route }) => route === '/v2/send');
    assert.deepEqual(lines.map(({ status, reason }) => [status, reason]), [
      [401, 'no_longer_allowed'],
      [401, 'no_longer_allowed'],
      [201, undefined],
    ]);
    assert.deepEqual(arrived(backend), ['at the backend']);
  });

  const lists = (senders: string[], recipients: string[]): TokenConfig => ({ senders, recipients });

  /** What a token may at first, what a reload leaves it, and what becomes of its sends from FROM to TO, or to a group. */
  const NARROWED: [before: TokenConfig, after: TokenConfig, status: number, code?: string | undefined, to?: string][] =
    [
      [lists([FROM], [TO, THIRD]), lists([FROM], [THIRD]), 403, 'recipient_not_allowed'],
      [lists([FROM, THIRD], [TO]), lists([THIRD], [TO]), 403, 'sender_not_allowed'],
      [lists([FROM], [TO, THIRD]), lists([FROM], [TO, GROUP]), 201],
      [lists([FROM], [TO]), {}, 201],
      [lists([FROM], [TO]), lists([FROM], [TO]), 201],
      [{}, lists([FROM], [TO]), 403, 'sender_not_allowed'],
      [{}, { recipients: [TO] }, 403, 'recipient_not_allowed'],
      [{ defaults: DEFAULTS }, { defaults: { ...DEFAULTS, recipients: [THIRD] } }, 403, 'recipient_not_allowed'],
      [{ defaults: DEFAULTS }, { defaults: DEFAULTS, recipients: [TO, THIRD] }, 201],
      [lists([FROM], [GROUP]), lists([FROM], ['group.*']), 201, undefined, GROUP],
      [lists([FROM], ['group.*']), lists([FROM], [GROUP]), 201, undefined, GROUP],
      [lists([FROM], [TO]), lists([FROM], ['group.*']), 403, 'recipient_not_allowed'],
    ];

  test('lists that a reload narrows count for a send that waits, and for one whose end has not come; what they still allow is sent', async (t) => {
    for (const [before, after, status, code, to = TO] of NARROWED) {
      const { backend, gateway } = await startHeld(t, 1);
      const use = (token: TokenConfig): void =>
        gateway.reload({ ...tokens(token, {}), backend: { url: backend.url, wait: '0', parallel: 1, timeout: '1h' } });
      use(before);
      const first = send(gateway, 'holds the slot', OTHER);
      await until(() => backend.acting === 1);
      const waiting = ask(gateway, { body: { ...MESSAGE, message: 'waits', recipients: [to] }, headers: BEARER });
      const upload = before.defaults || to !== TO ? undefined : await beginLarge(gateway, backend);
      for (let i = 0; i < 3; i++) await settled(gateway);
      use(after);
      upload?.end('}');
      const results = Promise.all([waiting, upload && statusFor(upload)]);
      await answerAll(backend, [first]);
      for (let i = upload ? 2 : 1; status === 201 && i > 0; i--) {
        await until(() => backend.acting > 0);
        backend.answer();
      }
      const [small, large = status] = await results;
      assert.deepEqual([small.status, small.json.code, large], [status, code, status], JSON.stringify([before, after]));
      const isThere = status === 201 ? ['holds the slot', 'waits', ...upload ? ['large'] : []] : ['holds the slot'];
      assert.deepEqual(arrived(backend).sort(), isThere.sort());
    }
  });

  test('a call with the account in its path, and one to a group, wait for their slot through a reload that still allows them', async (t) => {
    for (const [recipients, after] of [[[TO], [TO]], [['group.*'], [GROUP]]]) {
      const { backend, gateway } = await startHeld(t, 1);
      const use = (own: string[]): void =>
        gateway.reload({
          ...tokens({ allow: ['messaging'], ...lists([FROM], own) }, {}),
          backend: { url: backend.url, wait: '0', parallel: 1, timeout: '1h' },
        });
      use(recipients!);
      const first = send(gateway, 'holds the slot', OTHER);
      await until(() => backend.acting === 1);
      const reaction = {
        recipient: recipients![0] === TO ? TO : GROUP,
        reaction: 'x',
        target_author: TO,
        timestamp: 1,
      };
      const waiting = ask(gateway, { path: `/v1/reactions/${FROM}`, body: reaction, headers: BEARER });
      for (let i = 0; i < 3; i++) await settled(gateway);
      use(after!);
      await answerAll(backend, [first]);
      await until(() => backend.acting > 0);
      backend.answer();
      assert.equal((await waiting).status, 201);
    }
  });

  test('attack: name a recipient or an account in an upload after a reload has taken it from the list', async (t) => {
    for (
      const [path, end] of [['/v2/send', `"recipients":["${TO}"]}`], [
        '/v1/polls/' + FROM,
        `"recipient":"${TO}"}`,
      ]] as const
    ) {
      const { backend, gateway } = await startBoth(t, { ...tokens(lists([FROM], [TO, THIRD])), allow: ['messaging'] });
      const body = `{"number":"${FROM}","question":"${'x'.repeat(100_000)}",${end}`.replace(
        /question/,
        path === '/v2/send' ? 'message' : '$&',
      );
      const upload = listened(beginSend(gateway, { ...BEARER, 'content-length': body.length }, path));
      upload.write(body.slice(0, 90_000));
      await until(() => backend.seen.length === 1, 'the head of the upload');
      gateway.reload({ ...tokens(lists([FROM], [THIRD])), allow: ['messaging'] });
      upload.end(body.slice(90_000));
      assert.equal(await statusFor(upload), 403);
      assert.deepEqual([arrived(backend), backend.sent], [[], []]);
    }
  });

  test('attack: begin a send with `auth` in its body, and end it after the token is removed', async (t) => {
    const config = named({ stays: {}, goes: {} });
    const { backend, gateway } = await startBoth(t, config);
    for (const path of ['/v2/send', `/v1/reactions/${FROM}`]) {
      const body = JSON.stringify({ auth: secretOf('goes'), ...MESSAGE });
      const head = `POST ${path} HTTP/1.1\r\nHost: x\r\nContent-Length: ${body.length}\r\n\r\n`;
      const client = open(t, gateway, head + body.slice(0, -1));
      for (let i = 0; i < 3; i++) await settled(gateway);
      gateway.reload(named({ stays: {} }));
      client.socket.write('}');
      await until(() => client.text().endsWith('}\n'), 'the refusal');
      assertDenied(parseAnswer(client.text()), 401, 'unauthorized', { backend, gateway });
      gateway.reload(config);
    }
    assert.equal(requests(gateway).filter(isLost).length, 2, 'the reason is in the log');
  });

  test('an answer to a send that does not end is cut off half a minute after it began', async (t) => {
    const { gateway, sweep } = await startStreaming(t);
    const body = JSON.stringify(MESSAGE);
    const client = open(t, gateway, `${post(secretOf('goes'), body.length)}${body}`);
    await until(() => client.text().includes('first, '));
    gateway.reload(named({ stays: {} }));
    const now = performance.now;
    performance.now = () => now() + 31_000; // for this turn alone, in which no other test runs
    sweep();
    performance.now = now;
    await closed(client.socket);
    await until(() => requests(gateway).some(isLost));
  });

  test('a send by GET that runs keeps its right, which only its own pattern gives', async (t) => {
    const held: http.ServerResponse[] = [];
    const backend = await startBackend(t, (req, res) => {
      req.resume();
      held.push(res);
    });
    const own = { allow: ['GET /v2/send'], defaults: { number: FROM, recipients: [TO] } };
    const config = { ...named({ stays: own }), backend: { url: backend.url, parallel: 1, wait: '0' } };
    const gateway = await startGateway(t, backend, config);
    const sends = [1, 2].map((i) => ask(gateway, { path: `/v2/send?message=${i}`, headers: headersOf('stays') }));
    await until(() => held.length === 1);
    for (let i = 0; i < 3; i++) await settled(gateway);
    gateway.reload(config);
    for (let i = 0; i < 2; i++) {
      await until(() => held.length === i + 1);
      held[i]!.writeHead(201).end();
    }
    for (const { status } of await Promise.all(sends)) assert.equal(status, 201);
  });
});
