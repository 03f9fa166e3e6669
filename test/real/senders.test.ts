/** Programs that send notifications, with the recipes of docs/webhooks.md. */

import { appendFileSync, existsSync } from 'node:fs';
import type http from 'node:http';
import { hostname } from 'node:os';
import { join } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import { assert, until } from '../assertions.ts';
import { type Backend, sparePort } from '../backend.ts';
import type { Both } from '../process.ts';
import { SECRET } from '../samples.ts';
import { type Programs, real, type Result, type Started } from './install.ts';
import { configuration, deliversOnce, REFUSED } from './setting.ts';

const CURL = ['curl=7.88.1-10+deb12u15', 'libcurl4=7.88.1-10+deb12u15'];

/** A recipe with this machine's address and the token. */
const placed = (text: string, address: string, token: string): string =>
  text.replace('gateway:8880', address).replace('TOKEN', token);

/** The file for `curl -K` of the page. */
function writeCurlFile({ write }: Programs, address: string, token: string): string {
  return write('signal-send', placed(configuration('conf', 'Shell and cron'), address, token));
}

/** What a program has printed, once its request is in the log and it has printed this text three more times. */
async function goesOn({ gateway }: Both, token: string, { output }: Started, text: string): Promise<Result> {
  const expected = token === SECRET ? 201 : 401;
  const count = () => gateway.requests().filter(({ status }) => status === expected).length;
  await until(() => count() > 0, `a ${expected} in the log`);
  const from = output().length;
  await until(() => output().slice(from).split(text).length > 3, 'the program to go on');
  assert.equal(count(), 1, `requests with ${expected}`);
  return { code: 0, output: output() };
}

/** From now on the backend answers a send only when it is released. */
function hold({ server }: Backend) {
  const [answer] = server.listeners('request') as http.RequestListener[];
  const held: (() => void)[] = [];
  server.removeAllListeners('request').on('request', (req: http.IncomingMessage, res: http.ServerResponse) => {
    if (req.method === 'POST') held.push(() => answer!(req, res));
    else answer!(req, res);
  });
  const release = (): void => {
    server.removeAllListeners('request').on('request', answer!);
    for (const each of held) each();
  };
  return { held, release };
}

/** Answers the next send after 12 s, when a client with a short time-out has given up. */
async function answerLate(backend: Backend): Promise<void> {
  const { held, release } = hold(backend);
  await until(() => held.length > 0, 'a send');
  await pause(12_000);
  release();
}

const MONIT = { debian: ['monit=1:5.33.0-1', ...CURL] };

/** What dash's echo would change and cut. */
const OUTPUT = String.raw`share \\srv\new\case full: 5\t
and "a second" line: $(id)`;

real('monit sends a state once, with all of its text', MONIT, async (t, programs) => {
  const { dir, write, start } = programs;
  const text = `${hostname()}: share: status failed (3) -- ${OUTPUT}\n`;
  await deliversOnce(t, text, async (address, token, both) => {
    const script = configuration('sh', 'monit').replace('/etc/signal-send', writeCurlFile(programs, address, token));
    write('output', `${OUTPUT}\n`);
    const check = write('check', `#!/bin/sh\ncat ${dir}/output\nexit 3\n`);
    const files = ['idfile', 'statefile', 'pidfile'].map((name) => `set ${name} ${dir}/${name}-${token}`);
    const lines = [
      'set daemon 1',
      ...files,
      `check program share with path ${check}`,
      `if status != 0 then exec "${write('signal-monit', script)}"`,
      '',
    ];
    const monit = start(join(dir, 'usr/bin/monit'), ['-I', '-c', write('monitrc', lines.join('\n'))]);
    const result = await goesOn(both, token, monit, "'share' status failed");
    await monit.stop();
    return result;
  });
});

const FAIL2BAN = { debian: ['fail2ban=1.0.2-2', ...CURL] };

real('fail2ban sends a ban once, and bans on while the message waits', FAIL2BAN, async (t, programs) => {
  const { dir, write, start } = programs;
  const failure = (address: string): string =>
    `${new Date().toISOString()} host sshd[1]: Failed password for invalid user a"$(id) from ${address} port 22 ssh2`;
  const line = failure('192.0.2.1');
  await deliversOnce(
    t,
    `sshd banned 192.0.2.1 after 1 failures\n${line}\n`,
    async (address, token, { backend, gateway }) => {
      const file = writeCurlFile(programs, address, token);
      if (token !== SECRET) {
        appendFileSync(join(dir, 'sshd.log'), `${failure('192.0.2.2')}\n`);
        await until(() => gateway.requests().length === 2, 'the second message');
        return { code: 0, output: '' };
      }
      write(
        'etc/fail2ban/action.d/signal.local',
        configuration('ini', 'Bans of fail2ban').replace('/etc/signal-send', file),
      );
      write('etc/fail2ban/action.d/touch.local', `[Definition]\nactionban = touch ${dir}/<name>-<ip>\n`);
      write(
        'etc/fail2ban/fail2ban.local',
        `[DEFAULT]\nlogtarget = STDOUT\nsocket = ${dir}/socket\npidfile = ${dir}/pid\ndbfile = None\n`,
      );
      write(
        'etc/fail2ban/jail.local',
        `
[DEFAULT]
backend = polling
banaction = touch
maxretry = 1
[sshd]
enabled = true
logpath = ${write('sshd.log', `${line}\n`)}
action = %(action_)s
         signal
[other]
enabled = true
filter = sshd
logpath = ${write('other.log', '')}
`,
      );
      const { held, release } = hold(backend);
      const env = { PYTHONPATH: join(dir, 'usr/lib/python3/dist-packages') };
      const server = [join(dir, 'usr/bin/fail2ban-server'), '-c', join(dir, 'etc/fail2ban'), '-f', 'start'];
      start('python3', server, { env });
      await until(() => held.length === 1, 'the message');
      appendFileSync(join(dir, 'other.log'), `${failure('192.0.2.3')}\n`);
      await until(() => existsSync(join(dir, 'other-192.0.2.3')), 'the ban of the other jail');
      assert.deepEqual(gateway.requests(), [], 'the message still waits');
      release();
      await until(() => gateway.requests().length === 1, 'the answer');
      return { code: 0, output: '' };
    },
  );
});

const TELEGRAF = {
  go: [
    '-tags',
    'custom,inputs.execd,outputs.http,parsers.influx,serializers.template',
    'github.com/influxdata/telegraf/cmd/telegraf@v1.37.2',
  ],
};

real('telegraf sends an alert once to a slow backend, and drops what is refused', TELEGRAF, async (t, programs) => {
  const { dir, write, start } = programs;
  const { wrong } = await deliversOnce(t, 'nas: disk is 93\n', async (address, token, both) => {
    const file = write(
      'telegraf.conf',
      `
[agent]
  flush_interval = "1s"
  debug = true
  omit_hostname = true
[[inputs.execd]]
  command = ["sh", "-c", "printf 'disk,host=nas value=93\\nload,host=nas value=7\\n'; exec cat"]
${placed(configuration('toml', 'telegraf'), address, token)}`,
    );
    const telegraf = start(join(dir, 'usr/bin/telegraf'), ['--config', file]);
    if (token === SECRET) await answerLate(both.backend);
    const result = await goesOn(both, token, telegraf, 'Buffer fullness: 0 / ');
    await telegraf.stop();
    return result;
  });
  assert.match(wrong.output, /non-retryable status 401/);
  assert.match(wrong.output, REFUSED);
});

const MAILRISE = { pypi: ['mailrise==1.4.0', 'apprise==1.4.5'] };

real('mailrise sends a mail once to a slow backend, and defers one that is refused', MAILRISE, async (t, programs) => {
  const { run, serve, write } = programs;
  const { right, wrong } = await deliversOnce(
    t,
    'Backup (root@nas)\r\n5 files',
    async (address, token, { backend }) => {
      const port = await sparePort();
      const listen = `listen:\n  host: 127.0.0.1\n  port: ${port}\n`;
      const file = write('mailrise.conf', listen + placed(configuration('yaml', 'mailrise'), address, token));
      const mailrise = await serve('mailrise', [file], port);
      const code = `
import smtplib
mail = 'From: root@nas\\r\\nTo: root@nas\\r\\nSubject: Backup\\r\\n\\r\\n5 files\\r\\n'
with smtplib.SMTP('127.0.0.1', ${port}) as smtp:
    smtp.set_debuglevel(1)
    smtp.sendmail('root@nas', ['root@nas'], mail)`;
      const sending = run('python3', ['-c', code]);
      if (token === SECRET) await answerLate(backend);
      const result = await sending;
      await mailrise.stop();
      return result;
    },
  );
  assert.match(right.output, /data: \(250,/);
  assert.match(wrong.output, /data: \(450,/);
});

const ANSIBLE = { pypi: ['ansible-core==2.19.4'] };

real(
  'Ansible sends once, takes a 201 for a success, and reads the refusal',
  ANSIBLE,
  async (t, { dir, run, write }) => {
    const { right, wrong } = await deliversOnce(t, 'nas\'s update: 100 % "done"', (address, token) => {
      const task = placed(configuration('yaml', 'Ansible'), address, token).replace(/^/gm, '    ')
        .replace('{{ inventory_hostname }} is updated', `nas's update: 100 % \\"done\\"`);
      const play = `- hosts: localhost\n  gather_facts: false\n  tasks:\n${task.trimEnd()}\n`;
      const more = '      register: it\n      until: it is succeeded\n      retries: 2\n      delay: 0\n';
      const file = write('play.yml', token === SECRET ? play + more : play);
      const python = `ansible_python_interpreter=${join(dir, 'venv/bin/python3')}`;
      return run('ansible-playbook', ['-c', 'local', '-i', 'localhost,', '-e', python, file]);
    });
    assert.equal(right.code, 0, right.output);
    assert.equal(wrong.code, 2);
    assert.match(wrong.output, REFUSED);
  },
);

const SYSLOG_NG = {
  debian: [
    'syslog-ng-core=3.38.1-5+deb12u1',
    'syslog-ng-mod-http=3.38.1-5+deb12u1',
    'libivykis0=0.42.4-1',
    'libnet1=1.1.6+dfsg-3.2',
    'libjson-c5=0.16-2',
    'libpcre3=2:8.39-15',
    'libwrap0=7.6.q-32',
    'libcurl4=7.88.1-10+deb12u15',
  ],
};

real('syslog-ng sends an error once, and goes on after a refusal', SYSLOG_NG, async (t, { dir, run, start, write }) => {
  const line = `nas: disk "sda" & 'sdb': 5 % <left>`;
  await deliversOnce(t, line, async (address, token, both) => {
    const recipe = placed(configuration('conf', 'syslog-ng'), address, token);
    const lines = write(`lines-${token}`, '');
    const source = `source s_src { file("${lines}" follow-freq(0.2)); };\n`;
    const file = write('syslog-ng.conf', `@version: 3.38\noptions { keep-hostname(yes); };\n${source}${recipe}`);
    const modules = (await run('find', [dir, '-name', 'libhttp.so'])).output.trim();
    const own = ['persist', 'pid', 'control'].map((name) => `${dir}/${name}-${token}`);
    const libraries = ['usr/lib/syslog-ng', 'usr/lib/x86_64-linux-gnu', 'lib/x86_64-linux-gnu'];
    const env = { LD_LIBRARY_PATH: libraries.map((each) => join(dir, each)).join(':') };
    const args = ['-F', '--no-caps', '-f', file, '-R', own[0]!, '-p', own[1]!, '-c', own[2]!];
    const syslog = start(join(dir, 'usr/sbin/syslog-ng'), [...args, '--module-path', join(modules, '..')], { env });
    const expected = token === SECRET ? 201 : 401;
    const count = (): number => both.gateway.requests().filter(({ status }) => status === expected).length;
    await pause(3000);
    const entry = `Nov 29 15:00:00 nas kernel: ${line.slice(5)}\n`;
    appendFileSync(lines, `<11>${entry}<14>${entry}`);
    await until(() => count() === 1, `a ${expected}`);
    if (token !== SECRET) {
      // It has dropped the line, and so the next one comes.
      appendFileSync(lines, `<11>${entry}`);
      await until(() => count() === 2, 'the next line');
    }
    await syslog.stop();
    return { code: 0, output: syslog.output() };
  });
});

const MQTTWARN = { pypi: ['mqttwarn==0.36.1'], npm: ['aedes@0.51.3'] };

real('mqttwarn sends an MQTT message once, as it is', MQTTWARN, async (t, { run, serve, write }) => {
  const text = `T\u00fcr: it's "open" & a=b`;
  await deliversOnce(t, text, async (address, token, both) => {
    const port = await sparePort();
    const code = `
import aedes from 'aedes';
import net from 'node:net';
const broker = aedes();
net.createServer(broker.handle).listen(${port}, '127.0.0.1');
broker.on('subscribe', () => broker.publish({ topic: 'home', payload: ${JSON.stringify(text)}, qos: 0 }, () => {}));
`;
    const broker = await serve(process.execPath, [write('broker.mjs', code)], port);
    const recipe = placed(configuration('ini', 'mqttwarn'), address, token);
    const server = `[defaults]\nhostname = '127.0.0.1'\nport = ${port}\nlaunch = http\nnum_workers = 1\n`;
    const file = write('mqttwarn.ini', `${server}${recipe}[home]\ntargets = http:signal\n`);
    const before = both.gateway.requests().length;
    const running = run('timeout', ['20', 'mqttwarn', `--config-file=${file}`]);
    await until(() => both.gateway.requests().length > before, 'the message');
    const result = await running;
    await broker.stop();
    return result;
  });
});
