"""Reader, checks, search space and exporter for torchtitan."""
