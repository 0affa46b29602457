"""torch modules of the reference layers, embedding and head that the profiler measures."""
