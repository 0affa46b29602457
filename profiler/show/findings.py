"""A finding of `--validate`: one sentence that names file, key, value and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autopar.errors import DocumentError

__all__ = ["Finding", "Severity", "finding"]

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong (error) or suspicious (warning)."""

    severity: Severity
    sentence: str
    """File, key, value and remedy."""


def finding(severity: Severity, path: Path, key: str | None, problem: str, remedy: str) -> Finding:
    """Return a finding whose sentence is built like every error about a file."""
    error = DocumentError(path, problem, key=key, remedy=remedy)
    return Finding(severity=severity, sentence=str(error))
