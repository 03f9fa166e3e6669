#!/usr/bin/env bash
# lua-cjson, of which OpenResty has a fork, writes each empty table as {}. A payload that it decodes and encodes
# again is another one: "recipients":[] has become "recipients":{}.
# Guess: a list that came out of JSON is a list again.
# Seen with lua-cjson 2.1.0 and Lua 5.4.4 (Debian 12); that version has no empty_array.
# A gateway sees an object where the API has a list. It should refuse it with the name of the field and "must be a
# list", and a template's section of that field must treat [] and {} as its page says.
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
    timeout 20 "$dir/usr/bin/lua5.4" "$@"
}
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
encoded() { lua -e "local json = require 'cjson'; print(json.encode($1), json.empty_array)"; }
check 'one recipient' "$(encoded "{ recipients = { '+15550100002' } }")" $'{"recipients":["+15550100002"]}\tnil'
check 'none' "$(encoded '{ recipients = {} }')" $'{"recipients":{}}\tnil'
check '[] decoded and encoded' "$(encoded "json.decode('{\"recipients\":[]}')")" $'{"recipients":{}}\tnil'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
