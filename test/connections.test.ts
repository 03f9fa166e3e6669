import { once } from 'node:events';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import net from 'node:net';
import { join } from 'node:path';
import { getDefaultHighWaterMark } from 'node:stream';
import { suite } from 'node:test';
import { fileURLToPath } from 'node:url';
import { outcomeOf, statusOf } from './answers.ts';
import { assert, closed, linesOf, pass, requests, until, within } from './assertions.ts';
import { serve, startBackend, startRawBackend } from './backend.ts';
import { certificate, CERTS } from './certificates.ts';
import { addressOf, ask, fillBuffers, open, openHalf, raw, TELLS_FULL_BUFFERS } from './client.ts';
import { tokens } from './configs.ts';
import { fileWith, folder } from './files.ts';
import { FILE } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { send, settled } from './held.ts';
import { HERE, isDeno, isNode } from './runtime.ts';
import {
  ABOUT,
  BEARER,
  DEFAULTS,
  HEALTH,
  HELLO,
  MESSAGE,
  MIB,
  OTHER,
  post,
  REFUSED,
  SECRET,
  SEND,
  SENT,
} from './samples.ts';
import {
  cli,
  PATIENT_MS,
  type Program,
  startBoth,
  startGateway,
  startHolding,
  startProcess,
  startRaw,
} from './start.ts';

suite('connections', SIDE_BY_SIDE, () => {
  test('the connection closes after each of these requests, and is kept after any other', {
    skip: !isNode && 'Deno decides some of them itself',
  }, async (t) => {
    const { gateway } = await startBoth(t, {
      tokens: { test: { secret: SECRET, defaults: DEFAULTS, allow: ['GET /v2/send', 'info'] } },
    });
    const many = Array.from({ length: 201 }, (_, i) => `X-${i}: y`).join('\r\n');
    const about = (...lines: string[]): string => ABOUT.replace('Host: x', ['Host: x', ...lines].join('\r\n'));
    const rows = {
      'the client wants it': about('Connection: close'),
      'the body is not read': post(OTHER, 70_000),
      'HTTP/1.0': about('Connection: keep-alive').replace('HTTP/1.1', 'HTTP/1.0'),
      'a send by GET': about().replace('/v1/about', '/v2/send?message=x'),
      'an Upgrade': about('Connection: keep-alive, Upgrade', 'Upgrade: h2c'),
      'too many headers': about(many),
      'an Expect that was not answered': about('Expect: 100-continue'),
      'a bad request': ABOUT.replace('Host: x\r\n', ''),
    };
    for (const [why, bytes] of Object.entries(rows)) {
      const { socket, text } = open(t, gateway, bytes);
      await closed(socket, `the connection to be closed: ${why}`);
      assert.match(text(), /^connection: close\r$/im, why);
    }
    const kept = open(t, gateway, ABOUT);
    await until(() => kept.text().includes('\r\n\r\n'));
    assert.doesNotMatch(kept.text(), /^connection: close\r$/im);
    kept.socket.write(ABOUT);
    await until(
      () => kept.text().split('HTTP/1.1 200').length === 3,
      'the second response on a connection that is kept',
    );
  });

  // A proxy or a library that kept it for longer lost the message that it was just writing.
  test('an idle connection is kept for 125 s, longer than its other end keeps it, and then closed, with TLS too', async (t) => {
    const limits = { stallTimeoutMs: 1000 };
    for (const more of [{}, { tls: certificate(t) }]) {
      const { gateway } = await startBoth(t, more, limits);
      const accepted = once(gateway.server, 'tls' in more ? 'secureConnection' : 'connection') as Promise<[net.Socket]>;
      const { socket, text } = open(t, gateway);
      const [served] = await accepted;
      const asks = async (count: number): Promise<void> => {
        socket.write(count % 2 === 0 ? ABOUT : REFUSED);
        await until(() => text().split('HTTP/1.1 ').length === count + 1 || socket.destroyed);
        await until(() => served.timeout !== limits.stallTimeoutMs);
        assert.equal(text().match(/^Keep-Alive: timeout=125\r$/gm)?.length, count);
        assert.ok(served.timeout! >= 125_000 && served.timeout! < 127_000, `it is closed after ${served.timeout} ms`);
      };
      await asks(1);
      await pass(2000); // in which it would have been closed if it were not idle
      await asks(2);
      gateway.server.keepAliveTimeout = 1; // to which node:http adds a second
      socket.write(ABOUT);
      await closed(socket, 'the idle connection to be closed');
    }
  });

  // Each byte restarted the idle time-out.
  test(
    'attack: hold a connection without a token, by reading no response and sending single bytes',
    TELLS_FULL_BUFFERS,
    async (t) => {
      const limits = { stallTimeoutMs: 1000, headersTimeoutMs: 500, lingerMs: 100 };
      const backend = await startBackend(t);
      const gateway = await startGateway(t, backend, { ...tokens({}), log: { level: 'debug' } }, limits);
      for (const begun of [REFUSED.slice(0, -2), REFUSED.replace('\r\n\r\n', '\r\nContent-Length: 9999\r\n\r\n')]) {
        const { client, socket } = await fillBuffers(t, gateway);
        client.write(begun);
        const timer = setInterval(() => client.write('x'), 100);
        await closed(socket).finally(() => clearInterval(timer));
      }
      assert.equal(backend.seen.length, 0);
    },
  );

  test(
    'a response that the backend has sent completely is logged at once, however late its client reads the end of it',
    TELLS_FULL_BUFFERS,
    async (t) => {
      const body = 'x'.repeat(getDefaultHighWaterMark(false) - 1000); // with what is queued, too much to write more
      const gateway = await startGateway(t, await startBackend(t, (_, res) => void res.end(body)));
      await fillBuffers(t, gateway, ABOUT);
      await until(() => requests(gateway).length === 1);
      assert.equal(outcomeOf(requests(gateway)[0]), '200');
    },
  );

  // Nothing else ends it: the backend's pause may last as long as backend.timeout.
  test(
    'a client that does not read the response that has begun is disconnected while the backend pauses',
    TELLS_FULL_BUFFERS,
    async (t) => {
      const { url } = await startBackend(t, (_, res) => void res.write('first, '));
      const gateway = await startGateway(t, { url }, { backend: { url, timeout: '1h' } }, { stallTimeoutMs: 1000 });
      const { socket } = await fillBuffers(t, gateway, ABOUT);
      await closed(socket, 'the connection to be closed');
    },
  );

  // Deno 2.9 reported the end to a parser that was reading a backend response by then. Without a length, that response
  // looked complete.
  test('the end of a refused connection does not end a response of unknown length on another connection', async (t) => {
    const { backend, gateway } = await startRaw(
      t,
      (socket) => {
        socket.write('HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfirst half,');
      },
      {},
      { headersTimeoutMs: 200 },
    );
    for (const begun of ['rubbish\r\n\r\n', ABOUT.slice(0, -2)]) {
      for (let i = 0; i < 3; i++) {
        const refused = Array.from({ length: 5 }, () => openHalf(t, gateway, begun));
        await Promise.all(refused.map((socket) => once(socket.resume(), 'end')));
        const { socket, text } = open(t, gateway, ABOUT);
        await until(() => text().includes('first half'));
        await Promise.all(refused.map((one) => closed(one.end())));
        for (let turn = 0; turn < 3; turn++) await settled(gateway);
        backend.sockets.at(-1)!.end('second half');
        await until(() => text().endsWith('\r\n0\r\n\r\n'));
        assert.match(text(), /first half,\r\n[^]*second half/);
        socket.destroy();
      }
    }
  });

  // node:http closed the connection after these responses, and the send that followed was acted on without a response.
  test('after a response that makes node:http close, to HTTP/1.0 or to a client that still expects 100, nothing is acted on', async (t) => {
    const backend = await startBackend(t);
    const gateway = await startGateway(t, backend, { backend: { url: backend.url, parallel: 1 } });
    const last = SEND.replace('\r\n', '\r\nConnection: close\r\n');
    const firsts = [
      SEND.replace('HTTP/1.1', 'HTTP/1.0').replace('\r\n', '\r\nConnection: keep-alive\r\n'),
      SEND.replace(SECRET, 'not-the-right-secret').replace('\r\n', '\r\nExpect: 100-continue\r\n'),
      HEALTH.replace('\r\n', '\r\nExpect: 100-continue\r\n'),
    ];
    for (const first of firsts) {
      const response = await raw(gateway, first + last);
      await ask(gateway, { headers: BEARER, body: HELLO }); // gets its slot after anything that was sent before
      assert.equal(backend.seen.splice(0).length - 1, response.match(/^HTTP\/1\.1 201/gm)?.length ?? 0, response);
    }
  });

  test('a connection is kept if its client asks for it, with the matching header in refusals, responses of the gateway and relayed ones', async (t) => {
    const { gateway } = await startBoth(t);
    const wrong = ABOUT.replace(SECRET, OTHER);
    for (const [request, status] of [[HEALTH, 200], [ABOUT, 200], [wrong, 401]] as const) {
      const { socket, text } = open(t, gateway, request);
      await until(() => text().includes('\r\n\r\n'));
      assert.match(text(), new RegExp(`^HTTP/1.1 ${status} [^]*^Connection: keep-alive\r$`, 'im'));
      socket.write(request.replace('\r\n', '\r\nConnection: close\r\n'));
      await closed(socket);
      assert.match(text(), new RegExp(`^HTTP/1.1 ${status} [^]*^HTTP/1.1 ${status} [^]*^Connection: close\r$`, 'im'));
    }
  });

  test('attack: fill the memory by a body that continues after a refusal: no more than about 64 KiB of it are read', async (t) => {
    const own = { trustedProxies: ['203.0.113.7'], ...tokens({}) };
    const { backend, gateway } = await startBoth(t, own, { lingerMs: PATIENT_MS });
    const bodies = [post(OTHER, 'chunked'), post(OTHER, 'chunked', 'X-Forwarded-For: 203.0.113.7')];
    for (const begun of [...bodies, `${ABOUT.replace(SECRET, OTHER)}rubbish\r\n\r\n`]) {
      const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
      const { socket, text } = open(t, gateway, begun);
      const [far] = await accepted;
      await until(() => text().includes('\r\n\r\n'));
      const chunk = `${(60_000).toString(16)}\r\n${'x'.repeat(60_000)}\r\n`;
      for (let turn = 0; turn < 400; turn++) {
        if (socket.writableLength < 1_000_000) socket.write(chunk);
        await new Promise(setImmediate);
      }
      assert.ok(far.bytesRead < 1_000_000, `${far.bytesRead} bytes were read behind ${begun.slice(0, 20)}`);
    }
    assert.equal(backend.seen.length, 0);
  });

  // Apache, Varnish and tinyproxy made 502, 503 and a reset of it, so that an outage was seen where a token was wrong.
  test('the refusal of a large body reaches a peer on trustedProxies that writes all of it before it reads', async (t) => {
    const { backend, gateway } = await startBoth(t, { trustedProxies: ['127.0.0.0/8'], ...tokens({}) });
    const size = 5 * MIB;
    const heads = [
      ['401', post(OTHER, size, 'X-Forwarded-For: 203.0.113.7')],
      ['401', post(OTHER, 'chunked').replace('send', 'send?x=1')],
      ['404', post(SECRET, size).replace('/v2/send', '/v9/none')],
      ['431', post(OTHER, size, `X: ${'x'.repeat(20_000)}`)], // the parser refuses it
    ] as const;
    const body = 'x'.repeat(size);
    const chunks = `${size.toString(16)}\r\n${body}\r\n0\r\n\r\n`;
    for (const [status, head] of heads) {
      const { socket, text } = open(t, gateway, head);
      socket.pause();
      const written = new Promise((resolve) => socket.write(head.includes('chunked') ? chunks : body, resolve));
      await within(written, `the whole body behind ${head.slice(0, 30)}`);
      socket.resume();
      await closed(socket);
      assert.equal(String(statusOf(text())), status);
    }
    assert.equal(backend.connections, 0);
  });

  // With a response at once, Caddy, Traefik and Envoy reset urllib, Go, Ruby and wget while they still sent.
  test('the refusal of a large body comes after the rest of it, to a peer on trustedProxies without Expect; to any other at once', async (t) => {
    for (const [isProxy, ...headers] of [[true], [true, 'Expect: 100-continue'], [false]] as [boolean, ...string[]][]) {
      const config = { trustedProxies: [isProxy ? '127.0.0.0/8' : '203.0.113.7'], ...tokens({}) };
      const { backend, gateway } = await startBoth(t, config, { lingerMs: PATIENT_MS });
      for (
        const head of [post(OTHER, MIB, ...headers), post(SECRET, MIB, ...headers).replace('/v2/send', '/v9/none')]
      ) {
        const { socket, text } = open(t, gateway, head);
        const status = head.includes(OTHER) ? '401' : '404';
        if (isProxy && headers.length === 0) {
          socket.write('x'.repeat(MIB - 1));
          for (let i = 0; i < 20; i++) await settled(gateway);
          assert.equal(text(), '', 'not before the last byte');
          socket.write('x');
        }
        await until(() => text().endsWith('}\n'));
        assert.equal(String(statusOf(text())), status);
        socket.destroy();
      }
      assert.equal(backend.connections, 0);
    }
  });

  test('attack: through a proxy on trustedProxies, send a body without an end after a refusal: no more than limits.body is read', async (t) => {
    const own = { trustedProxies: ['127.0.0.1'], limits: { body: '2MiB' }, ...tokens({}) };
    const { backend, gateway } = await startBoth(t, own, { lingerMs: 1000 });
    const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
    const { socket, text } = open(t, gateway, post(OTHER, 'chunked'));
    const [far] = await accepted;
    const chunk = `${(60_000).toString(16)}\r\n${'x'.repeat(60_000)}\r\n`;
    const more = (): void => {
      while (!socket.destroyed && socket.write(chunk));
    };
    socket.on('drain', more);
    more();
    await closed(socket);
    assert.equal(statusOf(text()), 401);
    assert.ok(far.bytesRead > 1_900_000 && far.bytesRead < 3_000_000, `${far.bytesRead} bytes were read`);
    assert.equal(backend.connections, 0);
  });

  test(
    'a response that its client reads late, but completely, leaves no time-out on the connection',
    TELLS_FULL_BUFFERS,
    async (t) => {
      const { backend, gateway, finish } = await startHolding(t, tokens({}), { stallTimeoutMs: 1000 });
      const { client, socket } = await fillBuffers(t, gateway);
      let text = '';
      client.setEncoding('latin1').on('data', (chunk) => (text = (text + chunk).slice(-1000))).resume();
      await until(() => socket.writableLength === 0);
      client.write(SEND);
      await until(() => backend.seen.length === 1);
      await pass(1500);
      finish();
      await until(() => text.endsWith('and last') || client.destroyed);
      assert.match(text, / 200 OK\r\n/);
    },
  );

  test('a client that ends or resets its connection in the middle of its head gets no response and leaves no line in the log', async (t) => {
    const { gateway } = await startBoth(t);
    for (const leave of ['end', 'resetAndDestroy'] as const) {
      const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
      const { socket, text } = open(t, gateway, ABOUT.slice(0, -6));
      const [served] = await accepted;
      await until(() => served.bytesRead > 0);
      socket[leave]();
      await Promise.all([closed(socket), closed(served)]);
      assert.equal(text(), '');
      assert.equal(linesOf(gateway, /parser|client error/).length, 0, leave);
    }
  });

  // An error of the system other than a reset looked like one of the parser.
  test('a connection that fails counts as a client that disconnected, whatever the error', async (t) => {
    const { backend, gateway } = await startBoth(t);
    for (const code of ['ECONNRESET', 'ETIMEDOUT', 'EPIPE']) {
      const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
      const begun = once(gateway.server, 'request');
      const { socket } = open(t, gateway, `${post(SECRET, 100)}{`);
      const [[served]] = await Promise.all([accepted, begun]);
      served.destroy(Object.assign(new Error('planted'), { code }));
      await closed(socket);
      await until(() => requests(gateway).length > 0);
      assert.equal(outcomeOf(requests(gateway)[0]), '499 client_left', code);
      gateway.log.length = 0;
    }
    assert.equal(backend.connections, 0);
  });

  // Linux delivers what a reset connection had sent, but not its address, so the client counted as loopback.
  test('a client that resets its connection has no address, and matches no rule for addresses', async (t) => {
    const own = { clients: ['127.0.0.1', '10.9.9.9'], trustedProxies: ['127.0.0.1'] };
    const { backend, gateway } = await startBoth(t, own);
    for (let i = 0; i < 20; i++) {
      const socket = net.connect({ port: gateway.port, host: '127.0.0.1', localAddress: '127.0.0.2' });
      const send = `${post(SECRET, HELLO.length, 'X-Forwarded-For: 10.9.9.9')}${HELLO}`;
      socket.on('error', () => {}).write(send, () => socket.resetAndDestroy());
      await closed(socket);
    }
    assert.equal((await ask(gateway, { path: '/healthz' })).status, 200);
    assert.equal(backend.connections, 0);
    for (const line of requests(gateway)) if (line.route !== '/healthz') assert.equal(line.client, '127.0.0.2');
  });

  // Node pauses a socket whose responses are not read, and nothing ended that pause.
  test('a client that never reads a response is disconnected; one that reads a large response slowly but steadily is not', async (t) => {
    const size = 12 * MIB;
    const backend = await startBackend(t, (_, res) => res.end(Buffer.alloc(size, 'x')));
    const gateway = await startGateway(t, backend, {}, { stallTimeoutMs: 3000 });
    const { socket } = open(t, gateway);
    socket.pause();
    const request = 'GET /x HTTP/1.1\r\nHost: g\r\n\r\n'.repeat(1000);
    const more = (): void => {
      while (!socket.destroyed && socket.write(request));
    };
    socket.on('drain', more);
    more();
    const req = http.get({ host: '127.0.0.1', port: gateway.port, path: '/v1/about', agent: false, headers: BEARER });
    const [res] = await once(req, 'response') as [http.IncomingMessage];
    let got = 0;
    for await (const chunk of res) {
      got += chunk.length;
      // The pauses add up to more than the stall time-out, and each is a tenth of it.
      if (got % MIB < chunk.length) await pass(300);
    }
    assert.equal(got, size);
    await closed(socket);
    assert.ok(socket.bytesRead < socket.bytesWritten, 'it read no response, and was closed');
  });

  test('a client that reads no response and sends one request at a time is disconnected, like an idle one', async (t) => {
    const backend = await startBackend(t, (_, res) => res.end(Buffer.alloc(16_000, 'x')));
    const gateway = await startGateway(t, backend, {}, { stallTimeoutMs: 1500 });
    Object.assign(gateway.server, { keepAliveTimeout: 0 });
    const { socket: idle } = open(t, gateway, HEALTH);
    await once(idle, 'data');
    const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
    const { socket } = open(t, gateway);
    socket.pause();
    const [served] = await accepted;
    // Each response is a single write including its end, so no request waits for room.
    for (let sent = 1; !served.destroyed; sent++) {
      socket.write(ABOUT);
      await until(() => backend.seen.length === sent || served.destroyed, 'the connection to be closed');
    }
    await closed(idle);
  });

  // A queued response never emitted "close", so its request was neither aborted nor logged. With 16 waiting heads on
  // each of 40 connections, one token filled 128 MB.
  test('pipelined requests are served one at a time and in order; all are aborted when the client disconnects, or if more than seven wait', async (t) => {
    const { backend, gateway } = await startHolding(t);
    const names = ['a', 'b', 'c', 'hang', 'd'];
    const { socket, text } = open(t, gateway, names.map((name) => ABOUT.replace('about', `about?${name}`)).join(''));
    await until(() => backend.seen.length === 4 && text().includes('about?c'));
    assert.deepEqual(backend.seen.map(({ url }) => url), names.slice(0, 4).map((name) => `/v1/about?${name}`));
    const served = ['a', 'b', 'c'].flatMap((name) => ['HTTP/1.1 200', `about?${name}`]);
    assert.deepEqual(text().match(/HTTP\/1\.1 200|about\?./g)?.map(String), served);
    socket.destroy();
    await until(() => requests(gateway).length === 4);
    assert.equal(requests(gateway)[3]!.status, 499);
    const { socket: greedy } = open(t, gateway, SEND.repeat(8));
    await until(() => backend.seen.length === 5);
    greedy.write(SEND);
    await closed(greedy);
    assert.equal(backend.seen.length, 5);
  });
});

suite('connecting', SIDE_BY_SIDE, () => {
  test('the time to connect does not count on a kept connection', async (t) => {
    const { backend, finish, gateway } = await startHolding(t, {}, { connectTimeoutMs: 100 });
    assert.equal((await ask(gateway, { path: '/v1/about', headers: BEARER })).status, 200);
    const kept = ask(gateway, { path: '/v1/about?hang', headers: BEARER });
    await until(() => backend.seen.length === 2);
    await pass(300);
    finish();
    assert.equal(outcomeOf(await kept), '200');
  });

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
      skip: !isDeno && 'only Deno has permissions',
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
    skip: (isDeno || !existsSync('/proc/net/tcp')) &&
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
      isDeno ? 3 : 1,
      'the connections for responses without a body',
    );
    const used = backend.sockets.length;
    assert.equal(used, isDeno ? 9 : 1); // Deno would resend on a connection that breaks
    for (let i = 0; i < 5; i++) {
      assert.equal((await send(gateway, 'hello')).text, '{}');
      backend.sockets.at(-1)!.write(SENT.replace('{}', '[]'));
      await closed(backend.sockets.at(-1)!);
    }
    assert.equal(backend.sockets.length, used + (isDeno ? 5 : 4));
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
    for (let i = 1; i <= 4; i++) {
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

test('a port that cannot be opened is an error with advice', async (t) => {
  const { host, port } = await startBackend(t);
  const rows = [`${host}:${port}`, '192.0.2.1:0'];
  if (isNode) rows.push('nowhere.invalid:0');
  const first = isNode && process.platform === 'linux' &&
    readFileSync('/proc/sys/net/ipv4/ip_unprivileged_port_start', 'utf8');
  // The test may run as root, which may open every port.
  const isRoot = process.geteuid?.() === 0;
  if (Number(first) > 1) rows.push('127.0.0.1:1');
  for (const listen of rows) {
    const isLow = listen.endsWith(':1');
    process.chdir('/'); // another user may not look for gateway.json in this folder
    if (isRoot && isLow) process.seteuid!(65_534);
    const env = { GATEWAY_LISTEN: listen, GATEWAY_TOKENS: SECRET };
    const { code, stderr } = await cli([], { env }).finally(() => {
      if (isRoot && isLow) process.seteuid!(0);
      process.chdir(HERE);
    });
    assert.deepEqual([code, /^gateway: cannot run: .*; --listen /.test(stderr)], [1, true], stderr);
  }
});
