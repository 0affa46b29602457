"""The commands around a fixed planner: exit codes, streams, files, and no traceback ever."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.plan import PlanDocument, write_strategy
from autopar.records import replace
from autopar.run.plan import Prediction
from search.commands import explain as explain_cli, search as cli
from search.engines.candidate import Constraints
from search.planning.layered.prediction import SearchResult
from search.request.interface import fixed_by_rule
from search.show.files import plan_document
from tests.unit.cli_results import (
    INFEASIBLE,
    PLAN,
    PREDICTION,
    RESULT,
    FixedPlanner,
    make_session,
)


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return `fixed(result, prediction)`, which makes the commands use a fixed planner."""
    monkeypatch.chdir(tmp_path)

    def use(result: SearchResult = RESULT, prediction: Prediction = PREDICTION) -> Any:
        session = make_session(result, prediction)
        for module in ("session", "choose"):
            name = f"search.planning.{module}.open_session"
            monkeypatch.setattr(name, lambda *_, **_more: session)
        return session

    return use


def test_search_prints_the_report_and_writes_the_files(
    fixed: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Results on stdout, talk on stderr."""
    fixed()

    assert cli.run([]) == 0

    out, err = capsys.readouterr()
    assert "toy (4 layers) on box, 1 x 8 GPUs" in out
    assert err.count("wrote") == 2
    assert len(list((tmp_path / "configs").iterdir())) == 2


def test_the_plan_of_another_question_has_another_name(
    fixed: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same question again leaves its files; a file that is not its own is kept."""
    fixed()
    found = tmp_path / "configs"
    for _ in range(2):
        assert cli.run(["--model", "a.json"]) == 0
        assert "kept" not in capsys.readouterr().err
    assert len(list(found.iterdir())) == 2
    assert cli.run(["--model", "b.json", "--pin", "tp=1"]) == 0
    assert len(list(found.iterdir())) == 4
    # another number of alternatives is no other plan, another spelling of a path no other model
    capsys.readouterr()
    assert cli.run(["--model", "./b.json", "--pin", "tp=1", "--top", "2"]) == 0
    (kept,) = found.glob("*.bak-*")
    assert f"{kept.stem} had another content, which is kept as {kept.name}" in (
        capsys.readouterr().err
    )
    assert PlanDocument.read(kept).request["model"] == "b.json"
    assert len(list(found.iterdir())) == 5


def test_json_on_stdout_is_the_whole_stdout(fixed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A program can read it."""
    fixed()

    assert cli.run(["--json", "-", "--output-config-path", "none", "--log_dir", "logs"]) == 0

    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "optimal"
    assert err == "autopar-search: --log_dir is ignored: no log files are written\n"


def test_json_in_a_file_leaves_the_report(
    fixed: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With a path both are there, and --frontier adds its list."""
    fixed()

    assert cli.run(["--json", "r.json", "--frontier", "--output-config-path", "none"]) == 0

    document = json.loads((tmp_path / "r.json").read_text())
    assert document["frontier"][0]["samples_per_s"] == 100.0
    assert "Throughput by memory budget" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_infeasible_is_exit_3(fixed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Stage, missing bytes, smallest budget; the JSON object is still printed."""
    fixed(INFEASIBLE)

    assert cli.run(["--json", "-"]) == 3

    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["status"] == "infeasible"
    assert document["notices"] == [err.strip().partition(": ")[2]]
    assert "stage 1 of 0-1 of the smallest plan needs 3.00 GiB more" in err
    assert err.count("\n") == 1


def test_pins_say_what_they_cost(
    fixed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search without them is the measure."""
    session = fixed()
    faster = replace(PREDICTION, samples_per_s=125.0)
    free = FixedPlanner(replace(RESULT, prediction=faster))
    monkeypatch.setattr(type(session), "rebuilt", lambda self, **changes: free)

    assert cli.run(["--pin", "tp=2", "--output-config-path", "none"]) == 0

    assert "the pins cost 20.00 % (100 instead of 125 samples/s)" in capsys.readouterr().err


def test_evaluate_prices_an_illegal_file(
    fixed: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """legal and fits are false, with the arithmetic; the exit code says it was priced."""
    bad = replace(PREDICTION, legal=False, fits=False, problems=("heads(16) % tp(3) = 1 != 0",))
    session = fixed(RESULT, bad)
    write_strategy(PLAN, tmp_path / "s.json")

    assert cli.run(["--evaluate", "s.json", "--json", "-"]) == 0

    document = json.loads(capsys.readouterr().out)
    assert (document["legal"], document["fits"]) == (False, False)
    assert document["problems"] == ["heads(16) % tp(3) = 1 != 0"]
    assert session.planner.asked == [PLAN]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 16}, "8 GPUs"),
        (
            {"layers": PLAN.layers[:3], "stage_sizes": (2, 1)},
            "3 layers, but toy has 4",
        ),
    ],
)
def test_evaluate_needs_profiles_of_the_plan(
    fixed: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    """What the profiles do not describe cannot be priced."""
    fixed()
    write_strategy(replace(PLAN, **changes), tmp_path / "s.json")

    assert cli.run(["--evaluate", "s.json"]) == 2
    assert message in capsys.readouterr().err


def test_internal_error_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traceback comes only when it is asked for."""

    def fail(*_: object, **_more: object) -> None:
        raise RuntimeError("boom\nsecond line")

    monkeypatch.setattr("search.planning.choose.open_session", fail)
    monkeypatch.delenv("AUTOPAR_DEBUG", raising=False)

    assert cli.run([]) == 1
    err = capsys.readouterr().err
    assert "RuntimeError: boom second line (set AUTOPAR_DEBUG=1 for the traceback)" in err
    assert err.count("\n") == 1

    monkeypatch.setenv("AUTOPAR_DEBUG", "1")
    with pytest.raises(RuntimeError):
        cli.run([])


def test_explain_reads_its_own_plan_file(
    fixed: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Inputs and options come from the file; the rule is answered."""
    fixed()
    document = plan_document(RESULT, request={"min-bsz": "16", "pin": ["tp=2"]})
    document.write(tmp_path / "p.json")

    assert explain_cli.run(["p.json", "--why-not", "tp=8"]) == 0

    out = capsys.readouterr().out
    assert "Why not tp=8: it is this plan\n" in out
    assert explain_cli.run(["p.json", "--why-not", "tp=8", "--verbose"]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith(out.partition("\nNext")[0])
    assert "more resources" in whole


def test_no_plan_at_all_names_preset_heads_and_gpus(
    fixed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the degrees had to divide, and which option left them no other."""
    assert INFEASIBLE.infeasibility is not None
    fixed(
        replace(
            INFEASIBLE,
            options=dict(RESULT.options) | {"search_space": "tp"},
            infeasibility=replace(INFEASIBLE.infeasibility, smallest_budget_bytes=0),
        )
    )

    assert cli.run([]) == 3
    assert capsys.readouterr().err == (
        "autopar-search: no plan for toy (16 heads) on 8 GPUs with --search-space tp, "
        "with any --memory-constraint: model states of 2 layers\n"
    )


def test_stopped_search_is_exit_0_with_its_gap(
    fixed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan was found; the report says how far from the best it may be."""
    fixed(replace(RESULT, status="time_limit", bound_samples_per_s=110.0, gap=0.1))

    assert cli.run(["--time-limit", "0.5", "--output-config-path", "none"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "stopped by the time limit, at most 10 % below the best" in said


def test_nothing_found_in_time_is_exit_3(fixed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a plan nor a proof that there is none."""
    late = replace(
        RESULT, status="time_limit", plan=None, prediction=None, alternatives=(), gap=math.inf
    )
    fixed(late)

    assert cli.run(["--time-limit", "0.5", "--json", "-"]) == 3

    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "time_limit"
    assert err == (
        "autopar-search: time limit reached before a plan was found. Increase --time-limit 0.5\n"
    )


@pytest.mark.parametrize(
    ("rule", "field", "value"),
    [("compile=0", "compiled", False), ("moe-overlap=1", "overlap_experts", True)],
)
def test_why_not_takes_switches(rule: str, field: str, value: bool) -> None:
    """A switch is 0 or 1, as behind the option of a search."""
    assert getattr(fixed_by_rule(rule, Constraints()), field) is value
