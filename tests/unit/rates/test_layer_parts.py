"""Layers at the edges: windows and scores with context parallelism, few key heads, lone mixers."""

from __future__ import annotations

import pytest

from autopar.errors import InputError
from autopar.price.step import step_time
from autopar.rates.collectives import moe_exchange_time_s
from autopar.rates.layer import LayerTimes, layer_times
from autopar.rates.parts.operations import Machine, group, transfer_s
from autopar.records import replace
from autopar.run.architecture import Experts, Mamba, Mlp
from autopar.run.job import Block, Job
from tests.runs import attention_of
from tests.step_cases import CARDS, DENSE, STACKS, job_with, machine_named

(LLAMA,) = DENSE.blocks
assert LLAMA.attention is not None
WINDOWED = replace(LLAMA, attention=replace(LLAMA.attention, window=128))


def forward_s(times: LayerTimes, name: str) -> float:
    """Return the forward of a part."""
    (part,) = (part for part in times.parts if part.name == name)
    return part.forward_s


def test_a_window_is_as_narrow_on_every_rank(machine: Machine) -> None:
    """Of two ranks each has half of the pairs; without a window a ring has its steps."""
    job: Job = replace(DENSE, seq=32768)
    for block, least, most in ((WINDOWED, 1.9, 2.05), (LLAMA, 1.8, 2.0)):
        one = forward_s(layer_times(machine, job, block), "core attention")
        two = forward_s(layer_times(machine, job_with(job, cp=2), block), "core attention")
        assert least < one / two < most
    wide = replace(LLAMA, attention=replace(LLAMA.attention, window=32768))
    ring = layer_times(machine, job_with(job, cp=2), LLAMA)
    assert layer_times(machine, job_with(job, cp=2), wide) == ring


def test_scores_are_not_split_over_context(machine: Machine) -> None:
    """No trainer has a ring of them."""
    job = job_with(DENSE, cp=2, attention_kernel="unfused")
    with pytest.raises(InputError, match="cp is 2"):
        step_time(machine, job)


def test_scores_in_fp16_where_there_is_no_bf16() -> None:
    """A V100 with Megatron of its time."""
    machine = machine_named("v100", "megatron-2021")
    assert step_time(machine, replace(DENSE, precision="fp16")).terms_s["attention"] > 0


def test_every_rank_projects_a_key_head(machine: Machine) -> None:
    """With 8 key heads on 16 ranks the products are those of 16."""
    job = job_with(DENSE, tp=16)
    more = replace(LLAMA, attention=replace(LLAMA.attention, kv_heads=16))
    for name in ("qkv 0", "layout", "rotary", "core attention"):
        few, many = (forward_s(layer_times(machine, job, block), name) for block in (LLAMA, more))
        assert few == many


def test_weights_are_quantised_in_every_kind_of_layer(machine: Machine) -> None:
    """Also where a layer is a mixer or an MLP alone."""
    job = replace(DENSE, precision="fp8_block")
    mixer = Mamba(heads=64, width=64, state=128, groups=8)
    alone = attention_of(heads=32, kv_heads=8, width=128)
    for block in (
        Block(number=1, hidden=4096, recurrent=mixer),
        Block(number=1, hidden=4096, mlp=Mlp(width=14336)),
        Block(number=1, hidden=4096, attention=alone),
    ):
        assert layer_times(machine, job, block).weight_cast_s > 0
        assert layer_times(machine, DENSE, block).weight_cast_s == 0


def test_shards_of_experts_are_quantised(machine: Machine) -> None:
    """A rank quantises what it keeps: of experts, 1 / (ep etp) and of that one shard."""
    experts = Block(number=1, hidden=4096, mlp=Experts(number=8, per_token=2, width=14336))
    fully = replace(DENSE, precision="fp8", zero=3, gathered_bytes=1.0)
    few, many = (
        layer_times(machine, job_with(fully, dp=8, ep=ep), experts).weight_cast_s for ep in (1, 8)
    )
    # with 8 ranks each keeps an eighth of the experts, whether as shards or as whole experts
    assert few == pytest.approx(many, rel=0.01)


def test_attention_that_a_card_has_no_times_of_is_refused(machine: Machine) -> None:
    """Another kernel's time would be a guess in silence."""
    with pytest.raises(InputError) as caught:
        step_time(machine, replace(DENSE, low_precision_attention=True))
    assert str(caught.value) == (
        "card 'h100-80gb' has no times of 8-bit attention (cudnn-mxfp8 or "
        "cudnn-fp8). Use 16-bit attention, or a card with measured times in "
        "kernels.attention"
    )
    alone = replace(machine, stack=replace(machine.stack, attention=("triton2",)))
    with pytest.raises(InputError) as caught:
        step_time(alone, DENSE)
    assert str(caught.value) == (
        "stack 'megatron-core' runs attention with triton2, but card "
        "'h100-80gb' has times of flash3, cudnn, flash2, triton. Add one of "
        "these to the stack's attention"
    )


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("stack", [name for name in STACKS if name != "megatron-2021"])
def test_every_shipped_stack_has_attention_on_every_shipped_card(card: str, stack: str) -> None:
    """In the order of its document, of which the card has one at least."""
    machine = machine_named(card, stack)
    assert {*machine.stack.attention} & {"unfused", *machine.kernels.section.attention}
    layer_times(machine, replace(DENSE, precision="fp16"), LLAMA)


def test_ranks_that_share_an_expert_gather_its_tokens(machine: Machine) -> None:
    """Dispatch over every second rank, then an all-gather and a reduce-scatter of two."""
    mixture = replace(LLAMA, mlp=Experts(number=16, per_token=2, width=8192, gated=True))
    job = job_with(DENSE, dp=8, ep=4, etp=2)
    times = layer_times(machine, job, mixture)
    assert isinstance(mixture.mlp, Experts)
    tokens = job.tokens / job.tp
    dispatched = sum(
        float(
            moe_exchange_time_s(
                replace(machine.card.network, exchange=None),
                direction,
                tokens,
                group(machine, 4, 2),
                hidden=mixture.hidden,
                top_k=2,
                fused=False,
            )
        )
        for direction in ("dispatch", "combine")
    )
    gathered = tokens * 2 * 2 * mixture.hidden * 2.0
    shared = sum(
        transfer_s(machine, operation, gathered, 2, 1)
        for operation in ("allgather", "reducescatter")
    )
    assert times.experts.forward_s == pytest.approx(dispatched + shared)
    assert shared > 0

    alone = layer_times(machine, job_with(DENSE, dp=8, ep=1, etp=2), mixture)
    assert alone.experts.forward_s == pytest.approx(shared)


def test_an_expert_is_as_wide_as_its_ranks_make_it(machine: Machine) -> None:
    """Half of the width and all tokens of two ranks: as many FLOP, and as many weights a rank."""
    mixture = replace(LLAMA, mlp=Experts(number=16, per_token=2, width=8192, gated=True))
    whole, split = (job_with(DENSE, dp=8, ep=ep, etp=etp) for ep, etp in ((8, 1), (4, 2)))
    one, two = (
        forward_s(layer_times(machine, job, mixture), "experts up") for job in (whole, split)
    )
    assert two == pytest.approx(one, rel=0.03)
    odd = replace(LLAMA, mlp=Experts(number=16, per_token=2, width=8191, gated=True))
    with pytest.raises(InputError, match=r"ffn_hidden_size\(8191\) % etp\(2\) = 1 != 0"):
        step_time(machine, replace(job_with(DENSE, dp=8, etp=2), blocks=(odd,)))
