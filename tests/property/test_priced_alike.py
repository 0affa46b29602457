"""The planner and the bottom-up step price a plan alike if both use one card and stack."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import strategies as st

from autopar.price.job import job_of_run
from autopar.price.step import StepTime, step_time
from autopar.rates.card import estimate_hardware
from autopar.rates.measured import HardwareProfile
from autopar.rates.model import estimate_model
from autopar.rates.stack import load_stack
from autopar.run.model import LayerSpec, ModelProfile, ModelSpec
from autopar.run.of_plan import run_of_plan
from autopar.run.plan import LayerStrategy, Plan, Prediction, VocabStrategy
from autopar.run.runtime import Overlap
from autopar.units import GIB
from search.planning.layered.planner import Planner
from search.request.options import LARGEST_MEMORY_GIB, SearchOptions
from tests.often import often
from tests.step_cases import STACKS, machine_named

seeds = st.integers(0, 10**6)
_GPUS = 8
"""GPUs of one node: across nodes, documents know two strides of groups, and the step knows all."""
_STEP = 0.12
_MEDIAN, _TWENTIETH = 0.01, 0.07
_TERMS = {
    "compute": (("gemm", "attention", "memory"), ("forward", "backward", "vocab"), 0.06),
    "recomputation": (("recompute",), ("recompute",), 0.01),
    "tensor parallel": (("tensor",), ("tp",), 0.02),
    "optimizer": (("optimizer",), ("optimizer",), 0.015),
    "transfers": (("transfer",), ("transfer",), 0.015),
    "host": (("host",), ("host",), 0.10),
    # ZeRO-3's last scatter is traffic of the step in one, and of the reduction in the other
    "data parallel": (("sharding", "gradients"), ("zero3", "sync", "gradient_sync"), 0.06),
}
"""Names in the step and in the planner, and their allowed difference as a share of a step. Causes
are a line through times of several batches, messages read off curves, an undivided look-up, and
embedding and head without the layers' waiting and overlap.
"""


@cache
def _documents(
    card: str, stack: str, layers: int, hidden: int, sequence_parallel: bool
) -> tuple[ModelSpec, ModelProfile, HardwareProfile]:
    layer = LayerSpec(
        num_layers=layers,
        seq_length=2048,
        hidden_size=hidden,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=3 * hidden,
        gated_mlp=True,
    )
    spec = ModelSpec(name="small", layers=(layer,), vocab_size=32000, tied_embeddings=False)
    profile = estimate_model(spec, card, stack=stack, sequence_parallel=sequence_parallel)
    trainer = load_stack(stack)
    hardware = estimate_hardware(card, num_nodes=1, gpus_per_node=_GPUS, stack=trainer)
    return spec, profile, hardware


def _priced(seed: int) -> tuple[Prediction, StepTime]:
    """Return a random plan of equal layers in the planner, and in the step."""
    draw = random.Random(seed)
    card, stack = draw.choice(("a100-80gb", "h100", "b200")), draw.choice(STACKS)
    layers, hidden, sp = draw.choice((16, 24, 32)), draw.choice((2048, 4096)), draw.random() < 0.7
    tp, pp = draw.choice([(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4) if _GPUS % (t * p) == 0])
    dp = _GPUS // (tp * pp)
    m = pp * draw.choice((1, 2, 4, 8))
    strategy = LayerStrategy(
        tp=tp, zero3=draw.random() < 0.4 and dp > 1, checkpoint=draw.random() < 0.3
    )
    plan = Plan(
        world_size=_GPUS,
        num_stages=pp,
        stage_sizes=(layers // pp,) * pp,
        layers=(strategy,) * layers,
        vocab=VocabStrategy(tp=tp, zero3=strategy.zero3),
        global_batch=m * dp * draw.choice((1, 2, 4)),
        num_microbatches=m,
        default_dp_type=draw.choice(("ddp", "zero2")),
    )
    # ZeRO-3 scatters gradients once a step in the one, in every micro-batch in the other
    late = draw.random() < 0.8 and not (strategy.zero3 and m > 1)
    overlapped = draw.random() < 0.7
    # the step's ZeRO-3 scatters gradients in the type of the weights
    wide = not strategy.zero3
    options = SearchOptions(
        memory_constraint_bytes=LARGEST_MEMORY_GIB * GIB,
        time_profile_mode="batch",
        sequence_parallel=sp,
        async_grad_reduce=late,
        tp_overlap=overlapped,
        fp32_gradients=wide,
    )
    spec, profile, hardware = _documents(card, stack, layers, hidden, sp)
    found = Planner.from_documents(spec, profile, hardware, options).evaluate(plan)
    run = run_of_plan(
        plan,
        spec,
        engine="galvatron",
        gpu=card,
        sequence_parallel=sp,
        async_grad_reduce=late,
        fp32_gradients=wide,
        overlap=Overlap(tensor=overlapped, gradients=True),
    )
    return found, step_time(machine_named(card, stack), job_of_run(run))


@pytest.mark.whole
@often(25, 400, seeds)
def test_every_term_is_that_of_the_step(seed: int) -> None:
    """Terms and the whole step agree within a few percent of the step."""
    found, step = _priced(seed)
    assert abs(found.step_time_s / step.total_s - 1.0) < _STEP
    for name, (own, planned, share) in _TERMS.items():
        bottom_up = sum(step.terms_s[term] for term in own)
        planner = sum(found.waterfall_s.get(part, 0.0) for part in planned)
        assert abs(planner - bottom_up) < share * step.total_s, name


@pytest.mark.whole
def test_steps_differ_by_a_percent_in_the_middle() -> None:
    """Median and 95 % quantile of eighty plans; every term occurs in some of them."""
    priced = [_priced(seed) for seed in range(80)]
    shares = [found.step_time_s / step.total_s - 1.0 for found, step in priced]
    assert float(np.median(np.abs(shares))) < _MEDIAN
    assert float(np.quantile(np.abs(shares), 0.95)) < _TWENTIETH
    for name, (own, planned, _) in _TERMS.items():
        assert sum(sum(step.terms_s[term] for term in own) > 0 for _, step in priced) > 5, name
        seen = (sum(found.waterfall_s.get(part, 0.0) for part in planned) for found, _ in priced)
        assert sum(value > 0 for value in seen) > 5, name
