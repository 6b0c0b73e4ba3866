"""The governor: cost model, acceptance model, and the choice of proposer and draft length. No torch."""
