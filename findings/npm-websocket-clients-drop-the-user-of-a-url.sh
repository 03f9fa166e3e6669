#!/usr/bin/env bash
# ws://user:password@host means Basic for some WebSocket clients of npm, and nothing for others: ws and faye-websocket
# send it, the package called websocket drops it without a word, and undici sends it only after a first 401.
# Seen with ws 8.23.0, faye-websocket 0.11.4, undici 7.30.2 (7.16.0 never sends it) and websocket 1.0.35.
# A gateway that answers 401 should say that no credential came, so that the user looks at the client and not the token.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" ws@8.23.0 faye-websocket@0.11.4 undici@7.30.2 websocket@1.0.35
cat >"$dir/dial.cjs" <<'JS'
const server = require('node:http').createServer();
let sent;
server.on('upgrade', (req, socket) => {
  socket.end('HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 0\r\n\r\n');
  sent.push(req.headers.authorization ?? 'nothing');
});
server.listen(0, '127.0.0.1', async () => {
  const url = `ws://api:TOKEN@127.0.0.1:${server.address().port}/`;
  const on = (client) => (client.on?.('error', () => {}), client.addEventListener?.('error', () => {}));
  const ways = {
    'ws': () => on(new (require('ws'))(url)),
    'faye-websocket': () => on(new (require('faye-websocket').Client)(url)),
    'undici': () => on(new (require('undici').WebSocket)(url)),
    'websocket': () => {
      const client = new (require('websocket').client)();
      client.on('connectFailed', () => {});
      client.connect(url);
    },
  };
  for (const [name, dial] of Object.entries(ways)) {
    sent = [];
    dial();
    await new Promise((done) => setTimeout(done, 1000));
    console.log(`${name} ${sent.join(' then ')}`);
  }
  process.exit();
});
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 30 node "$dir/dial.cjs" 2>/dev/null | paste -sd ',')
basic='Basic YXBpOlRPS0VO'
check 'sent' "$seen" "ws $basic,faye-websocket $basic,undici nothing then $basic,websocket nothing"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
