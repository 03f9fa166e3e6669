#!/usr/bin/env bash
# curl -F 'message=TEXT' parses the text: a semicolon ends it, because ";type=" and ";filename=" may follow, and quotes
# around a first word are removed together with all that follows. "; filename=x" makes a file of the text. curl's exit
# status is 0. --form-string takes the text as it is.
# Seen with curl 7.88.1 (Debian 12).
# Alerts are full of semicolons. A page that recommends -F for a text with a picture should write --form-string.
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
have apt-get download -qq curl=7.88.1-10+deb12u15 libcurl4=7.88.1-10+deb12u15
for package in ./*.deb; do have dpkg -x "$package" .; done
curl() { LD_LIBRARY_PATH=$(echo "$dir"/usr/lib/*-linux-gnu) timeout 20 "$dir/usr/bin/curl" -s "$@"; }
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
part() { # the one part of the form that curl sends: its headers after the name, and its content
  rm -f "$dir/seen"
  curl "$@" "$url/a" >"$dir/out" || echo "exit status $?"
  node -e '
    const [, , form] = JSON.parse(require("node:fs").readFileSync(process.argv[1], "utf8"));
    const [, more, text] = /name="message"(.*?)\r\n\r\n(.*)\r\n--/s.exec(form);
    console.log(`${more.replace(/\s+/g, " ")}[${text}]`);
  ' "$dir/seen"
}
check '-F, a semicolon' "$(part -F 'message=Backup done; 3 files failed')" '[Backup done]'
check '-F, quotes' "$(part -F 'message="nas" is down')" '[nas]'
file='; filename="a.tar"[Backup done]'
check '-F, a file name' "$(part -F 'message=Backup done; filename=a.tar')" "$file"
whole='[Backup done; 3 files failed]'
check '--form-string' "$(part --form-string 'message=Backup done; 3 files failed')" "$whole"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
