"""Print the estimated memory of every shipped model over its exactly counted memory.

Run from the repository root: `python benchmarks/estimate_vs_exact.py [NAME ...]`. Both use the
model's own sequence lengths, bf16, and sequence parallelism; a figure is estimate over count.
docs/concepts/estimates.md explains figures far from 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import get_args

from autopar.documents import catalog
from autopar.documents.model import with_shipped_memory
from autopar.documents.spec import load_spec
from autopar.rates.model import Kernels, estimate_model
from autopar.run.model import ModelProfile, OtherMemory

__all__ = ["Ratios", "main", "ratios"]

Ratios = tuple[str, str, dict[int, float]]
"""(model and layer type or position, quantity, estimate over count by degree)"""
CARD = "a100-80gb"
DEGREES = (1, 2, 4, 8, 16, 32, 64)


def ratios(name: str, kernels: Kernels, *, sequence_parallel: bool = True) -> Iterator[Ratios]:
    """Yield the ratios of all quantities in both the estimate and the shipped file of a model."""
    spec = load_spec(name)
    estimate = estimate_model(
        spec, CARD, batches=(1,), kernels=kernels, sequence_parallel=sequence_parallel
    )
    counted = with_shipped_memory(estimate, spec, name)
    for kind, layer in enumerate(spec.layers):
        ours, exact = (p.layers[kind].memory[layer.seq_length] for p in (estimate, counted))
        where = f"{name} layer {kind}"
        yield where, "parameters", {1: ours.parameter_count / exact.parameter_count}
        yield (
            where,
            "activations",
            _by_degree(ours.activation_bytes_per_sample, exact.activation_bytes_per_sample),
        )
        saved = (ours.checkpoint_bytes_per_sample, exact.checkpoint_bytes_per_sample)
        if saved[0] is not None and saved[1] is not None:
            yield where, "checkpoint", {1: saved[0] / saved[1]}
    for position in ("only", "first", "last"):
        ours_other, exact_other = (_other(p, position) for p in (estimate, counted))
        where = f"{name} {position}"
        yield (
            where,
            "states",
            _by_degree(ours_other.model_state_bytes, exact_other.model_state_bytes),
        )
        # counted tables include the peak of the loss, estimated ones list it separately
        peak = estimate.logits_peak_bytes_per_sample if position != "first" else 0.0
        kept = {t: v + peak / t for t, v in ours_other.activation_bytes_per_sample.items()}
        yield where, "activations", _by_degree(kept, exact_other.activation_bytes_per_sample)


def _other(profile: ModelProfile, position: str) -> OtherMemory:
    (memory,) = profile.other_memory[position].values()
    return memory


def _by_degree(ours: Mapping[int, float], exact: Mapping[int, float]) -> dict[int, float]:
    return {t: ours[t] / exact[t] for t in DEGREES if t in ours and t in exact}


def main() -> None:
    """Print one line per model, part and quantity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=catalog.model_names(), metavar="NAME")
    parser.add_argument("--kernels", choices=get_args(Kernels), default="eager")
    parser.add_argument("--no-sequence-parallel", action="store_true")
    arguments = parser.parse_args()
    print(f"{'estimate / count':36s} " + "".join(f"{f't={t}':>8s}" for t in DEGREES))
    for name in arguments.names:
        found = ratios(
            name, arguments.kernels, sequence_parallel=not arguments.no_sequence_parallel
        )
        for where, quantity, values in found:
            row = "".join(f"{values[t]:8.3f}" if t in values else " " * 8 for t in DEGREES)
            print(f"{where + ', ' + quantity:36s} {row.rstrip()}")


if __name__ == "__main__":
    main()
