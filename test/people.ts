/** Who sends what to whom in the tests of the promises, and what browsers send. */

/** The account, whom its tokens may write to, and somebody else. */
export const [ACCOUNT, FRIEND, STRANGER] = ['+15550100001', '+15550100002', '+15559999999'];
export const MESSAGE = { message: 'hello', number: ACCOUNT, recipients: [FRIEND] };
export const HELLO = JSON.stringify(MESSAGE);
/** The origin of a page that is on `cors`. */
export const PAGE = 'https://dash.example';
/** What browsers add to what another site's page, a link or a typed address makes them request. */
export const BROWSERS = [
  { 'user-agent': 'Mozilla/5.0 (X11; Linux x86_64)' }, // of a GET
  { origin: 'https://evil.example' },
  { origin: 'null' },
  { 'sec-fetch-site': 'cross-site' },
  { 'sec-fetch-site': 'none' },
  { 'upgrade-insecure-requests': '1' },
];
