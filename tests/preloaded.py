"""Imports of every process of tests/warm.py; nothing here is used directly.

These modules take seconds to import, and behave the same in each process. Nothing may run here that
starts threads or opens a device: processes are copies of the one that imported this.
"""

from __future__ import annotations

import gc
import importlib.util

import hypothesis
import numpy as np
import pytest
import rich.console
import rich.table
import typer

import autopar.documents.model
import autopar.documents.spec

if importlib.util.find_spec("torch") is not None:  # planning is tested without torch as well
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import profiler.hardware.run
    import profiler.model.run
    import profiler.plan.run

__all__ = [
    "autopar",
    "hypothesis",
    "np",
    "profiler",
    "pytest",
    "rich",
    "torch",
    "typer",
]

# frozen objects do not change, so copies continue to share their memory
gc.freeze()
