"""Records of `autopar check` common to all engines: `CheckOptions` and `CheckedFile`.

`search.engines.table` identifies the engine of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import field

from autopar.errors import DocumentError, InputError
from autopar.records import Record, replace
from autopar.run.rules import Estimate, Notice, RuleError, notice, without_repetitions
from autopar.run.run import Run
from autopar.run.runtime import PrecisionKind
from autopar.training.lengths import KnownBatching
from search.engines.arguments import BOTH, Ignored, MissingError, UnpricedError
from search.engines.changes import MOVES, Changes, Move
from search.engines.engine import EngineRelease, Span
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
    micro_batch: int | None = None
    """Sequences per GPU and micro-batch, where the training script sets it; None: the file does."""
    global_batch: int | None = None
    """Sequences per step, where the training script sets it; None: the file sets it."""
    precision: PrecisionKind | None = None
    """Precision, where the training script sets it; None: the file sets it."""
    lengths: bool = False
    """True if the lengths of samples are given, so that packed samples are priced."""
    release: EngineRelease | None = None
    """Release of the engine; None: that of the file's container, or the newest known."""


class CheckedFile(Record):
    """Result of reading a launch file: its run, findings, and functions for suggested changes."""

    path: str
    trainer: str
    """Name of the engine for display, such as `Megatron-LM`."""
    stack: str
    """Software stack for estimates, unless the user selects another (`autopar stacks`)."""
    world_size: int
    num_nodes: int | None = None
    """Number of nodes of the launch; None: not given."""
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
    batching: KnownBatching | None = None
    """How the launch makes micro-batches of its samples; None: not known."""
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

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs of each of several nodes; None: one node, or not given."""
        nodes = self.num_nodes or 1
        return self.world_size // nodes if nodes > 1 and self.world_size % nodes == 0 else None

    @property
    def withdrawn(self) -> dict[Estimate, tuple[Notice, ...]]:
        """Findings that withdraw an estimate, by estimate; an estimate without any is given."""
        found = {
            one: tuple(notice for notice in self.findings if one in notice.withdraws)
            for one in BOTH
        }
        return {estimate: notices for estimate, notices in found.items() if notices}

    def why_not_priced(self, *estimates: Estimate) -> str:
        """Return why estimates are withdrawn, such as `--x is not understood`; empty if none is.

        estimates : estimates to explain; none for all.
        """
        notices = without_repetitions(
            one for one in self.findings if {*one.withdraws} & {*(estimates or BOTH)}
        )
        parts = []
        for kind in ("not understood", "not priced"):
            own = [one for one in notices if one.kind == kind]
            # The value of a known argument names the effect without a price.
            names = [
                str(one.values["given"])
                if kind == "not priced"
                else self.spelled(str(one.values["flag"]), None)
                for one in own
                if _named(one)
            ]
            if names:
                text = ", ".join(names[:_MOST_NAMES])
                more = len(names) - _MOST_NAMES
                text += f" and {more} more" if more > 0 else ""
                parts.append(f"{text} {'is' if len(names) == 1 else 'are'} {kind}")
            parts += [one.problem for one in own if not _named(one)]
        return "; ".join(parts)

    def ignoring(self, names: Collection[str]) -> CheckedFile:
        """Return the file with arguments declared harmless, which withdraw no estimate.

        names : flags or dotted keys, with or without leading hyphens.
        """
        plain = {_plain(name) for name in names}
        gone = [
            one
            for one in self.findings
            if one.withdraws and _named(one) and _plain(str(one.values["flag"])) in plain
        ]
        harmless = tuple(
            Ignored(flag=str(one.values["flag"]), value=str(one.values["value"]), understood=True)
            for one in gone
        )
        return replace(
            self,
            findings=tuple(one for one in self.findings if one not in gone),
            harmless=(*self.harmless, *harmless),
        )


_MOST_NAMES = 2
"""Maximum number of arguments that a sentence on withdrawn estimates names."""


def _named(one: Notice) -> bool:
    return "flag" in one.values


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def unread(
    engine: str,
    entries: Iterable[Ignored],
    spelled: Callable[[str, str | None], str],
    remedy: Callable[[str], str] = lambda _: "",
) -> Iterator[Notice]:
    """Yield a notice for each argument that may change an estimate and was not used.

    engine : first part of the ids. spelled : function (flag, value) -> line of the file.
    remedy : function flag -> suggested change.
    """
    for one in entries:
        if one.understood:
            continue
        values = {
            "given": spelled(one.flag, one.value[:_MOST_LETTERS]),
            "flag": one.flag,
            "value": one.value,
            "what": " or ".join(sorted(one.changes, reverse=True)),
        }
        hint = remedy(one.flag)
        if one.concern is None:
            yield notice(
                f"{engine}.unknown",
                "not understood",
                "{given} may change {what}",
                "{remedy}" if hint else "",
                withdraws=one.changes,
                **(values | ({"remedy": hint} if hint else {})),
            )
        else:
            yield notice(
                f"{engine}.unpriced",
                "not priced",
                "{given} ({concern}) may change {what}",
                withdraws=one.changes,
                concern=one.concern,
                **values,
            )


_MOST_LETTERS = 60
"""Maximum length of a value in a notice, in letters."""


class ReadResult(Record):
    """Result of reading a file as a run."""

    run: Run | None = None
    """Run to estimate; None: no estimate is possible."""
    described: Run | None = None
    """Run of the file, even if no estimate is possible; None: not read."""
    ignored: tuple[Ignored, ...] = ()
    problems: tuple[Notice, ...] = ()
    """Findings of kind `illegal` that prevented the file from being read as a run."""
    notes: tuple[str, ...] = ()
    """Sentences on assumptions."""
    unpriced: Notice | None = None
    """Finding of kind `not priced`: reason why a possibly valid run has no estimate; else None."""


MISSING = "read.missing"
"""Id of the finding that an argument is needed and not given."""


def attempt(read: Callable[[], ReadRun]) -> ReadResult:
    """Return the result of `read`, with UnpricedError, RuleError and InputError as findings."""
    try:
        found = read()
    except UnpricedError as error:
        text = "{key} {problem}"
        values = {"key": error.key, "problem": error.problem, "remedy": error.remedy}
        return ReadResult(
            unpriced=notice(
                "read.unpriced", "not priced", text, "{remedy}", withdraws=BOTH, **values
            )
        )
    except RuleError as error:
        return ReadResult(problems=error.broken)
    except DocumentError as error:
        text = "{key}: {problem}" if error.key else "{problem}"
        name = MISSING if isinstance(error, MissingError) else "read.key"
        one = notice(name, "illegal", text, key=error.key, problem=error.problem)
        return ReadResult(problems=(one,))
    except InputError as error:
        return ReadResult(
            problems=(notice("read.file", "illegal", "{problem}", problem=str(error)),)
        )
    why, text = found.unpriced, "{problem}"
    return ReadResult(
        run=None if why else found.run,
        described=found.run,
        ignored=found.ignored,
        notes=found.notes,
        unpriced=notice("read.unpriced", "not priced", text, withdraws=BOTH, problem=why)
        if why
        else None,
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
            remedy=f"Use --hardware CARD:NODESxGPUS with {own} GPUs",
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


def release_notices(
    engine: str,
    release: EngineRelease,
    keys: Iterable[tuple[str, Span]],
    *,
    package: str = "release",
    sure: bool = True,
) -> Iterator[Notice]:
    """Yield a notice for each key that the release does not have, and for an unknown release.

    A key outside of a given release is illegal; otherwise the run may use an older release.

    engine : first part of the ids.
    keys : (key as in the file, releases that have it).
    package : package of the release, if it is not the engine.
    sure : False if the file's program may declare the keys itself.
    """
    if release.note:
        yield notice(
            f"{engine}.release-newer",
            "read",
            "{note}",
            note=release.note,
            release=release.name,
            newest=release.newer_than,
        )
    for given, span in keys:
        if not span.has(release.name):
            yield notice(
                f"{engine}.release",
                "illegal" if release.given and sure else "environment",
                "{given} ({span}) does not exist in {package} {release}",
                "" if release.given else "Give your release with --release",
                given=given,
                span=span.text,
                package=package,
                release=release.name,
                first=span.first or None,
                last=span.last or None,
            )
