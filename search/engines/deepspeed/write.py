"""Writer of DeepSpeed 0.19 configurations and of the arguments of the user's script.

The keys come from `deepspeed/runtime/config.py`, `runtime/zero/config.py` and
`runtime/tensor_parallel/config.py` of the wheel of 0.19.8. `search.engines.deepspeed.read` reads
configurations back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.errors import UnsupportedError
from autopar.run.run import Run
from autopar.run.runtime import BUCKETS, Buckets
from search.engines.differences import buckets_at
from search.engines.exporter_types import Draft, ExportTarget, refuse_others
from search.engines.huggingface import trl
from search.engines.huggingface.named_optimizers import is_adam_of_torch
from search.engines.huggingface.transformers import image_notes, model_for, script_words
from search.engines.words import shell_lines, torchrun

VERSION = "0.19.8"
FILE = "autopar_deepspeed.json"
_TITLE = "DeepSpeed"
_Section = dict[str, Any]


def write(run: Run, place: ExportTarget) -> Draft:
    """Return the configuration of a run, the files of its model and the launch command.

    Raises InputError for a run of another engine. Raises UnsupportedError for a run with pipeline
    stages, expert ranks or context ranks other than Ulysses, which have no configuration keys.
    """
    refuse_others(run, _TITLE, ("deepspeed",))
    refuse_splits(run, _TITLE, cp=False)
    if trl.trains(run):
        return _fine_tuned(run, place)
    model = model_for(run, place, _TITLE)
    words = [f"train.py --deepspeed {FILE}", *script_words(run, model)]
    return Draft(
        version=VERSION,
        files={FILE: json.dumps(configuration(run), indent=4) + "\n", **model.files},
        launch=torchrun(place, shell_lines(words).rstrip("\n")),
        notes=tuple(_notes(run)),
        stand_in=model.stand_in,
    )


def _fine_tuned(run: Run, place: ExportTarget) -> Draft:
    """Return the files and the launch command of a run with TRL's script."""
    model = trl.named_model(run, place, _TITLE)
    files = {FILE: of_trainer(run), **trl.files(run, model, deepspeed=FILE)}
    return Draft(
        version=f"{VERSION}, TRL {trl.VERSION}",
        files=files,
        launch=torchrun(place, shell_lines([*trl.words(run, model)]).rstrip("\n")),
        notes=tuple(trl.notes(run, model)),
    )


def of_trainer(run: Run) -> str:
    """Return the text of the configuration of a run, with the learning rate of the Trainer."""
    document = configuration(run)
    if "optimizer" in document:
        # The Trainer refuses numbers other than its own.
        document["optimizer"]["params"] |= {"lr": "auto", "weight_decay": "auto"}
    return json.dumps(document, indent=4) + "\n"


def refuse_splits(run: Run, title: str, *, cp: bool = True) -> None:
    """Raise UnsupportedError for pipeline stages, expert ranks and unsupported context ranks.

    cp : True if the engine supports ring attention; False if it supports only Ulysses (DeepSpeed).
    """
    split = run.split
    ranks = {"pipeline stages": run.strategy.pp, "expert ranks": split.ep}
    if not cp and not split.exchanges_heads:
        ranks["context ranks"] = split.cp
    for what, number in ranks.items():
        if number > 1:
            raise UnsupportedError(
                f"{title} has no {what}, but the plan has {number}",
                remedy=f"Search a plan without {what}",
            )


def configuration(run: Run) -> _Section:
    """Return the DeepSpeed configuration of a run."""
    strategy, split, runtime = run.strategy, run.split, run.runtime
    precision, wide = runtime.precision.kind, runtime.states.wide_gradients
    own = {} if runtime.optimizer.fused else {"torch_adam": True}
    found: _Section = {}
    # With AutoTP, DeepSpeed checks the batch before tensor groups exist and counts every rank as a
    # data-parallel rank. The product is therefore left to DeepSpeed.
    if split.tp == 1:
        found["train_batch_size"] = strategy.global_batch
    if is_adam_of_torch(runtime.optimizer):
        found["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1, **own}}
    else:
        # an optimizer of the configuration would replace that of `--optim`
        found["zero_allow_untested_optimizer"] = True
    found |= {
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "zero_optimization": {**_zero(run), **_host(run)},
    }
    if split.tp > 1:
        found["tensor_parallel"] = {"autotp_size": split.tp, "vocab_parallel_lm_head": True}
    if split.cp > 1:
        found["sequence_parallel_size"] = split.cp
    if wide is not None:
        found["data_types"] = {"grad_accum_dtype": "fp32" if wide else precision}
    return found


_BUCKET_KEYS: Mapping[str, str] = {
    "reduce": "reduce_bucket_size",
    "allgather": "allgather_bucket_size",
    "prefetch": "stage3_prefetch_bucket_size",
    "live": "stage3_max_live_parameters",
    "reuse": "stage3_max_reuse_distance",
    "persistent": "stage3_param_persistence_threshold",
    "model_persistent": "stage3_model_persistence_threshold",
    "sub_group": "sub_group_size",
    "contiguous": "contiguous_gradients",
    "overlap": "overlap_comm",
    "reduce_scatter": "reduce_scatter",
}
"""Configuration key of each field of `Buckets`."""


def _zero(run: Run) -> _Section:
    stage = run.split.zero
    found: _Section = {"stage": stage}
    buckets = buckets_at(run.runtime.states.buckets, stage)
    for name in Buckets.__struct_fields__:
        value = getattr(buckets, name)
        # The defaults of `Buckets` are those of DeepSpeed.
        if value != getattr(BUCKETS, name):
            found[_BUCKET_KEYS[name]] = value
    if stage == 3:
        found["stage3_gather_16bit_weights_on_model_save"] = True
    return found


def _host(run: Run) -> _Section:
    """Return the offload settings of a run, empty without ZeRO."""
    optimizer, stage = run.runtime.optimizer, run.split.zero
    if not (optimizer.offload and stage):
        return {}
    states: _Section = {"device": "cpu", "pin_memory": True}
    if stage == 3 and optimizer.offload < 1:
        states["ratio"] = optimizer.offload
    found: _Section = {"offload_optimizer": states}
    if optimizer.offload_weights:
        found["offload_param"] = {"device": "cpu", "pin_memory": True}
    return found


def _notes(run: Run) -> Iterator[str]:
    yield (
        "train.py is your script: model, data and Hugging Face's Trainer, or deepspeed.initialize "
        "with the same arguments"
    )
    yield "LOAD names weights of Hugging Face, SAVE a folder, TRAIN_ITERS the steps"
    yield from image_notes(run)
    if run.split.tp > 1:
        yield (
            f"the global batch is {run.strategy.global_batch}: micro-batch times "
            f"accumulation steps times {run.strategy.dp} data ranks. DeepSpeed's "
            "train_batch_size also counts tensor ranks, but its step does not "
            "use it"
        )
    if run.split.cp > 1:
        yield (
            "Ulysses is switched on in the script: pass the mpu that "
            "UlyssesSPAttentionHF.register_with_transformers(sequence_parallel_size="
            f"{run.split.cp}, micro_batch_size={run.strategy.micro_batch}, "
            f"seq_length={run.seq_length}, ...) returns to deepspeed.initialize"
        )
