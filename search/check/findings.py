"""What is wrong with a launch's arguments, or has no effect: one sentence each, with its rule.

Rules are Megatron-LM's; those that a plan handed to it has to keep, too, are
`search.engines.megatron_arguments.violated_rules`. What a launch takes is not said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from autopar.records import dataclass
from search.engines.megatron_arguments import violated_rules
from search.launches.arguments import Ignored

__all__ = ["Finding", "findings_of"]

Kind = Literal["illegal", "not priced", "no effect", "environment", "not understood", "read"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to change in a launch, or to know of it."""

    kind: Kind
    text: str
    """A sentence without its end, that names flags and numbers."""


_LAYOUT = ("layers(", "--pipeline-model-parallel-layout")
Words = Mapping[str, tuple[str, ...]]


class _Setting(NamedTuple):
    """The arguments as numbers, where they are some."""

    words: Words
    world: int

    def has(self, flag: str) -> bool:
        return flag in self.words

    def number(self, flag: str, default: int = 1) -> int:
        words = self.words.get(flag, ())
        return int(words[0]) if words and words[0].isdigit() else default

    def text(self, flag: str) -> str:
        return " ".join(self.words.get(flag, ()))

    @property
    def virtual(self) -> bool:
        return any(map(self.has, (*_VIRTUAL, "pipeline-model-parallel-layout")))


_VIRTUAL = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
_WITHOUT: tuple[tuple[tuple[str, ...], Callable[[_Setting], bool], str], ...] = (
    (
        ("sequence-parallel",),
        lambda s: s.number("tensor-model-parallel-size") > 1,
        "tensor-model-parallel-size is 1",
    ),
    (
        ("tp-comm-overlap", "tp-comm-overlap-cfg", "tp-comm-bootstrap-backend"),
        lambda s: s.number("tensor-model-parallel-size") > 1,
        "tensor-model-parallel-size is 1",
    ),
    (
        ("expert-tensor-parallel-size", "expert-model-parallel-size", "moe-grouped-gemm",
         "moe-token-dispatcher-type", "moe-permute-fusion", "moe-router-topk",
         "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "moe-layer-freq",
         "overlap-moe-expert-parallel-comm", "moe-shared-expert-overlap"),
        lambda s: s.has("num-experts"),
        "there are no --num-experts",
    ),
    (
        (*_VIRTUAL, "microbatch-group-size-per-virtual-pipeline-stage",
         "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
         "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
         "defer-embedding-wgrad-compute"),
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
        lambda s: s.text("recompute-granularity") == "selective" or s.has("recompute-activations"),
        "--recompute-granularity is not selective",
    ),
    (
        ("recompute-method", "recompute-num-layers"),
        lambda s: s.text("recompute-granularity") == "full",
        "--recompute-granularity is not full",
    ),
    (
        ("fp8-recipe", "fp8-param-gather", "fp8-amax-history-len", "fp8-amax-compute-algo",
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
) -> tuple[Finding, ...]:
    """Return what is to say of the arguments of so many GPUs, the illegal first.

    Parameters
    ----------
    environment : what the launch itself sets. gpu : kind of device. ignored : arguments that the
        reading did not need. problem : why the launch could not be read, if so.
    """
    setting = _Setting(words, world_size)
    found = [Finding(kind="illegal", text=text) for text in _illegal(setting, problem)]
    found += [Finding(kind="no effect", text=text) for text in _idle(setting)]
    found += [
        Finding(kind="environment", text=text) for text in _variables(setting, environment, gpu)
    ]
    found += [
        Finding(
            kind="not understood",
            text=f"--{entry.flag} {entry.value}".strip() + " may change time or memory",
        )
        for entry in ignored
        if not entry.understood
    ]
    return tuple(dict.fromkeys(found))


def _illegal(setting: _Setting, problem: str | None) -> Iterator[str]:
    try:
        rules = violated_rules(setting.words, setting.world)
    except (ValueError, IndexError):
        rules = ()  # a value that is no number is the problem already
    # no error of theirs: it is switched off, with a warning
    found = [text for text in rules if not text.startswith("--sequence-parallel needs")]
    found += [*_experts(setting), *_chunks(setting)]
    if problem is None:
        # a launch that was read has laid out its layers, also those that count for the embedding,
        # stages of given sizes and modules of further tokens, which no plan has
        found = [text for text in found if not text.startswith(_LAYOUT)]
    # what the reading stumbled over may be one of them, without its rest
    if problem is not None and not any(_left(problem) in text for text in found):
        yield problem
    yield from found


def _left(rule: str) -> str:
    """Return what stands left of a rule's sign."""
    return rule.partition(" != ")[0].partition(" = ")[0]


def _experts(setting: _Setting) -> Iterator[str]:
    ep, tp = (
        setting.number("expert-model-parallel-size"),
        setting.number("tensor-model-parallel-size"),
    )
    pp = setting.number("pipeline-model-parallel-size")
    etp = setting.number("expert-tensor-parallel-size", tp)
    if not setting.has("num-experts"):
        return
    experts = setting.number("num-experts")
    if experts % ep:
        yield f"experts({experts}) % ep({ep}) = {experts % ep} != 0"
    product = etp * ep * pp
    if setting.world % product:
        rest = setting.world % product
        yield f"world size({setting.world}) % (etp({etp}) * ep({ep}) * pp({pp})) = {rest} != 0"
    topk = setting.number("moe-router-topk", 2)
    if topk > experts:
        yield f"moe-router-topk({topk}) is above num-experts({experts})"
    if setting.has("overlap-moe-expert-parallel-comm"):
        yield from _expert_overlap(setting, ep, pp)


def _expert_overlap(setting: _Setting, ep: int, pp: int) -> Iterator[str]:
    """Yield what `--overlap-moe-expert-parallel-comm` asks for and does not find."""
    flag = "--overlap-moe-expert-parallel-comm"
    modules = setting.words.get("recompute-modules", ())
    rules = (
        (ep > 1, "expert-model-parallel-size above 1"),
        (pp == 1 or setting.virtual, "virtual pipeline stages"),
        (setting.text("recompute-granularity") != "full" and "moe" not in modules,
         "no recomputation of whole layers or of moe"),
        (not setting.has("moe-shared-expert-overlap"), "no --moe-shared-expert-overlap"),
        (setting.text("moe-token-dispatcher-type") in ("alltoall", "flex"),
         "--moe-token-dispatcher-type alltoall or flex"),
        (setting.number("mtp-num-layers", 0) <= 1, "one MTP layer at most"),
    )  # fmt: skip
    for kept, what in rules:
        if not kept:
            yield f"{flag} needs {what}"


def _chunks(setting: _Setting) -> Iterator[str]:
    pp = setting.number("pipeline-model-parallel-size")
    each = setting.number(_VIRTUAL[0], 0)
    chunks = setting.number(_VIRTUAL[1], 0)
    layers = setting.number("num-layers", 0)
    if pp == 1 or setting.has("pipeline-model-parallel-layout"):
        return
    if each and chunks:
        yield f"--{_VIRTUAL[0]} and --{_VIRTUAL[1]} exclude each other"
    elif each and layers % (pp * each):
        yield f"layers({layers}) % (pp({pp}) * layers of a chunk({each})) = {layers % (pp * each)}"
    elif chunks and layers % (pp * chunks):
        yield f"layers({layers}) % (pp({pp}) * chunks({chunks})) = {layers % (pp * chunks)}"


def _idle(setting: _Setting) -> Iterator[str]:
    for flags, needed, why in _WITHOUT:
        if needed(setting):
            continue
        for flag in flags:
            given = setting.words.get(flag)
            # a degree of 1 says that there is none
            none = given == ("1",) and flag.endswith(("-parallel-size", "-instances", "-rank"))
            if given is not None and not none:
                yield f"--{flag}, since {why}"


def _variables(setting: _Setting, environment: Mapping[str, str], gpu: str) -> Iterator[str]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = environment.get(name)
    split = (
        setting.number("tensor-model-parallel-size") > 1
        or setting.number("context-parallel-size") > 1
    )
    if setting.has("use-megatron-fsdp") or setting.has("use-torch-fsdp2"):
        if value == "1":
            yield f"{name} is 1, and fully sharded training needs another value or none"
    # validate_args of Megatron-LM asks for it on devices before Blackwell
    elif split and not gpu.upper().startswith(("B2", "B3", "GB")):
        if value is not None and value != "1":
            yield f"{name} is {value}, and tensor or context parallelism needs 1 on {gpu}"
        elif value is None:
            yield f"{name} is not set here, and tensor or context parallelism needs 1 on {gpu}"
    settings = " ".join(
        environment.get(key, "") for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    )
    if setting.has("nccl-ub") and "expandable_segments:true" in settings.lower():
        yield "--nccl-ub registers buffers, which expandable_segments does not allow"
