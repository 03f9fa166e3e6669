#!/usr/bin/env bash
# wget sends a request again, a POST too, up to 20 times, if the connection ends without an answer, or if the answer
# takes longer than -T says. --tries=1 turns it off.
# Guess: a POST is sent once, as curl and busybox's wget send it.
# Seen with GNU Wget 1.21.3, curl and busybox 1.35.0 (Debian 12). It waits up to 10 s between two (--waitretry).
# A send may take a minute, so `wget -T 30` makes 20 messages of one. A page that shows wget should show --tries=1
# beside -T, and a gateway must always answer.
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
have apt-get download -qq wget=1.21.3-1+deb12u1 curl=7.88.1-10+deb12u15 libcurl4=7.88.1-10+deb12u15 \
  busybox=1:1.35.0-4+deb12u1+b1
for package in ./*.deb; do have dpkg -x "$package" .; done
cat >recorder.mjs <<'JS'
import { appendFileSync, renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  appendFileSync('seen', `${req.method}\n`);
  req.resume().on('end', () => {
    if (req.url === '/close') req.socket.end(); // without an answer
    else setTimeout(() => res.writeHead(201).end(), 3000);
  });
});
server.listen(0, '127.0.0.1', () => {
  writeFileSync('new', String(server.address().port));
  renameSync('new', 'port');
});
JS
node recorder.mjs &
trap 'kill "$!" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -e port ] || sleep 0.1; done
url=http://127.0.0.1:$(cat port)
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
posts() { # how many times a POST was sent
  rm -f seen
  timeout 60 "$@" >out 2>log
  grep -c '^POST$' seen
}
wget=(usr/bin/wget -O- --waitretry=0 --post-data=hello)
curl=(env LD_LIBRARY_PATH="$(echo "$dir"/usr/lib/*-linux-gnu)" usr/bin/curl -d hello)
check 'wget, closed' "$(posts "${wget[@]}" "$url/close")" 20
check 'wget -T 1, slow' "$(posts "${wget[@]}" -T 1 "$url/slow")" 20
check 'wget -T 1 --tries=1, slow' "$(posts "${wget[@]}" -T 1 --tries=1 "$url/slow")" 1
check 'busybox wget, closed' "$(posts bin/busybox wget -O- --post-data hello "$url/close")" 1
check 'curl, closed' "$(posts "${curl[@]}" "$url/close")" 1
check 'curl -m 1, slow' "$(posts "${curl[@]}" -m 1 "$url/slow")" 1
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
