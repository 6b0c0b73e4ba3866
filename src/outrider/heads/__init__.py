"""Heads that draft from hidden states of their target: layers, checkpoints, and the check that they fit."""
