"""Base units, conversion factors, and formats of quantities for display.

Inside the program every quantity is in seconds, bytes, bytes/s or FLOP and has the suffix `_s`,
`_bytes`, `_bytes_per_s` or `_flop`. File formats may use other units; only their readers and
writers convert.
"""

from __future__ import annotations

from collections.abc import Sequence

MS = 1e-3
"""Seconds in a millisecond."""
KIB = 1 << 10
"""Bytes in a KiB."""
MIB = 1 << 20
"""Bytes in a MiB, the unit that the memory files call MB."""
GIB = 1 << 30
"""Bytes in a GiB, the unit of `--memory-constraint`."""
GB = 10**9
"""Bytes in a GB, the unit of bandwidths in files (GB/s)."""
_UNSURE = 0.001
"""Probabilities closer to 0 or 1 than this are not distinguished."""
_LETTERS = ((GIB, "G"), (MIB, "M"), (KIB, "K"))


def format_bytes(num_bytes: float) -> str:
    """Return a byte count for display, in GiB or MiB with two decimals."""
    if abs(num_bytes) >= GIB / 2:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB"


def format_size(num_bytes: float) -> str:
    """Return a message size for display: 64K, 32M, 1G (powers of 1024), with up to four digits."""
    for unit, letter in _LETTERS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g}{letter}"
    return f"{num_bytes:.4g}B"


def format_exact_size(num_bytes: int, *, in_words: bool = False) -> str:
    """Return a size in the shortest form that the option `--sizes` reads, such as 64K.

    in_words : True for sentences, `64 KiB` and `100 bytes`
    """
    for unit, letter in _LETTERS:
        if num_bytes % unit == 0:
            return f"{num_bytes // unit}" + (f" {letter}iB" if in_words else letter)
    return f"{num_bytes} bytes" if in_words else str(num_bytes)


def format_message(num_bytes: float) -> str:
    """Return a message size for a sentence, in MiB or KiB with up to six digits."""
    return f"{num_bytes / MIB:g} MiB" if num_bytes >= MIB else f"{num_bytes / KIB:g} KiB"


def format_magnitude(num_bytes: float) -> str:
    """Return bytes in the unit of their magnitude, in the format of Calculon."""
    units = ("iB", "kiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    power = 0
    while num_bytes >= KIB and power < len(units) - 1:
        num_bytes /= KIB
        power += 1
    return f"{num_bytes:.3f} {units[power]}"


def format_count(count: int, one: str, several: str | None = None) -> str:
    """Return a count with its noun in singular or plural: `1 cell`, `3 cells`.

    one, several : text after a count of 1, and after others; by default `one` with an s
    """
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def format_list(items: Sequence[object]) -> str:
    """Return items separated by commas, at most the first 8 of them: `1, 2, ...`."""
    return ", ".join(map(str, items[:8])) + (", ..." if len(items) > 8 else "")


def format_figure(value: float, digits: int = 4) -> str:
    """Return a number as text with `digits` significant digits and no exponent: `12,340`."""
    rounded = float(f"{value:.{digits}g}")
    if abs(rounded) >= 10 ** (digits - 1):
        return f"{rounded:,.0f}"
    return f"{value:,.{digits}g}"


def format_probability(share: float) -> str:
    """Return a probability in percent; no estimate is certain to more than a thousandth."""
    if share < _UNSURE:
        return f"< {_UNSURE * 100:.1f} %"
    if share > 1.0 - _UNSURE:
        return f"> {(1.0 - _UNSURE) * 100:.1f} %"
    return f"{share * 100:.1f} %"


def format_seconds(time_s: float) -> str:
    """Return a duration for display: s, ms or us with four significant digits."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(time_s) >= factor:
            return f"{time_s / factor:.4g} {unit}"
    return f"{time_s / 1e-6:.4g} us"


def format_range_s(low_s: float, high_s: float, *, like_s: float, digits: int = 4) -> str:
    """Return a range of durations in the display unit of `like_s`, without unit: `23.69 to 32.94`.

    Ends that are equal after rounding are written as one number.
    """
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[format_seconds(like_s).rpartition(" ")[2]]
    ends = dict.fromkeys(format_figure(one / scale, digits) for one in (low_s, high_s))
    return " to ".join(ends)


def format_duration(time_s: float) -> str:
    """Return a waiting time for display: whole seconds, minutes from 10 min, then h and days."""
    for factor, unit in ((86400.0, "days"), (3600.0, "h")):
        if time_s >= 2.0 * factor:
            return f"{time_s / factor:.1f} {unit}"
    return f"{time_s / 60.0:.0f} min" if time_s >= 600.0 else f"{time_s:.0f} s"


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors in increasing order."""
    # Divisors come in pairs, one of them up to the root.
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
