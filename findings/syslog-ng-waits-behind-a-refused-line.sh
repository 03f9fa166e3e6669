#!/usr/bin/env bash
# Guess: a line that the server of syslog-ng's http() refuses with 400 is dropped, after three tries at most, and the
# next one goes out. It is posted again after each time-reopen (60 s unless set), and all later lines wait behind it;
# retries(3) changes nothing. `response-action(400 => drop)` does. So it is with each status of 300 and more that was
# tried, but for 422 (one try) and 504 (three).
# Seen with syslog-ng 3.38.1 (Debian 12).
# One line that a gateway refuses ends all alerts of that machine. A page about syslog-ng needs response-action for each
# status of a refusal.
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
have apt-get download -qq syslog-ng-core=3.38.1-5+deb12u1 syslog-ng-mod-http=3.38.1-5+deb12u1 libivykis0=0.42.4-1 \
  libnet1=1.1.6+dfsg-3.2 libjson-c5=0.16-2 libpcre3=2:8.39-15 libwrap0=7.6.q-32 libcurl4=7.88.1-10+deb12u15
for package in ./*.deb; do have dpkg -x "$package" .; done
lib=$(echo "$dir"/usr/lib/*-linux-gnu)
export LD_LIBRARY_PATH="$dir/usr/lib/syslog-ng:$lib:$(echo "$dir"/lib/*-linux-gnu)"
cat >run.mjs <<'JS'
import { spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import http from 'node:http';
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const seen = {};
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  (seen[req.url] ??= []).push(body);
  res.writeHead(body === 'refuse me' ? Number(req.url.slice(1, 4)) : 201).end();
});
await new Promise((done) => server.listen(0, '127.0.0.1', done));
const url = `http://127.0.0.1:${server.address().port}`;
const ways = { '/400/retries': 'retries(3)', '/400/action': 'response-action(400 => drop)' };
for (const status of [302, 400, 401, 403, 404, 413, 422, 429, 500, 502, 503, 504]) ways[`/${status}`] = '';
writeFileSync('lines', '');
writeFileSync('syslog-ng.conf', `@version: 3.38
source lines { file("${process.cwd()}/lines" follow-freq(0.2) flags(no-parse)); };
${Object.entries(ways).map(([path, settings]) => `log {
  source(lines);
  destination { http(url("${url}${path}") method("POST") body("$\{MSG}") time-reopen(1) ${settings}); };
};`).join('\n')}
`);
const args = ['-F', '--no-caps', '-f', 'syslog-ng.conf', '-R', 'persist', '-p', `${process.cwd()}/pid`, '-c', 'control'];
const child = spawn('usr/sbin/syslog-ng', [...args, '--module-path', process.argv[2]], { stdio: ['ignore', 2, 2] });
await pause(2500);
writeFileSync('lines', 'one\nrefuse me\ntwo\nthree\n', { flag: 'a' });
await pause(12000);
child.kill('SIGKILL');
for (const [path, settings] of Object.entries(ways)) {
  const lines = seen[path] ?? [];
  const refused = lines.filter((line) => line === 'refuse me').length;
  const others = lines.filter((line) => line !== 'refuse me');
  console.log(`${`${path.slice(1, 4)} ${settings}`.trim()}: ${refused > 5 ? 'more than five' : refused} times the refused line, and ${others}`);
}
process.exit();
JS
node run.mjs "$(dirname "$(find "$dir" -name libhttp.so)")" 2>"$dir/log" | tee seen
diff seen - <<'SEEN' || { cat "$dir/log"; echo CHANGED; exit 1; }
400 retries(3): more than five times the refused line, and one
400 response-action(400 => drop): 1 times the refused line, and one,two,three
302: more than five times the refused line, and one
400: more than five times the refused line, and one
401: more than five times the refused line, and one
403: more than five times the refused line, and one
404: more than five times the refused line, and one
413: more than five times the refused line, and one
422: 1 times the refused line, and one,two,three
429: more than five times the refused line, and one
500: more than five times the refused line, and one
502: more than five times the refused line, and one
503: more than five times the refused line, and one
504: 3 times the refused line, and one,two,three
SEEN
