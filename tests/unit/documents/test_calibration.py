"""Calibration: the file, what a search makes of it, and that factors of 1 change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from msgspec import convert

from autopar.documents.calibration import (
    Calibration,
    CalibrationDocument,
    Interval,
    device_of,
    read_calibration,
    write_calibration,
)
from autopar.errors import OptionError
from autopar.rates.measured import Curve
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, Prediction, VocabStrategy
from search.commands import explain as explain_cli, search as cli
from search.planning.cost.model import CostModel
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import predict
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec
from tests.often import often

BUDGET = 80e9
FACTORS = st.floats(0.25, 4.0)


def document(**changes: Any) -> dict[str, Any]:
    """Return a good file, with other factors where given."""
    factors = {
        "computation": {"value": 1.1, "low": 1.0, "high": 1.2},
        "communication": {"value": 0.8, "low": 0.7, "high": 1.3},
        "fixed_s": {"value": 0.002, "low": 0.0, "high": 0.004},
        "memory": {"value": 1.05, "low": 1.01, "high": 1.1},
    }
    return {
        "format": "autopar-calibration",
        "version": 1,
        "hardware": {"name": "a100-80gb_1x8", "world_size": 8, "estimated": True},
        "model": {
            "name": "llama2-7b",
            "num_layers": 32,
            "seq_length": [4096],
            "hidden_size": [4096],
            "precision": "bf16",
        },
        "factors": {**factors, **changes},
    }


def written(folder: Path, content: dict[str, Any]) -> Path:
    """Write a file and return its path."""
    path = folder / "calibration.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def calibration(
    computation: float = 1.0, communication: float = 1.0, fixed_s: float = 0.0, memory: float = 1.0
) -> Calibration:
    """Return factors without intervals, of no device in particular."""
    return Calibration(
        computation=Interval(value=computation),
        communication=Interval(value=communication),
        fixed_s=Interval(value=fixed_s),
        memory=Interval(value=memory),
    )


def plan(
    stages: int = 2, microbatches: int = 4, tp: int = 2, zero3: bool = True, checkpoint: bool = True
) -> Plan:
    """Return a plan of the toy model on its eight GPUs."""
    spec = toy_spec()
    layers = tuple(
        LayerStrategy(tp=tp, zero3=zero3 and k % 2 == 0, checkpoint=checkpoint)
        for k in range(spec.num_layers)
    )
    sizes = [spec.num_layers // stages] * stages
    sizes[-1] += spec.num_layers - sum(sizes)
    return Plan(
        world_size=8,
        num_stages=stages,
        stage_sizes=tuple(sizes),
        layers=layers,
        vocab=VocabStrategy(tp=tp),
        global_batch=16,
        num_microbatches=microbatches,
    )


def priced(applied: Calibration | None, subject: Plan, **options: Any) -> Prediction:
    """Price a plan of the toy model."""
    chosen = SearchOptions(calibration=applied, **options)
    return predict(CostModel(toy_spec(), toy_model(), toy_hardware(), chosen), subject, BUDGET)


def test_a_written_file_is_read(tmp_path: Path) -> None:
    """What stands in the file arrives, with the hash of the file."""
    path = tmp_path / "calibration.json"
    write_calibration(path, convert(document(), CalibrationDocument))
    found = read_calibration(path)

    assert found.computation == Interval(value=1.1, low=1.0, high=1.2)
    assert found.fixed_s == Interval(value=0.002, low=0.0, high=0.004)
    assert (found.hardware, found.world_size, found.model) == ("a100-80gb_1x8", 8, "llama2-7b")
    assert found.source is not None
    assert found.source.role == "calibration"
    assert len(found.source.sha256) == 64


@pytest.mark.parametrize("name", ["cpu_1x2", "cpu_2x1", "cpu"])
def test_the_device_is_what_is_compared(name: str) -> None:
    """The number of ranks is not, since a calibration is made for larger clusters."""
    assert device_of(name) == "cpu"
    replace(calibration(), hardware="cpu_1x2").require_device(name)
    with pytest.raises(OptionError, match=r"fitted on 'cpu'.*hardware is 'h100'"):
        replace(calibration(), hardware="cpu_1x2").require_device("h100_1x8")


def test_doubts_are_said() -> None:
    """Another question, another kind of profile, odd factors and wide intervals; else nothing."""
    same: dict[str, Any] = {
        "world_size": 2,
        "model": "llama",
        "precision": "fp32",
        "estimated": False,
    }
    good = Calibration(
        computation=Interval(value=1.1, low=1.0, high=1.2),
        hardware="cpu_1x2",
        world_size=2,
        model="llama",
        precision="fp32",
    )
    odd = replace(
        good,
        computation=Interval(value=2.5, low=2.4, high=2.6),
        communication=Interval(value=1.0, low=0.4, high=2.0),
    )

    assert good.doubts(**same) == ()
    (other,) = good.doubts(**{**same, "model": "gpt", "world_size": 8})
    assert "another question (GPUs 2 then, 8 now; model llama then, gpt now)" in other
    assert "corrects measured profiles, but these are estimated" in " ".join(
        good.doubts(**{**same, "estimated": True})
    )
    assert [text.split(":")[0] for text in odd.doubts(**same)] == [
        "calibration factor of computation 2.5 is outside of 0.5 to 2",
        "calibration factor of communication is barely known (0.4 to 2)",
    ]
    assert calibration().doubts(**same) == ()


@pytest.mark.parametrize("stages", [1, 2])
def test_factors_of_one_change_no_number(stages: int) -> None:
    """The prediction is the same to the last bit."""
    assert priced(calibration(), plan(stages)) == priced(None, plan(stages))


def test_neutral_calibration_finds_the_same_plan() -> None:
    """The whole search, its alternatives and the figures of all; the options name it."""
    documents = (toy_spec(), toy_model(), toy_hardware())
    options = SearchOptions(min_bsz=8, max_bsz=24, memory_constraint_bytes=BUDGET)
    plain = Planner.from_documents(*documents, options).solve()
    chosen = replace(options, calibration=calibration())
    found = Planner.from_documents(*documents, chosen).solve()

    assert (found.plan, found.prediction) == (plain.plan, plain.prediction)
    assert found.alternatives == plain.alternatives
    assert "calibration" not in plain.options
    assert "calibration" in found.options
    assert [x for x in found.defaults_used if x not in plain.defaults_used] == [
        calibration().sentence
    ]


@often(25, 100, FACTORS, st.sampled_from([1, 2, 4]), st.sampled_from(["1f1b", "gpipe"]))
def test_one_factor_on_all_times_scales_the_step(factor: float, stages: int, kind: str) -> None:
    """Times are homogeneous: overlap and the optimizer included."""
    subject = replace(plan(stages), pipeline_type=kind)  # type: ignore[arg-type]
    before = priced(None, subject)
    after = priced(calibration(factor, factor), subject)

    assert after.step_time_s == pytest.approx(before.step_time_s * factor, rel=1e-9)
    assert [s.allocated_bytes for s in after.stages] == [s.allocated_bytes for s in before.stages]


@often(
    25, 100, FACTORS, FACTORS, st.floats(1.0, 2.0), st.floats(1.0, 2.0), st.sampled_from([1, 2, 4])
)
def test_larger_factors_never_shorten_a_step(
    computation: float, communication: float, more: float, farther: float, stages: int
) -> None:
    """Monotone in either factor."""
    base = priced(calibration(computation, communication), plan(stages)).step_time_s
    for factors in (
        (computation * more, communication),
        (computation, communication * farther),
        (computation * more, communication * farther),
    ):
        slower = priced(calibration(*factors), plan(stages)).step_time_s
        assert slower >= base * (1 - 1e-12)


@often(25, 100, st.floats(0.0, 10.0), st.sampled_from([1, 2, 4]), st.integers(1, 8))
def test_fixed_seconds_are_added_once(fixed_s: float, stages: int, microbatches: int) -> None:
    """Whatever the number of micro-batches; with middle stages at most as much is added."""
    subject = plan(stages, microbatches)
    before, after = priced(None, subject), priced(calibration(fixed_s=fixed_s), subject)
    added = after.step_time_s - before.step_time_s

    if stages <= 2:
        assert added == pytest.approx(fixed_s, abs=1e-9)
    assert -1e-9 <= added <= fixed_s + 1e-9
    assert sum(after.waterfall_s.values()) == pytest.approx(after.step_time_s)
    assert after.waterfall_s.get("fixed", 0.0) == pytest.approx(fixed_s, abs=1e-9)


@often(25, 100, FACTORS, st.sampled_from([1, 2, 4]))
def test_memory_is_multiplied(factor: float, stages: int) -> None:
    """Every category and every sum, to a few bytes of rounding; times stay."""
    before, after = priced(None, plan(stages)), priced(calibration(memory=factor), plan(stages))

    assert after.step_time_s == before.step_time_s
    for old, new in zip(before.stages, after.stages, strict=True):
        assert new.allocated_bytes == pytest.approx(old.allocated_bytes * factor, abs=64)
        for name, value in old.memory_bytes.items():
            assert new.memory_bytes[name] == pytest.approx(value * factor, abs=64)


def test_a_search_plans_with_the_factors() -> None:
    """Slow communication costs tensor parallelism its place, and the solver agrees with itself."""
    documents = (toy_spec(), toy_model(), toy_hardware())
    options = SearchOptions(min_bsz=8, max_bsz=32, memory_constraint_bytes=BUDGET)
    times = {}
    for name, applied in {
        "none": None,
        "slow links": calibration(communication=100.0),
        "fixed": calibration(fixed_s=5.0),
        "memory": calibration(memory=1.5),
    }.items():
        chosen = replace(options, calibration=applied)
        planner = Planner.from_documents(*documents, chosen)
        found = planner.solve()
        assert found.plan is not None
        assert found.prediction is not None
        assert found.gap == 0.0
        assert planner.evaluate(found.plan) == found.prediction
        for other in found.alternatives:
            again = planner.evaluate(other.plan).step_time_s
            assert other.step_time_s == pytest.approx(again, rel=1e-12)
        times[name] = found.prediction
    assert times["slow links"].samples_per_s < times["none"].samples_per_s
    assert times["fixed"].samples_per_s < times["none"].samples_per_s
    # fixed seconds are shared by more samples
    assert times["fixed"].step_time_s > times["none"].step_time_s + 5.0 - 1e-9
    assert times["memory"].samples_per_s <= times["none"].samples_per_s


def test_spread_is_calibrated_once() -> None:
    """The ends of the interval are those of the profile, times the factor."""
    sizes = np.array([1e5, 1e6, 1e7])
    times = 1e-5 + sizes / 5e10
    curve = Curve(sizes_bytes=sizes, times_s=times, low_s=times * 0.8, high_s=times * 1.5)
    curves = {("allreduce", 2): curve, ("allgather", 2): curve, ("reducescatter", 2): curve}
    hardware = replace(toy_hardware(), curves=curves)

    def interval(applied: Calibration | None) -> tuple[float, float]:
        cost = CostModel(toy_spec(), toy_model(), hardware, SearchOptions(calibration=applied))
        found = predict(cost, plan(), BUDGET).step_time_interval_s
        assert found is not None
        return found

    assert np.allclose(interval(calibration(3.0, 3.0)), 3.0 * np.array(interval(None)), rtol=1e-9)


def searched(folder: Path, *options: str) -> dict[str, Any]:
    """Search a shipped model and return the plan file."""
    strategy = folder / "strategy.json"
    arguments = ["--model", "llama2-7b", "--hardware", "a100-80gb:1x8", "--engine", "none"]
    arguments += options
    assert cli.run([*arguments, "--output-config-path", str(strategy)]) == 0
    content: dict[str, Any] = json.loads((folder / "autopar_plan_strategy.json").read_text("utf-8"))
    return content


def test_commands_state_and_keep_the_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the report, the plan file and its inputs; --evaluate and autopar-explain agree."""
    path = written(tmp_path, document())
    found = searched(tmp_path, "--calibration", str(path), "--verbose")
    report = capsys.readouterr().out
    plan_file = str(tmp_path / "autopar_plan_strategy.json")

    # a path may be broken at its hyphens
    assert f"calibration{path}:computationx1.1" in "".join(report.split())
    assert any(line.startswith(f"calibration {path}") for line in found["defaults_used"])
    assert found["request"]["calibration"] == str(path)
    assert found["options"]["calibration"]["memory"]["value"] == 1.05
    assert [x["sha256"] for x in found["inputs"] if x["role"] == "calibration"] == [
        read_calibration(path).source.sha256  # type: ignore[union-attr]
    ]

    out = tmp_path / "priced.json"
    arguments = ["--model", "llama2-7b", "--hardware", "a100-80gb:1x8", "--evaluate", plan_file]
    assert cli.run([*arguments, "--calibration", str(path), "--json", str(out)]) == 0
    again = json.loads(out.read_text("utf-8"))
    assert again["step_time_s"] == found["step_time_s"]
    assert again["memory"] == [
        {name: stage[name] for name in again["memory"][0]}
        for stage in found["prediction"]["stages"]
    ]
    assert any(line.startswith("calibration") for line in again["defaults_used"])
    assert "computation x 1.1" in " ".join(capsys.readouterr().out.split())

    assert explain_cli.run([plan_file]) == 0
    assert "computation x 1.1" in " ".join(capsys.readouterr().out.split())
    path.write_text(json.dumps(document(memory={"value": 1.0})), encoding="utf-8")
    assert explain_cli.run([plan_file]) == 0
    assert "calibration.json has changed since the plan was made" in capsys.readouterr().err


def test_neutral_file_changes_no_byte_of_the_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What names the calibration differs in the plan file, and errors of others' runs are left."""
    one = {"value": 1}
    neutral = document(computation=one, communication=one, memory=one, fixed_s={"value": 0})
    path = written(tmp_path, neutral)
    plain = searched(tmp_path)
    strategy = (tmp_path / "strategy.json").read_bytes()
    found = searched(tmp_path, "--calibration", str(path))
    capsys.readouterr()

    assert (tmp_path / "strategy.json").read_bytes() == strategy
    assert plain["prediction"].pop("step_time_interval_s")[0] < plain["step_time_s"]
    assert found["prediction"].pop("step_time_interval_s") is None
    assert plain["prediction"].pop("interval_of") == ["published runs"]
    assert all(entry.pop("probability_faster") <= 0.5 for entry in plain["alternatives"])
    for name in [key for key in plain["throughput"] if key.endswith("_interval")]:
        assert plain["throughput"].pop(name)[0] < plain["throughput"][name[: -len("_interval")]]
        assert found["throughput"].pop(name) is None
    names = {"defaults_used", "inputs", "options", "request"}
    assert {k for k in plain if plain[k] != found[k]} == names


@pytest.mark.whole
def test_another_device_is_refused_and_another_model_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times of another device are not comparable; of another model, they are doubtful."""
    path = str(written(tmp_path, document()))
    arguments = ["--output-config-path", "none", "--calibration", path, "--global-batch-size", "8"]

    assert cli.run([*arguments, "--model", "llama2-7b", "--hardware", "h100:1x8"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "'a100-80gb'" in said
    asked = [*arguments, "--model", "gpt-6.7b", "--hardware", "a100-80gb:1x8", "--verbose"]
    assert cli.run(asked) == 0
    done = capsys.readouterr()
    assert "model llama2-7b then, gpt-6.7b now" in done.err
    assert "model llama2-7b then, gpt-6.7b now" in " ".join(done.out.split())


def test_python_interface_takes_the_path(tmp_path: Path) -> None:
    """As the command does."""
    path = written(tmp_path, document())
    plain = Planner("llama2-7b", "a100-80gb:1x8").solve()
    found = Planner("llama2-7b", "a100-80gb:1x8", calibration=path).solve()

    assert plain.prediction is not None
    assert found.prediction is not None
    assert found.prediction.step_time_s > plain.prediction.step_time_s
    roles = {source.role for source in found.sources} - {source.role for source in plain.sources}
    assert roles == {"calibration"}
