"""Training of draft models and heads, from data that the target itself wrote."""
