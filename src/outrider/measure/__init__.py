"""Measuring instruments that the benchmark, doctor, tuning and training share."""
