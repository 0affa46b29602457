"""The operations of one layer as rows of plain numbers, for people and for files."""

from __future__ import annotations

from typing import Any

from search.closed_form.tensor2d.documents import System
from tests.oracles.tensor2d.rows import Pass, Row
from tests.oracles.tensor2d.step import PassTime, RowTime


def row_table(times: tuple[RowTime, ...] | list[RowTime], system: System) -> list[dict[str, Any]]:
    """Return a row per operation: 1e9 bytes, 1e12 FLOP and seconds, forward and backward.

    `comm_*` are lists where an operation has several collectives.
    """
    return [_row(x, system) for x in times]


def _row(x: RowTime, system: System) -> dict[str, Any]:
    size = system.element_size
    row = x.row
    return {
        "name": row.name,
        "weights_mem": row.weights * size,
        "weights_grad_mem": row.weights * size,
        "flops_fwd": row.forward.flops * system.flops_units,
        "activation_buffer": row.kept * size,
        **_links("fwd", row, row.forward, size),
        "flops_bwd": row.backward.flops * system.flops_units,
        **_links("bwd", row, row.backward, size),
        **_times("fwd", x.forward),
        **_times("bwd", x.backward),
        "t": x.forward.time_s + x.backward.time_s,
    }


def _links(name: str, row: Row, one: Pass, size: float) -> dict[str, Any]:
    volumes = [x.volume * size for x in one.links]
    types = [x.operation for x in one.links]
    if len(volumes) > 1 or (row.panels and volumes):
        return {f"comm_{name}": volumes, f"comm_{name}_type": types}
    return {
        f"comm_{name}": volumes[0] if volumes else 0.0,
        f"comm_{name}_type": types[0] if types else "none",
    }


def _times(name: str, one: PassTime) -> dict[str, float]:
    return {
        f"t_{name}": one.time_s,
        f"t_{name}_comm": one.link_s,
        f"t_{name}_comp": one.compute_s,
        f"t_{name}_mem": one.memory_s,
        f"intensity_{name}": one.intensity,
    }
