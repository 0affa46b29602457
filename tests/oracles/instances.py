"""Seeded random planning problems, small enough to be solved exhaustively or as integer programs.

Times are whole multiples of 2**-20 s and transfers multiples of six of them, so that every sum
and 2*cbar*(p-1)/p is exact in double precision and equally fast plans tie exactly. `inexact`
instances scale all times by 0.1 and have no meaningful order among equals.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.run.plan import LayerStrategy, VocabStrategy, ZeroDefault
from search.planning.cost.tables import ActivationLayout, PlanTables
from tests.oracles.brute import PlanSpace, StageInstance
from tests.oracles.reference import evaluate

MAX_PLANS = 20_000
_DEFAULTS: tuple[ZeroDefault, ...] = ("ddp", "zero2", "zero1")
WORLD_SIZE = 24
TICK_S = 2.0**-20
GRAIN_BYTES = 1 << 20
TIME_FIELDS = (
    "forward_s",
    "backward_s",
    "tail_s",
    "redistribute_forward_s",
    "redistribute_backward_s",
    "send_s",
    "vocab_forward_s",
    "vocab_backward_s",
    "vocab_tail_s",
)
Rng = np.random.Generator


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """A planning problem with its special features."""

    seed: int
    tables: PlanTables
    budget_bytes: int
    labels: frozenset[str]
    space: PlanSpace | None = None
    """All plans with prices; None if there are too many."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one instance."""

    layers: int
    types: int
    strategies: int
    layouts: int
    vocab: int
    stages: tuple[int, ...]
    """p of every table"""
    candidates: tuple[tuple[int, int], ...]
    """(table, m)"""

    @property
    def num_plans(self) -> int:
        """Return an upper bound of the number of plans."""
        per_division = self.strategies**self.layers * self.vocab
        return sum(
            comb(self.layers - 1, self.stages[n] - 1) * per_division for n, _ in self.candidates
        )


def small_instance(seed: int, *, grains: bool = False) -> Instance:
    """Return a problem of at most 20,000 plans; kinds of problems rotate with the seed.

    With `grains`, bytes are whole grains and the budget lies half a grain off, as a solver with
    tolerances needs.
    """
    rng = np.random.default_rng([seed, 1])
    labels = _labels(rng, seed)
    if grains:
        labels = labels - {"inexact"} | {"grains"}
    least = 1 if seed % 6 == 5 else 1_000  # small problems find errors that large ones hide
    shape = _draw_shape(rng, labels, seed)
    while not least <= shape.num_plans <= MAX_PLANS:
        shape = _draw_shape(rng, labels, seed)
    tables = random_tables(rng, shape, labels)
    space = PlanSpace(tables)
    if space.num_plans == 0:
        labels = (labels - {"binding"}) | {"infeasible", "no legal plan"}
        budget = int(rng.integers(0, 1 << 30))
    else:
        budget = _budget(rng, space, labels)
    if grains:
        budget = budget // GRAIN_BYTES * GRAIN_BYTES + GRAIN_BYTES // 2
    return Instance(
        seed=seed,
        tables=tables,
        budget_bytes=budget,
        labels=frozenset(labels | _facts(tables)),
        space=space,
    )


def large_instance(seed: int) -> Instance:
    """Return a problem for the integer program: 6 to 10 layers, 4 to 6 strategies, p up to 4.

    Bytes are whole grains and the budget lies half a grain off, far outside a solver's tolerance.
    """
    rng = np.random.default_rng([seed, 2])
    labels = _labels(rng, seed) - {"inexact"} | {"grains"}
    p = (1, 2, 3, 4)[seed % 4]
    gpipe = "gpipe" in labels
    candidates = [(0, int(rng.integers(1 if gpipe else p, p + 5)))]
    stages = [p]
    if rng.random() < 0.5:
        stages.append(int(rng.integers(1, 5)))
        candidates.append((1, int(rng.integers(stages[1], stages[1] + 4))))
    shape = Shape(
        layers=int(rng.integers(6, 11)),
        types=int(rng.integers(1, 4)),
        strategies=int(rng.integers(4, 7)),
        layouts=int(rng.integers(2, 4)),
        vocab=int(rng.integers(1, 4)),
        stages=tuple(stages),
        candidates=tuple(candidates),
    )
    tables = random_tables(rng, shape, labels)
    # Memory of random plans shows where a budget binds: the peak of a typical plan is above it.
    peaks = []
    for _ in range(400):
        q = int(rng.integers(len(candidates)))
        n = int(tables.candidate_table[q])
        count = int(tables.table_stages[n])
        cuts = np.sort(rng.permutation(np.arange(1, shape.layers))[: count - 1]).tolist()
        sizes = [b - a for a, b in itertools.pairwise([0, *cuts, shape.layers])]
        ways = [np.flatnonzero(tables.valid[n, k]) for k in tables.layer_type]
        vocab = np.flatnonzero(tables.vocab_valid[n])
        choice = [int(rng.choice(w)) for w in ways]
        peaks.append(evaluate(tables, q, sizes, choice, int(rng.choice(vocab))).peak_bytes)
    share = 0.0 if "infeasible" in labels else float(rng.choice([0.02, 0.1, 0.3, 0.6]))
    budget = int(np.quantile(peaks, share)) // GRAIN_BYTES
    if "infeasible" in labels:
        budget //= 3
    labels -= {"binding"}
    return Instance(
        seed=seed,
        tables=tables,
        budget_bytes=budget * GRAIN_BYTES + GRAIN_BYTES // 2,
        labels=frozenset(labels | _facts(tables)),
    )


def _labels(rng: Rng, seed: int) -> set[str]:
    """Draw the kind of a problem; rotation with the seed guarantees the rare ones."""
    labels = {"gpipe"} if rng.random() < 0.4 else {"1f1b"}
    if seed % 10 == 9:
        labels.add("infeasible")
    elif rng.random() < 0.7:
        labels.add("binding")
    if seed % 4 == 1:
        labels.add("ties")
    elif rng.random() < 0.15:
        labels.add("inexact")
    if rng.random() < 0.35:
        labels.add("triangle")
    if rng.random() < 0.5:
        labels.add("transients")
    if rng.random() < 0.25:
        labels.add("m = p")
    if rng.random() < 0.3:
        labels.add("own vocab layout")
    return labels


def _draw_shape(rng: Rng, labels: set[str], seed: int) -> Shape:
    """Draw sizes; p, the number of strategies and of layers compete for the plans."""
    layers = int(rng.integers(1, 10))
    most = min(4, layers)
    stages = [min(most, 1 + seed % 4)]
    stages += [int(p) for p in rng.integers(1, most + 1, int(rng.integers(0, 3)))]
    wanted: set[tuple[int, int]] = set()
    for n, p in enumerate(stages):
        least = 1 if "gpipe" in labels else p
        for _ in range(int(rng.integers(1, 3))):
            m = p if "m = p" in labels else int(rng.integers(least, least + 6))
            wanted.add((n, m))
    candidates = sorted(wanted)
    rng.shuffle(candidates)
    return Shape(
        layers=layers,
        types=int(rng.integers(1, min(3, layers) + 1)),
        strategies=int(rng.integers(2, 6)) if layers > 1 else int(rng.integers(1, 8)),
        layouts=int(rng.integers(1, 5)),
        vocab=int(rng.integers(1, 4)),
        stages=tuple(stages),
        candidates=tuple(candidates),
    )


def random_tables(rng: Rng, shape: Shape, labels: set[str]) -> PlanTables:
    """Draw tables in which faster strategies tend to need more memory."""
    N, K, S, E = len(shape.stages), shape.types, shape.strategies, shape.vocab
    Y = shape.layouts + ("own vocab layout" in labels)
    ties, many_transients = "ties" in labels, "transients" in labels
    grain = GRAIN_BYTES if "grains" in labels else 1
    p = np.array(shape.stages, dtype=np.int32)
    g = 2 ** rng.integers(0, 3, N).astype(np.int64)
    # work of a micro-batch per rank, and states per rank, grow with p
    load = (g * p).astype(float) * (1.0 if ties else rng.uniform(0.8, 1.2, N))

    def ticks(scale: float, *size: int, step: int = 1) -> NDArray[np.float64]:
        if ties:
            return rng.integers(0, 3, size).astype(float) * 12 * step
        return np.rint(rng.uniform(0.0, scale, size) / step) * step

    def chunks(scale: float, *size: int) -> NDArray[np.int64]:
        if ties:
            return rng.integers(0, 3, size).astype(np.int64) * grain
        top = max(1, int(scale) // grain)
        return rng.integers(0, top + 1, size).astype(np.int64) * grain

    speed = rng.uniform(0.0, 1.0, (1, K, S))  # 0 fast and large, 1 slow and small
    if ties:
        forward = rng.integers(1, 4, (N, K, S)) * 12.0 * load[:, None, None]
        backward = rng.integers(1, 4, (N, K, S)) * 12.0 * load[:, None, None]
        static = rng.integers(1, 5, (2, N, K, S)).astype(np.int64) * grain
        activation = rng.integers(0, 3, (N, K, S)).astype(np.int64) * grain
    else:
        noise = rng.uniform(0.85, 1.15, (4, N, K, S))
        forward = np.rint((1 + speed) * noise[0] * load[:, None, None] * 4000)
        backward = np.rint((2 + speed) * noise[1] * load[:, None, None] * 4000)
        size = (2.2 - 2.0 * speed) * 2.0**28
        static = np.rint(size * noise[2] * p[:, None, None] / grain).astype(np.int64) * grain
        static = np.stack([static, static + chunks(2.0**27, N, K, S)])
        activation = (
            np.rint(size * noise[3] * g[:, None, None] * float(rng.choice([0.1, 0.5])) / grain)
        ).astype(np.int64) * grain

    size_of_move = 1500.0 * float(rng.choice([0.2, 1.0, 4.0]))
    moves = [_redistribution(rng, N, K, Y, size_of_move, labels) for _ in range(2)]
    sizes = 2.0**31 if many_transients else 2.0**26
    vocab_scale = 12_000.0 * float(g.mean())
    tail_scale = 30_000.0 * float(rng.choice([0.1, 1.0, 4.0]))
    strategy_layout = rng.integers(0, shape.layouts, S).astype(np.int32)
    own = "own vocab layout" in labels
    vocab_layout = np.full(E, Y - 1) if own else rng.integers(0, Y, E)
    valid = rng.random((N, K, S)) > (0.12 if rng.random() < 0.5 else 0.0)
    vocab_valid = rng.random((N, E)) > 0.1
    if "grains" in labels:  # never without a plan
        valid[:, :, 0] = vocab_valid[:, 0] = True
    fields: dict[str, Any] = {
        "forward_s": forward,
        "backward_s": backward,
        "tail_s": ticks(tail_scale, N, K, S),
        "static_bytes": static,
        "activation_bytes": activation,
        "transient_bytes": chunks(sizes, 2, N, K, S),
        "shared_bytes": chunks(sizes / 2, N, K, S),
        "vocab_forward_s": ticks(vocab_scale, N, 3, E),
        "vocab_backward_s": ticks(2 * vocab_scale, N, 3, E),
        "vocab_tail_s": ticks(2 * tail_scale, N, 3, E),
        "vocab_static_bytes": chunks(2.0**30, 2, N, 3, E),
        "vocab_activation_bytes": chunks(2.0**29, N, 3, E),
        "vocab_transient_bytes": chunks(2 * sizes, 2, N, 3, E),
        "vocab_shared_bytes": chunks(sizes, N, 3, E),
    }
    _tempt(fields, valid, vocab_valid)
    fields |= {
        "redistribute_forward_s": moves[0],
        "redistribute_backward_s": moves[1],
        "send_s": ticks(6000.0 * float(rng.choice([0.2, 1.0])), N, K, Y, step=6),
        "stage_fixed_bytes": chunks(2.0**29, N, 4),
    }
    unit = TICK_S * (0.1 if "inexact" in labels else 1.0)
    for name in TIME_FIELDS:
        fields[name] = np.ascontiguousarray(fields[name]) * unit
    layer_type = np.concatenate([np.arange(K), rng.integers(0, K, shape.layers - K)])
    layer_type = np.sort(layer_type) if rng.random() < 0.7 else rng.permutation(layer_type)
    return PlanTables(
        world_size=WORLD_SIZE,
        pipeline_type="gpipe" if "gpipe" in labels else "1f1b",
        layer_type=layer_type.astype(np.int32),
        strategies=_distinct_strategies(S),
        layouts=tuple(ActivationLayout(sequence_shards=2**y, cp=1, replicas=1) for y in range(Y)),
        strategy_layout=strategy_layout,
        vocab=tuple(VocabStrategy(tp=2 ** (e // 2), cp=2 ** (e % 2)) for e in range(E)),
        vocab_layout=vocab_layout.astype(np.int32),
        table_stages=p,
        table_microbatch=g,
        table_dp=tuple(_DEFAULTS[n % len(_DEFAULTS)] for n in range(N)),
        valid=valid,
        vocab_valid=vocab_valid,
        candidate_table=np.array([n for n, _ in shape.candidates], dtype=np.int32),
        candidate_microbatches=np.array([m for _, m in shape.candidates], dtype=np.int32),
        **fields,
    )


def hard_tables() -> PlanTables:
    """Return tables whose search takes minutes: 60 layouts on 64 stages."""
    shape = Shape(
        layers=96,
        types=2,
        strategies=12,
        layouts=60,
        vocab=2,
        stages=(64,),
        candidates=((0, 64), (0, 67)),
    )
    return random_tables(np.random.default_rng(3), shape, {"1f1b"})


def _tempt(
    fields: dict[str, Any], valid: NDArray[np.bool_], vocab_valid: NDArray[np.bool_]
) -> None:
    """Make invalid rows look free, so that code which reads them is found."""
    for name, table in fields.items():
        if name.startswith("vocab_"):
            table *= vocab_valid[:, None, :]
        else:
            table *= valid


def _redistribution(
    rng: Rng, N: int, K: int, Y: int, scale: float, labels: set[str]
) -> NDArray[np.float64]:
    """Draw (N, K, Y, Y) ticks: distances on a line, or a table where a detour can be cheaper."""
    ties = "ties" in labels
    if "triangle" not in labels:
        place = rng.integers(0, 3, (N, K, Y)) * 12.0 if ties else rng.uniform(0, scale, (N, K, Y))
        return np.rint(np.abs(place[:, :, :, None] - place[:, :, None, :]))
    table = rng.integers(0, 4, (N, K, Y, Y)) * 12.0
    if not ties:
        table = np.rint(rng.uniform(0, scale, (N, K, Y, Y)) ** 2 / scale)
    if Y >= 3:  # at least one detour that pays
        table[:, :, 0, 2] = table[:, :, 0, 1] + table[:, :, 1, 2] + (12.0 if ties else scale)
    if rng.random() < 0.8:  # staying is mostly free
        table[:, :, np.arange(Y), np.arange(Y)] = 0.0
    return np.asarray(table)


def _distinct_strategies(count: int) -> tuple[LayerStrategy, ...]:
    """Return the first strategies in canonical order."""
    flags = (False, True)
    every = (
        LayerStrategy(tp=t, zero3=z, checkpoint=c)
        for t, z, c in itertools.product((1, 2, 4), flags, flags)
    )
    return tuple(itertools.islice(every, count))


def _budget(rng: Rng, space: PlanSpace, labels: set[str]) -> int:
    """Choose a budget of the wanted kind; corrects `labels` where the kind does not exist."""
    smallest = space.smallest_budget_bytes
    if "infeasible" in labels:
        return smallest - 1 if rng.random() < 0.5 else int(rng.integers(0, max(1, smallest)))
    free = space.optimum(np.iinfo(np.int64).max)
    wanted = evaluate(
        space.tables, free.candidate, free.stage_sizes, free.strategy_index, free.vocab_index
    ).peak_bytes
    if "binding" in labels and smallest < wanted:
        kind = rng.random()
        if kind < 0.2:
            return smallest
        if kind < 0.4:
            return wanted - 1
        return int(smallest + rng.uniform(0, 1) ** 2 * (wanted - 1 - smallest))
    labels.discard("binding")
    return wanted if rng.random() < 0.5 else int(wanted * rng.uniform(1.0, 2.0))


def _facts(tables: PlanTables) -> set[str]:
    """Return the features that the tables themselves show."""
    found = set()
    if len(set(tables.layer_type.tolist())) > 1:
        found.add("several layer types")
    if not tables.valid.all():
        found.add("invalid rows")
    if len(tables.vocab) > 1:
        found.add("several vocabulary strategies")
    if len(tables.candidate_table) > 1:
        found.add("several candidates")
    stages = tables.table_stages[tables.candidate_table]
    if (stages == tables.candidate_microbatches).any():
        found.add("m equals p")
    found |= {f"p={p}" for p in stages.tolist()}
    moves = tables.redistribute_forward_s
    detour = (moves[..., :, :, None] + moves[..., None, :, :]).min(axis=-2)
    if (detour < moves).any():
        found.add("detour pays")
    return found


def stage_instance(seed: int, *, large: bool = False) -> StageInstance:
    """Return a one-stage problem, of at most 20,000 choices unless `large`."""
    rng = np.random.default_rng([seed, 3, large])
    if large:
        L, S = int(rng.integers(8, 15)), int(rng.integers(4, 8))
    else:
        S = int(rng.integers(1, 7))
        most = 12 if S == 1 else int(np.log(MAX_PLANS) / np.log(S))
        L = int(rng.integers(1, min(most, 12) + 1))
    labels = set()
    ties = seed % 4 == 1
    equal_layers = rng.random() < 0.5
    rows = 1 if equal_layers else L
    if ties:
        labels.add("ties")
        time = rng.integers(1, 4, (rows, S)).astype(float)
        memory = rng.integers(0, 4, (rows, S)).astype(float)
        move = rng.integers(0, 3, (rows, S, S)).astype(float)
    else:
        slow = rng.uniform(0, 1, (rows, S))
        noise = rng.uniform(0.9, 1.1, (2, rows, S))
        time = np.rint((1 + slow) * noise[0] * 1e4)
        memory = np.rint((2.2 - 2 * slow) * noise[1] * 1000.0)
        move = np.rint(rng.uniform(0, 1, (rows, S, S)) ** 2 * float(rng.choice([500, 5000])))
    if rng.random() < 0.7:
        move[:, np.arange(S), np.arange(S)] = 0.0
    layout = rng.integers(0, max(1, S - 1), S)  # strategies of one layout move alike
    move = move[:, layout][:, :, layout] if rng.random() < 0.5 else move
    transient = None
    if rng.random() < 0.5:
        labels.add("transients")
        top = 4 if ties else int(memory.sum() * (L / rows) / 2) + 1
        transient = rng.integers(0, top, (rows, S)).astype(float)
        transient = np.repeat(transient, L // rows, axis=0)
    time, memory, move = (np.repeat(a, L // rows, axis=0) for a in (time, memory, move))
    if rng.random() < 0.5:
        move[0] = 0.5  # never charged, whatever it holds
    low, high = memory.min(axis=1).sum(), memory.max(axis=1).sum()
    if transient is not None:
        high += transient.max()
    budget = float(rng.integers(int(low), int(high) + 1))
    if seed % 10 == 9:
        labels.add("infeasible")
        budget = low - 1.0
    grain = float(GRAIN_BYTES)
    return StageInstance(
        seed=seed,
        time_s=np.ascontiguousarray(time * TICK_S),
        memory_bytes=np.ascontiguousarray(memory * grain),
        transition_s=np.ascontiguousarray(move * TICK_S),
        budget_bytes=budget * grain,
        transient_bytes=None if transient is None else np.ascontiguousarray(transient * grain),
        labels=frozenset(labels),
    )
