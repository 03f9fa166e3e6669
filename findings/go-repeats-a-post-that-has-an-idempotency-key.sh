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
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

func serve(listener net.Listener, requests *int) {
	for first := true; ; first = false {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		reader := bufio.NewReader(conn)
		for n := 1; ; n++ {
			req, err := http.ReadRequest(reader)
			if err != nil {
				break
			}
			io.Copy(io.Discard, req.Body)
			*requests++
			if first && n == 2 { // taken, and no answer
				break
			}
			fmt.Fprint(conn, "HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")
		}
		conn.Close()
	}
}

func main() {
	for _, key := range []string{"", "7"} {
		listener, _ := net.Listen("tcp", "127.0.0.1:0")
		requests, failed := 0, false
		go serve(listener, &requests)
		client := http.Client{Transport: &http.Transport{}, Timeout: 10 * time.Second}
		for range 2 {
			req, _ := http.NewRequest("POST", "http://"+listener.Addr().String(), strings.NewReader("hi"))
			if key != "" {
				req.Header.Set("Idempotency-Key", key)
			}
			res, err := client.Do(req)
			if failed = err != nil; !failed {
				res.Body.Close()
			}
			time.Sleep(200 * time.Millisecond)
		}
		fmt.Printf("key %q: %d requests for two, error %v\n", key, requests, failed)
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
check 'net/http' "$seen" 'key "": 2 requests for two, error true,key "7": 3 requests for two, error false'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
