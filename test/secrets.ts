/** The secrets of the promises' tokens, and the headers that carry them. */

export const SECRET = 'correct-horse-battery-staple';
export const OTHER = 'another-secret-that-is-long';
export const GUESS = 'what-a-stranger-guesses';

export const bearer = (secret: string) => ({ authorization: `Bearer ${secret}` });
export const basic = (userinfo: string) => ({ authorization: `Basic ${Buffer.from(userinfo).toString('base64')}` });
export const [AS_FIRST, AS_SECOND] = [bearer(SECRET), bearer(OTHER)];

/** The token as it is, and as Basic encodes it. */
export const TRACES = new RegExp(`${SECRET.slice(1)}|${Buffer.from(`api:${SECRET}`).toString('base64').slice(8, -8)}`);
