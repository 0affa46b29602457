"""Measurement of a model: time of its layers on a device, and exact memory without a GPU."""
