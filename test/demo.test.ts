import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { suite } from 'node:test';
import { assert, groupsOf, until } from './assertions.ts';
import { ask, askAsCurl, open } from './client.ts';
import { HERE, read, README } from './files.ts';
import { SIDE_BY_SIDE, test, type TestContext } from './guard.ts';
import { MESSAGE, post } from './samples.ts';
import { startDemo } from './start.ts';

suite('demo', SIDE_BY_SIDE, () => {
  test('--demo: every printed curl line does what it claims, the token does not reach the backend, and a client may disconnect halfway', async (t) => {
    // Request lines, which the demo does not show by default, let this test know what has happened.
    const { output, close, first, secret, ...to } = await startDemo(t, { env: { LOG_LEVEL: 'debug' } });
    assert.ok(first.length <= 80, first);
    // Without a character that any shell would take for its own, cmd.exe and PowerShell included.
    assert.match(first, /^curl -u api:[\w-]+ -d Hi 127\.0\.0\.1:\d+\/v2\/send$/);
    await until(() => output().includes('/v1/register'));
    const printed = output();
    assert.match(printed, /\ncurl .* by bearer[^]*# Account setup is refused/);
    assert.equal((await askAsCurl(first)).status, 201);
    await until(() => /^\n>>> Hi\n\nbackend got {3}POST \/v2\/send .*"message":"Hi"/m.test(output()));
    const lines = printed.split('\n').filter((line) => line.startsWith('curl ') && line !== first);
    const codes: unknown[] = [];
    for (const line of lines) codes.push(await askAsCurl(line).then(({ status, json }) => json.code ?? status));
    assert.deepEqual(codes, [201, 201, 201, 201, 'setup_blocked']);
    await until(() => output().includes('setup_blocked'));
    const after = output().slice(printed.length);
    for (const form of ['bearer', 'query', 'path', 'body']) {
      assert.match(
        after,
        new RegExp(`^>>> Hello by ${form}\\n\\nbackend got {3}POST /v2/send .*"Hello by ${form}"`, 'm'),
      );
    }
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

  test('--demo shows what arrives, and no request log lines, whatever a client sends', async (t) => {
    const { output, close, secret, ...to } = await startDemo(t);
    const before = output();
    const headers = { authorization: `Bearer ${secret}` };
    assert.equal((await ask(to, { headers, body: MESSAGE })).status, 201);
    for (const body of ['{', 'null', '[]']) await ask(to, { headers, method: 'GET', path: '/v1/about', body });
    await ask(to, { headers, path: '/v1/unlink' });
    assert.equal((await ask(to, { headers: {} })).status, 401);
    assert.equal((await ask(to, { headers })).status, 200);
    await until(() => output().endsWith('GET /v1/about \n'));
    const shown = output().slice(before.length).replace(/^\nThere are four[^]*?-u 'api:.*\n\n/m, '');
    assert.match(
      shown,
      /^\n>>> hello\n\nbackend got {3}POST \/v2\/send .*"message":"hello"}\n(?:backend got {3}GET .*\n)+$/,
    );
    assert.doesNotMatch(output(), /status/);
    await close('SIGINT');
  });

  /** A secret of the shape that a demo makes, and a time. The picture has them in place of those of the run. */
  const PICTURED = { secret: 'a-secret-of-22-letters', time: '1795407085479' };

  /** What two terminals show of a demo's first message: that of a client, and that of the demo. */
  async function recordDemo(t: TestContext): Promise<{ client: string; demo: string }> {
    const { output, first, secret, port, close } = await startDemo(t);
    const { text } = await askAsCurl(first);
    await until(() => /^backend got .*\n/m.test(output()));
    await close();
    assert.equal(secret.length, PICTURED.secret.length);
    assert.equal(text.replace(/\d/g, '0'), `{"timestamp":"${PICTURED.time.replace(/\d/g, '0')}"}`);
    const command = first.replace(secret, PICTURED.secret).replace(`:${port}/`, ':8880/');
    const [intro] = /^A demo: .*/m.exec(output())!;
    const [arrived] = /^>>> [^]*?\nbackend got .*/m.exec(output())!;
    return { client: `$ ${command}\n${text.replace(/\d+/, PICTURED.time)}`, demo: `${intro}\n…\n${arrived}` };
  }

  /** The height of the picture on the page, in both arrangements. */
  const PICTURE_HEIGHT = 280;

  /** The columns of the pictured terminals. Two of them fit side by side on a page, and one on a phone. */
  const COLUMNS = 45;

  /** Breaks lines as a terminal does, but only after a space or a comma. */
  const wrapped = (text: string): string[] =>
    text.split('\n').flatMap((line) => line.match(new RegExp(`.{1,${COLUMNS}}(?<=[ ,]|$)`, 'g')) ?? ['']);

  const escaped = (text: string): string =>
    text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;').replaceAll('"', '&quot;');

  /**
   * Draws the two terminals, side by side or, where the picture is narrow, one above the other. The page gives the
   * picture its size. It has no proportions of its own, so that a query of its width can choose the arrangement. Fonts
   * differ, so a column has room for the widest of the usual ones.
   */
  function drawDemo({ client, demo }: { client: string; demo: string }): string {
    const [width, gap, bar, line, end] = [496, 20, 32, 25, 18];
    const texts = [['another terminal', wrapped(client)], ['the demo', wrapped(demo)]] as const;
    const [upper, lower] = texts.map(([, lines]) => bar + lines.length * line + end) as [number, number];
    const panes = texts.map(([title, lines], i) => {
      const rows = lines.map((text, row) => {
        const kind = text.startsWith('>>>') ? ' class="message"' : '';
        return text && `<text x="18" y="${bar + (row + 1) * line}"${kind}>${escaped(text)}</text>\n`;
      });
      return `<g id="pane${i}">\n<text x="18" y="22" class="title">${title}</text>\n${rows.join('')}</g>\n`;
    });
    const frame = (x: number, y: number, height: number): string =>
      `<rect x="${x + 0.5}" y="${y + 0.5}" width="${width - 1}" height="${height - 1}" rx="6"/>` +
      `<path d="M${x} ${y + bar + 0.5}h${width}"/>`;
    const pane = (i: number, x: number, y: number, height: number): string =>
      `${frame(x, y, height)}<use href="#pane${i}" x="${x}" y="${y}"/>\n`;
    const below = upper + gap / 2;
    const right = width + gap;
    return `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="title desc">
<title id="title">The demo: a message sent with curl, and what arrives</title>
<desc id="desc">Two terminals. In one of them: ${escaped(client.replaceAll('\n', ' '))}. In the other: ${
      escaped(demo.replace(/\s+/g, ' '))
    }.</desc>
<style>
text { font: 16px ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; white-space: pre }
text { fill: #1f2328 } rect, path { fill: #f6f8fa; stroke: #d1d9e0 }
.title { font-size: 14px; fill: #59636e } .message { font-weight: bold; fill: #0550ae }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } rect, path { fill: #151b23; stroke: #3d444d }
.title { fill: #9198a1 } .message { fill: #79c0ff }
}
#narrow { display: none }
@media (max-width: 699px) { #wide { display: none } #narrow { display: inline } }
</style>
<defs>
${panes.join('')}</defs>
<svg id="wide" viewBox="0 0 ${width + right} ${PICTURE_HEIGHT}" preserveAspectRatio="xMidYMin">
${pane(0, 0, 0, PICTURE_HEIGHT)}${pane(1, right, 0, PICTURE_HEIGHT)}</svg>
<svg id="narrow" viewBox="0 0 ${width} ${below + lower}" preserveAspectRatio="xMidYMin">
${pane(0, 0, 0, upper)}${pane(1, 0, below, lower)}</svg>
</svg>
`;
  }

  test('docs/demo.svg shows what --demo and its shortest line print, and README.md has it with the same line', async (t) => {
    const recorded = await recordDemo(t);
    const drawn = drawDemo(recorded);
    if (process.env.PICTURE) writeFileSync(join(HERE, 'docs/demo.svg'), drawn);
    const svg = read('docs/demo.svg');
    assert.equal(svg, drawn, 'npm run picture draws it again');
    const shown = groupsOf(svg, /<text [^>]*>(.*?)<\/text>/g).map((line) =>
      line.replaceAll('&quot;', '"').replaceAll('&lt;', '<').replaceAll('&gt;', '>').replaceAll('&amp;', '&')
    );
    assert.ok(shown.every((line) => line.length <= COLUMNS), shown.join('\n'));
    const words = (text: string): string => text.replace(/\s/g, '');
    assert.equal(words(shown.join('')), words(`another terminal${recorded.client}the demo${recorded.demo}`));
    assert.match(svg, /^<svg [^>]*>\n<title [^>]*>[^<]+<\/title>\n<desc [^>]*>[^<]+<\/desc>\n/);
    assert.doesNotMatch(svg, /<script|<image|<animate|<set|keyframes|@import|url\(|href="[^#]|\son\w+=/i);
    assert.ok(svg.length <= 12 * 1024, `${svg.length} bytes`);

    const command = recorded.client.split('\n', 1)[0]!.slice(2).replace(PICTURED.secret, 'SECRET');
    const [, attributes = ''] = /<img src="docs\/demo\.svg" ([^>]*)>/.exec(README)!;
    for (const word of [`height="${PICTURE_HEIGHT}"`, command]) assert.ok(attributes.includes(word), attributes);
    assert.ok(README.replace(/<[^>]*>/g, '').replaceAll('\n', ' ').includes(`\`${command}\``), command);
  });
});
