"""Can this backend drive this model exactly? Found by running it, not by its name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.model import hf
from outrider.model.backends.base import AttentionBackend
from outrider.model.batch import Segment
from outrider.model.loader import LoadedModel
from outrider.model.runner import ModelRunner

#: Largest difference from a plain forward, relative to the largest logit, that passes as rounding.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}

_PROBE_LEN, _PROBE_CUT, _PROBE_BLOCK = 12, 7, 4


@dataclass(frozen=True)
class Reference:
    """What the stock model says to the tokens of the probe.

    Attributes:
        logits: [num_tokens, vocab_size]
        is_causal: Whether what a token's row says is untouched by the tokens after it; found by changing the last one.
    """

    logits: Tensor
    is_causal: bool


def reference(loaded: LoadedModel) -> Reference:
    """One pass of the stock model over the tokens of the probe, and over the same with another last token beside them: a
    model is read from its file once."""
    hf.set_attention(loaded.model, hf.stock_attention(loaded.model))
    tokens = _probe_tokens(loaded)
    changed = [*tokens[:-1], (tokens[-1] + 1) % loaded.vocab_size]
    with hf.noting_layers(loaded.model):
        logits, others = _plain_logits(loaded, [tokens, changed])
    return Reference(logits, _error(others[:-1], logits[:-1], logits, loaded.dtype) <= TOLERANCE[loaded.dtype])


def _error(got: Tensor, want: Tensor, logits: Tensor, dtype: torch.dtype) -> float:
    """How far rows of logits lie apart, as a share of the largest of all logits."""
    by_row = (got - want).abs().amax(-1) / logits.abs().max()
    # In narrow types a router's near tie may send a single row to another expert; a wrong mask spares hardly any row.
    return float(by_row.max() if dtype in (torch.float64, torch.float32) else by_row.median())


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
    error = _error(got, want[_PROBE_CUT:], want, loaded.dtype)
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
def _plain_logits(loaded: LoadedModel, texts: list[list[int]]) -> Tensor:
    """[num_texts, num_tokens, vocab_size] for texts of one length."""
    logits: Tensor = loaded.model(torch.tensor(texts, device=loaded.device), use_cache=False).logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
