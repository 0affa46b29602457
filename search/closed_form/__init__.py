"""Calculon and tensor2d: closed-form models of a training step, evaluated in microseconds.

The limits below apply to both models. They keep every figure finite, and refuse a question that is
too large before its work begins.
"""

__all__ = [
    "LARGEST_RATE",
    "LONGEST_S",
    "MOST_BATCH",
    "MOST_KEPT",
    "MOST_NUMBERS",
    "MOST_PLACEMENTS",
    "MOST_POINTS",
    "MOST_PROCESSORS",
    "MOST_SEARCHES",
    "MOST_TOP",
    "SMALLEST_RATE",
]

SMALLEST_RATE, LARGEST_RATE = 1e-15, 1e15
"""Range of a machine's rates, sizes and factors, in the units of its document; fractions have this
lower limit too. With model sizes up to 1e9, every figure stays far inside the range of a float."""
LONGEST_S = 1e9
"""Maximum latency, seconds."""
MOST_PROCESSORS = 2**20
"""Maximum processors of a search; a single execution may have up to 2^31 - 1."""
MOST_BATCH = 2**24
"""Maximum samples per step of a search."""
MOST_POINTS = 10**10
"""Maximum executions of one search; a bound prunes most of them, and Ctrl-C ends a long one."""
MOST_KEPT = 10**7
"""Maximum points in memory at once, about 100 bytes each."""
MOST_TOP = 100_000
"""Maximum best executions that a search keeps, with all their statistics."""
MOST_SEARCHES = 10_000
"""Maximum searches of one command: processor counts times strategies times settings of a sweep."""
MOST_PLACEMENTS = 100_000
"""Maximum placements tried for one candidate."""
MOST_NUMBERS = 10**7
"""Maximum entries in a table of the communication peers of each rank."""
