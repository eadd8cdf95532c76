"""Measurements: what the commands `fa-a2a sweep` and its relatives run. One JSON line for each result."""
