"""Two ways to drive a decoder's attention over our KV memory; registered by name."""
