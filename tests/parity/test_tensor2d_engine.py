"""The compiled two-dimensional engine against its readable oracle, defect by defect."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins
from numpy.typing import NDArray

from autopar.documents.checks import load_document
from autopar.errors import InfeasibleExecution, InputError
from search.closed_form import native
from search.closed_form.answers import Answer
from search.closed_form.tensor2d import (
    CANDIDATE,
    COMPAT,
    CORRECT,
    STRATEGIES,
    Model,
    Quirks,
    Strategy,
    System,
    evaluate,
    evaluate_many,
    explore,
    survey,
)
from search.closed_form.tensor2d.engine import (
    COLLECTIVES,
    OPERATIONS,
    REASONS,
    STATISTICS,
    native_engine,
    pack_candidates,
    unpack_candidate,
)
from tests.oracles.tensor2d import Candidate, evaluate as readable
from tests.oracles.tensor2d.space import candidates

MODEL: dict[str, Any] = {"l": 2000, "e": 1536, "h": 12, "depth": 12, "f": 6144}
SYSTEM: dict[str, Any] = {
    "matrix_flops_fp16": 300,
    "vector_flops_fp16": 75,
    "hbm_bandwidth": 1500,
    "hbm_capacity": 2,
    "nvlink_bandwidth": 300,
    "nvlink_eff": 0.75,
    "nvlink_latency": 2e-6,
    "ib_bandwidth": 25,
    "ib_eff": 0.6,
    "ib_latency": 6e-6,
    "nvlink_size": 8,
}
ROUNDING = 1e-13
"""Same formulas in the same order: bit for bit, but where a compiler fuses operations."""


def random_point(
    rng: random.Random,
) -> tuple[Strategy, dict[str, int], dict[str, int], int, int, dict[str, Any], dict[str, Any]]:
    """Return one candidate with its model and system, most of them legal."""
    strategy = rng.choice(STRATEGIES)
    tp1, tp2 = rng.choice([1, 2, 3, 4, 6, 5]), rng.choice([1, 2, 4, 8, 7])
    if strategy == "1d":
        tp2 = 1
    pp, dp, mbs = rng.choice([1, 2, 3, 4, 12, 5]), rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4])
    batch = dp * mbs * rng.choice([1, 1, 2, 7]) + (rng.random() < 0.03)
    near = [rng.choice([d for d in (1, 2, 4, size) if size % d == 0]) for size in (tp1, tp2, dp)]
    near.append(rng.choice([1, 1, pp]))
    config = {"dp": dp, "pp": pp, "mbs": mbs}
    placement = {"nv_dp": near[2], "nv_pp": near[3]}
    if strategy == "1d":
        config["tp"], placement["nv_tp"] = tp1, near[0]
    else:
        config |= {"tp1": tp1, "tp2": tp2}
        placement |= {"nv_tp1": near[0], "nv_tp2": near[1]}
    if strategy == "2d":
        config["nb"] = max(tp1, tp2) * rng.choice([1, 2, 8])
    system = SYSTEM | {
        "nvlink_size": rng.choice([8, 64, 1024]),
        "nic_factor": rng.choice([0.5, 1, 4]),
        "ib_bandwidth": rng.choice([1, 25, 400]),
        "hbm_bandwidth": rng.choice([50, 1500]),
    }
    model = MODEL | {"l": rng.choice([2000, 2048, 1001, 30])}
    if rng.random() < 0.7:
        model |= {
            "kv_heads": rng.choice([None, 1, 2, 4, 12]),
            "causal": rng.random() < 0.5,
            "structure": rng.choice(["gpt", "llama"]),
            "vocab": rng.choice([0, 1000, 50257]),
            "tied": rng.random() < 0.5,
            "gradient_bytes": rng.choice([2, 4]),
        }
    return strategy, config, placement, dp * tp1 * tp2 * pp, batch, model, system


def both(rng: random.Random, quirks: Quirks) -> bool:
    """Compare both models on a random candidate; return whether it is legal."""
    strategy, config, placement, gpus, batch, model, system = random_point(rng)
    engine = native_engine(
        strategy, load_document(Model, model), gpus, batch, load_document(System, system), quirks
    )
    outcomes, rows = engine.evaluate_many(
        pack_candidates(strategy, [config | placement]), 1, True, native.GO_ON
    )
    try:
        expected = readable(strategy, model, config, placement, gpus, batch, system, compat=quirks)
    except InfeasibleExecution:
        expected = {}
    reason = REASONS[outcomes["reason"][0]]
    fits = bool(expected) and expected["mem"] <= system["hbm_capacity"]
    assert bool(outcomes["ok"][0]) == fits, reason
    assert (reason == "") == fits
    if not expected:
        assert outcomes["time_s"][0] == 0
        return False
    ours = dict(zip(STATISTICS, rows[0].tolist(), strict=True)) | placement
    assert list(ours)[: len(STATISTICS)] == list(expected)[: len(STATISTICS)]
    assert ours.keys() == expected.keys()
    assert ours == pytest.approx(expected, rel=ROUNDING, abs=0)
    parts = [ours[f"{name}_frac"] for name in ("comp", "mem", "tp_comm", "dp_comm", "pp_comm")]
    assert sum(parts) + ours["bubble_frac"] == pytest.approx(1.0)
    assert outcomes["time_s"][0] == ours["t"]
    assert outcomes["memory_gb"][0] == ours["mem"]
    return True


@pytest.mark.parametrize("quirks", [CORRECT, COMPAT], ids=["correct", "compat"])
def test_random_candidates(quirks: Quirks) -> None:
    """Without defects and with all of them; legal or not, and the same verdict."""
    rng = random.Random(1)
    legal = sum(both(rng, quirks) for _ in range(1000))
    assert 200 < legal < 900


def test_random_candidates_with_random_defects() -> None:
    """Any subset of the defects."""
    rng = random.Random(2)
    names = list(Quirks.meanings)
    legal = 0
    for _ in range(1000):
        legal += both(rng, Quirks(**{name: rng.random() < 0.4 for name in names}))
    assert legal > 200


def test_every_reason_has_a_sentence() -> None:
    """The table of sentences is as long as that of the codes."""
    assert len(REASONS) == native.tensor2d.NUM_REASONS
    assert len(set(REASONS)) == len(REASONS)
    assert len(STATISTICS) == native.tensor2d.NUM_STATISTICS
    assert len(set(OPERATIONS)) == len(OPERATIONS) == native.tensor2d.NUM_OPERATIONS
    assert len(set(COLLECTIVES)) == len(COLLECTIVES) == native.tensor2d.NUM_COLLECTIVES


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mbs": 0}, "below 1"),
        ({"dp": 3}, "!= n_gpus"),
        ({"tp": 8, "dp": 1, "nv_tp": 1, "nv_dp": 1}, "heads"),
        ({"pp": 16, "dp": 1, "tp": 1, "nv_tp": 1, "nv_dp": 1}, "layers"),
        ({"mbs": 3}, "batch"),
        ({"tp": 6, "dp": 1, "pp": 1, "nv_tp": 1, "nv_dp": 1, "n": 6, "kv": 4}, "kv_heads"),
        ({"nv_dp": 3}, "placement does not divide"),
        ({"nv_pp": 2, "nv_dp": 4}, "fast domain"),
        ({"mbs": 16}, "memory"),
        ({}, ""),
    ],
)
def test_a_reason_for_every_verdict(change: dict[str, int], word: str) -> None:
    """The sentence is that of what is wrong, and figures are there where there is a step."""
    fine = {"dp": 4, "tp": 2, "pp": 2, "mbs": 1, "nv_tp": 2, "nv_dp": 2, "nv_pp": 1}
    candidate = fine | change
    gpus, model = candidate.pop("n", 16), MODEL | {"kv_heads": candidate.pop("kv", None)}
    row = evaluate_many("1d", model, [candidate], gpus, 64, SYSTEM)[0]
    assert word in row["reason"]
    assert bool(word) == bool(row["reason"])
    assert row["ok"] == (not word)
    assert (row["total_time_s"] > 0) == (word in ("", "memory"))
    assert (row["memory_bytes"] > 2e9) == (word == "memory")


def every_candidate(*where: Any, **options: Any) -> tuple[Answer, NDArray[Any]]:
    """Return a survey and all feasible candidates with their time and memory."""
    found: list[NDArray[Any]] = []
    answer = survey(*where, each=lambda _, rows: found.append(rows), **options)
    return answer, found[0]


def test_candidates_in_any_form_and_number_of_threads() -> None:
    """Mappings, columns and packed rows are the same; so are answers of several threads."""
    for strategy in STRATEGIES:
        _, found = every_candidate(strategy, MODEL, 64, 64, SYSTEM)
        packed = np.ascontiguousarray(found["candidate"])
        documents = []
        for row in packed:
            config, placement = unpack_candidate(strategy, row)
            documents.append(config | placement)
        assert (pack_candidates(strategy, documents) == packed).all()
        columns = {name: [x[name] for x in documents] for name in documents[0]}
        assert (pack_candidates(strategy, columns) == packed).all()
        one = evaluate_many(strategy, MODEL, packed, 64, 64, SYSTEM)
        assert one["ok"].all()
        assert (one["total_time_s"] == found["time_s"]).all()
        for threads in (2, 7):
            again = evaluate_many(strategy, MODEL, packed, 64, 64, SYSTEM, threads=threads)
            assert (again == one).all()


def key(c: Candidate) -> tuple[int, ...]:
    """Return a readable candidate as the compiled one has it."""
    return (
        *(c.data, c.columns, c.rows, c.pipeline, c.microbatch, c.panels),
        *(c.columns_in_domain, c.rows_in_domain, c.data_in_domain, c.pipeline_in_domain),
    )


SPACES = [(strategy, gpus) for strategy in STRATEGIES for gpus in (4, 48, 60)]


@pytest.mark.parametrize(("strategy", "gpus"), SPACES)
def test_the_space_is_that_of_the_readable_model(strategy: Strategy, gpus: int) -> None:
    """Every candidate once: feasible, or counted under a reason; the best are the best."""
    model = Model(**MODEL | {"f": 6144 - 8})  # does not divide by 3
    domain = SYSTEM["nvlink_size"]
    listed = candidates(model, strategy, gpus, 120, domain, repeated_panels=False)
    space = [key(c) for c in listed]
    packed = np.array(space, dtype=CANDIDATE)
    priced = evaluate_many(strategy, model, packed, gpus, 120, SYSTEM)
    found, every = every_candidate(strategy, model, gpus, 120, SYSTEM, top=7)
    assert found.considered == len(space) == len(set(space))
    assert found.feasible == priced["ok"].sum()
    assert found.rejected == Counter(priced["reason"][~priced["ok"]].tolist())
    fits = sorted(space[i] for i in np.flatnonzero(priced["ok"]))
    assert [tuple(row) for row in every["candidate"].tolist()] == fits
    order = sorted(
        (priced["total_time_s"][i], priced["memory_bytes"][i], space[i])
        for i in np.flatnonzero(priced["ok"])
    )
    assert len(found.best) == min(7, len(order))
    for ours, (seconds, memory, which) in zip(found.best, order, strict=False):
        assert ours.statistics["t"] == seconds
        assert ours.rate_per_s == 120 / seconds
        assert ours.memory_bytes == memory
        config, placement = ours.execution["config"], ours.execution["placement"]
        row = pack_candidates(strategy, [config | placement])[0]
        assert tuple(row.tolist()) == which
        question = (strategy, model, config, placement, gpus, 120, SYSTEM)
        assert evaluate(*question) == ours.statistics
        assert readable(*question) == pytest.approx(ours.statistics, rel=ROUNDING, abs=0)


LLAMA: dict[str, Any] = MODEL | {"kv_heads": 4, "causal": True, "structure": "llama", "vocab": 9000}


@pytest.mark.parametrize("objective", ["rate", "time", "memory"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["published", "llama"])
def test_bounds_change_no_answer(objective: Any, threads: int, model: dict[str, Any]) -> None:
    """With and without them, on any number of threads, for every number of answers."""
    options: dict[str, Any] = {"objective": objective}
    system = SYSTEM | {"hbm_capacity": 6}
    for strategy in STRATEGIES:
        whole, _ = every_candidate(strategy, model, 96, 96, system, top=200, **options)
        assert whole.bounded == 0
        assert len(whole.best) > 20
        for top in (0, 1, 20, 200):
            bounded = survey(strategy, model, 96, 96, system, top=top, threads=threads, **options)
            assert bounded.best == whole.best[:top]
            assert (bounded.considered, bounded.feasible) == (whole.considered, whole.feasible)
            assert bounded.rejected == whole.rejected
            assert top > 20 or bounded.bounded > 0
    figure = "mem" if objective == "memory" else "t"
    figures = [found.statistics[figure] for found in whole.best]
    assert figures == sorted(figures)


def test_what_the_published_search_stumbles_over() -> None:
    """Q11: GPUs without a row are rejected. Q12: a panel of one column, and no shared state."""
    short = {"l": 128, "e": 32768, "h": 256, "depth": 2}
    found = survey("2d-seqp", short, 256, 512, SYSTEM | {"hbm_capacity": 80}, top=3)
    assert found.rejected["the sequence is shorter than tp1 * tp2"] > 0
    assert found.considered == found.feasible + sum(found.rejected.values())
    small = {"l": 4096, "e": 256, "h": 2, "depth": 2}
    system = load_document(System, SYSTEM)
    before = to_builtins(system)
    config = explore("2d", small, 64, 64, system, top=1)[0].execution["config"]
    assert config["nb"] >= max(config["tp1"], config["tp2"])
    assert to_builtins(system) == before


def test_no_candidate_is_no_error() -> None:
    """A number of GPUs that nothing divides has no answer, and the count says so."""
    found = survey("1d", MODEL, 1009, 8, SYSTEM)
    assert (found.best, found.considered, found.feasible) == ((), 0, 0)
    tight = survey("1d", MODEL, 8, 8, SYSTEM | {"hbm_capacity": 1e-3})
    assert tight.best == ()
    assert tight.rejected == {REASONS[-1]: tight.considered}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tp": [-1]}, r"candidates\.tp: the value is -1, expected integers"),
        ({"tp1": [1]}, "candidates\\.tp1"),
        ({"dp": [1, 1]}, "columns have lengths"),
        ({"dp": [1, 2, -4]}, r"candidates\.dp: the value is -4"),
        ({"mbs": [1.5]}, r"candidates\.mbs: the value is 1\.5"),
        ({"mbs": [2**31]}, r"candidates\.mbs: the value is 2147483648"),
    ],
)
def test_unusable_columns(change: dict[str, Any], sentence: str) -> None:
    """One sentence with the field."""
    names = ("dp", "tp", "pp", "mbs", "nv_tp", "nv_dp", "nv_pp")
    columns = {name: [1] * 3 for name in names} | change
    with pytest.raises(InputError, match=sentence):
        evaluate_many("1d", MODEL, columns, 8, 8, SYSTEM)
    columns = dict.fromkeys(names, 1)
    with pytest.raises(InputError, match=r"candidates\[0\]\.nv_pp: this key is missing"):
        evaluate_many("1d", MODEL, [{k: 1 for k in names if k != "nv_pp"}], 8, 8, SYSTEM)
    two = dict.fromkeys(("dp", "tp1", "tp2", "pp", "mbs", "nv_tp1", "nv_tp2", "nv_dp", "nv_pp"), 1)
    with pytest.raises(InputError, match=r"candidates\.tp: is not tp1 \* tp2"):
        evaluate_many("2d-seqp", MODEL, two | {"tp": 3}, 8, 8, SYSTEM)
    with pytest.raises(InputError, match="fields"):
        evaluate_many("1d", MODEL, np.zeros(2), 8, 8, SYSTEM)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"top": -1}, "top: the value is -1"),
        ({"threads": 0}, "threads: the value is 0"),
        ({"objective": "speed"}, "objective: the value is 'speed', expected one of rate"),
        ({"n_gpus": 0}, "n_gpus: the value is 0"),
        ({"global_batch_size": 2**31}, "batch: the value is"),
        ({"strategy": "3d"}, "strategy: the value is '3d'"),
    ],
)
def test_unusable_questions(change: dict[str, Any], sentence: str) -> None:
    """One sentence with the argument."""
    arguments: dict[str, Any] = {
        "strategy": "1d",
        "model": MODEL,
        "n_gpus": 8,
        "global_batch_size": 8,
        "system": SYSTEM,
    }
    with pytest.raises(InputError, match=sentence):
        survey(**arguments | change)


def test_quirks_reach_the_engine() -> None:
    """Every switch of the readable model is one of the compiled one, and no other."""
    system, model = load_document(System, SYSTEM), load_document(Model, MODEL)
    for name in Quirks.meanings:
        given = {k: v for k, v in CORRECT.flags().items() if k != name}
        with pytest.raises(KeyError, match=name):
            native.tensor2d.Engine(to_builtins(model), to_builtins(system), given, 0, 8, 8)
