import { once } from 'node:events';
import http from 'node:http';
import net, { type AddressInfo } from 'node:net';
import { suite } from 'node:test';
import { outcomeOf, statusOf } from './answers.ts';
import { assert, closed, linesOf, pass, requests, until } from './assertions.ts';
import { ask, type Connection, open, statusesOf, untilServed } from './client.ts';
import { tokens } from './configs.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { bytesOf } from './rows.ts';
import { ABOUT, AS_OTHER, BEARER, HEALTH, HELLO, OTHER, post, RECEIVE, SECRET, SEND } from './samples.ts';
import { type Gateway, PATIENT_MS, startBoth, startGateway, startHolding } from './start.ts';
import { RECEIVING, startUpgradeBackend } from './websocket.ts';

/** Opens a connection that sends this, and waits until the gateway has read it and responded, if it is whole. */
async function opened(t: TestContext, gateway: Gateway, bytes: string): Promise<Connection> {
  const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
  const connection = open(t, gateway, bytes);
  const [served] = await accepted;
  const isWhole = bytes.includes('\r\n\r\n');
  await until(() => isWhole ? connection.text().includes('\r\n\r\n') : served.bytesRead > 0 || served.destroyed);
  return connection;
}

suite('limits', SIDE_BY_SIDE, () => { // A thousand idle connections, which cost one client nothing, locked out all others.
  test('connections that come in one turn of the event loop are no more than limits.connections', async (t) => {
    const { gateway } = await startBoth(t, { limits: { connections: 2 } });
    // Several in one turn, as a server under load may get them: here they are handed over, as node:http allows.
    const accepted: net.Socket[] = [];
    const other = net.createServer((socket) => void accepted.push(socket)).listen(0, '127.0.0.1');
    t.after(() => other.close());
    await once(other, 'listening');
    for (let i = 0; i < 6; i++) open(t, { port: (other.address() as AddressInfo).port });
    await until(() => accepted.length === 6);
    for (const socket of accepted) {
      t.after(() => socket.destroy());
      gateway.server.emit('connection', socket);
    }
    assert.deepEqual(accepted.map(({ destroyed }) => destroyed), [true, true, true, true, false, false]);
  });

  test('at limits.connections a new connection is accepted, and the one that has gone longest without a valid token is closed', async (t) => {
    const { backend, gateway, finish } = await startHolding(t, { limits: { connections: 4 } });
    // Nothing else closes a connection here.
    Object.assign(gateway.server, { keepAliveTimeout: 0 }).setTimeout(0);
    const peers = new Map<number, net.Socket>();
    gateway.server.on('connection', (socket: net.Socket) => peers.set(socket.remotePort!, socket));
    const named = new Map<string, Connection & { peer?: net.Socket | undefined }>();
    /**
     * Sends on the connection of this name, or on a new one. Afterwards these are open, in the order in which they were
     * opened.
     */
    const sends = async (name: string, bytes: string, opened: string): Promise<void> => {
      const on = named.get(name) ?? open(t, gateway);
      const before = on.text().length;
      on.socket.write(bytes);
      const [length, isHeld] = [backend.seen.length, bytes === SEND];
      await until(
        () => (isHeld ? backend.seen.length > length : on.text().length > before) || on.socket.destroyed,
        `the response on the connection "${name}"`,
      );
      named.set(name, { peer: peers.get(on.socket.localPort!), ...on });
      const left = [...named].filter(([, { peer }]) => peer?.destroyed === false).map(([each]) => each).join(' ');
      assert.equal(left, opened, `the open connections when "${name}" has its response`);
    };
    const wrong = ABOUT.replace(SECRET, OTHER);
    await sends('served', SEND, 'served'); // the oldest, with a request of its token in progress
    await sends('known', ABOUT, 'served known');
    await sends('wrong', wrong, 'served known wrong');
    await sends('none', HEALTH, 'served known wrong none');
    await sends('known', ABOUT, 'served known wrong none'); // after the last two were opened
    await sends('fifth', HEALTH, 'served known none fifth');
    await sends('sixth', HEALTH, 'served known fifth sixth');
    await sends('fifth', HEALTH, 'served known fifth sixth'); // does not count: it shows no token
    await sends('good', ABOUT, 'served fifth sixth good');
    await sends('eighth', HEALTH, 'served sixth good eighth');
    for (const [name, { socket, peer }] of named) if (peer?.destroyed) await closed(socket, `the close of "${name}"`);
    finish();
    await until(
      () => named.get('served')!.text().includes('and last'),
      'the response of the connection that is served',
    );
    assert.deepEqual(linesOf(gateway, /^limits.connections is reached/).map((line) => line.level), ['warn']);
  });

  /** The head of a request that does not end. */
  const BEGUN = ABOUT.slice(0, -2);

  test('at limits.connections an idle connection is closed before one whose request is still coming, however old that is', async (t) => {
    const { gateway } = await startBoth(t, { limits: { connections: 4 } }, { lingerMs: 50 });
    const slow = await opened(t, gateway, BEGUN);
    const known = await opened(t, gateway, ABOUT);
    const refused = await opened(t, gateway, ABOUT.replace(SECRET, OTHER));
    const last = await opened(t, gateway, ABOUT);
    await pass(200);
    await opened(t, gateway, HEALTH);
    await closed(known.socket, 'the close of the one that has been idle for longest');
    await opened(t, gateway, ABOUT);
    await closed(refused.socket, 'the close of the next one, which had no token');
    slow.socket.write('\r\n');
    await until(() => statusOf(slow.text()) === 200, 'the response to the request that came slowly');
    assert.ok(!last.socket.destroyed, 'a third one was closed');
  });

  // Such a stranger could close each connection between two sends of its client, by one new connection.
  test('attack: hold all connections by requests that do not end, and open more: one that has just responded is not closed', async (t) => {
    const { backend, gateway } = await startBoth(t, { limits: { connections: 4 } }, { lingerMs: PATIENT_MS });
    const strangers = [];
    for (let i = 0; i < 3; i++) strangers.push(await opened(t, gateway, BEGUN.replace(SECRET, OTHER)));
    const client = await opened(t, gateway, SEND);
    for (let sent = 1; sent < 4; sent++) {
      strangers.push(await opened(t, gateway, BEGUN.replace(SECRET, OTHER)));
      await closed(strangers[sent - 1]!.socket);
      client.socket.write(SEND);
      await until(() => client.text().split('HTTP/1.1 201').length === sent + 2, 'the response to the next send');
    }
    assert.equal(backend.sent.length, 4);
  });

  test('attack: keep idle connections, more than limits.connections: every new client is served, and so is one that sends again', async (t) => {
    const { backend, gateway } = await startBoth(t, { limits: { connections: 20 } });
    const client = await opened(t, gateway, SEND);
    for (let round = 1; round <= 5; round++) {
      for (let i = 0; i < 15; i++) await opened(t, gateway, i % 2 === 0 ? HEALTH : ABOUT.replace(SECRET, OTHER));
      assert.equal((await ask(gateway, { body: HELLO, headers: BEARER })).status, 201);
      client.socket.write(SEND);
      await until(() => client.text().split('HTTP/1.1 201').length === round + 2, 'the response to the next send');
    }
    assert.equal(backend.sent.length, 11);
  });

  // Before Node 24.9 each left a listener behind, so an unauthenticated client could fill the memory with one
  // connection.
  test('a connection that repeatedly asks for another protocol costs no more than the first time', async (t) => {
    const { gateway } = await startBoth(t);
    const accepted = once(gateway.server, 'connection');
    const { socket, text } = open(t, gateway);
    const [served] = await accepted as [net.Socket];
    const listeners: number[] = [];
    for (let i = 1; i <= 20 && !socket.destroyed; i++) {
      socket.write(bytesOf('GET / HTTP/1.1 | Host: x | Connection: Upgrade | Upgrade: h2c'));
      await until(() => text().split('HTTP/1.1 401').length > i || socket.destroyed);
      listeners.push(served.listenerCount('close'));
    }
    assert.ok(listeners.at(-1)! <= listeners[0]!, `${listeners}`);
  });

  // node:http lost the bytes that came in one packet with such a request, and parsed the next packet as a new request.
  test('attack: a request hidden in the body of one that follows a request with Upgrade', async (t) => {
    const { backend, gateway } = await startBoth(t);
    const inner = `${post(SECRET, HELLO.length, 'Connection: close')}${HELLO}`;
    const first = bytesOf('about | Connection: Upgrade | Upgrade: h2c');
    const { socket, text } = open(t, gateway, `${first}${post(SECRET, inner.length)}`);
    await until(() => backend.seen.length === 1 && statusOf(text()) === 200);
    socket.end(inner);
    await closed(socket);
    assert.deepEqual(backend.seen.map((seen) => seen.url), ['/v1/about']);
    assert.deepEqual(backend.sent, []);
  });

  // The first response ended up among the bytes of the WebSocket.
  test('an Upgrade after a request that has no response yet ends the connection', async (t) => {
    for (const protocol of ['websocket', 'h2c']) {
      const { backend, gateway } = await startHolding(t, RECEIVING);
      const { socket, text } = open(t, gateway, ABOUT.replace('about', 'about?hang'));
      await until(() => backend.seen.length === 1);
      socket.write(bytesOf(`GET ${RECEIVE} HTTP/1.1 | Host: x | bearer | Connection: Upgrade | Upgrade: ${protocol}`));
      if (protocol === 'h2c') socket.destroy(); // from Node 24.9 on, h2c waits like any other pipelined request
      await closed(socket);
      await until(() => requests(gateway).some((line) => line.status === 499));
      assert.equal(text(), '');
      assert.equal(backend.seen.length, 1);
    }
  });

  /** A request that needs no slot, and that `startHolding` leaves unanswered. */
  const HANGING = ABOUT.replace('about', 'about?hang');

  test('a connection that breaks off while its token is served is removed from the list of connections', async (t) => {
    const { backend, gateway } = await startHolding(t, { limits: { connections: 4 } });
    for (let count = 1; count <= 6; count++) {
      const { socket } = open(t, gateway, HANGING);
      await until(() => backend.seen.length === count);
      socket.destroy();
      await until(() => requests(gateway).length === count);
    }
    const held = Array.from({ length: 4 }, () => open(t, gateway, HEALTH));
    for (const { text } of held) await until(() => text().includes('200 OK'));
    assert.deepEqual(linesOf(gateway, /limits\.connections/), []);
  });

  test('a token is served on exactly half of limits.connections, whichever clients hold the rest', async (t) => {
    const { backend, gateway } = await startHolding(t, { ...tokens({}, {}), limits: { connections: 8 } });
    const idle = open(t, gateway, HEALTH);
    await until(() => idle.text().includes('200 OK'));
    for (let count = 1; count <= 4; count++) {
      open(t, gateway, HANGING);
      await until(() => backend.seen.length === count);
    }
    assert.equal(outcomeOf(await ask(gateway, { headers: BEARER })), '503 busy');
    assert.equal(backend.seen.length, 4);
  });

  // One byte every nine seconds on a thousand connections kept all other clients from being served.
  test('with several tokens, one token holds at most half of limits.connections, whatever its requests are', async (t) => {
    const webSocket = bytesOf(`GET ${RECEIVE} HTTP/1.1 | Host: x | bearer | Connection: Upgrade | Upgrade: websocket`);
    const hold: [name: string, arrived: number, bytes: string | Buffer][] = [
      ['a send that waits for its response', 4, SEND],
      ['a body that does not end', 0, `${post(SECRET, 1000)}{"message":"`],
      ['a refused request that goes on sending', 0, `${post(SECRET, 1_000_000_000)}{`],
      ['a WebSocket', 4, webSocket],
    ];
    for (const [[name, arrived, bytes], other] of hold.flatMap((way) => [[way, {}], [way, undefined]] as const)) {
      const backend = await startUpgradeBackend(t);
      backend.server.prependListener('request', (req: http.IncomingMessage, res: http.ServerResponse) => {
        if (req.url === '/v2/send') res.writeHead = res.end = () => res; // never a response
      });
      const config = { ...RECEIVING, limits: { connections: 8 }, backend: { url: backend.url, parallel: 0 } };
      const gateway = await startGateway(t, backend, { ...config, ...tokens({}, other) });
      let met = 0;
      for (const event of ['request', 'upgrade']) gateway.server.on(event, () => met++);
      const held = Array.from({ length: 4 }, () => open(t, gateway, bytes));
      await until(() => met === 4 && backend.seen.length === arrived);
      const next = await ask(gateway, { headers: BEARER });
      assert.equal(outcomeOf(next), other ? '503 busy' : '200', name);
      for (const { socket } of held) assert.ok(!socket.destroyed, name);
      if (!other) continue;
      assert.equal(next.headers['retry-after'], '10');
      assert.equal(requests(gateway).at(-1)!.reason, 'half_of_connections');
      assert.equal(backend.seen.length, arrived);
      assert.deepEqual(await statusesOf(gateway, { headers: AS_OTHER }), [200]);
      held[0]!.socket.destroy(); // its place is free again
      await untilServed(gateway, {});
    }
  });

  test('with limits.connections 1 and two tokens, each token is served', async (t) => {
    const { gateway } = await startBoth(t, { limits: { connections: 1 }, ...tokens({}, {}) });
    for (const headers of [BEARER, AS_OTHER, BEARER]) {
      assert.equal(outcomeOf(await ask(gateway, { headers })), '200');
    }
  });
});
