"""Pieces of a layer's time: its operations, its mixture, its adapters, its optimizer."""

from __future__ import annotations

__all__: list[str] = []
