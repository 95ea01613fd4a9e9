#!/bin/bash
# Installs what the tests need besides Rust, once: Debian packages (Ceph, Slurm, Prometheus, Chromium, strace, ip, skopeo), and a venv with what requirements.txt pins.
#   setup.sh        (again: says that nothing is to do)
# knobs (env): TOWLINE_VENV (default .venv in the checkout)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${TOWLINE_VENV:-$root/.venv}

has_chromium() {
  command -v chromium-headless-shell || command -v chromium || command -v google-chrome || command -v chromium-browser
} >/dev/null

packages() {
  local missing=()
  command -v radosgw >/dev/null || missing+=(radosgw)
  command -v ceph-mon >/dev/null || missing+=(ceph-mon)
  command -v ceph-osd >/dev/null || missing+=(ceph-osd)
  command -v ceph >/dev/null || missing+=(ceph-common)
  command -v curl >/dev/null || missing+=(curl)
  # For the tests of links between network namespaces, which root alone can make.
  command -v ip >/dev/null || missing+=(iproute2)
  command -v nsenter >/dev/null || missing+=(util-linux)
  # Reads the image that is built here.
  command -v skopeo >/dev/null || missing+=(skopeo)
  # Makes certificate requests.
  command -v openssl >/dev/null || missing+=(openssl)
  # Compares an agent with its unit.
  command -v strace >/dev/null || missing+=(strace)
  # Watches the use of memory in loads to GPUs.
  command -v valgrind >/dev/null || missing+=(valgrind)
  # Reads metrics, and checks alerts and queries of the dashboard.
  local prometheus=()
  { command -v prometheus && command -v promtool; } >/dev/null || prometheus=(prometheus)
  local slurm=()
  command -v slurmctld >/dev/null || slurm+=(slurmctld)
  command -v slurmd >/dev/null || slurm+=(slurmd)
  command -v sbatch >/dev/null || slurm+=(slurm-client)
  command -v munged >/dev/null || slurm+=(munge)
  [ -e /usr/lib/*/slurm-wlm/burst_buffer_lua.so ] || slurm+=(slurm-wlm-basic-plugins)
  missing+=("${slurm[@]}" "${prometheus[@]}")
  local browser=()
  has_chromium || browser=(chromium-headless-shell fonts-dejavu-core)   # shows the page
  missing+=("${browser[@]}")
  [ ${#missing[@]} -gt 0 ] || return 0
  local sudo=(); [ "$(id -u)" = 0 ] || sudo=(sudo)
  echo "setup: installing ${missing[*]} (apt-get)"
  export DEBIAN_FRONTEND=noninteractive
  "${sudo[@]}" apt-get update -qq
  if [ ${#browser[@]} -gt 0 ] && ! apt-cache show chromium-headless-shell >/dev/null 2>&1; then
    # As on Ubuntu.
    echo "setup: no package chromium-headless-shell here; the tests of the page need some Chromium or Chrome"
    local package others=()
    for package in "${missing[@]}"; do [ "$package" = chromium-headless-shell ] || others+=("$package"); done
    missing=("${others[@]}")
  fi
  # No service is started or enabled: the tests run their own daemons on loopback, as the calling user.
  "${sudo[@]}" env RUNLEVEL=1 apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
  # Nor after a restart of the machine.
  [ ${#slurm[@]} = 0 ] || "${sudo[@]}" systemctl disable --quiet munge slurmctld slurmd 2>/dev/null || true
  [ ${#prometheus[@]} = 0 ] || "${sudo[@]}" systemctl disable --quiet prometheus 2>/dev/null || true
}

environment() {
  local wanted
  wanted=$(cat "$here/requirements.txt" "$here/../golden/requirements.txt")
  [ "$wanted" != "$(cat "$venv/requirements.txt" 2>/dev/null)" ] || return 0
  echo "setup: installing $(grep -v '^#' <<<"$wanted" | tr '\n' ' ')into $venv (pip)"
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -r "$here/requirements.txt" -r "$here/../golden/requirements.txt"
  cat <<<"$wanted" >"$venv/requirements.txt"    # last: an interrupted installation is done again
}

packages
environment
echo "setup: ready"
