"""Python interface of the compiled Calculon engine.

It packs documents for the engine and unpacks the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec.structs import asdict, fields
from numpy.typing import NDArray

from autopar.documents.checks import load_document
from autopar.errors import InfeasibleExecution, InputError
from autopar.records import (
    Record,
    checked_value,
    replace,
    shorten,
)
from autopar.units import format_count, format_magnitude
from search.closed_form import native
from search.closed_form.calculon.documents import (
    CHOICES,
    DATATYPE_BYTES,
    OPERATIONS,
    WHOLE_NUMBERS,
    Application,
    Execution,
    System,
)
from search.closed_form.native import (
    ABSENT,
    LARGEST,
    DocumentField,
    Switches,
    array_of,
    check_names,
    check_threads,
    given_rows,
    integers,
    interruptible,
    packed_rows,
    plain_columns,
)


class Quirks(Switches):
    """Switches that reproduce defects of the published Calculon."""

    meanings = native.calculon.QUIRKS


CORRECT, COMPAT = Quirks.of(False), Quirks.of(True)


# --------------------------------------------------------------------------------------------------
# Reasons why an execution cannot run, one per code of the compiled engine.


_Kind = Literal["input", "infeasible"]
_COUNTS = ("num_procs", "tensor_par", "pipeline_par", "data_par", "batch_size", "microbatch_size")
_NETS = ("tensor_par_net", "pipeline_par_net", "data_par_net")
_WORDS = (
    "attention_type",
    "activation_recompute",
    "tensor_par_comm_type",
    "tensor_par_overlap",
    "structure_type",
    "datatype",
)
"""Names of the word fields, in the order in which the engine checks them."""


class _Reason(Record):
    """Reason why the engine rejects an execution, for one code of the engine."""

    text: str
    """Reason without numbers, for `evaluate_many`."""
    figures: str
    """Format string of the reason with numbers, for `evaluate`; `refusal` fills it in."""
    kind: _Kind
    """'input' if only the execution causes it, 'infeasible' if it depends on model or system."""
    culprits: Callable[[Execution, System], Iterator[str]] | None
    """Function that yields the names of invalid fields; None if the reason names no field."""


def _input(
    text: str,
    figures: str | None = None,
    culprits: Callable[[Execution, System], Iterator[str]] | None = None,
) -> _Reason:
    """Return a reason of kind 'input'; figures : format string, default `text`."""
    return _Reason(text=text, figures=figures or text, kind="input", culprits=culprits)


def _infeasible(text: str, figures: str | None = None) -> _Reason:
    """Return a reason of kind 'infeasible'; figures : format string, default `text`."""
    return _Reason(text=text, figures=figures or text, kind="infeasible", culprits=None)


def _below_one(x: Execution, _: System) -> Iterator[str]:
    return (name for name in _COUNTS if getattr(x, name) < 1)


def _without_tier(x: Execution, system: System) -> Iterator[str]:
    return (name for name in _NETS if getattr(x, name) >= len(system.networks))


def _unpublished(x: Execution, _: System) -> Iterator[str]:
    unknown = {"attention_type": "flash", "structure_type": "llama"}
    return (name for name, word in unknown.items() if getattr(x, name) == word)


def _unknown_word(x: Execution, _: System) -> Iterator[str]:
    return (name for name in _WORDS if getattr(x, name) not in CHOICES[name])


_BETWEEN = "between {x.tensor_par} TP partitions evenly"
_TABLE: tuple[_Reason, ...] = (
    _input(""),  # it runs
    _input(
        "a degree or a batch size is below 1",
        "{name}: the value is {value}, expected at least 1",
        _below_one,
    ),
    _input(
        "tensor * pipeline * data parallelism != num_procs",
        "tensor * pipeline * data parallelism != num_procs: "
        "{x.tensor_par} * {x.pipeline_par} * {x.data_par} != {x.num_procs}",
    ),
    _input(
        "batch_size is not a multiple of data_par * microbatch_size",
        "batch_size: {x.batch_size} is not a multiple of data_par * microbatch_size = "
        "{x.data_par} * {x.microbatch_size}",
    ),
    _input("We only perform recompute during training"),
    _input("Bad pipeline interleaving", "Bad pipeline interleaving of {x.pipeline_interleaving}"),
    _input(
        "Bad pipeline interleaving with PP=1",
        "Bad pipeline interleaving of {x.pipeline_interleaving} with PP=1",
    ),
    _input("We perform optimizer sharding with DP > 1"),
    _input("We perform TP comm overlap with TP > 1"),
    _input("We only redo AG comm"),
    _input("We assume no extra AG with full recompute"),
    _input("We only perform DP comm overlap during training"),
    _input("We perform DP comm overlap with DP > 1"),
    _input("We only perform optimizer offloading during training"),
    _input(
        "a network tier does not exist",
        "{name}: the value is {value}, but the system has {tiers}, numbered from 0",
        _without_tier,
    ),
    _infeasible("Network tier isn't big enough", "Network tier{tier} isn't big enough"),
    _infeasible("Network tier isn't fully used", "Network tier{tier} isn't fully used"),
    _infeasible("Unsupported type", "Unsupported type: {x.datatype}"),
    _infeasible(
        "Pipeline interleaving must be less than or equal to the number of blocks per processor"
    ),
    _infeasible(
        "Pipeline interleaving must be a factor value of the number of blocks per processor"
    ),
    _infeasible("Offloading requires each processor to handle at least 3 blocks"),
    _input(
        "We should split batch_seq between TP partitions evenly",
        "We should split batch_seq={tokens} " + _BETWEEN,
    ),
    _input(
        "We should split hidden between TP partitions evenly",
        "We should split hidden={a.hidden} " + _BETWEEN,
    ),
    _input(
        "We should split feedforward between TP partitions evenly",
        "We should split feedforward={a.feedforward} " + _BETWEEN,
    ),
    _input(
        "We should split attn_heads between TP partitions evenly",
        "We should split {a.attn_heads} attn_heads " + _BETWEEN,
    ),
    _input(
        "attn_kv_heads does not divide attn_heads",
        "attn_kv_heads: the value is {kv_heads}, expected a divisor of attn_heads = {a.attn_heads}",
    ),
    _infeasible(
        "We should split attn_kv_heads between TP partitions evenly",
        "We should split {kv_heads} attn_kv_heads " + _BETWEEN,
    ),
    _input(
        "not in the published model",
        "{name}: {value!r} is not in the published model. Remove compat",
        _unpublished,
    ),
    _infeasible(
        "Mem tier1 needs more than it has", "Mem tier1 needs {needed[0]} but only has {has[0]}"
    ),
    _infeasible(
        "Mem tier2 needs more than it has", "Mem tier2 needs {needed[1]} but only has {has[1]}"
    ),
    _input(
        "a code is none of its field's",
        "{name}: the value is {value!r}, expected one of {choices}",
        _unknown_word,
    ),
)
"""Reasons in the order of the engine's codes."""
REASONS: tuple[str, ...] = tuple(reason.text for reason in _TABLE)
"""Reasons without numbers; `evaluate` raises errors with numbers."""
_DATATYPE = REASONS.index("Unsupported type")


def refusal(
    code: int,
    application: Application,
    execution: Execution,
    system: System,
    quirks: Quirks,
    *,
    tier: int,
    needed_bytes: tuple[float, float],
) -> InfeasibleExecution:
    """Return the error for an execution that the engine rejected, with the contradicting numbers.

    application : result of `_known`.
    tier : index of the network that is too small or not filled, if that is the reason.
    needed_bytes : required bytes of the first and the second memory.
    """
    a, x, reason = application, execution, _TABLE[code]
    name = next(reason.culprits(x, system)) if reason.culprits else ""
    figures, kind = reason.figures, reason.kind
    if name == "datatype":
        figures = "Unsupported data type: {value}"
    # Defect B19: the published tool treats it as an invalid input, not as infeasible.
    if code == _DATATYPE and quirks.unknown_datatype_ends_search:
        kind = "input"
    sentence = figures.format(
        a=a,
        x=x,
        name=name,
        value=getattr(x, name, None),
        choices=", ".join(CHOICES.get(name, ())),
        tiers=format_count(len(system.networks), "network tier"),
        tier=tier,
        tokens=x.microbatch_size * a.seq_size,
        # Multiquery attention has one key-value head, whatever the application.
        kv_heads=1 if x.attention_type == "multiquery" else a.attn_kv_heads or a.attn_heads,
        needed=[format_magnitude(size) for size in needed_bytes],
        has=[format_magnitude(system.memory_bytes(tier)) for tier in (1, 2)],
    )
    return InfeasibleExecution(sentence, kind)


# --------------------------------------------------------------------------------------------------
# Documents packed for the engine, and its results unpacked.


EXECUTION: np.dtype[Any] = native.calculon.EXECUTION
"""Fields of one packed execution; words are codes into `CHOICES`."""
STATISTICS: tuple[str, ...] = native.calculon.STATISTICS
"""Published names of the statistics of a step, in engine order; those of a vocabulary are last."""
LAYER_FIGURES: tuple[str, ...] = native.calculon.LAYER_FIGURES
"""Published names of the statistics of one operation of a block, in engine order."""
OUTCOME = np.dtype(
    [
        ("ok", np.bool_),
        ("reason", object),
        ("total_time_s", np.float64),
        ("tier1_bytes", np.float64),
        ("tier2_bytes", np.float64),
        ("sample_rate_per_s", np.float64),
    ]
)
"""Result of one execution; the step time is 0 if it cannot run."""
_DEFAULTS: dict[str, Any] = {"training": True, "structure_type": "gpt"}
_NAMES: tuple[str, ...] = EXECUTION.names or ()
_NO_CODE = 255
"""Code of an invalid word."""
_DEGREES = ("tensor_par", "pipeline_par", "data_par")
_CODES = {name: {word: code for code, word in enumerate(words)} for name, words in CHOICES.items()}


def _field_of(name: str) -> DocumentField:
    """Return the accepted values of an execution key; they must agree with `Execution`."""
    default = _DEFAULTS.get(name)
    if name in CHOICES:
        words = _CODES[name]
        code = None if default is None else words[default]
        return DocumentField(largest=len(words) - 1, words=words, default=code)
    if EXECUTION[name] == np.uint8:
        return DocumentField(
            largest=1, flag=True, default=None if default is None else int(default)
        )
    # If not given, it is the product of the degrees.
    return DocumentField(largest=LARGEST, default=ABSENT if name == "num_procs" else None)


_FIELDS = {name: _field_of(name) for name in _NAMES}


def open_model(application: Application, system: System, compat: bool | Quirks) -> Any:
    """Return the compiled model of an application on a system; compat : as in `evaluate`."""
    fields = _fields_of(_known(application, compat))
    machine = _machine_of(system)
    return native.calculon.Model(fields, machine, Quirks.of(compat).flags(), compat is True)


def evaluate(
    application: Application | Mapping[str, Any] | Path | str,
    execution: Execution | Mapping[str, Any] | Path | str,
    system: System | Mapping[str, Any] | Path | str,
    *,
    compat: bool | Quirks = False,
    layers: bool = False,
) -> dict[str, Any]:
    """Return the statistics of one execution by published name, in seconds, bytes and FLOP.

    compat : True for the published model with its defects, False for the corrected model, or
        `Quirks` with the defects to reproduce.
    layers : True to add the key `layers`, with one row per operation of a block.

    Raises InputError: a document is invalid. Raises InfeasibleExecution: the execution cannot run;
    its `reason` explains why, with numbers.
    """
    application = load_document(Application, application)
    execution = load_document(Execution, execution)
    system = load_document(System, system)
    model = open_model(application, system, compat)
    row = _pack_one(execution)
    outcomes, table = model.evaluate_many(row, 1, True, native.GO_ON)
    outcome, quirks = outcomes[0], Quirks.of(compat)
    if not outcome["ok"]:
        raise refusal(
            int(outcome["reason"]),
            _known(application, compat),
            execution,
            system,
            quirks,
            tier=model.refusing_tier(row),
            needed_bytes=(float(outcome["tier1_bytes"]), float(outcome["tier2_bytes"])),
        )
    names = statistic_names(application, compat)
    statistics: dict[str, Any] = dict(zip(names, table[0, : len(names)].tolist(), strict=True))
    if quirks.no_checkpoint_figure and not execution.training:
        # B16: null in the published figures.
        statistics["act_checkpoint_size_with_offload"] = None
    if layers:
        operations, figures = model.layers(row)
        statistics["layers"] = [
            {"name": name, **dict(zip(LAYER_FIGURES, values, strict=True))}
            for name, values in zip(operations, figures.tolist(), strict=True)
        ]
    return statistics


def evaluate_many(
    application: Application | Mapping[str, Any] | Path | str,
    executions: NDArray[Any] | Mapping[str, Any] | Iterable[Execution | Mapping[str, Any]],
    system: System | Mapping[str, Any] | Path | str,
    *,
    compat: bool | Quirks = False,
    threads: int = 1,
) -> NDArray[Any]:
    """Return the results of many executions, as a structured array in their order.

    executions : an array of `EXECUTION`, columns by field name, or one document each.
    threads : threads of the compiled engine, 1 to 1024; results do not depend on their number.

    Fields: `ok`, `reason` (without numbers, empty for feasible executions), `total_time_s`,
    `tier1_bytes`, `tier2_bytes` (first and second memory) and `sample_rate_per_s`.

    Raises InputError: a document or a column is invalid.
    """
    check_threads(threads)
    a = load_document(Application, application)
    s = load_document(System, system)
    packed = pack_executions(executions)
    model = open_model(a, s, compat)
    found, _ = interruptible(
        lambda halt: model.evaluate_many(packed, threads, False, halt), rows=packed.size
    )
    result = np.zeros(found.shape, dtype=OUTCOME)  # np.empty fills objects one by one
    for name in ("total_time_s", "tier1_bytes", "tier2_bytes", "sample_rate_per_s"):
        result[name] = found[name]
    result["ok"] = found["ok"]
    result["reason"] = np.array(REASONS, dtype=object)[found["reason"]]
    return result


def statistic_names(application: Application, compat: bool | Quirks) -> tuple[str, ...]:
    """Return the published names of the statistics of a step.

    Those of embedding and head are included only if the application has a vocabulary.
    """
    known = _known(application, compat)
    return STATISTICS if known.vocab_size else STATISTICS[: native.calculon.NUM_PUBLISHED]


_UNKNOWN = ("attn_kv_heads", "vocab_size", "tied_embeddings", "causal")
"""Application fields that the published model lacks."""


def _known(application: Application, compat: bool | Quirks) -> Application:
    """Return the application; if `compat` is True, the fields in `_UNKNOWN` have their defaults."""
    # With individually named defects, the model keeps all its fields.
    if compat is not True:
        return application
    plain = {one.name: one.default for one in fields(Application) if one.name in _UNKNOWN}
    return replace(application, **plain)


def _fields_of(a: Application) -> dict[str, int]:
    # If not given, every head has separate keys and values.
    known = asdict(a) | {"attn_kv_heads": a.attn_kv_heads or a.attn_heads}
    return {name: int(value) for name, value in known.items()}


def _machine_of(system: System) -> dict[str, Any]:
    """Return a system in the format of the compiled engine, in FLOP, bytes and seconds."""
    engines = {"matrix": system.matrix, "vector": system.vector}
    return {
        **{
            name: {
                # Codes are positions in the table of datatypes; TFLOP/s, and sizes in GFLOP.
                code: _rate(known[word].tflops * 1e12, known[word].gflops_efficiency, 1e9)
                for code, word in enumerate(DATATYPE_BYTES)
                if word in known
            }
            for name, known in engines.items()
        },
        "memory_bytes": [system.memory_bytes(1), system.memory_bytes(2)],
        # GBps means 1e9 bytes/s; sizes of the curve are in 1e6 bytes.
        "memory": [
            _rate(memory.GBps * 1e9, memory.MB_efficiency, 1e6)
            for memory in (system.mem1, system.mem2)
        ],
        "roofline": system.processing_mode == "roofline",
        "tiers": [
            {
                "bytes_per_s": network.bytes_per_s,
                "latency_s": network.latency,
                "size": network.size,
                "must_be_filled": network.must_be_filled,
                "processor_usage": network.processor_usage,
                "scalar": [network.ops[name][0] for name in OPERATIONS],
                # p2p transfers have no offset.
                "offset": [network.ops[name][1] or 0.0 for name in OPERATIONS],
            }
            for network in system.networks
        ],
    }


def _rate(
    peak_per_s: float, curve: list[list[float]], unit: float
) -> tuple[float, list[tuple[float, float]]]:
    """Return (peak rate, efficiency curve with sizes in base units); unit : unit of the sizes."""
    return peak_per_s, [(size * unit, share) for size, share in curve]


def pack_executions(
    executions: NDArray[Any] | Mapping[str, Any] | Iterable[Execution | Mapping[str, Any]],
) -> NDArray[Any]:
    """Return executions as an array of `EXECUTION`.

    executions : an array of `EXECUTION`; or columns of numbers or words by field name, broadcast to
        one length; or one document per execution.

    Raises InputError: a field is unknown or missing, or a value is invalid.
    """
    if isinstance(executions, np.ndarray):
        expected = "search.closed_form.calculon.EXECUTION"
        return given_rows("executions", executions, EXECUTION, expected)
    if isinstance(executions, Mapping):
        return _pack_columns(executions)
    given = list(checked_value("executions", Iterable, executions))
    columns = _plain_columns([asdict(x) if type(x) is Execution else x for x in given])
    if columns is None:
        documents = [load_document(Execution, x) for x in given]
        columns = {name: [getattr(x, name) for x in documents] for name in _NAMES}
    return _pack_columns(columns)


def _plain_columns(documents: list[Any]) -> Mapping[str, Any] | None:
    """Return one column per field, if no document needs a conversion or a check; else None."""
    columns = plain_columns(documents, _FIELDS)
    if columns is None:
        return None
    absent = columns["num_procs"] == ABSENT
    if absent.any():
        # Float product, since an integer product would wrap.
        product = np.prod([columns[name].astype(np.float64) for name in _DEGREES], axis=0)
        if (product[absent] > LARGEST).any():
            return None
        columns["num_procs"][absent] = product[absent]
    return columns


def _pack_one(execution: Execution) -> NDArray[Any]:
    """Return an execution as a packed row; invalid values become values that the engine rejects."""
    row = np.zeros(1, dtype=EXECUTION)
    for name in _NAMES:
        value = getattr(execution, name)
        if name in CHOICES:
            # A word without a code is refused by the check of its field.
            value = CHOICES[name].index(value) if value in CHOICES[name] else _NO_CODE
        row[name] = max(value, 0)  # counts below 1 are refused alike, and may not fit in an integer
    return row


def unpack_execution(row: np.void) -> dict[str, Any]:
    """Return one packed execution as a document, with words in place of codes."""
    result: dict[str, Any] = {}
    for name in Execution.__struct_fields__:
        value = row[name].item()
        if name in CHOICES:
            result[name] = CHOICES[name][value]
        elif name in WHOLE_NUMBERS:
            result[name] = value
        else:
            result[name] = bool(value)
    return result


def _pack_columns(columns: Mapping[str, Any]) -> NDArray[Any]:
    given: dict[str, Any] = {**_DEFAULTS, **columns}
    # Three degrees determine the processors, as in a document.
    if "num_procs" not in given and all(name in given for name in _DEGREES):
        t, p, d = (_column(name, given[name]).astype(np.float64) for name in _DEGREES)
        try:
            # Float product, since an integer product would wrap.
            product = t * p * d
        except ValueError:
            product = t  # different lengths, reported for all columns together
        if (product > LARGEST).any():
            raise InputError(
                f"executions.num_procs: tensor_par * pipeline_par * data_par is "
                f"{product.max():.10g}, expected {LARGEST} at most"
            )
        given["num_procs"] = product.astype(np.int64)
    check_names("executions", given, dict.fromkeys(_NAMES))
    return packed_rows(
        "executions", EXECUTION, {name: _column(name, given[name]) for name in _NAMES}
    )


def _column(name: str, values: Any) -> NDArray[Any]:
    array = array_of(f"executions.{name}", values)
    kind = EXECUTION[name]
    if name in CHOICES and array.dtype.kind in "UO":
        codes = _CODES[name]
        wrong = [word for word in array.ravel().tolist() if word not in codes]
        if wrong:
            raise InputError(
                f"executions.{name}: the value is {shorten(wrong[0])}, expected one of "
                f"{', '.join(CHOICES[name])}"
            )
        array = np.array([codes[word] for word in array.ravel().tolist()]).reshape(array.shape)
    # Flags are bytes with two values.
    most = 1 if kind == np.uint8 else int(np.iinfo(kind).max)
    largest = len(CHOICES[name]) - 1 if name in CHOICES else most
    return integers(f"executions.{name}", array, largest, "biu")
