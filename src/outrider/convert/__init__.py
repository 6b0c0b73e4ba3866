"""Writes checkpoints in the file formats of other engines."""
