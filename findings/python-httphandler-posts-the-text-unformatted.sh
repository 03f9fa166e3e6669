#!/usr/bin/env bash
# logging.handlers.HTTPHandler of Python posts the fields of a log record as a form. The text is in "msg", as it was
# before formatting; what belongs into it is in "args", as Python source. There is no field with the finished line.
# Seen with CPython 3.11.7.
# A template of {{msg}} shows "disk %s is full" on the phone. A subclass whose mapLogRecord() returns
# {"message": self.format(record)} posts the line.
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
cat >"$dir/recorder.mjs" <<'JS'
import { appendFileSync, renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  appendFileSync('seen', `${JSON.stringify([req.url, req.headers.authorization ?? '-', body])}\n`);
  res.writeHead(Number(/[0-9]+/.exec(req.url) ?? 201), { 'Content-Type': 'application/json' }).end('{}\n');
});
server.listen(0, '127.0.0.1', () => {
  writeFileSync('new', String(server.address().port));
  renameSync('new', 'port');
});
JS
(cd "$dir" && exec node recorder.mjs) &
trap 'kill "$!" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -e "$dir/port" ] || sleep 0.1; done
url=http://127.0.0.1:$(cat "$dir/port")
cat >"$dir/log.py" <<'PY'
import logging, logging.handlers, sys
logger = logging.getLogger('disk')
class Finished(logging.handlers.HTTPHandler):
    def mapLogRecord(self, record):
        return {'message': self.format(record)}
for kind, path in ((logging.handlers.HTTPHandler, '/plain'), (Finished, '/finished')):
    handler = kind(sys.argv[1], path, method='POST')
    logger.addHandler(handler)
    logger.error('disk %s is full', 'sda1')
    logger.removeHandler(handler)
PY
timeout 20 "$python" "$dir/log.py" "${url#http://}" || exit 2
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
fields() { grep "^\\[\"/$1\"" "$dir/seen" | grep -oE '(^|[&"])(msg|args|message)=[^&"]*' | tr -d '&"' | paste -sd ' '; }
"$python" --version
check 'the handler posts' "$(fields plain)" 'msg=disk+%25s+is+full args=%28%27sda1%27%2C%29'
check 'the subclass posts' "$(fields finished)" 'message=disk+sda1+is+full'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
