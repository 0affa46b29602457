"""Which engines there are: what lowers a plan for each, and what reads its configurations."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import get_args

from search.engines.configuration import Imported
from search.engines.job import Engine, Lower

__all__ = ["EXPORTERS", "IMPORTERS", "Import", "importer_for", "lower_for"]

Import = Callable[..., Imported]
"""Takes a Configuration, world_size and num_layers."""

EXPORTERS: tuple[str, ...] = get_args(Engine)
"""Engines by the name of their module here, which has a `lower`."""
_IMPORT_MODULES: dict[str, str] = {"galvatron": "galvatron", "megatron": "megatron_arguments"}
"""By engine the module here that reads its configurations with `import_NAME`."""
IMPORTERS: tuple[str, ...] = tuple(_IMPORT_MODULES)
"""Engines whose configurations are read."""


def lower_for(engine: str) -> Lower:
    """Return what lowers a plan for an engine, one of EXPORTERS."""
    lower: Lower = importlib.import_module(f"search.engines.{engine}").lower
    return lower


def importer_for(engine: str) -> Import:
    """Return what reads the configurations of an engine, one of IMPORTERS."""
    module = importlib.import_module(f"search.engines.{_IMPORT_MODULES[engine]}")
    importer: Import = getattr(module, f"import_{engine}")
    return importer
