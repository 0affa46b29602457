"""`autopar-explore tensor2d`: a model, a system, strategies and numbers of GPUs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.command.options import Command, make, option, read_values
from autopar.errors import OptionError
from search.commands.explore_session import (
    AnswerSpec,
    AskedSpec,
    Job,
    Question,
    execute as search,
    numbers,
)

if TYPE_CHECKING:
    from search.closed_form.questions import Answer, Each
    from search.closed_form.tensor2d import Model, Strategy, System

__all__ = ["COMMAND", "MODEL", "Tensor2dSpaceSpec", "execute"]

MODEL = "tensor2d"
_IN = "Inputs"
_MOST = 2**31 - 1
_STRATEGIES = ("1d", "2d", "2d-seqp")


@dataclass(frozen=True, kw_only=True)
class Tensor2dSpaceSpec:
    """What is searched: a model on a system, divided in which ways."""

    model: str = option(help="file with l, e, h, depth, f, or shipped model", panel=_IN)
    system: str = option(help="file, or shipped name such as a100, h100, h200, b200", panel=_IN)
    strategy: str = option(
        ",".join(_STRATEGIES), help="1d, 2d, 2d-seqp, or several", panel=_IN, shown="all"
    )
    num_gpus: tuple[int, ...] = option(
        help="numbers of GPUs, such as 512,1024", panel=_IN, low=1, high=_MOST
    )
    batch: int = option(help="samples of a step, in all", panel=_IN, low=1, high=_MOST)


COMMAND = Command(
    name="autopar-explore",
    usage=f"{MODEL} [OPTIONS]",
    fills=(Tensor2dSpaceSpec, AskedSpec, AnswerSpec),
    intro="""Search every candidate after arXiv 2410.00273: degrees, micro-batches, panels, and how
many ranks of each group share a fast domain.

M and S are a JSON file or a shipped name. Strategy 1d divides heads, 2d rows and columns (SUMMA),
2d-seqp heads and the sequence; several are searched one after another.

Exit codes: 0 done, 2 an input is unusable, 3 no execution can run, 130 stopped by Ctrl-C.
""",
)
_LEGEND = (
    "tp: tensor degree, columns x rows; mbs: micro-batch; nb: panels; "
    "domain: ranks of tp/pp/dp in a fast domain"
)


def execute(raw: dict[str, Any]) -> int:
    """Search what a parsed command line says, and return the exit code."""
    values = read_values(COMMAND.rows, raw)
    asked, files = make(AskedSpec, values), make(AnswerSpec, values)
    question = _question(make(Tensor2dSpaceSpec, values), asked, files)
    return search(question, files, frontier=asked.frontier)


def _question(space: Tensor2dSpaceSpec, asked: AskedSpec, files: AnswerSpec) -> Question:
    from search.closed_form.files import load_model, tensor2d_system
    from search.closed_form.questions import parse_axis, variants
    from search.closed_form.tensor2d import Quirks

    strategies = _strategies(space.strategy)
    name, model = load_model(space.model)
    system = tensor2d_system(space.system)
    axes = tuple(parse_axis(text) for text in asked.sweep)
    documents = {"system": system, "model": model}
    jobs = [
        _job(
            strategy,
            one["model"],
            one["system"],
            count,
            space.batch,
            asked,
            setting,
            # pictures of one search show its frontier, those of a sweep do not
            frontier=asked.frontier or (files.plot is not None and not setting),
        )
        for setting, one in variants(documents, axes)
        for count in numbers(space.num_gpus)
        for strategy in strategies
    ]
    return Question(
        name=name,
        system=space.system,
        unit="GPU",
        legend=_LEGEND,
        axes=axes,
        jobs=tuple(jobs),
        notes={
            "assumed": [
                f"every candidate has a batch of {space.batch}",
                *(
                    ["vocab is not given: embedding, head and loss are left out"]
                    if not model.vocab and not asked.compat
                    else []
                ),
            ],
            "corrections that are off": (list(Quirks.meanings.values()) if asked.compat else []),
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
    batch: int,
    asked: AskedSpec,
    setting: tuple[float, ...],
    *,
    frontier: bool,
) -> Job:
    compat, threads = asked.compat, asked.threads

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
            batch=batch,
            top=asked.top or (1 if setting else 10),
            objective=asked.objective,
            compat=compat,
            threads=threads,
            frontier=frontier,
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
            batch=batch,
            compat=compat,
            statistics=statistics,
            threads=threads,
        )

    return Job(label=f"{count} GPUs, {strategy}", run=run, columns=columns, values=setting)
