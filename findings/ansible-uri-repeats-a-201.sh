#!/usr/bin/env bash
# Guess: Ansible's `uri` takes any 2xx for a success, and `retries: 3` sends three times at most. It takes 200 alone: a
# POST that is answered with 201 has failed, and with `until: it is succeeded` and `retries: 3` it is sent four times,
# while the task reports three attempts. `status_code: 201` is what makes it one.
# Seen with ansible-core 2.19.4.
# A gateway whose answer to a send is 201 delivers the message four times, and the playbook stops all the same. A page
# about Ansible needs `status_code`.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have python3 -m pip install -q --target "$dir/py" ansible-core==2.19.4
cat >"$dir/recorder.mjs" <<'JS'
import { appendFileSync, renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  appendFileSync('seen', `${JSON.stringify([req.url, body])}\n`);
  res.writeHead(Number(/[0-9]+/.exec(req.url)), { 'Content-Type': 'application/json' }).end('{"timestamp":"1"}\n');
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
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
play() { # a task that posts to $1, with the further settings $2; prints how often it posted, and how it ended
  rm -f "$dir/seen"
  cat >"$dir/play.yml" <<YAML
- hosts: localhost
  gather_facts: false
  tasks:
    - uri: { url: "$url/$1", method: POST, body: Hello, headers: { Content-Type: text/plain }${2:-} }
      register: it
      until: it is succeeded
      retries: 3
      delay: 0
      ignore_errors: true
    - debug: { msg: "{{ 'failed' if it.failed else 'succeeded' }}, attempts {{ it.attempts }}" }
YAML
  HOME="$dir" PYTHONPATH="$dir/py" timeout 100 python3 -m ansible playbook -c local -i localhost, \
    -e ansible_python_interpreter="$(command -v python3)" "$dir/play.yml" >"$dir/out" 2>&1
  echo "$(wc -l <"$dir/seen") posts, $(sed -n 's/.*"msg": "\([a-z]*, attempts [0-9]*\)".*/\1/p' "$dir/out")"
}
check '200' "$(play 200)" '1 posts, succeeded, attempts 1'
check '201' "$(play 201)" '4 posts, failed, attempts 3'
check '201, status_code: 201' "$(play 201 ', status_code: 201')" '1 posts, succeeded, attempts 1'
[ "$changed" = 0 ] || { cat "$dir/out"; echo 'CHANGED'; }
exit "$changed"
