#!/usr/bin/env bash
# Guess: a value in quotes in an INI inventory of Ansible is a text. Beside a host the quotes are removed first, and
# what is left is read as Python: "+15550100001" is a number without its plus, two of them with a comma a list of
# numbers, and a token of digits with an e in it a float. Below [all:vars] the quotes do keep the text. A filter `|
# string` comes too late.
# Seen with ansible-core 2.19.4.
# A gateway gets recipients without a plus and a token that nobody gave, from an inventory that looks right. Its refusal
# should show the recipient that it got; a page about Ansible should keep both in YAML, in quotes.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have python3 -m pip install -q --target "$dir/py" ansible-core==2.19.4
cat >"$dir/inventory.ini" <<'INI'
nas plain=+15550100001 quoted="+15550100001" twice='"+15550100001"' two="+15550100001,+15550100002" token="12345e3"
[all:vars]
group_plain=+15550100001
group_quoted="+15550100001"
INI
HOME="$dir" PYTHONPATH="$dir/py" timeout 100 python3 -m ansible inventory -i "$dir/inventory.ini" --host nas >"$dir/json" 2>"$dir/log"
node -e '
  const values = JSON.parse(require("node:fs").readFileSync(process.argv[1], "utf8"));
  for (const name of Object.keys(values).sort()) console.log(`${name}: ${JSON.stringify(values[name])}`);
' "$dir/json" | tee "$dir/seen"
HOME="$dir" PYTHONPATH="$dir/py" timeout 100 python3 -m ansible adhoc -i "$dir/inventory.ini" -c local nas -m debug \
  -a 'msg={{ quoted | string }}' 2>>"$dir/log" | sed -n 's/ *"msg": /quoted | string: /p' | tee -a "$dir/seen"
diff "$dir/seen" - <<'SEEN' || { cat "$dir/log"; echo CHANGED; exit 1; }
group_plain: 15550100001
group_quoted: "+15550100001"
plain: 15550100001
quoted: 15550100001
token: 12345000
twice: "+15550100001"
two: [15550100001,15550100002]
quoted | string: "15550100001"
SEEN
