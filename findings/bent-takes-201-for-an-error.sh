#!/usr/bin/env bash
# bent, an HTTP client of npm, takes only 200 for a success. A POST that is answered 201 is an exception called
# "Created", unless the program has named that status.
# Seen with bent 7.3.12.
# A backend that answers 201 to a send looks broken to its user, who sends again what has arrived. A gateway that passes
# the status on cannot help it, but its page can say that 201 is the success.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" bent@7.3.12
cat >"$dir/post.cjs" <<'JS'
const http = require('node:http');
const bent = require('bent');
const server = http.createServer((req, res) => {
  req.resume().on('end', () => res.writeHead(Number(req.url.slice(1)), { 'Content-Type': 'application/json' }).end('{}'));
});
server.listen(0, '127.0.0.1', async () => {
  const url = `http://127.0.0.1:${server.address().port}`;
  const attempt = (post, path) => post(url + path, { message: 'hi' }).then(JSON.stringify, (error) => error.message);
  console.log(await attempt(bent('POST', 'json'), '/200'));
  console.log(await attempt(bent('POST', 'json'), '/201'));
  console.log(await attempt(bent('POST', 'json', 201), '/201'));
  process.exit();
});
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 30 node "$dir/post.cjs" | paste -sd ' ')
check 'bent 7.3.12, answered 200, 201, and 201 where that is named' "$seen" '{} Created {}'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
