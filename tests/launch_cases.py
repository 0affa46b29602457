"""Random launches that trainers run, for whatever reads, writes or prices launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import assume, strategies as st

from autopar.errors import InputError
from autopar.memory.launch import (
    Attention,
    Chunk,
    Degrees,
    Experts,
    Latent,
    Launch,
    Model,
    Optimizer,
    Precision,
    Recompute,
    Software,
    chunks_of_sizes,
    even_chunks,
)

__all__ = ["megatron_launches"]

_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


class _Draw:
    """Draws of one example."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def one(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def yes(self) -> bool:
        return bool(self.draw(st.booleans()))


@st.composite
def megatron_launches(draw: st.DrawFn) -> Launch:
    """Return a launch that Megatron-LM takes: any architecture, split and trained in any way."""
    d = _Draw(draw)
    one, yes = d.one, d.yes
    gpu = one("A100", "H100", "GB200")
    tp, cp, pp = one(1, 2, 4), one(1, 1, 2), one(1, 2, 4)
    local = cp == 1 and one(True, False, False)
    replicas = one(1, 2, 4)
    world = tp * cp * pp * replicas
    vpp = one(1, 1, 2, 3) if pp > 1 else 1
    layers = draw(st.integers(pp * vpp, 4 * pp * vpp))
    mtp = one(0, 0, 1)
    mixed = yes()
    recompute = _recompute(d, mixed=mixed)
    latent = (
        None
        if yes()
        else Latent(
            query_rank=one(None, 96),
            key_value_rank=64,
            key_width=16,
            rotary_width=8,
            value_width=24,
        )
    )
    fp8 = None if gpu == "A100" else one(None, *_recipes(gpu, recompute))
    dense_kind = one("bf16", "fp16", "fp32")
    optimizer = _optimizer(d, pp=pp, ranks=replicas * cp)
    ep, etp, experts = 1, 1, None
    model_biases, gated = yes(), yes()
    if mixed:
        ep = one(*(n for n in (1, 2, 4) if (world // pp) % n == 0))
        etps = [n for n in (1, 2) if (world // pp) % (ep * n) == 0]
        etp = 1 if model_biases else one(*etps)
        experts = _experts(d, ep, gated=gated, recompute=recompute)
    modules = recompute.modules
    overlap = (
        mixed
        and ep > 1
        and (pp == 1 or vpp > 1)
        and recompute.layers == "none"
        and "moe" not in modules
        and experts is not None
        and experts.dispatcher != "allgather"
        and yes()
    )
    scattered = tp > 1 and (mixed or yes())
    fused_gate = yes() if gated else True
    if experts is not None and gated and not fused_gate:
        experts = replace(experts, fused_weighting=False)
    pattern = (False,) * layers
    if mixed:
        pattern = one(
            (True,) * layers,
            tuple(n % 2 == 0 for n in range(layers)),
            (False, *(True,) * (layers - 1)),
            tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers))),
        )
    heads = one(8, 24)
    window = one(None, None, 128)
    rotary = one("learned", "rotary", "none")
    micro, number = one(1, 4), one(1, 2, 3, 7) * pp
    fused_accumulation = optimizer.sharding != "fsdp" and yes()
    try:
        return Launch(
            model=Model(
                hidden=one(256, 520, 4096),
                ffn=one(512, 2048, 16384),
                attention=Attention(
                    heads=heads,
                    groups=heads if latent is not None else one(8, heads),
                    width=one(16, 64, 128),
                    head_norms=yes(),
                    dropout=one(0.0, 0.1),
                    latent=latent,
                    window=window,
                    whole_every=0 if window is None else one(0, 2, 6),
                ),
                vocab=one(1000, 50257, 131072),
                vocab_divisor=one(1, 128, 3232),
                expert_layers=pattern,
                experts=experts,
                gated=gated,
                fused_gate=fused_gate,
                biases=model_biases,
                qkv_biases=model_biases or yes(),
                tied=yes(),
                norm=one("layer", "rms"),
                positions=rotary,
                max_positions=4096 if rotary == "learned" else 0,
                rotary_share=one(0.5, 1.0) if rotary == "rotary" else 1.0,
                fused_rotary=yes() if rotary == "rotary" else True,
                hidden_dropout=one(0.0, 0.1),
                mtp=mtp,
            ),
            degrees=Degrees(
                world=world,
                tp=tp,
                cp=cp,
                pp=pp,
                ep=ep,
                etp=etp,
                sequence_parallel=scattered,
                chunks=_chunks(d, layers, pp, vpp, mtp),
                group=one(0, pp) if vpp > 1 else 0,
                heads_exchanged=cp > 1 and tp * cp <= 8 and yes(),
                overlap_experts=overlap,
            ),
            seq=one(1024, 4096),
            steps=one(None, 50, 100_000),
            micro_batch=micro,
            global_batch=micro * number * replicas,
            precision=Precision(
                kind="bf16" if fp8 is not None else dense_kind,
                fp8=fp8 is not None,
                fp8_recipe=fp8 or "delayed",
                fp8_weights=fp8 is not None and optimizer.sharding != "none" and yes(),
                gradients_bf16=(fp8 is not None or dense_kind == "bf16") and yes(),
                gradients_fp32=fp8 is None and dense_kind == "fp16" and yes(),
            ),
            optimizer=optimizer,
            recompute=recompute,
            software=Software(
                gpu=gpu,
                attention="local" if local else one("fused", "flash", "unfused"),
                local_layers=local,
                cublas_config=one(None, ":4096:8"),
                expandable_segments=yes(),
                fused_accumulation=fused_accumulation,
                compiled_experts=mixed and yes(),
            ),
            loss_fusion=one("none", "native", "te"),
            attention_masks=yes(),
            tensor_overlap=scattered and yes(),
            deferred_head=one(None, None, 0, 2) if pp > 1 and fused_accumulation else None,
        )
    except InputError:
        # a batch, or heads, that do not divide
        assume(False)
        raise


def _recompute(d: _Draw, *, mixed: bool) -> Recompute:
    known = {*_MODULES} - (set() if mixed else {"moe", "moe_act", "shared_experts"})
    modules = d.draw(st.sets(st.sampled_from(sorted(known - {"mla_up_proj"}))))
    return d.one(  # type: ignore[no-any-return]
        Recompute(),
        Recompute(modules=frozenset(modules)),
        Recompute(layers="uniform", number=d.one(1, 2)),
        Recompute(layers="block", number=d.one(1, 2)),
    )


def _recipes(gpu: str, recompute: Recompute) -> tuple[str, ...]:
    """Return the recipes of 8 bits that a device has and what is computed again allows."""
    found = ["tensorwise", "blockwise"]
    if not recompute.modules & {"moe_act", "layernorm"}:
        found.append("delayed")
    return (*found, "mxfp8") if gpu == "GB200" else tuple(found)


def _optimizer(d: _Draw, *, pp: int, ranks: int) -> Optimizer:
    sharding = d.one("none", "distributed", *(("fsdp",) if pp == 1 else ()))
    return Optimizer(
        kind=d.one("adam", "adam", "muon") if sharding == "none" else "adam",
        sharding=sharding,
        instances=d.one(1, 2) if sharding == "distributed" and ranks % 2 == 0 else 1,
        overlap_gradients=d.yes(),
        bucket=d.one(None, 1 << 20),
        padded_buckets=d.yes(),
    )


def _experts(d: _Draw, ep: int, *, gated: bool, recompute: Recompute) -> Experts:
    dispatcher = d.one("allgather", "alltoall", "flex")
    return Experts(
        number=ep * d.one(2, 3),
        per_token=d.one(1, 2),
        ffn=d.one(128, 1000, 4096),
        shared_ffn=d.one(0, 512),
        dispatcher=dispatcher,
        grouped="moe_act" in recompute.modules or d.yes(),
        fused_permutation=d.yes(),
        fused_weighting=gated or d.yes(),
        fused_mlp=d.one(False, False, True),
        skew=d.one(None, 1.0, *((1.3,) if dispatcher != "flex" else ())),
    )


def _chunks(d: _Draw, layers: int, pp: int, vpp: int, mtp: int) -> tuple[tuple[Chunk, ...], ...]:
    """Return even chunks where there are some, with ends that count or not, or any others."""
    if pp > 1 and d.yes():
        ends = (d.one(0, 1), d.one(0, 1))
        try:
            return even_chunks(layers, pp, vpp, mtp=mtp, ends=ends)
        except InputError:
            pass
    sizes = [0] * (pp * vpp)
    for _ in range(layers):
        sizes[d.draw(st.integers(0, pp * vpp - 1))] += 1
    return chunks_of_sizes(sizes, pp, mtp=mtp)
