#!/usr/bin/env bash
# For a name of a file beyond Latin-1, Apache HttpClient writes filename="?.jpg" and, in quotes, filename*="UTF-8''…",
# which the standard of that parameter has without them. Node's formData() throws for the whole form, where it reads
# the same name without quotes; Go reads both; Deno shows the question mark.
# Guess: filename*=UTF-8''%E2%82%AC.jpg beside a filename, without quotes.
# Seen with Apache HttpClient 5.6.5, Node 26.10.0, Deno 2.9.6 and Go.
# A form with a screenshot is refused for its name. A gateway should read this value in quotes as well.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
get() { have npm install --silent --no-audit --no-fund --prefix "$dir/$1" "$1"; }
cat >"$dir/pom.xml" <<'XML'
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion><groupId>x</groupId><artifactId>x</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.httpcomponents.client5</groupId><artifactId>httpclient5</artifactId><version>5.6.5</version></dependency>
  </dependencies>
</project>
XML
have mvn -q -B -f "$dir/pom.xml" dependency:copy-dependencies -DoutputDirectory="$dir/lib"
get node@26.10.0
get deno@2.9.6
cat >"$dir/Write.java" <<'JAVA'
import org.apache.hc.client5.http.entity.mime.*;
import org.apache.hc.core5.http.ContentType;
public class Write {
  public static void main(String[] args) throws Exception {
    MultipartEntityBuilder.create().setBoundary("b")
      .addBinaryBody("file", new byte[] {1}, ContentType.DEFAULT_BINARY, "\u20ac.jpg")
      .build().writeTo(System.out);
  }
}
JAVA
timeout 120 java -cp "$dir/lib/*" "$dir/Write.java" >"$dir/quoted" 2>"$dir/log"
sed "s/filename\\*=\"\\(.*\\)\"/filename*=\\1/" "$dir/quoted" >"$dir/unquoted"
cat >"$dir/read.mjs" <<'JS'
import { readFileSync } from 'node:fs';
const headers = { 'Content-Type': 'multipart/form-data; boundary=b' };
try {
  const form = await new Response(readFileSync(process.argv[2]), { headers }).formData();
  console.log(form.get('file').name);
} catch ({ name }) {
  console.log(name);
}
JS
cat >"$dir/main.go" <<'GO'
package main

import (
	"fmt"
	"mime/multipart"
	"os"
)

func main() {
	form, err := multipart.NewReader(os.Stdin, "b").ReadForm(9999)
	if err != nil {
		panic(err)
	}
	fmt.Println(form.File["file"][0].Filename)
}
GO
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
node() { timeout 20 "$dir/node@26.10.0/node_modules/.bin/node" "$dir/read.mjs" "$dir/$1"; }
deno() { NO_COLOR=1 DENO_DIR="$dir/cache" timeout 20 "$dir/deno@2.9.6/node_modules/.bin/deno" run -A "$dir/read.mjs" "$dir/$1"; }
go_reads() { timeout 200 go run "$dir/main.go" <"$dir/$1" 2>"$dir/log"; }
check 'written' "$(grep -o 'filename.*jpg"' "$dir/quoted")" "filename=\"?.jpg\"; filename*=\"UTF-8''%E2%82%AC.jpg\""
check 'Node 26.10.0' "$(node quoted)" TypeError
check 'Node 26.10.0, without the quotes' "$(node unquoted)" '€.jpg'
check 'Deno 2.9.6' "$(deno quoted)" '?.jpg'
check "$(go version)" "$(go_reads quoted)" '€.jpg'
check 'Go, without the quotes' "$(go_reads unquoted)" '€.jpg'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
