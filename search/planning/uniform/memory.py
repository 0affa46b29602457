"""Lower bounds of the peak allocated bytes of a plan, computed by a few array sums.

They make most of the exact counts of `autopar.price.account` unnecessary. A bound is the memory of
a stage during the last forward before the first backward. It contains model states without padding,
saved activations of live micro-batches, steady-state memory, and transient memory of that forward.
If the peak occurs in that forward, the bound is at most 0.1 % below the exact count. Sizes are
rounded up to allocator blocks for activations only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, cast, get_args

import numpy as np

from autopar.arrays import F64, I64
from autopar.price import torch_layers, workspaces
from autopar.price.activations import (
    copied_qkv_bytes,
    input_bytes,
    offloaded_bytes,
    offloaded_parts,
    saved_parts,
)
from autopar.price.allocator import recycled_bytes
from autopar.price.oom_risk import CONTEXT_BYTES, LaunchKind, kind_of, reserve_share
from autopar.price.parameters import chunk_weights, layer_weights
from autopar.price.peak import (
    backward_bytes,
    deferred_head_bytes,
    expert_dispatch_bytes,
    head_bytes,
)
from autopar.records import Record, replace
from autopar.run.architecture import Layer, without_window
from autopar.run.run import RankLayer, Run, run_with_split
from autopar.run.strategy import Chunk, OffloadModule, recomputing
from search.engines.candidate import FULL, NONE, recomputation_of
from search.planning.uniform.bounds.live import StageEnds, StageRows
from search.planning.uniform.bounds.states import (
    StateBytes,
    copied_bytes,
    frozen_states_of_run,
    frozen_weight_bytes,
    states_of_run,
    trained_elements,
)

_LAUNCH_KINDS: tuple[LaunchKind, ...] = get_args(LaunchKind)


class MemoryBudget:
    """Bytes that tensors may allocate on a device at an OOM probability limit, by kind of plan."""

    def __init__(self, capacity_bytes: float, risk: float, own: LaunchKind | None = None) -> None:
        """Set the memory of a device and the limit; own : kind of all runs, None if they differ."""
        self.capacity_bytes = capacity_bytes
        self._own = own
        self._left = capacity_bytes - CONTEXT_BYTES
        self._risk = risk

    @property
    def most_bytes(self) -> float:
        """Largest peak allocated that fits, maximum over all kinds of plans, bytes."""
        kinds = _LAUNCH_KINDS if self._own is None else (self._own,)
        least = min(reserve_share(kind, self._risk) for kind in kinds)
        return max(0.0, self._left) / (1.0 + least)

    def fits_in(self, other: MemoryBudget) -> bool:
        """Return True if every plan that fits this budget fits `other`."""
        return self._left <= other._left and self._risk <= other._risk

    def bytes_for(self, run: Run) -> float:
        """Return the largest peak allocated of a run within the OOM probability limit, bytes."""
        return self.bytes_of(kind_of(run))

    def capacity_for(self, run: Run, peak_bytes: float) -> float:
        """Return the smallest device memory in which a peak of a run is within the limit, bytes."""
        return CONTEXT_BYTES + peak_bytes * (1.0 + reserve_share(kind_of(run), self._risk))

    def bytes_of(self, kind: LaunchKind) -> float:
        """Return the largest peak allocated within the limit, by kind of plan, bytes."""
        return max(0.0, self._left) / (1.0 + reserve_share(self._own or kind, self._risk))


class RecomputedModules:
    """Recomputation policies as sets of modules.

    Modules are disjoint: bytes and seconds of a policy are sums over its modules.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        sets = [() if word in (NONE, FULL) else tuple(word.split("+")) for word in words]
        self.names = tuple(dict.fromkeys(name for one in sets for name in one))
        self._has = np.array([[name in one for name in self.names] for one in sets], dtype=float)
        self.full = np.array([at for at, word in enumerate(words) if word == FULL], dtype=np.int64)
        """Indices of full-recomputation policies, which are not sums of modules."""

    def sums(self, alone: Sequence[float] | F64) -> F64:
        """Return sums of module values by policy; 0 for no and full recomputation.

        alone : values by module, in the order of `names`.
        """
        found: F64 = self._has @ np.asarray(alone, dtype=np.float64)
        return found


class OffloadBounds:
    """Sets of modules with activation offload; the bytes of a set are the sum over modules."""

    def __init__(self, words: Sequence[str]) -> None:
        """Store the offload sets of an engine except the empty set; words : modules joined by +."""
        self.words = tuple(word for word in words if word != NONE)
        sets = [word.split("+") for word in self.words]
        self.names = cast(
            tuple[OffloadModule, ...], tuple(dict.fromkeys(name for one in sets for name in one))
        )
        self.has = np.array([[name in one for name in self.names] for one in sets], dtype=float)
        """1 if the set contains the module, shape [sets, modules]."""


class OffloadedBytes(NamedTuple):
    """Bytes that modules of a layer offload, per rank and micro-batch."""

    copied: F64
    """Bytes of the tensors, shape [policies, modules, layer types]."""
    blocks: F64
    """Bytes of the device blocks of these tensors, shape [policies, modules, layer types]."""
    leaves: F64
    """`blocks` of all modules, shape [policies, layer types]."""
    padding: float
    """Largest ratio of block bytes to tensor bytes of any module, at least 1."""
    usual: int
    """Index of the layer type with the most layers."""
    freed: F64
    """Block bytes of each set in a layer of that type, ascending, shape [policies, sets]."""
    least: F64
    """Least tensor bytes of such a layer in the sets from an index of `freed` on.

    Shape [policies, sets + 1]; infinite after the last set."""


class StageBytes(NamedTuple):
    """Lower bounds of the allocated bytes of a stage, without activation offload."""

    words: F64
    """Bytes by recomputation policy."""
    blocks: F64
    """Bytes by N of `block N`."""
    live: F64
    """Live micro-batches summed over layers, shape [layer types]."""
    most: float
    """Largest number of live micro-batches of a chunk."""
    forward: float
    """Transient bytes of the forward, in addition to saved activations."""
    kind: int | None
    """Type index of the layer whose backward is first.

    None for PyTorch layers, and on the last stage of models with MTP modules."""


class LayerBytes(Record, eq=False):
    """Bytes and parameters of one layer on a rank, by layer type, for one micro-batch."""

    saved: F64
    """Bytes of saved activations, shape [policies, layer types]."""
    rows: F64
    """`saved`, then no and full recomputation, shape [policies + 2, layer types]."""
    full: F64
    """Bytes of saved activations with full recomputation, shape [layer types]."""
    plain: F64
    """Bytes of saved activations without recomputation, shape [layer types]."""
    static: F64
    """Steady-state bytes of each layer, shape [layer types]."""
    dense: F64
    experts: F64
    """Trained parameters, dense and of experts, shape [layer types]."""
    frozen: F64
    frozen_experts: F64
    """Bytes of unsharded frozen weights, dense and of experts, shape [layer types]."""
    copies: F64
    """Bytes of low-precision copies of weights, shape [layer types]."""

    def without_activations(self, states: StateBytes | F64) -> F64:
        """Return the bytes of one layer without its activations, by layer type.

        states : results of `MemoryBounds.state_bytes`, or an array of them, shape [5, i, 1];
            the result has shape [layer types], or [i, layer types].
        """
        dense, experts, frozen, frozen_experts, copies = states
        found: F64 = (
            self.static
            + dense * self.dense
            + experts * self.experts
            + frozen * self.frozen
            + frozen_experts * self.frozen_experts
            + copies * self.copies
        )
        return found

    def only(self, some: I64) -> LayerBytes:
        """Return these rows of the result of `stacked`."""
        return LayerBytes(**{name: getattr(self, name)[some] for name in self.__struct_fields__})


def stacked(sizes: Sequence[LayerBytes]) -> LayerBytes:
    """Return the bytes of many degrees in arrays whose first axis is that of the degrees."""
    names = LayerBytes.__struct_fields__
    return LayerBytes(**{name: np.array([getattr(one, name) for one in sizes]) for name in names})


class _Layer(NamedTuple):
    """Bytes and parameters of one layer on a rank, for one micro-batch."""

    saved: F64
    """Bytes of saved activations, shape [policies + 2].

    The last two are no and full recomputation."""
    static: float
    dense: float
    experts: float
    frozen: float
    frozen_experts: float
    copies: float


_MIXTURES_ALONE = frozenset({"moe", "moe_act", "shared_experts"})
"""Modules that dense layers do not have."""
_BEFORE_MLP = ("core_attn", "mla_up_proj")
"""Modules before the MLP; their bytes are equal in MoE and dense layers."""
_NOT_HOSTED = frozenset({"mlp", "moe_act", "shared_experts"})
"""Modules whose recomputation does not reduce the offloaded bytes."""
_BESIDE_EXPERTS = ("layernorm", "shared_experts")
"""Modules with bytes that do not depend on the expert sharding."""


class MemoryBounds:
    """Memory bounds of plans with equal degrees, micro-batch size and precision."""

    def __init__(
        self,
        run: Run,
        words: RecomputedModules,
        hosted: OffloadBounds,
        kinds: tuple[int, ...],
        variant: Callable[[int, bool], Run],
        known: dict[object, object],
        states: dict[object, tuple[float, float, float, float]],
    ) -> None:
        """Compute the bytes of one layer of each type.

        run : run with one pipeline stage.
        words : recomputation policies.
        hosted : offload sets.
        kinds : type index of every layer.
        variant : returns the run with a given ZeRO stage, with one micro-batch or with several
        known : cache shared by runs that differ only in expert sharding, dispatcher and TP overlap
        states : cache shared by runs of one precision, as degrees change no bytes per element
        """
        self._run = run
        self._words = words
        self._hosted = hosted
        self._known = known
        self._states = states
        self._variant = variant
        self._layer_of = {kind: layer for layer, kind in reversed([*enumerate(kinds)])}
        self._usual = int(np.bincount(kinds).argmax())
        self._layers = [run.rank_layers[layer] for _, layer in sorted(self._layer_of.items())]
        """One layer of each type."""
        self._torch = run.kernels.torch_layers
        self._fixed: dict[object, float] = {}
        self._forwards: dict[object, float] = {}
        self._tables: dict[object, tuple[float, ...]] = {}
        self._known_ends: dict[StageEnds, int] = {}
        self._bytes_of_ends = np.zeros((0, 8))
        """Results of `_of_ends` by the indices in `_known_ends`."""
        self.sizes = self._sizes()

    def _sizes(self) -> LayerBytes:
        parts = [_parts(at) for at in self._layers]
        layers = {
            one: self._layer(self._layers[kind], self._layer_of[kind])
            for kind, one in reversed([*enumerate(parts)])
        }
        every = [layers[one] for one in parts]
        rows = np.array([one.saved for one in every]).T
        return LayerBytes(
            saved=rows[:-2],
            rows=rows,
            plain=rows[-2],
            full=rows[-1],
            static=np.array([one.static for one in every]),
            dense=np.array([one.dense for one in every]),
            experts=np.array([one.experts for one in every]),
            frozen=np.array([one.frozen for one in every]),
            frozen_experts=np.array([one.frozen_experts for one in every]),
            copies=np.array([one.copies for one in every]),
        )

    def _layer(self, at: RankLayer, number: int) -> _Layer:
        """Return the bytes and parameters of a layer; number : its index in the model."""
        key = ("layer", *self._of_experts(at))
        if key in self._known:
            return cast(_Layer, self._known[key])
        weights = layer_weights(at)
        dense, of_experts = trained_elements(weights)
        frozen, frozen_experts = frozen_weight_bytes(self._run, weights)
        found = _Layer(
            saved=self._by_word(at),
            static=0.0 if self._torch else self._static(number),
            dense=dense,
            experts=of_experts,
            frozen=frozen,
            frozen_experts=frozen_experts,
            copies=copied_bytes(self._run, weights),
        )
        self._known[key] = found
        return found

    def _of_experts(self, at: RankLayer) -> tuple[object, ...]:
        """Return what decides the bytes of a layer among runs with the same `known`, as a key."""
        split = self._run.split
        sharding = (split.ep, split.etp, self._run.runtime.experts.dispatcher)
        return (_parts(at), *(sharding if _is_mixture(at) else ()))

    def _of_activations(self, at: RankLayer) -> tuple[object, ...]:
        """Return what decides the saved activations of a layer, as `_of_experts` does.

        Without adapters, they depend on the expert ranks only by the balance of experts between
        them: that of one rank, of ranks with one expert each, or of others.
        """
        split, experts = self._run.split, at.layer.experts
        if experts is None:
            return (_parts(at),)
        few = self._run.runtime.adapters is None
        balance = (split.ep == 1, split.ep == experts.number) if few else split.ep
        return (_parts(at), balance, split.etp, self._run.runtime.experts.dispatcher)

    def _by_word(self, at: RankLayer) -> F64:
        """Return saved activation bytes of a layer by policy, shape [policies + 2]."""
        key = ("saved", *self._of_activations(at))
        if key not in self._known:
            self._known[key] = self._saved_by_word(at)
        return cast(F64, self._known[key])

    def _saved_by_word(self, at: RankLayer) -> F64:
        plain, full = (self._saved(word, at) for word in (NONE, FULL))
        alone = [self._less(plain, name, at) for name in self._words.names]
        found = np.append(plain - self._words.sums(alone), (plain, full))
        found[self._words.full] = full
        return found

    def _less(self, plain: float, name: str, at: RankLayer) -> float:
        """Return the saved activation bytes of a layer that recomputing one module avoids.

        plain : saved activation bytes of the layer without recomputation.
        """
        mixture = _is_mixture(at)
        if name == "mlp" if mixture else name in _MIXTURES_ALONE:
            return 0.0
        if name not in _BEFORE_MLP + _BESIDE_EXPERTS:
            return plain - self._saved(name, at)
        key = (name, at.layer.mixers) if name in _BEFORE_MLP else (name, _parts(at))
        if key not in self._known:
            self._known[key] = plain - self._saved(name, at)
        return cast(float, self._known[key])

    def _saved(self, word: str, at: RankLayer) -> float:
        """Return the saved activation bytes of a layer under a recomputation policy.

        Tensors are rounded up to allocator blocks, except those of PyTorch layers.
        """
        own = at.recomputing(recomputation_of(word))
        if self._torch:
            return float(torch_layers.layer_saved_bytes(own))
        expandable = self._run.runtime.allocator.expandable
        if word == FULL:
            return float(recycled_bytes(input_bytes(at), expandable=expandable))
        hole = copied_qkv_bytes(own)
        return float(
            sum(
                recycled_bytes(
                    size,
                    expandable=expandable,
                    hole_bytes=hole if name == "dropout mask" else 0,
                )
                for name, size in saved_parts(own)
            )
        )

    def _static(self, number: int) -> float:
        """Return the steady-state buffer bytes of a layer: routing and rotary embedding."""
        chunk = [Chunk(False, (number,), 0, False)]
        found = workspaces.routing_bytes(self._run, chunk)
        if self._has_latent:
            found += workspaces.rotary_bytes(self._run, chunk)
        return float(found)

    @property
    def _has_latent(self) -> bool:
        """True for latent attention, whose layers have a rotary table each."""
        attention = self._run.model.first_attention
        return attention is not None and attention.latent is not None

    @cached_property
    def _again(self) -> float:
        """Lower bound of the net bytes that the backward of a fully recomputed layer allocates."""
        if self._torch:
            return 0.0
        own = replace(self._run, strategy=recomputing(self._run.strategy, "full"))
        found = []
        for kind, number in self._layer_of.items():
            key = ("again", *self._of_experts(self._layers[kind]))
            if key not in self._known:
                made, freed = backward_bytes(own, Chunk(False, (number,), 0, False))
                self._known[key] = float(made - freed)
            found.append(cast(float, self._known[key]))
        return min(found)

    # ----------------------------------------------------------------------------------------------
    # Activation offload

    @cached_property
    def offloaded_activation_bytes(self) -> OffloadedBytes:
        """Offloaded bytes per layer and micro-batch, by policy, module and layer type."""
        key = ("offloaded", *map(self._of_activations, self._layers))
        if key not in self._known:
            copied, blocks = (
                np.stack(every, axis=-1)
                for every in zip(*map(self._gone, self._layers), strict=True)
            )
            some = copied > 0
            of_sets = [one[:, :, self._usual] @ self._hosted.has.T for one in (blocks, copied)]
            order = of_sets[0].argsort(axis=1, kind="stable")
            freed, tensors = (np.take_along_axis(one, order, axis=1) for one in of_sets)
            least = np.minimum.accumulate(tensors[:, ::-1], axis=1)[:, ::-1]
            self._known[key] = OffloadedBytes(
                copied=copied,
                blocks=blocks,
                leaves=blocks.sum(axis=1),
                padding=float((blocks[some] / copied[some]).max(initial=1.0)),
                usual=self._usual,
                freed=freed,
                least=np.pad(least, ((0, 0), (0, 1)), constant_values=np.inf),
            )
        return cast(OffloadedBytes, self._known[key])

    def _gone(self, at: RankLayer) -> tuple[F64, F64]:
        """Return offloaded tensor and block bytes of a layer, each of shape [policies, modules]."""
        key = ("gone", *self._of_activations(at))
        if key in self._known:
            return cast(tuple[F64, F64], self._known[key])
        plain = self._leaves(NONE, at)
        less = [self._leaves_less(plain, name, at) for name in self._words.names]
        found = np.stack(
            [plain[row] - self._words.sums([one[row] for one in less]) for row in (0, 1)]
        )
        # fully recomputed layers save only their input, which is not offloaded
        found[:, self._words.full] = 0.0
        self._known[key] = (found[0], found[1])
        return found[0], found[1]

    def _leaves_less(self, plain: F64, name: str, at: RankLayer) -> F64:
        """Return the offloaded bytes of a layer that recomputing one module avoids.

        plain : (tensor, block) bytes without recomputation
        """
        if name in _NOT_HOSTED or (name == "moe" and not _is_mixture(at)):
            return np.zeros_like(plain)
        if name not in _BEFORE_MLP + _BESIDE_EXPERTS:
            return plain - self._leaves(name, at)
        key = ("gone", name, at.layer.mixers if name in _BEFORE_MLP else _parts(at))
        if key not in self._known:
            self._known[key] = plain - self._leaves(name, at)
        return cast(F64, self._known[key])

    def _leaves(self, word: str, at: RankLayer) -> F64:
        """Return (tensor, block) bytes that a layer offloads under a policy, shape [2, modules]."""
        names = self._hosted.names
        split = replace(at.split, recompute=recomputation_of(word), offload=frozenset(names))
        own = RankLayer(run=at.run, layer=at.layer, split=split)
        expandable = self._run.runtime.allocator.expandable
        found = np.zeros((2, len(names)))
        for _, module, size in offloaded_parts(own):
            place = names.index(module)
            found[:, place] += size, recycled_bytes(size, expandable=expandable)
        return found

    def backward_bytes(self, word: int) -> F64:
        """Return the net bytes that the backward of a layer with offload allocates at least.

        The bytes that it copies back to the device are not included. Shape [layer types].

        word : index of the recomputation policy
        """
        found = [
            self._backward(word, at, self._layer_of[kind]) for kind, at in enumerate(self._layers)
        ]
        return np.array(found)

    def _backward(self, word: int, at: RankLayer, number: int) -> float:
        """Return the same for a layer; number : its index in the model."""
        key = ("backward", word, *self._of_experts(at))
        if key not in self._known:
            # the bytes that are not copied back are the same for every set
            own = run_with_split(
                self._run,
                recompute=recomputation_of(self._words.words[word]),
                offload=frozenset(self._hosted.names),
            )
            made, freed = backward_bytes(own, Chunk(False, (number,), 0, False))
            copied = offloaded_bytes(own.rank_layers[number])
            self._known[key] = float(made - freed - copied)
        return cast(float, self._known[key])

    # ----------------------------------------------------------------------------------------------

    def variant(self, zero: int) -> Run:
        """Return the run with another ZeRO stage."""
        return self._variant(zero, False)

    def state_bytes(
        self, zero: int, replicas: int, expert_replicas: int, *, staged: bool, several: bool
    ) -> StateBytes:
        """Return the state bytes of a rank per trained parameter, and its part of frozen weights.

        replicas, expert_replicas : numbers of ranks that shard the states
        staged, several : True with several pipeline stages, and with several micro-batches
        """
        key = (zero, staged, several)
        if key not in self._states:
            run = self._variant(zero, several)
            found = states_of_run(run, staged=staged, several=several)
            self._states[key] = (*found, *frozen_states_of_run(run))
        whole, shared, frozen, split = self._states[key]
        return StateBytes(
            dense=whole + shared / replicas,
            experts=whole + shared / expert_replicas,
            frozen=frozen + split / replicas,
            frozen_experts=frozen + split / expert_replicas,
            copies=float(zero < 3),
        )

    def of_stages(self, rows: StageRows, *, zero: int, states: StateBytes) -> list[StageBytes]:
        """Return lower bounds of the allocated bytes of stages, one per row.

        zero : ZeRO stage
        states : results of `state_bytes`
        """
        sizes, of_states = self.sizes, np.array([states])
        (words,) = self.many_stages_bytes(rows, (zero,), of_states)
        (fixed,) = self._without_activations(rows, (zero,), of_states, self._of_ends(rows))
        blocks = (fixed + rows.live @ sizes.plain).tolist()
        return [
            StageBytes(
                words=words[at, :-2],
                blocks=blocks[at] - rows.again[at] @ (sizes.plain - sizes.full),
                live=rows.live[at],
                most=float(rows.most[at]),
                forward=self._forward_bytes(ends.forward, ends.head),
                kind=ends.final if self._backward_is_first(ends) else None,
            )
            for at, ends in enumerate(rows.ends)
        ]

    def many_stages_bytes(self, rows: StageRows, zeros: Sequence[int], states: F64) -> F64:
        """Return lower bounds of the allocated bytes of stages, without activation offload.

        The result has shape [shardings, rows, policies + 2], with the policies of
        `LayerBytes.rows`.

        zeros : ZeRO stage of each sharding
        states : results of `state_bytes`, shape [shardings, 5]
        """
        saved = rows.live @ self.sizes.rows.T
        of_ends = self._of_ends(rows)
        saved[:, self._words.full] += of_ends[:, 2:3]
        own = self._without_activations(rows, zeros, states, of_ends)
        found: F64 = own[:, :, None] + saved
        return found

    def _without_activations(
        self, rows: StageRows, zeros: Sequence[int], states: F64, of_ends: F64
    ) -> F64:
        """Return the bytes of stages without saved activations, shape [shardings, rows].

        of_ends : results of `_of_ends`
        """
        own = self.sizes.without_activations(states.T[:, :, None])
        found: F64 = own @ rows.layers.T + of_ends[:, 0] + states @ of_ends[:, 3:].T
        if 3 in zeros and not self._torch:
            # ZeRO-3 gathers the last two layers; the first of them is of any type of the stage
            each = 2.0 * (self.sizes.dense + self.sizes.experts)
            other = np.where(rows.layers > 0, each, np.inf).min(axis=1)
            other[rows.layers.sum(axis=1) < 2] = 0.0
            found += np.equal(zeros, 3)[:, None] * (of_ends[:, 1] + other)
        return found

    def _of_ends(self, rows: StageRows) -> F64:
        """Return the bytes of stages without layers, shape [rows, 8].

        They are buffers with the transient bytes of the forward, weights that ZeRO-3 gathers, bytes
        that full recomputation adds, and the results of `_ends`.
        """
        places = [self._known_ends.get(ends, -1) for ends in rows.ends]
        if -1 in places:
            for ends in {*rows.ends} - self._known_ends.keys():
                forward = self._forward_bytes(ends.forward, ends.head)
                more = max(0.0, self._again - forward) if self._backward_is_first(ends) else 0.0
                one = (
                    self._fixed_bytes(ends) + forward,
                    0.0 if self._torch else self._gathered(ends),
                    more,
                    *self._ends(ends.first, ends.last),
                )
                self._known_ends[ends] = len(self._bytes_of_ends)
                self._bytes_of_ends = np.vstack([self._bytes_of_ends, one])
            places = [self._known_ends[ends] for ends in rows.ends]
        return self._bytes_of_ends[places]

    def _backward_is_first(self, ends: StageEnds) -> bool:
        """Return True if the first backward of a stage is that of its last layer."""
        return not self._torch and not (ends.last and self._run.model.mtp)

    def _gathered(self, ends: StageEnds) -> float:
        """Return the 16-bit weight bytes of a stage that ZeRO-3 gathers at once, at least.

        They are those of embedding, final norm, head and the last layer.
        """
        around = chunk_weights(self._run, Chunk(ends.first, (), 0, ends.last))
        layer = self.sizes.dense[ends.final] + self.sizes.experts[ends.final]
        return 2.0 * float(layer + sum(weight.elements for weight in around))

    def _fixed_bytes(self, ends: StageEnds) -> float:
        """Return the steady-state buffer bytes of a stage, such as workspaces and masks."""
        key = ends[:3]
        if key not in self._fixed:
            self._fixed[key] = self._kept(*key)
        return self._fixed[key]

    def _ends(self, first: bool, last: bool) -> tuple[float, ...]:
        """Return the parameters and other bytes of embedding, head and MTP modules.

        They are in the order of `StateBytes`.
        """
        key = (first, last)
        found = self._tables.get(key)
        if found is None:
            # only plans of Megatron-LM train weights of MTP modules
            mtp = self._run.model.mtp if last and not self._torch else 0
            weights = chunk_weights(self._run, Chunk(first, (), mtp, last))
            frozen, copies = (
                frozen_weight_bytes(self._run, weights),
                copied_bytes(self._run, weights),
            )
            found = (*trained_elements(weights), *frozen, copies)
            self._tables[key] = found
        return found

    @property
    def embedding(self) -> tuple[float, ...]:
        """Parameters and other bytes of the embedding, in the order of `StateBytes`."""
        return self._ends(True, False)

    def _kept(self, present: tuple[bool, ...], first: bool, last: bool) -> float:
        """Return the buffer bytes of a stage with these layer types."""
        run = self._run
        if self._torch:
            return 0.0
        layers = tuple(self._layer_of[kind] for kind in np.flatnonzero(present).tolist())
        chunk = Chunk(first, layers, run.model.mtp if last else 0, last)
        found = (
            workspaces.cublas_bytes(run)
            + workspaces.engine_workspace_bytes(run)
            + workspaces.gather_bytes(run, [chunk])
            + workspaces.overlap_bytes(run)
            + workspaces.dummy_weight_gradient_bytes(run, [chunk_weights(run, chunk)])
            + workspaces.mask_bytes(run, [chunk])
        )
        if not self._has_latent:
            found += workspaces.rotary_bytes(run, [chunk])
        return float(found)

    def _forward_bytes(self, kind: int, has_head: bool) -> float:
        """Return the transient bytes of a forward, in addition to saved activations."""
        key = (kind, has_head)
        found = self._forwards.get(key)
        if found is None:
            run = self._run
            chunk = Chunk(False, (self._layer_of[kind],), 0, False)
            if self._torch:
                # the loss is computed after all activations are saved
                found = (
                    float(torch_layers.loss_bytes(run) + torch_layers.final_bytes(run))
                    if has_head
                    else 0.0
                )
            elif has_head:
                found = float(head_bytes(run, run.model.mtp) + deferred_head_bytes(run))
            else:
                found = float(expert_dispatch_bytes(run, chunk))
            self._forwards[key] = found
        return found


def _parts(at: RankLayer) -> Layer:
    """Return what decides the bytes of a layer: the layer without a sliding window."""
    return without_window(at.layer)


def _is_mixture(at: RankLayer) -> bool:
    return at.layer.experts is not None
