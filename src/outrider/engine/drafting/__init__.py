"""Who drafts in a step, how much, and what was drafted."""
