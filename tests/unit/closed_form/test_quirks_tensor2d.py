"""Every named defect of the two-dimensional model by itself, worked out by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec import to_builtins

from autopar.errors import InfeasibleExecution
from autopar.records import replace
from search.closed_form.tensor2d import Model, Quirks, Strategy, System, evaluate, survey
from search.closed_form.tensor2d.engine import link_s
from tests.oracles.tensor2d.rows import Link, Pass, Row
from tests.oracles.tensor2d.space import candidates
from tests.oracles.tensor2d.step import row_time
from tests.parity.test_tensor2d_engine import every_candidate

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
    switch: str,
    name: str,
    strategy: Strategy,
    *,
    model: Model = MODEL,
    columns: int,
    rows: int = 1,
    panels: int = 1,
    **way: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row of a layer with one defect, and without; batch 2, every GPU by itself."""
    config = {"dp": 1, "pp": 1, "mbs": 2}
    placement = {"nv_dp": 1, "nv_pp": 1}
    if strategy == "1d":
        config["tp"], placement["nv_tp"] = columns, 1
    else:
        config |= {"tp1": columns, "tp2": rows}
        placement |= {"nv_tp1": 1, "nv_tp2": 1}
    if strategy == "2d":
        config["nb"] = panels
    question = (strategy, model, config, placement, columns * rows, 2, SYSTEM)
    found = []
    for chosen in quirks(switch):
        table = evaluate(*question, compat=chosen, layers=True, **way)["layers"]
        found += [row for row in table if row["name"] == name]
    with_it, without = found
    return with_it, without


def elements(giga: float) -> int:
    """Return the elements of 1e9 bytes."""
    count = round(giga / 2e-9)
    assert count == pytest.approx(giga / 2e-9, rel=1e-12)
    return count


def flops(tera: float) -> int:
    """Return the FLOP of 1e12 FLOP."""
    return round(tera * 1e12)


def traffic(row: dict[str, Any], one: str) -> int:
    """Return the elements that a pass reads and writes."""
    return round(row[f"t_{one}_comp"] / row[f"intensity_{one}"] * 1000 / 2e-9)


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
        link_s(SYSTEM, q, "allreduce", 1.0, 4, in_domain) for q in quirks("single_allreduce")
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

    weights = [elements(row["weights_mem"]) for row in (wrong, right)]
    assert weights == [2 * L // 2, 2 * EMBED // 2]
    kept = [elements(row["activation_buffer"]) for row in (wrong, right)]
    assert kept == [2 * L // 2 * L // 2, 2 * L // 2 * EMBED // 2]
    assert flops(right["flops_fwd"]) / flops(wrong["flops_fwd"]) == EMBED / L


def test_q4_norm_gradient_group() -> None:
    """Gradients of weights are partial sums over rows of GPUs, statistics over columns."""
    wrong, right = rows("norm_gradient_group", "ln1", "2d", columns=2, rows=4)
    weights, moments = 2 * EMBED / 2, 2 * 2 * L / 4

    def seconds(volume: float, ranks: int) -> float:
        return 2 * ((ranks - 1) * SLOW_S + (ranks - 1) / ranks * volume * 2e-9 / SLOW)

    assert wrong["comm_bwd_type"] == "allreduce"
    assert elements(wrong["comm_bwd"]) == weights + moments
    assert wrong["t_bwd_comm"] == pytest.approx(seconds(weights + moments, 2))
    assert right["comm_bwd_type"] == ["allreduce", "allreduce"]
    assert [elements(volume) for volume in right["comm_bwd"]] == [weights, moments]
    assert right["t_bwd_comm"] == pytest.approx(seconds(weights, 4) + seconds(moments, 2))


def test_q5_extra_panel() -> None:
    """Of four panels the first is exposed, the others as far as computing does not hide them."""
    wrong, right = rows("extra_panel", "fc1", "2d", columns=2, rows=2, panels=4)
    ahead_s = right["t_fwd"] - right["t_fwd_comm"]
    panel_s = sum(SLOW_S + volume / 4 / SLOW for volume in right["comm_fwd"])
    assert panel_s > ahead_s / 4

    assert wrong["t_fwd_comm"] == pytest.approx(panel_s + 4 * panel_s - ahead_s)
    assert right["t_fwd_comm"] == pytest.approx(panel_s + 3 * (panel_s - ahead_s / 4))
    # backward has two products, each with half of the computing
    back_s = right["t_bwd"] - right["t_bwd_comm"]
    loops = right["comm_bwd"][:2], right["comm_bwd"][2:]
    first_s, second_s = (sum(SLOW_S + v / 4 / SLOW for v in loop) for loop in loops)
    exposed_s = 3 * (first_s - back_s / 2 / 4) + 3 * (second_s - back_s / 2 / 4)
    assert wrong["t_bwd_comm"] == pytest.approx(5 * (first_s + second_s) - back_s)
    assert right["t_bwd_comm"] == pytest.approx(first_s + second_s + exposed_s)


def test_q5_loops_that_differ() -> None:
    """No product has them, and the oracle prices them all the same: each loop by itself."""
    near, far = Link("broadcast", 1e9, 2, 2), Link("broadcast", 1e6, 2, 2)
    both = (near, far)
    # 8 ms of computing, launch included
    work = (8e-3 - 20e-6) * 0.8 * 100 * 1e12
    row = Row(
        name="fc1",
        matrix=True,
        forward=Pass(flops=work, traffic=1.0, links=(near,), loops=((near,),)),
        backward=Pass(flops=work, traffic=1.0, links=both, loops=((near,), (far,))),
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
    assert flops(wrong["flops_fwd"]) == 2 * L * EMBED
    assert flops(right["flops_fwd"]) == 2 * L * EMBED // 4

    wrong, right = rows("bias_shapes", "vproj-bias", "2d-seqp", columns=4, rows=2)
    assert flops(wrong["flops_fwd"]) == flops(right["flops_fwd"]) == 2 * L // 2 * EMBED // 4
    weights = [elements(row["weights_mem"]) for row in (wrong, right)]
    assert weights == [EMBED // 4, EMBED]


@pytest.mark.parametrize("operation", ["allgather", "p2p"])
def test_q7_one_adapter(operation: str) -> None:
    """Two adapters of a GPU carry half each, also where it has no partner beside it."""
    twin = replace(SYSTEM, nic_factor=2.0)
    moved = 1 / 2 if operation == "allgather" else 1.0
    wrong, right = (link_s(twin, q, operation, 1.0, 2, 1) for q in quirks("one_adapter"))

    assert (wrong, right) == pytest.approx((SLOW_S + moved / SLOW, SLOW_S + moved / (2 * SLOW)))


def test_q8_flash_traffic() -> None:
    """Keys and values of four GPUs, not of one, are read and their gradients written."""
    wrong, right = rows("flash_traffic", "fusedla", "2d-seqp", columns=2, rows=4)
    queries = 2 * HEADS // 2 * L // 4 * EMBED // HEADS
    keys = 4 * queries

    assert traffic(right, "bwd") - traffic(wrong, "bwd") == 2 * keys - 2 * queries
    assert traffic(right, "fwd") == traffic(wrong, "fwd")
    wrong, right = rows("flash_traffic", "fusedla", "1d", columns=2)
    assert traffic(wrong, "bwd") == traffic(right, "bwd")


def test_q9_dropped_rows() -> None:
    """Two samples of 250 tokens over four GPUs are 125 rows each, not twice 62."""
    odd = Model(l=250, e=EMBED, h=HEADS, depth=DEPTH, f=WIDE)
    wrong, right = rows("dropped_rows", "ln1", "1d", model=odd, columns=4)

    kept = [elements(row["activation_buffer"]) for row in (wrong, right)]
    assert kept == [2 * 62 * EMBED, 125 * EMBED]


@pytest.mark.parametrize("strategy", ["1d", "2d-seqp", "2d"])
def test_q10_recompute_time_only(strategy: Strategy) -> None:
    """What is computed again is in the time, and in its parts and FLOP, too."""

    def priced(name: str, *, recompute: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        way: dict[str, Any] = {"attention": "plain", "recompute": recompute}
        return rows("recompute_time_only", name, strategy, columns=2, **way)

    for name in ("logits", "softmax", "dpr_at"):
        wrong, right = priced(name, recompute=True)
        once, plain = priced(name, recompute=False)
        assert once == plain
        assert wrong["t_bwd"] == right["t_bwd"]
        assert right["t_bwd"] == pytest.approx(plain["t_bwd"] + plain["t_fwd"])
        assert wrong["t_bwd_comp"] == plain["t_bwd_comp"]
        assert right["t_bwd_comp"] == pytest.approx(plain["t_bwd_comp"] + plain["t_fwd_comp"])
        assert wrong["flops_bwd"] == plain["flops_bwd"]
        assert right["flops_bwd"] == pytest.approx(plain["flops_bwd"] + plain["flops_fwd"])
    wrong, right = priced("attend", recompute=True)
    assert wrong["t_bwd"] == right["t_bwd"] == priced("attend", recompute=False)[1]["t_bwd"]


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
    _, every = every_candidate("2d", narrow, 256, 256, SYSTEM)
    whole = every["candidate"]
    assert set(whole["nb"][whole["tp2"] == 256].tolist()) == {256}

    before = to_builtins(SYSTEM)
    config = {"dp": 1, "tp1": 2, "tp2": 2, "pp": 1, "mbs": 1, "nb": 2}
    placement = {"nv_tp1": 2, "nv_tp2": 2, "nv_dp": 1, "nv_pp": 1}
    times = [
        evaluate("2d", MODEL, {**config, "nb": nb}, placement, 4, 8, SYSTEM)["t"]
        for nb in (2, 4, 2)
    ]
    assert times[0] == times[2] != times[1]
    assert to_builtins(SYSTEM) == before


def test_q13_machines_in_any_order() -> None:
    """What a machine before this one had no candidates for takes nothing from this one."""

    def counts(domains: tuple[int, ...]) -> dict[int, list[int]]:
        found = {}
        for domain in domains:
            machine = replace(SYSTEM, nvlink_size=domain)
            found[domain] = [survey("1d", MODEL, n, 64, machine).considered for n in (2, 3, 4, 12)]
            listed = [len(list(candidates(MODEL, "1d", n, 64, domain))) for n in (2, 3, 4, 12)]
            assert found[domain] == listed
        return found

    alone = {**counts((64,)), **counts((4,))}
    assert counts((64, 4)) == counts((4, 64)) == alone
    assert alone[4][2] > 0  # also after a domain of 64, which no assignment of 4 GPUs fills


def test_q14_repeated_panels() -> None:
    """A dot product has one addition less than factors; one GPU writes its product once."""
    wrong, right = rows("repeated_panels", "fc1", "2d", columns=2, rows=2, panels=4)
    outputs = 2 * L // 2 * WIDE // 2
    assert flops(wrong["flops_fwd"]) - flops(right["flops_fwd"]) == outputs
    assert traffic(wrong, "fwd") == traffic(right, "fwd")

    wrong, right = rows("repeated_panels", "fc1", "2d", columns=1, rows=1, panels=4)
    outputs = 2 * L * WIDE
    assert traffic(wrong, "fwd") - traffic(right, "fwd") == (4 - 1) * outputs


def test_every_switch_has_a_case() -> None:
    """Numbers are those of the switches; what needs no switch has a case as well."""
    texts = Quirks.meanings
    numbers = {int(text[1:].split(":")[0]) for text in texts.values()}
    tested = {int(n) for name in globals() for n in re.findall(r"^test_q(\d+)_", name)}

    assert numbers == set(range(1, 15)) - {11, 12, 13}
    assert tested == set(range(1, 15))
