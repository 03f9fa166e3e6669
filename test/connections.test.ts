import { once } from 'node:events';
import http from 'node:http';
import net from 'node:net';
import { suite } from 'node:test';
import { outcomeOf } from './answers.ts';
import { assert, closed, groupsOf, linesOf, pass, requests, until } from './assertions.ts';
import { startBackend } from './backend.ts';
import { ask, fillBuffers, open, openHalf, raw, TELLS_FULL_BUFFERS } from './client.ts';
import { AT_INFO, tokens } from './configs.ts';
import { SOURCE } from './files.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { settled } from './held.ts';
import { isNode } from './runtime.ts';
import { ABOUT, BEARER, DEFAULTS, HEALTH, HELLO, MIB, OTHER, post, REFUSED, SECRET, SEND } from './samples.ts';
import { PATIENT_MS, startBoth, startGateway, startHolding, startRaw } from './start.ts';

suite('connections', SIDE_BY_SIDE, () => {
  test('at debug level the log line of a request gives every reason why its connection is not kept', {
    skip: !isNode && 'Deno and Bun decide some of them themselves',
  }, async (t) => {
    const { gateway } = await startBoth(t, {
      tokens: { test: { secret: SECRET, defaults: DEFAULTS, allow: ['GET /v2/send', 'info'] } },
    });
    const many = Array.from({ length: 201 }, (_, i) => `X-${i}: y`).join('\r\n');
    const about = (...lines: string[]): string => ABOUT.replace('Host: x', ['Host: x', ...lines].join('\r\n'));
    const rows = {
      client: about('Connection: close'),
      body_not_read: post(OTHER, 70_000),
      http_1_0: about('Connection: keep-alive').replace('HTTP/1.1', 'HTTP/1.0'),
      send_by_get: about().replace('/v1/about', '/v2/send?message=x'),
      upgrade: about('Connection: keep-alive, Upgrade', 'Upgrade: h2c'),
      too_many_headers: about(many),
      continue_awaited: about('Expect: 100-continue'),
      bad_request: ABOUT.replace('Host: x\r\n', ''),
    };
    for (const [reason, bytes] of Object.entries(rows)) {
      const before = requests(gateway).length;
      // The parser of Node 26 enforces the limit of header fields itself.
      const isParsers = (): boolean =>
        reason === 'too_many_headers' && gateway.log.some((line) => line.includes('HPE_HEADER_OVERFLOW'));
      const { socket } = open(t, gateway, bytes);
      await until(() => requests(gateway).length > before || isParsers(), `the log line for ${reason}`);
      if (!isParsers()) assert.equal(requests(gateway).at(-1)!.closing, reason);
      socket.destroy();
    }
    const before = requests(gateway).length;
    open(t, gateway, ABOUT);
    await until(() => requests(gateway).length > before);
    const { status, closing } = requests(gateway).at(-1)!;
    assert.deepEqual([status, closing], [200, undefined], 'one that is kept');
    // Every reason in the code is covered here, except a shutdown, and bytes that cannot be parsed and have no log
    // line.
    const [, table] = /const reasons = \{\n([^]*?)\n {4}\};/.exec(SOURCE)!;
    const known = groupsOf(table!, /^ {6}(\w+): /gm).concat(
      groupsOf(SOURCE, /beginClosing\('(\w+)'\)/g),
      'bad_request',
    );
    const tested = [...Object.keys(rows), 'shutdown', 'not_parsed'];
    assert.deepEqual(
      known.filter((reason) => !tested.includes(reason)),
      [],
      'reasons of gateway.ts without a row here',
    );
    assert.deepEqual(
      tested.filter((reason) => !known.includes(reason)),
      [],
      'rows here whose reason gateway.ts has not',
    );
    const quiet = await startBoth(t, AT_INFO);
    await raw(quiet.gateway, about('Connection: close'));
    assert.equal('closing' in requests(quiet.gateway)[0], false, 'not at other levels');
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
    const { backend, gateway } = await startBoth(t, tokens({}), { lingerMs: PATIENT_MS });
    for (const begun of [post(OTHER, 'chunked'), `${ABOUT.replace(SECRET, OTHER)}rubbish\r\n\r\n`]) {
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
      await until(() => text.endsWith('and last\r\n0\r\n\r\n') || client.destroyed);
      assert.match(text, / 200 OK\r\n/);
    },
  );

  test('a client that ends or resets its connection in the middle of its head gets no response and leaves no line in the log', async (t) => {
    const { gateway } = await startBoth(t);
    for (const leave of ['end', 'resetAndDestroy'] as const) {
      const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
      const { socket, text } = open(t, gateway, ABOUT.slice(0, -6));
      const [served] = await accepted;
      if (!('Bun' in globalThis)) await until(() => served.bytesRead > 0); // there it stays 0 until the first request
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
    // Each response is a single write including its end, so no request waits for room. Bun 1.4.5 emits no time-out for
    // a connection that waits for room.
    for (let sent = 1; !served.destroyed && !('Bun' in globalThis); sent++) {
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
