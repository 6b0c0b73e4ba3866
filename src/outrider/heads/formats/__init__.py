"""Readers of published heads, one format a file."""
