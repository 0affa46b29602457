"""Candidates of the two-dimensional model for a number of GPUs: degrees and domain assignments.

Source: arXiv 2410.00273.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.records import replace
from autopar.units import divisors
from search.closed_form.tensor2d.documents import Model, Strategy
from search.closed_form.tensor2d.exploration import assignments
from tests.oracles.tensor2d.step import Candidate

_SMALLEST_SHARD = 128
"""Fewest rows or columns of a GPU."""
_SMALLEST_PANEL = 512


def candidates(
    model: Model,
    strategy: Strategy,
    n_gpus: int,
    batch: int,
    domain: int,
    *,
    repeated_panels: bool = True,
) -> Iterator[Candidate]:
    """Yield every candidate once, with every assignment to fast domains of `domain` GPUs.

    repeated_panels : the defect of that name: panels change figures of one GPU, too. Without it
        their number is 1 there.
    """
    for bare in _degrees(model, strategy, n_gpus, batch):
        if bare.columns == bare.rows == 1 < bare.panels and not repeated_panels:
            continue
        dims = _dimensions(bare, strategy)
        for inside in assignments(dims, domain):
            yield _assigned(bare, strategy, inside)


def _degrees(model: Model, strategy: Strategy, n: int, batch: int) -> Iterator[Candidate]:
    for columns in divisors(n):
        if model.h % columns or model.e % columns:
            continue
        if strategy == "1d":
            second: tuple[int, ...] = (1,) if 3 * model.e // columns >= _SMALLEST_SHARD else ()
        elif model.e // columns < _SMALLEST_SHARD:
            second = ()
        else:
            second = tuple(
                rows
                for rows in divisors(n // columns)
                if model.l // rows >= _SMALLEST_SHARD and (strategy != "2d" or model.e % rows == 0)
            )
        for rows in second:
            yield from _rest(model, strategy, n, batch, columns, rows)


def _rest(
    model: Model, strategy: Strategy, n: int, batch: int, columns: int, rows: int
) -> Iterator[Candidate]:
    tensor = columns * rows
    split = rows if strategy == "2d" else tensor
    for pipeline in divisors(min(n // tensor, model.depth)):
        if n % (tensor * pipeline) or model.depth % pipeline:
            continue
        data = n // (tensor * pipeline)
        if data > batch or batch % data:
            continue
        for microbatch in divisors(batch // data):
            if microbatch * model.l % split:
                continue
            for panels in _panels(model, columns, rows) if strategy == "2d" else (1,):
                yield Candidate(
                    data=data,
                    columns=columns,
                    rows=rows,
                    pipeline=pipeline,
                    microbatch=microbatch,
                    panels=panels,
                )


def _panels(model: Model, columns: int, rows: int) -> tuple[int, ...]:
    smallest = max(columns, rows)
    if model.e / smallest < _SMALLEST_PANEL:
        return (smallest,)
    found = []
    panels = smallest
    while model.e // panels >= _SMALLEST_PANEL:
        if model.e % panels == 0:
            found.append(panels)
        panels *= 2
    return tuple(found)


def _dimensions(c: Candidate, strategy: Strategy) -> tuple[int, ...]:
    columns = (c.columns,) if strategy == "1d" else (c.columns, c.rows)
    return (*columns, c.data, c.pipeline)


def _assigned(c: Candidate, strategy: Strategy, inside: tuple[int, ...]) -> Candidate:
    columns, *rows, data, pipeline = inside
    return replace(
        c,
        columns_in_domain=columns,
        rows_in_domain=rows[0] if rows else 1,
        data_in_domain=data,
        pipeline_in_domain=pipeline,
    )
