"""Finds, reads and checks what a model consists of: files, configuration, weights, tokenizer."""
