"""Evaluations beyond one search: given plans, comparisons, explorations, goals, suggestions."""
