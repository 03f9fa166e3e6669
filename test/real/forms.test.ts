/** Writers of multipart forms, each with a quirk of its own. What they write is in test/fixtures/multipart.txt as well. */

import { mkdirSync, readdirSync, writeFileSync } from 'node:fs';
import { homedir } from 'node:os';
import { dirname, join } from 'node:path';
import { assert, until } from '../assertions.ts';
import { gotJson } from '../backend.ts';
import { startBoth } from '../process.ts';
import { FROM, SECRET, THIRD, TO } from '../samples.ts';
import { CannotBeHad, folderOf, type How, type Packages, type Programs, real } from './install.ts';
import { settingsOf } from './setting.ts';

const MESSAGE = 'Tür "offen" & Tor = 100% +1;\n--\nmessage=a%20🚪';

const NAME = 'Tür "neu" €; 100% (1).png';

/** For those that write a quote as %22, as browsers do, which a file's name may contain as well. */
const WITHOUT_QUOTE = NAME.replaceAll('"', '');

const PICTURE = Buffer.from('\x89PNG\r\n\x1a\n\r\n--\r\n\xff\x00', 'latin1');

interface Writer extends Packages {
  /** The name of the picture, if it cannot be `NAME`. A semicolon ends a file's name in the backend, so it arrives as "_". */
  name?: string;
  /** What the program declares in place of multipart/form-data, if it can. */
  otherwise?: string;
  /**
   * The program, which gets the URL, the header Authorization, the type to declare ('' for its own), the message, the
   * path of the picture, and two recipients as arguments. It prints the status and the body of the answer.
   */
  program(programs: Programs): [file: string, args: string[], how?: How] | Promise<[string, string[], How?]>;
}

function writer(title: string, { name = NAME, otherwise, program, ...packages }: Writer): void {
  const claims = `a form arrives as it is written${otherwise ? `, and is refused as ${otherwise}` : ''}`;
  real(`${title}: ${claims}`, packages, async (t, programs) => {
    const { backend, gateway } = await startBoth(t, settingsOf({ recipients: [TO, THIRD] }));
    const [file, args, how] = await program(programs);
    mkdirSync(join(programs.dir, 'pictures'));
    const picture = join(programs.dir, 'pictures', name);
    writeFileSync(picture, PICTURE);
    const post = async (declared: string) => {
      const url = `http://${gateway.host}:${gateway.port}/v2/send`;
      const about = [url, `Bearer ${SECRET}`, declared, MESSAGE, picture, THIRD, TO];
      const result = await programs.run(file, [...args, ...about], how);
      t.onFailure(() => `the program printed ${JSON.stringify(result)}`);
      return result;
    };
    const { output } = await post('');
    assert.match(output, /201/);
    assert.deepEqual(gotJson(backend), {
      number: FROM,
      recipients: [THIRD, TO],
      message: MESSAGE,
      base64_attachments: [
        `data:image/png;filename=${name.replaceAll(';', '_')};base64,${PICTURE.toString('base64')}`,
      ],
    });
    if (otherwise) {
      const refused = await post(otherwise);
      assert.match(refused.output, /400/);
      assert.match(refused.output, /its Content-Type is not multipart\/form-data/);
    }
    const expected = otherwise ? [201, 400] : [201];
    await until(() => gateway.requests().length >= expected.length, 'the log');
    assert.deepEqual(gateway.requests().map(({ status }) => status), expected);
    assert.equal(backend.seen.length, 1, 'what the backend saw');
  });
}

/** `post` has the variables `url`, `authorization`, `type`, `message`, `picture` and `recipients`. */
function java(title: string, maven: string[], imports: string, post: string, about: Partial<Writer>): void {
  writer(title, {
    maven,
    ...about,
    program: ({ write }) => {
      const file = write(
        'Post.java',
        `${imports}
import java.io.File;
import java.util.*;
public class Post {
  public static void main(String[] args) throws Exception {
    String url = args[0], authorization = args[1], type = args[2], message = args[3];
    var picture = new File(args[4]);
    var recipients = List.of(args[5], args[6]);
    ${post}
    System.exit(0);
  }
}
`,
      );
      return ['java', ['-cp', 'lib/*', file]];
    },
  });
}

java(
  'Jersey, which writes the name last',
  ['core:jersey-client', 'inject:jersey-hk2', 'media:jersey-media-multipart'].map((name) =>
    `org.glassfish.jersey.${name}:4.0.2`
  ),
  `import jakarta.ws.rs.client.*;
import org.glassfish.jersey.media.multipart.*;
import org.glassfish.jersey.media.multipart.file.*;`,
  `var form = new FormDataMultiPart().field("message", message);
    for (var recipient : recipients) form.field("recipients", recipient);
    form.bodyPart(new FileDataBodyPart("file", picture));
    var client = ClientBuilder.newClient().register(MultiPartFeature.class);
    var entity = type.isEmpty() ? Entity.entity(form, form.getMediaType()) : Entity.entity(form, type);
    var answer = client.target(url).request().header("Authorization", authorization).post(entity);
    System.out.println(answer.getStatus() + " " + answer.readEntity(String.class));`,
  { otherwise: 'multipart/mixed' },
);

const NAMES = { 'beyond Latin-1': NAME, 'in Latin-1': NAME.replace('€', '£') };

for (const [which, name] of Object.entries(NAMES)) {
  java(
    `Apache HttpClient 5.6, with a file's name ${which}`,
    ['org.apache.httpcomponents.client5:httpclient5:5.6.5', 'org.slf4j:slf4j-nop:1.7.36'],
    `import java.nio.charset.StandardCharsets;
import org.apache.hc.client5.http.classic.methods.HttpPost;
import org.apache.hc.client5.http.entity.mime.*;
import org.apache.hc.client5.http.impl.classic.HttpClients;
import org.apache.hc.core5.http.ContentType;
import org.apache.hc.core5.http.io.entity.*;`,
    `var builder = MultipartEntityBuilder.create();
    if (!type.isEmpty()) builder.setContentType(ContentType.parse(type));
    var text = ContentType.TEXT_PLAIN.withCharset(StandardCharsets.UTF_8);
    builder.addTextBody("message", message, text);
    for (var recipient : recipients) builder.addTextBody("recipients", recipient);
    var request = new HttpPost(url);
    request.setHeader("Authorization", authorization);
    request.setEntity(builder.addBinaryBody("file", picture, ContentType.IMAGE_PNG, picture.getName()).build());
    try (var client = HttpClients.createDefault()) {
      String answered = client.execute(request, (answer) -> answer.getCode() + " " + EntityUtils.toString(answer.getEntity()));
      System.out.println(answered);
    }`,
    { name, otherwise: 'text/plain' },
  );
}

java(
  'OkHttp, which makes multipart/mixed unless it is told the type',
  ['com.squareup.okhttp3:okhttp-jvm:5.3.2'],
  'import okhttp3.*;',
  `var builder = new MultipartBody.Builder().addFormDataPart("message", message);
    for (var recipient : recipients) builder.addFormDataPart("recipients", recipient);
    builder.addFormDataPart("file", picture.getName(), RequestBody.create(picture, MediaType.get("image/png")));
    if (type.isEmpty()) builder.setType(MultipartBody.FORM);
    var request = new Request.Builder().url(url).header("Authorization", authorization).post(builder.build()).build();
    try (var answer = new OkHttpClient().newCall(request).execute()) {
      System.out.println(answer.code() + " " + answer.body().string());
    }`,
  { name: WITHOUT_QUOTE, otherwise: 'multipart/mixed' },
);

/** `post` has the same variables. */
function ruby(title: string, debian: string[], post: string, about: Partial<Writer> = {}): void {
  const version = '3.1.7+really3.1.2-0+deb12u1';
  const own = [`ruby3.1=${version}`, `libruby3.1=${version}`, 'ruby-rubygems=3.3.15-2+deb12u1', 'libyaml-0-2=0.2.5-1'];
  writer(title, {
    debian: [...own, ...debian],
    ...about,
    program: ({ dir, write }) => {
      const variables = 'url, authorization, type, message, picture, *recipients = ARGV';
      const file = write('post.rb', `${variables}\npicture = File.open(picture, 'rb')\n${post}\n`);
      const gems = join(dir, 'usr/share/rubygems-integration/all/gems');
      const native = dirname(folderOf(dir, '/3.1.0/rbconfig.rb'));
      const folders = [
        ...['vendor_ruby', '3.1.0'].map((each) => join(dir, 'usr/lib/ruby', each)),
        ...['3.1.0', 'vendor_ruby/3.1.0'].map((each) => join(native, each)),
        ...readdirSync(gems).map((each) => join(gems, each, 'lib')),
      ];
      const env = {
        RUBYLIB: folders.join(':'),
        RUBY_MIME_TYPES_DATA: join(dir, 'usr/share/ruby-mime-types-data/data'),
      };
      return [join(dir, 'usr/bin/ruby3.1'), ['--disable=gems', file], { env }];
    },
  });
}

ruby(
  'httpclient of Ruby, which writes a quote as it is, and when the file was read',
  ['ruby-httpclient=2.8.3+git20211122.4658227-1'],
  `require 'httpclient'
fields = [['message', message], *recipients.map { |each| ['recipients', each] }, ['file', picture]]
headers = { 'Authorization' => authorization }
headers['Content-Type'] = type unless type.empty?
answer = HTTPClient.new.post(url, fields, headers)
puts answer.status, answer.body`,
  { otherwise: 'multipart/mixed' },
);

ruby(
  'rest-client of Ruby, which writes a quote as it is',
  [
    'ruby-rest-client=2.1.0-3',
    'ruby-http-accept=2.2.0-1',
    'ruby-http-cookie=1.0.5-1',
    'ruby-domain-name=0.5.20190701-1',
    'ruby-unf=0.1.4-2.1',
    'ruby-unf-ext=0.0.7.7-1+b4',
    'ruby-mime-types=3.4.1-2',
    'ruby-mime-types-data=3.2022.0105-1',
    'ruby-netrc=0.11.0-4',
  ],
  `require 'restclient'
fields = { message: message, recipients: recipients, file: picture, multipart: true }
RestClient.post(url, fields, { 'Authorization' => authorization }) { |answer| puts answer.code, answer.body }`,
);

writer('libsoup, which writes only filename*, with parentheses as they are', {
  debian: ['libsoup-3.0-0=3.2.3-0+deb12u2'],
  name: 'Capture d’écran, copie (1).png',
  otherwise: 'text/plain',
  program: ({ write }) => {
    const file = write(
      'post.py',
      `
import ctypes as c, os, sys
url, authorization, type, text, picture, *recipients = (os.fsencode(each) for each in sys.argv[1:])
soup, glib = c.CDLL('libsoup-3.0.so.0'), c.CDLL('libglib-2.0.so.0')
def new(function, *args):
    function.restype = c.c_void_p
    return c.c_void_p(function(*args))
form = new(soup.soup_multipart_new, b'multipart/form-data')
soup.soup_multipart_append_form_string(form, b'message', text)
for recipient in recipients:
    soup.soup_multipart_append_form_string(form, b'recipients', recipient)
data = open(picture, 'rb').read()
content = new(glib.g_bytes_new, data, c.c_size_t(len(data)))
soup.soup_multipart_append_form_file(form, b'file', os.path.basename(picture), b'image/png', content)
message = new(soup.soup_message_new_from_multipart, url, form)
headers = new(soup.soup_message_get_request_headers, message)
soup.soup_message_headers_append(headers, b'Authorization', authorization)
if type:
    soup.soup_message_headers_replace(headers, b'Content-Type', type)
answer = new(soup.soup_session_send_and_read, new(soup.soup_session_new), message, None, None)
length = c.c_size_t()
body = new(glib.g_bytes_get_data, answer, c.byref(length))
print(soup.soup_message_get_status(message), c.string_at(body, length.value).decode())`,
    );
    return ['python3', [file]];
  },
});

writer('requests, with a header Content-Type of its own', {
  pypi: ['requests==2.33.0'],
  name: WITHOUT_QUOTE,
  otherwise: 'application/octet-stream',
  program: ({ write }) => {
    const file = write(
      'post.py',
      `
import os, requests, sys
url, authorization, type, message, picture, *recipients = sys.argv[1:]
headers = {'Authorization': authorization, **({'Content-Type': type} if type else {})}
with open(picture, 'rb') as file:
    files = {'file': (os.path.basename(picture), file, 'image/png')}
    answer = requests.post(url, {'message': message, 'recipients': recipients}, files=files, headers=headers)
print(answer.status_code, answer.text)`,
    );
    return ['python3', [file]];
  },
});

writer('curl -K, with a header Content-Type of its own', {
  debian: ['curl=7.88.1-10+deb12u15', 'libcurl4=7.88.1-10+deb12u15'],
  name: WITHOUT_QUOTE,
  otherwise: 'text/plain',
  program: ({ dir, write }) => {
    const file = write(
      'post',
      `#!/bin/sh
{
  echo "url = $1"
  echo "header = \\"Authorization: $2\\""
  [ -z "$3" ] || echo "header = \\"Content-Type: $3\\""
} >'${dir}/signal-send'
exec '${dir}/usr/bin/curl' -sK '${dir}/signal-send' -w '%{http_code}' --form-string message="$4" \\
  --form-string recipients="$6" --form-string recipients="$7" -F file=@\\""$5"\\"
`,
    );
    return [file, []];
  },
});

writer("Go's mime/multipart", {
  otherwise: 'text/plain',
  program: async ({ dir, run, write }) => {
    // What the compiler has made of the standard library before; otherwise that takes a minute.
    const env = { GOCACHE: join(homedir(), '.cache/go-build'), GOPATH: join(dir, 'go') };
    write(
      'main.go',
      `
package main

import (
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"os"
	"path/filepath"
)

func main() {
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	form.WriteField("message", os.Args[4])
	for _, recipient := range os.Args[6:] {
		form.WriteField("recipients", recipient)
	}
	disposition := multipart.FileContentDisposition("file", filepath.Base(os.Args[5]))
	part, _ := form.CreatePart(textproto.MIMEHeader{"Content-Disposition": {disposition}, "Content-Type": {"image/png"}})
	picture, _ := os.ReadFile(os.Args[5])
	part.Write(picture)
	form.Close()
	request, _ := http.NewRequest("POST", os.Args[1], &body)
	request.Header.Set("Authorization", os.Args[2])
	request.Header.Set("Content-Type", form.FormDataContentType())
	if os.Args[3] != "" {
		request.Header.Set("Content-Type", os.Args[3])
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		panic(err)
	}
	text, _ := io.ReadAll(answer.Body)
	fmt.Println(answer.StatusCode, string(text))
}
`,
    );
    const built = await run('go', ['build', '-o', 'post', 'main.go'], { env });
    if (built.code === -1) throw new CannotBeHad('cannot be had: go');
    assert.equal(built.code, 0, built.output);
    return [join(dir, 'post'), []];
  },
});
