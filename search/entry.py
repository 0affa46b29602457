"""Entry points of the planner's commands, quick to import: see `autopar.entry`."""

from __future__ import annotations

from autopar.entry import enter

__all__ = ["estimate", "explain", "explore", "export", "search"]


def estimate() -> None:
    """Run `autopar-estimate`."""
    enter("autopar-estimate", "search.cli_estimate")


def explain() -> None:
    """Run `autopar-explain`."""
    enter("autopar-explain", "search.explain_cli")


def explore() -> None:
    """Run `autopar-explore`."""
    enter("autopar-explore", "search.cli_explore")


def export() -> None:
    """Run `autopar-export`."""
    enter("autopar-export", "search.export_cli")


def search() -> None:
    """Run `autopar-search`."""
    enter("autopar-search", "search.cli")
