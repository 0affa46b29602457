"""Arrays of which bounds of launches are made.

Not here: exact prices, and what is looked at in which order, which are `search.planning.uniform`'s.
"""
