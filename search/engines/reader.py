"""Records for reading launch files with `autopar check`: the request (Asked) and the result.

`search.engines.table` lists the engines and identifies the engine of a file.
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
    """Command-line settings of a check, in addition to the file."""

    gpu: str
    """GPU model, by the name of its card."""
    world_size: int | None = None
    """Number of GPUs; None: the file must contain it."""
    model: str | None = None
    """Name or folder of the model, where the training script sets it; None: the file names it."""
    seq_length: int | None = None
    """Sequence length in tokens, where the training script sets it; None: the file sets it."""


class CheckedFile(Record):
    """Content of a checked file, with the functions that change it."""

    path: str
    trainer: str
    """Displayed name of the engine."""
    stack: str
    """Software stack for estimates where the user selects no other (`autopar stacks`)."""
    world_size: int
    run: Run | None
    """Run to price; None: it cannot be priced, and a finding gives the reason."""
    described: Run | None = None
    """Run of a completely read file, even where it cannot be priced; None: no such run given."""
    findings: tuple[Notice, ...]
    """Findings on the file. A run with one of kind `illegal` is not priced."""
    harmless: tuple[Ignored, ...] = ()
    """Arguments that change neither time nor memory."""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments as written, by key; for scripts, by flag without leading hyphens."""
    moves: frozenset[Move] = MOVES
    """Types of suggested changes that such a file can express."""
    written: Callable[[Run], Changes | None]
    """Function (other run) -> changes that turn the file into this run. None: the file cannot
    express it, or it would not run. The changed file, read again, must describe this run."""
    spelled: Callable[[str, str | None], str]
    """Function (key, value) -> line of the file for a key of `Changes` or `Ignored`, such as
    `--seq-length 4096`. The line has no value where the value is None or empty."""
    worded: Callable[[str], str] = str
    """Function (sentence) -> sentence with arguments of Megatron-LM replaced by keys of the file.
    Sentences on memory name arguments of Megatron-LM."""


class ReadResult(Record):
    """Result of reading a file as a run."""

    run: Run | None = None
    """Run to price; None: it cannot be priced."""
    described: Run | None = None
    """Run of the file, whether or not it can be priced; None: not read."""
    ignored: tuple[Ignored, ...] = ()
    problems: tuple[Notice, ...] = ()
    """Findings of kind `illegal` that explain why there is no run."""
    unpriced: Notice | None = None
    """Finding of kind `not priced` on a run that may be valid; None: no such finding."""


def attempt(read: Callable[[], ReadRun]) -> ReadResult:
    """Return the result of `read`: a run, or the reasons why there is none."""
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
    """Return the number of GPUs of a file, from the file (`own`) or from the command line.

    Raises DocumentError where both give different numbers, or neither gives one.
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
    """Return notices on keys without effect, from (key, reason) pairs."""
    return tuple(
        notice(f"{trainer}.no-effect", "no effect", "{key} ({why})", key=key, why=why)
        for key, why in keys
    )


def read_notes(notes: Iterable[str]) -> tuple[Notice, ...]:
    """Return notices on assumptions made while reading a file."""
    return tuple(notice("read.note", "read", "{note}", note=note) for note in notes)


def with_problems(found: ReadResult, broken: Sequence[Notice]) -> tuple[Notice, ...]:
    """Return the reasons why a file has no price, and the broken rules, each rule once."""
    ids = {one.id for one in broken}
    unpriced = () if found.unpriced is None else (found.unpriced,)
    return without_repetitions(
        (*unpriced, *(one for one in found.problems if one.id not in ids), *broken)
    )
