#!/usr/bin/env bash
# FileFormPost of Free Pascal's fphttpclient, which Lazarus programs use, declares each file, whatever it is, as
# application/octet-string. There is no such type.
# Guess: image/png for a.png, or application/octet-stream.
# Seen with Free Pascal 3.2.2 (Debian 12).
# Passed on as it is, a picture is shown as a file. A gateway should go by the name of the file or by its first bytes
# where the declared type says nothing, and must not refuse a type that it does not know.
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
version=3.2.2
have apt-get download -qq fp-compiler-$version=$version+dfsg-20 fp-units-rtl-$version=$version+dfsg-20 \
  fp-units-base-$version=$version+dfsg-20 fp-units-fcl-$version=$version+dfsg-20 fp-units-net-$version=$version+dfsg-20
for package in ./*.deb; do have dpkg -x "$package" .; done
pascal=$(echo "$dir"/usr/lib/*-linux-gnu/fpc/$version)
cat >post.pas <<'PASCAL'
program post;
{$mode objfpc}{$H+}
uses classes, fphttpclient;
var
  fields: TStringList;
  response: TStringStream;
begin
  fields := TStringList.Create;
  fields.Add('message=hello');
  response := TStringStream.Create('');
  TFPHTTPClient.Create(nil).FileFormPost(ParamStr(1), fields, 'file', 'a.png', response);
end.
PASCAL
have "$(echo "$pascal"/ppc*)" -n -v0 -Fu"$(echo "$pascal"/units/*)/*" post.pas
cat >recorder.mjs <<'JS'
import { renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  writeFileSync('seen', body);
  res.writeHead(201).end();
});
server.listen(0, '127.0.0.1', () => {
  writeFileSync('new', String(server.address().port));
  renameSync('new', 'port');
});
JS
(exec node recorder.mjs) &
trap 'kill "$!" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -e port ] || sleep 0.1; done
printf '\x89PNG\r\n\x1a\n' >a.png
timeout 20 ./post "http://127.0.0.1:$(cat port)" || exit 2
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(grep -a -A 1 'filename=' seen | tr -d '\r' | paste -sd ' ')
check 'the part of a.png' "$seen" \
  'Content-Disposition: form-data; name="file"; filename="a.png" Content-Type: application/octet-string'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
