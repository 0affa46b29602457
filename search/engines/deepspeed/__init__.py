"""DeepSpeed: its configurations, runs and plans."""
