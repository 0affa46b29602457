"""Entry points of the profilers, quick to import: see `autopar.entry`."""

from __future__ import annotations

import os

from autopar.entry import enter

__all__ = ["hardware", "model", "plan", "show"]


def hardware() -> None:
    """Run `torchrun -m profiler.hardware`; Ctrl-C reaches every rank, and the first one says it."""
    enter("autopar", "profiler.hardware.cli", speaks=os.environ.get("RANK", "0") == "0")


def model() -> None:
    """Run `profile-model`."""
    enter("profile-model", "profiler.model_cli")


def plan() -> None:
    """Run `profile-plan` or `torchrun -m profiler.plan`; the first rank says Ctrl-C."""
    enter("profile-plan", "profiler.plan_cli", speaks=os.environ.get("RANK", "0") == "0")


def show() -> None:
    """Run `profile-show`."""
    enter("profile-show", "profiler.show_cli")
