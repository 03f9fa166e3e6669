import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync, writeFileSync } from 'node:fs';
import { copyFile, mkdir } from 'node:fs/promises';
import http from 'node:http';
import { join } from 'node:path';
import { suite } from 'node:test';
import type { GatewayConfig, TokenConfig } from '../gateway.ts';
import type { Answer } from './answers.ts';
import { assert, groupsOf, problemsOf, requests, until } from './assertions.ts';
import { gotJson, serve } from './backend.ts';
import { type Address, type Ask, ask, raw, rawRequest } from './client.ts';
import { tokens } from './configs.ts';
import { blocks, COOKBOOK, fileWith, fixture, folder, PAGES, read } from './files.ts';
import { loadSettings } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { render } from './hooks.ts';
import { unescaped } from './rows.ts';
import {
  AS_MULTIPART,
  BEARER,
  DEFAULTS,
  multipart,
  OTHER,
  SECRET,
  SECRETS,
  STRANGER,
  TO,
  URLENCODED,
} from './samples.ts';
import { SPELLINGS } from './spellings.ts';
import { cli, type Gateway, startBoth } from './start.ts';

/** The encodings in which senders post a payload. */
const PAYLOAD_AS: Record<string, (json: string) => [type: string, body: string]> = {
  json: (json) => ['application/json', json],
  form: (json) => [URLENCODED, `payload=${encodeURIComponent(json)}`],
  multipart: (json) => [AS_MULTIPART, multipart([['data', json]])],
};

/**
 * Recipes: the heading, the form and the encodings, then each payload with the text that must arrive at the backend.
 */
const RECIPES = fixture('webhooks.txt')
  .split('### ').slice(1).map((recipe) => {
    const [head = '', ...posts] = recipe.trim().split(/\n\s*/);
    const [heading = '', form = '', encodings = ''] = head.split(' | ');
    return { heading, form, encodings: encodings.split(' '), posts };
  });

/** A section of docs/webhooks.md, up to the next heading of its level or above. */
function sectionOf(heading: string): string {
  const [, level, text] = new RegExp(`\\n(##+) ${heading}\\n([^]*)`).exec(COOKBOOK) ?? assert.fail(heading);
  return text!.split(new RegExp(`\\n#{2,${level!.length}} `))[0]!;
}

/** The first block of JSON in a section of docs/webhooks.md. */
const jsonOf = (heading: string) => JSON.parse(blocks('json', sectionOf(heading))[0]!);

/** The configuration of docs/webhooks.md, with its token changed as a recipe describes. */
function recipeConfig(heading: string): GatewayConfig {
  const config = jsonOf('The token');
  const [[name, token]] = Object.entries(config.tokens) as [[string, TokenConfig]];
  return { ...config, tokens: { [name]: { ...token, ...jsonOf(heading) } } };
}

suite('recipes', SIDE_BY_SIDE, () => {
  for (const { heading, form, encodings, posts } of RECIPES) {
    test(`recipe: ${heading}`, async (t) => {
      assert.ok(sectionOf(heading).includes(`(${form}`), 'the form is named');
      const token = Object.values(recipeConfig(heading).tokens!)[0]!;
      const { backend, gateway } = await startBoth(t, tokens({ ...token, secret: SECRET }));
      const { headers, path = '/v2/send' } = SPELLINGS.find((known) => known.name === form)!.ask(SECRET);
      for (const [json = '', text = ''] of posts.map((post) => post.split(' → '))) {
        if (heading !== 'Grafana') assert.doesNotMatch(text, /[\s:]$/, 'something is still pending');
        for (const encoding of encodings) {
          const [type, body] = PAYLOAD_AS[encoding]!(json);
          const framing = encoding === 'multipart' && { 'transfer-encoding': 'chunked' };
          const answer = await ask(gateway, { body, path, headers: { 'content-type': type, ...framing, ...headers } });
          assert.equal(answer.status, 201, `${json}: ${answer.text}`);
          const styled = heading === 'Grafana' && { text_mode: 'styled' };
          assert.deepEqual(gotJson(backend), { ...DEFAULTS, ...styled, message: String(unescaped(text)) });
          assert.equal(backend.seen.at(-1)!.url, '/v2/send');
        }
      }
    });
  }

  test('a body that is not for a recipe is refused, or arrives as more than the fixed words of its template', async (t) => {
    const all = RECIPES.flatMap(({ posts }) => posts.map((post) => post.split(' → ')[0]!));
    const bodies = ['{}', '{"foo":"bar"}', 'Backup done', '{"message":"Backup done"}', ...all];
    const met = { sent: 0, refused: 0 };
    for (const { heading } of RECIPES) {
      const token = Object.values(recipeConfig(heading).tokens!)[0]!;
      const { methods: _, ...open } = token;
      const { backend, gateway } = await startBoth(t, tokens({ ...open, secret: SECRET }));
      const fixed = render([token.message ?? ''].flat().join('\n'), {}).trim();
      for (const [i, body] of bodies.entries()) {
        const { status } = await ask(gateway, { body, headers: BEARER });
        const sent = backend.sent.splice(0).map(({ message }) => message);
        status === 201 ? met.sent++ : met.refused++;
        assert.deepEqual([status, sent.length], status === 201 ? [201, 1] : [400, 0], `${heading}: ${body}`);
        assert.ok(sent.every((text) => text.trim() !== fixed), `${heading}: ${body} is ${sent}`);
        const isText = /^Backup|"message":"Backup/.test(body);
        assert.ok(!isText || sent.every((text) => text.includes('Backup done')), `${heading}: ${body} is ${sent}`);
        if (i < 2) assert.equal(status, 400, `${heading}: ${body}`);
      }
    }
    assert.ok(met.sent > RECIPES.length && met.refused > 3 * RECIPES.length, JSON.stringify(met));
  });

  /** Runs a script in a shell, and returns its exit code. */
  function shell(script: string, cwd: string, env: NodeJS.ProcessEnv = {}, args: string[] = []): Promise<number> {
    const options = { cwd, env: { PATH: process.env.PATH, ...env }, stdio: 'ignore' } as const;
    return once(spawn('sh', ['-c', script, 'sh', ...args], options), 'close').then(([code]) => code);
  }

  /** The target that a recipe names, which a device requests from the gateway. */
  function targetIn(block: string): string {
    return /:\d+\]? ?(\/[^\s'"]*(?: [\w ]+(?= ENDON))?)/.exec(block)![1]!.replaceAll(' ', '%20');
  }

  /** Headers of the HTTPClient of the ESP8266. */
  const ESP = ['User-Agent: ESP8266HTTPClient', 'Accept-Encoding: identity;q=1,chunked;q=0.1,*;q=0'];

  /** Posts to the address and with the headers that a recipe in YAML or a table sets. */
  function postAs(block: string, to: Address, body: Required<Ask>['body']): Promise<Answer> {
    const type = /content_type: (.*)/.exec(block)?.[1] ?? 'application/json';
    const authorization = /Authorization:? +(Bearer \S+)/.exec(block)![1]!;
    return ask(to, { path: targetIn(block), headers: { authorization, 'content-type': type }, body });
  }

  const SCRIPTS: string[] = [];

  const AT_DOOR = 'Somebody is at the door';

  const AT_PORT = 'failed protocol test [HTTP] at [localhost]:443';

  /**
   * A test of a recipe of "Scripts and devices": its heading and form, what must arrive at the backend, and what the
   * device does with the blocks of the recipe. `dir` is a folder for files; `needs` is a program that may be missing.
   */
  function recipe(
    heading: string,
    form: string,
    texts: (string | RegExp)[],
    run: (blocks: string[], to: Gateway & { dir: string }) => Promise<unknown>,
    needs = 'sh',
  ): void {
    SCRIPTS.push(heading);
    const isThere = spawnSync('sh', ['-c', `command -v ${needs}`]).status === 0;
    test(`recipe: ${heading}`, { skip: !isThere && `${needs} is not installed` }, async (t) => {
      const blocksOf = (name: string): string[] => blocks('\\w+', sectionOf(name));
      const [[, script], [, device]] = ['The token', 'Scripts and devices'].map((name) =>
        Object.entries(jsonOf(name).tokens)[0]!
      ) as [[string, TokenConfig], [string, TokenConfig]];
      const both = { scripts: { ...script, secret: SECRET }, devices: { ...device, secret: OTHER } };
      const { backend, gateway } = await startBoth(t, { tokens: both });
      const dir = folder(t);
      const file = join(dir, 'signal-send');
      const here = (block: string): string =>
        block.replaceAll('@auth=TOKEN', `@auth=${OTHER}`).replaceAll('TOKEN', SECRET)
          .replaceAll('gateway:8880', `127.0.0.1:${gateway.port}`).replaceAll('/etc/signal-send', file);
      writeFileSync(file, here(blocksOf('Shell and cron')[0]!));
      assert.ok(sectionOf(heading).includes(`(${form}`), 'the form is named');
      await run(blocksOf(heading).map(here), { ...gateway, dir });
      await until(() => requests(gateway).length === texts.length);
      assert.ok(requests(gateway).every(({ status }) => status === 201), gateway.log.join());
      assert.equal(backend.sent.length, texts.length);
      for (const [i, { message, ...target }] of backend.sent.entries()) {
        assert.deepEqual(target, DEFAULTS);
        if (texts[i] instanceof RegExp) assert.match(message, texts[i]);
        else assert.equal(message, texts[i]);
      }
      assert.doesNotMatch(`${gateway.log}`, SECRETS);
    });
  }

  recipe('Shell and cron', 'bearer', [
    ...['Backup done: 5 files\n', /^total (?:\P{Cc}|\n)*snap\.jpg\n/u, 'Front door', 'Backup done'],
    ...['Backup done', /^\S+: "sh -c printf [^]* exit 3" exited with 3\nTür Tr\nout\nerr\n$/],
    /^\S+: "\S+\/restic backup \/home" exited with 3\nno space left\n$/,
  ], async ([, lines, report, crontab], { dir }) => {
    writeFileSync(join(dir, 'snap.jpg'), 'a picture');
    for (const line of lines!.trim().split(/(?<!\\)\n/)) assert.equal(await shell(line, dir), 0, line);
    // The second word is in Latin-1, and the gateway takes only UTF-8.
    const failing = 'printf "Tür T\\374r\\n\x1b[31mout\x1b[m\\n"; echo err >&2; exit 3';
    for (const [code, command] of [[0, 'echo all is well'], [3, failing]] as const) {
      assert.equal(await shell(report!, dir, {}, ['sh', '-c', command]), code);
    }
    // As Debian's cron runs the line, which would not find `report` without its path.
    writeFileSync(join(dir, 'report'), report!);
    writeFileSync(join(dir, 'restic'), '#!/bin/sh\necho no space left\nexit 3\n', { mode: 0o755 });
    const [install] = /install -m 755 report \/\S+\/report/.exec(sectionOf('Shell and cron'))!;
    const [, line] = /^15 3 \* \* \* +(\S.*)$/m.exec(crontab!)!;
    await mkdir(join(dir, 'bin'));
    const inDir = (command: string): string =>
      command.replace('/usr/local/bin', join(dir, 'bin')).replace('restic', join(dir, 'restic'));
    assert.equal(await shell(inDir(install), dir), 0);
    assert.equal(await shell('env -i PATH=/usr/bin:/bin sh -c "$1"', dir, {}, [inDir(line!)]), 3);
  }, 'curl');

  recipe(
    'systemd, OnFailure=',
    'bearer',
    ['backup.service: failed --no-pager --lines=20\n'],
    async ([unit], { dir }) => {
      // A unit's name may have a backslash, which a shell must not eat: home-user\x2ddisk.mount.
      const credentials = join(dir, String.raw`home-user\x2ddisk`);
      await mkdir(credentials);
      await copyFile(join(dir, 'signal-send'), join(credentials, 'signal-send'));
      const [, command] = /^ExecStart=\/bin\/sh -c '(.*)'$/m.exec(unit!)!;
      assert.match(unit!, /^LoadCredential=signal-send:/m);
      writeFileSync(join(dir, 'systemctl'), '#!/bin/sh\necho "$4: failed $2 $3"\nexit 3\n', { mode: 0o755 });
      const script = command!.replaceAll('%i', 'backup.service').replaceAll('%d', credentials);
      assert.equal(await shell(script, dir, { PATH: `${dir}:${process.env.PATH}` }), 0);
    },
    'curl',
  );

  test('a proxy that redirects to https makes curl fail, with the file of docs/webhooks.md, and the token stays', async (t) => {
    const { backend, gateway } = await startBoth(t, tokens({ secret: SECRET, defaults: DEFAULTS }));
    const redirecting = http.createServer((req, res) => {
      req.resume().on('end', () => res.writeHead(308, { location: `${gateway.url}/v2/send` }).end());
    });
    const proxy = await serve(t, redirecting);
    const file = blocks('conf', sectionOf('Shell and cron'))[0]!.replace('http://gateway:8880', proxy)
      .replace('TOKEN', SECRET);
    const dir = folder(t);
    writeFileSync(join(dir, 'signal-send'), file);
    for (const form of ['-H Content-Type:text/plain --data-binary Hello', '-F message=Hello']) {
      assert.equal(await shell(`curl -K signal-send ${form}`, dir), 22, form);
      assert.deepEqual([requests(gateway).at(-1)!.status, requests(gateway).at(-1)!.auth], [401, undefined]);
    }
    assert.equal(backend.sent.length, 0);
  });

  recipe('monit', 'bearer', [`pi: nginx: ${AT_PORT}\n`], async ([script], { dir }) => {
    const env = { MONIT_HOST: 'pi', MONIT_SERVICE: 'nginx', MONIT_DESCRIPTION: AT_PORT };
    assert.equal(await shell(script!, dir, env), 0);
  }, 'curl');

  recipe('motion', 'basic', ['Motion 07'], async ([conf = ''], { dir }) => {
    writeFileSync(join(dir, 'snap.jpg'), 'a picture');
    const command = /^on_picture_save (.*)$/m.exec(conf)![1]!.replace('%v', '07').replace('%f', 'snap.jpg');
    assert.equal(await shell(command, dir), 0);
  }, 'curl');

  recipe("A router's or a camera's URL action", 'path', [AT_DOOR, AT_DOOR], async ([url], to) => {
    await raw(to, `GET ${targetIn(url!)} HTTP/1.0\r\n\r\n`);
    await rawRequest(to, targetIn(url!), { headers: ['User-Agent: Wget'] });
  });

  recipe(
    'Shelly',
    'path',
    ['The washing machine is done', 'The washing machine is done'],
    async ([url, script], to) => {
      await rawRequest(to, targetIn(url!), { headers: ['User-Agent: shelly'] });
      const calls: [string, Ask & { url: string }][] = [];
      new Function('Shelly', script!)({ call: (...call: (typeof calls)[0]) => calls.push(call) });
      const [name, { url: where, ...request }] = calls[0]!;
      assert.equal(name, 'HTTP.Request');
      await ask(to, { ...request, path: targetIn(where) });
    },
  );

  recipe('Tasmota', 'path', [AT_DOOR], ([rule], to) => rawRequest(to, targetIn(rule!), { headers: ESP }));

  recipe('ESPHome', 'bearer', ['The cellar is wet'], ([yaml], to) => {
    const [, authorization, type, body] =
      /http_request\.post:[^]*Authorization: (.*)\n +Content-Type: (.*)\n +body: (.*)\n/.exec(yaml!)!;
    const headers = { 'user-agent': 'ESPHome/2026.6.5 (https://esphome.io)', authorization, 'content-type': type };
    return ask(to, { path: targetIn(yaml!), headers, body: body! });
  });

  recipe('ESP8266, ESP32', 'bearer', ['The cellar is wet'], ([lines], to) => {
    const own = Array.from(lines!.matchAll(/addHeader\("(.*)", "(.*)"\)/g), ([, ...pair]) => pair.join(': '));
    const [, body = ''] = /POST\("(.*)"\)/.exec(lines!)!;
    return rawRequest(to, targetIn(lines!), { method: 'POST', headers: [...ESP, ...own], body });
  });

  recipe('Home Assistant, rest_command', 'bearer', ['recipients=+15559999999&message=Tür offen'], ([yaml], to) => {
    assert.match(yaml!, /method: post\n[^]*payload: "\{\{ text \}\}"/);
    return postAs(yaml!, to, 'recipients=+15559999999&message=Tür offen');
  });

  recipe('Synology', 'bearer', ['Volume 1 on nas has degraded.'], ([table], to) => {
    const [, name] = /^HTTP body +(\w+) +\(category: message content\)$/m.exec(table!)!;
    return postAs(table!, to, { [name!]: 'Volume 1 on nas has degraded.' });
  });

  test('the token of docs/webhooks.md is the one that its command makes, and a script gets the same', async (t) => {
    const sorted = ({ secret: _, methods, ...token }: TokenConfig) => ({ ...token, methods: methods!.toSorted() });
    const [shown] = Object.entries<TokenConfig>(jsonOf('The token').tokens);
    for (const [heading, name] of [['The token', shown![0]], ['Scripts and devices', 'my-script']] as const) {
      const [, command] = /node gateway\.mjs (add [^`\n]+)/.exec(sectionOf(heading))!;
      const file = join(folder(t), 'gateway.json');
      const { code, stderr } = await cli(['--config', file, ...command!.split(' '), '--from', DEFAULTS.number]);
      assert.equal(code, 0, stderr);
      const { [name]: made } = JSON.parse(readFileSync(file, 'utf8')).tokens;
      assert.match(made.secret, /^sha256:[0-9a-f]{64}$/);
      assert.deepEqual(sorted(made), sorted(shown![1]), heading);
    }
  });

  test('every recipe of docs/webhooks.md is tested here, and its render command prints a send', async (t) => {
    const headings = (section: string): string[] => groupsOf(sectionOf(section), /^### (.*)$/gm);
    assert.deepEqual(headings('Webhooks'), [...RECIPES.map(({ heading }) => heading), 'Another sender']);
    // The others need their program: npm run test:real.
    const real = ['senders', 'monitors'].map((name) => read(`test/real/${name}.test.ts`)).join();
    const isReal = (heading: string): boolean => real.includes(`', '${heading}')`) && !SCRIPTS.includes(heading);
    assert.deepEqual(headings('Scripts and devices').filter((heading) => !isReal(heading)), SCRIPTS);
    const [, json, name] = /^echo '(.*)' \|\n +node gateway\.mjs render (.*)$/m.exec(
      sectionOf('Grafana, with a template'),
    )!;
    const file = fileWith(
      t,
      JSON.stringify(recipeConfig('Grafana, with a template')).replace(/sha256:PASTE[^"]*/, SECRET),
    );
    const { code, stdout } = await cli(['--config', file, 'render', name!], { input: json! });
    const message = '[FIRING:1] DiskFull\n\nfiring: DiskFull\n3% left';
    assert.deepEqual([code, JSON.parse(stdout)], [0, { ...DEFAULTS, message }]);
  });

  test('the template of docs/migrating.md finds the text in each field that secured-signal-api maps', async (t) => {
    const page = PAGES['docs/migrating.md']!;
    const [section] = page.split('## The built-in fields\n').slice(1);
    const config: GatewayConfig = JSON.parse(blocks('json', page)[0]!.replace(/sha256:PASTE[^"]*/, SECRET));
    const names = 'message content description text summary details'.split(' ');
    const [plain, inData] = [['message', 'msg', ...names.slice(1), 'body'], names.map((name) => `data.${name}`)];
    for (const field of [...plain, ...inData, 'data']) {
      const isNamed = section!.includes(`\`${field}\``) || /^data\.[dst]/.test(field); // the others are "and so on"
      assert.ok(isNamed, field);
    }
    /** A body that has every field, with the field's name as the text. */
    const payload = (fields: string[]): object => {
      const data = Object.fromEntries(
        names.filter((name) => fields.includes(`data.${name}`)).map((n) => [n, `data.${n}`]),
      );
      const others = fields.filter((field) => !field.startsWith('data.')).map((field) => [field, field]);
      return { ...fields.some((field) => field.startsWith('data.')) && { data }, ...Object.fromEntries(others) };
    };
    const [, forData] = /replace the six lines of\s+`data\.…` with\s+`(.*?)`/.exec(section!)!;
    const { message } = config.tokens!.webhook!;
    const ofData = /"\{\{#data\.[^]*\/data\.details\}\}"/;
    const withData = JSON.parse(JSON.stringify(message).replace(ofData, forData!));
    const all = [...plain.slice(0, -1), ...inData, 'body'];
    for (
      const [template, fields] of [[message, all], [withData, [...plain.slice(0, -1), 'data', 'body']]] as [
        string[],
        string[],
      ][]
    ) {
      const { backend, gateway } = await startBoth(t, {
        tokens: { webhook: { ...config.tokens!.webhook, message: template } },
      });
      for (const found of [...fields.map((field) => [field]), fields]) {
        assert.equal((await ask(gateway, { body: payload(found), headers: BEARER })).status, 201, found.join());
        assert.deepEqual(gotJson(backend), { ...DEFAULTS, message: found.join('\n') });
      }
      assert.equal((await ask(gateway, { body: { other: 'x' }, headers: BEARER })).status, 400);
      assert.equal(backend.sent.length, fields.length + 1);
    }
  });

  test('the page for Home Assistant keeps a text, its sender and its time in one entity, and its automation checks that state', () => {
    const block = (first: string) =>
      blocks('yaml', PAGES['docs/home-assistant.md']).find((text) => text.startsWith(first));
    const [rest, automation] = [block('rest:'), block('automation:')];
    assert.deepEqual(groupsOf(rest!, /^ +- name: (.*)$/gm), ['Signal message']);
    assert.match(
      rest!,
      /\[:255\][^]*json_attributes_path: "\$\[-1:\]\.envelope"\n +json_attributes: \[source, .*timestamp\]/,
    );
    assert.match(automation!, /trigger: state\n +entity_id: sensor\.signal_message\n +conditions:/);
    assert.match(automation!, /trigger\.to_state\.state == [^]* trigger\.to_state\.attributes\.source == /);
    assert.doesNotMatch(automation!, /states\(|state_attr\(/);

    const [, template] = /\{\{ ([^]*) \}\}/.exec(automation!)!;
    const isOpened = new Function('trigger', 'now', `return ${template!.replaceAll(/\band\b/g, '&&')}`);
    const nowMs = 1_700_000_000_000;
    /** Whether the condition holds for a state, and for the attributes of its envelope. */
    const opens = (state: string, attributes: object): boolean =>
      isOpened({ to_state: { state, attributes } }, () => ({ timestamp: () => nowMs / 1000 }));
    const command = 'open the garage';
    const sent = { source: TO, timestamp: nowMs - 20_000 };
    assert.equal(opens(command, sent), true);
    assert.equal(opens(command, { ...sent, source: STRANGER }), false);
    assert.equal(opens(command, { ...sent, timestamp: nowMs - 61_000 }), false, 'it has waited in the backend');
    assert.equal(opens(command, {}), false, 'a refused poll');
    assert.equal(opens('', sent), false);
    assert.equal(opens('close the garage', sent), false);
  });

  test('every configuration in the pages loads, and every token in it is confined', (t) => {
    const secretFile = fileWith(t, SECRET);
    const whole = blocks('json').filter((block) => block.includes('"tokens"'));
    const configs = [...whole, ...RECIPES.map(({ heading }) => JSON.stringify(recipeConfig(heading)))];
    assert.ok(configs.length >= 15, `only ${configs.length} configurations`);
    assert.equal(configs.length, blocks('json').length);
    for (const text of configs) {
      // The gateway refuses to start with the placeholders, because a published secret would let anyone in.
      for (const problem of problemsOf(() => loadSettings({ file: fileWith(t, text) }))) {
        assert.match(problem, /: after "sha256:" there must be 64|secretFile: \S+ does not exist/);
      }
      let made = 0;
      const good = text.replace(/sha256:PASTE[^"]*/g, () => `sha256:${String(++made).padStart(64, '0')}`)
        .replace(/\/run\/secrets\/\w+/g, () => secretFile);
      assert.deepEqual(problemsOf(() => loadSettings({ file: fileWith(t, good) })), []);
    }
    const confined = ['allow', 'senders', 'recipients', 'defaults', 'rate', 'clients', 'methods', 'expires'] as const;
    const all = configs.flatMap((text) => Object.entries((JSON.parse(text) as GatewayConfig).tokens!));
    assert.ok(all.length >= 15, `only ${all.length} tokens`);
    for (const [name, token] of all) {
      assert.ok(confined.filter((key) => token[key] !== undefined).length >= 2, name);
      if (!token.defaults) continue;
      const allow = { devices: ['GET /v2/send'] }[name] ?? ['send'];
      const { text_mode: _, ...lists } = token.defaults;
      assert.deepEqual([token.allow, token.senders, token.recipients, lists], [allow, undefined, undefined, DEFAULTS]);
    }
  });

  test('the web page in docs/webhooks.md sends, or shows why it could not', async (t) => {
    const json = blocks('json').find((block) => block.includes('"dashboard": {') && block.includes('"cors"'))!;
    const config: GatewayConfig = JSON.parse(json.replace(/(?<="secret": ").*?(?=")/, SECRET));
    const { backend, gateway } = await startBoth(t, config);
    const origin = config.cors![0]!;
    /** Sends a preflight first, as a browser does. */
    const browse = async (
      url: string,
      init: { method: string; headers: Record<string, string> },
    ): Promise<Response> => {
      const [path, names] = [new URL(url).pathname, Object.keys(init.headers).join().toLowerCase().split(',').sort()];
      const asked = { 'access-control-request-method': init.method, 'access-control-request-headers': names.join() };
      const { headers } = await ask(gateway, { method: 'OPTIONS', path, headers: { origin, ...asked } });
      assert.equal(headers['access-control-allow-origin'], origin);
      assert.equal(headers['access-control-allow-headers'], names.join(', '));
      return fetch(gateway.url + path, { ...init, headers: { ...init.headers, origin } });
    };
    const shown: string[] = [];
    const unreached = (): Promise<never> => Promise.reject(new TypeError('Failed to fetch'));
    for (const [secret, fetching] of [[SECRET, browse], ['wrong', browse], [SECRET, unreached]] as const) {
      const page = blocks('js').find((block) => block.includes('alert('))!.replace('TOKEN', secret);
      const show = (text: string): unknown => shown.push(text);
      await new Function('fetch', 'alert', `return (async () => {${page}})();`)(fetching, show);
    }
    assert.equal(backend.sent.length, 1);
    assert.match(shown.join(), /^Sent\.,Not sent: A valid API token.*,The gateway was not reached: Failed to fetch$/);
  });
});
