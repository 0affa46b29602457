"""Measures what a cluster reaches of its card: `torchrun -m profiler.site` writes a site file."""
