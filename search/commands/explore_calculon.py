"""`autopar-explore calculon`: an application, a system and numbers of processors in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from autopar.command.options import Command, make, option, read_values
from autopar.errors import InfeasibleError, OptionError
from search.commands.explore_session import (
    AnswerSpec,
    AskedSpec,
    Job,
    Question,
    execute as search,
    numbers,
)
from search.commands.explore_tuners import TunerSpec, run_tuner, wants_tuner

if TYPE_CHECKING:
    from search.closed_form.calculon import Application, System
    from search.closed_form.files import Known
    from search.closed_form.questions import Answer, Each

__all__ = ["COMMAND", "MODEL", "CalculonSpaceSpec", "execute"]

MODEL = "calculon"
_IN, _SPACE = "Inputs", "Space"
_MOST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class CalculonSpaceSpec:
    """What is searched: a model on a system, and which executions of it."""

    application: str = option(help="file, or shipped model such as llama2-7b", panel=_IN)
    system: str = option(help="file, or shipped name such as a100, h100, h200, b200", panel=_IN)
    num_procs: tuple[int, ...] = option(
        help="numbers of processors, such as 512,1024", panel=_IN, low=1, high=_MOST
    )
    max_batch: int = option(help="samples of a step, in all", panel=_IN, low=1, high=_MOST)
    any_batch: bool = option(
        False, help="each has the largest batch up to that one that it divides", panel=_SPACE
    )
    datatype: Literal["float8", "float16", "bfloat16", "float32"] = option(
        "float16", help="of weights and activations", panel=_SPACE
    )
    attention: Literal["multihead", "multiquery", "flash"] = option(
        "multihead", help="kind of attention", panel=_SPACE
    )
    structure: Literal["gpt", "llama"] | None = option(
        None, help="blocks", panel=_SPACE, shown="those of the model, else gpt"
    )
    fused_activation: Literal["true", "false", "both"] = option(
        "true", help="activations in the kernels of the products before", panel=_SPACE
    )
    tp_overlap: bool = option(True, help="try overlapped tensor communication", panel=_SPACE)
    dp_overlap: bool = option(True, help="try overlapped data communication", panel=_SPACE)
    offload: bool = option(True, help="try the second memory", panel=_SPACE)
    even_stages: bool = option(False, help="only stages of equally many blocks", panel=_SPACE)


COMMAND = Command(
    name="autopar-explore",
    usage=f"{MODEL} [OPTIONS]",
    fills=(CalculonSpaceSpec, AskedSpec, TunerSpec, AnswerSpec),
    intro="""Search every execution of a model after Calculon: degrees, chunks, micro-batches,
recomputation, communication, sharding, overlap, offload and network tiers.

A and S are a JSON file or a shipped name: A a model (llama2-7b) or the six fields of an
application, S a machine (a100, h100, h200, b200).

Exit codes: 0 done, 2 an input is unusable, 3 no execution can run, 130 stopped by Ctrl-C.
""",
)
_LEGEND = (
    "t, p, d: tensor, pipeline, data degree; b: micro-batch; v: chunks per stage; "
    "tiers: networks of t/p/d"
)


def execute(raw: dict[str, Any]) -> int:
    """Search what a parsed command line says, and return the exit code."""
    rows = COMMAND.rows
    if wants_tuner(raw):
        return run_tuner(raw, rows)
    values = read_values(rows, raw)
    asked, files = make(AskedSpec, values), make(AnswerSpec, values)
    question = _question(make(CalculonSpaceSpec, values), asked, files, set(values))
    return search(question, files, frontier=asked.frontier)


def _question(
    space: CalculonSpaceSpec, asked: AskedSpec, files: AnswerSpec, given: Collection[str]
) -> Question:
    from search.closed_form.files import calculon_system, load_application
    from search.closed_form.questions import parse_axis, variants

    compat = asked.compat
    known = load_application(space.application)
    system = calculon_system(space.system)
    shared = _space_fields(space, known, compat=compat)
    _require_datatype(space.system, system, space.datatype)
    axes = tuple(parse_axis(text) for text in asked.sweep)
    documents = {"system": system, "application": known.application}
    jobs = [
        _job(
            one["application"],
            one["system"],
            {**shared, "num_procs": count},
            asked,
            setting,
            # pictures of one search show its frontier, those of a sweep do not
            frontier=asked.frontier or (files.plot is not None and not setting),
        )
        for setting, one in variants(documents, axes)
        for count in numbers(space.num_procs)
    ]
    return Question(
        name=known.name,
        system=space.system,
        unit="processor",
        legend=_LEGEND,
        axes=axes,
        jobs=tuple(jobs),
        notes=_notes(given, known, shared, compat=compat),
    )


def _require_datatype(name: str, system: System, datatype: str) -> None:
    """Raise InfeasibleError where a search could only end without an answer."""
    both = [known for known in system.matrix if known in system.vector]
    if datatype not in both:
        raise InfeasibleError(
            f"{name} has no rates of {datatype}; choose a --datatype that it has: {', '.join(both)}"
        )


def _space_fields(space: CalculonSpaceSpec, known: Known, *, compat: bool) -> dict[str, Any]:
    from search.closed_form.files import structure_of

    for option_name, chosen, word in (
        ("attention", space.attention, "flash"),
        ("structure", space.structure, "llama"),
    ):
        if compat and chosen == word:
            raise OptionError(
                f"--{option_name} {word} is not in the published model; leave out that or --compat"
            )
    built = "gpt" if known.spec is None or compat else structure_of(known.spec)
    return {
        "max_batch": space.max_batch,
        "datatype": space.datatype,
        "attention_type": space.attention,
        "structure_type": space.structure or built,
        "fused_activation": space.fused_activation,
        # the published space has the largest batch that divides, and equal stages
        "fixed_batch": not (space.any_batch or compat),
        "uneven": not (space.even_stages or compat),
        "tensor_overlap": space.tp_overlap,
        "data_overlap": space.dp_overlap,
        "offload": space.offload,
    }


def _job(
    application: Application,
    system: System,
    fields: Mapping[str, Any],
    asked: AskedSpec,
    setting: tuple[float, ...],
    *,
    frontier: bool,
) -> Job:
    from search.closed_form.calculon.exploration import Space

    space = Space(**fields)
    compat, threads = asked.compat, asked.threads

    def run(
        each: Each | None, progress: Callable[[int, int], None], stop: Callable[[], bool]
    ) -> Answer:
        from search.closed_form.questions import search_calculon

        return search_calculon(
            application,
            system,
            space,
            top=asked.top or (1 if setting else 10),
            objective=asked.objective,
            compat=compat,
            threads=threads,
            frontier=frontier,
            values=setting,
            each=each,
            progress=progress,
            stop=stop,
        )

    def columns(statistics: bool) -> Any:
        from search.closed_form.points import calculon_columns

        return calculon_columns(
            application, system, compat=compat, statistics=statistics, threads=threads
        )

    return Job(label=f"{space.num_procs} processors", run=run, columns=columns, values=setting)


def _notes(
    given: Collection[str], known: Known, fields: Mapping[str, Any], *, compat: bool
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
        assumed.append("vocab_size is not given: embedding, head and loss are left out")
    kept = list(Quirks.meanings.values()) if compat else []
    return {"assumed": assumed, "corrections that are off": kept}
