"""Writer of `sft.yaml` for TRL's own script of supervised fine-tuning, `trl.scripts.sft`.

The words are those of `SFTConfig`, `ModelConfig` and `ScriptArguments` in the wheel of TRL 1.16.0.
`search.engines.huggingface.script` reads them back. Only the data comes from the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.run.rules import broken
from autopar.run.run import Run
from search.engines.exporter_types import ExportTarget
from search.engines.huggingface.named_optimizers import needs_bitsandbytes
from search.engines.huggingface.rules import CONTEXT_PACKING
from search.engines.huggingface.transformers import (
    NamedModel,
    model_for,
    trainer_settings,
    trains_narrow_weights,
)
from search.engines.text import dump_yaml
from search.engines.words import required

VERSION = "1.16.0"
FILE = "sft.yaml"
_LEARNING_RATE = 2.0e-4
"""Learning rate of adapters in the documentation of TRL (`trl/scripts/sft.py`)."""
DATA = required(
    "DATA_PATH", "set DATA_PATH to a dataset of the Hugging Face hub, or a folder of .jsonl files"
)
"""Value of the argument of a program that names the training data."""


def trains(run: Run) -> bool:
    """Return True if a run is priced as one of TRL's script, by the loss of its trainer."""
    return run.kernels.loss == "trl"


def named_model(run: Run, place: ExportTarget, title: str) -> NamedModel:
    """Return the model of a run by its name on the Hugging Face hub, where that is known.

    Raises errors as `model_for`.
    """
    return model_for(run, place, title, hub=True)


def files(run: Run, model: NamedModel, *, checkpoints: bool = True, **more: Any) -> dict[str, str]:
    """Return the text of `sft.yaml`, and of the `config.json` of a model without a name.

    checkpoints : as in `trainer_settings`. more : further keys of `sft.yaml`.
    """
    return {
        FILE: _head(run, model) + dump_yaml(_document(run, model, checkpoints, more)),
        **model.files,
    }


def words(run: Run, model: NamedModel) -> Iterator[str]:
    """Yield the words of a launch command from `-m` on."""
    yield f"-m trl.scripts.sft --config {FILE}"
    yield f'--dataset_name "{DATA}"'
    if model.files:
        yield f'--model_name_or_path "${{LOAD:-{model.name}}}"'
    else:
        yield '${LOAD:+--model_name_or_path "$LOAD"}'
    if run.steps is None:
        yield '${TRAIN_ITERS:+--max_steps "$TRAIN_ITERS"}'
    yield '${SAVE:+--output_dir "$SAVE"}'


def notes(run: Run, model: NamedModel) -> Iterator[str]:
    """Yield the notes on the variables of the launch command."""
    yield (
        "DATA_PATH is a dataset of the Hugging Face hub or a folder of .jsonl files, with "
        "messages, prompt and completion, or text"
    )
    if model.files:
        yield "LOAD names the weights: only the sizes of the model are known"
    where = "" if model.files else f"LOAD, a folder with the weights of {model.name}; "
    if model.sinks:
        yield (
            "attention sinks need flash_attention_4 (Hopper and later); weights in MXFP4 are "
            "trained only without the package kernels, as transformers then unpacks them"
        )
    steps = "" if run.steps is not None else "; TRAIN_ITERS, steps"
    yield f"optional: {where}SAVE, folder of the output{steps}"


def _head(run: Run, model: NamedModel) -> str:
    needed = [f"trl=={VERSION}"]
    if run.runtime.adapters is not None:
        needed.append("peft")
    if not run.kernels.repeated_heads:
        needed.append("flash-attn-4" if model.sinks else "flash-attn")
    quantised = run.runtime.adapters is not None and run.runtime.adapters.base != "16 bits"
    if quantised or needs_bitsandbytes(run.runtime.optimizer):
        needed.append("bitsandbytes")
    if run.runtime.optimizer.torchao:
        needed.append("torchao")
    if run.runtime.states.keeper == "deepspeed":
        needed.append("deepspeed")
    return f"# For TRL {VERSION}, written by autopar-export: pip install {' '.join(needed)}\n"


def _document(
    run: Run, model: NamedModel, checkpoints: bool, more: dict[str, Any]
) -> dict[str, Any]:
    adapters, kind = run.runtime.adapters, run.runtime.precision.kind
    settings = trainer_settings(run, model, checkpoints=checkpoints)
    # Adapters are on frozen weights of 16 bits, and DeepSpeed keeps fp32 weights itself.
    pure = trains_narrow_weights(run)
    narrow = adapters is not None or pure or run.runtime.states.keeper == "deepspeed"
    types = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    found: dict[str, Any] = {} if model.files else {"model_name_or_path": model.name}
    found |= {
        "dtype": types[kind] if narrow else "float32",
        "max_length": run.seq_length,
        "packing": not broken([CONTEXT_PACKING], {"cp": run.split.cp, "packing": "packing"}),
        **settings,
        "gradient_checkpointing": "gradient_checkpointing" in settings,
        "bf16": kind == "bf16" and not pure,
        "fp16": kind == "fp16",
    }
    if adapters is not None:
        # TRL's own ratio: 32 for rank 16.
        found |= {"lora_alpha": 2 * adapters.rank, "learning_rate": _LEARNING_RATE}
    if run.steps is not None:
        found["max_steps"] = run.steps
    return {**found, **more, "output_dir": "output"}
