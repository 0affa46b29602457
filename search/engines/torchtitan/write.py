"""Writer of torchtitan recipes for release 0.3, or of job files (TOML) for 0.2.

A run is written for the newest release that can describe it: as a recipe in Python
(`search.engines.torchtitan.recipe`), else as a job file. The keys of job files come from
`torchtitan/config/job_config.py` of the wheel of 0.2.2. A job file selects a built-in model by
name and flavor. `search.engines.torchtitan.read` reads job files back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.errors import UnsupportedError
from autopar.pipeline.schedules import TORCH_NAMES
from autopar.run.run import Run
from autopar.run.runtime import Kernels
from autopar.run.strategy import Recomputed, Strategy
from search.engines.exporter_types import Draft, ExportTarget, refuse_others
from search.engines.megatron.stages import parts_in_order
from search.engines.torchtitan.flavours import (
    JOB_FILES,
    RECIPES,
    SPANS,
    flavour_of,
    needs_recipe,
)
from search.engines.torchtitan.recipe import beyond_recipes, recipe
from search.engines.words import one_line, required, shell_lines, torchrun

_TITLE = f"torchtitan {JOB_FILES}"
_FILE = "autopar_torchtitan.toml"
_Section = dict[str, Any]


def write(run: Run, place: ExportTarget) -> Draft:
    """Return the recipe or the job file of a run and the command that starts it.

    Raises InputError for a run of another engine. Raises UnsupportedError for a model that is no
    flavor of torchtitan, or that a recipe cannot build, and for a run that neither release can
    describe.
    """
    refuse_others(run, "torchtitan", ("torchtitan", "ddp"))
    adapters = run.runtime.adapters
    needed = needs_recipe(run.model, 0 if adapters is None else adapters.rank)
    needed = needed or place.recomputed is not None
    asked = None if place.release is None else place.release.name
    if asked is not None and SPANS[False].has(asked):
        if adapters is not None or place.recomputed is not None:
            raise UnsupportedError(
                f"job files of torchtitan {asked} have no adapters and no recomputation by layer",
                remedy=f"Use --release {RECIPES}",
            )
    elif asked is not None or needed or not beyond_recipes(run):
        return recipe(run, place)
    name, size = flavour_of(run.model, JOB_FILES)
    document = {
        "job": {"dump_folder": "outputs", "description": one_line(f"{name} {size}, autopar")},
        "model": _model(run, name, size),
        "optimizer": {"name": "AdamW", "lr": 3e-4},
        "training": _training(run),
        "parallelism": _parallelism(run),
        "activation_checkpoint": _checkpoint(run.strategy.recomputed),
        "compile": _compile(run.kernels),
        **_quantize(run),
    }
    return Draft(
        version=asked or JOB_FILES,
        files={_FILE: f"# For {_TITLE}; other releases have other keys.\n{_toml(document)}"},
        launch=_command(place),
        notes=tuple(_notes(run)),
        entry=_FILE,
    )


# --------------------------------------------------------------------------------------------------
# Sections.


def _model(run: Run, name: str, size: str) -> _Section:
    converters = [f"quantize.linear.{_kind(run)}"] if run.runtime.precision.fp8 else []
    found: _Section = {"name": name, "flavor": size}
    return {**found, "converters": converters} if converters else found


def _kind(run: Run) -> str:
    return "mx" if run.runtime.precision.fp8_recipe == "mxfp8" else "float8"


def _training(run: Run) -> _Section:
    strategy, split, optimizer = run.strategy, run.split, run.runtime.optimizer
    # A pipeline splits one local batch into micro-batches. Without a pipeline, torchtitan
    # accumulates gradients over local batches.
    parts = strategy.micro_batches if strategy.pp > 1 else 1
    found: _Section = {
        "dataset": "c4",
        "local_batch_size": strategy.micro_batch * parts,
        "global_batch_size": strategy.global_batch,
        "seq_len": run.seq_length,
    }
    # torchtitan uses autocast only for pure data parallelism, and the mixed precision of FSDP2
    # only where ranks shard. Otherwise it computes in fp32 and ignores the key.
    if split.zero or split.tp * strategy.pp == 1:
        wide = run.runtime.precision.kind == "fp32"
        found["mixed_precision_param"] = "float32" if wide else "bfloat16"
    if run.steps is not None:
        found["steps"] = run.steps
    if optimizer.master_bytes == 0:
        # Without fp32 master weights, weights and optimizer states are in bf16.
        found["dtype"] = "bfloat16"
    if optimizer.offload_weights:
        found["enable_cpu_offload"] = True
    return found


def _parallelism(run: Run) -> _Section:
    strategy, split = run.strategy, run.split
    copies = split.replicas if split.zero else strategy.dp
    found: _Section = {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": strategy.dp // copies,
        "tensor_parallel_degree": split.tp,
        "context_parallel_degree": split.cp,
        "pipeline_parallel_degree": strategy.pp,
    }
    if split.zero:
        # By default, micro-batches of a pipeline do not gather weights again (ZeRO-2).
        usual = 2 if strategy.pp > 1 else 3
        policy = "always" if split.zero == 3 else "never"
        found["fsdp_reshard_after_forward"] = "default" if split.zero == usual else policy
    if split.tp > 1 and not run.kernels.loss_parallel:
        found["disable_loss_parallel"] = True
    if run.runtime.overlap.tensor:
        found["enable_async_tensor_parallel"] = True
    if strategy.pp > 1:
        found |= _stages(run.strategy)
    if run.model.experts is not None and split.ep > 1:
        found |= _expert_ranks(run)
    return found


def _stages(strategy: Strategy) -> _Section:
    modules = [
        [
            *(("tok_embeddings",) if chunk.embeds else ()),
            *(f"layers.{layer}" for layer in chunk.layers),
            *(("norm", "output") if chunk.head else ()),
        ]
        for chunk in parts_in_order(strategy)
    ]
    return {
        "pipeline_parallel_schedule": TORCH_NAMES[strategy.schedule],
        "pipeline_parallel_microbatch_size": strategy.micro_batch,
        "module_fqns_per_model_part": modules,
    }


def _expert_ranks(run: Run) -> _Section:
    found: _Section = {
        "expert_parallel_degree": run.split.ep,
        "expert_tensor_parallel_degree": run.split.etp,
    }
    if run.runtime.experts.dispatcher == "flex":
        found["expert_parallel_comm_backend"] = "deepep"
    return found


def _checkpoint(recomputed: Recomputed) -> _Section:
    if recomputed.kind == "op":
        return {"mode": "selective", "selective_ac_option": "op"}
    if recomputed.kind == "every":
        return {"mode": "selective", "selective_ac_option": str(recomputed.number)}
    return {"mode": recomputed.kind}


def _compile(kernels: Kernels) -> _Section:
    parts = {"model": kernels.compiled, "loss": kernels.loss == "compiled"}
    on = [name for name, is_on in parts.items() if is_on]
    return {"enable": True, "components": on} if on else {"enable": False}


def _quantize(run: Run) -> dict[str, _Section]:
    if not run.runtime.precision.fp8:
        return {}
    kind = _kind(run)
    keys: _Section = {"filter_fqns": ["output"]}
    if kind == "float8" and run.runtime.states.gathered_fp8:
        keys |= {
            "enable_fsdp_float8_all_gather": True,
            "precompute_float8_dynamic_scale_for_fsdp": True,
        }
    return {f"quantize.linear.{kind}": keys}


# --------------------------------------------------------------------------------------------------
# The file, the command and the notes.


def _toml(document: Mapping[str, _Section]) -> str:
    """Return sections of scalars and lists as TOML text; JSON strings are valid TOML strings."""
    return "".join(
        f"\n[{section}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in keys.items())
        for section, keys in document.items()
    )


def _value(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        nested = any(isinstance(item, Sequence) and not isinstance(item, str) for item in value)
        # One stage per line.
        joint = ",\n    " if nested else ", "
        inner = joint.join(map(_value, value))
        return f"[\n    {inner},\n]" if nested else f"[{inner}]"
    return json.dumps(value)


def _command(place: ExportTarget) -> str:
    asked = required("HF_ASSETS_PATH", "set HF_ASSETS_PATH to the folder with the tokenizer")
    words = [
        f"-m torchtitan.train --job.config_file {_FILE}",
        f'--model.hf_assets_path "{asked}"',
        '${LOAD:+--checkpoint.initial_load_path "$LOAD" --checkpoint.initial_load_in_hf}',
        '${SAVE:+--checkpoint.folder "$SAVE"}',
    ]
    # Loading and saving both need checkpointing to be enabled.
    on = 'if [ -n "${LOAD:-}${SAVE:-}" ]; then CHECKPOINTS=--checkpoint.enable; fi\n'
    return on + torchrun(place, shell_lines([*words, "${CHECKPOINTS:-}"]).rstrip("\n"))


def _notes(run: Run) -> Iterator[str]:
    yield "set HF_ASSETS_PATH to the folder with the tokenizer of Hugging Face"
    yield (
        "LOAD is the absolute path of Hugging Face weights to begin with, SAVE that of checkpoints"
    )
    yield "dataset and learning rate are placeholders"
    if run.steps is None:
        yield "training.steps is the number of steps, 10000 unless it is given"
    if run.split.cp > 1:
        yield "its context parallelism gathers keys and values instead of a ring"
