#!/usr/bin/env bash
# snmptrapd hands the texts of a trap to its script in quotes, with a backslash before each quote. A text with one
# letter beyond ASCII is there as its bytes in hex, in the same quotes: "Tür offen" is "54 C3 BC 72 20 …". Without a
# MIB for the trap, nothing tells one from the other; -Oa makes text of all of it, with a dot for each such byte.
# Guess: Tür offen, as the device has sent it.
# Seen with Net-SNMP 5.9.3 (Debian 12).
# The trap of a UPS or a printer in Germany is a line of numbers on the phone, and no gateway can read it. A page with
# a traphandle should say so.
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
version=5.9.3+dfsg-2+deb12u1
have apt-get download -qq snmp=$version snmptrapd=$version libsnmp40=$version libnetsnmptrapd40=$version libmariadb3 \
  libwrap0 libpci3
for package in ./*.deb; do have dpkg -x "$package" .; done
net_snmp() {
  program=$1
  shift
  LD_LIBRARY_PATH=$(echo "$dir"/usr/lib/*-linux-gnu) MIBS='' SNMP_PERSISTENT_DIR=$dir/state exec timeout 60 "usr/$program" "$@"
}
have env LD_LIBRARY_PATH="$(echo "$dir"/usr/lib/*-linux-gnu)" usr/sbin/snmptrapd -v
cat >handler <<'SH'
#!/bin/sh
sed -n 's/.*9999\.2 //p' >new
mv new seen
SH
chmod +x handler
printf '%s\n' 'disableAuthorization yes' "traphandle default $dir/handler" >conf
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
handed() { # what the script gets for a text: TEXT [OPTION]
  rm -f socket seen
  (net_snmp sbin/snmptrapd -f -n -C -c conf -Lf log ${2:+"$2"} "unix:$dir/socket") >out 2>&1 &
  for _ in $(seq 100); do [ -S socket ] || sleep 0.1; done
  (net_snmp bin/snmptrap -v 2c -c public "unix:$dir/socket" '' 1.3.6.1.4.1.8072.9999.1 1.3.6.1.4.1.8072.9999.2 s "$1") >out 2>&1
  for _ in $(seq 100); do [ -e seen ] || sleep 0.1; done
  kill "$!"
  cat seen
}
check 'The "front" door' "$(handed 'The "front" door')" '"The \"front\" door"'
check 'Tür offen' "$(handed 'Tür offen')" '"54 C3 BC 72 20 6F 66 66 65 6E "'
check 'Tür offen, with -Oa' "$(handed 'Tür offen' -Oa)" '"T..r offen"'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
