"""Settings of published runs that their recipes have and their tables do not print."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from search.engines.bridge.recipes import layout_of
from search.engines.megatron.arguments import parse_layout

__all__ = ["cells_of_recipe", "has_fp8_head", "recipe_parts"]

_AUTOMODEL: Mapping[str, Mapping[str, str]] = {
    "llama370b": {"recompute": "full"},
    "qwen2532b": {"recompute": "full"},
    "gptoss20b": {"ep": "8"},
    "gptoss120b": {"ep": "64"},
    "kimik2": {"recompute": "full"},
    "deepseekv3": {"recompute": "full", "ep": "64"},
}
"""Cells by the start of a model's name in AutoModel's benchmark configurations (examples/benchmark
and examples/llm_benchmark of NVIDIA-NeMo/Automodel at the tables' releases), where the tables print
others or none."""


def cells_of_recipe(cells: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the cells of a row that its recipe contradicts, with the recipe's values."""
    if "AutoModel" in cells["source"]:
        name = re.sub(r"[^a-z0-9]", "", cells["model"].lower())
        for start, found in _AUTOMODEL.items():
            if name.startswith(start):
                yield from found.items()


def has_fp8_head(cells: Mapping[str, str]) -> bool:
    """Return True for recipes with `fp8_output_proj`.

    Those of DeepSeek-V3 and GPT-OSS in MXFP8 on GB200 and GB300 have it from v0.5.0 of
    Megatron-Bridge (26.06).
    """
    release = re.search(r"2[0-9]\.[0-9]{2}", cells["source"])
    later = "verification" in cells["source"] or (release is not None and release[0] >= "26.06")
    model = cells["model"].lower()
    return (
        later
        and cells["precision"].upper() == "MXFP8"
        and cells["gpu_type"].startswith(("GB200", "GB300"))
        and model.startswith(("deepseek", "gpt"))
    )


_DEEPSEEK_LONG = "Et|(tt|)*30mL"
"""Layout of 32 parts of DeepSeek-V3's recipes (recipes/deepseek, PP8 VP4)."""


def recipe_parts(
    model: str, pp: int, vpp: int, *, mtp: int, given: str | None = None
) -> tuple[str, ...] | None:
    """Return the parts of a pipeline, such as `tt`, in Megatron-Bridge's recipe of a model.

    given : the layout of a recipe, which may be for other degrees. None: the recipe has no layout
        of this number of parts.
    """
    name = re.sub(r"[^a-z0-9]", "", model.partition("(")[0].lower())
    recipe = {"deepseekv3": "deepseek_v3", "kimik2": "kimi_k2"}.get(name)
    if recipe is None or pp == 1:
        return None
    for layout in (layout_of(recipe, pp, vpp, mtp), given, _DEEPSEEK_LONG):
        parts = () if layout is None else parse_layout(layout)
        if len(parts) == pp * vpp:
            return parts if mtp else tuple(part.replace("m", "") for part in parts)
    return None
