"""Cluster profiler: `torchrun -m profiler.hardware` writes hardware files for the search."""
