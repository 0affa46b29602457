"""Plans with one set of degrees for a whole model: launches of trainers, searched exactly.

Not here: plans whose layers differ in their degrees, which are `search.planning.layered`'s.
"""
