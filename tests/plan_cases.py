"""Plans of small models that real processes run, by the number of ranks and by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.records import replace
from autopar.run.model import LatentSpec, LayerSpec, ModelSpec
from autopar.run.plan import LayerStrategy, PipelineType, Plan, VocabStrategy
from profiler.plan.job import PlanJob


def _model(name: str, **changes: Any) -> ModelSpec:
    outer = {
        "vocab_size": 250,  # padded differently by vocabulary degrees
        "make_vocab_size_divisible_by": 16,
        **{
            key: changes.pop(key)
            for key in ("tied_embeddings", "learned_positions", *_EXTRA)
            if key in changes
        },
    }
    shape = {
        "num_layers": 4,
        "seq_length": 16,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 48,
        "gated_mlp": True,
        **changes,
    }
    return ModelSpec(name=name, layers=(LayerSpec(**shape),), **outer)


_EXTRA = ("extra_embedding_parameters", "extra_head_parameters")
LLAMA = _model("llama-like")
"""Two key-value heads, which four tensor ranks share."""
MQA = _model("mqa", num_kv_heads=1, qkv_biases=True)
TIED = _model("tied", tied_embeddings=True)
GPT = _model(
    "gpt-like",
    num_kv_heads=4,
    gated_mlp=False,
    biases=True,
    norm_parameters_per_hidden=4,
    learned_positions=24,
    extra_embedding_parameters=7,
    extra_head_parameters=5,
)
MOE = _model("moe", num_experts=4, experts_per_token=2, ffn_hidden_size=24)

SHARED = _model(
    "shared",
    num_experts=4,
    experts_per_token=2,
    ffn_hidden_size=24,
    shared_expert_width=16,
    shared_expert_gate=True,
    router_biases=True,
)
"""A mixture of experts with a shared MLP."""

LATENT = _model(
    "latent",
    num_kv_heads=None,
    qk_norms=True,
    latent=LatentSpec(query_rank=12, key_value_rank=8, key_width=8, rotary_width=4, value_width=6),
)
NORMED = _model(
    "normed",
    qk_norms=True,
    window=5,
    attention_sinks=True,
    num_norms=4,
    norm_parameters_per_hidden=4,
)
"""Norms of heads and after attention and MLP, with a window and sinks."""

_ENCODER = LayerSpec(
    num_layers=2,
    seq_length=16,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    ffn_hidden_size=48,
    causal=False,
)
T5 = ModelSpec(
    name="t5-like",
    layers=(
        _ENCODER,
        replace(
            _ENCODER,
            seq_length=8,
            causal=True,
            cross_attention=True,
            norm_parameters_per_hidden=3,
        ),
    ),
    vocab_size=250,
    make_vocab_size_divisible_by=16,
    tied_embeddings=True,
    extra_embedding_parameters=6,
)
"""An encoder of 16 tokens and a decoder of 8, which reads it."""


def _like_t5(**changes: Any) -> ModelSpec:
    return replace(T5, layers=tuple(replace(layer, **changes) for layer in T5.layers))


STRATEGY: dict[str, Any] = {
    "pp_deg": 2,
    "tp_sizes_enc": "2,1,2,1",
    "tp_consecutive_flags": "1,1,1,1",
    "dp_types_enc": "0,1,1,0",
    "use_sp": "0,0,1,0",
    "checkpoint": "0,1,0,0",
    "world_size": 4,
    "global_bsz": 8,
    "chunks": 2,
    "pp_division": "1,3",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
    "vtp": 2,
    "vsp": 0,
    "embed_sdp": 0,
}
"""A file with a plan of four layers on four ranks."""

_L, _V = LayerStrategy, VocabStrategy
_ONE, _TP2, _TP4 = _L(), _L(tp=2), _L(tp=4)
_ULYSSES = _L(tp=2, ulysses=True)


_SCHEDULES: dict[tuple[bool, bool], PipelineType] = {
    (False, False): "1f1b",
    (False, True): "gpipe",
    (True, False): "interleaved",
    (True, True): "looped_bfs",
}
"""Shape by (True if stages have several chunks, True if all forwards come first)."""


def make_job(
    world: int,
    *layers: LayerStrategy,
    stages: Sequence[int] = (4,),
    m: int = 2,
    batch: int = 8,
    vocab: VocabStrategy = _V(),
    gpipe: bool = False,
    zero1: bool = False,
    zero2: bool = False,
    model: ModelSpec = LLAMA,
    v: int = 1,
    chunks: Sequence[int] = (),
    **others: Any,
) -> PlanJob:
    """Return a plan with its model; `layers`: one strategy for all layers, or one for each."""
    strategies = layers * sum(stages) if len(layers) == 1 else layers
    plan = Plan(
        world_size=world,
        num_stages=len(stages),
        stage_sizes=tuple(stages),
        layers=strategies,
        vocab=vocab,
        global_batch=batch,
        num_microbatches=m,
        pipeline_type=_SCHEDULES[v > 1, gpipe],
        default_dp_type="zero2" if zero2 else "zero1" if zero1 else "ddp",
        num_chunks=v,
        chunk_sizes=tuple(chunks),
    )
    return PlanJob(plan=plan, spec=model, **others)


def jobs(world: int) -> dict[str, PlanJob]:
    """Return the plans of `world` ranks that are always run."""
    return {2: _two, 4: _four}[world]()


def folded_jobs(world: int) -> dict[str, PlanJob]:
    """Return plans of `world` ranks with divided experts and sequences, chunks, recomputation."""
    zero3 = _L(zero3=True)
    sent: dict[str, Any] = {"model": MOE, "routing": "top_k"}
    twice: dict[str, Any] = {"stages": (2, 2), "v": 2, "m": 4}
    biased = replace(SHARED, layers=(replace(SHARED.layers[0], biases=True, qk_norms=True),))
    # one norm, or four, and norms of heads, in attention that context ranks divide
    lone, normed = (
        _model("norms", num_norms=n, norm_parameters_per_hidden=n, qk_norms=n > 1) for n in (1, 4)
    )
    if world == 2:
        return {
            "cp2": make_job(2, _L(cp=2), vocab=_V(cp=2)),
            "cp2-gathered-zero3": make_job(
                2, _L(cp=2, zero3=True), vocab=_V(cp=2, zero3=True), model=GPT,
                context_exchange="all_gather",
            ),
            "cp2-beside-tp2": make_job(
                2, _L(cp=2), _TP2, _L(cp=2, checkpoint=True), _ONE, vocab=_V(tp=2)
            ),
            "ep2": make_job(2, _L(ep=2), **sent),
            "ep2-over-tp2": make_job(2, _L(tp=2, ep=2), _L(tp=2, etp=1), _TP2, _ONE, **sent),
            "ep2-evenly": make_job(2, _L(ep=2), _L(tp=2, ep=2), _L(cp=2, ep=2), _ONE, model=MOE),
            "breadth-first": make_job(2, _L(zero3=True), gpipe=True, **twice),
            "shared-experts": make_job(
                2, _L(ep=2, recompute=("shared_experts",)), _L(tp=2, ep=2), _TP2, zero3,
                model=SHARED, routing="top_k",
            ),
            "latent": make_job(
                2, _TP2, _ULYSSES, _L(zero3=True, recompute=("core_attn", "layernorm", "mlp")),
                _L(tp=2, checkpoint=True), vocab=_V(tp=2), model=LATENT,
            ),
            "latent-again": make_job(
                2, _L(tp=2, recompute=("mla_up_proj",)),
                _L(tp=2, ulysses=True, recompute=("mla_up_proj",)),
                _L(zero3=True, recompute=("layernorm", "mla_up_proj")),
                _L(tp=2, recompute=("core_attn", "mla_up_proj")), model=LATENT,
            ),
            "latent-no-sp": make_job(2, _TP2, model=LATENT, sequence_parallel=False),
            "normed": make_job(
                2, _TP2, _ULYSSES, _L(zero3=True), _L(tp=2, recompute=("core_attn", "layernorm")),
                model=NORMED,
            ),
            "normed-no-sp": make_job(2, _TP2, model=NORMED, sequence_parallel=False),
            "normed-cp2": make_job(
                2, _L(cp=2), _TP2, _L(cp=2, recompute=("layernorm", "mlp")),
                _L(cp=2, recompute=("mlp",)), vocab=_V(cp=2), model=normed,
            ),
            "one-norm": make_job(
                2, _L(recompute=("layernorm",)), _L(cp=2, recompute=("mlp",)),
                _L(tp=2, recompute=("layernorm", "mlp")), _TP2, model=lone,
            ),
            "biased-experts": make_job(
                2, _L(ep=2, zero3=True), _L(tp=2, ep=2, recompute=("moe_act",)), _TP2, _L(cp=2),
                model=biased, routing="top_k",
            ),
            "biased-experts-evenly": make_job(
                2, _L(ep=2), _L(tp=2, ep=2), _TP2, _L(zero3=True, recompute=("moe",)), model=biased,
            ),
            "biased-experts-no-sp": make_job(
                2, _TP2, model=biased, routing="top_k", sequence_parallel=False
            ),
            "interleaved": make_job(2, _L(recompute=("core_attn",)), model=TIED, **twice),
            "interleaved-uneven": make_job(2, _ONE, stages=(1, 3), v=2, m=2, chunks=(1, 2, 0, 1)),
            "recomputed": make_job(
                2, _L(recompute=("core_attn", "layernorm", "mlp")), _L(tp=2, recompute=("mlp",)),
                _L(zero3=True, recompute=("layernorm",)), _L(recompute=("core_attn",)),
            ),
            "recomputed-experts": make_job(
                2, _L(ep=2, recompute=("layernorm", "moe_act")), _L(ep=2, recompute=("moe",)),
                _L(tp=2, recompute=("moe_act",)), _L(zero3=True, recompute=("layernorm", "moe")),
                **sent,
            ),
        }  # fmt: skip
    ring = _L(tp=2, cp=2)
    return {
        "cp2-tp2": make_job(4, ring, vocab=_V(tp=2, cp=2), model=MQA),
        "cp4": make_job(4, _L(cp=4), vocab=_V(cp=4), model=_model("long", seq_length=32)),
        "ring-of-ulysses": make_job(
            4, _L(tp=2, ulysses=True, cp=2), vocab=_V(tp=2, ulysses=True, cp=2)
        ),
        "cp2-strided-and-data": make_job(
            4, _L(cp=2), _L(tp=2, cp=2, strided=True), _TP4, _L(cp=2, zero3=True), vocab=_V(tp=2),
            zero2=True,
        ),
        "ep4": make_job(4, _L(ep=4), **sent),
        "ep2-zero3": make_job(
            4, _L(ep=2, zero3=True), zero3, _L(ep=4), _L(ep=2), zero2=True, **sent
        ),
        "ep4-over-tp2-cp2": make_job(4, _L(tp=2, cp=2, ep=4), vocab=_V(tp=2, cp=2), **sent),
        "interleaved-tp2": make_job(4, _TP2, vocab=_V(tp=2), **twice),
        "interleaved-zero3": make_job(4, zero3, vocab=_V(zero3=True), **twice),
        "interleaved-ep2": make_job(
            4, _L(ep=2, recompute=("moe_act",)), _ONE, _L(tp=2, ep=2), _L(ep=2, recompute=("moe",)),
            **twice, **sent,
        ),
    }  # fmt: skip


def short_jobs() -> dict[str, PlanJob]:
    """Return plans of two ranks and two layers."""
    short = _model("short", num_layers=2)
    return {
        "mixed": make_job(2, _ULYSSES, _L(zero3=True), stages=(2,), model=short),
        "pp2": make_job(2, _ONE, stages=(1, 1), model=short),
    }


def slow_jobs(world: int) -> dict[str, PlanJob]:
    """Return the slow plans: with other numbers of ranks, and in bf16."""
    return {2: _two_more, 3: _three, 4: _four_more, 6: _six}[world]()


def _two() -> dict[str, PlanJob]:
    zero3 = _L(zero3=True)
    return {
        "ddp": make_job(2, _ONE),
        "zero2": make_job(2, _ONE, zero2=True),
        "zero2-gpipe": make_job(2, _ONE, zero2=True, gpipe=True, m=4),
        "zero1": make_job(2, _ONE, zero1=True),
        "zero1-eager-reduce": make_job(2, _ONE, zero1=True, m=4, async_grad_reduce=False),
        "bf16-zero1": make_job(2, _ONE, zero3, _ONE, _ONE, zero1=True, precision="bf16"),
        "zero3": make_job(2, zero3),
        "zero3-eager-reduce": make_job(2, zero3, m=4, async_grad_reduce=False),
        "zero3-beside-ddp": make_job(2, zero3, _ONE, zero3, _ONE, model=GPT),
        "vocab-zero3": make_job(2, _ONE, vocab=_V(zero3=True)),
        "tp2": make_job(2, _TP2, vocab=_V(tp=2)),
        "tp2-gpt": make_job(2, _TP2, vocab=_V(tp=2), model=GPT),
        "tp2-mqa-no-sp": make_job(2, _TP2, model=MQA, sequence_parallel=False),
        "tp2-experts": make_job(2, _TP2, model=MOE),
        "ddp-vocab-tp2": make_job(2, _ONE, vocab=_V(tp=2), model=TIED),
        "vocab-ulysses": make_job(2, _ONE, vocab=_V(tp=2, ulysses=True), model=GPT),
        "ulysses": make_job(2, _ULYSSES, vocab=_V(tp=2), model=MQA),
        "ulysses-beside-tp": make_job(
            2, _ULYSSES, _TP2, _ONE, _L(tp=2, ulysses=True, zero3=True, checkpoint=True)
        ),
        "pp2-gpipe-uneven": make_job(2, _L(checkpoint=True), stages=(3, 1), gpipe=True, m=4),
        "pp2-1f1b-uneven": make_job(2, _ONE, stages=(1, 3), m=4),
        "pp2-tied": make_job(2, _ONE, stages=(2, 2), model=TIED),
        "bf16-pp2": make_job(2, _ONE, stages=(1, 3), precision="bf16"),
        "fp16-pp2": make_job(2, _ONE, stages=(1, 3), precision="fp16"),
        "fp16-zero3-beside-ddp": make_job(2, zero3, _ONE, zero3, _ONE, precision="fp16"),
        "fp16-tp2-t5": make_job(2, _TP2, vocab=_V(tp=2), model=T5, precision="fp16"),
        "t5-ddp": make_job(2, _ONE, model=T5),
        "t5-tp2": make_job(2, _TP2, vocab=_V(tp=2), model=T5),
        "t5-zero3": make_job(2, zero3, vocab=_V(zero3=True), model=T5),
        "t5-ulysses-beside-tp": make_job(
            2, _TP2, _ULYSSES, _ONE, _L(tp=2, zero3=True, checkpoint=True), model=T5,
            vocab=_V(tp=2, ulysses=True),
        ),
        "t5-pp2-in-the-encoder": make_job(2, _ONE, stages=(1, 3), model=T5, m=4),
        "t5-pp2-between": make_job(2, _ONE, stages=(2, 2), model=T5, m=4),
        "t5-pp2-in-the-decoder": make_job(2, _ONE, stages=(3, 1), model=T5, m=4, gpipe=True),
    }  # fmt: skip


def _four() -> dict[str, PlanJob]:
    zero3 = _L(zero3=True)
    strided = _L(tp=2, strided=True)
    return {
        "tp4-gpt": make_job(4, _TP4, vocab=_V(tp=4), model=GPT),
        "tp2-zero3": make_job(4, _L(tp=2, zero3=True), vocab=_V(tp=2, zero3=True)),
        "strided-tp2-zero2": make_job(4, strided, zero2=True, model=GPT),
        "a-degree-per-layer": make_job(
            4, _L(tp=4, zero3=True), strided, _L(tp=2, zero3=True), _ONE, vocab=_V(tp=2)
        ),
        "ulysses-4-and-strided": make_job(
            4, _L(tp=4, ulysses=True, zero3=True), _L(tp=2, ulysses=True, strided=True), strided,
            _L(tp=2, zero3=True), vocab=_V(tp=4), zero2=True,
        ),
        "experts-tp-and-data": make_job(4, _TP2, _ONE, zero3, _ULYSSES, model=MOE),
        "pp2-tp2-tied": make_job(4, _TP2, stages=(2, 2), vocab=_V(tp=2), model=TIED),
        "pp2-mixed-zero": make_job(
            4, _ONE, _TP2, zero3, _L(tp=2, zero3=True), stages=(2, 2), vocab=_V(zero3=True),
            zero2=True, m=4,
        ),
        "pp2-ulysses-vocab": make_job(
            4, _ULYSSES, _TP2, _L(checkpoint=True), _ULYSSES, stages=(2, 2),
            vocab=_V(tp=2, ulysses=True),
        ),
        "pp4": make_job(4, _ONE, stages=(1, 1, 1, 1), m=8, model=TIED),
        "pp2-zero1-tied": make_job(4, _ONE, stages=(2, 2), model=TIED, zero1=True),
        "tp2-zero1-mixed": make_job(
            4, _TP2, _ONE, _L(tp=2, zero3=True), _ULYSSES, vocab=_V(tp=2), zero1=True
        ),
        "fp16-zero1": make_job(4, _TP2, vocab=_V(tp=2), zero1=True, precision="fp16"),
        "t5-pp4": make_job(4, _L(checkpoint=True), stages=(1, 1, 1, 1), m=8, model=T5),
        "t5-pp2-zero3": make_job(4, zero3, stages=(1, 3), vocab=_V(zero3=True), model=T5),
        "fp16-t5-pp2-mixed": make_job(
            4, _TP2, _ONE, zero3, _TP2, stages=(3, 1), vocab=_V(zero3=True), zero2=True, m=4,
            model=T5, precision="fp16",
        ),
        "t5-pp2-tp2": make_job(4, _TP2, stages=(3, 1), vocab=_V(tp=2), model=T5),
        "t5-pp2-mixed": make_job(
            4, _L(tp=2, zero3=True), _ONE, _ULYSSES, zero3, stages=(1, 3), vocab=_V(tp=2),
            model=T5, m=4,
        ),
        "t5-tp2-no-sp-zero2": make_job(
            4, _TP2, _L(tp=2, strided=True), _TP2, _L(tp=4), vocab=_V(tp=2), model=T5,
            zero2=True, sequence_parallel=False,
        ),
    }  # fmt: skip


def _two_more() -> dict[str, PlanJob]:
    zero3 = _L(zero3=True)
    return {
        "ddp-eager-reduce": make_job(2, _ONE, async_grad_reduce=False),
        "zero2-eager-reduce": make_job(2, _ONE, zero2=True, async_grad_reduce=False),
        "tp2-no-sp": make_job(2, _TP2, vocab=_V(tp=2), sequence_parallel=False),
        "tp2-gpt-no-sp": make_job(2, _TP2, vocab=_V(tp=2), model=GPT, sequence_parallel=False),
        "tp2-experts-no-sp": make_job(2, _TP2, model=MOE, sequence_parallel=False),
        "vocab-zero3-tied": make_job(2, zero3, vocab=_V(zero3=True), model=TIED),
        "zero3-checkpoint": make_job(2, _L(zero3=True, checkpoint=True), m=1),
        "experts-ddp": make_job(2, _ONE, model=MOE),
        "vocab-ulysses-zero3": make_job(2, _ONE, vocab=_V(tp=2, ulysses=True, zero3=True)),
        "bf16-ddp": make_job(2, _ONE, precision="bf16"),
        "bf16-zero3": make_job(2, _L(zero3=True), vocab=_V(zero3=True), precision="bf16"),
        "bf16-tp2": make_job(2, _TP2, vocab=_V(tp=2), precision="bf16"),
        "bf16-ulysses-zero2": make_job(2, _ULYSSES, zero2=True, precision="bf16"),
        "t5-shared-keys-no-sp": make_job(
            2, _TP2, model=_like_t5(num_kv_heads=1), sequence_parallel=False
        ),
        "t5-biases-pp2": make_job(
            2, _L(checkpoint=True), stages=(1, 3), m=4, model=_like_t5(biases=True)
        ),
        "t5-experts": make_job(
            2, _TP2, model=_like_t5(num_experts=2, experts_per_token=1, ffn_hidden_size=24)
        ),
        "t5-zero3-eager-reduce": make_job(2, zero3, model=T5, async_grad_reduce=False),
        "bf16-t5-pp2": make_job(2, _ONE, stages=(2, 2), model=T5, precision="bf16"),
    }


def _four_more() -> dict[str, PlanJob]:
    zero3 = _L(zero3=True)
    strided = _L(tp=2, strided=True)
    return {
        "tp4": make_job(4, _TP4, vocab=_V(tp=4)),
        "strided-tp2": make_job(4, strided, model=MQA),
        "a-degree-per-layer-no-sp": make_job(
            4, _TP4, strided, _TP2, _ONE, vocab=_V(tp=2), sequence_parallel=False
        ),
        "pp2-tp2": make_job(4, _TP2, stages=(1, 3), vocab=_V(tp=2)),
        "pp2-tp2-no-sp-gpt": make_job(
            4, _TP2, stages=(3, 1), vocab=_V(tp=2), model=GPT, sequence_parallel=False
        ),
        "pp2-zero3-tied": make_job(
            4, zero3, stages=(2, 2), vocab=_V(zero3=True), model=TIED, gpipe=True
        ),
        "bf16-pp2-mixed-zero": make_job(
            4, _ONE, _L(zero3=True), _L(zero3=True), _TP2, stages=(2, 2), vocab=_V(zero3=True),
            zero2=True, m=4, precision="bf16",
        ),
    }  # fmt: skip


def _three() -> dict[str, PlanJob]:
    model = _model("of-threes", num_heads=6, num_kv_heads=3, seq_length=18, hidden_size=48)
    tp3 = _L(tp=3)
    return {
        "dp3": make_job(3, _ONE, batch=6, model=model),
        "dp3-zero3": make_job(3, _L(zero3=True), batch=6, vocab=_V(zero3=True), model=model),
        "tp3": make_job(3, tp3, batch=6, vocab=_V(tp=3), model=model),
        "tp3-ulysses": make_job(
            3, _L(tp=3, ulysses=True), tp3, _ONE, tp3, batch=6, vocab=_V(tp=3, ulysses=True),
            model=model,
        ),
        "pp3": make_job(3, _ONE, stages=(1, 2, 1), m=3, batch=6, model=model),
    }  # fmt: skip


def _six() -> dict[str, PlanJob]:
    model = _model("of-sixes", num_heads=6, num_kv_heads=6, seq_length=18, hidden_size=48)
    return {
        "cube-of-3-by-2": make_job(
            6, _TP2, _L(tp=6), _L(tp=3, strided=True), _L(zero3=True), batch=12, vocab=_V(tp=2),
            zero2=True, model=model,
        ),
        "t5-pp3-zero3": make_job(
            6, _L(zero3=True), _TP2, _L(zero3=True), _L(zero3=True), stages=(1, 1, 2), batch=12,
            m=3, vocab=_V(zero3=True), model=T5,
        ),
        "cube-of-2-by-3": make_job(
            6, _L(tp=3), _L(tp=6, ulysses=True), _L(tp=2, strided=True), _L(tp=3, ulysses=True),
            batch=12, vocab=_V(tp=3), model=model,
        ),
        "pp2-tp3": make_job(
            6, _L(tp=3), _ONE, _L(tp=3, zero3=True), _L(tp=3, strided=True), stages=(2, 2),
            batch=12, vocab=_V(tp=3), model=model,
        ),
    }  # fmt: skip
