#!/usr/bin/env bash
# To listen on an address that this machine does not have fails with EADDRNOTAVAIL on Node, as bind(2) says. Deno's
# node:http says EINVAL for the same address, which usually means a wrong argument.
# Seen with Deno 2.9.6; Node 20.20 and 26.10 say EADDRNOTAVAIL.
# Advice that a server gives by the code of the error needs a row for EINVAL, too.
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
cat >"$dir/listen.mjs" <<'JS'
import http from 'node:http';
const server = http.createServer().on('error', ({ code }) => console.log(code));
server.listen(0, '192.0.2.1', () => server.close(() => console.log('listens'))); // RFC 5737: nobody has it
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
for version in 20.20.2 26.10.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/listen.mjs")" EADDRNOTAVAIL
done
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/listen.mjs")" EINVAL
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
