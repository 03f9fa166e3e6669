#!/usr/bin/env bash
# The multipart builder of Apache HttpClient declares the whole form as ISO-8859-1, whatever setCharset says. With
# setCharset(UTF_8), the name of a file is still Latin-1 in the mode that is the default. In the mode LEGACY it is
# UTF-8, and so is the text, whose part declares nothing: then only the wrong charset stands in the request.
# Guess: after setCharset(UTF_8), all is UTF-8, and is declared as UTF-8 or not at all.
# Seen with Apache HttpClient 5.6.5.
# A gateway that decodes by the form's charset shows "hellÃ¶". It should go by the charset of a part alone, and take
# for Latin-1 only what is no UTF-8.
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
    <dependency><groupId>org.apache.httpcomponents.client5</groupId><artifactId>httpclient5</artifactId><version>5.6.5</version></dependency>
  </dependencies>
</project>
XML
have mvn -q -B -f "$dir/pom.xml" dependency:copy-dependencies -DoutputDirectory="$dir/lib"
cat >"$dir/Write.java" <<'JAVA'
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.util.regex.*;
import org.apache.hc.client5.http.entity.mime.*;
import org.apache.hc.core5.http.ContentType;
public class Write {
  public static void main(String[] args) throws Exception {
    for (var mode : new HttpMultipartMode[] {null, HttpMultipartMode.LEGACY}) {
      var builder = MultipartEntityBuilder.create().setBoundary("b");
      if (mode != null) builder.setMode(mode);
      var form = builder.setCharset(StandardCharsets.UTF_8)
        .addTextBody("message", "\u00f6")
        .addBinaryBody("file", new byte[] {1}, ContentType.DEFAULT_BINARY, "\u00e4.jpg")
        .build();
      var out = new ByteArrayOutputStream();
      form.writeTo(out);
      var body = out.toString(StandardCharsets.ISO_8859_1); // each byte as a character
      System.out.println(form.getContentType());
      System.out.println("name " + escaped(body, "filename=\"(.*?)\"") + ", text " + escaped(body, "\r\n\r\n(.*)\r\n")
        + ", declared " + body.contains("Content-Type: text/plain; charset=UTF-8"));
    }
  }
  static String escaped(String body, String pattern) {
    var found = Pattern.compile(pattern).matcher(body);
    found.find();
    return Pattern.compile("[^ -~]").matcher(found.group(1)).replaceAll(m -> "=" + Integer.toHexString(m.group().charAt(0)));
  }
}
JAVA
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
timeout 120 java -cp "$dir/lib/*" "$dir/Write.java" >"$dir/seen" 2>"$dir/log"
line() { sed -n "$1p" "$dir/seen"; }
form='multipart/form-data; charset=ISO-8859-1; boundary=b'
check 'by default, the form' "$(line 1)" "$form"
check 'by default, the parts' "$(line 2)" 'name =e4.jpg, text =c3=b6, declared true'
check 'LEGACY, the form' "$(line 3)" "$form"
check 'LEGACY, the parts' "$(line 4)" 'name =c3=a4.jpg, text =c3=b6, declared false'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
