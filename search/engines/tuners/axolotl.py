"""Writer of `axolotl.yaml` for axolotl 0.19, with the file of DeepSpeed.

The words are those of `axolotl/utils/schemas` in the wheel of 0.19.0.
`search.engines.huggingface.script` reads them back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autopar.errors import UnsupportedError
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
from search.engines.tuners.check import named_model, needed, refuse_replicas
from search.engines.words import required, shell_lines, torchrun

VERSION = "0.19.0"
FILE = "axolotl.yaml"
_TITLE = "axolotl"
_DATA = required("DATA_PATH", "set DATA_PATH to a .jsonl file with the column messages")
_DATASETS = [{"path": "data.jsonl", "ds_type": "json", "type": "chat_template"}]
_NESTED = "bnb_4bit_use_double_quant"
_LEARNING_RATES = {True: 2.0e-4, False: 1.0e-5}
"""Learning rates with adapters, as in axolotl's examples, and without."""


def write(run: Run, place: ExportTarget) -> Draft:
    """Return the files of a run and its launch command.

    Raises InputError for a run of another engine, and UnsupportedError for a run with stages, or
    with tensor, context or expert ranks.
    """
    model = named_model(run, place, _TITLE)
    files, plugged_in = dict[str, str](), run.runtime.states.keeper == "deepspeed"
    replicas = not plugged_in and run.split.zero == 0
    if run.runtime.adapters is None and trains_narrow_weights(run) != replicas:
        # `torch_dtype` is that of the computation (`loaders/model.py`), and FSDP casts it to fp32
        # with the mixed precision that axolotl always sets (`core/builders/base.py`).
        raise UnsupportedError(
            "axolotl trains replicas, and no shards, with states in 16 bits",
            remedy="Search with --zero 2, or with --pure-bf16 --zero 0",
        )
    refuse_replicas(run, _TITLE)
    if plugged_in:
        files[deepspeed.FILE] = deepspeed.of_trainer(run)
    head = f"# For axolotl {VERSION}, written by autopar-export: pip install axolotl=={VERSION}"
    text = f"{head}{needed(run)}\n{dump_yaml(_document(run, model))}"
    # A list of sections, in the syntax of JSON, which is YAML.
    text += f"datasets: {json.dumps(_DATASETS)}\n"
    # `datasets` has no argument on the command line.
    link = f'ln -sfn "{_DATA}" data.jsonl\n'
    words = shell_lines([*_words(run, model)]).rstrip("\n")
    return Draft(
        version=VERSION,
        files={**files, FILE: text, **model.files},
        launch=link + torchrun(place, words),
        notes=tuple(_notes(run, model)),
    )


def _document(run: Run, model: NamedModel) -> dict[str, Any]:
    adapters, kind = run.runtime.adapters, run.runtime.precision.kind
    settings = trainer_settings(run, model)
    recomputes = run.strategy.recomputed.kind != "none"
    plugged_in = run.runtime.states.keeper == "deepspeed"
    sharded = not plugged_in and run.split.zero > 0
    found: dict[str, Any] = {"base_model": model.name}
    if adapters is not None:
        found |= {
            "adapter": "qlora" if adapters.base == "nf4" else "lora",
            "load_in_4bit": adapters.base == "nf4",
            "load_in_8bit": adapters.base == "int8",
            **({} if adapters.nested else {"bnb_config_kwargs": {_NESTED: False}}),
            "lora_r": adapters.rank,
            "lora_alpha": 2 * adapters.rank,
            "lora_dropout": adapters.dropout,
            "lora_target_modules": adapted_modules(run),
            # Kernels of axolotl that are on by default, and not priced.
            "lora_mlp_kernel": False,
            "lora_qkv_kernel": False,
            "lora_o_kernel": False,
            "lora_embedding_kernel": False,
        }
    found |= {
        "sequence_len": run.seq_length,
        "sample_packing": True,
        "pad_to_sequence_len": True,
        "micro_batch_size": run.strategy.micro_batch,
        "gradient_accumulation_steps": run.strategy.micro_batches,
        "attn_implementation": settings["attn_implementation"],
        "optimizer": settings["optim"],
        "learning_rate": _LEARNING_RATES[adapters is not None],
        "gradient_checkpointing": recomputes and not sharded,
        "torch_compile": run.kernels.compiled,
        "bf16": kind == "bf16",
        "fp16": kind == "fp16",
        **(SYNCED if run.syncs_each_batch else {}),
    }
    if plugged_in:
        found["deepspeed"] = deepspeed.FILE
    if sharded:
        found["fsdp_version"] = 2
        found["fsdp_config"] = {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": run.split.zero == 3,
            "activation_checkpointing": recomputes,
            "offload_params": run.runtime.optimizer.offload_weights,
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
        }
    if run.steps is not None:
        found["max_steps"] = run.steps
    return {**found, "num_epochs": 1, "output_dir": "output"}


def _words(run: Run, model: NamedModel) -> Iterator[str]:
    yield f"-m axolotl.cli.train {FILE}"
    yield '${LOAD:+--base_model "$LOAD"}'
    if run.steps is None:
        yield '${TRAIN_ITERS:+--max_steps "$TRAIN_ITERS"}'
    yield '${SAVE:+--output_dir "$SAVE"}'


def _notes(run: Run, model: NamedModel) -> Iterator[str]:
    yield "DATA_PATH is the absolute path of a .jsonl file with the column messages"
    steps = "" if run.steps is not None else "; TRAIN_ITERS, steps"
    where = f"LOAD, a folder with the weights of {model.name}; "
    yield f"optional: {where}SAVE, folder of the output{steps}"
