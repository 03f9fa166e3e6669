#!/usr/bin/env bash
# Guess: Hermes logs an error if the server refuses its stream of events with a 403, and waits longer before each further
# try, as it does after a connection that fails. It logs "Signal SSE: connected" and no error, because it does not look at
# the status, and tries again after about two seconds, for ever.
# Seen with hermes-agent 0.19.0 (its Signal adapter, without a model). Whoever looks for the reason why it receives nothing
# finds it in the server's log only, a line every two seconds.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --target "$dir/py" hermes-agent==0.19.0 >"$dir/log" 2>&1 || {
  echo 'cannot be had: hermes-agent==0.19.0'
  exit 2
}
cat >"$dir/listen.py" <<'PY'
import asyncio, logging, socket, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from gateway.config import PlatformConfig
from gateway.platforms.signal import SignalAdapter

tries = []

class Daemon(BaseHTTPRequestHandler):
    def do_GET(self):
        refused = self.path.startswith('/api/v1/events')
        if refused:
            tries.append(time.monotonic())
        self.send_response(403 if refused else 200)
        self.send_header('Content-Length', '0')
        self.end_headers()
    def log_message(self, *_):
        pass

class Kept(logging.Handler):
    lines = []
    def emit(self, record):
        if record.getMessage().startswith('Signal SSE:'):
            self.lines.append(f'{record.levelname} {record.getMessage()}')

async def listen(port, until):
    Kept.lines.clear()
    extra = {'http_url': f'http://127.0.0.1:{port}', 'account': '+15550100001'}
    adapter = SignalAdapter(PlatformConfig(enabled=True, extra=extra))
    await adapter.connect()
    for _ in range(600):
        if until():
            break
        await asyncio.sleep(0.1)
    await adapter.disconnect()

logging.getLogger().addHandler(Kept())
logging.getLogger('gateway.platforms.signal').setLevel(logging.INFO)
server = ThreadingHTTPServer(('127.0.0.1', 0), Daemon)
threading.Thread(target=server.serve_forever, daemon=True).start()
asyncio.run(listen(server.server_port, lambda: len(tries) == 6))
pauses = [later - one for one, later in zip(tries, tries[1:])]
print('six answers 403, and the log:', ', '.join(sorted(set(Kept.lines))))
print('pauses of', ', '.join(f'{one:.1f} s' for one in pauses))
as_described = set(Kept.lines) == {'INFO Signal SSE: connected'} and len(pauses) == 5 and all(1.5 < one < 4 for one in pauses)
print('as described' if as_described else 'CHANGED')
raise SystemExit(0 if as_described else 1)
PY
HOME="$dir" PYTHONPATH="$dir/py" timeout 100 python3 "$dir/listen.py" 2>"$dir/log" && exit 0
tail -n 20 "$dir/log"
exit 1
