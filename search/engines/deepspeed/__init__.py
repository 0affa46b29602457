"""DeepSpeed: its configurations, launches and plans."""
