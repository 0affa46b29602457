"""Training settings beyond sizes and degrees, shared by memory and time.

These are adapters on frozen weights, throughput, MoE routing skew, and the file of a uniform plan.
"""

from __future__ import annotations

__all__: list[str] = []
