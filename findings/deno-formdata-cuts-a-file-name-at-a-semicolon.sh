#!/usr/bin/env bash
# Response.formData() of Deno splits the line Content-Disposition of a part at each semicolon and "=", although they
# are within quotes: the files "a; b.txt" and "a=b.txt" are both named a, with a quote before it. A field's name is
# cut, too.
# Guess: a quoted name is read as far as its closing quote.
# Seen with Deno 2.9.6; Node 20.20 and 26.10 read the whole name.
# Browsers and curl write such names as they are, and a file that has lost the end of its name does not open on a
# phone. A gateway that runs on Deno needs a reader of its own.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
get() { have npm install --silent --no-audit --no-fund --prefix "$dir/$1" "$1"; }
node() { timeout 20 "$dir/node@$1/node_modules/.bin/node" "${@:2}"; }
deno() { NO_COLOR=1 DENO_DIR="$dir/cache" timeout 20 "$dir/deno@2.9.6/node_modules/.bin/deno" run "$@"; }
cat >"$dir/form.mjs" <<'JS'
const headers = { 'Content-Type': 'multipart/form-data; boundary=b' };
const seen = [];
for (const disposition of ['name="file"; filename="a; b.txt"', 'name="file"; filename="a=b.txt"', 'name="a;b"']) {
  const body = `--b\r\nContent-Disposition: form-data; ${disposition}\r\n\r\nhello\r\n--b--\r\n`;
  const form = await new Response(body, { headers }).formData();
  for (const [name, value] of form) seen.push(name, value.name ?? value);
}
console.log(JSON.stringify(seen));
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
for version in 20.20.2 26.10.0; do
  get "node@$version"
  check "Node $version" "$(node "$version" "$dir/form.mjs")" '["file","a; b.txt","file","a=b.txt","a;b","hello"]'
done
get deno@2.9.6
check 'Deno 2.9.6' "$(deno -A "$dir/form.mjs")" '["file","\"a","file","\"a","\"a","hello"]'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
