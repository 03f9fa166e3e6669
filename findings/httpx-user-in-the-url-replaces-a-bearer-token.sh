#!/usr/bin/env bash
# httpx prefers the user of a URL to an Authorization header that the program has set: it sends Basic, and the bearer
# token never leaves. Python's requests does the same. urllib3 alone drops the user, and sends the header.
# Seen with httpx 0.28.1, requests 2.32.5 and urllib3 2.5.0.
# A client whose base URL still has an old token cannot be given a new one by a header. Only the first credential that
# arrives can be judged, so the refusal should name its method.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have python3 -m pip install -q --target "$dir/py" httpx==0.28.1 requests==2.32.5 urllib3==2.5.0
cat >"$dir/recorder.mjs" <<'JS'
import { appendFileSync, renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  appendFileSync('seen', `${JSON.stringify([req.url, req.headers.authorization ?? '-', body])}\n`);
  res.writeHead(Number(/[0-9]+/.exec(req.url) ?? 201), { 'Content-Type': 'application/json' }).end('{}\n');
});
server.listen(0, '127.0.0.1', () => {
  writeFileSync('new', String(server.address().port));
  renameSync('new', 'port');
});
JS
(cd "$dir" && exec node recorder.mjs) &
trap 'kill "$!" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -e "$dir/port" ] || sleep 0.1; done
url=http://127.0.0.1:$(cat "$dir/port")
cat >"$dir/post.py" <<'PY'
import sys
import httpx, requests, urllib3
base, headers = sys.argv[1].replace('//', '//api:OLD@'), {'Authorization': 'Bearer NEW'}
httpx.post(base + '/httpx', content='hi', headers=headers)
requests.post(base + '/requests', data='hi', headers=headers)
urllib3.request('POST', base + '/urllib', body='hi', headers=headers)
PY
PYTHONPATH="$dir/py" timeout 60 python3 "$dir/post.py" "$url" || exit 2
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
check 'httpx, Basic of api:OLD' "$(grep '/httpx' "$dir/seen")" '["/httpx","Basic YXBpOk9MRA==","hi"]'
check 'requests, Basic of api:OLD' "$(grep '/requests' "$dir/seen")" '["/requests","Basic YXBpOk9MRA==","hi"]'
check 'urllib3' "$(grep '/urllib' "$dir/seen")" '["/urllib","Bearer NEW","hi"]'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
