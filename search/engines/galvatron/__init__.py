"""Galvatron: strategy files and launch files."""
