"""Estimates on the fly: the typed documents from a datasheet card and a model spec, in memory.

Nothing here was measured: every result has `estimated=True`, names its card as its source, and
`docs/estimates.md` compares it with published measurements.
"""

from __future__ import annotations

from autopar.estimate.card import Card, estimate_hardware, load_card, parse_hardware
from autopar.estimate.model import activation_bytes, check_rates, estimate_model

__all__ = [
    "Card",
    "activation_bytes",
    "check_rates",
    "estimate_hardware",
    "estimate_model",
    "load_card",
    "parse_hardware",
]
