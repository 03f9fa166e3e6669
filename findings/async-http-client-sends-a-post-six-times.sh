#!/usr/bin/env bash
# AsyncHttpClient of Java sends a request again if the connection ends before the response, up to five times, a POST
# too, each time on a new connection, and without a pause. Only then does the program see an exception.
# Seen with async-http-client 3.0.1; setMaxRequestRetry(0) turns it off.
# A proxy or a backend that takes a request and closes without an answer makes six messages of one. A gateway must
# always answer, even if it does not know what became of the message.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
cat >"$dir/pom.xml" <<'XML'
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion><groupId>x</groupId><artifactId>x</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.asynchttpclient</groupId><artifactId>async-http-client</artifactId><version>3.0.1</version></dependency>
  </dependencies>
</project>
XML
have mvn -q -B -f "$dir/pom.xml" dependency:copy-dependencies -DoutputDirectory="$dir/lib"
cat >"$dir/Post.java" <<'JAVA'
import static org.asynchttpclient.Dsl.*;
import java.net.*;
public class Post {
  static int requests;
  public static void main(String[] args) throws Exception {
    var server = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
    var thread = new Thread(() -> {
      while (true) {
        try (var socket = server.accept()) { // reads a request, and closes
          if (socket.getInputStream().read(new byte[9999]) > 0) requests++;
        } catch (Exception e) {
          return;
        }
      }
    });
    thread.setDaemon(true);
    thread.start();
    for (var config : new org.asynchttpclient.AsyncHttpClientConfig[] {config().build(), config().setMaxRequestRetry(0).build()}) {
      requests = 0;
      try (var client = asyncHttpClient(config)) {
        client.preparePost("http://127.0.0.1:" + server.getLocalPort()).setBody("hi").execute().get();
      } catch (java.util.concurrent.ExecutionException e) {
        System.out.println(requests + " requests");
      }
    }
    System.exit(0);
  }
}
JAVA
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 120 java -cp "$dir/lib/*" "$dir/Post.java" 2>"$dir/log" | paste -sd ',')
check 'by default, and with setMaxRequestRetry(0)' "$seen" '6 requests,1 requests'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
