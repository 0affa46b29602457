"""`torchrun -m profiler.hardware`."""

from __future__ import annotations

from profiler.hardware.cli import main

if __name__ == "__main__":
    main()
