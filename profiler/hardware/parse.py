"""Reads the options of `torchrun -m profiler.hardware`: texts in, one validated value out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from autopar.documents.json import shorten
from autopar.errors import OptionError
from autopar.units import GIB, MIB
from profiler.hardware.cells import divisors
from profiler.hardware.options import OPERATIONS, Backend, Dtype, HardwareOptions
from profiler.option_values import check_files, choice, names, repetitions, seconds

__all__ = [
    "DEFAULT_OUT",
    "DEFAULT_SIZES",
    "MAX_BYTES",
    "build_options",
    "check_world",
    "format_size",
    "parse_groups",
    "parse_operations",
    "parse_size",
    "parse_sizes",
]

DEFAULT_SIZES = "64K:1G:x2"
DEFAULT_OUT = Path("hardware")
MAX_BYTES = 1 << 40
"""No message is larger."""
_ELEMENT_BYTES = 4
"""Of the largest element type; every size is whole elements of all of them."""
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": MIB, "G": GIB}
_SIZE = re.compile(r"(\d{1,15})\s*(?:([KMG])(?:iB)?|B)?", re.IGNORECASE)
_FACTOR = re.compile(r"[x*](\d{1,6})", re.IGNORECASE)


def build_options(
    *,
    operations: Sequence[str] = (),
    out: Path = DEFAULT_OUT,
    sizes: str = DEFAULT_SIZES,
    reference_size: str = "32M",
    iters: int = 50,
    warmup: int = 5,
    max_seconds: float = 2.0,
    timeout: float = 60.0,
    backend: str = "auto",
    dtype: str = "auto",
    groups: str = "all",
    isolated: bool = False,
    check: bool = True,
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    cuda_graph: bool = False,
    allow_shared_gpu: bool = False,
) -> HardwareOptions:
    """Return the options that these words of a command line mean.

    Raises
    ------
    OptionError: a value is unusable, or two options contradict each other.
    """
    check_files(out, resume=resume, force=force)
    chosen_backend: Backend = choice("--backend", backend, names(Backend))
    if cuda_graph and chosen_backend == "gloo":
        raise OptionError(
            "--cuda-graph captures operations of a GPU, which --backend gloo has none of; "
            "leave one of them out"
        )
    reference_bytes = parse_size(reference_size, "--reference-size")
    return HardwareOptions(
        operations=parse_operations(operations),
        out=out,
        sizes_bytes=tuple(sorted({*parse_sizes(sizes), reference_bytes})),
        reference_bytes=reference_bytes,
        groups=parse_groups(groups),
        iters=repetitions("--iters", iters),
        warmup=repetitions("--warmup", warmup),
        max_seconds=seconds("--max-seconds", max_seconds),
        timeout_s=seconds("--timeout", timeout),
        backend=chosen_backend,
        dtype=choice("--dtype", dtype, names(Dtype)),
        isolated=isolated,
        check=check,
        resume=resume,
        force=force,
        dry_run=dry_run,
        cuda_graph=cuda_graph,
        allow_shared_gpu=allow_shared_gpu,
    )


def check_world(options: HardwareOptions, world: int) -> None:
    """Check what can only be checked once the number of ranks is known.

    Raises
    ------
    OptionError: a group size does not divide the world size, or nothing is left to measure.
    """
    for size in options.groups or ():
        if world % size:
            known = ", ".join(map(str, divisors(world)))
            remedy = f"choose from {known}" if known else "start more ranks"
            raise OptionError(
                f"--groups: the group size {size} does not divide the world size, "
                f"{world} = {world // size} * {size} + {world % size}; {remedy}"
            )
    if world == 1 and options.operations == ("p2p",):
        raise OptionError(
            "p2p sends from one rank to another and the world size is 1; "
            "start torchrun with --nproc-per-node 2 or more"
        )


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
            near = difflib.get_close_matches(plain, OPERATIONS, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
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


def format_size(num_bytes: int) -> str:
    """Return a size in the shortest spelling that `parse_size` reads back."""
    for name in ("G", "M", "K"):
        if num_bytes % _UNITS[name] == 0:
            return f"{num_bytes // _UNITS[name]}{name}"
    return str(num_bytes)


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
