"""The benchmark: what is run, what was found, and how it is shown."""
