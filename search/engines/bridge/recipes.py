"""Settings of Megatron-Bridge recipes by dotted key, without the overrides of a file.

Keys are fields of `ConfigContainer`, such as `model.tensor_model_parallel_size`. Sources:

- library recipes: `src/megatron/bridge/recipes` (`_pretrain_common` and a function per name),
- performance recipes: `scripts/performance/configs` and `src/megatron/bridge/perf_recipes`
  (`_benchmark_common`).

`search.engines.bridge.read` reads the overrides of a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from autopar.records import Record
from autopar.run.architecture import Model
from autopar.run.strategy import Strategy
from search.engines.bridge.presets import Preset, preset_of, preset_variants
from search.engines.huggingface.architectures import architecture, architecture_names

Settings = dict[str, Any]
"""Values by dotted key; None means `null`."""


class Recipe(Record):
    """Recipe of Megatron-Bridge: model, type and settings."""

    name: str
    model: str | None
    """Name of the architecture (`architecture`); None: its sizes are unknown."""
    kind: Literal["library", "performance", "tuning"]
    """Type of the recipe. `tuning` is fine-tuning; adapters of some models are known."""
    settings: Settings
    num_gpus: int | None = None
    """Number of GPUs of the recipe. The global batch size scales in proportion to the GPUs of the
    run; None: not scaled."""
    notes: tuple[str, ...] = ()
    """Sentences for the user on assumptions and unknown settings."""


# --------------------------------------------------------------------------------------------------
# Precisions. Source: `src/megatron/bridge/training/mixed_precision.py`.


_FP8 = {"fp8": "hybrid", "fp8_param_gather": True}
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16_mixed": {"bf16": True},
    "fp16_mixed": {"fp16": True, "grad_reduce_in_fp32": False},
    "bf16_with_fp8_delayed_scaling_mixed": {"bf16": True, **_FP8, "fp8_recipe": "delayed"},
    "bf16_with_fp8_mixed": {"bf16": True, **_FP8, "fp8_recipe": "delayed"},
    "bf16_with_fp8_current_scaling_mixed": {"bf16": True, **_FP8, "fp8_recipe": "tensorwise",
                                            "first_last_layers_bf16": True},
    "bf16_with_mxfp8_mixed": {"bf16": True, **_FP8, "fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "bf16_with_fp8_subchannel_scaling_mixed": {"bf16": True, **_FP8, "fp8_recipe": "blockwise",
                                               "fp8_param_gather": False},
    "bf16_with_nvfp4_mixed": {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
}  # fmt: skip
"""Name of a mixed-precision recipe -> fields of `MixedPrecisionConfig` that differ from `_OFF`."""
_OFF: Mapping[str, Any] = {
    "bf16": False,
    "fp16": False,
    "fp8": None,
    "fp8_recipe": "tensorwise",
    "fp8_param_gather": False,
    "first_last_layers_bf16": False,
    "fp4": None,
    "grad_reduce_in_fp32": True,
}
"""Defaults of `MixedPrecisionConfig`."""
_DTYPES = {
    "bf16": "bf16_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "fp8_ss": "bf16_with_fp8_subchannel_scaling_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""Precision in the names of performance recipes -> name of the mixed-precision recipe."""


def precision_settings(name: str) -> Settings | None:
    """Return the settings of a mixed-precision recipe by dotted key; None: unknown name."""
    fields = PRECISIONS.get(name.replace("-", "_"))
    if fields is None:
        return None
    return {f"mixed_precision.{key}": value for key, value in {**_OFF, **fields}.items()}


# --------------------------------------------------------------------------------------------------
# Library recipes.


_COMMON: Mapping[str, Any] = {
    "train.global_batch_size": 32,
    "train.micro_batch_size": 2,
    "model.seq_length": 4096,
    "model.tensor_model_parallel_size": 1,
    "model.pipeline_model_parallel_size": 1,
    "model.context_parallel_size": 1,
    "model.sequence_parallel": False,
    "model.cross_entropy_loss_fusion": True,
    "model.cross_entropy_fusion_impl": "te",
    "ddp.use_distributed_optimizer": True,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "dataset.skip_getting_attention_mask_from_dataset": True,
}
"""Settings of `_pretrain_common` in `recipes/common.py`, and those that all models share."""
_OF_EXPERTS: Mapping[str, Any] = {
    "model.expert_tensor_parallel_size": 1,
    "model.moe_token_dispatcher_type": "alltoall",
    "model.moe_permute_fusion": True,
    "model.moe_grouped_gemm": True,
}


def _degrees(
    tp: int, pp: int, cp: int, batch: int, seq: int, *, vp: int | None = None, **more: Any
) -> Settings:
    return {
        "model.tensor_model_parallel_size": tp,
        "model.pipeline_model_parallel_size": pp,
        "model.virtual_pipeline_model_parallel_size": vp,
        "model.context_parallel_size": cp,
        "model.sequence_parallel": tp > 1,
        "model.seq_length": seq,
        "train.global_batch_size": batch,
        "train.micro_batch_size": 1,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def _plain(tp: int, pp: int, **more: Any) -> Settings:
    """Return the settings of a recipe that overrides only degrees of `_pretrain_common`."""
    found = _degrees(tp, pp, 1, 32, 4 * _K, **more)
    return {**found, "model.sequence_parallel": False, "train.micro_batch_size": 2}


_OVERLAP: Mapping[str, Any] = {"comm_overlap__tp_comm_overlap": True}
_FLEX: Mapping[str, Any] = {"model__moe_token_dispatcher_type": "flex"}
_ENDS: Mapping[str, Any] = {
    "model__account_for_embedding_in_pipeline_split": True,
    "model__account_for_loss_in_pipeline_split": True,
}
_K = 1024
_LIBRARY: Mapping[str, Settings] = {
    "llama32_1b": _degrees(1, 1, 1, 512, 8 * _K),
    "llama32_3b": _degrees(1, 1, 1, 512, 8 * _K),
    "llama3_8b": _degrees(1, 1, 2, 512, 8 * _K),
    "llama3_8b_16k": _degrees(4, 2, 2, 512, 16 * _K),
    "llama3_8b_64k": _degrees(4, 2, 4, 512, 64 * _K),
    "llama31_8b": _degrees(1, 1, 2, 512, 8 * _K),
    "llama3_70b": _degrees(4, 4, 2, 512, 8 * _K, vp=5, **_OVERLAP),
    "llama3_70b_16k": _degrees(8, 2, 2, 512, 16 * _K, **_OVERLAP),
    "llama3_70b_64k": _degrees(8, 4, 8, 512, 64 * _K, **_OVERLAP),
    "llama31_70b": _degrees(4, 4, 2, 512, 128 * _K, vp=5, **_OVERLAP),
    "llama31_405b": _degrees(8, 8, 4, 512, 128 * _K, vp=2, **_OVERLAP, **_ENDS),
    "qwen3_600m": _plain(1, 1),
    "qwen3_1p7b": _plain(1, 1),
    "qwen3_4b": _plain(2, 1),
    "qwen3_8b": _plain(4, 1),
    "qwen3_14b": _plain(8, 1),
    "qwen3_32b": _plain(
        8, 2, model__recompute_granularity="full", model__recompute_method="uniform",
        model__recompute_num_layers=1,
    ),
    "qwen3_30b_a3b": _degrees(
        1, 1, 1, 1024, 4 * _K, model__expert_model_parallel_size=16, **_FLEX, **_OVERLAP,
        model__moe_flex_dispatcher_backend="hybridep",
        mixed_precision__grad_reduce_in_fp32=False,
        model__cuda_graph_impl="transformer_engine",
        model__cuda_graph_scope=["moe_router", "moe_preprocess"],
    ),
    "qwen3_235b_a22b": _degrees(
        4, 16, 2, 32, 4 * _K, model__expert_model_parallel_size=8, **_FLEX, **_ENDS,
        model__moe_flex_dispatcher_backend="deepep",
    ),
    "deepseek_v3": _degrees(
        2, 16, 1, 4 * _K, 4 * _K, model__expert_model_parallel_size=64, **_FLEX,
        model__moe_flex_dispatcher_backend="hybridep",
        mixed_precision__grad_reduce_in_fp32=False,
        comm_overlap__tp_comm_overlap=False,
        optimizer__use_precision_aware_optimizer=True,
        optimizer__exp_avg_dtype="bfloat16", optimizer__exp_avg_sq_dtype="bfloat16",
    ),
    "deepseek_v3_32nodes": _degrees(
        2, 8, 1, 4 * _K, 4 * _K, model__expert_model_parallel_size=32, **_FLEX,
        model__moe_flex_dispatcher_backend="hybridep",
        mixed_precision__grad_reduce_in_fp32=False,
        comm_overlap__tp_comm_overlap=False,
        optimizer__use_precision_aware_optimizer=True,
        optimizer__exp_avg_dtype="bfloat16", optimizer__exp_avg_sq_dtype="bfloat16",
        model__recompute_granularity="full", model__recompute_method="uniform",
        model__recompute_num_layers=1,
    ),
    "gpt_oss_20b": _degrees(
        2, 4, 1, 512, 4 * _K, model__expert_model_parallel_size=4,
        model__cross_entropy_fusion_impl="native",
    ),
    "gpt_oss_120b": _degrees(
        2, 4, 1, 512, 4 * _K, model__expert_model_parallel_size=16,
        model__cross_entropy_fusion_impl="native",
    ),
}  # fmt: skip
"""NAME -> settings of the recipe function `NAME_pretrain_config`."""


def _tuned(
    tp: int = 1, pp: int = 1, *, batch: int = 8, seq: int = 2 * _K, rank: int = 32, **more: Any
) -> Settings:
    """Return the settings of a recipe for adapters, those of `_peft_common` included."""
    return {
        **_degrees(tp, pp, 1, batch, seq, **more),
        "model.sequence_parallel": "ddp__overlap_grad_reduce" in more,
        "model.cross_entropy_loss_fusion": True,
        "model.cross_entropy_fusion_impl": "native",
        "dataset.seq_length": seq,
        "dataset.skip_getting_attention_mask_from_dataset": True,
        PACKS: True,
        "peft.dim": rank,
        "peft.target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
        "peft.dropout": 0.0,
        **{key.replace("__", "."): value for key, value in more.items() if key != "vp"},
    }


PACKS = "dataset.enable_offline_packing"
"""Key of packed samples, which all recipes for adapters have."""
_NARROW: Mapping[str, Any] = {"peft__target_modules": ["linear_qkv", "linear_proj"]}
_SHARDED: Mapping[str, Any] = {
    f"ddp__{name}": True
    for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
}
_TUNED: Mapping[str, Settings] = {
    "llama32_1b": _tuned(seq=4 * _K),
    "llama32_3b": _tuned(seq=4 * _K),
    "llama3_8b": _tuned(seq=4 * _K, rank=8),
    "llama31_8b": _tuned(seq=4 * _K, rank=8),
    "llama3_70b": _tuned(8, seq=4 * _K, rank=16),
    "llama31_70b": _tuned(8, seq=4 * _K, rank=16),
    "llama31_405b": _tuned(
        4, 8, vp=8, batch=32, rank=16, model__sequence_parallel=True, **_ENDS,
        mixed_precision__grad_reduce_in_fp32=False, peft__target_modules=["linear_qkv"],
        comm_overlap__tp_comm_overlap=False,
    ),
    "qwen25_7b": _tuned(batch=128),
    "qwen25_72b": _tuned(8, batch=128),
    "qwen3_600m": _tuned(),
    "qwen3_1p7b": _tuned(),
    "qwen3_4b": _tuned(),
    "qwen3_8b": _tuned(batch=32, rank=8, ddp__use_distributed_optimizer=True, **_NARROW),
    "qwen3_14b": _tuned(),
    "qwen3_32b": _tuned(
        model__recompute_granularity="full", model__recompute_method="uniform",
        model__recompute_num_layers=1,
    ),
    "qwen3_30b_a3b": _tuned(
        4, batch=32, rank=8, model__expert_model_parallel_size=4, **_NARROW, **_SHARDED,
        model__cross_entropy_fusion_impl="te",
    ),
    "qwen3_235b_a22b": _tuned(
        4, 4, batch=32, rank=8, model__expert_model_parallel_size=4, **_NARROW, **_SHARDED,
        **_ENDS, model__cross_entropy_fusion_impl="te",
    ),
    "gpt_oss_20b": _tuned(batch=128),
    "gpt_oss_120b": _tuned(batch=128, model__expert_model_parallel_size=8),
}  # fmt: skip
"""NAME -> settings of the recipe function `NAME_peft_config`."""
_ADAPTING = re.compile(r"(?P<model>\w+)_peft_config")
_NAMED = re.compile(r"(?P<model>\w+?)_pretrain_config(?P<tail>_32nodes)?")
_FLAT = re.compile(
    r"(?P<model>\w+?)_pretrain_(?P<gpus>[0-9]{1,5})gpu_(?P<gpu>[a-z]+[0-9]+)_"
    r"(?P<dtype>bf16|fp8[a-z]{2}|nvfp4)(?:_(?P<variant>\w+?))?_config"
)
_TUNING = re.compile(r"\w*_(sft|peft|lora|dora|finetune|dpo|distill)(_\w+)?")


def named_recipe(name: str) -> Recipe:
    """Return a recipe by its function name, such as `llama3_8b_pretrain_config`.

    A recipe of an unknown model is returned without model and settings.
    """
    adapting = _ADAPTING.fullmatch(name)
    if adapting is not None and adapting["model"] in _TUNED:
        model = adapting["model"]
        found = {**(_model_settings(model) or {}), **_precision("bf16_mixed"), **_TUNED[model]}
        return Recipe(name=name, model=model, kind="tuning", settings=found)
    if _TUNING.fullmatch(name):
        return Recipe(name=name, model=_model_in(name), kind="tuning", settings={})
    flat = _FLAT.fullmatch(name)
    if flat is not None:
        dtype = flat["dtype"]
        return performance_recipe(
            flat["model"],
            flat["gpu"],
            f"fp8_{dtype[3:]}" if dtype.startswith("fp8") else dtype,
            flat["variant"],
            name=name,
            num_gpus=int(flat["gpus"]),
        )
    plain = _NAMED.fullmatch(name)
    model = plain["model"] + (plain["tail"] or "") if plain is not None else name
    settings = _LIBRARY.get(model)
    shape = model.removesuffix("_32nodes")
    if settings is not None:
        shape = re.sub(r"_[0-9]+k$", "", shape)
    sizes = _model_settings(shape)
    if sizes is None:
        return Recipe(name=name, model=None, kind="library", settings={})
    notes: tuple[str, ...] = ()
    if settings is None:
        text = f"settings of {name} apart from its model are unknown; using degrees 1 and batch "
        notes = (text + "32 where the file does not set them",)
    found = {**sizes, **_COMMON, **_precision("bf16_mixed"), **(settings or {})}
    return Recipe(name=name, model=shape, kind="library", settings=found, notes=notes)


def recipe_model(model: Model, name: str | None, *, tuned: bool = False) -> str | None:
    """Return the architecture of a model by its name, else by its sizes; None if it is unknown.

    tuned : True for models with a recipe for adapters only.
    """
    named = None if name is None else name.replace("-", "_").replace(".", "p")
    known = [one for one in architecture_names() if not tuned or one in _TUNED]
    if named in known:
        return named
    return next((one for one in reversed(known) if _alike(architecture(one), model)), None)


def _alike(sizes: Settings | None, model: Model) -> bool:
    experts = model.experts
    return (
        sizes is not None
        and sizes["num_layers"] == model.num_layers
        and sizes["hidden_size"] == model.hidden
        and sizes["num_attention_heads"] == model.attention.heads
        and sizes["vocab_size"] == model.vocab
        and sizes.get("num_moe_experts") == (None if experts is None else experts.number)
    )


def _model_in(text: str) -> str | None:
    """Return the longest name of `architecture_names` in a text; None: no such name."""
    return next((name for name in architecture_names() if name in text), None)


def _model_settings(model: str) -> Settings | None:
    sizes = architecture(model)
    if sizes is None:
        return None
    found = {f"model.{key}": value for key, value in sizes.items()}
    return {**found, **_OF_EXPERTS} if "num_moe_experts" in sizes else found


def _precision(name: str) -> Settings:
    found = precision_settings(name)
    assert found is not None, "a recipe of ours"
    return found


# --------------------------------------------------------------------------------------------------
# Performance recipes.


_SEQ = {"llama": 8 * _K}
"""Model family -> sequence length in tokens; 4,096 for other families."""


def performance_recipe(
    model: str,
    gpu: str,
    precision: str,
    variant: str | None,
    *,
    name: str | None = None,
    num_gpus: int | None = None,
    own: frozenset[str] = frozenset(),
) -> Recipe:
    """Return the performance recipe for a model, a device and a precision.

    variant : such as `v1`; None: the newest.
    name, num_gpus : name of a flat recipe and the number of GPUs in it; None: not a flat recipe.
    own : keys that the file sets. A note lists the variants unless they differ only in these.
    """
    title = name or f"{model} on {gpu} in {precision}"
    sizes = _model_settings(model)
    if sizes is None:
        return Recipe(name=title, model=None, kind="performance", settings={})
    settings = {**sizes, **_COMMON, **_precision(_DTYPES.get(precision, "bf16_mixed"))}
    settings |= _benchmark(model, precision, gpu)
    if precision == "bf16":
        settings["optimizer.use_precision_aware_optimizer"] = True
    if "model.num_moe_experts" in sizes:
        settings["model.moe_router_force_load_balancing"] = True
    # The library recipe sets the data types of Adam's moments.
    settings |= {k: v for k, v in _LIBRARY.get(model, {}).items() if k.startswith("optimizer.")}
    if "model.account_for_loss_in_pipeline_split" in _LIBRARY.get(model, {}):
        settings |= {key.replace("__", "."): value for key, value in _ENDS.items()}
    preset = preset_of(model, gpu, precision, variant)
    if preset is None:
        known = ", ".join(preset_variants(model, gpu, precision))
        return Recipe(
            name=title,
            model=model,
            kind="performance",
            settings=settings,
            notes=(
                f"the preset of {title} is unknown"
                + (f", known variants are {known}" if known else "")
                + ": defaults are 1, and batch 32",
            ),
        )
    settings |= _of_preset(preset)
    variants = preset_variants(model, gpu, precision)
    notes = list[str]()
    others = [preset_of(model, gpu, precision, other) for other in variants]
    left = [
        {k: v for k, v in _of_preset(other).items() if k not in own}
        for other in others
        if other is not None
    ]
    if variant is None and any(one != left[0] for one in left):
        notes.append(f"variants {', '.join(variants)} of {title}: using {preset.variant}")
    # In a flat recipe for another number of GPUs, the batch is scaled in proportion.
    if num_gpus is not None and num_gpus != preset.num_gpus:
        settings["train.global_batch_size"] = preset.global_batch * num_gpus // preset.num_gpus
        notes.append(f"{title} is the recipe of {preset.num_gpus} GPUs; its batch is scaled")
    return Recipe(
        name=title,
        model=model,
        kind="performance",
        settings=settings,
        num_gpus=num_gpus or preset.num_gpus,
        notes=tuple(notes),
    )


def _benchmark(model: str, precision: str, gpu: str) -> Settings:
    """Return the settings of `_benchmark_common` and those common to a model family."""
    family = re.match("[a-z]+", model)
    seq = _SEQ.get(family[0], 4 * _K) if family is not None else 4 * _K
    # nvfp4, DeepSeek models, and Qwen3-235B on H100 run without TP overlap. With one tensor rank
    # the setting has no effect.
    overlap = precision != "nvfp4" and not model.startswith("deepseek")
    overlap &= not (model == "qwen3_235b_a22b" and gpu == "h100")
    return {
        "model.seq_length": seq,
        "model.should_pad_vocab": True,
        "model.apply_rope_fusion": True,
        "mixed_precision.grad_reduce_in_fp32": False,
        "mixed_precision.first_last_layers_bf16": False,
        "comm_overlap.tp_comm_overlap": overlap,
        "train.train_iters": 50,
    }


def _of_preset(preset: Preset) -> Settings:
    settings: Settings = {
        "model.tensor_model_parallel_size": preset.tp,
        "model.pipeline_model_parallel_size": preset.pp,
        "model.context_parallel_size": preset.cp,
        "model.virtual_pipeline_model_parallel_size": preset.vp,
        "model.sequence_parallel": preset.tp > 1,
        "train.global_batch_size": preset.global_batch,
        "train.micro_batch_size": preset.micro_batch,
    }
    if preset.ep > 1 or preset.etp is not None:
        settings |= {
            "model.expert_model_parallel_size": preset.ep,
            "model.expert_tensor_parallel_size": preset.etp,
            "model.moe_flex_dispatcher_backend": preset.dispatcher,
            "model.moe_token_dispatcher_type": "flex" if preset.dispatcher else "alltoall",
        }
    if preset.fsdp:
        settings |= {
            "ddp.use_megatron_fsdp": True,
            "ddp.data_parallel_sharding_strategy": "optim_grads_params",
            "model.gradient_accumulation_fusion": False,
        }
    if preset.offload is not None:
        settings |= {
            "model.cpu_offloading": True,
            "model.cpu_offloading_num_layers": preset.offload,
        }
    if preset.recompute_layers is not None:
        settings |= {
            "model.recompute_granularity": "full",
            "model.recompute_method": "block",
            "model.recompute_num_layers": preset.recompute_layers,
        }
    if preset.recompute_modules:
        settings |= {
            "model.recompute_granularity": "selective",
            "model.recompute_modules": list(preset.recompute_modules),
        }
    if preset.graphs is not None:
        settings |= {
            "model.cuda_graph_impl": preset.graphs,
            "model.cuda_graph_scope": list(preset.graph_scope),
        }
    if preset.overlap_experts:
        settings["comm_overlap.overlap_moe_expert_parallel_comm"] = True
    if preset.layout is not None:
        settings["model.pipeline_model_parallel_layout"] = preset.layout
    if preset.fused_mlp:
        settings["model.use_transformer_engine_op_fuser"] = True
    if preset.fp8_attention:
        settings["mixed_precision.fp8_dot_product_attention"] = True
    if preset.fp8_head:
        settings["model.fp8_output_proj"] = True
    return settings


# --------------------------------------------------------------------------------------------------
# Recomputation and layer layouts.


def recompute_settings(strategy: Strategy) -> Settings:
    """Return the recomputation settings of a strategy by dotted key."""
    kind, number, modules = strategy.recomputed
    whole, some = kind in ("full", "block"), kind == "modules"
    method = "uniform" if kind == "full" else "block"
    return {
        "model.recompute_granularity": "full" if whole else "selective" if some else None,
        "model.recompute_method": method if whole else None,
        "model.recompute_num_layers": number if whole else None,
        "model.recompute_modules": sorted(modules) if some else None,
    }


_DEEPSEEK_PARTS = {
    4: (16, 16, 16, 13),
    8: (8,) * 7 + (5,),
    16: (4,) * 15 + (1,),
}
"""Number of model chunks (pp * virtual pipeline size) -> layers of each chunk. Source: `layout_map`
of `recipes/deepseek/deepseek_v3.py`, which supports no other numbers of chunks."""
_DEEPSEEK_KNOWN = {(4, 1), (8, 1), (4, 2), (16, 1), (8, 2), (4, 4)}


def layout_of(model: str | None, pp: int, vp: int, mtp: int) -> str | None:
    """Return the pipeline layout string in the recipes of DeepSeek-V3 and Kimi K2.

    vp : virtual pipeline size.
    mtp : number of MTP layers.

    None: other model, or the recipes contain no layout for this pp and vp.
    """
    if model not in ("deepseek_v3", "kimi_k2") or (pp, vp) not in _DEEPSEEK_KNOWN:
        return None
    parts = ["t" * layers for layers in _DEEPSEEK_PARTS[pp * vp]]
    further = f"m*{mtp}" if mtp else ""
    return "|".join(["E" + parts[0], *parts[1:-1], parts[-1] + further + "L"])
