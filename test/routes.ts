/** The routes of the backend. */

import { FROM, GROUP } from './samples.ts';

/** Every route of backend.md, by its group in the gateway; N is a number, G a group. */
export const ROUTES = Object.entries({
  info: 'GET /v1/about; GET /v1/health',
  send: 'POST /v2/send; POST /v1/send',
  receive: 'GET /v1/receive/N',
  messaging: `
    PUT,DELETE /v1/typing-indicator/N; POST,DELETE /v1/reactions/N; POST /v1/receipts/N; DELETE /v1/remote-delete/N;
    POST,DELETE /v1/polls/N; POST /v1/polls/N/vote; GET /v1/attachments; GET,DELETE /v1/attachments/abc;
    GET,POST /v1/sticker-packs/N; GET /v1/search; GET /v1/search/N; GET,POST /v1/groups/N;
    GET,PUT,DELETE /v1/groups/N/G; GET /v1/groups/N/G/avatar; POST /v1/groups/N/G/block; POST /v1/groups/N/G/join;
    POST /v1/groups/N/G/quit; POST,DELETE /v1/groups/N/G/members; POST,DELETE /v1/groups/N/G/admins;
    POST,DELETE /v1/groups/N/G/pin-message`,
  setup: `
    GET,POST /v1/configuration; GET,POST /v1/configuration/N/settings; POST /v1/register/N;
    POST /v1/register/N/verify/123456; POST /v1/unregister/N; GET /v1/qrcodelink; GET /v1/qrcodelink/raw;
    GET /v1/accounts; POST /v1/accounts/N/rate-limit-challenge; PUT /v1/accounts/N/settings;
    POST,DELETE /v1/accounts/N/username; POST,DELETE /v1/accounts/N/pin; GET,POST /v1/devices/N;
    DELETE /v1/devices/N/2; DELETE /v1/devices/N/local-data; PUT /v1/profiles/N; GET /v1/identities/N;
    PUT /v1/identities/N/trust/+15550100009; GET,PUT /v1/contacts/N; GET /v1/contacts/N/some-uuid;
    GET /v1/contacts/N/some-uuid/avatar; POST /v1/contacts/N/sync; GET,POST,PUT,PATCH,DELETE /v1/plugins/anything;
    GET /swagger/index.html; GET /swagger/doc.json`,
}).flatMap(([group, routes]) =>
  routes.replace(/N/g, FROM).replace(/\/G/g, `/${GROUP}`).split(';').flatMap((route) => {
    const [methods = '', path = ''] = route.trim().split(' ');
    return methods.split(',').map((method) => ({ group, method, path }));
  })
);
