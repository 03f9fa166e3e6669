#!/usr/bin/env bash
# The Http transport of winston, a logger of npm, posts each log line as JSON. It takes any answer but 200 for an error:
# the line has arrived, and the transport emits the warning "Invalid HTTP Status Code: 201".
# Seen with winston 3.19.0.
# A program that logs through it to a backend that answers 201 reports a failure for each message that was sent. It
# also shows that "message" is the field in which loggers put their text.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" winston@3.19.0
cat >"$dir/log.cjs" <<'JS'
const http = require('node:http');
const winston = require('winston');
const seen = [];
const server = http.createServer((req, res) => {
  let body = '';
  req.on('data', (chunk) => body += chunk).on('end', () => {
    seen.push(JSON.parse(body).message);
    res.writeHead(201).end('{}');
  });
});
server.listen(0, '127.0.0.1', () => {
  const transport = new winston.transports.Http({ host: '127.0.0.1', port: server.address().port, path: '/v2/send' });
  transport.on('warn', ({ message }) => {
    console.log(`sent "${seen}", warned "${message}"`);
    process.exit();
  });
  winston.createLogger({ transports: [transport] }).error('disk full');
});
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 10 node "$dir/log.cjs")
check 'winston 3.19.0' "$seen" 'sent "disk full", warned "Invalid HTTP Status Code: 201"'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
