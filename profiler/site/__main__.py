"""`torchrun -m profiler.site`."""

from __future__ import annotations

from autopar.cli import site

if __name__ == "__main__":
    site()
