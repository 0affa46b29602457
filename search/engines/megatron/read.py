"""Reader of Megatron-LM arguments as a run, for estimates of time and memory.

Supported are decoder-only GPT models in any layer partition, dense, with experts, and with MLA.
Hybrid models may also have Mamba-2 and gated delta nets.
Other models, and arguments whose effect on memory is not modelled, raise UnpricedError.
`search.engines.megatron.plan` converts the strategy to a plan, without the sizes of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast, get_args

from autopar.errors import DocumentError, shortened
from autopar.pipeline.schedules import schedule_of_chunks
from autopar.records import Record, shorten
from autopar.run.plan import Module
from autopar.run.rules import refuse
from autopar.run.run import Run, legal
from autopar.run.runtime import (
    ActivationOffload,
    ExpertKernels,
    Graphs,
    Kernels,
    Loss,
    Optimizer,
    Overlap,
    Precision,
    Runtime,
    States,
    Zero,
)
from autopar.run.strategy import (
    OFFLOADED,
    Chunk,
    ContextKind,
    OffloadModule,
    Split,
    Strategy,
    chunks_of_sizes,
    even_chunks,
    recomputing,
    uniform_layers,
    with_wide_ends,
)
from search.engines.arguments import Ignored, LaunchArguments, is_open, words_of
from search.engines.megatron.arguments import Flag, LayoutError
from search.engines.megatron.names import (
    GATHERED_SHARDS,
    OTHER_MODELS,
    PRICED_MODELS,
    UNPRICED,
    WITHOUT_PATTERN,
    changes_of,
    concern_of,
)
from search.engines.megatron.release import (
    Release,
    allocator_of,
    attention_kernel,
    quirks_of,
)
from search.engines.megatron.rules import INTERLEAVED, PLACED
from search.engines.megatron.setting import STEPS, Setting, batch_steps, placed_words
from search.engines.megatron.sizes import is_gpt, model_of, read_pattern
from search.engines.megatron.stages import PATTERN, LayerPattern, chunks_of_layout
from search.engines.text import Configuration, arguments_in


class ReadRun(Record):
    """Run read from arguments, and the arguments that were not used."""

    run: Run
    ignored: tuple[Ignored, ...]
    unpriced: str | None = None
    """Reason why time and memory of the run cannot be estimated; None: they can."""
    notes: tuple[str, ...] = ()
    """Sentences on assumptions, such as an argument that was taken for another."""

    @property
    def not_understood(self) -> tuple[Ignored, ...]:
        """Ignored arguments whose effect is unknown."""
        return tuple(entry for entry in self.ignored if not entry.understood)


_OF_TIME = (
    "overlap-param-gather",
    "overlap-param-gather-with-optimizer-step",
    "overlap-p2p-communication",
    "overlap-p2p-communication-warmup-flush",
    "no-overlap-p2p-communication",
    "high-priority-stream-groups",
    "moe-hybridep-num-sms",
    "moe-deepep-num-sms",
    "moe-flex-dispatcher-num-sms",
    "moe-shared-expert-overlap",
    "moe-router-fusion",
    "ddp-num-buckets",
    "tp-comm-overlap-cfg",
    # DeepEP and HybridEP allocate their buffers outside of PyTorch.
    "moe-enable-deepep",
    "moe-flex-dispatcher-backend",
    # Expert degrees have no effect in a dense model, ungated activations are equal in size.
    "expert-tensor-parallel-size",
    "expert-model-parallel-size",
    "squared-relu",
    # Estimates use the final batch size, which a finding reports.
    "rampup-batch-size",
    STEPS,
    "decrease-batch-size-if-needed",
)
"""Flags that are accepted without being modelled: they change no memory of supported models."""
_DEFAULTS = (
    ("megatron-fsdp-grad-comm-dtype", "fp32"),
    ("megatron-fsdp-main-grads-dtype", "fp32"),
    ("megatron-fsdp-main-params-dtype", "fp32"),
    *(
        (f"{state}-dtype", "fp32")
        for state in ("main-grads", "main-params", "exp-avg", "exp-avg-sq")
    ),
    ("outer-dp-sharding-strategy", "no_shard"),
    ("muon-num-ns-steps", "5"),
    ("muon-fp32-matmul-prec", "medium"),
    ("muon-coefficient-type", "quintic"),
    # tensor ranks, between which the modes differ, are not priced
    *(("muon-tp-mode", mode) for mode in ("blockwise", "duplicated", "distributed")),
)
"""Pairs (flag, value) without effect: estimates assume the value if the flag is not given."""
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Sharding strategies of Megatron-FSDP."""
_ZERO: Mapping[str, Zero] = {"optim_grads_params": 3, "optim_grads": 2, "optim": 1}


def read_run(
    arguments: Mapping[str, Any],
    *,
    world_size: int | None = None,
    environment: Mapping[str, Any] | None = None,
    gpu: str = "H100",
    release: Release | None = None,
    source: str = "arguments",
) -> ReadRun:
    """Return the run that arguments such as `{"--num-layers": 12}` describe.

    world_size : number of GPUs; None: from `--world-size`.
    environment : environment variables of the ranks.
    gpu : GPU model.
    release : release of engine and container; default: the newest.
    source : name of the run, for messages.

    Raises DocumentError for an invalid value, UnpricedError for a feature that cannot be estimated,
    and RuleError for an illegal run.
    """
    words = LaunchArguments(source=source, words=renamed(words_of(arguments)), asked=set())
    _refuse(words)
    words.asked.update(_OF_TIME)
    words.asked.update(flag for flag, value in _DEFAULTS if words.words.get(flag) == (value,))
    world = world_size or words.number("world-size", 0)
    if not world:
        raise words.fail("world-size", "this key is missing", "Add the number of GPUs")
    release = release or Release()
    pattern = read_pattern(words)
    model = model_of(words, release, pattern)
    _refuse_sharding(words, release)
    strategy = strategy_of(
        words,
        world,
        release,
        num_layers=model.num_layers,
        mtp=model.mtp,
        experts=model.experts is not None,
        pattern=pattern,
    )
    run = Run(
        name=source,
        model=model,
        strategy=strategy,
        seq_length=words.number("seq-length"),
        steps=_steps(words, strategy.global_batch),
        runtime=_runtime(
            words,
            strategy.first,
            environment or {},
            gpu,
            release,
            experts=model.experts is not None,
        ),
        gpu=gpu,
    )
    unpriced = None
    if run.split.zero == 2:
        unpriced = "--data-parallel-sharding-strategy optim_grads is not priced; "
        unpriced += "Use optim_grads_params"
    ignored = words.ignored(changes_of, concern_of)
    return ReadRun(run=legal(run), ignored=ignored, unpriced=unpriced)


def renamed(words: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the words by flag, with aliases of `_SECOND` replaced.

    `validate_args` accepts aliases of `--num-layers`, `--seq-length` and `--hybrid-layer-pattern`.
    If alias and name are both given, which is illegal, both are kept.
    """
    return {
        _SECOND.get(flag, flag) if _SECOND.get(flag, flag) not in words else flag: given
        for flag, given in words.items()
    }


_SECOND = {
    "encoder-num-layers": "num-layers",
    "encoder-seq-length": "seq-length",
    "hybrid-override-pattern": PATTERN,
}
"""Alias of an argument -> its name."""


def arguments_of_configuration(source: Configuration) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (arguments, environment variables) of a script, YAML or JSON."""
    document: Any = source.document
    if source.flags is not None:
        document = {
            flag: True if not given else given[0] if len(given) == 1 else list(given)
            for flag, given in source.flags.items()
        }
        return document, {**source.environment}
    arguments = arguments_in(document)
    variables = None if arguments is document else document.get("ENV_VARS")
    if variables is None:
        variables = {}
    if not isinstance(variables, Mapping):
        problem = f"expected an object of environment variables, got {shorten(variables)}"
        raise DocumentError(source.path, problem, key="ENV_VARS")
    return {**arguments}, {name: str(value) for name, value in variables.items()}


def unread_parts(source: Configuration) -> tuple[str, ...]:
    """Return a sentence for each nested mapping in YAML or JSON arguments, which is not read."""
    if source.flags is not None:
        return ()
    arguments = arguments_in(source.document)
    own = ("ENV_VARS",) if arguments is source.document else ()
    return tuple(
        f"{key} contains keys that are not arguments; they are ignored"
        for key, value in arguments.items()
        if isinstance(value, Mapping) and key not in own
    )


def underscored(source: Configuration) -> tuple[str, ...]:
    """Return the flags with leading hyphens that argparse rejects because of underscores.

    YAML and JSON keys without leading hyphens are Python names, in which underscores are correct.
    """
    if source.command is not None:
        written = [word.partition("=")[0] for word in source.command.arguments]
    else:
        written = [str(key) for key in arguments_in(source.document)]
    # A variable in the name is replaced before argparse reads it.
    plain = (word for word in written if not is_open(word))
    flags = (word for word in plain if word.startswith("--") and "_" in word)
    return tuple(sorted({*flags} - _UNDERSCORED))


_UNDERSCORED = {"--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"}
"""Flags with underscores in Megatron-LM."""


def _steps(words: LaunchArguments, batch: int) -> int | None:
    """Return the number of steps until a run ends or exits; None: not given.

    A shell variable, such as `$TRAIN_ITERS`, counts as not given. batch : global batch size.
    """
    given = [
        words.number(flag)
        for flag in ("train-iters", "exit-interval")
        if words.has(flag) and not is_open(words.open_text(flag))
    ]
    if words.has("train-samples") and not is_open(words.open_text("train-samples")):
        # Sample counts may have more than the default of 9 digits.
        given.append(max(words.number("train-samples", digits=15) // batch, 1))
    return min(given, default=None)


def _refuse(words: LaunchArguments) -> None:
    hybrid = PATTERN in words.words
    for flags, what in OTHER_MODELS if hybrid else (*OTHER_MODELS, *WITHOUT_PATTERN):
        given = next((flag for flag in flags if flag in words.words), None)
        if given is not None:
            raise words.unpriced(given, f"belongs to {what}", PRICED_MODELS)
    if words.open_text("tokenizer-type").startswith("BertWordPiece"):
        raise words.unpriced("tokenizer-type", "belongs to a BERT model", PRICED_MODELS)
    words.has("is-hybrid-model")
    spec = " ".join(words.list("spec"))
    if spec not in ("", "local") and not (hybrid and _HYBRID_SPEC.fullmatch(spec)):
        raise words.unpriced("spec", f"names unknown layers: {shortened(spec)}", "Take it out")
    for flags, why in UNPRICED:
        # With the value `none`, or a degree of 1, the feature is off.
        on = [
            flag
            for flag in flags
            if words.has(flag) and words.words[flag] not in (("none",), ("1",))
        ]
        if on:
            raise words.unpriced(on[0], why, "Remove it to price the rest")


_HYBRID_SPEC = re.compile(r"megatron\.core\.models\.(mamba|hybrid)\.\1_layer_specs \1_stack_spec")


# --------------------------------------------------------------------------------------------------
# Degrees and layer partition.


def strategy_of(
    words: LaunchArguments,
    world: int,
    release: Release,
    *,
    num_layers: int,
    mtp: int = 0,
    experts: bool = False,
    pattern: LayerPattern | None = None,
) -> Strategy:
    """Return the strategy that arguments describe, for a model of `num_layers` layers.

    world : number of GPUs. mtp : number of MTP layers. experts : True if the model has experts.
    pattern : layers of a hybrid model, of which a GPT model has one for two letters.

    Raises InputError for an invalid argument. Degrees that do not divide the GPUs are accepted.
    """
    pp = words.number("pipeline-model-parallel-size", 1)
    letters = 2 if pattern is not None and is_gpt(words, pattern) else 1
    stages = _stages(words, num_layers, mtp, pp, pattern, letters)
    split = _split(words, release, experts=experts)
    ranks = split.tp * split.cp * pp
    # `dp` is 0 if the degrees do not divide the GPUs; `legal` rejects such a run.
    dp = 0 if world % ranks else world // ranks
    if dp * split.cp % split.replicas:
        raise words.fail(
            "num-distributed-optimizer-instances",
            f"dp * cp({dp * split.cp}) % {split.replicas} != 0",
        )
    micro = words.number("micro-batch-size")
    steps = batch_steps(words.list(STEPS))
    batch = steps[-1] if steps else words.number("global-batch-size", micro * max(dp, 1))
    layers, ends = uniform_layers(num_layers, split)
    strategy = Strategy(
        gpus=world,
        layers=layers,
        ends=ends,
        stages=stages,
        schedule=schedule_of_chunks(len(stages[0])),
        group=words.number("microbatch-group-size-per-virtual-pipeline-stage", 0),
        micro_batch=micro,
        global_batch=batch,
    )
    return _recomputing(words, _with_wide_ends(words, strategy), letters)


def _split(words: LaunchArguments, release: Release, *, experts: bool) -> Split:
    tp = words.number("tensor-model-parallel-size", 1)
    cp = words.number("context-parallel-size", 1)
    kinds = words.list("cp-comm-type")
    sizes = words.numbers("hierarchical-context-parallel-sizes")
    if "a2a+p2p" in kinds and (len(sizes) != 2 or sizes[0] * sizes[1] != cp):
        raise words.fail(
            "hierarchical-context-parallel-sizes",
            f"expected two sizes that multiply to {cp}, got {' '.join(map(str, sizes))}",
        )
    # Layers that differ in communication type are modelled as rings.
    kind = kinds[0] if cp > 1 and len({*kinds}) == 1 else "p2p"
    return Split(
        tp=tp,
        sequence_parallel=words.has("sequence-parallel"),
        cp=cp,
        cp_kind=_CONTEXT.get(kind, "ring"),
        rings=sizes[1] if kind == "a2a+p2p" else 1,
        # Expert degrees have no effect in a dense model.
        ep=words.number("expert-model-parallel-size", 1) if experts else 1,
        etp=words.number("expert-tensor-parallel-size", tp) if experts else 1,
        zero=_zero(words, release),
        replicas=words.number("num-distributed-optimizer-instances", 1),
        offload=_offloaded(words),
    )


_CONTEXT: Mapping[str, ContextKind] = {"a2a": "a2a", "a2a+p2p": "a2a", "all_gather": "all-gather"}
"""`--cp-comm-type` -> context-parallel type; other values are rings."""


def _stages(
    words: LaunchArguments,
    layers: int,
    mtp: int,
    stages: int,
    pattern: LayerPattern | None,
    letters: int,
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage.

    letters : number of letters of a pattern that are one layer of the model.
    """
    if pattern is not None and len(pattern.segments) > 1:
        return _segments(words, [len(one) // letters for one in pattern.segments], stages, mtp)
    flag = "pipeline-model-parallel-layout"
    if words.has(flag):
        text = words.text(flag)
        try:
            return chunks_of_layout(text, num_layers=layers, num_stages=stages, mtp=mtp)
        except LayoutError as error:
            raise words.fail(flag, str(error)) from None
    each = words.number("num-layers-per-virtual-pipeline-stage", 0)
    chunks = words.number("num-virtual-stages-per-pipeline-rank", 1)
    first = words.number("decoder-first-pipeline-num-layers", 0)
    last = words.number("decoder-last-pipeline-num-layers", 0)
    ends = (
        int(words.has("account-for-embedding-in-pipeline-split")),
        int(words.has("account-for-loss-in-pipeline-split")),
    )
    if each:
        # Embedding and loss count as one layer each if their flags are given.
        counted = layers + sum(ends)
        if counted % (stages * each):
            raise words.fail(
                "num-layers-per-virtual-pipeline-stage",
                f"layers({counted}) % (pp({stages}) * {each}) != 0",
            )
        chunks = counted // (stages * each)
    refuse((INTERLEAVED,), {"pp": stages, "chunks": chunks})
    if stages == 1:
        ends = (0, 0)
    if first or last:
        parts = _given_ends(words, layers, stages, chunks, (first, last))
        return chunks_of_sizes(parts, stages, mtp=mtp)
    return even_chunks(layers, stages, chunks, mtp=mtp, ends=ends)


def _segments(
    words: LaunchArguments, sizes: list[int], stages: int, mtp: int
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage from the numbers of layers of a pattern's segments."""
    if len(sizes) % stages:
        problem = f"has {len(sizes)} segments, no multiple of the {stages} stages"
        raise words.fail(PATTERN, problem)
    refuse((INTERLEAVED,), {"pp": stages, "chunks": len(sizes) // stages})
    return chunks_of_sizes(sizes, stages, mtp=mtp)


def _given_ends(
    words: LaunchArguments, layers: int, stages: int, chunks: int, ends: tuple[int, int]
) -> list[int]:
    """Return the number of layers of each chunk, in pipeline order, for given end stages.

    ends : number of layers of the first and of the last stage; 0: not given.

    Raises RuleError if the layers do not divide over the other stages, DocumentError if those of a
    stage do not divide over the chunks.
    """
    given = sum(map(bool, ends))
    refuse(PLACED, {
        "placed_layers": sum(ends), "placed_stages": given, "layers": layers, "pp": stages,
        "placed_words": placed_words(Setting(words.words, stages)),
    })  # fmt: skip
    if stages == 1:
        return [layers]
    each = (layers - sum(ends)) // (stages - given) if given < stages else 0
    sizes = [ends[0] or each, *[each] * (stages - 2), ends[1] or each]
    if any(size % chunks for size in sizes):
        raise words.fail(
            "pipeline-model-parallel-size",
            f"{layers} layers do not divide over {stages} stages of {chunks} chunks",
            "Use --pipeline-model-parallel-layout",
        )
    return [size // chunks for _ in range(chunks) for size in sizes]


# --------------------------------------------------------------------------------------------------
# Precision, optimizer, recomputation, offload and kernels.


def precision_of(words: LaunchArguments) -> Precision:
    fp8 = words.has("fp8-format")
    recipe = words.choice(
        "fp8-recipe", ("delayed", "tensorwise", "blockwise", "mxfp8", "custom"), "delayed"
    )
    if words.has("fp4-format") and words.text("fp4-recipe", "nvfp4") != "nvfp4":
        raise words.unpriced("fp4-recipe", "is a custom recipe", "Use nvfp4")
    return Precision(
        kind="fp16" if words.has("fp16") else "bf16" if words.has("bf16") else "fp32",
        fp8=fp8,
        fp8_weights=words.has("fp8-param-gather"),
        fp8_recipe=cast(Any, recipe),
        fp8_head=words.has("fp8-output-proj"),
        fp4=words.has("fp4-format"),
        fp4_weights=words.has("fp4-param-gather") and words.has("fp4-format"),
        gradients_bf16=words.has("grad-reduce-in-bf16"),
        gradients_fp32=words.has("accumulate-allreduce-grads-in-fp32"),
    )


def _with_wide_ends(words: LaunchArguments, strategy: Strategy) -> Strategy:
    """Return a strategy with bf16 layers at both ends, if `--first-last-layers-bf16` is given.

    The default is one layer at each end, as in `validate_args`. Without fp8 or fp4 the flag has no
    effect.
    """
    if not words.has("first-last-layers-bf16"):
        return strategy
    # `number` rejects 0, which is valid here.
    first, last = (
        0 if words.text(flag, "1") == "0" else words.number(flag, 1)
        for flag in ("num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16")
    )
    if not (words.has("fp8-format") or words.has("fp4-format")):
        return strategy
    return with_wide_ends(strategy, first, last)


_STATE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def _sharding(words: LaunchArguments, release: Release) -> str:
    """Return the sharding strategy of Megatron-FSDP."""
    usual = "optim_grads_params" if release.has("sharded by default") else "no_shard"
    return words.choice(Flag.SHARDING, _STRATEGIES, usual)


def _zero(words: LaunchArguments, release: Release) -> Zero:
    """Return the ZeRO stage of the distributed optimizer, Megatron-FSDP or FSDP2."""
    if words.has("use-torch-fsdp2"):
        # Weights that stay gathered after the forward pass correspond to ZeRO-2.
        return 2 if words.has("torch-fsdp2-no-reshard-after-forward") else 3
    zero: Zero = 1 if words.has("use-distributed-optimizer") else 0
    if not (words.has("use-megatron-fsdp") or words.has("use-custom-fsdp")):
        return zero
    return _ZERO.get(_sharding(words, release), zero)


def _refuse_sharding(words: LaunchArguments, release: Release) -> None:
    """Raise UnpricedError for Megatron-FSDP with pipeline stages or with sharding `optim`.

    Raised for generalized tensor parallelism, too: more weight shards than tensor ranks.
    """
    tensor = words.number(Flag.TENSOR, 1)
    expert = words.number("expert-tensor-parallel-size", tensor)
    for name, degree in (("tensor", tensor), ("expert-tensor", expert)):
        flag = f"{name}-parallel-num-weight-shards"
        if words.has(flag) and words.words[flag] not in (("none",), ("1",), (str(degree),)):
            raise words.unpriced(flag, GATHERED_SHARDS, "Remove it to price the rest")
    if not (words.has("use-megatron-fsdp") or words.has("use-custom-fsdp")):
        return
    pp = words.number(Flag.STAGES, 1)
    if pp > 1:
        # validate_args accepts pipeline stages, but no published run uses them.
        raise words.unpriced(
            "use-megatron-fsdp", f"with {pp} pipeline stages is not priced", "Use one stage"
        )
    if _sharding(words, release) == "optim":
        raise words.unpriced(Flag.SHARDING, "optim is not priced", "Use optim_grads_params")


def _optimizer(words: LaunchArguments, zero: Zero) -> Optimizer:
    """Return the optimizer with the bytes of its states and the fraction offloaded to the host.

    With the precision-aware distributed optimizer, an fp32 weight is stored as its bf16 copy and a
    remainder of 2 bytes (`store_param_remainders`), unless it is offloaded or has an fp8 copy.

    Raises UnpricedError for optimizers other than Adam and Muon.
    """
    kind = words.text("optimizer", "adam").removeprefix("dist_")
    if kind not in ("adam", "muon"):
        raise words.unpriced(
            "optimizer", f"{shortened(kind)} has other optimizer states", "Use adam or muon"
        )
    aware, moments = words.has("use-precision-aware-optimizer"), 8
    if aware:
        names = ("exp-avg-dtype", "exp-avg-sq-dtype")
        moments = sum(
            _STATE_BYTES[words.choice(name, tuple(_STATE_BYTES), "fp32")] for name in names
        )
    offloads = words.has("optimizer-cpu-offload")
    remainders = aware and not offloads and zero == 1
    remainders = remainders and words.has("bf16") and not words.has("fp8-param-gather")
    return Optimizer(
        kind=cast(Any, kind),
        moments_bytes=moments,
        master_bytes=2 if remainders else 4,
        offload=words.real("optimizer-offload-fraction", 1.0) if offloads else 0.0,
        offload_master=aware and offloads,
    )


def _recomputing(words: LaunchArguments, strategy: Strategy, letters: int) -> Strategy:
    """Return the strategy with the recomputation of the arguments.

    letters : number of letters of a pattern, the units of full recomputation, in a layer.
    """
    kind = words.choice("recompute-granularity", ("", "full", "selective"), "")
    # --recompute-activations of earlier releases overrides the granularity.
    if words.has("recompute-activations"):
        kind = "selective"
    number = max(words.number("recompute-num-layers", 1) // letters, 1)
    modules = words.list("recompute-modules")
    method = words.choice("recompute-method", ("", "uniform", "block"), "")
    if kind == "full":
        if not method:
            raise words.missing("recompute-method", "Add uniform or block")
        if method == "block":
            return recomputing(strategy, "full", first=number)
        return recomputing(strategy, "full", unit=number)
    if kind == "selective":
        unknown = set(modules) - set(get_args(Module))
        if unknown:
            raise words.fail(
                "recompute-modules",
                f"expected {', '.join(get_args(Module))}, got {shortened(sorted(unknown)[0])}",
            )
        chosen = frozenset(modules or ("core_attn",))
    else:
        chosen = frozenset()
    # Flag of earlier releases for the recomputed module `moe`.
    if words.has("moe-layer-recompute"):
        chosen |= {"moe"}
    return recomputing(strategy, cast("frozenset[Module]", chosen))


def _offloaded(words: LaunchArguments) -> frozenset[OffloadModule]:
    """Return the modules whose activations are offloaded to host memory.

    Raises DocumentError for unknown modules, and for fine-grained offload without modules.
    """
    fine = words.has("fine-grained-activation-offloading")
    modules = words.list("offload-modules") if fine else ()
    unknown = set(modules) - set(OFFLOADED)
    if unknown:
        raise words.fail(
            "offload-modules",
            f"expected {', '.join(OFFLOADED)}, got {shortened(sorted(unknown)[0])}",
        )
    if fine and not modules:
        raise words.missing("offload-modules", f"Add some of {', '.join(OFFLOADED)}")
    return cast("frozenset[OffloadModule]", frozenset(modules))


def _offload(words: LaunchArguments) -> ActivationOffload:
    layers = 0
    if any([words.has("cpu-offloading-num-layers"), words.has("cpu-offloading")]):
        layers = words.number("cpu-offloading-num-layers", 0)
    return ActivationOffload(
        fraction=words.real("activation-offload-fraction", 1.0),
        layers=layers,
        least_elements=words.number("min-offloaded-tensor-size", 1 << 20),
    )


def _loss(words: LaunchArguments) -> Loss:
    kind = words.choice("cross-entropy-fusion-impl", ("native", "te", "linear"), "native")
    if kind == "linear":
        raise words.unpriced(
            "cross-entropy-fusion-impl", "linear is not priced", "Use native or te"
        )
    return cast(Loss, kind) if words.has("cross-entropy-loss-fusion") else "none"


def _runtime(
    words: LaunchArguments,
    split: Split,
    environment: Mapping[str, Any],
    gpu: str,
    release: Release,
    *,
    experts: bool,
) -> Runtime:
    on_host = words.has("optimizer-cpu-offload")
    return Runtime(
        engine="megatron",
        precision=precision_of(words),
        optimizer=_optimizer(words, split.zero),
        states=States(
            keeper="megatron-fsdp" if split.zero == 3 else "megatron",
            bucket=words.number("ddp-bucket-size") if words.has("ddp-bucket-size") else None,
            padded_buckets=words.has("ddp-pad-buckets-for-high-nccl-busbw"),
        ),
        kernels=_kernels(words, environment, gpu, release),
        # A pattern may have no experts, whatever the arguments.
        experts=_expert_kernels(words) if experts else ExpertKernels(),
        overlap=Overlap(
            tensor=words.has("tp-comm-overlap") and split.tp > 1,
            gradients=words.has("overlap-grad-reduce"),
            experts=words.has("overlap-moe-expert-parallel-comm"),
            optimizer_host=on_host and words.has("overlap-cpu-optimizer-d2h-h2d"),
        ),
        offload=_offload(words),
        allocator=allocator_of(environment),
        masks=not words.has("no-create-attention-mask-in-dataloader"),
    )


def _kernels(
    words: LaunchArguments, environment: Mapping[str, Any], gpu: str, release: Release
) -> Kernels:
    implementation = words.choice(
        "transformer-impl",
        ("transformer_engine", "local", "inference_optimized"),
        "transformer_engine",
    )
    backend = words.choice(
        "attention-backend", ("auto", "flash", "fused", "unfused", "local"), "auto"
    )
    # Deprecated flag for kernels that do not store attention scores; `auto` selects such kernels.
    words.has("use-flash-attn")
    local = implementation == "local" or words.list("spec") == ("local",)
    # Looked up without effect: environment variables select deterministic kernels.
    words.has("deterministic-mode")
    return Kernels(
        attention=attention_kernel(
            release,
            gpu,
            environment,
            precision=precision_of(words).kind,
            local=local,
            backend=backend,
        ),
        module="megatron" if local else "te",
        loss=_loss(words),
        fused_gate=not words.has("no-bias-swiglu-fusion"),
        fused_rotary=not words.has("no-rope-fusion"),
        fused_accumulation=not words.has("no-gradient-accumulation-fusion"),
        deferred_head=words.number("wgrad-deferral-limit", 0)
        if words.has("defer-embedding-wgrad-compute")
        else None,
        quirks=quirks_of(release, compiled_experts=words.has("moe-use-legacy-grouped-gemm")),
        graphs=graphs_of(words),
    )


def graphs_of(words: LaunchArguments) -> Graphs:
    """Return the CUDA graphs of a run.

    `full_iteration` selects a graph of the whole step as implementation or, in older releases, as
    scope. Source: `core/transformer/cuda_graph_config.py`.
    """
    kinds = ("none", "local", "transformer_engine", "full_iteration")
    kind = words.choice("cuda-graph-impl", kinds, "none")
    if words.has("enable-cuda-graph"):
        kind = "local"
    if words.has("external-cuda-graph"):
        kind = "transformer_engine"
    scopes = {*words.list("cuda-graph-scope"), *words.list("cuda-graph-modules")}
    if "full_iteration" in {kind, *scopes}:
        return "full"
    if kind == "none":
        return "none"
    return "attention" if scopes == {"attn"} else "partial"


def _expert_kernels(words: LaunchArguments) -> ExpertKernels:
    gated, squared = words.has("swiglu"), words.has("squared-relu")
    dispatcher = words.choice(
        "moe-token-dispatcher-type", ("allgather", "alltoall", "alltoall_seq", "flex"), "allgather"
    )
    return ExpertKernels(
        dispatcher=cast(Any, dispatcher.removesuffix("_seq")),
        capacity=words.real("moe-expert-capacity-factor", 1.0)
        if words.has("moe-expert-capacity-factor")
        else None,
        padded=words.has("moe-pad-expert-input-to-capacity"),
        router_fp32=words.text("moe-router-dtype") in ("fp32", "fp64"),
        grouped=words.has("moe-grouped-gemm"),
        fused_permutation=words.has("moe-permute-fusion"),
        # Fused weighting exists for gated and for squared-ReLU activations.
        fused_weighting=(gated and not words.has("no-bias-swiglu-fusion"))
        or (squared and words.has("use-fused-weighted-squared-relu")),
        fused_mlp=words.has("use-transformer-engine-op-fuser"),
        # Forced load balancing gives every rank the same number of tokens.
        skew=1.0 if words.has("moe-router-force-load-balancing") else None,
    )
