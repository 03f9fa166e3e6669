/**
 * Draws docs/demo.svg:  npm run picture
 *
 * The picture has two terminals: a demo of the gateway, and the first of the curl lines that the demo prints, with its
 * response. Beside them is a phone with the message that the demo's backend got; it says that it is a drawing, because
 * nothing reaches Signal. A test compares all of it with what a demo prints.
 */

import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

/** What the two terminals show; the phone shows what the demo's backend got. */
export type Recorded = { client: string; demo: string };

/** A secret of the shape that a demo makes, and a time. The picture has them in place of those of the run. */
const PICTURED = { secret: 'a-secret-of-22-letters', time: '1795407085479' };

/** The height of the picture on the page, in both arrangements. */
export const PICTURE_HEIGHT = 385;
/** The columns of the pictured terminals. */
export const COLUMNS = 45;

/**
 * What two terminals show of a demo's first message.
 * @param output what the demo has printed.
 * @param command its first curl line, whose message has arrived.
 * @param response what the client got.
 */
export function pictureOf(output: string, command: string, response: string): Recorded {
  const [, secret = ''] = /-u api:(\S+)/.exec(command) ?? [];
  if (secret.length !== PICTURED.secret.length) throw new Error(`the secret has another length: ${command}`);
  const zeros = (text: string): string => text.replace(/\d/g, '0');
  if (zeros(response) !== zeros(`{"timestamp":"${PICTURED.time}"}`)) throw new Error(`another response: ${response}`);
  const shown = command.replace(secret, PICTURED.secret).replace(/:\d+\//, ':8880/');
  const [intro] = /^A demo: .*/m.exec(output)!;
  const [arrived] = /^>>> [^]*?\nbackend got .*/m.exec(output)!;
  return { client: `$ ${shown}\n${response.replace(/\d+/, PICTURED.time)}`, demo: `${intro}\n…\n${arrived}` };
}

/** Breaks lines as a terminal does, but only after a space or a comma. */
const wrapped = (text: string): string[] =>
  text.split('\n').flatMap((line) => line.match(new RegExp(`.{1,${COLUMNS}}(?<=[ ,]|$)`, 'g')) ?? ['']);

const escaped = (text: string): string =>
  text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;').replaceAll('"', '&quot;');

/** The lines of the phone: two about the drawing, who has sent the message, and the message. */
export function phoneLines(demo: string): [about: string, whose: string, from: string, message: string] {
  const [sent] = /\{.*\}$/.exec(demo.trim())!;
  const { number, recipients, message } = JSON.parse(sent) as Record<'number' | 'message', string> & {
    recipients: [string];
  };
  return ['A drawing: with a real backend,', `the phone ${recipients[0]} shows`, number, message];
}

/**
 * Draws the two terminals, one above the other, and the phone beside them or, where the picture is narrow, its upper
 * part below them. The page gives the picture its size. It has no proportions of its own, so that a query of its width
 * can choose the arrangement. Fonts differ, so a column has room for the widest of the usual ones.
 */
export function drawDemo({ client, demo }: Recorded): string {
  const [width, gap, bar, line, end] = [496, 20, 32, 25, 18];
  const [phoneWidth, phonePart] = [300, 190];
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
  const height = below + lower;
  if (height !== PICTURE_HEIGHT) throw new Error(`PICTURE_HEIGHT is ${height}`);
  const terminals = pane(0, 0, 0, upper) + pane(1, 0, below, lower);
  const [about, whose, from, message] = phoneLines(demo).map(escaped);
  return `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="title desc">
<title id="title">The demo: a message sent with curl, and what arrives</title>
<desc id="desc">Two terminals and a phone. In one terminal: ${escaped(client.replaceAll('\n', ' '))}. In the other: ${
    escaped(demo.replace(/\s+/g, ' '))
  }. On the phone: ${from}: ${message}.</desc>
<style>
text { font: 16px ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; white-space: pre }
text { fill: #1f2328 } rect, path { fill: #f6f8fa; stroke: #d1d9e0 }
.title { font-size: 14px; fill: #59636e } .message { font-weight: bold; fill: #0550ae }
.middle { text-anchor: middle } .bubble { fill: #ddf4ff; stroke: none }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } rect, path { fill: #151b23; stroke: #3d444d }
.title { fill: #9198a1 } .message { fill: #79c0ff } .bubble { fill: #121d2f }
}
#narrow { display: none }
@media (max-width: 699px) { #wide { display: none } #narrow { display: inline } }
</style>
<defs>
${panes.join('')}<g id="phone">
<text x="150" y="18" class="title middle">${about}</text>
<text x="150" y="38" class="title middle">${whose}</text>
<rect x="50" y="54.5" width="200" height="330" rx="28"/><path d="M130 69h40M50 107.5h200"/>
<text x="150" y="97" class="middle">${from}</text>
<rect x="66" y="124.5" width="${28 + message!.length * 10}" height="40" rx="18" class="bubble"/>
<text x="80" y="150" class="message">${message}</text>
</g>
</defs>
<svg id="wide" viewBox="0 0 ${right + phoneWidth} ${height}" preserveAspectRatio="xMidYMin">
${terminals}<use href="#phone" x="${right}"/>
</svg>
<svg id="narrow" viewBox="0 0 ${width} ${height + gap / 2 + phonePart}" preserveAspectRatio="xMidYMin">
${terminals}<use href="#phone" x="${(width - phoneWidth) / 2}" y="${height + gap / 2}"/>
</svg>
</svg>
`;
}

/** Starts a demo, does what its first curl line does, and returns what both show. */
async function recordDemo(): Promise<Recorded> {
  const gateway = fileURLToPath(new URL('../gateway.ts', import.meta.url));
  const child = spawn(process.execPath, [...process.execArgv, gateway, '--demo'], {
    env: { ...process.env, GATEWAY_LISTEN: '127.0.0.1:0' },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let output = '';
  child.stdout.setEncoding('utf8').on('data', (chunk: string) => output += chunk);
  const printed = async (pattern: RegExp): Promise<RegExpExecArray> => {
    for (let found; child.exitCode === null; await once(child.stdout, 'data')) {
      if ((found = pattern.exec(output))) return found;
    }
    throw new Error(`the demo ended: ${output}`);
  };
  try {
    const [command, user = '', body = '', target = ''] = await printed(/^curl -u (\S+) -d (\S+) (\S+)$/m);
    const response = await fetch(`http://${target}`, {
      method: 'POST',
      headers: { 'Authorization': `Basic ${btoa(user)}`, 'Content-Type': 'application/x-www-form-urlencoded' },
      body,
    });
    const text = await response.text();
    await printed(/^backend got .*\n/m);
    return pictureOf(output, command, text);
  } finally {
    child.kill();
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  writeFileSync(new URL('../docs/demo.svg', import.meta.url), drawDemo(await recordDemo()));
}
