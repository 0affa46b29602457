"""`torchrun -m profiler.site`."""

from __future__ import annotations

from autopar.entry import site

if __name__ == "__main__":
    site()
