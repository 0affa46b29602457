"""Megatron-LM: a plan as arguments of pretrain_gpt.py, in a shell script and in YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.documents.spec import head_dim
from autopar.errors import InputError
from autopar.model import ModelSpec
from search.engines.configuration import dump_yaml
from search.engines.job import (
    ONE_STAGE,
    ROTARY_BASE,
    UNIFORM,
    Job,
    Lowered,
    different,
    one_line,
    required,
    search_fields,
    torchrun,
)
from search.engines.megatron_nearest import Nearest, nearest

__all__ = [
    "ENGINE_VERSION",
    "Argument",
    "Arguments",
    "LayoutError",
    "layout_string",
    "lower",
    "model_arguments",
    "number",
    "parse_layout",
    "stage_sizes",
    "violated_rules",
]


# --------------------------------------------------------------------------------------------------
# A model as arguments of Megatron-LM's pretrain_gpt.py.


Argument = tuple[str, tuple[str, ...]]
"""A flag without its hyphens in front, and its words."""
_LAYER_NORM = 4
"""Norm parameters per hidden unit of two LayerNorms; two RMSNorms have half of them."""


def model_arguments(spec: ModelSpec) -> tuple[list[Argument], list[str]]:
    """Return the arguments that describe an architecture, and what the user has to add.

    Raises
    ------
    InputError : the model is none that pretrain_gpt.py builds, or its description has gaps.
    """
    # one kind of layers is left by the check, so that any of them speaks for all
    layer = spec.layers[-1]
    _check(spec)
    assert layer.num_heads is not None
    arguments: list[Argument] = [
        ("num-layers", (str(spec.num_layers),)),
        ("hidden-size", (str(layer.hidden_size),)),
        ("ffn-hidden-size", (str(layer.ffn_hidden_size),)),
        ("num-attention-heads", (str(layer.num_heads),)),
        # its default, hidden size over heads, is wrong for models with wider heads
        ("kv-channels", (str(head_dim(layer)),)),
    ]
    if layer.num_kv_heads not in (None, layer.num_heads):
        arguments += [
            ("group-query-attention", ()),
            ("num-query-groups", (str(layer.num_kv_heads),)),
        ]
    notes: list[str] = []
    # it refuses a length above max-position-embeddings
    positions = max(spec.learned_positions, layer.seq_length)
    arguments += [
        ("seq-length", (str(layer.seq_length),)),
        ("max-position-embeddings", (str(positions),)),
    ]
    if spec.learned_positions:
        arguments.append(("position-embedding-type", ("learned_absolute",)))
    else:
        arguments += [("position-embedding-type", ("rope",)), *_rotary(spec, notes)]
    norm = "LayerNorm" if layer.norm_parameters_per_hidden == _LAYER_NORM else "RMSNorm"
    arguments.append(("normalization", (norm,)))
    if layer.gated_mlp:
        arguments.append(("swiglu", ()))
    if not layer.biases:
        arguments.append(("disable-bias-linear", ()))
        if layer.qkv_biases:
            arguments.append(("add-qkv-bias", ()))
    if not spec.tied_embeddings:
        arguments.append(("untie-embeddings-and-output-weights", ()))
    if layer.num_experts is not None:
        arguments += [
            ("num-experts", (str(layer.num_experts),)),
            ("moe-router-topk", (str(layer.experts_per_token or 1),)),
            # plans have no expert parallelism
            ("expert-model-parallel-size", ("1",)),
        ]
    arguments += [
        ("vocab-size", (str(spec.vocab_size),)),
        ("make-vocab-size-divisible-by", (str(spec.make_vocab_size_divisible_by),)),
        # its default is 0.1, and nothing is counted or measured with dropout
        ("attention-dropout", ("0.0",)),
        ("hidden-dropout", ("0.0",)),
    ]
    return arguments, notes


def _check(spec: ModelSpec) -> None:
    shapes = {(x.hidden_size, x.num_heads, x.seq_length, x.ffn_hidden_size) for x in spec.layers}
    if len(shapes) > 1 or any(layer.cross_attention for layer in spec.layers):
        raise InputError(
            f"{spec.name} has layers of several kinds, and Megatron-LM's pretrain_gpt.py builds "
            "models of one kind of decoder layers; export to galvatron instead"
        )
    layer = spec.layers[0]
    extra = spec.extra_embedding_parameters or spec.extra_head_parameters
    if not layer.causal or extra:
        raise InputError(
            f"{spec.name} is no decoder-only model, the kind that Megatron-LM's pretrain_gpt.py "
            "builds; export to galvatron instead"
        )
    for what, value in (
        ("num_heads", layer.num_heads),
        ("ffn_hidden_size", layer.ffn_hidden_size),
        ("vocab_size", spec.vocab_size),
    ):
        if value is None:
            raise InputError(
                f"the description of {spec.name} does not hold {what}, which Megatron-LM needs; "
                "give --model NAME, a config.json or a model.json"
            )


def _rotary(spec: ModelSpec, notes: list[str]) -> list[Argument]:
    """Return base and scaling of rotary positions; the launch asks for a base that is unknown.

    Flags: `_add_network_size_args` in `megatron/training/arguments.py`; its scaling has the other
    three numbers of Llama 3.1 fixed.
    """
    base = spec.rotary_base
    if base is None:
        notes.append(
            "the model description does not hold the base of rotary positions: the launch asks for "
            "ROTARY_BASE"
        )
        return [("rotary-base", (required("ROTARY_BASE", ROTARY_BASE),))]
    # `--rotary-base` is an int of argparse, which refuses the text of any other number
    if not base.is_integer():
        raise InputError(
            f"{spec.name} has rotary positions of base {base}, and Megatron-LM's --rotary-base "
            "takes whole numbers only; export to torchtitan, deepspeed or accelerate instead"
        )
    arguments: list[Argument] = [("rotary-base", (str(int(base)),))]
    if spec.rotary_scaling_factor is not None:
        factor = str(spec.rotary_scaling_factor)
        arguments += [("use-rope-scaling", ()), ("rope-scaling-factor", (factor,))]
    return arguments


# --------------------------------------------------------------------------------------------------
# The layout string of Megatron-LM: which layers stand on which pipeline stage.
#
# `--pipeline-model-parallel-layout` spells the stages one after the other, `|` between them: `E` is
# the embedding, `t` a transformer layer, `m` a multi-token-prediction layer, `L` the loss; `x*3` is
# `xxx`, `(tt|)*3` is `tt|tt|tt|`, commas mean nothing. The grammar and the rules are those of
# `megatron/core/transformer/pipeline_parallel_layer_layout.py` (NVIDIA/Megatron-LM, main).


_KINDS = frozenset("EtmL|")
_MOST = 1 << 16
"""Characters of a layout at most, written out; far above any model."""


class LayoutError(ValueError):
    """A string that is no layout, or one of another model; the text says why, without a subject."""


def layout_string(sizes: Sequence[int]) -> str:
    """Return the layout of stages with so many layers each: `Et*7|t*9|t*9|t*7L`."""
    stages = ["t" if size == 1 else f"t*{size}" for size in sizes]
    return "E" + "|".join(stages) + "L"


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the stages of a layout written out, such as `("Ett", "ttL")`.

    Raises
    ------
    LayoutError : a character is unknown, a bracket or a repetition is incomplete.
    """
    written, at = "", 0
    source = text.replace(",", "")
    while at < len(source):
        if source[at] == "(":
            end = source.find(")", at)
            if end < 0:
                raise LayoutError("a bracket is not closed")
            piece = _unrolled(source[at + 1 : end])
            count, next_at = _count(source, end + 1)
            if count is None:
                raise LayoutError("a bracket needs a repetition such as (tt|)*3")
        else:
            piece = _unit(source[at])
            count, next_at = _count(source, at + 1)
        written += _repeated(piece, 1 if count is None else count, len(written))
        at = next_at
    return tuple(written.split("|"))


def stage_sizes(text: str, *, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the transformer layers of every stage.

    Raises
    ------
    LayoutError : it is no layout, or none of this model, or one that no plan has: several parts
        per stage, multi-token prediction, a stage without a layer.
    """
    stages = parse_layout(text)
    if len(stages) % num_stages:
        raise LayoutError(f"has {len(stages)} parts, no multiple of the {num_stages} stages")
    flat = "".join(stages)
    if flat[:1] != "E" or flat.count("E") != 1:
        raise LayoutError("needs one E, as its first character")
    if flat[-1:] != "L" or flat.count("L") != 1:
        raise LayoutError("needs one L, as its last character")
    if flat.count("t") != num_layers:
        raise LayoutError(f"has {flat.count('t')} layers where the model has {num_layers}")
    if "m" in flat:
        raise LayoutError("has multi-token-prediction layers (m), which no plan has")
    if len(stages) != num_stages:
        raise LayoutError(
            f"has {len(stages) // num_stages} parts per stage, and no plan is interleaved"
        )
    sizes = tuple(stage.count("t") for stage in stages)
    if not all(sizes):
        raise LayoutError(f"leaves stage {sizes.index(0)} without a layer, which no plan does")
    return sizes


def _unit(character: str) -> str:
    if character not in _KINDS:
        raise LayoutError(f"holds the unknown character {character!r}")
    return character


def _unrolled(text: str) -> str:
    """Return what stands in a bracket, which holds no other bracket."""
    if not text:
        raise LayoutError("a bracket is empty")
    written, at = "", 0
    while at < len(text):
        count, next_at = _count(text, at + 1)
        written += _repeated(_unit(text[at]), 1 if count is None else count, len(written))
        at = next_at
    return written


def _count(text: str, at: int) -> tuple[int | None, int]:
    """Return the number of a repetition that begins at `at`, and where what follows begins."""
    if text[at : at + 1] != "*":
        return None, at
    end = at + 1
    while end < len(text) and text[end].isascii() and text[end].isdigit():
        end += 1
    if end == at + 1:
        raise LayoutError("a * is followed by no number")
    # before int(): a number of thousands of digits is not even read
    if end - at > 7:
        raise LayoutError(f"repeats something more than {_MOST} times")
    return int(text[at + 1 : end]), end


def _repeated(piece: str, count: int, before: int) -> str:
    # before it is written out: `t*9999999` would fill the memory
    if before + len(piece) * count > _MOST:
        raise LayoutError(f"describes more than {_MOST} layers and stages")
    return piece * count


# --------------------------------------------------------------------------------------------------
# Megatron-LM's own rules for its arguments, so that a launch is not refused on the cluster.
#
# Taken from `validate_args` in `megatron/training/arguments.py` and from the Megatron-FSDP guide
# (NVIDIA/Megatron-LM, main of 2026), from `TransformerConfig` of megatron-core 0.16.1, and, that
# Megatron-FSDP and pipeline stages exclude each other, from NVIDIA/Megatron-LM pull request 6081.
# That experts beside tensor parallelism need sequence parallelism: `MoELayer.forward` of
# `megatron/core/transformer/moe/moe_layer.py`, which ends the first step otherwise.


Arguments = Mapping[str, tuple[str, ...]]
"""Flag without its hyphens in front -> its words; none for a flag that is only there."""


def number(arguments: Arguments, flag: str, default: int) -> int:
    """Return the whole number of a flag, the default where it is absent; ValueError otherwise."""
    return int(arguments[flag][0]) if arguments.get(flag) else default


def violated_rules(arguments: Arguments, world_size: int) -> tuple[str, ...]:
    """Return one sentence per rule that arguments of so many GPUs break."""
    return (
        tuple(_degrees(arguments, world_size)) + tuple(_layers(arguments)) + tuple(_data(arguments))
    )


def _degrees(arguments: Arguments, world: int) -> Iterator[str]:
    tp = number(arguments, "tensor-model-parallel-size", 1)
    pp = number(arguments, "pipeline-model-parallel-size", 1)
    cp = number(arguments, "context-parallel-size", 1)
    if world % (tp * pp * cp):
        yield f"world size({world}) % (tp({tp}) * pp({pp}) * cp({cp})) != 0"
        # every further rule needs a whole data degree
        return
    dp = world // (tp * pp * cp)
    micro = number(arguments, "micro-batch-size", 1)
    batch = number(arguments, "global-batch-size", micro * dp)
    if batch % (micro * dp):
        yield f"global batch({batch}) % (micro batch({micro}) * dp({dp})) = {batch % (micro * dp)}"
    heads = number(arguments, "num-attention-heads", 0)
    groups = number(arguments, "num-query-groups", heads)
    for what, count in (
        ("attention heads", heads),
        ("ffn-hidden-size", number(arguments, "ffn-hidden-size", 0)),
    ):
        if count % tp:
            yield f"{what}({count}) % tp({tp}) = {count % tp} != 0"
    if groups and groups % tp and tp % groups:
        yield f"query groups({groups}) is neither a multiple nor a divisor of tp({tp})"
    shift = _all_to_all(arguments, cp)
    for what, count in (("attention heads", heads), ("query groups", groups)):
        # an all-to-all splits the heads that tensor parallelism has left on a rank
        if shift > 1 and count % (tp * shift):
            yield f"{what}({count}) % (tp({tp}) * a2a({shift})) = {count % (tp * shift)} != 0"
    length = number(arguments, "seq-length", 0)
    # zigzag: every rank of the ring holds an early and a late piece
    if cp > 1 and length % (2 * cp):
        yield f"seq-length({length}) % (2 * cp({cp})) = {length % (2 * cp)} != 0"
    if "sequence-parallel" in arguments:
        if tp == 1:
            yield "--sequence-parallel needs --tensor-model-parallel-size above 1"
        elif length % (tp * cp):
            yield f"seq-length({length}) % (tp({tp}) * cp({cp})) = {length % (tp * cp)} != 0"
    if "num-experts" in arguments and tp > 1 and "sequence-parallel" not in arguments:
        yield f"experts with tp({tp}) need --sequence-parallel"
    if number(arguments, "max-position-embeddings", length) < length:
        yield f"max-position-embeddings is below seq-length({length})"


def _all_to_all(arguments: Arguments, cp: int) -> int:
    """Return over how many ranks heads are exchanged."""
    kinds = arguments.get("cp-comm-type", ())
    if "a2a" in kinds:
        return cp
    sizes = arguments.get("hierarchical-context-parallel-sizes", ())
    return int(sizes[0]) if "a2a+p2p" in kinds and sizes else 1


def _layers(arguments: Arguments) -> Iterator[str]:
    pp = number(arguments, "pipeline-model-parallel-size", 1)
    cp = number(arguments, "context-parallel-size", 1)
    layers = number(arguments, "num-layers", 0)
    layout = arguments.get("pipeline-model-parallel-layout")
    if layout:
        try:
            stage_sizes(layout[0], num_layers=layers, num_stages=pp)
        except LayoutError as error:
            yield f"--pipeline-model-parallel-layout {error}"
    # without a layout all stages have the same number of layers
    elif layers % pp:
        yield f"layers({layers}) % pp({pp}) = {layers % pp} != 0 without a layout"
    kinds = arguments.get("cp-comm-type", ())
    if len(kinds) not in (0, 1, layers):
        yield f"--cp-comm-type has {len(kinds)} entries for {layers} layers"
    sizes = arguments.get("hierarchical-context-parallel-sizes", ())
    product = 1
    for size in sizes:
        product *= int(size)
    if sizes and product != cp:
        yield f"hierarchical sizes multiply to {product} where cp is {cp}"
    if "a2a+p2p" in kinds and not sizes:
        yield "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes"
    if arguments.get("recompute-granularity") == ("full",):
        for flag in ("recompute-method", "recompute-num-layers"):
            if flag not in arguments:
                yield f"--recompute-granularity full needs --{flag}"


def _data(arguments: Arguments) -> Iterator[str]:
    sharded = "use-megatron-fsdp" in arguments
    if "overlap-param-gather" in arguments:
        if not (sharded or "use-distributed-optimizer" in arguments):
            yield "--overlap-param-gather needs a distributed optimizer or Megatron-FSDP"
        if "overlap-grad-reduce" not in arguments:
            yield "--overlap-param-gather needs --overlap-grad-reduce"
    if sharded:
        if arguments.get("ckpt-format") != ("fsdp_dtensor",):
            yield "--use-megatron-fsdp needs --ckpt-format fsdp_dtensor"
        if "gradient-accumulation-fusion" not in arguments and (
            "no-gradient-accumulation-fusion" not in arguments
        ):
            yield "--use-megatron-fsdp needs --no-gradient-accumulation-fusion"
        if number(arguments, "pipeline-model-parallel-size", 1) > 1:
            yield "--use-megatron-fsdp is not combined with pipeline stages"


# --------------------------------------------------------------------------------------------------
# Export: arguments in a script and in YAML.


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
    # what differs from the priced plan is said at the end, this switch included
    priced = job
    if any(layer.num_experts for layer in job.spec.layers):
        job = replace(job, sequence_parallel=True)  # experts do not train without it
    near = nearest(job)
    parallel, environment, more = _parallel(job, near)
    fully_sharded = "use-megatron-fsdp" in dict(parallel)
    # Megatron-FSDP reduces in every micro-batch, its other gradient buffers once per step.
    runs = {"async_grad_reduce": not fully_sharded, "fp32_gradients": job.fp32_gradients}
    # with one tensor rank it changes nothing, and is not written
    if near.degrees.tensor > 1:
        runs["sequence_parallel"] = job.sequence_parallel
    space = (*UNIFORM, *(ONE_STAGE if fully_sharded else ()))
    sections = {
        "MODEL": model,
        "PARALLEL": parallel,
        "BATCH": _batch(near),
        "PRECISION": _precision(job),
        "TRAINING": _TRAINING,
        "DATA": _DATA,
    }
    arguments = {flag: words for part in sections.values() for flag, words in part}
    # refused on the cluster otherwise; the nearest plan keeps to all rules, so this is our mistake
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
        search=search_fields(near.plan, runs, space),
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
        # one word stands for all layers, otherwise every layer has its own
        words = tuple(kinds) if len(kinds) == 1 else near.communication
        arguments.append(("cp-comm-type", words))
        if degrees.exchange > 1:
            inner, outer = degrees.exchange, degrees.context // degrees.exchange
            sizes = (str(inner), str(outer))
            arguments.append(("hierarchical-context-parallel-sizes", sizes))
    # equal stages are its default
    if len(set(plan.stage_sizes)) > 1:
        layout = layout_string(plan.stage_sizes)
        arguments.append(("pipeline-model-parallel-layout", (layout,)))
    if near.recomputed:
        arguments += [
            ("recompute-granularity", ("full",)),
            # block recomputes the first layers of every stage, uniform all of them
            ("recompute-method", ("block",)),
            ("recompute-num-layers", (str(near.recomputed),)),
        ]
    data, fully_sharded, notes = _data_parallel(job, near)
    # tensor and context parallelism need kernels of one queue in their order of launch, and
    # Megatron-FSDP must not have that, so that it is unset there
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
    # early gathering needs an overlapped reduction, by its own rule
    if overlap:
        overlap.append(("overlap-param-gather", ()))
    return arguments + overlap, "use-megatron-fsdp" in dict(arguments), notes


def _batch(near: Nearest) -> list[Argument]:
    plan = near.plan
    data = plan.world_size // (plan.num_stages * near.degrees.tensor * near.degrees.context)
    # its micro-batch is that of one data rank, a plan's of all of them
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
    # YAML can set a variable, not unset it
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
