import { createHash } from 'node:crypto';
import { suite } from 'node:test';
import { inspect } from 'node:util';
import type { GatewayConfig, TokenConfig } from '../gateway.ts';
import { assert, groupsOf, problemsOf } from './assertions.ts';
import { blocks, SOURCE, TESTS } from './files.ts';
import { ConfigError, createGateway } from './gateway.ts';
import { SIDE_BY_SIDE, test } from './guard.ts';
import { FROM, OTHER, SECRET } from './samples.ts';
import { program, runProcess, script } from './start.ts';

suite('module', SIDE_BY_SIDE, () => {
  test('only the text "*" is everyone: a value of an embedding program that is printed as "*" is a mistake', () => {
    const star = { toString: () => '*' };
    const digits = Object.assign(() => {}, { toString: () => FROM });
    for (const [value, place] of [[[['*']], '[0]'], [star, ''], [[star], '[0]'], [[digits], '[0]']] as const) {
      for (const key of ['senders', 'recipients']) {
        const token = { secret: SECRET, [key]: value } as unknown as TokenConfig;
        const [problem = ''] = problemsOf(() => createGateway({ tokens: { test: token } }));
        assert.ok(problem.startsWith(`tokens.test.${key}${place}: `), `${key}: ${problem}`);
      }
    }
    const backend = { url: 'http://127.0.0.1:1', parallel: digits } as unknown as GatewayConfig['backend'];
    assert.equal(problemsOf(() => createGateway({ backend: backend! })).length, 1);
  });

  test('an embedding program gets a ConfigError for an unknown option, and a key that is undefined counts as absent', () => {
    const declared = groupsOf(/interface GatewayOptions \{([^]*?)\n\}/.exec(SOURCE)![1]!, /^ {2}(\w+)\?:/gm);
    assert.ok(declared.includes('log') && declared.length > 5, String(declared));
    const all = Object.fromEntries(declared.map((name) => [name, undefined]));
    // As called from JavaScript: the types do not allow undefined.
    const make = createGateway as (...given: unknown[]) => unknown;
    const config = { listen: '127.0.0.1:0', backend: undefined, rate: undefined, typo: undefined };
    make({ ...config, tokens: { a: { secret: SECRET, rate: undefined }, b: undefined } }, all);
    const fail = (...given: unknown[]): InstanceType<typeof ConfigError> => {
      try {
        make(...given);
      } catch (error) {
        assert.ok(error instanceof ConfigError, String(error));
        return error;
      }
      throw new Error('there was no error');
    };
    const { name, problems } = fail({ lisen: 1 }, { stallTimeout: 1, log: null, [SECRET]: 1, lingerMs: 1 });
    assert.equal(name, 'ConfigError');
    assert.deepEqual(problems, [
      'lisen: is not a setting; did you mean "listen"?',
      'options.stallTimeout: is not a setting; did you mean "stallTimeoutMs"?',
      'options.log: null is not allowed; remove the line',
      'options[2]: is not a setting',
    ]);
    assert.match(fail({ tokens: { a: undefined } }).message, /tokens: contains no token/);
    assert.match(fail({ tokens: { a: { secret: undefined } } }).message, /tokens\.a: needs /);
    for (const wrong of [undefined, null, [], 'x']) assert.doesNotMatch(fail(wrong).message, /the file/);
  });

  test('createGateway returns exactly what its type declares, which shows no secret when a program prints it', () => {
    const backend = { url: `http://api:${OTHER}@127.0.0.1:1` };
    const gateway = createGateway({ backend, tokens: { test: { secret: SECRET } } });
    assert.deepEqual(Object.keys(gateway), ['server', 'listen', 'close', 'reload']);
    const shown = inspect(gateway, { depth: 20, showHidden: true });
    for (const secret of [SECRET, OTHER, createHash('sha256').update(SECRET).digest('hex')]) {
      assert.ok(!shown.includes(secret), secret);
    }
  });

  test('importing gateway.ts does nothing and prints nothing; the example of embedding runs', async (t) => {
    const rows = [["await import('./gateway.ts');", /^$/], [blocks('ts')[0]!, /^http:\/\/127\.0\.0\.1:\d+$/m]] as const;
    for (const [example, printed] of rows) {
      const embedding = script(t, example.replace("'./gateway.ts'", JSON.stringify(program().at(-1))));
      const env = { LISTEN: 'nonsense', APP_TOKEN: SECRET };
      const { code, stdout, stderr } = await runProcess([], { program: embedding, env });
      assert.deepEqual([code, stderr], [0, ''], stdout);
      assert.match(stdout, printed);
    }
  });

  test('gateway.ts is one file of erasable TypeScript that imports only node: modules and exports little', () => {
    for (const from of groupsOf(SOURCE, /^import .* from '([^']+)';$/gm)) assert.match(from, /^node:/);
    assert.doesNotMatch(SOURCE, /^\s*(?:export )?(?:enum|namespace|declare|import \w+ =)\b|\brequire\(/m);
    const exported = groupsOf(SOURCE, /^(export [^;]*;)/gm).map((text) =>
      text.replace(/\s+/g, ' ').replace(', }', ' }')
    );
    assert.deepEqual(exported, [
      'export { BodyScan, ConfigError, createGateway, FORMS, loadSettings, Metrics, parseTarget, RateLimiter, ROUTES, run, Template };',
      'export type { Gateway, GatewayConfig, GatewayOptions, TokenConfig };',
    ]);
  });

  test('each workaround for a runtime has a comment, in one form, about when it can go', (t) => {
    const comments = Array.from(SOURCE.matchAll(/(?:^ *\/\/ .*\n)+|\/\*\*(?:(?!\*\/)[^])*\*\//gm), ([text]) => text);
    const told = comments.filter((text) => /\b(?:Node|Deno|Bun) \d/.test(text) && !text.includes('@module'));
    const good = told.filter((text) => /^ *\/\/ UNTIL [^]+:\s/m.test(text));
    t.diagnostic(good.map((text) => text.trim().split('\n')[0]).join('\n'));
    assert.deepEqual(told.filter((text) => !good.includes(text)), []);
    // Code that checks which runtime it is follows such a comment.
    const asks = Array.from(SOURCE.matchAll(/^(.*\n){4}.*'(?:Bun|Deno)' in globalThis/gm), ([text]) => text);
    assert.deepEqual(asks.filter((text) => !text.includes('// UNTIL ')), []);
    // The tests that such a comment names exist.
    const titles = groupsOf(TESTS, /^ *(?:test|table)\(\s*(?:'|"|`)(.*)/gm);
    const named = comments.flatMap((text) =>
      groupsOf(text.replace(/\n *(?:\/\/|\*) /g, ' '), /\((tests? "[^)]*)\)/g).flatMap((list) =>
        groupsOf(list, /"([^"]+?)…?"/g)
      )
    );
    assert.ok(named.length > 10, named.join());
    assert.deepEqual(named.filter((name) => !titles.some((title) => title.includes(name))), []);
  });
});
