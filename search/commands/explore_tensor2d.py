"""`autopar-explore tensor2d`: a model, a system, strategies and numbers of GPUs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autopar.errors import OptionError
from search.cli_options import OptionRow
from search.commands.app import make_app
from search.commands.explore_session import (
    OUTPUT_ROWS,
    QUESTION_ROWS,
    Job,
    Question,
    execute,
    numbers,
    read_options,
    required,
)

if TYPE_CHECKING:
    import typer

    from search.closed_form.questions import Answer, Each
    from search.closed_form.tensor2d import Model, Strategy, System

__all__ = ["HELP", "MODEL", "ROWS", "app"]

MODEL = "tensor2d"
HELP = """Search every candidate after arXiv 2410.00273: degrees, micro-batches, panels, and how
many ranks of each group share a fast domain.

M and S are a JSON file or a shipped name. Strategy 1d divides heads, 2d rows and columns (SUMMA),
2d-seqp heads and the sequence; several are searched one after another.

Exit codes: 0 done, 2 an input is unusable, 3 no execution can run, 130 stopped by Ctrl-C.
"""
_IN = "Inputs"
_MOST = 2**31 - 1
_STRATEGIES = ("1d", "2d", "2d-seqp")
ROWS = (
    OptionRow("model", "text", "file with l, e, h, depth, f, or shipped model", _IN),
    OptionRow("system", "text", "file, or shipped name such as a100, h100, h200, b200", _IN),
    OptionRow("strategy", "text", "1d, 2d, 2d-seqp, or several [default: all]", _IN),
    OptionRow("num-gpus", "ints", "numbers of GPUs, such as 512,1024", _IN, low=1, high=_MOST),
    OptionRow("batch", "int", "samples of a step, in all", _IN, low=1, high=_MOST),
    *QUESTION_ROWS,
    *OUTPUT_ROWS,
)
_LEGEND = (
    "tp: tensor degree, columns x rows; mbs: micro-batch; nb: panels; "
    "domain: ranks of tp/pp/dp in a fast domain"
)


def app() -> typer.Typer:
    """Return the application of the subcommand."""
    return make_app("autopar-explore", ROWS, _execute)


def _execute(raw: dict[str, Any]) -> int:
    required(raw, ("model", "system", "num-gpus", "batch"), ROWS)
    values = read_options(raw, ROWS)
    return execute(_question(values), values)


def _question(values: Mapping[str, Any]) -> Question:
    from search.closed_form.files import load_model, tensor2d_system
    from search.closed_form.questions import parse_axis, variants
    from search.closed_form.tensor2d import Quirks
    from search.closed_form.validation import quirk_texts

    strategies = _strategies(values.get("strategy", ",".join(_STRATEGIES)))
    name, model = load_model(values["model"])
    system = tensor2d_system(values["system"])
    axes = tuple(parse_axis(text) for text in values["sweep"] or ())
    documents = {"system": system, "model": model}
    jobs = [
        _job(strategy, one["model"], one["system"], count, values, setting)
        for setting, one in variants(documents, axes)
        for count in numbers(values["num-gpus"])
        for strategy in strategies
    ]
    return Question(
        name=name,
        system=values["system"],
        unit="GPU",
        legend=_LEGEND,
        axes=axes,
        jobs=tuple(jobs),
        notes={
            "assumed": [
                f"every candidate has a batch of {values['batch']}",
                *(
                    ["vocab is not given: embedding, head and loss are left out"]
                    if not model.vocab and not values["compat"]
                    else []
                ),
            ],
            "corrections that are off": (
                list(quirk_texts(Quirks).values()) if values["compat"] else []
            ),
        },
    )


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


def _job(
    strategy: Strategy,
    model: Model,
    system: System,
    count: int,
    values: Mapping[str, Any],
    setting: tuple[float, ...],
) -> Job:
    compat, threads = bool(values["compat"]), values.get("threads", 1)

    def run(
        each: Each | None, progress: Callable[[int, int], None], stop: Callable[[], bool]
    ) -> Answer:
        from search.closed_form.questions import search_tensor2d

        del progress, stop  # one search takes less than a second
        return search_tensor2d(
            strategy,
            model,
            system,
            num_gpus=count,
            batch=values["batch"],
            top=values.get("top", 1 if setting else 10),
            objective=values.get("objective", "rate"),
            compat=compat,
            threads=threads,
            frontier=bool(values["frontier"] or ("plot" in values and not setting)),
            values=setting,
            each=each,
        )

    def columns(statistics: bool) -> Any:
        from search.closed_form.points import tensor2d_columns

        return tensor2d_columns(
            strategy,
            model,
            system,
            num_gpus=count,
            batch=values["batch"],
            compat=compat,
            statistics=statistics,
            threads=threads,
        )

    return Job(label=f"{count} GPUs, {strategy}", run=run, columns=columns, values=setting)
