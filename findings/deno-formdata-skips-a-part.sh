#!/usr/bin/env bash
# Response.formData() of Deno leaves out a part of a multipart form whose headers have no name for it, and returns the
# others as if nothing had been there. The Fetch standard lets the whole parse fail then, and Node does so.
# Seen with Deno 2.9.6; Node 20.20 and 26.10 throw. (Node 20.11 made a field called "undefined" of it.)
# A field that its sender has written, but misspelled, is lost without a word: read forms yourself, or count the parts.
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
cat >"$dir/form.mjs" <<'JS'
const part = (disposition, text) => `--b\r\nContent-Disposition: ${disposition}\r\n\r\n${text}\r\n`;
const body = `${part('form-data; name="to"', 'home')}${part('form-data; nam="text"', 'hello')}--b--\r\n`;
const headers = { 'Content-Type': 'multipart/form-data; boundary=b' };
try {
  const form = await new Response(body, { headers }).formData();
  console.log(JSON.stringify([...form]));
} catch ({ name }) {
  console.log(name);
}
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
get node@20.11.1
check 'Node 20.11.1' "$(node 20.11.1 "$dir/form.mjs")" '[["to","home"],["undefined","hello"]]'
for version in 20.20.2 26.10.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/form.mjs")" TypeError
done
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/form.mjs")" '[["to","home"]]'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
