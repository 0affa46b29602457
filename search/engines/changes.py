"""What changes in a launch's arguments when it becomes another launch, as its file spells them.

Which launches there are next to one is `search.check.neighbours`; here are the words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from autopar.errors import InputError
from autopar.run.launch import Chunk, Launch, even_chunks

Changes = tuple[tuple[str, str | None, str | None], ...]
"""Flag, value before, value after; None: the flag is not there, empty: without a value."""
Move = Literal[
    "tensor", "context", "stages", "chunks", "experts", "micro_batch", "recompute", "optimizer",
    "overlap",
]  # fmt: skip
"""What a neighbour has changed: a degree, chunks of a stage, degrees of experts, the micro-batch,
what is computed again, sharding and overlap of the optimizer, overlap of tensor transfers."""
MOVES: frozenset[Move] = frozenset(get_args(Move))
Words = Mapping[str, tuple[str, ...]]


def ends_of(launch: Launch) -> tuple[int, int]:
    """Return for how many layers embedding and loss count: the ends have so many fewer."""
    sizes = [len(chunk[1]) for stage in launch.degrees.chunks for chunk in stage]
    first, last = len(launch.degrees.chunks[0][0][1]), len(launch.degrees.chunks[-1][-1][1])
    return int(first == max(sizes) - 1), int(last == max(sizes) - 1)


def laid_out(launch: Launch, stages: int, pieces: int) -> tuple[tuple[Chunk, ...], ...]:
    """Return even chunks that count embedding and loss as the launch does; raises InputError."""
    model = launch.model
    ends = ends_of(launch) if stages > 1 else (0, 0)
    return even_chunks(model.num_layers, stages, pieces, mtp=model.mtp, ends=ends)


_COUNTED = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")


def _evenly(launch: Launch) -> tuple[tuple[Chunk, ...], ...] | None:
    """Return the launch's chunks if they were even; None where they cannot be."""
    try:
        return laid_out(launch, launch.degrees.pp, launch.degrees.vpp)
    except InputError:
        return None


def arguments_of(launch: Launch) -> dict[str, str]:
    """Return the arguments that knobs change, as Megatron-LM spells them; absent ones left out."""
    degrees, recompute = launch.degrees, launch.recompute
    found = {
        "tensor-model-parallel-size": str(degrees.tp),
        "pipeline-model-parallel-size": str(degrees.pp),
        "context-parallel-size": str(degrees.cp),
        "micro-batch-size": str(launch.micro_batch),
    }
    if launch.model.experts is not None:
        found["expert-model-parallel-size"] = str(degrees.ep)
        found["expert-tensor-parallel-size"] = str(degrees.etp)
    if degrees.pp > 1:
        if degrees.chunks == _evenly(launch):
            ends = ends_of(launch)
            found |= {flag: "" for flag, counts in zip(_COUNTED, ends, strict=True) if counts}
            if degrees.vpp > 1:
                each = max(len(chunk[1]) for stage in degrees.chunks for chunk in stage)
                found["num-layers-per-virtual-pipeline-stage"] = str(each)
        else:
            found["pipeline-model-parallel-layout"] = "as it is"
    if degrees.scattered:
        found["sequence-parallel"] = ""
    if recompute.layers != "none":
        found["recompute-granularity"] = "full"
        found["recompute-method"] = recompute.layers
        found["recompute-num-layers"] = str(recompute.number)
    elif recompute.modules:
        found["recompute-granularity"] = "selective"
        found["recompute-modules"] = " ".join(sorted(recompute.modules))
    if launch.optimizer.sharding == "distributed":
        found["use-distributed-optimizer"] = ""
    if launch.optimizer.overlap_gradients:
        found["overlap-grad-reduce"] = ""
    if launch.tensor_overlap:
        found["tp-comm-overlap"] = ""
    return found


_LAYOUT = (
    *_COUNTED,
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "pipeline-model-parallel-layout",
)
"""Arguments that place layers."""
_RECOMPUTE = (
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "recompute-modules",
    "recompute-activations",
    "moe-layer-recompute",
)
"""Arguments that say what is computed again, old ones too."""
_GROUP = "microbatch-group-size-per-virtual-pipeline-stage"
_EXPERT_TENSOR = "expert-tensor-parallel-size"


def changes_of(words: Words | None, before: Launch, after: Launch) -> Changes:
    """Return what changes from one launch to the other.

    words : arguments of the first as they are written; None: as `arguments_of` has them. A family
    of arguments that say one thing (where layers are, what is computed again) is replaced whole.
    """
    one, other = arguments_of(before), arguments_of(after)
    if words is None:
        written = dict[str, str | None](one)
    else:
        written = {flag: " ".join(given) for flag, given in words.items()}
    wanted = dict(written)
    placed = before.degrees.chunks != after.degrees.chunks
    again = before.recompute != after.recompute
    for flag in dict.fromkeys((*one, *other)):
        family = placed if flag in _LAYOUT else again if flag in _RECOMPUTE else False
        if family or (flag not in (*_LAYOUT, *_RECOMPUTE) and one.get(flag) != other.get(flag)):
            wanted[flag] = other.get(flag)
    gone = [*(_LAYOUT if placed else ()), *(_RECOMPUTE if again else ())]
    if after.degrees.vpp == 1 or not after.degrees.group:
        gone.append(_GROUP)
    for flag in gone:
        if flag in wanted and flag not in other:
            wanted[flag] = None
    # its default follows the tensor degree
    if _EXPERT_TENSOR in other and wanted.get(_EXPERT_TENSOR) is None:
        wanted[_EXPERT_TENSOR] = (
            other[_EXPERT_TENSOR] if after.degrees.etp != after.degrees.tp else None
        )
    return tuple(
        (flag, written.get(flag), value)
        for flag, value in wanted.items()
        if written.get(flag) != value
    )


def changed_words(words: Words, changes: Changes) -> dict[str, tuple[str, ...]]:
    """Return arguments with changes made."""
    found = {**words}
    for flag, _, after in changes:
        found.pop(flag, None)
        if after is not None:
            found[flag] = tuple(after.split())
    return found
