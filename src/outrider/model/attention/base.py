"""What an attention backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from outrider.kernels.linear import packed_for
from outrider.model.context import ForwardContext
from outrider.model.loader import LoadedModel


class AttentionBackend(ABC):
    """Computes a model's passes over the KV pool of a ForwardContext."""

    name: ClassVar[str]

    @abstractmethod
    def install(self, model: Any) -> None:
        """Prepare `model`; raises ValueError where it cannot be driven this way."""

    def uninstall(self) -> None:
        """Undo what would keep another backend from driving the model."""
        return

    def weight_bytes(self, model: Any) -> int | None:
        """Bytes of weights that a pass reads, where the backend knows better than the model's parameters say."""
        return None

    def instruction_set(self, model: Any) -> str | None:
        """Of our kernels, where they have a part in a pass; None where all operators are stock ones."""
        return packed_for(model)

    @abstractmethod
    def forward(
        self, loaded: LoadedModel, context: ForwardContext, aux_layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """One pass: logits [num_logits, vocab_size], and hidden states [num_rows, hidden_size] by index."""
