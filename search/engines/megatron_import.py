"""Megatron-LM arguments -> plan, so that an existing launch can be priced.

Read are launch scripts, YAML (`MODEL_ARGS:` of its functional tests, or plain keys) and JSON
objects of arguments. A flag that changes the plan and that no plan can say is refused; what only
pricing has to know, and flags that say nothing of the plan, are notes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.documents.json import shorten
from autopar.errors import DocumentError
from autopar.plans import LayerStrategy, Plan, VocabStrategy, ZeroDefault
from search.engines.configuration import Configuration, Imported
from search.engines.megatron import LayoutError, stage_sizes
from search.engines.megatron_nearest import Degrees, engine_vocab

__all__ = ["import_megatron"]

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
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def import_megatron(
    source: Configuration, *, world_size: int | None = None, num_layers: int | None = None
) -> Imported:
    """Return the plan that Megatron-LM arguments describe.

    Parameters
    ----------
    world_size : number of GPUs, where the launch does not say it. num_layers : the same.

    Raises
    ------
    DocumentError : an argument is unusable, or says what no plan can.
    """
    arguments = _Arguments(
        path=source.path, words=source.flags if source.flags is not None else _words(source)
    )
    world = world_size or source.world_size or arguments.number("world-size", 0)
    if not world:
        raise DocumentError(
            source.path,
            "does not say the number of GPUs",
            remedy="give --num-nodes and --num-gpus-per-node",
        )
    notes = list[str]()
    plan = _plan(arguments, world, num_layers, notes)
    return Imported(plan=plan, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Flags with the checks that their words need."""

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
        # short before int(), which refuses thousands of digits
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
            unknown = "$" in text or "`" in text
            raise self.fail(
                flag,
                f"expected a positive integer, got {shorten(text)}",
                "write the number, the script's variable is unknown here" if unknown else None,
            )
        return int(text)


def _words(source: Configuration) -> dict[str, tuple[str, ...]]:
    """Return the flags of a document of arguments; `false` and `null` are flags not given."""
    document: Any = source.document
    for key in ("MODEL_ARGS", "model_args", "args"):
        if isinstance(document.get(key), Mapping):
            document = document[key]
            break
    words: dict[str, tuple[str, ...]] = {}
    for key, value in document.items():
        flag = str(key).lstrip("-").replace("_", "-")
        if value is None or value is False or isinstance(value, Mapping):
            continue
        if value is True:
            words[flag] = ()
        elif isinstance(value, list | tuple):
            words[flag] = tuple(str(item) for item in value)
        elif isinstance(value, float) and value.is_integer():
            # YAML reads 5e3 as a float
            words[flag] = (str(int(value)),)
        elif flag == "cp-comm-type":
            # one text with a word for each layer
            words[flag] = tuple(str(value).split())
        else:
            words[flag] = (str(value),)
    return {
        flag: () if flag in _BARE and w in (("true",), ("True",)) else w
        for flag, w in words.items()
    }


def _plan(arguments: _Arguments, world: int, num_layers: int | None, notes: list[str]) -> Plan:
    tensor = arguments.number("tensor-model-parallel-size", 1)
    stages = arguments.number("pipeline-model-parallel-size", 1)
    context = arguments.number("context-parallel-size", 1)
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
            "tensor-model-parallel-size",
            f"{world} GPUs % (tp({tensor}) * pp({stages}) * cp({context})) = {rest} != 0",
            "give the --num-nodes and --num-gpus-per-node of the launch",
        )
    layers = arguments.number("num-layers", num_layers)
    micro = arguments.number("micro-batch-size")
    # without it the batch is one micro-batch on every data rank
    batch = arguments.number("global-batch-size", micro * data)
    if batch % (micro * data):
        raise arguments.fail(
            "global-batch-size",
            f"{batch} % (micro batch({micro}) * dp({data})) = {batch % (micro * data)} != 0",
            "Megatron-LM refuses it too; make it a multiple",
        )
    sizes = _sizes(arguments, layers, stages)
    zero3, default = _data_type(arguments, notes)
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
        # a placeholder: it follows from the plan, below
        vocab=VocabStrategy(),
        global_batch=batch,
        num_microbatches=batch // (micro * data),
        default_dp_type=default,
    )
    vocab = engine_vocab(degrees, plan, zero3=zero3)
    if tensor > 1 and context > 1 and vocab.ulysses:
        notes.append(
            f"embedding and head are priced as one Ulysses group of {vocab.tp}, with more weights "
            "on a rank than Megatron-LM keeps: a plan has no context degree for them"
        )
    _say_pricing(arguments, tensor, notes)
    _say_reductions(arguments, batch // (micro * data), notes)
    return replace(plan, vocab=vocab)


def _sizes(arguments: _Arguments, layers: int, stages: int) -> tuple[int, ...]:
    for flag in ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"):
        if arguments.has(flag):
            # a single part per stage is not interleaved
            whole = layers // stages if flag.startswith("num-layers") else 1
            if arguments.number(flag) != whole:
                raise arguments.fail(
                    flag,
                    f"is {arguments.text(flag)}, an interleaved schedule, which no plan has",
                    "take it out to price the same stages with 1F1B",
                )
    if arguments.has("pipeline-model-parallel-layout"):
        text = arguments.text("pipeline-model-parallel-layout")
        try:
            return stage_sizes(text, num_layers=layers, num_stages=stages)
        except LayoutError as error:
            raise arguments.fail("pipeline-model-parallel-layout", str(error)) from None
    first = arguments.number("decoder-first-pipeline-num-layers", 0)
    last = arguments.number("decoder-last-pipeline-num-layers", 0)
    embedding = arguments.has("account-for-embedding-in-pipeline-split")
    loss = arguments.has("account-for-loss-in-pipeline-split")
    # stages whose sizes are given take no part in the division
    middle = stages - bool(first) - bool(last)
    # embedding and loss count as a layer each where the flags say so
    rest = layers - first - last + embedding + loss
    if rest < middle or (rest % middle if middle else rest):
        raise arguments.fail(
            "pipeline-model-parallel-size",
            f"{rest} layers do not divide over {middle} stages",
            "Megatron-LM refuses it too; give --pipeline-model-parallel-layout",
        )
    each = rest // middle if middle else 0
    sizes = [each] * stages
    # what was counted for the embedding is no layer
    sizes[0] = first or each - embedding
    if stages > 1:
        sizes[-1] = last or each - loss
    elif embedding or loss:
        # nothing to even out on one stage, which has all layers
        sizes[0] = layers
    if min(sizes) < 1:
        raise arguments.fail(
            "pipeline-model-parallel-size", "a stage is left without a layer", "use fewer stages"
        )
    return tuple(sizes)


def _data_type(arguments: _Arguments, notes: list[str]) -> tuple[bool, ZeroDefault]:
    """Return (ZeRO-3, what the layers do otherwise)."""
    if arguments.has("use-torch-fsdp2"):
        kept = arguments.has("torch-fsdp2-no-reshard-after-forward")
        # weights that stay after the forward are those of ZeRO-2
        return not kept, "zero2" if kept else "ddp"
    if arguments.has("use-megatron-fsdp") or arguments.has("use-custom-fsdp"):
        flag = "data-parallel-sharding-strategy"
        strategy = arguments.text(flag, "no_shard")
        if strategy not in _STRATEGIES:
            expected = ", ".join(_STRATEGIES)
            raise arguments.fail(flag, f"expected one of {expected}, got {shorten(strategy)}")
        if strategy == "optim":
            notes.append("--data-parallel-sharding-strategy optim is priced as ZeRO-2")
        sharded = strategy in ("optim", "optim_grads")
        return strategy == "optim_grads_params", "zero2" if sharded else "ddp"
    return False, "zero2" if arguments.has("use-distributed-optimizer") else "ddp"


def _strategies(
    arguments: _Arguments, layers: int, tensor: int, context: int
) -> tuple[list[LayerStrategy], Degrees]:
    if context == 1:
        return [LayerStrategy(tp=tensor)] * layers, Degrees(tensor=tensor)
    flag = "cp-comm-type"
    # its default is the ring
    kinds = arguments.words.get(flag, ("p2p",))
    if len(kinds) == 1:
        kinds = kinds * layers
    if len(kinds) != layers:
        raise arguments.fail(flag, f"has {len(kinds)} entries for {layers} layers")
    unknown = [kind for kind in kinds if kind not in ("p2p", "allgather", "a2a", "a2a+p2p")]
    if unknown:
        raise arguments.fail(
            flag, f"expected p2p, allgather, a2a or a2a+p2p, got {shorten(unknown[0])}"
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
        sizes = arguments.numbers("hierarchical-context-parallel-sizes")
        if len(sizes) != 2 or sizes[0] * sizes[1] != context:
            raise arguments.fail(
                "hierarchical-context-parallel-sizes",
                f"expected two sizes that multiply to {context}, got {shorten(list(sizes))}",
            )
        inner = sizes[0]
    made = {
        "p2p": LayerStrategy(tp=tensor, cp=context),
        # priced as the ring: a plan has one kind of context parallelism
        "allgather": LayerStrategy(tp=tensor, cp=context),
        # heads exchanged over the whole context group are Ulysses of that degree
        "a2a": LayerStrategy(tp=context, ulysses=True),
        "a2a+p2p": LayerStrategy(tp=inner, ulysses=inner > 1, cp=context // inner),
    }
    return [made[kind] for kind in kinds], Degrees(tensor=tensor, context=context, exchange=inner)


def _recomputed(arguments: _Arguments, sizes: Sequence[int], notes: list[str]) -> tuple[bool, ...]:
    granularity = arguments.text("recompute-granularity")
    if arguments.has("recompute-activations") or granularity == "selective":
        notes.append("selective recomputation is priced as none: it needs less memory than that")
        return (False,) * sum(sizes)
    if not arguments.has("recompute-granularity"):
        return (False,) * sum(sizes)
    if granularity != "full":
        raise arguments.fail(
            "recompute-granularity", f"expected full or selective, got {shorten(granularity)}"
        )
    method = arguments.text("recompute-method")
    if method not in ("block", "uniform"):
        raise arguments.fail(
            "recompute-method", f"expected block or uniform, got {shorten(method)}", "add it"
        )
    count = arguments.number("recompute-num-layers")
    if method == "uniform":
        if count > 1:
            notes.append(
                f"recomputation in units of {count} layers is priced as of single layers, which "
                "keep more activations and need less for a moment"
            )
        return (True,) * sum(sizes)
    return tuple(position < count for size in sizes for position in range(size))


def _say_pricing(arguments: _Arguments, tensor: int, notes: list[str]) -> None:
    """Say what pricing has to be told besides the plan."""
    if tensor > 1 and not arguments.has("sequence-parallel"):
        notes.append("no --sequence-parallel: price it with --no-sequence-parallel")
    if arguments.has("fp16"):
        notes.append("--fp16: price it with --mixed-precision fp16")
    elif not arguments.has("bf16"):
        notes.append("neither --bf16 nor --fp16: price it with --mixed-precision fp32")
    elif not arguments.has("grad-reduce-in-bf16"):
        notes.append("gradients are accumulated in fp32: price it with --fp32-gradients")
    if not arguments.has("overlap-grad-reduce"):
        notes.append("no --overlap-grad-reduce: the price assumes that reductions overlap")


def _say_reductions(arguments: _Arguments, num_microbatches: int, notes: list[str]) -> None:
    """Say where Megatron-FSDP, which shards gradients, reduces in every micro-batch."""
    fully_sharded = arguments.has("use-megatron-fsdp") or arguments.has("use-custom-fsdp")
    kind = arguments.text("data-parallel-sharding-strategy", "no_shard")
    if fully_sharded and kind.startswith("optim_grads") and num_microbatches > 1:
        notes.append(
            "Megatron-FSDP reduces gradients in every micro-batch: price it with "
            "--no-async-grad-reduce"
        )
