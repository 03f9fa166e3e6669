#!/usr/bin/env bash
# The part that Jersey (JAX-RS) writes for a file has the field's name at the end of its Content-Disposition, after the
# file's name, its time and its size. Node 20's formData() expects the name first, and throws for the whole form.
# Guess: name, then filename, as others write it, and nothing about the file but its name.
# Seen with Jersey 4.0.2: FileDataBodyPart; StreamDataBodyPart leaves out time and size. Node 26.10 and Deno 2.9.6 read
# it.
# A text is lost because of a picture beside it. A gateway's reader must take the parameters in any order, and ignore
# those that it does not know.
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
    <dependency><groupId>org.glassfish.jersey.core</groupId><artifactId>jersey-client</artifactId><version>4.0.2</version></dependency>
    <dependency><groupId>org.glassfish.jersey.inject</groupId><artifactId>jersey-hk2</artifactId><version>4.0.2</version></dependency>
    <dependency><groupId>org.glassfish.jersey.media</groupId><artifactId>jersey-media-multipart</artifactId><version>4.0.2</version></dependency>
  </dependencies>
</project>
XML
have mvn -q -B -f "$dir/pom.xml" dependency:copy-dependencies -DoutputDirectory="$dir/lib"
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
cat >"$dir/Post.java" <<'JAVA'
import jakarta.ws.rs.client.*;
import java.io.*;
import java.util.Map;
import org.glassfish.jersey.media.multipart.*;
import org.glassfish.jersey.media.multipart.file.*;
public class Post {
  public static void main(String[] args) throws Exception {
    var client = ClientBuilder.newClient().register(MultiPartFeature.class);
    var stream = new ByteArrayInputStream(new byte[] {'h', 'i'});
    var parts = Map.of("file", new FileDataBodyPart("file", new File(args[1])), "stream", new StreamDataBodyPart("file", stream, "a.txt"));
    for (var part : parts.entrySet()) {
      try (var form = new FormDataMultiPart().field("message", "hello")) {
        form.bodyPart(part.getValue());
        client.target(args[0]).path(part.getKey()).request().post(Entity.entity(form, form.getMediaType())).close();
      }
    }
  }
}
JAVA
printf hi >"$dir/a.txt"
touch -d '2026-11-29 12:00 UTC' "$dir/a.txt"
timeout 120 java -cp "$dir/lib/*" "$dir/Post.java" "http://127.0.0.1:$(cat "$dir/port")" "$dir/a.txt" >"$dir/log" 2>&1
cat >"$dir/read.mjs" <<'JS'
import { readFileSync } from 'node:fs';
const [type, body] = JSON.parse(readFileSync(process.argv[2], 'utf8'));
try {
  const form = await new Response(body, { headers: { 'Content-Type': type } }).formData();
  console.log(Array.from(form, ([name, value]) => `${name}=${value.name ?? value}`).join(' '));
} catch ({ name }) {
  console.log(name);
}
JS
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
written() { node -p 'JSON.parse(require("node:fs").readFileSync(process.argv[1]))[1].match(/form-data; (filename.*)/)[1]' "$dir/$1"; }
check 'FileDataBodyPart' "$(written file)" \
  'filename="a.txt"; modification-date="Sun, 29 Nov 2026 12:00:00 GMT"; size=2; name="file"'
check 'StreamDataBodyPart' "$(written stream)" 'filename="a.txt"; name="file"'
get node@20.20.2
get node@26.10.0
get deno@2.9.6
deno() { NO_COLOR=1 DENO_DIR="$dir/cache" timeout 20 "$dir/deno@2.9.6/node_modules/.bin/deno" run "$@"; }
for part in file stream; do
  for node in node@20.20.2/TypeError 'node@26.10.0/message=hello file=a.txt'; do
    seen=$(timeout 20 "$dir/${node%%/*}/node_modules/.bin/node" "$dir/read.mjs" "$dir/$part")
    check "$part, read by ${node%%/*}" "$seen" "${node#*/}"
  done
  check "$part, read by Deno 2.9.6" "$(deno -A "$dir/read.mjs" "$dir/$part")" 'message=hello file=a.txt'
done
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
