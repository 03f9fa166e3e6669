#!/usr/bin/env bash
# OkHttp's MultipartBody.Builder declares its body as multipart/mixed, even if all its parts come from addFormDataPart,
# and say form-data. It is a form only after setType(MultipartBody.FORM); nothing warns.
# Guess: multipart/form-data, because the method's name says so.
# Seen with OkHttp 5.3.2.
# Apps that forgot the line reach servers that do not look at the type. A gateway that takes what is no form for a text
# would show the raw parts on the phone; it should refuse every other multipart type, and name the one that it wants.
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
    <dependency><groupId>com.squareup.okhttp3</groupId><artifactId>okhttp-jvm</artifactId><version>5.3.2</version></dependency>
  </dependencies>
</project>
XML
have mvn -q -B -f "$dir/pom.xml" dependency:copy-dependencies -DoutputDirectory="$dir/lib"
cat >"$dir/Write.java" <<'JAVA'
import okhttp3.*;
import okio.Buffer;
public class Write {
  public static void main(String[] args) throws Exception {
    for (var isTold : new boolean[] {false, true}) {
      var builder = new MultipartBody.Builder("b").addFormDataPart("message", "hello");
      if (isTold) builder.setType(MultipartBody.FORM);
      var body = builder.build();
      var bytes = new Buffer();
      body.writeTo(bytes);
      System.out.println(body.contentType() + " " + bytes.readUtf8().replaceAll("(?s)^--b\r\n|\r\n.*", ""));
    }
  }
}
JAVA
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 120 java -cp "$dir/lib/*" "$dir/Write.java" 2>"$dir/log")
part='Content-Disposition: form-data; name="message"'
check 'OkHttp 5.3.2' "$(sed -n 1p <<<"$seen")" "multipart/mixed; boundary=b $part"
check 'after setType(FORM)' "$(sed -n 2p <<<"$seen")" "multipart/form-data; boundary=b $part"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
