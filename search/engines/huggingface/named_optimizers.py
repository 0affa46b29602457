"""Optimizers by their names in `--optimizer`, and the words of transformers that create them.

Sources: `trainer_optimizer.py` of transformers 5.24, `bitsandbytes/optim` 0.49, and
`optim/adam.py` of torchao 0.18. Writers and readers of scripts, and searches, use this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from autopar.records import Record, replace
from autopar.run.runtime import Optimizer
from autopar.training.adapters import Adapters

OptimizerName = Literal[
    "adam",
    "adam-bf16",
    "adam8bit",
    "paged-adam",
    "paged-adam8bit",
    "lion",
    "lion8bit",
    "paged-lion",
    "paged-lion8bit",
    "sgd",
    "adafactor",
    "galore",
    "apollo",
]
"""Optimizer by the precision of its moments: fp32, bf16 (precision-aware optimizer of
Megatron-Core), or 8 bits with a scale per 256 elements; paged moments move to the host."""
UNTIMED: tuple[OptimizerName, ...] = ("galore", "apollo")
"""Optimizers of low rank, which `autopar check` counts, but whose time is unknown."""


class NamedOptimizer(Record):
    """Optimizer of a name, with fp32 weights."""

    optimizer: Optimizer
    words: tuple[str, ...]
    """Values of `--optim` of transformers; the first is written."""


_ADAM_8 = Optimizer(kind="adam8bit")
_LION = Optimizer(kind="lion", moments_bytes=4)
_LION_8 = Optimizer(kind="lion8bit", moments_bytes=4)
OPTIMIZERS: Mapping[OptimizerName, NamedOptimizer] = {
    "adam": NamedOptimizer(
        optimizer=Optimizer(),
        words=("adamw_torch_fused", "adamw_apex_fused", "adamw_torch_npu_fused"),
    ),
    # a setting of Megatron-Core, whose fp32 weights depend on the sharding
    "adam-bf16": NamedOptimizer(optimizer=Optimizer(moments_bytes=4), words=()),
    "adam8bit": NamedOptimizer(optimizer=_ADAM_8, words=("adamw_bnb_8bit", "adamw_8bit")),
    "paged-adam": NamedOptimizer(
        optimizer=Optimizer(paged=True), words=("paged_adamw_32bit", "paged_adamw")
    ),
    "paged-adam8bit": NamedOptimizer(
        optimizer=replace(_ADAM_8, paged=True), words=("paged_adamw_8bit",)
    ),
    "lion": NamedOptimizer(optimizer=_LION, words=("lion_32bit",)),
    "lion8bit": NamedOptimizer(optimizer=_LION_8, words=("lion_8bit",)),
    "paged-lion": NamedOptimizer(optimizer=replace(_LION, paged=True), words=("paged_lion_32bit",)),
    "paged-lion8bit": NamedOptimizer(
        optimizer=replace(_LION_8, paged=True), words=("paged_lion_8bit",)
    ),
    "sgd": NamedOptimizer(optimizer=Optimizer(kind="sgd", moments_bytes=0), words=("sgd",)),
    "adafactor": NamedOptimizer(
        optimizer=Optimizer(kind="adafactor", moments_bytes=0), words=("adafactor",)
    ),
}
_FOREACH = ("adamw_torch", "adamw_hf", "adamw_torch_xla")
WORDS: Mapping[str, Optimizer] = {
    **{word: one.optimizer for one in OPTIMIZERS.values() for word in one.words},
    **dict.fromkeys(_FOREACH, Optimizer(fused=False)),
    "adamw_torch_8bit": replace(_ADAM_8, torchao=True),
}
"""Value of `--optim` of transformers -> optimizer of fp32 weights."""


def of_shards(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of DTensors, the shards of FSDP2 and tensor ranks: torchao's Adam8bit.

    bitsandbytes takes a DTensor for a whole tensor (bitsandbytes-foundation/bitsandbytes#1633).
    """
    own = optimizer.kind == "adam8bit" and not optimizer.paged
    return replace(optimizer, torchao=True) if own else optimizer


def updates_shards(optimizer: Optimizer) -> bool:
    """Return True for an optimizer that updates DTensors.

    Adafactor of transformers adds them to plain tensors, which torch 2.13 refuses.
    """
    return optimizer.torchao or optimizer.kind == "sgd" or is_adam_of_torch(optimizer)


def word_of(optimizer: Optimizer) -> str:
    """Return the value of `--optim` of transformers for an optimizer without a low rank."""
    same = (optimizer.kind, optimizer.paged, optimizer.torchao)
    fused = optimizer.fused or same != ("adam", False, False)
    return next(
        word
        for word, one in WORDS.items()
        if (one.kind, one.paged, one.torchao) == same and one.fused == fused
    )


def name_of(optimizer: Optimizer) -> OptimizerName:
    """Return the name of an optimizer by kind and place of its moments; `adam` for others."""
    return next(
        (
            name
            for name, one in OPTIMIZERS.items()
            if (one.optimizer.kind, one.optimizer.paged) == (optimizer.kind, optimizer.paged)
        ),
        "adam",
    )


def is_adam_of_torch(optimizer: Optimizer) -> bool:
    """Return True for Adam of torch, whose moments have the type of the weights."""
    return optimizer.kind == "adam" and not optimizer.paged


def of_narrow_weights(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of weights that are trained in 16 bits, without an fp32 copy.

    torch and torchao make moments in the type of the weights, bitsandbytes makes them in fp32.
    """
    moments = 4 if _has_type_of_weights(optimizer) else optimizer.moments_bytes
    return replace(optimizer, master_bytes=0, moments_bytes=moments)


def of_wide_weights(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of fp32 weights, the inverse of `of_narrow_weights`."""
    plain = Optimizer()
    moments = plain.moments_bytes if _has_type_of_weights(optimizer) else optimizer.moments_bytes
    return replace(optimizer, master_bytes=plain.master_bytes, moments_bytes=moments)


def _has_type_of_weights(optimizer: Optimizer) -> bool:
    own = is_adam_of_torch(optimizer) or optimizer.torchao or optimizer.low_rank is not None
    return own and optimizer.kind != "adafactor"


def has_narrow_adapters(adapters: Adapters | None) -> bool:
    """Return True if TRL casts adapters to bf16: those of quantised weights (also `qlora.py`)."""
    return adapters is not None and adapters.base != "16 bits"


def needs_bitsandbytes(optimizer: Optimizer) -> bool:
    """Return True for optimizers that scripts take from bitsandbytes."""
    kinds = ("adam8bit", "lion", "lion8bit")
    return optimizer.paged or (optimizer.kind in kinds and not optimizer.torchao)


def of_flat_tensors(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of flat partitions, which Adafactor does not factor."""
    whole = optimizer.kind == "adafactor" and optimizer.low_rank is None
    return replace(optimizer, moments_bytes=4) if whole else optimizer
