"""Cluster profiler: `torchrun -m profiler.hardware` writes the documented hardware files."""
