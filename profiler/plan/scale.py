"""Scales a plan down: fewer layers and samples, the same stages, ranks and kinds of strategies."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from autopar.errors import OptionError
from autopar.model import ModelSpec
from autopar.plan import Plan

__all__ = ["chosen_layers", "scale_down"]


def scale_down(
    plan: Plan,
    spec: ModelSpec,
    *,
    layers: int | None = None,
    global_batch: int | None = None,
    num_microbatches: int | None = None,
) -> tuple[Plan, ModelSpec]:
    """Return a plan and its model with fewer layers or another batch; None keeps what there is.

    Embedding and head stay as they are. Raises OptionError for fewer layers than stages and more
    than the plan has.
    """
    if global_batch is not None:
        plan = replace(plan, global_batch=global_batch)
    if num_microbatches is not None:
        plan = replace(plan, num_microbatches=num_microbatches)
    if layers is None:
        return plan, spec
    sizes, chosen = chosen_layers(plan.stage_sizes, layers)
    types = spec.layer_types
    runs = [(kind, len(list(run))) for kind, run in groupby(types[index] for index in chosen)]
    scaled = replace(
        spec, layers=tuple(replace(spec.layers[kind], num_layers=n) for kind, n in runs)
    )
    kept = tuple(plan.layers[index] for index in chosen)
    return replace(plan, stage_sizes=sizes, layers=kept), scaled


def chosen_layers(
    stage_sizes: tuple[int, ...], layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many layers each stage keeps, and which: at least one, evenly spaced.

    Shares are in proportion to the stages' own, by largest remainder; of n layers that keep k,
    the middles of k equal parts are taken.
    """
    total, stages = sum(stage_sizes), len(stage_sizes)
    if not stages <= layers <= total:
        raise OptionError(
            f"--layers: expected {stages} (one per stage) to {total} (all of the plan), "
            f"got {layers}"
        )
    free = layers - stages
    # What is beyond the first layer of a stage is shared, so that nobody is left without one.
    beyond = total - stages
    shares = [(size - 1) * free for size in stage_sizes]
    sizes = [1 + (share // beyond if beyond else 0) for share in shares]
    order = sorted(range(stages), key=lambda j: (-(shares[j] % beyond) if beyond else 0, j))
    for stage in order[: layers - sum(sizes)]:
        sizes[stage] += 1
    chosen: list[int] = []
    first = 0
    for size, kept in zip(stage_sizes, sizes, strict=True):
        chosen += (first + (2 * k + 1) * size // (2 * kept) for k in range(kept))
        first += size
    return tuple(sizes), tuple(chosen)
