"""Reads GGUF files: header, architecture, tensors, tokenizer."""
