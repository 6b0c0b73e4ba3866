"""The target as a proposer may use it: facts, embeddings, head, and some of its layers over its own KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.cache.lease import KVLease
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.model.backends.base import PartialPass
from outrider.model.batch import Segment
from outrider.model.runner import ForwardOutput, ModelRunner, wide


class Target:
    """A handle on the target. No module of the model leaves it: where our kernels run, the modules hold no weights.

    Args:
        runner: The target's.

    Attributes:
        name: Path or hub id.
        tokenizer: Its tokenizer, if any.
        vocab_size: Width of its logits.
        hidden_size: Width of its hidden states.
        num_layers: Decoder layers.
        max_model_len: Longest sequence.
        dtype: Of its weights.
        device: Where it lies.
    """

    def __init__(self, runner: ModelRunner) -> None:
        loaded = runner.loaded
        config = loaded.model.config.get_text_config(decoder=True)
        self._runner = runner
        self.name = loaded.name
        self.tokenizer: Any | None = loaded.tokenizer
        self.vocab_size = loaded.vocab_size
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.max_model_len = loaded.max_model_len
        self.dtype = loaded.dtype
        self.device = loaded.device

    @torch.inference_mode()
    def embed(self, token_ids: Tensor | Sequence[int]) -> Tensor:
        """Rows of the embedding table, as the model's layers would be given them through `inputs_embeds`.

        Args:
            token_ids: [n]

        Returns:
            [n, hidden_size]

        Raises:
            InvalidParameterError: A token is outside the vocabulary.
        """
        tokens = torch.as_tensor(token_ids, dtype=torch.long, device=self.device)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            worst = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
            remedy = f"Use ids from 0 to {self.vocab_size - 1}."
            raise InvalidParameterError("token_ids", worst, "token id outside the vocabulary", remedy)
        return self._runner.backend.embed(self._runner.loaded, tokens)

    @torch.inference_mode()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of hidden states [n, hidden_size] as a layer leaves them.

        Raises:
            InvalidParameterError: They have another width.
        """
        return self._runner.backend.norm(self._runner.loaded, self._checked(hidden))

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden_size] that have passed the final norm; float32 at least.

        Raises:
            InvalidParameterError: They have another width.
        """
        return wide(self._runner.backend.head(self._runner.loaded, self._checked(hidden)))

    def rows(
        self,
        kv: KVLease,
        token_ids: Sequence[int],
        start: int,
        parents: tuple[int, ...] | None = None,
        *,
        logits_from: int = 0,
    ) -> Segment:
        """Rows of one sequence for `run`, behind those that its KV holds already.

        Args:
            kv: The sequence's, from `ProposerSequence.kv`.
            token_ids: Tokens to compute.
            start: Position of the first.
            parents: Which row each one follows, -1 for what stands before `start`; None for a chain.
            logits_from: First row whose logits are wanted; len(token_ids) for none.

        Raises:
            ContradictionError: The rows would change KV of the text, or have no room in the sequence's blocks.
        """
        if start < kv.num_computed:
            problem = f"the KV of {kv.num_computed} tokens is part of the text and may not be written"
            raise ContradictionError("start", start, problem, f"Start at {kv.num_computed} or later.")
        if start + len(token_ids) > kv.capacity:
            problem = f"{len(token_ids)} rows behind {start} tokens, and the sequence has blocks for {kv.capacity}"
            raise ContradictionError("token_ids", list(token_ids), problem, "Stay within the budget of the request.")
        return Segment(token_ids, start, kv.block_table, parents, logits_from, long_rope=kv.long_rope)

    def run(
        self,
        segments: Sequence[Segment],
        *,
        layers: Sequence[int] | None = None,
        resume_from: Tensor | None = None,
        aux_layers: Sequence[int] = (),
    ) -> ForwardOutput:
        """Compute rows through some of the layers, then the final norm and the head; KV goes to the target's own memory.

        What is written behind the text's tokens is written again by the target's own pass.

        Args:
            segments: Made by `rows`.
            layers: Which layers run, in ascending order; None runs all.
            resume_from: [num_rows, hidden_size] what the layers before the first of `layers` left (`ForwardOutput.hidden`
                of an earlier run); None begins with the embeddings.
            aux_layers: Inputs of these layers are returned too, by index as transformers counts them.

        Returns:
            Logits of the wanted rows, and `hidden` as the last of `layers` left it.

        Raises:
            InvalidParameterError: A layer that the model has not, or hidden states of another shape.
        """
        chosen = tuple(range(self.num_layers)) if layers is None else tuple(layers)
        self._check_layers("layers", chosen, self.num_layers)
        self._check_layers("aux_layers", tuple(sorted(aux_layers)), self.num_layers + 1)
        num_rows = sum(segment.num_rows for segment in segments)
        hidden = None if resume_from is None else self._checked(resume_from, num_rows)
        return self._runner.forward(segments, aux_layers, PartialPass(chosen, hidden))

    def _check_layers(self, field: str, layers: tuple[int, ...], count: int) -> None:
        for layer in layers:
            if not 0 <= layer < count:
                problem = f"the target has {self.num_layers} layers"
                raise InvalidParameterError(field, layer, problem, f"Use 0 to {count - 1}.")
        if list(layers) != sorted(set(layers)):
            raise InvalidParameterError(field, list(layers), "not in ascending order", "Sort them, each once.")

    def _checked(self, hidden: Tensor, num_rows: int | None = None) -> Tensor:
        fits = hidden.ndim == 2 and hidden.shape[1] == self.hidden_size
        if not fits or (num_rows is not None and len(hidden) != num_rows):
            rows = "n" if num_rows is None else num_rows
            raise InvalidParameterError(
                "hidden", list(hidden.shape), "hidden states of another shape", f"Use [{rows}, {self.hidden_size}]."
            )
        return hidden.to(self.device)
