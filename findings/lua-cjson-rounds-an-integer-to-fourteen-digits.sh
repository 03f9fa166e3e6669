#!/usr/bin/env bash
# lua-cjson writes numbers with 14 digits, also whole ones, which Lua 5.4 has with 19: 1795866619765123 becomes
# 1.7958666197651e+15, a number that a double would have held. Lua's own tostring writes all digits.
# Guess: an integer is written as it is, or is right as far as a double is, which is 15 to 17 digits.
# Seen with lua-cjson 2.1.0 and Lua 5.4.4 (Debian 12); encode_number_precision goes no further than 14 in it.
# Timestamps in milliseconds have 13 digits, those in microseconds and most ids have more. A gateway cannot restore
# them; a page should say that a number is not an id, and a text is.
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
have apt-get download -qq lua5.4=5.4.4-3+deb12u1 lua-cjson=2.1.0+dfsg-2.2 libreadline8
for package in ./*.deb; do have dpkg -x "$package" .; done
libraries=$(echo "$dir"/usr/lib/*-linux-gnu)
lua() {
  LUA_CPATH="$libraries/lua/5.4/?.so" LD_LIBRARY_PATH=$libraries:$(echo "$dir"/lib/*-linux-gnu) \
    timeout 20 "$dir/usr/bin/lua5.4" "$@" 2>&1
}
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
encoded() { lua -e "local json = require 'cjson'; print(json.encode({ $1 }), tostring($1))"; }
check 'milliseconds' "$(encoded 1795866619765)" $'[1795866619765]\t1795866619765'
check 'microseconds' "$(encoded 1795866619765123)" $'[1.7958666197651e+15]\t1795866619765123'
precision() { lua -e "print((pcall(require('cjson').encode_number_precision, $1)))"; }
check 'a precision of 14' "$(precision 14)" true
check 'a precision of 15' "$(precision 15)" false
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
