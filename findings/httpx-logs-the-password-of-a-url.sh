#!/usr/bin/env bash
# Guess: httpx hides the password of a URL in its log, as it does in the `repr` of one. It writes the whole URL at INFO
# for each request, and again into the exception for a 401; so does requests' exception. aiohttp leaves the user out.
# `auth=` in place of the URL's user keeps it out of all of them.
# Seen with httpx 0.28.1, requests 2.32.5 and aiohttp 3.14.5.
# Many bots log at INFO, and their owners paste the log into an issue. A page that gives a token as api:TOKEN@ should
# say so, and a token should be easy to replace.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have python3 -m pip install -q --target "$dir/py" httpx==0.28.1 requests==2.32.5 aiohttp==3.14.5
cat >"$dir/recorder.mjs" <<'JS'
import { renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer((req, res) => {
  req.resume().on('end', () => res.writeHead(Number(/[0-9]+/.exec(req.url))).end());
});
server.listen(0, '127.0.0.1', () => {
  writeFileSync('new', String(server.address().port));
  renameSync('new', 'port');
});
JS
(cd "$dir" && exec node recorder.mjs) &
trap 'kill "$!" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -e "$dir/port" ] || sleep 0.1; done
cat >"$dir/post.py" <<'PY'
import asyncio, io, logging, sys
import aiohttp, httpx, requests
base = '127.0.0.1:' + sys.argv[1]
url, log = 'http://api:TOKEN@' + base, io.StringIO()
logging.basicConfig(level=logging.INFO, stream=log)
def logged():
    text = log.getvalue().strip()
    log.seek(0)
    log.truncate()
    return text
def show(what, text):
    print(f"{what}: {'shows it' if 'TOKEN' in text else 'hides it' if text else 'nothing'}")
async def post():
    async with aiohttp.ClientSession() as session:
        (await session.post(url + '/401')).raise_for_status()
show('repr of httpx.URL', repr(httpx.URL(url)))
httpx.post(url + '/201')
show('log of httpx', logged())
httpx.post('http://' + base + '/201', auth=('api', 'TOKEN'))
show('log of httpx, auth=', logged())
requests.post(url + '/201')
show('log of requests', logged())
for name, ask in {
    'httpx': lambda: httpx.post(url + '/401').raise_for_status(),
    'requests': lambda: requests.post(url + '/401').raise_for_status(),
    'aiohttp': lambda: asyncio.run(post()),
}.items():
    try:
        ask()
    except Exception as error:
        show('exception of ' + name, str(error))
PY
PYTHONPATH="$dir/py" timeout 60 python3 "$dir/post.py" "$(cat "$dir/port")" | tee "$dir/seen"
diff "$dir/seen" - <<'SEEN' || { echo CHANGED; exit 1; }
repr of httpx.URL: hides it
log of httpx: shows it
log of httpx, auth=: hides it
log of requests: nothing
exception of httpx: shows it
exception of requests: shows it
exception of aiohttp: hides it
SEEN
