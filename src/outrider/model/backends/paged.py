"""The fast backend for any decoder: our own attention function under an unmodified model.

transformers hands each layer's query, key and value to a registered function. No mask function is registered with it, so
the model passes no mask, and causality, windows and trees are decided here. Where our kernels run, in C on a CPU and in
Triton on a GPU, all rows of a pass attend in one call, and the KV memory is read in place. Elsewhere each sequence's rows
attend by a stock operator.

Where our kernels also multiply with the weights, what is left is computed in ways that do not depend on the number of rows
(`row_guard.py`). Then a row's bits are a function of its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.attention import KNOWN_DTYPES, PassAttention, RowAttention
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.kernels.linear import packed_for
from outrider.kernels.triton.devices import KNOWN_DTYPES as TRITON_DTYPES
from outrider.kernels.triton.devices import TRITON, runs_on
from outrider.model import hf, hf_encoder
from outrider.model.backends.base import PartialPass, PassOutput
from outrider.model.backends.hosted import HostedAttention
from outrider.model.backends.pass_rows import pass_rows, source_rows
from outrider.model.backends.row_guard import RowGuard, noting_kinds
from outrider.model.batch import RaggedBatch
from outrider.model.context import ForwardContext, SeenPart, current_context, ongoing_context
from outrider.model.loading.loaded_model import LoadedModel
from outrider.model.running.mixers import RunningMixers

#: Weights that may be read once for every row: a share of all, or so many bytes, which take some 0.1 ms. Where there are
#: more, a pass over the rows of drafts would cost too much.
_MOST_ROW_BY_ROW, _FEW_BYTES = 0.02, 2**20


@dataclass(frozen=True)
class Scores:
    """How products of a layer's queries and keys become weights.

    Attributes:
        scale: Their factor.
        softcap: They stay between -softcap and softcap by a scaled tanh; None for no such bound.
        sinks: [num_heads] a learned logit a head that takes weight and gives nothing; None for none.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


#: Attention of all rows [num_heads, num_rows, head_dim] in a layer by stock operators: [num_rows, num_heads, value_dim].
#: The layer attends to what comes before each row, or to the sources.
StockAttention = Callable[[ForwardContext, int, Tensor, Scores, bool], Tensor]


class PagedAttention(HostedAttention):
    """Writes KV by slot and reads each sequence's context from the pool; nothing is padded."""

    name: ClassVar[str] = "paged"
    _library: KernelLibrary | None = None
    _guard: RowGuard | None = None
    _mixers: RunningMixers | None = None
    _looks: bool = False
    _biases: Mapping[int, Tensor] = MappingProxyType({})
    #: Whether modules are kept from computing what depends on the number of rows.
    guards: ClassVar[bool] = True

    def install(self, model: Any) -> None:
        self.uninstall()
        self._looks = self.guards and packed_for(model) is not None
        self._library = kernel_library() if model.device.type == "cpu" and model.dtype in KNOWN_DTYPES else None
        both = hf.has_encoder(model.config)
        function = partial(_attention_behind_encoder if both else _attention, stock=self.stock())
        name = f"outrider_{self.name}{'_behind_encoder' if both else ''}"
        if hf.attends(model.config):
            hf.set_attention(model, hf.register_attention(name, function))
        if both:
            hf_encoder.follow_row_positions(model)
            self._biases = hf_encoder.distance_biases(model)
        self._mixers = RunningMixers(model)

    def uninstall(self) -> None:
        if self._guard is not None:
            self._guard.remove()
        if self._mixers is not None:
            self._mixers.remove()
        self._guard, self._mixers, self._looks = None, None, False

    def _row_attention(self, batch: RaggedBatch) -> RowAttention | None:
        """What attends in a pass over these rows; None where a stock operator does."""
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
        """What attends where our kernels do not."""
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
        context.kernel = self._row_attention(context.batch)
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
    """What transformers calls in each layer."""
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
    """The same where there is an encoder. It attends outside of our passes; within them a decoder attends to its own rows,
    and with keys that only stand in for others to the sources."""
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
