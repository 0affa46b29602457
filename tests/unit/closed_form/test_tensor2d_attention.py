"""What `evaluate` of the two-dimensional model can be asked beside the searched space."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InfeasibleExecution
from search.closed_form.tensor2d import STRATEGIES, Strategy, evaluate, evaluate_many
from search.closed_form.tensor2d.engine import pack_candidates
from tests.parity.test_tensor2d_engine import every_candidate
from tests.unit.explore_documents import MODEL, TENSOR2D_SYSTEM

SYSTEM = TENSOR2D_SYSTEM | {"nvlink_size": 8}
VOCABULARY = MODEL | {"vocab": 32000}


def statistics(strategy: Strategy, model: dict[str, Any] = MODEL, **options: Any) -> dict[str, Any]:
    """Return those of eight GPUs, all of them in tensor groups."""
    config = {"dp": 1, "pp": 1, "mbs": 2}
    placement = {"nv_dp": 1, "nv_pp": 1}
    if strategy == "1d":
        config["tp"], placement["nv_tp"] = 8, 8
    else:
        config |= {"tp1": 4, "tp2": 2}
        placement |= {"nv_tp1": 4, "nv_tp2": 2}
    if strategy == "2d":
        config["nb"] = 4
    return evaluate(strategy, model, config, placement, 8, 16, SYSTEM, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plain_attention_writes_its_scores(strategy: Strategy) -> None:
    """Heads * sequence squared, three times kept: after softmax, under the mask, before values."""
    flash, plain = statistics(strategy), statistics(strategy, attention="plain")
    scores = 2 * 32 * 2048 * 2048 / 8  # samples, heads, queries and keys of a GPU
    flash_only = 2 * 2048 * 4096 / 8 + 2 * 2 * 32 * 2048 / 8  # the output's copy, and statistics
    kept = (2.5 * scores - flash_only) * 2e-9 * 32
    assert plain["acts_mem"] - flash["acts_mem"] == pytest.approx(kept, rel=0.02)
    assert plain["t_mem"] > flash["t_mem"]


@pytest.mark.parametrize(
    ("strategy", "attention"), [*((s, "plain") for s in STRATEGIES), ("2d", "summa")]
)
def test_recomputed_attention_keeps_no_scores(strategy: Strategy, attention: Any) -> None:
    """Less memory for more time and FLOP; the parts still add up to the step."""
    kept = statistics(strategy, attention=attention)
    again = statistics(strategy, attention=attention, recompute=True)
    assert again["acts_mem"] < 0.6 * kept["acts_mem"]
    assert again["t"] > kept["t"]
    assert again["flops_per_gpu"] > kept["flops_per_gpu"]
    parts = ("comp", "mem", "tp_comm", "dp_comm", "pp_comm", "bubble")
    assert sum(again[f"t_{part}"] for part in parts) == pytest.approx(again["t"], rel=1e-12)


def test_summa_attention_is_an_attention_of_its_own() -> None:
    """Its products are done in panels, with collectives over both dimensions."""
    plain, summa = (statistics("2d", attention=a, layers=True) for a in ("plain", "summa"))
    logits = {s["layers"][9]["name"]: s["layers"][9] for s in (plain, summa)}["logits"]
    assert logits["comm_fwd_type"] == ["broadcast", "reduce"]
    assert summa["t_tp_comm"] > plain["t_tp_comm"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_add_up_to_the_step(strategy: Strategy) -> None:
    """The layers' rows times layers and micro-batches, those around them once each."""
    s = statistics(strategy, VOCABULARY, layers=True)
    around = {"embedding", "ln_f", "head", "loss"}
    assert around < {row["name"] for row in s["layers"]}
    seconds = sum(row["t"] * (1 if row["name"] in around else 32) for row in s["layers"]) * 8
    assert seconds + s["t_dp_comm"] + s["t_pp_comm"] == pytest.approx(s["t"], rel=1e-12)
    published = statistics(strategy, VOCABULARY, layers=True, compat=True)
    assert around.isdisjoint(row["name"] for row in published["layers"])


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("1d", {"attention": "linear"}, "expected one of flash, plain, summa"),
        ("2d-seqp", {"attention": "summa"}, "summa needs the strategy 2d"),
        ("1d", {"recompute": True}, "flash attention stores no scores"),
        ("2d", {"attention": "plain", "recompute": True, "compat": True}, "in 1d only"),
    ],
)
def test_attention_that_is_none(strategy: Strategy, options: dict[str, Any], sentence: str) -> None:
    """One sentence that says what there is."""
    with pytest.raises(InfeasibleExecution, match=sentence) as caught:
        statistics(strategy, **options)
    assert caught.value.kind == "input"


@pytest.mark.parametrize(
    ("strategy", "model", "config", "sentence"),
    [
        ("2d", {}, {"nb": 4097}, "nb = 4097 panels are more than the 4096 columns"),
        ("2d", {"l": 2049}, {}, r"the 2049 tokens .* over tp2 = 2 evenly"),
        ("2d-seqp", {"l": 2052}, {}, r"the 2052 tokens .* over tp1 \* tp2 = 8 evenly"),
        ("1d", {"l": 2052}, {}, r"the 2052 tokens .* over tp = 8 evenly"),
    ],
)
def test_candidate_that_no_search_has(
    strategy: Strategy, model: dict[str, Any], config: dict[str, int], sentence: str
) -> None:
    """Both models refuse it, and one micro-batch that divides is all that it needs."""
    x: dict[str, int] = {"dp": 1, "pp": 1, "mbs": 1, "nv_dp": 1, "nv_pp": 1}
    two = {"tp1": 4, "tp2": 2, "nv_tp1": 4, "nv_tp2": 2}
    x |= {"tp": 8, "nv_tp": 8} if strategy == "1d" else two
    if strategy == "2d":
        x["nb"] = 4
    x |= config

    def price(mbs: int) -> Any:
        parts = {key: value for key, value in x.items() if not key.startswith("nv_")}
        near = {key: value for key, value in x.items() if key.startswith("nv_")}
        return evaluate(strategy, MODEL | model, parts | {"mbs": mbs}, near, 8, 16, SYSTEM)

    with pytest.raises(InfeasibleExecution, match=sentence):
        price(1)
    packed = pack_candidates(
        strategy, [x, x | {"mbs": 8, "nb": 4} if "nb" in x else x | {"mbs": 8}]
    )
    roomy = SYSTEM | {"hbm_capacity": 1e6}
    ok = evaluate_many(strategy, MODEL | model, packed, 8, 16, roomy)
    assert ok["ok"].tolist() == [False, True]
    assert ok["reason"][0].startswith(("nb is above", "the tokens of a micro-batch"))


@pytest.mark.parametrize("compat", [False, True])
def test_panels_of_one_gpu_are_one_candidate(compat: bool) -> None:
    """Where nothing is divided, panels change nothing; the published model counts them."""
    system = SYSTEM | {"hbm_capacity": 1e6}
    _, found = every_candidate("2d", MODEL, 2, 4, system, compat=compat)
    alone = [x for x in found["candidate"] if x["tp1"] == x["tp2"] == 1]
    assert {int(x["nb"]) for x in alone} == ({1, 2, 4, 8} if compat else {1})
