import { suite } from 'node:test';
import { assert } from './assertions.ts';
import { fixture } from './files.ts';
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
const MUSTACHE = fixture('mustache.txt');

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
