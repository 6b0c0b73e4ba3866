"""Checkpoints and modules become loaded models."""
