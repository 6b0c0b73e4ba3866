"""The proofs of losslessness: exact and sampled distributions of text, identical texts, and a KV memory that is true."""
