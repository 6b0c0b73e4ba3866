"""Losslessness proofs as a library: exact and sampled laws, identity of text, truth of the cache."""
