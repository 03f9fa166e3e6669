#!/usr/bin/env bash
# Guess: a phone number without quotes is a text in YAML because of its plus, at least where the program wants a text.
# It is a number, and its plus is gone: yaml.v3 alone keeps it where a text is wanted, and compose, which reads its file
# with yaml.v3, writes a variable of a mapping in `environment` without it. A number that begins with 0 becomes another
# one with three of the readers, and PyYAML makes 1350 of the text 22:30.
# Seen with PyYAML 6.0.3, ruamel.yaml 0.18.15, js-yaml 4.1.0, yaml 2.8.1 (npm), yaml.v3 3.0.1, goccy/go-yaml 1.18.0 and
# compose-go 2.9.1.
# A gateway gets the recipient as a number, or a text without its plus, from Ansible, Home Assistant or its own compose
# file. Its refusal should say that the plus is missing, and pages should quote each number.
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
have npm install --silent --no-audit --no-fund js-yaml@4.1.0 yaml@2.8.1
have python3 -m pip install -q --target "$dir/py" PyYAML==6.0.3 ruamel.yaml==0.18.15
have go mod init finding
have go get github.com/compose-spec/compose-go/v2/cli@v2.9.1 github.com/goccy/go-yaml@v1.18.0 gopkg.in/yaml.v3@v3.0.1
printf '%s\n' '- +15550100001' '- 0155501' '- 22:30' >list.yaml
cat >compose.yaml <<'YAML'
name: finding
services:
  one:
    image: finding
    environment:
      A: +15550100001
      B: 0155501
      C: 22:30
  two:
    image: finding
    environment:
      - A=+15550100001
      - B=0155501
      - C=22:30
YAML
cat >main.go <<'GO'
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
	goccy "github.com/goccy/go-yaml"
	"gopkg.in/yaml.v3"
)

func show(name string, value any, err error) {
	text, _ := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s: %s\n", name, text)
}

func main() {
	list, _ := os.ReadFile("list.yaml")
	var a, b []any
	show("yaml.v3", &a, yaml.Unmarshal(list, &a))
	show("goccy", &b, goccy.Unmarshal(list, &b))
	var c, d []string
	show("yaml.v3, texts wanted", &c, yaml.Unmarshal(list, &c))
	show("goccy, texts wanted", &d, goccy.Unmarshal(list, &d))
	options, err := cli.NewProjectOptions([]string{"compose.yaml"})
	if err != nil {
		panic(err)
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		panic(err)
	}
	for _, name := range []string{"one", "two"} {
		e := project.Services[name].Environment
		show("compose, "+name, []*string{e["A"], e["B"], e["C"]}, nil)
	}
}
GO
cat >read.py <<'PY'
import json, yaml
from ruamel.yaml import YAML
text = open('list.yaml').read()
print('PyYAML:', json.dumps(yaml.safe_load(text), separators=(',', ':')))
print('ruamel.yaml:', json.dumps(YAML(typ='safe', pure=True).load(text), separators=(',', ':')))
PY
cat >read.mjs <<'JS'
import { readFileSync } from 'node:fs';
import jsYaml from 'js-yaml';
import { parse } from 'yaml';
const text = readFileSync('list.yaml', 'utf8');
console.log(`js-yaml: ${JSON.stringify(jsYaml.load(text))}`);
console.log(`yaml: ${JSON.stringify(parse(text))}`);
JS
have go mod tidy
{ PYTHONPATH="$dir/py" python3 read.py; node read.mjs; timeout 250 go run . 2>"$dir/log"; } | tee seen
diff seen - <<'SEEN' || { cat "$dir/log"; echo CHANGED; exit 1; }
PyYAML: [15550100001,56129,1350]
ruamel.yaml: [15550100001,155501,"22:30"]
js-yaml: [15550100001,155501,"22:30"]
yaml: [15550100001,155501,"22:30"]
yaml.v3: [15550100001,56129,"22:30"]
goccy: [15550100001,56129,"22:30"]
yaml.v3, texts wanted: ["+15550100001","0155501","22:30"]
goccy, texts wanted: ["15550100001","56129","22:30"]
compose, one: ["15550100001","56129","22:30"]
compose, two: ["+15550100001","0155501","22:30"]
SEEN
