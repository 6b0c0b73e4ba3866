"""The thread that drives an engine, and the messages between it and its callers."""
