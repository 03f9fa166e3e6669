#!/usr/bin/env bash
# Within {{#x}}…{{/x}}, {{.}} is the value of x, unless that is true. Then mustache and handlebars of npm, chevron of
# Python and mustache of Ruby keep the data around it, and {{.}} writes all of that: "[object Object]", or the payload
# in the language's own notation. In three braces, chevron writes True, as pystache does in either.
# Guess: "true", as the text of a text and the number of a number.
# Seen with mustache 4.2.0, handlebars 4.7.8, chevron 0.14.0, pystache 0.6.8 and Ruby's mustache 1.1.1 (Debian 12).
# Senders have fields that are a text or true. A gateway should write "true", so that a phone never shows a whole
# payload that its template has not asked for.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" mustache@4.2.0 handlebars@4.7.8
have python3 -m pip install -q --target "$dir/py" pystache==0.6.8 chevron==0.14.0
cd "$dir" || exit 2
have apt-get download -qq ruby3.1=3.1.7+really3.1.2-0+deb12u1 libruby3.1=3.1.7+really3.1.2-0+deb12u1 \
  ruby-mustache=1.1.1-2 libgmp10
for package in ./*.deb; do have dpkg -x "$package" .; done
libraries=$(echo "$dir"/usr/lib/*-linux-gnu)
ruby() {
  RUBYLIB=$dir/usr/lib/ruby/vendor_ruby:$dir/usr/lib/ruby/3.1.0:$(echo "$libraries"/ruby/3.1.0) \
    LD_LIBRARY_PATH=$libraries timeout 20 "$dir/usr/bin/ruby3.1" --disable-gems "$@"
}
cat >"$dir/render.cjs" <<'JS'
const [template, data] = [process.argv[2], JSON.parse(process.argv[3])];
console.log(`mustache: ${require('mustache').render(template, data)}`);
console.log(`handlebars: ${require('handlebars').compile(template)(data)}`);
JS
cat >"$dir/render.py" <<'PY'
import chevron, json, pystache, sys
template, data = sys.argv[1], json.loads(sys.argv[2])
print('chevron:', chevron.render(template, data))
print('pystache:', pystache.render(template, data))
PY
cat >"$dir/render.rb" <<'RB'
require 'json'
require 'mustache'
puts "Ruby: #{Mustache.render(ARGV[0], JSON.parse(ARGV[1]))}"
RB
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
render() {
  {
    node "$dir/render.cjs" "$@"
    PYTHONPATH="$dir/py" python3 "$dir/render.py" "$@"
    ruby "$dir/render.rb" "$@"
  } | sed 's/&quot;/"/g; s/&gt;/>/g' | paste -sd ','
}
section='{{#on}}{{.}}{{/on}}'
check 'a text' "$(render "$section" '{"on":"sda1","text":"a"}')" \
  'mustache: sda1,handlebars: sda1,chevron: sda1,pystache: sda1,Ruby: sda1'
check 'true' "$(render "$section" '{"on":true,"text":"a"}')" "$(
  printf '%s,' 'mustache: [object Object]' 'handlebars: [object Object]' "chevron: {'on': True, 'text': 'a'}" 'pystache: True'
)Ruby: {\"on\"=>true, \"text\"=>\"a\"}"
check 'true, in three braces' "$(render '{{#on}}{{{.}}}{{/on}}' '{"on":true}' | grep -o 'chevron: [^,]*')" 'chevron: True'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
