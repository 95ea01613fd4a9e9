#!/bin/bash
# The real servers of the tests, both of them: servers.sh start | stop | status
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
case ${1:-} in
  start | stop | status) for server in ceph-rgw ministack; do bash "$here/$server.sh" "$1"; done ;;
  *) sed -n 2p "$0"; exit 2 ;;
esac
