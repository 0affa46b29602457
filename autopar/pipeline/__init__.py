"""Pipeline schedules: execution orders, event replay, and closed formulas of time and memory."""
