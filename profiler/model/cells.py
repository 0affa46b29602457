"""Cells that `profile-model` measures; each is one part of the model at one size.

The list of cells depends only on the model spec and the options. A cell is identified by its key
across runs, so the meaning of a key must never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from autopar.documents.sidecar import ModelMeasurement, Part, TensorKind
from autopar.documents.times import seqs_text
from autopar.errors import InputError, OptionError
from autopar.records import Record, replace
from autopar.run.model import ModelSpec
from autopar.units import format_count
from profiler.model.layers.sharding import Checkpoint, Sharding
from profiler.model.options import ModelOptions

# --------------------------------------------------------------------------------------------------
# Sequence lengths and tensor-parallel degrees of a profile, and their text form.


DEFAULT_DEGREES = (1, 2, 4, 8)
"""Default tensor-parallel degrees, those of Galvatron's memory tables."""
_KINDS: dict[str, tuple[TensorKind, TensorKind]] = {
    "megatron": ("sp", "tp"),
    "dtensor": ("dtensor_sp", "dtensor"),
}
_LENGTHS = 5
_SHORTEST = 64


def with_seq_lengths(spec: ModelSpec, seqs: tuple[int, ...]) -> ModelSpec:
    """Return a copy of the spec with these sequence lengths, one per layer type."""
    layers = (replace(layer, seq_length=seq) for layer, seq in zip(spec.layers, seqs, strict=True))
    return replace(spec, layers=tuple(layers))


def tensor_kinds(
    options: ModelOptions, *, own_module: bool = False
) -> tuple[TensorKind, TensorKind]:
    """Return the sharding kinds of the tables with and without sequence parallelism.

    own_module : True for a custom module. Its parallelize plan determines whether the sequence is
    sharded, so both tables contain that one kind.
    """
    return ("dtensor", "dtensor") if own_module else _KINDS[options.tp_impl]


def tensor_degrees(spec: ModelSpec, options: ModelOptions) -> tuple[int, ...]:
    """Return the tensor-parallel degrees to profile; illegal default degrees are dropped.


    Raises InputError: a requested degree does not divide heads, widths or a sequence length.
    """
    cases = length_cases(spec, options)
    found = []
    for degree in options.degrees or DEFAULT_DEGREES:
        sharding = Sharding(degree=degree, kind=tensor_kinds(options)[0])
        try:
            for case in cases:
                for layer in with_seq_lengths(spec, case).layers:
                    sharding.check(layer)
        except InputError:
            # an illegal default is dropped, an illegal request is an error
            if options.degrees is not None or degree == 1:
                raise
        else:
            found.append(degree)
    return tuple(found)


def length_cases(spec: ModelSpec, options: ModelOptions) -> tuple[tuple[int, ...], ...]:
    """Return the sequence lengths to measure: one tuple per case, one length per layer type.


    Raises OptionError: a case has the wrong number of lengths, or sequence mode has fewer than two
    cases. Raises InputError: a length exceeds the table of learned positions.
    """
    own = tuple(layer.seq_length for layer in spec.layers)
    types = len(own)
    if options.seq_lengths is None:
        cases = _default_cases(own) if options.mode == "sequence" else (own,)
    else:
        # a single length applies to all layer types
        cases = tuple(case * types if len(case) == 1 else case for case in options.seq_lengths)
    for case in cases:
        if len(case) != types:
            raise OptionError(
                f"--seq: {seqs_text(case)} has "
                f"{format_count(len(case), 'length')}, but model {spec.name!r} "
                f"has {types} layer type(s)",
                remedy="Give one length, or one per type",
            )
        if spec.learned_positions and max(case) > spec.learned_positions:
            raise InputError(
                f"--seq: {max(case)} tokens are more than the "
                f"{spec.learned_positions} rows of the position table of model "
                f"{spec.name!r}",
                remedy="Use shorter sequences",
            )
    if options.mode == "sequence" and len(cases) < 2:
        raise OptionError(
            "--mode sequence needs several sequence lengths, and model "
            f"{spec.name!r} is too short for a default range",
            remedy="Add --seq 64:512:x2",
        )
    return cases


def _default_cases(own: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return up to five cases, each with half the lengths of the next; the last is `own`."""
    halves = (tuple(seq >> k for seq in own) for k in reversed(range(_LENGTHS)))
    return tuple(case for case in halves if case == own or min(case) >= _SHORTEST)


# --------------------------------------------------------------------------------------------------
# The list of cells for each file.


_PARTS: tuple[Part, ...] = ("only", "first", "last")
_VOCAB_BATCH = 8
"""Batch size at which embedding and head are counted, as in Galvatron. It matters because one part
of their peak does not grow with the batch: the second gradient of a tied embedding table."""


class ModelCell(Record):
    """One part of a model at one size with one sharding: the unit of measuring and resuming."""

    quantity: Literal["time", "memory"]
    part: Part
    layer_type: int | None = None
    batch: int
    seq_lengths: tuple[int, ...]
    """Sequence length of the layer type; for other parts, one length per layer type."""
    degree: int = 1
    kind: TensorKind = "sp"
    checkpoint: Checkpoint = "none"
    num_layers: tuple[int, ...] | None = None
    """Number of layers of each type in a whole forward pass; None for a single part."""
    encoder_seq_length: int | None = None
    """Encoder tokens that cross-attention reads; None without cross-attention. Not part of the
    key, since Galvatron's keys do not contain it."""

    @property
    def key(self) -> str:
        """Unique name, similar to Galvatron's keys: `time_layertype_0_bsz8_seq2048_tp2_sp`."""
        if self.num_layers is not None:
            what = f"layernum[{','.join(map(str, self.num_layers))}]"
        elif self.part == "layer":
            what = f"layertype_{self.layer_type}"
        else:
            what = "other" if self.quantity == "time" else f"other_{self.part}"
        text = f"{self.quantity}_{what}_bsz{self.batch}_seq{seqs_text(self.seq_lengths)}"
        if self.degree > 1:
            text += f"_tp{self.degree}_{self.kind}"
        return text if self.checkpoint == "none" else f"{text}_{self.checkpoint}"

    @property
    def sharding(self) -> Sharding:
        """Sharding and recomputation of the part."""
        return Sharding(degree=self.degree, kind=self.kind, checkpoint=self.checkpoint)

    def filled(
        self,
        *,
        status: Literal["ok", "failed", "skipped"] = "ok",
        reason: str | None = None,
        source: Literal["device", "exact"] | None = None,
    ) -> ModelMeasurement:
        """Return a measurement of this cell without results.

        reason : cause of a status other than `ok`.
        source : None means the usual source of the quantity, `device` for times and `exact` for
            memory.
        """
        return ModelMeasurement(
            key=self.key,
            quantity=self.quantity,
            part=self.part,
            layer_type=self.layer_type,
            batch=self.batch,
            seq_lengths=list(self.seq_lengths),
            degree=self.degree,
            kind=self.kind,
            checkpoint=self.checkpoint,
            num_layers=None if self.num_layers is None else list(self.num_layers),
            source=source or ("device" if self.quantity == "time" else "exact"),
            status=status,
            reason=reason,
        )


def stack_counts(
    spec: ModelSpec, options: ModelOptions, *, own_module: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Return the layer counts, per layer type, of the forward passes to measure.

    The first pass has `layernum_min` layers of every type. Each further pass has `layernum_max`
    layers of one type, so that its difference to the first is the time of that type. A custom
    module has equal counts for all types, so with several types only the first pass is returned.
    """
    types = len(spec.layers)
    base = (options.layernum_min,) * types
    # the counts of all types change together, so a difference has no single type
    if own_module and types > 1:
        return (base,)
    more = ((*base[:kind], options.layernum_max, *base[kind + 1 :]) for kind in range(types))
    return (base, *more)


def plan_cells(
    spec: ModelSpec, options: ModelOptions, *, own_degrees: tuple[int, ...] | None = None
) -> tuple[ModelCell, ...]:
    """Return the cells that the options request, in measuring order: memory, then times.

    own_degrees : tensor-parallel degrees that a custom module supports; None for a spec.

    Raises InputError: the model cannot be sharded, or a sequence exceeds its position table. Raises
    OptionError: the number of sequence lengths does not fit the layer types or the mode, or a
    custom module has layer types with different lengths.
    """
    own_module = own_degrees is not None
    if own_degrees is None:
        degrees = tensor_degrees(spec, options)
    else:
        degrees = tuple(t for t in options.degrees or DEFAULT_DEGREES if t in own_degrees)
    cases = length_cases(spec, options)
    if own_module and any(len(set(case)) > 1 for case in cases):
        raise OptionError(
            f"--seq: model {spec.name!r} is a custom module, whose layer types have one length",
            remedy="Give one length",
        )
    found: dict[str, ModelCell] = {}
    for cell in (
        *_memory_cells(spec, options, cases, degrees, own_module),
        *_time_cells(spec, options, cases, degrees, own_module),
    ):
        # a cell is measured once, at its first position in the list
        found.setdefault(cell.key, cell)
    return tuple(found.values())


def _memory_cells(
    spec: ModelSpec,
    options: ModelOptions,
    cases: tuple[tuple[int, ...], ...],
    degrees: tuple[int, ...],
    own_module: bool,
) -> Iterator[ModelCell]:
    if "memory" not in options.profile_types:
        return
    sequence, plain = tensor_kinds(options, own_module=own_module)
    checkpoints: tuple[Checkpoint, ...] = ("none", "full", "selective")
    if own_module:
        checkpoints = ("none", "full")
    elif options.unit != "all":
        checkpoints = ("none",)
    for case in cases:
        for layer_type in range(len(case)):
            # saved activations are exactly proportional to the batch: one sample is enough
            whole = _layer_cell(spec, "memory", layer_type, 1, case)
            for degree in degrees:
                own: TensorKind = (
                    sequence if degree > 1 else "sp"
                )  # a single rank shards nothing, whatever the kind
                for checkpoint in checkpoints:
                    yield replace(whole, degree=degree, checkpoint=checkpoint, kind=own)
                if degree > 1 and not own_module:
                    yield replace(whole, degree=degree, kind=plain)
                    if options.tp_impl == "megatron":
                        yield replace(whole, degree=degree, kind="ulysses")
        for part in _PARTS if options.unit == "all" else ():
            for degree in (1,) if own_module else degrees:
                kinds: tuple[TensorKind, ...] = (sequence, plain) if degree > 1 else ("sp",)
                for kind in kinds:
                    yield ModelCell(
                        quantity="memory",
                        part=part,
                        batch=_VOCAB_BATCH,
                        seq_lengths=case,
                        degree=degree,
                        kind=kind,
                    )


def _time_cells(
    spec: ModelSpec,
    options: ModelOptions,
    cases: tuple[tuple[int, ...], ...],
    degrees: tuple[int, ...],
    own_module: bool,
) -> Iterator[ModelCell]:
    if "computation" not in options.profile_types:
        return
    sizes = [(batch, case) for case in cases for batch in options.batches]
    for batch, case in sizes:
        for layer_type in range(len(case)):
            yield _layer_cell(spec, "time", layer_type, batch, case)
        if options.unit == "all" and not own_module:
            yield _whole_cell(batch, case, None)
    for batch, case in sizes if options.unit == "all" else ():
        for counts in stack_counts(spec, options, own_module=own_module):
            yield _whole_cell(batch, case, counts)
    ends = {min(options.batches), max(options.batches)}
    for batch, case in sizes:
        if batch not in ends:  # the time of a shard is linear in the batch: two points are enough
            continue
        for layer_type in range(len(case)):
            cell = _layer_cell(spec, "time", layer_type, batch, case)
            for degree in degrees:
                if degree > 1:
                    kind = tensor_kinds(options, own_module=own_module)[0]
                    yield replace(cell, degree=degree, kind=kind)


def _layer_cell(
    spec: ModelSpec,
    quantity: Literal["time", "memory"],
    layer_type: int,
    batch: int,
    case: tuple[int, ...],
) -> ModelCell:
    crosses = spec.layers[layer_type].cross_attention
    return ModelCell(
        quantity=quantity,
        part="layer",
        layer_type=layer_type,
        batch=batch,
        seq_lengths=(case[layer_type],),
        # the first layer type is the encoder
        encoder_seq_length=case[0] if crosses else None,
    )


def _whole_cell(batch: int, case: tuple[int, ...], num_layers: tuple[int, ...] | None) -> ModelCell:
    return ModelCell(
        quantity="time", part="only", batch=batch, seq_lengths=case, num_layers=num_layers
    )
