"""GGUF files become models: their header, their tensors, their vocabulary."""
