"""The fastest backend on CPUs: a whole pass of a decoder in one call of our own kernels.

The kernels run what is described in `model/fused/families.py`. Whether the model at hand is what its description says is
found as for every backend: by comparing a pass with the stock model's. Weights move over to the kernels: the modules keep
shapes and nothing else, filled with "not a number", so that whoever still multiplied with them would be noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.cache.pool import KVPool
from outrider.kernels.decoder import DecoderKernel, DecoderLayer, PassRows
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.model import hf, hf_encoder
from outrider.model.backends.base import AttentionBackend, PartialPass, PassOutput
from outrider.model.backends.pass_rows import pass_rows, source_rows
from outrider.model.batch import RaggedBatch
from outrider.model.context import ForwardContext
from outrider.model.fused.family import Family
from outrider.model.fused.layer_builder import (
    decoder_layer,
    decoder_shape,
    described,
    keys_and_values_of_source,
    norm_of,
)
from outrider.model.fused.matrices import Matrices
from outrider.model.fused.rotary import RotaryTables
from outrider.model.fused.weight_slice import stored, whole
from outrider.model.loading.loaded_model import LoadedModel
from outrider.model.running.fused_pass import FusedPass

_FIRST_POSITIONS = 4096


class FusedDecoder(AttentionBackend):
    """Hands every pass to the compiled kernels."""

    name: ClassVar[str] = "fused"
    invariant = True  # whatever the model: every sum of the kernels has one order

    def __init__(self) -> None:
        self._matrices: Matrices | None = None
        self._memory: KVPool | None = None
        self._positions = 0

    def install(self, model: Any) -> None:
        library = kernel_library()
        if library is None:
            raise ValueError("the kernels are not compiled, or OUTRIDER_KERNELS is off")
        self.uninstall()
        config, family = described(model)
        self._family = family
        self._memory, self._positions = None, 0
        self._rotary = RotaryTables(model, family)
        self._matrices = Matrices(library)
        self._kernel = _kernel(model, config, family, self._rotary, self._matrices, library)

    def uninstall(self) -> None:
        if self._matrices is not None:
            self._matrices.give_back()
            self._matrices = None

    def weight_bytes(self, model: Any) -> int | None:
        return self._kernel.nbytes

    def instruction_set(self, model: Any) -> str | None:
        return self._kernel.kernels

    def forward(
        self, loaded: LoadedModel, context: ForwardContext, aux_layers: Sequence[int], part: PartialPass | None = None
    ) -> PassOutput:
        self._check_regimes(context.batch)
        self._use_memory(context, loaded)
        self._use_positions(max(s.context_len for s in context.batch.segments), loaded)
        mixed = self._open_states(context, range(len(context.reaches)) if part is None else part.layers)
        rows, read = self._rows(context, loaded), [] if mixed is None else mixed.rows
        if part is None:
            out = PassOutput(*self._kernel.forward(rows, aux_layers, read))
        else:
            out = PassOutput(*self._kernel.forward_part(rows, aux_layers, part.layers, part.hidden, read))
        if mixed is not None:
            mixed.leave()
        return out

    def _rows(self, context: ForwardContext, loaded: LoadedModel) -> PassRows:
        """The rows of a pass, with their sources where there are some; those that are new are written."""
        rows, sources = pass_rows(context.batch), context.sources
        if sources is None:
            return rows
        for layer, module in enumerate(hf.decoder_layers(loaded.model) if sources.has_new else ()):
            sources.write(layer, *self._of_sources(module, sources.encoded_apart))
        return replace(rows, sources=source_rows(rows, sources.sources))

    def _of_sources(self, layer: Any, encoded: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [num_rows, num_kv_heads, head_dim] of sources. Each is computed alone, so that its bits are its
        own."""
        shape = (-1, self._kernel.shape.num_kv_heads, self._kernel.shape.head_dim)
        found = [keys_and_values_of_source(layer, self._family, each) for each in encoded]
        keys, values = (torch.cat(each).view(shape) for each in zip(*found, strict=True))
        return keys, values

    def _open_states(self, context: ForwardContext, layers: Sequence[int]) -> FusedPass | None:
        """The running states that a pass through some layers reads and leaves; None for a model without them."""
        if context.running is None:
            return None
        return FusedPass(context.running, context.batch, self._kernel.mixers, layers, self._kernel.real)

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
        mixers = enumerate(self._kernel.mixers)
        self._kernel.use_memory([context.pool.memory(i, row, row) if mixer is None else None for i, mixer in mixers])
        self._memory = context.pool

    def _use_positions(self, needed: int, loaded: LoadedModel) -> None:
        """Rotary tables grow by doubling, since most texts are far shorter than what a model allows; never past that: a
        module with "dynamic" factors changes them as soon as it is asked for a position beyond."""
        if needed > self._positions:
            self._positions = max(needed, min(max(_FIRST_POSITIONS, 2 * needed), loaded.max_model_len))
            tables = self._rotary.build(self._positions)
            if tables:
                self._kernel.use_rotary(tables)


def _kernel(
    model: Any, config: Any, family: Family, rotary: RotaryTables, matrices: Matrices, library: KernelLibrary
) -> DecoderKernel:
    """Pack the model layer by layer, freeing what is packed: both forms of all weights might not fit in memory."""
    stack, embeddings, lm_head = hf.decoder_stack(model), model.get_input_embeddings(), model.get_output_embeddings()
    shared = getattr(embeddings, "quantised_weight", None)
    tied = embeddings.weight is lm_head.weight if shared is None else shared.data is stored(lm_head).data
    biases = hf_encoder.distance_biases(model) if hf.has_encoder(model.config) else {}
    head = matrices.take(whole(lm_head))
    matrices.empty()
    if tied:  # the kernels read embeddings from the head
        matrices.tie(embeddings, lm_head)
    embedding = None if tied else embeddings.weight.data if shared is None else matrices.take(whole(embeddings))
    matrices.empty()
    layers: list[DecoderLayer] = []
    for layer, spec in zip(hf.decoder_layers(model), hf.layer_specs(model.config), strict=True):
        number, added = rotary.number(spec.type_name), biases.get(len(layers))
        layers.append(decoder_layer(layer, spec.reach, number, config, family, matrices, added))
        matrices.empty()
    table = None if family.positions is None else getattr(stack, family.positions).weight.data[family.first_position :]
    return DecoderKernel(
        library,
        decoder_shape(config, family, embeddings, layers),
        layers,
        embedding=embedding,
        positions=table,
        final_norm=norm_of(getattr(stack, family.final_norm), family),
        head=head,
        kv_dtype=model.dtype,
    )
