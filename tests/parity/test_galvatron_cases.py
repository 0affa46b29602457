"""The published cases of the public peer, each with its own options: our plan beside its plan."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import pytest

from autopar.records import replace
from benchmarks.bench_galvatron_cases import (
    DIFFERENCE,
    Case,
    Outcome,
    answer,
    command_options,
    inputs_of,
    read_cases,
    terms_of,
)
from search.planning.session import open_session
from search.request.options import SearchOptions
from tests import warm
from tests.command_lines import last_said

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = (
    "newest:llama7b_1x8_16g_bsz16_fg0_bug",
    "newest:llama7b_1x8_20g_bsz16_nosp_nopp",
    "newest:llama7b_1x8_21g_bsz16_nosp_nopp",
    "newest:llama7b_1x8_24g_bsz16_full",
    "newest:llama7b_1x8_24g_bsz64_fg0",
    "newest:llama7b_1x8_24g_bsz64_full",
    "newest:llama7b_1x8_40g_bsz16_full",
    "newest:llama7b_1x8_40g_bsz24_fg0",
    "newest:llama7b_1x8_40g_bsz64_3d",
    "newest:llama7b_1x8_40g_bsz64_dptp",
    "newest:llama7b_1x8_40g_bsz64_fg0",
    "v2.4.0:llama7b_1x8_24g_bsz16_full",
    "v2.4.0:llama7b_1x8_40g_bsz16_full",
    "v2.4.0:llama7b_1x8_40g_bsz64_3d",
    "v2.4.0:llama7b_1x8_40g_bsz64_dptp",
    "v2.4.0:llama7b_1x8_40g_bsz64_fg0",
)


@cache
def cases() -> dict[str, Case]:
    """Return all cases by key.

    The smallest plan of the first one needs 16.27 of 16 GiB at an OOM risk of 1 %.
    """
    found = {case.key: case for case in read_cases(ROOT / "tests" / "data")}
    first = found[KEYS[0]]
    found[KEYS[0]] = replace(first, options=replace(first.options, oom_risk=0.1))
    return found


@cache
def outcome(folder: Path, key: str) -> Outcome:
    """Return our answer to one case."""
    return answer(folder, cases()[key])


@pytest.fixture(scope="module")
def folder(cases_dir: Path) -> Path:
    """Return the folder of the profiles that the cases are about, which are the peer's files."""
    return cases_dir / "galvatron"


def run(*options: str, cwd: Path) -> str:
    """Run autopar-search and return what it prints."""
    done = warm.command("autopar-search", *options, cwd=cwd).completed()
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_case_is_listed() -> None:
    """No case is left out."""
    assert set(cases()) == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_plan_is_right(folder: Path, key: str) -> None:
    """Legal, fitting, optimal, T within 5 % above the replay, no slower than a usable peer plan."""
    found = outcome(folder, key)

    assert found.problems == ()
    assert found.result.plan is not None
    assert found.result.stats.cpu_s < 1.0


@pytest.mark.parametrize("key", KEYS)
def test_plan_obeys_the_options_of_its_case(folder: Path, key: str) -> None:
    """What a case disables is not in the plan."""
    options, plan = cases()[key].options, outcome(folder, key).result.plan

    assert plan is not None
    assert plan.global_batch == options.settle_bsz
    assert options.settle_chunk in (None, plan.num_microbatches)
    assert not (options.disable_pp and plan.num_stages > 1)
    assert options.fine_grained_mode or len(set(plan.layers)) == 1
    for s in plan.layers:
        assert not (options.disable_sp and s.ulysses)
        assert not (options.disable_sdp and s.zero3)
        assert not (options.disable_ckpt and s.checkpoint)


@pytest.mark.parametrize("key", KEYS)
def test_differences_are_explained_by_terms(folder: Path, key: str) -> None:
    """Every difference over 5 % between our price of its plan and its own is a sum of terms."""
    case, found = cases()[key], outcome(folder, key)
    if found.peer is None or case.step_time_s is None:
        assert case.step_time_s is None
        return
    difference = case.step_time_s - found.peer.step_time_s
    if abs(difference) <= DIFFERENCE * found.peer.step_time_s:
        return
    explained = sum(in_turn for _, _, in_turn in terms_of(case, found))
    exact = 1e-6 if case.engine == "newest" else 1e-3
    assert found.peer.step_time_s + explained == pytest.approx(case.step_time_s, rel=exact)


def test_illegal_plan_of_the_peer_says_the_arithmetic(folder: Path) -> None:
    """Six samples over four ranks: floored by the peer, illegal here."""
    peer = outcome(folder, "newest:llama7b_1x8_40g_bsz24_fg0").peer

    assert peer is not None
    assert not peer.legal
    broken = "global batch(24) % (micro-batches(4) * dp(4)) = 8 != 0"
    assert any(broken in problem for problem in peer.problems)


@pytest.mark.parametrize(
    "key", ["newest:llama7b_1x8_24g_bsz64_full", "newest:llama7b_1x8_40g_bsz64_dptp"]
)
def test_command_answers_the_same(folder: Path, tmp_path: Path, key: str) -> None:
    """The real command, and its price of the peer's file."""
    case, found = cases()[key], outcome(folder, key)
    options = [*command_options(folder, case), "--json", "-"]
    document = json.loads(run(*options, cwd=tmp_path))
    best = found.result.prediction

    assert best is not None
    assert document["status"] == "optimal"
    assert document["legal"]
    assert document["fits"]
    assert document["step_time_s"] == pytest.approx(best.step_time_s, rel=1e-12)
    assert document["replay_s"] <= document["step_time_s"] * (1 + 1e-12)
    assert document["step_time_s"] <= document["replay_s"] * 1.05
    assert document["gap"] == 0.0

    peer_file = tmp_path / "peer.json"
    peer_file.write_text(json.dumps(case.strategy_file))
    priced = json.loads(run(*options, "--evaluate", str(peer_file), cwd=tmp_path))
    assert found.peer is not None
    assert priced["step_time_s"] == pytest.approx(found.peer.step_time_s, rel=1e-12)
    assert document["step_time_s"] <= priced["step_time_s"]


@pytest.mark.parametrize(
    "extra",
    [
        ("--max-bsz", "64", "--min-bsz", "16", "--global-batch-size", "-1"),
        ("--default-dp-type", "any", "--memory-constraint", "20"),
    ],
)
def test_files_are_the_same_every_time(
    folder: Path, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    """Strategy and plan file are the same bytes."""
    case = cases()["newest:llama7b_1x8_24g_bsz64_full"]
    contents = []
    for run_number in range(2):
        out = tmp_path / str(run_number)
        options = ["--output-config-path", str(out)]
        run(*last_said([*command_options(folder, case), *extra, *options]), cwd=tmp_path)
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})

    assert len(contents[0]) == 2
    assert contents[0] == contents[1]


def test_more_memory_is_never_slower(folder: Path) -> None:
    """12, 13, ... 80 GiB at G = 64, one planner solved again and again."""
    options = SearchOptions(
        default_dp_type="zero2",
        sp_space="tp+sp",
        time_profile_mode="batch",
        fp32_gradients=False,
        settle_bsz=64,
        top=0,
    )
    planner = open_session(inputs_of(folder), options).planner
    speeds: list[float] = []
    smallest: set[int] = set()
    for gib in range(12, 81):
        result = planner.solve(gib * 2.0**30)
        if result.prediction is None:
            assert result.infeasibility is not None
            smallest.add(result.infeasibility.smallest_budget_bytes)
            speeds.append(0.0)
            continue
        assert result.prediction.legal
        assert result.prediction.fits
        assert result.prediction.replay_s <= result.prediction.step_time_s * (1 + 1e-12)
        assert result.prediction.step_time_s <= result.prediction.replay_s * 1.05
        speeds.append(result.prediction.samples_per_s)

    pairs = enumerate(itertools.pairwise(speeds), start=12)
    assert [(gib, slower, faster) for gib, (faster, slower) in pairs if slower < faster] == []
    assert len(set(speeds)) > 20  # memory is what limits the plan nearly everywhere
    # the smallest budget that infeasible answers name is the same for all, and tight
    assert len(smallest) == 1
    (limit,) = smallest
    assert limit > (12 + speeds.count(0.0) - 1) * 2**30
    assert planner.solve(limit).status == "optimal"
    assert planner.solve(limit - 1).status == "infeasible"
