"""Data of torchtitan's recipes, from an unpacked wheel.

`python -m benchmarks.titan_recipes FOLDER` writes `search/engines/torchtitan/recipes.json`. Nothing
of the wheel is executed or imported.

    pip download --no-deps --only-binary=:all: torchtitan==0.3.0
    python -m zipfile -e torchtitan-0.3.0-py3-none-any.whl 0.3.0
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search.engines.text.python import Evaluator, Section
from search.engines.torchtitan.source import CONFIG, DATA, TitanKnown, read_config

__all__ = ["main", "recipes_of"]


def recipes_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the recipes of a release as job files, by name of the function."""

    def source(name: str) -> str | None:
        path = folder / f"{name.replace('.', '/')}.py"
        known = name.endswith(".config_registry") and path.is_file()
        return path.read_text(encoding="utf-8") if known else None

    evaluator = Evaluator(TitanKnown(source, lambda _: None), most_steps=1 << 30)
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("torchtitan/models/*/config_registry.py")):
        module = evaluator.module(f"torchtitan.models.{path.parent.name}.config_registry")
        assert module is not None, "the file is there"
        for name in module.functions:
            value = evaluator.call(module, name)
            if isinstance(value, Section) and value.name == CONFIG:
                document, _, unknown = read_config(value)
                if not unknown:
                    found[name] = document
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the data of a release."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="unpacked wheel")
    found = recipes_of(parser.parse_args(arguments).folder)
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    DATA.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    print(f"{len(found)} recipes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
