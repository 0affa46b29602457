"""Writer of `swift.yaml` for ms-swift 4.6, with the file of DeepSpeed or of FSDP.

The words are those of `swift/arguments` in the wheel of 4.6.0; `swift sft` starts the ranks itself.
`search.engines.tuners.swift_arguments` reads them back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autopar.run.run import Run
from search.engines.deepspeed import write as deepspeed
from search.engines.exporter_types import Draft, ExportTarget
from search.engines.huggingface.transformers import (
    SYNCED,
    NamedModel,
    adapted_modules,
    trainer_settings,
    trains_narrow_weights,
)
from search.engines.text import dump_yaml
from search.engines.tuners.check import named_model, needed, rank_variables, refuse_replicas
from search.engines.words import required, shell_lines

VERSION = "4.6.0"
FILE = "swift.yaml"
_FSDP = "autopar_fsdp.json"
_TITLE = "ms-swift"
_DATA = required(
    "DATA_PATH", "set DATA_PATH to a .jsonl file with the column messages, or a dataset of the hub"
)


def write(run: Run, place: ExportTarget) -> Draft:
    """Return the files of a run and its launch command.

    Raises InputError for a run of another engine, and UnsupportedError for a run with stages, or
    with tensor, context or expert ranks.
    """
    model = named_model(run, place, _TITLE)
    refuse_replicas(run, _TITLE)
    files, more = dict[str, str](), dict[str, Any]()
    plugged_in = run.runtime.states.keeper == "deepspeed"
    sharded = not plugged_in and run.split.zero > 0
    if plugged_in:
        files[deepspeed.FILE] = deepspeed.of_trainer(run)
        more["deepspeed"] = deepspeed.FILE
    elif sharded:
        files[_FSDP] = json.dumps(_fsdp(run), indent=4) + "\n"
        more["fsdp"] = _FSDP
    document = {**_document(run, model, checkpoints=not sharded), **more, "output_dir": "output"}
    head = f"# For ms-swift {VERSION}, written by autopar-export: pip install ms-swift=={VERSION}"
    command = [*rank_variables(place), f"swift sft {FILE}", *_words(run, model)]
    return Draft(
        version=VERSION,
        files={**files, FILE: f"{head}{needed(run)}\n{dump_yaml(document)}", **model.files},
        launch=shell_lines(command),
        notes=tuple(_notes(run, model)),
    )


def _document(run: Run, model: NamedModel, *, checkpoints: bool) -> dict[str, Any]:
    """Return the arguments of a run; checkpoints : False if FSDP recomputes the layers."""
    adapters, kind = run.runtime.adapters, run.runtime.precision.kind
    settings, pure = trainer_settings(run, model), trains_narrow_weights(run)
    types = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    narrow = adapters is not None or pure or run.runtime.states.keeper == "deepspeed"
    kernel = settings["attn_implementation"]
    found: dict[str, Any] = {} if model.files else {"model": model.name, "use_hf": True}
    found |= {
        "tuner_type": "full" if adapters is None else "lora",
        "torch_dtype": types[kind] if narrow else "float32",
        "bf16": kind == "bf16" and not (pure and run.split.zero > 0),
        "fp16": kind == "fp16",
        "max_length": run.seq_length,
        # Packed sequences need flash attention.
        "packing": kernel != "sdpa",
        "per_device_train_batch_size": run.strategy.micro_batch,
        "gradient_accumulation_steps": run.strategy.micro_batches,
        "attn_impl": kernel,
        "gradient_checkpointing": checkpoints and run.strategy.recomputed.kind != "none",
        "torch_compile": run.kernels.compiled,
        "optim": settings["optim"],
        **(SYNCED if run.syncs_each_batch else {}),
    }
    if adapters is not None:
        found |= {
            "lora_rank": adapters.rank,
            "lora_alpha": 2 * adapters.rank,
            "lora_dropout": adapters.dropout,
            "target_modules": adapted_modules(run),
        }
        if adapters.base != "16 bits":
            found |= {"quant_method": "bnb", "quant_bits": 4 if adapters.base == "nf4" else 8}
        if adapters.base == "nf4":
            # FSDP and ZeRO-3 shard floating-point tensors alone.
            found["bnb_4bit_quant_storage"] = types[kind]
            found["bnb_4bit_use_double_quant"] = adapters.nested
    if run.steps is not None:
        found["max_steps"] = run.steps
    return found


def _fsdp(run: Run) -> dict[str, Any]:
    whole, host = run.split.zero == 3, run.runtime.optimizer.offload_weights
    words = ["full_shard" if whole else "shard_grad_op", "auto_wrap", *["offload"] * host]
    return {
        "fsdp": " ".join(words),
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": whole,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": run.strategy.recomputed.kind != "none",
        },
    }


def _words(run: Run, model: NamedModel) -> Iterator[str]:
    yield f'--dataset "{_DATA}"'
    if model.files:
        yield f'--model "${{LOAD:-{model.name}}}"'
    else:
        yield '${LOAD:+--model "$LOAD"}'
    if run.steps is None:
        yield '${TRAIN_ITERS:+--max_steps "$TRAIN_ITERS"}'
    yield '${SAVE:+--output_dir "$SAVE"}'


def _notes(run: Run, model: NamedModel) -> Iterator[str]:
    yield (
        "DATA_PATH is the absolute path of a .jsonl file with the column messages, or a dataset of "
        "the Hugging Face hub"
    )
    if model.files:
        yield "LOAD names the weights: only the sizes of the model are known"
    where = "" if model.files else f"LOAD, a folder with the weights of {model.name}; "
    steps = "" if run.steps is not None else "; TRAIN_ITERS, steps"
    yield f"optional: {where}SAVE, folder of the output{steps}"
