"""Errors of fitted times at sequence lengths that the fit has not seen.

`python -m benchmarks.held_out_fit [--model MODEL] [--device cpu|cuda] [--json LEDGER]`; a repeat is
one `profile-model` over all lengths, and the fits see only those of `--seq`. The planner's fit is
compared with its result from one batch size, and with the peer's fit. `--clock cpu` calls the
profiler's timing itself and counts the CPU seconds of this process, in one thread: it tests the
form of the fit on machines too busy for wall time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.documents.model import read_model_profile
from autopar.documents.spec import load_spec
from autopar.records import replace
from autopar.run.model import (
    LayerProfile,
    ModelProfile,
    ModelSpec,
    OtherTime,
    ShardedTime,
    TimePoint,
)
from autopar.units import MS
from benchmarks.metadata import ROOT, append
from profiler.measure import Policy
from search.planning.cost.fits import ComputeFit, fit_computation, fit_other_time
from search.request.options import SearchOptions
from tests.unit.cpu_clock import CpuTimer, one_thread

__all__ = ["FITS", "MODEL", "TARGETS", "Cell", "Part", "counted", "held_out", "main", "profiled"]

Part = Literal["forward", "backward", "other"]
"""Forward and backward of a whole layer; forward of embedding, head and loss."""

FITS = {
    "joint": "planner, all batches",
    "single": "planner, batch 1 alone",
    "peer": "peer",
}
"""Name and heading of every fit. The peer fits a parabola (embedding and head: a line) through the
times of one sample, unweighted and unconstrained. It multiplies the result by the batch, and
doubles the forward for the backward.
"""
TARGETS = {"inside": 0.10, "outside": 0.20}
"""Largest error of the joint fit, for the median over the repeats. The planner calls a fit bad at
10 %; one octave outside the error may be twice that.
"""
MODEL: dict[str, Any] = {
    "format": "autopar-model",
    "version": 1,
    "name": "small-llama",
    "layers": [
        {
            "num_layers": 8,
            "seq_length": 2048,
            "hidden_size": 512,
            "num_heads": 8,
            "num_kv_heads": 4,
            "ffn_hidden_size": 1408,
            "gated_mlp": True,
        }
    ],
    "vocab_size": 2048,
}
_OPTIONS = SearchOptions(time_profile_mode="sequence")
_COMMAND = "from autopar.cli import model; model()"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A measured time that no fit has seen, in seconds for the batch, and the time of each fit."""

    part: Part
    layer_type: int
    """Layer type; 0 for embedding, head and loss."""
    batch: int
    seq_length: int
    inside: bool
    """True if its length is between the shortest and the longest one of the fit."""
    measured_s: float
    fitted_s: Mapping[str, float]
    """Fitted seconds by the names of `FITS`."""

    @property
    def name(self) -> tuple[str, int, int, int]:
        """Key of this cell within a repeat, in the order of the table."""
        return (self.part, self.layer_type, self.seq_length, self.batch)

    def error(self, fit: str) -> float:
        """Return fitted / measured - 1."""
        return self.fitted_s[fit] / self.measured_s - 1.0


def held_out(profile: ModelProfile, lengths: Sequence[int]) -> list[Cell]:
    """Return every cell at other lengths than these, predicted from those at these.

    All layer types have the same length. Raises InputError where that is too few to fit.
    """
    cells = []
    for kind, layer in enumerate(profile.layers):
        cells += list(_layer_cells(kind, layer, lengths))
    return [*cells, *_other_cells(profile, lengths)]


def _layer_cells(kind: int, layer: LayerProfile, lengths: Sequence[int]) -> Iterator[Cell]:
    whole = [p for p in layer.sharded_times if p.degree == 1]
    assert len(whole) == len(layer.times), "every whole layer was measured in both directions"
    seen = replace(
        layer,
        times=tuple(p for p in layer.times if p.seq_length in lengths),
        sharded_times=tuple(p for p in whole if p.seq_length in lengths),
    )
    single = replace(
        seen,
        times=tuple(p for p in seen.times if p.batch == 1),
        sharded_times=tuple(p for p in seen.sharded_times if p.batch == 1),
    )
    peer = _line([(p.seq_length, p.forward_s) for p in single.times], 2)
    for point in sorted(whole, key=lambda p: (p.seq_length, p.batch)):
        if point.seq_length in lengths:
            continue
        fits = {
            name: fit_computation(kind, data, point.seq_length, _OPTIONS, _ignore)
            for name, data in (("joint", seen), ("single", single))
        }
        peer_s = float(np.polyval(peer, point.seq_length)) * point.batch
        assert point.backward_s is not None, "backward was measured"
        yield _cell(
            "forward",
            kind,
            (point.batch, point.seq_length),
            lengths,
            point.forward_s,
            {name: fit.whole for name, fit in fits.items()},
            peer_s,
        )
        yield _cell(
            "backward",
            kind,
            (point.batch, point.seq_length),
            lengths,
            point.backward_s,
            {name: fit.measured["backward", False, 1] for name, fit in fits.items()},
            2.0 * peer_s,
        )


def _other_cells(profile: ModelProfile, lengths: Sequence[int]) -> Iterator[Cell]:
    seen = tuple(p for p in profile.other_times if p.seq_lengths[0] in lengths)
    single = tuple(p for p in seen if p.batch == 1)
    peer = _line([(p.seq_lengths[0], p.forward_s) for p in single], 1)
    for point in sorted(profile.other_times, key=lambda p: (p.seq_lengths, p.batch)):
        seq_length = point.seq_lengths[0]
        if seq_length in lengths:
            continue
        fits = {
            name: fit_other_time(
                replace(profile, other_times=times), point.seq_lengths, _OPTIONS, _ignore
            )
            for name, times in (("joint", seen), ("single", single))
        }
        yield _cell(
            "other",
            0,
            (point.batch, seq_length),
            lengths,
            point.forward_s,
            fits,
            float(np.polyval(peer, seq_length)) * point.batch,
        )


def _cell(
    part: Part,
    layer_type: int,
    size: tuple[int, int],
    lengths: Sequence[int],
    measured_s: float,
    fits: Mapping[str, ComputeFit],
    peer_s: float,
) -> Cell:
    """Return a cell of this (batch, length) with the time of every fit."""
    batch, seq_length = size
    fitted = {name: float(fit.forward_s(np.array([float(batch)]))[0]) for name, fit in fits.items()}
    return Cell(
        part=part,
        layer_type=layer_type,
        batch=batch,
        seq_length=seq_length,
        inside=min(lengths) < seq_length < max(lengths),
        measured_s=measured_s,
        fitted_s={**fitted, "peer": peer_s},
    )


def _line(points: Sequence[tuple[int, float]], degree: int) -> NDArray[np.float64]:
    """Return the unweighted, unconstrained polynomial through times over lengths."""
    lengths, times_s = zip(*points, strict=True)
    return np.polyfit(lengths, times_s, degree)


def _ignore(note: str) -> None:
    """Ignore the note of a bad fit, because this benchmark measures the error."""


def profiled(model: str, folder: Path, options: Sequence[str], dtype: str) -> ModelProfile:
    """Return the profile of one `profile-model` in sequence mode; it writes to `folder`."""
    command = [sys.executable, "-c", _COMMAND, "--model", model, "--mode", "sequence"]
    command += ["--tp", "1", "--layernum-min", "1", "--layernum-max", "2", "--dtype", dtype]
    done = subprocess.run(
        [*command, *options, "--out", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read_model_profile(
        computation=folder,
        memory=folder,
        spec=load_spec(model),
        sequence_parallel=True,
        precision=dtype,
    )


def counted(
    spec: ModelSpec, sizes: Sequence[tuple[int, int]], dtype: str, policy: Policy, seed: int
) -> ModelProfile:
    """Return the times of these (batch, length) in CPU seconds of this process, without memory.

    Sizes are measured in random order, so that changes of the machine affect all alike.
    """
    import torch

    from profiler.model.cells import ModelCell
    from profiler.model.measuring import time_cell

    on: dict[str, Any] = {"dtype": dtype, "device": torch.device("cpu"), "policy": policy}
    times, sharded, others = [], [], []
    with one_thread():
        for batch, seq_length in random.Random(seed).sample(sizes, len(sizes)):
            layer = ModelCell(
                quantity="time", part="layer", layer_type=0, batch=batch, seq_lengths=(seq_length,)
            )
            rest = replace(layer, part="only", layer_type=None)
            found = time_cell(spec, layer, **on, more=False, timer=CpuTimer())
            other = time_cell(spec, rest, **on, backward=False, timer=CpuTimer())
            forward_s, backward_s, other_s = (
                statistics.median(samples_s)
                for samples_s in (
                    found.samples_s["forward"],
                    found.samples_s["backward"],
                    other.samples_s["forward"],
                )
            )
            size: dict[str, Any] = {"batch": batch, "seq_length": seq_length}
            times.append(TimePoint(**size, forward_s=forward_s))
            sharded.append(
                ShardedTime(
                    layer_type=0,
                    **size,
                    degree=1,
                    kind="sp",
                    forward_s=forward_s,
                    backward_s=backward_s,
                )
            )
            others.append(OtherTime(batch=batch, seq_lengths=(seq_length,), forward_s=other_s))
    known = LayerProfile(times=tuple(times), memory={}, sharded_times=tuple(sharded))
    return ModelProfile(
        layers=(known,), other_times=tuple(others), other_memory={}, sequence_parallel=True
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(word) for word in text.split(",")}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="anything with one length that profile-model takes by path")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--seq", type=_numbers, default=(128, 192, 256, 384, 512, 768))
    parser.add_argument("--unseen", type=_numbers, default=(160, 320, 640, 1536))
    parser.add_argument("--bsz", type=_numbers, default=(1, 2, 4))
    parser.add_argument("--max-seconds", type=float, default=0.5)
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append the result to this file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the error of every unseen cell; return 1 when the joint fit misses a target."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if set(given.seq) & set(given.unseen):
        parser.error("--unseen: a length of --seq is not unseen")
    if len(given.seq) < 3 or 1 not in given.bsz:
        parser.error("three lengths in --seq and batch 1 in --bsz are the least that can be fitted")
    if given.clock == "cpu" and given.device != "cpu":
        parser.error("--clock cpu counts what a CPU computes; leave it out on another device")
    lengths = sorted((*given.seq, *given.unseen))
    sizes = [(batch, length) for length in lengths for batch in given.bsz]
    policy = Policy(iters=given.iters, warmup=2, max_seconds=given.max_seconds)
    options = ["--device", given.device, "--iters", str(policy.iters)]
    options += ["--warmup", str(policy.warmup), "--max-seconds", str(policy.max_seconds)]
    options += ["--bsz", ",".join(map(str, given.bsz)), "--seq", ",".join(map(str, lengths))]
    repeats: list[list[Cell]] = []
    loads = []
    with tempfile.TemporaryDirectory() as name:
        model = given.model
        if model is None:
            model = str(Path(name) / f"{MODEL['name']}.json")
            Path(model).write_text(json.dumps(MODEL), encoding="utf-8")
        for number in range(given.repeats):
            if given.clock == "cpu":
                profile = counted(load_spec(model), sizes, given.dtype, policy, seed=number)
            else:
                profile = profiled(model, Path(name) / f"repeat{number}", options, given.dtype)
            repeats.append(held_out(profile, given.seq))
            loads.append(os.getloadavg()[0])
    print(
        f"{given.model or MODEL['name']} on {given.device}, {given.dtype}, {given.clock} clock; "
        "fitted at "
        f"{', '.join(map(str, given.seq))} tokens and batches "
        f"{', '.join(map(str, given.bsz))}; {given.repeats} repeats, load "
        f"{min(loads):.1f} to {max(loads):.1f}"
    )
    missed = _show(repeats)
    append(
        given.json,
        "held_out_fit",
        {
            "model": given.model or MODEL["name"],
            "device": given.device,
            "clock": given.clock,
            "torch": importlib.metadata.version("torch"),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "load": loads,
            "seq": given.seq,
            "repeats": [[asdict(cell) for cell in cells] for cells in repeats],
        },
    )
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


def _show(repeats: Sequence[Sequence[Cell]]) -> list[str]:
    """Print medians over the repeats; return sentences on the targets that were missed."""
    cells: dict[tuple[str, int, int, int], list[Cell]] = {cell.name: [] for cell in repeats[0]}
    for repeat in repeats:
        for cell in repeat:
            cells[cell.name].append(cell)
    head = ("part", "length", "batch", "measured, ms", "+- %", *FITS.values())
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    worst: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for (part, kind, seq_length, batch), found in cells.items():
        times_s = [cell.measured_s for cell in found]
        middle_s = statistics.median(times_s)
        errors = {name: statistics.median(cell.error(name) for cell in found) for name in FITS}
        where = "inside" if found[0].inside else "outside"
        label = f"{part} {kind}" if kind else part
        row = [label, f"{seq_length}" + ("" if found[0].inside else " (outside)"), str(batch)]
        row.append(f"{middle_s / MS:.1f}")
        row.append(f"{50.0 * (max(times_s) - min(times_s)) / middle_s:.0f}")
        row += [f"{100.0 * error:+.1f} %" for error in errors.values()]
        print("| " + " | ".join(row) + " |")
        for name, error in errors.items():
            cell_name = f"{label}, length {seq_length}, batch {batch}"
            worst.setdefault((where, name), []).append((error, cell_name))
    missed = []
    for (where, name), found_errors in worst.items():
        error, cell_name = max(found_errors, key=lambda item: abs(item[0]))
        rms = float(np.sqrt(np.mean([item[0] ** 2 for item in found_errors])))
        print(
            f"{where}, {FITS[name]}: rms {100 * rms:.1f} %, "
            f"worst {100 * error:+.1f} % ({cell_name})"
        )
        if name == "joint" and abs(error) > TARGETS[where]:
            missed.append(
                f"{where}, {cell_name}: {100 * error:+.1f} %, target {100 * TARGETS[where]:.0f} %"
            )
    return missed


if __name__ == "__main__":
    sys.exit(main())
