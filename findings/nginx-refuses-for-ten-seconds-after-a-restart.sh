#!/usr/bin/env bash
# If the name of an upstream has two addresses, nginx sets both aside for 10 s (fail_timeout) when both refuse a connection
# once: "no live upstreams", 502 for each request, though the program behind it runs again. With one address it tries
# each time. localhost has two addresses, 127.0.0.1 and ::1; here 127.0.0.2 stands for the second.
# Seen with nginx 1.22.1 (Debian 12).
# A restart of a gateway costs 10 s of 502s. Write 127.0.0.1 in proxy_pass, or an upstream with max_fails=0.
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
have apt-get download -qq nginx=1.22.1-9+deb12u11
have dpkg -x nginx_*.deb .
free() { node -e 'const s = require("net").createServer().listen(0, "127.0.0.1", () => (console.log(s.address().port), s.close()))'; }
front=$(free) back=$(free)
cat >nginx.conf <<NGINX
daemon off; pid $dir/pid; error_log $dir/log; events {}
http {
  access_log off; client_body_temp_path a; proxy_temp_path b; fastcgi_temp_path c; uwsgi_temp_path d; scgi_temp_path e;
  upstream two { server 127.0.0.1:$back; server 127.0.0.2:$back; }
  upstream one { server 127.0.0.1:$back; }
  server { listen 127.0.0.1:$front; location /two { proxy_pass http://two; } location /one { proxy_pass http://one; } }
}
NGINX
usr/sbin/nginx -p "$dir" -c "$dir/nginx.conf" -e "$dir/log" 2>/dev/null &
nginx=$!
trap 'kill "$nginx" $! 2>/dev/null; wait; rm -rf "$dir"' EXIT
status() { curl -s -m 10 -o /dev/null -w '%{http_code}' -d x "http://127.0.0.1:$front/$1"; }
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
for _ in $(seq 100); do status one | grep -q 502 && break; sleep 0.1; done
check 'while the upstream is away' "$(status two) $(status one)" '502 502'
node -e "require('http').createServer((req, res) => req.resume().on('end', () => res.end())).listen($back, '127.0.0.1')" &
for _ in $(seq 50); do status one | grep -q 200 && break; sleep 0.1; done
check 'when it is back, two addresses and one' "$(status two) $(status one)" '502 200'
sleep 12
check '12 s later' "$(status two) $(status one)" '200 200'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
