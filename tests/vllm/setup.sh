#!/bin/bash
# Installs vLLM beside the frameworks of the Python tests, once, to target/vllm; see requirements.txt.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
"$root/tests/python/setup.sh"
python=${TOWLINE_VENV:-$root/.venv}/bin/python
wanted=$(cat "$here/requirements.txt")
[ "$wanted" != "$(cat "$root/target/vllm/installed.txt" 2>/dev/null)" ] || exit 0
echo "setup: installing vLLM for CPUs into target/vllm (pip; once, 200 MB to fetch)"
rm -rf "$root/target/vllm"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$root/target/vllm" -r "$here/requirements.txt"
cat <<<"$wanted" >"$root/target/vllm/installed.txt"    # last: an interrupted installation is done again
