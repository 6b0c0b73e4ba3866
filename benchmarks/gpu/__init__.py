"""What the engine does on a GPU: whether it is right, and how fast it is."""
