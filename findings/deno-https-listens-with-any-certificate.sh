#!/usr/bin/env bash
# https.createServer of Deno takes a key that is not the certificate's, and text that is no certificate, and listens:
# each client then fails in its handshake. Node throws at createServer. Only empty texts are taken by both.
# Seen with Deno 2.9.6; Node 20.20 and 26.10 throw.
# A server that reads its certificate from files must check the pair itself, before it says that it listens.
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
for name in a b; do
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "/CN=$name" \
    -keyout "$dir/$name.key" -out "$dir/$name.crt" 2>"$dir/log" || { echo 'no openssl here'; exit 2; }
done
cat >"$dir/tls.mjs" <<'JS'
import { readFileSync } from 'node:fs';
import https from 'node:https';
const read = (name) => readFileSync(new URL(name, import.meta.url), 'utf8');
const pairs = { other: [read('a.crt'), read('b.key')], text: ['hello', 'hello'], empty: ['', ''] };
const said = [];
for (const [name, [cert, key]] of Object.entries(pairs)) {
  try {
    const server = https.createServer({ cert, key });
    await new Promise((done, failed) => server.on('error', failed).listen(0, '127.0.0.1', done));
    said.push(`${name} listens`);
  } catch {
    said.push(`${name} throws`);
  }
}
console.log(said.join(', '));
process.exit();
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
for version in 20.20.2 26.10.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/tls.mjs")" 'other throws, text throws, empty listens'
done
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/tls.mjs")" 'other listens, text listens, empty listens'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
