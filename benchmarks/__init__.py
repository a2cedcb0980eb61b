"""Measurements; `python -m benchmarks` runs `structconv bench`."""
