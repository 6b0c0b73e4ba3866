"""Heads that draft from hidden states of their target: what they are, how they are kept, and which target they fit."""
