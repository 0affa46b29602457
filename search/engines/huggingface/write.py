"""A launch as a configuration of accelerate 1.15 and the arguments of the user's script.

Replicas run as DDP, shards as FSDP2 (with copies: HSDP), and what DeepSpeed keeps by its plug-in,
which is handed DeepSpeed's own configuration. Keys: `accelerate/commands/config/config_args.py`,
`commands/launch.py`, `parallelism_config.py` of the wheel of 1.15.0; what is read back is
`search.engines.huggingface.read`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autopar.run.launch import Launch, TorchTrainer
from search.engines.deepspeed import write as deepspeed
from search.engines.huggingface.transformers import model_for, script_words
from search.engines.place import Draft, Place, refuse_others
from search.engines.text import dump_yaml
from search.engines.words import NODE_RANK, shell_lines

VERSION = "1.15.0"
FILE = "autopar_accelerate.yaml"
_HEAD = f"# For accelerate {VERSION}, written by autopar-export.\n"
_TITLE = "accelerate"
_Section = dict[str, Any]


def write(launch: Launch, place: Place) -> Draft:
    """Return the configuration of a launch, its model, and the command.

    Raises InputError for a launch of another trainer, UnsupportedError for one of stages or expert
    ranks.
    """
    # replicas are those of DDP, whoever starts them
    refuse_others(launch, _TITLE, ("accelerate", "deepspeed", "ddp"))
    trainer = launch.trainer
    assert trainer is not None, "that is what was refused"
    of_deepspeed = trainer.keeper == "deepspeed"
    deepspeed.refuse_splits(launch, _TITLE, cp=not of_deepspeed)
    model = model_for(launch, place, _TITLE)
    document = _plugged_in(launch, place) if of_deepspeed else _own(launch, trainer, place)
    files = {FILE: _HEAD + dump_yaml(document, quoted=True), **model.files}
    if of_deepspeed:
        below = deepspeed.configuration(launch)
        # accelerate refuses a second one where the script makes its own
        del below["optimizer"]
        files[deepspeed.FILE] = json.dumps(below, indent=4) + "\n"
    checkpoints = "fsdp_config" not in document
    words = ["train.py", *script_words(launch, model, checkpoints=checkpoints)]
    return Draft(
        version=VERSION,
        files=files,
        launch=shell_lines([*_command(launch, place), shell_lines(words).rstrip("\n")]),
        notes=tuple(_notes(launch)),
        stand_in=model.stand_in,
    )


def _common(place: Place, kind: str) -> _Section:
    """Return the keys of every configuration; kind : of `distributed_type`."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "num_machines": place.num_nodes,
        "num_processes": place.num_gpus,
        # the launch overrides it on several nodes
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def _plugged_in(launch: Launch, place: Place) -> _Section:
    # `commands/launch.py` refuses a precision beside a file that says it
    document, trainer, degrees = _common(place, "DEEPSPEED"), launch.trainer, launch.degrees
    document["deepspeed_config"] = {
        "deepspeed_config_file": deepspeed.FILE,
        "deepspeed_multinode_launcher": "standard",
        "zero3_init_flag": trainer is not None and trainer.zero == 3,
    }
    if degrees.cp > 1:
        document["parallelism_config"] = _sizes(
            dp_replicate_size=1,
            dp_shard_size=degrees.dp,
            tp_size=degrees.tp,
            cp_size=1,
            sp_size=degrees.cp,
            sp_backend="deepspeed",
            sp_seq_length=launch.seq,
            sp_seq_length_is_variable=False,
        )
    return document


def _own(launch: Launch, trainer: TorchTrainer, place: Place) -> _Section:
    degrees = launch.degrees
    sharded = trainer.zero > 0 or degrees.cp > 1
    kind = "FSDP" if sharded else "MULTI_GPU" if degrees.world > 1 else "NO"
    document = _common(place, kind)
    precision = launch.precision.kind
    document["mixed_precision"] = "no" if precision == "fp32" else precision
    if sharded:
        document["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": trainer.zero == 3,
            "fsdp_activation_checkpointing": trainer.checkpoint != "none",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": launch.optimizer.offload_weights,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if sharded or degrees.tp > 1:
        # all-to-all is how torch passes keys and values around the ring
        ring = {"cp_backend": "torch", "cp_comm_strategy": "alltoall"} if degrees.cp > 1 else {}
        document["parallelism_config"] = _sizes(
            dp_replicate_size=trainer.replicas,
            dp_shard_size=degrees.dp // trainer.replicas,
            tp_size=degrees.tp,
            cp_size=degrees.cp,
            **ring,
        )
    return document


def _sizes(**sizes: object) -> _Section:
    """Return the section of degrees, by their names such as `tp_size`."""
    return {f"parallelism_config_{key}": value for key, value in sizes.items()}


def _command(launch: Launch, place: Place) -> Iterator[str]:
    """Yield the lines of the command up to the script."""
    yield f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={launch.micro_batches}"
    yield f"accelerate launch --config_file {FILE}"
    if place.num_nodes > 1:
        yield f"--machine_rank {NODE_RANK}"
        yield '--main_process_ip "${MASTER_ADDR:?set it to the first node}"'
        yield '--main_process_port "${MASTER_PORT:-29500}"'


def _notes(launch: Launch) -> Iterator[str]:
    yield (
        f"train.py is your script: its DataLoader has batch_size={launch.micro_batch}, and "
        f"accelerator.accumulate counts {launch.micro_batches} micro-batches a step"
    )
    yield "LOAD names weights of Hugging Face, SAVE a folder, TRAIN_ITERS the steps"
    if launch.degrees.tp > 1:
        yield (
            "the model shards itself: from_pretrained(..., tp_plan='auto', device_mesh=...) of "
            "transformers; what its plan leaves out, such as the embedding, stays whole"
        )
    if launch.degrees.heads_exchanged and launch.degrees.cp > 1:
        yield "Ulysses needs deepspeed >= 0.18.2 beside accelerate"
