/** Reverse proxies in front, with the configurations of the pages. */

import { once } from 'node:events';
import http from 'node:http';
import { join } from 'node:path';
import { text as readText } from 'node:stream/consumers';
import { assert } from '../assertions.ts';
import { sparePort } from '../backend.ts';
import type { TestContext } from '../guard.ts';
import { type Packages, type Programs, real, type Result } from './install.ts';
import { configuration, deliversOnce, settingsOf } from './setting.ts';

/** Not the address of the proxy, which the gateway trusts. */
const CLIENT = '127.0.0.77';

/** Posts a message, with an address that the client has made up. */
async function post(port: number, token: string): Promise<Result> {
  const headers = { authorization: `Bearer ${token}`, 'x-forwarded-for': '203.0.113.7' };
  const options = { port, headers, method: 'POST', path: '/v2/send', host: '127.0.0.1', localAddress: CLIENT };
  const request = http.request(options).end('hello');
  const [answer] = await once(request, 'response');
  return { code: answer.statusCode, output: await readText(answer) };
}

type StartProxy = (programs: Programs, port: number, gateway: string) => Promise<void>;

/** A client's message goes through the proxy once, and its address, not the one that it claims, is in the log. */
function proxy(title: string, packages: Packages, start: StartProxy): void {
  real(title, packages, async (t: TestContext, programs) => {
    const port = await sparePort();
    let isStarted = false;
    const settings = { ...settingsOf(), trustedProxies: ['127.0.0.1'] };
    const { gateway, right, wrong } = await deliversOnce(t, 'hello', async (address, token) => {
      if (!isStarted) await start(programs, port, address);
      isStarted = true;
      return await post(port, token);
    }, settings);
    assert.equal(right.code, 201, right.output);
    assert.equal(wrong.code, 401, wrong.output);
    assert.match(wrong.output, /"code":"unauthorized"/);
    assert.deepEqual(
      new Set(gateway.requests().filter(({ method }) => method === 'POST').map(({ client }) => client)),
      new Set([CLIENT]),
    );
  });
}

const NGINX = { debian: ['nginx=1.22.1-9+deb12u11'] };

proxy('nginx passes a message once, and its own X-Forwarded-For', NGINX, async (programs, port, gateway) => {
  const { dir, write, serve } = programs;
  const page = configuration('nginx', 'nginx').replace('listen 443 ssl', `listen 127.0.0.1:${port}`)
    .replace(/^ *ssl_.*\n/gm, '').replace('127.0.0.1:8880', gateway);
  const paths = ['client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi'].map((name) => `${name}_temp_path ${dir}/t;`);
  const file = write(
    'nginx.conf',
    `daemon off; pid ${dir}/pid; error_log stderr; events {} http { access_log off; ${paths.join(' ')} ${page} }`,
  );
  await serve(join(dir, 'usr/sbin/nginx'), ['-c', file, '-p', dir, '-e', 'stderr'], port);
});

const HAPROXY = {
  debian: [
    'haproxy=2.6.12-1+deb12u4',
    'liblua5.3-0=5.3.6-2',
    'libopentracing-c-wrapper0=1.1.3-3+b1',
    'libopentracing1=1.6.0-4',
  ],
};

proxy('HAProxy passes a message once, and its own X-Forwarded-For', HAPROXY, async (programs, port, gateway) => {
  const { dir, write, serve } = programs;
  const page = configuration('haproxy', 'HAProxy before two gateways')
    .replace(/bind :443 .*/, `bind 127.0.0.1:${port}`).replace('192.168.1.11:8880', gateway).replace(
      /^.* backup\n/m,
      '',
    );
  await serve(join(dir, 'usr/sbin/haproxy'), ['-db', '-f', write('haproxy.cfg', page)], port);
});

const CADDY = { debian: ['caddy=2.6.2-5'] };

proxy('Caddy passes a message once, and discards a claimed X-Forwarded-For', CADDY, async (programs, port, gateway) => {
  const { dir, write, serve } = programs;
  const page = configuration('caddyfile', 'Caddy').replace('signal.example.org', `http://127.0.0.1:${port}`)
    .replace('127.0.0.1:8880', gateway);
  const file = write('Caddyfile', `{\n\tadmin off\n\tauto_https off\n}\n${page}`);
  await serve(join(dir, 'usr/bin/caddy'), ['run', '--adapter', 'caddyfile', '--config', file], port);
});
