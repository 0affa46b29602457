"""autopar-check: check a launch script, its memory and step time, and find faster plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autopar.command.fields import json_option, make, option, read_values, rows_of
from autopar.command.options import Command
from autopar.command.run import say
from autopar.documents.catalog import spelled_hardware
from autopar.errors import FAILED, UNUSABLE
from search.commands.app import (
    SCRIPT,
    TUNING,
    LengthsSpec,
    ScriptSpec,
    files_read,
    lengths_of,
    with_script,
    working,
    write_answer,
    write_pictures,
)

if TYPE_CHECKING:
    from autopar.price.assessment import Assessment, Target
    from autopar.rates.accuracy import Accuracy
    from autopar.rates.card import Card
    from autopar.rates.site import Site
    from autopar.training.lengths import Lengths
    from search.check.alternatives import BestChanges
    from search.engines.reader import CheckedFile
    from search.questions.lengths import LengthsAnswer
    from search.show.pictures.files import Pictures

    _Shown = tuple[CheckedFile, Target, Assessment | None, BestChanges | None, LengthsAnswer | None]

_NAME = "autopar-check"
_WHAT, _WHERE, _OUT = SCRIPT, "Cluster", "Output"
_CARD = "h100-80gb"


@dataclass(frozen=True, kw_only=True)
class CheckSpec(LengthsSpec):
    """Options of the check: launch scripts, cluster and output."""

    files: tuple[str, ...] = option(
        help="launch script or configuration file of an engine",
        panel=_WHAT,
        positional=True,
        metavar="FILE",
        brief="launch script or configuration of an engine",
    )
    model: str | None = option(
        None,
        help="model of a DeepSpeed or accelerate file that names none",
        panel=_WHAT,
        metavar="NAME|FOLDER",
        brief="model, where the file names none",
    )
    seq_length: int | None = option(
        None, help="sequence length of such a file, tokens", panel=_WHAT, low=1, metavar="TOKENS"
    )
    release: str | None = option(
        None,
        help="release of the engine, such as 0.17 (DeepSpeed and accelerate: of transformers)",
        panel=_WHAT,
        metavar="VERSION",
        shown="that of the container, or the newest known",
        brief="release of the engine",
    )
    hardware: str | None = option(
        None,
        help="GPUs, such as h100:8x8 (8 nodes of 8 GPUs); h100: those of the file",
        panel=_WHERE,
        metavar="CARD[:NODESxGPUS]",
        parse=spelled_hardware,
        shown="card of the file or h100, GPUs of the file",
    )
    stack: str | None = option(
        None,
        help="software stack of the estimates (`autopar stacks`)",
        panel=_WHERE,
        metavar="NAME|FILE",
        shown="stack of the file's engine",
    )
    site: str | None = option(
        None, help="measured cluster (`autopar sites`)", panel=_WHERE, metavar="NAME|FILE"
    )
    micro_batch_size: int | None = option(
        None,
        help="sequences per GPU and micro-batch, where the file has auto",
        panel=_WHAT,
        low=1,
        metavar="N",
    )
    global_batch_size: int | None = option(
        None,
        help="sequences per step, where the file has auto",
        panel=_WHAT,
        low=1,
        metavar="N",
    )
    precision: Literal["bf16", "fp16", "fp32"] | None = option(
        None, help="precision, where the file has auto", panel=_WHAT
    )
    check_ignore: tuple[str, ...] = option(
        (),
        help="argument or key that changes neither memory nor time (repeatable)",
        panel=_WHAT,
        metavar="NAME",
    )
    oom_risk: float = option(
        0.01, help="largest OOM probability of a plan that fits", panel=_WHERE, above=0, high=1
    )
    verbose: bool = option(
        False,
        help="print memory and time by term, all settings and arguments",
        panel=_OUT,
        brief="print terms, settings and arguments",
    )
    diff: bool = option(
        False,
        help="print the last suggested change as a patch of the file, and nothing else",
        panel=_OUT,
        brief="print only a patch with the suggested change",
    )
    neighbours: bool = option(True, help="search faster plans with a few changes", panel=_OUT)
    strict: bool = option(
        False,
        help=f"exit with {FAILED} if there are findings or the plan does not fit",
        panel=_OUT,
        brief=f"exit with {FAILED} for findings and for plans too large",
    )
    json: str | None = json_option(_OUT)
    html: str | None = option(
        None, help="write an HTML page with charts of one file", panel=_OUT, metavar="PATH"
    )
    trace: str | None = option(
        None,
        help="write the predicted step as a trace for Perfetto (.gz compresses)",
        panel=_OUT,
        metavar="PATH",
        brief="write the predicted step for Perfetto",
    )


COMMAND = Command(
    name=_NAME,
    usage="FILE... [OPTIONS]",
    fills=(CheckSpec, ScriptSpec, LengthsSpec),
    panels=(_WHAT, _WHERE, TUNING, _OUT),
    intro=f"""Check a launch script without running it: errors, memory per stage, OOM probability,
step time, and faster plans with a few changes. The screen abbreviates: mbs = micro-batch size x
micro-batches per step, vp = virtual pipeline size (chunks per stage).

An argument that is not understood withdraws the estimates that it may change; --check-ignore
declares it harmless.

Exit codes: 0 done, {FAILED} findings, no fit or no estimate with --strict, {UNUSABLE} a file cannot
be read as a launch script.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, with_script(_execute))


def _execute(raw: dict[str, Any]) -> int:
    # Heavy imports are not needed for --help.
    from autopar.command.console import make_console
    from autopar.errors import DocumentError, OptionError
    from autopar.output import refuse_clashes
    from search.engines.table import named_card, read_checked
    from search.show.check import check_document, fits_of, show_check
    from search.show.pictures.files import pictures_of
    from search.show.summary import SCREEN_WIDTH

    asked = make(CheckSpec, read_values(rows_of(CheckSpec), raw))
    lengths = lengths_of(asked)
    given = _place(asked)
    if asked.stack is not None:
        given.target(asked.stack)  # report a wrong option before any file is read
    if asked.model is not None:
        _require_model(asked.model)
    hardware = asked.hardware or ""
    own = [asked.stack, asked.site, hardware.rpartition(":")[0] or hardware]
    pictures = pictures_of(asked.html, asked.trace)
    refuse_clashes({"--json": asked.json, **pictures.outputs}, files_read([*asked.files, *own]))
    if pictures.any and len(asked.files) > 1:
        option = "--html" if asked.html is not None else "--trace"
        raise OptionError(f"{option} needs one launch script, got {len(asked.files)} files")
    documents: list[dict[str, Any]] = []
    shown: list[_Shown] = []
    patches: list[str] = []
    says = unread = False
    for path in asked.files:
        place = given
        try:
            if asked.hardware is None:
                place = given.with_card(named_card(path))
            else:
                place = given.with_racks_of(path)
            read = partial(
                read_checked,
                world_size=place.world_size,
                gpu=place.card.gpu,
                model=asked.model,
                seq_length=asked.seq_length,
                micro_batch=asked.micro_batch_size,
                global_batch=asked.global_batch_size,
                precision=asked.precision,
                lengths=lengths is not None,
                release=asked.release,
                ignored=asked.check_ignore,
            )
            file = read(path)
            if place.world_size is not None:
                place.refuse_crowded(file)
        except DocumentError as error:
            if len(asked.files) == 1:
                raise
            # One unreadable file does not hide findings about the others.
            unread = True
            say(f"{_NAME}: {error}")
            documents.append({"file": path, "error": str(error)})
            continue
        if place.world_size is None:
            place, file = place.with_nodes(file)
        place = place._replace(world_size=file.world_size)
        target = place.target(asked.stack or file.stack)
        # changes are searched for full rows, so they are no answer for other lengths
        wanted = asked.neighbours and lengths is None
        assessment, neighbours = _priced(file, target, neighbours=wanted)
        samples = _samples(file, target, assessment, lengths, asked)
        says |= bool(file.findings) or not fits_of(file, assessment, target, samples)
        documents.append(check_document(file, target, assessment, neighbours, samples))
        if pictures.any:
            _draw(pictures, file, target, assessment)
        shown.append((file, target, assessment, neighbours, samples))
        if asked.diff:
            patches.append(_patch(file, neighbours, read))
    exit_code = UNUSABLE if unread else FAILED if asked.strict and says else 0
    # Before anything is printed, because the reader of stdout may close the pipe.
    if asked.json is not None:
        write_answer(asked.json, {"launches": documents}, exit_code, command=_NAME)
    if asked.json == "-":
        return exit_code
    console = make_console(sys.stdout, SCREEN_WIDTH)
    if asked.diff:
        for patch in filter(None, patches):
            console.print(patch.rstrip("\n"), markup=False, soft_wrap=True)
        return exit_code
    for number, one in enumerate(shown):
        if number:
            console.print()
        show_check(console, *one, verbose=asked.verbose, strict=asked.strict)
    return exit_code


def _samples(
    file: CheckedFile,
    target: Target,
    assessment: Assessment | None,
    lengths: Lengths | None,
    asked: CheckSpec,
) -> LengthsAnswer | None:
    """Return throughput and memory of a file's run over samples of different lengths.

    None without lengths, and for a run with a missing estimate, which is reported. Raises
    InputError if it is not known how the run batches samples, or if its rows cannot be of
    different lengths.
    """
    from search.questions.lengths import question_of, with_lengths

    if lengths is None:
        return None
    if assessment is None or assessment.step is None or file.withdrawn:
        why = file.why_not_priced() or "a full sequence has no step time"
        say(f"{_NAME}: {file.path}: --lengths is not priced: {why}")
        return None
    question = question_of(lengths, asked.batching, asked.steps, file.batching)
    return working("pricing other lengths", lambda: with_lengths(assessment, target, question))


def _patch(
    file: CheckedFile, neighbours: BestChanges | None, read: Callable[..., CheckedFile]
) -> str:
    """Return the last suggested change of a file as a patch; empty if there is none.

    Raises InputError if the file cannot be patched as text, such as settings in another file.
    """
    from autopar.errors import InputError
    from search.check.patch import patch_of
    from search.show.check import argument_lines

    best = None if neighbours is None else neighbours.any
    if best is None:
        say(f"{_NAME}: {file.path}: no change is suggested, so there is no patch")
        return ""
    found = patch_of(file, best.changes, best.assessment.run, read)
    if found is None:
        lines = ", ".join(argument_lines(file, best))
        raise InputError(f"{file.path}: cannot be patched as text. Change by hand: {lines}")
    return found


def _draw(
    pictures: Pictures, file: CheckedFile, target: Target, assessment: Assessment | None
) -> None:
    """Write the requested HTML page and trace of a launch script.

    Raises InputError if it has no step time.
    """
    from autopar.errors import InputError
    from search.show.settings import degrees_line

    if assessment is None or assessment.step is None or file.withdrawn:
        why = "it cannot run" if assessment is None else str(assessment.untimed)
        why = file.why_not_priced() or why
        raise InputError(f"{file.path}: no step to draw: {why}")
    title = f"{file.path}: {file.trainer} on {file.world_size} {target.machine.card.name}"
    line = degrees_line(assessment.run)
    write_pictures(
        pictures,
        lambda: pictures.of_launch(assessment, target, title=title, line=line),
        command=_NAME,
    )


def _require_model(name: str) -> None:
    """Raise OptionError if a model given by the user is unknown."""
    from autopar.errors import OptionError
    from search.engines.huggingface.models import model_named

    if model_named(name) is None:
        raise OptionError(
            f"--model {name!r:.60}: unknown model",
            remedy=(
                "Use a shipped name (`autopar models`), a repository such as "
                "llama-3-8b, or a folder with its config.json"
            ),
        )


def _priced(
    file: CheckedFile, target: Target, *, neighbours: bool
) -> tuple[Assessment | None, BestChanges | None]:
    """Return the time and memory of a file's run, and faster variants of it.

    Both are None for a run with illegal arguments, or with arguments that withdraw both estimates.
    The variants are None without `neighbours`, and where an estimate is withdrawn.
    """
    from autopar.price.assessment import Timing, assess
    from search.check.alternatives import neighbours_of
    from search.engines.arguments import BOTH

    if file.run is None or any(one.kind == "illegal" for one in file.findings):
        return None, None
    withdrawn = file.withdrawn
    if len(withdrawn) == len(BOTH):
        return None, None
    untimed = Timing(None, None, file.why_not_priced("time")) if "time" in withdrawn else None
    found = assess(file.run, target, timing=untimed)
    if not neighbours or withdrawn or found.step is None:
        return found, None
    return found, working(
        "searching faster changes",
        lambda: neighbours_of(found, target, file.written, file.moves),
        stops="Ctrl-C stops; --no-neighbours skips this",
    )


class _Place(NamedTuple):
    """Cluster for which runs are estimated, and the allowed OOM probability."""

    card: Card
    world_size: int | None
    """Number of GPUs of the options; None if not given."""
    site: Site | None
    accuracy: Accuracy
    oom_risk: float

    def with_card(self, name: str | None) -> _Place:
        """Return the cluster with the card that a file names, and report which card is used.

        name : card of the file; None if it names none
        """
        from autopar.rates.card import load_card

        of_file = ", which the file names" if name is not None else ""
        say(f"{_NAME}: --hardware not given; using {name or self.card.name}{of_file}")
        return self if name is None else self._replace(card=load_card(name))

    def with_racks_of(self, path: str) -> _Place:
        """Return the cluster with whole trays of each rack for the processes of a file."""
        from autopar.rates.card import tray_gpus
        from autopar.records import replace
        from search.engines.table import launch_file

        each, tray = self.card.max_gpus_per_node, tray_gpus(self.card)
        if tray is None or self.world_size is None:
            return self
        own, racks = launch_file(path).world_size, self.world_size // each
        if own is None or own >= self.world_size or own % (racks * tray):
            return self
        card = replace(self.card, max_gpus_per_node=own // racks)
        return self._replace(card=card, world_size=own)

    def with_nodes(self, file: CheckedFile) -> tuple[_Place, CheckedFile]:
        """Return the cluster with the GPUs per node of a file, and the file with a note on them."""
        from autopar.records import replace
        from search.engines.reader import read_notes

        each = file.gpus_per_node
        if each is None or each >= self.card.max_gpus_per_node:
            return self, file
        card = replace(self.card, max_gpus_per_node=each)
        note = f"{file.num_nodes} nodes of {each} GPUs; --hardware gives others"
        findings = (*file.findings, *read_notes([note]))
        return self._replace(card=card), replace(file, findings=findings)

    def refuse_crowded(self, file: CheckedFile) -> None:
        """Raise DocumentError if the nodes of a launch have too few GPUs for its processes."""
        from autopar.errors import DocumentError

        most = self.card.max_gpus_per_node
        if file.num_nodes and file.world_size > file.num_nodes * most:
            where = "1 node" if file.num_nodes == 1 else f"{file.num_nodes} nodes"
            raise DocumentError(
                file.path,
                f"the script starts {where}, but --hardware has more",
                remedy=f"Use --hardware {self.card.name}:{file.num_nodes}x{most}, or give the "
                "launcher all nodes",
            )

    def target(self, stack: str) -> Target:
        """Return the target for estimates with a software stack; raises InputError if unknown."""
        from autopar.price.assessment import Target
        from autopar.rates.parts.operations import machine_of
        from autopar.rates.stack import load_stack

        return Target(
            machine=machine_of(self.card, load_stack(stack), self.site, gpus=self.world_size),
            accuracy=self.accuracy,
            site_known=self.site is not None and bool(self.site.known),
            oom_risk=self.oom_risk,
        )


def _place(asked: CheckSpec) -> _Place:
    """Return the cluster given by the options, or the default card."""
    from autopar.rates.accuracy import load_accuracy
    from autopar.rates.card import load_card, parse_hardware
    from autopar.rates.site import load_site
    from autopar.records import replace

    name, world, per_node = _CARD, None, None
    if asked.hardware is not None and ":" not in asked.hardware:
        name = asked.hardware
    elif asked.hardware is not None:
        name, nodes, per_node = parse_hardware(asked.hardware)
        world = nodes * per_node
    card = load_card(name)
    if per_node is not None and per_node < card.max_gpus_per_node:
        card = replace(card, max_gpus_per_node=per_node)
    site = None if asked.site is None else load_site(asked.site)
    return _Place(card, world, site, load_accuracy(), asked.oom_risk)
