"""Finds, reads and checks what a model consists of: files, configuration, weights, tokenizer."""

from outrider.loading.listing import list_models_once

list_models_once()
