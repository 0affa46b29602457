"""Exact search for per-layer plans: the C++ core turns cost tables into the best plan and proof."""
