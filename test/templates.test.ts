import { suite } from 'node:test';
import { assert } from './assertions.ts';
import { Template } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { LIMIT, render } from './hooks.ts';
import { literal, unescaped } from './rows.ts';
import { MIB } from './samples.ts';

/**
 * Each case of the Mustache specification's modules for interpolation, sections, inverted sections and comments, in our
 * own words: what it shows, a template, the text, and the data. A * stands for each way to insert (nothing, "&", a
 * third brace), and ~ for each section that is shown (# with true, ^ with false). There is no HTML escaping here.
 */
const MUSTACHE = literal`
  no interpolation and basic interpolation ¦ The {disk} {{name}} is full}.\n ¦ The {disk} sda is full}.\n ¦ {"name":"sda"}
  HTML is not escaped ¦ {{*x}} ¦ & " < > ' \u0060 = ¦ {"x":"& \" < > ' \u0060 ="}
  integer, decimal, null and missing ¦ {{*n}}|{{*d}}|{{*z}}|{{*m}} ¦ 42|2.5|| ¦ {"n":42,"d":2.50,"z":null}
  standalone interpolation ¦   {{*n}}\n ¦   --\n ¦ {"n":"--"}
  surrounding white space and padding ¦ | {{*n}} |{{* n }}| ¦ | -- |--| ¦ {"n":"--"}
  dotted names ¦ {{*a.n}} = {{#a}}{{*n}}{{/a}} ¦ pi = pi ¦ {"a":{"n":"pi"}}
  implicit iterator, text ¦ <{{*.}}> ¦ <text> ¦ "text"
  implicit iterator, integer ¦ <{{*.}}> ¦ <85> ¦ 85
  dotted names: arbitrary depth ¦ {{a.b.c.d.e.f}} ¦ deep ¦ {"a":{"b":{"c":{"d":{"e":{"f":"deep"}}}}}}
  dotted names: broken chains ¦ [{{a.x.y}}][{{a.b.c}}][{{a.b.c.name}}] ¦ [][][] ¦ {"a":{"b":{}},"c":{"name":"other"}}
  dotted names: initial resolution ¦ {{#a}}{{b.c.n}}{{/a}} ¦ in ¦ {"a":{"b":{"c":{"n":"in"}}},"b":{"c":{"n":"out"}}}
  dotted names: context precedence ¦ [{{#a}}{{b.c}}{{/a}}] ¦ [] ¦ {"a":{"b":{}},"b":{"c":"outer"}}
  dotted names: leading dot ¦ [{{#a}}{{.n}}{{/a}}][{{#b}}{{.n}}{{/b}}] ¦ [][own] ¦ {"a":{"x":1},"b":{"n":"own"},"n":"up"}
  dotted names are never single keys, and mask none ¦ [{{a.b}}][{{c.d}}] ¦ [][d] ¦ {"a.b":"c","c.d":"c","c":{"d":"d"}}
  list indices ¦ {{a.0}}{{a.1.b}}[{{a.2}}] ¦ xy[] ¦ {"a":["x",{"b":"y"}]}
  section: truthy ¦ <{{#t}}1{{/t}}{{#s}}2{{/s}}{{#o.t}}3{{/o.t}}{{#o}}4{{/o}}> ¦ <1234> ¦ {"t":true,"s":"abc","o":{"t":true}}
  section: falsey ¦ <{{#f}}1{{/f}}{{#n}}2{{/n}}{{#o.f}}3{{/o.f}}{{#l}}4{{/l}}> ¦ <> ¦ {"f":false,"n":null,"o":{"f":false},"l":[]}
  section: zero, the empty text and what is missing ¦ <{{#a}}1{{/a}}{{#b}}2{{/b}}{{#c}}3{{/c}}{{#a.b.c}}4{{/a.b.c}}> ¦ <> ¦ {"a":0,"b":""}
  inverted: truthy ¦ <{{^t}}1{{/t}}{{^s}}2{{/s}}{{^o.t}}3{{/o.t}}{{^o}}4{{/o}}{{^l}}5{{/l}}> ¦ <> ¦ {"t":true,"s":"yes","o":{"t":true},"l":[{}]}
  inverted: falsey ¦ <{{^f}}1{{/f}}{{^n}}2{{/n}}{{^o.f}}3{{/o.f}}{{^l}}4{{/l}}> ¦ <1234> ¦ {"f":false,"n":null,"o":{"f":false},"l":[]}
  inverted: what is missing ¦ <{{^c}}1{{/c}}{{^a.b.c}}2{{/a.b.c}}> ¦ <12> ¦ {"a":{}}
  section: context and parent contexts ¦ {{#in}}{{a}} {{b}} {{c.d}}{{/in}} ¦ 1 2 3 ¦ {"a":1,"b":"no","in":{"b":2},"c":{"d":3}}
  section: variable test ¦ {{#x}}{{.}} is {{x}}{{/x}} ¦ this is this ¦ {"x":"this"}
  section: list contexts ¦ {{#as}}{{#bs}}{{n.low}}{{m}}.{{#cs}}{{n.up}}{{m}}{{l}}.{{/cs}}{{/bs}}{{/as}} ¦ k7.K7p.K7q. ¦ {"as":[{"n":{"up":"K","low":"k"},"bs":[{"m":"7","cs":[{"l":"p"},{"l":"q"}]}]}]}
  section: deeply nested contexts ¦ {{#a}}\n{{one}}\n{{#b}}\n{{one}}{{two}}\n{{#c}}\n{{three}}\n{{#d}}\n{{two}}{{four}}\n{{#five}}\n{{four}}{{.}}{{five}}{{one}}\n{{/five}}\n{{/d}}\n{{/c}}\n{{two}}\n{{/b}}\n{{/a}}\n ¦ 1\n12\n3\n24\n4551\n2\n ¦ {"a":{"one":1},"b":{"two":2},"c":{"three":3,"d":{"four":4,"five":5}}}
  section: list ¦ <{{#list}}{{n}}{{/list}}> ¦ <123> ¦ {"list":[{"n":1},{"n":2},{"n":3}]}
  section: doubled ¦ {{#on}}\na\n{{/on}}\n{{two}}\n{{#on}}\nc\n{{/on}}\n ¦ a\nb\nc\n ¦ {"on":true,"two":"b"}
  inverted: doubled ¦ {{^on}}\na\n{{/on}}\n{{two}}\n{{^on}}\nc\n{{/on}}\n ¦ a\nb\nc\n ¦ {"on":false,"two":"b"}
  section: nested, shown ¦ | A {{~on}}B {{~on}}C{{/on}} D{{/on}} E | ¦ | A B C D E | ¦ {"on":~}
  section: nested, not shown ¦ | A {{~on}}B {{~on}}C{{/on}} D{{/on}} E | ¦ | A  E | ¦ {"on":!~}
  implicit iterator: texts, integers and decimals ¦ {{#list}}({{.}}){{/list}} ¦ (a)(1)(2.2) ¦ {"list":["a",1,2.20]}
  implicit iterator: lists ¦ {{#list}}({{#.}}{{.}}{{/.}}){{/list}} ¦ (12)(x) ¦ {"list":[[1,2],["x"]]}
  implicit iterator: root level ¦ {{#.}}({{n}}){{/.}} ¦ (a)(b) ¦ [{"n":"a"},{"n":"b"}]
  surrounding white space ¦  | {{~on}}\t|\t{{/on}} | \n ¦  | \t|\t | \n ¦ {"on":~}
  internal white space ¦  | {{~on}} {{! a remark }}\n {{/on}} | \n ¦  |  \n  | \n ¦ {"on":~}
  indented inline sections ¦  {{~on}}A{{/on}}\n {{~on}}B{{/on}}\n ¦  A\n B\n ¦ {"on":~}
  standalone lines ¦ | One\n{{~on}}\n|\n{{/on}}\n| Two\n ¦ | One\n|\n| Two\n ¦ {"on":~}
  indented standalone lines ¦ | One\n  {{~on}}\n|\n\t{{/on}} \n2\n ¦ | One\n|\n2\n ¦ {"on":~}
  standalone line endings ¦ |\r\n{{~on}}\r\n{{/on}}\r\n| ¦ |\r\n| ¦ {"on":~}
  standalone without previous line ¦   {{~on}}\n#{{/on}}\n/ ¦ #\n/ ¦ {"on":~}
  standalone without newline ¦ #{{~on}}\n/\n  {{/on}} ¦ #\n/\n ¦ {"on":~}
  padding ¦ |{{~ on }}={{/\ton\n}}| ¦ |=| ¦ {"on":~}
  a tab after a standalone tag ¦ |\n{{~on}}\t\n|\n{{/on}}\t\n| ¦ |\n|\n| ¦ {"on":~}
  comment: inline, indented and multiline ¦ a{{! a remark! }}b\n  one {{! two }}\nthree{{!\n  a remark\n  of two lines\n}}c\n ¦ ab\n  one \nthreec\n ¦ {}
  comment: standalone ¦ One.\n{{! a remark }}\nTwo.\n  {{! a remark }}\nThree.\n ¦ One.\nTwo.\nThree.\n ¦ {}
  comment: standalone line endings ¦ |\r\n{{! a remark }}\r\n| ¦ |\r\n| ¦ {}
  comment: standalone without previous line ¦   {{! a remark }}\n! ¦ ! ¦ {}
  comment: standalone without newline ¦ !\n  {{! a remark }} ¦ !\n ¦ {}
  comment: multiline standalone ¦ One.\n{{!\nof several lines\n}}\nTwo.\n  {{!\n    of several lines\n  }}\nThree.\n ¦ One.\nTwo.\nThree.\n ¦ {}
  comment: variable name collision ¦ <{{! a }}|{{!a }}|{{!a}}> ¦ <||> ¦ {"! a":1,"!a":2,"a":3}
  an object inserts its JSON, true and false their names ¦ {{a}} {{#b}}{{.}} {{/b}}{{c}} ¦ {"x":[null,"ü"]} {"y":2} [] true false ¦ {"a":{"x":[null,"ü"]},"b":[{"y":2},[],true],"c":false}
  what is inserted is no template ¦ {{a}} {{#b}}{{.}}{{/b}} ¦ {{#b}}x{{/b}} {{a}} ¦ {"a":"{{#b}}x{{/b}}","b":"{{a}}"}
  what JavaScript adds to its values has no name ¦ [{{constructor}}{{__proto__}}{{a.length}}{{b.length}}{{b.0.1}}{{toString}}{{a.constructor.name}}{{#hasOwnProperty}}x{{/hasOwnProperty}}] ¦ [] ¦ {"a":[1,2],"b":["text"]}
  and data that has such names is data ¦ {{__proto__}}{{#constructor}}{{prototype}}{{/constructor}}{{length}}{{a.length}} ¦ ab65 ¦ {"__proto__":"a","constructor":{"prototype":"b"},"length":6,"a":{"length":5}}
  unusual names ¦ {{a-b}}{{@c}}{{:e}}{{ü.é}}{{a/b}} ¦ 12345 ¦ {"a-b":1,"@c":2,":e":3,"ü":{"é":4},"a/b":5}`;

suite('templates', SIDE_BY_SIDE, () => {
  test('a template inserts, repeats and omits as the Mustache specification requires', () => {
    for (const line of MUSTACHE.trim().split('\n')) {
      const variants = line.includes('{{*')
        ? ['', '&', '{'].map((way) => line.replace(/\{\{\*(.*?)\}\}/g, `{{${way}$1}}${way === '{' ? '}' : ''}`))
        : ['#', '^'].map((sigil) =>
          line.replaceAll('{{~', `{{${sigil}`).replace('!~', String(sigil === '^')).replace('~', String(sigil === '#'))
        );
      for (const variant of new Set(variants)) {
        const [, template = '', text = '', data = ''] = variant.split(' ¦ ');
        const rendered = render(String(unescaped(template)), JSON.parse(data));
        assert.equal(rendered, String(unescaped(text)), variant);
      }
    }
  });

  const NO_TEMPLATES = literal`
  Hello {{name ¦ 1, column 7: a "{{" has no "}}"
  {{ alerts[0].status }} ¦ 1, column 1: a tag has a bracket: write {{alerts.0.status}} for {{alerts[0].status}}
  {{#a[]}}{{/a[]}} ¦ 1, column 1: "{{#a[]}}" has a bracket: write {{alerts.0.status}} for {{alerts[0].status}}
  a\nb {{{name}} ¦ 2, column 3: "{{{name}}" has no name, or one with a space, a brace or an empty part in it
  a\r\n\r\n  {{#alerts}}\n{{x}} ¦ 3, column 3: "{{#alerts}}" has no "{{/alerts}}"
  {{#a}}{{^b}}x{{/b}} ¦ 1, column 1: "{{#a}}" has no "{{/a}}"
  x\n{{/a}} ¦ 2, column 1: "{{/a}}" closes a section that is not open
  {{#a}}\n {{#b}}\n  {{/a}}{{/b}} ¦ 3, column 3: "{{/a}}" stands where "{{/b}}" is expected
  ${
    '{{}} ¦{{ # }} ¦{{{}}} ¦{{a..b}} ¦{{a.}} ¦{{..}} ¦{{#if a}}'.split(' ¦').map((tag) =>
      `${tag}{{/if}} ¦ 1, column 1: "${tag}" has no name`
    )
  }
  ü {{range .Alerts}} ¦ 1, column 3: "{{range .Alerts}}" has no name
  {{>part}} ¦ 1, column 1: "{{>part}}": partials, blocks and other delimiters are not supported
  ${['{{=<% %>=}}', '{{<a}}', '{{$a}}'].map((tag) => `${tag}{{/a}} ¦ 1, column 1: "${tag}": partials`)}
  a\n😀ü {{ ¦ 2, column 4: 
  ${'{{#a}}'.repeat(65)}${'{{/a}}'.repeat(65)} ¦ 1, column 385: sections are nested more than 64 levels deep
  {{{a}}\nb {{c}}\n{{{d}}} e ¦ 1, column 1: a tag has no name
  {{#a\u001b[31m\nb}} ¦ 1, column 1: "{{#a\u001b[31m\nb}}" has no name
  {{#${'a'.repeat(10_000)}}} ¦ 1, column 1: a tag has no a tag
  {{#a}}{{/\n}} ¦ 1, column 7: "{{/\n}}" has no name`;

  test('an invalid template is refused with line and column, in a single line without control characters', () => {
    for (const line of NO_TEMPLATES.trim().split(/\n */)) {
      const [template = '', mistake] = line.split(' ¦ ');
      const isIt = ({ message }: Error): boolean =>
        message.startsWith(`line ${mistake}`) && /^\P{Cc}{9,250}$/u.test(message);
      assert.throws(() => new Template(String(unescaped(template))), isIt, line);
    }
  });

  test('a template cut at any position is valid or refused, and renders without an internal error', () => {
    const whole = 'a\n  {{#b}}\n{{{c.0}}}{{& d.e }} {{^.}}x{{/.}}\n  {{/b}}\r\n{{! f\n}}{{g}}';
    for (const part of Array.from(whole, (_, i) => [whole.slice(0, i), whole.slice(i)]).flat()) {
      try {
        new Template(part).render({ b: [{ c: ['y'] }, null, 1], g: {} });
      } catch (error) {
        assert.match(String(error), /^Error: line \d+, column \d+: /);
      }
    }
  });

  test('a text is at most 64 KiB long, and a longer one is cut between characters, with an ellipsis', () => {
    const [whole, cut] = ['x'.repeat(LIMIT), `${'x'.repeat(LIMIT - 3)}…`];
    assert.equal(render('{{a}}', { a: whole }), whole);
    assert.equal(render('{{a}}', { a: `${whole}x` }), cut);
    assert.equal(render('{{a}}{{b}}', { a: whole, b: '' }), whole);
    assert.equal(render('{{a}}{{b}}', { a: whole, b: 'y' }), cut);
    assert.equal(
      render('{{#a}}line {{.}}\n{{/a}}', { a: Array.from({ length: 100_000 }, (_, i) => i) }).slice(-1),
      '…',
    );
    for (const [i, char] of [...'ü€😀ü€😀ü€😀ü€😀'].entries()) {
      const [pad, text] = ['x'.repeat(i / 3), render('{{p}}{{a}}', { p: 'x'.repeat(i / 3), a: char.repeat(LIMIT) })];
      assert.ok(Buffer.byteLength(text) <= LIMIT && Buffer.byteLength(text) > LIMIT - 4, `${Buffer.byteLength(text)}`);
      assert.equal(text.replaceAll(char, ''), `${pad}…`);
    }
  });

  test('the work of rendering is bounded, and stops where the text is cut, however sections multiply', () => {
    // The whole text would be longer than a string can be.
    assert.equal(Buffer.byteLength(render('{{a}}'.repeat(1000), { a: 'x'.repeat(MIB) })), LIMIT);
    // A name costs more the deeper it is searched for.
    const nested = (depth: number, inner: string): string =>
      `${'{{#a}}'.repeat(depth)}${inner}${'{{/a}}'.repeat(depth)}`;
    assert.equal(render(nested(60, '{{b}}'.repeat(1000)), { a: 1 }), '…');
    const a = Array<number>(100_000).fill(1);
    // Without a bound the first of these would take 10^15 steps, the second 10^50.
    assert.equal(render(nested(3, ''), { a }), '…');
    assert.equal(render(nested(10, '{{b}}'), { a }), '…');
    assert.equal(render(nested(1, `{{${Array<string>(10_000).fill('x').join('.')}}}`), { a }), '…');
    // Below the limit the work is the length of the data times that of the template.
    for (const n of [50, 100, 200]) {
      const data = { a: a.slice(0, n) };
      const text = render(nested(3, '.'), data);
      const isBounded = text.length < nested(3, '.').length * JSON.stringify(data).length;
      assert.ok(text.endsWith('…') && isBounded, `${text.length} of ${n ** 3}`);
    }
    // One pass through much data does not multiply.
    assert.equal(render('{{#a}}{{x}}{{#y}}{{z}}{{/y}}{{/a}}end', { a: a.map(() => ({ y: [{}] })) }), 'end');
  });
});
