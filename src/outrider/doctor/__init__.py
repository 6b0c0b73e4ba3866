"""Examines whether speculation fits a target, what it is worth on this machine, and what limits it."""
