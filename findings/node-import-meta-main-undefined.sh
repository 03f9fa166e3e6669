#!/usr/bin/env bash
# `if (import.meta.main)` is false on Node before 22.18 and 24.2, because the property is undefined there: a program
# that begins like this ends at once, with 0 and without a word. Deno has it from the start. The usual comparison of
# argv[1] with the module's own file fails where npm links a program, because argv[1] is then the link.
# Seen with Node 20.20, 22.17 and 22.22 and Deno 2.9.6.
# A gateway that is installed by npm would exit with success and never listen. Resolve the link before comparing.
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
mkdir "$dir/bin"
cat >"$dir/program.mjs" <<'JS'
import { fileURLToPath } from 'node:url';
import process from 'node:process';
console.log(`main=${import.meta.main} same=${process.argv[1] === fileURLToPath(import.meta.url)}`);
JS
ln -s ../program.mjs "$dir/bin/program"
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
for version in 20.20.2 22.17.1; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/program.mjs")" 'main=undefined same=true'
  check "Node $version, by a link" "$(node "$version" "$dir/bin/program")" 'main=undefined same=false'
done
get node@22.22.0
check 'Node 22.22.0, by a link' "$(node 22.22.0 "$dir/bin/program")" 'main=true same=false'
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/program.mjs")" 'main=true same=true'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
