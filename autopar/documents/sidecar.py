"""Sidecars: raw samples and metadata of a profile file, in `<file>.meta.json`.

A file in Galvatron's format contains one number per key and no unit. Its sidecar contains the unit,
the source of the numbers, data that the keys cannot express, and every raw sample. Writing a file
again appends to the measuring runs in its sidecar.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from msgspec import Meta, field, to_builtins
from msgspec.structs import fields as fields_of

from autopar import __version__
from autopar.documents.checks import published
from autopar.documents.json import JsonDocument, load_object, read_record, write_json, written
from autopar.errors import DocumentError
from autopar.records import (
    KeyFault,
    Record,
    Seconds,
    SecondsOrZero,
    number,
    quantity,
    replace,
    shorten,
    whole_number,
)
from autopar.run.model import LayerSpec, ModelSpec, OtherTime, ShardedTime
from autopar.run.runtime import OverlapFactors
from autopar.sources import NAMED_BY_FILES, STACK_ROLE, Source

# --------------------------------------------------------------------------------------------------
# Raw samples of a measuring run by cell, and the curves made of them.
#
# A `Measurement` is one cell of a sweep with every raw sample in seconds; statistics are computed
# on read. `CurveData` is the summary that the planner reads: time over size with its spread.


Bytes = Annotated[
    float, quantity(what="a size", unit="bytes", maximum=1e15, too_large="is beyond any device")
]
BytesPerSecond = Annotated[
    float,
    quantity(
        what="a memory bandwidth",
        unit="bytes/s",
        minimum=1e6,
        maximum=1e15,
        too_large="is beyond any device",
        too_small="looks like GB/s or TB/s",
    ),
]
BytesOrZero = Annotated[
    float,
    quantity(
        what="a size",
        unit="bytes",
        maximum=1e15,
        exclusive=False,
        too_large="is beyond any device",
    ),
]
_Ratio = Annotated[
    float,
    quantity(what="a ratio", unit="", maximum=1e9, too_large="is too large for a ratio of times"),
]
_Size = Annotated[int, whole_number(1, 10**9)]
_AGAIN = "Measure again with `profile-model --profile-type computation`"
_Operation = Annotated[
    str, Meta(pattern="^[a-z][a-z0-9_]{0,40}$", extra={"expected": "a name such as allreduce"})
]
_Finite = Annotated[float, number(-1e18, 1e18)]


class CurveData(Record):
    """Times of one operation over message size, in base units, with their spread and fit."""

    operation: _Operation
    """Operation, which defines the size: bytes of the full tensor for allreduce, allgather and
    reducescatter, of one rank's tensor for all2all, of the message for p2p."""
    group_size: int
    """Number of ranks of the group; for p2p the number of pipeline stages."""
    consecutive: bool = True
    """True for ranks i*g .. i*g+g-1, False for i, i+W/g, i+2W/g, ..."""
    sizes_bytes: list[Bytes]
    times_s: list[Seconds]
    """Median of the slowest rank of the slowest group."""
    low_s: list[Seconds] | None = None
    """5th percentile of the samples."""
    high_s: list[Seconds] | None = None
    """95th percentile of the samples."""
    latency_s: SecondsOrZero | None = None
    """Intercept of the fit time = latency + size * seconds_per_byte."""
    seconds_per_byte: SecondsOrZero | None = None

    def __post_init__(self) -> None:
        smallest = 2 if self.operation != "memcopy" else 1
        if not smallest <= self.group_size <= 10**9:
            raise KeyFault(
                "group_size",
                f"the value is {self.group_size}, expected a group of at least {smallest}",
            )
        for name in ("times_s", "low_s", "high_s"):
            times = getattr(self, name)
            if times is not None and (len(self.sizes_bytes) != len(times) or not times):
                raise KeyFault(
                    name,
                    f"there are {len(times)} times for {len(self.sizes_bytes)} sizes, "
                    "expected one time per size",
                )
        if any(b <= a for a, b in zip(self.sizes_bytes, self.sizes_bytes[1:], strict=False)):
            raise KeyFault("sizes_bytes", "the sizes are not increasing")


class Straggler(Record):
    """Rank whose groups were all much slower than the median group of a measurement."""

    rank: int
    host: str
    ratio: _Ratio
    """Median time of its slowest group over that of the median group."""


class Measurement(Record):
    """Measurement of one operation, group size and message size, with all raw samples."""

    key: str
    """Unique name, such as `allreduce_size_4_consec_0_33554432B`."""
    operation: _Operation
    group_size: int
    consecutive: bool = True
    size_bytes: BytesOrZero
    status: Literal["ok", "failed", "skipped"]
    reason: str | None = None
    """Reason of the failure or of skipping; None if ok."""
    scope: Literal["one device", "intra-node", "inter-node"]
    samples_s: dict[str, list[Seconds]] = field(default_factory=dict)
    """Seconds of one operation, by quantity.

    Collectives have `time`: the slowest rank of every repetition, in the group with the largest
    median.
    """
    loops: int = 1
    """Number of back-to-back operations in one repetition; a sample is their mean."""
    worst_group: list[int] = field(default_factory=list)
    """Ranks of the group that the samples belong to."""
    group_medians_s: list[Seconds] = field(default_factory=list)
    """Median of every group, in the order of their first ranks."""
    stragglers: list[Straggler] = field(default_factory=list)
    checked: bool = False
    """True if the operation's result was compared with the expected one."""
    emulated: bool = False
    """True if one device emulated both sides, such as a copy in place of a message."""
    elapsed_s: SecondsOrZero = 0.0
    """Wall time of the cell, with set-up and warm-up."""


# --------------------------------------------------------------------------------------------------
# Raw figures of a model measurement by cell, and the times made of them.
#
# A `ModelMeasurement` is one cell of `profile-model`; statistics are computed on read.
# `autopar.run.model.ShardedTime` is the summary that the planner reads where documented keys cannot
# express it: backward separate from forward, layers sharded over a tensor group, recomputation,
# spread. A `TimeFit` contains the error of a formula on such times, and its uncertainty.


Part = Literal["layer", "only", "first", "last"]
"""Part of a model: a layer, or embedding, head and loss on the only, first or last stage."""
TensorKind = Literal["tp", "sp", "dtensor", "dtensor_sp", "ulysses"]
"""Tensor parallelism without and with Megatron's sequence parallelism, each also with DTensor, and
Ulysses sequence parallelism; all are equal at degree 1."""


Form = Literal["static", "batch", "sequence"]
"""Form of a fit: proportional to the batch, with a launch cost, or also over sequence lengths."""
Term = Literal["launch_s", "s_per_sample", "s_per_token", "s_per_token_squared"]
"""Term of a fit, with its unit: seconds of a launch, then seconds times b, b*s and b*s^2 for a
batch of b samples of s tokens each."""


class ModelMeasurement(Record):
    """Measurement of a part of a model at one batch, length and sharding."""

    key: str
    """Unique name, such as `time_layertype_0_bsz1_seq2048_tp2_sp`."""
    quantity: Literal["time", "memory"]
    part: Part
    layer_type: int | None = None
    """Index of the layer type; None for parts that are not layers."""
    batch: int
    seq_lengths: list[int]
    """Sequence length of the layer type; of all types for parts that are not layers."""
    degree: int = 1
    """Tensor, Ulysses or vocabulary degree."""
    kind: TensorKind = "sp"
    checkpoint: Literal["none", "full", "selective"] = "none"
    num_layers: list[int] | None = None
    """Layers of each type in a whole forward, in addition to the part around them; None otherwise.
    """
    source: Literal["device", "exact"]
    """Measured on a device, or counted without one."""
    status: Literal["ok", "failed", "skipped"]
    reason: str | None = None
    """Reason of the failure or of skipping; `out of memory` is a failure with a reason."""
    samples_s: dict[str, list[Seconds]] = field(default_factory=dict)
    """Seconds for the whole batch by `forward`, `backward`, `recompute`, `optimizer`."""
    bytes: dict[str, BytesOrZero] = field(default_factory=dict)
    """Bytes on a rank for the whole batch.

    `parameters` : parameters in the measured type; `activation` : saved from forward to backward;
    `peak` : transient memory above the saved activations.
    """
    num_parameters: int | None = None
    """Number of parameters on the rank."""
    notes: list[str] = field(default_factory=list)
    elapsed_s: _Finite = 0.0


def _check_spread(key: str, times: ShardedTime | OtherTime) -> None:
    """Raise KeyFault for percentiles without a median, or with the median outside of them."""
    for name in ("forward", "backward", "recompute"):
        middle, low, high = (
            getattr(times, f"{name}_{which}", None) for which in ("s", "low_s", "high_s")
        )
        if middle is None and (low, high) != (None, None):
            raise KeyFault(key, f"has percentiles of {name} but no median. {_AGAIN}")
        if (low is not None and low > middle) or (high is not None and high < middle):
            raise KeyFault(key, f"the {name} median is outside of its percentiles. {_AGAIN}")


class TimeCoefficients(Record):
    """Non-negative coefficients of a fit; None for terms that its times cannot distinguish."""

    launch_s: SecondsOrZero | None = None
    """Seconds independent of batch and length."""
    s_per_sample: SecondsOrZero | None = None
    s_per_token: SecondsOrZero | None = None
    """Seconds per token of every sample."""
    s_per_token_squared: SecondsOrZero | None = None
    """Seconds per square of the tokens of a sample, for every sample."""


class FitCell(Record):
    """Measured and fitted time of one cell of a fit."""

    batch: int
    seq_lengths: list[int]
    """Sequence length of the layer type; of all types for parts that are not layers."""
    measured_s: SecondsOrZero
    """Median of the samples for the whole batch; 0 for a difference that is not positive."""
    fitted_s: SecondsOrZero
    fitted_low_s: SecondsOrZero | None = None
    fitted_high_s: SecondsOrZero | None = None
    """Ends of the 90 % interval of the fit at this cell; None if the samples do not determine it.
    """
    relative: _Finite
    """Fitted over measured time, minus 1; a measured time counts as at least 0.1 % of the longest.
    """


class TimeFit(Record):
    """Fit of one time over its cells: launch_s + b*(s_per_sample + s_per_token*s + ...)."""

    layer_type: int | None = None
    """Index of the layer type; None for parts that are not layers, where s is the sum of all
    lengths."""
    time: Literal["forward", "backward", "recompute"]
    degree: int = 1
    kind: str = "sp"
    """Sharding, a `TensorKind`."""
    form: Form
    coefficients: TimeCoefficients
    low: TimeCoefficients | None = None
    high: TimeCoefficients | None = None
    """Ends of 90 % intervals by a bootstrap over the raw samples; None if a cell has only one
    sample."""
    cells: list[FitCell]
    worst_relative: _Finite
    """Relative error of the cell with the largest error, with its sign."""
    batches: list[int]
    """Smallest and largest measured batch."""
    tokens: list[int]
    """Smallest and largest measured sequence length, tokens."""
    usable_batch: int
    usable_tokens: int
    """Largest b and s for which the fit may be used; with one measured length only this length."""


# --------------------------------------------------------------------------------------------------
# Sidecar documents: runs are appended, never changed.


# History of the format; `read_sidecar` upgrades older versions.
#   1  first version
#   2  curves of strided groups and of transfers, spread and fit; measurements of a run; synthetic
#   3  times of parts that are not layers, spread of recomputation, fits; software stack
SIDECAR_VERSION = 3

DocumentKind = Literal["allreduce", "p2p", "overlap", "sp_time", "computation", "memory", "site"]

_UNITS: dict[str, tuple[str, ...]] = {
    "allreduce": ("GB/s", "MiB/ms"),
    "p2p": ("GB/s", "MiB/ms"),
    "overlap": ("1",),
    "sp_time": ("ms",),
    "computation": ("ms",),
    "memory": ("MiB",),
    "site": ("s",),  # its figures name their units; this is the unit of its samples
}
"""Allowed units of each document; the first is the documented one."""


def documented_unit(kind: DocumentKind) -> str:
    """Return the unit in which autopar writes the values of a profile file."""
    return _UNITS[kind][0]


# The lookahead matches only at the very end: $ would match before a final line break as well.
_NAME = r"^\S(.{0,98}\S)?(?![\s\S])"
_StackName = Annotated[str, Meta(pattern=_NAME, extra={"expected": "a text on one line"})]

_Sample = Annotated[
    float,
    quantity(
        what="a finite sample",
        unit="",
        minimum=-1e18,
        maximum=1e18,
        too_large="is too large for a sample",
    ),
]


class Run(Record):
    """One measuring run: its metadata, and raw samples by key of the document or by cell."""

    id: str | None = None
    """Identifier of the run in every sidecar that it wrote."""
    metadata: dict[str, str | int | _Finite | bool | None] = field(default_factory=dict)
    samples: dict[str, list[_Sample]] = field(default_factory=dict)
    """Raw samples in the unit of the document, by its key."""
    measurements: list[Measurement] = field(default_factory=list)
    """Raw samples in seconds, by cell of a sweep."""
    model_measurements: list[ModelMeasurement] = field(default_factory=list)
    """Raw figures of a model, by cell."""


@published("sidecar")
class Sidecar(Record):
    """Metadata and raw samples of one profile file."""

    version: int
    document: DocumentKind
    unit: str
    source: str
    """Source of the numbers in words: a tool, a datasheet, a publication."""
    estimated: bool = False
    """True if the numbers come from a datasheet and not from a measurement."""
    synthetic: bool = False
    """True if the numbers only exercise the code and describe no real machine, such as times of
    several ranks on one GPU."""
    tool: str = f"autopar {__version__}"
    name: str | None = None
    """Name of the hardware or model."""
    parameter_bytes: Literal[2, 4] | None = None
    """Bytes per parameter counted in `parameter_size` of a memory document; None if unknown."""
    memory_bytes: Bytes | None = None
    """Memory of one device."""
    memory_bytes_per_s: BytesPerSecond | None = None
    """Memory bandwidth of one device."""
    stack: _StackName | None = None
    """Software stack whose kernels and overheads the numbers describe (`autopar stacks`)."""
    hiding: OverlapFactors | None = None
    """Other overlap factors of that stack, for an estimated overlap coefficient."""
    domain_gpus: _Size | None = None
    """GPUs of a cluster joined by intra-node links, where these join whole racks."""
    logits_peak_bytes_per_sample: BytesOrZero | None = None
    """Extra memory per sample while the loss runs, not contained in the tables."""
    curves: list[CurveData] = field(default_factory=list)
    layer_times: list[ShardedTime] = field(default_factory=list)
    """Times of a computation file that were measured in addition to whole forwards."""
    other_times: list[OtherTime] = field(default_factory=list)
    """Times of embedding, head and loss of a computation file, backward separate from forward."""
    fits: list[TimeFit] = field(default_factory=list)
    """Formulas fitted to the times of a computation file, with residuals and intervals."""
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        units = _UNITS[self.document]
        if self.unit not in units:
            raise KeyFault(
                "unit", f"the value is {shorten(self.unit)}, expected {' or '.join(units)}"
            )
        for key in ("layer_times", "other_times"):
            for place, times in enumerate(getattr(self, key)):
                _check_spread(f"{key}[{place}]", times)

    @property
    def threads(self) -> int | None:
        """Threads of one operation on the measured CPU; None on a GPU, or if not recorded."""
        found = self.runs[-1].metadata.get("threads") if self.runs else None
        # Memory is counted: it does not depend on threads.
        return found if type(found) is int and self.document != "memory" else None


REPLACES = "replaces"
"""Metadata key of a run: true if its cells of a model replace all earlier ones."""


_LATER = (
    *("qk_norms", "shared_expert_width", "shared_expert_gate", "router_biases", "latent", "window"),
    *("whole_every", "attention_sinks", "wide_qk_norms", "num_norms"),
    *("clamped_activation", "expert_groups", "groups_per_token", "expert_latent"),
    *("parts", "mixers", "output_gate", "indexer"),
    *("cross_tokens", "fp32_norms", "elementwise", "extra_parameters"),
    *("keys_as_values", "value_norms", "keys_reused", "token_inputs"),
)
_LATER_OF_LAYERS = tuple(f for f in fields_of(LayerSpec) if f.name in _LATER)
"""Fields of later releases, omitted from a digest if they have their default value."""


_LATER_OF_MODELS = (
    *("mtp_layers", "interleaved", "order", "mtp_order", "no_positions", "layer_classes"),
    "capped_logits",
)


def describe_model(spec: ModelSpec) -> str:
    """Return name and digest of a model for a measuring run, such as `llama2-7b (1a2b3c4d)`.

    The digest does not depend on numbers of layers, sequence lengths and rotary positions.
    """
    fields = to_builtins(spec)
    # Neither the name nor rotary positions change the measurement.
    for key in ("name", *(name for name in fields if name.startswith(("rotary_", "yarn_")))):
        fields.pop(key)
    for key in _LATER_OF_MODELS:
        # Files older than these fields do not contain them.
        if not fields[key]:
            fields.pop(key)
    for layer in fields["layers"]:
        layer.pop("num_layers")
        # Cells have their own lengths, and depth changes no layer.
        layer.pop("seq_length")
        # Files older than these fields do not contain them.
        for later in _LATER_OF_LAYERS:
            if layer[later.name] == to_builtins(later.default):
                layer.pop(later.name)
    text = json.dumps(fields, sort_keys=True)
    return f"{spec.name} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


_Cell = TypeVar("_Cell", Measurement, ModelMeasurement)


def newest(cells: Iterable[_Cell]) -> dict[str, _Cell]:
    """Return the newest successful measurement for every key, or the newest if all failed.

    cells : measurements in the order of their runs.
    """
    found: dict[str, _Cell] = {}
    for cell in cells:
        earlier = found.get(cell.key)
        if cell.status == "ok" or earlier is None or earlier.status != "ok":
            found[cell.key] = cell
    return found


def counting_runs(runs: Sequence[Run]) -> Sequence[Run]:
    """Return the valid runs: those from the last one that replaces all earlier runs."""
    replacing = [number for number, run in enumerate(runs) if run.metadata.get(REPLACES)]
    return runs[replacing[-1] if replacing else 0 :]


def newest_cells(runs: Sequence[Run]) -> dict[str, ModelMeasurement]:
    """Return the valid measurements of a model by key."""
    return newest(m for run in counting_runs(runs) for m in run.model_measurements)


def sidecar_path(document: Path | str) -> Path:
    """Return the path of the sidecar of a documented file."""
    document = Path(document)
    return document.with_name(document.name + ".meta.json")


def read_sidecar(document: Path | str, kind: DocumentKind | None = None) -> Sidecar | None:
    """Return the sidecar of a documented file, None if it has none.

    Raises DocumentError: the sidecar is invalid, of a newer version, or not of the given `kind`.
    """
    found = _read_sidecar(document, kind)
    return None if found is None else found[0]


def _read_sidecar(
    document: Path | str, kind: DocumentKind | None
) -> tuple[Sidecar, JsonDocument] | None:
    """Return a sidecar and its file, None if there is none."""
    path = sidecar_path(document)
    if not path.exists():
        return None
    file = load_object(path)
    data = file.data
    version = data.get("version")
    # type() and not isinstance: true is an int in Python; other kinds are rejected below.
    if type(version) is int and not 1 <= version <= SIDECAR_VERSION:
        raise DocumentError(
            path,
            f"the value is {shorten(version)}, expected 1 to {SIDECAR_VERSION}",
            key="version",
            remedy="Update autopar, or measure the file again",
        )
    if type(version) is int:
        data = {**data, "version": SIDECAR_VERSION}  # later versions only added keys
    sidecar = read_record(Sidecar, path, data)
    if kind is not None and sidecar.document != kind:
        raise DocumentError(
            path, f"the value is {sidecar.document!r}, expected {kind!r}", key="document"
        )
    return sidecar, file


_Document = TypeVar("_Document")


class LoadedFile(Record, Generic[_Document]):
    """Validated profile file with its sidecar and the sources of both."""

    path: Path
    document: _Document
    sidecar: Sidecar | None
    sources: tuple[Source, ...]
    """Sources of the file, of its sidecar if there is one, and of the software stack if the sidecar
    names it."""


def load_with_sidecar(
    kind: DocumentKind,
    path: Path,
    model: type[_Document],
    *,
    remedy: str,
    read: tuple[JsonDocument, _Document] | None = None,
) -> LoadedFile[_Document]:
    """Return a documented file and its sidecar.

    model : record class of the document.
    remedy : command that creates the file, for the error of a missing file.
    read : parsed file and its document, if already read.

    Raises DocumentError for a missing or invalid file or sidecar.
    """
    if read is None:
        file = load_object(path, remedy=remedy)
        read = file, read_record(model, path, file.data)
    file, document = read
    found = _read_sidecar(path, kind)
    sources: tuple[Source, ...]
    source = Source(role=kind, path=str(path), sha256=file.sha256)
    if found is None:
        return LoadedFile(path=path, document=document, sidecar=None, sources=(source,))
    sidecar, meta = found
    # Flags of a sidecar also apply to its document.
    source = replace(source, estimated=sidecar.estimated, synthetic=sidecar.synthetic)
    own = replace(
        source,
        role=f"{kind} sidecar",
        path=str(meta.path),
        sha256=meta.sha256,
        notes=(sidecar.source,),
    )
    sources = (source, own)
    if sidecar.stack is not None:
        # All files that name a stack have an equal source, so that it is listed once.
        named = Source(role=STACK_ROLE, path=sidecar.stack, notes=(NAMED_BY_FILES,))
        sources = (*sources, replace(named, estimated=sidecar.estimated))
    return LoadedFile(path=path, document=document, sidecar=sidecar, sources=sources)


def write_sidecar(document: Path | str, sidecar: Sidecar) -> Path:
    """Write the sidecar of a profile file atomically, and return its path.

    Runs of an existing sidecar are kept. Raises DocumentError if that sidecar is invalid.
    """
    path = sidecar_path(document)
    old = read_sidecar(document)
    if old is not None:
        # A document that was read and is written again contains its old runs already.
        new = [run for run in sidecar.runs if run not in old.runs]
        sidecar = replace(sidecar, runs=[*old.runs, *new])
    write_json(path, written(sidecar))
    return path
