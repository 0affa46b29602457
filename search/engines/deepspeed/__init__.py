"""DeepSpeed: configurations, runs and plans."""
