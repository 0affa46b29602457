"""Other spellings of options, and options of the peers that are ignored or refused: one table.

Names are written with hyphens; what a command itself calls an option is never an alias there.
Options themselves are fields of the dataclasses that commands fill, read by `options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    "num-gpus": ("num-gpus-per-node",),
    "gpus-per-node": ("num-gpus-per-node",),
    "model-size": ("model",),
    "model-name": ("model",),
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
    """Accepted without an effect -> what to say about them; a value goes with them."""
    flags: frozenset[str] = frozenset()
    """Those of them that have no value, or a 0 or 1."""
    lists: frozenset[str] = frozenset()
    """Those of them that have any number of values."""
    planned: Mapping[str, str] = field(default_factory=dict)
    """Refused: what a search finds -> how to fix it, with `{n}` for the number given. Taken for a
    limit or ignored, they would plan something else than was meant."""
    only_one: Mapping[str, str] = field(default_factory=dict)
    """Degrees that can be 1 (or -1, not given) and nothing else -> why."""


_SEARCHED = "it is searched; use --pin to fix it"
_NOTHING = "it has no meaning here"
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
        "parallel-search": "use --threads",
        "worker": "use --threads",
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
)
_MODEL = Family(
    ignored={
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
    flags=frozenset({"sequence-parallel", "use-flash-attn"}),
)
_PLAN = Family(
    ignored={
        "use-flash-attn": "attention never keeps the matrix of scores",
        "initialize-on-meta": "weights are made piece by piece",
        "profile": "what is measured is printed at the end",
        "check-loss": "losses are always compared",
        "lr": "the executor checks plans and does not train",
        "dropout-prob": "nothing is dropped, so that runs can be compared",
        "epochs": "--steps is enough",
        "train-iters": "--steps is enough",
    },
    flags=frozenset({"use-flash-attn"}),
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
    "profile-model": _MODEL,
    "profile-plan": _PLAN,
}
"""By the name that a command says it belongs to."""
