#!/usr/bin/env bash
# Guess: with `http-reuse never`, HAProxy opens a connection to the server for each request. It does for each connection of
# a client: as long as the client keeps its own, HAProxy keeps that one too, idle, and without a limit of its own. So it may
# write a request just when the server closes it, and the client's connection then ends without a response.
# `option http-server-close` is what closes it after each response.
# Seen with HAProxy 2.6.12 (Debian 12).
# A send that meets a gateway's close after 125 s is lost. docs/operating.md has `option http-server-close`.
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
have apt-get download -qq haproxy=2.6.12-1+deb12u4 liblua5.3-0=5.3.6-2 libopentracing-c-wrapper0=1.1.3-3+b1 libopentracing1=1.6.0-4
for package in *.deb; do have dpkg -x "$package" .; done
export LD_LIBRARY_PATH="$dir/usr/lib/x86_64-linux-gnu:$dir/usr/lib/aarch64-linux-gnu"
cat >run.mjs <<'JS'
import { spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
const listen = (server) => new Promise((done) => server.listen(0, '127.0.0.1', () => done(server.address().port)));
const freePort = async () => {
  const server = net.createServer();
  const port = await listen(server);
  return new Promise((done) => server.close(() => done(port)));
};
let connections = 0;
const server = http.createServer((req, res) => req.resume().on('end', () => res.end())).on('connection', () => connections++);
const back = await listen(server);
for (const option of ['http-reuse never', 'option http-server-close']) {
  const front = await freePort();
  writeFileSync('haproxy.cfg', `defaults
  mode http
  timeout connect 5s
  timeout client 350s
  timeout server 350s
listen x
  bind 127.0.0.1:${front}
  ${option}
  server one 127.0.0.1:${back}
`);
  const haproxy = spawn('usr/sbin/haproxy', ['-f', 'haproxy.cfg'], { stdio: 'ignore' });
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
  const post = () => new Promise((done, fail) =>
    http.request({ port: front, agent, method: 'POST' }, (res) => res.resume().on('end', done)).on('error', fail).end('x'));
  for (let i = 0; i < 100 && !await post().then(() => true, () => false); i++) await new Promise((done) => setTimeout(done, 100));
  connections = 0;
  for (let i = 0; i < 3; i++) await post();
  console.log(`${option}: ${connections} new connections for three more requests of a client that keeps its own`);
  agent.destroy();
  haproxy.kill();
}
process.exit();
JS
node run.mjs | tee seen
diff seen - <<'SEEN' || { echo CHANGED; exit 1; }
http-reuse never: 0 new connections for three more requests of a client that keeps its own
option http-server-close: 3 new connections for three more requests of a client that keeps its own
SEEN
