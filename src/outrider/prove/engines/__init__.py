"""Proofs on other engines: whether the distribution of their texts changes when they speculate."""
