"""Which layers stand where, and how context ranks exchange, as Megatron-LM's arguments say it.

Even stages need a number of chunks at most; embedding and loss that count as a layer each have
flags of their own, and every other order is a layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import InputError
from autopar.pipeline.orders import rank_of
from autopar.run.run import Run
from autopar.run.strategy import Chunk, Split, Strategy, even_chunks
from search.engines.megatron.arguments import Argument, Flag

_ENDS = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
_CHUNKS = "num-virtual-stages-per-pipeline-rank"
_GROUP = "microbatch-group-size-per-virtual-pipeline-stage"


def stage_arguments(run: Run) -> Iterator[Argument]:
    """Yield the arguments of a run's stages; none where there is one.

    Raises InputError where the embedding is not at the first end of the pipeline, or the head not
    at the last.
    """
    strategy = run.strategy
    ends = even_ends(run)
    if ends is None:
        yield (Flag.LAYOUT, (layout_of(strategy),))
    else:
        for flag, counts in zip(_ENDS, ends, strict=True):
            if counts:
                yield (flag, ())
        if strategy.vpp > 1:
            yield (_CHUNKS, (str(strategy.vpp),))
    if strategy.vpp > 1 and strategy.group:
        yield (_GROUP, (str(strategy.group),))


def even_ends(run: Run) -> tuple[int, int] | None:
    """Return for how many layers embedding and loss count in even stages; None: they are uneven."""
    model, stages, pp, vpp = run.model, run.strategy.stages, run.strategy.pp, run.strategy.vpp
    # interleaved stages of one rank have no flag
    if pp == 1 and vpp > 1:
        return None
    for ends in ((0, 0), (1, 0), (0, 1), (1, 1)) if pp > 1 else ((0, 0),):
        try:
            even = even_chunks(model.num_layers, pp, vpp, mtp=model.mtp, ends=ends)
        except InputError:
            continue
        if even == stages:
            return ends
    return None


def layout_of(strategy: Strategy) -> str:
    """Return the layout of chunks in execution order: `Et*3|t*4|t*4|t*3mL`.

    Raises InputError where the embedding is not at its beginning, or the head not at its end.
    """
    parts = parts_in_order(strategy)
    first = 0
    for place, chunk in enumerate(parts):
        if chunk.embeds != (place == 0) or chunk.head != (place == len(parts) - 1):
            raise InputError(
                "a layout of Megatron-LM embeds in its first part and has the head in its last"
            )
        if chunk.layers != tuple(range(first, first + len(chunk.layers))):
            raise InputError(f"layers of part {place} of the pipeline are not those that follow")
        first += len(chunk.layers)
    return "|".join(map(_part, parts))


def parts_in_order(strategy: Strategy) -> list[Chunk]:
    """Return the chunks of all stages in the order in which a micro-batch meets them."""
    left = [list(stage) for stage in strategy.stages]
    parts = range(strategy.pp * strategy.vpp)
    return [left[rank_of(strategy.schedule, part, strategy.pp)].pop(0) for part in parts]


def _part(chunk: Chunk) -> str:
    layers = _repeated("t", len(chunk.layers)) + _repeated("m", chunk.mtp)
    return "E" * chunk.embeds + layers + "L" * chunk.head


def _repeated(kind: str, number: int) -> str:
    return kind * number if number < 2 else f"{kind}*{number}"


def layer_pattern(layers: tuple[bool, ...]) -> str:
    """Return which layers have experts: every Nth of them, or a sum of lists without spaces."""
    for every in range(1, len(layers) + 1):
        if layers == tuple(layer % every == 0 for layer in range(len(layers))):
            return str(every)
    runs: list[tuple[bool, int]] = []
    for is_mixture in layers:
        if runs and runs[-1][0] == is_mixture:
            runs[-1] = (is_mixture, runs[-1][1] + 1)
        else:
            runs.append((is_mixture, 1))
    # `_eval_pattern` takes digits, brackets, commas, + and *
    return "(" + "+".join(f"[{int(kind)}]*{number}" for kind, number in runs) + ")"


def context_words(split: Split) -> str:
    """Return how context ranks exchange, as `--cp-comm-type` says it."""
    if split.gathers_keys:
        return "all_gather"
    if split.exchanges_heads:
        return "a2a+p2p" if split.rings > 1 else "a2a"
    return "p2p"
