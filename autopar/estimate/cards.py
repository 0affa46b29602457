"""Card: the datasheet of one device and its network, and how much of it software reaches.

Datasheet numbers (with `source`) and efficiency assumptions (with `basis`) are separate entries
of `hardware_configs/cards/*.json`, so that either can be replaced without touching the other.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from autopar import catalog
from autopar.errors import DocumentError
from autopar.sources import Source

__all__ = ["Card", "Link", "load_card"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One level of the network, per GPU and direction."""

    bytes_per_s: float
    collective_efficiency: float
    """Share of the bandwidth that rings of collectives reach on long messages."""
    p2p_efficiency: float
    """The same for send/receive and all-to-all."""
    hop_s: float
    """Latency of one step of a ring."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One device and its network, in base units."""

    name: str
    description: str
    memory_bytes: float
    memory_bytes_per_s: float
    flop_per_s: dict[str, float]
    """Peak by precision (bf16, fp16, fp32), without sparsity."""
    num_sms: int
    gemm_efficiency: float
    attention_efficiency: float
    attention_half_seq_length: float
    memory_efficiency: float
    kernel_launch_s: float
    collective_base_s: float
    overlap_coefficient: float
    max_gpus_per_node: int
    intra_node: Link
    inter_node: Link
    source: Source


def load_card(name: str) -> Card:
    """Return a card by name, alias or path; raises InputError naming file, key and value."""
    path = catalog.find_card(name)
    try:
        raw = path.read_bytes()
        data = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise DocumentError(path, f"cannot be read as JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != "autopar-card":
        raise DocumentError(path, 'is not a device card, expected "format": "autopar-card"')
    if data.get("version") != 1:
        raise DocumentError(path, f"is {data.get('version')!r}, expected 1", key="version")

    def number(section: str, key: str, *, most: float = math.inf) -> float:
        entry: Any = data.get(section)
        entry = entry.get(key) if isinstance(entry, dict) else None
        value = entry.get("value") if isinstance(entry, dict) else None
        where = f"{section}.{key}.value"
        if value is None:
            raise DocumentError(path, "is missing", key=where)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            limit = f" and at most {most:g}" if most < math.inf else ""
            raise DocumentError(
                path, f"is {value!r:.40}, expected a number above 0{limit}", key=where
            )
        if not math.isfinite(value):
            raise DocumentError(path, f"is {value!r}, expected a finite number", key=where)
        return float(value)

    def link(section: str) -> Link:
        return Link(
            bytes_per_s=number(section, "bytes_per_s"),
            collective_efficiency=number(section, "collective_efficiency", most=1),
            p2p_efficiency=number(section, "p2p_efficiency", most=1),
            hop_s=number(section, "hop_s"),
        )

    return Card(
        name=str(data.get("name", path.stem)),
        description=str(data.get("description", "")),
        memory_bytes=number("device", "memory_bytes"),
        memory_bytes_per_s=number("device", "memory_bytes_per_s"),
        flop_per_s={p: number("device", f"{p}_flop_per_s") for p in ("bf16", "fp16", "fp32")},
        num_sms=int(number("device", "num_sms")),
        gemm_efficiency=number("efficiency", "gemm", most=1),
        attention_efficiency=number("efficiency", "attention", most=1),
        attention_half_seq_length=number("efficiency", "attention_half_seq_length"),
        memory_efficiency=number("efficiency", "memory", most=1),
        kernel_launch_s=number("overhead", "kernel_launch_s"),
        collective_base_s=number("overhead", "collective_base_s"),
        overlap_coefficient=max(1.0, number("overhead", "overlap_coefficient")),
        max_gpus_per_node=int(number("intra_node", "max_gpus")),
        intra_node=link("intra_node"),
        inter_node=link("inter_node"),
        source=Source(
            role="hardware card",
            path=f"{path.parent.name}/{path.name}",
            sha256=hashlib.sha256(raw).hexdigest(),
            estimated=True,
        ),
    )
