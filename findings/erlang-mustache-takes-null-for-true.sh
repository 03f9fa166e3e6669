#!/usr/bin/env bash
# bbmustache, the Mustache of Erlang, renders a section whose value is null, 0 or "", and writes null as the word. That
# is what jiffy decodes; only false, a missing name and an empty list render the opposite. A list of texts is written
# joined.
# Guess: nothing for null and "", as in JavaScript.
# Seen with bbmustache 1.6.1, jiffy 1.1.1 and Erlang/OTP 25 (Debian 12), and mustache 4.2.0 (npm).
# "Mustache" in a manual does not say which values are false. A gateway's page must list them.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" mustache@4.2.0
cd "$dir" || exit 2
have apt-get download -qq erlang-base=1:25.2.3+dfsg-1+deb12u4 erlang-jiffy=1.1.1-1 \
  erlang-bbmustache=1.6.1+dfsg-1+b1 libtinfo6 libsctp1
for package in ./*.deb; do have dpkg -x "$package" .; done
erlang=$dir/usr/lib/erlang
erl() {
  ROOTDIR=$erlang BINDIR=$(echo "$erlang"/erts-*/bin) EMU=beam PROGNAME=erl HOME=$dir \
    timeout 60 "$erlang"/erts-*/bin/erlexec -noinput "$@"
}
have erl -eval 'jiffy:decode(<<"1">>), halt(0).'
export DATA='{"null":null,"zero":0,"empty":"","false":false,"none":[],"list":["a","b"]}'
export TEMPLATE='[{{null}}] [{{list}}]'
for name in null zero empty false none missing; do
  TEMPLATE="$TEMPLATE $name:{{#$name}}yes{{/$name}}{{^$name}}no{{/$name}}"
done
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
check 'bbmustache' "$(erl -eval '
  [Data, Template] = [list_to_binary(os:getenv(Name)) || Name <- ["DATA", "TEMPLATE"]],
  io:put_chars(bbmustache:render(Template, jiffy:decode(Data, [return_maps]), [{key_type, binary}])),
  halt(0).')" '[null] [ab] null:yes zero:yes empty:yes false:no none:no missing:no'
check 'mustache of npm' "$(node -p 'require("mustache").render(process.env.TEMPLATE, JSON.parse(process.env.DATA))')" \
  '[] [a,b] null:no zero:no empty:no false:no none:no missing:no'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
