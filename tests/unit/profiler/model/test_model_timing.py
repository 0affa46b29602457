"""Times of parts of a model: what is run, in which order, and what fails a cell."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from autopar.errors import InputError
from profiler.measure import Policy, out_of_memory, torch_dtype
from tests.unit.cpu_clock import CpuTimer, one_thread
from tests.unit.replay import ReplayTimer

torch = pytest.importorskip("torch", reason="the profilers need torch")

from torch import nn  # noqa: E402

from profiler.model.timing import time_module  # noqa: E402

CPU = torch.device("cpu")
QUICK = Policy(iters=8, warmup=2, max_seconds=0.2)
ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
"""What torch says on a host whose memory is exhausted."""


class Recorder(nn.Module):
    """A linear layer that notes its passes, and how many graphs are alive."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.passes: list[str] = []
        self.inputs: list[torch.Tensor] = []
        self.alive = 0
        self.most_alive = 0
        self.fails_above: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output; fail like an allocator above so many graphs."""
        self.passes.append("forward")
        self.inputs.append(x)
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        if self.fails_above is not None and self.alive > self.fails_above:
            raise RuntimeError(ALLOCATOR)
        result: torch.Tensor = self.linear(x)
        result.register_hook(lambda _: self.passes.append("backward"))
        weakref.finalize(result, self._freed)
        return result

    def _freed(self) -> None:
        self.alive -= 1


class Raising(nn.Module):
    """A module that fails with an exception of its own making."""

    def __init__(self, make_error: Callable[[], Exception]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.make_error = make_error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raise the exception."""
        raise self.make_error()


class Tuples(nn.Linear):
    """A module that returns a pair."""

    def forward(self, x: torch.Tensor) -> Any:
        """Return the output twice."""
        y = super().forward(x)
        return y, y


def rows(width: int = 8) -> tuple[torch.Tensor]:
    """Return a batch of random rows."""
    return (torch.randn(4, width),)


def test_backward_takes_longer_than_forward_and_both_are_plausible() -> None:
    """A large MLP's backward has two GEMMs for each one of the forward."""
    h = 256
    module = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    with one_thread():
        found = time_module(module, lambda: (torch.randn(512, h),), QUICK, CPU, timer=CpuTimer())

    assert found.reason is None
    assert set(found.samples_s) == {"forward", "backward", "recompute", "optimizer"}
    least = {name: min(samples) for name, samples in found.samples_s.items()}
    # 2 * 512 * 2 * 4 * 256^2 operations at 10^13 per second at the very most
    assert least["forward"] > 5e-5
    assert 1.0 < least["backward"] / least["forward"] < 6.0
    assert 0.4 < least["recompute"] / least["forward"] < 2.5
    assert found.elapsed_s > sum(map(sum, found.samples_s.values()))


def test_samples_are_those_of_the_timer_by_stage() -> None:
    """Stages follow one another, warm-ups are left out, and narrow samples end the cell."""
    policy = Policy(iters=20, warmup=3, sample_s=0.0, max_seconds=1e3)
    # three stages in turn, then the optimizer alone; three warm-ups each, then six that count
    timer = ReplayTimer([9.0] * 3 * 3 + [1.0, 2.0, 1.5] * 6 + [9.0] * 3 + [0.25] * 6)

    found = time_module(Recorder(), rows, policy, CPU, timer=timer)

    assert found.samples_s == {
        "forward": [1.0] * 6,
        "backward": [2.0] * 6,
        "recompute": [1.5] * 6,
        "optimizer": [0.25] * 6,
    }


def test_what_is_not_asked_for_is_not_run() -> None:
    """Without backward, recomputation and optimizer there is the forward alone."""
    module = Recorder()

    found = time_module(module, rows, QUICK, CPU, backward=False, checkpoint=False, optimizer=False)

    assert set(found.samples_s) == {"forward"}
    assert set(module.passes) == {"forward"}
    assert module.inputs[-1].requires_grad
    assert module.linear.weight.grad is None


def test_a_repetition_of_several_loops_keeps_the_graphs_until_their_backward() -> None:
    """Four forwards come before four backwards, as in four layers, and nothing stays behind."""
    policy = Policy(iters=6, warmup=1, sample_s=4e-3, half_width=10.0, max_seconds=1e3)
    timer = ReplayTimer([1e-3], repeat=True)
    module = Recorder()

    found = time_module(module, rows, policy, CPU, checkpoint=False, optimizer=False, timer=timer)

    assert [len(samples) for samples in found.samples_s.values()] == [6, 6]
    assert timer.loops == [1, 1] + [4, 4] * 7
    assert module.passes[4:12] == ["forward"] * 4 + ["backward"] * 4
    assert module.most_alive == 4
    assert module.alive == 0
    assert all(x.grad is None for x in (module.linear.weight, *module.inputs))


def test_loops_whose_graphs_do_not_fit_are_given_up() -> None:
    """Where four graphs exceed the memory, one operation is a repetition."""
    policy = Policy(iters=6, warmup=1, sample_s=4e-3, half_width=10.0, max_seconds=1e3)
    timer = ReplayTimer([1e-3], repeat=True)
    module = Recorder()
    module.fails_above = 2

    found = time_module(module, rows, policy, CPU, checkpoint=False, optimizer=False, timer=timer)

    assert found.reason is None
    assert timer.loops == [1] * (2 + 2 * 6)


def test_gradients_do_not_add_up() -> None:
    """A backward finds no gradients, so that it has nothing to add to."""
    module = Recorder()
    before: list[bool] = []
    module.linear.weight.register_hook(lambda _: before.append(module.linear.weight.grad is None))

    time_module(module, rows, QUICK, CPU, optimizer=False)

    assert len(before) > 6
    assert all(before)


@pytest.mark.whole
@pytest.mark.parametrize(
    "make_error",
    [
        lambda: torch.OutOfMemoryError("CUDA out of memory."),
        lambda: RuntimeError(ALLOCATOR),
        MemoryError,
    ],
    ids=["device", "host", "python"],
)
def test_missing_memory_fails_the_cell(make_error: Callable[[], Exception]) -> None:
    """The cell says at which size there was no memory, and frees what it had."""
    built: list[weakref.ref[Raising]] = []

    def build() -> Raising:
        module = Raising(make_error)
        built.append(weakref.ref(module))
        return module

    found = time_module(build, rows, QUICK, CPU, where="batch 64, sequence 8192")

    assert found.samples_s == {}
    assert found.reason == "out of memory at batch 64, sequence 8192"
    assert found.elapsed_s > 0.0
    assert built[0]() is None


@pytest.mark.whole
def test_missing_memory_while_building_fails_the_cell() -> None:
    """Weights that do not fit are no crash either."""

    def build() -> nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert time_module(build, rows, QUICK, CPU).reason == "out of memory at the given size"


def test_only_missing_memory_counts_as_such() -> None:
    """Other failures of torch are not mistaken for it."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58)
    assert out_of_memory(caught.value)
    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ..."))
    assert out_of_memory(
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")
    )
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_output_that_is_not_finite_fails_the_cell(value: float) -> None:
    """Weights that are no numbers have no time worth keeping."""
    module = nn.Linear(8, 8)
    nn.init.constant_(module.weight, value)

    found = time_module(module, rows, QUICK, CPU, where="batch 4, sequence 1")

    assert found.samples_s == {}
    assert found.reason == "the output of Linear is not finite at batch 4, sequence 1"


def test_modules_that_cannot_be_measured_are_refused_in_one_sentence() -> None:
    """The sentence names the module, what is wrong and the size or the remedy."""
    frozen = nn.Embedding(8, 4)
    frozen.weight.requires_grad_(False)

    with pytest.raises(InputError, match=r"^the module Tuples returns a tuple. Return one"):
        time_module(Tuples(8, 8), rows, QUICK, CPU)
    with pytest.raises(
        InputError, match=r"^the module Linear fails at batch 4: mat1 and mat2 [^\n]*$"
    ):
        time_module(nn.Linear(7, 8), rows, QUICK, CPU, where="batch 4")
    with pytest.raises(InputError, match=r"^the output of the module Embedding has no gradient"):
        time_module(frozen, lambda: (torch.tensor([1, 2]),), QUICK, CPU)
    # what needs no backward needs no gradient
    assert time_module(
        frozen, lambda: (torch.tensor([1, 2]),), QUICK, CPU, backward=False
    ).samples_s.keys() == {"forward", "recompute"}


def test_random_numbers_are_the_same_every_time_and_the_callers_stay() -> None:
    """Weights and inputs repeat from one call to the next, without touching the caller's state."""
    built: list[Recorder] = []

    def build() -> Recorder:
        built.append(Recorder())
        return built[-1]

    torch.manual_seed(5)
    for _ in range(2):
        time_module(build, rows, QUICK, CPU, optimizer=False)
    following = torch.randn(3)
    torch.manual_seed(5)

    assert torch.equal(following, torch.randn(3))
    assert torch.equal(built[0].linear.weight, built[1].linear.weight)
    assert torch.equal(built[0].inputs[0], built[1].inputs[0])


def test_element_types_have_the_names_of_the_options() -> None:
    """bf16, fp16 and fp32 are those of torch."""
    found = [torch_dtype(name) for name in ("bf16", "fp16", "fp32")]

    assert found == [torch.bfloat16, torch.float16, torch.float32]
