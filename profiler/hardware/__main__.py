"""`torchrun -m profiler.hardware`."""

from __future__ import annotations

from autopar.cli import hardware

if __name__ == "__main__":
    hardware()
