#!/usr/bin/env bash
# One line of an .env file has a different value for each program that reads it. docker compose (compose-go) replaces
# $word, the packages dotenv of npm and PyPI and Node's --env-file do not; an unquoted "#" ends a value only after a
# space, except for npm's dotenv and Node, where it always does.
# Seen with compose-go 2.9.1, dotenv 17.2.3 (npm), python-dotenv 1.2.1 and Node 20.20.2.
# A secret for an .env file must be of letters and digits alone, or it works in one place and is wrong in another.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" dotenv@17.2.3 node@20.20.2
have python3 -m pip install -q --target "$dir/py" python-dotenv==1.2.1
cd "$dir" || exit 2
have go mod init finding
have go get github.com/compose-spec/compose-go/v2/dotenv@v2.9.1
printf 'A=ab$cd\nB=ab#cd\nC=ab#cd #\n' >"$dir/.env"
cat >main.go <<'GO'
package main

import (
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/dotenv"
)

func main() {
	file, err := os.Open(".env")
	if err != nil {
		panic(err)
	}
	values, err := dotenv.Parse(file)
	fmt.Println(values["A"], values["B"], values["C"], err)
}
GO
cat >"$dir/read.cjs" <<'JS'
const { A, B, C } = require('dotenv').parse(require('node:fs').readFileSync('.env'));
console.log(A, B, C);
JS
cat >"$dir/read.py" <<'PY'
import dotenv
values = dotenv.dotenv_values('.env')
print(values['A'], values['B'], values['C'])
PY
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
check 'compose-go' "$(timeout 300 go run . 2>"$dir/log")" 'ab ab#cd ab#cd <nil>'
check 'dotenv (npm)' "$(node "$dir/read.cjs" | tail -1)" 'ab$cd ab ab'
check 'python-dotenv' "$(PYTHONPATH="$dir/py" python3 "$dir/read.py")" 'ab$cd ab#cd ab#cd'
node=$dir/node_modules/.bin/node
check 'Node --env-file' "$("$node" --env-file=.env -p 'const { A, B, C } = process.env; `${A} ${B} ${C}`')" 'ab$cd ab ab'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
