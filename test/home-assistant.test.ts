import type { GatewayConfig } from '../gateway.ts';
import { assert, difference, groupsOf, problemsOf } from './assertions.ts';
import { gotJson } from './backend.ts';
import { ask } from './client.ts';
import { fileWith, PACKAGE, read, SETTING_ROWS } from './files.ts';
import { loadSettings } from './gateway.ts';
import { test, type TestContext } from './guard.ts';
import { basic, FROM, MESSAGE, SECRET, STRANGER, TO } from './samples.ts';
import { startBoth } from './start.ts';

type Yaml = string | null | Yaml[] | { [key: string]: Yaml };

/** Parses the part of YAML that the app's files use: maps and lists in blocks, and scalars in one line. */
function parseYaml(text: string): Record<string, Yaml> {
  const lines = text.split('\n').filter((line) => line.trim() && !line.trim().startsWith('#'));
  const indentOf = (line = ''): number => /^ */.exec(line)![0].length;

  const readScalar = (scalar: string): Yaml => scalar === 'null' ? null : scalar.replace(/^"(.*)"$/, '$1');

  const readBlock = (): Yaml => {
    const indent = indentOf(lines[0]);
    const items: Yaml[] = [];
    const members: [string, Yaml][] = [];
    while (lines.length > 0 && indentOf(lines[0]) === indent) {
      const line = lines.shift()!.trim();
      const { item, key, value } = /^(?:- (?<item>.*)|(?<key>[^\s:]+):(?: (?<value>.*))?)$/.exec(line)?.groups ??
        assert.fail(`this parser does not know: ${line}`);
      if (item !== undefined) items.push(item === '[]' ? [] : readScalar(item));
      else if (value === undefined) members.push([key!, readBlock()]);
      else members.push([key!, value === '[]' ? [] : readScalar(value)]);
    }
    return items.length > 0 ? items : Object.fromEntries(members);
  };

  const parsed = readBlock() as Record<string, Yaml>;
  assert.deepEqual(lines, [], 'all lines are read');
  return parsed;
}

const CONFIG = parseYaml(read('home-assistant/config.yaml'));

const DOCS = read('home-assistant/DOCS.md');

/** The options that DOCS.md shows. */
const EXAMPLE = parseYaml(/^```yaml\n([^]*?)^```$/m.exec(DOCS)![1]!) as Record<string, Yaml>;

/** The paths of the leaves: `backend.url`. */
function pathsIn(value: Yaml, prefix = ''): string[] {
  if (value === null || typeof value === 'string' || Array.isArray(value)) return [prefix];
  return Object.entries(value).flatMap(([key, inner]) => pathsIn(inner, prefix ? `${prefix}.${key}` : key));
}

/** The types of the leaves, without those of lists around them. */
const TYPES = pathsIn(CONFIG.schema!).map((path) => {
  const type = path.split('.').reduce<Yaml>((inner, key) => (inner as Record<string, Yaml>)[key]!, CONFIG.schema!);
  return [path, String(Array.isArray(type) ? type[0] : type)] as const;
});

/** The mistakes that the gateway finds in options, as the Supervisor writes them and with the image's environment. */
function mistakesIn(t: TestContext, options: unknown): readonly string[] {
  const file = fileWith(t, JSON.stringify(options, null, 2), 'options.json');
  const supervisor = { SUPERVISOR_TOKEN: 'x', HASSIO_TOKEN: 'x', TZ: 'Europe/Berlin' };
  return problemsOf(() => loadSettings({ file, env: { GATEWAY_LISTEN: ':8880', ...supervisor } }));
}

/** The options of a new app, filled in. */
const filledIn = (recipients: string[]) => ({
  ...CONFIG.options as object,
  tokens: `home-assistant=${SECRET}`,
  defaults: { number: FROM, recipients },
});

test('the app has what Home Assistant requires, and the version of the package', () => {
  const repository = parseYaml(read('repository.yaml'));
  for (const key of ['name', 'maintainer']) assert.ok(repository[key], key);
  assert.match(String(repository.url), /^https:\/\/github\.com\/[\w.-]+\/[\w.-]+$/);
  assert.equal(CONFIG.url, repository.url);
  for (const [link] of DOCS.matchAll(/https:\/\/github\.com\/\S+\/blob\/[^)]+/g)) {
    const [, page, anchor] = /\/blob\/main\/([^#]+)#(.+)$/.exec(link)!;
    assert.ok(link.startsWith(`${repository.url}/`), link);
    assert.match(read(page!).toLowerCase(), new RegExp(`^#+ ${anchor}$`, 'm'));
  }
  assert.equal(CONFIG.version, PACKAGE.version);
  assert.match(String(CONFIG.slug), /^[a-z0-9_]+$/);
  for (const key of ['name', 'description']) assert.ok(CONFIG[key], key);
  assert.deepEqual(CONFIG.arch, ['aarch64', 'amd64']);
  assert.equal(CONFIG.startup, 'services'); // before Home Assistant, which gives up on a gateway that is not there
  assert.match(String(CONFIG.watchdog), /^http:\/\/\[HOST\]:\[PORT:8880\]\/healthz$/);
  assert.deepEqual(CONFIG.ports, { '8880/tcp': null });
});

test('each option is a setting of the gateway, of a type that Home Assistant knows, and has a title', () => {
  const settings = SETTING_ROWS.map(([path]) => path);
  for (const [path, type] of TYPES) {
    assert.ok(settings.includes(path), `${path} is not a setting`);
    assert.match(type, /^(?:str|password|url)\??$/, path);
  }
  const optional = TYPES.flatMap(([path, type]) => type.endsWith('?') ? path : []);
  const required = TYPES.flatMap(([path, type]) => type.endsWith('?') ? [] : path);
  assert.deepEqual(optional, ['recipients', 'rate']);
  // An optional option with a default would become a required one.
  assert.deepEqual(difference('the options', pathsIn(CONFIG.options!), 'the required ones', required), []);
  assert.deepEqual(difference("DOCS.md's example", pathsIn(EXAMPLE), 'the required ones', required), []);

  const translation = read('home-assistant/translations/en.yaml');
  const titled = groupsOf(translation.split('\nnetwork:')[0]!, /^ {2}(\w+):\n {4}name: .+\n {4}description: .+$/gm);
  assert.deepEqual(titled, Object.keys(CONFIG.schema as object));
  assert.match(translation, /\nnetwork:\n {2}8880\/tcp: .+\n$/);
  assert.deepEqual(groupsOf(DOCS, /^- \*\*(\w+)\*\*/gm), Object.keys(CONFIG.schema as object));
});

test('options that are filled in are a configuration, and confine the token', async (t) => {
  assert.deepEqual(mistakesIn(t, filledIn([TO])), []);
  assert.deepEqual(mistakesIn(t, { ...filledIn([TO]), recipients: [TO, 'group.*'], rate: '60/1m' }), []);
  const { tokens, defaults, allow } = filledIn([TO]) as unknown as GatewayConfig;
  const { backend, gateway } = await startBoth(t, { tokens, defaults, allow } as GatewayConfig);
  const headers = { authorization: basic(`api:${SECRET}`) }; // as Home Assistant's library sends it
  const denied = [{ ...MESSAGE, recipients: [STRANGER] }, { ...MESSAGE, number: STRANGER }];
  for (const body of denied) assert.equal((await ask(gateway, { body, headers })).status, 403);
  assert.deepEqual(backend.sent, []);
  assert.equal((await ask(gateway, { body: MESSAGE, headers })).status, 201);
  assert.deepEqual(gotJson(backend), MESSAGE);
});

test('options that are not filled in start no gateway', (t) => {
  const empty = 'must be a list with at least one entry';
  assert.deepEqual(mistakesIn(t, filledIn([])), [`defaults.recipients: ${empty}`]);
  assert.deepEqual(mistakesIn(t, { ...filledIn([TO]), recipients: [] }), [`recipients: ${empty}`]);
  assert.equal(mistakesIn(t, { ...filledIn([TO]), tokens: '' }).length, 1);
  assert.ok(mistakesIn(t, CONFIG.options).length >= 2, 'those of a new app, which the Supervisor itself refuses');
});

test("DOCS.md's example loads once it has a secret", (t) => {
  // A published secret would let anyone in.
  assert.match(mistakesIn(t, EXAMPLE).join(), /^tokens\[0\]: the secret is shorter than 16 characters/);
  assert.deepEqual(mistakesIn(t, { ...EXAMPLE, tokens: String(EXAMPLE.tokens).replace('SECRET', SECRET) }), []);
  assert.equal((EXAMPLE.backend as { url: string }).url, (CONFIG.options as { backend: { url: string } }).backend.url);
});

test('the app is the released image of its version, and starts as that does, not as root', () => {
  const [app, image] = [read('home-assistant/Dockerfile'), read('Dockerfile')];
  assert.match(app, /^ARG BUILD_VERSION\nFROM ghcr\.io\/[a-z0-9-]+\/[a-z0-9._-]+:\$BUILD_VERSION$/m);
  const entry: string[] = JSON.parse(/^ENTRYPOINT (\[.*\])$/m.exec(image)![1]!);
  const start: string[] = JSON.parse(/^ENTRYPOINT ([^]*)$/m.exec(app)![1]!.replace(/\\\n/g, ''));
  const [copy, run] = start[2]!.trim().split(/ && +exec /);
  assert.equal(copy, 'umask 077 && cp /data/options.json /gateway.json && chown node /gateway.json');
  assert.equal(run, `su -s /bin/sh -c 'exec ${entry.join(' ')}' node`);
});
