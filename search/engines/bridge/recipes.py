"""Settings of Megatron-Bridge recipes by dotted key, without the overrides of a file.

Keys are fields of `ConfigContainer`, such as `model.tensor_model_parallel_size`. Sources:

- library recipes: `src/megatron/bridge/recipes` (`_pretrain_common` and a function per name),
- performance recipes: `scripts/performance/configs` and `src/megatron/bridge/perf_recipes`
  (`_benchmark_common`).

`search.engines.bridge.read` reads the overrides of a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import field

from autopar.records import Record, replace
from autopar.run.architecture import Model
from autopar.run.strategy import Strategy
from search.engines.huggingface.architectures import architecture, architecture_names

DATA = Path(__file__).with_name("recipes.json")
LIBRARY = "recipes."
"""Prefix of a library recipe that has the name of a performance recipe."""
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


def precision_settings(name: str) -> Settings | None:
    """Return the settings of a mixed-precision recipe by dotted key; None: unknown name."""
    fields = PRECISIONS.get(name.replace("-", "_"))
    if fields is None:
        return None
    return {f"mixed_precision.{key}": value for key, value in {**_OFF, **fields}.items()}


# --------------------------------------------------------------------------------------------------
# Recipes by name, of the releases in `recipes.json`.


class _Row(Record):
    """Recipe in the file: its differences from another one."""

    hub: str | None = None
    """Name of the model on the Hugging Face hub; None: the recipe sets its sizes."""
    gpus: int | None = None
    """Number of GPUs of a performance recipe; None: a library recipe."""
    like: str | None = None
    """`RELEASE/NAME` of a recipe before it whose settings this one has; None: no other."""
    without: tuple[str, ...] = ()
    """Keys of that recipe that this one does not set."""
    settings: Settings = field(default_factory=dict)


@cache
def _rows() -> dict[str, dict[str, _Row]]:
    """Return recipes by release, newest first, and name."""
    return msgspec.json.decode(DATA.read_bytes(), type=dict[str, dict[str, _Row]])


def releases() -> tuple[str, ...]:
    """Return the releases of Megatron-Bridge whose recipes are known, newest first."""
    return tuple(_rows())


def _settings_of(release: str, name: str) -> Settings:
    row = _rows()[release][name]
    if row.like is None:
        return {**row.settings}
    found = _settings_of(*row.like.split("/"))
    return {**{key: found[key] for key in found if key not in row.without}, **row.settings}


PACKS = "dataset.enable_offline_packing"
"""Key of packed samples, which all recipes for fine-tuning have."""
_OF_EXPERTS: Mapping[str, Any] = {
    "model.expert_tensor_parallel_size": 1,
    "model.moe_token_dispatcher_type": "alltoall",
    "model.moe_permute_fusion": True,
    "model.moe_grouped_gemm": True,
}
"""Settings of models with experts that their providers make."""
_FLAT = re.compile(
    r"(?P<model>\w+?)_(?P<task>pretrain|sft|peft)_(?P<gpus>[0-9]{1,5})gpu_(?P<gpu>[a-z]+[0-9]+)_"
    r"(?P<dtype>bf16|fp8[a-z]{2}|nvfp4)(?:_(?P<variant>\w+?))?_config"
)
_TUNING = re.compile(r"\w*_(sft|peft|lora|dora|finetune|dpo|distill)(_\w+)?")


_CONTAINERS = {"26.08": "0.6", "26.06": "0.5", "26.04": "0.4", "26.02": "0.3"}
"""Tag of the NeMo container -> the release of Megatron-Bridge in it."""


def release_of(image: str) -> str | None:
    """Return the release, such as 0.4, in a container such as `nvcr.io/nvidia/nemo:26.04.01`.

    None: unknown. For containers before 26.02, whose releases have no data, it is the oldest
    release with data.
    """
    tag = re.search(r"nemo:([0-9]{2}\.[0-9]{2})", image)
    if tag is None or tag[1] > max(_CONTAINERS):
        return None
    return _CONTAINERS.get(tag[1], min(_CONTAINERS.values()))


def _searched(release: str | None) -> Iterator[tuple[str, dict[str, _Row]]]:
    """Yield releases with their recipes: the asked one, then the others, newest first."""
    rows = _rows()
    minor = "" if release is None else ".".join(release.split(".")[:2])
    # a sort keeps the order of equal keys
    yield from sorted(rows.items(), key=lambda row: not row[0].startswith(f"{minor}."))


def named_recipe(name: str, release: str | None = None) -> Recipe:
    """Return a recipe by its function name, such as `llama3_8b_pretrain_config`.

    release : release to prefer; None: the newest. A recipe that no known release has is returned
    without model and settings. Where the library and the performance recipes have one name, it is
    that of the performance recipe, but for fine-tuning (`load_recipe` of
    `scripts/training/recipe_runner.py`); `LIBRARY` before the name asks for that of the library.
    """
    plain = name.removeprefix(LIBRARY)
    names = (
        [name] if name == plain and _TUNING.fullmatch(name) is None else [LIBRARY + plain, plain]
    )
    for one, rows in _searched(release):
        for known in names:
            if known in rows:
                return _recipe(one, known, plain)
    name = plain
    row = _FLAT.fullmatch(name)
    if row is not None:
        dtype = row["dtype"]
        precision = f"fp8_{dtype[3:]}" if dtype.startswith("fp8") else dtype
        found = performance_recipe(
            row["model"], row["gpu"], precision, row["variant"], task=row["task"], release=release
        )
        return found if found.model is None else _scaled(found, name, int(row["gpus"]))
    kind: Literal["library", "tuning"] = "tuning" if _TUNING.fullmatch(name) else "library"
    return Recipe(name=name, model=None, kind=kind, settings={})


def _recipe(release: str, name: str, title: str | None = None, *, note: str = "") -> Recipe:
    row = _rows()[release][name]
    model = _architecture_of(row.hub, name)
    own = _settings_of(release, name)
    settings = {} if model is None else sizes_of(model)
    if own.get("model.vocab_size", 0) is None:
        own = {key: value for key, value in own.items() if key != "model.vocab_size"}
    if own.get("dataset.seq_length") is not None:
        # `sync_model_dataset_sequence_length` of `scripts/training/recipe_runner.py`.
        settings["model.seq_length"] = own["dataset.seq_length"]
    kind: Literal["library", "performance", "tuning"] = "library"
    if row.gpus is not None:
        kind = "performance"
    elif _TUNING.fullmatch(name):
        kind = "tuning"
        # those of Qwen3-Next do not pack
        own = {PACKS: False, **own}
    return Recipe(
        name=title or name,
        model=model,
        kind=kind,
        settings={**settings, **own},
        num_gpus=row.gpus,
        notes=(note,) if note else (),
    )


def sizes_of(model: str) -> Settings:
    """Return the settings that the provider of an architecture makes; empty: unknown name."""
    found = {f"model.{key}": value for key, value in (architecture(model) or {}).items()}
    return {**found, **_OF_EXPERTS} if "model.num_moe_experts" in found else found


def _architecture_of(hub: str | None, name: str) -> str | None:
    """Return the architecture of a recipe by the model on the hub; None: its sizes are unknown."""
    model = _BUILT.match(name) if hub is None else None
    found = "nemotron_3_nano" if model is not None else model_of(hub or "")
    return found if found in architecture_names() else None


_BUILT = re.compile(r"nemotron_3_(nano|5_lightning)_(?:[a-z]+[0-9]+_)?(?:pretrain|sft|peft)_")
"""Names of recipes whose provider is that of Nemotron 3 Nano, not of a model on the hub."""


def _scaled(recipe: Recipe, name: str, num_gpus: int) -> Recipe:
    """Return a flat recipe for another number of GPUs, with the batch in proportion."""
    own = recipe.num_gpus
    batch = recipe.settings["train.global_batch_size"]
    note = f"no release has {name}; using the recipe of {own} GPUs with its batch scaled"
    assert own is not None, "a performance recipe has a number of GPUs"
    settings = {**recipe.settings, "train.global_batch_size": batch * num_gpus // own}
    notes = (*recipe.notes, note)
    return replace(recipe, name=name, num_gpus=num_gpus, settings=settings, notes=notes)


def model_of(hub: str) -> str:
    """Return the name of an architecture for a name on the hub; it may not exist.

    `meta-llama/Meta-Llama-3-8B` is `llama3_8b`, and `Qwen/Qwen3-30B-A3B` is `qwen3_30b_a3b`.
    """
    name = hub.rpartition("/")[2].lower().removeprefix("meta-")
    for text, short in _SPELLINGS:
        name = name.replace(text, short)
    return name.replace("-", "_").replace(".", "p")


_SPELLINGS = (
    ("llama-3.", "llama3"), ("llama-3", "llama3"), ("llama-2", "llama2"), ("-hf", ""),
    ("qwen2.5", "qwen25"), ("0.6b", "600m"), ("0.5b", "500m"), ("-instruct", ""), ("-base", ""),
    ("nvidia-nemotron", "nemotron"), ("glm-4.5-air", "glm45_air_106b"),
    ("-30b-a3b-bf16", ""), ("-120b-a12b-bf16", ""),
)  # fmt: skip
"""Parts of names on the hub, and how recipes spell them."""


Task = Literal["pretrain", "sft", "peft"]
"""Part of the name of a recipe: all weights from the start or on samples of a task, or adapters."""


def recipe_model(model: Model, name: str | None, task: Task) -> str | None:
    """Return the architecture of a model with a recipe for a task; None if none is known.

    It is found by the name of the model, else by its sizes.
    """
    named = None if name is None else name.replace("-", "_").replace(".", "p")
    rows = _rows()[releases()[0]]
    known = [one for one in architecture_names() if f"{one}_{task}_config" in rows]
    if named in known:
        return named
    return next((one for one in reversed(known) if alike(one, model)), None)


def alike(name: str | None, model: Model) -> bool:
    """Return True if a model has the main sizes of an architecture."""
    sizes, experts = None if name is None else architecture(name), model.experts
    return (
        sizes is not None
        and sizes["num_layers"] == model.num_layers
        and sizes["hidden_size"] == model.hidden
        and sizes["num_attention_heads"] == model.attention.heads
        and sizes["vocab_size"] == model.vocab
        and sizes.get("num_moe_experts") == (None if experts is None else experts.number)
    )


# --------------------------------------------------------------------------------------------------
# Performance recipes.


_SMALLEST = ("llama3_8b", "nemotronh_56b", "qwen3_30b_a3b")
"""Models whose recipe for the fewest GPUs is the default; others have that for the most GPUs.
Source: `_DEFAULT_GPU_COUNT_OVERRIDES` of `scripts/performance/utils/utils.py` at v0.6.0."""


def performance_recipe(
    model: str,
    gpu: str,
    precision: str,
    variant: str | None,
    *,
    task: str = "pretrain",
    release: str | None = None,
) -> Recipe:
    """Return the performance recipe for a model, a device and a precision.

    variant : such as `v1` or `large_scale`; None: the default. Releases before 0.6 have variants v1
        and v2; v2 is their default.
    release : release to prefer; None: the newest.

    A recipe that no known release has is returned without model and settings.
    """
    title = f"{model} on {gpu} in {precision}"
    others = list[str]()
    for one, rows in _searched(release):
        found = [
            (row["variant"], rows[name].gpus or 0, name)
            for name in rows
            if (row := _FLAT.fullmatch(name)) is not None
            and rows[name].gpus is not None
            and (row["model"], row["task"], row["gpu"]) == (model, task, gpu)
            and row["dtype"] == precision.replace("_", "")
        ]
        others += [own for own, _, _ in found if own is not None and own not in others]
        # v2 is v1 where a release has no v2.
        default = None if variant is None and any(own is None for own, _, _ in found) else "v2"
        wanted = variant or default
        for alias in (wanted, "v1") if wanted == "v2" else (wanted,):
            sizes = sorted((gpus, name) for own, gpus, name in found if own == alias)
            if sizes:
                chosen = sizes[0 if model in _SMALLEST else -1][1]
                note = f"{title}: the variant {alias} of Megatron-Bridge {one}" if alias else ""
                return _recipe(one, chosen, title, note=note)
    known = f"; its variants are {', '.join(sorted(others))}" if others else ""
    newest = releases()[0]
    note = f"no release of Megatron-Bridge up to {newest} has a recipe of {title}{known}"
    return Recipe(name=title, model=None, kind="performance", settings={}, notes=(note,))


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
