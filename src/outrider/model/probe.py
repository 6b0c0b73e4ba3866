"""Probe: compares passes of a backend with the stock model, to decide whether it drives this model exactly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.cache.state import SequenceState
from outrider.loading import hf_modules
from outrider.loading.loaded_model import LoadedModel
from outrider.model import hf, hf_encoder
from outrider.model.attention import AttentionBackend
from outrider.model.batch import Segment
from outrider.model.memory import TextBytes
from outrider.model.runner import ModelRunner

#: Largest difference from a plain forward, relative to the largest logit, that passes as rounding.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
#: The same for rows of the stock model that have nothing to do with what was changed. They hardly ever differ by a bit.
_SAME = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-4, torch.bfloat16: 1e-3}
_WIDE = (torch.float64, torch.float32)

_PROBE_LEN, _PROBE_CUT, _PROBE_BLOCK = 12, 7, 4
#: Row 1 is a rejected sibling that nobody on the true path may see.
_PROBE_TREE = (-1, 0, 0, 2, 3, 4)
#: Its rows that are kept, and go on.
_PROBE_KEPT = (0, 2, 3)
#: Where a text is cut into passes of other numbers of rows.
_BITS_CUTS = (0, 1, 3, 6, 13, 22, 29)
#: The texts of a model whose router may choose otherwise after a rounding. One of them must agree.
_ROUTED_TEXTS = 5


@dataclass(frozen=True)
class Reference:
    """Holds what the stock model says to the texts of the probe."""

    logits: Tensor  # [num_texts, num_tokens, vocab_size]
    is_causal: bool  # whether what a token's row says is untouched by the tokens after it; found by changing those


def reference(loaded: LoadedModel) -> Reference:
    """One pass of the stock model over the texts of the probe, and over one of them with another second half beside them: a
    model is read from its file once."""
    if hf_modules.attends(loaded.model.config):
        hf_modules.set_attention(loaded.model, hf_modules.stock_attention(loaded.model))
    texts = _texts(loaded)
    changed = [*texts[0][:_PROBE_CUT], *((token + 1) % loaded.vocab_size for token in texts[0][_PROBE_CUT:])]
    with hf.noting_layers(loaded.model):
        *logits, others = _plain_logits(loaded, [*texts, changed])
    is_causal = _untouched(loaded, others, logits[0])
    if not is_causal:  # rows of one pass may be added up in another order, and those of two passes are not
        is_causal = _untouched(loaded, _plain_logits(loaded, [changed])[0], _plain_logits(loaded, texts[:1])[0])
    return Reference(torch.stack(logits), is_causal)


def _untouched(loaded: LoadedModel, changed: Tensor, logits: Tensor) -> bool:
    """Tells whether the rows before the second half are what they are with another one, [num_tokens, vocab_size] both.

    Attention may be so sharp that hardly any of them sees the second half, so one row that differs is enough. Where a
    router sends tokens to experts beside other tokens, some rows may be added up in another order, and most rows count.
    """
    by_row = (changed - logits).abs().amax(-1)[:_PROBE_CUT] / logits.abs().max()
    differing = by_row.median() if _is_routed(loaded) else by_row.max()
    return bool(differing <= _SAME[loaded.precision])


def _difference(got: Tensor, want: Tensor, logits: Tensor, dtype: torch.dtype) -> float:
    """Returns how far rows of logits lie apart, as a share of the largest of all logits."""
    by_row = (got - want).abs().amax(-1) / logits.abs().max()
    # In narrow types a router's near tie may send a single row to another expert; a wrong mask spares hardly any row.
    return float(by_row.max() if dtype in _WIDE else by_row.median())


def _texts(loaded: LoadedModel) -> list[list[int]]:
    """The texts of the probe.

    In narrow types a router's near tie may send a row to another expert than in the stock model, and the rows after it see
    that row. Such ties lie elsewhere in each text, and what is wrong is wrong in all of them.
    """
    starts = range(_ROUTED_TEXTS if loaded.precision not in _WIDE and _is_routed(loaded) else 1)
    return [[(7 * i + 3 + 17 * start) % loaded.vocab_size for i in range(_PROBE_LEN)] for start in starts]


def _sources(loaded: LoadedModel) -> tuple[list[int] | None, list[int] | None]:
    """The source of the texts of the probe and that of a text beside them, of other length; None for a decoder alone."""
    if loaded.encoder is None:
        return None, None
    tokens = [(3 * i * i + 7 * i + 1) % loaded.vocab_size for i in range(min(_PROBE_LEN, loaded.encoder.max_source_len))]
    return tokens, tokens[: len(tokens) // 2 + 1][::-1]


def _is_routed(loaded: LoadedModel) -> bool:
    return bool(hf_modules.expert_stacks(loaded.model))


def probe(loaded: LoadedModel, backend: AttentionBackend, want: Tensor) -> TextBytes:
    """Install `backend` and compare it with the `reference`, over ragged batches in two chunks.

    Returns:
        What texts take of memory.
    """
    backend.install(loaded.model)
    runner = ModelRunner(loaded, backend, BlockManager(4 * _PROBE_LEN // _PROBE_BLOCK + 2, _PROBE_BLOCK))
    least = float("inf")
    for tokens, logits in zip(_texts(loaded), want, strict=True):
        error, taken = _try_text(loaded, runner, tokens, logits)
        if error <= TOLERANCE[loaded.precision]:
            return taken
        least = min(least, error)
    raise ValueError(f"logits differ from a plain forward pass by {least:.1e} of their size")


def _try_text(loaded: LoadedModel, runner: ModelRunner, tokens: list[int], want: Tensor) -> tuple[float, TextBytes]:
    """Returns how far the logits of a text are from those that are wanted, [num_tokens, vocab_size], relative to the
    largest. The second result is what the text takes of memory."""
    state, neighbour = (runner.memory.room_for(_PROBE_LEN, source) for source in _sources(loaded))
    runner.forward([Segment.of(state, tokens[:_PROBE_CUT], 0), Segment.of(neighbour, tokens, 0)])
    _check_states(loaded, state)
    state.commit(0, range(_PROBE_CUT))
    reserved = state.reserve(len(_PROBE_TREE))
    assert reserved, "the probe's memory has room for its texts"
    rows = [tokens[_PROBE_CUT], tokens[0], *tokens[_PROBE_CUT + 1 :]]
    got = runner.forward([Segment.of(state, rows, _PROBE_CUT, _PROBE_TREE)]).logits[[0, 2, 3, 4, 5]]
    if loaded.running_layers:  # what stands of the tree is in the states afterwards, and nothing else
        state.commit(_PROBE_CUT, _PROBE_KEPT)
        rows = tokens[state.num_computed :]
        got[-len(rows) :] = runner.forward([Segment.of(state, rows, state.num_computed)]).logits
    taken = TextBytes.of(state, runner.pool.bytes_per_slot())
    state.free()
    neighbour.free()
    return _difference(got, want[_PROBE_CUT:], want, loaded.precision), taken


def _check_states(loaded: LoadedModel, state: SequenceState) -> None:
    """Raise ValueError unless a pass has left a state for every layer that keeps one."""
    known = {layer for layer, _ in state.running.records}
    names = sorted({name for layer, name in loaded.running_layers.items() if layer not in known})
    if names:
        raise ValueError(f"it has layers with a running state ({', '.join(names)}) that is kept in a way unknown here")


def probe_bits(loaded: LoadedModel, backend: AttentionBackend) -> None:
    """Compute a text in one pass, and in passes of other numbers of rows, beside a neighbour and as a branch of a tree;
    raises ValueError unless all bits agree."""
    cuts = [cut for cut in _BITS_CUTS if cut <= loaded.max_model_len]
    tokens = [(11 * i * i + 5 * i + 2) % loaded.vocab_size for i in range(cuts[-1])]
    runner = ModelRunner(loaded, backend, BlockManager(8 * len(tokens) // _PROBE_BLOCK + 3, _PROBE_BLOCK))
    whole_text, in_parts, neighbour = (runner.memory.room_for(size) for size in (len(tokens), 2 * len(tokens), len(tokens)))
    whole = runner.forward([Segment.of(whole_text, tokens, 0)]).logits
    for turn, (start, end) in enumerate(pairwise(cuts)):
        beside = [Segment.of(neighbour, tokens[: 3 * turn], 0)] if turn % 2 else []
        rows, parents = tokens[start:end], None
        if end == cuts[-1]:  # with a sibling of each row that nobody sees
            rows = [token for right in rows for token in (right, (right + 1) % loaded.vocab_size)]
            parents = tuple(-1 if i < 2 else 2 * (i // 2 - 1) for i in range(len(rows)))
        logits = runner.forward([*beside, Segment.of(in_parts, rows, start, parents)]).logits[3 * turn * len(beside) :]
        if not torch.equal(whole[start:end], logits if parents is None else logits[::2]):
            raise ValueError("its bits depend on the batch")


@torch.inference_mode()
def _plain_logits(loaded: LoadedModel, texts: list[list[int]]) -> Tensor:
    """[num_texts, num_tokens, vocab_size] for texts of one length."""
    tokens, source = torch.tensor(texts, device=loaded.device), _sources(loaded)[0]
    if source is None:
        logits: Tensor = loaded.model(tokens, use_cache=False).logits
    else:
        sources = torch.tensor([source] * len(texts), device=loaded.device)
        logits = hf_encoder.stock_logits(loaded.model, tokens, sources)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
