#!/usr/bin/env bash
# server.close() of node:http closes idle connections. One on which the client has not sent a byte yet does not count
# as idle, so "close" is never emitted while the client waits. closeIdleConnections() does not close it either.
# Seen with Node 20.20, 22.22 and 24.21 and Deno 2.9.6; Node 26.10 closes it at once.
# Browsers and load balancers open connections in advance. A gateway that waits for "close" at its shutdown must keep
# count of its sockets, and destroy those without a byte.
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
cat >"$dir/close.mjs" <<'JS'
import http from 'node:http';
import net from 'node:net';
const server = http.createServer((_, res) => res.end());
server.listen(0, '127.0.0.1', () => {
  server.once('connection', () =>
    setTimeout(() => {
      const say = (text) => {
        console.log(text);
        process.exit();
      };
      server.close(() => say('closed'));
      server.closeIdleConnections();
      setTimeout(say, 2000, 'still open after 2 s');
    }, 100));
  net.connect(server.address().port, '127.0.0.1').on('error', () => {});
});
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
for version in 20.20.2 22.22.0 24.21.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/close.mjs")" 'still open after 2 s'
done
get node@26.10.0
check 'Node 26.10.0' "$(node 26.10.0 "$dir/close.mjs")" closed
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/close.mjs")" 'still open after 2 s'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
