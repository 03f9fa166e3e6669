#!/usr/bin/env bash
# req.destroy() of node:http's client closes the connection, so that whatever the peer sends there is never read. Not on
# Node 26, if the response has arrived whole but its body has not been read: the socket goes back into the agent's pool.
# Seen with Node 26.10.0; Node 20.20, 22.22 and 24.21 and Deno 2.9.6 close it.
# A gateway that destroys a request because the response was wrong must destroy the response's socket itself.
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
cat >"$dir/pool.mjs" <<'JS'
import http from 'node:http';
let connections = 0;
const server = http.createServer((_, res) => res.end('hello')).on('connection', () => connections++);
server.listen(0, '127.0.0.1', async () => {
  const agent = new http.Agent({ keepAlive: true });
  const pause = () => new Promise((done) => setTimeout(done, 200));
  const ask = () =>
    new Promise((done) => {
      const req = http.get({ host: '127.0.0.1', port: server.address().port, agent }, (res) => done({ req, res }));
    });
  const { req, res } = await ask();
  await pause(); // all of the response is here
  req.destroy();
  await pause();
  (await ask()).res.resume();
  console.log(`complete=${res.complete} connections=${connections}`);
  process.exit();
});
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
for version in 20.20.2 22.22.0 24.21.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/pool.mjs")" 'complete=true connections=2'
done
get node@26.10.0
check 'Node 26.10.0' "$(node 26.10.0 "$dir/pool.mjs")" 'complete=true connections=1'
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/pool.mjs")" 'complete=true connections=2'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
