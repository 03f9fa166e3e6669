#!/usr/bin/env bash
# process.stdout.write throws on Deno when the disk is full, also where a listener waits for the stream's error. Node
# emits "error" and never throws.
# Seen with Deno 2.9.6; Node 20.20 and 26.10 emit.
# A log line is written in the middle of everything. On Deno the exception ends whatever was going on there.
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
[ -e /dev/full ] || { echo 'no /dev/full here'; exit 2; }
cat >"$dir/log.mjs" <<'JS'
import process from 'node:process';
process.stdout.on('error', ({ code }) => process.stderr.write(`emitted ${code}\n`));
try {
  process.stdout.write('a line\n');
} catch ({ code }) {
  process.stderr.write(`thrown ${code}\n`);
}
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
for version in 20.20.2 26.10.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/log.mjs" 2>&1 >/dev/full)" 'emitted ENOSPC'
done
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/log.mjs" 2>&1 >/dev/full)" 'thrown ENOSPC'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
