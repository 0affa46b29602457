"""Memory of a row against the page's formulas written out with plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar.price.oom_risk import PEAK_RATIOS, probability_of_ratio
from autopar.rates.measured import COMMUNICATOR_BYTES
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.planning.cost.memory import reserve_of, to_bytes
from search.planning.cost.model import CostModel
from search.planning.cost.state_layouts import Recipe
from search.planning.layered.prediction import predict
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec

N = 3_000_000
TOKENS = 1024 * 512 * 2
BACKWARD = 5 * TOKENS
"""What one sample's backward needs by the rule of a plain MLP four times as wide as the layer."""
SPLIT = BACKWARD * 7 // 10
"""The same on two ranks with sequence parallelism: 1 + 5/2, since a gradient is gathered."""
MATRIX = 512 * 2048
"""Parameters of the MLP's last matrix, whose gradient is there when a backward begins."""


def row(
    strategy: LayerStrategy,
    *,
    samples: int = 16,
    stages: int = 1,
    default: Any = "ddp",
    estimated: bool = False,
    **options: Any,
) -> dict[str, list[int]]:
    """Return bytes of the only row by category, [m == 1, m > 1]."""
    # the numbers below are of the recipe 2 + 2 + 12
    base = {"time_profile_mode": "batch", "fp32_gradients": False}
    settings = SearchOptions(**{**base, **options})
    model = CostModel(
        toy_spec(),
        toy_model(sequence_parallel=settings.sequence_parallel),
        toy_hardware(estimated=estimated),
        settings,
    )
    rows = model.layer_rows(0, [strategy], [(stages, samples, default)])
    assert rows.valid[0, 0]
    return {
        "states": rows.states[:, 0, 0].tolist(),
        "activations": [int(rows.activations[0, 0])],
        "transient": rows.transient[:, 0, 0].tolist(),
        "shared": [int(rows.shared[0, 0])],
    }


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({}, (2, 4, 12, 2)),
        ({"mixed_precision": "fp16"}, (2, 4, 12, 2)),
        ({"fp32_gradients": False}, (2, 2, 12, 2)),
        ({"mixed_precision": "fp32"}, (4, 4, 8, 4)),
    ],
)
def test_recipes(options: dict[str, Any], recipe: tuple[int, ...]) -> None:
    """Bytes of weights, gradients, optimizer states and activation elements."""
    found = Recipe.of(SearchOptions(**options))

    assert (found.weight, found.gradient, found.optimizer, found.element) == recipe
    assert found.step_bytes == (26 if recipe[1] == 2 else 28)


@pytest.mark.parametrize(
    ("strategy", "default", "options", "states"),
    [
        (LayerStrategy(), "ddp", {}, [16 * N, 16 * N]),
        (LayerStrategy(tp=4), "ddp", {}, [4 * N, 4 * N]),
        (LayerStrategy(tp=4, ulysses=True), "ddp", {}, [16 * N, 16 * N]),
        (LayerStrategy(), "zero2", {}, [2 * N + 12 * N // 8, 4 * N + 12 * N // 8]),
        (
            LayerStrategy(),
            "zero2",
            {"async_grad_reduce": False},
            [2 * N + 12 * N // 8, 2 * N + 14 * N // 8],
        ),
        (LayerStrategy(), "zero1", {}, [4 * N + 12 * N // 8, 4 * N + 12 * N // 8]),
        (
            LayerStrategy(),
            "zero1",
            {"async_grad_reduce": False},
            [4 * N + 12 * N // 8, 4 * N + 12 * N // 8],
        ),
        (LayerStrategy(zero3=True), "zero1", {}, [14 * N // 8, 2 * N + 14 * N // 8]),
        (LayerStrategy(zero3=True), "zero2", {}, [14 * N // 8, 2 * N + 14 * N // 8]),
        (LayerStrategy(zero3=True), "ddp", {"async_grad_reduce": False}, [14 * N // 8, 2 * N]),
        (LayerStrategy(tp=2, ulysses=True, zero3=True), "ddp", {"async_grad_reduce": False},
         [14 * N // 8, 2 * N]),
        (LayerStrategy(), "ddp", {"fp32_gradients": True}, [18 * N, 18 * N]),
        (LayerStrategy(), "ddp", {"mixed_precision": "fp32"}, [16 * N, 16 * N]),
    ],
)  # fmt: skip
def test_states(
    strategy: LayerStrategy, default: str, options: dict[str, Any], states: list[int]
) -> None:
    """Exact ZeRO shares; full gradients while several micro-batches accumulate.

    Those of the only micro-batch appear where its activations, which are more, have gone.
    """
    assert row(strategy, default=default, **options)["states"] == states


def test_sharded_gradients_of_one_micro_batch_beside_few_activations() -> None:
    """Of 4*N/8 bytes 1 MB of a checkpoint are gone by then, and the rest is added."""
    strategy = LayerStrategy(zero3=True, checkpoint=True)
    found = row(strategy, samples=8, mixed_precision="fp32")

    assert found["activations"] == [1_000_000]
    assert found["states"][0] == (4 + 8) * N // 8 + (4 * N // 8 - 1_000_000)
    assert found["states"][1] == (4 + 8) * N // 8 + 4 * N


def test_a_layer_that_keeps_little_has_its_peak_when_its_gradients_are_reduced() -> None:
    """Whole sums: the buffer and the share that comes out of it, less 1 MB that is gone.

    With one micro-batch the next layer begins beside the buffer, which is more.
    """
    model = toy_model()
    memory = replace(
        model.layers[0].memory[1024],
        activation_bytes_per_sample={1: 1e6},
        backward_bytes_per_sample={1: 1e5},
    )
    model = replace(model, layers=(replace(model.layers[0], memory={1024: memory}),))
    options = SearchOptions(time_profile_mode="batch")
    cost = CostModel(toy_spec(), model, toy_hardware(), options)
    rows = cost.layer_rows(0, [LayerStrategy(zero3=True)], [(1, 8, "ddp")])
    share = 4 * N // 8

    input_and_gradient = 2 * TOKENS
    # what is gone makes room for the share first
    assert rows.states[0, 0, 0] == 14 * N // 8 + share - 1_000_000
    assert rows.transient[:, 0, 0].tolist() == [
        100_000 + 2 * N + 2 * MATRIX + 4 * N,
        4 * N + share + input_and_gradient - 1_000_000,
    ]


@pytest.mark.parametrize(
    ("strategy", "default", "options", "transient"),
    [
        (LayerStrategy(), "ddp", {}, [0, 0]),
        (LayerStrategy(), "zero2", {}, [0, 0]),
        (LayerStrategy(), "zero2", {"async_grad_reduce": False}, [0, 0]),
        (LayerStrategy(zero3=True), "ddp", {}, [2 * N, 2 * N]),
        (LayerStrategy(zero3=True), "ddp", {"fp32_gradients": True}, [2 * N, 2 * N]),
        (LayerStrategy(zero3=True), "ddp", {"async_grad_reduce": False}, [2 * N, 2 * N]),
        # 8 data ranks: 2 samples of 8 MB are recomputed; 2 tensor ranks: 4 samples of 4.5 MB.
        (LayerStrategy(checkpoint=True), "ddp", {}, [16_000_000] * 2),
        (LayerStrategy(tp=2, checkpoint=True), "ddp", {}, [18_000_000] * 2),
        (
            LayerStrategy(zero3=True, checkpoint=True),
            "ddp",
            {},
            # 2 MB of checkpoints are gone when the next layer begins beside the buffer of this one,
            # and its share of gradients has come
            [16_000_000 + 2 * N + (2 * N - (2_000_000 - 2 * N // 8)), 16_000_000 + 2 * N],
        ),
    ],
)
def test_transient(
    strategy: LayerStrategy, default: str, options: dict[str, Any], transient: list[int]
) -> None:
    """When a backward begins: gathered weights, the first gradient, recomputed and backward bytes.

    Of two gathered layers one is shared: it may be there beside the loss, too.
    """
    backward = 2 * BACKWARD if strategy.tp == 1 else 4 * SPLIT
    gradient = 2 * MATRIX // strategy.tp
    prefetched = 2 * N if strategy.zero3 else 0
    found = row(strategy, default=default, **options)

    assert found["transient"] == [value + backward + gradient for value in transient]
    assert found["shared"] == [prefetched + (4 * TOKENS if strategy.tp > 1 else 0)]


@pytest.mark.parametrize(
    ("strategy", "options", "units", "gradient"),
    [
        (LayerStrategy(), {}, 2 * 5, 2),
        (LayerStrategy(), {"mixed_precision": "fp32"}, 2 * 5 * 2, 4),
        (LayerStrategy(cp=2), {}, 4 * 5 / 2, 2),
        (LayerStrategy(tp=4), {}, 8 * (1 + 5 / 4), 2 / 4),
        (LayerStrategy(tp=4), {"sequence_parallel": False}, 8 * 2, 2 / 4),
        (LayerStrategy(tp=2), {"sequence_parallel": False}, 4 * (1 + 4 / 2), 2 / 2),
        (LayerStrategy(tp=4, ulysses=True), {}, 8 * 5 / 4, 2),
    ],
)
def test_the_backward_of_a_layer_is_transient(
    strategy: LayerStrategy, options: dict[str, Any], units: float, gradient: float
) -> None:
    """Of the samples of one micro-batch, by the rule of `autopar.rates.model`.

    With the gradient of the MLP's last matrix, as autograd makes it before it is summed.
    """
    found = row(strategy, **options)["transient"]

    assert found == [units * TOKENS + gradient * MATRIX] * 2


def test_a_gated_mlp_sums_one_gradient_before_it_needs_another() -> None:
    """So replicas have the larger of both, where shards keep the first until they are reduced."""
    spec = toy_spec(gated_mlp=True)
    cost = CostModel(spec, toy_model(), toy_hardware(), SearchOptions(time_profile_mode="batch"))
    layers = [LayerStrategy(), LayerStrategy(zero3=True)]
    replica, shard = cost.layer_rows(0, layers, [(1, 16, "ddp")]).transient[1, 0].tolist()
    needs = 2 * (1 + 2 * 4) * TOKENS  # two samples: what comes in, and twice the MLP's width
    inner = 2 * 4 * TOKENS

    assert replica == needs + max(2 * MATRIX - inner, 0)
    assert shard == needs + 2 * MATRIX + 2 * N


@pytest.mark.parametrize(
    ("strategy", "sequence_parallel", "activations"),
    [
        (LayerStrategy(), True, 2 * 8_000_000),
        (LayerStrategy(tp=2), True, 4 * 4_500_000),
        (LayerStrategy(tp=8), True, 16 * 1_250_000),  # derived: 2.5 MB at tp=4, over 2
        (LayerStrategy(tp=4, ulysses=True), True, 8 * 2_000_000),
        (LayerStrategy(cp=4), True, 8 * 2_000_000),
        (LayerStrategy(tp=2, cp=2), True, 8 * 2_250_000),
        (LayerStrategy(tp=4, checkpoint=True), True, 8 * 250_000),
        (LayerStrategy(tp=4, checkpoint=True), False, 8 * 1_000_000),
        (LayerStrategy(tp=4, ulysses=True, checkpoint=True), False, 8 * 250_000),
        (LayerStrategy(tp=2, cp=2, checkpoint=True), True, 8 * 250_000),
    ],
)
def test_activations(strategy: LayerStrategy, sequence_parallel: bool, activations: int) -> None:
    """What one micro-batch of 16 samples over 8 ranks keeps."""
    found = row(strategy, sequence_parallel=sequence_parallel)["activations"]

    assert found == [activations]


def test_a_missing_degree_without_sequence_parallelism_is_illegal() -> None:
    """Activations at tp=8 were not measured and cannot be derived without SP."""
    model = CostModel(
        toy_spec(), toy_model(sequence_parallel=False), toy_hardware(),
        SearchOptions(sequence_parallel=False),
    )  # fmt: skip
    rows = model.layer_rows(
        0, [LayerStrategy(tp=8), LayerStrategy(tp=8, ulysses=True)], [(1, 8, "ddp")]
    )

    assert rows.valid.tolist() == [[False, True]]
    assert np.isinf(rows.forward_s[0, 0])
    assert any("degree 8" in note for note in model.notes)


@pytest.mark.parametrize(
    ("strategy", "options", "shared"),
    [
        (LayerStrategy(), {}, 0),
        (LayerStrategy(tp=4), {}, 8 * TOKENS),
        (LayerStrategy(tp=2, cp=2), {}, 8 * TOKENS // 2),
        (LayerStrategy(tp=4), {"global_memory_buffer": False}, 0),
        (LayerStrategy(tp=4, ulysses=True), {}, 0),
        (LayerStrategy(tp=4), {"sequence_parallel": False}, 0),
        (LayerStrategy(tp=4), {"sequence_parallel": False, "stages": 2}, 2 * 3 * 4 * TOKENS),
        (LayerStrategy(), {"estimated": True}, COMMUNICATOR_BYTES),
        (LayerStrategy(tp=4), {"estimated": True}, 2 * COMMUNICATOR_BYTES + 8 * TOKENS),
        (LayerStrategy(tp=2, cp=2), {"estimated": True, "global_memory_buffer": False},
         3 * COMMUNICATOR_BYTES),
        (LayerStrategy(tp=8, ulysses=True), {"estimated": True}, COMMUNICATOR_BYTES),
    ],
)  # fmt: skip
def test_shared(strategy: LayerStrategy, options: dict[str, Any], shared: int) -> None:
    """Gather buffer, replicated receive buffers, communicators of estimated hardware."""
    assert row(strategy, **options)["shared"] == [shared]


@pytest.mark.parametrize("estimated", [False, True])
def test_stage_fixed(estimated: bool) -> None:
    """Receive buffers: none on the only stage, one at the ends, two in the middle."""
    model = CostModel(toy_spec(), toy_model(), toy_hardware(estimated=estimated), SearchOptions())
    tables = model.tables([LayerStrategy()], [], [(1, 16, "ddp"), (4, 16, "ddp")], [], "1f1b")
    base = 16 * 4 // 8 * TOKENS
    world, pipeline = (COMMUNICATOR_BYTES, COMMUNICATOR_BYTES) if estimated else (0, 0)

    assert tables.stage_fixed_bytes[0, 0] == world
    assert tables.stage_fixed_bytes[1].tolist()[1:] == [
        base + world + pipeline,
        2 * base + world + pipeline,
        base + world + pipeline,
    ]


def test_bytes_are_rounded_up() -> None:
    """Memory is never understated, and float noise does not add a byte."""
    assert to_bytes(np.array([1.2, 3.0000000001, 5.0])).tolist() == [2, 3, 5]


def test_reserved() -> None:
    """A share of what is allocated and a context; the share is what odds of 1 % want."""
    given = reserve_of(SearchOptions(reserve_fraction=0.0, context_bytes=7), toy_spec())
    assert given.reserved_bytes(1000) == 1007
    found = reserve_of(SearchOptions(memory_of="megatron"), toy_spec())
    assert probability_of_ratio(1 + found.share, PEAK_RATIOS["dense"]) == pytest.approx(0.01)
    # measured runs are of Megatron-LM
    other = reserve_of(SearchOptions(), toy_spec())
    assert probability_of_ratio(1 + other.share, PEAK_RATIOS["few runs"]) == pytest.approx(0.01)
    assert other.share > found.share + 0.01
    # reserved over allocated: 1.04, 9 of 10 within 1.02 to 1.11; the error of peaks is on top
    deviation = np.log(1.11 / 1.02) / (2 * 1.6448536)
    alone = np.exp(np.log(1.04) + 2.3263479 * deviation) - 1
    assert alone + 0.02 < found.share < alone + 0.06
    assert found.reserved_bytes(2**36) == pytest.approx(2**36 * (1 + found.share) + 2**30, abs=2)


@pytest.mark.parametrize("risk", [0.001, 0.01, 0.2, 0.49])
def test_the_largest_budget_has_the_odds_that_were_asked_for(risk: float) -> None:
    """A plan that fills it runs out of memory with them, one byte more with more."""
    reserve = reserve_of(SearchOptions(oom_risk=risk), toy_spec())
    for memory in (2**34, 24 * 2**30 + 1, 80 * 10**9):
        budget = reserve.budget_bytes(memory)
        assert reserve.reserved_bytes(budget) <= memory < reserve.reserved_bytes(budget + 1)
        assert reserve.oom_probability(budget, memory) == pytest.approx(risk, rel=1e-4)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("zero3", [False, True])
def test_without_the_shared_buffer_the_gathered_input_is_transient(
    zero3: bool, checkpoint: bool
) -> None:
    """b*S*h*e/c is needed either way; Ulysses, one rank and no SP gather nothing."""
    strategy = LayerStrategy(tp=2, cp=2, zero3=zero3, checkpoint=checkpoint)
    on, off = row(strategy), row(strategy, global_memory_buffer=False)
    gathered = 8 * 1024 * 512 * 2 // 2  # 16 samples over 2 data ranks

    prefetched = 2 * N // 2 if zero3 else 0
    assert on["shared"] == [gathered + prefetched]
    assert off["shared"] == [prefetched]
    assert [x - y for x, y in zip(off["transient"], on["transient"], strict=True)] == [gathered] * 2
    for other in (LayerStrategy(), LayerStrategy(tp=2, ulysses=True)):
        assert row(other, global_memory_buffer=False) == row(other)
    assert row(strategy, sequence_parallel=False, global_memory_buffer=False) == row(
        strategy, sequence_parallel=False
    )


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("strategy", [LayerStrategy(tp=2), LayerStrategy(tp=2, checkpoint=True)])
def test_turning_the_shared_buffer_off_never_lowers_a_stage(
    strategy: LayerStrategy, num_stages: int
) -> None:
    """What the buffer held is still needed while a layer, or the head, runs."""
    plan = Plan(
        world_size=8,
        num_stages=num_stages,
        stage_sizes=(4 // num_stages,) * num_stages,
        layers=(strategy,) * 4,
        vocab=VocabStrategy(tp=2),
        global_batch=32,
        num_microbatches=4,
    )

    def stages(buffer: bool) -> list[int]:
        options = SearchOptions(time_profile_mode="batch", global_memory_buffer=buffer)
        model = CostModel(toy_spec(), toy_model(), toy_hardware(), options)
        return [s.allocated_bytes for s in predict(model, plan, 2.0**40).stages]

    on, off = stages(True), stages(False)
    assert len(on) == num_stages
    assert all(x >= y for x, y in zip(off, on, strict=True))


def test_the_shared_buffer_stays_while_other_layers_have_their_peak() -> None:
    """So a stage of unlike layers is smaller without it, by the buffer; a uniform one is not."""
    gathered = 4 * 1024 * 512 * 2  # samples of a rank, tokens, hidden size, bytes

    def allocated(buffer: bool, *layers: LayerStrategy) -> int:
        plan = Plan(
            world_size=8,
            num_stages=1,
            stage_sizes=(4,),
            layers=layers,
            vocab=VocabStrategy(),
            global_batch=16,
            num_microbatches=1,
        )
        options = SearchOptions(time_profile_mode="batch", global_memory_buffer=buffer)
        model = CostModel(toy_spec(), toy_model(), toy_hardware(), options)
        (stage,) = predict(model, plan, 2.0**40).stages
        return stage.allocated_bytes

    gathers, keeps_less = LayerStrategy(tp=2), LayerStrategy(checkpoint=True)
    saved = [
        allocated(True, *layers) - allocated(False, *layers)
        for layers in ((gathers,) * 4, (gathers, gathers, keeps_less, keeps_less))
    ]
    assert saved[1] == gathered
    assert saved[0] <= saved[1]
