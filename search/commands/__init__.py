"""Commands of the planner: they read options, call the library and print results.

They are imported only as entry points, by name.
"""
