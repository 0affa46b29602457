"""Exact search for uniform plans: one set of degrees for the whole model.

Plans with layer-specific degrees are in `search.planning.layered`.
"""
