#!/usr/bin/env bash
# Guess: OpenClaw's Signal client shows of an answer that is an error the words, or else the body or the status. It shows
# the words of `{"error":{"message":…}}`, and the code if there is one. Of `{"error":"words"}` it shows neither the words
# nor the status, only "Signal RPC unknown: Signal RPC error", and of `{"message":"words"}` or text the status alone.
# Seen with OpenClaw 2026.9.6 and its plugin @openclaw/signal (transport external-native, without a model). A gateway that
# refuses a call tells why only if its sentence is the `message` of a JSON-RPC error, whatever the HTTP status is.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
node="node-$(node -p 'process.platform + "-" + process.arch')"
npm install --silent --ignore-scripts --no-audit --no-fund --prefix "$dir" openclaw@2026.9.6 @openclaw/signal@2026.9.6 \
  "$node@26.10.0" >"$dir/log" 2>&1 || {
  echo 'cannot be had: openclaw@2026.9.6'
  exit 2
}
cat >"$dir/send.mjs" <<'JS'
import { sendMessageSignal } from '@openclaw/signal/dist/api.js';
import http from 'node:http';
let status, body;
const server = http.createServer((req, res) => {
  req.resume().on('end', () => res.writeHead(status, { 'Content-Type': 'application/json' }).end(body));
});
await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
const transport = { kind: 'external-native', url: `http://127.0.0.1:${server.address().port}` };
const cfg = { channels: { signal: { enabled: true, account: '+15550100001', transport } } };
const bodies = [
  '{"error":{"code":-32000,"message":"the words"}}',
  '{"error":{"message":"the words"}}',
  '{"error":"the words"}',
  '{"message":"the words"}',
  'the words',
];
for (status of [403, 200]) {
  for (body of bodies) {
    const seen = await sendMessageSignal('+15550100002', 'hi', { cfg, timeoutMs: 20_000 }).then(() => 'sent', String);
    console.log(`${status} ${body} gives ${seen}`);
  }
}
process.exit();
JS
cd "$dir" || exit 1
HOME="$dir" timeout 100 "node_modules/$node/bin/node" send.mjs 2>log | tee seen
diff seen - <<'SEEN' || { tail -n 20 log; echo CHANGED; exit 1; }
403 {"error":{"code":-32000,"message":"the words"}} gives Error: Signal RPC -32000: the words
403 {"error":{"message":"the words"}} gives Error: Signal RPC unknown: the words
403 {"error":"the words"} gives Error: Signal RPC unknown: Signal RPC error
403 {"message":"the words"} gives Error: Signal RPC returned invalid response envelope (status 403)
403 the words gives Error: Signal RPC returned malformed JSON (status 403)
200 {"error":{"code":-32000,"message":"the words"}} gives Error: Signal RPC -32000: the words
200 {"error":{"message":"the words"}} gives Error: Signal RPC unknown: the words
200 {"error":"the words"} gives Error: Signal RPC unknown: Signal RPC error
200 {"message":"the words"} gives Error: Signal RPC returned invalid response envelope (status 200)
200 the words gives Error: Signal RPC returned malformed JSON (status 200)
SEEN
