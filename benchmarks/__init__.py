"""Measurements; ratios from one interleaved run, medians, with the command that makes them."""
