"""What an attention backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor

from outrider.model.context import ForwardContext, forward_context
from outrider.model.loader import LoadedModel


class AttentionBackend(ABC):
    """Makes a transformers model attend over the KV pool of a ForwardContext."""

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

    def scope(self) -> AbstractContextManager[object]:
        """What the model's forward must run inside of."""
        return nullcontext()

    @abstractmethod
    def forward_kwargs(self, context: ForwardContext) -> dict[str, Any]:
        """Arguments, beside token and position ids, that the model's forward needs in this pass."""

    def forward(
        self, loaded: LoadedModel, context: ForwardContext, aux_layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """One pass: logits [num_logits, vocab_size], and hidden states [num_rows, hidden_size] by index."""
        batch = context.batch
        kwargs = self.forward_kwargs(context)
        if loaded.slices_logits:
            kwargs["logits_to_keep"] = batch.logits_rows
        if aux_layers:
            kwargs["output_hidden_states"] = list(aux_layers)
        with forward_context(context), self.scope():
            out = loaded.model(input_ids=batch.input_ids, position_ids=batch.position_ids, **kwargs)
        logits = out.logits[0] if loaded.slices_logits else out.logits[0, batch.logits_rows]
        return logits, {layer: out.hidden_states[layer][0] for layer in aux_layers}
