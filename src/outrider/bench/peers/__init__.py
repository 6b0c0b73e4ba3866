"""Other engines on the same weights, prompts and threads, measured in the same rounds."""
