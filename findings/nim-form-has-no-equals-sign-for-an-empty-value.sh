#!/usr/bin/env bash
# encodeQuery of Nim's std/uri, with which its programs write a form, leaves out the "=" of a field without a value:
# the form is "title&message=hello". A form of one empty field is a bare word. omitEq = false writes it.
# Guess: title=&message=hello.
# Seen with Nim 1.6.10 (Debian 12). Readers of forms take both for the same.
# A gateway that tells a form from a text by its look must not want a "=" in the first field: such a form is no text.
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
have apt-get download -qq nim=1.6.10-2 libpcre3
for package in ./*.deb; do have dpkg -x "$package" .; done
have cp -r etc/nim usr/config
cat >form.nims <<'NIM'
import std/uri
echo encodeQuery({"title": "", "message": "hello"})
echo encodeQuery({"title": "", "message": "hello"}, omitEq = false)
NIM
seen=$(HOME=$dir timeout 60 usr/bin/nim --hints:off --lib:usr/lib/nim/lib e form.nims 2>log)
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
check 'encodeQuery' "$(sed -n 1p <<<"$seen")" 'title&message=hello'
check 'omitEq = false' "$(sed -n 2p <<<"$seen")" 'title=&message=hello'
fields='Object.fromEntries(new URLSearchParams(process.argv[1]))'
check 'read by Node' "$(node -p "JSON.stringify($fields)" 'title&message=hello')" '{"title":"","message":"hello"}'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
