/** Programs that watch something, with the recipes of docs/webhooks.md. */

import { existsSync, mkdirSync } from 'node:fs';
import { writeFile } from 'node:fs/promises';
import { hostname, userInfo } from 'node:os';
import { join } from 'node:path';
import { assert, until } from '../assertions.ts';
import { sparePort } from '../backend.ts';
import { folderOf, type Programs, real, type Result } from './install.ts';
import { configuration, deliversOnce } from './setting.ts';

interface Monitor {
  debian: string[];
  message: string;
  /** What of the message differs from run to run, and stands as … in `message`. */
  varying?: RegExp;
  /** Makes the program notify once. `here` gives a recipe the test's address, token and paths. */
  notify(programs: Programs, here: (text: string) => string, isFirst: boolean): Promise<Result | void>;
}

function monitor(name: string, { debian, message, varying, notify }: Monitor): void {
  real(`${name} delivers exactly once`, { debian }, async (t, programs) => {
    const { gateway } = await deliversOnce(t, message, async (address, token, { gateway, backend }) => {
      const here = (text: string) =>
        text.replaceAll('gateway:8880', address).replaceAll('TOKEN', token)
          .replace(/(?<![\w/])\/(etc|usr\/local\/bin|var)\//g, `${programs.dir}/$1/`);
      const before = gateway.requests().length;
      mkdirSync(join(programs.dir, 'etc'), { recursive: true });
      programs.write('etc/signal-send', here(configuration('conf', 'Shell and cron')));
      const result = await notify(programs, here, before === 0);
      await until(() => gateway.requests().length > before, 'the notification');
      if (varying) { for (const each of backend.sent) each.message = each.message.replace(varying, '…'); }
      return result ?? { code: 0, output: '' };
    });
    assert.deepEqual(gateway.requests().map(({ status }) => status), [201, 401]);
  });
}

monitor('netdata', {
  debian: ['netdata-core=1.37.1-2', 'netdata-plugins-bash=1.37.1-2'],
  message: 'nas: disk space usage = 97% is critical\n97 % of the disk\n',
  notify: async ({ dir, run, write }, here) => {
    write('health_alarm_notify.conf', `${here(configuration('sh', 'netdata'))}SEND_EMAIL=NO\n`);
    const env = {
      NETDATA_USER_CONFIG_DIR: dir,
      NETDATA_STOCK_CONFIG_DIR: join(dir, 'usr/lib/netdata/conf.d'),
      NETDATA_CACHE_DIR: dir,
    };
    // As the daemon runs it, which needs a user and minutes for an alarm.
    const about = ['sysadmin', 'nas', '1', '1', '1', '1700000000', 'disk_space_usage', 'disk_space._', '/'];
    const values = ['CRITICAL', 'CLEAR', '97', '50', 'disks.conf', '60', '60', '%', '97 % of the disk', '97%', '50%'];
    return await run(join(dir, 'usr/lib/netdata/plugins.d/alarm-notify.sh'), [...about, ...values, '', '', '0', '1'], {
      env,
    });
  },
});

monitor('smartd', {
  debian: ['smartmontools=7.3-1+b1'],
  message: `SMART error (CurrentPendingSector) detected on host: ${hostname().split('.')[0]}
Device: /dev/sda [SAT], 1 Currently unreadable (pending) sectors\n`,
  notify: async ({ dir, run, write }, here) => {
    const SMARTD_MAILER = write('signal-smartd', here(configuration('sh', 'smartd')));
    // As smartd runs it with -m <nomailer> -M exec, which needs root and a disk.
    const env = {
      SMARTD_MAILER,
      SMARTD_ADDRESS: '',
      SMARTD_MESSAGE: 'Device: /dev/sda [SAT], 1 Currently unreadable (pending) sectors',
      SMARTD_FAILTYPE: 'CurrentPendingSector',
      SMARTD_PREVCNT: '0',
    };
    return await run(join(dir, 'usr/share/smartmontools/smartd_warning.sh'), [], { env });
  },
});

monitor('Zabbix', {
  debian: ['zabbix-proxy-sqlite3=1:6.0.14+dfsg-1+b1'],
  message: 'Problem: disk\n97% full',
  notify: async ({ dir, run, write }, here) => {
    const script = write('signal.js', here(configuration('js', 'Zabbix')));
    const input = write('parameters', JSON.stringify({ Subject: 'Problem: disk', Message: '97% full' }));
    // As the server runs it, which needs a database.
    return await run(join(dir, 'usr/bin/zabbix_js'), ['-s', script, '-i', input, '-t', '60']);
  },
});

monitor('NUT', {
  debian: [
    'nut-server=2.8.0-7',
    'nut-client=2.8.0-7',
    'libupsclient6=2.8.0-7',
    'libwrap0=7.6.q-32',
    'libnspr4=2:4.35-1',
    'libnss3=2:3.87.1-1+deb12u4',
  ],
  message: 'UPS ups@… on battery',
  varying: /(?<=@)\S+/,
  notify: async ({ dir, serve, start, write }, here, isFirst) => {
    write('ups.dev', `ups.status: ${isFirst ? 'OB' : 'OL'}\n`);
    if (!isFirst) return;
    const port = await sparePort();
    const user = userInfo().username;
    const env = { NUT_CONFPATH: dir, NUT_STATEPATH: dir, NUT_ALTPIDPATH: dir };
    write('ups.conf', '[ups]\ndriver = dummy-ups\nport = ups.dev\n');
    write('upsd.conf', `LISTEN 127.0.0.1 ${port}\n`);
    write('upsd.users', '[monitor]\npassword = secret\nupsmon primary\n');
    const watched = `MONITOR ups@127.0.0.1:${port} 1 monitor secret primary\nSHUTDOWNCMD true\nPOLLFREQ 1\n`;
    write('upsmon.conf', `${watched}${here(configuration('conf', 'NUT'))}`);
    start(join(dir, 'lib/nut/dummy-ups'), ['-F', '-u', user, '-a', 'ups'], { env });
    await until(() => existsSync(join(dir, 'dummy-ups-ups')), 'the driver');
    await serve(join(dir, 'lib/nut/upsd'), ['-F', '-u', user], port, { env });
    start(join(dir, 'lib/nut/upsmon'), ['-F', '-p'], { env });
  },
});

/** Makes Icinga or Nagios notify: of a failure, then of the recovery. Both read the same commands from a pipe. */
async function reportResult(pipe: string, isFirst: boolean): Promise<void> {
  await until(() => existsSync(pipe), 'the pipe for commands');
  const result = isFirst ? '2;97% full' : '0;fine';
  await writeFile(pipe, `[${Math.floor(Date.now() / 1000)}] PROCESS_SERVICE_CHECK_RESULT;nas;disk;${result}\n`);
}

monitor('Icinga 2', {
  debian: [
    'icinga2-bin=2.13.6-2+deb12u2',
    ...['context', 'coroutine', 'filesystem', 'iostreams', 'program-options', 'regex', 'thread'].map(
      (name) => `libboost-${name}1.74.0=1.74.0+ds1-21`,
    ),
  ],
  message: 'PROBLEM: nas/disk is CRITICAL\n97% full',
  notify: async ({ dir, run, start, write }, here, isFirst) => {
    const pipe = join(dir, 'commands');
    if (isFirst) {
      const watched = `
object NotificationComponent "notification" { }
object ExternalCommandListener "commands" { command_path = "${pipe}" }
object CheckCommand "none" { command = [ "true" ] }
object User "phone" { }
template Service "passive" { check_command = "none", enable_active_checks = false, max_check_attempts = 1 }
object Host "nas" { check_command = "none", enable_active_checks = false }
object Service "disk" { import "passive", host_name = "nas" }
apply Notification "phone" to Service { command = "signal-service", users = [ "phone" ], assign where true }
`.replaceAll(', ', '\n');
      const file = write('icinga2.conf', `${watched}${here(configuration('icinga', 'Icinga'))}`);
      const folders = ['DataDir', 'LogDir', 'CacheDir', 'SpoolDir', 'InitRunDir'].map((name) =>
        `${name}=${dir}/${name}`
      );
      for (const each of folders) mkdirSync(each.split('=')[1]!);
      const group = (await run('id', ['-gn'])).output.trim();
      const defined = [...folders, `RunAsUser=${userInfo().username}`, `RunAsGroup=${group}`].flatMap((
        each,
      ) => ['-D', each]);
      start(join(folderOf(dir, 'icinga2/sbin/icinga2'), 'icinga2'), ['daemon', '-c', file, ...defined]);
    }
    await reportResult(pipe, isFirst);
  },
});

monitor('Nagios', {
  debian: ['nagios4-core=4.4.6-4+deb12u2', 'nagios4-common=4.4.6-4+deb12u2'],
  message: `***** Nagios *****

Notification Type: PROBLEM

Service: disk
Host: nas
Address: 127.0.0.1
State: CRITICAL

Date/Time: …

Additional Info:

97% full
`,
  varying: /(?<=Date\/Time: ).*/,
  notify: async ({ dir, run, start, write }, here, isFirst) => {
    const state = join(dir, 'var/lib/nagios4');
    if (isFirst) {
      const { username, gid } = userInfo();
      // The package's own settings, with this machine's paths and user.
      const settings = `
sed -E -i 's#=/(etc|var)/#=${dir}/\\1/#; /^cfg_dir=/d; s/^use_syslog=.*/use_syslog=0/' etc/nagios4/nagios.cfg
sed -E -i 's/^nagios_user=.*/nagios_user=${username}/; s/^nagios_group=.*/nagios_group=${gid}/' etc/nagios4/nagios.cfg
echo 'query_socket=${state}/query' >> etc/nagios4/nagios.cfg
mkdir -p var/run/nagios4
`;
      const { output } = await run('sh', [
        '-ec',
        `${here(configuration('sh', 'Nagios')).replaceAll('sudo ', '')}${settings}`,
      ]);
      assert.equal(output, '');
      write(
        'etc/nagios4/objects/localhost.cfg',
        `
define command {
  command_name none
  command_line true
}
define host {
  use generic-host
  host_name nas
  address 127.0.0.1
  check_command none
  contact_groups admins
  max_check_attempts 1
}
define service {
  use generic-service
  host_name nas
  service_description disk
  check_command none
  active_checks_enabled 0
  max_check_attempts 1
}
`,
      );
      start(join(dir, 'usr/sbin/nagios4'), [join(dir, 'etc/nagios4/nagios.cfg')]);
    }
    await reportResult(join(state, 'rw/nagios.cmd'), isFirst);
  },
});
