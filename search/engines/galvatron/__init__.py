"""Galvatron: its strategy files and launch arguments."""
