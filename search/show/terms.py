"""Terms of a step time and of a peak memory: their printed names, and their entry in `--json`.

Documents keep the keys of `autopar.price.step` and the names of `autopar.price.account`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autopar.price.oom_risk import rarely_validated, reserved_range
from autopar.training.throughput import throughput_entry

if TYPE_CHECKING:
    from autopar.price.assessment import Assessment, Target

TIME_NAMES: Mapping[str, str] = {
    # Uniform plans.
    "gemm": "GEMM",
    "memory": "memory-bound",
    "cast": "low-precision casts",
    "tensor": "TP comm",
    "context": "CP comm",
    "experts": "EP comm",
    "transfer": "PP comm",
    "host": "host overhead",
    "offload": "offload copies",
    "sharding": "ZeRO-3 comm",
    "gradients": "DP comm",
    # Per-layer plans.
    "vocab": "embedding and head",
    "tp": "TP comm",
    "ulysses": "Ulysses comm",
    "cp": "CP comm",
    "zero3": "ZeRO-3 comm",
    "gradient_sync": "DP comm",
    "sync": "DP comm per micro-batch",
    "tail": "DP comm per step",
    "fixed": "fixed (calibration)",
    # Common terms of cost models, and terms of traces.
    "products": "GEMM",
    "recomputation": "recompute",
    "tensor parallel": "TP comm",
    "context parallel": "CP comm",
    "data parallel": "DP comm",
    "stage transfer": "PP comm",
    "pipeline bubble": "bubble",
    "ZeRO-3 traffic": "ZeRO-3 comm",
}
"""Name of a term of the step time by its key, where both differ."""
MEMORY_NAMES: Mapping[str, str] = {
    # Uniform plans.
    "stand-ins of weight gradients": "dummy weight gradients",
    "overlapped products": "TP overlap buffers",
    "blocks of other streams": "blocks of other CUDA streams",
    "layer computed again": "recomputed layer",
    "tokens between experts": "dispatched tokens",
    "gradients inside of a layer": "gradients within a layer",
    "weights fetched ahead": "prefetched weights",
    "a matrix in 16 bits": "dequantized matrix",
    "freed before": "freed activations",
    "micro-batch": "micro-batch inputs",
    "transfers": "PP comm buffers",
    # Per-layer plans.
    "states": "model states",
    "activations": "saved activations",
    "vocab_states": "model states of embedding and head",
    "vocab_activations": "saved activations of embedding and head",
}
"""Name of a term of the peak by its name in documents, where both differ."""


def time_name(key: str) -> str:
    """Return the printed name of a term of the step time."""
    return TIME_NAMES.get(key, key.replace("_", " "))


def memory_name(name: str) -> str:
    """Return the printed name of a term of the peak memory."""
    return MEMORY_NAMES.get(name, name.replace("_", " "))


FEATURE_NAMES: Mapping[str, str] = {
    "8-bit products": "fp8 GEMMs",
    "4-bit products": "fp4 GEMMs",
    "adapters": "LoRA",
    "states on the host": "optimizer offload",
    "activations on the host": "activation offload",
    "overlapped tensor-parallel transfers": "TP overlap",
    "norms of queries and keys": "QK norms",
    "several instances of the optimizer": "several distributed-optimizer instances",
}
"""Name of a feature of `autopar.price.oom_risk.rarely_validated` by its name in documents, where
both differ."""


OF_MEMORY = ("stages", "odds_of_oom", "few_measured_runs_have")
"""Keys of `assessed_entry` that depend on the memory of the run."""


def assessed_entry(
    assessment: Assessment, target: Target, price: float | None = None
) -> dict[str, Any]:
    """Return the assessment of a uniform plan as an object, in seconds, bytes and shares.

    price : price of a GPU-hour.
    """
    step = assessment.step
    return {
        "stages": [
            {
                "stage": account.stage,
                "states_bytes": account.states_bytes,
                "peak_bytes": account.peak_bytes,
                "reserved_bytes": [
                    round(end) for end in reserved_range(assessment.run, account.peak_bytes)
                ],
                "terms_bytes": {term.name: term.num_bytes for term in account.peak},
            }
            for account in assessment.accounts
        ],
        "capacity_bytes": target.capacity_bytes,
        "odds_of_oom": assessment.odds_of_oom,
        "few_measured_runs_have": list(rarely_validated(assessment.run)),
        "step_time_s": None if step is None else step.total_s,
        "step_time_interval_s": None
        if assessment.interval_s is None
        else list(assessment.interval_s),
        "not_priced": assessment.untimed,
        "terms_s": {} if step is None else dict(step.terms_s),
        "tokens_per_s_per_gpu": assessment.tokens_per_s,
        "mfu": assessment.mfu,
        "throughput": throughput_entry(assessment.throughput, price) or None,
    }
