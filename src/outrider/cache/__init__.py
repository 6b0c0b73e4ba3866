"""Where key-value memory lives: block bookkeeping (no torch) and the tensors behind it."""
