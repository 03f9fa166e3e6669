import { randomUUID } from 'node:crypto';
import { suite } from 'node:test';
import type { GatewayConfig } from '../gateway.ts';
import { statusOf } from './answers.ts';
import { assert, difference, groupsOf, linesOf, requests, until } from './assertions.ts';
import { ANSWERING, ANY_ROUTE, type Handler, startBackend } from './backend.ts';
import { ask, beginSend, open, rawRequest } from './client.ts';
import { CONFINED, tokens } from './configs.ts';
import { type Change, importChanged, SOURCE } from './files.ts';
import { createGateway, KNOWN_ROUTES, parseTarget, RateLimiter } from './gateway.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { settled, startHeld } from './held.ts';
import { ROUTES } from './routes.ts';
import { checkRows, listed, literal, startClocked, table } from './rows.ts';
import {
  ABOUT,
  BEARER,
  FROM,
  GROUP,
  HELLO,
  INTERNAL_ID,
  OTHER,
  otherBits,
  SECRET,
  SEND,
  STRANGER,
  TO,
} from './samples.ts';
import { type Gateway, START_MS, startBoth, startGateway, startHolding } from './start.ts';

/** Entries of allow, and the routes that each opens: group, method and path. */
const OPENED = {
  ...Object.fromEntries(
    KNOWN_ROUTES.filter(({ group }) => group !== 'metrics').map(({ group }) => [group, new RegExp(`^${group}`)]),
  ),
  'messaging': /^(send|receive|messaging)/,
  '* /*,* /v1/*,* /:a/*,GET /v1/:a/:b,* /v1/*/:number,* /:a/:b,* /v1/:a,messaging,info': /^(?!setup)/,
  '* /v1/accounts/*': /^\w+ \w+ \/v1\/accounts\//,
  'GET /v1/accounts,GET /v1/qrcodelink': /GET \/v1\/(accounts|qrcodelink)$/,
};

suite('rules', SIDE_BY_SIDE, () => {
  for (const [allow, opened] of Object.entries(OPENED)) {
    table(`allow opens only its routes, and no wildcard opens setup: ${allow}`, { allow: allow.split(',') }, ANSWERING)(
      [
        '* bearer',
        ROUTES.map(({ group, method, path }) => {
          const refusal = group === 'setup' ? '403 setup_blocked' : '403 endpoint_not_allowed';
          const result = opened.test(`${group} ${method} ${path}`) ? `200 | ${method} ${path}` : refusal;
          return `${method} ${path}${method === 'GET' ? '' : ' | {}'} → ${result}`;
        }),
      ],
    );
  }

  test("the table of routes matches the backend's, each in its group and with its facts, and its rows state only facts that the code uses", () => {
    const list = 'test/fixtures/routes.txt';
    const found = ROUTES.map(({ group, method, path }) => {
      const { route } = parseTarget(method, path);
      assert.equal(route?.group, group, `the group in ROUTES of gateway.ts, where ${list} has ${method} ${path}`);
      return route!;
    });
    const others = KNOWN_ROUTES.filter((route) => !found.includes(route));
    const own = others.map(({ method, template, facts }) => [method, template, ...facts].join(' '));
    const daemon = [
      'GET /api/v1/check no-slot no-account',
      'GET /api/v1/events no-slot query-account',
      'POST /api/v1/rpc any-body to-groups to-names same-members no-account waits',
    ];
    assert.deepEqual(own, [...daemon, 'GET /metrics no-slot'], `the rows of ROUTES in gateway.ts that ${list} lacks`);
    const wrong = ROUTES.flatMap(({ method, path, facts }, i) =>
      difference(`the row of ${method} ${path} in ROUTES`, found[i]!.facts, list, facts)
    );
    assert.deepEqual(wrong, [], `the facts of a route; the head of ${list} has where each comes from`);
    const said = KNOWN_ROUTES.flatMap(({ facts }) => facts);
    const asked = groupsOf(SOURCE, /\bdeclares\([^()]*, '([a-z-]+)'\)/g);
    assert.deepEqual(difference('a row of ROUTES', said, 'a call of declares()', asked), []);
  });

  /** Starts a gateway from a copy of gateway.ts whose table has more routes, added as documented. */
  async function startWithRoutes(t: TestContext, rows: string[], config: GatewayConfig, handler: Handler = ANY_ROUTE) {
    const added: Change = [
      '  messaging: [\n',
      (text) => text + rows.map((row) => `    ${JSON.stringify(row.split(' '))},\n`).join(''),
    ];
    const { createGateway } = await importChanged(t, added);
    const backend = await startBackend(t, handler);
    return { backend, gateway: await startGateway(t, backend, config, {}, createGateway) };
  }

  // POST …/:groupid/link, added as documented, gave a group's link to a token with `recipients`.
  test('a route added to the table has every restriction until its row lifts it: it changes groups, is for persons by number or UUID, shows all accounts, takes no large body', async (t) => {
    const group = `/v1/groups/${FROM}/${GROUP}`;
    const large = `{"x":"${'x'.repeat(70_000)}"}`;
    const [strict, open] = ['', ' any-body same-members to-groups to-names no-account'];
    const ofGroups = `@ ${JSON.stringify({ recipients: ['group.*'] })} | bearer`;
    const ofSender = `@ ${JSON.stringify({ senders: [FROM] })} | bearer`;
    for (const facts of [strict, open]) {
      const result = (refusal: string): string => facts === strict ? `403 ${refusal}` : '200';
      const rows = ['POST /v1/groups/:number/:groupid/link', 'GET /v1/new-things', 'POST /v1/new-things'].map((row) =>
        row + facts
      );
      const both = await startWithRoutes(t, rows, { allow: ['messaging'] });
      await checkRows(both, [
        `${ofGroups} | POST ${group}/link | {} → ${result('endpoint_not_allowed | reason=group_change_not_named')}`,
        `${ofSender} | GET /v1/new-things → ${result('endpoint_not_allowed | reason=route_without_account')}`,
        `bearer | POST /v1/new-things | {"recipient":"${GROUP}"} → ${facts === strict ? '400 bad_field' : '200'}`,
        `bearer | POST /v1/new-things | {"recipient":"name.01"} → ${facts === strict ? '400 bad_field' : '200'}`,
        `bearer | POST ${group}/link → 200 ;; bearer | POST /v1/new-things | {"a":1} → 200`,
        `bearer | POST /v1/new-things | ${large} → ${facts === strict ? '413 body_too_large' : '200'}`,
      ]);
    }
  });

  test('a path without a row needs a slot, like a row that does not state otherwise', async (t) => {
    for (const path of ['/v1/new', '/v1/attachments']) {
      const { backend, gateway } = await startHeld(t, 1, { allow: ['GET /v1/new', 'messaging'] });
      const both = [path, path].map((path) => ask(gateway, { path, headers: BEARER }));
      await until(() => backend.acting === 1);
      await settled(gateway);
      assert.equal(backend.seen.length, 1, `${path}: one of two has the only slot`);
      backend.answer();
      await until(() => backend.acting === 1);
      backend.answer();
      await Promise.all(both);
      assert.equal(backend.most, 1);
    }
  });

  test('the body of a path without a row streams, and may name groups', async (t) => {
    const { backend, gateway } = await startBoth(t, { allow: ['POST /v1/new'] });
    const body = JSON.stringify({ recipients: [GROUP], x: 'x'.repeat(100_000) });
    const request = beginSend(gateway, BEARER, '/v1/new');
    request.on('error', () => {}).write(body.slice(0, 90_000));
    await until(() => backend.seen.length === 1, 'the backend to get the request before its end');
    request.end(body.slice(90_000));
    await until(() => backend.seen[0]!.complete);
    assert.equal(String(backend.seen[0]!.body), body);
  });

  const NEW_ROUTES = ['/v1/register', '/v1/devices/x/y/z', '/v1/accounts/new/thing', '/v1/plugins'];

  const ALL_BUT_SETUP = { allow: ['* /*', 'messaging', 'GET /v1/accounts'] };

  table('a new upstream route below a setup prefix is setup, although it is in no table', ALL_BUT_SETUP)`
    * bearer → 403 setup_blocked
    ${NEW_ROUTES.map((path) => `GET ${path} ;; DELETE ${path} ;; OPTIONS ${path} ;; PROPFIND ${path}`)}
    POST /v1/accounts | {}`;

  const NO_ENDPOINTS = `
  * bearer → 404 unknown_endpoint | Allow:
  POST / → route=/ ;; POST /send → route=/send | "POST to /v2/send" ;; POST /api/v2/send → route=/api/v2/send
  POST /api/v2/rpc → route=/api/v2/rpc ;; GET /v1/receive/${FROM}/x → route=/v1/receive/*/*
  GET /${'v1/'.repeat(3000)} → route=/v1${'/v1'.repeat(7)}
  * bearer → 405 method_not_allowed
  GET /v2/send → Allow: POST | route=/v2/send | "This endpoint accepts POST, but not GET. To send by GET, a token needs \\"GET /v2/send\\" in its \\"allow\\", and \\"defaults\\" or \\"message\\".","
  @ {"defaults":{}} | GET /v2/send?message=x → Allow: POST | route=/v2/send | "a token needs \\"GET /v2/send\\" in its \\"allow\\""
  PUT /v2/send?message=x → Allow: POST | route=/v2/send | "accepts POST, but not PUT.","
  HEAD /v1/about → Allow: GET | route=/v1/about ;; OPTIONS /v2/send → Allow: POST | route=/v2/send
  PATCH /v1/groups/${FROM} → Allow: GET, POST | route=/v1/groups/* | "accepts GET, POST, but not PATCH.","`;

  table(
    'with a token, an unknown endpoint is 404, and an unknown method 405 with the known ones; without a token, both are 401',
    {
      allow: ['messaging', 'setup', 'GET /v1/new/*'],
    },
  )`${NO_ENDPOINTS}
    PATCH /v1/devices/${FROM}/local-data → Allow: DELETE | route=/v1/devices/*/local-data
    PUT /v1/contacts/${FROM}/sync → Allow: GET, POST | route=/v1/contacts/*/sync
    OPTIONS /v1/plugins/mine → Allow: GET, POST, PUT, PATCH, DELETE | route=/v1/plugins/*
    * bearer → 404 unknown_endpoint | Allow:
    GET /v1/new → route=/v1/* ;; POST /v1/new/x → route=/v1/*/* ;; GET /v1/accounts/${FROM} → route=/v1/accounts/*
    # To others it is all the same, but the log knows the route.
    * → 401 unauthorized | Allow:
    GET /v1/new → route=/v1/* ;; POST / → route=/ ;; GET /v1/accounts/${FROM} → route=/v1/accounts/*
    PATCH /v1/groups/${FROM} → route=/v1/groups/* ;; OPTIONS /v1/plugins/mine → route=/v1/plugins/*`;

  table('a token for few endpoints gets the same 404 and 405', { allow: ['info'] })`${NO_ENDPOINTS}
    * bearer → 403 endpoint_not_allowed
    GET /v1/attachments → "not use this endpoint; the word \"messaging\" in its \"allow\" opens it.","
    GET /v1/receive/${FROM} → "the word \"receive\" in its" ;; ${HELLO} → "the word \"send\" in its"`;

  /** A pattern in a token's allow, and requests. */
  const PATTERNS = `
  * bearer → 200
  GET /v1/groups/:number ? GET /v1/groups/${FROM} ;; * /v1/groups/* ? DELETE /v1/groups/${FROM}/${GROUP}
  * /v1/groups/* ? PATCH /v1/groups/a/b/c ;; GET /v1/*/x ? GET /v1/new/x ;; GET /v1/new/:number ? GET /v1/new/${FROM}
  GET /v1/new/:any ? GET /v1/new/12 ;; GET /v1/new/:groupid ? GET /v1/new/${GROUP}
  GET /v1/new/constructor ? GET /v1/new/constructor
  DELETE /v1/devices/:number/:deviceId ? DELETE /v1/devices/${FROM}/2
  DELETE /v1/devices/:number/* ? DELETE /v1/devices/${FROM}/local-data
  DELETE /v1/devices/:number/local-data ? DELETE /v1/devices/${FROM}/local-data
  * /v1/plugins/:name ? GET /v1/plugins/mine ;; GET /v1/groups/${FROM} ? GET /v1/groups/%2B${FROM.slice(1)}
  * bearer → 403
  GET /v1/groups/:number ? POST /v1/groups/${FROM} & GET /v1/groups/${FROM}/${GROUP}
  # What a route spells is not a parameter: local-data deletes all of an account's data.
  DELETE /v1/devices/:number/:deviceId ? DELETE /v1/devices/${FROM}/local-data & DELETE /v1/devices/${FROM}/local%2Ddata
  POST /v1/polls/:number/:any ? POST /v1/polls/${FROM}/vote ;; GET /v1/:any ? GET /v1/about
  GET /v1/About ? GET /v1/about ;; GET /v1/groups/${FROM} ? GET /v1/groups/+15550100009
  * bearer → 404
  * /v1/groups/* ? GET /v1/groups ;; GET /v1/*/x ? GET /v1/new/more/x ;; GET /v1/new/:number ? GET /v1/new/12
  GET /v1/new/:groupid ? GET /v1/new/group.QUJD ;; GET /v1/about ? GET /v1/ABOUT
  * bearer → 405
  * /v1/groups/* ? HEAD /v1/groups/a & OPTIONS /v1/groups/a`;

  table('patterns: literals, parameters, wildcards and methods', {}, ANSWERING)(
    PATTERNS.replace(
      /(\S+ \S+) \? (.*?)(?= ;; |$)/gm,
      (_, pattern, requests: string) =>
        requests.split(' & ').map((request) => `@ {"allow":["${pattern}"]} | ${request}`).join('\n'),
    ),
  );

  table('the default allows sending and info, and nothing more', {})`
    * bearer → 200
    GET /v1/about ;; GET /v1/health → 204 ;; ${HELLO} → 201 ;; POST /v1/send | ${HELLO} → 201
    GET /v1/receive/${FROM} → 403 ;; GET /v1/attachments → 403 ;; POST /api/v1/rpc | {} → 403 ;; GET / → 404`;

  test('a lower-case method, TRACE and CONNECT never reach the backend', async (t) => {
    const { backend, gateway } = await startBoth(t, { allow: ['* /*', 'send', 'info'] });
    for (const method of ['get', 'post', 'TRACE', 'CONNECT', 'PROPFIND', 'HEAD']) {
      const response = await rawRequest(gateway, '/v1/about', { method, headers: [`Authorization: Bearer ${SECRET}`] });
      assert.ok([400, 405, NaN].includes(statusOf(response)), `${method}: ${response}`);
    }
    assert.equal(backend.seen.length, 0, 'the backend saw a request');
  });

  // A wildcard counted as naming the route explicitly.
  table("attack: read all accounts' attachments by a route without an account; a pattern that names it opens it", {
    ...tokens({ senders: [FROM] }),
  })`
    * bearer | @ {"allow":["messaging","info"]} → 403 endpoint_not_allowed
    * bearer | @ {"allow":["GET /v1/*","GET /*","GET /:a/:b/:c"]} → 403 endpoint_not_allowed
    GET /v1/attachments ;; GET /v1/attachments/abc ;; DELETE /v1/attachments/abc
    GET /v1/search?numbers=%2B15550100009
    * bearer | @ {"allow":["setup"]} → 403 endpoint_not_allowed
    GET /v1/accounts ;; GET /v1/qrcodelink?device_name=x ;; GET /v1/configuration
    * bearer | @ {"allow":["info","GET /v1/attachments/:attachment","GET /v1/accounts"]} → passes
    GET /v1/about → 200 ;; GET /v1/attachments/abc ;; GET /v1/accounts ;; GET /v1/attachments → 403 endpoint_not_allowed`;

  table('attack: use an unknown route that a pattern opens, with a token that has senders or recipients', {
    allow: ['* /*', 'POST /v1/plugins/*', 'POST /v3/send'],
  })`
    * bearer | @ {"senders":["${FROM}"],"recipients":["${TO}"]} → 403 endpoint_not_allowed
    * bearer | @ {"senders":["${FROM}"]} → 403 endpoint_not_allowed
    * bearer | @ {"recipients":["${TO}"]} → 403 endpoint_not_allowed
    POST /v3/send | ${HELLO} ;; POST /v1/plugins/mine | ${HELLO} ;; GET /v1/new/${FROM} ;; PATCH /v1/groups/${FROM}`;

  table('attack: use setup in another spelling, or through the default of a token with its own list', {
    ...{ allow: ['setup'], ...tokens({ allow: ['messaging', 'info', '* /*', '* /v1/*'] }) },
  })`
    * bearer | POST / → 403 setup_blocked ;; * bearer | DELETE / → 403 setup_blocked
    * bearer | POST / | X-HTTP-Method-Override: GET → 403 setup_blocked
    /v1/register/${FROM} ;; //v1/register/${FROM} ;; /v1//register/${FROM}/ ;; /%76%31/%72egister/${FROM}
    /v1/register/%2B${FROM.slice(1)} ;; /v1/register/${FROM}?x=/v2/send ;; /v1/unregister/${FROM}
    /v1/devices/${FROM}/local%2Ddata ;; /v1/accounts ;; /v1/configuration ;; /v1/plugins/x
    # A proxy behind the gateway may fold case.
    /V1/REGISTER/${FROM} ;; /v1/Register/${FROM} ;; /V1/qrcodeLink
    # What is no route is none.
    * bearer | @ {"allow":["messaging","info"]} → 404 unknown_endpoint
    POST /v1/register;x/${FROM} ;; POST /v1/about;/register`;

  const TYPING = `PUT /v1/typing-indicator/${FROM}`;

  const GROUPS = `/v1/groups/${FROM}`;

  /** Fields of a send other than its recipients. */
  const SAID = `"message":"hello","number":"${FROM}"`;

  table('a confined token works for its intended requests', CONFINED)`
    * bearer → 201
    GET /v1/about → 200 ;; ${HELLO} ;; {${SAID},"recipients":["${TO}","${GROUP}"]} ;; {${SAID},"recipient":"${GROUP}"}
    GET /v1/receive/${FROM} → 200 ;; GET /v1/receive/%2B${FROM.slice(1)} → 200
    ${TYPING} | {"recipient":"${TO}"} → 204 ;; GET ${GROUPS}/${GROUP} → 200
    POST /v1/polls/${FROM}/vote | {"recipient":"${TO}","poll_timestamp":"1","selected_answers":[1]} → passes
    # What is not on "recipients" may not be written to, but read.
    @ {"recipients":["${TO}"]} | GET ${GROUPS}/${GROUP} → 200
    @ {"recipients":["${TO}"]} | GET ${GROUPS}/${GROUP}/avatar → 200`;

  table('attack: send as another account, or read one', CONFINED)`
    * bearer → 403 sender_not_allowed
    {"number":"${STRANGER}","recipients":["${TO}"]} ;; POST /v1/send | {"number":"${STRANGER}","recipients":["${TO}"]}
    {"number":"${FROM} ","recipients":["${TO}"]} ;; {"number":"${FROM.slice(1)}","recipients":["${TO}"]}
    {"\u006eumber":"\u002b15559999999","recipients":["${TO}"]} ;; POST /v1/reactions/${STRANGER} | ${HELLO}
    GET /v1/receive/${STRANGER} ;; GET /v1/receive/%2B${STRANGER.slice(1)} ;; GET /%76%31/receive/${STRANGER}
    GET //v1//receive//${STRANGER}/ ;; GET /v1/groups/${STRANGER} ;; GET /v1/search/${STRANGER}?numbers=%2B1`;

  table('attack: hide another sender or recipient behind an allowed one', CONFINED)`
    * bearer → 400 bad_field
    {"Number":"${STRANGER}",${HELLO.slice(1)} ;; {"number":"${STRANGER}",${HELLO.slice(1)}
    {"NUMBER":"${STRANGER}",${HELLO.slice(1)} ;; {"\u006eumber":"${STRANGER}",${HELLO.slice(1)}
    {"Recipients":["${STRANGER}"],${HELLO.slice(1)} ;; {"recipients":["${STRANGER}"],${HELLO.slice(1)}
    {"recipient":["${STRANGER}"],${HELLO.slice(1)} ;; {"recipient\u017f":["${STRANGER}"],${HELLO.slice(1)}
    {"recipientſ":["${STRANGER}"],${HELLO.slice(1)} ;; {"Recipient":"${STRANGER}",${HELLO.slice(1)}
    {"number":"${FROM}","recipients":"${STRANGER}"}`;

  /** Every route by its pattern, which also opens what a token with lists may use only by name. */
  const EACH_ROUTE: GatewayConfig = {
    ...CONFINED,
    allow: KNOWN_ROUTES.map(({ method, template }) => `${method} ${template}`),
  };

  // signal-cli-api, a backend in Rust, hands the body on to signal-cli, which reads all of these.
  table(
    'attack: reach somebody by a field that the gateway does not know, on every route that takes a body',
    EACH_ROUTE,
  )(
    ROUTES.filter(({ method, path }) => method !== 'GET' && !path.includes('/plugins/')).flatMap(({ method, path }) => [
      `* bearer | ${method} ${path} → 400 bad_field | "so only a token without"`,
      `{"groupId":"x"} → detail=The field "groupid" is unknown to the gateway, so only a token without "senders", "recipients" and "defaults" may use it.`,
      '{"account":"x"} ;; {"noteToSelf":true} ;; {"attachment":["x"]} ;; {"usernames":["x"]} ;; {"__proto__":"x"} ;; {"":1}',
    ]),
  );

  table(
    'attack: the same where another route knows the field, within an object, in a list, or beside a large attachment',
    EACH_ROUTE,
  )`
    * bearer → 400 bad_field | "so only a token without"
    {"username":"max.01",${HELLO.slice(1)} ;; {"is_group":true,${HELLO.slice(1)} ;; {"uri":null,${HELLO.slice(1)}
    {"mentions":[{"start":0,"length":1,"author":"x","recipient":"x"}],${HELLO.slice(1)} ;; {"mentions":{"a":1},${
    HELLO.slice(1)
  }
    {"link_preview":{"url":"x","title":"x","thumbnail":"x"},${HELLO.slice(1)} ;; {"link_preview":{"number":"x"},${
    HELLO.slice(1)
  }
    {"quote_mentions":[[{"name":1}]],${HELLO.slice(1)} ;; {"base64_thumbnail":"x",${HELLO.slice(1)}
    POST /v1/groups/${FROM} | {"name":"x","permissions":{"add_members":"only-admins","x":1}}
    # The fields that are checked in a body are no parameters.
    POST /v2/send?recipients=%2B15559999999 | ${HELLO} ;; POST /v2/send?Recipient%73=x | ${HELLO} ;; POST /v2/send?number=x | ${HELLO}
    # In a name there may be a number or a secret.
    {"${STRANGER}":1,${HELLO.slice(1)} → "The field \"…\"" ;; {"${'x'.repeat(40)}":1,${
    HELLO.slice(1)
  } → "The field \"…\""
    {"${'x'.repeat(5000)}":1,${HELLO.slice(1)} ;; {"\u0067roupId":1,${HELLO.slice(1)}
    GET /v1/receive/${FROM}?timeout=1&account=x ;; GET /v1/receive/${FROM}?Timeouts=1 ;; GET /v1/about?=
    PUT /v1/typing-indicator/${FROM}?recipient=x | {"recipient":"${TO}"} ;; POST /v2/send?timeout=1 | ${HELLO}`;

  table(
    'a field that the backend reads passes in every spelling that it reads, and any field of a token without lists',
    {
      allow: ['messaging'],
    },
  )`
    * bearer → 201 ;; * @ {"senders":["${FROM}"],"recipients":["${TO}"]} | bearer → 201
    {"Message":"hello","number":"${FROM}","recipients":["${TO}"],"TEXT_MODE":"styled","notify_\u017felf":true}
    {${SAID},"recipients":["${TO}"],"mentions":[{"start":0,"length":1,"author":"${STRANGER}"}],"view_once":false}
    {${SAID},"recipients":["${TO}"],"link_preview":{"url":"https://x.example","Title":"x","base64_thumbnail":"QQ=="}}
    {${SAID},"recipients":["${TO}"],"quote_mentions":null,"quote_author":{"x":{"y":1}}}
    POST /v1/send | {${SAID},"recipients":["${TO}"],"is_group":false}
    * bearer → 201
    {${SAID},"recipients":["${TO}"],"groupId":"x","x":{"y":[{"z":1}]},"link_preview":{"z":1}}
    GET /v1/receive/${FROM}?account=x → 200`;

  // As the backend's structs have them.
  table('a confined token may use every field and parameter that the backend reads', EACH_ROUTE, ANSWERING)`
    * bearer → 200
    POST /v1/send | {${SAID},"recipients":["${TO}"],"base64_attachment":"QQ==","is_group":true}
    ${TYPING} | {"recipient":"${TO}"} ;; GET /v1/search?numbers=%2B1 ;; GET /v1/search/${FROM}?numbers=%2B1&numbers=%2B2
    GET /v1/receive/${FROM}?timeout=1&max_messages=1&ignore_attachments=true&ignore_stories=true
    GET /v1/receive/${FROM}?ignore_avatars=true&ignore_stickers=true&send_read_receipts=true
    POST /v1/reactions/${FROM} | {"recipient":"${TO}","reaction":"x","target_author":"x","timestamp":1}
    POST /v1/receipts/${FROM} | {"recipient":"${TO}","receipt_type":"read","timestamp":1}
    DELETE /v1/remote-delete/${FROM} | {"recipient":"${TO}","timestamp":1}
    POST /v1/polls/${FROM} | {"recipient":"${TO}","question":"x","answers":["x"],"allow_multiple_selections":true}
    DELETE /v1/polls/${FROM} | {"recipient":"${TO}","poll_timestamp":"1"}
    POST /v1/polls/${FROM}/vote | {"recipient":"${TO}","poll_author":"x","poll_timestamp":"1","selected_answers":[1]}
    POST /v1/sticker-packs/${FROM} | {"pack_id":"x","pack_key":"x"}
    GET ${GROUPS}?expand=true ;; GET ${GROUPS}/${GROUP}?expand=true
    POST ${GROUPS} | {"name":"x","members":["${TO}"],"description":"x","group_link":"x","expiration_time":1}
    PUT ${GROUPS}/${GROUP} | {"base64_avatar":"x","description":"x","name":"x","expiration_time":1,"group_link":"x"}
    PUT ${GROUPS}/${GROUP} | {"permissions":{"add_members":"x","edit_group":"x","send_messages":"x"}}
    POST ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]} ;; POST ${GROUPS}/${GROUP}/members | {"members":["${TO}"]}
    POST ${GROUPS}/${GROUP}/pin-message | {"target_author":"x","timestamp":1,"duration":1}
    POST /v1/configuration | {"logging":{"Level":"info"}} ;; POST /v1/configuration/${FROM}/settings | {"trust_mode":"x"}
    POST /v1/register/${FROM} | {"use_voice":true,"captcha":"x"} ;; POST /v1/register/${FROM}/verify/1 | {"pin":"x"}
    POST /v1/unregister/${FROM} | {"delete_account":true,"delete_local_data":true}
    GET /v1/qrcodelink?device_name=x&qrcode_version=10 ;; GET /v1/qrcodelink/raw?device_name=x
    POST /v1/accounts/${FROM}/rate-limit-challenge | {"challenge_token":"x","captcha":"x"}
    PUT /v1/accounts/${FROM}/settings | {"discoverable_by_number":true,"share_number":true}
    POST /v1/accounts/${FROM}/username | {"username":"x"} ;; POST /v1/accounts/${FROM}/pin | {"pin":"x"}
    POST /v1/devices/${FROM} | {"uri":"x"} ;; DELETE /v1/devices/${FROM}/local-data | {"ignore_registered":true}
    PUT /v1/profiles/${FROM} | {"name":"x","base64_avatar":"x","about":"x"}
    PUT /v1/identities/${FROM}/trust/1 | {"verified_safety_number":"x","trust_all_known_keys":true}
    GET /v1/contacts/${FROM}?all_recipients=true ;; GET /v1/contacts/${FROM}/x?all_recipients=true
    PUT /v1/contacts/${FROM} | {"recipient":"${TO}","name":"x","expiration_in_seconds":1}`;

  test('an unknown field is told only to a token, and the backend never has a complete document with one', async (t) => {
    const { backend, gateway } = await startBoth(t, CONFINED);
    const pad = (bytes: number): string => `"message":"${'x'.repeat(bytes)}"`;
    for (
      const where of [
        `{"groupId":"x",${pad(200_000)}`,
        `{${pad(90_000)},"groupId":"x",${pad(90_000)}`,
        `{${pad(200_000)},"groupId":"x"`,
      ]
    ) {
      const body = `${where},"number":"${FROM}","recipients":["${TO}"]}`;
      const without = await ask(gateway, { body, headers: { authorization: 'Bearer wrong' } });
      assert.deepEqual([without.status, without.text.includes('groupId')], [401, false]);
      const answer = await ask(gateway, { body, headers: BEARER });
      assert.deepEqual([answer.status, answer.json.code], [400, 'bad_field'], answer.text);
    }
    assert.deepEqual([backend.sent, backend.seen.filter(({ complete }) => complete)], [[], []]);
  });

  // The backend would choose one for /v1/send.
  table('attack: send without naming an account', CONFINED)`
    * POST /v1/send | bearer → 400 bad_field ;; * POST /v2/send | bearer → 400 bad_field
    {"recipients":["${TO}"]} ;; {"recipients":["${TO}"],"number":null} ;; {"recipients":["${TO}"],"number":""}
    {"recipients":["${TO}"],"link_preview":{"number":"${FROM}"}}
    none | {"recipients":["${TO}"],"auth":"${SECRET}"} ;; {}`;

  const AMONG_MANY = [...Array<string>(500).fill(TO), STRANGER, ...Array<string>(500).fill(TO)].join('","');

  table(
    'attack: send to another recipient, in any place that the backend reads, or pass a person off as a group',
    CONFINED,
  )`
    * bearer → 403 recipient_not_allowed
    {${SAID},"recipients":["${STRANGER}"]} ;; {${SAID},"recipients":["${TO}","${STRANGER}"]}
    {${SAID},"recipients":["${AMONG_MANY}"]} ;; {${SAID},"recipients":["${TO} "]}
    {${SAID},"recipients":["${TO.slice(0, 4)} ${TO.slice(4)}"]} ;; {${SAID},"recipients":["somebody.01"]}
    {${SAID},"recipients":["${randomUUID()}"]} ;; {${SAID},"recipients":["group"]} ;; {${SAID},"recipients":["Group.QUJD"]}
    {${SAID},"recipients":["${GROUP.toUpperCase()}"]} ;; {${SAID},"recipients":[" ${GROUP}"]}
    {"recipient":"${STRANGER}",${HELLO.slice(1)} ;; {${SAID},"recipient":"${STRANGER}"}
    POST /v1/send | {${SAID},"recipients":["${STRANGER}"]} ;; ${TYPING} | {"recipient":"${STRANGER}"}
    POST /v1/polls/${FROM} | {"recipient":"${STRANGER}","answers":["a"]}`;

  const NAMING = ['messaging', 'info', '* /v1/groups/*'];

  const NAMES_GROUPS = `@ ${JSON.stringify({ allow: NAMING })}`;

  // With an invitation link anyone can join a group, and read what is sent there.
  table('attack: let a stranger into a group, or add one using a token whose pattern names the route', CONFINED)`
    * bearer → 403 endpoint_not_allowed
    POST ${GROUPS} | {"name":"x","members":["${TO}"],"group_link":"enabled"}
    POST ${GROUPS} | {"name":"x","group_link":"enabled"} ;; PUT ${GROUPS}/${GROUP} | {"group_link":"enabled"}
    PUT //v1/groups/${FROM}/${GROUP}/ | {"permissions":{"add_members":"every-member"}}
    POST ${GROUPS}/${GROUP}/members | {"members":["${TO}"]} ;; DELETE ${GROUPS}/${GROUP}/members | {"members":["${TO}"]}
    POST ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]} ;; DELETE ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]}
    * bearer | ${NAMES_GROUPS} → 403 recipient_not_allowed
    POST ${GROUPS} | {"name":"x","members":["${TO}","${STRANGER}"]}
    POST ${GROUPS}/${GROUP}/members | {"members":["${STRANGER}"]} ;; POST ${GROUPS}/${GROUP}/admins | {"admins":["${STRANGER}"]}`;

  table('a token without recipients may change a group, and so may one whose pattern names the route', {
    ...{ ...CONFINED, tokens: { ...CONFINED.tokens!, other: { secret: OTHER } } },
  }, ANSWERING)`
    * bearer ${OTHER} → 200
    * bearer | ${NAMES_GROUPS} → 200
    POST ${GROUPS} | {"name":"x","members":["${TO}"],"group_link":"enabled"} ;; POST ${GROUPS} | {"name":"x","members":null}
    PUT ${GROUPS}/${GROUP} | {"group_link":"enabled"} ;; POST ${GROUPS}/${GROUP}/members | {"members":["${TO}"]}
    DELETE ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]}`;

  table('a token with recipients, and without senders, changes no group unless its pattern names the route', {
    ...{ ...CONFINED, ...tokens({ recipients: [TO, 'group.*'] }) },
  }, ANSWERING)`
    * bearer → 403 endpoint_not_allowed
    * bearer | ${NAMES_GROUPS} → 200
    POST ${GROUPS} | {"name":"x","members":["${TO}"]} ;; PUT ${GROUPS}/${GROUP} | {"group_link":"enabled"}
    POST ${GROUPS}/${GROUP}/members | {"members":["${TO}"]} ;; POST ${GROUPS}/${GROUP}/admins | {"admins":["${TO}"]}`;

  const ONE_RECIPIENT = { ...CONFINED, ...tokens({ recipients: [TO] }) };

  const sendTo = (name: string): string =>
    `{${SAID},"recipients":["${TO}","${name}"]} ;; ${TYPING} | {"recipient":"${name}"}`;

  const ITS_LIST = literal`its list (\"recipients\", or else those in \"defaults\").`;

  table(
    'recipient_not_allowed names the kind of the refused recipient, also in a path, but never the recipient',
    ONE_RECIPIENT,
  )`
    * bearer → 403 recipient_not_allowed | "one of these recipients: a phone number that is not on ${ITS_LIST}","code""
    ${sendTo(STRANGER)}
    * bearer → 403 recipient_not_allowed | "${ITS_LIST} Write a phone number as \"+\" and digits only, such"
    ${[STRANGER.slice(1), '+1 555 999 9999', '+1 (555) 999-9999', '0555/9999'].map(sendTo)}
    * bearer → 403 recipient_not_allowed | "one of these recipients: a UUID that is not on ${ITS_LIST}","code""
    ${['0a1b2c3d-0405-4607-8809-0a0b0c0d0e0f', '0A1B2C3D-0405-4607-8809-0A0B0C0D0E0F'].map(sendTo)}
    * bearer → 403 recipient_not_allowed | "one of these recipients: a user name that is not on ${ITS_LIST}","code""
    {${SAID},"recipients":["${TO}","somebody.01"]} ;; POST /v1/polls/${FROM} | {"recipient":"somebody.01"}
    * bearer → 403 recipient_not_allowed | "one of no known kind (phone number, user name such as name.01, UUID, group) "
    ${['Mum', 'Group.01', '0664x', 'somebody'].map(sendTo)}
    * bearer → 403 recipient_not_allowed | "one of these recipients: a group that is not on ${ITS_LIST}","code""
    ${sendTo(GROUP)} ;; DELETE ${GROUPS}/${GROUP} ;; POST ${GROUPS}/${GROUP}/join
    POST ${GROUPS}/${GROUP}/pin-message | {"target_author":"${TO}","timestamp":1}`;

  table(
    'sender_not_allowed explains how to write a number, if it was written differently',
    tokens({ senders: [FROM] }),
  )`
    * bearer → 403 sender_not_allowed
    {"message":"x","number":"${STRANGER}","recipients":["${TO}"]} → "the number in \"defaults\").","
    {"message":"x","number":"${
    FROM.slice(1)
  }","recipients":["${TO}"]} → "\"defaults\"). Write a phone number as \"+\" and digits"
    {"message":"x","number":"+1 555 0100001","recipients":["${TO}"]} → "\"defaults\"). Write a phone number as \"+\" and digits"`;

  const groupOf = (id: string): string => `group.${Buffer.from(id).toString('base64')}`;

  // Reactions decode leniently and pass the result to signal-cli as an argument (here "--username=evil.01"); receipts
  // and remote-delete make a phone number from the digits.
  const NO_GROUPS = [
    ...'LS11c2VybmFtZT1ldmlsLjAx,436641234567x,66412345a,01,123456789,,QUJD ,a b,ü,*,A-B'.split(',').map((id) =>
      `group.${id}`
    ),
    ...[`group.${INTERNAL_ID}`, `${GROUP}=`, `${GROUP} `, GROUP.replace('=', ''), GROUP.replace('=', '==')],
    // The same 32 bytes in other spellings, and other lengths.
    otherBits(GROUP),
    ...[Buffer.alloc(31).toString('base64'), Buffer.alloc(33).toString('base64')].map(groupOf),
    ...[INTERNAL_ID.replace('=', ''), otherBits(INTERNAL_ID)].map(groupOf),
  ];

  const ROUTES_TO =
    'POST /v1/reactions,POST /v1/receipts,DELETE /v1/remote-delete,PUT /v1/typing-indicator,POST /v1/polls'.split(',');

  table('attack: name an invalid group as a recipient, a member or an admin', { allow: ['messaging'] })`
    * bearer → 400 bad_field
    ${NO_GROUPS.map((name) => `POST ${GROUPS} | {"name":"x","members":["${TO}","${name}"]}`)}
    ${NO_GROUPS.map((name) => `POST ${GROUPS}/${GROUP}/admins | {"admins":["${name}"]}`)}
    * bearer → 400 bad_field
    * bearer | @ {"senders":["${FROM}"],"recipients":["${TO}","group.*"]} → 400 bad_field
    ${NO_GROUPS.map((name) => `{${SAID},"recipients":["${name}"]} ;; {${SAID},"recipient":"${name}"}`)}
    ${NO_GROUPS.map((name) => `POST /v1/send | {${SAID},"recipients":["${TO}","${name}"]}`)}
    ${ROUTES_TO.flatMap((route) => NO_GROUPS.slice(0, 3).map((name) => `${route}/${FROM} | {"recipient":"${name}"}`))}`;

  const NAME = 'max170123456.78';

  /** Each route on which the backend hands a person on as a phone number, and where the route has the name. */
  const DIALLED = [
    ...['PUT /v1/typing-indicator', 'DELETE /v1/typing-indicator', 'POST /v1/reactions', 'DELETE /v1/reactions'],
    ...['POST /v1/receipts', 'DELETE /v1/remote-delete', 'PUT /v1/contacts'],
  ].map((route) => `${route}/${FROM} | {"recipient":"${NAME}"}`);

  // signal-cli sent what was meant for max170123456.78 to +4917012345678.
  table("attack: have a user name's digits dialled, on each route that would, whether or not the name is listed", {
    allow: ['messaging', '* /v1/groups/*', 'PUT /v1/contacts/:number'],
  }, ANSWERING)`
    * bearer | @ {} → 400 bad_field | "may not be a user name here"
    * bearer | @ {"senders":["${FROM}"],"recipients":["${TO}","${NAME}","group.*"]} → 400 bad_field | "may not be a user name here"
    * bearer | @ {"senders":["${FROM}"],"recipients":["${TO}","group.*"]} → 400 bad_field | "may not be a user name here"
    ${DIALLED}
    POST /v1/send | {${SAID},"recipients":["${TO}","${NAME}"]} ;; POST /v1/send | {${SAID},"recipient":"${NAME.toUpperCase()}"}
    POST ${GROUPS}/${GROUP}/members | {"members":["${NAME}"]} ;; DELETE ${GROUPS}/${GROUP}/members | {"members":["${NAME}"]}
    POST ${GROUPS}/${GROUP}/admins | {"admins":["${NAME}"]} ;; DELETE ${GROUPS}/${GROUP}/admins | {"admins":["${NAME}"]}
    * bearer | @ {"senders":["${FROM}"],"recipients":["${NAME}","group.*"]} → 200
    {${SAID},"recipients":["${NAME}"]} ;; {${SAID},"recipient":"${NAME}"} ;; POST ${GROUPS} | {"name":"x","members":["${NAME}"]}
    POST /v1/polls/${FROM} | {"recipient":"${NAME}"} ;; DELETE /v1/polls/${FROM} | {"recipient":"${NAME}"}
    POST /v1/polls/${FROM}/vote | {"recipient":"${NAME}"}`;

  const NO_IDS = [...NO_GROUPS, ...[INTERNAL_ID, GROUP.slice(6), 'LS11c2VybmFtZT1ldmlsLjAx', GROUP.replace('g', 'G')]]
    .map(encodeURIComponent).filter((id) => !/%(?:2f|2e|25)/i.test(id));

  table("attack: turn a group's id in a path into an option of signal-cli", { allow: ['messaging', '* /*'] })`
    * bearer → 400 bad_target
    ${NO_IDS.map((id) => `POST ${GROUPS}/${id}/pin-message | {"target_author":"${TO}","timestamp":1}`)}
    ${NO_IDS.map((id) => `GET ${GROUPS}/${id}`)}`;

  table('a send must name its account if its token has senders, with recipients or without', { allow: ['send'] })`
    * bearer | @ {"senders":["${FROM}"]} → 400 bad_field | "must name the sending account"
    * bearer | @ {"senders":["${FROM}"],"recipients":["${TO}"]} → 400 bad_field | "must name the sending account"
    {"message":"x","recipients":["${TO}"]} ;; {"message":"x","recipients":["${TO}"],"number":null}
    POST /v1/send | {"message":"x","recipients":["${TO}"]}`;

  // With is_group, /v1/send decodes a recipient and passes the result to signal-cli as the argument of -g.
  const OPTIONS = 'LS11c2VybmFtZT1ldmlsLjAx LQ== LWE= LcOp Lf8='.split(' '); // the last two have no ASCII after "-"
  table('attack: smuggle an option through /v1/send', { allow: ['send'] })`
    * POST /v1/send | bearer → 400 bad_field
    ${OPTIONS.map((id) => `{${SAID},"recipients":["${id}"],"is_group":true}`)}`;

  table("a group's internal_id as a recipient is 400, and the error names the id to use", { allow: ['messaging'] })`
    * bearer → 400 bad_field | " holds a group's "internal_id"; its "id" is needed, which is "group.…"."
    {${SAID},"recipients":["${INTERNAL_ID}"]}
    POST /v1/send | {${SAID},"recipients":["${INTERNAL_ID}"],"is_group":true} ;; {${SAID},"recipient":"${INTERNAL_ID}"}
    POST ${GROUPS}/${GROUP}/members | {"members":["${INTERNAL_ID}"]}`;

  const IN_A_COMMAND = `
  {"number":"VALUE","recipients":["${TO}"]} ;; {${SAID},"recipients":["${TO}","VALUE"]} ;; ${TYPING} | {"recipient":"VALUE"}
  POST /v1/receipts/${FROM} | {"recipient":"VALUE","recipients":["${TO}"]}
  POST ${GROUPS} | {"members":["VALUE"]} ;; POST ${GROUPS}/${GROUP}/admins | {"admins":["VALUE"]}
  POST /v1/polls/${FROM} | {"recipient":"${TO}","answers":["yes","VALUE"]}
  POST /v1/polls/${FROM}/vote | {"recipient":"${TO}","selected_answers":["VALUE"]}`;

  table("attack: smuggle an option into signal-cli's command line", { allow: ['messaging'] })`
    * bearer → 400 bad_field
    ${
    literal`--help,-,,--config=/x,a\u0000b,a\nb,a\u007fb,\u0085`.split(',').map((value) =>
      IN_A_COMMAND.replaceAll('VALUE', value)
    )
  }
    POST /v1/polls/${FROM}/vote | {"recipient":"${TO}","selected_answers":[-1]}
    GET /v1/search/${FROM}?numbers=%2B1555&numbers=--help ;; GET /v1/search?numbers= ;; GET /v1/search?numb%65rs=-x`;

  const attachment = (data: string): string => `{"base64_attachments":["${data}"],${HELLO.slice(1)}`;

  const preview = (value: string): string => `{"link_preview":${value},${HELLO.slice(1)}`;

  const NO_NAMES = ['../../etc/cron.d/x', '/etc/passwd', 'a/b', 'a\\\\b', '..', '.', 'x\\u0000.png', '..\\\\x'];

  table("attack: write a file outside the backend's folder", {})([
    '* bearer → 400 bad_field',
    ...NO_NAMES.flatMap((name) => [
      attachment(`QUJD","data:image/png;filename=${name};base64,QUJD`),
      `{"base64_attachment":"data:image/png;filename=${name};base64,QUJD",${HELLO.slice(1)}`,
      attachment(`filename=${name};data:;base64,QUJD`),
    ]),
    // The separators in the data are tested in BODY SCAN.
    listed`
      data:image/png;filename=good.png;filename=../bad;base64,QUJD ;; data:image/png;filename=..\u002fx;base64,QUJD
      data:x;base64,QUJD;filename=../x;base64,QUJD ;; data:x,y;filename=../x;base64,QUJD ;; data:x;filename=..,base64,QUJD
      data:x;filename=.,base64,base64,QUJD ;; data:x;filename=../../x, March.pdf;base64,QUJD
      data:x;filename=..xbase64,QUJD`.map(attachment),
    // The backend stores the thumbnail of a link preview in the same way. It drops one character before "base64,".
    listed`
      {"base64_thumbnail":"data:x;filename=../x;base64,QQ=="}
      {"title":"a, b; c","base64_thumbnail":"data:x;filename=../x;base64,QQ=="}
      {"base64_thumbnail":"QQ==","base64_thumbnail":"QQ=="} ;; {"Base64_thumbnail":"QQ=="}
      {"base64_thumbnail":["QQ=="]} ;; {"ba\u017fe64_thumbnail":"QQ=="}
      {"base64_thumbnail":"data:x;base64,QQ==;filename=../x;base64,QQ=="} ;; [] ;; "x"
      {},"Link_Preview":{"base64_thumbnail":"data:x;filename=../x;base64,QQ=="}`.map(preview),
  ]);

  table('an attachment and a link preview with harmless names pass', {})([
    '* bearer → 201',
    listed`
      QUJD ;; data:image/png;base64,QUJD ;; data:image/png;filename=holiday..2026.png;base64,QUJD
      data:;filename=.hidden;base64,QUJD ;; data:text/plain;filename=grüße @home (1).txt;base64,QUJD
      data:application/pdf;filename=Invoice, March.pdf;base64,QUJD
      data:application/pdf;charset=x,y;filename=a;b/c, base64;base64,QUJD
      data:image\/png;base64,Q\u002B\/D`.map(attachment),
    listed`
      null ;; {} ;; {"base64_thumbnail":null,"x":{"base64_thumbnail":1}}
      {"title":"a, b; c","description":"number","base64_thumbnail":"data:image/png;filename=x.png;base64,QQ==","number":1}`
      .map(preview),
  ]);

  // As a member, and on /v1/send, signal-cli reads "group.+4366…" as the phone number of its digits.
  table("attack: address a person by a group's name where groups are not accepted", {
    ...{ allow: NAMING, ...tokens({ recipients: ['group.*', GROUP] }, {}) },
  })`
    * bearer → 400 bad_field
    {${SAID},"recipients":["group.+4366412345678"]}
    POST /v1/receipts/${FROM} | {"recipient":"${GROUP}","receipt_type":"read","timestamp":1}
    POST /v1/receipts/${FROM} | {"recipient":"${GROUP}","receipt_type":"read","timestamp":1} | bearer ${OTHER}
    POST /v1/send | {${SAID},"recipients":["${GROUP}"]} ;; POST ${GROUPS} | {"name":"x","members":["${GROUP}"]}
    POST /v1/send | {${SAID},"recipients":["group.4366412345678a"],"is_group":false}
    POST ${GROUPS}/${GROUP}/members | {"members":["group.4366412345678="]}
    POST ${GROUPS}/${GROUP}/admins | {"admins":["group.4366412345678a"]}`;

  const ELSEWHERE = { clients: ['192.0.2.0/24', '2001:db8::/32'] };

  table('clients: an address that is not on the list is 403 before its credential is checked', ELSEWHERE)`
    * → 403 client_not_allowed
    bearer ;; bearer | X-Forwarded-For: 192.0.2.1 ;; bearer ${OTHER}`;

  table('clients: an address that is on the list passes', { clients: ['127.0.0.0/8'] })`
    * → 200
    bearer`;

  const FORWARDED = literal`
  127.0.0.1 ⇐ X-Forwarded-For:
  203.0.113.7 ⇐ X-Forwarded-For: 203.0.113.7
  # What stands left is the client's own claim, and several headers are one list.
  203.0.113.7 ⇐ X-Forwarded-For: 6.6.6.6, 203.0.113.7
  203.0.113.7 ⇐ X-Forwarded-For: 6.6.6.6, 203.0.113.7, 10.0.0.2
  203.0.113.7 ⇐ X-Forwarded-For: 6.6.6.6 | X-Forwarded-For: 203.0.113.7 | X-Forwarded-For: 10.0.0.2
  203.0.113.7 ⇐ X-Forwarded-For: ::ffff:203.0.113.7
  203.0.113.7 ⇐ X-Forwarded-For: ::FFFF:203.0.113.7
  203.0.113.7 ⇐ X-Forwarded-For: 203.0.113.7:4711
  2001:db8::1 ⇐ X-Forwarded-For: [2001:db8::1]:443
  fe80::1 ⇐ X-Forwarded-For: fe80::1%eth0
  # All are trusted: the outermost. Beyond what is no address nobody can be known.
  10.0.0.3 ⇐ X-Forwarded-For: 10.0.0.3, 10.0.0.2
  10.0.0.2 ⇐ X-Forwarded-For: 203.0.113.7, unknown, 10.0.0.2
  127.0.0.1 ⇐ X-Forwarded-For: 203.0.113.7, ,`;

  table("trustedProxies: the client is the right-most address that is not a trusted proxy's", {
    trustedProxies: ['127.0.0.1', '10.0.0.0/8'],
  })`
    * bearer → 200
    GET /v1/about → client=127.0.0.1 | > X-Forwarded-For: 127.0.0.1
    ${FORWARDED.replace(/(\S+) ⇐ (.*)/g, '$2 → client=$1 | > X-Forwarded-For: $1')}`;
});

suite('rate', SIDE_BY_SIDE, () => {
  test('rate: a token beyond its rate gets 429 with an accurate Retry-After, and other tokens are not affected', async (t) => {
    const { clock, asks } = await startClocked(t, { rate: '3/1m', ...tokens({}, {}) });
    await asks('bearer', '200', '200', '200');
    // Requests that are refused for another reason do not count, neither before nor after.
    await asks('bearer', 'GET /v1/accounts → 403 setup_blocked', '429 rate_limited | Retry-After: 20');
    await asks(`bearer ${OTHER}`, '200');
    clock.nowMs += 18_999;
    await asks('bearer', '429 rate_limited | Retry-After: 2'); // 1001 ms: after one second it would still be too early
    clock.nowMs += 1000;
    await asks('bearer', '429 rate_limited | Retry-After: 1');
    clock.nowMs += 1;
    await asks('bearer', '200', '429 rate_limited');
  });

  // A clock set back took what was left, and would have given it again: the bucket was kept as a time of that clock.
  for (const whose of ['the machine', 'an embedding program']) {
    test(`rate: the clock of ${whose}, set back or forth and back, takes nothing from a token and gives at most one burst`, async (t) => {
      const backend = await startBackend(t);
      let aheadMs = 0;
      const machine = Date.now;
      const clock = () => machine() + aheadMs;
      const config = { rate: '5/1d', ...tokens({}, {}) };
      const gateway = await startGateway(t, backend, config, {}, (given, { now: _, ...options } = {}) => {
        Date.now = clock; // the gateway keeps it
        try {
          return createGateway(given, whose === 'the machine' ? options : { ...options, now: clock });
        } finally {
          Date.now = machine;
        }
      });
      const statusesOf = async (count: number): Promise<number[]> => {
        const answers: number[] = [];
        for (let i = 0; i < count; i++) answers.push((await ask(gateway, { headers: BEARER })).status);
        return answers;
      };
      const dayMs = 86_400_000;
      assert.deepEqual(await statusesOf(2), [200, 200]);
      aheadMs = -400 * dayMs;
      assert.deepEqual(await statusesOf(4), [200, 200, 200, 429], 'set back, it has the three that it had left');
      let passed = 0;
      for (let i = 0; i < 5; i++) {
        for (const days of [400, -400]) {
          aheadMs = days * dayMs;
          passed += (await statusesOf(6)).filter((status) => status === 200).length;
        }
      }
      // Who sets a program's clock forth lets its time pass: the bucket is full then, and never more than full.
      assert.equal(passed, whose === 'the machine' ? 0 : 25);
    });
  }

  // 2718 lines a second: 64 GB a day.
  test('rate-limited requests are 30 log lines a minute for each token, and beyond that logged at debug level', async (t) => {
    const { both: { gateway }, clock, asks } = await startClocked(t, { rate: '1/1d', ...tokens({}, {}) });
    const levels = (token: string) =>
      requests(gateway).filter((line) => line.code === 'rate_limited' && line.token === token).map(({ level }) =>
        level
      );
    await asks('bearer', '200', ...Array(32).fill('429 rate_limited'));
    await asks(`bearer ${OTHER}`, '200', '429 rate_limited');
    assert.deepEqual(levels('test'), [...Array(30).fill('warn'), 'debug', 'debug']);
    assert.deepEqual(levels('other'), ['warn']);
    // Other refusals of the token do not count, and a minute later 30 more lines are allowed.
    await asks('bearer', 'GET /v1/accounts → 403 setup_blocked');
    assert.equal(requests(gateway).at(-1)!.level, 'warn');
    clock.nowMs += 60_000;
    await asks('bearer', '429 rate_limited');
    assert.deepEqual(levels('test').slice(30), ['debug', 'debug', 'warn']);
  });

  test('busy refusals are also 30 log lines a minute for each token; a token named like an address does not count as one', async (t) => {
    const config = {
      limits: { connections: 4 },
      tokens: { '127.0.0.1': { secret: SECRET }, 'other': { secret: OTHER } },
    };
    const { backend, gateway } = await startHolding(t, config, { now: () => START_MS });
    const levels = (code: string): unknown[] =>
      requests(gateway).filter((l) => l.code === code).map(({ level }) => level);
    for (let i = 0; i < 32; i++) await ask(gateway, {});
    assert.deepEqual(levels('unauthorized'), [...Array(30).fill('warn'), 'debug', 'debug']);
    for (let i = 0; i < 2; i++) open(t, gateway, SEND);
    await until(() => backend.seen.length === 2);
    for (let i = 0; i < 32; i++) await ask(gateway, { headers: BEARER });
    assert.deepEqual(levels('busy'), [...Array(30).fill('error'), 'debug', 'debug']);
  });

  /** Which addresses the warnings about floods name. */
  const warnedOf = (gateway: Gateway) =>
    linesOf(gateway, /^further refusals of an address are logged at debug level$/).map((line) => {
      assert.equal(line.level, 'warn');
      return [line.client, line.code];
    });

  test('wrong credentials beyond the budget are 429 with Retry-After; a valid one always works', async (t) => {
    const { both: { gateway }, clock, asks } = await startClocked(t, { trustedProxies: ['127.0.0.1'] });
    const from = (client: string, ...wanted: string[]): Promise<void> =>
      asks(`bearer ${OTHER} | X-Forwarded-For: ${client}`, ...wanted);
    // A flood must not fill the log of a small computer.
    const guesses = Array.from({ length: 100 }, (_, i) => {
      const wanted = i < 30 ? '401 unauthorized | level=warn' : '429 too_many_failures | level=debug | Retry-After: 2';
      return `bearer guess-number-${i}-of-many → ${wanted}`;
    });
    await asks('X-Forwarded-For: 203.0.113.7', ...guesses);
    await from('203.0.113.8', '401 unauthorized');
    // A missing credential is not a wrong one, and is challenged as before.
    await asks('X-Forwarded-For: 203.0.113.7', '401 unauthorized', 'bearer → 200');
    const codes = ['too_many_failures', 'unauthorized'];
    assert.deepEqual(warnedOf(gateway), codes.map((code) => ['203.0.113.7', code]));
    clock.nowMs += 2000;
    await from('203.0.113.7', '401 unauthorized', '429 too_many_failures');
    // One household is one IPv6 /64.
    const households = `2001:db8::# 2001:db8:0:0:ffff::1 2001:db8:0:1::1
    2001:db8::b:#:d:e:f 2001:db8:0:b:: 2001:db8:b::
    ::c:b:#:d:e:f 0:0:c:b:: c:b::`;
    for (const [members = '', last = '', other = ''] of households.split(/\n */).map((line) => line.split(' '))) {
      const all = Array.from({ length: 30 }, (_, i) => members.replace('#', i.toString(16)));
      await asks(`bearer ${OTHER}`, ...all.map((client) => `X-Forwarded-For: ${client} → 401 unauthorized`));
      await from(last, '429 too_many_failures');
      await from(other, '401 unauthorized');
    }
  });

  test('every refused credential counts as wrong: an expired token, a method that is not accepted, a wrong user or scheme', async (t) => {
    const config = { trustedProxies: ['127.0.0.1'], ...tokens({ methods: ['bearer'] }, { expires: '2020-01-01' }) };
    const { asks } = await startClocked(t, config);
    const ways = listed`
      bearer ${OTHER} | expired_token ;; basic | method_not_accepted ;; GET /@auth=${SECRET}/v1/about | method_not_accepted
      basic root:${SECRET} | wrong_user ;; Authorization: Digest x | unknown_scheme`;
    for (const [i, way] of ways.entries()) {
      const [request, reason] = way.split(' | ');
      const row = `${request} | X-Forwarded-For: 203.0.113.${i + 1}`;
      const refused = Array<string>(30).fill(`→ 401 unauthorized | reason=${reason}`);
      await asks(row, ...refused, `→ 429 too_many_failures | reason=${reason}`);
    }
  });

  // 500 requests without a credential were 500 log lines, on an SD card of a few gigabytes.
  test('a flood without a valid token is 30 log lines a minute for each address, whatever the refusal; the rest is at debug level, with one warning a minute for each code', async (t) => {
    const clients = ['127.0.0.1', '203.0.113.0/24', '2001:db8::/32'];
    const config = { trustedProxies: ['127.0.0.1'], clients, cors: ['https://a.example'] };
    const { both, clock, asks } = await startClocked(t, config);
    const rows = listed`
      GET /v1/about → 401 ;; POST /v1/accounts | {} → 401 ;; GET /v1/about/%2e%2e → 400
      'x' | Content-Encoding: gzip → 415
      OPTIONS /v2/send | Access-Control-Request-Method: POST | Origin: https://b.example → 401`;
    const flood = async (client: string, ...some: string[]): Promise<void> => {
      const rows = Array.from({ length: 40 }, (_, i) => {
        const row = `${some[i % some.length]} | level=${i < 30 ? 'warn' : 'debug'}`;
        return `X-Forwarded-For: ${client.replace('#', i.toString(16))} | ${row}`;
      });
      await checkRows(both, rows);
    };
    await Promise.all([
      ...rows.map((row, i) => flood(`203.0.113.${i + 1}`, row)),
      flood('198.51.100.1', 'GET /v1/about → 403 client_not_allowed'),
      flood('203.0.113.99', ...rows, 'Authorization: Digest x → 401', `bearer ${OTHER} → 401`),
      flood('2001:db8::#', rows[0]!), // one household is one IPv6 /64
    ]);
    const codes = warnedOf(both.gateway).map(([, code]) => code).sort();
    assert.deepEqual(codes, ['bad_target', 'client_not_allowed', 'unauthorized', 'unsupported_encoding']);
    for (let i = 0; i < 40; i++) {
      await ask(both.gateway, { path: '/healthz', headers: { 'x-forwarded-for': '203.0.113.50' } });
    }
    await asks('X-Forwarded-For: 203.0.113.50', '401 | level=warn'); // health checks do not count
    const headers = { 'origin': 'https://a.example', 'access-control-request-method': 'POST' };
    assert.equal((await ask(both.gateway, { path: '/v2/send', method: 'OPTIONS', headers })).status, 204);
    assert.equal(requests(both.gateway).at(-1)!.level, 'debug', 'for an allowed preflight');
    // Wrong credentials are counted separately, and a valid token's lines are logged as before.
    const first = 'X-Forwarded-For: 203.0.113.1';
    await asks(`${first} | bearer ${OTHER}`, ...Array<string>(30).fill('401'), '429');
    const valid = Array.from({ length: 40 }, (_, i) => {
      const level = i < 30 ? 'warn' : 'debug';
      return ['bearer → 200 | level=info', `bearer | GET /v1/accounts → 403 setup_blocked | level=${level}`];
    });
    await asks(first, ...valid.flat());
    assert.deepEqual(warnedOf(both.gateway).at(-1), ['203.0.113.1', 'too_many_failures']);
    const count = warnedOf(both.gateway).length;
    clock.nowMs += 2000;
    await asks(first, '401 | level=warn', '401 | level=debug');
    assert.equal(warnedOf(both.gateway).length, count);
    clock.nowMs += 60_000;
    await asks(first, ...Array<string>(31).fill('401'));
    assert.deepEqual(warnedOf(both.gateway).slice(count), [['203.0.113.1', 'unauthorized']]);
  });

  // With one limiter for rates and wrong credentials, unauthenticated clients could reset the rate of a token with
  // 1/1h. With one for the lines of addresses and of internal errors, they could fill the log with the latter; with one
  // for the lines of addresses and of tokens, with what a stolen token is refused.
  test('10,100 addresses with wrong credentials reset neither the rate of a token, nor the limit on its log lines, nor that on internal errors', async (t) => {
    const { both: { gateway }, asks } = await startClocked(t, { trustedProxies: ['127.0.0.1'], rate: '1/1h' });
    await asks('bearer', '200', '429 rate_limited');
    const probe = (level: string): string => `GET /v1/accounts → 403 setup_blocked | level=${level}`;
    await asks('bearer', ...Array<string>(30).fill(probe('warn')), probe('debug'));
    const fail = (): boolean => gateway.server.emit('clientError'); // without its arguments
    for (let i = 0; i < 31; i++) fail();
    const lines = gateway.log.length;
    const clients = Array.from({ length: 20 }, () => open(t, gateway));
    const requestFrom = (i: number): string =>
      ABOUT.replace(SECRET, 'wrong').replace('Host: x', `Host: x\r\nX-Forwarded-For: 2001:db8:${i.toString(16)}::1`);
    for (let sent = 0; sent < 10_100;) {
      for (const { socket } of clients) {
        socket.write(Array.from({ length: 5 }, () => requestFrom(sent++)).join(''));
      }
      await until(() => gateway.log.length >= lines + sent);
    }
    await until(() => clients.every(({ text }) => text().split('HTTP/1.1 401 ').length === 1 + 10_100 / 20));
    assert.equal(new Set(requests(gateway).map(({ client }) => client)).size, 10_101);
    await asks('bearer', '429 rate_limited', probe('debug'));
    fail();
    assert.equal(linesOf(gateway, /^internal error$/).at(-1)!.level, 'debug');
  });

  test('RateLimiter: a bucket refills evenly up to its size; a shorter rate locks no client out, however often it tries', () => {
    const limiter = new RateLimiter();
    const rate = { count: 7, perMs: 1000 };
    for (let i = 0; i < 7; i++) assert.equal(limiter.take('a', rate, 0), 0);
    assert.equal(Math.round(limiter.take('a', rate, 0) * 1000), Math.round(1_000_000 / 7));
    assert.equal(limiter.take('b', rate, 0), 0);
    assert.equal(limiter.take('a', rate, 143), 0);
    assert.notEqual(limiter.take('a', rate, 143), 0);
    for (let i = 0; i < 7; i++) assert.equal(limiter.take('a', rate, 10_000), 0);
    assert.notEqual(limiter.take('a', rate, 10_000), 0);
    limiter.take('b', rate, 20_000);
    for (let i = 0; i < 100; i++) assert.notEqual(limiter.take('b', { ...rate, count: 1 }, 19_000 + i), 0);
    assert.equal(limiter.take('b', { ...rate, count: 1 }, 20_000), 0, 'however often it is checked meanwhile');
  });

  test('RateLimiter: of 10,000 keys the least recently used one makes room, not the oldest one that is in use', () => {
    const limiter = new RateLimiter();
    const isTaken = (key: string): boolean => limiter.take(key, { count: 1, perMs: 3_600_000 }, 0) === 0;
    for (let i = 0; i < 10_000; i++) assert.ok(isTaken(`key ${i}`), `key ${i} is new`);
    assert.equal(isTaken('key 0'), false, 'it is kept, and used');
    assert.ok(isTaken('one more'), 'one more is new');
    assert.equal(isTaken('key 0'), false, 'the oldest is still limited');
    assert.ok(isTaken('key 1'), 'the least recently used one was dropped');
  });

  test("a token's refusals are 30 log lines a minute for each code, then at debug level, with one warning a minute about it", async (t) => {
    const { both: { gateway, backend }, clock, asks } = await startClocked(t, tokens({}, {}));
    const warned = () => linesOf(gateway, /^further refusals of a token are logged at debug level$/);
    const rows = ['GET /v1/accounts → 403 setup_blocked', 'GET /none → 404 unknown_endpoint', "'x=' → 400 bad_json"];
    for (const row of rows) {
      await asks('bearer', ...Array.from({ length: 33 }, (_, i) => `${row} | level=${i < 30 ? 'warn' : 'debug'}`));
    }
    assert.deepEqual(warned().map(({ level, token, code }) => [level, token, code]), [[
      'warn',
      'test',
      'setup_blocked',
    ]]);
    // Neither another token's refusals nor the backend's responses.
    await asks(`bearer ${OTHER}`, `${rows[0]} | level=warn`, 'GET /v1/about → 200 | level=info');
    clock.nowMs += 60_000;
    for (let i = 0; i < 31; i++) await asks('bearer', `${rows[0]} | level=${i < 30 ? 'warn' : 'debug'}`);
    assert.equal(warned().length, 2);
    assert.ok(backend.seen.length === 1, 'the health check of the other token');
  });

  test("the backend's own 400 and 429 are logged at their usual level, however many there are", async (t) => {
    const backend = await startBackend(t, (req, res) => void req.resume().on('end', () => res.writeHead(429).end()));
    const gateway = await startGateway(t, backend);
    for (let i = 0; i < 35; i++) await ask(gateway, { headers: BEARER });
    assert.deepEqual(new Set(requests(gateway).map(({ level }) => level)), new Set(['warn']));
    assert.equal(requests(gateway).length, 35);
  });
});
