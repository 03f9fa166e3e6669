#!/usr/bin/env bash
# A list in a form has no standard. Of four HTTP clients of npm, superagent repeats the name, needle and axios append
# "[]" to it, and got makes one value of it, joined by commas. All are given the same object.
# Seen with superagent 10.4.2, needle 3.5.0, axios 1.21.1 and got 14.6.6.
# A gateway that reads forms needs a rule for each of them, or a sentence: a field "recipients[]" is no misspelling.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" superagent@10.4.2 needle@3.5.0 axios@1.21.1 got@14.6.6
cat >"$dir/post.mjs" <<'JS'
import http from 'node:http';
import axios from 'axios';
import got from 'got';
import needle from 'needle';
import superagent from 'superagent';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  console.log(`${req.url.slice(1)} ${decodeURIComponent(body)}`);
  res.end();
});
server.listen(0, '127.0.0.1', async () => {
  const url = `http://127.0.0.1:${server.address().port}`;
  const form = { to: ['a', 'b'] };
  await superagent.post(`${url}/superagent`).type('form').send(form);
  await needle('post', `${url}/needle`, form);
  await axios.post(`${url}/axios`, form, { headers: { 'Content-Type': 'application/x-www-form-urlencoded' } });
  await got.post(`${url}/got`, { form });
  process.exit();
});
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 30 node "$dir/post.mjs" | paste -sd ' ')
check 'sent' "$seen" 'superagent to=a&to=b needle to[]=a&to[]=b axios to[]=a&to[]=b got to=a,b'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
