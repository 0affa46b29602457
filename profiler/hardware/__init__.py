"""Measures a cluster: `torchrun -m profiler.hardware` writes the documented hardware files."""
