import { test } from 'node:test';
import { assert, closed, linesOf, until } from '../assertions.ts';
import { tokens } from '../configs.ts';
import { OTHER } from '../samples.ts';
import { accepted, startReceiving } from '../websocket.ts';

test('WebSocket: one whose token has expired is closed within a minute', async (t) => {
  const expires = '2027-06-30T12:00:00Z';
  let nowMs = Date.parse(expires) - 1;
  // Intervals that start with the gateway are run by this test, instead of after half a minute.
  const sweeps: (() => void)[] = [];
  const { setInterval } = globalThis;
  const noting = (run: (...args: unknown[]) => void, everyMs: number, ...args: unknown[]): unknown => {
    if (everyMs <= 60_000) sweeps.push(() => run(...args));
    return setInterval(run, everyMs, ...args);
  };
  globalThis.setInterval = noting as typeof setInterval;
  const { gateway } = await startReceiving(t, undefined, tokens({ expires }, {}), { now: () => nowMs })
    .finally(() => (globalThis.setInterval = setInterval));
  const { socket } = await accepted(t, gateway);
  const other = await accepted(t, gateway, `bearer ${OTHER}`);
  for (const sweep of sweeps) sweep();
  assert.equal(linesOf(gateway, /websocket closed/).length, 0);
  nowMs++;
  for (const sweep of sweeps) sweep();
  await closed(socket, 'the WebSocket of the expired token to be closed');
  await until(() => linesOf(gateway, /websocket closed/).length === 1);
  const { token, reason } = linesOf(gateway, /websocket closed/)[0]!;
  assert.deepEqual([token, reason, other.socket.destroyed], ['test', 'no_longer_allowed', false]);
});
