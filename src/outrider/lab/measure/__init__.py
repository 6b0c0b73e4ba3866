"""Instruments that the benchmark, `tune` and `doctor` share: tasks, timed passes, interleaved turns."""
