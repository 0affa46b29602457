"""Answers as pictures: one step as a timeline, as a trace of a profiler, and as a page.

Nothing is priced here: what is drawn was predicted by `autopar.rates`, `autopar.price` and
`search.planning.cost`.
"""
