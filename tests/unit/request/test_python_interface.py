"""The stable Python interface: names in, results out, one sentence for a wrong option."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import search
from autopar.documents.catalog import DEFAULT_MODEL
from autopar.documents.spec import load_spec
from autopar.errors import InputError, OptionError
from autopar.rates.card import estimate_hardware
from autopar.rates.model import estimate_model
from autopar.records import replace
from autopar.sources import STACK_ROLE
from search.planning.layered.core import solve_tables
from search.request.options import SearchOptions
from search.request.request import DEFAULT_HARDWARE, InputSpec, load_inputs
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

    by_names = search.plan("llama2-7b", "h100:1x8", global_batch_size=16, engine="none")
    assert by_documents.plan == by_names.plan


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
        ({"memory_constrain_gib": 40}, "Did you mean 'memory_constraint_gib'"),
        ({"memory_constraint_gib": 0}, "--memory-constraint: expected a number of GiB above 0"),
        (
            {"settle_bsz": -1},
            "of at least 1 and up to 16777216, got -1",
        ),
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


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("time_s", [1.0], "time_s has shape (1,), expected (layers, strategies)"),
        ("time_s", [[], []], "time_s has shape (2, 0), expected (layers, strategies)"),
        ("memory_bytes", [[1.0, 2.0]], "memory_bytes has shape (1, 2), expected (2, 2)"),
        ("transition_s", [[0.0]], "transition_s has shape (1, 1), expected (2, 2, 2)"),
        ("transient_bytes", [[0.0]], "transient_bytes has shape (1, 1), expected (2, 2)"),
        ("time_s", [[1.0, np.nan]] * 2, "time_s"),
        ("memory_bytes", [[1.0, -0.25]] * 2, "memory_bytes contains a negative number (-0.25)"),
        ("transient_bytes", [[0.0, -np.inf]] * 2, "transient_bytes contains a negative number (-i"),
        ("transition_s", [[[2e150] * 2] * 2] * 2, "transition_s contains a number above 1e+150"),
        ("budget_bytes", None, "budget_bytes is None, expected a number"),
        ("budget_bytes", np.nan, "budget_bytes"),
        ("budget_bytes", 1e200, "budget_bytes is 1e+200, expected a number of bytes up to 1e+150"),
        # whole numbers that no float holds; those of over 4300 digits have no text either
        *(
            pytest.param(
                "budget_bytes", 10**digits, "budget_bytes has over 308 dig", id=f"{digits}"
            )
            for digits in (400, 5000)
        ),
        ("time_s", [[1.0, 10**400]] * 2, "time_s is not an array of real numbers (int too large"),
    ],
)
def test_solve_stage_names_what_it_refuses(name: str, value: Any, sentence: str) -> None:
    """By array, and by the first number that is wrong in it."""
    arguments: dict[str, Any] = {
        "time_s": [[1.0, 2.0]] * 2,
        "memory_bytes": [[1.0, 1.0]] * 2,
        "transition_s": np.zeros((2, 2, 2)),
        "transient_bytes": np.zeros((2, 2)),
        "budget_bytes": 8.0,
    }
    with pytest.raises(InputError) as caught:
        search.solve_stage(**{**arguments, name: value})

    assert str(caught.value).startswith(sentence)


def test_an_array_is_refused_before_the_budget_is() -> None:
    """The first argument that is wrong is named, in their order."""
    with pytest.raises(InputError, match="time_s contains NaN"):
        search.solve_stage([[np.nan]], [[-1.0]], [[[0.0]]], "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [1, 2, 7, 8, 9, 31, 129, 300])
def test_sums_of_a_stage_are_those_of_its_arrays(layers: int) -> None:
    """To the last bit, as a caller adds them up with NumPy."""
    random = np.random.default_rng(layers)
    times, memory, transient = random.uniform(0.1, 1.0, (3, layers, 2))
    moves = random.uniform(0.0, 0.1, (layers, 2, 2))
    found = search.solve_stage(times, memory, moves, np.inf, transient)
    rows, choice = np.arange(layers), list(found.choice)

    total = times[rows, choice].sum() + moves[rows[1:], choice[:-1], choice[1:]].sum()
    assert found.total_s == found.bound_s == total
    assert found.memory_bytes == memory[rows, choice].sum() + transient[rows, choice].max()


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

    documents = [source for source in files.sources if source.role != STACK_ROLE]
    assert all(source.sha256 and source.path.endswith(".json") for source in documents)
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


WRONG_WORDS: list[tuple[dict[str, Any], str]] = [
    ({"sp_space": "TP"}, "--sp-space"),
    ({"sp_space": ["tp"]}, "--sp-space: expected tp, sp or tp+sp, got ['tp']"),
    ({"sp_space": None}, "--sp-space: expected tp, sp or tp+sp, got None"),
    ({"pipeline_type": "GPipe"}, "--pipeline-type: expected pipedream_flush, 1f1b or gpipe"),
    ({"disable_tp": "0"}, "--disable-tp: expected 0 or 1, got '0'"),
    ({"disable_tp": 2}, "--disable-tp: expected 0 or 1, got 2"),
    ({"time_profile_mode": "Batch"}, "--time-profile-mode: expected static, batch"),
    ({"time_limit_s": float("nan")}, "--time-limit: expected a number of seconds above 0, got nan"),
    ({"time_limit_s": 10**400}, "--time-limit: expected a number of seconds above 0, got 1000"),
    ({"time_limit_s": "1"}, "--time-limit: expected a number of seconds above 0, got '1'"),
    ({"time_limit_s": True}, "--time-limit: expected a number of seconds above 0, got True"),
    ({"settle_bsz": True}, "--global-batch-size: expected an integer of at least 1"),
    ({"settle_bsz": 8.0}, "--global-batch-size: expected an integer of at least 1"),
    ({"settle_bsz": "8"}, "--global-batch-size: expected an integer of at least 1"),
    (
        {"settle_bsz": 10**30},
        "--global-batch-size: expected an integer of at least 1 and up to 16777216",
    ),
    ({"max_tp_deg": None}, "--max-tp-deg: expected an integer of at least 1, got None"),
    ({"max_tp_deg": 10**500}, "--max-tp-deg: expected an integer of at least 1"),
    ({"pp_division": (-1, 33)}, "--pp-division: expected an integer of at least 1, got -1"),
    ({"pp_division": "16,16"}, "--pp-division: expected a tuple of integers, got '16,16'"),
    ({"pp_division": 16}, "--pp-division: expected a tuple of integers, got 16"),
    ({"pp_division": (16.0, 16)}, "--pp-division: expected an integer of at least 1, got 16.0"),
    ({"column_parallel_share": 5}, "--column-parallel-share: expected a number of at least 0"),
    ({"reserve_fraction": np.array([0.1, 0.2])}, "--reserve: expected a number of at least 0"),
    ({"memory_constraint_gib": "80"}, "--memory-constraint: expected a number of GiB above 0"),
    (
        {"memory_constraint_gib": float("inf")},
        "--memory-constraint: expected a number of GiB above 0",
    ),
    (
        {"memory_constraint_gib": 80, "memory_constraint_bytes": 8e10},
        "memory_constraint_bytes",
    ),
    ({"pin": (1,)}, "--pin: expected a text, got 1"),
    ({"pin": 1}, "--pin: expected a tuple of texts, got 1"),
    ({"calibration": 3}, "read_calibration"),
    ({"min_bsz": 16, "max_bsz": 8}, "--min-bsz: 16 exceeds --max-bsz 8"),
    ({"min_bsz": 1, "max_bsz": 1 << 20, "bsz_scale": 1}, "are more than 2000 global batches"),
    ({"mixed_precision": b"bf16"}, "--mixed-precision: expected bf16, fp16 or fp32"),
]


@pytest.mark.parametrize(("options", "said"), WRONG_WORDS)
def test_python_is_refused_what_the_command_is(options: dict[str, Any], said: str) -> None:
    """One validation, in the dataclass: a wrong word or type never decides in silence."""
    with pytest.raises(OptionError, match=re.escape(said)):
        search.plan("llama2-7b", "a100-80gb:1x8", **options)


def test_batches_are_limited_by_their_number_alone() -> None:
    """2,000 of them are searched, however large they are."""
    options = SearchOptions(min_bsz=1 << 20, max_bsz=(1 << 20) + 1999, bsz_scale=1)
    with pytest.raises(OptionError, match="more than 2000"):
        replace(options, max_bsz=options.max_bsz + 1)


@pytest.mark.parametrize(
    ("model", "hardware"),
    [(1, "a100-80gb:1x8"), (None, None), ("llama2-7b", 3), (("a", "b"), "a100-80gb:1x8")],
)
def test_documents_of_another_type_are_refused(model: Any, hardware: Any) -> None:
    """With the argument's name and what it takes."""
    with pytest.raises(OptionError, match=r"^(model|hardware): expected "):
        search.plan(model, hardware)


def test_numbers_of_numpy_and_lists_are_taken(recwarn: pytest.WarningsRecorder) -> None:
    """And kept as Python's, so that a plan file can hold them."""
    options = SearchOptions(
        settle_bsz=np.int64(16),  # type: ignore[arg-type]
        reserve_fraction=np.float32(0.5),  # type: ignore[arg-type]
        pp_division=[np.int32(16), 16],  # type: ignore[arg-type]
        disable_tp=1,  # type: ignore[arg-type]
    )
    assert (options.settle_bsz, options.reserve_fraction) == (16, 0.5)
    assert (options.pp_division, options.disable_tp) == ((16, 16), True)
    for value in (options.settle_bsz, options.reserve_fraction, options.disable_tp):
        assert type(value) in (int, float, bool)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"memory_constraint_gib": float("nan")},
            "--memory-constraint: expected a number of GiB above 0",
        ),
        ({"memory_constraint_gib": "80"}, "--memory-constraint: expected a number of GiB above 0"),
        (
            {"memory_constraint_bytes": -1.0},
            "--memory-constraint: expected a number of GiB above 0",
        ),
        ({"top": -1}, "--top: expected an integer of at least 0"),
        ({"top": 2.0}, "--top: expected an integer of at least 0"),
        ({"global_batch_sizes": (0,)}, "--global-batch-size: expected an integer of at least 1"),
        ({"global_batch_sizes": ("8",)}, "--global-batch-size: expected an integer of at least 1"),
    ],
)
def test_what_is_asked_of_a_planner_is_checked_like_options(
    arguments: dict[str, Any], said: str
) -> None:
    """A negative constraint once meant no memory at all, and a text was a TypeError."""
    planner = search.Planner("llama2-7b", "a100-80gb:1x8", settle_bsz=8)
    with pytest.raises(OptionError, match=re.escape(said)):
        planner.solve(**arguments)


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("cp=2", {"max_cp_deg": 1}, "Use a larger --max-cp-deg than 1"),
        (
            "cp=8",
            {},
            "than tokens / 1024 with --search-space full, else 1 (the default)",
        ),
        ("ulysses=1", {}, "Use another --sp-space than tp (the default)"),
        ("tp=4", {"max_tp_deg": 2}, "Use a larger --max-tp-deg than 2"),
        ("zero3=1", {"disable_sdp": True}, "Remove --disable-sdp"),
        ("ckpt=1", {"disable_ckpt": True}, "Remove --disable-ckpt"),
        ("tp=3", {}, "no allowed strategy satisfies all rules"),
    ],
)
def test_a_rule_that_an_option_excludes_is_blamed_on_the_option(
    rule: str, options: dict[str, Any], said: str
) -> None:
    """Divisibility is the reason only where no option is."""
    found = search.plan("llama2-7b", "h100:1x8", settle_bsz=16, pin=rule, **options)
    assert found.infeasibility is not None
    assert said in found.infeasibility.reason


@pytest.mark.whole
def test_a_space_too_large_to_price_is_refused_before_it_is(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Tables of gigabytes once ended in a MemoryError after a minute."""
    wide: dict[str, Any] = dict.fromkeys(
        ("max_tp_deg", "max_sp_deg", "max_cp_deg", "settle_bsz"), 65520
    )
    with pytest.raises(OptionError, match="1,024"):
        search.plan("llama2-7b", "h100:8190x8", sp_space="tp+sp", strided_tp=True, **wide)
    with pytest.raises(OptionError, match="--max-bsz"):
        search.plan(
            "t5-3b",
            "h100:128x8",
            max_bsz=4000,
            max_tp_deg=64,
            max_cp_deg=64,
            max_sp_deg=64,
            sp_space="tp+sp",
            strided_tp=True,
            default_dp_type="any",
        )
