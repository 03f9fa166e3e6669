#!/usr/bin/env bash
# Deno's node:http sends a POST a second time, on a new connection, if the kept connection ends before a response has
# begun. The peer may have acted on the first one. Node reports an error and sends nothing again.
# Seen with Deno 2.9.6; Node 20.20 and 26.10 send once.
# A gateway that promises to send nothing twice must not keep connections to its backend on Deno.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
get() {
  npm install --silent --no-audit --no-fund --prefix "$dir/$1" "$1" >"$dir/log" 2>&1 || {
    echo "$1 cannot be had"
    exit 2
  }
}
node() { timeout 20 "$dir/node@$1/node_modules/.bin/node" "${@:2}"; }
deno() { NO_COLOR=1 DENO_DIR="$dir/cache" timeout 20 "$dir/deno@2.9.6/node_modules/.bin/deno" run "$@"; }
cat >"$dir/post.mjs" <<'JS'
import http from 'node:http';
import net from 'node:net';

const seen = [];
let connections = 0;
const server = net.createServer((socket) => {
  const id = ++connections;
  let requests = 0;
  socket.on('error', () => {}).on('data', (bytes) => {
    const path = /^POST (\S+) /.exec(String(bytes))?.[1];
    if (!path) return;
    seen.push(`${path} on connection ${id}`);
    if (id === 1 && ++requests === 2) socket.end(); // it has the whole request, and closes
    else socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok');
  });
});
server.listen(0, '127.0.0.1', async () => {
  const agent = new http.Agent({ keepAlive: true });
  const post = (path) =>
    new Promise((done) => {
      const to = { host: '127.0.0.1', port: server.address().port, agent, method: 'POST', path };
      http.request(to, (res) => res.resume().on('end', () => done(res.statusCode)))
        .on('error', ({ code }) => done(code)).end('x');
    });
  const answers = [await post('/one')];
  await new Promise((done) => setTimeout(done, 200)); // the agent has the connection back
  answers.push(await post('/two'));
  console.log(`${seen.join(', ')}; the client sees ${answers.join(', ')}`);
  process.exit();
});
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
for version in 20.20.2 26.10.0; do
  get "node@$version"
  once='/one on connection 1, /two on connection 1; the client sees 200, ECONNRESET'
  check "Node $version" "$(node "$version" "$dir/post.mjs")" "$once"
done
get deno@2.9.6
twice='/one on connection 1, /two on connection 1, /two on connection 2; the client sees 200, 200'
check 'Deno 2.9.6' "$(deno -A "$dir/post.mjs")" "$twice"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
