"""Properties of the time of any step, dense or with experts, on any machine."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from autopar.errors import InputError
from autopar.price.step import TERMS, LayerTimeCache, seconds_of_times, step_time
from autopar.rates.layer import layer_times
from autopar.rates.parts.operations import Machine
from autopar.records import replace
from autopar.run.architecture import Experts
from autopar.run.job import Block, Job, stage_blocks
from tests.often import often
from tests.step_cases import (
    CARDS,
    DENSE,
    STACKS,
    any_case,
    dense_case,
    job_with,
    machine_named,
    mixture_case,
)

seeds = st.integers(0, 10**6)
ROUNDING = 1 - 1e-12
SENT = ("tensor", "context", "experts", "transfer", "sharding", "bubble", "gradients", "stragglers")
"""Terms of a step that one GPU does not have."""


def total_s(machine: Machine, job: Job) -> float:
    """Return the seconds of a step."""
    return step_time(machine, job).total_s


@often(30, 500, seeds)
def test_terms_add_up(seed: int) -> None:
    """None is negative, and every name is one of `TERMS`."""
    machine, job = any_case(seed)
    step = step_time(machine, job)
    assert tuple(step.terms_s) == TERMS
    assert min(step.terms_s.values()) >= -1e-12 * step.total_s, step.terms_s
    assert step.total_s == pytest.approx(sum(step.terms_s.values()), rel=1e-12)
    assert len(step.stage_s) == job.pp
    assert step.terms_s["optimizer"] == step.optimizer_s
    assert max(step.stage_s) * job.micro_batches * ROUNDING <= step.total_s


@often(30, 500, seeds, st.sampled_from(["bf16", "fp8", "mxfp8"]))
def test_a_layer_is_the_sum_of_its_halves(seed: int, precision: Any) -> None:
    """The cached parts of a layer, experts by their tokens, take as long as the whole layer."""
    machine, job = any_case(seed)
    job = replace(job, precision=precision)
    known = LayerTimeCache(machine)
    for block in job.blocks:
        try:
            whole = layer_times(machine, job, replace(block, number=1))
        except InputError:
            continue  # the card supports no such GEMMs
        kept = known.times(job, block)
        assert seconds_of_times(machine, job, kept) == pytest.approx(
            seconds_of_times(machine, job, whole), rel=1e-12
        )


@often(8, 200, seeds, st.integers(2, 5))
def test_more_work_takes_longer(seed: int, factor: int) -> None:
    """More micro-batches, longer sequences, more layers, more recomputation."""
    machine, job = any_case(seed)
    before = total_s(machine, job) * ROUNDING
    assert total_s(machine, replace(job, global_batch=job.global_batch * factor)) > before
    assert total_s(machine, replace(job, recompute="full")) >= before
    *others, last = job.blocks
    more = replace(job, blocks=(*others, replace(last, number=last.number + factor * job.pp)))
    assert total_s(machine, more) > before
    if all(block.attention is None or not block.attention.window for block in job.blocks):
        assert total_s(machine, replace(job, seq=job.seq * factor)) > before


@often(8, 200, seeds, st.floats(1.01, 3))
def test_a_faster_machine_is_no_slower(seed: int, factor: float) -> None:
    """A higher clock, wider memory, links and adapters."""
    machine, job = any_case(seed)
    after = total_s(machine, job) / ROUNDING
    assert total_s(replace(machine, clock=machine.clock * factor), job) <= after
    wider = replace(machine.kernels, memory_bytes_per_s=machine.kernels.memory_bytes_per_s * factor)
    assert total_s(replace(machine, kernels=wider), job) <= after
    network = machine.card.network
    for name in ("link_bytes_per_s", "adapter_bytes_per_s"):
        quicker = replace(network, **{name: getattr(network, name) * factor})
        card = replace(machine.card, network=quicker)
        assert total_s(replace(machine, card=card), job) <= after, name


@often(10, 200, seeds)
def test_one_gpu_sends_nothing(seed: int) -> None:
    """Its step is kernels, recomputation, host and optimizer."""
    machine, job = any_case(seed)
    kernel = job.attention_kernel
    alone = replace(job, tp=1, cp=1, rings=1, pp=1, dp=1, ep=1, gpus=1, vpp=1, zero=0, seq=2048)
    alone = replace(alone, global_batch=alone.micro_batch, attention_kernel=kernel)
    for zero in range(4):
        terms = step_time(machine, replace(alone, zero=zero)).terms_s
        assert {term: terms[term] for term in SENT} == dict.fromkeys(SENT, 0.0)


@often(8, 100, seeds, st.randoms(use_true_random=False))
def test_the_order_of_layers_does_not_matter(seed: int, order: random.Random) -> None:
    """On one stage; and never how many runs equal layers are written as."""
    machine, job = any_case(seed)
    expected = step_time(machine, job)
    parts = []
    for block in job.blocks:
        first = order.randint(0, block.number)
        counts = [count for count in (first, block.number - first) if count]
        parts += [replace(block, number=count) for count in counts]
    found = step_time(machine, replace(job, blocks=tuple(parts)))
    assert found.terms_s == pytest.approx(expected.terms_s, rel=1e-9, abs=1e-15)
    # an MTP layer is like the last layer, whichever that is
    alone = job_with(job, pp=1, vpp=1, mtp=0)
    order.shuffle(parts)
    shuffled = replace(alone, blocks=tuple(parts))
    assert total_s(machine, shuffled) == pytest.approx(total_s(machine, alone), rel=1e-9)


@often(8, 200, seeds)
def test_time_is_affine_in_the_batch(seed: int) -> None:
    """With micro-batches of one size, where nothing is hidden in or under another of them."""
    machine, job = any_case(seed)
    job = replace(job, overlap_gradients=False, overlap_experts=False)
    unit = job.micro_batch * job.dp
    one, two, nine = (total_s(machine, replace(job, global_batch=unit * n)) for n in (1, 2, 9))
    assert nine == pytest.approx(one + 8 * (two - one), rel=1e-9)


@often(8, 200, seeds, st.floats(1.0, 4.0))
def test_uneven_and_wider_routing_is_no_faster(seed: int, factor: float) -> None:
    """More tokens on the busiest rank, more experts a token."""
    machine, job = mixture_case(seed)
    before = total_s(machine, job) * ROUNDING
    assert total_s(machine, replace(job, skew=job.skew * factor)) >= before

    def wider(block: Block) -> Block:
        if not isinstance(block.mlp, Experts):
            return block
        return replace(block, mlp=replace(block.mlp, per_token=block.mlp.per_token + 1))

    assert total_s(machine, replace(job, blocks=tuple(map(wider, job.blocks)))) >= before


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 60))
@settings(max_examples=200)
def test_stages_hold_every_layer_once(numbers: list[int], pp: int) -> None:
    """In their order, as evenly as whole layers can be, fewest at the ends."""
    (block,) = DENSE.blocks
    blocks = tuple(
        replace(block, number=number, hidden=8 * (k + 1)) for k, number in enumerate(numbers)
    )
    job = replace(DENSE, blocks=blocks, pp=pp)
    if pp > sum(numbers):
        with pytest.raises(InputError, match=f"{sum(numbers)} layers are too few for pp {pp}"):
            stage_blocks(job)
        return
    stages = stage_blocks(job)
    assert len(stages) == pp
    layers = [part.hidden for stage in stages for part in stage for _ in range(part.number)]
    assert layers == [part.hidden for part in blocks for _ in range(part.number)]
    counts = [sum(part.number for part in stage) for stage in stages]
    assert max(counts) - min(counts) <= 1
    # of the middle ones none has fewer than the first, which has no fewer than the last
    assert min(counts[1:-1], default=counts[0]) >= counts[0] >= counts[-1]


@given(
    st.sampled_from(CARDS),
    st.sampled_from(STACKS),
    st.dictionaries(
        st.sampled_from(
            ["tp", "cp", "pp", "dp", "ep", "vpp", "gpus", "micro_batch", "global_batch"]
        ),
        st.integers(-1, 9),
        max_size=4,
    ),
)
@settings(max_examples=150)
def test_any_degrees_have_a_time_or_a_sentence(
    card: str, stack: str, changes: dict[str, Any]
) -> None:
    """Only the expected error is raised, and no time is NaN or negative."""
    machine = machine_named(card, stack)
    job = replace(DENSE, precision="fp16", **changes)
    try:
        step = step_time(machine, job)
    except InputError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert "\n" not in refused
        return
    assert 0 < step.total_s < float("inf")
    assert job.tp * job.cp * job.pp * job.dp == job.gpus


def test_cases_are_of_all_kinds() -> None:
    """Random jobs are diverse: each term occurs in some, and none in all others."""
    seen = dict.fromkeys(TERMS, 0)
    for seed in range(30):
        machine, job = any_case(seed)
        for term, value in step_time(machine, job).terms_s.items():
            seen[term] += value > 0
    assert min(seen.values()) >= 3, seen
    assert {dense_case(seed)[0].card for seed in range(300)} == set(CARDS)
