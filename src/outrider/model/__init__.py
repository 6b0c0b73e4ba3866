"""Loading any transformers decoder and running it over a ragged batch with our own KV memory."""
