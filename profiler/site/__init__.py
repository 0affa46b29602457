"""Site profiler: `torchrun -m profiler.site` measures a cluster relative to its card."""
