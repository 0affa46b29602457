"""Every named defect of the Calculon model by itself: its sign and size, worked out by hand.

The machine is made so that hand arithmetic works: engines and memories at one rate, rings on
networks, and a model of 4 small blocks.
"""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from autopar.errors import InfeasibleExecution
from search.closed_form.calculon import COMPAT, Quirks, evaluate, evaluate_many
from tests.unit.explore_documents import EXECUTION as PLAIN

H, F, S, HEADS, HEAD, BLOCKS = 64, 256, 32, 8, 8, 4
A = S * H
"""Elements of the residual stream of a sample."""
E = 2
"""Bytes of an element."""
MATRIX, VECTOR, MEMORY, HOST, LINK = 1e12, 1e11, 1e12, 1e9, 1e6
"""FLOP/s and bytes/s."""
LATENCY = 1e-3
SCORES = HEADS * S * S
PARAMETERS = 2 * 2 * H + 4 * H * H + 2 * H * F
"""Of a block: two norms, attention, feed-forward."""
APPLICATION = {
    "hidden": H,
    "feedforward": F,
    "seq_size": S,
    "attn_heads": HEADS,
    "attn_size": HEAD,
    "num_blocks": BLOCKS,
}
EXECUTION = PLAIN | {"data_par_net": 2, "batch_size": 4}


def system(*, usage: float = 0.0, filled: bool = False, host: float = HOST) -> dict[str, Any]:
    """Return the machine; `usage` is the share of it that a running collective occupies."""
    network = {
        "bandwidth": LINK / 1e9,
        "efficiency": 1.0,
        "size": 8,
        "latency": LATENCY,
        "ops": {
            "p2p": [1.0, None],
            "reduce_scatter": [1.0, -1.0],
            "all_gather": [1.0, -1.0],
            "all_reduce": [2.0, -1.0],
        },
        "must_be_filled": filled,
        "processor_usage": usage,
    }
    return {
        "matrix": {"float16": {"tflops": MATRIX / 1e12, "gflops_efficiency": [[0, 1.0]]}},
        "vector": {"float16": {"tflops": VECTOR / 1e12, "gflops_efficiency": [[0, 1.0]]}},
        "mem1": {"GiB": 80, "GBps": MEMORY / 1e9, "MB_efficiency": [[0, 1.0]]},
        "mem2": {"GiB": 80, "GBps": host / 1e9, "MB_efficiency": [[0, 1.0]]},
        "processing_mode": "no_overlap",
        "networks": [network] * 3,
    }


def both(
    switch: str,
    machine: dict[str, Any] | None = None,
    blocks: int = BLOCKS,
    **execution: object,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the statistics with one defect, and without."""
    application = {**APPLICATION, "num_blocks": blocks}
    machine = machine or system()
    with_it, without = (
        evaluate(application, {**EXECUTION, **execution}, machine, compat=quirks)
        for quirks in (Quirks(**{switch: True}), Quirks())
    )
    return with_it, without


def differ(name: str, found: tuple[dict[str, Any], dict[str, Any]], expected: float) -> None:
    """Assert that a defect adds this much to a statistic."""
    with_it, without = found
    assert expected != 0
    # a small difference of large figures has their rounding
    tolerance = max(1e-9 * abs(expected), 1e-13 * abs(with_it[name]))
    assert with_it[name] - without[name] == pytest.approx(expected, abs=tolerance)


def test_b1_running_recompute_totals() -> None:
    """Each recomputed layer brings all that came before it in the block."""
    found = both("running_recompute_totals", activation_recompute="attn_only")
    projection = 2 * S * H * H
    products, softmax, dropout = 2 * SCORES * HEAD, 5 * SCORES, SCORES
    fork = 9 * A  # the norm in front of it; a fork computes nothing
    first = fork + 3 * projection + products
    running = fork + first + (first + softmax) + (first + softmax + dropout)

    assert found[1]["block_re_flops"] == products + softmax + dropout
    assert found[0]["block_re_flops"] == running
    assert found[0]["recompute_time"] == found[1]["recompute_time"]  # only totals were wrong


def test_b2_pipe_tile_twice() -> None:
    """The one tile that `pipe` exposes was processing time, too."""
    found = both("pipe_tile_twice", tensor_par=2, tensor_par_overlap="pipe")
    reduced_s = LATENCY + A * E * 2 * (1 - 1 / 2) / LINK + A / 2 / VECTOR
    tiles = 2 * (reduced_s / 2)  # two products of a block end in an all-reduce

    differ("block_fw_time", found, tiles)
    differ("total_time", found, 2 * BLOCKS * 4 * tiles)  # and two begin with one in backward
    assert found[0]["tp_comm_exposed_time"] == found[1]["tp_comm_exposed_time"]


def test_b3_edge_overlaps_as_base() -> None:
    """An edge block gathers and scatters half as much as base blocks reduce."""
    found = both(
        "edge_overlaps_as_base",
        tensor_par=2,
        tensor_par_comm_type="p2p_rs_ag",
        tensor_par_overlap="ring",
    )
    add_s = A / 2 / VECTOR
    gather_s = LATENCY + A * E * (1 - 1 / 2) / LINK
    computed_s = [2 * S * H * columns / 2 / MATRIX for columns in (3 * H, F, H, F)]
    as_base = sum((gather_s * 2 - LATENCY + add_s - s) / 2 for s in computed_s[2:])
    own = sum((gather_s - s) / 2 for s in computed_s[:2])
    own += sum((gather_s + add_s - s) / 2 for s in computed_s[2:])

    assert found[0]["edgeblock_fw_tp_time_exposed"] == pytest.approx(as_base)
    assert found[1]["edgeblock_fw_tp_time_exposed"] == pytest.approx(own)
    same = "baseblock_fw_tp_time_exposed"
    assert found[0][same] == found[1][same]


def test_b4_recommunication_as_forward() -> None:
    """What is communicated again adds nothing up, and slows one product down, not two."""
    found = both(
        "recommunication_as_forward",
        system(usage=0.5),
        tensor_par=2,
        tensor_par_comm_type="rs_ag",
        tensor_par_overlap="ring",
        activation_recompute="full",
    )
    add_s = A / 2 / VECTOR
    computed_s = sum(2 * S * H * columns / 2 / MATRIX for columns in (3 * H, F, H, F))

    differ("baseblock_recomm_time_exposed", found, 2 * add_s / 2)
    differ("block_re_time", found, computed_s / 2)  # one of two tiles runs at half speed


def test_b5_attention_input_dropped() -> None:
    """The input of query, key and value is there in backward only where it is gathered again."""
    found = both("attention_input_dropped", tensor_par=2, activation_recompute="attn_only")

    differ("block_act_storage_space", found, -A * E)
    scattered = both(
        "attention_input_dropped",
        tensor_par=2,
        tensor_par_comm_type="rs_ag",
        activation_recompute="attn_only",
    )
    assert scattered[0] == scattered[1]


def test_b6_overlapped_activations() -> None:
    """Tiled products keep what plain ones keep: inputs, and one gradient of each output."""
    found = both("overlapped_activations", tensor_par=2, tensor_par_overlap="ring")
    inputs = S * (H + F) // 2
    gradients = S * (3 * H + F) // 2 + 2 * S * H - 2 * (2 * S * H)

    differ("block_act_storage_space", found, -inputs * E)
    differ("block_act_grad_space", found, -gradients * E)


def test_b7_dropout_gradient_bytes() -> None:
    """Gradients are numbers; only the mask has a byte."""
    found = both("dropout_gradient_bytes")

    differ("block_act_grad_space", found, -(SCORES + 2 * A) * (E - 1))


def test_b8_weight_gradient_bytes() -> None:
    """Gradients accumulate in 4 bytes: 18 bytes of states per parameter, not 16."""
    found = both("weight_gradient_bytes")
    states = ("block_weight_space", "block_weight_grad_space", "block_optimizer_space")

    assert [sum(x[name] for name in states) for x in found] == [16 * PARAMETERS, 18 * PARAMETERS]
    # the first block's gradient had 4 bytes already
    differ("weight_grad_space", found, -(BLOCKS - 1) * 2 * PARAMETERS)


def test_b9_checkpoint_unsharded() -> None:
    """Between blocks the sequence is divided, and so is what is kept of it."""
    found = both(
        "checkpoint_unsharded",
        tensor_par=2,
        tensor_par_comm_type="rs_ag",
        activation_recompute="full",
    )

    assert [x["block_act_checkpoint_size"] for x in found] == [A * E, A * E / 2]


def test_b10_optimizer_per_microbatch() -> None:
    """Four micro-batches are followed by one step of the optimizer."""
    found = both("optimizer_per_microbatch")
    extra_s = BLOCKS * (4 - 1) * 11 * PARAMETERS / MATRIX

    assert found[0]["total_time"] == found[1]["total_time"]
    differ("total_efficiency", found, extra_s / found[1]["total_time"])


def test_b11_overlap_requirements() -> None:
    """Two chunks of three need room in two chunks' windows, one block of two in one block's."""
    found = both(
        "overlap_requirements",
        system(host=1e12),
        blocks=12,
        pipeline_par=2,
        data_par=4,
        batch_size=16,
        pipeline_interleaving=3,
        data_par_overlap=True,
    )
    ring = 2 * (1 - 1 / 4) / 2  # of an all-reduce over 4, for each byte that was counted

    chunk, tail = "dp_bw_overlap_req_chunk", "dp_bw_overlap_req_tail"
    assert found[1][chunk] / found[0][chunk] == pytest.approx((3 - 1) * ring)
    assert found[1][tail] / found[0][tail] == pytest.approx((2 - 1) / 2 * ring)


def test_b11_tiles_require_the_traffic_of_a_ring() -> None:
    """An all-reduce over four moves 1.5 times its buffer; the narrowest product sets the need."""
    found = both("overlap_requirements", system(usage=0.2), tensor_par=4, tensor_par_overlap="ring")
    computed_s = 2 * S * H * H / 4 / MATRIX

    wrong, right = (x["tp_bw_overlap_req"] for x in found)
    assert wrong == pytest.approx(A * E * (1 - 0.2) / computed_s)
    assert right == pytest.approx(2 * (1 - 1 / 4) * A * E * (1 - 0.2) / computed_s)


@pytest.mark.parametrize("usage", [0.0, 0.5])
def test_b12_tail_windows(usage: float) -> None:
    """Memory traffic left the window twice; only one of three blocks was slowed down."""
    found = both(
        "tail_windows",
        system(usage=usage),
        data_par=4,
        batch_size=16,
        data_par_overlap=True,
        optimizer_sharding=True,
    )
    right = found[1]
    moved_s = right["block_agrad_mem_time"] + right["block_wgrad_mem_time"]
    computed_s = right["block_agrad_flops_time"] + right["block_wgrad_flops_time"]

    differ("dp_comm_exposed_time", found, moved_s - (BLOCKS - 2) * usage * computed_s)


def test_b13_latency_without_neighbour() -> None:
    """A single stage sends nothing, so offloading cannot hide behind it."""
    found = both("latency_without_neighbour", system(host=1e6), weight_offload=True)

    differ("fw_offload_exposed_time", found, -4 * LATENCY)  # at one edge of each micro-batch


def test_b13_backward_latency_in_inference() -> None:
    """Without backward the bubble has no transfer of backward."""
    found = both("latency_without_neighbour", pipeline_par=2, training=False)

    differ("bubble_time", found, LATENCY)


def test_b14_offload_sums() -> None:
    """Gradients come back to be added to, with the states that follow them."""
    found = both("offload_sums", system(host=1e6), weight_offload=True, optimizer_offload=True)

    differ("bw_offload_exposed_time", found, -4 * BLOCKS * 4 * PARAMETERS / 1e6)


def test_b15_divisor_fills_tier() -> None:
    """Four of eight do not fill a tier of eight."""
    machine = system(filled=True)
    execution = {**EXECUTION, "tensor_par": 4}

    assert evaluate(APPLICATION, execution, machine, compat=Quirks(divisor_fills_tier=True))
    with pytest.raises(InfeasibleExecution, match="Network tier0 isn't fully used"):
        evaluate(APPLICATION, execution, machine)
    assert evaluate(APPLICATION, {**EXECUTION, "tensor_par": 8}, machine)
    # two groups of four fill it together
    both_groups = execution | {"data_par": 2, "data_par_net": 1, "batch_size": 2}
    both_groups |= {"num_procs": 8, "microbatch_size": 1}
    assert evaluate(APPLICATION, both_groups, machine)


def test_b16_no_checkpoint_figure() -> None:
    """Inference has no checkpoints, which is a number."""
    found = both("no_checkpoint_figure", training=False)

    assert [x["act_checkpoint_size_with_offload"] for x in found] == [None, 0.0]


def test_b17_communication_flops() -> None:
    """Additions and traffic of a collective are in its time, not in the block's sums."""
    found = both("communication_flops", tensor_par=2)

    differ("block_fw_flops", found, 2 * A / 2)  # two all-reduces, each adds one half
    differ("block_fw_mem_accessed", found, 2 * 2 * A * E)
    assert found[0]["total_time"] == found[1]["total_time"]


def test_b18_memory_is_tested_early() -> None:
    """What does not fit is refused, without a switch: when it is found changes no figure."""
    machine = system()
    machine["mem1"]["GiB"] = 1e-6

    assert "B18" not in " ".join(Quirks.meanings.values())
    for quirks in (Quirks(), COMPAT):
        with pytest.raises(InfeasibleExecution, match=r"Mem tier1 needs .* but only has 1"):
            evaluate(APPLICATION, EXECUTION, machine, compat=quirks)
    (answer,) = evaluate_many(APPLICATION, [EXECUTION], machine)
    assert (bool(answer["ok"]), answer["reason"]) == (False, "Mem tier1 needs more than it has")


def test_b19_unknown_datatype_ends_search() -> None:
    """A machine without the datatype cannot run it, as one without the memory."""
    kinds = {}
    for ends in (True, False):
        with pytest.raises(InfeasibleExecution, match="Unsupported type: float8") as caught:
            evaluate(
                APPLICATION,
                {**EXECUTION, "datatype": "float8"},
                system(),
                compat=Quirks(unknown_datatype_ends_search=ends),
            )
        kinds[ends] = caught.value.kind
    assert kinds == {True: "input", False: "infeasible"}


def test_every_switch_has_a_case() -> None:
    """Numbers are those of the switches, and each has a test of its number here."""
    numbers = {int(text[1:].split(":")[0]) for text in Quirks.meanings.values()}
    tested = {int(n) for name in globals() for n in re.findall(r"^test_b(\d+)_", name)}

    assert numbers == set(range(1, 20)) - {18}
    assert tested == set(range(1, 20))


def test_switches_are_values_with_known_names() -> None:
    """Equal ones are one key, a copy in another process is equal, and no name is made up."""
    some = Quirks(pipe_tile_twice=True, tail_windows=False)

    assert (some.pipe_tile_twice, some.tail_windows) == (True, False)
    assert pickle.loads(pickle.dumps(some)) == some != COMPAT
    assert len({some, Quirks(pipe_tile_twice=True), Quirks()}) == 2
    assert (Quirks.of(True), Quirks.of(False), Quirks.of(some)) == (COMPAT, Quirks(), some)
    assert repr(some) == "Quirks(pipe_tile_twice=True)"
    assert all(COMPAT.flags().values())
    with pytest.raises(TypeError, match="'pipe_tile_once'"):
        Quirks(pipe_tile_once=True)
    with pytest.raises(AttributeError, match="Quirks has no switch 'pipe_tile_once'"):
        assert some.pipe_tile_once
