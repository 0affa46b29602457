"""Forecasts of `profile-model`: short whatever is asked for, and near what a run would take."""

from __future__ import annotations

import pytest

from autopar.documents.sidecar import ModelMeasurement
from autopar.records import replace
from autopar.units import format_duration
from profiler.measure import Forecast, ForecastPart, Policy
from profiler.model.cells import ModelCell, plan_cells
from profiler.model.run import forecast, work
from tests.unit.profile_model_support import LLAMA, MadeUp, make_options

LONG = replace(LLAMA, layers=(replace(LLAMA.layers[0], seq_length=4096),))


class Slow(MadeUp):
    """A device that takes `flop_s` seconds for a FLOP, and remembers the seconds it spent."""

    def __init__(self, flop_s: float) -> None:
        super().__init__()
        self.flop_s = flop_s
        self.policy = Policy()
        self.spent_s = 0.0

    def measure(self, cell: ModelCell) -> ModelMeasurement:
        """Return times in proportion to the work, as many as the policy takes at least."""
        if cell.quantity == "memory":
            return super().measure(cell)
        self.measured.append(cell.key)
        forward_s = work(LONG, cell) * self.flop_s
        times = {"forward": forward_s, "backward": 2.0 * forward_s, "recompute": forward_s}
        samples = {name: [x] * 4 for name, x in times.items()}
        self.spent_s += sum(sum(x) for x in samples.values())
        return replace(cell.filled(), samples_s=samples)


@pytest.mark.parametrize("mode", ["static", "batch", "sequence"])
def test_a_slow_device_is_probed_with_parts(mode: str) -> None:
    """Where real layers take minutes, the forecast takes seconds and says the minutes."""
    cells = plan_cells(LONG, make_options(mode=mode, max_seconds=1.0))
    timed = [cell for cell in cells if cell.quantity == "time" and cell.part == "layer"]
    largest = max(work(LONG, cell) for cell in timed)
    measurer = Slow(flop_s=100.0 / largest)
    found = forecast(cells, LONG, measurer)  # type: ignore[arg-type]

    assert measurer.spent_s < 40.0
    seconds = {part.name.rstrip(): part.seconds for part in found.parts}
    for cell in timed:
        repetition_s = 4.0 * work(LONG, cell) * measurer.flop_s
        assert 2.0 < seconds[cell.key] / repetition_s < 8.0, cell.key


def test_a_quick_device_is_probed_with_its_cells() -> None:
    """Parts stand in only where they have to: real cells tell what launches cost."""
    cells = plan_cells(LONG, make_options(mode="batch"))
    measurer = Slow(flop_s=1e-16)
    forecast(cells, LONG, measurer)  # type: ignore[arg-type]
    real = {cell.key for cell in cells}

    assert len([key for key in measurer.measured if key in real and "time" in key]) == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (599.0, "599 s"), (600.0, "10 min"), (7199.0, "120 min"), (7200.0, "2.0 h")],
)
def test_durations(seconds: float, text: str) -> None:
    """Nobody has to divide by 3600."""
    assert format_duration(seconds) == text
    assert format_duration(673388.0) == "7.8 days"
    part = ForecastPart("all of it", 3, seconds)
    found = Forecast(heading="what", parts=(part,), probe_s=2.0)
    assert found.describe().splitlines()[-1] == (
        f"3 cells in about {text}; nothing was written (this forecast took 2 s)"
    )
