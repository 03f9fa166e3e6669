#!/usr/bin/env bash
# Two Mustache implementations of Python read the same data differently: pystache writes "None" for a null and nothing
# for the first element of a list ({{items.0}}); chevron writes nothing for the null, and the element. Both write "True"
# for true, where JavaScript's mustache writes "true" and the element.
# Seen with pystache 0.6.8, chevron 0.14.0 and mustache 4.2.0 (npm).
# "Mustache" in a manual does not say what {{x}} makes of JSON. A gateway must say it itself, for null, true and lists.
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
have python3 -m pip install -q --target "$dir/py" pystache==0.6.8 chevron==0.14.0
cat >"$dir/render.py" <<'PY'
import chevron, json, pystache, sys
template, data = sys.argv[1], json.loads(sys.argv[2])
print('pystache', pystache.render(template, data))
print('chevron', chevron.render(template, data))
PY
cat >"$dir/render.cjs" <<'JS'
const [template, data] = process.argv.slice(2);
console.log('mustache', require('mustache').render(template, JSON.parse(data)));
JS
template='[{{null}}] [{{yes}}] [{{items.0}}]'
data='{"null":null,"yes":true,"items":["a"]}'
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(
  PYTHONPATH="$dir/py" python3 "$dir/render.py" "$template" "$data"
  node "$dir/render.cjs" "$template" "$data"
)
check "$template" "$(paste -sd ' ' <<<"$seen")" \
  'pystache [None] [True] [] chevron [] [True] [a] mustache [] [true] [a]'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
