"""autopar-search: find the fastest plan that fits, from profiles or datasheets."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from autopar.command.fields import make, option, read_values, rows_of
from autopar.command.options import Command
from autopar.command.run import say
from autopar.documents.catalog import portable_options
from autopar.errors import INFEASIBLE, InputError, OptionError
from autopar.records import (
    replace,
)
from autopar.sanity_checks import InputWarning
from autopar.training.lengths import ROWS_DIFFER
from search.commands.app import (
    LengthsSpec,
    emit,
    files_read,
    lengths_of,
    unwritable,
    working,
    write_pictures,
    write_results,
)
from search.request.options import PANELS
from search.request.request import FILLS, Request, build_request, stored_request

if TYPE_CHECKING:
    from autopar.answer import Answer as Record, EngineBest, Priced
    from autopar.command.console import Console
    from autopar.training.throughput import Throughput
    from search.planning.layered.parts import ChosenPlans
    from search.planning.layered.prediction import SearchResult
    from search.planning.session import Session
    from search.planning.uniform.answer import UniformResult
    from search.questions.goals import GoalResult
    from search.questions.lengths import LengthsQuestion
    from search.show.pictures.files import Pictures

_NAME = "autopar-search"


@dataclass(frozen=True, kw_only=True)
class SkeletonSpec:
    """Option of a search that writes a model file instead of searching."""

    write_skeleton: str | None = option(
        None,
        help="write --model as a model.json to check, also of an unknown family",
        panel=PANELS[0],
        metavar="FILE",
    )


COMMAND = Command(
    name=_NAME,
    fills=(*FILLS, LengthsSpec, SkeletonSpec),
    panels=PANELS,
    first=(),
    family="search",
    intro="""Find the fastest parallel training plan that fits in memory.

--hardware h100:4x8 --model llama3-70b estimates from datasheets. For measured profiles, pass their
files or folders with the path options below. Without options the shipped example is searched.

Exit codes: 0 done, 2 invalid input, 3 no plan fits, or none was found in time. The plan is printed
to stdout and written to two files; messages are printed to stderr.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _answered)


def _answered(raw: Mapping[str, object]) -> int:
    """Print the fastest uniform or per-layer plan, or a given one; return the exit code."""
    asked = dict(raw)
    skeleton = asked.pop("write-skeleton", None)
    raw, samples = _with_samples(asked)
    request = replace(build_request(raw), samples=samples)
    if skeleton is not None:
        return _write_skeleton(request, Path(str(skeleton)))
    if request.output.plot_path is not None:
        request = replace(build_request({**raw, "frontier": True}), samples=samples)
    # Check outputs before the search.
    _pictures(request, [request.inputs.model])
    _check_plot(request.output.plot_path)
    path = request.output.evaluate
    _check_goal(request)
    # Clusters are compared, and plans evaluated, with full rows.
    chosen_by = "--evaluate" if path is not None else f"--goal {request.output.goal}"
    if samples is not None and chosen_by != "--goal throughput":
        raise OptionError(
            f"--lengths cannot be combined with {chosen_by}", remedy="Remove one of them"
        )
    if path is not None:
        return _evaluate(request, path, raw)
    from search.planning.choose import Solved, completed
    from search.questions.goals import solved_goal

    whole, says = completed(request)
    for line in says:
        say(f"{_NAME}: {line}")
    answered = working("searching", lambda: solved_goal(raw, whole))
    request, route, found = answered.request, answered.route, answered.found
    reached = answered.reached
    for notice in found.notices:
        say(f"{_NAME}: {notice}")

    def points(per_layer: tuple[Session, SearchResult] | None) -> list[SearchResult] | None:
        if not request.output.frontier:
            return None
        from search.planning.frontier import frontier

        solved = Solved(request=request, found=found, per_layer=per_layer)
        return working("searching other budgets", lambda: frontier(route, solved))

    if found.launches is not None and (samples is not None or not found.layers_differ):
        return _show_launches(request, found.launches, reached, points(None), samples)
    if samples is not None:
        raise OptionError(
            "--lengths needs a uniform plan, not a per-layer plan", remedy="Add --engine any"
        )
    code = _show_plan(found, reached, points)
    if found.why and code == 0:
        # If a plan was found, an unusable input is only reported.
        say(f"{_NAME}: answered with {found.why}")
    return code


def _with_samples(asked: dict[str, object]) -> tuple[dict[str, object], LengthsQuestion | None]:
    """Return the options of the search, and the question of `--lengths`; None without it.

    Rows of different lengths add `--pp 1`, as stages of a pipeline exchange messages of one size.
    """
    rows = rows_of(LengthsSpec)
    own = {row.name: asked.pop(row.name) for row in rows if row.name in asked}
    spec = make(LengthsSpec, read_values(rows, own))
    lengths = lengths_of(spec)
    if lengths is None:
        return asked, None
    from search.questions.lengths import question_of

    question = question_of(lengths, spec.batching, spec.steps, None)
    if spec.batching in ROWS_DIFFER and asked.get("pp") is None:
        say(f"{_NAME}: --batching {spec.batching}; using --pp 1, as its rows have many lengths")
        asked["pp"] = "1"
    return asked, question


def _write_skeleton(request: Request, target: Path) -> int:
    """Write the model of a request as a `model.json`, and print its assumptions."""
    from autopar.documents import catalog
    from autopar.documents.json import load_object
    from autopar.documents.spec import FORMAT, load_spec, write_spec
    from autopar.families.config import skeleton_of
    from autopar.run.model import model_parameter_count

    name, lengths = request.inputs.model, request.inputs.seq_length
    if name is None:
        raise OptionError("--write-skeleton needs a model", remedy="Add --model config.json")
    if request.output.json_path is not None:
        raise OptionError(
            "--write-skeleton cannot be combined with --json", remedy="Remove one of them"
        )
    if target.exists():
        raise OptionError(f"--write-skeleton {target}: this file exists", remedy="Use another name")
    source = catalog.find_model(name)
    data = load_object(source).data
    length = lengths[0] if lengths and len(lengths) == 1 else None
    assumed: tuple[str, ...] = ()
    if data.get("format") == FORMAT or ("layers" in data and "model_type" not in data):
        spec = load_spec(name, seq_length=lengths)
    else:
        spec, assumed = skeleton_of(source, data, seq_length=length)
    text = "; ".join((f"from {source.name}", *assumed))
    try:
        write_spec(spec, target, source=text)
    except OSError as error:
        raise OptionError(
            f"--write-skeleton {target}: cannot be written ({error.strerror or error})",
            remedy="Use another folder",
        ) from None
    count = model_parameter_count(spec)
    say(f"{_NAME}: wrote {target}: {spec.num_layers} layers, {count / 1e9:.4g}e9 parameters")
    for sentence in assumed:
        say(f"{_NAME}: to check: {sentence}")
    return 0


def _check_plot(path: str | None) -> None:
    """Raise OptionError or InstallError if the frontier cannot be drawn."""
    if path is None:
        return
    from autopar.command.show import require_matplotlib

    if not path.lower().endswith((".png", ".svg")):
        raise OptionError(f"--plot is {path!r:.60}, expected a file that ends in .png or .svg")
    require_matplotlib("--plot")


def _check_goal(request: Request) -> None:
    """Raise OptionError for a goal without alternatives, or a rate without a goal."""
    goal, path = request.output.goal, request.output.evaluate
    if request.output.tokens_per_s is not None and goal == "throughput":
        raise OptionError(
            "--tokens-per-s needs --goal cost or fewest-gpus",
            remedy="Add --goal cost or --goal fewest-gpus",
        )
    for name, there in (("--evaluate", path), ("--frontier", request.output.frontier)):
        chooses = f"--goal {goal}" if goal != "throughput" else f"--use {request.output.use}"
        if there and (goal != "throughput" or request.output.use is not None):
            raise OptionError(
                f"{chooses} cannot be combined with {name}", remedy="Remove one of them"
            )


def _evaluate(request: Request, path: str, raw: Mapping[str, object]) -> int:
    """Print and write the estimate of the plan of a file; typed options replace stored ones."""
    from search.planning.choose import refuse_options_of_plans, with_pinned_degrees
    from search.planning.uniform.imports import holds_launch
    from search.questions.given import GivenLaunch, GivenPlan, given_launch, given_plan
    from search.show.terminal import show_given

    def notice(text: str) -> None:
        say(f"{_NAME}: {text}")

    is_launch = holds_launch(path)
    if request.engine not in ((None,) if is_launch else (None, "none")):
        raise OptionError(
            "--engine cannot be combined with --evaluate", remedy="Remove one of them"
        )
    given: GivenLaunch | GivenPlan
    if is_launch:
        refuse_options_of_plans(path, request)
        given = given_launch(path, request.given, notice, request.output.price)
    else:
        from autopar.documents.plan import PlanDocument

        with_pinned_degrees(request)
        document = PlanDocument.read(path)
        # A strategy file contains only the plan.
        stored = stored_request(path, document, raw, notice)
        request = with_pinned_degrees(build_request({**stored, **raw}))
        request = replace(request, engine=None)
        given = given_plan(path, request, notice, document)
        _paths(request, given.session)
    pictures = _pictures(request, [path, request.inputs.model])
    write_pictures(pictures, lambda: given.draw(pictures), unwritable, command=_NAME)
    # Before anything is printed, because the reader of stdout may leave.
    _emit(request, given.document(_portable(given.request, request.output.json_path)))
    if request.output.json_path != "-":
        show_given(_console(), given.answer, path=None if is_launch else path)
    return 0


def _show_launches(
    request: Request,
    found: UniformResult,
    reached: GoalResult | None,
    frontier: Sequence[SearchResult] | None,
    samples: LengthsQuestion | None,
) -> int:
    """Print and write the best uniform plan, or print why there is none; return the exit code.

    samples : lengths of the samples, with which the plan is priced, too; None for full rows.
    """
    from autopar.output import refuse_clashes
    from search.planning.uniform.summary import summary_of
    from search.show.uniform_files import launch_file_name, launch_result, launch_text

    pictures = _pictures(request, [request.inputs.model])
    json_path = request.output.json_path
    asked = _portable(request.given, json_path)
    document = launch_result(found, asked, frontier) if json_path is not None else {}
    document |= _goal_entry(reached)
    if found.best is None:
        return _show_none(request, found, document)
    rows: list[tuple[str, str]] = []
    if samples is not None:
        rows, document["lengths"] = working(
            "pricing other lengths", lambda: _sampled(found, samples)
        )
    files: dict[Path, str] = {}
    says = []
    if request.output.config_path is not None:
        target = Path(request.output.config_path)
        if target.suffix != ".json" or target.is_dir():
            target = target / launch_file_name(found, request.given)
        asked = portable_options(request.given, target)
        files[target] = launch_text(found, asked)
        outputs = {"--json": json_path, "--output-config-path": target}
        refuse_clashes(outputs | pictures.outputs, files_read([request.inputs.model]))
        says.append(f"to run it: autopar export {shlex.quote(str(target))}")
    # Pages need further searches, which take longer than drawing: the spinner names them.
    doing = "drawing" if pictures.html is None else "searching other batches and clusters"
    drawn = working(doing, lambda: pictures.of_answer(found, curves=True, frontier=frontier or ()))
    says += _batch_lines(found, reached)
    plan = next(iter(files), None)
    full = samples is not None and samples.batching in ROWS_DIFFER
    record = partial(summary_of, found, rows, full=full)
    plot = partial(_plot, request, frontier, found.question.title, says)
    _deliver(
        request, record, pictures, drawn | files, document, says, reached, plan, frontier, plot
    )
    return 0


def _sampled(
    found: UniformResult, samples: LengthsQuestion
) -> tuple[list[tuple[str, str]], dict[str, object]]:
    """Return the rows and the JSON of the best plan over samples of different lengths.

    A search compares plans with full rows, packed or not, so the alternatives are priced with the
    samples, too.
    """
    from search.questions.lengths import with_lengths
    from search.show.lengths import length_rows, lengths_entry

    best = found.best
    assert best is not None, "there is a plan"
    assert best.best is not None, "its engine has a plan"
    assert best.solved is not None, "it was searched"
    first = best.best
    others = [one for one in best.solved.solutions if one.choice != first.choice]
    skew = found.question.job.skew
    answer = with_lengths(first.assessment, best.target, samples, skew=skew)
    rows = length_rows(answer, best.target)
    rates = [answer.own.real_tokens_per_s]
    for other in others:
        own = with_lengths(other.assessment, best.target, samples, compare=False, skew=skew).own
        fits = own.oom_probability <= best.target.oom_risk
        rates.append(own.real_tokens_per_s if fits else 0.0)
    gain = max(rates) / rates[0] - 1.0
    if gain > _LEAST_GAIN:
        words = [first, *others][rates.index(max(rates))].line
        rows.append(("Faster with them", f"{words}: {gain * 100:.1f} % more real tokens/s"))
    return rows, lengths_entry(answer)


_LEAST_GAIN = 0.005
"""Relative gain at which a plan that is faster with the given lengths is printed."""


def _plot(
    request: Request, frontier: Sequence[SearchResult] | None, title: str, says: list[str]
) -> None:
    """Draw the frontier if the user asked for it, and add the message about its file."""
    if request.output.plot_path is None or frontier is None:
        return
    from autopar.command.run import say_kept
    from search.show.frontier import save_frontier

    path = Path(request.output.plot_path)
    save_frontier(frontier, path, title, say_kept(_NAME))
    says.insert(0, f"wrote {path}")


def _show_none(request: Request, found: UniformResult, document: dict[str, object]) -> int:
    """Print why no plan fits, and suggestions with which one fits; return the exit code."""
    from search.questions.suggestions import remedies
    from search.show.terminal import infeasible_lines, remedy_line, show_infeasible
    from search.show.uniform_files import remedy_entry

    ways = working("searching configurations that fit", lambda: remedies(found.question))
    lines = [*infeasible_lines(found), *map(remedy_line, ways)]
    on_stdout = request.output.json_path == "-"
    # Notices must come before the object of --json; otherwise the screen below shows them.
    for line in lines if on_stdout else lines[:1]:
        say(f"{_NAME}: {line}")
    _emit(request, document | {"remedies": [remedy_entry(one) for one in ways]}, INFEASIBLE)
    if not on_stdout:
        show_infeasible(_console(), found, ways, verbose=request.output.verbose)
    return INFEASIBLE


def _deliver(
    request: Request,
    answer: Callable[[], Record],
    pictures: Pictures,
    files: Mapping[Path, str],
    document: Mapping[str, object],
    says: Sequence[str],
    reached: GoalResult | None,
    plan: Path | None,
    frontier: Sequence[SearchResult] | None = None,
    plot: Callable[[], None] = lambda: None,
) -> None:
    """Write files and the object of `--json`, print the answer, and report written files.

    says : messages about files, printed after their names
    plan : file of the plan among `files`; None for none
    frontier : results by memory budget, printed last
    plot : function that draws them
    """
    output = request.output
    try:
        # Before anything is printed, because the reader of stdout may leave.
        refusal = pictures.refusal(unwritable)
        write_results(files, output.json_path, document, refusal, command=_NAME)
        plot()
        says = [*(f"wrote {path}" for path in files), *says]
    finally:
        # The answer is printed even if files cannot be written. With `--json -`, stdout contains
        # only the document.
        if output.json_path != "-":
            from search.show.frontier import show_frontier
            from search.show.terminal import show_answer

            part = "" if reached is None else reached.words
            show_answer(_console(), answer(), verbose=output.verbose, part=part, path=plan)
            if frontier is not None:
                show_frontier(_console(), frontier)
    if output.json_path == "-":
        emit("-", document, command=_NAME)
    for line in says:
        say(f"{_NAME}: {line}")


def _portable(asked: Mapping[str, object], json_path: str | None) -> dict[str, object]:
    """Return options for a `--json` file, with portable paths; unchanged for stdout."""
    return dict(asked) if json_path in (None, "-") else portable_options(asked, str(json_path))


def _batch_lines(found: UniformResult, reached: GoalResult | None) -> list[str]:
    """Return a message if the batch is uneven over ranks and the next even one is faster.

    reached : the chosen part of a cluster; the batch is then one for all GPUs, if these were faster
    """
    from search.planning.uniform.answer import faster_batch

    whole = None if reached is None else reached.whole
    asked = whole or found
    best, job = asked.fastest, asked.question.job
    assert best is not None, "there is a launch"
    other = working("looking at the next batch", lambda: faster_batch(asked))
    if other is None:
        return []
    shared = _shared(best.choice.global_batch, job.world)
    better = f"--global-batch-size {other.choice.global_batch} reaches"
    if whole is not None and reached is not None:
        rate = other.samples_per_s * job.seq
        return [f"{shared}; {better} {rate:,.0f} tokens/s"] * (rate > reached.part.tokens_per_s)
    now, then = best.assessment.tokens_per_s or 0.0, other.assessment.tokens_per_s or 0.0
    return [f"{shared}; {better} {then:,.0f} tokens/s/GPU instead of {now:,.0f}"]


def _shared(batch: int, world: int) -> str:
    most = math.gcd(batch, world)
    return f"on {world} GPUs a global batch of {batch} has a data-parallel degree of {most} at most"


def _say_batch_of_plan(request: Request, session: Session, result: SearchResult) -> None:
    """Report if the batch of a per-layer plan is uneven over ranks and a larger one is faster."""
    from search.planning.space import next_batch

    batch, world = session.options.settle_bsz, session.hardware.world_size
    prediction = result.prediction
    if prediction is None or batch is None or request.options.settle_chunk is not None:
        return
    better = next_batch(batch, world)
    if better is None:
        return
    options = replace(session.options, settle_bsz=better, top=0)
    planner = session.rebuilt(options=options)
    found = working("looking at the next batch", planner.solve).prediction
    now = prediction.samples_per_s
    if found is None or found.samples_per_s < 1.01 * now:
        return
    say(
        f"{_NAME}: {_shared(batch, world)}; --global-batch-size {better} reaches "
        f"{found.samples_per_s:.5g} samples/s instead of {now:.5g}"
    )


def _goal_entry(reached: GoalResult | None) -> dict[str, object]:
    """Return the entries of `--json` with the chosen part, and the parts that were searched."""
    if reached is None:
        return {}
    return {"part": asdict(reached.part), "clusters_tried": [asdict(one) for one in reached.tried]}


def _console() -> Console:
    """Return the console of a report: 80 columns without a terminal."""
    from autopar.command.console import make_console
    from search.show.summary import SCREEN_WIDTH

    return make_console(sys.stdout, SCREEN_WIDTH)


def _pictures(request: Request, read: Sequence[str | None]) -> Pictures:
    """Return the requested pages and traces; raises OptionError if a file is used twice.

    read : input files, which outputs must not replace
    """
    from autopar.output import refuse_clashes
    from search.show.pictures.files import pictures_of

    found = pictures_of(request.output.html_path, request.output.trace_path)
    own = {"--json": request.output.json_path, "--plot": request.output.plot_path}
    refuse_clashes({**own, **found.outputs}, files_read(read))
    return found


def _show_plan(
    found: ChosenPlans,
    reached: GoalResult | None,
    points: Callable[[tuple[Session, SearchResult] | None], list[SearchResult] | None],
) -> int:
    """Search the per-layer plan with its alternatives, print and write it; return the exit code.

    reached : the cluster chosen for a goal
    points : function from the answer to the frontier, None if it was not requested
    """
    from search.planning.choose import best_per_layer, opened

    request, engines = found.request, found.lines
    session = opened(found)
    for notice in session.notices:
        say(f"{_NAME}: {notice}")
    paths = _paths(request, session)
    pictures = _pictures(request, [request.inputs.model])
    result = working("searching", lambda: best_per_layer(found, session))
    frontier = points((session, result))
    # The object of --json is only made if requested.
    document: dict[str, object] = {}
    if request.output.json_path is not None:
        from search.show.files import result_document

        document = result_document(
            result, frontier, engines, _throughput(session, result), request.output.price
        ).content()
        document |= _goal_entry(reached)
    if result.infeasibility is not None:
        from search.planning.layered.summary import infeasible_sentence

        budget = session.options.memory_constraint_bytes
        why = infeasible_sentence(
            result.infeasibility, budget, options=result.options, subject=_subject(session)
        )
        # before the document, whose notices contain it
        say(f"{_NAME}: {why}")
        _emit(request, document, INFEASIBLE)
        return INFEASIBLE
    if result.plan is None:
        limit = request.options.time_limit_s
        say(f"{_NAME}: time limit reached before a plan was found. Increase --time-limit {limit:g}")
        _emit(request, document, INFEASIBLE)
        return INFEASIBLE
    plan, prediction = result.plan, result.prediction
    assert prediction is not None, "a plan has a prediction"
    drawn = working(
        "drawing",
        lambda: pictures.of_plan(
            session,
            plan,
            prediction,
            state="fastest plan that fits",
            result=result,
            frontier=frontier or (),
        ),
    )
    files, says = _files(request, session, result, paths, engines)
    # A first screen has no room for notes, but doubts about inputs must not be missed.
    says += (
        []
        if request.output.verbose
        else [one for one in result.notes if isinstance(one, InputWarning)]
    )

    def answer() -> Record:
        from search.planning.layered.summary import summary_of

        return summary_of(
            result,
            title=session.title,
            by_engine=engines,
            tokens=_tokens(found.launches),
            throughput=_throughput(session, result),
            gpu_hour_price=request.output.price,
            uniform=_uniform(session, result, found.launches),
        )

    plot = partial(_plot, request, frontier, session.title, says)
    files |= drawn
    own = paths[-1] if paths is not None else None
    _deliver(request, answer, pictures, files, document, says, reached, own, frontier, plot)
    _report_pins(request, session, result)
    _say_batch_of_plan(request, session, result)
    return 0


def _tokens(launches: UniformResult | None) -> float | None:
    """Return sequence length over number of GPUs; None if no uniform plans were searched."""
    return None if launches is None else launches.question.job.seq / launches.question.job.world


def _throughput(session: Session, result: SearchResult) -> Throughput | None:
    if result.plan is None or result.prediction is None:
        return None
    return session.throughput(result.plan, result.prediction)


def _uniform(
    session: Session, result: SearchResult, launches: UniformResult | None
) -> Priced | None:
    """Return the best uniform plan; None if the answer is uniform.

    launches : uniform plans that were also searched. Without them the same space is searched again
        for uniform plans, unless time is limited.
    """
    assert result.plan is not None, "there is a plan to compare with"
    if launches is not None and launches.best is not None:
        from search.planning.uniform.summary import priced_of

        return priced_of(launches, launches.best)
    options = session.options
    if len({*result.plan.layers}) == 1 or options.time_limit_s is not None:
        return None
    one = replace(options, fine_grained_mode=False)
    try:
        found = working(
            "searching uniform plans", lambda: session.rebuilt(options=one).solve(top=0)
        )
    except InputError:  # such as rules for some of the layers
        return None
    if found.plan in (None, result.plan):
        return None
    from search.planning.layered.summary import priced_of_result

    return priced_of_result(found, _throughput(session, found))


def _subject(session: Session) -> str:
    """Return model, number of heads if known, and GPUs as text; degrees have to divide them."""
    heads = dict.fromkeys(layer.num_heads for layer in session.spec.layers if layer.num_heads)
    known = f" ({' and '.join(map(str, heads))} heads)" if heads else ""
    count = session.hardware.world_size
    return f"{session.spec.name}{known} on {count} GPU{'s' if count != 1 else ''}"


def _emit(request: Request, document: Mapping[str, object], exit_code: int = 0) -> None:
    if request.output.json_path is not None:
        emit(request.output.json_path, document, exit_code, command=_NAME)


def _paths(request: Request, session: Session) -> tuple[Path, Path] | None:
    """Return the output files of a plan, or None if none are requested.

    Raises OptionError if an output is an input, or if two outputs are one file.
    """
    from autopar.output import refuse_clashes

    output, paths = request.output, None
    if output.config_path is not None and output.evaluate is None:
        from search.show.files import output_paths

        paths = output_paths(
            spec=session.spec,
            options=session.options,
            hardware=session.hardware,
            config_path=output.config_path,
            request={**session.named, **request.given},
            engine=request.engine,
        )
    sources = [source.path for source in session.sources]
    read = files_read([output.evaluate, request.inputs.model, *sources])
    # The strategy file and the plan file next to it belong to one option.
    for path in paths or (None,):
        outputs = {"--json": output.json_path, "--output-config-path": path}
        outputs |= {"--html": output.html_path, "--trace": output.trace_path}
        refuse_clashes(outputs, read)
    return paths


def _files(
    request: Request,
    session: Session,
    result: SearchResult,
    paths: tuple[Path, Path] | None,
    engines: Sequence[EngineBest],
) -> tuple[dict[Path, str], list[str]]:
    """Return the files of a plan and the messages about them."""
    if paths is None or result.plan is None:
        return {}, []
    from autopar.documents.strategy import has_context_degrees, unsaid_by_galvatron
    from search.show.files import output_texts

    files = output_texts(
        result,
        paths,
        spec=session.spec,
        hardware=session.cluster,
        options=session.options,
        request={**session.named, **request.given},
        engine=request.engine,
        engines=engines,
        throughput=_throughput(session, result),
    )
    says = []
    if paths[0] in files and has_context_degrees(result.plan):
        # Before the report and the names of files, so that the file is not used unread.
        say(
            f"{_NAME}: the strategy file has context degrees, which Galvatron v2.4 ignores: "
            "it would run another plan"
        )
    if paths[0] not in files:
        beyond = ", ".join(unsaid_by_galvatron(result.plan))
        says.append(f"no strategy file: the format of Galvatron does not support {beyond}")
    plan = shlex.quote(str(paths[-1]))
    says.append(f"to explain it: autopar explain {plan}")
    says.append(f"to count its memory without a GPU: profile-plan {plan} --mode dryrun")
    return files, says


def _report_pins(request: Request, session: Session, result: SearchResult) -> None:
    """Print the cost of the pins on stderr, compared with the same search without them."""
    if not (request.options.pin or request.options.forbid) or result.prediction is None:
        return
    # Rules of an engine are not optional, and the lines of other engines show their cost.
    if request.engine is not None:
        return
    unpinned = replace(session.options, pin=(), forbid=())
    free = working("pricing the pins", lambda: session.rebuilt(options=unpinned).solve())
    if free.prediction is None:  # stopped by the time limit
        say(f"{_NAME}: the cost of the pins is unknown: the search without them found no plan")
        return
    best, pinned = free.prediction.samples_per_s, result.prediction.samples_per_s
    say(
        f"{_NAME}: the pins cost {(1 - pinned / best) * 100:.2f} % "
        f"({pinned:.5g} instead of {best:.5g} samples/s)"
    )
