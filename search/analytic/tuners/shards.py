"""Prices every point of a space on the workers of a Ray cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from search.analytic.tuners.clusters import cluster
from search.analytic.tuners.plain import CHUNK, price_range
from search.analytic.tuners.pricing import Pricer, Record

__all__ = ["price_all_on_ray"]

_SHARDS_PER_CPU = 8
"""Enough that workers end together, few enough that none is too small to send."""


def price_all_on_ray(
    pricer: Pricer,
    address: str,
    progress: Callable[[int, int], None] | None = None,
) -> Record:
    """Return the record of every point, the same as without a cluster.

    Each task prices a range of points with one thread; ranges are joined in their order, so that
    the answer depends neither on the workers nor on who is first.
    """
    size = pricer.space.size
    with cluster(address, pricer.threads) as ray:
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        step = max(CHUNK, -(-size // (cpus * _SHARDS_PER_CPU)))
        shared = ray.put(dataclasses.replace(pricer, threads=1))
        task = ray.remote(num_cpus=1)(price_range)
        record = Record()
        parts = [
            task.remote(shared, begin, min(begin + step, size)) for begin in range(0, size, step)
        ]
        for part in parts:
            record.join(ray.get(part))
            if progress is not None:
                progress(record.evaluations, size)
        return record
