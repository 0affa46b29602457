"""Where layers lie: the chunks of a pipeline that a choice of stages can have.

Even chunks as trainers make them by themselves, with embedding and head counted as a layer or not,
and one layout whose longest stage is shortest. What a layout takes is `search.uniform.prices`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from autopar.errors import InputError
from autopar.memory.launch import Chunk, chunks_of_sizes, even_chunks

__all__ = ["balanced_sizes", "layouts"]

_ENDS = ((0, 0), (1, 1), (0, 1), (1, 0))
"""For how many layers embedding and head count."""


def layouts(
    layer_s: Sequence[float],
    first_s: float,
    last_s: float,
    stages: int,
    chunks: int,
    *,
    mtp: int = 0,
    any_layout: bool = True,
) -> Iterator[tuple[tuple[Chunk, ...], ...]]:
    """Yield the layouts that are tried of so many stages and chunks of each, no two alike.

    layer_s : seconds of every layer in execution order; first_s, last_s : of embedding and head.
    """
    number = len(layer_s)
    if stages == 1:
        if chunks == 1:
            yield chunks_of_sizes([number], 1, mtp=mtp)
        return
    seen = []
    for ends in _ENDS:
        with suppress(InputError):
            found = even_chunks(number, stages, chunks, mtp=mtp, ends=ends)
            if min(len(chunk[1]) for stage in found for chunk in stage) > 0:
                seen.append(found)
                yield found
    if any_layout:
        sizes = balanced_sizes(layer_s, first_s, last_s, stages, chunks)
        if sizes is not None:
            found = chunks_of_sizes(sizes, stages, mtp=mtp)
            if found not in seen:
                yield found


def balanced_sizes(
    layer_s: Sequence[float], first_s: float, last_s: float, stages: int, chunks: int
) -> list[int] | None:
    """Return the layers of every chunk in execution order, so that the longest stage is short.

    Each layer goes to the stage that is shortest with it, of equally long ones to that in the
    middle: the longest stage is shortest where layers are alike. None: a chunk would be empty.
    """
    parts = stages * chunks
    if len(layer_s) < parts:
        return None
    # what most layers take; the others are few, in front of them
    usual = sorted(layer_s)[len(layer_s) // 2]
    loads = [0.0] * stages
    loads[0] += first_s + sum(seconds - usual for seconds in layer_s[: len(layer_s) // parts])
    loads[-1] += last_s
    counts = [chunks] * stages
    loads = [load + chunks * usual for load in loads]
    middle = [abs(2 * stage - stages + 1) for stage in range(stages)]
    for _ in range(len(layer_s) - parts):
        at = min(range(stages), key=lambda stage: (loads[stage], middle[stage]))
        counts[at] += 1
        loads[at] += usual
    sizes = [0] * parts
    for stage, count in enumerate(counts):
        base, more = divmod(count, chunks)
        for chunk in range(chunks):
            # of the first stage later chunks are longer, of the last one earlier ones: the others
            # hold embedding and head
            late = chunk >= chunks - more if stage == 0 else chunk < more
            sizes[chunk * stages + stage] = base + late
    return sizes
