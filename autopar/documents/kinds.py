"""Kinds of JSON files, recognized by their keys, for errors about a file of the wrong kind.

A file that autopar writes has the key `format`; the others are recognized by two keys that no other
kind has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError
from autopar.records import shorten

APPLICATION, CALCULON_SYSTEM, EXECUTION = (
    "a Calculon application",
    "a Calculon system",
    "a Calculon execution",
)
SIZES, TENSOR2D_SYSTEM = "a tensor2d model", "a tensor2d system"
CONFIG, MODEL, STRATEGY = (
    "a config.json of Hugging Face",
    "a model.json",
    "a strategy file",
)
_KEYS = {
    APPLICATION: {"feedforward", "num_blocks"},
    CALCULON_SYSTEM: {"matrix", "networks"},
    EXECUTION: {"tensor_par", "pipeline_par"},
    SIZES: {"e", "depth"},
    TENSOR2D_SYSTEM: {"hbm_bandwidth", "nvlink_bandwidth"},
    CONFIG: {"model_type"},
    STRATEGY: {"pp_deg", "tp_sizes_enc"},
    "a configuration of DeepSpeed": {"zero_optimization"},
}
"""Kind of file -> keys that identify it."""


def kind_of(data: Mapping[str, Any]) -> str | None:
    """Return the kind of a JSON object with its article, None if it is not recognized."""
    name = data.get("format")
    if isinstance(name, str):
        return f"a file of format {shorten(name)}"
    return next((kind for kind, keys in _KEYS.items() if keys <= data.keys()), None)


def check_kind(path: Path | str, data: Mapping[str, Any], *expected: str, remedy: str) -> None:
    """Raise DocumentError if a file is recognized as another kind than the expected ones.

    expected : kinds with their articles, as in this module
    remedy : what to use instead
    """
    kind = kind_of(data)
    if kind is not None and kind not in expected:
        problem = f"this is {kind}, expected {' or '.join(expected)}"
        raise DocumentError(path, problem, remedy=remedy)
