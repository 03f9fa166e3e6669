/** Calls of signal-cli's own daemon: its methods and parameters are closed unless they are known. */

import { randomBytes } from 'node:crypto';
import http from 'node:http';
import { suite } from 'node:test';
import { isDeepStrictEqual } from 'node:util';
import { jsonIn, outcomeOf } from './answers.ts';
import { assert, linesOf, requests, until } from './assertions.ts';
import { type Handler, serve, startBackend } from './backend.ts';
import { type Ask, ask } from './client.ts';
import { tokens } from './configs.ts';
import { fileWith, importChanged } from './files.ts';
import { CALLS } from './gateway.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { answerAll, send, settled, startHeld } from './held.ts';
import { BEARER, FROM, GROUP, INTERNAL_ID, MIB, OTHER, SECRET, STRANGER, THIRD, TO } from './samples.ts';
import { type Both, cli, startGateway, startProcess } from './start.ts';

interface JsonError {
  code: number;
  message: string;
}

const NAME = 'ann.01';
const LISTED = { senders: [FROM], recipients: [TO, GROUP, NAME] };
const OTHER_GROUP = Buffer.alloc(32, 7).toString('base64');

/** Answers as the daemon does: a call with its id, and a check with nothing. */
const DAEMON: Handler = (req, res, seen) => {
  req.toArray().then((chunks) => {
    Object.assign(seen, { body: Buffer.concat(chunks), complete: true });
    if (seen.url === '/api/v1/check') return void res.end();
    if (seen.url.startsWith('/api/v1/events')) {
      return void res.writeHead(200, { 'Content-Type': 'text/event-stream' }).end(':\n');
    }
    if (seen.url !== '/api/v1/rpc') return void res.writeHead(404).end();
    const { id } = jsonIn(seen.body.toString());
    res.writeHead(200, { 'Content-Type': 'application/json' }).end(JSON.stringify({ jsonrpc: '2.0', result: {}, id }));
  }, () => {});
};

async function startDaemon(t: TestContext, token: object = {}, config: object = {}): Promise<Both> {
  const backend = await startBackend(t, DAEMON);
  return { backend, gateway: await startGateway(t, backend, { ...tokens(token), ...config }) };
}

/** A call, as a client posts it. */
const callOf = (method: string, params: object, others: object = {}): Ask => ({
  method: 'POST',
  path: '/api/v1/rpc',
  headers: { ...BEARER, 'content-type': 'application/json' },
  body: JSON.stringify({ jsonrpc: '2.0', method, params, id: 1, ...others }),
});

const SEND = { account: FROM, recipient: [TO], message: 'Hello' };

/** Every method of signal-cli 0.14.6, by the word that opens it. Those of `confined` a token with lists may call, too. */
const METHODS = {
  confined: 'version send sendReaction sendTyping sendReceipt remoteDelete sendPollCreate sendPollVote ' +
    'sendPollTerminate sendPinMessage sendUnpinMessage listGroups',
  info: 'version',
  send: 'send',
  messaging: 'sendReaction sendTyping sendReceipt remoteDelete sendPollCreate sendPollVote sendPollTerminate ' +
    'sendPinMessage sendUnpinMessage listGroups getAttachment getUserStatus listStickerPacks',
  setup: 'addDevice deleteLocalAccountData finishChangeNumber finishLink listAccounts listContacts listDevices ' +
    'listIdentities register removeContact removeDevice removePin sendContacts sendSyncRequest setPin ' +
    'startChangeNumber startLink submitRateLimitChallenge trust unregister updateAccount updateConfiguration ' +
    'updateContact updateDevice updateProfile verify',
  none: 'acceptCall addStickerPack block getAvatar getSticker hangupCall joinGroup listCalls quitGroup receive ' +
    'rejectCall sendAdminDelete sendMessageRequestResponse sendPaymentNotification sendStory startCall ' +
    'subscribeReceive terminateGroup unblock unsubscribeReceive updateGroup uploadStickerPack daemon jsonRpc link',
};

/** Each call is refused, and the daemon sees none of them, but the good one that follows. */
async function assertCallsRefused(
  both: Both,
  calls: [method: string, params: object, outcome: string][],
): Promise<void> {
  for (const [method, params, outcome] of calls) {
    const { status, json } = await ask(both.gateway, callOf(method, params));
    assert.equal(`${status} ${json?.code}`, outcome, `${method} ${JSON.stringify(params).slice(0, 300)}`);
  }
  assert.equal((await ask(both.gateway, callOf('version', {}))).status, 200);
  assert.deepEqual(both.backend.seen.map(({ body }) => jsonIn(body.toString()).method), ['version']);
}

suite('daemon', SIDE_BY_SIDE, () => {
  test('a call passes as it was checked: known parameters in each spelling, nothing else; the id comes back', async (t) => {
    const both = await startDaemon(t, { allow: ['messaging', 'info'], ...LISTED });
    const png = 'data:image/png;filename=a.png;base64,iVBORw0KGgo=';
    const calls: [method: string, params: object][] = [
      ['send', SEND],
      ['send', { account: FROM, recipients: TO, message: 'x' }],
      ['send', { account: FROM, 'group-id': INTERNAL_ID, message: 'x', notifySelf: true }],
      ['send', { account: FROM, groupIds: [INTERNAL_ID], attachments: [png], textStyle: ['0:1:BOLD'] }],
      ['send', { account: FROM, username: [NAME], message: 'x', noteToSelf: false, recipient: null }],
      ['sendTyping', { account: FROM, recipient: [TO], stop: true }],
      ['sendReaction', {
        account: FROM,
        recipient: TO,
        emoji: '👍',
        targetAuthor: TO,
        targetTimestamp: 1_700_000_000_000,
      }],
      ['sendReceipt', { account: FROM, recipient: TO, targetTimestamp: [1], type: 'read' }],
      ['remoteDelete', { account: FROM, groupId: INTERNAL_ID, targetTimestamp: 1 }],
      ['sendPollCreate', { account: FROM, recipient: [TO], question: '?', option: ['a', 'b'] }],
      ['listGroups', { account: FROM }],
      ['version', {}],
    ];
    for (const [i, [method, params]] of calls.entries()) {
      const { status, json } = await ask(both.gateway, callOf(method, params, { id: `${i}`, auth: 'x', extra: [1] }));
      assert.deepEqual([status, json], [200, { jsonrpc: '2.0', result: {}, id: `${i}` }], method);
      const { headers, body } = both.backend.seen.at(-1)!;
      assert.deepEqual(jsonIn(body.toString()), { jsonrpc: '2.0', method, params, id: `${i}` });
      assert.equal(headers['content-type'], 'application/json');
      assert.equal(requests(both.gateway).at(-1)?.call, method);
    }
    const notification = {
      ...callOf('send', SEND),
      body: JSON.stringify({ jsonrpc: '2.0', method: 'send', params: SEND }),
    };
    await ask(both.gateway, notification);
    assert.equal('id' in jsonIn(both.backend.seen.at(-1)!.body.toString()), false);
  });

  test('attack: another recipient, account or file, under every name that signal-cli reads, reaches nobody', async (t) => {
    const both = await startDaemon(t, { allow: ['messaging', 'info'], ...LISTED });
    const spelled = (names: string, value: unknown, outcome: string): [string, object, string][] =>
      names.split(' ').flatMap((name) =>
        [value, [value], ...typeof value === 'string' ? [[TO, value]] : []].flatMap((
          each,
        ): [string, object, string][] => [
          ['send', { account: FROM, message: 'x', [name]: each }, outcome],
        ])
      );
    const [stranger, field] = ['403 recipient_not_allowed', '400 bad_field'];
    await assertCallsRefused(both, [
      ...spelled('recipient recipients', STRANGER, stranger),
      ...spelled('groupId groupIds group-id', OTHER_GROUP, stranger).slice(0, 2),
      ...['groupId', 'groupIds', 'group-id'].map((name): [string, object, string] => [
        'send',
        { account: FROM, [name]: [INTERNAL_ID, OTHER_GROUP] },
        stranger,
      ]),
      ...['username', 'usernames'].map((
        name,
      ): [string, object, string] => ['send', { account: FROM, [name]: 'bob.02' }, stranger]),
      ['send', { ...SEND, recipient: [GROUP] }, field], // signal-cli would dial its digits
      ['send', { ...SEND, recipient: [NAME] }, field],
      ['send', { ...SEND, recipient: ['u:bob.02'] }, stranger],
      ['send', { ...SEND, groupId: GROUP }, field],
      ['send', { ...SEND, groupId: INTERNAL_ID.replace('=', '') }, field],
      ['send', { ...SEND, username: TO }, field],
      ['send', { ...SEND, recipients: [TO] }, field], // two spellings
      ['send', { ...SEND, recipient: [[STRANGER]] }, field],
      ['sendReceipt', { account: FROM, recipient: [TO, TO] }, field], // signal-cli would join their digits
      ['sendReceipt', { account: FROM, recipients: TO }, field],
      ['send', { ...SEND, recipient: [{ number: STRANGER }] }, field],
      ['send', { ...SEND, recipient: [15559999999] }, field],
      ['send', { account: FROM, noteToSelf: true, message: 'x' }, stranger],
      ['send', { account: FROM, 'note-to-self': true, message: 'x' }, stranger],
      ['send', { account: FROM, noteToSelf: 'true', message: 'x' }, field],
      ['send', { recipient: [TO], message: 'x' }, field],
      ['send', { ...SEND, account: null }, field],
      ['send', { ...SEND, account: [FROM] }, field],
      ['send', { ...SEND, account: STRANGER }, '403 sender_not_allowed'],
      ['send', { ...SEND, attachment: ['/etc/hostname'] }, field],
      ['send', { ...SEND, attachments: '/etc/hostname' }, field],
      // signal-cli opens what it cannot read as a data URI as a file.
      ['send', { ...SEND, attachments: ['DATA:image/png;base64,AA=='] }, field],
      ...[
        'image/png;filename=../a;base64,AA==',
        'image/png;Base64,AA==',
        'image/png;FILENAME=a;base64,AA==',
        'image/png;base64,AA=',
        'image/png;base64,A===',
        'image/png;base64,',
        'image/png;base64,AA-_',
        'image/png;base64,AA==\n',
        'image/png;filename=%zz;base64,AA==',
        'image/png;a=b;c=d;base64,AA==',
        'x',
        '',
      ].map((rest): [string, object, string] => ['send', { ...SEND, attachments: [`data:${rest}`] }, field]),
      ...[
        'number',
        'Recipient',
        'RECIPIENTS',
        'recipientss',
        'previewImage',
        'quoteAttachment',
        'storyAuthor',
        'messageFromStdin',
        '__proto__',
      ]
        .map((
          name,
        ): [string, object, string] => [
          'send',
          JSON.parse(`{"account":"${FROM}","recipient":"${TO}","${name}":"x"}`),
          field,
        ]),
      ...[
        'sendTyping',
        'sendReaction',
        'sendReceipt',
        'remoteDelete',
        'sendPollCreate',
        'sendPollVote',
        'sendPollTerminate',
        'listGroups',
      ]
        .flatMap((method): [string, object, string][] => [
          [method, { account: STRANGER }, '403 sender_not_allowed'],
          [method, {}, field],
          ...method === 'listGroups'
            ? []
            : [[method, { account: FROM, recipient: STRANGER }, stranger] as [string, object, string]],
          [method, { account: FROM, invented: 1 }, field],
        ]),
    ]);
  });

  test('each word opens its methods, and none opens another; a token with lists gets those whose parameters are known', async (t) => {
    const wordsOf = (list: string): string[] => list.split(' ').filter(Boolean);
    const { confined, ...groups } = METHODS;
    const known = Object.entries(groups).filter(([group]) => group !== 'none');
    assert.deepEqual(
      CALLS.map(({ group, method }) => `${group} ${method}`).sort(),
      known.flatMap(([group, methods]) => wordsOf(methods).map((method) => `${group} ${method}`)).sort(),
    );
    const all = [...Object.values(groups).flatMap(wordsOf), 'invented', 'toString', 'Send', ' send', ''];
    const rows: [allow: string[], lists: object, opened: string][] = [
      ...known.map(([group, methods]): [string[], object, string] => [
        [group],
        { senders: ['*'], recipients: ['*'] },
        group === 'messaging' ? `${groups.send} ${methods}` : methods,
      ]),
      [['messaging', 'info', 'setup'], LISTED, confined],
      [['messaging', 'info', 'setup'], { recipients: [TO] }, confined],
      [['receive', 'GET /api/v1/check'], {}, ''],
    ];
    for (const [allow, lists, opened] of rows) {
      const { backend, gateway } = await startDaemon(t, { allow, ...lists });
      for (const method of all) {
        const { status, json } = await ask(gateway, callOf(method, method === 'version' ? {} : { account: FROM }));
        const isOpen = wordsOf(opened).includes(method);
        const name = `${method} for ${allow}`;
        if (isOpen) assert.equal(status, 200, name);
        else assert.match(`${status} ${json.code}`, /^403 (setup_blocked|endpoint_not_allowed)$/, name);
        if (opened !== '' && wordsOf(groups.setup).includes(method) && !allow.includes('setup')) {
          assert.equal(json.code, 'setup_blocked');
        }
      }
      const seen = backend.seen.map(({ body }) => jsonIn(body.toString()).method);
      assert.deepEqual(
        seen,
        all.filter((method) => wordsOf(opened).includes(method)),
        `what the daemon saw of ${allow}`,
      );
    }
  });

  test('attack: the id of an attachment is a path', async (t) => {
    const { backend, gateway } = await startDaemon(t, { allow: ['messaging'] });
    for (const id of ['../data', 'a/b', '..', '/etc/hostname', 'a\\b', '', ['a'], 5, '.x', 'a..b']) {
      const { status } = await ask(gateway, callOf('getAttachment', { account: FROM, id }));
      assert.equal(status, 400, String(id));
    }
    assert.equal(backend.connections, 0);
    assert.equal((await ask(gateway, callOf('getAttachment', { account: FROM, id: 'aB-3_x.png' }))).status, 200);
  });

  test('a refusal is an error of JSON-RPC too, with the id of its call; without a token it is a 401 as any other', async (t) => {
    const { gateway } = await startDaemon(t, { allow: ['send'], ...LISTED });
    const call = callOf('send', { ...SEND, recipient: STRANGER }, { id: 'seven' });
    const { status, json } = await ask(gateway, call);
    assert.deepEqual([status, json.jsonrpc, json.id, (json.error as unknown as JsonError).code], [
      403,
      '2.0',
      'seven',
      -32000,
    ]);
    assert.match(
      (json.error as unknown as JsonError).message,
      /^This token may not send to one of these recipients: a phone number/,
    );
    const other = await ask(gateway, { ...call, headers: {} });
    assert.equal(other.status, 401);
    assert.equal(typeof other.json.error, 'string');
  });

  test('the pattern opens every call to a token without lists, and none to one with lists', async (t) => {
    const allow = ['POST /api/v1/rpc'];
    const open = await startDaemon(t, { allow });
    for (const method of ['startLink', 'invented']) {
      assert.equal((await ask(open.gateway, callOf(method, { a: 1 }))).status, 200);
    }
    assert.equal(open.backend.seen.length, 2);
    for (const wild of ['* /*', '* /api/*', '* /api/v1/*', 'POST /*/v1/rpc', 'POST /api/v1/:x']) {
      const both = await startDaemon(t, { allow: [wild, 'send'] });
      assert.equal((await ask(both.gateway, callOf('startLink', {}))).json.code, 'setup_blocked', wild);
      const { json, status } = await ask(both.gateway, { path: '/api/v1/events', headers: BEARER });
      assert.equal(`${status} ${json?.code}`, '403 endpoint_not_allowed', wild);
      assert.equal(both.backend.connections, 0);
    }
    const closed = await startDaemon(t, { allow, ...LISTED });
    for (
      const [method, code] of [['startLink', 'setup_blocked'], ['invented', 'endpoint_not_allowed'], [
        'send',
        'endpoint_not_allowed',
      ]]
    ) {
      const { status, json } = await ask(closed.gateway, callOf(method!, method === 'send' ? SEND : {}));
      assert.equal(`${status} ${json.code}`, `403 ${code}`);
    }
    assert.equal(closed.backend.connections, 0);
  });

  test('a call with large pictures arrives whole; what is not their data has at most 1 MiB, and the call 10 MiB', async (t) => {
    const both = await startDaemon(t, { ...LISTED, allow: ['send', 'info'] });
    const dataOf = (bytes: number) => randomBytes(bytes).toString('base64');
    const pictures = [3 << 20, (2 << 20) + 1, (1 << 19) + 2, 1, 9000].map((bytes) =>
      `data:image/png;filename=a.png;base64,${dataOf(bytes)}`
    );
    const params = { ...SEND, message: `Ünï 👋 ${pictures[4]} "`, attachments: pictures };
    const call = callOf('send', params, { id: `;base64,${dataOf(30_000)}`, extra: `;base64,${dataOf(30_000)}` });
    assert.equal((await ask(both.gateway, call)).status, 200);
    const { id } = jsonIn(call.body as string);
    const arrived = jsonIn(both.backend.seen.at(-1)!.body.toString());
    const isWhole = isDeepStrictEqual(arrived, { jsonrpc: '2.0', method: 'send', params, id });
    assert.ok(isWhole, 'what arrived is what was sent');

    const long = dataOf(60_000);
    // The id comes back as it was in a refusal, too.
    const own = `;base64,${long}`;
    const answer = await ask(both.gateway, callOf('send', { ...SEND, recipient: STRANGER }, { id: own }));
    assert.ok(answer.json.id === own, answer.text.slice(0, 300));
    const refused: [params: object, outcome: string][] = [
      [{ ...SEND, message: 'x'.repeat(1 << 20) }, '413 body_too_large'],
      [{ ...SEND, message: `data:a/b;base64,${dataOf(8 << 20)}` }, '413 body_too_large'],
      [{ ...SEND, recipient: [TO, `${TO};base64,${long}`] }, '403 recipient_not_allowed'],
      [{ ...SEND, [`;base64,${long}`]: TO }, '400 bad_field'],
      [{ ...SEND, attachment: `data:a/b;base64,${long}!` }, '400 bad_field'],
      [{ ...SEND, Message: 'x' }, '400 bad_field'],
      [{ ...SEND, attachment: `data:a/b;base64,=AAA${long}` }, '400 bad_field'],
      [{ ...SEND, attachment: `data:a/b;base64,${long}A` }, '400 bad_field'],
      [{ ...SEND, attachment: `/etc/hosts;base64,${long}` }, '400 bad_field'],
      [{ ...SEND, attachment: `data:a/b;base64,${long}`, recipients: STRANGER }, '400 bad_field'],
      [{ account: FROM, attachment: `data:a/b;base64,${long}`, recipients: STRANGER }, '403 recipient_not_allowed'],
    ];
    both.backend.seen.length = 0;
    await assertCallsRefused(both, refused.map(([params, outcome]) => ['send', params, outcome]));
    // Outside of a string, in an escape, and before the end of the document.
    const begin = '{"jsonrpc":"2.0","method":"version","params":';
    for (
      const rest of [
        `;base64,${long}{}}`,
        `{"a":"\\;base64,${long}\\"}}`,
        `{"a":"\\u;base64,${long}"}}`,
        `{"a":";base64,${long}`,
      ]
    ) {
      const { status, json } = await ask(both.gateway, { ...callOf('version', {}), body: begin + rest });
      assert.equal(`${status} ${json?.code}`, '400 bad_json');
    }
    assert.equal(both.backend.seen.length, 1);
  });

  test('a call of 10 MiB, and one of 1 MiB without data, pass, and with one byte more they are 413; short data is no data', async (t) => {
    const { gateway } = await startDaemon(t, { ...LISTED, allow: ['send'] });
    const sized = (bytes: number, params: object): Ask => {
      const call = (message: string) => callOf('send', { ...SEND, ...params, message });
      return call('x'.repeat(bytes - String(call('').body).length));
    };
    const attachment = `data:a/b;base64,${'A'.repeat(9.5 * MIB)}`;
    for (const [bytes, params] of [[MIB, {}], [10 * MIB, { attachment }]] as const) {
      assert.equal((await ask(gateway, sized(bytes, params))).status, 200);
      assert.equal(outcomeOf(await ask(gateway, sized(bytes + 1, params))), '413 body_too_large');
    }
    const many = callOf('send', { ...SEND, message: ';base64,A'.repeat(100_000) });
    assert.equal((await ask(gateway, many)).status, 200);
  });

  test('a parameter in another case is told with its spelling', async (t) => {
    const { gateway } = await startDaemon(t, { ...LISTED, allow: ['send'] });
    const rows = [['Message', ' must be spelled "message"'], ['GROUPID', ' must be spelled "groupId"'], [
      'invented',
      ' is unknown to',
    ]];
    for (const [name, words] of rows) {
      const { json } = await ask(gateway, callOf('send', { ...SEND, [name!]: 'x' }));
      const { message } = json.error as unknown as JsonError;
      assert.ok(message.includes(`"${name}"${words}`), message);
    }
  });

  test('the marker of data that was taken out is a new one for each call', async (t) => {
    const changed = await importChanged(t, [
      'const taken: string[] = [];',
      (text) => `${text} Object.assign(globalThis, { lastMarker: marker });`,
    ]);
    const backend = await startBackend(t, DAEMON);
    const gateway = await startGateway(t, backend, tokens({ allow: ['info'] }), {}, changed.createGateway);
    const markerOf = async () => {
      await ask(gateway, callOf('version', {}));
      return (globalThis as { lastMarker?: string }).lastMarker!;
    };
    const [first, second] = [await markerOf(), await markerOf()];
    assert.ok(first.length === 24 && second.length === 24 && first !== second, `${first} ${second}`);
  });

  test('a batch, no object and a second reading of keys are refused; the last of two keys is checked and sent', async (t) => {
    const both = await startDaemon(t, { allow: ['send', 'info'], ...LISTED });
    const call = callOf('send', SEND).body as string;
    for (
      const body of [
        `[${call}]`,
        '[]',
        '',
        'x',
        '"x"',
        `{"method":"send","params":[]}`,
        '{"method":["send"]}',
        '{}',
        String.raw`{"method":"send","params":{"a\\":1}}`,
        '{"method":"version","id":12345678901234567890}',
        '{"method":"version","id":-12345678901234567890}',
      ]
    ) {
      const { status } = await ask(both.gateway, { ...callOf('send', SEND), body });
      assert.ok(status === 400 || status === 403, `${status} ${body}`);
    }
    assert.equal(both.backend.connections, 0);
    const batch = await ask(both.gateway, { ...callOf('send', SEND), body: ` \n[${call}]` });
    assert.match(String((batch.json.error as unknown as JsonError).message), /A batch of calls is not accepted/);
    const bad = `{"method":"send","params":{"account":"${FROM}","recipient":"${TO}","recipient":"${STRANGER}"},"id":1}`;
    assert.equal((await ask(both.gateway, { ...callOf('send', SEND), body: bad })).status, 403);
    assert.equal(both.backend.connections, 0);
    const good =
      `{"method":"send","params":{"account":"${FROM}","\\u0072ecipient":"${STRANGER}","recipient":"${TO}"},"id":1}`;
    assert.equal((await ask(both.gateway, { ...callOf('send', SEND), body: good })).status, 200);
    assert.doesNotMatch(both.backend.seen.map(({ body }) => `${body}`).join(), new RegExp(STRANGER.slice(1)));
  });

  test('the token may stand in each of its places, and never reaches the daemon', async (t) => {
    const methods = ['bearer', 'basic', 'body', 'path', 'query'];
    const both = await startDaemon(t, { allow: ['send'], methods, ...LISTED }, { auth: { methods } });
    const body = JSON.stringify({ auth: SECRET, method: 'send', params: SEND, id: 1 });
    const basic = `Basic ${btoa(`api:${SECRET}`)}`;
    const plain = { method: 'POST', body: callOf('send', SEND).body };
    for (
      const request of [
        { ...plain, path: '/api/v1/rpc', headers: { authorization: basic } },
        { ...plain, path: `/@auth=${SECRET}/api/v1/rpc` },
        { method: 'POST', path: '/api/v1/rpc', body },
      ]
    ) assert.equal((await ask(both.gateway, request as Ask)).status, 200);
    assert.equal(both.backend.seen.length, 3);
    assert.doesNotMatch(
      JSON.stringify(both.backend.seen.map(({ body, ...each }) => [each, `${body}`])),
      /correct-horse/,
    );
  });

  test('the start knows the daemon, and test sends through it, to each recipient under its own name', async (t) => {
    const calls: unknown[] = [];
    const answers = ['{"result":{"timestamp":1},"id":1}', '{"error":{"code":-1,"message":"Unregistered user"},"id":1}'];
    const daemon = http.createServer((req, res) => {
      req.toArray().then((chunks) => {
        if (req.url === '/api/v1/check') return void res.end();
        if (req.url !== '/api/v1/rpc') return void res.writeHead(404).end();
        calls.push(jsonIn(Buffer.concat(chunks).toString()));
        res.end(answers[calls.length - 1]);
      }, () => {});
    });
    const backend = { url: await serve(t, daemon) };
    const gateway = await startProcess(t, { backend });
    await until(() => linesOf(gateway, /^the backend answers/).length === 1);
    assert.equal(linesOf(gateway, /^the backend answers/)[0]!.mode, 'signal-cli daemon');

    const hermes = { secret: SECRET, allow: ['messaging'], ...LISTED };
    const file = fileWith(t, { backend, tokens: { hermes } });
    const good = await cli(['--config', file, 'test', 'hermes', GROUP]);
    assert.equal(good.code, 0, good.stderr);
    assert.match(good.stdout, /the backend answers 200 .*Look at the phone/s);
    const bad = await cli(['--config', file, 'test', 'hermes', NAME]);
    assert.deepEqual([bad.code, bad.stdout], [1, '']);
    assert.match(bad.stderr, /the backend answers 200 .*Unregistered user/);
    const refused = await cli(['--config', file, 'test', 'hermes', STRANGER]);
    assert.match(refused.stderr, /may not send to one of these recipients/);
    const params = { account: FROM, message: 'Test of the gateway', recipient: [], username: [], groupId: [] };
    assert.deepEqual(calls, [
      { jsonrpc: '2.0', method: 'send', params: { ...params, groupId: [INTERNAL_ID] }, id: 1 },
      { jsonrpc: '2.0', method: 'send', params: { ...params, username: [NAME] }, id: 1 },
    ]);
  });

  test('a call that waits for its slot is refused if a reload takes its method, its account or its recipient', async (t) => {
    const allow = ['messaging', 'info'];
    const unread = { allow: ['POST /api/v1/rpc'] };
    const rows: [after: object, outcome: string, before?: object][] = [
      [{ ...LISTED, allow: ['info'] }, '403 endpoint_not_allowed'],
      [{ ...LISTED, allow, recipients: [NAME] }, '403 recipient_not_allowed'],
      [{ ...LISTED, allow, senders: [THIRD] }, '403 sender_not_allowed'],
      [{ ...LISTED, allow, recipients: [TO] }, '201 undefined'],
      [{ allow }, '403 endpoint_not_allowed', unread], // it was relayed unread
      [{ allow: [...unread.allow, 'info'] }, '201 undefined', unread],
    ];
    for (const [after, outcome, before = { allow, ...LISTED }] of rows) {
      const { backend, gateway } = await startHeld(t, 1);
      const use = (token: object): void =>
        gateway.reload({ ...tokens(token, {}), backend: { url: backend.url, wait: '0', parallel: 1, timeout: '1h' } });
      use(before);
      const first = send(gateway, 'holds the slot', OTHER);
      await until(() => backend.acting === 1);
      const waiting = ask(gateway, callOf('send', SEND));
      for (let i = 0; i < 3; i++) await settled(gateway);
      use(after);
      await answerAll(backend, [first]);
      if (outcome.startsWith('201')) {
        await until(() => backend.acting > 0);
        backend.answer();
      }
      const { status, json } = await waiting;
      assert.equal(`${status} ${json.code}`, outcome);
      assert.equal(backend.seen.length, outcome.startsWith('201') ? 2 : 1);
    }
  });

  test('events of a token with senders name one account of its list, however the query is written', async (t) => {
    const both = await startDaemon(t, { allow: ['receive', 'GET /api/v1/events'], senders: [FROM] });
    const [own, other] = [encodeURIComponent(FROM), encodeURIComponent(STRANGER)];
    for (
      const query of [
        '',
        '?',
        `?account=${other}`,
        '?account=',
        `?account=${own}&account=${other}`,
        `?Account=${own}`,
        `?account=${own}&x=1`,
        `?account=${STRANGER}`,
      ]
    ) {
      const { status } = await ask(both.gateway, { path: `/api/v1/events${query}`, headers: BEARER });
      assert.ok(status === 400 || status === 403, `${status} ${query}`);
    }
    assert.equal(both.backend.connections, 0);
    for (const query of [`account=${own}`, `%61ccount=${own}`, `account=${FROM}`]) {
      assert.equal((await ask(both.gateway, { path: `/api/v1/events?${query}`, headers: BEARER })).status, 200);
      assert.equal(both.backend.seen.at(-1)!.url, `/api/v1/events?account=${own}`);
    }
  });

  test('of a query that names an account, only the plus of a phone number is restored', async (t) => {
    const { backend, gateway } = await startDaemon(t, { allow: ['receive'] });
    for (const query of ['account=+x', 'account=a+5']) {
      assert.equal((await ask(gateway, { path: `/api/v1/events?${query}`, headers: BEARER })).status, 200);
      assert.equal(backend.seen.at(-1)!.url, `/api/v1/events?${query}`);
    }
  });
});
