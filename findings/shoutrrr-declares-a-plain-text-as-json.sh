#!/usr/bin/env bash
# The service "generic" of shoutrrr, by which Watchtower and many programs in Go post to any URL, sends the bare text
# of a message, and declares it as application/json. With template=json in the URL it is JSON.
# Guess: {"message":"…"}, or text/plain.
# Seen with shoutrrr 0.8.0; contenttype=text/plain in the URL declares the text as what it is.
# A gateway that goes by the declared type refuses all its messages. It should take a body that is no JSON by its look
# for a text, whatever it is declared as, or name the two parameters on a page.
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
have go mod init finding
have go get github.com/containrrr/shoutrrr@v0.8.0
cat >main.go <<'GO'
package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/containrrr/shoutrrr"
)

func main() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Printf("%s %s\n", r.Header.Get("Content-Type"), body)
		w.WriteHeader(201)
	}))
	for _, more := range []string{"", "&template=json", "&contenttype=text/plain"} {
		url := strings.Replace(server.URL, "http", "generic", 1) + "/?disabletls=yes" + more
		if err := shoutrrr.Send(url, "disk full"); err != nil {
			panic(err)
		}
	}
}
GO
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 250 go run . 2>"$dir/log")
check 'shoutrrr 0.8.0' "$(sed -n 1p <<<"$seen")" 'application/json disk full'
check 'template=json' "$(sed -n 2p <<<"$seen")" 'application/json {"message":"disk full"}'
check 'contenttype=text/plain' "$(sed -n 3p <<<"$seen")" 'text/plain disk full'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
