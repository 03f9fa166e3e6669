#!/usr/bin/env bash
# QUrlQuery, by which Qt programs write a form, leaves a "+" as it is, even with FullyEncoded, which encodes spaces as
# %20. Each reader of forms takes it for a space: "C++" arrives as "C" with two spaces, and a phone number without its
# plus.
# Guess: %2B, as QUrl.toPercentEncoding of the same library writes it.
# Seen with Qt 6.11.2 (PySide6 from PyPI).
# The number can be saved, because one with a space before it is no other; the text cannot. A gateway should take a
# plus before a phone number for what it is, and a page should name JSON or text for Qt.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have python3 -m pip install -q --target "$dir/py" PySide6-Essentials==6.11.2
have env PYTHONPATH="$dir/py" python3 -c 'import PySide6.QtCore' # needs glib
cat >"$dir/form.py" <<'PY'
from PySide6.QtCore import QUrl, QUrlQuery
query = QUrlQuery()
query.addQueryItem('message', 'C++ & Qt')
query.addQueryItem('recipients', '+15550100002')
print(query.toString(QUrl.ComponentFormattingOption.FullyEncoded))
print(bytes(QUrl.toPercentEncoding('C++ & Qt')).decode())
PY
seen=$(PYTHONPATH="$dir/py" timeout 60 python3 "$dir/form.py" 2>"$dir/log")
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
form=$(sed -n 1p <<<"$seen")
check 'QUrlQuery, FullyEncoded' "$form" 'message=C++%20%26%20Qt&recipients=+15550100002'
check 'QUrl.toPercentEncoding' "$(sed -n 2p <<<"$seen")" 'C%2B%2B%20%26%20Qt'
read_by_node=$(node -p 'JSON.stringify(Object.fromEntries(new URLSearchParams(process.argv[1])))' "$form")
check 'read by Node' "$read_by_node" '{"message":"C   & Qt","recipients":" 15550100002"}'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
