"""How drafts grow into chains and trees."""
