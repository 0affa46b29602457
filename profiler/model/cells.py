"""What `profile-model` measures: a plan of cells, each one part of the model at one size.

The plan is pure arithmetic on a spec and the options; what a cell is and what it is called decides
which of several runs measured it, so a key never changes its meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from autopar.documents.sidecar import ModelMeasurement, Part, TensorKind
from autopar.errors import InputError, OptionError
from autopar.records import Record, replace
from autopar.run.model import ModelSpec
from autopar.units import format_count
from profiler.model.layers.sharding import Checkpoint, Sharding
from profiler.model.options import ModelOptions

# --------------------------------------------------------------------------------------------------
# At which sequence lengths and tensor degrees a model is profiled, and how they are written.


DEFAULT_DEGREES = (1, 2, 4, 8)
"""Tensor degrees of the documented tables."""
_KINDS: dict[str, tuple[TensorKind, TensorKind]] = {
    "megatron": ("sp", "tp"),
    "dtensor": ("dtensor_sp", "dtensor"),
}
_LENGTHS = 5
_SHORTEST = 64


def seqs_text(seqs: tuple[int, ...]) -> str:
    """Return sequence lengths as the documented keys have them: `2048` or `[512,512]`."""
    return str(seqs[0]) if len(seqs) == 1 else f"[{','.join(map(str, seqs))}]"


def with_seq_lengths(spec: ModelSpec, seqs: tuple[int, ...]) -> ModelSpec:
    """Return the spec at other sequence lengths, one per layer type."""
    layers = (replace(layer, seq_length=seq) for layer, seq in zip(spec.layers, seqs, strict=True))
    return replace(spec, layers=tuple(layers))


def tensor_kinds(
    options: ModelOptions, *, own_module: bool = False
) -> tuple[TensorKind, TensorKind]:
    """Return what the tables with and without sequence parallelism hold.

    A module's own plan decides whether it divides the sequence: both tables hold what it does.
    """
    return ("dtensor", "dtensor") if own_module else _KINDS[options.tp_impl]


def tensor_degrees(spec: ModelSpec, options: ModelOptions) -> tuple[int, ...]:
    """Return the tensor degrees to profile; the default leaves out those the model does not allow.

    Raises
    ------
    InputError: an asked-for degree does not divide heads, widths or a sequence length.
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
            # a default that does not fit is left out, what was asked for is refused
            if options.degrees is not None or degree == 1:
                raise
        else:
            found.append(degree)
    return tuple(found)


def length_cases(spec: ModelSpec, options: ModelOptions) -> tuple[tuple[int, ...], ...]:
    """Return the sequence lengths of all layer types, case by case.

    Raises
    ------
    InputError: a case names another number of types, or is beyond a learned position table.
    """
    own = tuple(layer.seq_length for layer in spec.layers)
    types = len(own)
    if options.seq_lengths is None:
        cases = _default_cases(own) if options.mode == "sequence" else (own,)
    else:
        # one length stands for all layer types
        cases = tuple(case * types if len(case) == 1 else case for case in options.seq_lengths)
    for case in cases:
        if len(case) != types:
            raise OptionError(
                f"--seq: {seqs_text(case)} has {format_count(len(case), 'length')} and model "
                f"{spec.name!r} has {types} layer type(s); give one length, or one per type"
            )
        if spec.learned_positions and max(case) > spec.learned_positions:
            raise InputError(
                f"--seq: {max(case)} tokens are more than the {spec.learned_positions} rows of "
                f"the position table of model {spec.name!r}; choose shorter sequences"
            )
    if options.mode == "sequence" and len(cases) < 2:
        raise OptionError(
            f"--mode sequence measures several sequence lengths and model {spec.name!r} is too "
            "short for a default range; write --seq 64:512:x2"
        )
    return cases


def _default_cases(own: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return five lengths, each half of the next, that end at the model's own."""
    halves = (tuple(seq >> k for seq in own) for k in reversed(range(_LENGTHS)))
    return tuple(case for case in halves if case == own or min(case) >= _SHORTEST)


# --------------------------------------------------------------------------------------------------
# The plan of cells: what is measured for which file.


_PARTS: tuple[Part, ...] = ("only", "first", "last")
_VOCAB_BATCH = 8
"""Batch at which the surroundings of layers are counted, as the documented tables are: their peak
has a part that no sample adds to, the second gradient of a tied table."""


class ModelCell(Record):
    """One part of a model at one size, sharded one way: a unit of measuring and of resuming."""

    quantity: Literal["time", "memory"]
    part: Part
    layer_type: int | None = None
    batch: int
    seq_lengths: tuple[int, ...]
    """Of the layer's type; of all types for what is not a layer."""
    degree: int = 1
    kind: TensorKind = "sp"
    checkpoint: Checkpoint = "none"
    num_layers: tuple[int, ...] | None = None
    """Layers of each type of a whole forward; None for one part."""
    encoder_seq_length: int | None = None
    """Tokens that cross-attention reads; no part of the name, as documented keys do not say it."""

    @property
    def key(self) -> str:
        """Unique name, in the words of the documented keys."""
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
        """How the part is laid out."""
        return Sharding(degree=self.degree, kind=self.kind, checkpoint=self.checkpoint)

    def filled(
        self,
        *,
        status: Literal["ok", "failed", "skipped"] = "ok",
        reason: str | None = None,
        source: Literal["device", "exact"] | None = None,
    ) -> ModelMeasurement:
        """Return a measurement that names this cell, without figures."""
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
    """Return the numbers of layers of the whole forwards: the fewest, then more of each type.

    A factory makes as many layers of every type, so that with several types one is no difference.
    """
    types = len(spec.layers)
    base = (options.layernum_min,) * types
    # all types would grow together: their difference is no type's own
    if own_module and types > 1:
        return (base,)
    more = ((*base[:kind], options.layernum_max, *base[kind + 1 :]) for kind in range(types))
    return (base, *more)


def plan_cells(
    spec: ModelSpec, options: ModelOptions, *, own_degrees: tuple[int, ...] | None = None
) -> tuple[ModelCell, ...]:
    """Return the cells that the options ask for, what the documented keys need first.

    own_degrees : of a module of somebody's own, the tensor degrees that it can be divided into;
    None for a spec.

    Raises
    ------
    InputError: the model cannot be laid out or is too short for a length.
    """
    own_module = own_degrees is not None
    if own_degrees is None:
        degrees = tensor_degrees(spec, options)
    else:
        degrees = tuple(t for t in options.degrees or DEFAULT_DEGREES if t in own_degrees)
    cases = length_cases(spec, options)
    if own_module and any(len(set(case)) > 1 for case in cases):
        raise OptionError(
            f"--seq: model {spec.name!r} is a module of your own, whose layer types are called "
            "with one length; give one"
        )
    found: dict[str, ModelCell] = {}
    for cell in (
        *_memory_cells(spec, options, cases, degrees, own_module),
        *_time_cells(spec, options, cases, degrees, own_module),
    ):
        # the order of the plan stays, and a cell is measured once
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
            # kept bytes grow with the batch exactly: one sample tells them
            whole = _layer_cell(spec, "memory", layer_type, 1, case)
            for degree in degrees:
                own: TensorKind = (
                    sequence if degree > 1 else "sp"
                )  # one rank divides nothing, by any name
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
        if batch not in ends:  # a shard's time is a line over the batch: its ends say it
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
        # the encoder is the first layer type
        encoder_seq_length=case[0] if crosses else None,
    )


def _whole_cell(batch: int, case: tuple[int, ...], num_layers: tuple[int, ...] | None) -> ModelCell:
    return ModelCell(
        quantity="time", part="only", batch=batch, seq_lengths=case, num_layers=num_layers
    )
