"""Worked examples: Galvatron's published answers by its formulas, ours beside them, explained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.planning.cost.model import CostModel
from search.planning.cost.pipeline import evaluate
from search.request.options import SearchOptions
from tests.cost_cases import llama_hardware, llama_model, llama_spec
from tests.data.read import galvatron_answers
from tests.oracles.galvatron_terms import TERMS, Peer, attribution, our_costs, step_s, switched

WORKED = Plan(
    world_size=8,
    num_stages=1,
    stage_sizes=(32,),
    layers=(LayerStrategy(zero3=True, checkpoint=True),) * 32,
    vocab=VocabStrategy(zero3=True),
    global_batch=64,
    num_microbatches=1,
    default_dp_type="zero2",
)
CASES = (
    "llama7b_1x8_20g_bsz16_nosp_nopp",
    "llama7b_1x8_24g_bsz16_full",
    "llama7b_1x8_24g_bsz64_fg0",
    "llama7b_1x8_24g_bsz64_full",
    "llama7b_1x8_40g_bsz16_full",
    "llama7b_1x8_40g_bsz64_3d",
    "llama7b_1x8_40g_bsz64_dptp",
    "llama7b_1x8_40g_bsz64_fg0",
)
"""Its newest release's answers that are legal (one more drops samples, see galvatron.md 3.5)."""


def read_plan(file: dict[str, Any]) -> Plan:
    """Return the plan of a documented strategy file."""

    def numbers(key: str) -> list[int]:
        return [int(x) for x in file[key].split(",")]

    return Plan(
        world_size=file["world_size"],
        num_stages=file["pp_deg"],
        stage_sizes=tuple(numbers("pp_division")),
        layers=tuple(
            LayerStrategy(tp=t, ulysses=bool(u) and t > 1, zero3=bool(z), checkpoint=bool(k))
            for t, u, z, k in zip(
                numbers("tp_sizes_enc"),
                numbers("use_sp"),
                numbers("dp_types_enc"),
                numbers("checkpoint"),
                strict=True,
            )
        ),
        vocab=VocabStrategy(
            tp=file["vtp"], ulysses=bool(file["vsp"]), zero3=bool(file["embed_sdp"])
        ),
        global_batch=file["global_bsz"],
        num_microbatches=file["chunks"],
        default_dp_type=file["default_dp_type"],
    )


def answers(data: Path) -> dict[str, dict[str, Any]]:
    """Return the published answers by case."""
    return {x["case"]: x for x in galvatron_answers(data) if x["engine"] == "newest"}


def models(cases: Path) -> tuple[CostModel, Peer]:
    """Return our cost model and Galvatron's formulas on the same profiles."""
    spec, model, hardware = llama_spec(), llama_model(cases), llama_hardware(cases)
    # its formulas are of the recipe 2 + 2 + 12
    options = SearchOptions(
        time_profile_mode="batch", default_dp_type="zero2", fp32_gradients=False
    )
    return CostModel(spec, model, hardware, options), Peer(spec, model, hardware)


def test_worked_example_of_galvatron(cases_dir: Path) -> None:
    """All layers `1-1-8f-c`, G = 64, m = 1: 4.200629 s by its formula, part by part."""
    _, peer = models(cases_dir)
    layer = peer.layer(WORKED, WORKED.layers[0])

    assert layer["forward"] == pytest.approx(31.705e-3, abs=1e-6)
    assert layer["backward"] == pytest.approx(95.115e-3, abs=2e-6)
    nosync = layer["forward"] + layer["backward"] + layer["zero3"]
    assert nosync == pytest.approx(129.03e-3, abs=5e-6)
    assert nosync + layer["sync"] == pytest.approx(129.58e-3, abs=5e-6)
    assert sum(peer.vocab(WORKED)[0]) == pytest.approx(71.717e-3, abs=5e-6)
    assert step_s(peer, WORKED) == pytest.approx(4.200629, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_published_answers_by_its_formulas(cases_dir: Path, data_dir: Path, case: str) -> None:
    """The independent formulas give its published step time, pipelines included."""
    answer = answers(data_dir)[case]
    _, peer = models(cases_dir)

    assert step_s(peer, read_plan(answer["strategy_file"])) == pytest.approx(
        answer["step_s"], rel=1e-6
    )


@pytest.mark.parametrize("case", CASES)
def test_difference_is_attributed_to_terms(cases_dir: Path, data_dir: Path, case: str) -> None:
    """From our T to its figure, one term after the other, with nothing left unexplained."""
    answer = answers(data_dir)[case]
    plan = read_plan(answer["strategy_file"])
    cost, peer = models(cases_dir)
    costs = our_costs(cost, plan)
    ours = costs.step_time_s()
    steps = attribution(cost, peer, plan)
    print(f"\n{case}: ours {ours:.6f} s, Galvatron {answer['step_s']:.6f} s")  # shown by -s
    before = ours
    for term, alone, after in steps:
        print(f"  {term:15s} alone {alone - ours:+.6f} s  in turn {after - before:+.6f} s")
        before = after

    strategies = sorted(set(plan.layers))
    tables = cost.tables(
        strategies,
        [plan.vocab],
        [(plan.num_stages, plan.global_batch // plan.num_microbatches, plan.default_dp_type)],
        [(0, plan.num_microbatches)],
        "1f1b",
    )
    found = evaluate(
        tables,
        table=0,
        num_microbatches=plan.num_microbatches,
        stage_sizes=plan.stage_sizes,
        strategy_index=[strategies.index(s) for s in plan.layers],
        vocab_index=0,
    )
    assert ours == pytest.approx(found.step_time_s, rel=1e-12)
    assert steps[-1][2] == pytest.approx(answer["step_s"], rel=1e-6)
    assert switched(costs, peer, plan, ()).step_time_s() == ours
    assert [term for term, _, _ in steps] == list(TERMS)


def test_our_worked_example(cases_dir: Path) -> None:
    """The same plan by our formulas, written out: T and the memory of the stage."""
    cost, _ = models(cases_dir)
    tables = cost.tables([WORKED.layers[0]], [WORKED.vocab], [(1, 64, "zero2")], [(0, 1)], "1f1b")
    found = evaluate(
        tables,
        table=0,
        num_microbatches=1,
        stage_sizes=(32,),
        strategy_index=[0] * 32,
        vocab_index=0,
    )
    mib = 2**20
    n = 778.2236328125 * mib / 4
    parameters = n * 14 / 8 * 32  # gradients come where activations, which are more, have gone
    kept = 32.0 * mib * 8 * 32
    stays = 198.7357177734375 * mib * 8
    head = 2021.0673828125 * mib / 16
    buffer = 2 * head  # in which the head's gradients are reduced, beside the last layer
    vocab = 4130.34765625 * mib / 8 + stays + buffer
    backward = (1 + 2 * 11008 / 4096) * 2048 * 4096 * 2  # by the rule of a gated MLP
    gone = 32.0 * mib * 8 - 2 * n / 8  # a checkpoint, in whose place a share of gradients comes
    # gathered weights, the first gradient, and what the next layer finds of this one's reduction
    layer = (514.5634765625 * mib + backward) * 8 + 2 * n + 2 * 4096 * 11008 + (2 * n - gone)
    loss = 841.58203125 * mib * 8 - stays + 2 * head - buffer
    # weights of a layer are gathered early, maybe beside the loss
    transient = max(layer, loss) + max(2 * n, 2 * head)
    assert found.allocated_bytes[0] == pytest.approx(parameters + kept + vocab + transient, abs=100)

    k = 1.125552573612729
    forward = cost.layer_rows(0, [WORKED.layers[0]], [(1, 64, "zero2")]).forward["forward"][0, 0]
    assert forward == pytest.approx(31.705e-3, rel=0.01)  # relative weights against its plain ones
    # Half the measured all-reduce of 2N bytes (389 MiB, between the measured 256 and 512).
    group = np.array([cost.groups.index(8, 1)])
    gather = float(cost.groups.seconds("allgather", np.array([n * 2]), group)[0])
    share = math.log(n * 2 / mib / 256) / math.log(2)
    assert gather == pytest.approx(2.3584e-3 * (4.6768 / 2.3584) ** share / 2, rel=1e-9)
    # Every message is shorter than its window, so each costs (k-1) of itself: 2 gathers, 1 RS.
    per_layer = 4 * forward + 3 * (k - 1) * gather
    vocab_rows = cost.vocab_rows([WORKED.vocab], [(1, 64, "zero2")])
    outer = sum(
        float(values[0, 0, 0])
        for part in (vocab_rows.forward, vocab_rows.backward, vocab_rows.step)
        for values in part.values()
    )
    assert found.step_time_s == pytest.approx(32 * per_layer + outer, rel=1e-9)
