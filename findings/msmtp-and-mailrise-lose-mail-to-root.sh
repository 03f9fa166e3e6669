#!/usr/bin/env bash
# Guess: mailrise's "*@*" takes mail to any address, and one that it does not take it refuses, so that the sender fails.
# cron writes to `root`; msmtp as sendmail adds no domain to it; mailrise answers that with 250, and then throws the
# mail away with a line in its log. msmtp's exit status is 0. With `aliases` in msmtprc (`default: root@nas.example`) it
# arrives.
# Seen with msmtp 1.8.23 (Debian 12) and mailrise 1.4.0.
# Each of the two is right by itself, and no program ever learns that nothing was sent. A page that recommends mailrise
# for cron needs the line with the aliases.
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
have apt-get download -qq msmtp=1.8.23-1 libgsasl18=2.2.0-1+deb12u2 libsecret-1-0=0.20.5-3 libntlm0=1.6-4 libgssglue1=0.7-1.1 \
  libidn12=1.41-1
for package in ./*.deb; do have dpkg -x "$package" .; done
have python3 -m pip install -q --target "$dir/py" mailrise==1.4.0
cat >recorder.mjs <<'JS'
import { appendFileSync, renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  const { title, message } = JSON.parse(body);
  appendFileSync('seen', `[${title}] ${message.trim()}\n`);
  res.writeHead(200).end();
});
server.listen(0, '127.0.0.1', () => {
  const free = net.createServer().listen(0, '127.0.0.1', () => {
    writeFileSync('new', `${server.address().port} ${free.address().port}\n`);
    free.close(() => renameSync('new', 'ports'));
  });
});
JS
node recorder.mjs &
trap 'kill "$!" 2>/dev/null; rm -rf "$dir"' EXIT
recorder=$!
for _ in $(seq 100); do [ -e ports ] || sleep 0.1; done
read -r web smtp <ports
cat >mailrise.conf <<YAML
listen: { host: 127.0.0.1, port: $smtp }
configs:
  "*@*": { urls: ["json://127.0.0.1:$web/"] }
YAML
PYTHONPATH="$dir/py" python3 "$dir/py/bin/mailrise" mailrise.conf >mailrise.log 2>&1 &
trap 'kill "$recorder" "$!" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do
  node -e 'require("node:net").connect(+process.argv[1], "127.0.0.1").on("error", () => process.exit(1)).end()' "$smtp" && break
  sleep 0.1
done
echo 'default: root@nas.example' >aliases
send() { # a mail as cron sends it, to $1, with the further line $2 in msmtprc; prints what msmtp said and what arrived
  : >seen
  printf '%s\n' 'account default' 'host 127.0.0.1' "port $smtp" 'from nas@nas.example' "logfile $dir/msmtp.log" "${2:-}" >msmtprc
  : >msmtp.log
  printf 'From: root (Cron Daemon)\nTo: root\nSubject: backup failed\n\nno space left\n' |
    LD_LIBRARY_PATH=$(echo "$dir"/usr/lib/*-linux-gnu) HOME="$dir" timeout 20 usr/bin/msmtp -C msmtprc -FCronDaemon -i -B8BITMIME -oem "$1"
  echo "exit status $?, $(grep -o 'smtpstatus=[0-9]*' msmtp.log), $(sleep 3; wc -l <seen) arrived"
}
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
said='exit status 0, smtpstatus=250'
check 'root' "$(send root)" "$said, 0 arrived"
check 'root@nas.example' "$(send root@nas.example)" "$said, 1 arrived"
check 'root, with aliases' "$(send root "aliases $dir/aliases")" "$said, 1 arrived"
check 'the log of mailrise' "$(cut -d: -f5- mailrise.log)" 'Not a valid Mailrise address: root'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
