import { once } from 'node:events';
import net from 'node:net';
import type { Duplex } from 'node:stream';
import { suite } from 'node:test';
import type { GatewayConfig, TokenConfig } from '../gateway.ts';
import { outcomeOf, parseAnswer } from './answers.ts';
import { assert, assertDenied, closed, linesOf, pass, requests, until, within } from './assertions.ts';
import { ask, openHalf } from './client.ts';
import { tokens } from './configs.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { send, settled } from './held.ts';
import { holdIntervals } from './intervals.ts';
import { type Look, takeLookup } from './lookups.ts';
import { parseRow } from './rows.ts';
import { ON_NODE } from './runtime.ts';
import { FROM, HANDSHAKE, MIB, OTHER, RECEIVE, SECRET, STRANGER, TO } from './samples.ts';
import { ACCEPTED, accepted, declined, RECEIVING, startReceiving, type UpgradeHandler, wish } from './websocket.ts';

suite('websockets', SIDE_BY_SIDE, () => {
  test('WebSocket: bytes flow both ways until one side disconnects; the credential is not relayed, by any method', async (t) => {
    const { backend, gateway } = await startReceiving(t);
    const rows = `bearer ;; basic ;; /@auth=${SECRET}${RECEIVE} ;; ${RECEIVE}?@auth=${SECRET}&x=1`.split(' ;; ');
    for (const [i, row] of rows.entries()) {
      const client = await accepted(t, gateway, `${row} | Referer: http://x | X-End: to end`);
      const text = (): string => client.text().toLowerCase();
      for (const line of ACCEPTED.toLowerCase().split('\r\n')) await until(() => text().includes(line));
      const { headers, url, rawHeaders } = backend.seen[i]!;
      const { upgrade, connection, host, 'sec-websocket-key': key, 'x-forwarded-for': address } = headers;
      assert.equal(url, i === 3 ? `${RECEIVE}?x=1` : RECEIVE);
      assert.deepEqual([upgrade, connection, host], ['websocket', 'Upgrade', `${backend.host}:${backend.port}`]);
      assert.deepEqual([key, address, headers['x-end']], ['dGhlIHNhbXBsZSBub25jZQ==', '127.0.0.1', 'to end']);
      assert.doesNotMatch(JSON.stringify([url, rawHeaders]), /authorization|correct-horse|referer/i);
      let got = '';
      const far = (backend.sockets[i] as net.Socket).on('data', (chunk) => (got += chunk));
      client.socket.write('from the client');
      far.write('from the backend');
      await until(() => got === 'from the client' && text().endsWith('from the backend'));
      const { status, route, auth, token } = requests(gateway)[i]!;
      const methods = ['bearer', 'basic', 'path', 'query'];
      assert.deepEqual([status, route, auth, token], [101, '/v1/receive/:number', methods[i], 'test']);
      const [goes, follows] = i % 2 === 0 ? [client.socket, far] : [far, client.socket];
      goes.destroy();
      await closed(follows);
      await until(() => linesOf(gateway, /websocket closed/).length > i);
      const { bytesIn, bytesOut, token: name } = linesOf(gateway, /websocket closed/)[i]!;
      assert.deepEqual([bytesIn, bytesOut, name], [15, 16, 'test']);
    }
  });

  test('WebSocket: a refusal is a complete HTTP response, and the backend sees nothing; each request counts towards the rate', async (t) => {
    const [far, limited] = ['secret-for-far-away-clients', 'secret-for-one-websocket-an-hour'];
    const own = {
      a: { secret: SECRET, senders: [FROM] },
      narrow: { secret: OTHER, allow: ['send'] },
      far: { secret: far, clients: ['192.0.2.1'] },
      limited: { secret: limited, rate: '1/1h' },
    };
    const both = await startReceiving(t, undefined, { tokens: own }, { now: () => 0 });
    await accepted(t, both.gateway, `bearer ${limited}`);
    const rows = `none → 401 unauthorized ;; bearer wrong → 401 unauthorized ;; bearer | bearer → 400 bad_credential
    bearer ${OTHER} → 403 endpoint_not_allowed ;; bearer ${far} → 403 client_not_allowed
    /v1/receive/${STRANGER} | bearer → 403 sender_not_allowed ;; /v1/accounts | bearer → 403 setup_blocked
    /v1/receive/%252B15550100001 | bearer → 400 bad_target ;; /v1/receive/../about | bearer → 400 bad_target
    /v1/groups/${FROM}/group.QUJD | bearer → 400 bad_target ;; Host: other | bearer → 400 bad_target
    /api/v1/receive | bearer → 404 unknown_endpoint ;; /v2/send | bearer → 405 method_not_allowed
    bearer ${limited} → 429 rate_limited`;
    for (const row of rows.split(/ ;; |\n\s*/)) {
      const answer = await declined(t, both.gateway, row);
      const { status, code } = parseRow(row);
      assertDenied(answer, Number(status), code!, both, { seen: 1, connections: 1 });
      const { 'content-length': length, connection, allow, 'www-authenticate': challenge } = answer.headers;
      assert.deepEqual([length, connection], [String(Buffer.byteLength(answer.text)), 'close'], row);
      assert.equal(allow, status === '405' ? 'POST' : undefined);
      assert.equal(challenge, status === '401' ? 'Basic realm="signal", Bearer realm="signal"' : undefined);
      assert.equal(answer.headers['retry-after'], status === '429' ? '3600' : undefined);
    }
  });

  // node:http removes its own "drain" listener from such a socket, so anything beyond one write was cut off after 30 s.
  test('WebSocket: an ordinary response of 2 MB instead arrives complete, at the pace of a client that reads late', async (t) => {
    const big = 'x'.repeat(2_000_000);
    for (const framing of [`Content-Length: ${big.length}\r\n\r\n${big}`, `Connection: close\r\n\r\n${big}`]) {
      const { gateway } = await startReceiving(t, (socket) => socket.end(`HTTP/1.1 200 OK\r\n${framing}`));
      const { socket, text } = wish(t, gateway);
      socket.pause();
      await pass(50);
      socket.resume();
      await closed(socket);
      assert.equal(
        parseAnswer(text()).text.replace(/^[0-9a-f]+\r\n|\r\n[0-9a-f]+\r\n/g, '').match(/x/g)?.length,
        big.length,
      );
      await until(() => requests(gateway).length === 1);
      assert.deepEqual([requests(gateway)[0].status, requests(gateway)[0].bytesOut], [200, big.length]);
    }
  });

  // On Node 26 the socket after a 101 was neither destroyed nor had listeners, and its error crashed the process.
  test('WebSocket: a backend that accepts after its client has disconnected is disconnected too, and its reset crashes nothing', async (t) => {
    const { backend, gateway } = await startReceiving(t, () => {}, { allow: ['messaging'] });
    for (const way of ['resetAndDestroy', 'resume'] as const) { // a backend that resets, and one that stays connected
      const client = wish(t, gateway, '/v1/search/+15550100001?numbers=1 | bearer'); // a route that needs a slot
      const count = backend.sockets.length;
      await until(() => backend.sockets.length > count);
      client.socket.destroy();
      const far = backend.sockets.at(-1) as net.Socket;
      await pass(50); // the gateway notices that its client has disconnected
      far.on('end', () => far.end()).write(ACCEPTED, () => far[way]());
      await closed(far);
      await until(() => requests(gateway).some(({ reason }) => reason === 'answered_101'));
      gateway.log.splice(0);
    }
    assert.equal((await ask(gateway, { path: '/healthz' })).status, 200);
  });

  test('WebSocket: a half that stays open is closed soon after the other half has ended, on either side', async (t) => {
    for (const who of ['client', 'backend']) {
      const { backend, gateway } = await startReceiving(t, (socket) => void socket.write(ACCEPTED), {}, {
        lingerMs: 200,
      });
      const client = openHalf(t, gateway, HANDSHAKE.replace('\r\n', `\r\nAuthorization: Bearer ${SECRET}\r\n`));
      const [head] = await once(client, 'data');
      assert.match(String(head), / 101 /);
      const far = backend.sockets[0] as net.Socket;
      (who === 'client' ? client : far).end(); // the other one ends nothing on its own
      far.resume();
      await until(() => linesOf(gateway, /^websocket closed$/).length === 1);
      assert.equal(linesOf(gateway, /^websocket closed$/)[0]!.reason, 'ended');
    }
  });

  test('WebSocket: a decline by the backend is relayed with status and body; bytes after a refused or declined handshake never reach it', async (t) => {
    const more = `POST /v1/register/${FROM} HTTP/1.1\r\nHost: x\r\n\r\n`;
    const fields = 'Content-Type: text/plain\r\nContent-Length: 11\r\nX-Why: mode\r\n\r\nBad Request';
    const chunked = 'Transfer-Encoding: chunked\r\nX-Why: mode\r\n\r\nb\r\nBad Request\r\n0\r\n\r\n';
    for (const reply of [fields, chunked]) {
      const { backend, gateway } = await startReceiving(t, (socket, head) => {
        socket.on('data', (chunk) => assert.fail(`the backend got ${chunk}`));
        assert.equal(head.length, 0);
        socket.end(`HTTP/1.1 400 Bad Request\r\n${reply}`);
      });
      const { status, headers, text } = await declined(t, gateway, 'bearer', more);
      assert.deepEqual([status, headers['x-why'], requests(gateway)[0].status], [400, 'mode', 400]);
      assert.equal(text, reply.split(/\r\n\r\n(.*)/s)[1]);
      assert.equal(headers['transfer-encoding'], reply === chunked ? 'chunked' : undefined);
      await declined(t, gateway, 'none', more);
      assert.equal(backend.seen.length, 1);
    }
  });

  test('WebSocket: a poll in place of it, whose messages the client does not read, has a sentence in the log', async (t) => {
    const { gateway } = await startReceiving(
      t,
      (socket) => socket.end(`HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]`),
    );
    for (const row of ['bearer', '/v1/about | bearer']) assert.equal((await declined(t, gateway, row)).status, 200);
    assert.equal((await ask(gateway, { headers: { authorization: `Bearer ${SECRET}` } })).status, 200);
    const told = "The backend's mode has no WebSocket: it answered with a poll, and the messages in it are gone.";
    assert.deepEqual(requests(gateway).map(({ status, detail }) => [status, detail]), [
      [200, told],
      [200, undefined],
      [200, undefined],
    ]);
  });

  test('WebSocket: a backend that is down, slow, redirects, breaks off or switches to something else', async (t) => {
    const ways = [
      ...['504 backend_timeout | ', '502 bad_backend_answer | BREAKS OFF', '502 backend_unreachable | IS DOWN'],
      '502 bad_backend_answer | 301 Moved Permanently\r\nLocation: /v1/accounts\r\nContent-Length: 0',
      '502 bad_backend_answer | 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c',
    ];
    for (const [outcome, reply] of ways.map((way) => way.split(' | '))) {
      const { gateway } = await startReceiving(t, (socket) => {
        if (reply === 'BREAKS OFF') socket.destroy();
        else if (reply) socket.write(`HTTP/1.1 ${reply}\r\n\r\n`);
      }, { backend: { timeout: reply ? '1m' : '100ms', ...reply === 'IS DOWN' && { url: 'http://127.0.0.1:9' } } });
      assert.equal(outcomeOf(await declined(t, gateway)), outcome);
    }
  });

  test('WebSocket: bytes that arrive with the handshake, before its response, or after the other side has ended its half are not lost', async (t) => {
    let got = '';
    const { backend, gateway } = await startReceiving(t, (socket, head) => {
      got += head;
      socket.on('data', (chunk) => (got += chunk)).on('end', () => socket.end('last words'));
    });
    const { socket, text } = wish(t, gateway, 'bearer', 'early ');
    await until(() => backend.seen.length === 1);
    socket.write('from the client');
    await settled(gateway);
    backend.sockets[0]!.write(`${ACCEPTED}early from the backend, `);
    await until(() => got.endsWith('client') && text().endsWith('backend, '));
    socket.end(', bye');
    await closed(socket);
    assert.equal(got, 'early from the client, bye');
    assert.equal(text().split('\r\n\r\n')[1], 'early from the backend, last words');
  });

  test('WebSocket: the backend is always drained; a client that never reads is dropped, and another continues', async (t) => {
    const { backend, gateway } = await startReceiving(t);
    const stalled = await accepted(t, gateway);
    const healthy = await accepted(t, gateway);
    stalled.socket.pause();
    const chunk = Buffer.alloc(64 * 1024, 'x');
    const [toStalled, toHealthy] = backend.sockets as [net.Socket, net.Socket];
    let written = 0;
    for (; !toStalled.closed; written += chunk.length) {
      // The backend's own behaviour: it writes to all its readers in turn, and waits for each.
      for (const socket of [toStalled, toHealthy]) {
        const isFull = !socket.destroyed && !socket.write(chunk);
        if (isFull) await Promise.race([once(socket, 'drain'), closed(socket)]).catch(() => {});
      }
      assert.ok(written < 64 * MIB, 'it was never dropped');
      // On a slow machine the client that reads could fall as far behind as the other.
      await until(() => healthy.socket.bytesRead >= written);
    }
    toHealthy.write('still here');
    await until(() => healthy.text().endsWith('still here'));
    assert.equal(healthy.text().length - healthy.text().indexOf('\r\n\r\n') - 4, written + 'still here'.length);
    await until(() => gateway.log.some((line) => line.includes('too_far_behind')));
  });

  test('WebSocket: after its client has ended its half, the backend may send its last bytes, but not forever', async (t) => {
    const silent: UpgradeHandler = (socket) => void socket.write(ACCEPTED); // which never ends its half
    const { backend, gateway } = await startReceiving(t, silent, {}, { lingerMs: 500 });
    const { socket, text } = await accepted(t, gateway);
    const ended = once(backend.sockets[0]!.resume(), 'end');
    socket.end();
    await within(ended, 'the end of the half at the backend');
    backend.sockets[0]!.write('last bytes');
    await until(() => text().endsWith('last bytes'));
    await closed(socket);
    await until(() => linesOf(gateway, /websocket closed/).length === 1);
    assert.equal(linesOf(gateway, /websocket closed/)[0]!.reason, 'ended');
  });

  test('WebSocket: closing the gateway closes it, and a reload closes those whose token was removed or has lost the right', async (t) => {
    const secretOf = (name: string): string => `secret-of-the-token-that-${name}`;
    const named = (tokens: Record<string, TokenConfig>): GatewayConfig => ({
      ...RECEIVING,
      shutdown: '1h',
      tokens: Object.fromEntries(
        Object.entries(tokens).map(([name, own]) => [name, { secret: secretOf(name), ...own }]),
      ),
    });
    const all = named({ stays: {}, goes: {}, expires: {}, narrows: {}, path: {}, moves: {} });
    // Without the periodic check, which would close them half a minute later.
    const [{ backend, gateway }] = await holdIntervals(() => true, () => startReceiving(t, undefined, all));
    const { socket, text } = await accepted(t, gateway, `bearer ${secretOf('stays')}`);
    const others = ['goes', 'expires', 'narrows', 'moves'].map((name) => `bearer ${secretOf(name)}`);
    const clients = [];
    for (const row of [...others, `/@auth=${secretOf('path')}${RECEIVE}`]) {
      clients.push(await accepted(t, gateway, row));
    }
    const bearer: TokenConfig = { methods: ['bearer'] };
    gateway.reload(
      named({
        ...{ stays: bearer, expires: { expires: '2020-01-01' }, narrows: { senders: [TO] }, path: bearer },
        moves: { clients: ['192.0.2.1'] },
      }),
    );
    for (const { socket } of clients) await closed(socket);
    await until(() => linesOf(gateway, /websocket closed/).length === 5);
    for (const { reason } of linesOf(gateway, /websocket closed/)) assert.equal(reason, 'no_longer_allowed');
    assert.equal(socket.destroyed, false);
    backend.sockets[0]!.write('still open');
    await until(() => text().endsWith('still open'));
    await gateway.close();
    await closed(socket);
  });

  // SIGTERM waited for it forever, because closing all connections does not include a socket that is being upgraded.
  test('closing lets a response to a request for a WebSocket finish', async (t) => {
    const { backend, gateway } = await startReceiving(t, (socket) => {
      socket.write('HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf');
    }, { shutdown: '1h' });
    const { socket, text } = wish(t, gateway, '/v1/about | bearer');
    await until(() => text().endsWith('half'));
    const closing = gateway.close();
    backend.sockets[0]!.write('half');
    await closed(socket);
    assert.match(text(), /^HTTP\/1\.1 200 [^]*\r\n\r\nhalfhalf$/);
    await closing;
  });

  // A request for a WebSocket on a route other than receive released the slot although the backend was still working.
  test('a WebSocket without a handshake response ends with its client and the gateway; except on receive, it keeps its slot when the client disconnects', async (t) => {
    const silent = (socket: Duplex): void => void socket.on('end', () => socket.end()).resume();
    const own = { shutdown: '1h', allow: ['messaging'], backend: { parallel: 1 } };
    const { backend, gateway } = await startReceiving(t, silent, own, { slotTimeoutMs: 3_600_000 });
    const { socket } = wish(t, gateway);
    await until(() => backend.seen.length === 1);
    socket.destroy();
    await closed(backend.sockets[0] as net.Socket);
    await until(() => requests(gateway).length === 1);
    assert.equal(outcomeOf(requests(gateway)[0]), '499 client_left');
    const { socket: acting } = wish(t, gateway, '/v1/search | bearer');
    await until(() => backend.seen.length === 2);
    acting.destroy();
    const next = send(gateway, 'next');
    for (let i = 0; i < 3; i++) await settled(gateway);
    assert.equal(backend.seen.length, 2);
    const refusal = declined(t, gateway);
    await until(() => backend.seen.length === 3);
    await gateway.close();
    for (const answer of [refusal, next]) assert.equal(outcomeOf(await answer), '503 shutting_down');
  });

  // Node reports a reset as an error of the socket, which crashes a process that does not listen for it.
  test('WebSocket: a client that resets its connection while its handshake waits does not crash the process', async (t) => {
    const { backend, gateway } = await startReceiving(t, () => {});
    for (let i = 1; i <= 8; i++) {
      const { socket } = wish(t, gateway);
      await until(() => backend.seen.length === i);
      socket.resetAndDestroy();
      await until(() => requests(gateway).length === i);
      assert.equal(outcomeOf(requests(gateway).at(-1)!), '499 client_left');
    }
  });

  // It was opened after the loop that closes them, and held up the gateway until the deadline.
  test('WebSocket: one that the backend accepts while the gateway closes is closed', async (t) => {
    const own = { shutdown: '1h', allow: ['messaging'] };
    const { backend, gateway } = await startReceiving(t, () => {}, own);
    const { socket } = wish(t, gateway, '/v1/search | bearer');
    await until(() => backend.seen.length === 1);
    const closing = gateway.close();
    backend.sockets[0]!.write(ACCEPTED);
    await closed(socket);
    await closing;
    assert.equal(linesOf(gateway, /websocket closed/)[0]!.reason, 'shutdown');
  });

  test('WebSocket: one that is still connecting to the backend while the gateway closes is 503', ON_NODE, async (t) => {
    const asked = new Promise<Parameters<Look>[1]>((resolve) => takeLookup(t, 'late.test', (_, find) => resolve(find)));
    const { backend, gateway } = await startReceiving(t, () => {}, { shutdown: '1h' });
    gateway.reload({ ...RECEIVING, shutdown: '1h', backend: { url: backend.url.replace(backend.host, 'late.test') } });
    const refusal = declined(t, gateway);
    const find = await asked;
    const closing = gateway.close();
    find(backend.host);
    assert.equal(outcomeOf(await refusal), '503 shutting_down');
    await closing;
  });

  test('WebSocket: a reload during a handshake refuses one that its token may no longer open; where the backend may act on it, it is closed once it is open', async (t) => {
    const own = { ...RECEIVING, allow: ['messaging'] };
    const { backend, gateway } = await startReceiving(t, () => {}, own);
    const { socket, text } = wish(t, gateway);
    await until(() => backend.seen.length === 1);
    const acting = wish(t, gateway, '/v1/search | bearer');
    await until(() => backend.seen.length === 2);
    gateway.reload({ ...RECEIVING, allow: ['info'] });
    await closed(socket, 'the handshake to be refused, as its token may no longer receive');
    assert.match(text(), /^HTTP\/1\.1 403 [^]*"code":"endpoint_not_allowed"/);
    backend.sockets[1]!.write(`${ACCEPTED}a message`);
    await closed(acting.socket, 'the WebSocket to be closed, as its token may no longer open it');
    assert.doesNotMatch(acting.text(), /a message/);
    await until(() => linesOf(gateway, /websocket closed/).length === 1);
    assert.equal(linesOf(gateway, /websocket closed/)[0]!.reason, 'no_longer_allowed');
    assert.equal(requests(gateway)[0].reason, 'no_longer_allowed');
  });

  test('WebSocket: one on which nothing is said stays open, for longer than a client may stall', async (t) => {
    const { backend, gateway } = await startReceiving(t, undefined, {}, { stallTimeoutMs: 200 });
    const { text } = await accepted(t, gateway);
    await pass(1000);
    backend.sockets[0]!.write('still open');
    await until(() => text().endsWith('still open'));
  });

  test('WebSocket: one whose token has expired is closed within a minute', async (t) => {
    const expires = '2027-06-30T12:00:00Z';
    let nowMs = Date.parse(expires) - 1;
    const [{ gateway }, sweep] = await holdIntervals(
      (everyMs) => everyMs <= 60_000,
      () => startReceiving(t, undefined, tokens({ expires }, {}), { now: () => nowMs }),
    );
    const { socket } = await accepted(t, gateway);
    const other = await accepted(t, gateway, `bearer ${OTHER}`);
    sweep();
    assert.equal(linesOf(gateway, /websocket closed/).length, 0);
    nowMs++;
    sweep();
    await closed(socket, 'the WebSocket of the expired token to be closed');
    await until(() => linesOf(gateway, /websocket closed/).length === 1);
    const { token, reason } = linesOf(gateway, /websocket closed/)[0]!;
    assert.deepEqual([token, reason, other.socket.destroyed], ['test', 'no_longer_allowed', false]);
  });

  test('WebSocket: a client that keeps sending before its handshake has a response is disconnected', async (t) => {
    const { backend, gateway } = await startReceiving(t, () => {});
    const { socket } = wish(t, gateway);
    await until(() => backend.seen.length === 1);
    const isDropped = (): boolean => requests(gateway).some(({ status }) => status === 499);
    for (let i = 0; i < 200 && !isDropped(); i++) {
      socket.write('x'.repeat(4096));
      await settled(gateway);
    }
    assert.ok(isDropped(), 'it sent 200 chunks, and was not dropped');
    await closed(socket);
  });
});
