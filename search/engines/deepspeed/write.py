"""A launch as a configuration of DeepSpeed 0.19 and the arguments of the user's script.

Keys: `deepspeed/runtime/config.py`, `runtime/zero/config.py`, `runtime/tensor_parallel/config.py`
of the wheel of 0.19.8. What is read back is `search.engines.deepspeed.read`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.errors import UnsupportedError
from autopar.run.launch import Launch, TorchTrainer
from autopar.run.runtime import BUCKETS, Buckets
from search.engines.deepspeed.plan import VERSION
from search.engines.differences import buckets_at
from search.engines.engine import shell_lines, torchrun
from search.engines.huggingface.transformers import model_for, script_words
from search.engines.place import Draft, Place, refuse_others

FILE = "autopar_deepspeed.json"
_TITLE = "DeepSpeed"
_Section = dict[str, Any]


def write(launch: Launch, place: Place) -> Draft:
    """Return the configuration of a launch, its model, and the command.

    Raises InputError for a launch of another trainer, UnsupportedError for one of stages, context
    or expert ranks, which DeepSpeed's configuration does not say.
    """
    refuse_others(launch, _TITLE, ("deepspeed",))
    refuse_splits(launch, _TITLE, cp=False)
    model = model_for(launch, place, _TITLE)
    words = [f"train.py --deepspeed {FILE}", *script_words(launch, model)]
    return Draft(
        version=VERSION,
        files={FILE: json.dumps(configuration(launch), indent=4) + "\n", **model.files},
        launch=torchrun(place, shell_lines(words).rstrip("\n")),
        notes=tuple(_notes(launch)),
    )


def refuse_splits(launch: Launch, title: str, *, cp: bool = True) -> None:
    """Raise UnsupportedError for stages and expert ranks; cp : context ranks are there."""
    degrees = launch.degrees
    ranks = {"pipeline stages": degrees.pp, "expert ranks": degrees.ep}
    if not cp:
        ranks["context ranks"] = degrees.cp
    for what, number in ranks.items():
        if number > 1:
            raise UnsupportedError(
                f"{title}'s configuration has no {what}, and the launch has {number}",
                remedy="ask for a launch without them",
            )


def configuration(launch: Launch) -> _Section:
    """Return the configuration of a launch of DeepSpeed."""
    trainer, degrees = launch.trainer, launch.degrees
    assert trainer is not None, "a launch of DeepSpeed has one"
    found: _Section = {}
    # with AutoTP it is read before the tensor groups exist: its check of the batch takes every
    # rank for a data rank, so the product is left to DeepSpeed
    if degrees.tp == 1:
        found["train_batch_size"] = launch.global_batch
    found |= {
        "train_micro_batch_size_per_gpu": launch.micro_batch,
        "gradient_accumulation_steps": launch.micro_batches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "bf16": {"enabled": launch.precision.kind == "bf16"},
        "fp16": {"enabled": launch.precision.kind == "fp16"},
        "zero_optimization": {**_zero(trainer), **_host(launch, trainer)},
    }
    if degrees.tp > 1:
        found["tensor_parallel"] = {"autotp_size": degrees.tp, "vocab_parallel_lm_head": True}
    if trainer.wide_gradients is not None:
        kind = "fp32" if trainer.wide_gradients else launch.precision.kind
        found["data_types"] = {"grad_accum_dtype": kind}
    return found


_BUCKET_KEYS: Mapping[str, str] = {
    "reduce": "reduce_bucket_size",
    "allgather": "allgather_bucket_size",
    "prefetch": "stage3_prefetch_bucket_size",
    "live": "stage3_max_live_parameters",
    "reuse": "stage3_max_reuse_distance",
    "sub_group": "sub_group_size",
    "contiguous": "contiguous_gradients",
    "overlap": "overlap_comm",
    "reduce_scatter": "reduce_scatter",
}
"""Fields of `Buckets`, and keys."""


def _zero(trainer: TorchTrainer) -> _Section:
    found: _Section = {"stage": trainer.zero}
    buckets = buckets_at(trainer.buckets, trainer.zero)
    for name in Buckets.__struct_fields__:
        value = getattr(buckets, name)
        # its defaults are those of `Buckets`
        if value != getattr(BUCKETS, name):
            found[_BUCKET_KEYS[name]] = value
    if trainer.zero == 3:
        found["stage3_gather_16bit_weights_on_model_save"] = True
    return found


def _host(launch: Launch, trainer: TorchTrainer) -> _Section:
    """Return which states lie on the host; without ZeRO none do."""
    optimizer = launch.optimizer
    if not (optimizer.offload and trainer.zero):
        return {}
    states: _Section = {"device": "cpu", "pin_memory": True}
    if trainer.zero == 3 and optimizer.offload < 1:
        states["ratio"] = optimizer.offload
    found: _Section = {"offload_optimizer": states}
    if optimizer.offload_weights:
        found["offload_param"] = {"device": "cpu", "pin_memory": True}
    return found


def _notes(launch: Launch) -> Iterator[str]:
    yield (
        "train.py is your script: model, data and Hugging Face's Trainer, or deepspeed.initialize "
        "with the same arguments"
    )
    yield "LOAD names weights of Hugging Face, SAVE a folder, TRAIN_ITERS the steps"
    if launch.degrees.tp > 1:
        yield (
            f"the global batch is {launch.global_batch}: micro-batch times accumulation steps "
            f"times {launch.degrees.dp} data ranks; DeepSpeed's own train_batch_size counts tensor "
            "ranks too, which its step does not use"
        )
