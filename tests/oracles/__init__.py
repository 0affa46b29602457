"""Slow, simple answers that the planner is compared with: exhaustive search and integer programs.

Nothing here imports the planner or its cost code; everything is written from the problem
statement at the top of `search/cost/tables.py`.
"""
