#!/usr/bin/env bash
# jiffy, a JSON library of Erlang, takes a text in double quotes for the list of numbers that it is in that language:
# "hello" is [104,101,108,108,111]. Only a binary, <<"hello">>, is a text. Nothing is raised.
# Guess: "hello", or an error.
# Seen with jiffy 1.1.1 and Erlang/OTP 25 (Debian 12).
# A gateway that takes any list for recipients, or shows the JSON of a message that is no text, sends numbers. It
# should say of which field it wants a string, and of what kind the value is.
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
have apt-get download -qq erlang-base=1:25.2.3+dfsg-1+deb12u4 erlang-jiffy=1.1.1-1 libtinfo6 libsctp1
for package in ./*.deb; do have dpkg -x "$package" .; done
erlang=$dir/usr/lib/erlang
erl() {
  ROOTDIR=$erlang BINDIR=$(echo "$erlang"/erts-*/bin) EMU=beam PROGNAME=erl HOME=$dir \
    timeout 60 "$erlang"/erts-*/bin/erlexec -noinput "$@"
}
have erl -eval 'jiffy:decode(<<"1">>), halt(0).'
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
json() { erl -eval "io:put_chars(jiffy:encode($1)), halt(0)."; }
check 'in double quotes' "$(json '#{message => "hello"}')" '{"message":[104,101,108,108,111]}'
check 'as a binary' "$(json '#{message => <<"hello">>}')" '{"message":"hello"}'
check 'a list of a recipient' "$(json '#{recipients => ["+1555"]}')" '{"recipients":[[43,49,53,53,53]]}'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
