"""Profilers that write the documented profile files; the only package that may import torch."""
