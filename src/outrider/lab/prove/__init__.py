"""Proofs of losslessness: exact references, enumerated laws, and checks of a user's own model."""
