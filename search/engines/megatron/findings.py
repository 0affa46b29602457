"""Findings on Megatron-LM arguments: broken rules, flags without effect, environment variables.

The rules are in `search.engines.megatron.rules`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from autopar.run.rules import Notice, notice, without_repetitions
from autopar.run.run import Run
from autopar.run.runtime import BLACKWELL
from search.engines.arguments import Ignored, spelled_variable
from search.engines.engine import EngineRelease
from search.engines.megatron.names import (
    RELEASES,
    REMOVED,
    alike,
    concern_of,
    names_about,
    spans_of,
)
from search.engines.megatron.rules import broken_in_some_releases, broken_rules
from search.engines.megatron.setting import STEPS, VIRTUAL, Setting, Words
from search.engines.reader import release_notices, unread


class _UnusedFlags(NamedTuple):
    """Flags that have no effect if `rest`, a function of the values named in `over`, is true."""

    flags: tuple[str, ...]
    over: tuple[str, ...]
    rest: Callable[..., Any]
    why: str


def _without(flag: str, *flags: str, others: tuple[str, ...] = ()) -> _UnusedFlags:
    """Return the condition: `flags` have no effect unless `flag` or one of `others` is given."""
    return _UnusedFlags(flags, (flag, *others), lambda *given: sum(given) == 0, f"no --{flag}")


def _alone(flag: str, number: str, *flags: str) -> _UnusedFlags:
    """Return the condition: `flags` have no effect if the degree `number`, set by `flag`, is 1."""
    return _UnusedFlags(flags, (number,), lambda degree: degree == 1, f"{flag} is 1")


_FLAG = re.compile(r"(?<![\w-])--([a-z0-9-]+)")
_IDLE = (
    _alone("tensor-model-parallel-size", "tp", "sequence-parallel"),
    _alone("tensor-model-parallel-size", "tp", "tp-comm-overlap-cfg", "tp-comm-bootstrap-backend"),
    _UnusedFlags(("expert-tensor-parallel-size", *(
        flag for flag in names_about("experts") if flag != "num-experts")),
          ("num-experts",), lambda given: given == 0, "no --num-experts"),
    _alone("pipeline-model-parallel-size", "pp", *VIRTUAL,
           "microbatch-group-size-per-virtual-pipeline-stage",
           "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
           "no-batch-p2p-comm", "disable-batch-p2p-comm", "no-batch-p2p-sync",
           "disable-batch-p2p-sync", "no-scatter-gather-tensors-in-pipeline", "delay-grad-reduce",
           "no-delay-grad-reduce", "delay-param-gather", "no-align-grad-reduce",
           "disable-align-grad-reduce", "no-align-param-gather", "deallocate-pipeline-outputs",
           "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
    _alone("context-parallel-size", "cp", "cp-comm-type", "hierarchical-context-parallel-sizes"),
    _UnusedFlags(("recompute-modules",), ("selective",), lambda selective: selective == 0,
          "--recompute-granularity is not selective"),
    # With selective recomputation these flags are illegal, which is a rule.
    _UnusedFlags(("recompute-method", "recompute-num-layers"),
          ("recompute-granularity=full", "selective"),
          lambda full, selective: full + selective == 0, "--recompute-granularity is not full"),
    _without("fp8-format", "fp8-recipe", "fp8-amax-history-len", "fp8-amax-compute-algo",
             "fp8-margin"),
    _without("use-distributed-optimizer", "num-distributed-optimizer-instances",
             "use-precision-aware-optimizer", others=("use-megatron-fsdp",)),
    _without("use-precision-aware-optimizer", "exp-avg-dtype", "exp-avg-sq-dtype"),
    _without("optimizer-cpu-offload", "optimizer-offload-fraction",
             "overlap-cpu-optimizer-d2h-h2d", "use-torch-optimizer-for-cpu-offload",
             "no-pin-cpu-grads", "no-pin-cpu-params"),
    _without("tp-comm-overlap", *(
        flag for flag in names_about("exchanges")
        if "tp-comm-" in flag and flag not in ("tp-comm-overlap", "tp-comm-overlap-cfg"))),
    _without("use-megatron-fsdp", "fsdp-double-buffer", "fsdp-manual-registration",
             "suggested-communication-unit-size", "keep-fp8-transpose-cache",
             "keep-fp8-transpose-cache-when-using-custom-fsdp", "megatron-fsdp-version",
             "enable-full-sharding-in-hsdp", "fsdp-db-use-persist-buf-on-alloc-fail",
             "megatron-fsdp-max-pool-double-buffer",
             "megatron-fsdp-enable-fine-grained-param-gather", others=("use-custom-fsdp",)),
    _without("cuda-graph-impl", "cuda-graph-modules",
             others=("enable-cuda-graph", "external-cuda-graph", "cuda-graph-scope")),
    _without("fine-grained-activation-offloading", "offload-modules",
             "activation-offload-fraction", "min-offloaded-tensor-size"),
    _without("fp4-format", "fp4-recipe", "fp4-param-gather"),
    _without("first-last-layers-bf16", "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"),
    _without("cross-entropy-loss-fusion", "cross-entropy-fusion-impl"),
    _without("group-query-attention", "num-query-groups"),
    _UnusedFlags(("muon-no-split-qkv", "muon-fp32-matmul-prec", "muon-num-ns-steps", "muon-tp-mode",
                  "muon-coefficient-type", "muon-use-syrk", "muon-scalar-optimizer"), ("muon",),
                 lambda muon: muon == 0, "--optimizer is not muon"),
    _UnusedFlags(("num-layers", "moe-layer-freq"), ("hybrid",), lambda hybrid: hybrid == 1,
                 "--hybrid-layer-pattern has the layers"),
    _without("multi-latent-attention", "q-lora-rank", "kv-lora-rank", "qk-head-dim",
             "qk-pos-emb-head-dim", "v-head-dim"),
)  # fmt: skip
"""Conditions under which flags have no effect."""


def findings_of(
    words: Words,
    *,
    world_size: int,
    environment: Mapping[str, str],
    gpu: str,
    ignored: tuple[Ignored, ...] = (),
    problems: tuple[Notice, ...] = (),
    run: Run | None = None,
    declares: bool = False,
    release: EngineRelease | None = None,
) -> tuple[Notice, ...]:
    """Return the findings on the arguments of a run, illegal ones first.

    world_size : number of GPUs.
    environment : environment variables of the ranks.
    gpu : GPU model.
    ignored : arguments that the reader did not use.
    problems : findings that prevented the arguments from being read as a run.
    run : run of the arguments; None: not read.
    declares : True if the program may declare arguments that Megatron-LM does not have.
    release : release of Megatron-LM; None: the settings are not arguments of its parser.
    """
    setting = Setting(words, world_size, gpu.upper())
    misspelt = dict(_misspelt(words))
    found = (
        []
        if declares
        else [
            notice(
                "megatron.misspelt",
                "illegal",
                "--{flag} is not an argument of Megatron-LM ({releases})",
                "Use --{meant}",
                flag=flag,
                releases=RELEASES,
                meant=meant,
            )
            for flag, meant in misspelt.items()
        ]
    )
    found += broken_rules(setting, problems, run)
    # An argument of an illegal combination has an effect: the run does not start.
    named = {flag for one in found for flag in _FLAG.findall(one.problem)}
    idle = {flag: one for one in _idle(setting) if (flag := str(one.values["flag"])) not in named}
    found += idle.values()
    found += (*_variables(setting, environment, gpu), *broken_in_some_releases(setting, release))
    if release is not None:
        rows = (
            (f"--{key.replace('=', ' ')}", span)
            for flag in sorted(words)
            for key, span in spans_of(flag, words[flag]).items()
        )
        found += release_notices("megatron", release, rows, sure=not declares)
    batch = setting.value("global_batch")
    for flag, name in (("rampup-batch-size", "ramp_start"), (STEPS, "first_step")):
        start = setting.value(name)
        if start is not None and batch is not None and start != batch:
            text = "--{flag} begins with {start} sequences, and {batch} are priced"
            found.append(notice("megatron.ramp", "read", text, flag=flag, start=start, batch=batch))
    kinds = {*setting.list("cp-comm-type")}
    if len(kinds) > 1 and run is not None and run.split.cp > 1:
        text = "--cp-comm-type {kinds} by layer: all are priced as p2p"
        kind = " and ".join(sorted(kinds))
        found.append(notice("megatron.cp-comm-types", "read", text, kinds=kind))
    if run is not None and run.runtime.optimizer.kind == "muon" and run.split.tp == 1:
        text = "time of Muon's Newton-Schulz iterations is derived from GEMM rates, not measured"
        found.append(notice("megatron.muon", "read", text))
    if setting.value("optimizer=dist_muon"):
        # `LayerWiseDistributedOptimizer` shards the states, but not the gradients
        text = "--optimizer dist_muon shards states by layer: its time is not known"
        found.append(notice("megatron.dist-muon", "not priced", text, withdraws=("time",)))
    if run is not None and run.kernels.graphs != "none":
        text = "memory of CUDA graphs is not counted; their time is"
        found.append(notice("megatron.graphs", "not priced", text))
    # An argument with a finding above is not reported twice.
    rest = [entry for entry in ignored if entry.flag not in idle and entry.flag not in misspelt]
    if declares:
        for flag in misspelt:
            rest.append(Ignored(flag=flag, value=" ".join(words[flag]), understood=False))

    def hint(flag: str) -> str:
        meant = misspelt.get(flag)
        return "" if meant is None or concern_of(meant) == REMOVED else f"Did you mean --{meant}?"

    found += unread("megatron", rest, spelled, hint)
    return without_repetitions(found)


def spelled(flag: str, value: str | None) -> str:
    """Return a flag with its value as written on a command line."""
    return spelled_variable(flag, value) or " ".join(f"--{flag} {value or ''}".split())


def _misspelt(words: Words) -> Iterator[tuple[str, str]]:
    """Yield (flag, intended argument) for each unknown flag with a similar known name (`alike`).

    Other unknown flags are not reported here: a fork or a training script may define them.
    """
    for flag in sorted(words):
        meant = alike(flag) if concern_of(flag) is None else None
        if meant is not None:
            yield flag, meant


def _idle(setting: Setting) -> Iterator[Notice]:
    for flags, over, rest, why in _IDLE:
        given = setting.values(over)
        if None in given.values() or not rest(*given.values()):
            continue
        for flag in flags:
            words = setting.words.get(flag)
            # An explicit degree of 1 equals the default and needs no notice.
            none = words == ("1",) and flag.endswith(("-parallel-size", "-instances", "-rank"))
            if words is not None and not none:
                text = "--{flag} ({why})"
                yield notice("megatron.no-effect", "no effect", text, flag=flag, why=why)


_ORDERED = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
"""NCCL algorithms that `validate_args` accepts with --deterministic-mode."""
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_OFFLOAD = "NVTE_CPU_OFFLOAD_V1"


def _variable(name: str, text: str, **values: Any) -> Notice:
    return notice(f"megatron.{name}", "environment", text, "", **values)


def _variables(setting: Setting, environment: Mapping[str, str], gpu: str) -> Iterator[Notice]:
    value, blackwell = environment.get(_CONNECTIONS), gpu.upper().startswith(BLACKWELL)
    degrees = setting.values(("tp", "cp")).values()
    split = None not in degrees and max(degrees) > 1
    if setting.has("use-megatron-fsdp") or setting.has("use-torch-fsdp2"):
        if value == "1":
            text = f"{_CONNECTIONS} is 1, and fully sharded training needs another value or none"
            yield _variable("connections.sharded", text)
    elif setting.has("overlap-moe-expert-parallel-comm"):
        # With tensor or context parallelism, validate_args warns that one of the overlaps is lost.
        if value == "1":
            text = f"{_CONNECTIONS} is 1, but overlapped expert communication needs 32"
            yield _variable("connections.experts", text)
        if setting.has("tp-comm-overlap") and not blackwell:
            yield _variable(
                "connections.both",
                "--tp-comm-overlap and --overlap-moe-expert-parallel-comm need "
                f"different values of {_CONNECTIONS} on {{gpu}}, 1 and 32: one "
                "of them overlaps less than priced",
                gpu=gpu,
            )
    # validate_args of Megatron-LM requires the value 1 on devices before Blackwell.
    elif split and not blackwell and value != "1":
        yield _variable(
            "connections.tensor",
            f"set {_CONNECTIONS}=1{{value}}: TP or CP needs it on {{gpu}}",
            value="" if value is None else f" (is {value})",
            gpu=gpu,
        )
    offload = environment.get(_OFFLOAD)
    if setting.has("fine-grained-activation-offloading") and offload != "1":
        yield _variable(
            "offload-variable",
            f"{_OFFLOAD} is {{value}}, but --fine-grained-activation-offloading "
            "needs 1 with Transformer Engine 2.10 and later",
            value="not set" if offload is None else offload,
        )
    settings = " ".join(
        environment.get(key, "") for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    )
    if (
        setting.has("use-nccl-ub") or setting.has("nccl-ub")
    ) and "expandable_segments:true" in settings.lower():
        text = "--use-nccl-ub registers buffers, which expandable_segments does not allow"
        yield _variable("nccl-ub", text)
    algorithm = environment.get("NCCL_ALGO")
    if setting.has("deterministic-mode") and algorithm not in _ORDERED:
        yield _variable(
            "nccl-algorithm",
            "NCCL_ALGO is {value}, but --deterministic-mode needs {known}",
            value="not set" if algorithm is None else algorithm,
            known=", ".join(_ORDERED),
        )
