#!/usr/bin/env bash
# res.writeHead takes headers as a flat list, in which a name may stand several times. If any header was set with
# res.setHeader before, Node 20 merges the list into it, and only the last Set-Cookie is sent.
# Seen with Node 20.20.2; Node 22.22 and Deno 2.9.6 send both.
# A gateway that relays a response keeps its headers only if it gives all of them to writeHead at once.
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
cat >"$dir/cookies.mjs" <<'JS'
import http from 'node:http';
const list = ['Set-Cookie', 'a=1', 'Set-Cookie', 'b=2'];
const server = http.createServer((req, res) => {
  if (req.url === '/mixed') res.setHeader('X-Request-Id', '7');
  res.writeHead(200, list).end();
});
server.listen(0, '127.0.0.1', async () => {
  const get = (path) =>
    new Promise((done) =>
      http.get({ host: '127.0.0.1', port: server.address().port, path, agent: false }, (res) => {
        res.resume().on('end', () => done(`${path} ${res.headers['set-cookie']}`));
      })
    );
  console.log(`${await get('/list')}; ${await get('/mixed')}`);
  process.exit();
});
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
get node@20.20.2
check 'Node 20.20.2' "$(node 20.20.2 "$dir/cookies.mjs")" '/list a=1,b=2; /mixed b=2'
get node@22.22.0
check 'Node 22.22.0' "$(node 22.22.0 "$dir/cookies.mjs")" '/list a=1,b=2; /mixed a=1,b=2'
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/cookies.mjs")" '/list a=1,b=2; /mixed a=1,b=2'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
