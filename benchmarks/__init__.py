"""Measurements beside `outrider bench`. Each compares medians within one interleaved run."""
