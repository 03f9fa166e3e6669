#!/usr/bin/env bash
# gin answers a POST to /v2/send/, where only /v2/send is registered, with 307 and the other path. And it does not find
# a parameter with an encoded slash: /v1/groups/a%2Fb is 404 for /v1/groups/:id, unless UseRawPath is set.
# Seen with gin 1.11.0.
# A gateway that forwards the first must neither follow the redirect (a second request) nor pass it on (a client may
# send its credential to the new place, or drop the body). It must refuse the path, or remove the slash itself.
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
	router.POST("/v2/send", func(c *gin.Context) { c.Status(201) })
	router.GET("/v1/groups/:id", func(c *gin.Context) { c.Status(200) })
	server := httptest.NewServer(router)
	for _, ask := range []string{"POST /v2/send", "POST /v2/send/", "GET /v1/groups/a%2Bb", "GET /v1/groups/a%2Fb"} {
		method, path, _ := strings.Cut(ask, " ")
		req, _ := http.NewRequest(method, server.URL+path, strings.NewReader(""))
		res, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			panic(err)
		}
		fmt.Println(strings.TrimSpace(fmt.Sprint(ask, " ", res.StatusCode, " ", res.Header.Get("Location"))))
	}
}
GO
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 300 go run . 2>"$dir/log" | paste -sd ',')
check 'gin 1.11.0' "$seen" \
  'POST /v2/send 201,POST /v2/send/ 307 /v2/send,GET /v1/groups/a%2Bb 200,GET /v1/groups/a%2Fb 404'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
