"""LayerSpec: what one layer of a model keeps of a text, and how far back it looks. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StateKind(StrEnum):
    """What a layer keeps of a text between two passes."""

    KEYS_AND_VALUES = "keys and values"  # of every token, in a slot of its own
    RUNNING = "running state"  # one for the whole text, which every token changes
    CONVOLUTION = "convolution"  # the last few inputs
    SOURCE = "keys and values of a source"  # of every token that an encoder has read, in a slot of its own


@dataclass(frozen=True)
class LayerReach:
    """How far back a layer's attention looks.

    Attributes:
        window: Sliding window in tokens, the row itself included; None for no window.
        chunk: Chunked attention: rows see only positions of their own chunk of so many tokens; None for no chunks.
    """

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class LayerSpec:
    """One layer.

    Attributes:
        type_name: transformers' name for its type.
        keeps: What it keeps. A layer that attends beside a running state keeps several things.
        reach: How far its attention looks.
    """

    type_name: str
    keeps: frozenset[StateKind] = frozenset({StateKind.KEYS_AND_VALUES})
    reach: LayerReach = LayerReach()

    @property
    def forgets_rows(self) -> bool:
        """Whether rejected rows leave nothing behind. This is so where every token has a slot: then drafts may be trees of
        any size, and a text may begin with the slots of another text that begins alike."""
        return self.keeps <= {StateKind.KEYS_AND_VALUES, StateKind.SOURCE}
