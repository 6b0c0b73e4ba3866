"""Checkpoints in safetensors whose weights others have quantised, loaded without a copy in full precision."""
