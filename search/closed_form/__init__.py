"""Calculon and tensor2d: closed-form models of a training step, evaluated in microseconds.

The limits in this module apply to both models. They keep every result finite, and reject a search
that is too large before it starts.
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
"""Range of the rates, sizes and factors of a system, in the units of its document.

Fractions have the same lower limit. With model sizes up to 1e9, no result overflows a float.
"""
LONGEST_S = 1e9
"""Maximum latency, seconds."""
MOST_PROCESSORS = 2**20
"""Maximum processors in a search; a single execution may use up to 2^31 - 1."""
MOST_BATCH = 2**24
"""Maximum batch size of a search, samples per step."""
MOST_POINTS = 10**10
"""Maximum executions in one search; lower bounds prune most of them, and Ctrl-C stops a search."""
MOST_KEPT = 10**7
"""Maximum points in memory at once, about 100 bytes each."""
MOST_TOP = 100_000
"""Maximum number of best executions that a search returns, each with all its statistics."""
MOST_SEARCHES = 10_000
"""Maximum searches per command: processor counts times strategies times combinations of a sweep."""
MOST_PLACEMENTS = 100_000
"""Maximum placements evaluated for one candidate."""
MOST_NUMBERS = 10**7
"""Maximum number of entries in a table of the communication peers of all ranks."""
