#!/usr/bin/env bash
# When the response of a kept connection is complete, node:http's client removes its listener for errors from the
# socket, and the agent adds its own only one turn later. In "end" of the response nobody listens, so an error in that
# turn, of a request that is still being written for example, is uncaught.
# Seen with Node 20.20, 22.22, 24.21 and 26.10 and with Deno 2.9.6.
# A gateway must have a listener of its own on each socket to its backend, from the connection on.
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
cat >"$dir/listeners.mjs" <<'JS'
import http from 'node:http';
const server = http.createServer((_, res) => res.end('hello'));
server.listen(0, '127.0.0.1', () => {
  const agent = new http.Agent({ keepAlive: true });
  const seen = [];
  const count = (event, socket) => seen.push(`${event} ${socket.listenerCount('error')}`);
  http.get({ host: '127.0.0.1', port: server.address().port, agent }, (res) => {
    const { socket } = res;
    count('response', socket);
    res.resume().on('end', () => count('end', socket));
    agent.on('free', () => {
      count('free', socket);
      console.log(seen.join(', '));
      process.exit();
    });
  });
});
JS
changed=0
check() {
  echo "$1, listeners: $2"
  [ "$2" = 'response 1, end 0, free 1' ] || changed=1
}
for version in 20.20.2 22.22.0 24.21.0 26.10.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/listeners.mjs")"
done
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/listeners.mjs")"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
