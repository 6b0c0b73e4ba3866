"""Continuous batches: schedule, propose, forward, verify, commit."""
