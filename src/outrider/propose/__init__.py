"""Who guesses: the Proposer protocol, the Draft it returns, and one method a file."""
