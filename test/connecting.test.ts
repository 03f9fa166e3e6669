import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import net from 'node:net';
import { join } from 'node:path';
import { suite } from 'node:test';
import { fileURLToPath } from 'node:url';
import { outcomeOf } from './answers.ts';
import { assert, closed, linesOf, requests, until } from './assertions.ts';
import { serve, startRawBackend } from './backend.ts';
import { CERTS } from './certificates.ts';
import { addressOf, ask } from './client.ts';
import { tokens } from './configs.ts';
import { fileWith, folder } from './files.ts';
import { FILE } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { send } from './held.ts';
import { isNode } from './runtime.ts';
import { BEARER, DEFAULTS, HELLO, MESSAGE, MIB, SENT } from './samples.ts';
import { type Program, startBoth, startGateway, startHolding, startProcess, startRaw } from './start.ts';

suite('connecting', SIDE_BY_SIDE, () => {
  test('an error thrown while connecting is backend_unreachable with its own name and advice, and does not shut the gate', async (t) => {
    const server = https.createServer(
      CERTS[0],
      (req, res) => void req.resume().on('end', () => res.writeHead(201).end('[]')),
    );
    const url = (await serve(t, server)).replace('http', 'https');
    const { port } = addressOf(url);
    const gateway = await startGateway(t, { url }, { backend: { url, wait: '1h' } });
    class NotCapable extends Error {
      override name = 'NotCapable';
    }
    const { request } = https;
    const throwing = (options: https.RequestOptions, ...rest: []): http.ClientRequest => {
      if (Number(options.port) === port) {
        throw new NotCapable('Requires sys access, run again with the --allow-sys flag');
      }
      return request(options, ...rest);
    };
    https.request = throwing as typeof request;
    t.after(() => (https.request = request));
    for (let i = 0; i < 2; i++) {
      const answer = await send(gateway, 'hello');
      assert.equal(outcomeOf(answer), '502 backend_unreachable');
      assert.match(answer.json.error, /nothing was sent/);
      assert.doesNotMatch(answer.text, /sys access/);
    }
    const { reason, detail } = requests(gateway)[0];
    assert.deepEqual([reason, detail], ['NotCapable', 'Requires sys access, run again with the --allow-sys flag']);
    assert.deepEqual(linesOf(gateway, /is unreachable/), []);
    https.request = request;
  });

  test(
    'Deno without --allow-sys and with a custom CA: the response states that nothing was sent, and the log has the remedy',
    {
      skip: !('Deno' in globalThis) && 'only Deno has permissions',
    },
    async (t) => {
      const server = https.createServer(CERTS[0], (_, res) => void res.end('{}'));
      const url = (await serve(t, server)).replace('http', 'https');
      const ca = fileWith(t, CERTS[0].cert, 'ca.pem');
      const allowed = ['--allow-net', '--allow-env', '--allow-read', '--allow-write'];
      const program: Program = [process.execPath, 'run', '--no-prompt', '--no-check', ...allowed, fileURLToPath(FILE)];
      const gateway = await startProcess(t, { backend: { url }, env: { NODE_EXTRA_CA_CERTS: ca }, program });
      const answer = await ask(gateway, { body: HELLO, headers: BEARER });
      assert.equal(outcomeOf(answer), '502 backend_unreachable');
      await until(() => requests(gateway).length === 1);
      const { reason, detail } = requests(gateway)[0];
      assert.equal(reason, 'NotCapable');
      assert.match(String(detail), /--allow-sys/);
      await gateway.close();
    },
  );

  test('a silent connection to the backend is probed by TCP keep-alive after 30 s, and not every second', {
    skip: ('Deno' in globalThis || !existsSync('/proc/net/tcp')) &&
      'only Linux shows the timers of TCP; Deno keeps no connection',
  }, async (t) => {
    const { backend, gateway, finish } = await startHolding(t);
    const answer = ask(gateway, { body: HELLO, headers: BEARER });
    await until(() => backend.seen.length === 1);
    const to = `:${backend.port.toString(16).toUpperCase().padStart(4, '0')}`;
    // The columns are number, local and remote address, state, queues, timer (02 is keep-alive) and its due time.
    const due = (): number[] =>
      readFileSync('/proc/net/tcp', 'utf8').split('\n').map((line) => line.trim().split(/\s+/))
        .filter(([, , remote = '', state]) => remote.endsWith(to) && state === '01')
        .flatMap(([, , , , , timer = '']) => timer.startsWith('02:') ? [parseInt(timer.slice(3), 16) / 100] : []);
    await until(() => due().length > 0, 'a keep-alive timer of the connection to the backend');
    const [seconds = 0] = due();
    assert.ok(seconds > 2 && seconds <= 30, `TCP probes in ${seconds} s`);
    finish();
    assert.equal((await answer).status, 200);
  });

  test('connections to the backend are reused for the next request of any client, except those with an unsolicited response', async (t) => {
    // The gateway has noted the end of a large body when the response arrives; otherwise it would discard the
    // connection.
    const { backend, gateway } = await startRaw(t, (socket) => void setTimeout(() => socket.write(SENT), 20));
    for (
      const request of [{ body: MESSAGE }, { body: HELLO.replace(',', `,${' '.repeat(100_000)}`) }, {
        path: '/v1/health',
      }]
    ) {
      for (let i = 0; i < 3; i++) assert.equal((await ask(gateway, { ...request, headers: BEARER })).status, 201);
    }
    const plain = await startBoth(t);
    for (let i = 0; i < 3; i++) {
      assert.equal((await ask(plain.gateway, { path: '/v1/health', headers: BEARER })).status, 204);
    }
    assert.equal(
      plain.backend.connections,
      'Deno' in globalThis ? 3 : 1,
      'the connections for responses without a body',
    );
    const used = backend.sockets.length;
    assert.equal(used, 'Deno' in globalThis ? 9 : 1); // Deno would resend on a connection that breaks
    for (let i = 0; i < 5; i++) {
      assert.equal((await send(gateway, 'hello')).text, '{}');
      backend.sockets.at(-1)!.write(SENT.replace('{}', '[]'));
      await closed(backend.sockets.at(-1)!);
    }
    assert.equal(backend.sockets.length, used + ('Deno' in globalThis ? 5 : 4));
  });

  // node:http no longer listens for errors of a connection whose response is complete when a write to it fails.
  test('a backend that responds before it has read a send, and then resets the connection, does not crash the process', async (t) => {
    const sockets: net.Socket[] = [];
    const server = net.createServer((socket) => {
      sockets.push(socket.on('error', () => {}));
      let toReadBytes = MIB + 200_000 * sockets.length;
      socket.on('data', ({ length }) => {
        if (toReadBytes > 0 && toReadBytes <= length) socket.write(SENT);
        toReadBytes -= length;
      });
    });
    const url = await serve(t, server);
    const gateway = await startGateway(t, { url }, { ...tokens({ defaults: DEFAULTS }), backend: { url } });
    // Before the gateway writes again to the backend, in the same turn of the loop.
    gateway.server.prependListener('request', (_req, res) => {
      const writeHead = res.writeHead.bind(res) as (...head: unknown[]) => typeof res;
      res.writeHead = (...head: unknown[]) => {
        sockets.at(-1)!.resetAndDestroy();
        return writeHead(...head);
      };
    });
    // A send of 4.4 MiB, which no buffer of a socket holds.
    const body = `{"message":"x","mentions":[${'1e20,'.repeat(MIB / 5 - 8)}1]}`;
    for (let i = 1; i <= 10; i++) {
      const { status } = await ask(gateway, { body, headers: BEARER });
      assert.deepEqual([status, sockets.length], [201, i]);
    }
    assert.deepEqual(linesOf(gateway, /internal error/), []);
  });

  test('a connection to the backend that is not established, TLS included, is 502: nothing was sent; the reason is logged', async (t) => {
    const silent = await startRawBackend(t, () => {});
    const ways = [
      [silent.url.replace('http', 'https'), '300ms', /^timeout$/],
      ['http://nowhere.invalid', '1m', /^(ENOTFOUND|EAI_AGAIN)$/],
      ['http://127.0.0.1:1', '1m', /^E[A-Z]+$/],
    ] as const;
    for (const [url, timeout, reason] of ways) {
      const gateway = await startGateway(t, { url }, { backend: { url, timeout, wait: '0' } });
      assert.equal(outcomeOf(await send(gateway, url)), '502 backend_unreachable', url);
      assert.match(String(requests(gateway)[0].reason), reason);
    }
    await closed(silent.sockets[0]!);
  });

  test('a backend with TLS is trusted only if its certificate is; otherwise nothing is sent to it', async (t) => {
    const seen: string[] = [];
    const server = https.createServer(CERTS[0], (req, res) => {
      if (req.method === 'POST') seen.push(req.url!);
      req.resume().on('end', () => res.writeHead(201, { 'Content-Length': 2 }).end('{}'));
    });
    const url = `${(await serve(t, server, 0, '127.0.0.1')).replace('http', 'https')}/prefix`;
    const refused = await send(await startGateway(t, { url }), 'not believed');
    assert.deepEqual([outcomeOf(refused), seen], ['502 backend_unreachable', []]);
    // A certificate from a private CA is trusted through the runtime's own options.
    if (!isNode) return;
    const file = join(folder(t), 'ca.pem');
    writeFileSync(file, CERTS[0].cert);
    const trusting = await startProcess(t, { backend: { url }, env: { NODE_EXTRA_CA_CERTS: file } });
    for (let i = 0; i < 2; i++) assert.equal((await ask(trusting, { body: MESSAGE, headers: BEARER })).status, 201);
    assert.deepEqual(seen, ['/prefix/v2/send', '/prefix/v2/send']);
  });
});
