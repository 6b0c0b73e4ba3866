"""The exact part: random numbers by key, logits to probabilities, and the acceptance rules as pure functions."""
