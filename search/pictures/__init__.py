"""Answers as pictures: one step as a timeline, as a trace of a profiler, and as a page.

Nothing is priced here: what is drawn was predicted by `autopar.estimate`, `autopar.memory` and
`search.cost`.
"""
