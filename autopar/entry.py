"""Entry points of the commands of this package, quick to import: see `autopar.commands.enter`."""

from __future__ import annotations

from autopar.commands import enter

__all__ = ["profile_estimate"]


def profile_estimate() -> None:
    """Run `autopar-profile-estimate`."""
    enter("autopar-profile-estimate", "autopar.estimate.cli")
