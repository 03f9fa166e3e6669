#!/usr/bin/env bash
# Guess: in mqttwarn's `http` service '@message' is the message, and a name that the payload does not have gives
# nothing, or an error. '@message' is a field of the payload's JSON, and for one that is not there the word NOP is sent;
# '?message' leaves the field out. And in each message a backslash before an `n` becomes a line feed.
# Seen with mqttwarn 0.36.1.
# Each alert arrives as the word NOP. A page about mqttwarn should write None in place of the fields, so that the body
# is the message itself.
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
have python3 -m pip install -q --target "$dir/py" mqttwarn==0.36.1
have npm install --silent --no-audit --no-fund aedes@0.51.3
cat >run.mjs <<'JS'
import { spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
import aedes from 'aedes';
const texts = ['disk full', '{"message":"disk full"}', String.raw`\\nas\new is full`];
const listen = (server) => new Promise((done) => server.listen(0, '127.0.0.1', () => done(server.address().port)));
const seen = [];
const port = await listen(http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  seen.push(`${req.url} ${JSON.stringify(body)}`);
  res.writeHead(201).end();
  if (seen.length === 3 * texts.length) end(seen.sort());
}));
const broker = aedes();
const mqtt = await listen(net.createServer(broker.handle));
writeFileSync('mqttwarn.ini', `[defaults]
hostname = '127.0.0.1'
port = ${mqtt}
launch = http
loglevel = WARN
num_workers = 1
[config:http]
targets = {
  'at': [ 'post', 'http://127.0.0.1:${port}/at', { 'text': '@message' } ],
  'query': [ 'post', 'http://127.0.0.1:${port}/query', { 'text': '?message' } ],
  'none': [ 'post', 'http://127.0.0.1:${port}/none', None ],
  }
[alerts]
targets = http
`);
const mqttwarn = spawn('python3', ['-m', 'mqttwarn', '--config-file=mqttwarn.ini'], {
  env: { ...process.env, PYTHONPATH: 'py' },
  stdio: ['ignore', 2, 2],
});
const end = (lines) => {
  for (const line of lines) console.log(line);
  mqttwarn.kill('SIGKILL');
  process.exit();
};
broker.on('subscribe', () => {
  for (const payload of texts) broker.publish({ topic: 'alerts', payload, qos: 0 }, () => {});
});
setTimeout(end, 60000, ['nothing more in a minute', ...seen]);
JS
node run.mjs 2>"$dir/log" | tee seen
diff seen - <<'SEEN' || { cat "$dir/log"; echo CHANGED; exit 1; }
/at "text=NOP"
/at "text=NOP"
/at "text=disk+full"
/none "\\\nas\new is full"
/none "disk full"
/none "{\"message\":\"disk full\"}"
/query ""
/query ""
/query "text=disk+full"
SEEN
