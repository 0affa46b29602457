"""What `torchrun -m profiler.hardware` is asked to do, as one validated value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autopar.command.options import make, option, read_values, rows_of
from autopar.documents.json import shorten
from autopar.errors import OptionError, did_you_mean
from autopar.units import GIB, KIB, MIB
from profiler.options import FILES, HOW, SECONDS, MeasuringOptions, check_out

__all__ = [
    "MAX_BYTES",
    "OPERATIONS",
    "PANELS",
    "Backend",
    "Dtype",
    "HardwareOptions",
    "build_options",
    "parse_groups",
    "parse_operations",
    "parse_size",
    "parse_sizes",
]

OPERATIONS = ("allreduce", "p2p", "all2all", "allgather", "reducescatter", "overlap")
"""What can be asked for by name; `all` is all of them."""
MAX_BYTES = 1 << 40
"""No message is larger."""
_ELEMENT_BYTES = 4
"""Of the largest element type; every size is whole elements of all of them."""
_UNITS = {"": 1, "B": 1, "K": KIB, "M": MIB, "G": GIB}
_SIZE = re.compile(r"(\d{1,15})\s*(?:([KMG])(?:iB)?|B)?", re.IGNORECASE)
_FACTOR = re.compile(r"[x*](\d{1,6})", re.IGNORECASE)

Backend = Literal["auto", "nccl", "gloo"]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]


def parse_operations(names: Sequence[str]) -> tuple[str, ...]:
    """Return the operations that are named, each once and in the order of the table.

    None named, or `all`, is all of them; `all_reduce` and `all-reduce` are `allreduce`.
    """
    found: set[str] = set()
    for name in names:
        plain = re.sub("[-_]", "", name).lower()
        if plain == "all":
            found |= set(OPERATIONS)
        elif plain in OPERATIONS:
            found.add(plain)
        else:
            hint = did_you_mean(plain, OPERATIONS, 0.6)
            raise OptionError(
                f"the operation {shorten(name)} is unknown, expected "
                f"{', '.join(OPERATIONS)} or all{hint}"
            )
    return tuple(name for name in OPERATIONS if name in found or not found)


def parse_size(text: str, option: str = "--sizes") -> int:
    """Return the bytes of a size such as 64K, 32MiB or 4096; K, M and G are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{option}: {shorten(text)} is no size; write 64K, 32M, 1G (powers of 1024) or bytes"
        )
    size = int(match[1]) * _UNITS[(match[2] or "").upper()]
    if not 0 < size <= MAX_BYTES:
        raise OptionError(
            f"{option}: {shorten(text)} is {size} bytes, expected 1 to {MAX_BYTES} (1024G)"
        )
    if size % _ELEMENT_BYTES:
        raise OptionError(
            f"{option}: {shorten(text)} is not whole elements, {size} = "
            f"{size // _ELEMENT_BYTES} * {_ELEMENT_BYTES} + {size % _ELEMENT_BYTES}; "
            f"choose a multiple of {_ELEMENT_BYTES} bytes"
        )
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of a comma list of sizes and ranges such as 64K:1G:x2, increasing, in bytes.

    A range multiplies by its factor (x2 unless given) and contains its upper end if a step meets
    it.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, *rest = part.split(":")
        low = parse_size(first)
        if not rest:
            found.add(low)
            continue
        if len(rest) > 2:
            raise OptionError(f"--sizes: {shorten(part)} has too many parts; write 64K:1G:x2")
        high = parse_size(rest[0])
        factor = _factor(rest[1]) if len(rest) == 2 else 2
        if high < low:
            raise OptionError(
                f"--sizes: {shorten(part)} ends before it begins; write {rest[0]}:{first}:x{factor}"
            )
        while low <= high:
            found.add(low)
            low *= factor
    return tuple(sorted(found))


def parse_groups(text: str) -> tuple[int, ...] | None:
    """Return the group sizes of a comma list, increasing; None for `all`."""
    if text.strip().lower() == "all":
        return None
    found: set[int] = set()
    for part in text.split(","):
        if not re.fullmatch(r"\s*\d{1,9}\s*", part):
            raise OptionError(
                f"--groups: {shorten(text)} is no list of group sizes; write 2,4,8 or all"
            )
        if int(part) < 2:
            raise OptionError(
                f"--groups: a group of {int(part)} has nobody to talk to; "
                "sizes start at 2, or write all"
            )
        found.add(int(part))
    return tuple(sorted(found))


def _factor(text: str) -> int:
    match = _FACTOR.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"--sizes: {shorten(text)} is no factor; write x2, x4 or another integer")
    if int(match[1]) < 2:
        raise OptionError(
            f"--sizes: the factor {shorten(text)} never reaches the end of the range; "
            "write x2 or more"
        )
    return int(match[1])


_WHAT, _WHERE = "What to measure", "Machine"
PANELS = (_WHAT, HOW, _WHERE, FILES)
_SIZES = "64K:1G:x2"


@dataclass(frozen=True, kw_only=True)
class HardwareOptions(MeasuringOptions):
    """Options of one measuring run; defaults are those of the command."""

    operations: tuple[str, ...] = option(
        OPERATIONS,
        help="allreduce, p2p, all2all, allgather, reducescatter, overlap; or all",
        panel=_WHAT,
        positional=True,
        metavar="OPERATION",
        parse=lambda names: parse_operations(names),
        most_used=True,
        shown="all",
    )
    sizes_bytes: tuple[int, ...] = option(
        parse_sizes(_SIZES),
        name="sizes",
        help="message sizes: FROM:TO:xFACTOR or a comma list; K, M, G are powers of 1024",
        panel=_WHAT,
        metavar="SIZES",
        parse=parse_sizes,
        shown=_SIZES,
        most_used=True,
    )
    """Increasing message sizes; the reference size is one of them."""
    reference_bytes: int = option(
        32 << 20,
        name="reference-size",
        help="size whose bandwidth the documented files hold",
        panel=_WHAT,
        metavar="SIZE",
        parse=lambda text: parse_size(text, "--reference-size"),
        shown="32M",
    )
    """Size whose bandwidth is the documented one."""
    groups: tuple[int, ...] | None = option(
        None,
        help="group sizes such as 2,4,8, or all divisors of the number of ranks",
        panel=_WHAT,
        metavar="SIZES",
        parse=parse_groups,
        shown="all",
        most_used=True,
    )
    """Group sizes; None is every divisor of the world size above 1."""
    dtype: Dtype = option(
        "auto", help="elements of the messages; auto: bf16 on GPUs, fp32 on CPUs", panel=_WHAT
    )
    isolated: bool = option(
        False,
        help="one group at a time; otherwise all groups of a size at once, as in training",
        panel=_WHAT,
    )
    timeout_s: float = option(
        60.0,
        name="timeout",
        help="a single operation that takes longer has failed, and ends the run",
        panel=HOW,
        metavar="S",
        above=0,
        high=100_000,
        expects=SECONDS,
    )
    check: bool = option(
        True, help="compare the result of every operation with the expected one, once", panel=HOW
    )
    cuda_graph: bool = option(
        False,
        help="launch from CUDA graphs, which takes the launch cost out of small messages",
        panel=HOW,
    )
    backend: Backend = option(
        "auto",
        help="auto: nccl where torch finds a GPU, otherwise gloo on the CPU",
        panel=_WHERE,
        most_used=True,
    )
    allow_shared_gpu: bool = option(
        False,
        help="run several ranks on one GPU to exercise the code; files are marked synthetic",
        panel=_WHERE,
    )
    out: Path = option(
        Path("hardware"),
        help="folder of the files, for --hardware of autopar-search",
        panel=FILES,
        metavar="DIR",
        most_used=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_graph and self.backend == "gloo":
            raise OptionError(
                "--cuda-graph captures operations of a GPU, which --backend gloo has none of; "
                "leave one of them out"
            )


def build_options(**given: object) -> HardwareOptions:
    """Return the options that the words of a command line mean.

    given : option, with hyphens or underscores -> text, or value in base units.

    Raises
    ------
    OptionError: a value is unusable, or two options contradict each other.
    """
    raw = {name.replace("_", "-"): value for name, value in given.items()}
    options = make(HardwareOptions, read_values(rows_of(HardwareOptions), raw))
    check_out(options.out)
    # documented bandwidths are those of the reference size: it is always measured
    sizes = {*options.sizes_bytes, options.reference_bytes}
    return replace(options, sizes_bytes=tuple(sorted(sizes)))
