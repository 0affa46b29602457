"""Other spellings of options, and options of the peers that are ignored or refused: one table.

Names are written with hyphens; what a command itself calls an option is never an alias there.
Options themselves are fields of the dataclasses that commands fill, read by `options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from autopar.records import dataclass

__all__ = ["ALIASES", "FAMILIES", "MANUAL", "VALUES", "Family"]

ALIASES: Mapping[str, tuple[str, ...]] = {
    # PaddleNLP
    "memory-upper-limit": ("memory-constraint",),
    "max-tp-size": ("max-tp-deg",),
    "max-pp-size": ("max-pp-deg",),
    "max-sp-size": ("max-sp-deg",),
    "layernum": ("num-layers",),
    "layernum-list": ("num-layers",),
    "layer-num-list": ("num-layers",),
    "hidden-size-list": ("hidden-size",),
    "seqlen-list": ("seq-length",),
    "allreduce-coe-path": ("allreduce-bandwidth-config-path",),
    "p2p-coe-path": ("p2p-bandwidth-config-path",),
    "time-profile-data-path": ("time-profiling-path",),
    "memory-profile-data-path": ("memory-profiling-path",),
    "mixed-precision-type": ("mixed-precision",),
    "search-granularity": ("fine-grained-mode",),
    "bsz-step": ("bsz-scale",),
    # the newest and older releases of the Galvatron engine and its models
    "disable-fsdp": ("disable-sdp",),
    "global-batch": ("settle-bsz", "global-train-batch-size"),
    "global-batch-size": ("settle-bsz", "global-train-batch-size"),
    "num-gpus": ("num-gpus-per-node",),
    "gpus-per-node": ("num-gpus-per-node",),
    "model-size": ("model",),
    "model-name": ("model",),
    "model-name-or-path": ("model",),
    "num-hidden-layers": ("num-layers",),
    "n-layer": ("num-layers",),
    "num-attention-heads": ("num-heads",),
    "n-head": ("num-heads",),
    "num-key-value-heads": ("num-kv-heads",),
    "num-query-groups": ("num-kv-heads",),
    "kv-channels": ("head-dim",),
    "intermediate-size": ("ffn-hidden-size",),
    "n-embd": ("hidden-size",),
    "n-inner": ("ffn-hidden-size",),
    "seqlen": ("seq-length", "seq"),
    "seq": ("seq-length",),
    "seq-length": ("seq",),
    "n-positions": ("seq-length",),
    "reduce-in-fp32": ("fp32-gradients",),
    "sp-time-config-path": ("sp-time-path",),
    "overlap-coe-config-path": ("overlap-coe-path",),
    "precision": ("mixed-precision", "dtype"),
    "dtype": ("mixed-precision",),
    # its profiler of models
    "profile-mode": ("mode",),
    "mixed-precision": ("dtype",),
    "profile-mixed-precision": ("dtype",),
    "profile-batch-size": ("bsz",),
    "profile-fixed-batch-size": ("bsz",),
    "profile-seq-length-list": ("seq",),
    "profile-fixed-seq-length-list": ("seq",),
    "profile-layernum-min": ("layernum-min",),
    "profile-layernum-max": ("layernum-max",),
    "profile-max-tp-deg": ("max-tp-deg",),
    # its runtime
    "pp-size": ("pp-deg",),
    "global-sdp": ("sdp",),
    "vocab-sdp": ("embed-sdp",),
    "global-bsz": ("global-train-batch-size",),
    "galvatron-config-path": ("plan",),
    "dry-run": ("mode=dryrun",),
}
"""Other name -> names of options, of which a command's own is meant; `=` brings the value along."""

VALUES: Mapping[tuple[str, str], str] = {
    ("fine-grained-mode", "coarse-grained"): "0",
    ("fine-grained-mode", "fine-grained"): "1",
    # what measures in place of nccl-tests: here nothing else does
    ("backend", "torch"): "auto",
    ("backend", "paddle"): "auto",
}
"""(option, other spelling of a value) -> value."""


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


@dataclass(frozen=True, kw_only=True)
class Family:
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


_SEARCHED = "it is searched; use --pin to fix it"
_NOTHING = "it has no meaning here"
_ONE_CORE = "the search runs on one core"
_DATA = "it follows from the GPUs and the other degrees: fix those, for example with --pin tp=N"
_PIN_TP, _PIN_PP = "fix it with --pin tp={n}", "fix it with --pin pp={n}"
_PIN_CP, _CHUNKS = (
    "fix it with --max-cp-deg {n} --pin cp={n}",
    "fix it with --settle-chunk {n}",
)
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
    },
    planned={
        "tensor-parallel-degree": _PIN_TP,
        "tensor-model-parallel-size": _PIN_TP,
        "global-tp-deg": _PIN_TP,
        "pipeline-parallel-degree": _PIN_PP,
        "pipeline-model-parallel-size": _PIN_PP,
        "pp-deg": _PIN_PP,
        "context-parallel-degree": _PIN_CP,
        "context-parallel-size": _PIN_CP,
        "global-cp-deg": _PIN_CP,
        "sep-parallel-degree": "fix it with --sp-space sp --pin tp={n}",
        "sharding-parallel-degree": f"{_DATA} (--pin zero3=1 shards the parameters)",
        "data-parallel-degree": _DATA,
        "vocab-tp": "fix it with --pin vtp={n}",
        "chunks": _CHUNKS,
        "gradient-accumulation-steps": _CHUNKS,
    },
    refused={"threads": f"{_ONE_CORE}; searches side by side use more of them"},
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
        **dict.fromkeys(("num-nodes", "num-gpus-per-node", "world-size"), _SHAPE),
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
"""By the name that a command says it belongs to."""
