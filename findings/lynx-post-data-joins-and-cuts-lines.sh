#!/usr/bin/env bash
# lynx -post_data reads a form from standard input, and so looks like a way to post a text where there is no curl. It
# joins the lines without their line feeds, and a line of "---" ends the data: what follows is not sent.
# Seen with lynx 2.9.0dev.12 (Debian 12). Its exit status is 0.
# Neither a gateway nor its user can see that a part is missing. A page about senders should name curl or wget.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
cd "$dir" || exit 2
have apt-get download -qq lynx=2.9.0dev.12-1
have dpkg -x lynx_*.deb .
touch "$dir/lynx.cfg" "$dir/lynx.lss"
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
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
printf 'message=disk full\nsince noon\n---\nplease look\n' |
  timeout 20 "$dir/usr/bin/lynx" -cfg="$dir/lynx.cfg" -lss="$dir/lynx.lss" -post_data -dump "$url/a" >"$dir/out" 2>&1
check 'lynx 2.9.0dev.12, exit status' "$?" 0
check 'of four lines it sent' "$(cat "$dir/seen")" '["/a","-","message=disk fullsince noon"]'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
