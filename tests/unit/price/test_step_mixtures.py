"""What experts take of hosts, what fused kernels of theirs save, and layers of further tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest

from autopar.errors import InputError
from autopar.price.step import step_time
from autopar.rates.parts.operations import Machine
from autopar.records import replace
from autopar.run.architecture import Attention, Experts, LatentAttention, Mamba
from autopar.run.job import Block, Job, mtp_blocks
from tests.runs import attention_of
from tests.step_cases import job_with, stack_named

FEW = 64
"""Tokens of a micro-batch, so that devices wait for their host."""
JOB = Job(
    name="mixture",
    blocks=(
        Block(
            number=4,
            hidden=2048,
            attention=attention_of(heads=16, kv_heads=4, width=128),
            mlp=Experts(number=128, per_token=8, width=768, gated=True),
        ),
    ),
    vocab=32000,
    seq=FEW,
    micro_batch=1,
    global_batch=8,
    gpus=8,
    dp=8,
    ep=8,
    dispatcher="fused",
)


def total_s(machine: Machine, job: Job) -> float:
    """Return the seconds of a step."""
    return step_time(machine, job).total_s


def layer_s(machine: Machine, job: Job) -> float:
    """Return the seconds of a micro-batch over its layers: those of the host, if it has few tokens.

    Transfers, which the host does not wait for, are left out of no term.
    """
    layers = sum(block.number for block in job.blocks)
    return step_time(machine, job).stage_s[0] / layers


def test_each_expert_of_a_rank_is_launched(machine: Machine) -> None:
    """Half the ranks, twice the experts a rank: 16 more of 0.15 ms a layer, in 8 bits of 0.3."""
    for precision, each_s in (("bf16", 0.15e-3), ("fp8", 0.3e-3)):
        job = replace(JOB, precision=precision)
        more = layer_s(machine, replace(job, ep=4)) - layer_s(machine, job)
        assert more == pytest.approx(16 * each_s, rel=0.02)


def test_experts_beside_many_tokens_cost_the_host_nothing(machine: Machine) -> None:
    """A device that is late anyway does not wait for launches."""
    long = replace(JOB, seq=64 * 1024)
    free = stack_named("megatron-core")
    host = replace(free.figures.host, values={**free.figures.host.values, "expert_s": 0.0})
    figures = replace(free.figures, host=host)
    unhurried = replace(machine, stack=replace(free, figures=figures))
    assert total_s(machine, long) == pytest.approx(total_s(unhurried, long), rel=0.001)


def test_merged_directions_take_the_host_longer(machine: Machine) -> None:
    """Of experts alone, 0.6 of their time and of 16 launches; graphs replay the pieces."""
    host = machine.stack.figures.host
    merged = replace(JOB, overlap_experts=True)
    more = layer_s(machine, merged) - layer_s(machine, JOB)
    experts_s = host["experts_s"] + 16 * 0.5 * host["expert_s"]
    assert more == pytest.approx((host["merged"] - 1) * experts_s, rel=0.02)
    captured = replace(JOB, graphs="partial")
    both = layer_s(machine, replace(captured, overlap_experts=True)), layer_s(machine, captured)
    assert both[0] == pytest.approx(both[1], rel=0.01)


def test_norms_of_latent_attention_are_those_of_its_latents(machine: Machine) -> None:
    """Whether a trainer says so (Megatron-LM's `--qk-layernorm`) or not: heads have none there."""
    latent = LatentAttention(query_rank=1536, kv_rank=512, key_width=128, rotary_width=64)
    attention = attention_of(heads=16, kv_heads=16, width=192, value_width=128, latent=latent)

    def memory_s(attention: Attention) -> float:
        block = replace(JOB.blocks[0], attention=attention)
        return step_time(machine, replace(JOB, blocks=(block,), seq=4096)).terms_s["memory"]

    plain = memory_s(attention)
    assert memory_s(replace(attention, head_norms="head")) == plain
    wide = replace(latent, query_rank=2 * 1536)
    assert memory_s(replace(attention, latent=wide)) > plain


def test_exchanges_are_hidden_where_there_is_another_micro_batch(machine: Machine) -> None:
    """m - 1 of m on one stage, none of a single one; (p - 1) / p v where a pipeline just fills."""
    job = replace(JOB, seq=4096, overlap_experts=True, graphs="full")

    def hidden(merged: Job) -> float:
        apart = replace(merged, overlap_experts=False)
        found, whole = (step_time(machine, one).terms_s["experts"] for one in (merged, apart))
        return 1 - found / whole

    assert hidden(job) == 0
    assert hidden(replace(job, global_batch=16)) == pytest.approx(0.5 * 1 / 2)
    assert hidden(replace(job, global_batch=8 * 64)) == pytest.approx(0.5 * 63 / 64)
    staged = replace(job, gpus=16, pp=2, vpp=2, global_batch=16)
    assert hidden(staged) == pytest.approx(0.5 * 1 / 4)
    # of 8 micro-batches in 2 chunks the last stage's warm-up is one chunk of 2, and 1 more
    assert hidden(replace(staged, global_batch=64)) == pytest.approx(0.5 * (16 - 3) / 16)


def test_partial_graphs_have_no_products_of_experts(machine: Machine) -> None:
    """Whose tokens are others in every step, unless they are padded to a capacity."""
    captured = replace(JOB, graphs="partial")
    padded = replace(captured, capacity=1.0, padded_capacity=True)
    whole = replace(JOB, graphs="full")
    plain, partial, fixed = (layer_s(machine, job) for job in (JOB, captured, padded))
    launches = 16 * 0.5 * machine.stack.figures.host["expert_s"]
    assert partial == pytest.approx(launches + 0.7 * (plain - launches), rel=0.01)
    assert fixed == pytest.approx(0.7 * plain, rel=0.01)
    assert layer_s(machine, whole) < 0.3 * fixed


def test_fused_kernels_move_nothing_between_both_products(machine: Machine) -> None:
    """No pass of the activation, and of four casts of an expert's products two."""
    job = replace(JOB, seq=4096, graphs="full", precision="fp8_block")
    fused = replace(job, fused_experts=True)
    before, after = (step_time(machine, one).terms_s for one in (job, fused))
    copies = 4096 * 8
    # megatron-core: 0.75 x 3 and 5 bytes of both halves; 4 of the activated width, and of the
    # gradient of both halves
    saved = copies * 4 * JOB.blocks[0].mlp.width * (2 * (0.75 * 3 + 5))  # type: ignore[union-attr]
    rate = machine.kernels.memory_bytes_per_s * machine.kernels.memory_share("elementwise")
    launches = 4 * 2 * machine.kernels.section.memory_launch["launch_s"]
    less = before["memory"] - after["memory"]
    assert less == pytest.approx(saved / rate + launches, rel=1e-6)
    casts = copies * 4 * JOB.blocks[0].mlp.width * (1 + 2) * 4  # type: ignore[union-attr]
    assert before["cast"] - after["cast"] == pytest.approx(casts / rate + launches, rel=1e-6)
    assert after["gemm"] < before["gemm"]


def test_a_fused_mlp_is_one_launch(machine: Machine) -> None:
    """However many experts a rank has."""
    fused = replace(JOB, fused_experts=True)
    launches = 16 * 0.5 * machine.stack.figures.host["expert_s"]
    assert layer_s(machine, JOB) - layer_s(machine, fused) == pytest.approx(launches, rel=0.02)


# --------------------------------------------------------------------------------------------------
# Further tokens


LONG = replace(JOB, seq=4096, graphs="full", global_batch=64)


def test_a_further_layer_takes_what_a_layer_and_a_head_take(machine: Machine) -> None:
    """And a projection, two norms and a lookup more."""
    more = total_s(machine, replace(LONG, mtp=1)) - total_s(machine, LONG)
    (block,) = LONG.blocks
    longer = replace(LONG, blocks=(replace(block, number=5),))
    layer = total_s(machine, longer) - total_s(machine, LONG)
    wider = replace(LONG, vocab=2 * LONG.vocab)
    head = total_s(machine, wider) - total_s(machine, LONG)
    assert layer + head < more < 1.3 * (layer + head)


def test_further_layers_lengthen_the_stage_that_has_them(machine: Machine) -> None:
    """The last, unless another is named; its head stays on the last."""
    job = job_with(LONG, pp=4, dp=2, ep=2, mtp=1)
    without = step_time(machine, replace(job, mtp=0)).stage_s
    behind = step_time(machine, job).stage_s
    named = step_time(machine, replace(job, stage_mtp=(0, 0, 1, 0))).stage_s
    assert behind[:3] == without[:3]
    assert behind[3] > 1.5 * without[3]
    assert named[:2] == without[:2]
    assert without[3] < named[3] < behind[3]
    assert named[2] - without[2] == pytest.approx(behind[3] - named[3], rel=1e-9)


def test_more_further_layers_take_longer(machine: Machine) -> None:
    """Each as long as the one before, on one stage with overlapped gradients of a step."""
    times = [total_s(machine, replace(LONG, mtp=mtp, zero=0)) for mtp in range(4)]
    steps = [after - before for before, after in pairwise(times)]
    assert min(steps) > 0
    assert steps[2] == pytest.approx(steps[1], rel=0.05)


def test_the_layer_of_a_hybrid_mixes_tokens() -> None:
    """Where the model's last layer has experts alone, attention stands in front of them."""
    mixer = Block(number=2, hidden=64, recurrent=Mamba(heads=2, width=32, state=16, groups=1))
    attention = Block(number=3, hidden=64, attention=attention_of(heads=2, kv_heads=2, width=32))
    experts = Block(number=5, hidden=64, mlp=Experts(number=4, per_token=2, width=32, gated=True))
    job = replace(JOB, blocks=(attention, mixer, experts), ep=4)
    assert mtp_blocks(job) == (replace(attention, number=1), replace(experts, number=1))
    assert mtp_blocks(replace(JOB, blocks=(mixer, experts))) == (replace(experts, number=1),)
    assert mtp_blocks(JOB) == (replace(JOB.blocks[0], number=1),)


def test_further_layers_of_other_numbers_of_stages_are_refused(machine: Machine) -> None:
    """Modules that do not add up to the model's, or of stages that there are not."""
    job = job_with(LONG, pp=2, dp=4, ep=4, mtp=1)
    for wrong in ((1,), (0, 2), (0, 0, 1)):
        with pytest.raises(InputError, match="MTP layers"):
            step_time(machine, replace(job, stage_mtp=wrong))


def test_a_module_of_further_tokens_is_as_the_layer_that_ends_the_model() -> None:
    """Where the ways of a pipeline come back, that is on its first stage."""
    (experts,) = JOB.blocks
    narrow = replace(experts, mlp=Experts(number=64, per_token=4, width=768, gated=True))
    # layers 0 and 3 on the first stage, 1 and 2 on the second
    blocks = tuple(replace(block, number=1) for block in (narrow, experts, narrow, narrow))
    job = replace(JOB, blocks=blocks, pp=2, vpp=2, dp=4, ep=4, stage_layers=(2, 2), mtp=1)
    assert mtp_blocks(replace(job, schedule="zero_bubble_v")) == (replace(experts, number=1),)
    assert mtp_blocks(replace(job, schedule="interleaved")) == (replace(narrow, number=1),)
