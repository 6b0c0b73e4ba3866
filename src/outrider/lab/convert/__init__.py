"""Writes models and heads in the formats of other engines."""
