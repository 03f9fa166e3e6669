#!/usr/bin/env bash
# A client may offer HTTP/2 with an ordinary request (Upgrade: h2c), which a server may ignore: Java's HTTP client does
# so. As soon as a server of node:http listens for "upgrade", say for WebSockets, such a request never becomes a
# "request". shouldUpgradeCallback can tell them apart, but older versions ignore that option without a word.
# Seen with Node 20.20, 22.17 and 24.8; 22.22, 24.21, 26.10 and Deno 2.9.6 ask it.
# A gateway with WebSockets must answer such requests itself, or Java programs get no answer.
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
cat >"$dir/offer.mjs" <<'JS'
import http from 'node:http';
const isWebSocket = ({ headers }) => headers.upgrade.toLowerCase() === 'websocket';
const server = http.createServer({ shouldUpgradeCallback: isWebSocket }, (_, res) => res.end('request'));
server.on('upgrade', (_, socket) => socket.end('HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nupgrade'));
server.listen(0, '127.0.0.1', () => {
  const settings = 'AAMAAABkAAQAoAAAAAIAAAAA';
  const headers = { 'Connection': 'Upgrade, HTTP2-Settings', 'Upgrade': 'h2c', 'HTTP2-Settings': settings };
  http.get({ host: '127.0.0.1', port: server.address().port, headers }, (res) => {
    res.on('data', (event) => {
      console.log(`"${event}"`);
      process.exit();
    });
  });
});
JS
changed=0
check() {
  echo "$1: h2c is emitted as $2"
  [ "$2" = "$3" ] || changed=1
}
for version in 20.20.2 22.17.1 24.8.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/offer.mjs")" '"upgrade"'
done
for version in 22.22.0 24.21.0 26.10.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/offer.mjs")" '"request"'
done
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/offer.mjs")" '"request"'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
