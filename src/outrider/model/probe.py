"""Can this backend drive this model exactly? Found by running it, not by its name."""

from __future__ import annotations

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
_WIDE = (torch.float64, torch.float32)

_PROBE_LEN, _PROBE_CUT, _PROBE_BLOCK = 12, 7, 4
#: The texts of a model whose router may choose otherwise after a rounding. One of them must agree.
_ROUTED_TEXTS = 5


def is_causal(loaded: LoadedModel) -> bool:
    """Whether what a token's row says is untouched by the tokens after it; found by changing the last one."""
    tokens = _texts(loaded)[0]
    changed = [*tokens[:-1], (tokens[-1] + 1) % loaded.vocab_size]
    rows, others = _plain_logits(loaded, tokens)[:-1], _plain_logits(loaded, changed)[:-1]
    scale = rows.abs().max().item()
    return (rows - others).abs().max().item() <= TOLERANCE[loaded.dtype] * scale


def reference(loaded: LoadedModel) -> Tensor:
    """What the stock model says to the texts of the probe: [num_texts, num_tokens, vocab_size]."""
    hf.set_attention(loaded.model, hf.stock_attention(loaded.model))
    with hf.noting_layers(loaded.model):
        return torch.stack([_plain_logits(loaded, tokens) for tokens in _texts(loaded)])


def _texts(loaded: LoadedModel) -> list[list[int]]:
    """The texts of the probe.

    In narrow types a router's near tie may send a row to another expert than in the stock model, and the rows after it see
    that row. Such ties lie elsewhere in each text, and what is wrong is wrong in all of them.
    """
    routed = loaded.dtype not in _WIDE and bool(hf.expert_stacks(loaded.model))
    starts = range(_ROUTED_TEXTS if routed else 1)
    return [[(7 * i + 3 + 17 * start) % loaded.vocab_size for i in range(_PROBE_LEN)] for start in starts]


def probe(loaded: LoadedModel, backend: AttentionBackend, want: Tensor) -> int:
    """Install `backend` and compare it with the `reference`, over ragged batches in two chunks.

    Returns:
        Bytes of KV that one token takes.

    Raises:
        Exception: The model cannot run this way, or its logits differ by more than rounding.
    """
    backend.install(loaded.model)
    runner = ModelRunner(loaded, backend, BlockManager(2 * _PROBE_LEN // _PROBE_BLOCK + 2, _PROBE_BLOCK))
    least = float("inf")
    for tokens, logits in zip(_texts(loaded), want, strict=True):
        error = _error(loaded, runner, tokens, logits)
        if error <= TOLERANCE[loaded.dtype]:
            return runner.pool.bytes_per_slot()
        least = min(least, error)
    raise ValueError(f"logits differ from a plain forward pass by {least:.1e} of their size")


def _error(loaded: LoadedModel, runner: ModelRunner, tokens: list[int], want: Tensor) -> float:
    """How far the logits of a text are from those that are wanted, [num_tokens, vocab_size], relative to the largest."""
    table, neighbour = runner.blocks.allocate(4), runner.blocks.allocate(3)
    long = loaded.uses_long_rope(_PROBE_LEN)
    runner.forward([Segment(tokens[:_PROBE_CUT], 0, table, long_rope=long), Segment(tokens, 0, neighbour, long_rope=long)])
    rows = [tokens[_PROBE_CUT], tokens[0], *tokens[_PROBE_CUT + 1 :]]
    tree = (-1, 0, 0, 2, 3, 4)  # row 1 is a rejected sibling that nobody on the true path may see
    got = runner.forward([Segment(rows, _PROBE_CUT, table, tree, long_rope=long)]).logits[[0, 2, 3, 4, 5]]
    runner.blocks.free(table)
    runner.blocks.free(neighbour)
    by_row = (got - want[_PROBE_CUT:]).abs().amax(-1) / want.abs().max()
    return float(by_row.max() if loaded.dtype in _WIDE else by_row.median())  # a wrong mask spares hardly any row


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
