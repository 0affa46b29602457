"""Printed names of the terms of a step time and of a peak memory.

Documents keep the keys of `autopar.price.step` and the names of `autopar.price.account`.
"""

from __future__ import annotations

from collections.abc import Mapping

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
