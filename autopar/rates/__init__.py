"""Estimated hardware and model profiles, computed from a datasheet card and a model spec.

Nothing here is measured. Every result has `estimated=True` and names its card as its source;
`docs/concepts/estimates.md` compares the estimates with published measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.rates.card import Card, estimate_hardware, load_card, parse_hardware
    from autopar.rates.model import (
        activation_bytes,
        check_rates,
        check_threads,
        estimate_model,
    )

__all__ = [
    "Card",
    "activation_bytes",
    "check_rates",
    "check_threads",
    "estimate_hardware",
    "estimate_model",
    "load_card",
    "parse_hardware",
]
_OF_CARDS = frozenset({"Card", "estimate_hardware", "load_card", "parse_hardware"})
"""Names that are imported from `autopar.rates.card`; the others are in `autopar.rates.model`."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        module = "card" if name in _OF_CARDS else "model"
        return getattr(import_module(f"autopar.rates.{module}"), name)
    raise AttributeError(f"module 'autopar.rates' has no attribute {name!r}")
