/** The node of n8n, and the test of its credential, in a workflow that n8n's own engine runs. */

import { assert } from '../assertions.ts';
import { FROM, TO } from '../samples.ts';
import { real } from './install.ts';
import { deliversOnce, REFUSED } from './setting.ts';

const N8N = { npm: ['n8n-core@2.41.1', 'n8n-workflow@2.41.0', 'n8n-nodes-signal-cli-rest-api@0.12.1'] };

/** Without n8n's server, which stores workflows and credentials: its database needs a native module. */
const RUN = `
require('reflect-metadata');
const { ExecutionLifecycleHooks, WorkflowExecute } = require('n8n-core');
const { Workflow } = require('n8n-workflow');
const { Signal } = require('n8n-nodes-signal-cli-rest-api/dist/nodes/Signal/Signal.node.js');
const { SignalApi } = require('n8n-nodes-signal-cli-rest-api/dist/credentials/SignalApi.credentials.js');
const { parameters, credential } = JSON.parse(process.argv[2]);
const { properties, test } = new SignalApi();
const describe = (more) => ({ version: 1, defaults: {}, group: [], inputs: [], outputs: ['main'], properties: [], ...more });
const probe = { name: 'probe', displayName: 'probe', type: 'hidden', default: '', routing: { request: test.request } };
const types = {
  start: { description: describe({ group: ['trigger'] }), trigger() {}, async execute() { return [this.getInputData()]; } },
  test: { description: describe({ inputs: ['main'], credentials: [{ name: 'signalApi' }], properties: [probe] }) },
  signal: new Signal(),
};
const nodes = Object.keys(types).map((name) => ({
  id: name, name, type: name, typeVersion: 1, position: [0, 0], parameters: name === 'signal' ? parameters : {},
  credentials: { signalApi: { id: '1', name: 'signal' } },
  onError: name === 'test' ? 'continueRegularOutput' : 'stopWorkflow',
}));
const to = (node) => ({ main: [[{ node, type: 'main', index: 0 }]] });
const data = { id: '1', name: 'alert', nodes, connections: { start: to('test'), test: to('signal') }, active: false };
const workflow = new Workflow({ ...data, nodeTypes: { getByNameAndVersion: (name) => types[name] } });
const surroundings = {
  executionId: '1',
  variables: {},
  webhookWaitingBaseUrl: 'http://localhost',
  formWaitingBaseUrl: 'http://localhost',
  hooks: new ExecutionLifecycleHooks('manual', '1', data),
  setExecutionStatus() {},
  credentialsHelper: {
    getDecrypted: async () => credential,
    getParentTypes: () => [],
    getCredentialsProperties: () => properties,
    isCredentialUsableByNode: () => true,
    preAuthentication: async () => undefined,
    authenticate: async (credentials, type, request) => request,
  },
};
new WorkflowExecute(surroundings, 'manual').run({ workflow, startNode: workflow.getNode('start') }).then((run) => {
  const { runData } = run.data.resultData;
  const [tested] = runData.test[0].data.main[0];
  console.log('the test says', JSON.stringify(tested.json));
  console.log('the node says', run.status, runData.signal[0].error?.description);
});
`;

real("n8n's node delivers exactly once, and its credential is tested", N8N, async (t, { run, write }) => {
  const { gateway, right, wrong } = await deliversOnce(t, 'Backup done', (address, token) => {
    const credential = { apiUrl: `http://${address}`, apiToken: token, phoneNumber: FROM };
    const parameters = { resource: 'messages', operation: 'sendMessage', recipient: TO, message: 'Backup done' };
    return run('node', [write('run.cjs', RUN), JSON.stringify({ parameters, credential })]);
  });
  assert.match(right.output, /the test says .*"versions"/);
  assert.match(right.output, /the node says success/);
  assert.match(wrong.output, /the test says .*"error"/);
  assert.match(wrong.output, new RegExp(`the node says error ${REFUSED.source}`));
  // Both repeat what has failed.
  const refused = gateway.requests().filter(({ status }) => status === 401).map(({ method }) => method);
  assert.deepEqual(refused, ['GET', 'GET', 'POST', 'POST']);
});
