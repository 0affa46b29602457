"""Options of `torchrun -m profiler.site`, and the cells to be measured.

The measurement of a cell is in `driver`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from autopar.command.fields import make, option, read_given
from autopar.documents.catalog import SITE_FOLDER
from autopar.errors import OptionError
from autopar.rates.measured import COLLECTIVES
from profiler.hardware.options import Cell, Cluster, arranged, parse_size, parse_sizes
from profiler.options import FILES, HOW, MACHINE, WHAT, RankOptions, budget, check_out, duration

_SAID = "Report"
PANELS = (WHAT, HOW, MACHINE, _SAID, FILES)
GEMM, MEMCOPY, HOST = "gemm", "memcopy", "host_layer"
"""Operations measured in addition to the collectives."""
_SIZES = "1M,16M,128M,512M"
_GROUPS = (2, 4, 8)
"""Group sizes inside a node, in addition to the group of all its ranks."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _parse_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise OptionError(
            f"--name: {text!r:.60} is not a file name",
            remedy="Use letters, digits, dots and hyphens",
        )
    return text


@dataclass(frozen=True, kw_only=True)
class SiteOptions(RankOptions):
    """Options of one measuring run; defaults are those of the command."""

    PANEL: ClassVar[str] = WHAT

    gemm_seconds: float = duration(
        30.0,
        help="seconds of back-to-back GEMMs, until the clock is stable",
        panel=WHAT,
        high=3600,
        most_used=True,
    )
    gemm_size: int | None = option(
        None,
        help="rows and columns of the GEMM matrices",
        shown="8192 on GPUs, 1024 on CPUs",
        between=(16, 1 << 16),
    )
    sizes_bytes: tuple[int, ...] = option(
        parse_sizes(_SIZES),
        name="sizes",
        help="message sizes; the factors are based on 16M and more",
        metavar="SIZES",
        parse=parse_sizes,
        shown=_SIZES,
        most_used=True,
    )
    copy_bytes: int | None = option(
        None,
        name="copy-size",
        help="size of the copied tensor, larger than any cache",
        metavar="SIZE",
        parse=lambda text: parse_size(text, "--copy-size"),
        shown="1G on GPUs, 64M on CPUs",
    )
    max_seconds: float = budget(0.6)
    card: str | None = option(
        None,
        help="card to compare with, name or file",
        panel=_SAID,
        shown="that of the GPU, if it is shipped",
        most_used=True,
    )
    adapter_bytes_per_s: float | None = option(
        None,
        name="adapter",
        help="nominal network rate of one GPU and direction in GB/s, 25 for 200 Gb/s",
        panel=_SAID,
        metavar="GB/S",
        shown="the card's",
        above=0,
        high=100_000,
        scale=1e9,
    )
    model: str = option(
        "llama2-7b",
        help="model of the predicted data-parallel step",
        panel=_SAID,
    )
    batch: int = option(
        1, help="sequences of that step per rank", panel=_SAID, between=(1, 1 << 20)
    )
    name: str | None = option(
        None,
        help="name of the site and of its file, site_NAME.json",
        panel=FILES,
        parse=_parse_name,
        shown="device and shape",
        most_used=True,
    )
    out: Path = option(
        SITE_FOLDER, help="output folder of the file", panel=FILES, metavar="DIR", most_used=True
    )


def build_options(**given: object) -> SiteOptions:
    """Return the options of a parsed command line.

    given : option, with hyphens or underscores -> text, or value in base units.

    Raises OptionError: a value is invalid, or two options contradict each other.
    """
    options = make(SiteOptions, read_given(given, SiteOptions))
    check_out(options.out)
    return options


def check_world(options: SiteOptions, world: int) -> None:
    """Raise InputError if the card or the model does not exist, before torch is loaded."""
    from autopar.documents.catalog import find_card, find_model

    if options.card is not None:
        find_card(options.card)
    if not options.model.startswith(("hf:", "py:")):
        find_model(options.model)


_DEVICES = (  # device name reported by a GPU, specific patterns first -> its card
    (r"VR200", "vr200"),
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"H200\b", "h200"),
    (r"H800\b", "h800"),
    (r"H100 PCIe", "h100-pcie"),
    (r"H100 NVL", "h100-nvl"),
    (r"H100 80GB HBM3", "h100-80gb"),
    (r"H20\b", "h20"),
    (r"A100-SXM4-40GB", "a100-40gb"),
    (r"A100-SXM4-80GB|A100-SXM-80GB", "a100-80gb"),
    (r"A100 80GB PCIe|A100-PCIE-80GB", "a100-pcie-80gb"),
    (r"L40S\b", "l40s"),
    (r"A10G\b", "a10g"),
    (r"RTX 4090\b", "rtx-4090"),
    (r"RTX PRO 6000", "rtx-pro-6000"),
    (r"V100-SXM2", "v100"),
    (r"MI300X", "mi300x"),
    (r"MI325X", "mi325x"),
    (r"MI355X", "mi355x"),
)


def guess_card(device: str) -> str | None:
    """Return the shipped card of a device name, None for an unknown device."""
    return next((card for pattern, card in _DEVICES if re.search(pattern, device)), None)


def default_name(device: str, cluster: Cluster) -> str:
    """Return the default name of a site, such as `h200_1x8`."""
    said = guess_card(device) or re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{said}_{cluster.num_nodes}x{cluster.gpus_per_node}"


def gemm_size(options: SiteOptions, device_type: str) -> int:
    """Return the edge of the square matrices, large enough to keep the device busy."""
    return options.gemm_size or (8192 if device_type == "cuda" else 1024)


def plan_cells(
    options: SiteOptions, cluster: Cluster, *, device_type: str, element_bytes: int
) -> tuple[Cell, ...]:
    """Return the cells of a run, in measuring order.

    device_type : `cuda` or `cpu`.
    element_bytes : size of the element type in use.
    Collectives are measured in groups of 2, 4, 8 and all ranks of a node. Across nodes they are
    measured in the group of all ranks and in groups of one rank per node. All groups run at once,
    as in training.
    """
    world, per_node = cluster.world_size, cluster.gpus_per_node
    side = gemm_size(options, device_type)
    copied = options.copy_bytes or (1 << 30 if device_type == "cuda" else 64 << 20)
    alone = [
        arranged(GEMM, 1, True, side * side * element_bytes, cluster),
        arranged(MEMCOPY, 1, True, copied, cluster),
        arranged(HOST, 1, True, 0, cluster),
    ]
    inside = [n for n in _GROUPS if n < per_node and per_node % n == 0]
    inside += [per_node] if per_node > 1 else []
    kinds = [(size, True) for size in reversed(inside)]
    if cluster.num_nodes > 1:
        kinds.append((world, True))
        # With one rank per node, this is the group of all ranks.
        kinds += [(cluster.num_nodes, False)] if per_node > 1 else []
    groups = [
        arranged(operation, ranks, consecutive, size, cluster)
        for ranks, consecutive in kinds
        for operation in COLLECTIVES
        for size in _largest_first(options.sizes_bytes)
    ]
    return (*alone, *groups)


def _largest_first(sizes: Sequence[int]) -> list[int]:
    # Largest first: a run that ends early then has the sizes that determine the factors.
    return sorted(sizes, reverse=True)
