"""Reader of DeepSpeed configurations and their scripts, for memory and time estimates.

The keys come from `deepspeed/runtime/config.py` and `runtime/zero/config.py` of 0.19.8. The script
sets the model, the sequence length and `auto` values. They are read from the arguments of Hugging
Face's Trainer, whose `HfTrainerDeepSpeedConfig` defines `auto`.
`search.engines.deepspeed.check` reports settings that DeepSpeed rejects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.records import Record, replace, shorten
from autopar.run.architecture import Model
from autopar.run.rules import GRID, refuse
from autopar.run.run import Run, legal
from autopar.run.runtime import (
    Buckets,
    ExpertKernels,
    Optimizer,
    Overlap,
    Precision,
    PrecisionKind,
    Runtime,
    States,
    Zero,
)
from autopar.run.strategy import Split, Strategy, even_chunks, uniform_layers
from autopar.training.adapters import Adapters, BaseKind, Target
from search.engines.deepspeed.rules import FILE
from search.engines.huggingface.models import model_named
from search.engines.keys import Keys, flattened
from search.engines.megatron.read import ReadRun
from search.engines.space import TORCH_EXPERTS, TRANSFORMERS

_HARMLESS = frozenset(
    {
        "activation_checkpointing", "aio", "autotuning", "checkpoint", "comms_logger",
        "communication_data_type", "compression_training", "csv_monitor", "curriculum_learning",
        "data_efficiency", "disable_allgather", "dump_state", "eigenvalue", "elasticity",
        "flops_profiler", "gradient_clipping", "gradient_predivide_factor", "graph_harvesting",
        "load_universal_checkpoint", "memory_breakdown", "monitor_config", "prescale_gradients",
        "scheduler", "seq_parallel_communication_data_type", "sparse_gradients",
        "steps_per_print", "tensorboard", "timers", "torch_autocast", "use_node_local_storage",
        "wall_clock_breakdown", "wandb", "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    }
)  # fmt: skip
"""Sections and keys with little or no effect on memory and time."""
_KNOWN_ZERO = frozenset(
    f"zero_optimization.{key}"
    for key in (
        "allgather_partitions", "use_multi_rank_bucket_allreduce", "load_from_fp32_weights",
        "elastic_checkpoint", "ignore_unused_parameters", "round_robin_gradients",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "memory_efficient_linear", "override_module_apply",
        "log_trace_cache_warnings", "enable_sanity_checks", "pipeline_loading_checkpoint",
        "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential", "legacy_stage1", "compute_grad_norm", "parameter_alignment",
        "allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size",
        "contiguous_gradients", "overlap_comm", "reduce_scatter", "leaf_module",
        "cpu_offload_use_pin_memory",
    )
)  # fmt: skip
ULYSSES = "{} saves activations that are not counted. Remove it to price the rest"
HARMLESS_OF_HF = (
    "adam", "data", "dataset", "ddp", "deepspeed", "disable-tqdm", "do-", "eval", "evaluation",
    "greater-is", "hub", "include", "label", "learning-rate", "load-best", "log", "lr-", "max-grad",
    "max-steps", "metric", "num-train", "num-workers", "optim-args", "output", "overwrite",
    "preprocessing", "prediction", "push", "remove-unused", "report", "resume", "run-name", "save",
    "seed", "tokenizer", "torch-dtype", "train-file", "trust", "use-fast", "validation", "warmup",
    "weight-decay", "low-cpu", "streaming", "text-column", "config", "cache-dir", "token",
    "ignore-data", "auto-find", "dataloader", "local-rank", "master", "node-rank", "num-epochs",
)  # fmt: skip
"""Prefixes of arguments of Hugging Face scripts that affect neither memory nor time."""


class TrainerScript(Record):
    """Settings of a run from the arguments of a script with Hugging Face's Trainer."""

    model: Model
    seq: int
    """Sequence length, tokens."""
    micro_batch: int | None
    """Micro-batch size of a rank, sequences; None if not given."""
    accumulation: int | None
    """Micro-batches per step; None if not given."""
    kind: PrecisionKind | None
    """Precision; None if the script enables neither bf16 nor fp16."""
    checkpointing: bool
    """True if all layers are recomputed."""
    compiled: bool
    repeated_heads: bool
    """True if key-value heads are repeated, because the attention kernel lacks grouped queries."""
    steps: int | None = None
    """Number of training steps; None if not given."""
    adapters: Adapters | None = None
    """LoRA adapters on frozen weights; None if all weights are trained."""
    eight_bits: bool = False
    """True if optimizer moments have 8 bits (bitsandbytes)."""


_KINDS: tuple[PrecisionKind, ...] = ("bf16", "fp16")
"""Precisions that a configuration or a script can enable."""


def _number(flags: Mapping[str, tuple[str, ...]], *names: str) -> int | None:
    for name in names:
        words = flags.get(name, ())
        if len(words) == 1 and words[0].isascii() and words[0].isdigit() and len(words[0]) < 10:
            return int(words[0]) or None
    return None


def _yes(flags: Mapping[str, tuple[str, ...]], name: str) -> bool:
    words = flags.get(name)
    return words is not None and (not words or words[0].lower() in ("true", "1", "yes"))


def script_of(
    keys: Keys,
    flags: Mapping[str, tuple[str, ...]],
    *,
    model: str | None = None,
    seq: int | None = None,
    beside: Path | None = None,
) -> TrainerScript:
    """Return the settings of a run from the arguments of a script.

    model, seq : model, and sequence length in tokens, given by the user; both override the script.
    beside : folder for relative model paths in the script; None for the working folder.

    Raises UnpricedError if the model is missing or unknown, if the sequence length is missing, for
    eager attention, or for unsupported LoRA targets.
    """
    name = model or "".join(flags.get("model-name-or-path", flags.get("model-name", ()))[:1])
    if not name:
        raise keys.unpriced("model", "is not given", "Add --model, such as llama-3-8b")
    # Model paths of a script are relative to its folder, those of a user to the working folder.
    found = model_named(name, None if model else beside)
    if found is None:
        raise keys.unpriced(
            "model",
            f"{shorten(name)} is unknown",
            "Use --model FOLDER with its config.json",
        )
    length = seq or _number(
        flags, "block-size", "max-seq-length", "max-length", "model-max-length", "cutoff-len",
        "max-source-length", "seq-length",
    )  # fmt: skip
    if length is None:
        raise keys.unpriced(
            "sequence", "has no known sequence length", "Add --seq-length, such as 2048"
        )
    attention = "".join(flags.get("attn-implementation", ("sdpa",))[:1])
    if attention == "eager":
        raise keys.unpriced(
            "--attn_implementation", "eager attention stores its scores", "Say sdpa"
        )
    kind: PrecisionKind | None = next((one for one in _KINDS if _yes(flags, one)), None)
    return TrainerScript(
        model=found,
        seq=length,
        micro_batch=_number(flags, "per-device-train-batch-size", "per-gpu-train-batch-size"),
        accumulation=_number(flags, "gradient-accumulation-steps"),
        kind=kind,
        checkpointing=_yes(flags, "gradient-checkpointing"),
        compiled=_yes(flags, "torch-compile"),
        repeated_heads=not attention.startswith("flash"),
        steps=_number(flags, "max-steps"),
        adapters=_adapters(keys, flags),
        eight_bits="".join(flags.get("optim", ())[:1]) in _EIGHT_BITS,
    )


_EIGHT_BITS = frozenset(
    f"{paged}adamw{library}_8bit" for paged in ("", "paged_") for library in ("", "_bnb")
)
"""Values of transformers' `--optim` with 8-bit moments.

Paged optimizers move states to the host only when device memory runs out.
"""
_PROJECTIONS: Mapping[str, Target] = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "projection",
    "gate_proj": "fc1",
    "up_proj": "fc1",
    "down_proj": "fc2",
}
"""GEMMs of a decoder layer by the names of their modules in transformers."""


def _adapters(keys: Keys, flags: Mapping[str, tuple[str, ...]]) -> Adapters | None:
    """Return the LoRA adapters that the arguments of a script set; None without `--use_peft`.

    The arguments are those of TRL's `ModelConfig`. If no targets are given, PEFT adapts the query
    and value projections of Llama-like decoders. Raises UnpricedError for targets that are not
    projections of a decoder layer.
    """
    if not _yes(flags, "use-peft"):
        return None
    names = flags.get("lora-target-modules", ())
    targets = frozenset(_PROJECTIONS[name] for name in names if name in _PROJECTIONS)
    others = sorted({*names} - {*_PROJECTIONS})
    if others == ["all-linear"]:
        targets = frozenset(_PROJECTIONS.values())
    elif others:
        raise keys.unpriced(
            "--lora_target_modules",
            f"{shorten(others[0])} is not a projection of a decoder",
            f"Use all-linear or {', '.join(_PROJECTIONS)}",
        )
    base: BaseKind = "16 bits"
    if _yes(flags, "load-in-4bit"):
        base = "nf4"
    elif _yes(flags, "load-in-8bit"):
        base = "int8"
    dropout = "".join(flags.get("lora-dropout", ("0.05",))[:1])
    return Adapters(
        rank=_number(flags, "lora-r", "lora-rank") or 16,
        targets=targets or frozenset({"query", "value"}),
        base=base,
        dropout=float(dropout) if re.fullmatch(r"0?\.[0-9]+|0", dropout) else 0.05,
    )


def script_run(
    script: TrainerScript,
    *,
    split: Split,
    states: States,
    optimizer: Optimizer,
    world_size: int,
    gpu: str,
    source: str,
    micro_batch: int,
    accumulation: int,
    kind: PrecisionKind,
) -> Run:
    """Return the run of a transformers model without pipeline stages.

    split, optimizer : settings from the configuration; the script adds the recomputation and the
    8-bit optimizer. micro_batch : micro-batch size of a rank, sequences. accumulation :
    micro-batches per step.

    Raises InputError if the degrees do not divide the world size or the model.
    """
    refuse(GRID, {"world": world_size, "tp": split.tp, "cp": split.cp, "pp": 1})
    model, mixed = script.model, script.model.experts is not None
    own = replace(
        split,
        etp=split.tp if mixed else 1,
        recompute="full" if script.checkpointing else frozenset(),
    )
    layers, ends = uniform_layers(model.num_layers, own)
    return legal(
        Run(
            name=source,
            model=model,
            strategy=Strategy(
                gpus=world_size,
                layers=layers,
                ends=ends,
                stages=even_chunks(model.num_layers, 1),
                micro_batch=micro_batch,
                global_batch=micro_batch * accumulation * world_size // (split.tp * split.cp),
            ),
            runtime=Runtime(
                engine=states.keeper,
                precision=Precision(kind=kind),
                optimizer=replace(optimizer, kind="adam8bit" if script.eight_bits else "adam"),
                adapters=script.adapters,
                states=states,
                kernels=replace(
                    TRANSFORMERS,
                    compiled=script.compiled,
                    repeated_heads=script.repeated_heads,
                ),
                experts=TORCH_EXPERTS if mixed else ExpertKernels(),
                overlap=Overlap(gradients=True),
            ),
            seq_length=script.seq,
            gpu=gpu,
            steps=script.steps,
        )
    )


def deepspeed_batch(keys: Keys, script: TrainerScript, ranks: int) -> tuple[int, int]:
    """Return the micro-batch size of a rank, in sequences, and the micro-batches per step.

    Two of the three batch settings determine the third. The script supplies `auto` values. One
    micro-batch per step is assumed if no setting determines their number. ranks : data-parallel
    ranks.

    Raises InputError if the settings contradict each other, or if neither the micro-batch nor the
    global batch is given.
    """

    def given(key: str) -> int | None:
        return None if keys.text(key, "auto") == "auto" else keys.number(key)

    total, micro = given("train_batch_size"), given("train_micro_batch_size_per_gpu")
    steps = given("gradient_accumulation_steps") or script.accumulation
    micro = micro or script.micro_batch
    if total is not None:
        if micro is None:
            micro = max(total // (ranks * (steps or 1)), 1)
        if steps is None:
            steps = max(total // (ranks * micro), 1)
        sizes = {"micro_batch": micro, "steps": steps, "ranks": ranks, "train_batch": total}
        refuse(FILE, {**sizes, "product": micro * steps * ranks})
    if micro is None:
        raise keys.fail("train_micro_batch_size_per_gpu", "is missing", "Add it")
    return micro, steps or 1


def _kind(keys: Keys, script: TrainerScript) -> PrecisionKind:
    found: list[PrecisionKind] = []
    for kind in _KINDS:
        word = keys.text(f"{kind}.enabled", "false").lower()
        if word == "true" or (word == "auto" and script.kind == kind):
            found.append(kind)
    refuse(FILE, {kind: kind in found for kind in _KINDS})
    return found[0] if found else "fp32"


def _elements(keys: Keys, name: str, default: int, auto: int) -> int:
    """Return a bucket size, elements; auto : value that Hugging Face's Trainer sets for `auto`."""
    key = f"zero_optimization.{name}"
    return auto if keys.text(key) == "auto" else keys.number(key, default, least=0)


def _buckets(keys: Keys, hidden: int) -> Buckets:
    plain = Buckets()
    overlap = None
    if keys.has("zero_optimization.overlap_comm"):
        overlap = keys.flag("zero_optimization.overlap_comm")
    # `auto` values depend on the hidden size: `trainer_config_finalize` of transformers.
    square = hidden * hidden
    return Buckets(
        reduce=_elements(keys, "reduce_bucket_size", plain.reduce, square),
        allgather=_elements(keys, "allgather_bucket_size", plain.allgather, plain.allgather),
        prefetch=_elements(keys, "stage3_prefetch_bucket_size", plain.prefetch, square * 9 // 10),
        live=_elements(keys, "stage3_max_live_parameters", plain.live, plain.live),
        reuse=_elements(keys, "stage3_max_reuse_distance", plain.reuse, plain.reuse),
        sub_group=_elements(keys, "sub_group_size", plain.sub_group, plain.sub_group)
        or plain.sub_group,
        contiguous=keys.flag("zero_optimization.contiguous_gradients", True),
        overlap=overlap,
        reduce_scatter=keys.flag("zero_optimization.reduce_scatter", True),
    )


def _refuse(keys: Keys) -> None:
    """Raise UnpricedError for settings that affect memory and are not modelled."""
    asked = "Remove it to price the rest"
    for key, plain in (
        ("zero_optimization.zero_hpz_partition_size", 1),
        ("zero_optimization.mics_shard_size", -1),
        ("hybrid_engine.enabled", False),
        ("zero_optimization.zero_quantized_weights", False),
        ("zero_optimization.zero_quantized_gradients", False),
        ("bf16.bf16_master_weights_and_grads", False),
        ("fp16.fp16_master_weights_and_grads", False),
        ("compile.deepcompile", False),
    ):
        if keys.has(key) and keys.values[key] not in (plain, 0):
            raise keys.unpriced(key, "keeps states or copies that are not counted", asked)
    name = keys.text("optimizer.type", "AdamW")
    if name.lower() not in ("adam", "adamw", "auto"):
        raise keys.unpriced("optimizer.type", f"{shorten(name)} has other optimizer states", asked)


def _optimizer(keys: Keys, stage: int) -> Optimizer:
    """Return the optimizer, with offloaded states and, with ZeRO-3, offloaded weights.

    `offload_optimizer` offloads fp32 weights, moments and gradients. With ZeRO-3 the fraction
    `ratio` of them is offloaded (ZeRO-Offload++). Raises UnpricedError for offload to NVMe, and for
    offload of weights without optimizer states. Raises DocumentError for an invalid `ratio`.
    """
    asked = "Remove it to price the rest"
    found = {}
    for part, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
        key = f"zero_optimization.offload_{part}"
        device = keys.text(f"{key}.device", "none")
        if keys.flag(f"zero_optimization.{old}"):
            device = "cpu"
        if device not in ("none", "", "cpu"):
            raise keys.unpriced(key, f"states are on {device}", asked)
        keys.asked.update(name for name in keys.values if name.startswith(f"{key}."))
        found[part] = device == "cpu"
    if not stage:
        # Without ZeRO nothing is sharded or offloaded (runtime/engine.py).
        return Optimizer(host_adam="deepspeed")
    weights = found["param"] and stage == 3
    if weights and not found["optimizer"]:
        raise keys.unpriced(
            "zero_optimization.offload_param",
            "only weights are on cpu",
            "Offload the optimizer too (offload_optimizer)",
        )
    if not found["optimizer"]:
        return Optimizer(host_adam="deepspeed")
    ratio = keys.text("zero_optimization.offload_optimizer.ratio", "1.0") if stage == 3 else "1.0"
    if not re.fullmatch(r"0(\.[0-9]+)?|1(\.0+)?", ratio):
        raise keys.fail(
            "zero_optimization.offload_optimizer.ratio", f"expected 0 to 1, got {shorten(ratio)}"
        )
    share = 1.0 if weights else float(ratio)
    return Optimizer(
        offload=share, offload_master=share > 0, offload_weights=weights, host_adam="deepspeed"
    )


def read_deepspeed(
    document: Mapping[str, Any],
    flags: Mapping[str, tuple[str, ...]],
    *,
    world_size: int,
    gpu: str,
    model: str | None = None,
    seq: int | None = None,
    beside: Path | None = None,
    source: str = "configuration",
) -> ReadRun:
    """Return the run that a configuration and the arguments of its script describe.

    flags : arguments of the script by name without leading hyphens; empty if there is no script.
    model, seq : model, and sequence length in tokens, given by the user.

    Raises InputError if a value is invalid or has no estimate.
    """
    keys = Keys(source=source, values=dict(flattened(document)), asked=set())
    _refuse(keys)
    script = script_of(keys, flags, model=model, seq=seq, beside=beside)
    tp = keys.number("tensor_parallel.autotp_size", 1, least=0) or 1
    exchange = keys.number("sequence_parallel_size", 1)
    micro, accumulation = deepspeed_batch(keys, script, max(world_size // (tp * exchange), 1))
    stage = keys.number("zero_optimization.stage", 0, least=0)
    if stage > 3:
        raise keys.fail("zero_optimization.stage", f"expected 0 to 3, got {stage}")
    stages: tuple[Zero, ...] = (0, 1, 2, 3)
    wide = keys.text("data_types.grad_accum_dtype") or None
    run = script_run(
        script,
        states=States(
            keeper="deepspeed",
            wide_gradients=None if wide is None else wide in ("fp32", "float32"),
            # ZeRO-2 and ZeRO-3 reduce gradients after every micro-batch.
            each_micro_batch=stage >= 2 or accumulation == 1,
            buckets=_buckets(keys, script.model.hidden),
        ),
        world_size=world_size,
        gpu=gpu,
        source=source,
        micro_batch=micro,
        accumulation=accumulation,
        kind=_kind(keys, script),
        optimizer=_optimizer(keys, stage),
        split=Split(
            tp=tp,
            cp=exchange,
            cp_kind="a2a" if exchange > 1 else "ring",
            zero=stages[stage],
        ),
    )
    sections = {
        key for key in keys.values if key.startswith(("bf16.", "fp16.", "tensor_parallel."))
    }
    ignored = keys.ignored(_HARMLESS, _KNOWN_ZERO | sections)
    params = tuple(
        replace(one, understood=True) if one.flag.startswith("optimizer.") else one
        for one in ignored
    )
    unpriced = ULYSSES.format("sequence_parallel_size") if exchange > 1 else None
    return ReadRun(run=run, ignored=params, unpriced=unpriced)
