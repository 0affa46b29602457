"""Constraints of Megatron-LM on its arguments, one `Rule` each.

A row without a source comes from `validate_args` in `megatron/training/arguments.py` or from
`TransformerConfig`, `ModelParallelConfig` and `DistributedDataParallelConfig`. It is in each
release from core 0.15 to main of August 2026 (core 0.20). `BY_RELEASE` contains rules that only
some of these releases enforce. Device requirements of low precision are those of Transformer
Engine: compute capability 8.9 for fp8, 9.0 for blockwise fp8, 10.0 for mxfp8.
`search.engines.megatron.setting` computes the values that rules read.
`search.engines.megatron.findings` reports arguments without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.rates.devices import lacks_sparse_attention
from autopar.run.rules import (
    BATCH,
    COPIED_KEYS,
    EVEN_LAYERS,
    EXPERT_WIDTH,
    FFN,
    GRID,
    HEADS,
    MIXER_FP8,
    NO_EXPERTS,
    NO_PATCHES,
    NO_TORCH_MIXERS,
    SEQUENCE,
    SPARSE_PRECISION,
    WHOLE_EXPERTS,
    Notice,
    Rule,
    broken,
    without_repetitions,
)
from autopar.run.run import Run, mixer_values
from search.engines.engine import EngineRelease, Span
from search.engines.megatron.setting import STEPS, VIRTUAL, Setting, Words, ramp, ramp_start
from search.engines.megatron.stages import PATTERN


def _named(flag: str) -> str:
    return flag.replace("=", " ")


def _id(*names: str) -> str:
    return ".".join(("megatron", *(name.replace("=", "-").replace("_", "-") for name in names)))


def _excludes(*flags: str) -> Rule:
    """Return the rule that at most one of `flags` is given."""
    *others, last = (f"--{_named(flag)}" for flag in flags)
    return Rule(_id(flags[0], "excludes", flags[1]), flags, lambda *given: sum(given) > 1,
                f"{', '.join(others)} and {last} exclude each other")  # fmt: skip


def _needs(flag: str, *others: str, what: str = "") -> Rule:
    """Return the rule that a flag needs one of `others`.

    what : text for `others` in the message; empty: their names.
    """
    text = what or " or ".join(f"--{_named(other)}" for other in others)
    return Rule(_id(flag, "needs", others[0]), (flag, *others),
                lambda given, *one: given > (sum(one) > 0),
                f"--{_named(flag)} needs {text}")  # fmt: skip


def _renamed(flag: str, new: str) -> Rule:
    return Rule(_id(flag, "renamed"), (flag,), lambda given: given,
                f"--{flag} was removed from Megatron-LM", f"Use --{new}")  # fmt: skip


def _when(flag: str, rule: Rule) -> Rule:
    """Return a rule that applies only if a flag is given."""
    return rule._replace(
        over=(flag, *rule.over), rest=lambda given, *rest: given * rule.rest(*rest)
    )


def _rule(name: str, over: str, rest: Callable[..., Any], message: str, source: str = "") -> Rule:
    """Return a rule with id `megatron.NAME`.

    over : names of the values that it reads, separated by commas
    """
    return Rule(_id(name), tuple(over.split(", ")), rest, message, source=source)


EXCHANGE = tuple(
    # Megatron-LM does not replicate key-value heads, unlike Ulysses in per-layer plans.
    Rule(_id("exchange", name), (name, "tp", "exchange"),
         lambda heads, tp, exchange: (exchange > 1) * (heads % (tp * exchange)),
         f"{name}({{{name}}}) % (tp({{tp}}) * a2a({{exchange}})) = {{rest}} != 0")
    for name in ("heads", "kv_heads")
)  # fmt: skip
"""Rules that tp times the all-to-all degree divides the query heads and the key-value heads."""
_SPARSE_DEVICE = "sparse attention needs a Hopper or Blackwell GPU of data centres"
DEGREES = (
    *GRID,
    *BATCH,
    HEADS,
    COPIED_KEYS,
    FFN,
    *SEQUENCE,
    NO_EXPERTS._replace(message="--expert-model-parallel-size {ep} needs --num-experts"),
    _when("num-experts", WHOLE_EXPERTS),
    *EXCHANGE,
    # Otherwise `MoELayer.forward` raises an error in the first step
    # (megatron/core/transformer/moe/moe_layer.py).
    _rule("experts.sequence-parallel", "num-experts, tp, sequence_parallel",
          lambda there, tp, sp: there * (tp > 1) > sp,
          "experts with tp({tp}) need --sequence-parallel"),
    _rule("positions", "positions, seq_length", lambda positions, length: positions < length,
          "max-position-embeddings({positions}) is below seq-length({seq_length})"),
    _rule("sparse.sequence-parallel", "sparse_heads, tp, sequence_parallel",
          lambda heads, tp, sp: (heads > 0) * (tp > 1) > sp,
          "sparse attention with tp({tp}) needs --sequence-parallel",
          "megatron/core/transformer/experimental_attention_variant/absorbed_mla.py"),
    _rule("sparse.rope-fusion", "sparse_heads, no-rope-fusion",
          lambda heads, unfused: (heads > 0) > unfused,
          "sparse attention needs --no-rope-fusion",
          "megatron/core/transformer/transformer_config.py (d98e8a64)"),
    _rule("sparse.biases", "sparse_heads, disable-bias-linear",
          lambda heads, without: (heads > 0) > without,
          "sparse attention needs --disable-bias-linear",
          "megatron/core/transformer/transformer_config.py (d98e8a64)"),
    _rule("sparse.device", "sparse_heads, no_sparse",
          lambda heads, lacks: (heads > 0) * lacks,
          _SPARSE_DEVICE,
          "megatron/core/transformer/experimental_attention_variant/dsa_cudnn_kernels.py"),
    _rule("experts.topk", "topk, experts", lambda topk, experts: (experts > 0) * (topk > experts),
          "moe-router-topk({topk}) is above num-experts({experts})"),
    _rule("heads.hidden", "kv-channels, hidden, heads",
          lambda width, hidden, heads: (hidden % heads) * (width == 0),
          "hidden-size % num-attention-heads != 0 needs --kv-channels"),
)  # fmt: skip
INTERLEAVED = _rule(
    "interleaved.stages", "pp, chunks", lambda pp, chunks: (pp == 1) * (chunks > 1),
    "{chunks} chunks per pipeline stage need --pipeline-model-parallel-size above 1",
)  # fmt: skip
PLACED = (
    _rule("placed.one-stage", "placed_layers, placed_stages, placed_words, layers, pp",
          lambda placed, stages, _, layers, pp: (pp == 1) * ((stages > 1) + (placed != layers)),
          "{placed_words}: one pipeline stage has all {layers} layers")._replace(
        suggestion="Remove it, or use --pipeline-model-parallel-size 2 or more"),
    _rule("placed.others", "placed_layers, placed_stages, placed_words, layers, pp",
          lambda placed, stages, _, layers, pp: (pp > 1) * ((placed > layers)
          + (stages == pp) * (placed != layers)
          + (stages < pp) * ((layers - placed)
                              % (pp - stages + (stages >= pp) * (1 + stages - pp)))),
          "{placed_words}: the rest of {layers} layers does not divide over the other stages "
          "of {pp}")._replace(suggestion="Use --pipeline-model-parallel-layout"),
)  # fmt: skip
"""Rules on a first or a last pipeline stage with a given number of layers.

Source: `TransformerConfig.__post_init__` and `get_num_layers_to_build`; NVIDIA/Megatron-LM#1778.
"""
LAYERS = (
    EVEN_LAYERS._replace(source="megatron/core/transformer/transformer_block.py"),
    _rule("layers.chunk", "layers, pp, chunk_layers, pipeline-model-parallel-layout",
          lambda layers, pp, each, layout:
          (pp > 1) * (each > 0) * (layout == 0) * (layers % (pp * each + (each == 0))),
          "layers({layers}) % (pp({pp}) * layers of a chunk({chunk_layers})) = "
          "{rest}"),
    _rule("layout", "layout_problem", lambda problem: problem != "",
          "--pipeline-model-parallel-layout {layout_problem}"),
    *PLACED,
)  # fmt: skip
"""Rules on the layer partition, evaluated only if no run could be read. Reading a run checks the
partition completely, including end stages, MTP layers, and embedding and loss as layers."""
_OVERLAP = "overlap-moe-expert-parallel-comm"
ARGUMENTS = (
    _rule("cp-comm-type", "comm_types, layers",
          lambda number, layers: (number > 1) * (number != layers),
          "--cp-comm-type has {comm_types} entries for {layers} layers"),
    _rule("hierarchy", "hierarchy, cp", lambda product, cp: product != cp,
          "hierarchical sizes multiply to {hierarchy}, but cp is {cp}"),
    _needs("cp-comm-type=a2a+p2p", "hierarchical-context-parallel-sizes"),
    _needs("recompute-granularity=full", "recompute-method"),
    _needs("recompute-granularity=full", "recompute-num-layers"),
    _needs("overlap-param-gather", "sharded", "optimizer=dist_muon",
           what="a distributed optimizer or Megatron-FSDP"),
    _needs("overlap-param-gather", "overlap-grad-reduce"),
    _needs("use-megatron-fsdp", "ckpt-format=fsdp_dtensor"),
    _excludes("fp16", "bf16"),
    _excludes("train-iters", "train-samples"),
    _excludes("fp4-format", "fp8-format"),
    _excludes("multi-latent-attention", "group-query-attention"),
    _excludes("swiglu", "squared-relu", "quick-geglu"),
    _rule("layout.alone", "pipeline-model-parallel-layout, places_otherwise",
          lambda layout, others: layout * others,
          "--pipeline-model-parallel-layout excludes other arguments that place "
          "layers"),
    _rule("positions.missing", "max-position-embeddings", lambda given: given == 0,
          "--max-position-embeddings is missing"),
    _excludes(*VIRTUAL),
    _excludes(PATTERN, "hybrid-override-pattern"),
    *(_rule(f"pattern.excludes.{flag}", f"hybrid, {flag}", lambda hybrid, given: hybrid * given,
            f"--{flag} excludes --{PATTERN}")._replace(
        suggestion="End each chunk of the pattern with |")
      for flag in (*VIRTUAL, "pipeline-model-parallel-layout",
                   "account-for-embedding-in-pipeline-split",
                   "account-for-loss-in-pipeline-split")),
    _rule("pattern.placed", "segments, placed", lambda segments, placed: (segments > 1) * placed,
          f"--{PATTERN} with | excludes stages with given layers"),
    _needs("save", "save-interval"),
    _rule("lr", "lr_excess", lambda excess: excess, "--min-lr is above --lr"),
    _rule("fp8-gather.sharded", "fp8-param-gather, fp8-format, sharded",
          lambda gather, fp8, sharded: gather * fp8 > sharded,
          "--fp8-param-gather needs --use-distributed-optimizer or Megatron-FSDP"),
    _needs("fp8-param-gather", "fp8-format"),
    _needs("fp4-param-gather", "fp4-format"),
    _rule("fp8.device", "fp8-format, no_fp8", lambda fp8, lacks: fp8 * lacks,
          "--fp8-format needs a GPU with fp8 GEMMs"),
    _rule("mxfp8.device", "fp8-format, fp8-recipe=mxfp8, no_mxfp8",
          lambda fp8, recipe, lacks: fp8 * recipe * lacks, "--fp8-recipe mxfp8 needs Blackwell"),
    _rule("blockwise.device", "fp8-format, fp8-recipe=blockwise, no_fp8_block",
          lambda fp8, recipe, lacks: fp8 * recipe * lacks,
          "--fp8-recipe blockwise needs Hopper or Blackwell"),
    _rule("fp4.device", "fp4-format, no_nvfp4", lambda fp4, lacks: fp4 * lacks,
          "--fp4-format needs Blackwell"),
    *(_rule(f"attention.{word}.device", f"{asked}, no_flash", lambda kernel, lacks: kernel * lacks,
            f"--{asked.replace('=', ' ')} needs a GPU of compute capability 8.0")
      for word, asked in (("installed", "use-flash-attn"), ("flash", "attention-backend=flash"),
                          ("fused", "attention-backend=fused"))),
    *(_rule(f"selective.{flag}", f"selective, {flag}", lambda selective, given: selective * given,
            f"--{flag} excludes selective recomputation")
      for flag in ("recompute-method", "recompute-num-layers")),
    *(_rule(f"recompute.{module}.needs.{flag}", f"recomputes {module}, {flag}",
            lambda recomputes, given: recomputes > given,
            f"--recompute-modules {module} needs --{flag}")
      for module, flag in (("moe_act", "moe-grouped-gemm"),
                           ("mla_up_proj", "multi-latent-attention"),
                           ("gdn_norm_out", "experimental-attention-variant"))),
    _rule("recompute.delayed",
          "recomputes moe_act, recomputes layernorm, fp8-format, fp8-recipe=delayed",
          lambda activation, norm, fp8, delayed: (activation + norm) * fp8 * delayed,
          "--recompute-modules moe_act and layernorm exclude --fp8-recipe "
          "delayed"),
    _rule("recompute.moe-layer", "moe-layer-recompute, recompute-granularity=full, selective",
          lambda layer, full, selective: layer * full > selective,
          "--moe-layer-recompute and full recomputation exclude each other"),
    _rule("saved.scattered", "distribute-saved-activations, scattered",
          lambda saved, scattered: saved * scattered,
          "--distribute-saved-activations and --sequence-parallel exclude each other"),
    _needs("tp-comm-overlap", "scattered",
           what="--sequence-parallel and --tensor-model-parallel-size above 1"),
    _rule("tp-comm-overlap.device", "tp-comm-overlap, amd", lambda overlap, amd: overlap * amd,
          "--tp-comm-overlap needs NVIDIA GPUs (userbuffers of Transformer "
          "Engine)"),
    _rule("flex.device", "moe-token-dispatcher-type=flex, amd", lambda flex, amd: flex * amd,
          "--moe-token-dispatcher-type flex needs NVIDIA GPUs (DeepEP and "
          "HybridEP)"),
    _rule("deferred-head.stages", "defer-embedding-wgrad-compute, pp",
          lambda deferred, pp: deferred * (pp == 1),
          "--defer-embedding-wgrad-compute needs --pipeline-model-parallel-size above 1"),
    _excludes("defer-embedding-wgrad-compute", "no-gradient-accumulation-fusion"),
    _rule("gather-in-step", "overlap-param-gather-with-optimizer-step, overlap-param-gather, "
          "virtual", lambda given, gather, virtual: given > gather * virtual,
          "--overlap-param-gather-with-optimizer-step needs --overlap-param-gather and virtual "
          "stages"),
    _rule("placed.virtual", f"{VIRTUAL[0]}, placed", lambda each, placed: each * placed,
          "stages with given layers need --num-virtual-stages-per-pipeline-rank"),
    _rule("muon.sharded", "muon, use-megatron-fsdp, use-torch-fsdp2",
          lambda muon, megatron, torch: muon * (megatron + torch),
          "--optimizer muon excludes --use-megatron-fsdp and --use-torch-fsdp2"),
    _rule("context.local", "cp, transformer-impl=local", lambda cp, local: (cp > 1) * local,
          "--context-parallel-size above 1 needs --transformer-impl transformer_engine"),
    _excludes("deterministic-mode", "cross-entropy-loss-fusion"),
    *(_rule(f"{flag}.kernels", f"{flag}, dsa-kernel-backend=cudnn",
            lambda given, cudnn: given * cudnn, f"--{flag} and --dsa-kernel-backend cudnn exclude "
            "each other") for flag in ("no-dsa-indexer-scoring-relu",
                                       "disable-dsa-indexer-scoring-relu")),
    _rule("mtp.positions",
          "mtp, rotary, position-embedding-type=rope, position-embedding-type=none",
          lambda mtp, rotary, rope, none: (mtp > 0) > (rotary + rope + none > 0),
          "--mtp-num-layers needs --position-embedding-type rope or none"),
    _needs("attention-backend=local", "spec=local"),
    _renamed("batch-size", "micro-batch-size"),
    _renamed("warmup", "lr-warmup-fraction"),
    _renamed("model-parallel-size", "tensor-model-parallel-size"),
    _renamed("checkpoint-activations", "recompute-activations"),
    _excludes("num-layers", "encoder-num-layers"),
    _excludes("seq-length", "encoder-seq-length"),
    *(_rule(f"{flag}.unit", f"{unit}, {value}", lambda given, other: given * other,
            f"--{flag} needs --{wanted}")
      for flag, value, unit, wanted in (
          ("lr-decay-samples", "lr-decay-samples", "train-iters", "train-samples"),
          ("lr-decay-iters", "lr-decay-iters", "train-samples", "train-iters"),
          ("lr-warmup-samples", "warm_up_samples", "train-iters", "train-samples"),
          ("lr-warmup-iters", "warm_up_iters", "train-samples", "train-iters"))),
    _rule("warm-up", "lr-warmup-fraction, warm_up_iters, warm_up_samples",
          lambda share, iters, samples: share * (iters + samples),
          "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples"),
    _rule("weight-decay.constant", "weight-decay-incr-style=constant, decay_ends",
          lambda constant, ends: constant * ends,
          "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
          "cosine"),
    _rule("weight-decay.ends", "weight-decay-incr-style=linear, weight-decay-incr-style=cosine, "
          "decay_ends", lambda linear, cosine, ends: (linear + cosine) * (ends < 2),
          "--weight-decay-incr-style needs --start-weight-decay and --end-weight-decay"),
    _rule("save.retain", "retain_interval, save_interval",
          lambda retain, save: retain % save,
          "save-retain-interval % save-interval != 0"),
    _rule("data", "data_sources", lambda sources: sources > 1,
          "--mock-data, --data-path and the data paths of splits exclude each other"),
    _excludes("data-path", "data-args-path"),
    _needs("fp16-lm-cross-entropy", "fp16"),
    _needs("fp32-residual-connection", "bf16", "fp16"),
    _rule("saved.tensor", "distribute-saved-activations, tp, recompute-granularity=full",
          lambda saved, tp, full: saved > (tp > 1) * full,
          "--distribute-saved-activations needs tensor ranks and --recompute-granularity full"),
    _rule("no-positions", "no-position-embedding, rotary, position-embedding-type=rope",
          lambda none, old, rotary: none > (old + rotary > 0),
          "--no-position-embedding needs --position-embedding-type rope; none "
          "is a separate type"),
    _rule("ends-bf16.delayed", "first-last-layers-bf16, fp8-format, fp8-recipe=delayed",
          lambda ends, fp8, delayed: ends * fp8 * delayed,
          "--first-last-layers-bf16 excludes --fp8-recipe delayed"),
    _rule("ends-bf16.stage", "first-last-layers-bf16, first_bf16, last_bf16, layers, pp",
          lambda ends, first, last, layers, pp:
          ends * ((first > layers // pp) + (last > layers // pp)),
          "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 exceed "
          "the layers of a stage"),
    _rule("fp8.custom", "fp8-recipe=custom, fp8-format, fp8-quantizer-factory",
          lambda custom, fp8, factory: custom * fp8 > factory,
          "--fp8-recipe custom needs --fp8-quantizer-factory"),
    _needs("reuse-grad-buf-for-mxfp8-param-ag", "fp8-param-gather"),
    _excludes("multi-latent-attention", "rotary-interleaved"),
    _rule("latent.rope", "multi-latent-attention, rope-type=rope, position-embedding-type=rope, "
          "no-rope-fusion", lambda latent, kind, rope, unfused: latent * kind * rope > unfused,
          "--rope-type rope of --multi-latent-attention needs --no-rope-fusion"),
    _needs("rope-type=yarn", "multi-latent-attention"),
    _rule("placed.counted", "placed, counted", lambda placed, counted: placed * counted,
          "stages with given layers exclude "
          "--account-for-embedding-in-pipeline-split and "
          "--account-for-loss-in-pipeline-split"),
    _rule("p2p-warm-up", "overlap-p2p-communication-warmup-flush, virtual, "
          "no-overlap-p2p-communication",
          lambda given, virtual, alone: given * ((virtual == 0) + alone),
          "--overlap-p2p-communication-warmup-flush needs virtual stages with "
          "overlapped P2P communication"),
    _rule("te-activation", "use-te-activation-func, swiglu, no-bias-swiglu-fusion",
          lambda given, gated, unfused: given * gated > unfused,
          "--use-te-activation-func needs --no-bias-swiglu-fusion"),
    _needs("delay-wgrad-compute", _OVERLAP),
    _needs("use-precision-aware-optimizer", "use-distributed-optimizer"),
    _needs("optimizer-cpu-offload", "use-precision-aware-optimizer"),
    _rule("states", "narrow_states, use-precision-aware-optimizer",
          lambda narrow, aware: narrow > aware,
          "precisions of optimizer states other than fp32 need "
          "--use-precision-aware-optimizer"),
    _needs("overlap-param-gather-with-optimizer-step", "ckpt-format=torch"),
    _needs("cuda-graph-impl=full_iteration", "no-check-for-nan-in-loss-and-grad"),
    _excludes("enable-cuda-graph", "external-cuda-graph"),
    _needs("ckpt-format=fsdp_dtensor", "fsdp", what="--use-megatron-fsdp"),
    _needs("ckpt-format=torch_dcp", "use-torch-fsdp2"),
    _rule("cpu-offloading", "offloaded_layers, pp, recompute-granularity",
          lambda number, pp, recompute: (number > 0) * ((pp > 1) + recompute),
          "--cpu-offloading-num-layers excludes pipeline stages and recomputation"),
    _rule("expert-width", "moe-ffn-hidden-size, experts", lambda width, experts:
          width * (experts == 0), "--moe-ffn-hidden-size needs --num-experts"),
)  # fmt: skip
"""Rules on arguments that exclude or need each other."""


def _beside_overlap(name: str, over: str, lacks: Callable[..., Any], what: str) -> Rule:
    """Return the rule that --overlap-moe-expert-parallel-comm needs `what`.

    lacks : function of the values `over`, nonzero if the requirement is not met.
    """
    rule = _rule(f"moe-overlap.{name}", over, lacks, f"--{_OVERLAP} needs {what}")
    return _when("num-experts", _when(_OVERLAP, rule))


EXPERT_OVERLAP = (
    _beside_overlap("ranks", "ep", lambda ep: ep <= 1, "expert-model-parallel-size above 1"),
    _beside_overlap("virtual", "pp, virtual", lambda pp, virtual: (pp > 1) > virtual,
                    "virtual pipeline stages"),
    _beside_overlap("recompute", "recompute-granularity=full, recompute-modules=moe",
                    lambda full, moe: full + moe, "no recomputation of whole layers or of moe"),
    _beside_overlap("shared", "moe-shared-expert-overlap", lambda given: given,
                    "no --moe-shared-expert-overlap"),
    _beside_overlap("dispatcher", "moe-token-dispatcher-type=alltoall, "
                    "moe-token-dispatcher-type=flex", lambda all_to_all, flex:
                    (all_to_all + flex) == 0, "--moe-token-dispatcher-type alltoall or flex"),
    _beside_overlap("mtp", "mtp", lambda mtp: mtp > 1, "one MTP layer at most"),
    _beside_overlap("hybrid", "hybrid", lambda hybrid: hybrid,
                    "a GPT model: HybridModel has no build_schedule_plan"),
    _beside_overlap("precision", "16_bits", lambda bits: bits == 0, "--bf16 or --fp16"),
)  # fmt: skip


def _of_fsdp2(name: str, over: str, lacks: Callable[..., Any], what: str) -> Rule:
    """Return the rule that --use-torch-fsdp2 needs `what`.

    lacks : function of the values `over`, nonzero if the requirement is not met.
    """
    rule = _rule(f"torch-fsdp2.{name}", over, lacks, f"--use-torch-fsdp2 needs {what}")
    return _when("use-torch-fsdp2", rule)


FSDP2 = (
    _of_fsdp2("stages", "pp", lambda pp: pp > 1, "--pipeline-model-parallel-size 1"),
    _of_fsdp2("experts", "ep", lambda ep: ep > 1, "--expert-model-parallel-size 1"),
    _of_fsdp2("optimizer", "use-distributed-optimizer", lambda given: given,
              "no --use-distributed-optimizer"),
    _of_fsdp2("fusion", "no-gradient-accumulation-fusion", lambda given: given == 0,
              "--no-gradient-accumulation-fusion"),
    _of_fsdp2("untied", "untie-embeddings-and-output-weights", lambda given: given == 0,
              "--untie-embeddings-and-output-weights"),
    _of_fsdp2("fp16", "fp16", lambda given: given, "no --fp16"),
    _of_fsdp2("checkpoint", "ckpt-format=torch_dist, ckpt-format=torch_dcp",
              lambda own, other: own + other == 0, "--ckpt-format torch_dist or torch_dcp"),
)  # fmt: skip
_ALL_GATHER = "moe-token-dispatcher-type=allgather"
_FLEX = "moe-token-dispatcher-type=flex"
_DEEPEP = "moe-flex-dispatcher-backend=deepep"
_PADDED = "moe-pad-expert-input-to-capacity"
_SOFTMAX = "moe-router-score-function=softmax"
_SINKHORN = "moe-router-load-balancing-type=sinkhorn"
MIXTURES = tuple(
    _when("num-experts", rule)
    for rule in (
        _needs("moe-enable-deepep", _FLEX),
        _rule("shared-overlap", f"moe-shared-expert-overlap, {_ALL_GATHER}",
              lambda overlap, gathered: overlap * gathered,
              "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall"),
        _rule("expert-bias", f"moe-router-enable-expert-bias, {_SOFTMAX}",
              lambda bias, softmax: bias * softmax,
              "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid"),
        _rule("topk.softmax", f"topk, moe-router-pre-softmax, {_SOFTMAX}, {_SINKHORN}",
              lambda topk, before, softmax, sinkhorn:
              (topk == 1) * softmax > (before + sinkhorn > 0),
              "--moe-router-topk 1 needs --moe-router-pre-softmax"),
        _needs("moe-router-group-topk", "moe-router-num-groups"),
        _rule("groups.experts", "moe-router-group-topk, experts, router_groups",
              lambda given, experts, groups: given * (experts % groups),
              "moe-router-num-groups does not divide num-experts"),
        _rule("groups.topk", "moe-router-num-groups, group_topk, router_groups",
              lambda given, topk, groups: given * (topk > groups),
              "moe-router-group-topk is above moe-router-num-groups"),
        _rule("recompute.shared", "recomputes shared_experts, moe-shared-expert-overlap",
              lambda recomputes, overlap: recomputes * overlap,
              "--recompute-modules shared_experts excludes --moe-shared-expert-overlap"),
        _rule("padding.precision", "padded, low_precision", lambda padded, low: padded > low,
              "--moe-router-padding-for-quantization needs --fp8-format or --fp4-format"),
        _rule("padding.dispatcher",
              f"padded, {_ALL_GATHER}, moe-token-dispatcher-type=alltoall_seq",
              lambda padded, gathered, old: padded * (gathered + old),
              "--moe-router-padding-for-quantization needs --moe-token-dispatcher-type alltoall "
              "or flex"),
        _rule("capacity.sinkhorn", f"moe-expert-capacity-factor, {_SINKHORN}",
              lambda capacity, sinkhorn: capacity * sinkhorn,
              "--moe-expert-capacity-factor excludes --moe-router-load-balancing-type sinkhorn"),
        _rule("balancing", "balancing_types, balancing_coefficients",
              lambda types, coefficients: (types > 1) * (types != coefficients),
              "--moe-aux-loss-coeff needs a coefficient for each "
              "--moe-router-load-balancing-type"),
        _needs("moe-pad-expert-input-to-capacity", "moe-expert-capacity-factor"),
        _rule("padded-capacity.deepep", f"{_PADDED}, {_FLEX}, {_DEEPEP}",
              lambda padded, flex, deepep: padded * flex * deepep,
              f"--{_PADDED} excludes --moe-token-dispatcher-type flex with DeepEP"),
        _rule("flex.ranks", f"{_FLEX}, ep, etp", lambda flex, ep, etp: flex * (ep * etp == 1),
              "--moe-token-dispatcher-type flex needs --expert-model-parallel-size or "
              "--expert-tensor-parallel-size above 1",
              "MoEFlexTokenDispatcher, megatron/core/transformer/moe/token_dispatcher.py"),
        _rule("experts.biases", "disable-bias-linear, etp",
              lambda without, etp: (etp > 1) > without,
              "experts with biases need --expert-tensor-parallel-size 1, or "
              "--disable-bias-linear"),
    )
)  # fmt: skip
"""Rules on models with experts."""


def _groups(name: str, number: str, prefix: str, *more: str) -> tuple[Rule, ...]:
    """Return the rules on the micro-batch group size of the interleaved schedule.

    name : prefix of the rule ids.
    number : name of the value with the number of micro-batches.
    prefix : start of the messages.
    more : names of values that `prefix` contains.
    """
    over = ", ".join(("pp", "chunks", "group", number, *more))
    return (
        _rule(f"{name}.groups", over, lambda pp, chunks, group, number, *_:
              (pp > 1) * (chunks > 1) * ((group < pp) + (group > number)),
              f"{prefix}an interleaved pipeline needs groups of at least "
              f"pp({{pp}}) and at most {{{number}}} micro-batches, got {{group}}"),
        _rule(f"{name}.rest", over, lambda pp, chunks, group, number, *_:
              (pp > 1) * (chunks > 1) * (group >= pp) * (group <= number)
              * (number % group < pp) * (number % group),
              f"{prefix}micro-batches({{{number}}}) % {{group}} = {{rest}}, between 0 and "
              "pp({pp})"),
    )  # fmt: skip


def _unless(flag: str, rule: Rule) -> Rule:
    """Return a rule that applies only if a flag is not given."""
    return rule._replace(
        over=(flag, *rule.over), rest=lambda given, *rest: (given == 0) * rule.rest(*rest)
    )


_RAMP, _STEPS = "--rampup-batch-size", f"--{STEPS}"
SCHEDULES = (
    *_groups("interleaved", "micro_batches", ""),
    INTERLEAVED,
    _rule("interleaved.p2p", "pp, chunks, no-overlap-p2p-communication",
          lambda pp, chunks, alone: (pp == 2) * (chunks > 1) * alone,
          "an interleaved pipeline of 2 stages excludes --no-overlap-p2p-communication"),
    _rule("steps.words", "bad_steps, steps_words", lambda bad, words: bad,
          f"{_STEPS} needs words THRESHOLD:BATCH with thresholds from 0 on, got {{steps_words!r}}"),
    _rule("steps.batch", f"{STEPS}, global-batch-size",
          lambda steps, batch: steps * batch, f"{_STEPS} excludes --global-batch-size"),
    _rule("steps.decrease", f"{STEPS}, decrease-batch-size-if-needed",
          lambda steps, less: steps * less, f"{_STEPS} excludes --decrease-batch-size-if-needed"),
    # `RampupBatchsizeNumMicroBatchesCalculator` of megatron/core/num_microbatches_calculator.py
    # (core 0.16) steps from the first batch size to the last.
    _rule("ramp.words", "bad_ramp, ramp_words", lambda bad, words: bad,
          f"{_RAMP} needs a first batch, an increment and samples, got {{ramp_words!r}}"),
    _rule("ramp.start", "ramp_start, global_batch", lambda start, batch: start > batch,
          f"{_RAMP} begins with {{ramp_start}}, above global-batch-size({{global_batch}})"),
    _rule("ramp.step", "ramp_start, ramp_step, global_batch",
          lambda start, step, batch: (batch >= start) * ((batch - start) % step),
          f"{_RAMP}: (global batch({{global_batch}}) - {{ramp_start}}) % increment({{ramp_step}}) "
          "= {rest} != 0"),
    # With the flag, a batch size that does not divide is rounded down.
    *(_unless("decrease-batch-size-if-needed", rule) for rule in (
        _rule("ramp.first", "ramp_start, global_batch, together",
              lambda start, batch, once: (batch >= start) * (start % once),
              f"{_RAMP}: batch({{ramp_start}}) % (micro batch * dp({{together}})) = {{rest}} "
              "!= 0"),
        _rule("ramp.second", "ramp_second, ramp_start, global_batch, together",
              lambda second, start, batch, once: (second < batch) * (start % once == 0)
              * (second % once),
              f"{_RAMP}: batch({{ramp_second}}) % (micro batch * dp({{together}})) = {{rest}} "
              "!= 0"),
        *_groups("ramp", "ramp_micro_batches", f"{_RAMP} begins with {{ramp_start}}: ",
                  "ramp_start"))),
)  # fmt: skip
"""Rules on the interleaved schedule and batch ramp-up. Most need values of a run that was read."""
RULES = (MIXER_FP8, *DEGREES, *ARGUMENTS, *EXPERT_OVERLAP, *MIXTURES, *FSDP2, *SCHEDULES)
WRITTEN = (
    _rule("sequence-parallel.tensor", "sequence_parallel, tp", lambda sp, tp: sp * (tp == 1),
          "--sequence-parallel needs --tensor-model-parallel-size above 1"),
    # Source: Megatron-FSDP guide, and NVIDIA/Megatron-LM pull request 6081.
    _rule("fsdp.fusion", "use-megatron-fsdp, fused_accumulation", lambda fsdp, fused: fsdp * fused,
          "--use-megatron-fsdp needs --no-gradient-accumulation-fusion"),
    _rule("fsdp.stages", "use-megatron-fsdp, pp", lambda fsdp, pp: fsdp * (pp > 1),
          "--use-megatron-fsdp excludes pipeline stages"),
)  # fmt: skip
"""Rules for exported arguments only: Megatron-LM prints a warning or has no check for them."""


def _until(last: str, rule: Rule) -> tuple[Span, Rule]:
    return Span(last=last), rule._replace(message=f"{rule.message} up to core {last}")


def _since(first: str, rule: Rule) -> tuple[Span, Rule]:
    return Span(first), rule._replace(message=f"{rule.message} from core {first}")


_BY_RELEASE = (
    _until("0.15", _when("num-experts", _rule(
        "before.fp16-experts", "fp16, ep", lambda fp16, ep: fp16 * (ep > 1),
        "--expert-model-parallel-size above 1 excludes --fp16"))),
    _until("0.15", _when("num-experts", _rule(
        "before.grouped", "moe-grouped-gemm, bf16", lambda grouped, bf16: grouped > bf16,
        "--moe-grouped-gemm needs --bf16"))),
    _until("0.19", _when("num-experts", _rule(
        "before.padded-capacity", f"{_PADDED}, {_FLEX}, {_DEEPEP}",
        lambda padded, flex, deepep: padded * flex > deepep,
        f"--{_PADDED} excludes --moe-token-dispatcher-type flex"))),
    _until("0.17", _rule("before.moe-overlap", f"{_OVERLAP}, mtp, pp",
          lambda overlap, mtp, pp: overlap * (mtp == 1) * (pp == 1),
          f"--{_OVERLAP} with MTP layers needs pipeline stages")),
    _until("0.17", _rule(
        "before.muon", "muon, use-distributed-optimizer", lambda muon, sharded: muon * sharded,
        "--optimizer muon excludes --use-distributed-optimizer")),
    _until("0.17", _rule("before.muon-overlap", "optimizer=muon, overlap-grad-reduce",
          lambda muon, overlap: muon * overlap,
          "--optimizer muon excludes --overlap-grad-reduce")),
    _until("0.17", _rule("before.rampup", "train-iters, rampup-batch-size",
          lambda iters, ramp: iters * ramp, "--rampup-batch-size needs --train-samples")),
    _until("0.18", _rule("before.flash-attn", "deterministic-mode, use-flash-attn",
          lambda deterministic, flash: deterministic * flash,
          "--deterministic-mode excludes --use-flash-attn")),
    _since("0.17", _rule("since.rotary-mtp",
          "mtp, rotary, position-embedding-type=rope, position-embedding-type=none",
          lambda mtp, rotary, rope, none: (mtp > 0) * rotary > (rope + none > 0),
          "--mtp-num-layers needs --position-embedding-type rope besides "
          "--use-rotary-position-embeddings",
          "validate_args checks MTP before it reads --use-rotary-position-embeddings")),
    _since("0.18.2", _rule(
          "since.te-loss", "cross-entropy-loss-fusion, cross-entropy-fusion-impl=te",
          lambda fused, te: fused * te,
          "--cross-entropy-loss-fusion needs --cross-entropy-fusion-impl native, not te,",
          "validate_args; NVIDIA/Megatron-LM pull request 5115")),
    _since("0.18", _rule("since.save-params", "save, save-params-interval, overlap-param-gather",
          lambda save, params, overlap: save * params * overlap,
          "--save-params-interval excludes --overlap-param-gather")),
    _since("0.19", _rule("since.deterministic-overlap", "deterministic-mode, tp-comm-overlap",
          lambda deterministic, overlap: deterministic * overlap,
          "--deterministic-mode excludes --tp-comm-overlap",
          "megatron/training/determinism.py")),
)  # fmt: skip
BY_RELEASE = tuple(rule._replace(level="warned") for _, rule in _BY_RELEASE)
"""Rules that some releases do not enforce: warnings, unless a release is given. Releases are those
of the branches `core_r0.15.0` to `core_r0.19.0`; main of August 2026 is core 0.20."""
OF_ARGUMENTS = frozenset(rule.id for rule in BY_RELEASE if rule.id.startswith(_id("since"))) | {
    # DeepSeek-V3 on H100 of Megatron-Bridge trains without overlapped gradients.
    _id("overlap-param-gather.needs.overlap-grad-reduce"),
    _id("cuda-graph-impl-full-iteration.needs.no-check-for-nan-in-loss-and-grad"),
}
"""Ids of rules of `validate_args` alone, which other programs with Megatron-Core do not run."""


ADAPTERS = (
    _rule("adapters.base", "lora_rank, lora_base", lambda rank, base: (rank > 0) * (base != "bf16"),
          "Megatron-Bridge has no weights in {lora_base}"),
    # `ParallelLinearAdapter` splits the rows of A over tensor ranks.
    _rule("adapters.rank", "lora_rank, tp", lambda rank, tp: rank % tp,
          "rank({lora_rank}) % tp({tp}) = {rest} != 0"),
    _rule("adapters.expert-rank", "lora_rank, experts, etp", lambda rank, experts, etp:
          (experts > 0) * (rank % etp), "rank({lora_rank}) % etp({etp}) = {rest} != 0"),
    # `_create_peft_pre_wrap_hook` loads the base before Megatron-FSDP allocates its weights.
    _rule("adapters.fsdp", "lora_rank, zero", lambda rank, zero: (rank > 0) * (zero == 3),
          "Megatron-FSDP cannot load frozen weights in Megatron-Bridge"),
    _rule("adapters.tp-overlap", "lora_rank, tp_overlap", lambda rank, overlap:
          (rank > 0) * overlap, "LoRA recipes of Megatron-Bridge have no TP overlap"),
)  # fmt: skip
"""Rules of Megatron-Bridge 0.6 on adapters, which Megatron-LM lacks.

Sources: `peft/utils.py` and `training/setup.py`.
"""
HYBRID_CHUNKS = _rule(
    "hybrid.chunks", "hybrid, vpp", lambda hybrid, vpp: hybrid * (vpp > 1),
    "Megatron-Bridge has no model chunks of a stage in hybrid models, got vpp({vpp})",
    "`provide` of models/hybrid/hybrid_provider.py",
)  # fmt: skip
_RANKS = "tp_overlap, tp, nvlinked, world, domain, gpu"
SPACE = (
    NO_PATCHES,
    _when("fine_tunes", HYBRID_CHUNKS),
    NO_TORCH_MIXERS,
    _rule("wide-norms", "wide_norms", lambda wide: wide,
          "no argument of Megatron-LM norms queries and keys over all heads"),
    _rule("other-norms", "other_norms", lambda other: other,
          "no argument of Megatron-LM gives layers more or fewer norms than one before each part"),
    _rule("extra-embedding", "extra_embedding", lambda extra: extra,
          "no argument of Megatron-LM adds the {extra_embedding} further parameters of the "
          "embedding"),
    MIXER_FP8,
    SPARSE_PRECISION,
    _rule("sparse.device", "sparse_heads, gpu",
          lambda heads, gpu: (heads > 0) * lacks_sparse_attention(gpu), _SPARSE_DEVICE),
    _rule("sparse.biases", "sparse_heads, biases",
          lambda heads, biases: (heads > 0) * biases,
          "sparse attention has no biases of linear layers"),
    COPIED_KEYS,
    FFN,
    *SEQUENCE,
    # Source: AttnFuncWithCPAndQKVOA2A of Transformer Engine.
    *(_rule(f"exchange.{name}", f"{name}, tp, cp, cp_kind", lambda heads, tp, cp, kind:
            (cp > 1) * (kind == "a2a") * (heads % (tp * cp)),
            f"{name}({{{name}}}) % (tp({{tp}}) * cp({{cp}})) = {{rest}} != 0")
      for name in ("heads", "query_groups")),
    _rule("latent.rings", "latent, cp, cp_kind", lambda latent, cp, kind:
          latent * (cp > 1) * (kind != "ring"),
          "latent attention needs ring context parallelism: its queries and "
          "values differ in width"),
    # Source: attn_forward_func_with_cp of Transformer Engine.
    _rule("window.rings", "window, cp, cp_kind", lambda window, cp, kind:
          window * (cp > 1) * (kind == "ring"),
          "sliding-window attention has no ring context parallelism"),
    _rule("tp-overlap.ranks", "tp_overlap, tp", lambda overlap, tp: overlap * (tp == 1),
          "--tp-comm-overlap needs tensor parallelism"),
    _rule("tp-overlap.links", _RANKS, lambda overlap, tp, linked, world, domain, gpu:
          overlap * (tp > 1) * (linked * ((world <= domain) + (domain % tp == 0)) == 0),
          "--tp-comm-overlap: the {tp} {gpu} of a tensor group are not "
          "connected by NVLink"),
    _rule("connections.both", "tp_overlap, overlap_experts, one_queue, gpu",
          lambda tensor, experts, one, gpu: tensor * experts * one,
          f"--tp-comm-overlap and --{_OVERLAP} need different values of "
          "CUDA_DEVICE_MAX_CONNECTIONS on {gpu}, 1 and 32"),
    EXPERT_WIDTH,
    _rule("experts.biases", "experts, biases, etp", lambda experts, biases, etp:
          (experts > 0) * biases * (etp > 1),
          "experts with biases cannot be split over tensor ranks"),
    # Megatron's guide combines module offload only with selective recomputation.
    _rule("offload.recompute", "offload, whole_layers", lambda words, whole:
          (words != "none") * whole,
          "activation offload excludes recomputation of whole "
          "layers"),
    _rule("fsdp.stages", "zero, pp", lambda zero, pp: (zero == 3) * (pp > 1),
          "Megatron-FSDP excludes pipeline stages"),
    _rule("moe-overlap.virtual", "overlap_experts, pp, vpp", lambda overlap, pp, vpp:
          overlap * (pp > 1) * (vpp == 1), f"--{_OVERLAP} needs virtual pipeline stages"),
    _rule("moe-overlap.recompute", "overlap_experts, recomputed_experts",
          lambda overlap, recomputed: overlap * recomputed,
          f"--{_OVERLAP} excludes recomputed experts"),
    _rule("moe-overlap.mtp", "overlap_experts, mtp", lambda overlap, mtp: overlap * (mtp > 1),
          f"--{_OVERLAP} needs one MTP layer at most"),
    _rule("moe-overlap.hybrid", "overlap_experts, hybrid", lambda overlap, hybrid:
          overlap * hybrid, f"--{_OVERLAP} needs a GPT model, not a hybrid"),
    # Source: TransformerConfig up to core 0.16.
    _rule("moe-overlap.mtp-stages", "overlap_experts, mtp, pp", lambda overlap, mtp, pp:
          overlap * (mtp == 1) * (pp == 1),
          f"--{_OVERLAP} with an MTP layer needs pipeline stages"),
    *ADAPTERS,
    Rule(_id("sft.fsdp"), ("sft", "zero"), lambda sft, zero: sft * (zero == 3),
         "exports load no weights into Megatron-FSDP", level="unpriced"),
    _rule("sft.tp-overlap", "sft, tp_overlap", lambda sft, overlap: sft * overlap,
          "SFT recipes of Megatron-Bridge have no TP overlap"),
)  # fmt: skip
"""Rules for the candidates of a search, over the values of `search.engines.space.values_of`."""
TUNED = (
    _rule("adapters.recipe", "lora_rank, model_name, tuned", lambda rank, name, tuned:
          (rank > 0) > tuned, "Megatron-Bridge 0.6 has no LoRA recipe for {model_name}"),
    _rule("sft.recipe", "sft, model_name, tuned", lambda sft, name, tuned:
          sft > tuned, "Megatron-Bridge 0.6 has no SFT recipe for {model_name}"),
)  # fmt: skip
"""Rules on the models that Megatron-Bridge fine-tunes."""


def _names(rules: Sequence[Rule]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for rule in rules for name in rule.over))


_READ = _names((*RULES, *LAYERS, *WRITTEN, *BY_RELEASE))


def broken_rules(
    setting: Setting, problems: Sequence[Notice] = (), run: Run | None = None
) -> tuple[Notice, ...]:
    """Return one notice for each rule with which Megatron-LM would reject the arguments.

    problems : findings that prevented a run from being read, included in the result.
    run : run of the arguments; None: not read.
    """
    values = setting.values(_READ)
    if run is not None:
        values |= _of_run(setting, run)
    found = broken((*RULES, *LAYERS) if problems else RULES, values)
    # `problems` may contain a rule that is also evaluated here.
    ids = {one.id for one in found}
    return without_repetitions((*(one for one in problems if one.id not in ids), *found))


def _of_run(setting: Setting, run: Run) -> dict[str, Any]:
    """Return the values of rules, by name, that depend on the run."""
    strategy, dp, micro = run.strategy, run.strategy.dp, setting.value("micro_batch")
    start, step = ramp_start(setting), ramp(1)(setting)
    found: dict[str, Any] = {"micro_batches": strategy.micro_batches, "chunks": strategy.vpp}
    found |= mixer_values(run.model)
    if micro is not None:
        found["together"] = micro * dp
        if start is not None and step is not None:
            grows = start < strategy.global_batch and start % (micro * dp) == 0
            found["ramp_second"] = start + step
            found["ramp_micro_batches"] = start // (micro * dp) if grows else None
    return found


def broken_in_some_releases(
    setting: Setting, release: EngineRelease | None = None
) -> tuple[Notice, ...]:
    """Return one notice for each broken rule that only some releases of Megatron-LM enforce.

    release : release that the user names, whose rules are illegal to break; None, or the default:
        every rule is a warning.
    """
    values = setting.values(_names(BY_RELEASE))
    if release is None or not release.given:
        return broken(BY_RELEASE, values)
    return broken((rule for span, rule in _BY_RELEASE if span.has(release.name)), values)


def violated_rules(arguments: Words, world_size: int) -> tuple[Notice, ...]:
    """Return one notice for each rule that exported arguments break on `world_size` GPUs."""
    setting = Setting(arguments, world_size)
    return broken((*RULES, *LAYERS, *WRITTEN), setting.values(_READ))
