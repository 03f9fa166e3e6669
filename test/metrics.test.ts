import { once } from 'node:events';
import type http from 'node:http';
import net from 'node:net';
import { suite } from 'node:test';
import { pathToFileURL } from 'node:url';
import type { TokenConfig } from '../gateway.ts';
import { assert, assertDenied, closed, groupsOf, linesOf, requests, until } from './assertions.ts';
import { startBackend } from './backend.ts';
import { type Ask, ask, METRICS, open, scrape, untilScraped } from './client.ts';
import { ALL_METHODS, NO_TOKENS, tokens } from './configs.ts';
import { fileWith, PACKAGE, PAGES, read } from './files.ts';
import { Metrics } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { answerAll, send, sendMany, startHeld } from './held.ts';
import { table } from './rows.ts';
import { isNode } from './runtime.ts';
import { basic, BEARER, FROM, GROUP, HELLO, MESSAGE, OTHER, SECRET, SEND, TO } from './samples.ts';
import { startBoth, startGateway, startProcess } from './start.ts';
import { startReceiving, wish } from './websocket.ts';

const SCRAPER: TokenConfig = { allow: ['metrics'] };

suite('metrics', SIDE_BY_SIDE, () => {
  test('GET /metrics is valid Prometheus text without phone numbers, secrets or client paths, and is never relayed', async (t) => {
    const { backend, gateway } = await startBoth(t, { ...ALL_METHODS, ...tokens({}, SCRAPER) });
    await ask(gateway, { headers: BEARER, body: HELLO });
    for (const path of [`/v1/receive/${FROM}`, `/@auth=${SECRET}/v1/groups/${FROM}/${GROUP}`, '/no/such', '/metrics']) {
      await ask(gateway, { path });
    }
    const { text, headers } = await ask(gateway, METRICS);
    assert.equal(headers['content-type'], 'text/plain; version=0.0.4; charset=utf-8');
    assert.deepEqual([headers['cache-control'], headers['x-content-type-options']], ['no-store', 'nosniff']);
    // A help text with a number first would be taken for a value by a pattern without "^".
    const family = String
      .raw`# HELP (\w+) [A-Z].*\n# TYPE \1 (?:counter|gauge|histogram)\n(?:\1\w*(?:\{\w+="[^"\\\n]*"(?:,\w+="[^"\\\n]*")*\})? [\d.e+-]+\n|\n)+`;
    assert.match(text, new RegExp(`^(?:${family})+$`));
    for (const value of [SECRET, OTHER, FROM, TO, GROUP, 'no/such', '127.0.0.1']) {
      assert.ok(!text.includes(value), value);
    }
    assert.equal(backend.seen.length, 1);
    const { level, bytesOut, token, route } = requests(gateway).at(-1)!;
    const wanted = { level: 'debug', bytesOut: text.length, token: 'other', route: '/metrics' };
    assert.deepEqual({ level, bytesOut, token, route }, wanted);
  });

  test('the metrics count requests by token, route and status, and have the duration of sends and the time of the last one per token', async (t) => {
    const clock = { nowMs: 1_700_000_000_500 };
    const statuses = [201, 201, 400];
    const backend = await startBackend(t, (req, res) => {
      req.resume().on('end', () => res.writeHead(req.url === '/v1/about' ? 200 : statuses.shift()!).end());
    });
    const gateway = await startGateway(t, backend, tokens({}, SCRAPER), { now: () => clock.nowMs });
    await ask(gateway, { headers: BEARER, body: HELLO });
    clock.nowMs += 60_000;
    await ask(gateway, { headers: BEARER, body: HELLO });
    clock.nowMs += 60_000;
    await ask(gateway, { headers: BEARER, body: HELLO }); // 400
    await ask(gateway, { headers: BEARER });
    for (const path of ['/no/such', '/an/other', '/metrics', '/healthz', '/..']) await ask(gateway, { path });
    for (const path of ['/v1/accounts', `/v1/groups/${FROM}`]) await ask(gateway, { path, headers: BEARER });
    await ask(gateway, { headers: BEARER, path: '/v2/send', method: 'DELETE' });
    clock.nowMs += 60_000;
    const first = await scrape(gateway);
    const counted = Object.entries(first).filter(([name]) => name.startsWith('requests_total'));
    assert.deepEqual(Object.fromEntries(counted), {
      'requests_total{token="test",route="POST /v2/send",status="201"}': 2,
      'requests_total{token="test",route="POST /v2/send",status="400"}': 1,
      'requests_total{token="test",route="GET /v1/about",status="200"}': 1,
      'requests_total{token="",route="other",status="401"}': 2,
      'requests_total{token="",route="GET /metrics",status="401"}': 1,
      'requests_total{token="",route="GET /healthz",status="200"}': 1,
      'requests_total{token="",route="other",status="400"}': 1,
      'requests_total{token="test",route="GET /v1/accounts",status="403"}': 1,
      'requests_total{token="test",route="GET /v1/groups/:number",status="403"}': 1,
      'requests_total{token="test",route="other",status="405"}': 1,
    });
    assert.equal(first['last_sent_timestamp_seconds{token="test"}'], 1_700_000_060.5, 'by the clock, and of a 2xx');
    assert.equal(first.process_start_time_seconds, 1_700_000_000.5);
    assert.equal(first[`info{version="${PACKAGE.version}"}`], 1);
    // Each bucket includes those before it.
    const buckets = Object.entries(first).filter(([name]) => name.startsWith('send_seconds_bucket'));
    const limits = buckets.map(([name]) => /le="(.*)"/.exec(name)![1]);
    assert.deepEqual(limits, '0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 150 +Inf'.split(' '));
    for (const [i, [, value]] of buckets.entries()) assert.ok(value >= (buckets[i - 1]?.[1] ?? 0), `${buckets}`);
    assert.deepEqual([buckets.at(-1)![1], first.send_seconds_count], [3, 3]);
    assert.ok(first.send_seconds_sum! > 0, 'the sum of the times');
    // A reload keeps all counts, and the scrape itself has been counted.
    gateway.reload(tokens({}, SCRAPER));
    const second = await scrape(gateway);
    assert.equal(second['requests_total{token="other",route="GET /metrics",status="200"}'], 1);
    assert.equal(second['requests_total{token="test",route="POST /v2/send",status="201"}'], 2);
    assert.equal(second.send_seconds_count, 3);
  });

  table('only the word metrics and the pattern GET /metrics open GET /metrics, whatever else a token has', {})`
    * bearer | GET /metrics → 403 endpoint_not_allowed | "the word \"metrics\" in its \"allow\" opens it"
    @ {"allow":["send","info","receive","messaging","setup"]} | GET /metrics
    @ {"allow":["* /*","GET /*","GET /:a","* /metrics","* /:metrics","GET /metrics/*"]} | GET /metrics
    * bearer | @ {"allow":["metrics"]} → 403 endpoint_not_allowed
    GET /v1/about ;; {"message":"x"}
    * bearer | @ {"allow":["metrics","* /*"]} → 405 method_not_allowed | Allow: GET
    HEAD /metrics ;; OPTIONS /metrics`;

  test('GET /metrics passes the checks of any request: methods, expiry, clients, rate; senders and recipients do not matter', async (t) => {
    const rows: [TokenConfig, Ask, number][] = [
      [{}, {}, 200],
      [{ allow: ['GET /metrics'] }, {}, 200],
      [{ senders: [FROM], recipients: [TO] }, {}, 200],
      [{ allow: ['GET /metrics'], senders: [FROM] }, {}, 200],
      [{}, { headers: { authorization: basic(`api:${OTHER}`) } }, 200],
      [{}, { headers: {}, path: `/@auth=${OTHER}/metrics` }, 200],
      [{}, { headers: {}, path: '/metrics' }, 401],
      [{ expires: '2020-01-01' }, {}, 401],
      [{ clients: ['192.0.2.0/24'] }, {}, 403],
      [{}, { headers: { 'authorization': basic(`api:${OTHER}`), 'sec-fetch-site': 'cross-site' } }, 403],
    ];
    for (const [settings, request, status] of rows) {
      const both = await startBoth(t, { ...ALL_METHODS, rate: '1/1h', ...tokens({}, { ...SCRAPER, ...settings }) });
      const { gateway, backend } = both;
      assert.equal(
        (await ask(gateway, { ...METRICS, ...request })).status,
        status,
        JSON.stringify([settings, request]),
      );
      if (status === 200) assertDenied(await ask(gateway, { ...METRICS, ...request }), 429, 'rate_limited', both);
      assert.deepEqual([backend.seen.length, backend.connections], [0, 0], 'what the backend saw');
    }
    // A top-level allow applies to each token without its own.
    const { gateway } = await startBoth(t, { allow: ['send', 'metrics'], ...tokens({}, { allow: ['send'] }) });
    assert.equal((await ask(gateway, { ...METRICS, headers: BEARER })).status, 200);
    assert.equal((await ask(gateway, METRICS)).status, 403);
  });

  test('without tokens, GET /metrics is open only if allow has the word, and never to a page of another site', async (t) => {
    const { gateway } = await startBoth(t, { ...NO_TOKENS, allow: ['metrics', 'info'] });
    await ask(gateway);
    const values = await scrape(gateway, { path: '/metrics' });
    assert.equal(values['requests_total{token="anonymous",route="GET /v1/about",status="200"}'], 1);
    const crossSite = { 'sec-fetch-site': 'cross-site' };
    assert.equal((await ask(gateway, { path: '/metrics', headers: crossSite })).json.code, 'cross_site');
    const { gateway: other } = await startBoth(t, NO_TOKENS);
    assert.equal((await ask(other, { path: '/metrics' })).status, 403);
  });

  test('the metrics have the requests that wait for a slot and for the backend, overdue slots, and whether the backend is up', async (t) => {
    const own = { ...tokens({}, SCRAPER), limits: { connections: 50 } };
    const { backend, gateway } = await startHeld(t, 1, own, { slotTimeoutMs: 20 });
    gateway.reload({ ...own, backend: { url: backend.url, parallel: 1, wait: '30s' } });
    const becomes = (series: string, value: number) => untilScraped(gateway, series, value);
    const [slot, atGate] = ['requests_waiting{for="slot"}', 'requests_waiting{for="backend"}'];
    const idle = { [slot]: 0, [atGate]: 0, slots_overdue: 0, backend_up: 1, connections: 1 };
    const known = Object.keys(idle);
    const some = (values: Record<string, number>) => Object.fromEntries(known.map((name) => [name, values[name]]));
    assert.deepEqual(some(await scrape(gateway)), idle);
    const sends = sendMany(gateway, 2);
    await becomes(slot, 1);
    assert.deepEqual(some(await becomes('slots_overdue', 1)), { ...idle, [slot]: 1, slots_overdue: 1, connections: 3 });
    await answerAll(backend, sends);
    assert.deepEqual(some(await becomes('connections', 1)), idle);
    // After a reload to another backend, requests that wait for the old one are counted, and the new one is up.
    backend.server.close().closeAllConnections();
    const late = [send(gateway, 'late'), ask(gateway, { headers: BEARER })];
    await becomes(atGate, 2);
    assert.deepEqual(some(await scrape(gateway)), { ...idle, [atGate]: 2, backend_up: 0, connections: 3 });
    const next = await startBackend(t);
    gateway.reload({ ...own, backend: { url: next.url } });
    assert.deepEqual(some(await scrape(gateway)), { ...idle, [atGate]: 2, connections: 3 });
    backend.server.listen(backend.port, backend.host);
    await until(() => backend.acting === 2);
    backend.answer();
    backend.answer();
    for (const answer of late) assert.equal((await answer).status, 201);
  });

  test('a WebSocket that waits for its handshake needs no slot, so the metrics do not count it as waiting for one', async (t) => {
    const { backend, gateway } = await startReceiving(t, () => {}, tokens({ allow: ['receive'] }, SCRAPER));
    wish(t, gateway);
    await until(() => backend.seen.length === 1);
    assert.equal((await scrape(gateway))['requests_waiting{for="slot"}'], 0);
  });

  test('a send is counted by the response of the backend, whether its client is still connected or not', async (t) => {
    const { backend, gateway } = await startHeld(t, 4, tokens({}, SCRAPER));
    const accepted = once(gateway.server, 'connection') as Promise<[net.Socket]>;
    const { socket } = open(t, gateway, SEND);
    const [served] = await accepted;
    await until(() => backend.acting === 1);
    socket.destroy();
    await closed(served);
    backend.answer();
    await until(() => requests(gateway).some(({ reason }) => reason === 'answered_201'));
    const values = await scrape(gateway);
    assert.equal(values['requests_total{token="test",route="POST /v2/send",status="499"}'], 1);
    assert.equal(values.send_seconds_count, 1);
    assert.ok(values['last_sent_timestamp_seconds{token="test"}']! > 1e9, 'the backend took the message');
  });

  test('the metrics count each internal error, during a request and before it', async (t) => {
    const { gateway } = await startBoth(t, tokens({}, SCRAPER));
    const fail = (): never => {
      throw new RangeError('planted');
    };
    /** The next request's target cannot be read. */
    const spoil = (req: http.IncomingMessage): void => void Object.defineProperty(req, 'url', { get: fail });
    const faults = [spoil, fail].map((listener) => () => gateway.server.prependOnceListener('request', listener));
    for (const [count, plant] of faults.entries()) {
      plant();
      await ask(gateway, { headers: BEARER }).catch(() => {});
      assert.equal((await scrape(gateway)).internal_errors_total, count + 1);
      assert.equal(linesOf(gateway, /^internal error$/).length, count + 1);
    }
  });

  test('docs/operating.md has every series with its type and labels, and docs/signal-gateway.rules.yml uses no other names', async (t) => {
    const { gateway } = await startBoth(t, tokens({}, SCRAPER));
    await ask(gateway, { headers: BEARER, body: HELLO });
    const { text } = await ask(gateway, METRICS);
    const series = Array.from(
      text.matchAll(/^# TYPE (\w+) (\w+)\n.*?(?:\{(.*)\})? \S+$/gm),
      ([, name, type, labels = '']) => {
        return `${name}{${type === 'histogram' ? '' : groupsOf(labels, /(\w+)=/g)}} ${type}`;
      },
    );
    const page = PAGES['docs/operating.md']!;
    const cells = /^\| `(\w+)` \| (counter|gauge|histogram)(?: by ([`\w, ]+))?: /gm;
    const rows = Array.from(page.matchAll(cells), ([, name, type, labels = '']) => {
      const whole = name!.startsWith('process_') ? name! : `signal_gateway_${name}`;
      return { name: whole, as: `${whole}{${labels.replace(/[` ]/g, '')}} ${type}` };
    });
    assert.deepEqual(rows.map((row) => row.as), series);
    const alerts = read('docs/signal-gateway.rules.yml');
    const used = groupsOf(alerts, /((?:signal_gateway|process)_\w+)/g);
    assert.equal(groupsOf(alerts, /- alert: (\w+)/g).length, 4);
    assert.deepEqual(used.filter((name) => !rows.some((row) => row.name === name)), []);
  });

  /** A query, to be compared with another: without the job, and without what it is compared with. */
  const plainQuery = (query: string): string =>
    query.replace(/job="[^"]*",?/g, '').replace(/\{\}/g, '').replace(/ (?:==|>) \d+/g, '')
      .replace(/\s+/g, ' ').replaceAll('( ', '(').trim();

  /** The series that a query selects, with their labels and times. */
  const selectorsOf = (query: string): string[] =>
    groupsOf(
      plainQuery(query),
      /((?<!\w)(?:signal_gateway_\w+|process_\w+|up)(?:\{[^}]*\})?(?:\[\w+\])?(?: offset \w+)?)/g,
    );

  test('docs/grafana.json has every series and no other, with advice at each panel, and queries the same as the alerts', async (t) => {
    interface Panel {
      type: string;
      title: string;
      description: string;
      targets?: { expr: string }[];
      fieldConfig: { defaults: { unit?: string; thresholds: { steps: { value: number | null }[] } } };
    }
    const source = read('docs/grafana.json');
    const { panels, templating }: { panels: Panel[]; templating: { list: { name: string; type: string }[] } } = JSON
      .parse(source);
    assert.deepEqual(templating.list.map(({ name, type }) => `${name} ${type}`), [
      'datasource datasource',
      'job query',
    ]);
    const rows = panels.filter(({ type }) => type === 'row').map(({ title }) => title);
    assert.deepEqual(rows, ['Does it send?', 'The backend', 'Who is refused', 'The gateway']);
    const charts = panels.filter(({ type }) => type !== 'row');
    for (const { title, description, targets, fieldConfig } of charts) {
      assert.match(description, /^[^\n]{20,160}\.$/, title);
      assert.ok(targets?.length && fieldConfig.defaults.unit, title);
    }
    assert.doesNotMatch(source, /fixedColor|"fixed"/, 'no colour that carries a meaning by itself');

    const queries = charts.flatMap(({ targets }) => targets!.map(({ expr }) => expr));
    const used = groupsOf(queries.join('\n'), /((?<!\w)(?:signal_gateway_\w+|process_\w+|up(?=\{)))/g);
    const ofJob = groupsOf(queries.join('\n'), /(\w+)\{job="\$job"/g);
    assert.deepEqual(used, ofJob, 'each of the selected job');
    const { gateway } = await startBoth(t, tokens({}, SCRAPER));
    const { text } = await ask(gateway, METRICS);
    const series = groupsOf(text, /^# TYPE (\w+) /gm);
    assert.deepEqual([...new Set(used.map((name) => name.replace(/_bucket$/, '')))].sort(), [...series, 'up'].sort());

    const alerts = groupsOf(read('docs/signal-gateway.rules.yml'), /\n +expr: \|?([^]*?)\n +(?:for|annotations):/g);
    assert.equal(alerts.length, 4);
    const shown = queries.flatMap(selectorsOf);
    for (const alert of alerts) {
      assert.deepEqual(selectorsOf(alert).filter((selector) => !shown.includes(selector)), [], alert);
      const same = charts.filter(({ targets }) =>
        targets!.some(({ expr }) => plainQuery(alert).includes(plainQuery(expr)))
      );
      assert.ok(same.length > 0, alert);
      const limit = Number(/ > (\d+)\s*$/.exec(alert)?.[1] ?? 0);
      const limits = same.flatMap(({ fieldConfig }) => fieldConfig.defaults.thresholds.steps.map(({ value }) => value));
      assert.ok(limit === 0 || limits.includes(limit), alert);
    }
  });

  // A Raspberry Pi that was off for three days starts three days ago, and the alert "no message for a day" fired at once.
  test(
    'times follow a clock that is corrected after the start',
    { skip: !isNode && 'the hook needs Node' },
    async (t) => {
      const backend = await startBackend(t);
      const behindMs = 3 * 86_400_000;
      const hook = fileWith(
        t,
        `const { now } = Date; let behindMs = ${behindMs};
      Date.now = () => now() - behindMs; process.on('SIGUSR2', () => { behindMs = 0; });`,
        'clock.mjs',
      );
      const env = { NODE_OPTIONS: `--import=${pathToFileURL(hook)}`, GATEWAY_ALLOW: 'send,metrics' };
      const gateway = await startProcess(t, { backend, env });
      assert.equal((await ask(gateway, { body: MESSAGE, headers: BEARER })).status, 201);
      const read = async (): Promise<number[]> => {
        const { text } = await ask(gateway, { path: '/metrics', headers: BEARER });
        return ['process_start_time_seconds', 'signal_gateway_last_sent_timestamp_seconds{token="token-1"}'].map((
          name,
        ) => Number(text.split('\n').find((line) => line.startsWith(`${name} `))?.slice(name.length)));
      };
      const [before, again] = [await read(), await read()];
      assert.deepEqual(before, again, 'they do not waver');
      process.kill(gateway.child.pid!, 'SIGUSR2');
      let after: number[] = [];
      await until(async () => {
        after = await read();
        return after[0] !== before[0];
      });
      for (const [i, seconds] of after.entries()) {
        const shiftMs = (seconds - before[i]!) * 1000;
        assert.ok(Math.abs(shiftMs - behindMs) < 2000, `${shiftMs} ms`);
      }
      await gateway.close();
    },
  );

  test('beyond 10,000 series, further ones are counted for all tokens together', () => {
    const metrics = new Metrics();
    type Counted = Parameters<typeof metrics.countRequest>[0];
    const count = (name: string, status = 200): void =>
      metrics.countRequest(
        { req: { method: 'GET' }, route: '/healthz', token: { name }, status } as unknown as Counted,
      );
    for (let i = 0; i < 10_005; i++) count(`t${i}`);
    for (const name of ['t0', 't9999', 't10000', 'new']) count(name);
    count('new', 401);
    const core = { startedMs: 0, dateOf: Number, connections: new Map(), running: [], upstream: { gate: {} } };
    const lines = metrics.render(core as unknown as Parameters<typeof metrics.render>[0]).split('\n');
    const series = lines.filter((line) => line.startsWith('signal_gateway_requests_total{'));
    const valueOf = (token: string, status = 200): string | undefined => {
      const name = `signal_gateway_requests_total{token="${token}",route="GET /healthz",status="${status}"} `;
      return series.find((line) => line.startsWith(name))?.slice(name.length);
    };
    assert.equal(series.length, 10_002, 'and one for each route and status of the others');
    const values = ['t0', 't9999', 't10000', 'new', '_other'].map((token) => valueOf(token));
    assert.deepEqual([...values, valueOf('_other', 401)], ['2', '2', undefined, undefined, '7', '1']);
  });
});
