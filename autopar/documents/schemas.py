"""Records of hardware and model files in Galvatron's format; JSON Schemas of all documents."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any, ClassVar

import autopar
from autopar.documents.checks import DOCUMENTS, EXTRAS, INT, PatternDocument, Rule, published
from autopar.documents.json import record_schema
from autopar.records import Record, quantity
from autopar.units import MIB

# --------------------------------------------------------------------------------------------------
# Documented files: their keys, units and ranges.
#
# All published spellings of a key are rules here; the readers convert them to base units. Limits
# are far outside anything real, so that a value beyond one is a mix-up of units; the message names
# the unit in which it was probably written.


LIST = rf"(?:{INT}|\[{INT}(?:, ?{INT})*\]|{INT}(?:[_,]{INT})+)"
"""One integer or several: `2048`, `[512,512]`, or the newest release's `512_512`."""

_BANDWIDTH = quantity(
    what="a bandwidth",
    unit="GB/s",
    minimum=1e-4,
    maximum=1e5,
    too_large="looks like MB/s or bytes/s",
    too_small="looks like TB/s or bytes per microsecond",
)
_OPERATION_MS = quantity(
    what="the time of one operation", unit="ms", maximum=1e5, too_large="looks like microseconds"
)
_LAYER_MS = quantity(
    what="a time per sample", unit="ms", maximum=1e7, too_large="looks like nanoseconds"
)
# 0 is allowed: the layers may account for all of a pass.
_OTHER_MS = quantity(
    what="a time per sample",
    unit="ms",
    maximum=1e7,
    exclusive=False,
    too_large="looks like nanoseconds",
)
_COEFFICIENT = quantity(
    what="a slow-down of about 1.1 to 1.3",
    unit="",
    minimum=0.5,
    maximum=10.0,
    too_large="looks like a percentage",
    too_small="looks like only the extra time: add 1",
)
_MIB = quantity(
    what="a memory size", unit="MiB", maximum=10 * 2**20, too_large="looks like KiB or bytes"
)
_MIB_OR_ZERO = quantity(
    what="a memory size",
    unit="MiB",
    maximum=10 * 2**20,
    exclusive=False,
    too_large="looks like KiB or bytes",
)
_RAW_MIB = quantity(
    what="a measured memory size",
    unit="MiB",
    minimum=-(10 * 2**20),
    maximum=10 * 2**20,
    exclusive=False,
    too_large="looks like KiB or bytes",
)

_Bandwidth = Annotated[float, _BANDWIDTH]
_OperationMs = Annotated[float, _OPERATION_MS]
_LayerMs = Annotated[float, _LAYER_MS]
_OtherMs = Annotated[float, _OTHER_MS]
_Mib = Annotated[float, _MIB]
_MibOrZero = Annotated[float, _MIB_OR_ZERO]
_RawMib = Annotated[float, _RAW_MIB]


@published("allreduce")
class AllreduceDocument(PatternDocument):
    """All-reduce bus bandwidth by group size: `consec_1` neighbouring ranks, `consec_0` strided."""

    rules = (
        Rule(
            rf"allreduce_size_(?P<size>{INT})_consec_(?P<consec>[01])",
            "allreduce_size_8_consec_1",
            _Bandwidth,
            "Bus bandwidth of an all-reduce in groups of this size, GB/s (1e9 bytes/s).",
        ),
        Rule(
            rf"allreduce_size_(?P<size>{INT})",
            "allreduce_size_8",
            _Bandwidth,
            "PaddleNLP's spelling: groups of neighbouring ranks.",
        ),
    )


def allreduce_key(group_size: int, consecutive: bool) -> str:
    """Return the documented key of an all-reduce bandwidth."""
    return f"allreduce_size_{group_size}_consec_{int(consecutive)}"


def p2p_key(num_stages: int) -> str:
    """Return the documented key of the bandwidth between neighbouring pipeline stages."""
    return f"pp_size_{num_stages}"


def sp_time_key(operation: str, group_size: int, size_bytes: float) -> str:
    """Return the documented key of the time of a collective; the size is cut to whole MiB."""
    return f"{operation}_size_{group_size}_{int(size_bytes) // MIB}MB_time"


@published("p2p")
class P2pDocument(PatternDocument):
    """Bandwidth between neighbouring pipeline stages by number of stages."""

    rules = (
        Rule(
            rf"pp_size_(?P<size>{INT})",
            "pp_size_2",
            _Bandwidth,
            "Bandwidth of a message to the next of this many stages, GB/s (1e9 bytes/s).",
        ),
    )


@published("overlap")
class OverlapDocument(Record):
    """Slow-down of kernels while computation and communication overlap."""

    overlap_coe: Annotated[float, _COEFFICIENT]
    """Time with overlap over time without; 1 for no slow-down."""


@published("sp_time")
class SpTimeDocument(PatternDocument):
    """Time of one collective by group size and message size, groups of neighbouring ranks."""

    rules = tuple(
        Rule(
            rf"(?P<operation>{operation})_size_(?P<size>{INT})_(?P<mib>{INT})MB_time",
            f"{operation}_size_8_64MB_time",
            _OperationMs,
            f"Time of one {operation} of {tensor} (MB = 2^20 bytes), ms.",
        )
        for operation, tensor in (
            ("allreduce", "a tensor of this size"),
            ("all2all", "a local input tensor of this size"),
        )
    )


_HALVES = (
    r"layer(?:num|type).*_(?:attention|attn|mlp|moe|router|expert)s?(?:_.*)?",
    (
        "this is half a layer (attention or MLP), and only whole layers are read. "
        "Measure them with autopar profile model"
    ),
)
"""Keys of Galvatron's profiles of models with experts: attention and MLP are separate layers."""


@published("computation")
class ComputationDocument(PatternDocument):
    """Forward times on one GPU: processed times per layer and sample, raw times per batch."""

    rules = (
        Rule(
            rf"layertype_(?P<type>0|{INT})(?:_bsz(?P<batch>{INT}))?(?:_seq(?P<seq>{INT}))?",
            "layertype_0_bsz8_seq2048",
            _LayerMs,
            "Forward time of one layer of this type per sample, ms.",
        ),
        Rule(
            rf"layertype_other(?:_0)?(?:_bsz(?P<batch>{INT}))?(?:_seq(?P<seq>{LIST}))?",
            "layertype_other_bsz8_seq2048",
            _OtherMs,
            "Forward time of everything that is not a layer, per sample, ms.",
        ),
        Rule(
            rf"layernum(?P<layers>{LIST})(?:_bsz(?P<batch>{INT}))?(?:_seq(?P<seq>{LIST}))?",
            "layernum[2]_bsz8_seq2048",
            _LayerMs,
            "Raw: forward of a whole model with this many layers of each type, ms per batch.",
        ),
    )
    unread = (_HALVES,)


class Degrees(PatternDocument):
    """Memory by tensor (or vocabulary) degree, MiB."""

    rules = (Rule(INT, "1", _MibOrZero, "Memory at this degree, MiB."),)

    @classmethod
    def older(cls, value: Any) -> Any:
        """Return a table of degree 1 for a single number, as in files of releases 2.1 to 2.3."""
        return {"1": value} if isinstance(value, int | float) else value


class LayerActivations(PatternDocument):
    """Activations by tensor degree, MiB per sample of the tensor group's local batch."""

    rules = (
        Rule(INT, "1", _Mib, "Activations at this tensor degree, MiB per sample."),
        Rule(
            "checkpoint",
            "checkpoint",
            _Mib,
            "Memory that a checkpointed layer keeps, MiB per sample.",
        ),
    )


class LayerEntry(Record):
    """Memory of one layer."""

    parameter_size: _Mib
    """Size of the parameters of one unsharded layer at 4 bytes each (PaddleNLP: 2 bytes), MiB."""
    tp_activation_per_bsz_dict: LayerActivations


class OtherEntry(Record):
    """Memory of embedding, head and loss."""

    model_states: Degrees
    activation: Degrees


class LayerBySeq(PatternDocument):
    """Memory of one layer by sequence length."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(INT, "2048", LayerEntry, "Memory at this sequence length."),
    )


class OtherBySeq(PatternDocument):
    """Memory of embedding, head and loss by sequence length."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(LIST, "2048", OtherEntry, "Memory at these sequence lengths."),
    )


class RawRun(PatternDocument):
    """Raw measurements of one parallel degree; used only where processed keys are missing."""

    rules = (
        Rule(
            r"layernum.*",
            "layernum[2]_bsz8_seq2048_rank0_ms",
            _RawMib,
            "Raw: memory of one rank, MiB: _ms after the step, _act, _act_peak.",
        ),
    )


def _without_seq(value: Any, fields: tuple[str, ...]) -> Any:
    """Return a table with the key '' for the sequence length if the file omits that level.

    Files of releases 2.1 to 2.3 do.
    """
    if isinstance(value, dict) and any(field in value for field in fields):
        return {"": value}
    return value


class _LayerTables(LayerBySeq):
    """Memory of one layer by sequence length, or without this level for a single length."""

    rules = (*LayerBySeq.rules, Rule("", "parameter_size", LayerEntry, "No sequence level."))

    @classmethod
    def older(cls, value: Any) -> Any:
        """Add the sequence level, with the key ''."""
        return _without_seq(value, ("parameter_size", "tp_activation_per_bsz_dict"))


class _OtherTables(OtherBySeq):
    """Memory of embedding, head and loss by sequence length; older files omit that level."""

    rules = (*OtherBySeq.rules, Rule("", "model_states", OtherEntry, "No sequence level."))

    @classmethod
    def older(cls, value: Any) -> Any:
        """Add the sequence level, with the key ''."""
        return _without_seq(value, ("model_states", "activation"))


@published("memory")
class MemoryDocument(PatternDocument):
    """Memory per rank: processed tables by sequence length and degree, and raw runs, MiB."""

    rules = (
        Rule(
            rf"layertype_(?P<type>0|{INT})(?P<sp>_sp)?",
            "layertype_0_sp",
            _LayerTables,
            "Memory of one layer of this type; `_sp`: with Megatron sequence parallelism.",
        ),
        Rule(
            r"other_memory_pp_(?P<position>off|on_first|on_last)(?P<sp>_sp)?",
            "other_memory_pp_off_sp",
            _OtherTables,
            "Memory of embedding, head and loss without pipeline, on its first or last stage.",
        ),
        Rule(
            # _True and _False end PaddleNLP's keys
            rf"(?P<pp>{INT})_(?P<tp>{INT})_(?P<dp>{INT})(?P<flags>(?:_[a-z]+)*|_True|_False)",
            "1_2_4_vtp_sp",
            RawRun,
            "Raw: runs at these pipeline, tensor and data degrees.",
        ),
    )
    unread = (_HALVES,)

    @classmethod
    def known_keys(cls, keys: Iterable[str]) -> list[str]:
        """Return examples of all kinds of keys and the valid keys of a file, for suggestions."""
        own = ("layertype_0", "other_memory_pp_off", "other_memory_pp_on_first")
        more = [*own, "other_memory_pp_on_last", "other_memory_pp_on_first_sp"]
        return [*super().known_keys(keys), *more, "other_memory_pp_on_last_sp"]


# --------------------------------------------------------------------------------------------------
# Every document by its role, and its JSON Schema.


def json_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema (2020-12) of every document by role.

    All modules of autopar are imported, because importing registers their documents.
    """
    import pkgutil

    # Importing a module registers its documents.
    for module in pkgutil.walk_packages(autopar.__path__, "autopar."):
        import_module(module.name)
    found = {
        role: {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **record_schema(kind),
            **{key: items for key, items in EXTRAS[role].items() if items},
        }
        for role, kind in sorted(DOCUMENTS.items())
    }
    forms = import_module("autopar.command.answer_schemas")
    return {**found, "answer": forms.with_forms(found["answer"])}
