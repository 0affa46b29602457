"""torchtitan: configurations, runs and plans."""
