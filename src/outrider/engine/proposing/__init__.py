"""Proposers at work: who drafts for which sequence, how they are asked, governed and shown what came of it."""
