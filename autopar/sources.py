"""Where a number came from: the record every document carries into the plan file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from autopar.records import Record, replace

STACK_ROLE = "software stack"
"""Role of the trainer's software that numbers are of."""
NAMED_BY_FILES = "named by sidecars"
NAMED_BY_OPTION = "named by --stack"
NAMED_BY_DEFAULT = "by default"
"""Notes of such a source: from where the software is known."""


class Source(Record):
    """One input: its role, its path or name, and the SHA-256 of its bytes ('' if estimated)."""

    role: str
    path: str
    sha256: str = ""
    estimated: bool = False
    synthetic: bool = False
    notes: tuple[str, ...] = ()


def stacks_of(sources: Iterable[Source]) -> list[str]:
    """Return the names of the trainers' software among sources, each once and in their order."""
    # a document is called as its file without the ending, a sidecar has the name alone
    named = [s.path for s in sources if s.role == STACK_ROLE]
    return list(dict.fromkeys(Path(n).stem if n.endswith(".json") else n for n in named))


def stack_source(sources: Iterable[Source]) -> Source | None:
    """Return the first source that is a trainer's software, None without one."""
    return next((source for source in sources if source.role == STACK_ROLE), None)


def with_stack_named_by(sources: Iterable[Source], how: str) -> tuple[Source, ...]:
    """Return the sources, those of a trainer's software with a note on how it is known."""
    return tuple(
        replace(source, notes=(how,)) if source.role == STACK_ROLE else source for source in sources
    )
