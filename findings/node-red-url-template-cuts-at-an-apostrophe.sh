#!/usr/bin/env bash
# Guess: `{{payload}}` in the URL of Node-RED's http request node is encoded for a URL. It is escaped for HTML: the
# apostrophe of "it's late" becomes `&#39;`, whose `#` ends the URL, so the text is cut there and all that follows in
# the URL is gone. A slash and an equals sign do the same. With three braces these go through, an ampersand does not,
# and a line feed is dropped either way.
# Seen with Node-RED 5.0.7 (Node 22.22).
# Half an alert is sent, and a token or a recipient behind the text is lost. A page with such a URL should write the
# text last and in three braces, or better a body.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
cd "$dir" || exit 2
have npm install --silent --no-audit --no-fund node@22.22.0 node-red@5.0.7
cat >run.mjs <<'JS'
import { spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
const texts = ["it's late", 'in/out', 'a=b', 'you & me', 'one\ntwo'];
const templates = ['{{payload}}', '{{{payload}}}'];
const seen = [];
const server = http.createServer((req, res) => {
  seen.push(req.url);
  res.end();
  if (seen.length === texts.length * templates.length) {
    for (const line of seen.sort()) console.log(line);
    red.kill();
    process.exit();
  }
});
let red;
server.listen(0, '127.0.0.1', () => {
  const url = (i, j) => `http://127.0.0.1:${server.address().port}/${i}${'ab'[j]}?m=${templates[j]}&to=x`;
  const inject = (v) => ({ type: 'inject', once: true, onceDelay: 0.1, props: [{ p: 'payload', v, vt: 'str' }] });
  const flow = texts.flatMap((text, i) => [
    { ...inject(text), id: `i${i}`, z: 'f', wires: [[`${i}0`, `${i}1`]] },
    ...templates.map((_, j) => ({ id: `${i}${j}`, z: 'f', type: 'http request', method: 'GET', ret: 'txt', url: url(i, j), wires: [[]] })),
  ]);
  writeFileSync('flow.json', JSON.stringify([{ id: 'f', type: 'tab' }, ...flow]));
  const settings = { httpAdminRoot: false, httpNodeRoot: false, userDir: `${process.cwd()}/user`, flowFile: `${process.cwd()}/flow.json` };
  writeFileSync('settings.js', `module.exports = ${JSON.stringify(settings)}`); // so it listens nowhere
  red = spawn('node_modules/.bin/node', ['node_modules/node-red/red.js', '-s', 'settings.js'], { stdio: 'ignore' });
  setTimeout(() => (red.kill(), process.exit(1)), 100000);
});
JS
node run.mjs | tee seen
diff seen - <<'SEEN' || { echo CHANGED; exit 1; }
/0a?m=it&
/0b?m=it%27s%20late&to=x
/1a?m=in&
/1b?m=in/out&to=x
/2a?m=a&
/2b?m=a=b&to=x
/3a?m=you%20&amp;%20me&to=x
/3b?m=you%20&%20me&to=x
/4a?m=onetwo&to=x
/4b?m=onetwo&to=x
SEEN
