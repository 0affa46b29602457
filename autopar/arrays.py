"""Names for the arrays of numbers that cost model, planner and fits hand to each other.

What the numbers mean, and in which unit, is said where a field or an argument is declared.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
"""Seconds, bytes, rates: everything that is measured, fitted or predicted."""
I64 = NDArray[np.int64]
"""Counts, indices and exact bytes."""
Bool = NDArray[np.bool_]
"""One yes or no for every row."""
