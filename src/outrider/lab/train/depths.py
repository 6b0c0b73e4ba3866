"""Draft tokens of several depths, compared with what the target says there, within a draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.lab.train.batches import Batch
from outrider.lab.train.settings import Overlaps, Trainee, divergence, overlap
from outrider.records import Manifest, read_records

#: The loss that looks at all depths of a draft together.
ACCEPTED_LENGTH = "accepted_length"
#: Keeps the logarithm finite where two laws have nothing in common.
_LEAST = 1e-6


class Depth(NamedTuple):
    """Draft tokens that stand equally far ahead."""

    logits: Tensor  # [n, draft_vocab_size] of what drafts
    rows: Tensor  # [num_texts, num_tokens] whether a draft is made from this row; n of them
    # Tokens by which the draft token is ahead of its row. What the target says of it stands ahead - 1 rows later.
    ahead: int


class Said(NamedTuple):
    """Holds what the target says of a batch."""

    batch: Batch  # the texts
    logits: Tensor  # [num_texts, num_tokens, vocab_size]; row i speaks of token i + 1
    temperature: float  # that the texts are written at
    # [draft_vocab_size] the target's token for each of the draft's; None where they are the same.
    tokens: Tensor | None = None

    def at(self, depth: Depth) -> Tensor:
        """[n, vocab_size] the logits that the draft tokens of a depth are compared with."""
        return shifted(self.logits, depth.ahead - 1)[depth.rows]

    def overlap(self, depth: Depth) -> Tensor:
        """[n] the chance that the token rule accepts."""
        return overlap(self.at(depth), depth.logits, self.temperature, self.tokens)


class HeadTrainee(Trainee):
    """Heads on the frozen target, whose draft tokens are compared with what the target says, depth by depth."""

    loss_name: str  # how far its probabilities are from the target's
    decay: float  # what the loss of a draft token counts, relative to the one before
    method: str  # that will draft with them

    def drafted(self, module: nn.Module, batch: Batch, *, learn: bool) -> tuple[list[Depth], Said]:
        """Draft tokens of several depths, and what the target says, in rows to learn from or as the engine drafts."""
        raise NotImplementedError

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return depth_loss(self.loss_name, *self.drafted(module, batch, learn=True), self.decay)

    def overlaps(self, module: nn.Module, batch: Batch) -> Overlaps:
        depths, said = self.drafted(module, batch, learn=False)
        sums = [said.overlap(depth).sum().double() for depth in depths]
        return Overlaps(torch.stack(sums), torch.tensor([len(depth.logits) for depth in depths]))

    def speculation(self, folder: Path) -> dict[str, Any]:
        return {"method": self.method, "model": str(folder)}


def depth_loss(name: str, depths: Sequence[Depth], said: Said, decay: float) -> Tensor:
    """The loss of a draft."""
    if name == ACCEPTED_LENGTH:
        return _accepted_length(depths, said)
    total, weight = depths[0].logits.new_zeros(()), 1.0
    for depth in depths:
        tokens = shifted(said.batch.token_ids, depth.ahead)[depth.rows]
        found = divergence(name, said.at(depth), depth.logits, tokens, said.temperature, said.tokens)
        if len(found):
            total = total + weight * found.mean()
        weight *= decay
    return total


def _accepted_length(depths: Sequence[Depth], said: Said) -> Tensor:
    """Minus the logarithm of the share of its draft tokens that a draft is expected to bring through: a1 + a1 a2 + ..., as
    Leviathan et al. (2023) add them up, over their number. With one depth this is a loss of Samarin et al. (2026)."""
    rows = depths[0].rows
    stands = torch.ones(rows.shape, device=rows.device)
    expected, reached = torch.zeros_like(stands), torch.zeros_like(stands)
    scale = said.temperature or 1.0  # greedy decoding gives no gradient, and the order of tokens is the same
    for depth in depths:
        chances = overlap(said.at(depth), depth.logits, scale, said.tokens)
        stands = stands * torch.zeros_like(stands).masked_scatter(depth.rows, chances)
        expected, reached = expected + stands, reached + depth.rows
    return -torch.log(expected[rows] / reached[rows] + _LEAST).mean()


def shifted(values: Tensor, by: int) -> Tensor:
    """Column i holds what column i + by held; the last columns, which nobody may read, repeat the last one."""
    length = values.shape[1]
    columns = torch.arange(length, device=values.device) + by
    return values[:, columns.clamp(max=length - 1)]


# --- The tokens that a head drafts: those that the training texts hold most often.


class DraftVocabulary(NamedTuple):
    """Some of the target's tokens."""

    tokens: Tensor | None  # [size] in ascending order; None for all
    share: float  # how many of the tokens to be learnt are among them


def frequent_tokens(folder: Path, manifest: Manifest, size: int) -> DraftVocabulary:
    """The most frequent tokens of what the target wrote in texts that are not held out. Of tokens that are equally frequent
    the smaller number goes first."""
    vocab_size = manifest.target.vocab_size
    if size >= vocab_size:
        return DraftVocabulary(None, 1.0)
    counts = token_counts(folder, manifest)
    chosen = torch.sort(counts, descending=True, stable=True).indices[:size]
    return DraftVocabulary(chosen.sort().values, float(counts[chosen].sum() / counts.sum().clamp(min=1)))


def token_counts(folder: Path, manifest: Manifest) -> Tensor:
    """[vocab_size] how often the target wrote each token in texts that are not held out."""
    counts = torch.zeros(manifest.target.vocab_size, dtype=torch.long)
    for record in read_records(folder, manifest):
        if not record.held_out:
            first = record.num_prompt_tokens if manifest.settings.max_tokens else 1
            counts += torch.bincount(record.token_ids[first:], minlength=len(counts))
    return counts
