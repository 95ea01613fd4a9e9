#!/usr/bin/env bash
# A training run loses its machine and goes on elsewhere. Everything stays under target/demo; nothing is configured.
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

work=$root/target/demo
rm -rf "$work" && mkdir -p "$work" && cd "$work"
export XDG_DATA_HOME=$work/home/data XDG_CACHE_HOME=$work/home/cache XDG_CONFIG_HOME=$work/home/config XDG_STATE_HOME=$work/home/state
unset TOWLINE_REPO
first=$XDG_DATA_HOME/towline/repository   # the embedded default
second=$work/other-cloud
trainer=
trap '[ -z "$trainer" ] || kill -9 "$trainer" 2>/dev/null || true' EXIT

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

echo "1. Training on the first machine; every checkpoint is saved, and synced to a second repository."
"$towline" init "$second" --json >/dev/null
"$python" "$here/train.py" --work node1 --steps $steps --every $every --towline "$towline" --killed-at $killed &
trainer=$!
while kill -0 "$trainer" 2>/dev/null; do
  sync_new
  sleep 0.05
done
code=0; wait "$trainer" 2>/dev/null || code=$?
trainer=
[ "$code" = 137 ] || { echo "the training was to die of SIGKILL at step $killed; it ended with $code" >&2; exit 1; }
sync_new
echo "2. The machine is lost (SIGKILL after step $(lines node1/losses)), and its repository with it."
mv home lost-home

echo "3. A second machine restores run/step-$last from the second repository."
"$towline" restore "run/step-$last" node2/restored --repo "$second" --json >restore.json
for file in model optimizer; do
  cmp "node1/step-$last/$file.safetensors" "node2/restored/$file.safetensors"
done
echo "   bit for bit what was saved"

echo "4. Training resumes there, and goes on saving."
TOWLINE_REPO=$second "$python" "$here/train.py" --work node2 --steps $steps --every $every \
  --resume node2/restored --towline "$towline"

echo "5. The same training without any interruption, to compare."
"$python" "$here/train.py" --work reference --steps $steps
head -n $last node1/losses | cat - node2/losses | cmp - reference/losses
echo "   all $steps losses are the same, to the last bit"
"$towline" show "run/step-$steps" --repo "$second" --json >show.json
echo
exec "$python" "$here/table.py" "$work"
