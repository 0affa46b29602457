"""Systems of both closed forms, made from the card of a device.

The card holds every number; here stand only the rules that turn its numbers into what each model
asks for. Documents that others wrote are not made but read, see `shipped`.
"""

from __future__ import annotations

import math
from typing import Any

from autopar.estimate.card import Card, Link
from autopar.units import GIB
from search.closed_form.calculon.documents import System as CalculonSystem
from search.closed_form.tensor2d.documents import System as Tensor2dSystem

__all__ = ["calculon_from_card", "tensor2d_from_card"]

_MATRIX_STEPS_GFLOP = (100.0, 10.0, 1.0, 0.1)
_MEMORY_STEPS_MB = (100.0, 10.0, 1.0)
"""Where the steps of a curve begin, a decade apart; one more step holds all that is smaller."""
_RING = {
    "p2p": [1.0, None],
    "reduce_scatter": [1.0, -1.0],
    "all_gather": [1.0, -1.0],
    "all_reduce": [2.0, -1.0],
}
"""Traffic of a ring of g: (g-1)/g of the buffer, twice that for an all-reduce."""


def calculon_from_card(card: Card) -> CalculonSystem:
    """Return the machine of a card as Calculon describes one, with two network tiers.

    Raises DocumentError: the card lacks a number; names it.
    """
    reader = "a system of calculon"

    def need(key: str) -> float:
        return card.need(key, reader)

    # outside the matrix units fp32 runs at the card's fp32 rate, which is without TensorFloat-32
    peaks = {
        "float16": (card.flop_per_s["fp16"], need("device.vector_fp16_flop_per_s")),
        "bfloat16": (card.flop_per_s["bf16"], need("device.vector_bf16_flop_per_s")),
        "float32": (card.flop_per_s["fp32"], card.flop_per_s["fp32"]),
    }
    if "device.fp8_flop_per_s" in card.more:  # a device without is none that lacks a number
        # 8-bit numbers are computed with as 16-bit ones outside the matrix units
        peaks["float8"] = (need("device.fp8_flop_per_s"), peaks["float16"][1])
    # the launch of a vector operation is counted with its memory traffic, which is longer
    vector_curve = [[0.0, need("efficiency.vector")]]
    # a ring inside a node is a hop shorter than it has GPUs; between nodes one hop is counted
    inside_s = card.collective_base_s + (card.max_gpus_per_node - 1) * card.intra_node.hop_s
    between_s = card.collective_base_s + card.inter_node.hop_s
    # the document is in TFLOP/s, GFLOP, GB/s, MB and GiB, the card in base units
    return CalculonSystem.model_validate(
        {
            "matrix": {
                datatype: {
                    "tflops": matrix / 1e12,
                    # peak in the unit of the sizes, per second
                    "gflops_efficiency": _curve(
                        _MATRIX_STEPS_GFLOP, matrix / 1e9, card.gemm_efficiency, card
                    ),
                }
                for datatype, (matrix, _) in peaks.items()
            },
            "vector": {
                datatype: {"tflops": vector / 1e12, "gflops_efficiency": vector_curve}
                for datatype, (_, vector) in peaks.items()
            },
            "mem1": {
                "GiB": round(card.memory_bytes / GIB, 2),
                "GBps": card.memory_bytes_per_s / 1e9,
                "MB_efficiency": _curve(
                    _MEMORY_STEPS_MB, card.memory_bytes_per_s / 1e6, card.memory_efficiency, card
                ),
            },
            "mem2": {
                "GiB": round(need("host.memory_bytes") / GIB, 1),
                "GBps": need("host.bytes_per_s") / 1e9,
                "MB_efficiency": [[0.0, need("host.efficiency")]],
            },
            # a kernel computes and moves at the same time, so the slower of the two counts
            "processing_mode": "roofline",
            "networks": [
                _network(
                    card.intra_node,
                    card.max_gpus_per_node,
                    inside_s,
                    need("intra_node.collective_sm_share"),
                ),
                _network(
                    card.inter_node,
                    int(need("inter_node.max_gpus")),
                    between_s,
                    need("inter_node.collective_sm_share"),
                ),
            ],
        }
    )


def tensor2d_from_card(card: Card) -> Tensor2dSystem:
    """Return the machine of a card as the two-dimensional model describes one.

    That model takes constant shares of the peaks, and latencies per hop of a ring.
    Raises DocumentError: the card lacks a number; names it.
    """
    vector_fp16 = card.need("device.vector_fp16_flop_per_s", "a system of tensor2d")
    # the document is in 1e12 FLOP/s and 1e9 bytes, the card in base units
    return Tensor2dSystem(
        matrix_flops_fp16=card.flop_per_s["fp16"] / 1e12,
        vector_flops_fp16=vector_fp16 / 1e12,
        vector_flops_fp32=card.flop_per_s["fp32"] / 1e12,
        hbm_bandwidth=card.memory_bytes_per_s / 1e9,
        hbm_capacity=round(card.memory_bytes / 1e9, 2),
        nvlink_bandwidth=card.intra_node.bytes_per_s / 1e9,
        nvlink_eff=card.intra_node.collective_efficiency,
        nvlink_latency=card.intra_node.hop_s,
        nvlink_size=card.max_gpus_per_node,
        ib_bandwidth=card.inter_node.bytes_per_s / 1e9,
        ib_eff=card.inter_node.collective_efficiency,
        ib_latency=card.inter_node.hop_s,
        nic_factor=1,  # the bandwidth between nodes is already that of one GPU
    )


def _network(link: Link, size: int, latency_s: float, sm_share: float) -> dict[str, Any]:
    return {
        "bandwidth": link.bytes_per_s / 1e9,
        "efficiency": link.collective_efficiency,
        "size": size,
        "latency": _digits(latency_s, 12),  # a sum of decimal figures, without its binary noise
        "ops": _RING,
        "must_be_filled": False,
        "processor_usage": sm_share,
    }


def _curve(steps: tuple[float, ...], peak_per_s: float, share: float, card: Card) -> list[Any]:
    """Return (smallest size, efficiency), descending, for a rate in the unit of the sizes.

    The middle of a step, on a logarithmic scale, takes a launch and the rest at `share` of the
    peak; so large operations reach `share`, and small ones mostly wait.
    """
    curve = []
    for step in (*steps, 0.0):
        # the geometric middle of a decade; the step from 0 stands for the decade below the last
        middle = (step or steps[-1] / 10) * math.sqrt(10)
        work_s = middle / peak_per_s
        curve.append([step, _digits(work_s / (card.kernel_launch_s + work_s / share), 3)])
    return curve


def _digits(value: float, count: int) -> float:
    return float(f"{value:.{count}g}")
