"""Arrays for lower bounds of uniform plans.

Exact prices and the order of the search are in `search.planning.uniform`.
"""
