"""Backends that live inside a transformers model: its own forward runs, and only attention is ours."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from outrider.model import hf, hf_encoder
from outrider.model.backends.base import AttentionBackend, PartialPass, PassOutput
from outrider.model.context import ForwardContext, forward_context
from outrider.model.loading.loaded_model import LoadedModel


class HostedAttention(AttentionBackend):
    """Calls the model's forward, with whatever makes it attend over the KV pool."""

    @abstractmethod
    def forward_kwargs(self, context: ForwardContext) -> dict[str, Any]:
        """Arguments, beside token and position ids, that the model's forward needs in this pass."""

    def forward(
        self, loaded: LoadedModel, context: ForwardContext, aux_layers: Sequence[int], part: PartialPass | None = None
    ) -> PassOutput:
        batch = context.batch
        kwargs = self.forward_kwargs(context)
        if loaded.slices_logits:
            kwargs["logits_to_keep"] = batch.logits_rows
        if aux_layers:
            kwargs["output_hidden_states"] = list(aux_layers)
        chosen = nullcontext() if part is None else hf.some_layers(loaded.model, part.layers, part.hidden)
        with forward_context(context), self.scope(), chosen as tap:
            if context.sources is None:
                out = loaded.model(input_ids=batch.input_ids, position_ids=batch.position_ids, **kwargs)
            else:
                out = hf_encoder.decode(loaded.model, batch.input_ids, context.sources, **kwargs)
        logits = out.logits[0] if loaded.slices_logits else out.logits[0, batch.logits_rows]
        seen = out.hidden_states if context.sources is None else out.decoder_hidden_states
        aux = {layer: seen[layer][0] for layer in aux_layers}
        return PassOutput(logits, aux, None if tap is None else tap.hidden)

    def embed(self, loaded: LoadedModel, token_ids: Tensor) -> Tensor:
        rows: Tensor = loaded.model.get_input_embeddings()(token_ids)
        return rows

    def norm(self, loaded: LoadedModel, hidden: Tensor) -> Tensor:
        with self.scope():
            return hf.final_norm(loaded.model, hidden)

    def head(self, loaded: LoadedModel, hidden: Tensor) -> Tensor:
        with self.scope(), hf.only_head(loaded.model, hidden):
            tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=loaded.device)
            logits: Tensor = loaded.model(input_ids=tokens, use_cache=False).logits[0]
        return logits
