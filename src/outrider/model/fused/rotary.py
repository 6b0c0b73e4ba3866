"""Rotary tables for the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.model import hf
from outrider.model.fused.family import Family


class RotaryTables:
    """Cosines and sines by position, from the model's own module. Layers of different types may have different ones."""

    def __init__(self, model: Any, family: Family) -> None:
        self._module: Any = getattr(hf.decoder_stack(model), "rotary_emb", None)
        self.long_after = hf.long_rope_after(model.config)
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
