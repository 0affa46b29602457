"""autopar-search: profiles in, the fastest plan that fits out."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from autopar.command.options import Command
from autopar.command.run import say
from autopar.documents.catalog import portable_options
from autopar.errors import INFEASIBLE, InputError, OptionError
from autopar.plausible import Caution
from autopar.records import replace
from search.commands.app import emit, files_read, leave, unwritable, working, write_results
from search.request.options import PANELS
from search.request.request import FILLS, Request, build_request, stored_request

if TYPE_CHECKING:
    from autopar.command.console import Console
    from autopar.training.throughput import Throughput
    from search.planning.best_plan import BestPart, EngineBest
    from search.planning.layered.prediction import SearchResult
    from search.planning.question import Session
    from search.planning.route import Route
    from search.planning.uniform.answer import Answer
    from search.questions.goals import Reached
    from search.questions.suggestions import Remedy
    from search.show.headline import Headline
    from search.show.pictures.files import Pictures

_NAME = "autopar-search"
_PRICING_DEFAULTS = (
    *("--hardware", "--time-profiling-path", "--memory-constraint", "--time-profile-mode"),
    *("--sequence-parallel", "--no-sequence-parallel"),
)
COMMAND = Command(
    name=_NAME,
    fills=FILLS,
    panels=PANELS,
    first=(),
    family="search",
    intro="""Find the fastest parallel training plan that fits in memory.

Without arguments the shipped default is planned. Say what you have:
--hardware h100:4x8 --model llama3-70b estimates everything from datasheets; measured files are
named by the path options below, each a file or a folder.

Exit codes: 0 done, 2 an input is unusable, 3 no plan fits or none was found in time. The plan
goes to stdout and to two files, everything else to stderr.
""",
)


def main() -> None:
    """Entry point of `autopar-search`."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _answered)


def _answered(raw: Mapping[str, object]) -> int:
    """Answer with launches, with plans whose layers may differ, or with the best of both."""
    request = build_request(raw)
    if request.output.plot_path is not None:
        request = build_request({**raw, "frontier": True})
    # before anything is searched
    _pictures(request, [request.inputs.model])
    _check_plot(request.output.plot_path)
    path = request.output.evaluate
    _check_goal(request)
    if path is not None:
        from search.planning.uniform.imported import holds_launch

        if holds_launch(path):
            return _evaluate_launch(request, path)
        return _execute(_priced(request, path, raw))
    from search.planning.route import route_of, with_site

    request, says = with_site(request)
    for line in says:
        say(f"{_NAME}: {line}")
    reached = None
    if request.output.goal != "throughput":
        from search.questions.goals import chosen_cluster

        reached = working("searching clusters", lambda: chosen_cluster(raw, request))
        request = build_request(reached.options)
    route = route_of(request)
    if route.launches is not None:
        return _launches(request, route, reached)
    code = _plans(request, route)
    if route.why and code == 0:
        # beside an answer: what is unusable is one sentence
        say(f"{_NAME}: answered with {route.why}")
    return code


def _check_plot(path: str | None) -> None:
    """Raise OptionError or InstallError where the frontier cannot be drawn."""
    if path is None:
        return
    from autopar.command.show import require_matplotlib

    if not path.lower().endswith((".png", ".svg")):
        raise OptionError(f"--plot is {path!r:.60}, expected a file that ends in .png or .svg")
    require_matplotlib("--plot")


def _check_goal(request: Request) -> None:
    """Raise OptionError where a goal has nothing to choose from, or a rate no goal."""
    goal, path = request.output.goal, request.output.evaluate
    if request.output.tokens_per_s is not None and goal == "throughput":
        raise OptionError(
            "--tokens-per-s: is what --goal cost or fewest-gpus has to reach; give one of them"
        )
    for option, there in (("--evaluate", path), ("--frontier", request.output.frontier)):
        if there and goal != "throughput":
            raise OptionError(f"--goal {goal}: not together with {option}; leave one of them out")


def _evaluate_launch(request: Request, path: str) -> int:
    """Price the launch of a file anew, with what is typed in place of its own options."""
    from search.engines.spaces import engine_space
    from search.planning.route import refuse_options_of_plans
    from search.planning.uniform.answer import Answer, evaluated
    from search.planning.uniform.files import launch_document
    from search.planning.uniform.imported import launch_in
    from search.show.launches import show_evaluated

    if request.engine is not None:
        raise OptionError("--engine: not together with --evaluate; leave one of them out")
    refuse_options_of_plans(path, request)
    stored = launch_in(path, request.given, lambda text: say(f"{_NAME}: {text}"))
    question = replace(stored.question, price=request.output.price)
    pictures = _pictures(request, [path])
    engine = engine_space(stored.engine)
    one = evaluated(question, engine, stored.choice, stored.launch)
    found = Answer(question=question, engines=(one,))
    _write_pictures(pictures, lambda: pictures.of_answer(found, curves=False))
    # before anything is printed, which somebody may not read to its end
    asked = _portable(stored.request, request.output.json_path)
    _emit(request, launch_document(found, asked).model_dump() | {"status": "evaluated"})
    if request.output.json_path != "-":
        show_evaluated(_console(), found)
    return 0


def _launches(request: Request, route: Route, reached: Reached | None = None) -> int:
    """Search launches, and plans beside them where these are asked for; show and write the best."""
    from search.planning.route import best_of_both

    both = working("searching launches", lambda: best_of_both(request, route))
    if both.layers_differ:
        assert both.part is not None, "somebody has the plan"
        job = both.answer.question.job
        part = replace(both.part, engines=both.lines)
        return _execute(part.request, part, job.seq / job.world, both.answer, reached)
    return _show_launches(request, both.answer, reached)


def _show_launches(request: Request, found: Answer, reached: Reached | None) -> int:
    """Show the best launch and write it, or say why there is none."""
    from autopar.output import refuse_clashes
    from search.planning.uniform.files import file_name, launch_document, result_document

    pictures = _pictures(request, [request.inputs.model])
    json_path = request.output.json_path
    asked = _portable(request.given, json_path)
    document = result_document(found, asked) if json_path is not None else {}
    document |= _goal_entry(reached)
    files: dict[Path, str] = {}
    if found.best is not None and request.output.config_path is not None:
        from autopar.documents.plan import document_text

        target = Path(request.output.config_path)
        if target.suffix != ".json" or target.is_dir():
            target = target / file_name(found, request.given)
        asked = portable_options(request.given, target)
        files[target] = document_text(launch_document(found, asked).model_dump())
        outputs = {"--json": request.output.json_path, "--output-config-path": target}
        refuse_clashes(outputs | pictures.outputs, files_read([request.inputs.model]))
    # which takes longer than drawing: somebody who waits is told for what
    doing = "drawing" if pictures.html is None else "searching other batches and clusters"
    drawn = _drawn(pictures, lambda: pictures.of_answer(found, curves=True), doing)
    exit_code = 0 if found.best is not None else INFEASIBLE
    ways: tuple[Remedy, ...] = ()
    if found.best is None:
        from search.planning.uniform.files import remedy_entry
        from search.questions.suggestions import remedies
        from search.show.launches import infeasible_lines, remedy_line

        ways = working("looking for what would fit", lambda: remedies(found.question))
        lines = [*infeasible_lines(found), *map(remedy_line, ways)]
        # before the object of --json, of which they are the notices; else on one screen below
        for line in lines if json_path == "-" else lines[:1]:
            say(f"{_NAME}: {line}")
        if json_path is not None:
            document["remedies"] = [remedy_entry(one) for one in ways]
    refusal = pictures.refusal(unwritable)
    write_results(files | drawn, json_path, document, refusal, exit_code=exit_code, command=_NAME)
    if json_path == "-":
        emit("-", document, exit_code, command=_NAME)
    if found.best is None:
        if json_path != "-":
            from search.show.launches import show_infeasible

            show_infeasible(_console(), found, ways)
        return INFEASIBLE
    _say_batch(found)
    if request.output.json_path != "-":
        from search.show.launches import show_answer

        goal = "" if reached is None else reached.words
        show_answer(_console(), found, verbose=request.output.verbose, goal=goal)
    for path in drawn:
        say(f"{_NAME}: wrote {path}")
    for path in files:
        say(f"{_NAME}: wrote {path}")
        say(f"{_NAME}: to run it: autopar-export {shlex.quote(str(path))}")
    return 0


def _portable(asked: Mapping[str, object], json_path: str | None) -> dict[str, object]:
    """Return options as a file of `--json` holds them; on stdout paths are seen from here."""
    return dict(asked) if json_path in (None, "-") else portable_options(asked, str(json_path))


def _say_batch(found: Answer) -> None:
    """Say on stderr that ranks cannot share the batch, where the next one is worth more."""
    from search.planning.uniform.answer import better_batch

    assert found.best is not None, "there is a launch"
    assert found.best.best is not None, "it is the fastest"
    best, job = found.best.best, found.question.job
    other = working("looking at the next batch", lambda: better_batch(found))
    if other is None:
        return
    shared = _shared(best.choice.global_batch, job.world)
    now, then = best.assessment.tokens_per_s or 0.0, other.assessment.tokens_per_s or 0.0
    say(
        f"{_NAME}: {shared}; --global-batch-size {other.choice.global_batch} trains {then:,.0f} "
        f"tokens/s per GPU instead of {now:,.0f}"
    )


def _shared(batch: int, world: int) -> str:
    most = math.gcd(batch, world)
    return f"a global batch of {batch} divides over {most} of {world} GPUs at most"


def _say_batch_of_plan(request: Request, session: Session, result: SearchResult) -> None:
    """Say the same of plans whose layers may differ."""
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
        f"{_NAME}: {_shared(batch, world)}; --global-batch-size {better} trains "
        f"{found.samples_per_s:.5g} samples/s instead of {now:.5g}"
    )


def _goal_entry(reached: Reached | None) -> dict[str, object]:
    """Return the clusters that a goal was chosen of, as the object of `--json` has them."""
    if reached is None:
        return {}
    return {"clusters_tried": [asdict(one) for one in reached.tried]}


def _console() -> Console:
    """Return the console of a report: 80 columns into a pipe."""
    from autopar.command.console import make_console
    from search.show.headline import SCREEN_WIDTH

    return make_console(sys.stdout, SCREEN_WIDTH)


def _pictures(request: Request, read: Sequence[str | None]) -> Pictures:
    """Return what pictures are asked for; raises OptionError where one is another output."""
    from autopar.output import refuse_clashes
    from search.show.pictures.files import pictures_of

    found = pictures_of(request.output.html_path, request.output.trace_path)
    own = {"--json": request.output.json_path, "--plot": request.output.plot_path}
    refuse_clashes({**own, **found.outputs}, files_read(read))
    return found


def _drawn(
    pictures: Pictures, draw: Callable[[], dict[Path, str]], doing: str = "drawing"
) -> dict[Path, str]:
    return working(doing, draw) if pictures.any else {}


def _write_pictures(pictures: Pictures, draw: Callable[[], dict[Path, str]]) -> None:
    """Write pictures before anything is printed, which somebody may not read to its end."""
    files = _drawn(pictures, draw)
    write_results(files, None, {}, pictures.refusal(unwritable), command=_NAME)
    for path in files:
        say(f"{_NAME}: wrote {path}")


def _plans(request: Request, route: Route) -> int:
    """Search plans whose layers may differ: of the engines of a route, or whatever runs them."""
    from search.planning.route import with_rules

    request = with_rules(request, route.reason)
    if not route.layered:
        return _execute(replace(request, engine=None))
    if request.output.frontier:
        raise OptionError("--engine: not together with --frontier; leave one of them out")
    from search.planning.best_plan import choose, choose_any

    def chosen() -> BestPart:
        if len(route.layered) == 1:
            return choose(request)
        return choose_any(request, route.layered)

    part = working("searching engines' spaces", chosen)
    for notice in part.notices:
        say(f"{_NAME}: {notice}")
    return _execute(part.request, part)


def _priced(request: Request, path: str, raw: Mapping[str, object]) -> Request:
    """Return the request that prices a plan: with what its file was made with, as if typed."""
    from search.planning.route import with_rules

    if request.engine not in (None, "none"):
        raise OptionError("--engine: not together with --evaluate; leave one of them out")
    with_rules(request)
    request = with_rules(build_request(_with_plan(path, raw)))
    return replace(request, engine=None)


def _with_plan(path: str, raw: Mapping[str, object]) -> Mapping[str, object]:
    """Return options with those that the plan file of `--evaluate` was made with, as if typed.

    What is typed stays. A strategy file says nothing but the plan.
    """
    from autopar.documents.plan import PlanDocument

    document = PlanDocument.read(path)
    stored = stored_request(path, document, raw, lambda text: say(f"{_NAME}: {text}"))
    return {**stored, **raw}


def _execute(
    request: Request,
    part: BestPart | None = None,
    tokens: float | None = None,
    launches: Answer | None = None,
    reached: Reached | None = None,
) -> int:
    """Search plans or price one, show and write the answer.

    part : what was searched of engines before, which stands where time is limited. tokens : as
    `show_result` has it. launches : that were searched beside plans, none as fast. reached : the
    cluster that a goal has chosen.
    """
    from search.planning.question import open_session

    engines = () if part is None else part.engines

    session = open_session(
        request.inputs,
        request.options,
        request.given,
        has_plan=request.output.evaluate is not None,
    )
    session = replace(session, defaults=(*request.found, *session.defaults))
    for notice in session.notices:
        say(f"{_NAME}: {notice}")
    paths = _paths(request, session)
    pictures = _pictures(request, [request.output.evaluate, request.inputs.model])
    if request.output.evaluate is not None:
        return _evaluate(request, session, pictures)
    known = None if part is None or request.options.time_limit_s is None else part.result
    result, frontier = working("searching", lambda: _solve(session, request.output.frontier, known))
    # the object of --json is made where it is asked for
    document: dict[str, object] = {}
    if request.output.json_path is not None:
        from search.show.files import result_document

        document = result_document(
            result, frontier, engines, _throughput(session, result), request.output.price
        ).content()
        document |= _goal_entry(reached)
    if result.infeasibility is not None:
        from search.show.plan import infeasible_sentence

        _emit(request, document, INFEASIBLE)
        budget = session.options.memory_constraint_bytes
        why = infeasible_sentence(
            result.infeasibility, budget, options=result.options, subject=_subject(session)
        )
        say(f"{_NAME}: {why}")
        return INFEASIBLE
    if result.plan is None:
        _emit(request, document, INFEASIBLE)
        limit = request.options.time_limit_s
        say(f"{_NAME}: no plan was found within --time-limit {limit:g}; give more seconds")
        return INFEASIBLE
    plan, prediction = result.plan, result.prediction
    assert prediction is not None, "a plan has a prediction"
    _write_pictures(
        pictures,
        lambda: pictures.of_plan(
            session,
            plan,
            prediction,
            state="the fastest plan that fits",
            result=result,
            frontier=frontier or (),
        ),
    )
    says: list[str] = []
    try:
        # before anything is printed, which somebody may not read to its end
        says = _write(request, session, result, paths, document, engines)
        if request.output.plot_path is not None and frontier is not None:
            from autopar.command.run import say_kept
            from search.show.plan import save_frontier

            plot = Path(request.output.plot_path)
            save_frontier(frontier, plot, session.title, say_kept(_NAME))
            says.insert(0, f"wrote {plot}")
    finally:
        # what was found is shown even where files cannot be written; stdout holds the document
        # and nothing else
        if request.output.json_path != "-":
            from search.show.plan import show_frontier, show_result

            console = _console()
            show_result(
                console,
                result,
                title=session.title,
                engines=engines,
                tokens=tokens,
                throughput=_throughput(session, result),
                price=request.output.price,
                uniform=_uniform(request, session, result, launches),
                verbose=request.output.verbose,
                goal="" if reached is None else reached.words,
            )
            if frontier is not None:
                show_frontier(console, frontier)
    if request.output.json_path == "-":
        emit("-", document, command=_NAME)
    # a first screen has no room for what is wrong with inputs, and nobody may miss it
    says += (
        [] if request.output.verbose else [one for one in result.notes if isinstance(one, Caution)]
    )
    for line in says:
        say(f"{_NAME}: {line}")
    _report_pins(request, session, result)
    _say_batch_of_plan(request, session, result)
    return 0


def _throughput(session: Session, result: SearchResult) -> Throughput | None:
    if result.plan is None or result.prediction is None:
        return None
    return session.throughput(result.plan, result.prediction)


def _uniform(
    request: Request, session: Session, result: SearchResult, launches: Answer | None
) -> Headline | None:
    """Return the best plan with one strategy for all layers; None where the answer is one.

    launches : that were searched beside plans; without them the same space is searched again with
    such plans alone, but where time is limited.
    """
    assert result.plan is not None, "there is a plan to compare with"
    if launches is not None and launches.best is not None:
        from search.show.launches import launch_headline

        best = launches.best
        return launch_headline(launches, best, f"fastest uniform plan: {best.engine.title}")
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
    if found.plan in (None, result.plan) or found.prediction is None:
        return None
    assert found.plan is not None
    from search.show.plan import plan_headline

    throughput = session.throughput(found.plan, found.prediction)
    return plan_headline(
        "fastest uniform plan", found.plan, found.prediction, throughput, request.output.price
    )


def _subject(session: Session) -> str:
    """Return model, heads where they are known, and GPUs: what degrees have to divide."""
    heads = dict.fromkeys(layer.num_heads for layer in session.spec.layers if layer.num_heads)
    known = f" ({' and '.join(map(str, heads))} heads)" if heads else ""
    count = session.hardware.world_size
    return f"{session.spec.name}{known} on {count} GPU{'s' if count != 1 else ''}"


def _solve(
    session: Session, with_frontier: bool, known: SearchResult | None
) -> tuple[SearchResult, list[SearchResult] | None]:
    """Return the answer and the frontier; known : what stands, and is not searched again."""
    result = known or session.solve()
    result = replace(result, defaults_used=session.defaults + result.defaults_used)
    return result, session.planner.frontier() if with_frontier else None


def _evaluate(request: Request, session: Session, pictures: Pictures) -> int:
    from search.planning.question import evaluate_file
    from search.request.options import option_record
    from search.show.files import evaluation_document

    path = request.output.evaluate
    assert path is not None
    plan, prediction = working("pricing", lambda: evaluate_file(path, session))
    state = f"{path}, priced"
    _write_pictures(pictures, lambda: pictures.of_plan(session, plan, prediction, state=state))
    # Batch and data-parallel type are those of the file.
    defaults = [line for line in session.defaults if line.startswith(_PRICING_DEFAULTS)]
    defaults += session.calibrated
    document = evaluation_document(
        plan,
        prediction,
        defaults=defaults,
        synthetic=session.synthetic,
        estimated=session.estimated,
        options=option_record(session.options, session.options.memory_constraint_bytes),
        request=_portable({**session.named, **request.given}, request.output.json_path),
        throughput=session.throughput(plan, prediction),
        price=request.output.price,
    )
    # before anything is printed, which somebody may not read to its end
    _emit(request, document.content())
    if request.output.json_path != "-":
        from search.show.plan import show_evaluation

        show_evaluation(
            _console(),
            plan,
            prediction,
            path=path,
            title=session.title,
            estimated=session.estimated,
            synthetic=session.synthetic,
            defaults=defaults,
            notes=session.notes,
            sources=session.sources,
            throughput=session.throughput(plan, prediction),
            price=request.output.price,
        )
    return 0


def _emit(request: Request, document: Mapping[str, object], exit_code: int = 0) -> None:
    if request.output.json_path is not None:
        emit(request.output.json_path, document, exit_code, command=_NAME)


def _paths(request: Request, session: Session) -> tuple[Path, Path] | None:
    """Return where the files of a plan go, None where none are asked for.

    Raises OptionError where an output is what is read, or two outputs are one file.
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
    # the strategy file and the plan beside it are of one option
    for path in paths or (None,):
        outputs = {"--json": output.json_path, "--output-config-path": path}
        outputs |= {"--html": output.html_path, "--trace": output.trace_path}
        refuse_clashes(outputs, read)
    return paths


def _write(
    request: Request,
    session: Session,
    result: SearchResult,
    paths: tuple[Path, Path] | None,
    document: Mapping[str, object],
    engines: Sequence[EngineBest],
) -> list[str]:
    """Write the files of a plan and the object of `--json`; return what is said of them."""
    files: dict[Path, str] = {}
    if paths is not None:
        from autopar.documents.strategy import unsaid_by_galvatron
        from search.show.files import output_texts

        files = output_texts(
            result,
            paths,
            spec=session.spec,
            options=session.options,
            request={**session.named, **request.given},
            engine=request.engine,
            engines=engines,
            throughput=_throughput(session, result),
        )
    write_results(files, request.output.json_path, document, unwritable, command=_NAME)
    says = [f"wrote {path}" for path in files]
    if result.plan is not None and files and paths is not None and paths[0] not in files:
        beyond = ", ".join(unsaid_by_galvatron(result.plan))
        says.append(f"no strategy file, since Galvatron's cannot say {beyond} of this plan")
    if paths is not None and files:
        plan = shlex.quote(str(paths[-1]))
        says.append(f"for the reasons: autopar-explain {plan}")
        says.append(f"whether it fits, counted without a GPU: profile-plan {plan} --mode dryrun")
    return says


def _report_pins(request: Request, session: Session, result: SearchResult) -> None:
    """Say on stderr what the pins cost, against the same search without them."""
    if not (request.options.pin or request.options.forbid) or result.prediction is None:
        return
    # rules of an engine are what it can run, and cost what the others' lines say
    if request.engine is not None:
        return
    unpinned = replace(session.options, pin=(), forbid=())
    free = working("pricing the pins", lambda: session.rebuilt(options=unpinned).solve())
    if free.prediction is None:  # stopped by the time limit
        say(f"{_NAME}: what the pins cost is unknown, the search without them found nothing")
        return
    best, pinned = free.prediction.samples_per_s, result.prediction.samples_per_s
    say(
        f"{_NAME}: the pins cost {(1 - pinned / best) * 100:.2f} % "
        f"({pinned:.5g} instead of {best:.5g} samples/s)"
    )


if __name__ == "__main__":
    main()
