#!/usr/bin/env bash
# A server may answer before it has read the request (413, 401), and close. The client's next write then fails, and
# node:http often reports only that error, although the whole response had arrived before it. RFC 9112 9.6 warns of it.
# Seen with Node 20.20, 22.22 and 26.10 and with Deno 2.9.6, in most of 60 uploads each; which ones is chance.
# A gateway between them turns such a refusal into a 502. A backend that wants its answer read must linger: read on for
# a while, or close only its own direction.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
get() {
  npm install --silent --no-audit --no-fund --prefix "$dir/$1" "$1" >"$dir/log" 2>&1 || {
    echo "$1 cannot be had"
    exit 2
  }
}
node() { timeout 20 "$dir/node@$1/node_modules/.bin/node" "${@:2}"; }
deno() { NO_COLOR=1 DENO_DIR="$dir/cache" timeout 20 "$dir/deno@2.9.6/node_modules/.bin/deno" run "$@"; }
cat >"$dir/server.mjs" <<'JS'
import net from 'node:net';
const head = 'HTTP/1.1 413 Content Too Large\r\nContent-Length: 9\r\nConnection: close\r\n\r\n';
const server = net.createServer((socket) => {
  socket.on('error', () => {}).once('data', () => {
    socket.pause().write(`${head}too large`, () => socket.destroy());
  });
});
server.listen(0, '127.0.0.1', () => console.log(server.address().port));
JS
cat >"$dir/client.mjs" <<'JS'
import http from 'node:http';
const port = process.argv[2];
const upload = (chunk) =>
  new Promise((done) => {
    let seen = 'error';
    const headers = { 'Content-Length': 50e6 };
    const req = http.request({ host: '127.0.0.1', port, method: 'POST', agent: false, headers }, (res) => {
      seen = 'response';
      res.on('error', () => {}).resume();
    });
    const write = () => req.destroyed || (req.write(chunk) ? setImmediate(write) : req.once('drain', write));
    req.on('error', () => {}).on('close', () => done(seen)).on('socket', (socket) => socket.once('connect', write));
    setTimeout(() => req.destroy(), 2000).unref();
  });
const seen = [];
for (let i = 0; i < 60; i++) seen.push(await upload(Buffer.alloc(i % 2 ? 65536 : 16384)));
console.log(`${seen.filter((each) => each === 'error').length} of 60 responses lost`);
process.exit();
JS
changed=0
check() {
  echo "$1: $2"
  case $2 in '0 of'* | '') changed=1 ;; esac
}
get node@20.20.2
"$dir/node@20.20.2/node_modules/.bin/node" "$dir/server.mjs" >"$dir/port" &
trap 'kill $! 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -s "$dir/port" ] || sleep 0.1; done
port=$(cat "$dir/port")
for version in 20.20.2 22.22.0 26.10.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/client.mjs" "$port")"
done
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/client.mjs" "$port")"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
