"""Cost model: time and memory of layer strategies, as the arrays of the planner (`PlanTables`).

Measured times are fitted once; rows of (table, strategy) are then priced in batches. The formulas
are in the other modules of `search.planning.cost`. This module combines them and records all
assumptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import F64, I64, Bool
from autopar.errors import InputError
from autopar.rates.measured import HardwareProfile, Speed
from autopar.records import Record, replace
from autopar.run.model import LayerMemory, LayerProfile, LayerSpec, ModelProfile, ModelSpec
from autopar.run.plan import LayerStrategy, PipelineType, VocabStrategy, layer_problems
from search.planning.cost.assumptions import Assumptions, LayerModel
from search.planning.cost.calibrated import (
    calibrated,
    calibrated_bytes,
    calibrated_host,
    calibrated_layer,
    calibrated_vocab,
    calibration_doubts,
)
from search.planning.cost.communication import Asking, Groups, Message, batched_prices
from search.planning.cost.fits import (
    NUM_REPLICAS,
    OTHER,
    ComputeFit,
    ComputeFits,
    DrawnFits,
    DrawnOtherFits,
    Draws,
    LayerDraws,
    OtherDraws,
    attention_share,
    fit_computation,
    fit_other,
    has_percentiles,
    layer_memory,
    other_memory,
    repeated,
)
from search.planning.cost.memory import (
    ActivationBytes,
    activation_bytes,
    gathered_bytes,
    gathered_weight_bytes,
    last_matrix,
    layer_shared_bytes,
    layer_transient_bytes,
    reserve_of,
    stage_fixed_bytes,
    state_bytes,
    to_bytes,
    token_bytes,
)
from search.planning.cost.overlap import (
    LayerTime,
    exposed_transfer_s,
    stragglers_share,
    without_host,
)
from search.planning.cost.state_layouts import Recipe
from search.planning.cost.tables import (
    POSITIONS,
    Grid,
    LayerRows,
    PlanTables,
    Pricing,
    Rows,
    build_grid,
    build_rows,
    note_groups,
    sum_of,
    table_arrays,
)
from search.planning.cost.time import fit_optimizer, layer_time, layout_of, redistribution, send_s
from search.planning.cost.vocabulary import VocabModel, VocabRows, plan_messages, vocab_rows
from search.planning.space import Table
from search.request.options import SearchOptions

_Scalar = TypeVar("_Scalar", bound=np.generic)


class PricedTables(Record, eq=False):
    """Arrays of the planner, and the same times and bytes by category."""

    tables: PlanTables
    layers: tuple[LayerRows, ...]
    """Priced rows of each layer type."""
    vocab: VocabRows


class _Axes:
    """Strategies and tables to price, and caches shared by all layer types."""

    def __init__(
        self,
        strategies: Sequence[LayerStrategy],
        tables: Sequence[Table],
        *,
        price_illegal: bool,
        unpriced_s: float = np.inf,
    ) -> None:
        self.strategies = strategies
        self.tables = tables
        self.price_illegal = price_illegal
        self.unpriced_s = unpriced_s
        self.grids: dict[bytes, Grid] = {}
        """Grid by mask of measured strategies."""
        self.rows: dict[tuple[bytes, bytes], Rows] = {}
        """Rows by masks of measured and of legal strategies."""
        self.kept: dict[int, ActivationBytes] = {}
        """Activation bytes by number of the first of equal layer types."""
        self.rows_of: dict[int, Rows] = {}
        """Rows by number of the first of equal layer types."""


class CostModel:
    """Cost model that computes time and memory of rows (table, strategy) from profiles.

    spec, model, hardware : model, its profile and the hardware profile; `model.layers[k]` contains
        the measurements of `spec.layers[k]`.
    options : modes of the fits, precision, overlap and buffers.

    Attributes
    ----------
    defaults_used : assumptions that replace a measurement.
    notes : values that were derived, extrapolated, scaled, ignored or estimated.

    Raises InputError if the profiles do not contain enough measurements for this model.
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
        self.reserve = reserve_of(options, spec)
        # the model that made this one by `for_one_plan`, whose replicas it reuses
        self._origin: CostModel | None = None
        self._said = Assumptions()
        # for `at_spread`, which would otherwise calibrate twice
        self._uncalibrated = (model, hardware)
        # Overlap factors apply only if both model and hardware are estimates. GPipe, whose step
        # depends on the longest forward and on the longest backward, would have too many nearly
        # equal plans with them. It uses the overlap coefficient of the hardware only.
        hides = model.estimated and options.pipeline_type == "1f1b"
        hiding = hardware.hiding if hides else None
        if hiding is not None:
            model = without_host(model, spec, hiding)
            hiding = calibrated_host(hiding, options)
        self.model, self.hardware = model, hardware = calibrated(model, hardware, options)
        self.groups = Groups(hardware, self._said.note)
        self._pricing = Pricing(
            hardware=hardware,
            groups=self.groups,
            options=options,
            recipe=Recipe.of(options),
            hiding=hiding,
        )
        if len(spec.layers) != len(model.layers):
            raise InputError(
                f"{spec.name} has {len(spec.layers)} layer types, but the profile measured "
                f"{len(model.layers)}",
                remedy="Give one profile entry per layer type",
            )
        if options.sequence_parallel != model.sequence_parallel:
            asked, have = ("with", "without") if options.sequence_parallel else ("without", "with")
            raise InputError(
                f"the memory tables were measured {have} sequence parallelism, "
                f"but the search is {asked} it",
                remedy="Use matching tables, or change --sequence-parallel",
            )
        lengths = tuple(layer.seq_length for layer in spec.layers)
        self._fitted: list[tuple[LayerProfile, int, ComputeFits, LayerMemory]] = []
        self._layers = [self._fit_layer(k, model) for k in range(len(spec.layers))]
        self._alike = _first_alike(self._layers)
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
        # assumptions that apply to every row, copied by `for_one_plan`
        self._said_always = self._said.copy()

    def for_one_plan(self) -> CostModel:
        """Return a copy of the model whose notes concern only rows that the copy prices."""
        other = copy(self)
        other._origin = self
        other._said = said = self._said_always.copy()
        other.groups = self.groups.without_notes(said.note)
        other._pricing = replace(self._pricing, groups=other.groups)
        return other

    @property
    def defaults_used(self) -> list[str]:
        """Assumptions that replace a measurement, in the order in which they were made."""
        return self._said.defaults

    @property
    def notes(self) -> list[str]:
        """Sentences on derived, extrapolated, scaled, ignored or estimated values."""
        return self._said.notes

    def at_spread(self, speed: Speed) -> CostModel:
        """Return a cost model with communication at the fast or slow end of its measured spread."""
        model, hardware = self._uncalibrated  # the constructor calibrates them
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
        unpriced_s: float = np.inf,
    ) -> PlanTables:
        """Return the arrays of the planner; arguments as in `priced`."""
        return self.priced(
            strategies,
            vocab,
            tables,
            candidates,
            pipeline_type,
            price_illegal=price_illegal,
            unpriced_s=unpriced_s,
        ).tables

    def priced(
        self,
        strategies: Sequence[LayerStrategy],
        vocab: Sequence[VocabStrategy],
        tables: Sequence[Table],
        candidates: Sequence[tuple[int, int]],
        pipeline_type: PipelineType,
        *,
        price_illegal: bool = False,
        unpriced_s: float = np.inf,
    ) -> PricedTables:
        """Return the arrays of the planner, and the priced rows by category.

        tables : (number of stages p, samples per micro-batch g, default data-parallel type).
        candidates : (index of a table, number of micro-batches m).
        price_illegal : True to also price rows that only break a divisibility rule, for plans that
            the search did not find; these rows stay invalid.
        unpriced_s : seconds of rows that cannot be priced.
        """
        stages, samples, _ = table_arrays(tables)
        world = self.hardware.world_size
        sp = self.options.sequence_parallel
        # recomputation and ZeRO do not change a degree's layout
        layer_degrees = [(s.tp, s.ulysses, s.cp, s.strided) for s in strategies]
        vocab_degrees = [(v.tp, v.ulysses, v.cp, False) for v in vocab]
        layout = {
            (tp, ulysses, cp, strided): layout_of(
                LayerStrategy(tp=tp, ulysses=ulysses, cp=cp, strided=strided), sequence_parallel=sp
            )
            for tp, ulysses, cp, strided in dict.fromkeys((*layer_degrees, *vocab_degrees))
        }
        # in a fixed order, so that equal inputs give equal tables
        layouts = tuple(sorted(set(layout.values())))
        number = {degrees: layouts.index(found) for degrees, found in layout.items()}

        axes = _Axes(strategies, tables, price_illegal=price_illegal, unpriced_s=unpriced_s)
        layers = [self._layer_price(k, axes) for k in range(len(self._layers))]
        # equal layer types with equal measurements are priced once
        first = {alike: i for i, alike in enumerate(dict.fromkeys(self._alike))}
        widest = max(token_bytes(layer, self._pricing.recipe) for layer in self.spec.layers)
        fixed = stage_fixed_bytes(stages, samples, widest, self.hardware, self.model.rank_bytes)
        sharded_bytes = self._sent(samples * stages)
        vocab_costs: VocabRows
        *distinct, vocab_costs, (change_forward, change_backward) = batched_prices(
            self.groups,
            *(layers[k] for k in first),
            self._vocab_rows(self._vocab, vocab, tables, price_illegal=price_illegal),
            redistribution(layouts, sharded_bytes, stages, world, self.groups),
        )
        self._note_vocab(vocab_costs)
        share = stragglers_share(self._pricing)
        if share:
            change_forward, change_backward = (
                (1.0 + share) * change for change in (change_forward, change_backward)
            )
        rows: list[LayerRows] = [distinct[first[alike]] for alike in self._alike]
        vocab_activations, vocab_transient = vocab_costs.memory(pipeline_type)
        found = PlanTables(
            world_size=world,
            pipeline_type=pipeline_type,
            layer_type=np.array(self.spec.layer_types, dtype=np.int32),
            strategies=tuple(strategies),
            layouts=layouts,
            strategy_layout=np.array([number[x] for x in layer_degrees], dtype=np.int32),
            vocab=tuple(vocab),
            vocab_layout=np.array([number[x] for x in vocab_degrees], dtype=np.int32),
            table_stages=stages.astype(np.int32),
            table_microbatch=samples,
            table_dp=tuple(kind for _, _, kind in tables),
            valid=_by_type([r.valid for r in rows]),
            forward_s=_by_type([r.forward_s for r in rows]),
            backward_s=_by_type([r.backward_s for r in rows]),
            tail_s=_by_type([r.tail_s for r in rows]),
            static_bytes=_by_type([r.states for r in rows]),
            activation_bytes=_by_type([r.activations for r in rows]),
            transient_bytes=_by_type([r.transient for r in rows]),
            shared_bytes=_by_type([r.shared for r in rows]),
            redistribute_forward_s=change_forward,
            redistribute_backward_s=change_backward,
            send_s=exposed_transfer_s(
                send_s(
                    layouts,
                    sharded_bytes,
                    stages,
                    self.groups,
                    scattered=self._pricing.hiding is not None,
                ),
                stages,
                self._pricing,
                pipeline_type,
            ),
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
        return PricedTables(tables=found, layers=tuple(rows), vocab=vocab_costs)

    def layer_rows(
        self,
        layer_type: int,
        strategies: Sequence[LayerStrategy],
        tables: Sequence[Table],
        *,
        price_illegal: bool = False,
    ) -> LayerRows:
        """Return times and bytes of one layer type for every table and strategy, by category."""
        axes = _Axes(strategies, tables, price_illegal=price_illegal)
        found: LayerRows = batched_prices(self.groups, self._layer_price(layer_type, axes))[0]
        return found

    def _layer_price(self, layer_type: int, axes: _Axes) -> Asking[LayerRows]:
        layer, alike = self._layers[layer_type], self._alike[layer_type]
        if alike not in axes.kept:
            axes.kept[alike] = self._activations(layer, axes.strategies)
        kept = axes.kept[alike]
        measured = ~np.isnan(kept.kept)
        self._said.record_layer(
            layer_type,
            layer,
            axes.strategies,
            measured,
            kept.derived,
            estimated=self.model.estimated,
        )
        if alike not in axes.rows_of:
            axes.rows_of[alike] = self._rows(layer.spec, axes, measured)
        rows = axes.rows_of[alike]
        self._note_layer_batches(layer_type, rows)
        return self._priced(layer, rows, kept, axes.unpriced_s)

    def _priced(
        self, layer: LayerModel, rows: Rows, kept: ActivationBytes, unpriced_s: float
    ) -> Asking[LayerRows]:
        """Return times and bytes of the rows of a layer type."""
        options, pricing, recipe = self.options, self._pricing, self._pricing.recipe
        parameters = _parameters(layer, rows)
        seconds = yield from self._layer_time(layer, rows, layer.fits)
        peak = kept.backward[rows.strategy]
        activations = rows.batch * kept.kept[rows.strategy]
        working = rows.batch * (kept.recomputed[rows.strategy] + peak)
        if not options.global_memory_buffer:
            working = working + gathered_bytes(rows, token_bytes(layer.spec, recipe), pricing)
        # without SP tensor ranks hold all tokens of their samples
        divided = (
            rows.tensor if options.sequence_parallel else np.where(rows.ulysses, rows.tensor, 1.0)
        )
        tokens = rows.batch * token_bytes(layer.spec, recipe) / (divided * rows.context)
        matrix = last_matrix(parameters, rows, layer.spec, recipe)
        states, transient = [], []
        # for m == 1, then m > 1: with one micro-batch gradients are sharded as they are reduced
        for several, shard in ((False, True), (True, not options.async_grad_reduce)):
            states.append(
                state_bytes(
                    parameters,
                    rows,
                    recipe,
                    shard_gradients=shard,
                    kept=0.0 if several else activations,
                )
            )
            transient.append(
                layer_transient_bytes(
                    parameters,
                    matrix,
                    rows,
                    recipe,
                    working=working,
                    kept=activations,
                    tokens=tokens,
                    shard_gradients=shard,
                    accumulates=several,
                )
            )
        # prefetched weights of a layer may be live at the peak of another layer or of the loss
        prefetched = gathered_weight_bytes(parameters, rows, recipe)
        others = (
            activations,
            rows.batch * peak,
            prefetched + layer_shared_bytes(rows, layer.spec, pricing, layer.memory.shared_bytes),
        )
        num_bytes = rows.scatter(to_bytes(np.array((*states, *transient, *others))))
        flags = rows.scatter(np.array((rows.valid, np.ones_like(rows.valid))))
        found = LayerRows(
            at=rows.places,
            shape=rows.shape,
            seconds=(seconds.forward, seconds.backward, seconds.step),
            unpriced_s=unpriced_s,
            rows=rows,
            valid=flags[0],
            priced=flags[1],
            states=num_bytes[0:2],
            transient=num_bytes[2:4],
            activations=num_bytes[4],
            backward_peak=num_bytes[5],
            shared=num_bytes[6],
        )
        return calibrated_layer(found, options)

    def vocab_rows(
        self,
        vocab: Sequence[VocabStrategy],
        tables: Sequence[Table],
        *,
        price_illegal: bool = False,
    ) -> VocabRows:
        """Return times and bytes of embedding and head for every table and strategy."""
        price = self._vocab_rows(self._vocab, vocab, tables, price_illegal=price_illegal)
        found: VocabRows = batched_prices(self.groups, price)[0]
        self._note_vocab(found)
        return found

    def _note_vocab(self, found: VocabRows) -> None:
        self._note_vocab_batch(found.rows.batch.max(initial=0.0))
        if found.unmeasured:
            self._said.note(
                "not searched: embedding and head at degrees without an entry "
                "in the memory tables: " + ", ".join(map(str, found.unmeasured))
            )

    @cached_property
    def has_computation_spread(self) -> bool:
        """True if the profile contains percentiles of compute times that differ from the median."""
        if self._origin is not None:
            return self._origin.has_computation_spread
        return has_percentiles(self.model) and any(draws.has_spread for draws in self.all_draws)

    @property
    def all_draws(self) -> tuple[Draws, ...]:
        """Random draws of measured compute times: layer types, then embedding, head and loss."""
        return (*self.draws, self.other_draws)

    @cached_property
    def other_draws(self) -> OtherDraws:
        """Random draws of the measured times of embedding, head and loss."""
        if self._origin is not None:
            return self._origin.other_draws
        lengths = tuple(layer.seq_length for layer in self.spec.layers)
        return OtherDraws(self.model.other_times, lengths, self.options)

    @cached_property
    def draws(self) -> tuple[LayerDraws, ...]:
        """Random draws of the measured compute times of each layer type."""
        if self._origin is not None:
            return self._origin.draws
        return tuple(
            LayerDraws(k, profile, self.spec.layers[k].seq_length, self.options)
            for k, profile in enumerate(self.model.layers)
        )

    def drawn_layer_s(
        self, layer_type: int, strategies: Sequence[LayerStrategy], table: Table
    ) -> tuple[F64, F64, F64]:
        """Return (forward, backward, tail) seconds of one layer type in every replica.

        Each of shape (NUM_REPLICAS, S); strategies without a price hold inf.
        """
        layer = self._layers[layer_type]
        measured = ~np.isnan(self._activations(layer, strategies).kept)
        # illegal plans need an interval, too
        rows = self._rows(layer.spec, _Axes(strategies, [table], price_illegal=True), measured)
        fits = DrawnFits(
            whole=layer.fits.whole,
            measured=layer.fits.measured,
            draws=self.draws[layer_type],
            # at least 1, to avoid a division by 0 without priced rows
            rows_per_replica=max(1, len(rows.batch)),
        )
        price = self._layer_time(layer, repeated(rows), fits)
        seconds: LayerTime = batched_prices(self.groups, price)[0]
        result = []
        for part in (seconds.forward, seconds.backward, seconds.step):
            full = np.full((NUM_REPLICAS, len(strategies)), np.inf)
            # replicas are the outer axis, as `repeated` orders rows
            full[:, rows.strategy] = sum_of(part).reshape(NUM_REPLICAS, len(rows.batch))
            result.append(full)
        return result[0], result[1], result[2]

    def drawn_vocab_s(
        self, vocab: Sequence[VocabStrategy], table: Table
    ) -> tuple[F64, F64, F64] | None:
        """Return (forward, backward, tail) seconds of embedding and head in every replica.

        Each of shape (NUM_REPLICAS, 3, E), like those of `PlanTables`; None if all replicas are
        equal.
        """
        if not self.other_draws.has_spread:
            return None
        fits = self._vocab.fits
        drawn = DrawnOtherFits(forward=fits.forward, backward=fits.backward, draws=self.other_draws)
        # one table per replica, whose number selects the replica of the fits
        found: VocabRows = batched_prices(
            self.groups,
            self._vocab_rows(
                replace(self._vocab, fits=drawn), vocab, [table] * NUM_REPLICAS, price_illegal=True
            ),
        )[0]
        return found.forward_s, found.backward_s, found.tail_s

    def _vocab_rows(
        self,
        model: VocabModel,
        vocab: Sequence[VocabStrategy],
        tables: Sequence[Table],
        *,
        price_illegal: bool,
    ) -> Asking[VocabRows]:
        found = yield from vocab_rows(
            model, vocab, tables, self._pricing, price_illegal=price_illegal
        )
        return calibrated_vocab(found, self.options)

    def _rows(self, spec: LayerSpec, axes: _Axes, measured: Bool) -> Rows:
        sp = self.options.sequence_parallel
        # divisibility depends on degrees, not on recomputation and ZeRO
        degrees = [(s.tp, s.ulysses, s.cp) for s in axes.strategies]
        legal = {
            key: not any(layer_problems(spec, s, sequence_parallel=sp))
            for key, s in dict(zip(degrees, axes.strategies, strict=True)).items()
        }
        allowed = np.array([legal[key] for key in degrees], dtype=np.bool_)
        # layer types with equal sets of strategies share their rows
        known = measured.tobytes()
        if known not in axes.grids:
            both = (measured, measured)
            axes.grids[known] = build_grid(axes.strategies, axes.tables, self._pricing, both)
        key = known, allowed.tobytes()
        if key not in axes.rows:
            axes.rows[key] = build_rows(
                axes.grids[known], legal=allowed, price_illegal=axes.price_illegal
            )
        return axes.rows[key]

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

    def _layer_time(self, layer: LayerModel, rows: Rows, fits: ComputeFits) -> Asking[LayerTime]:
        return layer_time(
            rows,
            layer.spec,
            fits,
            _parameters(layer, rows),
            layer.attention_sample_s,
            self._pricing,
            self._optimizer,
        )

    def _fit_layer(self, kind: int, model: ModelProfile) -> LayerModel:
        spec, profile = self.spec.layers[kind], model.layers[kind]
        fits, memory = self._fits(kind, profile, spec.seq_length)
        attention = fits.whole.attention_s
        if attention is None:
            share = attention_share(spec)
            # attention is a share of the time per sample, without the launch
            attention = 0.0 if share is None else share * fits.whole.sample_s
        return LayerModel(
            spec=spec,
            fits=fits,
            memory=memory,
            attention_sample_s=attention,
        )

    def _fits(
        self, kind: int, profile: LayerProfile, seq_length: int
    ) -> tuple[ComputeFits, LayerMemory]:
        """Return (fitted times, memory) of a layer type; cached for an equal profile."""
        for known, length, fits, memory in self._fitted:
            if length == seq_length and known == profile:
                return fits, memory
        notes: list[str] = []
        fits = fit_computation(kind, profile, seq_length, self.options, notes.append)
        if self.model.estimated:
            # the deviation of estimated times from a line is part of the estimate's error
            notes = [text for text in notes if not text.startswith("bad fit")]
        memory = layer_memory(kind, profile, seq_length, self.options, notes.append)
        # a note names its layer type, so fits with notes are not shared
        if not notes:
            self._fitted.append((profile, seq_length, fits, memory))
        for text in notes:
            self._said.note(text)
        return fits, memory

    def note_plan(
        self, priced: PricedTables, table: int, strategies: Sequence[int], vocab: int
    ) -> bool:
        """Record the notes of a plan without pricing it; return True if all notes are recorded.

        Notes and order are the same as if only this plan were priced. If False, it must be priced.

        priced : rows of the model whose `for_one_plan` returned this one.

        table, vocab, strategies : indices of the plan's table, vocabulary and layer strategies.
        """
        p, g = int(priced.tables.table_stages[table]), int(priced.tables.table_microbatch[table])
        ends = [priced.vocab.row(table, at, vocab) for at in ((0,) if p == 1 else (1, 2))]
        places = [[layer.row(table, s) for s in strategies] for layer in priced.layers]
        chosen = [priced.tables.strategies[s] for s in strategies]
        # the model of the search has noted nothing about groups or messages
        silent = self._origin is not None and self._origin.groups.silent
        # redistribution between strided and neighbouring ranks sends more than is requested here
        strided = any(s.strided for s in chosen) and not silent
        if None in ends or any(None in at for at in places) or strided:
            return False
        world, groups, sp = self.hardware.world_size, self.groups, self.options.sequence_parallel
        messages: list[Message] = []
        for k, (layer, rows) in enumerate(zip(self._layers, priced.layers, strict=True)):
            kept = self._activations(layer, chosen)
            self._said.record_layer(
                k,
                layer,
                chosen,
                ~np.isnan(kept.kept),
                kept.derived,
                estimated=self.model.estimated,
            )
            note_groups(chosen, p, world, groups)
            mine = rows.rows.take(np.array(places[k], dtype=np.int64))
            self._note_layer_batches(k, mine)
            if self._alike[k] == k and not silent:
                messages += next(self._layer_time(layer, mine, layer.fits))
        head = priced.tables.vocab[vocab]
        note_groups([head.as_layer()], p, world, groups)
        rows_of_vocab = priced.vocab.rows.take(np.array(ends, dtype=np.int64))
        if silent:
            self._note_vocab_batch(rows_of_vocab.batch.max())
            return True
        messages += plan_messages(self._vocab, head, rows_of_vocab, self._pricing)
        used = {layout_of(s, sequence_parallel=sp) for s in (*chosen, head.as_layer())}
        layouts, stages, sent = tuple(sorted(used)), np.array([p]), self._sent(np.array([g * p]))
        messages += next(redistribution(layouts, sent, stages, world, groups))
        groups.note_messages(messages)
        self._note_vocab_batch(rows_of_vocab.batch.max())
        if p > 1:
            send_s(layouts, sent, stages, groups)
        return True

    def _sent(self, ranks_samples: I64) -> F64:
        """Return the fully sharded activation X of a micro-batch, (N, K) bytes per rank.

        ranks_samples : (N,) g*p.
        """
        sample_bytes = [token_bytes(layer, self._pricing.recipe) for layer in self.spec.layers]
        # activation of a micro-batch on a rank, sharded over all ranks of the stage
        sent: F64 = (ranks_samples / self.hardware.world_size)[:, None] * np.array(sample_bytes)
        return sent

    def _note_layer_batches(self, kind: int, rows: Rows) -> None:
        fits = self._layers[kind].fits
        self._note_batch(f"layer type {kind}", rows.batch.max(initial=0.0), fits.whole)
        for name, largest in fits.extrapolated(rows):
            self._said.note_batch(f"layer type {kind}, {name}", largest)

    def _note_vocab_batch(self, batch: float) -> None:
        fits = self._vocab.fits
        self._note_batch(OTHER, batch, fits.forward)
        if fits.backward is not None:
            self._note_batch(f"{OTHER}, backward", batch, fits.backward)

    def _note_batch(self, name: str, batch: float, fit: ComputeFit) -> None:
        if batch > 2 * fit.largest_batch:
            self._said.note_batch(name, fit.largest_batch)


def _parameters(layer: LayerModel, rows: Rows) -> F64:
    """Return the number of parameters of a layer on a tensor rank, before ZeRO, (n,)."""
    # tensor ranks share a layer's parameters, Ulysses ranks replicate them
    count: F64 = layer.memory.parameter_count / np.where(rows.ulysses, 1.0, rows.tensor)
    return count


def _by_type(arrays: Sequence[NDArray[_Scalar]]) -> NDArray[_Scalar]:
    """Return the arrays (..., N, S) of K layer types as one array (..., N, K, S)."""
    # a single type needs no copy
    return arrays[0][..., None, :] if len(arrays) == 1 else np.stack(arrays, axis=-2)


def _first_alike(layers: Sequence[LayerModel]) -> list[int]:
    """Return for every layer type the number of the first type with equal times and memory."""
    known: list[tuple[int, tuple[object, ...]]] = []
    found = []
    for k, layer in enumerate(layers):
        # one layer is priced, whatever the number of layers
        spec = replace(layer.spec, num_layers=1)
        fits = layer.fits
        mine = (spec, fits.whole, fits.measured, layer.memory, layer.attention_sample_s)
        first = next((number for number, other in known if other == mine), k)
        if first == k:
            known.append((k, mine))
        found.append(first)
    return found


def _logits_peak_bytes(model: ModelProfile, seq_length: int) -> float:
    """Return the additional bytes of one sample during the loss, at a sequence length.

    The value of the profile is for its longest sequence length and is scaled by the tokens.
    """
    longest = max((key[-1] for table in model.other_memory.values() for key in table), default=0)
    peak = model.logits_peak_bytes_per_sample
    return peak * seq_length / longest if longest else peak
