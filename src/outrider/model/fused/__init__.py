"""Descriptions of model families for the fused decoder."""
