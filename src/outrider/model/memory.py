"""Computes how many KV blocks a model gets."""

from __future__ import annotations

from outrider.config import CacheConfig
from outrider.model.loading.available import available_bytes
from outrider.model.loading.loaded_model import LoadedModel


def num_blocks(loaded: LoadedModel, cache: CacheConfig, max_num_seqs: int, bytes_per_token: int) -> int:
    """Capacity: as asked, or what every running sequence could fill, within a share of the free memory."""
    if cache.num_tokens is not None:
        tokens = cache.num_tokens
    else:
        free, share = available_bytes(loaded.device), 0.8 if loaded.device.type == "cuda" else 0.25
        tokens = max_num_seqs * loaded.max_model_len
        if bytes_per_token:  # a model without attention keeps nothing of single tokens
            tokens = min(tokens, int(share * (2**31 if free is None else free)) // bytes_per_token)
    return max(1, tokens // cache.block_size)
