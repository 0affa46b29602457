"""What `autopar check` asks of an engine, and what it is told of a file: two records.

Which engines there are, and whose a file is, is in `search.engines.table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import field

from autopar.errors import DocumentError, InputError
from autopar.records import Record
from autopar.run.rules import Notice, RuleError, notice, once
from autopar.run.run import Run
from search.engines.arguments import Ignored, UnpricedError
from search.engines.changes import MOVES, Changes, Move
from search.engines.megatron.read import ReadRun


class Asked(Record):
    """What the command line says of a launch, beside its file."""

    gpu: str
    """Kind of device, by its card's name."""
    world_size: int | None = None
    """Number of GPUs; None: the file has to say it."""
    model: str | None = None
    """Name or folder of the model, where it is the script's to say and no file says it."""
    seq_length: int | None = None
    """The same of tokens of a sequence."""


class CheckedFile(Record):
    """What a file says, and how it would say something else."""

    path: str
    trainer: str
    """Its name, as it is shown."""
    stack: str
    """Software whose kernels are priced where nothing else is asked for (`autopar stacks`)."""
    world_size: int
    run: Run | None
    """None: it cannot be priced, and the reason is a finding."""
    described: Run | None = None
    """The run of a file that is read whole and has no price."""
    findings: tuple[Notice, ...]
    """A run with one of the kind `illegal` is not priced either."""
    harmless: tuple[Ignored, ...] = ()
    """Arguments that change neither time nor memory."""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments as they are written, by key; for scripts flags without their hyphens."""
    moves: frozenset[Move] = MOVES
    """What can be changed at all in such a file, of what neighbours have changed."""
    written: Callable[[Run], Changes | None]
    """Returns what changes in the file so that it is another run; None: it cannot say it, or that
    would not run. Read anew with the changes, the file has to be that run."""
    spelled: Callable[[str, str | None], str]
    """Returns a key of `Changes` and of `Ignored` with its value as a line of the file, such as
    `--seq-length 4096`; alone where the value is None or empty."""
    worded: Callable[[str], str] = str
    """Returns a sentence that names arguments of Megatron-LM, as those on memory do, with the
    file's own keys in their place."""


class Attempt(Record):
    """What came of reading a file."""

    run: Run | None = None
    """None: it has no price."""
    described: Run | None = None
    """The run whether or not it has a price."""
    ignored: tuple[Ignored, ...] = ()
    problems: tuple[Notice, ...] = ()
    """Why there is no run: findings of the kind `illegal`."""
    unpriced: Notice | None = None
    """What may well run and has no price: a finding of the kind `not priced`."""


def attempt(read: Callable[[], ReadRun]) -> Attempt:
    """Return a run, or why there is none."""
    try:
        found = read()
    except UnpricedError as error:
        text = "{key} {problem}; {remedy}"
        values = {"key": error.key, "problem": error.problem, "remedy": error.remedy}
        return Attempt(unpriced=notice("read.unpriced", "not priced", text, **values))
    except RuleError as error:
        return Attempt(problems=error.broken)
    except DocumentError as error:
        text = "{key}: {problem}" if error.key else "{problem}"
        one = notice("read.key", "illegal", text, key=error.key, problem=error.problem)
        return Attempt(problems=(one,))
    except InputError as error:
        return Attempt(problems=(notice("read.file", "illegal", "{problem}", problem=str(error)),))
    why = found.unpriced
    return Attempt(
        run=None if why else found.run,
        described=found.run,
        ignored=found.ignored,
        unpriced=notice("read.unpriced", "not priced", "{problem}", problem=why) if why else None,
    )


def world_size_of(path: Path | str, own: int | None, asked: Asked) -> int:
    """Return the number of GPUs of a launch that says it, or does not (None).

    Raises DocumentError where the command line says another number, or neither says one.
    """
    if asked.world_size is not None and own is not None and own != asked.world_size:
        raise DocumentError(
            path,
            f"the launch starts {own} processes and --hardware has {asked.world_size} GPUs",
            remedy="give the hardware that it is for",
        )
    found = asked.world_size or own
    if found is None:
        raise DocumentError(
            path,
            "does not say the number of GPUs",
            remedy="give --hardware, such as h100:8x8",
        )
    return found


def without_effect(trainer: str, keys: Iterable[tuple[str, str]]) -> tuple[Notice, ...]:
    """Return notices of keys without effect; each comes with its reason."""
    return tuple(
        notice(f"{trainer}.no-effect", "no effect", "{key}, since {why}", key=key, why=why)
        for key, why in keys
    )


def read_notes(notes: Iterable[str]) -> tuple[Notice, ...]:
    """Return notices of how a file was read."""
    return tuple(notice("read.note", "read", "{note}", note=note) for note in notes)


def with_problems(found: Attempt, broken: Sequence[Notice]) -> tuple[Notice, ...]:
    """Return why a file has no price, and what its trainer ends with, each rule once."""
    ids = {one.id for one in broken}
    unpriced = () if found.unpriced is None else (found.unpriced,)
    return once((*unpriced, *(one for one in found.problems if one.id not in ids), *broken))
