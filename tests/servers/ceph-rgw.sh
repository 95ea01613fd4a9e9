#!/bin/bash
# A Ceph of our own on loopback: one monitor, one OSD in memory, one RADOS gateway. No manager, no cephx, nothing
# outside the state folder. Packages: radosgw ceph-mon ceph-osd (setup.sh).
#   ceph-rgw.sh start | stop | status | ceph ARGS...
# start is idempotent; it writes target/servers/ceph.env. The OSD's memory does not outlive it: after any end of it,
# the next start begins with an empty cluster.
# knobs (env): CEPH_GB  size of the OSD, default 8: memory is used as it fills; a full OSD makes writes hang, not fail
set -euo pipefail
. "$(dirname "$0")/lib.sh"
DIR=$state/ceph ENV=$state/ceph.env
CONF=$DIR/ceph.conf GB=${CEPH_GB:-8} KEY=towline SECRET=towlinesecret
ceph() { command ceph -c "$CONF" "$@"; }

configure() {
  # Below the ports that the kernel hands out to connections: one of those would keep the monitor from its own.
  local mon; mon=$(free_ports 2 $((20000 + RANDOM % 4000 * 2)))
  free_ports 1 $((8100 + RANDOM % 900)) >"$DIR/port"
  cat >"$CONF" <<X
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon host = [v2:127.0.0.1:$mon,v1:127.0.0.1:$((mon + 1))]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
keyring = /dev/null
run dir = $DIR
# no admin sockets: their paths would be too long in a deep checkout
admin socket =
pid file =
log file = $DIR/\$name.log
log to stderr = false
mon cluster log file = $DIR/cluster.log
mon data = $DIR/mon
mon allow pool size one = true
mon max pg per osd = 5000
mon data avail crit = 1
mon data avail warn = 2
mon warn on insecure global id reclaim allowed = false
mon warn on pool no redundancy = false
mon osd full ratio = .97
mon osd backfillfull ratio = .96
mon osd nearfull ratio = .95
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
osd data = $DIR/osd
osd class load list = *
osd class default list = *
memstore device bytes = $((GB << 30))
rgw data = $DIR/rgw
# without tcp_nodelay every small answer waits 40 ms for an acknowledgement
rgw frontends = beast endpoint=127.0.0.1:$(cat "$DIR/port") tcp_nodelay=1
rgw thread pool size = 64
rgw gc obj min wait = 5
rgw gc processor period = 5
rgw gc processor max time = 5
rgw enable usage log = false
rgw rados pool pg num min = 8
rgw dns name = localhost
X
  monmaptool --create --clobber --fsid "$(awk '/^fsid/{print $3}' "$CONF")" \
    --addv m "[v2:127.0.0.1:$mon,v1:127.0.0.1:$((mon + 1))]" "$DIR/monmap" >/dev/null
  mkdir -p "$DIR/mon"
  ceph-mon -c "$CONF" --mkfs -i m --monmap "$DIR/monmap" >"$DIR/mkfs.out" 2>&1
}

make_osd() {
  local uuid; uuid=$(cat /proc/sys/kernel/random/uuid)
  mkdir -p "$DIR/osd"
  ceph osd new "$uuid" >/dev/null
  ceph-osd -c "$CONF" --mkfs -i 0 --osd-uuid "$uuid" >>"$DIR/mkfs.out" 2>&1
}

osd_is_up() { timeout 30 ceph -c "$CONF" osd stat | grep -q '1 up'; }

# A monitor with an empty store that answers. Another port is tried where this one fails.
start_monitor() {
  local attempt
  for attempt in 1 2 3; do
    halt mon; rm -rf "$DIR"; mkdir -p "$DIR"
    configure
    spawn mon ceph-mon -c "$CONF" -f -i m
    wait_for mon 120 timeout 30 ceph -c "$CONF" osd stat && return
    tail -n 20 "$DIR/mon.out" "$DIR/mon.m.log" >&2 2>/dev/null || true
    echo "the monitor did not start (attempt $attempt of 3)" >&2
  done
  return 1
}

start() {
  if [ -f "$ENV" ] && up mon && up osd && up rgw; then cat "$ENV"; return; fi
  stop
  start_monitor
  make_osd
  spawn osd ceph-osd -c "$CONF" -f -i 0
  wait_for osd 120 osd_is_up
  # The owner of the buckets, and the three roles of docs/security.md.
  local user
  for user in "$KEY" reader saver collector; do
    timeout 120 radosgw-admin -c "$CONF" user create --uid="$user" --display-name="$user" --access-key="$user" \
      --secret-key="$SECRET" >>"$DIR/users.json" 2>>"$DIR/users.err"
  done
  spawn rgw radosgw -c "$CONF" -f -n client.rgw
  local endpoint; endpoint=http://127.0.0.1:$(cat "$DIR/port")
  wait_for rgw 120 curl -sf -o /dev/null "$endpoint/"
  publish "$ENV" <<X
S3_ENDPOINT=$endpoint
AWS_ACCESS_KEY_ID=$KEY
AWS_SECRET_ACCESS_KEY=$SECRET
AWS_REGION=default
X
  cat "$ENV"
}

stop() { rm -f "$ENV"; halt rgw; halt osd; halt mon; }

case ${1:-} in
  start) start ;;
  stop) stop ;;
  status) if up rgw && up osd && up mon; then echo "ceph: up"; else echo "ceph: down"; fi ;;
  ceph) shift; ceph "$@" ;;
  *) sed -n '2,8p' "$0"; exit 2 ;;
esac
