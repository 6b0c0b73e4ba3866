"""Scheduling: which sequences run next, with how many rows, and in which blocks. No torch."""
