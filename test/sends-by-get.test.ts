import { suite } from 'node:test';
import { statusOf } from './answers.ts';
import { assert } from './assertions.ts';
import type { Handler } from './backend.ts';
import { raw } from './client.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { hook, MADE, MEANT, TO_ALL } from './hooks.ts';
import { rowWith, table } from './rows.ts';
import { ABOUT, DEFAULTS, FROM, GROUP, HELLO, OTHER, SECRET, THIRD, TO } from './samples.ts';
import { SPELLINGS } from './spellings.ts';
import { startBoth } from './start.ts';

/** A token that may send by GET, and the log fields of such a request. */
const BY_GET = hook({ allow: ['GET /v2/send'], defaults: DEFAULTS });

const GETS_IN_EACH_FORM = SPELLINGS.map(({ form, ask: make }) => {
  const row = rowWith(make(SECRET), 'GET').replace(/v2\/send\??/, 'v2/send?message=a%0Ab&');
  return `${row} → form=${form} | {"message":"a\\nb"}`;
});

const SENT_BY_GET =
  `→ 201 | Cache-Control: no-store | POST /v2/send | > Content-Type: application/json | method=GET | route=/v2/send | status=201 | ${MEANT}`;

suite('sends-by-get', SIDE_BY_SIDE, () => {
  table("GET /v2/send becomes a POST, if the token's allowlist spells it out, in each form of the token", {
    ...hook({ ...TO_ALL, allow: ['GET /v2/send'] }),
  })`
    * bearer ${SENT_BY_GET}
    GET /v2/send?message=Front%20door → {"message":"Front door"} ;; GET /v2/send?message=Front+door → {"message":"Front door"}
    GET /v2/send?message=T%C3%BCr%0A%09offen%20%F0%9F%9A%AA → {"message":"Tür\n\toffen 🚪"}
    GET /v2/send?%6Dessage=x%0Ay → {"message":"x\ny"} ;; GET /v2/send?message=x&auth=${SECRET}&Auth=${OTHER} → {"message":"x"}
    GET /v2/send?message=x&number=%2B15550100003&recipients=+15550100003 → {"message":"x","number":"${THIRD}","recipients":["${THIRD}"]}
    GET /v2/send?recipients=+15550100003&message=x&&recipients=x.01&z=1&view_once= → {"message":"x","recipients":["${THIRD}","x.01"]}
    GET /v2/send?message='x'%26%3C%3E=&text_mode=styled → {"message":"'x'&<>=","text_mode":"styled"}
    # A GET has a body for its credential alone; what else it says is not looked at.
    * ${SENT_BY_GET}
    ${GETS_IN_EACH_FORM}`;

  const KEPT: Handler = (req, res) => {
    const own = ['Cache-Control', 'public, max-age=60', 'Vary', 'Accept', 'Set-Cookie', 'a=1', 'Set-Cookie', 'b=2'];
    req.resume().on('end', () => res.writeHead(201, own).end('[]'));
  };

  table(
    'the response to a sending GET may not be stored, whatever the backend responds, and loses none of its headers',
    {
      ...{ ...BY_GET, cors: ['https://dash.example'] },
    },
    { handler: KEPT },
  )`
    * GET /v2/send?message=x | bearer | Origin: https://dash.example
    → 201 | Cache-Control: no-store | Vary: Origin, Accept | Set-Cookie: a=1, b=2`;

  test('the response to a sending GET is the last one on its connection, also if it refuses the content', async (t) => {
    const { backend, gateway } = await startBoth(t, BY_GET);
    for (const [message, status] of [['x', 201], ['', 400]] as const) {
      const response = await raw(gateway, ABOUT.replace('/v1/about', `/v2/send?message=${message}`).repeat(2));
      assert.deepEqual([statusOf(response), response.match(/^HTTP\/1\.1/gm)!.length], [status, 1], response);
      for (const header of [/^connection: close\r$/im, /^cache-control: no-store\r$/im]) assert.match(response, header);
    }
    assert.equal(backend.seen.length, 1, 'the requests that the backend saw');
  });

  table('a sending GET that asks for an upgrade sends its message, and is not upgraded', BY_GET)`
    * ${MADE} | {"message":"x"} | > Upgrade:
    GET /v2/send?message=x | Connection: Upgrade | Upgrade: websocket | Sec-WebSocket-Key: x`;

  table('attack: send by a GET that the allowlist does not spell out, or with a token that makes no sends', hook({}))`
    * bearer | @ {"defaults":${MEANT}} → 405 method_not_allowed
    * bearer | @ {"defaults":${MEANT},"allow":["send","info","messaging","setup"]} → 405 method_not_allowed
    * bearer | @ {"defaults":${MEANT},"allow":["POST /v2/send","GET /v2/*","GET /*","* /*"]} → 405 method_not_allowed
    * bearer | @ {"defaults":${MEANT},"allow":["GET /v2/:name","GET /*/send","* /v2/send"]} → 405 method_not_allowed
    * bearer | @ {"allow":["GET /v2/send","* /*"]} → 405 method_not_allowed
    * bearer | @ {"allow":["GET /v2/send","* /*"],"senders":["${FROM}"],"recipients":["${TO}"]} → 405 method_not_allowed
    GET /v2/send?message=x ;; GET /v2/send?message=x%0Ay ;; GET /v2/send ;; GET //v2/send/?message=x
    GET /@auth=${SECRET}/v2/send?message=x`;

  table('attack: use a token for GET /v2/send beyond its rights, or send nothing, or without a recipient', BY_GET)`
    * bearer → 405 method_not_allowed
    PUT /v2/send ;; PATCH /v2/send ;; DELETE /v2/send ;; OPTIONS /v2/send ;; GET /v1/send?message=x
    * bearer → 403 endpoint_not_allowed
    ${HELLO} ;; 'hello' ;; POST /v1/send | ${HELLO} ;; GET /v1/about
    * bearer → 403 recipient_not_allowed
    GET /v2/send?message=x&recipients=%2B15559999999 ;; GET /v2/send?message=x&recipients=+15559999999
    GET /v2/send?message=x&recipients=%2B15550100002&recipients=${GROUP}
    GET /v2/send?payload=%7B%22message%22%3A%22x%22%2C%22recipients%22%3A%22%2B15559999999%22%7D
    GET /v2/send?message=x&number=%2B15559999999 → 403 sender_not_allowed
    * bearer → 400 bad_field
    GET /v2/send ;; GET /v2/send?message= ;; GET /v2/send?msg=x ;; GET /v2/send?message=x&recipients=
    GET /v2/send?message=x&Recipients=%2B15550100002 ;; GET /v2/send?message=x&recipient=%2B15550100002
    GET /v2/send?message=x&number=1 ;; none | GET /v2/send?message=x&auth=${SECRET} → 401 unauthorized
    * GET /v2/send?message=x | basic → 403 cross_site
    User-Agent: Mozilla/5.0 (X11; Linux x86_64) ;; Sec-Fetch-Site: cross-site | Sec-Fetch-Mode: no-cors
    Sec-Fetch-Site: none | Sec-Purpose: prefetch ;; Origin: http://gateway`;

  table('attack: smuggle control characters through the query of a GET', BY_GET)`
    * bearer → 400 bad_target
    GET /v2/send?message=x%0D%0A ;; GET /v2/send?message=x%00 ;; GET /v2/send?message=x%1B%5B0m
    GET /v2/send?message=x%7F ;; GET /v2/send?message=x%C2%85 ;; GET /v2/send?message=x%FF
    GET /v2/send?message=x&number=%0A ;; GET /v2/send?message%0A=x ;; GET /v2/send?message=x&text=%09
    GET /v1/about?message=x%0Ay ;; GET /v1/send?message=x%0Ay ;; GET /v2%0A/send?message=x`;
});
