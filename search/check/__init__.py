"""Suggestions for a launch script: faster alternatives, and patches of the file."""
