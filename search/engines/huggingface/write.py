"""Writer of accelerate 1.15 configurations and of the arguments of the user's script.

Runs without sharding use DDP, runs with sharding FSDP2, as HSDP if there are replicas. DeepSpeed
runs use the plugin of accelerate with a DeepSpeed configuration. The keys come from
`accelerate/commands/config/config_args.py`, `commands/launch.py` and `parallelism_config.py` of the
wheel of 1.15.0. `search.engines.huggingface.read` reads configurations back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autopar.run.run import Run
from search.engines.deepspeed import write as deepspeed
from search.engines.exporter_types import Draft, ExportTarget, refuse_others
from search.engines.huggingface import trl
from search.engines.huggingface.transformers import (
    image_notes,
    model_for,
    script_words,
    trains_narrow_weights,
)
from search.engines.text import dump_yaml
from search.engines.words import NODE_RANK, shell_lines

VERSION = "1.15.0"
FILE = "autopar_accelerate.yaml"
_HEAD = f"# For accelerate {VERSION}, written by autopar-export.\n"
_TITLE = "accelerate"
_Section = dict[str, Any]


def write(run: Run, place: ExportTarget) -> Draft:
    """Return the configuration of a run, the files of its model and the launch command.

    Raises InputError for a run of another engine. Raises UnsupportedError for a run with pipeline
    stages or expert ranks.
    """
    # Replicas run as DDP in every engine.
    refuse_others(run, _TITLE, ("accelerate", "deepspeed", "ddp"))
    of_deepspeed = run.runtime.states.keeper == "deepspeed"
    deepspeed.refuse_splits(run, _TITLE, cp=not of_deepspeed)
    fine_tunes = trl.trains(run)
    model = trl.named_model(run, place, _TITLE) if fine_tunes else model_for(run, place, _TITLE)
    document = _plugged_in(run, place) if of_deepspeed else _own(run, place)
    files = {FILE: _text(document), **model.files}
    if of_deepspeed:
        below = deepspeed.configuration(run)
        # The script creates the optimizer, and accelerate rejects a second one.
        below.pop("optimizer", None)
        files[deepspeed.FILE] = json.dumps(below, indent=4) + "\n"
    checkpoints = "fsdp_config" not in document
    if fine_tunes:
        command = [*launch_words(place), *trl.words(run, model)]
        return Draft(
            version=f"{VERSION}, TRL {trl.VERSION}",
            files={**files, **trl.files(run, model, checkpoints=checkpoints)},
            launch=shell_lines(command),
            notes=tuple(trl.notes(run, model)),
        )
    words = ["train.py", *script_words(run, model, checkpoints=checkpoints)]
    return Draft(
        version=VERSION,
        files=files,
        launch=shell_lines(
            [
                f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={run.strategy.micro_batches}",
                *launch_words(place),
                shell_lines(words).rstrip("\n"),
            ]
        ),
        notes=tuple(_notes(run)),
        stand_in=model.stand_in,
    )


def configuration(run: Run, place: ExportTarget) -> str:
    """Return the text of the configuration of a run that accelerate shards."""
    return _text(_own(run, place))


def _text(document: _Section) -> str:
    return _HEAD + dump_yaml(document, quoted=True)


def _common(place: ExportTarget, kind: str) -> _Section:
    """Return the keys of every configuration; kind : value of `distributed_type`."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "num_machines": place.num_nodes,
        "num_processes": place.num_gpus,
        # On several nodes the command overrides it.
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def _plugged_in(run: Run, place: ExportTarget) -> _Section:
    # `commands/launch.py` rejects `mixed_precision` next to a DeepSpeed file that sets it.
    document, split = _common(place, "DEEPSPEED"), run.split
    document["deepspeed_config"] = {
        "deepspeed_config_file": deepspeed.FILE,
        "deepspeed_multinode_launcher": "standard",
        "zero3_init_flag": split.zero == 3,
    }
    if split.cp > 1:
        document["parallelism_config"] = _sizes(
            dp_replicate_size=1,
            dp_shard_size=run.strategy.dp,
            tp_size=split.tp,
            cp_size=1,
            sp_size=split.cp,
            sp_backend="deepspeed",
            sp_seq_length=run.seq_length,
            sp_seq_length_is_variable=False,
        )
    return document


def _own(run: Run, place: ExportTarget) -> _Section:
    strategy, split = run.strategy, run.split
    sharded = split.zero > 0 or split.cp > 1
    kind = "FSDP" if sharded else "MULTI_GPU" if strategy.gpus > 1 else "NO"
    document = _common(place, kind)
    precision = run.runtime.precision.kind
    # FSDP casts weights to fp32 with mixed precision, and autocast has nothing to cast.
    plain = precision == "fp32" or trains_narrow_weights(run)
    document["mixed_precision"] = "no" if plain else precision
    if sharded:
        document["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": split.zero == 3,
            "fsdp_activation_checkpointing": strategy.recomputed.kind != "none",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": run.runtime.optimizer.offload_weights,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if place.spec is not None and place.spec.layer_classes:
            classes = ",".join(place.spec.layer_classes)
            document["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = classes
    if sharded or split.tp > 1:
        # In PyTorch "alltoall" selects ring attention, which passes keys and values around.
        ring = {"cp_backend": "torch", "cp_comm_strategy": "alltoall"} if split.cp > 1 else {}
        document["parallelism_config"] = _sizes(
            dp_replicate_size=split.replicas,
            dp_shard_size=strategy.dp // split.replicas,
            tp_size=split.tp,
            cp_size=split.cp,
            **ring,
        )
    return document


def _sizes(**sizes: object) -> _Section:
    """Return the section of parallel degrees; sizes : degrees by name such as `tp_size`."""
    return {f"parallelism_config_{key}": value for key, value in sizes.items()}


def launch_words(place: ExportTarget) -> Iterator[str]:
    """Yield the command and the options that precede the script."""
    yield f"accelerate launch --config_file {FILE}"
    if place.num_nodes > 1:
        yield f"--machine_rank {NODE_RANK}"
        yield '--main_process_ip "${MASTER_ADDR:?set it to the first node}"'
        yield '--main_process_port "${MASTER_PORT:-29500}"'


def _notes(run: Run) -> Iterator[str]:
    yield (
        f"train.py is your script: its DataLoader has batch_size={run.strategy.micro_batch}, and "
        f"accelerator.accumulate counts {run.strategy.micro_batches} micro-batches a step"
    )
    yield "LOAD names weights of Hugging Face, SAVE a folder, TRAIN_ITERS the steps"
    yield from image_notes(run)
    if run.split.tp > 1:
        yield (
            "the model shards itself: from_pretrained(..., tp_plan='auto', "
            "device_mesh=...) of transformers; modules outside of its plan, "
            "such as the embedding, are not sharded"
        )
    if run.split.exchanges_heads and run.split.cp > 1:
        yield "Ulysses needs deepspeed >= 0.18.2 in addition to accelerate"
