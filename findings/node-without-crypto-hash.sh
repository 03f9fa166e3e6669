#!/usr/bin/env bash
# crypto.hash, the one-call digest, came in the middle of a release line: Node 20.11 lacks it, 20.12 has it. A default
# import hides that until the call; a named import does not even load.
# Seen with Node 20.11.1 and 20.12.0.
# A program for "Node 20" that hashes each credential this way starts on 20.11, and fails at the first request.
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
cat >"$dir/default.mjs" <<'JS'
import crypto from 'node:crypto';
try {
  console.log(crypto.hash('sha256', 'abc').slice(0, 8));
} catch ({ name }) {
  console.log(`${name} at the call`);
}
JS
echo "import { hash } from 'node:crypto'; console.log(hash('sha256', 'abc').slice(0, 8));" >"$dir/named.mjs"
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
get node@20.11.1
check 'Node 20.11.1, default import' "$(node 20.11.1 "$dir/default.mjs")" 'TypeError at the call'
check 'Node 20.11.1, named import' "$(node 20.11.1 "$dir/named.mjs" 2>&1 | grep -o '^SyntaxError')" SyntaxError
get node@20.12.0
check 'Node 20.12.0, default import' "$(node 20.12.0 "$dir/default.mjs")" ba7816bf
check 'Node 20.12.0, named import' "$(node 20.12.0 "$dir/named.mjs")" ba7816bf
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
