"""CostModel: from typed documents to PlanTables; fits once, then prices many rows at a time.

The formulas live in `search.cost`; here they are brought together, summed into the arrays that
the planner reads, and everything that was assumed is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from autopar.arrays import F64, I64, Bool
from autopar.errors import InputError
from autopar.hardware import HardwareProfile, Speed, falling_times, partial_spread
from autopar.model import LayerMemory, LayerSpec, ModelProfile, ModelSpec
from autopar.plans import LayerStrategy, PipelineType, VocabStrategy, layer_problems
from autopar.units import GIB
from search.cost.calibrated import (
    calibrated,
    calibrated_bytes,
    calibrated_layer,
    calibrated_vocab,
    calibration_doubts,
)
from search.cost.communication import Groups, half_allreduces
from search.cost.fits import (
    NUM_REPLICAS,
    OTHER,
    PASSES,
    ComputeFit,
    ComputeFits,
    DrawnFits,
    DrawnOtherFits,
    Draws,
    LayerDraws,
    OtherDraws,
    OtherFits,
    attention_share,
    fit_computation,
    fit_other,
    layer_memory,
    other_memory,
    repeated,
    shard_name,
)
from search.cost.memory import (
    ActivationBytes,
    activation_bytes,
    gathered_bytes,
    layer_shared_bytes,
    prefetched_bytes,
    stage_fixed_bytes,
    state_bytes,
    to_bytes,
    zero_transient_bytes,
)
from search.cost.tables import (
    POSITIONS,
    LayerRows,
    PlanTables,
    Pricing,
    Recipe,
    Rows,
    build_rows,
    sum_of,
    table_arrays,
)
from search.cost.time import (
    LayerTime,
    OptimizerCurve,
    fit_optimizer,
    layer_time,
    layout_of,
    redistribution_s,
    send_s,
)
from search.cost.vocabulary import VocabModel, VocabRows, vocab_rows
from search.options import SearchOptions
from search.space import Table

if TYPE_CHECKING:
    from autopar.documents.calibration import Calibration

__all__ = [
    "Assumptions",
    "CostModel",
    "LayerModel",
]


# --------------------------------------------------------------------------------------------------
# What a cost model assumed, in words: the defaults it used, and what it derived or left out.


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerModel:
    """What was fitted of one layer type."""

    spec: LayerSpec
    fits: ComputeFits
    memory: LayerMemory
    attention_sample_s: float
    """Attention part of one sample's unsharded forward; 0 when unknown."""


class Assumptions:
    """Two ordered sets of sentences, without repetitions."""

    def __init__(self) -> None:
        self._defaults: dict[str, None] = {}
        self._notes: dict[str, None] = {}

    @property
    def defaults(self) -> list[str]:
        """What stands in for a measurement, or replaced such a stand-in, in order."""
        return list(self._defaults)

    @property
    def notes(self) -> list[str]:
        """Derived, extrapolated, scaled, left out or estimated values, in order."""
        return list(self._notes)

    def note(self, text: str) -> None:
        """Take a note in, once."""
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
        """Record what holds for every row; `fits` are those of the layer types."""
        for text in _backward_defaults(fits, other):
            self._default(text)
        self._default(
            f"reserved memory is allocated * {1.0 + options.reserve_fraction:g} "
            f"+ {options.context_bytes / GIB:g} GiB"
        )
        if options.tp_overlap:
            self._default(
                f"column-parallel linears hold {options.column_parallel_share:g} of the backward"
            )
        for text in half_allreduces(hardware):
            self._default(text)
        found = (falling_times(hardware), partial_spread(hardware))
        for note in (*hardware.notes, *model.notes, *found):
            if note is not None:
                self.note(note)
        if optimizer is not None:
            self._default(
                "optimizer step is measured on layers; it follows the parameters of a ZeRO shard, "
                "of embedding and head too"
            )
        if hardware.memory_bytes_per_s is None and optimizer is None:
            self._default("memory bandwidth is unknown: optimizer step and look-up cost 0")
        elif hardware.memory_bytes_per_s is None:
            self._default("memory bandwidth is unknown: look-up costs 0")
        if any(layer.num_experts is not None for layer in spec.layers):
            self._default("expert degree 1: experts are divided only by tp, pp and ZeRO")
        if spec.tied_embeddings and spec.vocab_size is None:
            self._default("vocabulary is unknown: tied weights are those of the first stage")
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
        """Record what is multiplied and added, and what speaks against it."""
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
    ) -> None:
        """Record what the strategies of one layer type need.

        measured : (S,) whether memory was measured for a strategy; `derived` says of which degrees
        the activations follow from those at another one.
        """
        spec, name = layer.spec, f"layer type {kind}"
        degrees = {s.tp for s in strategies if s.tp > 1}
        if degrees and spec.num_heads is None:
            self._default(f"{name}: number of heads is unknown, divisibility is not checked")
        if any(not s.ulysses and s.tp > 1 for s in strategies) and spec.ffn_hidden_size is None:
            self._default(f"{name}: MLP width is unknown, divisibility is not checked")
        if any(s.cp > 1 for s in strategies):
            if layer.fits.whole.attention_s is None and layer.attention_sample_s > 0.0:
                self._default(f"{name}: attention's share of the forward is taken from its FLOP")
            elif layer.fits.whole.attention_s is None:
                self._default(f"{name}: attention time is unknown, ring exchanges are exposed")
        self._record_shards(name, layer.fits, strategies)
        for text in derived:
            self._default(f"{name}: {text}")
        for missing in sorted({s.tp for s, ok in zip(strategies, measured, strict=True) if not ok}):
            self.note(
                f"left out: strategies of {name} at degree {missing} whose activation or "
                f"checkpoint entry was not measured"
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
                    self._default(f"{name}: {wanted} is {source} over {less}, launch apart")

    def _default(self, text: str) -> None:
        self._defaults[text] = None


def _backward_defaults(fits: Sequence[ComputeFits], other: OtherFits) -> list[str]:
    """Return what has measured backward and recomputation, and what has not."""
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


# --------------------------------------------------------------------------------------------------
# The model: fits once, then prices rows.


class CostModel:
    """Prices rows of (table, strategy) from profiles; `search.cost` says how.

    Parameters
    ----------
    spec, model, hardware : the documents; `spec.layers[k]` is measured in `model.layers[k]`.
    options : modes of the fits, recipe, overlap and buffers.

    Attributes
    ----------
    defaults_used : assumptions that stand in for a measurement.
    notes : values that were derived, extrapolated, scaled, left out or estimated.

    Raises InputError when the profiles cannot answer for this model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: ModelProfile,
        hardware: HardwareProfile,
        options: SearchOptions,
    ) -> None:
        self.spec = spec
        self.options = options
        self._said = Assumptions()
        # for `at_spread`, which would calibrate twice otherwise
        self._uncalibrated = (model, hardware)
        self.model, self.hardware = model, hardware = calibrated(model, hardware, options)
        self.groups = Groups(hardware, self._said.note)
        self._pricing = Pricing(
            hardware=hardware,
            groups=self.groups,
            options=options,
            recipe=Recipe.of(options),
        )
        if len(spec.layers) != len(model.layers):
            raise InputError(
                f"{spec.name} has {len(spec.layers)} layer types, but the profile measured "
                f"{len(model.layers)}; give one profile entry per layer type"
            )
        if options.sequence_parallel != model.sequence_parallel:
            asked, have = ("with", "without") if options.sequence_parallel else ("without", "with")
            raise InputError(
                f"the memory tables were measured {have} sequence parallelism and the search is "
                f"{asked} it; choose matching tables or --sequence-parallel accordingly"
            )
        lengths = tuple(layer.seq_length for layer in spec.layers)
        self._layers = [self._fit_layer(k, model) for k in range(len(spec.layers))]
        positions = [name for name in POSITIONS if name in model.other_memory]
        self._optimizer = fit_optimizer(
            (profile, layer.memory.parameter_count)
            for profile, layer in zip(model.layers, self._layers, strict=True)
        )
        self._vocab = VocabModel(
            spec=spec,
            fits=fit_other(model, lengths, options, self._said.note),
            memory={
                name: other_memory(
                    name, model.other_memory[name], lengths, options, self._said.note
                )
                for name in positions
            },
            logits_peak_bytes_per_sample=_logits_peak_bytes(model, lengths[-1]),
            optimizer=self._optimizer,
        )
        self._said.record(
            spec,
            model,
            hardware,
            options,
            [layer.fits for layer in self._layers],
            self._vocab.fits,
            self._optimizer,
        )
        if options.calibration is not None:
            self._said.record_calibration(
                options.calibration, calibration_doubts(spec, model, hardware, options)
            )

    @property
    def defaults_used(self) -> list[str]:
        """Assumptions that stand in for a measurement, in the order they were made."""
        return self._said.defaults

    @property
    def notes(self) -> list[str]:
        """Derived, extrapolated, scaled, left out or estimated values, in words."""
        return self._said.notes

    def at_spread(self, speed: Speed) -> CostModel:
        """Return the same model with communication at an end of its measured spread."""
        model, hardware = self._uncalibrated  # which the options calibrate again
        return CostModel(self.spec, model, hardware.at_spread(speed), self.options)

    def tables(
        self,
        strategies: Sequence[LayerStrategy],
        vocab: Sequence[VocabStrategy],
        tables: Sequence[Table],
        candidates: Sequence[tuple[int, int]],
        pipeline_type: PipelineType,
        *,
        price_illegal: bool = False,
    ) -> PlanTables:
        """Return the planner's arrays for these strategies, tables and candidates.

        tables : (p, g, default dp type); candidates : (index of a table, m). Rows that are not
        valid hold inf seconds; with `price_illegal` those that only break a divisibility rule
        are priced all the same (and stay invalid), for plans that somebody else made.
        """
        stages, samples, _ = table_arrays(tables)
        world = self.hardware.world_size
        sp = self.options.sequence_parallel
        layer_layout = [layout_of(s, sequence_parallel=sp) for s in strategies]
        vocab_layout = [layout_of(v.as_layer(), sequence_parallel=sp) for v in vocab]
        # in a fixed order, so that equal inputs give equal tables
        layouts = tuple(sorted(set(layer_layout) | set(vocab_layout)))
        number = {layout: i for i, layout in enumerate(layouts)}

        rows = [
            self.layer_rows(k, strategies, tables, price_illegal=price_illegal)
            for k in range(len(self._layers))
        ]
        vocab_costs = self.vocab_rows(vocab, tables, price_illegal=price_illegal)
        # S*h*e of a sample, by layer type
        token_bytes = (
            np.array([float(x.seq_length) * x.hidden_size for x in self.spec.layers])
            * self._pricing.recipe.element
        )
        vocab_activations, vocab_transient = vocab_costs.memory(pipeline_type)
        fixed = stage_fixed_bytes(stages, samples, float(token_bytes.max()), self.hardware)
        # X, the activation of a micro-batch on a rank where all ranks of a stage share it
        sharded_bytes = (samples * stages / world)[:, None] * token_bytes
        change_forward, change_backward = redistribution_s(
            layouts, sharded_bytes, stages, world, self.groups
        )
        return PlanTables(
            world_size=world,
            pipeline_type=pipeline_type,
            layer_type=np.array(self.spec.layer_types, dtype=np.int32),
            strategies=tuple(strategies),
            layouts=layouts,
            strategy_layout=np.array([number[x] for x in layer_layout], dtype=np.int32),
            vocab=tuple(vocab),
            vocab_layout=np.array([number[x] for x in vocab_layout], dtype=np.int32),
            table_stages=stages.astype(np.int32),
            table_microbatch=samples,
            table_dp=tuple(kind for _, _, kind in tables),
            valid=np.stack([r.valid for r in rows], axis=1),
            forward_s=np.stack([r.forward_s for r in rows], axis=1),
            backward_s=np.stack([r.backward_s for r in rows], axis=1),
            tail_s=np.stack([r.tail_s for r in rows], axis=1),
            static_bytes=np.stack([r.states for r in rows], axis=2),
            activation_bytes=np.stack([r.activations for r in rows], axis=1),
            transient_bytes=np.stack([r.transient for r in rows], axis=2),
            shared_bytes=np.stack([r.shared for r in rows], axis=1),
            redistribute_forward_s=change_forward,
            redistribute_backward_s=change_backward,
            send_s=send_s(layouts, sharded_bytes, stages, self.groups),
            vocab_valid=vocab_costs.valid,
            vocab_forward_s=vocab_costs.forward_s,
            vocab_backward_s=vocab_costs.backward_s,
            vocab_tail_s=vocab_costs.tail_s,
            vocab_static_bytes=vocab_costs.states,
            vocab_activation_bytes=vocab_activations,
            vocab_transient_bytes=vocab_transient,
            vocab_shared_bytes=vocab_costs.shared,
            stage_fixed_bytes=calibrated_bytes(fixed, self.options),
            candidate_table=np.array([n for n, _ in candidates], dtype=np.int32),
            candidate_microbatches=np.array([m for _, m in candidates], dtype=np.int32),
        )

    def layer_rows(
        self,
        layer_type: int,
        strategies: Sequence[LayerStrategy],
        tables: Sequence[Table],
        *,
        price_illegal: bool = False,
    ) -> LayerRows:
        """Return one layer type priced in every table with every strategy, by category."""
        layer, options, pricing = self._layers[layer_type], self.options, self._pricing
        kept = self._activations(layer, strategies)
        measured = ~np.isnan(kept.kept)
        self._said.record_layer(layer_type, layer, strategies, measured, kept.derived)
        rows = self._rows(layer.spec, strategies, tables, measured, price_illegal=price_illegal)
        self._note_batch(f"layer type {layer_type}", rows.batch.max(initial=0.0), layer.fits.whole)
        for name, largest in layer.fits.extrapolated(rows):
            self._said.note_batch(f"layer type {layer_type}, {name}", largest)
        seconds = self._layer_time(layer, rows, layer.fits)
        # tensor ranks share a layer's parameters, ranks of Ulysses have all of them
        parameters = layer.memory.parameter_count / np.where(rows.ulysses, 1.0, rows.tensor)
        prefetched = prefetched_bytes(parameters, rows, pricing.recipe)
        # weights gathered early may lie beside another layer's peak: moved to the shared bytes
        passing = rows.batch * (kept.recomputed + kept.backward)[rows.strategy] - prefetched
        if not options.global_memory_buffer:
            passing = passing + gathered_bytes(rows, layer.spec, pricing)
        states, transient = [], []
        # for m == 1, then m > 1: with one micro-batch gradients are sharded as they are reduced
        for shard in (True, not options.async_grad_reduce):
            args = (parameters, rows, pricing.recipe)
            states.append(state_bytes(*args, shard_gradients=shard))
            transient.append(passing + zero_transient_bytes(*args, shard_gradients=shard))

        def full(num_bytes: F64) -> I64:
            return rows.scatter(to_bytes(num_bytes))

        # one infinite category of a sum is enough to keep a row from being chosen
        base = {"forward", "backward", "tail"}
        parts = [
            {
                name: rows.scatter(values, np.inf if name in base else 0.0)
                for name, values in part.items()
            }
            for part in (seconds.forward, seconds.backward, seconds.step)
        ]
        found = LayerRows(
            valid=rows.scatter(rows.valid),
            priced=rows.scatter(np.ones_like(rows.valid)),
            forward=parts[0],
            backward=parts[1],
            step=parts[2],
            states=np.stack([full(part) for part in states]),
            activations=full(rows.batch * kept.kept[rows.strategy]),
            transient=np.stack([full(part) for part in transient]),
            backward_peak=full(rows.batch * kept.backward[rows.strategy]),
            shared=full(prefetched + layer_shared_bytes(rows, layer.spec, pricing)),
        )
        return calibrated_layer(found, options)

    def vocab_rows(
        self,
        vocab: Sequence[VocabStrategy],
        tables: Sequence[Table],
        *,
        price_illegal: bool = False,
    ) -> VocabRows:
        """Return embedding and head priced in every table with every strategy, by category."""
        found = self._vocab_rows(self._vocab, vocab, tables, price_illegal=price_illegal)
        self._note_batch(OTHER, found.largest_batch, self._vocab.fits.forward)
        if self._vocab.fits.backward is not None:
            self._note_batch(f"{OTHER}, backward", found.largest_batch, self._vocab.fits.backward)
        if found.unmeasured:
            self._said.note(
                "left out: embedding and head at degrees without an entry in the memory tables: "
                + ", ".join(map(str, found.unmeasured))
            )
        return found

    @property
    def has_computation_spread(self) -> bool:
        """True when percentiles of computation were measured."""
        return any(draws.has_spread for draws in self.all_draws)

    @property
    def all_draws(self) -> tuple[Draws, ...]:
        """Replicas of the layer types, then those of embedding, head and loss."""
        return (*self.draws, self.other_draws)

    @cached_property
    def other_draws(self) -> OtherDraws:
        """Replicas of the measured embedding, head and loss."""
        lengths = tuple(layer.seq_length for layer in self.spec.layers)
        return OtherDraws(self.model.other_times, lengths, self.options)

    @cached_property
    def draws(self) -> tuple[LayerDraws, ...]:
        """Replicas of the measured computation, by layer type."""
        return tuple(
            LayerDraws(k, profile, self.spec.layers[k].seq_length, self.options)
            for k, profile in enumerate(self.model.layers)
        )

    def drawn_layer_s(
        self, layer_type: int, strategies: Sequence[LayerStrategy], table: Table
    ) -> tuple[F64, F64, F64]:
        """Return forward, backward and tail of one layer type in every replica of computation.

        Each of shape (NUM_REPLICAS, S); strategies without a price hold inf.
        """
        layer = self._layers[layer_type]
        measured = ~np.isnan(self._activations(layer, strategies).kept)
        # plans made elsewhere have an interval too
        rows = self._rows(layer.spec, strategies, [table], measured, price_illegal=True)
        fits = DrawnFits(
            whole=layer.fits.whole,
            measured=layer.fits.measured,
            draws=self.draws[layer_type],
            # without a priced row nothing is divided by it
            rows_per_replica=max(1, len(rows.batch)),
        )
        seconds = self._layer_time(layer, repeated(rows), fits)
        result = []
        for part in (seconds.forward, seconds.backward, seconds.step):
            full = np.full((NUM_REPLICAS, len(strategies)), np.inf)
            # replicas outermost, as `repeated` lays rows out
            full[:, rows.strategy] = sum_of(part).reshape(NUM_REPLICAS, len(rows.batch))
            result.append(full)
        return result[0], result[1], result[2]

    def drawn_vocab_s(
        self, vocab: Sequence[VocabStrategy], table: Table
    ) -> tuple[F64, F64, F64] | None:
        """Return forward, backward and tail of embedding and head in every replica.

        Each of shape (NUM_REPLICAS, 3, E), as those of `PlanTables`; None where all are the same.
        """
        if not self.other_draws.has_spread:
            return None
        fits = self._vocab.fits
        drawn = DrawnOtherFits(forward=fits.forward, backward=fits.backward, draws=self.other_draws)
        # one table per replica, whose number tells the fits the replica
        found = self._vocab_rows(
            replace(self._vocab, fits=drawn), vocab, [table] * NUM_REPLICAS, price_illegal=True
        )
        return found.forward_s, found.backward_s, found.tail_s

    def _vocab_rows(
        self,
        model: VocabModel,
        vocab: Sequence[VocabStrategy],
        tables: Sequence[Table],
        *,
        price_illegal: bool,
    ) -> VocabRows:
        found = vocab_rows(model, vocab, tables, self._pricing, price_illegal=price_illegal)
        return calibrated_vocab(found, self.options)

    def _rows(
        self,
        spec: LayerSpec,
        strategies: Sequence[LayerStrategy],
        tables: Sequence[Table],
        measured: Bool,
        *,
        price_illegal: bool,
    ) -> Rows:
        sp = self.options.sequence_parallel
        legal = [not any(layer_problems(spec, s, sequence_parallel=sp)) for s in strategies]
        return build_rows(
            strategies,
            tables,
            self._pricing,
            legal=np.array(legal, dtype=np.bool_),
            priceable=(measured, measured),
            price_illegal=price_illegal,
        )

    def _activations(
        self, layer: LayerModel, strategies: Sequence[LayerStrategy]
    ) -> ActivationBytes:
        return activation_bytes(
            layer.memory,
            strategies,
            layer.spec,
            self._pricing.recipe,
            sequence_parallel=self.options.sequence_parallel,
        )

    def _layer_time(self, layer: LayerModel, rows: Rows, fits: ComputeFits) -> LayerTime:
        return layer_time(
            rows,
            layer.spec,
            fits,
            layer.memory.parameter_count,
            layer.attention_sample_s,
            self._pricing,
            self._optimizer,
        )

    def _fit_layer(self, kind: int, model: ModelProfile) -> LayerModel:
        spec, profile, options = self.spec.layers[kind], model.layers[kind], self.options
        fits = fit_computation(kind, profile, spec.seq_length, options, self._said.note)
        attention = fits.whole.attention_s
        if attention is None:
            share = attention_share(spec)
            # a share of what grows with samples, the launch is none of it
            attention = 0.0 if share is None else share * fits.whole.sample_s
        return LayerModel(
            spec=spec,
            fits=fits,
            memory=layer_memory(kind, profile, spec.seq_length, options, self._said.note),
            attention_sample_s=attention,
        )

    def _note_batch(self, name: str, batch: float, fit: ComputeFit) -> None:
        if batch > 2 * fit.largest_batch:
            self._said.note_batch(name, fit.largest_batch)


def _logits_peak_bytes(model: ModelProfile, seq_length: int) -> float:
    """Return the logits' peak of one sample at the head's length, in bytes.

    It is proportional to the tokens, and estimated at the longest length of the profile.
    """
    longest = max((key[-1] for table in model.other_memory.values() for key in table), default=0)
    peak = model.logits_peak_bytes_per_sample
    return peak * seq_length / longest if longest else peak
