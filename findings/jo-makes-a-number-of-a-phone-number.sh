#!/usr/bin/env bash
# jo, which shell scripts use to write JSON, guesses the type of each word: a phone number loses its "+" and its quotes,
# 007 becomes 7, and 3.10 becomes 3.1. `-s` before the word keeps it a string.
# Seen with jo 1.9 (Debian 12).
# A gateway sees a number where the API has a string. A sentence that says "must be a string, such as "+1555…"" helps
# more than a phone number that is silently accepted without its plus.
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
have apt-get download -qq jo=1.9-1
have dpkg -x jo_*.deb .
jo=$dir/usr/bin/jo
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
check 'jo recipients[]=+15550100002' "$("$jo" 'recipients[]=+15550100002')" '{"recipients":[15550100002]}'
check 'jo message=007' "$("$jo" message=007)" '{"message":7}'
check 'jo message=3.10' "$("$jo" message=3.10)" '{"message":3.1}'
check 'jo message=true' "$("$jo" message=true)" '{"message":true}'
check 'jo -- -s message=007' "$("$jo" -- -s message=007)" '{"message":"007"}'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
