"""What Megatron-LM refuses in a launch's arguments: one sentence for each rule that is broken.

Rules that a plan handed to it has to keep, too, are
`search.engines.megatron_arguments.violated_rules`; arguments that do nothing are
`search.check.findings`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from autopar.memory.launch import Launch
from search.engines.megatron_arguments import violated_rules

__all__ = ["VIRTUAL", "Setting", "Words", "broken_rules"]

_LAYOUT = ("layers(", "--pipeline-model-parallel-layout")
_WARNED = (
    "--sequence-parallel needs",
    "--use-megatron-fsdp needs --no-gradient-accumulation-fusion",
)
"""Rules of a plan that Megatron-LM itself only warns of."""
Words = Mapping[str, tuple[str, ...]]


class Setting(NamedTuple):
    """The arguments as numbers, where they are some."""

    words: Words
    world: int
    gpu: str = ""
    """Kind of device, in capitals."""

    def has(self, flag: str) -> bool:
        return flag in self.words

    def number(self, flag: str, default: int = 1) -> int:
        text = self.words.get(flag, ("",))[:1]
        known = text and text[0].isascii() and text[0].isdigit() and len(text[0]) < 19
        # 0 where there has to be something is a problem that the reading has named
        return int(text[0]) or min(default, 1) if known else default

    def text(self, flag: str) -> str:
        return " ".join(self.words.get(flag, ()))

    def real(self, flag: str, default: float = 0.0) -> float:
        try:
            return float(self.text(flag))
        except ValueError:
            return default

    @property
    def selective(self) -> bool:
        """Whether modules are computed again; the old word counts over the granularity."""
        return self.text("recompute-granularity") == "selective" or self.has(
            "recompute-activations"
        )

    @property
    def sharded(self) -> bool:
        return any(
            map(self.has, ("use-distributed-optimizer", "use-megatron-fsdp", "use-torch-fsdp2"))
        )

    @property
    def scattered(self) -> bool:
        return self.has("sequence-parallel") and self.number("tensor-model-parallel-size") > 1

    @property
    def dispatcher(self) -> str:
        return self.text("moe-token-dispatcher-type") or "allgather"

    @property
    def virtual(self) -> bool:
        return any(map(self.has, (*VIRTUAL, "pipeline-model-parallel-layout")))


VIRTUAL = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")


def broken_rules(
    setting: Setting, problem: str | None, launch: Launch | None = None
) -> Iterator[str]:
    """Yield what Megatron-LM ends with; problem : why the launch was not read, or launch : it."""
    try:
        rules = violated_rules(setting.words, setting.world)
    except (ValueError, IndexError, ZeroDivisionError):
        rules = ()  # a value that is no number above 0 is the problem already
    # no error of theirs: it is switched off, with a warning
    found = [text for text in rules if not text.startswith(_WARNED)]
    found += [*_experts(setting), *_chunks(setting), *_tabled(setting)]
    if launch is not None:
        found += _interleaved(setting, launch.micro_batches, launch.degrees.vpp)
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


def _experts(setting: Setting) -> Iterator[str]:
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


def _expert_overlap(setting: Setting, ep: int, pp: int) -> Iterator[str]:
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


def _chunks(setting: Setting) -> Iterator[str]:
    pp = setting.number("pipeline-model-parallel-size")
    each = setting.number(VIRTUAL[0], 0)
    chunks = setting.number(VIRTUAL[1], 0)
    layers = setting.number("num-layers", 0)
    if pp == 1 or setting.has("pipeline-model-parallel-layout"):
        return
    if each and chunks:
        yield f"--{VIRTUAL[0]} and --{VIRTUAL[1]} exclude each other"
    elif each and layers % (pp * each):
        yield f"layers({layers}) % (pp({pp}) * layers of a chunk({each})) = {layers % (pp * each)}"
    elif chunks and layers % (pp * chunks):
        yield f"layers({layers}) % (pp({pp}) * chunks({chunks})) = {layers % (pp * chunks)}"


# --------------------------------------------------------------------------------------------------
# Arguments that exclude or need each other: `validate_args` of Megatron-LM (`megatron/training/
# arguments.py`) and `TransformerConfig` of Megatron-Core 0.15; the widths that fp8 asks for are
# Transformer Engine's (compute capability 8.9 for fp8, 9.0 for blocks of it, 10.0 for mxfp8).


_Broken = Callable[[Setting], bool]
_NO_FP8 = ("V100", "A100", "A800", "A10", "A30", "A40", "A6000")
_HOPPER = ("H100", "H200", "H800", "H20", "GH200", "L40", "RTX-4090")


def _both(*flags: str) -> _Broken:
    """Return whether more than one of these is given."""
    return lambda s: sum(map(s.has, flags)) > 1


def _layouts(s: Setting) -> bool:
    others = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
              "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
              *VIRTUAL)  # fmt: skip
    return s.has("pipeline-model-parallel-layout") and any(map(s.has, others))


def _recomputes(module: str) -> _Broken:
    """Return whether a module is computed again."""
    return lambda s: s.selective and module in s.words.get("recompute-modules", ())


_TABLE: tuple[tuple[_Broken, str], ...] = (
    (_both("fp16", "bf16"), "--fp16 and --bf16 exclude each other"),
    (_both("train-iters", "train-samples"), "--train-iters and --train-samples exclude each other"),
    (_both("train-iters", "rampup-batch-size"), "--rampup-batch-size needs --train-samples"),
    (_both("fp4-format", "fp8-format"), "--fp4-format and --fp8-format exclude each other"),
    (_both("multi-latent-attention", "group-query-attention"),
     "--multi-latent-attention and --group-query-attention exclude each other"),
    (_both("swiglu", "squared-relu", "quick-geglu"),
     "--swiglu, --squared-relu and --quick-geglu exclude each other"),
    (_layouts, "other arguments that place layers exclude --pipeline-model-parallel-layout"),
    (lambda s: not s.has("max-position-embeddings"), "--max-position-embeddings is missing"),
    (lambda s: not s.has("kv-channels")
     and s.number("hidden-size") % s.number("num-attention-heads") != 0,
     "num-attention-heads does not divide hidden-size, which needs --kv-channels"),
    (lambda s: s.has("save") and not s.has("save-interval"), "--save needs --save-interval"),
    (lambda s: s.real("min-lr") > s.real("lr", float("inf")), "--min-lr is above --lr"),
    (lambda s: s.has("fp8-param-gather") and s.has("fp8-format") and not s.sharded,
     "--fp8-param-gather needs --use-distributed-optimizer or Megatron-FSDP"),
    (lambda s: s.has("fp8-param-gather") and not s.has("fp8-format"),
     "--fp8-param-gather needs --fp8-format"),
    (lambda s: s.has("fp8-format") and s.gpu.startswith(_NO_FP8),
     "--fp8-format needs a device that has products of 8 bits"),
    (lambda s: s.has("fp8-format") and s.text("fp8-recipe") == "mxfp8"
     and s.gpu.startswith(_HOPPER),
     "--fp8-recipe mxfp8 needs Blackwell"),
    (lambda s: s.selective and s.has("recompute-method"),
     "--recompute-method is not for selective recomputation"),
    (lambda s: s.selective and s.has("recompute-num-layers"),
     "--recompute-num-layers is not for selective recomputation"),
    (lambda s: _recomputes("moe_act")(s) and not s.has("moe-grouped-gemm"),
     "--recompute-modules moe_act needs --moe-grouped-gemm"),
    (lambda s: _recomputes("mla_up_proj")(s) and not s.has("multi-latent-attention"),
     "--recompute-modules mla_up_proj needs --multi-latent-attention"),
    (lambda s: (_recomputes("moe_act")(s) or _recomputes("layernorm")(s))
     and s.has("fp8-format") and s.text("fp8-recipe") in ("", "delayed"),
     "--recompute-modules moe_act and layernorm need another --fp8-recipe than delayed"),
    (lambda s: s.has("moe-layer-recompute") and s.text("recompute-granularity") == "full"
     and not s.selective, "--moe-layer-recompute and full recomputation exclude each other"),
    (lambda s: s.has("distribute-saved-activations") and s.scattered,
     "--distribute-saved-activations and --sequence-parallel exclude each other"),
    (lambda s: s.has("tp-comm-overlap") and not s.scattered,
     "--tp-comm-overlap needs --sequence-parallel and --tensor-model-parallel-size above 1"),
    (lambda s: s.has("defer-embedding-wgrad-compute")
     and s.number("pipeline-model-parallel-size") == 1,
     "--defer-embedding-wgrad-compute needs --pipeline-model-parallel-size above 1"),
    (lambda s: s.has("defer-embedding-wgrad-compute")
     and s.has("no-gradient-accumulation-fusion"),
     "--defer-embedding-wgrad-compute and --no-gradient-accumulation-fusion exclude each other"),
    (lambda s: s.has("overlap-param-gather-with-optimizer-step")
     and not (s.has("overlap-param-gather") and s.virtual),
     "--overlap-param-gather-with-optimizer-step needs --overlap-param-gather and virtual stages"),
    (lambda s: s.has(VIRTUAL[0]) and (s.has("decoder-first-pipeline-num-layers")
                                      or s.has("decoder-last-pipeline-num-layers")),
     "stages of given layers need --num-virtual-stages-per-pipeline-rank instead"),
    (lambda s: s.number("context-parallel-size") > 1 and s.text("transformer-impl") == "local",
     "--context-parallel-size above 1 needs --transformer-impl transformer_engine"),
    (lambda s: s.has("deterministic-mode") and s.has("cross-entropy-loss-fusion"),
     "--deterministic-mode and --cross-entropy-loss-fusion exclude each other"),
    (lambda s: s.has("deterministic-mode") and s.has("use-flash-attn"),
     "--deterministic-mode and --use-flash-attn exclude each other"),
    (lambda s: s.number("mtp-num-layers", 0) > 0 and not s.has("use-rotary-position-embeddings")
     and s.text("position-embedding-type") in ("", "learned_absolute", "relative"),
     "--mtp-num-layers needs --position-embedding-type rope or none"),
)  # fmt: skip
"""What breaks a rule, and the rule."""
_OF_EXPERTS: tuple[tuple[_Broken, str], ...] = (
    (lambda s: s.has("fp16") and s.number("expert-model-parallel-size") > 1,
     "--expert-model-parallel-size above 1 excludes --fp16"),
    (lambda s: s.has("moe-enable-deepep") and s.dispatcher != "flex",
     "--moe-enable-deepep needs --moe-token-dispatcher-type flex"),
    (lambda s: s.has("moe-shared-expert-overlap") and s.dispatcher == "allgather",
     "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall"),
    (lambda s: s.has("moe-router-enable-expert-bias")
     and s.text("moe-router-score-function") in ("", "softmax"),
     "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid"),
    (lambda s: s.number("moe-router-topk", 2) == 1 and not s.has("moe-router-pre-softmax")
     and s.text("moe-router-score-function") in ("", "softmax")
     and "sinkhorn" not in s.text("moe-router-load-balancing-type"),
     "--moe-router-topk 1 needs --moe-router-pre-softmax"),
    (lambda s: s.has("moe-router-group-topk") and not s.has("moe-router-num-groups"),
     "--moe-router-group-topk needs --moe-router-num-groups"),
    (lambda s: s.has("moe-router-group-topk")
     and s.number("num-experts") % max(s.number("moe-router-num-groups"), 1) != 0,
     "moe-router-num-groups does not divide num-experts"),
    (lambda s: s.has("moe-pad-expert-input-to-capacity")
     and not s.has("moe-expert-capacity-factor"),
     "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"),
    (lambda s: s.has("moe-pad-expert-input-to-capacity") and s.dispatcher == "flex",
     "--moe-pad-expert-input-to-capacity excludes --moe-token-dispatcher-type flex"),
    (lambda s: not s.has("disable-bias-linear") and s.number(
        "expert-tensor-parallel-size", s.number("tensor-model-parallel-size")) > 1,
     "experts with biases need --expert-tensor-parallel-size 1, or --disable-bias-linear"),
)  # fmt: skip
"""The same of a model with experts."""


def _tabled(setting: Setting) -> Iterator[str]:
    for broken, rule in (*_TABLE, *(_OF_EXPERTS if setting.has("num-experts") else ())):
        if broken(setting):
            yield rule
    experts = setting.number("expert-model-parallel-size")
    if experts > 1 and not setting.has("num-experts"):
        yield f"--expert-model-parallel-size {experts} needs --num-experts"


def _interleaved(setting: Setting, micro_batches: int, chunks: int) -> Iterator[str]:
    """Yield what the interleaved schedule asks of so many micro-batches in so many chunks."""
    pp = setting.number("pipeline-model-parallel-size")
    if pp == 1 or chunks == 1:
        return
    group = setting.number("microbatch-group-size-per-virtual-pipeline-stage", pp)
    rest = micro_batches % group
    if not pp <= group <= micro_batches:
        yield (
            f"an interleaved pipeline runs groups of at least pp({pp}) and at most "
            f"{micro_batches} micro-batches, these are of {group}"
        )
    elif 0 < rest < pp:
        yield f"micro-batches({micro_batches}) % {group} = {rest}, between 0 and pp({pp})"
    if pp == 2 and setting.has("no-overlap-p2p-communication"):
        yield "an interleaved pipeline of 2 stages excludes --no-overlap-p2p-communication"
