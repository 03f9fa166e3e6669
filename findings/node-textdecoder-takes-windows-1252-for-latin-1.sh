#!/usr/bin/env bash
# TextDecoder('windows-1252') reads the bytes 80 to 9F as control characters up to Node 22, so that the euro sign (80) is
# lost. In pieces, with { stream: true }, it reads them as the standard says.
# Seen with Node 20.20.2 and 22.22.0; Node 24.21.0 and Deno 2.9.6 read both alike.
# A gateway that decodes what a sender declares as ISO-8859-1 has to decode in pieces.
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
cat >"$dir/decode.mjs" <<'JS'
const bytes = Uint8Array.of(0x35, 0x80);
const pieces = new TextDecoder('windows-1252');
const code = (text) => text.codePointAt(1).toString(16);
console.log(
  `whole ${code(new TextDecoder('windows-1252').decode(bytes))}, ` +
    `in pieces ${code(pieces.decode(bytes, { stream: true }) + pieces.decode())}`,
);
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
get node@20.20.2
check 'Node 20.20.2' "$(node 20.20.2 "$dir/decode.mjs")" 'whole 80, in pieces 20ac'
get node@22.22.0
check 'Node 22.22.0' "$(node 22.22.0 "$dir/decode.mjs")" 'whole 80, in pieces 20ac'
get node@24.21.0
check 'Node 24.21.0' "$(node 24.21.0 "$dir/decode.mjs")" 'whole 20ac, in pieces 20ac'
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/decode.mjs")" 'whole 20ac, in pieces 20ac'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
