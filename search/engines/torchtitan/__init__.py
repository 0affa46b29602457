"""torchtitan: its configurations, launches and plans."""
