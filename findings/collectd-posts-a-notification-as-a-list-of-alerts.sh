#!/usr/bin/env bash
# The plugin write_http of collectd posts a notification as a list with one alert, whose text is in annotations.summary
# and whose severity is the word FAILURE among its labels. With Format "Command", whose values are lines of text, it
# posts the same JSON, and declares it as text/plain.
# Guess: an object with message and severity, and for "Command" a line that begins with PUTNOTIF.
# Seen with collectd 5.12.0 (Debian 12).
# A gateway that wants a JSON object refuses the one, and shows the other on the phone as it is. Its page should say
# so, or a template should be able to begin at a list.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
python=$(command -v python3) || { echo 'no python3 here'; exit 2; }
cd "$dir" || exit 2
have apt-get download -qq collectd-core=5.12.0-14 libyajl2 libltdl7 libcurl3-gnutls
for package in ./*.deb; do have dpkg -x "$package" .; done
collectd=(env LD_LIBRARY_PATH="$(echo "$dir"/usr/lib/*-linux-gnu)" "$dir/usr/sbin/collectd")
have "${collectd[@]}" -h
cat >recorder.mjs <<'JS'
import { renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  const text = JSON.stringify(JSON.parse(body, (key, value) => key === 'startsAt' ? undefined : value));
  writeFileSync('new', `${req.headers['content-type']} ${text}\n`);
  renameSync('new', `.${req.url}`);
  res.writeHead(201).end();
});
server.listen(0, '127.0.0.1', () => {
  writeFileSync('new', String(server.address().port));
  renameSync('new', 'port');
});
JS
node recorder.mjs &
recorder=$!
trap 'kill "$recorder" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -e port ] || sleep 0.1; done
node() {
  cat <<CONF
  <Node "$1">
    URL "http://127.0.0.1:$(cat port)/$1"
    Format "$1"
    Metrics false
    Notifications true
  </Node>
CONF
}
cat >conf <<CONF
BaseDir "$dir"
PIDFile "$dir/pid"
PluginDir "$dir/usr/lib/collectd"
TypesDB "$dir/usr/share/collectd/types.db"
Hostname "nas"
LoadPlugin unixsock
LoadPlugin write_http
<Plugin unixsock>
  SocketFile "$dir/socket"
</Plugin>
<Plugin write_http>
$(node JSON)
$(node Command)
</Plugin>
CONF
"${collectd[@]}" -f -C conf >log 2>&1 &
trap 'kill "$!" "$recorder" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -S socket ] || sleep 0.1; done
"$python" - <<'PY'
import socket, time
client = socket.socket(socket.AF_UNIX)
client.connect('socket')
line = 'PUTNOTIF message="disk full" severity=failure time=%d host=nas plugin=df type=percent_bytes\n' % time.time()
client.send(line.encode())
client.recv(99)
PY
for _ in $(seq 100); do [ -e JSON ] && [ -e Command ] || sleep 0.1; done
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
labels='"labels":{"alertname":"collectd_df_percent_bytes","instance":"nas","severity":"FAILURE","service":"collectd"}'
alerts="[{$labels,\"annotations\":{\"summary\":\"disk full\"}}]"
check 'JSON' "$(cat JSON)" "application/json $alerts"
check 'Command' "$(cat Command)" "text/plain $alerts"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
