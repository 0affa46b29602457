"""Writer of `train.yaml` for LLaMA-Factory, with the file of DeepSpeed or accelerate.

The words are those of `llamafactory/hparams` in the wheel of 0.9.5. LLaMA-Factory starts the ranks
of replicas and of DeepSpeed itself; FSDP needs the launcher of accelerate.
`search.engines.huggingface.script` reads the words back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.run.run import Run
from search.engines.deepspeed import write as deepspeed
from search.engines.exporter_types import Draft, ExportTarget
from search.engines.huggingface import write as accelerate
from search.engines.huggingface.transformers import (
    SYNCED,
    NamedModel,
    adapted_modules,
    trainer_settings,
    trains_narrow_weights,
)
from search.engines.huggingface.trl import DATA
from search.engines.text import dump_yaml
from search.engines.tuners.check import named_model, needed, rank_variables
from search.engines.words import shell_lines

VERSION = "0.9.5"
FILE = "train.yaml"
_TITLE = "LLaMA-Factory"
_HEAD = (
    f"# For LLaMA-Factory {VERSION}, written by autopar-export: pip install llamafactory=={VERSION}"
)
_RATES = {True: 1.0e-4, False: 1.0e-5}
"""Learning rates of LLaMA-Factory's examples, with adapters and without."""


def write(run: Run, place: ExportTarget) -> Draft:
    """Return the files of a run and its launch command.

    Raises InputError for a run of another engine, and UnsupportedError for a run with stages, or
    with tensor, context or expert ranks.
    """
    model = named_model(run, place, _TITLE)
    plugged_in = run.runtime.states.keeper == "deepspeed"
    sharded = not plugged_in and run.split.zero > 0
    files, more = dict[str, str](), dict[str, Any]()
    if plugged_in:
        files[deepspeed.FILE] = deepspeed.of_trainer(run)
        more["deepspeed"] = deepspeed.FILE
    elif sharded:
        files[accelerate.FILE] = accelerate.configuration(run, place)
    document = {**_document(run, model, checkpoints=not sharded), **more, "output_dir": "output"}
    text = f"{_HEAD}{needed(run)}\n{dump_yaml(document)}"
    # LLaMA-Factory starts the ranks of other runs itself.
    started = [*rank_variables(place), "FORCE_TORCHRUN=1 llamafactory-cli train"]
    if sharded:
        started = [*accelerate.launch_words(place), "-m llamafactory.launcher"]
    return Draft(
        version=VERSION,
        files={**files, FILE: text, **model.files},
        launch=shell_lines([*started, *_words(run, model)]),
        notes=tuple(_notes(run, model)),
    )


def _document(run: Run, model: NamedModel, *, checkpoints: bool) -> dict[str, Any]:
    """Return the arguments of a run; checkpoints : False if FSDP recomputes the layers."""
    adapters, kind = run.runtime.adapters, run.runtime.precision.kind
    settings, pure = trainer_settings(run, model), trains_narrow_weights(run)
    kept = ("per_device_train_batch_size", "gradient_accumulation_steps", "torch_compile", "optim",
            *SYNCED)  # fmt: skip
    flash = "sdpa" if run.kernels.repeated_heads else "fa3" if model.sinks else "fa2"
    found: dict[str, Any] = {} if model.files else {"model_name_or_path": model.name}
    found |= {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full" if adapters is None else "lora",
        # `dataset` is a name on the Hugging Face hub, or a folder.
        "dataset_dir": "ONLINE",
        "cutoff_len": run.seq_length,
        "packing": True,
        # Packed sequences are separate only with flash attention.
        "neat_packing": flash != "sdpa",
        "flash_attn": flash,
        **{key: value for key, value in settings.items() if key in kept},
        "disable_gradient_checkpointing": not (
            checkpoints and run.strategy.recomputed.kind != "none"
        ),
        "bf16": kind == "bf16" and not pure,
        "fp16": kind == "fp16",
        "learning_rate": _RATES[adapters is not None],
    }
    if pure:
        found["pure_bf16"] = True
    if adapters is not None:
        found |= {
            "lora_rank": adapters.rank,
            "lora_alpha": 2 * adapters.rank,
            "lora_dropout": adapters.dropout,
            "lora_target": ",".join(adapted_modules(run)),
        }
        if adapters.base != "16 bits":
            found["quantization_bit"] = 4 if adapters.base == "nf4" else 8
        if adapters.base == "nf4":
            found["double_quantization"] = adapters.nested
    if run.steps is not None:
        found["max_steps"] = run.steps
    return found


def _words(run: Run, model: NamedModel) -> Iterator[str]:
    yield FILE
    yield f'dataset="{DATA}"'
    if model.files:
        yield f'model_name_or_path="${{LOAD:-{model.name}}}"'
    else:
        yield '${LOAD:+model_name_or_path="$LOAD"}'
    if run.steps is None:
        yield '${TRAIN_ITERS:+max_steps="$TRAIN_ITERS"}'
    yield '${SAVE:+output_dir="$SAVE"}'


def _notes(run: Run, model: NamedModel) -> Iterator[str]:
    yield (
        "DATA_PATH is a dataset of the Hugging Face hub or a folder of .jsonl files, with the "
        "columns instruction, input and output; for others, set dataset_dir to the folder of a "
        "dataset_info.json"
    )
    yield "template is that of the tokenizer; set it for another one"
    where = "" if model.files else f"LOAD, a folder with the weights of {model.name}; "
    steps = "" if run.steps is not None else "; TRAIN_ITERS, steps"
    yield f"optional: {where}SAVE, folder of the output{steps}"
