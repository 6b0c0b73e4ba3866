"""Backends that run a transformers model under our own attention: paged, gather, and row by row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.pool import LayerReach, Slots
from outrider.cache.state import SourceState
from outrider.kernels.attention import KNOWN_DTYPES, PassAttention, RowAttention
from outrider.kernels.decoder import PassRows
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.kernels.linear import packed_for
from outrider.kernels.row_by_row import RowByRow
from outrider.kernels.triton.devices import KNOWN_DTYPES as TRITON_DTYPES
from outrider.kernels.triton.devices import TRITON, runs_on
from outrider.loading import hf_modules
from outrider.loading.loaded_model import LoadedModel
from outrider.model import hf, hf_encoder
from outrider.model.batch import RaggedBatch, Segment
from outrider.model.context import (
    ForwardContext,
    SeenPart,
    additive,
    current_context,
    forward_context,
    ongoing_context,
    visible,
)
from outrider.model.hf import RunningMixers
from outrider.model.row_guard import RowGuard, noting_kinds
from outrider.model.row_kernels import RowKernels

# --- The interface of a backend.


@dataclass(frozen=True)
class PartialPass:
    """A pass through some of a model's layers."""

    layers: tuple[int, ...]  # which of them run, in ascending order; none are possible
    hidden: Tensor | None = None  # [num_rows, hidden_size] what the first of them reads; None begins with the embeddings


@dataclass(frozen=True)
class PassOutput:
    """Holds what a pass computed."""

    logits: Tensor  # [num_logits, vocab_size]
    aux_hidden_states: dict[int, Tensor]  # by index as transformers counts them: [num_rows, hidden_size]
    # [num_rows, hidden_size] as the last layer that ran left them, before the final norm; for a partial pass.
    hidden: Tensor | None = None


class AttentionBackend(ABC):
    """Computes a model's passes over the KV pool of a ForwardContext."""

    name: ClassVar[str]
    # Whether a row's bits are a function of its text, and not of the rows that are computed with it.
    invariant: bool = False

    @property
    def may_be_invariant(self) -> bool:
        """Tells whether it is worth a probe to find out if its bits hold; known once it has run."""
        return False

    @abstractmethod
    def install(self, model: Any) -> None:
        """Prepare `model`; raises ValueError where it cannot be driven this way."""

    def uninstall(self) -> None:
        """Undo what would keep another backend from driving the model."""
        return

    def scope(self) -> AbstractContextManager[object]:
        """Returns what modules of the model must run inside of."""
        return nullcontext()

    def weight_bytes(self, model: Any) -> int | None:
        """Bytes of weights that a pass reads, where the backend knows better than the model's parameters say."""
        return None

    def tokens_at_once(self) -> int | None:
        """Returns how many tokens, one behind another, have logits together or have none. None: all have some in every
        pass."""
        return None

    def instruction_set(self, model: Any) -> str | None:
        """Names the instruction set of our kernels, where they have a part in a pass; None where all operators are stock
        ones."""
        return packed_for(model)

    @abstractmethod
    def forward(
        self, loaded: LoadedModel, context: ForwardContext, aux_layers: Sequence[int], part: PartialPass | None = None
    ) -> PassOutput:
        """One pass, through all layers unless `part` says which; the final norm and the head come behind them."""

    @abstractmethod
    def embed(self, loaded: LoadedModel, token_ids: Tensor) -> Tensor:
        """Rows [n, hidden_size] of the embedding table for token ids [n]."""

    @abstractmethod
    def norm(self, loaded: LoadedModel, hidden: Tensor) -> Tensor:
        """The final norm of hidden states [n, hidden_size]."""

    @abstractmethod
    def head(self, loaded: LoadedModel, hidden: Tensor, head_panels: np.ndarray | None = None) -> Tensor:
        """Logits [n, vocab_size] of normed hidden states [n, hidden_size], scaled and capped as the model does it.
        `head_panels` are those of a `ForwardContext`."""


# --- Backends that live inside a transformers model: its own forward runs, and only attention is ours.


class HostedAttention(AttentionBackend):
    """Calls the model's forward, with whatever makes it attend over the KV pool."""

    @abstractmethod
    def forward_kwargs(self, context: ForwardContext) -> dict[str, Any]:
        """Arguments, beside token and position ids, that the model's forward needs in this pass."""

    def forward(
        self, loaded: LoadedModel, context: ForwardContext, aux_layers: Sequence[int], part: PartialPass | None = None
    ) -> PassOutput:
        batch = context.batch
        kwargs = self.forward_kwargs(context)
        if loaded.slices_logits:
            kwargs["logits_to_keep"] = batch.logits_rows
        if aux_layers:
            kwargs["output_hidden_states"] = list(aux_layers)
        chosen = nullcontext() if part is None else hf.some_layers(loaded.model, part.layers, part.hidden)
        with forward_context(context), self.scope(), chosen as tap:
            if context.sources is None:
                out = loaded.model(input_ids=batch.input_ids, position_ids=batch.position_ids, **kwargs)
            else:
                out = hf_encoder.decode(loaded.model, batch.input_ids, context.sources, **kwargs)
        logits = out.logits[0] if loaded.slices_logits else out.logits[0, batch.logits_rows]
        seen = out.hidden_states if context.sources is None else out.decoder_hidden_states
        aux = {layer: seen[layer][0] for layer in aux_layers}
        return PassOutput(logits, aux, None if tap is None else tap.hidden)

    def embed(self, loaded: LoadedModel, token_ids: Tensor) -> Tensor:
        rows: Tensor = loaded.model.get_input_embeddings()(token_ids)
        return rows

    def norm(self, loaded: LoadedModel, hidden: Tensor) -> Tensor:
        with self.scope():
            return hf.final_norm(loaded.model, hidden)

    def head(self, loaded: LoadedModel, hidden: Tensor, head_panels: np.ndarray | None = None) -> Tensor:
        with self.scope(), hf.only_head(loaded.model, hidden):
            tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=loaded.device)
            logits: Tensor = loaded.model(input_ids=tokens, use_cache=False).logits[0]
        return logits


# --- The fast backend for any decoder: our own attention function under an unmodified model.
#
# transformers hands each layer's query, key and value to a registered function. No mask function is registered with it,
# so the model passes no mask, and causality, windows and trees are decided here. Where our kernels run, in C on a CPU
# and in Triton on a GPU, all rows of a pass attend in one call, and the KV memory is read in place. Elsewhere each
# sequence's rows attend by a stock operator.
#
# Where our kernels also multiply with the weights, what is left is computed in ways that do not depend on the number of
# rows (`row_guard.py`). Then a row's bits are a function of its text.


#: Weights that may be read once for every row: a share of all, or so many bytes, which take some 0.1 ms. Where there are
#: more, a pass over the rows of drafts would cost too much.
_MOST_ROW_BY_ROW, _FEW_BYTES = 0.02, 2**20


@dataclass(frozen=True)
class Scores:
    """Says how products of a layer's queries and keys become weights."""

    scale: float  # their factor
    softcap: float | None = None  # they stay between -softcap and softcap by a scaled tanh; None for no such bound
    sinks: Tensor | None = None  # [num_heads] a learned logit a head that takes weight and gives nothing; None for none


#: Attention of all rows [num_heads, num_rows, head_dim] in a layer by stock operators: [num_rows, num_heads, value_dim].
#: The layer attends to what comes before each row, or to the sources.
StockAttention = Callable[[ForwardContext, int, Tensor, Scores, bool], Tensor]


class PagedAttention(HostedAttention):
    """Writes KV by slot and reads each sequence's context from the pool; nothing is padded."""

    name: ClassVar[str] = "paged"
    _library: KernelLibrary | None = None
    _guard: RowGuard | None = None
    _mixers: RunningMixers | None = None
    _rows: RowKernels | None = None
    _looks: bool = False
    _biases: Mapping[int, Tensor] = MappingProxyType({})
    #: Whether modules are kept from computing what depends on the number of rows.
    guards: ClassVar[bool] = True

    def install(self, model: Any) -> None:
        self.uninstall()
        self._looks = self.guards and packed_for(model) is not None
        self._library = kernel_library() if model.device.type == "cpu" and model.dtype in KNOWN_DTYPES else None
        both = hf_modules.has_encoder(model.config)
        function = partial(_attention_behind_encoder if both else _attention, stock=self.stock())
        name = f"outrider_{self.name}{'_behind_encoder' if both else ''}"
        if hf_modules.attends(model.config):
            hf_modules.set_attention(model, hf.register_attention(name, function))
        if both:
            hf_encoder.follow_row_positions(model)
            self._biases = hf_encoder.distance_biases(model)
        self._mixers = RunningMixers(model)
        self._rows = RowKernels(model) if runs_on(model.device) else None

    def uninstall(self) -> None:
        for part in (self._guard, self._mixers, self._rows):
            if part is not None:
                part.remove()
        self._guard, self._mixers, self._rows, self._looks = None, None, None, False

    def _row_attention(self, batch: RaggedBatch) -> RowAttention | None:
        """Returns what attends in a pass over these rows; None where a stock operator does."""
        if self._library is not None:
            return PassAttention(self._library, pass_rows(batch))
        if runs_on(batch.device):
            from outrider.kernels.triton.attention import TritonAttention  # which imports Triton

            return TritonAttention(pass_rows(batch), batch.device)
        return None

    @property
    def may_be_invariant(self) -> bool:
        return self._guard is not None

    def stock(self) -> StockAttention:
        """Returns what attends where our kernels do not."""
        return attend_together

    def instruction_set(self, model: Any) -> str | None:
        if self._library is not None:
            return self._library.instruction_set
        attends = runs_on(model.device) and model.dtype in TRITON_DTYPES
        return TRITON if attends else super().instruction_set(model)

    def forward_kwargs(self, context: ForwardContext) -> dict[str, Any]:
        return {"use_cache": False}

    def forward(
        self, loaded: LoadedModel, context: ForwardContext, aux_layers: Sequence[int], part: PartialPass | None = None
    ) -> PassOutput:
        context.biases = self._biases
        context.kernel = context.kernel or self._row_attention(context.batch)
        if self._library is not None and context.sources is not None:
            rows = source_rows(pass_rows(context.batch), context.sources.sources)
            context.source_kernel = PassAttention(self._library, rows, of_sources=True)
        if not self._looks:
            return super().forward(loaded, context, aux_layers, part)
        with noting_kinds(loaded.model) as found:  # the first pass, which is one of the probe
            out = super().forward(loaded, context, aux_layers, part)
        self._looks = False
        if found.weight_bytes <= max(_FEW_BYTES, _MOST_ROW_BY_ROW * loaded.model.get_memory_footprint()):
            self._guard = RowGuard(loaded.model, found.kinds)
        return out


def _attention(
    module: Any,
    query: Tensor,  # [1, num_heads, num_rows, head_dim], rotary embedding applied
    key: Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_rows, value_dim]
    attention_mask: Tensor | None = None,
    *,
    stock: StockAttention,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns what transformers calls in each layer."""
    context, layer = current_context(), module.layer_idx
    width, scale = value.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale, softcap, s_aux)
    if context.kernel is not None and width != query.shape[-1]:  # as latent attention has them
        query, key, value = _of_one_width(query, key, value)
    keys, values = context.pool.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), context.batch.slot_mapping)
    biases, kernel = context.biases.get(layer), context.kernel
    if kernel is None or not kernel.takes(query, keys, values) or not (biases is None or kernel.knows_biases):
        return stock(context, layer, query[0], scores, False)[None, ..., :width], None
    out = kernel.attend(
        query[0].transpose(0, 1),
        keys,
        values,
        window=context.reaches[layer].window or 0,
        chunk=context.reaches[layer].chunk or 0,
        scale=scores.scale,
        softcap=scores.softcap,
        sinks=scores.sinks,
        biases=biases,
    )
    return out[None, ..., :width], None


def _attention_behind_encoder(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    stock: StockAttention,
    scaling: float | None = None,
    **others: Any,
) -> Any:
    """Computes attention where there is an encoder. It attends outside of our passes; within them a decoder attends to its
    own rows, and with keys that only stand in for others to the sources."""
    context = ongoing_context()
    if context is None:
        return hf_encoder.attend_in_encoder(module, query, key, value, attention_mask, scaling=scaling, **others)
    if context.sources is None or key is not context.sources.stand_in:
        return _attention(module, query, key, value, attention_mask, stock=stock, scaling=scaling, **others)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, others.get("softcap"))
    memory, kernel = context.pool.memory(module.layer_idx, key[0], value[0]), context.source_kernel
    if kernel is None or not kernel.takes(query, *memory):
        return stock(context, module.layer_idx, query[0], scores, True)[None], None
    taken = query[0].transpose(0, 1)
    return kernel.attend(taken, *memory, window=0, chunk=0, scale=scores.scale, softcap=scores.softcap)[None], None


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """Zeros behind the narrower ones, since the kernels know one width. Zeros change no score, and no value before them."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors]


def attend_together(context: ForwardContext, layer: int, query: Tensor, scores: Scores, to_source: bool) -> Tensor:
    """The rows of each sequence over its context or its source, one sequence after another."""
    outputs = []
    for index, (first, end) in enumerate(context.batch.row_spans):
        part = context.source_part(index) if to_source else context.part(index, layer, query.dtype)
        outputs.append(attend(query[:, first:end], *context.pool.read(layer, part.slots), part, scores))
    return torch.cat(outputs)


def attend(
    query: Tensor,  # [num_heads, num_rows, head_dim]
    keys: Tensor,  # [num_slots, num_kv_heads, head_dim]
    values: Tensor,  # [num_slots, num_kv_heads, value_dim]
    part: SeenPart,
    scores: Scores,
) -> Tensor:
    """Attention of one sequence's rows over keys and values that it sees: [num_rows, num_heads, value_dim].

    Query heads that share a KV head are a dimension of their own, so that one mask serves them all. A single row needs no
    mask: its heads are rows to the operator, so that keys and values are read once.
    """
    num_heads, num_rows, _ = query.shape
    num_kv_heads = keys.shape[1]
    q = query.reshape(num_kv_heads, num_heads // num_kv_heads, num_rows, -1)
    mask = part.mask
    if mask is not None and mask.dim() == 3:  # of every head its own
        mask = mask.reshape(num_kv_heads, -1, *mask.shape[1:])
        mask = mask.transpose(1, 2) if num_rows == 1 else mask
    q = q.transpose(1, 2) if num_rows == 1 else q
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    if scores.softcap is None and scores.sinks is None:
        k, v = (each[:, None].expand(-1, q.shape[1], -1, -1) for each in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if part.causal else mask, is_causal=part.causal, scale=scores.scale
        )
    else:
        products = (q.flatten(1, 2) @ k.transpose(1, 2)).reshape(*q.shape[:3], -1)
        out = _weights(products, mask, scores, num_rows).flatten(1, 2) @ v
    return out.reshape(num_heads, num_rows, -1).transpose(0, 1)


def _weights(products: Tensor, mask: Tensor | None, scores: Scores, num_rows: int) -> Tensor:
    """Softmax over the context, in float32 at least, with the sink of each head as one more column that is dropped."""
    scaled = products * scores.scale
    if scores.softcap is not None:
        scaled = torch.tanh(scaled / scores.softcap) * scores.softcap
    if mask is not None:
        scaled = scaled + mask
    wide = scaled.to(torch.promote_types(scaled.dtype, torch.float32))
    if scores.sinks is None:
        return wide.softmax(-1).to(products.dtype)
    column = scores.sinks.to(wide.dtype).repeat_interleave(num_rows).reshape(*wide.shape[:-1], 1)
    return torch.cat([wide, column], -1).softmax(-1)[..., :-1].to(products.dtype)


# --- The portable backend: stock attention, our own Cache subclass and an explicit 4D mask.
#
# Slower, because every sequence's rows are compared with every sequence's context, but it asks nothing of the attention
# code. It is the oracle that the paged backend is tested against.


class GatherAttention(HostedAttention):
    """Hands stock attention the gathered contexts of all sequences and a block-diagonal mask."""

    name: ClassVar[str] = "gather"

    def install(self, model: Any) -> None:
        if hf_modules.has_encoder(model.config):
            raise ValueError("it has an encoder")
        self._layers = hf_modules.layer_specs(model.config)
        self._dtype = model.dtype
        hf_modules.set_attention(model, hf_modules.stock_attention(model))

    def forward_kwargs(self, context: ForwardContext) -> dict[str, Any]:
        masks = {reach: _block_diagonal(context, reach, self._dtype) for reach in {layer.reach for layer in self._layers}}
        by_type = {layer.type_name: masks[layer.reach] for layer in self._layers}
        mask: Any = next(iter(by_type.values())) if len(by_type) == 1 else by_type
        cache = hf.PoolCache(context.pool, context.batch.slot_mapping, _all_slots(context))
        return {"attention_mask": mask, "past_key_values": cache, "use_cache": True}


def _all_slots(context: ForwardContext) -> Slots:
    slots = context.batch.context_slots
    device = context.batch.device
    return torch.cat([torch.arange(s.start, s.stop, device=device) if isinstance(s, slice) else s for s in slots])


def _block_diagonal(context: ForwardContext, reach: LayerReach, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [1, 1, num_rows, sum of context lengths]."""
    batch = context.batch
    ends = list(accumulate(s.context_len for s in batch.segments))
    seen = torch.zeros(batch.num_rows, ends[-1], dtype=torch.bool, device=batch.device)
    for segment, (first, end), right in zip(batch.segments, batch.row_spans, ends, strict=True):
        seen[first:end, right - segment.context_len : right] = visible(segment, reach, device=batch.device)
    return additive(seen, dtype)[None, None]


# --- The batch-invariant backend for any decoder: a row's bits are a function of its text.
#
# Neither the batch, nor the chunk, nor the draft that a row comes in has a part in them. Products of rows with weights
# that are not packed are computed one row at a time (`kernels.row_by_row`). Attention in our kernels has this property
# anyway. Elsewhere every row attends alone, over exactly the keys it may see, in the order of their positions. That is
# slow; being right comes first.


class RowByRowAttention(PagedAttention):
    """Like the paged backend, one row at a time."""

    name: ClassVar[str] = "row_by_row"
    invariant = True
    guards: ClassVar[bool] = False  # the whole pass runs under `RowByRow`

    def stock(self) -> StockAttention:
        return attend_alone

    def scope(self) -> AbstractContextManager[object]:
        mode: AbstractContextManager[object] = RowByRow()  # type: ignore[no-untyped-call]
        return mode


def attend_alone(context: ForwardContext, layer: int, query: Tensor, scores: Scores, to_source: bool) -> Tensor:
    """Each row over the keys that it sees, one row after another."""
    outputs = []
    for index, (first, end) in enumerate(context.batch.row_spans):
        parts = [context.source_part(index)] * (end - first) if to_source else context.parts_by_row(index, layer)
        for row, part in enumerate(parts, first):
            keys, values = context.pool.read(layer, part.slots)  # a copy, so that its place in memory is nobody's business
            if to_source:
                keys, values = keys.clone(), values.clone()
            alone = query[:, row : row + 1].clone()
            outputs.append(attend(alone, keys, values, part, scores))
    return torch.cat(outputs)


# --- The rows of a pass in the form of the kernels.


def pass_rows(batch: RaggedBatch) -> PassRows:
    """The rows of a batch as the kernels read them."""
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
        parents=[parent for s in segments for parent in s.row_parents],
    )


def source_rows(rows: PassRows, sources: Sequence[SourceState]) -> PassRows:
    """Returns rows that attend to the source of each sequence, all of which they see: as if each was its last token."""
    lengths, tables = [len(each.token_ids) for each in sources], [each.block_table for each in sources]
    counts = [end - first for first, end in pairwise(rows.first)]
    return replace(
        rows,
        positions=[length - 1 for length, count in zip(lengths, counts, strict=True) for _ in range(count)],
        start=lengths,
        tables=[block for table in tables for block in table],
        table_at=list(accumulate(map(len, tables), initial=0))[:-1],
        ancestry_at=[-1] * len(sources),
        ancestry=np.empty(0, np.uint8),
    )


def _positions(segment: Segment) -> Sequence[int]:
    if segment.parents is None:
        return range(segment.start, segment.context_len)
    positions: list[int] = segment.positions.tolist()
    return positions
