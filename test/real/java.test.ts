/** HTTP clients of Java, which repeat some requests by themselves. */

import { assert } from '../assertions.ts';
import { type Packages, real } from './install.ts';
import { deliversOnce, REFUSED, settingsOf } from './setting.ts';

/** `post` has the variables `url` and `token`, and prints the status and the body of the answer. */
function java(title: string, packages: Packages, imports: string, post: string): void {
  real(title, packages, async (t, { run, write }) => {
    const file = write(
      'Post.java',
      `${imports}
public class Post {
  public static void main(String[] args) throws Exception {
    String url = args[0], token = args[1];
    ${post}
    System.exit(0);
  }
}
`,
    );
    const { wrong } = await deliversOnce(
      t,
      'Backup done',
      (address, token) => run('java', ['-cp', 'lib/*', file, `http://${address}/v2/send`, `Bearer ${token}`]),
      settingsOf(),
    );
    assert.match(wrong.output, /401/);
    assert.match(wrong.output, REFUSED);
  });
}

java(
  'OkHttp delivers exactly once, and reads the refusal',
  { maven: ['com.squareup.okhttp3:okhttp-jvm:5.1.0'] },
  'import okhttp3.*;',
  `var body = RequestBody.create("Backup done", MediaType.parse("text/plain"));
    var request = new Request.Builder().url(url).header("Authorization", token).post(body).build();
    try (var answer = new OkHttpClient().newCall(request).execute()) {
      System.out.println(answer.code() + " " + answer.body().string());
    }`,
);

java(
  'Apache HttpClient 5 delivers exactly once, and reads the refusal',
  { maven: ['org.apache.httpcomponents.client5:httpclient5:5.5', 'org.slf4j:slf4j-nop:1.7.36'] },
  `import org.apache.hc.client5.http.classic.methods.HttpPost;
import org.apache.hc.client5.http.impl.classic.HttpClients;
import org.apache.hc.core5.http.io.entity.*;`,
  `var request = new HttpPost(url);
    request.setHeader("Authorization", token);
    request.setEntity(new StringEntity("Backup done"));
    try (var client = HttpClients.createDefault()) {
      String answered = client.execute(request, (answer) -> answer.getCode() + " " + EntityUtils.toString(answer.getEntity()));
      System.out.println(answered);
    }`,
);
