#!/usr/bin/env bash
# Nagios takes ` ~ $ & | ' " < and > out of a plugin's line before a notification command gets it, as its package has
# it configured, and makes a colon of each semicolon: "free <= 5%; Tom & Jerry" is notified as "free = 5%: Tom  Jerry".
# Its log has all but the semicolon.
# Guess: the line as the plugin printed it, up to the "|" of the figures.
# Seen with Nagios 4.4.6 (Debian 12).
# The text on the phone says something else than the plugin, and no gateway can see it. A page should say so beside the
# command, or set illegal_macro_output_chars where the text goes to standard input and to no shell.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
cd "$dir" || exit 2
have apt-get download -qq nagios4-core=4.4.6-4+deb12u2 nagios4-common=4.4.6-4+deb12u2
for package in ./*.deb; do have dpkg -x "$package" .; done
have usr/sbin/nagios4 -V
mkdir results
cat >plugin <<'SH'
#!/bin/sh
cat <<'TEXT'
free <= 5%; Tom & Jerry: "it's" ~ $5 | free=4%
TEXT
exit 2
SH
chmod +x plugin
cat >nagios.cfg <<CFG
$(grep '^illegal_macro_output_chars=' etc/nagios4/nagios.cfg)
cfg_file=$dir/objects.cfg
log_file=$dir/nagios.log
object_cache_file=$dir/cache
status_file=$dir/status
state_retention_file=$dir/retention
temp_file=$dir/temp
temp_path=$dir
check_result_path=$dir/results
command_file=$dir/commands
query_socket=$dir/query
lock_file=$dir/lock
nagios_user=$(id -un)
nagios_group=$(id -gn)
enable_notifications=1
service_inter_check_delay_method=n
interval_length=1
use_syslog=0
CFG
days=$(printf '%s 00:00-24:00\n' sunday monday tuesday wednesday thursday friday saturday)
cat >objects.cfg <<CFG
define timeperiod {
  timeperiod_name always
  alias always
$days
}
define command {
  command_name plugin
  command_line $dir/plugin
}
define command {
  command_name notify
  command_line /usr/bin/printf "%s" "\$SERVICEOUTPUT\$" >$dir/new && mv $dir/new $dir/notified
}
define contact {
  contact_name me
  service_notification_period always
  host_notification_period always
  service_notification_options c
  host_notification_options d
  service_notification_commands notify
  host_notification_commands notify
}
define host {
  host_name nas
  max_check_attempts 1
  contacts me
}
define service {
  host_name nas
  service_description disk
  check_command plugin
  max_check_attempts 1
  check_interval 60
  retry_interval 60
  check_period always
  notification_period always
  contacts me
}
CFG
usr/sbin/nagios4 nagios.cfg >log 2>&1 &
nagios=$!
trap 'kill "$nagios" 2>/dev/null; wait; rm -rf "$dir"' EXIT
for _ in $(seq 300); do [ -e notified ] || sleep 0.1; done
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
check 'notified' "$(cat notified)" 'free = 5%: Tom  Jerry: its  5'
check 'in the log' "$(grep -o -m 1 'NOTIFICATION:.*;notify;.*' nagios.log | sed 's/.*;notify;//')" \
  "free <= 5%: Tom & Jerry: \"it's\" ~ \$5"
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
