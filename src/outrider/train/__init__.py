"""Trains what drafts for a target: data that the target writes, draft models, and heads."""
