#!/usr/bin/env bash
# Guess: a check of base64 takes a text of any length, or says no.
# Seen: ajv-formats ("byte"), valibot's safeParse and is-base64 throw "RangeError: Maximum call stack size exceeded" for
# valid base64 of 6 MB, the size of an attached picture. Their patterns repeat a group, ([A-Za-z0-9+/]{4})*, for which
# V8 keeps a place to return to for each four letters. Those of validator and joi, which repeat single letters, and
# zod's answer true. Node 20, 26 and Deno 2.9.6.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
get() {
  npm install --silent --no-audit --no-fund --prefix "$dir/$1" "${@:2}" >"$dir/log" 2>&1 || {
    echo "${*:2} cannot be had"
    exit 2
  }
}
get . ajv@8.17.1 ajv-formats@3.0.1 valibot@1.5.0 is-base64@1.1.0 validator@13.15.35 joi@18.3.2 zod@4.6.7
get node20 node@20.20.2
get node26 node@26.10.0
get deno deno@2.9.6
cat >"$dir/checks.mjs" <<'JS'
import Ajv from 'ajv';
import addFormats from 'ajv-formats';
import isBase64 from 'is-base64';
import Joi from 'joi';
import * as v from 'valibot';
import validator from 'validator';
import { z } from 'zod';
const ajv = new (Ajv.default ?? Ajv)();
(addFormats.default ?? addFormats)(ajv);
const schema = ajv.compile({ type: 'string', format: 'byte' });
const checks = {
  'ajv-formats': (text) => schema(text),
  valibot: (text) => v.safeParse(v.pipe(v.string(), v.base64()), text).success,
  'is-base64': (text) => isBase64(text),
  validator: (text) => validator.isBase64(text),
  joi: (text) => Joi.string().base64().validate(text).error === undefined,
  zod: (text) => z.base64().safeParse(text).success,
};
const answers = (megabytes) => {
  const text = 'QUJD'.repeat(megabytes * 250_000);
  return Object.entries(checks).map(([name, check]) => {
    try {
      return `${name} ${check(text)}`;
    } catch (error) {
      return `${name} ${error.name}`;
    }
  }).join(', ');
};
console.log(`1 MB: ${answers(1)}\n8 MB: ${answers(8)}`);
JS
expected='1 MB: ajv-formats true, valibot true, is-base64 true, validator true, joi true, zod true
8 MB: ajv-formats RangeError, valibot RangeError, is-base64 RangeError, validator true, joi true, zod true'
changed=0
check() {
  echo "$1"
  printf '%s\n' "$2" | sed 's/^/  /'
  [ "$2" = "$expected" ] || changed=1
}
check 'Node 20.20.2' "$(timeout 60 "$dir/node20/node_modules/.bin/node" "$dir/checks.mjs" 2>&1)"
check 'Node 26.10.0' "$(timeout 60 "$dir/node26/node_modules/.bin/node" "$dir/checks.mjs" 2>&1)"
check 'Deno 2.9.6' "$(NO_COLOR=1 DENO_DIR="$dir/cache" timeout 60 "$dir/deno/node_modules/.bin/deno" run --allow-all "$dir/checks.mjs" 2>&1)"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
