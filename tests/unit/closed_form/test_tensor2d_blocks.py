"""What the default two-dimensional model adds to the published one, beside figures known apart."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InputError
from search.closed_form.tensor2d import Strategy, evaluate, survey

SYSTEM: dict[str, Any] = {
    "matrix_flops_fp16": 1000,
    "vector_flops_fp16": 1000,
    "hbm_bandwidth": 1e6,
    "hbm_capacity": 1e5,
    "nvlink_bandwidth": 300,
    "nvlink_eff": 1,
    "nvlink_latency": 1e-6,
    "ib_bandwidth": 25,
    "ib_eff": 1,
    "ib_latency": 1e-5,
    "nvlink_size": 8,
}
LLAMA_7B: dict[str, Any] = {
    "l": 4096,
    "e": 4096,
    "h": 32,
    "depth": 32,
    "f": 11008,
    "causal": True,
    "structure": "llama",
    "vocab": 32000,
}
LLAMA_70B = LLAMA_7B | {"e": 8192, "h": 64, "depth": 80, "f": 28672, "kv_heads": 8}
LLAMA_8B = LLAMA_7B | {"l": 8192, "f": 14336, "kv_heads": 8, "vocab": 128256}


def price(
    model: dict[str, Any], *, way: dict[str, Any] | None = None, **degrees: int
) -> dict[str, Any]:
    """Return the statistics of one-dimensional degrees; batch 8."""
    config = dict.fromkeys(("dp", "tp", "pp", "mbs"), 1) | degrees
    gpus = config["dp"] * config["tp"] * config["pp"]
    placement = dict.fromkeys(("nv_tp", "nv_dp", "nv_pp"), 1)
    return evaluate("1d", model, config, placement, gpus, 8, SYSTEM, **way or {})


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(LLAMA_7B, 6_738_415_616), (LLAMA_8B, 8_030_261_248), (LLAMA_70B, 68_976_648_192)],
    ids=["llama2-7b", "llama3-8b", "llama2-70b"],
)
def test_parameters_are_those_of_the_published_models(
    model: dict[str, Any], parameters: int
) -> None:
    """Grouped queries, gate, RMS norms, embedding and head, to the last one; 16 bytes each."""
    found = price(model)
    assert found["wts_mem"] == pytest.approx(2e-9 * parameters, rel=1e-12)
    states = found["wts_mem"] + found["wts_grad_mem"] + found["wts_optimizer_states_mem"]
    assert states == pytest.approx(16e-9 * parameters, rel=1e-12)
    more = price(model | {"gradient_bytes": 4})
    assert more["mem"] - found["mem"] == pytest.approx(2e-9 * parameters, rel=1e-9)
    assert more["t"] == found["t"]
    assert price(model | {"gradient_bytes": 4}, dp=2)["t"] > price(model, dp=2)["t"]
    tied = price(model | {"tied": True})
    table = model["vocab"] * model["e"]
    assert found["wts_mem"] - tied["wts_mem"] == pytest.approx(2e-9 * table, rel=1e-9)


def test_flop_are_six_for_each_parameter_and_token_and_those_of_attention() -> None:
    """Embedding apart; causal attention has 2 products forward and 5 backward, of half the size."""
    m = LLAMA_7B
    tokens = 8 * m["l"]
    matrices = 6_738_415_616 - m["vocab"] * m["e"]
    attention = 7 * m["depth"] * tokens * m["l"] * m["e"]
    expected = (6 * matrices * tokens + attention) * 1e-12
    assert price(m)["flops_per_gpu"] == pytest.approx(expected, rel=0.01)
    whole = price(m | {"causal": False})["flops_per_gpu"]
    assert whole - price(m)["flops_per_gpu"] == pytest.approx(attention * 1e-12, rel=0.03)


def test_grouped_queries_keep_and_send_less() -> None:
    """Fewer keys are kept; where columns outnumber them, each column has one."""
    many = LLAMA_8B | {"kv_heads": 32}
    a, b = price(LLAMA_8B), price(many)
    m = LLAMA_8B
    width = m["e"] * 8 / 32
    kept = m["depth"] * m["l"] * 2 * (m["e"] - width) * 2e-9
    assert b["acts_mem"] - a["acts_mem"] == pytest.approx(kept, rel=1e-9)
    assert price(m | {"kv_heads": None}) == pytest.approx(b, rel=1e-12)
    for tp, weights in ((8, 8), (16, 16)):
        per_gpu = price(m | {"vocab": 0}, tp=tp)["wts_mem"] / 2e-9 / m["depth"]
        shards = (2 * m["e"] + 3 * m["f"]) * m["e"] / tp
        heads = 2 * m["e"] * (m["e"] / 32) * weights / tp
        assert per_gpu == pytest.approx(shards + heads + 2 * m["e"])
    seqp: dict[str, Any] = {"config": {"dp": 1, "tp1": 1, "tp2": 8, "pp": 1, "mbs": 1}}
    seqp["placement"] = {"nv_tp1": 1, "nv_tp2": 8, "nv_dp": 1, "nv_pp": 1}
    few, all_keys = (
        evaluate("2d-seqp", model, **seqp, n_gpus=8, global_batch_size=8, system=SYSTEM)
        for model in (m, many)
    )
    assert few["t_tp_comm"] < all_keys["t_tp_comm"] / 2


def test_what_surrounds_the_layers_sits_on_two_stages() -> None:
    """The last stage sets the pace, the first one is waited for once; each has one table."""
    bare, whole = price(LLAMA_7B | {"vocab": 0}, pp=4), price(LLAMA_7B, pp=4)
    table = LLAMA_7B["vocab"] * LLAMA_7B["e"]
    assert whole["wts_mem"] - bare["wts_mem"] == pytest.approx(table * 2e-9, rel=1e-9)
    assert whole["t"] > bare["t"]
    assert whole["t_pp_comm"] == bare["t_pp_comm"]
    waited = whole["t_bubble"] - bare["t_bubble"]
    pace = (whole["t_comp"] + whole["t_mem"] + whole["t_tp_comm"]) - (
        bare["t_comp"] + bare["t_mem"] + bare["t_tp_comm"]
    )
    assert 0 < waited < pace / 8
    alone = price(LLAMA_7B)["t"] - price(LLAMA_7B | {"vocab": 0})["t"]
    assert alone == pytest.approx(pace + 8 * waited)
    # both stages add up the gradients of a table that they share
    tied = price(LLAMA_7B | {"tied": True}, pp=4)
    seconds = 2 * (1e-5 + table * 2e-9 / 2 / 25)
    assert tied["t_dp_comm"] - whole["t_dp_comm"] == pytest.approx(seconds)


def test_a_loss_that_does_not_fit_the_last_stage() -> None:
    """Logits of one micro-batch count there, where no other activations but its own are kept."""
    model = LLAMA_7B | {"vocab": 1_000_000, "depth": 4}
    found = price(model, pp=4)
    logits = model["l"] * model["vocab"] * (2 + 4) * 1e-9
    assert logits < found["acts_mem"] < logits * 1.1
    assert found["wts_mem"] > 1_000_000 * 4096 * 2e-9


@pytest.mark.parametrize("strategy", ["1d", "2d", "2d-seqp"])
def test_compat_knows_only_the_five_sizes(strategy: Strategy) -> None:
    """Whatever else is given, the published model is searched."""
    sizes = ("l", "e", "h", "depth", "f")
    bare = {name: LLAMA_8B[name] for name in sizes}
    with_all = survey(strategy, LLAMA_8B, 64, 64, SYSTEM, compat=True)
    assert with_all.best == survey(strategy, bare, 64, 64, SYSTEM, compat=True).best
    default = survey(strategy, bare, 64, 64, SYSTEM)
    assert default.best != survey(strategy, LLAMA_8B, 64, 64, SYSTEM).best


def test_plain_attention_of_grouped_queries_without_dropout() -> None:
    """Scores are kept once, keys by their own heads."""
    kept = {}
    for name, change in (
        ("published", {"structure": "gpt", "kv_heads": None}),
        ("grouped", {"structure": "gpt"}),
        ("llama", {}),
    ):
        for recompute in (False, True):
            way = {"attention": "plain", "recompute": recompute, "layers": True}
            rows = price(LLAMA_8B | change, way=way)["layers"]
            names = ("logits", "softmax", "dpr_at", "attend")
            volumes = [row["activation_buffer"] for row in rows if row["name"] in names]
            kept[name, recompute] = pytest.approx(sum(volumes) / 2e-9, rel=1e-12)
    m, scores = LLAMA_8B, 32 * LLAMA_8B["l"] ** 2
    queries, keys = m["l"] * m["e"], m["l"] * m["e"] / 4
    assert kept["published", False] == 3 * queries + 2.5 * scores
    assert kept["grouped", False] == 2 * queries + keys + 2.5 * scores
    assert kept["llama", False] == 2 * queries + keys + scores
    assert kept["llama", True] == 2 * queries + keys


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kv_heads": 5}, r"kv_heads.* the value is 5, expected a divisor of h = 32"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"gradient_bytes": 3}, "gradient_bytes"),
        ({"structure": "bert"}, "structure"),
        ({"vocab": -1}, "vocab"),
    ],
)
def test_unusable_models(change: dict[str, Any], sentence: str) -> None:
    """One sentence with the field."""
    with pytest.raises(InputError, match=sentence):
        price(LLAMA_8B | change)
