"""Executions by the million: packs documents for the compiled engine and reads its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.documents.json import shorten
from autopar.errors import InputError
from search.closed_form import native
from search.closed_form.calculon.checks import published_application
from search.closed_form.calculon.documents import (
    CHOICES,
    DATATYPE_BYTES,
    Application,
    Execution,
    System,
)
from search.closed_form.files import load_document
from search.closed_form.machine import OPERATIONS, Rate
from search.closed_form.native import check_names, integers, packed_rows

__all__ = [
    "COMPAT",
    "CORRECT",
    "EXECUTION",
    "OUTCOME",
    "REASONS",
    "Quirks",
    "native_model",
    "open_model",
    "pack_executions",
    "unpack_execution",
]


# --------------------------------------------------------------------------------------------------
# Switches for what the published numbers of this model contain and should not.
#
# Every switch is one known defect. All off is the corrected model and the default; all on
# reproduces published figures (`compat`). Numbers are those of the documentation.


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """Defects to reproduce, one switch each."""

    running_recompute_totals: bool = False
    """B1: a recomputed layer adds the block's running forward totals, not its own FLOP and bytes;
    right: its own."""
    pipe_tile_twice: bool = False
    """B2: `pipe` counts its exposed tile as processing and as exposed time; right: once."""
    edge_overlaps_as_base: bool = False
    """B3: tiles of the edge block overlap the base block's communication; right: their own."""
    recommunication_as_forward: bool = False
    """B4: repeated communication is exposed as in the forward, and its slowdown counted in the
    recomputation too; right: as beside the weight gradient, once."""
    attention_input_dropped: bool = False
    """B5: without `rs_ag`, the input of query, key and value is not kept; right: it is."""
    overlapped_activations: bool = False
    """B6: overlapped linear layers keep other tensors than plain ones; right: the same."""
    dropout_gradient_bytes: bool = False
    """B7: activation gradients of dropout have one byte; right: those of the datatype."""
    weight_gradient_bytes: bool = False
    """B8: weight gradients have the bytes of the datatype; right: 4 while they accumulate."""
    checkpoint_unsharded: bool = False
    """B9: a checkpoint is whole under `rs_ag`; right: divided by the tensor degree."""
    optimizer_per_microbatch: bool = False
    """B10: efficiencies count the optimizer step once per microbatch; right: once per batch."""
    overlap_requirements: bool = False
    """B11: required bandwidths set one chunk (all blocks) against the room of all chunks (one
    block less), and leave out ring factors; right: the same set on both sides, ring included."""
    tail_windows: bool = False
    """B12: the last chunk's window counts the optimizer once too often and removes block times
    that are not in it, and charges one block's slowdown; right: c-1 windows and slowdowns."""
    latency_without_neighbour: bool = False
    """B13: blocks pay the latency of a pipeline transfer without a neighbour and, backward, in
    inference, and windows look at base blocks that do not exist; right: neither."""
    offload_sums: bool = False
    """B14: bytes to move in backward add both directions of the link and leave gradients out;
    right: the busier direction, gradients included."""
    divisor_fills_tier: bool = False
    """B15: a tier that must be filled takes any divisor of its size, even if too few processors
    are there; right: its size, or several groups that fill whole domains of it."""
    no_checkpoint_figure: bool = False
    """B16: offloaded checkpoints are null in inference; right: 0."""
    communication_flops: bool = False
    """B17: FLOP and bytes of collectives are in the block's sums, though their time is not;
    right: left out."""
    unknown_datatype_ends_search: bool = False
    """B19: a datatype that the system lacks is an assertion; right: infeasible."""


CORRECT = Quirks()
COMPAT = Quirks(**dict.fromkeys((f.name for f in fields(Quirks)), True))


# --------------------------------------------------------------------------------------------------
# Why the compiled engine refuses an execution, in the order of its codes.


REASONS: tuple[str, ...] = (
    "",
    "a degree or a batch size is below 1",
    "tensor * pipeline * data parallelism != num_procs",
    "batch_size is not a multiple of data_par * microbatch_size",
    "We only perform recompute during training",
    "Bad pipeline interleaving",
    "Bad pipeline interleaving with PP=1",
    "We perform optimizer sharding with DP > 1",
    "We perform TP comm overlap with TP > 1",
    "We only redo AG comm",
    "We assume no extra AG with full recompute",
    "We only perform DP comm overlap during training",
    "We perform DP comm overlap with DP > 1",
    "We only perform optimizer offloading during training",
    "a network tier does not exist",
    "Network tier isn't big enough",
    "Network tier isn't fully used",
    "Unsupported type",
    "Pipeline interleaving must be less than or equal to the number of blocks per processor",
    "Pipeline interleaving must be a factor value of the number of blocks per processor",
    "Offloading requires each processor to handle at least 3 blocks",
    "We should split batch_seq between TP partitions evenly",
    "We should split hidden between TP partitions evenly",
    "We should split feedforward between TP partitions evenly",
    "We should split attn_heads between TP partitions evenly",
    "attn_kv_heads does not divide attn_heads",
    "We should split attn_kv_heads between TP partitions evenly",
    "not in the published model",
    "Mem tier1 needs more than it has",
    "Mem tier2 needs more than it has",
    "a code is none of its field's",
)
"""Sentences without figures; `evaluate` gives them with their figures."""


# --------------------------------------------------------------------------------------------------


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
                "those of search.closed_form.calculon.EXECUTION"
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
