"""Sentences on the assumptions of a cost model: defaults, derived and excluded values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.arrays import Bool
from autopar.rates.measured import HardwareProfile, falling_times, partial_spread
from autopar.records import Record
from autopar.run.model import LayerMemory, LayerSpec, ModelProfile, ModelSpec
from autopar.run.plan import LayerStrategy
from autopar.units import format_count
from search.planning.cost.communication import half_allreduces
from search.planning.cost.fits import OTHER, PASSES, ComputeFits, OtherFits, shard_name
from search.planning.cost.memory import reserve_of
from search.planning.cost.time import OptimizerCurve
from search.request.options import SearchOptions

if TYPE_CHECKING:
    from autopar.documents.calibration import Calibration


class LayerModel(Record, eq=False):
    """Fitted times and memory of one layer type."""

    spec: LayerSpec
    fits: ComputeFits
    memory: LayerMemory
    attention_sample_s: float
    """Attention seconds of one sample's unsharded forward; 0 if unknown."""


class Assumptions:
    """Assumptions of a cost model: two ordered lists of unique sentences, defaults and notes."""

    def __init__(self) -> None:
        self._defaults: dict[str, None] = {}
        self._notes: dict[str, None] = {}
        self._in_ring = True

    def copy(self) -> Assumptions:
        """Return an independent copy."""
        other = Assumptions()
        other._defaults, other._notes = dict(self._defaults), dict(self._notes)
        other._in_ring = self._in_ring
        return other

    @property
    def defaults(self) -> list[str]:
        """Sentences on times, memory and settings that are measured or assumed, in order."""
        return list(self._defaults)

    @property
    def notes(self) -> list[str]:
        """Sentences on derived, extrapolated, scaled, ignored or estimated values, in order."""
        return list(self._notes)

    def note(self, text: str) -> None:
        """Add a note unless it is already recorded."""
        self._notes[text] = None

    def note_batch(self, name: str, largest_batch: int) -> None:
        """Note that something is priced beyond twice its largest measured batch."""
        self.note(
            f"extrapolated: {name} to more than twice the largest measured batch "
            f"({largest_batch}), linearly"
        )

    def record(
        self,
        spec: ModelSpec,
        model: ModelProfile,
        hardware: HardwareProfile,
        options: SearchOptions,
        fits: Sequence[ComputeFits],
        other: OtherFits,
        optimizer: OptimizerCurve | None,
    ) -> None:
        """Record the assumptions that apply to all rows.

        fits, other : fits of each layer type, and of embedding, head and loss.
        optimizer : optimizer times; None if not measured.
        """
        self._in_ring = options.cp_kind == "ring"
        if model.estimated and any(fit.measured for fit in fits):
            self._default("forward, backward and every sharded layer are estimated from kernels")
        else:
            for text in _backward_defaults(fits, other):
                self._default(text)
        self._default(reserve_of(options, spec).sentence)
        known = hardware.hiding if model.estimated else None
        if known is not None and options.pipeline_type == "gpipe":
            self._default("GPipe is priced without overlapped communication")
            known = None
        if known is not None:
            hidden = 100.0 * known.tensor if options.tp_overlap else 0.0
            self._default(
                f"{hidden:.0f} % of tensor-parallel communication is overlapped, "
                "as in the engine's software"
            )
        elif options.tp_overlap:
            self._default(
                f"column-parallel linears are {options.column_parallel_share:g} of the backward"
            )
        for text in half_allreduces(hardware):
            self._default(text)
        found = (falling_times(hardware), partial_spread(hardware))
        for note in (*hardware.notes, *model.notes, *found):
            if note is not None:
                self.note(note)
        if optimizer is not None:
            how = "estimated" if model.estimated else "measured"
            self._default(
                f"optimizer step is {how} on layers; it follows the parameters of a ZeRO shard, "
                "of embedding and head too"
            )
        if hardware.memory_bytes_per_s is None and optimizer is None:
            self._default("memory bandwidth is unknown: optimizer step and look-up cost 0")
        elif hardware.memory_bytes_per_s is None:
            self._default("memory bandwidth is unknown: look-up costs 0")
        if any(layer.num_experts is not None for layer in spec.layers):
            self._default("expert degree 1: experts are divided only by tp, pp and ZeRO")
        if spec.mtp_layers:
            self._default(
                f"the model's {format_count(spec.mtp_layers, 'MTP layer')} are "
                "ignored, in time and in memory"
            )
        if spec.tied_embeddings and spec.vocab_size is None:
            self._default("vocabulary is unknown: tied weights are counted on the first stage")
        given = any(s.role == "memory" and not s.estimated for s in model.sources)
        for documents, name in (
            (hardware, f"hardware {hardware.name}"),
            (model, f"{'times' if given else 'profile'} of {spec.name}"),
        ):
            if documents.estimated:
                self.note(f"estimated: {name}")
            if documents.synthetic:
                self.note(f"synthetic: {name}")

    def record_calibration(self, calibration: Calibration, doubts: Sequence[str]) -> None:
        """Record factors and fixed seconds of a calibration, and reasons why it may not apply."""
        self._default(calibration.sentence)
        for doubt in doubts:
            self.note(doubt)

    def record_layer(
        self,
        kind: int,
        layer: LayerModel,
        strategies: Sequence[LayerStrategy],
        measured: Bool,
        derived: tuple[str, ...],
        *,
        estimated: bool,
    ) -> None:
        """Record the assumptions of the strategies of one layer type.

        measured : (S,) True if memory was measured for a strategy.
        derived : sentences on degrees whose activations are derived from another degree.
        estimated : True for estimated times, which record nothing about sharded times.
        """
        spec, name = layer.spec, f"layer type {kind}"
        degrees = {s.tp for s in strategies if s.tp > 1}
        if degrees and spec.num_heads is None:
            self._default(f"{name}: number of heads is unknown, divisibility is not checked")
        if any(not s.ulysses and s.tp > 1 for s in strategies) and spec.ffn_hidden_size is None:
            self._default(f"{name}: MLP width is unknown, divisibility is not checked")
        if any(s.cp > 1 for s in strategies):
            how = "in a ring concurrent with it" if self._in_ring else "in all-gathers before it"
            self._default(
                f"context ranks have even shares of causal attention and exchange keys and values "
                f"{how}"
            )
            if layer.fits.whole.attention_s is None and layer.attention_sample_s > 0.0:
                self._default(f"{name}: attention's share of the forward is taken from its FLOP")
            elif layer.fits.whole.attention_s is None:
                self._default(f"{name}: attention time is unknown, exchanged keys are not hidden")
        if not estimated:
            self._record_shards(name, layer.fits, strategies)
        for text in derived:
            self._default(f"{name}: {text}")
        for missing in sorted({s.tp for s, ok in zip(strategies, measured, strict=True) if not ok}):
            self.note(
                f"not searched: strategies of {name} at degree {missing} whose "
                "activation or checkpoint entry was not measured"
            )

    def _record_shards(
        self, name: str, fits: ComputeFits, strategies: Sequence[LayerStrategy]
    ) -> None:
        """Record which sharded times are measured and which follow from a smaller degree."""
        degrees = sorted({(s.ulysses, s.tp) for s in strategies if s.tp > 1})
        for what in PASSES:
            if not any(w == what and d > 1 for w, _, d in fits.measured):
                continue
            for ulysses, degree in degrees:
                found = fits.base(what, ulysses, degree)
                if found is None:
                    continue
                wanted = shard_name(what, ulysses, degree)
                if found[0] == degree:
                    self._default(f"{name}: {wanted} is measured")
                else:
                    less = degree // found[0]
                    whole = f"{what} of a whole layer"
                    source = whole if found[0] == 1 else shard_name(what, ulysses, found[0])
                    self._default(f"{name}: {wanted} is {source} over {less}, without launch cost")

    def _default(self, text: str) -> None:
        self._defaults[text] = None


def _backward_defaults(fits: Sequence[ComputeFits], other: OtherFits) -> list[str]:
    """Return sentences on layer types with and without measured backward and recomputation."""
    layers = {f"layer type {k}": f.measured for k, f in enumerate(fits)}
    known = {name: ("backward", False, 1) in found for name, found in layers.items()}
    known[OTHER] = other.backward is not None
    measured = [name for name, has in known.items() if has]
    assumed = [name for name, has in known.items() if not has]
    again = [name for name, found in layers.items() if ("recompute", False, 1) in found]
    lines = []
    if measured:
        if assumed:
            lines.append(f"backward of {', '.join(assumed)} is 2 x forward (not measured)")
        lines.append(f"backward of {', '.join(measured)} is measured")
    elif any(what == "backward" for f in fits for what, _, _ in f.measured):
        lines.append(f"backward of whole layers, {OTHER} is 2 x forward (not measured)")
    else:
        lines.append("backward is 2 x forward (not measured)")
    if again:
        lines.append(f"recomputation of {', '.join(again)} is measured")
    return lines
