#!/usr/bin/env bash
# A training run loses its machine and goes on at another site. Everything stays under target/demo; nothing is configured.
#   TOWLINE=target/release/towline tests/demo/demo.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
towline=${TOWLINE:-$root/target/release/towline}
steps=120 every=20 last=60 killed=70   # killed between two checkpoints: the work after the last one is done again

# The environment that the demo trains in, made once.
python=$root/.venv/bin/python stamp=$root/.venv/.demo-installed
if ! cmp -s "$here/requirements.txt" "$stamp"; then
  echo "installing numpy, safetensors and scikit-learn into .venv (once)"
  if ! python3 -c 'import ensurepip' 2>/dev/null; then
    echo "installing python3-venv with apt"
    sudo=$([ "$(id -u)" = 0 ] || echo sudo)
    $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
  fi
  [ -x "$python" ] || python3 -m venv "$root/.venv"
  "$python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
  cp "$here/requirements.txt" "$stamp"
fi

# Chromium, for the picture of the page.
browser=$root/tests/python/browser.py
if ! python3 "$browser" 2>/dev/null && command -v apt-get >/dev/null; then
  echo "installing chromium-headless-shell with apt (once)"
  sudo=$([ "$(id -u)" = 0 ] || echo sudo)
  { $sudo apt-get update -qq &&
    $sudo apt-get install -y -qq --no-install-recommends chromium-headless-shell fonts-dejavu-core >/dev/null; } ||
    echo "it could not be installed, so there will be no picture"
fi

work=$root/target/demo
rm -rf "$work" && mkdir -p "$work" && cd "$work"
export XDG_DATA_HOME=$work/home/data XDG_CACHE_HOME=$work/home/cache XDG_CONFIG_HOME=$work/home/config XDG_STATE_HOME=$work/home/state
unset TOWLINE_REPO
first=$XDG_DATA_HOME/towline/repository   # the embedded default
second=$work/other-cloud
trainer= agents=() sockets=$(mktemp -d /tmp/towline-demo.XXXXXX)   # a socket's path may have 107 bytes, this folder's may be longer
trap '[ -z "$trainer" ] || kill -9 "$trainer" 2>/dev/null || true
  [ ${#agents[@]} = 0 ] || { kill -9 "${agents[@]}"; wait "${agents[@]}"; } 2>/dev/null || true
  rm -rf "$sockets"' EXIT

bytes() { du -sb "$1" | cut -f1; }
lines() { if [ -f "$1" ]; then wc -l <"$1"; else echo 0; fi; }
microseconds() { echo "${EPOCHREALTIME//[!0-9]/}"; }

# Brings the second repository up to date with the checkpoints saved so far, and notes what its folder grew by.
synced=0
sync_new() {
  local saved before began
  saved=$(lines node1/saves.jsonl)
  [ "$saved" -gt "$synced" ] || return 0
  before=$(bytes "$second") began=$(microseconds)
  "$towline" sync "$first" "$second" run --json >/dev/null
  printf '{"from": %d, "to": %d, "moved_bytes": %d, "seconds": %.6f}\n' $((synced * every + every)) $((saved * every)) \
    $(($(bytes "$second") - before)) "$(($(microseconds) - began))e-6" >>syncs.jsonl
  synced=$saved
}

# Starts the agent of a site: agent SITE REPOSITORIES PORT PEER. It has a certificate, a cache, and a socket of its own.
agent() {
  local room=$work/$1
  mkdir -p "$room"
  "$towline" identity issue "$1/agent" --authority "$work/authority" --to "$room/tls" --json >/dev/null
  cat >"$room/agent.toml" <<SETTINGS
repositories = [$2]
socket = "$sockets/$1.sock"
identity = "$room/tls"
listen = "127.0.0.1:$3"
callers = ["home/agent"]
memory = "512M"
[peers]
addresses = ["127.0.0.1:$4"]
[cache]
dir = "$room/cache"
capacity = "1G"
free_floor = "64M"
inventory = "1s"
[audit]
dir = "$room/audit"
[advisor]
sites = "$work/sites.toml"
[[allow]]
agents = "**"
names = "**"
SETTINGS
  XDG_CACHE_HOME=$room/index "$towline" agent --config "$room/agent.toml" 2>"$room/log" &
  agents+=($!)
  for _ in $(seq 100); do
    [ -S "$sockets/$1.sock" ] && TOWLINE_AGENT=$sockets/$1.sock "$towline" top --once --quiet >/dev/null 2>&1 && return 0
    sleep 0.1
  done
  cat "$room/log" >&2
  return 1
}
free_ports() { "$python" -c 'import socket
taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in taken))'; }

echo "1. Training on the first machine, at the site home; every checkpoint is saved, and synced to a second repository in a cloud."
"$towline" init "$first" --json >/dev/null
"$towline" init "$second" --json >/dev/null
"$towline" identity init --authority "$work/authority" --json >/dev/null
cat >sites.toml <<SITES
[[site]]
name = "home"
repositories = "$first"
gpus = [{ model = "H100", count = 64, usd_hour = "1.10" }]

[[site]]
name = "cloud"
provider = "aws"
repositories = "$second"
region = "us-east-1"
gpus = [{ model = "H100", count = 512, usd_hour = "2.50" }]

[[link]]
from = "home"
to = "cloud"
rate = "1Gbit"
delay = "20ms"
price = { unit = "GB", usd = "0.05" }
SITES
read -r home_port cloud_port < <(free_ports)
agent home "\"$first\"" "$home_port" "$cloud_port"
agent cloud "\"$second\", \"$first\"" "$cloud_port" "$home_port"
cloud=$sockets/cloud.sock
"$python" "$here/train.py" --work node1 --steps $steps --every $every --towline "$towline" --killed-at $killed &
trainer=$!
# What the shell says of a job that was killed is not worth a line; what goes wrong is.
while kill -0 "$trainer"; do
  sync_new 2>&3
  sleep 0.05
done 3>&2 2>/dev/null
code=0; wait "$trainer" 2>/dev/null || code=$?
trainer=
[ "$code" = 137 ] || { echo "the training was to die of SIGKILL at step $killed; it ended with $code" >&2; exit 1; }
sync_new

echo "2. A name is labelled restricted; the policy of the repository, signed by the authority, keeps what is raw at home."
identity() { "$towline" identity issue "$1" --authority "$work/authority" --to "$2/towline/identity" --json >/dev/null; }
identity home/person "$XDG_CONFIG_HOME"
identity cloud/person "$work/cloud/config"
"$towline" identity issue-policy --authority "$work/authority" --to "$work/policy-key" --json >/dev/null
cat >policy.toml <<POLICY
version = 1
repository = "$("$towline" init "$first" --json | "$python" -c 'import json, sys; print(json.load(sys.stdin)["id"])')"

[[site]]
name = "home"
jurisdiction = "DE"
repositories = "$first"

[[site]]
name = "cloud"
jurisdiction = "US"

[[rule]]
verdict = "deny"
names = "raw/**"
to = "cloud"
why = "raw data stays at home"

[[rule]]
verdict = "allow"
why = "the rest is for both sites"
POLICY
"$towline" policy sign policy.toml --key "$work/policy-key" --json >/dev/null
"$towline" policy set policy.toml --repo "$first" --json >/dev/null
"$towline" save policy.toml raw/notes --repo "$first" --label sensitivity=restricted --json >/dev/null
"$towline" restore raw/notes raw-at-home --repo "$first" --json >/dev/null
denied=0
XDG_CONFIG_HOME=$work/cloud/config TOWLINE_AUDIT=$work/audit \
  "$towline" restore raw/notes raw-in-cloud --repo "$first" 2>denied.txt || denied=$?
[ "$denied" = 7 ] && [ ! -e raw-in-cloud ] || { echo "a machine of the cloud was to be denied raw/notes" >&2; exit 1; }
echo "   a machine of the cloud asks for it, gets nothing, and the audit log says so:"
"$towline" audit verify --dir "$work/audit" --offline --json >audit.json
"$towline" audit show --dir "$work/audit" --denied | sed 's/^/   /'

echo "3. Where should the job go on? A hint compares the sites, before anything moves; raw/notes may not leave home."
"$towline" hint "run/step-$last" --repo "$first" --gpus 8 | sed 's/^/   /'
"$towline" hint raw/notes --repo "$first" --at cloud --explain | sed -n 's/^  denied */   denied: /p'
echo "   The hint is committed: the cloud's agent, asked by home's over mutual TLS, holds run/step-$last for a day, and fetches it."
TOWLINE_AGENT=$sockets/home.sock "$towline" hint "run/step-$last" --repo "$first" --gpus 8 --at cloud \
  --commit=cloud --lease 24h --wait --json >committed.json
"$python" - <<'COMPARE'
import json
hint = json.load(open("committed.json"))
said, made = hint["candidates"][0], hint["commitment"]
bytes_said, bytes_moved = said["bytes"]["missing"], made["moved_bytes"]
print(f"   {bytes_said:,} bytes were to move, in {said['eta_s']['p50']:.2f} s at 1 Gbit/s;"
      f" {bytes_moved:,} moved, in {made['seconds']:.2f} s on this machine")
assert abs(bytes_said - bytes_moved) * 1000 <= bytes_said, "what a hint says must be what moves"
COMPARE

# What the step takes with the steps that it is stored as differences to, and what it would take for itself.
"$towline" show "run/step-$last" --repo "$first" --json >stored.json
"$towline" init "$work/alone" --json >/dev/null
"$towline" save "node1/step-$last" alone --repo "$work/alone" --json >alone.json

echo "4. The machine is lost (SIGKILL after step $(lines node1/losses)), with its agent and its repository."
{ kill -9 "${agents[0]}" && wait "${agents[0]}"; } 2>/dev/null || true
mv home lost-home

echo "5. A second machine, in the cloud, restores run/step-$last from its agent's cache."
TOWLINE_AGENT=$cloud "$towline" restore "run/step-$last" node2/restored --repo "$second" --json >restore.json
for file in model optimizer; do
  cmp "node1/step-$last/$file.safetensors" "node2/restored/$file.safetensors"
done
echo "   bit for bit what was saved; and staged into memory, as a server of the model would:"
TOWLINE_AGENT=$cloud "$towline" stage "run/step-$last" --repo "$second" --bench | tail -n +2 | sed 's/^/ /'

echo "6. Training resumes there, and goes on saving."
TOWLINE_REPO=$second "$python" "$here/train.py" --work node2 --steps $steps --every $every \
  --resume node2/restored --towline "$towline"

echo "7. The same training without any interruption, to compare."
"$python" "$here/train.py" --work reference --steps $steps
head -n $last node1/losses | cat - node2/losses | cmp - reference/losses
echo "   all $steps losses are the same, to the last bit"
"$towline" show "run/step-$steps" --repo "$second" --json >show.json

if python3 "$browser"; then
  echo "8. The page of the second machine's agent, as \`towline page\` shows it in a browser: target/demo/page.png"
  TOWLINE_AGENT=$cloud "$towline" page --json >page.json &
  agents+=($!)
  until [ -s page.json ]; do sleep 0.1; done
  url=$("$python" -c 'import json; print(json.load(open("page.json"))["url"])')
  "$python" "$browser" "$url" page.png
else
  echo "8. No Chromium is installed, so there is no picture of the page: \`towline page\` shows it in your browser."
fi
echo
"$python" "$here/table.py" "$work"   # not exec: the agents end with this script
