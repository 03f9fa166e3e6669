/**
 * `test`, for use in a suite of node:test: a test that fails in the same way on Node and Deno, whatever goes wrong.
 *
 * It adds what node:test leaves out on at least one of them:
 * - Every cleanup runs, also after a failure, and its own failure counts. (Deno runs no cleanup of a test in a suite.)
 * - A test or a cleanup that does not end fails alone and by name, and the process ends. (Node limits a cleanup only
 *   with its whole suite, and waits for what it has left open.)
 * - A process that exits before its last test has ended fails. (Both let it pass.)
 * - What is thrown outside of a test fails the file. (Deno ignores it.)
 */
import { writeSync } from 'node:fs';
import { after as afterAllTests, test as register } from 'node:test';
import { clearTimeout, setTimeout } from 'node:timers'; // a test may replace the global ones
import { inspect } from 'node:util';
import { isDeno, isNode } from './runtime.ts';

/** The options of a suite: how many of its tests run side by side. Most of them spend most of their time waiting. */
export const SIDE_BY_SIDE = { concurrency: 16 };

/** What a test, or a helper that it calls, may ask for. */
export interface TestContext {
  /** Adds a cleanup. All of them run when the test has ended, in this order. */
  after(cleanup: () => unknown): void;
  /** Adds what the test shows if it fails, such as the last lines of a log. */
  onFailure(evidence: () => string): void;
  /** Reports something about a test that may pass. */
  diagnostic(text: string): void;
}

type Run = (t: TestContext) => unknown;
type Options = { skip?: string | boolean };

/** Far more than a test takes on a slow machine: what waits has a limit of its own, and says what it waited for. */
const TEST_LIMIT_MS = 300_000;
const CLEANUP_LIMIT_MS = 20_000;
/** How long a process may live after its last test because something was left open. */
const LINGER_MS = 5000;

/** The titles of the tests that have begun and have not ended. */
const running = new Set<string>();
/** Whether something was thrown that no test could catch. */
let hasStray = false;
let isOver = false;

const print = (text: string): unknown => writeSync(2, `${text}\n`);

/** Registers a test. */
export function test(title: string, ...rest: [Run] | [Options, Run]): void {
  const [{ skip = false }, run]: [Options, Run] = rest.length === 1 ? [{}, ...rest] : rest;
  const late = new Error('the test did not end'); // made here, because its stack has the place of the test
  const [place = 'an unknown place'] = /[^\s(]+\.test\.ts:\d+/.exec(late.stack!) ?? [];
  register(title, { skip }, async (context) => {
    running.add(title);
    const cleanups: { cleanup: () => unknown; late: Error }[] = [];
    const evidence: (() => string)[] = [];
    const failures: Error[] = [];
    const t: TestContext = {
      after: (cleanup) => void cleanups.push({ cleanup, late: new Error('a cleanup that was added here did not end') }),
      onFailure: (each) => void evidence.push(each),
      diagnostic: (text) => context.diagnostic(text),
    };
    await within(TEST_LIMIT_MS, late, () => run(t)).catch((error: unknown) => {
      failures.push(extended(error, evidence.map((each) => each())));
    });
    for (const { cleanup, late } of cleanups) {
      await within(CLEANUP_LIMIT_MS, late, cleanup).catch((error: unknown) => {
        failures.push(extended(error, []));
      });
    }
    running.delete(title);
    const [first, ...others] = failures;
    // node:test names the place where it was called, which is always this file.
    if (first) throw extended(first, [...others.map(({ stack }) => `and then ${stack}`), `in the test at ${place}`]);
  });
}

/** Runs a function, and rejects with `late` if its promise is not settled in time. */
async function within(limitMs: number, late: Error, run: () => unknown): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const limit = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(extended(late, [`within ${limitMs / 1000} s`])), limitMs);
  });
  const ran = (async () => await run())();
  await Promise.race([ran, limit]).finally(() => clearTimeout(timer));
}

/** The error with more lines in its message, also where its stack repeats it: some runtimes print only the stack. */
function extended(error: unknown, lines: string[]): Error {
  if (!(error instanceof Error)) return new Error([inspect(error), ...lines].join('\n'));
  const { message, stack = message } = error;
  error.message = [message, ...lines].join('\n');
  error.stack = stack.replace(message, () => error.message);
  return error;
}

// Node does this by itself. Deno ignores what is thrown outside of its tests while they run, and process.exitCode.
if (isDeno) {
  const onStray = (event: Event & { error?: unknown; reason?: unknown }): void => {
    hasStray = true;
    print(`thrown outside of a test, during ${titles()}: ${inspect(event.error ?? event.reason)}`);
  };
  globalThis.addEventListener('error', onStray);
  globalThis.addEventListener('unhandledrejection', onStray);
}

afterAllTests(() => {
  isOver = true;
  if (hasStray) process.exit(1);
  // Node would wait for what is still open. Every verdict is known, so it cannot change one.
  if (isNode) setTimeout(() => process.exit(), LINGER_MS).unref();
});

process.on('exit', (code) => {
  if (!isOver) {
    print(`the process exited with ${code} before all tests had ended, during ${titles()}`);
    process.exitCode = 1;
  }
  // UNTIL Node exits reliably: Node 20.20 sometimes loops forever in its own clean-up of handles, after everything has
  // ended. The listener of node:test, which sets the exit code, is registered by the hook above, so it ran before this.
  if (isNode) process.exit(process.exitCode ?? code);
});

function titles(): string {
  return [...running].map((title) => `"${title}"`).join(', ') || 'no test';
}
