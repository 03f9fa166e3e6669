import { suite } from 'node:test';
import { tokens } from './configs.ts';
import { fixture } from './files.ts';
import { SIDE_BY_SIDE } from './guard.ts';
import { hook, LIMIT, MADE, MEANT, PNG, PNG_DATA, reading, READS_TEXT, SNAP, TO_ALL, UNDECLARED } from './hooks.ts';
import { listed, literal, rowWith, table, unescaped } from './rows.ts';
import {
  AUTHED,
  DEFAULTS,
  FROM,
  GROUP,
  HELLO,
  INTERNAL_ID,
  OTHER,
  SECRET,
  STRANGER,
  THIRD,
  TO,
  URLENCODED,
} from './samples.ts';
import { SPELLINGS } from './spellings.ts';

const READS_LINES = [
  '{{! one }}',
  '{{title}}',
  '{{#alerts}}',
  '{{name}}:',
  '  {{state}}',
  '{{/alerts}}',
  '{{^alerts}}',
  '',
  'none',
  '{{/alerts}}',
];

suite('forms', SIDE_BY_SIDE, () => {
  table("a template's lines are joined, and one line feed at the end of its text is dropped", hook())`
    * ${MADE}
    @ {"message":${
    JSON.stringify(READS_LINES)
  }} | {"title":"t","alerts":[{"name":"a","state":1},{"name":"b","state":2}]} → {"message":"t\na:\n  1\nb:\n  2"}
    @ {"message":${JSON.stringify(READS_LINES)}} | {"title":"t"} → {"message":"t\n\nnone"}
    @ {"message":["{{text}}"]} | {"text":"a\nb"} → {"message":"a\nb"} ;; @ {"message":["{{text}}",""]} | {"text":"a"} → {"message":"a"}
    @ {"message":["a\n{{#text}}","{{.}}","{{/text}}"]} | {"text":"\nb\r\n"} → {"message":"a\n\nb\r\n"}
    @ {"message":"{{text}}"} | {"text":"a\nb\n\n"} → {"message":"a\nb\n"} ;; @ {"message":"{{text}}\n"} | {"text":"a"} → {"message":"a"}
    # A message that no template made stays as it was posted.
    {"message":"a\n"} → {"message":"a\n"}`;

  const PLUS_JSON = JSON.stringify({ text: 'a=b&c=%41+ü 😀', number: 2 });

  const PLUS_FORM = encodeURIComponent(PLUS_JSON).replaceAll('%20', '+');

  table('a form with the single field "payload" or "data" that holds JSON is that JSON', hook(READS_TEXT))([
    `* ${MADE} | {"message":"a=b&c=%41+ü 😀"}`,
    ['payload', 'data'].map((name) =>
      `'${name}=${PLUS_FORM}' ;; '${name}=${PLUS_FORM}' | Content-Type: ${URLENCODED}
     '${name}=${PLUS_FORM}' | Content-Type: ${URLENCODED}; charset=UTF-8 | Transfer-Encoding: chunked
     -- ${name} = ${PLUS_JSON} ;; -- ${name} = ${PLUS_JSON} | Transfer-Encoding: chunked
     -- ${name} = ${PLUS_JSON} | Content-Type: Multipart/Form-Data; boundary="limit"`
    ),
  ]);

  table('control characters in a number or a recipient of a form are not removed', hook(TO_ALL))`
    * Content-Type: ${URLENCODED} | bearer → 400 bad_field
    'message=x&number=%00&number=%2B490000002' ;; 'message=x&number=%2B490000002&number=%1B%5Bm' ;; 'message=x&number=%2B49000%000002'
    'message=x&recipients=%2B49222%002222' ;; 'message=x&recipients=%1B%5Bm%2B492222222' ;; 'message=x&recipients=%00' ;; 'message=x&recipients[]=%2B49222%0D2222'
    'payload={"message":"x","number":"%2B49000\\u00000002"}'
    * bearer → 400 bad_field
    -- message = x -- number = \x00 -- number = +490000002 ;; -- message = x -- recipients = +49222\x002222
    * bearer → 400 bad_json
    'payload={"message":"x","number":"%2B49000%000002"}' | Content-Type: ${URLENCODED}`;

  /**
   * A token that makes sends, and reads the names `alert`, `name`, `status` and `when` in addition to those of a send.
   */
  const READS_NAMES = reading(
    '{{#alert.title}}{{.}}{{/alert.title}}{{#alert}}{{name}}{{.status}}{{.}}{{/alert}}{{^when}}{{message}}{{/when}}',
  );

  table('a text is the message unchanged, even if it is declared as a form', hook(READS_NAMES))`
    ${UNDECLARED.map((way) => `${way} | same`)}
    'Backup done: 5 files' ;; 'temp=23' ;; 'temp=23 is fine'
    'temp=23&hum=40&e=%zz' ;; 'a & b' ;; 'message&' ;; 'message' ;; 'x message=hello' ;; 'x\nmessage=hello'
    # A field in another spelling.
    'Message=hello' ;; 'xmessage=hello&messages=1' ;; '=message&=x'
    # The template reads this name only below others.
    'title=x' ;; "text" ;; 'null' ;; 'a {"message":"x"}'
    # Names somebody only for a person, or by another name, or has an escape that is none.
    'number: 5' ;; 'to: Bob' ;; 'number =+15550100003' ;; 'Number = 5 & more' ;; 'x\nnumber=+15550100003' ;; 'Door 1&to=%2B15550100003'
    # Is a link.
    'https://ci.example/job?run=1&message=2' ;; '/post?id=7&title=Hello' ;; 'https://grafana/d/x?orgId=1&number=5&from=now-1h'
    'ci.example:8080?message=x' ;; 'mailto:a@b.example?subject=x&recipients=y' ;; '//x/y=1&base64_attachments=x'
    # Speaks of a field that stands behind no "&".
    'see the docs for number=5 & co' ;; 'Tom & number' ;; 'Tom & the sticker=1' ;; 'x&numbers=5&stickers=1' ;; 'a & sticker = b' ;; 'a=b&text-mode=c'
    'to=+15550100003&x=a b' ;; 'Door 1&receipients=a' ;; '"message":"x","recipients":["+15550100003"]' ;; 'to:x,recipients:${GROUP}' ;; 'Recipients: 5 accepted' ;; 'Backup done\nRecipients: 5' ;; 'recipients: +15550100003' ;; 'From: +4930123456\nTo: +4930999999' ;; 'Call\nnumber: +4930123456'
    'Report\nnumber=5\nto=Bob' ;; 'the recipients=5' ;; 'recipients' ;; 'x\nrecipients\ny' ;; 'group.abc; recipients' ;; 'AT&T' ;; '100%'
    '98%zz' ;; 'C++' ;; 'user: auth=no' ;; 'a+b' ;; 'Backup%20done' ;; 'T%C3%BCr' ;; 'message%3Dhello' ;; 'x\nrecipients=a' ;; 'x=a b;recipients=a.01'
    '--limit\nx' ;; '--limit\nContent-Type: x\n\nx' ;; 'x\n--limit\nContent-Disposition: form-data' ;; '-- \nTom'
    '\n\n\tBackup done\n ' ;; 'Tür offen 🚪 \u202eabc'`;

  table('a form is a text if it is declared as one, or as something else', hook(READS_NAMES))`
    * ${MADE} | same
    'recipients=%2B15550100003&message=x' | Content-Type: text/plain
    'payload=%7B%7D' | Content-Type: Text/Plain; charset=utf-8 ;; 'message=x' | Content-Type: application/octet-stream
    'message=x' | Content-Type: ${URLENCODED}2 ;; 'message=x' | Content-Type: application/x+jsonp`;

  const WHEN = literal`@ {"message":"at {{when}}{{#when}}{{#level.x}}{{/level.x}}, {{level}}{{/when}}"}`;

  table('a urlencoded form is read as the object of its fields', hook(TO_ALL))`
    ${UNDECLARED}
    * Content-Type: Application/X-WWW-Form-Urlencoded;charset=UTF-8 | ${MADE}
    # It is one if its first name is a field of a send, or if any name is one that no text has.
    'message=Backup done: 5 files' → {"message":"Backup done: 5 files"}
    'message=50% of "x"\n\u00e9&notify_self=no' → {"message":"50% of \"x\"\n\u00e9","notify_self":"no"}
    'temp=23&a-._~*+%41!'()=&message=x%0D%0A%1B%5By+z%26' → {"message":"x\n z&"}
    # The template's names are known too, within a section as well.
    ${WHEN} | 'when=now or so' → {"message":"at now or so, "} ;; ${WHEN} | 'x=1&when=now' → {"message":"at now, "}
    ${WHEN} | 'level=3 or so&when=now' → {"message":"at now, 3 or so"}
    # A phone number has lost its plus.
    'message=x&number=+15550100003&recipients=+15550100004' → {"message":"x","number":"${THIRD}","recipients":["+15550100004"]}
    'message=x&quote_author=+49123456' → {"message":"x","quote_author":" 49123456"}
    'recipients=%2B15550100003&message=x&recipients=+15550100004' → {"message":"x","recipients":["${THIRD}","+15550100004"]}
    'message=x&number=&text_mode=&sticker=&view_once=&recipient=' → {"message":"x"}
  'temp=23 °C&message=hello' → {"message":"hello"} ;; 'sensor=Door 1&message=open&recipients=+15550100003' → {"message":"open","recipients":["${THIRD}"]}
  # A list as PHP and jQuery write it.
  'message=x&recipients[]=+15550100003&recipients[]=+15550100004' → {"message":"x","recipients":["${THIRD}","+15550100004"]}
  'recipients%5B0%5D=%2B15550100003&recipients%5B1%5D=+15550100004&message=x' → {"message":"x","recipients":["${THIRD}","+15550100004"]}
  'message=x&recipients=+15550100003&recipients[]=+15550100004' → {"message":"x","recipients":["${THIRD}","+15550100004"]}
    'message=x&members=a&admins=b&__proto__=c&constructor=d&Message=e&auth=${SECRET}&Auth=${OTHER}&AUTH=' → {"message":"x"}
    @ {"message":"{{.}}{{auth}}{{payload}}{{message}}"} | 'auth=${SECRET}&payload={"message":"x","auth":1}' → {"message":"{\"message\":\"x\"}x"}
    @ {"message":"{{constructor}}{{__proto__}}"} | 'constructor=d&__proto__=c&message=x' → {"message":"dc"}
    @ {"message":"{{payload}}"} | 'payload=x=1&y=' → {"message":"x=1"}
    # The field that shows a form may be any of a send, and the last.
    'message_id=1&base64_attachments=QUJD' → {"base64_attachments":["QUJD"]} ;; 'temp=23&sticker=a:1' → {"sticker":"a:1"}
    'base64_attachments=QUJD' → {"base64_attachments":["QUJD"]} ;; 'base64_attachments=QUJD&base64_attachments=QUJE&base64_attachments=QUJF' → {"base64_attachments":["QUJD","QUJE","QUJF"]}
    '\r\n title=1&recipients=%2B15550100003&message=x\r\n' → {"message":"x","recipients":["${THIRD}"]}
    '\ufeffrecipients=+15550100003&message=x y' → {"message":"x y","recipients":["${THIRD}"]}`;

  const FILE_NAMES = ['/etc/a,b.png', 'C:/a,b.png', '../../a,b.png', literal`C:\\a,b.png`];

  // `curl -F recipients=@list.txt` sends a file. Its data URI went to the backend as a recipient.
  table('a file as the number or the recipients of a multipart form is 400', hook())`
    * bearer → 400 bad_field | "must be text, not a file"
    -- message = x -- recipients; filename="a.txt" = +15550100003 ;; -- message = x -- Recipients[]; filename="a.txt" = +15550100003
    -- message = x -- recipient; filename="a.txt" = +15550100003 ;; -- message = x -- number; filename="a.txt" = +15550100003
    -- message = x -- recipients; filename="" =`;

  table(
    'a multipart form is read as the object of its fields, and its files are attachments, named without a path',
    hook(TO_ALL),
  )`
    * ${MADE}
    -- message = a=b&c\r\n{"ü":1} → {"message":"a=b&c\n{\"ü\":1}"}
    -- message = x -- file; filename="snap.png"\r\n${PNG} → {"message":"x","base64_attachments":["${SNAP}"]}
    -- file; filename="snap.png"\r\n${PNG} -- base64_attachments = QUJD → {"base64_attachments":["${SNAP}","QUJD"]}
    -- file; filename="b.txt"\r\nContent-Type: text/plain; charset=utf-8 = b → {"base64_attachments":["data:text/plain;filename=b.txt;base64,Yg=="]}
    # A browser sends this where no file was chosen.
    -- message = x -- file; filename=""\r\nContent-Type: application/octet-stream = → {"message":"x"}
    -- message = x -- number =  15550100003 -- recipients = +15550100004 -- recipients = ${GROUP} → {"message":"x","number":"${THIRD}","recipients":["+15550100004","${GROUP}"]}
    -- auth = ${SECRET} -- message = x -- Auth = ${OTHER} → {"message":"x"}
    -- auth; filename="token.txt" = ${SECRET} -- message = x -- Auth; filename="x" = ${OTHER} → {"message":"x"}
    -- file; filename=""\r\n${PNG} → {"base64_attachments":["data:image/png;${PNG_DATA}"]}
    -- data; filename="x.json"\r\nContent-Type: application/json = {"message":"x"} → {"base64_attachments":["data:application/json;filename=x.json;base64,eyJtZXNzYWdlIjoieCJ9"]}
    * ${MADE} | {"base64_attachments":["${SNAP.replace('snap', 'a,b')}"]}
    ${FILE_NAMES.map((name) => literal`-- f; filename="${name}"\r\n${PNG}`)}`;

  // Next to a file it was dropped, and the picture went to the default recipient.
  table("attack: lose the recipients in a form's JSON that is not its only field", hook(TO_ALL))`
    * bearer → 400 bad_field
    -- payload = {"message":"x","recipients":["${THIRD}"]} -- file; filename="snap.png"\r\n${PNG} -- x = y
    -- file; filename="snap.png"\r\n${PNG} -- data = {"message":"x","recipient\u0073":"${THIRD}"} -- payload = x
    -- payload = {"message":"x","base64_attachments":["QUJD"]} -- file; filename="snap.png"\r\n${PNG}
    -- payload = {"recipients":15550100003} -- message = x
    -- message = x -- payload = {"recipients":["${THIRD}"]} -- payload = y ;; -- message = x -- payload = y -- payload = {"recipients":["${THIRD}"]}
    -- message = x -- payload = y -- data = {"recipients":["${THIRD}"]} ;; -- payload = {"recipients":["${THIRD}"]} -- payload = y
    -- payload = {"Recipients":["${THIRD}"]} -- message = x ;; -- data = {"number":"${THIRD}"} -- message = x
    'message=x&payload=%7B%22recipient%22%3A%22%2B15550100003%22%7D' ;; 'data=%7B%22recipients%22%3A%5B%5D%7D&message=x'
    * bearer → 400 bad_json
    -- payload = {"recipients":["${THIRD}"] -- message = x
    * ${MADE}
    -- payload = {"event":"play","number":5,"recipients":null} -- message = x → {"message":"x"}
    -- payload = {"to":"${THIRD}","recipents":["${THIRD}"]} -- message = x → {"message":"x"}
    # Beside nothing but files it is the payload, as Plex's is, with its own recipients.
    -- payload = {"message":"x","recipients":["${THIRD}"]} -- file; filename="snap.png"\r\n${PNG} → {"message":"x","recipients":["${THIRD}"],"base64_attachments":["${SNAP}"]}
    -- file; filename="snap.png"\r\n${PNG} -- data = {"message":"x","recipient\u0073":"${THIRD}"} → {"message":"x","recipients":["${THIRD}"],"base64_attachments":["${SNAP}"]}
    @ {"message":"{{event}}: {{Metadata.title}}"} | -- payload = {"event":"play","Metadata":{"title":"A"}} -- thumb; filename="snap.png"\r\n${PNG} → {"message":"play: A","base64_attachments":["${SNAP}"]}`;

  const SEND_FIELDS =
    ('number recipients text_mode mentions quote_timestamp quote_author quote_message quote_mentions ' +
      'edit_timestamp notify_self view_once link_preview').split(' ');

  const COMMON_FORM_TYPES = [`Content-Type: ${URLENCODED}`, ''].map((type) => `* bearer | ${type} → 400`);
  table('attack: have a form that no encoder wrote, or JSON within a quote or a bracket, sent as a text', hook())`
    ${COMMON_FORM_TYPES}
    # JSON within a quote or a bracket, as cmd.exe and careless programs leave it.
    ''{message:hi,recipients:[+15550100003]}'' ;; '"{\"message\":1}"' ;; [{"message":"x"}] ;; ' [ {' ;; '["{' ;; '“{"message":"x"}”'
    '“{"message":"x","recipients":["+15550100003"]}”' ;; [1] ;; [1,[{"auth":"${SECRET}"}]]
    # A credential.
    'auth=0123456789abcdef x' ;; 'auth=${SECRET}&message=hi & there' ;; '@auth=${SECRET} x' ;; 'Door 1&%40auth=${OTHER}' ;; 'Door 1&auth=${SECRET}'
    'auth=the-token' ;; 'auth[]=${SECRET}' ;; 'Door 1&amp;auth=${SECRET}' ;; 'Door 1&au%74h=${SECRET}' ;; 'auth = ${SECRET}'
    # Recipients in any spelling.
    'text=Door code is 4711&recipients=%2B15550100003' ;; 'Door open&recipients=a.01' ;; 'x;recipients=a.01' ;; 'x&message=hello'
    'Door 1&recipients[]=a.01' ;; 'Door 1&recipients[0]=a.01' ;; 'Door 1&recipients%5B%5D=a.01' ;; 'Door 1&recipients.0=a.01'
    'Door 1&@recipients=a.01' ;; 'Door 1&%40recipients=a.01' ;; 'Door 1&Recipients=a.01' ;; 'Door 1&recipient=a.01' ;; 'Door 1&amp;recipients=a'
    'Door 1&recipients=' ;; 'Door 1&#38;recipients=a' ;; 'Door 1& recipients =a' ;; 'recipients = a.01' ;; 'x=1&Recipients=a.01'
    # Any other field of a send.
    'subject=Alarm&number=%2B15550100003&text=hi' ;; 'x=a b&number=+15550100003' ;; 'Tom & number=5' ;; 'Door 1&Number=5'
    'subject=Alarm&base64_attachments=' ;; 'a=b&base64_attachment=QUJD' ;; 'Door 1&amp;base64_attachments[]=QUJD' ;; 'a=b&num%62er=5'
    ${SEND_FIELDS.map((name) => `'subject=Alarm&${name}=x&text=hi' ;; 'Door 1&${name}=x'`)}
    # With a template too.
    @ {"message":"{{x}}"} | 'Door 1&recipients=a.01' ;; @ {"message":"{{x}}"} | 'Door 1&number=5' ;; @ {"message":"{{x}}"} | 'Door 1&x=5'
    # It is text where it is declared text, or as something else.
    * Content-Type: text/plain | ${MADE} | same
    * Content-Type: application/octet-stream | ${MADE} | same
    'title=Back up&message=ok&recipients=%2B15550100003' ;; [{"message":"x"}] ;; 'Backup%20done' ;; 'recipients: +15550100003'`;

  table(
    'attack: have a form or a query sent that is truncated, not UTF-8, or names a recipient in another spelling',
    hook({
      ...{ ...TO_ALL, allow: ['send', 'GET /v2/send'] },
    }),
  )`
    * bearer → 400
    'message=Tom & Jerry' ;; 'message=AT&T' ;; 'message=AT&T: x=1' ;; 'message=a & b = c' ;; 'message=a &b;c=d' ;; 'message=x&y' ;; 'message=x&=y' ;; 'message=x&sticker'
    GET /v2/send?message=Tom%20&%20Jerry ;; GET /v2/send?message=AT&T
    'message=T%FCr' ;; 'message=%C3' ;; 'message=%C3%C3' ;; 'message=%ED%A0%80' ;; 'message=%C3ü' ;; 'x%FF=1&message=x'
    'message=x&amp;recipients=%2B15550100003' ;; 'amp;recipients=%2B15550100003&message=x' ;; 'message=x&b;recipients=a.01'
    GET /v2/send?message=x&amp;recipients=%2B15550100003 ;; GET /v2/send?message=x&amp%3Brecipients=a.01
    'message=x&amp;y' → "%26 (curl --data-urlencode)" ;; 'message=x&y' → "post it as text/plain"
    * ${MADE}
    'message=Tom %26 Jerry' → {"message":"Tom & Jerry"} ;; 'message=x&&' → {"message":"x"} ;; 'message=x&sticker=&view_once=' → {"message":"x"}
    'message=x%3Brecipients%3D%2B15550100003%0Arecipients%3Da' → {"message":"x;recipients=+15550100003\nrecipients=a"}
    'message=Who; when; recipients' → {"message":"Who; when; recipients"} ;; 'message=1;to=%2B15550100003' → {"message":"1;to=+15550100003"}
    'message={"recipients":["+15550100003"]}' → {"message":"{\"recipients\":[\" 15550100003\"]}"} ;; 'message=x;number=+15550100003' → {"message":"x;number= 15550100003"}
    # A value is a value.
    'message=x;recipients=%2B15550100003' → {"message":"x;recipients=+15550100003"} ;; 'message=Who; when; recipients: 5' → {"message":"Who; when; recipients: 5"}
    'message=x%0Arecipients=a' → {"message":"x\nrecipients=a"} ;; GET /v2/send?message=x;recipients=a → {"message":"x;recipients=a"}
    GET /v2/send?message=Tom%20%26%20Jerry → {"message":"Tom & Jerry"} ;; 'message=98%' → {"message":"98%"} ;; 'message=98% für %41&n=5' → {"message":"98% für A"}
    # A plus is a space in every form.
    'message=C++ build failed' → {"message":"C   build failed"} ;; 'message=C%2B%2B+failed' → {"message":"C++ failed"}
    'message=+5 °C&recipients=+15550100003' → {"message":" 5 °C","recipients":["${THIRD}"]}
    'message=a%0Ab&n=5' → {"message":"a\nb"} ;; GET /v2/send?message=a%0Arecipients%21&n=5 → {"message":"a\nrecipients!"}
    -- message = a & b; recipients=x → {"message":"a & b; recipients=x"}`;

  table(
    'a template that finds nothing is 400 with a picture; no credential gets into a text',
    hook(),
  )`
    * @ {"message":"{{a}}"} | bearer → 400 bad_field
    -- b = c -- f; filename="x" = x ;; {"b":"c","base64_attachments":["QUJD"]} ;; {"b":"c","sticker":"a:1"}
    -- f; filename="x" = x ;; {"message":"x","sticker":"a:1"} ;; {"a":"","base64_attachments":["QUJD"]}
    * @ {"message":"{{a}}"} | ${MADE}
    {"a":"x","send_at":1} → {"message":"x"} ;; {"a":"x","message":{"text":1}} → {"message":"x"}
    * @ {"message":"{{.}}{{payload}}"} | ${MADE} | {"message":"{\"b\":\"1\",\"payload\":\"{\\\"c\\\":1}\"}{\"c\":1}"}
    'payload={"c":1,"auth":"${SECRET}"}&b=1&@auth=${SECRET}&auth[]=${OTHER}' → {"message":"{\"payload\":\"{\\\"c\\\":1}\",\"b\":\"1\"}{\"c\":1}"}
    -- b = 1 -- payload = {"@auth":"${SECRET}","c":1} -- Auth = ${OTHER}`;

  // Deno 2.9 skipped parts that it could not read, and the message went to the default recipient.
  const FIELD = 'Content-Disposition: form-data;';

  const MESSAGE_PART = literal`--limit\r\n${FIELD} name="message"\r\n\r\nx\r\n`;

  const partOf = (head: string): string => literal`--limit\r\n${head}\r\n\r\n+15550100003\r\n`;

  const SOMEBODY = `${FIELD} name="recipients"`;

  const NOBODY = `${FIELD} name="x"`;

  const TO_PART = partOf(SOMEBODY);

  const headRow = (head: string): string => `'${MESSAGE_PART}${partOf(head)}--limit--\\r\\n'`;

  const IN_MULTIPART = '* bearer | Content-Type: multipart/form-data; boundary=limit';

  table('the recipients of a multipart form are found in any case and with any white space', hook(TO_ALL))`
    ${IN_MULTIPART} → 201 | {"number":"${FROM}","message":"x","recipients":["${THIRD}"]}
    ${
    ['content-disposition:form-data;name="recipients"', 'CONTENT-DISPOSITION: form-data ; NAME="recipients"'].map(
      headRow,
    )
  }`;

  const NO_NAMES_OF_PARTS =
    literal`x\\" recipients,recipients\\,\\recipients,recip\\ients,recipients%00,%72ecipients,recipients\u0000,recipients\x1b,a"b,`;

  const ENCODINGS = ['base64', 'quoted-printable', 'x', 'binary, base64', ''].flatMap((encoding) =>
    [literal`\u0020`, literal`\t`, ''].map((space) => `Content-Transfer-Encoding:${space}${encoding}`)
  );

  const TWO_READINGS = literal`
  ${FIELD} name*=UTF-8''recipients ¦ ${FIELD} name='recipients' ¦ ${FIELD} name = "recipients" ¦ ${FIELD}\r\n name="recipients"
  ${FIELD} name="recipients\n" ¦ Content-Disposition: form-data ¦ Content-Type: text/plain ¦  ¦ ${NOBODY}; name="recipients"
  ${NOBODY}; name*=utf-8''recipients ¦ ${NOBODY}; x=y ¦ ${NOBODY}; ¦ ${NOBODY}; x-y="; name=recipients"
  ${FIELD} x-y="; name=recipients"; name="x" ¦ ${NOBODY} name="recipients" ¦ ${NOBODY}, ${SOMEBODY}
  ${NOBODY}\r\n${SOMEBODY} ¦ ${SOMEBODY}\r\n${SOMEBODY} ¦ ${NOBODY}\n${SOMEBODY} ¦ ${NOBODY}\r${SOMEBODY}
  ${NOBODY}\r\n ; name="recipients" ¦ ${NOBODY}\r\n\t${SOMEBODY} ¦ X-A: b\r\n ${SOMEBODY}\r\n${NOBODY}
  ${NOBODY}\r\nContent-Disposition : form-data; name="recipients" ¦ Content-Disposition: attachment; name="recipients"
  Content-Disposition: name="recipients" ¦ Content-Disposition: form-data, form-data; name="recipients" ¦ \r\n${SOMEBODY}
  ${NO_NAMES_OF_PARTS.split(',').map((name) => SOMEBODY.replace('recipients', name))}
  ${FIELD} name=recipients x ¦ ${FIELD} name=recipients;x ¦ ${FIELD} name=reci\\pients ¦ ${FIELD} name=reci%70ients
  ${FIELD} name=recipients\u00a0 ¦ ${SOMEBODY}; x=y ¦ ${NOBODY}; filename=x; name="recipients"
  ${NOBODY}; filename="x\\"; name="recipients" ¦ ${NOBODY}; filename="x"; filename="y"
  ${NOBODY}\r\nContent-Type: multipart/mixed; boundary=b ¦ ${SOMEBODY}\r\nContent-Type: text/plain\r\ncontent-type: text/plain
  ${ENCODINGS.map((encoding) => literal`${SOMEBODY}\r\n${encoding}`)}
  ${SOMEBODY}\r\nContent-Transfer-Encoding: 8bit\r\nContent-Transfer-Encoding: base64`;

  // One of 6000 bytes, in a body that nearly has it everywhere, took a second.
  const bounded = (boundary: string): string =>
    `bearer | Content-Type: multipart/form-data; boundary=${boundary} | ` +
    `'${MESSAGE_PART.concat('--limit--').replaceAll('limit', boundary)}'`;

  table('the boundary of a multipart form has at most 70 bytes (RFC 2046)', hook())`
    ${bounded('x'.repeat(70))} → 201
    ${bounded('x'.repeat(71))} → 400 bad_json`;

  const OTHER_TYPES = literal`
  ; boundary=limit; boundary=other ¦; boundary=other; boundary=limit ¦; boundary="limit"; Boundary=limit
  ; boundary*=utf-8''limit ¦; x="; boundary=limit" ¦; boundary=limit x ¦; boundary=limit;x ¦; boundary="limit
  ; boundary=limit, multipart/form-data; boundary=other ¦; boundary="li\mit" ¦; boundary= ¦; boundary=""
  , boundary=limit ¦ boundary=limit`;

  table('attack: write a multipart form that two correct programs read differently', hook())`
    ${IN_MULTIPART} → 400 bad_json
    ${TWO_READINGS.trim().split(/\n *| ¦ /).map(headRow)}
    ${['', literal`--\r\n`, literal`\r\n`].map((end) => headRow(literal`${NOBODY}\r\n\r\n\n--limit${end}${SOMEBODY}`))}
    '${MESSAGE_PART}--limit--\r\n${TO_PART}--limit--\r\n' ;; '${MESSAGE_PART}--limit--\r\n${TO_PART}'
    '${MESSAGE_PART}--limit--\r\nx' ;; '${MESSAGE_PART}--limit--x\r\n' ;; '${MESSAGE_PART}--limit--\r\n\r\nrecipients=a.01\r\n'
    '${MESSAGE_PART}${TO_PART.replace('--limit', '--limits')}--limit--\r\n' ;; '${MESSAGE_PART}${TO_PART}'
    '${MESSAGE_PART}${TO_PART.replace('--limit', '--limit ')}--limit--\r\n'
    '${MESSAGE_PART}${TO_PART.replaceAll(literal`\r\n`, literal`\n`)}--limit--\r\n'
    '${TO_PART.replace('--limit', '--other')}${MESSAGE_PART}--limit--\r\n' ;; ' \n${MESSAGE_PART}--limit--\r\n'
    '${MESSAGE_PART.replace(/x(?=\\r\\n$)/, literal`caf\xe9`)}--limit--\r\n'
    '${MESSAGE_PART.replace('message', literal`recipients\xe9`)}--limit--\r\n'
    ${
    OTHER_TYPES.trim().split(/\n *| ¦/).map((type) =>
      `* bearer | Content-Type: multipart/form-data${type} → 400 bad_json`
    )
  }
    '${MESSAGE_PART}--limit--\r\n'`;

  /** What curl -F, OkHttp, fetch and requests declare if a program sets a Content-Type, or does not tell OkHttp the type. */
  const OTHERWISE = [
    ...['', ' text/plain', ' text/plain; boundary=limit', ` ${URLENCODED}`, ' application/octet-stream', ' text/html'],
    ...[' multipart/mixed', ' Multipart/Related; boundary=limit', ' multipart/form-datas; boundary=limit'],
  ].map((type) => `Content-Type:${type}`);

  table('attack: lose the recipients of a multipart form that is declared as something else', hook(TO_ALL))`
    ${OTHERWISE.map((way) => `* ${way} | bearer → 400 bad_json | "but its Content-Type is not multipart/form-data"`)}
    '${MESSAGE_PART}${TO_PART}--limit--\r\n' ;; '\r\n${MESSAGE_PART}--limit--\r\n' ;; '--limit\ncontent-disposition: form-data'
    '--limit\r\nContent-Type: text/plain\r\nX-A: b\r\n${SOMEBODY}\r\n\r\nx\r\n--limit--' ;; '--l\nX-A: b\n${SOMEBODY}\n\nx'`;

  table('the 400 for a multipart form names the part, and what is wrong with it', hook(TO_ALL))`
    ${IN_MULTIPART} → 400 bad_json
    ${headRow(literal`${SOMEBODY}\r\nContent-Transfer-Encoding: base64`)} → "part 2 is encoded (base64, for example)"
    ${headRow(literal`${NOBODY}\r\nContent-Type: multipart/mixed`)} → "part 2 is encoded" ;; ${
    headRow('x')
  } → "part 2 has a line that is no header"
    ${headRow(`${SOMEBODY}; name="x"`)} → "part 2 has a parameter twice" ;; ${
    headRow(`${FIELD} name*=x`)
  } → "or \"name*\""
    ${headRow(`${SOMEBODY}; x=y`)} → "part 2 has more than a name, but is no file" ;; ${
    headRow(FIELD)
  } → "cannot be read"
    ${headRow(`${FIELD} filename="x"`)} → "part 2 has no name" ;; ${
    headRow(`${FIELD} name="a%b"`)
  } → "part 2 has no name"
    ${headRow('X-A: b')} → "part 2 has no \"Content-Disposition: form-data\"" ;; ${
    headRow(literal`${NOBODY}\r\n${NOBODY}`)
  } → "a header twice"
    ${headRow(`${NOBODY}; filename*=x`)} → "filename*" ;; '${MESSAGE_PART}' → "it does not end with its boundary"
    'x${MESSAGE_PART}--limit--\r\n' → "it does not begin with its boundary"`;

  const inUtf16 = (text: string): string => Array.from(text, (char) => `${char}\\x00`).join('');

  const fieldIn = (charset: string): string =>
    literal`'--limit\r\n${FIELD} name="message"\r\nContent-Type: text/plain; charset=${charset}\r\n\r\ncaf\xe9\r\n--limit--\r\n'` +
    ' | Content-Type: multipart/form-data; charset=utf-8; boundary=limit';

  table('a text, a form and undeclared JSON are decoded as their charset says', hook(TO_ALL))`
    * Content-Type: text/plain;charset=ISO-8859-1 | ${MADE}
    'caf\xe9' → {"message":"café"} ;; 'T\xfcr \x80 5\x92' → {"message":"Tür € 5’"} ;; 'T\xc3\xbcr' → {"message":"TÃ¼r"}
    {"message":"x"} → {"message":"x"} ;; '{"message":"caf\xe9"}' → {"message":"café"}
    # Colours and control characters go as they do from UTF-8.
    '\x1b[31mrot\x9b\x00 f\xfcr\r\n' → {"message":"rot› für\n"}
    'recipients=a.01&message=x' → {"message":"recipients=a.01&message=x"}
    * ${MADE}
    'caf\xe9' | Content-Type: TEXT/PLAIN ; format=flowed; CharSet="Latin1" → {"message":"café"} ;; 'x\xa4' | Content-Type: text/plain; charset=iso-8859-15 → {"message":"x€"}
    '\xcf\xf0' | Content-Type: text/plain; charset='windows-1251' → {"message":"Пр"} ;; '\x93\xfa\x96{' | Content-Type: text/plain; charset=Shift_JIS → {"message":"日本"}
    '\x1b$BF|K\\\x1b(B' | Content-Type: text/plain; charset=iso-2022-jp → {"message":"日本"} ;; '\xc4\xe3' | Content-Type: text/plain; charset=gb18030 → {"message":"你"}
    '${inUtf16('hi')}\xfc\x00' | Content-Type: text/plain; charset=utf-16le → {"message":"hiü"} ;; '\xff\xfe${
    inUtf16('hi')
  }' | Content-Type: text/plain; charset=UTF-16 → {"message":"hi"}
    '\xfe\xff\x00h\x00i' | Content-Type: text/plain; charset=UTF-16 → {"message":"hi"} ;; '${
    inUtf16('{"message":"hi"}')
  }' | Content-Type: text/plain; charset=utf-16le → {"message":"hi"}
    'Tür' | Content-Type: text/plain; charset=UTF-8 → same ;; 'Tür' | Content-Type: text/plain; charset="utf8" → same ;; 'Tür' | Content-Type: text/plain; charset= → same
    # The escapes of a form are bytes of its charset too.
    * Content-Type: ${URLENCODED}; charset=ISO-8859-1 | ${MADE}
    'title=x&message=caf\xe9' → {"message":"café"} ;; 'message=T%FCr+%80+%26%25' → {"message":"Tür € &%"} ;; 'payload={"message":"caf%e9"}' → {"message":"café"}
    'message=%93%FA%83A' | Content-Type: ${URLENCODED}; charset=shift_jis → {"message":"日ア"}
    'caf\xe9' → {"message":"café"} ;; 'recipients=%2B15550100003&message=x' → {"message":"x","recipients":["${THIRD}"]}
    # JSON is UTF-8 (RFC 8259 8.1), whatever is declared.
    {"message":"Tür"} | Content-Type: application/json; charset=ISO-8859-1 → {"message":"Tür"} ;; {"message":"x"} | Content-Type: application/json; charset=utf-7 → {"message":"x"}
    # In a multipart form each field has its own, as Apache's HttpClient writes it.
    ${fieldIn('ISO-8859-1')} → {"message":"café"} ;; ${fieldIn('"windows-1252"')} → {"message":"café"}`;

  table('a charset that is not known, or not the one that is declared, is a 400 that says what to send', hook())`
    * bearer → 400 bad_json | "send UTF-8."
    ${
    ['utf-7', 'utf-32', 'hz-gb-2312', 'iso-2022-kr', 'replacement', 'binary', 'x', '../x'].map((charset) =>
      `'x' | Content-Type: text/plain; charset=${charset} ;; {"message":"x"} | Content-Type: text/plain; charset=${charset} ;; 'message=x' | Content-Type: ${URLENCODED}; charset=${charset}`
    )
  }
    '\x93\x01' | Content-Type: text/plain; charset=shift_jis ;; 'x' | Content-Type: text/plain; charset=utf-16le ;; 'x\x1b$' | Content-Type: text/plain; charset=iso-2022-jp
    '\x00\xd8' | Content-Type: text/plain; charset=utf-16le ;; 'message=%93' | Content-Type: ${URLENCODED}; charset=shift_jis ;; 'message=%96%7B' | Content-Type: ${URLENCODED}; charset=shift_jis
    ${fieldIn('shift_jis')} ;; ${fieldIn('utf-7')}`;

  table('attack: hide a field, a credential or JSON in a charset', hook())`
    * bearer → 400 bad_field
    '${inUtf16('see @auth: ')}${inUtf16(SECRET)}' | Content-Type: text/plain; charset=utf-16le
    '${inUtf16(`{"message":"x","recipient":"${STRANGER}"}`)}' | Content-Type: text/plain; charset=utf-16le
    '${inUtf16('subject=Alarm&number=5')}' | Content-Type: ${URLENCODED}; charset=utf-16le
    '\x1b(Jsubject=Alarm&\x1b(Bnumber=5' | Content-Type: ${URLENCODED}; charset=iso-2022-jp
    '\x1b(Jmessage=x&recipi\x1b(Bents=' | Content-Type: ${URLENCODED}; charset=iso-2022-jp
    * bearer → 403 recipient_not_allowed
    '${inUtf16(`{"message":"x","recipients":["${STRANGER}"]}`)}' | Content-Type: text/plain; charset=utf-16le
    '\x1b(J{"message":"x","recip\x1b(Bients":["${STRANGER}"]}' | Content-Type: text/plain; charset=iso-2022-jp
    * ${MADE}
    '${inUtf16(`{"message":"x","auth":"${SECRET}"}`)}' | Content-Type: text/plain; charset=utf-16le → {"message":"x"}
    '\x1b(J{"message":"x","au\x1b(Bth":"${OTHER}"}' | Content-Type: text/plain; charset=iso-2022-jp → {"message":"x"}`;

  const TERMINAL = literal`
  one\r\ntwo\r\n\tthree ⇒ one\ntwo\n\tthree
  \u001b[1;31mFAILED\u001b[0m \u001b[38;5;9m[x]\u001b[m ok\u001b[K ⇒ FAILED [x] ok
  \u009b31mred\u009b0m ⇒ red
  \u001b(B\u001b[mplain ⇒ plain
  \u001b]0;a title\u0007a \u001b]8;;https://a.b\u001b\\link\u001b]8;;\u001b\\ ⇒ a link
  \u001b]0;without an end ⇒ ]0;without an end
  10%\r20%\u0008\u0000\u007f\u0085\u001b ⇒ 10%20%
  [31m[0m stays ⇒ [31m[0m stays`.trim().split('\n').map((line) => line.trim().split(' ⇒ ') as [string, string]);

  table('a text and a form lose terminal control codes and control characters; JSON loses nothing', hook())([
    `* ${MADE}`,
    TERMINAL.flatMap(([text, message]) => [
      `'${text}' | Content-Type: text/plain → {"message":"${message}"}`,
      `'${text}' | Content-Type: ${URLENCODED} → {"message":"${message}"}`,
      `{"message":"${text}"} → same`,
      `'message=${encodeURIComponent(String(unescaped(text)))}' → {"message":"${message}"}`,
      `-- message = ${text} → {"message":"${message}"}`,
    ]),
  ]);

  table('a text beyond 64 KiB is cut between characters, with an ellipsis; JSON and forms are not cut', hook())`
    * ${MADE}
    '${'x'.repeat(LIMIT)}' → same ;; '${'x'.repeat(LIMIT + 1)}' → {"message":"${'x'.repeat(LIMIT - 3)}…"}
    '${'x'.repeat(LIMIT - 5)}😀😀' → {"message":"${'x'.repeat(LIMIT - 5)}…"}
    '\u001b[m${'x'.repeat(LIMIT)}\r' → {"message":"${'x'.repeat(LIMIT)}"}
    '${'ü'.repeat(8 * LIMIT)}' → {"message":"${'ü'.repeat(LIMIT / 2 - 2)}…"}
    {"message":"${'x'.repeat(LIMIT + 9)}"} → same
    'message=${'x'.repeat(LIMIT + 9)}' → {"message":"${'x'.repeat(LIMIT + 9)}"}`;

  table('an empty body is called empty, as JSON, text and multipart, but a template without names needs none', hook())`
    * bearer → 400 bad_json | "The body is empty. " | "a client that repeats a request without its body after a 401 needs a bearer header."
    '' | Content-Type: application/json ;; POST /v2/send | Content-Type: application/json ;; POST /v2/send | Content-Type: multipart/form-data; boundary=limit
    '' | Content-Type: application/json | Transfer-Encoding: chunked
    * bearer → 400 bad_field | "The body is empty, " | "a client that repeats a request without its body after a 401 needs a bearer header."
    '' ;; POST /v2/send ;; POST /v2/send | Content-Type: text/plain ;; '' | Content-Type: ${URLENCODED} | Transfer-Encoding: chunked
    * @ {"message":"Door opened"} | ${MADE} | {"message":"Door opened"}
    POST /v2/send ;; POST /v2/send | Content-Type: text/plain`;

  const READS_FILE = reading('{{who}}: {{message}}{{^base64_attachments}}!{{/base64_attachments}}');

  table("a template sees a text, a form, a query and a file's data as it sees JSON", hook(READS_FILE))`
    * @ {"allow":["send","GET /v2/send"]} | ${MADE}
    'hello' → {"message":": hello!"} ;; 'who=ada&message=hello' → {"message":"ada: hello!"}
    -- who = ada -- f; filename="x" = x → {"message":"ada: ","base64_attachments":["data:application/octet-stream;filename=x;base64,eA=="]}
    {"who":"ada","message":"hello"} → {"message":"ada: hello!"}
    GET /v2/send?who=9 → {"message":"9: !"} ;; GET /v2/send?payload=%7B%22who%22%3A9%7D → {"message":"9: !"}
    * @ {"allow":["send","GET /v2/send"]} | bearer → 400 bad_field
    '' ;; GET /v2/send ;; GET /v2/send/?`;

  const JSON_TYPES = [
    'application/json',
    'Application/JSON ; charset=utf-8',
    'application/problem+json',
    'text/x+json',
  ];

  table('attack: pass off invalid JSON as JSON, or an invalid form as a form', hook(reading('{{text}}{{message}}')))`
    * bearer → 400 bad_json
    'payload={"message":"x"' ;; ' \n\t{"message":"x"' ;; {message:x} ;; {"message":"x"} {} ;; '\ufeff{"message":"x"}'
    { | Content-Type: ${URLENCODED} ;; {{text}} | Content-Type: text/plain ;; 'payload={"a":${'['.repeat(100_000)}'
    '\u00a0{"message":"x"}' ;; '{"message":"\xff"}' ;; {"a":${'['.repeat(64)}${']'.repeat(64)}}
    'no parts' | Content-Type: multipart/form-data; boundary=limit ;; '' | Content-Type: multipart/form-data; boundary=limit
    'message=x' | Content-Type: multipart/form-data; boundary=limit
    -- data = {"message":"x"} | Content-Type: multipart/form-data ;; -- data = {"message":"x"
    'caf\xe9' ;; 'message=caf\xe9' ;; '\xff\xd8\xff\xe0' | Content-Type: image/jpeg
    ${JSON_TYPES.map((type) => `* bearer | Content-Type: ${type} → 400 bad_json`)}
    [{"message":"x"}] ;; "text" ;; 'null' ;; 'hello' ;; '' ;; 'message=hello' ;; '${MESSAGE_PART}--limit--\r\n'`;

  // Written by hand or by a sloppy program, these went to the default recipient, or as a text.
  const LOST_IN_FORMS = listed`
    recipients= ;; recipients=&recipients=%2B15550100003 ;; recipient=%2B15550100003 ;; recipient=+15550100003 and so on
    Recipients=%2B15550100003 ;; RECIPIENTS=+15550100003 or so ;; recipients[a]=%2B15550100003 ;; recipients[]=
    recipients%5B0%5D%5B%5D=%2B15550100003 ;; recipients.0=+15550100003 or so ;; number=15550100003 ;; number=5 files
    number=%2B1 ;; Number=%2B15550100003 ;; number[]=x ;; base64_attachments[0]=QUJD ;; Recipients= ;; recipients=-x
    %20recipients=%2B15550100003 ;; recipients+=%2B15550100003
    recipients=${INTERNAL_ID} ;; recipients=a%0Ab`;

  table('attack: have a form or a text sent that is empty, or has no recipient', hook())`
    * bearer → 400 bad_field
    POST /v2/send ;; '' ;; ' \r\n' ;; '\u001b[0m' ;; 'payload=' ;; 'payload=%5B%5D' ;; 'data=null' ;; 'message=&x=1'
    'payload=%7B%22message%22%3A%22x%22%7D&payload=%7B%7D' ;; 'payload=%7B%22message%22%3A%22x%22%7D&x=1'
    -- payload = {"message":"x"} -- payload = {"message":"y"} ;; -- payload = {"message":"x"} -- data = {"message":"y"}
    -- x = {"message":"x"} ;; '--limit--\r\n' | Content-Type: multipart/form-data; boundary=limit ;; -- data = x
    -- message = \u0020 ;; -- message = x -- recipients = ;; -- message = x -- recipients.0 = +15550100003
    -- message = x -- f; filename=".." = x ;; -- message = x -- f; filename="${'x'.repeat(5000)}" = x
    -- message = x -- base64_attachments = data:a/b;filename=../x;base64,QUJD
    ${LOST_IN_FORMS.map((fields) => `'${fields}&message=x'`)}
    ${LOST_IN_FORMS.filter((fields) => !fields.includes(' ')).map((fields) => `'message=x&${fields}'`)}`;

  table('a text, a form or a webhook without a credential, with a wrong one, or with one in a field is 401', hook())`
    * 'Backup done' → 401 unauthorized ;; * 'message=Backup done' → 401 unauthorized
    * -- message = Backup done → 401 unauthorized ;; * {"message":"x","number":2} → 401 unauthorized
    * {} → 401 unauthorized
    POST /v2/send ;; Authorization: ;; bearer ${OTHER}
    * → 401 unauthorized | reason=no_credential
    'Backup done&auth=${SECRET}' ;; 'message=Backup done&auth=${SECRET}' | Content-Type: ${URLENCODED}
    -- message = x -- auth = ${SECRET} ;; 'data=${AUTHED(SECRET)}' | Content-Type: ${URLENCODED}
    -- data = ${AUTHED(SECRET)} → WWW-Authenticate: Basic realm="signal", Bearer realm="signal"
    {"auth":"${OTHER}","number":2,"recipients":"x"} → reason=unknown_token
    -- message = x | Content-Encoding: gzip → 415 unsupported_encoding | reason=undefined`;

  const SHOWS_ALL = hook(reading('{{auth}}{{.}}{{message}}'));

  table(
    'a text or a webhook may have its token in each place, and neither the message nor the backend gets it',
    SHOWS_ALL,
  )([
    `* → 201 | > Authorization: | ${MEANT}`,
    SPELLINGS.map(({ method, ask: make }) => {
      const message = method === 'body' ? `${HELLO}hello` : '{"message":"hi"}hi';
      return `${rowWith({ body: "'hi'", ...make(SECRET) })} → auth=${method} | ${JSON.stringify({ message })}`;
    }),
  ]);

  table(
    'for a token without defaults and message, the error for a text or a form at /v2/send names the settings that would accept it',
    {},
  )`
    * bearer → 400 bad_json | ". To send text or a form, use a token with "defaults" or "message"."
    'Backup done' ;; 'message=x' ;; ' ' ;; -- message = x
    # Not where that would not help.
    * bearer → 400 bad_json
    '{"message"' → "it ends before the object is complete, at byte 10."," ;; 'x' | POST /v1/send → "it must begin with \"{\", at byte 0.","`;

  table(
    'a message that is an object or a list is not a text, unless a template reads it',
    tokens({ defaults: DEFAULTS }),
  )`
    * bearer → 400 bad_field
    {"message":{"text":"hi"}} → "The field \"message\" must be text, not an object or a list.","
    {"message":["a"]} → "must be text" ;; {"message":[]} → "must be text" ;; 'message=a&message=b' → "must be text"
    * bearer → 201
    {"message":5} ;; @ {"message":"{{message.text}}"} | {"message":{"text":"hi"}} → {"message":"hi","number":"${FROM}","recipients":["${TO}"]}`;

  const READS_NOTE = hook(reading('{{note}}|{{message}}'));

  table('control characters go from every field of a form, the CR of line breaks too, but not from JSON', READS_NOTE)`
    * ${MADE} | {"message":"a\nbc|one\ntwo\n"}
    'message=one%0D%0Atwo%0D%0A%0D%0A&note=a%0D%0Ab%0Dc' ;; -- message = one\r\ntwo\r\n\r\n -- note = a\r\nb\rc
    * ${MADE} | {"message":"a\r\nb\rc|one\r\ntwo\r\n"}
    {"message":"one\r\ntwo\r\n\r\n","note":"a\r\nb\rc"}
    'payload={"message":"one\\r\\ntwo\\r\\n\\r\\n","note":"a\\r\\nb\\rc"}'`;

  /**
   * The boundary, the heads of a field and of a file, what becomes of the file, and the program that writes this form.
   */
  // The name of "filename*" is cleaned as that of "filename" is.
  const NAMES = [
    ["utf-8''%C3%BC.png", 'ü.png'],
    ["UTF-8'de'a%20b.png", 'a b.png'],
    ["iso-8859-1'en'%A3%80.png", '£€.png'],
    ["utf-8''..%2F..%2Fetc%2Fa.png", 'a.png'],
    ["utf-8''C%3A%5Ca%3Bb%2Cc%00%0D%0A%1B%C2%9B.png", 'a_b,c_____.png'],
    ["utf-16be''%00.%00.%00%2F%00a%00%3B0", undefined],
    ["utf-16be''%00%2E%00%2E%00%2F%00a%00%3B", 'a_'],
    ["utf-8''a.png%3Bbase64%2Cx", 'a.png_base64,x'],
    ["utf-8''%FC.png", undefined],
    ["utf-7''a.png", undefined],
    ["shift_jis''%93", undefined],
    ['ü.png', undefined],
    ["utf-8''ü.png", undefined],
    ["utf-8''%zz", undefined],
    ["utf-8'a.png", undefined],
    ["''a.png", undefined],
  ] as const;

  table('the name of a file is that of "filename*", cleaned; one that cannot be decoded is 400', hook(TO_ALL))([
    `* bearer`,
    NAMES.map(([encoded, name]) => {
      const file = `-- f; filename="=?utf-8?B?w7wucG5n?="; filename*=${encoded} = A`;
      const made = `data:application/octet-stream;filename=${name};base64,QQ==`;
      return name === undefined
        ? `${file} → 400 bad_json`
        : `${file} → 201 | ${MEANT} | ${JSON.stringify({ base64_attachments: [made] })}`;
    }),
    `-- f; filename="a.png"; filename*=utf-8''.. = A → 400 bad_field`,
    `-- f; filename="a.png"; filename*=utf-8'' = A → 201 | ${MEANT} | {"base64_attachments":["data:application/octet-stream;base64,QQ=="]}`,
  ]);

  const HONEST = fixture('multipart.txt');

  table(
    'a multipart form is read as common programs write it: fields, files, and their headers in any order',
    hook(TO_ALL),
  )([
    `* ${MADE} | {"message":"a","recipients":["${THIRD}"]}`,
    HONEST.trim().split('\n').flatMap((line) => {
      const [boundary = '', field = '', file = '', made = ''] = line.trim().split(' ¦ ');
      const mark = `--${boundary.replace(/;.*|"/g, '')}`;
      return [false, true].map((isReversed) => {
        const parts = [['name="message"', 'a'], [field, THIRD], [file, '\\n-- ']].map(([head, value]) => {
          const lines = `${FIELD} ${head}`.split('\\r\\n');
          return `${mark}\\r\\n${(isReversed ? lines.reverse() : lines).join('\\r\\n')}\\r\\n\\r\\n${value}\\r\\n`;
        });
        const type = `Content-Type: multipart/form-data; boundary=${boundary}`;
        return `'${
          parts.join('')
        }${mark}--\\r\\n' | ${type} → {"base64_attachments":["data:${made}.png;base64,Ci0tIA=="]}`;
      });
    }),
  ]);
});
