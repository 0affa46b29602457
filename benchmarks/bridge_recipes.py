"""Data of Megatron-Bridge's recipes, from the sources of its releases.

`python -m benchmarks.bridge_recipes RELEASE=FOLDER ...` reads recipes of releases and writes
`search/engines/bridge/recipes.json`. A folder is an unpacked wheel, or a checkout of the release's
tag: releases before 0.6 have their performance recipes in `scripts/performance`, which wheels do
not contain. Nothing of a release is executed or imported (`search.engines.bridge.source`).

    pip download --no-deps --python-version 3.12 --only-binary=:all: megatron-bridge==0.6.2
    python -m zipfile -e megatron_bridge-0.6.2-py3-none-any.whl 0.6.2
    python -m benchmarks.bridge_recipes 0.6.2=0.6.2 0.5.1=CHECKOUT
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from search.engines.bridge.keys import DATASET_LENGTHS, KEYS, UNPRICED_KEYS
from search.engines.bridge.recipes import DATA, LIBRARY
from search.engines.bridge.source import CONFIG, BridgeKnown, read_recipe
from search.engines.text.python import Evaluator, Module, Section

__all__ = ["compressed", "main", "recipes_of"]

_OTHERS = re.compile(
    r"[-_]vl\b|[-_]vl[-_]|vlm|omni|audio|diffusion|wan|flux|\.utils\.|dataset|4\.5v|gemma-[34].*-it"
)
"""Modules without text decoders, and helpers."""
_NAMES = r"[a-z]\w*_(pretrain|sft|peft)\w*_config|_(pretrain|sft|peft)_common"
_CONSTANT = re.compile(
    r"(?P<model>[A-Z0-9_]+?)_(?P<task>PRETRAIN|SFT|LORA)_CONFIG_(?P<gpu>[A-Z]+[0-9]+)_"
    r"(?P<dtype>BF16|FP8_[A-Z]{2}|NVFP4)(?:_(?P<variant>V[0-9]|LARGE_SCALE))?"
)
"""Names of presets in the performance scripts of releases before 0.6."""


class _Release:
    """Sources of a release."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "src" if (folder / "src").is_dir() else folder
        self.scripts = folder / "scripts" / "performance"
        known = BridgeKnown(self._source, lambda _: None)
        self.evaluator = Evaluator(known, most_steps=1 << 30)

    def _source(self, name: str) -> str | None:
        # Providers and bridges convert models, whose sizes are known here by name.
        if re.fullmatch(r"megatron\.bridge(\.models\b.*|\.__init__)?", name):
            return None
        for root in (self.package, self.scripts):
            path = root / f"{name.replace('.', '/')}.py"
            if path.is_file():
                return path.read_text(encoding="utf-8")
        return None

    def modules(self, root: Path, pattern: str) -> Iterator[Module]:
        """Yield the modules below a folder whose path matches a pattern."""
        for path in sorted(root.rglob(pattern)):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            module = None if _OTHERS.search(name) else self.evaluator.module(name)
            if module is not None:
                yield module


def recipes_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the recipes of a release by name: `hub`, the name of its model, and `settings`.

    Presets of the performance scripts are named like recipes of later releases, with their variant:
    `llama3_70b_pretrain_64gpu_h100_bf16_v2_config`.
    """
    release, found = _Release(folder), dict[str, dict[str, Any]]()
    for kind in ("recipes", "perf_recipes"):
        for module in release.modules(release.package, f"megatron/bridge/{kind}/**/*.py"):
            for name in module.names:
                wanted = kind == "recipes" or name in module.functions
                if wanted and re.fullmatch(_NAMES, name):
                    gpus = re.search("_([0-9]+)gpu_", name) if kind == "perf_recipes" else None
                    number = None if gpus is None else int(gpus[1])
                    _add(found, name, release.evaluator.call(module, name), number)
    for module in release.modules(release.scripts, "configs/**/*workload_base_configs.py"):
        own = module.name.rpartition(".")[0]
        folder_of = release.scripts / own.replace(".", "/")
        functions = {
            name: beside
            for beside in release.modules(release.scripts, "configs/**/*_llm_*.py")
            if (release.scripts / beside.name.replace(".", "/")).parent == folder_of
            for name in beside.functions
        }
        for name, preset in module.names.items():
            row = _CONSTANT.fullmatch(name)
            if row is None or not isinstance(preset, Section):
                continue
            words = {key: value.lower() for key, value in row.groupdict().items() if value}
            made = f"{words['model']}_{words['task']}_config_{words['gpu']}"
            if made not in functions:
                continue
            variant = {"config_variant": words["variant"]} if "variant" in words else {}
            function = functions[made].names[made]
            value = release.evaluator.invoke(function, [], {"precision": words["dtype"], **variant})
            if not isinstance(value, Section):
                value = release.evaluator.invoke(function, [], {"precision": words["dtype"]})
            if words["dtype"] == "bf16" and isinstance(value, Section):
                _post_override(value)
            task = words["task"].replace("lora", "peft")
            parts = [words["model"], task, f"{preset.fields['num_gpus']}gpu", words["gpu"],
                     words["dtype"].replace("_", ""), words.get("variant"), "config"]  # fmt: skip
            _add(found, "_".join(filter(None, parts)), value, preset.fields["num_gpus"])
    return found


def _post_override(config: Section) -> None:
    """Set the keys that `set_post_overrides` of the performance scripts before 0.6 sets for bf16.

    The batch of another number of GPUs is scaled by the reader.
    """
    optimizer = config.fields.get("optimizer")
    if isinstance(optimizer, Section) and optimizer.fields.get("optimizer", "adam") == "adam":
        optimizer.fields["use_precision_aware_optimizer"] = True


def _add(found: dict[str, dict[str, Any]], name: str, value: Any, gpus: int | None) -> None:
    if not isinstance(value, Section) or value.name != CONFIG:
        return
    recipe = read_recipe(value)
    if any(key in KEYS or "." not in key for key in recipe.unknown) or _OTHERS.search(
        str(recipe.hub).lower()
    ):
        return
    settings = {key: one for key, one in recipe.settings.items() if _counts(key, one)}
    if gpus is not None and name in found and "gpus" in found[name]:
        # Both packages have the name. The scripts take the performance recipe.
        found[f"{LIBRARY}{name}"] = found[name]
    found[name] = {"hub": recipe.hub, "gpus": gpus, "settings": dict(sorted(settings.items()))}


def _counts(key: str, value: Any) -> bool:
    row = UNPRICED_KEYS.get(key)
    if row is not None:
        return not row.is_off([str(value).lower()])
    return key in KEYS or key in DATASET_LENGTHS or key == "model.hybrid_layer_pattern"


# --------------------------------------------------------------------------------------------------


def compressed(releases: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return recipes as a document: each as its differences from the nearest one before it.

    releases : recipes by release, newest first.
    """
    document: dict[str, Any] = {}
    before: list[tuple[str, str, Mapping[str, Any]]] = []
    for release, recipes in releases.items():
        rows = document[release] = {}
        for name, recipe in sorted(recipes.items()):
            settings = recipe["settings"]
            near = [one for one in before if one[1] == name] + before[-_NEAR:]
            best = min(near, key=lambda one: _distance(one[2], settings), default=None)
            row: dict[str, Any] = {"hub": recipe["hub"], "gpus": recipe["gpus"]}
            if best is None:
                row["settings"] = settings
            else:
                row["like"] = f"{best[0]}/{best[1]}"
                row["without"] = sorted(best[2].keys() - settings.keys())
                row["settings"] = {
                    key: value for key, value in settings.items()
                    if key not in best[2] or not _equal(best[2][key], value)
                }  # fmt: skip
            rows[name] = {key: value for key, value in row.items() if value not in (None, [], {})}
            before.append((release, name, settings))
    return document


_NEAR = 12
"""Number of recipes before one that it may be like."""


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    shared = one.keys() & other.keys()
    changed = sum(not _equal(one[key], other[key]) for key in shared)
    return changed + len(one.keys() ^ other.keys())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the data of the given releases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="+", metavar="RELEASE=FOLDER", help="newest first")
    given = dict(word.split("=", 1) for word in parser.parse_args(arguments).releases)
    found = {release: recipes_of(Path(folder)) for release, folder in given.items()}
    rows = ",\n".join(
        f" {json.dumps(release)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in recipes.items())
        + "\n }"
        for release, recipes in compressed(found).items()
    )
    DATA.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    for release, recipes in found.items():
        print(f"{release}: {len(recipes)} recipes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
