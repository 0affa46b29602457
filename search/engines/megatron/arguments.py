"""Plan from the arguments of Megatron-LM, and the names of these arguments.

`search.engines.megatron.plan` exports plans; this module reads arguments in the same meaning. Input
is a launch script, YAML (`MODEL_ARGS:` of the functional tests, or plain keys), or a JSON object of
arguments. A flag is rejected if it changes the plan in a way that plans cannot express. Settings
that matter only for pricing, and flags that do not affect the plan, become notes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from autopar.errors import DocumentError
from autopar.records import Record, replace, shorten
from autopar.run.plan import (
    LayerStrategy,
    Plan,
    VocabStrategy,
    ZeroDefault,
    data_degree,
)
from search.engines.place import Imported
from search.engines.text import Configuration, arguments_in, flags_of_document

Argument = tuple[str, tuple[str, ...]]
"""A flag without leading hyphens, and its words; no words for a flag without a value."""
Arguments = Mapping[str, tuple[str, ...]]
"""Words by flag without leading hyphens."""


class Flag(StrEnum):
    """Names of arguments that are exported, read and checked, without leading hyphens."""

    TENSOR = "tensor-model-parallel-size"
    STAGES = "pipeline-model-parallel-size"
    CONTEXT = "context-parallel-size"
    COMMUNICATION = "cp-comm-type"
    HIERARCHY = "hierarchical-context-parallel-sizes"
    LAYOUT = "pipeline-model-parallel-layout"
    MICRO_BATCH = "micro-batch-size"
    GLOBAL_BATCH = "global-batch-size"
    SHARDING = "data-parallel-sharding-strategy"
    GRANULARITY = "recompute-granularity"
    METHOD = "recompute-method"
    RECOMPUTED = "recompute-num-layers"


SEVERAL = frozenset(
    {
        Flag.COMMUNICATION,
        Flag.HIERARCHY,
        "moe-aux-loss-coeff",
        "moe-router-load-balancing-type",
        "offload-modules",
        "rampup-batch-size",
        "recompute-modules",
    }
)
"""Flags that take several words, which YAML and JSON may contain as one text."""


# --------------------------------------------------------------------------------------------------
# Conversion between layer strategies and words of `cp-comm-type`.


class MegatronDegrees(Record):
    """Tensor and context degrees of the whole model."""

    tensor: int = 1
    context: int = 1
    exchange: int = 1
    """All-to-all degree inside the context group, in layers with `a2a+p2p`; 1: no such layers."""

    def data(self, plan: Plan) -> int:
        """Return the data degree of a plan with these degrees, 0 where they do not divide."""
        return data_degree(plan.world_size, plan.num_stages, self.tensor * self.context)

    def layer(self, word: str) -> LayerStrategy:
        """Return the strategy of a layer whose `cp-comm-type` is a word of `_WAYS`."""
        ulysses, ring = _WAYS[word]
        if not ulysses:
            return LayerStrategy(tp=self.tensor, cp=self.context)
        # An all-to-all over the whole context group is Ulysses of that degree.
        degree = self.exchange if ring else self.context
        return LayerStrategy(tp=degree, ulysses=degree > 1, cp=self.context // degree)


_WAYS = {
    "p2p": (False, True),
    "a2a": (True, False),
    "a2a+p2p": (True, True),
    # Priced as the ring, and so never exported: a plan has one type of context parallelism.
    "all_gather": (False, True),
    "allgather": (False, True),
}
"""Word of `cp-comm-type` -> (True with Ulysses, True with a ring)."""


def communication(strategy: LayerStrategy) -> str:
    """Return the `cp-comm-type` of a layer; it has no meaning at context degree 1."""
    way = (strategy.ulysses, strategy.cp > 1 or not strategy.ulysses)
    return next(word for word, known in _WAYS.items() if known == way)


def engine_vocab(
    degrees: MegatronDegrees, layers: Sequence[LayerStrategy], *, zero3: bool
) -> VocabStrategy:
    """Return the strategy of embedding and head in the engine.

    Tensor ranks split the weights, context ranks the tokens. If all layers use all-to-all over the
    whole context group, embedding and head have Ulysses too.
    """
    if degrees.context > 1 and all(s.ulysses and s.cp == 1 for s in layers):
        return VocabStrategy(tp=degrees.context, ulysses=True, zero3=zero3)
    return VocabStrategy(tp=degrees.tensor, zero3=zero3, cp=degrees.context)


# --------------------------------------------------------------------------------------------------
# The layout string of Megatron-LM, which assigns layers to pipeline stages.
#
# `--pipeline-model-parallel-layout` lists the stages in order, separated by `|`. `E` is the
# embedding, `t` a transformer layer, `m` a multi-token-prediction layer, `L` the loss. `x*3` means
# `xxx`, `(tt|)*3` means `tt|tt|tt|`; commas are ignored. Source of the grammar and the rules:
# `megatron/core/transformer/pipeline_parallel_layer_layout.py` (NVIDIA/Megatron-LM, main).


_KINDS = frozenset("EtmL|")
_MOST = 1 << 16
"""Maximum length of an expanded layout, in characters; far above any real model."""


class LayoutError(ValueError):
    """Invalid layout, or one of another model; the message is a predicate without its subject."""


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the parts of a layout in expanded form, such as `("Ett", "ttL")`.

    Raises LayoutError for an unknown character, and for an incomplete bracket or repetition.
    """
    return tuple(_written_out(text.replace(",", "")).split("|"))


def _written_out(text: str, *, in_bracket: bool = False) -> str:
    """Return a layout with brackets and repetitions expanded; brackets are not nested."""
    written, at = "", 0
    while at < len(text):
        piece, at = text[at], at + 1
        if piece == "(" and not in_bracket:
            end = text.find(")", at)
            if end < 0:
                raise LayoutError("a bracket is not closed")
            if end == at:
                raise LayoutError("a bracket is empty")
            piece, at = _written_out(text[at:end], in_bracket=True), end + 1
            if text[at : at + 1] != "*":
                raise LayoutError("a bracket needs a repetition such as (tt|)*3")
        elif piece not in _KINDS:
            raise LayoutError(f"holds the unknown character {piece!r}")
        count, at = _count(text, at)
        # Checked before the expansion: `t*9999999` would fill the memory.
        if len(written) + len(piece) * count > _MOST:
            raise LayoutError(f"describes more than {_MOST} layers and stages")
        written += piece * count
    return written


def stage_sizes(text: str, *, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of transformer layers of every stage.

    Raises LayoutError for an invalid layout, one of another model, and one that plans cannot
    express: several parts per stage, multi-token prediction, or a stage without a layer.
    """
    stages = parse_layout(text)
    if len(stages) % num_stages:
        raise LayoutError(f"has {len(stages)} parts, no multiple of the {num_stages} stages")
    flat = "".join(stages)
    if flat[:1] != "E" or flat.count("E") != 1:
        raise LayoutError("needs one E, as its first character")
    if flat[-1:] != "L" or flat.count("L") != 1:
        raise LayoutError("needs one L, as its last character")
    if flat.count("t") != num_layers:
        raise LayoutError(f"has {flat.count('t')} layers where the model has {num_layers}")
    if "m" in flat:
        raise LayoutError("has multi-token-prediction layers (m), which no plan has")
    if len(stages) != num_stages:
        raise LayoutError(
            f"has {len(stages) // num_stages} parts per stage, and no plan is interleaved"
        )
    sizes = tuple(stage.count("t") for stage in stages)
    if not all(sizes):
        raise LayoutError(f"leaves stage {sizes.index(0)} without a layer, which no plan does")
    return sizes


def _count(text: str, at: int) -> tuple[int, int]:
    """Return (number of repetitions, next position) of a repetition `*N` at `at`; 1 without one."""
    if text[at : at + 1] != "*":
        return 1, at
    match = re.compile(r"\*([0-9]+)").match(text, at)
    if match is None:
        raise LayoutError("a * is followed by no number")
    # Checked before int(), which rejects numbers of thousands of digits.
    if len(match[1]) > 6:
        raise LayoutError(f"repeats something more than {_MOST} times")
    return int(match[1]), match.end()


# --------------------------------------------------------------------------------------------------
# Arguments -> plan, so that an existing run can be priced.


_BARE = frozenset(
    {
        "sequence-parallel",
        "use-distributed-optimizer",
        "use-megatron-fsdp",
        "use-custom-fsdp",
        "use-torch-fsdp2",
        "torch-fsdp2-no-reshard-after-forward",
        "overlap-grad-reduce",
        "recompute-activations",
        "grad-reduce-in-bf16",
        "bf16",
        "fp16",
        "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split",
    }
)
_SHARDED: dict[str, tuple[bool, ZeroDefault]] = {
    "no_shard": (False, "ddp"),
    "optim": (False, "zero1"),
    "optim_grads": (False, "zero2"),
    "optim_grads_params": (True, "ddp"),
}
"""Sharding strategy of Megatron-FSDP -> (True for ZeRO-3, data-parallel type without ZeRO-3)."""


def import_megatron(
    source: Configuration, *, world_size: int | None = None, num_layers: int | None = None
) -> Imported:
    """Return the plan that Megatron-LM arguments describe.

    Parameters
    ----------
    world_size : number of GPUs, where the source does not contain it.
    num_layers : number of layers, where the source does not contain it.

    Raises DocumentError for an unusable argument, and for one that plans cannot express.
    """
    arguments = _Arguments(
        path=source.path, words=source.flags if source.flags is not None else _words(source)
    )
    own = world_size or source.world_size or arguments.number("world-size", 0)
    world = source.num_gpus(own)
    notes = list[str]()
    plan = _plan(arguments, world, num_layers, notes)
    return Imported(plan=plan, notes=tuple(notes))


class _Arguments(Record):
    """Words by flag, with lookups that check them."""

    path: Path
    words: Mapping[str, tuple[str, ...]]

    def fail(self, flag: str, problem: str, remedy: str | None = None) -> DocumentError:
        return DocumentError(self.path, problem, key=f"--{flag}", remedy=remedy)

    def has(self, flag: str) -> bool:
        return flag in self.words

    def text(self, flag: str, default: str = "") -> str:
        words = self.words.get(flag)
        if words is None:
            return default
        if len(words) != 1:
            raise self.fail(flag, f"expected one value, got {shorten(' '.join(words))}")
        return words[0]

    def number(self, flag: str, default: int | None = None) -> int:
        if flag not in self.words:
            if default is None:
                raise self.fail(flag, "is missing", "add it")
            return default
        return self._whole(flag, self.text(flag))

    def numbers(self, flag: str) -> tuple[int, ...]:
        return tuple(self._whole(flag, word) for word in self.words.get(flag, ()))

    def _whole(self, flag: str, text: str) -> int:
        # The length is checked before int(), which rejects thousands of digits.
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
            unknown = "$" in text or "`" in text
            raise self.fail(
                flag,
                f"expected a positive integer, got {shorten(text)}",
                "write the number, the script's variable is unknown here" if unknown else None,
            )
        return int(text)


def _words(source: Configuration) -> dict[str, tuple[str, ...]]:
    """Return words by flag of a document of arguments; `false` and `null` mean not given."""
    words = flags_of_document(arguments_in(source.document), several=SEVERAL)
    return {
        flag: () if flag in _BARE and w in (("true",), ("True",)) else w
        for flag, w in words.items()
    }


def _plan(arguments: _Arguments, world: int, num_layers: int | None, notes: list[str]) -> Plan:
    tensor = arguments.number(Flag.TENSOR, 1)
    stages = arguments.number(Flag.STAGES, 1)
    context = arguments.number(Flag.CONTEXT, 1)
    experts = "expert-model-parallel-size"
    if arguments.number(experts, 1) > 1:
        raise arguments.fail(
            experts,
            f"is {arguments.text(experts)}, and plans have expert degree 1",
            "take it out to price the rest",
        )
    data, rest = divmod(world, tensor * stages * context)
    if rest:
        raise arguments.fail(
            Flag.TENSOR,
            f"{world} GPUs % (tp({tensor}) * pp({stages}) * cp({context})) = {rest} != 0",
            "give the --nodes and --gpus-per-node of the launch",
        )
    layers = arguments.number("num-layers", num_layers)
    micro = arguments.number(Flag.MICRO_BATCH)
    # The default of Megatron-LM is one micro-batch on every data-parallel rank.
    batch = arguments.number(Flag.GLOBAL_BATCH, micro * data)
    if batch % (micro * data):
        raise arguments.fail(
            Flag.GLOBAL_BATCH,
            f"{batch} % (micro batch({micro}) * dp({data})) = {batch % (micro * data)} != 0",
            "Megatron-LM refuses it too; make it a multiple",
        )
    sizes = _sizes(arguments, layers, stages)
    zero3, default = _data_type(arguments)
    strategies, degrees = _strategies(arguments, layers, tensor, context)
    recomputed = _recomputed(arguments, sizes, notes)
    plan = Plan(
        world_size=world,
        num_stages=stages,
        stage_sizes=sizes,
        layers=tuple(
            replace(strategy, zero3=zero3, checkpoint=again)
            for strategy, again in zip(strategies, recomputed, strict=True)
        ),
        # Placeholder, replaced below: the strategy follows from the layers of the plan.
        vocab=VocabStrategy(),
        global_batch=batch,
        num_microbatches=batch // (micro * data),
        default_dp_type=default,
    )
    vocab = engine_vocab(degrees, plan.layers, zero3=zero3)
    _say_pricing(arguments, tensor, notes)
    _say_reductions(arguments, batch // (micro * data), notes)
    return replace(plan, vocab=vocab)


def _sizes(arguments: _Arguments, layers: int, stages: int) -> tuple[int, ...]:
    for flag in ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"):
        if arguments.has(flag):
            # A single chunk per stage is not interleaved.
            whole = layers // stages if flag.startswith("num-layers") else 1
            if arguments.number(flag) != whole:
                raise arguments.fail(
                    flag,
                    f"is {arguments.text(flag)}, an interleaved schedule, which no plan has",
                    "take it out to price the same stages with 1F1B",
                )
    if arguments.has(Flag.LAYOUT):
        text = arguments.text(Flag.LAYOUT)
        try:
            return stage_sizes(text, num_layers=layers, num_stages=stages)
        except LayoutError as error:
            raise arguments.fail(Flag.LAYOUT, str(error)) from None
    first = arguments.number("decoder-first-pipeline-num-layers", 0)
    last = arguments.number("decoder-last-pipeline-num-layers", 0)
    embedding = arguments.has("account-for-embedding-in-pipeline-split")
    loss = arguments.has("account-for-loss-in-pipeline-split")
    # Stages with given sizes are excluded from the even division.
    middle = stages - bool(first) - bool(last)
    # With their flags, embedding and loss count as one layer each.
    rest = layers - first - last + embedding + loss
    if rest < middle or (rest % middle if middle else rest):
        raise arguments.fail(
            Flag.STAGES,
            f"{rest} layers do not divide over {middle} stages",
            "Megatron-LM refuses it too; give --pipeline-model-parallel-layout",
        )
    each = rest // middle if middle else 0
    sizes = [each] * stages
    # The position that counts for the embedding holds no layer.
    sizes[0] = first or each - embedding
    if stages > 1:
        sizes[-1] = last or each - loss
    elif embedding or loss:
        # A single stage has all layers, whatever the flags.
        sizes[0] = layers
    if min(sizes) < 1:
        raise arguments.fail(Flag.STAGES, "a stage is left without a layer", "use fewer stages")
    return tuple(sizes)


def _data_type(arguments: _Arguments) -> tuple[bool, ZeroDefault]:
    """Return (True for ZeRO-3, data-parallel type of layers without ZeRO-3)."""
    if arguments.has("use-torch-fsdp2"):
        kept = arguments.has("torch-fsdp2-no-reshard-after-forward")
        # Weights that stay gathered after the forward pass correspond to ZeRO-2.
        return not kept, "zero2" if kept else "ddp"
    if arguments.has("use-megatron-fsdp") or arguments.has("use-custom-fsdp"):
        flag = Flag.SHARDING
        strategy = arguments.text(flag, "no_shard")
        if strategy not in _SHARDED:
            expected = ", ".join(_SHARDED)
            raise arguments.fail(flag, f"expected one of {expected}, got {shorten(strategy)}")
        return _SHARDED[strategy]
    # The distributed optimizer shards optimizer states only.
    return False, "zero1" if arguments.has("use-distributed-optimizer") else "ddp"


def _strategies(
    arguments: _Arguments, layers: int, tensor: int, context: int
) -> tuple[list[LayerStrategy], MegatronDegrees]:
    if context == 1:
        return [LayerStrategy(tp=tensor)] * layers, MegatronDegrees(tensor=tensor)
    flag = Flag.COMMUNICATION
    # The default of Megatron-LM is the ring.
    kinds = arguments.words.get(flag, ("p2p",))
    if len(kinds) == 1:
        kinds = kinds * layers
    if len(kinds) != layers:
        raise arguments.fail(flag, f"has {len(kinds)} entries for {layers} layers")
    unknown = [kind for kind in kinds if kind not in _WAYS]
    if unknown:
        raise arguments.fail(
            flag, f"expected p2p, all_gather, a2a or a2a+p2p, got {shorten(unknown[0])}"
        )
    exchanges = any(kind.startswith("a2a") for kind in kinds)
    if exchanges and tensor > 1:
        raise arguments.fail(
            flag,
            f"exchanges heads beside --tensor-model-parallel-size {tensor}, and a layer of a plan "
            "has tensor parallelism or Ulysses",
            "p2p can be priced",
        )
    inner = 1
    if "a2a+p2p" in kinds:
        sizes = arguments.numbers(Flag.HIERARCHY)
        if len(sizes) != 2 or sizes[0] * sizes[1] != context:
            raise arguments.fail(
                Flag.HIERARCHY,
                f"expected two sizes that multiply to {context}, got {shorten(list(sizes))}",
            )
        inner = sizes[0]
    degrees = MegatronDegrees(tensor=tensor, context=context, exchange=inner)
    return [degrees.layer(kind) for kind in kinds], degrees


def _recomputed(arguments: _Arguments, sizes: Sequence[int], notes: list[str]) -> tuple[bool, ...]:
    granularity = arguments.text(Flag.GRANULARITY)
    if arguments.has("recompute-activations") or granularity == "selective":
        notes.append("selective recomputation is priced as none: it needs less memory than that")
        return (False,) * sum(sizes)
    if not arguments.has(Flag.GRANULARITY):
        return (False,) * sum(sizes)
    if granularity != "full":
        raise arguments.fail(
            Flag.GRANULARITY, f"expected full or selective, got {shorten(granularity)}"
        )
    method = arguments.text(Flag.METHOD)
    if method not in ("block", "uniform"):
        raise arguments.fail(
            Flag.METHOD, f"expected block or uniform, got {shorten(method)}", "add it"
        )
    count = arguments.number(Flag.RECOMPUTED)
    if method == "uniform":
        if count > 1:
            notes.append(
                f"recomputation in units of {count} layers is priced as of single layers, which "
                "keep more activations and need less for a moment"
            )
        return (True,) * sum(sizes)
    return tuple(position < count for size in sizes for position in range(size))


def _say_pricing(arguments: _Arguments, tensor: int, notes: list[str]) -> None:
    """Append a note for each pricing option that the plan does not contain."""
    if tensor > 1 and not arguments.has("sequence-parallel"):
        notes.append("no --sequence-parallel: price it with --no-sequence-parallel")
    if arguments.has("fp16"):
        wide = arguments.has("accumulate-allreduce-grads-in-fp32")
        gradients = "" if wide else " --no-fp32-gradients"
        notes.append(f"--fp16: price it with --mixed-precision fp16{gradients}")
    elif not arguments.has("bf16"):
        notes.append("neither --bf16 nor --fp16: price it with --mixed-precision fp32")
    elif arguments.has("grad-reduce-in-bf16"):
        notes.append("--grad-reduce-in-bf16: price it with --no-fp32-gradients")
    if not arguments.has("overlap-grad-reduce"):
        notes.append("no --overlap-grad-reduce: the price assumes that reductions overlap")


def _say_reductions(arguments: _Arguments, num_microbatches: int, notes: list[str]) -> None:
    """Append a note where Megatron-FSDP reduces sharded gradients in every micro-batch."""
    fully_sharded = arguments.has("use-megatron-fsdp") or arguments.has("use-custom-fsdp")
    kind = arguments.text(Flag.SHARDING, "no_shard")
    if fully_sharded and kind.startswith("optim_grads") and num_microbatches > 1:
        notes.append(
            "Megatron-FSDP reduces gradients in every micro-batch: price it with "
            "--no-async-grad-reduce"
        )
