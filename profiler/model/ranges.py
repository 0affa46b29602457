"""Reads batch sizes, sequence lengths and tensor degrees: lists and ranges in, numbers out."""

from __future__ import annotations

import re

from autopar.documents.json import shorten
from autopar.errors import OptionError

__all__ = ["MAX_DEGREE", "MAX_NUMBER", "parse_batches", "parse_degrees", "parse_seq_lengths"]

MAX_NUMBER = 1 << 24
"""Largest batch size or sequence length."""
MAX_DEGREE = 1024
"""Largest tensor degree."""
_MAX_CASES = 4096
_NUMBER = re.compile(r"\d{1,12}")


def parse_batches(text: str) -> tuple[int, ...]:
    """Return the batch sizes of a comma list of numbers and ranges such as 1:12, increasing."""
    found: set[int] = set()
    for part in text.split(","):
        found |= set(_range("--bsz", part, "1:12, 1:64:x2 or 1,2,4"))
    return tuple(sorted(found))


def parse_seq_lengths(text: str) -> tuple[tuple[int, ...], ...]:
    """Return the cases of sequence lengths of a comma list, increasing.

    A number or a range such as 512:32768:x2 is a length of all layer types; [512,128] holds one
    length per type.
    """
    example = "512:32768:x2, 1024,2048 or [512,128]"
    found: set[tuple[int, ...]] = set()
    for part in re.findall(r"\[[^\]]*\]?|[^,]+|,(?=,|$)", text) or [text]:
        if part.startswith("["):
            inner = part.removeprefix("[").removesuffix("]").split(",")
            numbers = [_range("--seq", number, example) for number in inner]
            if not part.endswith("]") or any(len(one) != 1 for one in numbers):
                raise OptionError(
                    f"--seq: {shorten(part)} is no list of one length per layer type; "
                    "write [512,128]"
                )
            found.add(tuple(one[0] for one in numbers))
        else:
            found |= {(number,) for number in _range("--seq", part, example)}
    return tuple(sorted(found, key=lambda case: (sum(case) / len(case), case)))


def parse_degrees(text: str) -> tuple[int, ...]:
    """Return the tensor degrees of a comma list, increasing; 1 always is one of them."""
    found = {1}
    for part in text.split(","):
        if not _NUMBER.fullmatch(part.strip()) or not 1 <= int(part) <= MAX_DEGREE:
            raise OptionError(
                f"--tp: {shorten(text)} is no list of tensor degrees from 1 to {MAX_DEGREE}; "
                "write 1,2,4,8"
            )
        found.add(int(part))
    return tuple(sorted(found))


def _range(option: str, text: str, example: str) -> list[int]:
    """Return the numbers of `N`, `A:B`, `A:B:STEP` or `A:B:xFACTOR`; both ends are allowed in."""
    parts = [part.strip() for part in text.strip().split(":")]
    step = parts[2] if len(parts) == 3 else "1"
    factor = step[:1] in ("x", "*")
    numbers = [*parts[:2], step[1:] if factor else step]
    if len(parts) > 3 or not all(_NUMBER.fullmatch(number) for number in numbers):
        raise OptionError(f"{option}: {shorten(text)} is no number or range; write {example}")
    low, high, by = int(parts[0]), int(parts[min(1, len(parts) - 1)]), int(numbers[-1])
    if not 1 <= low <= high <= MAX_NUMBER:
        raise OptionError(
            f"{option}: {shorten(text)} is out of order or range; numbers go from 1 to "
            f"{MAX_NUMBER}, the smaller one first"
        )
    if by < 1 + factor:
        raise OptionError(
            f"{option}: the step of {shorten(text)} never reaches the end; write {example}"
        )
    found = [low]
    while (following := found[-1] * by if factor else found[-1] + by) <= high:
        found.append(following)
        if len(found) > _MAX_CASES:
            raise OptionError(
                f"{option}: {shorten(text)} are more than {_MAX_CASES} values; widen the step"
            )
    return found
