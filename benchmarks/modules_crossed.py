"""Modules and functions that one question runs, from the command line to the printed answer.

`python -m benchmarks.modules_crossed [--names]` runs five questions in separate processes, each
watched by `sys.setprofile`. It prints how many modules of the product ran a function, how many
functions ran, and the largest number of modules on the stack at once. Fewer is easier to follow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("autopar", "search", "profiler")
SCRIPT = """torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py \\
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 \\
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --swiglu \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel \\
  --micro-batch-size 1 --global-batch-size 256 --bf16 --use-distributed-optimizer \\
  --train-iters 10
"""
QUESTIONS: Mapping[str, Sequence[str]] = {
    "search": ("search", "--model", "llama2-7b", "--hardware", "h100:1x8",
               "--global-batch-size", "64", "--output-config-path", "none"),
    "check": ("check", "launch.sh", "--hardware", "h100:8x8"),
    "export": ("export", "plan.json", "--to", "megatron", "--allow-approx", "--out", "none"),
    "explain": ("explain", "plan.json"),
    "measured cell": ("search", "--output-config-path", "none"),
}  # fmt: skip
"""The last one is answered from measured files: the shipped default."""
WATCHED = """
import json, sys, threading
seen, deepest, stack = set(), 0, []
PACKAGES = {packages!r}
def watch(frame, event, argument):
    global deepest
    name = frame.f_globals.get("__name__", "")
    if name.partition(".")[0] not in PACKAGES:
        return
    code = frame.f_code.co_qualname
    if "<" in code.rpartition(".")[2]:
        # a module, and what a function writes in brackets
        return
    if event == "call":
        seen.add((name, code))
        stack.append(name)
        deepest = max(deepest, len(set(stack)))
    elif event == "return" and stack:
        stack.pop()
from autopar.cli import main
sys.argv = ["autopar", *{words!r}]
sys.setprofile(watch)
threading.setprofile(watch)
code = 0
try:
    main()
except SystemExit as end:
    code = end.code or 0
finally:
    sys.setprofile(None)
with open({out!r}, "w") as file:
    json.dump({{"code": code, "deepest": deepest, "seen": sorted(seen)}}, file)
"""


def crossed(words: Sequence[str], folder: Path, root: Path = ROOT) -> Mapping[str, object]:
    """Return the trace of a command: exit code, (module, function) pairs, most modules at once.

    root : the checkout whose packages run.
    """
    out = folder / "crossed.json"
    program = WATCHED.format(packages=PACKAGES, words=list(words), out=str(out))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{program}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if not out.is_file():
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")
    found: Mapping[str, object] = json.loads(out.read_text(encoding="utf-8"))
    if found["code"]:
        raise RuntimeError(f"{' '.join(words)} ended with {found['code']}: {done.stderr[-2000:]}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="print the modules, too")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    asked = parser.parse_args(arguments)
    print(f"{'question':15} {'modules':>8} {'functions':>10} {'at once':>8}")
    with tempfile.TemporaryDirectory(prefix="autopar-") as name:
        folder = Path(name)
        (folder / "launch.sh").write_text(SCRIPT, encoding="utf-8")
        plan = ("search", "--model", "llama2-7b", "--hardware", "h100:1x8", "--engine", "galvatron",
                "--global-batch-size", "64")  # fmt: skip
        crossed(plan, folder, asked.root)
        written = next((folder / "configs").glob("autopar_*.json"))
        written.rename(folder / "plan.json")
        for question, words in QUESTIONS.items():
            found = crossed(words, folder, asked.root)
            pairs = [tuple(pair) for pair in found["seen"]]  # type: ignore[attr-defined]
            modules = sorted({module for module, _ in pairs})
            print(f"{question:15} {len(modules):8} {len(pairs):10} {found['deepest']:8}")
            if asked.names:
                for module in modules:
                    print(f"  {module} {sum(one == module for one, _ in pairs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
