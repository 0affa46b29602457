"""Slow, simple answers that the planner is compared with: exhaustive search and integer programs.

No answer here uses the planner or its cost code; all are written from the problem statement at the
top of `search/planning/cost/tables.py`. `dump` alone calls the planner, to store answers that these
confirm.
"""
