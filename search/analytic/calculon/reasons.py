"""Why the compiled engine refuses an execution, in the order of its codes."""

from __future__ import annotations

__all__ = ["REASONS"]

REASONS: tuple[str, ...] = (
    "",
    "a degree or a batch size is below 1",
    "tensor * pipeline * data parallelism != num_procs",
    "batch_size is not a multiple of data_par * microbatch_size",
    "We only perform recompute during training",
    "Bad pipeline interleaving",
    "Bad pipeline interleaving with PP=1",
    "We perform optimizer sharding with DP > 1",
    "We perform TP comm overlap with TP > 1",
    "We only redo AG comm",
    "We assume no extra AG with full recompute",
    "We only perform DP comm overlap during training",
    "We perform DP comm overlap with DP > 1",
    "We only perform optimizer offloading during training",
    "a network tier does not exist",
    "Network tier isn't big enough",
    "Network tier isn't fully used",
    "Unsupported type",
    "Pipeline interleaving must be less than or equal to the number of blocks per processor",
    "Pipeline interleaving must be a factor value of the number of blocks per processor",
    "Offloading requires each processor to handle at least 3 blocks",
    "We should split batch_seq between TP partitions evenly",
    "We should split hidden between TP partitions evenly",
    "We should split feedforward between TP partitions evenly",
    "We should split attn_heads between TP partitions evenly",
    "attn_kv_heads does not divide attn_heads",
    "We should split attn_kv_heads between TP partitions evenly",
    "not in the published model",
    "Mem tier1 needs more than it has",
    "Mem tier2 needs more than it has",
    "a code is none of its field's",
)
"""Sentences without figures; `evaluate` gives them with their figures."""
