"""Backends that live inside a transformers model: its own forward runs, and only attention is ours."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from outrider.model.attention.base import AttentionBackend
from outrider.model.context import ForwardContext, forward_context
from outrider.model.loader import LoadedModel


class HostedAttention(AttentionBackend):
    """Calls the model's forward, with whatever makes it attend over the KV pool."""

    def scope(self) -> AbstractContextManager[object]:
        """What the model's forward must run inside of."""
        return nullcontext()

    @abstractmethod
    def forward_kwargs(self, context: ForwardContext) -> dict[str, Any]:
        """Arguments, beside token and position ids, that the model's forward needs in this pass."""

    def forward(
        self, loaded: LoadedModel, context: ForwardContext, aux_layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
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
