"""Where a number came from: the record every document carries into the plan file."""

from __future__ import annotations

from autopar.records import dataclass

__all__ = ["Source"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input: its role, its path or name, and the SHA-256 of its bytes ('' if estimated)."""

    role: str
    path: str
    sha256: str = ""
    estimated: bool = False
    synthetic: bool = False
    notes: tuple[str, ...] = ()
