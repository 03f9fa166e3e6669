#!/usr/bin/env bash
# aiohttp and needle percent-encode the name of a file in a multipart form, a space too. No standard says so: browsers
# encode only quotes and line ends, and no reader decodes the rest. A file is then shown as "my%20photo.png".
# Seen with aiohttp 3.14.5 (quote_fields=False turns it off) and needle 3.5.0; httpx 0.28.1 writes the name as it is.
# A gateway cannot tell such a name from one that really has "%20" in it, so it passes it on.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" needle@3.5.0
have python3 -m pip install -q --target "$dir/py" aiohttp==3.14.5 httpx==0.28.1
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
import asyncio, sys
import aiohttp, httpx
url, name = sys.argv[1], 'my photo.png'
httpx.post(url + '/httpx', files={'file': (name, b'x')})
async def post():
    async with aiohttp.ClientSession() as session:
        for path, fields in (('/aiohttp', {}), ('/unquoted', {'quote_fields': False})):
            form = aiohttp.FormData(**fields)
            form.add_field('file', b'x', filename=name)
            await session.post(url + path, data=form)
asyncio.run(post())
PY
cat >"$dir/post.cjs" <<'JS'
const file = { buffer: Buffer.from('x'), filename: 'my photo.png', content_type: 'image/png' };
require('needle')('post', `${process.argv[2]}/needle`, { file }, { multipart: true });
JS
PYTHONPATH="$dir/py" timeout 60 python3 "$dir/post.py" "$url" || exit 2
timeout 20 node "$dir/post.cjs" "$url"
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
name() { grep "/$1" "$dir/seen" | grep -o 'filename=[^;r]*png'; }
check 'httpx' "$(name httpx)" 'filename=\"my photo.png'
check 'aiohttp' "$(name aiohttp)" 'filename=\"my%20photo.png'
check 'aiohttp, quote_fields=False' "$(name unquoted)" 'filename=\"my photo.png'
check 'needle' "$(name needle)" 'filename=\"my%20photo.png'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
