"""Questions about several answers: explorations, comparisons, goals, suggestions."""
