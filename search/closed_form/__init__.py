"""Calculon and tensor2d: a training step in closed form, in microseconds.

What either takes on ends here, once for both: no figure is infinite or no number at these rates,
and a question that is too large is refused before its work begins.
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
"""Of a machine's rates, sizes and factors, in the units of its document; shares are not below it.
With sizes of a model up to 1e9 every figure stays far inside what a float holds."""
LONGEST_S = 1e9
"""Of a latency."""
MOST_PROCESSORS = 2**20
"""Of a search; one execution is priced on as many as 2^31 - 1."""
MOST_BATCH = 2**24
"""Samples of a step of a search."""
MOST_POINTS = 10**10
"""Executions of one search; a bound leaves most of them out, and Ctrl-C ends what takes long."""
MOST_KEPT = 10**7
"""Points that are in memory at once, of some 100 bytes each."""
MOST_TOP = 100_000
"""Best executions that a search keeps, with all that is known of them."""
MOST_SEARCHES = 10_000
"""Of one command: numbers of processors, strategies and settings of a sweep."""
MOST_PLACEMENTS = 100_000
"""Of one candidate, tried for the fastest."""
MOST_NUMBERS = 10**7
"""In a table of the ranks that each rank talks to."""
