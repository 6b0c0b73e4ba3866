"""Uses of private interfaces of transformers for models with an encoder. Verified on 5.23."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutput

from outrider.loading import hf_modules
from outrider.model.context import SourcePass, ongoing_context


def encode(model: Any, token_ids: Tensor) -> Tensor:
    """Returns what the encoder leaves [num_tokens, width] of a source [num_tokens]."""
    states: Tensor = model.get_encoder()(input_ids=token_ids[None]).last_hidden_state[0]
    return states


def decode(model: Any, input_ids: Tensor, sources: SourcePass, **kwargs: Any) -> Any:
    """The output of a model whose decoder reads rows [1, num_rows]. Its self-attention keeps nothing here; keys and values
    of new sources go to `sources`, and attention to a source is recognised by the keys that stand in for them."""
    return model(
        decoder_input_ids=input_ids,
        encoder_outputs=BaseModelOutput(last_hidden_state=sources.encoded),
        past_key_values=SourceCache(sources),
        **kwargs,
    )


def stock_logits(model: Any, input_ids: Tensor, sources: Tensor) -> Tensor:
    """Logits [num_texts, num_tokens, vocab_size] of the stock model, for texts [num_texts, num_tokens] that have sources
    [num_texts, num_source_tokens]."""
    logits: Tensor = model(input_ids=sources, decoder_input_ids=input_ids, use_cache=False).logits
    return logits


def attend_in_encoder(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """Attention of an encoder, by transformers' own function."""
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def distance_biases(model: Any) -> dict[int, Tensor]:
    """Returns what each decoder layer adds to products of queries and keys by their distance, [num_heads, num_distances],
    the last one for all greater distances; empty for models that add nothing. A layer without a table uses that of the
    first."""
    tables: dict[int, Tensor] = {}
    for module in model.get_decoder().modules():
        if getattr(module, "has_relative_attention_bias", False):
            farthest = int(module.relative_attention_max_distance)
            by_position = module.compute_bias(1, farthest + 1, past_seen_tokens=farthest)  # [1, num_heads, 1, farthest + 1]
            tables[module.layer_idx] = by_position[0, :, 0].flip(-1).contiguous()
    num_layers = len(hf_modules.decoder_layers(model))
    return {layer: tables.get(layer, tables[min(tables)]) for layer in range(num_layers)} if tables else {}


def follow_row_positions(model: Any) -> None:
    """Let a decoder that has embeddings of positions look up those of our rows within our passes. Stock decoders count
    positions from what their cache holds."""
    module = getattr(model.get_decoder(), "embed_positions", None)
    if module is not None and not isinstance(module.forward, _RowPositions):
        module.forward = _RowPositions(module.forward)


class _RowPositions:
    def __init__(self, stock: Callable[..., Tensor]) -> None:
        self._stock = stock

    def __call__(self, *args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        context = ongoing_context()
        return self._stock(*args, position_ids=position_ids if context is None else context.batch.position_ids[0], **kwargs)


class SourceCache(EncoderDecoderCache):  # type: ignore[misc]
    """A cache that takes in keys and values of new sources, and returns what stands in for the keys of all."""

    def __init__(self, sources: SourcePass) -> None:
        self.self_attention_cache = _NoCache(layers=[])
        self.cross_attention_cache = _SourceCache(sources)
        self.is_updated = dict.fromkeys(range(sources.num_layers), not sources.has_new)


class _NoCache(Cache):  # type: ignore[misc]
    """A cache that keeps nothing: our attention writes the rows of texts."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _SourceCache(_NoCache):
    def __init__(self, sources: SourcePass) -> None:
        super().__init__(layers=[])
        self._sources = sources
        self.layers = [SimpleNamespace(keys=sources.stand_in, values=sources.stand_in)] * sources.num_layers

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Rows [1, num_kv_heads, num_rows, dim] of all new sources."""
        self._sources.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return self._sources.stand_in, self._sources.stand_in
