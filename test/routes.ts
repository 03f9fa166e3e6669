/** The routes of the backend. */

import { fixture } from './files.ts';
import { FROM, GROUP } from './samples.ts';

const LINES = fixture('routes.txt').trim().split('\n').filter((line) => !line.startsWith('#'));

/** Every route of signal-cli-rest-api, by its group in the gateway, with its facts, which the fixture explains. */
export const ROUTES = LINES.flatMap((line) => {
  const [group = '', methods = '', path = '', ...facts] = line.split(' ');
  const own = path.replace('/N', `/${FROM}`).replace('/G', `/${GROUP}`);
  return methods.split(',').map((method) => ({ group, method, path: own, facts }));
});
