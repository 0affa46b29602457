"""Rules of accelerate 1.15 for searched candidates and configurations.

Sources: `commands/launch.py`, `parallelism_config.py` and `dataclasses.py` of accelerate, and
`SFTTrainer` of TRL 1.16 and `Trainer` of transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autopar.run.rules import Rule
from search.engines.candidate import SHARDS
from search.engines.space import PLAIN_RULES, TRL_TENSOR

_REPLICAS = Rule(
    "accelerate.replicas-tensor", ("tp", "dp_replicate", "dp_shard"),
    lambda tp, replicate, shard: (tp > 1) * (replicate > 1) * (shard == 1),
    "replicas with tensor ranks need dp_shard_size above 1",
)  # fmt: skip
_CONTEXT = Rule(
    "accelerate.replicas-context", ("cp", "dp_replicate", "dp_shard"),
    lambda cp, replicate, shard: (cp > 1) * (replicate > 1) * (shard == 1),
    "replicas with context ranks need dp_shard_size above 1",
)  # fmt: skip
CONTEXT_PACKING = Rule(
    "trl.context-packing", ("cp", "packing"), lambda cp, packing: (cp > 1) * (packing != ""),
    "context ranks drop the mask between packed samples, and TRL refuses {packing} with cp({cp})",
    "Do not pack, or use 1 context rank",
)  # fmt: skip
"""`packing` names what packs samples in TRL's script; empty: nothing does."""
SPACE = (
    *PLAIN_RULES,
    SHARDS,
    _REPLICAS,
    _CONTEXT,
    CONTEXT_PACKING,
    # `parallelism_config.py` shards weights over context ranks with FSDP2.
    Rule("accelerate.context-shards", ("cp", "zero"), lambda cp, zero: (cp > 1) * (zero == 0),
         "cp({cp}) shards weights: it needs ZeRO 2 or 3"),
    # bitsandbytes stores 4 bits in a type that FSDP shards, but not 8 bits: huggingface/peft#2833.
    Rule("accelerate.base-int8", ("lora_base", "zero", "cp"), lambda base, zero, cp:
         (base == "int8") * ((zero >= 2) + (cp > 1)), "FSDP cannot shard weights in int8"),
    TRL_TENSOR,
)  # fmt: skip
"""Rules of searched candidates."""
SYNCED_GRADIENTS = (
    Rule("accelerate.synced-adapters", ("lora_rank",), lambda rank: rank > 0,
         "gradients of adapters are small, and are reduced once per step"),
    Rule("accelerate.synced-shards", ("cp", "dp_shard"), lambda cp, shard: (cp == 1) * (shard == 1),
         "gradients of one data rank are not sharded"),
)  # fmt: skip
"""Rules of candidates that reduce gradients after each micro-batch."""
FILE = (
    Rule("accelerate.grid", ("degrees", "ranks", "world"), lambda degrees, ranks, world:
         ranks != world, "{degrees} = {ranks} != num_processes({world})"),
    _REPLICAS,
    _CONTEXT,
    Rule("accelerate.context-sequence", ("cp", "sp"), lambda cp, sp: (cp > 1) * (sp > 1),
         "cp_size({cp}) and sp_size({sp}) exclude each other"),
    CONTEXT_PACKING,
    # `_prepare_context_parallel_inputs` of transformers' Trainer
    Rule("accelerate.context-attention", ("cp", "kernel"), lambda cp, kernel:
         (cp > 1) * (kernel not in ("", "sdpa")),
         "cp_size({cp}) needs sdpa, got attn_implementation({kernel})"),
    Rule("accelerate.fsdp1-tensor", ("fsdp1", "tp"), lambda fsdp1, tp: fsdp1 * (tp > 1),
         "tensor ranks need fsdp_version 2"),
    Rule("accelerate.one-process", ("fp8", "no_distribution", "world"),
         lambda fp8, none, world: fp8 * none * (world > 1),
         "distributed_type NO runs one process, got num_processes({world})"),
)  # fmt: skip
"""Rules of a configuration."""


def grid_values(numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return the inputs of the rule that the product of the degrees is the number of processes.

    numbers : parallel degrees by name.
    """
    text = " * ".join(f"{name}({size})" for name, size in numbers.items())
    return {"degrees": text, "ranks": math.prod(max(size, 1) for size in numbers.values())}
