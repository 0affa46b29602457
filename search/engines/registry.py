"""Which engines there are: what lowers a plan for each, and what reads its configurations."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from search.engines.configuration import Imported
from search.engines.galvatron import import_galvatron
from search.engines.job import Lower
from search.engines.megatron_import import import_megatron

__all__ = ["EXPORTERS", "IMPORTERS", "Import", "lower_for"]

Import = Callable[..., Imported]
"""Takes a Configuration, world_size and num_layers."""

EXPORTERS: tuple[str, ...] = ("galvatron", "megatron", "torchtitan", "deepspeed", "accelerate")
"""Engines by the name of their module here, which has a `lower`."""
IMPORTERS: Mapping[str, Import] = {"galvatron": import_galvatron, "megatron": import_megatron}


def lower_for(engine: str) -> Lower:
    """Return what lowers a plan for an engine, one of EXPORTERS."""
    lower: Lower = importlib.import_module(f"search.engines.{engine}").lower
    return lower
