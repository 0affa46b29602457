"""Other spellings of options, and options of the peers that are ignored or refused: one table.

Names are written with hyphens; what a command itself calls an option is never an alias there.
Options themselves are fields of the dataclasses that commands fill, read by `options`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import field

from autopar.records import Record, replace

_SAME: tuple[tuple[str, str], ...] = (
    # what is trained
    ("model", "model-size model-name model-name-or-path model-path"),
    ("num-layers", "layernum layernum-list layer-num-list num-hidden-layers n-layer n-layers"),
    ("hidden-size", "hidden-size-list n-embd d-model"),
    ("num-heads", "num-attention-heads n-head n-heads"),
    ("num-kv-heads", "num-key-value-heads num-query-groups n-kv-heads"),
    ("head-dim", "kv-channels"),
    ("ffn-hidden-size", "intermediate-size n-inner"),
    ("seq-length seq", "seqlen seq-len sequence-length seqlen-list n-positions max-seq-length"),
    ("seq-length seq", "max-seq-len context-length profile-seq-length ctx ctx-len"),
    ("seq-length seq", "decoder-seq-length max-model-len"),
    ("global-batch-size global-train-batch-size global-batch", "settle-bsz global-bsz gbs"),
    ("global-batch-size global-train-batch-size global-batch", "train-batch-size"),
    ("min-bsz", "min-batch-size"),
    ("max-bsz", "max-batch-size"),
    ("bsz-scale", "bsz-step"),
    # where it runs
    ("hardware", "system cluster"),
    (
        "gpus world-size num-procs num-gpus n-gpus nproc",
        "num-processes total-gpus ngpus num-devices gpu-count",
    ),
    ("nodes num-nodes", "nnodes num-machines"),
    ("gpus-per-node num-gpus-per-node", "nproc-per-node ngpus-per-node num-gpus trainer.devices"),
    ("memory-constraint", "memory-upper-limit memory-limit memory memory-budget gpu-memory"),
    ("memory-constraint", "vram max-memory"),
    ("price", "price-per-hour gpu-price gpu-hour-price price-per-gpu-hour cost-per-gpu-hour"),
    ("engine", "framework backend trainer"),
    # degrees: Megatron-LM, torchtitan, DeepSpeed, accelerate, Galvatron, Calculon, SimuMax
    ("tp global-tp-deg", "tensor-model-parallel-size tensor-parallel-degree tensor-parallel-size"),
    ("tp global-tp-deg", "tp-size tp-degree tp-deg tensor-par model-parallel-size autotp-size"),
    ("tp global-tp-deg", "megatron-lm-tp-degree parallelism-config-tp-size"),
    ("pp pp-deg", "pipeline-model-parallel-size pipeline-parallel-degree pipeline-parallel-size"),
    ("pp pp-deg", "pp-size pp-degree pipeline-par pipe-parallel-size megatron-lm-pp-degree"),
    ("cp", "context-parallel-size context-parallel-degree global-cp-deg cp-size cp-degree cp-deg"),
    ("cp", "parallelism-config-cp-size"),
    ("ep", "expert-model-parallel-size expert-parallel-degree expert-parallel-size global-ep-deg"),
    ("ep", "ep-size ep-degree moe-expert-parallel-size"),
    ("etp", "expert-tensor-parallel-size expert-tensor-parallel-degree etp-size"),
    ("dp", "data-parallel-size data-parallel-degree dp-size dp-degree data-par"),
    ("dp-replicate", "data-parallel-replicate-degree num-distributed-optimizer-instances"),
    ("dp-replicate", "parallelism-config-dp-replicate-size"),
    ("vpp", "virtual-pipeline-model-parallel-size num-virtual-stages-per-pipeline-rank"),
    ("vpp", "virtual-pp-degree vpp-size vp-size pipeline-interleaving interleaving-size"),
    ("schedule", "pipeline-parallel-schedule"),
    ("zero", "zero-stage zero-state data-parallel-sharding-strategy fsdp-sharding-strategy"),
    ("zero", "sharding zero-optimization.stage fsdp sharding-strategy fsdp-reshard-after-forward"),
    ("micro-batch-size", "microbatch-size micro-bsz mbs train-micro-batch-size-per-gpu"),
    ("micro-batch-size", "per-device-train-batch-size pipeline-parallel-microbatch-size"),
    ("micro-batches microbatches chunks", "settle-chunk num-micro-batches num-microbatches"),
    ("micro-batches microbatches chunks", "micro-batch-num gradient-accumulation-steps"),
    ("micro-batches microbatches chunks", "megatron-lm-num-micro-batches"),
    ("recompute", "recompute-granularity activation-recompute activation-checkpoint.mode"),
    ("recompute", "fsdp-activation-checkpointing activations-checkpoint-granularity"),
    ("recompute", "recompute-modules"),
    ("sequence-parallel", "enable-sequence-parallel megatron-lm-sequence-parallelism"),
    ("dispatcher", "moe-token-dispatcher-type moe-dispatcher-policy expert-parallel-comm-backend"),
    ("moe-overlap", "overlap-moe-expert-parallel-comm"),
    ("tp-overlap", "tp-comm-overlap enable-async-tensor-parallel"),
    ("compile", "torch-compile compile.enable training.compile"),
    ("cp-kind", "cp-comm-type"),
    ("max-tp-deg", "max-tp-size profile-max-tp-deg"),
    ("max-pp-deg", "max-pp-size"),
    ("max-sp-deg", "max-sp-size"),
    ("disable-sdp", "disable-fsdp"),
    ("fine-grained-mode", "search-granularity"),
    # numbers and states
    ("mixed-precision dtype precision datatype", "mixed-precision-type profile-mixed-precision"),
    ("mixed-precision dtype precision datatype", "mixed-precision-param"),
    ("precision", "fp8-recipe compute-dtype"),
    ("fp32-gradients", "reduce-in-fp32 accumulate-allreduce-grads-in-fp32"),
    ("offload-optimizer", "optimizer-offload-fraction offload-optimizer-device"),
    ("offload-activations", "offload-modules"),
    ("lora", "lora-rank lora-r"),
    # files
    ("allreduce-bandwidth-config-path", "allreduce-coe-path"),
    ("p2p-bandwidth-config-path", "p2p-coe-path"),
    ("overlap-coe-path", "overlap-coe-config-path"),
    ("sp-time-path", "sp-time-config-path"),
    ("time-profiling-path", "time-profile-data-path"),
    ("memory-profiling-path", "memory-profile-data-path"),
    ("why-not", "whynot"),
    ("plan", "galvatron-config-path"),
    ("out output-config-path", "output output-dir save-dir"),
    # profilers and the runtime of Galvatron
    ("mode", "profile-mode"),
    ("bsz", "profile-batch-size profile-fixed-batch-size"),
    ("seq", "profile-seq-length-list profile-fixed-seq-length-list"),
    ("layernum-min", "profile-layernum-min"),
    ("layernum-max", "profile-layernum-max"),
    ("sdp", "global-sdp"),
    ("embed-sdp", "vocab-sdp"),
)
"""Names that options have and that mean the same, the preferred first, and other spellings."""
_IMPLIED: Mapping[str, str] = {
    "dry-run": "mode=dryrun",
    # Megatron-LM's
    "use-distributed-optimizer": "zero=1",
    "use-torch-fsdp2": "zero=3",
    "recompute-activations": "recompute=core_attn",
    "optimizer-cpu-offload": "offload-optimizer=1",
    "bf16": "mixed-precision=bf16",
    "fp16": "mixed-precision=fp16",
    # DeepSpeed's, and what its users say
    "bf16.enabled": "mixed-precision=bf16",
    "fp16.enabled": "mixed-precision=fp16",
    **{f"zero{stage}": f"zero={stage}" for stage in range(4)},
    "use-fsdp": "zero=3",
    # accelerate's and transformers'
    "megatron-lm-use-distributed-optimizer": "zero=1",
    "megatron-lm-recompute-activations": "recompute=core_attn",
    "gradient-checkpointing": "recompute=full",
    "checkpoint-activations": "recompute=full",
}
"""Switches that say a value of an option."""


def _aliases() -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for own, others in _SAME:
        names = own.split()
        for name in (*names, *others.split()):
            found.setdefault(name, []).extend(one for one in names if one != name)
    return {
        **{name: tuple(dict.fromkeys(to)) for name, to in found.items() if to},
        **{name: (to,) for name, to in _IMPLIED.items()},
    }


ALIASES: Mapping[str, tuple[str, ...]] = _aliases()
"""Other name -> names of options, of which a command's own is meant; `=` brings the value along."""

AMBIGUOUS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "num-gpus": (("gpus", "in all"), ("gpus-per-node", "of each node")),
    **dict.fromkeys(
        ("batch-size", "bsz", "batch"),
        (("global-batch-size", "of a step"), ("micro-batch-size", "of a GPU at a time")),
    ),
    **dict.fromkeys(
        ("micro-batch", "microbatch"),
        (("micro-batch-size", "samples of each"), ("micro-batches", "how many")),
    ),
}
"""Name that may mean several options of a command, each with what it counts: it has to be said."""

SHORT: Mapping[str, str] = {
    # of Megatron-Bridge's run scripts
    "ng": "gpus",
    "gn": "gpus-per-node",
    "mb": "micro-batch-size",
    "gb": "global-batch-size",
    "vp": "vpp",
    "et": "etp",
    "o": "out",
    "v": "verbose",
}
"""What follows one hyphen -> a name; names of their own, as vLLM's `-tp`, are taken as well."""

JOINED: frozenset[str] = frozenset({"recompute-modules", "offload-modules"})
"""Names that are followed by several words, which are one value here: `core_attn+mlp`."""

_OF_MODEL = ("model", "--model NAME|config.json, which says it")
_ULYSSES = ("cp-kind", "--cp N --cp-kind a2a, which exchanges heads for tokens")
_SHARDED = ("zero", "--zero 3, --dp N or both? it follows from the GPUs and the other degrees")
_FP8 = ("precision", "--precision fp8, fp8-blockwise, mxfp8 or nvfp4")
HINTS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("num-experts", "num-local-experts", "n-routed-experts", "num-moe-experts", "flavor"),
        _OF_MODEL,
    ),
    **dict.fromkeys(("moe-router-topk", "num-experts-per-tok", "moe-topk", "top-k"), _OF_MODEL),
    **dict.fromkeys(("moe-ffn-hidden-size", "moe-intermediate-size", "swiglu"), _OF_MODEL),
    **dict.fromkeys(("multi-latent-attention", "group-query-attention"), _OF_MODEL),
    "model.name": _OF_MODEL,
    **dict.fromkeys(("use-ulysses", "ulysses", "ulysses-degree", "sp-degree", "sp-size"), _ULYSSES),
    **dict.fromkeys(("ulysses-sequence-parallel-size", "sequence-parallel-size"), _ULYSSES),
    "parallelism-config-sp-size": _ULYSSES,
    **dict.fromkeys(("quantization", "quantize.linear.float8.recipe-name", "fp8-hybrid"), _FP8),
    **dict.fromkeys(("dp-shard", "dp-shard-size", "parallelism-config-dp-shard-size"), _SHARDED),
    "vocab-sdp": ("pin", "--pin vzero3=1"),
    "enable-expert-parallel": ("ep", "--ep N"),
    "recompute-num-layers": ("recompute", "--recompute 'block N', of each chunk of a stage"),
    "recompute-method": ("recompute", "--recompute full, or 'block N'"),
    "selective-ac-option": ("recompute", "--recompute op"),
    "no-recompute": ("recompute", "--recompute none"),
    "ddp": ("zero", "--zero 0"),
    **dict.fromkeys(("sdp", "global-sdp"), ("zero", "--zero 3")),
    **dict.fromkeys(("interleave", "interleaved"), ("vpp", "--vpp N")),
    "zero-optimization.offload-optimizer.device": ("offload-optimizer", "--offload-optimizer 1"),
    **dict.fromkeys(
        ("offload-param", "offload-param-device", "zero-optimization.offload-param.device"),
        ("offload-optimizer", "--offload-optimizer 1? weights stay on the GPUs here"),
    ),
    "cost": ("price", "--price X (dollars of a GPU-hour) or --goal cost"),
    "gpu": ("hardware", "--hardware h100:8x8 (which) or --gpus N (how many)"),
    "device": ("hardware", "--hardware h100:8x8"),
    "compile": ("stack", "--stack torchtitan-compiled"),
    "compile.enable": ("stack", "--stack torchtitan-compiled"),
}
"""Name that no option has and the words of it mislead about -> an option that a command has to have
for it, and what is meant, with its value."""

ELSEWHERE: Mapping[str, str] = {
    "why-not": "autopar-explain FILE --why-not tp=8",
    "to": "autopar-export FILE --to megatron",
    "from": "autopar-export --from megatron FILE",
    "strict": "autopar-check FILE --strict",
    "like": "autopar cards --like h100",
    "html": "autopar-explain FILE --html page.html",
    "trace": "autopar-explain FILE --trace trace.json",
    "compare": "autopar compare A B",
}
"""Option that one command has and others are asked for -> the command line that does it."""

_FULLY = ("true", "1", "full_block")
_FSDP = (("full_shard", "3"), ("shard_grad_op", "2"), ("no_shard", "0"))
VALUES: Mapping[tuple[str, str], str] = {
    ("fine-grained-mode", "coarse-grained"): "0",
    ("fine-grained-mode", "fine-grained"): "1",
    # what measures in place of nccl-tests: here nothing else does
    ("backend", "torch"): "auto",
    ("backend", "paddle"): "auto",
    ("engine", "megatron-lm"): "megatron",
    ("engine", "megatron-core"): "megatron",
    ("engine", "fsdp"): "torchtitan",
    ("engine", "fsdp2"): "torchtitan",
    ("data-parallel-sharding-strategy", "no_shard"): "0",
    ("data-parallel-sharding-strategy", "optim"): "1",
    ("data-parallel-sharding-strategy", "optim_grads"): "2",
    ("data-parallel-sharding-strategy", "optim_grads_params"): "3",
    ("fsdp-sharding-strategy", "full_shard"): "3",
    ("fsdp-sharding-strategy", "shard_grad_op"): "2",
    ("fsdp-sharding-strategy", "no_shard"): "0",
    # accelerate numbers them from 1, and no sharding is the third
    ("fsdp-sharding-strategy", "1"): "3",
    ("fsdp-sharding-strategy", "3"): "0",
    ("sharding", "stage1"): "1",
    ("sharding", "stage2"): "2",
    ("sharding", "stage3"): "3",
    **{("fsdp", word): stage for word, stage in _FSDP},
    **{("sharding-strategy", word): stage for word, stage in _FSDP},
    # who gathers weights again for the backward has sharded them; who keeps them, gradients alone
    ("fsdp-reshard-after-forward", "true"): "3",
    ("fsdp-reshard-after-forward", "always"): "3",
    ("fsdp-reshard-after-forward", "false"): "2",
    ("fsdp-reshard-after-forward", "never"): "2",
    ("recompute-granularity", "selective"): "core_attn",
    ("activations-checkpoint-granularity", "selective"): "core_attn",
    # Calculon's recomputes what is quadratic in the tokens
    ("activation-recompute", "attn_only"): "core_attn",
    # torchtitan's selects operations
    ("activation-checkpoint.mode", "selective"): "op",
    **{("recompute", word): "full" for word in _FULLY},
    ("recompute", "false"): "none",
    ("recompute", "0"): "none",
    ("dispatcher", "all2all"): "alltoall",
    ("dispatcher", "standard"): "alltoall",
    ("dispatcher", "deepep"): "flex",
    ("cp-kind", "p2p"): "ring",
    ("cp-kind", "all_gather"): "all-gather",
    ("cp-kind", "allgather"): "all-gather",
    ("mixed-precision", "bfloat16"): "bf16",
    ("mixed-precision", "float16"): "fp16",
    ("mixed-precision", "float32"): "fp32",
    ("mixed-precision", "no"): "fp32",
    ("fp8-recipe", "delayed"): "fp8",
    ("fp8-recipe", "tensorwise"): "fp8",
    ("fp8-recipe", "blockwise"): "fp8-blockwise",
    ("compute-dtype", "fp8_cs"): "fp8",
    ("compute-dtype", "fp8_ds"): "fp8",
    ("compute-dtype", "fp8_sc"): "fp8-blockwise",
    ("compute-dtype", "fp8_mx"): "mxfp8",
    ("goal", "cheapest"): "cost",
    ("goal", "fastest"): "throughput",
    ("goal", "speed"): "throughput",
    ("goal", "smallest"): "fewest-gpus",
    ("goal", "min-gpus"): "fewest-gpus",
    ("offload-optimizer-device", "cpu"): "1",
    ("offload-optimizer-device", "none"): "0",
}
"""(name as it was written or as the option has it, other spelling of a value) -> value."""


MANUAL: Mapping[str, tuple[str, ...]] = {
    "set-model-config-manually": (
        "hidden-size",
        "ffn-hidden-size",
        "head-dim",
        "num-heads",
        "num-kv-heads",
        "num-layers",
        "seq-length",
        "vocab-size",
    ),
    "set-layernum-manually": ("num-layers",),
    "set-seqlen-manually": ("seq-length",),
}
"""Galvatron's switches -> the sizes that follow them: 1 uses these sizes, 0 those of the model.

Of what neither names, sizes given are used.
"""


class Family(Record):
    """What some commands answer to options of the peers that they do not have."""

    ignored: Mapping[str, str] = field(default_factory=dict)
    """Accepted without an effect -> what to say about them; a value goes with them. A name that
    ends in a hyphen stands for all that begin with it."""
    flags: frozenset[str] = frozenset()
    """Those of them that have no value, or a 0 or 1."""
    lists: frozenset[str] = frozenset()
    """Those of them that have any number of values."""
    planned: Mapping[str, str] = field(default_factory=dict)
    """Refused: what a search finds -> how to fix it, with `{n}` for the number given. Taken for a
    limit or ignored, they would plan something else than was meant."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Refused: what may be looked for here -> why it is not there."""
    only_one: Mapping[str, str] = field(default_factory=dict)
    """Degrees that can be 1 (or -1, not given) and nothing else -> why."""


_SEARCHED = "it is searched; use --pin vzero3=1 to fix it"
_NOTHING = "it has no meaning here"
_OVERLAPPED = "launches have it wherever their trainer does"
_ONE_STEP = "a step is planned, however many are trained"
_ONE_CORE = "the search runs on one core"
_DATA = "it follows from the GPUs and the other degrees; fix it with --zero 3, --dp N or both"
_SERVING = "it is of serving, and here training is planned"
_A_LAUNCH = "it is a launch that exists: autopar check FILE reads it"
_SEARCH = Family(
    ignored={
        "embed-sdp": _SEARCHED,
        "recommend-min-bsz": "every batch of the range is considered",
        "use-pipeline-costmodel": "the pipeline is always part of the cost",
        "costmodel-coe": "costs are not scaled",
        "debug-costmodel-coe": "costs are not scaled",
        "parallel-search": _ONE_CORE,
        "worker": _ONE_CORE,
        "log-dir": "no log files are written",
        "num-layertype": "the number of layer types follows from --num-layers",
        "profile-gpu-num": "files name their own groups",
        "profile-unit": _NOTHING,
        "shape-order": _NOTHING,
        "use-flash-attn": "the profile says what was measured",
        "dropout-prob": _NOTHING,
        "set-experts-manually": _NOTHING,
        "is-moe-model": "MoE layers are planned at expert degree 1",
        "debug-config-path": _NOTHING,
        "load-params": "weights have no part in a plan",
        "max-position-embeddings": "--seq-length says how many tokens are trained",
        **dict.fromkeys(("overlap-grad-reduce", "overlap-param-gather"), _OVERLAPPED),
        **dict.fromkeys(("train-iters", "train-samples", "max-steps", "lr"), _ONE_STEP),
        "fsdp-version": "of PyTorch's, FSDP2 is planned",
        "fine-grained-activation-offloading": "--offload-activations says which",
    },
    flags=frozenset(
        {"overlap-grad-reduce", "overlap-param-gather", "fine-grained-activation-offloading"}
    ),
    planned={
        "sep-parallel-degree": "fix it with --sp-space sp --pin tp={n}",
        "sharding-parallel-degree": _DATA,
        "data-parallel-shard-degree": _DATA,
        "vocab-tp": "fix it with --pin vtp={n}",
        "num-layers-per-virtual-pipeline-stage": "fix it with --vpp V, chunks of a stage: "
        "V = layers / (pp * {n})",
        "local-batch-size": "fix it with --global-batch-size N, of all data ranks",
    },
    refused={
        "threads": f"{_ONE_CORE}; searches side by side use more of them",
        **dict.fromkeys(("isl", "osl", "ttft", "tpot"), _SERVING),
        **dict.fromkeys(("max-num-seqs", "max-num-batched-tokens", "kv-cache-dtype"), _SERVING),
        **dict.fromkeys(("deepspeed", "deepspeed-config", "config-file"), _A_LAUNCH),
        "fp8-format": "it says no more than that it is fp8; give --precision fp8, fp8-blockwise "
        "or mxfp8",
    },
)
_ONE_CLUSTER = "files that were measured are of one cluster: autopar-search plans with them"
_SHAPE = "every --hardware says its own, CARD:NxG"
_CALCULON = "it is of a closed form: autopar-explore calculon --help"
_TENSOR2D = "it is of a closed form: autopar-explore tensor2d --help"
_EXPLORE = replace(
    _SEARCH,
    refused={
        **_SEARCH.refused,
        **dict.fromkeys(("time-profiling-path", "memory-profiling-path"), _ONE_CLUSTER),
        **dict.fromkeys(("allreduce-bandwidth-config-path", "overlap-coe-path"), _ONE_CLUSTER),
        **dict.fromkeys(("p2p-bandwidth-config-path", "sp-time-path"), _ONE_CLUSTER),
        **dict.fromkeys(("nodes", "num-nodes", "nnodes", "gpus", "world-size"), _SHAPE),
        **dict.fromkeys(("gpus-per-node", "num-gpus-per-node"), _SHAPE),
        **dict.fromkeys(("application", "num-procs", "max-batch"), _CALCULON),
        **dict.fromkeys(("system", "objective", "sweep"), _CALCULON),
        **dict.fromkeys(("num-gpus", "batch", "strategy"), _TENSOR2D),
        **dict.fromkeys(("evaluate", "frontier", "top"), "autopar-search has it, for one question"),
    },
)
_DEPTH = "layers are measured one by one; --layernum-max says how many whole forwards have"
_WEIGHTS = "weights are random, nothing is loaded or saved"
_TOKENS = "tokens are made up, no data are read"
_OPTIMIZER = "the optimizer is AdamW with its usual settings, whose values change no time or memory"
_KERNELS = "kernels are those of torch"
_RECIPES = {
    **dict.fromkeys(("load", "load-iteration", "load-params", "save", "save-interval"), _WEIGHTS),
    **dict.fromkeys(("distributed-checkpoint", "save-total-limit"), _WEIGHTS),
    **dict.fromkeys(("data-path", "split", "input-dir", "num-workers"), _TOKENS),
    **dict.fromkeys(("vocab-file", "merge-file", "tokenizer-type", "tokenizer-model"), _TOKENS),
    **dict.fromkeys(("tokenizer-name-or-path", "distributed-dataloader"), _TOKENS),
    **dict.fromkeys(("dataloader-num-workers", "max-seq-length"), _TOKENS),
    **dict.fromkeys(("adam-weight-decay", "weight-decay", "adam-beta1", "adam-beta2"), _OPTIMIZER),
    **dict.fromkeys(("adam-eps", "clip-grad", "max-grad-norm", "init-method-std"), _OPTIMIZER),
    **dict.fromkeys(("min-lr", "lr-decay-style", "lr-warmup-fraction", "warmup-ratio"), _OPTIMIZER),
    **dict.fromkeys(("learning-rate", "min-learning-rate"), _OPTIMIZER),
    **dict.fromkeys(("use-fused-", "fuse-", "fused-", "enable-linear-fused-"), _KERNELS),
    **dict.fromkeys(("eval-iters", "do-eval", "do-predict", "do-train"), "nothing is evaluated"),
}
"""Of training scripts, in whose words the profilers are started as well."""
_RUN = "the profiler decides how it runs a layer"
_DEGREES = "layers are measured at the tensor degrees of --tp, in one process"
_RECOMPUTED = "memory is counted with and without recomputation"
_PADDLE = {
    **dict.fromkeys(("max-steps", "logging-steps", "continue-training", "disable-tqdm"), _RUN),
    **dict.fromkeys(("skip-profile-timer", "skip-memory-metrics", "enable-auto-parallel"), _RUN),
    **dict.fromkeys(("to-static", "profile-time-flag", "profile-forward-only"), _RUN),
    **dict.fromkeys(("save-time-flag", "profile-memory-flag", "save-memory-flag"), _RUN),
    **dict.fromkeys(
        ("per-device-train-batch-size", "gradient-accumulation-steps"), "--bsz says it"
    ),
    **dict.fromkeys(("sharding-parallel-degree", "sharding", "tensor-parallel-degree"), _DEGREES),
    **dict.fromkeys(("pipeline-parallel-degree", "virtual-pp-degree"), _DEGREES),
    **dict.fromkeys(("pipeline-schedule-mode", "sep-parallel-degree"), _DEGREES),
    **dict.fromkeys(("pipeline-parallel-config", "data-parallel-config"), _DEGREES),
    **dict.fromkeys(("sharding-parallel-config", "tensor-parallel-config"), _DEGREES),
    **dict.fromkeys(("recompute", "recompute-use-reentrant"), _RECOMPUTED),
    **dict.fromkeys(("recompute-granularity", "pp-recompute-interval"), _RECOMPUTED),
    **dict.fromkeys(("bf16", "fp16-opt-level", "amp-master-grad"), "--dtype says it"),
    **dict.fromkeys(("amp-custom-black-list", "amp-custom-white-list"), "--dtype says it"),
    "use-flash-attention": "attention never keeps the matrix of scores",
}
"""Of PaddleNLP's profile_memory.sh and profile_computation.sh, which are those of its trainer."""
_BARE = frozenset(
    {"use-fused-", "fuse-", "fused-", "enable-linear-fused-", "distributed-checkpoint"}
)
_MODEL = Family(
    ignored={
        **_RECIPES,
        **_PADDLE,
        **dict.fromkeys(("num-layers", "num-hidden-layers", "n-layer", "layernum"), _DEPTH),
        "profile-dp-type": "model states are counted, whatever is sharded by data",
        "profile-flow-control": "everything runs in this process",
        "sequence-parallel": "memory is written with and without it",
        "use-flash-attn": "attention never keeps the matrix of scores",
        "shape-order": "the layers have their own",
        "num-layertype": "the model says it",
        "extra-args-str": "no other program is started",
        "runtime-yaml-template-path": "no other program is started",
        "max-per-device-train-batch-size": "--bsz says it",
    },
    flags=_BARE | {"sequence-parallel", "use-flash-attn", "use-flash-attention"},
    lists=frozenset({"amp-custom-black-list", "amp-custom-white-list"}),
)
_PLAN = Family(
    ignored={
        **_RECIPES,
        "save-profiled-memory": "--json FILE keeps what was measured",
        "profile-type": "--mode says it",
        "use-flash-attn": "attention never keeps the matrix of scores",
        "initialize-on-meta": "weights are made piece by piece",
        "profile": "what is measured is printed at the end",
        "check-loss": "losses are always compared",
        "lr": "the executor checks plans and does not train",
        "dropout-prob": "nothing is dropped, so that runs can be compared",
        "epochs": "--steps is enough",
        "train-iters": "--steps is enough",
    },
    flags=_BARE | {"use-flash-attn"},
    only_one={
        "global-cp-deg": "ring attention is not run here",
        "vocab-cp": "ring attention is not run here",
        "global-ep-deg": "experts are not divided here",
    },
)
_TORCHRUN = "torchrun starts the ranks and has an option for it"
_NO_TESTS = "torch's own collectives are timed, no program of others"
_HARDWARE = Family(
    ignored={
        "hostfile": "torchrun starts the ranks, on every machine",
        "master-addr": _TORCHRUN,
        "master-port": _TORCHRUN,
        "node-rank": _TORCHRUN,
        "envs": "set variables before torchrun, which hands them on; those of NCCL are recorded",
        "nccl-test-dir": _NO_TESTS,
        "mpi-path": _NO_TESTS,
        "avg-or-min-or-first": "all groups of a size work at once, and the slowest counts",
        "overlap-time-multiply": "each is measured with the other at work all the time",
    },
    lists=frozenset({"envs"}),
)
FAMILIES: Mapping[str, Family] = {
    "": Family(),
    "profile-hardware": _HARDWARE,
    "search": _SEARCH,
    "explore": _EXPLORE,
    "profile-model": _MODEL,
    "profile-plan": _PLAN,
}
"""By the name that a command says it belongs to. What a family says of a name counts before what
it would mean as an alias."""
