"""Heads that read the target's features learn to continue what it computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.convert.head_files import write_head
from outrider.heads.formats.published import PublishedHead
from outrider.train.batches import Batch
from outrider.train.depths import Depth, Said, depth_loss, depth_overlaps
from outrider.train.features import Features
from outrider.train.losses import LossName
from outrider.train.manifest import Manifest
from outrider.train.settings import TrainSettings
from outrider.train.target import FrozenTarget
from outrider.train.trainee import HeadLearning, Overlaps, Trainee, chain_tau

_LOSSES = "Use forward_kl, reverse_kl, jsd, total_variation, cross_entropy or accepted_length."


class Design(NamedTuple):
    """A head that is to be trained.

    Attributes:
        method: That will draft with it.
        layers: The target's layers whose hidden states it reads, by transformers' index, low to high.
        tokens: [draft_vocab_size] the target's token for each of its own; None where they are the same.
        module: Runs the layers on whole texts, and returns logits [n, draft_vocab_size] by depth. Its arguments are
            embeddings [num_texts, num_tokens, hidden_size]; the target's hidden states [num_texts, num_tokens,
            target_hidden_size], low to high; by depth, whether a draft token is made from a row [num_texts, num_tokens];
            and the target's output layer. Row 0 has no feature before it, and is never asked.
        save: Writes it to a folder with the weights that the module has then.
        learnt: Draft tokens behind a row that it learns.
        most: Draft tokens behind a row that it can make; None for any number.
        rows: Rows of a text from which it drafts in a batch; None for all.
        facts: What the model card says of it besides.
    """

    method: str
    layers: tuple[int, ...]
    tokens: Tensor | None
    module: nn.Module
    save: Callable[[Path], None]
    learnt: int
    most: int | None
    rows: int | None
    facts: dict[str, Any]


def published_design(
    head: PublishedHead,
    form: str,
    target: FrozenTarget,
    module: nn.Module,
    learnt: int,
    *,
    most: int | None = None,
    rows: int | None = None,
    facts: dict[str, Any],
) -> Design:
    """The design of a head in a published format.

    Args:
        head: Its shape, its layers with the weights that training begins with, and its tokens.
        form: The format in which it is written.
        target: The target.
        module, learnt, most, rows, facts: As `Design` has them.
    """
    layers, save = head.config.layers_of(target.num_layers), partial(write_head, head=head, form=form)
    return Design(head.config.method, layers, head.tokens, module, save, learnt, most, rows, facts)


class FeatureHeadSettings(HeadLearning):
    """What a head learns; a subclass for each method says which head.

    Attributes:
        loss: How far its probabilities are from the target's.
        decay: What the loss of a draft token counts, relative to the one before.
    """

    loss: LossName | Literal["accepted_length"] = Field("forward_kl", description=_LOSSES)
    decay: float = Field(0.8, gt=0.0, le=1.0, description="Use a number above 0, up to 1.")

    def trainee(self, target: FrozenTarget, manifest: Manifest, data: Path, settings: TrainSettings) -> Trainee:
        torch.manual_seed(settings.seed)
        return TrainedFeatureHead(target, manifest, self, self.design(target, manifest, data), settings)

    def design(self, target: FrozenTarget, manifest: Manifest, data: Path) -> Design:
        """The head as training begins.

        Args:
            target: The target.
            manifest: Of the data.
            data: Their folder.

        Raises:
            InputError: The settings do not fit the target, or the data are damaged.
        """
        raise NotImplementedError


class OwnLayerSettings(FeatureHeadSettings):
    """A head whose layers are of a kind of their own.

    Attributes:
        feed_forward: Units of the feed-forward part of its layers; None takes as many as the target has.
    """

    feed_forward: int | None = Field(None, ge=1, description="Use 1 or more, or None.")


class TrainedFeatureHead(Trainee):
    """A head in training.

    Args:
        target: The target.
        manifest: Of the data.
        learning: What it learns.
        design: The head.
        settings: How the training runs.

    Raises:
        ContradictionError: The data do not hold what the teacher needs.
    """

    def __init__(
        self,
        target: FrozenTarget,
        manifest: Manifest,
        learning: FeatureHeadSettings,
        design: Design,
        settings: TrainSettings,
    ) -> None:
        self._target, self._learning, self._design = target, learning, design
        self._features = Features(target, manifest, settings.teacher, design.layers)
        self.rows = self._features.rows
        self._temperature = manifest.settings.temperature
        self._tokens = None if design.tokens is None else design.tokens.to(target.device)
        self.module = design.module.to(target.device).train()
        self.draft_vocab_size = None if design.tokens is None else len(design.tokens)
        wanted = settings.num_draft_tokens
        self._measured = wanted if design.most is None else min(wanted, design.most)
        self.reach = max(design.learnt, self._measured) + 1  # row 0 drafts nothing

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        depths, said = self._drafted(module, batch, batch.predicts, self._design.learnt, _any_rows)
        return depth_loss(self._learning.loss, depths, said, self._learning.decay)

    def overlaps(self, module: nn.Module, batch: Batch) -> Overlaps:
        return depth_overlaps(*self._drafted(module, batch, batch.writes, self._measured, _even_rows))

    def tau(self, acceptance: Sequence[float], num_draft_tokens: int) -> float:
        return chain_tau(acceptance[:num_draft_tokens])

    def save(self, folder: Path) -> None:
        self._design.save(folder)

    def speculation(self, folder: Path) -> dict[str, Any]:
        return {"method": self._design.method, "model": str(folder)}

    def facts(self) -> dict[str, Any]:
        return {
            "kind": f"{self._design.method} head",
            "parameters": sum(each.numel() for each in self.module.parameters() if each.requires_grad),
            "hidden states of the target that it reads": ", ".join(map(str, self._design.layers)),
            **self._design.facts,
            "draft tokens that it learns behind a token": self._design.learnt,
            "loss": self._learning.loss,
        }

    def _drafted(
        self,
        module: nn.Module,
        batch: Batch,
        rows_of: Callable[[int], Tensor],
        depth: int,
        choose: Callable[[Tensor, int], Tensor],
    ) -> tuple[list[Depth], Said]:
        """So many draft tokens behind the rows that `rows_of` has for tokens so far ahead, and what the target says. Where
        drafts begin at some rows only, `choose` takes these."""
        states, logits = self._features.read(batch)
        embeddings = self._target.embed(batch.token_ids).float()
        chosen = rows_of(1) & (torch.arange(batch.token_ids.shape[1], device=embeddings.device) > 0)
        if self._design.rows is not None:
            chosen = choose(chosen, self._design.rows)
        wanted = [rows_of(ahead) & chosen for ahead in range(1, depth + 1)]
        hidden = [states[layer].float() for layer in self._design.layers]
        drafted = module(embeddings, hidden, wanted, self._target.head)
        depths = [Depth(own, rows, ahead) for ahead, (own, rows) in enumerate(zip(drafted, wanted, strict=True), 1)]
        return depths, Said(batch, logits, self._temperature, self._tokens)


def _any_rows(rows: Tensor, most: int) -> Tensor:
    """So many of the rows of each text, drawn without preference: [num_texts, num_tokens]."""
    drawn = torch.rand(rows.shape, device=rows.device).masked_fill(~rows, -1.0)
    count = min(most, rows.shape[1])
    return rows & (drawn >= drawn.topk(count, 1).values[:, -1:])


def _even_rows(rows: Tensor, most: int) -> Tensor:
    """So many of the rows of each text, as evenly spread as can be: [num_texts, num_tokens]."""
    number, count = rows.cumsum(1), rows.sum(1, keepdim=True).clamp(min=1)
    return rows & ((number * most) // count > ((number - 1) * most) // count)
