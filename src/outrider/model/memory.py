"""How many KV blocks a model gets."""

from __future__ import annotations

import os

import torch

from outrider.config import CacheConfig
from outrider.model.loader import LoadedModel


def num_blocks(loaded: LoadedModel, cache: CacheConfig, max_num_seqs: int, bytes_per_token: int) -> int:
    """Capacity: as asked, or what every running sequence could fill, within a share of the free memory."""
    if cache.num_tokens is not None:
        tokens = cache.num_tokens
    elif loaded.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(loaded.device)
        tokens = min(max_num_seqs * loaded.max_model_len, int(0.8 * free) // bytes_per_token)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**31
        tokens = min(max_num_seqs * loaded.max_model_len, free // 4 // bytes_per_token)
    return max(1, tokens // cache.block_size)
