"""`autopar-explore calculon`: an application, a system and numbers of processors in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autopar.errors import InfeasibleError, OptionError
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
from search.commands.explore_tuners import TUNER_ROWS, run_tuner, wants_tuner

if TYPE_CHECKING:
    import typer

    from search.closed_form.calculon import Application, System
    from search.closed_form.files import Known
    from search.closed_form.questions import Answer, Each

__all__ = ["HELP", "MODEL", "ROWS", "app"]

MODEL = "calculon"
HELP = """Search every execution of a model after Calculon: degrees, chunks, micro-batches,
recomputation, communication, sharding, overlap, offload and network tiers.

A and S are a JSON file or a shipped name: A a model (llama2-7b) or the six fields of an
application, S a machine (a100, h100, h200, b200).

Exit codes: 0 done, 2 an input is unusable, 3 no execution can run, 130 stopped by Ctrl-C.
"""
_IN, _SPACE = "Inputs", "Space"
_MOST = 2**31 - 1
ROWS = (
    OptionRow("application", "text", "file, or shipped model such as llama2-7b", _IN),
    OptionRow("system", "text", "file, or shipped name such as a100, h100, h200, b200", _IN),
    OptionRow(
        "num-procs", "ints", "numbers of processors, such as 512,1024", _IN, low=1, high=_MOST
    ),
    OptionRow("max-batch", "int", "samples of a step, in all", _IN, low=1, high=_MOST),
    OptionRow(
        "any-batch", "flag", "each has the largest batch up to that one that it divides", _SPACE
    ),
    OptionRow(
        "datatype",
        "choice",
        "[default: float16]",
        _SPACE,
        choices=("float8", "float16", "bfloat16", "float32"),
    ),
    OptionRow(
        "attention",
        "choice",
        "[default: multihead]",
        _SPACE,
        choices=("multihead", "multiquery", "flash"),
    ),
    OptionRow(
        "structure",
        "choice",
        "blocks [default: those of the model, else gpt]",
        _SPACE,
        choices=("gpt", "llama"),
    ),
    OptionRow(
        "fused-activation",
        "choice",
        "[default: true]",
        _SPACE,
        choices=("true", "false", "both"),
    ),
    OptionRow("tp-overlap", "switch", "try overlapped tensor communication [default: on]", _SPACE),
    OptionRow("dp-overlap", "switch", "try overlapped data communication [default: on]", _SPACE),
    OptionRow("offload", "switch", "try the second memory [default: on]", _SPACE),
    OptionRow("even-stages", "flag", "only stages of equally many blocks", _SPACE),
    *QUESTION_ROWS,
    *TUNER_ROWS,
    *OUTPUT_ROWS,
)
_LEGEND = (
    "t, p, d: tensor, pipeline, data degree; b: micro-batch; v: chunks per stage; "
    "tiers: networks of t/p/d"
)


def app() -> typer.Typer:
    """Return the application of the subcommand."""
    return make_app("autopar-explore", ROWS, _execute)


def _execute(raw: dict[str, Any]) -> int:
    if wants_tuner(raw):
        return run_tuner(raw, ROWS)
    required(raw, ("application", "system", "num-procs", "max-batch"), ROWS)
    values = read_options(raw, ROWS)
    return execute(_question(values), values)


def _question(values: Mapping[str, Any]) -> Question:
    from search.closed_form.files import calculon_system, load_application
    from search.closed_form.questions import parse_axis, variants

    compat = bool(values["compat"])
    known = load_application(values["application"])
    system = calculon_system(values["system"])
    shared = _space_fields(values, known, compat=compat)
    _require_datatype(values["system"], system, shared["datatype"])
    axes = tuple(parse_axis(text) for text in values["sweep"] or ())
    documents = {"system": system, "application": known.application}
    jobs = [
        _job(one["application"], one["system"], {**shared, "num_procs": count}, values, setting)
        for setting, one in variants(documents, axes)
        for count in numbers(values["num-procs"])
    ]
    return Question(
        name=known.name,
        system=values["system"],
        unit="processor",
        legend=_LEGEND,
        axes=axes,
        jobs=tuple(jobs),
        notes=_notes(values, known, shared, compat=compat),
    )


def _require_datatype(name: str, system: System, datatype: str) -> None:
    """Raise InfeasibleError where a search could only end without an answer."""
    both = [known for known in system.matrix if known in system.vector]
    if datatype not in both:
        raise InfeasibleError(
            f"{name} has no rates of {datatype}; choose a --datatype that it has: {', '.join(both)}"
        )


def _space_fields(values: Mapping[str, Any], known: Known, *, compat: bool) -> dict[str, Any]:
    from search.closed_form.files import structure_of

    for option, word in (("attention", "flash"), ("structure", "llama")):
        if compat and values.get(option) == word:
            raise OptionError(
                f"--{option} {word} is not in the published model; leave out that or --compat"
            )
    built = "gpt" if known.spec is None or compat else structure_of(known.spec)
    return {
        "max_batch": values["max-batch"],
        "datatype": values.get("datatype", "float16"),
        "attention_type": values.get("attention", "multihead"),
        "structure_type": values.get("structure", built),
        "fused_activation": values.get("fused-activation", "true"),
        "fixed_batch": not (values["any-batch"] or compat),
        "uneven": not (values["even-stages"] or compat),
        "tensor_overlap": values["tp-overlap"] is not False,
        "data_overlap": values["dp-overlap"] is not False,
        "offload": values["offload"] is not False,
    }


def _job(
    application: Application,
    system: System,
    fields: Mapping[str, Any],
    values: Mapping[str, Any],
    setting: tuple[float, ...],
) -> Job:
    from search.closed_form.calculon.exploration import Space

    space = Space(**fields)
    compat, threads = bool(values["compat"]), values.get("threads", 1)

    def run(
        each: Each | None, progress: Callable[[int, int], None], stop: Callable[[], bool]
    ) -> Answer:
        from search.closed_form.questions import search_calculon

        return search_calculon(
            application,
            system,
            space,
            top=values.get("top", 1 if setting else 10),
            objective=values.get("objective", "rate"),
            compat=compat,
            threads=threads,
            frontier=bool(values["frontier"] or ("plot" in values and not setting)),
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
    values: Mapping[str, Any], known: Known, fields: Mapping[str, Any], *, compat: bool
) -> dict[str, list[str]]:
    from search.closed_form.calculon import Quirks
    from search.closed_form.validation import quirk_texts

    batch = fields["max_batch"]
    assumed = [
        f"every execution has a batch of {batch}"
        if fields["fixed_batch"]
        else f"batches are the largest multiple of the data degree up to {batch}",
        *(
            f"{name} {fields[key]}"
            for name, key, option in (
                ("datatype", "datatype", "datatype"),
                ("attention", "attention_type", "attention"),
                ("structure", "structure_type", "structure"),
                ("fused activations", "fused_activation", "fused-activation"),
            )
            if option not in values
        ),
        *(["stages may differ by a block"] if fields["uneven"] else ["stages are equally long"]),
    ]
    if not compat and not known.application.vocab_size:
        assumed.append("vocab_size is not given: embedding, head and loss are left out")
    kept = list(quirk_texts(Quirks).values()) if compat else []
    return {"assumed": assumed, "corrections that are off": kept}
