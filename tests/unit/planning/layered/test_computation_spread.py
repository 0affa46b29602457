"""The measured spread of computation: replicas, the interval, and what to measure again."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from autopar.command.console import make_console
from autopar.records import replace
from autopar.run.model import ModelProfile, ShardedTime
from autopar.run.plan import LayerStrategy, Plan, Prediction
from search.planning.cost.model import CostModel
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import interval_s, predict, probabilities_faster
from search.planning.layered.summary import summary_of
from search.request.options import SearchOptions
from search.show.files import evaluation_document, plan_document, result_document
from search.show.terminal import show_answer, show_categories
from tests.cost_cases import TOY_PLAN as PLAN, toy_hardware, toy_model, toy_spec
from tests.unit.planning.uniform.test_spread import measured as spread_hardware

OPTIONS = SearchOptions(time_profile_mode="batch")


def profile(forward: float, backward: float, *, slow: float = 2.0) -> ModelProfile:
    """Return the toy profile with 5th percentiles so far below the medians, 95th `slow` as far."""
    model = toy_model()
    whole = model.layers[0].times
    times = tuple(
        replace(p, low_s=p.forward_s * (1 - forward), high_s=p.forward_s * (1 + slow * forward))
        for p in whole
    )
    sharded = tuple(
        ShardedTime(
            layer_type=0,
            batch=p.batch,
            seq_length=1024,
            degree=1,
            kind="sp",
            forward_s=p.forward_s,
            backward_s=2 * p.forward_s,
            backward_low_s=2 * p.forward_s * (1 - backward),
            backward_high_s=2 * p.forward_s * (1 + slow * backward),
        )
        for p in whole
    )
    layer = replace(model.layers[0], times=times, sharded_times=sharded)
    return replace(model, layers=(layer,))


def priced(model: ModelProfile, plan: Plan = PLAN, **hardware: Any) -> Prediction:
    """Return the prediction of a plan on 8 GPUs."""
    machine = hardware.get("hardware") or toy_hardware()
    return predict(CostModel(toy_spec(), model, machine, OPTIONS), plan, 80e9)


def test_replicas_without_spread_are_the_prediction() -> None:
    """Percentiles equal to the medians: no cell varies, so the interval stays as without them."""
    found = priced(profile(0.0, 0.0))

    assert found.step_time_interval_s is None
    assert found.widest_cell is None


def test_every_replica_is_the_price_of_its_own_profile() -> None:
    """T of a replica equals T of a model whose cells are that replica's, to rounding."""
    from search.planning.layered.prediction import drawn_step_times

    cost = CostModel(toy_spec(), profile(0.2, 0.3), toy_hardware(), OPTIONS)
    strategies = tuple(sorted(set(PLAN.layers)))
    index = tuple(strategies.index(s) for s in PLAN.layers)
    tables = cost.tables(strategies, [PLAN.vocab], [(2, 8, "ddp")], [(0, 4)], "1f1b")
    drawn = drawn_step_times(
        cost, tables, num_microbatches=4, stage_sizes=(2, 2), strategy_index=index
    )
    cells = list(cost.draws[0].cells().values())
    layer = cost.model.layers[0]
    for replica in (0, 7, 199):
        values = [float(times[replica]) for times in cells]
        moved = replace(
            layer,
            times=tuple(
                replace(p, forward_s=t) for p, t in zip(layer.times, values[:4], strict=True)
            ),
            sharded_times=tuple(
                replace(p, backward_s=t)
                for p, t in zip(layer.sharded_times, values[4:], strict=True)
            ),
        )
        alone = priced(replace(cost.model, layers=(moved,)))
        assert drawn[replica] == pytest.approx(alone.step_time_s, rel=1e-12)


def test_cells_are_drawn_between_their_percentiles() -> None:
    """Quantiles of 5 to 95 %: no draw beyond them, half below the median, the same every time."""
    cost = CostModel(toy_spec(), profile(0.2, 0.3), toy_hardware(), OPTIONS)
    cells = cost.draws[0].cells()
    again = CostModel(toy_spec(), profile(0.2, 0.3), toy_hardware(), OPTIONS).draws[0].cells()
    first = cells["forward of layer type 0, batch 1, sequence length 1024"]

    assert len(cells) == 8
    assert (first >= 0.8 * 3e-3).all()
    assert (first <= 1.4 * 3e-3).all()
    assert np.quantile(first, 0.5) == pytest.approx(3e-3, rel=0.05)
    assert all(np.array_equal(cells[name], again[name]) for name in cells)


def test_interval_encloses_the_prediction_and_grows_with_the_spread() -> None:
    """More spread gives a wider interval; one sided spread leaves the other side."""
    narrow, wide = priced(profile(0.05, 0.05)), priced(profile(0.3, 0.3))
    assert narrow.step_time_interval_s is not None
    assert wide.step_time_interval_s is not None
    (a, b), (c, d) = narrow.step_time_interval_s, wide.step_time_interval_s

    assert c < a < narrow.step_time_s < b < d
    assert narrow.step_time_s == wide.step_time_s == priced(toy_model()).step_time_s
    assert narrow.interval_of == ("computation",)


def test_both_spreads_add_up() -> None:
    """By hand: T = 10, communication 9 to 12, replicas' percentiles 8 and 13: 7 to 15."""
    drawn = np.linspace(8.0 - 5.0 / 18, 13.0 + 5.0 / 18, 200)

    assert interval_s(10.0, (9.0, 12.0), drawn) == pytest.approx((7.0, 15.0), abs=1e-9)
    assert interval_s(10.0, None, drawn) == pytest.approx((8.0, 13.0), abs=1e-9)
    assert interval_s(10.0, (9.0, 12.0), None) == (9.0, 12.0)
    assert interval_s(10.0, None, None) is None
    assert interval_s(20.0, None, drawn)[1] == 20.0  # type: ignore[index]

    model, hardware = profile(0.1, 0.1), spread_hardware(0.2)
    both = priced(model, hardware=hardware)
    alone = priced(toy_model(), hardware=hardware)
    assert both.interval_of == ("communication", "computation")
    assert alone.interval_of == ("communication",)
    assert both.step_time_interval_s is not None
    assert alone.step_time_interval_s is not None
    assert both.step_time_interval_s[0] < alone.step_time_interval_s[0]
    assert both.step_time_interval_s[1] > alone.step_time_interval_s[1]


def test_the_widest_cell_is_the_one_that_scatters() -> None:
    """Only one cell has percentiles, so it explains all; of two passes the wide one is named."""
    model = profile(0.0, 0.0)
    layer = model.layers[0]
    times = (*layer.times[:2], replace(layer.times[2], high_s=9.1e-3), layer.times[3])
    lone = priced(replace(model, layers=(replace(layer, times=times),))).widest_cell
    wide = priced(profile(0.02, 0.4)).widest_cell

    assert lone is not None
    assert lone.name == "forward of layer type 0, batch 4, sequence length 1024"
    # a small spread: T bends where messages hide in the window, and the non-negative fit does
    assert lone.share == pytest.approx(1.0, abs=0.01)
    assert wide is not None
    assert wide.name.startswith("backward of layer type 0")


def test_probability_that_an_alternative_is_faster() -> None:
    """The same plan never beats itself; one far slower never, the best against it always."""
    cost = CostModel(toy_spec(), profile(0.1, 0.1), toy_hardware(), OPTIONS)
    slow = replace(PLAN, layers=(LayerStrategy(tp=2, checkpoint=True),) * 4, num_microbatches=8)

    assert probabilities_faster(cost, PLAN, [PLAN, slow]) == (0.0, 0.0)
    assert probabilities_faster(cost, slow, [PLAN]) == (1.0,)
    bare = CostModel(toy_spec(), toy_model(), toy_hardware(), OPTIONS)
    assert probabilities_faster(bare, PLAN, [slow]) == (None,)


def text_of(show: Any) -> str:
    """Return what a report prints."""
    stream = io.StringIO()
    show(make_console(stream))
    return stream.getvalue()


def test_reports_show_the_spread_of_computation() -> None:
    """Terminal, --json and plan file have interval, probabilities and the widest cell."""
    result = Planner.from_documents(
        toy_spec(), profile(0.2, 0.3), toy_hardware(), replace(OPTIONS, settle_bsz=16)
    ).solve()
    assert result.plan is not None
    assert result.prediction is not None
    assert result.prediction.widest_cell is not None
    cell = result.prediction.widest_cell
    shown = text_of(lambda console: show_answer(console, summary_of(result, title="toy")))
    explained = text_of(lambda console: show_categories(console, result.prediction))

    assert "the measured spread of computation" in shown
    assert "P(faster)" in shown
    assert "Largest source of uncertainty" in explained
    assert cell.name in " ".join(explained.split())
    document = json.loads(json.dumps(result_document(result).content()))
    assert document["interval_of"] == ["computation"]
    assert document["widest_cell"] == {"name": cell.name, "share": cell.share}
    shares = [item["probability_faster"] for item in document["alternatives"]]
    assert shares
    assert all(0.0 <= share <= 1.0 for share in shares)
    kept = json.loads(json.dumps(plan_document(result).content()))
    assert kept["prediction"]["widest_cell"]["name"] == cell.name
    evaluated = evaluation_document(result.plan, result.prediction).content()
    assert evaluated["interval_of"] == ["computation"]


def test_reports_without_spread_are_as_before() -> None:
    """Documents alone add no key and no column."""
    result = Planner.from_documents(
        toy_spec(), toy_model(), toy_hardware(), replace(OPTIONS, settle_bsz=16)
    ).solve()
    shown = text_of(lambda console: show_answer(console, summary_of(result, title="toy")))
    document = result_document(result).content()

    assert "measured spread" not in shown
    assert "P(faster)" not in shown
    assert "source of uncertainty" not in shown
    assert not {"interval_of", "widest_cell"} & set(document)
    assert "probability_faster" not in json.dumps(document)
