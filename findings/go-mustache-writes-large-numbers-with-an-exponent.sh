#!/usr/bin/env bash
# In a Mustache template of Go, data from JSON has numbers as float64: a million is written "1e+06", a timestamp
# "1.795866619765e+12", and null is "&lt;nil&gt;", an escaped "<nil>".
# Seen with cbroglie/mustache 1.4.0.
# Alerts of programs in Go often carry such texts. A gateway's own templates should write numbers as they were sent.
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
have go get github.com/cbroglie/mustache@v1.4.0
cat >main.go <<'GO'
package main

import (
	"encoding/json"
	"fmt"

	"github.com/cbroglie/mustache"
)

func main() {
	var data map[string]any
	if err := json.Unmarshal([]byte(`{"count":1000000,"at":1795866619765,"few":21,"none":null}`), &data); err != nil {
		panic(err)
	}
	text, err := mustache.Render("{{count}} {{at}} {{few}} {{none}}", data)
	fmt.Println(text, err)
}
GO
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 300 go run . 2>"$dir/log")
check 'cbroglie/mustache 1.4.0' "$seen" '1e+06 1.795866619765e+12 21 &lt;nil&gt; <nil>'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
