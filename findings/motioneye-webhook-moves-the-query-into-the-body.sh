#!/usr/bin/env bash
# Guess: motionEye's web hook requests the URL as it was written, and POST (form) and POST (json) add fields of its own.
# The two move the query into the body, where a server that reads a credential from the URL finds none. POST (json) also
# drops the second of two fields of one name, and an empty one. POST sends an empty body, and the exit status is 0 after
# a 401.
# Seen with motionEye 0.44.0 (`meyectl webhook`, which is what it runs).
# `?@auth=TOKEN` of a URL that works by GET is no credential here, so a gateway should also read one from the body where
# that is allowed, and say so in its refusal.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have python3 -m pip install -q --target "$dir/py" motioneye==0.44.0
cat >"$dir/recorder.mjs" <<'JS'
import { appendFileSync, renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  appendFileSync('seen', `${req.method} ${req.url} [${body}]\n`);
  res.writeHead(Number(/[0-9]+/.exec(req.url))).end();
});
server.listen(0, '127.0.0.1', () => {
  writeFileSync('new', String(server.address().port));
  renameSync('new', 'port');
});
JS
(cd "$dir" && exec node recorder.mjs) &
trap 'kill "$!" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -e "$dir/port" ] || sleep 0.1; done
for path in conf log run media; do echo "${path}_path $dir"; done >"$dir/motioneye.conf"
hook() { # calls the hook by the method $1, at the path $2; prints the request and the exit status
  rm -f "$dir/seen"
  PYTHONPATH="$dir/py" timeout 60 "$dir/py/bin/meyectl" webhook -c "$dir/motioneye.conf" "$1" \
    "http://127.0.0.1:$(cat "$dir/port")$2" >"$dir/out" 2>&1
  local status=$?
  echo "$(cat "$dir/seen"), exit status $status"
}
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
path=/201 query='auth=TOKEN&to=a&to=b&title='
check 'GET' "$(hook GET "$path?$query")" "GET $path?$query [], exit status 0"
check 'POST' "$(hook POST "$path?$query")" "POST $path?$query [], exit status 0"
check 'POST (form)' "$(hook POSTf "$path?$query")" "POST $path [$query], exit status 0"
check 'POST (json)' "$(hook POSTj "$path?$query")" "POST $path [{\"auth\": \"TOKEN\", \"to\": \"a\"}], exit status 0"
check 'after a 401' "$(hook POSTf '/401?a=b')" 'POST /401 [a=b], exit status 0'
[ "$changed" = 0 ] || { cat "$dir/out"; echo 'CHANGED'; }
exit "$changed"
