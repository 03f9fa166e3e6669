import { suite } from 'node:test';
import { assert, problemsOf, requests, until } from './assertions.ts';
import { ask } from './client.ts';
import { ALL_METHODS, tokens } from './configs.ts';
import { fileWith, fixture } from './files.ts';
import { loadSettings, Template } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import {
  hook,
  inEachForm,
  LIMIT,
  MADE,
  MEANT,
  PNG,
  reading,
  READS_TEXT,
  render,
  SNAP,
  TO_ALL,
  UNDECLARED,
} from './hooks.ts';
import { checkRows, listed, literal, table, unescaped } from './rows.ts';
import {
  BEARER,
  DEFAULTS,
  FROM,
  GROUP,
  HELLO,
  INTERNAL_ID,
  MIB,
  OTHER,
  SECRET,
  SECRETS,
  STRANGER,
  THIRD,
  TO,
  URLENCODED,
} from './samples.ts';
import { cli, startBoth } from './start.ts';

suite('messages', SIDE_BY_SIDE, () => {
  table('webhook: a new send is made from its fields, and nothing else is relayed', hook(TO_ALL))`
    * ${MADE} | same
    {"message":"hi"} ;; {"message":"hi","number":"${THIRD}","recipients":["+15550100004","${GROUP}"]}
    # The other fields of a send, of whatever type: that is the backend's to judge.
    {"base64_attachments":["QUJD"]} ;; {"sticker":"a:1"} ;; {"message":"x","notify_self":false,"view_once":true}
    {"message":"see https://a.b","link_preview":{"url":"https://a.b","title":"A","base64_thumbnail":"QUJD"}}
    {"message":"x","quote_timestamp":1,"quote_author":"${TO}","quote_message":"x","quote_mentions":[{"start":0}]}
    {"message":"hi","mentions":[null],"quote_timestamp":"1","quote_author":7,"quote_message":{}}
    {"message":"x","quote_mentions":"x","edit_timestamp":1.5,"notify_self":"false","view_once":1,"sticker":["a:1"]}
    {"message":"x","text_mode":"html","link_preview":{"url":"https://a.b","title":1,"constructor":1}}
    @ {"defaults":{"number":"${FROM}","recipients":["${TO}"],"text_mode":"styled"}} | {"message":"hi","text_mode":"normal"}
    * ${MADE} | {"message":"hi"}
    {"message":"hi","number":2} ;; {"message":"hi","number":""} ;; {"message":"hi","number":["${THIRD}"]}
    {"message":"hi","number":null,"recipients":null,"recipient":null,"base64_attachments":null,"text_mode":null,"sticker":null,"Recipients":null}
    # Keys given twice that are not its own, and fields of others.
    {"message":"x","message":"hi","a":{"a":1},"b":"\"number\":1,","number":1,"c":[{"number":1},{"number":2}]}
    {"message":"hi","members":["${STRANGER}"],"admins":["${STRANGER}"],"Message":"x","":"x"}
    {"message":"hi","alerts":[],"__proto__":{"number":"${STRANGER}"},"version":"1","is_group":true,"toString":"x"}
    {"message":"hi","numbers":["x"],"recipes":["x"],"receipt":"x","Sticker":"a:1","TEXT_MODE":"x"}
    * ${MADE}
    {"message":"hi","recipients":"${THIRD}"} → {"message":"hi","recipients":["${THIRD}"]}
    {"message":"hi","recipients":["${THIRD}"],"recipient":""} → {"message":"hi","recipients":["${THIRD}"]}
    {"title":"t","base64_attachments":["QUJD"]} → {"base64_attachments":["QUJD"]} ;; {"title":"t","sticker":"a:1"} → {"sticker":"a:1"}
    {"message":"hi","base64_attachments":"aGk="} → {"message":"hi","base64_attachments":["aGk="]}
    @ {"defaults":{"number":"${FROM}","recipients":["${TO}"],"text_mode":"styled"}} | {"message":"hi"} → {"message":"hi","text_mode":"styled"}
    @ {"defaults":{},"message":"{{a.b}}!"} | {"a":{"b":"x"},"number":"${FROM}","recipients":["${TO}"]} → {"message":"x!"}
    @ {"message":"> {{message}}"} | {"message":"hi"} → {"message":"> hi"}
    @ {"message":"{{a}} {{b}} {{c}}{{d}}"} | {"a":[1,{"x":null}],"b":1.50,"c":true} → {"message":"[1,{\"x\":null}] 1.5 true"}`;

  // They were silently dropped, and the message went to the default recipient.
  const LOST = listed`
    "recipients":[15550100003] ;; "recipients":15550100003 ;; "recipients":[] ;; "recipients":""
    "Recipients":["+15550100003"] ;; "Recipients":"" ;; "recipient\u017f":["+15550100003"] ;; "recipients":{"toString":1} ;; "recipient":"","recipients":null
    "recipient":"+15550100003" ;; "recipient":"" ;; "recipient":["+15550100003"] ;; "Recipient":"+15550100003"
    "recipients":["${TO}"],"recipient":"+15550100003" ;; "recipients":["${TO}"],"RECIPIENTS":["+15550100003"]
    " recipients":["+15550100003"] ;; "recipients":"${INTERNAL_ID}" ;; "number":"15550100003" ;; "number":"+15550100003 "
    "number":" " ;; "number":"x" ;; "Number":"+15550100003" ;; "NUMBER":2 ;; "number ":"+15550100003"
    "base64_attachments":[1] ;; "Base64_Attachments":["QUJD"] ;; "ba\u017fe64_attachments":"QUJD"
    "link_preview":{"Base64_thumbnail":"QUJD"} ;; "link_preview":[] ;; "recipients.0":"a.01" ;; "recipients[a]":"a.01" ;; "recipients[0][1]":"a.01"
    "@recipients":["a.01"] ;; "amp;recipients":["a.01"] ;; "recipients\u200b":["a.01"] ;; "\u0000recipients":["a.01"]`;

  const SPACES = ' '.repeat(150);
  // Short without what is not seen, so no cut of a long name may lose it.
  LOST.push(...[`recipients${SPACES}${SPACES}`, `${SPACES}number${SPACES}`].map((name) => `"${name}":"a.01"`));
  // What stands before or behind the field may be as long as it likes.
  LOST.push(...[`${'a'.repeat(250)};recipients`, `recipients[${'a'.repeat(250)}]`].map((name) => `"${name}":"a.01"`));

  // JSON.parse takes the last of two, and null counts as absent: the message would go to the default.
  const LOST_TWICE = listed`
    "recipients":["+15550100003"],"recipients":null ;; "recipients":["+15550100003"],"\u0072ecipients":["+15550100004"]
    "Recipients":["a.01"],"Recipients":null ;; "number":"+15550100003","\u006eumber":null ;; "base64_attachments":["QUJD"],"base64_attachments":null`;

  for (const [of, config] of [['that may write to everyone', hook(TO_ALL)], ['without lists', hook()]] as const) {
    table(`attack: lose a recipient, a sender or a picture on the way to the defaults of a token ${of}`, config)`
    * bearer → 400 bad_field
    ${[...LOST, ...LOST_TWICE].map((fields) => `{"message":"x",${fields}}`)}
    ${LOST.map((fields) => `{${fields},"message":"x"} | Content-Type: text/plain`)}
    ${LOST_TWICE.map((fields) => `'payload=${encodeURIComponent(`{${fields},"message":"x"}`)}'`)}`;
  }

  /** Payloads with somebody who is not in the defaults, in each form. */
  const NAMES_OTHERS = [
    ['number', STRANGER, '403 sender_not_allowed'],
    ['recipients', STRANGER, '403 recipient_not_allowed'],
    ['recipients', GROUP, '403 recipient_not_allowed'],
    ['recipients', 'ada.01', '403 recipient_not_allowed'],
  ].flatMap(([name, value, outcome]) =>
    [
      ...inEachForm(new URLSearchParams({ message: 'x', [name!]: value! }).toString()),
      `{"message":"x","${name}":"${value}"}`,
      `'payload=${encodeURIComponent(`{"message":"x","${name}":"${value}"}`)}'`,
    ].map((row) => `${row} → ${outcome}`)
  );

  const EVERY_ROUTE = {
    ...ALL_METHODS,
    allow: ['messaging', 'GET /v2/send', 'GET /v1/contacts/:number', '* /v1/new/*'],
  };

  table('defaults confine: a token without lists uses the account and the recipients of its defaults alone', {
    ...{ ...EVERY_ROUTE, tokens: { hook: { secret: SECRET, defaults: DEFAULTS } } },
  })`
    * bearer
    ${NAMES_OTHERS}
    {"message":"x","recipients":["${TO}","${STRANGER}"]} → 403 recipient_not_allowed | "on its list (\"recipients\", or else those in \"defaults\")."
    {"message":"x","number":"${STRANGER}"} → 403 sender_not_allowed | "on its list (\"senders\", or else the number in \"defaults\")."
    # What says the same as the defaults is what it was.
    {"message":"x","number":"${FROM}","recipients":["${TO}"]} → 201 | {"message":"x","number":"${FROM}","recipients":["${TO}"]}
    # Every other route holds the lists too.
    POST /v1/send | ${HELLO} → 201 ;; POST /v1/send | {"message":"x","number":"${FROM}","recipients":["${STRANGER}"]} → 403 recipient_not_allowed
    POST /v1/send | {"message":"x","number":"${STRANGER}","recipients":["${TO}"]} → 403 sender_not_allowed
    POST /v1/send | {"message":"x","recipients":["${TO}"]} → 400 bad_field
    GET /v1/receive/${FROM} → 200 ;; GET /v1/receive/${STRANGER} → 403 sender_not_allowed
    GET /v1/receive/${STRANGER} | Connection: Upgrade | Upgrade: websocket | Sec-WebSocket-Key: x → 403 sender_not_allowed
    GET /v1/contacts/${STRANGER} → 403 sender_not_allowed ;; GET /v1/attachments → 403 endpoint_not_allowed
    PUT /v1/typing-indicator/${FROM} | {"recipient":"${TO}"} → 204 ;; PUT /v1/typing-indicator/${FROM} | {"recipient":"${STRANGER}"} → 403 recipient_not_allowed
    POST /v1/groups/${FROM} | {"name":"x","members":["${TO}"]} → 403 endpoint_not_allowed ;; POST /v1/new/x | {} → 403 endpoint_not_allowed
    # One list says nothing of the other.
    @ {"defaults":{"number":"${FROM}"}} | {"message":"x","recipients":["${STRANGER}"]} → 201
    @ {"defaults":{"number":"${FROM}"}} | {"message":"x","recipients":["${TO}"],"number":"${STRANGER}"} → 403 sender_not_allowed
    @ {"defaults":{"recipients":["${TO}"]}} | {"message":"x","number":"${STRANGER}"} → 201
    @ {"defaults":{"recipients":["${TO}"]}} | {"message":"x","number":"${FROM}","recipients":["${STRANGER}"]} → 403 recipient_not_allowed
    @ {"defaults":{"text_mode":"styled"}} | {"message":"x","number":"${STRANGER}","recipients":["${STRANGER}"]} → 201
    # Its own list replaces the one of its defaults, and "*" is everyone.
    @ {"recipients":["${TO}","group.*"]} | {"message":"x","recipients":["${GROUP}"]} → 201 ;; @ {"recipients":["${TO}","group.*"]} | {"message":"x","recipients":["${STRANGER}"]} → 403 recipient_not_allowed
    @ {"recipients":["*"]} | {"message":"x","recipients":["${STRANGER}","${GROUP}","ada.01"]} → 201 ;; @ {"recipients":["*"]} | {"message":"x","number":"${STRANGER}"} → 403 sender_not_allowed
    @ {"senders":["*"]} | {"message":"x","number":"${STRANGER}"} → 201 ;; @ {"senders":["*"]} | {"message":"x","recipients":["${STRANGER}"]} → 403 recipient_not_allowed
    @ {"senders":["*"]} | GET /v1/receive/${STRANGER} → 200
    @ {"recipients":["*"],"senders":["*"]} | POST /v1/new/x | {} → passes`;

  const READS_OTHERS = reading('{{number}} {{recipients}}{{#call}}{{text}}{{/call}}');

  table("with a template, another program's number and recipients are data where the defaults have their own", {
    ...hook({ ...READS_OTHERS, allow: ['send', 'GET /v2/send'] }),
  })`
    * ${MADE}
    {"number":"${THIRD}"} → {"message":"${THIRD} "} ;; {"number":"030 1234"} → {"message":"030 1234 "} ;; {"number":5} → {"message":"5 "}
    {"number":"anonymous","call":{"text":"rings"}} → {"message":"anonymous rings"}
    {"recipients":["ada@example.org"]} → {"message":" [\"ada@example.org\"]"} ;; {"recipients":[]} → {"message":" []"} ;; {"recipients":{"a":1}} → {"message":" {\"a\":1}"}
    {"recipients":"${STRANGER}","number":"${STRANGER}"} → {"message":"${STRANGER} ${STRANGER}"} ;; {"number":5,"recipients[]":["${STRANGER}"]} → {"message":"5 "}
    'number=030+1234' → {"message":"030 1234 "} ;; GET /v2/send?recipients=a → {"message":" a"} ;; -- recipients = a -- recipients = b → {"message":" [\"a\",\"b\"]"}
    -- payload = {"number":"${STRANGER}","recipients":[1]} -- x = y -- number = 5 → {"message":"5 "}
    # The other lists of the token do not matter to them.
    @ {"senders":["*"],"recipients":["*"]} | {"recipients":"${STRANGER}","number":"${STRANGER}"} → {"message":"${STRANGER} ${STRANGER}"}
    # Where the defaults have none, they count.
    @ {"defaults":{"number":"${FROM}"}} | {"number":"5","recipients":["${THIRD}"]} → {"message":"5 [\"${THIRD}\"]","recipients":["${THIRD}"]}
    @ {"defaults":{"recipients":["${TO}"]}} | {"number":"${THIRD}","recipients":[1]} → {"message":"${THIRD} [1]","number":"${THIRD}"}
    * bearer → 400 bad_field
    @ {"defaults":{"number":"${FROM}"}} | {"number":"5","recipients":[1]} ;; @ {"defaults":{"recipients":["${TO}"]}} | {"number":"030 1234"}
    {"number":5,"Recipients":["${THIRD}"]} ;; {"number":5,"recipient":"${THIRD}"} ;; {"number":5,"recipients.0":["${THIRD}"]} ;; {"number":5,"Number":5}
    'number=5&number=6' ;; {"number":5,"number":6} ;; {"number":5,"base64_attachments":[1]}`;

  // V8 in Node 24 and 26 takes the second key of each pair for the first one.
  test('a key that the runtime takes for another one changes neither the account nor the recipients', async (t) => {
    const { backend, gateway } = await startBoth(t, hook());
    for (const [i, key] of ['recipient', 'numbe'].entries()) {
      const last = ['\\u0073":["', '\\u0072":"'][i]!;
      for (const member of [`"${key}\\\\":0`, `"${key}${last}${STRANGER}"${i === 0 ? ']' : ''}`]) {
        const { status, json } = await ask(gateway, { body: `{"key${i}":1,"message":"x",${member}}`, headers: BEARER });
        assert.ok(
          status === 201 || /^(?:(?:sender|recipient)_not_allowed|bad_json)$/.test(json.code),
          `${status} for ${member}`,
        );
      }
    }
    for (const sent of backend.sent) assert.deepEqual(sent, { ...DEFAULTS, message: 'x' });
  });

  const ANY_TYPES = ['text/plain', 'application/json', 'application/octet-stream', 'multipart/form-data; boundary=x'];

  table(
    "a webhook's JSON is read whatever its Content-Type, and the backend gets that of the new send",
    hook(READS_TEXT),
  )`
    ${[...UNDECLARED, ...ANY_TYPES.map((type) => `* Content-Type: ${type} | ${MADE}`)]}
    ' \n{"text":"a=b&c=%41 ü 😀"}\n' | Content-Language: en | Content-MD5: x → {"message":"a=b&c=%41 ü 😀"} | > Content-MD5: | > Content-Language:
    {"text":"x"} | X-Hub-Signature-256: y → {"message":"x"} | > X-Hub-Signature-256: y`;

  /**
   * Ends of a key, of which V8 can take each for another one: it compares the source of a key, cut at the length of the
   * key, with a key that it has seen.
   */
  const ESCAPED_ENDS = ['\\\\\\/', '\\/x', '\\\\', '\\"', '\\n', '\\u00e9', '\\u0001', '\\u005c', '\\ud83d\\ude00'];

  test('attack: post a key that is then read in place of a key of another token, which ends in another escape', async (t) => {
    const { backend, gateway } = await startBoth(t, {
      tokens: {
        hostile: { secret: OTHER, defaults: DEFAULTS },
        honest: { secret: SECRET, ...reading('{{titre}}: {{priorité}}') },
        plain: { secret: `${SECRET}2`, ...TO_ALL },
      },
    });
    const post = async (secret: string, body: string) => {
      const { status } = await ask(gateway, { headers: { authorization: `Bearer ${secret}` }, body });
      const sent = backend.seen.splice(0).map((seen) => JSON.parse(String(seen.body)));
      return status < 400 ? sent[0] : status;
    };
    // A hostile body is refused, or is a send of its own. Each pair has a first key of its own: V8 confuses two keys
    // only after the same keys.
    const honest: [secret: string, body: string, sent: object][] = [
      [SECRET, String.raw`"titre":"Alarme","priorit\u00e9":"haute"`, { message: 'Alarme: haute', ...DEFAULTS }],
      [`${SECRET}2`, String.raw`"message":"x","recipient\u0073":["${THIRD}"]`, {
        message: 'x',
        number: FROM,
        recipients: [THIRD],
      }],
    ];
    for (const [i, [secret, body, sent]] of honest.entries()) {
      const begin = body.slice(0, body.lastIndexOf('\\u'));
      for (const [j, end] of ESCAPED_ENDS.entries()) {
        for (const refused of ['', ',']) {
          const first = `"k${i}${j}${refused.length}":1`;
          await post(OTHER, `{${first},${begin}${end}":0${refused}}`);
          assert.deepEqual(await post(secret, `{${first},${body}}`), sent, `after ${end}`);
          // In the other order.
          const second = `"l${i}${j}${refused.length}":1`;
          assert.deepEqual(await post(secret, `{${second},${body}}`), sent, `before ${end}`);
          await post(OTHER, `{${second},${begin}${end}":0${refused}}`);
          assert.deepEqual(await post(secret, `{${second},${body}}`), sent, `again after ${end}`);
        }
      }
    }
    // JSON in the field of a form.
    for (const [i, field] of ['payload', 'data'].entries()) {
      const begin = `{"f${i}":1,"titre":"Alarme","priorit`;
      const inForm = (json: string) => String(new URLSearchParams({ [field]: json }));
      await post(OTHER, inForm(String.raw`${begin}\\":0}`));
      const sent = await post(SECRET, inForm(String.raw`${begin}\u00e9":"haute"}`));
      assert.deepEqual(sent, { message: 'Alarme: haute', ...DEFAULTS }, field);
    }
    // A credential, below other keys too.
    for (const [i, depth] of [1, 2, 3].entries()) {
      const wrap = (member: string) =>
        `{"m${i}":${'{"n":'.repeat(depth)}{"x":1,${member}}${'}'.repeat(depth)},"titre":"x"}`;
      await post(OTHER, wrap(String.raw`"aut\\":0`));
      const body = wrap(`"aut\\u0068":"the-token"`);
      assert.deepEqual(await post(SECRET, body), { message: 'x: ', ...DEFAULTS });
    }
    assert.doesNotMatch(gateway.log.join(''), SECRETS);
  });

  const KEYS_READ: [body: string, read: string][] = [
    // What stands for a key while V8 parses the document, written by a client.
    [
      String.raw`{"\ud8000":1,"\u0061":2,"\ud8001":{"0":3,"\ud800":4}}`,
      String.raw`{"\ud8000":1,"a":2,"\ud8001":{"0":3,"\ud800":4}}`,
    ],
    [String.raw`{"\u0061":[{"\u0061":1,"b":{"\u0061":2}},{"\u0061" : 3}]}`, '{"a":[{"a":1,"b":{"a":2}},{"a":3}]}'],
    // The last of equal keys counts, in the place of the first.
    [String.raw`{"\u0031":1,"1":2}`, '{"1":2}'],
    [String.raw`{"\n":1,"a":2,"\u000a":3,"\n":4}`, String.raw`{"\n":4,"a":2}`],
    [String.raw`{"a":1,"\u0061":2,"a":3,"\u0061":4}`, '{"a":4}'],
    [String.raw`{"a":1,"b":2,"\u0061":3}`, '{"a":3,"b":2}'],
    [String.raw`{"\u0061":1,"b":2,"a":3,"\u0062":4}`, '{"a":3,"b":4}'],
    [String.raw`{"\u005f_proto__":{"x":1},"a":{"_\u005fproto__":2}}`, '{"__proto__":{"x":1},"a":{"__proto__":2}}'],
    [String.raw`{"z":0,"\u0031":1,"é\u00e9":"é\n"}`, String.raw`{"1":1,"z":0,"éé":"é\n"}`],
    [String.raw`{"a":{"\u0061uth":"x","b":["\"auth\":"]}}`, String.raw`{"a":{"b":["\"auth\":"]}}`],
  ];

  test('attack: keys with an escape are read as they are written, at every depth, whatever was read before', async (t) => {
    const file = fileWith(t, { tokens: { hook: { secret: SECRET, ...reading('{{.}}') } } });
    const readAs = async (json: string) => {
      const { code, stdout, stderr } = await cli(['render', 'hook', '--config', file], { input: json });
      if (/a key may not contain a backslash/.test(stderr)) return undefined;
      assert.equal(code, 0, stderr);
      return JSON.parse(stdout).message; // as text: JSON.parse of the test would confuse the keys, too
    };
    for (const [body, read] of KEYS_READ) assert.equal(await readAs(body), read, body);
    for (const [i, first] of ESCAPED_ENDS.entries()) {
      for (const [j, second] of ESCAPED_ENDS.entries()) {
        for (const depth of [0, 1, 3]) {
          // JSON.parse of a single string has no keys to confuse.
          const key = (end: string) => JSON.parse(`"key${end}"`) as string;
          const text = (end: string) => `${'{"a":['.repeat(depth)}{"p${i}-${j}":1,"key${end}":0}${']}'.repeat(depth)}`;
          const value = (end: string) => {
            let inner: unknown = { [`p${i}-${j}`]: 1, [key(end)]: 0 };
            for (let level = 0; level < depth; level++) inner = { a: [inner] };
            return inner;
          };
          for (const end of [first, second, first]) {
            assert.equal(
              await readAs(text(end)),
              key(end).includes('\\') ? undefined : JSON.stringify(value(end)),
              `${first} and ${second} ${depth} levels deep`,
            );
          }
        }
      }
    }
  });

  test('a configuration file is read as it is written, whatever was read before', (t) => {
    const own = `{"listen":"127.0.0.1:0","token\\u0073":{"phone":{"secret":"${SECRET}","recipient\\u0073":["${TO}"]}}}`;
    const other = own.replaceAll('\\u0073', '\\\\');
    const file = fileWith(t, other);
    const problems = problemsOf(() => loadSettings({ file }));
    assert.deepEqual(problems.map((problem) => problem.replace(/;.*/, '')), [
      `${file}: is not a JSON object: line 1, column 32: a key may not contain a backslash`,
    ]);
    const [token] = loadSettings({ file: fileWith(t, own) }).tokens;
    assert.deepEqual(token!.recipients, new Set([TO]));
  });

  table(
    'a text that contains the token of its request is refused, however it is posted',
    hook(reading('{{message}}{{a}}')),
  )`
    * bearer → 400 bad_field | "contains the API token"
    'Door 1\n@auth=${SECRET}' ;; 'x ${SECRET}' | Content-Type: text/plain ;; {"message":"${SECRET}"} ;; {"a":["${SECRET}"]}
    'send_at=[{"auth":"${SECRET}"}]&message=a' | Content-Type: text/plain ;; -- message = x${SECRET} ;; 'message=%63${
    SECRET.slice(1)
  }'
    * basic → 400 bad_field
    'Door 1\n@auth=${SECRET}'`;

  /** What must not get into a text: a credential in the JSON of a field, whatever stands around it. */
  table(
    'attack: hide a credential in the JSON of a field that the template shows',
    hook(reading('{{payload}}{{data}}{{a}}')),
  )`
    * bearer → 400
    'payload=%1b[0m{"auth":"${SECRET}"}' ;; 'data=%00{"auth":"${SECRET}"}' ;; 'payload=[{"auth":"${SECRET}"}]' ;; 'data=[1,[{"auth":"${SECRET}"}]]'
    'payload=%27{"auth":"${SECRET}"}%27' ;; -- payload = [{"auth":"${SECRET}"}] ;; -- data = \x1b[0m{"auth":"${SECRET}"}
    * ${MADE}
    {"a":{"b":[{"auth":"${SECRET}"},{"c":1,"Auth":"${SECRET}"}]}} → {"message":"{\"b\":[{},{\"c\":1}]}"}
    'payload={"x":{"auth":"${SECRET}"}}&y=1' → {"message":"{\"x\":{}}"}
    -- data = x -- auth; filename="a.txt" = ${SECRET} → {"message":"x"} ;; -- data = x -- auth = ${SECRET} → {"message":"x"}
    'payload=[info] all {well}' → {"message":"[info] all {well}"} ;; 'data=[1' → {"message":"[1"}`;

  table('the names of fields in a refusal are short enough to hold no secret', hook())`
    * bearer → 400
    GET /v2/send?message=x&@auth${SECRET} | @ {"defaults":{},"allow":["GET /v2/send"]}
    POST /v2/send?x${SECRET};recipients=x | {"message":"x"} ;; POST /v2/send?recipients[${SECRET}]=x | {"message":"x"}
    {"${SECRET}":1} ;; {"x":1,"recipients[${SECRET}]":1,"message":"x"} ;; {"${SECRET};number":1,"message":"x"}
    '${SECRET}=&payload=x' | Content-Type: ${URLENCODED} ;; 'message=x&${SECRET};number=1' | Content-Type: ${URLENCODED}
    -- ${SECRET};number; filename="x" = 1
    {"message":"x","recipients":[],"recipients[${SECRET}]":[],"recipients[${SECRET}]":[]}`;

  const CONTACTS = listed`
    "to":"X" ;; "To":["X"] ;; "target":"X" ;; "targets":["x","X"] ;; "destination":"X" ;; "groups":["X"] ;; "group_id":"X" ;; "chat_id":"X" ;; "numbers":["X"]
    "receivers":["X"] ;; "to[]":"X" ;; "@to":"X" ;; "recipient_number":"X" ;; "recipientList":["X"] ;; "phone":"X" ;; "to":{"phone":"X"}
    "receipients":["X"] ;; "recipents":"X" ;; "Recepients":["X"] ;; "recepiant":"X" ;; "recipients_":["X"] ;; "recipients2":"X" ;; "receipient":["X"]`;

  table('attack: name a recipient in another spelling or another field than a send has', hook(TO_ALL))`
    * bearer → 400 bad_field
    {"message":"x","recipients​":"a.01"} ;; 'message=x&base64_attachment=QUJD' ;; {"message":"x","base64_attachment":"QUJD"} ;; -- message = x -- base64_attachment = QUJD
    'message=x&recipients=+1+555+010+0003' ;; {"message":"x","recipients":[" 15550100003"]} ;; {"message":"x","recipients":["  1 555"]}
    * 'x' | bearer → 400 bad_field
    POST /v2/send?number=5 ;; POST /v2/send?x=1&amp;recipients=a ;; POST /v2/send?base64_attachments=QUJD ;; POST /v2/send?recipients[]=a
    POST /v2/send?@recipients=a ;; POST /v2/send?%40recipients=a ;; POST /v2/send?@number=5
    * @ {"allow":["GET /v2/send"]} | bearer → 400 bad_field
    GET /v2/send?message=x&recipients= ;; GET /v2/send?message=x&@recipients=a.01 ;; GET /v2/send?@message=y
    * ${MADE} | {"message":"x"}
    # By another name, whatever it holds, it is data.
    ${CONTACTS.map((pair) => `{"message":"x",${pair.replaceAll('X', THIRD)}}`)}
    'message=x&to=%2B15550100003' ;; 'receipients=%2B15550100003&message=x' ;; -- message = x -- to = +15550100003 -- reciepients = a.01
    * 'x' | ${MADE} | {"message":"x"}
    POST /v2/send?to=%2B15550100003&text=y ;; POST /v2/send?receipients=a
    @ {"allow":["GET /v2/send"]} | none | GET /v2/send?message=x&to=%2B15550100003&recipents=a | bearer
    * ${MADE}
    -- message = x -- base64_attachment; filename="snap.png"\r\n${PNG} → {"message":"x","base64_attachments":["${SNAP}"]}`;

  table('a recipient that starts with a space has lost its plus, and is refused for every token', {
    allow: ['messaging'],
  })`
    * bearer → 400 bad_field | "may not begin with a space"
    {"message":"x","number":"${FROM}","recipients":[" 15550100003"]} ;; {"message":"x","number":"${FROM}","recipients":["${TO}","  1 555"]}
    POST /v1/groups/${FROM} | {"name":"x","members":[" 15550100003"]} ;; POST /v1/reactions/${FROM} | {"recipient":" 15550100003","reaction":"x"}`;

  // With these templates a webhook that changed its shape was 201, and nobody noticed for weeks.
  table(
    'a template that has variables outside of sections and finds none of its names, in sections either, is 400',
    hook(),
  )`
    * bearer → 400 bad_field | reason=no_message | "The token's template finds nothing in this body"
    @ {"message":"Alerts for {{receiver}}"} | {"alerts":[]} ;; @ {"message":"Alerts for {{receiver}}"} | 'hello world' ;; @ {"message":"{{a}}: {{b}}"} | {"foo":"bar"}
    @ {"message":"{{a}}: {{#b}}{{c}}{{/b}}{{^d}}{{e}}{{/d}}"} | {"b":{"d":1},"d":1} ;; @ {"message":"{{a}}: {{#b}}x{{/b}}"} | {"b":1} ;; @ {"message":"{{a.b}}!"} | {"a":{"c":1}}
    @ {"message":"{{#who}}{{.}}{{/who}}"} | 'hello' ;; @ {"message":"{{a}}!"} | {"base64_attachments":["QUJD"]} ;; @ {"message":"{{a}}!"} | {"b":"c","base64_attachments":["QUJD"]}
    * @ {"message":"Alerts for {{receiver}}"} | bearer → 400 bad_field | reason=no_message
    {} ;; ''
    * ${MADE}
    @ {"message":"Backup done{{#size}} ({{size}}){{/size}}"} | {"foo":1} → {"message":"Backup done"} ;; @ {"message":"Backup done{{#size}} ({{size}}){{/size}}"} | {} → {"message":"Backup done"}
    @ {"message":"Rang"} | 'hello' → {"message":"Rang"} ;; @ {"message":"{{^alerts}}none{{/alerts}}"} | {"x":1} → {"message":"none"}
    @ {"message":"{{a}}: {{b}}"} | {"a":""} → {"message":": "} ;; @ {"message":"{{a}}: {{b}}"} | {"b":null} → {"message":": "} ;; @ {"message":"> {{.}}"} | {"x":1} → {"message":"> {\"x\":1}"}
    @ {"message":"{{#b}}{{c}}{{/b}}: {{^a}}{{message}}{{/a}}"} | {"b":{"c":1}} → {"message":"1: "} ;; @ {"message":"x{{^a}}{{message}}{{/a}}"} | 'hello' → {"message":"xhello"}
    # A name within a section is one of its names.
    @ {"message":"{{#alerts}}{{status}}{{/alerts}} {{footer}}"} | {"alerts":[{"status":"firing"}]} → {"message":"firing "}
    @ {"message":"{{event}}{{^event}}{{notification_type}}{{/event}}"} | {"notification_type":"TEST"} → {"message":"TEST"}
    @ {"message":"{{a}}: {{#b}}{{#c}}{{d}}{{/c}}{{/b}}"} | {"b":{},"c":1,"d":2} → {"message":": 2"}
    # Text that needs no name is always sent.
    @ {"message":"Rang{{#who}} by {{who}}{{/who}}"} | 'hello' → {"message":"Rang"} ;; @ {"message":"{{^alerts}}none{{/alerts}}"} | {"message":"x"} → {"message":"none"}`;

  table('a POST that names a recipient in its query, which is not read, is not sent to the default one', hook())`
    * 'hi' | bearer → 400 bad_field
    POST /v2/send?x=1&recipients=%2B15550100003 ;; POST /v2/send?x=1&recipients%5B%5D=%2B15550100003
    POST /v2/send?x=1&recipient=%2B15550100003 ;; POST /v2/send?x=1&number=%2B15550100003
    POST /v2/send?x=1&Recipients=%2B15550100003
    POST /v2/send?x=1&message=x → 201 | {"message":"hi","number":"${FROM}","recipients":["${TO}"]}`;

  const MANY_KEYS = Array.from({ length: 90_000 }, (_, i) => `"${`k${i}`.padEnd(i < 20 ? 61 : 1, 'x')}":1`);

  const SHOWN_KEYS = MANY_KEYS.slice(0, 20).map(() => '…').join(', ');

  table('the response and the log name what a send lacks, with at most twenty short top-level keys', hook())`
    * bearer → 400 bad_field
    @ {"defaults":{}} | {"alerts":[],"status":"x"} → reason=no_message,no_number,no_recipients | "This body has no text in "message"; give the token a template, such as "message": "{{eventType}}". The send lacks number and recipients; set this in the token's "defaults". The body's top-level keys are "alerts", "status"."
    @ {"defaults":{"number":"${FROM}"}} | {"message":"x","recipients":[]} → reason=no_recipients | "The send lacks recipients; set this in the token's "defaults". The body's top-level keys are "message", "recipients"."
    @ {"defaults":{"recipients":["${TO}"]}} | {"message":"x","number":2} → reason=no_number | "The send lacks number; set this in the token's "defaults". The body's top-level keys are "message", "number"."
    {} ;; '' ;; ' \n' ;; 'message=' → reason=no_message | "post the message as text, as a form, or as JSON."
    {"message":" \n","text":"x"} → reason=no_message | "keys are "message", "text"."
    {"message":"","sticker":"","base64_attachments":[]} → reason=no_message | "keys are "message", "sticker", "base64_attachments"."
    @ {"message":" {{typo}}\n"} | {"message":"x","auth":"${SECRET}","\"\n":1} → reason=no_message | "keys are "message", "\"\n"."
    @ {"message":"{{title}}"} | 'Backup done' → reason=no_message | "The token's template finds nothing in this body; correct its names. The body's top-level keys are "message"."
    @ {"defaults":{},"message":"{{text}}"} | {"text":"x","number":"${FROM}"} → reason=no_recipients | "keys are "text", "number"."
    {${
    MANY_KEYS.slice(0, 20).join()
  }} → reason=no_message | "keys are ${SHOWN_KEYS} (… is a name of 16 characters or more)."
    {${MANY_KEYS.join()}} → reason=no_message | "keys are ${SHOWN_KEYS}, and 89980 more (… is a name of 16 characters or more)."`;

  test('bytesOut of a refusal in the log is the length of its body, and 0 for a HEAD', async (t) => {
    const { gateway } = await startBoth(t);
    for (const method of ['GET', 'HEAD']) {
      const { text, status } = await ask(gateway, { method });
      assert.deepEqual([status, text === ''], [401, method === 'HEAD']);
      await until(() => requests(gateway).at(-1)?.method === method);
      assert.equal(requests(gateway).at(-1)!.bytesOut, text.length);
    }
  });

  test('what a client sends is not logged', async (t) => {
    const both = await startBoth(t, hook());
    await checkRows(both, ['* bearer', ['{"key1":"x"} → 400 bad_field', '{"message":"x1","key1":2} → 201']]);
    assert.ok(!/key1|x1/.test(both.gateway.log.join()), both.gateway.log.join());
  });

  const READS_AUTH = reading('{{author}}{{authority}}{{oauth}}{{.}}');

  table('only "auth" is removed from a webhook, whatever its value and spelling', hook(READS_AUTH))`
    * ${MADE} | {"message":"{\"a\":1}"}
    {"auth":{"type":"oauth"},"a":1} ;; {"auth":1,"a":1} ;; {"Auth":"x","a":1}
    {"auth":"${OTHER}","AUTH":"${OTHER}","a":1,"\u0061uth":"${OTHER}"} ;; 'payload={"auth":"${OTHER}","a":1}'
    {"author":"a","authority":"b","oauth":"c","text":"payload=1"} → {"message":"abc{\"author\":\"a\",\"authority\":\"b\",\"oauth\":\"c\",\"text\":\"payload=1\"}"}`;

  const HOOKED = hook({ senders: [FROM], recipients: [TO], allow: ['messaging'], defaults: DEFAULTS });

  table('attack: use a webhook for what no body may do, or send from another account or to another recipient', HOOKED)`
    * bearer → 400 bad_field
    {"message":"x","recipients":["${TO}","group.*"]} ;; {"message":"x","recipients":["${TO}\n"]} ;; {"message":""}
    {"message":"x","link_preview":{"url":"https://a","base64_thumbnail":"data:a/b;filename=/x;base64,QUJD"}}
    * bearer → 403 sender_not_allowed
    {"message":"x","number":"${STRANGER}"} ;; -- data = {"message":"x","number":"${STRANGER}"}
    'payload={"message":"x","number":"${STRANGER.replace('+', '%2B')}"}'
    @ {"defaults":{"number":"${STRANGER}"}} | {"message":"x","recipients":["${TO}"]}
    * bearer → 403 recipient_not_allowed
    {"message":"x","recipients":["${TO}","${STRANGER}"]} ;; {"message":"x","recipients":["${GROUP}"]}
    {"message":"x","recipients":"${STRANGER}"}
    @ {"defaults":{"number":"${FROM}","recipients":["${TO}","${STRANGER}"]}} | {"message":"x"}
    # What a template reads as data reaches nobody.
    * @ {"message":"{{text}}"} | ${MADE} | {"message":"x"}
    {"text":"x","number":"${STRANGER}"} ;; {"text":"x","recipients":["${TO}","${STRANGER}"]}`;

  const MIB_BODY = `{"text":"x","more":"${'y'.repeat(MIB - 22)}"}`;

  table(
    "a webhook's body is at most 1 MiB: 413 at once if Content-Length is larger, otherwise at the limit",
    hook(READS_TEXT),
  )`
    * ${MADE} | {"message":"x"}
    ${MIB_BODY} ;; ${MIB_BODY} | Transfer-Encoding: chunked
    none | ${MIB_BODY.replace('{', `{"auth":"${SECRET}",`).replace('y'.repeat(50), '')}
    * POST /v2/send | bearer → 413 body_too_large | "larger than 1MiB, the most that this gateway accepts from a token with \"defaults\" or \"message\"; for large attachments, use one with \"senders\" and \"recipients\" instead."
    '${MIB_BODY} ' → bytesIn=0 ;; '${MIB_BODY} ' | Transfer-Encoding: chunked
    -- message = x -- f; filename="x" = ${'x'.repeat(MIB)}`;

  const READS_NOTHING = tokens({ ...reading('never'), allow: ['messaging', 'info'] }, {});

  table(
    'only a POST to /v2/send becomes a new send: other requests of the token, and other tokens, pass unchanged',
    READS_NOTHING,
  )`
    * bearer
    GET /v1/about → 200 ;; POST /v1/send | ${HELLO} | Content-Type: text/plain → 201 | same | > Content-Type: text/plain
    PUT /v1/typing-indicator/${FROM} | {"recipient":"${TO}"} → 204 | same
    bearer ${OTHER} | {"more":1,${HELLO.slice(1)} → 201 | same`;

  const NESTED = hook(reading(`${'{{#a}}'.repeat(20)}{{b.c.d}}${'{{/a}}'.repeat(20)}`));

  table('no webhook blocks the gateway for long, and the next send passes', NESTED)`
    * ${MADE} | {"message":"…"}
    {"a":[${'0,'.repeat(125_000)}0]} ;; {"a":[${'{},'.repeat(80_000)}{}]}
    * bearer → 400 bad_field
    {"a":"${'x'.repeat(500_000)}"} ;; {${Array.from({ length: 25_000 }, (_, i) => `"k${i}":1`).join()}}
    'payload=${'&payload='.repeat(25_000)}' ;; '${'a&'.repeat(125_000)}'
    ${'-- data = '.repeat(4000)} ;; -- data = ${literal`\r\n--limi`.repeat(25_000)}
    * bearer → 400 bad_json
    'payload=${'%7B'.repeat(80_000)}' ;; -- data; x="${literal`\\"`.repeat(100_000)}" = {}
    * POST /v1/send | bearer → 201
    ${HELLO}`;

  const SPELLED_ODDLY = 'recipients.0 recipients.0.number number.1 @recipients @number +recipient%E2%80%83'.split(' ');

  const BY_FORM = hook({ allow: ['send', 'GET /v2/send'], defaults: DEFAULTS });

  table(
    'attack: name two numbers and send from the default one, or misspell a recipient and send to the default one',
    BY_FORM,
  )`
    * bearer → 400 bad_field
    ${inEachForm('message=hi&number=%2B15550100003&number=%2B15550100004')}
    ${inEachForm(`message=hi&number=%2B${FROM.slice(1)}&number=%2B${FROM.slice(1)}`)}
    ${SPELLED_ODDLY.flatMap((name) => inEachForm(`message=hi&${name}=%2B15550100003`))}
    'message=hi&recipients%00=%2B15550100003' ;; {"message":"hi","recipients.0":"+15550100003"}
    {"message":"hi","recipients\u0000":["+15550100003"]} ;; {"message":"hi","\u0001recipients":["+15550100003"]}
    {"message":"hi","\u0085\u0001number":"+15550100003"} ;; 'message=hi&%01recipients=%2B15550100003'
    'hi' | POST /v2/send?@recipients=%2B15550100003`;

  const LATER_AS_DATA = tokens({ allow: ['send', 'POST /v1/plugins/later'] }, reading('at {{send_at}}{{Send_At}}'));

  table('send_at is data for a template, and ignored in a send and on other routes', LATER_AS_DATA)`
    * bearer ${OTHER} → 201 | ${MEANT}
    {"send_at":5} → {"message":"at 5"} ;; {"Send_At":5} → {"message":"at 5"}
    'payload={"send_at":[5]}' → {"message":"at [5]"}
    * bearer → passes | same
    {"send_at":1,${HELLO.slice(1)} ;; {"Send_At":null,${HELLO.slice(1)} ;; {"resend_at":1,"more":{"send_at":1},${
    HELLO.slice(1)
  }
    POST /v1/plugins/later | {"send_at":1,"Send_At":2}`;
});

/**
 * Each case of the Mustache specification's modules for interpolation, sections, inverted sections and comments, in our
 * own words: what it shows, a template, the text, and the data. A * stands for each way to insert (nothing, "&", a
 * third brace), and ~ for each section that is shown (# with true, ^ with false). There is no HTML escaping here.
 */
const MUSTACHE = fixture('mustache.txt');

suite('templates', SIDE_BY_SIDE, () => {
  test('a template inserts, repeats and omits as the Mustache specification requires', () => {
    for (const line of MUSTACHE.trim().split('\n')) {
      const variants = line.includes('{{*')
        ? ['', '&', '{'].map((way) => line.replace(/\{\{\*(.*?)\}\}/g, `{{${way}$1}}${way === '{' ? '}' : ''}`))
        : ['#', '^'].map((sigil) =>
          line.replaceAll('{{~', `{{${sigil}`).replace('!~', String(sigil === '^')).replace('~', String(sigil === '#'))
        );
      for (const variant of new Set(variants)) {
        const [, template = '', text = '', data = ''] = variant.split(' ¦ ');
        const rendered = render(String(unescaped(template)), JSON.parse(data));
        assert.equal(rendered, String(unescaped(text)), variant);
      }
    }
  });

  const NO_TEMPLATES = literal`
  Hello {{name ¦ 1, column 7: a "{{" has no "}}"
  {{ alerts[0].status }} ¦ 1, column 1: a tag has a bracket: write {{alerts.0.status}} for {{alerts[0].status}}
  {{#a[]}}{{/a[]}} ¦ 1, column 1: "{{#a[]}}" has a bracket: write {{alerts.0.status}} for {{alerts[0].status}}
  a\nb {{{name}} ¦ 2, column 3: "{{{name}}" has no name, or one with a space, a brace or an empty part in it
  a\r\n\r\n  {{#alerts}}\n{{x}} ¦ 3, column 3: "{{#alerts}}" has no "{{/alerts}}"
  {{#a}}{{^b}}x{{/b}} ¦ 1, column 1: "{{#a}}" has no "{{/a}}"
  x\n{{/a}} ¦ 2, column 1: "{{/a}}" closes a section that is not open
  {{#a}}\n {{#b}}\n  {{/a}}{{/b}} ¦ 3, column 3: "{{/a}}" stands where "{{/b}}" is expected
  ${
    '{{}} ¦{{ # }} ¦{{{}}} ¦{{a..b}} ¦{{a.}} ¦{{..}} ¦{{#if a}}'.split(' ¦').map((tag) =>
      `${tag}{{/if}} ¦ 1, column 1: "${tag}" has no name`
    )
  }
  ü {{range .Alerts}} ¦ 1, column 3: "{{range .Alerts}}" has no name
  {{>part}} ¦ 1, column 1: "{{>part}}": partials, blocks and other delimiters are not supported
  ${['{{=<% %>=}}', '{{<a}}', '{{$a}}'].map((tag) => `${tag}{{/a}} ¦ 1, column 1: "${tag}": partials`)}
  a\n😀ü {{ ¦ 2, column 4: 
  ${'{{#a}}'.repeat(65)}${'{{/a}}'.repeat(65)} ¦ 1, column 385: sections are nested more than 64 levels deep
  {{{a}}\nb {{c}}\n{{{d}}} e ¦ 1, column 1: a tag has no name
  {{#a\u001b[31m\nb}} ¦ 1, column 1: "{{#a\u001b[31m\nb}}" has no name
  {{#${'a'.repeat(10_000)}}} ¦ 1, column 1: a tag has no a tag
  {{#a}}{{/\n}} ¦ 1, column 7: "{{/\n}}" has no name`;

  test('an invalid template is refused with line and column, in a single line without control characters', () => {
    for (const line of NO_TEMPLATES.trim().split(/\n */)) {
      const [template = '', mistake] = line.split(' ¦ ');
      const isIt = ({ message }: Error): boolean =>
        message.startsWith(`line ${mistake}`) && /^\P{Cc}{9,250}$/u.test(message);
      assert.throws(() => new Template(String(unescaped(template))), isIt, line);
    }
  });

  test('a template cut at any position is valid or refused, and renders without an internal error', () => {
    const whole = 'a\n  {{#b}}\n{{{c.0}}}{{& d.e }} {{^.}}x{{/.}}\n  {{/b}}\r\n{{! f\n}}{{g}}';
    for (const part of Array.from(whole, (_, i) => [whole.slice(0, i), whole.slice(i)]).flat()) {
      try {
        new Template(part).render({ b: [{ c: ['y'] }, null, 1], g: {} });
      } catch (error) {
        assert.match(String(error), /^Error: line \d+, column \d+: /);
      }
    }
  });

  test('a text is at most 64 KiB long, and a longer one is cut between characters, with an ellipsis', () => {
    const [whole, cut] = ['x'.repeat(LIMIT), `${'x'.repeat(LIMIT - 3)}…`];
    assert.equal(render('{{a}}', { a: whole }), whole);
    assert.equal(render('{{a}}', { a: `${whole}x` }), cut);
    assert.equal(render('{{a}}{{b}}', { a: whole, b: '' }), whole);
    assert.equal(render('{{a}}{{b}}', { a: whole, b: 'y' }), cut);
    assert.equal(
      render('{{#a}}line {{.}}\n{{/a}}', { a: Array.from({ length: 100_000 }, (_, i) => i) }).slice(-1),
      '…',
    );
    for (const [i, char] of [...'ü€😀ü€😀ü€😀ü€😀'].entries()) {
      const [pad, text] = ['x'.repeat(i / 3), render('{{p}}{{a}}', { p: 'x'.repeat(i / 3), a: char.repeat(LIMIT) })];
      assert.ok(Buffer.byteLength(text) <= LIMIT && Buffer.byteLength(text) > LIMIT - 4, `${Buffer.byteLength(text)}`);
      assert.equal(text.replaceAll(char, ''), `${pad}…`);
    }
  });

  test('the work of rendering is bounded, and stops where the text is cut, however sections multiply', () => {
    // The whole text would be longer than a string can be.
    assert.equal(Buffer.byteLength(render('{{a}}'.repeat(1000), { a: 'x'.repeat(MIB) })), LIMIT);
    // A name costs more the deeper it is searched for.
    const nested = (depth: number, inner: string): string =>
      `${'{{#a}}'.repeat(depth)}${inner}${'{{/a}}'.repeat(depth)}`;
    assert.equal(render(nested(60, '{{b}}'.repeat(1000)), { a: 1 }), '…');
    const a = Array<number>(100_000).fill(1);
    // Without a bound the first of these would take 10^15 steps, the second 10^50.
    assert.equal(render(nested(3, ''), { a }), '…');
    assert.equal(render(nested(10, '{{b}}'), { a }), '…');
    assert.equal(render(nested(1, `{{${Array<string>(10_000).fill('x').join('.')}}}`), { a }), '…');
    // Below the limit the work is the length of the data times that of the template.
    for (const n of [50, 100, 200]) {
      const data = { a: a.slice(0, n) };
      const text = render(nested(3, '.'), data);
      const isBounded = text.length < nested(3, '.').length * JSON.stringify(data).length;
      assert.ok(text.endsWith('…') && isBounded, `${text.length} of ${n ** 3}`);
    }
    // One pass through much data does not multiply.
    assert.equal(render('{{#a}}{{x}}{{#y}}{{z}}{{/y}}{{/a}}end', { a: a.map(() => ({ y: [{}] })) }), 'end');
  });
});
