"""The measured spread of communication: profiles at its ends, and the interval of a step time."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autopar.command.console import make_console
from autopar.documents.hardware import write_hardware
from autopar.rates.measured import OPERATIONS, Curve, HardwareProfile, Speed
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.commands import search as cli
from search.planning.cost.communication import curve_s
from search.planning.cost.model import CostModel
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import predict
from search.planning.layered.summary import summary_of
from search.request.options import SearchOptions
from search.show.files import evaluation_document, plan_document, result_document
from search.show.terminal import show_answer, show_given
from tests.cost_cases import toy_hardware, toy_model, toy_spec
from tests.unit.cli_results import PLAN, PREDICTION, RESULT, make_session

SIZES = np.array([2.0**k for k in range(16, 27)])


def spread_curve(share: float, *, latency_s: float = 2e-5, rate: float = 1e10) -> Curve:
    """Return a line whose percentiles are `share` below and twice that above it."""
    times = latency_s + SIZES / rate
    return Curve(
        sizes_bytes=SIZES,
        times_s=times,
        low_s=times * (1.0 - share),
        high_s=times * (1.0 + 2.0 * share),
        latency_s=latency_s,
    )


def measured(share: float, num_nodes: int = 1) -> HardwareProfile:
    """Return hardware whose communication has so much spread."""
    world = num_nodes * 8
    sizes = [g for g in (2, 4, 8, 16) if g <= world]
    operations = ("allreduce", "allgather", "reducescatter", "all2all")
    return toy_hardware(
        num_nodes=num_nodes,
        curves={(name, g): spread_curve(share) for name in operations for g in sizes},
        strided_curves={("allreduce", g): spread_curve(share, rate=2e9) for g in sizes[:-1]},
        p2p_curves={p: spread_curve(share) for p in sizes},
    )


def pipeline(stages: int = 2) -> Plan:
    """Return a plan with tensor, data and pipeline parallelism."""
    return Plan(
        world_size=8,
        num_stages=stages,
        stage_sizes=(4 // stages,) * stages,
        layers=(LayerStrategy(tp=2, zero3=True), *(LayerStrategy(tp=2),) * 3),
        vocab=VocabStrategy(tp=2),
        global_batch=32,
        num_microbatches=4,
    )


def interval(hardware: HardwareProfile, plan: Plan) -> tuple[float, float, float]:
    """Return the fast, the predicted and the slow step time of a plan."""
    cost = CostModel(toy_spec(), toy_model(), hardware, SearchOptions())
    found = predict(cost, plan, 80e9)
    assert found.step_time_interval_s is not None
    fast, slow = found.step_time_interval_s
    return fast, found.step_time_s, slow


def test_curves_move_to_their_percentiles() -> None:
    """Times become the percentile, the latency moves with the smallest size, no spread is left."""
    curve = spread_curve(0.1)

    fast, slow = curve.at_spread("fast"), curve.at_spread("slow")

    np.testing.assert_allclose(fast.times_s, 0.9 * curve.times_s)
    np.testing.assert_allclose(slow.times_s, 1.2 * curve.times_s)
    assert (fast.latency_s, slow.latency_s) == (pytest.approx(1.8e-5), pytest.approx(2.4e-5))
    assert not fast.has_spread


def test_a_curve_with_one_percentile_moves_one_way() -> None:
    """Where only the 95th percentile is known, the fast curve is the median."""
    curve = replace(spread_curve(0.1), low_s=None)

    assert curve.has_spread
    np.testing.assert_array_equal(curve.at_spread("fast").times_s, curve.times_s)
    assert curve.at_spread("slow").times_s[0] > curve.times_s[0]


def test_bandwidths_follow_their_curve_at_the_size_they_were_measured_at() -> None:
    """The entry has the bandwidth of 32 MiB, whose times are 10 % below and 25 % above."""
    base = spread_curve(0.0)
    low, high = base.times_s.copy(), base.times_s.copy()
    at = int(np.flatnonzero(SIZES == 32 * 2**20)[0])
    low[at] *= 0.9
    high[at] *= 1.25
    curve = replace(base, low_s=low, high_s=high)
    sent = SIZES[at] / base.times_s[at]
    hardware = toy_hardware(
        allreduce_bytes_per_s={
            (8, True): 1.75 * sent,
            (8, False): 1.75 * sent,
            (4, True): 5e9,
            (4, False): 1.5 * sent,
            (2, False): 7e9,
        },
        p2p_bytes_per_s={2: sent, 4: 3e9},
        curves={("allreduce", 8): curve},
        strided_curves={("allreduce", 4): curve},
        p2p_curves={2: curve},
    )

    assert hardware.at_spread("fast").allreduce_bytes_per_s == pytest.approx(
        {
            (8, True): 1.75 * sent / 0.9,
            (8, False): 1.75 * sent / 0.9,  # the world group, strided or not
            (4, True): 5e9,  # no curve, no spread
            (4, False): 1.5 * sent / 0.9,
            (2, False): 7e9,
        }
    )
    slow = hardware.at_spread("slow")
    assert slow.p2p_bytes_per_s == pytest.approx({2: sent / 1.25, 4: 3e9})
    assert slow.allreduce_bytes_per_s[8, True] == pytest.approx(1.75 * sent / 1.25)
    assert not slow.has_spread


TIMES = st.lists(st.floats(min_value=1e-6, max_value=1.0), min_size=1, max_size=5)


@given(
    times=TIMES,
    shares=st.lists(st.floats(min_value=0.01, max_value=1.0), min_size=5, max_size=5),
    latency=st.none() | st.floats(min_value=0.0, max_value=1e-6),
    num_bytes=st.floats(min_value=1.0, max_value=1e12),
)
def test_the_fast_curve_is_below_and_the_slow_one_above(
    times: list[float], shares: list[float], latency: float | None, num_bytes: float
) -> None:
    """At every message size, whatever was measured, also below the smallest and with noise."""
    share = np.array(shares[: len(times)])
    curve = Curve(
        sizes_bytes=SIZES[: len(times)],
        times_s=np.array(times),
        low_s=np.array(times) * share,
        high_s=np.array(times) / share,
        latency_s=latency,
    )
    message = np.array([num_bytes])
    middle = float(curve_s(curve.rising(), message)[0])

    assert curve_s(curve.at_spread("fast"), message)[0] <= middle * (1 + 1e-9) + 1e-15
    assert curve_s(curve.at_spread("slow"), message)[0] >= middle * (1 - 1e-9) - 1e-15


@pytest.mark.parametrize("stages", [1, 2])
def test_interval_contains_the_step_time_and_grows_with_the_spread(stages: int) -> None:
    """More spread is a wider interval around the same step time; none is no width."""
    found = [interval(measured(share), pipeline(stages)) for share in (0.0, 0.05, 0.2, 0.5)]

    assert found[0][0] == found[0][1] == found[0][2]
    assert len({step for _, step, _ in found}) == 1
    for (fast, step, slow), (faster, _, slower) in pairwise(found):
        assert faster < fast <= step <= slow < slower


def test_interval_is_the_price_under_both_profiles() -> None:
    """Two evaluations of the same plan."""
    hardware = measured(0.2)
    fast, _, slow = interval(hardware, pipeline())

    speeds: tuple[Speed, ...] = ("fast", "slow")
    priced = [
        predict(
            CostModel(toy_spec(), toy_model(), hardware.at_spread(speed), SearchOptions()),
            pipeline(),
            80e9,
        ).step_time_s
        for speed in speeds
    ]
    assert [fast, slow] == priced


def test_the_searched_plan_has_its_interval_and_its_neighbours_do_not_change_it() -> None:
    """A search prices its answer as an evaluation does, and spread does not choose the plan."""
    options = SearchOptions(settle_bsz=32, memory_constraint_bytes=40e9)
    calm, noisy = (
        Planner.from_documents(toy_spec(), toy_model(), measured(share), options)
        for share in (0.0, 0.3)
    )
    found = noisy.solve()

    assert found.plan is not None
    assert found.prediction is not None
    assert found.plan == calm.solve().plan
    assert found.prediction.step_time_interval_s is not None
    evaluated = noisy.evaluate(found.plan)
    assert evaluated.step_time_interval_s == found.prediction.step_time_interval_s


def test_no_interval_without_a_spread_or_a_price() -> None:
    """Documented files have no percentiles; an impossible plan has no time."""
    cost = CostModel(toy_spec(), toy_model(), toy_hardware(), SearchOptions())
    assert predict(cost, pipeline(), 80e9).step_time_interval_s is None
    noisy = CostModel(toy_spec(), toy_model(), measured(0.2), SearchOptions())
    impossible = replace(pipeline(), vocab=VocabStrategy(tp=3))
    assert predict(noisy, impossible, 80e9).step_time_interval_s is None


KNOWN = replace(PREDICTION, step_time_interval_s=(0.15, 0.18))
SYNTHETIC = replace(RESULT, prediction=KNOWN, synthetic=True, estimated=False)


def test_reports_say_the_interval_and_that_timings_are_synthetic() -> None:
    """One line each, in a search and in an evaluation; neither where they do not apply."""
    stream = io.StringIO()
    found = make_session().throughput(PLAN, KNOWN)
    show_answer(make_console(stream), summary_of(SYNTHETIC, title="toy on box", throughput=found))
    text = stream.getvalue()

    assert text.splitlines()[1] == "SYNTHETIC timings, which describe no machine"
    assert "160 ms   150 to 180" in text
    assert "interval from the measured spread of communication\n" in text
    assert "ESTIMATES" not in text
    stream = io.StringIO()
    session = make_session()
    own = replace(session.hardware, estimated=True, synthetic=True)
    session = replace(session, hardware=own)
    show_given(make_console(stream), session.summary(PLAN, KNOWN, (), None))
    assert "SYNTHETIC" in stream.getvalue()
    assert "ESTIMATES" in stream.getvalue()
    assert "160 ms   150 to 180" in stream.getvalue()
    stream = io.StringIO()
    show_answer(make_console(stream), summary_of(RESULT, title="toy on box"))
    assert "SYNTHETIC" not in stream.getvalue()
    assert "spread" not in stream.getvalue()


def test_documents_say_the_interval_and_that_timings_are_synthetic() -> None:
    """`--json` has the keys where they apply; the plan file always has them."""
    plain = result_document(RESULT).content()
    assert not {"step_time_interval_s", "synthetic"} & plain.keys()
    for document in (
        result_document(SYNTHETIC).content(),
        evaluation_document(PLAN, KNOWN, synthetic=True).content(),
    ):
        assert document["step_time_interval_s"] == [0.15, 0.18]
        assert document["synthetic"] is True
    own = plan_document(SYNTHETIC).content()
    assert own["synthetic"] is True
    assert own["prediction"]["step_time_interval_s"] == [0.15, 0.18]
    own = plan_document(RESULT).content()
    assert own["synthetic"] is False
    assert own["prediction"]["step_time_interval_s"] is None


def test_files_with_sidecars_are_planned_with_their_spread(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a folder of measured files to the printed line, the JSON and the plan file."""
    hardware = replace(measured(0.1), synthetic=True, memory_bytes=8e10)
    # as of the times: a bandwidth that differs was edited, and replaces its curve
    bandwidths = {
        (size, consecutive): OPERATIONS["allreduce"].bus_factor(size)
        * float(curve.sizes_bytes[-1] / curve.times_s[-1])
        for size, consecutive in hardware.allreduce_bytes_per_s
        if (curve := hardware.allreduce_curve(size, consecutive)) is not None
    }
    hardware = replace(
        hardware,
        allreduce_bytes_per_s={**hardware.allreduce_bytes_per_s, **bandwidths},
        p2p_bytes_per_s={
            stages: float(curve.sizes_bytes[-1] / curve.times_s[-1])
            for stages, curve in hardware.p2p_curves.items()
        },
    )
    write_hardware(hardware, tmp_path / "hardware")
    profile = str(root / "models" / "llama2-7b" / "configs")
    inputs = [
        *("--model", "llama2-7b", "--hardware", str(tmp_path / "hardware")),
        *("--memory-profiling-path", profile, "--time-profiling-path", profile),
    ]
    target = tmp_path / "plan.json"

    assert cli.run([*inputs, "--output-config-path", str(target), "--verbose"]) == 0
    out, _ = capsys.readouterr()
    assert "the measured spread of communication" in out
    assert "SYNTHETIC" in out
    assert "sidecar" in out
    assert "(synthetic)" in out
    own = json.loads((tmp_path / "autopar_plan_plan.json").read_text(encoding="utf-8"))
    assert own["synthetic"] is True
    assert any(item["synthetic"] for item in own["inputs"])

    assert cli.run([*inputs, "--evaluate", str(target), "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    fast, slow = document["step_time_interval_s"]
    assert fast <= document["step_time_s"] <= slow
    assert fast < slow
    assert document["step_time_interval_s"] == own["prediction"]["step_time_interval_s"]
