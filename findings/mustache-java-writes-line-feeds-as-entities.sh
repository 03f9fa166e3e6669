#!/usr/bin/env bash
# Mustache escapes for HTML, and each implementation has its own list. mustache.java also escapes the line feed: an
# alert of two lines becomes one line with "&#10;" in it. jmustache keeps it, but throws for a name that is null.
# Seen with mustache.java 0.9.14 and jmustache 1.16.
# Programs with such templates need {{{three}}} braces for a text that no browser shows, so a page about their webhooks
# should write them.
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
    <dependency><groupId>com.github.spullara.mustache.java</groupId><artifactId>compiler</artifactId><version>0.9.14</version></dependency>
    <dependency><groupId>com.samskivert</groupId><artifactId>jmustache</artifactId><version>1.16</version></dependency>
  </dependencies>
</project>
XML
have mvn -q -B -f "$dir/pom.xml" dependency:copy-dependencies -DoutputDirectory="$dir/lib"
cat >"$dir/Render.java" <<'JAVA'
import java.io.*;
import java.util.*;
public class Render {
  public static void main(String[] args) throws Exception {
    Map<String, Object> data = new HashMap<>();
    data.put("text", "one\ntwo");
    data.put("nothing", null);
    for (String template : List.of("{{text}}", "{{{text}}}", "[{{nothing}}]")) {
      var out = new StringWriter();
      var factory = new com.github.mustachejava.DefaultMustacheFactory();
      factory.compile(new StringReader(template), "x").execute(out, data).flush();
      String other;
      try {
        other = com.samskivert.mustache.Mustache.compiler().compile(template).execute(data);
      } catch (com.samskivert.mustache.MustacheException e) {
        other = "throws";
      }
      System.out.println((template + " is " + out + " and " + other).replace("\n", "\\n"));
    }
  }
}
JAVA
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
seen=$(timeout 120 java -cp "$dir/lib/*" "$dir/Render.java" 2>"$dir/log")
check 'mustache.java and jmustache' "$(paste -sd ',' <<<"$seen")" \
  '{{text}} is one&#10;two and one\ntwo,{{{text}}} is one\ntwo and one\ntwo,[{{nothing}}] is [] and throws'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
