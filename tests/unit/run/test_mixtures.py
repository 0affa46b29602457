"""What tokens take to experts and back by dispatcher, what experts take of them, and how evenly."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.price.activations import routed_tokens
from autopar.price.job import job_of_run
from autopar.price.step import step_time
from autopar.rates.layer import layer_times
from autopar.rates.parts.operations import CommunicationTime, Machine, transfer_s
from autopar.records import replace
from autopar.run.architecture import Experts
from autopar.run.job import Block, Job
from autopar.run.run import Run
from autopar.run.runtime import ExpertKernels
from autopar.training.mixtures import (
    NATURAL_LOSSES,
    NATURAL_SKEW,
    processed_share,
    worst_skew,
)
from search.engines.megatron.read import read_run
from tests.runs import attention_of, decoder, run_of
from tests.step_cases import machine_named

QWEN3_235B = Job(
    name="Qwen3-235B-A22B",
    blocks=(
        Block(
            number=94,
            hidden=4096,
            attention=attention_of(heads=64, kv_heads=4, width=128, head_norms="head"),
            mlp=Experts(number=128, per_token=8, width=1536, gated=True),
            recompute=frozenset({"layernorm", "moe"}),
        ),
    ),
    vocab=151936,
    seq=16384,
    micro_batch=1,
    global_batch=256,
    gpus=256,
    tp=4,
    pp=8,
    dp=8,
    ep=8,
    vpp=4,
    sequence_parallel=True,
    zero=1,
    dispatcher="fused",
)
"""Of Megatron-MoE-ModelZoo's runs on H100."""


def sends(job: Job) -> CommunicationTime:
    """Return what a layer's tokens take to experts and back."""
    return layer_times(machine_named(), job, job.blocks[0]).experts


def mixture(kernels: ExpertKernels) -> Run:
    """Return a small mixture of eight experts on four ranks."""
    model = decoder(
        hidden=1024, width=4096, vocab=32000, experts=Experts(number=8, per_token=2, width=1024)
    )
    return run_of(model, gpus=4, ep=4, seq_length=4096, experts=kernels)


def test_an_all_gather_by_hand() -> None:
    """Tokens of all ranks of experts come whole; sums go back in the precision of probabilities."""
    job = replace(QWEN3_235B, dispatcher="allgather")
    elements = 16384 / 4 * 8 * 4096
    gather = transfer_s(machine_named(), "allgather", elements * 2, 8, 1)
    scatter = transfer_s(machine_named(), "reducescatter", elements * 2, 8, 1)
    found = sends(job)
    assert found.forward_s == pytest.approx(gather + scatter)
    assert found.backward_s == pytest.approx(gather + scatter)
    wide = sends(replace(job, router_fp32=True))
    twice = transfer_s(machine_named(), "reducescatter", elements * 4, 8, 1)
    assert wide.forward_s == pytest.approx(gather + twice)


def test_an_all_gather_is_blind_to_the_experts_of_a_token() -> None:
    """It sends as much for one as for eight, of which all-to-alls send eight times as much."""
    (block,) = QWEN3_235B.blocks
    assert isinstance(block.mlp, Experts)
    one = replace(block, mlp=replace(block.mlp, per_token=1))
    seconds = {
        (dispatcher, each.mlp.per_token): sends(  # type: ignore[union-attr]
            replace(QWEN3_235B, dispatcher=dispatcher, blocks=(each,))  # type: ignore[arg-type]
        ).forward_s
        for dispatcher in ("allgather", "all_to_all")
        for each in (block, one)
    }
    assert seconds["allgather", 8] == seconds["allgather", 1]
    assert seconds["all_to_all", 8] > 3 * seconds["all_to_all", 1]


def test_an_all_gather_is_over_the_ranks_that_share_experts_too() -> None:
    """ETP of 2 in EP of 8: sixteen ranks, in one collective."""
    job = replace(QWEN3_235B, dispatcher="allgather", ep=8, etp=2)
    elements = 16384 / 4 * 16 * 4096
    gather = transfer_s(machine_named(), "allgather", elements * 2, 16, 1)
    scatter = transfer_s(machine_named(), "reducescatter", elements * 2, 16, 1)
    assert sends(job).forward_s == pytest.approx(gather + scatter)


@pytest.mark.parametrize("row", NATURAL_LOSSES[:3], ids=lambda row: str(row.seq))
def test_one_skew_explains_published_losses(row: Any) -> None:
    """Steps at 16k, 32k and 64k tokens lose what was measured, within 2 % of the rate."""
    cp = row.seq // 16384
    even = replace(
        QWEN3_235B, seq=row.seq, cp=cp, dp=8 // cp, blocks=QWEN3_235B.blocks, graphs="none"
    )
    skewed = replace(even, skew=NATURAL_SKEW)
    forced, natural = (step_time(machine_named(), job).total_s for job in (even, skewed))
    assert 1 - forced / natural == pytest.approx(row.share, abs=0.02)


@pytest.mark.parametrize(
    ("skew", "capacity", "padded", "share"),
    [
        (1.5, None, False, 1.5),
        (1.5, 1.25, False, 1.25),
        (1.1, 1.25, False, 1.1),
        (1.1, 1.25, True, 1.25),
        (1.0, 0.5, False, 0.5),
    ],
)
def test_capacity_bounds_what_experts_take(
    skew: float, capacity: float | None, padded: bool, share: float
) -> None:
    """In time and in memory alike; filled up they compute as much in any case."""
    assert processed_share(skew, capacity=capacity, padded=padded) == share
    run = mixture(ExpertKernels(skew=skew, capacity=capacity, padded=padded))
    assert routed_tokens(run.rank_layers[0]) == math.ceil(4096 * 2 * share)
    job = job_of_run(run)
    assert (job.capacity, job.padded_capacity) == (capacity, padded)
    parts = {part.name: part for part in layer_times(machine_named(), job, job.blocks[0]).parts}
    even = replace(job, skew=share, capacity=None, padded_capacity=False)
    wanted = {part.name: part for part in layer_times(machine_named(), even, even.blocks[0]).parts}
    assert float(parts["experts up"].forward_s) == float(wanted["experts up"].forward_s)


def test_the_skew_of_a_run_goes_before_what_is_asked_for() -> None:
    """What is asked for is of runs that do not fix it."""
    run, forced = mixture(ExpertKernels()), mixture(ExpertKernels(skew=1.0))
    assert job_of_run(run).skew == 1.0
    assert job_of_run(run, skew=NATURAL_SKEW).skew == NATURAL_SKEW
    assert job_of_run(forced, skew=NATURAL_SKEW).skew == 1.0


def test_a_capacity_that_takes_nothing() -> None:
    """It is refused."""
    with pytest.raises(InputError, match="above 0"):
        processed_share(1.0, capacity=0.0)


def test_worst_steps_of_runs() -> None:
    """One expert a rank is busier than several, and a long run meets a worse step."""
    assert worst_skew(alone=True, steps=50) > worst_skew(alone=False, steps=50)
    assert worst_skew(alone=False, steps=None) > worst_skew(alone=True, steps=50)


def test_arguments_of_experts_are_read() -> None:
    """Capacity, whether it is filled up, and the precision of probabilities."""
    found = read_run(
        {
            "--num-layers": 4,
            "--hidden-size": 1024,
            "--num-attention-heads": 8,
            "--seq-length": 1024,
            "--max-position-embeddings": 1024,
            "--micro-batch-size": 1,
            "--global-batch-size": 8,
            "--bf16": True,
            "--vocab-size": 32000,
            "--num-experts": 8,
            "--moe-expert-capacity-factor": 1.25,
            "--moe-pad-expert-input-to-capacity": True,
            "--moe-router-dtype": "fp32",
        },
        world_size=1,
    ).run.runtime.experts
    assert (found.capacity, found.padded, found.router_fp32) == (1.25, True, True)


def test_permutation_without_its_fused_kernel(machine: Machine) -> None:
    """Sums of rows are read and written once for each: `--moe-permute-fusion` is faster."""
    times = []
    for fused in (True, False):
        kernels = ExpertKernels(dispatcher="alltoall", grouped=True, fused_permutation=fused)
        job = job_of_run(mixture(kernels))
        (part,) = [
            one for one in layer_times(machine, job, job.blocks[0]).parts if one.name == "permute"
        ]
        times.append((part.forward_s, part.input_s))
    (fast, fast_back), (slow, slow_back) = times
    assert slow - fast == pytest.approx(slow_back - fast_back)
    # 4 of 8 bytes forward, 4 of 12 backward; launches are the same
    assert 1.3 < slow / fast < 1.5
    assert 1.2 < slow_back / fast_back < 1.34
