"""States on the host: bytes that leave, seconds that come, by hand and against measured steps."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InputError
from autopar.price.account import account_of, host_bytes_of
from autopar.price.job import job_of_run
from autopar.price.sharded_peak import live_points
from autopar.price.states import layout_of_run, units_of
from autopar.rates.card import load_card
from autopar.rates.parts.operations import machine_of
from autopar.rates.parts.optimizer import (
    Host,
    exposed_s,
    host_of,
    host_update_s,
    optimizer_time_s,
)
from autopar.rates.stack import load_stack
from autopar.records import replace
from autopar.run.architecture import Experts
from autopar.run.run import Run
from autopar.run.runtime import ActivationOffload, ExpertKernels, Optimizer, Overlap
from tests.runs import llama, run_of, torch_run
from tests.step_cases import machine_named

SIZES: dict[str, Any] = {"hidden": 2048, "width": 6144, "heads": 32, "kv_heads": 4}
SIZES |= {"head_width": 128, "head_norms": True, "vocab": 151936}
"""Of Qwen3 30B, in Megatron-Bridge's skills/nemo-mbridge-perf-cpu-offloading/card.yaml."""
MEASURED = {0.0: (47.2, 0.996), 0.25: (43.4, 1.871), 0.5: (39.6, 2.484)} | {
    0.75: (35.6, 3.187),
    1.0: (32.0, 4.189),
}
"""By the share of the states on the host: GB allocated, and seconds of a step."""


def offloaded(share: float, *, overlap: bool = False, **states: Any) -> Run:
    """Return TP2 PP2 EP4 on 16 GPUs with a share of the states on the host."""
    return run_of(
        llama(layers=48, experts=Experts(number=128, per_token=8, width=768), **SIZES),
        gpus=16,
        tp=2,
        pp=2,
        ep=4,
        sequence_parallel=True,
        zero=1,
        seq_length=4096,
        global_batch=8,
        experts=ExpertKernels(dispatcher="alltoall", grouped=True),
        optimizer=Optimizer(offload=share, **states),
        overlap=Overlap(gradients=True, optimizer_host=overlap),
    )


def fully_sharded(keeper: Any, zero: Any, **states: Any) -> Run:
    """Return a dense model on four GPUs of a trainer with layers of torch."""
    adam: Any = "deepspeed" if keeper == "deepspeed" else "torch"
    return torch_run(
        llama(layers=4, **SIZES),
        keeper,
        gpus=4,
        zero=zero,
        module="transformers",
        optimizer=Optimizer(host_adam=adam, **states),
    )


@pytest.mark.parametrize("share", MEASURED)
def test_states_are_those_of_a_measured_run(share: float) -> None:
    """What is allocated between steps is what was measured, within 1 %."""
    found = account_of(offloaded(share), 0).states_bytes / 1e9
    assert found == pytest.approx(MEASURED[share][0], rel=0.01)


def test_moments_leave_and_fp32_weights_stay() -> None:
    """Of each parameter 8 bytes leave; 4 more where the trainer keeps no fp32 weights apart."""
    kept = {term.name: term.num_bytes for term in account_of(offloaded(0.0), 0).states}
    half = {term.name: term.num_bytes for term in account_of(offloaded(0.5), 0).states}
    none = {term.name: term.num_bytes for term in account_of(offloaded(1.0), 0).states}
    aware = {
        term.name: term.num_bytes
        for term in account_of(offloaded(1.0, offload_master=True), 0).states
    }
    assert half["Adam moments"] == pytest.approx(kept["Adam moments"] / 2, rel=1e-6)
    assert "Adam moments" not in none
    assert none["fp32 weights"] == kept["fp32 weights"]
    assert "fp32 weights" not in aware
    assert aware["weights"] == kept["weights"]


def test_seconds_of_an_update_by_hand() -> None:
    """28 bytes a parameter at a quarter of the host's rate; gradients down, weights up."""
    host = Host(link_bytes_per_s=50e9, memory_bytes_per_s=80e9)
    adam, copies = 1e9 * 28 / 20e9, 1e9 * 8 / 50e9
    apart = host_update_s(host, 1e9, gradient_bytes=4, weight_bytes=4, overlap=False)
    together = host_update_s(host, 1e9, gradient_bytes=4, weight_bytes=4, overlap=True)
    assert apart == pytest.approx(adam + copies)
    assert together == pytest.approx(adam)
    # where the link is the slower side, it is what is seen
    thin = Host(link_bytes_per_s=1e9, memory_bytes_per_s=80e9)
    assert host_update_s(thin, 1e9, gradient_bytes=4, weight_bytes=2, overlap=True) == 4.0
    assert exposed_s(3.0, 1.0) == 2.0
    assert exposed_s(1.0, 3.0) == 0.0


@pytest.mark.parametrize(("billions", "printed_s"), [(1, 0.22), (2, 0.51), (4, 1.03), (10, 2.57)])
def test_deepspeeds_adam_is_that_of_its_paper(billions: float, printed_s: float) -> None:
    """ZeRO-Offload, table 4, on a DGX-2: within 17 %; torch's takes longer."""
    dgx2 = Host(link_bytes_per_s=1e30, memory_bytes_per_s=12 * 21.33e9)
    found, other = (
        host_update_s(
            dgx2, billions * 1e9, gradient_bytes=4, weight_bytes=4, overlap=False, adam=adam
        )
        for adam in ("deepspeed", "torch")
    )
    assert found == pytest.approx(printed_s, rel=0.17)
    assert other == pytest.approx(found * 0.43 / 0.25)


def test_a_run_of_deepspeed_has_its_adam() -> None:
    """Others have torch's."""
    states = {"offload": 1.0, "offload_master": True}
    assert job_of_run(fully_sharded("deepspeed", 2, **states)).host_adam == "deepspeed"
    weights = {**states, "offload_weights": True}
    assert job_of_run(fully_sharded("accelerate", 3, **weights)).host_adam == "torch"
    assert job_of_run(offloaded(0.5)).host_adam == "torch"


@pytest.mark.parametrize("share", [share for share in MEASURED if share])
def test_seconds_are_those_of_a_measured_run(share: float) -> None:
    """What offload adds to a step, within 15 %; the copies' overlap saves what was measured."""
    machine = machine_named()
    # 128 experts and 48 layers on 16 ranks, and the other weights over 4 replicas
    own = 1.9093e9

    def took_s(share: float, *, overlap: bool = False) -> float:
        run = offloaded(share, overlap=overlap)
        return optimizer_time_s(machine, job_of_run(run), own, 4.2e9)

    added = took_s(share) - took_s(0.0)
    assert added == pytest.approx(MEASURED[share][1] - MEASURED[0.0][1], rel=0.15)
    if share == 1.0:
        saved = took_s(1.0) - took_s(1.0, overlap=True)
        assert saved == pytest.approx(4.189 - 3.877, rel=0.1)


def test_narrower_states_are_moved_faster() -> None:
    """Moments of 16 bits spare 2 x 4 bytes of traffic a parameter."""
    machine = machine_named()
    wide, narrow = (job_of_run(offloaded(0.0, moments_bytes=each)) for each in (8, 4))
    assert wide.state_bytes - narrow.state_bytes == 4
    seconds = [optimizer_time_s(machine, job, 1e9, 1e9) for job in (wide, narrow)]
    rate = machine.kernels.memory_bytes_per_s * machine.kernels.memory_share("optimizer")
    assert seconds[0] - seconds[1] == pytest.approx(8e9 / rate, rel=0.01)


def test_deepspeed_offloads_all_that_the_step_needs() -> None:
    """fp32 weights and moments go; 16-bit weights stay unless they go as well."""
    options = {"offload": 1.0, "offload_master": True}
    optimizer = layout_of_run(fully_sharded("deepspeed", 2, **options))
    kept = {name: each.each_bytes for name, each in optimizer.kept}
    assert kept == {"weights": 2.0, "gradients": 2.0, "fp32 weights": 0.0, "Adam moments": 0.0}
    everything = layout_of_run(fully_sharded("deepspeed", 3, offload_weights=True, **options))
    assert everything.per_parameter(4) == 0.0
    # ZeRO-Offload++ keeps half of 12 bytes on the device, and its gradients are on the host
    part = layout_of_run(fully_sharded("deepspeed", 3, offload=0.5, offload_master=True))
    assert part.per_parameter(4) == pytest.approx((2 + 12 / 2) / 4)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_deepspeed_moves_gradients_to_the_host_once_they_are_reduced(
    zero: int, micro_batches: int
) -> None:
    """ZeRO-1 reduces in the last micro-batch; ZeRO-2 keeps its shard to the end of each other one.

    Source: DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py (`process_gradients`,
    `copy_grads_in_partition`, `_clear_param_grad_only`).
    """
    run = fully_sharded("deepspeed", zero, offload=1.0, offload_master=True)
    run = replace(run, strategy=replace(run.strategy, global_batch=4 * micro_batches))
    points = [*live_points(run, 0)]
    units = units_of(run, run.strategy.stages[0][0])
    elements = sum(unit.elements for unit in units)

    def of(name: str, what: str) -> int:
        parts = [part for point in points if point.name == name for part in point.parts]
        return max((part.num_bytes for part in parts if part.name == what), default=0)

    # when the first unit is reduced, the others have been
    reduced = elements - units[0].elements
    kept = {
        (1, 1): 2 * reduced,
        (1, 4): 2 * elements,
        (2, 4): 2 * reduced / 4,
    }.get((zero, micro_batches), 0)
    assert of("reduction of a unit", "gradients") == pytest.approx(kept, rel=1e-6)
    assert of("loss", "gradients") == (2 * elements if (zero, micro_batches) == (1, 4) else 0)
    assert of("step", "gradients") == 0
    assert of("step", "offload buffer") == (0 if zero == 3 else 2 * 151936 * 2048)


def _moments(keeper: str, **optimizer: Any) -> int:
    states = account_of(fully_sharded(keeper, 3, **optimizer)).states
    return {term.name: term.num_bytes for term in states}["Adam moments"]


def test_eight_bit_moments_by_hand() -> None:
    """2 (1 + 4/256) bytes a parameter; partitions of DeepSpeed are flat, whatever they contain."""
    wide, narrow = _moments("deepspeed"), _moments("deepspeed", kind="adam8bit")
    assert narrow == pytest.approx(wide / 8 * (2 + 8 / 256), rel=1e-6)


def test_eight_bit_moments_of_torchao_include_embeddings() -> None:
    """Tensors under 4,096 elements alone have fp32 moments (torchao 0.18, optim/adam.py)."""
    wide = _moments("accelerate")
    narrow = _moments("accelerate", kind="adam8bit", torchao=True)
    vectors = (4 * (2 * 2048 + 2 * 128) + 2048) // 4
    # of torchao, the same moments in 16 bits wherever the weights are
    assert narrow == pytest.approx(wide / 8 * (2 + 8 / 256), rel=2e-3)
    assert narrow < _moments("accelerate", kind="adam8bit") - 100 * vectors


def test_paged_moments_are_on_the_host_and_are_copied_twice() -> None:
    """The whole of them, as an upper bound; the device has the memory of a run without moments."""
    plain, paged = fully_sharded("deepspeed", 2), fully_sharded("deepspeed", 2, paged=True)
    (moments,) = (one.num_bytes for one in account_of(plain).states if one.name == "Adam moments")
    assert "Adam moments" not in {one.name for one in account_of(paged).states}
    assert host_bytes_of(plain, account_of(plain)) == 0
    assert host_bytes_of(paged, account_of(paged)) == pytest.approx(moments, rel=1e-6)
    machine = machine_of(load_card("h100-80gb"), load_stack("torchtitan-eager"))
    seconds = [optimizer_time_s(machine, job_of_run(run), 1e9, 1e9) for run in (plain, paged)]
    link = host_of(machine).link_bytes_per_s
    assert seconds[1] - seconds[0] == pytest.approx(2 * 8e9 / link)


def test_eight_bit_moments_leave_out_embeddings_and_vectors() -> None:
    """Check that embeddings and tensors under 4,096 elements have fp32 moments elsewhere."""
    wide, narrow = _moments("accelerate"), _moments("accelerate", kind="adam8bit")
    rows = 151936 * 2048 // 4
    # four layers of two norms and two head norms, and the last norm, in four shards
    vectors = (4 * (2 * 2048 + 2 * 128) + 2048) // 4
    small = rows + vectors
    assert narrow == pytest.approx((wide / 8 - small) * (2 + 8 / 256) + 8 * small, rel=1e-9)


def test_weights_trained_as_they_are() -> None:
    """16 bits of weight, gradient and both moments: 8 bytes a parameter instead of 16."""
    whole = layout_of_run(fully_sharded("accelerate", 3))
    pure = layout_of_run(fully_sharded("accelerate", 3, master_bytes=0, moments_bytes=4))
    assert (whole.per_parameter(), pure.per_parameter()) == (16.0, 8.0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: offloaded(1.5), "expected 0 to 1"),
        (lambda: offloaded(0.5, kind="muon"), "needs Adam"),
        (lambda: offloaded(0.5, offload_weights=True), "Set offload to 1"),
        (lambda: offloaded(1.0, offload_weights=True), "does not offload weights"),
        (lambda: offloaded(0.0, kind="adam8bit"), "16-bit moments"),
        (lambda: fully_sharded("torchtitan", 3, offload=1.0), "together with weights"),
        (lambda: fully_sharded("deepspeed", 0, offload=1.0), "zero is 0"),
        (lambda: run_of(llama(), offload=frozenset({"attn_proj"})), "Add core_attn"),
        (lambda: run_of(llama(), offload=ActivationOffload(fraction=2.0)), "expected 0 to 1"),
    ],
)
def test_what_no_trainer_does_is_refused(wrong: Any, said: str) -> None:
    """In a sentence that says what is wrong or what to do."""
    with pytest.raises(InputError, match=said):
        wrong()
