"""The stable Python interface: names in, results out, one sentence for a wrong option."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import search
from autopar.documents.spec import load_spec
from autopar.errors import InputError, OptionError
from autopar.estimate import estimate_hardware, estimate_model
from search.options import SearchOptions
from search.planner.core import solve_tables
from search.request import DEFAULT_HARDWARE, DEFAULT_MODEL, InputSpec, load_inputs
from tests.oracles.instances import small_instance


def test_names_are_enough() -> None:
    """A model name and a card give the plan that the planner class gives."""
    result = search.plan("llama2-7b", "a100-80gb:1x8", settle_bsz=16, default_dp_type="zero2")
    planner = search.Planner("llama2-7b", "a100-80gb:1x8", settle_bsz=16, default_dp_type="zero2")

    assert result.status == "optimal"
    assert result.plan == planner.solve().plan
    assert result.options["memory_constraint_bytes"] == 80 * 2.0**30


def test_documents_are_enough() -> None:
    """The documents behind the names give the same plan."""
    spec = load_spec("llama2-7b")
    documents = (spec, estimate_model(spec, "h100"))
    hardware = estimate_hardware("h100", num_nodes=1, gpus_per_node=8)

    by_documents = search.plan(documents, hardware, settle_bsz=16)

    assert by_documents.plan == search.plan("llama2-7b", "h100:1x8", settle_bsz=16).plan


def test_another_budget_is_solved_on_the_same_tables() -> None:
    """GiB and bytes say the same; less memory is never faster."""
    planner = search.Planner("llama2-7b", "a100-80gb:1x8", settle_bsz=32)
    small = planner.solve(memory_constraint_gib=30.0)
    same = planner.solve(30 * 2.0**30)
    large = planner.solve(memory_constraint_gib=60.0, global_batch_sizes=(32,))

    assert small.plan == same.plan
    assert small.prediction is not None
    assert large.prediction is not None
    assert small.prediction.samples_per_s <= large.prediction.samples_per_s


def test_one_rule_may_be_a_string() -> None:
    """`pin="tp=2"` is one rule, not four letters."""
    result = search.plan("llama2-7b", "h100:1x8", settle_bsz=16, pin="tp=2")

    assert result.plan is not None
    assert {s.tp for s in result.plan.layers} == {2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bogus": 1}, "unknown option 'bogus'"),
        ({"memory_constrain_gib": 40}, "did you mean 'memory_constraint_gib'"),
        ({"memory_constraint_gib": 0}, "--memory-constraint: expected a number above 0"),
        ({"settle_bsz": -1}, "--settle-bsz: expected an integer of at least 1, got -1"),
    ],
)
def test_wrong_options_are_one_sentence(options: dict[str, float], words: str) -> None:
    """Every refusal is an OptionError that names the option."""
    with pytest.raises(OptionError, match=words):
        search.plan("llama2-7b", "h100:1x8", **options)


def test_solve_stage_refuses_what_is_not_numbers() -> None:
    """Arrays that cannot be arrays are an input error, not a TypeError."""
    for bad in ("x", [[1, 2], [3]], [[1j]], None):
        with pytest.raises(InputError):
            search.solve_stage(bad, [[1.0]], [[[0.0]]], 1.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="budget_bytes"):
        search.solve_stage([[1.0]], [[1.0]], [[[0.0]]], "x")  # type: ignore[arg-type]


def test_solve_stage_does_not_read_the_first_transition() -> None:
    """Nothing precedes the first layer, so anything may stand there."""
    solution = search.solve_stage([[1.0]], [[1.0]], [[[float("nan")]]], 1.0)

    assert solution.status == "optimal"
    assert solution.total_s == 1.0


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_default_is_the_shipped_files(sequence_parallel: bool) -> None:
    """Without arguments the shipped files are read; estimating them anew gives the same plan."""
    options = SearchOptions(sequence_parallel=sequence_parallel, time_profile_mode="batch")
    shipped = load_inputs(InputSpec(), options)
    anew = load_inputs(
        InputSpec(model=DEFAULT_MODEL, hardware=DEFAULT_HARDWARE, seq_length=(4096,)), options
    )
    files, card = (search.Planner.from_documents(*x, options).solve() for x in (shipped, anew))

    assert all(source.sha256 and source.path.endswith(".json") for source in files.sources)
    assert {source.role for source in files.sources} >= {"allreduce", "computation", "memory"}
    assert files.estimated
    assert files.plan == card.plan
    assert files.prediction is not None
    assert card.prediction is not None
    assert files.prediction.step_time_s == pytest.approx(card.prediction.step_time_s, rel=1e-12)


def test_tables_that_do_not_fit_together_are_refused() -> None:
    """The core reads arrays unchecked, so wrong axes must not reach it."""
    instance = small_instance(0)
    tables, budget = instance.tables, instance.budget_bytes
    layers, strategies = len(tables.layer_type), len(tables.strategies)

    with pytest.raises(InputError, match="forward_s has shape"):
        solve_tables(replace(tables, forward_s=tables.forward_s[:, :, :0]), budget)
    with pytest.raises(InputError, match="stage_allowed has shape"):
        solve_tables(tables, budget, stage_allowed=np.ones((1, strategies + 1), dtype=np.bool_))
    with pytest.raises(InputError, match="division sums to"):
        solve_tables(tables, budget, division=(layers + 1,))
    with pytest.raises(InputError, match="alternatives is -1"):
        solve_tables(tables, budget, alternatives=-1)
    for extreme in (-(2**63), 2**63):  # beyond the core's integers: clamped, not overflowed
        assert solve_tables(tables, extreme).status == ("infeasible" if extreme < 0 else "optimal")
