"""Names of shipped models by what can be done with them."""

from __future__ import annotations

from autopar.documents.catalog import model_names
from autopar.documents.spec import load_spec
from autopar.run.model import is_hybrid, is_uniform

__all__ = ["HYBRIDS", "PROFILED"]

HYBRIDS = tuple(name for name in model_names() if is_hybrid(load_spec(name)))
"""Models whose layers are a mixer, an MLP or experts alone."""
PROFILED = tuple(name for name in model_names() if not is_uniform(load_spec(name)))
"""Models that the profiler counts."""
