"""Concise constructors of runs for tests: a decoder, and how it is split and trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.pipeline.schedules import schedule_of_chunks
from autopar.records import replace
from autopar.run.architecture import (
    Attention,
    Experts,
    LatentAttention,
    Layer,
    Mlp,
    Model,
    decoder_layers,
)
from autopar.run.run import Run, legal
from autopar.run.runtime import ExpertKernels, Kernels, Runtime, States
from autopar.run.strategy import (
    Chunk,
    Split,
    Strategy,
    even_chunks,
    recomputing,
    uniform_layers,
    with_wide_ends,
)

__all__ = ["attention_of", "decoder", "llama", "of_layers", "run_of", "told", "torch_run"]


def decoder(
    *,
    layers: int = 2,
    hidden: int = 256,
    width: int = 1024,
    heads: int = 8,
    kv_heads: int | None = None,
    head_width: int | None = None,
    value_width: int | None = None,
    latent: LatentAttention | None = None,
    window: int | None = None,
    whole_every: int = 0,
    head_norms: bool = False,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    experts: Experts | None = None,
    mixtures: Sequence[bool] | None = None,
    gated: bool = False,
    biases: bool = True,
    qkv_biases: bool | None = None,
    norm: str = "layer",
    norms: int = 2,
    positions: str = "learned",
    rotary_share: float = 1.0,
    **more: Any,
) -> Model:
    """Return a decoder of equal layers, except for mixtures and windows; defaults are those of GPT.

    width : MLP width. mixtures : True for every layer that is one; None: all layers if there are
        experts. more : fields of `Model`, such as `vocab`, `tied` or `mtp`.
    """
    size = head_width or hidden // heads
    if latent is not None:
        size = latent.key_width + latent.rotary_width
    attention = Attention(
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        width=size,
        value_width=size if value_width is None else value_width,
        window=window,
        rotary_share=rotary_share if positions == "rotary" else 0.0,
        head_norms="head" if head_norms else "none",
        qkv_biases=biases if qkv_biases is None else qkv_biases,
        dropout=attention_dropout,
        latent=latent,
    )
    layer = Layer(
        hidden=hidden,
        mixers=(attention,),
        mlp=Mlp(width=width, gated=gated),
        norm=norm,  # type: ignore[arg-type]
        norms=norms,
        biases=biases,
    )
    if experts is not None:
        experts = replace(experts, gated=gated)
    own = (experts is not None,) * layers if mixtures is None else tuple(mixtures)
    groups, repeat = decoder_layers(layer, own, experts, whole_every)
    usual = {"vocab": 1000, "tied": True, "max_positions": 4096 if positions == "learned" else 0}
    return Model(
        layers=groups,
        repeat=repeat,
        positions=positions,  # type: ignore[arg-type]
        dropout=dropout,
        **{**usual, **more},  # type: ignore[arg-type]
    )


def attention_of(
    *, heads: int, kv_heads: int, width: int, value_width: int | None = None, **more: Any
) -> Attention:
    """Return attention whose values default to the width of its keys; more : other fields."""
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        value_width=width if value_width is None else value_width,
        **more,
    )


def llama(**more: Any) -> Model:
    """Return a decoder with the defaults of Llama, and sizes as those of `decoder`."""
    usual = {"gated": True, "biases": False, "tied": False, "norm": "rms", "positions": "rotary"}
    return decoder(**{**usual, "dropout": 0.0, "attention_dropout": 0.0, **more})


_STRATEGY = ("group", "schedule")
_RUN = ("name", "steps", "seq_length", "gpu")


def run_of(
    model: Model,
    *,
    gpus: int | None = None,
    stages: Sequence[Sequence[Chunk]] | None = None,
    pp: int = 1,
    vpp: int = 1,
    micro_batch: int = 1,
    global_batch: int | None = None,
    recompute: Any = frozenset(),
    unit: int = 1,
    block: int | None = None,
    every: int | None = None,
    wide_ends: tuple[int, int] = (0, 0),
    runtime: Runtime | None = None,
    **more: Any,
) -> Run:
    """Return a legal run of a model whose layers are split alike.

    gpus : default: those of one data-parallel rank. stages : default: even ones of `pp` and `vpp`.
        global_batch : default: one micro-batch. recompute, unit : for all layers; block : full, for
        the first `block` layers of a chunk; every : full, for one layer in `every`. wide_ends :
        layers at both ends in 16 bits. more : fields of `Split`, `Strategy` and `Run`, and records
        of `Runtime` by name.
    """
    strategies = {name: more.pop(name) for name in _STRATEGY if name in more}
    runs = {name: more.pop(name) for name in _RUN if name in more}
    records = {
        name: more.pop(name)
        for name in Runtime.__struct_fields__
        if name in more and (name != "offload" or not isinstance(more[name], frozenset))
    }
    split = Split(**more)
    layers, ends = uniform_layers(model.num_layers, split)
    chunks = (
        even_chunks(model.num_layers, pp, vpp, mtp=model.mtp)
        if stages is None
        else tuple(tuple(Chunk(*chunk) for chunk in stage) for stage in stages)
    )
    world = gpus or split.tp * split.cp * len(chunks)
    data = max(1, world // (split.tp * split.cp * len(chunks)))
    strategy = Strategy(
        gpus=world,
        layers=layers,
        ends=ends,
        stages=chunks,
        micro_batch=micro_batch,
        global_batch=global_batch or micro_batch * data,
        **{"schedule": schedule_of_chunks(len(chunks[0])), **strategies},
    )
    strategy = recomputing(with_wide_ends(strategy, *wide_ends), recompute, unit=unit)
    if block is not None or every is not None:
        strategy = recomputing(strategy, "full", first=block, every=every, others=recompute)
    told = runtime or Runtime(engine="megatron")
    return legal(
        Run(
            model=model,
            strategy=strategy,
            runtime=replace(told, **records),
            **{"seq_length": 1024, "gpu": "H100", **runs},
        )
    )


def torch_run(model: Model, keeper: str = "torchtitan", **more: Any) -> Run:
    """Return a legal run of torch layers, with ZeRO-3 and one micro-batch a reduction.

    keeper : library that shards the states. more : fields of `Kernels` and `States`, and arguments
        of `run_of`.
    """
    kernels, states = (
        {name: more.pop(name) for name in record.__struct_fields__ if name in more}
        for record in (Kernels, States)
    )
    mixture = ExpertKernels(dispatcher="alltoall", grouped=True)
    runtime = Runtime(
        engine=more.pop("engine", keeper),
        kernels=Kernels(**{"module": "torchtitan", "loss": "whole", **kernels}),
        states=States(**{"keeper": keeper, "each_micro_batch": True, **states}),
        experts=ExpertKernels() if model.experts is None else mixture,
    )
    return run_of(model, **{"zero": 3, "runtime": runtime, **more})


def told(run: Run, **records: Any) -> Run:
    """Return a run with other settings of its engine.

    records : fields of `Runtime`; a dictionary of changes is enough for a record in it.
    """
    own = {
        name: replace(getattr(run.runtime, name), **one) if isinstance(one, dict) else one
        for name, one in records.items()
    }
    return replace(run, runtime=replace(run.runtime, **own))


def of_layers(model: Model, **changes: Any) -> Model:
    """Return a model whose layers all have other values of some fields of `Layer`."""
    groups = tuple(replace(one, layer=replace(one.layer, **changes)) for one in model.layers)
    return replace(model, layers=groups)
