#!/usr/bin/env bash
# HTTPie exits with 0 after a 401, unless it has --check-status. Under cron or systemd, where standard input is no
# terminal, `http POST url field=value` fails before it connects: --ignore-stdin is needed. A text from standard input is
# declared as JSON, whatever it is.
# Seen with HTTPie 3.2.4.
# `http … && echo sent` takes a refusal for a success. A gateway that gets a text declared as JSON should say in its
# refusal that the declaration is wrong, not the text.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have python3 -m pip install -q --target "$dir/py" httpie==3.2.4
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
http() { PYTHONPATH="$dir/py" HOME="$dir" timeout 60 python3 -m httpie "$@" >"$dir/out" 2>&1; }
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
http --ignore-stdin POST "$url/401" message=hi
check 'exit status after a 401' "$?" 0
http --ignore-stdin --check-status POST "$url/401" message=hi
check '… with --check-status' "$?" 4
http POST "$url/field" message=hi </dev/null
check 'exit status with /dev/null as standard input' "$?" 1
echo 'disk full' | http --print=H POST "$url/text"
check 'a text is declared' "$(grep -i '^content-type' "$dir/out" | tr -d '\r')" 'Content-Type: application/json'
check 'arrived' "$(cut -d, -f1 "$dir/seen" | paste -sd ' ')" '["/401" ["/401" ["/text"'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
