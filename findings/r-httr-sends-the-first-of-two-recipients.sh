#!/usr/bin/env bash
# POST of R's httr writes a list as a multipart form, and of a field with two values it sends the first; a warning
# speaks of charToRaw. With encode = "form" the same call is an error, and with encode = "json" both are sent.
# Guess: the field is repeated, or the call fails.
# Seen with httr 1.4.5, curl 5.0.0 and R 4.2.2 (Debian 12).
# The first of two people gets the message, and the script gets its 201. A gateway cannot know, so a page that shows R
# should show encode = "json".
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
have apt-get download -qq r-base-core=4.2.2.20221110-2 r-cran-httr=1.4.5+dfsg-1 r-cran-curl=5.0.0+dfsg-1 \
  r-cran-jsonlite=1.8.4+dfsg-1 r-cran-openssl r-cran-askpass r-cran-sys r-cran-mime r-cran-r6 libblas3 liblapack3 libgfortran5
for package in ./*.deb; do have dpkg -x "$package" .; done
libraries=$(echo "$dir"/usr/lib/*-linux-gnu)
R() {
  R_HOME=$dir/usr/lib/R R_LIBS=$dir/usr/lib/R/site-library R_DEFAULT_PACKAGES=NULL EDITOR=vi PAGER=cat \
    LD_LIBRARY_PATH=$dir/usr/lib/R/lib:$libraries/blas:$libraries/lapack:$libraries \
    timeout 60 "$dir/usr/lib/R/bin/exec/R" --vanilla --no-echo "$@"
}
rm -f "$dir/usr/lib/R/etc/Renviron" # a link out of the folder
touch "$dir/usr/lib/R/etc/Renviron"
have R -e 'library(httr)' # needs libraries such as readline
cat >recorder.mjs <<'JS'
import { appendFileSync, renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  appendFileSync('seen', `${req.headers['content-type'].split(';')[0]} ${body.match(/\+1\d+/g).join(' ')}\n`);
  res.writeHead(201).end();
});
server.listen(0, '127.0.0.1', () => {
  writeFileSync('new', String(server.address().port));
  renameSync('new', 'port');
});
JS
node recorder.mjs &
trap 'kill "$!" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -e port ] || sleep 0.1; done
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
post() { # the status or "error", and what arrived
  rm -f seen
  local list='list(message = "hello", recipients = c("+15550100002", "+15550100003"))'
  R -e "cat(tryCatch(httr::status_code(httr::POST('http://127.0.0.1:$(cat port)', body = $list$1)), error = \\(e) 'error'))" 2>log
  [ ! -e seen ] || echo " $(cat seen)"
}
check 'POST' "$(post '')" '201 multipart/form-data +15550100002'
check 'encode = "form"' "$(post ', encode = "form"')" error
check 'encode = "json"' "$(post ', encode = "json"')" '201 application/json +15550100002 +15550100003'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
