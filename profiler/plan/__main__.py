"""Entry point of `torchrun -m profiler.plan`."""

from __future__ import annotations

from autopar.cli import plan

if __name__ == "__main__":
    plan()
