"""Records of `autopar check` common to all engines: `CheckOptions` and `CheckedFile`.

`search.engines.table` identifies the engine of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import field

from autopar.errors import DocumentError, InputError
from autopar.records import Record
from autopar.run.rules import Notice, RuleError, notice, without_repetitions
from autopar.run.run import Run
from search.engines.arguments import Ignored, UnpricedError
from search.engines.changes import MOVES, Changes, Move
from search.engines.megatron.read import ReadRun


class CheckOptions(Record):
    """Command-line options of a check."""

    gpu: str
    """GPU model: the name of its card."""
    world_size: int | None = None
    """Number of GPUs; None: the file must contain it."""
    model: str | None = None
    """Name or folder of the model, where the training script sets it; None: the file names it."""
    seq_length: int | None = None
    """Sequence length in tokens, where the training script sets it; None: the file sets it."""


class CheckedFile(Record):
    """Result of reading a launch file: its run, findings, and functions for suggested changes."""

    path: str
    trainer: str
    """Name of the engine for display, such as `Megatron-LM`."""
    stack: str
    """Software stack for estimates, unless the user selects another (`autopar stacks`)."""
    world_size: int
    run: Run | None
    """Run to estimate; None: no estimate is possible, and a finding gives the reason."""
    described: Run | None = None
    """Run of the file even if no estimate is possible; None: the file was not read completely, or
    the reader does not set this field."""
    findings: tuple[Notice, ...]
    """Findings on the file. With a finding of kind `illegal`, there is no estimate."""
    harmless: tuple[Ignored, ...] = ()
    """Arguments that change neither time nor memory."""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments as written, by key; for scripts, by flag without leading hyphens."""
    moves: frozenset[Move] = MOVES
    """Types of changes to suggest: those that files of this type can express."""
    written: Callable[[Run], Changes | None]
    """Function (other run) -> changes that make the file describe that run, verified by reading the
    changed settings. None: the file cannot express the run, or it would be illegal."""
    spelled: Callable[[str, str | None], str]
    """Function (key, value) -> line of the file for a key of `Changes` or `Ignored`, such as
    `--seq-length 4096`. The line has no value where the value is None or empty."""
    worded: Callable[[str], str] = str
    """Function (sentence) -> sentence with Megatron-LM arguments replaced by keys of the file.
    Sentences on memory are written with Megatron-LM arguments."""


class ReadResult(Record):
    """Result of reading a file as a run."""

    run: Run | None = None
    """Run to estimate; None: no estimate is possible."""
    described: Run | None = None
    """Run of the file, even if no estimate is possible; None: not read."""
    ignored: tuple[Ignored, ...] = ()
    problems: tuple[Notice, ...] = ()
    """Findings of kind `illegal` that prevented the file from being read as a run."""
    unpriced: Notice | None = None
    """Finding of kind `not priced`: reason why a possibly valid run has no estimate; else None."""


def attempt(read: Callable[[], ReadRun]) -> ReadResult:
    """Return the result of `read`, with UnpricedError, RuleError and InputError as findings."""
    try:
        found = read()
    except UnpricedError as error:
        text = "{key} {problem}"
        values = {"key": error.key, "problem": error.problem, "remedy": error.remedy}
        return ReadResult(
            unpriced=notice("read.unpriced", "not priced", text, "{remedy}", **values)
        )
    except RuleError as error:
        return ReadResult(problems=error.broken)
    except DocumentError as error:
        text = "{key}: {problem}" if error.key else "{problem}"
        one = notice("read.key", "illegal", text, key=error.key, problem=error.problem)
        return ReadResult(problems=(one,))
    except InputError as error:
        return ReadResult(
            problems=(notice("read.file", "illegal", "{problem}", problem=str(error)),)
        )
    why = found.unpriced
    return ReadResult(
        run=None if why else found.run,
        described=found.run,
        ignored=found.ignored,
        unpriced=notice("read.unpriced", "not priced", "{problem}", problem=why) if why else None,
    )


def world_size_of(path: Path | str, own: int | None, asked: CheckOptions) -> int:
    """Return the number of GPUs, from the command line (`asked`) or from the file.

    own : number in the file; None: not given.

    Raises DocumentError if the numbers differ, or if neither is given.
    """
    if asked.world_size is not None and own is not None and own != asked.world_size:
        raise DocumentError(
            path,
            f"the script starts {own} processes, but --hardware has {asked.world_size} GPUs",
            remedy=f"Use --hardware CARD:NxG with {own} GPUs",
        )
    found = asked.world_size or own
    if found is None:
        raise DocumentError(
            path,
            "contains no number of GPUs",
            remedy="Add --hardware, such as h100:8x8",
        )
    return found


def without_effect(trainer: str, keys: Iterable[tuple[str, str]]) -> tuple[Notice, ...]:
    """Return one notice for each (key, reason) pair of a key that has no effect."""
    return tuple(
        notice(f"{trainer}.no-effect", "no effect", "{key} ({why})", key=key, why=why)
        for key, why in keys
    )


def read_notes(notes: Iterable[str]) -> tuple[Notice, ...]:
    """Return one notice for each sentence on an assumption made while reading a file."""
    return tuple(notice("read.note", "read", "{note}", note=note) for note in notes)


def with_problems(found: ReadResult, broken: Sequence[Notice]) -> tuple[Notice, ...]:
    """Return the findings of `found` and the broken rules, with each rule reported once.

    broken : notices on broken rules, which replace findings with the same id.
    """
    ids = {one.id for one in broken}
    unpriced = () if found.unpriced is None else (found.unpriced,)
    return without_repetitions(
        (*unpriced, *(one for one in found.problems if one.id not in ids), *broken)
    )
