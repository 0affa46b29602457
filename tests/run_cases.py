"""Random runs of engines, for tests of code that reads, writes or prices runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple

from hypothesis import assume, given, settings, strategies as st

from autopar.errors import InputError
from autopar.pipeline.schedules import SCHEDULES, schedule_of_chunks
from autopar.rates.devices import default_attention
from autopar.records import replace
from autopar.run.architecture import Experts, LatentAttention
from autopar.run.run import Run
from autopar.run.runtime import (
    BUCKETS,
    ActivationOffload,
    Allocator,
    Buckets,
    ExpertKernels,
    Kernels,
    Optimizer,
    Overlap,
    Precision,
    Quirks,
    Runtime,
    States,
)
from autopar.run.strategy import Chunk, chunks_of_sizes, even_chunks
from autopar.training.adapters import Adapters
from search.engines.huggingface.models import FLAVOURS, flavour
from search.engines.huggingface.named_optimizers import (
    OPTIMIZERS,
    has_narrow_adapters,
    of_flat_tensors,
    of_narrow_weights,
    of_shards,
    updates_shards,
)
from search.engines.space import TORCH_EXPERTS
from search.engines.torchtitan.flavours import linear_modules, targets_of
from tests.runs import decoder, run_of

__all__ = ["megatron_runs", "some", "titan_runs", "torch_runs"]

_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


def some(runs: st.SearchStrategy[Run], number: int) -> list[Run]:
    """Return `number` runs, the same in every test."""
    found: list[Run] = []

    @settings(max_examples=number, derandomize=True, database=None, deadline=None)
    @given(runs)
    def collect(run: Run) -> None:
        found.append(run)

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


class _Recompute(NamedTuple):
    """Arguments of `run_of` for recomputation."""

    recompute: Any = frozenset()
    unit: int = 1
    block: int | None = None

    @property
    def modules(self) -> frozenset[str]:
        return self.recompute if isinstance(self.recompute, frozenset) else frozenset()

    @property
    def whole(self) -> bool:
        return self.recompute == "full" or self.block is not None


class _States(NamedTuple):
    """Sharding and placement of the states of a Megatron-LM run."""

    zero: int
    replicas: int
    gradients: bool
    optimizer: Optimizer
    states: States


@st.composite
def megatron_runs(draw: st.DrawFn) -> Run:
    """Return a run that Megatron-LM accepts: any architecture, split and trained in any way."""
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
        else LatentAttention(query_rank=one(None, 96), kv_rank=64, key_width=16, rotary_width=8)
    )
    fp8 = None if gpu == "A100" else one(None, *_recipes(gpu, recompute))
    dense_kind = one("bf16", "fp16", "fp32")
    kept = _states(d, pp=pp, ranks=replicas * cp)
    ep, etp, sizes, kernels = 1, 1, None, ExpertKernels()
    model_biases, gated = yes(), yes()
    pattern = (False,) * layers
    if mixed:
        ep = one(*(n for n in (1, 2, 4) if (world // pp) % n == 0))
        etps = [n for n in (1, 2) if (world // pp) % (ep * n) == 0]
        etp = 1 if model_biases else one(*etps)
        sizes, kernels = _experts(d, ep, etp, gated=gated, recompute=recompute)
        pattern = one(
            (True,) * layers,
            tuple(n % 2 == 0 for n in range(layers)),
            (False, *(True,) * (layers - 1)),
            # at least one mixture
            (True, *draw(st.lists(st.booleans(), min_size=layers - 1, max_size=layers - 1))),
        )
    modules = recompute.modules
    overlap = (
        mixed
        and ep > 1
        and (pp == 1 or vpp > 1)
        and not recompute.whole
        and "moe" not in modules
        and kernels.dispatcher != "allgather"
        and (fp8 is not None or dense_kind != "fp32")
        and yes()
    )
    scattered = tp > 1 and (mixed or yes())
    fused_gate = yes() if gated else True
    if mixed and gated and not fused_gate:
        kernels = replace(kernels, fused_weighting=False)
    heads = one(8, 24)
    window = one(None, None, 128)
    # MTP modules of Megatron-LM have no learned positions.
    positions = one("rotary", "none") if mtp else one("learned", "rotary", "none")
    micro, number = one(1, 4), one(1, 2, 3, 7) * pp
    low = fp8 is not None
    fp4 = gpu == "GB200" and not low and dense_kind == "bf16" and yes()
    precision = Precision(
        kind="bf16" if low else dense_kind,
        fp8=low,
        fp8_recipe=fp8 or "delayed",
        fp8_weights=low and kept.zero > 0 and yes(),
        fp4=fp4,
        fp4_weights=fp4 and yes(),
        gradients_bf16=(low or dense_kind == "bf16") and yes(),
        gradients_fp32=not low and dense_kind == "fp16" and yes(),
    )
    ends = (0, 0)
    if fp4 or fp8 not in (None, "delayed"):
        ends = one((0, 0), (1, 1), (min(2, layers // pp), 0))
    fused_accumulation = kept.zero != 3 and yes()
    optimizer, host_overlap = _with_states(d, kept, precision)
    modules_offloaded, offload = _offload(d)
    try:
        return run_of(
            decoder(
                layers=layers,
                hidden=one(256, 520, 4096),
                width=one(512, 2048, 16384),
                heads=heads,
                kv_heads=heads if latent is not None else one(8, heads),
                head_width=one(16, 64, 128),
                value_width=None if latent is None else 24,
                head_norms=yes(),
                attention_dropout=one(0.0, 0.1),
                latent=latent,
                window=window,
                whole_every=0 if window is None else one(0, 2, 6),
                vocab=one(1000, 50257, 131072),
                vocab_divisor=one(1, 128, 3232),
                mixtures=pattern,
                experts=sizes,
                gated=gated,
                biases=model_biases,
                qkv_biases=model_biases or yes(),
                tied=yes(),
                norm=one("layer", "rms"),
                positions=positions,
                max_positions=4096 if positions == "learned" else 0,
                rotary_share=one(0.5, 1.0) if positions == "rotary" else 1.0,
                dropout=one(0.0, 0.1),
                mtp=mtp,
            ),
            gpus=world,
            tp=tp,
            sequence_parallel=scattered,
            cp=cp,
            **_context(d, tp, cp),
            ep=ep,
            etp=etp,
            zero=kept.zero,
            replicas=kept.replicas,
            stages=_chunks(d, layers, pp, vpp, mtp),
            group=one(0, pp, number) if vpp > 1 else 0,
            seq_length=one(1024, 4096),
            steps=one(None, 50, 100_000),
            gpu=gpu,
            micro_batch=micro,
            global_batch=micro * number * replicas,
            wide_ends=ends,
            **recompute._asdict(),
            runtime=Runtime(
                engine="megatron",
                precision=precision,
                optimizer=optimizer,
                states=kept.states,
                kernels=Kernels(
                    attention="local" if local else one("fused", "flash", "unfused"),
                    module="megatron" if local else "te",
                    loss=one("none", "native", "te"),
                    fused_gate=fused_gate,
                    fused_rotary=yes() if positions == "rotary" else True,
                    fused_accumulation=fused_accumulation,
                    deferred_head=one(None, None, 0, 2) if pp > 1 and fused_accumulation else None,
                    quirks=Quirks(compiled_experts=mixed and yes()),
                ),
                experts=kernels,
                overlap=Overlap(
                    tensor=scattered and yes(),
                    gradients=kept.gradients,
                    experts=overlap,
                    optimizer_host=host_overlap,
                ),
                offload=offload,
                allocator=Allocator(cublas=one(None, ":4096:8"), expandable=yes()),
                masks=yes(),
            ),
            offload=modules_offloaded,
        )
    except InputError:
        # a batch, or heads, that do not divide
        assume(False)
        raise


def _context(d: _Draw, tp: int, cp: int) -> dict[str, Any]:
    """Return the communication type of context parallelism."""
    kinds: list[dict[str, Any]] = [{}]
    if cp > 1:
        kinds.append({"cp_kind": "all-gather"})
        kinds += [{"cp_kind": "a2a"}] if tp * cp <= 8 else []
        kinds += [{"cp_kind": "a2a", "rings": 2}] if cp == 4 and tp * cp <= 8 else []
    return dict(d.one(*kinds))


def _recompute(d: _Draw, *, mixed: bool) -> _Recompute:
    known = {*_MODULES} - (set() if mixed else {"moe", "moe_act", "shared_experts"})
    modules = d.draw(st.sets(st.sampled_from(sorted(known - {"mla_up_proj"}))))
    return d.one(  # type: ignore[no-any-return]
        _Recompute(),
        _Recompute(frozenset(modules)),
        _Recompute("full", d.one(1, 2)),
        _Recompute(block=d.one(1, 2)),
    )


def _recipes(gpu: str, recompute: _Recompute) -> tuple[str, ...]:
    """Return the fp8 recipes that a device supports and the recomputation allows."""
    found = ["tensorwise", "blockwise"]
    if not recompute.modules & {"moe_act", "layernorm"}:
        found.append("delayed")
    return (*found, "mxfp8") if gpu == "GB200" else tuple(found)


def _states(d: _Draw, *, pp: int, ranks: int) -> _States:
    zero = d.one(0, 1, *((3,) if pp == 1 else ()))
    return _States(
        optimizer=Optimizer(kind=d.one("adam", "adam", "muon") if zero == 0 else "adam"),
        zero=zero,
        replicas=d.one(1, 2) if zero == 1 and ranks % 2 == 0 else 1,
        gradients=d.yes(),
        states=States(
            keeper="megatron-fsdp" if zero == 3 else "megatron",
            bucket=d.one(None, 1 << 20),
            padded_buckets=d.yes(),
        ),
    )


def _with_states(d: _Draw, kept: _States, precision: Precision) -> tuple[Optimizer, bool]:
    """Return an optimizer with small states, or with states on the host if they are sharded.

    The second value is True if copies overlap with updates of the host.
    """
    if kept.zero != 1:
        return kept.optimizer, False
    moments, offload = d.one(8, 6, 4, 3), d.one(0.0, 0.0, 0.5, 1.0)
    aware = moments != 8 or d.yes()
    # the fp32 weight is not stored in addition to the bf16 one on the device
    twice = precision.kind != "bf16" or precision.fp8_weights or offload > 0
    optimizer = replace(
        kept.optimizer,
        moments_bytes=moments,
        master_bytes=2 if aware and not twice else 4,
        offload=offload,
        # only the precision-aware optimizer runs on the host, and it includes fp32 weights
        offload_master=offload > 0,
    )
    return optimizer, offload > 0 and d.yes()


def _host_states(d: _Draw, keeper: str, zero: int, tp: int) -> Optimizer:
    """Return the optimizer of a torch run: states on the device, or some of them on the host."""
    # Megatron-Core alone has Adam with moments of 16 bits
    named = d.one(*(one.optimizer for name, one in OPTIMIZERS.items() if name != "adam-bf16"))
    if keeper == "deepspeed":
        named = of_flat_tensors(named)
    elif zero or tp > 1:
        named = of_shards(named)
        named = named if updates_shards(named) else Optimizer()
    adam: Any = "deepspeed" if keeper == "deepspeed" else "torch"
    if not zero or named.kind not in ("adam", "adam8bit") or named.paged or d.yes():
        return replace(named, host_adam=adam)
    weights = keeper == "accelerate" or (zero == 3 and d.yes())
    share = d.one(1.0, 0.5) if zero == 3 and not weights else 1.0
    return replace(
        named, offload=share, offload_master=True, offload_weights=weights, host_adam=adam
    )


def _offload(d: _Draw) -> tuple[frozenset[str], ActivationOffload]:
    modules = frozenset(d.one(("core_attn",), ("core_attn", "attn_proj", "moe_act")))
    return d.one(  # type: ignore[no-any-return]
        (frozenset(), ActivationOffload()),
        (frozenset(), ActivationOffload()),
        (modules, ActivationOffload(fraction=d.one(0.5, 1.0), least_elements=4096)),
    )


def _experts(
    d: _Draw, ep: int, etp: int, *, gated: bool, recompute: _Recompute
) -> tuple[Experts, ExpertKernels]:
    drawn = d.one("allgather", "alltoall", "flex")
    # The flex dispatcher of Megatron-LM needs more than one expert rank.
    dispatcher = "alltoall" if drawn == "flex" and ep * etp == 1 else drawn
    sizes = Experts(
        number=ep * d.one(2, 3),
        per_token=d.one(1, 2),
        width=d.one(128, 1000, 4096),
        shared_width=d.one(0, 512),
    )
    kernels = ExpertKernels(
        dispatcher=dispatcher,
        grouped="moe_act" in recompute.modules or d.yes(),
        fused_permutation=d.yes(),
        fused_weighting=gated or d.yes(),
        fused_mlp=d.one(False, False, True),
        skew=d.one(None, 1.0),
        capacity=d.one(None, 1.25) if drawn != "flex" else None,
        router_fp32=d.yes(),
    )
    return sizes, kernels


def _chunks(d: _Draw, layers: int, pp: int, vpp: int, mtp: int) -> tuple[tuple[Chunk, ...], ...]:
    """Return even chunks if possible, with ends that count or not, or any others."""
    if pp > 1 and d.yes():
        ends = (d.one(0, 1), d.one(0, 1))
        try:
            return even_chunks(layers, pp, vpp, mtp=mtp, ends=ends)
        except InputError:
            pass
    return chunks_of_sizes(_sizes(d, layers, pp * vpp), pp, mtp=mtp)


def _sizes(d: _Draw, layers: int, parts: int) -> list[int]:
    """Return the number of layers of each part; a part may have none."""
    cuts = sorted(d.draw(st.lists(st.integers(0, layers), min_size=parts - 1, max_size=parts - 1)))
    return [until - start for start, until in pairwise((0, *cuts, layers))]


@st.composite
def titan_runs(draw: st.DrawFn, *, recipe: bool = False) -> Run:
    """Return a run that torchtitan 0.2 accepts: one of its flavours, split and trained.

    recipe : True for a run that 0.3 accepts.
    """
    d = _Draw(draw)
    one, yes = d.one, d.yes
    # neither has Llama 2
    other = {"llama2", "llama4" if recipe else "gpt_oss"}
    name = one(*(known for known in FLAVOURS if known not in other))
    size = one(*(known for known in FLAVOURS[name] if recipe or known not in ("1B", "3B")))
    model = flavour(name, size)
    assert model is not None
    attention = model.attention
    groups = attention.kv_heads if attention.latent is None else 128
    tp = one(*(n for n in (1, 2, 4) if groups % n == 0 and attention.heads % n == 0))
    cp = one(1, 1, 2)
    pp = one(1, 1, 2, 4) if not model.tied and model.num_layers >= 8 else 1
    schedule = one(*SCHEDULES) if pp > 1 else "1f1b"
    facts = SCHEDULES[schedule]
    vpp = one(facts.least_chunks, facts.most_chunks or 3)
    replicas, shard = one(1, 2), one(1, 2, 4)
    if shard * cp == 1 and tp * pp > 1 and not recipe:
        replicas = 1
    # 0.3 has FSDP2 without shards, too
    sharded = shard * cp > 1 or recipe
    dp = replicas * shard
    mixed = model.experts is not None
    ep, etp = 1, tp if mixed else 1
    if mixed and yes():
        etp = 1 if recipe else one(1, tp)
        own = cp if etp == tp else cp * tp
        ep = own * one(*(n for n in (1, 2, 4) if shard % n == 0))
        etp = etp if ep > 1 else tp
    # V-shaped schedules need one for each part of the model
    micro, number = one(1, 2), pp * one(2, 4)
    zero = (3 if pp == 1 or yes() else 2) if sharded else 0
    if sharded and pp == 1 and yes():
        zero = 2
    wide = not sharded and tp * pp > 1
    fp8 = one(None, None, "tensorwise", "mxfp8")
    compiled = yes()
    checkpoint = one("none", "op", "layers", "full")
    if recipe and checkpoint == "layers":
        checkpoint = "op"
    adapters = None
    if recipe and attention.latent is None and yes():
        own_targets = targets_of(linear_modules(model))
        attention_only = own_targets - {"fc1", "fc2"}
        adapters = Adapters(rank=one(8, 16), targets=one(own_targets, attention_only), fused="qkv")
    loss = one("whole", "compiled", *(("chunked",) if recipe else ()))
    every = one(1, 2, 3) if checkpoint == "layers" else None
    experts = TORCH_EXPERTS if mixed else ExpertKernels()
    if ep > 1 and mixed:
        experts = replace(experts, dispatcher=one("alltoall", "flex"))
    host = {"offload": 1.0, "offload_master": True, "offload_weights": True}
    try:
        return run_of(
            model,
            gpus=dp * tp * cp * pp,
            tp=tp,
            sequence_parallel=tp > 1,
            cp=cp,
            ep=ep,
            etp=etp,
            zero=zero,
            replicas=replicas if zero else 1,
            stages=chunks_of_sizes(_sizes(d, model.num_layers, pp * vpp), pp, schedule=schedule),
            schedule=schedule if pp > 1 else schedule_of_chunks(vpp),
            seq_length=one(1024, 4096),
            gpu="B200",
            micro_batch=micro,
            global_batch=micro * number * dp,
            steps=one(None, 1000),
            recompute={"op": "op", "full": "full"}.get(checkpoint, frozenset()),
            every=every,
            runtime=Runtime(
                engine="torchtitan",
                precision=Precision(
                    kind="fp32" if wide else one("bf16", "fp32"),
                    fp8=fp8 is not None,
                    fp8_recipe=fp8 or "tensorwise",
                    row_scales=recipe and fp8 == "tensorwise",
                ),
                optimizer=replace(
                    Optimizer(master_bytes=0, moments_bytes=4)
                    if adapters is not None or yes()
                    else Optimizer(),
                    **(host if zero and yes() else {}),
                ),
                adapters=adapters,
                states=States(
                    keeper="torchtitan" if zero else "ddp",
                    each_micro_batch=pp == 1,
                    gathered_fp8=fp8 == "tensorwise" and sharded and not recipe and yes(),
                ),
                kernels=Kernels(
                    attention=default_attention("A100"),
                    module="torchtitan",
                    compiled=compiled,
                    repeated_heads=True,
                    loss=loss,
                    loss_chunks=one(4, 8) if loss == "chunked" else 1,
                    loss_parallel=tp == 1 or recipe or yes(),
                ),
                experts=experts,
                overlap=Overlap(tensor=tp > 1 and compiled and yes(), gradients=True),
            ),
        )
    except InputError:
        # experts that do not divide
        assume(False)
        raise


@st.composite
def torch_runs(
    draw: st.DrawFn, *, keeper: Literal["deepspeed", "accelerate"], trl: bool = False
) -> Run:
    """Return a run of a script of Hugging Face's, sharded by DeepSpeed or by accelerate.

    trl : True for TRL's own script, which has no tensor ranks.
    """
    d = _Draw(draw)
    one, yes = d.one, d.yes
    tp = one(1, 1, 2) if not trl else 1
    cp = one(1, 1, 2) if keeper == "accelerate" else 1
    zero = one(0, 1, 2, 3) if keeper == "deepspeed" else one(0, 2, 3) if cp == 1 else one(2, 3)
    if keeper == "deepspeed" and tp > 1:
        # its tensor groups support no sharded weights
        zero = min(zero, 2)
    # replicas of tensor groups contain only parts
    shard = one(1, 2, 4) if zero or tp == 1 else 1
    split = shard > 1 or tp * cp == 1
    replicas = one(1, 2) if keeper == "accelerate" and zero and split else 1
    dp = replicas * shard
    layers, heads = one(2, 5), one(8, 16)
    qkv_biases = yes()
    kind = one("bf16", "fp16", *(() if trl else ("fp32",)))
    number, micro = one(1, 3), one(1, 4)
    checkpoint = one("none", "full")
    contiguous = yes()
    buckets = Buckets(
        reduce=one(500_000_000, 1 << 20),
        allgather=one(500_000_000, 1 << 20),
        # without contiguous buckets there is no second one to overlap
        overlap=one(None, *((True,) if contiguous else ())),
        sub_group=one(10**9, 10**8),
        contiguous=contiguous,
        prefetch=one(50_000_000, 12_345),
        model_persistent=one(None, 2_000),
    )
    adapters = one(
        None,
        None,
        Adapters(rank=8, targets=frozenset({"query", "value"}), dropout=0.1),
        Adapters(
            rank=32,
            targets=frozenset({"projection", "fc1", "fc2"}),
            # tensor ranks split no quantised weights; adapters on them have 16 bits
            base="nf4" if tp == 1 and (keeper, kind) != ("accelerate", "fp32") else "16 bits",
        ),
    )
    if keeper == "deepspeed" and tp > 1:
        adapters = None  # AutoTP splits no adapters
    optimizer = _host_states(d, keeper, zero, tp)
    pure = adapters is None and kind == "bf16" and yes()
    if keeper == "accelerate" and (pure or has_narrow_adapters(adapters)):
        optimizer = of_narrow_weights(optimizer)
    return run_of(
        decoder(
            layers=layers,
            hidden=one(256, 512),
            width=1024,
            heads=heads,
            kv_heads=one(4, heads),
            head_width=64,
            head_norms=not qkv_biases and yes(),
            attention_dropout=0.0,
            vocab=one(1000, 32000),
            vocab_divisor=1,
            gated=True,
            biases=False,
            qkv_biases=qkv_biases,
            tied=yes(),
            norm="rms",
            positions="rotary",
            dropout=0.0,
        ),
        gpus=dp * tp * cp,
        tp=tp,
        cp=cp,
        zero=zero,
        replicas=replicas,
        seq_length=one(1024, 4096),
        micro_batch=micro,
        global_batch=micro * number * dp,
        steps=one(None, 100),
        recompute="full" if checkpoint == "full" else frozenset(),
        runtime=Runtime(
            engine=keeper,
            precision=Precision(kind=kind),
            optimizer=optimizer,
            adapters=adapters,
            states=States(
                keeper=keeper,
                wide_gradients=one(None, True, *(() if kind == "fp32" else (False,)))
                if keeper == "deepspeed"
                else None,
                each_micro_batch=number == 1
                or (zero >= 2 if keeper == "deepspeed" else zero >= 2 and yes()),
                buckets=buckets if keeper == "deepspeed" else BUCKETS,
            ),
            kernels=Kernels(
                attention="flash",
                module="transformers",
                compiled=yes(),
                repeated_heads=yes() or (trl and cp > 1),
                loss="trl" if trl else "whole",
                loss_parallel=False,
            ),
            overlap=Overlap(gradients=True),
        ),
    )
