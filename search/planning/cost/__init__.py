"""The cost model: one formula per function, from fitted profiles to time and memory of a row."""
