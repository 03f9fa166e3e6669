#!/usr/bin/env bash
# HttpURLConnection of Java, on which Jersey's client is built, sends a POST a second time, on a new connection, if the
# first one ends without an answer. The program sees the exception of the second. java.net.http sends it once.
# Guess: a POST is never repeated without being asked to.
# Seen with OpenJDK 17 and Jersey 4.0.2. -Dsun.net.http.retryPost=false turns it off, and so does
# setFixedLengthStreamingMode.
# A proxy that takes a request and closes makes two messages of one. A gateway must answer, even if it does not know
# what became of the message.
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
    <dependency><groupId>org.glassfish.jersey.core</groupId><artifactId>jersey-client</artifactId><version>4.0.2</version></dependency>
    <dependency><groupId>org.glassfish.jersey.inject</groupId><artifactId>jersey-hk2</artifactId><version>4.0.2</version></dependency>
  </dependencies>
</project>
XML
have mvn -q -B -f "$dir/pom.xml" dependency:copy-dependencies -DoutputDirectory="$dir/lib"
cat >"$dir/Post.java" <<'JAVA'
import jakarta.ws.rs.client.*;
import java.io.*;
import java.net.*;
import java.net.http.*;
public class Post {
  static volatile int requests;
  interface Sender {
    void send(String url) throws Exception;
  }
  public static void main(String[] args) throws Exception {
    var server = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
    var thread = new Thread(() -> {
      while (true) {
        try (var socket = server.accept()) { // reads a request, and closes
          var text = "";
          for (int c; !text.endsWith("hello") && (c = socket.getInputStream().read()) >= 0; ) text += (char) c;
          if (text.startsWith("POST")) requests++;
        } catch (IOException e) {
          return;
        }
      }
    });
    thread.setDaemon(true);
    thread.start();
    Sender plain = url -> open(url, false).getResponseCode();
    Sender fixed = url -> open(url, true).getResponseCode();
    Sender jersey = url -> ClientBuilder.newClient().target(url).request().post(Entity.text("hello"));
    Sender newer = url -> HttpClient.newHttpClient().send(
      HttpRequest.newBuilder(URI.create(url)).POST(HttpRequest.BodyPublishers.ofString("hello")).build(),
      HttpResponse.BodyHandlers.ofString()
    );
    for (var sender : new Sender[] {plain, fixed, jersey, newer}) {
      requests = 0;
      try {
        sender.send("http://127.0.0.1:" + server.getLocalPort());
      } catch (Exception e) {
        System.out.println(requests);
      }
    }
    System.exit(0);
  }
  static HttpURLConnection open(String url, boolean isFixed) throws Exception {
    var connection = (HttpURLConnection) new URL(url).openConnection();
    connection.setDoOutput(true);
    if (isFixed) connection.setFixedLengthStreamingMode(5);
    connection.getOutputStream().write("hello".getBytes());
    return connection;
  }
}
JAVA
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
java -version 2>&1 | sed -n 1p
post() { timeout 120 java "$@" -cp "$dir/lib/*" "$dir/Post.java" 2>"$dir/log" | paste -sd ' '; }
check 'HttpURLConnection, with a fixed length, Jersey, java.net.http' "$(post)" '2 1 2 1'
check 'with -Dsun.net.http.retryPost=false' "$(post -Dsun.net.http.retryPost=false)" '1 1 1 1'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
