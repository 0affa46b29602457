"""Reader of torchtitan job files (TOML), which returns runs for memory and time estimates.

It knows the keys of four generations: 2024 (degrees in `[training]` and `[experimental]`), 2025
(`[parallelism]`, `[float8]`, `training.compile`), 0.2 (`[compile]`, `[quantize]`) and 0.3, whose
Python recipes `search.engines.torchtitan.source` reads as sections. The keys come from
`torchtitan/config/job_config.py`, `config_manager.py` and `configs.py` of each generation.
`search.engines.torchtitan.check` reports settings that torchtitan rejects.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from autopar.errors import InputError
from autopar.pipeline.schedules import SCHEDULES, TORCH_NAMES, Schedule, schedule_named
from autopar.records import Record, replace, shorten
from autopar.run.architecture import Model
from autopar.run.rules import BATCH, refuse
from autopar.run.run import Run, legal
from autopar.run.runtime import (
    ExpertKernels,
    Graphs,
    Kernels,
    Optimizer,
    Overlap,
    Precision,
    Quirks,
    Runtime,
    States,
)
from autopar.run.strategy import (
    Chunk,
    Recomputation,
    Split,
    Strategy,
    chunks_of_sizes,
    recomputing,
    uniform_layers,
)
from autopar.training.adapters import Adapters
from search.engines.arguments import Unpriced
from search.engines.engine import Span, spanned
from search.engines.huggingface.models import FLAVOURS, flavour
from search.engines.huggingface.named_optimizers import of_narrow_weights
from search.engines.keys import Keys, flattened, sections_of
from search.engines.megatron.read import ReadRun
from search.engines.space import TORCH_EXPERTS
from search.engines.torchtitan.flavours import (
    UNSHARDED,
    adapted_modules,
    linear_modules,
    targets_of,
)
from search.engines.torchtitan.rules import GRID, LOCAL_BATCH, WHOLE_STAGES

Generation = Literal["2024", "2025", "0.2", "0.3"]
_RECENT = ("0.2", "0.3")
_HARMLESS = frozenset(
    {
        "checkpoint", "comm", "debug", "fault_tolerance", "job", "lr_scheduler",
        "memory_estimation", "metrics", "profiling", "validation", "training.dataset",
        "training.dataset_path", "training.dataloader", "training.deterministic",
        "training.gc_debug", "training.gc_freq", "training.max_norm", "training.seed",
        "training.warmup_steps", "training.debug_moe_force_load_balance", "model.tokenizer_path",
        "model.hf_assets_path", "model.print_after_conversion", "optimizer.beta1",
        "optimizer.beta2", "optimizer.eps", "optimizer.lr", "optimizer.weight_decay",
        "optimizer.implementation", "optimizer.fused", "activation_checkpoint.debug",
        "activation_checkpoint.determinism_check", "activation_checkpoint.early_stop",
        "activation_checkpoint.preserve_rng_state",
        "activation_checkpoint.visualize_memory_budget_pareto",
    }
)  # fmt: skip
"""Sections and keys that affect neither memory nor time."""
_KNOWN = frozenset(
    {
        # Read only if another setting is on.
        "parallelism.context_parallel_rotate_method", "parallelism.context_parallel_load_balancer",
        "parallelism.disable_loss_parallel", "parallelism.enable_async_tensor_parallel",
        "parallelism.enable_compiled_autograd", "parallelism.expert_parallel_comm_backend",
        "parallelism.enable_sequence_parallel",
        "parallelism.expert_tensor_parallel_degree", "parallelism.module_fqns_per_model_part",
        "parallelism.pipeline_parallel_expert_parallel_overlap",
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "parallelism.pipeline_parallel_layers_per_stage",
        "parallelism.pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_schedule",
        "parallelism.pipeline_parallel_schedule_csv", "parallelism.pipeline_parallel_split_points",
        "experimental.enable_async_tensor_parallel", "experimental.enable_compiled_autograd",
        "experimental.pipeline_parallel_microbatches", "experimental.pipeline_parallel_schedule",
        "experimental.pipeline_parallel_split_points",
        "experimental.context_parallel_rotate_method",
        "training.mixed_precision_reduce", "training.enable_loss_parallel",
        "activation_checkpoint.selective_ac_option", "activation_checkpoint.memory_budget",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        "compile.backend", "compile.components", "model.norm_type",
        "float8.enable_fsdp_float8_all_gather", "float8.precompute_float8_dynamic_scale_for_fsdp",
        "float8.force_recompute_fp8_weight_in_bwd", "float8.recipe_name", "float8.filter_fqns",
        "float8.emulate", "float8.moe_fqns", "float8.moe_fqns_prototype",
        "float8.scaling_type_input", "float8.scaling_type_weight",
        "float8.scaling_type_grad_output", "float8.enable_float8_linear",
        *(f"quantize.{kind}.float8.{key}" for kind in ("linear", "dense") for key in (
            "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp",
            "recipe_name", "filter_fqns", "emulate")),
        *(f"quantize.{kind}.{name}.fqns" for kind in ("grouped_mm", "moe")
          for name in ("float8", "mx")),
        *(f"{kind}.{key}" for kind in ("mx", "quantize.linear.mx") for key in (
            "mxfp8_dim1_cast_kernel_choice", "recipe_name", "filter_fqns",
            "moe_fqns_prototype")),
        "quantize.grouped_mm.mx.recipe_name", "quantize.moe.mx.recipe_name",
        "liger_kernel.enable_fused_linear_cross_entropy",
        # Of 0.3.
        "parallelism.context_parallel_ptrr_mask_key",
        "training.disable_cuda_graphs", "debug.moe_force_load_balance",
        "compile.enable_async_tensor_parallel", "lora.alpha",
    }
)  # fmt: skip
"""Valid keys that the reader looks up only if another setting makes them effective."""
_UNPRICED: Mapping[str, Unpriced] = {
    "compile.backend": Unpriced("another compiler", off=("inductor",)),
    "debug.deterministic": Unpriced("deterministic kernels", ("time",)),
    "experimental.custom_args_module": Unpriced("custom code"),
    "experimental.custom_import": Unpriced("custom code"),
    "fault_tolerance.enable": Unpriced("replicas that come and go"),
    "float8.emulate": Unpriced("GEMMs of 16 bits"),
    "optimizer.implementation": Unpriced("temporaries of the optimizer", off=("fused",)),
    "parallelism.enable_compiled_autograd": Unpriced("a compiled backward pass"),
    "experimental.enable_compiled_autograd": Unpriced("a compiled backward pass"),
    "quantize.linear.float8.emulate": Unpriced("GEMMs of 16 bits"),
    "quantize.dense.float8.emulate": Unpriced("GEMMs of 16 bits"),
    "training.deterministic": Unpriced("deterministic kernels", ("time",)),
    "training.mixed_precision_reduce": Unpriced("gradients of another type", off=("float32",)),
}
"""Keys that change memory or time and have no price."""


_RELEASED = """
    training.compile@-0.1 float8@-0.1 mx@-0.1 parallelism.pipeline_parallel_split_points@-0.1
    checkpoint.enable_checkpoint@-0.1 memory_estimation.enabled@-0.1 lr_scheduler.lr_min@-0.1
    compile@0.2 quantize@0.2 validation@0.2 model.hf_assets_path@0.2 checkpoint.enable@0.2
    training.dtype@0.2 activation_checkpoint.memory_budget@0.2 activation_checkpoint.early_stop@0.2
    activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns@0.2
    parallelism.expert_parallel_degree@0.2 parallelism.expert_tensor_parallel_degree@0.2
    parallelism.module_fqns_per_model_part@0.2
    parallelism.pipeline_parallel_first_stage_less_layers@0.2
    parallelism.pipeline_parallel_last_stage_less_layers@0.2
    training.debug_moe_force_load_balance@0.2-0.2.0 parallelism.enable_compiled_autograd@-0.2.0
    training.deterministic@-0.2.0 training.seed@-0.2.0 debug@0.2.1 training.dataloader@0.2.1
    activation_checkpoint.debug@0.2.1 activation_checkpoint.determinism_check@0.2.1
    activation_checkpoint.preserve_rng_state@0.2.1
    parallelism.expert_parallel_comm_backend@0.2.1
    parallelism.pipeline_parallel_expert_parallel_overlap@0.2.1
    parallelism.context_parallel_load_balancer@0.2.2
"""
"""Sections and keys of job files that not all of the releases 0.1.0, 0.2.0, 0.2.1 and 0.2.2 have
(`config_manager.py` and `config/job_config.py` of their wheels)."""


def spans_of(keys: Keys) -> dict[str, Span]:
    """Return the releases with the sections and keys of a job file; those of all are omitted."""
    known = dict(map(spanned, _RELEASED.split()))
    given = {name for key in keys.values for name in (key, *sections_of(key))}
    return {name: span for name, span in known.items() if name in given}


def keys_of(document: Mapping[str, Any], source: str) -> Keys:
    """Return the values of a job file by dotted key (`section.key`); source : name for errors."""
    return Keys(source=source, values=dict(flattened(document)), asked=set())


def generation_of(keys: Keys) -> Generation:
    """Return the torchtitan generation of a job file, recognised by its keys."""
    values = keys.values
    if keys.has("parallelism.spmd_backend"):
        return "0.3"
    newest = (
        "compile.", "quantize.", "debug.", "model.hf_assets_path", "checkpoint.enable",
        "parallelism.module_fqns_per_model_part", "parallelism.expert_tensor_parallel_degree",
    )  # fmt: skip
    if any(
        key == name or (name[-1] == "." and key.startswith(name))
        for key in values
        for name in newest
    ):
        return "0.2"
    oldest = ("model.norm_type", "float8.enable_float8_linear", "training.enable_float8_linear")
    old = any(key.startswith(("experimental.pipeline", "experimental.context")) for key in values)
    if (
        old
        or any(key in values for key in oldest)
        or any(key.startswith("training.") and key.endswith("_degree") for key in values)
    ):
        return "2024"
    return "2025"


class TitanDegrees(Record):
    """Parallel degrees of a job file on `world` GPUs."""

    world: int
    replicate: int
    shard: int
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int

    @property
    def dp(self) -> int:
        """Data-parallel degree, replicas times shards."""
        return self.replicate * self.shard


def grid_values(degrees: TitanDegrees) -> dict[str, int]:
    """Return the inputs of the rule that the product of the degrees is the world size."""
    return {
        "world": degrees.world,
        "dp_replicate": degrees.replicate,
        "dp_shard": degrees.shard,
        "cp": degrees.cp,
        "tp": degrees.tp,
        "pp": degrees.pp,
        "ranks": degrees.dp * degrees.cp * degrees.tp * degrees.pp,
    }


def degrees_of(keys: Keys, world: int) -> TitanDegrees:
    """Return the parallel degrees of a job file on `world` GPUs.

    A sharding degree of -1 is the world size over the other degrees, at least 1. The product of all
    degrees may still differ from the number of GPUs. Raises DocumentError for an invalid degree.
    """

    def degree(name: str, default: int = 1, least: int = 1) -> int:
        names = (f"parallelism.{name}", f"training.{name}", f"experimental.{name}")
        return keys.number(keys.first(*names), default, least=least)

    replicate, tp = degree("data_parallel_replicate_degree"), degree("tensor_parallel_degree")
    cp, pp = degree("context_parallel_degree"), degree("pipeline_parallel_degree")
    name = keys.first(
        "parallelism.data_parallel_shard_degree",
        "training.data_parallel_shard_degree",
        "training.data_parallel_degree",
        "parallelism.data_parallel_degree",
    )
    shard = keys.number(name, -1, least=-1)
    if shard == 0:
        raise keys.fail(name, "expected -1 or a positive integer, got 0")
    if shard < 0:
        shard = max(world // (replicate * cp * tp * pp), 1)
    ep = degree("expert_parallel_degree")
    # Without expert parallelism, experts are split by tensor parallelism like other weights.
    etp = degree("expert_tensor_parallel_degree") if ep > 1 else tp
    return TitanDegrees(
        world=world, replicate=replicate, shard=shard, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp
    )


def read_titan(
    document: Mapping[str, Any],
    *,
    world_size: int,
    gpu: str,
    model: Model | None = None,
    source: str = "job",
) -> ReadRun:
    """Return the run that a job file describes.

    world_size : number of GPUs, from the command line of torchrun. gpu : name of the card.
    model : sizes of the model, if the document does not name one.

    Raises InputError if a value is invalid, or if the model or a setting cannot be estimated.
    """
    keys = keys_of(document, source)
    generation = generation_of(keys)
    model = model or _model(keys)
    _refuse(keys)
    degrees = degrees_of(keys, world_size)
    experts = ExpertKernels()
    if model.experts is None:
        # Expert degrees have no effect on a dense model.
        degrees = replace(degrees, ep=1, etp=1)
    else:
        experts = _experts(keys, degrees)
    precision, gathered = _precision(keys)
    # The precision of recipes also holds where nothing is sharded.
    if generation != "0.3" and degrees.shard * degrees.cp == 1 and degrees.tp * degrees.pp > 1:
        # torchtitan uses autocast only for pure data parallelism, and the mixed precision of FSDP2
        # only where ranks shard. Otherwise it computes in fp32.
        precision = replace(precision, kind="fp32")
    compiled, compiled_loss = _compiled(keys, generation)
    recompute, every = _recompute(keys)
    micro, batch = _batch(keys, degrees, generation)
    schedule = _schedule(keys, degrees.pp)
    chunks = keys.number("loss.num_chunks", 1)
    zero = _zero(keys, degrees, generation)
    refuse(GRID, grid_values(degrees))
    layers, ends = uniform_layers(
        model.num_layers,
        Split(
            tp=degrees.tp,
            sequence_parallel=degrees.tp > 1
            and keys.flag("parallelism.enable_sequence_parallel", True),
            cp=degrees.cp,
            ep=degrees.ep,
            etp=degrees.etp,
            zero=zero,
            replicas=degrees.replicate if zero else 1,
        ),
    )
    strategy = Strategy(
        gpus=world_size,
        layers=layers,
        ends=ends,
        stages=_chunks(keys, model, degrees, generation, schedule),
        schedule=schedule,
        micro_batch=micro,
        global_batch=batch,
    )
    run = Run(
        name=source,
        model=model,
        strategy=recomputing(strategy, recompute, every=every),
        seq_length=keys.number("training.seq_len", 2048),
        steps=keys.number("training.steps") if keys.has("training.steps") else None,
        runtime=Runtime(
            engine="torchtitan",
            precision=precision,
            optimizer=_optimizer(keys, zero),
            overlap=Overlap(tensor=degrees.tp > 1 and _async(keys), gradients=True),
            states=States(
                keeper="torchtitan" if zero else "ddp",
                each_micro_batch=degrees.pp == 1,
                one_root=generation == "2024",
                gathered_fp8=gathered,
            ),
            kernels=Kernels(
                attention="flash",
                module="torchtitan",
                compiled=compiled,
                graphs=_graphs(keys, degrees, generation),
                loss="chunked" if chunks > 1 else "compiled" if compiled_loss else "whole",
                loss_chunks=chunks,
                loss_parallel=not _whole_loss(keys),
                fused_norms=generation in _RECENT,
                repeated_heads=True,
                quirks=Quirks(stage_outputs=generation not in _RECENT),
            ),
            experts=experts,
            adapters=_adapters(keys, model),
        ),
        gpu=gpu,
    )
    return ReadRun(run=legal(run), ignored=keys.ignored(_HARMLESS, _KNOWN, _UNPRICED))


def _model(keys: Keys) -> Model:
    name, size = keys.text("model.name", "llama3"), keys.text("model.flavor", "debugmodel")
    found = flavour(name, size)
    if found is None:
        known = FLAVOURS.get(name)
        names = ", ".join(known if known is not None else FLAVOURS)
        raise keys.unpriced(
            "model.flavor" if known is not None else "model.name",
            f"{shorten(size if known is not None else name)} is unknown",
            f"Use {names}",
        )
    return found


def _experts(keys: Keys, degrees: TitanDegrees) -> ExpertKernels:
    """Return the kernels of dispatch and combine: PyTorch's all-to-all or DeepEP."""
    known, key = ("standard", "deepep"), "parallelism.expert_parallel_comm_backend"
    if keys.values.get("model.moe_comm_backend") in known:  # of 0.3
        key = "model.moe_comm_backend"
    fused = degrees.ep > 1 and keys.choice(key, known, "standard") == "deepep"
    return replace(TORCH_EXPERTS, dispatcher="flex") if fused else TORCH_EXPERTS


def _adapters(keys: Keys, model: Model) -> Adapters | None:
    """Return the adapters of `LoRAConverter`; None without one.

    Names that match no module are ignored, as by torchtitan. Raises DocumentError if none matches
    or if torchtitan cannot build an adapter, and UnpricedError for adapters that are not counted.
    """
    if not keys.has("lora.rank"):
        return None
    key, asked = "lora.target_modules", "Name modules of layers, such as wqkv, wo"
    names, own = frozenset(keys.text(key).split(",")), linear_modules(model)
    if not keys.has(key):
        names = own
    if names & own & UNSHARDED:
        found = min(names & own & UNSHARDED)
        raise keys.fail(key, f"adapters on {found} end with an AssertionError", asked)
    if not names & own:
        raise keys.fail(key, "matches no module, so nothing is trained", asked)
    if "lm_head" in names or model.attention.latent is not None:
        what = "adapters of the head are" if "lm_head" in names else "latent attention is"
        raise keys.unpriced(key, f"{what} not counted", asked)
    if keys.text("training.dtype", "float32") != "bfloat16":
        problem = "frozen weights of 32 bits are not counted"
        raise keys.unpriced("training.dtype", problem, "Use bfloat16")
    targets = targets_of(names & own)
    if set(adapted_modules(model, targets)) != names & own:
        raise keys.unpriced(key, "one of w1, w3 without the other is not counted", "Name both")
    return Adapters(rank=keys.number("lora.rank", 8), targets=targets, fused="qkv")


def _optimizer(keys: Keys, zero: int) -> Optimizer:
    """Return the optimizer, with bf16 states or offloaded states where the file sets them."""
    found = Optimizer()
    if keys.text("training.dtype", "float32") == "bfloat16":
        found = of_narrow_weights(found)
    if keys.flag("training.enable_cpu_offload") and zero:
        found = replace(found, offload=1.0, offload_master=True, offload_weights=True)
    return found


def _refuse(keys: Keys) -> None:
    """Raise UnpricedError for settings that affect memory or time and are not modelled."""
    asked = "Remove it to price the rest"
    for key, why in (
        ("optimizer.early_step_in_backward", "gradients are stepped as they are made"),
        ("liger_kernel.enable_fused_linear_cross_entropy", "the loss makes no logits"),
    ):
        if keys.flag(key):
            raise keys.unpriced(key, why, asked)
    if keys.text("training.dtype", "float32") not in ("float32", "bfloat16"):
        raise keys.unpriced("training.dtype", "weights and optimizer states have 16 bits", asked)
    name = keys.text("optimizer.name", "AdamW")
    if name not in ("Adam", "AdamW"):
        raise keys.unpriced("optimizer.name", f"{shorten(name)} has other optimizer states", asked)


_FLOAT8 = frozenset({"float8", "quantize.linear.float8", "quantize.dense.float8"})
_BLOCKS = frozenset({"mx", "quantize.linear.mx", "quantize.dense.mx"})
"""Converters of linear layers to fp8 and to mxfp8."""


def _converters(keys: Keys) -> frozenset[str]:
    """Return the converters of a job file; raises UnpricedError for one that is not priced."""
    given = keys.values.get("model.converters")
    if isinstance(given, list) and "" in given:
        raise keys.fail("model.converters", "expected names of converters, got an empty text")
    found = frozenset(filter(None, keys.text("model.converters").replace(" ", "").split(",")))
    for name in sorted(found - _FLOAT8 - _BLOCKS):
        asked = "Remove it to price the rest"
        raise keys.unpriced("model.converters", f"{shorten(name)} is not priced", asked)
    return found


def _precision(keys: Keys) -> tuple[Precision, bool]:
    """Return the precision and True if FSDP2 gathers weights in fp8."""
    wide = keys.choice("training.mixed_precision_param", ("bfloat16", "float32"), "bfloat16")
    converters = _converters(keys)
    old = keys.flag("float8.enable_float8_linear") or keys.flag("training.enable_float8_linear")
    linear = bool(converters & _FLOAT8) or old
    blocks = bool(converters & _BLOCKS)
    gathers = keys.first(
        "float8.enable_fsdp_float8_all_gather",
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
        "quantize.dense.float8.enable_fsdp_float8_all_gather",
    )
    scales = ("float8", "quantize.linear.float8", "quantize.dense.float8")
    rows = any(keys.text(f"{one}.recipe_name").startswith("rowwise") for one in scales)
    precision = Precision(
        kind="fp32" if wide == "float32" else "bf16",
        fp8=linear or blocks,
        fp8_recipe="mxfp8" if blocks else "tensorwise",
        row_scales=linear and rows,
    )
    return precision, linear and keys.flag(gathers)


def _compiled(keys: Keys, generation: Generation) -> tuple[bool, bool]:
    """Return (True if layers are compiled, True if the loss is compiled).

    Releases of 2024 do not compile the loss.
    """
    if generation in _RECENT and not keys.has("training.compile"):
        parts = keys.text("compile.components", "model,loss").split(",")
        on = keys.flag("compile.enable")
        return on and "model" in parts, on and "loss" in parts
    on = keys.flag("training.compile")
    return on, on and generation != "2024"


def _recompute(keys: Keys) -> tuple[Recomputation, int]:
    """Return (recomputed modules of a layer, n): every n-th layer of a stage is recomputed.

    Raises UnpricedError for the mode `memory_budget`.
    """
    mode = keys.choice(
        "activation_checkpoint.mode", ("none", "selective", "full", "memory_budget"), "selective"
    )
    if mode == "memory_budget":
        raise keys.unpriced(
            "activation_checkpoint.mode",
            "the compiler selects saved activations within a budget",
            "Use selective or full",
        )
    if mode == "none":
        return frozenset(), 1
    if mode == "full":
        return "full", 1
    option = keys.text("activation_checkpoint.selective_ac_option", "2")
    if option == "op":
        return "op", 1
    return "full", keys.number("activation_checkpoint.selective_ac_option", 2)


def _batch(keys: Keys, degrees: TitanDegrees, generation: Generation) -> tuple[int, int]:
    """Return the micro-batch size of a rank and the global batch size, in sequences.

    Raises InputError if the micro-batch does not divide the local batch or the global batch.
    """
    name = keys.first("training.local_batch_size", "training.batch_size")
    local = keys.number(name, 8)
    total = keys.number("training.global_batch_size", -1, least=-1)
    batch = local * degrees.dp if total < 1 else total
    refuse(BATCH, {"global_batch": batch, "micro_batch": local, "dp": degrees.dp})
    if degrees.pp == 1:
        return local, batch
    if generation == "2024":
        parts = keys.number("experimental.pipeline_parallel_microbatches", degrees.pp)
        refuse(LOCAL_BATCH, {"local_batch": local, "parts": parts})
        return local // parts, batch
    micro = keys.number("parallelism.pipeline_parallel_microbatch_size", 1)
    refuse(LOCAL_BATCH, {"local_batch": local, "micro_batch": micro})
    return micro, batch


def _graphs(keys: Keys, degrees: TitanDegrees, generation: Generation) -> Graphs:
    """Return the CUDA graphs of the forward and backward pass, which 0.3 has by default.

    Pipelines have none, and neither have experts of several ranks, whose dispatch waits for the
    host.
    """
    on = generation == "0.3" and not keys.flag("training.disable_cuda_graphs")
    return "full" if on and degrees.pp == degrees.ep == 1 else "none"


def _zero(keys: Keys, degrees: TitanDegrees, generation: Generation) -> Literal[0, 2, 3]:
    """Return the ZeRO stage: 0 for replicas, 2 if weights stay gathered, 3 if they are resharded.

    With pipeline stages the default is 2, so that micro-batches do not gather weights again. Since
    0.3 FSDP2 also copies weights that are not sharded (`apply_fsdp_to_decoder`).
    """
    policy = keys.choice(
        "parallelism.fsdp_reshard_after_forward", ("default", "always", "never"), "default"
    )
    if degrees.shard * degrees.cp == 1 and generation != "0.3":
        return 0
    if policy == "default":
        return 2 if degrees.pp > 1 else 3
    return 3 if policy == "always" else 2


def _schedule(keys: Keys, pp: int) -> Schedule:
    """Return the pipeline schedule; 1F1B for a single stage.

    Raises UnpricedError for an unsupported schedule or a schedule from a CSV file.
    """
    if pp == 1:
        return "1f1b"
    file = "parallelism.pipeline_parallel_schedule_csv"
    if keys.text(file):
        raise keys.unpriced(file, "is a custom schedule", "Use a named schedule")
    name = keys.first(
        "parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule"
    )
    text = keys.text(name, "1F1B")
    schedule = schedule_named(text)
    if schedule is None:
        raise keys.unpriced(
            name, f"live activations of {shorten(text)} are not counted",
            f"Use {', '.join(TORCH_NAMES.values())}",
        )  # fmt: skip
    return schedule


def _chunks(
    keys: Keys,
    model: Model,
    degrees: TitanDegrees,
    generation: Generation,
    schedule: Schedule,
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the model chunks of every pipeline stage.

    Release 0.2 counts the embedding and the head as one layer each. Raises InputError if the
    schedule does not allow this number of chunks per rank.
    """
    pp = degrees.pp
    if pp == 1:
        return chunks_of_sizes([model.num_layers], 1)
    sizes = _sizes(keys, model, degrees, generation, schedule)
    refuse(WHOLE_STAGES, {"stages": len(sizes), "pp": pp})
    facts, chunks = SCHEDULES[schedule], len(sizes) // pp
    if chunks < facts.least_chunks or (facts.most_chunks and chunks > facts.most_chunks):
        least = f"{facts.least_chunks}" + ("" if facts.most_chunks else " or more")
        name = "stage" if least == "1" else "stages"
        raise InputError(
            f"{TORCH_NAMES[schedule]} needs {least} {name} per rank, got "
            f"{len(sizes)} stages on pp({pp})"
        )
    return chunks_of_sizes(sizes, pp, schedule=schedule)


def _sizes(
    keys: Keys,
    model: Model,
    degrees: TitanDegrees,
    generation: Generation,
    schedule: Schedule,
) -> list[int]:
    """Return the number of layers of each model chunk, in the order of the model."""
    layers, pp = model.num_layers, degrees.pp
    if keys.has("parallelism.module_fqns_per_model_part"):
        return _listed(keys, model)
    points = keys.first(
        "parallelism.pipeline_parallel_split_points", "experimental.pipeline_parallel_split_points"
    )
    if keys.text(points):
        return _split(keys, points, layers)
    ends = (0, 0)
    if generation in _RECENT:
        ends = (
            keys.number("parallelism.pipeline_parallel_first_stage_less_layers", 1, least=0),
            keys.number("parallelism.pipeline_parallel_last_stage_less_layers", 1, least=0),
        )
    counted = layers + sum(ends)
    each = keys.number("parallelism.pipeline_parallel_layers_per_stage", 0, least=0)
    parts = -(-counted // each) if each else pp * SCHEDULES[schedule].least_chunks
    base, extra = divmod(counted, parts)
    sizes = [base + (at < extra) for at in range(parts)]
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    if min(sizes) < 0:
        raise InputError(f"{layers} layers are too few for {parts} stages")
    return sizes


def _split(keys: Keys, key: str, layers: int) -> list[int]:
    """Return the number of layers of each model chunk, from split points such as `layers.8`.

    Each split point is the first layer of a chunk. Raises DocumentError if they do not increase.
    """
    places = [0]
    for point in keys.text(key).split(","):
        number = point.strip().removeprefix("layers.")
        if not number.isdigit() or not places[-1] < int(number) < layers:
            raise keys.fail(
                key, f"expected increasing names such as layers.8, got {shorten(point)}"
            )
        places.append(int(number))
    places.append(layers)
    return [until - start for start, until in pairwise(places)]


def _listed(keys: Keys, model: Model) -> list[int]:
    key = "parallelism.module_fqns_per_model_part"
    parts = keys.values[key]
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise keys.fail(key, "expected a list of lists of module names")
    sizes = [sum(str(name).startswith("layers.") for name in part) for part in parts]
    if sum(sizes) != model.num_layers:
        raise keys.fail(
            key,
            f"places {sum(sizes)} layers in {len(sizes)} stages, but the model "
            f"has {model.num_layers}",
        )
    return sizes


def _async(keys: Keys) -> bool:
    name = "enable_async_tensor_parallel"
    return keys.flag(keys.first(f"compile.{name}", f"parallelism.{name}", f"experimental.{name}"))


def _whole_loss(keys: Keys) -> bool:
    """Return True if tensor-parallel ranks gather the logits for the loss."""
    return keys.flag("parallelism.disable_loss_parallel") or not keys.flag(
        "training.enable_loss_parallel", True
    )
