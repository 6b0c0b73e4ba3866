"""The fastest backend on CPUs: a whole pass of a decoder in one call of our own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import KVPool
from outrider.kernels.decoder import DecoderKernel, DecoderLayer, PassRows
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.kernels.mixers import Mixer, MixerRows
from outrider.loading import hf_modules
from outrider.loading.loaded_model import LoadedModel
from outrider.model import hf_encoder
from outrider.model.attention import AttentionBackend, PartialPass, PassOutput, pass_rows, source_rows
from outrider.model.batch import RaggedBatch
from outrider.model.context import ForwardContext
from outrider.model.families import Family
from outrider.model.layer_builder import decoder_layer, decoder_shape, described, keys_and_values_of_source, norm_of
from outrider.model.matrices import Matrices, stored, whole
from outrider.model.running import CellRows, Convolution, Recurrence, RunningPass, StateFunction

# --- The backend.
#
# The kernels run what is described in `model/families.py`. Whether the model at hand is what its description says is
# found as for every backend: by comparing a pass with the stock model's. Weights move over to the kernels: the modules
# keep shapes and nothing else, filled with "not a number", so that whoever still multiplied with them would be noticed.


_FIRST_POSITIONS = 4096


class FusedDecoder(AttentionBackend):
    """Hands every pass to the compiled kernels."""

    name: ClassVar[str] = "fused"
    kernel: DecoderKernel  # since `install`
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
        self.kernel = _kernel(model, config, family, self._rotary, self._matrices, library)

    def uninstall(self) -> None:
        if self._matrices is not None:
            self._matrices.give_back()
            self._matrices = None

    def weight_bytes(self, model: Any) -> int | None:
        return self.kernel.nbytes

    def instruction_set(self, model: Any) -> str | None:
        return self.kernel.kernels

    def tokens_at_once(self) -> int | None:
        return self.kernel.tokens_at_once

    def forward(
        self, loaded: LoadedModel, context: ForwardContext, aux_layers: Sequence[int], part: PartialPass | None = None
    ) -> PassOutput:
        self._check_regimes(context.batch)
        self._use_memory(context, loaded)
        self._use_positions(max(s.context_len for s in context.batch.segments), loaded)
        mixed = self._open_states(context, range(len(context.reaches)) if part is None else part.layers)
        rows, read = self._rows(context, loaded), [] if mixed is None else mixed.rows
        if part is None:
            out = PassOutput(*self.kernel.forward(rows, aux_layers, read, context.head_panels))
        else:
            out = PassOutput(*self.kernel.forward_part(rows, aux_layers, part.layers, part.hidden, read))
        if mixed is not None:
            mixed.leave()
        return out

    def _rows(self, context: ForwardContext, loaded: LoadedModel) -> PassRows:
        """The rows of a pass, with their sources where there are some; those that are new are written."""
        rows, sources = pass_rows(context.batch), context.sources
        if sources is None:
            return rows
        for layer, module in enumerate(hf_modules.decoder_layers(loaded.model) if sources.has_new else ()):
            sources.write(layer, *self._of_sources(module, sources.encoded_apart))
        return replace(rows, sources=source_rows(rows, sources.sources))

    def _of_sources(self, layer: Any, encoded: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [num_rows, num_kv_heads, head_dim] of sources. Each is computed alone, so that its bits are its
        own."""
        shape = (-1, self.kernel.shape.num_kv_heads, self.kernel.shape.head_dim)
        found = [keys_and_values_of_source(layer, self._family, each) for each in encoded]
        keys, values = (torch.cat(each).view(shape) for each in zip(*found, strict=True))
        return keys, values

    def _open_states(self, context: ForwardContext, layers: Sequence[int]) -> FusedPass | None:
        """The running states that a pass through some layers reads and leaves; None for a model without them."""
        if context.running is None:
            return None
        return FusedPass(context.running, context.batch, self.kernel.mixers, layers, self.kernel.real)

    def embed(self, loaded: LoadedModel, token_ids: Tensor) -> Tensor:
        return self.kernel.embed(token_ids)

    def norm(self, loaded: LoadedModel, hidden: Tensor) -> Tensor:
        return self.kernel.norm(hidden)

    def head(self, loaded: LoadedModel, hidden: Tensor, head_panels: np.ndarray | None = None) -> Tensor:
        return self.kernel.logits(hidden, head_panels)

    def _check_regimes(self, batch: RaggedBatch) -> None:
        """Raise ValueError where a row has no rotary factors in the set that it asks for."""
        limit = self._rotary.long_after
        if limit is not None and any(s.text_len > limit and not s.long_rope for s in batch.segments):
            raise ValueError(f"rows behind {limit} tokens ask for the rotary factors of shorter texts")

    def _use_memory(self, context: ForwardContext, loaded: LoadedModel) -> None:
        if context.pool is self._memory:
            return
        shape = self.kernel.shape
        row = torch.empty(0, shape.num_kv_heads, shape.head_dim, dtype=loaded.dtype)
        mixers = enumerate(self.kernel.mixers)
        self.kernel.use_memory([context.pool.memory(i, row, row) if mixer is None else None for i, mixer in mixers])
        self._memory = context.pool

    def _use_positions(self, needed: int, loaded: LoadedModel) -> None:
        """Rotary tables grow by doubling, since most texts are far shorter than what a model allows; never past that: a
        module with "dynamic" factors changes them as soon as it is asked for a position beyond."""
        if needed > self._positions:
            self._positions = max(needed, min(max(_FIRST_POSITIONS, 2 * needed), loaded.max_model_len))
            tables = self._rotary.build(self._positions)
            if tables:
                self.kernel.use_rotary(tables)


def _kernel(
    model: Any, config: Any, family: Family, rotary: RotaryTables, matrices: Matrices, library: KernelLibrary
) -> DecoderKernel:
    """Pack the model layer by layer, freeing what is packed: both forms of all weights might not fit in memory."""
    stack, embeddings, lm_head = (
        hf_modules.decoder_stack(model),
        model.get_input_embeddings(),
        model.get_output_embeddings(),
    )
    shared = getattr(embeddings, "quantised_weight", None)
    tied = embeddings.weight is lm_head.weight if shared is None else shared.data is stored(lm_head).data
    biases = hf_encoder.distance_biases(model) if hf_modules.has_encoder(model.config) else {}
    head = matrices.take(whole(lm_head))
    matrices.empty()
    if tied:  # the kernels read embeddings from the head
        matrices.tie(embeddings, lm_head)
    own = head if tied else embeddings.weight.data if shared is None else matrices.take(whole(embeddings))
    matrices.empty()
    layers: list[DecoderLayer] = []
    for layer, spec in zip(hf_modules.decoder_layers(model), hf_modules.layer_specs(model.config), strict=True):
        number, added = rotary.number(spec.type_name), biases.get(len(layers))
        layers.append(decoder_layer(layer, spec.reach, number, config, family, matrices, added))
        matrices.empty()
    table = None if family.positions is None else getattr(stack, family.positions).weight.data[family.first_position :]
    return DecoderKernel(
        library,
        decoder_shape(config, family, embeddings, layers),
        layers,
        embedding=own,
        positions=table,
        final_norm=norm_of(getattr(stack, family.final_norm), family),
        head=head,
        kv_dtype=model.dtype,
    )


# --- Rotary tables for the kernels.


class RotaryTables:
    """Cosines and sines by position, from the model's own module. Layers of different types may have different ones."""

    def __init__(self, model: Any, family: Family) -> None:
        self._module: Any = getattr(hf_modules.decoder_stack(model), "rotary_emb", None)
        self.long_after = hf_modules.long_rope_after(model.config)
        self._interleaved, self._halved = family.interleaved_tables, family.halved_tables
        self._dtype = torch.promote_types(model.dtype, torch.float32)
        kinds = getattr(self._module, "rope_type", None)
        self._layer_types = list(kinds) if isinstance(kinds, dict) else [None]

    def number(self, layer_type: str) -> int | None:
        """Which of the tables the layers of this type use. None where there are none."""
        if self._module is None:
            return None
        return 0 if self._layer_types == [None] else self._layer_types.index(layer_type)

    @torch.inference_mode()
    def build(self, num_positions: int) -> list[list[tuple[Tensor, Tensor]]]:
        """For each type of layer a pair of tables [num_positions, rotary_dim / 2], or two where long texts have factors of
        their own."""
        if self._module is None:
            return []
        sizes = [num_positions]
        if self.long_after is not None:  # who sees one position beyond the short factors takes the long ones for everybody
            sizes = [self.long_after, max(num_positions, self.long_after + 1)]
        return [[self._table(size, layer_type) for size in sizes] for layer_type in self._layer_types]

    def _table(self, num_positions: int, layer_type: str | None) -> tuple[Tensor, Tensor]:
        which = {} if layer_type is None else {"layer_type": layer_type}
        positions = torch.arange(num_positions)[None]
        cosines, sines = self._module(torch.empty(1, dtype=self._dtype), positions, **which)
        if self._halved:
            return cosines[0], sines[0]
        half = cosines.shape[-1] // 2  # every number stands for a pair
        chosen = slice(None, None, 2) if self._interleaved else slice(half)
        return cosines[0, :, chosen], sines[0, :, chosen]


# --- FusedPass: the running states of a pass that the kernels compute as a whole.


class FusedPass:
    """Gives the kernels the states of all texts, and leaves to the texts what the kernels have written.

    A layer has the same cells here as under transformers: its convolution, and the matrices behind it.

    Args:
        batch: Its rows.
        mixers: By layer; None for layers without a running state.

    Attributes:
        rows: For the layers that run, what they read and leave; None for those without a running state.
    """

    def __init__(
        self,
        running: RunningPass,
        batch: RaggedBatch,
        mixers: Sequence[Mixer | None],
        layers: Sequence[int],
        real: torch.dtype,
    ) -> None:
        self._running, self._batch, self._real = running, batch, real
        self._left: list[tuple[CellRows, list[Tensor], dict[int, Tensor]]] = []
        self.rows = [self._opened(layer, mixers[layer]) for layer in layers]

    def leave(self) -> None:
        """The kernels have written all rows."""
        for part, tape, states in self._left:
            part.leave(tape, states)

    def _opened(self, layer: int, mixer: Mixer | None) -> MixerRows | None:
        if mixer is None:
            return None
        rows = MixerRows(mixer, self._batch.num_rows, self._real)
        windows = self._open(layer, 0, Convolution(mixer.taps.t()), (rows.inputs,))
        matrices = self._open(layer, 1, Recurrence(), rows.updates) if rows.updates else [None] * len(windows)
        for window, matrix, (first, _) in zip(windows, matrices, self._batch.row_spans, strict=True):
            rows.read(window.state, None if matrix is None else matrix.state)
            self._keep(window, rows.keep_windows(window.state, first, window.wanted), (rows.inputs,), first)
            if matrix is not None:
                self._keep(matrix, rows.keep_states(matrix.state, first, matrix.wanted), rows.updates, first)
        return rows

    def _open(self, layer: int, place: int, function: StateFunction, tape: tuple[Tensor, ...]) -> list[CellRows]:
        return self._running.open((layer, place), function, tape)

    def _keep(self, part: CellRows, states: dict[int, Tensor], tape: tuple[Tensor, ...], first: int) -> None:
        rows = [each[first : first + part.segment.num_rows] for each in tape]
        self._left.append((part, rows, states))
