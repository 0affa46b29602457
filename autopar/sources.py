"""Sources of numbers: a record that every document passes on to the plan file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from autopar.records import Record, replace

STACK_ROLE = "software stack"
"""Role of the software stack that numbers belong to."""
CARD_ROLE = "hardware card"
"""Role of the card that numbers are estimated from."""
NAMED_BY_FILES = "named by sidecars"
NAMED_BY_OPTION = "named by --stack"
NAMED_BY_DEFAULT = "by default"
"""Notes of the source of a software stack: how the stack was determined."""


class Source(Record):
    """One input: its role, its path or name, and the SHA-256 of its bytes ('' if estimated)."""

    role: str
    path: str
    sha256: str = ""
    estimated: bool = False
    synthetic: bool = False
    notes: tuple[str, ...] = ()


def stacks_of(sources: Iterable[Source]) -> list[str]:
    """Return the names of the software stacks among sources, in order and without repetition."""
    # The path of a stack file gives the name without suffix; a sidecar contains only the name.
    named = [s.path for s in sources if s.role == STACK_ROLE]
    return list(dict.fromkeys(Path(n).stem if n.endswith(".json") else n for n in named))


def stack_source(sources: Iterable[Source]) -> Source | None:
    """Return the first source that is a software stack, or None."""
    return next((source for source in sources if source.role == STACK_ROLE), None)


def with_stack_named_by(sources: Iterable[Source], how: str) -> tuple[Source, ...]:
    """Return the sources with the note `how`, such as NAMED_BY_OPTION, on the software stack."""
    return tuple(
        replace(source, notes=(how,)) if source.role == STACK_ROLE else source for source in sources
    )
