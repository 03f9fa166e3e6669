#!/usr/bin/env bash
# Guess: a SIGNAL_HTTP_URL with a path, http://host/signal, is where elizaOS's plugin asks for /signal/v1/about. It
# joins its own paths to it as a browser does, so the path is dropped without a word; the user of the URL is kept.
# Seen with elizaos-plugin-signal 2.0.0a5.
# A gateway that takes a token in the path of a URL (/@auth=TOKEN), or stands in one behind a proxy, gets requests
# without it. The refusal should name api:TOKEN@host, because that is what such a client can send.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have python3 -m pip install -q --target "$dir/py" aiohttp==3.14.5 pydantic==2.12.5
have python3 -m pip install -q --target "$dir/py" --no-deps elizaos-plugin-signal==2.0.0a5 # the elizaos it wants is not there
cat >"$dir/recorder.mjs" <<'JS'
import { appendFileSync, renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer((req, res) => {
  appendFileSync('seen', `${req.method} ${req.url} ${req.headers.authorization ?? '-'}\n`);
  const answer = req.method === 'POST' ? '{"timestamp":"1"}' : '[]';
  req.resume().on('end', () => res.writeHead(req.method === 'POST' ? 201 : 200).end(answer));
});
server.listen(0, '127.0.0.1', () => {
  writeFileSync('new', String(server.address().port));
  renameSync('new', 'port');
});
JS
(cd "$dir" && exec node recorder.mjs) &
trap 'kill "$!" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -e "$dir/port" ] || sleep 0.1; done
cat >"$dir/send.py" <<'PY'
import asyncio, sys
from elizaos_plugin_signal.service import SignalService
class Runtime:
    def get_setting(self, name):
        return {'SIGNAL_ACCOUNT_NUMBER': '+15550100001', 'SIGNAL_HTTP_URL': sys.argv[1]}.get(name)
    async def emit_event(self, *_):
        pass
async def main():
    service = await SignalService.start(Runtime())
    await service.send_message('+15550100002', 'hi')
    await service.stop()
asyncio.run(main())
PY
port=$(cat "$dir/port")
changed=0
check() { # the credential and the path of each request, with http://$1 as SIGNAL_HTTP_URL
  : >"$dir/seen"
  PYTHONPATH="$dir/py" timeout 60 python3 "$dir/send.py" "http://${1/host/127.0.0.1:$port}" >"$dir/out" 2>&1 || cat "$dir/out"
  seen=$(grep -v /receive/ "$dir/seen" | paste -sd ',')
  echo "http://$1: $seen"
  [ "$seen" = "${asked//AUTH/$2}" ] || changed=1
}
asked='GET /v1/about AUTH,GET /v1/contacts/+15550100001 AUTH,GET /v1/groups/+15550100001 AUTH,POST /v2/send AUTH'
check host -
check host/signal -
check host/signal/ -
check host/@auth=TOKEN -
check api:TOKEN@host 'Basic YXBpOlRPS0VO'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
