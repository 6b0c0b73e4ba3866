"""The KV tensors behind the block tables, and what one layer keeps of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from outrider.kernels.triton.devices import runs_on

# --- The KV tensors behind the block tables.


#: Which slots of the pool hold a context: a slice where they are consecutive (read without a copy), else their indices.
Slots = slice | Tensor


class KVPool:
    """Keys and values of every layer, one slot a token, written by slot and read by slot.

    Layers come to be on their first write, with the shapes of the tensors that the model hands over: under tensor
    parallelism, latent attention or mixed head sizes the configuration would be wrong.

    Args:
        owners: The layers whose keys and values other layers read, by these. They write the same to the same slots.
    """

    def __init__(self, num_slots: int, owners: Mapping[int, int] | None = None) -> None:
        self.num_slots = num_slots
        self._owners = owners or {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def layers(self) -> list[int]:
        """Layers that have been written, without those that read what others wrote."""
        return sorted(self._layers)

    def write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """Store the KV of new rows; returns the layer's memory, see `memory`.

        Args:
            keys: [num_rows, num_kv_heads, head_dim]
            values: [num_rows, num_kv_heads, value_dim]
            slot_mapping: [num_rows] slot of each row.
        """
        memory = self.memory(layer, keys, values)
        if runs_on(keys.device):
            from outrider.kernels.triton.attention import write_rows  # which imports Triton

            write_rows(keys, values, *memory, slot_mapping)
            return memory
        for store, rows in zip(memory, (keys, values), strict=True):
            store.index_copy_(0, slot_mapping, rows)
        return memory

    def memory(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots of a layer, [num_slots, ...] each, made on first use to hold rows [num_rows, ...]
        such as these."""
        layer = self._owners.get(layer, layer)
        if layer not in self._layers:
            # Uninitialised on purpose: memory is paged in as it is used, and no slot is read before it is written.
            self._layers[layer] = (
                keys.new_empty((self.num_slots, *keys.shape[1:])),
                values.new_empty((self.num_slots, *values.shape[1:])),
            )
        return self._layers[layer]

    def read(self, layer: int, slots: Slots) -> tuple[Tensor, Tensor]:
        """Keys [num_slots, num_kv_heads, head_dim] and values of the given slots."""
        keys, values = self._layers[self._owners.get(layer, layer)]
        return keys[slots], values[slots]

    @torch.inference_mode()  # the tensors were made in a forward pass, and such may be changed nowhere else
    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy slots onto others in every layer, all sources read before any destination is written."""
        if not sources:
            return
        for stores in self._layers.values():
            for store in stores:
                source = torch.tensor(sources, device=store.device)
                store[torch.tensor(destinations, device=store.device)] = store[source]

    def bytes_per_slot(self) -> int:
        """Bytes that one token takes over all layers seen so far."""
        return sum(t[0].numel() * t.element_size() for pair in self._layers.values() for t in pair)


# --- LayerSpec: what one layer of a model keeps of a text, and how far back it looks. No torch.


class StateKind(StrEnum):
    """Holds what a layer keeps of a text between two passes."""

    KEYS_AND_VALUES = "keys and values"  # of every token, in a slot of its own
    RUNNING = "running state"  # one for the whole text, which every token changes
    CONVOLUTION = "convolution"  # the last few inputs
    SOURCE = "keys and values of a source"  # of every token that an encoder has read, in a slot of its own


@dataclass(frozen=True)
class LayerReach:
    """Says how far back a layer's attention looks."""

    window: int | None = None  # sliding window in tokens, the row itself included; None for no window
    # Chunked attention: rows see only positions of their own chunk of so many tokens; None for no chunks.
    chunk: int | None = None


@dataclass(frozen=True)
class LayerSpec:
    """One layer."""

    type_name: str  # transformers' name for its type
    # What it keeps. A layer that attends beside a running state keeps several things.
    keeps: frozenset[StateKind] = frozenset({StateKind.KEYS_AND_VALUES})
    reach: LayerReach = LayerReach()  # how far its attention looks

    @property
    def forgets_rows(self) -> bool:
        """Tells whether rejected rows leave nothing behind. This is so where every token has a slot: then drafts may be
        trees of any size, and a text may begin with the slots of another text that begins alike."""
        return self.keeps <= {StateKind.KEYS_AND_VALUES, StateKind.SOURCE}
