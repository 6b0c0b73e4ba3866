"""Other engines under proof: what they do to a law when they speculate."""
