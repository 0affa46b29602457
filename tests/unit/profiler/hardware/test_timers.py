"""The clocks: seconds of one operation, on the host and on a device."""

from __future__ import annotations

import time

import pytest

from profiler.measure import DeviceTimer, HostTimer, make_timer

torch = pytest.importorskip("torch", reason="the profilers need torch")


def test_host_timer_returns_seconds_of_one_operation() -> None:
    """Five naps of 10 ms are 10 ms each, whatever the number of loops."""
    naps: list[float] = []

    def nap() -> None:
        time.sleep(0.010)
        naps.append(0.010)

    repetition = HostTimer().bind(nap, 5)

    assert naps == []
    first_s, second_s = repetition(), repetition()

    assert len(naps) == 10
    assert 0.010 <= first_s < 0.040
    assert 0.010 <= second_s < 0.040


def test_nothing_runs_before_the_first_repetition_and_no_loops_are_refused() -> None:
    """A repetition of no operations has no time."""
    with pytest.raises(AssertionError):
        HostTimer().bind(lambda: None, 0)


def test_the_device_decides_about_the_timer() -> None:
    """A CPU has the host's clock and no graphs; a CUDA device has events."""
    cpu = torch.device("cpu")

    assert isinstance(make_timer(cpu), HostTimer)
    assert isinstance(make_timer(torch.device("cuda", 0), True), DeviceTimer)
    with pytest.raises(AssertionError):
        make_timer(cpu, True)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["launched", "graph"])
def test_device_timer_waits_for_the_device(cuda_graph: bool) -> None:
    """Ten times the loops take about ten times as long in all, hence as long each."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", 0)
    matrix = torch.rand(4096, 4096, device=device)
    product = torch.empty_like(matrix)
    timer = DeviceTimer(device, cuda_graph=cuda_graph)

    times_s = {}
    for loops in (4, 40):
        repetition = timer.bind(lambda: torch.mm(matrix, matrix, out=product), loops)
        times_s[loops] = min(repetition() for _ in range(5))

    # 2 * 4096^3 operations at 10^16 per second at the very most
    assert min(times_s.values()) > 1.4e-5
    assert times_s[40] == pytest.approx(times_s[4], rel=0.5)
    assert torch.allclose(product, matrix @ matrix)
