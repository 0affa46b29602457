"""Types of numeric arrays shared by cost model, planner and fits.

The note of each field or argument gives meaning and unit of the numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
"""Measured, fitted or predicted values: seconds, bytes, rates."""
I64 = NDArray[np.int64]
"""Counts, indices and exact bytes."""
Bool = NDArray[np.bool_]
"""One boolean per row."""
