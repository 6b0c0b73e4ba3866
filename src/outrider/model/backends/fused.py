"""The fastest backend on CPUs: a whole pass of a Llama-like decoder in one call of our own kernels.

The families below are known to be this decoder; whether the model at hand is, is found as for every backend: by comparing a
pass with the stock model's. Weights move over to the kernels: the modules keep shapes and nothing else, filled with "not a
number", so that whoever still multiplied with them would be noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from outrider.cache.pool import KVPool
from outrider.kernels.decoder import DecoderKernel, DecoderLayer, DecoderShape, PassRows
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.kernels.packed import PackedWeights
from outrider.kernels.weights import StoredWeight, empty_weight, restore_weight, stored_weight
from outrider.model import hf
from outrider.model.backends.base import AttentionBackend, PartialPass, PassOutput
from outrider.model.batch import RaggedBatch, Segment
from outrider.model.context import ForwardContext, LayerReach
from outrider.model.loader import LoadedModel

#: Model types whose forward pass is the kernels' own.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3"})
_GATES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_FIRST_POSITIONS = 4096


class FusedDecoder(AttentionBackend):
    """Hands every pass to the compiled kernels."""

    name: ClassVar[str] = "fused"

    def __init__(self) -> None:
        self._matrices: _Matrices | None = None
        self._memory: KVPool | None = None
        self._positions = 0

    def install(self, model: Any) -> None:
        library = kernel_library()
        if library is None:
            raise ValueError("the kernels are not compiled, or OUTRIDER_KERNELS is off")
        self.uninstall()
        _check(model)
        self._memory, self._positions = None, 0
        self._rotary = _RotaryTables(model)
        self._matrices = _Matrices(library)
        self._kernel = _kernel(model, self._matrices, library)

    def uninstall(self) -> None:
        if self._matrices is not None:
            self._matrices.give_back()
            self._matrices = None

    def weight_bytes(self, model: Any) -> int | None:
        return self._kernel.nbytes

    def instruction_set(self, model: Any) -> str | None:
        return self._kernel.head.kernels

    def forward(
        self, loaded: LoadedModel, context: ForwardContext, aux_layers: Sequence[int], part: PartialPass | None = None
    ) -> PassOutput:
        self._check_regimes(context.batch)
        self._use_memory(context, loaded)
        self._use_positions(max(s.context_len for s in context.batch.segments), loaded)
        if part is None:
            return PassOutput(*self._kernel.forward(_rows(context.batch), aux_layers))
        return PassOutput(*self._kernel.forward_part(_rows(context.batch), aux_layers, part.layers, part.hidden))

    def embed(self, loaded: LoadedModel, token_ids: Tensor) -> Tensor:
        return self._kernel.embed(token_ids)

    def norm(self, loaded: LoadedModel, hidden: Tensor) -> Tensor:
        return self._kernel.norm(hidden)

    def head(self, loaded: LoadedModel, hidden: Tensor) -> Tensor:
        return self._kernel.logits(hidden)

    def _check_regimes(self, batch: RaggedBatch) -> None:
        """Raise ValueError where a row has no rotary factors in the set that it asks for."""
        limit = self._rotary.long_after
        if limit is not None and any(s.text_len > limit and not s.long_rope for s in batch.segments):
            raise ValueError(f"rows behind {limit} tokens ask for the rotary factors of shorter texts")

    def _use_memory(self, context: ForwardContext, loaded: LoadedModel) -> None:
        if context.pool is self._memory:
            return
        shape = self._kernel.shape
        row = torch.empty(0, shape.num_kv_heads, shape.head_dim, dtype=loaded.dtype)
        self._kernel.use_memory([context.pool.memory(i, row, row) for i in range(len(context.reaches))])
        self._memory = context.pool

    def _use_positions(self, needed: int, loaded: LoadedModel) -> None:
        """Rotary tables grow by doubling, since most texts are far shorter than what a model allows; never past that: a
        module with "dynamic" factors changes them as soon as it is asked for a position beyond."""
        if needed > self._positions:
            self._positions = max(needed, min(max(_FIRST_POSITIONS, 2 * needed), loaded.max_model_len))
            self._kernel.use_rotary(self._rotary.build(self._positions))


def _check(model: Any) -> None:
    """Raise ValueError where the kernels cannot be this model."""
    config = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(f"the kernels do not know {config.model_type}")
    if model.device.type != "cpu" or model.dtype not in _DTYPES:
        raise ValueError(f"the kernels do not compute {model.dtype} on {model.device.type}")
    if config.hidden_act not in _GATES:
        raise ValueError(f"the kernels do not know the activation {config.hidden_act}")


class _RotaryTables:
    """Cosines and sines by position, from the model's own module."""

    def __init__(self, model: Any) -> None:
        self._module = model.model.rotary_emb
        self.long_after = hf.long_rope_after(model.config)
        self._dtype = torch.promote_types(model.dtype, torch.float32)

    @torch.inference_mode()
    def build(self, num_positions: int) -> list[tuple[Tensor, Tensor]]:
        """One pair of tables [num_positions, rotary_dim], or two where long texts have factors of their own."""
        if self.long_after is None:
            return [self._table(num_positions)]
        # The module takes the long factors for everybody as soon as it sees one position beyond the short ones.
        return [self._table(self.long_after), self._table(max(num_positions, self.long_after + 1))]

    def _table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        cosines, sines = self._module(torch.empty(1, dtype=self._dtype), torch.arange(num_positions)[None])
        return cosines[0], sines[0]


@dataclass(frozen=True)
class _Part:
    """Output features `begin` to `end` of a linear layer."""

    module: nn.Linear
    begin: int
    end: int


def _whole(module: nn.Linear) -> _Part:
    return _Part(module, 0, module.out_features)


class _Matrices:
    """The weight matrices of a decoder, taken out of its modules and, if need be, given back."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._taken: list[tuple[list[_Part], PackedWeights]] = []
        self._num_emptied = 0
        self._tied: tuple[nn.Embedding, nn.Linear] | None = None

    def tie(self, embeddings: nn.Embedding, head: nn.Linear) -> None:
        """Embeddings share the head's weight, gone or given back."""
        embeddings.weight = head.weight
        self._tied = embeddings, head

    def take(self, *parts: _Part) -> PackedWeights:
        """Pack parts of linear layers as one matrix, stacked."""
        stored = [(stored_weight(p.module), p) for p in parts]
        pieces = [
            StoredWeight(w.data[p.begin : p.end], None if w.scale is None else w.scale[p.begin : p.end]) for w, p in stored
        ]
        biases = [p.module.bias.detach()[p.begin : p.end] for p in parts if p.module.bias is not None]
        packed = PackedWeights(self._library, pieces, torch.cat(biases) if biases else None)
        self._taken.append((list(parts), packed))
        return packed

    def empty(self) -> None:
        """Free the weights taken since the last time, where they came from."""
        for module in {part.module for parts, _ in self._taken[self._num_emptied :] for part in parts}:
            empty_weight(module)
        self._num_emptied = len(self._taken)

    def give_back(self) -> None:
        """Every weight to its module."""
        found: dict[nn.Linear, list[StoredWeight]] = {}
        for parts, packed in self._taken:
            data, scale = packed.unpacked()
            end = 0
            for part in parts:
                start, end = end, end + part.end - part.begin
                piece = StoredWeight(data[start:end], None if scale is None else scale[start:end])
                found.setdefault(part.module, []).append(piece)
        for module, pieces in found.items():  # parts of one layer were taken in order
            scales = [p.scale for p in pieces if p.scale is not None]
            restore_weight(module, StoredWeight(torch.cat([p.data for p in pieces]), torch.cat(scales) if scales else None))
        self._taken.clear()
        if self._tied:
            self.tie(*self._tied)


def _kernel(model: Any, matrices: _Matrices, library: KernelLibrary) -> DecoderKernel:
    """Pack the model layer by layer, freeing what is packed: both forms of all weights might not fit in memory."""
    config, first = model.config, model.model.layers[0].self_attn
    embeddings = model.model.embed_tokens
    tied = embeddings.weight is model.lm_head.weight
    head = matrices.take(_whole(model.lm_head))
    matrices.empty()
    if tied:  # the kernels read embeddings from the head
        matrices.tie(embeddings, model.lm_head)
    layers = []
    for layer, reach in zip(model.model.layers, hf.layer_reaches(config), strict=True):
        layers.append(_layer(layer, reach, config, matrices))
        matrices.empty()
    shape = DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=first.head_dim,
        gate=_GATES[config.hidden_act],
        epsilon=config.rms_norm_eps,
        scale=first.scaling,
    )
    embedding = None if tied else embeddings.weight.data
    return DecoderKernel(library, shape, layers, embedding, model.model.norm.weight.data, head, model.dtype)


def _layer(layer: Any, reach: LayerReach, config: Any, matrices: _Matrices) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    if hasattr(attention, "qkv_proj"):
        qkv, size = [_whole(attention.qkv_proj)], config.intermediate_size
        gate, up = _Part(mlp.gate_up_proj, 0, size), _Part(mlp.gate_up_proj, size, 2 * size)
    else:
        qkv = [_whole(m) for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
        gate, up = _whole(mlp.gate_proj), _whole(mlp.up_proj)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return DecoderLayer(
        attention_norm=layer.input_layernorm.weight.data,
        mlp_norm=layer.post_attention_layernorm.weight.data,
        query_norm=None if norms[0] is None else norms[0].weight.data,
        key_norm=None if norms[1] is None else norms[1].weight.data,
        qkv=matrices.take(*qkv),
        out=matrices.take(_whole(attention.o_proj)),
        gate=matrices.take(gate),
        up=matrices.take(up),
        down=matrices.take(_whole(mlp.down_proj)),
        window=reach.window or 0,
        chunk=reach.chunk or 0,
    )


def _rows(batch: RaggedBatch) -> PassRows:
    segments, size = batch.segments, batch.block_size
    trees = [np.empty(0, bool) if s.parents is None else s.ancestry.reshape(-1) for s in segments]
    table_at = list(accumulate((len(s.block_table) for s in segments), initial=0))[:-1]
    tree_at = list(accumulate((len(tree) for tree in trees), initial=0))[:-1]
    spans = list(zip(batch.row_spans, segments, strict=True))
    return PassRows(
        tokens=[token for s in segments for token in s.token_ids],
        positions=[p for s in segments for p in _positions(s)],
        slots=[s.block_table[p // size] * size + p % size for s in segments for p in range(s.start, s.context_len)],
        long_rows=[int(s.long_rope) for s in segments for _ in s.token_ids],
        first=[0, *(end for _, end in batch.row_spans)],
        start=[s.start for s in segments],
        tables=[block for s in segments for block in s.block_table],
        table_at=table_at,
        ancestry_at=[-1 if s.parents is None else at for s, at in zip(segments, tree_at, strict=True)],
        logit_rows=[first + row for (first, _), s in spans for row in range(s.logits_from, s.logits_end)],
        ancestry=np.concatenate(trees).view(np.uint8),
        block_size=size,
    )


def _positions(segment: Segment) -> Sequence[int]:
    if segment.parents is None:
        return range(segment.start, segment.context_len)
    positions: list[int] = segment.positions.tolist()
    return positions
