"""Backends that run a decoder over our KV memory, by name."""
