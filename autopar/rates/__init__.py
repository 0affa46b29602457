"""Estimated hardware and model profiles, computed from a datasheet card and a model spec.

Nothing here is measured. Every result has `estimated=True` and names its card as its source;
`docs/concepts/estimates.md` compares the estimates with published measurements.
"""
