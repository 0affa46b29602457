"""torchtitan: its configurations, runs and plans."""
