"""The operations of one block as rows of plain numbers, in the published names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tests.oracles.calculon.block import LayerTiming, Machine, layer_timing
from tests.oracles.calculon.layers import STAGES, Layer, Stage
from tests.oracles.calculon.shape import Shape

_LINKS: dict[Stage, str] = {"fw": "fw_tp_comm", "agrad": "bw_tp_comm", "wgrad": "recomm"}


def layer_table(shape: Shape, layers: Iterable[Layer], machine: Machine) -> list[dict[str, Any]]:
    """Return a row per operation: FLOP, bytes and seconds of every stage, and its tensors.

    Inputs and outputs are in elements; a tile is the volume of one step of an overlapped
    collective.
    """
    return [_row(shape, layer, machine) for layer in layers]


def _row(shape: Shape, layer: Layer, machine: Machine) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": layer.name,
        "inputs_size": layer.inputs,
        "outputs_size": layer.outputs,
    }
    for stage in STAGES:
        sides = {
            name: layer_timing(shape, layer, machine, stage, edge=name == "edge")
            for name in ("base", "edge")
        }
        flops, moved = layer.flops[stage], layer.bytes[stage]
        row[f"{stage}_flops"] = flops
        row[f"{stage}_mem_accessed"] = moved
        row[f"{stage}_arithmetic_intensity"] = _intensity(flops, moved)
        row[f"{stage}_processing_time"] = sides["base"].processing_s
        if stage not in _LINKS:
            continue
        for figure in ("tile", "size", "time", "time_exposed"):
            for name, timing in sides.items():
                value = _link_figure(timing, figure)
                if figure == "tile" and layer.tiled:
                    value /= shape.tensor
                row[f"{name}block_{_LINKS[stage]}_{figure}"] = value
    return row | {
        "weight": layer.weight_bytes,
        "activation": layer.activation_bytes,
        "weight_grad": layer.weight_gradient_bytes,
        "activation_grad": layer.activation_gradient_bytes,
        "optimizer": layer.optimizer_bytes,
    }


def _link_figure(timing: LayerTiming, figure: str) -> float:
    if figure == "time":
        return timing.link_s
    return timing.exposed_s if figure == "time_exposed" else timing.link_bytes


def _intensity(flops: float, moved: float) -> float:
    if not flops:
        return 0.0
    return flops / moved if moved else math.inf
