#!/usr/bin/env bash
# If ~/.netrc has an entry for the host, Python's requests replaces an Authorization header that the program has set by
# the Basic of that entry. aiohttp with trust_env refuses to send; httpx keeps the program's header.
# Seen with requests 2.32.5, aiohttp 3.14.5 and httpx 0.28.1.
# The gateway sees another user than the client's owner wrote, and can only say so: name the user of a wrong Basic in
# the refusal, because the client's own configuration shows nothing.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have python3 -m pip install -q --target "$dir/py" requests==2.32.5 aiohttp==3.14.5 httpx==0.28.1
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
mkdir "$dir/home"
echo 'machine 127.0.0.1 login bob password old' >"$dir/home/.netrc"
chmod 600 "$dir/home/.netrc"
cat >"$dir/post.py" <<'PY'
import asyncio, sys
import aiohttp, httpx, requests
url, headers = sys.argv[1], {'Authorization': 'Bearer TOKEN'}
requests.post(url + '/requests', data='hi', headers=headers)
httpx.post(url + '/httpx', content='hi', headers=headers)
async def post():
    async with aiohttp.ClientSession(trust_env=True) as session:
        try:
            await session.post(url + '/aiohttp', data='hi', headers=headers)
        except ValueError as error:
            print('aiohttp refuses:', error)
asyncio.run(post())
PY
HOME="$dir/home" PYTHONPATH="$dir/py" timeout 60 python3 "$dir/post.py" "$url" >"$dir/said" || exit 2
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
check 'aiohttp' "$(cut -d: -f1 "$dir/said")" 'aiohttp refuses'
check 'requests, Basic of bob:old' "$(grep '/requests' "$dir/seen")" '["/requests","Basic Ym9iOm9sZA==","hi"]'
check 'httpx' "$(grep '/httpx' "$dir/seen")" '["/httpx","Bearer TOKEN","hi"]'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
