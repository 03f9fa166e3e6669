#!/usr/bin/env bash
# process.getuid() throws on Deno without --allow-sys=uid. The error is a NotCapable without a code, so code that knows
# EACCES and EPERM only does not recognise it. process.pid and process.platform need no permission.
# Seen with Deno 2.9.6; on Node it needs nothing.
# A message such as "cannot be read by user 1000" must not ask for the user on Deno, or it replaces the real mistake.
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
cat >"$dir/user.mjs" <<'JS'
import process from 'node:process';
try {
  console.log(typeof process.pid, typeof process.platform, typeof process.getuid());
} catch (error) {
  console.log(`${error.name}, code ${error.code}`);
}
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
get node@20.20.2
check 'Node 20.20.2' "$(node 20.20.2 "$dir/user.mjs")" 'number string number'
get deno@2.9.6
check 'Deno 2.9.6' "$(deno --no-prompt "$dir/user.mjs")" 'NotCapable, code undefined'
check 'Deno 2.9.6 --allow-sys=uid' "$(deno --no-prompt --allow-sys=uid "$dir/user.mjs")" 'number string number'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
