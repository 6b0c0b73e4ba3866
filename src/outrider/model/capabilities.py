"""Which attention backend drives this model exactly: found by running it, not by its name."""

from __future__ import annotations

import logging
import os
from functools import partial

import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.config import CacheConfig
from outrider.errors import UnsupportedModelError
from outrider.kernels.library import kernel_library
from outrider.kernels.linear import use_packed_linear, use_skinny_linear, use_stock_linear
from outrider.model import hf
from outrider.model.attention.base import AttentionBackend
from outrider.model.attention.fused import FusedDecoder
from outrider.model.attention.gather import GatherAttention
from outrider.model.attention.paged import PagedAttention
from outrider.model.attention.row_by_row import RowByRowAttention
from outrider.model.batch import Segment
from outrider.model.loader import LoadedModel
from outrider.model.runner import ModelRunner

logger = logging.getLogger(__name__)

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (FusedDecoder, PagedAttention, GatherAttention, RowByRowAttention)
}
#: What "auto" tries, in this order.
AUTO = ("fused", "paged", "gather")
#: What it tries in batch-invariant mode: backends whose bits may not depend on the batch.
INVARIANT = ("fused", "row_by_row")

#: Largest difference from a plain forward, relative to the largest logit, that passes as rounding.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}

_PROBE_LEN, _PROBE_CUT, _PROBE_BLOCK = 12, 7, 4


def make_runner(
    loaded: LoadedModel,
    attention_backend: str,
    cache: CacheConfig,
    max_num_seqs: int,
    *,
    batch_invariant: bool = False,
) -> ModelRunner:
    """Choose a backend by probing, size the KV memory from what the probe wrote, and put the runner together.

    Args:
        loaded: The model.
        attention_backend: "auto" or a backend's name.
        cache: Block size and capacity.
        max_num_seqs: Sequences that run at a time, to bound the default capacity.
        batch_invariant: Whether the backend must also reproduce its own bits, however rows are batched.

    Raises:
        UnsupportedModelError: No backend reproduces a plain forward pass.
    """
    kinds = hf.recurrent_layers(loaded.model.config)
    if kinds:
        raise UnsupportedModelError(
            loaded.name,
            f"it has layers with a running state ({', '.join(kinds)}), which rejected draft tokens would corrupt",
            "Use a model whose layers all attend.",
        )
    if not is_causal(loaded):
        raise UnsupportedModelError(
            loaded.name,
            "its tokens see those that come after them, so it is an encoder",
            "Use a causal decoder; for masked models there is nothing to speculate on.",
        )
    want = reference(loaded)
    if kernel_library() is None and not batch_invariant:
        use_skinny_linear(loaded.model)
    failures = {}
    for name, packed in _ways(attention_backend, batch_invariant=batch_invariant):
        try:
            backend, bytes_per_token = _install(loaded, name, want, packed=packed, bits=batch_invariant)
        except Exception as error:  # whatever the model's own code raises decides against this backend
            logger.info("attention backend %s (packed: %s) does not fit %s: %s", name, packed, loaded.name, error)
            failures[name] = str(error).splitlines()[0] if str(error) else type(error).__name__
            continue
        num_blocks = _num_blocks(loaded, cache, max_num_seqs, bytes_per_token)
        return ModelRunner(loaded, backend, BlockManager(num_blocks, cache.block_size, prefix_caching=cache.prefix_caching))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
    remedy = "Report it." if attention_backend == "auto" else "Use attention_backend='auto', or report it."
    raise UnsupportedModelError(loaded.name, f"no attention backend reproduces its forward pass ({reasons})", remedy)


def _ways(choice: str, *, batch_invariant: bool) -> list[tuple[str, bool]]:
    """Backends to try, each with linear layers over packed weights first, where there are kernels, then with stock ones: a
    model that reads its weights past its layers would find none in a packed one."""
    names = (INVARIANT if batch_invariant else AUTO) if choice == "auto" else (choice,)
    packed = (False,) if kernel_library() is None else (True, False)
    return [(name, p) for name in names for p in ((False,) if name == FusedDecoder.name else packed)]


def _install(loaded: LoadedModel, name: str, want: Tensor, *, packed: bool, bits: bool) -> tuple[AttentionBackend, int]:
    """One way to drive the model, probed; it leaves no trace where it fails."""
    backend = BACKENDS[name]()
    library = kernel_library()
    try:
        if packed and library is not None:
            use_packed_linear(loaded.model, library, hf.TRANSPOSED_LINEARS)
        bytes_per_token = probe(loaded, backend, want)
        if bits:
            probe_bits(loaded, backend)
    except Exception:
        backend.uninstall()
        use_stock_linear(loaded.model)
        raise
    return backend, bytes_per_token


def is_causal(loaded: LoadedModel) -> bool:
    """Whether what a token's row says is untouched by the tokens after it; found by changing the last one."""
    tokens = _probe_tokens(loaded)
    changed = [*tokens[:-1], (tokens[-1] + 1) % loaded.vocab_size]
    rows, others = _plain_logits(loaded, tokens)[:-1], _plain_logits(loaded, changed)[:-1]
    scale = rows.abs().max().item()
    return (rows - others).abs().max().item() <= TOLERANCE[loaded.dtype] * scale


def reference(loaded: LoadedModel) -> Tensor:
    """What the stock model says to the tokens of the probe: [num_tokens, vocab_size]."""
    hf.set_attention(loaded.model, hf.stock_attention(loaded.model))
    return _plain_logits(loaded, _probe_tokens(loaded))


def _probe_tokens(loaded: LoadedModel) -> list[int]:
    return [(7 * i + 3) % loaded.vocab_size for i in range(_PROBE_LEN)]


def probe(loaded: LoadedModel, backend: AttentionBackend, want: Tensor) -> int:
    """Install `backend` and compare it with the `reference`, over a ragged batch in two chunks.

    Returns:
        Bytes of KV that one token takes.

    Raises:
        Exception: The model cannot run this way, or its logits differ by more than rounding.
    """
    tokens = _probe_tokens(loaded)
    backend.install(loaded.model)
    runner = ModelRunner(loaded, backend, BlockManager(2 * _PROBE_LEN // _PROBE_BLOCK + 2, _PROBE_BLOCK))
    table, neighbour = runner.blocks.allocate(4), runner.blocks.allocate(3)
    long = loaded.uses_long_rope(_PROBE_LEN)
    runner.forward([Segment(tokens[:_PROBE_CUT], 0, table, long_rope=long), Segment(tokens, 0, neighbour, long_rope=long)])
    rows = [tokens[_PROBE_CUT], tokens[0], *tokens[_PROBE_CUT + 1 :]]
    tree = (-1, 0, 0, 2, 3, 4)  # row 1 is a rejected sibling that nobody on the true path may see
    got = runner.forward([Segment(rows, _PROBE_CUT, table, tree, long_rope=long)]).logits[[0, 2, 3, 4, 5]]
    by_row = (got - want[_PROBE_CUT:]).abs().amax(-1) / want.abs().max()
    # In narrow types a router's near tie may send a single row to another expert; a wrong mask spares hardly any row.
    error = float(by_row.max() if loaded.dtype in (torch.float64, torch.float32) else by_row.median())
    if not error <= TOLERANCE[loaded.dtype]:
        raise ValueError(f"logits differ from a plain forward pass by {error:.1e} of their size")
    return runner.pool.bytes_per_slot()


def probe_bits(loaded: LoadedModel, backend: AttentionBackend) -> None:
    """Compute a text in one pass, token by token, and beside a neighbour; raises ValueError unless all bits agree."""
    tokens = [(11 * i * i + 5 * i + 2) % loaded.vocab_size for i in range(_PROBE_LEN)]
    runner = ModelRunner(loaded, backend, BlockManager(4 * _PROBE_LEN // _PROBE_BLOCK, _PROBE_BLOCK))
    tables = [runner.blocks.allocate(_PROBE_LEN // _PROBE_BLOCK) for _ in range(3)]
    part = partial(Segment, long_rope=loaded.uses_long_rope(_PROBE_LEN))
    whole = runner.forward([part(tokens, 0, tables[0])]).logits
    single = torch.cat([runner.forward([part([t], i, tables[1])]).logits for i, t in enumerate(tokens)])
    beside = runner.forward([part(tokens[:5], 0, tables[1]), part(tokens, 0, tables[2])]).logits[5:]
    if not (torch.equal(whole, single) and torch.equal(whole, beside)):
        raise ValueError("its bits depend on the batch")


@torch.inference_mode()
def _plain_logits(loaded: LoadedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = loaded.model(torch.tensor([tokens], device=loaded.device), use_cache=False).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _num_blocks(loaded: LoadedModel, cache: CacheConfig, max_num_seqs: int, bytes_per_token: int) -> int:
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
