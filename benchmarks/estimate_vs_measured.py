"""Print estimated A100 documents of llama2-7b and gpt-6.7b against published measurements.

Run from the repository root: `python benchmarks/estimate_vs_measured.py [--cases DIR]`. Reads the
documented files of Galvatron's repository. The comparison is not blind: no constant was fitted by a
procedure, but several were chosen with these files in view (docs/concepts/estimates.md lists them).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from autopar.documents.spec import load_spec
from autopar.rates.card import estimate_hardware
from autopar.rates.model import Kernels, estimate_model
from autopar.run.model import ModelProfile
from autopar.units import GB, MIB, MS

__all__ = ["Row", "main", "rows"]

Row = tuple[str, str, float, float, str]
"""(section, quantity, estimated, measured, unit)"""
CARD = "a100-80gb"


def rows(cases: Path, kernels: Kernels = "eager") -> Iterator[Row]:
    """Yield every quantity that is in both an estimate and a published file."""
    yield from _llama(cases, kernels)
    yield from _gpt(cases, kernels)
    for num_nodes, gpus in ((1, 4), (1, 8), (2, 8)):
        yield from _hardware(cases / "hardware", num_nodes, gpus)


def _llama(cases: Path, kernels: Kernels) -> Iterator[Row]:
    spec = load_spec("llama2-7b", seq_length=[2048])
    batches = tuple(range(1, 13))
    profile = estimate_model(spec, CARD, batches=batches, kernels=kernels)
    time = _read(cases / "model" / "computation_profiling_bf16_llama2-7b_all.json")
    for point in profile.layers[0].times:
        yield (
            "llama2-7b layer forward, per sample",
            f"batch {point.batch}",
            point.forward_s / point.batch / MS,
            time[f"layertype_0_bsz{point.batch}_seq2048"],
            "ms",
        )
    for other in profile.other_times:
        yield (
            "llama2-7b embedding, head, loss forward, per sample",
            f"batch {other.batch}",
            other.forward_s / other.batch / MS,
            time[f"layertype_other_bsz{other.batch}_seq2048"],
            "ms",
        )
    memory = _read(cases / "model" / "memory_profiling_bf16_llama2-7b_all.json")
    yield from _memory("llama2-7b", profile, memory, 2048)


def _gpt(cases: Path, kernels: Kernels) -> Iterator[Row]:
    folder = cases / "model_v24"
    spec = load_spec("gpt-6.7b")
    lengths = [4096 * k for k in (1, 2, 3, 4, 6, 8, 12, 16)]
    time = _read(folder / "computation_profiling_bf16_gpt-6.7b.json")
    profile = estimate_model(spec, CARD, seq_lengths=lengths, batches=(1,), kernels=kernels)
    for point in profile.layers[0].times:
        yield (
            "gpt-6.7b layer forward, batch 1",
            f"{point.seq_length} tokens",
            point.forward_s / MS,
            time[f"layertype_0_bsz1_seq{point.seq_length}"],
            "ms",
        )
    memory = _read(folder / "memory_profiling_bf16_gpt-6.7b.json")
    profile = estimate_model(spec, CARD, seq_lengths=[2048], batches=(1,), kernels=kernels)
    yield from _memory("gpt-6.7b", profile, memory, 2048)


def _memory(name: str, profile: ModelProfile, file: dict[str, Any], seq: int) -> Iterator[Row]:
    layer, table = profile.layers[0].memory[seq], file["layertype_0_sp"][str(seq)]
    section = f"{name} memory, with sequence parallelism"
    yield section, "parameter_size", layer.parameter_count * 4 / MIB, table["parameter_size"], "MiB"
    activations = table["tp_activation_per_bsz_dict"]
    for degree in (1, 2, 4, 8):
        estimated = layer.activation_bytes_per_sample[degree] / MIB
        yield section, f"activation tp {degree}", estimated, activations[str(degree)], "MiB"
    kept = layer.checkpoint_bytes_per_sample or 0.0
    yield section, "activation checkpoint", kept / MIB, activations["checkpoint"], "MiB"
    for position, key in (("only", "off"), ("first", "on_first"), ("last", "on_last")):
        other = profile.other_memory[position][(seq,)]
        measured = file[f"other_memory_pp_{key}_sp"][str(seq)]
        for degree in (1, 2, 4, 8):
            peak = 0.0 if position == "first" else profile.logits_peak_bytes_per_sample / degree
            pairs = (
                ("states", other.model_state_bytes[degree], "model_states"),
                ("activation", other.activation_bytes_per_sample[degree] + peak, "activation"),
            )
            for what, value, column in pairs:
                quantity = f"{position} stage {what} vtp {degree}"
                yield section, quantity, value / MIB, measured[column][str(degree)], "MiB"


def _hardware(folder: Path, num_nodes: int, gpus: int) -> Iterator[Row]:
    tag = f"{num_nodes}nodes_{gpus}gpus_per_node.json"
    profile = estimate_hardware(CARD, num_nodes=num_nodes, gpus_per_node=gpus)
    section = (
        f"{num_nodes}x{gpus} bandwidth (published figures taken as MiB/ms, as their engine does)"
    )
    for key, value in _read(folder / f"allreduce_bandwidth_{tag}").items():
        _, _, size, _, consecutive = key.split("_")
        estimated = profile.allreduce_bytes_per_s[int(size), consecutive == "1"] / GB
        yield section, key, estimated, value * MIB / MS / GB, "GB/s"
    for key, value in _read(folder / f"p2p_bandwidth_{tag}").items():
        estimated = profile.p2p_bytes_per_s[int(key.rsplit("_", 1)[1])] / GB
        yield section, key, estimated, value * MIB / MS / GB, "GB/s"
    path = folder / f"sp_time_{tag}"
    if not path.is_file():
        return
    section = f"{num_nodes}x{gpus} time of one collective"
    for key, value in _read(path).items():
        operation, _, size, megabytes, _ = key.split("_")
        curve = profile.curves[operation, int(size)]
        index = int(curve.sizes_bytes.searchsorted(int(megabytes[:-2]) * MIB))
        yield section, key, float(curve.times_s[index]) / MS, value, "ms"


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def main() -> int:
    """Print the table of differences; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, default=Path("../shared/cases/galvatron"))
    parser.add_argument("--kernels", choices=("eager", "fused"), default="eager")
    parser.add_argument("--summary", action="store_true", help="print one line per section")
    arguments = parser.parse_args()
    if not (arguments.cases / "hardware").is_dir():
        print(f"no published files in {arguments.cases}; give --cases DIR", file=sys.stderr)
        return 2
    sections: dict[str, list[tuple[str, float, float, str]]] = {}
    for section, *rest in rows(arguments.cases, arguments.kernels):
        sections.setdefault(section, []).append(tuple(rest))  # type: ignore[arg-type]
    for section, entries in sections.items():
        differences = [100 * (e / m - 1) for _, e, m, _ in entries]
        if not arguments.summary:
            for (quantity, estimated, measured, unit), difference in zip(
                entries, differences, strict=True
            ):
                line = f"  {quantity:32s} {estimated:10.4g} {measured:10.4g} {unit:5s}"
                print(f"{line} {difference:+7.1f} %")
        print(
            f"{section}: mean {mean(differences):+.1f} %, median size "
            f"{median(map(abs, differences)):.1f} %, largest {max(map(abs, differences)):.1f} %"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
