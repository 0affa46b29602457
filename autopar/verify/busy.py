"""How much of the machine other processes took while a command ran: what disturbs a measurement.

Linux alone says it (`/proc/stat`, proc(5)); elsewhere, and where the processors of the machine are
not those of this process, as in a container with a part of them, it is unknown.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Usage"]

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and iowait of user nice system idle iowait irq softirq steal ...
_NUM_FIELDS = 8  # guest times after them are contained in user and nice


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Processor time since some moment, in seconds."""

    wall_s: float
    busy_s: float
    """Of all processors, whoever used them."""
    own_s: float
    """Of the processes that this one started and that have ended."""
    num_processors: int

    @classmethod
    def now(cls, stat: Path = _STAT) -> Self | None:
        """Return the usage so far; None where it is unknown."""
        try:
            lines = stat.read_text("ascii").splitlines()
            usable = len(os.sched_getaffinity(0))
            ticks = os.sysconf("SC_CLK_TCK")
        except (OSError, AttributeError, ValueError):
            return None
        processors = [line for line in lines if line.startswith("cpu") and line[3:4].isdigit()]
        if len(processors) != usable:
            return None
        fields = [int(word) for word in lines[0].split()[1 : 1 + _NUM_FIELDS]]
        busy = sum(value for place, value in enumerate(fields) if place not in _IDLE)
        own = os.times()
        return cls(
            wall_s=time.monotonic(),
            busy_s=busy / ticks,
            own_s=own.children_user + own.children_system + own.user + own.system,
            num_processors=usable,
        )

    def others_since(self, before: Self) -> float:
        """Return the share of the processors' time that other processes took since then, 0 to 1."""
        time_s = (self.wall_s - before.wall_s) * self.num_processors
        others_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return min(max(others_s / time_s, 0.0), 1.0) if time_s > 0.0 else 0.0
