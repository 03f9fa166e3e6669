import { suite } from 'node:test';
import { COLUMNS, drawDemo, phoneLines, PICTURE_HEIGHT, pictureOf } from '../scripts/draw-demo.ts';
import { assert, groupsOf, until } from './assertions.ts';
import { ask, askAsCurl, open } from './client.ts';
import { read, README } from './files.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { MESSAGE, post } from './samples.ts';
import { startDemo } from './start.ts';

suite('demo', SIDE_BY_SIDE, () => {
  test('--demo: every printed curl line does what it claims, the token does not reach the backend, and a client may disconnect halfway', async (t) => {
    // Request lines, which the demo does not show by default, let this test know what has happened.
    const { output, close, first, secret, ...to } = await startDemo(t, { env: { GATEWAY_LOG_LEVEL: 'debug' } });
    assert.ok(first.length <= 80, first);
    // Without a character that any shell would take for its own, cmd.exe and PowerShell included.
    assert.match(first, /^curl -u api:[\w-]+ -d Hi 127\.0\.0\.1:\d+\/v2\/send$/);
    await until(() => output().includes('/v1/register'));
    const printed = output();
    assert.equal((await askAsCurl(first)).status, 201);
    await until(() => /^\n>>> Hi\n\nbackend got {3}POST \/v2\/send .*"message":"Hi"/m.test(output()));
    const lines = printed.split('\n').filter((line) => line.startsWith('curl ') && line !== first);
    const codes: unknown[] = [];
    for (const line of lines) codes.push(await askAsCurl(line).then(({ json }) => json.code));
    assert.deepEqual(codes, ['setup_blocked']);
    await until(() => output().includes('setup_blocked'));
    const after = output().slice(printed.length);
    assert.ok(!after.includes(secret) && !after.includes('curl'), after);

    // The stand-in backend of the demo crashed the process.
    const { socket } = open(t, to);
    socket.write(`${post(secret, 1_000_000)}{"message":"${'x'.repeat(200_000)}`, () => socket.destroy());
    await until(() => output().includes('client_left'));
    assert.equal((await ask(to, { headers: { authorization: `Bearer ${secret}` } })).status, 200);

    // U+009B starts a terminal control sequence, and JSON need not escape it.
    const headers = { authorization: `Bearer ${secret}` };
    assert.equal((await ask(to, { headers, body: { ...MESSAGE, message: 'a\u009b2Jb\u007fc\u0085d' } })).status, 201);
    await until(() => output().includes('"a 2Jb c d"'), 'the stand-in backend to show the message');
    await close('SIGINT');
  });

  test('--demo shows what arrives and what is refused, and no log line of a request that succeeds', async (t) => {
    const { output, close, secret, ...to } = await startDemo(t);
    const before = output();
    const headers = { authorization: `Bearer ${secret}` };
    assert.equal((await ask(to, { headers, body: MESSAGE })).status, 201);
    for (const body of ['{', 'null', '[]']) await ask(to, { headers, method: 'GET', path: '/v1/about', body });
    await ask(to, { headers, path: '/v1/unlink' });
    assert.equal((await ask(to, { headers: {} })).status, 401);
    assert.equal((await ask(to, { headers })).status, 200);
    await until(() => output().endsWith('GET /v1/about \n'));
    const refusals = groupsOf(output(), /^\{.*"status":4.*"code":"(\w+)".*\n/gm);
    assert.deepEqual(refusals, ['bad_json', 'bad_json', 'bad_json', 'unknown_endpoint', 'unauthorized']);
    const shown = output().slice(before.length).replace(/^\n# Account setup[^]*?-u 'api:.*\n\n/m, '')
      .replace(/^\{.*"status":4.*\n/gm, '');
    assert.match(
      shown,
      /^\n>>> hello\n\nbackend got {3}POST \/v2\/send .*"message":"hello"}\n(?:backend got {3}GET .*\n)+$/,
    );
    assert.doesNotMatch(output(), /"status":2/);
    await close('SIGINT');
  });

  test('docs/demo.svg shows what --demo and its shortest line print, and README.md has it with the same line', async (t) => {
    const { output, first, close } = await startDemo(t);
    const { text } = await askAsCurl(first);
    await until(() => /^backend got .*\n/m.test(output()));
    await close();
    const recorded = pictureOf(output(), first, text);
    const drawn = drawDemo(recorded);
    const svg = read('docs/demo.svg');
    assert.equal(svg, drawn, 'npm run picture draws it again');
    const shown = groupsOf(svg, /<text [^>]*>(.*?)<\/text>/g).map((line) =>
      line.replaceAll('&quot;', '"').replaceAll('&lt;', '<').replaceAll('&gt;', '>').replaceAll('&amp;', '&')
    );
    assert.ok(shown.every((line) => line.length <= COLUMNS), shown.join('\n'));
    const words = (text: string): string => text.replace(/\s/g, '');
    const onPhone = phoneLines(recorded.demo);
    assert.deepEqual(onPhone.slice(2), ['+15550100001', 'Hi']);
    const terminals = `another terminal${recorded.client}the demo${recorded.demo}`;
    assert.equal(words(shown.join('')), words(terminals + onPhone.join('')));
    assert.match(svg, /^<svg [^>]*>\n<title [^>]*>[^<]+<\/title>\n<desc [^>]*>[^<]+<\/desc>\n/);
    assert.doesNotMatch(svg, /<script|<image|<animate|<set|keyframes|@import|url\(|href="[^#]|\son\w+=/i);
    assert.ok(svg.length <= 12 * 1024, `${svg.length} bytes`);

    const command = recorded.client.split('\n', 1)[0]!.slice(2).replace('a-secret-of-22-letters', 'SECRET');
    const [, attributes = ''] = /<img src="docs\/demo\.svg" ([^>]*)>/.exec(README)!;
    for (const word of [`height="${PICTURE_HEIGHT}"`, command]) assert.ok(attributes.includes(word), attributes);
    assert.ok(README.replace(/<[^>]*>/g, '').replaceAll('\n', ' ').includes(`\`${command}\``), command);
  });
});
