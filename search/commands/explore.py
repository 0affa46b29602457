"""autopar-explore: combinations of search options, and search spaces of two closed-form models.

`search.commands.what_if` searches combinations. This module searches the space of a closed-form
model and reports its best executions.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.command.fields import json_option, make, option, read_values, rows_of
from autopar.command.options import Command
from autopar.command.run import say, say_kept
from autopar.errors import INTERRUPTED, InfeasibleError, OptionError
from autopar.output import refuse_clashes
from autopar.records import Record
from search.closed_form import MOST_BATCH, MOST_PROCESSORS, MOST_SEARCHES, MOST_TOP
from search.commands.app import Model, PlotOptions, run_model, write_answer
from search.commands.what_if import COMMAND as COMMAND, execute as execute_what_ifs

if TYPE_CHECKING:
    from search.closed_form.answers import Answer
    from search.closed_form.calculon import System
    from search.closed_form.files import KnownModel
    from search.closed_form.questions import Axis, Search, SearchSettings
    from search.closed_form.session import PointFile, Session
    from search.closed_form.tensor2d import Strategy

_NAME = "autopar-explore"
_IN, _SPACE, _ASK, _TUNERS, _OUT = "Inputs", "Space", "Question", "Tuners", "Output"
_STRATEGIES = ("1d", "2d", "2d-seqp")
_QUIET_S, _EVERY_S = 2.0, 5.0
"""Seconds until the first line of progress, and between lines, if stderr is no terminal."""
_POLL_S = 0.05


# --------------------------------------------------------------------------------------------------
# Command line


@dataclass(frozen=True, kw_only=True)
class CalculonSpaceSpec:
    """Search space of Calculon: a model, a system and the searched executions."""

    application: str = option(help="file, or shipped model such as llama2-7b", panel=_IN)
    system: str = option(help="file, or shipped name such as a100, h100, h200, b200", panel=_IN)
    num_procs: tuple[int, ...] = option(
        help="numbers of processors, such as 512,1024", panel=_IN, low=1, high=MOST_PROCESSORS
    )
    max_batch: int = option(
        help="global batch size, samples per step", panel=_IN, low=1, high=MOST_BATCH
    )
    any_batch: bool = option(
        False, help="largest divisible batch up to --max-batch for each execution", panel=_SPACE
    )
    datatype: Literal["float8", "float16", "bfloat16", "float32"] = option(
        "float16", help="precision of weights and activations", panel=_SPACE
    )
    attention: Literal["multihead", "multiquery", "flash"] = option(
        "multihead", help="kind of attention", panel=_SPACE
    )
    structure: Literal["gpt", "llama"] | None = option(
        None, help="structure of a block", panel=_SPACE, shown="structure of the model, or gpt"
    )
    fused_activation: Literal["true", "false", "both"] = option(
        "true", help="activations fused into the preceding GEMM", panel=_SPACE
    )
    tp_overlap: bool = option(True, help="search overlapped TP communication", panel=_SPACE)
    dp_overlap: bool = option(True, help="search overlapped DP communication", panel=_SPACE)
    offload: bool = option(True, help="search offload to the second memory", panel=_SPACE)
    even_stages: bool = option(
        False, help="search only stages with equal numbers of blocks", panel=_SPACE
    )


@dataclass(frozen=True, kw_only=True)
class Tensor2dSpaceSpec:
    """Search space of the two-dimensional model: a model, a system and the strategies."""

    model: str = option(help="file with l, e, h, depth, f, or shipped model", panel=_IN)
    system: str = option(help="file, or shipped name such as a100, h100, h200, b200", panel=_IN)
    strategy: str = option(
        ",".join(_STRATEGIES), help="1d, 2d, 2d-seqp, or several", panel=_IN, shown="all"
    )
    num_gpus: tuple[int, ...] = option(
        help="numbers of GPUs, such as 512,1024", panel=_IN, low=1, high=MOST_PROCESSORS
    )
    batch: int = option(
        help="global batch size, samples per step", panel=_IN, low=1, high=MOST_BATCH
    )


@dataclass(frozen=True, kw_only=True)
class ClosedFormSearchSpec:
    """Options of a search: number, objective and settings of the reported executions."""

    top: int | None = option(
        None, help="number of reported executions", panel=_ASK, shown="10", low=1, high=MOST_TOP
    )
    """Executions to report; None: 10, or 1 for each setting of a sweep."""
    objective: Literal["rate", "time", "memory"] = option(
        "rate", help="samples/s, step time or memory", panel=_ASK
    )
    frontier: bool = option(
        False, help="print slower executions with less memory as well", panel=_ASK
    )
    sweep: tuple[str, ...] = option(
        (),
        help="search again with other values of a document: PATH=RANGE with the range a:b:xF "
        "(times F), a:b:STEP or a,b,c, such as system.networks.0.bandwidth=300:900:x1.5 "
        "(repeatable)",
        panel=_ASK,
        metavar="PATH=RANGE",
    )
    compat: bool = option(
        False, help="reproduce the published space and figures, defects included", panel=_ASK
    )
    threads: int = option(1, help="number of threads", panel=_ASK, low=1, high=1024)

    def of(self, setting: tuple[float, ...], *, plot: bool) -> SearchSettings:
        """Return the settings of one search.

        setting : values of the swept fields; () without a sweep
        plot : True if plots are requested
        """
        from search.closed_form.questions import SearchSettings

        return SearchSettings(
            top=self.top or (1 if setting else 10),
            objective=self.objective,
            compat=self.compat,
            threads=self.threads,
            # Plots of one search show its frontier, plots of a sweep do not.
            frontier=self.frontier or (plot and not setting),
            degrees=plot and not setting,
        )


@dataclass(frozen=True, kw_only=True)
class AnswerSpec(PlotOptions):
    """Outputs in addition to the tables."""

    all: str | None = option(
        None, help="write every possible execution to a CSV file (.gz compresses)", panel=_OUT
    )
    all_statistics: bool = option(False, help="write all statistics to that file", panel=_OUT)
    json: str | None = json_option(_OUT)
    plot: str | None = option(None, help="folder of the plots (extra: plot)", panel=_OUT)
    plot_format: Literal["png", "svg", "both"] | None = option(
        None, help="format of the plots", panel=_OUT, shown="png"
    )

    def refuse_clashes(self, inputs: Collection[Path]) -> None:
        """Raise OptionError if an output is an input, or if two outputs are one file."""
        files = {"--all": self.all, "--json": self.json}
        refuse_clashes(files, inputs)
        if self.all is not None:
            # The partial file of a stopped search.
            refuse_clashes({**files, "--all": f"{self.all}.part"}, inputs)
        if self.plot is not None:
            from search.closed_form.pictures import PICTURES

            self.refuse_pictures(PICTURES, files, inputs)

    def __post_init__(self) -> None:
        if self.all_statistics and self.all is None:
            raise OptionError("--all-statistics needs --all", remedy="Add --all")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class TunerSpec:
    """A search space defined by a file, and the tuner that searches it."""

    tuner: Literal["exhaustive", "random", "ray", "smac"] = option(
        "exhaustive", help="search method for --space; ray and smac are extras", panel=_TUNERS
    )
    space: str = option(
        help="JSON file with the values of every field of an execution", panel=_TUNERS
    )
    evaluations: int | None = option(
        None,
        help="number of points to estimate",
        panel=_TUNERS,
        shown="300 with ray and smac, 1000000 with random",
        low=1,
        high=2**32 - 1,
    )
    seed: int = option(0, help="random seed of the tuner", panel=_TUNERS, low=0, high=2**32 - 1)
    ray: str | None = option(None, help="Ray cluster: address, auto, or local", panel=_TUNERS)
    ray_search: Literal["optuna", "hyperopt", "random"] = option(
        "optuna", help="search algorithm of Ray Tune", panel=_TUNERS
    )


_OWN = tuple(row.name for row in rows_of(TunerSpec))
_SHARED = ("application", "system", "num-procs", "top", "objective", "compat", "threads", "json")
_CALCULON = Command(
    name=_NAME,
    usage="calculon [OPTIONS]",
    fills=(CalculonSpaceSpec, ClosedFormSearchSpec, TunerSpec, AnswerSpec),
    intro="""Search every execution of the Calculon model: degrees, chunks, micro-batches,
recompute, communication, sharding, overlap, offload and network tiers.

A and S are a JSON file or a shipped name: A a model (llama2-7b) or the six fields of an
application, S a machine (a100, h100, h200, b200).

Exit codes: 0 done, 2 invalid input, 3 no execution is possible, 130 interrupted.
""",
)
_TENSOR2D = Command(
    name=_NAME,
    usage="tensor2d [OPTIONS]",
    fills=(Tensor2dSpaceSpec, ClosedFormSearchSpec, AnswerSpec),
    intro="""Search every candidate after arXiv 2410.00273: degrees, micro-batches, panels, and how
many ranks of each group share a fast domain.

M and S are a JSON file or a shipped name. Strategy 1d divides heads, 2d rows and columns (SUMMA),
2d-seqp heads and the sequence; several are searched one after another.

Exit codes: 0 done, 2 invalid input, 3 no execution is possible, 130 interrupted.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return run_model(arguments, COMMAND, MODELS, execute_what_ifs)


# --------------------------------------------------------------------------------------------------
# Questions of each model: searches of all settings and sizes.


class Question(Record):
    """Searches of one command line, in the order of the answers."""

    name: str
    """Name of the model."""
    system: str
    unit: str
    """Unit of the count: 'processor' or 'GPU'."""
    legend: str
    axes: tuple[Axis, ...]
    searches: tuple[Search, ...]
    notes: Mapping[str, Sequence[str]]
    """Heading -> sentences about assumptions."""


def _calculon(raw: dict[str, Any]) -> int:
    if any(name in raw for name in _OWN):
        return _tune(raw)
    from search.closed_form.calculon.exploration import Space
    from search.closed_form.files import calculon_system, input_files, load_application
    from search.closed_form.questions import CalculonSearch, parse_axis, variants

    values = read_values(_CALCULON.rows, raw)
    asked, files = make(ClosedFormSearchSpec, values), make(AnswerSpec, values)
    space = make(CalculonSpaceSpec, values)
    known = load_application(space.application)
    system = calculon_system(space.system)
    files.refuse_clashes(input_files(model=space.application, system=space.system))
    shared = _space_fields(space, known, compat=asked.compat)
    _require_datatype(space.system, system, space.datatype)
    axes = tuple(parse_axis(text) for text in asked.sweep)
    _require_searches(axes, len(_numbers(space.num_procs)))
    searches = [
        CalculonSearch(
            application=one["application"],
            system=one["system"],
            space=Space(**shared, num_procs=count),
            asked=asked.of(setting, plot=files.plot is not None),
            values=setting,
        )
        for setting, one in variants({"system": system, "application": known.application}, axes)
        for count in _numbers(space.num_procs)
    ]
    question = Question(
        name=known.name,
        system=space.system,
        unit="processor",
        legend="t, p, d: tensor, pipeline, data degree; b: micro-batch; v: chunks per stage; "
        "tiers: networks of t/p/d",
        axes=axes,
        searches=tuple(searches),
        notes=_calculon_notes(values, known, shared, compat=asked.compat),
    )
    return execute(question, files, frontier=asked.frontier)


def _require_searches(axes: Sequence[Axis], each: int) -> None:
    """Raise OptionError if a command requests too many searches."""
    count = math.prod(len(axis.values) for axis in axes) * each
    if count > MOST_SEARCHES:
        raise OptionError(
            f"{count:,} searches are too many, expected {MOST_SEARCHES:,} at most",
            remedy="Use fewer numbers of processors, strategies or --sweep values",
        )


def _require_datatype(name: str, system: System, datatype: str) -> None:
    """Raise InfeasibleError if a system has no rates of a data type."""
    both = [known for known in system.matrix if known in system.vector]
    if datatype not in both:
        raise InfeasibleError(
            f"{name} has no rates of {datatype}",
            remedy=f"Use --datatype {', '.join(both)}",
        )


def _space_fields(space: CalculonSpaceSpec, known: KnownModel, *, compat: bool) -> dict[str, Any]:
    from search.closed_form.files import structure_of

    for option_name, chosen, word in (
        ("attention", space.attention, "flash"),
        ("structure", space.structure, "llama"),
    ):
        if compat and chosen == word:
            raise OptionError(
                f"--{option_name} {word} is not in the published model",
                remedy="Remove it, or remove --compat",
            )
    built = "gpt" if known.spec is None or compat else structure_of(known.spec)
    return {
        "max_batch": space.max_batch,
        "datatype": space.datatype,
        "attention_type": space.attention,
        "structure_type": space.structure or built,
        "fused_activation": space.fused_activation,
        # The published space uses the largest batch that divides, and equal stages.
        "fixed_batch": not (space.any_batch or compat),
        "uneven": not (space.even_stages or compat),
        "tensor_overlap": space.tp_overlap,
        "data_overlap": space.dp_overlap,
        "offload": space.offload,
    }


def _calculon_notes(
    given: Collection[str], known: KnownModel, fields: Mapping[str, Any], *, compat: bool
) -> dict[str, list[str]]:
    from search.closed_form.calculon import Quirks

    batch = fields["max_batch"]
    assumed = [
        f"every execution has a batch of {batch}"
        if fields["fixed_batch"]
        else f"batches are the largest multiple of the data degree up to {batch}",
        *(
            f"{name} {fields[key]}"
            for name, key, said in (
                ("datatype", "datatype", "datatype"),
                ("attention", "attention_type", "attention"),
                ("structure", "structure_type", "structure"),
                ("fused activations", "fused_activation", "fused-activation"),
            )
            if said not in given
        ),
        *(["stages may differ by a block"] if fields["uneven"] else ["stages are equally long"]),
    ]
    if not compat and not known.application.vocab_size:
        assumed.append("vocab_size not given: embedding, head and loss are ignored")
    kept = list(Quirks.meanings.values()) if compat else []
    return {"Defaults": assumed, "Corrections that are off": kept}


def _tensor2d(raw: dict[str, Any]) -> int:
    from search.closed_form.files import input_files, load_model, tensor2d_system
    from search.closed_form.questions import Tensor2dSearch, parse_axis, variants
    from search.closed_form.tensor2d import Quirks

    values = read_values(_TENSOR2D.rows, raw)
    asked, files = make(ClosedFormSearchSpec, values), make(AnswerSpec, values)
    space = make(Tensor2dSpaceSpec, values)
    strategies = _strategies(space.strategy)
    name, model = load_model(space.model)
    system = tensor2d_system(space.system)
    files.refuse_clashes(input_files(model=space.model, system=space.system))
    axes = tuple(parse_axis(text) for text in asked.sweep)
    _require_searches(axes, len(_numbers(space.num_gpus)) * len(strategies))
    searches = [
        Tensor2dSearch(
            strategy=strategy,
            model=one["model"],
            system=one["system"],
            num_gpus=count,
            batch=space.batch,
            asked=asked.of(setting, plot=files.plot is not None),
            values=setting,
        )
        for setting, one in variants({"system": system, "model": model}, axes)
        for count in _numbers(space.num_gpus)
        for strategy in strategies
    ]
    assumed = [f"every candidate has a batch of {space.batch}"]
    if not model.vocab and not asked.compat:
        assumed.append("vocab not given: embedding, head and loss are ignored")
    kept = list(Quirks.meanings.values()) if asked.compat else []
    question = Question(
        name=name,
        system=space.system,
        unit="GPU",
        legend="tp: tensor degree, columns x rows; mbs: micro-batch; nb: panels; "
        "domain: ranks of tp/pp/dp in a fast domain",
        axes=axes,
        searches=tuple(searches),
        notes={"Defaults": assumed, "Corrections that are off": kept},
    )
    return execute(question, files, frontier=asked.frontier)


def _strategies(text: str) -> tuple[Strategy, ...]:
    found: list[Strategy] = []
    for word in text.split(","):
        strategy = next((known for known in _STRATEGIES if known == word.strip()), None)
        if strategy is None:
            raise OptionError(
                f"--strategy: expected {', '.join(_STRATEGIES)} or several of them with commas, "
                f"got {word.strip()!r:.60}"
            )
        found.append(strategy)  # type: ignore[arg-type]  # one of its words
    return tuple(dict.fromkeys(found))


def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    """Return the distinct numbers of a list option, in ascending order."""
    return tuple(sorted(set(values)))


MODELS: Mapping[str, Model] = {
    "calculon": Model(_CALCULON, _calculon),
    "tensor2d": Model(_TENSOR2D, _tensor2d),
}


# --------------------------------------------------------------------------------------------------
# Search with progress, and its results


def execute(question: Question, files: AnswerSpec, *, frontier: bool = False) -> int:
    """Run all searches, write the requested files, print the results, and return the exit code.

    Raises InfeasibleError if no execution is possible.
    """
    from search.closed_form.session import Session
    from search.show.closed_form import infeasible

    if files.plot is not None:
        from autopar.command.show import require_matplotlib

        require_matplotlib("--plot")
    with _point_file(files) as points:
        session = Session(
            searches=question.searches,
            paths=[axis.path for axis in question.axes],
            points=points,
            statistics=files.all_statistics,
        )
        _search(session)
        found = any(answer.best for answer in session.answers)
        if not found and not session.stopped:
            raise infeasible(session.answers, question.name, question.system, question.unit)
        if points is not None:
            # A stopped search keeps its partial file.
            points.keep = session.stopped
    if session.stopped:
        share = session.share * 100
        follows = "the best until then follows" if found else "nothing was found until then"
        say(f"{_NAME}: stopped after {share:.0f} % of the search; {follows}")
        if points is not None:
            say(f"{_NAME}: partial results are in {points.part}, rows: {points.rows:,}")
    elif points is not None:
        say(f"{_NAME}: wrote {files.all}, rows: {points.rows:,}")
    if not found:
        return INTERRUPTED
    try:
        # Before the tables, because the reader of stdout may close the pipe.
        exit_code = INTERRUPTED if session.stopped else 0
        _write(question, session.answers, files, frontier=frontier, exit_code=exit_code)
    finally:
        if files.json != "-":
            _show(question, session.answers)
    return exit_code


def _write(
    question: Question,
    answers: Sequence[Answer],
    files: AnswerSpec,
    *,
    frontier: bool,
    exit_code: int,
) -> None:
    paths = [axis.path for axis in question.axes]
    if files.json is not None:
        from search.show.closed_form import json_document

        alone = len(question.searches) == 1 and not (paths or frontier)
        document = json_document(answers, paths, alone=alone, frontier=frontier)
        write_answer(files.json, document, exit_code, command=_NAME)
    if files.plot is not None:
        from search.closed_form.pictures import save_pictures

        for path in save_pictures(
            files.plot,
            answers,
            title=f"{question.name} on {question.system}",
            unit=question.unit,
            paths=paths,
            formats=files.formats,
            aside=say_kept(_NAME),
        ):
            say(f"{_NAME}: wrote {path}")


@contextlib.contextmanager
def _point_file(files: AnswerSpec) -> Iterator[PointFile | None]:
    if files.all is None:
        yield None
        return
    from search.closed_form.session import PointFile

    with PointFile(files.all, "--all", say_kept(_NAME)) as points:
        yield points


def _search(session: Session) -> None:
    """Run all searches; Ctrl-C ends them between two parts and shows the results so far."""
    try:
        session.start()
        _wait(session)
    except KeyboardInterrupt:
        session.stop()
        say(f"{_NAME}: stopping (Ctrl-C again aborts)")
        while not session.over.wait(_POLL_S):
            pass
    except SystemExit:
        # Terminated by a signal: the core must not outlive the interpreter.
        session.stop()
        session.over.wait()
        raise
    session.finish()


def _wait(session: Session) -> None:
    """Wait for the end of the search, and report its progress."""
    start_s = time.monotonic()
    if session.over.wait(0.3):  # most searches end before progress is useful
        return
    if sys.stderr.isatty():
        _wait_with_bar(session)
        return
    next_s = start_s + _QUIET_S
    while not session.over.wait(_POLL_S):
        if time.monotonic() >= next_s:
            next_s += _EVERY_S
            say(f"{_NAME}: {session.label}: {session.share * 100:.0f} % searched")


def _wait_with_bar(session: Session) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("Ctrl-C shows the best until then", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(session.label, total=len(session.searches))
        while not session.over.wait(_POLL_S):
            bar.update(task, completed=session.done, description=session.label)


def _show(question: Question, answers: Sequence[Answer]) -> None:
    from autopar.command.console import make_console
    from autopar.command.show import print_plain
    from search.show import closed_form as report

    console = make_console(sys.stdout, report.WIDTH)
    print_plain(console, f"{question.name} on {question.system}", style="bold")
    if question.axes:
        paths = [axis.path for axis in question.axes]
        groups: dict[tuple[int, str | None], list[Answer]] = {}
        for answer in answers:
            groups.setdefault((answer.processors, answer.strategy), []).append(answer)
        for group in groups.values():
            report.show_sweep(console, group, paths, unit=question.unit)
    else:
        for place, answer in enumerate(answers):
            report.show_answer(
                console,
                answer,
                unit=question.unit,
                legend="" if place else question.legend,  # printed once
                alone=len(answers) == 1,
            )
            report.show_frontier(console, answer)
        report.show_scaling(console, answers, unit=question.unit)
    report.show_lists(console, question.notes)


# --------------------------------------------------------------------------------------------------
# `--tuner NAME --space FILE`: search spaces defined by a user.


def _tune(raw: Mapping[str, Any]) -> int:
    from search.closed_form.files import (
        calculon_system,
        input_files,
        load_application,
        structure_of,
    )
    from search.closed_form.tuners import load_space, tune

    helps = {row.name: row.help for row in _CALCULON.rows}
    for name in ("application", "system", "space"):
        if name not in raw:
            raise OptionError(f"--{name} is missing", remedy=f"Add it ({helps[name]})")
    for name in helps:
        if name in raw and name not in (*_OWN, *_SHARED):
            raise OptionError(
                f"--{name} cannot be combined with --space (the file lists all points)"
            )
    values = read_values(_CALCULON.rows, raw)
    asked, tuner = make(ClosedFormSearchSpec, values), make(TunerSpec, values)
    files = make(AnswerSpec, values)
    processors = _numbers(values["num-procs"]) if "num-procs" in values else (None,)
    if len(processors) > 1:
        raise OptionError("--num-procs: --space needs one number of processors")
    known = load_application(values["application"])
    read = input_files(model=values["application"], system=values["system"])
    files.refuse_clashes([*read, Path(tuner.space)])
    built = "gpt" if known.spec is None or asked.compat else structure_of(known.spec)
    result = tune(
        known.application,
        calculon_system(values["system"]),
        load_space(Path(tuner.space), num_procs=processors[0], structure_type=built),
        tuner=tuner.tuner,
        evaluations=tuner.evaluations,
        seed=tuner.seed,
        objective=asked.objective,
        threads=asked.threads,
        compat=asked.compat,
        top=asked.top or 1,
        ray=tuner.ray,
        ray_search=tuner.ray_search,
        progress=_talker(),
    )
    if result.best is None:
        reason, count = next(iter(result.refused.items()))
        raise InfeasibleError(
            f"{tuner.space}: none of {result.evaluations:,} points of "
            f"{known.name} on {values['system']} is feasible ({count:,} of them: "
            f"{reason})",
        )
    if files.json is not None:
        from search.show.closed_form import tuning_document

        write_answer(files.json, tuning_document(result), command=_NAME)
    if files.json != "-":
        from autopar.command.console import make_console
        from autopar.command.show import print_plain
        from search.show.closed_form import WIDTH, show_tuning

        console = make_console(sys.stdout, WIDTH)
        print_plain(console, f"{known.name} on {values['system']}", style="bold")
        show_tuning(console, result)
    return 0


def _talker() -> Callable[[int, int], None]:
    next_s = time.monotonic() + _EVERY_S

    def progress(done: int, whole: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _EVERY_S
            say(f"{_NAME}: {done:,} of {whole:,} evaluations", passing=True)

    return progress
