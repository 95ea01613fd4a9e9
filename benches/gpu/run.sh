#!/usr/bin/env bash
# Loading to a GPU beside bare copies from pinned memory, in one run on one machine. Without a GPU it says so, and measures nothing.
#   benches/gpu/run.sh
# knobs (env): TOWLINE (default target/release/towline), GPU_MIB (bytes of the weights in MiB, default 4096), OUT (default target/gpu),
#   GPU_RUNS (loads of each kind, of which the last counts, default 3)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
towline=${TOWLINE:-$root/target/release/towline}
out=${OUT:-$root/target/gpu}
mib=${GPU_MIB:-4096}
runs=${GPU_RUNS:-3}

[ -x "$towline" ] || { echo "no program at $towline: cargo build --release" >&2; exit 1; }
code=0
bare=$(python3 "$here/copy_rate.py") || code=$?
if [ "$code" = 3 ]; then
  echo "nothing measured: $bare"
  exit 0
fi
[ "$code" = 0 ] || exit "$code"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
export TOWLINE_AGENT=none XDG_CACHE_HOME=$work/cache XDG_CONFIG_HOME=$work/config
python3 "$here/weights.py" "$work/weights" "$mib"
# A repository each: in one, the second save would store nothing.
for name in raw encoded; do
  "$towline" --repo "$work/$name" init --quiet
done
"$towline" --repo "$work/raw" save "$work/weights" raw --compression off --quiet
"$towline" --repo "$work/encoded" save "$work/weights" encoded --quiet
rm -rf "$work/weights"
# The last one: the file system's cache has the packs then.
for name in raw encoded; do
  for to in "cuda:0" "cuda:0 --decode-on gpu" "host"; do
    for _ in $(seq "$runs"); do
      "$towline" --repo "$work/$name" stage $name --bench --device $to --json >"$work/$name-${to// /}.json"
    done
  done
done
python3 "$here/table.py" "$bare" "$work"/*.json | tee "$out/gpu.md"
