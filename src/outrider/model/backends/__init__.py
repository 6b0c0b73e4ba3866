"""Ways to drive a decoder over our KV memory, by name."""
