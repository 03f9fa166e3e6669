#!/usr/bin/env bash
# Guess: Ansible's `uri` with `body_format: form-multipart` sends a file's bytes as they are, as curl -F does. It sends
# them in base64, with a Content-Transfer-Encoding that few servers of forms read. `multipart_encoding: 7or8bit` is the
# setting against that, and makes CR LF of each LF and of each CR in the file: a PNG loses its signature with it.
# Seen with ansible-core 2.19.4.
# A gateway gets either a text in place of a picture, or a picture that no program opens. It should name the base64 in
# its refusal; a page about Ansible should send a picture as JSON, in base64_attachments.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have python3 -m pip install -q --target "$dir/py" ansible-core==2.19.4
cat >"$dir/recorder.mjs" <<'JS'
import { appendFileSync, renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req.setEncoding('latin1')) body += chunk;
  const [, head, content] = /--[^]*?\r\n([^]*?)\r\n\r\n([^]*?)\r\n--/.exec(body);
  const encoding = /transfer-encoding: *(\S*)/i.exec(head)?.[1];
  const bytes = Buffer.from(content, encoding === 'base64' ? 'base64' : 'latin1');
  appendFileSync('seen', `${encoding} ${bytes.toString('hex')}\n`);
  res.writeHead(200).end();
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
printf '\x89PNG\r\n\x1a\n\r' >"$dir/a.png"
send() { # sends a.png, with the further setting $1; prints the declared encoding, and the bytes after it is undone
  rm -f "$dir/seen"
  HOME="$dir" PYTHONPATH="$dir/py" timeout 100 python3 -m ansible adhoc -c local -i localhost, \
    -e ansible_python_interpreter="$(command -v python3)" localhost -m uri -a '{"url": "'"$url"'", "method": "POST",
      "body_format": "form-multipart", "body": {"picture": {"filename": "'"$dir/a.png\"$1"'}}}' >"$dir/out" 2>&1
  cat "$dir/seen"
}
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
check 'the file' "$(od -An -tx1 "$dir/a.png" | tr -d ' \n')" 89504e470d0a1a0a0d
check 'as it comes' "$(send '')" 'base64 89504e470d0a1a0a0d'
check '7or8bit' "$(send ', "multipart_encoding": "7or8bit"')" '8bit 89504e470d0a1a0d0a0d0a'
[ "$changed" = 0 ] || { cat "$dir/out"; echo 'CHANGED'; }
exit "$changed"
