#!/usr/bin/env bash
# The fetch of Node does not know the FormData of the npm package form-data, and posts what String() makes of it: the
# body is the 17 characters "[object FormData]", declared as text. With the headers of form.getHeaders(), it is
# declared as a multipart form, and is still these words. Nothing throws.
# Guess: it is posted as a form, or fetch rejects.
# Seen with form-data 4.0.6 in Node 20.20.2 and 26.10.0, and Deno 2.9.6. The FormData that is built in is posted.
# A gateway that takes a text for a message shows these words on the phone. It must refuse such a form, and a page with
# an example for fetch should have no import.
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
have npm install --silent --no-audit --no-fund --prefix "$dir" form-data@4.0.6
cat >"$dir/post.mjs" <<'JS'
import http from 'node:http';
import Package from 'form-data';
const seen = [];
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  if (body.includes('name="message"\r\n\r\nhello\r\n')) body = 'the form';
  seen.push(`${req.headers['content-type'].split(';')[0]} ${body}`);
  res.end();
});
server.listen(0, '127.0.0.1', async () => {
  const url = `http://127.0.0.1:${server.address().port}`;
  const post = (body, headers) => fetch(url, { method: 'POST', headers, body });
  const form = new Package();
  form.append('message', 'hello');
  await post(form);
  await post(form, form.getHeaders());
  const own = new FormData();
  own.append('message', 'hello');
  await post(own);
  console.log(seen.join(', '));
  process.exit();
});
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
expected='text/plain [object FormData], multipart/form-data [object FormData], multipart/form-data the form'
for version in 20.20.2 26.10.0; do
  get "node@$version"
  check "Node $version" "$(timeout 20 "$dir/node@$version/node_modules/.bin/node" "$dir/post.mjs")" "$expected"
done
get deno@2.9.6
deno() { NO_COLOR=1 DENO_DIR="$dir/cache" timeout 20 "$dir/deno@2.9.6/node_modules/.bin/deno" run "$@"; }
check 'Deno 2.9.6' "$(deno -A "$dir/post.mjs")" "$expected"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
