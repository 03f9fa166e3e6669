#!/usr/bin/env bash
# gin's BindJSON reads one JSON value and ignores what follows it, whatever that is. The body "null" is accepted, too, and
# a field that is null keeps what it had: {"text":"a","text":null} is "a", where JavaScript and Python read null.
# Seen with gin 1.11.0 on encoding/json.
# A gateway that parses a body with its own language sees something else than such a backend. It must refuse bodies
# that two parsers may read differently, or forward what it has written itself.
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
have go get github.com/gin-gonic/gin@v1.11.0
cat >main.go <<'GO'
package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/gin-gonic/gin"
)

func main() {
	gin.SetMode(gin.ReleaseMode)
	router := gin.New()
	router.POST("/", func(c *gin.Context) {
		var body struct{ Text string }
		err := c.BindJSON(&body)
		fmt.Printf("%q %v\n", body.Text, err == nil)
	})
	server := httptest.NewServer(router)
	for _, body := range []string{`{"text":"a"} and so on`, `null`, `{"text":"a","text":null}`} {
		if _, err := http.Post(server.URL, "application/json", strings.NewReader(body)); err != nil {
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
seen=$(timeout 300 go run . 2>"$dir/log" | paste -sd ',')
check 'gin 1.11.0' "$seen" '"a" true,"" true,"a" true'
check 'node' "$(node -p "JSON.parse('{\"text\":\"a\",\"text\":null}').text")" null
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
