"""Profilers that write profile files in Galvatron's format; only these may import torch."""
