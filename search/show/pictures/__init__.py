"""Pictures of answers: one step as a timeline, a profiler trace or an HTML page.

The drawn times and bytes are predicted by `autopar.rates`, `autopar.price` and
`search.planning.cost`.
"""
