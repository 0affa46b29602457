"""autopar-export: write a plan for an engine, or read the configuration of an engine as a plan."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.command.console import make_console
from autopar.command.fields import json_option, make, option, read_values, rows_of
from autopar.command.options import Command
from autopar.command.run import say, visible
from autopar.command.show import print_heading, print_item, print_plain
from autopar.documents.catalog import portable_options
from autopar.documents.json import load_object
from autopar.errors import INFEASIBLE, InputError, OptionError, UnsupportedError
from autopar.records import (
    content_of,
    replace,
)
from search.commands.app import (
    SCRIPT,
    ScriptSpec,
    emit,
    files_read,
    with_script,
    working,
    write_results,
)
from search.engines.table import (
    EXPORTERS,
    IMPORTERS,
    WRITERS,
    engine_named,
    release_for,
    writer_of,
)
from search.request.options import PANELS
from search.request.profiles import named_card
from search.request.request import FILLS, Request, build_request, stored_request

if TYPE_CHECKING:
    from autopar.documents.plan import PlanDocument
    from search.engines.exporter_types import ImportedPlan
    from search.planning.exports import Export

# --------------------------------------------------------------------------------------------------
# Output of `autopar-export`: the report, refusals and warnings.


def refusal_lines(export: Export) -> Iterator[str]:
    """Yield the reasons why nothing is written, and a search command for a supported plan."""
    if export.lossy:
        yield f"{export.engine} does not support all of the {export.kind}:"
        for line in export.loss_lines:
            yield f"  {line}"
        for change in export.changes if export.kind == "launch" else ():
            yield f"  {change}"
        if export.kind == "launch" and export.too_large:
            yield f"  does not fit: {export.too_large}"
    else:
        yield f"the {export.kind} does not fit as {export.engine} runs it:"
        yield f"  memory: {export.too_large}"
    yield from _remedy(export)
    what = f"uses the nearest {export.kind}" if export.lossy else "writes it anyway"
    yield f"nothing is written; --allow-approx {what}"


def overfull_lines(export: Export) -> Iterator[str]:
    """Yield a warning if the written plan does not fit in memory."""
    if export.too_large:
        yield f"WARNING: THE WRITTEN PLAN DOES NOT FIT: {export.too_large}"
        yield from _remedy(export)


def _remedy(export: Export) -> Iterator[str]:
    if export.search:
        yield f"to find a plan that it runs as priced: autopar-search {export.search}"


def show_export(export: Export, written: Sequence[str]) -> None:
    """Print the report of an export and its launch command, the command last."""
    from search.show.summary import print_figures, step_figures

    console = make_console(sys.stdout)
    title = f"{export.title} for {export.engine}, {export.engine_version}"
    print_plain(console, title, style="bold")
    if export.rates is not None and export.samples_per_s is not None:
        print_figures(console, step_figures(export.rates, export.samples_per_s))
    price = f"Estimate of the nearest {export.kind}" if export.losses else "Estimate"
    for heading, items in (
        ("Not supported", tuple(export.loss_lines)),
        (price, (*export.changes, *export.details)),
        ("Notes", export.notes),
        ("Files", tuple(written)),
    ):
        if items:
            print_heading(console, heading)
            for item in items:
                print_item(console, item)
    where = "on the node" if export.num_nodes == 1 else "on every node with its NODE_RANK"
    print_heading(console, f"Launch command, {where}")
    home = f"cd {_quoted(str(Path(written[0]).parent))}\n" if written else ""
    sys.stdout.write(home + export.launch)


def _quoted(path: str) -> str:
    """Return a path quoted for a shell, without characters that control a terminal."""
    if visible(path) == path:
        return shlex.quote(path)
    escaped = path.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{visible(escaped)}'"


# --------------------------------------------------------------------------------------------------
# Command line of export and import


_NAME = "autopar-export"
_EXPORT = "Export"


@dataclass(frozen=True, kw_only=True)
class ExportSpec:
    """Options of an export or import: plan, engine and output."""

    plan: str = option(
        help="plan file, strategy file or configuration", panel=_EXPORT, positional=True
    )
    to: str | None = option(
        None,
        help="engine of the written files",
        panel=_EXPORT,
        choices=tuple(dict.fromkeys((*EXPORTERS, *WRITERS))),
    )
    source: str | None = option(
        None,
        name="from",
        help="engine of the configuration to read",
        panel=_EXPORT,
        choices=tuple(dict.fromkeys((*IMPORTERS, *WRITERS))),
    )
    release: str | None = option(
        None,
        help="release that reads the files, of the engine or of transformers",
        panel=_EXPORT,
        metavar="VERSION",
        shown="newest known",
        brief="release of the engine [newest known]",
    )
    allow_approx: bool = option(False, help="write the nearest plan of the engine", panel=_EXPORT)
    out: str | None = option(
        None,
        help="folder of the written files, or `none` [default: exports/ENGINE]; with --from the "
        "strategy file [default: stdout]",
        panel=_EXPORT,
        brief="folder of the files, or none [exports/ENGINE]",
    )
    force: bool = option(False, help="overwrite existing files (default: keep them)", panel=_EXPORT)
    json: str | None = json_option(_EXPORT)


COMMAND = Command(
    name=_NAME,
    usage="PLAN.json --to ENGINE [OPTIONS]",
    fills=(ExportSpec, ScriptSpec, *FILLS),
    without=frozenset(
        {
            "evaluate",
            "frontier",
            "plot",
            "html",
            "trace",
            "output-config-path",
            "top",
            "time-limit",
            "gap",
        }
        | {"verbose", "goal", "tokens-per-s", "use"}
    ),
    panels=(_EXPORT, SCRIPT, *PANELS),
    first=(_EXPORT,),
    family="search",
    intro="""Write the launch files of an engine for a plan, or read an existing configuration.

autopar-export PLAN.json --to ENGINE writes the files and prints the launch command. Features that
the engine does not support are listed, and nothing is written (exit code 3), unless --allow-approx
selects the nearest plan of the engine and estimates it.

autopar-export --from ENGINE FILE --hardware CARD[:NODESxGPUS] reads an existing configuration
(script, YAML, JSON, TOML) and writes a plan file for autopar-search --evaluate.

PLAN.json is a plan file of autopar-search, or a strategy file with the options of autopar-search
for model and hardware, or a launch script with --hardware CARD[:NODESxGPUS].

Exit codes: 0 done, 2 invalid input, 3 the engine does not support the plan, or it does not fit.
""",
)


_OWN = frozenset(row.name for row in rows_of(ExportSpec))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, with_script(_execute))


def _execute(raw: dict[str, Any]) -> int:
    from search.planning.uniform.files import is_launch
    from search.planning.uniform.imports import holds_launch, with_cluster

    own = make(ExportSpec, read_values(COMMAND.rows, raw))
    asked = {name: value for name, value in raw.items() if name not in _OWN}
    asked = with_cluster(own.plan, asked)
    if own.source is None and not Path(own.plan).exists():
        from autopar.documents.plan import PlanDocument

        PlanDocument.read(own.plan)  # raises the error of a missing file
    if own.source is None and (is_launch(own.plan) or (own.to and holds_launch(own.plan))):
        if own.to is None and asked.get("engine") in EXPORTERS:
            # of a launch, whose engine is known, the option can only be that of the files
            own = replace(own, to=str(asked["engine"]))
        return _export(own, asked)
    if own.to is None and own.source is None:
        own = replace(own, to=_engine_of(own.plan))
    if (own.to is None) == (own.source is None):
        known = ", ".join(EXPORTERS)
        if own.to is None:
            path, engine = Path(own.plan), asked.get("engine")
            if path.is_dir() or not path.exists():
                load_object(path, remedy="Write it with autopar-search")  # raises the error
            remedy = f"Use --to with {known}, or --from ENGINE for a configuration or script"
            raise OptionError(
                "--to: no engine is given",
                remedy=f"Use --to {engine}" if engine in EXPORTERS else remedy,
            )
        raise OptionError(
            "--to cannot be combined with --from",
            remedy="Remove --to, then export the plan file that --from writes",
        )
    if own.source is not None and own.release is not None:
        raise OptionError(
            "--release is the release of written files, got --from", remedy="Use --to"
        )
    if own.source is not None:
        request = build_request(asked)
        if own.source in WRITERS and (
            # Without a cluster, only a per-layer plan can be read.
            own.source not in IMPORTERS or named_card(request.inputs.hardware) is not None
        ):
            return _import_launch(own, own.source, asked)
        return _import(own, own.source, request)
    if own.to not in EXPORTERS:
        raise OptionError(
            f"--to {own.to} needs a uniform plan of megatron, and {own.plan} is not one",
            remedy="Give --to megatron",
        )
    return _export(own, asked)


def _engine_of(path: str) -> str | None:
    """Return the engine whose plans were searched, None if the file names none or is no plan."""
    from autopar.documents.plan import PlanDocument

    try:
        engine = PlanDocument.read(path).options.engine
    except InputError:
        return None
    return engine if engine in EXPORTERS else None


# --- plan or launch -> engine -----------------------------------------------------------------


def _export(own: ExportSpec, raw: Mapping[str, Any]) -> int:
    """Write the files for an engine, or report why not; return the exit code."""
    from autopar.training.throughput import throughput_entry
    from search.planning.exports import export_document
    from search.planning.uniform.imports import holds_launch

    make_export = _of_launch if holds_launch(own.plan) else _of_plan
    export, read = make_export(own, raw)
    refused = (export.lossy or bool(export.too_large)) and not own.allow_approx
    folder = Path(own.out or f"exports/{export.engine}")
    texts = {} if refused or own.out == "none" else export.files
    targets = {folder / name: text for name, text in texts.items()}
    written = [str(target) for target in targets]
    answer = export_document(
        export,
        status="refused" if refused else "exported",
        files=written,
        predicted=throughput_entry(export.rates) or None,
    )
    exit_code = INFEASIBLE if refused else 0
    _write(own, targets, answer, read, exit_code)
    for line in refusal_lines(export) if refused else overfull_lines(export):
        say(f"{_NAME}: {line}")
    # With `--json -`, stdout contains only the document.
    if own.json == "-":
        emit("-", answer, exit_code, command=_NAME)
    elif not refused:
        show_export(export, written)
    return exit_code


def _of_plan(own: ExportSpec, raw: Mapping[str, Any]) -> tuple[Export, list[Path]]:
    """Return the export of a per-layer plan, and the files that were read."""
    from autopar.documents.plan import PlanDocument
    from search.engines.plans import lower_for
    from search.planning.exports import choose, job_of, plan_export, pricer_of, recommended_export

    path, engine = own.plan, str(own.to)
    document = PlanDocument.read(path)
    stored = stored_request(path, document, raw, _notice)
    request = build_request({**stored, **raw})
    job, session = job_of(path, document, request, _notice)
    job = replace(job, release=release_for(engine_named(engine), own.release))
    if session is not None:
        for name in document.changed_inputs(session.sources):
            _notice(f"{name} has changed since the plan was made")
    lower = lower_for(engine)
    try:
        lowered = lower(job)
    except UnsupportedError as error:
        raise recommended_export(job, engine, error) from None
    # A refusal depends on unsupported features, not on the estimate.
    refused = lowered.losses and not own.allow_approx
    price = None if session is None or refused else pricer_of(session, request)
    choice = working("pricing", lambda: choose(job, lower, lowered, price))
    export = plan_export(choice, job)
    if engine == "galvatron" and document.is_strategy:
        export = _with_own_bytes(export, path, document)
    sources = [] if session is None else [source.path for source in session.sources]
    return export, files_read([path, request.inputs.model, *sources])


def _with_own_bytes(export: Export, path: str, document: PlanDocument) -> Export:
    """Return the export with the original text of the strategy file, if Galvatron can read it."""
    from search.engines.galvatron.plan import is_complete

    if not is_complete(document.plan or {}):
        return export
    files = dict(export.files)
    files[next(iter(files))] = Path(path).read_text(encoding="utf-8")
    return replace(export, files=files)


def _of_launch(own: ExportSpec, raw: Mapping[str, Any]) -> tuple[Export, list[Path]]:
    """Return the export of a uniform plan or of an engine's file, and the files that were read."""
    from search.planning.choose import refuse_options_of_plans
    from search.planning.exports import launch_export
    from search.planning.uniform.imports import launch_in

    request = build_request(raw)
    refuse_options_of_plans(own.plan, request)
    stored = launch_in(own.plan, request.given, _notice)
    engine = own.to or writer_of(stored.engine, stored.run)
    if engine not in WRITERS:
        raise OptionError(
            f"--to {engine}: needs a per-layer plan, and {own.plan} is a uniform plan",
            remedy=f"Use --to with {', '.join(WRITERS)}",
        )
    return launch_export(stored, engine, own.release), files_read([own.plan])


def _notice(text: str) -> None:
    say(f"{_NAME}: {text}")


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
        # All folders are checked before any file is written.
        for path in files:
            folder = path.parent
            if folder.exists() and not folder.is_dir():
                raise OptionError(
                    f"--out {own.out or folder}: not a folder", remedy="Use another path, or none"
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
        f"--out {where}: cannot be written ({error.strerror or error})",
        remedy="Use another folder",
    )


# --- engine file -> uniform plan ------------------------------------------------------------------


def _import_launch(own: ExportSpec, source: str, raw: Mapping[str, Any]) -> int:
    """Write the uniform plan of an engine's file in the format of `autopar-search`."""
    from search.engines.table import engine_space
    from search.planning.uniform.answer import UniformResult, evaluated
    from search.planning.uniform.imports import import_launch
    from search.show.uniform_files import launch_document, launch_file_name, launch_text

    found = import_launch(source, own.plan, raw)
    for note in found.notes:
        say(f"{_NAME}: {note}")
    one = evaluated(found.question, engine_space(found.engine), found.choice, found.run)
    answer = UniformResult(question=found.question, engines=(one,))
    asked: Mapping[str, object] = found.request
    files: dict[Path, str] = {}
    if own.out not in (None, "none"):
        target = Path(str(own.out))
        target = target / launch_file_name(answer, found.request) if target.is_dir() else target
        asked = portable_options(found.request, target)
    document = content_of(launch_document(answer, asked), whole=True) | {"status": "evaluated"}
    text = launch_text(answer, asked, "evaluated")
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
        say(
            f"{_NAME}: wrote {path}. Price it with autopar-search --evaluate, export "
            "it with autopar-export"
        )
    if own.json == "-":
        emit("-", told, command=_NAME)
    elif not files:
        sys.stdout.write(text)
    return 0


# --- engine -> plan ---------------------------------------------------------------------------


def _import(own: ExportSpec, engine: str, request: Request) -> int:
    from autopar.documents.plan import document_text
    from autopar.documents.strategy import strategy_document, unsaid_by_galvatron
    from search.engines.galvatron.plan import strategy_text
    from search.engines.table import engine_named
    from search.engines.text import read_configuration
    from search.planning.exports import import_document, num_layers_of, world_size_of

    source = read_configuration(own.plan)
    imports = engine_named(engine).imports
    assert imports is not None, "one of IMPORTERS"
    imported: ImportedPlan = imports(
        source, world_size=world_size_of(request), num_layers=num_layers_of(request)
    )
    notes = (*source.notes, *imported.notes)
    if beyond := unsaid_by_galvatron(imported.plan):
        notes += (f"{', '.join(beyond)} is supported in strategy files of autopar-search only",)
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
        say(f"{_NAME}: wrote {path}. Price it with autopar-search --evaluate")
    if own.json == "-":
        emit("-", answer, command=_NAME)
    # Otherwise stdout contains the document.
    elif not files:
        sys.stdout.write(text)
    return 0
