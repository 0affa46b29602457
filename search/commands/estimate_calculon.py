"""`autopar-estimate calculon`: documents in, one execution's table out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.command.options import Command, make, option, read_values
from autopar.errors import DocumentError, InfeasibleExecution, OptionError

if TYPE_CHECKING:
    from search.closed_form.calculon import Execution, System
    from search.closed_form.files import Known

__all__ = ["COMMAND", "MODEL", "CalculonSpec", "execute"]

MODEL = "calculon"
_IN, _OUT = "Inputs", "Output"


@dataclass(frozen=True, kw_only=True)
class CalculonSpec:
    """What `autopar-estimate calculon` is asked."""

    application: str | None = option(
        None, help="file, or shipped model such as llama2-7b", panel=_IN
    )
    system: str | None = option(
        None, help="file, or shipped name such as a100, h100, h200, b200", panel=_IN
    )
    execution: str | None = option(None, help="file, or shipped name such as 1x8-tp8", panel=_IN)
    compat: bool = option(False, help="the published figures, with their known defects", panel=_IN)
    layers: bool = option(False, help="add the operations of one block", panel=_OUT)
    peers: str | None = option(None, help="file for the ranks that each rank talks to", panel=_OUT)
    json: str | None = option(
        None, help="file for the statistics (.gz compresses), - for stdout, no tables", panel=_OUT
    )
    parameters: bool = option(
        False, help="print the parameters of the application, and end", panel=_OUT
    )


COMMAND = Command(
    name="autopar-estimate",
    usage=f"{MODEL} [OPTIONS]",
    fills=(CalculonSpec,),
    intro="""Price one training step after Calculon: where its time and memory go.

A, S and E are a JSON file or a shipped name: A a model (llama2-7b) or the six fields of an
application, S a machine (a100, h100, h200, b200), E an execution (1x8-tp8).

Exit codes: 0 done, 2 an input is unusable, 3 the execution cannot run.
""",
)
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_LAYERS = {
    "name": ("operation", ""),
    "fw_flops": ("GFLOP", "GFLOP"),
    "fw_processing_time": ("forward", "s"),
    "baseblock_fw_tp_comm_time": ("link", "s"),
    "weight": ("weights", "B"),
    "activation": ("kept", "B"),
}
_REQUIRED = (
    ("tensor parallel, tiles", "tp_bw_overlap_req", "tensor_par_net"),
    ("data parallel, chunks", "dp_bw_overlap_req_chunk", "data_par_net"),
    ("data parallel, tail", "dp_bw_overlap_req_tail", "data_par_net"),
    ("offload of activations", "act_offload_bw_req", None),
    ("offload of weights", "weight_offload_bw_req", None),
    ("offload of optimizer", "optim_offload_bw_req", None),
    ("offload as asked", "offload_mem_bw_req", None),
)


def execute(raw: dict[str, Any]) -> int:
    """Price what a parsed command line says, and return the exit code."""
    from search.closed_form.calculon import evaluate
    from search.closed_form.files import calculon_system, load_application
    from search.commands.app import refuse_nonsense, write_answer

    asked = make(CalculonSpec, read_values(COMMAND.rows, raw))
    known = load_application(_needed("application", asked.application))
    if asked.parameters:
        sys.stdout.write(f"{known.name:<13} -> {_prefixed(known.parameters)}\n")
        return 0
    system_name = _needed("system", asked.system)
    execution_name = _needed("execution", asked.execution)
    system = calculon_system(system_name)
    execution, assumed, path = _load_execution(execution_name, known, compat=asked.compat)
    try:
        statistics = evaluate(
            known.application, execution, system, compat=asked.compat, layers=asked.layers
        )
    except InfeasibleExecution as error:
        raise InfeasibleExecution(f"{path}: {error.reason}", error.kind) from None
    refuse_nonsense(system_name, statistics, "total_time")
    if asked.peers is not None:
        _write_peers(asked.peers, execution)
    if asked.json is not None:
        write_answer(asked.json, statistics)
    if asked.json != "-":
        _show(asked, known, execution, system, statistics, assumed)
    return 0


def _needed(name: str, value: str | None) -> str:
    if value is None:
        raise OptionError(f"--{name} is missing; give a file or a shipped name")
    return value


def _load_execution(name: str, known: Known, *, compat: bool) -> tuple[Execution, list[str], Path]:
    """Return an execution, what was added to its document, and its path."""
    from autopar.documents.checks import validate_document
    from search.closed_form.calculon import Execution
    from search.closed_form.files import execution_keys, structure_of

    path, keys = execution_keys(name)
    added: dict[str, object] = {}
    # the published model knows one structure only
    if known.spec is not None and "structure_type" not in keys and not compat:
        added["structure_type"] = structure_of(known.spec)
    execution = validate_document(Execution, path, {**keys, **added})
    assumed = [
        f"{key} = {_json(getattr(execution, key))}{why}"
        for key, why in (
            ("num_procs", ", the product of the degrees"),
            ("training", ""),
            ("structure_type", f", as {known.name} has" if added else ""),
        )
        if key not in keys
    ]
    return execution, assumed, path


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write_peers(path: str, execution: Execution) -> None:
    from autopar.documents.json import write_json
    from search.closed_form.calculon.exploration import peers

    try:
        write_json(Path(path), peers(execution), number_rows=True)
    except OSError as error:
        raise DocumentError(
            path,
            f"the file cannot be written ({error.strerror or error})",
            remedy="choose another path for --peers",
        ) from None


def _show(
    asked: CalculonSpec,
    known: Known,
    x: Execution,
    system: System,
    s: dict[str, Any],
    assumed: list[str],
) -> None:
    from autopar.command.show import make_console
    from autopar.units import format_seconds
    from search.closed_form.calculon import Quirks
    from search.closed_form.questions import calculon_memory, calculon_time
    from search.report import closed_form as report

    console = make_console(sys.stdout)
    report.show_title(
        console,
        f"{known.name} on {asked.system}: {x.num_procs} processors = tensor {x.tensor_par} * "
        f"pipeline {x.pipeline_par} * data {x.data_par}",
        f"{s['sample_rate']:.5g} samples/s, step {format_seconds(s['total_time'])}, "
        f"batch {x.batch_size}",
    )
    report.show_time_parts(console, calculon_time(s), s["total_time"])
    parts = calculon_memory(
        s,
        weights=x.weight_offload,
        activations=x.activations_offload,
        optimizer=x.optimizer_offload,
    )
    second = s["proc_mem_tier2_cap_req"], system.memory(2)[0]
    report.show_memory_parts(
        console, parts, system.memory(1)[0], second=second if second[0] else None
    )
    report.show_pairs(console, "rates", _rates(known, x, system, s))
    report.show_pairs(console, "bandwidths that would hide transfers", _required(x, system, s))
    if asked.layers:
        report.show_layers(console, s["layers"], _LAYERS)
    notes = []
    if not known.application.vocab_size and not asked.compat:
        notes.append("vocab_size is not given: embedding, head and loss are left out")
    if known.spec is not None and not asked.compat:
        wanted = "llama" if known.spec.layers[0].gated_mlp else "gpt"
        if x.structure_type != wanted:
            notes.append(
                f"structure_type is {x.structure_type}, and {known.name} is built as {wanted}"
            )
    if asked.compat:
        notes.append("vocabulary, grouped keys and values and causal masks are not in this model")
    kept = list(Quirks.meanings.values()) if asked.compat else []
    report.show_lists(
        console, {"assumed": assumed, "notes": notes, "corrections that are off": kept}
    )


def _rates(known: Known, x: Execution, system: System, s: dict[str, Any]) -> list[tuple[str, ...]]:
    from search.report.closed_form import format_rate

    engine = system.engine("matrix", x.datatype)
    assert engine is not None, "the execution was priced"
    tokens_per_s = s["sample_rate"] * known.application.seq_size
    # FLOP/s -> TFLOP/s
    peak = engine.peak_per_s / 1e12
    achieved = s["total_efficiency"] * peak
    return [
        ("samples per second", format_rate(s["sample_rate"])),
        ("tokens per second", format_rate(tokens_per_s)),
        ("tokens per second and processor", format_rate(tokens_per_s / x.num_procs)),
        ("TFLOP/s per processor", f"{achieved:.4g} of {peak:.4g}"),
        ("compute efficiency", f"{s['compute_efficiency'] * 100:.1f} %"),
        ("system efficiency", f"{s['system_efficiency'] * 100:.1f} %"),
        ("total efficiency", f"{s['total_efficiency'] * 100:.1f} %"),
    ]


def _required(x: Execution, system: System, s: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for text, key, net in _REQUIRED:
        if not s[key]:
            continue
        if net is None:
            has = system.mem2.GBps
        else:
            has = system.tiers[getattr(x, net)].bytes_per_s / 1e9
        # bytes/s -> GB/s
        rows.append((text, f"{s[key] / 1e9:.4g} GB/s", f"{has:.4g} GB/s"))
    return rows


def _prefixed(count: int) -> str:
    for factor, prefix in _PREFIXES:
        if count >= factor:
            return f"{count / factor:.3f} {prefix}"
    return str(count)
