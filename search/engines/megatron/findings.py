"""What is to say of a launch's arguments: illegal ones, those without effect, variables.

What Megatron-LM refuses is `search.engines.megatron.rules`. What a launch takes is not said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from autopar.records import Record
from autopar.run.launch import BLACKWELL, Launch
from search.engines.arguments import Ignored
from search.engines.megatron.names import RELEASES, alike, concern_of
from search.engines.megatron.rules import (
    VIRTUAL,
    OpenValueError,
    Setting,
    Words,
    broken_before,
    broken_rules,
    decided,
    ramp_start,
)

Kind = Literal["illegal", "not priced", "no effect", "environment", "not understood", "read"]


class Finding(Record):
    """One thing to change in a launch, or to know of it."""

    kind: Kind
    text: str
    """A sentence without its end, that names flags and numbers."""


_WITHOUT: tuple[tuple[tuple[str, ...], Callable[[Setting], bool], str], ...] = (
    (
        ("sequence-parallel",),
        lambda s: s.number("tensor-model-parallel-size") > 1,
        "tensor-model-parallel-size is 1",
    ),
    (
        ("tp-comm-overlap-cfg", "tp-comm-bootstrap-backend"),
        lambda s: s.number("tensor-model-parallel-size") > 1,
        "tensor-model-parallel-size is 1",
    ),
    (
        ("expert-tensor-parallel-size", "moe-grouped-gemm",
         "moe-token-dispatcher-type", "moe-permute-fusion", "moe-router-topk",
         "moe-shared-expert-intermediate-size", "moe-layer-freq",
         "overlap-moe-expert-parallel-comm", "moe-shared-expert-overlap"),
        lambda s: s.has("num-experts"),
        "there are no --num-experts",
    ),
    (
        (*VIRTUAL, "microbatch-group-size-per-virtual-pipeline-stage",
         "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
         "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
        lambda s: s.number("pipeline-model-parallel-size") > 1,
        "pipeline-model-parallel-size is 1",
    ),
    (
        ("cp-comm-type", "hierarchical-context-parallel-sizes"),
        lambda s: s.number("context-parallel-size") > 1,
        "context-parallel-size is 1",
    ),
    (
        ("recompute-modules",),
        lambda s: s.selective,
        "--recompute-granularity is not selective",
    ),
    (
        ("recompute-method", "recompute-num-layers"),
        # with modules they are illegal
        lambda s: s.text("recompute-granularity") == "full" or s.selective,
        "--recompute-granularity is not full",
    ),
    (
        ("fp8-recipe", "fp8-amax-history-len", "fp8-amax-compute-algo",
         "fp8-margin"),
        lambda s: s.has("fp8-format"),
        "there is no --fp8-format",
    ),
    (
        ("num-distributed-optimizer-instances", "use-precision-aware-optimizer"),
        lambda s: s.has("use-distributed-optimizer") or s.has("use-megatron-fsdp"),
        "there is no --use-distributed-optimizer",
    ),
    (
        ("exp-avg-dtype", "exp-avg-sq-dtype"),
        lambda s: s.has("use-precision-aware-optimizer"),
        "there is no --use-precision-aware-optimizer",
    ),
    (
        ("optimizer-offload-fraction", "overlap-cpu-optimizer-d2h-h2d"),
        lambda s: s.has("optimizer-cpu-offload"),
        "there is no --optimizer-cpu-offload",
    ),
    (
        ("offload-modules", "activation-offload-fraction", "min-offloaded-tensor-size"),
        lambda s: s.has("fine-grained-activation-offloading"),
        "there is no --fine-grained-activation-offloading",
    ),
    (
        ("fp4-recipe", "fp4-param-gather"),
        lambda s: s.has("fp4-format"),
        "there is no --fp4-format",
    ),
    (
        ("num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"),
        lambda s: s.has("first-last-layers-bf16"),
        "there is no --first-last-layers-bf16",
    ),
    (
        ("cross-entropy-fusion-impl",),
        lambda s: s.has("cross-entropy-loss-fusion"),
        "there is no --cross-entropy-loss-fusion",
    ),
    (
        ("num-query-groups",),
        lambda s: s.has("group-query-attention"),
        "there is no --group-query-attention",
    ),
    (
        ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"),
        lambda s: s.has("multi-latent-attention"),
        "there is no --multi-latent-attention",
    ),
)  # fmt: skip
"""Flags, what they need, and what is said where that is not so."""


def findings_of(
    words: Words,
    *,
    world_size: int,
    environment: Mapping[str, str],
    gpu: str,
    ignored: tuple[Ignored, ...] = (),
    problem: str | None = None,
    launch: Launch | None = None,
) -> tuple[Finding, ...]:
    """Return what is to say of the arguments of so many GPUs, the illegal first.

    Parameters
    ----------
    environment : what the launch itself sets. gpu : kind of device. ignored : arguments that the
        reading did not need. problem : why the launch could not be read, if so. launch : it,
        if not.
    """
    setting = Setting(words, world_size, gpu.upper())
    misspelt = dict(_misspelt(words))
    found = [
        Finding(
            kind="illegal",
            text=f"--{flag} is no argument of Megatron-LM ({RELEASES}), --{meant} is",
        )
        for flag, meant in misspelt.items()
    ]
    found += [Finding(kind="illegal", text=text) for text in broken_rules(setting, problem, launch)]
    idle = dict(_idle(setting))
    found += [
        Finding(kind="no effect", text=f"--{flag}, since {why}") for flag, why in idle.items()
    ]
    variables = (*decided(_variables(setting, environment, gpu)), *broken_before(setting))
    found += [Finding(kind="environment", text=text) for text in variables]
    found += [Finding(kind="read", text=text) for text in decided(_of_ramp_up(setting))]
    kinds = {*setting.list("cp-comm-type")}
    if len(kinds) > 1 and launch is not None and launch.degrees.cp > 1:
        text = f"--cp-comm-type {' and '.join(sorted(kinds))} by layer: all are priced as p2p"
        found.append(Finding(kind="read", text=text))
    found += [
        _unread(entry)
        for entry in ignored
        # what was said already is not said again
        if not (entry.understood or entry.flag in idle or entry.flag in misspelt)
    ]
    return tuple(dict.fromkeys(found))


def _misspelt(words: Words) -> Iterator[tuple[str, str]]:
    """Yield names that argparse ends with, and those of a release that are a letter or two away.

    A name that is near to none may be that of a fork, or of a script that adds its own.
    """
    for flag in sorted(words):
        meant = alike(flag) if concern_of(flag) is None else None
        if meant is not None:
            yield flag, meant


def _unread(entry: Ignored) -> Finding:
    """Return what is to say of an argument that no price depends on, though it may have to."""
    said = " ".join(f"--{entry.flag} {entry.value[:60]}".split())
    if entry.concern is None:
        return Finding(kind="not understood", text=f"{said} may change time or memory")
    return Finding(
        kind="not priced", text=f"{said} ({entry.concern}) may change time or memory; the rest is"
    )


def _of_ramp_up(setting: Setting) -> Iterator[str]:
    start, batch = ramp_start(setting), setting.number("global-batch-size")
    if start is not None and start != batch:
        yield f"--rampup-batch-size begins with {start} sequences, and {batch} are priced"


def _idle(setting: Setting) -> Iterator[tuple[str, str]]:
    for flags, needed, why in _WITHOUT:
        try:
            if needed(setting):
                continue
        except OpenValueError:
            continue
        for flag in flags:
            given = setting.words.get(flag)
            # a degree of 1 says that there is none
            none = given == ("1",) and flag.endswith(("-parallel-size", "-instances", "-rank"))
            if given is not None and not none:
                yield flag, why


_ORDERED = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
"""Algorithms of NCCL with which `validate_args` lets --deterministic-mode through."""


def _variables(setting: Setting, environment: Mapping[str, str], gpu: str) -> Iterator[str]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = environment.get(name)
    split = (
        setting.number("tensor-model-parallel-size") > 1
        or setting.number("context-parallel-size") > 1
    )
    if setting.has("use-megatron-fsdp") or setting.has("use-torch-fsdp2"):
        if value == "1":
            yield f"{name} is 1, and fully sharded training needs another value or none"
    elif setting.has("overlap-moe-expert-parallel-comm"):
        # where ranks also split layers, validate_args warns that one of both goes without
        if value == "1":
            yield f"{name} is 1, and exchanges of experts beside other kernels need 32"
        if setting.has("tp-comm-overlap") and not gpu.upper().startswith(BLACKWELL):
            yield (
                "--tp-comm-overlap and --overlap-moe-expert-parallel-comm need other values of "
                f"{name} on {gpu}, 1 and 32: one of them hides less than is priced"
            )
    # validate_args of Megatron-LM asks for it on devices before Blackwell
    elif split and not gpu.upper().startswith(BLACKWELL):
        if value is not None and value != "1":
            yield f"{name} is {value}, and tensor or context parallelism needs 1 on {gpu}"
        elif value is None:
            yield f"{name} is not set here, and tensor or context parallelism needs 1 on {gpu}"
    offloads = "NVTE_CPU_OFFLOAD_V1"
    if setting.has("fine-grained-activation-offloading") and environment.get(offloads) != "1":
        yield (
            f"{offloads} is {environment.get(offloads, 'not set here')}, and "
            "--fine-grained-activation-offloading needs 1 with Transformer Engine 2.10 and newer"
        )
    settings = " ".join(
        environment.get(key, "") for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    )
    if (
        setting.has("use-nccl-ub") or setting.has("nccl-ub")
    ) and "expandable_segments:true" in settings.lower():
        yield "--use-nccl-ub registers buffers, which expandable_segments does not allow"
    if setting.has("deterministic-mode"):
        algorithm = environment.get("NCCL_ALGO")
        if algorithm not in _ORDERED:
            given = "not set here" if algorithm is None else algorithm
            yield f"NCCL_ALGO is {given}, and --deterministic-mode needs {', '.join(_ORDERED)}"
