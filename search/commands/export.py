"""autopar-export: a plan as the launch of an engine, and an engine's configuration as a plan."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autopar.command.console import make_console
from autopar.command.fields import json_option, make, option, read_values, rows_of
from autopar.command.options import Command
from autopar.command.run import say, visible
from autopar.command.show import print_item, print_plain
from autopar.documents.catalog import portable_options
from autopar.errors import INFEASIBLE, InputError, OptionError, UnsupportedError
from autopar.records import Record
from autopar.units import format_odds, format_seconds
from search.commands.app import emit, files_read, leave, working, write_results
from search.engines.engine import EXPORTERS, IMPORTERS, Job, as_typed, search_words
from search.engines.place import ENGINES
from search.engines.reprice import Choice, change_sentence, export_document
from search.request.options import PANELS
from search.request.profiles import named_card
from search.request.request import FILLS, Request, build_request, stored_request
from search.show.plan import print_heading

if TYPE_CHECKING:
    from autopar.documents.plan import PlanDocument
    from autopar.run.launch import Launch
    from search.engines.place import Engine
    from search.planning.question import Session
    from search.planning.uniform.files import StoredLaunch
    from search.planning.uniform.solve import Solution

# --------------------------------------------------------------------------------------------------
# What `autopar-export` prints: the report, a refusal, and what keeps everything.


def refusal_lines(choice: Choice) -> Iterator[str]:
    """Yield why nothing is written, and what keeps everything."""
    lowered = choice.lowered
    if lowered.losses:
        yield f"{lowered.engine} cannot do all that the plan says:"
        for loss in lowered.losses:
            yield f"  {loss.field}: {loss.what}"
    else:
        yield f"the plan does not fit as {lowered.engine} runs it:"
        yield f"  memory: {_too_large(choice)}"
    yield from _remedy(choice)
    what = "takes the nearest plan" if lowered.losses else "writes it all the same"
    yield f"nothing was written; --allow-approx {what}"


def overfull_lines(choice: Choice) -> Iterator[str]:
    """Yield a warning where what is written does not fit."""
    if choice.too_large:
        yield f"WARNING: WHAT IS WRITTEN DOES NOT FIT: {_too_large(choice)}"
        yield from _remedy(choice)


def _remedy(choice: Choice) -> Iterator[str]:
    lowered = choice.lowered
    if lowered.search:
        yield f"to find a plan that it runs as priced: autopar-search {search_words(lowered)}"


def _too_large(choice: Choice) -> str:
    """Return what changes as the engine runs a plan, and what is too much then."""
    assert choice.after is not None
    return "; ".join([*_changes(choice), *choice.after.problems])


def _changes(choice: Choice) -> list[str]:
    """Return the difference that an engine makes, none where it runs the plan as it was given."""
    lowered = choice.lowered
    if not (lowered.losses or lowered.as_run):
        return []
    how = f" ({as_typed(lowered.as_run.items())})" if lowered.as_run else ""
    if choice.not_priced:
        change = f"not priced: {choice.not_priced}"
    elif choice.before is None or choice.after is None:
        change = "unknown without hardware; --hardware CARD:NxG prices it"
    else:
        change = change_sentence(choice.before, choice.after)
    return [f"as the engine runs it{how}: {change}"]


def show_export(job: Job, choice: Choice, written: Sequence[str]) -> None:
    """Print the report of an export and its launch command, the command last."""
    console, lowered = make_console(sys.stdout), choice.lowered
    print_plain(
        console,
        f"{job.spec.name} ({job.spec.num_layers} layers) on {job.num_nodes} x "
        f"{job.gpus_per_node} GPUs for {lowered.engine}, {lowered.engine_version}",
        style="bold",
    )
    if lowered.losses:
        print_heading(console, "what is lost")
        for loss in lowered.losses:
            print_item(console, f"{loss.field}: {loss.what}")
    changes = _changes(choice)
    if changes or choice.too_large:
        print_heading(console, "price of the nearest plan" if lowered.losses else "price")
        for change in changes:
            print_item(console, change)
        if choice.before is not None and choice.after is not None:
            times = [format_seconds(p.step_time_s) for p in (choice.after, choice.before)]
            print_item(console, f"{times[0]} per step instead of {times[1]}")
            for problem in choice.after.problems:
                print_item(console, f"does not fit: {problem}")
            if not choice.too_large:
                print_item(console, "it fits")
        if choice.how:
            print_item(console, choice.how)
    for heading, items in (("notes", lowered.notes), ("files", tuple(written))):
        if items:
            print_heading(console, heading)
            for item in items:
                print_item(console, item)
    where = "on the node" if job.num_nodes == 1 else "on every node, with its NODE_RANK"
    print_heading(console, f"launch, {where}")
    home = f"cd {_quoted(str(Path(written[0]).parent))}\n" if written else ""
    sys.stdout.write(home + lowered.launch)


def _quoted(path: str) -> str:
    """Return a path as a shell reads it, without characters that would steer a terminal."""
    if visible(path) == path:
        return shlex.quote(path)
    escaped = path.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{visible(escaped)}'"


# --------------------------------------------------------------------------------------------------
# The command line, both ways.


_NAME = "autopar-export"
_EXPORT = "Export"


@dataclass(frozen=True, kw_only=True)
class ExportSpec:
    """What is handed over, to whom or from whom, and what is written."""

    plan: str = option(help="plan, strategy file or configuration", panel=_EXPORT, positional=True)
    to: str | None = option(
        None, help="the engine to write for", panel=_EXPORT, choices=(*EXPORTERS, "megatron-bridge")
    )
    source: str | None = option(
        None,
        name="from",
        help="read a configuration of this engine",
        panel=_EXPORT,
        choices=tuple(dict.fromkeys((*IMPORTERS, *ENGINES))),
    )
    allow_approx: bool = option(False, help="take the nearest plan, priced again", panel=_EXPORT)
    out: str | None = option(
        None,
        help="folder of the files, `none` writes none [default: exports/ENGINE]; with --from the "
        "strategy file [default: stdout]",
        panel=_EXPORT,
    )
    force: bool = option(
        False, help="replace files of other content, which are kept otherwise", panel=_EXPORT
    )
    json: str | None = json_option(_EXPORT)


COMMAND = Command(
    name=_NAME,
    usage="PLAN.json --to ENGINE [OPTIONS]",
    fills=(ExportSpec, *FILLS),
    without=frozenset(
        {"evaluate", "frontier", "plot", "html", "trace", "output-config-path", "top", "time-limit"}
        | {"verbose", "goal", "tokens-per-s"}
    ),
    panels=(_EXPORT, *PANELS),
    first=(_EXPORT,),
    family="search",
    intro="""Hand a plan over: write the configuration that makes an engine run it.

autopar-export PLAN.json --to ENGINE writes the files and prints the launch command. What the engine
cannot express is listed and nothing is written (exit 3), unless --allow-approx takes the nearest
plan, which is then priced beside yours.

autopar-export --from ENGINE FILE --hardware CARD:NxG reads an existing configuration (script, YAML,
JSON, TOML) and writes the launch or strategy file that autopar-search --evaluate prices.

PLAN.json is a launch or plan file of ours, which names its inputs, or anyone's strategy file with
the options of autopar-search that describe model and hardware.

Exit codes: 0 done, 2 an input is unusable, 3 the engine cannot do all that the plan says.
""",
)


_OWN = frozenset(row.name for row in rows_of(ExportSpec))


def main() -> None:
    """Entry point of `autopar-export`."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _execute)


def _execute(raw: dict[str, Any]) -> int:
    own = make(ExportSpec, read_values(COMMAND.rows, raw))
    asked = {name: value for name, value in raw.items() if name not in _OWN}
    if own.source is None and _is_launch(own.plan):
        return _export_launch(own, asked)
    if (own.to is None) == (own.source is None):
        known = ", ".join(EXPORTERS)
        raise OptionError(
            f"--to: is missing; it takes {known}, and --from reads a configuration"
            if own.to is None
            else "--to: cannot be given with --from; read the configuration first"
        )
    if own.source is not None:
        request = build_request(asked)
        if own.source in ENGINES and (
            # without a cluster there is a plan alone
            own.source not in IMPORTERS or named_card(request.inputs.hardware) is not None
        ):
            return _import_launch(own, own.source, asked)
        return _import(own, own.source, request)
    if own.to not in EXPORTERS:
        raise OptionError(
            f"--to: {own.to} takes launches of megatron, and {own.plan} is none; give --to megatron"
        )
    return _export(own, str(own.to), asked)


# --- plan -> engine ---------------------------------------------------------------------------


def _export(own: ExportSpec, engine: str, raw: Mapping[str, Any]) -> int:
    from autopar.documents.plan import PlanDocument
    from search.engines.engine import lower_for
    from search.engines.handover import job_of, pricer_of
    from search.engines.reprice import advised, choose

    path = own.plan
    document = PlanDocument.read(path)
    stored = stored_request(path, document, raw, _notice)
    request = build_request({**stored, **raw})
    job, session = job_of(path, document, request, _notice)
    if session is not None:
        for name in document.changed_inputs(session.sources):
            say(f"{_NAME}: {name} has changed since the plan was made")
    lower = lower_for(engine)
    try:
        lowered = lower(job)
    except UnsupportedError as error:
        raise advised(job, engine, error) from None
    read = _read_by(path, request, session)
    if lowered.losses and not own.allow_approx:
        # a refusal is about what is lost, not about what it costs
        return _refuse(choose(job, lower, lowered, None), own, read)
    price = None if session is None else pricer_of(session, request)
    choice = working("pricing", lambda: choose(job, lower, lowered, price))
    if choice.too_large and not own.allow_approx:
        return _refuse(choice, own, read)
    folder = Path(own.out or f"exports/{engine}")
    files = _files(choice, engine, path, document) if own.out != "none" else {}
    targets = {folder / name: text for name, text in files.items()}
    written = [str(target) for target in targets]
    answer = export_document(choice, status="exported", files=written)
    _write(own, targets, answer, read)
    for line in overfull_lines(choice):
        say(f"{_NAME}: {line}")
    # stdout holds the document and nothing else
    if own.json == "-":
        emit("-", answer, command=_NAME)
    else:
        show_export(job, choice, written)
    return 0


def _read_by(path: str, request: Request, session: Session | None) -> list[Path]:
    """Return the files that an export reads, which it must not write."""
    sources = [] if session is None else [source.path for source in session.sources]
    return files_read([path, request.inputs.model, *sources])


def _notice(text: str) -> None:
    say(f"{_NAME}: {text}")


def _refuse(choice: Choice, own: ExportSpec, read: Sequence[Path]) -> int:
    answer = export_document(choice, status="refused", files=())
    _write(own, {}, answer, read, INFEASIBLE)
    if own.json == "-":
        emit("-", answer, INFEASIBLE, command=_NAME)
    for line in refusal_lines(choice):
        say(f"{_NAME}: {line}")
    return INFEASIBLE


def _files(choice: Choice, engine: str, path: str, document: PlanDocument) -> dict[str, str]:
    from search.engines.galvatron.plan import is_complete
    from search.engines.reprice import lowered_files

    files = lowered_files(choice.lowered)
    if engine == "galvatron" and document.is_strategy and is_complete(document.plan or {}):
        # Already what the engine reads: its bytes are handed on.
        files[next(iter(files))] = Path(path).read_text(encoding="utf-8")
    return files


def _write(
    own: ExportSpec,
    files: Mapping[Path, str],
    document: Mapping[str, object],
    read: Sequence[Path],
    exit_code: int = 0,
) -> None:
    """Write the files and the object of `--json`, all or none."""
    from autopar.output import refuse_clashes

    for path in files or (None,):
        refuse_clashes({"--json": own.json, "--out": path}, read)
    try:
        # all are looked at before any is written
        for path in files:
            folder = path.parent
            if folder.exists() and not folder.is_dir():
                raise OptionError(
                    f"--out {own.out or folder}: is no folder; give another path, or none"
                )
    except OSError as error:
        raise _unwritable(own, files, error) from None

    def refusal(error: OSError) -> OptionError:
        return _unwritable(own, files, error)

    write_results(
        files,
        own.json,
        document,
        refusal,
        exit_code=exit_code,
        command=_NAME,
        force=own.force,
    )


def _unwritable(own: ExportSpec, files: Mapping[Path, str], error: OSError) -> OptionError:
    where = own.out or next(iter(files)).parent
    return OptionError(
        f"--out {where}: cannot be written ({error.strerror or error}); choose another folder"
    )


# --- launch -> its trainer, or another one --------------------------------------------------------


def _is_launch(path: str) -> bool:
    from search.planning.uniform.files import is_launch

    return path.endswith(".json") and Path(path).is_file() and is_launch(path)


class _Handed(Record):
    """A launch as it is handed to a trainer."""

    launch: Launch
    losses: tuple[str, ...]
    """What is another thing there."""
    change: str
    """What that costs, empty where it is the launch itself."""


def _export_launch(own: ExportSpec, asked: Mapping[str, Any]) -> int:
    """Write the files of a launch for the trainer that it is of, or for another one."""
    from autopar.training.throughput import throughput_entry
    from search.engines.files import LAUNCH, TITLES, written
    from search.engines.place import Place
    from search.planning.route import refuse_options_of_plans
    from search.planning.uniform.files import read_launch
    from search.show.headline import figure_rows, print_rows

    request = build_request(asked)
    refuse_options_of_plans(own.plan, request)
    stored = read_launch(own.plan, request.given)
    engine = own.to or stored.engine
    if engine not in TITLES:
        raise OptionError(
            f"--to: {engine} runs plans, and {own.plan} is a launch; give one of "
            f"{', '.join(TITLES)}"
        )
    handed = _handed(stored, engine)
    question = stored.question
    place = Place(
        num_nodes=question.num_nodes,
        gpus_per_node=question.gpus_per_node,
        model=question.spec.name,
        spec=question.spec,
    )
    found = written(handed.launch, engine=cast(Any, engine), place=place)
    losses = (*handed.losses, *found.losses)
    # its own trainer runs a launch as it can, another one only as it was
    kept = bool(losses) and engine != stored.engine and not own.allow_approx
    folder = Path(own.out or f"exports/{engine}")
    texts = {**found.files, LAUNCH: found.launch} if own.out != "none" else {}
    targets = {} if kept else {folder / name: text for name, text in texts.items()}
    # what another trainer makes of it has its price among the losses
    priced = _predicted(stored) if engine == stored.engine else None
    rates = None if priced is None else priced.assessment.throughput
    answer = {
        "status": "refused" if kept else "exported",
        "engine": engine,
        "engine_version": found.engine_version,
        "files": [str(target) for target in targets],
        "losses": list(losses),
        "price": handed.change or None,
        "predicted": throughput_entry(rates) or None,
        "notes": list(found.notes),
        "launch": found.launch,
    }
    exit_code = INFEASIBLE if kept else 0
    _write(own, targets, answer, files_read([own.plan]), exit_code)
    if own.json == "-":
        emit("-", answer, exit_code, command=_NAME)
    if kept:
        say(f"{_NAME}: {TITLES[cast(Any, engine)]} cannot do all that the launch says:")
        for line in (*losses, *filter(None, [handed.change])):
            say(f"{_NAME}:   {line}")
        say(f"{_NAME}: nothing was written; --allow-approx takes the nearest launch")
        return INFEASIBLE
    if own.json == "-":
        return 0
    console = make_console(sys.stdout)
    print_plain(console, f"{question.title} for {engine}, {found.engine_version}", style="bold")
    if priced is not None and rates is not None:
        print_rows(console, figure_rows(rates, priced.samples_per_s))
    for heading, items in (
        ("what is lost", losses),
        ("price of the nearest launch", tuple(filter(None, [handed.change]))),
        ("notes", found.notes),
        ("files", tuple(map(str, targets))),
    ):
        if items:
            print_heading(console, heading)
            for item in items:
                print_item(console, item)
    where = "on the node" if question.num_nodes == 1 else "on every node, with its NODE_RANK"
    print_heading(console, f"launch, {where}")
    home = f"cd {_quoted(str(folder))}\n" if targets else ""
    sys.stdout.write(home + found.launch)
    return 0


def _predicted(stored: StoredLaunch) -> Solution | None:
    """Return a launch with its price; None where its step has none."""
    from search.engines.spaces import engine_space
    from search.planning.uniform.answer import evaluated

    try:
        one = evaluated(stored.question, engine_space(stored.engine), stored.choice, stored.launch)
    except InputError:
        return None
    return one.best


_STARTED = {("megatron", "megatron-bridge"), ("deepspeed", "accelerate")}
"""(Trainer of a launch, who starts such launches as well)."""


def _handed(stored: StoredLaunch, engine: str) -> _Handed:
    """Return a launch as a trainer takes it: itself, or the nearest one with its price."""
    from search.check.assessment import assess
    from search.engines.space import launch_of
    from search.engines.spaces import engine_space
    from search.planning.uniform.answer import target_of
    from search.planning.uniform.imported import taken_over

    if engine == stored.engine or (stored.engine, engine) in _STARTED:
        return _Handed(launch=stored.launch, losses=(), change="")
    question = stored.question
    own = engine_space(stored.engine, compiled=stored.choice.compiled)
    usual = launch_of(own, question.job, stored.choice)
    found = taken_over(question, stored.launch, usual, stored.choice, engine)
    before = assess(stored.launch, target_of(question, own))
    there = engine_space(engine, compiled=found.choice.compiled)
    after = assess(found.launch, target_of(question, there))
    change = f"not priced: {after.untimed or before.untimed}"
    if before.step is not None and after.step is not None:
        change = (
            f"{format_seconds(after.step.total_s)} per step instead of "
            f"{format_seconds(before.step.total_s)} with {own.title}"
        )
    if after.odds_of_oom > question.oom_risk:
        change += f"; does not fit: out of memory {format_odds(after.odds_of_oom)}"
    return _Handed(launch=found.launch, losses=found.losses, change=change)


# --- trainer -> launch ----------------------------------------------------------------------------


def _import_launch(own: ExportSpec, source: Engine, raw: Mapping[str, Any]) -> int:
    """Write the launch of a trainer's file as `autopar-search` writes its own."""
    from autopar.documents.plan import document_text
    from search.engines.spaces import engine_space
    from search.planning.uniform.answer import Answer, evaluated
    from search.planning.uniform.files import file_name, launch_document
    from search.planning.uniform.imported import import_launch

    found = import_launch(source, own.plan, raw)
    for note in found.notes:
        say(f"{_NAME}: {note}")
    one = evaluated(found.question, engine_space(found.engine), found.choice, found.launch)
    answer = Answer(question=found.question, engines=(one,))
    asked: Mapping[str, object] = found.request
    files: dict[Path, str] = {}
    if own.out not in (None, "none"):
        target = Path(str(own.out))
        target = target / file_name(answer, found.request) if target.is_dir() else target
        asked = portable_options(found.request, target)
    document = launch_document(answer, asked).model_dump() | {"status": "evaluated"}
    text = document_text(document)
    if own.out not in (None, "none"):
        files = {target: text}
    told = {
        "status": "imported",
        "engine": source,
        "launch": document,
        "notes": list(found.notes),
    }
    _write(own, files, told, files_read([own.plan, str(found.request["model"])]))
    for path in files:
        say(f"{_NAME}: wrote {path}; autopar-search --evaluate prices it, autopar-export writes it")
    if own.json == "-":
        emit("-", told, command=_NAME)
    elif not files:
        sys.stdout.write(text)
    return 0


# --- engine -> plan ---------------------------------------------------------------------------


def _import(own: ExportSpec, engine: str, request: Request) -> int:
    from autopar.documents.plan import document_text
    from autopar.documents.strategy import strategy_document, unsaid_by_galvatron
    from search.engines.engine import importer_for
    from search.engines.galvatron.plan import strategy_text
    from search.engines.handover import num_layers_of, world_size_of
    from search.engines.reprice import import_document
    from search.engines.text import read_configuration

    source = read_configuration(own.plan)
    imported = importer_for(engine)(
        source,
        world_size=world_size_of(request),
        num_layers=num_layers_of(request),
    )
    notes = (*source.notes, *imported.notes)
    if beyond := unsaid_by_galvatron(imported.plan):
        notes += (f"{', '.join(beyond)} stands in strategy files of autopar-search alone",)
    for note in notes:
        say(f"{_NAME}: {note}")
    answer = import_document(engine, imported.plan, notes)
    plan = imported.plan
    text = document_text(strategy_document(plan)) if beyond else strategy_text(plan)
    files: dict[Path, str] = {}
    if own.out not in (None, "none"):
        target = Path(str(own.out))
        files = {target / "galvatron_config.json" if target.is_dir() else target: text}
    read = files_read([own.plan, imported.strategy_path, request.inputs.model])
    _write(own, files, answer, read)
    for path in files:
        say(f"{_NAME}: wrote {path}; autopar-search --evaluate prices it")
    if own.json == "-":
        emit("-", answer, command=_NAME)
    # stdout belongs to the document otherwise
    elif not files:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    main()
