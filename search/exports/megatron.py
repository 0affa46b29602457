"""Megatron-LM: a plan as arguments of pretrain_gpt.py, in a shell script and in YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from search.exports.common import one_line, required, torchrun
from search.exports.contract import Job, Lowered
from search.exports.megatron_layout import layout_string
from search.exports.megatron_model import Argument, model_arguments
from search.exports.megatron_nearest import Nearest, nearest
from search.exports.megatron_rules import violated_rules
from search.exports.running import different, search_options
from search.exports.yaml_text import dump_yaml

__all__ = ["ENGINE_VERSION", "lower"]

ENGINE_VERSION = "main of September 2026"
_SCRIPT = "megatron_args.sh"
_YAML = "megatron_args.yaml"
_Sections = Mapping[str, Sequence[Argument]]


def lower(job: Job) -> Lowered:
    """Return a plan as Megatron-LM takes it.

    Raises
    ------
    InputError : the model is none of pretrain_gpt.py's, or no near plan is legal.
    """
    model, notes = model_arguments(job.spec)
    priced = job
    if any(layer.num_experts for layer in job.spec.layers):
        job = replace(job, sequence_parallel=True)  # experts do not train without it
    near = nearest(job)
    parallel, environment, more = _parallel(job, near)
    fully_sharded = "use-megatron-fsdp" in dict(parallel)
    # Megatron-FSDP reduces in every micro-batch, its other gradient buffers once per step.
    runs = {"async_grad_reduce": not fully_sharded, "fp32_gradients": job.fp32_gradients}
    if near.degrees.tensor > 1:
        runs["sequence_parallel"] = job.sequence_parallel
    space = ["--no-fine-grained-mode", *(["--max-pp-deg 1"] if fully_sharded else [])]
    sections = {
        "MODEL": model,
        "PARALLEL": parallel,
        "BATCH": _batch(near),
        "PRECISION": _precision(job),
        "TRAINING": _TRAINING,
        "DATA": _DATA,
    }
    arguments = {flag: words for part in sections.values() for flag, words in part}
    broken = violated_rules(arguments, near.plan.world_size)
    assert not broken, broken
    return Lowered(
        engine="megatron",
        engine_version=ENGINE_VERSION,
        plan=near.plan,
        files={
            _SCRIPT: _script(job, sections, environment),
            _YAML: _yaml(sections, environment),
        },
        losses=near.losses,
        launch=_launch(job),
        notes=(*notes, *near.notes, *more, *_FILL_IN),
        as_run=different(priced, near.plan, runs),
        search=search_options(near.plan, runs, space),
    )


_FILL_IN = (
    "set MEGATRON_PATH, DATA_PATH (prefix written by tools/preprocess_data.py) and TOKENIZER_MODEL",
    "learning rate, its schedule and the number of steps in TRAINING_ARGS are placeholders",
)
_TRAINING: Sequence[Argument] = (
    ("train-iters", ("${TRAIN_ITERS:-500}",)),
    ("lr", ("3.0e-4",)),
    ("min-lr", ("3.0e-5",)),
    ("lr-decay-style", ("cosine",)),
    ("weight-decay", ("0.1",)),
    ("adam-beta1", ("0.9",)),
    ("adam-beta2", ("0.95",)),
    ("clip-grad", ("1.0",)),
    ("log-interval", ("1",)),
    ("log-throughput", ()),
)
_DATA: Sequence[Argument] = (
    ("data-path", (required("DATA_PATH", "set DATA_PATH to the prefix of the preprocessed data"),)),
    ("split", ("949,50,1",)),
    ("tokenizer-type", ("HuggingFaceTokenizer",)),
    (
        "tokenizer-model",
        (required("TOKENIZER_MODEL", "set TOKENIZER_MODEL to a name or folder of Hugging Face"),),
    ),
)


def _parallel(job: Job, near: Nearest) -> tuple[list[Argument], dict[str, str | None], list[str]]:
    """Return the arguments of parallelism, the environment they need (None: unset), and notes."""
    plan, degrees = near.plan, near.degrees
    arguments: list[Argument] = [
        ("tensor-model-parallel-size", (str(degrees.tensor),)),
        ("pipeline-model-parallel-size", (str(plan.num_stages),)),
        ("context-parallel-size", (str(degrees.context),)),
    ]
    if degrees.tensor > 1 and job.sequence_parallel:
        arguments.append(("sequence-parallel", ()))
    if degrees.context > 1:
        kinds = dict.fromkeys(near.communication)
        words = tuple(kinds) if len(kinds) == 1 else near.communication
        arguments.append(("cp-comm-type", words))
        if degrees.exchange > 1:
            inner, outer = degrees.exchange, degrees.context // degrees.exchange
            sizes = (str(inner), str(outer))
            arguments.append(("hierarchical-context-parallel-sizes", sizes))
    if len(set(plan.stage_sizes)) > 1:
        layout = layout_string(plan.stage_sizes)
        arguments.append(("pipeline-model-parallel-layout", (layout,)))
    if near.recomputed:
        arguments += [
            ("recompute-granularity", ("full",)),
            ("recompute-method", ("block",)),
            ("recompute-num-layers", (str(near.recomputed),)),
        ]
    data, fully_sharded, notes = _data_parallel(job, near)
    connections = None if fully_sharded else "1" if degrees.tensor * degrees.context > 1 else ""
    environment = {} if connections == "" else {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    return arguments + data, environment, notes


def _data_parallel(job: Job, near: Nearest) -> tuple[list[Argument], bool, list[str]]:
    """Return the arguments of data parallelism, whether they are Megatron-FSDP's, and notes.

    ZeRO-2 with one reduction per step keeps whole gradients until then and shards the optimizer,
    which is Megatron-LM's distributed optimizer; one with a reduction in every micro-batch shards
    gradients at once, which is Megatron-FSDP's `optim_grads`.
    """
    plan, notes = near.plan, list[str]()
    overlap: list[Argument] = [("overlap-grad-reduce", ())] if job.async_grad_reduce else []
    zero3 = plan.layers[0].zero3
    if not zero3 and plan.default_dp_type == "ddp":
        if not job.async_grad_reduce:
            notes.append("gradients are reduced once per step, not in every micro-batch")
        return overlap, False, notes
    at_once = plan.num_microbatches == 1 or not job.async_grad_reduce
    if zero3 or (at_once and plan.num_stages == 1):
        if job.async_grad_reduce and plan.num_microbatches > 1:
            notes.append(
                "Megatron-FSDP reduces gradients in every micro-batch, not once per step; "
                "--no-async-grad-reduce prices that"
            )
        arguments: list[Argument] = [
            ("use-megatron-fsdp", ()),
            ("data-parallel-sharding-strategy", ("optim_grads" + "_params" * zero3,)),
            ("use-distributed-optimizer", ()),
            ("no-gradient-accumulation-fusion", ()),
            ("ckpt-format", ("fsdp_dtensor",)),
        ]
    else:
        arguments = [("use-distributed-optimizer", ())]
        if at_once:
            notes.append(
                "the distributed optimizer keeps whole gradients until the end of the step: "
                "more memory than predicted"
            )
    if overlap:
        overlap.append(("overlap-param-gather", ()))
    return arguments + overlap, "use-megatron-fsdp" in dict(arguments), notes


def _batch(near: Nearest) -> list[Argument]:
    plan = near.plan
    data = plan.world_size // (plan.num_stages * near.degrees.tensor * near.degrees.context)
    micro = plan.global_batch // (plan.num_microbatches * data)
    return [
        ("micro-batch-size", (str(micro),)),
        ("global-batch-size", (str(plan.global_batch),)),
    ]


def _precision(job: Job) -> list[Argument]:
    if job.precision == "fp32":
        return []
    arguments: list[Argument] = [(job.precision, ())]
    if job.precision == "bf16" and not job.fp32_gradients:
        arguments.append(("grad-reduce-in-bf16", ()))  # it would accumulate and reduce in fp32
    if job.precision == "fp16" and job.fp32_gradients:
        arguments.append(("accumulate-allreduce-grads-in-fp32", ()))
    return arguments


# --- files ------------------------------------------------------------------------------------


def _script(job: Job, sections: _Sections, environment: Mapping[str, str | None]) -> str:
    where = f"{job.num_nodes} x {job.gpus_per_node} GPUs"
    lines = [
        f"# Arguments of Megatron-LM's pretrain_gpt.py ({ENGINE_VERSION})",
        f"# for {one_line(job.spec.name)} on {where}; to be sourced by bash.",
        *_exports(environment),
        "",
    ]
    for name, arguments in sections.items():
        lines.append(f"{name}_ARGS=(")
        lines += ["    " + " ".join([f"--{flag}", *map(_quoted, w)]) for flag, w in arguments]
        lines += [")", ""]
    lines.append("MEGATRON_ARGS=(")
    lines += [f'    "${{{name}_ARGS[@]}}"' for name in sections]
    lines.append(")")
    return "\n".join(lines) + "\n"


def _exports(environment: Mapping[str, str | None]) -> list[str]:
    return [
        f"unset {name}" if value is None else f"export {name}={value}"
        for name, value in environment.items()
    ]


def _quoted(word: str) -> str:
    """Return a word for bash; variables stay variables."""
    return word if re.fullmatch(r"[A-Za-z0-9_.,:/+-]+", word) else f'"{word}"'


def _yaml(sections: _Sections, environment: Mapping[str, str | None]) -> str:
    """Return the arguments as Megatron-LM's functional tests spell them (model_config.yaml)."""
    document: dict[str, object] = {}
    kept = {name: value for name, value in environment.items() if value is not None}
    if kept:
        document["ENV_VARS"] = {name: int(value) for name, value in kept.items()}
    document["MODEL_ARGS"] = {
        f"--{flag}": _yaml_value(words) for part in sections.values() for flag, words in part
    }
    return f"# Megatron-LM, {ENGINE_VERSION}\n" + dump_yaml(document)


def _yaml_value(words: tuple[str, ...]) -> object:
    if not words:
        return True
    if len(words) > 1:
        return list(words)
    word = re.sub(r":\?[^}]*\}", "}", words[0])  # whoever reads YAML puts variables in alone
    try:
        return int(word) if word.isdigit() else float(word)
    except ValueError:
        return word


def _launch(job: Job) -> str:
    """Return the command; the script that it reads sets the environment."""
    path = required("MEGATRON_PATH", "set MEGATRON_PATH to a checkout of Megatron-LM")
    program = f'"{path}/pretrain_gpt.py" "${{MEGATRON_ARGS[@]}}"'
    return f"source {_SCRIPT}\n" + torchrun(job, program)
