"""Random training jobs on shipped machines, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from autopar.documents.catalog import card_names
from autopar.documents.json import JsonDocument
from autopar.price.assessment import Target
from autopar.rates.accuracy import load_accuracy
from autopar.rates.card import Card, load_card
from autopar.rates.collectives import SiteFactors
from autopar.rates.parts.operations import Machine, machine_of
from autopar.rates.site import Site as Cluster, read_site
from autopar.rates.stack import Stack, load_stack
from autopar.records import replace
from autopar.run.architecture import Attention, Experts, LatentAttention, Mamba, Mlp
from autopar.run.job import Block, Job
from tests.oracles.step import Site
from tests.runs import attention_of

__all__ = [
    "CARDS",
    "DENSE",
    "STACKS",
    "any_case",
    "card_named",
    "dense_case",
    "job_with",
    "machine_named",
    "mixture_case",
    "stack_named",
    "target_named",
]

CARDS = tuple(card_names())
STACKS = (
    "composer-fsdp",
    "megatron-2021",
    "megatron-core",
    "torchtitan-compiled",
    "torchtitan-eager",
)
DENSE = Job(
    name="dense",
    blocks=(
        Block(
            number=16,
            hidden=4096,
            attention=attention_of(heads=32, kv_heads=8, width=128),
            mlp=Mlp(width=14336, gated=True),
        ),
    ),
    vocab=128256,
    seq=4096,
    micro_batch=1,
    global_batch=8,
)
"""A half of Llama 3 8B on one GPU."""


@cache
def card_named(name: str) -> Card:
    """Return a shipped card."""
    return load_card(name)


@cache
def stack_named(name: str) -> Stack:
    """Return a shipped stack."""
    return load_stack(name)


@cache
def machine_named(card: str = "h100-80gb", stack: str = "megatron-core") -> Machine:
    """Return a device of a shipped card with a shipped stack."""
    return machine_of(card_named(card), stack_named(stack))


def target_named(card: str = "h100-80gb", stack: str = "megatron-core") -> Target:
    """Return such a device on no known site, with the default risk of OOM."""
    machine = machine_named(card, stack)
    return Target(machine=machine, accuracy=load_accuracy(), site_known=False, oom_risk=0.01)


def job_with(job: Job, **changes: Any) -> Job:
    """Return a job with other degrees and sizes, and as many GPUs as its degrees make."""
    changed = replace(job, **changes)
    return replace(changed, gpus=changed.tp * changed.cp * changed.pp * changed.dp)


def dense_case(seed: int) -> tuple[Site, Machine, Job]:
    """Return a dense job on a machine; the seeds together use every field of both."""
    draw = random.Random(seed)
    name, stack = draw.choice(CARDS), draw.choice(STACKS)
    card = card_named(name)
    factors, share, network, cluster = SiteFactors(), None, card.network, None
    if draw.random() < 0.5:
        factors = SiteFactors(in_node=draw.uniform(0.3, 1), cross_node=draw.uniform(0.3, 1))
        clock, share = draw.uniform(0.6, 1.1), draw.uniform(0.3, 0.9)
        figures = {
            "clock": clock,
            "elementwise_share": share,
            "in_node": factors.in_node,
            "cross_node": factors.cross_node,
        }
        if draw.random() < 0.5:
            figures["adapter_bytes_per_s"] = adapters = draw.uniform(5e9, 1e11)
            network = replace(network, adapter_bytes_per_s=adapters)
        cluster = _cluster(name, figures)
    machine = machine_of(card, stack_named(stack), cluster)
    site = Site(name, stack, network, machine.clock, cluster is not None, share, factors)
    return site, machine, _dense_job(draw, machine)


def _cluster(card: str, figures: Mapping[str, float]) -> Cluster:
    """Return a cluster of a card's devices with these figures, as read from its document."""
    entries = {
        key: {"value": value, "quality": "measured", "source": "drawn"}
        for key, value in figures.items()
    }
    data = {"format": "autopar-site", "version": 1, "card": card, **entries}
    return read_site(JsonDocument(path=Path("drawn.json"), data=data, sha256=""))


def _dense_job(draw: random.Random, machine: Machine) -> Job:
    tp, cp, pp, dp = (
        draw.choice(degrees) for degrees in ((1, 2, 4, 8), (1, 1, 2, 4), *2 * [(1, 2, 3, 8)])
    )
    surfaces = machine.kernels.section.gemm
    precision = draw.choice([*surfaces, "fp16", *(["mxfp8"] if "fp8_block" in surfaces else [])])
    known = [*machine.kernels.section.attention]
    kernel = draw.choice([None, "unfused", *known])
    preferred = next(name for name in (*machine.stack.attention, *known) if name in known)
    usual = next(name for name in machine.stack.attention if name in (*known, "unfused"))
    unfused = "unfused" in (kernel, usual) or precision == "fp32"
    if cp > 1 and unfused and kernel not in known:
        kernel = preferred  # attention that writes its scores supports no rings
    blocks = tuple(_block(draw, tp) for _ in range(draw.choice((1, 1, 2))))
    layers = sum(block.number for block in blocks)
    vpp = draw.choice([v for v in (1, 1, 2, 5) if v == 1 or (pp > 1 and pp * v <= layers + 2)])
    micro_batch = draw.choice((1, 2, 5))
    recompute = draw.choice(
        [
            frozenset(),
            "full",
            *(frozenset(m) for m in (["core_attn"], ["mlp", "layernorm"], ["per_op"])),
        ]
    )
    job = Job(
        name="random",
        blocks=blocks,
        vocab=draw.choice((32000, 50257, 50304, 128256, 7)),
        seq=cp * draw.choice((128, 512, 1000, 2048, 8192)),
        micro_batch=micro_batch,
        global_batch=micro_batch * dp * draw.choice((1, 2, 7, 64)),
        tied=draw.random() < 0.3,
        gpus=tp * cp * pp * dp,
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        vpp=vpp,
        sequence_parallel=draw.random() < 0.5,
        zero=draw.choice((0, 1, 2, 3)),
        reshard=draw.random() < 0.7,
        precision=precision,
        recompute=recompute,
        attention_kernel=kernel,
        torch_layers=draw.random() < 0.4,
        fused_rotary=draw.random() < 0.7,
        low_precision_head=draw.random() < 0.3,
        **_context(draw, cp),
        graphs=draw.choice(("none", "none", "partial", "full")),
        overlap_tensor=draw.random() < 0.5,
        overlap_gradients=draw.random() < 0.5,
        gradient_bytes=draw.choice((None, 2.0, 4.0)),
        accumulation_bytes=draw.choice((None, 0.0, 10.0)),
        optimizer_bytes=draw.choice((None, 86.0)),
        row_scales=draw.random() < 0.2,
        frozen=draw.random() < 0.1,
        optimizer=draw.random() < 0.9,
        mtp=draw.choice((0, 0, 0, 1)),
    )
    return replace(
        job,
        blocks=_with_offload(draw, job.blocks),
        state_bytes=draw.choice((12.0, 12.0, 6.0)),
        # a number of replicas that may divide the ranks
        replicas=draw.choice((1, 1, job.dp)) if job.cp > 1 and job.zero else 1,
        optimizer_offload=draw.choice((0.0, 0.0, 0.3, 1.0)),
        offloaded_master=draw.random() < 0.5,
        overlap_offload=draw.random() < 0.5,
        # engines offload only what they shard
        offloaded_weights=job.zero == 3 and draw.random() < 0.5,
    )


def _context(draw: random.Random, cp: int) -> dict[str, Any]:
    """Return the type of context parallelism: rings, heads, both, or all keys and values."""
    if cp == 1 or draw.random() < 0.4:
        return {}
    if draw.random() < 0.4:
        return {"keys_gathered": True}
    rings = draw.choice([1, *(n for n in range(2, cp) if cp % n == 0)])
    return {"heads_exchanged": True, "rings": rings}


def _with_offload(draw: random.Random, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return blocks, some with activation offload of few or many bytes a layer."""
    return tuple(
        replace(block, offloaded_bytes=draw.choice((0.0, 0.0, 1e6, 1e8, 1e9))) for block in blocks
    )


def _block(draw: random.Random, tp: int) -> Block:
    heads, width = draw.choice((8, 24, 64)), draw.choice((64, 84, 128, 192))
    return Block(
        number=draw.choice((8, 9, 13)),
        hidden=1536,
        attention=attention_of(
            heads=heads,
            kv_heads=draw.choice((heads, heads // 8, heads // 2)),
            width=width,
            causal=draw.random() < 0.8,
            rotary_share=float(draw.random() < 0.6),
            head_norms="head" if draw.random() < 0.3 else "none",
        ),
        mlp=Mlp(width=draw.choice((4096, 1365, 6144)), gated=draw.random() < 0.5),
    )


def mixture_case(seed: int) -> tuple[Machine, Job]:
    """Return a job with experts; some seeds add latent attention, windows and mixers."""
    draw = random.Random(seed)
    _, machine, job = dense_case(draw.randrange(10**6))
    ranks = job.tp * job.cp * job.dp
    ep = draw.choice([ep for ep in (1, 2, 3, 4, 6, 8, 16) if ranks % ep == 0])
    experts = Experts(
        number=48,
        per_token=draw.choice((1, 2, 8)),
        width=draw.choice((512, 768)),
        gated=draw.random() < 0.7,
        shared_width=draw.choice((0, 512)),
        latent=draw.choice((None, None, 384)),
        clamped=draw.random() < 0.3,
        groups=(groups := draw.choice((1, 1, 8))),
        groups_per_token=min(groups, 4),
    )
    kinds = [
        Block(number=3, hidden=1536, attention=_block(draw, job.tp).attention, mlp=experts),
        Block(number=2, hidden=1536, attention=_windowed(draw), mlp=experts),
        Block(number=2, hidden=1536, attention=_latent(), mlp=Mlp(width=4096, gated=True)),
        Block(number=1, hidden=1536, recurrent=Mamba(heads=48, width=64, state=128, groups=8)),
        Block(number=1, hidden=1536, mlp=experts),
    ]
    draw.shuffle(kinds)
    mixture = Block(number=8, hidden=1536, attention=_latent(), mlp=experts)
    modules = (["moe"], ["moe_act", "shared_experts"], ["mla_up_proj", "layernorm"], ["core_attn"])
    changed = replace(
        job,
        blocks=_with_offload(draw, (*kinds[: draw.randint(0, 5)], mixture)),
        ep=ep,
        vpp=1,
        recompute=draw.choice(("full", *(frozenset(names) for names in modules))),
        attention_kernel=draw.choice([*machine.kernels.section.attention]),
        dispatcher=draw.choice(("all_to_all", "fused")),
        overlap_experts=draw.random() < 0.5,
        fused_experts=draw.random() < 0.5,
        experts_only=draw.random() < 0.2,
        low_precision_attention=draw.random() < 0.2,
        skew=draw.choice((1.0, 1.5)),
    )
    return machine, changed


def any_case(seed: int) -> tuple[Machine, Job]:
    """Return a dense job for an even seed, and one with experts for an odd one."""
    if seed % 2:
        return mixture_case(seed)
    _, machine, job = dense_case(seed)
    return machine, job


def _windowed(draw: random.Random) -> Attention:
    return attention_of(heads=24, kv_heads=8, width=64, window=draw.choice((128, 1024)))


def _latent() -> Attention:
    latent = LatentAttention(query_rank=768, kv_rank=256, key_width=128, rotary_width=64)
    return attention_of(heads=24, kv_heads=24, width=192, value_width=128, latent=latent)
