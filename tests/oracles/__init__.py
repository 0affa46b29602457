"""Slow, simple solutions that the planner is compared with: exhaustive search and integer programs.

None of them uses the planner or its cost code; all are written from the problem statement at the
top of `search/planning/cost/tables.py`. Only `dump` calls the planner, to store answers that these
confirm.
"""
