"""Training settings beyond sizes and degrees, shared by memory and time.

Adapters on frozen weights, throughput, MoE routing skew and the file of a uniform plan; no machine
and no torch.
"""

from __future__ import annotations

__all__: list[str] = []
