"""Reader, checks, search space and exporter for accelerate, and sizes of published models."""
