"""Estimates on the fly: the typed documents from a datasheet card and a model spec, in memory.

Nothing here was measured: every result has `estimated=True`, names its card as its source, and
`docs/estimates.md` compares it with published measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.rates.card import Card, estimate_hardware, load_card, parse_hardware
    from autopar.rates.model import activation_bytes, check_rates, estimate_model

__all__ = [
    "Card",
    "activation_bytes",
    "check_rates",
    "estimate_hardware",
    "estimate_model",
    "load_card",
    "parse_hardware",
]
_OF_CARDS = frozenset({"Card", "estimate_hardware", "load_card", "parse_hardware"})
"""Names of the module of cards, which whoever counts bytes does not need."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        module = "card" if name in _OF_CARDS else "model"
        return getattr(import_module(f"autopar.rates.{module}"), name)
    raise AttributeError(f"module 'autopar.rates' has no attribute {name!r}")
