"""Changes of Megatron-LM arguments that turn one run into another.

`search.check.alternatives` generates the runs to change to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from autopar.errors import InputError
from autopar.run.run import Run
from autopar.run.strategy import Chunk, Strategy, even_chunks

Changes = tuple[tuple[str, str | None, str | None], ...]
"""Tuples (flag, old value, new value). None: flag not given; empty text: flag without a value."""
Move = Literal[
    "tensor", "context", "stages", "chunks", "experts", "micro_batch", "recompute", "optimizer",
    "overlap",
]  # fmt: skip
"""Type of a suggested change: a degree, chunks per stage, degrees of experts, micro-batch size,
recomputation, sharding and overlap of the optimizer, or TP overlap."""
MOVES: frozenset[Move] = frozenset(get_args(Move))
Words = Mapping[str, tuple[str, ...]]


def ends_of(run: Run) -> tuple[int, int]:
    """Return the number of layers, 0 or 1, that (embedding, loss) count as in the layer partition.

    The value is 1 where the first or last chunk is one layer shorter than the largest chunk.
    """
    stages = run.strategy.stages
    sizes = [len(chunk.layers) for stage in stages for chunk in stage]
    first, last = len(stages[0][0].layers), len(stages[-1][-1].layers)
    return int(first == max(sizes) - 1), int(last == max(sizes) - 1)


def with_balanced_chunks(run: Run, stages: int, pieces: int) -> tuple[tuple[Chunk, ...], ...]:
    """Return an even layer partition, in which embedding and loss count as in the run.

    stages : number of pipeline stages.
    pieces : chunks per stage.

    Raises InputError if the layers do not divide evenly.
    """
    model = run.model
    ends = ends_of(run) if stages > 1 else (0, 0)
    return even_chunks(model.num_layers, stages, pieces, mtp=model.mtp, ends=ends)


_COUNTED = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")


def even_stages(run: Run) -> tuple[tuple[Chunk, ...], ...] | None:
    """Return the even partition for the stages and chunks of a run; None: layers do not divide."""
    try:
        return with_balanced_chunks(run, run.strategy.pp, run.strategy.vpp)
    except InputError:
        return None


def arguments_of(run: Run) -> dict[str, str]:
    """Return value by flag of the Megatron-LM arguments that suggested changes may modify.

    The value is empty for a flag without words. Flags that are off are absent.
    """
    strategy, split, overlap = run.strategy, run.split, run.runtime.overlap
    found = {
        "tensor-model-parallel-size": str(split.tp),
        "pipeline-model-parallel-size": str(strategy.pp),
        "context-parallel-size": str(split.cp),
        "micro-batch-size": str(strategy.micro_batch),
    }
    if run.model.experts is not None:
        found["expert-model-parallel-size"] = str(split.ep)
        found["expert-tensor-parallel-size"] = str(split.etp)
    if strategy.pp > 1:
        if strategy.stages == even_stages(run):
            ends = ends_of(run)
            found |= {flag: "" for flag, counts in zip(_COUNTED, ends, strict=True) if counts}
            if strategy.vpp > 1:
                each = max(len(chunk.layers) for stage in strategy.stages for chunk in stage)
                found["num-layers-per-virtual-pipeline-stage"] = str(each)
        else:
            found["pipeline-model-parallel-layout"] = "as it is"
    if split.splits_sequence:
        found["sequence-parallel"] = ""
    found |= {flag: " ".join(given) for flag, given in recompute_arguments(strategy)}
    if split.zero == 1:
        found["use-distributed-optimizer"] = ""
    if overlap.gradients:
        found["overlap-grad-reduce"] = ""
    if overlap.tensor:
        found["tp-comm-overlap"] = ""
    return found


def recompute_arguments(strategy: Strategy) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the recomputation arguments of Megatron-LM for a strategy.

    Nothing is yielded for recomputation `op` of torchtitan, which Megatron-LM does not support.
    """
    recomputed = strategy.recomputed
    if recomputed.kind in ("full", "block"):
        yield "recompute-granularity", ("full",)
        yield "recompute-method", ("uniform" if recomputed.kind == "full" else "block",)
        yield "recompute-num-layers", (str(recomputed.number),)
    elif recomputed.kind == "modules":
        yield "recompute-granularity", ("selective",)
        yield "recompute-modules", tuple(sorted(recomputed.modules))


_LAYOUT = (
    *_COUNTED,
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "pipeline-model-parallel-layout",
)
"""Arguments of the layer partition."""
_RECOMPUTE = (
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "recompute-modules",
    "recompute-activations",
    "moe-layer-recompute",
)
"""Arguments of recomputation, including those of earlier releases."""
_GROUP = "microbatch-group-size-per-virtual-pipeline-stage"
_EXPERT_TENSOR = "expert-tensor-parallel-size"


def changes_of(words: Words | None, before: Run, after: Run) -> Changes:
    """Return the argument changes that turn `before` into `after`.

    If the layer partition differs, all of its arguments are replaced; likewise for recomputation.

    words : arguments of `before` in its file; None: those of `arguments_of`.
    """
    one, other = arguments_of(before), arguments_of(after)
    if words is None:
        written = dict[str, str | None](one)
    else:
        written = {flag: " ".join(given) for flag, given in words.items()}
    wanted = dict(written)
    placed = before.strategy.stages != after.strategy.stages
    again = before.strategy.recomputed != after.strategy.recomputed
    for flag in dict.fromkeys((*one, *other)):
        family = placed if flag in _LAYOUT else again if flag in _RECOMPUTE else False
        if family or (flag not in (*_LAYOUT, *_RECOMPUTE) and one.get(flag) != other.get(flag)):
            wanted[flag] = other.get(flag)
    gone = [*(_LAYOUT if placed else ()), *(_RECOMPUTE if again else ())]
    if after.strategy.vpp == 1 or not after.strategy.group:
        gone.append(_GROUP)
    for flag in gone:
        if flag in wanted and flag not in other:
            wanted[flag] = None
    # The default of this argument is the tensor degree.
    if _EXPERT_TENSOR in other and wanted.get(_EXPERT_TENSOR) is None:
        wanted[_EXPERT_TENSOR] = (
            other[_EXPERT_TENSOR] if after.split.etp != after.split.tp else None
        )
    return tuple(
        (flag, written.get(flag), value)
        for flag, value in wanted.items()
        if written.get(flag) != value
    )


def changed_words(words: Words, changes: Changes) -> dict[str, tuple[str, ...]]:
    """Return the words by flag after the changes."""
    found = {**words}
    for flag, _, after in changes:
        found.pop(flag, None)
        if after is not None:
            found[flag] = tuple(after.split())
    return found
