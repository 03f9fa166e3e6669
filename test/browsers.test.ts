import http from 'node:http';
import { suite } from 'node:test';
import type { GatewayConfig } from '../gateway.ts';
import { codeOf, statusOf } from './answers.ts';
import { assert, assertDenied, closed, linesOf, requests, until } from './assertions.ts';
import { barred, type Handler } from './backend.ts';
import { ask, raw } from './client.ts';
import { ALL_METHODS, NO_TOKENS, tokens } from './configs.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { bytesOf, parseRow, sendRow, table } from './rows.ts';
import {
  ASKED,
  AUTHED,
  BEARER,
  CHROME,
  DASHBOARD,
  FROM,
  GROUP,
  HELLO,
  MESSAGE,
  OTHER,
  RECEIVE,
  SECRET,
  SECRETS,
  sized,
  TO,
} from './samples.ts';
import { startBoth, startGateway, startRaw } from './start.ts';
import { declined, startReceiving, wish } from './websocket.ts';

const EVIL = 'Origin: http://evil.example:9000';

const CROSS_SITE = `${EVIL} | Sec-Fetch-Mode: no-cors | Sec-Fetch-Site: cross-site`;

const SWITCHED: GatewayConfig = { ...ALL_METHODS, allow: ['messaging', 'info', 'setup'], cors: [DASHBOARD] };

const OPEN: GatewayConfig = { ...SWITCHED, ...NO_TOKENS };

/**
 * What a browser adds to a request automatically: a password that it remembers, or nothing where no token is needed.
 */
const BY_ITSELF = [
  ['with the password that it remembers', SWITCHED, 'basic'],
  ['where no token is needed', OPEN, 'none'],
] as const;

/** The headers of a row, as node:http's client accepts them. */
const fieldsIn = (row: string): http.OutgoingHttpHeaders =>
  Object.fromEntries(parseRow(row).headers.map(([name, value]) => [name.toLowerCase(), value]));

/** The signs of a page: fetch without CORS, beacons, forms, frames, popups, typed addresses and prefetches. */
const PAGES_SEND =
  `${CROSS_SITE} | Content-Type: text/plain;charset=UTF-8 ;; ${EVIL} | Content-Type: text/plain;charset=UTF-8
  ${EVIL} | Sec-Fetch-Mode: no-cors | Sec-Fetch-Site: same-site ;; Origin: null | Content-Type: text/plain
  Sec-Fetch-Site: cross-site ;; Sec-Fetch-Site: same-origin, cross-site ;; Sec-Fetch-Site: ;; Origin:
  # a page of its own, which an attachment could be
  ${CHROME} | Sec-Fetch-Site: same-origin ;; ${EVIL} | Sec-Fetch-Site: same-origin ;; ${CHROME} | Origin: http://gateway
  Origin: http://gateway ;; Origin: https://gateway ;; Origin: https://gateway | Sec-Fetch-Site: cross-site
  # a typed address, one that another site redirects, and one that the speculation rules of any page prefetch
  Sec-Fetch-Site: none ;; ${CHROME} | Sec-Fetch-Site: none ;; Sec-Fetch-Site: none | Sec-Fetch-Mode: navigate
  ${CHROME} | Sec-Fetch-Site: none | Sec-Purpose: prefetch;anonymous-client-ip
  ${CHROME} | Origin: http://gateway | Sec-Fetch-Site: none ;; Upgrade-Insecure-Requests: 1
  # another port is another origin
  Origin: http://gateway:8880 ;; Origin: http://gateway0 ;; Origin: http://a.gateway
  Origin: http://evil.example/gateway ;; Origin: http://evil.example:9000, http://gateway
  # almost an origin on cors
  Origin: https://dash.example ;; Origin: https://dash.example:8443/ ;; ${CHROME} | ${EVIL}`;

/** What over plain http shows a browser only in a GET: an image, a frame, a download and a typed address. */
const BROWSERS_GET = `${CHROME} ;; User-Agent: Mozilla/5.0 ;; ${CHROME} | Sec-Fetch-Mode: navigate
  ${CHROME} | Upgrade-Insecure-Requests: 1 ;; ${CHROME} | Range: bytes=0- ;; ${CHROME} | Accept: */*
  # a WebSocket, of a page of its own too
  ${CHROME} | Connection: Upgrade | Upgrade: websocket | Origin: http://gateway`;

/** Programs, which PowerShell is in spite of its User-Agent: no browser sends a POST without Origin. */
const POWERSHELL = 'User-Agent: Mozilla/5.0 (Windows NT; Windows NT 10.0; de-AT) WindowsPowerShell/5.1.26100.1';

const PROGRAMS_SEND = `Accept: text/html ;; User-Agent: curl/8.14.1 ;; User-Agent: node | Sec-Fetch-Mode: cors
  User-Agent: like Mozilla/5.0 ;; ${CHROME} | Origin: ${DASHBOARD}
  ${CHROME} | Origin: ${DASHBOARD} | Sec-Fetch-Site: cross-site | Sec-Fetch-Mode: cors`;

suite('browsers', SIDE_BY_SIDE, () => {
  for (const [how, config, credential] of BY_ITSELF) {
    // The Host of a row is "gateway".
    const targets = `${RECEIVE} /v2/send?message=x /v1/qrcodelink?device_name=x /v1/accounts /@auth=/v1/accounts
    /v1/about /v1/attachments /v1/attachments/x /swagger/index.html /metrics /no/such/thing`.split(/\s+/);
    const proxied: GatewayConfig = { ...config, trustedProxies: ['127.0.0.1'] };
    for (const each of [config, proxied]) {
      const where = each === proxied ? ', behind a trusted proxy' : '';
      // Each sign at three targets; every target, not behind a proxy, with some of the signs.
      const [some, others] = [targets.slice(0, 3), each === proxied ? [] : targets.slice(3)];
      table(`attack: have a browser send automatically, ${how}${where}`, each)`
        * ${credential} | ${HELLO} → 403 cross_site
        ${PAGES_SEND}
        ${EVIL} | X-Forwarded-Host: evil.example:9000 ;; Origin: null | X-Forwarded-Host: null
        * ${credential} | DELETE /v1/attachments/x → 403 cross_site
        ${CHROME} | ${EVIL} ;; Origin: null
        ${some.map((target) => `* ${credential} | GET ${target} → 403 cross_site`)}
        ${PAGES_SEND}
        ${BROWSERS_GET}
        ${others.map((target) => `* ${credential} | GET ${target} → 403 cross_site`)}
        ${CROSS_SITE} ;; ${EVIL} ;; Origin: null ;; Sec-Fetch-Site: none ;; ${CHROME} | Origin: http://gateway
        ${BROWSERS_GET}
        * ${credential} | HEAD /v1/attachments/x → 403
        ${CHROME} ;; ${CROSS_SITE}`;
    }

    table(`programs and pages of an origin on cors are served, ${how}`, { ...config, allow: ['messaging', 'info'] })`
      * ${credential} | ${HELLO} → 201
      ${PROGRAMS_SEND}
      ${POWERSHELL}
      * ${credential} | DELETE /v1/attachments/x → passes
      ${POWERSHELL}
      * ${credential} | GET ${RECEIVE} → 200
      * ${credential} | GET /v1/about → 200
      * ${credential} | GET /v1/attachments/x → passes
      ${PROGRAMS_SEND}`;

    test(`WebSocket: no page opens one ${how}; other programs do, and an origin on cors until a reload removes it`, async (t) => {
      const own = { ...config, allow: ['receive'] };
      const both = await startReceiving(t, undefined, own);
      const wss = 'Sec-Fetch-Mode: websocket | Sec-Fetch-Site: cross-site';
      // As Python's websocket-client does unless it is told not to. A page of http://gateway can open wss://gateway.
      const itself = 'Origin: http://gateway';
      const refused = [
        CHROME,
        `${CHROME} | ${EVIL}`,
        `${CHROME} | ${EVIL} | ${wss}`,
        `${CHROME} | Origin: null`,
        `${CHROME} | ${itself}`, // Chromium sends no Sec-Fetch-Site with a WebSocket
        `${itself} | Sec-Fetch-Mode: websocket | Sec-Fetch-Site: same-origin`, // Firefox
        `${itself} | ${wss}`,
        'Origin: http://gateway:8880',
        'Origin: http://a.gateway',
        'Origin: null',
        itself,
        'User-Agent: Python/3.13 websockets/15.0 | Origin: https://gateway',
      ];
      for (const row of refused) {
        assertDenied(await declined(t, both.gateway, `${credential} | ${row}`), 403, 'cross_site', both);
      }
      const opened = [
        'Accept: */*',
        `${CHROME} | ${wss} | Origin: ${DASHBOARD}`,
      ].map((row) => wish(t, both.gateway, `${credential} | ${row}`));
      for (const { text } of opened) {
        await until(() => text().includes('\r\n\r\n'));
        assert.match(text(), /^HTTP\/1\.1 101 [^]*^x-request-id: [\w-]{36}\r$/im);
      }
      both.gateway.reload({ ...own, cors: ['https://other.example'] });
      await closed(opened.pop()!.socket);
      await until(() => linesOf(both.gateway, /^websocket closed$/)[0]?.reason === 'no_longer_allowed');
      for (const { socket } of opened) assert.equal(socket.destroyed, false);
    });

    // A page sees whether a frame, a popup or a download navigates, which events fire, and how large a response is.
    test(`attack: tell responses apart from a page; they are the same whatever the path, ${how}`, async (t) => {
      const both = await startBoth(t, { ...config, allow: ['send'] });
      const paths = ['/v1/attachments/x', '/v1/attachments/missing', '/v1/about', '/v1/accounts', '/no/such', RECEIVE];
      const signs = [CROSS_SITE, CHROME, `${CHROME} | Upgrade-Insecure-Requests: 1`, `${CHROME} | Range: bytes=0-`];
      const seen = new Set<string>();
      for (const path of paths) {
        for (const sign of signs) {
          const answer = await ask(both.gateway, { path, headers: fieldsIn(`${credential} | ${sign}`) });
          assertDenied(answer, 403, 'cross_site', both);
          const all = JSON.stringify([answer.status, { ...answer.headers, date: '' }, answer.text]);
          seen.add(all.replaceAll(answer.json.requestId, ''));
        }
      }
      assert.equal(seen.size, 1, [...seen].join('\n'));
    });
  }

  table('a credential that a page must know is accepted from any page', SWITCHED)`
    * ${CHROME} | ${CROSS_SITE} → 201
    bearer | ${HELLO} ;; /v2/send?@auth=${SECRET} | ${HELLO} ;; /@auth=${SECRET}/v2/send | ${HELLO} ;; ${AUTHED(SECRET)}
    GET ${RECEIVE} | bearer → 200`;

  /** Responds with the header that the request's X-Say contains, and with HTML, or 404 for a missing resource. */
  const SAYING: Handler = (req, res) => {
    const [, name, value = ''] = /(.*?): (.*)/.exec(String(req.headers['x-say'])) ?? [];
    const isMissing = req.url!.endsWith('missing') || (value.includes('html') && !/\/(?:x|avatar)$/.test(req.url!));
    const status = isMissing ? 404 : req.headers.range ? 206 : 200;
    req.resume().on('end', () => res.writeHead(status, name ? [name, value] : []).end('hi'));
  };

  const FILES = ['/v1/attachments/x', `/v1/groups/${FROM}/${GROUP}/avatar`, `/v1/contacts/${FROM}/a-uuid/avatar`];

  // Chromium played an attacker's playlist from /@auth=TOKEN/v1/attachments/ID, and fetched what it named, including
  // sends.
  const WHOLE = [RECEIVE, '/v2/send?message=x', '/v1/qrcodelink?device_name=x', '/v1/accounts', '/swagger/index.html']
    .concat(
      '/v1/about',
      '/v1/attachments',
      `/v1/groups/${FROM}/${GROUP}`,
      '/v3/x',
      '/v1/devices/x/y/z',
      // a path without a row, whatever its last segment
      '/v3/avatar',
      '/v1/devices/x/y/avatar',
      '/v1/attachments/a/b',
      '/no/such/thing',
    );

  table('attack: have a media element fetch anything else than a file; with Range it is refused by every method', {
    ...SWITCHED,
    ...tokens({ defaults: { number: FROM, recipients: [TO] }, senders: ['*'], recipients: ['*'] }),
    allow: ['messaging', 'info', 'setup', 'metrics', 'GET /v2/send', 'GET /v3/*', 'GET /v1/devices/*'],
  }, { handler: SAYING })([
    '* Range: bytes=0- → 403 cross_site | reason=range | "Only attachments and avatars"',
    '* range: x → 403 cross_site',
    `* Range: bytes=0- | Origin: ${DASHBOARD} → 403 cross_site | reason=range`,
    ...WHOLE.concat('/metrics').flatMap((target) => [
      `GET ${target} | bearer`,
      `GET ${target} | basic`,
      `GET /@auth=${SECRET}${target}`,
      `GET ${target}${target.includes('?') ? '&' : '?'}@auth=${SECRET}`,
    ]),
    `${HELLO} | bearer ;; ${AUTHED(SECRET)} ;; DELETE /v1/groups/${FROM}/${GROUP} | bearer ;; /metrics | basic`,
    ...['/v1/plugins/avatar', '/v1/plugins/x/avatar', '/swagger/avatar'].map((target) => `GET ${target} | bearer`),
    `* Range: bytes=0- → passes | > Range: bytes=0-`,
    ...FILES.flatMap((file) => [`GET /@auth=${SECRET}${file}`, `GET ${file} | bearer | ${CHROME} | ${CROSS_SITE}`]),
  ]);

  table('attack: have a media element fetch anything else than a file, where no token is needed', OPEN)([
    '* Range: bytes=0- → 403 cross_site | reason=range',
    ...WHOLE.map((target) => `GET ${target}`),
  ]);

  const FROM_ELSEWHERE =
    'a page of another site learns nothing of the endpoint, and a wrong password from there is 401';

  table(FROM_ELSEWHERE, { ...SWITCHED, allow: ['send'] })`
    * basic | ${CROSS_SITE} → 403 cross_site
    /v1/about ;; /v1/accounts ;; /no/such/thing ;; GET /v2/send ;; basic api:${OTHER} → 401 unauthorized`;

  const PUBLIC_HOSTS = `evil.example evil.example:8880 EVIL.example. localhost.evil.example evil-localhost.example
  pi.lan.evil.example pi.home.arpa.evil.example:80 pi.test.example pi.lanes.example notlan.example:80 evil.xlan home.arpa x.notahome.arpa 127.0.0.1.nip.io 127.0.0.1.evil.example:8880 lan.
  dash.example.evil.example other.dash.example ash.example`.split(/\s+/);

  const LOCAL_HOSTS =
    `127.0.0.1:8880 192.168.1.7 [::1]:8880 [fd00::7] localhost:8880 LOCALHOST pi pi.local:8880 PI.Local
  pi.lan pi.home pi.fritz.home pi.localdomain pi.intranet pi.internal host.docker.internal:8880 pi.home.arpa pi.test
  app.localhost:8880 dash.example DASH.example:8880`.split(/\s+/);

  test('attack: point a public name at the gateway (DNS rebinding); without tokens only a local name, one on cors or none is served; with tokens, or behind a trusted proxy, any is', async (t) => {
    const both = await startBoth(t, OPEN);
    const { backend, gateway } = both;
    for (const host of PUBLIC_HOSTS) {
      const own = fieldsIn(`Host: ${host} | ${CHROME} | Origin: http://${host} | Sec-Fetch-Site: same-origin`);
      for (const request of [{ headers: { host } }, { body: MESSAGE, headers: own }]) {
        assertDenied(await ask(gateway, request), 403, 'cross_site', both);
      }
      const wish = `Host: ${host} | Origin: http://${host} | Connection: Upgrade | Upgrade: websocket`;
      const response = await raw(gateway, bytesOf(`GET ${RECEIVE} HTTP/1.1 | ${wish}`));
      assert.deepEqual([statusOf(response), codeOf(response)], [403, 'cross_site'], host);
    }
    assert.equal(backend.connections, 0);
    for (const host of LOCAL_HOSTS) assert.equal((await ask(gateway, { headers: { host } })).status, 200, host);
    assert.equal(statusOf(await raw(gateway, 'GET /v1/about HTTP/1.0\r\n\r\n')), 200);
    assert.equal(backend.seen.length, LOCAL_HOSTS.length + 1);
    const kept = await startGateway(t, backend);
    // A proxy answers for the name under which it is reached.
    const proxied = await startGateway(t, backend, { ...OPEN, trustedProxies: ['127.0.0.1'] });
    for (const host of PUBLIC_HOSTS) {
      assert.equal((await ask(kept, { headers: { ...fieldsIn('basic'), host } })).status, 200, host);
      assert.equal((await ask(proxied, { headers: { host } })).status, 200, host);
      const own = fieldsIn(`Host: ${host} | ${CHROME} | Origin: http://${host}`);
      assert.equal((await ask(proxied, { headers: own })).json.code, 'cross_site', host);
    }
  });

  const ONLY_BEARER =
    'a browser is challenged for a bearer token only, so it asks for no password, which it would remember';

  table(ONLY_BEARER, {})`
    * GET /v1/about → 401 unauthorized | WWW-Authenticate: Bearer realm="signal"
    * GET /v1/accounts → 401 unauthorized | WWW-Authenticate: Bearer realm="signal"
    * ${HELLO} → 401 unauthorized | WWW-Authenticate: Bearer realm="signal"
    Sec-Fetch-Site: none ;; ${EVIL} ;; Upgrade-Insecure-Requests: 1
    * HEAD /v1/about → 401 | WWW-Authenticate: Bearer realm="signal"
    * GET /v1/about → 401 unauthorized | WWW-Authenticate: Bearer realm="signal"
    ${CHROME} ;; User-Agent: Mozilla/5.0 | Connection: Upgrade | Upgrade: websocket
    * GET /v1/about → 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer realm="signal"
    * ${HELLO} → 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer realm="signal"
    Accept: */* ;; User-Agent: Wget/1.25.0 ;; User-Agent: like Mozilla/5.0 ;; Sec-Fetch-Mode: cors
    * ${HELLO} → 401 unauthorized | WWW-Authenticate: Basic realm="signal", Bearer realm="signal"
    ${POWERSHELL}`;

  const CORS = [DASHBOARD, 'https://plain.example'];

  /** No Origin, and the one on `cors` in a different spelling. */
  const NOT_LISTED = `Accept: */* ;; ${EVIL} ;; Origin: null ;; Origin: ;; Origin: * ;;
  Origin: https://DASH.example:8443 ;; Origin: http://dash.example:8443 ;; Origin: https://dash.example ;;
  Origin: https://dash.example:8443/ ;;
  Origin: https://dash.example:8443.evil.example ;; Origin: https://plain.example:443 ;;
  Origin: ${DASHBOARD} | Origin: ${DASHBOARD} ;; Origin: ${DASHBOARD} | ${EVIL} ;;
  Origin: ${DASHBOARD}, http://evil.example:9000`.split(/ ;;\s+/);

  const EXPOSED =
    `Access-Control-Allow-Origin: ${DASHBOARD} | Access-Control-Expose-Headers: Retry-After, X-Request-Id`;

  const HIDDEN = 'Access-Control-Allow-Origin: | Access-Control-Expose-Headers: | Vary:';

  const [GOOD, LISTED] = [`bearer ${OTHER}`, `* Origin: ${DASHBOARD} → ${EXPOSED} | Vary: Origin`];

  const READERS = { ...tokens({ rate: '3/1h' }, {}), cors: CORS, allow: ['send', 'info'], limits: { body: '1KiB' } };

  const READ_ALL = 'a page of an origin on cors may read every response, refusals included, and no other page any';

  table(READ_ALL, READERS)([
    [LISTED, ...NOT_LISTED.map((origin) => `* ${origin} → ${HIDDEN}`)],
    `/v1/health | ${GOOD} → 204 ;; ${HELLO} | ${GOOD} → 201 ;; /v1/about | ${GOOD} → 200
  /.. → 400 bad_target ;; /v1/about | ${GOOD} | ${GOOD} → 400 bad_credential ;; {} | ${GOOD} → passes
  { | ${GOOD} → 400 bad_json ;; /v1/about → 401 unauthorized ;; /v1/about | bearer wrong → 401 unauthorized
  OPTIONS /v2/send → 401 unauthorized ;; /v1/accounts | ${GOOD} → 403 setup_blocked
  GET ${RECEIVE} | ${GOOD} | Connection: Upgrade | Upgrade: websocket → 403 endpoint_not_allowed
  /no/such/thing | ${GOOD} → 404 unknown_endpoint ;; GET /v2/send | ${GOOD} → 405 method_not_allowed
  OPTIONS /v2/send | ${GOOD} → 405 method_not_allowed`,
    LISTED,
    `${sized(1100)} | ${GOOD} → 413 body_too_large ;; {} | ${GOOD} | Content-Encoding: gzip → 415 unsupported_encoding
  bearer → 200 ;; bearer → 200 ;; bearer → 200 ;; bearer → 429 rate_limited`,
  ]);

  const FAILING = { handler: (req: http.IncomingMessage) => void req.socket.destroy() };

  table('a page of an origin on cors may read that the backend failed', { cors: CORS }, FAILING)([
    LISTED,
    'bearer → passes | code=bad_backend_answer',
  ]);

  const OF_PAGES =
    'Allow-Origin Allow-Private-Network Allow-Methods Allow-Headers Allow-Credentials Expose-Headers Max-Age'
      .split(' ').map((name) => `Access-Control-${name}`);

  const NO_PAGE = OF_PAGES.map((name) => `${name}:`).join(' | ');

  table('headers of the backend for pages are dropped, its Vary is not', { cors: [DASHBOARD] }, { handler: SAYING })`
    * bearer | ${EVIL} → 200 | ${NO_PAGE}
    * bearer | Origin: ${DASHBOARD} → 200 | ${NO_PAGE} | ${EXPOSED}
    ${OF_PAGES.map((name) => `X-Say: ${name.replace('A', 'a')}: *`)}
    * bearer | X-Say: Vary: Accept → 200
    ${EVIL} → Vary: Accept ;; Origin: ${DASHBOARD} → Vary: Origin, Accept`;

  /** The headers added to a relayed response to a GET, so that its content does nothing and is not stored. */
  const CSP = "default-src 'none'; style-src 'unsafe-inline'; sandbox";

  const ACTIVE =
    'text/html | image/svg+xml | audio/aac, text/html | audio/aac; a=b, text/html | text/html; audio/aac | video/x+xml'
      .split(' | ');

  table('a relayed response to a GET runs no script, requests nothing and is not stored, whatever the route', {
    ...tokens({}, { defaults: { number: FROM, recipients: [TO] } }),
    allow: ['messaging', 'setup', 'GET /v3/*', 'GET /v2/send', 'GET /swagger/*'],
  }, { handler: SAYING })`
    * bearer → passes | Cache-Control: no-store | Content-Security-Policy: ${CSP} | X-Content-Type-Options: nosniff
    ${ACTIVE.map((type) => `GET /v1/attachments/x | X-Say: Content-Type: ${type} → Content-Type: ${type}`)}
    ${ACTIVE.map((type) => `GET /v3/x | X-Say: content-type: ${type} → Content-Type: ${type}`)}
    GET /swagger/index.html | X-Say: Content-Type: text/html
    GET /v1/attachments/nothing ;; GET /v3/nothing ;; GET /v1/groups/${FROM}/${GROUP}/avatar ;; GET /v1/plugins/x
    bearer ${OTHER} | GET /v2/send?message=x | X-Say: Cache-Control: max-age=60 → Cache-Control: no-store
    GET /v1/attachments/kept | X-Say: Cache-Control: max-age=60 → Cache-Control: max-age=60
    GET /v1/attachments/sound | X-Say: Content-Type: audio/aac → Content-Security-Policy:
    GET /v1/attachments/film | X-Say: content-type: Video/mp4; codecs="avc1" → Content-Security-Policy:
    GET /v1/attachments/picture | X-Say: Content-Type: image/png → Content-Type: image/png
    # browsers obey all of several policies
    GET /v1/attachments/x | X-Say: X-Content-Type-Options: none → X-Content-Type-Options: nosniff
    GET /v1/attachments/x | X-Say: Content-Security-Policy: img-src * → Content-Security-Policy: ${CSP}, img-src *
    * bearer → passes | Cache-Control: | Content-Security-Policy: | X-Content-Type-Options:
    DELETE /v1/attachments/x | X-Say: Content-Type: text/html ;; ${HELLO}`;

  const PLAYLISTS = `audio/mpegurl audio/x-mpegurl application/x-mpegurl Application/vnd.apple.mpegURL
  application/vnd.apple.mpegurl;charset=utf-8 video/mpegurl`.split(/\s+/);

  const SHOWN = 'audio/aac video/mp4 image/png image/jpeg Image/WebP image/gif;a=b'.split(' ');

  const NOT_SHOWN =
    'text/html | image/svg+xml | image/svg | Image/SVG+XML; charset=utf-8 | application/pdf | text/plain | x | audio/x+xml | image/xml'
      .split(' | ');

  for (const file of FILES) {
    const typed = (types: string[], more = ''): string[] =>
      types.map((type) => `GET ${file} | X-Say: Content-Type: ${type} → Content-Type: ${more || type}`);
    table(`a file that is not audio, video or an image is a download, and a playlist is a text: ${file}`, {
      ...tokens({}),
      allow: ['messaging', 'GET /v1/contacts/*', 'GET /v3/*'],
    }, { handler: SAYING })([
      '* bearer → 200 | Content-Disposition: attachment',
      ...typed(NOT_SHOWN),
      ...typed(PLAYLISTS, 'text/plain'),
      `GET ${file} | Range: bytes=0- | X-Say: Content-Type: text/html → 206 | Content-Disposition: attachment`,
      `GET ${file} ;; GET ${file} | X-Say: content-disposition: inline; filename=a.svg`,
      `* bearer → passes | Content-Disposition: | Content-Security-Policy: ${CSP}`,
      ...PLAYLISTS.map((type) => `GET /v3/x | X-Say: Content-Type: ${type} → Content-Type: text/plain`),
      'GET /v1/attachments ;; GET /v3/x | X-Say: Content-Type: text/html',
      '* bearer → passes | Content-Disposition:',
      ...typed(SHOWN),
      'DELETE /v1/attachments/x | X-Say: Content-Type: text/html',
      // Firefox revealed to a page of another site whether a frame navigated, and so which attachments exist.
      'GET /v1/attachments/missing | X-Say: Content-Type: text/html',
    ]);
  }

  test('the last of two Content-Type headers of a response decides whether it is shown', async (t) => {
    const head = 'HTTP/1.1 200 OK | Content-Type: image/png | Content-Type: text/html | Content-Length: 2 | | hi';
    const { gateway } = await startRaw(t, (socket) => void socket.write(barred(head).join('\r\n')), {
      allow: ['messaging'],
    });
    const { headers } = await ask(gateway, { path: '/v1/attachments/x', headers: BEARER });
    assert.equal(headers['content-disposition'], 'attachment');
  });

  test('a preflight of an origin on cors is 204 without a credential, from any address, and neither reaches the backend nor counts toward the rate', async (t) => {
    const elsewhere = { ...SWITCHED, clients: ['10.0.0.0/8'] };
    const limited = { ...OPEN, ...tokens({ rate: '1/1h' }) };
    const names = 'Access-Control-Request-Headers';
    // The same holds for an unknown route and an invalid target, so a page can read the refusal that follows.
    const targets = `/v2/send /no/such/thing /v1/accounts ${RECEIVE} /@auth=${OTHER}/v2/send /@auth=${OTHER}/@auth=x/
    /../v2/send /v1/groups/--help /v1/receive/1 /%zz /v1%2Fabout http://x/v2/send`.split(/\s+/);
    const preflights: [row: string, allowed: string][] = [
      [`/v2/send | ${names}: authorization,content-type`, 'authorization, content-type'],
      [`/v2/send | ${names}: X-Request-Id, Authorization ,accept`, 'authorization, accept, x-request-id'],
      [`/v2/send | ${names}: accept-language | ${names}: content-language`, 'accept-language, content-language'],
      [`/v2/send | ${names}: authorization,x-forwarded-for,cookie,range,content-encoding,expect,*`, 'authorization'],
      ...[`/v2/send | ${names}: x-other`, ...targets].map((row): [string, string] => [row, '']),
    ];
    const methods = 'Access-Control-Allow-Methods: GET, POST, PUT, PATCH, DELETE';
    const own = fieldsIn(`${EXPOSED} | Vary: Origin | Access-Control-Max-Age: 60 | ${methods}`);
    for (const [config, ofSend] of [[OPEN, 201], [limited, 201], [elsewhere, 403]] as const) {
      const { backend, gateway } = await startBoth(t, config);
      for (const [row, allowed] of preflights) {
        const { status, text, headers } = await sendRow(
          gateway,
          parseRow(`OPTIONS ${row} | Origin: ${DASHBOARD} | ${ASKED}`),
        );
        for (const name of ['date', 'connection', 'x-request-id']) delete headers[name];
        assert.deepEqual([status, text], [204, ''], row);
        assert.deepEqual(headers, { ...own, 'access-control-allow-headers': allowed }, row);
      }
      assert.equal(backend.connections, 0);
      assert.doesNotMatch(gateway.log.join(), SECRETS);
      const { method, token, status, level } = requests(gateway)[0];
      assert.deepEqual([method, token, status, level], ['OPTIONS', undefined, 204, 'debug']);
      const send = await ask(gateway, { body: MESSAGE, headers: { ...BEARER, origin: DASHBOARD } });
      assert.deepEqual([send.status, send.headers['access-control-allow-origin']], [ofSend, DASHBOARD]);
    }
  });

  const NAMED_ORIGIN =
    'an origin that is not on cors is named in the log where a credential is missing, and forges no line';

  table(NAMED_ORIGIN, { cors: [DASHBOARD] })([
    `* OPTIONS /v1/about → 401 unauthorized\n* GET /v1/about → 401 unauthorized\n* ${HELLO} → 401 unauthorized`,
    ...[DASHBOARD, `http://api:${OTHER}@new.example`, 'https://a\x9b2J.example', 'a"b level=info \x9b2J\t\xe0', '']
      .map((origin) => `Origin: ${origin} → reason=no_credential | origin=undefined`),
    'Accept: */* → reason=no_credential | origin=undefined',
    ...['https://new.example:8443', 'null', 'https://a"b,level=info', `https://${'x'.repeat(200)}`].flatMap((
      origin,
    ) => [
      `Origin: ${origin} → reason=origin_not_listed | origin=${origin.slice(0, 100)}`,
      `OPTIONS /v1/about | ${ASKED} | Origin: ${origin} → reason=origin_not_listed | origin=${origin.slice(0, 100)}`,
      `GET /v1/about | bearer ${OTHER} | Origin: ${origin} → reason=unknown_token | origin=undefined`,
    ]),
  ]);

  table('an OPTIONS that is not a preflight of an origin on cors is an ordinary request', { cors: CORS })([
    '* OPTIONS /v2/send → 401 unauthorized | Access-Control-Allow-Methods:',
    '* OPTIONS /v2/send | bearer → 405 method_not_allowed | Access-Control-Allow-Methods:',
    ...NOT_LISTED.map((origin) => `${origin} | ${ASKED}`),
    `Origin: ${DASHBOARD}`,
    `POST /v2/send | none | Origin: ${DASHBOARD} | ${ASKED} → 401 unauthorized`,
  ]);
});
