"""What Megatron-LM refuses in a launch's arguments: one sentence for each rule that is broken.

Rules that a plan handed to it has to keep, too, are
`search.engines.megatron.arguments.violated_rules`; arguments that do nothing are
`search.engines.megatron.findings`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from autopar.run.launch import Launch
from search.engines.arguments import is_open
from search.engines.megatron.arguments import violated_rules

_LAYOUT = ("layers(", "--pipeline-model-parallel-layout")
_WARNED = (
    "--sequence-parallel needs",
    "--use-megatron-fsdp needs --no-gradient-accumulation-fusion",
    "--use-megatron-fsdp is not combined with pipeline stages",
)
"""Rules of a plan that Megatron-LM itself only warns of, or does not know."""
Words = Mapping[str, tuple[str, ...]]


class OpenValueError(Exception):
    """A number that only a running machine tells: no rule on it is known to be broken."""


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
        if text and is_open(text[0]):
            raise OpenValueError
        known = text and text[0].isascii() and text[0].isdigit() and len(text[0]) < 19
        # 0 where there has to be something is a problem that the reading has named
        return int(text[0]) or min(default, 1) if known else default

    def text(self, flag: str) -> str:
        return " ".join(self.words.get(flag, ()))

    def list(self, flag: str) -> tuple[str, ...]:
        """Return the words of a flag, those of one text apart."""
        return tuple(self.text(flag).split())

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
    found += [*decided(_experts(setting)), *decided(_chunks(setting)), *_tabled(setting)]
    if launch is not None:
        dp, vpp = launch.degrees.dp, launch.degrees.vpp
        found += decided(_interleaved(setting, launch.micro_batches, vpp))
        found += decided(_ramp_up(setting, dp, vpp))
    if problem is None:
        # a launch that was read has laid out its layers, also those that count for the embedding,
        # stages of given sizes and modules of further tokens, which no plan has
        found = [text for text in found if not text.startswith(_LAYOUT)]
    # what the reading stumbled over may be one of them, without its rest
    if problem is not None and not any(_left(problem) in text for text in found):
        yield problem
    yield from found


def decided(rules: Iterator[str]) -> Iterator[str]:
    """Yield sentences as far as what they need is known."""
    with suppress(OpenValueError):
        yield from rules


def _broken(rules: Sequence[tuple[_Broken, str]], setting: Setting) -> Iterator[str]:
    """Yield what a table says of a setting, as far as it is known."""
    for broken, rule in rules:
        with suppress(OpenValueError):
            if broken(setting):
                yield rule


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
    modules = setting.list("recompute-modules")
    rules = (
        (ep > 1, "expert-model-parallel-size above 1"),
        (pp == 1 or setting.virtual, "virtual pipeline stages"),
        (setting.text("recompute-granularity") != "full" and "moe" not in modules,
         "no recomputation of whole layers or of moe"),
        (not setting.has("moe-shared-expert-overlap"), "no --moe-shared-expert-overlap"),
        (setting.text("moe-token-dispatcher-type") in ("alltoall", "flex"),
         "--moe-token-dispatcher-type alltoall or flex"),
        (setting.number("mtp-num-layers", 0) <= 1, "one MTP layer at most"),
        (setting.has("bf16") or setting.has("fp16"), "--bf16 or --fp16"),
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
# arguments.py`, core 0.15 and main of 2026) and `TransformerConfig`, `ModelParallelConfig` and
# `DistributedDataParallelConfig` of Megatron-Core 0.15 and 0.16; the widths that fp8 asks for are
# Transformer Engine's (compute capability 8.9 for fp8, 9.0 for blocks of it, 10.0 for mxfp8).


_Broken = Callable[[Setting], bool]
_AMD = ("MI2", "MI3", "MI4")
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
    return lambda s: s.selective and module in s.list("recompute-modules")


def _padded(s: Setting) -> bool:
    return s.has("moe-router-padding-for-quantization") or s.has("moe-router-padding-for-fp8")


_STATES = ("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")
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
    (lambda s: s.has("tp-comm-overlap") and s.gpu.startswith(_AMD),
     "--tp-comm-overlap needs GPUs of NVIDIA: Transformer Engine's userbuffers are theirs"),
    (lambda s: s.dispatcher == "flex" and s.gpu.startswith(_AMD),
     "--moe-token-dispatcher-type flex needs GPUs of NVIDIA: DeepEP and HybridEP are theirs"),
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
     and s.text("position-embedding-type") == "relative",
     "--mtp-num-layers excludes --position-embedding-type relative"),
    (lambda s: s.has("batch-size"), "--batch-size is no longer valid, --micro-batch-size is"),
    (lambda s: s.has("warmup"), "--warmup is no longer valid, --lr-warmup-fraction is"),
    (lambda s: s.has("model-parallel-size"),
     "--model-parallel-size is no longer valid, --tensor-model-parallel-size is"),
    (lambda s: s.has("checkpoint-activations"),
     "--checkpoint-activations is no longer valid, --recompute-activations is"),
    (_both("num-layers", "encoder-num-layers"),
     "--num-layers and --encoder-num-layers exclude each other"),
    (_both("seq-length", "encoder-seq-length"),
     "--seq-length and --encoder-seq-length exclude each other"),
    (_both("train-iters", "lr-decay-samples"), "--lr-decay-samples needs --train-samples"),
    (_both("train-samples", "lr-decay-iters"), "--lr-decay-iters needs --train-iters"),
    (lambda s: s.has("train-iters") and s.real("lr-warmup-samples") > 0,
     "--lr-warmup-samples needs --train-samples"),
    (lambda s: s.has("train-samples") and s.real("lr-warmup-iters") > 0,
     "--lr-warmup-iters needs --train-iters"),
    (lambda s: s.has("lr-warmup-fraction")
     and (s.real("lr-warmup-iters") > 0 or s.real("lr-warmup-samples") > 0),
     "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples"),
    (lambda s: s.text("weight-decay-incr-style") in ("", "constant")
     and (s.has("start-weight-decay") or s.has("end-weight-decay")),
     "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine"),
    (lambda s: s.text("weight-decay-incr-style") in ("linear", "cosine")
     and not (s.has("start-weight-decay") and s.has("end-weight-decay")),
     "--weight-decay-incr-style needs --start-weight-decay and --end-weight-decay"),
    (lambda s: s.number("save-retain-interval", 0) % max(s.number("save-interval"), 1) != 0,
     "save-interval does not divide save-retain-interval"),
    (lambda s: s.has("mock-data") + s.has("data-path") + any(
        map(s.has, ("train-data-path", "valid-data-path", "test-data-path"))) > 1,
     "--mock-data, --data-path and the data paths of splits exclude each other"),
    (_both("data-path", "data-args-path"), "--data-path and --data-args-path exclude each other"),
    (lambda s: s.has("fp16-lm-cross-entropy") and not s.has("fp16"),
     "--fp16-lm-cross-entropy needs --fp16"),
    (lambda s: s.has("fp32-residual-connection") and not (s.has("fp16") or s.has("bf16")),
     "--fp32-residual-connection needs --bf16 or --fp16"),
    (lambda s: s.has("distribute-saved-activations")
     and (s.number("tensor-model-parallel-size") == 1
          or s.text("recompute-granularity") != "full"),
     "--distribute-saved-activations needs tensor ranks and --recompute-granularity full"),
    (lambda s: s.has("no-position-embedding") and not s.has("use-rotary-position-embeddings")
     and s.text("position-embedding-type") != "rope",
     "--no-position-embedding needs --position-embedding-type rope; none is a type of its own"),
    (lambda s: s.has("first-last-layers-bf16") and s.has("fp8-format")
     and s.text("fp8-recipe") in ("", "delayed"),
     "--first-last-layers-bf16 needs another --fp8-recipe than delayed"),
    (lambda s: s.has("first-last-layers-bf16") and any(
        s.number(f"num-layers-at-{end}-in-bf16") > s.number("num-layers")
        // s.number("pipeline-model-parallel-size") for end in ("start", "end")),
     "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 are those of a stage at most"),
    (lambda s: s.text("fp8-recipe") == "custom" and s.has("fp8-format")
     and not s.has("fp8-quantizer-factory"),
     "--fp8-recipe custom needs --fp8-quantizer-factory"),
    (lambda s: s.has("reuse-grad-buf-for-mxfp8-param-ag") and not s.has("fp8-param-gather"),
     "--reuse-grad-buf-for-mxfp8-param-ag needs --fp8-param-gather"),
    (lambda s: s.has("multi-latent-attention") and s.has("rotary-interleaved"),
     "--multi-latent-attention and --rotary-interleaved exclude each other"),
    (lambda s: s.has("multi-latent-attention") and s.text("rope-type") == "rope"
     and s.text("position-embedding-type") == "rope" and not s.has("no-rope-fusion"),
     "--rope-type rope of --multi-latent-attention needs --no-rope-fusion"),
    (lambda s: s.text("rope-type") == "yarn" and not s.has("multi-latent-attention"),
     "--rope-type yarn needs --multi-latent-attention"),
    (lambda s: (s.has("decoder-first-pipeline-num-layers")
                or s.has("decoder-last-pipeline-num-layers"))
     and (s.has("account-for-embedding-in-pipeline-split")
          or s.has("account-for-loss-in-pipeline-split")),
     "stages of given layers exclude those that --account-for-embedding or loss"),
    (lambda s: s.has("overlap-p2p-communication-warmup-flush")
     and (not s.virtual or s.has("no-overlap-p2p-communication")),
     "--overlap-p2p-communication-warmup-flush needs virtual stages that overlap their transfers"),
    (lambda s: s.has("use-te-activation-func") and s.has("swiglu")
     and not s.has("no-bias-swiglu-fusion"),
     "--use-te-activation-func needs --no-bias-swiglu-fusion"),
    (lambda s: s.has("delay-wgrad-compute") and not s.has("overlap-moe-expert-parallel-comm"),
     "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm"),
    (lambda s: s.has("use-precision-aware-optimizer") and not s.has("use-distributed-optimizer"),
     "--use-precision-aware-optimizer needs --use-distributed-optimizer"),
    (lambda s: s.has("optimizer-cpu-offload") and not s.has("use-precision-aware-optimizer"),
     "--optimizer-cpu-offload needs --use-precision-aware-optimizer"),
    (lambda s: not s.has("use-precision-aware-optimizer") and any(
        s.text(flag) not in ("", "fp32") for flag in _STATES),
     "other precisions of the optimizer's states than fp32 need --use-precision-aware-optimizer"),
    (lambda s: s.has("overlap-param-gather-with-optimizer-step")
     and s.text("ckpt-format") != "torch",
     "--overlap-param-gather-with-optimizer-step needs --ckpt-format torch"),
    (lambda s: s.text("ckpt-format") == "fsdp_dtensor"
     and not (s.has("use-megatron-fsdp") or s.has("use-custom-fsdp")),
     "--ckpt-format fsdp_dtensor needs --use-megatron-fsdp"),
    (lambda s: s.text("ckpt-format") == "torch_dcp" and not s.has("use-torch-fsdp2"),
     "--ckpt-format torch_dcp needs --use-torch-fsdp2"),
    (lambda s: s.number("cpu-offloading-num-layers", 0) > 0
     and s.has("cpu-offloading-num-layers")
     and (s.number("pipeline-model-parallel-size") > 1 or s.has("recompute-granularity")),
     "--cpu-offloading-num-layers excludes pipeline stages and recomputation"),
    (lambda s: s.has("moe-ffn-hidden-size") and not s.number("num-experts", 0),
     "--moe-ffn-hidden-size needs --num-experts"),
)  # fmt: skip
"""What breaks a rule, and the rule."""
_OF_FSDP2: tuple[tuple[_Broken, str], ...] = (
    (lambda s: s.number("pipeline-model-parallel-size") > 1, "--pipeline-model-parallel-size 1"),
    (lambda s: s.number("expert-model-parallel-size") > 1, "--expert-model-parallel-size 1"),
    (lambda s: s.has("use-distributed-optimizer"), "no --use-distributed-optimizer"),
    (lambda s: not s.has("no-gradient-accumulation-fusion"), "--no-gradient-accumulation-fusion"),
    (lambda s: not s.has("untie-embeddings-and-output-weights"),
     "--untie-embeddings-and-output-weights"),
    (lambda s: s.has("fp16"), "no --fp16"),
    (lambda s: s.text("ckpt-format") not in ("", "torch_dist", "torch_dcp"),
     "--ckpt-format torch_dist or torch_dcp"),
)  # fmt: skip
"""What PyTorch's sharding needs, and when it does not have it."""
_OF_EXPERTS: tuple[tuple[_Broken, str], ...] = (
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
    (lambda s: s.has("moe-router-num-groups")
     and s.number("moe-router-group-topk", 0) > s.number("moe-router-num-groups"),
     "moe-router-group-topk is above moe-router-num-groups"),
    (lambda s: _recomputes("shared_experts")(s) and s.has("moe-shared-expert-overlap"),
     "--recompute-modules shared_experts excludes --moe-shared-expert-overlap"),
    (lambda s: _padded(s) and not (s.has("fp8-format") or s.has("fp4-format")),
     "--moe-router-padding-for-quantization needs --fp8-format or --fp4-format"),
    (lambda s: _padded(s) and s.dispatcher in ("allgather", "alltoall_seq"),
     "--moe-router-padding-for-quantization needs --moe-token-dispatcher-type alltoall or flex"),
    (lambda s: s.has("moe-expert-capacity-factor")
     and "sinkhorn" in s.list("moe-router-load-balancing-type"),
     "--moe-expert-capacity-factor excludes --moe-router-load-balancing-type sinkhorn"),
    (lambda s: len(s.list("moe-router-load-balancing-type")) > 1
     and len(s.list("moe-aux-loss-coeff")) != len(s.list("moe-router-load-balancing-type")),
     "--moe-aux-loss-coeff needs a coefficient for each --moe-router-load-balancing-type"),
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
_BEFORE: tuple[tuple[_Broken, str], ...] = (
    (lambda s: s.has("num-experts") and s.has("fp16")
     and s.number("expert-model-parallel-size") > 1,
     "--expert-model-parallel-size above 1 excludes --fp16 up to core 0.15"),
    (lambda s: s.has("num-experts") and s.has("moe-grouped-gemm") and not s.has("bf16"),
     "--moe-grouped-gemm needs --bf16 up to core 0.15"),
    (lambda s: s.number("mtp-num-layers", 0) > 0 and not s.has("use-rotary-position-embeddings")
     and s.text("position-embedding-type") in ("", "learned_absolute"),
     "--mtp-num-layers needs --position-embedding-type rope or none up to core 0.15"),
    (lambda s: s.has("overlap-moe-expert-parallel-comm") and s.number("mtp-num-layers", 0) == 1
     and s.number("pipeline-model-parallel-size") == 1,
     "--overlap-moe-expert-parallel-comm needs pipeline stages beside MTP layers up to core 0.16"),
    (lambda s: "muon" in s.text("optimizer") and s.has("use-distributed-optimizer"),
     "--optimizer muon excludes --use-distributed-optimizer up to core 0.16"),
)  # fmt: skip
"""What earlier releases end with, and later ones run: main of 2026, and its tests of August."""


def broken_before(setting: Setting) -> Iterator[str]:
    """Yield what only earlier releases of Megatron-LM end with."""
    yield from _broken(_BEFORE, setting)


def _tabled(setting: Setting) -> Iterator[str]:
    yield from _broken(_TABLE, setting)
    if setting.has("num-experts"):
        yield from _broken(_OF_EXPERTS, setting)
    if setting.has("use-torch-fsdp2"):
        yield from (f"--use-torch-fsdp2 needs {what}" for what in _broken(_OF_FSDP2, setting))
    yield from decided(_split_without_experts(setting))


def _split_without_experts(setting: Setting) -> Iterator[str]:
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


# --------------------------------------------------------------------------------------------------
# A batch that grows: `RampupBatchsizeNumMicroBatchesCalculator` of `megatron/core/
# num_microbatches_calculator.py` (core 0.16), which steps from the first size to the last.


def ramp_start(setting: Setting) -> int | None:
    """Return the batch that a run begins with; None: it does not grow, or is given badly."""
    ramp = setting.list("rampup-batch-size")
    return int(ramp[0]) if len(ramp) == 3 and all(map(_is_count, ramp)) else None


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _ramp_up(setting: Setting, dp: int, chunks: int) -> Iterator[str]:
    """Yield what batches on the way to the last one break, on so many data ranks."""
    flag = "--rampup-batch-size"
    if not setting.has(flag[2:]):
        return
    ramp = setting.list(flag[2:])
    if len(ramp) != 3 or not all(map(_is_count, ramp)) or not int(ramp[0]) or not int(ramp[1]):
        yield f"{flag} needs a first batch, an increment and samples, got {' '.join(ramp)[:60]!r}"
        return
    start, increment = int(ramp[0]), int(ramp[1])
    once = setting.number("micro-batch-size") * dp
    batch = setting.number("global-batch-size", once)
    if start > batch:
        yield f"{flag} begins with {start}, above global-batch-size({batch})"
    elif (batch - start) % increment:
        rest = (batch - start) % increment
        yield f"{flag}: (global batch({batch}) - {start}) % increment({increment}) = {rest} != 0"
    # with the flag, a size that does not divide is rounded down
    elif not setting.has("decrease-batch-size-if-needed"):
        second = start + increment if start + increment < batch else start
        rest, size = next(((size % once, size) for size in (start, second) if size % once), (0, 0))
        if rest:
            yield f"{flag}: batch({size}) % (micro batch * dp({once})) = {rest} != 0"
        elif start < batch:
            for text in _interleaved(setting, start // once, chunks):
                yield f"{flag} begins with {start}: {text}"
