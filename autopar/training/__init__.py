"""What a trainer may be told beyond sizes and degrees, the same for memory and for time.

Adapters on frozen weights, and what lies on the host; no launch, no machine, no torch.
"""

from __future__ import annotations

__all__: list[str] = []
