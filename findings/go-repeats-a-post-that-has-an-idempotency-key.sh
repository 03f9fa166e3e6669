#!/usr/bin/env bash
# Go's net/http does not repeat a POST on a kept connection that was closed. With a header Idempotency-Key it does, at
# once and without a word, because it takes the header for a promise of the server.
# Seen with the installed Go (1.26.8 when this was written).
# A header that was added so that nothing happens twice makes it happen twice, where no server knows it. A gateway must
# not read that header as harmless, and must not close a connection after it has taken a request.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
command -v go >/dev/null || { echo 'no go here'; exit 2; }
cd "$dir" || exit 2
have go mod init finding
cat >main.go <<'GO'
package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"
)

func main() {
	for _, key := range []string{"", "7"} {
		requests, last := 0, ""
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if requests++; requests == 2 { // taken, and no answer
				conn, _, _ := w.(http.Hijacker).Hijack()
				conn.Close()
			}
		}))
		for range 2 {
			req, _ := http.NewRequest("POST", server.URL, strings.NewReader("hi"))
			if key != "" {
				req.Header.Set("Idempotency-Key", key)
			}
			if res, err := server.Client().Do(req); err != nil {
				last = "an error"
			} else {
				last = res.Status
				res.Body.Close()
			}
			time.Sleep(200 * time.Millisecond)
		}
		fmt.Printf("key %q: %d requests for two, then %s\n", key, requests, last)
	}
}
GO
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
go version
seen=$(timeout 300 go run . 2>"$dir/log" | paste -sd ',')
check 'net/http' "$seen" 'key "": 2 requests for two, then an error,key "7": 3 requests for two, then 200 OK'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
