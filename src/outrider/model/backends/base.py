"""The interface of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from outrider.kernels.linear import packed_for
from outrider.model.context import ForwardContext
from outrider.model.loading.loaded_model import LoadedModel


@dataclass(frozen=True)
class PartialPass:
    """A pass through some of a model's layers.

    Attributes:
        layers: Which of them run, in ascending order; none are possible.
        hidden: [num_rows, hidden_size] what the first of them reads; None begins with the embeddings.
    """

    layers: tuple[int, ...]
    hidden: Tensor | None = None


@dataclass(frozen=True)
class PassOutput:
    """What a pass computed.

    Attributes:
        logits: [num_logits, vocab_size]
        aux_hidden_states: By index as transformers counts them: [num_rows, hidden_size].
        hidden: [num_rows, hidden_size] as the last layer that ran left them, before the final norm; for a partial pass.
    """

    logits: Tensor
    aux_hidden_states: dict[int, Tensor]
    hidden: Tensor | None = None


class AttentionBackend(ABC):
    """Computes a model's passes over the KV pool of a ForwardContext.

    Attributes:
        invariant: Whether a row's bits are a function of its text, and not of the rows that are computed with it.
    """

    name: ClassVar[str]
    invariant: bool = False

    @property
    def may_be_invariant(self) -> bool:
        """Whether it is worth a probe to find out if its bits hold; known once it has run."""
        return False

    @abstractmethod
    def install(self, model: Any) -> None:
        """Prepare `model`; raises ValueError where it cannot be driven this way."""

    def uninstall(self) -> None:
        """Undo what would keep another backend from driving the model."""
        return

    def scope(self) -> AbstractContextManager[object]:
        """What modules of the model must run inside of."""
        return nullcontext()

    def weight_bytes(self, model: Any) -> int | None:
        """Bytes of weights that a pass reads, where the backend knows better than the model's parameters say."""
        return None

    def instruction_set(self, model: Any) -> str | None:
        """Of our kernels, where they have a part in a pass; None where all operators are stock ones."""
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
    def head(self, loaded: LoadedModel, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] of normed hidden states [n, hidden_size], scaled and capped as the model does it."""
