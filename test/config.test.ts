import { execFile } from 'node:child_process';
import { createHash, randomUUID } from 'node:crypto';
import { writeFileSync } from 'node:fs';
import { chmod } from 'node:fs/promises';
import { basename, join } from 'node:path';
import { suite } from 'node:test';
import { promisify } from 'node:util';
import type { GatewayConfig, TokenConfig } from '../gateway.ts';
import { assert, groupsOf, linesOf, logLines, problemsOf } from './assertions.ts';
import { startBackend } from './backend.ts';
import { certificate, CERTS } from './certificates.ts';
import { ask } from './client.ts';
import { MISSING, NO_TOKENS, tokens } from './configs.ts';
import { fileWith, folder, SETTING_ROWS } from './files.ts';
import { createGateway, FILE, loadSettings } from './gateway.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { hook } from './hooks.ts';
import { literal, unescaped } from './rows.ts';
import { isDeno, isNode } from './runtime.ts';
import { BEARER, FROM, GROUP, INTERNAL_ID, OTHER, SECRET, SECRETS, TO } from './samples.ts';
import { cli, startBoth, startGateway, startProcess } from './start.ts';

const NO_TEMPLATE = 'message: must be a template';

/** Settings of a token, and how each of their error messages begins: test/fixtures/mistakes.txt has whole ones. */
const BAD_SETTINGS = literal`
  {"defaults":[],"message":" \n"} ⇒ defaults: must be an object ⇒ ${NO_TEMPLATE}
  {"defaults":"x","message":""} ⇒ defaults: must be an object ⇒ ${NO_TEMPLATE}
  {"defaults":{"number":15550100001}} ⇒ defaults.number: 15550100001 is not a phone number
  {"defaults":{"recipients":[]}} ⇒ defaults.recipients: must be a list
  {"defaults":{"text_mode":"bold"}} ⇒ defaults.text_mode: "bold" is not normal or styled
  {"defaults":{"recipient":"${TO}"}} ⇒ defaults.recipient: is not a setting
  {"defaults":{"recipients":["${TO}","15550100002"]}} ⇒ defaults.recipients[1]: "15550100002" is not a phone number
  {"defaults":{"recipients":["group.*",1]}} ⇒ defaults.recipients[0]: "group.*" is not a phone number ⇒ defaults.recipients[1]: 1 is not a phone number
  {"defaults":{"recipients":["${`${TO}","`.repeat(70_000)}${TO}"]}} ⇒ defaults.recipients: is larger than 1MiB
  {"defaults":{"recipients":["*"]}} ⇒ defaults.recipients[0]: "*" is not a phone number
  {"senders":["*","${FROM}"]} ⇒ senders[0]: "*" is not a phone number
  {"recipients":["group.*","*"]} ⇒ recipients[1]: "*" is not a phone number
  {"recipients":[["*"]]} ⇒ recipients[0]: ["*"] is not a phone number
  {"senders":[["*"]]} ⇒ senders[0]: ["*"] is not a phone number
  {"senders":["group.*"]} ⇒ senders[0]: "group.*" is not a phone number
  {"defaults":{"constructor":1},"message":[]} ⇒ defaults.constructor: is not a setting ⇒ ${NO_TEMPLATE}
  {"message":"a\n{{#x}}"} ⇒ message: line 2, column 1: "{{#x}}" has no "{{/x}}"
  {"message":["a","","b{{#x}}"]} ⇒ message: line 3, column 2: "{{#x}}" has no "{{/x}}"
${
  ['["{{x}}",1]', '["{{x}}",null]', '[["{{x}}"]]', '["","\\n"]', '{"0":"{{x}}"}'].map((message) =>
    `  {"message":${message}} ⇒ ${NO_TEMPLATE}`
  )
}
  {"default":{},"template":""} ⇒ default: is not a setting ⇒ template: is not a setting`;

/** Each sentence begins with its place and the kind of the mistake; what follows is the golden file's matter. */
function assertBegin(found: readonly string[], wanted: readonly string[], what: string): void {
  assert.deepEqual(found.map((each, i) => each.slice(0, wanted[i]?.length)), wanted, what);
}

suite('config', SIDE_BY_SIDE, () => {
  test("every mistake in a token's lists, defaults or message, an empty template too, is reported with its place", () => {
    for (const line of BAD_SETTINGS.trim().split('\n')) {
      const [token = '', ...problems] = line.trim().split(' ⇒ ');
      const found = problemsOf(() => createGateway(hook(JSON.parse(token))));
      assertBegin(found, problems.map((problem) => `tokens.hook.${problem}`), token);
    }
  });

  /** Part of a message. Deno 2.9 reveals the user's id only with a separate permission. */
  const BY_USER = isDeno ? '' : ` by user ${process.getuid?.()}`;

  const NO_NUMBER = 'is not a phone number';

  const NO_DATE = 'is not a date such as ';

  const NO_RULE = 'is not one of send, ';

  const SPACE = 'has white space in it: ';

  const hashOf = (text: string): string => createHash('sha256').update(text).digest('hex');

  /**
   * Loads the configuration of each row. After the arrow is how each of its problems begins, separated by " | ".
   *   {…}        what createGateway is given          @ {…}      settings of a token that has a secret
   *   env {…}    variables of the environment         load {…}   sources for loadSettings
   *   file TEXT  a configuration file, FILE in messages
   * DIR is the folder of these files. A row that ends in "| for: a, b" is several rows, each with one of them for X.
   */
  function checkProblems(t: TestContext, dir = folder(t)) {
    const file = join(dir, 'gateway.json');
    const check = (row: string): void => {
      const [, kind = '', text = '', problems = ''] = /^(@ |env |load |file )?(.*?) →(?: (.*))?$/.exec(row)!;
      if (kind === 'file ') writeFileSync(file, unescaped(text));
      const value = kind === 'file ' ? { file } : JSON.parse(text.replaceAll('DIR', dir));
      const found = problemsOf(() => {
        if (kind === '' || kind === '@ ') createGateway(kind ? tokens(value) : value);
        else loadSettings(kind === 'env ' ? { env: value } : value);
      }).map((problem) => problem.replaceAll(file, 'FILE').replaceAll(dir, 'DIR'));
      assertBegin(found, problems ? problems.split(' | ') : [], row);
      assert.doesNotMatch(found.join(), SECRETS);
    };
    return (rows: TemplateStringsArray, ...values: unknown[]): void => {
      for (const line of literal(rows, ...values).split('\n').map((text) => text.replace(/^ +/, ''))) {
        const [row = '', list] = line.split(' | for: ');
        if (row === '' || row.startsWith('#')) continue;
        for (const value of list?.split(', ') ?? ['X']) check(row.replaceAll(/\bX\b/g, value));
      }
    };
  }

  test('every mistake in a configuration is reported with its place, and no secret is shown', (t) => {
    const url = 'must be a URL ';
    const isNull = 'null is not allowed; ';
    const digest = `sha256:${hashOf(SECRET)}`;
    checkProblems(t)`
    {"lisen":":1","zzz":1,"tokens":{"a":{"secret":"${SECRET}"}}} → lisen: is not a setting | zzz: is not a setting
    # A key that is no plain word is not shown, however short: it could be part of a secret, or forge a line of the log.
    {"zz z":1,"z\n":1,"z\u001b":1,"a:b":1} → ${
      [0, 1, 2, 3].map((i) => `the configuration[${i}]: is not a setting`).join(' | ')
    }
    {"log":{"\u001b[2J":1},"tokens":{"a":{"secret":"${SECRET}","ü":1}}} → log[0]: is not a setting | tokens.a[0]: is not a setting
    {"backend":{"urls":"x"},"ra":1,"r":1} → backend.urls: is not a setting | ra: is not a setting | r: is not a setting
    X → the configuration: must be an object | for: [], null
    {"tokens":[]} → tokens: must be an object from name to settings
    {"backend":"http://x"} → backend: must be an object
    {"X":"8880"} → X: is not a setting | for: port, host, bind
    {"users":{}} → users: is not a setting
    {"tokens":null,"clients":null,"tls":{"cert":null}} → tokens: ${isNull} | clients: ${isNull} | tls.cert: ${isNull}
    {"tokens":{"a":null,"b":{"secret":null}},"backend":null} → backend: ${isNull} | tokens[0]: ${isNull} | tokens.b.secret: ${isNull}
    @ {"rate":null,"defaults":{"number":null}} → tokens.test.rate: ${isNull} | tokens.test.defaults.number: ${isNull}
    {"tokens":{"a":{"secret":"${SECRET}"},"message":"{{x}}"}} → tokens[1]: "message" stands beside the tokens
    {"tokens":{"defaults":{"number":"${FROM}"},"a":{"secret":"${SECRET}"}}} → tokens[0]: "defaults" stands beside the tokens
    {"tokens":{"message":{"secret":"${SECRET}"}}} →
    {"tokens":{X}} → tokens[0]: must be an object with "secret" or "secretFile" | for: "a":"${SECRET}", "${SECRET}":"grafana"
    {"tokens":{"a":{}}} → tokens.a: needs exactly one of "secret" and "secretFile"
    @ {"secretFile":"/x"} → tokens.test: needs exactly one of "secret" and "secretFile"
    @ {"secret":"X"} → tokens.test.secret: the secret is shorter than 16 characters | for: short, of-15-character
    @ {"secret":17} → tokens.test.secret: must be a string
    @ {"secret":"sha256:12"} → tokens.test.secret: after "sha256:" there must be 64 hexadecimal digits
    @ {"secret":"${SECRET}\n"} → tokens.test.secret: has several lines, or a control character
    # In JSON nobody quotes a secret by mistake.
    @ {"secret":"X"} → | for: \"${SECRET}\", {${SECRET}}, ${SECRET};${OTHER}, ${SECRET} ${OTHER}, of-16-characters
    @ {"secret":"X"} → tokens.test.secret: is the path of a file | for: ${process.execPath}
    @ {"secret":"X"} → tokens.test.secret: is the path of a file | for: ./package-lock.json, ../${
      basename(process.cwd())
    }/package.json
    @ {"secret":"X"} → | for: package-lock.json, ./no-such-file-here
    @ {"secret":"X"} → tokens.test.secret: starts or ends with white space | for:  ${SECRET}, ${SECRET} , \u00a0${SECRET}
    {"tokens":{"a":{"secretFile":"/no/such/file"}}} → tokens.a.secretFile: /no/such/file ${MISSING}
    {"tokens":{"a":{"secret":"${SECRET}"},"b":{"secret":"${SECRET}"}}} → tokens: "a" and "b" have the same secret
    {"tokens":{"a b":{"secret":"${SECRET}"}}} → tokens[0]: a name may have letters, digits
    # Every line of the log would show the name.
    {"tokens":{"a":{"secret":"${OTHER}"},"${SECRET}":{"secret":"X"}}} → tokens[1]: has a secret as its name | for: ${SECRET}, ${digest}
    @ {"methods":["paht"],"expires":"2027-02-30"} → tokens.test.methods[0]: "paht" is not one of bearer | tokens.test.expires: "2027-02-30" ${NO_DATE}
    @ {"expires":"2027-02-31T00:00:00Z"} → tokens.test.expires: the value ${NO_DATE}
    @ {"senders":["0664123"],"recipient":["+1"]} → tokens.test.senders[0]: "0664123" ${NO_NUMBER} | tokens.test.recipient: is not a setting
    @ {"recipients":[]} → tokens.test.recipients: must be a list
    @ {"recipients":["X"]} → tokens.test.recipients[0]: "X" ${NO_NUMBER} | for: Family, My family, Öl 2
    @ {"recipients":["${TO}","X"]} → tokens.test.recipients[1]: "X" ${NO_NUMBER} | for: --x, , 4915551234567x
    @ {"recipients":["${TO}","X"]} → tokens.test.recipients[1]: "X" ${NO_NUMBER} | for: 4915551234567, +49 1555, (0664) 123-45
    {"trustedProxies":["172.16.5.0/8"]} → trustedProxies[0]: 172.16.5.0/8 is the network 172.0.0.0/8: write that, or 172.16.5.0 alone
    @ {"clients":["255.255.255.255/31"]} → tokens.test.clients[0]: 255.255.255.255/31 is the network 255.255.255.254/31: write that, or 255.255.255.255 alone
    @ {"clients":["1.2.3.4/0"]} → tokens.test.clients[0]: 1.2.3.4/0 is the network 0.0.0.0/0: write that, or 1.2.3.4 alone
    @ {"clients":["X"]} → tokens.test.clients[0]: "X" is not an IP address | for: 10.0.0.0/33, ::1/129, 1.2.3.4/, 1.2.3.4/8/8
    @ {"clients":["1.2.3.4",X]} → tokens.test.clients[1]: X is not an IP address | for: {}, null, ["caddy"]
    {"allow":["info","X"]} → allow[1]: "X" ${NO_RULE} | for: GET v1/about, HEAD /v1/about, GET /v1/a%62, GET /v1/x?y, constructor, toString, __proto__
    {"rate":"30","limits":{"body":"150"},"log":{"level":"trace"}} → rate: "30" is not a rate such as 30/1m | limits.body: "150" is not a size such as 150MiB | log.level: "trace" is not one of debug
    {"rate":["30/1m"],"limits":{"connections":0},"shutdown":"10"} → rate: ["30/1m"] is not a rate such as 30/1m | limits.connections: 0 is not a whole number of at least 1 | shutdown: "10" is not a duration such as 10s
    {"shutdown":"X"} → shutdown: "X" is not a duration such as 10s | for: 2147483648ms, 2147484s, 25d, 0s ms
    {"shutdown":"X"} → | for: 999999999ms, 2147483s, 24d
    {"backend":{"url":"ftp://x","timeout":"1w"}} → backend.url: ${url} | backend.timeout: "1w" is not a duration such as 150s
    {"backend":{"url":"X"}} → backend.url: ${url} | for: http://user:${SECRET}@x/?q, http://api:${SECRET}/x@backend:1, api:${SECRET}@backend:1, signal-api:8080, signal-api, http://, http://x#y
    {"backend":{"url":"http://api:X@b:1"}} → backend.url: has a "%" in its userinfo | for: 100%${SECRET}, %ff${SECRET}
    {"listen":"8880","auth":{"anonymous":"yes"}} → listen: "8880" is not host:port | auth.anonymous: "yes" is not true or false
    {"X":[]} → X: must be a list | for: allow, clients, trustedProxies, cors
    {"auth":{"methods":[]}} → auth.methods: must be a list`;
  });

  test('what cannot be seen, and quotes and brackets around a value, are told, and open nothing', (t) => {
    const dir = folder(t);
    writeFileSync(join(dir, 'two'), `${SECRET}\r\n${OTHER}\n`);
    for (const encoding of ['utf8', 'utf16le'] as const) {
      writeFileSync(join(dir, encoding), Buffer.from('\ufeff{}', encoding));
    }
    writeFileSync(join(dir, 'latin1'), Buffer.from('{"message":"Tür"}', 'latin1'));
    writeFileSync(join(dir, 'no-bom'), Buffer.from('{}', 'utf16le'));
    writeFileSync(join(dir, 'big-endian'), Buffer.from('\ufeff{}', 'utf16le').swap16());
    const notUtf8 = 'save it as UTF-8, without a byte order mark';
    const quotes = 'has quotes of its own; leave out the quotes';
    const MARKED = `\u202a${FROM}\u202c`;
    const API = `"GATEWAY_TOKENS":"${SECRET}"`;
    checkProblems(t, dir)`
    load {"file":"DIR/X"} → DIR/X: is not a JSON object: line 1, column 1: ${notUtf8} | for: utf8, utf16le, big-endian
    load {"file":"DIR/latin1"} → DIR/latin1: is not UTF-8: ${notUtf8}
    load {"file":"DIR/no-bom"} → DIR/no-bom: is not a JSON object: line 1, column 2: ${notUtf8}
    env {${API},"GATEWAY_BACKEND_URL":"X"} → GATEWAY_BACKEND_URL: the value ${quotes} | for: \"http://backend:8080\", 'http://backend:8080', “http://x”
    env {${API},"GATEWAY_RATE":"'1/1m'"} → GATEWAY_RATE: "'1/1m'" ${quotes}
    env {${API},"GATEWAY_LOG_LEVEL":"«info»"} → GATEWAY_LOG_LEVEL: "«info»" ${quotes}
    @ {"secretFile":"DIR/two"} → tokens.test: needs exactly one of "secret" and "secretFile"
    {"tokens":{"a":{"secretFile":"DIR/two\r"}}} → tokens.a.secretFile: the path has a control character
    {"tokens":{"a":{"secretFile":"DIR/two"}}} → tokens.a.secretFile: has several lines, or a control character
    @ {"senders":["${MARKED}"]} → tokens.test.senders[0]: "${MARKED}" ${NO_NUMBER} (such as "+4915112345678" in double quotes); "*" alone is every account; it has a character that is not seen
    @ {"recipients":["all"],"senders":["%2B49151000"]} → tokens.test.recipients[0]: "all" ${NO_NUMBER} | tokens.test.senders[0]: "%2B49151000" ${NO_NUMBER}
    # A list that is written in a variable as in the file, or with quotes of compose.
    env {${API},"GATEWAY_RECIPIENTS":"X"} → GATEWAY_RECIPIENTS[0]: "X" ${quotes} | for: '*', \"*\", “*”, 'group.*'
    env {${API},"GATEWAY_RECIPIENTS":"X"} → GATEWAY_RECIPIENTS[0]: "X" ${NO_NUMBER} | for: [*], ['*'], [\"*\"], {*}, [group.*], (*)
    env {${API},"GATEWAY_SENDERS":"X"} → GATEWAY_SENDERS[0]: "X" ${NO_NUMBER} | for: [*], [\"*\"]
    env {${API},"GATEWAY_ALLOW":"X"} → GATEWAY_ALLOW[0]: "X" ${NO_RULE} | for: [setup], send info, send;info, * /v1/x/
    env {${API},"GATEWAY_CLIENTS":"[10.0.0.1]"} → GATEWAY_CLIENTS[0]: "[10.0.0.1]" is not an IP address
    env {${API},"GATEWAY_DEFAULTS_RECIPIENTS":"[\"${TO}\",\"${FROM}\"]"} → GATEWAY_DEFAULTS_RECIPIENTS[0]: "[\"${TO}\"" ${NO_NUMBER} | GATEWAY_DEFAULTS_RECIPIENTS[1]: "\"${FROM}\"]" ${quotes}
    env {${API},"GATEWAY_DEFAULTS_RECIPIENTS":"X"} → GATEWAY_DEFAULTS_RECIPIENTS[0]: the value ${NO_NUMBER} | for: ${TO} ${FROM}, ${TO};${FROM}
    env {"GATEWAY_TOKENS":"X=${SECRET}"} → GATEWAY_TOKENS[0]: ${SPACE} | for: my phone
    file {"tokens":{"a":{"secret":"${SECRET}","senders":[+15550100001]}}} → FILE: is not a JSON object: line 1, column 68: no value begins with "+"
    @ {"recipients":["X"]} → tokens.test.recipients[0]: the value ${NO_NUMBER} | for: ${INTERNAL_ID}, ${
      GROUP.slice(0, -1)
    }, https://signal.group/#CjQKIA`;
  });

  test('every mistake in the environment is reported, none leaves the gateway open, and no secret is shown', (t) => {
    const dir = folder(t);
    for (const [name, text] of [['empty', '# nothing here\n\n'], ['half', '{'], ['typo', '{"token":{}}']] as const) {
      writeFileSync(join(dir, name), text);
    }
    const none = 'contains no token';
    const empty = 'is set but empty';
    const nameless = 'is a name without a secret, or ';
    const short = 'the secret is shorter';
    const cwd = process.cwd();
    const open = '"GATEWAY_LISTEN":"0.0.0.0:8880"';
    const API = `"GATEWAY_TOKENS":"${SECRET}"`;
    checkProblems(t, dir)`
    env {"X":""} → X: ${empty} | for: GATEWAY_TOKENS, GATEWAY_TOKENS_FILE
    env {"GATEWAY_TOKENS":" , "} → GATEWAY_TOKENS: ${none}
    env {"GATEWAY_TOKENS_FILE":"DIR/empty"} → GATEWAY_TOKENS_FILE: ${none}
    env {${API},"GATEWAY_TOKENS_FILE":""} → GATEWAY_TOKENS_FILE: is set together with GATEWAY_TOKENS | GATEWAY_TOKENS_FILE: ${empty}
    env {"GATEWAY_TOKENS":"${SECRET},tooshort,a=${OTHER},a=${OTHER}x"} → GATEWAY_TOKENS[1]: ${short} | GATEWAY_TOKENS[3]: has the name of an earlier one
    env {"GATEWAY_TOKENS":"home-assistant-main: ${SECRET},home=${OTHER}:"} → GATEWAY_TOKENS[0]: ${SPACE}
    # A variable of the shell that is not set leaves the name alone, which anyone could guess.
    env {"GATEWAY_TOKENS":"X"} → GATEWAY_TOKENS[0]: ${nameless} | for: home-assistant-main=, c2VjcmV0LW9mLXNvbWUtbGVuZ3Ro=, home==
    env {"GATEWAY_TOKENS":"${OTHER}=${SECRET},${SECRET}=${OTHER}"} → GATEWAY_TOKENS[0]: has a secret as its name | GATEWAY_TOKENS[1]: has a secret as its name
    env {${API},"GATEWAY_CLIENTS":"","GATEWAY_ALLOW":","} → GATEWAY_ALLOW: must be a list | GATEWAY_CLIENTS: ${empty}
    env {${API},"GATEWAY_AUTH_METHODS":"bearer, digest","GATEWAY_RATE":"0/1m"} → GATEWAY_AUTH_METHODS[1]: "digest" is not one of bearer | GATEWAY_RATE: "0/1m" is not a rate such as 30/1m
    env {${API},"GATEWAY_AUTH_ANONYMOUS":"1","GATEWAY_LOG_FORMAT":"xml"} → GATEWAY_AUTH_ANONYMOUS: "1" is not true or false | GATEWAY_LOG_FORMAT: "xml" is not text or json
    # What may be a secret is not shown as a path: its first folder is not there.
    env {"GATEWAY_TOKENS_FILE":"DIR"} → GATEWAY_TOKENS_FILE: DIR cannot be read${BY_USER} (EISDIR)
    env {"GATEWAY_TOKENS_FILE":"X"} → GATEWAY_TOKENS_FILE: the file cannot be read${BY_USER} (ENAMETOOLONG); this looks like what the file holds: name the file | for: ${
      'x'.repeat(300)
    }
    env {"GATEWAY_TOKENS_FILE":"X"} → GATEWAY_TOKENS_FILE: X ${MISSING} | for: DIR/none, /no/such, DIR/no-folder/x
    env {"GATEWAY_TOKENS_FILE":"X"} → GATEWAY_TOKENS_FILE: ${cwd}/X ${MISSING} | for: is-not-here, docs/is-not-here-at-all
    env {"GATEWAY_TOKENS_FILE":"X"} → GATEWAY_TOKENS_FILE: the file ${MISSING} | for: /no-folder-anywhere/tokens, /${SECRET}
    env {"GATEWAY_TOKENS_FILE":"X"} → GATEWAY_TOKENS_FILE: the file ${MISSING} in ${cwd} | for: ${SECRET}, no-folder/anywhere/tokens
    # Where a source of tokens could not be read, nobody is told to let everybody in.
    env {${open},"GATEWAY_TOKENS_FILE":"DIR/none"} → GATEWAY_TOKENS_FILE: DIR/none ${MISSING}
    load {"env":{${open}},"file":"DIR/none"} → configuration: DIR/none ${MISSING}
    load {"env":{${open}},"file":"DIR/half"} → DIR/half: is not a JSON object: line 1, column 2: it ends before the object is complete
    load {"env":{${open}},"file":"DIR/typo"} → token: is not a setting
    env {${open},"GATEWAY_TOKEN":"${SECRET}"} → GATEWAY_TOKEN: is not a setting
    env {${open},"GATEWAY_CONF":"DIR/half"} → GATEWAY_CONF: is not a setting`;
  });

  test('a configuration file that is truncated, not an object, or has a key twice is refused with line and column, and is not quoted', (t) => {
    const dir = folder(t);
    const token = `{"secret":"${SECRET}","senders":["${FROM}"]}`;
    checkProblems(t, dir)`
    file {\n  "tokens": {\n    "a": {\n      "secret": "${SECRET}\n    }\n  } } → FILE: is not a JSON object: line 4, column 46: a string contains a control character
    file X → FILE: is not a JSON object: line 1, column 1: it must begin with "{" | for: [], null, 5
    file {"rate":"1/1s",\n} → FILE: is not a JSON object: line 2, column 1: delete the comma before "}"
    file {"allow":["send",]} → FILE: is not a JSON object: line 1, column 18: delete the comma before "]"
    file {\n  X the rate\n  "rate": "1/1s"} → FILE: is not a JSON object: line 2, column 3: expected a key in double quotes; there is X | for: /, #
    file {"rate":"1/1s" X x\n} → FILE: is not a JSON object: line 1, column 16: expected a comma, or the closing bracket or brace; there is X | for: /, #
    file {"tokens": {\n  {"a": {"secret": "x"}}\n}} → FILE: is not a JSON object: line 2, column 3: expected a key in double quotes; there is {
    file {"rate": "1/1s",{"log":{}}} → FILE: is not a JSON object: line 1, column 17: expected a key in double quotes; there is {
    file {"rate":X "1/1s"} → FILE: is not a JSON object: line 1, column 9: expected a value; there is X | for: /, #
    file {X rate": "1/1s"} → FILE: is not a JSON object: line 1, column 2: expected a key in double quotes; there is X | for: “, ”, ‘, «, '
    file {"rate":X 1/1s"} → FILE: is not a JSON object: line 1, column 9: expected a value; there is X | for: “, '
    file X {} → FILE: is not a JSON object: line 1, column 1: it must begin with "{"; there is X | for: /, #
    file X: 8880 → FILE: is not a JSON object: line 1, column 1: it must begin with "{"; there is l | for: listen
    file ---\nX: 1 → FILE: is not a JSON object: line 1, column 1: it must begin with "{"; there is - | for: listen
    file {"api":{},"service":{"port":1},"settings":{}} → api: is not a setting | service: is not a setting | settings: is not a setting
    file {"tokens":{"a":${token},\n "a":{"secret":"${OTHER}"}}} → FILE: line 2, column 2: "a" is given twice in one object
    file {"tokens":{"a":{"secret":"${SECRET}","allow":["info"] , "\\u0061llow" :["send"]}}} → FILE: line 1, column 76: "allow" is given twice in one object
    file {"rate":"1/1s",\n\n  "rate":"2/1s","rate":"3/1s"} → FILE: line 3, column 3: "rate" is given twice in one object | FILE: line 3, column 17: "rate" is given twice in one object
    file {"log":{"level":"info"},"log":{}} → FILE: line 1, column 25: "log" is given twice in one object
    file {"log":{"level":"info"},"backend":{"url":"http://log","timeout":"1s"},"rate":"1/1s"} →
    file {"tokens":{"a":{"secret":"${SECRET}","message":"\"rate\":1 {\"a\":1,\"a\":{}} \\\\"},"rate":{"secret":"${OTHER}"}}} →`;
    const whole = `{\n  "tokens": {\n    "a": ${token}\n  },\n  "listen": "0.0.0.0:8880"\n}`;
    const file = join(dir, 'cut.json');
    for (let length = 0; length < whole.length; length++) {
      writeFileSync(file, whole.slice(0, length));
      const found = problemsOf(() => loadSettings({ file })).join('\n');
      assert.match(
        found,
        /^.*: is not a JSON object: line \d+, column \d+: it ends before the object is complete$/,
      );
    }
  });

  test('without tokens the gateway starts only if no other machine can connect, or if told to; in a program, an undefined setting is absent', (t) => {
    const open = ':0, 0.0.0.0:0, [::]:0, 192.168.1.1:0, 127.example.com:0, [::ffff:127.0.0.1]:0';
    checkProblems(t)`
    {"listen":"X"} → | for: 127.0.0.1:0, 127.8.9.1:0, [::1]:0, localhost:0
    {"listen":"X"} → tokens: none is configured, but the gateway would listen for other machines: | for: ${open}
    {"listen":"X","auth":{"anonymous":true}} → | for: ${open}
    {"listen":"X","tokens":{"a":{"secret":"${SECRET}"}}} → | for: ${open}`;
    const absent = { ...NO_TOKENS, allow: undefined, backend: undefined, limits: { body: undefined } } as object;
    const problems = (listen: string): number => problemsOf(() => createGateway({ listen, ...absent })).length;
    assert.deepEqual([problems('127.0.0.1:0'), problems('0.0.0.0:0')], [0, 1]);
  });

  test('flags override the environment, which overrides the file; tokens are not merged; by default a shutdown takes at most 8 s, and cors is off', (t) => {
    const backend = { url: 'http://file:1', timeout: '1s' };
    const file = fileWith(t, { listen: '127.0.0.1:1', backend, rate: '1/1s', tokens: { file: { secret: SECRET } } });
    const env = { GATEWAY_BACKEND_URL: 'http://env:2', GATEWAY_LISTEN: '127.0.0.1:2', GATEWAY_RATE: '2/1s' };
    const { listen, rate, tokens, ...more } = loadSettings({ file, env, flags: { listen: '127.0.0.1:3' } });
    const found = [listen.port, more['backend.url'].url.origin, more['backend.timeout'], rate?.count];
    assert.deepEqual(found, [3, 'http://env:2', 1000, 2]);
    assert.deepEqual(tokens.map((token) => token.name), ['file']);
    assert.deepEqual(loadSettings({ file, env: { GATEWAY_TOKENS: OTHER } }).tokens.map((token) => token.name), [
      'token-1',
    ]);
    const [without, less] = [loadSettings({}), loadSettings({ env: { GATEWAY_SHUTDOWN: '3s' } })];
    assert.deepEqual([without.shutdown, less.shutdown, without.cors], [8000, 3000, undefined]);
  });

  test('GATEWAY_TOKENS and GATEWAY_TOKENS_FILE have secrets and names, separated by commas or line feeds, the file also comments; secretFile names a file with the secret, whose outer white space is ignored', (t) => {
    const digest = hashOf(OTHER);
    const list = fileWith(t, `# for the house\nha=${SECRET}\n\n  # and for the alerts\n  sha256:${digest}  \n`);
    const lists = [`ha=${SECRET}, sha256:${digest}`, `\n ha=${SECRET}\r\n,sha256:${digest.toUpperCase()}`];
    for (const env of [...lists.map((text) => ({ GATEWAY_TOKENS: text })), { GATEWAY_TOKENS_FILE: list }]) {
      const { tokens } = loadSettings({ env });
      assert.deepEqual(tokens.map((token) => [token.name, token.digest]), [['ha', hashOf(SECRET)], [
        'token-2',
        digest,
      ]]);
    }
    const secretFile = fileWith(t, ` ${SECRET}\n`);
    const file = fileWith(t, { tokens: { a: { secretFile, methods: ['path'], expires: '2027-06-30' } } });
    const { digest: own, expires, methods } = loadSettings({ file }).tokens[0]!;
    assert.deepEqual([own, expires, ...methods!], [hashOf(SECRET), Date.parse('2027-06-30T23:59:59.999Z'), 'path']);
  });

  test('on Deno, a file hidden by the permissions is a mistake in the configuration, like any unreadable file', {
    skip: !isDeno && 'only Deno has permissions',
  }, async (t) => {
    const program = join(folder(t), 'embed.mjs');
    writeFileSync(
      program,
      `import { createGateway } from ${JSON.stringify(FILE)};
    for (const secretFile of ['/etc/hostname', '/${SECRET}/x', '${SECRET}']) {
      try { createGateway({ tokens: { a: { secretFile } } }); } catch (error) { console.log(error.problems.join()); }
    }`,
    );
    const { stdout } = await promisify(execFile)(process.execPath, ['run', '--allow-net', '--no-prompt', program]);
    const problem = (shown: string): string => `tokens.a.secretFile: ${shown} cannot be read (NotCapable)\n`;
    assert.equal(stdout, [problem('/etc/hostname'), problem('the file'), problem('the file')].join(''));
  });

  test("each setting's variable is GATEWAY_ and its path in capitals", () => {
    // Each is read, and none stands for another.
    for (const [, name] of SETTING_ROWS) {
      const found = problemsOf(() => loadSettings({ env: { [name]: '' } }));
      assert.deepEqual(found, [`${name}: is set but empty; unset it, or give it a value`]);
    }
    const env = {
      GATEWAY_DEFAULTS_TEXT_MODE: 'styled',
      GATEWAY_TRUSTED_PROXIES: '10.0.0.1',
      GATEWAY_LIMITS_BODY: '1KiB',
      GATEWAY_LOG_LEVEL: 'warn',
    };
    const settings = loadSettings({ env });
    const { 'defaults.text_mode': mode, trustedProxies, 'limits.body': body, 'log.level': level } = settings;
    assert.deepEqual([mode, trustedProxies?.written, body, level], ['styled', ['10.0.0.1'], 1024, 'warn']);
    assert.deepEqual(settings.readFrom, Object.keys(env));
  });

  test('a variable that begins with GATEWAY_ and is no setting is refused, with all that are', () => {
    const known = ['GATEWAY_CONFIG', 'GATEWAY_TOKENS_FILE', ...SETTING_ROWS.map(([, variable]) => variable)].join(', ');
    const names = `GATEWAY_TOKEN GATEWAY_API_TOKENS GATEWAY_BODY_LIMIT GATEWAY_SERVICES_HOST GATEWAY_ GATEWAY_XYZ
    GATEWAY_tokens GATEWAY_CONFIGS GATEWAY_RATE_`.split(/\s+/);
    for (const name of names) {
      const found = problemsOf(() => loadSettings({ env: { GATEWAY_TOKENS: SECRET, [name]: OTHER } }));
      assert.deepEqual(found, [`${name}: is not a setting; there are ${known}`]);
    }
  });

  test('the variables that Kubernetes and Docker make for a service called gateway are not looked at, nor is any other', () => {
    const ofService = `GATEWAY_SERVICE_HOST GATEWAY_SERVICE_PORT GATEWAY_SERVICE_PORT_HTTP
    GATEWAY_PORT_8880_TCP GATEWAY_PORT_8880_TCP_ADDR GATEWAY_PORT_8880_TCP_PORT GATEWAY_PORT_8880_TCP_PROTO`;
    const others = `TOKENS API_TOKENS API_TOKEN API__TOKENS SETTINGS__ACCESS__IPFILTER__ALLOWED HOSTNAME HOSTNAMES
    RATE_LIMIT RATE SENDERS RECIPIENTS BACKEND CONFIG CONFIG_PATH API_URL LISTEN CLIENTS LOG_LEVEL gateway_tokens
    MY_GATEWAY_TOKENS GATEWAY GATEWAYS_TOKENS XGATEWAY_RATE toString __proto__`;
    for (const name of `${ofService} ${others}`.split(/\s+/)) {
      const { warnings, readFrom, tokens } = loadSettings({ env: Object.fromEntries([[name, SECRET]]) });
      assert.deepEqual([warnings, readFrom, tokens], [[], [], []], name);
    }
    assert.deepEqual(loadSettings({ env: { GATEWAY_PORT: 'tcp://10.0.0.7:8880' } }).readFrom, []);
    // Not theirs, but somebody's who means `listen`.
    for (const port of ['8881', '0.0.0.0:8881']) {
      const [found] = problemsOf(() => loadSettings({ env: { GATEWAY_PORT: port } }));
      assert.match(found!, /^GATEWAY_PORT: is not a setting; there are .*GATEWAY_LISTEN/);
    }
  });

  test('a gateway starts with the variables HOSTNAME, TOKEN and PORT, which any container may have', async (t) => {
    const backend = await startBackend(t);
    const { log } = await startProcess(t, { backend, env: { HOSTNAME: 'a1b2c3', TOKEN: OTHER, PORT: '80' } });
    assert.equal(logLines(log)[0]!.warning, undefined);
  });

  test('a secret with a character that a secret seldom has is a warning without the secret, wherever it was given', async (t) => {
    const said =
      'has a secret with other characters than letters, digits and "-._~+/" ("=" at its end): a quote, a name or a ' +
      'second token may have got into it';
    const warningsOf = async (GATEWAY_TOKENS: string, args: string[] = []) => {
      const { code, stdout } = await cli(['--check', ...args], { env: args.length > 0 ? {} : { GATEWAY_TOKENS } });
      assert.equal(code, 0);
      assert.doesNotMatch(stdout, SECRETS);
      return stdout.split('\n').filter((line) => line.startsWith('warning')).join().split('; ')[0];
    };
    for (
      const text of [
        ...[`"home=${SECRET}"`, `{"home":"${SECRET}"}`, `home:${SECRET}`, `'${SECRET}'`, `[home=${SECRET}`],
        ...[
          `küche=${SECRET}`,
          `admin@nas=${SECRET}`,
          `büro/pc=${SECRET}`,
          `=${SECRET}=x`,
          `<${SECRET}>`,
          `$\{${SECRET}`,
        ],
      ]
    ) {
      assert.equal(await warningsOf(text), `warning: the token "token-1" ${said}`, text);
    }
    for (
      const text of [`home="${SECRET}"`, `home=${SECRET};b=${OTHER}`, `home=“${SECRET}”`, `home=${SECRET}\\nb=${OTHER}`]
    ) {
      assert.equal(await warningsOf(text), `warning: the token "home" ${said}`, text);
    }
    for (const text of [`"${SECRET}"`, `home=${SECRET}`, `correct horse ${SECRET}`]) {
      for (const secret of [{ secret: text }, { secretFile: fileWith(t, `${text}\n`) }]) {
        const file = fileWith(t, { tokens: { home: secret } });
        assert.equal(await warningsOf('', ['--config', file]), `warning: the token "home" ${said}`, text);
      }
    }
    for (const text of [`home=${SECRET}`, `home=sha256:${hashOf(SECRET)}`, `${SECRET}+/==`]) {
      assert.equal(await warningsOf(`x${text},y=${OTHER}`), '', text);
    }
    const { log } = await startProcess(t, { env: { GATEWAY_TOKENS: `home:${SECRET}` } });
    assert.ok(String(logLines(log)[0]!.warning).includes(said), log.join('\n'));
  });

  test('tokens in brackets, as other products list them, are a mistake, and their text is not shown', async (t) => {
    const said = 'is in brackets: leave them out, and write SECRET or name=SECRET, with commas between them';
    const whole = [
      `[${SECRET}]`,
      ` [${SECRET}]\n`,
      `["${SECRET}","${OTHER}"]`,
      `['${SECRET}', '${OTHER}']`,
      `[home=${SECRET},b=${OTHER}]`,
      `[\n  "${SECRET}",\n  "${OTHER}"\n]\n`,
      `"[${SECRET}]"`,
      `'["${SECRET}"]'`,
      '[]',
    ];
    const mistakeOf = async (at: string, how: { args?: string[]; env?: NodeJS.ProcessEnv }) => {
      const { code, stdout, stderr } = await cli([...how.args ?? [], '--check'], how);
      assert.doesNotMatch(stdout + stderr, SECRETS);
      assert.deepEqual([code, stdout], [2, ''], at);
      const [first, ...lines] = stderr.trimEnd().split('\n');
      assert.deepEqual([first, lines], ['gateway: the configuration is invalid:', [`  ${at} ${said}`]]);
    };
    for (const text of whole) {
      await mistakeOf('GATEWAY_TOKENS:', { env: { GATEWAY_TOKENS: text } });
      await mistakeOf('GATEWAY_TOKENS_FILE:', { env: { GATEWAY_TOKENS_FILE: fileWith(t, `# the tokens\n${text}`) } });
      await mistakeOf('tokens:', { args: ['--config', fileWith(t, { tokens: text })] });
    }
    await mistakeOf('GATEWAY_TOKENS[1]:', { env: { GATEWAY_TOKENS: `a=${OTHER},b=[${SECRET}]` } });
    // A password may have one.
    for (const text of [`[${SECRET}`, `${SECRET}]`, `a=${SECRET}],b=[${OTHER}`, `a=x[${SECRET}]x`]) {
      assert.equal((await cli(['--check'], { env: { GATEWAY_TOKENS: text } })).code, 0, text);
    }
  });

  test('environment tokens that replace those of the file are a warning at start and in --check', async (t) => {
    const [file, list] = [fileWith(t, tokens({})), fileWith(t, OTHER)];
    assert.deepEqual(loadSettings({ file }).warnings, []);
    for (const [name, value] of Object.entries({ GATEWAY_TOKENS: OTHER, GATEWAY_TOKENS_FILE: list })) {
      const [args, env] = [['--config', file], { [name]: value, GATEWAY_LOG_LEVEL: 'warn' }];
      const warning = `${name} replaces all tokens of the file`;
      const { code, stdout } = await cli(['--check', ...args], { env });
      assert.deepEqual([code, groupsOf(stdout, /^warning: (.*)$/gm)], [0, [warning]]);
      const [line] = logLines((await startProcess(t, { args, env })).log);
      assert.deepEqual([line!.level, line!.warning], ['warn', warning]);
    }
  });

  test('a configuration file with plain secrets that any user can read is a warning', async (t) => {
    const digest = `SHA256:${hashOf(SECRET)}`;
    const plain = { tokens: { a: { secret: digest }, b: { secret: OTHER } } };
    const rows: [isTold: boolean, mode: number, GatewayConfig][] = [
      [true, 0o644, plain],
      [true, 0o604, { backend: { url: `http://u:${SECRET}@backend:1` } }],
      [false, 0o600, plain],
      [false, 0o640, plain],
      [false, 0o644, { tokens: { a: { secret: digest, message: '"secret":"x" a://b@' } } }],
    ];
    for (const [isTold, mode, config] of rows) {
      const file = fileWith(t, config);
      await chmod(file, mode);
      const told = [`${file} contains plain secrets and is readable by all users (chmod o-r)`];
      assert.deepEqual(loadSettings({ file }).warnings, isTold ? told : []);
    }
  });

  test('a token that has expired, or does so within 14 days, is a warning when the gateway starts, on reload, and in --check', async (t) => {
    const old = { old: { secret: SECRET, expires: '2020-01-01' } };
    const fresh = { new: { secret: OTHER, expires: '2020-01-16' } };
    const due = { due: { secret: OTHER, expires: '2020-01-15' } };
    const { gateway } = await startBoth(t, { tokens: { ...old, ...fresh } }, { now: () => Date.parse('2020-01-02') });
    gateway.reload({ tokens: old });
    gateway.reload({ tokens: fresh });
    gateway.reload({ tokens: due });
    const warning = 'the token "old" has expired';
    const wanted = [
      ['listening', 'warn', warning],
      ['reloaded', 'warn', warning],
      ['reloaded', 'info', undefined],
      ['reloaded', 'warn', 'the token "due" expires soon: 2020-01-15T23:59:59.999Z'],
    ];
    assert.deepEqual(logLines(gateway.log).map(({ message, level, warning }) => [message, level, warning]), wanted);
    const expires = new Date(Date.now() + 7 * 86_400_000).toISOString();
    const { code, stdout } = await cli([
      '--check',
      '--config',
      fileWith(t, { tokens: { soon: { secret: SECRET, expires } } }),
    ]);
    assert.equal(code, 0);
    assert.match(stdout, /^warning: the token "soon" expires soon: \d{4}-/m);
  });

  test('what stands in an entry of tokens belongs to the secret, quotes too; the digest of nothing is refused everywhere', (t) => {
    const inFile = (text: string): string => fileWith(t, `${text}\n`);
    for (
      const secret of [
        `"${SECRET}"`,
        `'${SECRET}'`,
        `//${SECRET}`,
        `${SECRET};${OTHER}`,
        `${SECRET}"T`,
        `/${SECRET}+==`,
      ]
    ) {
      const envs = [{ GATEWAY_TOKENS: secret }, { GATEWAY_TOKENS_FILE: inFile(secret) }];
      for (const env of [...envs, { GATEWAY_TOKENS: `a=${secret}` }, { GATEWAY_TOKENS_FILE: inFile(`a=${secret}`) }]) {
        assert.deepEqual(loadSettings({ env }).tokens.map(({ digest }) => digest), [hashOf(secret)], secret);
      }
    }
    const places: ((text: string) => unknown)[] = [
      (text) => loadSettings({ env: { GATEWAY_TOKENS: text } }),
      (text) => loadSettings({ env: { GATEWAY_TOKENS_FILE: inFile(text) } }),
      (text) => createGateway({ tokens: { a: { secretFile: inFile(text) } } }),
      (text) => createGateway({ tokens: { a: { secret: text } } }),
    ];
    for (const load of places) {
      for (const nothing of ['', '\n', '\r\n']) {
        const found = problemsOf(() => load(`sha256:${hashOf(nothing).toUpperCase()}`)).join();
        assert.match(found, /^\S+: is the digest of nothing: there was no secret to hash$/);
      }
    }
  });

  test('attack: let a comment, a name or a digest pasted with its surroundings become a token', (t) => {
    const inFile = (text: string): NodeJS.ProcessEnv => ({ GATEWAY_TOKENS_FILE: fileWith(t, text) });
    const inText = (text: string): NodeJS.ProcessEnv => ({ GATEWAY_TOKENS: text });
    const asSecret = (text: string): NodeJS.ProcessEnv[] => [
      { GATEWAY_CONFIG: fileWith(t, { tokens: { a: { secret: text } } }) },
      { GATEWAY_CONFIG: fileWith(t, { tokens: { a: { secretFile: fileWith(t, `${text}\n`) } } }) },
    ];
    const digest = hashOf(SECRET);
    const pasted = 'contains a digest and more; write "sha256:" and its 64 digits, and nothing else';
    const remark = 'the-phone-of-my-wife';
    const spaced = [`${SECRET} ${remark}`, `${SECRET}\t${remark}`, `${SECRET} # ${remark}`, `${SECRET} //${remark}`];
    spaced.push(
      `${remark} ${SECRET}`,
      `home= ${SECRET}`,
      `home =${SECRET}`,
      `${SECRET}\r${remark}`,
      `secret  ${SECRET}`,
    );
    spaced.push(`${SECRET}\u00a0${remark}`, `digest  sha256:${digest}`, `${digest}  -`, `home: ${SECRET}`);
    const envs: [env: NodeJS.ProcessEnv, problem?: string][] = spaced.flatMap((text): [NodeJS.ProcessEnv, string][] => [
      [inText(text), `GATEWAY_TOKENS[0]: ${SPACE}`],
      [inText(`${OTHER},${text}`), `GATEWAY_TOKENS[1]: ${SPACE}`],
      [inFile(`${OTHER}\r\n${text}\n`), `GATEWAY_TOKENS_FILE[1]: ${SPACE}`],
    ]);
    // What sha256sum and openssl print.
    for (const line of [`digest  sha256:${digest}`]) {
      envs.push(...asSecret(line).map((env): [NodeJS.ProcessEnv, string] => [env, pasted]));
    }
    for (
      const line of [
        `${digest}  -`,
        `${digest} *-`,
        `SHA2-256(stdin)= ${digest}`,
        `a: sha256:${digest}`,
        `x ,${digest}, y`,
      ]
    ) {
      envs.push(...asSecret(line).map((env): [NodeJS.ProcessEnv, string] => [env, pasted]));
    }
    envs.push([inText(`phone:sha256:${digest}`), pasted]);
    // These are not mistakes.
    envs.push([inFile(`# the house\n\n  # SECRET, # x y\n${SECRET},\r\n\n a=sha256:${hashOf(OTHER)} \n`)]);
    envs.push([{ GATEWAY_CONFIG: fileWith(t, { tokens: { a: { secret: 'a correct horse of sixteen' } } }) }]);
    envs.push([inText(`secret=${SECRET}`)]);
    for (const [env, problem] of envs) {
      const found = problemsOf(() => loadSettings({ env, file: env.GATEWAY_CONFIG })).join('\n');
      assert.ok(problem ? found.includes(problem) : found === '', `${JSON.stringify(env)}: ${found}`);
      assert.doesNotMatch(found, SECRETS);
      assert.ok(!found.includes(digest) && !found.includes('the-phone'), found);
    }
  });

  test('a secret that looks like a digest is a warning at start and in --check', async (t) => {
    const digest = hashOf(SECRET);
    const told = (name: string, what: string): string => `the token "${name}" ${what}`;
    const isHex = 'has a secret of 64 hexadecimal digits; if that is a digest, write "sha256:" before it';
    const rows: [TokenConfig | string, ...string[]][] = [
      [digest, told('token-1', isHex)],
      [`a=${digest.toUpperCase()},${OTHER}`, told('a', isHex)],
      [{ secret: digest }, told('a', isHex)],
      [{ secretFile: fileWith(t, `${digest}\n`) }, told('a', isHex)],
      [{ secret: `sha256:${digest}` }],
    ];
    for (const [given, ...warnings] of rows) {
      const isEnv = typeof given === 'string';
      const args = isEnv ? [] : ['--config', fileWith(t, { tokens: { a: given } })];
      const { stdout, code } = await cli(['--check', ...args], { env: isEnv ? { GATEWAY_TOKENS: given } : {} });
      assert.equal(code, 0);
      const lines = stdout.split('\n').filter((line) => line.startsWith('warning: the token'));
      assert.deepEqual(lines, warnings.map((warning) => `warning: ${warning}`));
    }
    const backend = await startBackend(t);
    const gateway = await startGateway(t, backend, { tokens: { a: { secret: digest } } });
    assert.equal(linesOf(gateway, /^listening$/)[0]!.warning, told('a', isHex));
  });

  test('the address of a network without its length is a warning, because it is a single address', async (t) => {
    const config = {
      clients: ['192.168.1.0', '10.0.0.0/8', 'fd00::', '192.168.1.20', '::1'],
      trustedProxies: ['172.18.0.0'],
      tokens: { a: { secret: SECRET }, b: { secret: OTHER, clients: ['10.1.0.0', '10.2.0.0/16'] } },
    };
    const { stdout } = await cli(['--check', '--config', fileWith(t, config)]);
    const warnings = [...stdout.matchAll(/^warning: "(\S+)" is a single address; a network has a length/gm)];
    assert.deepEqual(warnings.map(([, entry]) => entry), ['172.18.0.0', '192.168.1.0', 'fd00::', '10.1.0.0']);
  });

  test('attack: admit every IPv4 address through an IPv6 range', async (t) => {
    const problem = 'contains every IPv4 address (0.0.0.0/0); write an IPv4 range as such, like 192.168.0.0/16';
    checkProblems(t)`
    {"clients":["X"]} → clients[0]: ${problem} | for: ::1/8, ::/0, ::/80, ::ffff:192.168.0.0/16, ::ffff:0:0/95, 0:0:0:0:0:ffff:a00:1/95
    {"trustedProxies":["10.0.0.1","X"]} → trustedProxies[1]: ${problem} | for: ::1/8, ::ffff:10.0.0.0/8
    @ {"clients":["X"]} → tokens.test.clients[0]: ${problem} | for: ::1/8, ::ffff:10.0.0.0/8
    {"clients":["0.0.0.0/0","X"],"trustedProxies":["X"]} → | for: ::ffff:0:0/96, ::ffff:192.168.0.0/112, fd00::/8, 2000::/3, ::1, ::/96, ::1/128, ::fffc:0:0/95, fe80::/10`;
    const backend = await startBackend(t);
    const range = { clients: ['::ffff:127.0.0.0/104', '::1', 'fe80::/10'], tokens: { a: { secret: SECRET } } };
    const gateway = await startGateway(t, backend, { ...range, listen: '127.0.0.1:0' });
    assert.equal((await ask(gateway, { path: '/v1/about', headers: BEARER })).status, 200);
  });

  test('cors accepts only origins as browsers write them', (t) => {
    const good = 'https://dash.example:8443, http://localhost, http://192.168.1.2:3000, https://[::1]:1';
    assert.deepEqual([...loadSettings({ env: { GATEWAY_CORS: good } }).cors!], good.split(', '));
    const NO_ORIGIN = 'is not an origin as browsers send it: ';
    checkProblems(t)`
    {"cors":["X"]} → cors[0]: "X" ${NO_ORIGIN} | for: null, https://*, //dash.example, https://d/x, https://d?x, https://Dash, HTTPS://d, https://d:443, http://d:80, http://d:080, https://u@d, ftp://d, file://, https://dé, https://1.2.3,  https://d
    {"cors":["X"]} → cors[0]: the value ${NO_ORIGIN} | for: chrome-extension://abc
    {"cors":["X"]} → cors[0]: "X" ${NO_ORIGIN} | for: *, dash.example, dash:3000, https://d/`;
  });

  // Its message may quote a secret, and a ConfigError says that none is shown.
  test('what a configuration itself throws reaches the program that embeds the gateway as it was thrown', () => {
    const thrown = new RangeError('of the program');
    const config = {
      get tokens(): never {
        throw thrown;
      },
    };
    assert.throws(() => createGateway(config), (error) => error === thrown);
  });

  test("a token's recipients and defaults are valid groups, numbers, UUIDs and user names; anything else is a mistake", () => {
    const mistakes = (settings: TokenConfig): number => problemsOf(() => createGateway(tokens(settings))).length;
    const inner = GROUP.slice('group.'.length);
    const bytes = (count: number): string => `group.${btoa(btoa('x'.repeat(count)))}`;
    const bad = [
      ...'group. group.01 group.123456789 group.4366412345678x group.name.01 group.LS11c2VybmFtZT1ldmlsLjAx'.split(' '),
      ...[`group.${atob(inner)}`, `${GROUP}=`, GROUP.replace('=', ''), `${GROUP} `, bytes(31), bytes(33), atob(inner)],
      ...[`group.${btoa(`${atob(inner)}\n`)}`, `group.${inner.slice(0, 9)}\n${inner.slice(9)}`],
      `group.${btoa('+/'.repeat(21).concat('8=')).replaceAll('+', '-')}.`,
      ...[SECRET, 'somebody', 'La.42', '4ara.42', 'Lara.4', '-x', '+49 1555'],
    ];
    for (const recipients of bad.map((text) => [text])) {
      assert.deepEqual([mistakes({ recipients }), mistakes({ defaults: { recipients } })], [1, 1], String(recipients));
    }
    const uuid = randomUUID();
    for (const good of [GROUP, TO, uuid, uuid.toUpperCase(), 'somebody.01', 'Lara.42', '_L4.007', 'group_1.1234']) {
      assert.equal(mistakes({ recipients: [good], defaults: { recipients: [good] } }), 0, good);
    }
    const recipients = ['group.*'];
    assert.deepEqual([mistakes({ recipients }), mistakes({ defaults: { recipients } })], [0, 1]);
  });

  const WEAK = {
    cert:
      '-----BEGIN CERTIFICATE-----\nMIIBgTCCASugAwIBAgIUEyQG9bsAx6uIorFhbDBUIr0dDJMwDQYJKoZIhvcNAQEL\nBQAwFDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMzA0NTcyMVoYDzIxMjYx\nMDMwMDQ1NzIxWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwXDANBgkqhkiG9w0BAQEF\nAANLADBIAkEAtA9f1ml/MzXKf+z+7HumRMsvcrvmk+FUe/OZb5g8Dm14Znrz0b0H\nHPAHF21HHKu16ykY0NLhTm/hARS0HCqGuQIDAQABo1MwUTAdBgNVHQ4EFgQUZNuS\nF4Q1GMIV9neFJaobBo7EdrAwHwYDVR0jBBgwFoAUZNuSF4Q1GMIV9neFJaobBo7E\ndrAwDwYDVR0TAQH/BAUwAwEB/zANBgkqhkiG9w0BAQsFAANBAHHIAh+6DPFNIQpe\nvQM7LVzIOBfloyxwUU80JKjXl/P9oGT84QnxkPmuoofqY3G+QJD3yLqWH0ay4uD9\nh5gyj9o=\n-----END CERTIFICATE-----',
    key:
      '-----BEGIN PRIVATE KEY-----\nMIIBVQIBADANBgkqhkiG9w0BAQEFAASCAT8wggE7AgEAAkEAtA9f1ml/MzXKf+z+\n7HumRMsvcrvmk+FUe/OZb5g8Dm14Znrz0b0HHPAHF21HHKu16ykY0NLhTm/hARS0\nHCqGuQIDAQABAkAwvhy2gTaC2WPo/3H++HYJF2vPxlfj3lKtf0Mg93gCe2Glsr7a\nOg4oQntyNwKMDq4sG/m7FNrLOm/UlxSjtpOVAiEA2VgJ2Tr8djiiM2czfZlXh4MA\nS74zzG/clRRy09ivvysCIQDUFcCIQZL5/ortWVn4GyRbgNFfdnewmF7uB2anEQ7/\nqwIhALXUPYkLHCMbhjdS43T0UJICOsEjQtqJyxS9osMwyPc5AiAypSce4pnYfQJr\n/2ROrRyXhUF6TG30i85PhRDsYFR2lQIhAMQbdS3/NrJFWodxkEruUlIsVNA6XZIF\nnzyo59OFY85N\n-----END PRIVATE KEY-----',
  };

  test('a certificate that is invalid, has no key, or has the key of another is a mistake in the configuration', (t) => {
    const [first, second] = CERTS;
    const check = (cert: string, key: string, ...problems: string[]): void => {
      const tls = { cert: fileWith(t, cert), key: fileWith(t, key) };
      assert.deepEqual(problemsOf(() => createGateway({ ...tokens({}), tls })), problems, `${cert} ${key}`);
    };
    const half = (text: string): string => text.slice(0, text.length / 2);
    const chain = `${first.cert}\n${second.cert}`;
    const cuts = [chain.slice(0, -40), chain.slice(0, first.cert.length + 9), chain.slice(0, -5)];
    for (const cert of ['hello', '', '\n', first.key, half(first.cert), ...cuts]) {
      check(cert, first.key, 'tls: its "cert" is empty, truncated or encrypted, or is not PEM');
    }
    for (const cert of [first.cert, first.key]) {
      check(cert, chain, 'tls: its "key" is a certificate: exchange the two, or name the file of the key');
    }
    for (const key of ['hello', '', half(first.key)]) {
      check(first.cert, key, 'tls: its "key" is empty, truncated or encrypted, or is not PEM');
    }
    for (const cert of [chain, first.cert]) {
      check(cert, second.key, 'tls: its "key" is not the key of the first certificate in "cert"');
    }
    // A chain; a chain with the text that programs write around it; chain and key in one file.
    const both = `${first.key}\n${chain}`;
    check(chain, first.key);
    check(`subject=CN=my-host\n${chain}\n`, first.key);
    check(both, both);
    // OpenSSL refuses a key of 512 bits only when certificate and key are used.
    if (isNode) {
      check(WEAK.cert, WEAK.key, 'tls: its "cert" and "key" cannot be used together (ERR_SSL_EE_KEY_TOO_SMALL)');
    }
    checkProblems(t)`
    {"tls":{"cert":"${certificate(t).cert}"}} → tls: needs both "cert" and "key"
    {"tls":{"cert":"DIR/none","key":"${certificate(t).key}"}} → tls.cert: DIR/none ${MISSING}`;
  });
});
