"""autopar-estimate: one execution in closed form, as a breakdown of time and memory."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import asdict

from autopar.command.fields import json_option, make, option, read_values
from autopar.command.options import Command
from autopar.command.run import say, visible
from autopar.errors import InfeasibleExecution, OptionError
from autopar.output import refuse_clashes
from search.commands.app import Model, refuse_nonsense, run_model, write_answer, write_object

if TYPE_CHECKING:
    from search.closed_form.validation import Check

_NAME = "autopar-estimate"
_IN, _OUT = "Inputs", "Output"
_WIDTH = 80
"""Width of the tables without a terminal, columns."""
_EXAMPLES = {"config": "dp=2,tp=8,pp=4,mbs=1", "placement": "nv_tp=8,nv_dp=1,nv_pp=1"}
_FILE_KEYS = {
    "strategy": "strategy",
    "config": "config",
    "placement": "placement",
    "n_gpus": "n-gpus",
    "global_batch_size": "batch",
}
"""Keys of an execution file -> the equivalent options."""
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


# --------------------------------------------------------------------------------------------------
# Command line


@dataclass(frozen=True, kw_only=True)
class EstimateSpec:
    """Options of `autopar-estimate` without a model."""

    plan: tuple[str, ...] = option(
        (), help="estimate a plan file with all models (repeatable)", panel="Question"
    )
    validate: bool = option(
        False, help="compare with published step times and memory", panel="Question"
    )
    model: str | None = option(
        None, help="model of a --plan, file or shipped name", panel=_IN, shown="model of the plan"
    )
    system: str | None = option(
        None,
        help="file, or shipped name such as a100, h100, h200, b200",
        panel=_IN,
        shown="GPUs of the plan; a100-80gb with --validate",
    )
    stack: str | None = option(
        None,
        help="software stack, file or shipped name",
        panel=_IN,
        shown="stack of the plan's engine, or megatron-core",
    )
    json: str | None = json_option("Output")


@dataclass(frozen=True, kw_only=True)
class CalculonSpec:
    """Options of `autopar-estimate calculon`."""

    application: str | None = option(
        None, help="file, or shipped model such as llama2-7b", panel=_IN
    )
    system: str | None = option(
        None, help="file, or shipped name such as a100, h100, h200, b200", panel=_IN
    )
    execution: str | None = option(None, help="file, or shipped name such as 1x8-tp8", panel=_IN)
    compat: bool = option(
        False, help="reproduce the published figures, known defects included", panel=_IN
    )
    layers: bool = option(False, help="print the operations of one block", panel=_OUT)
    peers: str | None = option(
        None, help="write the communication peers of each rank to a file", panel=_OUT
    )
    json: str | None = json_option(_OUT)
    parameters: bool = option(
        False, help="print only the parameter counts of the application", panel=_OUT
    )


@dataclass(frozen=True, kw_only=True)
class Tensor2dSpec:
    """Options of `autopar-estimate tensor2d`."""

    model: str | None = option(
        None, help="file with l, e, h, depth, f, or shipped model", panel=_IN
    )
    system: str | None = option(
        None, help="file, or shipped name such as a100, h100, h200, b200", panel=_IN
    )
    strategy: Literal["1d", "2d", "2d-seqp"] | None = option(
        None, help="tensor parallelism in one or two dimensions", panel=_IN
    )
    config: str | None = option(None, help=f"degrees, such as {_EXAMPLES['config']}", panel=_IN)
    placement: str | None = option(
        None, help=f"such as {_EXAMPLES['placement']}", panel=_IN, shown="the fastest"
    )
    n_gpus: int | None = option(
        None, help="total number of GPUs", panel=_IN, shown="dp * tp * pp", low=1, high=1 << 30
    )
    batch: int | None = option(
        None, help="global batch size, samples per step", panel=_IN, low=1, high=1 << 40
    )
    execution: str | None = option(
        None, help="JSON file with strategy, config, placement, ...", panel=_IN
    )
    attention: Literal["flash", "plain", "summa"] = option(
        "flash",
        help="attention kernel: plain stores its scores, summa also splits GEMMs (2d)",
        panel=_IN,
    )
    recompute: bool = option(
        False, help="recompute the scores of plain attention in backward", panel=_IN
    )
    compat: bool = option(
        False, help="reproduce the published figures, known defects included", panel=_IN
    )
    layers: bool = option(
        False, help="print the operations of one layer, of embedding and of head", panel=_OUT
    )
    json: str | None = json_option(_OUT)


COMMAND = Command(
    name=_NAME,
    usage="[calculon|tensor2d] [OPTIONS]",
    fills=(EstimateSpec,),
    intro="""Estimate time and memory of one training step with closed-form models.

autopar-estimate calculon [OPTIONS]: tensor, pipeline and data parallelism with interleaving,
recompute, offload and overlap. autopar-estimate tensor2d [OPTIONS]: tensor parallelism in one and
two dimensions, context parallelism, placement of groups in fast domains. Each has its own --help.

autopar-estimate --plan PLAN.json compares one plan in four models, with the terms that differ most:
the estimate from card and software stack (with its 90 % interval), the prediction in the file, and
both closed-form models. Several plans give one table.

--validate compares the first model with published figures.

Exit codes: 0 done, 2 invalid input, 3 the execution is not possible.
""",
)
_CALCULON = Command(
    name=_NAME,
    usage="calculon [OPTIONS]",
    fills=(CalculonSpec,),
    intro="""Estimate time and memory of one training step with the Calculon model.

A, S and E are a JSON file or a shipped name: A a model (llama2-7b) or the six fields of an
application, S a machine (a100, h100, h200, b200), E an execution (1x8-tp8).

Exit codes: 0 done, 2 invalid input, 3 the execution is not possible.
""",
)
_TENSOR2D = Command(
    name=_NAME,
    usage="tensor2d [OPTIONS]",
    fills=(Tensor2dSpec,),
    intro="""Estimate one training step after arXiv 2410.00273: tensor parallelism in one and two
dimensions, with groups placed in fast domains.

M and S are a JSON file or a shipped name. Strategy 1d divides heads, 2d rows and columns (SUMMA),
2d-seqp heads and the sequence. --config takes dp, tp, pp, mbs; in two dimensions tp1, tp2 in the
place of tp, and for 2d the panels nb. --placement sets how many of a group share a domain.

Exit codes: 0 done, 2 an input is unusable, 3 the candidate cannot run.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return run_model(arguments, COMMAND, MODELS, _without_model)


_SYSTEM = "a100-80gb"
"""System for the comparison with published figures."""


def _without_model(raw: dict[str, Any]) -> int:
    asked = make(EstimateSpec, read_values(COMMAND.rows, raw))
    if asked.validate and asked.plan:
        raise OptionError("--validate cannot be combined with --plan", remedy="Remove one of them")
    if asked.plan:
        return _compare(asked)
    for name in ("model", "stack"):
        if getattr(asked, name) is not None:
            raise OptionError(f"--{name} needs --plan", remedy="Add --plan PLAN.json")
    if not asked.validate:
        raise OptionError(
            "no cost model is given", remedy="Use calculon or tensor2d, --plan or --validate"
        )
    return _validate(asked.system or _SYSTEM, asked.json)


def _compare(asked: EstimateSpec) -> int:
    from search.closed_form.comparison import compare, load_question
    from search.show.comparison import comparison_document, show_comparison, show_overview

    refuse_clashes({"--json": asked.json}, [path for path in asked.plan if path])
    comparisons = []
    for path in asked.plan:
        question = load_question(
            path,
            model=asked.model,
            system=asked.system,
            stack=asked.stack,
            notice=lambda text: say(f"{_NAME}: {text}"),
        )
        comparisons.append(compare(question))
    if asked.json is not None:
        write_answer(
            asked.json, {"plans": [comparison_document(one) for one in comparisons]}, command=_NAME
        )
    if asked.json != "-":
        from autopar.command.console import make_console

        console = make_console(sys.stdout, _WIDTH)
        if len(comparisons) == 1:
            show_comparison(console, comparisons[0])
        else:
            show_overview(console, comparisons)
    return 0


def _validate(name: str, json: str | None) -> int:
    from autopar.command.console import make_console
    from autopar.documents import catalog
    from search.closed_form.files import calculon_system
    from search.closed_form.validation import validate
    from search.show.closed_form import show_validation

    system = calculon_system(name)
    refuse_clashes({"--json": json}, [catalog.find_document("cards", "system", name)])
    answers = {"default": validate(system), "compat": validate(system, compat=True)}
    if json is not None:
        write_answer(json, {key: _rows(checks) for key, checks in answers.items()}, command=_NAME)
    if json != "-":
        console = make_console(sys.stdout, _WIDTH)
        show_validation(console, answers["default"], answers["compat"], system=name)
    return 0


def _rows(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [{**asdict(check), "error": check.error} for check in checks]


def _needed(name: str, value: str | None) -> str:
    if value is None:
        raise OptionError(f"--{name} is missing", remedy="Use a file or a shipped name")
    return value


# --------------------------------------------------------------------------------------------------
# Calculon: read documents, print the table of one execution.


def _calculon(raw: dict[str, Any]) -> int:
    from search.closed_form.calculon import evaluate
    from search.closed_form.calculon.exploration import peers
    from search.closed_form.files import (
        calculon_system,
        input_files,
        load_application,
        load_execution,
    )

    asked = make(CalculonSpec, read_values(_CALCULON.rows, raw))
    application = _needed("application", asked.application)
    known = load_application(application)
    if asked.parameters:
        sys.stdout.write(visible(f"{known.name:<13} -> {_prefixed(known.parameters)}\n"))
        return 0
    system_name = _needed("system", asked.system)
    execution_name = _needed("execution", asked.execution)
    system = calculon_system(system_name)
    execution, assumed, path = load_execution(execution_name, known, compat=asked.compat)
    refuse_clashes(
        {"--json": asked.json, "--peers": asked.peers},
        input_files(model=application, system=system_name, execution=execution_name),
    )
    try:
        statistics = evaluate(
            known.application, execution, system, compat=asked.compat, layers=asked.layers
        )
    except InfeasibleExecution as error:
        raise InfeasibleExecution(f"{path}: {error.reason}", error.kind) from None
    refuse_nonsense(system_name, statistics, "total_time")
    if asked.peers is not None:
        write_object(
            asked.peers,
            peers(execution),
            "Use another path for --peers",
            command=_NAME,
            number_rows=True,
        )
    if asked.json is not None:
        write_answer(asked.json, statistics, command=_NAME)
    if asked.json != "-":
        from autopar.command.console import make_console
        from search.show.closed_form import show_execution

        show_execution(
            make_console(sys.stdout, _WIDTH),
            known,
            execution,
            system,
            statistics,
            system_name=system_name,
            compat=asked.compat,
            assumed=assumed,
        )
    return 0


def _prefixed(count: int) -> str:
    for factor, prefix in _PREFIXES:
        if count >= factor:
            return f"{count / factor:.3f} {prefix}"
    return str(count)


# --------------------------------------------------------------------------------------------------
# Two dimensions: read degrees and placement of one candidate, print its table.


def _tensor2d(raw: dict[str, Any]) -> int:
    from search.closed_form.files import input_files, load_model, tensor2d_system
    from search.closed_form.tensor2d import evaluate
    from search.closed_form.tensor2d.exploration import fastest_placement

    given = make(Tensor2dSpec, read_values(_TENSOR2D.rows, raw))
    asked = _asked(given)
    model_name, system_name = _needed("model", given.model), _needed("system", given.system)
    for name in ("strategy", "config", "batch"):
        if name not in asked:
            raise OptionError(
                f"--{name} is missing", remedy="Add it, or use an --execution file that contains it"
            )
    if given.recompute and given.attention == "flash":
        raise OptionError(
            "--recompute: flash attention stores no scores", remedy="Add --attention plain"
        )
    if given.attention == "summa" and asked["strategy"] != "2d":
        raise OptionError(f"--attention summa needs --strategy 2d, got {asked['strategy']!r:.60}")
    name, model = load_model(model_name)
    system = tensor2d_system(system_name)
    read = input_files(model=model_name, system=system_name)
    refuse_clashes({"--json": given.json}, [*read, *([given.execution] if given.execution else [])])
    assumed = []
    config = asked["config"]
    if "n-gpus" not in asked:
        groups = ("dp", "pp", *(("tp",) if asked["strategy"] == "1d" else ("tp1", "tp2")))
        sizes = [config[key] for key in groups if type(config.get(key)) is int]
        asked["n-gpus"] = math.prod(sizes)  # missing or invalid degrees are refused below
        assumed.append(f"n_gpus = {asked['n-gpus']}, the product of the degrees")
    strategy, batch = asked["strategy"], asked["batch"]
    price = partial(
        evaluate,
        strategy,
        model,
        config,
        n_gpus=asked["n-gpus"],
        global_batch_size=batch,
        system=system,
        compat=given.compat,
        attention=given.attention,
        recompute=given.recompute,
    )
    placement = asked.get("placement")
    try:
        if placement is None:
            placement = fastest_placement(strategy, config, system.nvlink_size, price)
            placed = ",".join(f"{key}={size}" for key, size in placement.items())
            assumed.append(f"placement {placed}, the fastest that fits into a domain")
        # Operations are listed once, for the placement that is shown.
        priced = price(placement, layers=given.layers)
    except InfeasibleExecution as error:
        if given.execution is None:
            raise
        raise InfeasibleExecution(f"{given.execution}: {error.reason}", error.kind) from None
    refuse_nonsense(system_name, priced, "t")
    # Both are GB of 1e9 bytes, as in the published documents.
    if priced["mem"] > system.hbm_capacity:
        raise InfeasibleExecution(
            f"needs {priced['mem']:.4g} GB of memory per GPU but only has "
            f"{system.hbm_capacity:.4g} GB (hbm_capacity)"
        )
    if given.json is not None:
        write_answer(given.json, priced, command=_NAME)
    if given.json != "-":
        from autopar.command.console import make_console
        from search.show.closed_form import show_candidate

        degrees = " ".join(f"{key}={value}" for key, value in config.items())
        attention = f"{given.attention} attention" + ", recomputed" * given.recompute
        show_candidate(
            make_console(sys.stdout, _WIDTH),
            model,
            system,
            priced,
            title=f"{name} on {system_name}: {asked['n-gpus']} GPUs, {strategy}, {degrees}, "
            f"{attention}",
            num_gpus=asked["n-gpus"],
            batch=batch,
            compat=given.compat,
            assumed=assumed,
        )
    return 0


def _asked(given: Tensor2dSpec) -> dict[str, Any]:
    """Return the requested values; options take precedence over the execution file."""
    from autopar.documents.checks import load_document
    from search.closed_form.tensor2d.documents import CandidateFile

    asked: dict[str, Any] = {}
    if given.execution is not None:
        written = load_document(CandidateFile, given.execution).content()
        asked = {_FILE_KEYS[key]: value for key, value in written.items()}
    for name in _FILE_KEYS.values():
        value = getattr(given, name.replace("-", "_"))
        if value is not None:
            asked[name] = _numbers(name, value) if name in ("config", "placement") else value
    return asked


def _numbers(option: str, text: str) -> dict[str, int]:
    """Return the numbers of a text such as `dp=2,tp=8`, by name."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]\w*)=([0-9]{1,9})\s*", part)
        if match is None:
            raise OptionError(
                f"--{option}: expected names and numbers such as {_EXAMPLES[option]}, "
                f"got {part.strip()!r:.60}"
            )
        if match[1] in found:
            raise OptionError(f"--{option}: {match[1]} is given twice")
        found[match[1]] = int(match[2])
    return found


MODELS: Mapping[str, Model] = {
    "calculon": Model(_CALCULON, _calculon),
    "tensor2d": Model(_TENSOR2D, _tensor2d),
}
