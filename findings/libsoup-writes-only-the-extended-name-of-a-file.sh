#!/usr/bin/env bash
# If the name of a file is not ASCII, libsoup, the HTTP library of GNOME, writes no filename into a multipart form, but
# only filename*=UTF-8''%C3%A4.png, which the standard of multipart forms says must not be used. Node 20's formData()
# throws for the whole form, Deno's makes a text of the picture, and Node 26 reads the name. Parentheses, commas and even
# semicolons, quotes and percent signs of the name are not encoded.
# Guess: filename="ä.png" in UTF-8, as browsers write it, or both.
# Seen with libsoup 3.2.3 (Debian 12), Node 20.20.2 and 26.10.0, and Deno 2.9.6.
# A screenshot of a GNOME in French has an é and ’ in its name. A gateway should read filename* where there is no
# other.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
get() { have npm install --silent --no-audit --no-fund --prefix "$dir/$1" "$1"; }
python=$(command -v python3) || { echo 'no python3 here'; exit 2; }
for package in node@20.20.2 node@26.10.0 deno@2.9.6; do get "$package"; done
cd "$dir" || exit 2
have apt-get download -qq libsoup-3.0-0=3.2.3-0+deb12u2 libglib2.0-0 libbrotli1 libgssapi-krb5-2 libkrb5-3 \
  libk5crypto3 libkrb5support0 libcom-err2 libkeyutils1 libnghttp2-14 libpsl5 libidn2-0 libunistring2 libsqlite3-0 \
  zlib1g libpcre2-8-0 libffi8 libmount1 libblkid1 libselinux1
for package in ./*.deb; do have dpkg -x "$package" .; done
libraries=$(echo "$dir"/usr/lib/*-linux-gnu):$(echo "$dir"/lib/*-linux-gnu)
cat >"$dir/recorder.mjs" <<'JS'
import { renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  writeFileSync(`.${req.url}`, JSON.stringify([req.headers['content-type'], body]));
  res.writeHead(201).end();
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
import ctypes, sys
glib, soup = ctypes.CDLL('libglib-2.0.so.0'), ctypes.CDLL('libsoup-3.0.so.0')
def new(function, *args):
    function.restype = ctypes.c_void_p
    return ctypes.c_void_p(function(*args))
session = new(soup.soup_session_new)
picture = new(glib.g_bytes_new, b'hi', ctypes.c_size_t(2))
for path, name in (('/ascii', 'a.png'), ('/umlaut', 'ä.png'), ('/copy', 'ä (1), 9%; "b".png')):
    form = new(soup.soup_multipart_new, b'multipart/form-data')
    soup.soup_multipart_append_form_string(form, b'message', b'hello')
    soup.soup_multipart_append_form_file(form, b'file', name.encode(), b'image/png', picture)
    message = new(soup.soup_message_new_from_multipart, (sys.argv[1] + path).encode(), form)
    new(soup.soup_session_send_and_read, session, message, None, None)
PY
LD_LIBRARY_PATH=$libraries timeout 20 "$python" "$dir/post.py" "http://127.0.0.1:$(cat "$dir/port")" >"$dir/log" 2>&1
cat >"$dir/read.mjs" <<'JS'
import { readFileSync } from 'node:fs';
const [type, body] = JSON.parse(readFileSync(process.argv[2], 'utf8'));
try {
  const form = await new Response(body, { headers: { 'Content-Type': type } }).formData();
  console.log(Array.from(form, ([name, value]) => `${name}=${value.name ?? `"${value}"`}`).join(' '));
} catch ({ name }) {
  console.log(name);
}
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
written() { node -p 'JSON.parse(require("node:fs").readFileSync(process.argv[1]))[1].match(/"file"; (.*)/)[1]' "$dir/$1"; }
check 'libsoup 3.2.3, a.png' "$(written ascii)" 'filename="a.png"'
check 'libsoup 3.2.3, ä.png' "$(written umlaut)" "filename*=UTF-8''%C3%A4.png"
check 'libsoup 3.2.3, ä (1), 9%; "b".png' "$(written copy)" "filename*=UTF-8''%C3%A4%20(1),%209%;%20\"b\".png"
for node in node@20.20.2/TypeError 'node@26.10.0/message="hello" file=ä.png'; do
  seen=$(timeout 20 "$dir/${node%%/*}/node_modules/.bin/node" "$dir/read.mjs" "$dir/umlaut")
  check "ä.png, read by ${node%%/*}" "$seen" "${node#*/}"
done
deno() { NO_COLOR=1 DENO_DIR="$dir/cache" timeout 20 "$dir/deno@2.9.6/node_modules/.bin/deno" run "$@"; }
check 'ä.png, read by Deno 2.9.6' "$(deno -A "$dir/read.mjs" "$dir/umlaut")" 'message="hello" file="hi"'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
