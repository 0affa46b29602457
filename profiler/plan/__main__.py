"""`torchrun -m profiler.plan`."""

from __future__ import annotations

from profiler.entry import plan

if __name__ == "__main__":
    plan()
