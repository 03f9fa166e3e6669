#!/usr/bin/env bash
# json::write of Tcl's library takes each value for JSON that is already written: a text is put into an object or a
# list without quotes, and what comes out is no JSON. Nothing is raised. json::write string must be called for each
# text.
# Guess: {"message":"disk full"}, or an error.
# Seen with tcllib 1.21 (Debian 12) and Tcl 8.6. 007 stays 007, which is no JSON either.
# Such a body begins with "{", and its sender means it to be JSON. A gateway should answer 400 with the position, and
# not take it for a text.
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
have apt-get download -qq tcllib=1.21+dfsg-1 tcl8.6 libtcl8.6
for package in ./*.deb; do have dpkg -x "$package" .; done
tcl() {
  TCL_LIBRARY=$dir/usr/share/tcltk/tcl8.6 TCLLIBPATH=$dir/usr/share/tcltk LD_LIBRARY_PATH=$(echo "$dir"/usr/lib/*-linux-gnu) \
    timeout 20 "$dir/usr/bin/tclsh8.6"
}
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
written() { printf '%s\n' 'package require json::write' 'json::write indented 0' 'json::write aligned 0' "puts [$1]" | tcl; }
is_json() { node -e 'JSON.parse(process.argv[1])' "$1" 2>"$dir/log" && echo yes || echo no; }
text=$(written 'json::write object message "disk full" zip 007')
check 'a text' "$text" '{"message":disk full,"zip":007}'
check 'is it JSON' "$(is_json "$text")" no
quoted=$(written 'json::write object message [json::write string "disk full"]')
check 'with json::write string' "$quoted" '{"message":"disk full"}'
check 'is it JSON' "$(is_json "$quoted")" yes
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
