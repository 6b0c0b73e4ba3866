"""What an attention backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from outrider.model.context import ForwardContext


class AttentionBackend(ABC):
    """Makes a transformers model attend over the KV pool of a ForwardContext."""

    name: ClassVar[str]

    @abstractmethod
    def install(self, model: Any) -> None:
        """Prepare `model`; raises ValueError where it cannot be driven this way."""

    def scope(self) -> AbstractContextManager[object]:
        """What the model's forward must run inside of."""
        return nullcontext()

    @abstractmethod
    def forward_kwargs(self, context: ForwardContext) -> dict[str, Any]:
        """Arguments, beside token and position ids, that the model's forward needs in this pass."""
