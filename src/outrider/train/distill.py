"""A draft model learns its target's probabilities (DistillSpec, Zhou et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.errors import ContradictionError
from outrider.train.batches import Batch
from outrider.train.losses import NEEDS_ALL_TOKENS, LossName, divergence, overlap
from outrider.train.models import save_model
from outrider.train.target import FrozenTarget, Teacher
from outrider.train.trainee import Overlaps, Trainee, chain_tau
from outrider.validation import Frozen


class DistillSettings(Frozen):
    """What is learnt, and on whose texts.

    Attributes:
        loss: How far the draft's probabilities are from the target's.
        on_policy: Share of the batches whose texts the draft itself writes behind the prompts. There it learns what the
            target says where the draft leads.
    """

    loss: LossName = Field("forward_kl", description="Use forward_kl, reverse_kl, jsd, total_variation or cross_entropy.")
    on_policy: float = Field(0.0, ge=0.0, le=1.0, description="Use a share of the batches, 0 to 1.")

    def check(self, source: str) -> None:
        """Raise ContradictionError where the target's probabilities, as they come, do not serve."""
        if self.on_policy and source != "forward":
            problem = "the data do not hold what the target says of texts that the draft writes"
            raise ContradictionError("on_policy", self.on_policy, problem, "Use teacher='forward'.")
        if self.loss in NEEDS_ALL_TOKENS and source == "top_k":
            problem = "it needs the probabilities of all tokens, and the data hold the most likely ones"
            raise ContradictionError("loss", self.loss, problem, "Use another loss, or another teacher.")


class DistilledDraft(Trainee):
    """A draft model in training.

    Args:
        model: The model of transformers that learns.
        tokenizer: That of the target; None where it has none.
        target: The target.
        teacher: What it says.
        settings: What is learnt.
        temperature: That the texts are written at.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None,
        target: FrozenTarget,
        teacher: Teacher,
        settings: DistillSettings,
        temperature: float,
    ) -> None:
        self.module = model
        self.rows = teacher.rows
        self._tokenizer = tokenizer
        self._target = target
        self._teacher = teacher
        self._settings = settings
        self._temperature = temperature

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        if self._settings.on_policy and float(torch.rand(())) < self._settings.on_policy:
            batch = write_on(self.module, batch, self._temperature)
        rows = batch.predicts()
        logits = module(input_ids=batch.token_ids, use_cache=False).logits[rows]
        tokens = batch.token_ids[:, 1:][rows[:, :-1]]
        from_texts_alone = self._settings.loss == "cross_entropy"
        target = logits if from_texts_alone else self._teacher.logits(batch, rows)
        return divergence(self._settings.loss, target, logits, tokens, self._temperature).mean()

    def overlaps(self, module: nn.Module, batch: Batch) -> Overlaps:
        rows = batch.writes()
        logits = module(input_ids=batch.token_ids, use_cache=False).logits[rows]
        found = overlap(self._teacher.logits(batch, rows), logits, self._temperature)
        return Overlaps(found.sum()[None].double(), torch.tensor([len(found)]))

    def tau(self, acceptance: Sequence[float], num_draft_tokens: int) -> float:
        return chain_tau([acceptance[0]] * num_draft_tokens)

    def save(self, folder: Path) -> None:
        save_model(self.module, self._tokenizer, folder, self._target.model.dtype)

    def speculation(self, folder: Path) -> dict[str, Any]:
        return {"method": "draft_model", "model": str(folder)}

    def facts(self) -> dict[str, Any]:
        config: Any = self.module.config
        return {
            "kind": "draft model",
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "shape": f"{config.model_type}, {config.num_hidden_layers} layers, {config.hidden_size} wide",
            "loss": self._settings.loss,
            "share of batches that the draft writes": self._settings.on_policy,
        }


@torch.no_grad()
def write_on(model: Any, batch: Batch, temperature: float) -> Batch:
    """The same prompts with continuations that `model` draws, as long as the batch is.

    All prompts are cut to the shortest one, so that every text grows by one token at a time.
    """
    length = batch.token_ids.shape[1]
    start = max(1, min(int(batch.num_prompt_tokens.min()), length - 1))
    tokens = batch.token_ids[:, :start]
    out = model(input_ids=tokens, use_cache=True)
    while True:
        logits = out.logits[:, -1].float()
        if temperature == 0.0:
            drawn = logits.argmax(-1, keepdim=True)
        else:
            drawn = torch.multinomial(torch.softmax(logits / temperature, -1), 1)
        tokens = torch.cat([tokens, drawn], 1)
        if tokens.shape[1] == length:
            return Batch(tokens, torch.full_like(batch.lengths, length), torch.full_like(batch.lengths, start))
        out = model(input_ids=drawn, past_key_values=out.past_key_values, use_cache=True)
