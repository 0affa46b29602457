"""A launch as a configuration of accelerate 1.15 and the arguments of the user's script.

Replicas run as DDP, shards as FSDP2 (with copies: HSDP), and what DeepSpeed keeps by its plug-in,
which is handed DeepSpeed's own configuration. Keys are those of `search.engines.huggingface.plan`;
what is read back is `search.engines.huggingface.read`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autopar.run.launch import Launch, TorchTrainer
from search.engines.deepspeed import write as deepspeed
from search.engines.engine import shell_lines
from search.engines.huggingface.plan import (
    FILE,
    HEAD,
    RING_KEYS,
    VERSION,
    common_keys,
    fsdp_keys,
    launch_lines,
    parallelism_keys,
)
from search.engines.huggingface.transformers import model_for, script_words
from search.engines.place import Draft, Place, refuse_others
from search.engines.text import dump_yaml

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
    files = {FILE: HEAD + dump_yaml(document, quoted=True), **model.files}
    if of_deepspeed:
        below = json.dumps(deepspeed.configuration(launch), indent=4) + "\n"
        files[deepspeed.FILE] = below
    lines = launch_lines(place, launch.micro_batches)
    words = shell_lines(["train.py", *script_words(launch, model)]).rstrip("\n")
    return Draft(
        version=VERSION,
        files=files,
        launch=shell_lines([*lines, words]),
        notes=tuple(_notes(launch)),
    )


def _plugged_in(launch: Launch, place: Place) -> _Section:
    document = common_keys(place, "DEEPSPEED", launch.precision.kind)
    # `commands/launch.py` refuses a precision beside a file that says it
    del document["mixed_precision"]
    trainer = launch.trainer
    document["deepspeed_config"] = {
        "deepspeed_config_file": deepspeed.FILE,
        "deepspeed_multinode_launcher": "standard",
        "zero3_init_flag": trainer is not None and trainer.zero == 3,
    }
    return document


def _own(launch: Launch, trainer: TorchTrainer, place: Place) -> _Section:
    degrees = launch.degrees
    sharded = trainer.zero > 0 or degrees.cp > 1
    kind = "FSDP" if sharded else "MULTI_GPU" if degrees.world > 1 else "NO"
    document = common_keys(place, kind, launch.precision.kind)
    if sharded:
        document["fsdp_config"] = fsdp_keys(
            reshard=trainer.zero == 3,
            checkpoint=trainer.checkpoint != "none",
            offload=launch.optimizer.offload_weights,
        )
    if sharded or degrees.tp > 1:
        sizes: _Section = {
            "dp_replicate_size": trainer.replicas,
            "dp_shard_size": degrees.dp // trainer.replicas,
            "tp_size": degrees.tp,
            "cp_size": degrees.cp,
        }
        if degrees.cp > 1:
            sizes |= RING_KEYS
        document["parallelism_config"] = parallelism_keys(sizes)
    return document


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
