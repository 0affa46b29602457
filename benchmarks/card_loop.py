"""Predicted and measured step time of the whole loop on the CPUs of this machine.

`python -m benchmarks.card_loop [--ranks 2] [--runs 5] [--work FOLDER] [--quick]`: every run starts
with an empty folder and runs the documented commands as processes:

    torchrun --nproc-per-node N -m profiler.hardware
    profile-model --mode sequence --model tiny/config.json
    autopar-search --sp-space tp+sp --model tiny/config.json
    torchrun --nproc-per-node N -m profiler.plan PLAN --mode run

It prints predicted and measured seconds of each run, and the median of their ratio. Weights and
tokens have one seed, so runs differ by the machine only: nothing else may run on it. `--quick`
measures fewer and shorter cells. With `--limit F` the exit status is 1 if the median ratio is
outside 1/F to F.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

__all__ = ["CONFIG", "main", "run_loop"]

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}
"""config.json of the model: a step of 8 samples takes about a second on two cores."""
_QUICK_HARDWARE = ("--sizes", "64K:16M:x4", "--reference-size", "16M", "--max-seconds", "0.2")
_QUICK_MODEL = ("--seq", "128,512", "--tp", "1,2", "--max-seconds", "0.3")
_TIMED_STEPS = 10


def run_loop(folder: Path, ranks: int, *, quick: bool = False) -> tuple[float, float]:
    """Run the loop once in an empty folder; return predicted and measured seconds of a step.

    The output of the commands is in `log` of the folder.

    Raises
    ------
    subprocess.CalledProcessError: a command failed.
    """
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    model = ("--model", "tiny/config.json")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m")
    profile = ("--mode", "sequence", *model, *(_QUICK_MODEL if quick else ()))
    _run(folder, *torchrun, "profiler.hardware", *(_QUICK_HARDWARE if quick else ()))
    _run(folder, "autopar", "profile", "model", *profile)
    _run(folder, "autopar", "search", "--sp-space", "tp+sp", *model)
    (plan,) = (folder / "configs").glob("autopar_plan_*.json")
    steps = ("--timed-steps", str(_TIMED_STEPS), "--json", "found.json")
    _run(folder, *torchrun, "profiler.plan", str(plan), "--mode", "run", *steps)
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found["predicted"]["step_time_s"], median(found["step_time_s"])


def _run(folder: Path, *words: str) -> None:
    # Both sides use torchrun's default of one thread per rank.
    variables = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK")}
    variables["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:]])
    with (folder / "log").open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(words)}\n")
        log.flush()
        subprocess.run(
            [sys.executable, "-m", *words],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the loop several times and print the ratios; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of the whole loop")
    parser.add_argument("--work", type=Path, help="folder of all files; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cells")
    parser.add_argument("--limit", type=float, help="largest factor of the median ratio")
    own = parser.parse_args(arguments)
    work = own.work or Path(tempfile.mkdtemp(prefix="card-loop-"))
    print(f"{own.ranks} ranks, 1 thread each, {os.cpu_count()} cores; files in {work}")
    print(f"{'run':>3s} {'predicted s':>11s} {'measured s':>11s} {'ratio':>6s} {'minutes':>8s}")
    ratios = []
    for number in range(1, own.runs + 1):
        begun_s = time.monotonic()
        predicted_s, measured_s = run_loop(work / f"run{number}", own.ranks, quick=own.quick)
        ratios.append(predicted_s / measured_s)
        minutes = (time.monotonic() - begun_s) / 60
        row = f"{number:3d} {predicted_s:11.4f} {measured_s:11.4f} {ratios[-1]:6.3f}"
        print(f"{row} {minutes:8.1f}", flush=True)
    ratio = median(ratios)
    print(f"median predicted / measured: {ratio:.3f} ({100 * (ratio - 1):+.1f} %)")
    return int(own.limit is not None and not 1 / own.limit <= ratio <= own.limit)


if __name__ == "__main__":
    sys.exit(main())
