"""Vectorised lower bounds of step time and memory of uniform plans.

Exact step times, exact memory and the search order are in `search.planning.uniform`.
"""
