#!/usr/bin/env bash
# curl -F with a header Content-Type of the user's own, such as one in the file of -K, still writes a multipart body,
# but declares it as that type, with the form's boundary added to it: "text/plain; boundary=…". In the parts,
# "attachment" takes the place of "form-data". -H 'Content-Type:', which removes a header elsewhere, leaves
# "; boundary=…" of it.
# Guess: the form's type replaces the header, or the header is sent as it is written, and the parts stay as they are.
# Seen with curl 7.88.1 (Debian 12).
# Whoever adds a picture to a script that posts text gets the raw form on the phone, with exit status 0. A gateway
# should refuse a text that is a multipart body by its look, and not only if it says form-data.
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
  appendFileSync('seen', `${JSON.stringify([req.headers['content-type'], body])}\n`);
  res.writeHead(201, { 'Content-Type': 'application/json' }).end('{}\n');
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
post() { # the exit status, the declared type, and each Content-Disposition, without the digits of the boundary
  rm -f "$dir/seen"
  curl "$@" --form-string message=hello "$url" >"$dir/out"
  printf '%s ' "$?"
  node -e '
    const [type, body] = JSON.parse(require("node:fs").readFileSync(process.argv[1], "utf8"));
    console.log([type.replace(/-+\w+$/, "B"), ...body.match(/(?<=Content-Disposition: ).*/g)].join(" / "));
  ' "$dir/seen"
}
echo 'header = "Content-Type: text/plain"' >"$dir/config"
check 'without a header' "$(post)" '0 multipart/form-data; boundary=B / form-data; name="message"'
check '-K, text/plain' "$(post -K "$dir/config")" '0 text/plain; boundary=B / attachment; name="message"'
check "-H 'Content-Type:'" "$(post -H 'Content-Type:')" '0 ; boundary=B / attachment; name="message"'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
