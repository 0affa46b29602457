"""How an engine keeps model states: whose code, which ZeRO stage, which buckets.

No bytes are counted here; `autopar.price.state_layouts` does that.
"""

from __future__ import annotations

from typing import Literal

from autopar.records import Record

Keeper = Literal[
    "megatron",
    "megatron-fsdp",
    "torchtitan",
    "accelerate",
    "ddp",
    "deepspeed",
    "paddlenlp",
    "galvatron",
    "executor",
]
"""Whose code keeps the states: an engine by its name, and where it has two ways, the way. `ddp` is
DistributedDataParallel under autocast, which torchtitan until 0.2 and accelerate replicate with."""
Zero = Literal[0, 1, 2, 3]
PrecisionKind = Literal["bf16", "fp16", "fp32"]


class Buckets(Record):
    """Sizes of DeepSpeed's `zero_optimization`, in elements; defaults are those of 0.19."""

    reduce: int = 500_000_000
    """`reduce_bucket_size`"""
    allgather: int = 500_000_000
    """`allgather_bucket_size`: of an exchange in place, without memory of its own."""
    prefetch: int = 50_000_000
    """`stage3_prefetch_bucket_size`"""
    live: int = 1_000_000_000
    """`stage3_max_live_parameters`: of what is fetched ahead."""
    reuse: int = 1_000_000_000
    """`stage3_max_reuse_distance`"""
    sub_group: int = 1_000_000_000
    """`sub_group_size`: of a rank's part."""
    contiguous: bool = True
    """`contiguous_gradients`: gradients are copied to a bucket that is made at once."""
    overlap: bool | None = None
    """`overlap_comm`, which has a second bucket at stages 1 and 2; None: at stage 3 alone."""
    reduce_scatter: bool = True


BUCKETS = Buckets()
