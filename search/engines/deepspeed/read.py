"""Reader of DeepSpeed configurations and their scripts, for memory and time estimates.

The keys come from `deepspeed/runtime/config.py` and `runtime/zero/config.py` of 0.19.8. The script
sets the model, the sequence length and `auto` values. They are read from the arguments of Hugging
Face's Trainer, whose `HfTrainerDeepSpeedConfig` defines `auto`.
`search.engines.deepspeed.check` reports settings that DeepSpeed rejects.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError
from autopar.rates.devices import lacks_flash_attention
from autopar.records import Record, replace, shorten
from autopar.run.architecture import WIDEST_FLASH, Model
from autopar.run.rules import GRID, refuse
from autopar.run.run import Run, legal
from autopar.run.runtime import (
    Buckets,
    ExpertKernels,
    Kernels,
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
from search.engines.arguments import Unpriced
from search.engines.candidate import linear_targets, renames_experts
from search.engines.deepspeed.rules import FILE, SPACE
from search.engines.huggingface.models import model_named, projections_of, tokens_of_images
from search.engines.huggingface.named_optimizers import has_narrow_adapters
from search.engines.huggingface.names import RANKS
from search.engines.huggingface.optimizers import (
    script_kernels,
    script_optimizer,
    weights_are_narrow,
    weights_are_wide,
)
from search.engines.huggingface.script import (
    LENGTHS,
    MODELS,
    NO_OPTIONS,
    Flags,
    ScriptOptions,
    ScriptWords,
    known_program,
    takes_factory_words,
    translated,
)
from search.engines.keys import Keys, flattened, whole
from search.engines.megatron.read import ReadRun
from search.engines.space import TORCH_EXPERTS, TRANSFORMERS, refuse_unsupported

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
        "zero_force_ds_cpu_optimizer", "amp", "comet", "compile", "dataloader_drop_last",
        "gradient_allreduce_op", "hybrid_engine", "log_level", "nebula", "optimizer",
        "comms_config", "progressive_layer_drop", "use_data_before_expert_parallelism",
    }
)  # fmt: skip
"""Sections and keys with little or no effect on memory and time, but for keys of `_UNPRICED`."""
_ON = ("true", "auto")
_COMPRESSION = ("layer_reduction", *(f"{name}.shared_parameters" for name in (
    "weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning",
    "head_pruning", "channel_pruning")))  # fmt: skip
_UNPRICED: Mapping[str, Unpriced] = {
    "amp.enabled": Unpriced("another precision"),
    "autotuning.enabled": Unpriced("batch and buckets are tuned at run time"),
    "bf16.bf16_optimizer_states": Unpriced("optimizer states have 16 bits"),
    "bf16.immediate_grad_update": Unpriced("when gradients are copied", ("memory",), _ON),
    "compile.enabled": Unpriced("layers are compiled"),
    "communication_data_type": Unpriced("messages of another type", ("time",), (
        "bf16", "bfp16", "fp16", "none", "auto")),
    **{f"compression_training.{name}.enabled": Unpriced("layers are compressed")
       for name in _COMPRESSION},
    "curriculum_learning.enabled": Unpriced("lengths change during the run"),
    "data_efficiency.enabled": Unpriced("lengths change during the run"),
    "eigenvalue.enabled": Unpriced("eigenvalues are computed"),
    "elasticity.enabled": Unpriced("the batch depends on the GPUs that are there"),
    "fp16.auto_cast": Unpriced("inputs are cast", ("time",)),
    "graph_harvesting": Unpriced("CUDA graphs"),
    "progressive_layer_drop.enabled": Unpriced("layers are skipped"),
    "sparse_gradients": Unpriced("messages of sparse gradients", ("time",)),
    "tensor_parallel.tp_overlap_comm": Unpriced("messages concurrent with GEMMs", ("time",)),
    "torch_autocast.enabled": Unpriced("another precision"),
    "zero_optimization.allgather_partitions": Unpriced("messages of another kind", ("time",), _ON),
    "zero_optimization.memory_efficient_linear": Unpriced("what linear layers save", off=_ON),
    "zero_optimization.stage3_allgather_sequential": Unpriced("order of messages", ("time",)),
    "zero_optimization.stage3_module_granularity_threshold": Unpriced("modules gathered as one"),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Unpriced(
        "messages of another kind", ("time",)),
    "zero_optimization.use_multi_rank_bucket_allreduce": Unpriced(
        "messages of another kind", ("time",), _ON),
}  # fmt: skip
"""Keys that change memory or time and have no price."""
_OWN_CHECKPOINTS = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
_PERSISTENCE = ("stage3_param_persistence_threshold", "param_persistence_threshold")
_MOST_ELEMENTS = 10**15
"""Largest bucket, elements; DeepSpeed has no limit."""
_KNOWN_ZERO = frozenset(
    f"zero_optimization.{key}"
    for key in (
        "allgather_partitions", "use_multi_rank_bucket_allreduce", "load_from_fp32_weights",
        "elastic_checkpoint", "ignore_unused_parameters", "round_robin_gradients",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save", "stage3_param_persistence_threshold",
        "param_persistence_threshold", "memory_efficient_linear", "override_module_apply",
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


def unpriced_keys(keys: Keys, model: Model, *, scripted: bool) -> dict[str, Unpriced]:
    """Return the keys of a configuration that have no price, with the reason.

    scripted : True for a script of Hugging Face's Trainer, which does not use the checkpointing of
    DeepSpeed.
    """
    found = dict(_UNPRICED)
    if not scripted:
        for name in _OWN_CHECKPOINTS:
            found[f"activation_checkpointing.{name}"] = Unpriced("checkpoints of DeepSpeed")
    # Tensors below the threshold stay gathered: norms by default, matrices with a large one.
    attention = model.attention
    matrix = model.hidden * attention.kv_heads * attention.width
    for name in _PERSISTENCE:
        key = f"zero_optimization.{name}"
        threshold = whole(keys.values.get(key))
        if threshold is not None and threshold >= matrix and whole(keys.values.get(_STAGE)) == 3:
            found[key] = Unpriced("matrices stay gathered", ("time",))
            keys.asked.discard(key)  # memory is counted, time without gathers is not
    return found


_STAGE = "zero_optimization.stage"


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
    narrow: bool = False
    """True if the script loads weights in 16 bits and trains them in that type."""
    narrow_adapters: bool = False
    """True if adapters of quantised weights have 16 bits."""
    kernels: Kernels = TRANSFORMERS
    global_batch: int | None = None
    """Sequences of a step, given by the user; None if not given."""
    notes: tuple[str, ...] = ()
    """Sentences on arguments that were taken for others."""
    words: ScriptWords
    """Arguments, with a record of those that were looked up."""


_KINDS: tuple[PrecisionKind, ...] = ("bf16", "fp16")
"""Precisions that a configuration or a script can enable."""


def script_of(
    keys: Keys,
    flags: Flags,
    *,
    asked: ScriptOptions,
    beside: Path | None = None,
) -> TrainerScript:
    """Return the settings of a run from the arguments of a script.

    asked : settings given by the user, which override the script.
    beside : folder for relative model paths in the script; None for the working folder.

    Raises UnpricedError if the model is missing or unknown, if the sequence length is missing, for
    eager attention, or for unsupported LoRA targets.
    """
    meant = translated(flags, asked.program, asked.world_size)
    words = ScriptWords(words=meant.flags, asked={"deepspeed", "deepspeed-config"})
    # Arguments that an option replaces count as looked up.
    named, own_batch = words.text(*MODELS), words.number("per-device-train-batch-size")
    if asked.micro_batch:
        words.asked.add("per-device-train-batch-size")
    name = asked.model or named
    if not name:
        raise keys.unpriced("model", "is not given", "Add --model, such as llama-3-8b")
    # Model paths of a script may be relative to its folder, those of a user are not.
    found = model_named(name, None if asked.model else beside)
    if found is None:
        raise keys.unpriced(
            "model",
            f"{shorten(name)} is unknown",
            "Use --model FOLDER with its config.json",
        )
    length = asked.seq_length or words.number(*LENGTHS, *_HALVES)
    notes = meant.taken
    if length is None and found.has_patches:
        length = tokens_of_images(name, None if asked.model else beside)
        notes = (*notes, f"{length} tokens of a sample follow from the sizes of {shorten(name)}")
    if asked.seq_length:
        words.asked.update((*LENGTHS, *_HALVES))
    if length is None:
        given = next((f"--{name.replace('-', '_')}" for name in LENGTHS if name in words.words), "")
        raise keys.unpriced(
            given or "sequence length",
            "is no number of tokens" if given else "is not given",
            "Add --seq-length, such as 2048",
        )
    for flag, what in RANKS.items():
        value = "" if flag in asked.declared else words.text(flag).lower()
        if value not in ("", "1", "none", "null"):
            raise keys.unpriced(
                f"--{flag.replace('-', '_')}",
                f"{shorten(value)} ({what}) is not priced",
                "Remove it to price the rest",
            )
    attention = "".join(words.words.get("attn-implementation", ("sdpa",))[:1])
    if attention in _ATTENTION:
        words.asked.add("attn-implementation")
    if attention == "eager":
        raise keys.unpriced(
            "--attn_implementation", "eager attention stores its scores", "Say sdpa"
        )
    on = {one: words.yes(one) for one in _KINDS}
    if all(on.values()):
        # `TrainingArguments.__post_init__` of transformers.
        raise keys.fail("--bf16", "excludes --fp16")
    kind: PrecisionKind | None = next((one for one in _KINDS if on[one]), asked.precision)
    if kind is not None:
        words.asked.add("tf32")  # of fp32 GEMMs alone
    adapters = _adapters(keys, words, found)
    if adapters is not None and (weights_are_wide(words) or asked.prepared):
        adapters = replace(adapters, wide=True)
    return TrainerScript(
        model=found,
        seq=length,
        micro_batch=asked.micro_batch or own_batch,
        accumulation=words.number("gradient-accumulation-steps"),
        kind=kind,
        checkpointing=words.yes("gradient-checkpointing"),
        compiled=words.yes("torch-compile"),
        repeated_heads=not attention.startswith("flash"),
        steps=words.number("max-steps"),
        adapters=adapters,
        narrow=weights_are_narrow(words),
        # PEFT makes them in fp32, and other programs than TRL leave them so
        narrow_adapters=has_narrow_adapters(adapters)
        and known_program(asked.program) in ("", "trl")
        and not takes_factory_words(flags, asked.program),
        kernels=script_kernels(words, asked.program),
        global_batch=asked.global_batch,
        notes=notes,
        words=words,
    )


_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Kernels of transformers that store no scores."""
_HALVES = ("max-source-length",)
"""Lengths of a prompt alone, which count if there is no other."""
_FUSED: Mapping[str, tuple[Target, ...]] = {
    "qkv_proj": ("query", "key", "value"),
    "query_key_value": ("query", "key", "value"),
    "gate_up_proj": ("fc1",),
}
"""GEMMs of models whose projections are one module."""


def _adapters(keys: Keys, words: ScriptWords, model: Model) -> Adapters | None:
    """Return the LoRA adapters that the arguments of a script set; None without `--use_peft`.

    The arguments are those of TRL's `ModelConfig`. If no targets are given, PEFT adapts the query
    and value projections of Llama-like decoders. Raises UnpricedError for targets that are not
    projections of a decoder layer, and for quantised weights with experts in 16 bits.
    """
    if not words.yes("use-peft"):
        if "use-peft" in words.words:
            words.asked.update(
                name for name in words.words if name.startswith(("lora", "use-dora"))
            )
        return None
    names, own = words.list("lora-target-modules"), projections_of(model)
    if not names and model.torch_mixers:
        problem = f"is missing, and PEFT has no default for models with {model.torch_mixers}"
        raise keys.fail("--lora_target_modules", problem, "Use all-linear")
    known = {**_FUSED, **own}
    targets = frozenset(target for name in names for target in known.get(name, ()))
    others = sorted({*names} - {*known})
    whole = others in (["all-linear"], ["all"])
    _refuse_expert_adapters(keys, model, targets, others, own)
    if whole:
        targets = linear_targets(model)
    elif others:
        raise keys.unpriced(
            "--lora_target_modules",
            f"{shorten(others[0])} is not a projection of a decoder",
            f"Use all-linear or {', '.join(name for name in own if own[name])}",
        )
    # PEFT ignores names that match no module.
    targets = targets & linear_targets(model) or targets
    base: BaseKind = "16 bits"
    four, eight = words.yes("load-in-4bit"), words.yes("load-in-8bit")
    if four or eight:
        base = "nf4" if four else "int8"
    nested = base != "nf4" or words.yes("use-bnb-nested-quant")
    if base != "16 bits" and model.experts is not None:
        name, problem = f"--load_in_{4 if base == 'nf4' else 8}bit", "leaves experts in 16 bits"
        if words.yes("quantize-moe-experts"):
            # `monkeypatch/moe_quant.py` of axolotl dequantises all experts of a layer for its GEMMs
            name, problem = "--quantize_moe_experts", "makes 16-bit copies of the experts"
        raise keys.unpriced(name, f"{problem}, which is not counted", "Remove it to price the rest")
    try:
        dropout = float(words.text("lora-dropout") or 0.05)
    except ValueError:
        dropout = -1.0
    if not 0.0 <= dropout < 1.0:
        raise keys.fail("--lora_dropout", "needs a share from 0 to less than 1")
    rank = words.number("lora-r")
    if rank is None and "lora-r" in words.words:
        # `LoraLayer.update_layer` of PEFT.
        raise keys.fail("--lora_r", "needs a positive number")
    return Adapters(
        rank=rank or 16,
        targets=targets or frozenset({"query", "value"}),
        fused=any(name in _FUSED and name not in own for name in names),
        base=base,
        nested=nested,
        dropout=dropout,
    )


def _refuse_expert_adapters(
    keys: Keys,
    model: Model,
    targets: frozenset[Target],
    others: list[str],
    own: Mapping[str, tuple[Target, ...]],
) -> None:
    """Raise UnpricedError for targets that mean routers, or experts whose adapters PEFT fuses.

    `all-linear` of PEFT means both. `all` of LLaMA-Factory means the names of linear layers, which
    most routers are not. gpt-oss has neither.
    """
    whole, renamed = others in (["all-linear"], ["all"]), renames_experts(model)
    named = linear_targets(model) if whole else targets
    routers = whole and model.experts is not None and not model.last.biases
    routers = routers and (others == ["all-linear"] or not renamed)
    if routers or (renamed and any(one.startswith("fc") for one in named)):
        rest = [name for name, one in own.items() if one and not one[0].startswith("fc")]
        raise keys.unpriced(
            "--lora_target_modules",
            "means routers or fused experts, whose adapters are not counted",
            f"Use {' '.join(rest)}",
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

    split, optimizer : settings of configuration and script; the script also sets recomputation.
    micro_batch : micro-batch size of a rank, sequences. accumulation : micro-batches per step.

    Raises InputError if the degrees do not divide the world size or the model.
    """
    refuse(GRID, {"world": world_size, "tp": split.tp, "cp": split.cp, "pp": 1})
    if not script.repeated_heads and lacks_flash_attention(gpu):
        raise DocumentError(
            source,
            f"flash attention does not run on {gpu}",
            key="--attn_implementation",
            remedy="Use sdpa",
        )
    model, mixed = script.model, script.model.experts is not None
    if not script.repeated_heads and model.widest_head > WIDEST_FLASH:
        raise DocumentError(
            source,
            f"heads of width {model.widest_head} are too wide for flash attention, whose limit is "
            f"{WIDEST_FLASH}",
            key="--attn_implementation",
            remedy="Use sdpa",
        )
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
                optimizer=optimizer,
                adapters=script.adapters,
                states=states,
                kernels=replace(
                    script.kernels,
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

    Raises InputError if the settings contradict each other, and UnpricedError if neither the
    micro-batch nor the global batch is given.
    """

    def given(key: str) -> int | None:
        return None if keys.text(key, "auto") == "auto" else keys.number(key)

    total, micro = given("train_batch_size"), given("train_micro_batch_size_per_gpu")
    steps = given("gradient_accumulation_steps") or script.accumulation
    micro = micro or script.micro_batch
    total = total or script.global_batch
    if total is not None:
        if micro is None:
            micro = max(total // (ranks * (steps or 1)), 1)
        if steps is None:
            steps = max(total // (ranks * micro), 1)
        sizes = {"micro_batch": micro, "steps": steps, "ranks": ranks, "train_batch": total}
        refuse(FILE, {**sizes, "product": micro * steps * ranks})
    if micro is None:
        raise keys.unpriced(
            "train_micro_batch_size_per_gpu",
            "is not given" if "train_micro_batch_size_per_gpu" not in keys.values else "is auto",
            "Add --micro-batch-size or --global-batch-size",
        )
    return micro, steps or 1


def _kind(keys: Keys, script: TrainerScript) -> PrecisionKind:
    found: list[PrecisionKind] = []
    for kind in _KINDS:
        key = f"{kind}.enabled"
        word = keys.text(key, "false").lower()
        if word not in ("true", "false", "auto"):
            raise keys.fail(key, f"expected true, false or auto, got {shorten(word)}")
        if word == "true" or (word == "auto" and script.kind == kind):
            found.append(kind)
    refuse(FILE, {kind: kind in found for kind in _KINDS})
    auto = [kind for kind in _KINDS if keys.text(f"{kind}.enabled") == "auto"]
    if auto and not found and script.kind is None and not script.words.words:
        # The Trainer computes in fp32 where its arguments set nothing.
        raise keys.unpriced(f"{auto[0]}.enabled", "is auto", "Add --precision, such as bf16")
    return found[0] if found else "fp32"


def _elements(keys: Keys, name: str, default: int, auto: int) -> int:
    """Return a bucket size, elements; auto : value that Hugging Face's Trainer sets for `auto`."""
    # Both names of a key are read, with and without the prefix of ZeRO-3.
    key = keys.first(
        f"zero_optimization.{name}", f"zero_optimization.{name.removeprefix('stage3_')}"
    )
    if keys.text(key) == "auto":
        return auto
    return keys.number(key, default, least=0, most=_MOST_ELEMENTS)


def _buckets(keys: Keys, hidden: int) -> Buckets:
    plain = Buckets()
    overlap = None
    if keys.has("zero_optimization.overlap_comm"):
        overlap = keys.flag("zero_optimization.overlap_comm")
    limit = keys.first(
        "zero_optimization.stage3_model_persistence_threshold",
        "zero_optimization.model_persistence_threshold",
    )
    # `auto` values depend on the hidden size: `trainer_config_finalize` of transformers.
    square = hidden * hidden
    return Buckets(
        reduce=_elements(keys, "reduce_bucket_size", plain.reduce, square),
        allgather=_elements(keys, "allgather_bucket_size", plain.allgather, plain.allgather),
        prefetch=_elements(keys, "stage3_prefetch_bucket_size", plain.prefetch, square * 9 // 10),
        live=_elements(keys, "stage3_max_live_parameters", plain.live, plain.live),
        reuse=_elements(keys, "stage3_max_reuse_distance", plain.reuse, plain.reuse),
        persistent=_elements(
            keys, "stage3_param_persistence_threshold", plain.persistent, 10 * hidden
        ),
        model_persistent=keys.number(limit, least=0, most=sys.maxsize) if keys.has(limit) else None,
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
    if name.lower() not in ("adam", "adamw", "lion", "auto"):
        raise keys.unpriced("optimizer.type", f"{shorten(name)} has other optimizer states", asked)


def _own_optimizer(keys: Keys, script: TrainerScript) -> Optimizer:
    """Return the optimizer on the device: one of DeepSpeed, or else that of the script.

    Sources: `_configure_basic_optimizer` of runtime/engine.py, where `torch_adam` selects
    `torch.optim.AdamW`. States are partitions of flat fp32 tensors.
    """
    if not keys.has("optimizer.type"):
        return script_optimizer(script.words, pure=False, flat=True, sharded=True)
    script.words.asked.add("optim")  # replaced
    kind = keys.text("optimizer.type", "AdamW").lower()
    if kind == "lion":
        return Optimizer(kind="lion", moments_bytes=4)
    return Optimizer(fused=not keys.flag("optimizer.params.torch_adam"))


def _optimizer(keys: Keys, stage: int, own: Optimizer) -> Optimizer:
    """Return an optimizer with offloaded states and, with ZeRO-3, offloaded weights.

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
        if not device:
            raise keys.fail(f"{key}.device", "expected none, cpu or nvme, got an empty text")
        if device not in ("none", "cpu"):
            raise keys.unpriced(key, f"states are on {device}", asked)
        keys.asked.update(name for name in keys.values if name.startswith(f"{key}."))
        found[part] = device == "cpu"
    if not stage:
        # Without ZeRO nothing is sharded or offloaded (runtime/engine.py).
        return own
    weights = found["param"] and stage == 3
    if weights and not found["optimizer"]:
        raise keys.unpriced(
            "zero_optimization.offload_param",
            "only weights are on cpu",
            "Offload the optimizer too (offload_optimizer)",
        )
    if not found["optimizer"]:
        return own
    ratio = keys.text("zero_optimization.offload_optimizer.ratio", "1.0") if stage == 3 else "1.0"
    if not re.fullmatch(r"0(\.[0-9]+)?|1(\.0+)?", ratio):
        raise keys.fail(
            "zero_optimization.offload_optimizer.ratio", f"expected 0 to 1, got {shorten(ratio)}"
        )
    share = 1.0 if weights else float(ratio)
    return replace(own, offload=share, offload_master=share > 0, offload_weights=weights)


def read_deepspeed(
    document: Mapping[str, Any],
    flags: Mapping[str, tuple[str, ...]],
    *,
    world_size: int,
    gpu: str,
    asked: ScriptOptions = NO_OPTIONS,
    beside: Path | None = None,
    source: str = "configuration",
) -> ReadRun:
    """Return the run that a configuration and the arguments of its script describe.

    flags : arguments of the script by name without leading hyphens; empty if there is no script.
    asked : settings given by the user, and the program of the script.

    Raises InputError if a value is invalid or has no estimate.
    """
    keys = Keys(source=source, values=dict(flattened(document)), asked=set())
    _refuse(keys)
    script = script_of(keys, flags, asked=asked, beside=beside)
    script.words.asked.update(("dtype", "torch-dtype"))
    if script.adapters is not None:
        # the engine casts weights itself
        script = replace(script, adapters=replace(script.adapters, wide=False))
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
        optimizer=_optimizer(
            keys, stage, replace(_own_optimizer(keys, script), host_adam="deepspeed")
        ),
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
    ignored = keys.ignored(
        _HARMLESS, _KNOWN_ZERO | sections, unpriced_keys(keys, script.model, scripted=bool(flags))
    )
    unpriced = ULYSSES.format("sequence_parallel_size") if exchange > 1 else None
    return ReadRun(
        run=refuse_unsupported(SPACE, run),
        ignored=(*ignored, *script.words.ignored(asked.declared)),
        unpriced=unpriced,
        notes=script.notes,
    )
