"""Loading any transformers decoder and running it over a ragged batch with our own KV memory."""

from outrider.loading.listing import list_models_once

list_models_once()
