/** The routes of the backend. */

import { fixture } from './files.ts';
import { FROM, GROUP } from './samples.ts';

/**
 * Every route of signal-cli-rest-api, by its group in the gateway. In routes.txt, N stands for a number, and G for a
 * group.
 */
export const ROUTES = fixture('routes.txt').trim().split('\n').flatMap((line) => {
  const [group = '', methods = '', path = ''] = line.split(' ');
  const own = path.replace('/N', `/${FROM}`).replace('/G', `/${GROUP}`);
  return methods.split(',').map((method) => ({ group, method, path: own }));
});
