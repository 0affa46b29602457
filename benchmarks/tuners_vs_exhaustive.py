"""Number of evaluations until each tuner finds the best point of a space that can be tried in full.

`python -m benchmarks.tuners_vs_exhaustive [random|optuna|hyperopt|smac ...]`; tuners that are not
installed are reported and skipped.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from autopar.errors import InstallError
from search.closed_form.files import calculon_system
from search.closed_form.tuners import TuningResult, load_space, tune

__all__ = ["APPLICATION", "SPACE", "SYSTEM", "best_of_all", "evaluations_to"]

SYSTEM = calculon_system("a100-80gb")
APPLICATION = {
    "hidden": 5120,
    "feedforward": 20480,
    "seq_size": 2048,
    "attn_heads": 40,
    "attn_size": 128,
    "num_blocks": 40,
}
SPACE: dict[str, Any] = {
    "num_procs": 64,
    "tensor_par": {"from": 1, "to": 8, "times": 2},
    "pipeline_par": [1, 2, 4, 8],
    "tensor_par_net": 0,
    "pipeline_par_net": 1,
    "data_par_net": [0, 1],
    "batch_size": 512,
    "microbatch_size": [1, 2, 4],
    "datatype": "float16",
    "fused_activation": True,
    "attention_type": "multihead",
    "activation_recompute": ["none", "attn_only", "full"],
    "pipeline_interleaving": [1, 5],
    "optimizer_sharding": [False, True],
    "tensor_par_comm_type": ["ar", "rs_ag"],
    "tensor_par_overlap": ["none", "ring"],
    "seq_par_ag_redo": False,
    "data_par_overlap": [False, True],
    "weight_offload": False,
    "activations_offload": False,
    "optimizer_offload": False,
}
"""Space of a 13-billion-parameter model on 64 processors: 9,216 points; two in five run."""
_EVALUATIONS = {"random": 9216, "optuna": 300, "hyperopt": 300, "smac": 300}
_SEEDS = range(5)


def best_of_all() -> TuningResult:
    """Return the answer of the exhaustive search."""
    return tune(APPLICATION, SYSTEM, SPACE, tuner="exhaustive")


def evaluations_to(result: TuningResult, value: float) -> int | None:
    """Return the number of evaluations until a tuner reached a rate; None if it did not."""
    return next(
        (step.evaluations for step in result.trace if step.value >= value * (1 - 1e-12)), None
    )


def _tune(name: str, seed: int) -> TuningResult:
    kind = "ray" if name in ("optuna", "hyperopt") else name
    return tune(
        APPLICATION,
        SYSTEM,
        load_space(SPACE),
        tuner=kind,  # type: ignore[arg-type]
        evaluations=_EVALUATIONS[name],
        seed=seed,
        ray_search=name if kind == "ray" else "optuna",
    )


def main() -> None:
    """Print a row for each tuner."""
    exact = best_of_all()
    best = exact.trace[-1].value
    print(f"exhaustive: {exact.evaluations} points, {exact.feasible_share:.0%} run, {best:.4f}/s")
    for name in sys.argv[1:] or list(_EVALUATIONS):
        try:
            start_s = time.perf_counter()
            results = [_tune(name, seed) for seed in _SEEDS]
            each_s = (time.perf_counter() - start_s) / sum(r.evaluations for r in results)
        except InstallError as error:
            print(f"{name}: left out: {error}")
            continue
        counts = [evaluations_to(result, best) for result in results]
        near = [evaluations_to(result, 0.99 * best) for result in results]
        gaps = [1 - result.trace[-1].value / best for result in results]
        share = statistics.mean(result.feasible_share for result in results)
        print(
            f"{name}: at most {_EVALUATIONS[name]}: best after {counts}, 99 % of it after {near}, "
            f"gap at the end {max(gaps):.2%} at most, {share:.0%} run, {each_s * 1e3:.3g} ms each",
            flush=True,
        )


if __name__ == "__main__":
    main()
