"""Random launches that trainers run, for whatever reads, writes or prices launches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

from hypothesis import assume, given, settings, strategies as st

from autopar.errors import InputError
from autopar.pipeline.schedules import SCHEDULES
from autopar.records import replace
from autopar.run.launch import (
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
    TorchTrainer,
    chunks_of_sizes,
    even_chunks,
)
from autopar.run.runtime import BUCKETS, Buckets
from autopar.training.adapters import Adapters
from autopar.training.offload import Offload
from search.engines.huggingface.models import FLAVOURS, flavour

__all__ = ["megatron_launches", "some", "titan_launches", "torch_launches"]

_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


def some(launches: st.SearchStrategy[Launch], number: int) -> list[Launch]:
    """Return so many launches, the same in every run."""
    found: list[Launch] = []

    @settings(max_examples=number, derandomize=True, database=None, deadline=None)
    @given(launches)
    def collect(launch: Launch) -> None:
        found.append(launch)

    collect()
    return found


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
    tp, cp, pp = one(1, 2, 4), one(1, 1, 2, 4), one(1, 2, 4)
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
        and (fp8 is not None or dense_kind != "fp32")
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
    low = fp8 is not None
    fp4 = gpu == "GB200" and not low and dense_kind == "bf16" and yes()
    precision = Precision(
        kind="bf16" if low else dense_kind,
        fp8=low,
        fp8_recipe=fp8 or "delayed",
        fp8_weights=low and optimizer.sharding != "none" and yes(),
        fp4=fp4,
        fp4_weights=fp4 and yes(),
        wide_ends=one((0, 0), (1, 1), (min(2, layers // pp), 0))
        if fp4 or fp8 not in (None, "delayed")
        else (0, 0),
        gradients_bf16=(low or dense_kind == "bf16") and yes(),
        gradients_fp32=not low and dense_kind == "fp16" and yes(),
    )
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
                group=one(0, pp, number) if vpp > 1 else 0,
                **_context(d, tp, cp),
                overlap_experts=overlap,
            ),
            seq=one(1024, 4096),
            steps=one(None, 50, 100_000),
            micro_batch=micro,
            global_batch=micro * number * replicas,
            precision=precision,
            optimizer=_with_states(d, optimizer, precision),
            recompute=recompute,
            offload=_offload(d),
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


def _context(d: _Draw, tp: int, cp: int) -> dict[str, Any]:
    """Return how context ranks exchange."""
    kinds: list[dict[str, Any]] = [{}]
    if cp > 1:
        kinds.append({"keys_gathered": True})
        kinds += [{"heads_exchanged": True}] if tp * cp <= 8 else []
        kinds += [{"heads_exchanged": True, "rings": 2}] if cp == 4 and tp * cp <= 8 else []
    return dict(d.one(*kinds))


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


def _with_states(d: _Draw, optimizer: Optimizer, precision: Precision) -> Optimizer:
    """Return an optimizer whose states are small, or on the host, where they are sharded."""
    if optimizer.sharding != "distributed":
        return optimizer
    moments, offload = d.one(8, 6, 4, 3), d.one(0.0, 0.0, 0.5, 1.0)
    aware = moments != 8 or d.yes()
    # what a bf16 weight has of its fp32 one is not kept twice on the device
    twice = precision.kind != "bf16" or precision.fp8_weights or offload > 0
    return replace(
        optimizer,
        moments_bytes=moments,
        master_bytes=2 if aware and not twice else 4,
        offload=offload,
        # the host's optimizer is of the precision-aware one alone, which takes fp32 weights along
        offload_master=offload > 0,
        overlap_offload=offload > 0 and d.yes(),
    )


def _host_states(d: _Draw, keeper: str, zero: int) -> Optimizer:
    """Return the states of a launch of torch: on the device, or some of them on the host."""
    kind = d.one("adam", "adam8bit")
    if not zero or d.yes():
        return Optimizer(kind=kind)
    weights = keeper == "accelerate" or (zero == 3 and d.yes())
    share = d.one(1.0, 0.5) if zero == 3 and not weights else 1.0
    return Optimizer(kind=kind, offload=share, offload_master=True, offload_weights=weights)


def _offload(d: _Draw) -> Offload:
    modules = frozenset(d.one(("core_attn",), ("core_attn", "attn_proj", "moe_act")))
    return d.one(  # type: ignore[no-any-return]
        Offload(),
        Offload(),
        Offload(modules=modules, fraction=d.one(0.5, 1.0), least_elements=4096),
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
        skew=d.one(None, 1.0),
        capacity=d.one(None, 1.25) if dispatcher != "flex" else None,
        router_fp32=d.yes(),
    )


def _chunks(d: _Draw, layers: int, pp: int, vpp: int, mtp: int) -> tuple[tuple[Chunk, ...], ...]:
    """Return even chunks where there are some, with ends that count or not, or any others."""
    if pp > 1 and d.yes():
        ends = (d.one(0, 1), d.one(0, 1))
        try:
            return even_chunks(layers, pp, vpp, mtp=mtp, ends=ends)
        except InputError:
            pass
    return chunks_of_sizes(_sizes(d, layers, pp * vpp), pp, mtp=mtp)


def _sizes(d: _Draw, layers: int, parts: int) -> list[int]:
    """Return layers of so many parts; a part may have none."""
    cuts = sorted(d.draw(st.lists(st.integers(0, layers), min_size=parts - 1, max_size=parts - 1)))
    return [until - start for start, until in pairwise((0, *cuts, layers))]


@st.composite
def titan_launches(draw: st.DrawFn) -> Launch:
    """Return a launch that torchtitan 0.2 takes: one of its flavours, split and trained."""
    d = _Draw(draw)
    one, yes = d.one, d.yes
    # 0.2 has no Llama 2
    name = one(*(known for known in FLAVOURS if known != "llama2"))
    model = flavour(name, one(*FLAVOURS[name]))
    assert model is not None
    groups = model.attention.groups if model.attention.latent is None else 128
    tp = one(*(n for n in (1, 2, 4) if groups % n == 0 and model.attention.heads % n == 0))
    cp = one(1, 1, 2)
    pp = one(1, 1, 2, 4) if not model.tied and model.num_layers >= 8 else 1
    schedule = one(*SCHEDULES) if pp > 1 else "1f1b"
    facts = SCHEDULES[schedule]
    vpp = one(facts.least_chunks, facts.most_chunks or 3)
    replicas, shard = one(1, 2), one(1, 2, 4)
    if shard * cp == 1 and tp * pp > 1:
        replicas = 1
    sharded = shard * cp > 1
    dp = replicas * shard
    mixed = any(model.expert_layers)
    ep, etp = 1, tp if mixed else 1
    if mixed and yes():
        etp = one(1, tp)
        own = cp if etp == tp else cp * tp
        ep = own * one(*(n for n in (1, 2, 4) if shard % n == 0))
        etp = etp if ep > 1 else tp
    # V-shaped ones want one for each part of the model
    micro, number = one(1, 2), pp * one(2, 4)
    zero = (3 if pp == 1 or yes() else 2) if sharded else 0
    if sharded and pp == 1 and yes():
        zero = 2
    wide = not sharded and tp * pp > 1
    fp8 = one(None, None, "tensorwise", "mxfp8")
    compiled = yes()
    checkpoint = one("none", "op", "layers", "full")
    experts = model.experts
    if ep > 1 and experts is not None:
        model = replace(model, experts=replace(experts, dispatcher=one("alltoall", "flex")))
    try:
        return Launch(
            model=model,
            degrees=Degrees(
                world=dp * tp * cp * pp,
                tp=tp,
                cp=cp,
                pp=pp,
                ep=ep,
                etp=etp,
                sequence_parallel=tp > 1,
                chunks=chunks_of_sizes(
                    _sizes(d, model.num_layers, pp * vpp), pp, schedule=schedule
                ),
                schedule=schedule if pp > 1 else None,
            ),
            seq=one(1024, 4096),
            micro_batch=micro,
            global_batch=micro * number * dp,
            steps=one(None, 1000),
            precision=Precision(
                kind="fp32" if wide else one("bf16", "fp32"),
                fp8=fp8 is not None,
                fp8_recipe=fp8 or "tensorwise",
            ),
            optimizer=replace(
                one(Optimizer(), Optimizer(master_bytes=0, moments_bytes=4)),
                **(
                    {"offload": 1.0, "offload_master": True, "offload_weights": True}
                    if zero and yes()
                    else {}
                ),
            ),
            tensor_overlap=tp > 1 and compiled and yes(),
            software=Software(gpu="B200"),
            trainer=TorchTrainer(
                keeper="torchtitan" if zero else "ddp",
                zero=zero,  # type: ignore[arg-type]
                replicas=replicas if zero else 1,
                each_micro_batch=pp == 1,
                gathered_fp8=fp8 == "tensorwise" and sharded and yes(),
                compiled=compiled,
                checkpoint=checkpoint,
                every=one(1, 2, 3) if checkpoint == "layers" else 1,
                repeated_heads=True,
                loss=one("whole", "compiled"),
                loss_parallel=tp == 1 or yes(),
            ),
        )
    except InputError:
        # experts that do not divide
        assume(False)
        raise


@st.composite
def torch_launches(draw: st.DrawFn, *, keeper: Literal["deepspeed", "accelerate"]) -> Launch:
    """Return a launch of a script of Hugging Face's, sharded by DeepSpeed or by accelerate."""
    d = _Draw(draw)
    one, yes = d.one, d.yes
    tp = one(1, 1, 2)
    cp = one(1, 1, 2) if keeper == "accelerate" else 1
    zero = one(0, 1, 2, 3) if keeper == "deepspeed" else one(0, 2, 3) if cp == 1 else one(2, 3)
    if keeper == "deepspeed" and tp > 1:
        # its tensor groups have no sharded weights beside them
        zero = min(zero, 2)
    # copies of tensor groups are of parts alone
    shard = one(1, 2, 4) if zero or tp == 1 else 1
    split = shard > 1 or tp * cp == 1
    replicas = one(1, 2) if keeper == "accelerate" and zero and split else 1
    dp = replicas * shard
    layers, heads = one(2, 5), one(8, 16)
    qkv_biases = yes()
    kind, number, micro = one("bf16", "fp16", "fp32"), one(1, 3), one(1, 4)
    checkpoint = one("none", "full")
    contiguous = yes()
    buckets = Buckets(
        reduce=one(500_000_000, 1 << 20),
        allgather=one(500_000_000, 1 << 20),
        # of buckets that are no copies there is no second one
        overlap=one(None, *((True,) if contiguous else ())),
        sub_group=one(10**9, 10**8),
        contiguous=contiguous,
        prefetch=one(50_000_000, 12_345),
    )
    return Launch(
        model=Model(
            hidden=one(256, 512),
            ffn=1024,
            attention=Attention(
                heads=heads,
                groups=one(4, heads),
                width=64,
                head_norms=not qkv_biases and yes(),
                dropout=0.0,
            ),
            vocab=one(1000, 32000),
            vocab_divisor=1,
            expert_layers=(False,) * layers,
            gated=True,
            biases=False,
            qkv_biases=qkv_biases,
            tied=yes(),
            norm="rms",
            positions="rotary",
            hidden_dropout=0.0,
        ),
        degrees=Degrees(
            world=dp * tp * cp, tp=tp, cp=cp, chunks=even_chunks(layers, 1), ep=1, etp=1
        ),
        seq=one(1024, 4096),
        micro_batch=micro,
        global_batch=micro * number * dp,
        steps=one(None, 100),
        precision=Precision(kind=kind),
        optimizer=_host_states(d, keeper, zero),
        adapters=one(
            None,
            None,
            Adapters(rank=8, targets=frozenset({"query", "value"}), dropout=0.1),
            Adapters(rank=32, targets=frozenset({"projection", "fc1", "fc2"}), base="nf4"),
        ),
        trainer=TorchTrainer(
            keeper=keeper,
            zero=zero,
            replicas=replicas,
            wide_gradients=one(None, True, *(() if kind == "fp32" else (False,)))
            if keeper == "deepspeed"
            else None,
            each_micro_batch=number == 1 or (keeper == "deepspeed" and zero >= 2),
            buckets=buckets if keeper == "deepspeed" else BUCKETS,
            layers="transformers",
            compiled=yes(),
            checkpoint=checkpoint,
            repeated_heads=yes(),
            loss_parallel=False,
        ),
    )
