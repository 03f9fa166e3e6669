#!/usr/bin/env bash
# Once JSON.parse has read a key that ends in an escaped backslash, it reads a key of the next document as that earlier
# key, if both sources begin alike and the keys before them are the same. Both documents are valid.
# Seen with Node 24.8, 24.21 and 26.10 and Deno 2.9.6; Node 20.20 and 22.22 read them apart.
# A gateway that checks what it parses may check another document than the one that it forwards. A key parsed as a
# string of its own is read right.
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
cat >"$dir/keys.mjs" <<'JS'
const first = JSON.parse(String.raw`{"size":1,"caf\\":1}`);
const second = JSON.parse(String.raw`{"size":1,"caf\u00e9":1}`);
const alone = JSON.parse(String.raw`"caf\u00e9"`);
console.log(JSON.stringify([first, second, alone]));
JS
right='[{"size":1,"caf\\":1},{"size":1,"café":1},"café"]'
wrong='[{"size":1,"caf\\":1},{"size":1,"caf\\":1},"café"]'
changed=0
check() {
  echo "$1 reads $2"
  [ "$2" = "$3" ] || changed=1
}
for version in 20.20.2 22.22.0 24.8.0 24.21.0 26.10.0; do
  get "node@$version"
  expected=$wrong
  case $version in 2[02].*) expected=$right ;; esac
  check "Node $version" "$(node "$version" "$dir/keys.mjs")" "$expected"
done
get deno@2.9.6
check 'Deno 2.9.6' "$(deno "$dir/keys.mjs")" "$wrong"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
