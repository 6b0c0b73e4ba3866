"""Speculation behind `generate` of a transformers model."""
