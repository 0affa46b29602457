"""autopar-explore without a subcommand: a search for each combination of option values.

Its options are those of `autopar-search`; those in `AXES` may be repeated. The closed-form models
of the command are in `search.commands.explore`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.command.fields import json_option, make, option, read_values, rows_of
from autopar.command.options import REPEATED, Command
from autopar.command.run import say, say_kept
from autopar.errors import INFEASIBLE, INTERRUPTED, OptionError
from autopar.output import refuse_clashes
from search.commands.app import PlotOptions, emit, files_read, unwritable, working, write_results
from search.questions.explore import AXES
from search.request.degrees import DegreeOptions
from search.request.options import SearchOptions, Shorthands
from search.request.request import BATCH_OPTIONS, InputSpec

if TYPE_CHECKING:
    from search.questions.explore import Combination, CombinationResult, ComparableGroup

_NAME = "autopar-explore"
_ASK, _OUT = "Answer", "Files"
_QUIET_S, _EVERY_S = 2.0, 5.0
"""Seconds until the first line of progress, and between lines."""


@dataclass(frozen=True, kw_only=True)
class WhatIfSpec(PlotOptions):
    """Order of the answers, and their output."""

    by: Literal["tokens", "step", "cost"] = option(
        "tokens", help="sort by tokens/s/GPU, step time or cost per token", panel=_ASK
    )
    price: tuple[str, ...] = option(
        (),
        help="price of a GPU-hour, $, such as h100=2.5 (repeatable)",
        panel=_ASK,
        metavar="CARD=PRICE",
    )
    verbose: bool = option(
        False,
        help="print also definitions, defaults and the number of GPUs",
        panel=_ASK,
        brief="print also definitions and defaults",
    )
    json: str | None = json_option(_OUT)
    config_path: str | None = option(
        None,
        name="output-config-path",
        help="folder of the written plans",
        panel=_OUT,
    )
    plot: str | None = option(None, help="folder of the plots (extra: plot)", panel=_OUT)
    plot_format: Literal["png", "svg", "both"] | None = option(
        None, help="format of the plots", panel=_OUT, shown="png"
    )

    @property
    def prices(self) -> dict[str, float]:
        """Price of a GPU-hour by card or by typed hardware.

        Raises OptionError for an invalid price.
        """
        found: dict[str, float] = {}
        for text in self.price:
            name, _, number = text.rpartition("=")
            try:
                price = float(number) if number.isascii() else math.nan
            except ValueError:
                price = math.nan
            if not name or not (math.isfinite(price) and price > 0):
                raise OptionError(
                    f"--price: expected CARD=PRICE with a price above 0, such as h100=2.5, "
                    f"got {text!r:.60}"
                )
            found[name] = price
        return found


_MEASURED = frozenset(
    {
        *("memory-profiling-path", "time-profiling-path", "allreduce-bandwidth-config-path"),
        *("p2p-bandwidth-config-path", "overlap-coe-path", "sp-time-path", "bandwidth-unit"),
        *("parameter-bytes", "nodes", "gpus-per-node", "gpus"),
    }
)
"""Options of one cluster, its profile files and its shape; not options of this command."""
COMMAND = Command(
    name=_NAME,
    usage="[OPTIONS] | calculon [OPTIONS] | tensor2d [OPTIONS]",
    fills=(WhatIfSpec, InputSpec, SearchOptions, DegreeOptions, Shorthands),
    # Only plan files contain alternatives.
    without=_MEASURED | {"top"},
    repeats=AXES,
    panels=(REPEATED, _ASK, _OUT),
    first=(REPEATED, _ASK, _OUT),
    family="explore",
    intro="""Search every combination of models, clusters and engines, and rank the results.

autopar-explore --model llama3-8b --hardware h100:1x8 --hardware b200:1x8 --global-batch-size 64
searches two combinations, each as autopar-search does. All other options apply to all of them.

autopar-explore calculon and autopar-explore tensor2d search the executions of a closed-form model;
each has its own --help.

Exit codes: 0 done, 2 invalid input, 3 no combination has a plan, 130 interrupted (results so far
are printed).
""",
)


def execute(raw: Mapping[str, Any]) -> int:
    """Search every combination, print and write the answers, and return the exit code.

    Raises InputError if no combination can be searched.
    """
    from search.questions.explore import check_values, choices, grouped
    from search.show.exploration import show_answers

    own = {row.name for row in rows_of(WhatIfSpec)}
    spec = make(
        WhatIfSpec, read_values(rows_of(WhatIfSpec), {n: v for n, v in raw.items() if n in own})
    )
    words = {name: value for name, value in raw.items() if name not in own}
    _require(words)
    prices = spec.prices
    asked = choices(words)
    check_values(asked)
    _check_prices(spec, prices, asked)
    files = _plan_paths(spec, asked)
    _refuse_clashes(spec, asked, files)
    if spec.plot is not None:
        from autopar.command.show import require_matplotlib

        require_matplotlib("--plot")
    answers, stopped = _search(asked, prices, alternatives=spec.config_path is not None)
    for notice in dict.fromkeys(notice for one in answers for notice in one.notices):
        say(f"{_NAME}: {notice}")
    if not stopped and all(one.error is not None for one in answers):
        # An error common to all combinations is a mistake of the user, not an answer.
        assert answers[0].error is not None
        raise answers[0].error
    if stopped:
        say(f"{_NAME}: stopped after {len(answers)} of {len(asked)} combinations")
        if not answers:
            return INTERRUPTED
    groups = grouped(answers, spec.by)
    found = any(group.ranked for group in groups)
    exit_code = INTERRUPTED if stopped else 0 if found else INFEASIBLE
    says: list[str] = []
    try:
        # Before the tables, whose reader may leave in the middle.
        says = _write(spec, words, groups, files, exit_code)
    finally:
        if spec.json != "-":
            from autopar.command.console import make_console
            from search.show.summary import SCREEN_WIDTH

            console = make_console(sys.stdout, SCREEN_WIDTH)
            show_answers(console, groups, spec.by, verbose=spec.verbose)
    for line in says:
        say(f"{_NAME}: {line}")
    if exit_code == INFEASIBLE:
        say(f"{_NAME}: no combination is feasible; reasons above")
    return exit_code


def _require(words: Mapping[str, Any]) -> None:
    """Raise OptionError if a comparison has no model, hardware or batch."""
    from autopar.command.fields import missing

    for row in COMMAND.rows:
        if row.name in ("model", "hardware") and row.name not in words:
            raise missing(row)
        for word in words.get(row.name, ()) if row.name in ("model", "hardware", "engine") else ():
            if "," in word and not Path(word).exists():
                one, other = word.split(",")[:2]
                raise OptionError(
                    f"--{row.name}: {word!r:.80} is not one name",
                    remedy=f"Repeat the option: --{row.name} {one} --{row.name} {other}",
                )
    # The default batch of a search, 8 samples, is meant for one small machine.
    if not BATCH_OPTIONS & set(words):
        raise OptionError(
            "--global-batch-size not given: clusters are compared at one global batch",
            remedy="Add it, or --min-bsz and --max-bsz",
        )


def _check_prices(
    spec: WhatIfSpec, prices: Mapping[str, float], asked: Sequence[Combination]
) -> None:
    """Raise OptionError for a price of unused hardware, or a missing price in an order by cost."""
    from search.questions.explore import price_of

    if spec.by == "cost" and not prices:
        raise OptionError("--by cost needs prices", remedy="Add --price CARD=PRICE")
    hardware = dict.fromkeys(choice.words["hardware"] for choice in asked)
    known = {*hardware, *(name.rpartition(":")[0] for name in hardware)}
    for name in prices:
        if name not in known:
            raise OptionError(
                f"--price: {name!r:.60} is neither a --hardware nor its card",
                remedy=f"Use {', '.join(hardware)}",
            )
    if spec.by == "cost":
        for name in hardware:
            if price_of(name, prices) is None:
                card = name.rpartition(":")[0] or name
                raise OptionError(
                    f"--price: {name} has no price", remedy=f"Add --price {card}=PRICE"
                )


def _plan_paths(spec: WhatIfSpec, asked: Sequence[Combination]) -> dict[int, Path]:
    """Return `id` of a combination -> path of its strategy file; empty if none are requested.

    The plan file is in the same folder, see `_own_file`.
    """
    from autopar.command.show import refuse_file
    from search.show.exploration import slugs

    if spec.config_path is None or spec.config_path.lower() == "none":
        return {}
    refuse_file("--output-config-path", spec.config_path)
    names = slugs(asked)
    return {
        id(choice): Path(spec.config_path) / f"{name}.json"
        for choice, name in zip(asked, names, strict=True)
    }


def _own_file(strategy: Path) -> Path:
    """Return the path of the plan file next to a strategy file, as in `output_paths`."""
    return strategy.with_name(f"autopar_plan_{strategy.name}")


def _refuse_clashes(
    spec: WhatIfSpec, asked: Sequence[Combination], files: Mapping[int, Path]
) -> None:
    from search.show.exploration import PICTURE

    inputs = [choice.request.inputs for choice in asked]
    words = {
        word
        for one in inputs
        for word in (one.model, one.hardware, one.stack, one.site, one.calibration)
    }
    # CARD.json:NxG names a file as well.
    words |= {word.rpartition(":")[0] for word in words if word}
    read = files_read(sorted(word for word in words if word))
    written = [one for path in files.values() for one in (path, _own_file(path))]
    for path in (None, *written):
        refuse_clashes({"--json": spec.json, "--output-config-path": path}, read)
    spec.refuse_pictures((PICTURE,), {"--json": spec.json}, read)


def _search(
    asked: Sequence[Combination], prices: Mapping[str, float], *, alternatives: bool
) -> tuple[list[CombinationResult], bool]:
    """Return the answers of the combinations in order, and True if Ctrl-C stopped the search."""
    from search.questions.explore import ProfileCache, search_one

    parts = ProfileCache()
    answers: list[CombinationResult] = []
    next_s = time.monotonic() + _QUIET_S
    for place, choice in enumerate(asked, 1):

        def one(choice: Combination = choice) -> CombinationResult:
            return search_one(choice, parts, alternatives=alternatives, prices=prices)

        try:
            answers.append(working(f"searching {place} of {len(asked)}", one))
        except KeyboardInterrupt:
            return answers, True
        if time.monotonic() >= next_s and not sys.stderr.isatty() and place < len(asked):
            next_s = time.monotonic() + _EVERY_S
            say(f"{_NAME}: {place} of {len(asked)} combinations searched", passing=True)
    return answers, False


def _write(
    spec: WhatIfSpec,
    words: Mapping[str, Any],
    groups: Sequence[ComparableGroup],
    files: Mapping[int, Path],
    exit_code: int,
) -> list[str]:
    """Write plan files, the object of `--json` and the plot; return messages about them.

    Plan files and the object are written all or none.
    """
    from search.show.exploration import exploration, first_commands, save_picture

    texts: dict[Path, str] = {}
    plans: dict[int, str] = {}
    for answer in (answer for group in groups for answer in group.ranked):
        path = files.get(id(answer.choice))
        if path is not None:
            texts |= _plan_texts(answer, path)
            plans[id(answer.choice)] = str(_own_file(path))
    document: dict[str, Any] = {}
    if spec.json is not None:
        document = exploration(
            groups,
            spec.by,
            choices={name: words[name] for name in AXES if name in words},
            request={name: value for name, value in words.items() if name not in AXES},
            plan_files=plans,
            complete=exit_code != INTERRUPTED,
        )
    write_results(texts, spec.json, document, unwritable, exit_code=exit_code, command=_NAME)
    says = []
    if texts:
        says.append(f"wrote {len(texts)} files to {spec.config_path}")
    says += [f"to explain it: {line}" for line in first_commands(groups, plans)]
    if spec.plot is not None and any(group.ranked for group in groups):
        drawn = save_picture(spec.plot, groups, spec.formats, say_kept(_NAME))
        says += [f"wrote {path}" for path in drawn]
    if spec.json == "-":
        emit("-", document, exit_code, command=_NAME)
    return says


def _plan_texts(answer: CombinationResult, path: Path) -> dict[Path, str]:
    """Return path -> text of the files of an answer, as `autopar-search` writes them."""
    from search.show.files import output_texts

    assert answer.request is not None
    if answer.launches is not None:
        from autopar.documents.catalog import portable_options
        from search.show.uniform_files import launch_text

        own = _own_file(path)
        asked = portable_options(answer.request.given, own)
        return {own: launch_text(answer.launches, asked)}
    assert answer.result is not None
    assert answer.session is not None
    session, result = answer.session, answer.result
    assert result.plan is not None
    assert result.prediction is not None
    return output_texts(
        result,
        (path, _own_file(path)),
        spec=session.spec,
        hardware=session.cluster,
        options=session.options,
        request={**session.named, **answer.request.given},
        engine=answer.request.engine,
        throughput=session.throughput(result.plan, result.prediction),
    )
