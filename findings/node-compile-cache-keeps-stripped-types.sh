#!/usr/bin/env bash
# Guess: NODE_COMPILE_CACHE keeps V8's code, and a .ts file's types are still stripped at each start, which is most of
# the work. From Node 24 on the stripped text is kept too: the second start takes less than a third of the processor's
# time and two thirds of the memory of one without the cache. Node 22 strips each time.
# Seen with Node 24.21.0 and 26.10.0; 22.22.0 keeps nothing of it.
# A program of one .ts file needs no build for a small machine's sake: docs/install.md may name the variable where it
# says what a start from the source costs.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
get() {
  npm install --silent --no-audit --no-fund --prefix "$dir/$1" "$1" >"$dir/log" 2>&1 || {
    echo "$1 cannot be had"
    exit 2
  }
}
for version in 22.22.0 24.21.0 26.10.0; do get "node@$version"; done
cd "$dir" || exit 2
echo '{ "type": "module" }' >package.json
for ((i = 0; i < 4000; i++)); do
  echo "interface T$i { a: string; b?: number } // some types"
  echo "export const f$i = (x: T$i, y: number = $i): Array<string> => [x.a as string, String(y)];"
done >program.ts
cat >>program.ts <<'TS'
const { maxRSS, userCPUTime, systemCPUTime } = process.resourceUsage();
console.log(`${Math.round((userCPUTime + systemCPUTime) / 1000)} ${Math.round(maxRSS / 1024)}`);
TS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
run() { timeout 60 "$dir/node@$1/node_modules/.bin/node" --disable-warning=ExperimentalWarning program.ts; }
keeps() { # whether a start with a filled cache is much cheaper than one without
  read -r cpu memory <<<"$(run "$1")"
  NODE_COMPILE_CACHE="$dir/cache" run "$1" >"$dir/log"
  read -r less_cpu less_memory <<<"$(NODE_COMPILE_CACHE="$dir/cache" run "$1")"
  echo "$cpu ms, $memory MB; with the cache $less_cpu ms, $less_memory MB" >&2
  ((less_cpu * 3 < cpu && less_memory * 3 < memory * 2)) && echo yes || echo no
}
check 'Node 22.22.0' "$(keeps 22.22.0)" no
check 'Node 24.21.0' "$(keeps 24.21.0)" yes
check 'Node 26.10.0' "$(keeps 26.10.0)" yes
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
