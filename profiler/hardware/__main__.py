"""`torchrun -m profiler.hardware`."""

from __future__ import annotations

from autopar.entry import hardware

if __name__ == "__main__":
    hardware()
