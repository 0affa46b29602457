#!/usr/bin/env bash
# The only proof that a user's install works: a wheel is built, and used away from the sources.
# Usage: wheel.sh PYTHON WORK_DIR
set -euo pipefail

python=$1
mkdir -p "$2"
work=$(cd "$2" && pwd)
repo=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$work/dist"

# Without isolation, so that what the editable install has compiled is not compiled again: what it
# was built with is what pyproject.toml asks for (tests/unit/house/test_house_rules.py), and no more.
"$python" -m pip --disable-pip-version-check wheel -qq --no-deps --no-build-isolation \
  --check-build-dependencies --wheel-dir "$work/dist" "$repo"
wheel=$(echo "$work"/dist/autopar-*.whl)
echo "built $(basename "$wheel")"
"$python" -m zipfile -l "$wheel" | awk 'NR > 1 {print $1}' >"$work/contents.txt"
for needed in '^_autopar_core.*\.so$' '^autopar/_data/models/.*/configs/memory_' '^autopar/_data/hardware_configs/' '^autopar/command/aliases\.toml$' '^search/show/pictures/page\.html$'; do
  grep -q "$needed" "$work/contents.txt" || { echo "wheel.sh: nothing in the wheel matches $needed"; exit 1; }
done
stray=$(grep -vE '^(autopar/|search/|profiler/|_autopar_core|autopar-[^/]*\.dist-info/)' "$work/contents.txt" || true)
[ -z "$stray" ] || { echo "wheel.sh: the wheel must not contain: $stray"; exit 1; }

bash "$(dirname "$0")/use_wheel.sh" "$python" "$wheel" "$work"
echo "e2e: passed"
