#!/usr/bin/env bash
# The only proof that a user's install works: wheel -> fresh environment -> away from the sources.
# Usage: wheel.sh PYTHON WORK_DIR
set -euo pipefail

python=$1
mkdir -p "$2"
work=$(cd "$2" && pwd)
repo=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$work/dist" "$work/venv"

# Without isolation, so that what the editable install has compiled is not compiled again: what it
# was built with is what pyproject.toml asks for (tests/unit/house/test_house_rules.py), and no more.
"$python" -m pip --disable-pip-version-check wheel -qq --no-deps --no-build-isolation \
  --check-build-dependencies --wheel-dir "$work/dist" "$repo"
wheel=$(echo "$work"/dist/autopar-*.whl)
echo "built $(basename "$wheel")"
"$python" -m zipfile -l "$wheel" | awk 'NR > 1 {print $1}' >"$work/contents.txt"
for needed in '^_autopar_core.*\.so$' '^autopar/_data/models/.*/configs/memory_' '^autopar/_data/hardware_configs/' '^search/show/pictures/page\.html$'; do
  grep -q "$needed" "$work/contents.txt" || { echo "wheel.sh: nothing in the wheel matches $needed"; exit 1; }
done
stray=$(grep -vE '^(autopar/|search/|profiler/|_autopar_core|autopar-[^/]*\.dist-info/)' "$work/contents.txt" || true)
[ -z "$stray" ] || { echo "wheel.sh: the wheel must not contain: $stray"; exit 1; }

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check "$wheel"

away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
cd "$away"
"$work/venv/bin/python" - "$repo" <<'PY'
import sys
from pathlib import Path

import _autopar_core

import autopar
import search.planning.layered.planner

repo = Path(sys.argv[1])
for module in (_autopar_core, autopar, search.planning.layered.planner):
    where = Path(module.__file__)
    assert "site-packages" in where.parts, f"{module.__name__} comes from {where}"
assert "torch" not in sys.modules
print("imports: ok, all from the installed wheel, without torch")
PY
"$work/venv/bin/autopar-search" --help >help.txt
grep -q -- '--memory-constraint' help.txt
"$work/venv/bin/autopar" --version
"$work/venv/bin/autopar" search --json plan.json
"$work/venv/bin/python" -c "
import json
answer = json.load(open('plan.json'))
assert answer['status'] == 'optimal' and answer['legal'] and answer['fits'], answer['status']
print('search: ok,', round(answer['samples_per_s'], 3), 'samples/s')
"
hardware=$("$work/venv/bin/python" -c "from autopar.documents import catalog; print(catalog.find_hardware('a100-80gb_1x8'))")
"$work/venv/bin/profile-show" "$hardware" >show.txt
grep -qi 'bandwidth' show.txt
if "$work/venv/bin/python" -m profiler.hardware 2>sentence.txt; then
  echo "wheel.sh: profiler.hardware must not run without torchrun"; exit 1
fi
grep -q 'torchrun --standalone' sentence.txt
echo "profilers: ok, without torch"
echo "e2e: passed"
