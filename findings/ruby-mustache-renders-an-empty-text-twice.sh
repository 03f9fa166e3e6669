#!/usr/bin/env bash
# For an empty text and for an object without keys, Ruby's mustache renders the section and also its opposite: of
# "{{#error}}failed{{/error}}{{^error}}all well{{/error}}" comes "failedall well". An empty list renders the opposite
# alone.
# Guess: of a section and its opposite, exactly one is rendered.
# Seen with Ruby's mustache 1.1.1 and ruby 3.1.2 (Debian 12); mustache 4.2.0 of npm renders one of them.
# Senders write "" for a field without a value. A gateway whose page shows such a pair must say what an empty text is,
# and a template that was tried in Ruby proves nothing about it.
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
have apt-get download -qq ruby3.1=3.1.7+really3.1.2-0+deb12u1 libruby3.1=3.1.7+really3.1.2-0+deb12u1 \
  ruby-mustache=1.1.1-2 libgmp10
for package in ./*.deb; do have dpkg -x "$package" .; done
libraries=$(echo "$dir"/usr/lib/*-linux-gnu)
ruby() {
  RUBYLIB=$dir/usr/lib/ruby/vendor_ruby:$dir/usr/lib/ruby/3.1.0:$(echo "$libraries"/ruby/3.1.0) \
    LD_LIBRARY_PATH=$libraries timeout 20 "$dir/usr/bin/ruby3.1" --disable-gems "$@"
}
cat >"$dir/render.cjs" <<'JS'
console.log(require('mustache').render(process.argv[2], JSON.parse(process.argv[3])));
JS
cat >"$dir/render.rb" <<'RB'
require 'json'
require 'mustache'
puts Mustache.render(ARGV[0], JSON.parse(ARGV[1]))
RB
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
template='{{#error}}failed{{/error}}{{^error}}all well{{/error}}'
for row in '"disk"/failed/failed' 'null/all well/all well' '[]/all well/all well' '""/failedall well/all well' \
  '{}/failedall well/failed' '0/failed/all well'; do
  IFS=/ read -r value of_ruby of_npm <<<"$row"
  check "error is $value, Ruby" "$(ruby "$dir/render.rb" "$template" "{\"error\":$value}")" "$of_ruby"
  check "error is $value, npm" "$(node "$dir/render.cjs" "$template" "{\"error\":$value}")" "$of_npm"
done
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
