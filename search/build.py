"""CostModel: from typed documents to PlanTables; fits once, then prices many rows at a time.

The formulas live in `search.cost`; here they are brought together, summed into the arrays that
the planner reads, and everything that was assumed is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError
from autopar.hardware import HardwareProfile, Speed
from autopar.model import ModelProfile, ModelSpec
from autopar.plan import LayerStrategy, PipelineType, VocabStrategy
from search.assumptions import Assumptions, LayerModel
from search.cost.comm import Groups
from search.cost.computation import ComputeFits, attention_share, fit_computation
from search.cost.draws import NUM_REPLICAS, DrawnFits, LayerDraws, repeated
from search.cost.fits import ComputeFit, fit_other_time, layer_memory, other_memory
from search.cost.legality import legal_strategies
from search.cost.memory import (
    Recipe,
    activation_bytes,
    gathered_bytes,
    layer_shared_bytes,
    stage_fixed_bytes,
    state_bytes,
    to_bytes,
    zero_transient_bytes,
)
from search.cost.redistribution import layout_of, layout_of_vocab, redistribution_s, send_s
from search.cost.rows import Rows, Table, build_rows, table_arrays
from search.cost.time import LayerTime, layer_time
from search.cost.vocab import VocabModel, VocabRows, vocab_rows
from search.options import SearchOptions
from search.tables import POSITIONS, PlanTables

__all__ = ["CostModel", "LayerRows"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRows:
    """One layer type priced, axes (N tables, S strategies), split by category.

    Rows without a price hold inf seconds in `forward`, `backward` and `tail`, and 0 elsewhere.
    """

    valid: NDArray[np.bool_]
    priced: NDArray[np.bool_]
    """Also true for rows that only break a divisibility rule, when those were asked for."""
    forward: dict[str, F64]
    """Seconds of a micro-batch's forward: forward, tp, ulysses, cp, zero3."""
    backward: dict[str, F64]
    """Seconds of a micro-batch's backward: backward, recompute, tp, ulysses, cp, zero3, sync."""
    step: dict[str, F64]
    """Seconds once per step: tail, optimizer."""
    states: I64
    """(2, N, S)"""
    activations: I64
    """(N, S) per micro-batch in flight"""
    transient: I64
    """(2, N, S)"""
    shared: I64

    @property
    def forward_s(self) -> F64:
        """(N, S) sum of `forward`."""
        return _sum_of(self.forward)

    @property
    def backward_s(self) -> F64:
        """(N, S) sum of `backward`."""
        return _sum_of(self.backward)

    @property
    def tail_s(self) -> F64:
        """(N, S) sum of `step`."""
        return _sum_of(self.step)

    def time_s(self, table: int, strategy: int) -> dict[str, float]:
        """Return the seconds of one row by category, per micro-batch and per step."""
        result: dict[str, float] = {}
        for part in (self.forward, self.backward, self.step):
            for name, values in part.items():
                result[name] = result.get(name, 0.0) + float(values[table, strategy])
        return result


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
        self.model = model
        self.options = options
        self.recipe = Recipe.of(options)
        self.hardware = hardware
        self._said = Assumptions()
        self.groups = Groups(hardware, self._said.note)
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
        self._vocab = VocabModel(
            spec=spec,
            fit=fit_other_time(model, lengths, options, self._said.note),
            memory={
                name: other_memory(
                    name, model.other_memory[name], lengths, options, self._said.note
                )
                for name in positions
            },
            logits_peak_bytes_per_sample=_logits_peak_bytes(model, lengths[-1]),
        )
        self._said.record(spec, model, hardware, options, [layer.fits for layer in self._layers])

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
        hardware = self.hardware.at_spread(speed)
        return CostModel(self.spec, self.model, hardware, self.options)

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
        outer_layout = [layout_of_vocab(v, sequence_parallel=sp) for v in vocab]
        layouts = tuple(sorted(set(layer_layout) | set(outer_layout)))
        number = {layout: i for i, layout in enumerate(layouts)}

        rows = [
            self.layer_rows(k, strategies, tables, price_illegal=price_illegal)
            for k in range(len(self._layers))
        ]
        outer = self.vocab_rows(vocab, tables, price_illegal=price_illegal)
        token_bytes = (
            np.array([float(x.seq_length) * x.hidden_size for x in self.spec.layers])
            * self.recipe.element
        )
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
            vocab_layout=np.array([number[x] for x in outer_layout], dtype=np.int32),
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
            vocab_valid=outer.valid,
            vocab_forward_s=_sum_of(outer.forward),
            vocab_backward_s=_sum_of(outer.backward),
            vocab_tail_s=_sum_of(outer.step),
            vocab_static_bytes=outer.states,
            vocab_activation_bytes=outer.activations,
            vocab_transient_bytes=outer.transient,
            vocab_shared_bytes=outer.shared,
            stage_fixed_bytes=stage_fixed_bytes(
                stages, samples, world, float(token_bytes.max()), estimated=self.hardware.estimated
            ),
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
        layer, options, recipe = self._layers[layer_type], self.options, self.recipe
        spec = layer.spec
        sp = options.sequence_parallel
        kept = activation_bytes(layer.memory, strategies, sequence_parallel=sp)
        measured = ~np.isnan(kept.kept)
        self._said.record_layer(layer_type, layer, strategies, measured, kept.derived_degrees)
        rows = build_rows(
            self.hardware.world_size,
            strategies,
            tables,
            self.groups,
            legal=legal_strategies(spec, strategies, sequence_parallel=sp),
            priceable=measured,
            price_illegal=price_illegal,
        )
        self._note_batch(f"layer type {layer_type}", rows.batch.max(initial=0.0), layer.fits.whole)
        for name, largest in layer.fits.extrapolated(rows):
            self._said.note_batch(f"layer type {layer_type}, {name}", largest)
        seconds = self._layer_time(layer, rows, layer.fits)
        parameters = layer.memory.parameter_count / np.where(rows.ulysses, 1.0, rows.tensor)
        states = np.zeros((2, *rows.shape), dtype=np.int64)
        transient = np.zeros_like(states)
        passing = rows.batch * kept.recomputed[rows.strategy]
        if not options.global_memory_buffer:
            passing = passing + gathered_bytes(
                rows, spec.seq_length, spec.hidden_size, recipe, options
            )
        for now, shard in enumerate((True, not options.async_grad_reduce)):
            args = (parameters, rows.zero_size, rows.zero3, rows.zero2, recipe)
            states[now][rows.table, rows.strategy] = to_bytes(
                state_bytes(*args, shard_gradients=shard)
            )
            transient[now][rows.table, rows.strategy] = to_bytes(
                passing + zero_transient_bytes(*args, shard_gradients=shard)
            )
        activations = np.zeros(rows.shape, dtype=np.int64)
        activations[rows.table, rows.strategy] = to_bytes(rows.batch * kept.kept[rows.strategy])
        shared = np.zeros(rows.shape, dtype=np.int64)
        shared[rows.table, rows.strategy] = to_bytes(
            layer_shared_bytes(
                rows,
                spec.seq_length,
                spec.hidden_size,
                recipe,
                options,
                estimated=self.hardware.estimated,
            )
        )
        base = {"forward", "backward", "tail"}
        parts = [
            {
                name: rows.scatter(values, np.inf if name in base else 0.0)
                for name, values in part.items()
            }
            for part in (seconds.forward, seconds.backward, seconds.step)
        ]
        valid = np.zeros(rows.shape, dtype=np.bool_)
        valid[rows.table, rows.strategy] = rows.valid
        priced = np.zeros(rows.shape, dtype=np.bool_)
        priced[rows.table, rows.strategy] = True
        return LayerRows(
            valid=valid,
            priced=priced,
            forward=parts[0],
            backward=parts[1],
            step=parts[2],
            states=states,
            activations=activations,
            transient=transient,
            shared=shared,
        )

    def vocab_rows(
        self,
        vocab: Sequence[VocabStrategy],
        tables: Sequence[Table],
        *,
        price_illegal: bool = False,
    ) -> VocabRows:
        """Return embedding and head priced in every table with every strategy, by category."""
        found = vocab_rows(
            self._vocab,
            vocab,
            tables,
            self.hardware.world_size,
            self.groups,
            self.recipe,
            self.options,
            coefficient=self.hardware.overlap_coefficient,
            memory_bytes_per_s=self.hardware.memory_bytes_per_s,
            estimated=self.hardware.estimated,
            price_illegal=price_illegal,
        )
        self._note_batch("embedding and head", found.largest_batch, self._vocab.fit)
        if found.unmeasured:
            self._said.note(
                "left out: embedding and head at degrees without an entry in the memory tables: "
                + ", ".join(map(str, found.unmeasured))
            )
        return found

    @property
    def has_computation_spread(self) -> bool:
        """True when percentiles of computation were measured."""
        return any(draws.has_spread for draws in self.draws)

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
        sp = self.options.sequence_parallel
        kept = activation_bytes(layer.memory, strategies, sequence_parallel=sp)
        rows = build_rows(
            self.hardware.world_size,
            strategies,
            [table],
            self.groups,
            legal=legal_strategies(layer.spec, strategies, sequence_parallel=sp),
            priceable=~np.isnan(kept.kept),
            price_illegal=True,
        )
        fits = DrawnFits(
            whole=layer.fits.whole,
            measured=layer.fits.measured,
            draws=self.draws[layer_type],
            rows_per_replica=max(1, len(rows.batch)),
        )
        seconds = self._layer_time(layer, repeated(rows), fits)
        result = []
        for part in (seconds.forward, seconds.backward, seconds.step):
            full = np.full((NUM_REPLICAS, len(strategies)), np.inf)
            full[:, rows.strategy] = _sum_of(part).reshape(NUM_REPLICAS, len(rows.batch))
            result.append(full)
        return result[0], result[1], result[2]

    def _layer_time(self, layer: LayerModel, rows: Rows, fits: ComputeFits) -> LayerTime:
        return layer_time(
            rows,
            layer.spec,
            fits,
            layer.memory.parameter_count,
            layer.attention_sample_s,
            self.groups,
            self.recipe,
            self.options,
            coefficient=self.hardware.overlap_coefficient,
            memory_bytes_per_s=self.hardware.memory_bytes_per_s,
        )

    def _fit_layer(self, kind: int, model: ModelProfile) -> LayerModel:
        spec, profile, options = self.spec.layers[kind], model.layers[kind], self.options
        fits = fit_computation(kind, profile, spec.seq_length, options, self._said.note)
        attention = fits.whole.attention_s
        if attention is None:
            share = attention_share(spec)
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


def _sum_of(parts: dict[str, F64]) -> F64:
    """Return the sum of the categories, in their order."""
    values = iter(parts.values())
    total = next(values).copy()
    for value in values:
        total += value
    return total
