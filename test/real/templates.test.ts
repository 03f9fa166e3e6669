/**
 * The tests of the Mustache specification (https://github.com/mustache/spec, MIT), of which a package has a copy. They
 * are read where they are, and test/fixtures/mustache.txt has each case, and the newer ones, in our own words.
 */

import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { assert } from '../assertions.ts';
import { Template } from '../gateway.ts';
import { real } from './install.ts';

interface SpecTest {
  name: string;
  data: unknown;
  template: string;
  expected: string;
}

const MODULES = { comments: 11, interpolation: 30, inverted: 21, sections: 25 };

/** Where the gateway differs from the specification, and how: what it writes is plain text. */
const DIFFERENCES: Record<string, [why: string, become: (expected: string) => string]> = {
  'interpolation: HTML Escaping': [
    'nothing is escaped for HTML, because Signal shows what it gets',
    (expected) =>
      expected.replaceAll('&quot;', '"').replaceAll('&lt;', '<').replaceAll('&gt;', '>').replaceAll('&amp;', '&'),
  ],
};

real('a template is what the Mustache specification says, but for what is listed', { npm: ['mote@0.2.0'] }, (_, {
  dir,
}) => {
  const met: string[] = [];
  for (const [module, count] of Object.entries(MODULES)) {
    const file = join(dir, 'node_modules/mote/spec/specs', `${module}.json`);
    const { tests }: { tests: SpecTest[] } = JSON.parse(readFileSync(file, 'utf8'));
    assert.equal(tests.length, count, module);
    for (const { name, data, template, expected } of tests) {
      const title = `${module}: ${name}`;
      const { text } = new Template(template).render(data);
      const [why, become] = DIFFERENCES[title] ?? [];
      assert.equal(text, become ? become(expected) : expected, why ? `${title} (${why})` : title);
      if (text !== expected) met.push(title);
    }
  }
  assert.deepEqual(met, Object.keys(DIFFERENCES), 'the differences that there still are');
  return Promise.resolve();
});
