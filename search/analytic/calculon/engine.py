"""Executions by the million: packs documents for the compiled engine and reads its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError
from autopar.jsonio import shorten
from search.analytic import native
from search.analytic.calculon.checks import published_application
from search.analytic.calculon.documents import (
    CHOICES,
    DATATYPE_BYTES,
    Application,
    Execution,
    System,
)
from search.analytic.calculon.quirks import COMPAT, CORRECT, Quirks
from search.analytic.columns import check_names, integers, packed_rows
from search.analytic.documents import load_document
from search.analytic.machine import OPERATIONS, Rate

__all__ = [
    "EXECUTION",
    "OUTCOME",
    "native_model",
    "open_model",
    "pack_executions",
    "unpack_execution",
]

EXECUTION: np.dtype[Any] = native.calculon.EXECUTION
"""Fields of one packed execution; words are codes into `CHOICES`."""
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
"""What is known of one execution; times are 0 where it cannot run."""
_DEFAULTS: dict[str, Any] = {"training": True, "structure_type": "gpt"}
_NAMES: tuple[str, ...] = EXECUTION.names or ()


def open_model(application: Application, system: System, compat: bool | Quirks) -> Any:
    """Return the compiled model with the defects of `evaluate`'s `compat`."""
    quirks = compat if isinstance(compat, Quirks) else (COMPAT if compat else CORRECT)
    known = published_application(application) if compat is True else application
    return native_model(known, system, quirks, published=compat is True)


def native_model(
    application: Application, system: System, quirks: Quirks, *, published: bool
) -> Any:
    """Return the compiled model of an application on a system."""
    a = application
    fields = {
        name: int(getattr(a, name))
        for name in (
            "hidden",
            "feedforward",
            "seq_size",
            "attn_heads",
            "attn_size",
            "num_blocks",
            "vocab_size",
            "tied_embeddings",
            "causal",
        )
    }
    fields["attn_kv_heads"] = a.attn_kv_heads or a.attn_heads
    memories = [system.memory(1), system.memory(2)]
    machine = {
        **{
            name: {
                code: _rate(engine)
                for code, datatype in enumerate(DATATYPE_BYTES)
                if (engine := system.engine(name, datatype)) is not None
            }
            for name in ("matrix", "vector")
        },
        "memory_bytes": [size for size, _ in memories],
        "memory": [_rate(rate) for _, rate in memories],
        "roofline": system.processing_mode == "roofline",
        "tiers": [
            {
                "bytes_per_s": tier.bytes_per_s,
                "latency_s": tier.latency_s,
                "size": tier.size,
                "must_be_filled": tier.must_be_filled,
                "processor_usage": tier.processor_usage,
                "scalar": [tier.collectives[name].scalar for name in OPERATIONS],
                "offset": [tier.collectives[name].offset for name in OPERATIONS],
            }
            for tier in system.tiers
        ],
    }
    return native.calculon.Model(fields, machine, asdict(quirks), published)


def pack_executions(
    executions: NDArray[Any] | Mapping[str, Any] | Iterable[Execution | Mapping[str, Any]],
) -> NDArray[Any]:
    """Return executions as an array of `EXECUTION`.

    executions : such an array; columns by field name, numbers or words, broadcast to one length;
        or one document each.

    Raises
    ------
    InputError: a field is unknown or missing, or a value is not what it can hold.
    """
    if isinstance(executions, np.ndarray):
        if _fields(executions.dtype) != _fields(EXECUTION):
            raise InputError(
                f"executions: the array has fields {shorten(executions.dtype.names)}, expected "
                "those of search.analytic.calculon.EXECUTION"
            )
        return np.ascontiguousarray(executions, dtype=EXECUTION)
    if isinstance(executions, Mapping):
        return _pack_columns(executions)
    documents = [load_document(Execution, x) for x in executions]
    return _pack_columns({name: [getattr(x, name) for x in documents] for name in _NAMES})


def unpack_execution(row: np.void) -> dict[str, Any]:
    """Return one packed execution as a document."""
    result: dict[str, Any] = {}
    for name in Execution.model_fields:
        value = row[name].item()
        if name in CHOICES:
            result[name] = CHOICES[name][value]
        elif Execution.model_fields[name].annotation is int:
            result[name] = value
        else:
            result[name] = bool(value)
    return result


def _fields(dtype: np.dtype[Any]) -> list[tuple[str, np.dtype[Any]]]:
    """Return names and types without the padding, which `np.concatenate` drops."""
    return [(name, dtype[name]) for name in dtype.names or ()]


def _pack_columns(columns: Mapping[str, Any]) -> NDArray[Any]:
    given: dict[str, Any] = {**_DEFAULTS, **columns}
    degrees = [f"{name}_par" for name in ("tensor", "pipeline", "data")]
    if "num_procs" not in given and all(name in given for name in degrees):
        t, p, d = (np.asarray(given[name]) for name in degrees)
        given["num_procs"] = t * p * d
    check_names("executions", given, dict.fromkeys(_NAMES))
    return packed_rows(
        "executions", EXECUTION, {name: _column(name, given[name]) for name in _NAMES}
    )


def _column(name: str, values: Any) -> NDArray[Any]:
    array = np.asarray(values)
    kind = EXECUTION[name]
    if name in CHOICES and array.dtype.kind in "UO":
        codes = {word: code for code, word in enumerate(CHOICES[name])}
        wrong = [word for word in array.ravel().tolist() if word not in codes]
        if wrong:
            raise InputError(
                f"executions.{name}: the value is {shorten(wrong[0])}, expected one of "
                f"{', '.join(CHOICES[name])}"
            )
        array = np.array([codes[word] for word in array.ravel().tolist()]).reshape(array.shape)
    most = 1 if kind == np.uint8 else int(np.iinfo(kind).max)
    largest = len(CHOICES[name]) - 1 if name in CHOICES else most
    return integers(f"executions.{name}", array, largest, "biu")


def _rate(rate: Rate) -> tuple[float, list[tuple[float, float]]]:
    return rate.peak_per_s, list(rate.curve)
