import { readFileSync } from 'node:fs';
import { assert } from './assertions.ts';
import { startBackend } from './backend.ts';
import { test } from './guard.ts';
import { isNode } from './runtime.ts';
import { SECRET } from './samples.ts';
import { cli } from './start.ts';

test('a port that cannot be opened is an error with advice', async (t) => {
  const { host, port } = await startBackend(t);
  const rows: [listen: string, message: RegExp][] = [
    [`${host}:${port}`, /; use another port with --listen HOST:PORT\n$/],
    ['192.0.2.1:0', /; --listen needs an address of this machine; :PORT means all of them\n$/],
  ];
  if (isNode) rows.push(['nowhere.invalid:0', rows[1]![1]]); // Bun 1.4 has other codes for an unknown name
  const first = isNode && process.platform === 'linux' &&
    readFileSync('/proc/sys/net/ipv4/ip_unprivileged_port_start', 'utf8');
  // The test may run as root, which may open every port.
  const isRoot = process.geteuid?.() === 0;
  if (Number(first) > 1) {
    rows.push(['127.0.0.1:1', /; ports below 1024 need root; use --listen HOST:8880\n$/]);
  }
  for (const [listen, message] of rows) {
    if (isRoot && listen.endsWith(':1')) process.seteuid!(65_534);
    const env = { LISTEN: listen, API_TOKENS: SECRET };
    const { code, stderr } = await cli([], { env }).finally(() => isRoot && isNode && process.seteuid!(0));
    assert.deepEqual([code, /^gateway: cannot run: /.test(stderr)], [1, true], stderr);
    assert.match(stderr, message);
  }
});
