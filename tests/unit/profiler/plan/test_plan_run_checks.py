"""What a run refuses before its ranks meet: what would look like a wrong plan and is none."""

from __future__ import annotations

import pytest

from autopar.records import replace

torch = pytest.importorskip("torch", reason="the profilers need torch")

from torch.distributed.fsdp import FSDPModule  # noqa: E402

from autopar.errors import InputError  # noqa: E402
from autopar.run.model import ModelSpec  # noqa: E402
from autopar.run.plan import LayerStrategy, VocabStrategy  # noqa: E402
from profiler.plan.job import PlanJob  # noqa: E402
from profiler.plan.run import run_plan  # noqa: E402
from tests.plan_cases import MOE, make_job  # noqa: E402
from tests.unit.plan_cli_support import set_launcher  # noqa: E402

_L = LayerStrategy


def _experts(seq_length: int) -> ModelSpec:
    return replace(MOE, layers=(replace(MOE.layers[0], seq_length=seq_length),))


@pytest.mark.parametrize(
    ("job", "start"),
    [
        (make_job(1, _L(), model=_experts(9)), "layer 0: the 18 visits of the 9 tokens of a"),
        (
            make_job(2, _L(), _L(), _L(tp=2), _L(), model=_experts(10)),
            "layer 2: the 10 visits of the 5 tokens of a",
        ),
    ],
)
def test_experts_that_one_process_would_train_otherwise(
    job: PlanJob, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_launcher(monkeypatch, 0, str(job.plan.world_size))
    with pytest.raises(InputError) as caught:
        run_plan(job, backend="gloo")
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith("--no-reference")


@pytest.mark.parametrize(
    "job",
    [
        make_job(2, _L(), zero2=True),
        make_job(2, _L(), _L(zero3=True), _L(), _L()),
        make_job(2, _L(), vocab=VocabStrategy(zero3=True)),
    ],
    ids=["zero2", "zero3", "vocabulary"],
)
def test_a_torch_that_only_averages_cannot_divide_on_cpus(
    job: PlanJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as in torch 2.6, whose FSDP2 asks gloo for an average
    monkeypatch.delattr(FSDPModule, "set_force_sum_reduction_for_comms")
    set_launcher(monkeypatch, 0, "2")
    with pytest.raises(InputError, match=r"ZeRO-3.*CPUs"):
        run_plan(job, backend="gloo")


def test_other_numbers_of_ranks_and_missing_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launcher(monkeypatch, 0, "3")
    with pytest.raises(InputError, match=r"^the plan is for 2 ranks, but 3 were started. "):
        run_plan(make_job(2, _L()), backend="gloo")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="CUDA"):
            run_plan(make_job(2, _L()), backend="nccl")


def test_a_run_survives_a_reference_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is returned, with the reason why there is nothing to compare it with."""

    def too_large(*_: object, **__: object) -> None:
        raise MemoryError

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("profiler.plan.run.reference_steps", too_large)
    found = run_plan(make_job(1, _L()), backend="gloo", num_steps=1)

    assert found is not None
    assert len(found.loss) == 1
    assert found.reference_loss == ()
    assert "one process with the whole model" in found.notes[0]
