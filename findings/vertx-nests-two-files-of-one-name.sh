#!/usr/bin/env bash
# The web client of Vert.x writes a multipart form as others do, until two files have the same field's name. Then both
# are in one part, a multipart/mixed of its own, as an older standard of forms had it. Node's formData() takes it for a
# text.
# Guess: a part for each file, with the same name.
# Seen with vertx-web-client 5.0.4, Node 20.20.2 and 26.10.0. multipartMixed(false) writes two parts.
# A service that posts one picture works for years, and breaks with the second. A gateway should read such a part, or
# refuse it with the name of the field; as a text it would be on the phone.
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
    <dependency><groupId>io.vertx</groupId><artifactId>vertx-web-client</artifactId><version>5.0.4</version></dependency>
  </dependencies>
</project>
XML
have mvn -q -B -f "$dir/pom.xml" dependency:copy-dependencies -DoutputDirectory="$dir/lib"
get node@20.20.2
get node@26.10.0
cat >"$dir/Post.java" <<'JAVA'
import io.vertx.core.Vertx;
import io.vertx.core.buffer.Buffer;
import io.vertx.ext.web.client.WebClient;
import io.vertx.ext.web.multipart.MultipartForm;
public class Post {
  public static void main(String[] args) throws Exception {
    var client = WebClient.create(Vertx.vertx());
    for (var path : new String[] {"/one", "/two", "/apart"}) {
      var form = MultipartForm.create().attribute("message", "hello");
      form.binaryFileUpload("file", "a.png", Buffer.buffer("a"), "image/png");
      if (!path.equals("/one")) form.binaryFileUpload("file", "b.png", Buffer.buffer("b"), "image/png");
      var request = client.postAbs(args[0] + path);
      if (path.equals("/apart")) request.multipartMixed(false);
      request.sendMultipartForm(form).toCompletionStage().toCompletableFuture().get();
    }
    System.exit(0);
  }
}
JAVA
cat >"$dir/recorder.mjs" <<'JS'
import { renameSync, writeFileSync } from 'node:fs';
import http from 'node:http';
const server = http.createServer(async (req, res) => {
  let body = '';
  for await (const chunk of req) body += chunk;
  writeFileSync(`.${req.url}`, JSON.stringify([req.headers['content-type'], body]));
  res.writeHead(201).end();
});
server.listen(0, '127.0.0.1', () => {
  writeFileSync('new', String(server.address().port));
  renameSync('new', 'port');
});
JS
(cd "$dir" && exec node recorder.mjs) &
trap 'kill "$!" 2>/dev/null; rm -rf "$dir"' EXIT
for _ in $(seq 100); do [ -e "$dir/port" ] || sleep 0.1; done
timeout 120 java -cp "$dir/lib/*" "$dir/Post.java" "http://127.0.0.1:$(cat "$dir/port")" >"$dir/log" 2>&1
cat >"$dir/read.mjs" <<'JS'
import { readFileSync } from 'node:fs';
const [type, body] = JSON.parse(readFileSync(process.argv[2], 'utf8'));
const form = await new Response(body, { headers: { 'Content-Type': type } }).formData();
console.log(Array.from(form, ([name, value]) => `${name}: ${value.name ?? `text of ${value.split('\r\n').length} lines`}`).join(', '));
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
written() { node -p 'JSON.parse(require("node:fs").readFileSync(process.argv[1]))[1].match(/name="file".*|multipart.mixed/g).join(" ").replaceAll("\r", "")' "$dir/$1"; }
check 'one file' "$(written one)" 'name="file"; filename="a.png"'
check 'two files' "$(written two)" 'name="file" multipart/mixed'
check 'multipartMixed(false)' "$(written apart)" 'name="file"; filename="a.png" name="file"; filename="b.png"'
for node in node@20.20.2 node@26.10.0; do
  seen=$(timeout 20 "$dir/$node/node_modules/.bin/node" "$dir/read.mjs" "$dir/two" 2>"$dir/log")
  check "two files, read by $node" "$seen" 'message: text of 1 lines, file: text of 15 lines'
done
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
