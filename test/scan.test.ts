import { suite } from 'node:test';
import { assert } from './assertions.ts';
import { fixture } from './files.ts';
import { BodyScan } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { randomTest } from './random.ts';
import { literal } from './rows.ts';
import { MIB, SECRET } from './samples.ts';

const T = 'the-token';

/**
 * Pushes a document through a scanner as RequestBody does; `passed` is what was relayed. The chunks are copied first,
 * because the scanner overwrites the value of auth.
 */
function push(scan: InstanceType<typeof BodyScan>, chunks: Buffer[], passed: Uint8Array[] = []): Uint8Array[] {
  const held: Uint8Array[] = [];
  for (const chunk of chunks) {
    const copy = Buffer.from(chunk);
    scan.write(copy);
    (scan.isEnded ? held : passed).push(copy);
  }
  scan.end();
  passed.push(...held);
  return passed;
}

function scanAll(chunks: Buffer[]) {
  const scan = new BodyScan();
  return { out: Buffer.concat(push(scan, chunks)).toString(), auth: scan.auth, fields: scan.takeFields() };
}

/** A document cut in two at every byte (a long one at every 41st), and cut into single bytes. */
function* everySplit(text: string | Buffer): Generator<Buffer[]> {
  const bytes = Buffer.from(text as string);
  const step = bytes.length > 2000 ? 41 : 1;
  for (let i = 0; i <= bytes.length; i += step) yield [bytes.subarray(0, i), bytes.subarray(i)];
  yield Array.from(bytes, (byte) => Buffer.from([byte]));
}

/** Bytes in pieces of one size. */
function cutInto(bytes: Buffer, size: () => number): Buffer[] {
  const chunks: Buffer[] = [];
  for (let at = 0; at < bytes.length; at += chunks.at(-1)!.length) chunks.push(bytes.subarray(at, at + size()));
  return chunks;
}

/** What a function returns or throws. */
function outcome(run: () => unknown): unknown {
  try {
    return run();
  } catch (error) {
    return error;
  }
}

/** Documents, by white space between them: ␊ is a line feed in one, ␠ a space, and so on. */
function documents(text: string): string[] {
  const control = (char: string): string => String.fromCharCode(char.charCodeAt(0) - 0x2400);
  return text.trim().split(/[ \n]+/).map((document) => document.replace(/[\u2400-\u2420]/g, control));
}

const LONG_TEXT = 'é'.repeat(300) + 'x'.repeat(300);
const MASK = '␠'.repeat(T.length);

/** Rows of what is shown, a document, what is relayed if that differs, and the value of `auth`. */
const SCANNED = fixture('json-auth.txt').trimEnd() + literal`
  a long key ¦ {"${'k'.repeat(600)}":1,"auth":"${T}"} ¦ {"${'k'.repeat(600)}":1,"auth":"${MASK}"} ¦ ${T}
  a long key that begins like one that matters ¦ {"auth${literal`\u0000`.repeat(60)}":1}
  a long text ¦ {"a":"${LONG_TEXT}","auth":"${T}"} ¦ {"a":"${LONG_TEXT}","auth":"${MASK}"} ¦ ${T}
  deep nesting ¦ {"a":${'['.repeat(63)}${']'.repeat(63)}}`;

suite('scan', SIDE_BY_SIDE, () => {
  test('BodyScan: auth is overwritten with spaces and everything else is relayed, cut at every byte', () => {
    for (const line of SCANNED.trim().split('\n')) {
      const [name = '', ...texts] = line.trim().split(/ ¦ ?/);
      const [input, output = input, auth] = texts.map((text) => documents(text)[0]) as [string, string?, string?];
      for (const chunks of everySplit(input)) {
        const scanned = scanAll(chunks);
        assert.deepEqual([scanned.out, scanned.auth], [output, auth], name);
      }
    }
  });

  test('BodyScan: reports every field that matters, decoded, cut at every byte', () => {
    const document = literal`{"number":"\u002b4912","recipients":["+1","group.x","ü\n"],"recipient":"r","members":[],
    "admins":["a"],"answers":["y",1],"selected_answers":[0,2],
    "base64_attachment":"data:image/png;filename=a\u002fb.png;base64,QUJD\/\u002b","base64_attachments":["QUJD","data:;base64,QUJD","",
    "data:application/pdf;filename=Invoice, März; 1\u002e,base6,4.pdf;\u0062ase64,QUJD","no, data; here"],"x":"y"}`;
    // Of an attachment, its first 4 KiB.
    const fields =
      literal`number=+4912|recipients=+1|recipients=group.x|recipients=ü␊|recipient=r|admins=a|answers=y|answers=1|
    selected_answers=0|selected_answers=2|base64_attachment=data:image/png;filename=a/b.png;base64,QUJD/+|base64_attachments=QUJD|
    base64_attachments=data:;base64,QUJD|base64_attachments=|base64_attachments=data:application/pdf;filename=Invoice, März; 1.,base6,4.pdf;base64,QUJD|
    base64_attachments=no, data; here|other=x`.replace(/\n */g, '').replace('␊', '\n').split('|');
    for (const chunks of everySplit(document)) {
      const scanned = scanAll(chunks);
      assert.equal(scanned.out, document);
      assert.deepEqual(
        scanned.fields.map((field) => `${field.key}=${field.key === 'other' ? field.name : field.value}`),
        fields,
      );
    }
  });

  const DEEP = `{"a":${'{"a":'.repeat(70)}1${'}'.repeat(70)}}`;

  const NOT_AN_OBJECT = [
    ...['', ' ', '{\u00a0}'],
    ...documents(fixture('json-invalid.txt')),
    ...documents(literal`
  ${DEEP} ${'\u{feff}'}{} {"a":${'['.repeat(64)}${']'.repeat(64)}} {"a":${'1'.repeat(4097)}}`),
  ];

  /** Documents that are valid JSON, but that the backend would read differently than expected. */
  const BAD_FIELDS = documents(literal`
  {"auth":1} {"auth":["x"]} {"auth":{}} {"auth":"x","auth":"x"} {"auth":"x","\u0061uth":"y"} {"Auth":"x"} {"AUTH":"x"}
  {"\u0041uth":"x"} {"auth":null,"auth":"x"} {"auth":"${literal`\u0041`.repeat(683)}"}
  {"number":1} {"number":["+1"]} {"number":true} {"number":"+1","number":"+2"} {"number":"+1","Number":"+2"}
  {"NUMBER":"+1"} {"recipients":"+1"} {"recipients":{}} {"recipients":[1]} {"recipients":[null]} {"recipients":[["+1"]]}
  {"recipients":[{"a":1}]} {"recipients":["+1",true]} {"recipients":1} {"recipients":["+1"],"recipients":["+2"]}
  {"recipients":["+1"],"Recipients":["+2"]} {"recipientſ":["+1"]} {"recipient\u017f":["+1"]} {"recipient\u017F":["+1"]}
  {"\u0052ecipients":["+1"]} {"recipients":false} {"recipients":["${'1'.repeat(4097)}"]} {"recipient":["+1"]}
  {"recipient":1} {"Recipient":"+1"} {"recipient":"+1","recipient":"+2"} {"memberſ":["x"]} {"admin\u017f":["x"]}
  {"ADMINS":[]} {"members":"x"} {"members":null,"members":["+1"]} {"base64_attachments":"x"} {"base64_attachments":[null]}
  {"base64_attachments":true} {"baſe64_attachments":[]} {"base64_attachment":["x"]}
  {"base64_attachments":[],"base64_attachments":[]} {"answers":[null]} {"answers":[true]} {"answers":["a"],"Answers":["-b"]}
  {"selected_answer\u017f":[1]}
  ${
    [';', ',', literal`\u003b`, literal`\u002c`, literal`\u003B`, literal`\u002C`].map((mark) =>
      `{"base64_attachments":["${'A'.repeat(4097)}${mark}QUJD"]}`
    ).join(' ')
  }`);

  for (const [code, all] of [['bad_json', NOT_AN_OBJECT], ['bad_field', BAD_FIELDS]] as const) {
    const late = code === 'bad_field' ? '; but for "auth", this waits while its sender is not known' : '';
    test(`BodyScan: a bad document is ${code} however it is cut, and nothing complete was relayed${late}`, () => {
      for (const document of all) {
        const waits = code === 'bad_field' && !/auth|u0061uth|u0041uth/i.test(document);
        for (const chunks of everySplit(document)) {
          const cut = `${document} cut into ${chunks.map(({ length }) => length)} bytes`;
          const passed: Uint8Array[] = [];
          assert.throws(() => push(new BodyScan(), chunks, passed), { code }, cut);
          assert.throws(() => JSON.parse(Buffer.concat(passed).toString()), SyntaxError, cut);
          const scan = new BodyScan();
          scan.defers = true;
          if (waits) push(scan, chunks);
          assert.throws(() => waits ? scan.takeFields() : push(scan, chunks), { code }, cut);
        }
      }
    });
  }

  test('BodyScan: invalid UTF-8 is bad_json at every split, valid UTF-8 passes at every split', () => {
    for (const hex of '80 c3 c080 e08080 eda080 f0808080 f4908080 f5 ff e282 f09f98'.split(' ')) {
      const document = Buffer.concat([Buffer.from('{"a":"'), Buffer.from(hex, 'hex'), Buffer.from('"}')]);
      for (const chunks of everySplit(document)) assert.throws(() => scanAll(chunks), { code: 'bad_json' }, hex);
    }
    const good = '{"a":"\u0080é߿ࠀ€\ud7ff\ue000￿𐀀😀\u{10ffff}"}';
    for (const chunks of everySplit(good)) assert.equal(scanAll(chunks).out, good);
  });

  test('BodyScan: what is not UTF-8 is told, unless another mistake came in an earlier chunk; UTF-16 has its own advice', () => {
    const utf8 = 'The body is not a JSON object: it is not valid UTF-8.';
    const texts = [
      ...'80 c341 c080 c3c3 e08080 e28241 e282c3 eda080 f0808080 f09f9841 f4908080 f5 ff efbf41'.split(' ').map((hex) =>
        [Buffer.concat([Buffer.from('{"ü":"€😀'), Buffer.from(hex, 'hex'), Buffer.from('"}')]), utf8] as const
      ),
      [Buffer.from('{"a":"\\x\xff"}', 'latin1'), 'an unknown escape, at byte 7.'],
      [Buffer.from('{"a":"\xe2\x82', 'latin1'), 'it ends before the object is complete, at byte 8.'],
      [Buffer.from(`{"a":"${'ü'.repeat(5000)}\xff`, 'latin1'), utf8],
      [Buffer.from('{"auth":"caf\xe9"}', 'latin1'), utf8],
      [Buffer.from('{"number":1,"a":"caf\xe9"}', 'latin1'), 'The field "number" must be a string in double quotes.'],
      [Buffer.from('\ufeff{}', 'utf16le'), 'save it as UTF-8, without a byte order mark, at byte 0.'],
    ] as const;
    for (const [text, wanted] of texts) {
      for (const chunks of everySplit(text)) {
        const { message } = outcome(() => scanAll(chunks)) as { message?: string };
        assert.ok(message?.endsWith(wanted) || message === utf8, `${message} for ${text.subarray(0, 40)}`);
      }
    }
  });

  test('BodyScan: a chunk that is read in pieces of any number of steps gives the same', () => {
    const document = Buffer.from(
      literal`{"auth":"${SECRET}","recipients":["\u002b1","é"],"mentions":[{"author":"x"}],"y":[1,[],{"z":true}]}`,
    );
    const read = (steps: number): [string, unknown, unknown] => {
      const [scan, chunk] = [new BodyScan(), Buffer.from(document)];
      scan.begin(chunk);
      for (let i = 0; !scan.proceed(steps); i++) assert.ok(i < document.length, 'each call goes on');
      scan.end();
      return [String(chunk), scan.auth, scan.takeFields()];
    };
    const whole = read(Infinity);
    assert.equal(whole[1], SECRET);
    for (let steps = 1; steps < 40; steps++) assert.deepEqual(read(steps), whole, `${steps} steps`);
  });

  randomTest('BodyScan: a random document is output as JSON.parse reads it, however it is cut', (random) => {
    const pick = <V>(values: V[]): V => values[random(values.length)]!;
    const space = (): string => pick(['', '', '', ' ', '\n', '\r\n\t ']);
    const spaced = (...tokens: string[]): string => tokens.map((token) => space() + token + space()).join('');
    const plain = ['a', 'é', '😀', '\\n', '\\u0041', '\\ud83d\\ude00', 'auth', ',', '{', '}', '['];
    const key = (letters = plain): string => `"${Array.from({ length: random(12) }, () => pick(letters)).join('')}"`;
    const value = (depth: number): string => {
      const kind = random(depth > 4 ? 3 : 5);
      // Not in keys: V8 in Node 24 and 26 mistakes the second of {"k\\\\":0} and {"k\\"":0} for the first.
      if (kind === 0) return key([...plain, '\\"', '\\\\']);
      if (kind === 1) return pick(['0', '-1', '1.5', '1e3', '-0.0E-2', '123456789012345678']);
      if (kind === 2) return pick(['true', 'false', 'null']);
      const inner = Array.from(
        { length: random(4) },
        () => kind === 3 ? spaced(value(depth + 1)) : spaced(key(), ':', value(depth + 1)),
      ).join(',');
      return kind === 3 ? `[${inner}]` : `{${inner || space()}}`;
    };
    for (let round = 0; round < 2000; round++) {
      const members = Array.from({ length: random(6) }, (_, i) => spaced(`"k${i}${key().slice(1)}`, ':', value(1)));
      const auth = random(2) ? `t${random(1000)}` : undefined;
      const own = spaced(pick(['"auth"', '"\\u0061uth"']), ':', `"${auth}"`);
      if (auth !== undefined) members.splice(random(members.length + 1), 0, own);
      const document = spaced(`{${members.join(',')}}`);
      const scanned = scanAll(cutInto(Buffer.from(document), () => 1 + random(20)));
      const masked = document.replace(own, own.replace(`"${auth}"`, (value) => `"${' '.repeat(value.length - 2)}"`));
      assert.deepEqual([scanned.out, scanned.auth], [auth === undefined ? document : masked, auth], document);
      assert.doesNotThrow(() => JSON.parse(document), document);

      // One byte changed: the scanner accepts exactly what JSON.parse accepts as an object.
      const bytes = Buffer.from(document);
      bytes[random(bytes.length)] = pick([...Buffer.from('{}[],:"\\ 0e-+tfnu'), random(256)]);
      const verdict = outcome(() => scanAll([bytes]));
      const parsed = outcome(() =>
        JSON.parse(new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes))
      );
      const isObject = Object.prototype.toString.call(parsed) === '[object Object]';
      const { code } = verdict as { code?: string };
      if (code !== 'bad_field') assert.equal(code, isObject ? undefined : 'bad_json', bytes.toString('latin1'));
    }
  });

  test('BodyScan: 64 MiB pass through without being kept', () => {
    const scan = new BodyScan();
    const chunk = Buffer.alloc(64 * 1024, 'QUJD');
    scan.write(Buffer.from('{"base64_attachments":["data:image/png;filename=x.png;base64,'));
    const before = process.memoryUsage();
    for (let i = 0; i < 1024; i++) scan.write(chunk);
    const after = process.memoryUsage();
    push(scan, [Buffer.from('"]}')]);
    assert.equal(chunk.toString(), 'QUJD'.repeat(16 * 1024));
    // Made for a native search and dropped at once; some may still wait for the collector.
    const kept = after.external + after.arrayBuffers - before.external - before.arrayBuffers;
    assert.ok(kept < 16 * MIB, `${kept} bytes are kept`);
  });

  // What follows the end is held until the request is complete.
  test('BodyScan: the limit of white space after the end does not depend on the chunks', () => {
    for (const size of [65_535, 65_536, 65_537, 70_000, 200_000]) {
      for (const step of [100_000_000, 1000, 4096, 65_536, 65_537]) {
        const document = Buffer.from(`{"a":${' '.repeat(100_000)}1}${' '.repeat(size)}`);
        const { message } = outcome(() => scanAll(cutInto(document, () => step))) as { message?: string };
        const where = size > 65_536 ? `too much white space, at byte ${100_007 + 65_536}.` : undefined;
        assert.equal(message?.split(': ')[1], where, `${size} ${step}`);
      }
    }
  });

  test('the syntax of a document of any size is checked without its keys, and it passes unchanged', () => {
    const text = `{"auth":{"x":[]},"Auth":1,"auth":2,"number":3,"":4,"a":"${'x'.repeat(300_000)}"}`;
    const document = Buffer.from(text);
    const at = text.indexOf('"auth":2');
    assert.deepEqual(BodyScan.repeatedKeys(document, 1), [{ key: 'auth', atByte: at }]);
    assert.equal(document.toString(), text);
    const broken = Buffer.from(text.replace('"a":', '"a"'));
    assert.throws(() => BodyScan.repeatedKeys(broken, 1), { message: /expected a colon, at byte 54/ });
  });

  test('a value that is none is reported at its first byte, wherever the document is cut', () => {
    for (
      const [value, why] of [['“x”', 'expected a value'], ['nulx', 'expected a value'], ['+123', 'no value begins']]
    ) {
      const bytes = Buffer.from(`{"a": ${value}}`);
      for (let cut = 0; cut <= bytes.length; cut++) {
        const chunks = [Buffer.from(bytes.subarray(0, cut)), Buffer.from(bytes.subarray(cut))];
        const isRight = ({ message }: Error) => message.includes(why!) && message.endsWith(', at byte 6.');
        assert.throws(() => scanAll(chunks), isRight, `${value}, cut at ${cut}`);
      }
    }
  });

  // Data is searched byte by byte at first, and natively behind that.
  const PLACES = [...Array(40).keys(), ...[1023, 1024, 1025].flatMap((at) => [at, at * 2]), 3000, 60_000];
  const ATTACHED = `{"base64_attachment":"base64,${'A'.repeat(4090)}`;

  test('BodyScan: the first special byte is found at every place of a long string', () => {
    const MARK = 'may have "," and ";" only in its first 4096 bytes';
    for (
      const [before, special, after, refusal] of [
        ['{"a":"', '\x1f', '\n"}', 'a string contains a control character, at byte '],
        ['{"a":"', '\\@', '\\"}', 'an unknown escape, at byte '],
        ['{"a":"', '"@', '"}', 'comma, or the closing bracket or brace, at byte '],
        [ATTACHED, '\\@', ',;"}', 'an unknown escape, at byte '],
        [ATTACHED, '"@', '\\@,;"}', 'comma, or the closing bracket or brace, at byte '],
        ...[',', ';'].map((mark) => [ATTACHED, mark, '\\@"}', MARK] as const),
      ] as const
    ) {
      for (const at of PLACES) {
        const text = `${before}${'A'.repeat(at)}${special}${'A'.repeat(at % 7 * 300)}${after}`;
        const where = refusal === MARK ? '' : `${before.length + at + special.length - 1}.`;
        const isRight = ({ message }: Error): boolean => message.includes(refusal + where);
        assert.throws(() => scanAll([Buffer.from(text)]), isRight, `${special} at ${at}`);
      }
    }
  });

  test("BodyScan: a control character passes in an attachment's data, which the backend refuses, and nowhere else", () => {
    const [allowed, refused] = [`${ATTACHED}AAAAA`, '{"message":"'];
    for (const at of PLACES) {
      for (const control of ['\0', '\n', '\x1f']) {
        const endOf = (text: string): string => `${text}${'A'.repeat(at)}${control}AA\\/A"}`;
        const cuts = [1, 1000, 4096, 65_536, allowed.length + at, allowed.length + at + 1];
        for (const step of at < 40 ? cuts : cuts.slice(1)) {
          const chunks = (text: string): Buffer[] => cutInto(Buffer.from(text), () => step);
          assert.equal(scanAll(chunks(endOf(allowed))).out, endOf(allowed));
          assert.throws(() => scanAll(chunks(endOf(refused))), { code: 'bad_json' });
        }
      }
    }
    for (
      const early of [
        `{"base64_attachment":"base64,A\n${'A'.repeat(5000)}"}`,
        `{"base64_attachment":"\n${'A'.repeat(5000)}"}`,
      ]
    ) {
      for (const step of [1, 10, 4096, 65_536]) {
        assert.throws(() => scanAll(cutInto(Buffer.from(early), () => step)), { code: 'bad_json' });
      }
    }
  });
});
