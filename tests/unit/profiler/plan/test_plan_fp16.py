"""Plans in fp16: the scale of losses follows one rule, and all ranks step together or none does."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the profilers need torch")

from autopar.run.plan import LayerStrategy, VocabStrategy  # noqa: E402
from profiler.plan.arithmetic import examine  # noqa: E402
from profiler.plan.dryrun import dry_run  # noqa: E402
from profiler.plan.job import judge  # noqa: E402
from profiler.plan.run import LossScaler  # noqa: E402
from tests.gloo import run_ranks  # noqa: E402
from tests.plan_cases import make_job  # noqa: E402
from tests.plan_ranks import overflow_on_rank, run_all  # noqa: E402

_L = LayerStrategy
_ON_CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "overflows", ["..........", "x.........", "xx...x....", ".....x...x", "...x......"]
)
def test_the_scale_follows_the_rule_of_grad_scaler(overflows: str) -> None:
    """Halved after an overflow, doubled after so many steps in a row without one."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    own = LossScaler(64.0, is_alone=True, growth_interval=3)
    for step in overflows:
        theirs.scale(weight.sum())  # its scale exists from the first loss on
        weight.grad = torch.tensor([1.0, math.inf if step == "x" else 2.0, 3.0])
        before = weight.detach().clone()
        is_taken = own.accepts([weight.grad.clone()], device=_ON_CPU)
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        assert is_taken == (step == ".") == (not torch.equal(before, weight))
        assert own.scale == theirs.get_scale()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_element_that_is_not_finite_is_an_overflow(value: float, dtype: Any) -> None:
    gradients = [torch.ones(4, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones(2, 5)]
    scaler = LossScaler(4.0, is_alone=True)
    assert scaler.accepts(gradients, device=_ON_CPU)
    assert scaler.accepts([], device=_ON_CPU)
    gradients[0][2] = value
    assert not scaler.accepts(gradients, device=_ON_CPU)
    assert scaler.scale == 2.0
    for _ in range(4):
        assert not scaler.accepts(gradients, device=_ON_CPU)
    assert scaler.scale == 1.0  # less than no scale helps nothing


_JOBS = {
    # stages share no gradient, so one learns of the other's overflow by asking alone
    "stages": make_job(2, _L(), stages=(2, 2), precision="fp16"),
    "pieces": make_job(2, _L(zero3=True), vocab=VocabStrategy(zero3=True), precision="fp16"),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", _JOBS)
def test_an_overflow_on_one_rank_is_skipped_by_all(name: str) -> None:
    """No weight changes, the scale is halved everywhere, and the next step is taken."""
    job = _JOBS[name]
    for skipped, taken in run_ranks(overflow_on_rank, 2, job, 1):
        assert skipped == (math.inf, job.loss_scale / 2, False)
        assert math.isfinite(taken[0])
        assert taken[1:] == (job.loss_scale / 2, True)


@pytest.mark.whole
def test_a_run_whose_scale_is_too_large_skips_as_one_process_does() -> None:
    """Losses are compared in every step, norms where the step was taken."""
    fine = make_job(2, _L(), stages=(2, 2), precision="fp16")
    large = make_job(2, _L(), stages=(2, 2), precision="fp16", loss_scale=2.0**30)
    found = run_ranks(run_all, 2, {"fine": fine, "large": large})[0]
    verdict = judge(found["fine"], "fp16")
    assert verdict is not None
    assert verdict.matches
    assert all(map(math.isfinite, found["fine"].grad_norm))
    assert found["large"].grad_norm == found["large"].reference_grad_norm == (math.inf, math.inf)
    lost = judge(found["large"], "fp16")
    assert lost is not None
    assert lost.largest["loss"] < 5e-4  # nothing has changed the weights
    assert not lost.matches  # no norm was compared


@pytest.mark.whole
@pytest.mark.parametrize("strategy", [_L(), _L(zero3=True), _L(tp=2)])
def test_states_are_those_of_the_recipe(strategy: LayerStrategy) -> None:
    """2 + 2 + 12 bytes, and 4 + 4 + 8 of what ZeRO divides, as in bf16."""
    vocab = VocabStrategy(tp=strategy.tp, zero3=strategy.zero3)
    job = make_job(2, strategy, vocab=vocab, precision="fp16")
    (rank,) = dry_run(job, ranks=[0])
    held = examine(job).stages[0].held
    weights, optimizer = (4, 8) if strategy.zero3 else (2, 12)
    assert rank.parameter_bytes == held.parameter_bytes == weights * rank.num_parameters
    assert rank.optimizer_bytes == held.optimizer_bytes == optimizer * rank.num_parameters
    (other,) = dry_run(make_job(2, strategy, vocab=vocab, precision="bf16"), ranks=[0])
    assert rank.peak_bytes == other.peak_bytes
