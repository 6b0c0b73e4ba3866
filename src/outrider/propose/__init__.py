"""Proposers: the protocol, the settings of methods, and one method a file."""
