#!/usr/bin/env bash
# process.stdout.write to a pipe waits on Deno until somebody reads the pipe. Nothing else of the process runs
# meanwhile. Node keeps the text in memory and returns at once. Deno.stdout.write (a promise) does not stall.
# Seen with Deno 2.9.6; Node 20.20.2 does not wait.
# On Deno a server whose log is piped into a program that hangs, answers nobody any more.
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
cat >"$dir/log.mjs" <<'JS'
import process from 'node:process';
const line = `${'x'.repeat(999)}\n`;
const say = (text) => {
  process.stderr.write(`${text}\n`);
  process.exit();
};
let last = Date.now();
let longest = 0;
setInterval(() => {
  longest = Math.max(longest, Date.now() - last);
  last = Date.now();
}, 10);
setTimeout(async () => {
  for (let i = 0; i < 500; i++) {
    if (process.argv[2] === 'Deno.stdout') Deno.stdout.write(new TextEncoder().encode(line));
    else process.stdout.write(line);
  }
  setTimeout(() => say(longest > 1500 ? 'timers stood still' : 'timers ran'), 500);
}, 50);
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
reader() { sleep 4; cat >/dev/null; }
get node@20.20.2
node 20.20.2 "$dir/log.mjs" 2>"$dir/said" | reader
check 'Node 20.20.2' "$(cat "$dir/said")" 'timers ran'
get deno@2.9.6
deno -A "$dir/log.mjs" 2>"$dir/said" | reader
check 'Deno 2.9.6' "$(cat "$dir/said")" 'timers stood still'
deno -A "$dir/log.mjs" Deno.stdout 2>"$dir/said" | reader
check 'Deno 2.9.6, Deno.stdout' "$(cat "$dir/said")" 'timers ran'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
