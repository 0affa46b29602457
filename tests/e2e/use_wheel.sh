#!/usr/bin/env bash
# Install a wheel in a fresh environment without a compiler on its path, and use it there.
# Usage: use_wheel.sh PYTHON WHEEL WORK_DIR
set -euo pipefail

python=$1
wheel=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
mkdir -p "$3"
work=$(cd "$3" && pwd)
rm -rf "$work/venv"

"$python" -m venv "$work/venv"
# Of each dependency a wheel: none is compiled here.
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check --only-binary :all: "$wheel"
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
cd "$away"

# Nothing on the path but the environment: neither a compiler nor a tool of the system.
alone() { env -i PATH="$work/venv/bin" HOME="$away" "$@"; }
alone "$work/venv/bin/python" - <<'PY'
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import _autopar_core

import autopar
import search.planning.layered.planner

for tool in ("cc", "gcc", "clang", "c++", "g++", "clang++", "cmake", "ninja", "make"):
    assert shutil.which(tool) is None, f"{tool} is on the path"
for module in (_autopar_core, autopar, search.planning.layered.planner):
    where = Path(module.__file__)
    assert "site-packages" in where.parts, f"{module.__name__} comes from {where}"
assert version("autopar") == autopar.__version__
assert "torch" not in sys.modules
print(f"imports: ok on {sys.version.split()[0]}, all from the installed wheel, without torch")
PY
alone autopar --version
alone autopar-search --help >help.txt
grep -q -- '--memory-constraint' help.txt
alone autopar search --model llama3-8b --hardware h100:1x8 --engine megatron \
  --global-batch-size 128 --json answer.json --html plan.html --output-config-path . >search.txt 2>&1
grep -q '<svg' plan.html
plan=$(echo autopar_plan_*.json)
alone autopar export "$plan" --out job >export.txt
grep -q -- '--tensor-model-parallel-size' job/megatron_args.sh
alone autopar check job/launch.sh --hardware h100:1x8 --json check.json >check.txt
alone python - <<'PY'
import json
from pathlib import Path

answer, checked = (json.loads(Path(name).read_text()) for name in ("answer.json", "check.json"))
best, launch = answer["engines"][0]["launches"][0], checked["launches"][0]
assert answer["status"] == "optimal", answer["status"]
assert launch["step_time_s"] == best["predicted"]["step_time_s"] > 0.0, "the launch is another"
assert max(stage["peak_bytes"] for stage in launch["stages"]) < launch["capacity_bytes"]
print("search, export, check: ok,", best["samples_per_s"], "samples/s")
PY
hardware=$(alone python -c "from autopar.documents import catalog; print(catalog.find_hardware('a100-80gb_1x8'))")
alone profile-show "$hardware" >show.txt
grep -qi 'bandwidth' show.txt
if alone python -m profiler.hardware 2>sentence.txt; then
  echo "use_wheel.sh: profiler.hardware must not run without torchrun"; exit 1
fi
grep -q 'torchrun --standalone' sentence.txt
echo "profilers: ok, without torch"
