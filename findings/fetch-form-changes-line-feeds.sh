#!/usr/bin/env bash
# A FormData that fetch sends as multipart has CR LF where a text has a line feed, as the HTML standard says. The
# packages form-data and form-data-encoder disagree about it, too: the first keeps the line feed, the second does not.
# Seen with undici 7.16.0, form-data 4.0.4 and form-data-encoder 4.1.0.
# The same program text gives other bytes by another library. A gateway that relays texts should remove the CR.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" undici@7.16.0 form-data@4.0.4 form-data-encoder@4.1.0 formdata-node@6.0.3
cat >"$dir/forms.mjs" <<'JS'
import { FormDataEncoder } from 'form-data-encoder';
import FormDataPackage from 'form-data';
import { FormData as FormDataNode } from 'formdata-node';
import { FormData, Response } from 'undici';
const text = 'one\ntwo';
const show = (name, body) => console.log(`${name} ${JSON.stringify(/one[^t]*two/.exec(body)[0])}`);
const fill = (form) => {
  form.append('message', text);
  return form;
};
show('undici', await new Response(fill(new FormData())).text());
show('form-data', String(fill(new FormDataPackage()).getBuffer()));
const chunks = [];
for await (const chunk of new FormDataEncoder(fill(new FormDataNode()))) chunks.push(chunk);
show('form-data-encoder', String(Buffer.concat(chunks)));
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 30 node "$dir/forms.mjs" | paste -sd ' ')
check 'written' "$seen" 'undici "one\r\ntwo" form-data "one\ntwo" form-data-encoder "one\r\ntwo"'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
