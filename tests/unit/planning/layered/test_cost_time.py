"""Time of a row, category by category, against the formulas written out with plain numbers."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.records import replace
from autopar.run.plan import LayerStrategy
from search.planning.cost.model import CostModel
from search.planning.cost.tables import LayerRows
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec

BUS = 100e9  # bytes/s of every group of `toy_hardware` in one node
K = 1.2
TOKENS = 1024 * 512 * 2.0  # S*h*e bytes of a sample
N = 3_000_000.0
ATTENTION = 2.0 * 1024**2 * 512
SHARE = ATTENTION / (ATTENTION + 2.0 * 1024 * (4 * 512**2 + 2 * 512 * 2048))


def row(
    strategy: LayerStrategy,
    *,
    samples: int = 16,
    stages: int = 1,
    default: Any = "ddp",
    spec: Any = None,
    hardware: Any = None,
    **options: Any,
) -> dict[str, float]:
    """Return seconds of the only row of one layer by category, forward and backward apart."""
    # the numbers below are of the recipe 2 + 2 + 12
    base = {"time_profile_mode": "batch", "fp32_gradients": False}
    settings = SearchOptions(**{**base, **options})
    model = CostModel(
        spec or toy_spec(),
        toy_model(sequence_parallel=settings.sequence_parallel),
        hardware or toy_hardware(),
        settings,
    )
    rows: LayerRows = model.layer_rows(0, [strategy], [(stages, samples, default)])
    assert rows.valid[0, 0]
    parts = {f"f_{name}": float(values[0, 0]) for name, values in rows.forward.items()}
    parts |= {f"g_{name}": float(values[0, 0]) for name, values in rows.backward.items()}
    return parts | {name: float(values[0, 0]) for name, values in rows.step.items()}


def overlap(x: float, y: float) -> float:
    """Return the formula in plain numbers."""
    return min(K * min(x, y) + abs(x - y), x + y)


def gather(num_bytes: float, size: int) -> float:
    """Return an all-gather, reduce-scatter or all-to-all in one node."""
    return (size - 1) / size * num_bytes / BUS


def test_data_parallel() -> None:
    """b = 2: F = 1 + 4 ms; AR(2N) hides in the backward, its exposed part is the tail."""
    found = row(LayerStrategy())
    sync = 2 * gather(2 * N, 8)

    assert found["f_forward"] == pytest.approx(5e-3)
    assert found["g_backward"] == pytest.approx(10e-3)
    assert found["tail"] == pytest.approx(overlap(10e-3, sync) - 10e-3)
    assert found["optimizer"] == pytest.approx(26 * N / 1e12)
    assert sum(found.values()) == pytest.approx(15e-3 + found["tail"] + found["optimizer"])


def test_zero2_reduces_half_and_gathers_under_the_next_forward() -> None:
    """RS(2N) in the backward, AG(2N) under the next forward, optimizer on an eighth."""
    found = row(LayerStrategy(), default="zero2")
    message = gather(2 * N, 8)
    tail = overlap(10e-3, message) - 10e-3 + overlap(5e-3, message) - 5e-3

    assert found["tail"] == pytest.approx(tail)
    assert found["optimizer"] == pytest.approx(26 * N / 8 / 1e12)
    assert found["f_zero3"] == found["g_zero3"] == 0.0


def test_zero3_gathers_twice() -> None:
    """AG(2N) in forward and backward of every micro-batch, RS(2N) once, on top of the gather."""
    found = row(LayerStrategy(zero3=True))
    message = gather(2 * N, 8)

    assert found["f_zero3"] == pytest.approx(overlap(5e-3, message) - 5e-3)
    assert found["g_zero3"] == pytest.approx(overlap(10e-3, message) - 10e-3)
    assert found["tail"] == pytest.approx(overlap(10e-3, 2 * message) - overlap(10e-3, message))


def test_reduction_in_every_microbatch() -> None:
    """`--no-async-grad-reduce` moves the reduction from the tail into the backward."""
    once = row(LayerStrategy(), default="zero2")
    every = row(LayerStrategy(), default="zero2", async_grad_reduce=False)
    message = gather(2 * N, 8)

    assert every["g_sync"] == pytest.approx(overlap(10e-3, message) - 10e-3)
    assert every["tail"] == pytest.approx(overlap(5e-3, message) - 5e-3)
    assert once["tail"] == pytest.approx(every["g_sync"] + every["tail"])
    assert once["g_sync"] == 0.0


def test_fp32_gradients_and_fp32_training_change_messages() -> None:
    """Gradients of 4 bytes double the reduction; fp32 doubles activations as well."""
    plain = row(LayerStrategy(tp=8), tp_overlap=False)
    wide = row(LayerStrategy(zero3=True), fp32_gradients=True)
    full = row(LayerStrategy(tp=8), tp_overlap=False, mixed_precision="fp32")

    assert wide["tail"] == pytest.approx(
        overlap(10e-3, gather(6 * N, 8)) - overlap(10e-3, gather(2 * N, 8))
    )
    assert wide["optimizer"] == pytest.approx(28 * N / 8 / 1e12)
    assert full["f_tp"] == pytest.approx(2 * plain["f_tp"])


def test_tensor_parallel_with_sequence_parallelism() -> None:
    """t = 4, d = 2, b = 8: forward 2 AG + 2 RS; backward 2 AG exposed and two windows."""
    found = row(LayerStrategy(tp=4))
    one = gather(8 * TOKENS, 4)
    forward = 1e-3 + 16e-3 / 4
    window = forward * 0.5

    assert found["f_forward"] == pytest.approx(forward)
    assert found["f_tp"] == pytest.approx(4 * one)
    exposed = 2 * one + 2 * (overlap(window, 2 * one) - window)
    assert found["g_tp"] == pytest.approx(exposed)
    sync = 2 * gather(2 * N / 4, 2)
    busy = 2 * forward
    apart = busy + 2 * (overlap(window, 2 * one) - window)
    assert found["tail"] == pytest.approx(max(0.0, overlap(busy, 4 * one + sync) - apart))


def test_tensor_parallel_message_longer_than_its_window() -> None:
    """A slow network: what does not fit into the windows is exposed."""
    slow = toy_hardware(
        allreduce_bytes_per_s={(g, c): 1e9 for g in (2, 4, 8) for c in (True, False)}
    )
    found = row(LayerStrategy(tp=4), hardware=slow)
    one = 0.75 * 8 * TOKENS / 1e9
    forward = 5e-3
    window = forward * 0.5
    assert 2 * one > window
    apart = 2 * forward + 2 * (overlap(window, 2 * one) - window)
    assert found["g_tp"] == pytest.approx(
        2 * one + max(apart, overlap(2 * forward, 4 * one)) - 2 * forward
    )


def test_tensor_parallel_without_overlap_exposes_all() -> None:
    """`--no-tp-overlap`: 6 messages exposed in the backward, 10 with checkpointing."""
    one = gather(8 * TOKENS, 4)

    assert row(LayerStrategy(tp=4), tp_overlap=False)["g_tp"] == pytest.approx(6 * one)
    assert row(LayerStrategy(tp=4, checkpoint=True), tp_overlap=False)["g_tp"] == pytest.approx(
        10 * one
    )


def test_tensor_parallel_without_sequence_parallelism() -> None:
    """2 AR forward exposed; 2 AR in one window in the backward."""
    found = row(LayerStrategy(tp=4), sequence_parallel=False)
    two = 2 * 2 * gather(8 * TOKENS, 4)
    window = 5e-3 * 0.5

    assert found["f_tp"] == pytest.approx(two)
    assert found["g_tp"] == pytest.approx(overlap(window, two) - window)


def test_cross_attention_has_three_blocks() -> None:
    """A decoder layer of an encoder-decoder model communicates once more each way."""
    spec = toy_spec(cross_attention=True)

    assert row(LayerStrategy(tp=4), spec=spec)["f_tp"] == pytest.approx(6 * gather(8 * TOKENS, 4))


def test_checkpoint_adds_forward_and_its_communication() -> None:
    """F and the forward's messages again; no third parameter gather."""
    plain = row(LayerStrategy(tp=4, zero3=True))
    again = row(LayerStrategy(tp=4, zero3=True, checkpoint=True))

    assert again["g_recompute"] == pytest.approx(again["f_forward"])
    assert again["g_tp"] == pytest.approx(plain["g_tp"] + plain["f_tp"])
    assert again["f_zero3"] == plain["f_zero3"]


@pytest.mark.parametrize(("kv_heads", "scale"), [(8, 1.0), (4, 0.5), (2, 0.5)])
def test_ulysses(kv_heads: int, scale: float) -> None:
    """4 all-to-alls each way of V/t, k and v scaled by max(kv_heads, t)/heads; z = d*t."""
    found = row(LayerStrategy(tp=4, ulysses=True), spec=toy_spec(num_kv_heads=kv_heads))
    one = gather(8 * TOKENS / 4, 4)

    assert found["f_ulysses"] == pytest.approx(2 * one + 2 * scale * one)
    assert found["g_ulysses"] == pytest.approx(found["f_ulysses"])
    assert found["f_tp"] == found["g_tp"] == 0.0
    assert found["tail"] == pytest.approx(overlap(10e-3, 2 * gather(2 * N, 8)) - 10e-3)


def test_ulysses_moves_heads_not_the_hidden_size() -> None:
    """Heads four times as wide together as the model's width (t5-3b): four times the bytes."""
    strategy = LayerStrategy(tp=4, ulysses=True)
    plain = row(strategy)
    wide = row(strategy, spec=toy_spec(head_dim=256))
    unknown = row(strategy, spec=toy_spec(num_heads=None, num_kv_heads=None))

    assert wide["f_ulysses"] == pytest.approx(4 * plain["f_ulysses"])
    assert wide["g_ulysses"] == pytest.approx(4 * plain["g_ulysses"])
    assert unknown["f_ulysses"] == pytest.approx(plain["f_ulysses"])


def test_ring() -> None:
    """c = 4, b = 8: three exchanges forward; three doubled and a single one backward."""
    slow = toy_hardware(
        allreduce_bytes_per_s={(g, c): 1e9 for g in (2, 4, 8) for c in (True, False)}
    )
    found = row(LayerStrategy(cp=4), hardware=slow)
    exchange = 2 * 8 * (1024 / 4) * 512 * 2.0 / 1e9
    step = 8 * 2e-3 * SHARE / 4 / 4
    back = 2 * step

    assert found["f_cp"] == pytest.approx(3 * (overlap(step, exchange) - step))
    assert found["g_cp"] == pytest.approx(
        3 * (overlap(back, 2 * exchange) - back) + overlap(back, exchange) - back
    )


def test_gathered_keys_and_values_are_exposed() -> None:
    """c = 4, b = 8: an all-gather of k and v forward; again and a reduce-scatter backward."""
    found = row(LayerStrategy(cp=4), cp_kind="all-gather")
    gather = 3 / 4 * 2 * 8 * 1024 * 512 * 2.0 / BUS

    assert found["f_cp"] == pytest.approx(gather)
    assert found["g_cp"] == pytest.approx(2 * gather)


def test_ring_without_known_attention_is_exposed() -> None:
    """Unknown heads: no window, the exchanges are exposed, and the plan says so."""
    spec = toy_spec(num_heads=None, num_kv_heads=None)
    exchange = 2 * 8 * (1024 / 4) * 512 * 2.0 / BUS

    assert row(LayerStrategy(cp=4), spec=spec)["f_cp"] == pytest.approx(3 * exchange)


def test_groups_follow_the_rank_order() -> None:
    """2 nodes of 8: tp inside a node is fast, its data group crosses; strided tp the reverse."""
    hardware = toy_hardware(num_nodes=2)
    near = row(LayerStrategy(tp=8), hardware=hardware, tp_overlap=False)
    far = row(LayerStrategy(tp=8, strided=True), hardware=hardware, tp_overlap=False)

    # tp = 8 consecutive: 100 GB/s; strided by 2: four ranks on each of two nodes, 10 GB/s.
    assert far["f_tp"] == pytest.approx(10 * near["f_tp"])
    # data groups of 2: stride 8 crosses nodes at 10 GB/s, stride 1 stays inside one.
    slow, fast = 2 * N / 8 / 10e9, 2 * N / 8 / 100e9
    busy = 2 * near["f_forward"]
    assert near["tail"] == pytest.approx(overlap(busy, slow) - busy)
    assert far["tail"] == pytest.approx(overlap(busy, fast) - busy)


def test_stages_share_the_ranks() -> None:
    """With p = 2 a stage has 4 ranks: the same micro-batch gives twice the samples per rank."""
    assert row(LayerStrategy(), stages=2)["f_forward"] == pytest.approx(1e-3 + 4 * 2e-3)


def test_unknown_memory_bandwidth_costs_no_optimizer() -> None:
    """Without a memory bandwidth the optimizer step is 0."""
    found = row(LayerStrategy(), hardware=replace(toy_hardware(), memory_bytes_per_s=None))

    assert found["optimizer"] == 0.0
