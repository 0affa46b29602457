"""Every named defect of the two-dimensional model by itself, worked out by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autopar.errors import InfeasibleExecution
from search.closed_form.tensor2d import Model, Quirks, Strategy, System, evaluate
from search.closed_form.tensor2d.attention import plain_attention_rows
from search.closed_form.tensor2d.exploration import candidates
from search.closed_form.tensor2d.layers import layer_rows
from search.closed_form.tensor2d.links import collective_s
from search.closed_form.tensor2d.rows import Link, Pass, Row, Sizes
from search.closed_form.tensor2d.step import row_time
from search.closed_form.validation import quirk_texts

L, EMBED, HEADS, DEPTH, WIDE = 256, 1024, 8, 4, 4096
MODEL = Model(l=L, e=EMBED, h=HEADS, depth=DEPTH, f=WIDE)
FAST, SLOW, FAST_S, SLOW_S = 100.0, 10.0, 1e-6, 1e-5
"""GB/s and seconds of a hop, inside a domain and between domains."""
SYSTEM = System(
    matrix_flops_fp16=100,
    vector_flops_fp16=10,
    hbm_bandwidth=1000,
    hbm_capacity=1000,
    nvlink_bandwidth=FAST,
    nvlink_eff=1.0,
    nvlink_latency=FAST_S,
    ib_bandwidth=SLOW,
    ib_eff=1.0,
    ib_latency=SLOW_S,
    nvlink_size=4,
)


def quirks(switch: str) -> tuple[Quirks, Quirks]:
    """Return one defect, and none."""
    return Quirks(**{switch: True}), Quirks()


def rows(
    switch: str, name: str, strategy: Strategy, *, model: Model = MODEL, **sizes: int
) -> tuple[Row, Row]:
    """Return a row of a layer with one defect, and without; batch 2."""
    found = []
    for chosen in quirks(switch):
        s = Sizes(model=model, quirks=chosen, strategy=strategy, batch=2, **sizes)
        found += [row for row in layer_rows(s) if row.name == name]
    with_it, without = found
    return with_it, without


@pytest.mark.parametrize(
    ("in_domain", "moved_s", "hops_s", "already_twice"),
    [
        (1, 3 / 4 / SLOW, 3 * SLOW_S, False),
        (4, 3 / 4 / FAST, 3 * FAST_S, False),
        (2, 3 / 4 / (2 * SLOW), SLOW_S + 2 * FAST_S, True),
    ],
)
def test_q1_single_allreduce(
    in_domain: int, moved_s: float, hops_s: float, already_twice: bool
) -> None:
    """One gigabyte over four GPUs: reduced and gathered, so everything twice."""
    wrong, right = (
        collective_s(SYSTEM, q, "allreduce", 1.0, 4, in_domain) for q in quirks("single_allreduce")
    )

    assert right == pytest.approx(2 * (moved_s + hops_s))
    assert wrong == pytest.approx(moved_s * (2 if already_twice else 1) + hops_s)


def test_q2_free_slow_links() -> None:
    """Four stages, two to a domain: one of three links leaves it."""
    config = {"dp": 1, "tp": 1, "pp": 4, "mbs": 1}
    placement = {"nv_tp": 1, "nv_dp": 1, "nv_pp": 2}
    wrong, right = (
        evaluate("1d", MODEL, config, placement, 4, 8, SYSTEM, compat=q)
        for q in quirks("free_slow_links")
    )
    sent = L * EMBED * 2e-9
    slow_s = SLOW_S + sent / SLOW
    microbatches = 8

    assert wrong["t_pp_comm"] == pytest.approx(2 * microbatches * 2 / 3 * (FAST_S + sent / FAST))
    assert right["t_pp_comm"] - wrong["t_pp_comm"] == pytest.approx(2 * microbatches * slow_s / 3)
    assert right["t_bubble"] - wrong["t_bubble"] == pytest.approx(3 * 2 * slow_s / 3)


def test_q3_norm_width_of_sequence() -> None:
    """A norm of 1024 columns over two GPUs was one of 256."""
    wrong, right = rows("norm_width_of_sequence", "ln1", "2d", columns=2, rows=2)

    assert (wrong.weights, right.weights) == (2 * L // 2, 2 * EMBED // 2)
    assert (wrong.kept, right.kept) == (2 * L // 2 * L // 2, 2 * L // 2 * EMBED // 2)
    assert right.forward.flops / wrong.forward.flops == EMBED / L


def test_q4_norm_gradient_group() -> None:
    """Gradients of weights are partial sums over rows of GPUs, statistics over columns."""
    wrong, right = rows("norm_gradient_group", "ln1", "2d", columns=2, rows=4)

    assert wrong.backward.links == (Link("allreduce", 2 * EMBED // 2 + 2 * 2 * L // 4, 2, 1),)
    assert right.backward.links == (
        Link("allreduce", 2 * EMBED / 2, 4, 1),
        Link("allreduce", 2 * 2 * L / 4, 2, 1),
    )


def test_q5_extra_panel() -> None:
    """Of four panels the first is exposed, the others as far as computing does not hide them."""
    near, far = Link("broadcast", 1e9, 2, 2), Link("broadcast", 1e6, 2, 2)
    both = (near, far)
    # 8 ms of computing, launch included
    flops = (8e-3 - 20e-6) * 0.8 * 100 * 1e12
    row = Row(
        name="fc1",
        matrix=True,
        forward=Pass(flops=flops, traffic=1.0, links=(near,), loops=((near,),)),
        backward=Pass(flops=flops, traffic=1.0, links=both, loops=((near,), (far,))),
        panels=4,
    )
    wrong, right = (row_time(row, SYSTEM, q) for q in quirks("extra_panel"))
    near_s = FAST_S + 1e9 / 4 * 2e-9 / FAST  # of one panel
    far_s = FAST_S + 1e6 / 4 * 2e-9 / FAST
    assert near_s > 8e-3 / 4

    assert wrong.forward.link_s == pytest.approx(near_s + 4 * near_s - 8e-3)
    assert right.forward.link_s == pytest.approx(near_s + 3 * (near_s - 8e-3 / 4))
    assert wrong.forward.link_s - right.forward.link_s == pytest.approx(near_s - 8e-3 / 4)
    # half of the computing of backward belongs to each loop; the second hides its panels
    assert far_s < 4e-3 / 4
    assert wrong.backward.link_s == pytest.approx(5 * (near_s + far_s) - 8e-3)
    assert right.backward.link_s == pytest.approx(near_s + 3 * (near_s - 4e-3 / 4) + far_s)


def test_q6_bias_shapes() -> None:
    """Behind a reduce-scatter over four GPUs each has a quarter of the rows, and all columns."""
    wrong, right = rows("bias_shapes", "fc2-bias", "1d", columns=4)
    assert (wrong.forward.flops, right.forward.flops) == (2 * L * EMBED, 2 * L * EMBED / 4)

    wrong, right = rows("bias_shapes", "vproj-bias", "2d-seqp", columns=4, rows=2)
    assert wrong.forward.flops == right.forward.flops == 2 * L / 2 * EMBED / 4
    assert (wrong.weights, right.weights) == (EMBED // 4, EMBED)


@pytest.mark.parametrize("operation", ["allgather", "p2p"])
def test_q7_one_adapter(operation: str) -> None:
    """Two adapters of a GPU carry half each, also where it has no partner beside it."""
    twin = SYSTEM.model_copy(update={"nic_factor": 2.0})
    moved = 1 / 2 if operation == "allgather" else 1.0
    wrong, right = (collective_s(twin, q, operation, 1.0, 2, 1) for q in quirks("one_adapter"))

    assert (wrong, right) == pytest.approx((SLOW_S + moved / SLOW, SLOW_S + moved / (2 * SLOW)))


def test_q8_flash_traffic() -> None:
    """Keys and values of four GPUs, not of one, are read and their gradients written."""
    wrong, right = rows("flash_traffic", "fusedla", "2d-seqp", columns=2, rows=4)
    queries = 2 * HEADS // 2 * L // 4 * EMBED // HEADS
    keys = 4 * queries

    assert right.backward.traffic - wrong.backward.traffic == 2 * keys - 2 * queries
    wrong, right = rows("flash_traffic", "fusedla", "1d", columns=2)
    assert wrong.backward.traffic == right.backward.traffic


def test_q9_dropped_rows() -> None:
    """Two samples of 250 tokens over four GPUs are 125 rows each, not twice 62."""
    odd = Model(l=250, e=EMBED, h=HEADS, depth=DEPTH, f=WIDE)
    wrong, right = rows("dropped_rows", "ln1", "1d", model=odd, columns=4)

    assert (wrong.kept, right.kept) == (2 * 62 * EMBED, 125 * EMBED)


@pytest.mark.parametrize("strategy", ["1d", "2d-seqp", "2d"])
def test_q10_recompute_time_only(strategy: Strategy) -> None:
    """What is computed again is in the time, and in its parts and FLOP, too."""
    q_wrong, q_right = quirks("recompute_time_only")
    s = Sizes(model=MODEL, quirks=q_right, strategy=strategy, batch=2, columns=2)
    repeated = plain_attention_rows(s, "plain", recompute=True)
    once = {row.name: row for row in plain_attention_rows(s, "plain")}
    assert [row.name for row in repeated if row.recomputed] == ["logits", "softmax", "dpr_at"]

    for row in (row for row in repeated if row.recomputed):
        wrong, right = (row_time(row, SYSTEM, q) for q in (q_wrong, q_right))
        forward, plain = right.forward, row_time(once[row.name], SYSTEM, q_right).backward
        assert wrong.backward.time_s == right.backward.time_s
        assert right.backward.time_s == pytest.approx(plain.time_s + forward.time_s)
        assert wrong.backward.compute_s == plain.compute_s
        assert right.backward.compute_s == pytest.approx(plain.compute_s + forward.compute_s)
        assert right.row.backward.flops - wrong.row.backward.flops == row.forward.flops


def test_q11_zero_traffic() -> None:
    """A sequence shorter than its group of GPUs is refused, not divided by."""
    short = Model(l=8, e=EMBED, h=HEADS, depth=DEPTH, f=WIDE)
    config = {"dp": 1, "tp1": 4, "tp2": 4, "pp": 1, "mbs": 2}
    placement = {"nv_tp1": 1, "nv_tp2": 1, "nv_dp": 1, "nv_pp": 1}

    with pytest.raises(InfeasibleExecution, match="leaves some of tp1"):
        evaluate("2d-seqp", short, config, placement, 16, 8, SYSTEM)


def test_q12_narrow_panels() -> None:
    """As many GPUs as columns end no search, and pricing panels leaves the machine as it is."""
    narrow = Model(l=32768, e=256, h=2, depth=1, f=1024)
    found = [c for c in candidates(narrow, "2d", 256, 256, 4) if c.rows == 256]
    assert {c.panels for c in found} == {256}

    before = SYSTEM.model_dump()
    config = {"dp": 1, "tp1": 2, "tp2": 2, "pp": 1, "mbs": 1, "nb": 2}
    placement = {"nv_tp1": 2, "nv_tp2": 2, "nv_dp": 1, "nv_pp": 1}
    times = [
        evaluate("2d", MODEL, {**config, "nb": nb}, placement, 4, 8, SYSTEM)["t"]
        for nb in (2, 4, 2)
    ]
    assert times[0] == times[2] != times[1]
    assert SYSTEM.model_dump() == before


def test_q13_machines_in_any_order() -> None:
    """What a machine before this one had no candidates for takes nothing from this one."""

    def counts(domains: tuple[int, ...]) -> dict[int, list[int]]:
        return {
            domain: [len(list(candidates(MODEL, "1d", n, 64, domain))) for n in (2, 3, 4, 12)]
            for domain in domains
        }

    alone = {**counts((64,)), **counts((4,))}
    assert counts((64, 4)) == counts((4, 64)) == alone
    assert alone[4][2] > 0  # also after a domain of 64, which no assignment of 4 GPUs fills


def test_q14_repeated_panels() -> None:
    """A dot product has one addition less than factors; one GPU writes its product once."""
    wrong, right = rows("repeated_panels", "fc1", "2d", columns=2, rows=2, panels=4)
    outputs = 2 * L // 2 * WIDE // 2
    assert wrong.forward.flops - right.forward.flops == outputs
    assert wrong.forward.traffic == right.forward.traffic

    wrong, right = rows("repeated_panels", "fc1", "2d", columns=1, rows=1, panels=4)
    outputs = 2 * L * WIDE
    assert wrong.forward.traffic - right.forward.traffic == (4 - 1) * outputs


def test_every_switch_has_a_case() -> None:
    """Numbers are those of the switches; what needs no switch has a case as well."""
    texts: dict[str, Any] = quirk_texts(Quirks)
    numbers = {int(text[1:].split(":")[0]) for text in texts.values()}
    tested = {int(n) for name in globals() for n in re.findall(r"^test_q(\d+)_", name)}

    assert numbers == set(range(1, 15)) - {11, 12, 13}
    assert tested == set(range(1, 15))
